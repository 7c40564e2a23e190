"""Hashes of tokens, identical byte for byte to those of NVIDIA Dynamo.

A local hash is xxh3_64 of a block's tokens, u32 little-endian, with the seed. The first sequence hash is the first
local hash; each further one is xxh3_64 of the previous sequence hash and the block's own local hash, u64 little-endian
each, with seed 1337. The seed of local hashes is 1337 plus xxh3_64 of the LoRA adapter's name (with seed 0) plus
xxh3_64 of the namespace (with seed 1), modulo 2^64. A request's cache salt adds xxh3_64 of it (with seed 2) to the seed
of the first block only; the chain carries it on to the others.

What lives here: local and sequence hashes, their seeds, and the tokens that stand for images. What must not: which rank
holds a block. A sequence hash names a whole prefix and is the same on every worker; a local hash names one block's
tokens.

The loops are compiled (streams.core.kernels.xxh3). In a simulated engine, which does without numba, the xxhash package
computes the same results about thirty times slower; `KERNELS_AVAILABLE` is False then.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from streams.core.ids import U32_MAX, U64_MASK, HashArray, SequenceHash
from streams.core.kernels.available import kernels_available
from streams.errors import BlockSizeMismatch, InvalidRequest

KERNELS_AVAILABLE = kernels_available()
if KERNELS_AVAILABLE:
    from streams.core.kernels.xxh3 import chain_blocks, hash_blocks

#: Dynamo's seed. Using the same one makes our hashes comparable with those of every Dynamo component.
BASE_SEED = 1337

#: What callers may pass as tokens. Bytes are u32 little-endian, as on the wire.
Tokens: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer[Any]] | bytes | bytearray | memoryview"

#: uint32[n], little-endian, contiguous and aligned.
TokenArray: TypeAlias = "npt.NDArray[np.uint32]"

#: Pad values begin here, above the vocabularies of models, and span 2^30. Dynamo uses the same numbers; with others,
#: hashes would differ.
PAD_BASE = 1_000_000
PAD_MASK = (1 << 30) - 1

#: Characters of a digest of 32 bytes in hexadecimal.
_HEX_DIGEST_CHARS = 64

_BYTES_PER_TOKEN = 4
_BYTES_PER_HASH = 8
_U32_LE = np.dtype("<u4")
_U64_LE = np.dtype("<u8")
_NO_HASHES = np.empty(0, dtype=np.uint64)


class Placeholder(NamedTuple):
    """The tokens of a prompt that stand for one image, video or sound; `mm_hash` identifies its content."""

    offset: int  # index of the first token
    length: int  # number of tokens
    mm_hash: int  # u64


def hash_seed(lora_name: str | None = None, namespace: str | None = None) -> int:
    """Compute the seed for a LoRA adapter and a namespace; None and "" both mean none.

    Raises InvalidRequest.
    """
    seed = BASE_SEED
    if lora_name is not None:
        seed += _name_digest("lora_name", lora_name, 0)
    if namespace is not None:
        seed += _name_digest("namespace", namespace, 1)
    return seed & U64_MASK


def salted_seed(seed: int, cache_salt: str | None = None) -> int:
    """Compute the seed of the first block of a prompt with a cache salt; None and "" both mean none.

    All further blocks have the seed itself. Raises InvalidRequest.
    """
    return seed if cache_salt is None else seed + _name_digest("cache_salt", cache_salt, 2) & U64_MASK


def content_hash(identifier: str) -> int:
    """Compute the u64 hash of an image or other content from the identifier that an engine has for it.

    The first 16 digits of a SHA-256 or BLAKE3 digest in hexadecimal, as Dynamo has it; xxh3_64 of any other text.
    """
    digits = identifier[:16] if len(identifier) == _HEX_DIGEST_CHARS else ""
    if digits and all(digit in "0123456789abcdefABCDEF" for digit in identifier):
        return int(digits, 16)
    return xxhash.xxh3_64_intdigest(identifier.encode())


def _name_digest(what: str, name: str, seed: int) -> int:
    if not isinstance(name, str):
        raise InvalidRequest(f"{what} is a {type(name).__name__}, not text")
    try:
        return xxhash.xxh3_64_intdigest(name.encode(), seed) if name else 0
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"{what} cannot be encoded as UTF-8: {exc.reason}") from exc


def pack_tokens(tokens: Tokens) -> bytes:
    """Pack tokens as u32 little-endian bytes.

    tokens: integers in 0..2^32-1, or bytes that are u32 little-endian already.
    Raises InvalidRequest for a value outside u32 (naming it) and for a number of bytes that is not a multiple of 4.
    """
    words = _token_array(tokens)
    return tokens if isinstance(tokens, bytes) else words.tobytes()


def local_hashes(
    tokens: Tokens,
    block_size: int,
    seed: int = BASE_SEED,
    *,
    eagle: bool = False,
    first_seed: int | None = None,
) -> HashArray:
    """Hash each full block of `block_size` tokens; a partial last block is dropped.

    eagle: hash windows of block_size + 1 tokens, which begin block_size tokens apart, as EAGLE drafts need them.
    first_seed: of the first block, if it differs from the others' (see `salted_seed`).
    Returns uint64[n_tokens // block_size]; with eagle, uint64[(n_tokens - 1) // block_size].
    Raises BlockSizeMismatch, InvalidRequest.
    """
    local = _hash(tokens, block_size, seed, eagle, chained=False)[0]
    if first_seed is not None and first_seed != seed:
        _hash_first(local, tokens, block_size, first_seed, eagle)
    return local


def request_hashes(
    tokens: Tokens,
    block_size: int,
    seed: int = BASE_SEED,
    *,
    eagle: bool = False,
    first_seed: int | None = None,
) -> tuple[HashArray, HashArray]:
    """Compute the local and sequence hashes of a whole request in one pass over the tokens.

    Returns the results of `local_hashes` and of `sequence_hashes` for them: uint64[n_blocks] each.
    Raises BlockSizeMismatch, InvalidRequest.
    """
    local, chain = _hash(tokens, block_size, seed, eagle, chained=True)
    if first_seed is None or first_seed == seed:
        return local, chain
    _hash_first(local, tokens, block_size, first_seed, eagle)
    return local, sequence_hashes(local)


def _hash_first(local: HashArray, tokens: Tokens, block_size: int, first_seed: int, eagle: bool) -> None:
    """Replace the first local hash by one with another seed."""
    if len(local):
        first = _token_array(tokens)[: block_size + eagle]
        local[0] = _hash(first, block_size, first_seed, eagle, chained=False)[0][0]


def sequence_hashes(local: HashArray, parent: SequenceHash | None = None) -> HashArray:
    """Chain local hashes into sequence hashes, from the root or from `parent`.

    local: uint64[n_blocks]; returns uint64[n_blocks]; n_blocks may be 0. Raises InvalidRequest.
    """
    own = local
    if not (type(local) is np.ndarray and local.dtype is _U64_LE and local.ndim == 1 and local.flags.carray):
        own = np.ascontiguousarray(_hash_array(local))
        own = own if own.flags.aligned else own.copy()
    if parent is not None:
        _check_u64("parent", parent)
    if own.size == 0:
        return _NO_HASHES.copy()
    if not KERNELS_AVAILABLE:
        return _chain_by_package(own, parent)
    chained = np.empty(own.size, dtype=np.uint64)
    chain_blocks(own, 0 if parent is None else parent, parent is not None, chained)
    return chained


def pad_value(mm_hash: int) -> int:
    """Compute the token that stands for an image or other content: 1,000,000 plus the low 30 bits of its u64 hash.

    Raises InvalidRequest.
    """
    _check_u64("mm_hash", mm_hash)
    return PAD_BASE + (mm_hash & PAD_MASK)


def with_pad_values(tokens: Tokens, placeholders: Iterable[Placeholder | tuple[int, int, int]]) -> TokenArray:
    """Copy tokens and replace those of each placeholder by its pad value, so that different images hash differently.

    placeholders: (offset, length, mm_hash) each; if two overlap, the later one is used. Returns uint32[n_tokens].
    Raises InvalidRequest for a placeholder that is not within the tokens, and for tokens like `pack_tokens`.
    """
    padded = _token_array(tokens).copy()
    for index, placeholder in enumerate(placeholders):
        if not isinstance(placeholder, tuple | list) or len(placeholder) != 3:
            raise InvalidRequest(f"placeholder {index} is {placeholder!r}, not an offset, a length and a hash")
        offset, length, mm_hash = placeholder
        if not _is_whole(offset) or not _is_whole(length):
            raise InvalidRequest(f"placeholder {index} has an offset or length that is not an integer: {placeholder!r}")
        if offset < 0 or length < 0 or offset + length > padded.size:
            raise InvalidRequest(
                f"placeholder {index} covers tokens {offset}..{offset + length}, but the prompt has {padded.size}",
                offset=offset,
                length=length,
            )
        padded[offset : offset + length] = pad_value(mm_hash)
    return padded


def pack_hashes(hashes: Sequence[int] | HashArray) -> bytes:
    """Pack hashes as u64 little-endian, their form in Avro `bytes`. Raises InvalidRequest."""
    if type(hashes) is np.ndarray and hashes.dtype is _U64_LE and hashes.ndim == 1:
        packed: bytes = hashes.tobytes()
        return packed  # checked first, since every request's hashes are packed
    return _hash_array(hashes).tobytes()


def unpack_hashes(packed: bytes) -> HashArray:
    """Unpack u64 little-endian; returns a read-only uint64[n].

    Raises InvalidRequest for a length that is not a multiple of 8, and for a value that is not bytes.
    """
    if not isinstance(packed, bytes):
        if not isinstance(packed, bytearray | memoryview):
            raise InvalidRequest(f"packed hashes are a {type(packed).__name__}, not bytes")
        packed = bytes(packed)
    if len(packed) % _BYTES_PER_HASH:
        raise InvalidRequest("packed hashes are u64 little-endian, 8 bytes each", n_bytes=len(packed))
    return np.frombuffer(packed, dtype="<u8")


def _hash(tokens: Tokens, block_size: int, seed: int, eagle: bool, *, chained: bool) -> tuple[HashArray, HashArray]:
    """Compute local hashes and, if `chained`, their chain; otherwise the second result is uint64[0]."""
    if type(block_size) is not int and not _is_whole(block_size):
        raise BlockSizeMismatch(f"block size is {block_size!r}, not a whole number of tokens")
    if block_size < 1:
        raise BlockSizeMismatch(f"block size is {block_size}; it must be at least 1 token")
    if type(seed) is not int or not 0 <= seed <= U64_MASK:
        _check_u64("seed", seed)
    words = _token_array(tokens)
    window, n_blocks = block_size, words.size // block_size
    if eagle:
        window, n_blocks = block_size + 1, max(words.size - 1, 0) // block_size
    if n_blocks == 0:
        return _NO_HASHES.copy(), _NO_HASHES.copy()
    if not KERNELS_AVAILABLE:
        local = _local_by_package(words, window, block_size, n_blocks, seed)
        return local, _chain_by_package(local, None) if chained else _NO_HASHES
    local = np.empty(n_blocks, dtype=np.uint64)
    sequence = np.empty(n_blocks, dtype=np.uint64) if chained else _NO_HASHES
    hash_blocks(words, window, block_size, n_blocks, seed, local, sequence)
    return local, sequence


def _local_by_package(words: TokenArray, window: int, stride: int, n_blocks: int, seed: int) -> HashArray:
    packed = memoryview(words.tobytes())
    width, step = window * _BYTES_PER_TOKEN, stride * _BYTES_PER_TOKEN
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, n_blocks * step, step)
    return np.fromiter(
        (digest(packed[start : start + width], seed) for start in starts), dtype=np.uint64, count=n_blocks
    )


def _chain_by_package(local: HashArray, parent: SequenceHash | None) -> HashArray:
    digest = xxhash.xxh3_64_intdigest
    raw = local.astype(_U64_LE, copy=False).tobytes()
    chained: list[int] = []
    previous: int | None = parent
    for start in range(0, len(raw), _BYTES_PER_HASH):
        own = raw[start : start + _BYTES_PER_HASH]
        if previous is None:
            previous = int.from_bytes(own, "little")
        else:
            previous = digest(int(previous).to_bytes(_BYTES_PER_HASH, "little") + own, BASE_SEED)
        chained.append(previous)
    return np.array(chained, dtype=np.uint64)


def _token_array(tokens: Tokens) -> TokenArray:
    """View tokens as a TokenArray, without a copy for uint32 arrays and bytes.

    Raises InvalidRequest like `pack_tokens`.
    """
    if type(tokens) is np.ndarray and tokens.dtype is _U32_LE and tokens.ndim == 1 and tokens.flags.carray:
        row: npt.NDArray[Any] = tokens
        return row  # checked first, since hashing a request of 2,048 tokens takes only a few microseconds
    if type(tokens) is bytes and len(tokens) % _BYTES_PER_TOKEN == 0:
        return np.frombuffer(tokens, dtype=_U32_LE)  # the contents of a bytes object are aligned
    if isinstance(tokens, bytes | bytearray | memoryview):
        return _view_packed(tokens)
    if isinstance(tokens, list | tuple):
        # array() checks each value's type and range in C: 62 ns per block, compared with 201 through np.array.
        try:
            words = _contiguous(np.frombuffer(array("I", tokens), dtype=np.uintc))
        except (OverflowError, TypeError) as exc:
            raise InvalidRequest(_name_bad_token(tokens)) from exc
        # It accepts True as 1 and False as 0, so types are checked only if there are tokens 0 or 1.
        low = words < 2
        if low.any() and any(type(tokens[index]) is bool for index in np.flatnonzero(low).tolist()):
            raise InvalidRequest(_name_bad_token(tokens))
        return words
    try:
        values = np.asarray(tokens)
    except (ValueError, TypeError) as exc:
        raise InvalidRequest("tokens must be one dimension of integers") from exc
    if values.size == 0 and values.ndim == 1:
        return np.empty(0, dtype=_U32_LE)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise InvalidRequest("tokens must be one dimension of integers", dtype=str(values.dtype), ndim=values.ndim)
    may_exceed_u32 = values.dtype.kind == "i" or values.dtype.itemsize > _BYTES_PER_TOKEN
    # The bitwise or of all tokens, in one pass, is negative if a token is, and above u32 if a token is.
    if may_exceed_u32 and not 0 <= int(np.bitwise_or.reduce(values)) <= U32_MAX:
        index = int(np.argmax((values < 0) | (values > U32_MAX)))
        raise InvalidRequest(f"token {index} is {int(values[index])}, outside 0..{U32_MAX}")
    return _contiguous(values)


def _view_packed(packed: bytes | bytearray | memoryview) -> TokenArray:
    if isinstance(packed, memoryview) and not packed.c_contiguous:
        packed = bytes(packed)
    n_bytes = packed.nbytes if isinstance(packed, memoryview) else len(packed)
    if n_bytes % _BYTES_PER_TOKEN:
        raise InvalidRequest("packed tokens are u32 little-endian, 4 bytes each", n_bytes=n_bytes)
    return _contiguous(np.frombuffer(packed, dtype=_U32_LE))


def _contiguous(values: npt.NDArray[Any]) -> TokenArray:
    """Convert to aligned u32 little-endian for the kernels; a slice of a memoryview may begin at any byte."""
    if values.dtype is _U32_LE and values.flags.c_contiguous and values.flags.aligned:
        return values
    return values.astype(_U32_LE, order="C")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_u64(what: str, value: object) -> None:
    """Raise InvalidRequest unless `value` is an integer within u64."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 <= value <= U64_MASK:
        raise InvalidRequest(f"{what} is {value!r}, not an integer in 0..{U64_MASK}")


def _hash_array(hashes: Sequence[int] | HashArray) -> HashArray:
    """Convert an array of uint64 in either byte order, or a list of integers, to u64 little-endian of one dimension.

    Raises InvalidRequest for other types, since a conversion would wrap negative numbers and truncate fractions.
    """
    if isinstance(hashes, np.ndarray):
        if hashes.dtype.kind != "u" or hashes.dtype.itemsize != _BYTES_PER_HASH or hashes.ndim != 1:
            raise InvalidRequest("hashes are not uint64 of one dimension", dtype=str(hashes.dtype), ndim=hashes.ndim)
        return hashes.astype(_U64_LE, copy=False)
    try:
        words = np.frombuffer(array("Q", hashes), dtype=np.uint64)  # array() checks each value's type and range in C
    except (OverflowError, TypeError, ValueError) as exc:
        raise InvalidRequest(f"hashes must be integers in 0..{U64_MASK}, or an array of uint64") from exc
    if any(type(hashes[index]) is bool for index in np.flatnonzero(words < 2).tolist()):
        raise InvalidRequest("hashes must be integers, not True or False")
    return words.astype(_U64_LE, copy=False)


def _name_bad_token(tokens: Sequence[object]) -> str:
    for index, value in enumerate(tokens):
        # NumPy's integers are Integral but not int, and are valid tokens.
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= U32_MAX:
            # The value of another type is not shown: a list of token ids, for example, is part of a prompt.
            shown = str(value) if isinstance(value, Integral) else f"a {type(value).__name__}"
            return f"token {index} is {shown}, not an integer in 0..{U32_MAX}"
    return f"tokens must be integers in 0..{U32_MAX}"

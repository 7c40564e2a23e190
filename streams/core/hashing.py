"""Tokens to hashes, byte for byte those of NVIDIA Dynamo (DESIGN section 2).

What lives here: local and sequence hashes, their seeds, and the tokens that stand for images. What must not: who holds
a block. Sequence hashes name a whole prefix and are the same on every worker; local hashes name one block's tokens.

The loops are compiled (streams.core.kernels.xxh3). Where numba cannot be imported, or on a big-endian machine, the
xxhash package serves with the same results, some thirty times slower; `KERNELS_AVAILABLE` says which it is.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from streams.core.ids import U32_MAX, U64_MASK, HashArray, SequenceHash
from streams.errors import BlockSizeMismatch, InvalidRequest

try:
    from streams.core.kernels.xxh3 import chain_blocks, hash_blocks
except ImportError:
    KERNELS_AVAILABLE = False
else:
    KERNELS_AVAILABLE = sys.byteorder == "little"  # they read tokens as the machine does

#: Dynamo's seed; equal seeds are what makes our hashes comparable with every Dynamo component.
BASE_SEED = 1337

#: What callers may hand in as tokens. Bytes are u32 little-endian, as the wire carries them.
Tokens: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer[Any]] | bytes | bytearray | memoryview"

#: uint32[n], little-endian, in one piece and aligned.
TokenArray: TypeAlias = "npt.NDArray[np.uint32]"

#: Pad values begin here, above the vocabularies of models, and span 2^30; both as in Dynamo, or hashes would differ.
PAD_BASE = 1_000_000
PAD_MASK = (1 << 30) - 1

_BYTES_A_TOKEN = 4
_BYTES_A_HASH = 8
_U32_LE = np.dtype("<u4")
_U64_LE = np.dtype("<u8")
_NO_HASHES = np.empty(0, dtype=np.uint64)


class Placeholder(NamedTuple):
    """The tokens of a prompt that stand for one image, video or sound; `mm_hash` names its content."""

    offset: int  # index of the first of them
    length: int  # number of tokens
    mm_hash: int  # u64


def hash_seed(lora_name: str | None = None, namespace: str | None = None) -> int:
    """Give the seed for a LoRA adapter and a namespace; None and "" both mean none.

    Source: DESIGN section 2.
    """
    seed = BASE_SEED
    if lora_name:
        seed += xxhash.xxh3_64_intdigest(lora_name.encode(), 0)
    if namespace:
        seed += xxhash.xxh3_64_intdigest(namespace.encode(), 1)
    return seed & U64_MASK


def pack_tokens(tokens: Tokens) -> bytes:
    """Pack tokens as u32 little-endian bytes.

    tokens: integers in 0..2^32-1, or bytes that are u32 little-endian already.
    Raises InvalidRequest for a value outside u32 (naming it) and for bytes that are no whole number of tokens.
    """
    words = _token_array(tokens)
    return tokens if isinstance(tokens, bytes) else words.tobytes()


def local_hashes(tokens: Tokens, block_size: int, seed: int = BASE_SEED, *, eagle: bool = False) -> HashArray:
    """Hash each full block of `block_size` tokens; a partial last block is dropped.

    eagle: hash windows of block_size + 1 tokens, which begin block_size tokens apart, as EAGLE drafts need them.
    Returns uint64[n_tokens // block_size], of windows uint64[(n_tokens - 1) // block_size].
    Raises BlockSizeMismatch, InvalidRequest. Source: DESIGN section 2.
    """
    return _hash(tokens, block_size, seed, eagle, chained=False)[0]


def request_hashes(
    tokens: Tokens, block_size: int, seed: int = BASE_SEED, *, eagle: bool = False
) -> tuple[HashArray, HashArray]:
    """Local hashes of a whole request and their chain from the root, in one pass over the tokens.

    Returns what `local_hashes` and, of that, `sequence_hashes` give: uint64[n_blocks] each.
    Raises BlockSizeMismatch, InvalidRequest. Source: DESIGN section 2.
    """
    return _hash(tokens, block_size, seed, eagle, chained=True)


def sequence_hashes(local: HashArray, parent: SequenceHash | None = None) -> HashArray:
    """Chain local hashes into sequence hashes, from the root or on from `parent`.

    local: uint64[n_blocks]; returns uint64[n_blocks]; n_blocks may be 0. Source: DESIGN section 2.
    """
    own = local
    if not (type(local) is np.ndarray and local.dtype is _U64_LE and local.ndim == 1 and local.flags.carray):
        own = np.ascontiguousarray(local, dtype=_U64_LE)
        own = own if own.flags.aligned and own.ndim == 1 else own.flatten()
    if own.size == 0:
        return _NO_HASHES.copy()
    if not KERNELS_AVAILABLE:
        return _chain_by_package(own, parent)
    chained = np.empty(own.size, dtype=np.uint64)
    chain_blocks(own, 0 if parent is None else parent, parent is not None, chained)
    return chained


def pad_value(mm_hash: int) -> int:
    """Give the token that stands for a piece of content: 1,000,000 and the low 30 bits of its u64 hash."""
    return PAD_BASE + (mm_hash & PAD_MASK)


def with_pad_values(tokens: Tokens, placeholders: Iterable[Placeholder | tuple[int, int, int]]) -> TokenArray:
    """Copy tokens and put each placeholder's pad value in all its places, so that hashes tell images apart.

    placeholders: (offset, length, mm_hash) each; where two overlap the later one holds. Returns uint32[n_tokens].
    Raises InvalidRequest for a placeholder that is not within the tokens, and for tokens as `pack_tokens` does.
    """
    padded = _token_array(tokens).copy()
    for index, (offset, length, mm_hash) in enumerate(placeholders):
        if offset < 0 or length < 0 or offset + length > padded.size:
            raise InvalidRequest(
                f"placeholder {index} is tokens {offset}..{offset + length}, outside the {padded.size} there are",
                offset=offset,
                length=length,
            )
        padded[offset : offset + length] = pad_value(mm_hash)
    return padded


def pack_hashes(hashes: Sequence[int] | HashArray) -> bytes:
    """Pack hashes as u64 little-endian, the form in which they travel in Avro `bytes`."""
    return np.asarray(hashes, dtype="<u8").tobytes()


def unpack_hashes(packed: bytes) -> HashArray:
    """Unpack u64 little-endian; returns a read-only uint64[n]. Raises InvalidRequest for a length that is no multiple
    of 8."""
    if len(packed) % _BYTES_A_HASH:
        raise InvalidRequest("packed hashes are u64 little-endian, 8 bytes each", n_bytes=len(packed))
    return np.frombuffer(packed, dtype="<u8")


def _hash(tokens: Tokens, block_size: int, seed: int, eagle: bool, *, chained: bool) -> tuple[HashArray, HashArray]:
    """Local hashes and, if wanted, their chain; the second is uint64[0] if not."""
    if block_size < 1:
        raise BlockSizeMismatch(f"block size is {block_size}; it must be at least 1 token")
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
    hash_blocks(words, window, block_size, n_blocks, seed & U64_MASK, local, sequence)
    return local, sequence


def _local_by_package(words: TokenArray, window: int, stride: int, n_blocks: int, seed: int) -> HashArray:
    packed = memoryview(words.tobytes())
    width, step = window * _BYTES_A_TOKEN, stride * _BYTES_A_TOKEN
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, n_blocks * step, step)
    return np.fromiter((digest(packed[at : at + width], seed) for at in starts), dtype=np.uint64, count=n_blocks)


def _chain_by_package(local: HashArray, parent: SequenceHash | None) -> HashArray:
    digest = xxhash.xxh3_64_intdigest
    raw = local.astype(_U64_LE, copy=False).tobytes()
    chained: list[int] = []
    previous: int | None = parent
    for at in range(0, len(raw), _BYTES_A_HASH):
        own = raw[at : at + _BYTES_A_HASH]
        if previous is None:
            previous = int.from_bytes(own, "little")
        else:
            previous = digest(int(previous).to_bytes(_BYTES_A_HASH, "little") + own, BASE_SEED)
        chained.append(previous)
    return np.array(chained, dtype=np.uint64)


def _token_array(tokens: Tokens) -> TokenArray:
    """View tokens as a TokenArray, without a copy where they are one already: uint32 arrays and bytes.

    Raises InvalidRequest, as `pack_tokens` tells.
    """
    if type(tokens) is np.ndarray and tokens.dtype is _U32_LE and tokens.ndim == 1 and tokens.flags.carray:
        row: npt.NDArray[Any] = tokens
        return row  # asked first, since a request of 2,048 tokens takes no more than a few microseconds in all
    if isinstance(tokens, bytes | bytearray | memoryview):
        return _view_packed(tokens)
    if isinstance(tokens, list | tuple):
        # array() checks each value's type and range itself, in C: 62 ns a block against 201 through np.array.
        try:
            return _in_one_piece(np.frombuffer(array("I", tokens), dtype=np.uintc))
        except (OverflowError, TypeError) as exc:
            raise InvalidRequest(_name_bad_token(tokens)) from exc
    values = np.asarray(tokens)
    if values.size == 0:
        return np.empty(0, dtype=_U32_LE)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise InvalidRequest("tokens must be one dimension of integers", dtype=str(values.dtype), ndim=values.ndim)
    roomy = values.dtype.kind == "i" or values.dtype.itemsize > _BYTES_A_TOKEN
    # The bits of all tokens together, in one pass, are below zero if a token is and above u32 if a token is.
    if roomy and not 0 <= int(np.bitwise_or.reduce(values)) <= U32_MAX:
        index = int(np.argmax((values < 0) | (values > U32_MAX)))
        raise InvalidRequest(f"token {index} is {int(values[index])}, outside 0..{U32_MAX}")
    return _in_one_piece(values)


def _view_packed(packed: bytes | bytearray | memoryview) -> TokenArray:
    if isinstance(packed, memoryview) and not packed.c_contiguous:
        packed = bytes(packed)
    n_bytes = packed.nbytes if isinstance(packed, memoryview) else len(packed)
    if n_bytes % _BYTES_A_TOKEN:
        raise InvalidRequest("packed tokens are u32 little-endian, 4 bytes each", n_bytes=n_bytes)
    return _in_one_piece(np.frombuffer(packed, dtype=_U32_LE))


def _in_one_piece(values: npt.NDArray[Any]) -> TokenArray:
    """As u32 little-endian; a slice of a memoryview may begin at any byte, and kernels take aligned arrays."""
    if values.dtype is _U32_LE and values.flags.c_contiguous and values.flags.aligned:
        return values
    return values.astype(_U32_LE, order="C")


def _name_bad_token(tokens: Sequence[object]) -> str:
    for index, value in enumerate(tokens):
        # NumPy's integers are Integral and no int; they are tokens like any other.
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= U32_MAX:
            told = str(value) if isinstance(value, Integral) else repr(value)
            return f"token {index} is {told}, not an integer in 0..{U32_MAX}"
    return f"tokens must be integers in 0..{U32_MAX}"

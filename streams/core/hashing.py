"""Tokens to hashes, byte for byte those of NVIDIA Dynamo (DESIGN section 2).

What lives here: local and sequence hashes and their seeds. What must not: who holds a block. Sequence hashes name a
whole prefix and are the same on every worker; local hashes name one block's tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from streams.core.ids import U32_MAX, U64_MASK, HashArray, SequenceHash
from streams.errors import BlockSizeMismatch, InvalidRequest

#: Dynamo's seed; equal seeds are what makes our hashes comparable with every Dynamo component.
BASE_SEED = 1337

#: What callers may hand in as tokens. Bytes are u32 little-endian, as the wire carries them.
Tokens: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer[Any]] | bytes | bytearray | memoryview"

_BYTES_A_TOKEN = 4
_BYTES_A_HASH = 8


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
    if isinstance(tokens, bytes | bytearray | memoryview):
        packed = bytes(tokens)
        if len(packed) % _BYTES_A_TOKEN:
            raise InvalidRequest("packed tokens are u32 little-endian, 4 bytes each", n_bytes=len(packed))
        return packed
    if isinstance(tokens, list | tuple):
        # array() checks each value's type and range itself, in C: 62 ns a block against 201 through np.array.
        try:
            return _little_endian(array("I", tokens))
        except (OverflowError, TypeError) as exc:
            raise InvalidRequest(_name_bad_token(tokens)) from exc
    values = np.asarray(tokens)
    if values.size == 0:
        return b""
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise InvalidRequest("tokens must be one dimension of integers", dtype=str(values.dtype), ndim=values.ndim)
    outside = (values < 0) | (values > U32_MAX)
    if outside.any():
        index = int(np.argmax(outside))
        raise InvalidRequest(f"token {index} is {int(values[index])}, outside 0..{U32_MAX}")
    return values.astype("<u4").tobytes()


def local_hashes(tokens: Tokens, block_size: int, seed: int = BASE_SEED) -> HashArray:
    """Hash each full block of `block_size` tokens; a partial last block is dropped.

    Returns uint64[n_tokens // block_size]. Raises BlockSizeMismatch, InvalidRequest.
    Source: DESIGN section 2.
    """
    if block_size < 1:
        raise BlockSizeMismatch(f"block size is {block_size}; it must be at least 1 token")
    packed = memoryview(pack_tokens(tokens))
    width = block_size * _BYTES_A_TOKEN
    digest = xxhash.xxh3_64_intdigest
    starts = range(0, len(packed) - width + 1, width)
    return np.fromiter((digest(packed[at : at + width], seed) for at in starts), dtype=np.uint64, count=len(starts))


def sequence_hashes(local: HashArray, parent: SequenceHash | None = None) -> HashArray:
    """Chain local hashes into sequence hashes, from the root or on from `parent`.

    local: uint64[n_blocks]; returns uint64[n_blocks]; n_blocks may be 0. Source: DESIGN section 2.
    """
    digest = xxhash.xxh3_64_intdigest
    raw = np.ascontiguousarray(local, dtype="<u8").tobytes()
    chained: list[int] = []
    previous = parent
    for at in range(0, len(raw), _BYTES_A_HASH):
        own = raw[at : at + _BYTES_A_HASH]
        if previous is None:
            previous = SequenceHash(int.from_bytes(own, "little"))
        else:
            previous = SequenceHash(digest(previous.to_bytes(_BYTES_A_HASH, "little") + own, BASE_SEED))
        chained.append(previous)
    return np.array(chained, dtype=np.uint64)


def pack_hashes(hashes: Sequence[int] | HashArray) -> bytes:
    """Pack hashes as u64 little-endian, the form in which they travel in Avro `bytes`."""
    return np.asarray(hashes, dtype="<u8").tobytes()


def unpack_hashes(packed: bytes) -> HashArray:
    """Unpack u64 little-endian; returns a read-only uint64[n]. Raises InvalidRequest for a length that is no multiple
    of 8."""
    if len(packed) % _BYTES_A_HASH:
        raise InvalidRequest("packed hashes are u64 little-endian, 8 bytes each", n_bytes=len(packed))
    return np.frombuffer(packed, dtype="<u8")


def _little_endian(values: array[int]) -> bytes:
    if values.itemsize != _BYTES_A_TOKEN:  # the C standard promises at least 2 bytes, every platform of ours has 4
        raise InvalidRequest("this platform's unsigned int is not 4 bytes")
    return np.frombuffer(values, dtype=np.uint32).astype("<u4", copy=False).tobytes()


def _name_bad_token(tokens: Sequence[object]) -> str:
    for index, value in enumerate(tokens):
        # NumPy's integers are Integral and no int; they are tokens like any other.
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= U32_MAX:
            told = str(value) if isinstance(value, Integral) else repr(value)
            return f"token {index} is {told}, not an integer in 0..{U32_MAX}"
    return f"tokens must be integers in 0..{U32_MAX}"

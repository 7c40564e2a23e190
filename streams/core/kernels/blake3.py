"""BLAKE3 of a hash and the tokens that follow it, compiled: the names that LMCache gives to chunks of tokens.

What lives here: the digest of 32 bytes and of u32 tokens in big-endian order, and the search for the hash that such a
digest follows. What must not: what a chunk is (streams.lmcache.chunk_names).

Names follow the BLAKE3 paper. Words are int64 with 32 bits in use, since numba turns int64 mixed with uint64 into
floats. A message has 8 words of the parent's hash, and one for each token; all of them are whole words.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types

from streams.core.ids import Int64Array
from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.instructions import instruction
from streams.core.kernels.memory import address_of, load32

_I32, _I64 = ir.IntType(32), ir.IntType(64)

_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_IV0, _IV1, _IV2, _IV3, _IV4, _IV5, _IV6, _IV7 = _IV
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_BLOCK_WORDS, _CHUNK_WORDS, _HASH_WORDS, _HASH_BYTES = 16, 256, 8, 32
_U32 = 0xFFFFFFFF

#: Chaining values that wait for their right siblings: enough for 2^32 chunks of 1 KiB.
_STACK_WORDS = 32 * _HASH_WORDS

#: Words of scratch space: the chaining value, the block and the stack.
SCRATCH_WORDS = _HASH_WORDS + _BLOCK_WORDS + _STACK_WORDS


@instruction()
def _rotated(builder: Any, word: Any, bits: Any) -> Any:
    """Rotate the low 32 bits to the right. With shifts of 64 bits, a digest of 256 tokens takes 2.3 us, not 2.0."""
    narrow = builder.trunc(word, _I32)
    kind = ir.FunctionType(_I32, [_I32, _I32, _I32])
    rotate = builder.module.declare_intrinsic("llvm.fshr", [_I32], kind)
    return builder.zext(builder.call(rotate, [narrow, narrow, builder.trunc(bits, _I32)]), _I64)


@instruction()
def _with_bytes_reversed(builder: Any, word: Any) -> Any:
    """Reverse the order of the low four bytes."""
    reverse = builder.module.declare_intrinsic("llvm.bswap", [_I32], ir.FunctionType(_I32, [_I32]))
    return builder.zext(builder.call(reverse, [builder.trunc(word, _I32)]), _I64)


@inlined
def _mixed(a: int, b: int, c: int, d: int, x: int, y: int) -> tuple[int, int, int, int]:
    a = (a + b + x) & _U32
    d = _rotated(d ^ a, 16)
    c = (c + d) & _U32
    b = _rotated(b ^ c, 12)
    a = (a + b + y) & _U32
    d = _rotated(d ^ a, 8)
    c = (c + d) & _U32
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@inlined
def _compress(scratch: Int64Array, block_at: int, counter: int, n_bytes: int, flags: int) -> None:
    """Replace the chaining value, the first words of `scratch`, by that after the block at `block_at`."""
    s0, s1, s2, s3 = scratch[0], scratch[1], scratch[2], scratch[3]
    s4, s5, s6, s7 = scratch[4], scratch[5], scratch[6], scratch[7]
    s8, s9, s10, s11 = _IV0, _IV1, _IV2, _IV3
    s12, s13, s14, s15 = counter & _U32, counter >> 32, n_bytes, flags
    m0, m1, m2, m3 = scratch[block_at], scratch[block_at + 1], scratch[block_at + 2], scratch[block_at + 3]
    m4, m5, m6, m7 = scratch[block_at + 4], scratch[block_at + 5], scratch[block_at + 6], scratch[block_at + 7]
    m8, m9, m10, m11 = scratch[block_at + 8], scratch[block_at + 9], scratch[block_at + 10], scratch[block_at + 11]
    m12, m13, m14, m15 = scratch[block_at + 12], scratch[block_at + 13], scratch[block_at + 14], scratch[block_at + 15]
    for _ in range(7):
        s0, s4, s8, s12 = _mixed(s0, s4, s8, s12, m0, m1)
        s1, s5, s9, s13 = _mixed(s1, s5, s9, s13, m2, m3)
        s2, s6, s10, s14 = _mixed(s2, s6, s10, s14, m4, m5)
        s3, s7, s11, s15 = _mixed(s3, s7, s11, s15, m6, m7)
        s0, s5, s10, s15 = _mixed(s0, s5, s10, s15, m8, m9)
        s1, s6, s11, s12 = _mixed(s1, s6, s11, s12, m10, m11)
        s2, s7, s8, s13 = _mixed(s2, s7, s8, s13, m12, m13)
        s3, s4, s9, s14 = _mixed(s3, s4, s9, s14, m14, m15)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8,
        )  # fmt: skip
    scratch[0], scratch[1], scratch[2], scratch[3] = s0 ^ s8, s1 ^ s9, s2 ^ s10, s3 ^ s11
    scratch[4], scratch[5], scratch[6], scratch[7] = s4 ^ s12, s5 ^ s13, s6 ^ s14, s7 ^ s15


@inlined
def _begin(scratch: Int64Array) -> None:
    scratch[0], scratch[1], scratch[2], scratch[3] = _IV0, _IV1, _IV2, _IV3
    scratch[4], scratch[5], scratch[6], scratch[7] = _IV4, _IV5, _IV6, _IV7


@inlined
def _merge(scratch: Int64Array, top: int, flags: int) -> None:
    """Replace the chaining value by that of the parent of the stack's top and of it."""
    block_at = _HASH_WORDS
    for word in range(_HASH_WORDS):
        scratch[block_at + word] = scratch[block_at + _BLOCK_WORDS + top * _HASH_WORDS + word]
        scratch[block_at + _HASH_WORDS + word] = scratch[word]
    _begin(scratch)
    _compress(scratch, block_at, 0, 64, _PARENT | flags)


@inlined
def _digest(parent: int, tokens: int, n_tokens: int, scratch: Int64Array) -> None:
    """Write the digest of a parent's hash and tokens, which are at these addresses, to the beginning of `scratch`."""
    n_words = _HASH_WORDS + n_tokens
    n_chunks = (n_words + _CHUNK_WORDS - 1) // _CHUNK_WORDS
    n_stacked = 0
    for chunk in range(n_chunks):
        first, end = chunk * _CHUNK_WORDS, min((chunk + 1) * _CHUNK_WORDS, n_words)
        _begin(scratch)
        at = first
        while at < end:
            n_here, n_of_parent = min(_BLOCK_WORDS, end - at), 0
            if at == 0:
                n_of_parent = _HASH_WORDS
                for word in range(_HASH_WORDS):
                    scratch[_HASH_WORDS + word] = load32(parent + word * 4) & _U32
            for word in range(n_of_parent, n_here):
                token = load32(tokens + (at + word - _HASH_WORDS) * 4)
                scratch[_HASH_WORDS + word] = _with_bytes_reversed(token)
            for word in range(n_here, _BLOCK_WORDS):
                scratch[_HASH_WORDS + word] = 0
            flags = _CHUNK_START if at == first else 0
            if at + n_here == end:
                flags |= _CHUNK_END
                if n_chunks == 1:
                    flags |= _ROOT
            _compress(scratch, _HASH_WORDS, chunk, n_here * 4, flags)
            at += n_here
        if chunk + 1 < n_chunks:
            n_done = chunk + 1
            while n_done & 1 == 0:
                n_stacked -= 1
                _merge(scratch, n_stacked, 0)
                n_done >>= 1
            for word in range(_HASH_WORDS):
                scratch[_HASH_WORDS + _BLOCK_WORDS + n_stacked * _HASH_WORDS + word] = scratch[word]
            n_stacked += 1
    while n_stacked > 0:
        n_stacked -= 1
        _merge(scratch, n_stacked, _ROOT if n_stacked == 0 else 0)


_BYTES = types.Array(types.uint8, 1, "C", readonly=True)


@kernel(types.int64(_BYTES, types.Array(types.uint32, 1, "C"), _BYTES, types.Array(types.int64, 1, "C")))
def find_parent(parents: Any, tokens: Any, wanted: Any, scratch: Int64Array) -> int:
    """Return which hash the digest `wanted` follows, as an index; -1 for none.

    parents: uint8[32 * n], n hashes. tokens: uint32[k]. wanted: uint8[32]. scratch: int64[SCRATCH_WORDS]; its first 8
    words are the last digest that was computed, as u32, little-endian.
    """
    wanted_at = address_of(wanted)
    for index in range(parents.size // _HASH_BYTES):
        _digest(address_of(parents) + index * _HASH_BYTES, address_of(tokens), tokens.size, scratch)
        same = True
        for word in range(_HASH_WORDS):
            if scratch[word] != load32(wanted_at + word * 4) & _U32:
                same = False
                break
        if same:
            return index
    return -1

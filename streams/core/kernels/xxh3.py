"""XXH3-64 as compiled kernels, bit for bit what the xxhash package gives.

What lives here: the digest of 4 or more bytes at an address, with any seed; block hashes, their chain, and both in one
pass. What must not: checks of tokens (streams.core.hashing), and digests of 0 to 3 bytes, less than one token.

Tokens and hashes are read in the machine's byte order, so results are correct on little-endian machines only; the
caller checks for that. Names of functions and constants follow the source: xxHash 0.8, `xxhash.h`, section XXH3.
Offsets into the secret are in bytes.

LLVM must not vectorise these loops: a prototype that it vectorised, eight blocks at a time with gathered loads, took
19 ns per block on uncached tokens, compared with 2.4 ns one block at a time. `keep_loops_scalar()` anywhere in a kernel
gives the function LLVM's attribute `noimplicitfloat`, which disables the loop and SLP vectorisers and which a function
that inlines it inherits. The attribute is part of the compiled code, so it depends neither on NUMBA_LOOP_VECTORIZE nor
on the process that filled the cache. Explicit vectors (`Lanes`, for input of more than 240 bytes) are not affected.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import register_model

from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.instructions import instruction
from streams.core.kernels.memory import address_of

# ---- constants of the source ------------------------------------------------------------------------------------

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)

_PRIME32_1, _PRIME32_2, _PRIME32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_PRIME64_1, _PRIME64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME64_3, _PRIME64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
_PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
_PRIME_MX1, _PRIME_MX2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)

_INITIAL_LANES = np.array(
    [_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1], dtype=np.uint64
)

#: Above this length, a digest uses a secret derived from the seed; up to it, words of the original secret and the seed.
LONG_BYTES = 240
SECRET_BYTES = len(SECRET)  # 192
_STRIPE_BYTES = 64
_STRIPES_PER_ROUND = 16  # (192 bytes of secret - 64) / 8, since each stripe advances by 8 bytes of the secret
_ROUND_BYTES = 1024
_SECRET_OF_SCRAMBLE = 128  # the secret's last 64 bytes
_SECRET_OF_LAST_STRIPE = 121  # XXH_SECRET_LASTACC_START: 7 bytes before those
_SECRET_OF_MERGE = 11  # XXH_SECRET_MERGEACCS_START

#: Dynamo's seed of the chain.
_CHAIN_SEED = np.uint64(1337)

# Mixing signed and unsigned 64-bit integers gives a float in numba, so each constant has the type of its operands.
_U1, _U8, _U9, _U16 = np.uint64(1), np.uint64(8), np.uint64(9), np.uint64(16)
_U24, _U28, _U32, _U35 = np.uint64(24), np.uint64(28), np.uint64(32), np.uint64(35)
_U37, _U49 = np.uint64(37), np.uint64(49)


# ---- instructions that LLVM has and Python does not -------------------------------------------------------------

_I8, _I32, _I64, _I128 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.IntType(128)
_LANES = ir.VectorType(_I64, 8)


class Lanes(types.Type):  # type: ignore[misc]  # numba ships no types
    """Eight u64 in a vector register: the accumulators of XXH3 for long input."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]  # numba ships no types
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _LANES)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_LANES, [value] * 8)


@instruction(types.void)
def keep_loops_scalar(builder: Any) -> None:
    """Keep LLVM from vectorising the loops and stores of the calling function; this emits no instruction."""
    builder.function.attributes.add("noimplicitfloat")


@instruction(types.uint64, types.int64)
def load_u32(builder: Any, address: Any) -> Any:
    """Four bytes at any address, as u64."""
    return builder.zext(builder.load(builder.inttoptr(address, _I32.as_pointer()), align=1), _I64)


@instruction(types.uint64, types.int64)
def load_u64(builder: Any, address: Any) -> Any:
    """Eight bytes at any address."""
    return builder.load(builder.inttoptr(address, _I64.as_pointer()), align=1)


@instruction(types.void, types.int64, types.uint64)
def store_u64(builder: Any, address: Any, value: Any) -> None:
    """Write eight bytes to any address."""
    builder.store(value, builder.inttoptr(address, _I64.as_pointer()), align=1)


@instruction(types.uint64, types.uint64, types.uint64)
def multiply_fold(builder: Any, left: Any, right: Any) -> Any:
    """Low and high half of the 128-bit product, combined by XOR (XXH3_mul128_fold64)."""
    product = builder.mul(builder.zext(left, _I128), builder.zext(right, _I128))
    high = builder.trunc(builder.lshr(product, ir.Constant(_I128, 64)), _I64)
    return builder.xor(builder.trunc(product, _I64), high)


@instruction(types.uint64, types.uint64)
def swap_bytes(builder: Any, value: Any) -> Any:
    """Reverse the order of the eight bytes."""
    return builder.bswap(value)


@instruction(types.uint64, types.int64)
def _secret(builder: Any, offset: Any) -> Any:
    """Eight bytes of the secret, from any byte on.

    The secret is a constant of the module, so LLVM replaces the load by its value if the offset is known. From an
    array, LLVM would load the bytes again for every block: 3.9 ns compared with 3.1.
    """
    content = ir.Constant(ir.ArrayType(_I8, SECRET_BYTES), bytearray(SECRET))
    whole = cgutils.global_constant(builder.module, "xxh3_secret", content)
    word = builder.gep(whole, [_I32(0), offset], inbounds=True)
    return builder.load(builder.bitcast(word, _I64.as_pointer()), align=1)


@instruction()
def _stack_for_secret(builder: Any) -> Any:
    """Address of 192 bytes that live as long as the calling function."""
    with builder.goto_entry_block():
        room = builder.alloca(ir.ArrayType(_I64, SECRET_BYTES // 8))
    return builder.ptrtoint(room, _I64)


def _load_lanes(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _LANES.as_pointer()), align=1)


@instruction(_lanes, types.int64)
def _load_8(builder: Any, address: Any) -> Any:
    return _load_lanes(builder, address)


@instruction(_lanes, _lanes, types.int64, types.int64)
def _accumulate(builder: Any, lanes: Any, address: Any, secret: Any) -> Any:
    """One stripe of 64 bytes (XXH3_accumulate_512): neighbours swap data, and each lane adds a 32 by 32 bit product."""
    data = _load_lanes(builder, address)
    keyed = builder.xor(data, _load_lanes(builder, secret))
    low, high = builder.and_(keyed, _splat(0xFFFFFFFF)), builder.lshr(keyed, _splat(32))
    neighbours = ir.Constant(ir.VectorType(_I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(data, ir.Constant(_LANES, ir.Undefined), neighbours)
    return builder.add(lanes, builder.add(builder.mul(low, high), swapped))


@instruction(_lanes, _lanes, types.int64)
def _scramble(builder: Any, lanes: Any, secret: Any) -> Any:
    """Scramble the lanes between two rounds of 1,024 bytes (XXH3_scrambleAcc)."""
    shifted = builder.xor(lanes, builder.lshr(lanes, _splat(47)))
    return builder.mul(builder.xor(shifted, _load_lanes(builder, secret)), _splat(int(_PRIME32_1)))


@instruction(types.uint64, _lanes, types.int64)
def _merge(builder: Any, lanes: Any, secret: Any) -> Any:
    """Fold the eight lanes in pairs into one u64 (XXH3_mergeAccs without its start value and avalanche)."""
    keyed = builder.xor(lanes, _load_lanes(builder, secret))
    each = [builder.zext(builder.extract_element(keyed, _I32(lane)), _I128) for lane in range(8)]
    total = ir.Constant(_I64, 0)
    for left, right in zip(each[::2], each[1::2], strict=True):
        product = builder.mul(left, right)
        high = builder.trunc(builder.lshr(product, ir.Constant(_I128, 64)), _I64)
        total = builder.add(total, builder.xor(builder.trunc(product, _I64), high))
    return total


# ---- one digest -------------------------------------------------------------------------------------------------


@inlined
def _avalanche(value: Any) -> Any:
    value ^= value >> _U37
    value *= _PRIME_MX1
    return value ^ (value >> _U32)


@inlined
def _mix_16(address: int, offset: int, seed: Any) -> Any:
    low = load_u64(address) ^ (_secret(offset) + seed)
    return multiply_fold(low, load_u64(address + 8) ^ (_secret(offset + 8) - seed))


@inlined
def _digest_4_to_8(address: int, n_bytes: int, seed: Any) -> Any:
    # The low half of the seed, with its bytes reversed, is XORed into the high half.
    seed = seed ^ (swap_bytes(seed) & ~np.uint64(0xFFFFFFFF))
    word = load_u32(address + n_bytes - 4) + (load_u32(address) << _U32)
    value = word ^ ((_secret(8) ^ _secret(16)) - seed)
    value ^= ((value << _U49) | (value >> np.uint64(15))) ^ ((value << _U24) | (value >> np.uint64(40)))
    value *= _PRIME_MX2
    value ^= (value >> _U35) + np.uint64(n_bytes)
    value *= _PRIME_MX2
    return value ^ (value >> _U28)


@inlined
def _mix_9_to_16(first: Any, last: Any, n_bytes: Any, seed: Any) -> Any:
    low = first ^ ((_secret(24) ^ _secret(32)) + seed)
    high = last ^ ((_secret(40) ^ _secret(48)) - seed)
    return _avalanche(n_bytes + swap_bytes(low) + high + multiply_fold(low, high))


@inlined
def _digest_17_to_128(address: int, n_bytes: int, seed: Any) -> Any:
    end = address + n_bytes
    total = np.uint64(n_bytes) * _PRIME64_1
    if n_bytes > 32:
        if n_bytes > 64:
            if n_bytes > 96:
                total += _mix_16(address + 48, 96, seed) + _mix_16(end - 64, 112, seed)
            total += _mix_16(address + 32, 64, seed) + _mix_16(end - 48, 80, seed)
        total += _mix_16(address + 16, 32, seed) + _mix_16(end - 32, 48, seed)
    total += _mix_16(address, 0, seed) + _mix_16(end - 16, 16, seed)
    return _avalanche(total)


@inlined
def _digest_129_to_240(address: int, n_bytes: int, seed: Any) -> Any:
    total = np.uint64(n_bytes) * _PRIME64_1
    for at in range(0, 128, 16):
        total += _mix_16(address + at, at, seed)
    rest = _mix_16(address + n_bytes - 16, 119, seed)  # XXH3_SECRET_SIZE_MIN - XXH3_MIDSIZE_LASTOFFSET = 136 - 17
    for at in range(128, n_bytes - 15, 16):
        rest += _mix_16(address + at, at - 125, seed)  # from XXH3_MIDSIZE_STARTOFFSET = 3 on
    return _avalanche(_avalanche(total) + rest)


@inlined
def _digest_long(address: int, n_bytes: int, secret: int) -> Any:
    lanes = _load_8(address_of(_INITIAL_LANES))
    last = address + n_bytes - _STRIPE_BYTES
    stripe = address
    while stripe + _ROUND_BYTES < address + n_bytes:
        for nth in range(_STRIPES_PER_ROUND):
            lanes = _accumulate(lanes, stripe + nth * _STRIPE_BYTES, secret + nth * 8)
        lanes = _scramble(lanes, secret + _SECRET_OF_SCRAMBLE)
        stripe += _ROUND_BYTES
    key = secret
    while stripe < last:
        lanes = _accumulate(lanes, stripe, key)
        stripe += _STRIPE_BYTES
        key += 8
    lanes = _accumulate(lanes, last, secret + _SECRET_OF_LAST_STRIPE)
    return _avalanche(np.uint64(n_bytes) * _PRIME64_1 + _merge(lanes, secret + _SECRET_OF_MERGE))


@inlined
def _derive_secret(target: int, seed: Any) -> None:
    for at in range(0, SECRET_BYTES, 16):
        store_u64(target + at, _secret(at) + seed)
        store_u64(target + at + 8, _secret(at + 8) - seed)


@inlined
def _digest(address: int, n_bytes: int, seed: Any, secret: int) -> Any:
    """Digest 4 or more bytes; for more than 240, `secret` is the address of the secret that `_derive_secret` wrote."""
    if n_bytes > LONG_BYTES:
        return _digest_long(address, n_bytes, secret)
    return digest_short(address, n_bytes, seed)


@inlined
def digest_short(address: int, n_bytes: int, seed: Any) -> Any:
    """Digest 4 to 240 bytes at any address."""
    if n_bytes > 128:
        return _digest_129_to_240(address, n_bytes, seed)
    if n_bytes > 16:
        return _digest_17_to_128(address, n_bytes, seed)
    if n_bytes > 8:
        return _mix_9_to_16(load_u64(address), load_u64(address + n_bytes - 8), np.uint64(n_bytes), seed)
    return _digest_4_to_8(address, n_bytes, seed)


@inlined
def chain_step(previous: Any, local: Any) -> Any:
    """Sequence hash of a block from its parent's and its own local hash: XXH3-64 of the 16 bytes, seed 1337.

    previous, local: uint64 or int64 bit patterns; returns uint64. See streams.core.hashing.
    """
    return _mix_9_to_16(np.uint64(previous), np.uint64(local), _U16, _CHAIN_SEED)


@inlined
def digest_9(byte: Any, value: Any) -> Any:
    """XXH3-64 of one byte and a u64, little-endian, with seed 0.

    byte: 0..255; value: uint64 or an int64 bit pattern; returns uint64.
    """
    word = np.uint64(value)
    # Input of 9 bytes is read as its first eight and its last eight, which overlap in seven.
    return _mix_9_to_16(np.uint64(byte) | (word << _U8), word, _U9, np.uint64(0))


# ---- many blocks ------------------------------------------------------------------------------------------------


@inlined
def _each_block(
    tokens: int, n_bytes: int, stride_bytes: int, n_blocks: int, seed: Any, secret: int, local_out: int, chain_out: int
) -> None:
    # Two loops instead of an `if` inside one: with the chain, each iteration waits for the previous one, and a block
    # takes 4.6 ns instead of 3.1.
    if chain_out == 0:
        for block in range(n_blocks):
            store_u64(local_out + block * 8, _digest(tokens + block * stride_bytes, n_bytes, seed, secret))
        return
    previous = np.uint64(0)
    for block in range(n_blocks):
        local = _digest(tokens + block * stride_bytes, n_bytes, seed, secret)
        previous = chain_step(previous, local) if block else local
        store_u64(local_out + block * 8, local)
        store_u64(chain_out + block * 8, previous)


@inlined
def hash_blocks_at(
    tokens: int, n_bytes: int, stride_bytes: int, n_blocks: int, seed: Any, local_out: int, chain_out: int
) -> None:
    """Hash `n_blocks` blocks of `n_bytes`, at least 4, which begin `stride_bytes` apart; chain them in the same pass.

    tokens: address of the bytes. local_out, chain_out: addresses of uint64[n_blocks] for the results; with a chain_out
    of 0, only local hashes are computed.
    """
    keep_loops_scalar()
    # With a constant length, LLVM removes every branch of the digest and keeps the values that depend on the seed in
    # registers: 4.6 ns per block with its chain, compared with 5.4. Most engines use blocks of 16 tokens.
    if n_bytes == 64:
        _each_block(tokens, 64, stride_bytes, n_blocks, seed, 0, local_out, chain_out)
        return
    secret = _stack_for_secret()
    if n_bytes > LONG_BYTES:
        _derive_secret(secret, seed)
    _each_block(tokens, n_bytes, stride_bytes, n_blocks, seed, secret, local_out, chain_out)


def _row(kind: Any, readonly: bool) -> Any:
    return types.Array(kind, 1, "C", readonly=readonly)


_HASHES_OUT = _row(types.uint64, False)


# A dispatcher does not accept a writable array for a read-only parameter, so read-only inputs have both signatures.
@kernel(
    *(
        types.void(
            _row(types.uint32, readonly), types.int64, types.int64, types.int64, types.uint64, _HASHES_OUT, _HASHES_OUT
        )
        for readonly in (False, True)
    )
)
def hash_blocks(
    tokens: Any, block_size: int, stride: int, n_blocks: int, seed: int, local_out: Any, sequence_out: Any
) -> None:
    """Hash `n_blocks` windows of `block_size` tokens, which begin `stride` tokens apart, and chain them.

    tokens: uint32[>= (n_blocks - 1) * stride + block_size], which is not checked; seed: uint64;
    local_out: uint64[n_blocks]; sequence_out: uint64[n_blocks], or uint64[0] to compute only local hashes.
    """
    chain_out = address_of(sequence_out) if sequence_out.size else 0
    hash_blocks_at(address_of(tokens), block_size * 4, stride * 4, n_blocks, seed, address_of(local_out), chain_out)


@kernel(
    *(types.void(_row(types.uint64, readonly), types.uint64, types.boolean, _HASHES_OUT) for readonly in (False, True))
)
def chain_blocks(local: Any, parent: int, has_parent: bool, sequence_out: Any) -> None:
    """Chain local hashes, from the root or from a parent.

    local: uint64[n_blocks]; parent: uint64, ignored without has_parent; sequence_out: uint64[n_blocks].
    """
    keep_loops_scalar()
    previous = parent
    for block in range(local.size):
        previous = chain_step(previous, local[block]) if has_parent or block else local[block]
        sequence_out[block] = previous

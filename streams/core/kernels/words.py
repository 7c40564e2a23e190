"""Words of a context, and the hashing of keys in kernels.

What lives here: reading and writing one word of a context, and the finaliser that spreads keys over tables. What must
not: the format of any structure. Each is an intrinsic instead of an inlined function, since inlining small functions
hundreds of times took half of the compile time of all kernels.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types

from streams.core.kernels.instructions import instruction

#: 2**64 divided by the golden ratio, as int64: its products with small numbers are far apart.
SYNTHETIC_STEP = 0x9E3779B97F4A7C15 - (1 << 64)

_I64 = ir.IntType(64)

# Multipliers of MurmurHash3's finaliser.
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)


def word_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def element(builder: Any, base: Any, index: Any, bytes_each: int) -> Any:
    return builder.add(base, builder.mul(index, _I64(bytes_each)))


def context_word(builder: Any, context: Any, word: int) -> Any:
    return builder.load(word_pointer(builder, builder.add(context, _I64(word * 8))))


@instruction()
def get(builder: Any, context: Any, word: Any) -> Any:
    """Read a word of the context."""
    return builder.load(word_pointer(builder, element(builder, context, word, 8)))


@instruction(types.void)
def put(builder: Any, context: Any, word: Any, value: Any) -> None:
    """Set a word of the context."""
    builder.store(value, word_pointer(builder, element(builder, context, word, 8)))


@instruction(types.void)
def add(builder: Any, context: Any, word: Any, value: Any) -> None:
    """Add to a word of the context."""
    pointer = word_pointer(builder, element(builder, context, word, 8))
    builder.store(builder.add(builder.load(pointer), value), pointer)


def mixed(builder: Any, key: Any) -> Any:
    for multiplier in _MIX:
        key = builder.mul(builder.xor(key, builder.lshr(key, _I64(33))), _I64(multiplier))
    return builder.lshr(key, _I64(32))


@instruction()
def mix(builder: Any, key: Any) -> Any:
    """Hash a 64-bit key to 32 bits without a salt, for small tables whose keys clients cannot choose."""
    return mixed(builder, key)

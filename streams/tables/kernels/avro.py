"""Avro's integers, in kernels.

What lives here: reading and writing the parts that every schema uses. What must not: any schema.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types

from streams.core.kernels.compiling import inlined
from streams.core.kernels.instructions import instruction
from streams.core.kernels.memory import load_byte, shift_right

#: The marker of Avro's single-object encoding, and the fingerprint.
HEADER_BYTES = 10
#: A long of 64 bits takes ten groups of seven.
_VARINT_BITS_MAX = 70


@instruction(types.void)
def store_byte(builder: Any, address: Any, value: Any) -> None:
    """Write the low eight bits."""
    byte = ir.IntType(8)
    builder.store(builder.trunc(value, byte), builder.inttoptr(address, byte.as_pointer()))


@inlined
def read_long(cursor: int, end: int) -> tuple[int, int]:
    """Return a zigzag varint and the address after it; 0 and end + 1 if there is none, so that further reads fail."""
    value, shift = 0, 0
    while cursor < end and shift < _VARINT_BITS_MAX:
        byte = load_byte(cursor)
        cursor += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return int(shift_right(value, 1) ^ -(value & 1)), cursor
        shift += 7
    return 0, end + 1


@inlined
def write_long(cursor: int, value: int) -> int:
    """Write a zigzag varint; returns the address after it."""
    left = (value << 1) ^ (value >> 63)
    while shift_right(left, 7) != 0:
        store_byte(cursor, (left & 127) | 128)
        left = shift_right(left, 7)
        cursor += 1
    store_byte(cursor, left)
    return cursor + 1

"""Avro's numbers and texts in plain Python, for records that fastavro would take too long for.

What lives here: numbers and texts in bytes. What must not: any schema, and any kernel (tables.kernels.avro).
"""

from __future__ import annotations

#: Numbers of up to two bytes, which most are: making one takes ten times as long as finding it here.
_SHORT = tuple(bytes([zigzag]) for zigzag in range(0, 128, 2)) + tuple(
    bytes([zigzag & 0x7F | 0x80, zigzag >> 7]) for zigzag in range(128, 1 << 14, 2)
)
_N_SHORT = len(_SHORT)
_I63 = 1 << 63


def encoded_long(number: int) -> bytes:
    """An Avro long: zigzag, then seven bits per byte, the lowest first. Raises ValueError if it has over 64 bits."""
    if 0 <= number < _N_SHORT:
        return _SHORT[number]
    if not -_I63 <= number < _I63:
        raise ValueError(number)
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left >= 0x80:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)

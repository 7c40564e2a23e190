"""Reading a JSON array of tokens without making a Python object for each.

What lives here: the array itself. What must not: the object around it, and errors; msgspec parses again whatever this
kernel does not read, and explains what is wrong (router_api.http.body_parsing).

The kernel reads 8 bytes at a time: it finds where the digits end without a branch for each digit, and computes the
number with three multiplications. This relies on little-endian words, as XXH3's kernels do.
"""

from __future__ import annotations

from typing import Any

from numba import types

from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import address_of, load, load_byte, shift_right, trailing_zeros

_U32_MAX = 0xFFFFFFFF
_SPACE, _TAB, _LINE_FEED, _RETURN = 0x20, 0x09, 0x0A, 0x0D
_COMMA, _OPEN, _CLOSE, _ZERO, _NINE = 0x2C, 0x5B, 0x5D, 0x30, 0x39

_ZEROS = 0x3030303030303030
_SIXES = 0x0606060606060606
_HIGH_NIBBLES = 0xF0F0F0F0F0F0F0F0 - (1 << 64)  # as int64
_BYTES, _WORDS = 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF


@inlined
def _after_spaces(address: int, end: int) -> int:
    """Address of the first byte from there on that is not white space of JSON, or `end`."""
    while address < end:
        byte = load_byte(address)
        if byte != _SPACE and byte != _LINE_FEED and byte != _RETURN and byte != _TAB:
            break
        address += 1
    return address


@kernel(types.int64(types.Array(types.uint8, 1, "C", readonly=True), types.Array(types.uint32, 1, "C")))
def read_tokens(text: Any, out: Any) -> int:
    """Read a JSON array. Return the number of its tokens, which are in `out` then.

    text: uint8[n], valid JSON; out: uint32[m]. The number is -1 if the text is not an array of whole numbers in
    0..2^32-1, or if it has more than m of them.
    """
    address = address_of(text)
    end = address + text.size
    if text.size < 2 or load_byte(address) != _OPEN:
        return -1
    n = 0
    address = _after_spaces(address + 1, end)
    if address < end and load_byte(address) == _CLOSE:
        return 0
    while address < end:
        value, digits = 0, 8
        if address + 8 <= end:
            word = load(address) ^ _ZEROS  # bytes of digits are 0 to 9 now
            digits = trailing_zeros(((word + _SIXES) | word) & _HIGH_NIBBLES) >> 3
        if 0 < digits < 8:
            word = word << ((8 - digits) << 3)  # as if zeros came first
            word = (word * 10 + shift_right(word, 8)) & _BYTES
            word = (word * 100 + shift_right(word, 16)) & _WORDS
            value = (word * 10000 + shift_right(word, 32)) & _U32_MAX
        else:  # 8 digits and more, or the last bytes of the text
            digits = 0
            while address + digits < end and digits < 11:
                byte = load_byte(address + digits)
                if byte < _ZERO or byte > _NINE:
                    break
                value = value * 10 + (byte - _ZERO)
                digits += 1
        if digits == 0 or value > _U32_MAX or n >= out.size:
            return -1
        out[n] = value
        n += 1
        address = _after_spaces(address + digits, end)
        if address >= end:
            return -1
        byte = load_byte(address)
        if byte == _CLOSE:
            return n
        if byte != _COMMA:
            return -1
        address = _after_spaces(address + 1, end)
    return -1

"""Finding the long lists of tokens in a msgpack payload without making a Python object for each token.

What lives here: walking over one msgpack value, and reading arrays of small numbers. What must not: the payload's
fields, and errors; msgpack unpacks again whatever this kernel does not walk over, and says what is wrong
(engines.dialects.token_lists).
"""

from __future__ import annotations

from typing import Any

from numba import types

from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import address_of, load_byte

#: Numbers that describe one list: offset of its first byte, offset after its last byte, number of tokens.
SPAN_WORDS = 3

# First bytes of values, named as in the specification of msgpack. Below 0x80 is a number, below 0x90 a map, below 0xa0
# an array, below 0xc0 a text, and from 0xe0 on a negative number.
_MAP, _ARRAY, _STR, _NIL, _NEGATIVE = 0x80, 0x90, 0xA0, 0xC0, 0xE0
_FALSE, _TRUE = 0xC2, 0xC3
_BIN_8, _BIN_16, _BIN_32 = 0xC4, 0xC5, 0xC6
_FLOAT_32, _FLOAT_64 = 0xCA, 0xCB
_UINT_8, _UINT_16, _UINT_32, _UINT_64 = 0xCC, 0xCD, 0xCE, 0xCF
_INT_8, _INT_16, _INT_32, _INT_64 = 0xD0, 0xD1, 0xD2, 0xD3
_STR_8, _STR_16, _STR_32 = 0xD9, 0xDA, 0xDB
_ARRAY_16, _ARRAY_32, _MAP_16, _MAP_32 = 0xDC, 0xDD, 0xDE, 0xDF


@inlined
def _number(at: int, n_bytes: int) -> int:
    """Number of 1, 2 or 4 bytes at an address, big-endian."""
    value = 0
    for _ in range(n_bytes):
        value = value << 8 | load_byte(at)
        at += 1
    return value


@inlined
def _read_array(at: int, end: int, n: int, out: Any, first: int) -> int:
    """Read n numbers of at most 32 bits into out[first:]. Return the address after them, 0 if one is anything else."""
    for place in range(first, first + n):
        if at >= end:
            return 0
        byte = load_byte(at)
        at += 1
        if byte < _MAP:
            out[place] = byte
        elif byte == _UINT_16 and end - at >= 2:
            out[place] = load_byte(at) << 8 | load_byte(at + 1)
            at += 2
        elif byte == _UINT_32 and end - at >= 4:
            out[place] = load_byte(at) << 24 | load_byte(at + 1) << 16 | load_byte(at + 2) << 8 | load_byte(at + 3)
            at += 4
        elif byte == _UINT_8 and end - at >= 1:
            out[place] = load_byte(at)
            at += 1
        else:
            return 0
    return at


@inlined
def _length_bytes(byte: int) -> int:
    """Bytes of the length that follows the first byte of a text, bytes, an array or a map; 0 for any other value."""
    if byte in (_STR_8, _BIN_8):
        return 1
    if byte in (_STR_16, _BIN_16, _ARRAY_16, _MAP_16):
        return 2
    if byte in (_STR_32, _BIN_32, _ARRAY_32, _MAP_32):
        return 4
    return 0


@inlined
def _value_bytes(byte: int) -> int:
    """Bytes that follow the first byte of a value of a fixed size; -1 if it is not one of these."""
    if byte < _MAP or byte >= _NEGATIVE or byte in (_NIL, _FALSE, _TRUE):
        return 0
    if byte in (_UINT_64, _INT_64, _FLOAT_64):
        return 8
    if byte in (_UINT_32, _INT_32, _FLOAT_32):
        return 4
    if byte in (_UINT_16, _INT_16):
        return 2
    if byte in (_UINT_8, _INT_8):
        return 1
    return -1


@kernel(
    types.int64(
        types.Array(types.uint8, 1, "C", readonly=True),
        types.int64,
        types.Array(types.int64, 1, "C"),
        types.Array(types.uint32, 1, "C"),
    )
)
def find_tokens(payload: Any, length_min: int, spans: Any, out: Any) -> int:
    """Find the arrays of at least `length_min` numbers in 0..2^32-1. Return their number.

    payload: uint8[n]. spans: int64[m * SPAN_WORDS], receives SPAN_WORDS numbers for each array. out: uint32[n],
    receives the numbers of all arrays one after the other. The result is -1 if the payload is not exactly one value, if
    it contains an extension type, and if it has more than m such arrays.
    """
    first = address_of(payload)
    end = first + payload.size
    at = first
    n_spans, n_tokens = 0, 0
    left = 1  # values that must follow
    while left > 0:
        left -= 1
        if at >= end:
            return -1
        begin = at
        byte = load_byte(at)
        at += 1
        n_bytes = _value_bytes(byte)
        if n_bytes < 0:
            n_length = _length_bytes(byte)
            if n_length > 0:
                if n_length > end - at:
                    return -1
                length = _number(at, n_length)
                at += n_length
            elif byte < _STR:
                length = byte & 0x0F
            elif byte < _NIL:
                length = byte & 0x1F
            else:
                return -1  # an extension type, or the byte that has no meaning
            if byte < _ARRAY or byte in (_MAP_16, _MAP_32):
                left += 2 * length
            elif byte < _STR or byte in (_ARRAY_16, _ARRAY_32):
                if length_min <= length <= end - at:
                    after = _read_array(at, end, length, out, n_tokens)
                    if after > 0:
                        if (n_spans + 1) * SPAN_WORDS > spans.size:
                            return -1
                        spans[n_spans * SPAN_WORDS] = begin - first
                        spans[n_spans * SPAN_WORDS + 1] = after - first
                        spans[n_spans * SPAN_WORDS + 2] = length
                        n_spans += 1
                        n_tokens += length
                        at = after
                        continue
                left += length
            else:
                n_bytes = length
        if n_bytes > 0:
            if n_bytes > end - at:
                return -1
            at += n_bytes
    return n_spans if at == end else -1

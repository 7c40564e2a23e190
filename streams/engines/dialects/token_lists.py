"""Unpacking a msgpack payload whose lists of tokens become arrays, so that no Python object is made for each token.

What lives here: taking the lists out of the payload, and the arrays that stand for them. What must not: the meaning of
fields (one module per dialect).

A payload is unpacked by msgpack alone if it is unusual in any way: damaged, with an extension type, or with a long list
of numbers where an event has no tokens. So a decoder gets the same values and the same errors as without this module,
except that `token_ids` may be uint32[n] instead of a list.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import msgpack
import numpy as np

from streams.core.hashing import KERNELS_AVAILABLE, TokenArray

if KERNELS_AVAILABLE:
    from streams.core.kernels.msgpack_tokens import SPAN_WORDS, find_tokens

#: Payloads with fewer bytes are unpacked faster by msgpack alone, and so are shorter lists.
PAYLOAD_BYTES_MIN = 600
TOKENS_MIN = 96

#: Lists that are taken out of one payload. One byte says which of them an extension value stands for.
LISTS_MAX = 256

#: The type of the extension values that stand for lists. A payload that has extension values itself is not divided.
_TYPE = 1

#: Where a store that is an array has its tokens.
_TOKENS_AT = 3


def unpack(raw: bytes) -> Any:
    """Unpack a payload; `token_ids` of stores may be uint32[n] instead of lists. Raises what msgpack raises."""
    if KERNELS_AVAILABLE and len(raw) >= PAYLOAD_BYTES_MIN:
        spans = np.empty(LISTS_MAX * SPAN_WORDS, dtype=np.int64)
        numbers = np.empty(len(raw), dtype=np.uint32)  # each number takes at least one byte
        n_lists = find_tokens(np.frombuffer(raw, dtype=np.uint8), TOKENS_MIN, spans, numbers)
        if n_lists > 0:
            unpacked = _unpack_without(raw, spans[: n_lists * SPAN_WORDS].tolist(), numbers)
            if _n_token_arrays(unpacked) == n_lists:
                return unpacked
    return msgpack.unpackb(raw, strict_map_key=False)


def is_tokens(value: object) -> TypeGuard[list[Any] | TokenArray]:
    """Whether a field has the form of a list of tokens."""
    return isinstance(value, list | np.ndarray)


def as_list(tokens: list[Any] | TokenArray) -> list[Any]:
    """Return tokens as a list."""
    return tokens.tolist() if isinstance(tokens, np.ndarray) else tokens


def _unpack_without(raw: bytes, spans: list[int], numbers: TokenArray) -> Any:
    """Unpack a payload with an extension value in place of each list."""
    parts: list[bytes] = []
    arrays: list[TokenArray] = []
    position = first = 0
    for begin, end, length in zip(spans[::SPAN_WORDS], spans[1::SPAN_WORDS], spans[2::SPAN_WORDS], strict=True):
        parts += (raw[position:begin], bytes((0xD4, _TYPE, len(arrays))))  # 0xd4: an extension value of one byte
        arrays.append(numbers[first : first + length])
        position, first = end, first + length
    parts.append(raw[position:])
    return msgpack.unpackb(b"".join(parts), strict_map_key=False, ext_hook=lambda _, data: arrays[data[0]])


def _n_token_arrays(outer: Any) -> int:
    """Return how many stores of a payload have an array as their tokens."""
    if isinstance(outer, dict):
        events = outer.get("events")
    else:
        events = outer[1] if isinstance(outer, list) and len(outer) > 1 else None
    if not isinstance(events, list):
        return 0
    n_arrays = 0
    for event in events:
        if isinstance(event, dict):
            kind, tokens = event.get("type"), event.get("token_ids")
        elif isinstance(event, list) and len(event) > _TOKENS_AT:
            kind, tokens = event[0], event[_TOKENS_AT]
        else:
            continue
        n_arrays += isinstance(tokens, np.ndarray) and isinstance(kind, str) and kind == "BlockStored"
    return n_arrays

"""Parsing large bodies in pieces, so that other requests are answered meanwhile.

What lives here: parsing the lists of a large JSON body piece by piece, on a thread. What must not: the fields of
requests and their limits (wire), and threads (bodies).

A thread that parses JSON holds the interpreter until the call returns: for 36 ms if the body has a million tokens. Here
one call only finds where each list ends (9 ms for a million tokens), and each of the others parses 64 KiB (0.3 ms).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from streams.core.hashing import pack_tokens
from streams.errors import InvalidRequest, RequestTooLarge
from streams.router_api.wire import WORKER_IDS_MAX, BookRequest, RouteRequest, decode_body, invalid_body

#: Bytes of a list that one call parses.
PIECE_BYTES = 64 * 1024

#: The lists of requests that may be long, with the greatest number of their items; None if tokens limit it.
_LISTS = {"block_hashes": None, "allowed_worker_ids": WORKER_IDS_MAX, "excluded_worker_ids": WORKER_IDS_MAX}
_TOKENS = "token_ids"

_numbers = msgspec.json.Decoder(list[int])
_numbers_or_text = msgspec.json.Decoder(list[int | str])

_Request = TypeVar("_Request", RouteRequest, BookRequest)


class LargeBody(Generic[_Request]):
    """Parses bodies of one type. A body gives the same request, or an error of the same class, as a call at once."""

    def __init__(self, kind: type[_Request]) -> None:
        self._kind: type[_Request] = kind
        fields: list[Any] = []
        for field in msgspec.structs.fields(kind):
            if field.name == _TOKENS or field.name in _LISTS:
                fields.append((field.name, msgspec.Raw, None))
            elif field.required:
                fields.append((field.name, field.type))
            else:
                fields.append((field.name, field.type, field.default))
        # Lists of tokens and ids stay bytes; everything else is parsed and checked.
        outline = msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True, kw_only=True)
        self._outline: msgspec.json.Decoder[Any] = msgspec.json.Decoder(outline)

    def parse(self, body: bytes, tokens_max: int) -> tuple[_Request, bytes | None]:
        """Parse a body; return the request without its tokens, and the tokens packed as u32 little-endian.

        Raises InvalidRequest, and RequestTooLarge for more than tokens_max tokens.
        """
        outline = decode_body(self._outline, body)
        values = {name: getattr(outline, name) for name in self._kind.__struct_fields__}
        packed = None
        if values[_TOKENS] is not None:
            packed = _packed(values[_TOKENS], tokens_max)
            values[_TOKENS] = None
        for name, items_max in _LISTS.items():
            if values.get(name) is not None:
                values[name] = _items(name, values[name], items_max or tokens_max)
        return self._kind(**values), packed


def _packed(raw: msgspec.Raw, tokens_max: int) -> bytes | None:
    packed: list[bytes] = []
    n_tokens = 0
    for piece in _pieces(_TOKENS, raw, _numbers):
        if piece is None:
            return None
        n_tokens += len(piece)
        if n_tokens > tokens_max:
            raise RequestTooLarge(f"more than {tokens_max} tokens, the limit of this router", limit=tokens_max)
        packed.append(pack_tokens(piece))
    return b"".join(packed)


def _items(name: str, raw: msgspec.Raw, items_max: int) -> list[int | str] | None:
    items: list[int | str] = []
    for piece in _pieces(name, raw, _numbers_or_text):
        if piece is None:
            return None
        items += piece
        if len(items) > items_max:
            error = RequestTooLarge if name == "block_hashes" else InvalidRequest
            raise error(f"{name} has more than {items_max} items", limit=items_max)
    return items


def _pieces(name: str, raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Iterator[Any]:
    """The items of a JSON array, in lists of about PIECE_BYTES; None for null. Raises InvalidRequest."""
    text = bytes(raw)
    if text == b"null":
        yield None
        return
    try:
        if not text.startswith(b"["):
            decoder.decode(text[:PIECE_BYTES])  # raises an error that names the type, which is not array
            raise InvalidRequest(f"{name} is not an array")
        at = 1
        while True:
            # The items are numbers, or text without commas: if a piece ends within an item, the item is not valid.
            comma = text.find(b",", at + PIECE_BYTES)
            if comma < 0:
                yield decoder.decode(b"[" + text[at:])
                return
            yield decoder.decode(b"[" + text[at:comma] + b"]")
            at = comma + 1
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{name}: {invalid_body(exc, None)}") from exc
    except RecursionError as exc:
        raise InvalidRequest(f"{name} is nested too deeply") from exc

"""From the body of a request to the request: the only place that decides how a body with tokens is parsed.

What lives here: which bodies are parsed at once and which on a thread, and parsing the lists of a large JSON body piece
by piece. What must not: the fields of requests and their limits (messages/requests), and reading bodies and threads
(bodies).

| body | parsed |
|---|---|
| `application/octet-stream` | not at all: it is the tokens, u32 little-endian, and the query has the other fields |
| JSON of at most LARGE_BODY_BYTES | at once, by msgspec; its tokens by a kernel |
| larger JSON | on a thread and in pieces, with everything that is computed from it |

msgspec only finds where the array of tokens ends, and a kernel reads it, so that no object is made for each token: for
32,768 tokens that takes 0.3 ms instead of 0.9. If the kernel refuses the array, msgspec parses the whole body again and
explains what is wrong with it.

A thread that parses JSON holds the interpreter until the call returns: for 36 ms if the body has a million tokens. In
pieces, one call only finds where each list ends (9 ms for a million tokens), and each of the others parses 64 KiB
(0.3 ms). So other requests are answered meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from msgspec.structs import replace

from streams.core.hashing import pack_tokens
from streams.core.kernels.json_tokens import read_tokens
from streams.errors import InvalidRequest, RequestTooLarge
from streams.router_api.http.bodies import Bodies
from streams.router_api.messages.body_errors import decode_body, invalid_body
from streams.router_api.messages.requests import (
    NAME_CHARS_MAX,
    OCTET_STREAM,
    WORKER_IDS_MAX,
    BookRequest,
    RouteRequest,
    parse_route_query,
)

#: JSON bodies above this size are parsed on a thread and in pieces. A prompt of 35,000 tokens is below it, which takes
#: 1 ms; one of a million tokens would stop all other requests for 40 ms.
LARGE_BODY_BYTES = 256 * 1024

#: Bytes of a list that one call parses.
PIECE_BYTES = 64 * 1024

#: The lists of requests that may be long, with the greatest number of their items; None if tokens limit it.
_LISTS = {"block_hashes": None, "allowed_worker_ids": WORKER_IDS_MAX, "excluded_worker_ids": WORKER_IDS_MAX}
_TOKENS = "token_ids"

_numbers = msgspec.json.Decoder(list[int])
_numbers_or_text = msgspec.json.Decoder(list[int | str])

_Request = TypeVar("_Request", RouteRequest, BookRequest)
_T = TypeVar("_T")


class BodyParser(Generic[_Request]):
    """Parses the JSON bodies of one type of request. A body of any size gives the same request, or the same error."""

    def __init__(
        self, kind: type[_Request], parse: Callable[[bytes], _Request], bodies: Bodies, tokens_max: int
    ) -> None:
        """parse: parses a body of this type at once."""
        self._parse: Callable[[bytes], _Request] = parse
        self._with_raw_tokens: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct(kind.__name__, [(_TOKENS, msgspec.Raw, None)], bases=(kind,), frozen=True)
        )
        self._bodies = bodies
        self._tokens_max = tokens_max
        self._large: LargeBody[_Request] = LargeBody(kind)

    async def parsed(self, body: bytes, use: Callable[[_Request, bytes | None], _T]) -> _T:
        """Parse a body; return what `use` returns for the request, and its tokens if they are not part of it.

        The tokens are packed as u32 little-endian. A large body is parsed and used on a thread. Raises InvalidRequest,
        RequestTooLarge, and what `use` raises.
        """
        if len(body) <= LARGE_BODY_BYTES:
            return use(*self.parsed_at_once(body))
        return await self._bodies.on_thread(self._use_large, body, use)

    def parsed_at_once(self, body: bytes) -> tuple[_Request, bytes | None]:
        """Parse a body; return the request, and its tokens as `parsed` has them. Raises InvalidRequest."""
        try:
            request = self._with_raw_tokens.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._parse(body), None  # which raises an error that names the types of this request
        packed = None if request.token_ids is None else read_array(request.token_ids, self._tokens_max)
        return (self._parse(body), None) if packed is None else (replace(request, token_ids=None), packed)

    def _use_large(self, body: bytes, use: Callable[[_Request, bytes | None], _T]) -> _T:
        return use(*self._large.parse(body, self._tokens_max))


def packed_query(request: web.Request) -> RouteRequest | None:
    """The request in the query parameters, if the body contains packed tokens; None if the body is JSON.

    Raises InvalidRequest.
    """
    # Not request.content_type: for a missing or broken header, aiohttp returns octet-stream, and JSON would be read as
    # tokens.
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() == OCTET_STREAM:
        return parse_route_query(request.query)
    check_no_query(request)
    return None


def packed_tokens(body: bytes) -> bytes:
    """The tokens of a body with packed tokens. Raises InvalidRequest if it has none."""
    if not body:
        raise InvalidRequest("the body is empty; it must contain the tokens, u32 little-endian")
    return body


def check_no_query(request: web.Request) -> None:
    """Raise InvalidRequest for query parameters next to a JSON body: the body's fields are the only parameters."""
    if request.query_string:
        name = next(iter(request.query), request.query_string)
        raise InvalidRequest(
            f"query parameter {name[:NAME_CHARS_MAX]!r} next to a JSON body",
            remedy="Make it a field of the body. Only tokens sent as application/octet-stream have query parameters",
        )


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


def read_array(raw: msgspec.Raw, tokens_max: int) -> bytes | None:
    """The tokens of a JSON array, packed as u32 little-endian; None if it is none, or has more than tokens_max."""
    text = np.frombuffer(raw, dtype=np.uint8)
    tokens = np.empty(min(text.size // 2, tokens_max), dtype=np.uint32)  # each takes at least two bytes
    n_tokens = read_tokens(text, tokens)
    return None if n_tokens < 0 else tokens[:n_tokens].tobytes()


def _packed(raw: msgspec.Raw, tokens_max: int) -> bytes | None:
    read = read_array(raw, tokens_max)
    if read is not None:
        return read
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
        position = 1
        while True:
            # The items are numbers, or text without commas: if a piece ends within an item, the item is not valid.
            comma = text.find(b",", position + PIECE_BYTES)
            if comma < 0:
                yield decoder.decode(b"[" + text[position:])
                return
            yield decoder.decode(b"[" + text[position:comma] + b"]")
            position = comma + 1
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"{name}: {invalid_body(exc, None)}") from exc
    except RecursionError as exc:
        raise InvalidRequest(f"{name} is nested too deeply") from exc

"""The messages of Envoy's external processing (ext_proc), as a picker reads and writes them (pure).

What lives here: the bytes. What must not: their order (protocol), and what is picked (picks).

What Envoy sends is parsed by protobuf (ext_proc_types). What a picker answers is a few fixed shapes, which are written
here field by field: protobuf would take 30 us for each answer. Tests read the bytes with protobuf.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from streams.errors import InvalidRequest
from streams.picker.ext_proc_types import ProcessingRequest

#: Headers of one message, and bytes of one. Envoy has lower limits of its own (100 headers, 60 KiB in all).
HEADERS_MAX = 1024

#: Endpoints that a subset hint may list.
SUBSET_MAX = 16_384

#: Bytes of a body in one message to Envoy. Gateways differ in how long one may be; 64 KiB is their common limit.
BODY_CHUNK_BYTES = 62_000

#: Where proposal 004 of the Gateway API Inference Extension has its metadata.
LB = "envoy.lb"
SUBSET_HINT = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"

#: Destinations whose metadata is kept: each is a list of endpoints, and fleets have fewer.
DESTINATIONS_MAX = 4096

#: The metadata namespace of what a picker says about a decision.
DETAILS = "kvstreams"

Details = Mapping[str, str | float | bool]


class Part(enum.Enum):
    """What a message is about: the name of the field in which it comes, and the number of its answer's."""

    REQUEST_HEADERS = "request_headers", 1
    RESPONSE_HEADERS = "response_headers", 2
    REQUEST_BODY = "request_body", 3
    RESPONSE_BODY = "response_body", 4
    REQUEST_TRAILERS = "request_trailers", 5
    RESPONSE_TRAILERS = "response_trailers", 6

    def __init__(self, field: str, number: int) -> None:
        self.field = field
        self.number = number


_PARTS = {part.field: part for part in Part}


class BodyMode(enum.IntEnum):
    """How Envoy sends a body, with the numbers of its `ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Modes(NamedTuple):
    """How Envoy sends bodies in one stream. Only its first message says so."""

    request_body: BodyMode
    response_body: BodyMode


class Message(NamedTuple):
    """One message of Envoy.

    headers: by their names in lower case; of several with one name, the first. ends: whether it ends the request, or
    the response. subset: the endpoints that may be picked, if the gateway limits them. served: the endpoint that served
    the request. modes: only in a stream's first message. observes: whether Envoy reads no answer.
    """

    part: Part
    headers: Mapping[str, str]
    body: bytes
    ends: bool
    subset: tuple[str, ...] | None = None
    served: str | None = None
    modes: Modes | None = None
    observes: bool = False


_NO_HEADERS: Mapping[str, str] = {}


def read_message(raw: bytes) -> Message:
    """Parse a `ProcessingRequest`. Raises InvalidRequest for what is none, or exceeds a limit."""
    request = ProcessingRequest()
    try:
        request.ParseFromString(raw)
    except DecodeError as exc:
        raise InvalidRequest("the message is no ProcessingRequest") from exc
    part = _PARTS.get(request.WhichOneof("request") or "")
    if part is None:
        raise InvalidRequest("the message has no request")
    headers, body, ends = _NO_HEADERS, b"", True
    if part is Part.REQUEST_BODY or part is Part.RESPONSE_BODY:
        found = getattr(request, part.field)
        body, ends = found.body, found.end_of_stream
    elif part is Part.REQUEST_HEADERS or part is Part.RESPONSE_HEADERS:
        found = getattr(request, part.field)
        headers, ends = _headers(found.headers.headers), found.end_of_stream
    subset = served = modes = None
    if request.HasField("metadata_context"):
        metadata = request.metadata_context.filter_metadata
        if SUBSET_HINT in metadata:
            subset = _subset(metadata[SUBSET_HINT].fields)
        if LB in metadata and SERVED in metadata[LB].fields:
            served = metadata[LB].fields[SERVED].string_value or None
    if request.HasField("protocol_config"):
        config = request.protocol_config
        try:
            modes = Modes(BodyMode(config.request_body_mode), BodyMode(config.response_body_mode))
        except ValueError as exc:
            raise InvalidRequest("the body mode of Envoy is not known") from exc
    return Message(part, headers, body, ends, subset, served, modes, request.observability_mode)


def _headers(fields: Iterable[object]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for n, field in enumerate(fields):
        if n >= HEADERS_MAX:
            raise InvalidRequest(f"the request has more than {HEADERS_MAX} headers")
        raw: bytes = field.raw_value  # type: ignore[attr-defined]  # the types are made at run time
        value: str = raw.decode("utf-8", "surrogateescape") if raw else field.value  # type: ignore[attr-defined]
        headers.setdefault(field.key.lower(), value)  # type: ignore[attr-defined]
    return headers


def _subset(fields: Mapping[str, Value]) -> tuple[str, ...] | None:
    """Read the subset hint, a list or a text with commas. None if there is none, unlike one that is empty."""
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        endpoints: Iterable[str] = (each.string_value for each in value.list_value.values)
    else:
        endpoints = value.string_value.split(",")
    found = tuple(endpoint.strip() for endpoint in endpoints if endpoint.strip())
    if len(found) > SUBSET_MAX:
        raise InvalidRequest(f"the subset has more than {SUBSET_MAX} endpoints")
    return found


# -- answers -----------------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _bytes(number: int, value: bytes) -> bytes:
    """A field of bytes, of a text or of a message."""
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _flag(number: int) -> bytes:
    return _varint(number << 3) + b"\x01"


def _set_headers(headers: Mapping[str, str]) -> bytes:
    """A HeaderMutation that sets headers, whatever their values were. Envoy reads `raw_value`."""
    options = (
        _bytes(1, _bytes(1, name.encode()) + _bytes(3, value.encode("utf-8", "surrogateescape"))) + b"\x18\x02"
        for name, value in headers.items()
    )
    return b"".join(_bytes(1, option) for option in options)


def _value(value: str | float | bool) -> bytes:
    """A `google.protobuf.Value`."""
    if isinstance(value, bool):
        return _varint(4 << 3) + (b"\x01" if value else b"\x00")
    if isinstance(value, str):
        return _bytes(3, value.encode("utf-8", "surrogateescape"))
    return _varint(2 << 3 | 1) + struct.pack("<d", value)


def _struct(values: Mapping[str, str | float | bool]) -> bytes:
    """A `google.protobuf.Struct`."""
    return b"".join(_bytes(1, _bytes(1, name.encode()) + _bytes(2, _value(value))) for name, value in values.items())


def metadata(destination: str, details: Details | None = None) -> bytes:
    """The dynamic metadata of a pick, as a field of an answer. details: what else it says, under DETAILS."""
    named = _destination_metadata(destination)
    return _bytes(8, named + _namespace(DETAILS, details) if details else named)


@lru_cache(DESTINATIONS_MAX)
def _destination_metadata(destination: str) -> bytes:
    return _namespace(LB, {DESTINATION: destination})


def _namespace(name: str, values: Details) -> bytes:
    return _bytes(1, _bytes(1, name.encode()) + _bytes(2, _bytes(5, _struct(values))))


_EMPTY_ANSWERS = {part: _bytes(part.number, b"") for part in Part}


def empty_answer(part: Part) -> bytes:
    """The answer that changes nothing."""
    return _EMPTY_ANSWERS[part]


def picked_answer(part: Part, headers: Mapping[str, str], dynamic_metadata: bytes, body: bytes | None = None) -> bytes:
    """The answer with the pick: to the headers of a request, or to its body where Envoy buffers that.

    clear_route_cache is set, so that routes may depend on the headers. dynamic_metadata: of `metadata`. body: in place
    of a buffered one; None leaves it as it is.
    """
    common = _bytes(2, _set_headers(headers)) + (b"" if body is None else _bytes(3, _bytes(1, body))) + _flag(5)
    return _bytes(part.number, _bytes(1, common)) + dynamic_metadata


def streamed_bodies(part: Part, body: bytes | bytearray, *, ends: bool) -> Iterator[bytes]:
    """The answers that pass a body on in full duplex. ends: whether the last one ends the body."""
    view = memoryview(body)
    last = max(0, len(view) - 1) // BODY_CHUNK_BYTES
    for n in range(last + 1):
        chunk = bytes(view[n * BODY_CHUNK_BYTES : (n + 1) * BODY_CHUNK_BYTES])
        streamed = (_bytes(1, chunk) if chunk else b"") + (_flag(2) if ends and n == last else b"")
        yield _bytes(part.number, _bytes(1, _bytes(3, _bytes(3, streamed))))


def refused_answer(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """An ImmediateResponse: the client's answer, in place of an engine's."""
    code = _bytes(1, _varint(1 << 3) + _varint(status))
    refused = code + _bytes(2, _set_headers(headers)) + _bytes(3, body) + _bytes(5, details.encode())
    return _bytes(7, refused)

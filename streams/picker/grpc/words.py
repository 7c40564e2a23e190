"""Statuses, deadlines and headers of gRPC as they are written.

What lives here: these, without I/O. What must not: when they are sent (call, connection).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from hpack import NeverIndexedHeaderTuple

Header = tuple[bytes, bytes]


class Status(IntEnum):
    """The status of a call."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


#: The headers of an answer that has messages.
RESPONSE_HEADERS: list[Header] = [(b":status", b"200"), (b"content-type", b"application/grpc")]

#: The trailers of most calls.
_OK_TRAILERS: list[Header] = [(b"grpc-status", b"0")]

#: The text of a status, which is a header, is cut here.
TEXT_BYTES_MAX = 1024

_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")

_TO_ESCAPE = re.compile(rb"[^ -$&-~]")


class Request(NamedTuple):
    """What the headers of a call say. timeout_s: None without a deadline."""

    method: str
    timeout_s: float | None


class Refused(Exception):
    """The request is not one of gRPC; `headers` is the whole answer."""

    def __init__(self, headers: list[Header]) -> None:
        super().__init__()
        self.headers = headers


def read_request(headers: Iterable[Header]) -> Request:
    """Read the headers of a request, whose names are lower-case; raises Refused."""
    named = dict(headers)
    if not named.get(b"content-type", b"").startswith(b"application/grpc"):
        raise Refused([(b":status", b"415"), *trailers(Status.UNKNOWN, "the content type must be application/grpc")])
    if named.get(b":method") != b"POST":
        raise Refused([(b":status", b"405"), *trailers(Status.INTERNAL, "the method must be POST")])
    if named.get(b"te") != b"trailers":
        raise Refused(only_trailers(Status.INTERNAL, "the header te: trailers is missing"))
    timeout = named.get(b"grpc-timeout")
    seconds: float | None = None
    if timeout is not None:
        parts = _TIMEOUT.fullmatch(timeout)
        if parts is None:
            raise Refused(only_trailers(Status.INTERNAL, "grpc-timeout cannot be read"))
        seconds = int(parts[1]) * _UNITS_S[parts[2]]
    return Request(named.get(b":path", b"").decode("latin-1"), seconds)


def trailers(status: Status, text: str) -> list[Header]:
    """The last headers of an answer that has headers."""
    if not text:
        return _OK_TRAILERS if status is Status.OK else [(b"grpc-status", b"%d" % status)]
    escaped = _TO_ESCAPE.sub(lambda found: b"%%%02X" % found[0][0], _cut(text))
    # Texts never enter the table of compressed headers, whose size the peer chooses.
    return [(b"grpc-status", b"%d" % status), NeverIndexedHeaderTuple(b"grpc-message", escaped)]


def only_trailers(status: Status, text: str) -> list[Header]:
    """The headers of an answer without messages. A client that compressed learns what it may send instead."""
    accepts = [(b"grpc-accept-encoding", b"identity")] if status is Status.UNIMPLEMENTED else []
    return [*RESPONSE_HEADERS, *accepts, *trailers(status, text)]


def _cut(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore").encode()

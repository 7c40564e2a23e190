"""Short requests of the most frequent calls, answered as soon as their bytes arrive.

What lives here: which requests take this way, and the bytes of their answers. What must not: what a request means
(wire, router), and requests that wait for something; aiohttp and handlers answer these and all others.

aiohttp makes a task, a future, a request and a response for each request, and looks for its route. That is most of the
work of a booking and its end. Here the same parser reads the request, and the answer is written in the same step of the
event loop. A client sees the same answers.

Private parts of aiohttp's protocol are used. If a version lacks one of them, aiohttp answers everything; a test fails
then.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from streams.core.loads.bookings import BookingPhase
from streams.errors import KvStreamsError, api_error
from streams.router_api.bodies import UNCOUNTED_BODY_BYTES
from streams.router_api.metrics import RouterMetrics
from streams.router_api.router import Router
from streams.router_api.token_bodies import parse_with_tokens
from streams.router_api.wire import (
    OCTET_STREAM,
    RouteRequest,
    answer_json,
    error_json,
    is_list,
    parse_output,
    parse_report_query,
    parse_route,
    parse_route_query,
)

log = logging.getLogger(__name__)

#: Seconds for which the rest of a body is awaited here. After that, aiohttp waits for it, with its limit of time.
HOLD_S = 0.02

#: Request ids that mean the same in a path as they are; others may be encoded.
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,512}")

#: Query parameters without encoded characters.
_PLAIN_QUERY = re.compile(r"\w+=[\w.,:~-]*(?:&\w+=[\w.,:~-]*)*", re.ASCII)

_ROUTE, _LOADS = "/route", "/loads/"

#: The private attributes of aiohttp's protocol that are used.
_PROTOCOL_PARTS = (
    *("_waiter", "_messages", "_parser", "_paused", "_reading_paused", "_buffer_paused"),
    *("_keepalive_timeout", "_next_keepalive_close_time"),
)

#: Since 3.14, the parser limits the requests that it has ready, and needs to know when one is taken.
_COUNTS_MESSAGES = hasattr(HttpRequestParser, "message_consumed")

#: Reads the rest of a request and answers it; see FastLane.call_of.
_Call = Callable[[bytes], "bytes | None"]


def is_supported() -> bool:
    """Whether this version of aiohttp has the parts that are used."""
    has_parts = all(hasattr(web.RequestHandler, part) for part in _PROTOCOL_PARTS)
    return has_parts and hasattr(StreamReader, "_buffer")


class FastLane:
    """Answers short requests. Owned by Handlers, and used on the loop that serves the API."""

    def __init__(self, router: Router, metrics: RouterMetrics, retry_after_s: str) -> None:
        self._router = router
        self._route_seconds = metrics.route_seconds
        self._errors = metrics.errors
        self._tokens_max = router.settings.request_tokens_max
        self._body_bytes_max = min(UNCOUNTED_BODY_BYTES, router.settings.body_bytes_max)
        self._retry_after_s = retry_after_s
        self.n_answered = 0

    def call_of(self, message: RawRequestMessage) -> _Call | None:
        """What answers a request once its body is there; None if the request does not take this way.

        The result returns the whole response, or None if the body shows that aiohttp must answer after all; it has
        changed nothing then.
        """
        if message.version != HttpVersion11 or message.should_close or message.upgrade or message.chunked:
            return None
        path, headers, method = message.path, message.headers, message.method
        if self._router.stopping or "Expect" in headers or "Content-Encoding" in headers:
            return None
        length = headers.get("Content-Length")
        if length is not None and (len(length) > 8 or int(length) > self._body_bytes_max):
            return None
        if method == "POST" and path.startswith(_ROUTE) and path[6:7] in ("", "?"):
            return self._route_call(message, headers) if length is not None else None
        if not path.startswith(_LOADS):
            return None
        rest, _, query = path[len(_LOADS) :].partition("?")
        request_id, _, action = rest.partition("/")
        if not _PLAIN_ID.fullmatch(request_id):
            return None
        asks = message if query else None
        if method == "DELETE" and not action:
            return lambda _: self._report(request_id, BookingPhase.FREE, asks)
        if method == "POST" and action == "prefill-complete":
            return lambda _: self._report(request_id, BookingPhase.PREFILL, asks)
        if method == "POST" and action == "output":
            return lambda body: self._output(request_id, body, asks)
        return None

    def answer(self, call: _Call, message: RawRequestMessage, body: bytes) -> bytes | None:
        """Call what `call_of` returned. An error becomes an answer in the shape of all errors."""
        try:
            found = call(body)
        except KvStreamsError as exc:
            reported = api_error(exc)
            if reported.http_status == 500:
                log.exception("%s %s failed", message.method, message.url.path)
            found = self._refusal(reported.http_status, reported.code, str(exc), exc.detail)
        except Exception:
            log.exception("%s %s failed", message.method, message.url.path)
            found = self._refusal(500, KvStreamsError.code, "a fault of the router")
        self.n_answered += found is not None
        return found

    def _route_call(self, message: RawRequestMessage, headers: Mapping[str, str]) -> _Call | None:
        content_type = headers.get("Content-Type", "")
        if content_type == OCTET_STREAM:
            return lambda body: self._route_packed(message, body)
        if OCTET_STREAM in content_type.lower() or len(message.path) > len(_ROUTE):
            return None  # an unusual form of the type, or an error
        return self._route_json

    def _route_packed(self, message: RawRequestMessage, body: bytes) -> bytes | None:
        started = time.perf_counter()
        request = parse_route_query(_query_of(message))
        if not body or _may_wait(request):
            return None
        found = _response(200, orjson.dumps(answer_json(self._router.route(request, body))))
        self._route_seconds.observe(time.perf_counter() - started)
        return found

    def _route_json(self, body: bytes) -> bytes | None:
        if is_list(body):
            return None
        started = time.perf_counter()
        request, packed = parse_with_tokens(parse_route, body, self._tokens_max)
        if _may_wait(request):
            return None
        found = _response(200, orjson.dumps(answer_json(self._router.route(request, packed))))
        self._route_seconds.observe(time.perf_counter() - started)
        return found

    def _report(self, request_id: str, what: BookingPhase, asks: RawRequestMessage | None) -> bytes:
        """asks: the request, if it has query parameters."""
        phase = None if asks is None else parse_report_query(_query_of(asks)).phase
        return _accepted(self._router.report_phase(request_id, what, phase))

    def _output(self, request_id: str, body: bytes, asks: RawRequestMessage | None) -> bytes:
        phase = None if asks is None else parse_report_query(_query_of(asks)).phase
        return _accepted(self._router.report_output(request_id, parse_output(body).output_tokens, phase))

    def _refusal(self, status: int, code: str, message: str, detail: dict[str, Any] | None = None) -> bytes:
        self._errors[code] += 1
        more = ""
        if status == 503:
            more = f"Retry-After: {(detail or {}).get('retry_after_s', self._retry_after_s)}\r\n"
        body = orjson.dumps(error_json(code, message, detail), option=orjson.OPT_NON_STR_KEYS)
        return _response(status, body, more)


def _may_wait(request: RouteRequest) -> bool:
    """Whether a request asks to wait for a rank, which the fast lane does not."""
    return getattr(request, "queue", "off") != "off"


def _query_of(message: RawRequestMessage) -> Mapping[str, str]:
    """The query parameters. Those without encoded characters, which most are, need no library."""
    text = message.path.partition("?")[2]
    if not text:
        return {}
    if _PLAIN_QUERY.fullmatch(text):
        pairs = [pair.split("=") for pair in text.split("&")]
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
    query: Mapping[str, str] = message.url.query
    return query


def _accepted(answer: dict[str, Any]) -> bytes:
    return _response(202 if answer["buffered"] else 200, orjson.dumps(answer))


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


def _response(status: int, body: bytes, more_headers: str = "") -> bytes:
    """A whole response, with the headers that aiohttp would write."""
    head = (
        f"{_STATUS_LINES[status]}\r\nContent-Type: application/json\r\n{more_headers}Content-Length: {len(body)}\r\n"
        f"Date: {rfc822_formatted_time()}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
    )
    return head.encode() + body


class FastProtocol(web.RequestHandler):
    """aiohttp's protocol of one connection, which answers short requests itself while it has no others."""

    __slots__ = ("_call", "_held", "_lane", "_note_first")

    def __init__(
        self, lane: FastLane | None, note_first: Callable[[web.RequestHandler], None], *args: Any, **kwargs: Any
    ) -> None:
        """lane: None if aiohttp answers everything. note_first: called when the connection has its first request."""
        super().__init__(*args, **kwargs)
        self._lane = lane
        self._note_first: Callable[[web.RequestHandler], None] | None = note_first
        self._call: _Call | None = None  # of the request whose body is incomplete
        self._held: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; answer it here, or leave it to the task that aiohttp has for the connection."""
        waiter = self._waiter
        # While the task is busy, aiohttp queues what arrives.
        if self._lane is None or waiter is None or waiter.done():
            super().data_received(data)
            return
        self._waiter = None  # so that the task is not woken
        try:
            super().data_received(data)
            # If so many requests came at once that reading is paused, aiohttp knows when to continue.
            while self._messages and not self._buffer_paused and self._answer_first(self._lane):
                pass
        finally:
            self._waiter = waiter
        if self._messages and self._held is None:
            waiter.set_result(None)

    def _answer_first(self, lane: FastLane) -> bool:
        """Answer the first request that was parsed. False if it is left to the task, or its body is incomplete."""
        message, payload = self._messages[0]
        transport = self.transport
        # An error of the parser has another type. Writing is paused while the client does not read.
        if not isinstance(message, RawRequestMessage) or self._paused or transport is None:
            self._let_go()
            return False
        call = self._call
        if call is None:
            call = lane.call_of(message)
            if call is None:
                return False
        if not payload.is_eof():
            self._call = call
            if self._held is None:
                self._held = self._loop.call_later(HOLD_S, self._leave)
            return False
        self._let_go()
        if self._reading_paused or payload.exception() is not None:
            return False
        # Not read_nowait: it makes the parser continue, and aiohttp may have to read the body after all.
        body = b"" if payload is EMPTY_PAYLOAD else b"".join(payload._buffer)
        answer = lane.answer(call, message, body)
        if answer is None:
            return False
        if self._note_first is not None:
            self._note_first(self)
            self._note_first = None
        self._messages.popleft()
        if _COUNTS_MESSAGES and self._parser is not None:
            self._parser.message_consumed()
        transport.write(answer)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        return True

    def _let_go(self) -> None:
        self._call = None
        if self._held is not None:
            self._held.cancel()
            self._held = None

    def _leave(self) -> None:
        """Leave a request whose body does not arrive to the task."""
        self._let_go()
        waiter = self._waiter
        if self._messages and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget what is incomplete."""
        self._let_go()
        super().connection_lost(exc)

"""Short requests of the most frequent calls, answered as soon as their bytes arrive.

What lives here: which requests take this way, and the bytes of their answers. What must not: what a request means
(wire, router), and requests that wait for something; aiohttp and handlers answer these and all others.

aiohttp makes a task, a future, a request and a response for each request, and looks for its route. That is most of the
work of a booking and its end. Here the same parser reads the request, and the answer is written in the same step of the
event loop. A client sees the same answers.

A client sends the same headers again and again. So the bytes of headers that the parser has read are remembered with
what they say, and a request with the same headers does not go through the parser, whose message takes longer than
freeing a booking. That is only done between two requests, where the parser holds nothing (`FastProtocol._unread`).

Private parts of aiohttp's protocol are used. If a version lacks one of them, aiohttp answers everything; a test fails
then.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from msgspec.structs import replace

from streams.core.loads.bookings import BookingPhase
from streams.errors import KvStreamsError, api_error
from streams.router_api.deciding.router import Router
from streams.router_api.http.body_parsing import LARGE_BODY_BYTES
from streams.router_api.http.metrics import RouterMetrics
from streams.router_api.messages.wire import (
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

#: The first line of a request that may take this way, without its end; longer ones are left to the parser.
_FIRST_LINE = re.compile(rb"(POST|DELETE) (/(?:route|loads/[A-Za-z0-9_/-]+))(?:\?([\w=.,:~&-]*))? HTTP/1\.1", re.ASCII)
_FIRST_LINE_BYTES_MAX = 4096

#: Headers that are remembered. Beyond a limit all are forgotten. Prompts of different lengths differ in one header.
_HEADERS_MAX = 4096
_HEADERS_BYTES_MAX = 1024

#: Queries of POST /route that are remembered as requests, without their ids, if they are not too long. Beyond the limit
#: all are forgotten.
_QUERIES_MAX = 1024
_QUERY_CHARS_MAX = 256

#: Heads of answers that are kept. Within a second, most answers have one of a few lengths.
_HEADS_MAX = 256

#: Query parameters that are different for each request.
_OWN_PARAMETERS = ("request_id", "session_id")

#: What precedes a request's id at the end of a query, where the Python client puts it.
_REQUEST_ID = "&request_id="

#: In place of a number of bytes: it is not known where the next request begins.
_LOST = -1

_ROUTE, _LOADS = "/route", "/loads/"

#: The private attributes of aiohttp's protocol that are used.
_PROTOCOL_PARTS = (
    *("_waiter", "_messages", "_parser", "_paused", "_reading_paused", "_buffer_paused"),
    *("_keepalive_timeout", "_next_keepalive_close_time", "_close", "_force_close"),
)

#: Since 3.14, the parser limits the requests that it has ready, and needs to know when one is taken.
_COUNTS_MESSAGES = hasattr(HttpRequestParser, "message_consumed")

#: Reads the rest of a request and answers it; see FastLane.call_of.
_Call = Callable[[bytes], "bytes | None"]


#: Parses the query of a request as aiohttp does.
_ParseQuery = Callable[[], Mapping[str, str]]

#: Digits of a body's length.
_DIGITS_MAX = 8


class _Headers(NamedTuple):
    """What the headers of a request say, if it may take this way. length: of the body; None if it is not given."""

    length: int | None
    content_type: str


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
        # Larger bodies are parsed on a thread. aiohttp holds as much of any body until its handler reads it.
        self._body_bytes_max = min(LARGE_BODY_BYTES, router.settings.body_bytes_max)
        self._retry_after_s = retry_after_s
        self._headers: dict[bytes, _Headers] = {}  # by their bytes, without the first line
        self._requests: dict[str, RouteRequest] = {}  # by query
        self.n_answered = 0

    def call_of(self, message: RawRequestMessage) -> _Call | None:
        """What answers a request once its body is there; None if the request does not take this way.

        The result returns the whole response, or None if the body shows that aiohttp must answer after all; it has
        changed nothing then.
        """
        headers = self._headers_of(message)
        if headers is None or self._router.stopping:
            return None
        path, mark, text = message.path.partition("?")
        return self._call(message.method, path, text if mark else None, lambda: message.url.query, headers)

    def answer(self, call: _Call, asked: tuple[str, str], body: bytes) -> bytes | None:
        """Call what `call_of` returned. An error becomes an answer in the shape of all errors.

        asked: method and path, for the log.
        """
        try:
            found = call(body)
        except KvStreamsError as exc:
            reported = api_error(exc)
            if reported.http_status == 500:
                log.exception("%s %s failed", *asked)
            found = self._refusal(reported.http_status, reported.code, str(exc), exc.detail)
        except Exception:
            log.exception("%s %s failed", *asked)
            found = self._refusal(500, KvStreamsError.code, "a fault of the router")
        self.n_answered += found is not None
        return found

    def answer_known(self, data: bytes) -> bytes | None:
        """Answer a whole request whose headers are remembered. None for everything else; nothing has changed then."""
        line_end = data.find(b"\r\n", 0, _FIRST_LINE_BYTES_MAX)
        if line_end < 0:
            return None
        body_at = data.find(b"\r\n\r\n", line_end, line_end + 4 + _HEADERS_BYTES_MAX) + 4
        headers = self._headers.get(data[line_end + 2 : body_at])
        if headers is None or body_at + (headers.length or 0) != len(data) or self._router.stopping:
            return None
        line = _FIRST_LINE.fullmatch(data, 0, line_end)
        if line is None:
            return None
        method, path, text = line[1].decode(), line[2].decode(), line[3]
        call = self._call(method, path, None if text is None else text.decode(), None, headers)
        return None if call is None else self.answer(call, (method, path), data[body_at:])

    def unread_of(self, message: object, data: bytes) -> int:
        """How many bytes of a request are still to come; _LOST if that is not known. Remembers its headers.

        message: what the parser made of `data`, which it was given between two requests.
        """
        body_at = data.find(b"\r\n\r\n") + 4
        if body_at < 4 or not isinstance(message, RawRequestMessage) or message.chunked or message.upgrade:
            return _LOST
        length = message.headers.get("Content-Length", "0")
        unread = body_at + int(length) - len(data) if length.isdecimal() and len(length) <= _DIGITS_MAX else _LOST
        line_end = data.find(b"\r\n")
        if unread == 0 and body_at - line_end <= _HEADERS_BYTES_MAX and _FIRST_LINE.fullmatch(data, 0, line_end):
            headers = self._headers_of(message)
            if headers is not None:
                if len(self._headers) >= _HEADERS_MAX:
                    self._headers.clear()
                self._headers[data[line_end + 2 : body_at]] = headers
        return max(unread, _LOST)

    def _headers_of(self, message: RawRequestMessage) -> _Headers | None:
        """What a message's headers say; None if they are such that aiohttp must answer."""
        if message.version != HttpVersion11 or message.should_close or message.upgrade or message.chunked:
            return None
        headers = message.headers
        if "Expect" in headers or "Content-Encoding" in headers:
            return None
        length = headers.get("Content-Length")
        if length is not None and (len(length) > _DIGITS_MAX or int(length) > self._body_bytes_max):
            return None
        return _Headers(None if length is None else int(length), headers.get("Content-Type", ""))

    def _call(
        self, method: str, path: str, query: str | None, parse: _ParseQuery | None, headers: _Headers
    ) -> _Call | None:
        """query: None if there is none. parse: parses one that is not plain; None if that must be left to aiohttp."""
        if path == _ROUTE and method == "POST":
            return None if headers.length is None else self._route_call(query, parse, headers.content_type)
        if not path.startswith(_LOADS):
            return None
        request_id, _, action = path[len(_LOADS) :].partition("/")
        if not _PLAIN_ID.fullmatch(request_id):
            return None
        values: Mapping[str, str] | None = None
        if query:
            values = _plain_query(query)
            if values is None:
                if parse is None:
                    return None
                values = parse()
        if method == "DELETE" and not action:
            return lambda _: self._report(request_id, BookingPhase.FREE, values)
        if method == "POST" and action == "prefill-complete":
            return lambda _: self._report(request_id, BookingPhase.PREFILL, values)
        if method == "POST" and action == "output":
            return lambda body: self._output(request_id, body, values)
        return None

    def _route_call(self, query: str | None, parse: _ParseQuery | None, content_type: str) -> _Call | None:
        if content_type == OCTET_STREAM:
            return lambda body: self._route_packed(query or "", parse, body)
        if OCTET_STREAM in content_type.lower() or query is not None:
            return None  # an unusual form of the type, or an error
        return self._route_json

    def _request_of(self, query: str, parse: _ParseQuery | None) -> RouteRequest | None:
        """Parse a query, or give the request of an earlier one its id; None if it must be left to aiohttp."""
        rest, mark, request_id = query.rpartition(_REQUEST_ID)
        if not (mark and _PLAIN_ID.fullmatch(request_id)):
            rest, request_id = query, ""
        request = self._requests.get(rest)
        if request is not None:
            return replace(request, request_id=request_id) if request_id else request
        values = _plain_query(query) if query else {}
        if values is None:
            return None if parse is None else parse_route_query(parse())
        request = parse_route_query(values)
        own = [name for name in _OWN_PARAMETERS if name in values]
        if len(rest) <= _QUERY_CHARS_MAX and own == (["request_id"] if request_id else []):
            if len(self._requests) >= _QUERIES_MAX:
                self._requests.clear()
            self._requests[rest] = replace(request, request_id=None) if request_id else request
        return request

    def _route_packed(self, query: str, parse: _ParseQuery | None, body: bytes) -> bytes | None:
        started = time.perf_counter()
        request = self._request_of(query, parse)
        if request is None or not body or _may_wait(request):
            return None
        found = _response(200, orjson.dumps(answer_json(self._router.route(request, body))))
        self._route_seconds.observe(time.perf_counter() - started)
        return found

    def _route_json(self, body: bytes) -> bytes | None:
        if is_list(body):
            return None
        started = time.perf_counter()
        request = parse_route(body)
        if _may_wait(request):
            return None
        found = _response(200, orjson.dumps(answer_json(self._router.route(request))))
        self._route_seconds.observe(time.perf_counter() - started)
        return found

    def _report(self, request_id: str, what: BookingPhase, query: Mapping[str, str] | None) -> bytes:
        """query: None if there is none."""
        phase = None if query is None else parse_report_query(query).phase
        return _accepted(self._router.report_phase(request_id, what, phase))

    def _output(self, request_id: str, body: bytes, query: Mapping[str, str] | None) -> bytes:
        phase = None if query is None else parse_report_query(query).phase
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
    return request.queue != "off"


def _plain_query(text: str) -> dict[str, str] | None:
    """Query parameters without encoded characters, which most are; None for others, and if one of them is repeated."""
    if not _PLAIN_QUERY.fullmatch(text):
        return None
    pairs = [pair.split("=") for pair in text.split("&")]
    found = dict(pairs)
    return found if len(found) == len(pairs) else None


def _accepted(answer: dict[str, Any]) -> bytes:
    return _response(202 if answer["buffered"] else 200, orjson.dumps(answer))


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


def _response(status: int, body: bytes, more_headers: str = "") -> bytes:
    """A whole response, with the headers that aiohttp would write."""
    return _head(status, len(body), more_headers, rfc822_formatted_time()) + body


@functools.lru_cache(maxsize=_HEADS_MAX)
def _head(status: int, length: int, more_headers: str, date: str) -> bytes:
    return (
        f"{_STATUS_LINES[status]}\r\nContent-Type: application/json\r\n{more_headers}Content-Length: {length}\r\n"
        f"Date: {date}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
    ).encode()


class FastProtocol(web.RequestHandler):
    """aiohttp's protocol of one connection, which answers short requests itself while it has no others."""

    __slots__ = ("_call", "_held", "_lane", "_note_first", "_unread")

    def __init__(
        self, lane: FastLane | None, note_first: Callable[[web.RequestHandler], None], *args: Any, **kwargs: Any
    ) -> None:
        """lane: None if aiohttp answers everything. note_first: called when the connection has its first request."""
        super().__init__(*args, **kwargs)
        self._lane = lane
        self._note_first: Callable[[web.RequestHandler], None] | None = note_first
        self._call: _Call | None = None  # of the request whose body is incomplete
        self._held: asyncio.TimerHandle | None = None
        # Bytes of the request that the parser has begun and not been given; 0: it has begun none.
        self._unread = 0

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; answer it here, or leave it to the task that aiohttp has for the connection."""
        waiter = self._waiter
        if self._lane is None:
            super().data_received(data)
            return
        # While the task is busy, aiohttp queues what arrives.
        if waiter is None or waiter.done():
            self._parse(self._lane, data)
            return
        if self._unread == 0 and self._is_free():
            answer = self._lane.answer_known(data)
            if answer is not None:
                self._send(answer)
                return
        self._waiter = None  # so that the task is not woken
        try:
            self._parse(self._lane, data)
            # If so many requests came at once that reading is paused, aiohttp knows when to continue.
            while self._messages and not self._buffer_paused and self._answer_first(self._lane):
                pass
        finally:
            self._waiter = waiter
        if self._messages and self._held is None:
            waiter.set_result(None)

    def _is_free(self) -> bool:
        """Whether a request that arrives now can be answered now."""
        return not (self._messages or self._paused or self._close or self._force_close or self.transport is None)

    def _parse(self, lane: FastLane, data: bytes) -> None:
        """Give bytes to the parser, and note how many of the request's are still to come."""
        unread, n_ready = self._unread, len(self._messages)
        super().data_received(data)
        if not data and len(self._messages) == n_ready:
            return  # aiohttp lets the parser continue, which had nothing left
        if unread > 0:
            self._unread = max(unread - len(data), _LOST)
        elif unread == 0:
            is_one = len(self._messages) == n_ready + 1
            self._unread = lane.unread_of(self._messages[-1][0], data) if is_one else _LOST

    def _send(self, answer: bytes) -> None:
        if self._note_first is not None:
            self._note_first(self)
            self._note_first = None
        assert self.transport is not None  # `_is_free` or `_answer_first` has checked it
        self.transport.write(answer)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout

    def _answer_first(self, lane: FastLane) -> bool:
        """Answer the first request that was parsed. False if it is left to the task, or its body is incomplete."""
        message, payload = self._messages[0]
        # An error of the parser has another type. Writing is paused while the client does not read.
        if not isinstance(message, RawRequestMessage) or self._paused or self.transport is None:
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
        answer = lane.answer(call, (message.method, message.path.partition("?")[0]), body)
        if answer is None:
            return False
        self._messages.popleft()
        if _COUNTS_MESSAGES and self._parser is not None:
            self._parser.message_consumed()
        self._send(answer)
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
        task = self._task_handler
        is_woken = self._waiter is not None and self._waiter.done()
        super().connection_lost(exc)
        if is_woken and task is not None:
            task.cancel()  # it was woken for a request, and would fail for what aiohttp has just taken away

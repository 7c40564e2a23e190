"""Short requests of the most frequent calls, answered as soon as their bytes arrive.

What lives here: which requests take this way, and the bytes of their answers. What must not: what a request means
(requests, router), requests that wait for something, which aiohttp and handlers answer like all others, and connections
(protocol).

aiohttp makes a task, a future, a request and a response for each request, and looks for its route. That is most of the
work of a booking and its end. Here the same parser reads the request, and the answer is written in the same step of the
event loop. A client sees the same answers.

Everything else goes to aiohttp and the handlers: lists, bodies over 256 KiB or with an encoding, requests with
`Expect`, ids with encoded characters, HTTP/1.0 and connections that close, a request that may wait, and every request
while the router is stopping, while the client does not read its answers, or while the application has a further
middleware, such as the check of tokens. A request whose body is incomplete is held for 20 ms, and then left to aiohttp.

A client sends the same headers again and again. So the bytes of headers that the parser has read are remembered with
what they say, and a request with the same headers does not go through the parser, whose message takes longer than
freeing a booking. That is only done between two requests, where the parser holds nothing (`ApiProtocol._unread`).
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp import HttpVersion11
from msgspec.structs import replace

from streams.core.loads.bookings import BookingPhase
from streams.errors import KvStreamsError, api_error
from streams.process.aiohttp_internals import RawRequestMessage
from streams.router_api.deciding.router import Router
from streams.router_api.http.body_parsing import LARGE_BODY_BYTES, BodyParser
from streams.router_api.http.metrics import RouterMetrics
from streams.router_api.messages.answer_json import answer_json, error_json
from streams.router_api.messages.requests import (
    OCTET_STREAM,
    PhaseReportQuery,
    ReportQuery,
    RouteRequest,
    is_list,
    parse_output,
    parse_report_query,
    parse_route_query,
)

log = logging.getLogger(__name__)

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
LOST = -1

_ROUTE, _LOADS = "/route", "/loads/"

#: Reads the rest of a request and answers it; see FastLane.call_of.
Call = Callable[[bytes], "bytes | None"]

#: Parses the query of a request as aiohttp does.
_ParseQuery = Callable[[], Mapping[str, str]]

#: Digits of a body's length.
_DIGITS_MAX = 8


class _Headers(NamedTuple):
    """What the headers of a request say, if it may take this way. length: of the body; None if it is not given."""

    length: int | None
    content_type: str


class FastLane:
    """Answers short requests. Owned by Handlers, and used on the loop that serves the API."""

    def __init__(
        self, router: Router, parser: BodyParser[RouteRequest], metrics: RouterMetrics, retry_after_s: str
    ) -> None:
        self._router = router
        self._body_parser = parser
        self._route_seconds = metrics.route_seconds
        self._errors = metrics.errors
        # Larger bodies are parsed on a thread. aiohttp holds as much of any body until its handler reads it.
        self._body_bytes_max = min(LARGE_BODY_BYTES, router.settings.body_bytes_max)
        self._retry_after_s = retry_after_s
        self._headers: dict[bytes, _Headers] = {}  # by their bytes, without the first line
        self._requests: dict[str, RouteRequest] = {}  # by query

    def call_of(self, message: RawRequestMessage) -> Call | None:
        """What answers a request once its body is there; None if the request does not take this way.

        The result returns the whole response, or None if the body shows that aiohttp must answer after all; it has
        changed nothing then.
        """
        headers = self._headers_of(message)
        if headers is None or self._router.stopping:
            return None
        path, mark, text = message.path.partition("?")
        return self._call(message.method, path, text if mark else None, lambda: message.url.query, headers)

    def answer(self, call: Call, asked: tuple[str, str], body: bytes) -> bytes | None:
        """Call what `call_of` returned. An error becomes an answer in the shape of all errors.

        asked: method and path, for the log.
        """
        try:
            return call(body)
        except KvStreamsError as exc:
            reported = api_error(exc)
            if reported.http_status == 500:
                log.exception("%s %s failed", *asked)
            return self._refusal(reported.http_status, reported.code, str(exc), exc.detail)
        except Exception:
            log.exception("%s %s failed", *asked)
            return self._refusal(500, KvStreamsError.code, "a fault of the router")

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
        """How many bytes of a request are still to come; LOST if that is not known. Remembers its headers.

        message: what the parser made of `data`, which it was given between two requests.
        """
        body_at = data.find(b"\r\n\r\n") + 4
        if body_at < 4 or not isinstance(message, RawRequestMessage) or message.chunked or message.upgrade:
            return LOST
        length = message.headers.get("Content-Length", "0")
        unread = body_at + int(length) - len(data) if length.isdecimal() and len(length) <= _DIGITS_MAX else LOST
        line_end = data.find(b"\r\n")
        if unread == 0 and body_at - line_end <= _HEADERS_BYTES_MAX and _FIRST_LINE.fullmatch(data, 0, line_end):
            headers = self._headers_of(message)
            if headers is not None:
                if len(self._headers) >= _HEADERS_MAX:
                    self._headers.clear()
                self._headers[data[line_end + 2 : body_at]] = headers
        return max(unread, LOST)

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
    ) -> Call | None:
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

    def _route_call(self, query: str | None, parse: _ParseQuery | None, content_type: str) -> Call | None:
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
        response = _response(200, orjson.dumps(answer_json(self._router.route(request, body))))
        self._route_seconds.observe(time.perf_counter() - started)
        return response

    def _route_json(self, body: bytes) -> bytes | None:
        if is_list(body):
            return None
        started = time.perf_counter()
        request, packed = self._body_parser.parsed_at_once(body)
        if _may_wait(request):
            return None
        response = _response(200, orjson.dumps(answer_json(self._router.route(request, packed))))
        self._route_seconds.observe(time.perf_counter() - started)
        return response

    def _report(self, request_id: str, what: BookingPhase, query: Mapping[str, str] | None) -> bytes:
        """query: None if there is none."""
        if query is None:
            return _accepted(self._router.report_phase(request_id, what))
        report = parse_report_query(query, PhaseReportQuery)
        reported = report.prompt_tokens, report.cached_tokens
        return _accepted(self._router.report_phase(request_id, what, report.phase, *reported))

    def _output(self, request_id: str, body: bytes, query: Mapping[str, str] | None) -> bytes:
        phase = None if query is None else parse_report_query(query, ReportQuery).phase
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
    parameters = dict(pairs)
    return parameters if len(parameters) == len(pairs) else None


def _accepted(answer: dict[str, Any]) -> bytes:
    return _response(202 if answer["buffered"] else 200, orjson.dumps(answer))


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


_SERVER = f"Python/{sys.version_info[0]}.{sys.version_info[1]} aiohttp/{aiohttp.__version__}"


def _response(status: int, body: bytes, more_headers: str = "") -> bytes:
    """A whole response, with the headers that aiohttp would write."""
    return _head(status, len(body), more_headers, int(time.time())) + body


@functools.lru_cache(maxsize=_HEADS_MAX)
def _head(status: int, length: int, more_headers: str, now_s: int) -> bytes:
    return (
        f"{_STATUS_LINES[status]}\r\nContent-Type: application/json\r\n{more_headers}Content-Length: {length}\r\n"
        f"Date: {formatdate(now_s, usegmt=True)}\r\nServer: {_SERVER}\r\n\r\n"
    ).encode()

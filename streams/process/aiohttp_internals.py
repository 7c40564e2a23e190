"""The private and undocumented parts of aiohttp's server that this project uses, and what routers and fronts share.

What lives here: these parts as data, whether the installed version has them, and the protocol and the runner that the
servers of routers and fronts are made of. What must not: which requests are served without aiohttp's task
(router_api/protocol, frontend/protocol).

Any release of aiohttp may move such a part without notice. With a version that lacks one, aiohttp serves every request,
and tests/unit/test_internals.py names the part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
from aiohttp import StreamReader, web

from streams.process.connections import LINGERING_S, Connections
from streams.process.internals import Internal

try:
    from aiohttp.http import RawRequestMessage as RawRequestMessage
    from aiohttp.http import StreamWriter as StreamWriter
except ImportError:  # `is_supported` is false then, and nothing uses them
    RawRequestMessage = StreamWriter = object  # type: ignore[assignment, misc]

log = logging.getLogger(__name__)

#: Seconds for which the rest of a body is awaited: many clients send it right after the headers. After that, aiohttp's
#: task waits for it, with the limit of time for bodies.
HOLD_S = 0.02

_WEB, _HTTP = "aiohttp.web", "aiohttp.http"

#: Attributes of the protocol of a connection.
_ATTRIBUTES = {
    "_loop": "the loop of the connection",
    "_task_handler": "aiohttp's task of the connection; meanwhile the task of a request that the front serves",
    "_waiter": "what aiohttp's task waits for while it has no request",
    "_messages": "requests that were parsed and have not begun",
    "_parser": "None once the connection is lost",
    "_paused": "whether the client does not read its answers",
    "_reading_paused": "whether a body is longer than what is buffered",
    "_buffer_paused": "whether so many requests are ready that reading is paused",
    "_close": "whether the connection ends after its request",
    "_force_close": "whether the connection is being closed",
    "_keepalive": "whether the connection may have another request",
    "_keepalive_timeout": "how long the connection may be idle",
    "_keepalive_handle": "the timer that closes an idle connection",
    "_next_keepalive_close_time": "when it does so",
    "_manager": "the server; None once the connection is lost",
    "_request_factory": "makes a request; None once the connection is lost",
}

INTERNALS = (
    *(Internal(_WEB, f"RequestHandler.{name}", why) for name, why in _ATTRIBUTES.items()),
    Internal(_WEB, "RequestHandler._process_keepalive", "what the timer of an idle connection calls", ()),
    Internal(_WEB, "RequestHandler._handle_request", "serves a request", ("request", "start_time", "request_handler")),
    Internal(_WEB, "RequestHandler.start", "what aiohttp's task of a connection runs", ()),
    Internal(_WEB, "RequestHandler.connection_made", "overridden: aiohttp's task is made later", ("transport",)),
    Internal(_WEB, "RequestHandler.data_received", "overridden: some requests are served at once", ("data",)),
    Internal(_WEB, "RequestHandler.connection_lost", "overridden: what is incomplete is forgotten", ("exc",)),
    Internal(_WEB, "RequestHandler.close", "overridden: there may be no task of aiohttp's", ()),
    Internal(_WEB, "RequestHandler.handle_error", "overridden: their shape", ("request", "status", "exc", "message")),
    Internal(_WEB, "RequestHandler.finish_response", "overridden for errors", ("request", "resp", "start_time")),
    Internal(_WEB, "AppRunner.server", "overridden: makes our protocols"),
    Internal(_WEB, "Server.connection_made", "adds a connection", ("handler", "transport")),
    Internal(_WEB, "Server.requests_count", "counts requests"),
    Internal(
        *(_WEB, "Application._make_request", "what RequestHandler._request_factory is"),
        ("message", "payload", "protocol", "writer", "task", "_cls"),
    ),
    Internal(_WEB, "BaseRequest._task", "the task that aiohttp cancels if the client leaves"),
    Internal(_HTTP, "HttpRequestParser.message_consumed", "the parser limits the requests that are ready", ()),
    Internal(_HTTP, "RawRequestMessage", "a request that was parsed, in contrast to an error of the parser"),
    *(
        Internal(_HTTP, f"RawRequestMessage.{name}", "what the first line and the headers of a request say")
        for name in ("method", "path", "url", "version", "headers", "should_close", "upgrade", "chunked")
    ),
    Internal(_HTTP, "StreamWriter", "writes an answer", ("protocol", "loop", "on_chunk_sent", "on_headers_sent")),
    *(
        Internal(_HTTP, f"StreamWriter.{name}", "headers are sent with the first bytes, or dropped for another answer")
        for name in ("send_headers", "drain", "output_size", "chunked", "length")
    ),
    Internal(_WEB, "StreamResponse._send_headers_immediately", "overridden: headers wait for the first bytes"),
    Internal("aiohttp", "StreamReader._buffer", "the pieces of a body"),
)

#: How aiohttp treats each connection. Bodies are decompressed, if at all, where their size is limited.
_OPTIONS: dict[str, Any] = {"access_log": None, "auto_decompress": False, "lingering_time": LINGERING_S}


def is_supported() -> bool:
    """Return whether the installed version of aiohttp has all these parts. Logs those that it lacks."""
    missing = [str(part) for part in INTERNALS if part.problem() is not None]
    if missing:
        log.warning(
            "aiohttp %s lacks parts that short requests are served with, so they take longer: %s",
            *(aiohttp.__version__, ", ".join(missing)),
        )
    return not missing


def arrived_body(content: StreamReader) -> bytes:
    """Return a whole body of which nothing was read.

    `read_nowait` would make the parser go on, with nothing to do, and aiohttp could not read the body any more.
    """
    pieces = getattr(content, "_buffer", None)
    if not pieces:
        return content.read_nowait()
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class DirectProtocol(web.RequestHandler):
    """aiohttp's protocol of one connection, for subclasses that serve some requests when their last byte arrives.

    A subclass uses the private parts only if `is_supported`. Otherwise it leaves everything to aiohttp.

    _held: limits the time for the rest of a body; None if there is no request whose body is incomplete.
    """

    __slots__ = ("_held",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: asyncio.TimerHandle | None = None

    def _hold(self) -> None:
        """Wait for the rest of a body."""
        if self._held is None:
            self._held = self._loop.call_later(HOLD_S, self._leave)

    def _let_go(self) -> None:
        """End the wait."""
        if self._held is not None:
            self._held.cancel()
            self._held = None

    def _leave(self) -> None:
        """Leave the requests that were parsed to aiohttp's task."""
        self._let_go()
        waiter = self._waiter
        if self._messages and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the connection, and forget a request whose body is incomplete."""
        self._let_go()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what cannot be read as HTTP, and faults, in the shape of all errors; close the connection.

        aiohttp would answer with text and log the request, with the bytes that are wrong: they may be a prompt's.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer has been sent already") from exc
        if status >= 500:
            log.error("a request failed outside of its handler", exc_info=exc)
        response = self._error_page(status, message or "")
        response.force_close()
        return response

    def _error_page(self, status: int, explained: str) -> web.Response:
        """Return the answer to a fault, or to what cannot be read. explained: by the parser; it quotes the request."""
        raise NotImplementedError


class LimitedRunner(web.AppRunner):
    """Runs an application within the limits of Connections, with a protocol of our own."""

    def __init__(
        self,
        app: web.Application,
        connections: Connections,
        new_protocol: Callable[..., web.RequestHandler],
        shutdown_timeout_s: float,
        *,
        handler_cancellation: bool = False,
    ) -> None:
        """new_protocol: makes the protocol of a connection, from what aiohttp's protocol takes.

        shutdown_timeout_s: limits the time that a stop takes. Requests that last for half of it are cut off.

        handler_cancellation: whether a request ends when its client disconnects.
        """
        super().__init__(
            app,
            handler_cancellation=handler_cancellation,
            shutdown_timeout=shutdown_timeout_s / 2,  # aiohttp waits twice: for answers, and after cutting requests off
            **_OPTIONS,
        )
        self._connections = connections
        self._new_protocol = partial(new_protocol, **_OPTIONS)

    @property
    def server(self) -> Callable[[], asyncio.BaseProtocol] | None:  # type: ignore[override]  # sites only call it
        """The factory of protocols that a site gives to the event loop."""
        server = super().server
        if server is None:
            return None
        new_protocol = partial(self._new_protocol, server, loop=asyncio.get_running_loop())
        return self._connections.accepting_for(server, new_protocol)

"""The connections of clients: requests that generate go from their bytes to their task in one step.

What lives here: aiohttp's protocol and runner as the front uses them, and which requests take this way. What must not:
what a request means (server, proxy).

aiohttp wakes a task of the connection for each request, makes another task for the handler, looks for the route and
calls the middlewares: three steps of the event loop, and a third of the front's own work before the first token. A
request that generates, and whose body is short, needs none of this: here it gets its task when its last byte arrives.
Everything else is answered by aiohttp, errors in reading a request included.

Private parts of aiohttp's protocol are used, as the router's fast lane does. If a version lacks one of them, aiohttp
serves everything; a test fails then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.http import StreamWriter
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import StreamReader

from streams.frontend.answers import error_page
from streams.frontend.requests import Kind
from streams.router_api.http.connections import LINGERING_S, Connections

log = logging.getLogger(__name__)

#: Bytes of a body that takes this way. Longer ones are read by the handler, with limits of bytes and time.
SHORT_BODY_BYTES = 64 << 10

#: How long the rest of a body is awaited here: many clients send it right after the headers. After that, aiohttp's
#: handler waits for it.
HOLD_S = 0.02

#: Serves a request; it makes an answer of every error.
Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

#: The private attributes of aiohttp's protocol that are used.
_PROTOCOL_PARTS = (
    *("_waiter", "_messages", "_parser", "_buffer_paused", "_manager", "_request_factory", "_task_handler"),
    *("_handle_request", "_keepalive", "_keepalive_handle", "_keepalive_timeout", "_next_keepalive_close_time"),
    *("_process_keepalive", "_close", "_force_close"),
)

#: Since 3.14, the parser limits the requests that it has ready, and needs to know when one is taken.
_COUNTS_MESSAGES = hasattr(HttpRequestParser, "message_consumed")


#: Whether the bytes of a body can be taken without `read_nowait`.
_HAS_BUFFER = hasattr(StreamReader, "_buffer")


def is_supported() -> bool:
    """Whether this version of aiohttp has the parts that are used."""
    return all(hasattr(web.RequestHandler, part) for part in _PROTOCOL_PARTS) and _HAS_BUFFER


class FrontRunner(web.AppRunner):
    """Runs the front's application within the limits of Connections; a request ends when its client disconnects."""

    def __init__(
        self, app: web.Application, connections: Connections, shutdown_timeout_s: float, generate: Serve
    ) -> None:
        """shutdown_timeout_s: limits the time that a stop takes. Requests that last for half of it are cut off.

        generate: serves the requests that do not take aiohttp's way.
        """
        super().__init__(
            app,
            access_log=None,
            # Otherwise a request would go on, and its engine compute, after its client has left.
            handler_cancellation=True,
            auto_decompress=False,
            lingering_time=LINGERING_S,
            shutdown_timeout=shutdown_timeout_s / 2,  # aiohttp waits twice: for answers, and after cutting requests off
        )
        self._connections = connections
        self._generate = generate if is_supported() else None

    @property
    def server(self) -> Callable[[], asyncio.BaseProtocol] | None:  # type: ignore[override]  # sites only call it
        """The factory of protocols that a site gives to the event loop."""
        server = super().server
        if server is None:
            return None
        connections = self._connections

        def new_protocol() -> web.RequestHandler:
            return FrontProtocol(self._generate, server, loop=server._loop, **server._kwargs)

        return connections.accepting_for(server, new_protocol)


class FrontProtocol(web.RequestHandler):
    """The protocol of one connection.

    aiohttp's task of the connection is made when it is needed: for a request that is left to aiohttp, and to wait for a
    second one. Until then the connection has a timer of its own (Connections).

    _parked: while a request is served here, aiohttp's task of the connection, which waits meanwhile, and what wakes it;
    None for both if there is no such task yet. aiohttp takes the request's own task for its handler then: it cancels it
    if the client leaves, and waits for it when the server stops. What arrives in the meantime is queued.
    """

    __slots__ = ("_generate", "_has_begun", "_held", "_parked")

    def __init__(self, generate: Serve | None, *args: Any, **kwargs: Any) -> None:
        """generate: None if aiohttp serves everything."""
        super().__init__(*args, **kwargs)
        self._generate = generate
        self._held: asyncio.TimerHandle | None = None
        self._parked: tuple[asyncio.Future[None], asyncio.Task[None]] | tuple[None, None] | None = None
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Do what aiohttp does, without its task, and without what the connection has already.

        Event loops set TCP_NODELAY, and SO_KEEPALIVE is inherited from the socket that listens.
        """
        if self._generate is None or self._manager is None:
            self._has_begun = True
            super().connection_made(transport)
            return
        self.transport = cast(asyncio.Transport, transport)
        self._manager.connection_made(self, self.transport)

    def _start(self) -> None:
        """Make aiohttp's task of the connection."""
        self._has_begun = True
        self._task_handler = self._loop.create_task(self.start())

    def close(self) -> None:
        """End the connection after its request; at once if it has none."""
        super().close()
        if not self._has_begun and self._parked is None:
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived. Serve a request that generates once it is complete; leave any other to aiohttp."""
        waiter = self._waiter
        is_idle = not self._has_begun if waiter is None else not waiter.done()
        if self._generate is None or self._parked is not None or not is_idle:
            super().data_received(data)
            return
        self._waiter = None  # so that aiohttp's task is not woken
        try:
            super().data_received(data)
        finally:
            self._waiter = waiter
        if not self._messages:
            return
        message, payload = self._messages[0]
        if not _may_be_taken(message) or self._buffer_paused or payload.exception() is not None:
            self._leave()
        elif payload.is_eof():
            self._let_go()
            self._begin(self._generate, waiter)
        elif self._held is None:
            self._held = self._loop.call_later(HOLD_S, self._leave)

    def _leave(self) -> None:
        """Leave a request to aiohttp's task."""
        self._let_go()
        waiter = self._waiter
        if not self._has_begun:
            self._start()
        elif self._messages and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.cancel()
            self._held = None

    def _begin(self, generate: Serve, waiter: asyncio.Future[None] | None) -> None:
        """Serve the first request that was parsed. waiter: None if there is no task of aiohttp's yet."""
        starting, manager = self._task_handler, self._manager
        if manager is None or self._request_factory is None or self.transport is None:
            return  # the connection is being closed
        message, payload = self._messages.popleft()
        assert isinstance(message, RawRequestMessage)  # `_may_be_taken` has checked it
        if _COUNTS_MESSAGES and self._parser is not None:
            self._parser.message_consumed()
        manager.requests_count += 1
        if waiter is None or starting is None:
            self._parked = (None, None)
        else:
            self._parked, self._waiter = (waiter, starting), None
        writer, any_task = StreamWriter(self, self._loop), cast("asyncio.Task[None]", starting)
        request = self._request_factory(message, payload, self, writer, any_task)  # it gets its own task below
        task = self._loop.create_task(self._serve(request, generate))
        request._task = self._task_handler = cast("asyncio.Task[None]", task)  # nothing reads its result but `_end`
        task.add_done_callback(self._end)  # also if the client leaves before the task has begun

    async def _serve(self, request: web.BaseRequest, generate: Serve) -> bool:
        """Serve a request as aiohttp's task would; returns whether the connection may have another one."""
        try:
            response, is_reset = await self._handle_request(request, None, generate)
        except ConnectionError:
            return False  # the client has left
        except Exception:
            log.exception("a request failed")
            return False
        finally:
            request._task = None  # type: ignore[assignment]  # as aiohttp does: it would be a cycle of references
        return not is_reset and bool(response.keep_alive)

    def _end(self, task: asyncio.Task[bool]) -> None:
        """Let aiohttp's task wait for the next request, or close the connection."""
        assert self._parked is not None
        (waiter, starting), self._parked = self._parked, None
        if self._manager is None:  # the connection is lost
            if starting is not None:
                starting.cancel()
            return
        self._waiter, self._task_handler = waiter, starting
        self._keepalive = not task.cancelled() and task.result()
        if not self._keepalive or self._close or self._force_close:
            self.force_close()
            return
        close_s = self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(close_s, self._process_keepalive)
        if waiter is None:
            self._start()
        elif self._messages and not waiter.done():
            waiter.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the request, and forget one that is incomplete."""
        self._let_go()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it quotes the request
    ) -> web.StreamResponse:
        """Answer what cannot be read as HTTP, and faults, in OpenAI's shape.

        aiohttp would log the request with the bytes that are wrong: they may be a prompt's.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer has been sent already") from exc
        if status >= 500:
            log.error("a request failed", exc_info=exc)
        response = json_page(
            error_page(status, "a fault of the front" if status >= 500 else "not a valid request"), status
        )
        response.force_close()
        return response


def _may_be_taken(message: object) -> bool:
    """Whether a request generates, and its body is short and needs nothing else."""
    if not isinstance(message, RawRequestMessage) or message.method != "POST" or message.path not in _KINDS:
        return False
    if message.version != HttpVersion11 or message.upgrade or message.chunked:
        return False
    headers = message.headers
    length = headers.get("Content-Length", "")
    return (
        "Expect" not in headers
        and "Content-Encoding" not in headers
        and length.isdecimal()
        and len(length) <= len(str(SHORT_BODY_BYTES))
        and int(length) <= SHORT_BODY_BYTES
    )


_KINDS = {kind.value: kind for kind in Kind}


def kind_of(http: web.BaseRequest) -> Kind:
    """Return which call a request is."""
    return _KINDS.get(http.raw_path) or Kind(http.path)


def arrived_body(content: StreamReader) -> bytes:
    """Return a whole body of which nothing was read. `read_nowait` would make the parser go on, with nothing to do."""
    if not content.total_bytes or not _HAS_BUFFER:
        return content.read_nowait()
    pieces = content._buffer
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def json_page(page: Any, status: int = 200) -> web.Response:
    """Return a page as JSON."""
    return web.Response(body=orjson.dumps(page), status=status, content_type="application/json")

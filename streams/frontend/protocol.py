"""The connections of clients: requests that generate go from their bytes to their task in one step.

What lives here: aiohttp's protocol as the front uses it, and which requests take this way. What must not: what a
request means (server, proxy).

aiohttp wakes a task of the connection for each request, makes another task for the handler, looks for the route and
calls the middlewares: three steps of the event loop, and a third of the front's own work before the first token. A
request that generates, and whose body is short, needs none of this: here it gets its task when its last byte arrives.
Everything else is answered by aiohttp, errors in reading a request included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import orjson
from aiohttp import HttpVersion11, web

from streams.process.aiohttp_internals import DirectProtocol, RawRequestMessage, StreamWriter
from streams.prompts.calls import Kind
from streams.prompts.error_pages import error_page

log = logging.getLogger(__name__)

#: Bytes of a body that takes this way. Longer ones are read by the handler, with limits of bytes and time.
SHORT_BODY_BYTES = 64 << 10

#: Serves a request; it makes an answer of every error.
Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class FrontProtocol(DirectProtocol):
    """The protocol of one connection.

    aiohttp's task of the connection is made when it is needed: for a request that is left to aiohttp, and to wait for a
    second one. Until then the connection has a timer of its own (Connections).

    _parked: while a request is served here, aiohttp's task of the connection, which waits meanwhile, and what wakes it;
    None for both if there is no such task yet. aiohttp takes the request's own task for its handler then: it cancels it
    if the client leaves, and waits for it when the server stops. What arrives in the meantime is queued.
    """

    __slots__ = ("_generate", "_has_begun", "_parked")

    def __init__(self, generate: Serve | None, *args: Any, **kwargs: Any) -> None:
        """generate: None if aiohttp serves everything."""
        super().__init__(*args, **kwargs)
        self._generate = generate
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
        if self._generate is None or self._parked is not None:
            super().data_received(data)
            return
        waiter = self._waiter
        if self._has_begun if waiter is None else waiter.done():  # aiohttp's task is busy
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
        else:
            self._hold()

    def _leave(self) -> None:
        """Leave a request to aiohttp's task."""
        super()._leave()
        if not self._has_begun:
            self._start()

    def _begin(self, generate: Serve, waiter: asyncio.Future[None] | None) -> None:
        """Serve the first request that was parsed. waiter: None if there is no task of aiohttp's yet."""
        starting, manager = self._task_handler, self._manager
        if manager is None or self._request_factory is None or self.transport is None:
            return  # the connection is being closed
        message, payload = self._messages.popleft()
        assert isinstance(message, RawRequestMessage)  # `_may_be_taken` has checked it
        if self._parser is not None:
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

    def _error_page(self, status: int, explained: str) -> web.Response:  # noqa: ARG002 - it quotes the request
        return json_page(error_page(status, "a fault of the front" if status >= 500 else "not a valid request"), status)


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
    return _KINDS.get(http.raw_path) or Kind(http.path.rstrip("/"))


def json_page(page: Any, status: int = 200) -> web.Response:
    """Return a page as JSON."""
    return web.Response(body=orjson.dumps(page), status=status, content_type="application/json")

"""The connections of the HTTP API: short requests are answered in the step of the event loop that reads them.

What lives here: aiohttp's protocol with the fast lane, and the answer to what is not HTTP. What must not: which
requests the lane answers (fast_lane), and calls (handlers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from streams.errors import HTTP_ERROR, KvStreamsError
from streams.process.aiohttp_internals import DirectProtocol, RawRequestMessage, arrived_body
from streams.router_api.http.fast_lane import LOST, Call, FastLane
from streams.router_api.messages.answer_json import error_json

#: Characters of the parser's explanation, whose further lines quote the request.
_REASON_CHARS_MAX = 200


class ApiProtocol(DirectProtocol):
    """The protocol of one connection. It answers short requests itself while the connection has no others."""

    __slots__ = ("_call", "_errors", "_lane", "_note_first", "_unread")

    def __init__(
        self,
        errors: Counter[str],
        lane: FastLane | None,
        note_first: Callable[[web.RequestHandler], None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """errors: counts errors by code. lane: None if aiohttp answers everything.

        note_first: called when the connection has its first request in the lane.
        """
        super().__init__(*args, **kwargs)
        self._errors = errors
        self._lane = lane
        self._note_first: Callable[[web.RequestHandler], None] | None = note_first
        self._call: Call | None = None  # of the last request that was held
        # Bytes of the request that the parser has begun and not been given; 0: it has begun none.
        self._unread = 0

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; answer it here, or leave it to the task that aiohttp has for the connection."""
        if self._lane is None:
            super().data_received(data)
            return
        waiter = self._waiter
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
            self._unread = max(unread - len(data), LOST)
        elif unread == 0:
            is_one = len(self._messages) == n_ready + 1
            self._unread = lane.unread_of(self._messages[-1][0], data) if is_one else LOST

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
        call = lane.call_of(message) if self._held is None else self._call
        if call is None:
            return False
        if not payload.is_eof():
            self._call = call
            self._hold()
            return False
        if self._held is not None:
            self._let_go()
        if self._reading_paused or payload.exception() is not None:
            return False
        answer = lane.answer(call, (message.method, message.path.partition("?")[0]), arrived_body(payload))
        if answer is None:
            return False
        self._messages.popleft()
        if self._parser is not None:
            self._parser.message_consumed()
        self._send(answer)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the connection, and aiohttp's task if it was woken for a request.

        The task would fail then, for what aiohttp takes away here. A version that lacks these parts may log that.
        """
        waiter, task = getattr(self, "_waiter", None), getattr(self, "_task_handler", None)
        is_woken = waiter is not None and waiter.done()
        super().connection_lost(exc)
        if is_woken and task is not None:
            task.cancel()

    def _error_page(self, status: int, explained: str) -> web.Response:
        if status >= 500:
            return self._refusal(status, KvStreamsError.code, "a fault of the router")
        reason = explained.strip().partition("\n")[0].rstrip(": ")[:_REASON_CHARS_MAX]
        return self._refusal(status, HTTP_ERROR, f"the request is not valid HTTP: {reason or 'it cannot be read'}")

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer. aiohttp refuses some requests before any middleware sees them, for their header Expect."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = self._refusal(resp.status, HTTP_ERROR, f"{request.method} {request.path}: {resp.reason}")
        return await super().finish_response(request, resp, start_time)

    def _refusal(self, status: int, code: str, message: str) -> web.Response:
        self._errors[code] += 1
        return web.Response(
            body=orjson.dumps(error_json(code, message)), status=status, content_type="application/json"
        )

"""How the HTTP API's application runs on a server, `kvstreams router` or the Faust worker.

What lives here: the runner, which brings together the limits of connections and the fast lane, and the answer to what
is not HTTP. What must not: both of these (connections, fast_lane), calls (handlers), and listening (http_server).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from streams.errors import HTTP_ERROR, KvStreamsError
from streams.router_api.http.connections import LINGERING_S, Connections
from streams.router_api.http.fast_lane import FastLane, FastProtocol
from streams.router_api.messages.wire import error_json

log = logging.getLogger(__name__)

#: Characters of the parser's explanation, whose further lines quote the request.
_REASON_CHARS_MAX = 200


class ApiProtocol(FastProtocol):
    """The protocol of one connection, which gives the errors of aiohttp itself the shape of all errors."""

    __slots__ = ("_errors",)

    def __init__(self, errors: Counter[str], *args: Any, **kwargs: Any) -> None:
        """errors: counts errors by code."""
        super().__init__(*args, **kwargs)
        self._errors = errors

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what cannot be read as HTTP, and close the connection.

        aiohttp would answer with text and log the request, with the bytes that are wrong: they may be a prompt's.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer has been sent already") from exc
        if status >= 500:
            log.error("a request failed outside of its handler", exc_info=exc)
            response = self._refusal(status, KvStreamsError.code, "a fault of the router")
        else:
            reason = (message or "").strip().partition("\n")[0].rstrip(": ")[:_REASON_CHARS_MAX]
            explained = f"the request is not valid HTTP: {reason or 'it cannot be read'}"
            response = self._refusal(status, HTTP_ERROR, explained)
        response.force_close()
        return response

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


class ApiRunner(web.AppRunner):
    """Runs the API's application within the limits of Connections. Bodies are decompressed by Bodies."""

    def __init__(
        self,
        app: web.Application,
        connections: Connections,
        errors: Counter[str],
        shutdown_timeout_s: float,
        lane: FastLane | None = None,
    ) -> None:
        """errors: counts errors by code. shutdown_timeout_s: limits the time that a stop takes. Requests that last for
        half of it are cut off.

        lane: answers short requests; None if aiohttp answers everything.
        """
        super().__init__(
            app,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGERING_S,
            shutdown_timeout=shutdown_timeout_s / 2,  # aiohttp waits twice: for answers, and after cutting requests off
        )
        self._connections = connections
        self._errors = errors
        self._lane = lane

    @property
    def server(self) -> Callable[[], asyncio.BaseProtocol] | None:  # type: ignore[override]  # sites only call it
        """The factory of protocols that a site gives to the event loop."""
        server = super().server
        if server is None:
            return None
        connections = self._connections

        def new_protocol() -> web.RequestHandler:
            return ApiProtocol(
                self._errors, self._lane, connections.note_request, server, loop=server._loop, **server._kwargs
            )

        return connections.accepting_for(server, new_protocol)

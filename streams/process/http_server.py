"""The HTTP server of a process, which answers from the moment at which the process starts.

What lives here: which application answers, what is answered while a process starts, and the pages of processes without
an HTTP API of their own. What must not: sockets (listener), the HTTP API (router_api), and metrics (metrics).

Compiling kernels takes up to two minutes. Something that watches a process, such as Kubernetes, must be able to tell
this from a process that hangs. So a process listens first, and answers /healthz, and /ready with the reason. What it
serves later takes over the same sockets, so that no connection is refused in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from streams.errors import Forbidden, KvStreamsError, NotReady, Unauthorized
from streams.process.listener import Listener
from streams.process.metrics import MetricsRegistry
from streams.process.process_metrics import metrics_response
from streams.security.access import Access, read_right

#: Seconds after which a client may retry, as the header Retry-After.
RETRY_AFTER_S = "1"

#: Returns why a process is not ready, or None if it is.
NotReadyReason = Callable[[], str | None]


class Startup:
    """What a starting process is doing. Any thread may set it; the server reads it."""

    def __init__(self) -> None:
        self.doing = "starting"

    def note(self, doing: str) -> None:
        """Set what the process is doing."""
        self.doing = doing


class HttpServer:
    """The sockets of one address, and the application that answers on them. Used on one loop."""

    def __init__(self, host: str, port: int, port_setting: str = "port", access: Access | None = None) -> None:
        """Listen, so that an address that is taken is found at once.

        Raises SettingsError, which names port_setting, or says that the address would be open to everyone.
        """
        self._access = access or Access()
        self._listener = Listener(host, port, port_setting, self._access)
        self._runners: list[web.AppRunner] = []

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket; the port is the one that was chosen if 0 was given."""
        return self._listener.address

    @property
    def url(self) -> str:
        """The URL of the first socket."""
        host, port = self.address
        return f"{self._access.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def serve(self, app: web.Application | web.AppRunner) -> None:
        """Answer new connections with this application from now on. It comes in a runner if it needs its own.

        An earlier application still answers connections that it has accepted. `starting_app` closes each after one
        answer.
        """
        runner = app if isinstance(app, web.AppRunner) else web.AppRunner(app, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        if len(self._runners) == 1:
            await self._listener.start(self._accept)

    def _accept(self) -> asyncio.Protocol:
        """A new connection, which the last application answers.

        A server per application would lose calls: asyncio drops a connection that a server accepted and had not yet
        begun to read when it was closed.
        """
        accept = self._runners[-1].server
        assert accept is not None  # the runner was set up
        return accept()

    async def listen_also(self, host: str, port: int) -> None:
        """Listen on another address, which other processes listen on as well. Raises SettingsError."""
        await self._listener.listen_also(host, port)

    async def close(self) -> None:
        """Stop listening and finish running requests."""
        self._listener.close()
        for runner in self._runners:
            await runner.cleanup()


def starting_app(startup: Startup) -> web.Application:
    """What a process answers until it has started: 200 to /healthz and /health, and 503 with the reason to others."""

    async def ready(_: web.Request) -> web.Response:
        # The fields of a router's own answer; nothing has been read so far.
        nothing = {"partitions_left": {}, "workers_left": 0, "topics_missing": []}
        return web.json_response({"ready": False, **nothing, "reason": startup.doing}, status=NotReady.http_status)

    async def refuse(_: web.Request) -> web.Response:
        error = {"code": NotReady.code, "message": startup.doing, "detail": {}}
        return web.json_response({"error": error}, status=NotReady.http_status, headers={"Retry-After": RETRY_AFTER_S})

    @web.middleware
    async def answer_once(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        response.force_close()  # the client's next request reaches what replaces this application
        return response

    app = web.Application(middlewares=[answer_once])
    app.add_routes([*_HEALTH, web.get("/ready", ready), web.route("*", "/{path:.*}", refuse)])
    return app


def monitoring_app(
    not_ready: NotReadyReason, registries: Sequence[MetricsRegistry[Any]], access: Access | None = None
) -> web.Application:
    """/healthz, /ready and /metrics, for a process without an HTTP API, which has all three of its own."""

    @web.middleware
    async def refusals(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except (Unauthorized, Forbidden) as exc:
            return web.json_response(error_json(exc), status=exc.http_status, headers=error_headers(exc))

    async def ready(_: web.Request) -> web.Response:
        reason = not_ready()
        if reason is not None:
            return web.json_response({"ready": False, "reason": reason}, status=NotReady.http_status)
        return web.json_response({"ready": True})

    async def metrics(_: web.Request) -> web.Response:
        return metrics_response(*registries)

    app = web.Application(middlewares=[refusals, *(access or Access()).middlewares(read_right)])
    app.add_routes([*_HEALTH, web.get("/ready", ready), web.get("/metrics", metrics)])
    return app


def error_json(exc: KvStreamsError) -> dict[str, Any]:
    """The shape of all errors."""
    return {"error": {"code": exc.code, "message": str(exc), "detail": exc.detail}}


def error_headers(exc: KvStreamsError) -> dict[str, str]:
    """The headers that an error needs: 401 names the kind of credentials."""
    return {"WWW-Authenticate": "Bearer"} if isinstance(exc, Unauthorized) else {}


async def _healthz(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


#: Kubernetes' usual path, and the one that engines have.
_HEALTH = (web.get("/healthz", _healthz), web.get("/health", _healthz))


@asynccontextmanager
async def monitoring_server(
    host: str, port: int, startup: Startup, access: Access | None = None
) -> AsyncIterator[HttpServer | None]:
    """Listen while the block runs, and answer as a starting process; the block serves a `monitoring_app` later.

    A port of 0 serves nothing and gives None. Raises SettingsError if the address cannot be listened on.
    """
    if not port:
        yield None
        return
    server = HttpServer(host, port, "metrics_port", access)
    try:
        await server.serve(starting_app(startup))
        yield server
    finally:
        await server.close()

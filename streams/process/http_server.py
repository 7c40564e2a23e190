"""The HTTP server of a process, which answers from the moment at which the process starts.

What lives here: listening, what is answered while a process starts, and the pages of processes without an HTTP API of
their own. What must not: the HTTP API (router_api), and metrics (metrics).

Compiling kernels takes up to two minutes. Something that watches a process, such as Kubernetes, must be able to tell
this from a process that hangs. So a process listens first, and answers /healthz, and /ready with the reason. What it
serves later takes over the same sockets, so that no connection is refused in between.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from streams.errors import Forbidden, KvStreamsError, NotReady, SettingsError, Unauthorized
from streams.process.metrics import MetricsRegistry
from streams.process.process_metrics import metrics_response
from streams.security.access import CHECK_S, Access, read_right

#: Connections that the kernel keeps until they are accepted; aiohttp's own default.
BACKLOG = 128

#: A client must finish the TLS handshake within this time; asyncio's own limit is a minute.
TLS_HANDSHAKE_S = 10.0

#: Seconds after which a client may retry, as the header Retry-After.
RETRY_AFTER_S = "1"

#: Returns why a process is not ready, or None if it is.
NotReadyReason = Callable[[], str | None]


_AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]

log = logging.getLogger(__name__)


class Startup:
    """What a starting process is doing. Any thread may set it; the server reads it."""

    def __init__(self) -> None:
        self.doing = "starting"

    def note(self, doing: str) -> None:
        """Set what the process is doing."""
        self.doing = doing


class HttpServer:
    """The sockets of one address, and the application that answers on them. Used on one loop.

    It answers over TLS if `access` has certificates. When a file of `access` changes, new connections use the new one.
    """

    def __init__(self, host: str, port: int, port_setting: str = "port", access: Access | None = None) -> None:
        """Listen, so that an address that is taken is found at once.

        Raises SettingsError, which names port_setting, or says that the address would be open to everyone.
        """
        self._access = access or Access()
        try:
            infos = _addresses(host, port)
            self._access.check_address(host, (str(info[4][0]) for info in infos))
            self._sockets = _listen(infos)
        except OSError as exc:
            raise _cannot_listen(host, port, port_setting, exc) from exc
        self._runners: list[web.AppRunner] = []
        self._listening: list[asyncio.Server] = []
        self._checking: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket; the port is the one that was chosen if 0 was given."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

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
        if not self._listening:
            await self._listen(self._sockets)
        if self._checking is None and self._access.has_files:
            self._checking = asyncio.create_task(self._check_files())

    def _accept(self) -> asyncio.Protocol:
        """A new connection, which the last application answers.

        A server per application would lose calls: asyncio drops a connection that a server accepted and had not yet
        begun to read when it was closed.
        """
        accept = self._runners[-1].server
        assert accept is not None  # the runner was set up
        return accept()

    async def _listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on these sockets with the current certificates."""
        context = self._access.ssl_context
        for listener in sockets:
            self._listening.append(
                # A server closes its socket when it ends. The copy refers to the same queue of connections.
                await asyncio.get_running_loop().create_server(
                    self._accept,
                    sock=listener.dup(),
                    backlog=BACKLOG,
                    ssl=context,
                    ssl_handshake_timeout=None if context is None else TLS_HANDSHAKE_S,
                )
            )

    async def _listen_again(self) -> None:
        """Accept connections on every socket with the current certificates, and no longer with earlier ones."""
        before, self._listening = self._listening, []
        await self._listen(self._sockets)
        for server in before:
            server.close()

    async def _check_files(self) -> None:
        """Read tokens and certificates again when their files change, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                if await asyncio.to_thread(self._access.check):
                    await self._listen_again()
            except Exception:  # nothing may end the checks: the next certificate would never be used
                log.exception("the files of tokens and certificates cannot be checked")

    async def listen_also(self, host: str, port: int) -> None:
        """Listen on another address, which other processes listen on as well. Raises SettingsError."""
        try:
            infos = _addresses(host, port)
            self._access.check_address(host, (str(info[4][0]) for info in infos))
            added = _listen(infos, shared=True)
        except OSError as exc:
            raise _cannot_listen(host, port, "port", exc) from exc
        self._sockets += added
        await self._listen(added)

    async def close(self) -> None:
        """Stop listening and finish running requests."""
        if self._checking is not None:
            self._checking.cancel()
        for server in self._listening:
            server.close()
        for listener in self._sockets:
            listener.close()
        for runner in self._runners:
            await runner.cleanup()


def _cannot_listen(host: str, port: int, port_setting: str, exc: OSError) -> SettingsError:
    return SettingsError(
        f"host and {port_setting}: cannot listen on {host}:{port}: {exc.strerror or exc}",
        remedy=f"Set --host and --{port_setting.replace('_', '-')}, or stop the process that listens there",
    )


def _addresses(host: str, port: int) -> list[_AddressInfo]:
    """Every address of a host, as aiohttp finds them; raises OSError."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(infos))


def _listen(infos: Sequence[_AddressInfo], *, shared: bool = False) -> list[socket.socket]:
    """Listen on every address. shared: other processes may do so too. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in infos:
            listener = socket.socket(family, kind, protocol)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit it
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
    except OSError:
        for listener in sockets:
            listener.close()
        raise
    return sockets


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

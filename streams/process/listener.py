"""The sockets of one address, with their certificates, for the HTTP server and for others.

What lives here: listening, and using certificates that have changed. What must not: what is answered (http_server,
picker.grpc), and which certificates there are (security.access).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from streams.errors import SettingsError
from streams.security.access import CHECK_S, CertificateAccess

#: Connections that the kernel keeps until they are accepted; aiohttp's own default.
BACKLOG = 128

#: A client must finish the TLS handshake within this time; asyncio's own limit is a minute.
TLS_HANDSHAKE_S = 10.0

_AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]

log = logging.getLogger(__name__)


class Listener:
    """The sockets of one address. Used on one loop.

    Connections use TLS if `access` has certificates. When a file of `access` changes, new connections use the new one.
    """

    def __init__(self, host: str, port: int, port_setting: str, access: CertificateAccess) -> None:
        """Listen, so that an address that is taken is found at once.

        Raises SettingsError, which names port_setting, or says that the address would be open to everyone.
        """
        self._access = access
        try:
            infos = _addresses(host, port)
            self._access.check_address(host, (str(info[4][0]) for info in infos))
            self._sockets = _listen(infos)
        except OSError as exc:
            raise _cannot_listen(host, port, port_setting, exc) from exc
        self._accept: Callable[[], asyncio.Protocol] | None = None
        self._listening: list[asyncio.Server] = []
        self._checking: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket; the port is the one that was chosen if 0 was given."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    async def start(self, accept: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections. accept: called for each new one, before its TLS handshake."""
        self._accept = accept
        await self._listen(self._sockets)
        if self._access.has_files:
            self._checking = asyncio.create_task(self._check_files())

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

    def close(self) -> None:
        """Listen no longer. Connections that were accepted go on."""
        if self._checking is not None:
            self._checking.cancel()
        for server in self._listening:
            server.close()
        for listener in self._sockets:
            listener.close()

    async def _listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on these sockets with the current certificates."""
        assert self._accept is not None  # it was started
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

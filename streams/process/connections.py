"""The connections of an HTTP server: how many there may be, and how long one may stay without a request.

What lives here: those limits. What must not: requests and their bodies, and what runs an application within the limits
(aiohttp_internals).

State: the open connections of one server.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import cast

import orjson
from aiohttp import web

from streams.errors import Overloaded

log = logging.getLogger(__name__)

#: After an error, the rest of the request is received and dropped for this long. Otherwise the client's system would
#: drop the answer.
LINGERING_S = 2.0

#: Connections that are being refused at a time: each gets an answer and up to a second to read it. Further ones are
#: closed without an answer.
REFUSALS_MAX = 256
REFUSAL_S = 1.0

#: File descriptors that are left for Kafka, files and logs.
_OTHER_DESCRIPTORS = 128

#: Why connections were closed before they had a request: they are the values of a label.
TOO_MANY, NO_REQUEST = "too_many", "no_request"
REFUSAL_REASONS = (TOO_MANY, NO_REQUEST)


class Connections:
    """The open connections of one server. refused: how many were closed before they had a request, by reason."""

    def __init__(self, connections_max: int, first_request_timeout_s: float, *, uses_tls: bool = False) -> None:
        """first_request_timeout_s: how long a new connection may take until the end of its first request's headers.

        Between two requests, a connection may be idle for an hour, since proxies keep connections open.
        """
        self.connections_max = _within_descriptors(connections_max)
        self._first_request_timeout_s = first_request_timeout_s
        self._uses_tls = uses_tls
        self.refused: Counter[str] = Counter()
        self._server: web.Server | None = None
        self._refusals: set[_Refusal] = set()
        self._n_accepting = 0
        self._without_request: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return 0 if self._server is None else len(self._server.connections)

    def accepting_for(
        self, server: web.Server, new_protocol: Callable[[], web.RequestHandler]
    ) -> Callable[[], asyncio.BaseProtocol]:
        """The protocol of each new connection of a server: what new_protocol returns, or one that refuses it."""
        self._server = server

        def accept() -> asyncio.BaseProtocol:
            loop = asyncio.get_running_loop()
            n_open = len(server.connections) + self._n_accepting
            if self._uses_tls:
                # The server's list has a connection once its TLS handshake has ended. The other one has it from its
                # beginning, for first_request_timeout_s even if it ends earlier.
                n_open = max(n_open, len(self._without_request))
            if n_open >= self.connections_max:
                self.refused[TOO_MANY] += 1
                return _Refusal(self._refusals, self.connections_max)
            protocol = new_protocol()
            # The loop accepts many connections in one step, and adds them to the server's list in the next one.
            self._n_accepting += 1
            loop.call_soon(self._made)
            self._without_request[protocol] = loop.call_later(
                self._first_request_timeout_s, self._close_silent, protocol
            )
            return protocol

        return accept

    def _made(self) -> None:
        self._n_accepting -= 1

    def note_request(self, protocol: web.RequestHandler) -> None:
        """A connection has a request; called for the first one, or for every one of them."""
        timer = self._without_request.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _close_silent(self, protocol: web.RequestHandler) -> None:
        del self._without_request[protocol]
        if protocol.transport is not None:  # otherwise the client has closed it
            self.refused[NO_REQUEST] += 1
            protocol.force_close()


class _Refusal(asyncio.Protocol):
    """Answers 503 to a connection that is one too many, and closes it."""

    def __init__(self, refusals: set[_Refusal], connections_max: int) -> None:
        self._refusals = refusals
        self._connections_max = connections_max
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transport for TLS is no subclass
        if len(self._refusals) >= REFUSALS_MAX:
            transport.abort()
            return
        self._refusals.add(self)
        error = Overloaded(
            f"the router has {self._connections_max} connections, which is its limit",
            remedy="Try again, keep connections open between requests, or raise connections_max",
        )
        transport.write(refusal(error))
        if transport.can_write_eof():
            transport.write_eof()
        else:  # TLS has no half-closed connections
            transport.close()
        # What the client sends is received and dropped meanwhile, so that its system does not drop the answer.
        self._timer = asyncio.get_running_loop().call_later(REFUSAL_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._refusals.discard(self)
        if self._timer is not None:
            self._timer.cancel()


def refusal(error: Overloaded) -> bytes:
    """An error in the shape of all errors, as a whole HTTP response after which the connection is closed."""
    body = orjson.dumps({"error": {"code": error.code, "message": str(error), "detail": error.detail}})
    head = (
        f"HTTP/1.1 {error.http_status} Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _within_descriptors(connections_max: int) -> int:
    """The limit of connections, lowered to the file descriptors that this process may have.

    Most systems let a process have 1,024 at first and many more if it asks for them.
    """
    descriptors, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + _OTHER_DESCRIPTORS
    if descriptors != resource.RLIM_INFINITY and descriptors < wanted:
        wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, descriptors), most))
        descriptors = max(wanted, descriptors)
    if descriptors == resource.RLIM_INFINITY or connections_max <= descriptors - _OTHER_DESCRIPTORS:
        return connections_max
    lowered = max(1, descriptors - _OTHER_DESCRIPTORS)
    log.warning(
        "connections_max is %d, but this process may have %d open files (ulimit -Hn): the limit is %d connections",
        connections_max,
        descriptors,
        lowered,
    )
    return lowered

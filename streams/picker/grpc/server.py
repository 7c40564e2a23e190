"""The server: it accepts connections, checks them once a second, and lets them end.

What lives here: that. What must not: what a connection does (connection), and sockets and certificates
(process.listener).

State: the connections of one server.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import cast

from streams.picker.grpc.call import Service
from streams.picker.grpc.calls import Tally
from streams.picker.grpc.connection import Connection, ConnectionOwner
from streams.picker.grpc.limits import Limits, Reason
from streams.process.listener import TLS_HANDSHAKE_S, Listener

log = logging.getLogger(__name__)

#: Interval at which connections are checked for peers that are dead or too slow.
CHECK_S = 1.0

#: A check that comes later than this finds what the process did not read, not what peers did not send.
LATE_S = 3.0

#: Time that connections get to close after their last call.
_CLOSE_S = 3.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds now."""

    connections: int
    calls: int
    buffered_bytes: int


class GrpcServer:
    """Serves calls on one listener. Used on one loop."""

    def __init__(self, service: Service, limits: Limits | None = None) -> None:
        self._owner = ConnectionOwner(service, limits or Limits())
        self._listener: Listener | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._check_due_s = 0.0

    @property
    def tally(self) -> Tally:
        """What was counted since the server was made."""
        return self._owner.tally

    def held(self) -> Held:
        """What the server holds now. `buffered_bytes` are those that Limits restricts."""
        connections = self._owner.connections
        n_calls = sum(len(connection.calls.calls) for connection in connections)
        return Held(len(connections), n_calls, self._owner.budget.held)

    async def start(self, listener: Listener) -> None:
        """Accept connections. The listener belongs to the server from now on."""
        self._listener = listener
        await listener.start(self._accept)
        self._schedule()

    def stop_accepting(self) -> None:
        """Listen no longer. Connections go on."""
        if self._listener is not None:
            self._listener.close()

    async def drain(self, timeout_s: float) -> int:
        """Accept nothing more, let open calls end, and close; returns how many calls had to be cut after timeout_s.

        Clients learn by GOAWAY that they send new calls elsewhere. Calls that were on their way are accepted.
        """
        self.stop_accepting()
        self._owner.is_leaving = True
        for connection in list(self._owner.connections):
            connection.leave()
        await self._until_closed(timeout_s)
        n_cut = self.held().calls
        await self.close()
        return n_cut

    async def close(self) -> None:
        """End everything now. Open calls are lost."""
        self.stop_accepting()
        self._owner.is_leaving = True
        for connection in list(self._owner.connections):
            connection.cut()
        await self._until_closed(_CLOSE_S)
        for connection in list(self._owner.connections):
            connection.abort()
        await self._until_closed(_CLOSE_S)
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None

    async def _until_closed(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self._owner.connections and loop.time() < until_s:
            await asyncio.sleep(0.01)

    def _accept(self) -> asyncio.Protocol:
        """The protocol of a new connection, before its TLS handshake."""
        owner, now_s = self._owner, asyncio.get_running_loop().time()
        if len(owner.connections) + len(owner.handshakes) >= owner.limits.connections_max:
            owner.tally.connections_ended[Reason.TOO_MANY_CONNECTIONS] += 1
            return _Refusal()
        connection = Connection(owner)
        owner.handshakes[connection] = now_s + TLS_HANDSHAKE_S
        return connection

    def _forget_handshakes(self, now_s: float) -> None:
        """Those that have failed."""
        handshakes = self._owner.handshakes
        for connection in [one for one, until_s in handshakes.items() if until_s < now_s]:
            del handshakes[connection]

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._check_due_s = loop.time() + CHECK_S
        self._checking = loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._forget_handshakes(now_s)
        if now_s - self._check_due_s < LATE_S:
            for connection in list(self._owner.connections):
                try:
                    connection.check(now_s)
                except Exception:  # nothing may end the checks
                    log.exception("a gRPC connection cannot be checked")
        self._schedule()


class _Refusal(asyncio.Protocol):
    """Closes a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()

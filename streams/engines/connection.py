"""The subscribing socket of one rank: one connection at a time.

What lives here: opening a socket, and noticing that its connection is complete or broken. What must not: which batches
may be published (feed).

A batch carries a number but no incarnation. What shows to which process a batch belongs is the connection that it
arrived through. ZMQ would reconnect a socket without notice, and batches of two processes would wait in one queue. So
ZMQ does not reconnect: a socket has one connection, and another connection gets another socket.

An engine may also connect itself, to an address at which the socket of its rank listens (`bind:`). Such a socket also
has one connection: if it breaks, or a second publisher connects, it is closed, and publishers connect to the next one.

State: the socket.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Callable
from typing import Any, Self, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from streams.engines.socket_watch import SocketWatch

#: Batches that wait in the socket. ZMQ drops further ones; the numbers then show a gap, which the replay socket fills.
RECEIVE_HWM = 100_000

#: Batches that wait in the sockets of all ranks of a bridge, while Kafka is slow: 500 MB of batches with four blocks.
#: Each rank has its share, but at least the second number.
RECEIVE_HWM_OF_ALL = 400_000
RECEIVE_HWM_MIN = 1_000

#: Sockets of a context that engines share, the greatest number that ZMQ takes. A rank has three, and one for a replay.
SOCKETS_MAX = 65_535

#: Bytes of one message; a greater one ends the connection. A batch of this size has some 600,000 blocks, more than one
#: record of kv-events can contain. Decoding it delays the other engines of the bridge by less than a second.
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

#: Pauses before further attempts to connect. The first is short, since without a replay socket the batches that an
#: engine sends before the connection is complete are lost.
RECONNECT_S_MIN = 0.1
RECONNECT_S_MAX = 0.5

#: An attempt that is not complete after this time is given up. It covers hosts that answer nothing, and names that
#: cannot be resolved, for which ZMQ reports nothing.
CONNECT_TIMEOUT_S = 5.0

#: ZMQ's own pause before it would reconnect. No socket lives so long, since one whose connection broke is closed. With
#: -1, ZMQ ends the queue of a broken connection at once, even between two frames of a message that is being read, and
#: then aborts the process (libzmq issue 2163, "Assertion failed: !_more").
_NEVER_MS = 24 * 60 * 60 * 1000

#: ZMQ's own heartbeats: a connection over which no answer comes for so long is ended. TCP alone takes minutes to
#: notice that a host vanished, or that every packet is lost, and until then the engine looks idle. The engine's ZMQ
#: answers in a thread of its own, also while the engine computes.
PING_INTERVAL_S = 0.25
PING_TIMEOUT_S = 0.6

#: Without a replay socket, a connection that is ended too early loses batches for good.
PING_TIMEOUT_WITHOUT_REPLAY_S = 6.0

#: vLLM 0.32 listens only if its endpoint is `tcp://*:PORT`, `::` or ipc. With another host, also 0.0.0.0, it connects.
NOTHING_LISTENS = (
    "nothing listens there. If the engine runs, its endpoint may have an address in place of `*`: then vLLM connects "
    "instead of listening. Use tcp://*:PORT in its kv-events-config, or events=bind:tcp://ADDRESS:PORT here"
)

_FAILURES = frozenset(
    {
        zmq.EVENT_CLOSED,
        zmq.EVENT_DISCONNECTED,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    }
)
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILURES)

#: As a plain number: `&` with the enumeration takes a microsecond, for each message.
_POLLIN = int(zmq.POLLIN)


#: Numbers of the monitors' addresses: that of a closed socket may be in use for a moment longer.
_monitors = itertools.count()


def shared_context() -> zmq.asyncio.Context:
    """Return a context for the sockets of many engines."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
    return context


def receive_hwm(n_ranks: int) -> int:
    """Return one rank's share of the batches that may wait in the sockets of a bridge with so many ranks."""
    return min(RECEIVE_HWM, max(RECEIVE_HWM_MIN, RECEIVE_HWM_OF_ALL // max(1, n_ranks)))


class Change(enum.Enum):
    """What happened to the connection."""

    COMPLETED = "the connection is complete"
    BROKEN = "a complete connection broke"
    FAILED = "an attempt to connect failed"


class EventConnection:
    """One rank's connection to its engine's events. All methods run on the loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        receive_hwm: Callable[[], int] = lambda: RECEIVE_HWM,
        on_message: Callable[[], None] = lambda: None,
        watch: SocketWatch | None = None,
        *,
        listens: bool = False,
        ping_timeout_s: float = PING_TIMEOUT_WITHOUT_REPLAY_S,
    ) -> None:
        """receive_hwm: returns how many batches may wait in a socket that is opened now. on_message: called when a
        message has arrived and none waited before; it may take messages. watch: of all sockets of the bridge.
        listens: whether the engine connects to the address. ping_timeout_s: how soon a silent connection is ended.
        """
        self._receive_hwm = receive_hwm
        self._on_message = on_message
        self._watch = SocketWatch() if watch is None else watch
        self._context = context
        self._listens = listens
        self._ping_timeout_s = ping_timeout_s
        self._address = address
        # Not a socket of zmq.asyncio, which creates a future and three callbacks for each message.
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._opened_at_s = 0.0
        self._open_at_s = float("-inf")  # when the next socket may be opened
        self._pause_s = RECONNECT_S_MIN
        self._reached = False  # whether a TCP connection exists or existed
        #: When the connection became complete, None while it is not, and after it broke.
        self.completed_at_s: float | None = None
        #: Why the last attempt failed, or the last connection broke.
        self.reason = ""
        #: The next event of the socket's monitor; None while no socket is open.
        self.event: asyncio.Future[list[bytes]] | None = None
        #: Whether a message waits in the socket, as of the last check.
        self.has_message = False
        self._put_back: list[bytes] | None = None  # a message that is taken before those in the socket

    @property
    def is_open(self) -> bool:
        """Whether there is a socket, whose connection may not be complete."""
        return self._socket is not None

    def take(self) -> list[bytes]:
        """Take the next message, which must have arrived."""
        assert self._socket is not None and self.has_message
        if self._put_back is not None:
            frames, self._put_back = self._put_back, None
            self._check()
            return frames
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        self._check()
        return frames

    def put_back(self, frames: list[bytes]) -> None:
        """Let the message that was taken last be the next one again."""
        self._put_back, self.has_message = frames, True

    def _check(self) -> None:
        """Note whether a message waits. ZMQ's file descriptor is readable again only after this."""
        assert self._socket is not None
        events: Any = self._socket.getsockopt(zmq.EVENTS)
        self.has_message = events & _POLLIN != 0 or self._put_back is not None

    def _on_readable(self) -> None:
        had_message = self.has_message
        self._check()
        if self.has_message and not had_message:
            self._on_message()

    def attend(self, now_s: float) -> Change | None:
        """Open the socket if that is due; return what happened to the connection since the last call.

        A broken or failed connection is closed with `reopen`, after its last messages have been taken.
        """
        if self._socket is None:
            if now_s < self._open_at_s:
                return None
            try:
                self._open(now_s)
            except zmq.ZMQError as exc:
                self.reason = str(exc)
                return Change.FAILED
        while self.event is not None and self.event.done():
            assert self._monitor is not None
            event = parse_monitor_message(self.event.result())
            self.event = asyncio.ensure_future(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                self._reached = True
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self.completed_at_s is not None:
                    self._check()
                    return self._failed("a second publisher has connected; each rank needs a port of its own")
                self.completed_at_s, self._pause_s = now_s, 0.0
                return Change.COMPLETED
            elif event["event"] in _FAILURES:
                self._check()  # messages may have come since the last poll of all sockets
                return self._failed()
        if self.completed_at_s is None and now_s - self._opened_at_s >= CONNECT_TIMEOUT_S:
            self.reason = (
                f"no publisher has connected within {CONNECT_TIMEOUT_S:g} s"
                if self._listens
                else f"nothing answers within {CONNECT_TIMEOUT_S:g} s"
            )
            return Change.FAILED
        return None

    def reopen(self, now_s: float) -> None:
        """Close the socket with everything in it; `attend` opens another one after a pause."""
        self._open_at_s = now_s + (self._pause_s if self.completed_at_s is None else 0.0)
        self._pause_s = min(max(RECONNECT_S_MIN, 2 * self._pause_s), RECONNECT_S_MAX)
        self.close()

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._watch.remove(self._socket.FD)
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = self.event = self.completed_at_s = None
        self.has_message, self._put_back = False, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self, broke: str = "the connection broke") -> Change:
        """broke: why a complete connection is closed."""
        if self.completed_at_s is not None:
            self.completed_at_s, self.reason = None, broke
            self._pause_s = 0.0
            return Change.BROKEN
        if self._reached:
            # The peer closes the connection if it is not a ZMQ socket that publishes.
            self.reason = "it is not a socket that publishes; are the ports of events and replay swapped?"
        elif self._listens:
            self.reason = "what connected is not a socket that publishes"
        else:
            self.reason = NOTHING_LISTENS
        return Change.FAILED

    def _open(self, now_s: float) -> None:
        self._opened_at_s, self._reached = now_s, False
        socket: zmq.Socket[bytes] = cast(Any, self._context).socket(zmq.SUB, socket_class=zmq.Socket)
        self._socket = socket
        socket.setsockopt(zmq.RCVHWM, self._receive_hwm())
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(PING_INTERVAL_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(self._ping_timeout_s * 1000))
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.monitor(address := f"inproc://monitor-{next(_monitors)}", _EVENTS)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.connect(address)
        self.event = asyncio.ensure_future(self._monitor.recv_multipart())
        self._watch.add(socket.FD, self._on_readable)
        (socket.bind if self._listens else socket.connect)(self._address)

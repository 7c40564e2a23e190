"""One call of a client, as a service sees it, and what a service returns for it.

What lives here: the call and the two types of a service. What must not: HTTP/2, which is the connection's (calls).

State: one call. The attributes after `is_open` belong to the table of its connection (calls).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from streams.picker.grpc.framing import MessageReader
from streams.picker.grpc.words import Header, Status


class Stream(Protocol):
    """What a service returns for a call. All three are called on the loop, and none may wait.

    An exception in `received` or `half_closed` ends the call with INTERNAL.
    """

    def received(self, message: bytes) -> None:
        """A message arrived. None arrives after the call has ended."""

    def half_closed(self) -> None:
        """The client has sent all its messages."""

    def ended(self) -> None:
        """The call is over: by `Call.finish`, before it returns, or because the peer or the connection is gone.

        Called once.
        """


class Carrier(Protocol):
    """What sends for a call: the table of its connection, or what a test has instead."""

    def send(self, call: Call, message: bytes) -> None:
        """As Call.send."""

    def finish(self, call: Call, status: Status, text: str) -> None:
        """As Call.finish."""


class Call:
    """A call. method: as in "/grpc.health.v1.Health/Check". is_open: until `finish`, a reset or a lost connection."""

    __slots__ = (
        "_carrier",
        "deadline",
        "has_headers",
        "incomplete_since_s",
        "is_half_closed",
        "is_open",
        "last_headers",
        "method",
        "opened_s",
        "queue",
        "queued_bytes",
        "reader",
        "stalled_since_s",
        "stream",
        "stream_id",
    )

    def __init__(self, carrier: Carrier, method: str, stream_id: int, reader: MessageReader, now_s: float) -> None:
        self._carrier = carrier
        self.method = method
        self.is_open = True
        self.stream_id = stream_id
        self.stream: Stream | None = None
        self.reader = reader
        self.opened_s = now_s
        self.incomplete_since_s = 0.0  # when the message that is incomplete began
        self.is_half_closed = False  # whether the client has sent all
        self.deadline: asyncio.TimerHandle | None = None
        self.has_headers = False  # whether the answer's headers were sent
        self.queue: deque[memoryview] = deque()  # what the peer's windows do not allow yet
        self.queued_bytes = 0
        self.stalled_since_s = 0.0  # when something of the queue was sent last
        self.last_headers: list[Header] | None = None  # sent after the queue

    def send(self, message: bytes) -> None:
        """Send one message; nothing happens if the call is over. What the peer does not accept yet is queued.

        The call ends with RESOURCE_EXHAUSTED if the queue exceeds a budget of Limits.
        """
        if self.is_open:
            self._carrier.send(self, message)

    def finish(self, status: Status = Status.OK, text: str = "") -> None:
        """End the call after what was sent; nothing happens if it is over."""
        if self.is_open:
            self._carrier.finish(self, status, text)


#: A service: returns the stream of a call, or None for a method that it does not have. It may finish the call at once.
Service = Callable[[Call], Stream | None]


def first_of(services: Iterable[Service]) -> Service:
    """A service of several: the first one that has the method."""
    several = tuple(services)

    def service(call: Call) -> Stream | None:
        for each in several:
            stream = each(call)
            if stream is not None or not call.is_open:
                return stream
        return None

    return service

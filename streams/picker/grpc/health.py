"""The service grpc.health.v1.Health, whose two messages have one field each.

What lives here: Check and Watch, and these messages. What must not: what is healthy, which a function answers.

State: the calls of Watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum

from streams.picker.grpc.call import Call, Stream
from streams.picker.grpc.words import Status

_SERVICE = "/grpc.health.v1.Health/"
CHECK, WATCH = _SERVICE + "Check", _SERVICE + "Watch"

#: Interval at which the status of each watched name is asked for. `Health.changed` asks at once.
WATCH_S = 0.5

_NAME_TAG = 0x0A  # field 1, a string
_STATUS_TAG = 0x08  # field 1, a number
_VARINT, _LENGTH = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


class ServingStatus(IntEnum):
    """What a name answers."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3  # only in Watch


#: The status of a name, where "" is the whole server; None for a name that does not exist.
StatusOf = Callable[[str], ServingStatus | None]


class Health:
    """Answers Check and Watch; a Service. Used on one loop."""

    def __init__(self, status_of: StatusOf) -> None:
        self._status_of = status_of
        self._watches: set[_Watch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_leaving = False

    def __call__(self, call: Call) -> Stream | None:
        """The stream of a call; None if it is of another service."""
        if call.method == CHECK:
            return _Check(call, self._status_of)
        if call.method == WATCH:
            return _Watch(call, self._status_of, self._add, self._watches.discard)
        return None

    def changed(self) -> None:
        """Report to those who watch, now instead of within WATCH_S."""
        for watch in list(self._watches):
            watch.report()

    def leave(self) -> None:
        """The server stops: report to those who watch, and end their calls, which would not end by themselves."""
        self._is_leaving = True
        for watch in list(self._watches):
            watch.report()
            watch.finish()

    def _add(self, watch: _Watch) -> None:
        if self._is_leaving:
            watch.finish()
            return
        self._watches.add(watch)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._look)

    def _look(self) -> None:
        self.changed()
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._look) if self._watches else None


class _Unary:
    """A call with one request, which `_answer` gets."""

    __slots__ = ("_call", "_has_request")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._has_request = False

    def received(self, message: bytes) -> None:
        if self._has_request:
            self._call.finish(Status.INVALID_ARGUMENT, "there is more than one request")
            return
        self._has_request = True
        try:
            name = requested_name(message)
        except ValueError:
            self._call.finish(Status.INVALID_ARGUMENT, "the request cannot be read")
            return
        self._answer(name)

    def half_closed(self) -> None:
        if not self._has_request:
            self._call.finish(Status.INVALID_ARGUMENT, "there is no request")

    def ended(self) -> None:
        pass

    def _answer(self, name: str) -> None:
        raise NotImplementedError


class _Check(_Unary):
    """Answers once."""

    __slots__ = ("_status_of",)

    def __init__(self, call: Call, status_of: StatusOf) -> None:
        super().__init__(call)
        self._status_of = status_of

    def _answer(self, name: str) -> None:
        status = self._status_of(name)
        if status is None:
            self._call.finish(Status.NOT_FOUND, "there is no service of this name")
            return
        self._call.send(status_message(status))
        self._call.finish()


class _Watch(_Unary):
    """Answers whenever the status changes."""

    __slots__ = ("_begin", "_end", "_name", "_reported", "_status_of")

    def __init__(
        self,
        call: Call,
        status_of: StatusOf,
        begin: Callable[[_Watch], None],
        end: Callable[[_Watch], None],
    ) -> None:
        super().__init__(call)
        self._status_of = status_of
        self._begin = begin
        self._end = end
        self._name = ""
        self._reported: ServingStatus | None = None

    def _answer(self, name: str) -> None:
        self._name = name
        self.report()
        self._begin(self)

    def report(self) -> None:
        """Send the status if it is another one."""
        status = self._status_of(self._name)
        status = ServingStatus.SERVICE_UNKNOWN if status is None else status
        if status is not self._reported:
            self._reported = status
            self._call.send(status_message(status))

    def finish(self) -> None:
        """End the call."""
        self._call.finish()

    def ended(self) -> None:
        self._end(self)


def status_message(status: ServingStatus) -> bytes:
    """HealthCheckResponse. A field that is 0 is left out."""
    return bytes((_STATUS_TAG, status)) if status else b""


def requested_name(message: bytes) -> str:
    """The name in a HealthCheckRequest, whose unknown fields are skipped; raises ValueError."""
    name, at = "", 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        if kind == _LENGTH:
            length, at = _varint(message, at)
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise ValueError(f"there is no field of the kind {kind}")
        if at + length > len(message):
            raise ValueError("the message ends within a field")
        if tag == _NAME_TAG:
            name = message[at : at + length].decode()
        at += length
    return name


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and the position after it; raises ValueError."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is incomplete")

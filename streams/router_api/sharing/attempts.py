"""What a router remembers of requests that were booked more than once: retries, reassignments, ends without a record.

What lives here: when this router made its bookings, which booking replaced which, and when clients ended requests of
which the log has no end. What must not: bookings themselves (core.loads), records (loads_sync), and clocks.

Times of day are those of all routers, in ms since the epoch. Monotonic times are this process's, and only decide what
is forgotten.

State: what a router remembers of requests that were booked more than once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from streams.core.loads.bookings import BookingId

#: Reassignments that are remembered, each for `booking_ttl_s`. Beyond this limit the oldest one is dropped.
REASSIGNMENTS_MAX = 10_000

#: Ended requests that are remembered, each for `booking_ttl_s`. Beyond this limit the oldest one is dropped.
ENDS_MAX = 100_000

#: Bookings of which it is remembered when they were made, until a record ends them. Beyond this limit the oldest one is
#: dropped: it probably expired long ago.
MADE_MAX = 100_000


class _Reassignment(NamedTuple):
    """What replaced a booking. at_ms: the time of day of that. since_ms: the monotonic time since it is known."""

    latter: BookingId
    at_ms: int
    since_ms: int


class _End(NamedTuple):
    """Times of day when a request ended, by the phase that the call named. since_ms: the last call's monotonic time."""

    since_ms: int
    at_ms: dict[str | None, int]


class Attempts:
    """Not thread-safe."""

    def __init__(self, ttl_ms: int) -> None:
        """ttl_ms: how long reassignments and ends are remembered."""
        self._ttl_ms = ttl_ms
        self._made: OrderedDict[BookingId, int] = OrderedDict()
        # By former booking, in the order of these events.
        self._reassignments: OrderedDict[BookingId, _Reassignment] = OrderedDict()
        self._ends: OrderedDict[str, _End] = OrderedDict()  # by request id, in the order of the last calls

    def note_made(self, booking_id: BookingId, at_ms: int) -> None:
        """Remember when a booking was made, until `forget_made`."""
        self._made[booking_id] = at_ms
        if len(self._made) > MADE_MAX:
            self._made.popitem(last=False)

    def made_ms(self, booking_id: BookingId) -> int | None:
        """When this router made a booking; None if it did not, or if that was forgotten."""
        return self._made.get(booking_id)

    def forget_made(self, booking_id: BookingId) -> None:
        """Note that a booking has ended."""
        self._made.pop(booking_id, None)

    @property
    def has_reassignments(self) -> bool:
        """Whether any reassignment is remembered."""
        return bool(self._reassignments)

    def note_reassignment(self, former: BookingId, latter: BookingId, at_ms: int, now_ms: int) -> None:
        """Remember a reassignment: what a client then reports of the former booking applies to the latter one."""
        self._reassignments[former] = _Reassignment(latter, at_ms, now_ms)
        self._reassignments.move_to_end(former)
        if len(self._reassignments) > REASSIGNMENTS_MAX:
            self._reassignments.popitem(last=False)

    def was_reassigned(self, booking_id: BookingId) -> bool:
        """Whether a booking was replaced by another one."""
        return booking_id in self._reassignments

    def reassigned_to(self, booking_id: BookingId, reported_ms: int, *, once: bool) -> BookingId | None:
        """Which booking has replaced this one, if that was not after the time of a report. once: forget it then."""
        reassignment = self._reassignments.get(booking_id)
        if reassignment is None or reassignment.at_ms > reported_ms:
            return None
        if once:
            del self._reassignments[booking_id]
        return reassignment.latter

    @property
    def has_ends(self) -> bool:
        """Whether any end is remembered."""
        return bool(self._ends)

    def note_end(self, request_id: str, phase: str | None, at_ms: int, now_ms: int) -> None:
        """Remember that a client ended a request. phase: the one that the call named, or None."""
        before = self._ends.pop(request_id, None)
        ends = {phase: at_ms} if before is None else before.at_ms | {phase: at_ms}
        self._ends[request_id] = _End(now_ms, ends)
        if len(self._ends) > ENDS_MAX:
            self._ends.popitem(last=False)

    def has_ended(self, request_id: str) -> bool:
        """Whether an end of this request is remembered."""
        return request_id in self._ends

    def ended_ms(self, request_id: str, phase: str | None) -> int:
        """When a client last ended this phase of a request, or all of it; 0 if that is not remembered."""
        end = self._ends.get(request_id)
        return 0 if end is None else max(end.at_ms.get(named, 0) for named in (None, phase))

    def expire(self, now_ms: int) -> None:
        """Forget the reassignments and ends whose time is over."""
        while self._reassignments:
            former = next(iter(self._reassignments))
            if self._reassignments[former].since_ms + self._ttl_ms > now_ms:
                break
            del self._reassignments[former]
        while self._ends:
            request_id = next(iter(self._ends))
            if self._ends[request_id].since_ms + self._ttl_ms > now_ms:
                break
            del self._ends[request_id]

"""What a router remembers of requests that were booked more than once: retries, moves, and ends without a record.

What lives here: when this router made its bookings, which booking replaced which, and when clients ended requests of
which the log has no end. What must not: bookings themselves (core.loads), records (loads_sync), and clocks.

Times of day are those of all routers, in ms since the epoch. Monotonic times are this process's, and only decide what
is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from streams.core.loads.bookings import BookingId

#: Moves that are remembered, each for `booking_ttl_s`. Beyond this limit the oldest one is dropped.
MOVES_MAX = 10_000

#: Ended requests that are remembered, each for `booking_ttl_s`. Beyond this limit the oldest one is dropped.
ENDS_MAX = 100_000

#: Bookings of which it is remembered when they were made, until a record ends them. Beyond this limit the oldest one is
#: dropped: it probably expired long ago.
MADE_MAX = 100_000


class _Move(NamedTuple):
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
        """ttl_ms: how long moves and ends are remembered."""
        self._ttl_ms = ttl_ms
        self._made: OrderedDict[BookingId, int] = OrderedDict()
        self._moves: OrderedDict[BookingId, _Move] = OrderedDict()  # by former booking, in the order of these events
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
    def has_moves(self) -> bool:
        """Whether any move is remembered."""
        return bool(self._moves)

    def note_move(self, former: BookingId, latter: BookingId, at_ms: int, now_ms: int) -> None:
        """Remember a move, so that what a client then reports of the former booking applies to the latter one."""
        self._moves[former] = _Move(latter, at_ms, now_ms)
        self._moves.move_to_end(former)
        if len(self._moves) > MOVES_MAX:
            self._moves.popitem(last=False)

    def was_moved(self, booking_id: BookingId) -> bool:
        """Whether a booking was replaced by another one."""
        return booking_id in self._moves

    def moved_to(self, booking_id: BookingId, reported_ms: int, *, once: bool) -> BookingId | None:
        """Which booking has replaced this one, if that was not after the time of a report. once: forget it then."""
        move = self._moves.get(booking_id)
        if move is None or move.at_ms > reported_ms:
            return None
        if once:
            del self._moves[booking_id]
        return move.latter

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
        """Forget the moves and ends whose time is over."""
        while self._moves:
            former = next(iter(self._moves))
            if self._moves[former].since_ms + self._ttl_ms > now_ms:
                break
            del self._moves[former]
        while self._ends:
            request_id = next(iter(self._ends))
            if self._ends[request_id].since_ms + self._ttl_ms > now_ms:
                break
            del self._ends[request_id]

"""Bookings that a router of some models (`models`) does not keep, since their ranks serve others.

What lives here: which records are about such a booking. Only its add says the model, so that its id is kept, as a
number, until it ends or expires. What must not: the fold of all other records (loads_sync).

State: the ids that are skipped, under the lock of the loads.
"""

from __future__ import annotations

from collections.abc import Iterable

from streams.core.loads.bookings import BookingId, BookingPhase
from streams.router_api.sharing.own_bookings import Content

#: Bytes that an id takes, as a number in a set: 65 to 85, measured with 1,000 to a million of them.
ID_BYTES = 85


class _Clock:
    """The ids of one clock: those of this period, and of the one before. A period is as long as a booking lasts."""

    __slots__ = ("before", "now", "since_ms")

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self.now: set[int] = set()
        self.before: set[int] = set()


class SkippedBookings:
    """Bookings of models that a router does not serve. models: empty for all models; then nothing is skipped."""

    def __init__(self, models: Iterable[str], ttl_ms: int) -> None:
        self._models = frozenset(models)
        self._ttl_ms = ttl_ms
        self._clocks: dict[int, _Clock] = {}

    def skips(self, content: Content, at_ms: int, clock: int) -> bool:
        """Whether a record is about a booking of another model. at_ms, clock: its append time, and its partition."""
        if not self._models:
            return False
        of = self._clocks.get(clock)
        if content.booking is not None:
            if content.booking.model in self._models:
                return False
            if of is None:
                of = self._clocks[clock] = _Clock(at_ms)
            elif at_ms - of.since_ms >= self._ttl_ms:
                of.before, of.now, of.since_ms = of.now, set(), at_ms
            of.now.add(_number_of(content.booking_id))
            return True
        number = _number_of(content.booking_id)
        if of is None or not (number in of.now or number in of.before):
            return False
        if content.phase is BookingPhase.FREE:
            of.now.discard(number)
            of.before.discard(number)
        return True

    @property
    def n_bytes(self) -> int:
        """About how much memory the ids take."""
        return ID_BYTES * sum(len(of.now) + len(of.before) for of in self._clocks.values())


def _number_of(booking_id: BookingId) -> int:
    return hash(booking_id)

"""Bookings whose ends no gateway reports: when each is assumed to be over (pure).

What lives here: the forecast of such a booking, and the two signs of its end. What must not: clocks, and ending
bookings (lifetimes).

A gateway whose stream ends with the pick says nothing of the request after that. Its booking then ends when its
forecast says so, on every router alike, or earlier, when the engine reports fewer requests than are assumed to run on
the rank. Of these the oldest are over. Reports that came soon after a pick do not count for it, since its request may
have been on its way.

State: these bookings of one picker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from streams.core.ids import RankId
from streams.core.loads.bookings import NUMBER_MAX, Booking
from streams.core.loads.observations import Forecast
from streams.core.routing.policies.timings import DECODE_DEFAULT, OUTPUT_TOKENS_DEFAULT

#: Bookings that are kept. Beyond it the oldest one of the rank counts as over.
BOOKINGS_MAX = 262_144

#: A report that was received within this time after a pick says nothing about its request: engines are read each
#: second, and a request may wait in the gateway before it reaches its engine.
ON_ITS_WAY_MS = 3_000.0


class Assumed(NamedTuple):
    """A booking: its request id, and the phase by which it is identified."""

    request_id: str
    phase: str | None


class RankReport(NamedTuple):
    """What an engine says of a rank. n_requests: that run or wait. received_ms: when the report came."""

    n_requests: int
    received_ms: float


class _Times(NamedTuple):
    """When a booking's request was picked, and when it is over by its forecast."""

    picked_ms: float
    over_ms: float


def unseen(booking: Booking, us_per_token: float) -> Forecast:
    """What to expect of a booking whose end no gateway reports, where the policy expects nothing.

    us_per_token: of the prompt.
    """
    prefill_us = min(max(1, round(booking.prefill_tokens * us_per_token)), NUMBER_MAX)
    prefilled_ms = max(1, round(prefill_us / 1000.0))
    n_tokens = booking.expected_output_tokens or OUTPUT_TOKENS_DEFAULT
    return Forecast(prefill_us, prefilled_ms, prefilled_ms + max(1, round(n_tokens * DECODE_DEFAULT.base)))


class AssumedEnds:
    """Used on one loop. All times are on one clock."""

    def __init__(self) -> None:
        self._by_rank: dict[RankId, dict[Assumed, _Times]] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, booking: Assumed, rank: RankId, picked_ms: float, over_ms: float) -> list[Assumed]:
        """Assume the end of a booking from now on. Returns the one that is over because there are too many."""
        entries, over = self._by_rank.get(rank, {}), []
        if self._n >= BOOKINGS_MAX and entries:
            over.append(next(iter(entries)))
            self._forget(rank, over[0])
        if booking in entries:
            self._forget(rank, booking)
        # The one before may have been the rank's last.
        self._by_rank.setdefault(rank, {})[booking] = _Times(picked_ms, over_ms)
        self._n += 1
        return over

    def over(self, now_ms: float, reports: Mapping[RankId, RankReport]) -> list[Assumed]:
        """Return the bookings that are over by their forecasts, or by what engines report."""
        found: list[Assumed] = []
        for rank, entries in list(self._by_rank.items()):
            over = [booking for booking, times in entries.items() if times.over_ms <= now_ms]
            report = reports.get(rank)
            if report is not None:
                old = [
                    booking
                    for booking, times in entries.items()
                    if times.over_ms > now_ms and times.picked_ms + ON_ITS_WAY_MS <= report.received_ms
                ]
                over += old[: max(0, len(old) - report.n_requests)]
            for booking in over:
                self._forget(rank, booking)
            found += over
        return found

    def _forget(self, rank: RankId, booking: Assumed) -> None:
        entries = self._by_rank[rank]
        del entries[booking]
        self._n -= 1
        if not entries:
            del self._by_rank[rank]

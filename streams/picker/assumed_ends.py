"""Bookings whose ends no gateway reports: when each is assumed to be over (pure).

What lives here: the two signs of an end. What must not: clocks, and ending bookings (lifetimes).

A gateway whose stream ends with the pick says nothing of the request after that. Its booking then ends when the
forecast of its rank says so, or earlier, when the engine reports fewer requests than are assumed to run on the rank. Of
these the oldest are over. Reports that came soon after a pick do not count for it, since its request may have been on
its way.

State: these bookings of one picker.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from streams.core.ids import RankId

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


@dataclass(slots=True)
class _Entry:
    """One booking. prefilled_ms: when its prompt counts as computed; None if that is known, or somebody else's task."""

    booking: Assumed
    rank: RankId
    picked_ms: float
    prefilled_ms: float | None
    over_ms: float


class AssumedEnds:
    """Used on one loop. All times are on one clock."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, _Entry]] = []
        self._by_rank: dict[RankId, dict[Assumed, _Entry]] = {}
        self._n = 0
        self._number = 0

    def __len__(self) -> int:
        return self._n

    def add(
        self, booking: Assumed, rank: RankId, picked_ms: float, prefilled_ms: float | None, over_ms: float
    ) -> list[Assumed]:
        """Assume the end of a booking from now on. Returns the one that is over because there are too many."""
        entries, over = self._by_rank.get(rank, {}), []
        if self._n >= BOOKINGS_MAX and entries:
            over.append(next(iter(entries)))
            self._forget(entries[over[0]])
        known = entries.get(booking)
        if known is not None:
            self._forget(known)
        entry = _Entry(booking, rank, picked_ms, prefilled_ms, over_ms)
        self._by_rank.setdefault(rank, {})[booking] = entry  # the one before may have been the rank's last
        self._n += 1
        self._schedule(entry)
        return over

    def due(self, now_ms: float) -> tuple[list[Assumed], list[Assumed]]:
        """Return the bookings whose prompts count as computed now, and those that are over."""
        prefilled: list[Assumed] = []
        over: list[Assumed] = []
        while self._due and self._due[0][0] <= now_ms:
            entry = heapq.heappop(self._due)[2]
            if self._by_rank.get(entry.rank, {}).get(entry.booking) is not entry:
                continue
            if entry.over_ms <= now_ms:
                self._forget(entry)
                over.append(entry.booking)
            elif entry.prefilled_ms is not None and entry.prefilled_ms <= now_ms:
                entry.prefilled_ms = None
                prefilled.append(entry.booking)
                self._schedule(entry)
        return prefilled, over

    def reported(self, reports: Mapping[RankId, RankReport]) -> list[Assumed]:
        """Return the bookings that are over by what engines report."""
        over: list[Assumed] = []
        for rank in [rank for rank in self._by_rank if rank in reports]:
            n_requests, received_ms = reports[rank]
            old = [entry for entry in self._by_rank[rank].values() if entry.picked_ms + ON_ITS_WAY_MS <= received_ms]
            for entry in old[: max(0, len(old) - n_requests)]:
                self._forget(entry)
                over.append(entry.booking)
        return over

    def _schedule(self, entry: _Entry) -> None:
        self._number += 1
        at_ms = entry.over_ms if entry.prefilled_ms is None else min(entry.prefilled_ms, entry.over_ms)
        heapq.heappush(self._due, (at_ms, self._number, entry))

    def _forget(self, entry: _Entry) -> None:
        entries = self._by_rank[entry.rank]
        del entries[entry.booking]
        self._n -= 1
        if not entries:
            del self._by_rank[entry.rank]

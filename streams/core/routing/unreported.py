"""Bookings that the engines' last reports cannot contain yet.

What lives here: for each rank, the requests and blocks of bookings that were made since its engine was last scraped.
What must not: what a booking costs a rank (core.loads), and the policies that read engines' reports (policies).

Between two scrapes a policy that reads nothing but reports would send every request of a burst to the same rank.

State: the bookings that reports lack, for the older policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from streams.core.ids import RankId
from streams.core.loads.bookings import BookingId

#: A report is assumed to lack bookings that were made up to this long before it was received: the client still has to
#: send the request to the engine, and the engine's page and the record take a few milliseconds each. A booking that the
#: report contains nevertheless counts twice until the next report.
REPORT_DELAY_MS = 250

#: Bookings kept. Beyond this limit the oldest one is dropped; a fleet with 100 requests per second and rank, 1,000
#: ranks and an interval of 1 s stays at it.
UNREPORTED_MAX = 100_000


class UnreportedLoad(NamedTuple):
    """What bookings add to a rank's report. blocks: those that no other booking of the rank uses."""

    requests: int
    blocks: int


class UnreportedBookings:
    """Bookings by rank. Not thread-safe: its owner calls it under the lock of the loads."""

    def __init__(self) -> None:
        self._ranks: dict[BookingId, RankId] = {}  # in the order in which they were made
        self._bookings: dict[RankId, dict[BookingId, tuple[int, int]]] = {}  # when each was made, and its blocks
        self._blocks: dict[RankId, int] = {}  # sum of the blocks

    def __len__(self) -> int:
        """Number of bookings kept."""
        return len(self._ranks)

    def add(self, booking_id: BookingId, rank: RankId, n_blocks: int, now_ms: int) -> None:
        """A booking was made that puts n_blocks more blocks in use. A booking that is known already is not changed."""
        if booking_id in self._ranks:
            return
        if len(self._ranks) >= UNREPORTED_MAX:
            self.end(next(iter(self._ranks)))
        self._ranks[booking_id] = rank
        self._bookings.setdefault(rank, {})[booking_id] = (now_ms, n_blocks)
        self._blocks[rank] = self._blocks.get(rank, 0) + n_blocks

    def end(self, booking_id: BookingId) -> None:
        """A booking has ended, or its engine has reported since; an unknown one changes nothing."""
        rank = self._ranks.pop(booking_id, None)
        if rank is None:
            return
        bookings = self._bookings[rank]
        self._blocks[rank] -= bookings.pop(booking_id)[1]
        if not bookings:
            del self._bookings[rank], self._blocks[rank]

    def since(self, reported: Mapping[RankId, int]) -> dict[RankId, UnreportedLoad]:
        """Return what was booked on these ranks since their last reports, and drop the bookings before.

        reported: when each rank's report was received, by the clock of `add`. Ranks without such bookings are absent.
        """
        loads = {}
        for rank in [rank for rank in self._bookings if rank in reported]:
            bookings, since_ms = self._bookings[rank], reported[rank] - REPORT_DELAY_MS
            while bookings:  # the oldest comes first
                booking_id = next(iter(bookings))
                if bookings[booking_id][0] >= since_ms:
                    loads[rank] = UnreportedLoad(len(bookings), self._blocks[rank])
                    break
                self.end(booking_id)
        return loads

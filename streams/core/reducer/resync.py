"""Resync requests: which rank is asked for a restatement, and when again (docs/architecture.md).

What lives here: attempts and back-off of each rank. What must not: reading a clock, Kafka.

One request is outstanding for a rank, and a rank that loses something all the time, as one does whose ledger itself has
a gap, is asked once in the longest wait and not once a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streams.core.ids import RankId

#: Wait before a rank is asked again, doubled up to the second.
RESYNC_BACKOFF_MS = (1_000, 60_000)

#: Requests for one gap: two minutes of them. A bridge that answered none of these does not answer.
ATTEMPTS_MAX = 8

#: Ranks asked in one transaction: a source that lost records degrades all ranks of a partition at once, and each answer
#: is a rewrite of a rank's whole table.
RESYNCS_PER_TICK_MAX = 8


@dataclass(slots=True)
class _Rank:
    """earliest_ms: no request before. wait_ms: how long the next one is waited for."""

    reason: str
    attempt: int = 0
    earliest_ms: int = 0
    wait_ms: int = RESYNC_BACKOFF_MS[0]


@dataclass(frozen=True, slots=True)
class DueResync:
    """A request that is due. last: none follows for this gap."""

    rank: RankId
    attempt: int
    reason: str
    last: bool


class ResyncSchedule:
    """Attempts of each rank of one partition. Times are of one monotonic clock, in ms."""

    def __init__(self) -> None:
        self._ranks: dict[RankId, _Rank] = {}
        self._owed: dict[RankId, None] = {}

    @property
    def n_owed(self) -> int:
        """Ranks that are to be asked, now or later."""
        return len(self._owed)

    def lost(self, rank: RankId, reason: str) -> None:
        """Something of a rank is missing. Of a rank that is being asked already nothing changes."""
        known = self._ranks.setdefault(rank, _Rank(reason))
        if rank not in self._owed:
            known.attempt, known.reason = 0, reason
            self._owed[rank] = None

    def settled(self, rank: RankId) -> None:
        """It was restated, cleared, begun anew or removed: nothing is asked until it loses something again."""
        self._owed.pop(rank, None)

    def answering(self, rank: RankId, now_ms: int) -> None:
        """Chunks of its restatement arrive: the rest is waited for."""
        known = self._ranks.get(rank)
        if known is not None:
            known.earliest_ms = max(known.earliest_ms, now_ms + known.wait_ms)

    def due(self, now_ms: int, may_ask: Callable[[RankId], bool]) -> list[DueResync]:
        """Take the requests that are due, at most RESYNCS_PER_TICK_MAX. may_ask: whether anybody listens for a rank."""
        asks: list[DueResync] = []
        for rank in list(self._owed):
            known = self._ranks[rank]
            if now_ms < known.earliest_ms or not may_ask(rank):
                continue
            if now_ms - known.earliest_ms > RESYNC_BACKOFF_MS[1]:
                known.wait_ms = RESYNC_BACKOFF_MS[0]  # quiet for long: a trouble of its own
            known.attempt += 1
            known.earliest_ms = now_ms + known.wait_ms
            known.wait_ms = min(known.wait_ms * 2, RESYNC_BACKOFF_MS[1])
            last = known.attempt >= ATTEMPTS_MAX
            if last:
                del self._owed[rank]
            asks.append(DueResync(rank, known.attempt, known.reason, last))
            if len(asks) >= RESYNCS_PER_TICK_MAX:
                break
        return asks

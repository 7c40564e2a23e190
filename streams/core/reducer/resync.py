"""Resync requests: for which ranks a restatement is requested, and when a request is repeated (docs/architecture.md).

What lives here: attempts and back-off of each rank. What must not: reading a clock, Kafka.

A rank has at most one outstanding request. A rank that keeps losing blocks, for example because its ledger itself has a
gap, gets one request per longest wait, not one per batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streams.core.ids import RankId

#: The wait before the next request of a rank, doubled up to the second number.
RESYNC_BACKOFF_MS = (1_000, 60_000)

#: Requests for one gap, which take two minutes. A bridge that has answered none of them is not going to.
ATTEMPTS_MAX = 8

#: Requests in one transaction: a source that lost records degrades all ranks of a partition at once, and each answer
#: rewrites all rows of a rank.
RESYNCS_PER_TICK_MAX = 8


@dataclass(slots=True)
class _Rank:
    """earliest_ms: no request before this time. wait_ms: the wait after the next request."""

    reason: str
    attempt: int = 0
    earliest_ms: int = 0
    wait_ms: int = RESYNC_BACKOFF_MS[0]


@dataclass(frozen=True, slots=True)
class DueResync:
    """A request that is due. last: no further request follows for this gap."""

    rank: RankId
    attempt: int
    reason: str
    last: bool


class ResyncSchedule:
    """Attempts of each rank of one partition. Times are of one monotonic clock, in ms."""

    def __init__(self) -> None:
        self._ranks: dict[RankId, _Rank] = {}
        self._pending: dict[RankId, None] = {}

    @property
    def n_pending(self) -> int:
        """Number of ranks that need a request, now or later."""
        return len(self._pending)

    def lost(self, rank: RankId, reason: str) -> None:
        """Take note that blocks of a rank are missing. Nothing changes for a rank with pending requests."""
        state = self._ranks.setdefault(rank, _Rank(reason))
        if rank not in self._pending:
            state.attempt, state.reason = 0, reason
            self._pending[rank] = None

    def settled(self, rank: RankId) -> None:
        """End the requests of a rank that was restated, cleared, restarted or removed, until it loses blocks again."""
        self._pending.pop(rank, None)

    def answering(self, rank: RankId, now_ms: int) -> None:
        """Wait for the remaining chunks of a rank's restatement, since some have arrived."""
        state = self._ranks.get(rank)
        if state is not None:
            state.earliest_ms = max(state.earliest_ms, now_ms + state.wait_ms)

    def due(self, now_ms: int, may_request: Callable[[RankId], bool]) -> list[DueResync]:
        """Take the requests that are due, at most RESYNCS_PER_TICK_MAX.

        may_request: returns whether a bridge is there to read a request for a rank.
        """
        due: list[DueResync] = []
        for rank in list(self._pending):
            state = self._ranks[rank]
            if now_ms < state.earliest_ms or not may_request(rank):
                continue
            if now_ms - state.earliest_ms > RESYNC_BACKOFF_MS[1]:
                state.wait_ms = RESYNC_BACKOFF_MS[0]  # long after the previous fault: this one is unrelated
            state.attempt += 1
            state.earliest_ms = now_ms + state.wait_ms
            state.wait_ms = min(state.wait_ms * 2, RESYNC_BACKOFF_MS[1])
            last = state.attempt >= ATTEMPTS_MAX
            if last:
                del self._pending[rank]
            due.append(DueResync(rank, state.attempt, state.reason, last))
            if len(due) >= RESYNCS_PER_TICK_MAX:
                break
        return due

"""Transitions of one partition that wait: their batch of `kv-events` is unread, or an earlier one of their rank waits.

What lives here: the waiting transitions, in order of arrival for each rank, and their limits. What must not: whether a
batch has been read, what a transition does (pooled_block_table). Owner: the table of pooled blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from streams.core.ids import RankId
from streams.cxl.events import CxlTransition
from streams.cxl.records import ParkedKey, ParkedRow

#: Parked transitions per partition, and bytes of their records, which are both in memory and in the table.
PARKED_MAX = 10_000
PARKED_BYTES_MAX = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Parked:
    """A transition that waits. number: its position in its rank's order of arrival."""

    number: int
    change: CxlTransition
    row: ParkedRow


class ParkedTransitions:
    """Waiting transitions by rank; the first one of a rank waits for its batch. n_bytes: of all their records."""

    def __init__(self, ttl_ms: int, n_max: int = PARKED_MAX) -> None:
        """ttl_ms: how long a batch may still arrive after the transition that follows it."""
        self._ttl_ms = ttl_ms
        self._n_max = n_max
        self._waiting: dict[RankId, deque[Parked]] = {}
        self._n = 0
        self.n_bytes = 0
        self._changed: dict[ParkedKey, ParkedRow | None] = {}

    def load(self, parked: Iterable[tuple[ParkedKey, ParkedRow, CxlTransition]]) -> None:
        """Start from the rows of the table."""
        for key, row, change in sorted(parked, key=lambda entry: (entry[0].owner, entry[0].number)):
            self._append(Parked(key.number, change, row))

    def __len__(self) -> int:
        return self._n

    def __contains__(self, rank: RankId) -> bool:
        return rank in self._waiting

    def fits(self, raw: bytes) -> bool:
        """Whether a record of this size can be parked."""
        return self._n < self._n_max and self.n_bytes + len(raw) <= PARKED_BYTES_MAX

    def park(self, change: CxlTransition, row: ParkedRow) -> None:
        """Let a transition wait after all others of its rank."""
        waiting = self._waiting.get(change.rank)
        number = waiting[-1].number + 1 if waiting else 0
        self._append(Parked(number, change, row))
        self._changed[ParkedKey(change.rank, number)] = row

    def first(self, rank: RankId) -> CxlTransition | None:
        """Return a rank's transition that waits for its batch."""
        return self._waiting[rank][0].change if rank in self._waiting else None

    def take_first(self, rank: RankId) -> Parked:
        """Remove a rank's first transition."""
        waiting = self._waiting[rank]
        parked = waiting.popleft()
        if not waiting:
            del self._waiting[rank]
        self._n -= 1
        self.n_bytes -= len(parked.row.raw)
        self._changed[ParkedKey(rank, parked.number)] = None
        return parked

    def overdue(self, now_ms: int) -> list[RankId]:
        """Return the ranks whose first transition has waited for too long. now_ms: wall clock."""
        return [rank for rank in self._waiting if self.is_overdue(rank, now_ms)]

    def is_overdue(self, rank: RankId, now_ms: int) -> bool:
        """Whether a rank has a first transition, and it has waited for too long."""
        return rank in self._waiting and now_ms - self._waiting[rank][0].row.timestamp_ms >= self._ttl_ms

    def take_changes(self) -> list[tuple[ParkedKey, ParkedRow | None]]:
        """Return the rows that changed since the last call; None for one that was removed."""
        changes = list(self._changed.items())
        self._changed.clear()
        return changes

    def _append(self, parked: Parked) -> None:
        self._waiting.setdefault(parked.change.rank, deque()).append(parked)
        self._n += 1
        self.n_bytes += len(parked.row.raw)

"""The owners' rows of one partition: what is kept about each rank in addition to its pooled blocks.

What lives here: the rows, and when each may be removed. What must not: what a row means for blocks (block_rows,
cxl.visibility), when an incarnation ends (pooled_block_table). Owner: the table of pooled blocks. Times are append
times and the wall clock, in ms.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from streams.core.ids import RankId
from streams.cxl.records import OwnerRow

#: Owners' rows per partition. Beyond this limit the oldest expire early, of those without blocks in transit.
OWNERS_MAX = 100_000

#: A heap of expiries is cleaned once it has more than twice as many entries as there are rows, plus this many.
DUE_SLACK = 1024

_NO_ROW = OwnerRow()


class OwnerRows:
    """Rows by rank.

    - _due: when each row may expire. _due_heap: a heap of the same times.
    - _undated: owners whose row was loaded without a time.
    """

    def __init__(self, ttl_ms: int, rows_max: int = OWNERS_MAX) -> None:
        """ttl_ms: how long a row is needed after its last change."""
        self._ttl_ms = ttl_ms
        self._rows_max = rows_max
        self._rows: dict[RankId, OwnerRow] = {}
        self._due: dict[RankId, int] = {}
        self._due_heap: list[tuple[int, RankId]] = []
        self._undated: list[RankId] = []
        self._changed: dict[RankId, None] = {}

    def load(self, rows: Iterable[tuple[RankId, OwnerRow]]) -> None:
        """Start from the rows of the table."""
        self._rows = dict(rows)
        for rank, row in self._rows.items():
            if row.ended_at_ms:
                self._expect_expiry(rank, row.ended_at_ms)
            else:
                self._undated.append(rank)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, rank: RankId) -> OwnerRow:
        """Return an owner's row; the empty one for an owner without a row."""
        return self._rows.get(rank, _NO_ROW)

    def put(self, rank: RankId, row: OwnerRow, timestamp_ms: int) -> None:
        """Replace an owner's row. timestamp_ms: append time of the record that changed it."""
        self._rows[rank] = row
        self._changed[rank] = None
        self._expect_expiry(rank, timestamp_ms)

    def expire(self, now_ms: int, is_needed: Callable[[RankId], bool], n_max: int) -> int:
        """Remove expired rows and those beyond the limit, of n_max at most; returns how many were removed.

        is_needed: whether a block in transit or a parked transition depends on an owner's row. These end first.
        """
        for rank in self._undated:
            if rank in self._rows and rank not in self._due:
                self._expect_expiry(rank, now_ms)
        self._undated.clear()
        n_removed = 0
        for _ in range(n_max):
            heap = self._due_heap
            if not heap or (heap[0][0] > now_ms and len(self._rows) <= self._rows_max):
                break
            due_ms, rank = heapq.heappop(heap)
            if self._due.get(rank) != due_ms:
                continue  # the row has changed since
            if is_needed(rank):
                self._expect_expiry(rank, max(now_ms, due_ms))
                continue
            del self._rows[rank], self._due[rank]
            self._changed[rank] = None
            n_removed += 1
        return n_removed

    def take_changes(self) -> list[tuple[RankId, OwnerRow | None]]:
        """Return the rows that changed since the last call; None for one that was removed."""
        changes = [(rank, self._rows.get(rank)) for rank in self._changed]
        self._changed.clear()
        return changes

    def _expect_expiry(self, rank: RankId, since_ms: int) -> None:
        due_ms = max(since_ms + self._ttl_ms, self._due.get(rank, 0))
        if self._due.get(rank) != due_ms:
            self._due[rank] = due_ms
            heapq.heappush(self._due_heap, (due_ms, rank))
        if len(self._due_heap) > 2 * len(self._rows) + DUE_SLACK:
            self._due_heap = [(at_ms, owner) for owner, at_ms in self._due.items()]
            heapq.heapify(self._due_heap)

"""The blocks' rows of one partition's table of pooled blocks.

What lives here: the rows, which of them count as evicted, and when they expire. What must not: when a transition is
applied, and which row it leads to (pooled_block_table). Owner: the table of pooled blocks. Times are append times and
the wall clock, in ms.

State: a partition's pooled blocks.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import RankId, SequenceHash
from streams.cxl.records import BlockKey, BlockRow, OwnerRow, Placement
from streams.cxl.visibility import has_ended, metadata_of
from streams.tables.owner_rows import DUE_SLACK, OwnerRows

#: Changed rows after which a transaction is committed before more is applied: about 2 MB.
CHANGED_ROWS_FULL = 10_000

#: Evicted rows per partition, including rows in transit whose incarnation has ended. Beyond this limit the oldest
#: expire early; no answer of a router depends on them.
EVICTED_MAX = 100_000

#: Rows per partition in any state; eight partitions together have as many as a router takes (POOLED_ROWS_MAX). A block
#: beyond this limit is refused by the agent, once, rather than by every router separately.
ROWS_MAX = 1_000_000


class BlockRows:
    """Rows by owner and sequence hash; for each owner a block has one placement.

    - _transit: blocks in transit, by owner.
    - _due: heap of the times at which rows may expire.
    - _outdated: rows of older epochs that are to be removed.
    """

    def __init__(
        self,
        owners: OwnerRows,
        evicted_ttl_ms: int,
        *,
        evicted_max: int = EVICTED_MAX,
        rows_max: int = ROWS_MAX,
    ) -> None:
        """owners: decide whether a block in transit counts as evicted; `put_owner` puts a row that changes this."""
        self._owners = owners
        self._evicted_ttl_ms = evicted_ttl_ms
        self._evicted_max = evicted_max
        self._rows_max = rows_max
        self._rows: dict[RankId, dict[SequenceHash, BlockRow]] = {}
        self._transit: dict[RankId, set[SequenceHash]] = {}
        self._n_rows = 0
        self._n_evicted = 0
        self._due: list[tuple[int, RankId, SequenceHash]] = []
        self._epochs = _PoolEpochs()
        self._outdated: deque[tuple[RankId, SequenceHash]] = deque()
        self._changed: dict[BlockKey, None] = {}

    def __len__(self) -> int:
        return self._n_rows

    @property
    def is_full(self) -> bool:
        """Whether there are as many rows as there may be."""
        return self._n_rows >= self._rows_max

    @property
    def must_commit(self) -> bool:
        """Whether enough rows have changed that they must be written before more is applied."""
        return len(self._changed) >= CHANGED_ROWS_FULL

    def items(self) -> Iterator[tuple[BlockKey, BlockRow]]:
        """Iterate over all rows as the table has them."""
        for rank, rows in self._rows.items():
            for sequence, row in rows.items():
                yield BlockKey(sequence, rank, row.placement.pool_id), row

    def get(self, rank: RankId, sequence: SequenceHash) -> BlockRow | None:
        """Return the row of a block."""
        rows = self._rows.get(rank)
        return rows.get(sequence) if rows is not None else None

    def has_transit(self, rank: RankId) -> bool:
        """Whether blocks of this owner are in transit."""
        return rank in self._transit

    def put(self, rank: RankId, sequence: SequenceHash, row: BlockRow) -> None:
        """Set the row of a block."""
        self.remove(rank, sequence)
        self.insert(rank, sequence, row)
        self._changed[BlockKey(sequence, rank, row.placement.pool_id)] = None

    def insert(self, rank: RankId, sequence: SequenceHash, row: BlockRow) -> None:
        """Add a row that the table already has, of a block without a row."""
        self._rows.setdefault(rank, {})[sequence] = row
        self._n_rows += 1
        self._n_evicted += self._is_evicted(rank, row)
        self._epochs.add(row.placement)
        if row.placement.state is CxlMemoryState.IN_TRANSIT:
            self._transit.setdefault(rank, set()).add(sequence)
        due_ms = self._due_ms(rank, row)
        if due_ms is not None:
            heapq.heappush(self._due, (due_ms, rank, sequence))

    def remove(self, rank: RankId, sequence: SequenceHash) -> None:
        """Remove the row of a block if it has one."""
        row = self.get(rank, sequence)
        if row is None:
            return
        rows = self._rows[rank]
        del rows[sequence]
        if not rows:
            del self._rows[rank]
        self._n_rows -= 1
        self._n_evicted -= self._is_evicted(rank, row)
        self._epochs.remove(row.placement)
        if row.placement.state is CxlMemoryState.IN_TRANSIT:
            transit = self._transit[rank]
            transit.discard(sequence)
            if not transit:
                del self._transit[rank]
        self._changed[BlockKey(sequence, rank, row.placement.pool_id)] = None

    def put_owner(self, rank: RankId, owner: OwnerRow, timestamp_ms: int) -> None:
        """Replace an owner's row; blocks in transit of an incarnation that has ended expire as evicted ones do."""
        rows = self._rows.get(rank, {})
        transit = [rows[sequence] for sequence in self._transit.get(rank, ())]
        n_evicted = sum(self._is_evicted(rank, row) for row in transit)
        self._owners.put(rank, owner, timestamp_ms)
        self._n_evicted += sum(self._is_evicted(rank, row) for row in transit) - n_evicted
        for sequence in self._transit.get(rank, ()):
            due_ms = self._due_ms(rank, rows[sequence])
            if due_ms is not None:
                heapq.heappush(self._due, (due_ms, rank, sequence))

    def expire(self, now_ms: int, n_max: int) -> int:
        """Remove evicted rows by age, and early beyond the limit; returns how many, n_max at most."""
        n_removed = 0
        while self._due and n_removed < n_max and (self._due[0][0] <= now_ms or self._n_evicted > self._evicted_max):
            due_ms, rank, sequence = heapq.heappop(self._due)
            if self._is_due(due_ms, rank, sequence):  # otherwise its state has changed since
                self.remove(rank, sequence)
                n_removed += 1
        if len(self._due) > 2 * self._n_rows + DUE_SLACK:
            self._due = [entry for entry in self._due if self._is_due(*entry)]
            heapq.heapify(self._due)
        return n_removed

    def expire_outdated(self, now_ms: int, n_max: int) -> int:
        """Remove rows of a pool's older epochs, which readers ignore for good; returns how many, n_max at most.

        They are kept for evicted_ttl_ms after a newer epoch is first reported. Other owners may report the newer epoch
        later, and their next transitions must still find the rows of their earlier ones.
        """
        if not self._outdated:
            superseded = self._epochs.superseded(now_ms - self._evicted_ttl_ms)
            if superseded:
                self._outdated.extend(
                    (key.owner, key.sequence)
                    for key, row in self.items()
                    if key.pool_id in superseded and self._epochs.is_older(row.placement)
                )
        n_removed = 0
        for _ in range(min(len(self._outdated), n_max)):
            rank, sequence = self._outdated.popleft()
            row = self.get(rank, sequence)
            if row is not None and self._epochs.is_older(row.placement):
                self.remove(rank, sequence)
                n_removed += 1
        return n_removed

    def take_changes(self) -> list[tuple[BlockKey, BlockRow | None]]:
        """Return the rows that changed since the last call; None for one that was removed."""
        changes: list[tuple[BlockKey, BlockRow | None]] = []
        for key in self._changed:
            row = self.get(key.owner, key.sequence)
            changes.append((key, row if row is not None and row.placement.pool_id == key.pool_id else None))
        self._changed.clear()
        return changes

    def _is_due(self, due_ms: int, rank: RankId, sequence: SequenceHash) -> bool:
        row = self.get(rank, sequence)
        return row is not None and self._due_ms(rank, row) == due_ms

    def _due_ms(self, rank: RankId, row: BlockRow) -> int | None:
        """Return when a row expires; None for a row that does not."""
        owner, placement = self._owners.row(rank), row.placement
        if metadata_of(placement, owner).state is not CxlMemoryState.EVICTED:
            return None
        since_ms = placement.entered_at_ms
        if placement.state is not CxlMemoryState.EVICTED:
            # From the end of the row's own incarnation. From that of a later one, each restart would renew the row.
            ends = (
                ended.ended_at_ms for ended in owner.ended_incarnations if ended.incarnation == placement.incarnation
            )
            since_ms = next(ends, owner.ended_at_ms)
        return since_ms + self._evicted_ttl_ms

    def _is_evicted(self, rank: RankId, row: BlockRow) -> bool:
        state = row.placement.state
        return state is CxlMemoryState.EVICTED or (
            state is CxlMemoryState.IN_TRANSIT and has_ended(self._owners.row(rank), row.placement.incarnation)
        )


class _PoolEpochs:
    """The epochs that rows have, by pool.

    - _newest: the newest epoch of any row, and when a row first had it.
    - _n_rows: the number of rows by epoch.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}
        self._n_rows: dict[str, Counter[int]] = {}

    def add(self, placement: Placement) -> None:
        pool_id, epoch, entered_ms = placement.pool_id, placement.pool_epoch, placement.entered_at_ms
        self._n_rows.setdefault(pool_id, Counter())[epoch] += 1
        newest, since_ms = self._newest.get(pool_id, (-1, 0))
        if epoch > newest or (epoch == newest and entered_ms < since_ms):
            self._newest[pool_id] = (epoch, entered_ms)

    def remove(self, placement: Placement) -> None:
        n_rows = self._n_rows[placement.pool_id]
        n_rows[placement.pool_epoch] -= 1
        if not n_rows[placement.pool_epoch]:
            del n_rows[placement.pool_epoch]
        if not n_rows:
            del self._n_rows[placement.pool_id], self._newest[placement.pool_id]

    def is_older(self, placement: Placement) -> bool:
        return placement.pool_epoch < self._newest[placement.pool_id][0]

    def superseded(self, since_ms_max: int) -> set[str]:
        """Return the pools with rows of older epochs whose newest epoch a row had at this time."""
        return {
            pool_id
            for pool_id, (epoch, since_ms) in self._newest.items()
            if min(self._n_rows[pool_id]) < epoch and since_ms <= since_ms_max
        }

"""The table of pooled blocks of one partition: transitions in, changed rows out.

What lives here: when a transition is applied, and what it does to rows. What must not: Kafka, bytes of the log (records
arrive decoded), which state may follow which (cxl.states).

The rows are a function of two logs, `kv-events` and `cxl-events`, and of nothing else. They do not depend on how the
reading of the two logs was interleaved, because each log decides different things.

- `cxl-events` alone decides the order of transitions, and so what becomes of a block. A rank's transitions are applied
  in the order of the log. A block's row contains the incarnation in which its state was entered; a transition of a
  later incarnation treats a block in transit as evicted. A transition is refused if an earlier one of its rank has a
  newer incarnation.
- `kv-events` alone decides which transitions are applied: those whose incarnation reaches the batch that they follow.
  While that is unknown, the transition is parked, and so are all later ones of its rank. It is dropped if a newer
  incarnation has begun and the older one ended before that batch. The owner's row keeps the last batch of each ended
  incarnation, for transitions that are read later.
- `kv-events` alone decides which incarnations have ended. Rows are not rewritten for that: a reader treats a block in
  transit as evicted if its incarnation has ended (cxl.visibility). So a transition of that incarnation that is read
  late finds the same row as one that is read in time.

Named limits bound the ended incarnations kept per rank, the parked transitions and the owners' rows, and for how long
evicted rows, parked transitions and owners' rows are kept. If the reading of one topic lags the other by more than
that, late transitions are refused or dropped. A restarted rank needs its owner's row even if it never pooled a block,
because a transition of the ended incarnation may still be unread. The row is removed once `cxl-events` retains no
record of that incarnation.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BEFORE_FIRST
from streams.core.ids import EngineHash, Incarnation, RankId, SequenceHash
from streams.core.reducer.ordering import Health, Progress
from streams.cxl.events import BlockAddress, CxlTransition
from streams.cxl.records import BlockKey, BlockRow, EndedIncarnation, OwnerRow, ParkedKey, ParkedRow, Placement
from streams.cxl.states import NOT_POOLED, RefusalReason, TransitionRefused, after_owner_ended, transition
from streams.cxl.visibility import has_ended, metadata_of
from streams.errors import BadRecord

#: Ended incarnations kept per rank. A transition that is read after more restarts than this is dropped.
ENDED_INCARNATIONS_MAX = 64

#: Parked transitions per partition, and bytes of their records, which are both in memory and in the table.
PARKED_MAX = 10_000
PARKED_BYTES_MAX = 32 * 1024 * 1024

#: Changed rows after which a transaction is committed before more is applied: about 2 MB.
CHANGED_ROWS_FULL = 10_000

#: Evicted rows per partition, including rows in transit whose incarnation has ended. Beyond this limit the oldest
#: expire early; no answer of a router depends on them.
EVICTED_MAX = 100_000

#: Rows per partition in any state; eight partitions together have as many as a router takes (POOLED_ROWS_MAX). A block
#: beyond this limit is refused by the agent, once, rather than by every router separately.
ROWS_MAX = 1_000_000

#: Owners' rows per partition. Beyond this limit the oldest expire early, of those without blocks in transit.
OWNERS_MAX = 100_000

#: A heap of expiries is cleaned once it has more than twice as many entries as there are rows, plus this many.
_DUE_SLACK = 1024

#: In one transaction, at most this many rows and parked transitions expire, as many rows of older epochs, and as many
#: owners' rows.
EXPIRED_PER_TICK_MAX = 1000

#: The last batch of an incarnation of which no record was read, not even the one that announces it (BEFORE_FIRST).
_NOT_BEGUN = BEFORE_FIRST - 1


class TransitionOutcome(enum.StrEnum):
    """What became of a transition that was not refused."""

    APPLIED = "applied"
    PARKED = "parked"  # the batch that it follows has not been read yet, or an earlier transition of its rank waits
    DROPPED = "dropped"  # its incarnation ended before that batch


class PooledTableCount(enum.StrEnum):
    """Keys of `PooledBlockTable.counts`: the unit, then what happened to it, then why."""

    BLOCKS_ENTERED = "blocks_entered"  # blocks that entered the state that a transition reports
    BLOCKS_REFUSED_NO_POOL = "blocks_refused_no_pool"
    BLOCKS_REFUSED_NOT_IN_TRANSIT = "blocks_refused_not_in_transit"
    BLOCKS_REFUSED_OTHER_POOL = "blocks_refused_other_pool"
    BLOCKS_REFUSED_TABLE_FULL = "blocks_refused_table_full"
    TRANSITIONS_REFUSED_OLDER_INCARNATION = "transitions_refused_older_incarnation"
    TRANSITIONS_REFUSED_OVER_CAPACITY = "transitions_refused_over_capacity"  # PARKED_MAX or PARKED_BYTES_MAX
    PARKED_TRANSITIONS_APPLIED = "parked_transitions_applied"  # their batch was read; their blocks may still be refused
    PARKED_TRANSITIONS_DROPPED = "parked_transitions_dropped"  # their incarnation ended before their batch
    EVICTED_ROWS_EXPIRED = "evicted_rows_expired"  # by age, or early because of EVICTED_MAX
    OUTDATED_ROWS_EXPIRED = "outdated_rows_expired"  # their pool is in a newer epoch
    OWNER_ROWS_EXPIRED = "owner_rows_expired"  # by age, or early because of OWNERS_MAX


_BLOCKS_REFUSED = {reason: PooledTableCount(f"blocks_refused_{reason}") for reason in RefusalReason}


class _Readiness(enum.Enum):
    """Whether the batch that a transition follows has been read."""

    READY = enum.auto()
    EARLY = enum.auto()
    NEVER = enum.auto()  # its incarnation ended before that batch


@dataclass(slots=True)
class _Parked:
    number: int
    change: CxlTransition
    row: ParkedRow


@dataclass(frozen=True, slots=True)
class LateRefusal:
    """A transition that was parked and is now refused; its original record becomes a dead letter."""

    owner: RankId
    row: ParkedRow
    why: BadRecord


@dataclass(slots=True)
class PooledChanges:
    """The rows that one transaction must write; None is a tombstone."""

    blocks: list[tuple[BlockKey, BlockRow | None]] = field(default_factory=list)
    owners: list[tuple[RankId, OwnerRow | None]] = field(default_factory=list)
    parked: list[tuple[ParkedKey, ParkedRow | None]] = field(default_factory=list)


class PooledBlockTable:
    """The rows of all owners of one partition.

    counts: what happened since the start, by PooledTableCount.

    - _rows: by owner and sequence hash; for each owner a block has one placement.
    - _transit: blocks in transit, by owner.
    - _parked: transitions by owner, in order of arrival; the first one waits for its batch.
    - _due: heap of the times at which rows may expire.
    - _owner_due: when each owner's row may expire. _owners_due: a heap of the same times.
    - _undated: owners whose row was loaded without a time.
    - _epochs: for each pool with rows, the newest epoch of any row, and when a row first had it.
    - _of_epoch: the number of rows by pool and epoch.
    - _outdated: rows of older epochs that are to be removed.
    """

    def __init__(
        self,
        progress_of: Callable[[RankId], Progress | None],
        *,
        evicted_ttl_ms: int,
        parked_ttl_ms: int,
        owner_ttl_ms: int,
        parked_max: int = PARKED_MAX,
        ended_incarnations_max: int = ENDED_INCARNATIONS_MAX,
        evicted_max: int = EVICTED_MAX,
        owners_max: int = OWNERS_MAX,
        rows_max: int = ROWS_MAX,
    ) -> None:
        """Start empty.

        progress_of: returns a rank's progress on kv-events so far. owner_ttl_ms: how long an owner's row is needed
        after the end of an incarnation, or after the first transition of a newer one: the retention of `cxl-events`.
        """
        self._progress_of = progress_of
        self._evicted_ttl_ms = evicted_ttl_ms
        self._parked_ttl_ms = parked_ttl_ms
        self._parked_max = parked_max
        self._ended_incarnations_max = ended_incarnations_max
        self._evicted_max = evicted_max
        self._owner_ttl_ms = owner_ttl_ms
        self._owners_max = owners_max
        self._rows: dict[RankId, dict[SequenceHash, BlockRow]] = {}
        self._transit: dict[RankId, set[SequenceHash]] = {}
        self._owners: dict[RankId, OwnerRow] = {}
        self._parked: dict[RankId, deque[_Parked]] = {}
        self._n_parked = 0
        self._parked_bytes = 0
        self._n_rows = 0
        self._n_evicted = 0
        self._due: list[tuple[int, RankId, SequenceHash]] = []
        self._owner_due: dict[RankId, int] = {}
        self._owners_due: list[tuple[int, RankId]] = []
        self._undated: list[RankId] = []
        self._rows_max = rows_max
        self._epochs: dict[str, tuple[int, int]] = {}
        self._of_epoch: dict[str, Counter[int]] = {}
        self._outdated: deque[tuple[RankId, SequenceHash]] = deque()
        self._changed: dict[BlockKey, None] = {}
        self._changed_owners: dict[RankId, None] = {}
        self._changed_parked: dict[ParkedKey, ParkedRow | None] = {}
        self._refused: list[LateRefusal] = []
        self.counts: Counter[PooledTableCount] = Counter()

    def load(
        self,
        blocks: Iterable[tuple[BlockKey, BlockRow]],
        owners: Iterable[tuple[RankId, OwnerRow]],
        parked: Iterable[tuple[ParkedKey, ParkedRow, CxlTransition]],
    ) -> None:
        """Start from the rows of the table."""
        self._owners = dict(owners)
        for rank, owner in self._owners.items():
            if owner.ended_at_ms:
                self._expect_end_of_owner(rank, owner.ended_at_ms)
            else:
                self._undated.append(rank)
        for key, row in blocks:
            self._insert(key.owner, key.sequence, row)
        for parked_key, parked_row, change in sorted(parked, key=lambda each: (each[0].owner, each[0].number)):
            self._park(_Parked(parked_key.number, change, parked_row))

    def apply(self, change: CxlTransition, raw: bytes, offset: int, timestamp_ms: int) -> TransitionOutcome:
        """Apply, park or drop a record of cxl-events. raw, offset, timestamp_ms: its value, offset and append time.

        Raises BadRecord for a transition of an older incarnation than an earlier one of its rank, one that is illegal
        for some of its blocks (the others have entered the state), or one that cannot be parked for lack of capacity.
        """
        rank = change.rank
        owner = self._owner(rank)
        if change.incarnation < owner.newest_incarnation:
            self.counts[PooledTableCount.TRANSITIONS_REFUSED_OLDER_INCARNATION] += 1
            raise BadRecord(
                "older_incarnation",
                f"the transition is of incarnation {change.incarnation} of rank {rank}, but an earlier one is of "
                f"incarnation {owner.newest_incarnation}",
            )
        if change.incarnation > owner.newest_incarnation:
            self._put_owner(rank, replace(owner, newest_incarnation=change.incarnation), timestamp_ms)
        waiting = self._parked.get(rank)
        if not waiting:
            match self._readiness(change):
                case _Readiness.READY:
                    self._enter(change, timestamp_ms)
                    return TransitionOutcome.APPLIED
                case _Readiness.NEVER:
                    return TransitionOutcome.DROPPED
                case _Readiness.EARLY:
                    pass
                case never:
                    assert_never(never)
        if self._n_parked >= self._parked_max or self._parked_bytes + len(raw) > PARKED_BYTES_MAX:
            self.counts[PooledTableCount.TRANSITIONS_REFUSED_OVER_CAPACITY] += 1
            raise BadRecord(
                "over_capacity",
                f"{self._n_parked} transitions of the partition ({self._parked_bytes} bytes) are parked already",
            )
        number = waiting[-1].number + 1 if waiting else 0
        row = ParkedRow(offset, timestamp_ms, raw)
        self._park(_Parked(number, change, row))
        self._changed_parked[ParkedKey(rank, number)] = row
        return TransitionOutcome.PARKED

    def progress_changed(self, rank: RankId, before: Progress | None, after: Progress, timestamp_ms: int) -> None:
        """Follow a rank's progress on kv-events: note ended incarnations, and apply parked transitions that are ready.

        timestamp_ms: append time of the record that changed it.
        """
        if before is not None and _is_restart_or_removal(before, after):
            self._note_ended_incarnation(rank, before, after, timestamp_ms)
        if self._parked and rank in self._parked:
            self._release(rank)

    def expire(self, now_ms: int) -> None:
        """Remove expired rows, and refuse transitions that were parked for too long. now_ms: wall clock."""
        left = EXPIRED_PER_TICK_MAX
        while self._due and left and (self._due[0][0] <= now_ms or self._n_evicted > self._evicted_max):
            at_ms, rank, sequence = heapq.heappop(self._due)
            if self._is_due(at_ms, rank, sequence):  # otherwise its state has changed since
                self._remove(rank, sequence, self._rows[rank][sequence])
                self.counts[PooledTableCount.EVICTED_ROWS_EXPIRED] += 1
                left -= 1
        if len(self._due) > 2 * self._n_rows + _DUE_SLACK:
            self._due = [each for each in self._due if self._is_due(*each)]
            heapq.heapify(self._due)
        for rank in [rank for rank, waiting in self._parked.items() if self._is_overdue(waiting[0], now_ms)]:
            while left and rank in self._parked and self._is_overdue(self._parked[rank][0], now_ms):
                parked = self._unpark(rank)
                why = BadRecord("batch_never_came", f"batch {parked.change.follows} of rank {rank} has not arrived")
                self._refuse(parked, why)
                self._release(rank)
                left -= 1
        self._expire_epochs(now_ms)
        self._expire_owners(now_ms)

    def _expire_epochs(self, now_ms: int) -> None:
        """Remove rows of a pool's older epochs, which readers ignore for good.

        They are kept for evicted_ttl_ms after a newer epoch is first reported. Other owners may report the newer epoch
        later, and their next transitions must still find the rows of their earlier ones.
        """
        if not self._outdated:
            superseded = {
                pool_id: epoch
                for pool_id, (epoch, since_ms) in self._epochs.items()
                if min(self._of_epoch[pool_id]) < epoch and since_ms + self._evicted_ttl_ms <= now_ms
            }
            if superseded:
                older = ((key.owner, key.sequence) for key, row in self.rows() if _is_older(row, superseded))
                self._outdated.extend(older)
        for _ in range(min(len(self._outdated), EXPIRED_PER_TICK_MAX)):
            rank, sequence = self._outdated.popleft()
            row = self._rows.get(rank, {}).get(sequence)
            if row is not None and row.placement.pool_epoch < self._epochs[row.placement.pool_id][0]:
                self._remove(rank, sequence, row)
                self.counts[PooledTableCount.OUTDATED_ROWS_EXPIRED] += 1

    def _expire_owners(self, now_ms: int) -> None:
        """Remove owners' rows that neither a transition still to be read nor a row in transit depends on."""
        for rank in self._undated:
            if rank in self._owners and rank not in self._owner_due:
                self._expect_end_of_owner(rank, now_ms)
        self._undated.clear()
        for _ in range(EXPIRED_PER_TICK_MAX):
            due = self._owners_due
            if not due or (due[0][0] > now_ms and len(self._owners) <= self._owners_max):
                break
            at_ms, rank = heapq.heappop(due)
            if self._owner_due.get(rank) != at_ms:
                continue  # the owner's row has changed since
            if rank in self._transit or rank in self._parked:  # these end first
                self._expect_end_of_owner(rank, max(now_ms, at_ms))
                continue
            del self._owners[rank], self._owner_due[rank]
            self._changed_owners[rank] = None
            self.counts[PooledTableCount.OWNER_ROWS_EXPIRED] += 1

    @property
    def full(self) -> bool:
        """Whether enough rows have changed that they must be written before more is applied."""
        return len(self._changed) >= CHANGED_ROWS_FULL

    def __len__(self) -> int:
        """Return the number of rows in any state."""
        return self._n_rows

    def rows(self) -> Iterator[tuple[BlockKey, BlockRow]]:
        """Iterate over all rows as the table has them."""
        for rank, rows in self._rows.items():
            for sequence, row in rows.items():
                yield BlockKey(sequence, rank, row.placement.pool_id), row

    @property
    def n_parked(self) -> int:
        """Number of parked transitions."""
        return self._n_parked

    @property
    def n_owners(self) -> int:
        """Number of owners' rows."""
        return len(self._owners)

    def take_changes(self) -> PooledChanges:
        """Return the rows that changed since the last call."""
        changes = PooledChanges(
            [(key, self._row_at(key)) for key in self._changed],
            [(rank, self._owners.get(rank)) for rank in self._changed_owners],
            list(self._changed_parked.items()),
        )
        self._changed.clear()
        self._changed_owners.clear()
        self._changed_parked.clear()
        return changes

    def take_refused(self) -> list[LateRefusal]:
        """Return the parked transitions that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    # -- which transitions are applied ---------------------------------------------------------------------------------

    def _readiness(self, change: CxlTransition) -> _Readiness:
        """Return whether the batch that a transition follows has been read, will be, or can no longer be."""
        progress = self._progress_of(change.rank)
        if progress is None or change.incarnation > progress.epoch.incarnation:
            return _Readiness.EARLY
        reached = self._reached(self._owner(change.rank), change.incarnation)
        is_current = change.incarnation == progress.epoch.incarnation
        if is_current and progress.health is not Health.REMOVED:
            reached = max(reached, progress.sequence)
        if change.follows <= reached:
            return _Readiness.READY
        return _Readiness.EARLY if is_current else _Readiness.NEVER

    def _reached(self, owner: OwnerRow, incarnation: Incarnation) -> int:
        """Return the last batch of an incarnation that ended, or that started to number its batches again."""
        return next(
            (ended.sequence for ended in owner.ended_incarnations if ended.incarnation == incarnation), _NOT_BEGUN
        )

    def _note_ended_incarnation(self, rank: RankId, before: Progress, after: Progress, timestamp_ms: int) -> None:
        """Keep the last batch of an incarnation that ended, or that started to number its batches again."""
        owner = self._owner(rank)
        incarnations = {ended.incarnation: ended for ended in owner.ended_incarnations}
        if before.health is not Health.REMOVED:  # otherwise it was noted at the removal
            ended = before.epoch.incarnation
            incarnations[ended] = EndedIncarnation(
                ended, max(self._reached(owner, ended), before.sequence), timestamp_ms
            )
        was_evicted = self._n_lapsed(rank)
        self._put_owner(
            rank,
            OwnerRow(
                newest_incarnation=owner.newest_incarnation,
                incarnation=after.epoch.incarnation,
                ended=after.health is Health.REMOVED,
                ended_at_ms=timestamp_ms,
                ended_incarnations=tuple(sorted(incarnations.values())[-self._ended_incarnations_max :]),
            ),
            timestamp_ms,
        )
        self._n_evicted += self._n_lapsed(rank) - was_evicted
        self._expect_expiry_of_transit(rank)

    def _release(self, rank: RankId) -> None:
        """Apply or drop a rank's parked transitions in order, up to the first one that must continue to wait."""
        while (waiting := self._parked.get(rank)) and (
            readiness := self._readiness(waiting[0].change)
        ) != _Readiness.EARLY:
            parked = self._unpark(rank)
            if readiness is _Readiness.NEVER:
                self.counts[PooledTableCount.PARKED_TRANSITIONS_DROPPED] += 1
                continue
            self.counts[PooledTableCount.PARKED_TRANSITIONS_APPLIED] += 1
            try:
                self._enter(parked.change, parked.row.timestamp_ms)
            except BadRecord as exc:
                self._refuse(parked, exc)

    def _park(self, parked: _Parked) -> None:
        self._parked.setdefault(parked.change.rank, deque()).append(parked)
        self._n_parked += 1
        self._parked_bytes += len(parked.row.raw)

    def _unpark(self, rank: RankId) -> _Parked:
        waiting = self._parked[rank]
        parked = waiting.popleft()
        if not waiting:
            del self._parked[rank]
        self._n_parked -= 1
        self._parked_bytes -= len(parked.row.raw)
        self._changed_parked[ParkedKey(rank, parked.number)] = None
        return parked

    def _refuse(self, parked: _Parked, why: BadRecord) -> None:
        self._refused.append(LateRefusal(parked.change.rank, parked.row, why))

    def _is_due(self, at_ms: int, rank: RankId, sequence: SequenceHash) -> bool:
        row = self._rows.get(rank, {}).get(sequence)
        return row is not None and self._due_ms(rank, row) == at_ms

    def _is_overdue(self, parked: _Parked, now_ms: int) -> bool:
        return now_ms - parked.row.timestamp_ms >= self._parked_ttl_ms

    # -- what a transition does to rows --------------------------------------------------------------------------------

    def _enter(self, change: CxlTransition, timestamp_ms: int) -> None:
        """Enter the new state for all blocks for which this is legal, then raise BadRecord if blocks were refused."""
        fresh: dict[Placement | None, Placement] = {}  # blocks that shared an old placement also share the new one
        refusals: list[tuple[SequenceHash, TransitionRefused]] = []
        for address, engine in change.blocks.rows():
            row = self._rows.get(change.rank, {}).get(address.sequence)
            known = NOT_POOLED if row is None else _metadata_for(change.incarnation, row.placement)
            entered = transition(known, change.state, change.pool_id, change.accessible_workers)
            if isinstance(entered, TransitionRefused):
                refusals.append((address.sequence, entered))
            elif entered.pool_id is None:
                if row is not None:
                    self._remove(change.rank, address.sequence, row)
            elif row is None and self._n_rows >= self._rows_max:
                refusals.append((address.sequence, self._table_full()))
            elif entered != known or change.state is CxlMemoryState.IN_TRANSIT:
                old = None if change.state is CxlMemoryState.IN_TRANSIT or row is None else row.placement
                if old not in fresh:
                    fresh[old] = _placement(old, entered, change, timestamp_ms)
                self._put(change.rank, address, engine, row, fresh[old])
        self.counts[PooledTableCount.BLOCKS_ENTERED] += len(change.blocks) - len(refusals)
        if refusals:
            self.counts.update(_BLOCKS_REFUSED[refused.reason] for _, refused in refusals)
            block, first = refusals[0]
            raise BadRecord(
                first.reason.value,
                f"event {change.event_id} of rank {change.rank}: {len(refusals)} of {len(change.blocks)} blocks were "
                f"refused and are unchanged; the first is {block}: {first.message}",
            )

    def _table_full(self) -> TransitionRefused:
        return TransitionRefused(
            RefusalReason.TABLE_FULL, f"the partition already has {self._n_rows} rows of pooled blocks"
        )

    def _put(
        self, rank: RankId, address: BlockAddress, engine: EngineHash, known: BlockRow | None, placement: Placement
    ) -> None:
        if known is not None:
            self._remove(rank, address.sequence, known)
        self._insert(rank, address.sequence, BlockRow(placement, address.parent, address.position, engine))
        self._changed[BlockKey(address.sequence, rank, placement.pool_id)] = None

    def _insert(self, rank: RankId, sequence: SequenceHash, row: BlockRow) -> None:
        self._rows.setdefault(rank, {})[sequence] = row
        self._n_rows += 1
        self._n_evicted += self._is_evicted(rank, row)
        pool_id, epoch, at_ms = row.placement.pool_id, row.placement.pool_epoch, row.placement.entered_at_ms
        self._of_epoch.setdefault(pool_id, Counter())[epoch] += 1
        newest, since_ms = self._epochs.get(pool_id, (-1, 0))
        if epoch > newest or (epoch == newest and at_ms < since_ms):
            self._epochs[pool_id] = (epoch, at_ms)
        if row.placement.state is CxlMemoryState.IN_TRANSIT:
            self._transit.setdefault(rank, set()).add(sequence)
        due_ms = self._due_ms(rank, row)
        if due_ms is not None:
            heapq.heappush(self._due, (due_ms, rank, sequence))

    def _remove(self, rank: RankId, sequence: SequenceHash, row: BlockRow) -> None:
        rows = self._rows[rank]
        del rows[sequence]
        self._n_rows -= 1
        self._n_evicted -= self._is_evicted(rank, row)
        pool_id, of_epoch = row.placement.pool_id, self._of_epoch[row.placement.pool_id]
        of_epoch[row.placement.pool_epoch] -= 1
        if not of_epoch[row.placement.pool_epoch]:
            del of_epoch[row.placement.pool_epoch]
        if not of_epoch:
            del self._of_epoch[pool_id], self._epochs[pool_id]
        if not rows:
            del self._rows[rank]
        if row.placement.state is CxlMemoryState.IN_TRANSIT:
            transit = self._transit[rank]
            transit.discard(sequence)
            if not transit:
                del self._transit[rank]
        self._changed[BlockKey(sequence, rank, row.placement.pool_id)] = None

    def _row_at(self, key: BlockKey) -> BlockRow | None:
        row = self._rows.get(key.owner, {}).get(key.sequence)
        return row if row is not None and row.placement.pool_id == key.pool_id else None

    # -- owners, and time ----------------------------------------------------------------------------------------------

    def _owner(self, rank: RankId) -> OwnerRow:
        return self._owners.get(rank) or OwnerRow()

    def _put_owner(self, rank: RankId, row: OwnerRow, timestamp_ms: int) -> None:
        self._owners[rank] = row
        self._changed_owners[rank] = None
        self._expect_end_of_owner(rank, timestamp_ms)

    def _expect_end_of_owner(self, rank: RankId, since_ms: int) -> None:
        due_ms = max(since_ms + self._owner_ttl_ms, self._owner_due.get(rank, 0))
        if self._owner_due.get(rank) != due_ms:
            self._owner_due[rank] = due_ms
            heapq.heappush(self._owners_due, (due_ms, rank))
        if len(self._owners_due) > 2 * len(self._owners) + _DUE_SLACK:
            self._owners_due = [(at_ms, each) for each, at_ms in self._owner_due.items()]
            heapq.heapify(self._owners_due)

    def _due_ms(self, rank: RankId, row: BlockRow) -> int | None:
        """Return when a row expires; None for a row that does not."""
        owner, placement = self._owners.get(rank), row.placement
        if metadata_of(placement, owner).state is not CxlMemoryState.EVICTED:
            return None
        since_ms = placement.entered_at_ms
        if placement.state is not CxlMemoryState.EVICTED and owner is not None:
            # From the end of the row's own incarnation. From that of a later one, each restart would renew the row.
            ends = (
                ended.ended_at_ms for ended in owner.ended_incarnations if ended.incarnation == placement.incarnation
            )
            since_ms = next(ends, owner.ended_at_ms)
        return since_ms + self._evicted_ttl_ms

    def _is_evicted(self, rank: RankId, row: BlockRow) -> bool:
        state = row.placement.state
        return state is CxlMemoryState.EVICTED or (
            state is CxlMemoryState.IN_TRANSIT and has_ended(self._owners.get(rank), row.placement.incarnation)
        )

    def _n_lapsed(self, rank: RankId) -> int:
        """Return the number of rows in transit whose incarnation has ended, so that they are treated as evicted."""
        rows = self._rows.get(rank, {})
        return sum(self._is_evicted(rank, rows[sequence]) for sequence in self._transit.get(rank, ()))

    def _expect_expiry_of_transit(self, rank: RankId) -> None:
        """Let rows in transit whose incarnation has ended expire as evicted ones do."""
        owner = self._owners.get(rank)
        rows = self._rows.get(rank, {})
        for sequence in self._transit.get(rank, ()):
            if has_ended(owner, rows[sequence].placement.incarnation):
                due_ms = self._due_ms(rank, rows[sequence])
                assert due_ms is not None  # such a row is treated as evicted
                heapq.heappush(self._due, (due_ms, rank, sequence))


def _is_restart_or_removal(before: Progress, after: Progress) -> bool:
    """Return whether an incarnation ended, was removed, returned, or started to number its batches again."""
    if before.epoch is after.epoch and before.health is after.health and before.sequence <= after.sequence:
        return False  # the usual case, without the comparisons below
    return (
        before.epoch.incarnation != after.epoch.incarnation
        or (before.health is Health.REMOVED) != (after.health is Health.REMOVED)
        or after.sequence < before.sequence
    )


def _is_older(row: BlockRow, epochs: Mapping[str, int]) -> bool:
    epoch = epochs.get(row.placement.pool_id)
    return epoch is not None and row.placement.pool_epoch < epoch


def _metadata_for(incarnation: Incarnation, placement: Placement) -> CxlMemoryMetadata:
    """Return a block's metadata as a transition of this incarnation finds it."""
    metadata = CxlMemoryMetadata(placement.state, placement.pool_id, placement.accessible_workers)
    return after_owner_ended(metadata) if placement.incarnation < incarnation else metadata


def _placement(
    old: Placement | None, entered: CxlMemoryMetadata, change: CxlTransition, timestamp_ms: int
) -> Placement:
    """Return the placement of blocks after a transition. old: None for blocks that enter transit."""
    if old is None:
        assert entered.pool_id is not None  # a block without a pool has no row
        return Placement(
            state=entered.state,
            pool_id=entered.pool_id,
            pool_epoch=change.pool_epoch,
            accessible_workers=entered.accessible_workers,
            model=change.model,
            incarnation=change.incarnation,
            entered_at_ms=timestamp_ms,
        )
    return replace(old, state=entered.state, incarnation=change.incarnation, entered_at_ms=timestamp_ms)

"""The table of pooled blocks of one partition: transitions in, changed rows out.

What lives here: when a transition is applied, and to which rows it leads. What must not: Kafka, bytes of the log
(records arrive decoded), which state may follow which (cxl.states), keeping and expiring rows (block_rows, owner_rows,
parked_transitions).

The rows are a function of two logs, `kv-events` and `cxl-events`, and of nothing else. They do not depend on how the
reading of the two logs was interleaved, because each log decides different things.

- `cxl-events` alone decides the order of transitions, and so what becomes of a block. A rank's transitions are applied
  in the order of the log. A block's row contains the incarnation in which its state was entered; a transition of a
  later incarnation treats a block in transit as evicted. A transition is refused if an earlier one of its rank has a
  newer incarnation.
- `kv-events` alone decides which transitions are applied: those whose incarnation reaches the batch that they follow.
  While that is unknown, the transition is parked, and so are all later ones of its rank. One whose owner is no engine
  (STANDS_ALONE) follows none and is applied at once. It is dropped if a newer
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import assert_never

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BEFORE_FIRST
from streams.core.ids import Incarnation, RankId, SequenceHash
from streams.core.reducer.ordering import Health, Progress
from streams.cxl.events import STANDS_ALONE, CxlTransition
from streams.cxl.records import BlockKey, BlockRow, EndedIncarnation, OwnerRow, ParkedKey, ParkedRow, Placement
from streams.cxl.states import NOT_POOLED, RefusalReason, TransitionRefused, after_owner_ended, transition
from streams.errors import BadRecord
from streams.tables.block_rows import EVICTED_MAX, ROWS_MAX, BlockRows
from streams.tables.owner_rows import OWNERS_MAX, OwnerRows
from streams.tables.parked_transitions import PARKED_MAX, Parked, ParkedTransitions

#: Ended incarnations kept per rank. A transition that is read after more restarts than this is dropped.
ENDED_INCARNATIONS_MAX = 64

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
        self._ended_incarnations_max = ended_incarnations_max
        self._owners = OwnerRows(owner_ttl_ms, owners_max)
        self._blocks = BlockRows(self._owners, evicted_ttl_ms, evicted_max=evicted_max, rows_max=rows_max)
        self._parked = ParkedTransitions(parked_ttl_ms, parked_max)
        self._refused: list[LateRefusal] = []
        self.counts: Counter[PooledTableCount] = Counter()

    def load(
        self,
        blocks: Iterable[tuple[BlockKey, BlockRow]],
        owners: Iterable[tuple[RankId, OwnerRow]],
        parked: Iterable[tuple[ParkedKey, ParkedRow, CxlTransition]],
    ) -> None:
        """Start from the rows of the table."""
        self._owners.load(owners)
        for key, row in blocks:
            self._blocks.insert(key.owner, key.sequence, row)
        self._parked.load(parked)

    def apply(self, change: CxlTransition, raw: bytes, offset: int, timestamp_ms: int) -> TransitionOutcome:
        """Apply, park or drop a record of cxl-events. raw, offset, timestamp_ms: its value, offset and append time.

        Raises BadRecord for a transition of an older incarnation than an earlier one of its rank, one that is illegal
        for some of its blocks (the others have entered the state), or one that cannot be parked for lack of capacity.
        """
        rank = change.rank
        owner = self._owners.row(rank)
        if change.incarnation < owner.newest_incarnation:
            self.counts[PooledTableCount.TRANSITIONS_REFUSED_OLDER_INCARNATION] += 1
            raise BadRecord(
                "older_incarnation",
                f"the transition is of incarnation {change.incarnation} of rank {rank}, but an earlier one is of "
                f"incarnation {owner.newest_incarnation}",
            )
        if change.incarnation > owner.newest_incarnation:
            self._owners.put(rank, replace(owner, newest_incarnation=change.incarnation), timestamp_ms)
        if rank not in self._parked:
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
        if not self._parked.fits(raw):
            self.counts[PooledTableCount.TRANSITIONS_REFUSED_OVER_CAPACITY] += 1
            raise BadRecord(
                "over_capacity",
                f"{len(self._parked)} transitions of the partition ({self._parked.n_bytes} bytes) are parked already",
            )
        self._parked.park(change, ParkedRow(offset, timestamp_ms, raw))
        return TransitionOutcome.PARKED

    def progress_changed(self, rank: RankId, before: Progress | None, after: Progress, timestamp_ms: int) -> None:
        """Follow a rank's progress on kv-events: note ended incarnations, and apply parked transitions that are ready.

        timestamp_ms: append time of the record that changed it.
        """
        if before is not None and _is_restart_or_removal(before, after):
            self._note_ended_incarnation(rank, before, after, timestamp_ms)
        self._release(rank)

    def expire(self, now_ms: int) -> None:
        """Remove expired rows, and refuse transitions that were parked for too long. now_ms: wall clock."""
        n_evicted = self._blocks.expire(now_ms, EXPIRED_PER_TICK_MAX)
        left = EXPIRED_PER_TICK_MAX - n_evicted
        for rank in self._parked.overdue(now_ms):
            while left and self._parked.is_overdue(rank, now_ms):
                parked = self._parked.take_first(rank)
                why = BadRecord("batch_never_came", f"batch {parked.change.follows} of rank {rank} has not arrived")
                self._refuse(parked, why)
                self._release(rank)
                left -= 1
        n_outdated = self._blocks.expire_outdated(now_ms, EXPIRED_PER_TICK_MAX)
        n_owners = self._owners.expire(now_ms, self._needs_owner, EXPIRED_PER_TICK_MAX)
        self.counts[PooledTableCount.EVICTED_ROWS_EXPIRED] += n_evicted
        self.counts[PooledTableCount.OUTDATED_ROWS_EXPIRED] += n_outdated
        self.counts[PooledTableCount.OWNER_ROWS_EXPIRED] += n_owners

    def _needs_owner(self, rank: RankId) -> bool:
        """Whether a block in transit or a transition that is still to be applied depends on an owner's row."""
        return rank in self._parked or self._blocks.has_transit(rank)

    @property
    def full(self) -> bool:
        """Whether enough rows have changed that they must be written before more is applied."""
        return self._blocks.must_commit

    def __len__(self) -> int:
        """Return the number of rows in any state."""
        return len(self._blocks)

    def rows(self) -> Iterator[tuple[BlockKey, BlockRow]]:
        """Iterate over all rows as the table has them."""
        return self._blocks.items()

    @property
    def n_parked(self) -> int:
        """Number of parked transitions."""
        return len(self._parked)

    @property
    def n_owners(self) -> int:
        """Number of owners' rows."""
        return len(self._owners)

    def take_changes(self) -> PooledChanges:
        """Return the rows that changed since the last call."""
        return PooledChanges(self._blocks.take_changes(), self._owners.take_changes(), self._parked.take_changes())

    def take_refused(self) -> list[LateRefusal]:
        """Return the parked transitions that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    # -- which transitions are applied ---------------------------------------------------------------------------------

    def _readiness(self, change: CxlTransition) -> _Readiness:
        """Return whether the batch that a transition follows has been read, will be, or can no longer be."""
        if change.follows == STANDS_ALONE:
            return _Readiness.READY
        progress = self._progress_of(change.rank)
        if progress is None or change.incarnation > progress.epoch.incarnation:
            return _Readiness.EARLY
        reached = self._reached(self._owners.row(change.rank), change.incarnation)
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
        owner = self._owners.row(rank)
        incarnations = {ended.incarnation: ended for ended in owner.ended_incarnations}
        if before.health is not Health.REMOVED:  # otherwise it was noted at the removal
            ended = before.epoch.incarnation
            incarnations[ended] = EndedIncarnation(
                ended, max(self._reached(owner, ended), before.sequence), timestamp_ms
            )
        self._blocks.put_owner(
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

    def _release(self, rank: RankId) -> None:
        """Apply or drop a rank's parked transitions in order, up to the first one that must continue to wait."""
        while (change := self._parked.first(rank)) and (readiness := self._readiness(change)) is not _Readiness.EARLY:
            parked = self._parked.take_first(rank)
            if readiness is _Readiness.NEVER:
                self.counts[PooledTableCount.PARKED_TRANSITIONS_DROPPED] += 1
                continue
            self.counts[PooledTableCount.PARKED_TRANSITIONS_APPLIED] += 1
            try:
                self._enter(parked.change, parked.row.timestamp_ms)
            except BadRecord as exc:
                self._refuse(parked, exc)

    def _refuse(self, parked: Parked, why: BadRecord) -> None:
        self._refused.append(LateRefusal(parked.change.rank, parked.row, why))

    # -- what a transition does to rows --------------------------------------------------------------------------------

    def _enter(self, change: CxlTransition, timestamp_ms: int) -> None:
        """Enter the new state for all blocks for which this is legal, then raise BadRecord if blocks were refused."""
        fresh: dict[Placement | None, Placement] = {}  # blocks that shared an old placement also share the new one
        refusals: list[tuple[SequenceHash, TransitionRefused]] = []
        notes = change.blocks.notes or (b"",) * len(change.blocks)
        for (address, engine), note in zip(change.blocks.rows(), notes, strict=True):
            row = self._blocks.get(change.rank, address.sequence)
            known = NOT_POOLED if row is None else _metadata_for(change.incarnation, row.placement)
            entered = transition(known, change.state, change.pool_id, change.accessible_workers)
            if isinstance(entered, TransitionRefused):
                refusals.append((address.sequence, entered))
            elif entered.pool_id is None:
                self._blocks.remove(change.rank, address.sequence)
            elif row is None and self._blocks.is_full:
                refusals.append((address.sequence, self._table_full()))
            elif entered != known or change.state is CxlMemoryState.IN_TRANSIT:
                old = None if change.state is CxlMemoryState.IN_TRANSIT or row is None else row.placement
                if old not in fresh:
                    fresh[old] = _placement(old, entered, change, timestamp_ms)
                row = BlockRow(fresh[old], address.parent, address.position, engine, note)
                self._blocks.put(change.rank, address.sequence, row)
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
            RefusalReason.TABLE_FULL, f"the partition already has {len(self._blocks)} rows of pooled blocks"
        )


def _is_restart_or_removal(before: Progress, after: Progress) -> bool:
    """Return whether an incarnation ended, was removed, returned, or started to number its batches again."""
    if before.epoch is after.epoch and before.health is after.health and before.sequence <= after.sequence:
        return False  # the usual case, without the comparisons below
    return (
        before.epoch.incarnation != after.epoch.incarnation
        or (before.health is Health.REMOVED) != (after.health is Health.REMOVED)
        or after.sequence < before.sequence
    )


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
            span=change.span,
        )
    return replace(old, state=entered.state, incarnation=change.incarnation, entered_at_ms=timestamp_ms)

"""The table of pooled blocks of one partition: transitions in, changed rows out, whatever order the topics are read in.

What lives here: when a transition counts, and what it does to rows. What must not: Kafka, bytes of the log (records are
handed in decoded), which states may follow which (states).

The rows are a function of two logs, `kv-events` and `cxl-events`, and of nothing else: not of how their readings were
interleaved. That holds because each log decides a thing of its own.

- `cxl-events` alone decide the order of transitions, and so what becomes of a block: a rank's transitions are taken one
  behind the other as they lie there. A block's row says in which life its state was entered; a transition of a later
  life finds what was in transit evicted. One of a life older than a transition before it is refused.
- `kv-events` alone decide which transitions count: those whose life had a batch numbered so high as the one that they
  follow, at any time. Where that is not known yet the transition is parked, and whatever comes behind it of its rank as
  well; when a newer life has begun, and the older one ended too soon, it is dropped. How far lives that are over had
  come is kept in the owner's row, so that it is known as well to transitions that come later.
- `kv-events` alone decide which lives are over. Rows are not rewritten for that: a reader takes what is in transit of a
  life that is over for evicted (pooled_view). So a transition of that life that is read late finds what it would have
  found in time.

Beyond that there are limits, with names: lives remembered of a rank, parked transitions, owners' rows, and how long
evicted rows, parked transitions and owners' rows stay. A restarted rank that never pooled anything needs its owner's
row all the same: a transition of the life that is over may still be unread. Once `cxl-events` keep none of so old a
life the row goes. Where the topics are further apart than these, what is read late is refused or dropped.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BEFORE_FIRST
from streams.core.ids import EngineHash, Incarnation, RankId, SequenceHash
from streams.core.reducer.ordering import Health, Progress
from streams.cxl.events import BlockAddress, CxlTransition
from streams.cxl.pooled_view import is_over, metadata_of
from streams.cxl.records import BlockKey, BlockRow, EndedIncarnation, OwnerRow, ParkedKey, ParkedRow, Placement
from streams.cxl.states import NOT_POOLED, RefusalReason, Refused, after_owner_ended, transition
from streams.errors import BadRecord

#: Lives of a rank that are over and remembered: a transition read behind more restarts than that is dropped.
ENDED_INCARNATIONS_MAX = 64

#: Transitions parked of one partition, and bytes of their records: each is in memory and in the table.
PARKED_MAX = 10_000
PARKED_BYTES_MAX = 32 * 1024 * 1024

#: Rows changed after which a transaction is committed before more is applied: 2 MB of them.
CHANGED_ROWS_FULL = 10_000

#: Rows of one partition that are evicted, or count so since their owner's life ended; beyond it the oldest expire
#: before their time, which nobody's answer depends on.
EVICTED_MAX = 100_000

#: Rows of one partition, whatever their state: what eight partitions may hold is what a router has room for. A block
#: beyond it is refused, which agents say once, instead of every router for itself.
ROWS_MAX = 1_000_000

#: Owners' rows of one partition; beyond it the oldest go before their time, of those that have nothing on its way.
OWNERS_MAX = 100_000

#: Entries of the heap of expiries that are over, beside as many as there are rows twice over, before it is cleaned.
_DUE_SLACK = 1024

#: Rows, owners' rows and parked transitions that expire in one transaction, of each so many.
EXPIRED_PER_TICK_MAX = 1000

#: Before any batch, and before the one that says that a life begins: nothing is known of it.
_NOT_BEGUN = BEFORE_FIRST - 1


class TransitionOutcome(enum.StrEnum):
    """What became of a transition that was not refused."""

    APPLIED = "applied"
    PARKED = "parked"  # its batch of kv-events has not come yet, or another transition of its rank waits
    DROPPED = "dropped"  # its life was over before that batch


class _Readiness(enum.Enum):
    REACHED = enum.auto()
    EARLY = enum.auto()
    NEVER = enum.auto()


@dataclass(slots=True)
class _Parked:
    number: int
    change: CxlTransition
    row: ParkedRow


@dataclass(frozen=True, slots=True)
class LateRefusal:
    """A transition that was parked and is refused now: a dead letter of the record as it came."""

    owner: RankId
    row: ParkedRow
    why: BadRecord


@dataclass(slots=True)
class Changes:
    """What one transaction must write; None is a tombstone."""

    blocks: list[tuple[BlockKey, BlockRow | None]] = field(default_factory=list)
    owners: list[tuple[RankId, OwnerRow | None]] = field(default_factory=list)
    parked: list[tuple[ParkedKey, ParkedRow | None]] = field(default_factory=list)


class PooledBlockTable:
    """Rows of every owner of one partition.

    _rows: by owner and sequence hash; a block has one place for each owner. _transit: those that are in_transit.
    _parked: by owner, in order of arrival, the first of which waits. _due: a heap of when rows may have expired.
    _owner_due: when an owner's row may go, _owners_due a heap of that; _undated: those of which the table does not say.
    _epochs: of each pool that has rows, the newest epoch that a row has, and since when; _of_epoch: rows by pool and
    epoch; _outdated: rows of older epochs that are to go. counts: what happened, by name.
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
        """progress_of: what kv-events have told of a rank by now.

        owner_ttl_ms: how long after a life's end, or a newer life's first transition, an owner's row is needed: as long
        as `cxl-events` are kept.
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
        self.counts: Counter[str] = Counter()

    def load(
        self,
        blocks: Iterable[tuple[BlockKey, BlockRow]],
        owners: Iterable[tuple[RankId, OwnerRow]],
        parked: Iterable[tuple[ParkedKey, ParkedRow, CxlTransition]],
    ) -> None:
        """Start from what the table holds."""
        self._owners = dict(owners)
        for rank, owner in self._owners.items():
            if owner.ended_at_ms:
                self._expect_end_of_owner(rank, owner.ended_at_ms)
            else:
                self._undated.append(rank)
        for key, row in blocks:
            self._hold(key.owner, key.sequence, row)
        for where, waits, change in sorted(parked, key=lambda each: (each[0].owner, each[0].number)):
            self._park(_Parked(where.number, change, waits))

    def apply(self, change: CxlTransition, raw: bytes, offset: int, timestamp_ms: int) -> TransitionOutcome:
        """Take a record of cxl-events. raw, offset, timestamp_ms: as it lies there.

        Raises BadRecord where it is refused: of a life that is over by what its owner told since, illegal for some of
        its blocks (the others have entered the state), or without room to wait.
        """
        rank = change.rank
        owner = self._owner(rank)
        if change.incarnation < owner.newest_incarnation:
            self.counts["older_incarnation"] += 1
            raise BadRecord(
                "older_incarnation",
                f"rank {rank} has told of life {owner.newest_incarnation}, this is of {change.incarnation}",
            )
        if change.incarnation > owner.newest_incarnation:
            self._put_owner(rank, replace(owner, newest_incarnation=change.incarnation), timestamp_ms)
        waiting = self._parked.get(rank)
        if not waiting:
            readiness = self._readiness(change)
            if readiness is _Readiness.REACHED:
                self._enter(change, timestamp_ms)
                return TransitionOutcome.APPLIED
            if readiness is _Readiness.NEVER:
                return TransitionOutcome.DROPPED
        if self._n_parked >= self._parked_max or self._parked_bytes + len(raw) > PARKED_BYTES_MAX:
            self.counts["over_capacity"] += 1
            raise BadRecord(
                "over_capacity", f"{self._n_parked} transitions of the partition wait for their batches already"
            )
        number = waiting[-1].number + 1 if waiting else 0
        row = ParkedRow(offset, timestamp_ms, raw)
        self._park(_Parked(number, change, row))
        self._changed_parked[ParkedKey(rank, number)] = row
        return TransitionOutcome.PARKED

    def kv_moved(self, rank: RankId, before: Progress | None, after: Progress, timestamp_ms: int) -> None:
        """A record of kv-events, appended then, changed a rank's progress: lives may be over, transitions may count."""
        if before is not None and _breaks(before, after):
            self._note_ended_incarnation(rank, before, after, timestamp_ms)
        if self._parked and rank in self._parked:
            self._release(rank)

    def expire(self, now_ms: int) -> None:
        """Drop what was evicted long ago, and refuse what waits for a batch that comes no more. now_ms: wall clock."""
        left = EXPIRED_PER_TICK_MAX
        while self._due and left and (self._due[0][0] <= now_ms or self._n_evicted > self._evicted_max):
            at_ms, rank, sequence = heapq.heappop(self._due)
            if self._is_due(at_ms, rank, sequence):  # else it has come back since
                self._drop(rank, sequence, self._rows[rank][sequence])
                self.counts["expired"] += 1
                left -= 1
        if len(self._due) > 2 * self._n_rows + _DUE_SLACK:
            self._due = [each for each in self._due if self._is_due(*each)]
            heapq.heapify(self._due)
        for rank in [rank for rank, waiting in self._parked.items() if self._is_overdue(waiting[0], now_ms)]:
            while left and rank in self._parked and self._is_overdue(self._parked[rank][0], now_ms):
                parked = self._unpark(rank)
                why = BadRecord("batch_never_came", f"batch {parked.change.follows} of rank {rank} has not come")
                self._refuse(parked, why)
                self._release(rank)
                left -= 1
        self._expire_epochs(now_ms)
        self._expire_owners(now_ms)

    def _expire_epochs(self, now_ms: int) -> None:
        """Drop rows of epochs that a pool is no longer in: they count for nobody, and never will again.

        Not as soon as a newer epoch is told, since owners tell of it in no order between them: what one of them told
        before is to be found by what it tells next, whichever of them was read first.
        """
        if not self._outdated:
            over = {
                pool_id: epoch
                for pool_id, (epoch, since_ms) in self._epochs.items()
                if min(self._of_epoch[pool_id]) < epoch and since_ms + self._evicted_ttl_ms <= now_ms
            }
            if over:
                self._outdated.extend((key.owner, key.sequence) for key, row in self.rows() if _is_older(row, over))
        for _ in range(min(len(self._outdated), EXPIRED_PER_TICK_MAX)):
            rank, sequence = self._outdated.popleft()
            row = self._rows.get(rank, {}).get(sequence)
            if row is not None and row.placement.pool_epoch < self._epochs[row.placement.pool_id][0]:
                self._drop(rank, sequence, row)
                self.counts["outdated"] += 1

    def _expire_owners(self, now_ms: int) -> None:
        """Drop owners' rows that say nothing any more to transitions that may still be read, nor of rows in transit."""
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
                continue  # more was told since
            if rank in self._transit or rank in self._parked:
                self._expect_end_of_owner(rank, max(now_ms, at_ms))  # they expire themselves, or count again
                continue
            del self._owners[rank], self._owner_due[rank]
            self._changed_owners[rank] = None
            self.counts["owners_expired"] += 1

    @property
    def full(self) -> bool:
        """Whether so many rows have changed that they are written before more is applied."""
        return len(self._changed) >= CHANGED_ROWS_FULL

    def __len__(self) -> int:
        """Rows, whatever their state."""
        return self._n_rows

    def rows(self) -> Iterator[tuple[BlockKey, BlockRow]]:
        """Every row as it lies in the table."""
        for rank, rows in self._rows.items():
            for sequence, row in rows.items():
                yield BlockKey(sequence, rank, row.placement.pool_id), row

    @property
    def n_parked(self) -> int:
        """Transitions that wait."""
        return self._n_parked

    @property
    def n_owners(self) -> int:
        """Owners' rows."""
        return len(self._owners)

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes = Changes(
            [(key, self._row_at(key)) for key in self._changed],
            [(rank, self._owners.get(rank)) for rank in self._changed_owners],
            list(self._changed_parked.items()),
        )
        self._changed.clear()
        self._changed_owners.clear()
        self._changed_parked.clear()
        return changes

    def take_refused(self) -> list[LateRefusal]:
        """Parked transitions that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    # -- which transitions count ---------------------------------------------------------------------------------------

    def _readiness(self, change: CxlTransition) -> _Readiness:
        """Whether kv-events have a batch as high as the one that a transition follows, in its life."""
        progress = self._progress_of(change.rank)
        if progress is None or change.incarnation > progress.epoch.incarnation:
            return _Readiness.EARLY
        reached = self._reached(self._owner(change.rank), change.incarnation)
        is_current = change.incarnation == progress.epoch.incarnation
        if is_current and progress.health is not Health.REMOVED:
            reached = max(reached, progress.sequence)
        if change.follows <= reached:
            return _Readiness.REACHED
        return _Readiness.EARLY if is_current else _Readiness.NEVER

    def _reached(self, owner: OwnerRow, incarnation: Incarnation) -> int:
        """The last batch of a life that is over, or began anew."""
        return next(
            (ended.sequence for ended in owner.ended_incarnations if ended.incarnation == incarnation), _NOT_BEGUN
        )

    def _note_ended_incarnation(self, rank: RankId, before: Progress, after: Progress, timestamp_ms: int) -> None:
        """Keep how far a life had come that is over, or counts its batches anew."""
        owner = self._owner(rank)
        incarnations = {ended.incarnation: ended for ended in owner.ended_incarnations}
        if before.health is not Health.REMOVED:  # else that was noted when it was removed
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
        """Take what waited, in order, up to the first that must go on waiting."""
        while (waiting := self._parked.get(rank)) and (
            readiness := self._readiness(waiting[0].change)
        ) != _Readiness.EARLY:
            parked = self._unpark(rank)
            if readiness is _Readiness.NEVER:
                self.counts["parked_dropped"] += 1
                continue
            self.counts["parked_applied"] += 1
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

    # -- what they do --------------------------------------------------------------------------------------------------

    def _enter(self, change: CxlTransition, timestamp_ms: int) -> None:
        """Let every block enter the state that may; raises BadRecord, behind that, where some may not."""
        fresh: dict[Placement | None, Placement] = {}  # blocks that go together share what is said of them
        refusals: list[tuple[SequenceHash, Refused]] = []
        for address, engine in change.blocks.rows():
            row = self._rows.get(change.rank, {}).get(address.sequence)
            known = NOT_POOLED if row is None else _found_by(change.incarnation, row.placement)
            entered = transition(known, change.state, change.pool_id, change.accessible_workers)
            if isinstance(entered, Refused):
                refusals.append((address.sequence, entered))
            elif entered.pool_id is None:
                if row is not None:
                    self._drop(change.rank, address.sequence, row)
            elif row is None and self._n_rows >= self._rows_max:
                refusals.append((address.sequence, Refused(RefusalReason.TABLE_FULL, f"{self._n_rows} rows are known")))
            elif entered != known or change.state is CxlMemoryState.IN_TRANSIT:
                old = None if change.state is CxlMemoryState.IN_TRANSIT or row is None else row.placement
                if old not in fresh:
                    fresh[old] = _placement(old, entered, change, timestamp_ms)
                self._put(change.rank, address, engine, row, fresh[old])
        self.counts["blocks_entered"] += len(change.blocks) - len(refusals)
        if refusals:
            self.counts.update(refused.reason.value for _, refused in refusals)
            block, first = refusals[0]
            raise BadRecord(
                first.reason.value,
                f"event {change.event_id} of rank {change.rank}: {len(refusals)} of {len(change.blocks)} blocks are "
                f"unchanged, the first is {block}: {first.message}",
            )

    def _put(
        self, rank: RankId, address: BlockAddress, engine: EngineHash, known: BlockRow | None, placement: Placement
    ) -> None:
        if known is not None:
            self._drop(rank, address.sequence, known)
        self._hold(rank, address.sequence, BlockRow(placement, address.parent, address.position, engine))
        self._changed[BlockKey(address.sequence, rank, placement.pool_id)] = None

    def _hold(self, rank: RankId, sequence: SequenceHash, row: BlockRow) -> None:
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

    def _drop(self, rank: RankId, sequence: SequenceHash, row: BlockRow) -> None:
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
        """When a row expires; None for one that does not."""
        owner, placement = self._owners.get(rank), row.placement
        if metadata_of(placement, owner).state is not CxlMemoryState.EVICTED:
            return None
        since_ms = placement.entered_at_ms
        if placement.state is not CxlMemoryState.EVICTED and owner is not None:
            # Of its own life: whatever ended later would renew it for as long as the rank restarts.
            ends = (
                ended.ended_at_ms for ended in owner.ended_incarnations if ended.incarnation == placement.incarnation
            )
            since_ms = next(ends, owner.ended_at_ms)
        return since_ms + self._evicted_ttl_ms

    def _is_evicted(self, rank: RankId, row: BlockRow) -> bool:
        state = row.placement.state
        return state is CxlMemoryState.EVICTED or (
            state is CxlMemoryState.IN_TRANSIT and is_over(self._owners.get(rank), row.placement.incarnation)
        )

    def _n_lapsed(self, rank: RankId) -> int:
        """Rows in transit that count as evicted."""
        rows = self._rows.get(rank, {})
        return sum(self._is_evicted(rank, rows[sequence]) for sequence in self._transit.get(rank, ()))

    def _expect_expiry_of_transit(self, rank: RankId) -> None:
        """What was in transit when a life ended counts as evicted from then on."""
        owner = self._owners.get(rank)
        rows = self._rows.get(rank, {})
        for sequence in self._transit.get(rank, ()):
            if is_over(owner, rows[sequence].placement.incarnation):
                due_ms = self._due_ms(rank, rows[sequence])
                assert due_ms is not None  # in transit and over is evicted
                heapq.heappush(self._due, (due_ms, rank, sequence))


def _breaks(before: Progress, after: Progress) -> bool:
    """Whether more has changed between two progresses than that one life has gone on."""
    if before.epoch is after.epoch and before.health is after.health and before.sequence <= after.sequence:
        return False  # as it almost always is
    return (
        before.epoch.incarnation != after.epoch.incarnation
        or (before.health is Health.REMOVED) != (after.health is Health.REMOVED)
        or after.sequence < before.sequence
    )


def _is_older(row: BlockRow, epochs: Mapping[str, int]) -> bool:
    epoch = epochs.get(row.placement.pool_id)
    return epoch is not None and row.placement.pool_epoch < epoch


def _found_by(incarnation: Incarnation, placement: Placement) -> CxlMemoryMetadata:
    """What a transition of some life finds a block in."""
    change = CxlMemoryMetadata(placement.state, placement.pool_id, placement.accessible_workers)
    return after_owner_ended(change) if placement.incarnation < incarnation else change


def _placement(
    old: Placement | None, entered: CxlMemoryMetadata, change: CxlTransition, timestamp_ms: int
) -> Placement:
    """What a transition says of blocks that it takes from a placement, or into transit."""
    if old is None:
        assert entered.pool_id is not None  # what has no pool has no row
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

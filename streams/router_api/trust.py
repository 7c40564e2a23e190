"""How far an answer can be trusted: answer modes, degraded reasons, and what they follow from.

What lives here: progress of ranks, partition records with their time of receipt, and which ranks lack records because
the index is over capacity. What must not: keys and bytes of records, and locks (view).

An answer needs the least trust over all eligible ranks, which may be thousands. So nothing is computed per rank and
answer: a rank's own part is one number that only its records change, kept in a column, and an owner's part is the time
until which it needs no other check. `_assess_each` is the same rule rank by rank; it is used for a few ranks, and tests
compare the two.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.events import FeedState
from streams.core.ids import Epoch, Int64Array, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.eligibility import base_of
from streams.core.routing.identity_cache import IdentityCache
from streams.kafka import partition_of
from streams.tables.applied_until import AppliedUntil, Lag, SourceOffset, records_behind
from streams.tables.records import PartitionRecord
from streams.topic_watch import READINGS_PER_TOLERATED_LAG, read_every_ms

#: How long the ends of the logs are not trusted after an outage of the broker. Producers reconnect within 1.5 s
#: (`streams.kafka.producer`) and then send what has waited. An end that was read before that would make answers exact
#: that lack all the events of the outage.
SETTLE_MS = 3000

_NO_RANKS: frozenset[RankId] = frozenset()
_NO_WORKERS: frozenset[WorkerId] = frozenset()

_EXACT = Health.EXACT

#: Workers whose partition is cached: computing it takes 0.4 us. Beyond this limit the cache is cleared.
_WORKERS_CACHED_MAX = 65_536

#: Ranks that have a place in the columns. Beyond this limit all of them get new places.
_NUMBERED_MAX = 262_144
_NUMBERED_FIRST = 64

#: A tuple with fewer ranks is assessed rank by rank, which takes less time than using columns.
_COLUMNS_FROM = 8

#: Later than any position, for a reason that no rank has.
_NOWHERE = 1 << 62


class AnswerMode(enum.StrEnum):
    """How far an answer's overlap can be trusted (docs/architecture.md)."""

    __hash__ = str.__hash__  # that of Enum is a Python function, which every look-up by a member would call

    EXACT = "exact"
    DEGRADED = "degraded"
    APPROXIMATE = "approximate"
    FALLBACK = "fallback"


class DegradedReason(enum.StrEnum):
    """Why an answer is `degraded`: the first reason found, for one eligible rank or for all of them."""

    __hash__ = str.__hash__  # that of Enum is a Python function, which every look-up by a member would call

    NO_EVENTS_YET = "no_events_yet"  # no event of the rank is known to have arrived, so its cache is unknown
    BRIDGE_SILENT = "bridge_silent"  # the rank's bridge was not heard from, or does not feed the rank yet
    FEED_BEHIND = "feed_behind"  # the rank's engine published batches that its bridge has not passed on yet
    EVENTS_LOST = "events_lost"  # a batch was lost, or a stored block's parent was never seen
    REMOVED = "removed"  # the rank was removed, and its worker is still registered, or registered again
    OVER_CAPACITY = "over_capacity"  # this router's index is over capacity and lacks a record of the rank
    OWNER_SILENT = "owner_silent"  # no partition record was received for stale_after_ms
    # The partition owner lags behind its source by more than behind_after_ms, or this router behind the owner, or it is
    # not known that they do not.
    OWNER_BEHIND = "owner_behind"
    LABELS_OVER_CAPACITY = "labels_over_capacity"  # the request queries labels, and some of the rank's were dropped
    POOLED_OVER_CAPACITY = "pooled_over_capacity"  # rows of pooled blocks were dropped
    POOLED_OWNER_SILENT = "pooled_owner_silent"
    POOLED_OWNER_BEHIND = "pooled_owner_behind"
    # A rank that put blocks of the model into a pool is itself `no_events_yet`, `bridge_silent`, `feed_behind` or
    # `events_lost`, so that their evictions may be missing.
    POOLED_RANK_UNKNOWN = "pooled_rank_unknown"
    BOOKINGS_NOT_IN_SYNC = "bookings_not_in_sync"  # Kafka is unreachable; routers lack each other's bookings


@dataclass(frozen=True, slots=True)
class Trust:
    """How far an answer can be trusted. reason: why it is `degraded`; None in every other mode."""

    mode: AnswerMode
    reason: DegradedReason | None = None


class Basis(NamedTuple):
    """What the trust in an overlap depends on besides the records, from before it was read.

    improvements, pooled_improvements: see TrustTracker. unfed: see EngineReports. at_ms: when that was.
    """

    improvements: int
    pooled_improvements: int
    unfed: frozenset[WorkerId] = _NO_WORKERS
    at_ms: int = 0


# One value of each kind is shared, since every answer has one.
_TRUSTED = {mode: Trust(mode) for mode in AnswerMode}
_DEGRADED = {reason: Trust(AnswerMode.DEGRADED, reason) for reason in DegradedReason}
APPROXIMATE = _TRUSTED[AnswerMode.APPROXIMATE]
FALLBACK = _TRUSTED[AnswerMode.FALLBACK]
NOT_IN_SYNC = _DEGRADED[DegradedReason.BOOKINGS_NOT_IN_SYNC]

# A rank's own part of its trust as a number: the first two, or _FIRST_REASON plus a position in _OWN_REASONS.
_IS_EXACT, _IS_APPROXIMATE, _FIRST_REASON = range(3)
_OWN_REASONS = (
    DegradedReason.NO_EVENTS_YET,
    DegradedReason.EVENTS_LOST,
    DegradedReason.REMOVED,
    DegradedReason.FEED_BEHIND,
    DegradedReason.BRIDGE_SILENT,
)
_OWN_NUMBER = {reason: _FIRST_REASON + index for index, reason in enumerate(_OWN_REASONS)}

# The order in which the reasons of one rank count.
_OWN, _RECORDS, _LABELS, _OWNER = range(4)
_POOLED = {
    DegradedReason.OWNER_SILENT: DegradedReason.POOLED_OWNER_SILENT,
    DegradedReason.OWNER_BEHIND: DegradedReason.POOLED_OWNER_BEHIND,
}


@dataclass(frozen=True, slots=True)
class PooledRows:
    """What the trust in an answer that uses pooled blocks depends on.

    n_over_capacity: rows that were dropped. partitions: those of the ranks that put blocks into a pool. ranks: those of
    them that did so for the model of the answer.
    """

    n_over_capacity: int
    partitions: tuple[int, ...]
    ranks: tuple[RankId, ...] = ()


def _own_number(progress: Progress | None) -> int:
    """A rank's own part of its trust, as far as its progress record decides it."""
    if progress is None:
        return _OWN_NUMBER[DegradedReason.NO_EVENTS_YET]
    health, feed = progress.health, progress.feed
    if health is Health.DEGRADED:
        return _OWN_NUMBER[DegradedReason.EVENTS_LOST]
    if health is Health.REMOVED:
        return _OWN_NUMBER[DegradedReason.REMOVED]
    if feed:
        unproven = feed is FeedState.UNPROVEN
        return _OWN_NUMBER[DegradedReason.NO_EVENTS_YET if unproven else DegradedReason.FEED_BEHIND]
    return _IS_EXACT if health is _EXACT else _IS_APPROXIMATE


class _RankColumns:
    """What an assessment needs of one tuple of n ranks.

    numbers: int64[n], the place of each rank in the tracker's columns, valid while its numbering is `numbering`.
    partitions: int64[n]; distinct: each partition once. own: uint8[n], each rank's own part, including bridges that are
    silent, as of `version` and `unfed`. first: position of the first rank whose own part is a reason, _NOWHERE if there
    is none. approximate: whether any rank's own part is. incomplete: positions of ranks that may lack records, in
    order, as of the tracker's n_incomplete. position: of each rank, created when it is needed.
    """

    __slots__ = (
        "_position",
        "approximate",
        "distinct",
        "first",
        "incomplete",
        "n_incomplete",
        "numbering",
        "numbers",
        "own",
        "partitions",
        "ranks",
        "unfed",
        "version",
    )

    def __init__(self, ranks: tuple[RankId, ...], numbering: int, numbers: Int64Array, partitions: Int64Array) -> None:
        self.ranks = ranks
        self.numbering = numbering
        self.numbers = numbers
        self.partitions = partitions
        self.distinct: list[int] = np.unique(partitions).tolist()
        self.version = -1
        self.unfed: Set[WorkerId] = _NO_WORKERS
        self.own: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self.first = _NOWHERE
        self.approximate = False
        self.n_incomplete = 0
        self.incomplete: list[int] = []
        self._position: dict[RankId, int] | None = None

    @property
    def position(self) -> Mapping[RankId, int]:
        """Position of each rank."""
        if self._position is None:
            self._position = {rank: index for index, rank in enumerate(self.ranks)}
        return self._position

    def own_of(self, at: Int64Array | None) -> tuple[int, bool]:
        """Like `first` and `approximate`, of the ranks at these positions."""
        if at is None:
            return self.first, self.approximate
        own = self.own[at]
        degraded = own >= _FIRST_REASON
        found = int(degraded.argmax()) if len(at) else 0
        first = at.item(found) if len(at) and degraded[found] else _NOWHERE
        return first, bool((own == _IS_APPROXIMATE).any())

    def first_of(self, ranks: Iterable[RankId], at: Int64Array | None) -> int:
        """First position of any of these ranks among the assessed ones; _NOWHERE if there is none."""
        known = (self.position.get(rank) for rank in ranks)
        return min((found for found in known if found is not None and _includes(at, found)), default=_NOWHERE)

    def first_in(self, partition: int, at: Int64Array | None) -> int:
        """First position of a rank of a partition; _NOWHERE if there is none."""
        here = self.partitions == partition if at is None else self.partitions[at] == partition
        if not here.any():
            return _NOWHERE
        found = int(here.argmax())
        return found if at is None else at.item(found)


def _includes(at: Int64Array | None, position: int) -> bool:
    if at is None:
        return True
    found = int(at.searchsorted(position))
    return found < len(at) and at.item(found) == position


class TrustTracker:
    """Keeps what limits the trust in answers. Not thread-safe: the view calls it under a lock.

    progress: the last progress record of each rank; only `note_progress` changes it. stale_after_ms, behind_after_ms:
    the settings of these names.
    """

    def __init__(
        self,
        n_partitions: int,
        stale_after_ms: int,
        behind_after_ms: int,
        epoch_of: Callable[[RankId], Epoch | None],
    ) -> None:
        """epoch_of: the greatest epoch that the index has seen of a rank."""
        self._n_partitions = n_partitions
        self._stale_after_ms = stale_after_ms
        self._behind_after_ms = behind_after_ms
        # The ends of the sources are read periodically, and cannot be newer than that.
        self._unproven_after_ms = max(behind_after_ms, READINGS_PER_TOLERATED_LAG * read_every_ms(behind_after_ms))
        self._epoch_of = epoch_of
        self.progress: dict[RankId, Progress] = {}
        self._partition_of: dict[WorkerId, int] = {}  # a cache
        # Columns over the ranks that were assessed: each one's own part of its trust, and whether it has a lease.
        self._numbers: dict[RankId, int] = {}
        self._numbering = 0  # changes when a place may belong to another rank
        self._own = np.zeros(_NUMBERED_FIRST, dtype=np.uint8)
        self._leased = np.zeros(_NUMBERED_FIRST, dtype=np.bool_)
        self._version = 0  # changes with every number in these columns
        self._columns: IdentityCache[_RankColumns] = IdentityCache()
        # By partition, the last time at which its owner does not make answers degraded, as far as is known now.
        self._owner_trusted_until_ms: dict[int, int] = {}
        # Partition records with their time of receipt. The time is None for a record that was written before this
        # router had read to the end of the log: such a record does not show that the owner is still running.
        self._partitions: dict[int, tuple[PartitionRecord, int | None]] = {}
        # By partition, up to which time this router has folded what was appended to the sources, by its own clock and
        # its own readings of their ends. This includes every delay: an owner that lags, is dead or is not the owner any
        # more, Kafka, and this router's own reading of the changelog, where a partition record comes after the records
        # of the same transaction.
        self._folded: defaultdict[int, AppliedUntil] = defaultdict(lambda: AppliedUntil(SETTLE_MS))
        # The same for the changelog of pooled blocks, whose records are not in order with the partition records.
        self._folded_pooled: defaultdict[int, AppliedUntil] = defaultdict(AppliedUntil)
        self._ends: dict[int, Mapping[str, SourceOffset]] = {}  # by partition, where its sources ended when last read
        # By partition, ranks that can be trusted more once the rest of a transaction is folded, each with the number
        # that counts until then.
        self._unsettled: defaultdict[int, dict[RankId, int]] = defaultdict(dict)
        #: Grows whenever a rank or an owner can be trusted again. What was read before may be older than this trust.
        self.improvements = 0
        self.pooled_improvements = 0  # the same for owners of pooled blocks
        self._improved = DegradedReason.OWNER_BEHIND  # the reason that ended last
        # Since when owners can be trusted again, by partition, and the same for ranks. Pooled blocks are in another
        # changelog, so answers that use them wait until it is folded up to then.
        self._owner_trusted_since_ms: dict[int, int] = {}
        self._rank_trusted_since_ms: dict[RankId, int] = {}
        # Ranks of which the index lacks a record because it was over capacity, with their epoch at that time: what the
        # index has of them is wrong until a newer epoch begins.
        self._incomplete: dict[RankId, Epoch] = {}
        self._n_incomplete = 0  # counts the changes of these

    def note_progress(self, rank: RankId, progress: Progress | None) -> None:
        """Take in the progress record of a rank, or its tombstone.

        Less trust counts at once. More counts from the end of the transaction, which is a partition record: what the
        rank holds follows its progress. So does trust in another epoch, whose first record empties the rank.
        """
        known = self.progress.get(rank)
        before, now = self._own_of(rank), _own_number(progress)
        unsettled = self._unsettled[self._partition(rank.worker_id)]
        unsettled.pop(rank, None)
        if progress is None:
            self.progress.pop(rank, None)
            self._rank_trusted_since_ms.pop(rank, None)
        else:
            self.progress[rank] = progress
            if now < _FIRST_REASON:
                is_emptied = known is not None and known.epoch != progress.epoch
                if before < _FIRST_REASON and is_emptied:
                    unsettled[rank] = _OWN_NUMBER[DegradedReason.FEED_BEHIND]
                elif before > now:
                    unsettled[rank] = before
        number = self._numbers.get(rank)
        if number is not None:
            self._note_own(number, rank)

    def _own_of(self, rank: RankId) -> int:
        """A rank's own part of its trust at this moment."""
        own = _own_number(self.progress.get(rank))
        return own if own >= _FIRST_REASON else self._unsettled[self._partition(rank.worker_id)].get(rank, own)

    def _settle(self, partition: int, received_ms: int | None) -> None:
        """Let the ranks of a partition be trusted with what its last transaction says."""
        unsettled = self._unsettled[partition]
        while unsettled:
            rank, before = unsettled.popitem()
            if received_ms is not None:  # otherwise the owner is not trusted yet
                self._rank_trusted_since_ms[rank] = received_ms
            is_reason = before >= _FIRST_REASON
            self._note_improvement(_OWN_REASONS[before - _FIRST_REASON] if is_reason else DegradedReason.FEED_BEHIND)
            number = self._numbers.get(rank)
            if number is not None:
                self._note_own(number, rank)

    def _note_improvement(self, reason: DegradedReason) -> None:
        """reason: why answers were degraded until now."""
        self._improved = reason
        self.improvements += 1

    def _note_own(self, number: int, rank: RankId) -> None:
        progress = self.progress.get(rank)
        own, leased = self._own_of(rank), progress is not None and progress.lease_ms != 0
        if self._own[number] != own or self._leased[number] != leased:  # most records change neither
            self._own[number], self._leased[number] = own, leased
            self._version += 1

    def note_partition(self, record: PartitionRecord, received_ms: int | None) -> None:
        """Take in a partition record. received_ms: None if it was written before this router had read to the end."""
        self._settle(record.partition, received_ms)
        self._partitions[record.partition] = (record, received_ms)
        self._folded[record.partition].note_applied(
            {source.topic: SourceOffset(source.topic_id, source.applied_offset + 1) for source in record.sources}
        )
        self._note_owner(record.partition, received_ms)

    def note_ends(
        self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset], now_ms: int | None = None
    ) -> None:
        """Take in where the sources of a partition end, as the broker was asked for at this time. now_ms: if later."""
        self._ends[partition] = ends
        self._folded[partition].note_ends(asked_ms, ends)
        self._note_owner(partition, asked_ms if now_ms is None else now_ms)

    def _note_owner(self, partition: int, now_ms: int | None) -> None:
        """Note until when `_degraded_by_owner` returns None, unless something else is noted before.

        now_ms: None if it returns a reason now.
        """
        record, received_ms = self._partitions.get(partition, (None, None))
        until = self._folded[partition].at_ms
        if (
            record is None
            or received_ms is None
            or until is None
            or any(source.behind_ms > self._behind_after_ms for source in record.sources)
        ):
            self._owner_trusted_until_ms.pop(partition, None)
            return
        before_ms = self._owner_trusted_until_ms.get(partition, -1)
        until_ms = min(received_ms + self._stale_after_ms, until + self._unproven_after_ms)
        if now_ms is not None and before_ms < now_ms <= until_ms:
            self._owner_trusted_since_ms[partition] = now_ms
            self._note_improvement(DegradedReason.OWNER_BEHIND)
        self._owner_trusted_until_ms[partition] = until_ms

    def note_pooled_ends(
        self,
        partition: int,
        asked_ms: int,
        ends: Mapping[str, SourceOffset],
        folded: Mapping[str, SourceOffset],
        now_ms: int | None = None,
    ) -> None:
        """Take in where the changelog of pooled blocks ends, and up to where it is folded. now_ms: if later."""
        now_ms = asked_ms if now_ms is None else now_ms
        was_known = self._knows_pooled(partition, now_ms)
        self._folded_pooled[partition].note_applied(folded)
        self._folded_pooled[partition].note_ends(asked_ms, ends)
        ahead, until_ms = self._rank_trusted_since_ms, self._folded_pooled[partition].at_ms
        if ahead and until_ms is not None:
            done = [rank for rank, since_ms in ahead.items() if since_ms <= until_ms]
            for rank in done:
                if self._partition(rank.worker_id) == partition:
                    del ahead[rank]
                    self.pooled_improvements += 1
        if not was_known and self._knows_pooled(partition, now_ms):
            self.pooled_improvements += 1

    def _knows_pooled(self, partition: int, now_ms: int) -> bool:
        """Whether the pooled rows of a partition are folded as far as trust in its owner needs it."""
        if not self._is_recent(self._folded_pooled, partition, now_ms):
            return False
        until_ms = self._folded_pooled[partition].at_ms
        assert until_ms is not None  # otherwise it is not recent
        return until_ms >= self._owner_trusted_since_ms.get(partition, until_ms)

    def note_over_capacity(self, rank: RankId) -> bool:
        """Mark a rank as incomplete; return True if it was complete before."""
        epoch = self._epoch_of(rank)
        if epoch is None or self._incomplete.get(rank) == epoch:
            return False
        self._incomplete[rank] = epoch
        self._n_incomplete += 1
        return True

    def applied_offsets(self) -> dict[int, int]:
        """Source offset that each partition's owner had applied when it wrote its last partition record."""
        return {
            partition: record.sources[0].applied_offset
            for partition, (record, _) in self._partitions.items()
            if record.sources
        }

    def lags(self, now_ms: int) -> dict[int, Lag]:
        """How far this router's view is behind the sources of each partition, its owner's delay included."""
        return {partition: self._lag(partition, now_ms) for partition in range(self._n_partitions)}

    def _lag(self, partition: int, now_ms: int) -> Lag:
        ends, folded = self._ends.get(partition), self._folded.get(partition)
        record, _ = self._partitions.get(partition, (None, None))
        n_records = None
        if ends is not None and record is not None:
            applied = {each.topic: SourceOffset(each.topic_id, each.applied_offset + 1) for each in record.sources}
            n_records = records_behind(ends, applied)
        until_ms = None if folded is None else folded.at_ms
        return Lag(n_records, None if until_ms is None else max(now_ms - until_ms, 0))

    def assess(
        self,
        ranks: Sequence[RankId],
        predicted: Set[RankId],
        now_ms: int,
        *,
        unfed: Set[WorkerId] = _NO_WORKERS,
        ranks_missing_labels: Set[RankId] = _NO_RANKS,
        pooled: PooledRows | None = None,
        basis: Basis | None = None,
    ) -> Trust:
        """Return the least trust that any of these ranks deserves.

        predicted: ranks whose score is a prediction. unfed: workers whose bridge is silent or does not feed them.
        ranks_missing_labels: ranks whose labels were dropped, if labels are used. pooled: given if pooled blocks are
        used; then the owner of each partition that has such rows must be running, and the ranks that wrote them must be
        known as exactly as eligible ones, whether or not they are eligible. Ranks that were removed write no evictions,
        and are not looked at. basis: from before the answer's overlap was read. If something can be trusted again since
        then, the overlap may be older than that.
        """
        base, at = base_of(ranks)
        if isinstance(base, tuple) and len(base) >= _COLUMNS_FROM:
            trust = self._assess_columns(base, at, predicted, now_ms, unfed, ranks_missing_labels)
        else:
            trust = self._assess_each(ranks, predicted, now_ms, unfed, ranks_missing_labels)
        if trust.reason is None and pooled is not None:
            if pooled.n_over_capacity:
                return _DEGRADED[DegradedReason.POOLED_OVER_CAPACITY]
            for partition in pooled.partitions:
                reason = self._degraded_by_owner(partition, now_ms)
                if reason is None and not self._knows_pooled(partition, now_ms):
                    reason = DegradedReason.OWNER_BEHIND
                if reason is not None:
                    return _DEGRADED[_POOLED[reason]]
            if pooled.ranks and self._any_is_unknown(pooled.ranks, unfed):
                return _DEGRADED[DegradedReason.POOLED_RANK_UNKNOWN]
            ahead = self._rank_trusted_since_ms
            if ahead and not ahead.keys().isdisjoint(pooled.ranks):
                return _DEGRADED[DegradedReason.POOLED_RANK_UNKNOWN]
        if trust.reason is None and basis is not None:
            if basis.improvements != self.improvements:
                return _DEGRADED[self._improved]
            if pooled is not None and basis.pooled_improvements != self.pooled_improvements:
                return _DEGRADED[DegradedReason.POOLED_OWNER_BEHIND]
        return trust

    def _any_is_unknown(self, ranks: tuple[RankId, ...], unfed: Set[WorkerId]) -> bool:
        """Whether any of these ranks makes answers degraded by its own state, without those that were removed."""
        columns = self._columns_of(ranks)
        if columns.version != self._version or columns.unfed is not unfed:
            self._refresh(columns, unfed)
        if columns.first == _NOWHERE:
            return False
        known = [self.progress.get(ranks[at]) for at in np.flatnonzero(columns.own >= _FIRST_REASON).tolist()]
        return any(progress is not None and progress.health is not Health.REMOVED for progress in known)

    def _assess_columns(
        self,
        base: tuple[RankId, ...],
        at: Int64Array | None,
        predicted: Set[RankId],
        now_ms: int,
        unfed: Set[WorkerId],
        ranks_missing_labels: Set[RankId],
    ) -> Trust:
        """Assess the ranks at the positions `at` of `base`, which are ascending; None for all of them.

        Several reasons of one rank count in the order in which `_assess_each` checks them, and those of several ranks
        in the order of the ranks.
        """
        columns = self._columns_of(base)
        if columns.version != self._version or columns.unfed is not unfed:
            self._refresh(columns, unfed)
        position, approximate = columns.own_of(at)
        found: list[tuple[int, int, DegradedReason]] = []
        if position != _NOWHERE:
            found.append((position, _OWN, _OWN_REASONS[columns.own.item(position) - _FIRST_REASON]))
        if self._incomplete:
            position = self._first_lacking(columns, at)
            found.append((position, _RECORDS, DegradedReason.OVER_CAPACITY))
        if ranks_missing_labels:
            position = columns.first_of(ranks_missing_labels, at)
            found.append((position, _LABELS, DegradedReason.LABELS_OVER_CAPACITY))
        trusted_until_ms = self._owner_trusted_until_ms
        for partition in columns.distinct:
            if trusted_until_ms.get(partition, -1) < now_ms:
                reason = self._degraded_by_owner(partition, now_ms)
                if reason is not None:
                    found.append((columns.first_in(partition, at), _OWNER, reason))
        if found:
            position, _, reason = min(found)
            if position != _NOWHERE:
                return _DEGRADED[reason]
        if approximate or (predicted and columns.first_of(predicted, at) != _NOWHERE):
            return APPROXIMATE
        return _TRUSTED[AnswerMode.EXACT]

    def count(
        self, ranks: tuple[RankId, ...], now_ms: int, unfed: Set[WorkerId]
    ) -> tuple[int, Counter[DegradedReason]]:
        """Assess each of these ranks by itself: how many are approximate, and how many degraded, by reason."""
        columns = self._columns_of(ranks)
        self._refresh(columns, unfed)
        left = columns.own < _FIRST_REASON  # ranks without a reason
        counts: Counter[DegradedReason] = Counter()
        for number, n in zip(*np.unique(columns.own[~left], return_counts=True), strict=True):
            counts[_OWN_REASONS[number - _FIRST_REASON]] = int(n)
        for rank in self._incomplete:
            position = columns.position.get(rank)
            if position is not None and left[position] and self._lacks_records(rank):
                counts[DegradedReason.OVER_CAPACITY] += 1
                left[position] = False
        for partition in columns.distinct:
            reason = self._degraded_by_owner(partition, now_ms)
            if reason is not None:
                here = left & (columns.partitions == partition)
                counts[reason] += int(here.sum())
                left &= ~here
        return int((columns.own[left] == _IS_APPROXIMATE).sum()), +counts

    def _first_lacking(self, columns: _RankColumns, at: Int64Array | None) -> int:
        """First position of a rank of which the index lacks records; _NOWHERE if there is none."""
        if columns.n_incomplete != self._n_incomplete:  # whether they still lack records depends on their epochs
            known = (columns.position.get(rank) for rank in self._incomplete)
            columns.incomplete = sorted(position for position in known if position is not None)
            columns.n_incomplete = self._n_incomplete
        for position in columns.incomplete:
            if _includes(at, position) and self._lacks_records(columns.ranks[position]):
                return position
        return _NOWHERE

    def _columns_of(self, ranks: tuple[RankId, ...]) -> _RankColumns:
        columns = self._columns.get(ranks)
        if columns is None or columns.numbering != self._numbering:
            if len(self._numbers) + len(ranks) > _NUMBERED_MAX:
                self._numbers.clear()
                self._numbering += 1
            numbers = np.array([self._number_of(rank) for rank in ranks], dtype=np.int64)
            partitions = np.array([self._partition(rank.worker_id) for rank in ranks], dtype=np.int64)
            columns = _RankColumns(ranks, self._numbering, numbers, partitions)
            self._columns.put(ranks, columns)
        return columns

    def _number_of(self, rank: RankId) -> int:
        number = self._numbers.get(rank)
        if number is None:
            number = self._numbers[rank] = len(self._numbers)
            if number >= len(self._own):
                self._own = np.concatenate([self._own, np.zeros_like(self._own)])
                self._leased = np.concatenate([self._leased, np.zeros_like(self._leased)])
            self._note_own(number, rank)
        return number

    def _refresh(self, columns: _RankColumns, unfed: Set[WorkerId]) -> None:
        """Copy the ranks' own parts, and add to them which bridges are silent."""
        own = self._own[columns.numbers]
        if unfed:
            silent = np.array([rank.worker_id in unfed for rank in columns.ranks], dtype=np.bool_)
            silent &= self._leased[columns.numbers]  # without a lease, no bridge feeds the rank
            silent &= own < _FIRST_REASON
            own[silent] = _OWN_NUMBER[DegradedReason.BRIDGE_SILENT]
        degraded = own >= _FIRST_REASON
        columns.own = own
        columns.first = int(degraded.argmax()) if degraded.any() else _NOWHERE
        columns.approximate = bool((own == _IS_APPROXIMATE).any())
        columns.version, columns.unfed = self._version, unfed

    def _assess_each(
        self,
        ranks: Iterable[RankId],
        predicted: Set[RankId],
        now_ms: int,
        unfed: Set[WorkerId],
        ranks_missing_labels: Set[RankId],
    ) -> Trust:
        worst = AnswerMode.EXACT
        for rank in ranks:
            progress = self.progress.get(rank)
            own = self._own_of(rank)
            if own >= _FIRST_REASON:
                return _DEGRADED[_OWN_REASONS[own - _FIRST_REASON]]
            assert progress is not None  # otherwise there is a reason
            if rank.worker_id in unfed and progress.lease_ms:  # without a lease, no bridge feeds the rank
                return _DEGRADED[DegradedReason.BRIDGE_SILENT]
            if self._lacks_records(rank):
                return _DEGRADED[DegradedReason.OVER_CAPACITY]
            if rank in ranks_missing_labels:
                return _DEGRADED[DegradedReason.LABELS_OVER_CAPACITY]
            reason = self._degraded_by_owner(self._partition(rank.worker_id), now_ms)
            if reason is not None:
                return _DEGRADED[reason]
            if own == _IS_APPROXIMATE or rank in predicted:
                worst = AnswerMode.APPROXIMATE
        return _TRUSTED[worst]

    def _partition(self, worker_id: WorkerId) -> int:
        partition = self._partition_of.get(worker_id)
        return self._note_worker(worker_id) if partition is None else partition

    def _note_worker(self, worker_id: WorkerId) -> int:
        if len(self._partition_of) >= _WORKERS_CACHED_MAX:
            self._partition_of.clear()
        partition = self._partition_of[worker_id] = partition_of(worker_id, self._n_partitions)
        return partition

    def _lacks_records(self, rank: RankId) -> bool:
        return rank in self._incomplete and self._incomplete[rank] == self._epoch_of(rank)

    def _degraded_by_owner(self, partition: int, now_ms: int) -> DegradedReason | None:
        """Return why a partition's owner makes answers degraded: it is silent, or it lags behind one of its sources.

        A lag of this router itself counts as well, and a lag that cannot be determined.
        """
        record, received_ms = self._partitions.get(partition, (None, None))
        if record is None or received_ms is None or now_ms - received_ms > self._stale_after_ms:
            return DegradedReason.OWNER_SILENT
        if not self._is_recent(self._folded, partition, now_ms):
            return DegradedReason.OWNER_BEHIND
        if all(source.behind_ms <= self._behind_after_ms for source in record.sources):
            return None
        return DegradedReason.OWNER_BEHIND

    def _is_recent(self, folded: Mapping[int, AppliedUntil], partition: int, now_ms: int) -> bool:
        until = folded.get(partition)
        return until is not None and until.at_ms is not None and now_ms - until.at_ms <= self._unproven_after_ms

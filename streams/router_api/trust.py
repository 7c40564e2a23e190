"""How far an answer can be trusted: answer modes, degraded reasons, and what they follow from.

What lives here: progress of ranks, partition records with their time of receipt, and which ranks lack records because
the index is over capacity. What must not: keys and bytes of records, and locks (view).
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from streams.core.events import FeedState
from streams.core.ids import Epoch, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
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

#: Workers whose partition is cached: computing it takes 0.4 us, and an answer needs that of every eligible rank. Beyond
#: this limit the cache is cleared.
_WORKERS_CACHED_MAX = 65_536


class AnswerMode(enum.StrEnum):
    """How far an answer's overlap can be trusted (docs/architecture.md)."""

    EXACT = "exact"
    DEGRADED = "degraded"
    APPROXIMATE = "approximate"
    FALLBACK = "fallback"


class DegradedReason(enum.StrEnum):
    """Why an answer is `degraded`: the first reason found, for one eligible rank or for all of them."""

    NO_EVENTS_YET = "no_events_yet"  # no event of the rank is known to have arrived, so its cache is unknown
    BRIDGE_SILENT = "bridge_silent"  # the rank's bridge was not heard from, so that it may have passed on nothing
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
    BOOKINGS_NOT_IN_SYNC = "bookings_not_in_sync"  # Kafka is unreachable; routers lack each other's bookings


@dataclass(frozen=True, slots=True)
class Trust:
    """How far an answer can be trusted. reason: why it is `degraded`; None in every other mode."""

    mode: AnswerMode
    reason: DegradedReason | None = None


# One value of each kind is shared, since every answer has one.
_TRUSTED = {mode: Trust(mode) for mode in AnswerMode}
_DEGRADED = {reason: Trust(AnswerMode.DEGRADED, reason) for reason in DegradedReason}
APPROXIMATE = _TRUSTED[AnswerMode.APPROXIMATE]
FALLBACK = _TRUSTED[AnswerMode.FALLBACK]
NOT_IN_SYNC = _DEGRADED[DegradedReason.BOOKINGS_NOT_IN_SYNC]
_POOLED = {
    DegradedReason.OWNER_SILENT: DegradedReason.POOLED_OWNER_SILENT,
    DegradedReason.OWNER_BEHIND: DegradedReason.POOLED_OWNER_BEHIND,
}


@dataclass(frozen=True, slots=True)
class PooledRows:
    """What the trust in an answer that uses pooled blocks depends on.

    n_over_capacity: rows that were dropped. partitions: those whose owners wrote the rows that there are.
    """

    n_over_capacity: int
    partitions: tuple[int, ...]


class TrustTracker:
    """Keeps what limits the trust in answers. Not thread-safe: the view calls it under its lock.

    progress: the last progress record of each rank. stale_after_ms, behind_after_ms: the settings of these names.
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
        # Ranks of which the index lacks a record because it was over capacity, with their epoch at that time: what the
        # index has of them is wrong until a newer epoch begins.
        self._incomplete: dict[RankId, Epoch] = {}

    def note_partition(self, record: PartitionRecord, received_ms: int | None) -> None:
        """Take in a partition record. received_ms: None if it was written before this router had read to the end."""
        self._partitions[record.partition] = (record, received_ms)
        self._folded[record.partition].note_applied(
            {source.topic: SourceOffset(source.topic_id, source.applied_offset + 1) for source in record.sources}
        )

    def note_ends(self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset]) -> None:
        """Take in where the sources of a partition end, as the broker was asked for at this time."""
        self._ends[partition] = ends
        self._folded[partition].note_ends(asked_ms, ends)

    def note_pooled_ends(
        self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset], folded: Mapping[str, SourceOffset]
    ) -> None:
        """Take in where the changelog of pooled blocks ends, and up to where it is folded."""
        self._folded_pooled[partition].note_applied(folded)
        self._folded_pooled[partition].note_ends(asked_ms, ends)

    def note_over_capacity(self, rank: RankId) -> bool:
        """Mark a rank as incomplete; return True if it was complete before."""
        epoch = self._epoch_of(rank)
        if epoch is None or self._incomplete.get(rank) == epoch:
            return False
        self._incomplete[rank] = epoch
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
        ranks: Iterable[RankId],
        predicted: Set[RankId],
        now_ms: int,
        *,
        unfed: Set[WorkerId] = _NO_WORKERS,
        ranks_missing_labels: Set[RankId] = _NO_RANKS,
        pooled: PooledRows | None = None,
    ) -> Trust:
        """Return the least trust that any of these ranks deserves.

        predicted: ranks whose score is a prediction. unfed: workers whose bridge is silent. ranks_missing_labels: ranks
        whose labels were dropped, if labels are used. pooled: given if pooled blocks are used; then the owner of each
        partition that has such rows must be running, whether or not the ranks that wrote them are eligible.
        """
        worst = AnswerMode.EXACT
        fresh: set[int] = set()
        progress_of, partitions, incomplete = self.progress, self._partition_of, self._incomplete
        for rank in ranks:  # names of this function and this module, since attributes would take half of the time
            progress = progress_of.get(rank)
            if progress is None:
                return _DEGRADED[DegradedReason.NO_EVENTS_YET]
            health = progress.health
            if health is not _EXACT and (health is Health.DEGRADED or health is Health.REMOVED):
                return _DEGRADED[DegradedReason.EVENTS_LOST if health is Health.DEGRADED else DegradedReason.REMOVED]
            feed = progress.feed
            if feed:
                unproven = feed is FeedState.UNPROVEN
                return _DEGRADED[DegradedReason.NO_EVENTS_YET if unproven else DegradedReason.FEED_BEHIND]
            if unfed and rank.worker_id in unfed and progress.lease_ms:  # without a lease, no bridge feeds the rank
                return _DEGRADED[DegradedReason.BRIDGE_SILENT]
            if incomplete and self._lacks_records(rank):
                return _DEGRADED[DegradedReason.OVER_CAPACITY]
            if ranks_missing_labels and rank in ranks_missing_labels:
                return _DEGRADED[DegradedReason.LABELS_OVER_CAPACITY]
            partition = partitions.get(rank.worker_id)
            if partition is None:
                partition = self._note_worker(rank.worker_id)
            if partition not in fresh:
                reason = self._degraded_by_owner(partition, now_ms)
                if reason is not None:
                    return _DEGRADED[reason]
                fresh.add(partition)
            if health is not _EXACT or (predicted and rank in predicted):
                worst = AnswerMode.APPROXIMATE
        if pooled is not None:
            if pooled.n_over_capacity:
                return _DEGRADED[DegradedReason.POOLED_OVER_CAPACITY]
            for partition in pooled.partitions:
                reason = None if partition in fresh else self._degraded_by_owner(partition, now_ms)
                if reason is None and not self._is_recent(self._folded_pooled, partition, now_ms):
                    reason = DegradedReason.OWNER_BEHIND
                if reason is not None:
                    return _DEGRADED[_POOLED[reason]]
        return _TRUSTED[worst]

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

"""How far the owners of partitions can be trusted: whether each is running, and how far behind its sources it is.

What lives here: partition records with their times of receipt, the ends of the source logs, and up to when this router
has folded them. What must not: what the ranks of a partition report about themselves (rank_trust), and locks
(trust_tracker, which owns this state).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from streams.core.routing.trust import DegradedReason
from streams.kafka.applied_until import AppliedUntil, Lag, SourceOffset, records_behind
from streams.kafka.topic_watch import READINGS_PER_TOLERATED_LAG, read_every_ms
from streams.tables.records import PartitionRecord

#: How long the ends of the logs are not trusted after an outage of the broker. Producers reconnect within 1.5 s
#: (`streams.kafka.clients.producer`) and then send what has waited. An end that was read before that would make
#: answers exact that lack all the events of the outage.
SETTLE_MS = 3000


class OwnerTrust:
    """The owners of all partitions. Not thread-safe.

    Times are those of this router's monotonic clock.
    """

    def __init__(self, n_partitions: int, stale_after_ms: int, behind_after_ms: int) -> None:
        self._n_partitions = n_partitions
        self._stale_after_ms = stale_after_ms
        self._behind_after_ms = behind_after_ms
        # The ends of the sources are read periodically, and cannot be newer than that.
        self._unproven_after_ms = max(behind_after_ms, READINGS_PER_TOLERATED_LAG * read_every_ms(behind_after_ms))
        # By partition, the last time at which its owner does not make answers degraded, as far as is known now.
        self._trusted_until_ms: dict[int, int] = {}
        # Since when an owner can be trusted again. Pooled blocks are in another changelog, so answers that use them
        # wait until that changelog is folded up to this time.
        self._trusted_since_ms: dict[int, int] = {}
        # Partition records with their time of receipt. The time is None for a record that was written before this
        # router had read to the end of the log: such a record does not show that the owner is still running.
        self._records: dict[int, tuple[PartitionRecord, int | None]] = {}
        # By partition, up to which time this router has folded what was appended to the sources, by its own clock and
        # its own readings of their ends. This includes every delay: an owner that lags, is dead or is not the owner any
        # more, Kafka, and this router's own reading of the changelog, where a partition record comes after the records
        # of the same transaction.
        self._folded: defaultdict[int, AppliedUntil] = defaultdict(lambda: AppliedUntil(SETTLE_MS))
        # The same for the changelog of pooled blocks, whose records are not in order with the partition records.
        self._folded_pooled: defaultdict[int, AppliedUntil] = defaultdict(AppliedUntil)
        self._ends: dict[int, Mapping[str, SourceOffset]] = {}  # by partition, where its sources ended when last read

    def note_record(self, record: PartitionRecord, received_ms: int | None) -> bool:
        """Take in a partition record; return whether its owner can be trusted again.

        received_ms: None if the record was written before this router had read to the end.
        """
        self._records[record.partition] = (record, received_ms)
        self._folded[record.partition].note_applied(
            {source.topic: SourceOffset(source.topic_id, source.applied_offset + 1) for source in record.sources}
        )
        return self._update(record.partition, received_ms)

    def note_ends(self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset], now_ms: int) -> bool:
        """Take in where the sources of a partition ended at `asked_ms`; return whether its owner is trusted again."""
        self._ends[partition] = ends
        self._folded[partition].note_ends(asked_ms, ends)
        return self._update(partition, now_ms)

    def _update(self, partition: int, now_ms: int | None) -> bool:
        """Note until when `_reason` returns None, unless something else is noted before.

        now_ms: None if the owner cannot be trusted now. Returns whether it can be trusted again.
        """
        record, received_ms = self._records.get(partition, (None, None))
        folded_until_ms = self._folded[partition].at_ms
        if (
            record is None
            or received_ms is None
            or folded_until_ms is None
            or any(source.behind_ms > self._behind_after_ms for source in record.sources)
        ):
            self._trusted_until_ms.pop(partition, None)
            return False
        before_ms = self._trusted_until_ms.get(partition, -1)
        until_ms = min(received_ms + self._stale_after_ms, folded_until_ms + self._unproven_after_ms)
        self._trusted_until_ms[partition] = until_ms
        if now_ms is None or not before_ms < now_ms <= until_ms:
            return False
        self._trusted_since_ms[partition] = now_ms
        return True

    def note_pooled_ends(
        self,
        partition: int,
        asked_ms: int,
        ends: Mapping[str, SourceOffset],
        folded: Mapping[str, SourceOffset],
        now_ms: int,
    ) -> bool:
        """Take in where the changelog of pooled blocks ended at `asked_ms`, and up to where it is folded.

        Returns whether the pooled rows of the partition can be trusted again.
        """
        was_folded = self.has_folded_pooled(partition, now_ms)
        self._folded_pooled[partition].note_applied(folded)
        self._folded_pooled[partition].note_ends(asked_ms, ends)
        return not was_folded and self.has_folded_pooled(partition, now_ms)

    def pooled_until_ms(self, partition: int) -> int | None:
        """Up to which time the changelog of pooled blocks is folded; None if that is not known."""
        return self._folded_pooled[partition].at_ms

    def has_folded_pooled(self, partition: int, now_ms: int) -> bool:
        """Whether the pooled rows of a partition are folded as far as trust in its owner needs it."""
        if not self._is_recent(self._folded_pooled, partition, now_ms):
            return False
        until_ms = self._folded_pooled[partition].at_ms
        assert until_ms is not None  # otherwise it is not recent
        return until_ms >= self._trusted_since_ms.get(partition, until_ms)

    def reasons(self, partitions: Iterable[int], now_ms: int) -> list[tuple[int, DegradedReason]]:
        """Return those of these partitions whose owners make answers degraded, each with its reason."""
        trusted_until_ms = self._trusted_until_ms
        expired = [partition for partition in partitions if trusted_until_ms.get(partition, -1) < now_ms]
        reasons = ((partition, self._reason(partition, now_ms)) for partition in expired)
        return [(partition, reason) for partition, reason in reasons if reason is not None]

    def _reason(self, partition: int, now_ms: int) -> DegradedReason | None:
        """Return why a partition's owner makes answers degraded: it is silent, or it lags behind one of its sources.

        A lag of this router itself counts as well, and a lag that cannot be determined.
        """
        record, received_ms = self._records.get(partition, (None, None))
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

    def applied_offsets(self) -> dict[int, int]:
        """Source offset that each partition's owner had applied when it wrote its last partition record."""
        return {
            partition: record.sources[0].applied_offset
            for partition, (record, _) in self._records.items()
            if record.sources
        }

    def lags(self, now_ms: int) -> dict[int, Lag]:
        """How far this router's view is behind the sources of each partition, its owner's delay included."""
        return {partition: self._lag(partition, now_ms) for partition in range(self._n_partitions)}

    def _lag(self, partition: int, now_ms: int) -> Lag:
        ends, folded = self._ends.get(partition), self._folded.get(partition)
        record, _ = self._records.get(partition, (None, None))
        n_records = None
        if ends is not None and record is not None:
            applied = {
                source.topic: SourceOffset(source.topic_id, source.applied_offset + 1) for source in record.sources
            }
            n_records = records_behind(ends, applied)
        until_ms = None if folded is None else folded.at_ms
        return Lag(n_records, None if until_ms is None else max(now_ms - until_ms, 0))

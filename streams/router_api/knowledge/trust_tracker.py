"""How far the answers of a router can be trusted: the rule, and the lock of what it depends on.

What lives here: the combination of what ranks (rank_trust), owners of partitions (owner_trust), pooled blocks and
labels contribute, and whether an overlap was read before trust in something returned. What must not: keys and bytes of
records (index_view), and the values that answers have (core.routing.trust).

State: what trust depends on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from streams.core.ids import Epoch, Int64Array, RankId, WorkerId
from streams.core.reducer.ordering import Progress
from streams.core.routing.eligibility import base_of
from streams.core.routing.trust import (
    APPROXIMATE,
    DEGRADED,
    DISAGREEING,
    EXACT,
    AnswerMode,
    DegradedReason,
    Trust,
    TrustSnapshot,
)
from streams.kafka.applied_until import Lag, SourceOffset
from streams.router_api.knowledge.owner_trust import OwnerTrust
from streams.router_api.knowledge.rank_trust import FIRST_REASON, IS_APPROXIMATE, NOWHERE, OWN_REASONS, RankTrust
from streams.tables.records import PartitionRecord

_NO_RANKS: frozenset[RankId] = frozenset()
_NO_WORKERS: frozenset[WorkerId] = frozenset()

# The order in which the reasons of one rank count.
_OWN, _RECORDS, _LABELS, _OWNER = range(4)

#: The reasons of owners, in an answer that uses pooled blocks of theirs.
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


class TrustTracker:
    """Keeps what limits the trust in answers. Thread-safe.

    Its lock is held for a few microseconds, since every answer takes it. A thread that needs other locks of the view as
    well takes this one last.

    recoveries: grows whenever a rank or an owner can be trusted again. An overlap that was read before may lack the
    records that the trust is based on. pooled_recoveries: the same for owners of pooled blocks.
    """

    def __init__(
        self,
        n_partitions: int,
        stale_after_ms: int,
        behind_after_ms: int,
        epoch_of: Callable[[RankId], Epoch | None],
        recoveries: int = 0,
        disagreeing: Mapping[RankId, Hashable] | None = None,
    ) -> None:
        """stale_after_ms, behind_after_ms: the settings of these names. epoch_of: the greatest epoch that the index has
        seen of a rank. recoveries: more than those of a tracker that this one replaces. disagreeing: see RankTrust."""
        self._lock = threading.Lock()
        self._ranks = RankTrust(n_partitions, epoch_of, disagreeing)
        self._owners = OwnerTrust(n_partitions, stale_after_ms, behind_after_ms)
        self.recoveries = recoveries
        self.pooled_recoveries = 0
        self._last_reason = DegradedReason.OWNER_BEHIND  # why answers were degraded before the last recovery
        # Since when ranks can be trusted again. Pooled blocks are in another changelog, so answers that use them wait
        # until it is folded up to then.
        self._rank_trusted_since_ms: dict[RankId, int] = {}

    @property
    def progress(self) -> Mapping[RankId, Progress]:
        """The last progress record of each rank. It changes only while the index is folded."""
        return self._ranks.progress

    def note_progress(self, rank: RankId, progress: Progress | None) -> None:
        """Take in the progress record of a rank, or its tombstone; see `RankTrust.note_progress`."""
        with self._lock:
            self._ranks.note_progress(rank, progress)
            if progress is None:
                self._rank_trusted_since_ms.pop(rank, None)

    def note_partition(self, record: PartitionRecord, received_ms: int | None) -> None:
        """Take in a partition record. received_ms: None if it was written before this router had read to the end."""
        with self._lock:
            for rank, reason in self._ranks.settle(record.partition):
                if received_ms is not None:  # otherwise the owner is not trusted yet
                    self._rank_trusted_since_ms[rank] = received_ms
                self._note_recovery(reason)
            if self._owners.note_record(record, received_ms):
                self._note_recovery(DegradedReason.OWNER_BEHIND)

    def note_ends(
        self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset], now_ms: int | None = None
    ) -> None:
        """Take in where the sources of a partition end, as the broker was asked for at this time. now_ms: if later."""
        with self._lock:
            if self._owners.note_ends(partition, asked_ms, ends, asked_ms if now_ms is None else now_ms):
                self._note_recovery(DegradedReason.OWNER_BEHIND)

    def note_pooled_ends(
        self,
        partition: int,
        asked_ms: int,
        ends: Mapping[str, SourceOffset],
        folded: Mapping[str, SourceOffset],
        now_ms: int | None = None,
    ) -> None:
        """Take in where the changelog of pooled blocks ends, and up to where it is folded. now_ms: if later."""
        with self._lock:
            now_ms = asked_ms if now_ms is None else now_ms
            recovered = self._owners.note_pooled_ends(partition, asked_ms, ends, folded, now_ms)
            waiting, until_ms = self._rank_trusted_since_ms, self._owners.pooled_until_ms(partition)
            if waiting and until_ms is not None:
                for rank in [rank for rank, since_ms in waiting.items() if since_ms <= until_ms]:
                    if self._ranks.partition(rank.worker_id) == partition:
                        del waiting[rank]
                        self.pooled_recoveries += 1
            self.pooled_recoveries += recovered

    def note_over_capacity(self, rank: RankId) -> bool:
        """Mark a rank as incomplete; return True if it was complete before."""
        with self._lock:
            return self._ranks.note_over_capacity(rank)

    def note_disagreeing(self, rank: RankId) -> None:
        """Take in that a rank's engine contradicts too often, as `disagreeing` has it by now."""
        with self._lock:
            self._ranks.note_disagreeing(rank)

    def _note_recovery(self, reason: DegradedReason) -> None:
        """reason: why answers were degraded until now."""
        self._last_reason = reason
        self.recoveries += 1

    def applied_offsets(self) -> dict[int, int]:
        """Source offset that each partition's owner had applied when it wrote its last partition record."""
        with self._lock:
            return self._owners.applied_offsets()

    def lags(self, now_ms: int) -> dict[int, Lag]:
        """How far this router's view is behind the sources of each partition, its owner's delay included."""
        with self._lock:
            return self._owners.lags(now_ms)

    def assess(
        self,
        ranks: Sequence[RankId],
        predicted: Set[RankId],
        now_ms: int,
        *,
        bridge_silent: Set[WorkerId] = _NO_WORKERS,
        ranks_missing_labels: Set[RankId] = _NO_RANKS,
        pooled: PooledRows | None = None,
        before: TrustSnapshot | None = None,
    ) -> Trust:
        """Return the least trust that any of these ranks deserves.

        predicted: ranks whose score is a prediction. bridge_silent: workers whose bridge is silent or does not feed
        them. ranks_missing_labels: ranks whose labels were dropped, if labels are used. pooled: given if pooled blocks
        are used. Then the owner of each partition that has such rows must be running, and the ranks that wrote them
        must be known as exactly as eligible ones, whether or not they are eligible. Ranks that were removed write no
        evictions, and are not considered. before: taken before the answer's overlap was read. If something can be
        trusted again since then, the overlap may be older than that.
        """
        with self._lock:
            base, positions = base_of(ranks)
            trust = self._assess_ranks(base, positions, predicted, now_ms, bridge_silent, ranks_missing_labels)
            if trust.mode is AnswerMode.DEGRADED:
                return trust
            reason = None if pooled is None else self._pooled_reason(pooled, now_ms, bridge_silent)
            if reason is None and before is not None:
                if before.recoveries != self.recoveries:
                    reason = self._last_reason
                elif pooled is not None and before.pooled_recoveries != self.pooled_recoveries:
                    reason = DegradedReason.POOLED_OWNER_BEHIND
            return trust if reason is None else DEGRADED[reason]

    def _assess_ranks(
        self,
        base: Sequence[RankId],
        positions: Int64Array | None,
        predicted: Set[RankId],
        now_ms: int,
        bridge_silent: Set[WorkerId],
        ranks_missing_labels: Set[RankId],
    ) -> Trust:
        """Assess the ranks at these ascending positions of `base`; None for all of them.

        The first rank with a reason decides. Several reasons of one rank count in the order of this function.
        """
        columns = self._ranks.columns(base, bridge_silent)
        position, approximate = columns.first_and_approximate(positions)
        reasons: list[tuple[int, int, DegradedReason]] = []
        if position != NOWHERE:
            reasons.append((position, _OWN, OWN_REASONS[columns.codes.item(position) - FIRST_REASON]))
        position = self._ranks.first_incomplete(columns, positions)
        if position != NOWHERE:
            reasons.append((position, _RECORDS, DegradedReason.OVER_CAPACITY))
        if ranks_missing_labels:
            position = columns.first_of(ranks_missing_labels, positions)
            reasons.append((position, _LABELS, DegradedReason.LABELS_OVER_CAPACITY))
        for partition, reason in self._owners.reasons(columns.distinct, now_ms):
            reasons.append((columns.first_in(partition, positions), _OWNER, reason))
        if reasons:
            position, _, reason = min(reasons)
            if position != NOWHERE:
                return DEGRADED[reason]
        if approximate >= IS_APPROXIMATE:
            return APPROXIMATE if approximate == IS_APPROXIMATE else DISAGREEING
        if predicted and columns.first_of(predicted, positions) != NOWHERE:
            return APPROXIMATE
        return EXACT

    def _pooled_reason(self, pooled: PooledRows, now_ms: int, bridge_silent: Set[WorkerId]) -> DegradedReason | None:
        """Why pooled blocks make an answer degraded; None if they do not."""
        if pooled.n_over_capacity:
            return DegradedReason.POOLED_OVER_CAPACITY
        reasons = dict(self._owners.reasons(pooled.partitions, now_ms))
        for partition in pooled.partitions:
            if partition in reasons:
                return _POOLED[reasons[partition]]
            if not self._owners.has_folded_pooled(partition, now_ms):
                return DegradedReason.POOLED_OWNER_BEHIND
        if pooled.ranks and self._ranks.any_is_unknown(pooled.ranks, bridge_silent):
            return DegradedReason.POOLED_RANK_UNKNOWN
        waiting = self._rank_trusted_since_ms
        if waiting and not waiting.keys().isdisjoint(pooled.ranks):
            return DegradedReason.POOLED_RANK_UNKNOWN
        return None

    def count(
        self, ranks: tuple[RankId, ...], now_ms: int, bridge_silent: Set[WorkerId]
    ) -> tuple[int, Counter[DegradedReason]]:
        """Assess each of these ranks by itself: how many are approximate, and how many degraded, by reason."""
        with self._lock:
            columns = self._ranks.columns(ranks, bridge_silent)
            left = columns.codes < FIRST_REASON  # ranks without a reason
            counts: Counter[DegradedReason] = Counter()
            for code, n in zip(*np.unique(columns.codes[~left], return_counts=True), strict=True):
                counts[OWN_REASONS[code - FIRST_REASON]] = int(n)
            for position in self._ranks.incomplete(columns):
                if left[position]:
                    counts[DegradedReason.OVER_CAPACITY] += 1
                    left[position] = False
            for partition, reason in self._owners.reasons(columns.distinct, now_ms):
                here = left & (columns.partitions == partition)
                counts[reason] += int(here.sum())
                left &= ~here
            return int((columns.codes[left] >= IS_APPROXIMATE).sum()), +counts

"""What a router knows of its scope: the fleet, the index, pooled blocks and labels, predictions, and the trust in them.

What lives here: the parts, how they replace each other when all topics are read again, and questions that concern
several of them. What must not: the folds, each of which is in the module of its part.

Each part has its own lock. A thread that folds the index may take the lock of any other part; the fleet's may take
those of predictions and of engine reports; that of trust is always the last one, and is held for a few microseconds,
because every answer takes it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set

from streams.core.block_facts.moe_labels import MoeSelector
from streams.core.cxl_memory import PoolSpeeds
from streams.core.hashing import unpack_hashes
from streams.core.ids import HashArray, RankId
from streams.core.index.interface import PrefixScores
from streams.core.index.tree_fold import TreeRunFold
from streams.core.routing.supplementary import SupplementaryMatches, locked_holders
from streams.core.routing.trust import APPROXIMATE, FALLBACK, AnswerMode, DegradedReason, Trust, TrustSnapshot
from streams.cxl.records import POOL_KEY_PREFIX
from streams.errors import BadRecord
from streams.kafka.applied_until import Lag, SourceOffset
from streams.router_api.knowledge.fleet_view import FleetView, RankCounts
from streams.router_api.knowledge.index_view import IndexView, new_tree
from streams.router_api.knowledge.predictions import Predictions
from streams.router_api.knowledge.rank_trust import cache_of
from streams.router_api.knowledge.run_changes import RunChanges
from streams.router_api.knowledge.served_models import ServedModels
from streams.router_api.knowledge.supplementary_facts import SupplementaryFacts
from streams.router_api.knowledge.trust_tracker import TrustTracker
from streams.settings import RouterSettings, listed

_NO_SCORES = PrefixScores({})
_NO_RANKS: frozenset[RankId] = frozenset()

#: An overlap that was read longer ago is read again before a decision. Exact answers may be `behind_after_ms` old, and
#: it takes far less from the one to the other, unless the thread that answers was kept busy.
_OVERLAP_VALID_MS = 100


class View:
    """The parts. Thread-safe.

    fleet, index, facts and trust are replaced by `reset`; so look them up each time. predictions, run_changes,
    disagreeing and served stay. disagreeing: ranks whose engines contradict too often, as the audit finds it. served:
    which workers' records are kept.
    """

    fleet: FleetView
    index: IndexView
    facts: SupplementaryFacts
    trust: TrustTracker

    def __init__(
        self, settings: RouterSettings, now_ms: Callable[[], int], make_tree: Callable[[], TreeRunFold] = new_tree
    ) -> None:
        """now_ms: this process's monotonic clock. Ages count from receipt, so that other machines' clocks do not
        matter. make_tree: makes an empty index."""
        self._settings = settings
        self._reads_index = settings.reads_index
        self._now_ms = now_ms
        self._make_tree = make_tree
        self.predictions = Predictions(settings, now_ms)
        self.run_changes = RunChanges()
        self.disagreeing: dict[RankId, Hashable] = {}
        self.served = ServedModels(listed(settings.models), settings.partitions, self)
        self._begin(0, 0)

    def _begin(self, recoveries: int, changes: int) -> None:
        """Replace all parts by empty ones.

        Trust comes first, so that no answer trusts the new index with what the records of the old one showed. The fleet
        comes last, since `changes` must not return to an earlier value.
        """
        settings, runs, lock = self._settings, self._make_tree(), threading.Lock()
        self.trust = TrustTracker(
            settings.partitions,
            settings.stale_after_ms,
            settings.behind_after_ms,
            runs.epoch_of,
            recoveries,
            self.disagreeing,
        )
        self.predictions.forget_registry()
        self.facts = SupplementaryFacts(
            settings.partitions,
            settings.schema_ids,
            runs.epoch_of,
            locked_holders(runs.holders_along, lock),
            self.served.serves if self.served.models else None,
            PoolSpeeds(settings.pool_load_gb_per_s, settings.pool_class_load_gb_per_s),
        )
        fleet = FleetView(settings, self._now_ms, self.trust.progress, self.predictions, self.served, changes)
        self.index = IndexView(settings, runs, lock, self.trust, self.facts, fleet, self.predictions, self.run_changes)
        self.fleet = fleet

    def reset(self) -> None:
        """Drop everything, so that the topics can be folded again from their beginnings."""
        self.served.begin_again()
        # What was read before is older than all trust afterwards.
        self._begin(self.trust.recoveries + 1, self.changes + 1)

    @property
    def changes(self) -> int:
        """Grows with each change of what `overlap` and `FleetView.eligible` return."""
        return self.fleet.changes + self.index.changes + self.predictions.changes

    # -- records -------------------------------------------------------------------------------------------------------

    def fold_index(self, key: bytes, value: bytes | None, live: bool = True) -> None:
        """Fold one record of the index changelog. Raises BadRecord; nothing is changed then. See `fold_index_batch`."""
        for _, exc in self.fold_index_batch([(key, value)], live):
            raise exc

    def fold_index_batch(
        self, records: Sequence[tuple[bytes, bytes | None]], live: bool = True
    ) -> list[tuple[int, BadRecord]]:
        """Fold records of the index changelog in order; return those that cannot be used, each with its position.

        A bad record changes nothing, and does not keep the others from being folded. live: the records were written
        after this reader had reached the end of their partition.
        """
        return self.index.fold_batch(records, self._now_ms() if live else None)

    def forget_ranks(self, ranks: Iterable[RankId]) -> None:
        """Drop what the index has of these ranks."""
        self.index.forget_ranks(ranks)

    def fold_worker(self, key: bytes, value: bytes | None, live: bool = True) -> None:
        """Fold one record of the registry: a worker, what belongs to one, a model or a CXL pool. Raises BadRecord.

        live: as in `fold_index_batch`.
        """
        if key.startswith(POOL_KEY_PREFIX):
            self.facts.fold_pool(key, value)
        else:
            self.fleet.fold(key, value, live)

    def fold_pooled(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of the changelog of pooled blocks. A record that raises BadRecord changes nothing."""
        self.facts.fold_pooled(key, value)

    def fold_report(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of worker-metrics. A record that raises BadRecord changes nothing."""
        if not self.served.skips_reports_of(key):
            self.fleet.engines.fold(key, value)

    def note_ends(self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset]) -> None:
        """Take in where the sources of a partition end; see `TrustTracker.note_ends`."""
        self.trust.note_ends(partition, asked_ms, ends, self._now_ms())

    def note_pooled_ends(
        self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset], folded: Mapping[str, SourceOffset]
    ) -> None:
        """Take in where the changelog of pooled blocks ends; see `TrustTracker.note_pooled_ends`."""
        self.trust.note_pooled_ends(partition, asked_ms, ends, folded, self._now_ms())

    # -- what decisions read -------------------------------------------------------------------------------------------

    def overlap(self, local: HashArray) -> tuple[PrefixScores, frozenset[RankId]]:
        """Score every rank by folded records and predictions; also return the ranks whose score is a prediction.

        If this router does not read the index, predictions are the only source. local: uint64[n_blocks] from the root.
        """
        known = self.index.find_matches(local) if self._reads_index else _NO_SCORES
        return self.predictions.with_predicted(known, local)

    def supplementary(
        self, sequence: HashArray, model: str, moe: MoeSelector | None, *, pooled: bool
    ) -> SupplementaryMatches | None:
        """Return what a request matches in addition to the ranks' own prefixes; None if there can be none.

        sequence: uint64[n], the request's sequence hashes, contiguous. moe: which labels match; None for no labels.
        pooled: whether pooled blocks are used.
        """
        facts = self.facts
        if not facts.wants(moe, pooled=pooled):
            return None
        return facts.matches(sequence, model, moe, self.fleet.numbers(), pooled=pooled)

    def snapshot(self) -> TrustSnapshot:
        """What the trust in overlaps depends on that are read from now on."""
        trust = self.trust
        silent = self.fleet.engines.bridge_silent()
        return TrustSnapshot(trust.recoveries, trust.pooled_recoveries, silent, self._now_ms(), self.run_changes.n)

    def is_outdated(self, snapshot: TrustSnapshot) -> bool:
        """Whether overlaps that were read after this snapshot should be read again before a decision."""
        trust = self.trust
        return (
            snapshot.recoveries != trust.recoveries
            or snapshot.pooled_recoveries != trust.pooled_recoveries
            or self._now_ms() - snapshot.taken_at_ms > _OVERLAP_VALID_MS
            or snapshot.bridge_silent is not self.fleet.engines.bridge_silent()
        )

    def assess(
        self,
        ranks: Sequence[RankId],
        predicted: Set[RankId] = _NO_RANKS,
        *,
        pooled: str | None = None,
        labelled: bool = False,
        before: TrustSnapshot | None = None,
    ) -> Trust:
        """Return the least trust that any of these ranks deserves. predicted: ranks whose score is a prediction.

        pooled: the model, if pooled blocks are used, so that the owners of all of them must be running, and the ranks
        known that put blocks of this model into pools. labelled: labels are used, so that none of these ranks may lack
        any. before: from before the overlaps were read, which may be older than what is trusted by now.
        """
        if not self._reads_index:
            return APPROXIMATE if self.predictions.is_for_all_ranks else FALLBACK
        silent = self.fleet.engines.bridge_silent()
        if before is not None and not (before.bridge_silent is silent or before.bridge_silent <= silent):
            silent = silent | before.bridge_silent
        return self.trust.assess(
            ranks,
            predicted,
            self._now_ms(),
            bridge_silent=silent,
            ranks_missing_labels=self.index.ranks_missing_labels(ranks) if labelled else _NO_RANKS,
            pooled=None if pooled is None else self.facts.pooled_rows(pooled),
            before=before,
        )

    # -- what the audit reads ------------------------------------------------------------------------------------------

    def held_prefix(self, rank: RankId, packed: bytes) -> int:
        """How many leading blocks of a prompt a rank holds. packed: the prompt's sequence hashes."""
        return self.index.held_prefix(rank, unpack_hashes(packed))

    def is_known(self, rank: RankId) -> bool:
        """Whether a rank's records are complete up to now."""
        return self.assess([rank]).mode is not AnswerMode.DEGRADED

    def cache_of(self, rank: RankId) -> Hashable | None:
        """What stays the same until a rank's engine clears its cache or restarts; None for a rank that is not known."""
        return cache_of(self.trust.progress.get(rank))

    # -- what people read ----------------------------------------------------------------------------------------------

    def rank_counts(self) -> RankCounts:
        """Count the registered ranks by state. 1,000 ranks take half a millisecond."""
        ranks = self.fleet.numbers().ranks
        n_approximate, degraded = 0, Counter[DegradedReason]()
        if self._reads_index:
            silent = self.fleet.engines.bridge_silent()
            n_approximate, degraded = self.trust.count(ranks, self._now_ms(), silent)
        elif self.predictions.is_for_all_ranks:
            n_approximate = len(ranks)
        return self.fleet.rank_counts(n_approximate, degraded)

    def lags(self) -> dict[int, Lag]:
        """How far this view is behind the log of events, by partition. Empty if this router does not read the index."""
        return self.trust.lags(self._now_ms()) if self._reads_index else {}

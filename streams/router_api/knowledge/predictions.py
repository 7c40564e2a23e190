"""What ranks are predicted to hold: the blocks of requests that were sent there (docs/architecture.md).

What lives here: which predictions a router makes by its settings, and their lock. What must not: the index of
predictions (core.index.predicted_index), and how far an answer with a prediction can be trusted (trust_tracker).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from streams.core.ids import HashArray, RankId, WorkerId
from streams.core.index.interface import PrefixScores, with_predictions
from streams.core.index.predicted_index import PredictedPrefixIndex
from streams.core.workers import Worker
from streams.settings import RoutingSettings

_NO_RANKS: frozenset[RankId] = frozenset()


class Predictions:
    """The predictions of one router. Thread-safe.

    changes: grows with each change of what `with_predicted` returns. is_for_all_ranks: whether ranks whose engines
    publish events are predicted as well.
    """

    def __init__(self, settings: RoutingSettings, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self.changes = 0
        self._predicted: PredictedPrefixIndex | None = None
        ttl_s = settings.router_predicted_ttl_s if settings.kv_events else settings.router_ttl_s
        if settings.kv_overlap_score_weight > 0.0 and ttl_s > 0.0:
            self._predicted = PredictedPrefixIndex(ttl_s)
        self.is_for_all_ranks = self._predicted is not None
        # The same for engines without events, whose blocks nothing else shows. `router_predicted_ttl_s` does not apply
        # to them, since it is the time until events arrive.
        self._predicted_eventless: PredictedPrefixIndex | None = None
        if settings.reads_index and settings.router_ttl_s > 0.0:
            self._predicted_eventless = PredictedPrefixIndex(settings.router_ttl_s)
        # Workers that have a bridge and publish no events, and all ranks of these workers.
        self._eventless: dict[WorkerId, frozenset[RankId]] = {}
        self._eventless_ranks = _NO_RANKS

    def with_predicted(self, known: PrefixScores, local: HashArray) -> tuple[PrefixScores, frozenset[RankId]]:
        """Add predictions to what the index knows; also return the ranks whose score is a prediction.

        known: of the same request. local: uint64[n_blocks], its local hashes from the root.
        """
        ranks = self._eventless_ranks  # nothing is known exactly of these, whatever is predicted
        if self._predicted is None and not ranks:
            return known, _NO_RANKS
        for predictions in (self._predicted, self._predicted_eventless if ranks else None):
            if predictions is not None:
                with self._lock:
                    predictions.expire(self._now_ms() / 1000)
                    predicted = predictions.find_matches(local)
                known, longer = with_predictions(known, predicted)
                ranks |= longer
        return known, ranks

    def predict(self, rank: RankId, local: HashArray) -> None:
        """Predict that the rank will hold the blocks of a request that was sent to it. local: uint64[n_blocks]."""
        predictions = self._predicted_eventless if rank in self._eventless_ranks else self._predicted
        if predictions is not None and local.size:
            with self._lock:
                self.changes += 1
                predictions.predict(rank, local, self._now_ms() / 1000)

    def note_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Note whether a worker's ranks are predicted because its bridge gets no events of it; None if it has left."""
        with self._lock:
            predictions, former = self._predicted_eventless, self._eventless.get(worker_id, _NO_RANKS)
            is_eventless = worker is not None and worker.lease is not None and worker.events_endpoint is None
            ranks = frozenset(worker.ranks()) if worker is not None and is_eventless else _NO_RANKS
            if predictions is None or ranks == former:
                return
            self.changes += 1
            self._eventless[worker_id] = ranks
            if not ranks:
                del self._eventless[worker_id]
            self._eventless_ranks = _NO_RANKS.union(*self._eventless.values())
            for rank in former - ranks:
                predictions.clear(rank)

    def note_left(self, worker: Worker) -> None:
        """Drop the predictions of the ranks of a worker that left the registry."""
        with self._lock:
            self.changes += 1
            if self._predicted is not None:
                for rank in worker.ranks():
                    self._predicted.clear(rank)

    def note_restart(self, rank: RankId) -> None:
        """Drop the predictions of a rank whose engine restarted and publishes no events."""
        if rank in self._eventless_ranks:
            with self._lock:
                assert self._predicted_eventless is not None  # otherwise no ranks are known to have no events
                self.changes += 1
                self._predicted_eventless.clear(rank)

    def forget_registry(self) -> None:
        """Forget which workers have no events, since the registry is read again from its beginning."""
        with self._lock:
            self.changes += 1
            self._eventless.clear()
            self._eventless_ranks = _NO_RANKS

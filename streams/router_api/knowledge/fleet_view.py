"""A router's read-only copy of the fleet: workers with what belongs to them, models, and the state of their ranks.

What lives here: the fold of the registry (workers, cordons, avoidances, render parities, models), and which ranks
requests may go to. What must not: consuming topics (topic_readers), writing the registry (registry), blocks
(index_view), and how far an answer can be trusted (trust_tracker).

State: the fleet of one router.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from streams.core.block_facts.fact_sets import RankNumbering
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Progress
from streams.core.routing.avoidance import avoided_workers
from streams.core.routing.eligibility import EligibleRanks, FilterReason, WorkerFilter, eligible_ranks, refusals
from streams.core.routing.trust import DegradedReason
from streams.core.workers import (
    Avoidance,
    RenderOutcome,
    RenderParity,
    ServedModel,
    Worker,
    WorkerState,
    differs_in_lease_only,
)
from streams.errors import BadRecord, UnknownModel
from streams.kafka.clients import worker_key
from streams.kafka.records import AVOIDANCES, CORDONS, MODELS, RENDER_PARITIES, decode_worker
from streams.lmcache.feeds import decode_feed
from streams.lmcache.pools import parse_feed
from streams.model_registry import block_size_contradicted
from streams.router_api.knowledge.avoidances import Avoidances
from streams.router_api.knowledge.eligible_cache import EligibleCache
from streams.router_api.knowledge.engine_reports import EngineReports
from streams.router_api.knowledge.predictions import Predictions
from streams.router_api.knowledge.served_models import ServedModels
from streams.settings import ScopeSettings

log = logging.getLogger(__name__)

#: Render parities that are kept. Those of workers that are not registered are kept as well, since a starting router may
#: read them first.
RENDER_PARITIES_MAX = 65_536

_NO_WORKERS: frozenset[WorkerId] = frozenset()
_NO_RANKS: Sequence[RankId] = ()


@dataclass(slots=True)
class _Derived:
    """What follows from the registry. Each value is None until it is needed."""

    numbers: RankNumbering | None = None
    models: frozenset[str] | None = None
    models_by_alias: Mapping[str, str] = field(default_factory=dict)  # known once `models` is
    lists_adapters: bool | None = None  # whether any worker lists its LoRA adapters


@dataclass(frozen=True, slots=True)
class RankCounts:
    """Ranks of registered workers by state. A rank may be in several states. degraded: by the first reason found."""

    registered: int
    cordoned: int
    wrong_block_size: int
    silent: int
    avoided: int
    approximate: int
    degraded: Counter[DegradedReason]


class FleetView:
    """The fold of the registry. Thread-safe.

    changes: grows with each change of what `eligible` returns. workers: the registered workers, each with the state
    that follows from its cordon; read it with `copy` or `get`. engines: what their engines report.
    """

    def __init__(
        self,
        settings: ScopeSettings,
        now_ms: Callable[[], int],
        progress: Mapping[RankId, Progress],
        predictions: Predictions,
        served: ServedModels,
        changes: int = 0,
    ) -> None:
        """now_ms: a monotonic clock. progress: the last progress record of each rank; another thread may change it.
        predictions: learns which workers publish no events. served: which models count; those of others are not
        registered here. changes: more than those of a view that this one replaces.
        """
        self._settings = settings
        self._now_ms = now_ms
        self._progress = progress
        self._predictions = predictions
        self._served_models = served
        # A thread that folds blocks may hold the index's lock when it takes this one, and never the other way round.
        self._lock = threading.Lock()
        self.changes = changes
        self.workers: dict[WorkerId, Worker] = {}
        self._registrations: dict[WorkerId, Worker] = {}  # the records of `workers`, unchanged
        self._cordons: set[WorkerId] = set()
        self.avoidances = Avoidances()
        self._avoided: frozenset[WorkerId] | None = _NO_WORKERS  # those within the limit; None if not known
        self._renders: dict[WorkerId, RenderParity] = {}  # the last one of each worker, also of earlier incarnations
        self._served: dict[str, ServedModel] = {}  # the registry's models
        self._silent: set[RankId] = set()  # ranks that were not heard from within their lease
        self._wrong_size: set[RankId] = set()  # ranks whose events have another block size than the scope's
        self.engines = EngineReports(self.workers, settings.schema_ids, now_ms, settings.behind_after_ms)
        self._eligible = EligibleCache()
        self._derived = _Derived()
        self._last_numbers: RankNumbering | None = None

    # -- the fold ------------------------------------------------------------------------------------------------------

    def fold(self, key: bytes, value: bytes | None, live: bool = True) -> None:
        """Fold one record of the registry: a worker, what belongs to one, or a model. Raises BadRecord.

        live: the record was written after this reader had reached the end of its partition.
        """
        if key.startswith(CORDONS.keys.prefix):
            self._fold_cordon(CORDONS.keys.parse(key), key, value)
        elif key.startswith(MODELS.keys.prefix):
            self._fold_model(key, value)
        elif key.startswith(AVOIDANCES.keys.prefix):
            self._fold_avoidance(key, value, live)
        elif key.startswith(RENDER_PARITIES.keys.prefix):
            self._fold_render(RENDER_PARITIES.keys.parse(key), key, value)
        elif (feed := parse_feed(key.decode(errors="replace"))) is not None:
            self.engines.note_feed(feed, None if value is None else decode_feed(value, self._settings.schema_ids))
        else:
            self._fold_worker(key, value)

    def _fold_worker(self, key: bytes, value: bytes | None) -> None:
        try:
            worker_id = WorkerId(int(key))
        except ValueError as exc:
            raise BadRecord("bad_key", f"{key!r} is not a valid worker id") from exc
        worker = None if value is None else decode_worker(value, self._settings.schema_ids)
        if worker_key(worker_id) != key or (worker is not None and worker.worker_id != worker_id):
            # Its tombstone would have another key than its rank's events, and would never remove it.
            raise BadRecord("wrong_key", f"key {key!r} is not the worker's own")
        former = self._registrations.get(worker_id)
        self._note_worker(
            worker_id, worker if worker is not None and self._served_models.serves(worker.model) else None
        )
        if worker is not None:
            self._served_models.note_worker(worker, former)  # without the lock, which is taken under that of the index

    def _note_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Enter a worker that is registered and serves a model of this router; None for any other one."""
        with self._lock:
            self._predictions.note_worker(worker_id, worker)
            if worker is None:
                self._note_registry_change()
                self._forget_worker(worker_id)
                return
            before = self.workers.get(worker_id)
            self._registrations[worker_id] = worker
            self.workers[worker_id] = worker = self._with_cordon(worker)
            if before is not None and differs_in_lease_only(before, worker):
                self.engines.lease_changed(worker)
            else:
                self._note_registry_change()
                self.engines.registry_changed(worker)

    def _note_registry_change(self) -> None:
        """Drop what is cached about the fleet.

        The renewal of a lease is no such change: a fleet of 1,000 engines renews 500 of them per second, and listing
        its ranks takes a millisecond.
        """
        self._forget_eligible()
        self._derived = _Derived()

    def _forget_worker(self, worker_id: WorkerId) -> None:
        """Drop a worker that left the registry, and what its engine reported."""
        self._registrations.pop(worker_id, None)
        worker = self.workers.pop(worker_id, None)
        self.engines.forget_worker(worker_id)
        if worker is not None:
            self._predictions.note_left(worker)

    def _fold_cordon(self, worker_id: WorkerId, key: bytes, value: bytes | None) -> None:
        if value is not None:
            CORDONS.decode_row(key, value, self._settings.schema_ids)
        with self._lock:
            (self._cordons.discard if value is None else self._cordons.add)(worker_id)
            registered = self._registrations.get(worker_id)
            if registered is not None:
                self.workers[worker_id] = self._with_cordon(registered)
                self._forget_eligible()

    def _with_cordon(self, worker: Worker) -> Worker:
        if worker.worker_id not in self._cordons or worker.state is WorkerState.CORDONED:
            return worker
        return replace(worker, state=WorkerState.CORDONED)

    def _fold_avoidance(self, key: bytes, value: bytes | None, live: bool) -> None:
        """Fold an avoidance. It ends by its time; its tombstone only lets Kafka forget the record."""
        if value is None:
            AVOIDANCES.keys.parse(key)
            return
        avoidance = AVOIDANCES.decode_row(key, value, self._settings.schema_ids)
        if not live:
            return
        with self._lock:
            if self.avoidances.add(avoidance, self._now_ms()):
                self._forget_eligible()

    def _fold_render(self, worker_id: WorkerId, key: bytes, value: bytes | None) -> None:
        """Fold a render parity. It counts while the worker is the one that was probed; choices do not depend on it."""
        parity = None if value is None else RENDER_PARITIES.decode_row(key, value, self._settings.schema_ids)
        with self._lock:
            if parity is None:
                self._renders.pop(worker_id, None)
            elif worker_id in self._renders or len(self._renders) < RENDER_PARITIES_MAX:
                self._renders[worker_id] = parity

    def _fold_model(self, key: bytes, value: bytes | None) -> None:
        """Fold a model's record. The first one wins until its tombstone; one that differs is about to be undone."""
        model = None if value is None else MODELS.decode_row(key, value, self._settings.schema_ids)
        with self._lock:
            if model is None:
                self._served.pop(MODELS.keys.parse(key), None)
                return
            if not self._served_models.serves(model.name):
                return
            served = self._served.setdefault(model.name, model)
        if served is model and model.block_size != self._settings.block_size_of(model.name):
            log.error("%s", block_size_contradicted(self._settings, model))

    def note_rank(self, rank: RankId, *, silent: bool, wrong_size: bool) -> None:
        """Note what a rank's last progress record says about requests to it.

        silent: it was not heard from within its lease. wrong_size: its events have another block size than the scope's.
        """
        with self._lock:
            if silent != (rank in self._silent) or wrong_size != (rank in self._wrong_size):
                (self._silent.add if silent else self._silent.discard)(rank)
                (self._wrong_size.add if wrong_size else self._wrong_size.discard)(rank)
                self._forget_eligible()

    def expire_avoidances(self) -> list[Avoidance]:
        """Let requests go again to workers that have been avoided for long enough; returns what is over."""
        if not len(self.avoidances):
            return []
        with self._lock:
            over = self.avoidances.expire(self._now_ms())
            if over:
                self._forget_eligible()
        return over

    # -- what decisions read -------------------------------------------------------------------------------------------

    def model_of(self, model: str | None) -> str:
        """Return the model of the given name, or the only one that is registered if none is given.

        Raises UnknownModel. A name that is one worker's model and another one's alias stands for itself.
        """
        derived = self._derived
        models = derived.models
        if models is None:
            with self._lock:
                workers = sorted(self.workers.values(), key=lambda worker: worker.model, reverse=True)
                derived.models_by_alias = {alias: worker.model for worker in workers for alias in worker.aliases}
                models = derived.models = frozenset(worker.model for worker in workers)
        if model is None and len(models) == 1:
            return next(iter(models))
        if model is None and models:
            raise UnknownModel("the request names no model, and several are served", models=sorted(models))
        if model is not None and model not in models:
            model = derived.models_by_alias.get(model, model)
        if model is not None:
            self._served_models.check(model)
        if model not in models and models:
            raise UnknownModel(f"no worker serves model {model!r}", models=sorted(models))
        return model or ""

    def block_size_of(self, model: str) -> int:
        """Return the number of tokens per block of a model.

        Raises BlockSizeContradicted if the registry has another number than this router's settings. With either of
        them, this router would report an overlap of 0 for ranks that hold the request's blocks.
        """
        block_size = self._settings.block_size_of(model)
        served = self._served.get(model)
        if served is not None and served.block_size != block_size:
            raise block_size_contradicted(self._settings, served)
        return block_size

    def check_block_sizes(self) -> None:
        """Raise BlockSizeContradicted if any model of the registry contradicts this router's settings."""
        with self._lock:
            names = sorted(self._served)
        for name in names:
            self.block_size_of(name)

    def eligible(self, worker_filter: WorkerFilter) -> Sequence[RankId]:
        """Return the ranks that pass every filter. It is the same object as long as nothing changes.

        Filters that differ only in the ids of workers and ranks select from one tuple (RankSelection).
        """
        if worker_filter.lora_name is not None and not self._lists_adapters():
            worker_filter = worker_filter._replace(lora_name=None)  # so that the adapters share one list of ranks
        ranks = self._eligible.get(worker_filter)  # without the lock, which is held while ranks are listed
        if ranks is not None:
            return ranks
        with self._lock:
            avoided, shared, ranks = self._avoided_now(), worker_filter.shared(), _NO_RANKS
            # A worker that lists no adapters may serve any; one that lists the adapter certainly does.
            for lists_lora in (True, False) if shared.lora_name else (False,):
                ranks = self._narrowed(worker_filter, shared._replace(lists_lora=lists_lora), avoided)
                if ranks:
                    break
            self._eligible.put(worker_filter, ranks)
            return ranks

    def _narrowed(
        self, worker_filter: WorkerFilter, shared: WorkerFilter, avoided: frozenset[WorkerId]
    ) -> Sequence[RankId]:
        """Return the ranks that pass shared filters and the ids of a request's. Called under the lock."""
        ranks = self._table(shared, avoided).narrowed(worker_filter)
        if avoided and not ranks:  # avoiding a worker never refuses a request
            return self._table(shared, _NO_WORKERS).narrowed(worker_filter)
        return ranks

    def _table(self, shared: WorkerFilter, avoided: frozenset[WorkerId]) -> EligibleRanks:
        """Return the ranks that pass shared filters, without those of avoided workers. Called under the lock."""
        return self._eligible.table(
            shared, avoided, lambda: eligible_ranks(self.workers, shared, self._silent, self._wrong_size, avoided)
        )

    def _lists_adapters(self) -> bool:
        """Whether any worker lists its LoRA adapters."""
        lists_adapters = self._derived.lists_adapters
        if lists_adapters is None:
            with self._lock:
                lists_adapters = any(worker.lora_names is not None for worker in self.workers.values())
                self._derived.lists_adapters = lists_adapters
        return lists_adapters

    def _forget_eligible(self) -> None:
        """Drop the cached ranks, since the registry or a rank's state has changed. Called under the lock."""
        self.changes += 1
        self._avoided = None if len(self.avoidances) else _NO_WORKERS
        self._eligible.clear()

    def refusals(self, worker_filter: WorkerFilter) -> dict[FilterReason, int]:
        """Count the registered ranks that each filter refuses, to explain why none is eligible."""
        with self._lock:
            return refusals(self.workers.values(), worker_filter, self._silent, self._wrong_size)

    def avoided(self, worker_id: WorkerId) -> tuple[bool, int]:
        """Return whether requests avoid a worker, and for how many ms they are asked to; 0 if they are not.

        Requests do not avoid it, although they are asked to, if too much of its model would be avoided.
        """
        with self._lock:
            return worker_id in self._avoided_now(), self.avoidances.remaining_ms(worker_id, self._now_ms())

    def _avoided_now(self) -> frozenset[WorkerId]:
        """The workers that requests avoid. Called under the lock."""
        avoided = self._avoided
        if avoided is None:
            unusable = self._silent | self._wrong_size
            avoided = self._avoided = avoided_workers(self.avoidances, self.workers, unusable)
        return avoided

    def numbers(self) -> RankNumbering:
        """Return a numbering of the registered ranks; the same object as long as these are the same."""
        numbers = self._derived.numbers
        if numbers is None:
            with self._lock:
                ranks = tuple(rank for _, worker in sorted(self.workers.items()) for rank in worker.ranks())
                last = self._last_numbers
                numbers = last if last is not None and last.ranks == ranks else RankNumbering(ranks)
                self._derived.numbers = self._last_numbers = numbers
        return numbers

    # -- what people read ----------------------------------------------------------------------------------------------

    def served_model(self, model: str) -> ServedModel | None:
        """Return the registry's record of a model, None if it has none."""
        return self._served.get(model)

    def all_ranks(self) -> list[RankId]:
        """Every rank of every registered worker, in order."""
        with self._lock:
            return sorted(self._ranks())

    def _ranks(self) -> Iterator[RankId]:
        return (rank for worker in self.workers.values() for rank in worker.ranks())

    def silent_ranks(self, worker_id: WorkerId) -> list[DpRank]:
        """A worker's silent ranks, to which no request goes."""
        with self._lock:
            return sorted(rank.dp_rank for rank in self._silent if rank.worker_id == worker_id)

    def blocks_of_model(self, model: str) -> dict[RankId, int]:
        """Every rank that serves a model, with the number of blocks that it holds by its last progress record."""
        with self._lock:
            ranks = [rank for worker in self.workers.values() if worker.model == model for rank in worker.ranks()]
        progress = {rank: self._progress.get(rank) for rank in ranks}
        return {rank: 0 if last is None else last.n_blocks for rank, last in progress.items()}

    def n_gaps(self) -> int:
        """Gaps in the batches of all ranks of registered workers, as their progress records count them."""
        with self._lock:
            progress = map(self._progress.get, self._ranks())
            return sum(last.n_gaps for last in progress if last is not None)

    def registration(self, worker_id: WorkerId) -> Worker | None:
        """Return a worker's record as the registry has it, without its cordon; None if it is not registered."""
        return self._registrations.get(worker_id)

    def has_cordon(self, worker_id: WorkerId) -> bool:
        """Return whether the registry has a cordon of a worker, registered or not."""
        return worker_id in self._cordons

    def registry(self) -> dict[str, object]:
        """Every record that was folded and decides where requests may go, by its key."""
        with self._lock:
            workers = {str(worker_id): worker for worker_id, worker in self._registrations.items()}
            cordons = {CORDONS.keys.pack(worker_id).decode(): True for worker_id in self._cordons}
            models = {MODELS.keys.pack(name).decode(): model for name, model in self._served.items()}
        return {**workers, **cordons, **models}

    @property
    def n_cordons(self) -> int:
        """Number of cordons, also of workers that are not registered."""
        return len(self._cordons)

    def ranks_of_wrong_block_size(self, worker: Worker) -> list[DpRank]:
        """List a worker's ranks to which no request goes because of their block size."""
        with self._lock:
            return [rank.dp_rank for rank in worker.ranks() if self._has_wrong_size(worker, rank)]

    def _has_wrong_size(self, worker: Worker, rank: RankId) -> bool:
        served, block_size = self._served.get(worker.model), self._settings.block_size_of(worker.model)
        wanted = block_size if served is None else served.block_size
        return not worker.block_size == wanted == block_size or rank in self._wrong_size

    def incarnation_of(self, worker: Worker) -> Incarnation | None:
        """Return the incarnation of a worker's engine, the newest one of its ranks; None if no events are known."""
        progress = map(self._progress.get, worker.ranks())
        return max((last.epoch.incarnation for last in progress if last is not None), default=None)

    def render_of(self, worker: Worker) -> RenderParity | None:
        """Return what a front found when it probed this incarnation of a worker; None if no front has."""
        parity = self._renders.get(worker.worker_id)
        if parity is None or not parity.is_about(worker, self.incarnation_of(worker)):
            return None
        return parity

    def has_render(self, worker_id: WorkerId) -> bool:
        """Return whether the registry has a render parity of a worker, about this incarnation or an earlier one."""
        return worker_id in self._renders

    def render_outcomes(self) -> Counter[RenderOutcome]:
        """Count the registered workers by whether their engines make the same tokens as a front."""
        with self._lock:
            parities = map(self.render_of, self.workers.values())
            return Counter(RenderOutcome.UNKNOWN if parity is None else parity.result.outcome for parity in parities)

    def rank_counts(self, n_approximate: int, degraded: Counter[DegradedReason]) -> RankCounts:
        """Count the registered ranks by state. n_approximate, degraded: by the trust that answers for them deserve."""
        registered = self.numbers()
        with self._lock:
            workers = list(self.workers.values())
            return RankCounts(
                registered=len(registered.ranks),
                cordoned=sum(worker.dp_size for worker in workers if worker.state is WorkerState.CORDONED),
                wrong_block_size=sum(
                    self._has_wrong_size(worker, rank) for worker in workers for rank in worker.ranks()
                ),
                silent=sum(rank in registered.number for rank in self._silent),
                avoided=sum(self.workers[worker_id].dp_size for worker_id in self._avoided_now()),
                approximate=n_approximate,
                degraded=degraded,
            )

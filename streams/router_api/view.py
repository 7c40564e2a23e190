"""A router's read-only copy of the fleet, folded from the index changelog, the registry and the engines' metrics.

What lives here: the fold of run, progress, partition and registry records, and what decisions read. What must not:
consuming topics (topic_readers), choosing (core.routing), and how far an answer can be trusted (trust). Only agents
write the index; a view is a replica of it.

Records come in any order that compaction leaves: children before parents, runs before their rank's progress. The fold
of blocks is core.index.run_fold; this module has keys and bytes, workers, progress, and one lock, so that a query sees
each record either completely or not at all. What engines report is in engine_reports; pooled blocks and labels are in
supplementary_facts.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from streams.codec import (
    AVOID_KEY_PREFIX,
    CORDON_KEY_PREFIX,
    MODEL_KEY_PREFIX,
    RENDER_KEY_PREFIX,
    decode_avoidance,
    decode_cordon,
    decode_model,
    decode_render,
    decode_worker,
    parse_avoid_key,
    parse_cordon_key,
    parse_render_key,
)
from streams.core.block_facts.fact_sets import CompiledFactSets, FactSets, PythonFactSets, RankNumbering
from streams.core.block_facts.moe_labels import MoeSelector
from streams.core.engine_metrics import MetricsReport
from streams.core.ids import DpRank, Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import OverlapScores, with_predictions
from streams.core.index.predicted_index import PredictedPrefixIndex
from streams.core.index.run_fold import PlainRunFold, RunFold
from streams.core.kernels.available import kernels_available
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.avoidance import avoided_workers
from streams.core.routing.busy import BlocksInUse
from streams.core.routing.decision import FleetState
from streams.core.routing.eligibility import EligibleRanks, FilterReason, WorkerFilter, eligible_ranks, refusals
from streams.core.routing.supplementary import SupplementaryMatches, locked_holders
from streams.core.workers import (
    Avoidance,
    RenderOutcome,
    RenderParity,
    ServedModel,
    Worker,
    WorkerState,
    differs_in_lease_only,
)
from streams.cxl.events import CxlPool
from streams.cxl.pooled_view import PooledBlock
from streams.cxl.records import POOL_KEY_PREFIX
from streams.errors import BadRecord, IndexFull, UnknownModel
from streams.kafka import worker_key
from streams.model_registry import block_size_contradicted
from streams.router_api.avoidances import Avoidances
from streams.router_api.engine_reports import EngineReports
from streams.router_api.supplementary_facts import SupplementaryFacts
from streams.router_api.trust import APPROXIMATE, FALLBACK, Basis, DegradedReason, Trust, TrustTracker
from streams.settings import Settings
from streams.tables.applied_until import Lag, SourceOffset
from streams.tables.records import (
    PARKED_PREFIX,
    PARTITION_PREFIX,
    PROGRESS_PREFIX,
    RUN_PREFIX,
    decode_partition,
    decode_progress,
    decode_run,
    parse_progress_key,
    parse_run_key,
)

if TYPE_CHECKING:
    from streams.core.index.run_columns import RunColumns
    from streams.core.index.tree_fold import TreeRunFold
    from streams.tables.run_decoding import LabelledBlock

log = logging.getLogger(__name__)

#: Run records that are folded while queries wait: 128 of them take 130 to 200 us.
_LOCKED_RECORDS = 128

#: Filters whose eligible ranks are cached until the fleet changes, and parts of filters that many requests share. Most
#: requests filter by nothing but their model, and listing 64 ranks takes 30 us. Beyond a limit the cache is cleared: a
#: filter may name 16,384 workers, and 256 such filters would take half a gigabyte.
_CACHED_FILTERS_MAX = 256
_CACHED_TABLES_MAX = 64
CACHED_FILTERS_BYTES_MAX = 16 * 1024 * 1024

#: Bytes of a cached filter without ids, of a worker id in a set, and of a rank in a tuple that others share.
_FILTER_BYTES, _ID_BYTES, _RANK_BYTES = 1024, 100, 8

#: One fact as GET /state/blocks returns it, 21 bytes, little-endian.
FACT = np.dtype([("worker_id", "<u8"), ("dp_rank", "<u4"), ("tier", "u1"), ("block", "<u8")])

#: Facts in a page of them, about 1 MB.
PAGE_FACTS = 50_000

#: Render parities that are kept. Those of workers that are not registered are kept as well, since a starting router may
#: read them first.
RENDER_PARITIES_MAX = 65_536

#: Decodes many records of the index changelog; see tables.run_decoding.
DecodeRuns = Callable[[Sequence[tuple[bytes, bytes | None]]], "tuple[RunColumns, list[int]]"]

#: Gives labels of decoded records; see tables.run_decoding.
LabelsOf = Callable[["RunColumns", int, int], "dict[int, list[LabelledBlock]]"]

_NO_SCORES = OverlapScores({})
_NO_RANKS: frozenset[RankId] = frozenset()

#: An overlap that was read longer ago is read again before a decision. Exact answers may be `behind_after_ms` old, and
#: it takes far less from the one to the other, unless the thread that answers was kept busy.
_OVERLAP_VALID_MS = 100
_NO_WORKERS: frozenset[WorkerId] = frozenset()


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


@dataclass(frozen=True, slots=True)
class RankState:
    """What the view has of one rank. digest: order-independent hash of its (tier, sequence hash) facts."""

    rank: RankId
    epoch: Epoch
    sequence: int
    health: Health
    n_blocks: int
    n_gaps: int
    n_unknown_parents: int
    digest: int
    lease_ms: int = 0
    silent: bool = False


def fast_fold() -> RunFold:
    """The fold over compiled kernels, or the pure-Python one if numba is missing."""
    compiled = _compiled()
    if compiled is None:
        return PlainRunFold()
    from streams.warming import ROUTER, warm

    warm(ROUTER)  # before the first answer, which would otherwise wait for a compiler
    return compiled[0]()


def _compiled() -> tuple[type[TreeRunFold], DecodeRuns, LabelsOf] | None:
    """The fold over compiled kernels, with its decoders; None if numba is missing."""
    if not kernels_available():
        return None
    from streams.core.index.tree_fold import TreeRunFold
    from streams.tables.run_decoding import decode_runs, labels_of

    return TreeRunFold, decode_runs, labels_of


def _bytes_of(worker_filter: WorkerFilter) -> int:
    """About how much memory a filter takes."""
    n_ids = len(worker_filter.allowed or ()) + len(worker_filter.excluded)
    names = (*worker_filter.required_taints, worker_filter.lora_name or "")
    return _FILTER_BYTES + _ID_BYTES * n_ids + sum(_ID_BYTES + len(name) for name in names)


class View:
    """The fold. Thread-safe."""

    def __init__(
        self, settings: Settings, now_ms: Callable[[], int], make_fold: Callable[[], RunFold] = fast_fold
    ) -> None:
        """now_ms: this process's monotonic clock. Ages count from receipt, so that other machines' clocks do not
        matter."""
        self._settings = settings
        self._reads_index = settings.reads_index
        self._now_ms = now_ms
        self._make_fold = make_fold
        self._lock = threading.Lock()
        #: Grows with each change of what `overlap` and `eligible` return, and of nothing else that requests wait for.
        self.changes = 0
        # What trust depends on has a lock of its own, which is held for a few microseconds: every answer takes it, and
        # a fold holds the other one for 200 us. A thread that needs both takes this one last.
        self._trust_lock = threading.Lock()
        self._predictions: PredictedPrefixIndex | None = None
        ttl_s = settings.router_predicted_ttl_s if settings.kv_events else settings.router_ttl_s
        if settings.kv_overlap_score_weight > 0.0 and ttl_s > 0.0:
            self._predictions = PredictedPrefixIndex(ttl_s)
        # The same for engines without events, whose blocks nothing else shows. `router_predicted_ttl_s` does not apply
        # to them, since it is the time until events arrive.
        self._eventless_predictions: PredictedPrefixIndex | None = None
        if settings.reads_index and settings.router_ttl_s > 0.0:
            self._eventless_predictions = PredictedPrefixIndex(settings.router_ttl_s)
        self._reset()

    def _reset(self, improvements: int = 0) -> None:
        self.changes += 1
        settings = self._settings
        self.index: RunFold = self._make_fold()
        #: The registered workers, each with the state that follows from its cordon.
        self.workers: dict[WorkerId, Worker] = {}
        self._registrations: dict[WorkerId, Worker] = {}  # the records of `workers`, unchanged
        # Workers that have a bridge and publish no events, and all ranks of these workers.
        self._eventless: dict[WorkerId, frozenset[RankId]] = {}
        self._eventless_ranks: frozenset[RankId] = _NO_RANKS
        self._cordons: set[WorkerId] = set()
        self.avoidances = Avoidances()
        self._avoided: frozenset[WorkerId] | None = _NO_WORKERS  # those within the limit; None if not known
        self._renders: dict[WorkerId, RenderParity] = {}  # the last one of each worker, also of earlier incarnations
        self._served: dict[str, ServedModel] = {}  # the registry's models
        self._wrong_size: set[RankId] = set()  # ranks whose events have another block size than the scope's
        self._trust = TrustTracker(
            settings.partitions, settings.stale_after_ms, settings.behind_after_ms, self.index.epoch_of
        )
        self._trust.improvements = improvements
        self._engine_reports = EngineReports(self.workers, settings.schema_ids, self._now_ms, settings.behind_after_ms)
        self._facts = SupplementaryFacts(
            settings.partitions,
            settings.schema_ids,
            self._new_sets,
            self.index.epoch_of,
            locked_holders(self.index, self._lock),
        )
        self._last_numbers: RankNumbering | None = None
        # What follows from the registry. None until it is needed again after a change.
        self._numbers: RankNumbering | None = None
        self._models: frozenset[str] | None = None
        self._eligible: dict[WorkerFilter, Sequence[RankId]] = {}
        self._lists_adapters: bool | None = None  # whether any worker lists its LoRA adapters; None if not known
        # By the part that many filters share, and the workers that are left out because they are avoided.
        self._eligible_tables: dict[tuple[WorkerFilter, frozenset[WorkerId]], EligibleRanks] = {}
        self.cached_filters_bytes = 0  # about how much memory these filters take
        self._silent: set[RankId] = set()  # ranks that were not heard from within their lease
        self.records_over_capacity = 0
        compiled = _compiled()
        # The same index with its decoder, if the index can fold many records in one call.
        self._batches: tuple[TreeRunFold, DecodeRuns, LabelsOf] | None = None
        if compiled is not None and isinstance(self.index, compiled[0]):
            self._batches = (self.index, *compiled[1:])

    @staticmethod
    def _new_sets() -> FactSets:
        return PythonFactSets() if _compiled() is None else CompiledFactSets()

    def reset(self) -> None:
        """Drop everything, so that the topics can be folded again from their beginnings."""
        with self._lock:
            self._reset(self._trust.improvements + 1)  # what was read before is older than all trust afterwards

    # -- the fold ------------------------------------------------------------------------------------------------------

    def fold_index(self, key: bytes, value: bytes | None, live: bool = True) -> None:
        """Fold one record of the index changelog. A record that raises BadRecord changes nothing.

        live: the record was written after this reader had reached the end of its partition.
        """
        if key.startswith(RUN_PREFIX):
            run_id = parse_run_key(key)
            run = None if value is None else decode_run(key, value)
            with self._lock:
                try:
                    self.index.fold([run_id], [run])
                except IndexFull:
                    self._note_over_capacity(run_id.rank)
                self.changes += 1  # afterwards: requests may read the index without the lock
                if run is None:
                    self._facts.fold_labels(key, run_id.rank, None, ())
                elif run.moe or self._facts.has_labels_of(key):
                    held = [(SequenceHash(run.sequence[at]), run.moe[at]) for at in run.held() if at in run.moe]
                    self._facts.fold_labels(key, run_id.rank, run.epoch, held)
                if self._facts.has_labels():
                    self._facts.end_stale_labels()
        elif key.startswith(PROGRESS_PREFIX):
            rank = parse_progress_key(key)
            progress = None if value is None else decode_progress(key, value)
            with self._lock:
                self._fold_progress(rank, progress)
                self.changes += 1
        elif key.startswith(PARTITION_PREFIX):
            if value is not None:
                record = decode_partition(key, value)
                with self._trust_lock:
                    self._trust.note_partition(record, self._now_ms() if live else None)
        elif not key.startswith(PARKED_PREFIX):  # parked chunks become runs when their restatement is complete
            raise BadRecord("bad_key", f"{key.hex()} is not a valid key of the index")

    def fold_index_batch(
        self, records: Sequence[tuple[bytes, bytes | None]], live: bool = True
    ) -> list[tuple[int, BadRecord]]:
        """Fold records of the index changelog in order; return those that cannot be used, each with its position.

        A bad record does not keep the others from being folded. live: as in `fold_index`, for all of them.
        """
        bad: list[tuple[int, BadRecord]] = []
        columns: RunColumns | None = None
        alone: Iterable[int] = range(len(records))
        if self._batches is not None:
            columns, alone = self._batches[1](records)
        # Asked for once: between two records that are not runs there are few runs, and asking takes as long as folding
        # them. Most batches have no labels.
        are_labelled = columns is not None and bool(columns.labelled.any())
        folded = 0
        for position in alone:
            if columns is not None:
                self._fold_runs(columns, folded, position, records, are_labelled)
            folded = position + 1
            try:
                self.fold_index(*records[position], live)
            except BadRecord as exc:
                bad.append((position, exc))
        if columns is not None:
            self._fold_runs(columns, folded, len(records), records, are_labelled)
        return bad

    def _fold_runs(
        self,
        columns: RunColumns,
        first: int,
        last: int,
        records: Sequence[tuple[bytes, bytes | None]],
        are_labelled: bool,
    ) -> None:
        for begin in range(first, last, _LOCKED_RECORDS):
            end = min(begin + _LOCKED_RECORDS, last)
            with self._lock:
                assert self._batches is not None  # columns exist only if the index folds batches
                for record in self._batches[0].fold_records(columns, begin, end):
                    self._note_over_capacity(columns.place_of(record)[0])
                self.changes += 1  # afterwards: requests may read the index without the lock
            if are_labelled or self._facts.has_labels():
                self._fold_labels_of(columns, begin, end, records)

    def _fold_labels_of(
        self, columns: RunColumns, first: int, last: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> None:
        """Fold the labels of records that the index has folded, one record at a time so that requests wait briefly."""
        assert self._batches is not None  # columns exist only if the index folds batches
        labelled = self._batches[2](columns, first, last)
        for record in range(first, last):
            key = records[record][0]
            if record in labelled or self._facts.has_labels_of(key):
                rank, epoch = columns.place_of(record)[0], columns.epoch_of(record)
                with self._lock:
                    self._facts.fold_labels(key, rank, epoch, labelled.get(record, ()))
        with self._lock:
            self._facts.end_stale_labels()

    def _note_over_capacity(self, rank: RankId) -> None:
        self.records_over_capacity += 1
        with self._trust_lock:
            first = self._trust.note_over_capacity(rank)
        if first:
            log.error(
                "The index is over capacity and lacks run records of rank %s. Answers for it are degraded until its "
                "cache is cleared or its engine restarts. Give this router a smaller scope",
                rank,
            )

    def _fold_progress(self, rank: RankId, progress: Progress | None) -> None:
        if progress is None:
            with self._trust_lock:
                self._trust.note_progress(rank, None)
            self._note_silence(rank, silent=False)
            self._note_block_size(rank, wrong=False)
            self.index.forget_rank(rank)
            self._facts.forget_rank(rank)
            return
        known = self._trust.progress.get(rank)
        if known is not None and (progress.epoch, progress.sequence) < (known.epoch, known.sequence):
            return
        with self._trust_lock:  # before the index, which empties the rank if a new epoch begins
            self._trust.note_progress(rank, progress)
        self.index.enter_epoch(rank, progress.epoch)
        if self._facts.has_labels():
            self._facts.end_stale_labels()
        if rank in self._eventless_ranks and (known is None or known.epoch != progress.epoch):
            assert self._eventless_predictions is not None
            self._eventless_predictions.clear(rank)  # its engine restarted
        self._note_silence(rank, silent=progress.silent)
        expected = self._settings.block_size_of(progress.model)
        wrong = progress.block_size not in (0, expected) and progress.health is not Health.REMOVED
        self._note_block_size(rank, wrong=wrong)

    def _note_block_size(self, rank: RankId, *, wrong: bool) -> None:
        if wrong != (rank in self._wrong_size):
            (self._wrong_size.add if wrong else self._wrong_size.discard)(rank)
            self._forget_eligible()

    def _note_silence(self, rank: RankId, *, silent: bool) -> None:
        if silent != (rank in self._silent):
            (self._silent.add if silent else self._silent.discard)(rank)
            self._forget_eligible()

    def fold_worker(self, key: bytes, value: bytes | None, live: bool = True) -> None:
        """Fold one record of the registry: a worker, what belongs to one, a model or a CXL pool. Raises BadRecord.

        live: as in `fold_index`.
        """
        if key.startswith(POOL_KEY_PREFIX):
            self._facts.fold_pool(key, value)
            return
        if key.startswith(CORDON_KEY_PREFIX):
            self._fold_cordon(parse_cordon_key(key), key, value)
            return
        if key.startswith(MODEL_KEY_PREFIX):
            self._fold_model(key, value)
            return
        if key.startswith(AVOID_KEY_PREFIX):
            self._fold_avoidance(key, value, live)
            return
        if key.startswith(RENDER_KEY_PREFIX):
            self._fold_render(parse_render_key(key), key, value)
            return
        try:
            worker_id = WorkerId(int(key))
        except ValueError as exc:
            raise BadRecord("bad_key", f"{key!r} is not a valid worker id") from exc
        worker = None if value is None else decode_worker(value, self._settings.schema_ids)
        if worker_key(worker_id) != key or (worker is not None and worker.worker_id != worker_id):
            # Its tombstone would have another key than its rank's events, and would never remove it.
            raise BadRecord("wrong_key", f"key {key!r} is not the worker's own")
        with self._lock:
            if worker is None:
                self._note_registry_change()
                self._forget_worker(worker_id)
                return
            before = self.workers.get(worker_id)
            self._note_eventless(worker_id, worker)
            self._registrations[worker_id] = worker
            self.workers[worker_id] = worker = self._with_cordon(worker)
            if before is not None and differs_in_lease_only(before, worker):
                self._engine_reports.lease_changed(worker)
            else:
                self._note_registry_change()
                self._engine_reports.registry_changed(worker)

    def _note_registry_change(self) -> None:
        """Drop what is cached about the fleet.

        The renewal of a lease is no such change: a fleet of 1,000 engines renews 500 of them per second, and listing
        its ranks takes a millisecond.
        """
        self._forget_eligible()
        self._numbers = self._models = self._lists_adapters = None

    def _fold_cordon(self, worker_id: WorkerId, key: bytes, value: bytes | None) -> None:
        if value is not None:
            decode_cordon(key, value, self._settings.schema_ids)
        with self._lock:
            (self._cordons.discard if value is None else self._cordons.add)(worker_id)
            registered = self._registrations.get(worker_id)
            if registered is not None:
                self.workers[worker_id] = self._with_cordon(registered)
                self._forget_eligible()

    def _fold_avoidance(self, key: bytes, value: bytes | None, live: bool) -> None:
        """Fold an avoidance. It ends by its time; its tombstone only lets Kafka forget the record."""
        if value is None:
            parse_avoid_key(key)
            return
        avoidance = decode_avoidance(key, value, self._settings.schema_ids)
        if not live:
            return
        with self._lock:
            if self.avoidances.add(avoidance, self._now_ms()):
                self._forget_eligible()

    def _fold_render(self, worker_id: WorkerId, key: bytes, value: bytes | None) -> None:
        """Fold a render parity. It counts while the worker is the one that was probed; choices do not depend on it."""
        parity = None if value is None else decode_render(key, value, self._settings.schema_ids)
        with self._lock:
            if parity is None:
                self._renders.pop(worker_id, None)
            elif worker_id in self._renders or len(self._renders) < RENDER_PARITIES_MAX:
                self._renders[worker_id] = parity

    def expire_avoidances(self) -> list[Avoidance]:
        """Let requests go again to workers that have been avoided for long enough; returns what is over."""
        if not len(self.avoidances):
            return []
        with self._lock:
            over = self.avoidances.expire(self._now_ms())
            if over:
                self._forget_eligible()
        return over

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

    def _with_cordon(self, worker: Worker) -> Worker:
        if worker.worker_id not in self._cordons or worker.state is WorkerState.CORDONED:
            return worker
        return replace(worker, state=WorkerState.CORDONED)

    def _fold_model(self, key: bytes, value: bytes | None) -> None:
        """Fold a model's record. The first one wins until its tombstone; one that differs is about to be undone."""
        model = None if value is None else decode_model(key, value, self._settings.schema_ids)
        with self._lock:
            if model is None:
                self._served.pop(key.removeprefix(MODEL_KEY_PREFIX).decode(errors="replace"), None)
                return
            known = self._served.setdefault(model.name, model)
        if known is model and model.block_size != self._settings.block_size_of(model.name):
            log.error("%s", block_size_contradicted(self._settings, model))

    def _forget_worker(self, worker_id: WorkerId) -> None:
        """Drop the engine's reports and the ranks' predictions of a worker that left the registry."""
        self._registrations.pop(worker_id, None)
        worker = self.workers.pop(worker_id, None)
        self._engine_reports.forget_worker(worker_id)
        if self._predictions is not None:
            for rank in worker.ranks() if worker else ():
                self._predictions.clear(rank)
        self._note_eventless(worker_id, None)

    def _note_eventless(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Note whether a worker's ranks are predicted, because its bridge gets no events of it."""
        predictions, former = self._eventless_predictions, self._eventless.get(worker_id, _NO_RANKS)
        is_eventless = worker is not None and worker.lease is not None and worker.events_endpoint is None
        ranks = frozenset(worker.ranks()) if worker is not None and is_eventless else _NO_RANKS
        if predictions is None or ranks == former:
            return
        self._eventless[worker_id] = ranks
        if not ranks:
            del self._eventless[worker_id]
        self._eventless_ranks = _NO_RANKS.union(*self._eventless.values())
        for rank in former - ranks:
            predictions.clear(rank)

    def fold_pooled(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of the changelog of pooled blocks. A record that raises BadRecord changes nothing."""
        self._facts.fold_pooled(key, value)

    def note_ends(self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset]) -> None:
        """Take in where the sources of a partition end; see `TrustTracker.note_ends`."""
        with self._trust_lock:
            self._trust.note_ends(partition, asked_ms, ends, self._now_ms())

    def note_pooled_ends(
        self, partition: int, asked_ms: int, ends: Mapping[str, SourceOffset], folded: Mapping[str, SourceOffset]
    ) -> None:
        """Take in where the changelog of pooled blocks ends; see `TrustTracker.note_pooled_ends`."""
        with self._trust_lock:
            self._trust.note_pooled_ends(partition, asked_ms, ends, folded, self._now_ms())

    def fold_report(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of worker-metrics. A record that raises BadRecord changes nothing."""
        self._engine_reports.fold(key, value)

    # -- what decisions read -------------------------------------------------------------------------------------------

    def model_of(self, model: str | None) -> str:
        """Return the given model, or the only one that is registered if none is given; raises UnknownModel."""
        models = self._models
        if models is None:
            with self._lock:
                models = self._models = frozenset(worker.model for worker in self.workers.values())
        if model is None and len(models) == 1:
            return next(iter(models))
        if model is None and models:
            raise UnknownModel("the request names no model, and several are served", models=sorted(models))
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

    def served_model(self, model: str) -> ServedModel | None:
        """Return the registry's record of a model, None if it has none."""
        return self._served.get(model)

    def eligible(self, worker_filter: WorkerFilter) -> Sequence[RankId]:
        """Return the ranks that pass every filter. It is the same object as long as nothing changes.

        Filters that differ only in the ids of workers and ranks select from one tuple (RankSelection).
        """
        if worker_filter.lora_name is not None and not self._has_lists_of_adapters():
            worker_filter = worker_filter._replace(lora_name=None)  # so that the adapters share one list of ranks
        ranks = self._eligible.get(worker_filter)  # without the lock, which a fold may hold for 200 us
        if ranks is not None:
            return ranks
        with self._lock:
            avoided = self._avoided_now()
            ranks = self._eligible_table(worker_filter.shared(), avoided).narrowed(worker_filter)
            if avoided and not ranks:  # avoiding a worker never refuses a request
                ranks = self._eligible_table(worker_filter.shared(), _NO_WORKERS).narrowed(worker_filter)
            self._cache_eligible(worker_filter, ranks)
            return ranks

    def _eligible_table(self, shared: WorkerFilter, avoided: frozenset[WorkerId]) -> EligibleRanks:
        """Return the ranks that pass shared filters, without those of avoided workers. Called under the lock."""
        table = self._eligible_tables.get((shared, avoided))
        if table is None:
            if len(self._eligible_tables) >= _CACHED_TABLES_MAX:
                self._eligible_tables.clear()
            ranks = eligible_ranks(self.workers, shared, self._silent, self._wrong_size, avoided)
            table = self._table_of(tuple(ranks), shared)
            self._eligible_tables[shared, avoided] = table
        return table

    def _table_of(self, ranks: tuple[RankId, ...], shared: WorkerFilter) -> EligibleRanks:
        """Return a table of ranks, for adapters that the same ranks serve the same one: columns belong to a table."""
        if shared.lora_name is not None:
            for known in self._eligible_tables.values():
                if known.ranks == ranks:
                    return known
        return EligibleRanks(ranks)

    def _has_lists_of_adapters(self) -> bool:
        found = self._lists_adapters
        if found is None:
            with self._lock:
                found = any(worker.lora_names is not None for worker in self.workers.values())
                self._lists_adapters = found
        return found

    def _forget_eligible(self) -> None:
        """Drop the cached ranks, since the registry or a rank's state has changed. Called under the lock."""
        self.changes += 1
        self._avoided = None if len(self.avoidances) else _NO_WORKERS
        self._eligible.clear()
        self._eligible_tables.clear()

    def _cache_eligible(self, worker_filter: WorkerFilter, ranks: Sequence[RankId]) -> None:
        if not self._eligible:  # others clear it when the registry changes
            self.cached_filters_bytes = 0
        n_bytes = _bytes_of(worker_filter) + _RANK_BYTES * len(ranks)
        self.cached_filters_bytes += n_bytes
        if len(self._eligible) >= _CACHED_FILTERS_MAX or self.cached_filters_bytes > CACHED_FILTERS_BYTES_MAX:
            self._eligible.clear()
            self.cached_filters_bytes = n_bytes
        self._eligible[worker_filter] = ranks

    def refusals(self, worker_filter: WorkerFilter) -> dict[FilterReason, int]:
        """Count the registered ranks that each filter refuses, to explain why none is eligible."""
        with self._lock:
            return refusals(self.workers.values(), worker_filter, self._silent, self._wrong_size)

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request by the folded records. local: uint64[n_blocks] from the root."""
        index = self.index
        if index.concurrent:
            return index.find_matches(local)
        with self._lock:
            return index.find_matches(local)

    def overlap(self, local: HashArray) -> tuple[OverlapScores, frozenset[RankId]]:
        """Score every rank by folded records and predictions; also return the ranks whose score is a prediction.

        If this router does not read the index, predictions are the only source.
        """
        known = self.find_matches(local) if self._reads_index else _NO_SCORES
        if self._predictions is None and not self._eventless_ranks:
            return known, _NO_RANKS
        ranks = self._eventless_ranks  # nothing is known exactly of these, whatever is predicted
        for predictions in (self._predictions, self._eventless_predictions if ranks else None):
            if predictions is not None:
                with self._lock:
                    predictions.expire(self._now_ms() / 1000)
                    predicted = predictions.find_matches(local)
                known, longer = with_predictions(known, predicted)
                ranks |= longer
        return known, ranks

    def predict(self, rank: RankId, local: HashArray) -> None:
        """Predict that the rank will hold the blocks of a request that was sent to it. local: uint64[n_blocks]."""
        predictions = self._eventless_predictions if rank in self._eventless_ranks else self._predictions
        if predictions is not None and local.size:
            with self._lock:
                self.changes += 1
                predictions.predict(rank, local, self._now_ms() / 1000)

    @property
    def has_supplementary(self) -> bool:
        """Whether any block is pooled or labelled."""
        return self._facts.has_any

    def supplementary(
        self, sequence: HashArray, model: str, moe: MoeSelector | None, *, pooled: bool
    ) -> SupplementaryMatches | None:
        """Return a request's supplementary matches, or None if there can be none.

        sequence: uint64[n], the request's sequence hashes, contiguous. moe: which labels match; None for no labels.
        pooled: whether pooled blocks are used.
        """
        if not self._facts.wants(moe, pooled=pooled):
            return None
        return self._facts.matches(sequence, model, moe, self._rank_numbers(), pooled=pooled)

    def _rank_numbers(self) -> RankNumbering:
        numbers = self._numbers
        if numbers is None:
            with self._lock:
                ranks = tuple(rank for _, worker in sorted(self.workers.items()) for rank in worker.ranks())
                # Most records of the registry renew a lease: then the ranks, and all cached queries, stay the same.
                known = self._last_numbers
                numbers = known if known is not None and known.ranks == ranks else RankNumbering(ranks)
                self._numbers = self._last_numbers = numbers
        return numbers

    def ranks_missing_labels(self, ranks: Iterable[RankId]) -> set[RankId]:
        """Return those of these ranks whose labels were dropped: blocks of theirs without labels may match."""
        with self._lock:  # labels are folded under this lock as well
            incomplete = self._facts.ranks_missing_labels()
            return {rank for rank in ranks if rank in incomplete} if incomplete else set()

    def fleet(self) -> FleetState:
        """Return what routing policies read about engines, as a value that later records do not change."""
        return self._engine_reports.fleet()

    def blocks_in_use(self, ranks: Sequence[RankId]) -> BlocksInUse:
        """Return what the registry and the last reports say about the blocks of these ranks, in their order."""
        return self._engine_reports.blocks_in_use(ranks)

    def reports_received_ms(self, ranks: Iterable[RankId]) -> dict[RankId, int]:
        """When the last report of each of these ranks was received, for those that have a valid one."""
        return self._engine_reports.received_ms(ranks)

    def basis(self) -> Basis:
        """What the trust in overlaps depends on that are read from now on."""
        tracker = self._trust
        return Basis(tracker.improvements, tracker.pooled_improvements, self._engine_reports.unfed(), self._now_ms())

    def is_outdated(self, basis: Basis) -> bool:
        """Whether overlaps that were read after this basis should be read again before a decision."""
        tracker = self._trust
        return (
            basis.improvements != tracker.improvements
            or basis.pooled_improvements != tracker.pooled_improvements
            or self._now_ms() - basis.at_ms > _OVERLAP_VALID_MS
            or basis.unfed is not self._engine_reports.unfed()
        )

    def trust(
        self,
        ranks: Sequence[RankId],
        predicted: Set[RankId] = _NO_RANKS,
        *,
        pooled: str | None = None,
        labelled: bool = False,
        basis: Basis | None = None,
    ) -> Trust:
        """Return the least trust that any of these ranks deserves. predicted: ranks whose score is a prediction.

        pooled: the model, if pooled blocks are used, so that the owners of all of them must be running, and the ranks
        known that put blocks of this model into pools. labelled: labels are used, so that none of these ranks may lack
        any. basis: as before the overlaps were read, which may be older than what is trusted by now.
        """
        now_ms = self._now_ms()
        if not labelled:
            return self._assess(ranks, predicted, now_ms, _NO_RANKS, pooled, basis)
        with self._lock:  # labels are folded under this lock
            return self._assess(ranks, predicted, now_ms, self._facts.ranks_missing_labels(), pooled, basis)

    def _assess(
        self,
        ranks: Sequence[RankId],
        predicted: Set[RankId],
        now_ms: int,
        missing: Set[RankId],
        pooled: str | None,
        basis: Basis | None,
    ) -> Trust:
        """missing: ranks whose labels were dropped, if labels are used."""
        if not self._reads_index:
            return APPROXIMATE if self._predictions is not None else FALLBACK
        unfed = self._engine_reports.unfed()
        if basis is not None and not (basis.unfed is unfed or basis.unfed <= unfed):
            unfed = unfed | basis.unfed
        rows = None if pooled is None else self._facts.pooled_rows(pooled)
        with self._trust_lock:
            return self._trust.assess(
                ranks,
                predicted,
                now_ms,
                unfed=unfed,
                ranks_missing_labels=missing,
                pooled=rows,
                basis=basis,
            )

    # -- what people read ----------------------------------------------------------------------------------------------

    def all_ranks(self) -> list[RankId]:
        """Every rank of every registered worker, in order."""
        with self._lock:
            return sorted(rank for worker in self.workers.values() for rank in worker.ranks())

    def silent_ranks(self, worker_id: WorkerId) -> list[DpRank]:
        """A worker's silent ranks, to which no request goes."""
        with self._lock:
            return sorted(rank.dp_rank for rank in self._silent if rank.worker_id == worker_id)

    def blocks_of_model(self, model: str) -> dict[RankId, int]:
        """Every rank that serves a model, with the number of blocks that it holds by its last progress record."""
        with self._lock:
            ranks = [rank for worker in self.workers.values() if worker.model == model for rank in worker.ranks()]
            known = self._trust.progress
            return {rank: known[rank].n_blocks if rank in known else 0 for rank in ranks}

    def registration(self, worker_id: WorkerId) -> Worker | None:
        """Return a worker's record as the registry has it, without its cordon; None if it is not registered."""
        with self._lock:
            return self._registrations.get(worker_id)

    def has_cordon(self, worker_id: WorkerId) -> bool:
        """Return whether the registry has a cordon of a worker, registered or not."""
        with self._lock:
            return worker_id in self._cordons

    def ranks_of_wrong_block_size(self, worker: Worker) -> list[DpRank]:
        """List a worker's ranks to which no request goes because of their block size."""
        with self._lock:
            return [rank.dp_rank for rank in worker.ranks() if self._has_wrong_size(worker, rank)]

    def _has_wrong_size(self, worker: Worker, rank: RankId) -> bool:
        served, block_size = self._served.get(worker.model), self._settings.block_size_of(worker.model)
        wanted = block_size if served is None else served.block_size
        return not worker.block_size == wanted == block_size or rank in self._wrong_size

    def progress_of(self, worker_id: WorkerId) -> list[Progress]:
        """Progress of those of a worker's ranks that have any."""
        with self._lock:
            return [progress for rank, progress in self._trust.progress.items() if rank.worker_id == worker_id]

    def incarnation_of(self, worker: Worker) -> Incarnation | None:
        """Return the incarnation of a worker's engine, the newest one of its ranks; None if no events are known."""
        with self._lock:
            return self._incarnation_of(worker)

    def _incarnation_of(self, worker: Worker) -> Incarnation | None:
        known = map(self._trust.progress.get, worker.ranks())
        return max((progress.epoch.incarnation for progress in known if progress is not None), default=None)

    def render_of(self, worker: Worker) -> RenderParity | None:
        """Return what a front found when it probed this incarnation of a worker; None if no front has."""
        with self._lock:
            return self._render_of(worker)

    def _render_of(self, worker: Worker) -> RenderParity | None:
        parity = self._renders.get(worker.worker_id)
        if parity is None or not parity.is_about(worker, self._incarnation_of(worker)):
            return None
        return parity

    def has_render(self, worker_id: WorkerId) -> bool:
        """Return whether the registry has a render parity of a worker, about this incarnation or an earlier one."""
        with self._lock:
            return worker_id in self._renders

    def render_outcomes(self) -> Counter[RenderOutcome]:
        """Count the registered workers by whether their engines make the same tokens as a front."""
        with self._lock:
            found = map(self._render_of, self.workers.values())
            return Counter(RenderOutcome.UNKNOWN if each is None else each.result.outcome for each in found)

    def rank_counts(self) -> RankCounts:
        """Count the registered ranks by state. 1,000 ranks take half a millisecond."""
        now_ms, ranks = self._now_ms(), self._rank_numbers()
        n_approximate, degraded = 0, Counter[DegradedReason]()
        if self._settings.reads_index:
            unfed = self._engine_reports.unfed()
            with self._trust_lock:
                n_approximate, degraded = self._trust.count(ranks.ranks, now_ms, unfed)
        elif self._predictions is not None:
            n_approximate = len(ranks.ranks)
        with self._lock:
            workers = list(self.workers.values())
            avoided = self._avoided_now()
            return RankCounts(
                registered=len(ranks.ranks),
                cordoned=sum(worker.dp_size for worker in workers if worker.state is WorkerState.CORDONED),
                wrong_block_size=sum(
                    self._has_wrong_size(worker, rank) for worker in workers for rank in worker.ranks()
                ),
                silent=sum(rank in ranks.number for rank in self._silent),
                avoided=sum(self.workers[worker_id].dp_size for worker_id in avoided),
                approximate=n_approximate,
                degraded=degraded,
            )

    def rank_states(self) -> list[RankState]:
        """Every rank of which any record was folded, in order."""
        with self._lock:
            return [self._rank_state(rank) for rank in sorted(self.index.ranks())]

    def _rank_state(self, rank: RankId) -> RankState:
        n_blocks, digest = self.index.facts(rank)
        epoch = self.index.epoch_of(rank)
        assert epoch is not None  # the index lists only ranks with an epoch
        progress = self._trust.progress.get(rank)
        return RankState(
            rank=rank,
            epoch=epoch,
            sequence=progress.sequence if progress else -1,
            health=progress.health if progress else Health.DEGRADED,
            n_blocks=n_blocks,
            n_gaps=progress.n_gaps if progress else 0,
            n_unknown_parents=progress.n_unknown_parents if progress else 0,
            digest=digest,
            lease_ms=progress.lease_ms if progress else 0,
            silent=progress.silent if progress else False,
        )

    def members(self) -> set[tuple[RankId, Tier, SequenceHash]]:
        """Every fact held. Two views are equal if these sets and the ranks' epochs are equal."""
        return {
            (rank, tier, SequenceHash(block))
            for rank, tier, blocks in self._facts_in_order()
            for block in blocks.tolist()
        }

    def fact_pages(self) -> Iterator[bytes]:
        """Every fact held, in order, as packed FACTs. A page has whole ranks, and at least PAGE_FACTS facts.

        The facts of each rank are those of one moment, and those of several ranks are not: decisions need the lock, so
        it is held for one rank at a time.
        """
        pages: list[bytes] = []
        n_facts = 0
        for rank, tier, blocks in self._facts_in_order():
            rows = np.empty(len(blocks), dtype=FACT)
            rows["worker_id"], rows["dp_rank"], rows["tier"], rows["block"] = rank.worker_id, rank.dp_rank, tier, blocks
            pages.append(rows.tobytes())
            n_facts += len(blocks)
            if n_facts >= PAGE_FACTS:
                yield b"".join(pages)
                pages, n_facts = [], 0
        if pages:
            yield b"".join(pages)

    def _facts_in_order(self) -> Iterator[tuple[RankId, Tier, HashArray]]:
        """The sequence hashes of each rank and tier, in order: uint64[n]. Holds the lock for one rank at a time."""
        with self._lock:
            ranks = sorted(self.index.ranks())
        for rank in ranks:
            with self._lock:
                held = self.index.held_by(rank)
            for tier, blocks in sorted(held.items()):
                blocks.sort()
                yield rank, tier, blocks

    def applied_offsets(self) -> dict[int, int]:
        """Source offset that each partition's owner had applied when it wrote its last partition record."""
        with self._trust_lock:
            return self._trust.applied_offsets()

    def lags(self) -> dict[int, Lag]:
        """How far this view is behind the log of events, by partition. Empty if this router does not read the index."""
        if not self._settings.reads_index:
            return {}
        with self._trust_lock:
            return self._trust.lags(self._now_ms())

    def n_gaps(self) -> int:
        """Gaps in the batches of all ranks of registered workers, as their progress records count them."""
        with self._lock:
            known = self._trust.progress
            ranks = (rank for worker in self.workers.values() for rank in worker.ranks())
            return sum(known[rank].n_gaps for rank in ranks if rank in known)

    def reports(self) -> list[MetricsReport]:
        """Every valid report of an engine, in order of rank."""
        return self._engine_reports.reports()

    def reports_of(self, worker: Worker) -> list[MetricsReport]:
        """The valid reports of one worker's ranks."""
        return self._engine_reports.reports_of(worker)

    def pools(self) -> dict[str, CxlPool]:
        """The registry's CXL pools by id."""
        return self._facts.pools()

    def pooled_blocks(self) -> list[tuple[PooledBlock, frozenset[WorkerId]]]:
        """Every pooled block with the registered workers that can reach it, by sequence hash, owner and pool."""
        with self._lock:
            registered = frozenset(self.workers)
        return self._facts.pooled_blocks(registered)

    def n_pooled(self) -> int:
        """Number of rows of the table of pooled blocks, in any state."""
        return self._facts.n_pooled()

    def pooled_over_capacity(self) -> int:
        """Number of rows of pooled blocks, or of placements of such rows, that were dropped."""
        return self._facts.pooled_over_capacity()

    def labelled(self) -> tuple[int, int]:
        """Number of run records with labels, and of labels that were dropped."""
        return self._facts.labelled()

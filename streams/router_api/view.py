"""What a router knows of the fleet, folded from the index changelog and the registry.

What lives here: the fold of run, progress, partition and worker records, and how far the result can be trusted. What
must not: consuming (feeds) and choosing (core.decision). Agents are the only writers; this is a replica.

Records come in any order that compaction leaves: children before parents, runs before their progress. What they say of
blocks is the fold's to know (core.run_fold); here are keys and bytes, progress, partitions, workers, and one lock: a
query sees each record whole or not at all.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streams.codec import decode_metrics, decode_worker
from streams.core.block_facts.fact_sets import CompiledFactSets, FactSets, PythonFactSets, RankNumbering
from streams.core.block_facts.moe_labels import LabelIndex, MoeSelector
from streams.core.engine_metrics import MetricsReport, WorkerMetrics, with_registered
from streams.core.ids import DpRank, Epoch, HashArray, Int64Array, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import Candidates, HolderBitmaps, OverlapScores, with_predictions
from streams.core.index.predicted_index import ApproximatePrefixIndex
from streams.core.index.run_fold import PlainRunFold, RunFold
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.decision import FleetState
from streams.core.routing.eligibility import FilterReason, WorkerFilter, eligible_ranks, refusals
from streams.core.routing.supplementary import SupplementaryMatches
from streams.core.workers import CPU_CLASS, Worker, WorkerState
from streams.cxl.events import CxlPool
from streams.cxl.pooled_index import PooledIndex
from streams.cxl.pooled_view import PooledBlock, PooledView
from streams.cxl.records import POOL_KEY_PREFIX, parse_block_key
from streams.errors import BadRecord, IndexFull, UnknownModel
from streams.kafka import partition_of, worker_key
from streams.settings import Settings
from streams.tables.records import (
    PARKED_PREFIX,
    PARTITION_PREFIX,
    PROGRESS_PREFIX,
    RUN_PREFIX,
    PartitionRecord,
    decode_partition,
    decode_progress,
    decode_run,
    parse_progress_key,
    parse_run_key,
)

if TYPE_CHECKING:
    from streams.core.index.tree_fold import RunColumns, TreeRunFold
    from streams.tables.run_decoding import LabelledBlock

log = logging.getLogger(__name__)

#: Run records folded while queries wait: 130 to 200 us of them.
_LOCKED_RECORDS = 128

#: Filters whose outcome is kept until the registry changes: most requests ask for nothing but their model, and 64 ranks
#: take 30 us to be listed anew. Beyond it all are forgotten.
_KEPT_FILTERS_MAX = 256

#: Ranks of which it is kept what their engines say. A fleet has some thousands; a stranger must not fill memory.
REPORTS_MAX = 65_536

#: Decodes many records of the index changelog; see tables.run_decoding.
DecodeRuns = Callable[[Sequence[tuple[bytes, bytes | None]]], "tuple[RunColumns, list[int]]"]

#: Gives labels of decoded records; see tables.run_decoding.
LabelsOf = Callable[["RunColumns", int, int], "dict[int, list[LabelledBlock]]"]


#: Later than any clock says.
_NEVER_MS = 1 << 62

_NO_SCORES = OverlapScores({})
_NO_RANKS: frozenset[RankId] = frozenset()


class AnswerMode(enum.StrEnum):
    """How far an answer's overlap can be trusted (docs/architecture.md, Honesty)."""

    EXACT = "exact"
    DEGRADED = "degraded"
    APPROXIMATE = "approximate"
    FALLBACK = "fallback"


class DegradedReason(enum.StrEnum):
    """Why an answer is `degraded`: the first reason found, of a rank that was eligible or of all."""

    NO_EVENTS_YET = "no_events_yet"  # nobody ever told of the rank: it is not known to be empty
    EVENTS_LOST = "events_lost"  # a batch was lost, or a store's parent was never seen
    REMOVED = "removed"  # the rank was removed, and its worker is still, or again, registered
    OVER_CAPACITY = "over_capacity"  # this router's index had no room for a record of the rank
    OWNER_SILENT = "owner_silent"  # nobody was heard of who indexes its partition, for stale_after_ms
    OWNER_BEHIND = "owner_behind"  # who indexes its partition is behind its source by behind_after_ms
    LABELS_OVER_CAPACITY = "labels_over_capacity"  # labels were asked for, and some of the rank's found no room
    POOLED_OVER_CAPACITY = "pooled_over_capacity"  # rows of pooled blocks found no room
    POOLED_OWNER_SILENT = "pooled_owner_silent"
    POOLED_OWNER_BEHIND = "pooled_owner_behind"
    BOOKINGS_NOT_IN_SYNC = "bookings_not_in_sync"  # Kafka is away, and routers do not hear of each other's bookings


@dataclass(frozen=True, slots=True)
class Trust:
    """How far an answer can be trusted. doubt: why no further; of `degraded` ones only."""

    mode: AnswerMode
    reason: DegradedReason | None = None


#: One of each, since every answer has one.
_TRUSTED = {mode: Trust(mode) for mode in AnswerMode}
_DEGRADED = {reason: Trust(AnswerMode.DEGRADED, reason) for reason in DegradedReason}
FALLBACK = _TRUSTED[AnswerMode.FALLBACK]
NOT_IN_SYNC = _DEGRADED[DegradedReason.BOOKINGS_NOT_IN_SYNC]
_POOLED = {
    DegradedReason.OWNER_SILENT: DegradedReason.POOLED_OWNER_SILENT,
    DegradedReason.OWNER_BEHIND: DegradedReason.POOLED_OWNER_BEHIND,
}


@dataclass(frozen=True, slots=True)
class RankCounts:
    """Ranks of registered workers, how many are in each state of which one may be in several, and the degraded ones by
    the first reason."""

    registered: int
    cordoned: int
    silent: int
    approximate: int
    degraded: Counter[DegradedReason]


@dataclass(frozen=True, slots=True)
class RankState:
    """What the view holds of one rank. digest: order-independent hash of its (tier, sequence hash) facts."""

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
    """The fold over compiled kernels, or the plain one where numba cannot be imported."""
    compiled = _compiled()
    if compiled is None:
        return PlainRunFold()
    from streams.warming import warm_kernels

    warm_kernels()  # here, before anybody is answered: half a minute once, a tenth of a second from the cache
    return compiled[0]()


def _compiled() -> tuple[type[TreeRunFold], DecodeRuns, LabelsOf] | None:
    """The fold over compiled kernels and what decodes for it; None where numba cannot be imported."""
    try:
        from streams.core.index.tree_fold import TreeRunFold
        from streams.tables.run_decoding import decode_runs, labels_of
    except ImportError as exc:
        if exc.name is None or exc.name.split(".")[0] not in ("numba", "llvmlite"):
            raise
        return None
    return TreeRunFold, decode_runs, labels_of


class View:
    """The fold. `now_ms` is this process's monotonic clock: staleness is counted from receipt, so that clocks of other
    machines do not matter."""

    def __init__(
        self, settings: Settings, now_ms: Callable[[], int], make_fold: Callable[[], RunFold] = fast_fold
    ) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self._make_fold = make_fold
        self._lock = threading.Lock()
        # A dump of a million pooled rows must hold up no answer: these have one lock, and what answers read of them and
        # of labels another, which is the last to be taken and is held for microseconds.
        self._pooled_lock = threading.Lock()
        self._supplementary_lock = threading.Lock()
        self._predictions: ApproximatePrefixIndex | None = None
        ttl_s = settings.router_predicted_ttl_s if settings.kv_events else settings.router_ttl_s
        if settings.kv_overlap_score_weight > 0.0 and ttl_s > 0.0:
            self._predictions = ApproximatePrefixIndex(ttl_s)
        self._reset()

    def _reset(self) -> None:
        self.index: RunFold = self._make_fold()
        self._pooled = PooledView(self._settings.schema_ids)
        self._pooled_index = PooledIndex(self._new_sets(), self._pooled.pools)
        self._labels = LabelIndex(self._new_sets())
        #: Whether any block is pooled or labelled: where none is, that is all that a choice asks.
        self.has_supplementary = False
        self._last_numbers: RankNumbering | None = None
        self._numbers: RankNumbering | None = None  # of the registry's ranks; made anew for the next who asks
        # Rows of pooled blocks by the partition of their owners, who need not be registered any more.
        self._pooled_partitions: Counter[int] = Counter()
        self.workers: dict[WorkerId, Worker] = {}
        self._progress: dict[RankId, Progress] = {}
        # What engines say, with the time after which it is too old; when the first of them will be; and their gauges
        # with what the registry knows, for a choice.
        self._reports: dict[RankId, tuple[MetricsReport, int]] = {}
        self._reports_end_ms = _NEVER_MS
        self._metrics: dict[RankId, WorkerMetrics] = {}
        self._cpu_workers: frozenset[WorkerId] | None = None
        self._models: frozenset[str] | None = None  # of the registry's workers; made anew for the next who asks
        self._eligible: dict[WorkerFilter, tuple[RankId, ...]] = {}
        self._fleet: FleetState | None = None
        self._silent: set[RankId] = set()  # ranks whose bridge was not heard of for longer than it promised
        # With the time of receipt; None for one that lay in the log before we came, which proves no living owner.
        self._partitions: dict[int, tuple[PartitionRecord, int | None]] = {}
        # Ranks of which the index had no room for a record, in the epoch that they had then: what is held of them is
        # wrong until a new one begins.
        self._incomplete: dict[RankId, Epoch] = {}
        self.records_over_capacity = 0
        compiled = _compiled()
        # The index again and its decoder, where it takes many records in one call.
        self._batches: tuple[TreeRunFold, DecodeRuns, LabelsOf] | None = None
        if compiled is not None and isinstance(self.index, compiled[0]):
            self._batches = (self.index, *compiled[1:])

    def _new_sets(self) -> FactSets:
        return PythonFactSets() if _compiled() is None else CompiledFactSets()

    def reset(self) -> None:
        """Forget everything, to be folded anew."""
        with self._lock:
            self._reset()

    def fold_index(self, key: bytes, value: bytes | None, live: bool = True) -> None:
        """Fold one record of the index changelog; raises BadRecord and stays as it was.

        live: it was written after this reader had reached the end of its partition.
        """
        if key.startswith(RUN_PREFIX):
            run_id = parse_run_key(key)
            run = None if value is None else decode_run(key, value)
            with self._lock:
                try:
                    self.index.fold([run_id], [run])
                except IndexFull:
                    self._note_over_capacity(run_id.rank)
                if run is None:
                    self._fold_labels(key, run_id.rank, None, ())
                elif run.moe or key in self._labels:
                    held = [(SequenceHash(run.sequence[at]), run.moe[at]) for at in run.held() if at in run.moe]
                    self._fold_labels(key, run_id.rank, run.epoch, held)
                if self._labels:
                    self._end_labels()
        elif key.startswith(PROGRESS_PREFIX):
            rank = parse_progress_key(key)
            progress = None if value is None else decode_progress(key, value)
            with self._lock:
                self._fold_progress(rank, progress)
        elif key.startswith(PARTITION_PREFIX):
            if value is not None:
                record = decode_partition(key, value)
                with self._lock:
                    self._partitions[record.partition] = (record, self._now_ms() if live else None)
        elif not key.startswith(PARKED_PREFIX):  # which its owner swaps in when the rest has come
            raise BadRecord("bad_key", f"{key.hex()} is no key of the index")

    def fold_index_batch(
        self, records: Sequence[tuple[bytes, bytes | None]], live: bool = True
    ) -> list[tuple[int, BadRecord]]:
        """Fold records of the index changelog in order; gives those that cannot be used, each with its position.

        A bad record stops none of the others. live: as in `fold_index`, of all of them.
        """
        bad: list[tuple[int, BadRecord]] = []
        columns: RunColumns | None = None
        alone: Iterable[int] = range(len(records))
        if self._batches is not None:
            columns, alone = self._batches[1](records)
        folded = 0
        for position in alone:
            if columns is not None:
                self._fold_runs(columns, folded, position, records)
            folded = position + 1
            try:
                self.fold_index(*records[position], live)
            except BadRecord as exc:
                bad.append((position, exc))
        if columns is not None:
            self._fold_runs(columns, folded, len(records), records)
        return bad

    def _fold_runs(
        self, columns: RunColumns, first: int, last: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> None:
        for begin in range(first, last, _LOCKED_RECORDS):
            end = min(begin + _LOCKED_RECORDS, last)
            with self._lock:
                assert self._batches is not None  # whoever decoded columns has what folds them
                for record in self._batches[0].fold_records(columns, begin, end):
                    self._note_over_capacity(columns.place_of(record)[0])
            self._fold_labels_of(columns, begin, end, records)

    def _fold_labels_of(
        self, columns: RunColumns, first: int, last: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> None:
        """Labels of records that the index has taken in, one at a time: requests wait for one at most."""
        assert self._batches is not None  # whoever decoded columns has what reads their labels
        if not self._labels and not columns.labelled[first:last].any():
            return
        labelled = self._batches[2](columns, first, last)
        for record in range(first, last):
            key = records[record][0]
            if record in labelled or key in self._labels:
                rank, epoch = columns.place_of(record)[0], columns.epoch_of(record)
                with self._lock:
                    self._fold_labels(key, rank, epoch, labelled.get(record, ()))
        with self._lock:
            self._end_labels()

    def _fold_labels(self, key: bytes, rank: RankId, epoch: Epoch | None, labelled: Iterable[LabelledBlock]) -> None:
        """Labels of one record, epoch None for a tombstone; of one that the index has left behind they are nobody's."""
        with self._supplementary_lock:
            if epoch is None:
                self._labels.end(key)
            elif epoch == self.index.epoch_of(rank):
                self._labels.fold(key, rank, epoch, labelled)
            self._note_supplementary()

    def _end_labels(self) -> None:
        """Ranks of which the index knows a newer epoch than that of their labels lose these."""
        with self._supplementary_lock:
            self._labels.tidy()
            for rank, epoch in self._labels.ranks():
                if self.index.epoch_of(rank) != epoch:
                    self._labels.forget_rank(rank)
            self._note_supplementary()

    def _note_supplementary(self) -> None:
        self.has_supplementary = len(self._pooled_index) > 0 or len(self._labels) > 0

    def _note_over_capacity(self, rank: RankId) -> None:
        self.records_over_capacity += 1
        epoch = self.index.epoch_of(rank)
        if epoch is not None and self._incomplete.get(rank) != epoch:
            self._incomplete[rank] = epoch
            log.error(
                "The index has no room for run records of rank %s; answers for it are degraded until its cache is "
                "cleared or its engine restarts. Give this router a smaller scope",
                rank,
            )

    def fold_worker(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of the registry, a worker or a CXL pool; raises BadRecord."""
        if key.startswith(POOL_KEY_PREFIX):
            with self._pooled_lock:
                self._pooled.fold_pool(key, value)
                with self._supplementary_lock:
                    self._pooled_index.invalidate_masks()
            return
        try:
            worker_id = WorkerId(int(key))
        except ValueError as exc:
            raise BadRecord("bad_key", f"{key!r} is no worker id") from exc
        worker = None if value is None else decode_worker(value, self._settings.schema_ids)
        if worker_key(worker_id) != key or (worker is not None and worker.worker_id != worker_id):
            # Its tombstone would come under another key than its rank's events, and never end it.
            raise BadRecord("wrong_key", f"key {key!r} is not the worker's own")
        with self._lock:
            self._eligible.clear()
            self._fleet = self._cpu_workers = self._numbers = self._models = None
            if worker is None:
                self._forget_worker(worker_id)
            else:
                self.workers[worker_id] = worker
                for report, _ in [self._reports[rank] for rank in worker.ranks() if rank in self._reports]:
                    self._note_metrics(report)

    def fold_pooled(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of the changelog of pooled blocks; raises BadRecord and stays as it was."""
        with self._pooled_lock:
            change = self._pooled.fold(key, value)
            if change is None:
                return
            with self._supplementary_lock:
                self._pooled_index.replace(*change)
                self._note_supplementary()
            if (change.before is None) != (change.after is None):
                partition = partition_of(parse_block_key(key).owner.worker_id, self._settings.partitions)
                self._pooled_partitions[partition] += 1 if change.before is None else -1

    def pools(self) -> dict[str, CxlPool]:
        """The registry's CXL pools by id."""
        with self._pooled_lock:
            return dict(self._pooled.pools)

    def pooled_blocks(self) -> list[tuple[PooledBlock, frozenset[WorkerId]]]:
        """Every pooled block, and the registered workers that can reach it, in order of sequence hash and owner."""
        with self._lock:
            registered = frozenset(self.workers)
        with self._pooled_lock:
            blocks = [(block, self._pooled.reachable(block, registered)) for block in self._pooled.blocks()]
        return sorted(blocks, key=lambda found: (found[0].sequence, found[0].owner, found[0].metadata.pool_id or ""))

    def n_pooled(self) -> int:
        """Rows of the table of pooled blocks, whatever their state."""
        with self._pooled_lock:
            return len(self._pooled)

    def pooled_over_capacity(self) -> int:
        """Rows, or places of theirs, that found no room."""
        return self._pooled.over_capacity + self._pooled_index.over_capacity

    def labelled(self) -> tuple[int, int]:
        """Run records with labels, and labels that found no room."""
        return len(self._labels), self._labels.over_capacity

    def ranks_missing_labels(self, ranks: Iterable[RankId]) -> set[RankId]:
        """Of these ranks those of which labels found no room: blocks that are not known to match may match."""
        with self._lock:  # whoever folds labels has it too
            incomplete = self._labels.incomplete
            return {rank for rank in ranks if rank in incomplete} if incomplete else set()

    def fold_report(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of worker-metrics; raises BadRecord and stays as it was."""
        report = decode_metrics(value, self._settings.schema_ids)
        if worker_key(report.rank.worker_id) != key:
            raise BadRecord("wrong_key", f"key {key!r} is not worker {report.rank.worker_id}'s")
        now_ms = self._now_ms()
        until_ms = now_ms + report.ttl_ms
        with self._lock:
            if report.rank not in self._reports and len(self._reports) >= REPORTS_MAX:
                self._end_reports(now_ms)
                if len(self._reports) >= REPORTS_MAX:
                    raise BadRecord("over_capacity", f"the engines of {REPORTS_MAX} ranks are known already")
            self._reports_end_ms = min(self._reports_end_ms, until_ms)
            self._reports[report.rank] = (report, until_ms)
            self._note_metrics(report)

    def reports(self) -> list[MetricsReport]:
        """What engines say of their ranks, in order; of nobody for longer than its record promises."""
        with self._lock:
            self._end_reports(self._now_ms())
            return [report for _, (report, _) in sorted(self._reports.items())]

    def reports_of(self, worker: Worker) -> list[MetricsReport]:
        """The same of one worker's ranks."""
        with self._lock:
            self._end_reports(self._now_ms())
            return [self._reports[rank][0] for rank in worker.ranks() if rank in self._reports]

    def fleet(self) -> FleetState:
        """What is known of the ranks' engines; a value, which does not change when more is told."""
        now_ms = self._now_ms()
        with self._lock:
            self._end_reports(now_ms)
            if self._cpu_workers is None:
                cpus = (worker.worker_id for worker in self.workers.values() if worker.device_class == CPU_CLASS)
                self._cpu_workers = frozenset(cpus)
            if self._fleet is None:  # a thousand ranks are copied in 5 us, and each says something every second
                self._fleet = FleetState(self._metrics.copy(), self._cpu_workers)
            return self._fleet

    def _note_metrics(self, report: MetricsReport) -> None:
        self._metrics[report.rank] = with_registered(report.metrics, self.workers.get(report.rank.worker_id))
        self._fleet = None

    def _forget_report(self, rank: RankId) -> None:
        del self._reports[rank], self._metrics[rank]
        self._fleet = None

    def _end_reports(self, now_ms: int) -> None:
        """Forget what is too old, and note when the next one will be."""
        if now_ms < self._reports_end_ms:
            return
        for rank in [rank for rank, (_, until_ms) in self._reports.items() if until_ms <= now_ms]:
            self._forget_report(rank)
        self._reports_end_ms = min((until_ms for _, until_ms in self._reports.values()), default=_NEVER_MS)

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request by what was folded. local: uint64[n_blocks] from the root."""
        index = self.index
        if index.concurrent:
            return index.find_matches(local)
        with self._lock:
            return index.find_matches(local)

    def overlap(self, local: HashArray) -> tuple[OverlapScores, frozenset[RankId]]:
        """The same with what is predicted, and the ranks whose score is a prediction.

        Where the index is not read, predictions are all there is, or nothing.
        """
        known = self.find_matches(local) if self._settings.reads_index else _NO_SCORES
        if self._predictions is None:
            return known, _NO_RANKS
        with self._lock:
            self._predictions.expire(self._now_ms() / 1000)
            predicted = self._predictions.find_matches(local)
        return with_predictions(known, predicted)

    def supplementary(
        self, sequence: HashArray, model: str, moe: MoeSelector | None, *, pooled: bool
    ) -> SupplementaryMatches | None:
        """What is pooled of a request, if it is asked for, and labelled as `moe` asks; None where nothing is.

        sequence: uint64[n], the request's sequence hashes, contiguous.
        """
        pooled = pooled and len(self._pooled_index) > 0
        if not pooled and (moe is None or not self._labels):
            return None
        numbers = self._rank_numbers()
        with self._supplementary_lock:
            reached = self._pooled_index.query(model, numbers) if pooled else None
            labelled = self._labels.query(moe, numbers) if moe is not None and self._labels else None
        return SupplementaryMatches(sequence, reached, labelled, self._holders_along, self._supplementary_lock)

    def _holders_along(
        self, sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates
    ) -> HolderBitmaps | None:
        with self._lock:
            return self.index.holders_along(sequence, first, rows, candidates)

    def _rank_numbers(self) -> RankNumbering:
        numbers = self._numbers
        if numbers is None:
            with self._lock:
                ranks = tuple(rank for _, worker in sorted(self.workers.items()) for rank in worker.ranks())
                # Most records of the registry renew a lease: the fleet is what it was, and so are all answers.
                known = self._last_numbers
                numbers = known if known is not None and known.ranks == ranks else RankNumbering(ranks)
                self._numbers = self._last_numbers = numbers
        return numbers

    def predict(self, rank: RankId, local: HashArray) -> None:
        """A request of these blocks was sent to the rank, which will hold them. local: uint64[n_blocks]."""
        if self._predictions is not None and local.size:
            with self._lock:
                self._predictions.predict(rank, local, self._now_ms() / 1000)

    def model_of(self, model: str | None) -> str:
        """Give the model asked for, or the only one there is; raises UnknownModel."""
        models = self._models
        if models is None:
            with self._lock:
                models = self._models = frozenset(worker.model for worker in self.workers.values())
        if model is None and len(models) == 1:
            return next(iter(models))
        if model is None and models:
            raise UnknownModel("model is left out and there are several", models=sorted(models))
        if model not in models and models:
            raise UnknownModel(f"no worker serves model {model!r}", models=sorted(models))
        return model or ""

    def eligible(self, worker_filter: WorkerFilter) -> tuple[RankId, ...]:
        """Ranks that pass every filter, whatever is known of their caches, and whose bridge is not silent.

        The same tuple as long as nothing changes.
        """
        with self._lock:
            ranks = self._eligible.get(worker_filter)
            if ranks is None:
                if len(self._eligible) >= _KEPT_FILTERS_MAX:
                    self._eligible.clear()
                passing = eligible_ranks(self.workers, worker_filter)
                ranks = self._eligible[worker_filter] = tuple(rank for rank in passing if rank not in self._silent)
            return ranks

    def refusals(self, worker_filter: WorkerFilter) -> dict[FilterReason, int]:
        """How many ranks of the registry each filter takes out, for whoever finds that none passes."""
        with self._lock:
            return refusals(self.workers.values(), worker_filter, self._silent)

    def silent_ranks(self, worker_id: WorkerId) -> list[DpRank]:
        """A worker's ranks that no request goes to, since their bridge is silent."""
        with self._lock:
            return sorted(rank.dp_rank for rank in self._silent if rank.worker_id == worker_id)

    def all_ranks(self) -> list[RankId]:
        """Every rank of every registered worker."""
        with self._lock:
            return sorted(rank for worker in self.workers.values() for rank in worker.ranks())

    def progress_of(self, worker_id: WorkerId) -> list[Progress]:
        """Progress of a worker's ranks, as far as they have told anything."""
        with self._lock:
            return [progress for rank, progress in self._progress.items() if rank.worker_id == worker_id]

    def trust(
        self,
        ranks: Iterable[RankId],
        predicted: Set[RankId] = _NO_RANKS,
        *,
        pooled: bool = False,
        labelled: bool = False,
    ) -> Trust:
        """The worst that is true of any of these ranks; predicted: those whose score is a prediction.

        pooled: pooled blocks count too, so that whoever writes any of them must live, be he eligible or long dead.
        labelled: labels count too, so that none of these ranks' must be lacking.
        """
        now_ms = self._now_ms()
        with self._lock:
            return self._trust(ranks, predicted, now_ms, pooled=pooled, labelled=labelled)

    def _trust(
        self, ranks: Iterable[RankId], predicted: Set[RankId], now_ms: int, *, pooled: bool, labelled: bool
    ) -> Trust:
        if not self._settings.reads_index:
            return _TRUSTED[AnswerMode.APPROXIMATE if self._predictions is not None else AnswerMode.FALLBACK]
        worst = AnswerMode.EXACT
        fresh: set[int] = set()
        ranks_missing_labels = (self._labels.incomplete or None) if labelled else None
        for rank in ranks:
            progress = self._progress.get(rank)
            if progress is None:
                return _DEGRADED[DegradedReason.NO_EVENTS_YET]
            health = progress.health
            if health is Health.DEGRADED or health is Health.REMOVED:
                return _DEGRADED[DegradedReason.EVENTS_LOST if health is Health.DEGRADED else DegradedReason.REMOVED]
            if self._incomplete and self._misses_records(rank):
                return _DEGRADED[DegradedReason.OVER_CAPACITY]
            if ranks_missing_labels is not None and rank in ranks_missing_labels:
                return _DEGRADED[DegradedReason.LABELS_OVER_CAPACITY]
            partition = partition_of(rank.worker_id, self._settings.partitions)
            if partition not in fresh:
                reason = self._degraded_by_owner(partition, now_ms)
                if reason is not None:
                    return _DEGRADED[reason]
                fresh.add(partition)
            if health is Health.APPROXIMATE or rank in predicted:
                worst = AnswerMode.APPROXIMATE
        if pooled and self._pooled_partitions:
            if self.pooled_over_capacity():
                return _DEGRADED[DegradedReason.POOLED_OVER_CAPACITY]
            for partition, n_rows in self._pooled_partitions.copy().items():
                reason = self._degraded_by_owner(partition, now_ms) if n_rows else None
                if reason is not None:
                    return _DEGRADED[_POOLED[reason]]
        return _TRUSTED[worst]

    def _degraded_by_owner(self, partition: int, now_ms: int) -> DegradedReason | None:
        """Whether a partition's owner was not heard of lately, or is behind either of its sources."""
        record, received_ms = self._partitions.get(partition, (None, None))
        if record is None or received_ms is None or now_ms - received_ms > self._settings.stale_after_ms:
            return DegradedReason.OWNER_SILENT
        if all(source.behind_ms <= self._settings.behind_after_ms for source in record.sources):
            return None
        return DegradedReason.OWNER_BEHIND

    def rank_counts(self) -> RankCounts:
        """Count the registered ranks by state; a millisecond for a thousand."""
        now_ms = self._now_ms()
        with self._lock:
            workers = list(self.workers.values())
            ranks = [rank for worker in workers for rank in worker.ranks()]
            trusts = [self._trust((rank,), _NO_RANKS, now_ms, pooled=False, labelled=False) for rank in ranks]
            return RankCounts(
                registered=len(ranks),
                cordoned=sum(worker.dp_size for worker in workers if worker.state is WorkerState.CORDONED),
                silent=sum(rank in self._silent for rank in ranks),
                approximate=sum(trust.mode is AnswerMode.APPROXIMATE for trust in trusts),
                degraded=Counter(trust.reason for trust in trusts if trust.reason is not None),
            )

    def rank_states(self) -> list[RankState]:
        """Every rank that ever told anything, in order."""
        with self._lock:
            return [self._rank_state(rank) for rank in sorted(self.index.ranks())]

    def members(self) -> set[tuple[RankId, Tier, SequenceHash]]:
        """Every fact held; two views are equal when these sets, and the epochs, are."""
        with self._lock:
            return set(self.index.members())

    def applied_offsets(self) -> dict[int, int]:
        """Source offset that each partition's owner had applied at its last record."""
        with self._lock:
            return {
                partition: record.sources[0].applied_offset
                for partition, (record, _) in self._partitions.items()
                if record.sources
            }

    def _misses_records(self, rank: RankId) -> bool:
        """Whether the index had no room for a record of this rank's epoch."""
        return rank in self._incomplete and self._incomplete[rank] == self.index.epoch_of(rank)

    def _rank_state(self, rank: RankId) -> RankState:
        n_blocks, digest = self.index.facts(rank)
        epoch = self.index.epoch_of(rank)
        assert epoch is not None  # asked of the fold's own ranks only
        progress = self._progress.get(rank)
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

    def _fold_progress(self, rank: RankId, progress: Progress | None) -> None:
        if progress is None:
            self._progress.pop(rank, None)
            self._note_silence(rank, silent=False)
            self.index.forget_rank(rank)
            with self._supplementary_lock:  # also where it has no labels now: its next epoch may be a smaller one
                self._labels.forget_rank(rank)
                self._note_supplementary()
            return
        known = self._progress.get(rank)
        if known is not None and (progress.epoch, progress.sequence) < (known.epoch, known.sequence):
            return
        self.index.enter_epoch(rank, progress.epoch)
        if self._labels:
            self._end_labels()
        self._progress[rank] = progress
        self._note_silence(rank, silent=progress.silent)

    def _note_silence(self, rank: RankId, *, silent: bool) -> None:
        if silent != (rank in self._silent):
            (self._silent.add if silent else self._silent.discard)(rank)
            self._eligible.clear()

    def _forget_worker(self, worker_id: WorkerId) -> None:
        """A worker left the registry: nothing is predicted of it, and its engine says nothing."""
        worker = self.workers.pop(worker_id, None)
        for rank in [rank for rank in self._reports if rank.worker_id == worker_id]:
            self._forget_report(rank)
        if self._predictions is not None:
            for rank in worker.ranks() if worker else ():
                self._predictions.clear(rank)

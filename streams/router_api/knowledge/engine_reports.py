"""What engines and bridges report about themselves: the fold of `worker-metrics`, by the time of receipt.

What lives here: the last report of each rank, the gauges that routing policies read, and which workers have a bridge
that is silent or does not feed them. What must not: scraping (engines.scraping), and what follows from the numbers
(core.routing.policies, trust).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from streams.core.bridge_pulses import BridgePulses
from streams.core.engine_metrics import MetricsReport, WorkerMetrics, with_registered
from streams.core.ids import RankId, WorkerId
from streams.core.loads.expiries import Expiries
from streams.core.routing.busy import BlocksInUse, ReportedBlocks
from streams.core.routing.request import FleetState
from streams.core.workers import CPU_CLASS, Worker
from streams.errors import BadRecord
from streams.kafka.clients import worker_key
from streams.kafka.records import PULSES, decode_metrics
from streams.lmcache.feeds import KnownFeed
from streams.lmcache.pools import FEEDS_MAX, Feed

#: Ranks whose reports are kept. A fleet has a few thousand ranks; the limit keeps a foreign writer from filling memory.
REPORTS_MAX = 65_536

#: Later than any time that a clock returns.
_NEVER_MS = 1 << 62

#: The only clock of the reports.
_CLOCK = 0


class EngineReports:
    """The last report of each rank, kept for the time for which its record is valid. Thread-safe.

    workers: the registry. The view changes it, and calls `registry_changed` or `forget_worker` after each change.
    now_ms: a monotonic clock.
    """

    def __init__(
        self,
        workers: dict[WorkerId, Worker],
        schema_ids: Mapping[str, int],
        now_ms: Callable[[], int],
        silent_after_ms: int,
    ) -> None:
        """silent_after_ms: see BridgePulses."""
        self._workers = workers
        self._schema_ids = schema_ids
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._reports: dict[RankId, tuple[MetricsReport, int]] = {}  # with the time until which each one is valid
        self._ends: Expiries[RankId] = Expiries()  # of the reports, on one clock
        self._metrics: dict[RankId, WorkerMetrics] = {}  # with totals from the registry where engines report none
        self._cpu_workers: frozenset[WorkerId] | None = None  # None until it is needed again
        self._fleet: FleetState | None = None
        self._blocks = ReportedBlocks(workers)
        self._pulses = BridgePulses(silent_after_ms)
        # The workers that each bridge feeds, and the bridge of each of these; None until needed after a change.
        self._fed_by: dict[str, set[WorkerId]] | None = None
        self._bridge_of: dict[WorkerId, str] = {}
        self._feeds: dict[WorkerId, KnownFeed] = {}  # of LMCache, by the owners of their rows
        self._bridge_silent: frozenset[WorkerId] = frozenset()
        self._bridge_silent_until_ms = -1  # when a bridge that is not silent may have become silent

    def fold(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of worker-metrics. A record that raises BadRecord changes nothing."""
        if key.startswith(PULSES.keys.prefix):
            self._fold_pulse(key, value)
            return
        report = decode_metrics(value, self._schema_ids)
        if worker_key(report.rank.worker_id) != key:
            raise BadRecord("wrong_key", f"key {key!r} is not the key of worker {report.rank.worker_id}")
        now_ms = self._now_ms()
        until_ms = now_ms + report.ttl_ms
        with self._lock:
            if report.rank not in self._reports and len(self._reports) >= REPORTS_MAX:
                self._expire(now_ms)
                if len(self._reports) >= REPORTS_MAX:
                    raise BadRecord("over_capacity", f"reports of {REPORTS_MAX} ranks are already kept")
            self._ends.discard(report.rank, _CLOCK)
            self._ends.schedule(report.rank, _CLOCK, until_ms)
            self._reports[report.rank] = (report, until_ms)
            self._note_metrics(report)

    def _fold_pulse(self, key: bytes, value: bytes | None) -> None:
        pulse = PULSES.decode_row(key, value, self._schema_ids)
        now_ms = self._now_ms()
        with self._lock:
            may_have_been_silent = self._bridge_silent and self._pulses.silent_from_ms(pulse.bridge) <= now_ms
            if self._pulses.note(pulse, now_ms) or may_have_been_silent:
                self._bridge_silent_until_ms = -1

    def bridge_silent(self) -> frozenset[WorkerId]:
        """The workers whose bridge is silent or does not feed them: their events may not have been passed on.

        Owners of LMCache's rows are among them, also while events of theirs are missing.

        A worker that has never had a bridge is not among them. It is the same set as long as nothing changes.
        """
        now_ms = self._now_ms()
        if now_ms < self._bridge_silent_until_ms:
            return self._bridge_silent
        with self._lock:
            next_ms, silent = _NEVER_MS, set[WorkerId]()
            for bridge, worker_ids in self._workers_by_bridge().items():
                silent_from_ms = self._pulses.silent_from_ms(bridge)
                if silent_from_ms <= now_ms:
                    silent.update(worker_ids)
                else:
                    next_ms = min(next_ms, silent_from_ms)
                    silent.update(self._pulses.not_fed(bridge, worker_ids))
            silent.update(worker_id for worker_id, feed in self._feeds.items() if feed.is_incomplete)
            if silent != self._bridge_silent:
                self._bridge_silent = frozenset(silent)
            self._bridge_silent_until_ms = next_ms
            return self._bridge_silent

    def _workers_by_bridge(self) -> dict[str, set[WorkerId]]:
        if self._fed_by is None:
            self._fed_by = {}
            workers = self._workers.copy().values()  # in one step, since the view may change the registry meanwhile
            self._bridge_of = {worker.worker_id: worker.lease.bridge for worker in workers if worker.lease is not None}
            for worker_id, feed in self._feeds.items():
                if feed.lease is not None:
                    self._bridge_of[worker_id] = feed.lease.bridge
            for worker_id, bridge in self._bridge_of.items():
                self._fed_by.setdefault(bridge, set()).add(worker_id)
        return self._fed_by

    def lease_changed(self, worker: Worker) -> None:
        """A worker's lease was renewed, or has another holder, and nothing else of it has changed."""
        with self._lock:
            bridge = None if worker.lease is None else worker.lease.bridge
            if self._fed_by is not None and self._bridge_of.get(worker.worker_id) != bridge:
                self._forget_bridges()

    def note_feed(self, feed: Feed, known: KnownFeed | None) -> None:
        """Take in the record of a feed of LMCache, or its tombstone. Raises BadRecord if there are too many."""
        with self._lock:
            worker_id, before = feed.worker_id, self._feeds.get(feed.worker_id)
            if known is None:
                self._feeds.pop(worker_id, None)
            elif before is None and len(self._feeds) >= FEEDS_MAX:
                raise BadRecord("over_capacity", f"{FEEDS_MAX} feeds of LMCache are already kept")
            else:
                self._feeds[worker_id] = known
            bridges = [None if each is None or each.lease is None else each.lease.bridge for each in (before, known)]
            incomplete = [each is not None and each.is_incomplete for each in (before, known)]
            if bridges[0] != bridges[1] or incomplete[0] != incomplete[1]:
                self._forget_bridges()

    def _forget_bridges(self) -> None:
        self._fed_by = None
        self._bridge_silent_until_ms = -1

    def registry_changed(self, worker: Worker) -> None:
        """A worker was registered or changed: its totals may be different now."""
        with self._lock:
            self._fleet = self._cpu_workers = None
            self._forget_bridges()
            for report, _ in [self._reports[rank] for rank in worker.ranks() if rank in self._reports]:
                self._note_metrics(report)

    def forget_worker(self, worker_id: WorkerId) -> None:
        """A worker left the registry: drop the reports of its ranks."""
        with self._lock:
            self._fleet = self._cpu_workers = None
            self._forget_bridges()
            for rank in [rank for rank in self._reports if rank.worker_id == worker_id]:
                self._forget(rank)

    def reports(self) -> list[MetricsReport]:
        """Every valid report, in order of rank."""
        with self._lock:
            self._expire(self._now_ms())
            return [report for _, (report, _) in sorted(self._reports.items())]

    def reports_of(self, worker: Worker) -> list[MetricsReport]:
        """The valid reports of one worker's ranks."""
        with self._lock:
            self._expire(self._now_ms())
            return [self._reports[rank][0] for rank in worker.ranks() if rank in self._reports]

    def fleet(self, ranks: Iterable[RankId] | None = None) -> FleetState:
        """Return what routing policies read about engines. Later reports do not change the value returned.

        ranks: those for which the times of their last reports are needed as well; None for none.
        """
        now_ms = self._now_ms()
        with self._lock:
            self._expire(now_ms)
            if self._cpu_workers is None:
                workers = self._workers.copy()  # in one step, since the view may change the registry meanwhile
                cpus = (worker.worker_id for worker in workers.values() if worker.device_class == CPU_CLASS)
                self._cpu_workers = frozenset(cpus)
            if self._fleet is None:  # kept until the next report: a copy of 1,000 ranks takes 5 us
                self._fleet = FleetState(self._metrics.copy(), self._cpu_workers, self.blocks_in_use)
            if ranks is None:
                return self._fleet
            reports = self._reports
            received_ms = {rank: reports[rank][1] - reports[rank][0].ttl_ms for rank in ranks if rank in reports}
            return replace(self._fleet, received_ms=received_ms)

    def blocks_in_use(self, ranks: Sequence[RankId]) -> BlocksInUse:
        """Return what the registry and the last reports say about the blocks of these ranks, in their order."""
        with self._lock:
            self._expire(self._now_ms())
            return self._blocks.of(ranks)

    def _note_metrics(self, report: MetricsReport) -> None:
        self._blocks.note(report.rank, report.metrics)
        self._metrics[report.rank] = with_registered(report.metrics, self._workers.get(report.rank.worker_id))
        self._fleet = None

    def _forget(self, rank: RankId) -> None:
        del self._reports[rank], self._metrics[rank]
        self._ends.discard(rank, _CLOCK)
        self._blocks.forget(rank)
        self._fleet = None

    def _expire(self, now_ms: int) -> None:
        """Drop reports that are no longer valid."""
        for rank in self._ends.take_due(_CLOCK, now_ms):
            self._forget(rank)

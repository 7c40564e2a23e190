"""A router's view without Kafka: workers, reports and blocks, folded as if their records had been read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.hashing import local_hashes
from streams.core.ids import DpRank, HashArray, RankId, Tier, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.workers import Worker
from streams.kafka.clients import partition_of
from streams.kafka.records import encode_metrics, encode_worker
from streams.lab.engines.held_chains import FIRST_EPOCH, runs_of_chain
from streams.router_api.knowledge.view import View
from streams.settings import Settings
from streams.tables.records import (
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    PartitionRecord,
    encode_partition,
    encode_progress,
    encode_run,
)

BLOCK_SIZE = 16
TTL_MS = 5_000
LOCAL = local_hashes(list(range(4 * BLOCK_SIZE)), BLOCK_SIZE)


class Clock:
    """Milliseconds that the test sets."""

    def __init__(self) -> None:
        self.now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


def rank(worker_id: int, dp_rank: int = 0) -> RankId:
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


def view_of(clock: Clock, **changes: Any) -> View:
    return View(Settings(**changes), clock)


def register(view: View, worker_id: int, **changes: Any) -> None:
    worker = replace(Worker(WorkerId(worker_id), "http://w", "m", BLOCK_SIZE), **changes)
    view.fold_worker(str(worker_id).encode(), encode_worker(worker))


def report(view: View, of: RankId, **gauges: Any) -> None:
    """Fold a report of these metrics by the rank's engine."""
    record = MetricsReport(of, WorkerMetrics(**gauges), TTL_MS, 0, 3)
    view.fold_report(str(of.worker_id).encode(), encode_metrics(record))


def hold(view: View, of: RankId, local: HashArray, tier: Tier = Tier.DEVICE) -> None:
    """Fold records by which a rank holds these blocks and is exact, and its partition's owner is running."""
    hold_only(view, of, local, tier)
    partition = partition_of(of.worker_id, Settings().partitions)
    view.fold_index(PARTITION_KEY.pack(partition), encode_partition(PartitionRecord(partition, 0, "test", ())))
    caught_up(view, partition)


def hold_only(view: View, of: RankId, local: HashArray, tier: Tier = Tier.DEVICE) -> None:
    """Fold records by which a rank holds these blocks and is exact, and none of its partition's owner."""
    for run in runs_of_chain(of, local, tier=tier):
        view.fold_index(RUN_KEY.pack(run.key), encode_run(run))
    progress = Progress(of, FIRST_EPOCH, 0, health=Health.EXACT, model="m", block_size=BLOCK_SIZE)
    view.fold_index(PROGRESS_KEY.pack(of), encode_progress(progress))


def caught_up(view: View, partition: int) -> None:
    """The ends of the partition's topics have just been read, and they are empty."""
    now_ms = view._now_ms()
    view.note_ends(partition, now_ms, {})
    view.note_pooled_ends(partition, now_ms, {}, {})

"""What an engine says of itself in numbers, as records of `worker-metrics` carry it.

What lives here: the value. What must not: scraping, Kafka, and what follows from the numbers (core.policies).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streams.core.ids import RankId
from streams.core.workers import Worker

#: The longest that a rank's numbers may be used without newer ones: the topic keeps them no longer.
METRICS_TTL_MS_MAX = 10 * 60 * 1000


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Gauges of one rank; the names are those of the topic. A total of 0 is one that nobody knows.

    gpu_cache_usage_perc: share of the cache in use, 0 to 1. request_active_slots: requests running.
    """

    gpu_cache_usage_perc: float = 0.0
    num_requests_waiting: int = 0
    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0

    @property
    def load(self) -> float:
        """Share of the rank's blocks in use; 0 where its room is not known."""
        return self.kv_active_blocks / self.kv_total_blocks if self.kv_total_blocks else 0.0

    @property
    def request_load_ratio(self) -> float:
        """Share of the rank's slots in use; 0 where their number is not known."""
        return self.request_active_slots / self.request_total_slots if self.request_total_slots else 0.0

    @property
    def full(self) -> bool:
        """Whether the rank has no block or no slot left."""
        return self.load >= 1.0 or self.request_load_ratio >= 1.0


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """One record of `worker-metrics`.

    ttl_ms: the next one comes within this, from receipt. scraped_at_ms: the bridge's clock, for people.
    n_scrapes_failed: since the bridge took the engine up.
    """

    rank: RankId
    metrics: WorkerMetrics
    ttl_ms: int
    scraped_at_ms: int
    n_scrapes_failed: int = 0


def with_registered(metrics: WorkerMetrics, worker: Worker | None) -> WorkerMetrics:
    """Fill totals that the engine does not tell from its registration, where that has them."""
    if worker is None:
        return metrics
    if not metrics.request_total_slots and worker.max_requests:
        metrics = replace(metrics, request_total_slots=worker.max_requests)
    if not metrics.kv_total_blocks and worker.kv_total_blocks:
        active = metrics.kv_active_blocks or round(metrics.gpu_cache_usage_perc * worker.kv_total_blocks)
        metrics = replace(metrics, kv_active_blocks=active, kv_total_blocks=worker.kv_total_blocks)
    return metrics

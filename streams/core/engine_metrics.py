"""The metrics that an engine reports about itself, as records of `worker-metrics` contain them.

What lives here: the values. What must not: scraping, Kafka, and what follows from the numbers (core.routing.policies).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streams.core.ids import RankId
from streams.core.workers import Worker

#: The longest time for which a report may be valid: the topic keeps records no longer.
METRICS_TTL_MS_MAX = 10 * 60 * 1000


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Gauges of one rank, with the names that they have on the topic. A total of 0 is unknown.

    gpu_cache_usage_perc: the share of the cache that is in use, 0 to 1. request_active_slots: running requests.
    """

    gpu_cache_usage_perc: float = 0.0
    num_requests_waiting: int = 0
    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0

    @property
    def load(self) -> float:
        """Share of the rank's blocks that are in use; 0 if its number of blocks is unknown."""
        return self.kv_active_blocks / self.kv_total_blocks if self.kv_total_blocks else 0.0

    @property
    def request_load_ratio(self) -> float:
        """Share of the rank's request slots that are in use; 0 if their number is unknown."""
        return self.request_active_slots / self.request_total_slots if self.request_total_slots else 0.0

    @property
    def full(self) -> bool:
        """Whether the rank has no free block or no free slot."""
        return self.load >= 1.0 or self.request_load_ratio >= 1.0


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """One record of `worker-metrics`.

    ttl_ms: how long it is valid, from receipt. scraped_at_ms: by the bridge's clock, for people. n_scrapes_failed:
    since the bridge began to feed the engine.
    """

    rank: RankId
    metrics: WorkerMetrics
    ttl_ms: int
    scraped_at_ms: int
    n_scrapes_failed: int = 0


def with_bookings(metrics: WorkerMetrics, n_requests: int, n_blocks: int) -> WorkerMetrics:
    """Return metrics with requests and blocks that were booked since the engine was scraped.

    The requests take slots, and wait if the number of slots is known and all are taken.
    """
    slots = metrics.request_active_slots + n_requests
    total = metrics.request_total_slots
    n_waiting = max(0, slots - max(total, metrics.request_active_slots)) if total else 0
    share = n_blocks / metrics.kv_total_blocks if metrics.kv_total_blocks else 0.0
    return replace(
        metrics,
        gpu_cache_usage_perc=min(1.0, metrics.gpu_cache_usage_perc + share),
        num_requests_waiting=metrics.num_requests_waiting + n_waiting,
        request_active_slots=slots - n_waiting,
        kv_active_blocks=metrics.kv_active_blocks + n_blocks,
    )


def with_registered(metrics: WorkerMetrics, worker: Worker | None) -> WorkerMetrics:
    """Return metrics with the totals that the engine does not report taken from its registration, if that has them."""
    if worker is None:
        return metrics
    if not metrics.request_total_slots and worker.max_requests:
        metrics = replace(metrics, request_total_slots=worker.max_requests)
    if not metrics.kv_total_blocks and worker.kv_total_blocks:
        active = metrics.kv_active_blocks or round(metrics.gpu_cache_usage_perc * worker.kv_total_blocks)
        metrics = replace(metrics, kv_active_blocks=active, kv_total_blocks=worker.kv_total_blocks)
    return metrics

"""Busy thresholds: which ranks have so much load that they get no new requests.

What lives here: the filter. What must not: the sources of its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads
from streams.core.workers import Worker


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """A rank over either threshold is busy. 0 switches a threshold off.

    decode_blocks: share of the rank's blocks that are in use, by its bookings or as its engine reports, whichever is
    greater. A rank is never over it if neither its registration nor its engine gives its number of blocks.
    prefill_tokens: prompt tokens that the rank has still to compute.
    """

    decode_blocks: float = 0.0
    prefill_tokens: int = 0

    def __bool__(self) -> bool:
        return self.decode_blocks > 0.0 or self.prefill_tokens > 0

    def is_busy(
        self, rank: RankId, worker: Worker | None, loads: ActiveLoads, metrics: Mapping[RankId, WorkerMetrics]
    ) -> bool:
        """Whether a rank is over either threshold."""
        load = loads.load(rank)
        if 0 < self.prefill_tokens < load.prefill_tokens:
            return True
        if not self.decode_blocks > 0.0:
            return False
        reported = metrics.get(rank)
        total = (worker.kv_total_blocks if worker else None) or (reported.kv_total_blocks if reported else 0)
        active = max(load.decode_blocks, reported.kv_active_blocks if reported else 0)
        return total > 0 and active > self.decode_blocks * total


def idle_ranks(
    ranks: Sequence[RankId],
    thresholds: BusyThresholds,
    workers: Mapping[WorkerId, Worker],
    loads: ActiveLoads,
    metrics: Mapping[RankId, WorkerMetrics],
) -> Sequence[RankId]:
    """Return the ranks that are not busy; `ranks` itself if none is busy."""
    if not thresholds:
        return ranks
    idle = [rank for rank in ranks if not thresholds.is_busy(rank, workers.get(rank.worker_id), loads, metrics)]
    return ranks if len(idle) == len(ranks) else tuple(idle)

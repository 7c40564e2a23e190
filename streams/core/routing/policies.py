"""The two older KV policies, by name: what each makes of a rank's hits and its engine's metrics.

What lives here: their formulas, pure. What must not: choosing among equals (selection), and the cost in blocks (cost).
Both are written as costs, so that the lower one wins in every mode.

metrics: one for each candidate, None where nothing is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from streams.core.engine_metrics import WorkerMetrics

#: Weight of the share of busy slots in `load_deviation`.
GAMMA = 0.1
#: Weight of the deviation where loads differ and where they do not, and the ratio of their standard deviation to their
#: mean that divides the two.
ALPHA_UNEVEN = 0.7
ALPHA_EVEN = 0.3
BALANCE_THRESHOLD = 0.1


def hit_usage_waiting(hit_rates: Sequence[float], metrics: Sequence[WorkerMetrics | None]) -> list[float] | None:
    """-(2 * hit rate - cache usage - normalised waiting) of each candidate; None where all are zero: no preference.

    hit_rates: cached share of the request. Waiting requests are normalised by the greatest number of them. Of a rank
    whose metrics nobody knows the hits alone count.
    """
    waiting_max = max((each.num_requests_waiting for each in metrics if each), default=0)
    costs = []
    for hit_rate, each in zip(hit_rates, metrics, strict=True):
        cost = -2.0 * hit_rate
        if each:
            cost += each.gpu_cache_usage_perc
            cost += each.num_requests_waiting / waiting_max if waiting_max else 0.0
        costs.append(cost)
    return costs if any(costs) else None


def load_deviation(new_shares: Sequence[float], metrics: Sequence[WorkerMetrics | None]) -> list[float] | None:
    """alpha * load deviation + (1 - alpha) * normalised new tokens + gamma * request load ratio of each candidate.

    new_shares: share of the request that each would have to compute. A load's deviation is its distance from the mean
    of all known ones. Full ranks cost infinity. A rank whose metrics nobody knows counts as one of mean load without
    requests; None where that is every rank.
    """
    loads = [each.load for each in metrics if each]
    if not loads:
        return None
    mean = math.fsum(loads) / len(loads)
    deviation = math.sqrt(math.fsum((load - mean) ** 2 for load in loads) / len(loads))
    alpha = ALPHA_UNEVEN if deviation > BALANCE_THRESHOLD * mean else ALPHA_EVEN
    costs = []
    for new_share, each in zip(new_shares, metrics, strict=True):
        if each is not None and each.full:
            costs.append(math.inf)
            continue
        cost = (1.0 - alpha) * new_share
        if each is not None:
            cost += alpha * (each.load - mean) + GAMMA * each.request_load_ratio
        costs.append(cost)
    return costs

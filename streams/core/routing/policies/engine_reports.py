"""The two older KV policies: costs from a rank's cache hits and the metrics that its engine reports.

What lives here: their formulas. What must not: breaking ties (selection), and the cost in blocks (cost). Both are
written as costs, so that the lowest one wins in every mode.

metrics: one per candidate, None if its engine has reported none. They include what was booked since the report
(engine_metrics.with_bookings). Shares of a request are shares of its tokens. A rank's hits are its own leading blocks,
whatever their tier: neither tier weights nor pooled blocks nor labels are part of these policies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import Int64Array
from streams.core.routing.selection import RouterMode

#: Modes of these policies (core.routing.selection.RouterMode).
MODES = frozenset({RouterMode.HIT_USAGE_WAITING, RouterMode.LOAD_DEVIATION})

#: Weight of the share of busy slots in `load_deviation`.
GAMMA = 0.1
#: Weights of a load's deviation: the first if loads are uneven, the second if they are even. Loads are uneven if their
#: standard deviation is greater than BALANCE_THRESHOLD of their mean.
ALPHA_UNEVEN = 0.7
ALPHA_EVEN = 0.3
BALANCE_THRESHOLD = 0.1


def hit_rates(scores: Int64Array, n_tokens: int, block_size: int) -> list[float]:
    """Return the share of a request's tokens that each candidate has cached.

    scores: int64[n], the candidates' own leading blocks. n_tokens: the request's length.
    """
    rates: list[float] = (scores * block_size / max(1, n_tokens)).tolist()
    return rates


def hit_usage_waiting(rates: Sequence[float], metrics: Sequence[WorkerMetrics | None]) -> list[float] | None:
    """Return -(2 * hit rate - cache usage - normalised waiting) for each candidate, or None if all are zero.

    rates: see `hit_rates`. Waiting requests are divided by the greatest number of them. For a rank
    without metrics, only the hit rate is used.
    """
    waiting_max = max((reported.num_requests_waiting for reported in metrics if reported), default=0)
    costs = []
    for hit_rate, reported in zip(rates, metrics, strict=True):
        cost = -2.0 * hit_rate
        if reported:
            cost += reported.gpu_cache_usage_perc
            cost += reported.num_requests_waiting / waiting_max if waiting_max else 0.0
        costs.append(cost)
    return costs if any(costs) else None


def load_deviation(new_shares: Sequence[float], metrics: Sequence[WorkerMetrics | None]) -> list[float] | None:
    """Return alpha * load deviation + (1 - alpha) * new share + gamma * request load ratio for each candidate.

    new_shares: the share of the request's tokens that each candidate would have to compute. A load's deviation is its
    distance from the mean of all reported loads. The cost of a full rank is infinite. A rank without metrics is priced
    at the mean load and without requests. Returns None if no rank has metrics.
    """
    loads = [reported.load for reported in metrics if reported]
    if not loads:
        return None
    mean = math.fsum(loads) / len(loads)
    deviation = math.sqrt(math.fsum((load - mean) ** 2 for load in loads) / len(loads))
    alpha = ALPHA_UNEVEN if deviation > BALANCE_THRESHOLD * mean else ALPHA_EVEN
    costs = []
    for new_share, reported in zip(new_shares, metrics, strict=True):
        if reported is not None and reported.full:
            costs.append(math.inf)
            continue
        cost = (1.0 - alpha) * new_share
        if reported is not None:
            cost += alpha * (reported.load - mean) + GAMMA * reported.request_load_ratio
        costs.append(cost)
    return costs

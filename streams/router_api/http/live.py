"""What the live page shows: samples of the last minutes, and the fleet at this moment.

What lives here: taking samples, and the JSON of GET /live. What must not: the page itself (page/), the numbers' sources
(decision_counts, fleet_load, view), and metrics for Prometheus (metrics).

Samples are cumulative where their sources are, and the answer has the differences. So a sample costs the same whatever
happened since the last one, and nothing is counted twice.

State: the samples of one router.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from streams.core.engine_metrics import WorkerMetrics
from streams.core.routing.audit import AuditOutcome
from streams.core.routing.reasons import EXPLANATIONS
from streams.core.routing.trust import AnswerMode
from streams.core.workers import Worker, WorkerState
from streams.decision_log.words import TERMS
from streams.errors import NotReady
from streams.router_api.deciding.router import Router
from streams.router_api.http.fleet_load import FleetLoad, Load
from streams.router_api.http.metrics import LATENCY_BOUNDS, RouterMetrics

#: Interval of the samples, and how many are kept: the last 5 minutes, in about 100 KB.
SAMPLE_EVERY_S = 2.0
SAMPLES_MAX = 151

#: Workers in the answer: those with the most requests in flight. A page with more rows is not readable.
WORKERS_SHOWN_MAX = 200

#: Worker pools in the answer, by name: one for each model and role; and pools of memory.
POOLS_SHOWN_MAX = 20

#: Numbers in the answer are for people.
_DIGITS = 4


class Sample(NamedTuple):
    """One moment. Counts are totals since the router started.

    modes: answers by the mode of the chosen rank, in the order of AnswerMode. latency: decisions by LATENCY_BOUNDS.
    lag_s: of the partition that lags most; None if no lag is known. imbalance: the greatest score of any model.
    agreed, judged: exact answers whose overlap the engine found, and those whose engine reported.
    """

    at_s: float
    modes: tuple[int, ...]
    blocks: int
    hit_blocks: int
    latency: tuple[int, ...]
    lag_s: float | None
    gaps: int
    queue: int
    load: Load
    imbalance: float
    agreed: int
    judged: int


class Live:
    """Owner of the samples of one router. Used on the loop that serves the API."""

    def __init__(
        self,
        router: Router,
        metrics: RouterMetrics,
        queue_length: Callable[[], int] = lambda: 0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """queue_length: requests that wait in this router. now_s: a monotonic clock."""
        self._router = router
        self._metrics = metrics
        self._queue_length = queue_length
        self._now_s = now_s
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_EVERY_S)

    def sample(self) -> None:
        """Take a sample. 1,000 ranks take about a millisecond."""
        router, view, now_s = self._router, self._router.view, self._now_s()
        router.decisions.roll(now_s, view.fleet.workers)
        load = self._load()
        lags = [lag.ms for lag in view.lags().values() if lag.ms is not None]
        audited = router.audit.exact
        self._samples.append(
            Sample(
                now_s,
                tuple(router.decisions.chosen_modes[mode] for mode in AnswerMode),
                router.decisions.blocks,
                router.decisions.hit_blocks,
                tuple(self._metrics.route_seconds.counts),
                max(lags) / 1000 if lags else None,
                view.fleet.n_gaps(),
                self._queue_length(),
                load.total(),
                max((decode for decode, _ in load.imbalance().values()), default=0.0),
                audited[AuditOutcome.AGREED],
                audited.total() - audited[AuditOutcome.NOT_REPORTED],
            )
        )

    def answer(self) -> dict[str, Any]:
        """The JSON of GET /live."""
        router, view = self._router, self._router.view
        load, decisions = self._load(), router.recent.answer(self._now_s())
        shown = sorted(load.workers, key=lambda entry: (-load.by_worker[entry.worker_id].requests, entry.worker_id))
        del shown[WORKERS_SHOWN_MAX:]
        hit_rates, engines = router.decisions.hit_rates(), view.fleet.engines.fleet().metrics
        workers = [
            {
                **self._worker_json(worker, load.by_worker[worker.worker_id], engines),
                "hit_rate": _rounded(hit_rates.get(worker.worker_id)),
            }
            for worker in shown
        ]
        return {
            "every_s": SAMPLE_EVERY_S,
            "router": {
                "id": router.loads.router_id,
                "router_mode": router.policy.mode,
                "not_ready_because": self._not_ready(),
                "bookings_in_sync": router.loads.in_sync,
                "index_blocks": len(view.index),
                "dead_letters": sum(router.dead_letters.counts().values()),
                "audited": {outcome: router.audit.outcomes[outcome] for outcome in AuditOutcome},
                "agreed_share": _rounded(router.audit.share_agreed()),
            },
            "samples": samples_json(self._samples, self._now_s()),
            "partitions": [
                {"partition": partition, "lag_s": None if lag.ms is None else lag.ms / 1000, "lag_records": lag.records}
                for partition, lag in view.lags().items()
            ],
            "workers": workers,
            "workers_left_out": len(load.workers) - len(shown),
            "pools": self._metrics.scaling.pools_json()[:POOLS_SHOWN_MAX],
            "memory_pools": self._memory_pools(),
            "explanations": explanations_json(workers),
            "decisions": decisions,
            "term_meanings": {name: TERMS[name] for name in TERMS if any(name in each["terms"] for each in decisions)},
        }

    def _memory_pools(self) -> list[dict[str, Any]]:
        facts = self._router.view.facts
        contents = [facts.pool_contents(pool) for pool in facts.pools().values() if not pool.lost]
        contents.sort(key=lambda each: (-each.n_blocks, each.pool.pool_id))
        return [
            {
                "pool_id": pool.pool_id,
                "latency_class": pool.latency_class,
                "gb_per_s": gb_per_s,
                "blocks": n_blocks,
                "capacity_blocks": pool.capacity_blocks,
                "members": len(pool.members),
            }
            for pool, n_blocks, gb_per_s in contents[:POOLS_SHOWN_MAX]
        ]

    def _load(self) -> FleetLoad:
        workers = self._router.view.fleet.workers.copy()
        with self._router.loads.locked() as loads:
            return FleetLoad(workers.values(), loads)

    def _not_ready(self) -> str | None:
        try:
            self._router.readiness.topics.check()
            self._router.readiness.check()
        except NotReady as exc:
            return str(exc)
        return None

    def _worker_json(self, worker: Worker, load: Load, engines: Any) -> dict[str, Any]:
        state, reason = self._state_of(worker)
        reported: list[WorkerMetrics] = [engines[rank] for rank in worker.ranks() if rank in engines]
        usage = sum(metrics.gpu_cache_usage_perc for metrics in reported) / len(reported) if reported else None
        return {
            "worker_id": str(worker.worker_id),  # JavaScript rounds numbers of 64 bits
            "model": worker.model,
            "ranks": worker.dp_size,
            "state": state,
            "reason": reason,
            "cache_usage": _rounded(usage),
            **load._asdict(),
        }

    def _state_of(self, worker: Worker) -> tuple[str, str | None]:
        """What matters most about a worker: why it gets no requests, or how far its ranks can be trusted."""
        view = self._router.view
        if worker.state is WorkerState.CORDONED:
            return "cordoned", None
        if view.fleet.ranks_of_wrong_block_size(worker):
            return "wrong_block_size", None
        if view.fleet.silent_ranks(worker.worker_id):
            return "silent", None
        if view.fleet.avoided(worker.worker_id)[0]:
            return "avoided", None
        trust = view.assess(list(worker.ranks()))
        return trust.mode, trust.reason


def explanations_json(workers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What each reason of these workers means and its remedy; of a state if there is no reason."""
    names = {worker["reason"] or worker["state"] for worker in workers}
    return {name: EXPLANATIONS[name]._asdict() for name in EXPLANATIONS if name in names}


def samples_json(samples: Sequence[Sample], now_s: float) -> dict[str, Any]:
    """Samples as columns, the oldest first: rates and shares between each sample and the one before it."""
    columns: dict[str, list[float | None]] = {
        name: []
        for name in (
            *("age_s", "decisions_per_s", "hit_rate", "latency_ms_p50", "latency_ms_p99", "lag_s"),
            *("requests", "prefill_tokens", "decode_blocks", "imbalance", "gaps", "queue", "agreed_share"),
        )
    }
    modes: dict[str, list[float | None]] = {mode: [] for mode in AnswerMode}
    for before, after in pairwise(samples):
        elapsed_s = after.at_s - before.at_s
        blocks, judged = after.blocks - before.blocks, after.judged - before.judged
        by_mode = [(now - then) / elapsed_s for now, then in zip(after.modes, before.modes, strict=True)]
        latency = [now - then for now, then in zip(after.latency, before.latency, strict=True)]
        row = {
            "age_s": now_s - after.at_s,
            "decisions_per_s": sum(by_mode),
            "hit_rate": (after.hit_blocks - before.hit_blocks) / blocks if blocks else None,
            "latency_ms_p50": _milliseconds(quantile(LATENCY_BOUNDS, latency, 0.5)),
            "latency_ms_p99": _milliseconds(quantile(LATENCY_BOUNDS, latency, 0.99)),
            "lag_s": after.lag_s,
            **after.load._asdict(),
            "imbalance": after.imbalance,
            "gaps": after.gaps - before.gaps,
            "queue": after.queue,
            "agreed_share": (after.agreed - before.agreed) / judged if judged else None,
        }
        for name, value in row.items():
            columns[name].append(_rounded(value))
        for mode, rate in zip(AnswerMode, by_mode, strict=True):
            modes[mode].append(_rounded(rate))
    return {**columns, "modes": modes}


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which this share of observations is, linear within a bucket as in Prometheus; None without any.

    counts: one for each bound, and one for everything above the last, which counts as the last bound.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    low, below = 0.0, 0
    for bound, count in zip(bounds, counts, strict=False):
        if below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        low, below = bound, below + count
    return bounds[-1]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)

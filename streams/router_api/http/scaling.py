"""The signals of worker pools for autoscalers: readings every two seconds, and the JSON of GET /scale.

What lives here: which ranks make a pool, and the readings. What must not: what the signals are made of
(core.routing.saturation), and how metrics are written (metrics).

State: the meters of one router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from streams.core.ids import Int64Array, RankId, WorkerId
from streams.core.routing.busy import BlocksInUse
from streams.core.routing.saturation import (
    NOTHING_QUEUED,
    READ_EVERY_S,
    PoolMeter,
    PoolSignals,
    Queued,
    read_pool,
)
from streams.core.workers import Role
from streams.errors import NotReady
from streams.router_api.deciding.admission import RECENT_BOOKINGS, Admission
from streams.router_api.deciding.router import Router
from streams.router_api.messages.requests import UNFILTERED

#: Numbers in the answer are for people.
_DIGITS = 4

#: The role of the pool in which a request waits that names no phase, or one that no worker of its model has alone.
_ROLES = (Role.BOTH, Role.DECODE, Role.PREFILL)


class PoolKey(NamedTuple):
    """Which pool."""

    model: str
    role: Role


class _Members(NamedTuple):
    """What belongs to a pool. slots, running: int64[n], as read_pool takes them."""

    workers: int
    ranks: list[RankId]
    ms_per_token: float
    blocks: BlocksInUse
    slots: Int64Array
    running: Int64Array


@dataclass(frozen=True, slots=True)
class PoolNow:
    """A pool and its signals at the last reading.

    replicas: its workers to which requests may go. ranks: theirs. queued: requests that wait for them in this router.
    """

    replicas: int
    ranks: int
    queued: int
    signals: PoolSignals
    replicas_wanted: float


class Scaling:
    """Owner of one router's meters. Used on the loop that serves the API.

    pools: by model and role. A pool without workers is not among them, and none is in the first seconds in which the
    router is ready, or knows the pool.
    """

    def __init__(
        self, router: Router, admission: Admission, now_ms: Callable[[], float] = lambda: time.monotonic() * 1000.0
    ) -> None:
        """now_ms: a monotonic clock."""
        self._router = router
        self._admission = admission
        self._now_ms = now_ms
        self._router_id = ""
        self._meters: dict[PoolKey, PoolMeter] = {}
        self.pools: dict[PoolKey, PoolNow] = {}

    async def run(self) -> None:
        """Take readings until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(READ_EVERY_S)

    def read(self) -> None:
        """Take a reading of every pool. 1,000 ranks take about a millisecond."""
        router = self._router
        try:
            router.readiness.check()
        except NotReady:
            self._meters, self.pools = {}, {}
            return
        if self._router_id != router.loads.router_id:  # it has read the log again, so that sums began anew
            self._router_id, self._meters = router.loads.router_id, {}
        members = self._members()
        queued = self._queued(members)
        with router.loads.locked() as loads:
            # This router does not see what waits in others. They have as much, if requests are spread evenly.
            n_routers = max(1, len(loads.recent_routers(RECENT_BOOKINGS)))
            readings = {
                key: read_pool(
                    self._now_ms(),
                    of_pool.ranks,
                    loads,
                    of_pool.ms_per_token,
                    blocks=of_pool.blocks,
                    slots=of_pool.slots,
                    running=of_pool.running,
                    queued=queued.get(key, NOTHING_QUEUED).times(n_routers),
                )
                for key, of_pool in members.items()
            }
        self._meters = {key: self._meters.get(key) or PoolMeter() for key in members}
        self.pools = {
            key: self._pool(members[key], queued.get(key, NOTHING_QUEUED), signals)
            for key, reading in readings.items()
            if (signals := self._meters[key].note(reading)) is not None
        }

    def _pool(self, members: _Members, queued: Queued, signals: PoolSignals) -> PoolNow:
        wanted = signals.replicas_wanted(members.workers, self._router.settings.scale_saturation_target)
        return PoolNow(members.workers, len(members.ranks), int(queued.requests), signals, wanted)

    def answer(self) -> dict[str, Any]:
        """The JSON of GET /scale; raises NotReady."""
        self._router.readiness.check()
        return {
            "pools": self.pools_json(),
            "saturation_target": self._router.settings.scale_saturation_target,
            "in_sync": self._router.loads.in_sync,
        }

    def pools_json(self) -> list[dict[str, Any]]:
        """The pools of GET /scale; none while the router is not ready."""
        return [
            {
                "model": key.model,
                "role": key.role,
                "replicas": pool.replicas,
                "ranks": pool.ranks,
                "saturation": round(pool.signals.saturation, _DIGITS),
                "compute": round(pool.signals.compute, _DIGITS),
                "blocks": _rounded(pool.signals.blocks),
                "slots": _rounded(pool.signals.slots),
                "backlog_ms": round(pool.signals.backlog_ms, _DIGITS),
                "queued_requests": pool.queued,
                "replicas_wanted": round(pool.replicas_wanted, _DIGITS),
            }
            for key, pool in sorted(self.pools.items())
        ]

    def _members(self) -> dict[PoolKey, _Members]:
        """Each pool's workers and ranks to which requests may go."""
        router, fleet = self._router, self._router.view.fleet
        workers = fleet.workers.copy()
        worker_ids: dict[PoolKey, set[WorkerId]] = {}
        ranks: dict[PoolKey, list[RankId]] = {}
        for model in sorted({worker.model for worker in workers.values()}):
            of_model = UNFILTERED._replace(model=model, block_size=router.settings.block_size_of(model))
            for rank in fleet.eligible(of_model):
                worker = workers.get(rank.worker_id)
                if worker is not None and worker.model == model:  # and not one that has this name as an alias
                    key = PoolKey(model, worker.role)
                    worker_ids.setdefault(key, set()).add(rank.worker_id)
                    ranks.setdefault(key, []).append(rank)
        return {
            key: _Members(
                len(worker_ids[key]),
                of_pool,
                router.ms_per_token(key.model),
                fleet.engines.blocks_in_use(of_pool),
                *self._slots(of_pool),
            )
            for key, of_pool in ranks.items()
        }

    def _slots(self, ranks: Sequence[RankId]) -> tuple[Int64Array, Int64Array]:
        """How many requests each rank runs at a time, and has by its engine's report: int64[n] each, 0 for unknown."""
        fleet = self._router.view.fleet
        metrics, workers = fleet.engines.fleet().metrics, fleet.workers
        slots, running = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
        for index, rank in enumerate(ranks):
            reported, worker = metrics.get(rank), workers.get(rank.worker_id)
            slots[index] = (reported.request_total_slots if reported else 0) or (worker and worker.max_requests) or 0
            if reported is not None:
                running[index] = reported.request_active_slots + reported.num_requests_waiting
        return slots, running

    def _queued(self, members: dict[PoolKey, _Members]) -> dict[PoolKey, Queued]:
        """What waits in this router, by pool."""
        queued: dict[PoolKey, Queued] = {}
        for (model, phase), waiting in self._admission.queued().items():
            roles = _ROLES if phase is None else (phase, *_ROLES)
            key = next((key for role in roles if (key := PoolKey(model, role)) in members), None)
            if key is not None:
                queued[key] = queued.get(key, NOTHING_QUEUED).plus(waiting)
        return queued


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)

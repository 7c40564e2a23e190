"""Signals for autoscalers: which workers make a pool, what a router answers to GET /scale, and its metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streams.core.loads.bookings import BookingPhase
from streams.core.routing import saturation
from streams.core.routing.saturation import DRAIN_MS
from streams.core.workers import Role, WorkerState
from streams.errors import NotReady
from streams.process.waiting import wait_for
from streams.router_api.deciding.admission import Admission
from streams.router_api.deciding.router import Router
from streams.router_api.http import scaling
from streams.router_api.http.scaling import PoolKey, Scaling
from streams.router_api.messages.requests import parse_route_query
from streams.settings import Settings
from tests.helpers.api import PATIENCE_S, TOKENS, metrics, packed
from tests.helpers.local_router import local_router
from tests.helpers.pages import blocks_of
from tests.helpers.routers import ask, router_of
from tests.helpers.views import rank, register, report

#: The metrics of a pool that are numbers of GET /scale, with what a second is there.
SAME = {
    "kvstreams_pool_saturation": ("saturation", 1.0),
    "kvstreams_pool_backlog_seconds": ("backlog_ms", 1000.0),
    "kvstreams_pool_replicas": ("replicas", 1.0),
    "kvstreams_pool_replicas_wanted": ("replicas_wanted", 1.0),
}


class Read:
    """A router's meters, which take readings when the test says so."""

    def __init__(self, router: Router) -> None:
        self.now_ms = 0.0
        self.admission = Admission(router)
        self.scaling = Scaling(router, self.admission, lambda: self.now_ms)

    def pools(self) -> dict[tuple[str, str], dict[str, Any]]:
        """GET /scale by model and role, after enough readings of the present state."""
        for _ in range(6):
            self.scaling.read()
            self.now_ms += 2000.0
        return {(pool["model"], pool["role"]): pool for pool in self.scaling.answer()["pools"]}


def test_a_pool_is_the_workers_of_a_model_and_role_to_which_requests_may_go() -> None:
    """Cordoned workers, and those with another block size, get no requests, so they are no capacity."""
    router = router_of(2)
    register(router.view, 3, role=Role.DECODE, dp_size=4)
    register(router.view, 4, model="other")
    register(router.view, 5, state=WorkerState.CORDONED)
    register(router.view, 6, block_size=32)
    found = {key: (pool["replicas"], pool["ranks"]) for key, pool in Read(router).pools().items()}
    assert found == {("m", "both"): (2, 2), ("m", "decode"): (1, 4), ("other", "both"): (1, 1)}


def test_an_alias_is_no_pool_of_its_own() -> None:
    """A worker counts for its model, whatever other names it has."""
    router = router_of(1)
    register(router.view, 2, model="other", aliases=("m",))
    assert {key: pool["replicas"] for key, pool in Read(router).pools().items()} == {
        ("m", "both"): 1,
        ("other", "both"): 1,
    }


def test_the_answer_says_what_is_needed_and_of_what() -> None:
    """What is booked and what engines report fills the pool, and the replicas that are wanted have the target."""
    router = router_of(2, scale_saturation_target=0.5)
    ask(router, worker_id=2)
    report(router.view, rank(1), kv_active_blocks=57, request_active_slots=3, request_total_slots=8)
    read = Read(router)
    (pool,) = read.pools().values()
    assert pool == {
        "model": "m",
        "role": "both",
        "replicas": 2,
        "ranks": 2,
        "saturation": 0.375,
        "compute": round(len(TOKENS) * 0.1 / 2 / DRAIN_MS, 4),
        "blocks": pytest.approx((57 + 4) / (0.95 * 200), abs=1e-4),
        "slots": 0.375,  # of the one rank whose slots are known
        "backlog_ms": 0.0,
        "queued_requests": 0,
        "replicas_wanted": 1.5,
    }
    assert read.scaling.answer()["saturation_target"] == 0.5


def test_registered_slots_count_where_the_engine_reports_none() -> None:
    """`max_requests` of a worker is the number of requests that it runs at a time."""
    router = router_of(1)
    assert Read(router).pools()["m", "both"]["slots"] is None
    register(router.view, 1, max_requests=4)
    ask(router)
    assert Read(router).pools()["m", "both"]["slots"] == 0.25


async def test_requests_that_wait_in_the_router_count() -> None:
    """A request in the queue is not booked, but needs the pool all the same. It counts in the pool of its phase."""
    router = router_of(1, router_queue_backlog_ms=1.0)
    register(router.view, 2, role=Role.PREFILL, kv_total_blocks=100)
    ask(router, "first", model="m", phase="decode")
    read = Read(router)
    query = parse_route_query({"request_id": "second", "model": "m", "phase": "decode", "queue": "on"})
    waiting = asyncio.create_task(read.admission.route(router.prepare(query, packed(TOKENS)), "", lambda: False))
    while not len(read.admission):
        await asyncio.sleep(0)
    pools = read.pools()
    assert {key: pool["queued_requests"] for key, pool in pools.items()} == {("m", "both"): 1, ("m", "prefill"): 0}
    own_ms = len(TOKENS) * 0.1
    assert pools["m", "both"]["backlog_ms"] == pytest.approx(2 * own_ms)
    assert pools["m", "both"]["blocks"] == pytest.approx(8 / 95, abs=1e-4)
    router.report_phase("first", BookingPhase.FREE)
    await waiting
    assert read.pools()["m", "both"]["queued_requests"] == 0


def test_a_router_that_is_not_ready_has_no_signals() -> None:
    """It knows only a part of the load, and an autoscaler would stop engines."""
    router = router_of(1)
    read = Read(router)
    assert read.pools()
    router.feeds.pending = lambda: {"loads": 1}  # type: ignore[method-assign]
    read.scaling.read()
    assert read.scaling.pools == {}
    with pytest.raises(NotReady):
        read.scaling.answer()


def test_a_router_that_reads_the_log_again_begins_its_means_anew() -> None:
    """The sums of the loads begin at 0 then, which is no fall of what was booked."""
    router = router_of(1, router_replica_sync=True)
    read = Read(router)
    read.pools()
    router.loads.reset()
    read.scaling.read()
    assert read.scaling.pools == {}
    assert read.pools()["m", "both"]["replicas_wanted"] == 1.0


def test_the_metrics_are_those_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus and GET /scale have the same numbers, by model and role."""
    monkeypatch.setattr(scaling, "READ_EVERY_S", 0.02)
    monkeypatch.setattr(saturation, "_SPAN_MS_MIN", 50.0)
    with local_router(Settings(), n_workers=3) as served:
        wait_for(lambda: served.api.get("/scale")["pools"], PATIENCE_S, "the first signals")
        served.api.route(request_id="r", token_ids=TOKENS)
        (asked,) = (code for _, _, code in blocks_of("docs/scaling.md") if code.startswith("curl"))
        answer = served.api.get(asked.strip().rpartition("localhost:8000")[2])
        page = metrics(served.api)
    (pool,) = answer["pools"]
    assert (pool["model"], pool["role"], pool["replicas"], answer["in_sync"]) == ("m", "both", 3, True)
    assert PoolKey("m", Role.BOTH) == (pool["model"], pool["role"])
    for name, (field, per_unit) in SAME.items():
        assert page[f"{name}/m/both"] == pytest.approx(pool[field] / per_unit, abs=0.2), name

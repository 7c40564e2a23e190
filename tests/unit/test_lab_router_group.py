"""Laboratory fleets behind one and several routers that queue. The figures are in benchmarks/queueing.py."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.routing.decision import RoutePolicy
from streams.core.routing.queue import QUEUE_BACKLOG_MS, QueuePolicy
from streams.core.routing.selection import RouterMode
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.simulation.fleet import FleetConfig, LabFailure, run
from streams.lab.simulation.results import RunResult
from streams.lab.simulation.router import LabQueue, LabRouter, RoutedRequest
from streams.lab.simulation.router_group import RouterGroup
from streams.lab.simulation.trace_runs import workload_of
from streams.lab.simulation.workload import Workload
from streams.lab.trace import ChatShape, generate

ENGINE = EngineConfig()


def workload(n: int = 60, rate_per_s: float = 18.0, seed: int = 1) -> Workload:
    return workload_of(generate(n, np.random.default_rng(seed), ChatShape(rate_per_s=rate_per_s)), ENGINE.block_size)


def make_group(
    n_routers: int,
    queue: LabQueue | None,
    *,
    n_engines: int = 8,
    seed: int = 1,
    delay_ms_mean: float = 20.0,
    policy: RoutePolicy | None = None,
) -> RouterGroup:
    rng = random.Random(seed)
    routers = [
        LabRouter(
            n_engines, ENGINE.block_size, ENGINE.n_blocks, policy or RoutePolicy(), rng, queue=queue, router_id=f"r{n}"
        )
        for n in range(n_routers)
    ]
    return RouterGroup(routers, rng, delay_ms_mean)


def simulate(requests: Workload, group: RouterGroup, n_engines: int = 8) -> RunResult:
    return run(requests, FleetConfig(ENGINE, n_engines), group)


def n_requests(router: LabRouter) -> int:
    return sum(router.loads.load(rank).requests for rank in router.ranks)


def routed(number: int, n_blocks: int = 4) -> RoutedRequest:
    names = np.arange(number * 100, number * 100 + n_blocks, dtype=np.uint64)
    return RoutedRequest(number, n_blocks * ENGINE.block_size, names, names.tobytes())


@pytest.mark.parametrize("queue", [None, LabQueue(200.0)])
def test_a_group_of_one_router_does_what_the_router_does(queue: LabQueue | None) -> None:
    """Round robin draws nothing at random, so that engine and times of every request are the same."""
    requests, policy = workload(40), RoutePolicy(RouterMode.ROUND_ROBIN)
    alone = LabRouter(8, ENGINE.block_size, ENGINE.n_blocks, policy, random.Random(1), queue=queue)
    expected = run(requests, FleetConfig(ENGINE, 8), alone)
    result = simulate(requests, make_group(1, queue, policy=policy))
    assert result.worker.tolist() == expected.worker.tolist()
    assert result.last_ms.tolist() == expected.last_ms.tolist()


@pytest.mark.parametrize("policy", QueuePolicy)
@pytest.mark.parametrize("n_routers", [1, 4])
def test_every_request_is_served_once(policy: QueuePolicy, n_routers: int) -> None:
    """Overloaded engines serve every request in the end, whatever the policy and the number of routers."""
    requests = workload(60, rate_per_s=40.0)
    result = simulate(requests, make_group(n_routers, LabQueue(200.0, policy), n_engines=3), n_engines=3)
    assert len(result.ttft_ms) == 60
    assert (result.ttft_ms > 0).all() and (result.last_ms >= result.first_ms).all()


def test_equal_arguments_give_equal_results() -> None:
    """A simulation depends on nothing but its arguments."""
    first, second = (simulate(workload(40), make_group(4, LabQueue(200.0))) for _ in range(2))
    assert first.worker.tolist() == second.worker.tolist()
    assert first.last_ms.tolist() == second.last_ms.tolist()


def test_other_routers_know_a_booking_after_its_delay_and_in_order() -> None:
    """Booking, first token and end of a request reach the other router one after the other, and none of them early."""
    group = make_group(2, None)
    for number in range(200):
        group.arrive(routed(number), 0.0)
        group.first_token(number, 0.0)
        group.ended(number, 0.0)
    seen: list[tuple[float, int]] = []
    while group.wake_ms < float("inf"):
        at_ms = group.wake_ms
        group.pump(at_ms)
        seen.append((at_ms, sum(n_requests(router) for router in group._routers)))
    times = [at_ms for at_ms, _ in seen]
    assert times == sorted(times) and times[0] > 0.0
    assert any(n for _, n in seen)  # a router knows bookings that the other one has ended
    assert seen[-1][1] == 0  # and none at the end


def test_every_router_keeps_an_engine_that_failed_out() -> None:
    """While an engine is down, no router sends it a request; later all of them do."""
    requests = workload(200, rate_per_s=20.0)
    failure = LabFailure(0, 2_000.0, for_ms=4_000.0, known_after_ms=0.0)
    result = run(requests, FleetConfig(ENGINE, 8, failures=(failure,)), make_group(4, LabQueue(QUEUE_BACKLOG_MS)))
    while_down = (result.first_ms > 2_000.0) & (result.first_ms < 6_000.0)
    assert while_down.sum() > 20
    assert not (result.worker[while_down] == 0).any()
    assert (result.worker[result.arrived_ms > 6_500.0] == 0).any()


def test_a_rank_that_failed_is_alive_in_no_router() -> None:
    """What engines do reaches all routers."""
    group = make_group(3, None, n_engines=2)
    group.worker_failed(0)
    assert [router.alive for router in group._routers] == [(RankId(WorkerId(2), DpRank(0)),)] * 3
    group.worker_returned(0)
    assert all(len(router.alive) == 2 for router in group._routers)


def test_four_routers_that_queue_are_about_as_fast_as_one() -> None:
    """With four routers, the mean time to first token is at most 1.1 times that of one router, over three traces."""
    ttft_ms: dict[int, list[float]] = {1: [], 4: []}
    for seed in (1, 2, 3):
        requests = workload(250, seed=seed)
        for n_routers, means in ttft_ms.items():
            group = make_group(n_routers, LabQueue(QUEUE_BACKLOG_MS), seed=seed)
            means.append(simulate(requests, group).figures().mean_ttft_ms)
    assert statistics.fmean(ttft_ms[4]) <= 1.1 * statistics.fmean(ttft_ms[1])


def test_a_request_that_is_sent_again_is_a_new_booking() -> None:
    """After a failure, the engine that gets the request has its load, in all routers."""
    group = make_group(2, None, n_engines=2, delay_ms_mean=0.0)
    for number in range(8):
        group.arrive(routed(number), 0.0)
        group.ended(number, 1.0)
        group.arrive(routed(number), 2.0)
    group.pump(3.0)
    assert [n_requests(router) for router in group._routers] == [8, 8]

"""Simulated engines behind one and several routers that queue. The figures are in benchmarks/queueing.py."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from streams.core.routing.decision import RoutePolicy
from streams.core.routing.queue import QueuePolicy
from streams.sim.engine_config import EngineConfig
from streams.sim.offline import Outcome, simulate
from streams.sim.queued import QueueConfig, simulate_queued
from streams.sim.trace import ChatShape, TraceRequest, generate


def trace(n: int = 60, rate_per_s: float = 18.0, seed: int = 1) -> list[TraceRequest]:
    return generate(n, np.random.default_rng(seed), ChatShape(rate_per_s=rate_per_s))


def run(requests: list[TraceRequest], config: QueueConfig, n_engines: int = 8) -> list[Outcome]:
    return simulate_queued(requests, n_engines, EngineConfig(), RoutePolicy(), config, random.Random(1))


def mean_ttft_ms(outcomes: list[Outcome]) -> float:
    return statistics.fmean(outcome.ttft_ms or 0.0 for outcome in outcomes)


def test_one_router_without_a_queue_is_the_offline_simulation() -> None:
    """Without a threshold the outcomes are those of `simulate`, except for the choice between equal ranks."""
    requests = trace(40)
    queued = run(requests, QueueConfig(1, backlog_ms=None))
    offline = simulate(requests, 8, EngineConfig(), RoutePolicy(), random.Random(1))
    assert [each.prompt_tokens for each in queued] == [each.prompt_tokens for each in offline]
    assert mean_ttft_ms(queued) == pytest.approx(mean_ttft_ms(offline), rel=0.2)


@pytest.mark.parametrize("policy", QueuePolicy)
@pytest.mark.parametrize("n_routers", [1, 4])
def test_every_request_is_served_once(policy: QueuePolicy, n_routers: int) -> None:
    """Overloaded engines serve every request in the end, whatever the policy and the number of routers."""
    requests = trace(60, rate_per_s=40.0)
    outcomes = run(requests, QueueConfig(n_routers, policy, backlog_ms=200.0), n_engines=3)
    assert [each.request for each in outcomes] == list(range(60))
    assert all(each.ttft_ms is not None and each.ttft_ms > 0 for each in outcomes)


def test_equal_arguments_give_equal_outcomes() -> None:
    """A simulation depends on nothing but its arguments."""
    requests, config = trace(40), QueueConfig(4, backlog_ms=200.0)
    assert run(requests, config) == run(requests, config)


def test_four_routers_that_queue_are_about_as_fast_as_one() -> None:
    """With four routers, the mean time to first token is at most 1.05 times that of one router, over three traces."""
    found: dict[int, list[float]] = {1: [], 4: []}
    for seed in (1, 2, 3):
        requests = trace(250, seed=seed)
        for n_routers, ttfts in found.items():
            outcomes = simulate_queued(
                requests, 8, EngineConfig(), RoutePolicy(), QueueConfig(n_routers), random.Random(seed)
            )
            ttfts.append(mean_ttft_ms(outcomes))
    assert sum(found[4]) <= 1.05 * sum(found[1])

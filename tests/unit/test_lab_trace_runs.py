"""The laboratory's version of a live fleet: the same requests, engines and conditions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from streams.core.routing.decision import RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.errors import SettingsError
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.simulation.experiment import run_policy
from streams.lab.simulation.fleet import FleetConfig, LabFailure, Lateness
from streams.lab.simulation.lab_engine_config import LabEngineConfig, default_engine
from streams.lab.simulation.lab_pool import LabPoolConfig
from streams.lab.simulation.recorded import replay
from streams.lab.simulation.results import RequestOutcome
from streams.lab.simulation.trace_runs import LiveRun, LiveTimes, repeat_choices, simulate, workload_of
from streams.lab.trace import TraceRequest, generate, infinite_cache_hit_share
from tests.helpers.naive_fleet import simulate_naively

#: Small caches, so that blocks are evicted.
ENGINE = EngineConfig(n_blocks=2048)

N_ENGINES = 4


@pytest.fixture(scope="module")
def chat() -> list[TraceRequest]:
    """Give 150 requests of conversations."""
    return generate(150, np.random.default_rng(3), None)


def lab_engine(config: EngineConfig) -> LabEngineConfig:
    """A laboratory engine of the same size and speed, whose prefills and answers share its steps."""
    return replace(
        default_engine(),
        block_size=config.block_size,
        n_blocks=config.n_blocks,
        prefill_ms=(0.0, config.prefill_us_per_token / 1000.0, config.prefill_ms_base),
        decode_ms=(0.0, 0.0, config.decode_ms_per_token),
    )


def on_time(
    requests: Sequence[TraceRequest], outcomes: Sequence[RequestOutcome], late_ms: float = 0.0, speedup: float = 1.0
) -> LiveRun:
    """A live run with these outcomes, in which decisions and reports are as late as this."""
    times = []
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.ttft_ms is not None and outcome.latency_ms is not None
        at_ms = request.timestamp_ms
        first_ms, ended_ms = at_ms + outcome.ttft_ms, at_ms + outcome.latency_ms
        times.append(LiveTimes(at_ms + late_ms, first_ms + late_ms, ended_ms + late_ms))
    return LiveRun(outcomes, times, speedup)


def test_requests_share_what_they_share(chat: list[TraceRequest]) -> None:
    """An infinite cache would find as much of the laboratory's prompts as of those that are sent to live engines."""
    share = infinite_cache_hit_share(chat, ENGINE.block_size)
    assert workload_of(chat, ENGINE.block_size).reusable_share() == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize("mode", ["kv", "round-robin", "least-loaded"])
def test_a_busy_fleet_does_the_same_for_every_request(chat: list[TraceRequest], mode: str) -> None:
    """Engine, hits and times of each request are those of the live engines' model, with caches that are full."""
    lab = simulate(chat, N_ENGINES, ENGINE, mode)
    model = simulate_naively(chat, N_ENGINES, ENGINE, RoutePolicy(RouterMode(mode)), random.Random(1))
    assert [(each.worker_id, each.cached_tokens, each.prompt_tokens, each.output_tokens) for each in lab] == [
        (each.worker_id, each.cached_tokens, each.prompt_tokens, each.output_tokens) for each in model
    ]
    assert [each.ttft_ms for each in lab] == pytest.approx([each.ttft_ms for each in model])
    assert [each.latency_ms for each in lab] == pytest.approx([each.latency_ms for each in model])


def test_engines_whose_steps_are_shared_find_the_same_blocks_if_choices_are_the_same(chat: list[TraceRequest]) -> None:
    """Both models of an engine have the same rules of caching: only times differ, and choices that depend on them."""
    workload = workload_of(chat, ENGINE.block_size)
    roomy = replace(ENGINE, n_blocks=16_384)
    own = run_policy(workload, FleetConfig(lab_engine(roomy), N_ENGINES), "kv").result
    followed = replay(workload, FleetConfig(roomy, N_ENGINES), own.worker.tolist(), []).row.result
    assert followed.reused_tokens.tolist() == own.reused_tokens.tolist()
    assert followed.last_ms.mean() < own.last_ms.mean()


@pytest.mark.parametrize("policy", ["kv", "expected-time", "round-robin"])
@pytest.mark.parametrize("speedup", [1.0, 4.0])
def test_a_run_that_follows_another_one_repeats_it(chat: list[TraceRequest], policy: str, speedup: float) -> None:
    """With the choices and the times of a run, each request finds the same, and the policy would change no choice."""
    undisturbed = simulate(chat, N_ENGINES, ENGINE, policy)
    outcomes = simulate(chat, N_ENGINES, ENGINE, policy, live=on_time(chat, undisturbed))
    if (
        policy != "expected-time"
    ):  # it learns from the lengths of answers, which the clients of a live run do not report
        assert outcomes == undisturbed
    live = on_time(chat, outcomes)
    own = simulate(chat, N_ENGINES, ENGINE, policy, live=live)
    assert [(each.worker_id, each.cached_tokens) for each in own] == [
        (each.worker_id, each.cached_tokens) for each in outcomes
    ]
    fast = simulate(chat, N_ENGINES, ENGINE, policy, live=replace(live, speedup=speedup))
    followed = repeat_choices(chat, N_ENGINES, ENGINE, policy, replace(on_time(chat, fast), speedup=speedup))
    assert followed.changed == 0.0
    assert [(each.worker_id, each.cached_tokens) for each in followed.outcomes] == [
        (each.worker_id, each.cached_tokens) for each in fast
    ]
    assert [each.ttft_ms for each in followed.outcomes] == pytest.approx([each.ttft_ms for each in fast])


def test_requests_are_routed_in_the_order_in_which_they_were_decided(chat: list[TraceRequest]) -> None:
    """Decisions that were late are late in the laboratory: round robin gives the same engines as the live run did."""
    late_ms = np.random.default_rng(5).exponential(300.0, len(chat))
    decided_ms = [request.timestamp_ms + late for request, late in zip(chat, late_ms.tolist(), strict=True)]
    turn = {number: place for place, number in enumerate(sorted(range(len(chat)), key=decided_ms.__getitem__))}
    idle = on_time(chat, simulate(chat, N_ENGINES, ENGINE, "round-robin"))
    times = [replace(each, decided_ms=at_ms) for each, at_ms in zip(idle.times, decided_ms, strict=True)]
    found = simulate(chat, N_ENGINES, ENGINE, "round-robin", live=replace(idle, times=times))
    assert [each.worker_id for each in found] == [turn[number] % N_ENGINES + 1 for number in range(len(chat))]
    shuffled = simulate(chat, N_ENGINES, ENGINE, "round-robin", live=replace(idle, times=times), shuffle=1)
    assert [each.worker_id for each in shuffled] != [each.worker_id for each in found]


def test_late_reports_change_what_the_router_knows(chat: list[TraceRequest]) -> None:
    """Requests whose end the router does not know of count as load: a run without reports decides otherwise."""
    outcomes = simulate(chat, N_ENGINES, ENGINE, "least-loaded")
    live = on_time(chat, outcomes)
    never = [LiveTimes(each.decided_ms, 1e9, 1e9) for each in live.times]
    blind = simulate(chat, N_ENGINES, ENGINE, "least-loaded", live=replace(live, times=never))
    counts = np.bincount([each.worker_id for each in blind], minlength=N_ENGINES + 1)[1:]
    assert counts.max() - counts.min() <= 1  # nothing ever ends, so that the least loaded is the next one in turn
    assert [each.worker_id for each in blind] != [each.worker_id for each in outcomes]


def test_a_late_request_starts_at_its_time_where_the_engine_was_idle(chat: list[TraceRequest]) -> None:
    """As in a live engine, a request that comes late to an idle engine has the time to first token of one in time."""
    one = [TraceRequest(0.0, 2048, 4, (1, 2, 3, 4))]
    in_time = simulate(one, 1, ENGINE, "kv")
    late = simulate(one, 1, ENGINE, "kv", live=on_time(one, in_time, late_ms=5_000.0))
    assert late[0].ttft_ms == pytest.approx(in_time[0].ttft_ms) == pytest.approx(ENGINE.prefill_ms(2048))


def test_an_engine_that_fails_loses_its_blocks_and_its_requests_are_repeated(chat: list[TraceRequest]) -> None:
    """Every request is served, and the fleet finds less in its caches than without the failure."""
    workload = workload_of(chat, ENGINE.block_size)
    undisturbed = run_policy(workload, FleetConfig(ENGINE, N_ENGINES), "kv").result
    failures = tuple(LabFailure(worker, 3_000.0, 2_000.0, 500.0) for worker in range(N_ENGINES - 1))
    failed = run_policy(workload, FleetConfig(ENGINE, N_ENGINES, failures=failures), "kv").result
    assert (failed.last_ms >= failed.first_ms).all() and (failed.first_ms > failed.arrived_ms).all()
    assert failed.reused_tokens.sum() < undisturbed.reused_tokens.sum()


def test_slower_engines_take_longer(chat: list[TraceRequest]) -> None:
    """The speed of an engine counts for prefills and answers."""
    one = workload_of([TraceRequest(0.0, 2048, 4, (1, 2, 3, 4))], ENGINE.block_size)
    fast = run_policy(one, FleetConfig(ENGINE, 1), "kv").result
    slow = run_policy(one, FleetConfig(ENGINE, 1, speeds=(2.0,)), "kv").result
    assert slow.last_ms.tolist() == pytest.approx((2.0 * fast.last_ms).tolist())


# -- pools -------------------------------------------------------------------------------------------------------------


def hit_share(outcomes: list[RequestOutcome]) -> float:
    return sum(outcome.cached_tokens for outcome in outcomes) / sum(outcome.prompt_tokens for outcome in outcomes)


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
def test_a_pool_increases_reuse_up_to_the_bound_and_runs_are_reproducible(chat: list[TraceRequest], mode: str) -> None:
    """More tokens are reused than without a pool, some of them from the pool, and no more than the bound allows."""
    without = simulate(chat, N_ENGINES, ENGINE, mode)
    pooled = simulate(chat, N_ENGINES, ENGINE, mode, pool=LabPoolConfig(65_536))
    assert pooled == simulate(chat, N_ENGINES, ENGINE, mode, pool=LabPoolConfig(65_536))
    assert hit_share(without) < hit_share(pooled) <= infinite_cache_hit_share(chat, ENGINE.block_size)
    assert sum(outcome.pooled_tokens for outcome in without) == 0
    assert all(outcome.pooled_tokens <= outcome.cached_tokens for outcome in pooled)
    assert sum(outcome.pooled_tokens for outcome in pooled) > 0


def test_a_pool_of_one_block_is_worth_less_than_a_large_one(chat: list[TraceRequest]) -> None:
    """A pool with little capacity increases reuse less than one with more."""
    small, large = (simulate(chat, N_ENGINES, ENGINE, "kv", pool=LabPoolConfig(blocks)) for blocks in (1, 65_536))
    assert hit_share(small) < hit_share(large)


def test_loading_takes_the_time_of_the_blocks_on_the_link() -> None:
    """An engine that finds a prompt in the pool begins its prefill after 128 KiB per token at the pool's bandwidth."""
    requests = [TraceRequest(10_000.0 * n, 2048, 4, (1, 2, 3, 4)) for n in range(2)]
    first, second = simulate(requests, 2, ENGINE, "round-robin", pool=LabPoolConfig(65_536, gb_per_s=2.0))
    assert (first.worker_id, second.worker_id) == (1, 2)
    assert (first.pooled_tokens, second.pooled_tokens, second.cached_tokens) == (0, 2032, 2032)
    assert first.ttft_ms == pytest.approx(ENGINE.prefill_ms(2048))
    assert second.ttft_ms == pytest.approx(2032 * 131_072 / 2e6 + ENGINE.prefill_ms(16))


def test_host_memory_serves_only_its_own_engine(chat: list[TraceRequest]) -> None:
    """Blocks that an engine evicts come back from its host, so more is reused, but less than with a pool for all."""
    reuse = {
        name: run_policy(workload_of(chat, ENGINE.block_size), config, "round-robin").figures.reuse
        for name, config in {
            "none": FleetConfig(ENGINE, N_ENGINES),
            "host": FleetConfig(ENGINE, N_ENGINES, host=LabPoolConfig(65_536)),
            "pool": FleetConfig(ENGINE, N_ENGINES, pool=LabPoolConfig(65_536)),
        }.items()
    }
    assert reuse["none"] < reuse["host"] < reuse["pool"]


# -- what does not fit -------------------------------------------------------------------------------------------------

LATE = Lateness(np.zeros(1), np.zeros(1), np.zeros(1))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"engine": ENGINE, "lateness": LATE, "pool": LabPoolConfig(100)}, "lateness is for engines of kvstreams sim"),
        ({"engine": ENGINE, "lateness": LATE, "host": LabPoolConfig(100)}, "lateness is for engines of kvstreams sim"),
        ({"engine": default_engine(), "lateness": LATE}, "lateness is for engines of kvstreams sim"),
        ({"engine": ENGINE, "lateness": LATE, "concurrency": 4}, "lateness is for engines of kvstreams sim"),
    ],
)
def test_conditions_that_do_not_fit_are_refused(config: dict[str, object], match: str) -> None:
    """The error names what does not fit."""
    with pytest.raises(SettingsError, match=match):
        FleetConfig(**config)  # type: ignore[arg-type]

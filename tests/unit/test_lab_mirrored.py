"""The laboratory's version of a fleet of simulated engines: same requests, same caches, about the same times."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from streams.core.routing.decision import RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.local.report import summarise
from streams.sim.engine_config import EngineConfig
from streams.sim.lab.mirrored import engine_like, simulate_like, workload_like
from streams.sim.offline import simulate
from streams.sim.trace import TraceRequest, generate, infinite_cache_hit_share

ENGINE = EngineConfig(n_blocks=4096)


@pytest.fixture(scope="module")
def chat() -> list[TraceRequest]:
    """Give 150 requests of conversations."""
    return generate(150, np.random.default_rng(3))


def test_an_engine_has_the_same_size_and_speed() -> None:
    """Blocks and times of the laboratory's engine are those of the other one."""
    engine = engine_like(ENGINE)
    assert (engine.block_size, engine.n_blocks) == (ENGINE.block_size, ENGINE.n_blocks)
    assert engine.prefill_step_ms(1000) == pytest.approx(ENGINE.prefill_ms(1000))
    assert engine.decode_step_ms(0.5) == ENGINE.decode_ms_per_token


def test_requests_share_what_they_share(chat: list[TraceRequest]) -> None:
    """An infinite cache would find as much of the laboratory's prompts as of those that are sent to live engines."""
    share = infinite_cache_hit_share(chat, ENGINE.block_size)
    assert workload_like(chat, ENGINE.block_size).reusable_share() == pytest.approx(share, abs=1e-9)


def test_an_idle_engine_answers_after_the_same_time() -> None:
    """Without other requests, times to first token are equal in both models, with and without reuse."""
    requests = [TraceRequest(60_000.0 * at, 2048 + 512 * at, 4, tuple(range(5 + at))) for at in range(3)]
    lab = simulate_like(requests, 1, ENGINE, "kv")
    model = simulate(requests, 1, ENGINE, RoutePolicy(RouterMode.KV), random.Random(1))
    assert [each.cached_tokens for each in lab] == [each.cached_tokens for each in model]
    assert [each.ttft_ms for each in lab] == pytest.approx([each.ttft_ms for each in model])


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
def test_both_models_find_the_same_share_in_caches(chat: list[TraceRequest], mode: str) -> None:
    """A busy fleet of small caches has about the same hit share in both models of an engine."""
    lab: dict[str, Any] = summarise(simulate_like(chat, 4, ENGINE, mode), 4)
    model = summarise(simulate(chat, 4, ENGINE, RoutePolicy(RouterMode(mode)), random.Random(1)), 4)
    assert lab["requests"] == model["requests"] == len(chat)
    assert lab["hit_share"] == pytest.approx(model["hit_share"], abs=0.02)

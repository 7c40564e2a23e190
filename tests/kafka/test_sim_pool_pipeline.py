"""Simulated engines, their pool, a bridge, agents and a router, all as processes on a real Kafka."""

from __future__ import annotations

import urllib.request

import orjson
import pytest

from streams.lab.engines.pool import PoolConfig
from streams.lab.stack import Engine, Stack, get_json, wait_workers
from streams.process.waiting import wait_for
from tests.helpers.bridges import SMALL
from tests.helpers.cxl_fleet import attached, await_supplementary, call
from tests.helpers.support import VISIBLE_TIMEOUT_S

#: Capacity for two prompts of ten blocks, but not for three.
POOL = PoolConfig("rack1", block_size=SMALL.block_size, capacity_blocks=24)
TIME_SCALE = 100.0
N_BLOCKS = 10
N_TOKENS = N_BLOCKS * SMALL.block_size
LABELS = {"layer_id": 2, "expert_ids": [7], "expert_group": 3}


def prompt(number: int, n_blocks: int = N_BLOCKS) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + n_blocks * SMALL.block_size))


def serve(engine: Engine, tokens: list[int]) -> dict[str, float]:
    """Let an engine answer a prompt; returns the figures of the answer."""
    body = orjson.dumps({"prompt": tokens, "max_tokens": 1})
    request = urllib.request.Request(f"{engine.url}/v1/completions", data=body)
    with urllib.request.urlopen(request, timeout=30.0) as response:
        figures: dict[str, float] = orjson.loads(response.read())["kvstreams"]
    return figures


def counted(engine: Engine) -> tuple[int, int]:
    """Give the numbers of prompt tokens that an engine has computed and loaded, as it counts them."""
    info = get_json(f"{engine.url}/sim/info")
    return info["computed_tokens"], info["loaded_tokens"]


@pytest.mark.first_ring("sim-pool")
@pytest.mark.long_running
def test_a_prefix_outlives_its_engine_in_the_pool_and_is_loaded_by_the_chosen_engine(stack: Stack) -> None:
    """A prefix that one engine offloads is visible to the router, and another engine loads it instead of computing it.

    Once the pool has evicted it, or has exited, the router no longer counts it.
    """
    worker = stack.worker()
    pool = stack.pool(POOL, "m", TIME_SCALE)
    labels = ("--moe-layer", "2", "--moe-expert", "7", "--moe-group", "3")
    (first,) = stack.engines(1, SMALL, "m", TIME_SCALE, 1, ("--pool", pool.url, *labels))
    second, third = stack.engines(2, SMALL, "m", TIME_SCALE, 2, ("--pool", pool.url))
    engines = {1: first, 2: second, 3: third}
    stack.bridge([first, second, third])
    wait_workers(worker.url, 3)
    call(worker, "PUT", "/pools/rack1", {"members": [1, 2, 3], "capacity_blocks": POOL.capacity_blocks})
    wait_for(lambda: all(map(attached, engines.values())), VISIBLE_TIMEOUT_S, "the engines to attach to the pool")

    one = prompt(1)
    serve(first, one)
    await_supplementary(worker, {1: (10, 0, 0), 2: (0, 10, 0), 3: (0, 10, 0)}, one)
    assert await_supplementary(worker, {1: (10, 0, 10), 2: (0, 10, 0), 3: (0, 10, 0)}, one, **LABELS) == 1
    assert await_supplementary(worker, {1: (10, 0, 10)}, one, **LABELS, fallback_to_unlabeled=False) == 1

    request = {"request_id": "r1", "model": "m", "token_ids": [*one, 1], "excluded_worker_ids": [1]}
    chosen = engines[call(worker, "POST", "/route", request)["worker_id"]]
    other = third if chosen is second else second
    assert serve(chosen, [*one, 1])["pooled_tokens"] == N_TOKENS
    assert counted(chosen) == (1, N_TOKENS)
    await_supplementary(worker, {1: (10, 0, 0), chosen.worker_id: (10, 0, 0), other.worker_id: (0, 10, 0)}, one)

    serve(first, prompt(2, POOL.capacity_blocks))  # this fills the whole pool
    await_supplementary(worker, {1: (10, 0, 0), chosen.worker_id: (10, 0, 0), other.worker_id: (0, 0, 0)}, one)
    assert serve(other, [*one, 1])["cached_tokens"] == 0

    two = prompt(3)
    serve(first, two)
    await_supplementary(worker, {1: (10, 0, 0), 2: (0, 10, 0), 3: (0, 10, 0)}, two)
    first.child.kill()
    call(worker, "DELETE", "/workers/1")
    loader = engines[await_supplementary(worker, {2: (0, 10, 0), 3: (0, 10, 0)}, two)]
    before = counted(loader)
    assert serve(loader, [*two, 1])["pooled_tokens"] == N_TOKENS
    assert counted(loader) == (before[0] + 1, before[1] + N_TOKENS)

    # Engines report the loss of their own blocks. Those of the killed engine end with the pool's registration.
    pool.child.kill()
    wait_for(
        lambda: not attached(second) and not attached(third),
        VISIBLE_TIMEOUT_S,
        "the engines to notice that the pool exited",
    )
    call(worker, "DELETE", "/pools/rack1")
    late = third if loader is second else second
    await_supplementary(worker, {loader.worker_id: (10, 0, 0), late.worker_id: (0, 0, 0)}, two)
    before = counted(late)
    assert serve(late, [*two, 1])["cached_tokens"] == 0
    assert counted(late) == (before[0] + N_TOKENS + 1, before[1])

    def states() -> set[str]:
        rows = get_json(f"{worker.url}/state/cxl")["blocks"]
        return {row["state"] for row in rows if row["worker_id"] != 1}

    wait_for(lambda: states() == {"evicted"}, VISIBLE_TIMEOUT_S, "the evictions of all blocks of engines 2 and 3")

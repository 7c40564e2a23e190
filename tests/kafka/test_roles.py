"""Prefill and decode workers behind the front: simulated engines of three roles, a pool, a bridge and a router on a
real Kafka.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import aiohttp
import orjson
import pytest

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.pool import PoolConfig
from streams.lab.processes import Children
from streams.lab.stack import Engine, FrontProcess, RouterProcess, Stack, get_bytes, get_json, wait_workers
from streams.process.waiting import wait_for
from streams.settings import KvTransfer
from tests.helpers.cxl_fleet import attached, call
from tests.helpers.scopes import ScopeFactory
from tests.helpers.support import VISIBLE_TIMEOUT_S

MODEL = "m"
PATIENCE_S = 60.0
TIME_SCALE = 20.0
CONFIG = EngineConfig(block_size=16, n_blocks=1024)
POOL = PoolConfig("rack1", block_size=CONFIG.block_size, capacity_blocks=2048)

#: 40 blocks, of which a worker can use 39 at most: it always computes the last token.
N_TOKENS = 640
USABLE_TOKENS = 624

#: Worker 4 has both roles, so it decodes too.
ROLES = {1: "prefill", 2: "decode", 3: "decode"}
N_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Fleet:
    """params, pool: fronts that transfer KV caches in these ways."""

    router: RouterProcess
    params: FrontProcess
    pool: FrontProcess
    engines: dict[int, Engine]
    numbers: Iterator[int]

    def prompt(self, n_tokens: int = N_TOKENS) -> list[int]:
        """Tokens that no earlier prompt begins with."""
        return [next(self.numbers), *range(1000, 999 + n_tokens)]

    def counted(self) -> dict[int, tuple[int, int]]:
        """Prompt tokens that each engine has computed and loaded."""
        infos = {number: get_json(f"{engine.url}/sim/info") for number, engine in self.engines.items()}
        return {number: (info["computed_tokens"], info["loaded_tokens"]) for number, info in infos.items()}

    def active(self) -> int:
        return sum(row["active_requests"] for row in get_json(f"{self.router.url}/loads")["loads"])

    def until_free(self) -> None:
        wait_for(lambda: self.active() == 0, VISIBLE_TIMEOUT_S, "the end of every booking")


@pytest.fixture(scope="module")
def fleet(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Give two fronts, a worker with a router, and a prefill worker, two decode workers and one of both roles."""
    folder = tmp_path_factory.mktemp("roles")
    with Children() as children:
        stack = Stack(new_scope(folder), folder, children)
        worker = stack.worker()
        pool = stack.pool(POOL, MODEL, TIME_SCALE)
        engines = stack.engines(N_WORKERS, CONFIG, MODEL, TIME_SCALE, 1, ("--pool", pool.url))
        stack.bridge(engines, roles=ROLES)
        wait_workers(worker.url, N_WORKERS)
        members = [engine.worker_id for engine in engines]
        call(worker, "PUT", "/pools/rack1", {"members": members, "capacity_blocks": POOL.capacity_blocks})
        wait_for(lambda: all(map(attached, engines)), VISIBLE_TIMEOUT_S, "the engines to attach to the pool")
        common: dict[str, Any] = {"front_remote_prefill_tokens_min": 256, "front_transfer_timeout_s": 20.0}
        params = stack.front("params", [worker], **common, front_kv_transfer=KvTransfer.PARAMS)
        pooled = stack.front("pooled", [worker], **common, front_kv_transfer=KvTransfer.POOL)
        yield Fleet(worker, params, pooled, {engine.worker_id: engine for engine in engines}, count(1))


def ask(url: str, prompt: list[int], *, stream: bool = True, n_tokens: int = 20) -> tuple[str, dict[str, str]]:
    """Return the text that a completion has, and the answer's headers."""

    async def main() -> tuple[str, dict[str, str]]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": n_tokens, "stream": stream}
        headers = {"X-Kvstreams-Details": "1"}
        async with (
            asyncio.timeout(PATIENCE_S),
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
        ):
            raw = await response.read()
            assert response.status == 200, raw
            events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n")] if stream else [raw]
            pages = [orjson.loads(event) for event in events if event and event != b"[DONE]"]
            text = "".join(choice["text"] for page in pages for choice in page["choices"])
            return text, dict(response.headers)

    return asyncio.run(main())


def front_metric(front: FrontProcess, name: str) -> float:
    lines = get_bytes(f"{front.url}/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_prompt_is_computed_on_the_prefill_worker_and_transferred(fleet: Fleet, stream: bool) -> None:
    """The decode worker computes only what follows the last full block; the answer is that of one engine alone."""
    prompt, before = fleet.prompt(), fleet.counted()
    text, headers = ask(fleet.params.url, prompt, stream=stream)
    assert headers["X-Kvstreams-Prefill-Worker"] == "1/0"
    decoder = int(headers["X-Kvstreams-Worker"].partition("/")[0])
    assert decoder in (2, 3, 4)
    fleet.until_free()
    grown = {
        number: (computed - before[number][0], loaded - before[number][1])
        for number, (computed, loaded) in fleet.counted().items()
    }
    none = (0, 0)
    expected = {**dict.fromkeys(grown, none), 1: (N_TOKENS, 0), decoder: (N_TOKENS - USABLE_TOKENS, USABLE_TOKENS)}
    assert grown == expected
    assert ask(fleet.engines[4].url, prompt)[0] == text and len(text) == 20


def test_a_long_prompt_is_read_in_the_pool_once_its_blocks_are_there(fleet: Fleet) -> None:
    """The front waits until the router knows the blocks as pooled, and the decode worker loads them."""
    prompt, before = fleet.prompt(), fleet.counted()
    text, headers = ask(fleet.pool.url, prompt)
    assert headers["X-Kvstreams-Prefill-Worker"] == "1/0"
    decoder = int(headers["X-Kvstreams-Worker"].partition("/")[0])
    fleet.until_free()
    after = fleet.counted()
    assert after[1][0] - before[1][0] == N_TOKENS
    assert after[decoder][0] - before[decoder][0] == N_TOKENS - USABLE_TOKENS
    assert after[decoder][1] - before[decoder][1] == USABLE_TOKENS
    assert len(text) == 20


def test_what_the_decode_worker_has_stays_there(fleet: Fleet) -> None:
    """A short prompt, and the next turn of a conversation, are not sent to the prefill worker."""
    short = fleet.prompt(200)
    assert "X-Kvstreams-Prefill-Worker" not in ask(fleet.params.url, short)[1]
    prompt = fleet.prompt()
    _, headers = ask(fleet.params.url, prompt)
    assert "X-Kvstreams-Prefill-Worker" in headers

    def stays() -> bool:
        return "X-Kvstreams-Prefill-Worker" not in ask(fleet.params.url, [*prompt, *range(50)])[1]

    wait_for(stays, VISIBLE_TIMEOUT_S, "the router to know the blocks of the decode worker")
    fleet.until_free()


def test_a_killed_prefill_worker_costs_nothing_but_its_work(fleet: Fleet) -> None:
    """Requests are answered whole by decode workers, routers avoid the dead one, and no booking is left."""
    failed = front_metric(fleet.params, 'kvstreams_front_split_requests_total{outcome="failed"')
    fleet.engines.pop(1).child.kill()
    text, headers = ask(fleet.params.url, prompt := fleet.prompt())
    assert "X-Kvstreams-Prefill-Worker" not in headers and len(text) == 20
    assert front_metric(fleet.params, 'kvstreams_front_split_requests_total{outcome="failed"') == failed + 1

    def workers() -> dict[int, dict[str, Any]]:
        return {row["worker_id"]: row for row in get_json(f"{fleet.router.url}/workers")["workers"]}

    wait_for(lambda: workers()[1]["avoided"], VISIBLE_TIMEOUT_S, "the router to avoid worker 1")
    assert ask(fleet.engines[4].url, prompt)[0] == text
    # Later the bridge notices as well. Then the model has no prefill worker, and fronts ignore roles.
    wait_for(lambda: workers()[1]["silent_dp_ranks"] == [0], VISIBLE_TIMEOUT_S, "the bridge to report worker 1")
    for _ in range(3):
        assert len(ask(fleet.pool.url, fleet.prompt())[0]) == 20
    fleet.until_free()

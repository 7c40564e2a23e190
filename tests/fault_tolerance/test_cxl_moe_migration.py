"""A stream goes on after its engine has failed: from the pool with its experts, without the pool, without the router.

One fleet for all tests, on a real Kafka: four engines of which three reach a pool and three have the experts, a bridge,
an agent, two routers and two fronts, each a process.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from examples import cxl_migration
from streams.lab.demo.pooled_fleet import (
    SHARED_BLOCKS,
    STRICT_MOE_QUERY,
    PooledFleet,
    Streamed,
    call,
    read_stream,
)
from streams.lab.engines.synthetic_tokens import greedy_tokens, unpack_tokens
from streams.lab.processes import Children
from streams.lab.stack import READY_TIMEOUT_S, FrontProcess, RouterProcess, Stack, get_json
from streams.process.waiting import wait_for
from tests.helpers.scopes import ScopeFactory
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.migrations import FRONT, MigrationRun, Truth, start_fleet, undisturbed

BLOCK = 16
#: A booking of a router that was killed ends after this time.
BOOKING_TTL_S = 6.0
#: How long the second front looks for a router before it gives up.
GIVES_UP_S = 1.0


@dataclass
class Fronts:
    """A fleet, and two fronts: one has both routers, the other only the first one, which a test kills."""

    fleet: PooledFleet
    first_router: RouterProcess
    front: FrontProcess
    lonely: FrontProcess
    n_prompts: int = 0

    def prompt(self, n_tokens: int) -> list[int]:
        """Return a prompt that no engine has seen."""
        self.n_prompts += 1
        return [(token * 7919 + self.n_prompts) % 50_000 for token in range(n_tokens)]


@pytest.fixture(scope="module")
def fronts(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    folder = tmp_path_factory.mktemp("moving")
    scope = replace(new_scope(folder / "state"), booking_ttl_s=BOOKING_TTL_S)
    with Children() as children:
        stack = Stack(scope, folder, children)
        stack.worker(router=False)
        first, second = (stack.router(name, wait=False) for name in ("first", "second"))
        fleet = start_fleet(stack, second, folder / "journals")
        front = fleet.front("front", [first, second], **FRONT)
        # It must not move a stalled stream before the test has killed its router.
        settings = {"front_migration_timeout_s": GIVES_UP_S, "front_stall_timeout_s": 60.0}
        lonely = fleet.front("lonely", [first], **{**FRONT, **settings})
        yield Fronts(fleet, first, front, lonely)


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bring back every engine that a test has left dead or stalled."""
    yield
    if "fronts" in request.fixturenames:
        fleet = request.getfixturevalue("fronts").fleet
        for worker_id, engine in fleet.engines.items():
            if engine.child.running:
                fleet.fault(worker_id, "none")
            else:
                fleet.restart(worker_id)


def answer_of(prompt: Sequence[int], n_tokens: int) -> list[int]:
    """What an undisturbed engine answers."""
    return unpack_tokens(greedy_tokens(np.asarray(prompt, dtype="<u4").tobytes(), n_tokens))


def body_of(fleet: PooledFleet, prompt: Sequence[int], n_tokens: int) -> dict[str, Any]:
    return {
        "model": fleet.model,
        "prompt": list(prompt),
        "max_tokens": n_tokens,
        "stream": True,
        "return_token_ids": True,
    }


HEADERS = {"Content-Type": "application/json", "X-Moe-Query": json.dumps(STRICT_MOE_QUERY)}


async def stalled(fleet: PooledFleet, worker_id: int) -> None:
    """Wait until an engine has stalled."""
    async with asyncio.timeout(VISIBLE_TIMEOUT_S):
        while not fleet.info(worker_id)["fault"]["stalled"]:
            await asyncio.sleep(0.05)


def test_a_killed_engines_stream_goes_on_where_its_experts_and_its_pool_are(
    fronts: Fronts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 4,000 tokens 500 come from the first engine, and the rest from the only other one with both, in the example.

    The client gets every token once, equal to an undisturbed engine's. What the second engine computed is, to the
    token, what neither it nor the pool held.
    """
    fleet, prompt = fronts.fleet, cxl_migration.PROMPT
    move = cxl_migration.show(fleet, fronts.front)
    got, figures = move.streamed, move.streamed.figures
    assert (got.error, got.finish_reason, got.n_ends, len(got.ids)) == (None, "length", 1, 1)
    assert (got.worker_id, move.first, move.second, move.exit_code) == (1, 1, 2, -signal.SIGKILL)
    assert got.token_ids == answer_of(prompt, 4000)
    assert (figures["migrations"], figures["resumed_by"]) == (1, "ids")
    assert figures["lost_ms"] > 0
    assert move.loaded + move.computed == len(prompt) + 500 - SHARED_BLOCKS * BLOCK
    assert figures["tokens_prefilled_again"] == move.computed
    assert 0 < figures["tokens_recovered"] <= move.loaded
    assert Truth(fleet).wrong == []
    printed = capsys.readouterr().out
    assert "engine 1 was killed after 500 tokens (exit code -9)" in printed
    assert f"engine 2 went on: it loaded {move.loaded} tokens from the pool" in printed
    assert "4000 tokens came in one stream, equal to those of an undisturbed engine" in printed


def test_a_stream_goes_on_without_its_pool_if_that_is_lost_in_the_same_moment(fronts: Fronts) -> None:
    """The router still counts on the pool. The next engine finds it gone and computes what it does not hold itself."""
    fleet, n_tokens, n_kept = fronts.fleet, 200, 90
    prompt = fronts.prompt(40 * BLOCK)
    assert fleet.pool is not None and fleet.pool_config is not None
    pool = fleet.pool

    async def scenario() -> Streamed:
        fleet.prepare(prompt, 1)
        fleet.fault(1, "stall", n_kept)
        async with aiohttp.ClientSession() as http:
            url = f"{fronts.front.url}/v1/completions"
            reading = asyncio.create_task(read_stream(http, url, body_of(fleet, prompt, n_tokens), HEADERS))
            await stalled(fleet, 1)
            pool.child.kill()
            fleet.engines[1].child.kill()
            return await reading

    got = asyncio.run(scenario())
    assert (got.error, got.n_ends, got.finish_reason) == (None, 1, "length")
    assert got.token_ids == answer_of(prompt, n_tokens)
    assert got.figures["migrations"] == 1
    assert got.figures["tokens_prefilled_again"] == len(prompt) + n_kept - SHARED_BLOCKS * BLOCK
    assert got.figures["tokens_recovered"] == 0
    fleet.until_free()

    # Another process takes its place, in a new epoch, as for any pool that has lost its content.
    port = str(urlsplit(pool.url).port)
    journal = ("--journal", str(fleet.journals / "pool.jsonl")) if fleet.journals else ()
    fleet.pool = fleet.stack.pool(fleet.pool_config, fleet.model, fleet.time_scale, port, journal)
    pools = {row["pool_id"]: row for row in get_json(f"{fleet.router.url}/pools")["pools"]}
    record = {"members": fleet.members, "epoch": pools["rack1"]["epoch"] + 1}
    call(f"{fleet.router.url}/pools/rack1", "PUT", record)


def test_a_stream_survives_the_router_and_a_client_goes_on_through_another_front(fronts: Fronts) -> None:
    """A front with a second router moves the stream. One without ends it with an error after what was generated.

    Its client sends the prompt and the tokens so far through the other front, and gets the rest, from the pool. The
    booking of the killed router ends with its time to live.
    """
    fleet, n_tokens, n_kept = fronts.fleet, 200, 100
    prompt = fronts.prompt(40 * BLOCK)
    answer = answer_of(prompt, n_tokens)

    async def scenario() -> tuple[Streamed, Streamed, Streamed]:
        fleet.prepare(prompt, 1)
        known = fleet.scores(prompt)
        wait_for(lambda: fleet.scores(prompt, fronts.first_router) == known, READY_TIMEOUT_S, "the first router")
        fleet.fault(1, "stall", n_kept)
        async with aiohttp.ClientSession() as http:
            body = body_of(fleet, prompt, n_tokens)
            urls = [f"{front.url}/v1/completions" for front in (fronts.front, fronts.lonely)]
            first, second = (asyncio.create_task(read_stream(http, url, body, HEADERS)) for url in urls)
            await stalled(fleet, 1)
            fronts.first_router.child.kill()
            fleet.engines[1].child.kill()
            moved, ended = await first, await second
            rest = body_of(fleet, [*prompt, *ended.token_ids], n_tokens - len(ended.token_ids))
            return moved, ended, await read_stream(http, urls[0], rest, HEADERS)

    moved, ended, rest = asyncio.run(scenario())
    assert (moved.error, moved.n_ends, moved.figures["migrations"]) == (None, 1, 1)
    assert moved.token_ids == answer
    assert ended.error is not None and ended.error["code"] == "engine_failed", ended.error
    assert "no other engine is left" in ended.error["message"]
    assert (ended.n_ends, ended.finish_reason) == (1, None)
    assert 0 < len(ended.token_ids) < n_tokens
    assert (rest.error, ended.token_ids + rest.token_ids) == (None, answer)
    assert rest.worker_id == 2
    fleet.until_free(3 * BOOKING_TTL_S)
    fronts.first_router.child.start()


@pytest.mark.long_running
def test_thirty_migrations_under_load_lose_nothing(fronts: Fronts) -> None:
    """Engines are killed, stall and refuse at random: every stream is complete, and every prefill is accounted for."""
    seed = time.time_ns() % (1 << 32)
    print(f"seed {seed}")
    run = MigrationRun(fronts.fleet, fronts.front, seed)
    asyncio.run(run.run(30, clients=16))
    print(run.summary())
    assert run.wrong() == [], run.summary()
    assert undisturbed(fronts.fleet, 1, run.asked[:5]) == []
    assert run.n_migrations >= 30

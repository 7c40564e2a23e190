"""An engine that answers at once and serves nothing: refusals in a row count; single ones and 4xx do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest

from streams.core.hashing import local_hashes
from streams.core.routing.selection import RouterMode
from streams.settings import Settings
from tests.helpers.front_stage import Backend, Stage, on_stage
from tests.helpers.local_router import hold, local_router, rank, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, scripted_engines

PROMPT = list(range(3200))
ONLY_A_HOLDS_IT = {"model": "m", "prompt": PROMPT, "max_tokens": 8}
AVOID_S = 1.0


@contextmanager
def fleet(n: int) -> Iterator[Backend]:
    """Give a router and n engines, of which the first holds nearly all blocks of PROMPT."""
    with (
        local_router(Settings(router_mode=RouterMode.KV, router_avoid_s=AVOID_S), n_workers=0) as router,
        scripted_engines(n, ScriptedEngine) as engines,
    ):
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)
        hold(router.router, rank(1), local_hashes(PROMPT, 16)[:190])
        yield router, engines


async def send(stage: Stage, bodies: list[Any]) -> list[int]:
    """Send requests, 8 at a time; return the statuses of the answers."""
    statuses, waiting = [], iter(bodies)

    async def client(session: aiohttp.ClientSession) -> None:
        for body in waiting:
            async with session.post(f"{stage.url}/v1/completions", json=body) as response:
                await response.read()
                statuses.append(response.status)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(8)))
    return statuses


def fresh(n: int) -> list[Any]:
    """Prompts that nobody holds."""
    return [{**ONLY_A_HOLDS_IT, "prompt": [1000 + number] * 40} for number in range(n)]


@pytest.mark.parametrize("n_engines", [2, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_engine_that_refuses_in_a_row_gets_few_requests_until_it_serves(
    n_engines: int, stream: bool, status: int
) -> None:
    """The other engines serve everything, and the one that holds the prompt gets it again after it has recovered."""
    with fleet(n_engines) as backend:
        async with on_stage(backend, front_queue=False) as stage:
            refusing = stage.engines[0]
            refusing.script = Script(status=status)
            statuses = await send(stage, [{**ONLY_A_HOLDS_IT, "stream": stream}] * 100)
            statuses += await send(stage, [{**body, "stream": stream} for body in fresh(100)])
            assert statuses == [200] * 200
            assert len(refusing.received) < 40
            refusing.script = Script()
            while stage.router.router.view.fleet.avoided(rank(1).worker_id)[0]:
                await asyncio.sleep(0.05)
            before = len(refusing.received)
            assert [await send(stage, [ONLY_A_HOLDS_IT]) for _ in range(8)] == [[200]] * 8
            assert len(refusing.received) - before == 8


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_errors_of_the_client_say_nothing_about_the_engine(status: int) -> None:
    """They are passed on, and the engine goes on getting what it holds."""
    with fleet(2) as backend:
        async with on_stage(backend, front_queue=False) as stage:
            stage.engines[0].script = Script(status=status)
            assert [await send(stage, [ONLY_A_HOLDS_IT]) for _ in range(10)] == [[status]] * 10
            assert stage.front.proxy.failures_reported == 0


async def test_an_engine_that_refuses_now_and_then_is_not_avoided() -> None:
    """An answer between two refusals begins a new row."""
    with fleet(2) as backend:
        async with on_stage(backend, front_queue=False) as stage:
            for status in (503, 503, 200) * 4:
                stage.engines[0].script = Script(status=status)
                assert await send(stage, [ONLY_A_HOLDS_IT]) == [200]
            assert len(stage.engines[0].received) == 12
            assert stage.front.proxy.failures_reported == 0


async def test_a_request_that_every_engine_refuses_marks_none() -> None:
    """It may be the request; another one is sent to the same engines."""
    with fleet(3) as backend:
        async with on_stage(backend, front_queue=False) as stage:
            stage.script(*[Script(status=500)] * 3)
            assert await send(stage, [ONLY_A_HOLDS_IT] * 10) == [500] * 10
            assert stage.front.proxy.failures_reported == 0


async def test_an_engine_that_refuses_different_requests_is_avoided_before_another_one_has_answered() -> None:
    """The other engine takes long for its first token, and the refusing one gets only the first requests."""
    with fleet(2) as backend:
        async with on_stage(backend, front_queue=False) as stage:
            stage.script(Script(status=503), Script(stalls_at=0))
            async with aiohttp.ClientSession() as session:
                bodies = [{**ONLY_A_HOLDS_IT, "prompt": [*PROMPT[:3190], number]} for number in range(20)]
                sent = []
                for body in bodies:
                    sent.append(asyncio.create_task(session.post(f"{stage.url}/v1/completions", json=body)))
                    await stage.until(lambda: stage.engines[1].counts["begun"] == len(sent), "the next engine")
                assert len(stage.engines[0].received) <= 4
                for task in sent:
                    task.cancel()
                await asyncio.gather(*sent, return_exceptions=True)

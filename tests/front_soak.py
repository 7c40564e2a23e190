"""`python -m tests.front_soak`: 1,000 requests through one front go wrong in every way, and every booking is freed.

What lives here: clients that vanish at a random byte, engines that die or stall at a random byte, clients that read
slowly, and the check of bookings and of memory. What must not: the front's tests (tests/processes/test_front.py), from
which it takes its stage. There is no Kafka: the router's records are folded directly. A thousand requests take ten
seconds.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import click
import psutil

from streams.settings import Settings
from tests.helpers.front_stage import IDS, Stage, on_stage
from tests.helpers.local_router import local_router, register
from tests.helpers.scripted_engine import Script, ScriptedEngine, answer_bytes, scripted_engines

#: Requests at a time.
CONCURRENT = 32

#: Growth of the process's memory, after the first fifth of the requests, that counts as a leak. Both routers' and
#: engines' own memory is in it.
GROWTH_MB_MAX = 40.0

ANSWER = answer_bytes(200, padding=1500)


async def one(stage: Stage, session: aiohttp.ClientSession, rng: random.Random) -> str:
    """Send a request that may go wrong, and return how it ended for the client."""
    vanishes_at = rng.choice([None, None, 0, rng.randrange(len(ANSWER))])
    slow = rng.random() < 0.1
    try:
        async with session.post(f"{stage.url}/v1/completions", json=IDS) as response:
            got = bytearray()
            while data := await response.content.readany():
                got += data
                if vanishes_at is not None and len(got) >= vanishes_at:
                    response.close()
                    return "vanished"
                if slow:
                    await asyncio.sleep(rng.random() * 0.05)
            if response.status != 200:
                return f"status {response.status}"
            if bytes(got) == ANSWER:
                return "whole"
            assert b'"engine_failed"' in got, "an answer that is neither whole nor ends with an error"
            return "error event"
    except aiohttp.ClientError:
        return "broken connection"


def script(rng: random.Random) -> Script:
    """Return what an engine does with its next requests."""
    kind = rng.randrange(6)
    at = rng.randrange(len(ANSWER))
    if kind == 0:
        return Script(answer=ANSWER, breaks_at=at, piece=8000)
    if kind == 1:
        return Script(answer=ANSWER, stalls_at=at, piece=8000)
    if kind == 2:
        return Script(status=rng.choice([400, 429, 500, 503]))
    return Script(answer=ANSWER, piece=rng.choice([1000, 8000, 50_000]), pause_s=rng.choice([0.0, 0.001]))


@click.command()
@click.option("--requests", default=1000, show_default=True)
@click.option("--seed", type=int, default=None, help="default: a random one, which is printed")
def main(requests: int, seed: int | None) -> None:
    """Exit with status 1 if a booking is left, a report was lost, or memory grew."""
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    process = psutil.Process()
    ends: Counter[str] = Counter()
    memory_mb: list[float] = []

    async def scenario(stage: Stage) -> None:
        began_s = time.monotonic()
        over = asyncio.Event()

        async def change_scripts() -> None:
            while not over.is_set():
                stage.script(script(rng), script(rng), Script(answer=ANSWER, piece=8000))
                await asyncio.sleep(0.02)

        async def client(n: int) -> None:
            async with aiohttp.ClientSession() as session:
                for _ in range(n):
                    ends[await one(stage, session, rng)] += 1

        changing = asyncio.create_task(change_scripts())
        part = -(-requests // (5 * CONCURRENT))  # rounded up
        for number in range(5):
            await asyncio.gather(*(client(part) for _ in range(CONCURRENT)))
            await stage.until_free()
            memory_mb.append(process.memory_info().rss / 2**20)
            print(f"{(number + 1) * part * CONCURRENT} requests, {memory_mb[-1]:.0f} MiB, {dict(ends)}", flush=True)
        over.set()
        await changing
        print(f"{time.monotonic() - began_s:.0f} s, by the front: {dict(stage.front.counts.outcomes)}", flush=True)

    with local_router(Settings(), n_workers=0) as router, scripted_engines(3, ScriptedEngine) as engines:
        for number, engine in enumerate(engines, start=1):
            register(router.router, number, url=engine.url)

        async def on_a_stage() -> None:
            limits: dict[str, Any] = {"front_silence_timeout_s": 0.5, "front_client_timeout_s": 5.0}
            async with on_stage((router, engines), patience_s=3600.0, **limits) as stage:
                await scenario(stage)

        asyncio.run(on_a_stage())
    grown = memory_mb[-1] - memory_mb[0]
    print(f"memory grew by {grown:.0f} MiB; every booking was freed", flush=True)
    sys.exit(1 if grown > GROWTH_MB_MAX else 0)


if __name__ == "__main__":
    main()

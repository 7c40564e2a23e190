"""The examples that need a fleet, against real processes and a real Kafka."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from examples import generate, least_prefill
from examples.gateway import application
from streams.lab.stack import Stack, get_json, wait_workers
from streams.process.waiting import wait_for
from streams.settings import as_environ
from tests.helpers.bridges import SMALL
from tests.helpers.support import VISIBLE_TIMEOUT_S

ROOT = Path(__file__).parents[2]
TIME_SCALE = 100.0
N_BLOCKS = 10


async def _completions(url: str, n: int) -> list[str]:
    """Send one prompt n times through the gateway and return the ids of the workers that answered."""
    prompt = list(range(N_BLOCKS * SMALL.block_size))
    workers = []
    async with TestClient(TestServer(application(url)), timeout=aiohttp.ClientTimeout(VISIBLE_TIMEOUT_S)) as client:
        for _ in range(n):
            async with client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}) as answer:
                assert answer.status == 200
                assert (await answer.json())["choices"]
                workers.append(answer.headers["X-Worker-Id"])
    return workers


def test_the_gateway_sends_a_repeated_prompt_to_the_engine_that_holds_it_and_frees_every_booking(stack: Stack) -> None:
    """Once the first answer's blocks are in the index, every further request goes to the same engine."""
    worker = stack.worker()
    stack.bridge(stack.engines(2, SMALL, "m", TIME_SCALE))
    wait_workers(worker.url, 2)
    (first,) = asyncio.run(_completions(worker.url, 1))
    wait_for(
        lambda: get_json(f"{worker.url}/state")["blocks"] >= N_BLOCKS, VISIBLE_TIMEOUT_S, "the first prompt's blocks"
    )
    assert asyncio.run(_completions(worker.url, 3)) == [first] * 3
    wait_for(
        lambda: all(row["active_requests"] == 0 for row in get_json(f"{worker.url}/loads")["loads"]),
        VISIBLE_TIMEOUT_S,
        "the end of all bookings",
    )


def test_the_examples_of_the_client_generate_and_choose_by_potential_load(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """One generates with an override; the other sends an equal prompt to the worker that has computed it."""
    worker = stack.worker()
    stack.bridge(stack.engines(2, SMALL, "m", TIME_SCALE))
    wait_workers(worker.url, 2)
    asyncio.run(generate.main(worker.url, "m"))
    first, *chunks = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"worker [12] holds 0 blocks of the prompt", first)
    assert sum(len(json.loads(chunk)) for chunk in chunks) == 20
    wait_for(lambda: get_json(f"{worker.url}/state")["blocks"] >= 6, VISIBLE_TIMEOUT_S, "the prompt's blocks")
    asyncio.run(least_prefill.main(worker.url))
    (holder,) = re.findall(r"worker ([12])", first)
    rows = re.findall(r"worker ([12]): (\d+) to compute, 8 generated", capsys.readouterr().out)
    # The prompt has 100 tokens, of which 96 are full blocks. The end of a request is reported in the background, so the
    # 4 tokens of the first one may still be booked when the second one asks.
    assert rows[:2] in ([(holder, "4"), (holder, "4")], [(holder, "4"), (holder, "8")])
    assert rows[2][1] == "200"


def test_the_publisher_example_reports_a_block_that_a_router_then_knows(stack: Stack) -> None:
    """The block that it evicts is gone, the other one is in the router's index."""
    worker = stack.worker()
    environ = {**os.environ, **as_environ(stack.settings), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, ROOT / "examples/embed_the_publisher.py"], env=environ, check=True, timeout=60.0)
    wait_for(lambda: get_json(f"{worker.url}/state")["blocks"] == 1, VISIBLE_TIMEOUT_S, "the block that stays")

"""Both forms of the client on a real fleet: engines, a bridge, and routers that share bookings through Kafka."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streams.client import EngineOptions, KvPushRouter, KvRouter, KvRouterClient
from streams.client.payloads import pack_tokens, unpack_tokens
from streams.errors import InvalidRequest, NotReady, QueueTimeout, UnknownModel
from streams.lab.engines.synthetic_tokens import greedy_tokens
from streams.lab.processes import Children
from streams.lab.stack import READY_TIMEOUT_S, Engine, RouterProcess, Stack, get_json, is_ready, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.bridges import SMALL
from tests.helpers.pages import blocks
from tests.helpers.scopes import ScopeFactory
from tests.helpers.support import VISIBLE_TIMEOUT_S

MODEL = "m"
BLOCK_SIZE = SMALL.block_size
N_BLOCKS = 8
PROMPT = list(range(N_BLOCKS * BLOCK_SIZE))
STOP = {"max_tokens": 4, "ignore_eos": True}

#: Model seconds per second of the engines.
TIME_SCALE = 100.0

#: The rolling restart in its short form: requests per second, and the pause between requests and the restarts.
RATE = 40.0
SETTLE_S = 1.0


Running = tuple[RouterProcess, list[Engine]]


@pytest.fixture(scope="module")
def fleet(running: Running) -> RouterProcess:
    """Give the worker with its router."""
    return running[0]


@pytest.fixture(scope="module")
def running(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Give a worker with a router, and two engines behind it. One prompt is in the cache and in the index."""
    folder = tmp_path_factory.mktemp("client")
    with Children() as children:
        stack = Stack(new_scope(folder), folder, children)
        worker = stack.worker()
        engines = stack.engines(2, SMALL, MODEL, TIME_SCALE)
        stack.bridge(engines)
        wait_workers(worker.url, 2)

        async def fill() -> None:
            async with KvRouterClient(worker.url) as client:
                async for _ in await client.generate(PROMPT, stop_conditions=STOP):
                    pass

        asyncio.run(fill())
        wait_for(
            lambda: get_json(f"{worker.url}/state")["blocks"] >= N_BLOCKS, VISIBLE_TIMEOUT_S, "the prompt's blocks"
        )
        yield worker, engines


Form = Callable[[RouterProcess], KvRouter]


def over_http(worker: RouterProcess) -> KvRouter:
    return KvRouterClient([worker.url])


def in_process(worker: RouterProcess) -> KvRouter:
    return KvPushRouter(worker.settings)


def active(url: str) -> int:
    return sum(row["active_requests"] for row in get_json(f"{url}/loads")["loads"])


@asynccontextmanager
async def client_of(form: Form, worker: RouterProcess) -> AsyncIterator[KvRouter]:
    async with asyncio.timeout(READY_TIMEOUT_S + VISIBLE_TIMEOUT_S), form(worker) as client:
        yield client


async def until_active(url: str, n: int) -> None:
    async with asyncio.timeout(VISIBLE_TIMEOUT_S):
        while await asyncio.to_thread(active, url) != n:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("form", [over_http, in_process])
def test_both_forms_answer_alike(form: Form, fleet: RouterProcess) -> None:
    """The cached prompt's worker, its matches and the potential loads are the same through either form."""

    async def scenario() -> None:
        async with client_of(form, fleet) as client:
            found = await client.find_matches_for_request(PROMPT)
            ((holder, n_blocks),) = found.scores.items()
            assert n_blocks == N_BLOCKS == found.request_blocks
            assert found.by_rank.scores == {(holder, 0): N_BLOCKS}
            assert await client.best_worker_id(PROMPT, model=MODEL) == (holder, N_BLOCKS)
            assert await client.best_worker(PROMPT) == (holder, 0, N_BLOCKS)
            potential = {row["worker_id"]: row for row in await client.get_potential_loads(PROMPT)}
            assert sorted(potential) == [1, 2]
            assert potential[holder]["potential_prefill_tokens"] == 0
            assert potential[3 - holder]["potential_prefill_tokens"] == len(PROMPT)
            assert (await client.direct(3 - holder).best_worker_id(PROMPT)) == (3 - holder, 0)
            turns = [(await client.round_robin().best_worker_id(PROMPT))[0] for _ in range(4)]
            assert sorted(turns) == [1, 1, 2, 2]
            assert {(await client.random().best_worker_id(PROMPT))[0] for _ in range(40)} == {1, 2}
            with pytest.raises(UnknownModel):
                await client.best_worker_id(PROMPT, model="other")
            with pytest.raises(InvalidRequest, match="no_such"):
                await client.best_worker_id(PROMPT, {"no_such": 1})

    asyncio.run(scenario())


@pytest.mark.parametrize("form", [over_http, in_process])
def test_generating_is_booked_on_every_router_and_ends_on_every_router(form: Form, fleet: RouterProcess) -> None:
    """The example of the issue, and an answer that is left early; the fleet's router sees the bookings of both."""

    async def scenario() -> None:
        async with client_of(form, fleet) as client:
            stream = await client.generate(
                token_ids=PROMPT,
                model=MODEL,
                stop_conditions={"max_tokens": 20, "ignore_eos": True},
                sampling_options={"temperature": 0.7, "top_p": 0.9},
                router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.5},
                worker_id=None,
            )
            chunks = [chunk async for chunk in stream]
            assert sum(len(chunk["token_ids"]) for chunk in chunks) == 20
            assert chunks[-1]["finish_reason"] == "length"
            async with await client.generate(PROMPT, stop_conditions={"max_tokens": 800}) as long:
                await until_active(fleet.url, 1)
                await anext(long)
            await until_active(fleet.url, 0)
            assert client.reports_lost == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("form", [over_http, in_process])
def test_both_forms_wait_in_the_queue(form: Form, fleet: RouterProcess) -> None:
    """With queue=on a request waits until a rank has room or its deadline; one whose caller gives up books nothing."""
    long = 12_000  # of these tokens, a rank is closed above 10,000

    async def scenario() -> None:
        async with client_of(form, fleet) as client:
            full = [
                await client.direct(worker_id).book([*range(worker_id * long, (worker_id + 1) * long)])
                for worker_id in (1, 2)
            ]
            await until_active(fleet.url, 2)
            with pytest.raises(QueueTimeout):
                await client.book(PROMPT, queue="on", queue_timeout_ms=200, tenant="a")
            with pytest.raises(InvalidRequest, match="tenant"):
                await client.book(PROMPT, queue="on", tenant="a" * 513)
            given_up = asyncio.create_task(client.book(PROMPT, queue="on"))
            asking = asyncio.create_task(client.book(PROMPT, queue="on", priority=1, tenant="a"))
            await asyncio.sleep(0.2)
            assert not given_up.done() and not asking.done()
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            full[1].prefill_complete()
            async with await asking as booking:
                assert booking.worker_id == 2
                await until_active(fleet.url, 3)
            for booking in full:
                booking.end()
            await until_active(fleet.url, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("form", [over_http, in_process])
def test_both_forms_move_an_answer_whose_engine_hangs(form: Form, running: Running) -> None:
    """Every token comes once, and the booking is at the worker that goes on, and freed at the end."""
    worker, engines = running
    by_id = {engine.worker_id: engine for engine in engines}
    n_tokens = 600
    expected = unpack_tokens(greedy_tokens(pack_tokens(PROMPT), n_tokens))

    async def generate(client: KvRouter) -> int:
        """Return how often an answer moved whose engine is stopped at its first token."""
        answer = await client.generate(PROMPT, stop_conditions={"max_tokens": n_tokens})
        stopped, got = by_id[answer.booking.worker_id], list[int]()
        async for chunk in answer:
            if not got:
                os.kill(stopped.child.pid, signal.SIGSTOP)
            got += chunk["token_ids"]
        os.kill(stopped.child.pid, signal.SIGCONT)
        assert got == expected
        assert (answer.booking.worker_id != stopped.worker_id) == bool(answer.figures.migrations)
        return answer.figures.migrations

    async def scenario() -> None:
        async with client_of(form, worker) as client:
            client._engine_options = EngineOptions(stall_timeout_s=0.5)
            while not await generate(client):  # the engine had sent the whole answer before it was stopped
                pass
            await until_active(worker.url, 0)

    try:
        asyncio.run(scenario())
    finally:
        for engine in engines:
            os.kill(engine.child.pid, signal.SIGCONT)


def test_a_router_in_the_process_that_stops_refuses_what_waits(fleet: RouterProcess) -> None:
    """Closing the client ends the wait of its requests with an error, at once."""

    async def scenario() -> None:
        async with client_of(in_process, fleet) as client:
            full = [await client.direct(each).book([*range(each * 12_000, (each + 1) * 12_000)]) for each in (1, 2)]
            asking = asyncio.create_task(client.book(PROMPT, queue="on"))
            await asyncio.sleep(0.2)
            assert not asking.done()
            await client.close()
            with pytest.raises(NotReady, match="stopping"):
                await asking
            await until_active(fleet.url, 0)  # closing has ended these as well
            assert len(full) == 2

    asyncio.run(scenario())


def test_a_router_in_the_process_shares_bookings_both_ways(fleet: RouterProcess) -> None:
    """It counts what another router booked, and either form ends what the other one began."""

    async def scenario() -> None:
        async with client_of(in_process, fleet) as here, client_of(over_http, fleet) as there:
            first = await there.best_worker([*range(5000, 5064)], request_id="there")
            second = await here.best_worker([*range(6000, 6064)], request_id="here")

            async def prefill_tokens(client: KvRouter) -> dict[int, int]:
                rows = await client.get_potential_loads([1])
                return {row["worker_id"]: row["potential_prefill_tokens"] - 1 for row in rows}

            expected = {1: 0, 2: 0}
            expected[first[0]] += 64
            expected[second[0]] += 64
            async with asyncio.timeout(VISIBLE_TIMEOUT_S):
                while not (await prefill_tokens(here) == expected == await prefill_tokens(there)):
                    await asyncio.sleep(0.02)
            here.free("there")
            there.free("here")
            async with asyncio.timeout(VISIBLE_TIMEOUT_S):
                while not (await prefill_tokens(here) == {1: 0, 2: 0} == await prefill_tokens(there)):
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_a_router_in_the_process_needs_its_topics(kafka: Any, new_scope: ScopeFactory, tmp_path: Path) -> None:
    """A typo in the prefix is an error at once, and creates nothing."""

    async def scenario() -> None:
        client = KvPushRouter(new_scope(tmp_path))
        with pytest.raises(NotReady, match="topics"):
            async with client:
                pass

    asyncio.run(scenario())


@pytest.mark.first_ring("client")
def test_the_example_of_the_page_runs_as_it_is(fleet: RouterProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the addresses of the routers are replaced. It prints twenty tokens."""
    page = "docs/client.md"
    (code,) = [code for _, code in blocks(page, "python") if "KvRouterClient" in code]
    code = re.sub(r"http://[\w:]+", fleet.url, code)
    main = eval(compile(code, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {})
    asyncio.run(main)
    assert sum(len(json.loads(line)) for line in capsys.readouterr().out.splitlines()) == 20


async def restart(router: RouterProcess) -> None:
    """Restart a router as a rollout does: SIGTERM, its end, and a new process on the same port until it is ready."""
    await asyncio.to_thread(router.child.stop)
    assert router.child.exit_code == 0
    router.child.start()
    await asyncio.to_thread(router.child.wait_ready, lambda: is_ready(router.url), READY_TIMEOUT_S)


@pytest.mark.long_running
def test_a_rolling_restart_of_two_routers_loses_no_request(scope: Settings, children: Children, tmp_path: Path) -> None:
    """While both routers restart one after the other, every request is answered; afterwards only live load is left."""
    stack = Stack(scope, tmp_path, children)
    both = [stack.router("first"), stack.router("second")]
    stack.bridge(stack.engines(2, SMALL, MODEL, TIME_SCALE))
    for router in both:
        wait_workers(router.url, 2)
    rng = random.Random(1)

    async def request(client: KvRouter, number: int) -> int:
        start = rng.randrange(20) * 1000
        stream = await client.generate([*range(start, start + 40)], stop_conditions=STOP, request_id=f"r{number}")
        async with stream:
            return sum([len(chunk["token_ids"]) async for chunk in stream])

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        async with KvRouterClient([router.url for router in both], retry_timeout_s=VISIBLE_TIMEOUT_S) as client:
            running: list[asyncio.Task[int]] = []

            async def arrive() -> None:
                began_s = loop.time()
                while not over.is_set():
                    running.append(asyncio.create_task(request(client, len(running))))
                    await asyncio.sleep(max(0.0, began_s + len(running) / RATE - loop.time()))

            arriving = asyncio.create_task(arrive())
            for router in both:
                await asyncio.sleep(SETTLE_S)
                await restart(router)
            await asyncio.sleep(SETTLE_S)
            over.set()
            await arriving
            answered = await asyncio.gather(*running)
            assert set(answered) == {STOP["max_tokens"]}
            assert len(answered) > 3 * SETTLE_S * RATE / 2
            kept = [await client.book(PROMPT) for _ in range(3)]
            for router in both:
                await until_active(router.url, len(kept))
                assert get_json(f"{router.url}/loads")["in_sync"]
            for booking in kept:
                booking.end()
            for router in both:
                await until_active(router.url, 0)
            assert client.reports_lost == 0

    asyncio.run(scenario())

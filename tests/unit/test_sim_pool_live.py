"""Live engines around a live pool, over sockets and without Kafka: what is loaded, told, replayed, and lost with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgpack
import pytest
import zmq.asyncio
from aiohttp import web

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BlocksStored, MoeLabels
from streams.cxl.events import CxlStateChanged
from streams.cxl.states import NOT_POOLED, Refused, transition
from streams.engines.cxl_names import CxlNames
from streams.engines.dialects.vllm import VLLM, decode_payload
from streams.engines.ledger import Ledger
from streams.errors import SettingsError
from streams.local.processes import Children
from streams.local.stack import Stack
from streams.settings import Settings
from streams.sim import pool_client, pool_server
from streams.sim.pool import PoolConfig
from streams.sim.pool_server import PoolServer, PoolServerConfig
from streams.sim.pool_server import serve as serve_pool
from streams.sim.server import SimServerConfig, serve
from tests.unit.test_sim_server import ENGINE, FAST, PATIENCE_S, PROMPT, Client, started

#: 1 ms a block either way and half a millisecond a transfer, of model time.
POOL = PoolConfig("p", block_size=4, bytes_per_token=250_000, offload_gb_per_s=1.0, load_gb_per_s=1.0, latency_us=500.0)
POOL_SERVER = PoolServerConfig(pool=POOL, time_scale=FAST.time_scale)
N_FULL = len(PROMPT) // ENGINE.block_size


@dataclass
class House:
    """A pool, and what starts engines beside it."""

    pool: PoolServer
    http: aiohttp.ClientSession
    context: zmq.asyncio.Context
    _stops: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    async def engine(self, config: SimServerConfig = FAST, **changes: Any) -> Client:
        """Start one that has found the pool."""
        server = await serve(replace(config, pool=self.pool.url, **changes))
        self._stops.append(server.stop)
        client = Client(server, self.http, self.context)
        await until(lambda: attached(client))
        return client

    async def info(self) -> Any:
        async with self.http.get(f"{self.pool.url}/pool/info") as response:
            return await response.json()

    async def call(self, name: str, **body: Any) -> tuple[int, Any]:
        async with self.http.post(f"{self.pool.url}/pool/{name}", json=body) as response:
            return response.status, await response.json()

    async def session(self) -> str:
        """Attach by hand."""
        status, page = await self.call("attach", engine="hand", model="sim-model", block_size=4, time_scale=1000.0)
        assert status == 200
        return str(page["session"])

    async def restart_pool(self) -> None:
        """Another process on the same port, with nothing in it."""
        port = urlsplit(self.pool.url).port or 0
        await self.pool.stop()
        self.pool = await serve_pool(replace(self.pool.config, port=port))

    async def stop(self) -> None:
        for stop in self._stops:
            await stop()
        await self.pool.stop()


@asynccontextmanager
async def house(config: PoolServerConfig = POOL_SERVER) -> AsyncIterator[House]:
    async with aiohttp.ClientSession() as http:
        context = zmq.asyncio.Context()
        found = House(await serve_pool(config), http, context)
        try:
            yield found
            found.pool.pool.check()
        finally:
            context.destroy(linger=0)
            await found.stop()


def live(scenario: Callable[[House], Awaitable[None]], config: PoolServerConfig = POOL_SERVER) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), house(config) as found:
            await scenario(found)

    asyncio.run(main())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait; only a hang is a failure, and the scenario's timeout tells it."""
    while not await condition():
        await asyncio.sleep(0.01)


async def attached(client: Client) -> bool:
    return bool((await client.get("/sim/info"))["pool"]["attached"])


async def pooled(client: Client, n_blocks: int) -> bool:
    """Whether so many blocks of an engine are in the pool, and none on its way."""
    pool = (await client.get("/sim/info"))["pool"]
    return (pool["in_transit"], pool["cxl_pooled"]) == (0, n_blocks)


async def told(client: Client) -> dict[int, CxlMemoryMetadata]:
    """What a bridge makes of all that an engine has told: metadata by sequence hash, every name known, all legal."""
    ledger, names = Ledger(VLLM.counts_copies), CxlNames()
    states: dict[int, CxlMemoryMetadata] = {}
    for _, payload in await client.replay(0):
        for event in decode_payload(payload, ENGINE.block_size).events:
            if isinstance(event, CxlStateChanged):
                blocks, unknown = names.resolve(event.engine, event.state, ledger)
                assert unknown == []
                for block in blocks.sequence.tolist():
                    after = transition(states.get(block, NOT_POOLED), event.state, event.pool_id)
                    assert not isinstance(after, Refused), after
                    states[block] = after
            else:
                ledger.apply(event)
    return states


def only_state(states: dict[int, CxlMemoryMetadata], state: CxlMemoryState, n_blocks: int) -> None:
    assert [each.state for each in states.values()] == [state] * n_blocks


def test_what_one_engine_computed_another_loads() -> None:
    """Its time to the first token is that of loading and of what is left, and nothing else was computed."""

    async def scenario(at: House) -> None:
        first, second = await at.engine(), await at.engine()
        page = await first.complete()
        assert page["kvstreams"]["pooled_tokens"] == 0
        await until(lambda: pooled(first, (len(PROMPT) + 15) // 4))
        again = await second.complete()
        assert again["choices"] == page["choices"]
        figures = again["kvstreams"]
        assert (figures["pooled_tokens"], figures["cached_tokens"]) == (12, 12)
        assert figures["model_ttft_ms"] == pytest.approx(3.5 + 15.2, abs=1e-3)
        for client, computed, loaded in ((first, 14, 0), (second, 2, 12)):
            info = await client.get("/sim/info")
            assert (info["computed_tokens"], info["loaded_tokens"]) == (computed, loaded)
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
        info = await at.info()
        assert (info["loaded"], info["n_owners"]) == (N_FULL, 2)
        assert info["offloaded"] == (len(PROMPT) + 15) // 4  # the second engine's are the first one's

    live(scenario)


def test_a_transition_stands_right_behind_its_store_and_the_pools_word_follows() -> None:
    """In one ordered stream: whoever follows it, or has it replayed, knows every name, and nothing illegal is told."""

    async def scenario(at: House) -> None:
        client = await at.engine()
        await client.complete(max_tokens=1)
        await until(lambda: pooled(client, N_FULL))
        events = [event for _, payload in await client.replay(0) for event in msgpack.unpackb(payload)[1]]
        assert [event[0] for event in events] == ["BlockStored", "CxlStateTransition", "CxlStateTransition"]
        names = events[0][1]
        assert events[1:] == [
            ["CxlStateTransition", 1, names, "in_transit", "p"],
            ["CxlStateTransition", 2, names, "cxl_pooled", "p"],
        ]
        only_state(await told(client), CxlMemoryState.CXL_POOLED, N_FULL)

    live(scenario)


def test_owners_hear_of_evictions_and_a_name_that_the_gpu_gave_up_is_still_known() -> None:
    """A cache of 4 blocks and a pool of 3: what was pooled first is evicted from both, and told by a name of old."""

    async def scenario(at: House) -> None:
        client = await at.engine(replace(FAST, engine=replace(ENGINE, n_blocks=4)))
        for prompt in (list(range(12)), list(range(100, 112)), list(range(200, 212))):
            await client.complete(prompt=prompt, max_tokens=1)
            await until(lambda: pooled(client, 3))
        states = [each.state for each in (await told(client)).values()]
        assert states == [CxlMemoryState.EVICTED] * 6 + [CxlMemoryState.CXL_POOLED] * 3

    live(scenario, replace(POOL_SERVER, pool=replace(POOL, capacity_blocks=3)))


def test_a_pool_that_dies_takes_its_blocks_with_it_and_engines_compute() -> None:
    """Told as evicted; the next pool is found and filled anew."""

    async def scenario(at: House) -> None:
        first, second = await at.engine(), await at.engine()
        await first.complete(max_tokens=1)
        await until(lambda: pooled(first, N_FULL))
        await at.pool.stop()
        page = await second.complete(max_tokens=1)
        assert page["kvstreams"]["cached_tokens"] == 0

        async def lost() -> bool:
            return not await attached(first)

        await until(lost)
        only_state(await told(first), CxlMemoryState.EVICTED, N_FULL)
        await at.restart_pool()
        await until(lambda: attached(first))
        await first.complete(prompt=list(range(50, 64)), max_tokens=1)
        await until(lambda: pooled(first, N_FULL))
        assert (await at.info())["n_pooled"] == N_FULL
        await until(lambda: attached(second))
        again = await second.complete(prompt=list(range(50, 64)), max_tokens=1)
        assert again["kvstreams"]["pooled_tokens"] == 4 * N_FULL

    live(scenario)


def test_a_pool_that_forgot_its_engines_has_new_sessions() -> None:
    """Restarted between two calls: whichever call finds it out, nothing old is told to be there."""

    async def scenario(at: House) -> None:
        client = await at.engine()
        await client.complete(max_tokens=1)
        await until(lambda: pooled(client, N_FULL))
        await at.restart_pool()

        async def anew() -> bool:
            pool = (await client.get("/sim/info"))["pool"]
            return bool(pool["attached"] and pool["sessions_lost"] == 1)

        await until(anew)
        only_state(await told(client), CxlMemoryState.EVICTED, N_FULL)

    live(scenario)


def test_an_engine_that_falls_silent_leaves_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way goes, what is there stays for others; news wait for who asks, and are given again."""
    monkeypatch.setattr(pool_server, "SESSION_S", 1.0)
    slow = replace(POOL_SERVER, pool=replace(POOL, offload_gb_per_s=1e-9), time_scale=FAST.time_scale)

    async def scenario(at: House) -> None:
        session = await at.session()
        assert await at.call("offload", session=session, keys=[1, 2]) == (200, {})
        assert (await at.info())["n_in_transit"] == 2

        async def gone() -> bool:
            return bool((await at.info())["n_in_transit"] == 0)

        await until(gone)
        assert (await at.call("offload", session=session, keys=[1]))[0] == 404

    live(scenario, slow)

    async def replayed(at: House) -> None:
        session = await at.session()
        await at.call("offload", session=session, keys=[1, 2])

        async def news() -> bool:
            return bool((await at.call("news", session=session, after=0))[1]["news"])

        await until(news)
        for _ in range(2):  # an answer that was lost is given again
            answer = await at.call("news", session=session, after=0)
            assert answer == (200, {"news": [{"number": 1, "state": "cxl_pooled", "keys": [1, 2]}]})
        assert await at.call("news", session=session, after=1) == (200, {"news": []})

        async def silent() -> bool:
            return bool((await at.info())["engines"] == [])

        await until(silent)
        assert (await at.info())["n_pooled"] == 2

    live(replayed)


def test_a_pool_that_hangs_costs_its_engines_a_timeout_and_no_answer(
    monkeypatch: pytest.MonkeyPatch, children: Children, tmp_path: Path
) -> None:
    """Stopped by a signal it neither answers nor refuses: what waits is computed, and what it held is given up."""
    monkeypatch.setattr(pool_client, "CALL_TIMEOUT_S", 1.0)
    pool = Stack(Settings(), tmp_path, children).pool(POOL, FAST.model, FAST.time_scale)

    async def scenario() -> None:
        async with asyncio.timeout(PATIENCE_S), started(replace(FAST, pool=pool.url)) as client:
            await until(lambda: attached(client))
            await client.complete(max_tokens=1)
            await until(lambda: pooled(client, N_FULL))
            pool.child.signal(signal.SIGSTOP)
            try:
                page = await client.complete(prompt=list(range(50, 64)), max_tokens=1)
                assert page["kvstreams"]["cached_tokens"] == 0

                async def lost() -> bool:
                    return not await attached(client)

                await until(lost)
                states = {each.state for each in (await told(client)).values()}
                assert states == {CxlMemoryState.EVICTED}
            finally:
                pool.child.signal(signal.SIGCONT)
            await until(lambda: attached(client))

    asyncio.run(scenario())


def test_limits_of_a_pool_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine more than it takes; one that does not take its news."""
    monkeypatch.setattr(pool_server, "SESSIONS_MAX", 1)
    monkeypatch.setattr(pool_server, "EVENT_BLOCKS_MAX", 1)

    async def scenario(at: House) -> None:
        session = await at.session()
        status, page = await at.call("attach", engine="e", model="sim-model", block_size=4, time_scale=1000.0)
        assert (status, page["error"]["code"]) == (503, "too_many_sessions")
        await at.call("offload", session=session, keys=[1, 2])

        async def gone() -> bool:
            return (await at.call("load", session=session, keys=[]))[0] == 404

        await until(gone)
        await at.session()

    live(scenario)


def test_what_an_engine_cannot_offload_fast_enough_is_counted_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One offload may wait: of blocks that are filled in one step the others stay plain."""
    monkeypatch.setattr(pool_client, "OFFLOADS_WAITING_MAX", 1)
    fast = 100_000.0

    async def scenario(at: House) -> None:
        client = await at.engine(replace(FAST, time_scale=fast))
        await client.complete(max_tokens=200)

        async def settled() -> bool:
            pool = (await client.get("/sim/info"))["pool"]
            return bool(pool["in_transit"] == 0 and pool["cxl_pooled"] + pool["not_offloaded"] == (14 + 199) // 4)

        await until(settled)
        assert (await client.get("/sim/info"))["pool"]["not_offloaded"] > 0
        states = await told(client)
        only_state(states, CxlMemoryState.CXL_POOLED, len(states))

    live(scenario, replace(POOL_SERVER, time_scale=fast))


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no json", b'{"error": 7}', b'{"session": 1}'])
def test_what_answers_and_is_no_pool_is_none(answer: bytes) -> None:
    """The engine serves without it and goes on trying."""
    asked = asyncio.Event()

    async def anything(_http: web.Request) -> web.Response:
        asked.set()
        return web.Response(body=answer)

    async def scenario() -> None:
        app = web.Application()
        app.add_routes([web.route("*", "/{rest:.*}", anything)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with asyncio.timeout(PATIENCE_S), started(replace(FAST, pool=url)) as client:
                for _ in range(2):
                    await asked.wait()
                    asked.clear()
                assert not await attached(client)
                await client.complete()
                async with client.http.get(f"{client.server.http_url}/health") as response:
                    assert response.status == 200
        finally:
            await runner.cleanup()

    asyncio.run(scenario())


def test_an_engine_of_other_blocks_is_told_so_and_serves_without_the_pool() -> None:
    """Model, block size and time scale must be the same."""

    async def scenario(at: House) -> None:
        for wrong in ({"model": "other"}, {"block_size": 16}, {"time_scale": 1.0}, {"model": None}):
            asked = {"engine": "e", "model": "sim-model", "block_size": 4, "time_scale": 1000.0, **wrong}
            status, page = await at.call("attach", **asked)
            assert (status, page["error"]["code"]) == (409, "other_blocks")
        server = await serve(replace(FAST, model="other", pool=at.pool.url))
        try:
            client = Client(server, at.http, at.context)
            page = await client.complete(model="other", max_tokens=1)
            assert page["kvstreams"]["cached_tokens"] == 0
            assert not await attached(client)
        finally:
            await server.stop()

    live(scenario)


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("offload", {"session": "none", "keys": [1]}, 404),
        ("load", {"keys": [1]}, 404),
        ("news", {"session": 7, "after": 0}, 404),
        ("offload", {"keys": "12"}, 400),
        ("offload", {"keys": [-1]}, 400),
        ("load", {"keys": [1 << 64]}, 400),
        ("load", {"keys": [True]}, 400),
        ("news", {"after": 5}, 400),
        ("news", {"after": -1}, 400),
        ("news", {}, 400),
    ],
)
def test_calls_that_make_no_sense_are_refused(name: str, body: dict[str, Any], status: int) -> None:
    """A session that is none, keys that are none, news that were never told."""

    async def scenario(at: House) -> None:
        asked = body if "session" in body or status == 404 else {"session": await at.session(), **body}
        answer_status, page = await at.call(name, **asked)
        assert answer_status == status
        assert set(page["error"]) == {"code", "message", "detail"}

    live(scenario)


def test_labels_are_stamped_on_every_store() -> None:
    """Of prompts and of answers, as a bridge reads them."""

    async def scenario(at: House) -> None:
        client = await at.engine(replace(FAST, moe=MoeLabels(2, 7, None), event_dialect="map"))
        await client.complete()
        await until(lambda: pooled(client, 7))
        stored = [
            event
            for _, payload in await client.replay(0)
            for event in decode_payload(payload, ENGINE.block_size).events
            if isinstance(event, BlocksStored)
        ]
        assert {event.moe for event in stored} == {MoeLabels(2, 7, None)}
        only_state(await told(client), CxlMemoryState.CXL_POOLED, 7)

    live(scenario)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"moe": MoeLabels(1, 2, 3)}, "labels"),
        ({"moe": MoeLabels(1, -2, 3), "event_dialect": "map"}, "expert_id is -2"),
        ({"moe": MoeLabels(None, None, 1 << 31), "event_dialect": "map"}, "expert_group is 2147483648"),
        ({"pool": "localhost:8200"}, "http://"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], wrong: str) -> None:
    """Labels need events with names, and a pool is found by its URL."""
    with pytest.raises(SettingsError, match=wrong):
        SimServerConfig(**changes)

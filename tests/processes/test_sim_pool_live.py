"""Live engines and a live pool over sockets, without Kafka: loads, reported transitions, replays and failures."""

from __future__ import annotations

import asyncio
import json
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
from streams.cxl.states import NOT_POOLED, TransitionRefused, transition
from streams.engines.cxl_names import CxlNames
from streams.engines.dialects.vllm import VLLM, decode_payload
from streams.engines.ledger import Ledger
from streams.errors import SettingsError
from streams.lab.engines import pool_client, pool_server
from streams.lab.engines.pool import PoolConfig
from streams.lab.engines.pool_server import PoolServer, PoolServerConfig
from streams.lab.engines.pool_server import serve as serve_pool
from streams.lab.engines.server import SimServerConfig, serve
from streams.lab.processes import Children
from streams.lab.stack import Stack
from streams.settings import Settings
from tests.helpers.sim_client import ENGINE, FAST, PATIENCE_S, PROMPT, Client, prompt_hashes, started

#: 1 ms of model time per block in either direction, and 0.5 ms per transfer.
POOL = PoolConfig("p", block_size=4, bytes_per_token=250_000, offload_gb_per_s=1.0, load_gb_per_s=1.0, latency_us=500.0)
POOL_SERVER = PoolServerConfig(pool=POOL, time_scale=FAST.time_scale)
N_FULL = len(PROMPT) // ENGINE.block_size


@dataclass
class Fleet:
    """A pool, and engines that share it."""

    pool: PoolServer
    http: aiohttp.ClientSession
    context: zmq.asyncio.Context
    _stops: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    _clients: list[Client] = field(default_factory=list)

    async def engine(self, config: SimServerConfig = FAST, **changes: Any) -> Client:
        """Start an engine and wait until it is attached."""
        server = await serve(replace(config, pool=self.pool.url, **changes))
        self._stops.append(server.stop)
        client = Client(server, self.http, self.context)
        self._clients.append(client)
        await until(lambda: attached(client))
        return client

    async def info(self) -> Any:
        async with self.http.get(f"{self.pool.url}/pool/info") as response:
            return await response.json()

    async def call(self, name: str, **body: Any) -> tuple[int, Any]:
        async with self.http.post(f"{self.pool.url}/pool/{name}", json=body) as response:
            return response.status, await response.json()

    async def session(self) -> str:
        """Attach without an engine; returns the session."""
        status, page = await self.call("attach", engine="hand", model="sim-model", block_size=4, time_scale=1000.0)
        assert status == 200
        return str(page["session"])

    async def restart_pool(self) -> None:
        """Replace the pool with an empty one on the same port."""
        port = urlsplit(self.pool.url).port or 0
        await self.pool.stop()
        self.pool = await serve_pool(replace(self.pool.config, port=port))

    async def stop(self) -> None:
        for client in self._clients:
            client.close()
        for stop in self._stops:
            await stop()
        await self.pool.stop()


@asynccontextmanager
async def fleet(config: PoolServerConfig = POOL_SERVER) -> AsyncIterator[Fleet]:
    async with aiohttp.ClientSession() as http:
        context = zmq.asyncio.Context()
        found = Fleet(await serve_pool(config), http, context)
        try:
            yield found
            found.pool.pool.check()
        finally:
            await found.stop()
            context.destroy(linger=0)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds; the test's timeout ends a hang."""
    while not await condition():
        await asyncio.sleep(0.01)


async def attached(client: Client) -> bool:
    return bool((await client.get("/sim/info"))["pool"]["attached"])


async def pooled(client: Client, n_blocks: int) -> bool:
    """Whether this many blocks of an engine are in the pool and none is in transit."""
    pool = (await client.get("/sim/info"))["pool"]
    return (pool["in_transit"], pool["cxl_pooled"]) == (0, n_blocks)


async def reported(client: Client) -> dict[int, CxlMemoryMetadata]:
    """Give the metadata by sequence hash that a bridge derives from an engine's events; all must be legal."""
    ledger, names = Ledger(VLLM.counts_copies), CxlNames()
    states: dict[int, CxlMemoryMetadata] = {}
    for _, payload in await client.replay(0):
        for event in decode_payload(payload, ENGINE.block_size).events:
            if isinstance(event, CxlStateChanged):
                blocks, unknown = names.resolve(event, ledger)
                assert unknown == []
                for block in blocks.sequence.tolist():
                    after = transition(states.get(block, NOT_POOLED), event.state, event.pool_id)
                    assert not isinstance(after, TransitionRefused), after
                    states[block] = after
            else:
                ledger.apply(event)
    return states


def assert_all(states: dict[int, CxlMemoryMetadata], state: CxlMemoryState, n_blocks: int) -> None:
    assert [each.state for each in states.values()] == [state] * n_blocks


async def test_an_engine_loads_what_another_one_computed() -> None:
    """Its time to first token is the loading and the prefill of the rest, and nothing else is computed."""
    async with fleet() as at:
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
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 12, "pooled_tokens": 12}
        info = await at.info()
        assert (info["loaded"], info["n_owners"]) == (N_FULL, 2)
        assert info["offloaded"] == (len(PROMPT) + 15) // 4  # the second engine joins the blocks of the first


async def test_a_transition_directly_follows_its_store_and_the_pools_event_comes_later() -> None:
    """All are in one ordered stream, so its consumers, live or by replay, know every engine hash."""
    async with fleet() as at:
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
        assert_all(await reported(client), CxlMemoryState.CXL_POOLED, N_FULL)


@pytest.mark.parametrize("dialect", ["array", "map"])
async def test_transitions_name_the_workers_that_can_read_the_blocks(dialect: Any) -> None:
    """The first transition of each block says it, for blocks of the answer as well, and a bridge reads it."""
    async with fleet() as at:
        client = await at.engine(replace(FAST, event_dialect=dialect, accessible_workers=(7, 9)))
        await client.complete(max_tokens=8)
        n_blocks = (len(PROMPT) + 7) // ENGINE.block_size
        await until(lambda: pooled(client, n_blocks))
        decoded = [
            event
            for _, payload in await client.replay(0)
            for event in decode_payload(payload, ENGINE.block_size).events
            if isinstance(event, CxlStateChanged)
        ]
        named = [event.accessible_workers for event in decoded if event.state is CxlMemoryState.IN_TRANSIT]
        assert len(named) > 1
        assert set(named) == {(7, 9)}
        assert_all(await reported(client), CxlMemoryState.CXL_POOLED, n_blocks)


@pytest.mark.parametrize(("writes", "n_blocks"), [("all", 7), ("prompt", N_FULL), ("none", 0)])
async def test_an_engine_writes_the_blocks_that_it_is_told_to(writes: Any, n_blocks: int) -> None:
    """Those of prompt and answer, of the prompt alone, or none."""
    async with fleet() as at:
        client = await at.engine(replace(FAST, pool_writes=writes))
        await client.complete(max_tokens=17)
        await until(lambda: pooled(client, n_blocks))
        assert (await at.info())["offloaded"] == n_blocks


async def test_an_engine_that_reads_in_place_takes_fewer_blocks_and_its_events_have_no_gap() -> None:
    """A bridge finds the parent of every block, the answer is the same, and what it generates is pooled as well."""
    async with fleet() as at:
        first = await at.engine()
        in_place = await at.engine(replace(FAST, pool_reads="in-place"))
        page = await first.complete(max_tokens=12)
        n_pooled = (len(PROMPT) + 11) // ENGINE.block_size
        await until(lambda: pooled(first, n_pooled))
        again = await in_place.complete(max_tokens=12)
        assert again["choices"] == page["choices"]
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 12, "pooled_tokens": 12}
        used = [(await each.get("/sim/info"))["n_blocks_used_max"] for each in (first, in_place)]
        assert used == [n_pooled + 1, n_pooled + 1 - N_FULL]
        await until(lambda: pooled(in_place, n_pooled - N_FULL))
        ledger = Ledger(VLLM.counts_copies)
        for _, payload in await in_place.replay(0):
            for event in decode_payload(payload, ENGINE.block_size).events:
                if not isinstance(event, CxlStateChanged):
                    ledger.apply(event)
        assert (ledger.unknown_parents, ledger.unknown_removals) == (0, 0)
        assert len(ledger) == len((await in_place.get("/sim/cache"))["sequence_hashes"]) == n_pooled - N_FULL
        assert_all(await reported(in_place), CxlMemoryState.CXL_POOLED, n_pooled - N_FULL)


async def test_the_journals_of_a_pool_and_its_engines_say_what_was_given(tmp_path: Path) -> None:
    """Each question of an engine is answered with the leading blocks that had arrived, and its figures say so."""
    journal = tmp_path / "pool.jsonl"
    async with fleet(replace(POOL_SERVER, journal=journal)) as at:
        first = await at.engine()
        second = await at.engine(replace(FAST, journal=tmp_path / "second.jsonl"))
        await first.complete(max_tokens=1)
        await until(lambda: pooled(first, N_FULL))
        async with at.http.post(
            f"{second.server.http_url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 1},
            headers={"X-Request-Id": "r-1"},
        ) as response:
            assert response.status == 200
        prefilled = [
            line["prefilled"]
            for line in map(json.loads, (tmp_path / "second.jsonl").read_text().splitlines())
            if "prefilled" in line
        ]
        assert prefilled == [{"request": "r-1", "prompt_tokens": 14, "cached_tokens": 12, "pooled_tokens": 12}]
        keys = prompt_hashes(PROMPT)
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        of_first, asked = [line for line in lines if "asked" in line]
        assert [int(key) for key in of_first["asked"]] == [int(key) for key in asked["asked"]] == keys
        assert (of_first["n_given"], asked["n_given"]) == (0, N_FULL)
        pooled_before = {int(key) for line in lines[: lines.index(asked)] for key in line.get("pooled", ())}
        assert pooled_before == set(keys)


async def test_one_call_may_begin_several_transfers() -> None:
    """They follow each other on the link, so the pool reports the arrival of each."""
    async with fleet() as at:
        session = await at.session()
        assert (await at.call("offload", session=session, keys=[1, 2, 3], sizes=[2, 1]))[0] == 200
        arrived: list[list[int]] = []

        async def all_arrived() -> bool:
            _, page = await at.call("events", session=session, after=len(arrived))
            arrived.extend(event["keys"] for event in page["events"])
            return len(arrived) == 2

        await until(all_arrived)
        assert arrived == [[1, 2], [3]]


async def test_an_eviction_is_reported_even_if_the_gpu_evicted_the_block_before() -> None:
    """With a cache of 4 blocks and a pool of 3, the first blocks are evicted from both and reported by engine hash."""
    async with fleet(replace(POOL_SERVER, pool=replace(POOL, capacity_blocks=3))) as at:
        client = await at.engine(replace(FAST, engine=replace(ENGINE, n_blocks=4)))
        for prompt in (list(range(12)), list(range(100, 112)), list(range(200, 212))):
            await client.complete(prompt=prompt, max_tokens=1)
            await until(lambda: pooled(client, 3))
        states = [each.state for each in (await reported(client)).values()]
        assert states == [CxlMemoryState.EVICTED] * 6 + [CxlMemoryState.CXL_POOLED] * 3


async def test_when_a_pool_exits_its_blocks_are_reported_as_evicted_and_engines_compute() -> None:
    """The engines attach to the next pool and fill it again."""
    async with fleet() as at:
        first, second = await at.engine(), await at.engine()
        await first.complete(max_tokens=1)
        await until(lambda: pooled(first, N_FULL))
        await at.pool.stop()
        page = await second.complete(max_tokens=1)
        assert page["kvstreams"]["cached_tokens"] == 0

        async def lost() -> bool:
            return not await attached(first)

        await until(lost)
        assert_all(await reported(first), CxlMemoryState.EVICTED, N_FULL)
        await at.restart_pool()
        await until(lambda: attached(first))
        await first.complete(prompt=list(range(50, 64)), max_tokens=1)
        await until(lambda: pooled(first, N_FULL))
        assert (await at.info())["n_pooled"] == N_FULL
        await until(lambda: attached(second))
        again = await second.complete(prompt=list(range(50, 64)), max_tokens=1)
        assert again["kvstreams"]["pooled_tokens"] == 4 * N_FULL


async def test_engines_attach_again_to_a_pool_that_restarted_between_two_calls() -> None:
    """Whichever call notices the restart, no block of the old pool is reported as pooled."""
    async with fleet() as at:
        client = await at.engine()
        await client.complete(max_tokens=1)
        await until(lambda: pooled(client, N_FULL))
        await at.restart_pool()

        async def attached_again() -> bool:
            pool = (await client.get("/sim/info"))["pool"]
            return bool(pool["attached"] and pool["sessions_lost"] == 1)

        await until(attached_again)
        assert_all(await reported(client), CxlMemoryState.EVICTED, N_FULL)


async def test_a_silent_engine_loses_its_session_and_its_blocks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unfinished writes are dropped, its other blocks stay, and events are repeated until acknowledged."""
    monkeypatch.setattr(pool_server, "SESSION_S", 1.0)
    slow = replace(POOL_SERVER, pool=replace(POOL, offload_gb_per_s=1e-9), time_scale=FAST.time_scale)
    async with fleet(slow) as at:
        session = await at.session()
        assert await at.call("offload", session=session, keys=[1, 2]) == (200, {})
        assert (await at.info())["n_in_transit"] == 2

        async def dropped() -> bool:
            return bool((await at.info())["n_in_transit"] == 0)

        await until(dropped)
        assert (await at.call("offload", session=session, keys=[1]))[0] == 404
    async with fleet() as at:
        session = await at.session()
        await at.call("offload", session=session, keys=[1, 2])

        async def has_events() -> bool:
            return bool((await at.call("events", session=session, after=0))[1]["events"])

        await until(has_events)
        for _ in range(2):  # an answer that was lost is repeated
            answer = await at.call("events", session=session, after=0)
            assert answer == (200, {"events": [{"number": 1, "state": "cxl_pooled", "keys": [1, 2]}]})
        assert await at.call("events", session=session, after=1) == (200, {"events": []})

        async def silent() -> bool:
            return bool((await at.info())["engines"] == [])

        await until(silent)
        assert (await at.info())["n_pooled"] == 2


async def test_a_pool_that_hangs_costs_its_engines_a_timeout_but_no_request(
    monkeypatch: pytest.MonkeyPatch, children: Children, tmp_path: Path
) -> None:
    """A request that waits for a stopped pool process is computed, and all blocks are reported as evicted."""
    monkeypatch.setattr(pool_client, "CALL_TIMEOUT_S", 1.0)
    pool = Stack(Settings(), tmp_path, children).pool(POOL, FAST.model, FAST.time_scale)
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
            states = {each.state for each in (await reported(client)).values()}
            assert states == {CxlMemoryState.EVICTED}
        finally:
            pool.child.signal(signal.SIGCONT)
        await until(lambda: attached(client))


async def test_a_pool_enforces_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool refuses one engine too many, and ends the session of an engine that does not take its events."""
    monkeypatch.setattr(pool_server, "SESSIONS_MAX", 1)
    monkeypatch.setattr(pool_server, "EVENT_BLOCKS_MAX", 1)
    async with fleet() as at:
        session = await at.session()
        status, page = await at.call("attach", engine="e", model="sim-model", block_size=4, time_scale=1000.0)
        assert (status, page["error"]["code"]) == (503, "too_many_sessions")
        await at.call("offload", session=session, keys=[1, 2])

        async def ended() -> bool:
            return (await at.call("load", session=session, keys=[]))[0] == 404

        await until(ended)
        await at.session()


async def test_blocks_that_an_engine_cannot_offload_fast_enough_are_counted_and_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If only one offload may wait, most blocks that are filled in one step stay local."""
    monkeypatch.setattr(pool_client, "OFFLOADS_WAITING_MAX", 1)
    fast = 100_000.0
    async with fleet(replace(POOL_SERVER, time_scale=fast)) as at:
        client = await at.engine(replace(FAST, time_scale=fast))
        await client.complete(max_tokens=200)

        async def settled() -> bool:
            pool = (await client.get("/sim/info"))["pool"]
            return bool(pool["in_transit"] == 0 and pool["cxl_pooled"] + pool["not_offloaded"] == (14 + 199) // 4)

        await until(settled)
        assert (await client.get("/sim/info"))["pool"]["not_offloaded"] > 0
        states = await reported(client)
        assert_all(states, CxlMemoryState.CXL_POOLED, len(states))


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no json", b'{"error": 7}', b'{"session": 1}'])
async def test_a_server_that_is_not_a_pool_is_not_used(answer: bytes) -> None:
    """The engine serves without a pool and keeps trying to attach."""
    asked = asyncio.Event()

    async def anything(_http: web.Request) -> web.Response:
        asked.set()
        return web.Response(body=answer)

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


async def test_an_engine_that_differs_from_the_pool_is_refused_and_serves_without_it() -> None:
    """Model, block size and time scale must be equal."""
    async with fleet() as at:
        for wrong in ({"model": "other"}, {"block_size": 16}, {"time_scale": 1.0}, {"model": None}):
            sent = {"engine": "e", "model": "sim-model", "block_size": 4, "time_scale": 1000.0, **wrong}
            status, page = await at.call("attach", **sent)
            assert (status, page["error"]["code"]) == (409, "other_blocks")
        server = await serve(replace(FAST, model="other", pool=at.pool.url))
        try:
            client = Client(server, at.http, at.context)
            page = await client.complete(model="other", max_tokens=1)
            assert page["kvstreams"]["cached_tokens"] == 0
            assert not await attached(client)
            client.close()
        finally:
            await server.stop()


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("offload", {"session": "none", "keys": [1]}, 404),
        ("load", {"keys": [1]}, 404),
        ("events", {"session": 7, "after": 0}, 404),
        ("offload", {"keys": "12"}, 400),
        ("offload", {"keys": [-1]}, 400),
        ("offload", {"keys": [1, 2], "sizes": [1]}, 400),
        ("offload", {"keys": [1, 2], "sizes": [3, -1]}, 400),
        ("offload", {"keys": [1, 2], "sizes": "11"}, 400),
        ("load", {"keys": [1 << 64]}, 400),
        ("load", {"keys": [True]}, 400),
        ("events", {"after": 5}, 400),
        ("events", {"after": -1}, 400),
        ("events", {}, 400),
    ],
)
async def test_invalid_calls_are_refused(name: str, body: dict[str, Any], status: int) -> None:
    """An unknown session, invalid keys, and event numbers that do not exist are refused."""
    async with fleet() as at:
        sent = body if "session" in body or status == 404 else {"session": await at.session(), **body}
        answer_status, page = await at.call(name, **sent)
        assert answer_status == status
        assert set(page["error"]) == {"code", "message", "detail"}


async def test_every_store_has_the_engines_labels() -> None:
    """A bridge reads the labels on the blocks of prompts and of answers."""
    async with fleet() as at:
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
        assert_all(await reported(client), CxlMemoryState.CXL_POOLED, 7)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"moe": MoeLabels(1, 2, 3)}, "labels"),
        ({"moe": MoeLabels(1, -2, 3), "event_dialect": "map"}, "expert_id is -2"),
        ({"moe": MoeLabels(None, None, 1 << 31), "event_dialect": "map"}, "expert_group is 2147483648"),
        ({"pool": "localhost:8200"}, "http://"),
    ],
)
def test_an_impossible_configuration_is_refused(changes: dict[str, Any], wrong: str) -> None:
    """Labels must be in range and need events with field names, and a pool needs an http URL."""
    with pytest.raises(SettingsError, match=wrong):
        SimServerConfig(**changes)

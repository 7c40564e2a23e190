"""Streams that migrate from engines that fail to other ones, with real processes: a pool, engines, a bridge and fronts.

What lives here: which of these processes there are and what they hold (`PooledFleet`), a client that reads a stream
(`read_stream`), and one stream whose engine is killed (`killed_midway`). What must not: what is shown or checked of it
(demo, examples, tests, benchmarks).
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.pool import PoolConfig
from streams.lab.processes import Child
from streams.lab.stack import READY_TIMEOUT_S, Engine, FrontProcess, PoolProcess, RouterProcess, Stack, bearer
from streams.lab.stack import get_json as get
from streams.lmcache.wire import CHUNK_TOKENS
from streams.process.waiting import wait_for

#: The experts that a request uses: those of engines with `expert` 7.
LAYER, EXPERT, GROUP = 2, 7, 3
MOE_QUERY: dict[str, Any] = {"layer_id": LAYER, "expert_ids": [EXPERT], "expert_group": GROUP}

#: With it, only engines that hold a matching block are candidates.
STRICT_MOE_QUERY: dict[str, Any] = {**MOE_QUERY, "fallback_to_unlabeled": False}

#: Blocks of the prompt that engines have computed themselves before the stream begins, as of a system prompt.
SHARED_BLOCKS = 8

#: Longest wait for bytes of a stream. An engine that stalls is noticed much earlier by the front.
_SILENCE_S = 60.0

_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """One engine of a fleet. expert: of the labels of its blocks. reaches_pool: whether it writes and reads the pool.

    options: more options of `kvstreams sim`.
    """

    expert: int = EXPERT
    reaches_pool: bool = True
    options: tuple[str, ...] = ()


#: The engine that is killed; one with its experts that reaches the pool; one with other experts; one without the pool.
FOUR_PLACES = (Place(), Place(), Place(expert=9), Place(reaches_pool=False))


def call(url: str, method: str, body: Any = None, token: str | None = None) -> Any:
    """Make an HTTP call with JSON both ways. Raises OSError, which urllib's errors are."""
    headers = {"Content-Type": "application/json", **bearer(token)}
    data = None if body is None else orjson.dumps(body)
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=_CALL_TIMEOUT_S) as response:
        answer = response.read()
    return orjson.loads(answer) if answer else None


class PooledFleet:
    """Engines of one model, some of which share a pool, and the bridge that feeds them. `start` starts all.

    engines: by worker id; replaced by `restart`. pool: None if the fleet has none. journals: the folder of the journals
    of the pool and of the engines, by worker id; None for none.
    """

    def __init__(
        self,
        stack: Stack,
        router: RouterProcess,
        model: str,
        config: EngineConfig,
        *,
        pool: PoolConfig | None,
        time_scale: float,
        places: Sequence[Place] = FOUR_PLACES,
        first_worker_id: int = 1,
        journals: Path | None = None,
        token: str | None = None,
        lmcache: str | None = None,
    ) -> None:
        """router: any that reads the scope. token: for its API. lmcache: instance of LMCache that the pool acts as."""
        self.stack = stack
        self.router = router
        self.model = model
        self.config = config
        self.pool_config = pool
        self.time_scale = time_scale
        self.places = dict(enumerate(places, start=first_worker_id))
        self.journals = journals
        self.token = token
        self.lmcache = lmcache
        self.pool: PoolProcess | None = None
        self.engines: dict[int, Engine] = {}
        self.bridge: Child | None = None

    def start(self) -> None:
        """Start pool, engines and bridge, and wait until the router, which may still be starting, knows the engines."""
        if self.pool_config is not None:
            options = [] if self.journals is None else ["--journal", str(self.journals / "pool.jsonl")]
            if self.lmcache is not None:
                options += ["--lmcache", self.lmcache, "--lmcache-topic", self._lmcache_topic]
            self.pool = self.stack.pool(self.pool_config, self.model, self.time_scale, options=options)
        first = min(self.places)
        own_options = {worker_id: self._options(worker_id) for worker_id in self.places}
        started = self.stack.engines(
            len(self.places), self.config, self.model, self.time_scale, first, own_options=own_options
        )
        self.engines = {engine.worker_id: engine for engine in started}
        instances = {} if self.lmcache is None else dict.fromkeys(self.members, self.lmcache)
        source = [] if self.lmcache is None else ["--lmcache", self._lmcache_topic]
        self.bridge = self.stack.bridge(started, f"bridge-{self.model}", options=source, instances=instances)
        self.stack.wait_ready(self.router)
        wait_for(
            # A router that is not ready answers without them.
            lambda: {row["worker_id"] for row in self._get("/workers").get("workers", ())} >= set(self.places),
            READY_TIMEOUT_S,
            "the engines in the registry",
        )
        if self.pool_config is not None and self.lmcache is None:  # otherwise the bridge registers it
            pool = {"members": self.members, "capacity_blocks": self.pool_config.capacity_blocks}
            call(f"{self.router.url}/pools/{self.pool_config.pool_id}", "PUT", pool, self.token)
        for worker_id in self.members:
            self._await_pool(worker_id)

    @property
    def members(self) -> list[int]:
        """The workers that reach the pool."""
        if self.pool_config is None:
            return []
        return [worker_id for worker_id, place in self.places.items() if place.reaches_pool]

    def restart(self, worker_id: int) -> None:
        """Kill an engine if it runs, and start another one on its ports, with the same options."""
        self.engines[worker_id] = self.stack.restart_engine(
            self.engines[worker_id], self.config, self.model, self.time_scale, self._options(worker_id)
        )
        if worker_id in self.members:
            self._await_pool(worker_id)

    def stop(self) -> None:
        """Stop engines, pool and bridge."""
        children = [engine.child for engine in self.engines.values()]
        children += [] if self.pool is None else [self.pool.child]
        children += [] if self.bridge is None else [self.bridge]
        for child in children:
            child.ask_to_stop()
        for child in children:
            child.stop()

    def front(
        self, name: str, routers: Sequence[RouterProcess], options: Sequence[str] = (), **changes: Any
    ) -> FrontProcess:
        """Start a front that moves streams. options: more options of `kvstreams front`. changes: of settings."""
        return self.stack.front(name, routers, options, front_migration=True, **changes)

    def fault(self, worker_id: int, kind: str, after_tokens: int | None = None) -> None:
        """Make an engine fail (docs/sim.md, Failures)."""
        body = {"kind": kind} if after_tokens is None else {"kind": kind, "after_tokens": after_tokens}
        call(f"{self.engines[worker_id].url}/sim/fault", "POST", body)

    def info(self, worker_id: int) -> Any:
        """Return what an engine says about itself."""
        return get(f"{self.engines[worker_id].url}/sim/info")

    def complete(self, worker_id: int, token_ids: Sequence[int], n_tokens: int = 1) -> Any:
        """Let an engine answer a prompt, without a router."""
        body = {"model": self.model, "prompt": list(token_ids), "max_tokens": n_tokens, "return_token_ids": True}
        return call(f"{self.engines[worker_id].url}/v1/completions", "POST", body)

    def scores(self, token_ids: Sequence[int], router: RouterProcess | None = None) -> dict[int, tuple[int, int, int]]:
        """Return by worker how many blocks of a prompt it holds, reaches in pools after these, and has the experts for.

        router: another than the fleet's.
        """
        asked = {
            "model": self.model,
            "token_ids": list(token_ids),
            "update_states": False,
            "explain": True,
            "router_config_override": {"moe_query": {**MOE_QUERY, "fallback_to_unlabeled": True}},
        }
        answer = call(f"{(router or self.router).url}/route", "POST", asked, self.token)
        return {
            terms["worker_id"]: (terms["scores"], terms["cxl_accessible_scores"], terms["moe_scores"])
            for terms in answer["candidates"]
        }

    def n_bookings(self, router: RouterProcess | None = None) -> int:
        """Count the live bookings of the fleet's engines."""
        rows = get(f"{(router or self.router).url}/loads", self.token)["loads"]
        return sum(row["active_requests"] for row in rows if row["worker_id"] in self.places)

    def until_free(self, timeout_s: float = READY_TIMEOUT_S, router: RouterProcess | None = None) -> None:
        """Wait until no booking is left."""
        wait_for(lambda: self.n_bookings(router) == 0, timeout_s, "the end of every booking")

    def prepare(self, prompt: Sequence[int], first: int) -> None:
        """Let one engine compute a prompt, and each other one its first blocks, and wait until the router knows it."""
        n_blocks, shared = len(prompt) // self.config.block_size, list(prompt[: SHARED_BLOCKS * self.config.block_size])
        for worker_id in self.places:
            self.complete(worker_id, prompt if worker_id == first else shared)
        chunk_blocks = 1 if self.lmcache is None else CHUNK_TOKENS // self.config.block_size
        n_pooled = n_blocks // chunk_blocks * chunk_blocks
        expected = {}
        for worker_id, place in self.places.items():
            own = n_blocks if worker_id == first else SHARED_BLOCKS
            expected[worker_id] = (
                own,
                max(n_pooled - own, 0) if worker_id in self.members else 0,
                own if place.expert == EXPERT else 0,
            )
        wait_for(lambda: self.scores(prompt) == expected, READY_TIMEOUT_S, "the router to know the prompt's blocks")

    def _options(self, worker_id: int) -> list[str]:
        place = self.places[worker_id]
        labels = [("layer", LAYER), ("expert", place.expert), ("group", GROUP)]
        options = [argument for name, value in labels for argument in (f"--moe-{name}", str(value))]
        if worker_id in self.members:
            assert self.pool is not None
            options += ["--pool", self.pool.url]
            for member in self.members:
                options += ["--accessible-worker", str(member)]
        if self.journals is not None:
            options += ["--journal", str(self.journals / f"{worker_id}.jsonl")]
        return [*options, *place.options]

    @property
    def _lmcache_topic(self) -> str:
        """One of the scope's own, since several fleets may use a Kafka."""
        return f"{self.stack.settings.topic_prefix}lmcache-cache-events"

    def _await_pool(self, worker_id: int) -> None:
        def attached() -> bool:
            try:
                return bool(self.info(worker_id)["pool"]["attached"])
            except OSError:
                return False

        wait_for(attached, READY_TIMEOUT_S, f"engine {worker_id} to attach to the pool")

    def request(self, prompt: Sequence[int], n_tokens: int) -> dict[str, Any]:
        """Return the body of a streamed completion whose token ids can be compared."""
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": n_tokens,
            "stream": True,
            "return_token_ids": True,
        }

    def _get(self, path: str) -> Any:
        return get(f"{self.router.url}{path}", self.token)


@dataclass(slots=True)
class Streamed:
    """A stream as its client got it.

    worker_id: of the first engine, where the front says it. arrivals: when something came, and how many tokens had come
    by then. error: of the event that ended it, or of the connection. n_ends: marks of the end. n_roles: chunks with a
    role. ids: of the answer. figures: of its migrations. reached: set by `read_stream`.
    """

    worker_id: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    n_ends: int = 0
    n_roles: int = 0
    ids: set[str] = field(default_factory=set)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)


async def read_stream(
    http: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    into: Streamed | None = None,
    reached_tokens: int | None = None,
) -> Streamed:
    """Send a request for a stream, and read it to its end, however it ends.

    url: with the path. into: filled while the stream comes. reached_tokens: how many tokens set `into.reached`.
    """
    got = Streamed() if into is None else into
    asked = {"X-Kvstreams-Details": "1", **(headers or {})}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    try:
        async with http.post(url, data=orjson.dumps(body), headers=asked, timeout=timeout) as response:
            worker = response.headers.get("X-Kvstreams-Worker", "").partition("/")[0]
            got.worker_id = int(worker) if worker.isdecimal() else None
            if response.status != 200:
                got.error = orjson.loads(await response.read())["error"]
                return got
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")  # of any length: the first one may repeat the prompt
                for line in lines:
                    _take_line(got, line)
                if reached_tokens is not None and len(got.token_ids) >= reached_tokens:
                    got.reached.set()
    except (aiohttp.ClientError, TimeoutError) as exc:
        got.error = {"message": repr(exc), "code": "connection"}
    return got


def _take_line(got: Streamed, line: bytes) -> None:
    if line.startswith(b"data: [DONE]"):
        got.n_ends += 1
    elif line.startswith(b"data: "):
        _take(got, orjson.loads(line[len(b"data: ") :]))


def _take(got: Streamed, page: dict[str, Any]) -> None:
    if "error" in page:
        got.error = page["error"]
        return
    got.ids.add(page.get("id", ""))
    got.figures = page.get("kvstreams_migration") or got.figures
    got.usage = page.get("usage") or got.usage
    for choice in page["choices"]:
        delta = choice.get("delta") or {}
        got.n_roles += "role" in delta
        got.text += (choice.get("text") if "text" in choice else delta.get("content")) or ""
        got.token_ids += choice.get("token_ids") or []
        got.finish_reason = choice.get("finish_reason") or got.finish_reason
    got.arrivals.append((time.monotonic(), len(got.token_ids)))


@dataclass(frozen=True, slots=True)
class Move:
    """One stream whose engine was killed. first, second: workers. computed, loaded: prompt tokens of the second one."""

    streamed: Streamed
    first: int
    second: int
    computed: int
    loaded: int
    exit_code: int | None


def killed_midway(
    fleet: PooledFleet, front: FrontProcess, prompt: Sequence[int], *, n_tokens: int, kill_at: int
) -> Move:
    """Ask for n_tokens, of a request that uses the experts, and kill its engine as soon as kill_at of them are out."""
    first = min(fleet.places)
    fleet.prepare(prompt, first)
    fleet.fault(first, "die", kill_at)
    before = {worker_id: fleet.info(worker_id) for worker_id in fleet.places if worker_id != first}
    body = fleet.request(prompt, n_tokens)
    headers = {"Content-Type": "application/json", "X-Moe-Query": json.dumps(STRICT_MOE_QUERY), **bearer(fleet.token)}

    async def main() -> Streamed:
        async with aiohttp.ClientSession() as http:
            return await read_stream(http, f"{front.url}/v1/completions", body, headers)

    streamed = asyncio.run(main())
    added = {
        worker_id: tuple(
            fleet.info(worker_id)[name] - before[worker_id][name] for name in ("computed_tokens", "loaded_tokens")
        )
        for worker_id in before
    }
    second = max(added, key=lambda worker_id: sum(added[worker_id]))
    computed, loaded = added[second]
    return Move(streamed, first, second, computed, loaded, fleet.engines[first].child.exit_code)

"""A live shared pool: one process that simulated engines share, over HTTP.

What lives here: the pool's clock, its sessions with engines, the HTTP routes. What must not: rules of the pool (pool),
and Kafka: engines report transitions to their bridges, as engines with real pools do.

An engine has a session from `POST /pool/attach` until it has made no call for SESSION_S. Then its unfinished writes are
dropped and its other blocks stay. Events are numbered and kept until the engine has asked for those that follow them,
so that a lost answer is repeated. When a pool process exits, its content and its sessions are lost, and engines attach
again to the next one.

A pool of chunks reports its content itself, as a server of LMCache does, so engines get no events of it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import U64_MASK
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.lab.engines.clock import STEP_WALL_S, ScaledClock, check_time_scale, run_until_signalled
from streams.lab.engines.journal import Journal
from streams.lab.engines.pool import Offload, PoolConfig, PoolEvent, SharedPool

if TYPE_CHECKING:  # it uses kernels, which take time and memory to import
    from streams.lab.engines.chunked_pool import ChunkedPool

log = logging.getLogger(__name__)

#: An engine without a call for this long has lost its session. It is ten times the wait of one call for events.
SESSION_S = 5.0
#: How long a call for events waits until there are any.
EVENTS_WAIT_S = 0.5
#: Engines per pool. The largest announced switches connect a few hundred hosts.
SESSIONS_MAX = 4096
#: Blocks in events that an engine has not taken, about 50 MB. An engine with more loses its session.
EVENT_BLOCKS_MAX = 1 << 20
#: One call has at most the blocks of the longest prompt: 1,000,000 tokens in blocks of one token, 20 digits each.
BODY_BYTES_MAX = 32 << 20


#: The changes of an owner's blocks that a journal has.
_NOTED = {CxlMemoryState.CXL_POOLED: "pooled", CxlMemoryState.EVICTED: "gone"}


class UnknownSession(KvStreamsError):
    """The session is unknown or has ended; the engine must attach again."""

    code = "unknown_session"
    http_status = 404


class OtherBlocks(KvStreamsError):
    """The engine's model, block size or time scale differs from the pool's, so they cannot share blocks."""

    code = "other_blocks"
    http_status = 409


class PoolFull(KvStreamsError):
    """The pool has as many engines as it accepts."""

    code = "too_many_sessions"
    http_status = 503


@dataclass(frozen=True, slots=True)
class PoolServerConfig:
    """One pool process. A port of 0 is chosen by the system. model, time_scale: those of all its engines.

    journal: file to which every change of its content is appended, and what it gives (journal). It lacks the eviction
    of blocks whose owners have all left. Raises SettingsError.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "sim-model"
    pool: PoolConfig = field(default_factory=PoolConfig)
    time_scale: float = 1.0
    journal: Path | None = None

    def __post_init__(self) -> None:
        check_time_scale(self.time_scale)


@dataclass(slots=True)
class _Session:
    """One engine's session.

    events: those that it has not acknowledged, numbered from 1. n_events: number of the last event. n_blocks: blocks in
    `events`.
    """

    engine: str
    last_call_s: float
    events: deque[tuple[int, PoolEvent]] = field(default_factory=deque)
    n_events: int = 0
    n_blocks: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class PoolServer:
    """A running pool. `start` binds; `stop` may be called at any time."""

    def __init__(
        self,
        config: PoolServerConfig,
        chunked: ChunkedPool | None = None,
        publish: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """chunked: the pool, if it is one of chunks. publish: takes each of its records."""
        self.config = config
        self.pool = SharedPool(config.pool) if chunked is None else chunked
        self._chunked, self._publish = chunked, publish
        self.url = ""
        self._clock = ScaledClock(config.time_scale)
        self._sessions: dict[str, _Session] = {}
        self._wake = asyncio.Event()
        self._journal = None if config.journal is None else Journal(config.journal)
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen. Raises SettingsError if the port is not available."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors_as_json])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=EVENTS_WAIT_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.config.host, self.config.port).start()
        except OSError as exc:
            raise SettingsError(f"cannot listen on {self.config.host}:{self.config.port}: {exc}") from exc
        self.url = f"http://{self.config.host}:{self._runner.addresses[0][1]}"
        self._task = asyncio.create_task(self._run(), name="pool")
        log.info("pool %s: %s", self.config.pool.pool_id, self.url)

    async def stop(self) -> None:
        """Close everything; the content of the pool is lost."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes."""
        return [
            web.post("/pool/attach", self._attach),
            web.post("/pool/offload", self._offload),
            web.post("/pool/load", self._load),
            web.post("/pool/events", self._serve_events),
            web.get("/pool/info", self._info),
            web.get("/health", self._health),
        ]

    def info(self) -> dict[str, str]:
        """Return the address, as it is printed at the start."""
        return {"pool": self.url}

    # -- the pool ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Step whenever a write is due, and end silent sessions ten times per SESSION_S."""
        while True:
            self._wake.clear()
            self._end_sessions()
            self._step()
            await asyncio.sleep(STEP_WALL_S)
            due_ms = self.pool.next_event_ms()
            wait_s = SESSION_S / 10 if due_ms is None else min(self._clock.wall_s_until(due_ms), SESSION_S / 10)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _step(self) -> None:
        """Advance the pool to now, and keep its events for the engines that they concern."""
        for event in self.pool.advance(self._clock.now_ms()):
            if self._journal is not None and event.state in _NOTED:
                self._journal.note_pool(_NOTED[event.state], event.keys)
            session = self._sessions.get(event.owner)
            if session is not None:
                session.n_events += 1
                session.events.append((session.n_events, event))
                session.n_blocks += len(event.keys)
                session.wake.set()
        if self._chunked is not None:
            for record in self._chunked.take_records():
                self._publish(record)

    def _end_sessions(self) -> None:
        """End the sessions of engines that are silent or that do not take their events."""
        silent_since = time.monotonic() - SESSION_S
        for name, session in list(self._sessions.items()):
            if session.last_call_s < silent_since or session.n_blocks > EVENT_BLOCKS_MAX:
                log.warning("pool %s: the session of engine %s ended", self.config.pool.pool_id, session.engine)
                del self._sessions[name]
                session.wake.set()
                self.pool.leave(self._clock.now_ms(), name)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _attach(self, http: web.Request) -> web.Response:
        body = await _body(http)
        own = (self.config.model, self.config.pool.block_size, self.config.time_scale)
        engines = (body.get("model"), body.get("block_size"), body.get("time_scale"))
        if engines != own:
            raise OtherBlocks(
                "model, block size and time scale of the engine are {}, {}, {}; the pool's are {}, {}, {}".format(
                    *engines, *own
                ),
                remedy="Start both with the same values",
            )
        if len(self._sessions) >= SESSIONS_MAX:
            raise PoolFull(f"the pool has {len(self._sessions)} engines, which is the limit")
        name = secrets.token_hex(8)
        self._sessions[name] = _Session(str(body.get("engine")), time.monotonic())
        log.info("pool %s: engine %s attached", self.config.pool.pool_id, body.get("engine"))
        page = {"session": name, "pool_id": self.config.pool.pool_id, "reports": self._chunked is not None}
        return _json(page)

    async def _offload(self, http: web.Request) -> web.Response:
        body = await _body(http)
        name, _ = self._session(body)
        now_ms, keys = self._clock.now_ms(), _keys(body)
        for offload in _offloads(body, keys, self.config.pool.block_size):
            if self._chunked is not None:
                self._chunked.offload(now_ms, offload)
            elif isinstance(self.pool, SharedPool):
                self.pool.offload(now_ms, name, offload.keys)
        self._step()
        self._wake.set()
        return _json({})

    async def _load(self, http: web.Request) -> web.Response:
        body = await _body(http)
        name, _ = self._session(body)
        now_ms, keys = self._clock.now_ms(), _keys(body)
        load = self.pool.load(now_ms, keys, name, in_place=body.get("in_place") is True)
        self._step()
        if self._journal is not None:
            self._journal.note_pool("asked", keys, load.n_blocks)
        return _json({"n_blocks": load.n_blocks, "wait_ms": max(0.0, load.end_ms - now_ms)})

    async def _serve_events(self, http: web.Request) -> web.Response:
        body = await _body(http)
        _, session = self._session(body)
        after = body.get("after")
        if not isinstance(after, int) or not 0 <= after <= session.n_events:
            raise InvalidRequest(f"after is {after!r}; the last event is {session.n_events}")
        while session.events and session.events[0][0] <= after:
            session.n_blocks -= len(session.events.popleft()[1].keys)
        if not session.events:
            session.wake.clear()
            try:
                async with asyncio.timeout(EVENTS_WAIT_S):
                    await session.wake.wait()
            except TimeoutError:
                pass
        rows = [{"number": number, "state": event.state, "keys": event.keys} for number, event in session.events]
        return _json({"events": rows})

    async def _info(self, _http: web.Request) -> web.Response:
        self._step()
        config = self.config
        return _json(
            {
                **asdict(config.pool),
                "model": config.model,
                "time_scale": config.time_scale,
                "engines": sorted(session.engine for session in self._sessions.values()),
                **asdict(self.pool.stats()),
            }
        )

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response(status=200 if self._task is not None and not self._task.done() else 503)

    def _session(self, body: dict[str, Any]) -> tuple[str, _Session]:
        """Return the name and the session of a call, and note the call. Raises UnknownSession."""
        name = body.get("session")
        session = self._sessions.get(name) if isinstance(name, str) else None
        if session is None:
            raise UnknownSession("the pool has no such session", remedy="Attach again")
        session.last_call_s = time.monotonic()
        return str(name), session


async def serve(
    config: PoolServerConfig, chunked: ChunkedPool | None = None, publish: Callable[[bytes], None] = lambda _: None
) -> PoolServer:
    """Start a pool on the running loop; it listens when this returns. Stop it with `await server.stop()`."""
    server = PoolServer(config, chunked, publish)
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server


def run(
    config: PoolServerConfig,
    on_started: Callable[[PoolServer], None] | None = None,
    chunked: ChunkedPool | None = None,
    publish: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT. on_started: called once the pool listens, for example to print its address."""
    run_until_signalled(lambda: serve(config, chunked, publish), on_started)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error as JSON."""
    try:
        return await handler(request)
    except KvStreamsError as exc:
        page = {"error": {"code": exc.code, "message": str(exc), "detail": exc.detail}}
        return _json(page, status=exc.http_status)


async def _body(http: web.Request) -> dict[str, Any]:
    """Read a JSON object. Raises InvalidRequest."""
    try:
        body = orjson.loads(await http.read())
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object")
    return body


def _keys(body: dict[str, Any]) -> list[int]:
    """Return the sequence hashes of a call. Raises InvalidRequest."""
    keys = body.get("keys")
    if not isinstance(keys, list) or not _are_whole(keys):
        raise InvalidRequest("keys is not a list of sequence hashes")
    return keys


def _offloads(body: dict[str, Any], keys: list[int], block_size: int) -> list[Offload]:
    """Return the offloads of a call. Raises InvalidRequest."""
    sizes = body.get("sizes", [len(keys)])
    if not _are_whole(sizes) or sum(sizes) != len(keys):
        raise InvalidRequest(f"sizes is not a list of numbers whose sum is {len(keys)}")
    starts, befores = body.get("starts", [0] * len(sizes)), body.get("before", [None] * len(sizes))
    try:
        tokens = base64.b64decode(body.get("tokens", ""), validate=True)
    except (TypeError, ValueError) as exc:
        raise InvalidRequest("tokens is not base64") from exc
    if not _are_whole(starts) or not isinstance(befores, list) or {len(starts), len(befores)} != {len(sizes)}:
        raise InvalidRequest("starts and before do not have one item for each offload")
    if not _are_whole([before for before in befores if before is not None]):
        raise InvalidRequest("before has an item that is no sequence hash")
    if tokens and len(tokens) != 4 * block_size * len(keys):
        raise InvalidRequest(f"tokens has {len(tokens)} bytes for {len(keys)} blocks")
    offloads, at, block_bytes = [], 0, 4 * block_size
    for size, start, before in zip(sizes, starts, befores, strict=True):
        end = at + size
        offloads.append(Offload(tuple(keys[at:end]), before, start, tokens[at * block_bytes : end * block_bytes]))
        at = end
    return offloads


def _are_whole(values: Any) -> bool:
    """Whether this is a list of numbers as blocks and sequence hashes have them."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= U64_MASK for value in values)


def _json(page: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(page), status=status, content_type="application/json")

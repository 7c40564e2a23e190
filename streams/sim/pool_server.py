"""A live shared pool: one process that holds what simulated engines have in it, over HTTP.

What lives here: the pool's clock, its sessions with engines, the routes. What must not: any rule of the pool (pool),
and Kafka: engines tell their bridges what became of their blocks, as engines with real pools do.

An engine is a session, from `POST /pool/attach` until it has not asked for news within SESSION_S; then what it was
writing is dropped and what is there stays. News are numbered and kept until the engine has asked for what follows them,
so that an answer that was lost is given again. A pool process that ends takes everything with it: the next one knows no
session, and engines begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from aiohttp import web

from streams.core.ids import U64_MASK
from streams.errors import InvalidRequest, KvStreamsError, SettingsError
from streams.sim.clock import STEP_WALL_S, ScaledClock, check_time_scale, run_until_signalled
from streams.sim.pool import PoolConfig, PoolEvent, SharedPool

log = logging.getLogger(__name__)

#: Silence after which an engine is taken for dead: ten times as long as it lets a question for news wait.
SESSION_S = 5.0
#: How long an engine's question for news waits here for any.
EVENTS_WAIT_S = 0.5
#: Engines of one pool; the largest switches announced connect some hundreds of hosts.
SESSIONS_MAX = 4096
#: Blocks that are in news which an engine has not taken; beyond it the engine is taken for dead. Some 50 MB.
EVENT_BLOCKS_MAX = 1 << 20
#: Blocks of one call, as many as the longest prompt: 1,000,000 tokens in blocks of one, 20 digits each.
BODY_BYTES_MAX = 32 << 20


class UnknownSession(KvStreamsError):
    """The pool does not know this session, any more or at all: the engine attaches anew."""

    code = "unknown_session"
    http_status = 404


class OtherBlocks(KvStreamsError):
    """The engine's model, block size or time is not the pool's, so that nothing in it could be its own."""

    code = "other_blocks"
    http_status = 409


class PoolFull(KvStreamsError):
    """The pool has as many engines as it takes."""

    code = "too_many_sessions"
    http_status = 503


@dataclass(frozen=True, slots=True)
class PoolServerConfig:
    """One pool process. port 0 is chosen by the system. model: of all engines that share it. time_scale: as theirs.

    Raises SettingsError.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "sim-model"
    pool: PoolConfig = field(default_factory=PoolConfig)
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        check_time_scale(self.time_scale)


@dataclass(slots=True)
class _Session:
    """One engine. news: numbered from 1, those that it has not said it has; n_blocks: in these."""

    engine: str
    heard_s: float
    news: deque[tuple[int, PoolEvent]] = field(default_factory=deque)
    n_events: int = 0
    n_blocks: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class PoolServer:
    """A running pool. `start` binds; `stop` may be called at any time."""

    def __init__(self, config: PoolServerConfig) -> None:
        self.config = config
        self.pool = SharedPool(config.pool)
        self.url = ""
        self._clock = ScaledClock(config.time_scale)
        self._sessions: dict[str, _Session] = {}
        self._wake = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises SettingsError where the port cannot be had."""
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
        """Close everything; what it holds is lost."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def routes(self) -> list[web.RouteDef]:
        """What is served over HTTP."""
        return [
            web.post("/pool/attach", self._attach),
            web.post("/pool/offload", self._offload),
            web.post("/pool/load", self._load),
            web.post("/pool/news", self._serve_events),
            web.get("/pool/info", self._info),
            web.get("/health", self._health),
        ]

    def info(self) -> dict[str, str]:
        """Where it listens."""
        return {"pool": self.url}

    # -- the pool ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Step whenever something arrives, and look for dead engines several times within SESSION_S."""
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
        """Bring the pool to now, and keep for each engine what became of its blocks."""
        for news in self.pool.advance(self._clock.now_ms()):
            session = self._sessions.get(news.owner)
            if session is not None:
                session.n_events += 1
                session.news.append((session.n_events, news))
                session.n_blocks += len(news.keys)
                session.wake.set()

    def _end_sessions(self) -> None:
        silent_since = time.monotonic() - SESSION_S
        for name, session in list(self._sessions.items()):
            if session.heard_s < silent_since or session.n_blocks > EVENT_BLOCKS_MAX:
                log.warning("pool %s: engine %s is gone", self.config.pool.pool_id, session.engine)
                del self._sessions[name]
                session.wake.set()
                self.pool.leave(self._clock.now_ms(), name)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _attach(self, http: web.Request) -> web.Response:
        body = await _body(http)
        own = (self.config.model, self.config.pool.block_size, self.config.time_scale)
        asked = (body.get("model"), body.get("block_size"), body.get("time_scale"))
        if asked != own:
            raise OtherBlocks(
                "model, block size and time scale of the engine are {}, {}, {}; the pool's are {}, {}, {}".format(
                    *asked, *own
                ),
                remedy="Start both with the same",
            )
        if len(self._sessions) >= SESSIONS_MAX:
            raise PoolFull(f"the pool has {len(self._sessions)} engines, the most there may be")
        name = secrets.token_hex(8)
        self._sessions[name] = _Session(str(body.get("engine")), time.monotonic())
        log.info("pool %s: engine %s attached", self.config.pool.pool_id, body.get("engine"))
        return _json({"session": name, "pool_id": self.config.pool.pool_id})

    async def _offload(self, http: web.Request) -> web.Response:
        body = await _body(http)
        name, _ = self._session(body)
        self.pool.offload(self._clock.now_ms(), name, _keys(body))
        self._step()
        self._wake.set()
        return _json({})

    async def _load(self, http: web.Request) -> web.Response:
        body = await _body(http)
        self._session(body)
        now_ms = self._clock.now_ms()
        load = self.pool.load(now_ms, _keys(body))
        self._step()
        return _json({"n_blocks": load.n_blocks, "wait_ms": max(0.0, load.end_ms - now_ms)})

    async def _serve_events(self, http: web.Request) -> web.Response:
        body = await _body(http)
        _, session = self._session(body)
        after = body.get("after")
        if not isinstance(after, int) or not 0 <= after <= session.n_events:
            raise InvalidRequest(f"after is {after!r}; news go to {session.n_events}")
        while session.news and session.news[0][0] <= after:
            session.n_blocks -= len(session.news.popleft()[1].keys)
        if not session.news:
            session.wake.clear()
            try:
                async with asyncio.timeout(EVENTS_WAIT_S):
                    await session.wake.wait()
            except TimeoutError:
                pass
        rows = [{"number": number, "state": news.state, "keys": news.keys} for number, news in session.news]
        return _json({"news": rows})

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
        name = body.get("session")
        session = self._sessions.get(name) if isinstance(name, str) else None
        if session is None:
            raise UnknownSession("the pool knows no such session", remedy="Attach")
        session.heard_s = time.monotonic()
        return str(name), session


async def serve(config: PoolServerConfig) -> PoolServer:
    """Start a pool on the running loop; it listens when this returns. Stop it with `await server.stop()`."""
    server = PoolServer(config)
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    return server


def run(config: PoolServerConfig, on_started: Callable[[PoolServer], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. on_started: called once it listens, for whoever prints its address."""
    run_until_signalled(lambda: serve(config), on_started)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except KvStreamsError as exc:
        page = {"error": {"code": exc.code, "message": str(exc), "detail": exc.detail}}
        return _json(page, status=exc.http_status)


async def _body(http: web.Request) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        body = orjson.loads(await http.read())
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is no JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise InvalidRequest("the body is no JSON object")
    return body


def _keys(body: dict[str, Any]) -> list[int]:
    """Raises InvalidRequest."""
    keys = body.get("keys")
    if not isinstance(keys, list) or not all(type(key) is int and 0 <= key <= U64_MASK for key in keys):
        raise InvalidRequest("keys is no list of sequence hashes")
    return keys


def _json(page: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(page), status=status, content_type="application/json")

"""A simulated engine's link to a live shared pool: a session for as long as the pool answers.

What lives here: attaching, offloads in order, loads, the pool's events, and the transitions that are reported when the
session ends. What must not: the pool's rules (pool), and what the engine does with blocks (model). One asyncio loop
owns it.

Any failure of a call (no answer within CALL_TIMEOUT_S, a refusal, a session that the pool does not know) ends the
session. The engine then reports all its pooled blocks as evicted, computes what it would have loaded, and attaches
again. So routers ignore blocks that the pool lost, or whose eviction no engine would report. The price is that they
also ignore blocks that the pool still has, until their owner stores them again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp
import orjson

from streams.core.cxl_memory import CxlMemoryState
from streams.errors import KvStreamsError
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import KvStored
from streams.lab.engines.pool import CxlChanged, EnginePoolBlocks, Offload

log = logging.getLogger(__name__)

#: How long a call may take. A pool on loopback answers within milliseconds; a call for events waits half a second.
CALL_TIMEOUT_S = 5.0
#: Between two attempts to attach.
RETRY_S = 0.5
#: Offloads that wait to be sent. Blocks that are stored while the queue is full are counted and not offloaded.
OFFLOADS_WAITING_MAX = 1024
#: Blocks after which no further offload joins a call. A call takes milliseconds, and on a busy machine many more; one
#: call for each block that fills would fall seconds behind an engine that runs faster than real time.
CALL_BLOCKS_MAX = 1 << 16


class LinkConfig(Protocol):
    """The engine's name, and the values that must be equal for the pool and its engines (server.SimServerConfig)."""

    @property
    def worker(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def time_scale(self) -> float: ...


class PoolLost(KvStreamsError):
    """The session with the pool has ended."""

    code = "pool_lost"


class PoolLink:
    """One engine's link to a pool. `run` keeps a session; `stored` and `load` use it while there is one."""

    def __init__(self, url: str, config: LinkConfig, emit: Callable[[CxlChanged | None, bool], None]) -> None:
        """emit: called with a transition to report or None, and with whether the pool can be asked from now on."""
        self._url = url.rstrip("/")
        self._config = config
        self._emit = emit
        # Engines that are started by hand often have the same name.
        self._name = f"{config.worker}-{secrets.token_hex(4)}"
        self._http: aiohttp.ClientSession | None = None
        self._session: str | None = None
        self._blocks = EnginePoolBlocks("")
        self._pool_reports = False  # itself, so that the engine has no transitions to report
        self._offloads: asyncio.Queue[Offload] = asyncio.Queue(OFFLOADS_WAITING_MAX)
        self._failed: asyncio.Future[None] | None = None
        self._attached_once = asyncio.Event()
        self.not_offloaded = 0
        self.sessions_lost = 0

    @property
    def attached(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    async def wait_attached(self, timeout_s: float) -> None:
        """Wait until there is a session, at most this long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._attached_once.wait()

    def info(self) -> dict[str, Any]:
        """Return the pool's URL, whether it answers, and how many of this engine's blocks are pooled or in transit."""
        states = list(self._blocks.states().values())
        return {
            "url": self._url,
            "attached": self.attached,
            "in_transit": states.count(CxlMemoryState.IN_TRANSIT),
            "cxl_pooled": states.count(CxlMemoryState.CXL_POOLED),
            "not_offloaded": self.not_offloaded,
            "sessions_lost": self.sessions_lost,
        }

    def stored(self, stored: KvStored) -> CxlChanged | None:
        """Begin to offload stored blocks; returns the transition to report directly after the store."""
        if not self.attached:
            return None
        if self._offloads.full():
            self.not_offloaded += len(stored.sequence)
            return None
        if self._pool_reports:
            keys, changed = tuple(stored.sequence.tolist()), None
        else:
            keys, changed = self._blocks.stored(stored)
        if keys:
            self._offloads.put_nowait(Offload(keys, stored.before, stored.start, stored.tokens))
        return changed

    async def load(self, keys: Sequence[int], *, in_place: bool = False) -> tuple[int, float]:
        """Load leading blocks, or with in_place begin to read them where they are.

        Returns how many there are, and the wait in model ms; (0, 0.0) without a session.
        """
        session = self._session
        if session is None:
            return 0, 0.0
        try:
            answer = await self._call("load", session=session, keys=keys, in_place=in_place)
            with _valid_answer("load"):
                n_blocks, wait_ms = int(answer["n_blocks"]), float(answer["wait_ms"])
                if not (0 <= n_blocks <= len(keys) and 0.0 <= wait_ms < float("inf")):
                    raise ValueError(f"{n_blocks} blocks in {wait_ms} ms")
        except PoolLost as exc:
            if self._failed is not None and not self._failed.done() and self._session == session:
                self._failed.set_exception(exc)
            return 0, 0.0
        return n_blocks, wait_ms

    async def run(self) -> None:
        """Keep a session until cancelled, and attach again whenever it ends."""
        logged = ""  # a refusal that repeats every half second is logged once
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._http:
            while True:
                try:
                    await self._attach()
                    logged = ""
                    await self._hold()
                except PoolLost as exc:
                    if str(exc) != logged:
                        log.warning("%s: no shared pool at %s: %s", self._config.worker, self._url, exc)
                    logged = str(exc)
                    self._lose()
                await asyncio.sleep(RETRY_S)

    async def _attach(self) -> None:
        config = self._config
        answer = await self._call(
            "attach",
            engine=self._name,
            model=config.model,
            block_size=config.engine.block_size,
            time_scale=config.time_scale,
        )
        with _valid_answer("attach"):
            self._blocks = EnginePoolBlocks(str(answer["pool_id"]))
            self._pool_reports = bool(answer["reports"])
            self._session = str(answer["session"])
        log.info("%s: attached to pool %s at %s", config.worker, answer["pool_id"], self._url)
        self._attached_once.set()
        self._emit(None, True)

    async def _hold(self) -> None:
        """Send offloads and receive events until a call fails; raises PoolLost."""
        self._failed = asyncio.get_running_loop().create_future()
        tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._listen())]
        try:
            done, _ = await asyncio.wait([*tasks, self._failed], return_when=asyncio.FIRST_COMPLETED)
            for transfer in done:
                transfer.result()
        finally:
            for task in tasks:
                task.cancel()
            self._failed.cancel()
            with contextlib.suppress(PoolLost):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            offloads = [await self._offloads.get()]
            n_blocks = len(offloads[0].keys)
            while n_blocks < CALL_BLOCKS_MAX and not self._offloads.empty():
                offloads.append(self._offloads.get_nowait())
                n_blocks += len(offloads[-1].keys)
            body: dict[str, Any] = {
                "keys": [key for offload in offloads for key in offload.keys],
                "sizes": [len(offload.keys) for offload in offloads],
            }
            if self._pool_reports:
                body["starts"] = [offload.start for offload in offloads]
                body["before"] = [offload.before for offload in offloads]
                body["tokens"] = base64.b64encode(b"".join(offload.tokens for offload in offloads)).decode()
            await self._call("offload", session=self._session, **body)

    async def _listen(self) -> None:
        after = 0
        while True:
            answer = await self._call("events", session=self._session, after=after)
            with _valid_answer("events"):
                events = [
                    (int(row["number"]), CxlMemoryState(row["state"]), list(row["keys"])) for row in answer["events"]
                ]
            for number, state, keys in events:
                after = number
                changed = self._blocks.pool_changed(state, keys)
                if changed is not None:
                    self._emit(changed, True)

    def _lose(self) -> None:
        """End the session: drop queued offloads, and report all blocks as evicted."""
        if self._session is None:
            return
        self._session = None
        self.sessions_lost += 1
        while not self._offloads.empty():
            self._offloads.get_nowait()
        self._emit(self._blocks.lost(), False)

    async def _call(self, name: str, **body: Any) -> dict[str, Any]:
        """Make one call and return its answer. Raises PoolLost."""
        assert self._http is not None  # only `run`, or a session that it opened, leads here
        try:
            async with self._http.post(f"{self._url}/pool/{name}", data=orjson.dumps(body)) as response:
                answer = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as exc:
            raise PoolLost(f"{name}: {str(exc) or repr(exc)}") from exc
        if response.status != HTTPStatus.OK or not isinstance(answer, dict):
            error = answer.get("error") if isinstance(answer, dict) else None
            message = error.get("message") if isinstance(error, dict) else None
            raise PoolLost(f"{name}: {message or response.status}")
        return answer


@contextlib.contextmanager
def _valid_answer(name: str) -> Iterator[None]:
    """Turn errors of reading an invalid answer into PoolLost: a server that is not a pool is treated as no server."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as exc:
        raise PoolLost(f"{name}: not a pool's answer: {exc!r}") from exc

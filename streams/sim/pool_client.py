"""A simulated engine's link to a live shared pool: a session, as long as the pool answers.

What lives here: attaching, offloads in their order, loads, news, and what is told when the pool is gone. What must not:
the pool's rules (pool), and what the engine does with blocks (model). One asyncio loop owns it.

Whatever fails between the two (no answer within CALL_TIMEOUT_S, a refusal, a session that the pool does not know) ends
the session: the engine tells that all its pooled blocks are evicted, computes what it would have loaded, and attaches
anew. So what a pool lost, or what nobody would tell of its evictions, is not routed to; the price is that blocks which
a pool still has count for nothing until their owner stores them again.
"""

from __future__ import annotations

import asyncio
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
from streams.sim.engine_config import EngineConfig
from streams.sim.engine_messages import KvStored
from streams.sim.pool import CxlChanged, EnginePoolBlocks

log = logging.getLogger(__name__)

#: How long a call may take: a pool on loopback answers within milliseconds, or waits for news half a second.
CALL_TIMEOUT_S = 5.0
#: Between two attempts to attach.
RETRY_S = 0.5
#: Offloads that wait for being sent; what is stored beyond it is not offloaded, and counted.
OFFLOADS_WAITING_MAX = 1024


class LinkConfig(Protocol):
    """What must be the same for the pool and its engines. See server.SimServerConfig."""

    @property
    def worker(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def time_scale(self) -> float: ...


class PoolLost(KvStreamsError):
    """The session with the pool is over."""

    code = "pool_lost"


class PoolLink:
    """One engine's. `run` keeps a session, `stored` and `load` use it while there is one."""

    def __init__(self, url: str, config: LinkConfig, emit: Callable[[CxlChanged | None, bool], None]) -> None:
        """say: told what became of blocks, None for nothing, and whether the pool can be asked from now on."""
        self._url = url.rstrip("/")
        self._config = config
        self._emit = emit
        # Several engines by hand often have the same name.
        self._name = f"{config.worker}-{secrets.token_hex(4)}"
        self._http: aiohttp.ClientSession | None = None
        self._session: str | None = None
        self._blocks = EnginePoolBlocks("")
        self._offloads: asyncio.Queue[tuple[int, ...]] = asyncio.Queue(OFFLOADS_WAITING_MAX)
        self._failed: asyncio.Future[None] | None = None
        self.not_offloaded = 0
        self.sessions_lost = 0

    @property
    def attached(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    def info(self) -> dict[str, Any]:
        """For people: where the pool is, whether it answers, and what of this engine's is there or on its way."""
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
        """Begin to offload what was stored; gives what is to be told right behind the store."""
        if not self.attached:
            return None
        if self._offloads.full():
            self.not_offloaded += len(stored.sequence)
            return None
        keys, changed = self._blocks.stored(stored)
        if keys:
            self._offloads.put_nowait(keys)
        return changed

    async def load(self, keys: Sequence[int]) -> tuple[int, float]:
        """Load leading blocks: how many come, and within how many model ms. (0, 0.0) where the pool is gone."""
        session = self._session
        if session is None:
            return 0, 0.0
        try:
            answer = await self._call("load", session=session, keys=keys)
            with _understood("load"):
                n_blocks, wait_ms = int(answer["n_blocks"]), float(answer["wait_ms"])
                if not (0 <= n_blocks <= len(keys) and 0.0 <= wait_ms < float("inf")):
                    raise ValueError(f"{n_blocks} blocks in {wait_ms} ms")
        except PoolLost as exc:
            if self._failed is not None and not self._failed.done() and self._session == session:
                self._failed.set_exception(exc)
            return 0, 0.0
        return n_blocks, wait_ms

    async def run(self) -> None:
        """Keep a session until cancelled; one after the other."""
        logged = ""  # the same refusal every half second is said once
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
        with _understood("attach"):
            self._blocks = EnginePoolBlocks(str(answer["pool_id"]))
            self._session = str(answer["session"])
        log.info("%s: attached to pool %s at %s", config.worker, answer["pool_id"], self._url)
        self._emit(None, True)

    async def _hold(self) -> None:
        """Offload and listen until something fails; raises PoolLost."""
        self._failed = asyncio.get_running_loop().create_future()
        tasks = [asyncio.ensure_future(self._send()), asyncio.ensure_future(self._listen())]
        try:
            done, _ = await asyncio.wait([*tasks, self._failed], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for task in tasks:
                task.cancel()
            self._failed.cancel()
            with contextlib.suppress(PoolLost):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            keys = await self._offloads.get()
            await self._call("offload", session=self._session, keys=keys)

    async def _listen(self) -> None:
        after = 0
        while True:
            answer = await self._call("news", session=self._session, after=after)
            with _understood("news"):
                pool_events = [
                    (int(row["number"]), CxlMemoryState(row["state"]), list(row["keys"])) for row in answer["news"]
                ]
            for number, state, keys in pool_events:
                after = number
                changed = self._blocks.pool_changed(state, keys)
                if changed is not None:
                    self._emit(changed, True)

    def _lose(self) -> None:
        if self._session is None:
            return
        self._session = None
        self.sessions_lost += 1
        while not self._offloads.empty():
            self._offloads.get_nowait()
        self._emit(self._blocks.lost(), False)

    async def _call(self, name: str, **body: Any) -> dict[str, Any]:
        """Raises PoolLost."""
        assert self._http is not None  # `run` calls, and whoever has a session from it
        try:
            async with self._http.post(f"{self._url}/pool/{name}", data=orjson.dumps(body)) as response:
                answer = orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as exc:
            raise PoolLost(f"{name}: {exc!r}") from exc
        if response.status != HTTPStatus.OK or not isinstance(answer, dict):
            error = answer.get("error") if isinstance(answer, dict) else None
            message = error.get("message") if isinstance(error, dict) else None
            raise PoolLost(f"{name}: {message or response.status}")
        return answer


@contextlib.contextmanager
def _understood(name: str) -> Iterator[None]:
    """What answers and is no pool is no better than none."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as exc:
        raise PoolLost(f"{name}: the answer is none of a pool's: {exc!r}") from exc

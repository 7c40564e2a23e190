"""Blocking calls that serve several engines of a bridge at once.

What lives here: which engines share a call, and how many calls run at the same time. What must not: what is called.

A bridge with hundreds of engines that start together would otherwise read each partition, and claim each model, once
per engine.

State: the engines that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, TypeVar

from streams.core.ids import WorkerId

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")

#: Engines that share one call. What is read of their ranks is in memory twice, as records and as ledgers, until the
#: call has ended.
ENGINES_PER_CALL_MAX = 64

#: The wait before a call, in which other engines may join it. The engines of a bridge that starts get their leases
#: within some tens of milliseconds.
JOIN_S = 0.05


class SharedCalls(Generic[_Key, _Result]):
    """Calls a blocking function on a thread, once for all engines that wait with the same key. Used on the loop."""

    def __init__(
        self, call: Callable[[_Key, Collection[WorkerId]], Mapping[WorkerId, _Result]], calls: asyncio.Semaphore
    ) -> None:
        """call: returns a result for each engine. calls: limits the calls that run at the same time."""
        self._call = call
        self._calls = calls
        self._waiting: dict[_Key, list[tuple[WorkerId, asyncio.Future[_Result]]]] = {}
        self._running: dict[_Key, asyncio.Task[None]] = {}

    async def result(self, key: _Key, worker_id: WorkerId) -> _Result:
        """Return an engine's result of a call that begins after this one. Raises what the call raises."""
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append((worker_id, future))
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._serve(key))
        return await future

    async def _serve(self, key: _Key) -> None:
        """Call until no engine waits with this key."""
        try:
            while self._waiting.get(key):
                await asyncio.sleep(JOIN_S)
                async with self._calls:
                    waiting = self._waiting.pop(key)
                    now, later = waiting[:ENGINES_PER_CALL_MAX], waiting[ENGINES_PER_CALL_MAX:]
                    if later:
                        self._waiting[key] = later
                    await self._serve_engines(key, [call for call in now if not call[1].done()])
        finally:
            del self._running[key]
            for _, future in self._waiting.pop(key, ()):
                future.cancel()  # only if this task was cancelled

    async def _serve_engines(self, key: _Key, waiting: list[tuple[WorkerId, asyncio.Future[_Result]]]) -> None:
        if not waiting:
            return  # their tasks were cancelled
        try:
            results = await asyncio.to_thread(self._call, key, frozenset(worker_id for worker_id, _ in waiting))
        except BaseException as exc:
            for _, future in waiting:
                if not future.done():
                    future.set_exception(exc) if isinstance(exc, Exception) else future.cancel()
            if not isinstance(exc, Exception):
                raise
            return
        for worker_id, future in waiting:
            if not future.done():
                future.set_result(results[worker_id])

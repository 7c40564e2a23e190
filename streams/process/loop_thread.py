"""A thread with an event loop of its own.

What lives here: starting it, running coroutines there from another loop, and stopping it. What must not: what runs
there (worker).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

_T = TypeVar("_T")

#: How long `stop` waits for the thread. What runs there has been stopped before, so it ends at once.
STOP_TIMEOUT_S = 5.0


class LoopThread:
    """Runs coroutines on a loop of its own until `stop`. The thread does not keep its process alive."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        # Loops refer weakly to their tasks. One that waits for what nothing else refers to would be collected.
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run the coroutine that `make` makes on the thread, and return or raise what it does.

        If the caller is cancelled, so is the coroutine.
        """
        running = asyncio.run_coroutine_threadsafe(make(), self._loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(running)

    async def stop(self) -> None:
        """End the thread. Coroutines that still run there are cancelled."""
        await self.run(self._cancel_all)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

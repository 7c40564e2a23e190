"""Waiting for the first of several events, again and again.

What lives here: the wait. What must not: what has happened.

A feed waits for mostly the same futures thousands of times per second. `asyncio.wait` adds a callback to each of them,
and removes it again, at every call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class FirstOf:
    """Waits on behalf of one task. Each future gets one callback, which wakes the task if it waits then."""

    def __init__(self) -> None:
        self._watched: set[asyncio.Future[Any]] = set()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the task waits, and nothing has ended the wait yet."""
        return self._waiter is not None and not self._waiter.done()

    async def wait(self, futures: Iterable[asyncio.Future[Any]], timeout_s: float, *, is_ready: bool = False) -> None:
        """Return once one of the futures is done, after a call of `wake`, or after the timeout; sometimes before.

        It returns early if a future of an earlier call is done now. is_ready: whether there is nothing to wait for.
        Other tasks get their turn in any case.
        """
        for future in futures:
            if future.done():
                is_ready = True
            elif future not in self._watched:
                self._watched.add(future)
                future.add_done_callback(self._on_done)
        if is_ready:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timeout = loop.call_later(timeout_s, self.wake)
        try:
            await self._waiter
        finally:
            timeout.cancel()
            self._waiter = None

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        self._watched.discard(future)
        self.wake()

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

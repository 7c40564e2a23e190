"""Calls that return the whole state: how many run at a time, and how they are sent.

What lives here: those limits, and the thread on which pages of the state are made. What must not: the state (view).
Such calls are for people and tests. They share the interpreter with decisions, so only one page is made at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from aiohttp import web

from streams.errors import Overloaded

#: Inspections that run at a time, so that one slow client does not stop all others, and those that wait for their turn.
RUNNING_MAX = 2
WAITING_MAX = 16

#: Bytes written at a time, and the time within which a client must take them.
PAGE_BYTES = 1024 * 1024
PAGE_S = 10.0

_T = TypeVar("_T")


class OnThread(Protocol):
    """Calls a function on the thread of inspections."""

    async def __call__(self, call: Callable[..., _T], *args: object) -> _T: ...


class Inspections:
    """Admits calls that return the whole state."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(RUNNING_MAX)
        self._n = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspections")

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[OnThread]:
        """Wait for a turn; it ends with the block. Raises Overloaded if too many calls wait already."""
        if self._n >= RUNNING_MAX + WAITING_MAX:
            raise Overloaded(f"{self._n} calls for the whole state are running or waiting", remedy="Try again later")
        self._n += 1
        try:
            async with self._turns:
                yield self._on_thread
        finally:
            self._n -= 1

    async def _on_thread(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


async def written(request: web.Request, response: web.StreamResponse, page: bytes) -> bool:
    """Write a page; if the client does not take it in time, close its connection and return False."""
    for begin in range(0, len(page), PAGE_BYTES):
        try:
            await asyncio.wait_for(response.write(memoryview(page)[begin : begin + PAGE_BYTES]), PAGE_S)
        except (TimeoutError, OSError):
            if request.transport is not None:
                request.transport.abort()
            return False
    return True

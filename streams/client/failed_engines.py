"""Reporting to routers which engines have failed a request, so that the next requests of everyone avoid them.

What lives here: one call per failed engine, in the background, and its limits. What must not: what a failure is, and
retries (the front's proxy, generation). Nothing waits for these calls, and nothing depends on them: without one,
routers learn of the failure later, when the engine's lease expires.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from streams.errors import KvStreamsError

log = logging.getLogger(__name__)

#: One call per engine in this time. When an engine dies, all requests that it had fail at the same moment.
REPEAT_S = 1.0

#: Calls that are under way at a time, each for another engine. Beyond it, failures are not reported.
CALLS_MAX = 64


class Avoiding(Protocol):
    """What reports a failed engine."""

    async def avoid(self, worker_id: int) -> bool:
        """Let routers avoid a worker for a while. Raises KvStreamsError."""


class FailedEngines:
    """The engines that failed lately. Used on one loop. n_reported: calls that a router accepted."""

    def __init__(self, router: Avoiding) -> None:
        self._router = router
        self._reported_s: dict[int, float] = {}  # of calls in the last REPEAT_S
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False
        self.n_reported = 0

    def note(self, worker_id: int) -> None:
        """Let routers avoid this worker for a while; does nothing after `close`, since failures are noted late."""
        if self._closed:
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._reported_s.get(worker_id, float("-inf")) < REPEAT_S or len(self._calls) >= CALLS_MAX:
            return
        self._reported_s = {
            reported_id: at_s for reported_id, at_s in self._reported_s.items() if now_s - at_s < REPEAT_S
        }
        self._reported_s[worker_id] = now_s
        call = asyncio.create_task(self._avoid(worker_id), name=f"kvstreams-avoid-{worker_id}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _avoid(self, worker_id: int) -> None:
        try:
            await self._router.avoid(worker_id)
        except KvStreamsError as exc:
            log.debug("the failure of worker %d was not reported to a router: %s", worker_id, exc)
        else:
            self.n_reported += 1

    async def close(self) -> None:
        """Cancel calls that are under way, and begin no other."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

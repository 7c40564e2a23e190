"""Reports on bookings, sent in the background, so that neither tokens nor a cancelled caller wait for a router.

What lives here: what is still to be reported of each request, merged, and the tasks that send it. What must not: how a
report is sent (http, push).

Reports are monotone: a later output number includes earlier ones, and a free includes everything. So all reports of one
request that wait are one entry, however long the routers are away.

State: reports that wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from streams.client.payloads import PromptUsage
from streams.errors import KvStreamsError

log = logging.getLogger(__name__)

#: Reports that are sent at a time. One takes about a millisecond.
CONCURRENT_REPORTS_MAX = 16

#: Requests with reports that wait. Beyond it the oldest one is dropped; its booking then ends by its TTL.
PENDING_REPORTS_MAX = 65_536

#: How often dropped reports are logged.
_LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class OutstandingReport:
    """What is to be reported of one request. router: the one that answered the request, which is tried first.

    usage: what the engine says of the prompt, sent with the end of the prefill or of the request.
    """

    router: int | None = None
    prefill_complete: bool = False
    output_tokens: int = 0
    free: bool = False
    usage: PromptUsage | None = None

    def merge(self, other: OutstandingReport) -> None:
        """Add what `other` reports."""
        self.router = other.router if other.router is not None else self.router
        self.prefill_complete |= other.prefill_complete
        self.output_tokens = max(self.output_tokens, other.output_tokens)
        self.free |= other.free
        self.usage = other.usage or self.usage


class BookingKey(NamedTuple):
    """What identifies a booking. phase: `prefill` or `decode` if the request has a booking for each, otherwise None."""

    request_id: str
    phase: str | None = None


#: Sends one report; raises KvStreamsError when it gives up.
Send = Callable[[BookingKey, OutstandingReport], Awaitable[None]]


@dataclass(slots=True)
class Reports:
    """The reports of one client. Used on one event loop.

    lost: reports that were given up or dropped. _waiting: by booking, in the order in which they were made.
    _sending: bookings whose report is being sent. _settled: resolved when that is over.
    """

    send: Send
    lost: int = 0
    _closed: bool = False
    _waiting: dict[BookingKey, OutstandingReport] = field(default_factory=dict)
    _sending: set[BookingKey] = field(default_factory=set)
    _settled: dict[BookingKey, asyncio.Future[None]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _logged_s: float = float("-inf")

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sending)

    def add(self, key: BookingKey, report: OutstandingReport) -> None:
        """Report in the background."""
        if self._closed:
            self._note_lost("the client is closed")
            return
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.merge(report)
            return
        if len(self._waiting) >= PENDING_REPORTS_MAX:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._note_lost(f"more than {PENDING_REPORTS_MAX} requests have reports that wait")
            self._note_settled(oldest)
        self._waiting[key] = report
        if len(self._tasks) < CONCURRENT_REPORTS_MAX:
            task = asyncio.get_running_loop().create_task(self._send_all(), name="kvstreams-reports")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settle(self, key: BookingKey) -> None:
        """Wait until no report of this booking is waiting or being sent; drop what waits."""
        self._waiting.pop(key, None)
        if key in self._sending:
            settled = self._settled.setdefault(key, asyncio.get_running_loop().create_future())
            await asyncio.shield(settled)

    async def close(self, timeout_s: float) -> None:
        """Wait until everything was reported, at most for this long; the rest is lost."""
        self._closed = True
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if len(self):
            self._note_lost("the client was closed before a router accepted them", len(self))
        self._waiting.clear()

    async def _send_all(self) -> None:
        while True:
            # Two reports of one booking are never sent at the same time, so that they arrive in order.
            key = next((booking for booking in self._waiting if booking not in self._sending), None)
            if key is None:
                return
            report = self._waiting.pop(key)
            self._sending.add(key)
            try:
                await self.send(key, report)
            except KvStreamsError as exc:
                self._note_lost(str(exc))
            except asyncio.CancelledError:
                self._waiting.setdefault(key, report)  # `close` counts it
                raise
            finally:
                self._sending.discard(key)
                self._note_settled(key)

    def _note_settled(self, key: BookingKey) -> None:
        settled = self._settled.pop(key, None)
        if settled is not None and not settled.done():
            settled.set_result(None)

    def _note_lost(self, reason: str, n: int = 1) -> None:
        """Count a lost report, and log it, but not each of thousands."""
        self.lost += n
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            log.warning("reports on bookings were lost, which end by their TTL: %s (%d so far)", reason, self.lost)

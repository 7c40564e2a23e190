"""A lease as tasks see it: waiting for it, publishing under it, losing it.

What lives here: the clock, the waking of who waits, and the performing of what the lease says to write. What must not:
the lease's rules (lease).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from streams.core.workers import Worker
from streams.engines.lease import EngineLease, LeasePhase, Write
from streams.errors import KvStreamsError


class LeaseLost(KvStreamsError):
    """Another bridge feeds the engine now, or its worker was removed."""

    code = "lease_lost"


class LeaseHandle:
    """One engine's lease. All methods run on the loop."""

    def __init__(self, lease: EngineLease, write: Callable[[Worker | None], None]) -> None:
        self.lease = lease
        self._write = write
        self._changed = asyncio.Event()

    def on_record(self, worker: Worker | None) -> None:
        """Take one record of the worker, in log order."""
        self._perform(self.lease.on_record(worker, time.monotonic()))

    def on_end(self) -> None:
        """The registry has been read to its end."""
        self.lease.on_end()
        self.tick()

    def tick(self) -> None:
        """Claim or renew where it is time."""
        self._perform(self.lease.tick(time.monotonic()))

    def release(self) -> None:
        """Give it up."""
        self._perform(self.lease.release())

    def may_publish(self) -> bool:
        """Whether it is certain, at this very moment, that nobody else feeds the engine."""
        return self.lease.may_publish(time.monotonic())

    async def held(self) -> int:
        """Wait until the lease is ours; gives its term."""
        while not self.may_publish():
            await self._change()
        return self.lease.term

    async def allowed(self, term: int) -> None:
        """Wait while the lease may have run out and nobody is known to have taken it; raises LeaseLost if it is lost.

        A process that was stopped for longer than its lease finds out here, before it publishes anything.
        """
        while True:
            if self.lease.phase is not LeasePhase.HOLDING or self.lease.term != term:
                raise LeaseLost(f"term {term} of {self.lease.bridge} is over: {self.lease.phase.value}")
            if self.may_publish():
                return
            await self._change()

    async def _change(self) -> None:
        await self._changed.wait()

    def _perform(self, writes: list[Write]) -> None:
        for write in writes:
            self._write(write.worker)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

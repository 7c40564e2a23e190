"""An engine's lease as tasks use it: they wait for it, publish under it, and are notified when it is lost.

What lives here: reading the clock, waking the tasks that wait, and performing the lease's writes. What must not: the
rules of the lease (lease).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from streams.core.workers import Worker
from streams.engines.lease import EngineLease, LeasePhase, Write
from streams.errors import KvStreamsError


class LeaseLost(KvStreamsError):
    """Another bridge feeds the engine now, or the worker was removed."""

    code = "lease_lost"


def _why_lost(lease: EngineLease, term: int) -> str:
    if lease.phase is LeasePhase.DISMISSED:
        return "it was deleted from the registry, so its events are not published until it is registered again"
    return f"the lease was lost (term {term} of {lease.bridge}); its feeds start again when this bridge holds it again"


class LeaseHandle:
    """One engine's lease. All methods run on the loop."""

    def __init__(self, lease: EngineLease, write: Callable[[Worker | None], None]) -> None:
        self.lease = lease
        self._write = write
        self._changed = asyncio.Event()
        self._n_waiting = 0  # tasks that wait for `_changed`

    def on_record(self, worker: Worker | None) -> None:
        """Take one record of the worker, in log order."""
        self._perform(self.lease.on_record(worker, time.monotonic()))

    def on_end(self) -> None:
        """Note that the registry has been read to its end."""
        self.lease.on_end()
        self.tick()

    def tick(self) -> None:
        """Claim or renew the lease if that is due."""
        self._perform(self.lease.tick(time.monotonic()))

    def release(self) -> None:
        """Give the lease up."""
        self._perform(self.lease.release())

    def may_publish(self) -> bool:
        """Return whether it is certain, at this moment, that no other bridge feeds the engine."""
        return self.lease.may_publish(time.monotonic())

    def is_allowed(self, term: int) -> bool:
        """Return whether publishing under this term is allowed at this moment."""
        return self.lease.phase is LeasePhase.HOLDING and self.lease.term == term and self.may_publish()

    async def held(self) -> int:
        """Wait until this bridge holds the lease; return its term."""
        while not self.may_publish():
            await self._change()
        return self.lease.term

    async def allowed(self, term: int) -> None:
        """Return once publishing under this term is allowed. Raises LeaseLost if the lease is lost.

        Waits while the lease may have expired and this bridge has not read another bridge's claim. A process that was
        suspended for longer than its lease therefore publishes nothing before it has read the log again.
        """
        while True:
            if self.lease.phase is not LeasePhase.HOLDING or self.lease.term != term:
                raise LeaseLost(_why_lost(self.lease, term))
            if self.may_publish():
                return
            await self._change()

    async def _change(self) -> None:
        self._n_waiting += 1
        try:
            await self._changed.wait()
        finally:
            self._n_waiting -= 1

    def _perform(self, writes: list[Write[Worker]]) -> None:
        for write in writes:
            self._write(write.record)
        if self._n_waiting:  # this is called for each engine twenty times per second
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

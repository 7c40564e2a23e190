"""Engines of the registry that publish events, and that no bridge feeds.

What lives here: which workers of the registry these are. What must not: reading the registry (registry_reader), and
which bridge gets an engine's lease (lease). Two bridges with this source may want the same engine; the lease decides,
and the other bridge drops the engine as soon as it has read whose lease it is.
"""

from __future__ import annotations

import asyncio
import time

from streams.core.ids import WorkerId
from streams.core.workers import Worker
from streams.engines.address import EngineAddress
from streams.engines.sources.interface import Wanted

#: How often it is checked whether leases have expired, per lease length.
_CHECKS_PER_LEASE = 10


class RegistryEngines:
    """Workers with an address of events and without another bridge's lease. All methods run on the loop."""

    is_fixed = False

    def __init__(self, lease_s: float) -> None:
        self._check_every_s = lease_s / _CHECKS_PER_LEASE
        self._workers: dict[WorkerId, tuple[Worker, float]] = {}  # those with events, and when each record was read
        self._bridge = ""
        self._changed = asyncio.Event()
        self._is_read = False

    def __str__(self) -> str:
        return "the registry"

    def name_bridge(self, bridge: str) -> None:
        """bridge: the name in this bridge's own leases."""
        self._bridge = bridge

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Take one record of the registry, in log order; None is a tombstone."""
        if worker is None or worker.events_endpoint is None:
            self._workers.pop(worker_id, None)
        else:
            self._workers[worker_id] = worker, time.monotonic()
        self._changed.set()

    def on_end(self) -> None:
        """Note that the registry has been read to its end. Before that, its records may be old ones."""
        self._is_read = True
        self._changed.set()

    async def run(self, wanted: Wanted) -> None:
        """See EngineSource."""
        last: list[EngineAddress] | None = None
        while True:
            if self._is_read:
                now_s = time.monotonic()
                engines = [
                    _address(worker)
                    for worker, read_at_s in self._workers.values()
                    if self._is_free(worker, read_at_s, now_s)
                ]
                if engines != last:
                    wanted(engines)
                    last = engines
            self._changed.clear()
            try:
                async with asyncio.timeout(self._check_every_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # a lease may have expired

    def _is_free(self, worker: Worker, read_at_s: float, now_s: float) -> bool:
        lease = worker.lease
        return lease is None or lease.bridge == self._bridge or now_s >= read_at_s + lease.lease_ms / 1000


def _address(worker: Worker) -> EngineAddress:
    return EngineAddress(
        worker_id=worker.worker_id,
        url=worker.url,
        events=worker.events_endpoint,
        replay=worker.replay_endpoint,
        dp_size=worker.dp_size,
        model=worker.model,
    )

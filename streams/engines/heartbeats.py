"""Heartbeats of one rank: for how long its bridge promises to feed it.

What lives here: when a heartbeat is published, and when an engine is reported to have exited. What must not: the lease
of the engine (lease) and what a heartbeat does in the table (core.reducer).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time

import aiohttp

from streams.engines.feed_counters import FeedCounters
from streams.engines.process_start import read_process_start
from streams.engines.publisher import RankWriter
from streams.engines.wiring import EngineWiring

log = logging.getLogger(__name__)

#: Heartbeats per lease: two may be lost or late before the rank becomes silent.
HEARTBEATS_PER_LEASE = 3

#: The lease in the heartbeat that reports that the engine has exited. It is so short that the owner's next maintenance
#: tick marks the rank as silent.
ENDED_ENGINE_LEASE_MS = 1

#: Time between two attempts to reach an engine after its connection broke.
BREAK_CHECK_INTERVAL_S = 1.0


class Heartbeats:
    """Publishes that a rank is being fed while its engine is heard from. All methods run on the loop."""

    def __init__(self, wiring: EngineWiring, writer: RankWriter, counters: FeedCounters) -> None:
        self._wiring = wiring
        self._writer = writer
        self._counters = counters
        self._lease_s = wiring.settings.bridge_lease_s
        self._heard_at_s = time.monotonic()
        self._ended_at_s = float("-inf")  # when this bridge last reported that the engine has exited
        self._break_checked_at_s = 0.0
        #: Whether the incarnation has begun; before that there is nothing to state.
        self.begun = False

    def heard(self) -> None:
        """Note that the engine sent or answered something."""
        self._heard_at_s = time.monotonic()

    def renew(self) -> None:
        """Publish a heartbeat now."""
        self._publish(round(self._lease_s * 1000))

    async def run(self) -> None:
        """Publish heartbeats until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / HEARTBEATS_PER_LEASE)
            heard = time.monotonic() - self._heard_at_s < self._lease_s
            if self.begun and heard and not self._engine_ended and self._wiring.lease_handle.may_publish():
                self.renew()

    async def check_break(self) -> None:
        """Check why the connection broke, if no batch has arrived since.

        If the engine's metrics refuse the connection as well, its process has exited, and the rank is made silent at
        once. It is renewed as soon as the metrics answer again. A host that vanished refuses nothing, so the lease
        expires. If a proxy answers in the engine's place, with any status, the engine counts as heard from.
        """
        now_s = time.monotonic()
        if now_s - self._break_checked_at_s < BREAK_CHECK_INTERVAL_S:
            return
        self._break_checked_at_s = now_s
        try:
            await read_process_start(self._wiring.http, self._wiring.engine.metrics_url)
        except aiohttp.ClientConnectorError as exc:
            if (
                exc.os_error.errno == errno.ECONNREFUSED
                and not self._engine_ended
                and self._wiring.lease_handle.may_publish()
            ):
                log.warning("rank %s: the engine has exited: its connection broke, and %s", self._writer.rank, exc)
                self._ended_at_s = now_s
                self._publish(ENDED_ENGINE_LEASE_MS)
        except (aiohttp.ClientError, TimeoutError):
            pass  # the engine may be busy
        else:
            had_ended = self._engine_ended
            self.heard()
            if had_ended and self._wiring.lease_handle.may_publish():
                self.renew()

    @property
    def _engine_ended(self) -> bool:
        """Whether this bridge reported that the engine has exited, and has not heard from it since."""
        return self._ended_at_s >= self._heard_at_s

    def _publish(self, lease_ms: int) -> None:
        self._writer.heartbeat(self._wiring.lease_handle.lease.bridge, lease_ms, time.time_ns() // 1_000_000)
        self._counters.heartbeats += 1

"""Heartbeats of one rank: for how long its bridge promises to feed it, and in which state the feed is.

What lives here: when a heartbeat is published. What must not: the lease of the engine (lease), the feed's state (feed),
and what a heartbeat does in the table (core.reducer).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time

from streams.core.events import ENDED_LEASE_MS, FeedState
from streams.engines.continuity import Evidence
from streams.engines.feed_counters import FeedCounters
from streams.engines.rank_writer import RankWriter
from streams.engines.turns import next_turn, share_of
from streams.engines.wiring import EngineWiring

log = logging.getLogger(__name__)

#: Heartbeats per lease: two may be lost or late before the rank becomes silent.
HEARTBEATS_PER_LEASE = 3


class Withheld(enum.Enum):
    """Why a rank gets no requests although its engine may be heard from."""

    NO_HTTP = "its HTTP port refuses connections"
    ASLEEP = "it sleeps, by its metrics"


class Heartbeats:
    """Publishes that a rank is being fed while its engine is heard from. All methods run on the loop."""

    def __init__(self, wiring: EngineWiring, writer: RankWriter, counters: FeedCounters) -> None:
        self._wiring = wiring
        self._writer = writer
        self._counters = counters
        self._lease_s = wiring.settings.bridge_lease_s
        self._heard_at_s = float("-inf")
        self._withheld: set[Withheld] = set()
        self._ended = False  # whether the engine was reported to have exited, and has not been heard from since
        self._end_shown = True  # whether Kafka's client has the heartbeat that says so
        #: Whether the rank has an incarnation; before that there is nothing to state.
        self.begun = False

    def heard(self) -> None:
        """Note that the engine sent or answered something."""
        self._heard_at_s = time.monotonic()
        if self._ended and not self._withheld:
            self._ended = False
            self._renew_if_due()

    def note_http(self, evidence: Evidence) -> None:
        """Take what the engine's HTTP server shows. Where it refuses connections, no request can be served."""
        if evidence.refused:
            self.withhold(Withheld.NO_HTTP)
        elif evidence.reachable:
            self.admit(Withheld.NO_HTTP)

    def withhold(self, why: Withheld) -> None:
        """Let the rank get no requests, whatever is heard from its engine, until `admit`."""
        if why not in self._withheld:
            self._withheld.add(why)
            self.engine_exited(why.value)

    def admit(self, why: Withheld) -> None:
        """Let the rank get requests again, if there is no other reason and its engine is heard from."""
        if why not in self._withheld:
            return
        self._withheld.discard(why)
        if self._ended and not self._withheld and self._is_heard:
            log.info("rank %s gets requests again: no longer: %s", self._writer.rank, why.value)
            self._ended = False
            self._renew_if_due()

    def show(self, state: FeedState) -> None:
        """Publish a heartbeat now if the last record of the rank shows another state of its feed."""
        self._writer.feed = state
        if self._writer.feed_shown is state:
            return
        self._renew_if_due()
        if self._writer.feed_shown is not state and self._heard_at_s > float("-inf") and not self._is_heard:
            self.engine_exited("its connection broke, and nothing has been heard from it for a lease")

    def renew(self) -> None:
        """Publish a heartbeat now; its lease has ended already if the rank gets no requests."""
        if self._withheld:
            self._ended = True
        self._publish(ENDED_LEASE_MS if self._withheld else round(self._lease_s * 1000))

    async def run(self) -> None:
        """Publish heartbeats until cancelled."""
        interval_s, share = self._lease_s / HEARTBEATS_PER_LEASE, share_of(self._writer.rank)
        while True:
            now_s = time.monotonic()
            await asyncio.sleep(next_turn(now_s, interval_s, share) - now_s)
            self._renew_if_due()
            if self._ended and not self._end_shown and self._wiring.lease_handle.may_publish():
                self._end_shown = self._publish(ENDED_LEASE_MS)

    def engine_exited(self, reason: str) -> None:
        """Make the rank silent at once, until the engine is heard from again and may get requests."""
        if self.begun and not self._ended and self._wiring.lease_handle.may_publish():
            log.warning("rank %s gets no requests: %s", self._writer.rank, reason)
            self._ended = True
            self._end_shown = self._publish(ENDED_LEASE_MS)

    @property
    def _is_heard(self) -> bool:
        return time.monotonic() - self._heard_at_s < self._lease_s

    def _renew_if_due(self) -> None:
        """Publish a heartbeat if the engine is heard from; one that sleeps stays in the index, and gets no requests."""
        may_state = self._withheld or not self._ended
        if self.begun and self._is_heard and may_state and self._wiring.lease_handle.may_publish():
            self.renew()

    def retire(self, reason: str) -> None:
        """Make the rank silent at once and for good, if this bridge may still publish."""
        if self.begun and self._wiring.lease_handle.may_publish():
            log.info("rank %s is fed no longer: %s", self._writer.rank, reason)
            self._publish(ENDED_LEASE_MS)

    def _publish(self, lease_ms: int) -> bool:
        """Publish a heartbeat, and return True, unless a batch waits for Kafka; that shows life as well."""
        if not self._writer.records.send():
            return False
        self._writer.heartbeat(self._wiring.lease_handle.lease.bridge, lease_ms, time.time_ns() // 1_000_000)
        self._counters.heartbeats += 1
        return True

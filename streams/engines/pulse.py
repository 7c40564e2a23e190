"""The pulse of a bridge: that it is running, and keeps up with its engines.

What lives here: when a pulse is written. What must not: what a reader concludes from it (core.bridge_pulses).

A pulse lists the workers whose events are passed on. Kafka may take pulses, but not the records of another partition,
so a worker whose records have been on their way for too long is not listed. The pulse is withheld while a message of an
engine waits in its socket, and after the process was stopped for a while, until the feeds have had their turn. Only one
pulse is on its way at a time: pulses that Kafka takes late, after an outage, would say that the bridge had kept up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.core.bridge_pulses import PULSE_EVERY_MS, BridgePulse
from streams.core.ids import WorkerId
from streams.engines.connection import PING_INTERVAL_S, PING_TIMEOUT_S
from streams.kafka.records import PULSES

_EVERY_S = PULSE_EVERY_MS / 1000

#: A loop that wakes this much later than asked was stopped, or had no processor.
_LATE_S = 2 * _EVERY_S

#: After the process was stopped, ZMQ needs this long to end the connections that went dead meanwhile. What a feed then
#: says of itself may take as long to reach a router as any record.
_LINKS_TRIED_S = PING_INTERVAL_S + PING_TIMEOUT_S


class Pulse:
    """Writes one bridge's pulses to `worker-metrics`."""

    def __init__(
        self,
        kafka: Producer,
        topic: str,
        bridge: str,
        keeps_up: Callable[[], bool],
        fed: Callable[[], Iterable[WorkerId]],
        tolerated_s: float,
    ) -> None:
        """keeps_up: whether no message of any engine waits. fed: returns the workers whose events are passed on.
        tolerated_s: by how much a router's view of the log may lag in an answer that is exact.

        The producer's owner polls it for delivery reports.
        """
        self._kafka = kafka
        self._topic = topic
        self._bridge = bridge
        self._keeps_up = keeps_up
        self._fed = fed
        self._tolerated_s = tolerated_s
        self._written_s: float | None = None  # when the last pulse was written
        self._listed_from_s = 0.0  # when workers are listed again after a pause
        self._in_flight = False
        self.number = 0

    async def run(self) -> None:
        """Write pulses until cancelled."""
        woke_s = time.monotonic()
        self._write()  # at once: otherwise answers would be degraded for a quarter of a second after a bridge starts
        while True:
            await asyncio.sleep(_EVERY_S)
            before_s, woke_s = woke_s, time.monotonic()
            if woke_s - before_s > self._tolerated_s:
                self._listed_from_s = woke_s + _LINKS_TRIED_S + self._tolerated_s
            if woke_s - before_s < _LATE_S and not self._in_flight and self._keeps_up():
                self._write()

    def _write(self) -> None:
        now_s = time.monotonic()
        if self._written_s is not None and now_s - self._written_s > self._tolerated_s:
            self._listed_from_s = max(self._listed_from_s, now_s + self._tolerated_s)
        self._written_s = now_s
        self.number += 1
        fed = tuple(self._fed()) if now_s >= self._listed_from_s else ()
        value = PULSES.encode(BridgePulse(self._bridge, self.number, fed))
        try:
            key = PULSES.keys.pack(self._bridge)
            self._kafka.produce(self._topic, key=key, value=value, on_delivery=self._on_delivery)
            self._in_flight = True
        except (BufferError, KafkaException):
            pass  # Kafka does not answer; readers notice the silence

    def _on_delivery(self, _error: KafkaError | None, _message: Message) -> None:
        self._in_flight = False

"""The time of the log of bookings, as one router knows it.

What lives here: the time of each partition, an estimate of the present, and the ticks that advance a partition without
records. What must not: bookings, and what expires (loads_sync, whose lock guards this state).

The time of a booking is that of the log: append times of its partition, which the broker sets and which are the same
for every router. This time advances with each record. If a partition has no new records, routers that have bookings
there write a tick.

State: ticks in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.core.loads.log_clock import LogClock
from streams.topics import TopicSpec

#: A partition that has had no record for this long gets a tick, which advances its time.
QUIET_MS = 1_000

#: Key of a tick. Its value is a tombstone, so that compaction removes it, and no booking has this key.
TICK_KEY = b"tick"

#: The partition that gets a tick if no bookings are kept and the state of the log was asked for.
_PROBED = 0


class LogTime:
    """Owner of the ticks that Kafka has not acknowledged."""

    def __init__(
        self, topic: TopicSpec, kafka: Producer, now_ms: Callable[[], int], lock: AbstractContextManager[object]
    ) -> None:
        """now_ms: a monotonic clock. lock: the owner's, which reports of ticks take."""
        self._topic = topic
        self._kafka = kafka
        self._now_ms = now_ms
        self._lock = lock
        self._present = LogClock()  # without a log, bookings have this router's own time
        # When each partition's last record was read, or the last tick of this router was acknowledged.
        self._heard_ms = [now_ms()] * topic.partitions
        self._ticking: dict[int, int] = {}  # partitions whose tick Kafka has not acknowledged, and since when
        self._is_asked = False  # whether the state of the log was asked for since the last call of `tick`
        self.begin()

    def begin(self) -> None:
        """The log is read from its beginning."""
        self._latest_ms = [0] * self._topic.partitions  # newest append time of each partition

    def latest_ms(self, partition: int) -> int:
        """The newest append time of a partition."""
        return self._latest_ms[partition]

    def advance(self, partition: int, at_ms: int) -> bool:
        """A record with this append time was read; returns whether it is later than those before.

        The broker gives all records of a batch the same time.
        """
        is_later = at_ms > self._latest_ms[partition]
        if is_later:
            self._latest_ms[partition] = at_ms
        return is_later

    def note(self, append_ms: int, *, live: bool) -> int:
        """A record with this append time was read now; returns by how much the estimated present jumped."""
        return self._present.note(append_ms, self._now_ms(), live=live)

    def present_ms(self, now_ms: int) -> int:
        """The estimated present time of the log."""
        return self._present.now_ms(now_ms)

    def note_heard(self, partitions: Iterable[int]) -> None:
        """Records of these partitions were read."""
        now_ms = self._now_ms()
        for partition in partitions:
            self._heard_ms[partition] = now_ms

    def note_asked(self) -> None:
        """Someone asks whether this router is in sync: the next call of `tick` may write a tick that shows it."""
        self._is_asked = True

    def ticks_before(self, since_ms: int) -> bool:
        """Whether a tick that was written before this time has not been acknowledged."""
        return bool(self._ticking) and next(iter(self._ticking.values())) < since_ms

    def tick(self, partitions: Iterable[int]) -> None:
        """Write a tick to those of these partitions that have no new records, so that their time advances.

        If there are none, one partition gets a tick as long as `note_asked` is called. Otherwise a scope that was idle
        when Kafka went away would call its first answers exact.
        """
        now_ms = self._now_ms()
        quiet = list(partitions)
        if self._is_asked and not quiet:
            quiet = [_PROBED]
        self._is_asked = False
        for partition in quiet:
            if partition not in self._ticking and now_ms - self._heard_ms[partition] >= QUIET_MS:
                self._write(partition, now_ms)

    def _write(self, partition: int, now_ms: int) -> None:
        def on_delivery(error: KafkaError | None, _: Message) -> None:
            with self._lock:
                del self._ticking[partition]
                if error is None:  # the tick will be read, so that no other is needed before that
                    self._heard_ms[partition] = self._now_ms()

        try:
            self._kafka.produce(
                self._topic.name, key=TICK_KEY, value=None, partition=partition, on_delivery=on_delivery
            )
        except (BufferError, KafkaException):
            return  # Kafka is unreachable, as the waiting records show
        self._ticking[partition] = now_ms

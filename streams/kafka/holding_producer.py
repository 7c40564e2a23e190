"""A producer that holds records back which its client could not send yet.

What lives here: how many records of a partition the client has at a time. What must not: what records mean, and when
one is given up.

An idempotent client sends no further records of a partition while more than a few are unacknowledged. It keeps them,
and as soon as one of them has waited for linger.ms, it polls for the acknowledgement without a pause. While one of
three brokers was paused, that cost six bridges 1.6 cores (librdkafka 2.16, measured).

State: the records that are held back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.kafka.clients import IN_FLIGHT_FREELY, partition_of_key

log = logging.getLogger(__name__)

_OnDelivery = Callable[[KafkaError | None, Message], None]

#: Records of a partition that are handed over together. A bridge's loop does nothing else meanwhile; one takes 3 us.
TOGETHER_MAX = 1000

#: `flush` serves reports in this interval while records are held back.
_FLUSH_STEP_S = 0.05


class _Held(NamedTuple):
    """A record that the client does not have yet. how: keyword arguments of `produce`."""

    topic: str
    value: bytes | None
    key: bytes
    on_delivery: _OnDelivery | None
    how: dict[str, Any]

    @property
    def n_bytes(self) -> int:
        return len(self.value or b"") + len(self.key)


class _Lane:
    """The records of one partition: how many the client has, and those that are held back."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.held: deque[_Held] = deque()


class HoldingProducer(Producer):
    """A client that gets a partition's next records when Kafka has acknowledged those before them.

    A record that is held back counts in `len` and `flush` as one of the client's queue does, and has limits of its own.
    Records keep their order within a partition. Threads may share a producer.
    """

    def __init__(self, config: dict[str, Any], *, partitions: Mapping[str, int], n_max: int, bytes_max: int) -> None:
        """partitions: of each topic. Records of other topics, and those without a key, are not held back.

        n_max, bytes_max: limits of the records that are held back; beyond them `produce` raises BufferError.
        """
        super().__init__(config)
        self._partitions = partitions
        self._n_max = n_max
        self._bytes_max = bytes_max
        self._lock = threading.RLock()  # a report may be served on any thread
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._n_held = 0
        self._held_bytes = 0

    def __len__(self) -> int:
        return super().__len__() + self._n_held

    def produce(  # type: ignore[override]
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        on_delivery: _OnDelivery | None = None,
        **how: Any,
    ) -> None:
        """Send a record, or hold it back. Raises BufferError beyond the limits, and KafkaException as the client does.

        how: further arguments of the client's method. on_delivery: gets the refusal of a record that was held back.
        """
        if key is None or topic not in self._partitions:
            self._give(topic, value, key, on_delivery, how)
            return
        record = _Held(topic, value, key, on_delivery, how)
        number = how.get("partition", -1)
        place = topic, partition_of_key(key, self._partitions[topic]) if number < 0 else number
        with self._lock:
            lane = self._lanes.setdefault(place, _Lane())
            if lane.in_flight < IN_FLIGHT_FREELY and not lane.held:
                self._hand_over(lane, record)
                return
            if self._n_held >= self._n_max or self._held_bytes + record.n_bytes > self._bytes_max:
                raise BufferError("too many records are held back")
            lane.held.append(record)
            self._n_held += 1
            self._held_bytes += record.n_bytes

    def poll(self, timeout: float = -1) -> int:
        """Serve reports, and hand over what was held back for records that are acknowledged now."""
        served = super().poll(timeout)
        if self._n_held:
            with self._lock:
                for lane in self._lanes.values():
                    self._release(lane)
        return served

    def flush(self, timeout: float = -1) -> int:
        """Wait until every record is acknowledged; returns how many are not, after the timeout in seconds."""
        until_s = math.inf if timeout < 0 else time.monotonic() + timeout
        while self._n_held and (left_s := until_s - time.monotonic()) > 0:
            self.poll(min(left_s, _FLUSH_STEP_S))
        super().flush(-1 if timeout < 0 else max(until_s - time.monotonic(), 0))
        return len(self)

    def _hand_over(self, lane: _Lane, record: _Held) -> None:
        topic, value, key, on_delivery, how = record
        self._give(topic, value, key, partial(self._delivered, lane, on_delivery), how)
        lane.in_flight += 1

    def _give(
        self, topic: str, value: bytes | None, key: bytes | None, on_delivery: _OnDelivery | None, how: dict[str, Any]
    ) -> None:
        """Hand a record to the client, as its own `produce` does."""
        super().produce(topic, value, key, on_delivery=on_delivery, **how)

    def _release(self, lane: _Lane) -> None:
        """Hand over records of a partition that are held back, unless the client would keep them."""
        if lane.in_flight >= IN_FLIGHT_FREELY:
            return
        for _ in range(min(len(lane.held), TOGETHER_MAX)):
            record = lane.held[0]
            try:
                self._hand_over(lane, record)
            except BufferError:
                return  # the next report or poll tries again
            except KafkaException as exc:
                self._refused(record, exc.args[0])
            lane.held.popleft()
            self._n_held -= 1
            self._held_bytes -= record.n_bytes

    def _refused(self, record: _Held, error: KafkaError) -> None:
        if record.on_delivery is None:
            log.warning("%s does not accept a record, which is dropped: %s", record.topic, error.str())
        else:
            record.on_delivery(error, Message())

    def _delivered(
        self, lane: _Lane, on_delivery: _OnDelivery | None, error: KafkaError | None, message: Message
    ) -> None:
        with self._lock:
            lane.in_flight -= 1
            self._release(lane)
        if on_delivery is not None:
            on_delivery(error, message)

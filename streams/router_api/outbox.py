"""Records on their way to a compacted topic: waiting, in flight, or lost.

What lives here: a queue that fills while Kafka is unreachable, with at most one waiting record per key. What must not:
the meaning of the records. A router decides without waiting for Kafka. So the queue is bounded; beyond its limits the
oldest record is dropped and counted. It is not thread-safe by itself: its owner holds its lock around every call, and
delivery reports take the same lock.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, Producer

log = logging.getLogger(__name__)

#: Waiting records, and their bytes. If 1,000 requests per second end while Kafka is unreachable, the queue fills within
#: minutes. Requests that both begin and end in that time leave no record.
WAITING_RECORDS_MAX = 100_000
WAITING_BYTES_MAX = 256 * 1024 * 1024

#: Records handed to the client at a time. They can no longer be dropped, or replaced by a newer record of their key.
IN_FLIGHT_RECORDS_MAX = 10_000

#: Errors that a retry of the same record would only repeat.
_FINAL = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.INVALID_RECORD})


@dataclass(frozen=True, slots=True)
class _Sent:
    """One record. since_ms: when a record of its key began to wait."""

    key: bytes
    value: bytes
    partition: int
    since_ms: int


class Outbox:
    """The records of one topic that Kafka has not acknowledged yet."""

    def __init__(
        self,
        kafka: Producer,
        topic: str,
        now_ms: Callable[[], int],
        locked: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """now_ms: a monotonic clock. locked: takes the owner's lock for delivery reports, which any thread may call."""
        self._kafka = kafka
        self._topic = topic
        self._now_ms = now_ms
        self._locked = locked
        self._waiting: OrderedDict[bytes, _Sent] = OrderedDict()
        self._waiting_bytes = 0
        self._in_flight: OrderedDict[int, _Sent] = OrderedDict()  # by number, in the order in which they were sent
        self._n_in_flight: Counter[bytes] = Counter()  # by key
        self._number = 0
        self.lost = 0

    def __len__(self) -> int:
        """Number of records that Kafka has not acknowledged."""
        return len(self._waiting) + len(self._in_flight)

    def put(self, key: bytes, value: bytes, partition: int) -> None:
        """Send a record as soon as possible. It replaces a waiting record of its key."""
        now_ms = self._now_ms()
        if not self._waiting and len(self._in_flight) < IN_FLIGHT_RECORDS_MAX:
            self._send(_Sent(key, value, partition, now_ms))
        else:
            older = self._take(key)
            self._wait(_Sent(key, value, partition, older.since_ms if older else now_ms))
            self._drop_beyond_limits()
        self._kafka.poll(0)

    def withdraw(self, key: bytes) -> bool:
        """Remove a waiting record that no reader can have seen; False if the client has a record of its key."""
        return not self._n_in_flight[key] and self._take(key) is not None

    def discard(self, key: bytes) -> None:
        """Remove a record that is no longer needed, if it is still waiting."""
        self._take(key)

    def pump(self) -> None:
        """Serve delivery reports, and hand waiting records to the client up to its limits."""
        self._kafka.poll(0)
        while self._waiting and len(self._in_flight) < IN_FLIGHT_RECORDS_MAX:
            sent = self._waiting.popitem(last=False)[1]
            self._waiting_bytes -= len(sent.value)
            if not self._send(sent):
                break

    def oldest_ms(self) -> int:
        """For how long the oldest record has been unacknowledged; 0 if there is none."""
        ages = [next(iter(each.values())).since_ms for each in (self._waiting, self._in_flight) if each]
        return self._now_ms() - min(ages) if ages else 0

    def _send(self, sent: _Sent) -> bool:
        """Hand a record to the client; return False if the client's queue is full, so that the record waits."""
        self._number += 1
        number = self._number

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            with self._locked():
                self._on_delivery(number, error)

        try:
            self._kafka.produce(
                self._topic, key=sent.key, value=sent.value, partition=sent.partition, on_delivery=on_delivery
            )
        except BufferError:
            self._wait(sent, first=True)
            return False
        except KafkaException as exc:
            self._lose(exc.args[0])
            return True
        self._in_flight[number] = sent
        self._n_in_flight[sent.key] += 1
        return True

    def _on_delivery(self, number: int, error: KafkaError | None) -> None:
        sent = self._in_flight.pop(number)
        self._n_in_flight[sent.key] -= 1
        newer = bool(self._n_in_flight[sent.key])
        if not newer:
            del self._n_in_flight[sent.key]
        if error is None:
            return
        if error.code() in _FINAL:
            self._lose(error)
        elif not newer and sent.key not in self._waiting:  # otherwise a newer record of its key is on the way
            self._wait(sent, first=True)
            self._drop_beyond_limits()

    def _lose(self, error: KafkaError) -> None:
        self.lost += 1
        log.warning("%s does not accept a record, which is dropped: %s", self._topic, error.str())

    def _wait(self, sent: _Sent, *, first: bool = False) -> None:
        self._waiting[sent.key] = sent
        if first:
            self._waiting.move_to_end(sent.key, last=False)
        self._waiting_bytes += len(sent.value)

    def _take(self, key: bytes) -> _Sent | None:
        sent = self._waiting.pop(key, None)
        if sent is not None:
            self._waiting_bytes -= len(sent.value)
        return sent

    def _drop_beyond_limits(self) -> None:
        while len(self._waiting) > WAITING_RECORDS_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self._waiting_bytes -= len(self._waiting.popitem(last=False)[1].value)
            self.lost += 1

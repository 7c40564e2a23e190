"""Records on their way to a compacted topic: what waits, what is under way, what is lost.

What lives here: a queue that a Kafka which is away fills, and that never holds more than one record of a key. What must
not: what the records mean. A router decides without waiting for Kafka; so the queue is bounded, and beyond its bounds
the oldest record is dropped and counted. Not thread-safe by itself: the owner's lock is taken around every call, and in
the delivery reports too.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, Producer

log = logging.getLogger(__name__)

#: Records that wait, and their bytes: at 1,000 requests a second that end while Kafka is away, minutes of them; those
#: that begin and end meanwhile are none.
WAITING_RECORDS_MAX = 100_000
WAITING_BYTES_MAX = 256 * 1024 * 1024

#: Records handed to the client at a time; they can neither be dropped nor replaced by a newer word any more.
IN_FLIGHT_RECORDS_MAX = 10_000

#: Errors after which the same record would fail again.
_FINAL = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.INVALID_RECORD})


@dataclass(frozen=True, slots=True)
class _Sent:
    """One record handed to the client. since_ms: when it was first put here."""

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
        """now_ms: monotonic. locked: takes the owner's lock, for delivery reports, which come on whatever thread."""
        self._kafka = kafka
        self._topic = topic
        self._now_ms = now_ms
        self._locked = locked
        self._waiting: OrderedDict[bytes, _Sent] = OrderedDict()
        self._waiting_bytes = 0
        self._in_flight: OrderedDict[int, _Sent] = OrderedDict()  # by number, in the order in which they were sent
        self._flying: Counter[bytes] = Counter()  # of each key
        self._number = 0
        self.lost = 0

    def __len__(self) -> int:
        """Records that Kafka has not acknowledged."""
        return len(self._waiting) + len(self._in_flight)

    def put(self, key: bytes, value: bytes, partition: int) -> None:
        """Send a record as soon as may be. One of its key that waits still is replaced."""
        now_ms = self._now_ms()
        if not self._waiting and len(self._in_flight) < IN_FLIGHT_RECORDS_MAX:
            self._send(_Sent(key, value, partition, now_ms))
        else:
            older = self._take(key)
            self._wait(_Sent(key, value, partition, older.since_ms if older else now_ms))
            self._drop_beyond_limits()
        self._kafka.poll(0)

    def withdraw(self, key: bytes) -> bool:
        """Take back a record that nobody can have seen; False where it was handed to the client, or is not here."""
        return not self._flying[key] and self._take(key) is not None

    def discard(self, key: bytes) -> None:
        """A record is of no use any more, and is not sent if it is waiting still."""
        self._take(key)

    def pump(self) -> None:
        """Serve delivery reports, and hand to the client what it has room for."""
        self._kafka.poll(0)
        while self._waiting and len(self._in_flight) < IN_FLIGHT_RECORDS_MAX:
            sent = self._waiting.popitem(last=False)[1]
            self._waiting_bytes -= len(sent.value)
            if not self._send(sent):
                break

    def oldest_ms(self) -> int:
        """For how long the oldest record has not been acknowledged; 0 where there is none."""
        ages = [next(iter(each.values())).since_ms for each in (self._waiting, self._in_flight) if each]
        return self._now_ms() - min(ages) if ages else 0

    def _send(self, sent: _Sent) -> bool:
        """Hand a record to the client; False where its queue is full and the record waits."""
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
        self._flying[sent.key] += 1
        return True

    def _on_delivery(self, number: int, error: KafkaError | None) -> None:
        sent = self._in_flight.pop(number)
        self._flying[sent.key] -= 1
        newer = bool(self._flying[sent.key])
        if not newer:
            del self._flying[sent.key]
        if error is None:
            return
        if error.code() in _FINAL:
            self._lose(error)
        elif not newer and sent.key not in self._waiting:  # else its key has a newer word on the way
            self._wait(sent, first=True)
            self._drop_beyond_limits()

    def _lose(self, error: KafkaError) -> None:
        self.lost += 1
        log.warning("a record does not fit %s: %s", self._topic, error.str())

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

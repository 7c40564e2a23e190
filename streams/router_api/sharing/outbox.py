"""Records on their way to a compacted topic: waiting, in flight, or lost.

What lives here: a queue with at most one waiting record per key, and sending what waits in batches, on the loop that
answers requests, between two of them. What must not: the meaning of the records. A router decides without waiting for
Kafka, and a request only adds to the queue: encoding a record and handing it to the client cost several times as much,
and a wake-up of the client's threads for each record costs even more. So records are collected for a short interval and
sent together.

The client takes the interpreter once for each delivery report. On a thread of its own that means waiting each time for
the thread that answers requests, and interrupting it. So the loop serves the reports as well.

A partition gets no further records while the client has some of it that Kafka has not acknowledged: the client would
only keep them, and poll for the acknowledgement without a pause (kafka.clients.IN_FLIGHT_FREELY).

The queue also fills while Kafka is unreachable. So it is bounded; beyond its limits the oldest record is dropped and
counted. Its owner holds its lock around `put`, `withdraw`, `discard` and `oldest_ms`, and must not hold it around
`pump` and `serve_reports`, which take the lock themselves when they need it.

State: records that wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

from confluent_kafka import KafkaError, Message, Producer

from streams.kafka.clients import IN_FLIGHT_FREELY

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Waiting records, and their bytes. If 1,000 requests per second end while Kafka is unreachable, the queue fills within
#: minutes. Requests that both begin and end in that time leave no record.
WAITING_RECORDS_MAX = 100_000
WAITING_BYTES_MAX = 256 * 1024 * 1024

#: Records handed to the client at a time. They can no longer be dropped, or replaced by a newer record of their key.
IN_FLIGHT_RECORDS_MAX = 10_000

#: The first record that is put waits this long, and is sent with those that are put meanwhile. It is part of the time
#: after which other routers know a booking (loads_sync.READ_INTERVAL_S). Reports of records in flight are served in
#: this interval as well.
SEND_INTERVAL_S = 0.010

#: Records encoded and handed to the client in one step. The loop answers requests between two steps. One takes 6 us.
_SENT_TOGETHER_MAX = 64

#: Errors that a retry of the same record would only repeat.
_FINAL = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.INVALID_RECORD})


class _Sent(NamedTuple, Generic[_T]):
    """One record. It is a tuple because two are made for every booking.

    since_ms: when a record of its key began to wait. n_bytes: about how long its value is.
    """

    key: bytes
    content: _T
    partition: int
    n_bytes: int
    since_ms: int


class Outbox(Generic[_T]):
    """The records of one topic that Kafka has not acknowledged yet."""

    def __init__(
        self,
        kafka: Producer,
        topic: str,
        now_ms: Callable[[], int],
        locked: Callable[[], AbstractContextManager[object]],
        encode: Callable[[Sequence[tuple[bytes, _T]]], list[bytes]],
    ) -> None:
        """now_ms: a monotonic clock. locked: takes the owner's lock. encode: the values of records, given as keys and
        contents; called without the lock, just before they are sent."""
        self._kafka = kafka
        self._topic = topic
        self._now_ms = now_ms
        self._locked = locked
        self._encode = encode
        self._waiting: dict[int, OrderedDict[bytes, _Sent[_T]]] = {}  # by partition, those that have any
        self._n_waiting = 0
        self._waiting_bytes = 0
        self._in_flight: OrderedDict[int, _Sent[_T]] = OrderedDict()  # by number, in the order in which they were sent
        self._n_in_flight = Counter[int]()  # by partition
        self._numbers: dict[bytes, list[int]] = {}  # of the records in flight, by key, the oldest first
        self._number = 0
        self.lost = 0
        # Held while reports are served and records are sent: two threads would take reports of one key in any order.
        self._pumping = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that sends, and its thread
        self._loop_thread = 0
        self._is_scheduled = False  # whether the loop will send

    def __len__(self) -> int:
        """Number of records that Kafka has not acknowledged."""
        return self._n_waiting + len(self._in_flight)

    # -- sending -------------------------------------------------------------------------------------------------------

    def send_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what is put on this loop from now on. Call it on the loop's thread. Without it, someone calls `pump`."""
        self._loop_thread = threading.get_ident()
        self._loop = loop
        self._is_scheduled = True
        self._send_later(loop)

    def stop(self) -> None:
        """Send no more on the loop. Records that still wait are sent by `pump`."""
        self._loop = None

    @property
    def sends(self) -> bool:
        """Whether a loop sends the records."""
        return self._loop is not None

    def pump(self) -> None:
        """Serve delivery reports, and hand waiting records to the client up to its limits."""
        with self._pumping:
            self._kafka.poll(0)
            busy = self._busy()
            while self._hand_over(busy):
                pass
            self._kafka.poll(0)

    def serve_reports(self) -> None:
        """Serve the delivery reports that have come."""
        with self._pumping:
            self._kafka.poll(0)

    def _schedule(self) -> None:
        """Let the loop send soon. Called under the owner's lock."""
        loop = self._loop
        if loop is None or self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            if threading.get_ident() == self._loop_thread:
                self._send_later(loop)
            else:
                loop.call_soon_threadsafe(self._send_later, loop)
        except RuntimeError:  # it has ended
            self._loop = None

    def _send_later(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(SEND_INTERVAL_S, self._send_on_loop, loop)

    def _send_on_loop(self, loop: asyncio.AbstractEventLoop, busy: Collection[int] | None = None) -> None:
        """Serve reports and hand over one batch; then let the loop answer requests, and go on as long as needed.

        busy: the partitions that get no records, if this continues what an earlier call began.
        """
        if self._loop is not loop:  # it has stopped
            return
        may_take_more = False
        if self._pumping.acquire(blocking=False):  # requests do not wait for another thread that sends
            try:
                self._kafka.poll(0)
                busy = self._busy() if busy is None else busy
                may_take_more = self._hand_over(busy)
            except Exception:  # it must outlive a mistake with one batch, or nothing would ever be sent again
                log.exception("records for %s were not sent", self._topic)
            finally:
                self._pumping.release()
        with self._locked():
            self._is_scheduled = bool(self)
        if may_take_more:
            loop.call_soon(self._send_on_loop, loop, busy)
        elif self._is_scheduled:  # for records that wait, and for reports of those in flight
            self._send_later(loop)

    def _busy(self) -> Collection[int]:
        """The partitions whose records the client would only keep until Kafka has acknowledged others."""
        with self._locked():
            return {partition for partition, n in self._n_in_flight.items() if n >= IN_FLIGHT_FREELY}

    def _hand_over(self, busy: Collection[int]) -> bool:
        """Hand one batch to the client; returns whether records are left that it may take now.

        busy: partitions that get none.
        """
        with self._locked():
            batch = self._next_batch(busy)
            are_left = any(partition not in busy for partition in self._waiting)
        return bool(batch) and self._send(batch) and are_left

    def _next_batch(self, busy: Collection[int]) -> list[_Sent[_T]]:
        """Move waiting records to those in flight, as many as may be sent now.

        Those of a partition are sent together, as far as they are few enough: the client would keep the second part.
        """
        n = min(_SENT_TOGETHER_MAX, IN_FLIGHT_RECORDS_MAX - len(self._in_flight))
        batch: list[_Sent[_T]] = []
        for partition in [partition for partition in self._waiting if partition not in busy]:
            if batch and len(batch) + len(self._waiting[partition]) > n:
                break
            while len(batch) < n and partition in self._waiting:
                sent = self._take_oldest(partition)
                self._number += 1
                self._in_flight[self._number] = sent
                self._n_in_flight[partition] += 1
                self._numbers.setdefault(sent.key, []).append(self._number)
                batch.append(sent)
        return batch

    def _send(self, batch: Sequence[_Sent[_T]]) -> bool:
        """Hand records in flight to the client. Return False if its queue is full, so that the rest waits again."""
        try:
            values = self._encode([(sent.key, sent.content) for sent in batch])
        except Exception:  # otherwise they would count as in flight for ever
            self._drop([sent.key for sent in batch])
            return True
        by_partition: dict[int, list[dict[str, Any]]] = {}
        for sent, value in zip(batch, values, strict=True):
            by_partition.setdefault(sent.partition, []).append({"key": sent.key, "value": value})
        # All of them, so that the records that have to wait again keep their order.
        n_taken = sum([self._send_to(partition, messages) for partition, messages in by_partition.items()])
        if n_taken == len(batch):
            return True
        errors = {
            report["key"]: report["_error"] for group in by_partition.values() for report in group if "_error" in report
        }
        full = False
        with self._locked():
            # In reverse, since each one that has to wait again goes to the front of the queue.
            for sent in reversed(batch):
                error = errors.get(sent.key)
                if error is None:
                    continue
                self._landed(sent.key, -1)
                if error.code() == KafkaError._QUEUE_FULL:
                    full = True
                    self._wait_again(sent)
                else:
                    self._lose(error)
        return not full

    def _send_to(self, partition: int, messages: list[dict[str, Any]]) -> int:
        """Hand messages of one partition to the client; return how many of them need nothing more.

        The client ignores partitions of single messages: with a batch for several partitions it would choose them by
        the hash of each key, and the records of one booking would be in different ones.
        """
        try:
            return self._kafka.produce_batch(self._topic, messages, partition=partition, on_delivery=self._on_delivery)
        except Exception:  # otherwise they would count as in flight for ever
            self._drop([message["key"] for message in messages])
            return len(messages)

    def _drop(self, keys: Sequence[bytes]) -> None:
        log.exception("%d records for %s cannot be sent, and are dropped", len(keys), self._topic)
        with self._locked():
            for key in keys:
                self._landed(key, -1)
            self.lost += len(keys)

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        key = message.key()
        assert key is not None  # every record has one
        with self._locked():
            sent = self._landed(key, 0)  # the client reports the records of a partition in order
            if error is None:
                return
            if error.code() in _FINAL:
                self._lose(error)
            elif key not in self._numbers:  # otherwise a newer record of its key is on the way
                self._wait_again(sent)

    def _landed(self, key: bytes, which: int) -> _Sent[_T]:
        """Remove a record of a key from those in flight. which: 0 for the oldest one, -1 for the newest one."""
        numbers = self._numbers[key]
        sent = self._in_flight.pop(numbers.pop(which))
        self._n_in_flight[sent.partition] -= 1
        if not numbers:
            del self._numbers[key]
        return sent

    # -- records that wait ---------------------------------------------------------------------------------------------

    def put(self, key: bytes, content: _T, partition: int, n_bytes: int) -> None:
        """Send a record soon, in the place of a waiting record of its key. n_bytes: about how long its value is."""
        older = self._waiting[partition].get(key) if partition in self._waiting else None
        self._wait(_Sent(key, content, partition, n_bytes, older.since_ms if older else self._now_ms()))
        self._drop_beyond_limits()
        self._schedule()

    def withdraw(self, key: bytes, partition: int) -> bool:
        """Remove a waiting record that no reader can have seen; False if the client has a record of its key."""
        return key not in self._numbers and self._take(key, partition) is not None

    def discard(self, key: bytes, partition: int) -> None:
        """Remove a record that is no longer needed, if it is still waiting."""
        self._take(key, partition)

    def oldest_ms(self) -> int:
        """For how long the oldest record has been unacknowledged; 0 if there is none."""
        since_ms = [next(iter(queue.values())).since_ms for queue in self._waiting.values()]
        if self._in_flight:
            since_ms.append(next(iter(self._in_flight.values())).since_ms)
        return self._now_ms() - min(since_ms) if since_ms else 0

    def _wait_again(self, sent: _Sent[_T]) -> None:
        """Put a record that was not sent at the front of the queue, unless a newer one of its key waits."""
        if sent.key not in self._waiting.get(sent.partition, ()):
            self._wait(sent, first=True)
            self._drop_beyond_limits()
            self._schedule()

    def _lose(self, error: KafkaError) -> None:
        self.lost += 1
        log.warning("%s does not accept a record, which is dropped: %s", self._topic, error.str())

    def _wait(self, sent: _Sent[_T], *, first: bool = False) -> None:
        queue = self._waiting.setdefault(sent.partition, OrderedDict())
        older = queue.get(sent.key)
        queue[sent.key] = sent  # in the place of the older one
        if first:
            queue.move_to_end(sent.key, last=False)
        self._n_waiting += older is None
        self._waiting_bytes += sent.n_bytes - (0 if older is None else older.n_bytes)

    def _take(self, key: bytes, partition: int) -> _Sent[_T] | None:
        queue = self._waiting.get(partition)
        sent = None if queue is None else queue.pop(key, None)
        return None if sent is None else self._taken(sent)

    def _take_oldest(self, partition: int) -> _Sent[_T]:
        return self._taken(self._waiting[partition].popitem(last=False)[1])

    def _taken(self, sent: _Sent[_T]) -> _Sent[_T]:
        """A record has left the queue of its partition."""
        if not self._waiting[sent.partition]:
            del self._waiting[sent.partition]
        self._n_waiting -= 1
        self._waiting_bytes -= sent.n_bytes
        return sent

    def _drop_beyond_limits(self) -> None:
        while self._n_waiting > WAITING_RECORDS_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self._take_oldest(min(self._waiting, key=self._waits_since_ms))
            self.lost += 1

    def _waits_since_ms(self, partition: int) -> int:
        return next(iter(self._waiting[partition].values())).since_ms

"""Records on their way to a compacted topic: waiting, in flight, or lost.

What lives here: a queue with at most one waiting record per key, and what hands it to the client in batches: the loop
that answers requests, between two of them (see answering_loop for the reason), or a thread where there is none. What
must not: the meaning of the records. A router decides without waiting for Kafka, and a request only adds to the queue:
encoding a record and handing it to the client cost several times as much, and a wake-up of the client's threads for
each record costs even more. So records are collected for a short interval and sent together.

The queue also fills while Kafka is unreachable. So it is bounded; beyond its limits the oldest record is dropped and
counted. Its owner holds its lock around `put`, `withdraw`, `discard` and `oldest_ms`, and must not hold it around
`pump` and `serve_reports`, which take the lock themselves when they need it.

The client takes the interpreter once for each delivery report. For a thread of its own that means waiting each time for
the thread that answers requests, and interrupting it. So the thread that answers requests also serves reports, between
two requests; the outbox's own thread only does it if no requests come. It also sends what that loop has not sent in
time, because something blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

from confluent_kafka import KafkaError, Message, Producer

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Waiting records, and their bytes. If 1,000 requests per second end while Kafka is unreachable, the queue fills within
#: minutes. Requests that both begin and end in that time leave no record.
WAITING_RECORDS_MAX = 100_000
WAITING_BYTES_MAX = 256 * 1024 * 1024

#: Records handed to the client at a time. They can no longer be dropped, or replaced by a newer record of their key.
IN_FLIGHT_RECORDS_MAX = 10_000

#: Records are sent at most once in this time, those of that time together. It is part of the time after which other
#: routers know a booking, which should stay below 100 ms (benchmarks/http.py measures it).
SEND_INTERVAL_S = 0.005

#: The same while many records are sent, when the broker's time for each request matters more: at 1,600 bookings per
#: second, sending them twice as often and reading them every 8 instead of 12 ms cost the broker a third more for each.
BUSY_SEND_INTERVAL_S = 0.010
BUSY_RECORDS_PER_S = 2_500

#: How many records are sent per second is determined over at least this time.
_PACE_S = 0.25

#: The first record after a pause waits this long, so that the request that put it is answered before it is sent.
_SEND_DELAY_S = 0.002

#: How often reports are fetched while records are in flight and no others are put.
_REPORTS_INTERVAL_S = 0.05

#: Callers of `serve_reports` serve them at most once in this time, and the outbox's own thread if nobody has for long.
#: Serving those of 50 records takes 0.2 ms.
_SERVE_EVERY_S = 0.010
_SERVE_LATE_S = 0.040

#: Records encoded and handed to the client in one step, between which other threads get their turn, or requests on the
#: loop that answers them. One takes 6 us.
_SENT_TOGETHER_MAX = 256
_SENT_BETWEEN_REQUESTS_MAX = 64

#: Records that the loop has not sent for so long are sent by the thread.
_SEND_LATE_MS = 50

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
        self._waiting: OrderedDict[bytes, _Sent[_T]] = OrderedDict()
        self._waiting_bytes = 0
        self._in_flight: OrderedDict[int, _Sent[_T]] = OrderedDict()  # by number, in the order in which they were sent
        self._numbers: dict[bytes, list[int]] = {}  # of the records in flight, by key, the oldest first
        self._number = 0
        self.lost = 0
        self._pumping = threading.Lock()
        # Held while reports are served: two threads would take those of one key in any order.
        self._serving = threading.Lock()
        self._served_s = 0.0
        self._wake = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that answers requests, and its thread
        self._loop_thread = 0
        self._loop_sends = False  # whether that loop will send what waits
        self._loop_next_s = 0.0  # when it may send again
        self._interval_s = SEND_INTERVAL_S
        self._paced_s, self._paced_number = time.monotonic(), 0  # when that was determined, and the newest record then
        self._thread: threading.Thread | None = None
        self._sleeps = False  # whether that thread sleeps until it is woken, since nothing waits or is in flight
        self._stopping = False

    def __len__(self) -> int:
        """Number of records that Kafka has not acknowledged."""
        return len(self._waiting) + len(self._in_flight)

    def start(self) -> None:
        """Send what is put from now on, BUSY_SEND_INTERVAL_S later at most. Without this, someone must call `pump`."""
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what is put from now on between two requests that this loop answers. Call it on the loop's thread."""
        self._loop, self._loop_thread, self._loop_sends = loop, threading.get_ident(), False
        self._wake.set()  # so that the thread goes over to watching

    def stop(self) -> None:
        """Stop sending. Records that still wait are sent by `pump`."""
        self._loop = None
        if self._thread is not None:
            self._stopping = True
            self._wake.set()
            self._thread.join()
            self._thread = None

    @property
    def started(self) -> bool:
        """Whether a thread sends the records."""
        return self._thread is not None

    def put(self, key: bytes, content: _T, partition: int, n_bytes: int) -> None:
        """Send a record soon, in the place of a waiting record of its key. n_bytes: about how long its value is."""
        older = self._waiting.get(key)
        if older is not None:
            self._waiting_bytes -= older.n_bytes
        self._wait(_Sent(key, content, partition, n_bytes, older.since_ms if older else self._now_ms()))
        self._drop_beyond_limits()
        loop = self._loop
        if loop is not None and not self._loop_sends:
            self._loop_sends = True
            self._send_soon(loop)
        if self._loop is not None and not self._sleeps:  # otherwise the thread begins to watch
            return
        self._sleeps = False
        if not self._wake.is_set():
            self._wake.set()

    def _send_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if threading.get_ident() == self._loop_thread:
                loop.call_later(max(self._loop_next_s - time.monotonic(), _SEND_DELAY_S), self._send_on_loop)
            else:
                loop.call_soon_threadsafe(self._send_soon, loop)
        except RuntimeError:  # it has ended
            self._loop = None

    def _send_on_loop(self) -> None:
        self._loop_sends = False
        self._loop_next_s = self._next_s()
        loop = self._loop
        if not self._pumping.acquire(blocking=False):
            # The thread is sending all that waits, which may take long after an outage. Requests do not wait for it.
            if loop is not None:
                self._loop_sends = True
                loop.call_later(self._interval_s, self._send_on_loop)
            return
        try:
            took_all, are_left = self._hand_over_some(_SENT_BETWEEN_REQUESTS_MAX)
        except Exception:
            log.exception("records for %s were not sent", self._topic)
            return
        finally:
            self._pumping.release()
        if took_all and are_left and loop is not None:  # what the client does not take now, the thread offers again
            self._loop_sends = True
            loop.call_soon(self._send_on_loop)

    def _next_s(self) -> float:
        """When records may be sent again, if they are sent now."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._paced_s
        if elapsed_s >= _PACE_S:
            is_busy = self._number - self._paced_number >= BUSY_RECORDS_PER_S * elapsed_s
            self._interval_s = BUSY_SEND_INTERVAL_S if is_busy else SEND_INTERVAL_S
            self._paced_s, self._paced_number = now_s, self._number
        return now_s + self._interval_s

    def withdraw(self, key: bytes) -> bool:
        """Remove a waiting record that no reader can have seen; False if the client has a record of its key."""
        return key not in self._numbers and self._take(key) is not None

    def discard(self, key: bytes) -> None:
        """Remove a record that is no longer needed, if it is still waiting."""
        self._take(key)

    def pump(self) -> None:
        """Serve delivery reports, and hand waiting records to the client up to its limits."""
        self._serve()
        self._hand_over()
        self._serve()

    def serve_reports(self) -> None:
        """Serve the delivery reports that have come, if a thread sends the records and it is time for it.

        Call it on the thread that answers requests, without the owner's lock, after a request that put a record.
        """
        if self._in_flight and self._thread is not None and time.monotonic() - self._served_s >= _SERVE_EVERY_S:
            try:
                self._serve(wait=False)
            except Exception:  # the request has been answered, and must not fail for it
                log.exception("delivery reports of %s were not served", self._topic)

    def _serve(self, *, wait: bool = True) -> None:
        """wait: if another thread is doing this, wait for it and go on; otherwise return at once."""
        if not self._serving.acquire(blocking=wait):
            return
        try:
            self._served_s = time.monotonic()
            self._kafka.poll(0)
        finally:
            self._serving.release()

    def _hand_over(self) -> bool:
        """Hand waiting records to the client; return False if it does not take all of them now."""
        with self._pumping:
            while True:
                took_all, are_left = self._hand_over_some(_SENT_TOGETHER_MAX)
                if not took_all or not are_left:
                    return not are_left

    def _hand_over_some(self, records_max: int) -> tuple[bool, bool]:
        """Hand a batch to the client; returns whether it took all of it, and whether records are left."""
        with self._locked():
            batch = self._next_batch(records_max)
            are_left = bool(self._waiting)
        if not batch:
            return not are_left, are_left
        took_all = self._send(batch)
        return took_all, are_left or not took_all

    def oldest_ms(self) -> int:
        """For how long the oldest record has been unacknowledged; 0 if there is none."""
        if not self._waiting and not self._in_flight:
            return 0
        ages = [next(iter(each.values())).since_ms for each in (self._waiting, self._in_flight) if each]
        return self._now_ms() - min(ages)

    def _run(self) -> None:
        next_s = 0.0
        sent_all = True
        while not self._stopping:
            # If records were put meanwhile, the event is set. Looking at the records is cheaper than waiting for it.
            # Reports of records in flight come a few milliseconds after they were sent, or when Kafka is back.
            if not (self._waiting and sent_all and self._loop is None):
                with self._locked():  # while records are handed over, they neither wait nor are in flight
                    is_idle = not self._in_flight and not self._waiting
                    self._sleeps = is_idle and self._loop is not None
                self._wake.wait(None if is_idle else _REPORTS_INTERVAL_S)
            if self._wake.is_set() and not self._stopping and self._loop is None:
                time.sleep(max(next_s - time.monotonic(), _SEND_DELAY_S))
                next_s = self._next_s()
            self._wake.clear()
            try:
                if time.monotonic() - self._served_s >= _SERVE_LATE_S:
                    self._serve()
                if self._loop is not None and self._loop.is_closed():
                    self._loop = None
                if self._loop is None or self._is_late():
                    sent_all = self._hand_over()
            except Exception:  # the thread must outlive a mistake with one batch, or nothing would ever be sent again
                log.exception("records for %s were not sent", self._topic)
                sent_all = False

    def _is_late(self) -> bool:
        """Whether records wait that the loop should have sent."""
        with self._locked():
            return bool(self._waiting) and self._now_ms() - next(iter(self._waiting.values())).since_ms >= _SEND_LATE_MS

    def _next_batch(self, records_max: int) -> list[_Sent[_T]]:
        """Move waiting records to those in flight, as many as may be sent now."""
        n = min(len(self._waiting), records_max, IN_FLIGHT_RECORDS_MAX - len(self._in_flight))
        batch = []
        for _ in range(n):
            sent = self._waiting.popitem(last=False)[1]
            self._waiting_bytes -= sent.n_bytes
            self._number += 1
            self._in_flight[self._number] = sent
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
        errors = {each["key"]: each["_error"] for group in by_partition.values() for each in group if "_error" in each}
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
        if not numbers:
            del self._numbers[key]
        return sent

    def _wait_again(self, sent: _Sent[_T]) -> None:
        """Put a record that was not sent at the front of the queue, unless a newer one of its key waits."""
        if sent.key not in self._waiting:
            self._wait(sent, first=True)
            self._drop_beyond_limits()
            if self._sleeps:
                self._sleeps = False
                self._wake.set()

    def _lose(self, error: KafkaError) -> None:
        self.lost += 1
        log.warning("%s does not accept a record, which is dropped: %s", self._topic, error.str())

    def _wait(self, sent: _Sent[_T], *, first: bool = False) -> None:
        self._waiting[sent.key] = sent
        if first:
            self._waiting.move_to_end(sent.key, last=False)
        self._waiting_bytes += sent.n_bytes

    def _take(self, key: bytes) -> _Sent[_T] | None:
        sent = self._waiting.pop(key, None)
        if sent is not None:
            self._waiting_bytes -= sent.n_bytes
        return sent

    def _drop_beyond_limits(self) -> None:
        while len(self._waiting) > WAITING_RECORDS_MAX or self._waiting_bytes > WAITING_BYTES_MAX:
            self._waiting_bytes -= self._waiting.popitem(last=False)[1].n_bytes
            self.lost += 1

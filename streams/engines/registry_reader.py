"""Reads for a bridge: the registry's records of its engines, and requests to restate a rank.

What lives here: one consumer on a thread of its own, and the last record of each worker. What must not: what follows
from a record (lease, feed, sources.registry).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, Message, TopicPartition

from streams.core.events import ResyncRequest
from streams.core.ids import U64_MASK, WorkerId
from streams.core.workers import Worker
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.clients import assign, partition_of, reader, worker_key
from streams.kafka.records import decode_resync, decode_worker
from streams.kafka.topic_watch import TopicReading, TopicWatch
from streams.settings import ScopeSettings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Records taken at a time, and how long a poll waits for the first one. A bridge that reads back its renewal late may
#: lose the lease.
_READ_RECORDS = 500
_POLL_S = 0.1

#: Wait before topics that were recreated or truncated are read again.
_READ_AGAIN_S = 1.0

#: Workers whose last record is kept, 400 bytes each, for an engine that the bridge is given later. Beyond this limit,
#: the registry is read again for such an engine.
RECORDS_KEPT_MAX = 65_536


class RegistryListener(Protocol):
    """Receives the records, on the loop."""

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Take one record of the registry, in log order; None is a tombstone."""

    def on_end(self, worker_ids: Collection[WorkerId]) -> None:
        """Note that the registry has been read to its end, for these workers."""

    def on_resync(self, request: ResyncRequest) -> None:
        """Take a partition owner's request for a restatement."""

    def on_any_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Take one record of any worker, if the reader reads those of all."""

    def on_record(self, key: bytes, value: bytes | None) -> None:
        """Take one record of the registry that is no worker's; None is a tombstone."""

    def on_registry_read(self) -> None:
        """Note that every partition of the registry has been read to its end."""


class RegistryReader:
    """Reads the registry from its beginning, and requests from now on, for a set of workers that may change."""

    def __init__(self, settings: ScopeSettings, listener: RegistryListener, *, of_all_workers: bool = False) -> None:
        """of_all_workers: whether the listener gets the records of all workers, not only of those it watches."""
        self._settings = settings
        self._topics = (topics(settings).workers, topics(settings).kv_control)
        self._workers, self._control = (spec.name for spec in self._topics)
        self._listener = listener
        self._of_all_workers = of_all_workers
        self._lock = threading.Lock()  # guards the four below
        self._watched: dict[bytes, WorkerId] = {}
        self._last: dict[bytes, bytes] = {}  # the last record of every worker, by key
        self._ended: set[int] = set()  # partitions that have been read to their ends
        self._read_again = False
        self._is_over_capacity = False
        self._topic_ids: dict[str, str] = {}  # the ids of both topics, as they were last seen; of the watch's thread
        self._recreated: str | None = None  # a topic that was recreated since the registry has been read
        self._stopping = threading.Event()

    def watch(self, worker_id: WorkerId) -> None:
        """Report a worker's records from now on, the last one first. Call it on the loop."""
        key, home = worker_key(worker_id), partition_of(worker_id, self._settings.partitions)
        with self._lock:
            self._watched[key] = worker_id
            last, ended = self._last.get(key), home in self._ended
            if ended and last is None and self._is_over_capacity:
                self._read_again, ended = True, False
        if last is not None:
            try:
                self._listener.on_worker(worker_id, decode_worker(last, self._settings.schema_ids))
            except BadRecord as exc:
                log.warning("%s: a record is skipped: %s", self._workers, exc)
        if ended:
            self._listener.on_end([worker_id])

    def unwatch(self, worker_id: WorkerId) -> None:
        """Report a worker's records no longer."""
        with self._lock:
            self._watched.pop(worker_key(worker_id), None)

    async def run(self) -> None:
        """Read until cancelled."""
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(None, self._read, loop)
        try:
            await asyncio.shield(reading)
        finally:
            self._stopping.set()
            await asyncio.wait([reading])

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # A client that reads a topic which is deleted and recreated may wait for its old position without an error. The
        # bridge would then never read back the renewals of its leases.
        watch = TopicWatch(self._settings, self._topics, (), self._note_ids)
        watch.start()
        try:
            while not self._stopping.is_set():
                try:
                    self._read_on(loop)
                except (KvStreamsError, KafkaException) as exc:
                    log.warning("%s; the registry is read again from its beginning", exc)
                    self._stopping.wait(_READ_AGAIN_S)
        finally:
            watch.stop()

    def _note_ids(self, reading: TopicReading) -> None:
        for spec in self._topics:
            topic_id = reading.ids.get(spec.name)
            if topic_id is not None and self._topic_ids.setdefault(spec.name, topic_id) != topic_id:
                self._topic_ids[spec.name], self._recreated = topic_id, spec.name

    def _read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read until stopped. Raises KvStreamsError if a topic was recreated or truncated."""
        with self._lock:
            self._last.clear()
            self._ended.clear()
            self._read_again = self._is_over_capacity = False
        self._recreated = None
        consumer = reader(self._settings)
        try:
            partitions = range(self._settings.partitions)
            where = [TopicPartition(self._workers, partition, OFFSET_BEGINNING) for partition in partitions]
            where += [TopicPartition(self._control, partition, OFFSET_END) for partition in partitions]
            assign(consumer, where)
            while not self._stopping.is_set():
                if self._recreated is not None:
                    raise KvStreamsError(f"{self._recreated} was deleted and recreated")
                if self._read_again:
                    log.info("the registry is read again from its beginning, for an engine that was added")
                    return
                first = consumer.poll(_POLL_S)  # `consume` alone would always wait for its whole timeout
                messages = [] if first is None else [first, *consumer.consume(_READ_RECORDS - 1, 0.0)]
                calls = [call for message in messages for call in self._calls(message)]
                if calls:
                    loop.call_soon_threadsafe(_call_all, calls)
        finally:
            consumer.close()

    def _calls(self, message: Message) -> list[Callable[[], None]]:
        """Return the listener's calls that a message leads to."""
        error, topic = message.error(), message.topic()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                partition = message.partition()
                return [] if topic != self._workers or partition is None else self._calls_at_end(partition)
            if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE) or error.fatal():
                raise KvStreamsError(f"{topic} cannot be read: {error.str()}")
            return []  # a broker does not answer; the client reconnects by itself
        key, value = message.key() or b"", message.value()
        try:
            if topic == self._control:
                if key not in self._watched:
                    return []
                request = decode_resync(value, self._settings.schema_ids)
                return [lambda: self._listener.on_resync(request)]
            return self._calls_of_record(key, value)
        except BadRecord as exc:
            # Another application wrote the record; routers skip it as well.
            log.warning("%s: a record is skipped: %s", topic, exc)
            return []

    def _calls_of_record(self, key: bytes, value: bytes | None) -> list[Callable[[], None]]:
        """Keep a record of the registry, and return the calls that report it. Raises BadRecord."""
        worker_id = worker_of_key(key)
        if worker_id is None:
            return [lambda: self._listener.on_record(key, value)]
        with self._lock:
            watched = key in self._watched
            if value is None:
                self._last.pop(key, None)
            elif key in self._last or len(self._last) < RECORDS_KEPT_MAX:
                self._last[key] = value
            else:
                self._is_over_capacity = True
        if not watched and not self._of_all_workers:
            return []
        worker = None if value is None else decode_worker(value, self._settings.schema_ids)
        calls: list[Callable[[], None]] = []
        if watched:
            calls.append(lambda: self._listener.on_worker(worker_id, worker))
        if self._of_all_workers:
            calls.append(lambda: self._listener.on_any_worker(worker_id, worker))
        return calls

    def _calls_at_end(self, partition: int) -> list[Callable[[], None]]:
        with self._lock:
            self._ended.add(partition)
            all_ended = len(self._ended) == self._settings.partitions
            watched = list(self._watched.values())
        here = [worker_id for worker_id in watched if partition_of(worker_id, self._settings.partitions) == partition]
        calls: list[Callable[[], None]] = [lambda: self._listener.on_end(here)] if here else []
        return [*calls, self._listener.on_registry_read] if all_ended else calls


def worker_of_key(key: bytes) -> WorkerId | None:
    """Return the worker that a key of the registry names; None for the keys of other records."""
    number = int(key) if key.isdigit() and len(key) <= 20 else -1
    return WorkerId(number) if 0 <= number <= U64_MASK else None


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()

"""Reads for a bridge: the registry's records of its engines, and requests to restate a rank.

What lives here: one consumer on a thread of its own. What must not: what follows from a record (lease, feed).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, Message, TopicPartition

from streams.codec import decode_resync, decode_worker
from streams.core.events import ResyncRequest
from streams.core.ids import WorkerId
from streams.core.workers import Worker
from streams.errors import BadRecord, KvStreamsError
from streams.kafka import assign, partition_of, reader, worker_key
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Records taken at a time, and how long a poll waits for the first one. A bridge that reads back its renewal late may
#: lose the lease.
_READ_RECORDS = 500
_POLL_S = 0.1

#: Wait before topics that were recreated or truncated are read again.
_READ_AGAIN_S = 1.0


class RegistryListener(Protocol):
    """Receives the records, on the loop."""

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Take one record of the registry, in log order; None is a tombstone."""

    def on_end(self, worker_ids: Collection[WorkerId]) -> None:
        """Note that the registry has been read to its end, for these workers."""

    def on_resync(self, request: ResyncRequest) -> None:
        """Take a partition owner's request for a restatement."""


class RegistryReader:
    """Reads for a fixed set of workers: the registry from its beginning, and requests from now on."""

    def __init__(self, settings: Settings, worker_ids: Collection[WorkerId], listener: RegistryListener) -> None:
        self._settings = settings
        self._workers, self._control = topics(settings).workers.name, topics(settings).kv_control.name
        self._listener = listener
        self._keys = {worker_key(worker_id): worker_id for worker_id in worker_ids}
        self._homes: dict[int, list[WorkerId]] = {}
        for worker_id in worker_ids:
            self._homes.setdefault(partition_of(worker_id, settings.partitions), []).append(worker_id)
        self._stopping = threading.Event()

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
        while not self._stopping.is_set():
            try:
                self._read_on(loop)
            except (KvStreamsError, KafkaException) as exc:
                log.warning("%s; the registry is read again from its beginning", exc)
                self._stopping.wait(_READ_AGAIN_S)

    def _read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read until stopped. Raises KvStreamsError if a topic was recreated or truncated."""
        consumer = reader(self._settings)
        try:
            where = [TopicPartition(self._workers, home, OFFSET_BEGINNING) for home in self._homes]
            where += [TopicPartition(self._control, home, OFFSET_END) for home in self._homes]
            assign(consumer, where)
            while not self._stopping.is_set():
                first = consumer.poll(_POLL_S)  # `consume` alone would always wait for its whole timeout
                messages = [] if first is None else [first, *consumer.consume(_READ_RECORDS - 1, 0.0)]
                calls = [call for message in messages for call in self._calls(message)]
                if calls:
                    loop.call_soon_threadsafe(_call_all, calls)
        finally:
            consumer.close()

    def _calls(self, message: Message) -> list[Callable[[], None]]:
        """Return the listener's calls that a message leads to."""
        error = message.error()
        topic, key = message.topic(), message.key() or b""
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                partition = message.partition()
                if topic != self._workers or partition is None:
                    return []
                home = self._homes[partition]
                return [lambda: self._listener.on_end(home)]
            if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE) or error.fatal():
                raise KvStreamsError(f"{topic} cannot be read: {error.str()}")
            return []  # a broker does not answer; the client reconnects by itself
        worker_id = self._keys.get(key)
        if worker_id is None:
            return []
        value = message.value()
        try:
            if topic == self._control:
                request = decode_resync(value, self._settings.schema_ids)
                return [lambda: self._listener.on_resync(request)]
            worker = None if value is None else decode_worker(value, self._settings.schema_ids)
            return [lambda: self._listener.on_worker(worker_id, worker)]
        except BadRecord as exc:
            # Another application wrote the record; routers skip it as well.
            log.warning("%s: a record is skipped: %s", topic, exc)
            return []


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()

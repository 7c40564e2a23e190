"""Reading the scope that is moved to: which workers its bridges feed, and what its owners ask for.

What lives here: one consumer of its registry and of its requests for restatements. What must not: what follows from
them (copying, moving).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, Message, TopicPartition

from streams.core.events import ResyncRequest
from streams.engines.registry_reader import worker_of_key
from streams.errors import BadRecord, ProcessError
from streams.kafka.clients import assign, consume, reader
from streams.kafka.log_offsets import Place
from streams.kafka.records import decode_resync
from streams.replay.copy_writer import COPIED, decoded_worker
from streams.replay.copying import Holders
from streams.replay.cuts import log_ends, places_of
from streams.settings import ScopeSettings
from streams.tables.changelog import READ_BATCH_RECORDS, check_error
from streams.topics import topics

#: How long reading the registry may take.
REGISTRY_TIMEOUT_S = 60.0
_POLL_S = 0.02


class NewScope:
    """Reads the new scope's registry, and requests that are written from now on."""

    def __init__(self, settings: ScopeSettings, holders: Holders, on_request: Callable[[ResyncRequest], None]) -> None:
        self._settings = settings
        self._names = topics(settings)
        self._holders = holders
        self._on_request = on_request
        self._consumer = reader(settings)

    def begin(self) -> None:
        """Read the registry to its end. Raises ProcessError."""
        ends = log_ends(self._settings, places_of((self._names.workers,)))
        control = [TopicPartition(*place, OFFSET_END) for place in places_of((self._names.kv_control,))]
        assign(self._consumer, [*(TopicPartition(*place, OFFSET_BEGINNING) for place in ends), *control])
        reached: dict[Place, int] = {}
        deadline_s = time.monotonic() + REGISTRY_TIMEOUT_S
        while any(reached.get(place, 0) < end for place, end in ends.items()):
            if time.monotonic() > deadline_s:
                raise ProcessError(f"the registry of {self._settings.app_id} cannot be read", remedy="Start again")
            for message in consume(self._consumer, READ_BATCH_RECORDS, _POLL_S):
                place, offset = place_of(message)
                reached[place] = offset + (message.error() is None)
                self._take(message)

    def read(self) -> None:
        """Take what has arrived."""
        for message in consume(self._consumer, READ_BATCH_RECORDS, 0):
            self._take(message)

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def _take(self, message: Message) -> None:
        place, offset = place_of(message)
        error = message.error()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                check_error(error, *place, offset)
            return
        key, value = message.key() or b"", message.value()
        if place[0] == self._names.kv_control.name:
            try:
                self._on_request(decode_resync(value, self._settings.schema_ids))
            except BadRecord:
                pass  # bridges skip it as well
            return
        worker_id = worker_of_key(key)
        is_copy = any(header[0] == COPIED for header in message.headers() or ())
        if worker_id is not None and not is_copy:
            self._holders.note_new(worker_id, decoded_worker(self._settings, key, value))


def place_of(message: Message) -> tuple[Place, int]:
    """The partition and the offset of a message; -1 for what an error lacks."""
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    return (topic or "", -1 if partition is None else partition), -1 if offset is None else offset

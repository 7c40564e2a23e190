"""What a router of some models keeps (`models`), and what it reads again when a worker changes to one of them.

What lives here: which workers' records are skipped, by the models that the registry says they serve, and the reading of
a partition from its beginning for workers whose records were skipped. What must not: the fold of records (view), what
belongs to a model by its own record (bookings, pooled blocks), and consuming topics to their ends (topic_readers).

Records of a worker that the registry does not have yet are kept: it may serve one of the models. Once it is registered
with another one, they are dropped, and from then on skipped. If it then changes to one of the models, nothing is known
of what was skipped. So its ranks stay unknown, and answers for them degraded, while a thread reads the partition again.
That thread reads on until it is not behind the reader of all partitions, and hands the worker over at its own position.
It folds progress records last, since they are what makes a rank known.

State: the workers that are skipped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from streams.core.ids import RankId, WorkerId
from streams.core.workers import Worker
from streams.errors import BadRecord, UnknownModel
from streams.kafka.clients import assign, consume, partition_of, reader, worker_key
from streams.router_api.knowledge.topic_readers import key_and_value
from streams.settings import RouterSettings
from streams.tables.records import PROGRESS_KEY
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: As for other readers (topic_readers).
_CONSUME_RECORDS = 500
_POLL_S = 0.1

#: How long after a failure a partition is read again.
_RETRY_S = 1.0

#: A key of the index has a byte for its kind, then the id of its worker.
_KEY_OF_WORKER = slice(1, 9)

#: One record of the index.
IndexRecord = tuple[bytes, bytes | None]


class Knowledge(Protocol):
    """Where records of the index go, and which ranks they are about."""

    def fold_index_batch(self, records: Sequence[IndexRecord], live: bool = True) -> list[tuple[int, BadRecord]]:
        """Fold records; returns those that cannot be used, each with its position."""

    def forget_ranks(self, ranks: Iterable[RankId]) -> None:
        """Drop what the index has of these ranks."""


@dataclass(slots=True)
class Returning:
    """A worker whose partition is read again. progress: its last progress records, by key, which are folded last."""

    worker: Worker
    progress: dict[bytes, bytes | None] = field(default_factory=dict)


class ServedModels:
    """Which workers' records a router keeps. Thread-safe.

    models: empty for all models; then nothing is ever skipped.
    """

    def __init__(self, models: Iterable[str], n_partitions: int, knowledge: Knowledge) -> None:
        self.models = frozenset(models)
        self._knowledge = knowledge
        self._n_partitions = n_partitions
        # Held while records are folded, so that no record of a worker is on its way when it is skipped or kept.
        self._lock = threading.RLock()
        self._skipped: dict[bytes, WorkerId] = {}
        self._reports_skipped: set[bytes] = set()
        self._returning: dict[bytes, Returning] = {}
        self._kept_from: dict[
            bytes, int
        ] = {}  # offset from which the reader of all partitions folds a worker's records
        self._folded_to: dict[int, int] = {}  # by partition, the offset that follows what that reader has folded
        self.changed = threading.Event()  # a worker is to be read again

    def serves(self, model: str) -> bool:
        """Whether this router serves a model."""
        return not self.models or model in self.models

    def check(self, model: str) -> None:
        """Raise UnknownModel if this router does not serve a model."""
        if not self.serves(model):
            raise UnknownModel(
                f"this router does not serve model {model!r}",
                remedy="Ask a router whose setting models names it, or has no value",
                models=sorted(self.models),
            )

    def skips_reports_of(self, key: bytes) -> bool:
        """Whether a key of worker-metrics belongs to a worker that is skipped."""
        return key in self._reports_skipped

    # -- the registry --------------------------------------------------------------------------------------------------

    def note_worker(self, worker: Worker, before: Worker | None) -> None:
        """A worker was registered or changed. before: its former registration.

        One that left the registry stays as it is: what was skipped of it is still missing.
        """
        if not self.models:
            return
        key = _key_of(worker.worker_id)
        with self._lock:
            if worker.model not in self.models:
                was_returning = self._returning.pop(key, None) is not None
                self._kept_from.pop(key, None)
                if was_returning or key not in self._skipped:
                    self._skipped[key] = worker.worker_id
                    self._reports_skipped.add(worker_key(worker.worker_id))
                    self._knowledge.forget_ranks({*worker.ranks(), *(() if before is None else before.ranks())})
            elif key in self._skipped and key not in self._returning:
                self._returning[key] = Returning(worker)
                self._reports_skipped.discard(worker_key(worker.worker_id))
                self.changed.set()

    def begin_again(self) -> None:
        """All topics are read again from their beginnings, into an empty view."""
        with self._lock:
            for of in (self._skipped, self._reports_skipped, self._returning, self._kept_from, self._folded_to):
                of.clear()

    # -- the reader of all partitions ----------------------------------------------------------------------------------

    def fold(self, messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:
        """Fold those messages of the index that are kept; returns those that cannot be used, each with its position."""
        if not self.models:
            return self._knowledge.fold_index_batch(list(map(key_and_value, messages)), live)
        with self._lock:
            records: list[IndexRecord] = []
            positions: list[int] = []
            for position, message in enumerate(messages):
                key, offset, partition = message.key() or b"", message.offset() or 0, message.partition() or 0
                self._folded_to[partition] = offset + 1
                of = key[_KEY_OF_WORKER]
                if of not in self._skipped and offset >= self._kept_from.get(of, 0):
                    records.append((key, message.value()))
                    positions.append(position)
            bad = self._knowledge.fold_index_batch(records, live) if records else []
            return [(positions[at], exc) for at, exc in bad]

    # -- reading again -------------------------------------------------------------------------------------------------

    def partitions_to_read(self) -> list[int]:
        """The partitions of workers that are to be read again."""
        with self._lock:
            self.changed.clear()
            return sorted(
                {partition_of(each.worker.worker_id, self._n_partitions) for each in self._returning.values()}
            )

    def begin_reading(self, partition: int) -> Mapping[bytes, Returning]:
        """Return the workers that this reading of a partition is for. Nothing is known of them at its beginning."""
        with self._lock:
            of = {
                key: each
                for key, each in self._returning.items()
                if partition_of(each.worker.worker_id, self._n_partitions) == partition
            }
            for each in of.values():
                each.progress.clear()
                self._knowledge.forget_ranks(each.worker.ranks())
            return of

    def fold_again(
        self, partition: int, messages: Sequence[Message], of: Mapping[bytes, Returning], position: int
    ) -> bool:
        """Fold the messages of some workers that are read again; returns whether that is over, and they are kept.

        position: the offset that follows the messages. It is over once the reader of all partitions is not ahead.
        """
        with self._lock:
            # A worker may have changed again, or all topics are read again.
            wanted = {key: each for key, each in of.items() if self._returning.get(key) is each}
            records: list[IndexRecord] = []
            for message in messages:
                key = message.key() or b""
                if key[_KEY_OF_WORKER] not in wanted:
                    continue
                if key.startswith(PROGRESS_KEY.prefix):
                    wanted[key[_KEY_OF_WORKER]].progress[key] = message.value()
                else:
                    records.append((key, message.value()))
            if records:
                self._knowledge.fold_index_batch(records, False)
            if wanted and position < self._folded_to.get(partition, 0):
                return False
            for key, each in wanted.items():
                del self._returning[key], self._skipped[key]
                self._kept_from[key] = position
                self._knowledge.fold_index_batch(list(each.progress.items()), False)
                log.info("worker %d serves %s now, and its records were read", each.worker.worker_id, each.worker.model)
            return True


class Rereading:
    """The thread that reads partitions again."""

    def __init__(self, settings: RouterSettings, topic: TopicSpec, served: ServedModels) -> None:
        self._settings = settings
        self._topic = topic
        self._served = served
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rereading", daemon=True)

    def start(self) -> None:
        """Begin to wait for workers that are to be read again; a router of all models has none."""
        if self._served.models:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._served.changed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._served.changed.wait()
            for partition in self._served.partitions_to_read():
                if self._stopping.is_set():
                    return
                try:
                    self._read(partition)
                except Exception:
                    log.exception("partition %d is read again from its beginning", partition)
                    self._served.changed.set()
                    self._stopping.wait(_RETRY_S)

    def _read(self, partition: int) -> None:
        of, consumer = self._served.begin_reading(partition), reader(self._settings)
        try:
            assign(consumer, [TopicPartition(self._topic.name, partition, OFFSET_BEGINNING)])
            position = 0
            while not self._stopping.is_set():
                messages, position = _consumed(consumer, position)
                if self._served.fold_again(partition, messages, of, position):
                    return
        finally:
            consumer.close()


def _key_of(worker_id: WorkerId) -> bytes:
    """A worker's part of the keys of its records."""
    return worker_id.to_bytes(8, "big")


def _consumed(consumer: Consumer, position: int) -> tuple[list[Message], int]:
    """What was read after a position, and the position after it; raises KafkaException for an error."""
    messages: list[Message] = []
    for message in consume(consumer, _CONSUME_RECORDS, _POLL_S):
        error, offset = message.error(), message.offset()
        if error is None:
            messages.append(message)
            position = max(position, (offset or 0) + 1)
        elif error.code() == KafkaError._PARTITION_EOF:
            position = max(position, offset or 0)  # after any marker
        else:
            raise KafkaException(error)
    return messages, position

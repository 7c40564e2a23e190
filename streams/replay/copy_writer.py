"""Writing the records of one scope to another one.

What lives here: the producer, the names of topics on both sides, and what is skipped. What must not: when a record is
copied (copying, moving).

State: which workers have moved, and the records that Kafka has not taken yet.
"""

from __future__ import annotations

from confluent_kafka import KafkaError, Message

from streams.core.workers import Worker
from streams.engines.rank_records import event_producer
from streams.engines.registry_reader import worker_of_key
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.clients import partition_of, worker_key
from streams.kafka.records import decode_batch, decode_worker, encode_batch
from streams.replay.copying import Holders, Waiting, copies_of
from streams.settings import ScopeSettings
from streams.topics import topics

#: Marks what a move writes to the registry of the new scope, so that another run knows which leases are copies.
COPIED = "kvstreams.copied"

#: Pause while Kafka's client has no space.
_FULL_S = 0.02


class CopyWriter:
    """Writes copies. Owner of the producer.

    n_copied: records written. n_skipped: records that are no valid ones of the old scope, and are dead letters there.
    """

    def __init__(self, old: ScopeSettings, new: ScopeSettings, holders: Holders) -> None:
        self._old, self._new = old, new
        self._holders = holders
        self._names, known = topics(old), topics(new)
        self._topic_of = {
            self._names.kv_events.name: known.kv_events.name,
            self._names.cxl_events.name: known.cxl_events.name,
            self._names.workers.name: known.workers.name,
            self._names.worker_metrics.name: known.worker_metrics.name,
        }
        self.kafka = event_producer(new)
        self._failed: list[str] = []
        self.n_copied = 0
        self.n_skipped = 0

    def copy_batch(self, partition: int, key: bytes, value: bytes | None) -> None:
        """Copy a record of kv-events, unless its worker has moved."""
        try:
            batch = decode_batch(value, self._old.schema_ids)
        except BadRecord:
            self.n_skipped += 1
            return
        worker_id = batch.rank.worker_id
        if worker_key(worker_id) != key or partition_of(worker_id, self._old.partitions) != partition:
            self.n_skipped += 1
        elif not self._holders.has_moved(worker_id):
            for each in copies_of(batch, self._holders.lease_ms.get(worker_id)):
                self._put(self._names.kv_events.name, key, value if each is batch else encode_batch(each))

    def copy_transition(self, partition: int, key: bytes, value: bytes | None) -> None:
        """Copy a record of cxl-events, unless its worker has moved."""
        worker_id = worker_of_key(key)
        if worker_id is None or partition_of(worker_id, self._old.partitions) != partition:
            self.n_skipped += 1
        elif not self._holders.has_moved(worker_id):
            self._put(self._names.cxl_events.name, key, value)

    def copy_record(self, record: Waiting) -> None:
        """Copy a record of the registry or of worker-metrics, unless it is a worker's that has moved."""
        worker_id = worker_of_key(record.key)
        if record.topic == self._names.workers.name and worker_id is not None:
            if self._holders.has_moved(worker_id):
                return
            self._holders.note_copied(worker_id, decoded_worker(self._old, record.key, record.value))
        self._put(record.topic, record.key, record.value)

    def flush(self, timeout_s: float) -> bool:
        """Return whether Kafka has taken everything in time. Raises KvStreamsError if it has refused a record."""
        n_left = self.kafka.flush(timeout_s)
        if self._failed:
            raise KvStreamsError(
                f"Kafka at {self._new.kafka} refuses a record: {self._failed[0]}",
                remedy="Check that Kafka, and start the command again",
            )
        return n_left == 0

    def _put(self, topic: str, key: bytes, value: bytes | None) -> None:
        headers: list[tuple[str, str | bytes | None]] = []
        if topic == self._names.workers.name:
            headers.append((COPIED, b""))
        while True:
            try:
                self.kafka.produce(
                    self._topic_of[topic], key=key, value=value, headers=headers, on_delivery=self._on_delivery
                )
            except BufferError:
                self.kafka.poll(_FULL_S)
                continue
            self.n_copied += 1
            return

    def _on_delivery(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failed.append(error.str())


def decoded_worker(settings: ScopeSettings, key: bytes, value: bytes | None) -> Worker | None:
    """Decode a worker's record of the registry; None for a tombstone, any other record, and one that is not valid."""
    if value is None or worker_of_key(key) is None:
        return None
    try:
        return decode_worker(value, settings.schema_ids)
    except BadRecord:
        return None  # every reader skips it

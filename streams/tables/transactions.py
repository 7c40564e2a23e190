"""The transactions of one partition: its producer, and the commit that is effect 5 of a batch.

What lives here: the transactional producer, what one transaction contains, and where the changelogs end after it. What
must not: the order of effects (partition), what a record means (the reducers), RocksDB.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.errors import BadRecord, TableError
from streams.kafka.avro_frames import codec
from streams.kafka.clients import as_record, dead_letter_headers, producer
from streams.kafka.outage import Repetitions, repeated
from streams.settings import AgentSettings
from streams.tables.reducer import Outgoing, SourceRecord
from streams.tables.store import ChangelogPosition, Changes, TableSpec
from streams.tables.wiring import PartitionWiring
from streams.topics import EVENT_BYTES_MAX

log = logging.getLogger(__name__)

#: `init_transactions` waits for an older producer's transaction to end. Measured: 0.5 s; the transaction's timeout is
#: 10 s.
INIT_TIMEOUT_S = 30.0

#: A commit is repeated until the broker answers. After this time the partition is opened again, which finds out whether
#: the transaction was committed.
COMMIT_TIMEOUT_S = 30.0

#: The client collects a transaction's records for longer than it takes to hand them over, and the commit sends them
#: all. Otherwise it sends the first ones at once, and polls without a pause until it may send the others
#: (kafka.clients.IN_FLIGHT_FREELY).
_UNTIL_COMMIT_MS = 1000

#: The fault point inside an open transaction: its records are in the log, its commit is not.
IN_TRANSACTION = 0

#: A worker's key. A dead letter keeps no other key, and none of the record's headers: they may contain anything.
_WORKER_KEY = re.compile(rb"[0-9]{1,20}")


class TransactionWriter:
    """Writes the transactions of one partition. Owner: the partition's thread.

    topic_ids: by topic, set when the partition opens. changelog_ends: by changelog, the offset after the last record
    that was read or written.
    """

    def __init__(self, partition: int, wiring: PartitionWiring) -> None:
        self._partition = partition
        self._wiring = wiring
        self._producer: Producer | None = None
        self.topic_ids: dict[str, str] = {}
        self.changelog_ends: dict[str, int] = {}
        self._letters_logged = Repetitions()  # by topic and reason
        # By source, the offset of the last record that this writer wrote there itself (an expiry), and when its
        # transaction had been committed, monotonic, in ms.
        self._last_in_source: dict[str, tuple[int, int]] = {}
        self._written_at_ms = 0  # the time of the last transaction's rows

    def open(self) -> None:
        """Create the producer and fence every older one, so that only this one can write the changelogs from now on."""
        self._producer = table_producer(self._wiring.settings, self._partition)
        self._producer.init_transactions(INIT_TIMEOUT_S)

    def close(self) -> None:
        """Drop the producer; an open transaction is aborted by the next owner."""
        self._producer = None

    def commit(
        self,
        changes: Changes,
        outgoing: Sequence[Outgoing],
        dead: Sequence[tuple[SourceRecord, BadRecord]],
    ) -> dict[TableSpec, ChangelogPosition]:
        """Write everything in one transaction; returns the position of every table's changelog after it.

        Raises TableError if the transaction does not commit, or if a changelog was recreated.
        """
        kafka = self._producer
        assert kafka is not None
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append(error)
            else:
                record = as_record(message)
                first[record.topic] = min(first.get(record.topic, record.offset), record.offset)
                last[record.topic] = max(last.get(record.topic, -1), record.offset)

        # All rows of a transaction have one time, and no row an earlier one than those before it. So a time divides the
        # logs of both tables between the same two transactions (replay.cuts).
        self._written_at_ms = at_ms = max(self._wiring.now_ms(), self._written_at_ms)
        kafka.begin_transaction()
        # Only the offsets of the first and the last record of each changelog are needed, and a callback costs more than
        # a record. A record that is not delivered makes the commit fail, with or without a callback.
        for table, records in changes.items():
            topic = table.changelog_topic
            for callback, some in ((delivered, records[:1]), (None, records[1:-1]), (delivered, records[1:][-1:])):
                for key, value in some:
                    produce(kafka, topic, self._partition, key, value, callback, at_ms=at_ms)
        for out in outgoing:
            produce(kafka, out.topic, self._partition, out.key, out.value, delivered)
        for source_record, exc in dead:
            self._produce_dead_letter(kafka, source_record, exc, delivered)
        if self._wiring.on_effect is not None:
            # The commit also flushes. Only a fault point needs the records in the log before that.
            kafka.flush(COMMIT_TIMEOUT_S)
            self._wiring.on_effect(IN_TRANSACTION)
        commit_until_answered(kafka)
        if failed:
            raise TableError(f"a record of a committed transaction was not delivered: {failed[0].str()}")
        for topic, end in self.changelog_ends.items():
            if first.get(topic, end) < end:
                raise TableError(
                    f"{topic} [{self._partition}] was recreated: wrote offset {first[topic]}, expected {end} or more"
                )
        self.changelog_ends.update({topic: last[topic] + 1 for topic in self.changelog_ends if topic in last})
        committed_ms = time.monotonic_ns() // 1_000_000
        self._last_in_source.update(
            {source.name: (last[source.name], committed_ms) for source in self._wiring.sources if source.name in last}
        )
        # This includes changelogs that have no record in the transaction: only this producer writes them, so their ends
        # have not moved, and the copy of a table that seldom changes does not become too old to use.
        now_ms = self._wiring.now_ms()
        return {
            table: ChangelogPosition(
                self.topic_ids[table.changelog_topic], self.changelog_ends[table.changelog_topic], now_ms
            )
            for table in self._wiring.tables
        }

    def marker_follows(self, source: str, applied: int, end: int, asked_ms: int) -> bool:
        """Whether the only offset between an applied record and the end of a source is a marker of this writer.

        Consumers never receive markers. asked_ms: when the end was asked for. It must be after the commit, since before
        that the offset may be another producer's record.
        """
        if source not in self._last_in_source:
            return False
        last, committed_ms = self._last_in_source[source]
        return last == applied == end - 2 and asked_ms > committed_ms

    def _produce_dead_letter(
        self,
        kafka: Producer,
        record: SourceRecord,
        exc: BadRecord,
        on_delivery: Callable[[KafkaError | None, Message], None],
    ) -> None:
        n = self._letters_logged.happened((record.topic, exc.reason), time.monotonic())
        if n is not None:
            where = record.topic, record.partition, record.offset
            log.warning("dead letter from %s [%d] at %d: %s%s", *where, exc, repeated(n))
        size = len(record.value or b"")
        headers = dead_letter_headers(record.topic, exc, size, record.partition, record.offset)
        schemas = {source.name: source.schema for source in self._wiring.sources}
        value = dead_letter_value(record.value, schemas.get(record.topic), self._wiring.settings.schema_ids)
        key = record.key if record.key is not None and _WORKER_KEY.fullmatch(record.key) else None
        produce(kafka, self._wiring.dead_letters.name, self._partition, key, value, on_delivery, headers)


def dead_letter_value(
    value: bytes | None, schema: str | None, schema_ids: Mapping[str, int] | None = None
) -> bytes | None:
    """Return what a dead letter keeps of a record: the record as received if it has the topic's schema.

    The schemas of kvstreams have no fields for tokens or text of prompts. Of any other record only the length is kept,
    as JSON: it may be an engine's own message, for example.
    """
    if value is None:
        return None
    try:
        if schema is not None and len(value) <= EVENT_BYTES_MAX:
            codec(schema).decode(value, schema_ids)
            return value
    except BadRecord:
        pass
    return json.dumps({"bytes": len(value)}).encode()


def scope_of(settings: AgentSettings, partition: int) -> str:
    """Return a partition's name, unique among all scopes: of its producer, and of its copy under `tables_path`."""
    return f"{settings.app_id}-{partition}"


def table_producer(settings: AgentSettings, partition: int) -> Producer:
    """Create the one producer that may write a partition's tables; its `init_transactions` fences all older ones."""
    return producer(
        settings,
        **{
            "transactional.id": scope_of(settings, partition),
            "transaction.timeout.ms": settings.transaction_timeout_ms,
            "linger.ms": _UNTIL_COMMIT_MS,
        },
    )


def produce(
    kafka: Producer,
    topic: str,
    partition: int,
    key: bytes | None,
    value: bytes | None,
    on_delivery: Callable[[KafkaError | None, Message], None] | None,
    headers: list[tuple[str, str | bytes | None]] | None = None,
    at_ms: int = 0,
) -> None:
    """Pass a record to the client, and wait while the client's own queue is full. at_ms: its time; 0 is now."""
    while True:
        try:
            kafka.produce(topic, value, key, partition, on_delivery, timestamp=at_ms, headers=headers)
            return
        except BufferError:
            kafka.poll(0.1)  # the queue empties as the broker answers


def commit_until_answered(kafka: Producer) -> None:
    """Repeat the commit while it times out: the broker may have done it already, and an abort would then fail."""
    deadline = time.monotonic() + COMMIT_TIMEOUT_S
    while True:
        try:
            kafka.commit_transaction(max(deadline - time.monotonic(), 0.1))
            return
        except KafkaException as exc:
            error: KafkaError = exc.args[0]
            retry = error.retriable() or error.code() == KafkaError._TIMED_OUT
            if error.fatal() or error.txn_requires_abort() or not retry or time.monotonic() >= deadline:
                raise TableError(f"the transaction did not commit: {error.str()}") from exc

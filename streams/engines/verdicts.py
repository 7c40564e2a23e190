"""The agents' verdict on a transition that a script has just sent, read from the records that the agents write.

What lives here: watching a partition's dead letters, partition record and parked rows for offsets of `cxl-events`. What
must not: the decision itself (tables.pooled_block_table). An agent writes all three in the transaction that processes
the transition, so they are consistent. They are in different topics, however. Once the partition record shows that the
transition was processed, the other topics are therefore read up to their current ends.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from streams.core.ids import WorkerId
from streams.cxl.records import PARKED_KEY, decode_parked
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.clients import assign, consume, partition_of, reader
from streams.kafka.log_offsets import log_end
from streams.settings import ScopeSettings
from streams.tables.records import PARTITION_KEY, decode_partition
from streams.topics import topics

log = logging.getLogger(__name__)

_READ_RECORDS = 500
_POLL_S = 0.1


class VerdictStatus(enum.Enum):
    """How far the agents have processed a transition."""

    DECIDED = enum.auto()  # applied, except for the records in `refused`
    PARKED = enum.auto()  # it waits for its batch of kv-events, or for an earlier parked transition
    UNKNOWN = enum.auto()  # no agent has processed it yet


@dataclass(frozen=True, slots=True)
class TransitionVerdict:
    """The outcome of the records of one transition. refused: reason and message of each record refused."""

    status: VerdictStatus
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def applied(self) -> bool:
        """Whether all blocks have entered the state."""
        return self.status is VerdictStatus.DECIDED and not self.refused


class VerdictWatch:
    """Reads what the agents write about a worker's partition from now on. Not thread-safe.

    It must exist before the transition is sent. _refused: reason and message by offset in `cxl-events`; _parked: offset
    in `cxl-events` by key of the parked row; _read: the next offset to read, by topic.
    """

    def __init__(self, settings: ScopeSettings, worker_id: WorkerId) -> None:
        """Start to read; raises KvStreamsError if no broker answers."""
        names = topics(settings)
        self._settings = settings
        self._source = names.cxl_events.name
        self._letters, self._table = names.dead_letters.name, names.cxl_changelog.name
        self._partition = partition_of(worker_id, settings.partitions)
        self._applied = -1
        self._refused: dict[int, tuple[str, str]] = {}
        self._parked: dict[bytes, int] = {}
        self._read: dict[str, int] = {}
        watched = (self._letters, self._table, names.index_changelog.name)
        try:
            starts = {topic: log_end(settings, topic, self._partition) for topic in watched}
        except KafkaException as exc:
            raise KvStreamsError(f"cannot read the agents' verdicts: {exc.args[0].str()}") from exc
        self._consumer = reader(settings)
        assign(self._consumer, [TopicPartition(topic, self._partition, start) for topic, start in starts.items()])

    def verdict(self, offsets: Collection[int], timeout_s: float) -> TransitionVerdict:
        """Wait at most `timeout_s` until the agents have decided these offsets of `cxl-events`; return the outcome.

        Raises KvStreamsError if the topics cannot be read.
        """
        deadline = time.monotonic() + timeout_s
        sent = frozenset(offsets)
        ends: dict[str, int] | None = None
        while time.monotonic() < deadline:
            for message in consume(self._consumer, _READ_RECORDS, _POLL_S):
                self._take(message)
            if self._status(sent) is not VerdictStatus.DECIDED:
                ends = None
            elif ends is None:
                try:
                    ends = {t: log_end(self._settings, t, self._partition) for t in (self._letters, self._table)}
                except KafkaException as exc:
                    raise KvStreamsError(f"cannot read the agents' verdicts: {exc.args[0].str()}") from exc
            elif all(self._read.get(topic, -1) >= end for topic, end in ends.items()):
                return self._verdict(VerdictStatus.DECIDED, sent)
        status = self._status(sent)
        # DECIDED would be premature: a refusal may be in records that were not read before the timeout.
        return self._verdict(VerdictStatus.UNKNOWN if status is VerdictStatus.DECIDED else status, sent)

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _status(self, sent: frozenset[int]) -> VerdictStatus:
        if self._applied < max(sent):
            return VerdictStatus.UNKNOWN
        return VerdictStatus.PARKED if sent.intersection(self._parked.values()) else VerdictStatus.DECIDED

    def _verdict(self, status: VerdictStatus, sent: frozenset[int]) -> TransitionVerdict:
        return TransitionVerdict(status, tuple(why for offset, why in sorted(self._refused.items()) if offset in sent))

    def _take(self, message: Message) -> None:
        topic, offset, error = message.topic() or "", message.offset() or 0, message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                self._read[topic] = offset
            elif error.fatal() or not (error.retriable() or error.code() == KafkaError._TRANSPORT):
                raise KvStreamsError(f"cannot read the agents' verdicts: {error.str()}")
            return
        self._read[topic] = offset + 1
        try:
            if topic == self._letters:
                self._take_letter(message)
            elif topic == self._table:
                self._take_row(message.key() or b"", message.value())
            elif message.key() == PARTITION_KEY.pack(self._partition):
                self._take_partition(message.key() or b"", message.value() or b"")
        except (BadRecord, ValueError) as exc:  # a record of a foreign writer, which contains no verdict
            log.warning("%s [%d]: the record at offset %d is skipped: %s", topic, self._partition, offset, exc)

    def _take_letter(self, message: Message) -> None:
        pairs: Any = message.headers() or []
        headers = {name: value.decode() for name, value in pairs if isinstance(value, bytes)}
        if headers.get("kvstreams.topic") == self._source and headers.get("kvstreams.partition") == str(
            self._partition
        ):
            why = headers.get("kvstreams.reason", ""), headers.get("kvstreams.message", "")
            self._refused[int(headers["kvstreams.offset"])] = why

    def _take_row(self, key: bytes, value: bytes | None) -> None:
        if not key.startswith(PARKED_KEY.prefix):
            return
        if value is None:
            self._parked.pop(key, None)
        else:
            self._parked[key] = decode_parked(key, value)[1].offset

    def _take_partition(self, key: bytes, value: bytes) -> None:
        for source in decode_partition(key, value).sources:
            if source.topic == self._source:
                self._applied = max(self._applied, source.applied_offset)

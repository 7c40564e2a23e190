"""Where the logs of partitions begin and end, and which offset they had at a time, as the broker says.

What lives here: the calls and their errors. What must not: reading records to their ends (tables.changelog), and
watching topics while a process runs (topic_watch).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import OFFSET_INVALID, Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from streams.kafka.clients import ANSWER_TIMEOUT_S, assign, reader
from streams.settings import ScopeSettings

#: A partition of a topic, by its name.
Place = tuple[str, int]

#: Interval at which a partition without a leader is asked about again, and the errors that mean this.
_LEADER_POLL_S = 0.05
_NO_LEADER_YET = frozenset(
    {KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}
)

#: librdkafka ends a call at its timeout; its futures are waited for a little longer.
_FUTURE_SLACK_S = 1.0


def ask_offsets(
    client: AdminClient, wanted: Mapping[Place, OffsetSpec], *, committed: bool, timeout_s: float
) -> tuple[dict[Place, int], dict[Place, KafkaException]]:
    """Ask once for an offset of each partition; returns those that are known, and why the others are not.

    committed: whether the end is that of committed records, and not of the log. An offset is -1 if no record has the
    time that was asked for, or a later one.
    """
    if not wanted:
        return {}, {}
    listed = client.list_offsets(
        {TopicPartition(*place): spec for place, spec in wanted.items()},
        isolation_level=IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
        request_timeout=timeout_s,
    )
    # Waiting for one after the other would wake this thread for each partition.
    concurrent.futures.wait(listed.values(), timeout_s + _FUTURE_SLACK_S)
    found: dict[Place, int] = {}
    failed: dict[Place, KafkaException] = {}
    for where, future in listed.items():
        place = where.topic, where.partition
        try:
            found[place] = future.result(0).offset
        except KafkaException as exc:
            failed[place] = exc
        except TimeoutError:
            failed[place] = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    # If the leader is dead, the client reports no error, and goes on asking the dead one (confluent-kafka 2.16).
    for place in [place for place, offset in found.items() if offset == OFFSET_INVALID]:
        del found[place]
        failed[place] = KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
    for topic in {topic for (topic, _), exc in failed.items() if _has_no_leader(exc)}:
        with contextlib.suppress(KafkaException):
            client.list_topics(topic, timeout_s)  # by which the client learns who leads now
    return found, failed


def list_offsets(
    client: AdminClient, wanted: Mapping[Place, OffsetSpec], *, committed: bool, wait_s: float
) -> dict[Place, int]:
    """Return what `ask_offsets` does, of every partition. Waits for those without a leader, at most about wait_s.

    Raises KafkaException.
    """
    deadline = time.monotonic() + wait_s
    found, left = dict[Place, int](), wanted
    while True:
        listed, failed = ask_offsets(client, left, committed=committed, timeout_s=ANSWER_TIMEOUT_S)
        found |= listed
        if not failed:
            return found
        lasting = next((exc for exc in failed.values() if not _has_no_leader(exc)), None)
        if lasting is not None or time.monotonic() > deadline:
            raise lasting or next(iter(failed.values()))
        left = {place: wanted[place] for place in failed}
        time.sleep(_LEADER_POLL_S)


def log_end(settings: ScopeSettings, topic: str, partition: int) -> int:
    """Offset after everything in a partition's log, including markers and open transactions.

    Raises KafkaException if no broker answers.
    """
    consumer = reader(settings, **{"isolation.level": "read_uncommitted"})
    try:
        return _watermarks(consumer, TopicPartition(topic, partition))[1]
    finally:
        consumer.close()


@dataclass(frozen=True, slots=True)
class FirstOffset:
    """Result of `first_offset`.

    low: start of the log. first: offset of the first record at or after the given one, or None. end: if there is no
    such record, the offset that a reader has reached, after any markers.
    """

    low: int
    first: int | None
    end: int = 0


def first_offset(settings: ScopeSettings, topic: str, partition: int, wanted: int) -> FirstOffset:
    """Find the first record at or after offset `wanted`, since retention and markers leave offsets without records.

    Raises KafkaException if no broker answers.
    """
    consumer = reader(settings)
    try:
        low, high = _watermarks(consumer, TopicPartition(topic, partition))
        if high <= wanted:
            return FirstOffset(low, None, wanted)
        assign(consumer, [TopicPartition(topic, partition, max(low, wanted))])
        for message in consumer.consume(1, ANSWER_TIMEOUT_S):
            error, offset = message.error(), message.offset()
            if error is None:
                return FirstOffset(low, offset, wanted)
            if error.code() == KafkaError._PARTITION_EOF and offset is not None:
                return FirstOffset(low, None, max(offset, wanted))
        return FirstOffset(low, None, wanted)
    finally:
        consumer.close()


def _watermarks(consumer: Consumer, where: TopicPartition) -> tuple[int, int]:
    """Start and end of a partition's log. A partition that was just created may have no leader for a moment."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            low, high = consumer.get_watermark_offsets(where, timeout=ANSWER_TIMEOUT_S)
            return low, high
        except KafkaException as exc:
            if not _has_no_leader(exc) or time.monotonic() > deadline:
                raise
            time.sleep(_LEADER_POLL_S)


def _has_no_leader(exc: KafkaException) -> bool:
    return exc.args[0].code() in _NO_LEADER_YET

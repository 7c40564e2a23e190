"""Reading one partition of a changelog, committed records only, from an offset to its end, or behind its owner.

What lives here: the read loops and their errors. What must not: what a record means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition

from streams.errors import OffsetLost, TableError
from streams.kafka.clients import Record, as_record, assign, consume, fetched_in_intervals, reader
from streams.settings import ScopeSettings

#: Records passed on at a time.
READ_BATCH_RECORDS = 1000

#: A broker that sends nothing for this long, not even the end of the partition, does not answer.
READ_STALL_S = 30.0

#: How long the broker waits for more records before it reports the end of the partition.
END_WAIT_MS = 5

_POLL_S = 0.5

#: How often a standby fetches. Its new owner reads as much when it takes over, which is less than it costs to read each
#: transaction by itself.
FOLLOW_EVERY_S = 0.25

#: How long a standby may take to notice that it is to stop.
_FOLLOW_POLL_S = 0.05


def read_to_end(
    settings: ScopeSettings,
    topic: str,
    partition: int,
    start: int | None,
    on_records: Callable[[list[Record]], None],
) -> int:
    """Read as read_messages does, but pass a Record for each message, which costs more per record."""
    return read_messages(
        settings, topic, partition, start, lambda messages: on_records([as_record(message) for message in messages])
    )


def read_messages(
    settings: ScopeSettings,
    topic: str,
    partition: int,
    start: int | None,
    on_messages: Callable[[list[Message]], None],
) -> int:
    """Read one topic as read_all does; returns the offset after its end."""
    return read_all(settings, {topic: start}, partition, on_messages)[topic]


def read_all(
    settings: ScopeSettings,
    start: Mapping[str, int | None],
    partition: int,
    on_messages: Callable[[list[Message]], None],
) -> dict[str, int]:
    """Read topics, each from an offset (None is the beginning), to their ends; returns the offsets after these.

    The consumer reports an end; counting records does not find it, since transaction markers have offsets too. Raises
    OffsetLost if an offset is not in its log, TableError if nothing arrives for READ_STALL_S.
    """
    names = ", ".join(start)
    consumer = reader(settings, **{"fetch.wait.max.ms": END_WAIT_MS})
    try:
        assign(
            consumer,
            [
                TopicPartition(topic, partition, OFFSET_BEGINNING if offset is None else offset)
                for topic, offset in start.items()
            ],
        )
        silent_s = 0.0
        ends: dict[str, int] = {}
        while len(ends) < len(start):
            messages = consume(consumer, READ_BATCH_RECORDS, _POLL_S)
            silent_s = 0.0 if messages else silent_s + _POLL_S
            if silent_s > READ_STALL_S:
                raise TableError(f"{names} [{partition}] sent nothing for {READ_STALL_S:g} s")
            records, errors = _split(messages)
            if records:
                on_messages(records)
                for message in records:
                    ends.pop(message.topic() or "", None)  # more was appended
            for error, topic, offset in errors:
                if error.code() == KafkaError._PARTITION_EOF:
                    ends[topic] = offset
                else:
                    check_error(error, topic or names, partition, start.get(topic))
        return ends
    except KafkaException as exc:
        raise TableError(f"{names} [{partition}] cannot be read: {exc.args[0].str()}") from exc
    finally:
        consumer.close()


def follow_messages(
    settings: ScopeSettings,
    start: Mapping[str, int],
    partition: int,
    on_messages: Callable[[list[Message]], None],
    until: Callable[[], bool],
) -> None:
    """Read topics from offsets on, until `until`. Raises OffsetLost if an offset is not in the log."""
    names = ", ".join(start)
    consumer = reader(settings, **fetched_in_intervals(FOLLOW_EVERY_S))
    try:
        assign(consumer, [TopicPartition(topic, partition, offset) for topic, offset in start.items()])
        while not until():
            records, errors = _split(consume(consumer, READ_BATCH_RECORDS, _FOLLOW_POLL_S))
            if records:
                on_messages(records)
            for error, topic, offset in errors:
                if error.code() != KafkaError._PARTITION_EOF:
                    check_error(error, topic or names, partition, offset)
    except KafkaException as exc:
        raise TableError(f"{names} [{partition}] cannot be read: {exc.args[0].str()}") from exc
    finally:
        consumer.close()


def _split(messages: list[Message]) -> tuple[list[Message], list[tuple[KafkaError, str, int]]]:
    """Separate records from errors, each with its topic and offset; "" and -1 for none."""
    errors = [message for message in messages if message.error() is not None]
    if not errors:
        return messages, []
    found = []
    for message in errors:
        error, offset = message.error(), message.offset()
        assert error is not None
        found.append((error, message.topic() or "", -1 if offset is None else offset))
    return [message for message in messages if message.error() is None], found


def check_error(error: KafkaError, topic: str, partition: int, offset: int | None) -> None:
    """Raise for an error from which the client does not recover by itself."""
    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise OffsetLost(f"{topic} [{partition}] has no offset {offset}")
    if not error.retriable() and error.code() not in _TRANSIENT_ERRORS:
        raise TableError(f"{topic} [{partition}] cannot be read: {error.str()}")


#: Errors while a broker restarts; the client recovers by itself.
_TRANSIENT_ERRORS = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT})

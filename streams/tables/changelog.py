"""Reading one partition of a changelog, committed records only, from an offset to its end.

What lives here: the read loop and its errors. What must not: what a record means.
"""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition

from streams.errors import OffsetLost, TableError
from streams.kafka.clients import Record, as_record, assign, consume, reader
from streams.settings import ScopeSettings

#: Records passed on at a time.
READ_BATCH_RECORDS = 1000

#: A broker that sends nothing for this long, not even the end of the partition, does not answer.
READ_STALL_S = 30.0

#: How long the broker waits for more records before it reports the end of the partition.
END_WAIT_MS = 5

_POLL_S = 0.5


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
    """Read from `start` (None is the beginning) to the partition's end; returns the offset after it.

    The consumer reports the end; counting records does not find it, since transaction markers have offsets too. Raises
    OffsetLost if the offset is not in the log, TableError if nothing arrives for READ_STALL_S.
    """
    consumer = reader(settings, **{"fetch.wait.max.ms": END_WAIT_MS})
    try:
        assign(consumer, [TopicPartition(topic, partition, OFFSET_BEGINNING if start is None else start)])
        silent_s = 0.0
        while True:
            messages = consume(consumer, READ_BATCH_RECORDS, _POLL_S)
            silent_s = 0.0 if messages else silent_s + _POLL_S
            if silent_s > READ_STALL_S:
                raise TableError(f"{topic} [{partition}] sent nothing for {READ_STALL_S:g} s")
            errors = [message for message in messages if message.error() is not None]
            records = [message for message in messages if message.error() is None] if errors else messages
            if records:
                on_messages(records)
            for message in errors:
                error = message.error()
                assert error is not None
                if error.code() == KafkaError._PARTITION_EOF:
                    end = message.offset()
                    assert end is not None
                    return end
                if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    raise OffsetLost(f"{topic} [{partition}] has no offset {start}")
                if not error.retriable() and error.code() not in _TRANSIENT_ERRORS:
                    raise TableError(f"{topic} [{partition}] cannot be read: {error.str()}")
    except KafkaException as exc:
        raise TableError(f"{topic} [{partition}] cannot be read: {exc.args[0].str()}") from exc
    finally:
        consumer.close()


#: Errors while a broker restarts; the client recovers by itself.
_TRANSIENT_ERRORS = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT})

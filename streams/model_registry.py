"""The block size of each model as a record of the scope: reading and writing the records, refusing contradictions.

What lives here: the models of the topic `workers` for processes that are not routers, and the one way of writing them.
What must not: what follows for requests (router_api.knowledge.fleet_view), and workers and pools of the same topic.

The log decides. The first record of a model wins until its tombstone, which only `kvstreams reset` writes. A writer
writes only if it read none, then reads the log again: if another record came first, it writes that one again, so that
compaction keeps it, and is refused if the sizes differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from streams.core.workers import ServedModel
from streams.errors import BadRecord, BlockSizeContradicted, KvStreamsError
from streams.kafka.clients import (
    ANSWER_TIMEOUT_S,
    Record,
    as_record,
    assign,
    consume,
    partition_of_key,
    producer,
    reader,
    require_topic,
)
from streams.kafka.records import MODELS
from streams.settings import ScopeSettings
from streams.topics import topics

_READ_RECORDS = 1000
_POLL_S = 0.2

#: How long nothing may arrive. A broker that answers, but has no processor, needs more than the usual timeout.
_READ_TIMEOUT_S = 30.0


def writer_name(kind: str) -> str:
    """Return how a process that writes a model's record names itself there. kind: for example `bridge`."""
    return f"{kind} {os.uname().nodename}:{os.getpid()}"


def block_size_contradicted(settings: ScopeSettings, served: ServedModel) -> BlockSizeContradicted:
    """Return the error of a process whose settings contradict a model's record."""
    own = settings.block_size_of(served.name)
    return BlockSizeContradicted(
        f"this process's settings give model {served.name} blocks of {own} tokens, but in scope "
        f"{settings.topic_prefix!r} it has blocks of {served.block_size} (written by {served.writer})",
        remedy=f"Set block_size, or model_block_sizes for this model, to {served.block_size}; or use another "
        "topic_prefix; or run `kvstreams reset`, which empties the scope, to give the model another size",
        model=served.name,
        block_size=own,
        scope_block_size=served.block_size,
    )


def registered_models(settings: ScopeSettings) -> dict[str, ServedModel]:
    """Return the models of the registry by name. Raises KvStreamsError if it cannot be read."""
    models: dict[str, ServedModel] = {}
    for record in _read(settings, range(settings.partitions)):
        if record.value is None:
            models.pop(MODELS.keys.parse(record.key), None)
            continue
        model = _decoded(settings, record)
        if model is not None:
            models.setdefault(model.name, model)
    return models


def check_models(settings: ScopeSettings) -> None:
    """Raise BlockSizeContradicted if the settings contradict any model of the registry, which must exist."""
    for _, served in sorted(registered_models(settings).items()):
        _check(settings, served)


def check_model(settings: ScopeSettings, model: str) -> None:
    """Raise BlockSizeContradicted if a model has a record that contradicts the settings, and KvStreamsError."""
    require_topic(settings, topics(settings).workers.name)
    first, _ = _first_and_last(settings, model)
    if first is not None:
        _check(settings, first)


def claim_model(settings: ScopeSettings, model: str, writer: str) -> ServedModel:
    """Return a model's record, which is written from the settings if there is none.

    Raises BlockSizeContradicted if the record has another block size than the settings, and KvStreamsError if the
    registry cannot be read or written. writer: shown to people.
    """
    require_topic(settings, topics(settings).workers.name)  # fails quickly, with a clear message, if no broker answers
    first, last = _first_and_last(settings, model)
    if first is None:
        _write(settings, ServedModel(model, settings.block_size_of(model), writer, time.time_ns() // 1_000_000))
        first, last = _first_and_last(settings, model)
    if first is None or last is None:
        raise KvStreamsError(f"the record of model {model} was deleted while it was being written")
    if last.block_size != first.block_size:
        _write(settings, first)
    _check(settings, first)
    return first


def delete_models(settings: ScopeSettings) -> int:
    """Delete the records of all models, so that the next writer decides; returns their number."""
    live: dict[bytes, None] = {}
    for record in _read(settings, range(settings.partitions)):
        if record.value is None:
            live.pop(record.key, None)
        else:
            live[record.key] = None
    write_registry(settings, [(key, None) for key in live], "models")
    return len(live)


def _check(settings: ScopeSettings, served: ServedModel) -> None:
    if served.block_size != settings.block_size_of(served.name):
        raise block_size_contradicted(settings, served)


def _first_and_last(settings: ScopeSettings, model: str) -> tuple[ServedModel | None, ServedModel | None]:
    """Return the first and the last record of a model after its last tombstone; None if there is none."""
    key = MODELS.keys.pack(model)
    first: ServedModel | None = None
    last: ServedModel | None = None
    for record in _read(settings, [partition_of_key(key, settings.partitions)]):
        if record.key != key:
            continue
        if record.value is None:
            first = last = None
            continue
        last = _decoded(settings, record) or last
        first = first or last
    return first, last


def _decoded(settings: ScopeSettings, record: Record) -> ServedModel | None:
    try:
        return MODELS.decode_row(record.key, record.value, settings.schema_ids)
    except BadRecord:
        return None  # another application wrote it; routers count and log it


def _read(settings: ScopeSettings, partitions: Iterable[int]) -> list[Record]:
    """Return the records of models in these partitions of the registry, in log order, up to the partitions' ends."""
    name = topics(settings).workers.name
    left = set(partitions)
    records: list[Record] = []
    # The broker then reports the end of a partition at once.
    consumer = reader(settings, **{"fetch.wait.max.ms": 5})
    try:
        assign(consumer, [TopicPartition(name, partition, OFFSET_BEGINNING) for partition in sorted(left)])
        deadline = time.monotonic() + _READ_TIMEOUT_S
        while left:
            messages = consume(consumer, _READ_RECORDS, _POLL_S)
            if messages:
                deadline = time.monotonic() + _READ_TIMEOUT_S
            elif time.monotonic() > deadline:
                raise KvStreamsError(f"could not read {name} to its end: nothing arrived for {_READ_TIMEOUT_S:g} s")
            for message in messages:
                error = message.error()
                if error is None:
                    record = as_record(message)
                    if record.key.startswith(MODELS.keys.prefix):
                        records.append(record)
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition() or 0)
                elif error.fatal() or not (error.retriable() or error.code() in _TRANSIENT_ERRORS):
                    raise KvStreamsError(f"cannot read {name}: {error.str()}")
    except KafkaException as exc:
        raise KvStreamsError(f"cannot read {name}: {exc.args[0].str()}") from exc
    finally:
        consumer.close()
    return records


def _write(settings: ScopeSettings, model: ServedModel) -> None:
    write_registry(settings, [(MODELS.keys.pack(model.name), MODELS.encode(model))], "models")


def write_registry(settings: ScopeSettings, records: Iterable[tuple[bytes, bytes | None]], what: str) -> None:
    """Write records of the registry by their keys, None for a tombstone, and wait until Kafka has them.

    what: the kind of the records, for the error. Raises KvStreamsError.
    """
    failed: list[str] = []
    # A record that is not delivered in time is dropped, since this process reports that it was not written.
    kafka = producer(settings, **{"message.timeout.ms": int(ANSWER_TIMEOUT_S * 1000)})
    for key, value in records:
        kafka.produce(
            topics(settings).workers.name,
            key=key,
            value=value,
            on_delivery=lambda error, _: failed.append(error.str()) if error is not None else None,
        )
    if kafka.flush(ANSWER_TIMEOUT_S + 1.0) or failed:
        raise KvStreamsError(f"Kafka did not accept the records of {what}: {failed[0] if failed else 'no answer'}")


#: Errors while a broker restarts; the client recovers by itself.
_TRANSIENT_ERRORS = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT})

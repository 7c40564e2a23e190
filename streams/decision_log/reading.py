"""Reading the decision log from Kafka.

What lives here: finding where a time begins in each partition, reading to the end, and counting what cannot be read.
What must not: what is made of the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, Message
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from streams.decision_log.records import LoggedBatch, decode_batch
from streams.errors import BadRecord, NotReady
from streams.kafka.clients import ANSWER_TIMEOUT_S, TOPICS_REMEDY, admin, describe_topics
from streams.kafka.log_offsets import list_offsets
from streams.settings import ScopeSettings
from streams.tables.changelog import read_messages
from streams.topics import topics


@dataclass(slots=True)
class ReadLog:
    """What was read. batches: those that `wanted` selects. n_records: all of them. n_bad: those that nobody can read.

    first_ms, last_ms: when the first and the last record were appended; 0 without any.
    """

    batches: list[LoggedBatch] = field(default_factory=list)
    n_records: int = 0
    n_bad: int = 0
    first_ms: int = 0
    last_ms: int = 0

    @property
    def warning(self) -> str:
        """What people have to know about the records that cannot be read; empty without any."""
        return f"{self.n_bad} records of the decision log cannot be read and are left out" if self.n_bad else ""


def read_log(settings: ScopeSettings, since_ms: int, wanted: Callable[[bytes], bool] = lambda _: True) -> ReadLog:
    """Read every record that may contain decisions since a time. wanted: whether a value is to be decoded.

    Raises NotReady if the topic does not exist, and KvStreamsError if Kafka cannot be read.
    """
    spec = topics(settings).router_decisions
    state = describe_topics(settings, [spec])[spec.name]
    if state is None:
        raise NotReady(f"there is no topic {spec.name}, so no decision was recorded", remedy=TOPICS_REMEDY)
    log = ReadLog()

    def take(messages: list[Message]) -> None:
        for message in messages:
            at_ms, value = message.timestamp()[1], message.value()
            log.n_records += 1
            log.first_ms = min(log.first_ms or at_ms, at_ms)
            log.last_ms = max(log.last_ms, at_ms)
            if value is None or not wanted(value):
                continue
            try:
                log.batches.append(decode_batch(value, settings.schema_ids))
            except BadRecord:
                log.n_bad += 1

    for partition, offset in _starts(settings, spec.name, state.partitions, since_ms):
        read_messages(settings, spec.name, partition, offset, take)
    return log


def _starts(settings: ScopeSettings, topic: str, n_partitions: int, since_ms: int) -> Iterator[tuple[int, int]]:
    """The first offsets of a time, of the partitions that have any record since then."""
    since: OffsetSpec = OffsetSpec.for_timestamp(max(0, since_ms))
    wanted = {(topic, number): since for number in range(n_partitions)}
    try:
        found = list_offsets(admin(settings), wanted, committed=True, wait_s=ANSWER_TIMEOUT_S)
    except KafkaException as exc:
        raise NotReady(f"{topic} cannot be read: {exc.args[0].str()}") from exc
    return ((number, offset) for (_, number), offset in found.items() if offset >= 0)


def nothing_recorded(since: str) -> str:
    """Explain to people why there are no records since a time."""
    return (
        f"no router of this scope has recorded anything since {since}: the decision log is off by default. "
        "Set decision_log=on (KVSTREAMS_DECISION_LOG=on) for its routers"
    )

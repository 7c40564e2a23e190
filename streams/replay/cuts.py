"""Where a replay ends in each partition of the topics that routers read.

What lives here: asking the broker where logs begin and end, and where they were at a time. What must not: reading
topics as a router does (rebuilding), and for how long topics keep their history (window).

A partition's tables stop between two transactions. Their rows have the time of their transaction, which ends with the
partition record. So the last partition record before a moment shows where both of its changelogs are cut, by the times
of rows alone: the end of a transaction in the log has a later time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from streams.errors import KvStreamsError
from streams.kafka.clients import admin, assign, consume, reader
from streams.kafka.log_offsets import Place, list_offsets
from streams.settings import ScopeSettings
from streams.tables.records import PARTITION_KEY
from streams.topics import TopicSpec, topics

#: How long a partition may have no leader. Controllers take 9 s to notice that a broker has died, by default.
LEADER_WAIT_S = 30.0

#: An owner writes a partition record with each transaction and at least once per second. A transaction has up to some
#: thousand rows.
_SEARCHED_RECORDS = 2_000
_SEARCH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Cut:
    """A moment, and the offset in each partition of the topics before which records are included.

    moment_ms: since the epoch. begins: where each log begins, for the progress of reading it.
    """

    moment_ms: int
    begins: Mapping[Place, int]
    ends: Mapping[Place, int]


def time_text(at_ms: int) -> str:
    """A time as people and `--until` write it."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def cut_now(settings: ScopeSettings, specs: Iterable[TopicSpec]) -> Cut:
    """Return the ends of the committed records of these topics. Raises KvStreamsError if no broker answers."""
    places = places_of(specs)
    return Cut(time.time_ns() // 1_000_000, log_begins(settings, places), log_ends(settings, places))


def cut_at(settings: ScopeSettings, specs: Iterable[TopicSpec], moment_ms: int) -> Cut:
    """Return where these topics were at a moment, by the times of their records. Raises KvStreamsError."""
    known, places = topics(settings), places_of(specs)
    begins = log_begins(settings, places)
    ends = offsets_at(settings, dict.fromkeys(places, moment_ms))
    index, pooled = known.index_changelog.name, known.cxl_changelog.name
    last = {
        partition: _last_transaction(settings, (topic, partition), begins[topic, partition], end, moment_ms)
        for (topic, partition), end in ends.items()
        if topic == index
    }
    # A partition whose owner had not begun at this moment has nothing.
    ends |= {(index, n): begins[index, n] if found is None else found.offset for n, found in last.items()}
    of_pooled = {(pooled, n): found.at_ms for n, found in last.items() if found is not None and (pooled, n) in ends}
    ends |= {(pooled, n): begins[pooled, n] for n in last if (pooled, n) in ends}
    for place, first in offsets_at(settings, of_pooled).items():
        row = _last_before(settings, place, first, of_pooled[place] + 1)
        ends[place] = first if row is None else row.offset
    return Cut(moment_ms, begins, ends)


@dataclass(frozen=True, slots=True)
class _Found:
    """A record: the offset after it, and its time."""

    offset: int
    at_ms: int


def _last_transaction(settings: ScopeSettings, place: Place, begin: int, near: int, moment_ms: int) -> _Found | None:
    """Find the last partition record before a moment; None if there is none. near: an offset close to it.

    Earlier records are read in growing pieces of the log.
    """
    n_records = _SEARCHED_RECORDS
    while True:
        first = max(begin, near - n_records)
        found = _last_before(settings, place, first, moment_ms, PARTITION_KEY.prefix)
        if found is not None or first <= begin:
            return found
        n_records *= 8


def _last_before(
    settings: ScopeSettings, place: Place, first: int, moment_ms: int, prefix: bytes = b""
) -> _Found | None:
    """Find the last record before a moment, from an offset on, among those whose keys begin with a prefix.

    The broker's own search by time does not suffice here: it finds the end of a transaction too, which has the time at
    which it was committed, when the next one may have begun.
    """
    found = None
    consumer = reader(settings)
    try:
        assign(consumer, [TopicPartition(*place, first)])
        deadline = time.monotonic() + _SEARCH_TIMEOUT_S
        while time.monotonic() < deadline:
            for message in consume(consumer, _SEARCHED_RECORDS, 0.1):
                error, offset, key = message.error(), message.offset(), message.key()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KvStreamsError(
                        f"{place[0]} [{place[1]}] cannot be read: {error.str()}",
                        remedy="Check Kafka (`kvstreams doctor`), and start again",
                    )
                if error is not None:
                    return found
                if key is None or not key.startswith(prefix):
                    continue
                assert offset is not None
                at_ms = message.timestamp()[1]
                if at_ms >= moment_ms:
                    return found
                found = _Found(offset + 1, at_ms)
    finally:
        consumer.close()
    raise KvStreamsError(
        f"{place[0]} [{place[1]}] sent nothing for {_SEARCH_TIMEOUT_S:g} s",
        remedy="Check Kafka (`kvstreams doctor`), and start again",
    )


def places_of(specs: Iterable[TopicSpec]) -> list[Place]:
    """Every partition of these topics."""
    return [(spec.name, partition) for spec in specs for partition in range(spec.partitions)]


def log_begins(settings: ScopeSettings, places: Iterable[Place]) -> dict[Place, int]:
    """Return where the logs of these partitions begin."""
    earliest: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
    return _listed(settings, dict.fromkeys(places, earliest))


def log_ends(settings: ScopeSettings, places: Iterable[Place]) -> dict[Place, int]:
    """Return where the committed records of these partitions end."""
    latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    return _listed(settings, dict.fromkeys(places, latest))


def offsets_at(settings: ScopeSettings, times_ms: Mapping[Place, int]) -> dict[Place, int]:
    """Return the offset of the first record of each partition with its time or a later one; its end without one."""
    found = _listed(settings, {place: OffsetSpec.for_timestamp(at_ms) for place, at_ms in times_ms.items()})
    after = log_ends(settings, [place for place, offset in found.items() if offset < 0])
    return found | after


def _listed(settings: ScopeSettings, wanted: Mapping[Place, OffsetSpec]) -> dict[Place, int]:
    try:
        return list_offsets(admin(settings), wanted, committed=True, wait_s=LEADER_WAIT_S)
    except KafkaException as exc:
        raise KvStreamsError(
            f"Kafka at {settings.kafka} does not say where the logs of {settings.app_id} end: {exc}",
            remedy="Check Kafka (`kvstreams doctor`), and start again",
        ) from exc

"""Emptying a scope: what `kvstreams reset` and the knob `router_reset_states` do. Persisting is the default.

What lives here: who must not be there, what is emptied, in which order. What must not: deciding that it is to be done.

Emptied are the tables (their changelogs and this machine's copies of them), `kv-events`, `cxl-events`, `kv-control`
and `router-loads`. The registry stays, since it is its operators' and its bridges', and so do the dead letters, which
are somebody's evidence.

No topic is deleted and made again. Its offsets would begin anew, and whoever lives and stands at an offset of the old
one takes a record of the new one for the next, or for one that it knows; between the two a living client has a broker
that creates topics make it with the wrong partitions; and it takes rights that nobody here has otherwise. Instead,
what is deleted with time is cut at its end, behind which offsets go on; and in what is compacted alone, which Kafka
refuses to cut, every key gets a tombstone, in transactions that fence the partition's owner: so also a router that goes
on reading ends up empty, and an agent that was overlooked comes back to an empty table.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass

from confluent_kafka import OFFSET_END, KafkaException, Producer, TopicPartition

from streams.errors import KvStreamsError, ScopeInUse, TableError
from streams.kafka import CREATE_TIMEOUT_S, Record, admin, first_offset, group_members, log_end
from streams.settings import Settings, tables_path
from streams.tables.changelog import read_to_end
from streams.tables.records import partition_key
from streams.tables.store import PartitionStore
from streams.tables.transactions import INIT_TIMEOUT_S, commit_until_answered, produce, scope_of, table_producer
from streams.topics import topics

log = logging.getLogger(__name__)

#: Tombstones of one transaction; at 30,000 a second it is over long before its timeout.
TOMBSTONES_AT_ONCE = 10_000

#: A living agent and a reset by force fence each other; whoever is quicker is done.
ATTEMPTS_MAX = 5

#: Offsets before a changelog's end among which an owner's last word is looked for: it is in every transaction, and none
#: has more than some thousands of records.
TAIL_OFFSETS = 10_000

_REMEDY = (
    "Stop every worker of this scope and try again (one that was killed counts for session_timeout_s more), or take "
    "another topic_prefix, which needs no reset; --force or router_reset_force empties it under them"
)


@dataclass(frozen=True, slots=True)
class Emptied:
    """What was done. records: of the tables; partitions: of events, requests and loads; copies: local folders."""

    records: int
    partitions: int
    copies: int


def reset_scope(settings: Settings, *, force: bool = False) -> Emptied:
    """Empty a scope whose topics exist.

    Raises ScopeInUse while an agent lives, unless `force`, and KvStreamsError where Kafka does not do it; then it is
    done in part, and once more empties the rest.
    """
    if not force:
        _check_unused(settings)
    log.warning("%s is emptied: index, loads and events", settings.app_id)
    # Events first: an index that is empty before them would be filled from them by whoever starts in between.
    cut = _cut(settings)
    records = sum(_delete_index(settings, partition) for partition in range(settings.partitions))
    return Emptied(records, cut, _remove_copies(settings))


def _check_unused(settings: Settings) -> None:
    members = group_members(settings)
    if members is None:
        raise ScopeInUse(f"the workers of {settings.app_id} are being given partitions", remedy=_REMEDY)
    if members:
        hosts = ", ".join(sorted({member.host.lstrip("/") for member in members}))
        raise ScopeInUse(
            f"{len(members)} workers of {settings.app_id} live, on {hosts}", remedy=_REMEDY, members=len(members)
        )
    for partition in range(settings.partitions):
        age_ms = time.time_ns() // 1_000_000 - _last_word_ms(settings, partition)
        # Of a clock that is ahead the record is younger than nothing; it was written all the same.
        if age_ms < settings.stale_after_ms:
            raise ScopeInUse(
                f"partition {partition} of {settings.app_id} was written {max(age_ms, 0)} ms ago", remedy=_REMEDY
            )


def _last_word_ms(settings: Settings, partition: int) -> int:
    """When an owner wrote a partition's record last; 0 where nobody did."""
    topic = topics(settings).index_changelog.name
    last_ms = 0

    def look(records: list[Record]) -> None:
        nonlocal last_ms
        for record in records:
            if record.key == partition_key(partition) and record.value is not None:
                last_ms = max(last_ms, record.timestamp_ms)

    end = log_end(settings, topic, partition)
    found = first_offset(settings, topic, partition, max(end - TAIL_OFFSETS, 0))
    if found.first is not None:
        read_to_end(settings, topic, partition, found.first, look)
    return last_ms


def _cut(settings: Settings) -> int:
    """Delete all records of the topics that are not compacted alone; their offsets go on."""
    names = topics(settings)
    where = [
        TopicPartition(spec.name, partition, OFFSET_END)
        for spec in (names.kv_events, names.cxl_events, names.kv_control, names.router_loads)
        for partition in range(spec.partitions)
    ]
    client = admin(settings)
    asked = client.delete_records(where, operation_timeout=CREATE_TIMEOUT_S, request_timeout=CREATE_TIMEOUT_S)
    for each, future in asked.items():
        try:
            future.result(2 * CREATE_TIMEOUT_S)
        except KafkaException as exc:
            raise KvStreamsError(f"{each.topic} [{each.partition}] cannot be emptied: {exc.args[0].str()}") from exc
    return len(where)


def _delete_index(settings: Settings, partition: int) -> int:
    """Write a tombstone for every key of a partition of the tables; gives how many there were."""
    names = topics(settings)
    ends: dict[str, int | None] = {names.index_changelog.name: None, names.cxl_changelog.name: None}
    live: set[tuple[str, bytes]] = set()

    def fold(records: list[Record]) -> None:
        for record in records:
            (live.discard if record.value is None else live.add)((record.topic, record.key))

    def read() -> None:
        for topic, end in ends.items():
            ends[topic] = read_to_end(settings, topic, partition, end, fold)

    n_deleted = 0
    for attempt in range(1, ATTEMPTS_MAX + 1):
        read()
        try:
            kafka = table_producer(settings, partition)
            kafka.init_transactions(INIT_TIMEOUT_S)
            # At once: an agent that lives is fenced from here on, and fences us as soon as it has noticed.
            n_deleted += _write_tombstones(kafka, partition, sorted(live))
            read()
            n_deleted += _write_tombstones(kafka, partition, sorted(live))
        except (KafkaException, TableError) as exc:
            if attempt == ATTEMPTS_MAX:
                raise TableError(f"partition {partition} cannot be emptied: {exc}", remedy=_REMEDY) from exc
            log.warning("partition %d is emptied once more: %s", partition, exc)
        else:
            break
    return n_deleted


def _write_tombstones(kafka: Producer, partition: int, keys: list[tuple[str, bytes]]) -> int:
    for first in range(0, len(keys), TOMBSTONES_AT_ONCE):
        kafka.begin_transaction()
        for topic, key in keys[first : first + TOMBSTONES_AT_ONCE]:
            produce(kafka, topic, partition, key, None, None)
        commit_until_answered(kafka)
    return len(keys)


def _remove_copies(settings: Settings) -> int:
    """Remove this scope's copies under data_dir; one that a process holds follows by the tombstones."""
    removed = 0
    for partition in range(settings.partitions):
        name = scope_of(settings, partition)
        path = tables_path(settings) / name
        if path.exists():
            try:
                PartitionStore(path, name, settings.rocksdb_cache_mb).close()
            except TableError as exc:
                log.warning("a copy is left as it is: %s", exc)
                continue
            shutil.rmtree(path)
            removed += 1
    return removed

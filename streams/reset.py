"""Emptying a scope, for `kvstreams reset` and the setting `router_reset_states`. By default, state is kept.

What lives here: which processes must not be running, what is emptied, and in which order. What must not: the decision
to reset.

A reset empties the tables (their changelogs, and this machine's copies of them), `kv-events`, `cxl-events`,
`kv-control` and `router-loads`, and deletes the models' block sizes, so that the scope can be used with others. It sets
the feeds of LMCache's events back, so that their chunks are published again. It keeps the rest of the registry
(workers, cordons, pools), which operators and bridges wrote, and the dead letters, which are evidence of faults.

No topic is deleted and recreated, for three reasons. The offsets of the new topic would start over, so a running reader
could mistake a record of the new topic for the next one of the old topic, or for one that it has already read. Between
deletion and creation, a running client could cause a broker with automatic topic creation to create the topic with the
wrong number of partitions. And deleting topics needs permissions that nothing else here needs. Instead, topics with a
retention time are truncated at their ends, from which offsets continue. Kafka refuses to truncate topics that are only
compacted; there every key gets a tombstone, in transactions that fence the partition's owner. A router that keeps
reading therefore ends up empty, and so does the table of an agent that was still running.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass

from confluent_kafka import OFFSET_END, KafkaException, Producer, TopicPartition

from streams.errors import KvStreamsError, ScopeInUse, TableError
from streams.kafka.clients import CREATE_TIMEOUT_S, Record, admin, group_members
from streams.kafka.log_offsets import first_offset, log_end
from streams.lmcache.resetting import set_back
from streams.model_registry import delete_models
from streams.settings import AgentSettings, tables_path
from streams.tables.changelog import read_to_end
from streams.tables.records import PARTITION_KEY
from streams.tables.store import PartitionStore
from streams.tables.transactions import INIT_TIMEOUT_S, commit_until_answered, produce, scope_of, table_producer
from streams.topics import topics

log = logging.getLogger(__name__)

#: Tombstones of one transaction; at 30,000 per second it commits long before its timeout.
TOMBSTONES_AT_ONCE = 10_000

#: A running agent and a forced reset fence each other, so several attempts may be needed.
ATTEMPTS_MAX = 5

#: Offsets before a changelog's end that are searched for the latest partition record. Every transaction has one, and no
#: transaction has more than a few thousand records.
TAIL_OFFSETS = 10_000

_REMEDY = (
    "Stop every worker of this scope and try again (Kafka lists a killed worker for another session_timeout_s), or use "
    "another topic_prefix, which needs no reset; --force or router_reset_force resets it while they run"
)


@dataclass(frozen=True, slots=True)
class Emptied:
    """What was emptied.

    records: keys of the tables. partitions: partitions of the topics with events, requests and loads. copies: folders
    of local copies. models: records of models. feeds: feeds of LMCache that begin again.
    """

    records: int
    partitions: int
    copies: int
    models: int
    feeds: int


def reset_scope(settings: AgentSettings, *, force: bool = False) -> Emptied:
    """Empty a scope whose topics exist.

    Raises ScopeInUse while an agent is running, unless `force`. Raises KvStreamsError if Kafka refuses; the reset is
    then incomplete, and another one empties the rest.
    """
    if not force:
        _check_unused(settings)
    log.warning("resetting %s: index, loads and events are deleted", settings.app_id)
    # Events first: an agent that starts in between would fill an empty index from them.
    n_truncated = _truncate(settings)
    records = sum(_delete_index(settings, partition) for partition in range(settings.partitions))
    return Emptied(records, n_truncated, _remove_copies(settings), delete_models(settings), set_back(settings))


def _check_unused(settings: AgentSettings) -> None:
    members = group_members(settings)
    if members is None:
        raise ScopeInUse(f"the workers of {settings.app_id} are being assigned partitions", remedy=_REMEDY)
    if members:
        hosts = ", ".join(sorted({member.host.lstrip("/") for member in members}))
        raise ScopeInUse(
            f"{len(members)} workers of {settings.app_id} are running, on {hosts}", remedy=_REMEDY, members=len(members)
        )
    for partition in range(settings.partitions):
        age_ms = time.time_ns() // 1_000_000 - _last_written_ms(settings, partition)
        # The age is negative if the writer's clock is ahead; the record was written all the same.
        if age_ms < settings.stale_after_ms:
            raise ScopeInUse(
                f"partition {partition} of {settings.app_id} was written {max(age_ms, 0)} ms ago", remedy=_REMEDY
            )


def _last_written_ms(settings: AgentSettings, partition: int) -> int:
    """Return when an owner last wrote the partition record; 0 if it never did."""
    topic = topics(settings).index_changelog.name
    last_ms = 0

    def note(records: list[Record]) -> None:
        nonlocal last_ms
        for record in records:
            if record.key == PARTITION_KEY.pack(partition) and record.value is not None:
                last_ms = max(last_ms, record.timestamp_ms)

    end = log_end(settings, topic, partition)
    offsets = first_offset(settings, topic, partition, max(end - TAIL_OFFSETS, 0))
    if offsets.first is not None:
        read_to_end(settings, topic, partition, offsets.first, note)
    return last_ms


def _truncate(settings: AgentSettings) -> int:
    """Delete all records of the topics that have a retention time; their offsets continue."""
    names = topics(settings)
    where = [
        TopicPartition(spec.name, partition, OFFSET_END)
        for spec in (names.kv_events, names.cxl_events, names.kv_control, names.router_loads)
        for partition in range(spec.partitions)
    ]
    client = admin(settings)
    deletions = client.delete_records(where, operation_timeout=CREATE_TIMEOUT_S, request_timeout=CREATE_TIMEOUT_S)
    for partition, future in deletions.items():
        try:
            future.result(2 * CREATE_TIMEOUT_S)
        except KafkaException as exc:
            raise KvStreamsError(
                f"{partition.topic} [{partition.partition}] cannot be emptied: {exc.args[0].str()}"
            ) from exc
    return len(where)


def _delete_index(settings: AgentSettings, partition: int) -> int:
    """Write a tombstone for every key of a partition of the tables; returns the number of keys."""
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
            # At once: a running agent is fenced from here on, and fences us as soon as it notices.
            n_deleted += _write_tombstones(kafka, partition, sorted(live))
            read()
            n_deleted += _write_tombstones(kafka, partition, sorted(live))
        except (KafkaException, TableError) as exc:
            if attempt == ATTEMPTS_MAX:
                raise TableError(f"partition {partition} cannot be emptied: {exc}", remedy=_REMEDY) from exc
            log.warning("resetting partition %d again: %s", partition, exc)
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


def _remove_copies(settings: AgentSettings) -> int:
    """Delete this scope's copies under data_dir; the tombstones empty a copy that another process has open."""
    removed = 0
    for partition in range(settings.partitions):
        name = scope_of(settings, partition)
        path = tables_path(settings) / name
        if path.exists():
            try:
                store = PartitionStore(path, name, settings.rocksdb_cache_mb)
            except TableError as exc:
                log.warning("a local copy was not deleted: %s", exc)
                continue
            # Moved while its lock is held, so that a running worker cannot open files that are about to be deleted.
            # RocksDB deletes old files by itself a moment after it was closed.
            removed_path = path.with_suffix(".removed")
            shutil.rmtree(removed_path, ignore_errors=True)
            path.rename(removed_path)
            store.close()
            shutil.rmtree(removed_path, ignore_errors=True)
            removed += 1
    return removed

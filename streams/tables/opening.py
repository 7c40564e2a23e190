"""Opening a partition: its RocksDB, its changelogs read to their ends, and its reducer loaded from both.

What lives here: when a local copy is rebuilt, when a table starts over, and at which offset each source continues. What
must not: the batches that follow (partition), how RocksDB and a changelog are read (store, changelog).

A copy that cannot be brought to its changelog's end is emptied and rebuilt from the changelog. A table whose changelog
was recreated while its owner was writing is torn: the new changelog has later changes, but lacks the rows written
before. Such a table is emptied on Kafka as well, and is rebuilt from the sources.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Message

from streams.errors import KvStreamsError, OffsetLost, TableError
from streams.kafka.clients import describe_topics
from streams.settings import tables_path
from streams.tables.changelog import read_messages
from streams.tables.records import PARTITION_KEY, PartitionRecord, SourceProgress, decode_partition
from streams.tables.reducer import Reducer
from streams.tables.store import ChangelogPosition, PartitionStore, TableSpec
from streams.tables.transactions import TransactionWriter, scope_of
from streams.tables.wiring import PartitionWiring
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: Rows deleted per transaction when a table starts over.
TOMBSTONES_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class OpenedTables:
    """An open partition. sources: the progress in each source topic. recreated: sources whose offsets start over."""

    store: PartitionStore
    reducer: Reducer[Any]
    sources: dict[str, SourceProgress]
    recreated: frozenset[str]


def open_tables(
    partition: int, wiring: PartitionWiring, writer: TransactionWriter, check_needed: Callable[[], None]
) -> OpenedTables:
    """Open a partition, and set its writer's topic ids and changelog ends.

    writer: has fenced every older writer. check_needed: raises once the partition no longer needs to be opened. Raises
    KvStreamsError or KafkaException if the partition cannot be opened now; the store is then closed.
    """
    scope = scope_of(wiring.settings, partition)
    store = PartitionStore(tables_path(wiring.settings) / scope, scope, wiring.settings.rocksdb_cache_mb)
    try:
        return _Opening(partition, wiring, writer, store, check_needed).run()
    except BaseException:
        store.close()
        raise


class _Opening:
    """One attempt to open a partition."""

    def __init__(
        self,
        partition: int,
        wiring: PartitionWiring,
        writer: TransactionWriter,
        store: PartitionStore,
        check_needed: Callable[[], None],
    ) -> None:
        self._partition = partition
        self._wiring = wiring
        self._writer = writer
        self._store = store
        self._check_needed = check_needed
        self._tombstones_kept_ms: dict[str, int] = {}  # by changelog: delete.retention.ms

    def run(self) -> OpenedTables:
        wiring = self._wiring
        states = describe_topics(wiring.settings, (*wiring.sources, *_changelog_specs(wiring)))
        if missing := sorted(name for name, state in states.items() if state is None):
            # The copy on disk is kept, since the topic may return.
            raise TableError(f"Kafka has no topic {', '.join(missing)}", remedy="`kvstreams topics create` creates it")
        self._writer.topic_ids = {name: state.topic_id for name, state in states.items() if state is not None}
        self._tombstones_kept_ms = {
            name: int(state.config["delete.retention.ms"])
            for name, state in states.items()
            if state is not None and "delete.retention.ms" in state.config
        }
        reducer, record = self._load_or_rebuild()
        if record is not None and self._is_torn(record):
            self._clear_tables()
            reducer, record = wiring.make_reducer(), None
            for table in wiring.tables:
                reducer.load(table, iter(()))
        return self._with_sources(reducer, record)

    def _load_or_rebuild(self) -> tuple[Reducer[Any], PartitionRecord | None]:
        """Load; a store that cannot be continued is emptied first, and its changelogs are read from their starts."""
        store = self._store
        try:
            stale = [reason for table in self._wiring.tables if (reason := self._stale(table, store.position(table)))]
            if stale:
                store.rebuild(stale[0])
            return self._load()
        except OffsetLost as exc:
            store.rebuild(str(exc))
        except KvStreamsError:
            raise  # a changelog that cannot be read, or a full disk, does not mean that the files are damaged
        except Exception as exc:
            store.rebuild(f"it cannot be read: {exc}", aside=True)
        return self._load()

    def _stale(self, table: TableSpec, position: ChangelogPosition | None) -> str | None:
        """Return why a store at this position cannot be brought to its changelog's end; None if it can."""
        if position is None:
            return None
        if position.topic_id != self._writer.topic_ids[table.changelog_topic]:
            return f"{table.changelog_topic} was recreated"
        kept_ms = self._tombstones_kept_ms[table.changelog_topic]
        # Half, since clocks differ and reading takes time. A position dated in the future is not trusted either.
        if abs(age_ms := self._wiring.now_ms() - position.as_of_ms) > kept_ms // 2:
            return (
                f"it is {age_ms / 3_600_000:.3g} h old, and {table.changelog_topic} keeps tombstones for "
                f"{kept_ms / 3_600_000:.3g} h"
            )
        return None

    def _is_torn(self, record: PartitionRecord) -> bool:
        """Whether a changelog was recreated while its owner was writing, so that it lacks the rows written before."""
        changelogs = {table.changelog_topic for table in self._wiring.tables}
        return any(
            source.topic in changelogs and source.topic_id != self._writer.topic_ids[source.topic]
            for source in record.sources
        )

    def _clear_tables(self) -> None:
        """Delete every row except the partition record, which is replaced afterwards: until then the table is torn."""
        log.warning(
            "a changelog of partition %d was recreated while its owner was writing: the table starts over from its "
            "sources",
            self._partition,
        )
        for table in self._wiring.tables:
            keys = [key for key, _ in self._store.items(table) if not key.startswith(PARTITION_KEY.prefix)]
            for first in range(0, len(keys), TOMBSTONES_AT_ONCE):
                changes = {table: [(key, None) for key in keys[first : first + TOMBSTONES_AT_ONCE]]}
                self._store.write(changes, self._writer.commit(changes, (), ()))

    def _load(self) -> tuple[Reducer[Any], PartitionRecord | None]:
        """Bring every table to its changelog's end, and a new reducer to the tables."""
        started_ms = self._wiring.now_ms()  # one time for all, since the tables of a store are equally old
        for table in self._wiring.tables:
            self._catch_up(table, started_ms)
        self._store.flush()
        with self._wiring.turn:
            self._check_needed()
            reducer = self._wiring.make_reducer()
            record: PartitionRecord | None = None
            for table in self._wiring.tables:
                rows = list(self._store.items(table))
                for key, value in rows:
                    if key == PARTITION_KEY.pack(self._partition):
                        record = decode_partition(key, value)
                reducer.load(table, (row for row in rows if not row[0].startswith(PARTITION_KEY.prefix)))
        return reducer, record

    def _catch_up(self, table: TableSpec, started_ms: int) -> None:
        """Bring the store to the end of a changelog."""
        topic_id = self._writer.topic_ids[table.changelog_topic]
        position = self._store.position(table)
        # Until the end is reached, the store keeps its old time: deletions may not have been read yet.
        as_of_ms = started_ms if position is None else position.as_of_ms

        def keep(records: list[Message]) -> None:
            last = records[-1].offset()
            assert last is not None  # only an error may lack it
            with self._wiring.turn:
                self._check_needed()
                changes = [(record.key() or b"", record.value()) for record in records]
                self._store.write({table: changes}, {table: ChangelogPosition(topic_id, last + 1, as_of_ms)})

        start = None if position is None else position.next_offset
        end = read_messages(self._wiring.settings, table.changelog_topic, self._partition, start, keep)
        self._store.write({}, {table: ChangelogPosition(topic_id, end, started_ms)})
        self._writer.changelog_ends[table.changelog_topic] = end

    def _with_sources(self, reducer: Reducer[Any], record: PartitionRecord | None) -> OpenedTables:
        """Continue in each source from the partition record, unless the source was recreated since."""
        written = {source.topic: source for source in record.sources} if record else {}
        sources: dict[str, SourceProgress] = {}
        recreated: set[str] = set()
        for spec in self._wiring.sources:
            topic_id = self._writer.topic_ids[spec.name]
            source = written.get(spec.name)
            if source is not None and source.topic_id != topic_id:
                log.info("%s [%d] was recreated: its offsets start over", spec.name, self._partition)
                recreated.add(spec.name)
                reducer.source_lost()
                source = None
            sources[spec.name] = source or SourceProgress(spec.name, topic_id, -1, 0, -1, 0)
        return OpenedTables(self._store, reducer, sources, frozenset(recreated))


def _changelog_specs(wiring: PartitionWiring) -> list[TopicSpec]:
    queried = {"delete.retention.ms": ""}  # the broker's value is used, which may differ from our settings
    return [TopicSpec(table.changelog_topic, "", None, 0, 0, queried) for table in wiring.tables]

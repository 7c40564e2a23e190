"""The local copy of one partition: its RocksDB, and the memory of its reducer, at the ends of its changelogs.

What lives here: when a copy is rebuilt, and how both are brought up to date. What must not: sources and transactions
(opening), threads (partition, standby), how RocksDB and a changelog are read (store, changelog).

An owner and a standby have the same copy. A standby hands it over when it becomes the owner. A copy that cannot be
brought to its changelog's end is emptied and rebuilt from the changelog.

State: the store, the reducer, and the position of each changelog.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import Message

from streams.errors import KvStreamsError, OffsetLost, TableError
from streams.kafka.clients import describe_topics
from streams.settings import tables_path
from streams.tables.changelog import follow_messages, read_all
from streams.tables.records import PARTITION_KEY, Change, PartitionRecord, decode_partition
from streams.tables.reducer import Reducer
from streams.tables.store import ChangelogPosition, PartitionStore, TableSpec
from streams.tables.transactions import scope_of
from streams.tables.wiring import PartitionWiring
from streams.topics import TopicSpec

log = logging.getLogger(__name__)


class LocalCopy:
    """One thread at a time uses a copy.

    topic_ids: of the sources and the changelogs, by topic. positions: how far each changelog is in the store. reducer:
    has every row of the store; None until it is loaded.
    """

    def __init__(self, partition: int, wiring: PartitionWiring) -> None:
        self._partition = partition
        self._wiring = wiring
        scope = scope_of(wiring.settings, partition)
        self.store = PartitionStore(tables_path(wiring.settings) / scope, scope, wiring.settings.rocksdb_cache_mb)
        self.reducer: Reducer[Any] | None = None
        self.topic_ids: dict[str, str] = {}
        self.positions: dict[TableSpec, ChangelogPosition] = {}
        self._tombstones_kept_ms: dict[str, int] = {}  # by changelog: delete.retention.ms
        self._is_followed = False  # whether the reducer has taken in rows since it was loaded

    def close(self) -> None:
        """Release the folder's lock."""
        self.store.close()

    def read_topics(self) -> None:
        """Read the topics' ids. Raises TableError if a topic is missing."""
        specs = (*self._wiring.sources, *_changelog_specs(self._wiring))
        states = describe_topics(self._wiring.settings, specs)
        if missing := sorted(name for name, state in states.items() if state is None):
            # The copy on disk is kept, since the topic may return.
            raise TableError(f"Kafka has no topic {', '.join(missing)}", remedy="`kvstreams topics create` creates it")
        self.topic_ids = {name: state.topic_id for name, state in states.items() if state is not None}
        self._tombstones_kept_ms = {
            name: int(state.config["delete.retention.ms"])
            for name, state in states.items()
            if state is not None and "delete.retention.ms" in state.config
        }

    def catch_up(self, check_needed: Callable[[], None], *, to_own: bool) -> None:
        """Bring the store to the ends of the changelogs, and the reducer to the store.

        A store that cannot be continued is emptied first, and its changelogs are read from their starts. to_own:
        whether the reducer must be complete, as an owner needs it; until then it has what Reducer.follow keeps.
        check_needed: raises once the copy is no longer needed.
        """
        try:
            stale = [reason for table in self._wiring.tables if (reason := self._stale(table))]
            if stale:
                self._rebuild(stale[0])
            self._catch_up(check_needed, to_own)
            return
        except OffsetLost as exc:
            self._rebuild(str(exc))
        except KvStreamsError:
            raise  # a changelog that cannot be read, or a full disk, does not mean that the files are damaged
        except Exception as exc:
            self._rebuild(f"it cannot be read: {exc}", aside=True)
        self._catch_up(check_needed, to_own)

    def follow(self, until: Callable[[], bool]) -> None:
        """Take in what the owner writes, until `until` is true; the copy's age stays that of the last `catch_up`."""
        as_of_ms = {table: position.as_of_ms for table, position in self.positions.items()}
        start = {table.changelog_topic: position.next_offset for table, position in self.positions.items()}
        follow_messages(
            self._wiring.settings, start, self._partition, lambda messages: self._keep(messages, as_of_ms), until
        )

    def partition_record(self) -> PartitionRecord | None:
        """Read the partition record."""
        key = PARTITION_KEY.pack(self._partition)
        value = self.store.get(self._wiring.tables[0], key)
        return None if value is None else decode_partition(key, value)

    def start_empty(self) -> None:
        """Replace the reducer by an empty one."""
        self.reducer = self._loaded(lambda _: iter(()))

    def _rebuild(self, reason: str, aside: bool = False) -> None:
        self.reducer = None
        self.store.rebuild(reason, aside)

    def _stale(self, table: TableSpec) -> str | None:
        """Return why a store cannot be brought to a changelog's end; None if it can."""
        position = self.store.position(table)
        if position is None:
            return None
        if position.topic_id != self.topic_ids[table.changelog_topic]:
            return f"{table.changelog_topic} was recreated"
        kept_ms = self._tombstones_kept_ms[table.changelog_topic]
        # Half, since clocks differ and reading takes time. A position dated in the future is not trusted either.
        if abs(age_ms := self._wiring.now_ms() - position.as_of_ms) > kept_ms // 2:
            return (
                f"it is {age_ms / 3_600_000:.3g} h old, and {table.changelog_topic} keeps tombstones for "
                f"{kept_ms / 3_600_000:.3g} h"
            )
        return None

    def _catch_up(self, check_needed: Callable[[], None], to_own: bool) -> None:
        self._read_to_ends(check_needed)
        takes_over = to_own and self._is_followed and self.reducer is not None
        if not takes_over:
            self.store.flush()
        with self._wiring.turn:
            check_needed()
            if takes_over:
                self._resume()
            if self.reducer is None:
                self.reducer = self._loaded(self._rows)
                self._is_followed = False

    def _resume(self) -> None:
        """Complete the reducer; drop it if it is not what the rows say."""
        assert self.reducer is not None
        for table in self._wiring.tables:
            if not self.reducer.resume(table, self._rows(table)):
                log.warning(
                    "partition %d: what its standby has of %s in memory does not fit the rows; it is loaded",
                    *(self._partition, table.name),
                )
                self.reducer = None
                return

    def _read_to_ends(self, check_needed: Callable[[], None]) -> None:
        now_ms = self._wiring.now_ms()  # one time for all, since the tables of a store are equally old
        positions = {table: self.store.position(table) for table in self._wiring.tables}
        # Until the end is reached, the store keeps its old time: deletions may not have been read yet.
        as_of_ms = {table: now_ms if before is None else before.as_of_ms for table, before in positions.items()}

        def keep(messages: list[Message]) -> None:
            with self._wiring.turn:
                check_needed()
                self._keep(messages, as_of_ms)

        start = {table.changelog_topic: None if at is None else at.next_offset for table, at in positions.items()}
        ends = read_all(self._wiring.settings, start, self._partition, keep)
        for table in positions:
            topic = table.changelog_topic
            self.positions[table] = ChangelogPosition(self.topic_ids[topic], ends[topic], now_ms)
        self.store.write({}, self.positions)

    def _keep(self, messages: list[Message], as_of_ms: Mapping[TableSpec, int]) -> None:
        tables = {table.changelog_topic: table for table in self._wiring.tables}
        changes: dict[TableSpec, list[Change]] = {}
        positions: dict[TableSpec, ChangelogPosition] = {}
        for message in messages:
            table, offset = tables[message.topic() or ""], message.offset()
            assert offset is not None  # only an error may lack it
            changes.setdefault(table, []).append((message.key() or b"", message.value()))
            positions[table] = ChangelogPosition(self.topic_ids[table.changelog_topic], offset + 1, as_of_ms[table])
        self.store.write(changes, positions)
        self.positions.update(positions)
        if self.reducer is not None:
            self._is_followed = True
            for table, rows in changes.items():
                self.reducer.follow(table, rows)

    def _loaded(self, rows: Callable[[TableSpec], Iterator[tuple[bytes, bytes]]]) -> Reducer[Any]:
        reducer = self._wiring.make_reducer()
        for table in self._wiring.tables:
            reducer.load(table, rows(table))
        return reducer

    def _rows(self, table: TableSpec) -> Iterator[tuple[bytes, bytes]]:
        return (row for row in self.store.items(table) if not row[0].startswith(PARTITION_KEY.prefix))


def _changelog_specs(wiring: PartitionWiring) -> list[TopicSpec]:
    queried: Mapping[str, str] = {"delete.retention.ms": ""}  # the broker's value is used, which may differ from ours
    return [TopicSpec(table.changelog_topic, "", None, 0, 0, queried) for table in wiring.tables]

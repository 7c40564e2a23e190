"""Opening a partition as its owner: its local copy brought up to date, and the offset at which each source continues.

What lives here: when a table starts over, and where each source continues. What must not: the batches that follow
(partition), when a local copy is rebuilt (local_copy).

A table whose changelog was recreated while its owner was writing is torn: the new changelog has later changes, but
lacks the rows written before. Such a table is emptied on Kafka as well, and is rebuilt from the sources.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streams.tables.local_copy import LocalCopy
from streams.tables.records import PARTITION_KEY, PartitionRecord, SourceProgress
from streams.tables.reducer import Reducer
from streams.tables.store import PartitionStore
from streams.tables.transactions import TransactionWriter
from streams.tables.wiring import PartitionWiring

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
    partition: int,
    wiring: PartitionWiring,
    writer: TransactionWriter,
    check_needed: Callable[[], None],
    copy: LocalCopy | None = None,
) -> OpenedTables:
    """Open a partition, and set its writer's topic ids and changelog ends.

    writer: has fenced every older writer. check_needed: raises once the partition no longer needs to be opened. copy:
    of a standby that becomes the owner, which has just read the topics. Raises KvStreamsError or KafkaException if the
    partition cannot be opened now; the store is then closed.
    """
    is_new = copy is None
    copy = copy or LocalCopy(partition, wiring)
    try:
        if is_new:
            copy.read_topics()
        return _Opening(partition, wiring, writer, copy).run(check_needed)
    except BaseException:
        copy.close()
        raise


class _Opening:
    """One attempt to open a partition."""

    def __init__(self, partition: int, wiring: PartitionWiring, writer: TransactionWriter, copy: LocalCopy) -> None:
        self._partition = partition
        self._wiring = wiring
        self._writer = writer
        self._copy = copy

    def run(self, check_needed: Callable[[], None]) -> OpenedTables:
        copy = self._copy
        self._writer.topic_ids = copy.topic_ids
        copy.catch_up(check_needed, to_own=True)
        self._writer.changelog_ends = {
            table.changelog_topic: position.next_offset for table, position in copy.positions.items()
        }
        record = copy.partition_record()
        if record is not None and self._is_torn(record):
            self._clear_tables()
            copy.start_empty()
            record = None
        assert copy.reducer is not None  # it was loaded
        return self._with_sources(copy.reducer, record)

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
        store = self._copy.store
        for table in self._wiring.tables:
            keys = [key for key, _ in store.items(table) if not key.startswith(PARTITION_KEY.prefix)]
            for first in range(0, len(keys), TOMBSTONES_AT_ONCE):
                changes = {table: [(key, None) for key in keys[first : first + TOMBSTONES_AT_ONCE]]}
                store.write(changes, self._writer.commit(changes, (), ()))

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
        return OpenedTables(self._copy.store, reducer, sources, frozenset(recreated))

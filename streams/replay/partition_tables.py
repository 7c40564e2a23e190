"""The tables of one partition as of an offset: what each rank holds, and its blocks in CXL pools.

What lives here: reading both changelogs of a partition. What must not: what a rank's rows mean (engines.recovery), and
what is done with the ranks (state_lines, moving).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streams.core.ids import RankId
from streams.cxl.records import (
    BLOCK_PREFIX,
    TRANSITION_ROWS,
    BlockKey,
    BlockRow,
    decode_block,
    decode_parked,
)
from streams.engines.recovery import RecoveredRank, applied_offset, ranks_of_table
from streams.errors import BadRecord
from streams.kafka.clients import Record
from streams.settings import ScopeSettings
from streams.tables.changelog import read_to_end
from streams.tables.records import PARTITION_KEY, PROGRESS_KEY, RUN_KEY
from streams.topics import topics

#: Rows of the index's table that say what ranks hold.
_INDEX_ROWS = (RUN_KEY.prefix, PROGRESS_KEY.prefix, PARTITION_KEY.prefix)

#: Where a key of a run or of progress has its rank.
_RANK = slice(1, PROGRESS_KEY.n_bytes)


@dataclass(frozen=True, slots=True)
class PartitionTables:
    """One partition's tables.

    rows: those of each rank in the index's table. pooled: the rows of blocks in CXL pools. parked: transitions that
    wait for their batches, as their records were, in order. applied: by source topic, the offset of the last record
    that is included; -1 for none.
    """

    rows: Mapping[bytes, Mapping[bytes, bytes]]
    pooled: Mapping[BlockKey, BlockRow]
    parked: tuple[tuple[RankId, bytes], ...]
    applied: Mapping[str, int]

    def ranks(self) -> Iterator[RecoveredRank]:
        """Return each rank with what it holds, in order; one at a time: a ledger takes much more than its rows."""
        for _, rows in sorted(self.rows.items()):
            for of_worker in ranks_of_table(rows).values():
                yield from of_worker.values()


def read_tables(settings: ScopeSettings, partition: int, ends: Mapping[str, int] | None = None) -> PartitionTables:
    """Read a partition's tables from Kafka. Blocks; raises TableError.

    ends: by changelog, the offset before which records are included; None for everything. Without it, the table of
    pooled blocks may include later records of the sources than the index does, and never earlier ones.
    """
    known = topics(settings)
    index = _rows(settings, known.index_changelog.name, partition, ends, _INDEX_ROWS)
    rows = _rows(settings, known.cxl_changelog.name, partition, ends, TRANSITION_ROWS)
    by_rank: defaultdict[bytes, dict[bytes, bytes]] = defaultdict(dict)
    for key, value in index.items():
        if not key.startswith(PARTITION_KEY.prefix):
            by_rank[key[_RANK]][key] = value
    pooled: dict[BlockKey, BlockRow] = {}
    parked: list[tuple[RankId, bytes]] = []
    for key, value in sorted(rows.items()):  # parked transitions in their order
        try:
            if key.startswith(BLOCK_PREFIX):
                block, row = decode_block(key, value)
                pooled[block] = row
            else:
                where, waiting = decode_parked(key, value)
                parked.append((where.owner, waiting.raw))
        except BadRecord:
            continue  # agents and routers skip the record as well
    of_partition = PARTITION_KEY.pack(partition)
    sources = (known.kv_events.name, known.cxl_events.name)
    return PartitionTables(
        by_rank,
        pooled,
        tuple(parked),
        {topic: applied_offset(index, of_partition, topic) for topic in sources},
    )


def _rows(
    settings: ScopeSettings,
    topic: str,
    partition: int,
    ends: Mapping[str, int] | None,
    prefixes: tuple[bytes, ...],
) -> dict[bytes, bytes]:
    """Read the rows whose keys begin with one of these."""
    rows: dict[bytes, bytes] = {}

    def take(records: list[Record]) -> None:
        for record in records:
            if not record.key.startswith(prefixes) or (ends is not None and record.offset >= ends[topic]):
                continue
            if record.value is None:
                rows.pop(record.key, None)
            else:
                rows[record.key] = record.value

    read_to_end(settings, topic, partition, None, take)
    return rows

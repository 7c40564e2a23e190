"""The tables of one partition as of an offset: what each rank holds, and its blocks in CXL pools.

What lives here: reading both changelogs of a partition. What must not: what a rank's rows mean (engines.recovery), and
what is done with the ranks (state_lines, moving).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streams.core.ids import RankId
from streams.cxl.records import (
    BLOCK_PREFIX,
    OWNER_KEY,
    PARKED_KEY,
    BlockKey,
    BlockRow,
    OwnerRow,
    decode_block,
    decode_owner,
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


@dataclass(frozen=True, slots=True)
class PartitionTables:
    """One partition's tables.

    ranks: with what each of them holds, in order. pooled: the rows of blocks in CXL pools. owners: what is known about
    the incarnations of their owners. parked: transitions that wait for their batches, as their records were, in order.
    applied: by source topic, the offset of the last record that is included; -1 for none.
    """

    ranks: Mapping[RankId, RecoveredRank]
    pooled: Mapping[BlockKey, BlockRow]
    owners: Mapping[RankId, OwnerRow]
    parked: tuple[tuple[RankId, bytes], ...]
    applied: Mapping[str, int]


def read_tables(settings: ScopeSettings, partition: int, ends: Mapping[str, int] | None = None) -> PartitionTables:
    """Read a partition's tables from Kafka. Blocks; raises TableError.

    ends: by changelog, the offset before which records are included; None for everything. Without it, the table of
    pooled blocks may include later records of the sources than the index does, and never earlier ones.
    """
    known = topics(settings)
    index = _rows(settings, known.index_changelog.name, partition, ends, _INDEX_ROWS)
    rows = _rows(
        settings, known.cxl_changelog.name, partition, ends, (BLOCK_PREFIX, OWNER_KEY.prefix, PARKED_KEY.prefix)
    )
    recovered = [found for ranks in ranks_of_table(index).values() for found in ranks.values()]
    pooled: dict[BlockKey, BlockRow] = {}
    owners: dict[RankId, OwnerRow] = {}
    parked: list[tuple[RankId, bytes]] = []
    for key, value in sorted(rows.items()):  # parked transitions in their order
        try:
            if key.startswith(BLOCK_PREFIX):
                block, row = decode_block(key, value)
                pooled[block] = row
            elif key.startswith(OWNER_KEY.prefix):
                rank, owner = decode_owner(key, value)
                owners[rank] = owner
            else:
                where, waiting = decode_parked(key, value)
                parked.append((where.owner, waiting.raw))
        except BadRecord:
            continue  # agents and routers skip the record as well
    of_partition = PARTITION_KEY.pack(partition)
    sources = (known.kv_events.name, known.cxl_events.name)
    return PartitionTables(
        {found.progress.rank: found for found in sorted(recovered, key=lambda found: found.progress.rank)},
        pooled,
        owners,
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

"""Which blocks of workers the agents' table of pooled blocks has, as read from its changelog.

What lives here: reading the rows. What must not: what follows from them (recovery, publisher), and their bytes
(cxl.records).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from streams.core.ids import RankId, SequenceHash, WorkerId
from streams.cxl.records import BLOCK_PREFIX, TRANSITION_ROWS, decode_block, owner_of_row
from streams.engines.cxl_names import PooledRow, PooledRows
from streams.errors import BadRecord
from streams.kafka.clients import Record
from streams.settings import ScopeSettings
from streams.tables.changelog import read_to_end
from streams.topics import topics


def read_rows(settings: ScopeSettings, partition: int, worker_ids: Collection[WorkerId]) -> dict[bytes, bytes]:
    """Read the workers' rows of pooled blocks and of parked transitions, by key. Blocks; raises TableError."""
    table: dict[bytes, bytes] = {}

    def take(records: list[Record]) -> None:
        for record in records:
            if record.value is None:
                table.pop(record.key, None)
            elif record.key.startswith(TRANSITION_ROWS) and owner_of_row(record.key) in worker_ids:
                table[record.key] = record.value

    read_to_end(settings, topics(settings).cxl_changelog.name, partition, None, take)
    return table


def read_pooled(
    settings: ScopeSettings, partition: int, worker_ids: Collection[WorkerId]
) -> Mapping[WorkerId, Mapping[RankId, PooledRows]]:
    """Read which blocks of workers the table has, by worker and rank. Blocks; raises TableError."""
    rows: dict[WorkerId, dict[RankId, dict[SequenceHash, PooledRow]]] = {worker_id: {} for worker_id in worker_ids}
    for key, value in read_rows(settings, partition, worker_ids).items():
        if not key.startswith(BLOCK_PREFIX):
            continue
        try:
            where, row = decode_block(key, value)
        except BadRecord:
            continue  # agents and routers skip the record as well
        of_rank = rows[where.owner.worker_id].setdefault(where.owner, {})
        of_rank[where.sequence] = (row.placement.incarnation, row.placement.state, where.pool_id)
    return rows

"""What a reader of the changelog knows of pooled blocks: a plain fold, and who can reach what.

What lives here: `PooledView`. Rows in, in any order that compaction leaves; rows out, with every mask applied. What
must not: Kafka, bytes' layout (records), scores (pooled_index is built of the same rows).

The interface, for whoever puts a faster index behind or beside it:

- `fold(key, value)`: one record of the table's changelog, `value` None for a tombstone; raises BadRecord and stays as
  it was. An equal copy changes nothing. Returns the block's row that it was, before and after, or None.
- `fold_pool(key, value)`: one record of the registry under `pool/<id>`.
- `blocks()`: every row, each as a `PooledBlock`; `blocks_of(sequence)`: those of one block, one an owner and pool.
- `reachable(block, registered)`: the workers that score it, of those registered. Empty unless its visible state is
  cxl_pooled, its pool is not lost and of the epoch that the block was written in (or of an older one, where this reader
  has not seen the registry's newest record yet).

Masks are looked up when asked, never written into rows: losing a pool, a host or an owner's life is one record, and
what it says holds at once for every row. Rows name their model, since equal tokens have equal hashes in every model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.ids import EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import CxlPool, newest_pool
from streams.cxl.records import (
    BLOCK_PREFIX,
    OWNER_PREFIX,
    PARKED_PREFIX,
    BlockKey,
    BlockRow,
    OwnerRow,
    Placement,
    decode_block,
    decode_owner,
    decode_pool,
    parse_block_key,
    parse_owner_key,
    parse_pool_key,
)
from streams.cxl.states import after_owner_ended
from streams.errors import BadRecord

#: Rows of all pooled blocks: some 4 GB of a router's memory, where a stranger's rows must not fill it.
POOLED_ROWS_MAX = 8_000_000


@dataclass(frozen=True, slots=True)
class PooledBlock:
    """A row as it counts. metadata: with its owner's life taken into account. incarnation: the life it was told in."""

    sequence: SequenceHash
    owner: RankId
    parent: SequenceHash | None
    position: int
    engine: EngineHash
    model: str
    metadata: CxlMemoryMetadata
    pool_epoch: int
    incarnation: Incarnation


class RowChange(NamedTuple):
    """One row of a block: what it said before and says now; None where there was or is none."""

    sequence: SequenceHash
    before: Placement | None
    after: Placement | None


def reachable_workers(
    pool_id: str,
    pool_epoch: int,
    named: Collection[WorkerId],
    pools: Mapping[str, CxlPool],
    registered: Collection[WorkerId],
) -> frozenset[WorkerId]:
    """Workers that can read what is pooled there, of those registered: the pool's members, or those that are named.

    pool_epoch: the one in which it was written. A pool that nobody registered has no members: there the workers named
    are taken at their word.
    """
    pool = pools.get(pool_id)
    if pool is None:
        return frozenset(named).intersection(registered)
    if pool.lost or pool_epoch < pool.epoch:
        return frozenset()
    members = frozenset(pool.members).intersection(registered)
    return members.intersection(named) if named else members


def is_over(owner: OwnerRow | None, incarnation: Incarnation) -> bool:
    """Whether a life of an owner has ended, as far as its row says."""
    if owner is None:
        return False
    return owner.incarnation > incarnation or (owner.incarnation == incarnation and owner.ended)


def metadata_of(placement: Placement, owner: OwnerRow | None) -> CxlMemoryMetadata:
    """What is true of a row's block: what was on its way when its owner's life ended counts as evicted."""
    metadata = CxlMemoryMetadata(placement.state, placement.pool_id, placement.accessible_workers)
    return after_owner_ended(metadata) if is_over(owner, placement.incarnation) else metadata


class PooledView:
    """The fold. Not thread-safe: its shell has a lock.

    rows_max: a block beyond it is refused, and counted in over_capacity. _last: the placement of the row before, which
    rows that went together share.
    """

    def __init__(self, schema_ids: Mapping[str, int] | None = None, rows_max: int = POOLED_ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._last: Placement | None = None
        self.over_capacity = 0
        self._schema_ids = schema_ids or {}
        self._rows: dict[SequenceHash, dict[tuple[RankId, str], BlockRow]] = {}
        self._owners: dict[RankId, OwnerRow] = {}
        self._n_rows = 0
        self.pools: dict[str, CxlPool] = {}

    def __len__(self) -> int:
        """Rows, whatever their state."""
        return self._n_rows

    def fold(self, key: bytes, value: bytes | None) -> RowChange | None:
        """Fold one record of the table's changelog; gives the block's row that it was. Raises BadRecord."""
        if key.startswith(BLOCK_PREFIX):
            return self._put(parse_block_key(key), None if value is None else decode_block(key, value)[1])
        if key.startswith(OWNER_PREFIX):
            rank = parse_owner_key(key)
            if value is None:
                self._owners.pop(rank, None)
            else:
                self._owners[rank] = decode_owner(key, value)[1]
        elif not key.startswith(PARKED_PREFIX):  # what waits for its batch of kv-events is not true yet
            raise BadRecord("bad_key", f"{key.hex()} is no key of the pooled blocks")
        return None

    def fold_pool(self, key: bytes, value: bytes | None) -> None:
        """Fold one pool of the registry, unless a loss is known that it does not know of; raises BadRecord."""
        pool_id = parse_pool_key(key)
        if value is None:
            self.pools.pop(pool_id, None)
        else:
            pool = decode_pool(key, value, self._schema_ids)
            self.pools[pool_id] = newest_pool(self.pools.get(pool_id), pool)

    def blocks(self) -> Iterator[PooledBlock]:
        """Every row, in no order."""
        for sequence, rows in self._rows.items():
            for (owner, _), row in rows.items():
                yield self._block(sequence, owner, row)

    def blocks_of(self, sequence: SequenceHash) -> list[PooledBlock]:
        """The rows of one block, of every owner and pool, in order of owners."""
        rows = self._rows.get(sequence, {})
        return [self._block(sequence, owner, row) for (owner, _), row in sorted(rows.items(), key=lambda item: item[0])]

    def reachable(self, block: PooledBlock, registered: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Workers that can read a block, of those registered; see reachable_workers."""
        named, pool_id = block.metadata.accessible_workers, block.metadata.pool_id
        if block.metadata.state is not CxlMemoryState.CXL_POOLED or pool_id is None:
            return frozenset()
        return reachable_workers(pool_id, block.pool_epoch, named, self.pools, registered)

    def _block(self, sequence: SequenceHash, owner: RankId, row: BlockRow) -> PooledBlock:
        placement = row.placement
        return PooledBlock(
            sequence=sequence,
            owner=owner,
            parent=row.parent,
            position=row.position,
            engine=row.engine,
            model=placement.model,
            metadata=metadata_of(placement, self._owners.get(owner)),
            pool_epoch=placement.pool_epoch,
            incarnation=placement.incarnation,
        )

    def _put(self, where: BlockKey, row: BlockRow | None) -> RowChange:
        rows = self._rows.get(where.sequence)
        known = None if rows is None else rows.get((where.owner, where.pool_id))
        if row is not None and known is None and self._n_rows >= self._rows_max:
            self.over_capacity += 1
            raise BadRecord("over_capacity", f"{self._rows_max} rows of pooled blocks are known already")
        if row is not None and row.placement == self._last:
            row = replace(row, placement=self._last)
        if row is None:
            if rows is not None and known is not None:
                del rows[where.owner, where.pool_id]
                self._n_rows -= 1
                if not rows:
                    del self._rows[where.sequence]
        else:
            self._last = row.placement
            self._rows.setdefault(where.sequence, {})[where.owner, where.pool_id] = row
            self._n_rows += known is None
        return RowChange(where.sequence, known.placement if known else None, row.placement if row else None)

"""A router's pooled blocks: a fold of the table's changelog. Masks of owners and pools are applied when it is read.

What lives here: `PooledView`. It takes records in any order that compaction leaves. What must not: Kafka, the layout of
bytes (records), scores (pooled_index is built from the same rows).

An index that replaces or complements this one must have the same interface:

- `fold(key, value)`: one record of the table's changelog, `value` None for a tombstone. Raises BadRecord, which changes
  nothing. Folding an identical record again changes nothing. Returns the change of a block's row, or None.
- `fold_pool(key, value)`: one record of the registry under `pool/<id>`.
- `blocks()`: every row as a `PooledBlock`; `blocks_of(sequence)`: the rows of one block, one per owner and pool.
- `reachable(block, registered)`: the workers, of those registered, that can read the block. Empty unless its effective
  state is cxl_pooled and its pool is not lost and in the epoch in which the block was written (or an older one, if this
  reader has not read the registry's newest record yet).

Masks are applied when a caller reads, and are never written into rows. The loss of a pool, the departure of a host and
the end of an incarnation are one record each, which applies to every row at once. Rows contain their model, because
equal tokens have equal hashes in every model.

State: a router's pooled blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.ids import EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import CxlPool, newest_pool
from streams.cxl.records import (
    BLOCK_PREFIX,
    OWNER_KEY,
    PARKED_KEY,
    BlockKey,
    BlockRow,
    OwnerRow,
    Placement,
    decode_block,
    decode_owner,
    decode_pool,
    parse_block_key,
    parse_pool_key,
)
from streams.cxl.visibility import metadata_of, reachable_workers
from streams.errors import BadRecord

#: Rows of all pooled blocks, about 4 GB of a router's memory. Without a limit, a foreign writer could fill it.
POOLED_ROWS_MAX = 8_000_000


@dataclass(frozen=True, slots=True)
class PooledBlock:
    """A row as readers see it.

    metadata: the effective one, after the owner's incarnation is taken into account. incarnation: the one in which the
    state was reported.
    """

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
    """A block's row before and after a record; None for no row."""

    sequence: SequenceHash
    before: Placement | None
    after: Placement | None


class PooledView:
    """The fold. Not thread-safe: the router's view has a lock.

    rows_max: a new row beyond this number is refused, and counted in over_capacity. _last: the placement of the
    previous row; rows of one transition arrive one after the other and share it.
    """

    def __init__(
        self,
        schema_ids: Mapping[str, int] | None = None,
        rows_max: int = POOLED_ROWS_MAX,
        *,
        serves: Callable[[str], bool] | None = None,
    ) -> None:
        """serves: whether rows of a model are kept; None keeps those of all models."""
        self._rows_max = rows_max
        self._serves = serves
        self._last: Placement | None = None
        self.over_capacity = 0
        self._schema_ids = schema_ids or {}
        self._rows: dict[SequenceHash, dict[tuple[RankId, str], BlockRow]] = {}
        self._owners: dict[RankId, OwnerRow] = {}
        self._n_rows = 0
        self.pools: dict[str, CxlPool] = {}

    def __len__(self) -> int:
        """Return the number of rows in any state."""
        return self._n_rows

    def fold(self, key: bytes, value: bytes | None) -> RowChange | None:
        """Fold one record of the table's changelog and return the change of a block's row; raises BadRecord."""
        if key.startswith(BLOCK_PREFIX):
            row = None if value is None else decode_block(key, value)[1]
            if row is not None and self._serves is not None and not self._serves(row.placement.model):
                row = None
            return self._put(parse_block_key(key), row)
        if key.startswith(OWNER_KEY.prefix):
            rank = OWNER_KEY.parse(key)
            if value is None:
                self._owners.pop(rank, None)
            else:
                self._owners[rank] = decode_owner(key, value)[1]
        elif not key.startswith(PARKED_KEY.prefix):  # a parked transition has no effect yet
            raise BadRecord("bad_key", f"{key.hex()} is not a key of the table of pooled blocks")
        return None

    def fold_pool(self, key: bytes, value: bytes | None) -> None:
        """Fold one pool of the registry, unless a newer record of it was read before; raises BadRecord."""
        pool_id = parse_pool_key(key)
        if value is None:
            self.pools.pop(pool_id, None)
        else:
            pool = decode_pool(key, value, self._schema_ids)
            self.pools[pool_id] = newest_pool(self.pools.get(pool_id), pool)

    def blocks(self) -> Iterator[PooledBlock]:
        """Iterate over all rows, in no particular order."""
        for sequence, rows in self._rows.items():
            for (owner, _), row in rows.items():
                yield self._block(sequence, owner, row)

    def rows(self) -> Iterator[tuple[SequenceHash, RankId, str, BlockRow]]:
        """Iterate over all rows as the log has them: block, owner, pool and row."""
        for sequence, rows in self._rows.items():
            for (owner, pool_id), row in rows.items():
                yield sequence, owner, pool_id, row

    def owners(self) -> dict[RankId, OwnerRow]:
        """The rows of all owners."""
        return dict(self._owners)

    def blocks_of(self, sequence: SequenceHash) -> list[PooledBlock]:
        """Return the rows of one block, of all owners and pools, ordered by owner."""
        rows = self._rows.get(sequence, {})
        return [self._block(sequence, owner, row) for (owner, _), row in sorted(rows.items(), key=lambda item: item[0])]

    def reachable(self, block: PooledBlock, registered: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Return the registered workers that can read a block; see reachable_workers."""
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

    def _put(self, key: BlockKey, row: BlockRow | None) -> RowChange:
        rows = self._rows.get(key.sequence)
        known = None if rows is None else rows.get((key.owner, key.pool_id))
        if row is not None and known is None and self._n_rows >= self._rows_max:
            self.over_capacity += 1
            raise BadRecord("over_capacity", f"the view already has {self._rows_max} rows of pooled blocks")
        if row is not None and row.placement == self._last:
            row = replace(row, placement=self._last)
        if row is None:
            if rows is not None and known is not None:
                del rows[key.owner, key.pool_id]
                self._n_rows -= 1
                if not rows:
                    del self._rows[key.sequence]
        else:
            self._last = row.placement
            self._rows.setdefault(key.sequence, {})[key.owner, key.pool_id] = row
            self._n_rows += known is None
        return RowChange(key.sequence, known.placement if known else None, row.placement if row else None)

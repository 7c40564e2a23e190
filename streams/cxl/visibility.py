"""What a row of the table of pooled blocks means to a reader: the block's effective state, and who can read the block.

What lives here: the masks that owners' rows and the registry apply to blocks' rows, which are not rewritten when an
owner or a pool changes. What must not: keeping rows (pooled_view, tables.pooled_block_table), bytes (records).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.ids import Incarnation, WorkerId
from streams.cxl.events import CxlPool
from streams.cxl.records import OwnerRow, Placement
from streams.cxl.states import after_owner_ended


def has_ended(owner: OwnerRow | None, incarnation: Incarnation) -> bool:
    """Return whether an owner's incarnation has ended according to its row; False without a row."""
    if owner is None:
        return False
    return owner.incarnation > incarnation or (owner.incarnation == incarnation and owner.ended)


def metadata_of(placement: Placement, owner: OwnerRow | None) -> CxlMemoryMetadata:
    """Return a row's effective metadata: a block in transit is evicted once its owner's incarnation has ended."""
    metadata = CxlMemoryMetadata(placement.state, placement.pool_id, placement.accessible_workers)
    return after_owner_ended(metadata) if has_ended(owner, placement.incarnation) else metadata


def reachable_workers(
    pool_id: str,
    pool_epoch: int,
    named: Collection[WorkerId],
    pools: Mapping[str, CxlPool],
    registered: Collection[WorkerId],
) -> frozenset[WorkerId]:
    """Return the registered workers that can read a block: the pool's members, or those among them that are named.

    pool_epoch: the pool's epoch in which the block was written. If the pool is not registered, its members are unknown,
    and the named workers are trusted.
    """
    pool = pools.get(pool_id)
    if pool is None:
        return frozenset(named).intersection(registered)
    if pool.lost or pool_epoch < pool.epoch:
        return frozenset()
    members = frozenset(pool.members).intersection(registered)
    return members.intersection(named) if named else members

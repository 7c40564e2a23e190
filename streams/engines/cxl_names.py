"""A rank's engine hashes of blocks in CXL pools, resolved to addresses that are the same on every worker (pure).

What lives here: names of blocks that the ledger no longer has. What must not: transport. Owner: a publisher or bridge,
one per rank, next to its ledger.

A block leaves the GPU, and with it the ledger, while it is on its way into a pool or stored there. Its engine continues
to use the same name for it. So a name is kept from in_transit until the block is evicted or local_gpu again, together
with the block's last reported metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BlocksStored
from streams.core.ids import EngineHash, Incarnation, SequenceHash, WorkerId
from streams.cxl.events import AddressedBlocks, BlockAddress, CxlStateChanged, addressed, check_change
from streams.cxl.states import NOT_POOLED as LOCAL
from streams.cxl.states import RULES, PlacementEffect, TransitionRefused, stored_as, transition
from streams.engines.dialects.interface import EngineEvent
from streams.engines.ledger import Ledger
from streams.errors import BadRecord, InvalidRequest

#: Names of one rank, 220 bytes each. At this limit, further transitions into a pool are refused. If an older name were
#: dropped instead, its block's eviction could not be published, and routers would count on the block for ever.
POOLED_NAMES_MAX = 4_194_304

#: States in which a block is in a pool or on its way into one.
PLACED = frozenset({CxlMemoryState.IN_TRANSIT, CxlMemoryState.CXL_POOLED})

#: A row of the agents' table: the incarnation and the state that the block entered, and its pool; and the rows of one
#: rank by sequence hash.
PooledRow = tuple[Incarnation, CxlMemoryState, str | None]
PooledRows = Mapping[SequenceHash, PooledRow]


class _Pooled(NamedTuple):
    """The block that a name stands for. metadata: shared by the blocks of one transition."""

    address: BlockAddress
    metadata: CxlMemoryMetadata


class CxlNames:
    """The names of one rank's blocks that are in a pool or on their way into one."""

    def __init__(self) -> None:
        self._pooled: dict[int, _Pooled] = {}

    def __len__(self) -> int:
        return len(self._pooled)

    def adopt(self, engine: EngineHash, address: BlockAddress, metadata: CxlMemoryMetadata) -> None:
        """Add a block that is in a pool under this name, as read from the table."""
        self._pooled[engine] = _Pooled(address, metadata)

    def enter(
        self,
        blocks: Iterable[tuple[BlockAddress, EngineHash]],
        state: CxlMemoryState,
        pool_id: str | None,
        accessible_workers: tuple[WorkerId, ...],
    ) -> None:
        """Add blocks that are on their way into a pool, or in one now. An illegal transition only adds the names."""
        moved: dict[CxlMemoryMetadata, CxlMemoryMetadata] = {}  # metadata before and after, so that blocks share both
        for address, name in blocks:
            known = self._pooled.get(name)
            before = LOCAL if known is None else known.metadata
            if before not in moved:
                after = transition(before, state, pool_id, accessible_workers)
                moved[before] = before if isinstance(after, TransitionRefused) else after
            self._pooled[name] = _Pooled(address, moved[before])

    def placements(self) -> dict[int, CxlMemoryMetadata]:
        """Return the last reported metadata of each block, by sequence hash."""
        return {pooled.address.sequence: pooled.metadata for pooled in self._pooled.values()}

    def missing(
        self, rows: PooledRows, incarnation: Incarnation
    ) -> dict[CxlMemoryMetadata, list[tuple[BlockAddress, EngineHash]]]:
        """Return the blocks that a table lacks or has in another state, by their metadata. rows: the table's."""
        missing: dict[CxlMemoryMetadata, list[tuple[BlockAddress, EngineHash]]] = {}
        for name, (address, metadata) in self._pooled.items():
            row = (incarnation, metadata.state, metadata.pool_id)
            if metadata.state in PLACED and rows.get(address.sequence) != row:
                missing.setdefault(metadata, []).append((address, EngineHash(name)))
        return missing

    def apply(self, event: EngineEvent, ledger: Ledger) -> None:
        """Apply an event that is already on Kafka to the ledger and the names; nothing is published."""
        if not isinstance(event, CxlStateChanged):
            ledger.apply(event, may_wait=True)
        for changed in _changes(event):
            self.resolve(changed, ledger)

    def drop(self, engine: EngineHash) -> None:
        """Drop a name whose block is no longer in a pool."""
        self._pooled.pop(engine, None)

    def resolve(self, changed: CxlStateChanged, ledger: Ledger) -> tuple[AddressedBlocks, list[int]]:
        """Return the blocks that enter a state, and the unknown names.

        When a block starts to move into a pool, the ledger is searched for its name first. In every later state, the
        name means the block that moved into the pool under it, even if the engine has since given the name to another
        block. Raises BadRecord with reason over_capacity if the limit of names is reached.
        """
        state = changed.state
        enters = RULES[state].placement is PlacementEffect.SET
        blocks: list[tuple[BlockAddress, EngineHash]] = []
        unknown: list[int] = []
        for name in map(EngineHash, changed.engine.tolist()):
            held, known = ledger.address(name), self._pooled.get(name)
            pooled = None if known is None else known.address
            address = (held or pooled) if enters else (pooled or held)
            if address is None:
                unknown.append(name)
            else:
                blocks.append((address, name))
        if enters and len(self._pooled) + len(blocks) > POOLED_NAMES_MAX:
            raise BadRecord(
                "over_capacity", f"{len(self._pooled)} blocks of a rank are in pools; at most {POOLED_NAMES_MAX}"
            )
        if enters:
            self.enter(blocks, state, changed.pool_id, changed.accessible_workers)
        elif state is CxlMemoryState.CXL_POOLED:
            known_names = [row for row in blocks if row[1] in self._pooled]
            self.enter(known_names, state, changed.pool_id, changed.accessible_workers)
        else:
            for _, name in blocks:
                self._pooled.pop(name, None)
        return addressed(blocks), unknown


def announced_states(event: EngineEvent) -> list[CxlStateChanged]:
    """Return the changes of state in one event. Raises BadRecord for one that is invalid in every state of a block."""
    changes = _changes(event)
    try:
        for changed in changes:
            check_change(changed)
    except InvalidRequest as exc:
        raise BadRecord("bad_transition", exc.message) from exc
    return changes


def _changes(event: EngineEvent) -> list[CxlStateChanged]:
    if isinstance(event, CxlStateChanged):
        return [event]
    return stored_states(event) if isinstance(event, BlocksStored) else []


def stored_states(event: BlocksStored) -> list[CxlStateChanged]:
    """Return a store's CXL metadata as transitions."""
    cxl = event.cxl
    if cxl is None:
        return []
    return [
        CxlStateChanged(0, event.engine, state, cxl.pool_id, cxl.accessible_workers) for state in stored_as(cxl.state)
    ]

"""A rank's engine hashes of blocks in CXL pools, resolved to what is the same everywhere (pure).

What lives here: remembering names beyond the ledger's time. What must not: transport. Owner: a publisher or bridge, one
for each rank, beside its ledger.

A block leaves the GPU while it is on its way into a pool or lies there, and with that leaves the ledger; its engine
goes on calling it by the same name. So a name is kept from in_transit until the block is evicted or plain again.
"""

from __future__ import annotations

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import BlocksStored, KvEvent
from streams.core.ids import EngineHash, HashArray
from streams.cxl.events import AddressedBlocks, BlockAddress, CxlStateChanged, addressed, check_change
from streams.cxl.states import RULES, PlacementEffect, stored_as
from streams.engines.ledger import Ledger
from streams.errors import BadRecord, InvalidRequest

#: Names of one rank, 150 bytes each. Beyond it no block goes into a pool as far as routers know: one that is forgotten
#: instead could never be told to be evicted, and would be routed to for ever.
POOLED_NAMES_MAX = 4_194_304


class CxlNames:
    """Names of one rank's blocks that are in a pool or on their way into one."""

    def __init__(self) -> None:
        self._pooled: dict[int, BlockAddress] = {}

    def __len__(self) -> int:
        return len(self._pooled)

    def adopt(self, engine: EngineHash, address: BlockAddress) -> None:
        """A block is in a pool under this name, as the table has it."""
        self._pooled[engine] = address

    def apply(self, event: KvEvent | CxlStateChanged, ledger: Ledger) -> None:
        """Follow what an engine told before, of which nothing is to be told again."""
        if not isinstance(event, CxlStateChanged):
            ledger.apply(event)
        for changed in _changes(event):
            self.resolve(changed.engine, changed.state, ledger)

    def forget(self, engine: EngineHash) -> None:
        """The block under this name is in no pool any more."""
        self._pooled.pop(engine, None)

    def resolve(self, engine: HashArray, state: CxlMemoryState, ledger: Ledger) -> tuple[AddressedBlocks, list[int]]:
        """Give the blocks that enter a state, and the names that nobody knows.

        A name on its way into a pool is the ledger's; later it is that of the block that went there under it, whatever
        the engine has given it to since. Raises BadRecord where there is no room for more names.
        """
        enters = RULES[state].placement is PlacementEffect.SET
        found: list[tuple[BlockAddress, EngineHash]] = []
        unknown: list[int] = []
        for name in map(EngineHash, engine.tolist()):
            held, pooled = ledger.address(name), self._pooled.get(name)
            address = (held or pooled) if enters else (pooled or held)
            if address is None:
                unknown.append(name)
            else:
                found.append((address, name))
        if enters and len(self._pooled) + len(found) > POOLED_NAMES_MAX:
            raise BadRecord(
                "over_capacity", f"{len(self._pooled)} blocks of a rank are in pools; at most {POOLED_NAMES_MAX}"
            )
        for address, name in found:
            if enters:
                self._pooled[name] = address
            elif state is not CxlMemoryState.CXL_POOLED:
                self._pooled.pop(name, None)
        return addressed(found), unknown


def announced_states(event: KvEvent | CxlStateChanged) -> list[CxlStateChanged]:
    """Changes of state that one event tells; raises BadRecord for what is none whatever state a block is in."""
    changes = _changes(event)
    try:
        for changed in changes:
            check_change(changed)
    except InvalidRequest as exc:
        raise BadRecord("bad_transition", exc.message) from exc
    return changes


def _changes(event: KvEvent | CxlStateChanged) -> list[CxlStateChanged]:
    if isinstance(event, CxlStateChanged):
        return [event]
    return stored_states(event) if isinstance(event, BlocksStored) else []


def stored_states(event: BlocksStored) -> list[CxlStateChanged]:
    """The transitions that a store's CXL metadata amounts to."""
    cxl = event.cxl
    if cxl is None:
        return []
    return [
        CxlStateChanged(0, event.engine, state, cxl.pool_id, cxl.accessible_workers) for state in stored_as(cxl.state)
    ]

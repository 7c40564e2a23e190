"""States of a block in CXL memory, and which may follow which: a table, as data, and the one function that reads it.

What lives here: `RULES`, `transition`, `after_owner_ended`, and the diagram of docs/cxl.md, which is drawn from the
rules. What must not: who owns a block, when a transition counts (pooled_block_table), bytes.

A block that no pool knows of is in `local_gpu`: to be unknown and to be plain are the same state.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from streams.core.ids import WorkerId


class CxlMemoryState(enum.StrEnum):
    """Where a block is, as far as CXL memory is concerned; the names are on Kafka."""

    LOCAL_GPU = "local_gpu"
    IN_TRANSIT = "in_transit"
    CXL_POOLED = "cxl_pooled"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class CxlMemoryMetadata:
    """State of one block of one owner. pool_id: None where no pool has or had it.

    accessible_workers: who was told to reach it, as the owner named them; none named are all members of the pool.
    """

    state: CxlMemoryState
    pool_id: str | None = None
    accessible_workers: tuple[WorkerId, ...] = ()


#: Of a block that nobody told anything about.
PLAIN = CxlMemoryMetadata(CxlMemoryState.LOCAL_GPU)


class PlacementEffect(enum.Enum):
    """What entering a state does to pool and accessible workers."""

    SET = "sets"
    KEPT = "keeps"
    DROPPED = "drops"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a state is entered. sources: states that it may follow. needs_pool: the transition must name a pool."""

    sources: frozenset[CxlMemoryState]
    needs_pool: bool
    place: PlacementEffect


_ANY = frozenset(CxlMemoryState)

#: By the state entered. Whatever is not here is refused.
RULES: Mapping[CxlMemoryState, Rule] = {
    CxlMemoryState.LOCAL_GPU: Rule(_ANY, needs_pool=False, place=PlacementEffect.DROPPED),
    CxlMemoryState.IN_TRANSIT: Rule(_ANY, needs_pool=True, place=PlacementEffect.SET),
    CxlMemoryState.CXL_POOLED: Rule(
        frozenset({CxlMemoryState.IN_TRANSIT}), needs_pool=False, place=PlacementEffect.KEPT
    ),
    CxlMemoryState.EVICTED: Rule(_ANY, needs_pool=False, place=PlacementEffect.KEPT),
}

#: What a block is found in when its owner's life is over: what was on its way never arrives.
AFTER_OWNER_ENDED: Mapping[CxlMemoryState, CxlMemoryState] = {CxlMemoryState.IN_TRANSIT: CxlMemoryState.EVICTED}

#: States in which a block has a place in a pool that a transition may contradict.
_PLACED = frozenset({CxlMemoryState.IN_TRANSIT, CxlMemoryState.CXL_POOLED})


class RefusalReason(enum.StrEnum):
    """Why a transition changes nothing; the names are in dead letters and in metrics."""

    NO_POOL = "no_pool"  # in_transit without saying where to
    NOT_IN_TRANSIT = "not_in_transit"  # cxl_pooled of a block that was not on its way
    OTHER_POOL = "other_pool"  # the pool named is not the one that the block is in, or on its way to
    TABLE_FULL = "table_full"  # its partition has as many rows as it may


@dataclass(frozen=True, slots=True)
class Refused:
    """An illegal transition: a value, since whoever told it goes on."""

    reason: RefusalReason
    message: str


def transition(
    known: CxlMemoryMetadata,
    new_state: CxlMemoryState,
    pool_id: str | None = None,
    accessible_workers: tuple[WorkerId, ...] = (),
) -> CxlMemoryMetadata | Refused:
    """Give a block's metadata behind a transition, or say why it is refused; `known` is then as it was.

    known: PLAIN for a block that no pool knows of. A pool named on leaving a pool must be that pool.
    """
    rule = RULES[new_state]
    if known.state not in rule.sources:
        return Refused(RefusalReason.NOT_IN_TRANSIT, f"{new_state} follows in_transit, and the block is {known.state}")
    if rule.needs_pool and not pool_id:
        return Refused(RefusalReason.NO_POOL, f"{new_state} names no pool")
    if rule.place is PlacementEffect.SET:
        return CxlMemoryMetadata(new_state, pool_id, accessible_workers)
    if pool_id and known.state in _PLACED and pool_id != known.pool_id:
        return Refused(RefusalReason.OTHER_POOL, f"the block is {known.state} in {known.pool_id!r}, not {pool_id!r}")
    return CxlMemoryMetadata(new_state) if rule.place is PlacementEffect.DROPPED else replace(known, state=new_state)


def after_owner_ended(known: CxlMemoryMetadata) -> CxlMemoryMetadata:
    """Give a block's metadata when its owner's life is over: what is in a pool stays there."""
    state = AFTER_OWNER_ENDED.get(known.state)
    return known if state is None else replace(known, state=state)


def stored_as(state: CxlMemoryState) -> tuple[CxlMemoryState, ...]:
    """The transitions that a block stored with this state goes through: into a pool it goes by way of the bus."""
    pooled = state is CxlMemoryState.CXL_POOLED
    return (CxlMemoryState.IN_TRANSIT, state) if pooled else (state,)


def diagram() -> str:
    """The rules as a Mermaid state diagram, which docs/cxl.md shows."""
    return "\n".join(["stateDiagram-v2", f"    [*] --> {PLAIN.state}", *_edges()])


def _edges() -> Iterator[str]:
    for source in CxlMemoryState:
        for target in CxlMemoryState:
            rule = RULES[target]
            if source in rule.sources:
                needs = ", needs a pool" if rule.needs_pool else ""
                yield f"    {source} --> {target}: {rule.place.value} the place{needs}"
        if source in AFTER_OWNER_ENDED:
            yield f"    {source} --> {AFTER_OWNER_ENDED[source]}: its owner's life ends"

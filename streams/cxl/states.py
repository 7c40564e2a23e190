"""Which state of CXL memory may follow which: a table, as data, and the functions that read it.

What lives here: `RULES`, from which the diagram of docs/cxl.md is drawn, `transition` and `after_owner_ended`. What
must not: the states themselves (core.cxl_memory), who owns a block, when a transition is applied
(tables.pooled_block_table), bytes.

A block that is in no pool is in `local_gpu`: an unknown block and a block without metadata are in the same state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.ids import WorkerId

#: The metadata of a block about which nothing was reported.
NOT_POOLED = CxlMemoryMetadata(CxlMemoryState.LOCAL_GPU)


class PlacementEffect(enum.Enum):
    """What entering a state does to the pool and the accessible workers."""

    SET = "sets"
    KEPT = "keeps"
    DROPPED = "drops"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a state is entered. sources: states that it may follow. needs_pool: the transition must name a pool."""

    sources: frozenset[CxlMemoryState]
    needs_pool: bool
    placement: PlacementEffect


_ANY = frozenset(CxlMemoryState)

#: The rule of each state that can be entered. A transition that no rule allows is refused.
RULES: Mapping[CxlMemoryState, Rule] = {
    CxlMemoryState.LOCAL_GPU: Rule(_ANY, needs_pool=False, placement=PlacementEffect.DROPPED),
    CxlMemoryState.IN_TRANSIT: Rule(_ANY, needs_pool=True, placement=PlacementEffect.SET),
    CxlMemoryState.CXL_POOLED: Rule(
        frozenset({CxlMemoryState.IN_TRANSIT}), needs_pool=False, placement=PlacementEffect.KEPT
    ),
    CxlMemoryState.EVICTED: Rule(_ANY, needs_pool=False, placement=PlacementEffect.KEPT),
}

#: The state of a block after its owner's incarnation has ended: a block in transit never arrives.
AFTER_OWNER_ENDED: Mapping[CxlMemoryState, CxlMemoryState] = {CxlMemoryState.IN_TRANSIT: CxlMemoryState.EVICTED}

#: States in which a block has a pool that a transition may contradict.
_PLACED = frozenset({CxlMemoryState.IN_TRANSIT, CxlMemoryState.CXL_POOLED})


class RefusalReason(enum.StrEnum):
    """Why a transition changes nothing. The values are in dead letters and in metrics."""

    NO_POOL = "no_pool"  # in_transit without a pool
    NOT_IN_TRANSIT = "not_in_transit"  # cxl_pooled for a block that was not in transit
    OTHER_POOL = "other_pool"  # a pool other than the one that the block is in, or on its way to
    TABLE_FULL = "table_full"  # the partition already has the maximum number of rows


@dataclass(frozen=True, slots=True)
class TransitionRefused:
    """An illegal transition. It is a value, because the other blocks of the record are still processed."""

    reason: RefusalReason
    message: str


def transition(
    known: CxlMemoryMetadata,
    new_state: CxlMemoryState,
    pool_id: str | None = None,
    accessible_workers: tuple[WorkerId, ...] = (),
) -> CxlMemoryMetadata | TransitionRefused:
    """Return a block's metadata after a transition, or why it is refused, which leaves the block as it was.

    known: NOT_POOLED for a block that is in no pool. If a block leaves a pool, a pool named must be that pool.
    """
    rule = RULES[new_state]
    if known.state not in rule.sources:
        return TransitionRefused(
            RefusalReason.NOT_IN_TRANSIT, f"{new_state} must follow in_transit, but the block is {known.state}"
        )
    if rule.needs_pool and not pool_id:
        return TransitionRefused(RefusalReason.NO_POOL, f"{new_state} must name a pool")
    effect = rule.placement
    if effect is PlacementEffect.SET:
        return CxlMemoryMetadata(new_state, pool_id, accessible_workers)
    if pool_id and known.state in _PLACED and pool_id != known.pool_id:
        return TransitionRefused(
            RefusalReason.OTHER_POOL, f"the block is {known.state} in {known.pool_id!r}, not {pool_id!r}"
        )
    match effect:
        case PlacementEffect.KEPT:
            return CxlMemoryMetadata(new_state, known.pool_id, known.accessible_workers)
        case PlacementEffect.DROPPED:
            return CxlMemoryMetadata(new_state)
        case _:
            assert_never(effect)


def after_owner_ended(known: CxlMemoryMetadata) -> CxlMemoryMetadata:
    """Return a block's metadata after its owner's incarnation has ended; a block in a pool stays there."""
    state = AFTER_OWNER_ENDED.get(known.state)
    return known if state is None else replace(known, state=state)


def stored_as(state: CxlMemoryState) -> tuple[CxlMemoryState, ...]:
    """Return the transitions of a block that is stored with this state; it enters a pool through in_transit."""
    pooled = state is CxlMemoryState.CXL_POOLED
    return (CxlMemoryState.IN_TRANSIT, state) if pooled else (state,)

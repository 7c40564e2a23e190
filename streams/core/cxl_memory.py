"""Where a block is in CXL memory: its four states, and the metadata of one block.

What lives here: values that engines report and tables store, and how fast pools are read. What must not: which state
may follow which (streams.cxl.states), pools, bytes. `streams.cxl` offers the state and the metadata publicly.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from streams.core.ids import WorkerId
from streams.errors import InvalidEvent


class CxlMemoryState(enum.StrEnum):
    """Where a block is, as far as CXL memory is concerned. The values are written to Kafka."""

    LOCAL_GPU = "local_gpu"
    IN_TRANSIT = "in_transit"
    CXL_POOLED = "cxl_pooled"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True, init=False)
class CxlMemoryMetadata:
    """State, pool and accessible workers of one block, as one owner reports them.

    pool_id: None if the block neither is nor was in a pool. accessible_workers: the workers that can read the block in
    its pool, as the owner named them; if empty, all members of the pool.
    """

    state: CxlMemoryState
    pool_id: str | None
    accessible_workers: tuple[WorkerId, ...]

    def __init__(
        self, state: str = "local_gpu", pool_id: str | int | None = None, accessible_workers: Sequence[int] = ()
    ):
        """Take a state by its value, a pool by its id or number, and the workers in any sequence.

        Raises InvalidEvent for an unknown state.
        """
        if type(state) is not CxlMemoryState:
            state = state_of(state)
        if type(pool_id) is not str:
            pool_id = pool_name(pool_id)
        object.__setattr__(self, "state", state)
        object.__setattr__(self, "pool_id", pool_id)
        object.__setattr__(self, "accessible_workers", tuple(accessible_workers))


class PoolSpeeds(NamedTuple):
    """GB/s at which ranks load blocks from pools: by latency class, and from all other pools. 0 credits no block."""

    others: float
    by_class: Mapping[str, float] = MappingProxyType({})

    def of(self, latency_class: str) -> float:
        """Return the speed of pools of a class."""
        return self.by_class.get(latency_class, self.others)


def pool_name(pool_id: Any) -> Any:
    """Return a pool's number as decimal text; any other value as it is."""
    return str(pool_id) if isinstance(pool_id, int) and not isinstance(pool_id, bool) else pool_id


def state_of(value: str) -> CxlMemoryState:
    """Return the state with this value; raises InvalidEvent if there is none."""
    try:
        return CxlMemoryState(value)
    except ValueError as exc:
        expected = ", ".join(CxlMemoryState)
        raise InvalidEvent(f"{value!r} is not a state of CXL memory; expected one of {expected}") from exc

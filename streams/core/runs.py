"""Runs: the records in which the index table keeps blocks.

What lives here: a run and its key, as values. What must not: rules by which they change (run_store), bytes
(tables.records).

A run is at most RUN_BLOCKS_MAX consecutive blocks of one chain in one tier, addressed by its first sequence hash. Runs
never split or merge: divergence starts a new one, a removal flips a presence bit, an empty run is a tombstone. Only the
view's index joins them to prefixes (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from streams.core.events import MoeLabels
from streams.core.ids import Epoch, RankId, SequenceHash, Tier

#: Blocks a run record holds at most: a decode step rewrites half a full record on average, so twice as many would
#: double the 350 bytes that one generated block costs; half as many would cost 3 bytes more a block when full.
RUN_BLOCKS_MAX = 32


class RunKey(NamedTuple):
    """Address of a run record; fixed once the run exists."""

    rank: RankId
    tier: Tier
    first: SequenceHash


@dataclass(slots=True)
class Run:
    """One run. local, engine, sequence: n hashes each, n <= RUN_BLOCKS_MAX. present: bit i set when block i is held."""

    key: RunKey
    epoch: Epoch
    start: int
    parent: SequenceHash | None
    local: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    present: int = 0
    moe: dict[int, MoeLabels] = field(default_factory=dict)

    def held(self) -> Iterator[int]:
        """Offsets of the blocks held."""
        return (offset for offset in range(len(self.sequence)) if self.present >> offset & 1)

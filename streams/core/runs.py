"""Run records: the form in which the index table stores blocks.

What lives here: a run and its key, as values. What must not: the rules by which they change (run_store), bytes
(tables.records).

A run is at most RUN_BLOCKS_MAX consecutive blocks of one chain in one tier, addressed by its first sequence hash. Runs
never split or merge: a chain that diverges starts a new run, a removal clears a presence bit, and an empty run becomes
a tombstone. Only the view's index joins runs into prefixes (docs/tables.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from streams.core.events import MoeLabels
from streams.core.ids import Epoch, RankId, SequenceHash, Tier

#: Most blocks in a run record. Each new block rewrites its record, on average half of a full one, so a limit twice as
#: high would double the 350 bytes that one generated block costs. Half the limit would cost 3 more bytes per block in
#: full records.
RUN_BLOCKS_MAX = 32


class RunKey(NamedTuple):
    """Address of a run record; it never changes."""

    rank: RankId
    tier: Tier
    first: SequenceHash


@dataclass(slots=True)
class Run:
    """One run record.

    local, engine, sequence: n hashes each, n <= RUN_BLOCKS_MAX. present: bit i is set if block i is held.
    """

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
        """Offsets of the blocks that are held."""
        return (offset for offset in range(len(self.sequence)) if self.present >> offset & 1)

"""The blocks that a ledger holds in one tier: their names, copies and places on their chains (pure).

What lives here: the tables of one tier, and what involves no other tier. What must not: which events change them, and
what is published (ledger). Owner: a rank's ledger, one object per tier.

The ledger reads and writes the tables itself: a batch has thousands of blocks, and a method call for each takes longer
than the lookup.
"""

from __future__ import annotations

from typing import NamedTuple

from streams.core.events import MoeLabels
from streams.core.ids import Tier


class HeldBlock(NamedTuple):
    """One block held.

    published_as: the name that it was published under. position: on its chain, from 0. before: sequence hash of the
    block before it, None at the root.
    """

    published_as: int
    local: int
    before: int | None
    position: int


class TierBlocks:
    """The blocks held in one tier."""

    __slots__ = ("copies", "held", "labels", "more_names", "names", "other_names", "tier")

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        #: Engine hash to the sequence hash of the block that it names.
        self.names: dict[int, int] = {}
        #: Engine hash to the number of its block's copies, unless it is one; negative if there may be more.
        self.copies: dict[int, int] = {}
        #: Sequence hash to the fields of HeldBlock, for every block that has a name. The values are plain tuples: a
        #: batch adds thousands of them, and a NamedTuple takes four times as long.
        self.held: dict[int, tuple[int, int, int | None, int]] = {}
        #: Sequence hash to the number of its further names, for blocks with several.
        self.more_names: dict[int, int] = {}
        #: Published name to sequence hash, for the blocks that are published under a name that the engine does not give
        #: them, or no longer.
        self.other_names: dict[int, int] = {}
        #: Sequence hash to labels, for those of the blocks that have labels.
        self.labels: dict[int, MoeLabels] = {}

    def clear(self) -> None:
        """Hold nothing."""
        for table in (self.names, self.copies, self.held, self.more_names, self.other_names, self.labels):
            table.clear()

    def published_as(self, name: int) -> int | None:
        """Return the block that is published under a name; None if there is none."""
        block = self.names.get(name)
        if block is not None and block in self.held and self.held[block][0] == name:
            return block
        return self.other_names.get(name)

    def add_name(self, engine: int, block: int) -> None:
        """Count one more name of a block that is held."""
        if self.other_names.get(engine) == block:
            del self.other_names[engine]  # the engine gives it its old name again
        self.more_names[block] = self.more_names.get(block, 0) + 1

    def drop_name(self, engine: int) -> int | None:
        """Drop a name; if its block has no other, drop the block and return the name that it was published under."""
        block = self.names.pop(engine)
        self.copies.pop(engine, None)
        more = self.more_names
        if block in more:
            more[block] -= 1
            if not more[block]:
                del more[block]
            if self.held[block][0] == engine:
                self.other_names[engine] = block
            return None
        published_as = self.held.pop(block)[0]
        if published_as != engine:
            del self.other_names[published_as]
        self.labels.pop(block, None)
        return published_as

    def drop_blocks(self, engines: list[int]) -> list[int] | None:
        """Drop blocks that have one name and one copy each; return the names that they were published under.

        This is what most removals have, and needs a third of the time. Returns None, and drops nothing, for any other.
        """
        names = self.names
        if self.copies or self.more_names:
            return None
        if len(set(engines)) < len(engines) or not all(map(names.__contains__, engines)):
            return None
        blocks = list(map(names.pop, engines))
        removed = [held[0] for held in map(self.held.pop, blocks)]
        if self.other_names:
            for engine, name in zip(engines, removed, strict=True):
                if name != engine:
                    del self.other_names[name]
        if self.labels:
            for block in blocks:
                self.labels.pop(block, None)
        return removed

"""What speaks for a rank beside the blocks that it holds: pooled blocks that it reaches, and labels that match.

What lives here: `Beside`, both of one request. What must not: what they are worth (cost), and where they are kept
(block_sets, moe_labels, cxl.pooled_index).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from streams.core.arenas import Int64Array
from streams.core.block_sets import Held, Path
from streams.core.ids import HashArray, RankId
from streams.core.index import OverlapScores, RankPlaces

#: RunFold.holders_along, while nobody folds.
HoldersAlong = Callable[[HashArray, int, Int64Array, RankPlaces], Held | None]


class Beside:
    """Of one request. pooled, labelled: None where nothing of the kind is known of any of its blocks.

    sequence: uint64[n], the request's sequence hashes.
    """

    __slots__ = ("_holders_along", "_labelled", "_pooled", "_sequence")

    def __init__(
        self, sequence: HashArray, pooled: Path | None, labelled: Path | None, holders_along: HoldersAlong
    ) -> None:
        self._sequence = sequence
        self._pooled = pooled
        self._labelled = labelled
        self._holders_along = holders_along

    def cxl_accessible_blocks(self, places: RankPlaces, overlap: Int64Array) -> Int64Array | None:
        """Pooled blocks that each candidate reaches on its unbroken prefix, beyond its own leading blocks: int64[n].

        overlap: int64[n], its own leading blocks. The prefix goes on over blocks that it reaches in a pool and over its
        own behind those, and ends at the first one that is neither; a block of its own that lies behind a pooled one is
        no leading block and is not counted, unless a pool has it too. None where nothing is pooled.
        """
        if self._pooled is None:
            return None
        blocks, _, first = self._pooled.walk(places, overlap)
        if first < len(self._sequence):  # behind the pooled blocks may be some of its own, and then pooled ones again
            held = self._holders_along(self._sequence, first, self._pooled.rows(), places)
            if held is not None:
                blocks, _, _ = self._pooled.walk(places, overlap, held)
        return blocks

    def matching(self, ranks: Sequence[RankId], scores: OverlapScores) -> set[RankId]:
        """Ranks of which any own leading block has labels that match."""
        if self._labelled is None:
            return set()
        places = RankPlaces(ranks)
        overlap = np.array([scores.scores.get(rank, 0) for rank in ranks], dtype=np.int64)
        blocks = self._labelled.count_within(places, overlap).tolist()
        return {rank for rank, n_blocks in zip(ranks, blocks, strict=True) if n_blocks}

    def moe_blocks(self, places: RankPlaces, overlap: Int64Array) -> Int64Array | None:
        """Blocks of each candidate's own leading ones whose labels match: int64[n]; None where none does."""
        return None if self._labelled is None else self._labelled.count_within(places, overlap)

"""What counts for a rank in addition to the blocks that it holds: pooled blocks that it reaches, and labels that match.

What lives here: `SupplementaryMatches`, both for one request. What must not: their weights (cost), and where they are
kept (block_facts, cxl.pooled_index).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from streams.core.block_facts.fact_sets import FactQuery, WeighedMatches
from streams.core.ids import Float64Array, HashArray, Int64Array, RankId
from streams.core.index.interface import Candidates, HolderBitmaps, OverlapScores
from streams.core.index.run_fold import RunFold

#: RunFold.holders_along, called while no other thread folds.
HoldersAlong = Callable[[HashArray, int, Int64Array, Candidates], HolderBitmaps | None]


def locked_holders(index: RunFold, index_lock: AbstractContextManager[object]) -> HoldersAlong:
    """Return the index's `holders_along`, called under the lock under which the index is folded."""

    def holders_along(
        sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates
    ) -> HolderBitmaps | None:
        with index_lock:
            return index.holders_along(sequence, first, rows, candidates)

    return holders_along


class SupplementaryMatches:
    """Of one request. pooled, labelled: None where nothing of the kind is known, or asked for.

    sequence: uint64[n], the request's sequence hashes, contiguous. facts_lock: within it what is told of blocks
    stays as it is; it is taken for microseconds.
    """

    __slots__ = ("_facts_lock", "_holders_along", "_labelled", "_pooled", "_sequence")

    def __init__(
        self,
        sequence: HashArray,
        pooled: FactQuery | None,
        labelled: FactQuery | None,
        holders_along: HoldersAlong,
        facts_lock: AbstractContextManager[object],
    ) -> None:
        self._sequence = sequence
        self._pooled = pooled
        self._labelled = labelled
        self._holders_along = holders_along
        self._facts_lock = facts_lock

    def weigh(
        self, candidates: Candidates, overlap: Int64Array, effective: Float64Array, cxl_weight: float, moe_weight: float
    ) -> WeighedMatches | None:
        """Count both kinds for each candidate, beside its own leading blocks, and what it has then; None for nothing.

        overlap: int64[m], its own leading blocks; effective: float64[m], what those count. Of pooled blocks those count
        that it reaches on its unbroken prefix beyond its own: the prefix goes on over blocks that it reaches in a pool
        and over its own behind those, and ends at the first one that is neither; a block of its own that lies behind a
        pooled one is no leading block and is not counted, unless a pool has it too. Of labels those of its own leading
        blocks.
        """
        sequence, asked = self._sequence, self._pooled or self._labelled
        if asked is None:
            return None
        numbers = asked.numbers.of(candidates)
        with self._facts_lock:
            weighed = asked.sets.weigh(
                None if self._pooled is None else self._pooled.masks(),
                None if self._labelled is None else self._labelled.masks(),
                sequence,
                numbers,
                overlap,
                effective,
                cxl_weight,
                moe_weight,
            )
        if weighed.first_end < len(sequence):
            # Behind the pooled blocks may be some of its own, and then pooled ones again.
            reached = self._reached_over_own(candidates, overlap, weighed)
            if reached is not None:
                with_pooled = effective + cxl_weight * reached
                with_both = with_pooled
                if weighed.moe_scores is not None:
                    with_both = with_pooled + moe_weight * weighed.moe_scores
                return weighed._replace(cxl_accessible_scores=reached, with_pooled=with_pooled, with_both=with_both)
        return weighed

    def _reached_over_own(
        self, candidates: Candidates, overlap: Int64Array, weighed: WeighedMatches
    ) -> Int64Array | None:
        """The pooled blocks again, where anybody holds blocks behind the first end; None where nobody does."""
        assert self._pooled is not None  # nobody counts pooled blocks otherwise
        held = self._holders_along(self._sequence, weighed.first_end, weighed.rows, candidates)
        if held is None:
            return None
        # What was told meanwhile is in the path, and counts as far as what is held goes.
        with self._facts_lock:
            path = self._pooled.path(self._sequence)
        return None if path is None else path.walk(candidates, overlap, held)

    def matching(self, ranks: Sequence[RankId], scores: OverlapScores) -> set[RankId]:
        """Ranks of which any own leading block has labels that match."""
        if self._labelled is None:
            return set()
        candidates = Candidates(ranks)
        overlap = np.array([scores.scores.get(rank, 0) for rank in ranks], dtype=np.int64)
        labels_alone = SupplementaryMatches(self._sequence, None, self._labelled, self._holders_along, self._facts_lock)
        weighed = labels_alone.weigh(candidates, overlap, np.zeros(len(ranks)), 0.0, 0.0)
        if weighed is None or weighed.moe_scores is None:
            return set()
        return {rank for rank, n_blocks in zip(ranks, weighed.moe_scores.tolist(), strict=True) if n_blocks}

"""Supplementary matches: what counts for a rank in addition to its own cached prefix.

What lives here: `SupplementaryMatches`, the pooled blocks that candidates reach and the labels that match, for one
request. What must not: their weights (cost), and where they are stored (block_facts, cxl.pooled_index).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from streams.core.block_facts.fact_sets import FactQuery, WeighedMatches
from streams.core.ids import Float64Array, HashArray, Int64Array, RankId
from streams.core.index.interface import Candidates, HolderBitmaps, PrefixScores

#: TreeRunFold.holders_along, called while no other thread folds.
HoldersAlong = Callable[[HashArray, int, Int64Array, Candidates], HolderBitmaps | None]


def locked_holders(holders_along: HoldersAlong, index_lock: AbstractContextManager[object]) -> HoldersAlong:
    """Return an index's `holders_along`, called under the lock under which the index is folded."""

    def locked(sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates) -> HolderBitmaps | None:
        with index_lock:
            return holders_along(sequence, first, rows, candidates)

    return locked


class SupplementaryMatches:
    """The supplementary matches of one request.

    sequence: uint64[n], the request's sequence hashes, contiguous. keys: the keys under which each block's facts are,
    see FactSets.weigh. pooled, labelled: queries, None if the request does not use such facts or there are none.
    facts_lock: facts change only under it; it is held for microseconds.
    """

    __slots__ = ("_facts_lock", "_holders_along", "_keys", "_labelled", "_pooled", "_sequence")

    def __init__(
        self,
        sequence: HashArray,
        pooled: FactQuery | None,
        labelled: FactQuery | None,
        holders_along: HoldersAlong,
        facts_lock: AbstractContextManager[object],
        keys: HashArray | None = None,
    ) -> None:
        self._sequence = sequence
        self._keys = sequence if keys is None else keys
        self._pooled = pooled
        self._labelled = labelled
        self._holders_along = holders_along
        self._facts_lock = facts_lock

    def weigh(
        self, candidates: Candidates, scores: Int64Array, effective: Float64Array, cxl_weight: float, moe_weight: float
    ) -> WeighedMatches | None:
        """Count CXL-accessible and MoE-matching blocks of each candidate, and add their weights; None without a query.

        scores: int64[m], the candidates' own leading blocks. effective: float64[m], these weighted by tier.

        CXL-accessible blocks are those that a candidate reaches in a pool on its unbroken prefix, after its own leading
        blocks. The prefix continues over blocks that it reaches in a pool and over its own blocks after those, and ends
        at the first block that is neither. Own blocks that follow a pooled one are not leading blocks and are not
        counted, unless a pool has them too. MoE-matching blocks are own leading blocks whose labels match.
        """
        sequence, query = self._sequence, self._pooled or self._labelled
        if query is None:
            return None
        numbers = query.numbers.of(candidates)
        with self._facts_lock:
            weighed = query.sets.weigh(
                None if self._pooled is None else self._pooled.masks(),
                None if self._labelled is None else self._labelled.masks(),
                self._keys,
                numbers,
                scores,
                effective,
                cxl_weight,
                moe_weight,
            )
        if weighed.first_end < len(sequence):
            # The pooled blocks may be followed by a candidate's own blocks, and those by pooled ones again.
            over_own = self._count_over_own(candidates, scores, weighed)
            if over_own is not None:
                cxl_accessible_scores, by_group = over_own
                with_pooled = effective + cxl_weight * cxl_accessible_scores
                with_both = with_pooled
                if weighed.moe_scores is not None:
                    with_both = with_pooled + moe_weight * weighed.moe_scores
                return weighed._replace(
                    cxl_accessible_scores=cxl_accessible_scores,
                    with_pooled=with_pooled,
                    with_both=with_both,
                    by_group=by_group,
                )
        return weighed

    def _count_over_own(
        self, candidates: Candidates, scores: Int64Array, weighed: WeighedMatches
    ) -> tuple[Int64Array, Int64Array | None] | None:
        """Count CXL-accessible blocks across own blocks that follow them, in total and by group; None if no candidate
        holds such blocks."""
        assert self._pooled is not None  # the first end is before the end of the request only if pools were queried
        held = self._holders_along(self._sequence, weighed.first_end, weighed.rows, candidates)
        if held is None:
            return None
        # The path may include facts that were folded since the first count. They are used as far as `held` goes.
        with self._facts_lock:
            path = self._pooled.path(self._keys)
        counts = None if path is None else path.walk(candidates, scores, held)
        if path is None or counts is None:
            return None
        return counts, path.by_group(candidates, scores, counts) if len(self._pooled.groups) > 1 else None

    @property
    def groups(self) -> tuple[str, ...]:
        """A latency class of each group of pools by which blocks are counted."""
        return ("",) if self._pooled is None else self._pooled.groups

    def matching(self, ranks: Sequence[RankId], scores: PrefixScores) -> set[RankId]:
        """Return the ranks that have MoE-matching blocks."""
        if self._labelled is None:
            return set()
        candidates = Candidates(ranks)
        own_scores = np.array([scores.scores.get(rank, 0) for rank in ranks], dtype=np.int64)
        labels_alone = SupplementaryMatches(self._sequence, None, self._labelled, self._holders_along, self._facts_lock)
        weighed = labels_alone.weigh(candidates, own_scores, np.zeros(len(ranks)), 0.0, 0.0)
        if weighed is None or weighed.moe_scores is None:
            return set()
        return {rank for rank, n_blocks in zip(ranks, weighed.moe_scores.tolist(), strict=True) if n_blocks}

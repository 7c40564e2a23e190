"""The price of sending a request to a rank, in blocks (docs/architecture.md, Cost).

What lives here: the cost formula and its terms, so that an answer can show them. What must not: choosing (selection).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array, RankId

#: Weight of a cached block by the tier of its fastest copy: device, host, disk, external. A host copy comes back over
#: PCIe at about a quarter of what computing it costs; external memory is not counted until a pool says who reaches it.
TIER_WEIGHTS = (1.0, 0.75, 0.25, 0.0)

#: Weight of a block that a rank reaches in a CXL pool: loading one goes over the same PCIe as a host copy does.
CXL_SCORE_WEIGHT = 0.75
#: What a cached block counts more where its labels match the request's slice of experts: of two ranks that hold as much
#: and are as busy the matching one wins, and one without labels wins where it holds more than half as much again. Own
#: prefill is never below 0: of ranks that hold the whole request labels prefer none.
MOE_SCORE_WEIGHT = 0.5


class RankTerms(NamedTuple):
    """Every term of one rank's cost, in blocks unless said.

    effective_cached_blocks: the rank's own, weighted by tier, and the weighted cxl_accessible_scores and moe_scores.
    cached_blocks: the same without the last, which say what a block is worth and not what need not be computed.
    """

    rank: RankId
    scores: int
    cxl_accessible_scores: int
    moe_scores: int
    cached_blocks: float
    effective_cached_blocks: float
    own_prefill_blocks: float
    active_prefill_blocks: float
    decode_blocks: float
    cost: float


def prefill_tokens(n_tokens: int, cached_blocks: float, block_size: int) -> int:
    """Tokens of a request that a rank must compute. cached_blocks: those it holds, weighted by tier."""
    return max(0, n_tokens - int(cached_blocks * block_size))


def price_terms(
    request_blocks: int,
    effective_cached_blocks: Float64Array,
    active_prefill_tokens: Int64Array,
    decode_blocks: Int64Array,
    block_size: int,
    overlap_score_weight: float,
) -> Float64Array:
    """Price a request at n ranks; gives float64[4, n]: own prefill, active prefill and decode blocks, and the cost.

    decode_blocks: distinct active blocks of each rank with this request's among them.
    """
    own = np.maximum(0.0, request_blocks - effective_cached_blocks)
    queued = active_prefill_tokens / block_size
    return np.array([own, queued, decode_blocks, overlap_score_weight * (own + queued) + decode_blocks])


class TermColumns:
    """Terms of all candidates, in their order: what a choice reads, without an object for each.

    scores, cxl_accessible_scores, moe_scores: int64[n], None for cxl and moe blocks that are all 0;
    cached_blocks, effective_cached_blocks: float64[n], as of RankTerms; terms: float64[4, n], as of `price_terms`.
    """

    __slots__ = (
        "_terms",
        "cached_blocks",
        "cxl_accessible_scores",
        "effective_cached_blocks",
        "moe_scores",
        "ranks",
        "scores",
    )

    def __init__(
        self,
        ranks: Sequence[RankId],
        scores: Int64Array,
        effective_cached_blocks: Float64Array,
        terms: Float64Array,
        *,
        cached_blocks: Float64Array | None = None,
        cxl_accessible_scores: Int64Array | None = None,
        moe_scores: Int64Array | None = None,
    ) -> None:
        """cached_blocks: left out, they are the effective ones."""
        self.ranks = ranks
        self.scores = scores
        self.cxl_accessible_scores = cxl_accessible_scores
        self.moe_scores = moe_scores
        self.cached_blocks = effective_cached_blocks if cached_blocks is None else cached_blocks
        self.effective_cached_blocks = effective_cached_blocks
        self._terms = terms

    @property
    def own_prefill_blocks(self) -> Float64Array:
        """What each rank would have to compute of the request."""
        own: Float64Array = self._terms[0]
        return own

    @property
    def cost(self) -> Float64Array:
        """What the choice was made by, lower is better: the formula's, or that of one of core.policies."""
        cost: Float64Array = self._terms[3]
        return cost

    @cost.setter
    def cost(self, costs: Sequence[float]) -> None:
        self._terms[3] = costs

    def row(self, index: int) -> RankTerms:
        """One candidate's terms."""
        own, queued, decode, cost = self._terms[:, index].tolist()
        return RankTerms(
            self.ranks[index],
            self.scores.item(index),
            0 if self.cxl_accessible_scores is None else self.cxl_accessible_scores.item(index),
            0 if self.moe_scores is None else self.moe_scores.item(index),
            self.cached_blocks.item(index),
            self.effective_cached_blocks.item(index),
            own,
            queued,
            decode,
            cost,
        )

    def __len__(self) -> int:
        return len(self.ranks)

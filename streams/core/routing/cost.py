"""The price of sending a request to a rank, in blocks (docs/bookings.md).

What lives here: the cost formula, and its terms, which an answer can show. What must not: choosing (selection).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streams.core.ids import Float64Array, Int64Array, RankId

#: Weight of a cached block by the tier of its fastest copy: device, host, disk, external. Loading a host copy over PCIe
#: costs about a quarter of computing the block. External memory has no weight, since it is not known which ranks reach
#: it; CXL pools have a weight of their own.
TIER_WEIGHTS = (1.0, 0.75, 0.25, 0.0)

#: Weight of a block that a rank reaches in a CXL pool: it is loaded over the same PCIe as a host copy.
CXL_SCORE_WEIGHT = 0.75

#: Additional weight of a cached block whose labels match the request's experts. Of two ranks with equal load and equal
#: scores, the matching one wins; a rank without labels wins if it holds more than one and a half times as much. Own
#: prefill is never below 0, so that labels do not change the costs of ranks that hold the whole request; there, they
#: decide exact ties (mode kv, temperature 0).
MOE_SCORE_WEIGHT = 0.5

#: How much more a token costs on the rank that computed the most lately than on an idle one, while no requests are in
#: flight. A request leaves the only rank with its prefix if that is less than a sixth of the prompt. Up to 0.5, the
#: laboratory's figures differ by about a percent.
RECENT_PREFILL_WEIGHT = 0.2


class RankTerms(NamedTuple):
    """Every term of one rank's cost, in blocks.

    scores: the rank's own leading blocks. effective_cached_blocks: these weighted by tier, plus the weighted
    cxl_accessible_scores and moe_scores. cached_blocks: the same without moe_scores, which express a preference and do
    not reduce what must be computed. recent_prefill_blocks: what own prefill costs more because of what the rank
    computed lately. policy_terms: what a policy's cost is made of, None in modes without a policy; the
    cost is then not in blocks.
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
    recent_prefill_blocks: float
    cost: float
    policy_terms: Mapping[str, float] | None = None


def prefill_tokens(n_tokens: int, cached_blocks: float, block_size: int) -> int:
    """Return how many tokens of a request a rank must compute. cached_blocks: those that it holds, weighted by tier."""
    return max(0, n_tokens - int(cached_blocks * block_size))


class TermColumns:
    """Terms of all candidates, in their order, as columns: a choice needs no object for each candidate.

    scores, cxl_accessible_scores, moe_scores: int64[n]; the last two may be None, which stands for all 0.
    cached_blocks, effective_cached_blocks: float64[n], as in RankTerms. terms: float64[5, n], as from
    kernels.price.price_ranks.
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
        """cached_blocks: if left out, the same as effective_cached_blocks."""
        self.ranks = ranks
        self.scores = scores
        self.cxl_accessible_scores = cxl_accessible_scores
        self.moe_scores = moe_scores
        self.cached_blocks = effective_cached_blocks if cached_blocks is None else cached_blocks
        self.effective_cached_blocks = effective_cached_blocks
        self._terms = terms

    @property
    def terms(self) -> Float64Array:
        """All terms: float64[5, n], as from kernels.price.price_ranks."""
        return self._terms

    @property
    def own_prefill_blocks(self) -> Float64Array:
        """What each rank would have to compute of the request, in blocks."""
        own: Float64Array = self._terms[0]
        return own

    @property
    def active_prefill_blocks(self) -> Float64Array:
        """What earlier requests still have to compute on each rank, in blocks."""
        active: Float64Array = self._terms[1]
        return active

    @property
    def decode_blocks(self) -> Float64Array:
        """Distinct blocks in use on each rank, including those of the request."""
        decode: Float64Array = self._terms[2]
        return decode

    @property
    def cost(self) -> Float64Array:
        """The value that the choice minimises: from the cost formula, or from one of core.routing.policies."""
        cost: Float64Array = self._terms[4]
        return cost

    @cost.setter
    def cost(self, costs: Sequence[float]) -> None:
        self._terms[4] = costs

    def row(self, index: int) -> RankTerms:
        """One candidate's terms."""
        own, active, decode, recent, cost = self._terms[:, index].tolist()
        return RankTerms(
            self.ranks[index],
            self.scores.item(index),
            0 if self.cxl_accessible_scores is None else self.cxl_accessible_scores.item(index),
            0 if self.moe_scores is None else self.moe_scores.item(index),
            self.cached_blocks.item(index),
            self.effective_cached_blocks.item(index),
            own,
            active,
            decode,
            recent,
            cost,
        )

    def rows(self) -> tuple[RankTerms, ...]:
        """The terms of all candidates, in their order."""
        n = len(self.ranks)
        cxl, moe = self.cxl_accessible_scores, self.moe_scores
        columns = (
            self.scores.tolist(),
            [0] * n if cxl is None else cxl.tolist(),
            [0] * n if moe is None else moe.tolist(),
            self.cached_blocks.tolist(),
            self.effective_cached_blocks.tolist(),
            *self._terms.tolist(),
        )
        return tuple(map(RankTerms, self.ranks, *columns))

    def __len__(self) -> int:
        return len(self.ranks)

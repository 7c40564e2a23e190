"""The price of sending a request to a rank, in blocks (docs/architecture.md, Cost).

What lives here: the cost formula and its terms, so that an answer can show them. What must not: choosing (selection).
"""

from __future__ import annotations

from dataclasses import dataclass

from streams.core.ids import RankId

#: Weight of a cached block by the tier of its fastest copy: device, host, disk, external. A host copy comes back over
#: PCIe at about a quarter of what computing it costs; external memory is not counted until a pool says who reaches it.
TIER_WEIGHTS = (1.0, 0.75, 0.25, 0.0)


@dataclass(frozen=True, slots=True)
class RankTerms:
    """Every term of one rank's cost, in blocks unless said."""

    rank: RankId
    overlap_blocks: int
    effective_cached_blocks: float
    own_prefill_blocks: float
    active_prefill_blocks: float
    decode_blocks: float
    cost: float


def prefill_tokens(n_tokens: int, cached_blocks: float, block_size: int) -> int:
    """Tokens of a request that a rank must compute. cached_blocks: those it holds, weighted by tier."""
    return max(0, n_tokens - int(cached_blocks * block_size))


def rank_terms(
    rank: RankId,
    *,
    request_blocks: int,
    overlap_blocks: int,
    effective_cached_blocks: float,
    active_prefill_tokens: int,
    decode_blocks: int,
    block_size: int,
    overlap_score_weight: float,
) -> RankTerms:
    """Price one rank; lower is better.

    decode_blocks: distinct active blocks of the rank with this request's among them.
    """
    own = max(0.0, request_blocks - effective_cached_blocks)
    queued = active_prefill_tokens / block_size
    cost = overlap_score_weight * (own + queued) + decode_blocks
    return RankTerms(rank, overlap_blocks, effective_cached_blocks, own, queued, decode_blocks, cost)

"""The terms of all candidates and the cheapest of them, computed by a kernel.

What lives here: gathering what a price is made of. What must not: the formula (cost), and breaking ties (selection).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array
from streams.core.loads.bookings import ActiveLoads
from streams.core.routing.candidate_columns import SelectedColumns
from streams.core.routing.cost import TermColumns
from streams.core.routing.kernels.price import price_ranks
from streams.core.routing.request import RoutingRequest

_BYTES_PER_HASH = 8
_COUNT_MASK = (1 << 32) - 1

#: The preference of candidates that differ in nothing but their cost.
NO_PREFERENCE: Int64Array = np.empty(0, dtype=np.int64)


class Priced(NamedTuple):
    """Terms of all candidates, and the best ones: those with the lowest cost and, among these, the greatest preference.

    first: index of the first of the best. n_lowest: how many there are.
    """

    columns: TermColumns
    first: int
    n_lowest: int


class HeldBlocks(NamedTuple):
    """What each of n candidates has of a request.

    scores: int64[n], own leading blocks. effective: float64[n], what the cost is computed from. cached,
    cxl_accessible_scores, moe_scores: parts of it, as in RankTerms; the last two are None without any. preference:
    int64[n], decides between candidates of exactly the same cost; NO_PREFERENCE decides nothing.
    """

    scores: Int64Array
    effective: Float64Array
    cached: Float64Array
    cxl_accessible_scores: Int64Array | None = None
    moe_scores: Int64Array | None = None
    preference: Int64Array = NO_PREFERENCE


def held_blocks(request: RoutingRequest, columns: SelectedColumns) -> HeldBlocks:
    """Look up what the candidates have of a request; nothing if the policy does not read the index."""
    policy, matches, positions = request.policy, request.matches, columns.positions
    if not policy.reads_index:
        nothing = np.zeros(len(columns.rows))
        return HeldBlocks(np.zeros(len(columns.rows), np.int64), nothing, nothing)
    candidates = columns.base.candidates
    scores, effective = matches.scores.columns(candidates, policy.tier_weights)
    weighed = None
    if matches.supplementary is not None:
        weighed = matches.supplementary.weigh(
            candidates, scores, effective, policy.cxl_score_weight, policy.moe_score_weight
        )
    if positions is not None:
        scores, effective = scores[positions], effective[positions]
    if weighed is None:
        return HeldBlocks(scores, effective, effective)
    if positions is not None:
        weighed = weighed.of(positions)
    cxl_accessible_scores, moe_scores, with_pooled, with_both = weighed[:4]
    # Own prefill is never below 0, so ranks that hold the whole request cost the same whatever their labels are: there,
    # labels decide the tie. With weight 0 labels are not part of the choice.
    preference = NO_PREFERENCE if moe_scores is None or not policy.moe_score_weight > 0.0 else moe_scores
    return HeldBlocks(scores, with_both, with_pooled, cxl_accessible_scores, moe_scores, preference)


def price(request: RoutingRequest, columns: SelectedColumns, loads: ActiveLoads, held: HeldBlocks) -> Priced:
    """Price a request at each of its candidates, of which there is at least one.

    Without track_active_blocks, decode blocks are 0.
    """
    policy, prompt = request.policy, request.prompt
    terms = np.empty((5, len(columns.rows)))
    lowest = price_ranks(
        loads.table,
        loads.times.table,
        columns.rows,
        loads.shared_blocks(prompt.sequence),
        held.effective,
        held.preference,
        prompt.request_blocks,
        len(prompt.sequence) // _BYTES_PER_HASH,
        prompt.block_size,
        policy.overlap_score_weight,
        policy.overlap_credit - 1.0,
        policy.request_weight,
        policy.recent_prefill_weight,
        policy.track_active_blocks,
        terms,
    )
    priced = TermColumns(
        columns.ranks,
        held.scores,
        held.effective,
        terms,
        cached_blocks=held.cached,
        cxl_accessible_scores=held.cxl_accessible_scores,
        moe_scores=held.moe_scores,
    )
    return Priced(priced, lowest >> 32, lowest & _COUNT_MASK)

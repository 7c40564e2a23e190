"""The terms of all candidates and the cheapest of them, computed by a kernel.

What lives here: gathering what a price is made of. What must not: the formula (cost), and breaking ties (selection).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.loads.bookings import ActiveLoads
from streams.core.routing.cost import TermColumns
from streams.core.routing.kernels.price import price_ranks

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


def price(
    ranks: Sequence[RankId],
    loads: ActiveLoads,
    rows: Int64Array,
    *,
    sequence: bytes,
    request_blocks: int,
    scores: Int64Array,
    effective_cached_blocks: Float64Array,
    block_size: int,
    overlap_score_weight: float,
    track_active_blocks: bool,
    cached_blocks: Float64Array | None = None,
    cxl_accessible_scores: Int64Array | None = None,
    moe_scores: Int64Array | None = None,
    preference: Int64Array = NO_PREFERENCE,
    overlap_credit: float = 1.0,
    request_weight: float = 0.0,
) -> Priced:
    """Price a request at each of `ranks`, which must not be empty.

    rows: int64[n], the rows of their loads (ActiveLoads.rows_of). sequence: the request's, packed. scores: int64[n].
    effective_cached_blocks: float64[n], what the cost is computed from. cached_blocks, cxl_accessible_scores and
    moe_scores are parts of it, and are only passed on to the terms. Without track_active_blocks, decode blocks are 0.
    preference: int64[n], decides between candidates of exactly the same cost; NO_PREFERENCE decides nothing.
    overlap_credit, request_weight: as in RoutePolicy.
    """
    terms = np.empty((4, len(rows)))
    lowest = price_ranks(
        loads.table,
        rows,
        loads.shared_blocks(sequence),
        effective_cached_blocks,
        preference,
        request_blocks,
        len(sequence) // _BYTES_PER_HASH,
        block_size,
        overlap_score_weight,
        overlap_credit - 1.0,
        request_weight,
        track_active_blocks,
        terms,
    )
    columns = TermColumns(
        ranks,
        scores,
        effective_cached_blocks,
        terms,
        cached_blocks=cached_blocks,
        cxl_accessible_scores=cxl_accessible_scores,
        moe_scores=moe_scores,
    )
    return Priced(columns, lowest >> 32, lowest & _COUNT_MASK)

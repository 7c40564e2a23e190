"""All candidates' terms and the cheapest of them: by a kernel, and in NumPy where numba cannot be imported.

What lives here: what a price is made of, from where it is kept. What must not: the formula (core.cost), and choosing
between equals (selection). Kernel and NumPy give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.kernels.available import kernels_available
from streams.core.loads.bookings import ActiveLoads
from streams.core.routing.cost import TermColumns, price_terms

_BYTES_PER_HASH = 8
_COUNT_MASK = (1 << 32) - 1


def price_in_numpy(
    table: Int64Array,
    rows: Int64Array,
    shared: Int64Array,
    effective: Float64Array,
    request_blocks: int,
    full_blocks: int,
    block_size: int,
    weight: float,
    tracked: bool,
    terms: Float64Array,
) -> int:
    """As kernels.price.price_ranks."""
    tokens, decode = table[0].take(rows), table[1].take(rows) + full_blocks - shared.take(rows)
    if not tracked:
        decode = np.zeros_like(decode)
    terms[:] = price_terms(request_blocks, effective, tokens, decode, block_size, weight)
    cost = terms[3]
    return int(cost.argmin()) << 32 | int(np.count_nonzero(cost == cost.min()))


if kernels_available():
    from streams.core.routing.kernels.price import price_ranks
else:
    price_ranks = price_in_numpy


class Priced(NamedTuple):
    """Terms of all candidates. first: index of the first of the cheapest; n_lowest: how many are as cheap."""

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
) -> Priced:
    """Price a request at each of `ranks`, which must not be empty.

    rows: int64[n], where their loads are (ActiveLoads.rows_of); sequence: the request's, packed; overlap_blocks:
    int64[n]; effective_cached_blocks: float64[n], of which cached, cxl_accessible and moe blocks are parts, here to be
    told. Without track_active_blocks decode blocks are none.
    """
    terms = np.empty((4, len(rows)))
    lowest = price_ranks(
        loads.table,
        rows,
        loads.shared_blocks(sequence),
        effective_cached_blocks,
        request_blocks,
        len(sequence) // _BYTES_PER_HASH,
        block_size,
        overlap_score_weight,
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

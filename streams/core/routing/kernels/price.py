"""The price of a request at every candidate, and the lowest price, in one pass (the formula is in core.routing.cost).

What lives here: arithmetic over columns. What must not: breaking ties, which selection does with a generator. Sums and
products are computed in the same order as in core.routing.cost, so that both return the same bits.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, types

from streams.core.ids import Float64Array, Int64Array
from streams.core.kernels.compiling import kernel

_INTS = types.Array(int64, 1, "C")
_FLOATS = types.Array(float64, 1, "C")
_TABLE = types.Array(int64, 2, "C")


# It keeps the GIL: it takes less than a microsecond, and getting the GIL back from a folding thread would take longer.
@kernel(
    int64(
        _TABLE,
        _TABLE,
        _INTS,
        _INTS,
        _FLOATS,
        _INTS,
        int64,
        int64,
        int64,
        float64,
        float64,
        float64,
        float64,
        boolean,
        types.Array(float64, 2, "C"),
    ),
    nogil=False,
)
def price_ranks(
    table: Int64Array,
    times: Int64Array,
    rows: Int64Array,
    shared: Int64Array,
    effective: Float64Array,
    preference: Int64Array,
    request_blocks: int,
    full_blocks: int,
    block_size: int,
    weight: float,
    more_credit: float,
    request_weight: float,
    recent_weight: float,
    tracked: bool,
    terms: Float64Array,
) -> int:
    """Price n candidates; return index << 32 | count: the first of the best candidates, and how many are as good.

    The best candidates have the lowest cost and, among exact ties, the greatest preference.

    table, times: int64[4, n_rows] and int64[8, n_rows], of ActiveLoads. rows: int64[n], the row of each candidate.
    shared: int64[n_rows], how many of the request's full_blocks each row has in use. effective: float64[n], cached
    blocks. preference: int64[n], or int64[0] if there is none. more_credit, request_weight, recent_weight: as in
    core.routing.cost. tracked: whether decode blocks are part of the cost. terms: float64[5, n], the output: own
    prefill, active prefill, decode blocks, recent prefill, cost.
    """
    most, n_requests = 1, 0
    for index in range(rows.size):
        most = max(most, times[7, rows[index]])
        n_requests += table[2, rows[index]]
    idle = rows.size / float64(rows.size + n_requests)
    recent_weight *= idle * idle / most
    lowest, first, n_equal, prefers = np.inf, 0, 0, preference.size != 0
    for index in range(rows.size):
        row = rows[index]
        own = max(0.0, request_blocks - effective[index])
        active = table[0, row] / block_size
        decode = float64(table[1, row] + full_blocks - shared[row]) if tracked else 0.0
        prefill = own + active
        if more_credit != 0.0:
            prefill = max(0.0, prefill - more_credit * effective[index])
        recent = recent_weight * times[7, row] * own
        cost = weight * (prefill + recent) + decode + request_weight * table[2, row]
        terms[0, index] = own
        terms[1, index] = active
        terms[2, index] = decode
        terms[3, index] = recent
        terms[4, index] = cost
        if cost < lowest:
            lowest, first, n_equal = cost, index, 1
        elif cost == lowest:
            if not prefers or preference[index] == preference[first]:
                n_equal += 1
            elif preference[index] > preference[first]:
                first, n_equal = index, 1
    return (first << 32) | n_equal

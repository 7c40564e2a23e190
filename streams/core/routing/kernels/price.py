"""The price of a request at every candidate, and the lowest of them, in one pass; core.cost says the formula in Python.

What lives here: arithmetic over columns. What must not: which of several equals is chosen, which is for selection and a
generator. Sums and products are done in the order of core.cost, so that both give the same bits.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, types

from streams.core.ids import Float64Array, Int64Array
from streams.core.kernels.compiling import kernel

_INTS = types.Array(int64, 1, "C")
_FLOATS = types.Array(float64, 1, "C")


# Keeps the GIL: it ends within a microsecond, and to get it back from a thread that folds would take longer.
@kernel(
    int64(
        types.Array(int64, 2, "C"),
        _INTS,
        _INTS,
        _FLOATS,
        int64,
        int64,
        int64,
        float64,
        boolean,
        types.Array(float64, 2, "C"),
    ),
    nogil=False,
)
def price_ranks(
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
    """Price candidates; gives index << 32 | number of equals, the index being that of the first of the cheapest.

    table: int64[4, n_rows] of ActiveLoads; rows: int64[n], where each candidate's load is there; shared: int64[n_rows],
    how many of the request's full_blocks are in use at each row; effective: float64[n] cached blocks; tracked: whether
    decode blocks count. terms: float64[4, n], to be written: own prefill, active prefill, decode blocks, cost.
    """
    lowest, first, n_equal = np.inf, 0, 0
    for index in range(rows.size):
        row = rows[index]
        own = max(0.0, request_blocks - effective[index])
        queued = table[0, row] / block_size
        decode = float64(table[1, row] + full_blocks - shared[row]) if tracked else 0.0
        cost = weight * (own + queued) + decode
        terms[0, index] = own
        terms[1, index] = queued
        terms[2, index] = decode
        terms[3, index] = cost
        if cost < lowest:
            lowest, first, n_equal = cost, index, 1
        elif cost == lowest:
            n_equal += 1
    return (first << 32) | n_equal

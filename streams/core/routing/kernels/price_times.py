"""The price of a request in milliseconds at every candidate, and the lowest one, in one pass.

What lives here: the formula of policy `expected-time` as a kernel (docs/quality.md). What must not: breaking ties, and
the numbers that it is computed from (core.routing.policies.expected_time, which has the same formula in NumPy).
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, types

from streams.core.ids import Float64Array, Int64Array
from streams.core.kernels.compiling import kernel

_INTS = types.Array(int64, 1, "C")
_FLOATS = types.Array(float64, 1, "C")
_TABLE = types.Array(int64, 2, "C")

#: Numbers before those of the runs.
_N_NUMBERS = 10


# It keeps the GIL, as price_ranks does and for the same reason.
@kernel(
    int64(
        _TABLE,
        _TABLE,
        _INTS,
        _INTS,
        _FLOATS,
        _FLOATS,
        _INTS,
        int64,
        int64,
        int64,
        _FLOATS,
        types.Array(float64, 2, "C"),
    ),
    nogil=False,
)
def price_times(
    table: Int64Array,
    times: Int64Array,
    rows: Int64Array,
    shared: Int64Array,
    cached: Float64Array,
    load_ms: Float64Array,
    capacity: Int64Array,
    n_tokens: int,
    full_blocks: int,
    block_size: int,
    numbers: Float64Array,
    terms: Float64Array,
) -> int:
    """Price n candidates; return index << 32 | count: the first of the cheapest, and how many are as cheap.

    table, times: of ActiveLoads. rows: int64[n]. shared: int64[n_rows], how many of the request's full_blocks each row
    has in use. cached, load_ms: float64[n], blocks that each candidate has, and how long it loads them; either may have
    length 0 for none. capacity: int64[n], 0 where it is not known, or int64[0]. numbers: float64[10 + 2 * n_runs]: the
    time; base and slope of prefill by token and of a step of decoding by block in use; the expected output; the
    weights; the share of a cache that is used; and then what expected_time.popular_runs returns. terms: float64[12, n],
    the output, in the order of expected_time.NAMES and then the cost.
    """
    now_ms, a, b, c, d, output, uncached_weight, recent_weight, decode_weight, room = (
        numbers[0],
        numbers[1],
        numbers[2],
        numbers[3],
        numbers[4],
        numbers[5],
        numbers[6],
        numbers[7],
        numbers[8],
        numbers[9],
    )
    most, n_all = 1, 0
    for index in range(rows.size):
        most = max(most, times[7, rows[index]])
        n_all += table[2, rows[index]]
    idle = rows.size / float64(rows.size + n_all)
    recent_weight *= idle * idle / most * ((1.0 + uncached_weight) * b)
    lowest, first, n_equal = np.inf, 0, 0
    for index in range(rows.size):
        row = rows[index]
        used = shared[row]
        blocks = float64(used)
        if cached.size and cached[index] > blocks:
            blocks = cached[index]
        uncached = float64(max(1, n_tokens - int64(blocks * block_size)))
        own = a + b * uncached
        load = load_ms[index] if load_ms.size else 0.0
        backlog = times[4, row] / 1000.0 + b * max(0, table[0, row] - times[5, row])
        if times[1, row]:
            elapsed = max(0.0, now_ms - max(times[2, row], times[3, row]))
            backlog += max(0.0, times[0, row] / 1000.0 - elapsed)
        active = float64(table[1, row])
        new = float64(full_blocks - used)
        n_requests = table[2, row]
        in_use = active + new
        wait = 0.0
        total = capacity[index] if capacity.size else 0
        if total:
            # Blocks that running requests will still fill, on average over their time.
            expected = active + max(0.0, n_requests * output * 0.5 / block_size - table[3, row])
            excess = expected + new - room * total
            if excess > 0.0:
                wait = excess / max(1.0, expected) * output * (c + d * total)
            in_use = min(in_use, float64(total))
        n_decoding = max(0, n_requests - times[1, row])
        uncached_ms = uncached_weight * b * uncached
        recent_ms = recent_weight * times[7, row] * uncached
        spared, start = 0.0, 0.0
        for run in range(_N_NUMBERS, numbers.size, 2):
            spared += max(0.0, numbers[run] - max(start, blocks)) * block_size * numbers[run + 1]
            start = numbers[run]
        popular_ms = 0.0 - (1.0 + uncached_weight) * b * min(spared, uncached)
        slowed_ms = decode_weight * n_decoding * own
        decode_ms = decode_weight * output * (c + d * in_use)
        cost = backlog + wait + own + load + uncached_ms + recent_ms + popular_ms + slowed_ms + decode_ms
        terms[0, index] = blocks
        terms[1, index] = uncached
        terms[2, index] = backlog
        terms[3, index] = wait
        terms[4, index] = own
        terms[5, index] = load
        terms[6, index] = uncached_ms
        terms[7, index] = recent_ms
        terms[8, index] = popular_ms
        terms[9, index] = slowed_ms
        terms[10, index] = decode_ms
        terms[11, index] = cost
        if cost < lowest:
            lowest, first, n_equal = cost, index, 1
        elif cost == lowest:
            n_equal += 1
    return (first << 32) | n_equal

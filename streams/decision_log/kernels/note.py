"""Noting one decision in the buffers of a batch, in one pass over its candidates.

What lives here: selecting the cheapest candidates, and copying their terms and the prompt's families. What must not:
names, limits, and how buffers grow (decision_log.batches, which has the same in NumPy).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import boolean, float32, float64, int64, types, uint64

from streams.core.ids import Float64Array, HashArray, Int64Array
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import HASHES

_FLOATS = types.Array(float64, 1, "C")
_INTS = types.Array(int64, 1, "C")


# It keeps the GIL, as price_ranks does and for the same reason.
@kernel(
    int64(
        _FLOATS,
        types.Array(float64, 2, "C"),
        _FLOATS,
        _INTS,
        HASHES,
        int64,
        int64,
        int64,
        boolean,
        int64,
        int64,
        int64,
        _FLOATS,
        _INTS,
        int64,
        types.Array(float32, 1, "C"),
        int64,
        types.Array(uint64, 1, "C"),
        int64,
        int64,
    ),
    nogil=False,
)
def note_candidates(
    costs: Float64Array,
    terms: Float64Array,
    one_more: Float64Array,
    blocks: Int64Array,
    chain: HashArray,
    chosen: int,
    n_best: int,
    n_terms: int,
    has_one_more: bool,
    n_columns: int,
    block_size: int,
    family_tokens: int,
    listed_costs: Float64Array,
    listed: Int64Array,
    n_listed: int,
    listed_terms: npt.NDArray[np.float32],
    n_listed_terms: int,
    families: HashArray,
    n_families: int,
    families_max: int,
) -> int:
    """Note a decision; return candidates listed | families << 8 | candidates with the lowest cost << 24.

    costs, one_more: float64[n]. terms: float64[>= n_terms, n]; the terms of a candidate are its n_terms first rows and,
    if has_one_more, one_more. blocks: int64[n]. chain: uint64[n_blocks], the prompt's sequence hashes. n_best: cheapest
    candidates to list after the chosen one, at most 64. n_columns: numbers that each listed candidate has in
    listed_terms, of which the first ones are set.

    The outputs, all written from the given number on: listed_costs, listed: as many as are listed, the latter with the
    candidate's position in the low 32 bits and its blocks above. listed_terms. families: the hashes at
    families.family_positions.
    """
    n = costs.size
    start = n_listed
    listed[start] = chosen
    count = 1
    lowest, n_lowest = np.inf, 0
    first = start + 1
    for index in range(n):
        cost = costs[index]
        if cost < lowest:
            lowest, n_lowest = cost, 1
        elif cost == lowest:
            n_lowest += 1
        # The best ones are kept in order; among equals the first come first.
        if count <= n_best:
            at = start + count
            count += 1
        elif n_best > 0 and cost < listed_costs[start + n_best]:
            at = start + n_best
        else:
            continue
        while at > first and cost < listed_costs[at - 1]:
            listed_costs[at] = listed_costs[at - 1]
            listed[at] = listed[at - 1]
            at -= 1
        listed_costs[at] = cost
        listed[at] = index
    listed_costs[start] = costs[chosen]
    # The chosen one is usually among the best, and counts once.
    kept = start + 1
    for at in range(first, start + count):
        if listed[at] != chosen:
            listed_costs[kept] = listed_costs[at]
            listed[kept] = listed[at]
            kept += 1
    to = n_listed_terms
    for at in range(start, kept):
        index = listed[at]
        for term in range(n_terms):
            listed_terms[to + term] = terms[term, index]
        if has_one_more:
            listed_terms[to + n_terms] = one_more[index]
        to += n_columns
        listed[at] = index | (blocks[index] << 32)
    n_blocks = chain.size
    n_kept = min((n_blocks * block_size + family_tokens - 1) // family_tokens, families_max)
    for number in range(n_kept):
        end = ((number + 1) * family_tokens + block_size - 1) // block_size
        families[n_families + number] = chain[min(end, n_blocks) - 1]
    return (kept - start) | (n_kept << 8) | (n_lowest << 24)

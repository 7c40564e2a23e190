"""Noting one decision in the buffers of a batch, in one pass over its candidates.

What lives here: selecting the cheapest candidates, and copying their terms, the prompt's families and the decision's
row. What must not: names, limits, and how buffers grow (decision_log.batches, which has the same in NumPy).
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, types

from streams.core.ids import Float64Array, HashArray, Int64Array
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import HASHES
from streams.decision_log.buffers import (
    BLOCK_SIZE,
    FAMILIES_AT,
    HAS_ONE_MORE,
    HEAD,
    KIND,
    LISTED_AT,
    N_BEST,
    N_COLUMNS,
    N_DECISIONS,
    N_FAMILIES,
    N_GIVEN,
    N_LISTED,
    N_TERMS,
    ROW,
    TERMS_AT,
)
from streams.decision_log.families import FAMILIES_MAX, FAMILY_TOKENS

_FLOATS = types.Array(float64, 1, "C")
_INTS = types.Array(int64, 1, "C")


# It keeps the GIL, as price_ranks does and for the same reason.
@kernel(
    int64(
        _FLOATS,
        types.Array(float64, 2, "C"),
        _INTS,
        HASHES,
        _INTS,
        _FLOATS,
        int64,
        int64,
        int64,
        int64,
        int64,
        int64,
        int64,
    ),
    nogil=False,
)
def note_decision(
    column: Float64Array,
    terms: Float64Array,
    blocks: Int64Array,
    chain: HashArray,
    integers: Int64Array,
    numbers: Float64Array,
    chosen: int,
    decided_at_ms: int,
    queued_ms: int,
    n_tokens: int,
    request_blocks: int,
    expected_output_tokens: int,
    flags: int,
) -> int:
    """Note a decision; return how many candidates are listed, or 0 if the arrays have wrong lengths.

    terms: float64[n_given, n], the first terms of the candidates. column: float64[n], the costs. With has_one_more,
    column has one more term, and the costs are a further row of terms. blocks: int64[n]. chain: uint64[n_blocks], the
    prompt's sequence hashes.

    integers, numbers: the batch (decision_log.buffers), which must have space for a decision. A candidate is listed as
    its position in the low 32 bits and its blocks above. Terms that are not given are not set.
    """
    n, n_given, has_one_more = blocks.size, integers[N_GIVEN], integers[HAS_ONE_MORE]
    if terms.shape[0] != n_given + has_one_more or terms.shape[1] != n or column.size != n:
        return 0
    costs = terms[n_given] if has_one_more else column
    n_best, n_columns, block_size = integers[N_BEST], integers[N_COLUMNS], integers[BLOCK_SIZE]
    n_listed = integers[N_LISTED]
    listed, listed_costs = integers[integers[LISTED_AT] + n_listed :], numbers[n_listed:]
    listed[0] = chosen
    count = 1
    lowest, n_lowest = np.inf, 0
    for index in range(n):
        cost = costs[index]
        if cost < lowest:
            lowest, n_lowest = cost, 1
        elif cost == lowest:
            n_lowest += 1
        # The best ones are kept in order; among equals the first come first.
        if count <= n_best:
            at = count
            count += 1
        elif n_best > 0 and cost < listed_costs[n_best]:
            at = n_best
        else:
            continue
        while at > 1 and cost < listed_costs[at - 1]:
            listed_costs[at] = listed_costs[at - 1]
            listed[at] = listed[at - 1]
            at -= 1
        listed_costs[at] = cost
        listed[at] = index
    listed_costs[0] = costs[chosen]
    # The chosen one is usually among the best, and counts once.
    kept = 1
    for at in range(1, count):
        if listed[at] != chosen:
            listed_costs[kept] = listed_costs[at]
            listed[kept] = listed[at]
            kept += 1
    noted, to = numbers[integers[TERMS_AT] :].view(np.float32), integers[N_TERMS]
    for at in range(kept):
        index = listed[at]
        for term in range(n_given):
            noted[to + term] = np.float32(terms[term, index])
        if has_one_more:
            noted[to + n_given] = np.float32(column[index])
        to += n_columns
        listed[at] = index | (blocks[index] << 32)
    n_blocks = chain.size
    n_kept = min((n_blocks * block_size + FAMILY_TOKENS - 1) // FAMILY_TOKENS, FAMILIES_MAX)
    families_at = integers[FAMILIES_AT] + integers[N_FAMILIES]
    for number in range(n_kept):
        end = ((number + 1) * FAMILY_TOKENS + block_size - 1) // block_size
        integers[families_at + number] = np.int64(chain[min(end, n_blocks) - 1])
    row = HEAD + integers[N_DECISIONS] * ROW
    integers[row] = decided_at_ms
    integers[row + 1] = queued_ms
    integers[row + 2] = n_tokens
    integers[row + 3] = request_blocks
    integers[row + 4] = expected_output_tokens
    integers[row + 5] = n
    integers[row + 6] = n_lowest
    integers[row + 7] = integers[KIND]
    integers[row + 8] = n_kept
    integers[row + 9] = kept
    integers[row + 10] = flags
    integers[N_DECISIONS] += 1
    integers[N_LISTED] += kept
    integers[N_TERMS] += kept * n_columns
    integers[N_FAMILIES] += n_kept
    return kept

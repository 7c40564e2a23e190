"""Which candidates hold the blocks of a request after the end of their own prefix: the tree read by sequence hash.

What lives here: one kernel. What must not: changing anything. The tree must not change during a call, so its owner
holds a lock.
"""

from __future__ import annotations

from numba import int64, types

from streams.core.ids import HashArray, Int64Array
from streams.core.index.kernels import layout
from streams.core.index.kernels.by_sequence import find_block
from streams.core.index.kernels.fields import coverage_address
from streams.core.index.kernels.runs import run_of
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import HASHES, address_of, load, load32, store, trailing_zeros
from streams.core.kernels.words import get

_WORDS = types.Array(types.int64, 1, "C")


@kernel(int64(int64, HASHES, int64, _WORDS, _WORDS, int64, _WORDS, _WORDS), nogil=False)
def trace(
    context: int,
    query: HashArray,
    first: int,
    rows: Int64Array,
    positions: Int64Array,
    n_candidates: int,
    held_rows: Int64Array,
    held_bits: Int64Array,
) -> int:
    """Find the holders of blocks from `first` on, up to a block that no rank holds and whose entry in `rows` is 0.

    query: uint64[n], sequence hashes. rows: int64[>= n], as written by
    block_facts.kernels.fact_sets.find_rows. positions: int64, the bit of each rank number, or n_candidates if the rank
    is not a candidate.
    Output, zeros at first: held_rows: int64[n], the row of each block; held_bits: (n - first + 1) rows of n_candidates
    bits, each rounded up to whole int64 and at least one. Row 0 stays empty.
    Returns the number of rows written.
    """
    sequence, n_blocks = address_of(query), query.size
    live, ranks, n_words = get(context, layout.LIVE), get(context, layout.RANK_OF), get(context, layout.N_WORDS)
    bits, words = address_of(held_bits), max(1, (n_candidates + 63) >> 6)
    last_run, row, n_rows = -1, 0, 0
    for index in range(first, n_blocks):
        block = find_block(context, load(sequence + (index << 3)))
        run = run_of(context, block) if block >= 0 else -1
        if run != last_run:
            last_run, row = run, 0
            if run >= 0:
                for word in range(n_words):
                    columns = load(coverage_address(context, run, word)) & load(live + (word << 3))
                    while columns:
                        rank = load32(ranks + (((word << 6) + trailing_zeros(columns)) << 2))
                        columns &= columns - 1
                        position = load(address_of(positions) + (rank << 3)) if rank < positions.size else n_candidates
                        if position < n_candidates:
                            if row == 0:
                                n_rows += 1
                                row = n_rows
                            address = bits + ((row * words + (position >> 6)) << 3)
                            store(address, load(address) | (1 << (position & 63)))
        if row == 0 and rows[index] == 0:
            break
        held_rows[index] = row
    return n_rows

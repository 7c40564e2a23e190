"""Columns of coverage: assigning one, clearing one in a single step, and sweeping its bits out of the runs later.

What lives here: what happens when a rank is added, cleared or removed. What must not: single blocks.
"""

from __future__ import annotations

from streams.core.index.kernels.claims import remove_claim
from streams.core.index.kernels.fields import (
    begin_change,
    column_word,
    coverage_address,
    end_change,
    field,
    set_bit,
    unset_bit,
)
from streams.core.index.kernels.layout import (
    COLUMN_CLAIMS,
    COLUMN_FACTS,
    COLUMN_OF,
    COLUMNS_MAX,
    ENDED,
    FREE_COLUMNS,
    HOLDER_GENERATION,
    HOLDER_RANK,
    HOLDER_TIER,
    HOLDERS_OF,
    LIVE,
    N_COLUMNS,
    N_ENDED,
    N_FACTS,
    N_FREE_COLUMNS,
    N_LOWER_FACTS,
    N_RUNS,
    N_TIERS,
    N_WORDS,
    RANK_OF,
    RUN_CHILDREN,
    RUN_LENGTH,
    RUN_START,
    RUNS_MAX,
    SWEEP_AGAIN,
    SWEEP_AT,
    TIER_OF,
)
from streams.core.index.kernels.runs import has_ended_column, has_no_holder
from streams.core.index.kernels.shape import finish_change, merge_down, merge_up, remove_unheld
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, load32, store, store32, trailing_zeros
from streams.core.kernels.words import add, get, put


@kernel()
def take_column(context: int) -> int:
    """Take an unused column; returns -1 if all are in use."""
    left = get(context, N_FREE_COLUMNS)
    if left:
        put(context, N_FREE_COLUMNS, left - 1)
        return load32(get(context, FREE_COLUMNS) + ((left - 1) << 2))
    column = get(context, N_COLUMNS)
    if column >= get(context, COLUMNS_MAX):
        return -1
    put(context, N_COLUMNS, column + 1)
    return column


@kernel()
def assign_column(context: int, holder: int, column: int) -> None:
    """Assign a column to a holder."""
    rank = load32(get(context, HOLDER_RANK) + (holder << 2))
    store32(get(context, COLUMN_OF) + (holder << 2), column)
    store32(get(context, RANK_OF) + (column << 2), rank)
    store32(get(context, TIER_OF) + (column << 2), load32(get(context, HOLDER_TIER) + (holder << 2)))
    for which in (COLUMN_FACTS, COLUMN_CLAIMS):
        store(column_word(context, which, column), 0)
    words = (column >> 6) + 1
    if words > get(context, N_WORDS):
        put(context, N_WORDS, words)
    set_bit(get(context, LIVE), column)


@kernel()
def end_column(context: int, holder: int) -> None:
    """Clear a holder: end its column, which the sweep later removes from the runs, and assign it a new one."""
    column = load32(get(context, COLUMN_OF) + (holder << 2))
    facts = load(column_word(context, COLUMN_FACTS, column))
    generation = get(context, HOLDER_GENERATION) + (holder << 3)
    store(generation, load(generation) + 1)
    if facts == 0:
        return
    add(context, N_FACTS, -facts)
    if load32(get(context, TIER_OF) + (column << 2)):
        add(context, N_LOWER_FACTS, -facts)
    unset_bit(get(context, LIVE), column)
    set_bit(get(context, ENDED), column)
    if get(context, N_ENDED) == 0:
        put(context, SWEEP_AT, 1)
        put(context, SWEEP_AGAIN, 0)
    else:
        put(context, SWEEP_AGAIN, 1)
    add(context, N_ENDED, 1)
    new = take_column(context)
    if new < 0:
        end_change(context)
        while get(context, N_ENDED):
            sweep(context, get(context, RUNS_MAX))
        begin_change(context)
        new = take_column(context)
    assign_column(context, holder, new)


@kernel()
def clear_rank(context: int, rank: int) -> None:
    """Clear a rank in all tiers. This changes one bit per tier, however many blocks the rank held."""
    if get(context, N_FREE_COLUMNS) + get(context, COLUMNS_MAX) - get(context, N_COLUMNS) < N_TIERS:
        while get(context, N_ENDED):
            sweep(context, get(context, RUNS_MAX))
    begin_change(context)
    for tier in range(N_TIERS):
        holder = load32(get(context, HOLDERS_OF) + ((rank * N_TIERS + tier) << 2)) - 1
        if holder >= 0:
            end_column(context, holder)
    end_change(context)


@kernel()
def sweep_run(context: int, run: int) -> int:
    """Remove ended columns from one run; returns the amount of work, in blocks."""
    ended = get(context, ENDED)
    work = 0
    length = field(context, run, RUN_LENGTH)
    # Claims go first, outside the change, since queries do not read them.
    for word in range(get(context, N_WORDS)):
        gone = load(coverage_address(context, run, word)) & load(ended + (word << 3))
        while gone:
            column = (word << 6) + trailing_zeros(gone)
            gone &= gone - 1
            first = field(context, run, RUN_START)
            if load(column_word(context, COLUMN_CLAIMS, column)):
                for block in range(first, first + length):
                    remove_claim(context, column, block, True)
                work += length
    begin_change(context)
    for word in range(get(context, N_WORDS)):
        address = coverage_address(context, run, word)
        store(address, load(address) & ~load(ended + (word << 3)))
    if field(context, run, RUN_CHILDREN) == 0 and has_no_holder(context, run):
        remove_unheld(context, run)
        work += length
    else:
        run, _ = merge_up(context, run)
        merge_down(context, run)
    finish_change(context)
    return work


@kernel()
def sweep(context: int, budget: int) -> None:
    """Continue to remove ended columns from the runs; when no run has one any more, the columns are free again.

    budget: runs and blocks after which to stop.
    """
    if get(context, N_ENDED) == 0:
        return
    run = get(context, SWEEP_AT)
    while budget > 0 and run < get(context, N_RUNS):
        budget -= 1
        if field(context, run, RUN_LENGTH) > 0 and has_ended_column(context, run):
            budget -= sweep_run(context, run)
        run += 1
        put(context, SWEEP_AT, run)
    if run < get(context, N_RUNS):
        return
    put(context, SWEEP_AT, 1)
    if get(context, SWEEP_AGAIN):
        put(context, SWEEP_AGAIN, 0)
        return
    ended = get(context, ENDED)
    for word in range(get(context, N_WORDS)):
        bits = load(ended + (word << 3))
        while bits:
            column = (word << 6) + trailing_zeros(bits)
            bits &= bits - 1
            free = get(context, N_FREE_COLUMNS)
            store32(get(context, FREE_COLUMNS) + (free << 2), column)
            put(context, N_FREE_COLUMNS, free + 1)
        store(ended + (word << 3), 0)
    put(context, N_ENDED, 0)

"""Columns of coverage: assigning one, clearing one in a single step, and sweeping its bits out of the runs later.

What lives here: what happens when a rank is added, cleared or removed. What must not: single blocks.
"""

from __future__ import annotations

from streams.core.index.kernels import layout
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
from streams.core.index.kernels.runs import has_ended_column, has_no_holder
from streams.core.index.kernels.shape import finish_change, merge_down, merge_up, remove_unheld
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, load32, store, store32, trailing_zeros
from streams.core.kernels.words import add, get, put


@kernel()
def take_column(context: int) -> int:
    """Take an unused column; returns -1 if all are in use."""
    left = get(context, layout.N_FREE_COLUMNS)
    if left:
        put(context, layout.N_FREE_COLUMNS, left - 1)
        return load32(get(context, layout.FREE_COLUMNS) + ((left - 1) << 2))
    column = get(context, layout.N_COLUMNS)
    if column >= get(context, layout.COLUMNS_MAX):
        return -1
    put(context, layout.N_COLUMNS, column + 1)
    return column


@kernel()
def assign_column(context: int, holder: int, column: int) -> None:
    """Assign a column to a holder."""
    rank = load32(get(context, layout.HOLDER_RANK) + (holder << 2))
    store32(get(context, layout.COLUMN_OF) + (holder << 2), column)
    store32(get(context, layout.RANK_OF) + (column << 2), rank)
    store32(get(context, layout.TIER_OF) + (column << 2), load32(get(context, layout.HOLDER_TIER) + (holder << 2)))
    for which in (layout.COLUMN_FACTS, layout.COLUMN_CLAIMS):
        store(column_word(context, which, column), 0)
    words = (column >> 6) + 1
    if words > get(context, layout.N_WORDS):
        put(context, layout.N_WORDS, words)
    set_bit(get(context, layout.LIVE), column)


@kernel()
def end_column(context: int, holder: int) -> None:
    """Clear a holder: end its column, which the sweep later removes from the runs, and assign it a new one."""
    column = load32(get(context, layout.COLUMN_OF) + (holder << 2))
    facts = load(column_word(context, layout.COLUMN_FACTS, column))
    generation = get(context, layout.HOLDER_GENERATION) + (holder << 3)
    store(generation, load(generation) + 1)
    if facts == 0:
        return
    add(context, layout.N_FACTS, -facts)
    if load32(get(context, layout.TIER_OF) + (column << 2)):
        add(context, layout.N_LOWER_FACTS, -facts)
    unset_bit(get(context, layout.LIVE), column)
    set_bit(get(context, layout.ENDED), column)
    if get(context, layout.N_ENDED) == 0:
        put(context, layout.SWEEP_AT, 1)
        put(context, layout.SWEEP_AGAIN, 0)
    else:
        put(context, layout.SWEEP_AGAIN, 1)
    add(context, layout.N_ENDED, 1)
    new = take_column(context)
    if new < 0:
        end_change(context)
        while get(context, layout.N_ENDED):
            sweep(context, get(context, layout.RUNS_MAX))
        begin_change(context)
        new = take_column(context)
    assign_column(context, holder, new)


@kernel()
def clear_rank(context: int, rank: int) -> None:
    """Clear a rank in all tiers. This changes one bit per tier, however many blocks the rank held."""
    if (
        get(context, layout.N_FREE_COLUMNS) + get(context, layout.COLUMNS_MAX) - get(context, layout.N_COLUMNS)
        < layout.N_TIERS
    ):
        while get(context, layout.N_ENDED):
            sweep(context, get(context, layout.RUNS_MAX))
    begin_change(context)
    for tier in range(layout.N_TIERS):
        holder = load32(get(context, layout.HOLDERS_OF) + ((rank * layout.N_TIERS + tier) << 2)) - 1
        if holder >= 0:
            end_column(context, holder)
    end_change(context)


@kernel()
def sweep_run(context: int, run: int) -> int:
    """Remove ended columns from one run; returns the amount of work, in blocks."""
    ended = get(context, layout.ENDED)
    work = 0
    length = field(context, run, layout.RUN_LENGTH)
    # Claims go first, outside the change, since queries do not read them.
    for word in range(get(context, layout.N_WORDS)):
        gone = load(coverage_address(context, run, word)) & load(ended + (word << 3))
        while gone:
            column = (word << 6) + trailing_zeros(gone)
            gone &= gone - 1
            first = field(context, run, layout.RUN_START)
            if load(column_word(context, layout.COLUMN_CLAIMS, column)):
                for block in range(first, first + length):
                    remove_claim(context, column, block, True)
                work += length
    begin_change(context)
    for word in range(get(context, layout.N_WORDS)):
        address = coverage_address(context, run, word)
        store(address, load(address) & ~load(ended + (word << 3)))
    if field(context, run, layout.RUN_CHILDREN) == 0 and has_no_holder(context, run):
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
    if get(context, layout.N_ENDED) == 0:
        return
    run = get(context, layout.SWEEP_AT)
    while budget > 0 and run < get(context, layout.N_RUNS):
        budget -= 1
        if field(context, run, layout.RUN_LENGTH) > 0 and has_ended_column(context, run):
            budget -= sweep_run(context, run)
        run += 1
        put(context, layout.SWEEP_AT, run)
    if run < get(context, layout.N_RUNS):
        return
    put(context, layout.SWEEP_AT, 1)
    if get(context, layout.SWEEP_AGAIN):
        put(context, layout.SWEEP_AGAIN, 0)
        return
    ended = get(context, layout.ENDED)
    for word in range(get(context, layout.N_WORDS)):
        bits = load(ended + (word << 3))
        while bits:
            column = (word << 6) + trailing_zeros(bits)
            bits &= bits - 1
            free = get(context, layout.N_FREE_COLUMNS)
            store32(get(context, layout.FREE_COLUMNS) + (free << 2), column)
            put(context, layout.N_FREE_COLUMNS, free + 1)
        store(ended + (word << 3), 0)
    put(context, layout.N_ENDED, 0)

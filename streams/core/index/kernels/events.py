"""Engine events: each is applied completely or not at all.

What lives here: stores, removals and clears as engines report them, in columns. What must not: run records (fold).
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels.columns import clear_rank, sweep
from streams.core.index.kernels.fields import column_word, covers, field, home_address, tag_of
from streams.core.index.kernels.layout import (
    AHEAD,
    AHEAD_MAX,
    COLUMN_ALIASES,
    COLUMN_OF,
    FULL,
    FULL_BLOCKS,
    FULL_NEED,
    HOLDER_INDEX_MASK,
    HOLDER_NUMBERS,
    HOLDER_RANK,
    HOLDERS_OF,
    N_ENDED,
    N_TIERS,
    NAME,
    NAMES,
    REMOVED,
    RUN_LENGTH,
    RUN_START,
    SCRATCH,
    SCRATCH_MAX,
    STALE,
    STORED,
    UNKNOWN_PARENTS,
    UNKNOWN_REMOVALS,
    WAITING,
)
from streams.core.index.kernels.maps import ID_MASK, SLOT_MASK
from streams.core.index.kernels.names import find_held
from streams.core.index.kernels.runs import run_of, start_before
from streams.core.index.kernels.shape import finish_change, prefetch_block, prefetch_names, wait_for_queries
from streams.core.index.kernels.tree import end_of, remove_aliases, store_blocks, uncover
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import (
    load,
    load32,
    prefetch,
    prefetch_write,
    shift_right,
    store,
)
from streams.core.kernels.words import add, get, put

# -- whole events ----------------------------------------------------------------------------------------


@kernel()
def find_parent(context: int, holder: int, column: int, name: int) -> int:
    """Find the block that a rank holds under a name, in this holder's tier before the others; returns -1 for none."""
    block = find_held(context, column, name)
    if block < 0:
        rank = load32(get(context, HOLDER_RANK) + (holder << 2))
        for tier in range(N_TIERS):
            other = load32(get(context, HOLDERS_OF) + ((rank * N_TIERS + tier) << 2)) - 1
            if other >= 0 and other != holder:
                block = find_held(context, load32(get(context, COLUMN_OF) + (other << 2)), name)
                if block >= 0:
                    break
    return block


@kernel()
def held_run(context: int, block: int, column: int) -> int:
    """Find the run in which a column holds a block; returns -1 if it does not hold it or the block is in no run."""
    start = start_before(context, block)
    if start < 0:
        return -1
    run = run_of(context, start)
    if block < field(context, run, RUN_START) + field(context, run, RUN_LENGTH) and covers(context, run, column):
        return run
    return -1


@kernel()
def remove_blocks(context: int, column: int, names: int, n_blocks: int) -> int:
    """Remove the blocks with these names from a column; returns how many of them it did not hold."""
    # First find the blocks and list them as stretches, while queries continue. Then change the tree, as briefly as
    # possible.
    table = get(context, NAME)
    scratch = get(context, SCRATCH)
    aliases = load(column_word(context, COLUMN_ALIASES, column))
    unknown = 0
    n_stretches = 0
    low, high = 0, -1
    run_start, run_end = 0, 0
    ahead = context + (AHEAD << 3)
    done = 0
    while done < n_blocks:
        todo = min(AHEAD_MAX, n_blocks - done)
        prefetch_names(context, names + (done << 3), todo)
        for index in range(todo):
            name = load(names + ((done + index) << 3))
            block = -1
            if aliases:
                block = find_held(context, column, name)
            else:
                tag, segment = load(ahead + (index << 4)), load(ahead + (index << 4) + 8)
                position = tag & SLOT_MASK
                slot = load(segment + (position << 3))
                while slot != 0:
                    if shift_right(slot, 32) == tag and load(table + (((slot & ID_MASK) - 1) << 3)) == name:
                        block = (slot & ID_MASK) - 1
                        break
                    position = (position + 1) & SLOT_MASK
                    slot = load(segment + (position << 3))
            if block < 0:
                unknown += 1
                continue
            if not run_start <= block < run_end:
                run = run_of(context, block)
                if not covers(context, run, column):
                    unknown += 1
                    continue
                run_start = field(context, run, RUN_START)
                run_end = run_start + field(context, run, RUN_LENGTH)
            elif low <= block <= high:
                unknown += 1
                continue
            elif block == low - 1 and low <= high:
                low = block
                continue
            elif block == high + 1 and low <= high:
                high = block
                continue
            if low <= high:
                store(scratch + (n_stretches << 4), low)
                store(scratch + (n_stretches << 4) + 8, high)
                n_stretches += 1
            low = high = block
        done += todo
    if low <= high:
        store(scratch + (n_stretches << 4), low)
        store(scratch + (n_stretches << 4) + 8, high)
        n_stretches += 1
    if aliases:
        for index in range(n_stretches):
            low, high = load(scratch + (index << 4)), load(scratch + (index << 4) + 8)
            remove_aliases(context, column, low, high - low + 1)
    for index in range(n_stretches):
        low, high = load(scratch + (index << 4)), load(scratch + (index << 4) + 8)
        run = held_run(context, low, column)
        if run >= 0 and high < field(context, run, RUN_START) + field(context, run, RUN_LENGTH):
            uncover(context, run, low - field(context, run, RUN_START), high - low + 1, column)
            continue
        for block in range(low, high + 1):  # a name occurred twice
            run = held_run(context, block, column)
            if run >= 0:
                uncover(context, run, block - field(context, run, RUN_START), 1, column)
            else:
                unknown += 1
    finish_change(context)
    return unknown


@kernel()
def apply_event(context: int, holder: int, kind: int, parent: int, names: int, locals_: int, n_blocks: int) -> None:
    """Apply one event, or refuse all of it: an unknown parent is counted, and an event that does not fit sets FULL."""
    column = load32(get(context, COLUMN_OF) + (holder << 2))
    if kind <= STORED:
        run, offset = 0, 0
        if kind == STORED:
            block = find_parent(context, holder, column, parent)
            if block < 0:
                add(context, UNKNOWN_PARENTS, 1)
                return
            run, offset = end_of(context, block)
        lacking = store_blocks(context, column, run, offset, names, locals_, n_blocks, False)
        if lacking:
            put(context, FULL, lacking)
            put(context, FULL_NEED, n_blocks)
            return
        finish_change(context)
    elif kind == REMOVED:
        if n_blocks > get(context, SCRATCH_MAX):
            put(context, FULL, FULL_BLOCKS)
            put(context, FULL_NEED, n_blocks)
            return
        add(context, UNKNOWN_REMOVALS, remove_blocks(context, column, names, n_blocks))
    else:
        clear_rank(context, load32(get(context, HOLDER_RANK) + (holder << 2)))


@kernel()
def find_stale(context: int, holders: int, first: int, last: int) -> int:
    """Find the first event whose holder number was never assigned, or whose rank was removed; returns -1 for none."""
    numbers = get(context, HOLDER_NUMBERS)
    for event in range(first, last):
        holder = load(holders + (event << 3))
        if holder < 0 or load(numbers + ((holder & HOLDER_INDEX_MASK) << 3)) != holder + 1:
            return event
    return -1


#: Runs and blocks that one call sweeps at most: about 50 us.
SWEEP_BUDGET = 4096

#: How many events ahead the slots of names are prefetched, and then the blocks that these slots point to.
_FAR, _NEAR = 6, 3
#: Events with more blocks than this prefetch for themselves.
_SMALL_BLOCKS = 4


@njit(inline="always")
def prefetch_slots(context: int, kinds: int, parents: int, offsets: int, names: int, event: int) -> None:
    """Prefetch the slots that an upcoming event will read."""
    at = event << 3
    kind = load(kinds + at)
    if kind == STORED:
        prefetch(home_address(context, NAMES, tag_of(context, load(parents + at))))
    begin, end = load(offsets + at), load(offsets + at + 8)
    if end - begin <= _SMALL_BLOCKS:
        for index in range(begin, end):
            prefetch_write(home_address(context, NAMES, tag_of(context, load(names + (index << 3)))))


@njit(inline="always")
def prefetch_blocks(context: int, kinds: int, parents: int, offsets: int, names: int, event: int) -> None:
    """Prefetch what the name in an upcoming event leads to, once its slot is in the cache; see `prefetch_block`."""
    at = event << 3
    kind = load(kinds + at)
    begin = load(offsets + at)
    name = 0
    if kind == STORED:
        name = load(parents + at)
    elif kind == REMOVED and 0 < load(offsets + at + 8) - begin <= _SMALL_BLOCKS:
        name = load(names + (begin << 3))
    else:
        return
    prefetch_block(context, name)


@kernel()
def apply_events(context: int, table: int, first: int, last: int) -> int:
    """Apply events `first` to `last` - 1 of columns; returns the number of applied events.

    Returns -1 - number instead if parents or removed blocks were unknown, if the next event does not fit, or if the
    holder of an event is stale; in the last case no event is applied. The counters of the call are in the context.
    table: address of the six columns' addresses: holder, kind, parent's name, offsets, names, local hashes.
    """
    holders, kinds = load(table), load(table + 8)
    parents, offsets = load(table + 16), load(table + 24)
    names, locals_ = load(table + 32), load(table + 40)
    put(context, UNKNOWN_PARENTS, 0)
    put(context, UNKNOWN_REMOVALS, 0)
    put(context, FULL, 0)
    # Check all holders before applying anything: a number that outlived its rank would apply the event to the rank that
    # has its index now.
    stale = find_stale(context, holders, first, last)
    put(context, STALE, stale + 1)
    if stale >= 0:
        return -1
    for event in range(first, last):
        if event + _FAR < last:
            prefetch_slots(context, kinds, parents, offsets, names, event + _FAR)
        if event + _NEAR < last:
            prefetch_blocks(context, kinds, parents, offsets, names, event + _NEAR)
        if get(context, WAITING):
            wait_for_queries(context)
        at = event << 3
        begin = load(offsets + at)
        apply_event(
            context,
            load(holders + at) & HOLDER_INDEX_MASK,
            load(kinds + at),
            load(parents + at),
            names + (begin << 3),
            locals_ + (begin << 3),
            load(offsets + at + 8) - begin,
        )
        if get(context, FULL):
            return first - event - 1
    if get(context, N_ENDED):
        sweep(context, SWEEP_BUDGET)
    if get(context, UNKNOWN_PARENTS) | get(context, UNKNOWN_REMOVALS):
        return first - last - 1
    return last - first

"""What events do to a store of runs, as core.reducer.run_store.RunStore describes it.

What lives here: adding and removing blocks, ending ranks, taking runs that were read back. What must not: the bytes of
records (streams/tables), and which batch is new (core.reducer.ordering).
"""

from __future__ import annotations

from numba import njit

from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, shift_right, signed, store
from streams.core.kernels.words import get, put
from streams.core.kernels.xxh3 import chain_step, load_u64
from streams.core.reducer.kernels import layout
from streams.core.reducer.kernels.maps import delete_slot, insert_slot, tag_in
from streams.core.reducer.kernels.spans import (
    capacity_of,
    engine_at,
    free_span,
    locals_at,
    new_run_id,
    new_span,
    run_at,
    sequence_at,
    widen,
)
from streams.core.runs import RUN_BLOCKS_MAX

_ID_MASK = (1 << 32) - 1


# -- finding -------------------------------------------------------------------------------------------------


@njit(inline="always")
def find_slot(context: int, which: int, column: int, key: int) -> int:
    """Return the slot of a column's block by one of its hashes, engine or sequence as `which` says; -1 for none."""
    table, mask = get(context, which + layout.MAP_ADDRESS), get(context, which + layout.MAP_MASK)
    tag = tag_in(context, column, key)
    position = tag & mask
    while True:
        entry = load(table + (position << 3))
        if entry == 0:
            return -1
        if shift_right(entry, 32) == tag:
            slot = (entry & _ID_MASK) - 1
            line, offset = run_at(context, slot >> layout.SLOT_SHIFT), slot & layout.OFFSET_MASK
            at = engine_at(context, line, offset) if which == layout.BY_ENGINE else sequence_at(context, line, offset)
            if load(line + layout.RUN_COLUMN * 8) == column and load(at) == key:
                return slot
        position = (position + 1) & mask


@kernel()
def find_engine(context: int, column: int, name: int) -> int:
    """Return the slot of a column's held block by its engine hash; -1 for none."""
    return find_slot(context, layout.BY_ENGINE, column, name)


@kernel()
def find_sequence(context: int, column: int, block: int) -> int:
    """Return the slot of a column's block by its sequence hash, held or not; -1 for none."""
    return find_slot(context, layout.BY_SEQUENCE, column, block)


@kernel()
def find_parent(context: int, column: int, name: int) -> int:
    """Return the slot of a rank's block by its engine hash, first in the event's own tier; -1 for none."""
    slot = find_engine(context, column, name)
    if slot < 0:
        first = column & ~(layout.N_TIERS - 1)
        for tier in range(layout.N_TIERS):
            if first + tier != column:
                slot = find_engine(context, first + tier, name)
                if slot >= 0:
                    break
    return slot


# -- runs ----------------------------------------------------------------------------------------------------


@njit(inline="always")
def column_at(context: int, column: int) -> int:
    """Return the address of a column's words."""
    return get(context, layout.COLUMNS) + column * (layout.COLUMN_WORDS * 8)


@kernel()
def mark(context: int, run: int) -> None:
    """Note that a run's record must be written."""
    line = run_at(context, run)
    shape = load(line + layout.RUN_SHAPE * 8)
    if shape & layout.IS_DIRTY == 0:
        store(line + layout.RUN_SHAPE * 8, shape | layout.IS_DIRTY)
        store(get(context, layout.DIRTY) + (get(context, layout.N_DIRTY) << 3), run)
        put(context, layout.N_DIRTY, get(context, layout.N_DIRTY) + 1)


@kernel()
def new_run(context: int, column: int, first: int, parent: int, has_parent: int, start: int, size: int) -> int:
    """Create a run without blocks, whose span has the class `size`; returns its id."""
    run = new_run_id(context)
    line = run_at(context, run)
    store(line + layout.RUN_FIRST * 8, first)
    store(line + layout.RUN_PARENT * 8, parent)
    store(line + layout.RUN_SPAN * 8, new_span(context, size))
    store(line + layout.RUN_COLUMN * 8, column)
    store(line + layout.RUN_START * 8, start)
    store(line + layout.RUN_PRESENT * 8, 0)
    shape = size << layout.CLASS_SHIFT
    if has_parent:
        shape |= layout.HAS_PARENT
    store(line + layout.RUN_SHAPE * 8, shape)
    store(line + layout.RUN_LABELS * 8, 0)
    store(line + layout.RUN_LABELLED * 8, 0)
    head = column_at(context, column) + layout.COLUMN_HEAD * 8
    following = load(head)
    store(line + layout.RUN_PREVIOUS * 8, 0)
    store(line + layout.RUN_NEXT * 8, following)
    if following != 0:
        store(run_at(context, following - 1) + layout.RUN_PREVIOUS * 8, run + 1)
    store(head, run + 1)
    return run


@kernel()
def append(context: int, run: int, local: int, engine: int, block: int) -> int:
    """Append a block, not held yet, to a run; returns its slot."""
    line = run_at(context, run)
    offset = load(line + layout.RUN_SHAPE * 8) & layout.LENGTH_MASK
    if offset == capacity_of(line):
        widen(context, line)
    store(locals_at(context, line) + (offset << 3), local)
    store(engine_at(context, line, offset), engine)
    store(sequence_at(context, line, offset), block)
    store(line + layout.RUN_SHAPE * 8, load(line + layout.RUN_SHAPE * 8) + 1)
    slot = (run << layout.SLOT_SHIFT) | offset
    insert_slot(context, layout.BY_SEQUENCE, tag_in(context, load(line + layout.RUN_COLUMN * 8), block), slot)
    return slot


@kernel()
def free_run(context: int, run: int) -> None:
    """Free a run of which no block is held."""
    line = run_at(context, run)
    column, shape = load(line + layout.RUN_COLUMN * 8), load(line + layout.RUN_SHAPE * 8)
    for offset in range(shape & layout.LENGTH_MASK):
        tag = tag_in(context, column, load(sequence_at(context, line, offset)))
        delete_slot(context, layout.BY_SEQUENCE, tag, (run << layout.SLOT_SHIFT) | offset)
    before, following = load(line + layout.RUN_PREVIOUS * 8), load(line + layout.RUN_NEXT * 8)
    if before != 0:
        store(run_at(context, before - 1) + layout.RUN_NEXT * 8, following)
    else:
        store(column_at(context, column) + layout.COLUMN_HEAD * 8, following)
    if following != 0:
        store(run_at(context, following - 1) + layout.RUN_PREVIOUS * 8, before)
    free_span(context, load(line + layout.RUN_SPAN * 8), (shape >> layout.CLASS_SHIFT) & 255)
    labels = load(line + layout.RUN_LABELS * 8)
    if labels != 0:
        free_span(context, labels - 1, layout.LARGEST_CLASS)
    store(line + layout.RUN_COLUMN * 8, -1)
    store(line + layout.RUN_SHAPE * 8, 0)
    store(line + layout.RUN_PREVIOUS * 8, get(context, layout.FREE_RUN))
    put(context, layout.FREE_RUN, run + 1)


@kernel()
def set_labels(context: int, line: int, offset: int, labelled: int, labels: int) -> None:
    """Set the three labels of a block from an address, or remove them."""
    labelled_bits = load(line + layout.RUN_LABELLED * 8)
    if labelled == 0:
        store(line + layout.RUN_LABELLED * 8, labelled_bits & ~(1 << offset))
        return
    span = load(line + layout.RUN_LABELS * 8)
    if span == 0:
        span = new_span(context, layout.LARGEST_CLASS) + 1
        store(line + layout.RUN_LABELS * 8, span)
    address = get(context, layout.SPANS) + ((span - 1 + offset * layout.LABEL_WORDS) << 3)
    for word in range(layout.LABEL_WORDS):
        store(address + (word << 3), load(labels + (word << 3)))
    store(line + layout.RUN_LABELLED * 8, labelled_bits | (1 << offset))


@kernel()
def unhold(context: int, slot: int) -> None:
    """Remove a held block; a run without held blocks ends."""
    run, offset = slot >> layout.SLOT_SHIFT, slot & layout.OFFSET_MASK
    line = run_at(context, run)
    column = load(line + layout.RUN_COLUMN * 8)
    delete_slot(context, layout.BY_ENGINE, tag_in(context, column, load(engine_at(context, line, offset))), slot)
    held = column_at(context, column) + layout.COLUMN_HELD * 8
    store(held, load(held) - 1)
    present = load(line + layout.RUN_PRESENT * 8) & ~(1 << offset)
    store(line + layout.RUN_PRESENT * 8, present)
    store(line + layout.RUN_LABELLED * 8, load(line + layout.RUN_LABELLED * 8) & ~(1 << offset))
    if present != 0:
        mark(context, run)
        return
    entry = get(context, layout.EMPTIED) + (get(context, layout.N_EMPTIED) << 4)
    store(entry, column)
    store(entry + 8, load(line + layout.RUN_FIRST * 8))
    put(context, layout.N_EMPTIED, get(context, layout.N_EMPTIED) + 1)
    free_run(context, run)


# -- holding -------------------------------------------------------------------------------------------------


@kernel()
def hold(
    context: int,
    column: int,
    last: int,
    before: int,
    has_before: int,
    position: int,
    engine: int,
    local: int,
    block: int,
    labelled: int,
    labels: int,
) -> int:
    """Add one block: to the run that already has it, or after slot `last` if that run can grow, or in a new run.

    Returns its slot. last: -1 for none.
    """
    while True:
        slot = find_sequence(context, column, block)
        if slot < 0:
            run = -1
            if last >= 0:
                line = run_at(context, last >> layout.SLOT_SHIFT)
                length = load(line + layout.RUN_SHAPE * 8) & layout.LENGTH_MASK
                if (
                    load(line + layout.RUN_COLUMN * 8) == column
                    and (last & layout.OFFSET_MASK) == length - 1
                    and length < RUN_BLOCKS_MAX
                ):
                    run = last >> layout.SLOT_SHIFT
            if run < 0:
                run = new_run(context, column, block, before, has_before, position, 0)
            slot = append(context, run, local, engine, block)
        run, offset = slot >> layout.SLOT_SHIFT, slot & layout.OFFSET_MASK
        line = run_at(context, run)
        name = engine_at(context, line, offset)
        held = (load(line + layout.RUN_PRESENT * 8) >> offset) & 1
        if held and load(name) == engine:
            return slot  # stored again; copies are not counted here
        if held:
            delete_slot(context, layout.BY_ENGINE, tag_in(context, column, load(name)), slot)
            counter = column_at(context, column) + layout.COLUMN_HELD * 8
            store(counter, load(counter) - 1)
        moved = find_engine(context, column, engine)
        if moved >= 0:  # one engine hash names one block: the later store wins
            unhold(context, moved)
            if load(line + layout.RUN_COLUMN * 8) < 0:  # it was the run's only block
                last = -1
                continue
        store(name, engine)
        store(line + layout.RUN_PRESENT * 8, load(line + layout.RUN_PRESENT * 8) | (1 << offset))
        if labelled or load(line + layout.RUN_LABELLED * 8) != 0:
            set_labels(context, line, offset, labelled, labels)
        insert_slot(context, layout.BY_ENGINE, tag_in(context, column, engine), slot)
        counter = column_at(context, column) + layout.COLUMN_HELD * 8
        store(counter, load(counter) + 1)
        mark(context, run)
        return slot


@kernel()
def hold_all(
    context: int,
    column: int,
    last: int,
    before: int,
    has_before: int,
    position: int,
    n_blocks: int,
    engines: int,
    locals_: int,
    labelled: int,
    labels: int,
) -> None:
    """Add consecutive blocks that follow the one with sequence hash `before`, at slot `last` if the rank has it.

    engines, locals_: addresses of `n_blocks` hashes each, aligned or not.
    """
    for index in range(n_blocks):
        local = signed(load_u64(locals_ + (index << 3)))
        engine = signed(load_u64(engines + (index << 3)))
        block = local
        if has_before:
            block = signed(chain_step(before, local))
        last = hold(context, column, last, before, has_before, position, engine, local, block, labelled, labels)
        before, has_before = block, 1
        position += 1


@kernel()
def store_blocks(context: int, rank: int, row: int) -> bool:
    """Apply a store; False if its parent is unknown."""
    column = (rank << 2) | load(row + layout.EVENT_TIER * 8)
    last, before, position = -1, 0, 0
    has_parent = load(row + layout.EVENT_HAS_PARENT * 8)
    if has_parent:
        last = find_parent(context, column, load(row + layout.EVENT_PARENT * 8))
        if last < 0:
            return False  # attached anywhere else, it could claim a prefix that the rank does not hold
        line = run_at(context, last >> layout.SLOT_SHIFT)
        before = load(sequence_at(context, line, last & layout.OFFSET_MASK))
        position = load(line + layout.RUN_START * 8) + (last & layout.OFFSET_MASK) + 1
    hold_all(
        context,
        column,
        last,
        before,
        has_parent,
        position,
        load(row + layout.EVENT_BLOCKS * 8),
        load(row + layout.EVENT_ENGINE * 8),
        load(row + layout.EVENT_LOCAL * 8),
        load(row + layout.EVENT_LABELLED * 8),
        row + layout.EVENT_LABELS * 8,
    )
    return True


@kernel()
def remove_blocks(context: int, column: int, n_blocks: int, engines: int) -> int:
    """Remove blocks; returns the number of those that were not held."""
    unknown = 0
    for index in range(n_blocks):
        slot = find_engine(context, column, signed(load_u64(engines + (index << 3))))
        if slot < 0:
            unknown += 1
        else:
            unhold(context, slot)
    return unknown


@kernel()
def end_rank(context: int, rank: int) -> None:
    """End everything that a rank holds, and note that its records need tombstones."""
    for tier in range(layout.N_TIERS):
        column = (rank << 2) | tier
        head = load(column_at(context, column) + layout.COLUMN_HEAD * 8)
        while head != 0:
            run = head - 1
            line = run_at(context, run)
            head = load(line + layout.RUN_NEXT * 8)
            entry = get(context, layout.STALE) + (get(context, layout.STALE_END) << 4)
            store(entry, column)
            store(entry + 8, load(line + layout.RUN_FIRST * 8))
            put(context, layout.STALE_END, get(context, layout.STALE_END) + 1)
            present = load(line + layout.RUN_PRESENT * 8)
            for offset in range(load(line + layout.RUN_SHAPE * 8) & layout.LENGTH_MASK):
                if (present >> offset) & 1:
                    tag = tag_in(context, column, load(engine_at(context, line, offset)))
                    delete_slot(context, layout.BY_ENGINE, tag, (run << layout.SLOT_SHIFT) | offset)
            free_run(context, run)
        store(column_at(context, column) + layout.COLUMN_HELD * 8, 0)


@kernel()
def reserve_blocks(context: int, n_blocks: int) -> int:
    """Return 0 if any changes of this many blocks fit, otherwise GROW or FULL.

    One block needs at most a run, a span of the smallest class, a span for labels and, as its run grows, a span of each
    class.
    """
    for which in (layout.BY_ENGINE, layout.BY_SEQUENCE):
        if (get(context, which + layout.MAP_ENTRIES) + n_blocks) * 5 > (get(context, which + layout.MAP_MASK) + 1) * 3:
            return layout.GROW
    words = n_blocks * 3 * (layout.SPAN_BLOCKS_MIN << (layout.LARGEST_CLASS + 2))
    if (
        get(context, layout.N_RUNS) + n_blocks > get(context, layout.RUNS_MAX)
        or get(context, layout.N_DIRTY) + n_blocks > get(context, layout.RUNS_MAX)
        or get(context, layout.N_EMPTIED) + n_blocks > get(context, layout.RUNS_MAX)
        or get(context, layout.N_SPAN_WORDS) + words > get(context, layout.SPAN_WORDS_MAX)
        or get(context, layout.STALE_END) + get(context, layout.N_RUNS) + n_blocks > get(context, layout.STALE_MAX)
    ):
        return layout.FULL
    return 0


@kernel()
def apply_rows(context: int, rank: int, rows: int, n_rows: int) -> int:
    """Apply the events of one batch, and count in the context what they found. GROW, FULL: nothing was done."""
    n_blocks = 0
    for index in range(n_rows):
        n_blocks += load(rows + index * (layout.EVENT_WORDS * 8) + layout.EVENT_BLOCKS * 8)
    failure = reserve_blocks(context, n_blocks)
    if failure != 0:
        return failure
    clears, parents, before_clear, removals = 0, 0, 0, 0
    for index in range(n_rows):
        row = rows + index * (layout.EVENT_WORDS * 8)
        kind = load(row + layout.EVENT_KIND * 8)
        if kind == layout.STORED:
            if not store_blocks(context, rank, row):
                parents += 1
        elif kind == layout.CLEARED:
            end_rank(context, rank)
            generation = get(context, layout.RANKS) + (rank * layout.RANK_WORDS + layout.RANK_GENERATION) * 8
            store(generation, load(generation) + 1)
            clears += 1
            before_clear = parents
        else:
            column = (rank << 2) | load(row + layout.EVENT_TIER * 8)
            removals += remove_blocks(
                context, column, load(row + layout.EVENT_BLOCKS * 8), load(row + layout.EVENT_ENGINE * 8)
            )
    put(context, layout.N_CLEARS, clears)
    put(context, layout.N_UNKNOWN_PARENTS, parents)
    put(context, layout.PARENTS_BEFORE_CLEAR, before_clear)
    put(context, layout.N_UNKNOWN_REMOVALS, removals)
    return 0


@kernel()
def restate_run(
    context: int,
    rank: int,
    tier: int,
    start: int,
    parent: int,
    has_parent: int,
    n_blocks: int,
    engines: int,
    locals_: int,
    labelled: int,
    labels: int,
) -> int:
    """Add restated blocks with equal labels, whose parent is named by its sequence hash and need not be held.

    labels: address of LABEL_WORDS int64. Returns 0, or GROW or FULL if nothing was done.
    """
    failure = reserve_blocks(context, n_blocks)
    if failure != 0:
        return failure
    column = (rank << 2) | tier
    last = -1
    if has_parent:
        last = find_sequence(context, column, parent)
    hold_all(context, column, last, parent, has_parent, start, n_blocks, engines, locals_, labelled, labels)
    return 0


@kernel()
def adopt_run(
    context: int,
    column: int,
    first: int,
    start: int,
    parent: int,
    has_parent: int,
    n_blocks: int,
    present: int,
    locals_: int,
    engines: int,
) -> int:
    """Take a run that was read back, for which capacity is reserved; returns its id. Its record need not be written."""
    size = 0
    while layout.SPAN_BLOCKS_MIN << size < n_blocks:
        size += 1
    run = new_run(context, column, first, parent, has_parent, start, size)
    line = run_at(context, run)
    before, held = parent, 0
    for offset in range(n_blocks):
        local = signed(load_u64(locals_ + (offset << 3)))
        engine = signed(load_u64(engines + (offset << 3)))
        block = local
        if has_parent or offset > 0:
            block = signed(chain_step(before, local))
        before = block
        slot = append(context, run, local, engine, block)
        if (present >> offset) & 1:
            insert_slot(context, layout.BY_ENGINE, tag_in(context, column, engine), slot)
            held += 1
    store(line + layout.RUN_PRESENT * 8, present)
    counter = column_at(context, column) + layout.COLUMN_HELD * 8
    store(counter, load(counter) + held)
    return run


@kernel()
def add_stale(context: int, column: int, first: int) -> None:
    """Note that a record of an ended epoch needs a tombstone."""
    entry = get(context, layout.STALE) + (get(context, layout.STALE_END) << 4)
    store(entry, column)
    store(entry + 8, first)
    put(context, layout.STALE_END, get(context, layout.STALE_END) + 1)


@kernel()
def next_stale(context: int) -> int:
    """Return the address of the next pending tombstone, 0 for none. A key that the new epoch wrote again has none."""
    while get(context, layout.STALE_BEGIN) < get(context, layout.STALE_END):
        entry = get(context, layout.STALE) + (get(context, layout.STALE_BEGIN) << 4)
        slot = find_sequence(context, load(entry), load(entry + 8))
        if slot < 0 or slot & layout.OFFSET_MASK != 0:
            return entry
        put(context, layout.STALE_BEGIN, get(context, layout.STALE_BEGIN) + 1)
    put(context, layout.STALE_BEGIN, 0)
    put(context, layout.STALE_END, 0)
    return 0

"""Cutting, joining and removing runs.

What lives here: changes of the tree's shape that change no fact, and the cleanup after a change. What must not: holding
blocks (tree).
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.by_sequence import remove_blocks
from streams.core.index.kernels.fields import (
    end_change,
    field,
    local_at,
    run_address,
    set_field,
)
from streams.core.index.kernels.maps import delete_id
from streams.core.index.kernels.runs import (
    child_tag,
    copy_coverage,
    free_run,
    has_ended_column,
    has_no_holder,
    mark_start,
    new_run,
    remove_child,
    replace_child,
    replace_start,
    same_coverage,
    unmark_start,
)
from streams.core.index.kernels.spans import free_span
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import (
    load,
    load32,
    load_acquire,
    store,
    store32,
    yield_processor,
)
from streams.core.kernels.words import add, get, put

# -- split, merge, remove runs ---------------------------------------------------------------------------


@kernel()
def split_run(context: int, run: int, offset: int) -> tuple[int, int]:
    """Cut a run before `offset`; returns the ids of head and rest, one of which is the run's own id.

    The rest keeps the id if it has children in the map, since their keys contain it. Otherwise the head keeps it, so
    that the parent need not change, which saves two cache misses.
    """
    other = new_run(context)
    line, fresh = run_address(context, run), run_address(context, other)
    start, length = load32(line + layout.RUN_START), load32(line + layout.RUN_LENGTH)
    capacity = load32(line + layout.RUN_CAPACITY)
    children, direct = load32(line + layout.RUN_CHILDREN), load32(line + layout.RUN_DIRECT)
    copy_coverage(context, other, run)
    store32(fresh + layout.RUN_SIBLING, 0)
    if only_direct(children, direct):
        store32(fresh + layout.RUN_START, start + offset)
        store32(fresh + layout.RUN_LENGTH, length - offset)
        store32(fresh + layout.RUN_CAPACITY, capacity - offset)
        store32(fresh + layout.RUN_PARENT, run)
        store32(fresh + layout.RUN_DIRECT, direct)
        store32(fresh + layout.RUN_CHILDREN, children)
        if direct >= 0:
            set_field(context, direct, layout.RUN_PARENT, other)
        store32(line + layout.RUN_LENGTH, offset)
        store32(line + layout.RUN_CAPACITY, offset)
        store32(line + layout.RUN_DIRECT, other)
        store32(line + layout.RUN_CHILDREN, 1)
        mark_start(context, other)
        head, rest = run, other
    else:
        store32(fresh + layout.RUN_START, start)
        store32(fresh + layout.RUN_LENGTH, offset)
        store32(fresh + layout.RUN_CAPACITY, offset)
        store32(fresh + layout.RUN_DIRECT, run)
        store32(fresh + layout.RUN_CHILDREN, 1)
        replace_child(context, load32(line + layout.RUN_PARENT), run, other)
        replace_start(context, run, other)
        store32(line + layout.RUN_START, start + offset)
        store32(line + layout.RUN_LENGTH, length - offset)
        store32(line + layout.RUN_CAPACITY, capacity - offset)
        store32(line + layout.RUN_PARENT, other)
        store32(line + layout.RUN_SIBLING, 0)
        mark_start(context, run)
        head, rest = other, run
    if get(context, layout.N_ENDED) and other < get(context, layout.SWEEP_AT) and has_ended_column(context, other):
        put(context, layout.SWEEP_AGAIN, 1)
    return head, rest


@njit(inline="always")
def only_direct(children: int, direct: int) -> bool:
    """Whether no child is in the map."""
    return children == 0 or (children == 1 and direct >= 0)


@kernel()
def merge_up(context: int, run: int) -> tuple[int, int]:
    """Join a run with its parent if the run is its only child, directly follows it, and has the same holders.

    Returns the id of the run that now contains the blocks, and the offset in it of the run's first block.
    """
    line = run_address(context, run)
    parent = load32(line + layout.RUN_PARENT)
    if parent <= 0:
        return run, 0
    above = run_address(context, parent)
    length = load32(above + layout.RUN_LENGTH)
    if (
        load32(above + layout.RUN_CHILDREN) != 1
        or load32(above + layout.RUN_START) + length != load32(line + layout.RUN_START)
        or load32(above + layout.RUN_CAPACITY) != length
        or not same_coverage(context, parent, run)
    ):
        return run, 0
    if load32(above + layout.RUN_DIRECT) != run:
        delete_id(
            context,
            layout.CHILDREN,
            child_tag(context, parent, local_at(context, load32(line + layout.RUN_START))),
            run,
        )
    unmark_start(context, run)
    children, direct = load32(line + layout.RUN_CHILDREN), load32(line + layout.RUN_DIRECT)
    if only_direct(children, direct):
        store32(above + layout.RUN_LENGTH, length + load32(line + layout.RUN_LENGTH))
        store32(above + layout.RUN_CAPACITY, length + load32(line + layout.RUN_CAPACITY))
        store32(above + layout.RUN_DIRECT, direct)
        store32(above + layout.RUN_CHILDREN, children)
        if direct >= 0:
            set_field(context, direct, layout.RUN_PARENT, parent)
        free_run(context, run)
        run = parent
    else:
        store32(line + layout.RUN_START, load32(above + layout.RUN_START))
        store32(line + layout.RUN_LENGTH, load32(line + layout.RUN_LENGTH) + length)
        store32(line + layout.RUN_CAPACITY, load32(line + layout.RUN_CAPACITY) + length)
        replace_child(context, load32(above + layout.RUN_PARENT), parent, run)
        replace_start(context, parent, run)
        free_run(context, parent)
    if get(context, layout.N_ENDED) and run < get(context, layout.SWEEP_AT) and has_ended_column(context, run):
        put(context, layout.SWEEP_AGAIN, 1)
    return run, length


@kernel()
def merge_down(context: int, run: int) -> int:
    """Join a run with its only child, as `merge_up` does; returns the id of the run that now contains its blocks."""
    line = run_address(context, run)
    if load32(line + layout.RUN_CHILDREN) == 1:
        child = load32(line + layout.RUN_DIRECT)
        if child >= 0:
            joined, offset = merge_up(context, child)
            if offset > 0:
                return joined
    return run


@kernel()
def wait_for_queries(context: int) -> None:
    """Leave the tree unchanged until the queries that asked for it have ended, for at most PAUSE_CHECKS_MAX checks."""
    for checks in range(layout.PAUSE_CHECKS_MAX):
        if load_acquire(context + (layout.WAITING << 3)) == 0:
            return
        if checks >= layout.TRIES_BEFORE_YIELDING:
            yield_processor()


@kernel()
def finish_change(context: int) -> None:
    """End the change, then clean up."""
    end_change(context)
    tidy(context)


@kernel()
def tidy(context: int) -> None:
    """Remove removed blocks from BY_SEQUENCE and free their spans, usually after the change: no query reads these."""
    entries = get(context, layout.DEFERRED)
    # All blocks before any span, since a freed span writes its length over the hash of its last block.
    for index in range(get(context, layout.N_DEFERRED)):
        entry = entries + (index << 5)
        remove_blocks(context, load(entry), load(entry + 8))
    for index in range(get(context, layout.N_DEFERRED)):
        entry = entries + (index << 5)
        free_span(context, load(entry + 16), load(entry + 24))
    put(context, layout.N_DEFERRED, 0)


@kernel()
def defer(context: int, first: int, n_blocks: int, span: int, length: int) -> None:
    """Schedule the removal of blocks and of a span for the end of the change; if too many wait, tidy first."""
    if get(context, layout.N_DEFERRED) >= layout.DEFERRED_MAX:
        tidy(context)
    index = get(context, layout.N_DEFERRED)
    entry = get(context, layout.DEFERRED) + (index << 5)
    store(entry, first)
    store(entry + 8, n_blocks)
    store(entry + 16, span)
    store(entry + 24, length)
    put(context, layout.N_DEFERRED, index + 1)


@kernel()
def trim_spare(context: int, run: int) -> None:
    """Free the spare space of a run, since a run with children never grows in place."""
    line = run_address(context, run)
    length = load32(line + layout.RUN_LENGTH)
    spare = load32(line + layout.RUN_CAPACITY) - length
    if spare > 0:
        store32(line + layout.RUN_CAPACITY, length)
        free_span(context, load32(line + layout.RUN_START) + length, spare)


@kernel()
def remove_unheld(context: int, run: int) -> None:
    """Remove a run without holders and children, and then each parent that this leaves without them."""
    while run > 0 and field(context, run, layout.RUN_CHILDREN) == 0 and has_no_holder(context, run):
        line = run_address(context, run)
        start, length = load32(line + layout.RUN_START), load32(line + layout.RUN_LENGTH)
        capacity, parent = load32(line + layout.RUN_CAPACITY), load32(line + layout.RUN_PARENT)
        if capacity == layout.PHANTOM:
            capacity = 1
            add(context, layout.N_PHANTOMS, -1)
        if parent >= 0:
            remove_child(context, parent, run)
        unmark_start(context, run)
        free_run(context, run)
        defer(context, start, length, start, capacity)
        run = parent

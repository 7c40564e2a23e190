"""Runs: their fields, their holders and children, and the way from a block to its run.

What lives here: reading and writing one run. What must not: cutting and joining runs (shape), spans of blocks (spans).
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.fields import (
    coverage_address,
    field,
    local_at,
    run_address,
    segment_of,
    set_bit,
    set_field,
    tag_of,
    unset_bit,
)
from streams.core.index.kernels.maps import ID_MASK, SLOT_MASK, delete_id, find_id, insert_id
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import leading_zeros, load, load32, shift_right, store, store32
from streams.core.kernels.words import SYNTHETIC_STEP, add, get, put

# -- coverage --------------------------------------------------------------------------------------------


@njit(inline="always")
def same_coverage(context: int, left: int, right: int) -> bool:
    """Whether two runs have the same holders."""
    for word in range(get(context, layout.N_WORDS)):
        if load(coverage_address(context, left, word)) != load(coverage_address(context, right, word)):
            return False
    return True


@njit(inline="always")
def copy_coverage(context: int, target: int, source: int) -> None:
    """Copy the holders of one run to another."""
    for word in range(get(context, layout.N_WORDS)):
        store(coverage_address(context, target, word), load(coverage_address(context, source, word)))


@njit(inline="always")
def clear_coverage(context: int, run: int) -> None:
    """Remove all holders of a run."""
    for word in range(get(context, layout.N_WORDS)):
        store(coverage_address(context, run, word), 0)


@njit(inline="always")
def has_no_holder(context: int, run: int) -> bool:
    """Whether a run has no holder."""
    found = 0
    for word in range(get(context, layout.N_WORDS)):
        found |= load(coverage_address(context, run, word))
    return found == 0


@njit(inline="always")
def only_holder(context: int, run: int, column: int) -> bool:
    """Whether a column is the only holder of a run."""
    for word in range(get(context, layout.N_WORDS)):
        wanted = 0
        if word == column >> 6:
            wanted = 1 << (column & 63)
        if load(coverage_address(context, run, word)) != wanted:
            return False
    return True


@kernel()
def has_ended_column(context: int, run: int) -> bool:
    """Whether a run still has a holder that was cleared."""
    ended = get(context, layout.ENDED)
    for word in range(get(context, layout.N_WORDS)):
        if load(coverage_address(context, run, word)) & load(ended + (word << 3)) != 0:
            return True
    return False


# -- bitmaps and granules: from a block to its run -------------------------------------------------------


#: Words of STARTS in a cache line. This many are scanned before the bitmaps above are used.
_WORDS_PER_LINE = 8


@njit(inline="always")
def start_before(context: int, block: int) -> int:
    """Find the nearest block at or before this one at which a run starts; returns -1 if there is none."""
    starts = get(context, layout.STARTS)
    word = block >> 6
    bits = load(starts + (word << 3)) & shift_right(-1, 63 - (block & 63))
    while bits == 0 and word & (_WORDS_PER_LINE - 1):
        word -= 1
        bits = load(starts + (word << 3))
    if bits == 0:
        word = last_word_with_starts(context, word)
        if word < 0:
            return -1
        bits = load(starts + (word << 3))
    return (word << 6) + 63 - leading_zeros(bits)


@kernel()
def last_word_with_starts(context: int, word: int) -> int:
    """Find the nearest word of STARTS before this one that is not zero; returns -1 if there is none."""
    above, top = get(context, layout.STARTS_ABOVE), get(context, layout.STARTS_TOP)
    line = word >> 6
    bits = load(above + (line << 3)) & ((1 << (word & 63)) - 1)
    if bits == 0:
        group = line >> 6
        lines = load(top + (group << 3)) & ((1 << (line & 63)) - 1)
        while lines == 0:
            group -= 1
            if group < 0:
                return -1
            lines = load(top + (group << 3))
        line = (group << 6) + 63 - leading_zeros(lines)
        bits = load(above + (line << 3))
    return (line << 6) + 63 - leading_zeros(bits)


@kernel()
def run_of(context: int, block: int) -> int:
    """Find the run of a block."""
    start = start_before(context, block)
    run = load32(get(context, layout.GRANULES) + ((start >> 4) << 2)) - 1
    while field(context, run, layout.RUN_START) != start:
        run = field(context, run, layout.RUN_NEXT) - 1
    return run


@kernel()
def mark_start(context: int, run: int) -> None:
    """Mark the start of a run, so that its blocks lead to it."""
    start = field(context, run, layout.RUN_START)
    word = get(context, layout.STARTS) + ((start >> 6) << 3)
    if load(word) == 0:
        set_bit(get(context, layout.STARTS_ABOVE), start >> 6)
        set_bit(get(context, layout.STARTS_TOP), start >> 12)
    store(word, load(word) | (1 << (start & 63)))
    granule = get(context, layout.GRANULES) + ((start >> 4) << 2)
    set_field(context, run, layout.RUN_NEXT, load32(granule))
    store32(granule, run + 1)


@kernel()
def replace_start(context: int, old: int, new: int) -> None:
    """Replace a run by another with the same start, or remove it if `new` is 0. The caller updates the start's bit."""
    granule = get(context, layout.GRANULES) + ((field(context, old, layout.RUN_START) >> 4) << 2)
    follower = field(context, old, layout.RUN_NEXT)
    if new > 0:
        set_field(context, new, layout.RUN_NEXT, follower)
        follower = new + 1
    if load32(granule) == old + 1:
        store32(granule, follower)
        return
    run = load32(granule) - 1
    while field(context, run, layout.RUN_NEXT) != old + 1:
        run = field(context, run, layout.RUN_NEXT) - 1
    set_field(context, run, layout.RUN_NEXT, follower)


@kernel()
def unmark_start(context: int, run: int) -> None:
    """Remove the mark of a run's start."""
    start = field(context, run, layout.RUN_START)
    word = get(context, layout.STARTS) + ((start >> 6) << 3)
    store(word, load(word) & ~(1 << (start & 63)))
    if load(word) == 0:
        above = get(context, layout.STARTS_ABOVE)
        unset_bit(above, start >> 6)
        if load(above + ((start >> 12) << 3)) == 0:
            unset_bit(get(context, layout.STARTS_TOP), start >> 12)
    replace_start(context, run, 0)


# -- run ids ---------------------------------------------------------------------------------------------


@kernel()
def new_run(context: int) -> int:
    """Take a free run id; the caller sets all fields of the run."""
    run = get(context, layout.FREE_RUN)
    if run:
        put(context, layout.FREE_RUN, field(context, run, layout.RUN_NEXT))
    else:
        run = get(context, layout.N_RUNS)
        put(context, layout.N_RUNS, run + 1)
    add(context, layout.N_LIVE_RUNS, 1)
    return run


@kernel()
def free_run(context: int, run: int) -> None:
    """Free a run id. A length of 0 marks it as free for code that visits all runs."""
    set_field(context, run, layout.RUN_LENGTH, 0)
    clear_coverage(context, run)
    set_field(context, run, layout.RUN_NEXT, get(context, layout.FREE_RUN))
    put(context, layout.FREE_RUN, run)
    add(context, layout.N_LIVE_RUNS, -1)


# -- children --------------------------------------------------------------------------------------------


@njit(inline="always")
def child_tag(context: int, parent: int, local: int) -> int:
    """Tag of a parent and its child's first local hash."""
    return tag_of(context, local ^ (parent * SYNTHETIC_STEP))


@kernel()
def find_child(context: int, parent: int, local: int) -> int:
    """Find the child of a run that begins with this local hash; returns -1 if there is none."""
    line = run_address(context, parent)
    hashes = get(context, layout.LOCAL)
    direct = load32(line + layout.RUN_DIRECT)
    others = load32(line + layout.RUN_CHILDREN)
    if direct >= 0:
        if load(hashes + (field(context, direct, layout.RUN_START) << 3)) == local:
            return direct
        others -= 1
    if others <= 0:
        return -1
    tag = child_tag(context, parent, local)
    segment = segment_of(context, layout.CHILDREN, tag)
    position = tag & SLOT_MASK
    for _ in range(SLOT_MASK + 1):
        slot = load(segment + (position << 3))
        if slot == 0:
            return -1
        if shift_right(slot, 32) == tag:
            child = (slot & ID_MASK) - 1
            start = field(context, child, layout.RUN_START)
            if field(context, child, layout.RUN_PARENT) == parent and load(hashes + (start << 3)) == local:
                return child
        position = (position + 1) & SLOT_MASK
    return -1


@kernel()
def add_child(context: int, parent: int, child: int) -> None:
    """Make a run the child of another."""
    set_field(context, child, layout.RUN_PARENT, parent)
    line = run_address(context, parent)
    store32(line + layout.RUN_CHILDREN, load32(line + layout.RUN_CHILDREN) + 1)
    if load32(line + layout.RUN_DIRECT) < 0:
        store32(line + layout.RUN_DIRECT, child)
    else:
        insert_id(
            context,
            layout.CHILDREN,
            child_tag(context, parent, local_at(context, field(context, child, layout.RUN_START))),
            child,
        )
    if parent != 0 and load32(line + layout.RUN_CAPACITY) == layout.PHANTOM:
        set_field(context, child, layout.RUN_SIBLING, load32(line + layout.RUN_SIBLING))
        store32(line + layout.RUN_SIBLING, child + 1)


@kernel()
def replace_sibling(context: int, parent: int, child: int, instead: int) -> None:
    """Replace a child in the list of a phantom, or remove it if `instead` is 0."""
    follower = field(context, child, layout.RUN_SIBLING)
    if instead:
        set_field(context, instead, layout.RUN_SIBLING, follower)
        follower = instead + 1
    if field(context, parent, layout.RUN_SIBLING) == child + 1:
        set_field(context, parent, layout.RUN_SIBLING, follower)
        return
    run = field(context, parent, layout.RUN_SIBLING) - 1
    while field(context, run, layout.RUN_SIBLING) != child + 1:
        run = field(context, run, layout.RUN_SIBLING) - 1
    set_field(context, run, layout.RUN_SIBLING, follower)


@kernel()
def remove_child(context: int, parent: int, child: int) -> None:
    """Remove a run from the children of another."""
    line = run_address(context, parent)
    if load32(line + layout.RUN_DIRECT) == child:
        store32(line + layout.RUN_DIRECT, -1)
    else:
        delete_id(
            context,
            layout.CHILDREN,
            child_tag(context, parent, local_at(context, field(context, child, layout.RUN_START))),
            child,
        )
    store32(line + layout.RUN_CHILDREN, load32(line + layout.RUN_CHILDREN) - 1)
    if parent != 0 and load32(line + layout.RUN_CAPACITY) == layout.PHANTOM:
        replace_sibling(context, parent, child, 0)


@kernel()
def replace_child(context: int, parent: int, old: int, new: int) -> None:
    """Replace a child by another run with the same first block."""
    set_field(context, new, layout.RUN_PARENT, parent)
    line = run_address(context, parent)
    if load32(line + layout.RUN_DIRECT) == old:
        store32(line + layout.RUN_DIRECT, new)
    else:
        tag = child_tag(context, parent, local_at(context, field(context, old, layout.RUN_START)))
        address = find_id(context, layout.CHILDREN, tag, old)
        store(address, (tag << 32) | (new + 1))
    if parent != 0 and load32(line + layout.RUN_CAPACITY) == layout.PHANTOM:
        replace_sibling(context, parent, old, new)

"""The run tree: what storing and removing blocks does to runs and counts.

What lives here: holding blocks, adding new ones, and placeholders for parents that have not been read yet. What must
not: queries (match), records and their claims' ends (fold). There is one writer at a time; queries may run alongside it
(see `begin_change`).

The shape follows the idea of `kv-index`, runs with coverage: a run is consecutive blocks of one chain held by one set
of ranks, and a column is one rank in one tier, a bit in the coverage of each run.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.by_sequence import add_blocks, find_block, is_phantom
from streams.core.index.kernels.claims import add_claim
from streams.core.index.kernels.fields import (
    begin_change,
    column_word,
    covers,
    field,
    local_at,
    run_address,
    sequence_at,
    set_bit,
    set_cover,
    set_field,
    tag_of,
    test_bit,
    unset_cover,
)
from streams.core.index.kernels.maps import delete_id, find_id, insert_id
from streams.core.index.kernels.runs import (
    add_child,
    child_tag,
    clear_coverage,
    find_child,
    free_run,
    has_no_holder,
    mark_start,
    new_run,
    only_holder,
    run_of,
    unmark_start,
)
from streams.core.index.kernels.shape import defer, merge_down, merge_up, remove_unheld, split_run, trim_spare
from streams.core.index.kernels.spans import free_span, new_span, span_class
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import (
    copy_words,
    load,
    load32,
    prefetch,
    store,
    store32,
    trailing_zeros,
    unequal_8,
)
from streams.core.kernels.words import add, get, put

# -- holding and not holding -----------------------------------------------------------------------------


@kernel()
def count_facts(context: int, column: int, n_blocks: int) -> None:
    """Count `n_blocks` more facts of a column, or fewer if negative."""
    address = column_word(context, layout.COLUMN_FACTS, column)
    store(address, load(address) + n_blocks)
    add(context, layout.N_FACTS, n_blocks)
    if load32(get(context, layout.TIER_OF) + (column << 2)):
        add(context, layout.N_LOWER_FACTS, n_blocks)


@kernel()
def cover(context: int, run: int, offset: int, n_blocks: int, column: int) -> tuple[int, int]:
    """Add a column to the holders of `n_blocks` blocks of a run, from `offset` on; it holds none of the run so far.

    Returns the run that the blocks are in now, and the offset after them.
    """
    begin_change(context)
    count_facts(context, column, n_blocks)
    if offset > 0:
        run = split_run(context, run, offset)[1]
    if n_blocks < field(context, run, layout.RUN_LENGTH):
        run = split_run(context, run, n_blocks)[0]
    set_cover(context, run, column)
    run, before = merge_up(context, run)
    return merge_down(context, run), before + n_blocks


@kernel()
def uncover(context: int, run: int, offset: int, n_blocks: int, column: int) -> None:
    """Remove a column from the holders of `n_blocks` blocks of a run, from `offset` on; it holds the whole run so far.

    Runs that are left without holders and children are removed.
    """
    first = field(context, run, layout.RUN_START) + offset
    begin_change(context)
    count_facts(context, column, -n_blocks)
    line = run_address(context, run)
    length = load32(line + layout.RUN_LENGTH)
    at_end = offset > 0 and offset + n_blocks == length and load32(line + layout.RUN_CHILDREN) == 0
    if at_end and only_holder(context, run, column):
        # The end of a run without children: the run gets shorter, and keeps some of the space for later blocks.
        store32(line + layout.RUN_LENGTH, offset)
        spare = load32(line + layout.RUN_CAPACITY) - offset
        if spare > layout.SLACK_KEPT_MAX:
            store32(line + layout.RUN_CAPACITY, offset + layout.SLACK_MAX)
            defer(context, first, n_blocks, first + layout.SLACK_MAX, spare - layout.SLACK_MAX)
        else:
            defer(context, first, n_blocks, 0, 0)
        return
    if offset > 0:
        run = split_run(context, run, offset)[1]
    if n_blocks < field(context, run, layout.RUN_LENGTH):
        run = split_run(context, run, n_blocks)[0]
    unset_cover(context, run, column)
    if field(context, run, layout.RUN_CHILDREN) == 0 and has_no_holder(context, run):
        remove_unheld(context, run)
        return
    run, _ = merge_up(context, run)
    merge_down(context, run)


# -- storing ---------------------------------------------------------------------------------------------


#: How far ahead a long comparison prefetches: a processor's own prefetcher stops at the end of each page.
_COMPARE_AHEAD_BYTES = 1024


@njit(inline="always")
def common_length(left: int, right: int, limit: int) -> int:
    """Number of leading int64 that are equal at two addresses, up to a limit."""
    n = 0
    while n + 8 <= limit:
        prefetch(left + (n << 3) + _COMPARE_AHEAD_BYTES)
        prefetch(right + (n << 3) + _COMPARE_AHEAD_BYTES)
        unequal = unequal_8(left + (n << 3), right + (n << 3))
        if unequal:
            return n + trailing_zeros(unequal)
        n += 8
    while n < limit and load(left + (n << 3)) == load(right + (n << 3)):
        n += 1
    return n


@kernel()
def end_of(context: int, block: int) -> tuple[int, int]:
    """Run of a block, and the offset after the block."""
    run = run_of(context, block)
    return run, block - field(context, run, layout.RUN_START) + 1


@kernel()
def prepare(
    context: int, run: int, at_end: bool, sequence: int, local: int, n_blocks: int, column: int, clashes: int
) -> tuple[int, int, int, int]:
    """Write new blocks where no query reads yet, and add them to BY_SEQUENCE.

    The blocks follow `run`. They go into its spare space if the column is its only holder and they begin at its end
    (`at_end`), and otherwise into a run of their own.
    Returns how many go into the run itself, the run of the others (0 for none), whether that is in the spare space, and
    how many replace phantoms; see `add_blocks`.
    """
    hashes, locals_of_tree = get(context, layout.SEQUENCE), get(context, layout.LOCAL)
    line = run_address(context, run)
    length, capacity = load32(line + layout.RUN_LENGTH), load32(line + layout.RUN_CAPACITY)
    first = load32(line + layout.RUN_START) + length
    spare = 0
    if at_end and run != 0 and capacity != layout.PHANTOM:
        spare = capacity - length
    n_appended = 0
    n_clashes = 0
    if spare > 0 and column >= 0 and only_holder(context, run, column):
        n_appended = min(spare, n_blocks)
        spare -= n_appended
        copy_words(locals_of_tree + (first << 3), local, n_appended)
        copy_words(hashes + (first << 3), sequence, n_appended)
        n_clashes = add_blocks(context, first, n_appended, 0, clashes, 0)
    n_more = n_blocks - n_appended
    if n_more == 0:
        return n_appended, 0, 0, n_clashes
    in_spare = 0
    if n_more <= spare:
        # The new run fits into the spare space, so the two can be joined once they have the same holders.
        in_spare, start, size = 1, first, spare
    else:
        left = get(context, layout.BLOCKS_MAX) - get(context, layout.N_BLOCKS)
        slack = min(max(n_more, layout.SLACK_MIN), layout.SLACK_MAX)
        if left < get(context, layout.BLOCKS_MAX) >> layout.SLACK_LEFT_SHIFT:
            slack = 0
        start, size = new_span(context, n_more, n_more + slack)
    copy_words(locals_of_tree + (start << 3), local + (n_appended << 3), n_more)
    copy_words(hashes + (start << 3), sequence + (n_appended << 3), n_more)
    child = new_run(context)
    line = run_address(context, child)
    store32(line + layout.RUN_START, start)
    store32(line + layout.RUN_LENGTH, n_more)
    store32(line + layout.RUN_CAPACITY, size)
    store32(line + layout.RUN_DIRECT, -1)
    store32(line + layout.RUN_CHILDREN, 0)
    store32(line + layout.RUN_SIBLING, 0)
    clear_coverage(context, child)
    if column >= 0:
        set_cover(context, child, column)
    mark_start(context, child)
    n_clashes = add_blocks(context, start, n_more, n_appended, clashes, n_clashes)
    return n_appended, child, in_spare, n_clashes


@kernel()
def link(
    context: int,
    run: int,
    offset: int,
    n_appended: int,
    child: int,
    in_spare: int,
    sequence: int,
    column: int,
    clashes: int,
) -> int:
    """Attach prepared blocks after `offset` blocks of a run, within a change; returns the id of the last new block.

    N_CLASHES of them, listed in `clashes`, replace phantoms.
    """
    length = field(context, run, layout.RUN_LENGTH)
    if offset < length:
        run = split_run(context, run, offset)[0]
        length = offset
    first = field(context, run, layout.RUN_START) + length
    last = first + n_appended - 1
    if n_appended:
        set_field(context, run, layout.RUN_LENGTH, length + n_appended)
    n_blocks = n_appended
    start = 0
    if child:
        start, n_more = field(context, child, layout.RUN_START), field(context, child, layout.RUN_LENGTH)
        if in_spare:
            set_field(context, run, layout.RUN_CAPACITY, length)
        elif run != 0 and field(context, run, layout.RUN_CAPACITY) != layout.PHANTOM:
            trim_spare(context, run)
        add_child(context, run, child)
        last = start + n_more - 1
        n_blocks += n_more
    if column >= 0:
        count_facts(context, column, n_blocks)
    for index in range(get(context, layout.N_CLASHES)):
        position = load(clashes + (index << 3))
        block = first + position if position < n_appended else start + position - n_appended
        phantom = find_block(context, load(sequence + (position << 3)))
        replace_phantom(context, run_of(context, phantom), block)
    return last


@kernel()
def has_capacity(context: int, n_blocks: int) -> bool:
    """Whether this many blocks fit, in several spans.

    The new blocks of a span go after all others or into a free span of a greater class; every such span is long enough.
    """
    n_span_blocks = 2 * n_blocks + layout.SLACK_MAX
    if get(context, layout.N_BLOCKS) + n_span_blocks + layout.SLACK_MAX > get(context, layout.BLOCKS_MAX):
        which = layout.SPAN_CLASSES + span_class(n_span_blocks) + 1
        while which < layout.SPAN_CLASSES + layout.N_SPAN_CLASSES and get(context, which) == 0:
            which += 1
        if which >= layout.SPAN_CLASSES + layout.N_SPAN_CLASSES:
            return False
    return get(context, layout.N_SEGMENTS) + n_blocks // 1024 + 32 <= get(context, layout.SEGMENTS_MAX)


@kernel()
def store_blocks(context: int, column: int, run: int, offset: int, sequence: int, local: int, n_blocks: int) -> int:
    """Store consecutive blocks of a record for a column, the first after `offset` blocks of a run; run 0 is the root.

    This walks the existing blocks without changing anything, then writes new blocks where no query reads yet, and then
    makes the whole change at once, as briefly as possible. Blocks that the column holds already get a claim.
    column: -1 to add the blocks without a holder. The caller has checked that they fit.
    Begins a change, which the caller ends. Returns the id of the last block.
    """
    locals_of_tree = get(context, layout.LOCAL)
    stretches = get(context, layout.SCRATCH) + (layout.SCRATCH_STORE << 3)
    n_stretches = 0
    at_end = False
    here, after, done = run, offset, 0
    last = -1
    if run != 0:
        last = field(context, run, layout.RUN_START) + offset - 1
    while done < n_blocks:
        line = run_address(context, here)
        start, length = load32(line + layout.RUN_START), load32(line + layout.RUN_LENGTH)
        if after >= length:
            child = find_child(context, here, load(local + (done << 3)))
            if child < 0:
                at_end = True
                break
            here, after = child, 0
            continue
        first = start + after
        limit = min(length - after, n_blocks - done)
        same = common_length(locals_of_tree + (first << 3), local + (done << 3), limit)
        if same == 0:
            break
        if column >= 0:
            entry = stretches + n_stretches * 24
            store(entry, first)
            store(entry + 8, same)
            store(entry + 16, int(covers(context, here, column)))
            n_stretches += 1
        last = first + same - 1
        after += same
        done += same
    new = n_blocks - done
    if get(context, layout.N_PHANTOMS) and first_phantom(context, sequence + (done << 3), new) < new:
        return store_in_steps(context, column, run, offset, sequence, local, n_blocks)
    clashes = stretches + n_stretches * 24
    n_appended, child, in_spare, n_clashes = 0, 0, 0, 0
    if new:
        n_appended, child, in_spare, n_clashes = prepare(
            context, here, at_end, sequence + (done << 3), local + (done << 3), new, column, clashes
        )
        begin_change(context)
    for index in range(n_stretches):
        entry = stretches + index * 24
        first, same = load(entry), load(entry + 8)
        if load(entry + 16) == 0:
            here = run_of(context, first)
            cover(context, here, first - field(context, here, layout.RUN_START), same, column)
        else:
            for block in range(first, first + same):
                add_claim(context, column, block)
    if new:
        here, after = 0, 0
        if last >= 0:
            here, after = end_of(context, last)
        put(context, layout.N_CLASHES, n_clashes)
        last = link(context, here, after, n_appended, child, in_spare, sequence + (done << 3), column, clashes)
    return last


@kernel()
def store_in_steps(context: int, column: int, run: int, offset: int, sequence: int, local: int, n_blocks: int) -> int:
    """Store the blocks of a record like `store_blocks`, but stretch by stretch within the change.

    This is needed if new blocks replace phantoms. Returns the id of the last block.
    """
    begin_change(context)
    locals_of_tree = get(context, layout.LOCAL)
    clashes = get(context, layout.SCRATCH) + (layout.SCRATCH_STORE << 3)
    done, last = 0, -1
    while done < n_blocks:
        line = run_address(context, run)
        start, length = load32(line + layout.RUN_START), load32(line + layout.RUN_LENGTH)
        same = 0
        if offset >= length:
            child = find_child(context, run, load(local + (done << 3)))
            if child >= 0:
                run, offset = child, 0
                continue
        else:
            limit = min(length - offset, n_blocks - done)
            same = common_length(locals_of_tree + ((start + offset) << 3), local + (done << 3), limit)
        position = done << 3
        if same == 0:
            todo = n_blocks - done
            if get(context, layout.N_PHANTOMS):
                todo = min(todo, first_phantom(context, sequence + position, todo) + 1)
            n_appended, child, in_spare, n_clashes = prepare(
                context, run, offset >= length, sequence + position, local + position, todo, column, clashes
            )
            put(context, layout.N_CLASHES, n_clashes)
            last = link(context, run, offset, n_appended, child, in_spare, sequence + position, column, clashes)
            done += todo
            if done < n_blocks:
                run, offset = end_of(context, last)
            continue
        last = start + offset + same - 1
        if column < 0:
            offset += same
        elif covers(context, run, column):
            for block in range(start + offset, start + offset + same):
                add_claim(context, column, block)
            offset += same
        else:
            run, offset = cover(context, run, offset, same, column)
        done += same
    return last


# -- phantoms: placeholders for parents whose records have not been read yet -----------------------------


@kernel()
def first_phantom(context: int, sequence: int, n_blocks: int) -> int:
    """Index of the first of these new blocks that replaces a phantom; `n_blocks` if none does."""
    filter_bits = get(context, layout.PHANTOM_BITS)
    for index in range(n_blocks):
        own = load(sequence + (index << 3))
        if test_bit(filter_bits, tag_of(context, own) & (layout.PHANTOM_FILTER_BITS - 1)):
            block = find_block(context, own)
            if block >= 0 and is_phantom(context, block):
                return index
    return n_blocks


@kernel()
def new_phantom(context: int, sequence: int) -> int:
    """Add a placeholder for a block of which only the sequence hash is known; returns its run."""
    start, size = new_span(context, 1, 1)
    free_span(context, start + 1, size - 1)
    store(get(context, layout.LOCAL) + (start << 3), 0)
    store(get(context, layout.SEQUENCE) + (start << 3), sequence)
    run = new_run(context)
    line = run_address(context, run)
    store32(line + layout.RUN_START, start)
    store32(line + layout.RUN_LENGTH, 1)
    store32(line + layout.RUN_CAPACITY, layout.PHANTOM)
    store32(line + layout.RUN_PARENT, -1)
    store32(line + layout.RUN_DIRECT, -1)
    store32(line + layout.RUN_CHILDREN, 0)
    store32(line + layout.RUN_SIBLING, 0)
    clear_coverage(context, run)
    mark_start(context, run)
    insert_id(context, layout.BY_SEQUENCE, tag_of(context, sequence), start)
    filter_bits = get(context, layout.PHANTOM_BITS)
    if get(context, layout.N_PHANTOMS) == 0:
        for word in range(layout.PHANTOM_FILTER_BITS >> 6):
            store(filter_bits + (word << 3), 0)
    set_bit(filter_bits, tag_of(context, sequence) & (layout.PHANTOM_FILTER_BITS - 1))
    add(context, layout.N_PHANTOMS, 1)
    return run


@kernel()
def replace_phantom(context: int, phantom: int, block: int) -> None:
    """Replace a phantom by a new block, the last of its run, within a change: the phantom's children move to it."""
    start = field(context, phantom, layout.RUN_START)
    tag = tag_of(context, sequence_at(context, start))
    store(find_id(context, layout.BY_SEQUENCE, tag, start), (tag << 32) | (block + 1))
    run = run_of(context, block)
    trim_spare(context, run)
    direct = field(context, phantom, layout.RUN_DIRECT)
    waiting = field(context, phantom, layout.RUN_SIBLING)
    while waiting:
        child = waiting - 1
        waiting = field(context, child, layout.RUN_SIBLING)
        set_field(context, child, layout.RUN_SIBLING, 0)
        if child != direct:
            delete_id(
                context,
                layout.CHILDREN,
                child_tag(context, phantom, local_at(context, field(context, child, layout.RUN_START))),
                child,
            )
        add_child(context, run, child)
    unmark_start(context, phantom)
    free_run(context, phantom)
    free_span(context, start, 1)
    add(context, layout.N_PHANTOMS, -1)

"""The run tree: holding and naming blocks.

What lives here: what storing and removing blocks does to runs, names and counts. What must not: queries (match), events
(events), run records (fold). There is one writer at a time; queries may run alongside it (see `begin_change`).

The shape follows the idea of `kv-index`, runs with coverage: a run is consecutive blocks of one chain held by one set
of ranks, and a column is one rank in one tier, a bit in the coverage of each run. Names are opaque and each rank has
its own, but the engines of one fleet mostly agree on them, and sequence hashes agree by definition. So one map holds
the first name of each block, and only ranks that use another name need entries of their own (aliases).
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels.entries import owned_tag
from streams.core.index.kernels.fields import (
    begin_change,
    column_word,
    covers,
    field,
    home_address,
    local_at,
    name_at,
    run_address,
    set_bit,
    set_cover,
    set_field,
    tag_of,
    test_bit,
    unset_cover,
)
from streams.core.index.kernels.layout import (
    AHEAD,
    AHEAD_MAX,
    ALIAS_BLOCKS,
    ALIAS_NAMES,
    ALIASES,
    ALIASES_MAX,
    BLOCKS_MAX,
    CHILDREN,
    COLUMN_ALIASES,
    COLUMN_FACTS,
    FULL_ALIASES,
    FULL_BLOCKS,
    FULL_SEGMENTS,
    LOCAL,
    MAP_ENTRIES,
    N_BLOCKS,
    N_FACTS,
    N_LOWER_FACTS,
    N_PHANTOMS,
    N_SEGMENTS,
    N_SPAN_CLASSES,
    N_TAKEN,
    NAME,
    NAMES,
    PHANTOM,
    PHANTOM_BITS,
    PHANTOM_FILTER_BITS,
    RUN_CAPACITY,
    RUN_CHILDREN,
    RUN_DIRECT,
    RUN_LENGTH,
    RUN_PARENT,
    RUN_SIBLING,
    RUN_START,
    SCRATCH,
    SCRATCH_OF_FOLD,
    SEGMENT_ENTRIES_MAX,
    SEGMENT_META,
    SEGMENT_SHIFT,
    SEGMENTS,
    SEGMENTS_MAX,
    SLACK_KEPT_MAX,
    SLACK_LEFT_SHIFT,
    SLACK_MAX,
    SLACK_MIN,
    SPAN_CLASSES,
    TIER_OF,
)
from streams.core.index.kernels.maps import ID_MASK, SLOT_MASK, delete_id, find_id, insert_id, split_segment
from streams.core.index.kernels.names import (
    add_alias,
    add_claim,
    column_block,
    find_alias_of_block,
    find_alias_of_name,
    find_held,
    find_name,
    remove_alias,
    synthetic_name,
)
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
from streams.core.index.kernels.shape import (
    defer,
    merge_down,
    merge_up,
    prefetch_names,
    remove_unheld,
    split_run,
    tidy,
    trim_spare,
)
from streams.core.index.kernels.spans import free_span, new_span, span_class
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import (
    copy_words,
    load,
    load32,
    prefetch,
    prefetch_write,
    shift_right,
    store,
    store32,
    trailing_zeros,
    unequal_8,
)
from streams.core.kernels.words import add, get, put

#: Blocks whose alias slots are prefetched together.
_NAMES_AHEAD = 16

# -- holding and not holding -----------------------------------------------------------------------------


@kernel()
def count_facts(context: int, column: int, n_blocks: int) -> None:
    """Count `n_blocks` more facts of a column, or fewer if negative."""
    address = column_word(context, COLUMN_FACTS, column)
    store(address, load(address) + n_blocks)
    add(context, N_FACTS, n_blocks)
    if load32(get(context, TIER_OF) + (column << 2)):
        add(context, N_LOWER_FACTS, n_blocks)


@kernel()
def cover(context: int, run: int, offset: int, n_blocks: int, column: int) -> tuple[int, int]:
    """Add a column to the holders of `n_blocks` blocks of a run, from `offset` on; it holds none of the run so far.

    Returns the run that the blocks are in now, and the offset after them.
    """
    begin_change(context)
    count_facts(context, column, n_blocks)
    if offset > 0:
        run = split_run(context, run, offset)[1]
    if n_blocks < field(context, run, RUN_LENGTH):
        run = split_run(context, run, n_blocks)[0]
    set_cover(context, run, column)
    run, before = merge_up(context, run)
    return merge_down(context, run), before + n_blocks


@kernel()
def uncover(context: int, run: int, offset: int, n_blocks: int, column: int) -> None:
    """Remove a column from the holders of `n_blocks` blocks of a run, from `offset` on; it holds the whole run so far.

    Runs that are left without holders and children are removed. The caller has removed the column's aliases of these
    blocks (see `remove_aliases`).
    """
    first = field(context, run, RUN_START) + offset
    begin_change(context)
    count_facts(context, column, -n_blocks)
    line = run_address(context, run)
    length = load32(line + RUN_LENGTH)
    at_end = offset > 0 and offset + n_blocks == length and load32(line + RUN_CHILDREN) == 0
    if at_end and only_holder(context, run, column):
        # The end of a run without children: the run gets shorter, and keeps some of the space for later blocks.
        store32(line + RUN_LENGTH, offset)
        spare = load32(line + RUN_CAPACITY) - offset
        if spare > SLACK_KEPT_MAX:
            store32(line + RUN_CAPACITY, offset + SLACK_MAX)
            defer(context, first, n_blocks, first + SLACK_MAX, spare - SLACK_MAX)
        else:
            defer(context, first, n_blocks, 0, 0)
        return
    if offset > 0:
        run = split_run(context, run, offset)[1]
    if n_blocks < field(context, run, RUN_LENGTH):
        run = split_run(context, run, n_blocks)[0]
    unset_cover(context, run, column)
    if field(context, run, RUN_CHILDREN) == 0 and has_no_holder(context, run):
        remove_unheld(context, run)
        return
    run, _ = merge_up(context, run)
    merge_down(context, run)


@kernel()
def remove_aliases(context: int, column: int, first: int, n_blocks: int) -> None:
    """Remove a column's aliases of blocks, before the change in which it stops holding them."""
    if load(column_word(context, COLUMN_ALIASES, column)):
        for index in range(n_blocks):
            if index % _NAMES_AHEAD == 0:
                for ahead in range(first + index, first + min(index + _NAMES_AHEAD, n_blocks)):
                    prefetch_write(home_address(context, ALIAS_BLOCKS, tag_of(context, column_block(column, ahead))))
            remove_alias(context, column, first + index)


@kernel()
def uncover_block(context: int, block: int, column: int) -> None:
    """Remove a column from the holders of one block, with its alias."""
    run = run_of(context, block)
    remove_aliases(context, column, block, 1)
    uncover(context, run, block - field(context, run, RUN_START), 1, column)
    tidy(context)


@kernel()
def give_name(context: int, column: int, block: int, name: int, held_before: bool) -> None:
    """Name a block in a column that holds it. A block that had this name in the column before is no longer held."""
    if held_before:
        entry = -1
        if load(column_word(context, COLUMN_ALIASES, column)):
            entry = find_alias_of_block(context, column, block)
        current = name_at(context, block)
        if entry >= 0:
            current = load(get(context, ALIASES) + (entry << 4))
        if current == name:
            return
        if entry >= 0:
            remove_alias(context, column, block)
    if name_at(context, block) != name:
        moved = find_held(context, column, name)
        if moved >= 0:
            uncover_block(context, moved, column)
        add_alias(context, column, name, block)
    else:
        # This is the block's shared name. Another block of this column may still have it as an alias.
        if load(column_word(context, COLUMN_ALIASES, column)):
            entry = find_alias_of_name(context, column, name)
            if entry >= 0:
                uncover_block(context, load(get(context, ALIASES) + (entry << 4) + 8) & ID_MASK, column)


@kernel()
def name_new_blocks(context: int, first: int, names: int, n_blocks: int, before: int, taken: int, n_taken: int) -> int:
    """Add the names of new blocks to NAMES; the arena NAME has them already.

    A name may be taken by another block. That is resolved once the blocks are in the tree (`link`); until then, such a
    block has a synthetic name, or none if the other one is a phantom. taken: address of a list of positions in the
    event, `n_taken` words of which are in use; before: position of the first of these blocks.
    Returns the new length of the list.
    """
    table = get(context, NAME)
    metas, segments = get(context, SEGMENT_META), get(context, SEGMENTS)
    ahead = context + (AHEAD << 3)
    done = 0
    while done < n_blocks:
        todo = min(AHEAD_MAX, n_blocks - done)
        prefetch_names(context, names + (done << 3), todo)
        index = 0
        while index < todo:
            tag, segment = load(ahead + (index << 4)), load(ahead + (index << 4) + 8)
            meta = metas + (((segment - segments) >> SEGMENT_SHIFT) << 3)
            entries = load32(meta)
            if entries >= SEGMENT_ENTRIES_MAX and split_segment(context, NAMES, tag):
                break  # the split may have moved the segments that were looked up ahead
            name = load(names + ((done + index) << 3))
            block = first + done + index
            position = tag & SLOT_MASK
            slot = load(segment + (position << 3))
            while slot != 0:
                if shift_right(slot, 32) == tag and load(table + (((slot & ID_MASK) - 1) << 3)) == name:
                    break
                position = (position + 1) & SLOT_MASK
                slot = load(segment + (position << 3))
            index += 1
            if slot == 0:
                store(segment + (position << 3), (tag << 32) | (block + 1))
                store32(meta, entries + 1)
                add(context, NAMES + MAP_ENTRIES, 1)
                continue
            store(taken + (n_taken << 3), before + done + index - 1)
            n_taken += 1
            phantoms = get(context, N_PHANTOMS)
            if phantoms == 0 or field(context, run_of(context, (slot & ID_MASK) - 1), RUN_CAPACITY) != PHANTOM:
                own = synthetic_name(context)
                store(table + (block << 3), own)
                insert_id(context, NAMES, tag_of(context, own), block)
            break
        done += index
    return n_taken


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
    return run, block - field(context, run, RUN_START) + 1


@kernel()
def prepare(
    context: int, run: int, at_end: bool, names: int, locals_: int, n_blocks: int, column: int, taken: int
) -> tuple[int, int, int, int]:
    """Write new blocks where no query reads yet, and add their names to NAMES.

    The blocks follow `run`. They go into its spare space if the column is its only holder and they begin at its end
    (`at_end`), and otherwise into a run of their own.
    Returns how many go into the run itself, the run of the others (0 for none), whether that is in the spare space, and
    how many names are taken by other blocks.
    """
    table, hashes = get(context, NAME), get(context, LOCAL)
    line = run_address(context, run)
    length, capacity = load32(line + RUN_LENGTH), load32(line + RUN_CAPACITY)
    first = load32(line + RUN_START) + length
    spare = 0
    if at_end and run != 0 and capacity != PHANTOM:
        spare = capacity - length
    own = 0
    n_taken = 0
    if spare > 0 and column >= 0 and only_holder(context, run, column):
        own = min(spare, n_blocks)
        spare -= own
        copy_words(hashes + (first << 3), locals_, own)
        copy_words(table + (first << 3), names, own)
        n_taken = name_new_blocks(context, first, names, own, 0, taken, 0)
    more = n_blocks - own
    if more == 0:
        return own, 0, 0, n_taken
    in_spare = 0
    if more <= spare:
        # The new run fits into the spare space, so the two can be joined once they have the same holders.
        in_spare, start, size = 1, first, spare
    else:
        left = get(context, BLOCKS_MAX) - get(context, N_BLOCKS)
        slack = min(max(more, SLACK_MIN), SLACK_MAX)
        if left < get(context, BLOCKS_MAX) >> SLACK_LEFT_SHIFT:
            slack = 0
        start, size = new_span(context, more, more + slack)
    copy_words(hashes + (start << 3), locals_ + (own << 3), more)
    copy_words(table + (start << 3), names + (own << 3), more)
    child = new_run(context)
    line = run_address(context, child)
    store32(line + RUN_START, start)
    store32(line + RUN_LENGTH, more)
    store32(line + RUN_CAPACITY, size)
    store32(line + RUN_DIRECT, -1)
    store32(line + RUN_CHILDREN, 0)
    store32(line + RUN_SIBLING, 0)
    clear_coverage(context, child)
    if column >= 0:
        set_cover(context, child, column)
    mark_start(context, child)
    n_taken = name_new_blocks(context, start, names + (own << 3), more, own, taken, n_taken)
    return own, child, in_spare, n_taken


@kernel()
def link(
    context: int, run: int, offset: int, own: int, child: int, in_spare: int, names: int, column: int, taken: int
) -> int:
    """Attach prepared blocks after `offset` blocks of a run, within a change; returns the id of the last new block.

    N_TAKEN of the names, listed in `taken`, belong to other blocks: to a phantom, which the new block replaces, or to a
    block that has the same name by coincidence.
    """
    length = field(context, run, RUN_LENGTH)
    if offset < length:
        run = split_run(context, run, offset)[0]
        length = offset
    first = field(context, run, RUN_START) + length
    last = first + own - 1
    if own:
        set_field(context, run, RUN_LENGTH, length + own)
    n_blocks = own
    start = 0
    if child:
        start, n_more = field(context, child, RUN_START), field(context, child, RUN_LENGTH)
        if in_spare:
            set_field(context, run, RUN_CAPACITY, length)
        elif run != 0 and field(context, run, RUN_CAPACITY) != PHANTOM:
            trim_spare(context, run)
        add_child(context, run, child)
        last = start + n_more - 1
        n_blocks += n_more
    if column >= 0:
        count_facts(context, column, n_blocks)
    for index in range(get(context, N_TAKEN)):
        at = load(taken + (index << 3))
        block = first + at if at < own else start + at - own
        name = load(names + (at << 3))
        other = find_name(context, name)
        if other >= 0 and other != block:
            holding = run_of(context, other)
            if field(context, holding, RUN_CAPACITY) == PHANTOM:
                replace_phantom(context, holding, block)
                continue
        if column >= 0:
            give_name(context, column, block, name, False)
    return last


@kernel()
def exceeded_limit(context: int, n_blocks: int, n_names: int) -> int:
    """Return the limit that an event with this many new blocks and names exceeds; 0 if it fits.

    The new blocks are in one span at most, which goes after all others or into a free span of a greater class; every
    such span is long enough.
    """
    if n_blocks and get(context, N_BLOCKS) + n_blocks + SLACK_MAX > get(context, BLOCKS_MAX):
        which = SPAN_CLASSES + span_class(n_blocks) + 1
        while which < SPAN_CLASSES + N_SPAN_CLASSES and get(context, which) == 0:
            which += 1
        if which >= SPAN_CLASSES + N_SPAN_CLASSES:
            return FULL_BLOCKS
    if get(context, N_SEGMENTS) + n_names // 1024 + 32 > get(context, SEGMENTS_MAX):
        return FULL_SEGMENTS
    if get(context, ALIAS_BLOCKS + MAP_ENTRIES) + n_names > get(context, ALIASES_MAX):
        return FULL_ALIASES
    return 0


@kernel()
def has_capacity(context: int, n_blocks: int) -> bool:
    """Whether this many blocks fit, in several spans."""
    return exceeded_limit(context, 2 * n_blocks + SLACK_MAX, n_blocks) == 0


@kernel()
def store_blocks(
    context: int, column: int, run: int, offset: int, names: int, locals_: int, n_blocks: int, claiming: bool
) -> int:
    """Store consecutive blocks for a column, the first after `offset` blocks of a run; run 0 is the root.

    This walks the existing blocks without changing anything, then writes new blocks where no query reads yet, and then
    makes the whole change at once, as briefly as possible. Aliases are written before the change, since queries do not
    read them: with aliases written within the change, a store of 131,072 blocks under other names blocked queries for
    395 ms.
    column: -1 to add the blocks without a holder. claiming: the blocks come from a run record, and those that the
    column holds already get a claim.
    Begins a change, which the caller ends. Returns 0, or the result of `exceeded_limit`, and has then changed nothing.
    """
    hashes, table = get(context, LOCAL), get(context, NAME)
    stretches = get(context, SCRATCH) + (SCRATCH_OF_FOLD << 3)
    n_stretches = 0
    naming = column >= 0 and not claiming
    agreed = not naming or load(column_word(context, COLUMN_ALIASES, column)) == 0
    at_end = False
    here, after, done = run, offset, 0
    before = -1
    if run != 0:
        before = field(context, run, RUN_START) + offset - 1
    while done < n_blocks:
        line = run_address(context, here)
        start, length = load32(line + RUN_START), load32(line + RUN_LENGTH)
        if after >= length:
            child = find_child(context, here, load(locals_ + (done << 3)))
            if child < 0:
                at_end = True
                break
            here, after = child, 0
            continue
        first = start + after
        limit = min(length - after, n_blocks - done)
        same = common_length(hashes + (first << 3), locals_ + (done << 3), limit)
        if same == 0:
            break
        if column >= 0:
            if naming and agreed:
                agreed = common_length(table + (first << 3), names + (done << 3), same) == same
            entry = stretches + n_stretches * 24
            store(entry, first)
            store(entry + 8, same)
            store(entry + 16, int(covers(context, here, column)))
            n_stretches += 1
        before = first + same - 1
        after += same
        done += same
    if get(context, N_PHANTOMS) and first_phantom(context, names + (done << 3), n_blocks - done) < n_blocks - done:
        store_in_steps(context, column, run, offset, names, locals_, n_blocks)
        return 0
    new = n_blocks - done
    if naming:  # for records, the caller has checked
        lacking = exceeded_limit(context, new, n_blocks)
        if lacking:
            return lacking
    taken = stretches + n_stretches * 24
    own, child, in_spare, n_taken = 0, 0, 0, 0
    if new:
        own, child, in_spare, n_taken = prepare(
            context, here, at_end, names + (done << 3), locals_ + (done << 3), new, column, taken
        )
    lost, n_lost = taken + (n_taken << 3), 0
    if naming and (n_taken or not agreed):
        n_lost = give_names(context, column, names, stretches, n_stretches, here, own, child, lost)
        n_taken = 0
    if new:
        begin_change(context)
    for index in range(n_stretches):
        entry = stretches + index * 24
        first, same = load(entry), load(entry + 8)
        if load(entry + 16) == 0:
            here = run_of(context, first)
            cover(context, here, first - field(context, here, RUN_START), same, column)
        elif claiming:
            for block in range(first, first + same):
                add_claim(context, column, block)
    if new:
        here, after = 0, 0
        if before >= 0:
            here, after = end_of(context, before)
        put(context, N_TAKEN, n_taken)
        link(context, here, after, own, child, in_spare, names + (done << 3), column, taken)
    if n_lost:
        uncover_listed(context, column, lost, n_lost)
    return 0


@kernel()
def store_in_steps(context: int, column: int, run: int, offset: int, names: int, locals_: int, n_blocks: int) -> None:
    """Store the blocks of a record like `store_blocks`, but stretch by stretch within the change.

    This is needed if new blocks replace phantoms.
    """
    begin_change(context)
    hashes = get(context, LOCAL)
    taken = get(context, SCRATCH) + (SCRATCH_OF_FOLD << 3)
    done = 0
    while done < n_blocks:
        line = run_address(context, run)
        start, length = load32(line + RUN_START), load32(line + RUN_LENGTH)
        same = 0
        if offset >= length:
            child = find_child(context, run, load(locals_ + (done << 3)))
            if child >= 0:
                run, offset = child, 0
                continue
        else:
            limit = min(length - offset, n_blocks - done)
            same = common_length(hashes + ((start + offset) << 3), locals_ + (done << 3), limit)
        if same == 0:
            todo = n_blocks - done
            if get(context, N_PHANTOMS):
                todo = min(todo, first_phantom(context, names + (done << 3), todo) + 1)
            at = done << 3
            own, child, in_spare, n_taken = prepare(
                context, run, offset >= length, names + at, locals_ + at, todo, column, taken
            )
            put(context, N_TAKEN, n_taken)
            last = link(context, run, offset, own, child, in_spare, names + at, column, taken)
            done += todo
            if done < n_blocks:
                run, offset = end_of(context, last)
            continue
        if column < 0:
            offset += same
        elif covers(context, run, column):
            for block in range(start + offset, start + offset + same):
                add_claim(context, column, block)
            offset += same
        else:
            run, offset = cover(context, run, offset, same, column)
        done += same


# -- a rank's own names ----------------------------------------------------------------------------------


@kernel()
def mark_nameless(context: int, column: int, block: int, lost: int, n_lost: int) -> int:
    """Mark a block that loses its name in a column to another block, and add it to the list `lost`.

    The mark is a synthetic alias. If the same event names the block again later, that name replaces the mark. Blocks
    that still have their mark at the end of the event are no longer held. Returns the length of the list.
    """
    mark = synthetic_name(context)
    while find_alias_of_name(context, column, mark) >= 0:
        mark = synthetic_name(context)
    remove_alias(context, column, block)
    add_alias(context, column, mark, block)
    store(lost + (n_lost << 4), block)
    store(lost + (n_lost << 4) + 8, mark)
    return n_lost + 1


@kernel()
def name_stretch(
    context: int, column: int, first: int, names: int, n_blocks: int, held: bool, lost: int, n_lost: int
) -> tuple[int, int]:
    """Name blocks in a column that holds them or is about to; queries do not read any of this.

    held: whether the column may have aliases for them. lost: address of a list with two words per entry: blocks that
    lost their name to another block, and their marks. Returns the length of the list and the number of new aliases.
    """
    table = get(context, NAME) + (first << 3)
    entries = get(context, ALIASES)
    count = column_word(context, COLUMN_ALIASES, column)
    n_aliased = 0
    for index in range(n_blocks):
        if index % _NAMES_AHEAD == 0:
            for ahead in range(index, min(index + _NAMES_AHEAD, n_blocks)):
                name = load(names + (ahead << 3))
                if load(table + (ahead << 3)) != name:
                    prefetch_write(home_address(context, ALIAS_NAMES, owned_tag(context, column, name)))
                    prefetch(home_address(context, NAMES, tag_of(context, name)))
                    key = column_block(column, first + ahead)
                    prefetch_write(home_address(context, ALIAS_BLOCKS, tag_of(context, key)))
        block, name = first + index, load(names + (index << 3))
        is_first = load(table + (index << 3)) == name
        aliases = load(count)
        entry = -1
        if aliases:
            entry = find_alias_of_name(context, column, name)
        if entry >= 0:
            other = load(entries + (entry << 4) + 8) & ID_MASK
            if other == block:
                continue
            n_lost = mark_nameless(context, column, other, lost, n_lost)
        elif not is_first:
            other = find_name(context, name)
            if (
                other >= 0
                and covers(context, run_of(context, other), column)
                and (aliases == 0 or find_alias_of_block(context, column, other) < 0)
            ):
                n_lost = mark_nameless(context, column, other, lost, n_lost)
        if held and load(count):
            remove_alias(context, column, block)
        if not is_first:
            add_alias(context, column, name, block)
            n_aliased += 1
    return n_lost, n_aliased


@kernel()
def mark_nameless_firsts(
    context: int, column: int, first: int, names: int, n_blocks: int, lost: int, n_lost: int
) -> int:
    """Mark the blocks whose shared name became the alias of a later block of the same event.

    `name_stretch` could not detect this, because the column did not hold these blocks yet.
    """
    table = get(context, NAME) + (first << 3)
    for index in range(n_blocks):
        name = load(names + (index << 3))
        if (
            load(table + (index << 3)) == name
            and find_alias_of_name(context, column, name) >= 0
            and find_alias_of_block(context, column, first + index) < 0
        ):
            n_lost = mark_nameless(context, column, first + index, lost, n_lost)
    return n_lost


@kernel()
def give_names(
    context: int, column: int, names: int, stretches: int, n_stretches: int, here: int, own: int, child: int, lost: int
) -> int:
    """Name the blocks of an event in a column: existing ones, listed as stretches, then the new ones.

    Of the new ones, `own` are after the end of run `here`, and the others in the run `child`. This changes only names,
    so queries continue. Returns the number of blocks that lost their name to another block; they are listed from `lost`
    on, one word each, and the caller uncovers them.
    """
    n_lost, n_aliased = 0, 0
    for again in range(2):
        at = names
        for index in range(n_stretches + 2):
            held = True
            if index < n_stretches:
                entry = stretches + index * 24
                first, n_blocks, held = load(entry), load(entry + 8), load(entry + 16) != 0
            elif index == n_stretches:
                first, n_blocks = 0, own
                if own:
                    first = field(context, here, RUN_START) + field(context, here, RUN_LENGTH)
            else:
                first, n_blocks = 0, 0
                if child:
                    first, n_blocks = field(context, child, RUN_START), field(context, child, RUN_LENGTH)
            if again:
                n_lost = mark_nameless_firsts(context, column, first, at, n_blocks, lost, n_lost)
            else:
                n_lost, n_more = name_stretch(context, column, first, at, n_blocks, held, lost, n_lost)
                n_aliased += n_more
            at += n_blocks << 3
        if n_aliased == 0:
            break
    # A block that lost its name and got no other one in this event still has its mark.
    entries = get(context, ALIASES)
    n_left = 0
    for index in range(n_lost):
        block, mark = load(lost + (index << 4)), load(lost + (index << 4) + 8)
        entry = find_alias_of_block(context, column, block)
        if entry >= 0 and load(entries + (entry << 4)) == mark:
            remove_alias(context, column, block)
            store(lost + (n_left << 3), block)
            n_left += 1
    return n_left


@kernel()
def uncover_listed(context: int, column: int, blocks: int, n_blocks: int) -> None:
    """Remove a column from the holders of the listed blocks, within a change; unused names are removed after it."""
    index = 0
    while index < n_blocks:
        first = load(blocks + (index << 3))
        run = run_of(context, first)
        start = field(context, run, RUN_START)
        limit = min(n_blocks - index, start + field(context, run, RUN_LENGTH) - first)
        same = 1
        while same < limit and load(blocks + ((index + same) << 3)) == first + same:
            same += 1
        uncover(context, run, first - start, same, column)
        index += same


# -- phantoms: placeholders for parents whose records have not been read yet -----------------------------


@kernel()
def first_phantom(context: int, names: int, n_blocks: int) -> int:
    """Index of the first of these new blocks that replaces a phantom; `n_blocks` if none does."""
    filter_bits = get(context, PHANTOM_BITS)
    for index in range(n_blocks):
        name = load(names + (index << 3))
        if test_bit(filter_bits, tag_of(context, name) & (PHANTOM_FILTER_BITS - 1)):
            block = find_name(context, name)
            if block >= 0 and field(context, run_of(context, block), RUN_CAPACITY) == PHANTOM:
                return index
    return n_blocks


@kernel()
def new_phantom(context: int, name: int) -> int:
    """Add a placeholder for a block of which only the name is known; returns its run."""
    start, size = new_span(context, 1, 1)
    free_span(context, start + 1, size - 1)
    store(get(context, LOCAL) + (start << 3), 0)
    store(get(context, NAME) + (start << 3), name)
    run = new_run(context)
    line = run_address(context, run)
    store32(line + RUN_START, start)
    store32(line + RUN_LENGTH, 1)
    store32(line + RUN_CAPACITY, PHANTOM)
    store32(line + RUN_PARENT, -1)
    store32(line + RUN_DIRECT, -1)
    store32(line + RUN_CHILDREN, 0)
    store32(line + RUN_SIBLING, 0)
    clear_coverage(context, run)
    mark_start(context, run)
    insert_id(context, NAMES, tag_of(context, name), start)
    filter_bits = get(context, PHANTOM_BITS)
    if get(context, N_PHANTOMS) == 0:
        for word in range(PHANTOM_FILTER_BITS >> 6):
            store(filter_bits + (word << 3), 0)
    set_bit(filter_bits, tag_of(context, name) & (PHANTOM_FILTER_BITS - 1))
    add(context, N_PHANTOMS, 1)
    return run


@kernel()
def replace_phantom(context: int, phantom: int, block: int) -> None:
    """Replace a phantom by a new block, the last of its run, within a change: the phantom's children move to it."""
    start = field(context, phantom, RUN_START)
    tag = tag_of(context, name_at(context, start))
    store(find_id(context, NAMES, tag, start), (tag << 32) | (block + 1))
    run = run_of(context, block)
    trim_spare(context, run)
    direct = field(context, phantom, RUN_DIRECT)
    waiting = field(context, phantom, RUN_SIBLING)
    while waiting:
        child = waiting - 1
        waiting = field(context, child, RUN_SIBLING)
        set_field(context, child, RUN_SIBLING, 0)
        if child != direct:
            delete_id(
                context,
                CHILDREN,
                child_tag(context, phantom, local_at(context, field(context, child, RUN_START))),
                child,
            )
        add_child(context, run, child)
    unmark_start(context, phantom)
    free_run(context, phantom)
    free_span(context, start, 1)
    add(context, N_PHANTOMS, -1)

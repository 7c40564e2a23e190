"""The run tree: holding and naming blocks.

What lives here: what storing and removing blocks does to runs, names and counts. What must not: queries (match), events
(events), run records (fold). One writer at a time; queries may run beside it (see `begin_change`).

Shape, from `kv-index`'s idea of runs with coverage: a run is consecutive blocks of one chain held by one set of ranks.
A column is one rank in one tier, a bit in every run's coverage. Names are opaque and a rank's own, but engines of one
fleet mostly agree on them, and of sequence hashes they do so by definition: so one map knows the first name of each
block, and only a rank that calls a block otherwise has entries of its own (aliases).
"""

from __future__ import annotations

from numba import njit

from streams.core.kernels.compiling import kernel
from streams.core.kernels.fields import (
    add,
    begin_change,
    column_word,
    covers,
    end_change,
    field,
    get,
    local_at,
    name_at,
    run_address,
    set_cover,
    set_field,
    tag_of,
    unset_cover,
)
from streams.core.kernels.layout import (
    AHEAD,
    AHEAD_MAX,
    ALIASES,
    CHILDREN,
    COLUMN_ALIASES,
    COLUMN_FACTS,
    LOCAL,
    MAP_ENTRIES,
    N_FACTS,
    N_LOWER_FACTS,
    N_PHANTOMS,
    NAME,
    NAMES,
    PHANTOM,
    RUN_CAPACITY,
    RUN_CHILDREN,
    RUN_DIRECT,
    RUN_LENGTH,
    RUN_PARENT,
    RUN_SIBLING,
    RUN_START,
    SEGMENT_ENTRIES_MAX,
    SEGMENT_META,
    SEGMENT_SHIFT,
    SEGMENTS,
    SLACK_KEPT_MAX,
    SLACK_MAX,
    SLACK_MIN,
    TIER_OF,
)
from streams.core.kernels.maps import ID_MASK, SLOT_MASK, delete_id, find_id, insert_id, make_room
from streams.core.kernels.memory import (
    copy_words,
    load,
    load32,
    prefetch,
    shift_right,
    store,
    store32,
    trailing_zeros,
    unequal_8,
)
from streams.core.kernels.names import (
    add_alias,
    add_claim,
    find_alias_of_block,
    find_alias_of_name,
    find_held,
    find_name,
    remove_alias,
    synthetic_name,
)
from streams.core.kernels.runs import (
    add_child,
    child_tag,
    clear_coverage,
    find_child,
    free_run,
    new_run,
    nobody_holds,
    only_holder,
    place_start,
    run_of,
    unplace_start,
)
from streams.core.kernels.shape import (
    defer,
    look_ahead,
    merge_down,
    merge_up,
    remove_ghosts,
    settle,
    split_run,
    trim_spare,
)
from streams.core.kernels.spans import free_span, new_span

# -- holding and not holding -----------------------------------------------------------------------------


@kernel()
def count_facts(context: int, column: int, n_blocks: int) -> None:
    """A column holds this many more blocks, or fewer."""
    address = column_word(context, COLUMN_FACTS, column)
    store(address, load(address) + n_blocks)
    add(context, N_FACTS, n_blocks)
    if load32(get(context, TIER_OF) + (column << 2)):
        add(context, N_LOWER_FACTS, n_blocks)


@kernel()
def cover(context: int, run: int, offset: int, n_blocks: int, column: int) -> tuple[int, int]:
    """A column that does not hold a run holds `n_blocks` of it from `offset` on; gives the run in which they are now,
    and the offset behind them."""
    count_facts(context, column, n_blocks)
    begin_change(context)
    if offset > 0:
        run = split_run(context, run, offset)[1]
    if n_blocks < field(context, run, RUN_LENGTH):
        run = split_run(context, run, n_blocks)[0]
    set_cover(context, run, column)
    run, before = merge_up(context, run)
    return merge_down(context, run), before + n_blocks


@kernel()
def uncover(context: int, run: int, offset: int, n_blocks: int, column: int) -> None:
    """A column that holds a run holds `n_blocks` of it, from `offset` on, no more. What nobody holds and nothing hangs
    from goes."""
    first = field(context, run, RUN_START) + offset
    if load(column_word(context, COLUMN_ALIASES, column)):
        for block in range(first, first + n_blocks):
            remove_alias(context, column, block)
    count_facts(context, column, -n_blocks)
    begin_change(context)
    line = run_address(context, run)
    length = load32(line + RUN_LENGTH)
    at_end = offset > 0 and offset + n_blocks == length and load32(line + RUN_CHILDREN) == 0
    if at_end and only_holder(context, run, column):
        # The end of a run that nothing hangs from: it gets shorter, and keeps the room for a while.
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
    if field(context, run, RUN_CHILDREN) == 0 and nobody_holds(context, run):
        remove_ghosts(context, run)
        return
    run, _ = merge_up(context, run)
    merge_down(context, run)


@kernel()
def uncover_block(context: int, block: int, column: int) -> None:
    """A column holds a block no more, which it held."""
    run = run_of(context, block)
    uncover(context, run, block - field(context, run, RUN_START), 1, column)
    settle(context)


@kernel()
def give_name(context: int, column: int, block: int, name: int, held_before: bool) -> None:
    """A column that holds a block calls it by this name now; what it called so before, it holds no more."""
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
        # The block's first name: another block of this column may still go by it as an alias.
        if load(column_word(context, COLUMN_ALIASES, column)):
            entry = find_alias_of_name(context, column, name)
            if entry >= 0:
                uncover_block(context, load(get(context, ALIASES) + (entry << 4) + 8) & ID_MASK, column)


@kernel()
def name_new_blocks(context: int, column: int, first: int, names: int, n_blocks: int) -> None:
    """Make new blocks known by their names; NAME has them already."""
    table = get(context, NAME)
    metas, segments = get(context, SEGMENT_META), get(context, SEGMENTS)
    aliases = column >= 0 and load(column_word(context, COLUMN_ALIASES, column)) != 0
    ahead = context + (AHEAD << 3)
    done = 0
    while done < n_blocks:
        todo = min(AHEAD_MAX, n_blocks - done)
        look_ahead(context, names + (done << 3), todo)
        index = 0
        while index < todo:
            tag, segment = load(ahead + (index << 4)), load(ahead + (index << 4) + 8)
            meta = metas + (((segment - segments) >> SEGMENT_SHIFT) << 3)
            entries = load32(meta)
            if entries >= SEGMENT_ENTRIES_MAX:
                if make_room(context, NAMES, tag):
                    break  # what was looked up ahead may lie elsewhere now
                index += 1
                continue
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
                if aliases:
                    give_name(context, column, block, name, False)
                    break
            else:
                name_taken(context, column, block, name, (slot & ID_MASK) - 1)
                aliases = column >= 0 and load(column_word(context, COLUMN_ALIASES, column)) != 0
                break
        done += index


@kernel()
def name_taken(context: int, column: int, block: int, name: int, other: int) -> None:
    """A new block's name is another's: a phantom that waited for it, or a block that this rank means or others do."""
    run = run_of(context, other)
    if field(context, run, RUN_CAPACITY) == PHANTOM:
        replace_phantom(context, run, block)
        return
    own = synthetic_name(context)
    store(get(context, NAME) + (block << 3), own)
    insert_id(context, NAMES, tag_of(own), block)
    if column >= 0:
        give_name(context, column, block, name, False)


# -- storing ---------------------------------------------------------------------------------------------


#: How far ahead a long compare asks for its lines: a processor's own prefetcher stops at the end of each page.
_COMPARE_AHEAD_BYTES = 1024


@njit(inline="always")
def common_length(left: int, right: int, limit: int) -> int:
    """How many int64 at two addresses are equal, up to a limit."""
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
    """Run in which a block lies, and the offset behind it."""
    run = run_of(context, block)
    return run, block - field(context, run, RUN_START) + 1


@kernel()
def append(context: int, run: int, names: int, locals_: int, n_blocks: int, column: int) -> int:
    """Put new blocks behind the end of a run, which none of its children continues; gives the last one's id.

    column: who holds them; -1 for nobody, where something is to hang from them at once.
    """
    table, hashes = get(context, NAME), get(context, LOCAL)
    if column >= 0:
        count_facts(context, column, n_blocks)
    line = run_address(context, run)
    length, capacity = load32(line + RUN_LENGTH), load32(line + RUN_CAPACITY)
    first = load32(line + RUN_START) + length
    spare = 0
    if run != 0 and capacity != PHANTOM:
        spare = capacity - length
    done = 0
    if spare > 0 and column >= 0 and only_holder(context, run, column):
        done = min(spare, n_blocks)
        copy_words(hashes + (first << 3), locals_, done)
        copy_words(table + (first << 3), names, done)
        begin_change(context)
        store32(line + RUN_LENGTH, length + done)
        spare -= done
    more = n_blocks - done
    start = first
    if more > 0:
        begin_change(context)
        if more <= spare:
            # It fits behind the run itself: they are one again once the same ranks hold both.
            room = spare
            store32(line + RUN_CAPACITY, length)
        else:
            if spare > 0:
                trim_spare(context, run)
            start, room = new_span(context, more, more + min(max(more, SLACK_MIN), SLACK_MAX))
        copy_words(hashes + (start << 3), locals_ + (done << 3), more)
        copy_words(table + (start << 3), names + (done << 3), more)
        child = new_run(context)
        line = run_address(context, child)
        store32(line + RUN_START, start)
        store32(line + RUN_LENGTH, more)
        store32(line + RUN_CAPACITY, room)
        store32(line + RUN_DIRECT, -1)
        store32(line + RUN_CHILDREN, 0)
        store32(line + RUN_SIBLING, 0)
        clear_coverage(context, child)
        if column >= 0:
            set_cover(context, child, column)
        place_start(context, child)
        add_child(context, run, child)
    end_change(context)
    if done:
        name_new_blocks(context, column, first, names, done)
    if more > 0:
        name_new_blocks(context, column, start, names + (done << 3), more)
        return start + more - 1
    return first + done - 1


@kernel()
def store_blocks(
    context: int, column: int, run: int, offset: int, names: int, locals_: int, n_blocks: int, claiming: bool
) -> None:
    """A column holds consecutive blocks, the first behind `offset` blocks of a run; the root is run 0.

    column: -1 to have the blocks there and held by nobody. claiming: a record says so, and one that says it of a block
    that another record holds already is counted.
    """
    hashes, table = get(context, LOCAL), get(context, NAME)
    done = 0
    while done < n_blocks:
        line = run_address(context, run)
        start, length = load32(line + RUN_START), load32(line + RUN_LENGTH)
        if offset >= length:
            child = find_child(context, run, load(locals_ + (done << 3)))
            if child >= 0:
                run, offset = child, 0
                continue
            todo = n_blocks - done
            if get(context, N_PHANTOMS):
                todo = blocks_to_phantom(context, names + (done << 3), todo)
            last = append(context, run, names + (done << 3), locals_ + (done << 3), todo, column)
            done += todo
            if done < n_blocks:
                run, offset = end_of(context, last)
            continue
        first = start + offset
        limit = min(length - offset, n_blocks - done)
        same = common_length(hashes + (first << 3), locals_ + (done << 3), limit)
        if same == 0:
            begin_change(context)
            run = split_run(context, run, offset)[0]
            end_change(context)
            continue
        if column < 0:
            offset += same
            done += same
            continue
        held = covers(context, run, column)
        if held and claiming:
            for block in range(first, first + same):
                add_claim(context, column, block)
        agree = 0
        if load(column_word(context, COLUMN_ALIASES, column)) == 0:
            agree = common_length(table + (first << 3), names + (done << 3), same)
        if claiming:
            agree = same  # records name blocks by their sequence hashes, which all ranks share
        if agree == 0:
            # A name of its own: block by block, since a name that moves may take a later block of this very event.
            if not held:
                cover(context, run, offset, 1, column)
                end_change(context)
            give_name(context, column, first, load(names + (done << 3)), held)
            done += 1
            run, offset = end_of(context, first)
            continue
        if held:
            offset += agree
        else:
            run, offset = cover(context, run, offset, agree, column)
            end_change(context)
        done += agree


# -- phantoms: placeholders of parents that records name before they are known ---------------------------


@kernel()
def blocks_to_phantom(context: int, names: int, n_blocks: int) -> int:
    """How many of these new blocks to append before one takes a phantom's place, that one included."""
    done = 0
    while done < n_blocks:
        todo = min(AHEAD_MAX, n_blocks - done)
        look_ahead(context, names + (done << 3), todo)
        for index in range(done, done + todo):
            block = find_name(context, load(names + (index << 3)))
            if block >= 0 and field(context, run_of(context, block), RUN_CAPACITY) == PHANTOM:
                return index + 1
        done += todo
    return n_blocks


@kernel()
def new_phantom(context: int, name: int) -> int:
    """Placeholder for a block of which only the name is known; gives its run."""
    start, room = new_span(context, 1, 1)
    free_span(context, start + 1, room - 1)
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
    place_start(context, run)
    insert_id(context, NAMES, tag_of(name), start)
    add(context, N_PHANTOMS, 1)
    return run


@kernel()
def replace_phantom(context: int, phantom: int, block: int) -> None:
    """A new block, the last of its run, takes a phantom's place: what waited below that hangs from it."""
    begin_change(context)
    start = field(context, phantom, RUN_START)
    tag = tag_of(name_at(context, start))
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
            delete_id(context, CHILDREN, child_tag(phantom, local_at(context, field(context, child, RUN_START))), child)
        add_child(context, run, child)
    unplace_start(context, phantom)
    free_run(context, phantom)
    free_span(context, start, 1)
    add(context, N_PHANTOMS, -1)
    end_change(context)

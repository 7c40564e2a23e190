"""Blocks by sequence hash: the map BY_SEQUENCE, and the arena SEQUENCE that has its keys.

What lives here: finding, adding and removing blocks in the map, many of them at a time. What must not: runs' shape, and
who holds a block.

A hash has one block in the map. Two different blocks can only have the same hash if somebody has searched for such a
pair. The second one then gets a substitute that no other block has, so that the map stays one to one: queries, which
compare local hashes, still find it, and only records that name it as their parent attach to the first one.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.fields import field, home_address, segment_of, sequence_at, tag_of
from streams.core.index.kernels.maps import ID_MASK, SLOT_MASK, insert_id, split_segment
from streams.core.index.kernels.runs import run_of
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, load32, prefetch, prefetch_write, shift_right, store, store32
from streams.core.kernels.words import SYNTHETIC_STEP, add, get


@kernel()
def find_block(context: int, sequence: int) -> int:
    """Find the block with a sequence hash, whichever ranks hold it; returns -1 if there is none."""
    tag = tag_of(context, sequence)
    segment = segment_of(context, layout.BY_SEQUENCE, tag)
    hashes = get(context, layout.SEQUENCE)
    position = tag & SLOT_MASK
    while True:
        slot = load(segment + (position << 3))
        if slot == 0:
            return -1
        if shift_right(slot, 32) == tag:
            block = (slot & ID_MASK) - 1
            if load(hashes + (block << 3)) == sequence:
                return block
        position = (position + 1) & SLOT_MASK


@njit(inline="always")
def is_phantom(context: int, block: int) -> bool:
    """Whether a block is a placeholder."""
    return field(context, run_of(context, block), layout.RUN_CAPACITY) == layout.PHANTOM


@kernel()
def substitute_hash(context: int) -> int:
    """Make up a hash that no block has, for a block whose own hash is taken."""
    while True:
        add(context, layout.SUBSTITUTES, 1)
        made = (
            tag_of(context, get(context, layout.SUBSTITUTES))
            | (get(context, layout.SUBSTITUTES) * SYNTHETIC_STEP) << 32
        )
        if find_block(context, made) < 0:
            return made


@njit(inline="always")
def prefetch_slots(context: int, hashes: int, n_blocks: int) -> None:
    """Write the tags and segments of some hashes to AHEAD, and prefetch their slots so that cache misses overlap."""
    ahead = context + (layout.AHEAD << 3)
    directory = get(context, layout.BY_SEQUENCE + layout.MAP_DIRECTORY)
    shift = 32 - get(context, layout.BY_SEQUENCE + layout.MAP_DEPTH)
    segments = get(context, layout.SEGMENTS)
    for index in range(n_blocks):
        tag = tag_of(context, load(hashes + (index << 3)))
        segment = segments + (load32(directory + (shift_right(tag, shift) << 2)) << layout.SEGMENT_SHIFT)
        prefetch_write(segment + ((tag & SLOT_MASK) << 3))
        store(ahead + (index << 4), tag)
        store(ahead + (index << 4) + 8, segment)


@njit(inline="always")
def prefetch_block(context: int, sequence: int) -> None:
    """Prefetch what a hash leads to, once its slot is in the cache: its block's hash, and the start of its run."""
    tag = tag_of(context, sequence)
    slot = load(home_address(context, layout.BY_SEQUENCE, tag))
    if slot != 0 and shift_right(slot, 32) == tag:
        block = (slot & ID_MASK) - 1
        prefetch(get(context, layout.SEQUENCE) + (block << 3))
        prefetch(get(context, layout.STARTS) + ((block >> 6) << 3))
        prefetch(get(context, layout.GRANULES) + ((block >> 4) << 2))


@kernel()
def add_blocks(context: int, first: int, n_blocks: int, position: int, clashes: int, n_clashes: int) -> int:
    """Add new blocks, whose hashes are in SEQUENCE already, to the map.

    A hash may have another block: a phantom, which the new block replaces once it is in the tree (`tree.link`), or a
    block with an equal hash. clashes: address of a list of the positions of such blocks among all new ones, `n_clashes`
    words of which are in use; position: that of the first of these blocks.
    Returns the new length of the list.
    """
    hashes = get(context, layout.SEQUENCE)
    metas, segments = get(context, layout.SEGMENT_META), get(context, layout.SEGMENTS)
    ahead = context + (layout.AHEAD << 3)
    done = 0
    while done < n_blocks:
        todo = min(layout.AHEAD_MAX, n_blocks - done)
        prefetch_slots(context, hashes + ((first + done) << 3), todo)
        index = 0
        while index < todo:
            tag, segment = load(ahead + (index << 4)), load(ahead + (index << 4) + 8)
            meta = metas + (((segment - segments) >> layout.SEGMENT_SHIFT) << 3)
            entries = load32(meta)
            if entries >= layout.SEGMENT_ENTRIES_MAX and split_segment(context, layout.BY_SEQUENCE, tag):
                break  # the split may have moved the segments that were looked up ahead
            block = first + done + index
            sequence = sequence_at(context, block)
            slot_at = tag & SLOT_MASK
            slot = load(segment + (slot_at << 3))
            while slot != 0:
                if shift_right(slot, 32) == tag and sequence_at(context, (slot & ID_MASK) - 1) == sequence:
                    break
                slot_at = (slot_at + 1) & SLOT_MASK
                slot = load(segment + (slot_at << 3))
            index += 1
            if slot == 0:
                store(segment + (slot_at << 3), (tag << 32) | (block + 1))
                store32(meta, entries + 1)
                add(context, layout.BY_SEQUENCE + layout.MAP_ENTRIES, 1)
                continue
            if get(context, layout.N_PHANTOMS) != 0 and is_phantom(context, (slot & ID_MASK) - 1):
                store(clashes + (n_clashes << 3), position + done + index - 1)
                n_clashes += 1
            else:
                substitute = substitute_hash(context)
                store(hashes + (block << 3), substitute)
                insert_id(context, layout.BY_SEQUENCE, tag_of(context, substitute), block)
            break
        done += index
    return n_clashes


@kernel()
def remove_blocks(context: int, first: int, n_blocks: int) -> None:
    """Remove blocks from the map."""
    hashes = get(context, layout.SEQUENCE) + (first << 3)
    ahead = context + (layout.AHEAD << 3)
    metas, segments = get(context, layout.SEGMENT_META), get(context, layout.SEGMENTS)
    done = 0
    while done < n_blocks:
        todo = min(layout.AHEAD_MAX, n_blocks - done)
        prefetch_slots(context, hashes + (done << 3), todo)
        for index in range(todo):
            tag, segment = load(ahead + (index << 4)), load(ahead + (index << 4) + 8)
            wanted = (tag << 32) | (first + done + index + 1)
            gap = tag & SLOT_MASK
            while load(segment + (gap << 3)) != wanted:
                gap = (gap + 1) & SLOT_MASK
            # Later entries of the cluster move up, unless the gap is before their home slot.
            position = (gap + 1) & SLOT_MASK
            slot = load(segment + (position << 3))
            while slot != 0:
                home = shift_right(slot, 32) & SLOT_MASK
                if ((position - home) & SLOT_MASK) >= ((position - gap) & SLOT_MASK):
                    store(segment + (gap << 3), slot)
                    gap = position
                position = (position + 1) & SLOT_MASK
                slot = load(segment + (position << 3))
            store(segment + (gap << 3), 0)
            meta = metas + (((segment - segments) >> layout.SEGMENT_SHIFT) << 3)
            store32(meta, load32(meta) - 1)
        done += todo
    add(context, layout.BY_SEQUENCE + layout.MAP_ENTRIES, -n_blocks)

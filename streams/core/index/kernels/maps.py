"""Hash maps of 8-byte slots in segments: a slot has 32 bits of hash (the tag) and 32 bits of id.

What lives here: finding, inserting, deleting and splitting by (tag, id). The key itself is stored where the id points,
and the caller compares it. What must not: runs and blocks.

A directory indexed by the tag's upper bits gives the segment. The lower 13 bits are the home slot in it, so a split
moves entries without hashing them again. Maps use linear probing within the segment and backward-shift deletion,
without tombstones.
"""

from __future__ import annotations

from streams.core.index.kernels import layout
from streams.core.index.kernels.fields import begin_change, end_change, segment_of
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, load32, shift_right, store, store32

SLOT_MASK = layout.SEGMENT_SLOTS - 1
ID_MASK = (1 << 32) - 1


@kernel()
def find_id(context: int, which: int, tag: int, number: int) -> int:
    """Address of the slot with this tag and id; 0 if there is none."""
    segment = segment_of(context, which, tag)
    wanted = (tag << 32) | (number + 1)
    position = tag & SLOT_MASK
    while True:
        address = segment + (position << 3)
        slot = load(address)
        if slot == wanted:
            return address
        if slot == 0:
            return 0
        position = (position + 1) & SLOT_MASK


@kernel()
def delete_slot(context: int, which: int, address: int) -> None:
    """Delete the entry at an address, and move later entries of its cluster up."""
    segments = load(context + (layout.SEGMENTS << 3))
    number = (address - segments) >> layout.SEGMENT_SHIFT
    segment = segments + (number << layout.SEGMENT_SHIFT)
    gap = (address - segment) >> 3
    position = gap
    while True:
        position = (position + 1) & SLOT_MASK
        slot = load(segment + (position << 3))
        if slot == 0:
            break
        home = shift_right(slot, 32) & SLOT_MASK
        if ((position - home) & SLOT_MASK) >= ((position - gap) & SLOT_MASK):
            store(segment + (gap << 3), slot)
            gap = position
    store(segment + (gap << 3), 0)
    meta = load(context + (layout.SEGMENT_META << 3)) + (number << 3)
    store32(meta, load32(meta) - 1)
    entries = context + ((which + layout.MAP_ENTRIES) << 3)
    store(entries, load(entries) - 1)


@kernel()
def delete_id(context: int, which: int, tag: int, number: int) -> bool:
    """Delete the entry with this tag and id; returns whether there was one."""
    address = find_id(context, which, tag, number)
    if address == 0:
        return False
    delete_slot(context, which, address)
    return True


@kernel()
def new_segment(context: int, depth: int) -> int:
    """Take an empty segment; returns its number, or -1 if the arena is full."""
    segments = load(context + (layout.SEGMENTS << 3))
    meta = load(context + (layout.SEGMENT_META << 3))
    number = load(context + (layout.FREE_SEGMENT << 3)) - 1
    if number >= 0:
        segment = segments + (number << layout.SEGMENT_SHIFT)
        store(context + (layout.FREE_SEGMENT << 3), load(segment))
        for position in range(layout.SEGMENT_SLOTS):
            store(segment + (position << 3), 0)
    else:
        number = load(context + (layout.N_SEGMENTS << 3))
        if number >= load(context + (layout.SEGMENTS_MAX << 3)):
            return -1
        store(context + (layout.N_SEGMENTS << 3), number + 1)
    store32(meta + (number << 3), 0)
    store32(meta + (number << 3) + 4, depth)
    return number


@kernel()
def free_segment(context: int, number: int) -> None:
    """Put a segment on the free list; its content is lost."""
    store(
        load(context + (layout.SEGMENTS << 3)) + (number << layout.SEGMENT_SHIFT),
        load(context + (layout.FREE_SEGMENT << 3)),
    )
    store32(load(context + (layout.SEGMENT_META << 3)) + (number << 3) + 4, -1)
    store(context + (layout.FREE_SEGMENT << 3), number + 1)


@kernel()
def split_segment(context: int, which: int, tag: int) -> bool:
    """Split the segment of a tag in two.

    Returns False if the map cannot grow any further; the segment then fills up beyond SEGMENT_ENTRIES_MAX.
    """
    directory = load(context + ((which + layout.MAP_DIRECTORY) << 3))
    depth = load(context + ((which + layout.MAP_DEPTH) << 3))
    segments = load(context + (layout.SEGMENTS << 3))
    metas = load(context + (layout.SEGMENT_META << 3))
    old = load32(directory + (shift_right(tag, 32 - depth) << 2))
    own_depth = load32(metas + (old << 3) + 4)
    if own_depth >= layout.DEPTH_MAX:
        return False
    new = new_segment(context, own_depth + 1)
    if new < 0:
        return False
    if own_depth == depth:
        for index in range((1 << depth) - 1, -1, -1):
            number = load32(directory + (index << 2))
            store32(directory + (index << 3), number)
            store32(directory + (index << 3) + 4, number)
        depth += 1
        store(context + ((which + layout.MAP_DEPTH) << 3), depth)
    span = 1 << (depth - own_depth - 1)
    first = (shift_right(tag, 32 - own_depth) * 2 + 1) * span
    for index in range(first, first + span):
        store32(directory + (index << 2), new)
    shift = 63 - own_depth
    left, right = segments + (old << layout.SEGMENT_SHIFT), segments + (new << layout.SEGMENT_SHIFT)
    # Start after an empty slot, so that each entry is visited after all entries that its own probing would pass.
    begin = 0
    while load(left + (begin << 3)) != 0:
        begin += 1
    moved = 0
    for step in range(1, layout.SEGMENT_SLOTS):
        address = left + (((begin + step) & SLOT_MASK) << 3)
        slot = load(address)
        if slot == 0:
            continue
        position = shift_right(slot, 32) & SLOT_MASK
        store(address, 0)
        # Arithmetic instead of a branch: the half is random, and a mispredicted branch costs 5 ns.
        moves = shift_right(slot, shift) & 1
        moved += moves
        target = left + moves * (right - left)
        while load(target + (position << 3)) != 0:
            position = (position + 1) & SLOT_MASK
        store(target + (position << 3), slot)
    store32(metas + (old << 3), load32(metas + (old << 3)) - moved)
    store32(metas + (old << 3) + 4, own_depth + 1)
    store32(metas + (new << 3), moved)
    return True


@kernel()
def insert_id(context: int, which: int, tag: int, number: int) -> None:
    """Insert an entry whose key is not in the map yet."""
    while True:
        segment = segment_of(context, which, tag)
        index = (segment - load(context + (layout.SEGMENTS << 3))) >> layout.SEGMENT_SHIFT
        meta = load(context + (layout.SEGMENT_META << 3)) + (index << 3)
        entries = load32(meta)
        if entries < layout.SEGMENT_ENTRIES_MAX or not split_segment(context, which, tag):
            break
    position = tag & SLOT_MASK
    while load(segment + (position << 3)) != 0:
        position = (position + 1) & SLOT_MASK
    store(segment + (position << 3), (tag << 32) | (number + 1))
    store32(meta, entries + 1)
    count = context + ((which + layout.MAP_ENTRIES) << 3)
    store(count, load(count) + 1)


@kernel()
def join_segments(context: int, which: int, budget: int) -> int:
    """Join up to `budget` pairs of halves that fit one segment with space to spare; returns how many were joined.

    Each takes about 40 us. Queries wait meanwhile if it is the map CHILDREN, the only one that they read.
    """
    directory = load(context + ((which + layout.MAP_DIRECTORY) << 3))
    depth = load(context + ((which + layout.MAP_DEPTH) << 3))
    segments = load(context + (layout.SEGMENTS << 3))
    metas = load(context + (layout.SEGMENT_META << 3))
    joined = 0
    index = 0
    while index < (1 << depth) and joined < budget:
        left = load32(directory + (index << 2))
        own_depth = load32(metas + (left << 3) + 4)
        span = 1 << (depth - own_depth)
        if own_depth > 0 and index & (2 * span - 1) == 0:
            right = load32(directory + ((index + span) << 2))
            entries = load32(metas + (left << 3)) + load32(metas + (right << 3))
            if load32(metas + (right << 3) + 4) == own_depth and entries <= layout.SEGMENT_ENTRIES_JOINED_MAX:
                if which == layout.CHILDREN:
                    begin_change(context)
                source, target = segments + (right << layout.SEGMENT_SHIFT), segments + (left << layout.SEGMENT_SHIFT)
                for at in range(layout.SEGMENT_SLOTS):
                    slot = load(source + (at << 3))
                    if slot != 0:
                        position = shift_right(slot, 32) & SLOT_MASK
                        while load(target + (position << 3)) != 0:
                            position = (position + 1) & SLOT_MASK
                        store(target + (position << 3), slot)
                for at in range(index + span, index + 2 * span):
                    store32(directory + (at << 2), left)
                store32(metas + (left << 3), entries)
                store32(metas + (left << 3) + 4, own_depth - 1)
                free_segment(context, right)
                end_change(context)
                joined += 1
        index += span
    return joined

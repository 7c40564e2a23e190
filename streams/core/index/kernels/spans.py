"""Spans of blocks in the arenas: allocating them, and freeing them joined with adjacent free spans.

What lives here: the allocator. What must not: the meaning of blocks.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.fields import local_at, sequence_at, set_bit, test_bit, unset_bit
from streams.core.index.kernels.maps import ID_MASK
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import leading_zeros, load, store
from streams.core.kernels.words import add, get, put

# -- spans of blocks -------------------------------------------------------------------------------------
# A free span stores its length in SEQUENCE of its first and its last block, and the links of its class's list in LOCAL
# of its first. Two bitmaps mark where free spans begin and end, so that a freed span can be joined with adjacent ones.


@njit(inline="always")
def span_class(length: int) -> int:
    """Class of a length: floor(log2)."""
    return 63 - leading_zeros(length)


@kernel()
def unlink_span(context: int, start: int) -> int:
    """Remove a free span from its list; returns its length."""
    local = get(context, layout.LOCAL)
    length = sequence_at(context, start)
    links = load(local + (start << 3))
    before, after = links >> 32, links & ID_MASK
    if before:
        other = local + ((before - 1) << 3)
        store(other, (load(other) & ~ID_MASK) | after)
    else:
        put(context, layout.SPAN_CLASSES + span_class(length), after)
    if after:
        other = local + ((after - 1) << 3)
        store(other, (load(other) & ID_MASK) | (before << 32))
    unset_bit(get(context, layout.FREE_STARTS), start)
    unset_bit(get(context, layout.FREE_ENDS), start + length - 1)
    add(context, layout.N_FREE_BLOCKS, -length)
    return length


@kernel()
def free_span(context: int, start: int, length: int) -> None:
    """Free blocks, joined with adjacent free spans."""
    if length <= 0:
        return
    end = start + length
    if start > 0 and test_bit(get(context, layout.FREE_ENDS), start - 1):
        before = sequence_at(context, start - 1)
        start -= before
        unlink_span(context, start)
    if end < get(context, layout.N_BLOCKS):
        if test_bit(get(context, layout.FREE_STARTS), end):
            end += unlink_span(context, end)
    else:
        put(context, layout.N_BLOCKS, start)
        return
    local, sequence = get(context, layout.LOCAL), get(context, layout.SEQUENCE)
    length = end - start
    which = layout.SPAN_CLASSES + span_class(length)
    head = get(context, which)
    store(local + (start << 3), head)
    if head:
        other = local + ((head - 1) << 3)
        store(other, (load(other) & ID_MASK) | ((start + 1) << 32))
    put(context, which, start + 1)
    store(sequence + (start << 3), length)
    store(sequence + ((end - 1) << 3), length)
    set_bit(get(context, layout.FREE_STARTS), start)
    set_bit(get(context, layout.FREE_ENDS), end - 1)
    add(context, layout.N_FREE_BLOCKS, length)


@kernel()
def new_span(context: int, needed: int, wanted: int) -> tuple[int, int]:
    """Allocate blocks for a run: at least `needed`, and `wanted` if available; returns start and length."""
    if get(context, layout.N_FREE_BLOCKS) >= needed:
        found = 0
        which = span_class(needed)
        candidate = get(context, layout.SPAN_CLASSES + which)
        for _ in range(layout.SPAN_TRIES_MAX):
            if candidate == 0:
                break
            if sequence_at(context, candidate - 1) >= needed:
                found = candidate
                break
            candidate = local_at(context, candidate - 1) & ID_MASK
        which += 1
        while found == 0 and which < layout.N_SPAN_CLASSES:
            found = get(context, layout.SPAN_CLASSES + which)
            which += 1
        if found:
            start = found - 1
            length = unlink_span(context, start)
            if length - wanted >= layout.SLACK_MIN:
                free_span(context, start + wanted, length - wanted)
                length = wanted
            return start, length
    start = get(context, layout.N_BLOCKS)
    put(context, layout.N_BLOCKS, start + wanted)
    return start, wanted

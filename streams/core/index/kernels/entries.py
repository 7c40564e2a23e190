"""Entries of claims and records: finding one by its key, taking a free one, freeing it.

What lives here: what these two tables share, and their keys. What must not: what their words count. The first word of a
free entry links to the next free one.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.fields import segment_of, tag_of
from streams.core.index.kernels.maps import ID_MASK, SLOT_MASK
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, shift_right, store
from streams.core.kernels.words import SYNTHETIC_STEP, get, put


@njit(inline="always")
def record_tag(context: int, holder: int, first: int) -> int:
    """Tag of a record: its holder and its first sequence hash."""
    return tag_of(context, first ^ ((holder + 1) * SYNTHETIC_STEP))


@kernel()
def find_record(context: int, holder: int, first: int) -> int:
    """Find the 32-byte entry of a record; returns -1 if there is none."""
    entries = get(context, layout.RECORDS)
    tag = record_tag(context, holder, first)
    segment = segment_of(context, layout.RECORD_KEYS, tag)
    position = tag & SLOT_MASK
    while True:
        slot = load(segment + (position << 3))
        if slot == 0:
            return -1
        if shift_right(slot, 32) == tag:
            entry = (slot & ID_MASK) - 1
            address = entries + (entry << 5)
            if load(address) == first and load(address + 8) >> 32 == holder:
                return entry
        position = (position + 1) & SLOT_MASK


@kernel()
def find_claim(context: int, key: int) -> int:
    """Find the 16-byte entry of a claimed block; returns -1 if there is none."""
    entries = get(context, layout.CLAIMS)
    tag = tag_of(context, key)
    segment = segment_of(context, layout.CLAIM_BLOCKS, tag)
    position = tag & SLOT_MASK
    while True:
        slot = load(segment + (position << 3))
        if slot == 0:
            return -1
        if shift_right(slot, 32) == tag:
            entry = (slot & ID_MASK) - 1
            if load(entries + (entry << 4)) == key:
                return entry
        position = (position + 1) & SLOT_MASK


@njit(inline="always")
def take_entry(context: int, entries: int, shift: int, free: int, count: int) -> int:
    """Take a free entry, or the next unused one. `free` and `count` are words of the context."""
    entry = get(context, free) - 1
    if entry >= 0:
        put(context, free, load(entries + (entry << shift)))
    else:
        entry = get(context, count)
        put(context, count, entry + 1)
    return entry


@njit(inline="always")
def free_entry(context: int, entries: int, shift: int, free: int, entry: int) -> None:
    """Put an entry on the free list."""
    store(entries + (entry << shift), get(context, free))
    put(context, free, entry + 1)

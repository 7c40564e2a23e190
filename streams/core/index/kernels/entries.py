"""Entries of aliases, claims and records: finding one by its key, taking a free one, freeing it.

What lives here: what these three tables share. What must not: the meaning of their words. The first word of a free
entry links to the next free one.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels.fields import segment_of, tag_of
from streams.core.index.kernels.maps import ID_MASK, SLOT_MASK
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, shift_right, store
from streams.core.kernels.words import SYNTHETIC_STEP, get, put


@njit(inline="always")
def owned_tag(context: int, owner: int, key: int) -> int:
    """Tag of a key that is unique within a column or a holder."""
    return tag_of(context, key ^ ((owner + 1) * SYNTHETIC_STEP))


@kernel()
def find_owned(context: int, which: int, entries: int, shift: int, owner: int, key: int) -> int:
    """Find the entry whose words are a key and owner << 32 | anything; returns -1 if there is none.

    Entries have 1 << `shift` bytes.
    """
    tag = owned_tag(context, owner, key)
    segment = segment_of(context, which, tag)
    position = tag & SLOT_MASK
    while True:
        slot = load(segment + (position << 3))
        if slot == 0:
            return -1
        if shift_right(slot, 32) == tag:
            entry = (slot & ID_MASK) - 1
            address = entries + (entry << shift)
            if load(address) == key and load(address + 8) >> 32 == owner:
                return entry
        position = (position + 1) & SLOT_MASK


@kernel()
def find_keyed(context: int, which: int, entries: int, offset: int, key: int) -> int:
    """Find the 16-byte entry whose word at `offset` is this key; returns -1 if there is none."""
    tag = tag_of(context, key)
    segment = segment_of(context, which, tag)
    position = tag & SLOT_MASK
    while True:
        slot = load(segment + (position << 3))
        if slot == 0:
            return -1
        if shift_right(slot, 32) == tag:
            entry = (slot & ID_MASK) - 1
            if load(entries + (entry << 4) + offset) == key:
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

"""The two maps of a store of runs: slots of 8 bytes, tag << 32 | 1 + slot of a block, 0 for a free one.

What lives here: inserting, deleting, growing. What must not: keys; a lookup verifies the key at the block to which the
slot points. Linear probing, backward-shift deletion. A tag's lower bits are its home position, so that growing a map
reads no keys.
"""

from __future__ import annotations

from numba import njit

from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, shift_right, store
from streams.core.kernels.words import SYNTHETIC_STEP, get, mix, put
from streams.core.reducer.kernels import layout

_ID_MASK = (1 << 32) - 1


@njit(inline="always")
def tag_in(context: int, column: int, key: int) -> int:
    """Return 32 bits of a salted hash of a key within a column; the salt prevents keys chosen to collide."""
    return mix(key ^ ((column + 1) * SYNTHETIC_STEP) ^ get(context, layout.SALT))


@kernel()
def insert_slot(context: int, which: int, tag: int, slot: int) -> None:
    """Add an entry, for which the map has capacity."""
    table, mask = get(context, which + layout.MAP_ADDRESS), get(context, which + layout.MAP_MASK)
    position = tag & mask
    while load(table + (position << 3)) != 0:
        position = (position + 1) & mask
    store(table + (position << 3), (tag << 32) | (slot + 1))
    put(context, which + layout.MAP_ENTRIES, get(context, which + layout.MAP_ENTRIES) + 1)


@kernel()
def delete_slot(context: int, which: int, tag: int, slot: int) -> None:
    """Delete an entry that exists; the entries after it move up."""
    table, mask = get(context, which + layout.MAP_ADDRESS), get(context, which + layout.MAP_MASK)
    wanted = (tag << 32) | (slot + 1)
    gap = tag & mask
    while load(table + (gap << 3)) != wanted:
        gap = (gap + 1) & mask
    position = (gap + 1) & mask
    entry = load(table + (position << 3))
    while entry != 0:
        home = shift_right(entry, 32) & mask
        if ((position - home) & mask) >= ((position - gap) & mask):
            store(table + (gap << 3), entry)
            gap = position
        position = (position + 1) & mask
        entry = load(table + (position << 3))
    store(table + (gap << 3), 0)
    put(context, which + layout.MAP_ENTRIES, get(context, which + layout.MAP_ENTRIES) - 1)


@kernel()
def move_entries(old: int, old_mask: int, new: int, new_mask: int) -> None:
    """Copy every entry of a map to a larger, empty one."""
    for position in range(old_mask + 1):
        entry = load(old + (position << 3))
        if entry != 0:
            at = shift_right(entry, 32) & new_mask
            while load(new + (at << 3)) != 0:
                at = (at + 1) & new_mask
            store(new + (at << 3), entry)

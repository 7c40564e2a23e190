"""Names of blocks: the one that all share, and those of a rank's own.

What lives here: looking up by name; aliases, a rank's own name for a block; claims, a block that more than one record
of a rank holds. What must not: what follows for the tree.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels.entries import find_keyed, find_owned, give_back, owned_tag, take_entry
from streams.core.index.kernels.fields import column_word, covers, segment_of, tag_of
from streams.core.index.kernels.layout import (
    ALIAS_BLOCKS,
    ALIAS_NAMES,
    ALIASES,
    CLAIM_BLOCKS,
    CLAIMS,
    COLUMN_ALIASES,
    COLUMN_CLAIMS,
    FREE_ALIAS,
    FREE_CLAIM,
    N_ALIASES,
    N_CLAIMS,
    NAME,
    NAMES,
    SYNTHETIC,
)
from streams.core.index.kernels.maps import ID_MASK, SLOT_MASK, delete_id, insert_id
from streams.core.index.kernels.runs import run_of
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, shift_right, store
from streams.core.kernels.words import SYNTHETIC_STEP, add, get

# -- aliases and claims ----------------------------------------------------------------------------------


@njit(inline="always")
def column_block(column: int, block: int) -> int:
    """A block within a column, as a key."""
    return (column << 32) | block


@njit(inline="always")
def find_alias_of_name(context: int, column: int, name: int) -> int:
    """Alias entry of a column's name, -1 for none."""
    return find_owned(context, ALIAS_NAMES, get(context, ALIASES), 4, column, name)


@njit(inline="always")
def find_alias_of_block(context: int, column: int, block: int) -> int:
    """Alias entry of a column's block, -1 for none."""
    return find_keyed(context, ALIAS_BLOCKS, get(context, ALIASES), 8, column_block(column, block))


@kernel()
def add_alias(context: int, column: int, name: int, block: int) -> None:
    """A column calls a block by a name of its own."""
    entries = get(context, ALIASES)
    entry = take_entry(context, entries, 4, FREE_ALIAS, N_ALIASES)
    store(entries + (entry << 4), name)
    store(entries + (entry << 4) + 8, column_block(column, block))
    insert_id(context, ALIAS_NAMES, owned_tag(context, column, name), entry)
    insert_id(context, ALIAS_BLOCKS, tag_of(context, column_block(column, block)), entry)
    address = column_word(context, COLUMN_ALIASES, column)
    store(address, load(address) + 1)


@kernel()
def remove_alias(context: int, column: int, block: int) -> None:
    """A column has no name of its own for a block, if it had one."""
    entry = find_alias_of_block(context, column, block)
    if entry < 0:
        return
    entries = get(context, ALIASES)
    name = load(entries + (entry << 4))
    delete_id(context, ALIAS_NAMES, owned_tag(context, column, name), entry)
    delete_id(context, ALIAS_BLOCKS, tag_of(context, column_block(column, block)), entry)
    give_back(context, entries, 4, FREE_ALIAS, entry)
    store(entries + (entry << 4) + 8, -1)
    address = column_word(context, COLUMN_ALIASES, column)
    store(address, load(address) - 1)


@kernel()
def add_claim(context: int, column: int, block: int) -> None:
    """One more record claims a block."""
    entries = get(context, CLAIMS)
    key = column_block(column, block)
    entry = find_keyed(context, CLAIM_BLOCKS, entries, 0, key)
    if entry >= 0:
        store(entries + (entry << 4) + 8, load(entries + (entry << 4) + 8) + 1)
        return
    entry = take_entry(context, entries, 4, FREE_CLAIM, N_CLAIMS)
    store(entries + (entry << 4), key)
    store(entries + (entry << 4) + 8, 1)
    insert_id(context, CLAIM_BLOCKS, tag_of(context, key), entry)
    address = column_word(context, COLUMN_CLAIMS, column)
    store(address, load(address) + 1)


@kernel()
def remove_claim(context: int, column: int, block: int, all_of_them: bool) -> bool:
    """One record claims a block no more; gives whether another one still does."""
    entries = get(context, CLAIMS)
    key = column_block(column, block)
    entry = find_keyed(context, CLAIM_BLOCKS, entries, 0, key)
    if entry < 0:
        return False
    left = load(entries + (entry << 4) + 8) - 1
    if left > 0 and not all_of_them:
        store(entries + (entry << 4) + 8, left)
        return True
    delete_id(context, CLAIM_BLOCKS, tag_of(context, key), entry)
    give_back(context, entries, 4, FREE_CLAIM, entry)
    store(entries + (entry << 4) + 8, -1)
    address = column_word(context, COLUMN_CLAIMS, column)
    store(address, load(address) - 1)
    return True


# -- names -----------------------------------------------------------------------------------------------


@kernel()
def find_name(context: int, name: int) -> int:
    """Block that NAMES knows under a name, -1 for none; whoever holds it."""
    tag = tag_of(context, name)
    segment = segment_of(context, NAMES, tag)
    names = get(context, NAME)
    position = tag & SLOT_MASK
    while True:
        slot = load(segment + (position << 3))
        if slot == 0:
            return -1
        if shift_right(slot, 32) == tag:
            block = (slot & ID_MASK) - 1
            if load(names + (block << 3)) == name:
                return block
        position = (position + 1) & SLOT_MASK


@kernel()
def find_held(context: int, column: int, name: int) -> int:
    """Block that a column holds under a name, -1 for none."""
    aliases = load(column_word(context, COLUMN_ALIASES, column))
    if aliases:
        entry = find_alias_of_name(context, column, name)
        if entry >= 0:
            return load(get(context, ALIASES) + (entry << 4) + 8) & ID_MASK
    block = find_name(context, name)
    if block < 0 or not covers(context, run_of(context, block), column):
        return -1
    if aliases and find_alias_of_block(context, column, block) >= 0:
        return -1
    return block


@kernel()
def synthetic_name(context: int) -> int:
    """A name that NAMES does not know, for a block whose own is taken."""
    while True:
        add(context, SYNTHETIC, 1)
        name = tag_of(context, get(context, SYNTHETIC)) | (get(context, SYNTHETIC) * SYNTHETIC_STEP) << 32
        if find_name(context, name) < 0:
            return name

"""Names of blocks: the shared one, and a rank's own ones.

What lives here: lookups by name; aliases (a rank's own name for a block); claims (a block in more than one record of a
rank). What must not: changes of the tree that follow from them.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels.entries import find_keyed, find_owned, free_entry, owned_tag, take_entry
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
    """Key of a block within a column."""
    return (column << 32) | block


@njit(inline="always")
def find_alias_of_name(context: int, column: int, name: int) -> int:
    """Find the alias entry of a column's name; returns -1 if there is none."""
    return find_owned(context, ALIAS_NAMES, get(context, ALIASES), 4, column, name)


@njit(inline="always")
def find_alias_of_block(context: int, column: int, block: int) -> int:
    """Find the alias entry of a column's block; returns -1 if there is none."""
    return find_keyed(context, ALIAS_BLOCKS, get(context, ALIASES), 8, column_block(column, block))


@kernel()
def add_alias(context: int, column: int, name: int, block: int) -> None:
    """Give a block an alias in a column."""
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
    """Remove a column's alias of a block, if there is one."""
    entry = find_alias_of_block(context, column, block)
    if entry < 0:
        return
    entries = get(context, ALIASES)
    name = load(entries + (entry << 4))
    delete_id(context, ALIAS_NAMES, owned_tag(context, column, name), entry)
    delete_id(context, ALIAS_BLOCKS, tag_of(context, column_block(column, block)), entry)
    free_entry(context, entries, 4, FREE_ALIAS, entry)
    store(entries + (entry << 4) + 8, -1)
    address = column_word(context, COLUMN_ALIASES, column)
    store(address, load(address) - 1)


@kernel()
def add_claim(context: int, column: int, block: int) -> None:
    """Count one more claim of a block in a column."""
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
    """End one claim of a block, or all of them; returns whether another claim remains."""
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
    free_entry(context, entries, 4, FREE_CLAIM, entry)
    store(entries + (entry << 4) + 8, -1)
    address = column_word(context, COLUMN_CLAIMS, column)
    store(address, load(address) - 1)
    return True


# -- names -----------------------------------------------------------------------------------------------


@kernel()
def find_name(context: int, name: int) -> int:
    """Find the block that has a shared name, whichever ranks hold it; returns -1 if there is none."""
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
    """Find the block that a column holds under a name; returns -1 if there is none."""
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
    """Make up an unused shared name, for a block whose own name is taken."""
    while True:
        add(context, SYNTHETIC, 1)
        name = tag_of(context, get(context, SYNTHETIC)) | (get(context, SYNTHETIC) * SYNTHETIC_STEP) << 32
        if find_name(context, name) < 0:
            return name

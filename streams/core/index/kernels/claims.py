"""Claims: blocks that more than one record of a rank and tier names.

What lives here: counting them. What must not: what follows from the end of the last claim (fold).
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.entries import find_claim, free_entry, take_entry
from streams.core.index.kernels.fields import column_word, tag_of
from streams.core.index.kernels.maps import delete_id, insert_id
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, store
from streams.core.kernels.words import get


@njit(inline="always")
def column_block(column: int, block: int) -> int:
    """Key of a block within a column."""
    return (column << 32) | block


@kernel()
def add_claim(context: int, column: int, block: int) -> None:
    """Count one more claim of a block in a column."""
    entries = get(context, layout.CLAIMS)
    key = column_block(column, block)
    entry = find_claim(context, key)
    if entry >= 0:
        store(entries + (entry << 4) + 8, load(entries + (entry << 4) + 8) + 1)
        return
    entry = take_entry(context, entries, 4, layout.FREE_CLAIM, layout.N_CLAIMS)
    store(entries + (entry << 4), key)
    store(entries + (entry << 4) + 8, 1)
    insert_id(context, layout.CLAIM_BLOCKS, tag_of(context, key), entry)
    address = column_word(context, layout.COLUMN_CLAIMS, column)
    store(address, load(address) + 1)


@kernel()
def remove_claim(context: int, column: int, block: int, all_of_them: bool) -> bool:
    """End one claim of a block, or all of them; returns whether another claim remains."""
    entries = get(context, layout.CLAIMS)
    key = column_block(column, block)
    entry = find_claim(context, key)
    if entry < 0:
        return False
    left = load(entries + (entry << 4) + 8) - 1
    if left > 0 and not all_of_them:
        store(entries + (entry << 4) + 8, left)
        return True
    delete_id(context, layout.CLAIM_BLOCKS, tag_of(context, key), entry)
    free_entry(context, entries, 4, layout.FREE_CLAIM, entry)
    store(entries + (entry << 4) + 8, -1)
    address = column_word(context, layout.COLUMN_CLAIMS, column)
    store(address, load(address) - 1)
    return True

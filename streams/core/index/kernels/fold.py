"""Run records folded into the tree, in any order.

What lives here: what a record of a run changes in the tree, given the record's previous value. What must not: bytes
(streams/tables) and the comparison of epochs with progress records (tree_fold).

A record gives its parent's sequence hash, so the parent is found whichever rank holds it. If the parent has not been
read yet, a phantom stands in for it: the record's blocks hang from the phantom until the parent arrives, and queries do
not reach them. Blocks of a record that are not held are in the tree too if held blocks follow them. Since compaction
leaves no order between keys, two records of a rank can claim the same block for a while: the block's old record and its
new one. The block is removed when the last claim ends.

An entry of RECORDS: first sequence hash; holder << 32 | the last held block; presence bits, 0 for a free entry; the
holder's generation when the entry was written.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels import layout
from streams.core.index.kernels.by_sequence import find_block, prefetch_block
from streams.core.index.kernels.claims import remove_claim
from streams.core.index.kernels.entries import find_record, free_entry, record_tag, take_entry
from streams.core.index.kernels.fields import (
    column_word,
    coverage_address,
    end_change,
    field,
    home_address,
    sequence_at,
    tag_of,
)
from streams.core.index.kernels.maps import ID_MASK, delete_id, insert_id
from streams.core.index.kernels.runs import run_of
from streams.core.index.kernels.shape import finish_change, wait_for_queries
from streams.core.index.kernels.tree import (
    common_length,
    end_of,
    has_capacity,
    new_phantom,
    store_blocks,
    uncover,
)
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import (
    copy_words,
    leading_zeros,
    load,
    load32,
    prefetch,
    prefetch_write,
    shift_right,
    signed,
    store,
    trailing_zeros,
)
from streams.core.kernels.words import get, put
from streams.core.kernels.xxh3 import chain_step, digest_9


@kernel()
def free_record(context: int, entry: int) -> None:
    """Free the entry of a record."""
    entries = get(context, layout.RECORDS)
    address = entries + (entry << 5)
    delete_id(context, layout.RECORD_KEYS, record_tag(context, load(address + 8) >> 32, load(address)), entry)
    free_entry(context, entries, 5, layout.FREE_RECORD, entry)
    store(address + 16, 0)


@kernel()
def write_record(context: int, entry: int, holder: int, first: int, last_block: int, present: int) -> None:
    """Write an entry, or add one if `entry` is -1."""
    entries = get(context, layout.RECORDS)
    if entry < 0:
        entry = take_entry(context, entries, 5, layout.FREE_RECORD, layout.N_RECORDS)
        insert_id(context, layout.RECORD_KEYS, record_tag(context, holder, first), entry)
    address = entries + (entry << 5)
    store(address, first)
    store(address + 8, (holder << 32) | last_block)
    store(address + 16, present)
    store(address + 24, load(get(context, layout.HOLDER_GENERATION) + (holder << 3)))


@kernel()
def release_blocks(context: int, column: int, last_block: int, present: int, gone: int) -> None:
    """Release the blocks that a record of a column no longer holds.

    last_block: block of the highest of the `present` bits; gone: the bits among them to release.
    """
    blocks = get(context, layout.SCRATCH)
    block = last_block
    offset = 63 - leading_zeros(present)
    lowest = trailing_zeros(gone)
    run = run_of(context, block)
    start = field(context, run, layout.RUN_START)
    while True:
        store(blocks + (offset << 3), block)
        if offset == lowest:
            break
        offset -= 1
        if block > start:
            block -= 1
        else:
            run = field(context, run, layout.RUN_PARENT)
            start = field(context, run, layout.RUN_START)
            block = start + field(context, run, layout.RUN_LENGTH) - 1
    # Find all blocks before releasing any, since a released block may be freed.
    claims = load(column_word(context, layout.COLUMN_CLAIMS, column)) != 0
    while gone:
        offset = 63 - leading_zeros(gone)
        gone &= ~(1 << offset)
        block = load(blocks + (offset << 3))
        if claims and remove_claim(context, column, block, False):
            continue
        n_blocks = 1
        while (
            not claims and offset > 0 and (gone >> (offset - 1)) & 1 and load(blocks + ((offset - 1) << 3)) == block - 1
        ):
            offset -= 1
            block -= 1
            gone &= ~(1 << offset)
            n_blocks += 1
        first = block
        while n_blocks > 0:
            # These blocks are adjacent, in one run or in several consecutive ones.
            run = run_of(context, first + n_blocks - 1)
            start = max(field(context, run, layout.RUN_START), first)
            todo = first + n_blocks - start
            uncover(context, run, start - field(context, run, layout.RUN_START), todo, column)
            n_blocks -= todo
    finish_change(context)


@kernel()
def block_before(context: int, block: int, n_blocks: int) -> int:
    """The block that is `n_blocks` before another one on its chain."""
    run = run_of(context, block)
    start = field(context, run, layout.RUN_START)
    while block - start < n_blocks:
        n_blocks -= block - start + 1
        run = field(context, run, layout.RUN_PARENT)
        start = field(context, run, layout.RUN_START)
        block = start + field(context, run, layout.RUN_LENGTH) - 1
    return block - n_blocks


@kernel()
def attach_point(
    context: int,
    sequence: int,
    local: int,
    offset: int,
    connected: int,
    last: int,
    parent: int,
    has_parent: bool,
) -> tuple[int, int]:
    """Find where block `offset` of a record attaches, and add any of the record's earlier blocks that are missing.

    connected: number of the record's leading blocks that are in the tree and hang from each other; last: the last of
    them. A later block may be in the tree too, but hang from a phantom.
    Returns the run of the block before it, and the offset after that block.
    """
    if connected > 0 and offset > 0:
        if offset < connected:
            return end_of(context, block_before(context, last, connected - offset))
        run, after = end_of(context, last)
    elif has_parent:
        connected = 0
        before = find_block(context, parent)
        if before < 0:
            run, after = new_phantom(context, parent), 1
        else:
            run, after = end_of(context, before)
    else:
        connected = 0
        run, after = 0, 0
    if connected < offset:
        position = connected << 3
        n_missing = offset - connected
        run, after = end_of(
            context, store_blocks(context, -1, run, after, sequence + position, local + position, n_missing)
        )
    return run, after


@kernel()
def kept_blocks(context: int, last_block: int, n_old: int, local: int, n_blocks: int) -> int:
    """Count the leading blocks of a record that its previous value had too: adjacent, and ending at `last_block`.

    Equal local hashes in one run after the same first block are the same chain. Returns 0 if the blocks differ or are
    not adjacent in one run.
    """
    if n_old > n_blocks:
        return 0
    first = last_block - n_old + 1
    if first < field(context, run_of(context, last_block), layout.RUN_START):
        return 0
    hashes = get(context, layout.LOCAL) + (first << 3)
    return n_old if common_length(hashes, local, n_old) == n_old else 0


@kernel()
def fold_run(
    context: int, holder: int, first: int, parent: int, has_parent: bool, local: int, n_blocks: int, present: int
) -> bool:
    """Fold one run record, or its tombstone if `present` is 0; returns False if it does not fit.

    The sequence hashes are derived from the first one, which is the record's key and was verified by the caller.
    """
    column = load32(get(context, layout.COLUMN_OF) + (holder << 2))
    entry = find_record(context, holder, first)
    old, last_block = 0, 0
    if entry >= 0:
        address = get(context, layout.RECORDS) + (entry << 5)
        if load(address + 24) == load(get(context, layout.HOLDER_GENERATION) + (holder << 3)):
            old = load(address + 16)
            last_block = load(address + 8) & ID_MASK
    if present == 0:
        if entry >= 0:
            free_record(context, entry)
        if old:
            release_blocks(context, column, last_block, old, old)
        return True
    small = get(context, layout.SMALL_MAX)
    n_records, n_claims = get(context, layout.N_RECORDS) + 1, get(context, layout.N_CLAIMS) + n_blocks
    if not has_capacity(context, 2 * n_blocks) or n_records > small or n_claims > small:
        put(context, layout.FULL, 1)
        return False
    sequence = get(context, layout.SCRATCH) + (layout.SCRATCH_SEQUENCE << 3)
    gone, new, connected, last = old, present, 0, last_block
    kept = 0
    if old:
        kept = kept_blocks(context, last_block, 64 - leading_zeros(old), local, n_blocks)
        if kept:
            gone, new, connected = old & ~present, present & ~old, kept
            copy_words(sequence, get(context, layout.SEQUENCE) + ((last_block - kept + 1) << 3), kept)
    if kept == 0:
        store(sequence, first)
        kept = 1
    link = load(sequence + ((kept - 1) << 3))
    for index in range(kept, n_blocks):
        link = signed(chain_step(link, load(local + (index << 3))))
        store(sequence + (index << 3), link)
    if connected == 0 and old:
        top = 63 - leading_zeros(old)
        if top < n_blocks and sequence_at(context, last_block) == load(sequence + (top << 3)):
            gone, new, connected = old & ~present, present & ~old, top + 1
    # Add before removing, so that a block that stays held under another bit is never missing in between.
    while new:
        begin = trailing_zeros(new)
        length = trailing_zeros(~shift_right(new, begin))
        new &= ~(((1 << length) - 1) << begin)
        run, after = attach_point(context, sequence, local, begin, connected, last, parent, has_parent)
        position = begin << 3
        stored = store_blocks(context, column, run, after, sequence + position, local + position, length)
        if begin + length > connected:
            connected, last = begin + length, stored
    top = 63 - leading_zeros(present)
    last = block_before(context, last, connected - 1 - top)
    if gone:
        release_blocks(context, column, last_block, old, gone)
    else:
        end_change(context)
    write_record(context, entry, holder, first, last, present)
    return True


#: Columns of a table of records, in the order of their addresses.
(
    FOLD_HOLDER,
    FOLD_FIRST,
    FOLD_PARENT,
    FOLD_HAS_PARENT,
    FOLD_PRESENT,
    FOLD_OFFSET,
    FOLD_LOCAL,
) = range(7)


#: How many records ahead slots are prefetched, and then the blocks that these slots point to.
_FAR, _NEAR = 6, 3


@njit(inline="always")
def prefetch_record(context: int, holders: int, firsts: int, parents: int, record: int) -> None:
    """Prefetch the slots that an upcoming record will read."""
    at = record << 3
    first = load(firsts + at)
    prefetch_write(home_address(context, layout.RECORD_KEYS, record_tag(context, load(holders + at), first)))
    prefetch_write(home_address(context, layout.BY_SEQUENCE, tag_of(context, first)))
    prefetch(home_address(context, layout.BY_SEQUENCE, tag_of(context, load(parents + at))))


@njit(inline="always")
def prefetch_parent(context: int, parents: int, record: int) -> None:
    """Prefetch what the parent of an upcoming record leads to, once its slot is in the cache."""
    prefetch_block(context, load(parents + (record << 3)))


@kernel()
def fold_runs(context: int, table: int, first: int, last: int) -> int:
    """Fold records `first` to `last` - 1 of columns; returns how many were folded, fewer if one does not fit.

    table: address of the seven columns' addresses: holder, first sequence hash, parent's, whether there is a parent,
    presence bits (0 a tombstone), offsets into the local hashes, local hashes; int64 each.
    """
    holders, firsts, parents = load(table), load(table + 8), load(table + 16)
    has_parents, presents = load(table + 24), load(table + 32)
    offsets, hashes = load(table + 40), load(table + 48)
    put(context, layout.FULL, 0)
    for record in range(first, last):
        if record + _FAR < last:
            prefetch_record(context, holders, firsts, parents, record + _FAR)
        if record + _NEAR < last:
            prefetch_parent(context, parents, record + _NEAR)
        if get(context, layout.WAITING):
            wait_for_queries(context)
        at = record << 3
        begin = load(offsets + at)
        if not fold_run(
            context,
            load(holders + at),
            load(firsts + at),
            load(parents + at),
            load(has_parents + at) != 0,
            hashes + (begin << 3),
            load(offsets + at + 8) - begin,
            load(presents + at),
        ):
            return record - first
    return last - first


@kernel()
def drop_old_records(context: int, first: int, budget: int) -> int:
    """Free entries of generations that have ended, from entry `first` on.

    Returns the entry to continue from, or 0 after the last one.
    """
    n_records = get(context, layout.N_RECORDS)
    last = min(n_records, first + budget)
    entries, generations = get(context, layout.RECORDS), get(context, layout.HOLDER_GENERATION)
    for entry in range(first, last):
        address = entries + (entry << 5)
        if load(address + 16) != 0:
            holder = load(address + 8) >> 32
            if load(address + 24) != load(generations + (holder << 3)):
                free_record(context, entry)
    if last >= n_records:
        return 0
    return last


@kernel()
def digest_columns(context: int, digests: int) -> None:
    """Compute the digest of what each column holds: xxh3_64 of tier and sequence hash, combined by exclusive or.

    digests: address of one int64 per column, zeros at first. The digests of ended columns have no meaning.
    """
    words = get(context, layout.N_WORDS)
    tiers = get(context, layout.TIER_OF)
    for run in range(1, get(context, layout.N_RUNS)):
        length = field(context, run, layout.RUN_LENGTH)
        if length <= 0:
            continue
        first = field(context, run, layout.RUN_START)
        known = 0
        by_tier_0, by_tier_1, by_tier_2, by_tier_3 = 0, 0, 0, 0
        for word in range(words):
            bits = load(coverage_address(context, run, word))
            while bits:
                column = (word << 6) + trailing_zeros(bits)
                bits &= bits - 1
                tier = load32(tiers + (column << 2))
                if not (known >> tier) & 1:
                    known |= 1 << tier
                    digest = 0
                    for block in range(first, first + length):
                        digest ^= signed(digest_9(tier, sequence_at(context, block)))
                    if tier == 0:
                        by_tier_0 = digest
                    elif tier == 1:
                        by_tier_1 = digest
                    elif tier == 2:
                        by_tier_2 = digest
                    else:
                        by_tier_3 = digest
                digest = by_tier_0
                if tier == 1:
                    digest = by_tier_1
                elif tier == 2:
                    digest = by_tier_2
                elif tier == 3:
                    digest = by_tier_3
                at = digests + (column << 3)
                store(at, load(at) ^ digest)
    claims = get(context, layout.CLAIMS)
    for entry in range(get(context, layout.N_CLAIMS)):
        more = load(claims + (entry << 4) + 8)
        if more > 0 and more & 1:
            key = load(claims + (entry << 4))
            column = key >> 32
            digest = signed(digest_9(load32(tiers + (column << 2)), sequence_at(context, key & ID_MASK)))
            at = digests + (column << 3)
            store(at, load(at) ^ digest)

"""Run records folded into the tree, in any order.

What lives here: what a record of a run means for the tree, given what it meant before. What must not: bytes
(streams/tables) and epochs' comparison with progress records (run_fold).

A record names its blocks by sequence hash, so its parent is found whoever holds it. A parent that is not known yet is a
phantom, from which the record's blocks hang until the parent comes; queries do not reach them. Blocks of a record that
nobody holds lie in the tree too, as far as held ones hang from them. A block that two records of a rank claim, since
compaction leaves no order between a block's old record and its new one, goes when the last of them lets go.

Entry of RECORDS: first sequence hash; holder << 32 | the last block held; presence bits, 0 for a free entry; the
holder's life when it was written.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels.entries import find_owned, give_back, owned_tag, take_entry
from streams.core.index.kernels.fields import (
    column_word,
    coverage_address,
    end_change,
    field,
    home_address,
    name_at,
    tag_of,
)
from streams.core.index.kernels.layout import (
    CLAIMS,
    COLUMN_CLAIMS,
    COLUMN_OF,
    FREE_RECORD,
    FULL,
    HOLDER_GENERATION,
    LOCAL,
    N_CLAIMS,
    N_RECORDS,
    N_RUNS,
    N_WORDS,
    NAME,
    NAMES,
    RECORD_KEYS,
    RECORDS,
    RUN_LENGTH,
    RUN_PARENT,
    RUN_START,
    SCRATCH,
    SMALL_MAX,
    TIER_OF,
    WAITING,
)
from streams.core.index.kernels.maps import ID_MASK, delete_id, insert_id
from streams.core.index.kernels.names import find_name, remove_claim
from streams.core.index.kernels.runs import run_of
from streams.core.index.kernels.shape import ask_for_block, settle, wait_for_queries
from streams.core.index.kernels.tree import (
    common_length,
    end_of,
    forget_aliases,
    has_room,
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


@njit(inline="always")
def find_record(context: int, holder: int, first: int) -> int:
    """Entry of a record, -1 for none."""
    return find_owned(context, RECORD_KEYS, get(context, RECORDS), 5, holder, first)


@kernel()
def free_record(context: int, entry: int) -> None:
    """A record is no more."""
    entries = get(context, RECORDS)
    address = entries + (entry << 5)
    delete_id(context, RECORD_KEYS, owned_tag(context, load(address + 8) >> 32, load(address)), entry)
    give_back(context, entries, 5, FREE_RECORD, entry)
    store(address + 16, 0)


@kernel()
def write_record(context: int, entry: int, holder: int, first: int, last_block: int, present: int) -> None:
    """Set a record, a new one where `entry` is -1."""
    entries = get(context, RECORDS)
    if entry < 0:
        entry = take_entry(context, entries, 5, FREE_RECORD, N_RECORDS)
        insert_id(context, RECORD_KEYS, owned_tag(context, holder, first), entry)
    address = entries + (entry << 5)
    store(address, first)
    store(address + 8, (holder << 32) | last_block)
    store(address + 16, present)
    store(address + 24, load(get(context, HOLDER_GENERATION) + (holder << 3)))


@kernel()
def let_go(context: int, column: int, last_block: int, present: int, gone: int) -> None:
    """A column's record holds these of its blocks no more.

    last_block: block of the highest of the `present` bits; gone: bits among them.
    """
    blocks = get(context, SCRATCH)
    block = last_block
    offset = 63 - leading_zeros(present)
    lowest = trailing_zeros(gone)
    run = run_of(context, block)
    start = field(context, run, RUN_START)
    while True:
        store(blocks + (offset << 3), block)
        if offset == lowest:
            break
        offset -= 1
        if block > start:
            block -= 1
        else:
            run = field(context, run, RUN_PARENT)
            start = field(context, run, RUN_START)
            block = start + field(context, run, RUN_LENGTH) - 1
    # Only now that all are known: what is let go may be freed.
    claims = load(column_word(context, COLUMN_CLAIMS, column)) != 0
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
            # They lie side by side, in one run or in several that follow each other.
            run = run_of(context, first + n_blocks - 1)
            start = max(field(context, run, RUN_START), first)
            todo = first + n_blocks - start
            forget_aliases(context, column, start, todo)
            uncover(context, run, start - field(context, run, RUN_START), todo, column)
            n_blocks -= todo
    settle(context)


@kernel()
def place(
    context: int, sequence: int, locals_: int, offset: int, connected: int, parent: int, has_parent: bool
) -> tuple[int, int]:
    """Where block `offset` of a record hangs: run and offset behind the block before it. What is not there of the
    record before it is put there.

    connected: of so many leading blocks it is known that they are there and hang from each other. Of others that is
    not so, though their names be known: they may hang from a phantom.
    """
    if connected > 0:
        run, behind = end_of(context, find_name(context, load(sequence + ((connected - 1) << 3))))
    elif has_parent:
        before = find_name(context, parent)
        if before < 0:
            run, behind = new_phantom(context, parent), 1
        else:
            run, behind = end_of(context, before)
    else:
        run, behind = 0, 0
    if connected < offset:
        at = connected << 3
        store_blocks(context, -1, run, behind, sequence + at, locals_ + at, offset - connected, True)
        run, behind = end_of(context, find_name(context, load(sequence + ((offset - 1) << 3))))
    return run, behind


@kernel()
def known_blocks(context: int, last_block: int, n_old: int, locals_: int, n_blocks: int) -> int:
    """How many leading blocks of a record are those that it had before, side by side up to `last_block`; 0 where they
    are others, or lie elsewhere: equal local hashes in one run behind the same first block are the same chain."""
    if n_old > n_blocks:
        return 0
    first = last_block - n_old + 1
    if first < field(context, run_of(context, last_block), RUN_START):
        return 0
    hashes = get(context, LOCAL) + (first << 3)
    return n_old if common_length(hashes, locals_, n_old) == n_old else 0


@kernel()
def fold_run(
    context: int, holder: int, first: int, parent: int, has_parent: bool, locals_: int, n_blocks: int, present: int
) -> bool:
    """Fold one run record, or its tombstone where `present` is 0; False where there is no room.

    sequence hashes follow from the first one, which is the record's key and was proved by the caller.
    """
    column = load32(get(context, COLUMN_OF) + (holder << 2))
    entry = find_record(context, holder, first)
    old, last_block = 0, 0
    if entry >= 0:
        address = get(context, RECORDS) + (entry << 5)
        if load(address + 24) == load(get(context, HOLDER_GENERATION) + (holder << 3)):
            old = load(address + 16)
            last_block = load(address + 8) & ID_MASK
    if present == 0:
        if entry >= 0:
            free_record(context, entry)
        if old:
            let_go(context, column, last_block, old, old)
        return True
    small = get(context, SMALL_MAX)
    records, claims = get(context, N_RECORDS) + 1, get(context, N_CLAIMS) + n_blocks
    if not has_room(context, 2 * n_blocks) or records > small or claims > small:
        put(context, FULL, 1)
        return False
    # Behind the words that let_go uses.
    sequence = get(context, SCRATCH) + (64 << 3)
    gone, new, connected = old, present, 0
    known = 0
    if old:
        known = known_blocks(context, last_block, 64 - leading_zeros(old), locals_, n_blocks)
        if known:
            gone, new, connected = old & ~present, present & ~old, known
            copy_words(sequence, get(context, NAME) + ((last_block - known + 1) << 3), known)
    if known == 0:
        store(sequence, first)
        known = 1
    link = load(sequence + ((known - 1) << 3))
    for index in range(known, n_blocks):
        link = signed(chain_step(link, load(locals_ + (index << 3))))
        store(sequence + (index << 3), link)
    if connected == 0 and old:
        top = 63 - leading_zeros(old)
        if top < n_blocks and name_at(context, last_block) == load(sequence + (top << 3)):
            gone, new, connected = old & ~present, present & ~old, top + 1
    # What is new first: a block that goes on being held by other bits is then never gone in between.
    while new:
        begin = trailing_zeros(new)
        length = trailing_zeros(~shift_right(new, begin))
        new &= ~(((1 << length) - 1) << begin)
        run, behind = place(context, sequence, locals_, begin, min(connected, begin), parent, has_parent)
        at = begin << 3
        store_blocks(context, column, run, behind, sequence + at, locals_ + at, length, True)
        connected = max(connected, begin + length)
    if gone:
        let_go(context, column, last_block, old, gone)
    else:
        end_change(context)
    top = 63 - leading_zeros(present)
    write_record(context, entry, holder, first, find_name(context, load(sequence + (top << 3))), present)
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


#: Records ahead of which slots are asked for, and the blocks that they tell.
_FAR, _NEAR = 6, 3


@njit(inline="always")
def ask_for_record(context: int, holders: int, firsts: int, parents: int, record: int) -> None:
    """Ask for the slots that a coming record will look at."""
    at = record << 3
    first = load(firsts + at)
    prefetch_write(home_address(context, RECORD_KEYS, owned_tag(context, load(holders + at), first)))
    prefetch_write(home_address(context, NAMES, tag_of(context, first)))
    prefetch(home_address(context, NAMES, tag_of(context, load(parents + at))))


@njit(inline="always")
def ask_for_parent(context: int, parents: int, record: int) -> None:
    """Ask for where a coming record's parent lies, its slot being here."""
    ask_for_block(context, load(parents + (record << 3)))


@kernel()
def fold_runs(context: int, table: int, first: int, last: int) -> int:
    """Fold records `first` to `last` - 1 of columns; gives how many were folded, fewer where there is no room.

    table: address of the seven columns' addresses: holder, first sequence hash, parent's, whether there is a parent,
    presence bits (0 a tombstone), offsets into the local hashes, local hashes; int64 each.
    """
    holders, firsts, parents = load(table), load(table + 8), load(table + 16)
    has_parents, presents = load(table + 24), load(table + 32)
    offsets, locals_ = load(table + 40), load(table + 48)
    put(context, FULL, 0)
    for record in range(first, last):
        if record + _FAR < last:
            ask_for_record(context, holders, firsts, parents, record + _FAR)
        if record + _NEAR < last:
            ask_for_parent(context, parents, record + _NEAR)
        if get(context, WAITING):
            wait_for_queries(context)
        at = record << 3
        begin = load(offsets + at)
        if not fold_run(
            context,
            load(holders + at),
            load(firsts + at),
            load(parents + at),
            load(has_parents + at) != 0,
            locals_ + (begin << 3),
            load(offsets + at + 8) - begin,
            load(presents + at),
        ):
            return record - first
    return last - first


@kernel()
def drop_old_records(context: int, first: int, budget: int) -> int:
    """Free records of lives that ended, from one entry on; gives the entry to go on from, 0 behind the last."""
    n_records = get(context, N_RECORDS)
    last = min(n_records, first + budget)
    entries, lives = get(context, RECORDS), get(context, HOLDER_GENERATION)
    for entry in range(first, last):
        address = entries + (entry << 5)
        if load(address + 16) != 0:
            holder = load(address + 8) >> 32
            if load(address + 24) != load(lives + (holder << 3)):
                free_record(context, entry)
    if last >= n_records:
        return 0
    return last


@kernel()
def digest_columns(context: int, digests: int) -> None:
    """Digest of what each column holds: the exclusive or over its blocks of xxh3_64 of tier and name.

    digests: address of an int64 a column, zeros at first. Ended columns get some of their own, for nobody to read.
    """
    words = get(context, N_WORDS)
    tiers = get(context, TIER_OF)
    for run in range(1, get(context, N_RUNS)):
        length = field(context, run, RUN_LENGTH)
        if length <= 0:
            continue
        first = field(context, run, RUN_START)
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
                        digest ^= signed(digest_9(tier, name_at(context, block)))
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
    claims = get(context, CLAIMS)
    for entry in range(get(context, N_CLAIMS)):
        more = load(claims + (entry << 4) + 8)
        if more > 0 and more & 1:
            key = load(claims + (entry << 4))
            column = key >> 32
            digest = signed(digest_9(load32(tiers + (column << 2)), name_at(context, key & ID_MASK)))
            at = digests + (column << 3)
            store(at, load(at) ^ digest)

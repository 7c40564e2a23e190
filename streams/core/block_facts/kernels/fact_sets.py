"""What is told of blocks beside who holds them: a map of sequence hash to set number, and walks along a request.

What lives here: reading and changing the map, and counting for each candidate. What must not: what a set says
(core.block_sets). A kernel here keeps the GIL, so that a query and a change never meet.

The map: SEGMENTS segments by the hash's highest bits, each a power of two of slots of two int64, hash and number, 0 for
a free one. Directory: three words a segment: address of its slots, their number less one, entries. A segment that is
half full is moved to one of twice the slots, so that no change waits for more than one of them.

A request's rows: `found` is int64[2 * n]: of each block the row of the answers' bitmaps that says who may count it, 0
for nobody; and where the stretch of blocks with the same row ends.
"""

from __future__ import annotations

from numba import float64, int64, njit, types

from streams.core.ids import Float64Array, HashArray, Int64Array
from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import HASHES, address_of, load, store

_WORDS = types.Array(types.int64, 1, "C")
_FLOATS = types.Array(types.float64, 1, "C")

#: A million blocks are 4,000 a segment, which move in some 40 us.
SEGMENTS = 256
_SEGMENT_SHIFT = 56
DIRECTORY_WORDS = 3

#: What `weigh` gives, beside a number of blocks.
POOLED_ANY, LABELLED_ANY = 1 << 32, 1 << 33
LABELLED_SET = 1 << 32
#: A row that was not asked for yet.
UNREAD = -1


@njit(inline="always")
def _segment(directory: int, block: int) -> int:
    return directory + ((block >> _SEGMENT_SHIFT) & (SEGMENTS - 1)) * (DIRECTORY_WORDS * 8)


@njit(inline="always")
def _find(directory: int, block: int) -> int:
    segment = _segment(directory, block)
    slots, mask = load(segment), load(segment + 8)
    position = block & mask
    while True:
        slot = slots + (position << 4)
        number = load(slot + 8)
        if number == 0 or load(slot) == block:
            return number
        position = (position + 1) & mask


@kernel(nogil=False)
def get_set(directory: int, block: int) -> int:
    """Number of a block's set, 0 for none."""
    return _find(directory, block)


@kernel(nogil=False)
def put_set(directory: int, block: int, number: int) -> bool:
    """Give a block a set; says whether its segment is half full now and must be moved before the next one."""
    segment = _segment(directory, block)
    slots, mask = load(segment), load(segment + 8)
    position = block & mask
    while load(slots + (position << 4) + 8) != 0 and load(slots + (position << 4)) != block:
        position = (position + 1) & mask
    slot = slots + (position << 4)
    if load(slot + 8) == 0:
        store(slot, block)
        store(segment + 16, load(segment + 16) + 1)
    store(slot + 8, number)
    return load(segment + 16) * 2 > mask


@kernel(nogil=False)
def drop_set(directory: int, block: int) -> None:
    """A block has no set any more; those that were put behind it move up."""
    segment = _segment(directory, block)
    slots, mask = load(segment), load(segment + 8)
    free = block & mask
    while load(slots + (free << 4)) != block or load(slots + (free << 4) + 8) == 0:
        if load(slots + (free << 4) + 8) == 0:
            return
        free = (free + 1) & mask
    position = free
    while True:
        position = (position + 1) & mask
        slot = slots + (position << 4)
        if load(slot + 8) == 0:
            break
        # It may move where its home does not lie between the free slot and itself, going round.
        if (position - load(slot)) & mask >= (position - free) & mask:
            store(slots + (free << 4), load(slot))
            store(slots + (free << 4) + 8, load(slot + 8))
            free = position
    store(slots + (free << 4) + 8, 0)
    store(segment + 16, load(segment + 16) - 1)


@kernel(nogil=False)
def move_segment(directory: int, number: int, slots: int, mask: int) -> None:
    """Move a segment into these slots, mask + 1 of them and all zeros; there are more than entries."""
    segment = directory + number * (DIRECTORY_WORDS * 8)
    old, old_mask = load(segment), load(segment + 8)
    for index in range(old_mask + 1):
        slot = old + (index << 4)
        if load(slot + 8) != 0:
            position = load(slot) & mask
            while load(slots + (position << 4) + 8) != 0:
                position = (position + 1) & mask
            store(slots + (position << 4), load(slot))
            store(slots + (position << 4) + 8, load(slot + 8))
    store(segment, slots)
    store(segment + 8, mask)


@kernel(int64(int64, _WORDS, HASHES, _WORDS), nogil=False)
def find_rows(directory: int, row_of: Int64Array, query: HashArray, found: Int64Array) -> int:
    """Rows of a request's blocks: gives how many have one, or -number of a set of which no row is known yet.

    row_of: a row by number of a set, -1 where it is not known. query: uint64[n], sequence hashes. found: int64[2 * n].
    """
    n_blocks, at, rows, out = query.size, address_of(query), address_of(row_of), address_of(found)
    n_found = 0
    for index in range(n_blocks):
        number = _find(directory, load(at + (index << 3)))
        row = 0
        if number != 0:
            row = load(rows + (number << 3))
            if row < 0:
                return -number
            n_found += row != 0
        store(out + (index << 3), row)
    if n_found != 0:
        end, after = n_blocks, -1
        for index in range(n_blocks - 1, -1, -1):
            row = load(out + (index << 3))
            if row != after and index + 1 < n_blocks:
                end = index + 1
            after = row
            store(out + ((n_blocks + index) << 3), end)
    return n_found


@njit(inline="always")
def _is_set(bits: int, words: int, row: int, number: int) -> bool:
    return bool((load(bits + ((row * words + (number >> 6)) << 3)) >> (number & 63)) & 1)


@kernel(int64(_WORDS, _WORDS, int64, _WORDS, _WORDS, _WORDS, _WORDS, int64, _WORDS), nogil=False)
def walk(
    found: Int64Array,
    bits: Int64Array,
    words: int,
    numbers: Int64Array,
    starts: Int64Array,
    held_rows: Int64Array,
    held_bits: Int64Array,
    held_words: int,
    out: Int64Array,
) -> int:
    """Go on, for each candidate, from where its own blocks end, as long as it may count the next block or holds it.

    found: of find_rows. bits: bitmaps of `words` int64 a row, a bit for each number. numbers: int64[m], of each
    candidate, -1 for one that has none. starts: int64[m], its own leading blocks. held_rows: int64[n], of each block
    the row of held_bits, whose bits are positions of candidates. out: int64[m]: how many blocks each may count. Gives
    how many candidates count any.
    """
    n_blocks, n_candidates = found.size >> 1, numbers.size
    rows, bitmap = address_of(found), address_of(bits)
    held, held_bitmap = address_of(held_rows), address_of(held_bits)
    n_counting = 0
    for candidate in range(n_candidates):
        number, at, count = numbers[candidate], starts[candidate], 0
        while at < n_blocks:
            row = load(rows + (at << 3))
            if row != 0 and number >= 0 and _is_set(bitmap, words, row, number):
                end = load(rows + ((n_blocks + at) << 3))
                count += end - at
                at = end
            elif _is_set(held_bitmap, held_words, load(held + (at << 3)), candidate):
                at += 1
            else:
                break
        out[candidate] = count
        n_counting += count != 0
    return n_counting


@inlined
def _row_at(masks: int, blocks: int, rows: int, at: int) -> int:
    """Row of a request's block, looked up when it is first asked for; -number of a set of which no row is known yet."""
    row = load(rows + (at << 3))
    if row == UNREAD:
        row = 0
        number = _find(load(masks), load(blocks + (at << 3)))
        if number != 0:
            row = load(load(masks + 8) + (number << 3))
            if row < 0:
                return -number
        store(rows + (at << 3), row)
    return row


@inlined
def _end_of(masks: int, blocks: int, rows: int, ends: int, at: int, stop: int) -> int:
    """End of the stretch of blocks that have the row of the one at `at`; -number as `_row_at`."""
    end = load(ends + (at << 3))
    if end == 0:
        row = load(rows + (at << 3))
        end = at + 1
        while end < stop:
            following = _row_at(masks, blocks, rows, end)
            if following < 0:
                return following
            if following != row:
                break
            end += 1
        for index in range(at, end):
            store(ends + (index << 3), end)
    return end


@inlined
def _forget_rows(rows: int, ends: int, n_blocks: int) -> None:
    for index in range(n_blocks):
        store(rows + (index << 3), UNREAD)
        store(ends + (index << 3), 0)


@kernel(
    int64(int64, int64, HASHES, _WORDS, _WORDS, _FLOATS, float64, float64, _WORDS, _FLOATS),
    nogil=False,
)
def weigh(
    pooled: int,
    labelled: int,
    query: HashArray,
    numbers: Int64Array,
    overlap: Int64Array,
    effective: Float64Array,
    cxl_weight: float,
    moe_weight: float,
    counts: Int64Array,
    weighed: Float64Array,
) -> int:
    """Count both kinds for each candidate and weigh them, looking up no block that counts for nobody.

    pooled, labelled: `Answers.address`, 0 for none. query: uint64[n], sequence hashes. numbers: int64[m],
    of each candidate, -1 for one that has none. overlap: int64[m], its own leading blocks; effective: float64[m], what
    they count. counts: int64[2 * m + 3 * n], to be written: of each candidate the pooled blocks right behind its own
    ones that it may count, and the blocks among its own ones whose labels match; then of each block its row of pooled
    ones, UNREAD where nobody came; the rest is scratch. weighed: float64[2 * m], to be written: effective blocks with
    the pooled ones, and with both.

    Gives the first block at which a candidate that counts pooled ones ends, n for none, with bit POOLED_ANY and
    LABELLED_ANY set where anybody counts any; or -number of a set of pooled blocks of which no row is known yet, or
    -(number + LABELLED_SET) of one of labels.
    """
    n_blocks, n_candidates, blocks = query.size, numbers.size, address_of(query)
    rows = address_of(counts) + (n_candidates << 4)
    ends = rows + (n_blocks << 3)
    first_end, found = n_blocks, 0
    if pooled != 0:
        _forget_rows(rows, ends, n_blocks)
        bits, words = load(pooled + 16), load(pooled + 24)
        for candidate in range(n_candidates):
            number, start = numbers[candidate], overlap[candidate]
            at = start
            while number >= 0 and at < n_blocks:
                row = _row_at(pooled, blocks, rows, at)
                if row < 0:
                    return row
                if row == 0 or not _is_set(bits, words, row, number):
                    break
                at = _end_of(pooled, blocks, rows, ends, at, n_blocks)
                if at < 0:
                    return at
            counts[candidate] = at - start
            if at != start:
                found |= POOLED_ANY
                first_end = min(first_end, at)
    else:
        counts[:n_candidates] = 0
    if labelled != 0:
        rows = ends + (n_blocks << 3)
        _forget_rows(rows, ends, n_blocks)
        bits, words = load(labelled + 16), load(labelled + 24)
        stop = 0
        for candidate in range(n_candidates):
            stop = max(stop, overlap[candidate])
        stop = min(stop, n_blocks)
        for candidate in range(n_candidates):
            number, limit = numbers[candidate], min(overlap[candidate], n_blocks)
            at, count = 0, 0
            while number >= 0 and at < limit:
                row = _row_at(labelled, blocks, rows, at)
                if row < 0:
                    return row - LABELLED_SET
                end = _end_of(labelled, blocks, rows, ends, at, stop)
                if end < 0:
                    return end - LABELLED_SET
                end = min(end, limit)
                if row != 0 and _is_set(bits, words, row, number):
                    count += end - at
                at = end
            counts[n_candidates + candidate] = count
            if count != 0:
                found |= LABELLED_ANY
    else:
        counts[n_candidates : 2 * n_candidates] = 0
    for candidate in range(n_candidates):
        cached = effective[candidate] + cxl_weight * counts[candidate]
        weighed[candidate] = cached
        weighed[n_candidates + candidate] = cached + moe_weight * counts[n_candidates + candidate]
    return first_end | found

"""Fact sets by block, compiled: a map from sequence hash to set number, and walks along the blocks of a request.

What lives here: reading and changing the map, and counting blocks for each candidate. What must not: what a set
contains (block_facts.fact_sets). The kernels keep the GIL, so that no change runs during a query.

The map has SEGMENTS segments, selected by the hash's highest bits. A segment is a power of two of slots, and a slot is
two int64: hash and set number. Number 0 marks a free slot. The directory has three words per segment: the address of
its slots, the number of slots minus one, and the number of entries. A segment that is half full is moved to one with
twice the slots, so that a change never waits for more than one segment to move.

The rows of a request, `found`, are int64[2 * n]. The first half has, for each block, the row of the query's bitmaps in
which the ranks that may use the block are set; row 0 means no rank. The second half has the end of the stretch of
blocks that share the row.
"""

from __future__ import annotations

from numba import float64, int64, njit, types

from streams.core.ids import Float64Array, HashArray, Int64Array
from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import HASHES, address_of, load, store

_WORDS = types.Array(types.int64, 1, "C")
_FLOATS = types.Array(types.float64, 1, "C")

#: With a million blocks a segment has 4,000 of them, which move in about 40 us.
SEGMENTS = 256
_SEGMENT_SHIFT = 56
DIRECTORY_WORDS = 3

#: Bits that `weigh` sets in its result, which otherwise is a number of blocks.
POOLED_ANY, LABELLED_ANY = 1 << 32, 1 << 33
LABELLED_SET = 1 << 32
#: Marks a row that has not been looked up yet.
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
    """Return the number of a block's set, 0 for none."""
    return _find(directory, block)


@kernel(nogil=False)
def put_set(directory: int, block: int, number: int) -> bool:
    """Assign a set to a block; returns whether the segment is now half full and must be moved before the next call."""
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
    """Remove a block's entry, and move up the entries that collided with it."""
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
        # An entry may move if its home is not between the free slot and the entry, wrapping around.
        if (position - load(slot)) & mask >= (position - free) & mask:
            store(slots + (free << 4), load(slot))
            store(slots + (free << 4) + 8, load(slot + 8))
            free = position
    store(slots + (free << 4) + 8, 0)
    store(segment + 16, load(segment + 16) - 1)


@kernel(nogil=False)
def move_segment(directory: int, number: int, slots: int, mask: int) -> None:
    """Move a segment into `mask + 1` new slots, all zero, which must be more than the segment has entries."""
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
    """Write the rows of a request's blocks to `found`.

    row_of: int64[n_sets], the row of each set, -1 if it has none yet. query: uint64[n], sequence hashes. found:
    int64[2 * n]. Returns the number of blocks with a row other than 0, or -number of a set that has no row yet.
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
    """Walk on, for each candidate, from the end of its own blocks while it may use the next block or holds it.

    found: from find_rows, one after the other for each lookup of the request (see `weigh`). bits: bitmaps with `words`
    int64 per row and one bit per rank number. numbers: int64[m], the rank number of each candidate, -1 for none.
    starts: int64[m], the number of its own leading blocks. held_rows: int64[n], for each block the row of held_bits,
    which has one bit per candidate. out: int64[m], written: the number of blocks that each candidate may use. Returns
    the number of candidates that may use any block.
    """
    n_blocks, n_candidates = held_rows.size, numbers.size
    first_rows, bitmap, lookup_bytes = address_of(found), address_of(bits), n_blocks << 4
    last_rows = first_rows + (found.size << 3) - lookup_bytes
    held, held_bitmap = address_of(held_rows), address_of(held_bits)
    n_counting = 0
    for candidate in range(n_candidates):
        number, at, count = numbers[candidate], starts[candidate], 0
        while at < n_blocks:
            end, rows = at, first_rows
            while rows <= last_rows and end == at:
                row = load(rows + (at << 3))
                if row != 0 and number >= 0 and _is_set(bitmap, words, row, number):
                    end = load(rows + ((n_blocks + at) << 3))
                rows += lookup_bytes
            if end != at:
                count += end - at
                at = end
            elif _is_set(held_bitmap, held_words, load(held + (at << 3)), candidate):
                at += 1
            else:
                break
        out[candidate] = count
        n_counting += count != 0
    return n_counting


@kernel(
    int64(int64, int64, int64, int64, _WORDS, int64, int64, _WORDS, _WORDS, _WORDS, _WORDS),
    nogil=False,
)
def count_groups(
    rows: int,
    ends: int,
    n_keys: int,
    key_bytes: int,
    bits: Int64Array,
    words: int,
    n_groups: int,
    numbers: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    out: Int64Array,
) -> int:
    """Count by group the blocks that `weigh` or `walk` has counted for each candidate.

    rows, ends: addresses of the rows of the blocks' sets and of the ends of their stretches, for the first of n_keys
    keys; those of the next key are key_bytes after them. bits: bitmaps with n_groups parts of `words` int64 per row, as
    in QueryMasks. numbers: int64[m], the rank number of each candidate. starts: int64[m], its own leading blocks.
    counts: int64[m], what was counted. out: int64[n_groups * m], written: for each group, the blocks of each candidate.
    A block counts in the first group that has the candidate, under the first key by which the candidate may use it.
    Returns 0.
    """
    n_candidates, stride, bitmap = numbers.size, words * n_groups, address_of(bits)
    out[:] = 0
    for candidate in range(n_candidates):
        number, at, left = numbers[candidate], starts[candidate], counts[candidate]
        while left > 0:
            end, shift, row = at, 0, 0
            while shift < n_keys * key_bytes and end == at:
                row = load(rows + shift + (at << 3))
                if row > 0 and _is_set(bitmap, stride, row, number):
                    end = load(ends + shift + (at << 3))
                shift += key_bytes
            if end == at:  # a block of its own
                at += 1
                continue
            group = 0
            while group < n_groups - 1 and not _is_set(bitmap, stride, row, number + (words * (group + 1) << 6)):
                group += 1
            out[group * n_candidates + candidate] += end - at
            left -= end - at
            at = end
    return 0


@inlined
def _row_at(masks: int, blocks: int, rows: int, at: int) -> int:
    """Return the row of a block, looked up at the first call, or -number of a set that has no row yet."""
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
    """Return the end of the stretch of blocks that share the row of the one at `at`, or -number as `_row_at` does."""
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
    int64(int64, int64, HASHES, int64, _WORDS, _WORDS, _FLOATS, float64, float64, _WORDS, _FLOATS),
    nogil=False,
)
def weigh(
    pooled: int,
    labelled: int,
    query: HashArray,
    n_blocks: int,
    numbers: Int64Array,
    overlap: Int64Array,
    effective: Float64Array,
    cxl_weight: float,
    moe_weight: float,
    counts: Int64Array,
    weighed: Float64Array,
) -> int:
    """Count and weigh CXL-accessible and MoE-matching blocks of each candidate.

    Blocks that cannot count for any candidate are not looked up. pooled, labelled: `QueryMasks.address`, 0 for none.
    query: uint64[k * n], the keys under which each block's facts are: first its sequence hash, then the keys of what it
    is a part of (cxl.pooled_index); labels are under the first alone. numbers: int64[m], the rank number of each
    candidate, -1 for none. overlap: int64[m], its own leading blocks. effective: float64[m], the weight of those.
    counts: int64[2 * m + (2 * k + 1) * n], written: for each candidate the pooled blocks directly after its own that it
    may use, then for each candidate its own blocks whose labels match, then for each key its row of pooled blocks,
    UNREAD if no candidate needed it; the rest is scratch space. weighed: float64[2 * m], written: effective blocks with
    the pooled ones, then with both.

    Returns the first block at which a candidate that uses pooled blocks ends, n if there is none, with POOLED_ANY and
    LABELLED_ANY set if any candidate has such blocks. Returns -number of a set of pooled blocks that has no row yet, or
    -(number + LABELLED_SET) of a set of labels.
    """
    n_keys, n_candidates, blocks = query.size, numbers.size, address_of(query)
    rows = address_of(counts) + (n_candidates << 4)
    ends = rows + (n_keys << 3)
    first_end, found = n_blocks, 0
    if pooled != 0:
        _forget_rows(rows, ends, n_keys)
        bits, words = load(pooled + 16), load(pooled + 24)
        for candidate in range(n_candidates):
            number, start = numbers[candidate], overlap[candidate]
            at = start
            while number >= 0 and at < n_blocks:
                end, shift = at, 0
                while shift < n_keys << 3 and end == at:
                    row = _row_at(pooled, blocks + shift, rows + shift, at)
                    if row < 0:
                        return row
                    if row != 0 and _is_set(bits, words, row, number):
                        end = _end_of(pooled, blocks + shift, rows + shift, ends + shift, at, n_blocks)
                        if end < 0:
                            return end
                    shift += n_blocks << 3
                if end == at:
                    break
                at = end
            counts[candidate] = at - start
            if at != start:
                found |= POOLED_ANY
                first_end = min(first_end, at)
    else:
        counts[:n_candidates] = 0
    if labelled != 0:
        rows = ends + (n_keys << 3)
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

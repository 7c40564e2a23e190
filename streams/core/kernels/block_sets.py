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

import numpy as np
import numpy.typing as npt
from numba import int64, njit, types

from streams.core.ids import HashArray
from streams.core.kernels.compiling import kernel
from streams.core.kernels.match import HASHES
from streams.core.kernels.memory import address_of, load, store

Int64Array = npt.NDArray[np.int64]
_WORDS = types.Array(types.int64, 1, "C")

#: A million blocks are 4,000 a segment, which move in some 40 us.
SEGMENTS = 256
_SEGMENT_SHIFT = 56
DIRECTORY_WORDS = 3


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
    candidate, -1 for one that has none. starts: int64[m], its own leading blocks. held_rows: int64[n], or none: of each
    block the row of held_bits, whose bits are positions of candidates. out: int64[2 * m]: how many blocks each may
    count, and where its prefix ends. Gives the first block at which a candidate that counts any ends, n for none.
    """
    n_blocks, n_candidates = found.size >> 1, numbers.size
    rows, bitmap = address_of(found), address_of(bits)
    held, held_bitmap, target = address_of(held_rows), address_of(held_bits), address_of(out)
    any_held = held_rows.size != 0
    first_end = n_blocks
    for candidate in range(n_candidates):
        number, at, count = load(address_of(numbers) + (candidate << 3)), load(address_of(starts) + (candidate << 3)), 0
        while at < n_blocks:
            row = load(rows + (at << 3))
            if row != 0 and number >= 0 and _is_set(bitmap, words, row, number):
                end = load(rows + ((n_blocks + at) << 3))
                count += end - at
                at = end
            elif any_held and _is_set(held_bitmap, held_words, load(held + (at << 3)), candidate):
                at += 1
            else:
                break
        store(target + (candidate << 3), count)
        store(target + ((n_candidates + candidate) << 3), at)
        if count != 0 and at < first_end:
            first_end = at
    return first_end


@kernel(int64(_WORDS, _WORDS, int64, _WORDS, _WORDS, _WORDS), nogil=False)
def count_within(
    found: Int64Array, bits: Int64Array, words: int, numbers: Int64Array, limits: Int64Array, out: Int64Array
) -> int:
    """Count, for each candidate, the blocks before its limit that it may count; gives how many candidates count any.

    As of `walk`; limits: int64[m]. out: int64[m].
    """
    n_blocks = found.size >> 1
    rows, bitmap, target = address_of(found), address_of(bits), address_of(out)
    n_counting = 0
    for candidate in range(numbers.size):
        number = load(address_of(numbers) + (candidate << 3))
        limit = min(load(address_of(limits) + (candidate << 3)), n_blocks)
        at, count = 0, 0
        while number >= 0 and at < limit:
            end = min(load(rows + ((n_blocks + at) << 3)), limit)
            row = load(rows + (at << 3))
            if row != 0 and _is_set(bitmap, words, row, number):
                count += end - at
            at = end
        store(target + (candidate << 3), count)
        n_counting += count != 0
    return n_counting

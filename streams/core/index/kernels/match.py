"""Queries: how many leading blocks of a request each rank holds.

What lives here: reading the tree. What must not: changing anything. A query may run while another thread folds
records: it reads the version before and after, checks the bounds of every step, and tries again if the version changed.
"""

from __future__ import annotations

from numba import int64, njit, types

from streams.core.ids import HashArray, Int64Array
from streams.core.index.kernels import layout
from streams.core.index.kernels.fields import coverage_address
from streams.core.index.kernels.runs import find_child
from streams.core.index.kernels.tree import common_length
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import (
    HASHES,
    address_of,
    atomic_add,
    fence,
    load,
    load32,
    load_acquire,
    store,
    trailing_zeros,
    yield_processor,
)
from streams.core.kernels.words import get

#: The tree changed during the query: call again.
BUSY = -1
#: Some ranks hold blocks below the device tier: call match_tiers.
TIERED = -2
#: There are now more ranks than the caller's arrays can hold: call again with larger arrays.
GROW = -3
#: Tries within one call before it returns BUSY: tens of milliseconds, enough for a writer to run again after the system
#: suspended it in the middle of a change.
TRIES_MAX = 1 << 16

#: Words of an answer of match_tiers: rank << 32 | blocks, and blocks whose fastest copy is in each tier.
TIERED_WORDS = 5


@njit(inline="always")
def _emit(context: int, word: int, gone: int, blocks: int, out: int, found: int) -> int:
    """Write the results of columns whose match ends here; returns the new number of results."""
    ranks = load(context + (layout.RANK_OF << 3))
    while gone:
        column = (word << 6) + trailing_zeros(gone)
        gone &= gone - 1
        store(out + (found << 3), (load32(ranks + (column << 2)) << 32) | blocks)
        found += 1
    return found


@njit(inline="always")
def _match_once(context: int, query: int, n_blocks: int, out: int, alive: int, words_max: int) -> int:
    version = load_acquire(context + (layout.VERSION << 3))
    if version & 1:
        return BUSY
    if load(context + (layout.N_LOWER_FACTS << 3)) != 0:
        return TIERED
    hashes = load(context + (layout.LOCAL << 3))
    runs = load(context + (layout.RUNS << 3))
    words = load(context + (layout.N_WORDS << 3))
    if words > words_max:
        return GROW
    runs_max, blocks_max = load(context + (layout.RUNS_MAX << 3)), load(context + (layout.BLOCKS_MAX << 3))
    run, done, found = 0, 0, 0
    while done < n_blocks:
        child = find_child(context, run, load(query + (done << 3)))
        if child < 0:
            break
        if child >= runs_max:
            return BUSY
        line = runs + (child << 6)
        start, length = load32(line + layout.RUN_START), load32(line + layout.RUN_LENGTH)
        if length <= 0 or start < 0 or start + length > blocks_max:
            return BUSY
        left = 0
        if words == 1:
            coverage = load(line + layout.RUN_COVERAGE)
            if run == 0:
                left = coverage & load(load(context + (layout.LIVE << 3)))
            else:
                before = load(alive)
                left = before & coverage
                if left != before:
                    found = _emit(context, 0, before & ~coverage, done, out, found)
            store(alive, left)
        else:
            live = load(context + (layout.LIVE << 3))
            for word in range(words):
                address = line + layout.RUN_COVERAGE + (word << 3)
                if word >= layout.INLINE_WORDS:
                    address = coverage_address(context, child, word)
                coverage = load(address)
                if run == 0:
                    before = coverage & load(live + (word << 3))
                else:
                    before = load(alive + (word << 3))
                    gone = before & ~coverage
                    if gone:
                        found = _emit(context, word, gone, done, out, found)
                    before &= coverage
                store(alive + (word << 3), before)
                left |= before
        run = child
        if left == 0:
            break
        same = common_length(query + (done << 3), hashes + (start << 3), min(length, n_blocks - done))
        done += same
        if same < length:
            break
    if run != 0:
        for word in range(words):
            found = _emit(context, word, load(alive + (word << 3)), done, out, found)
    fence()
    if load_acquire(context + (layout.VERSION << 3)) != version:
        return BUSY
    return found


@njit(inline="always")
def _match_tiers_once(context: int, query: int, n_blocks: int, out: int, state: int) -> int:
    """Match once.

    state: for each rank a stamp, the tiers in which it holds this run, and four counts; then the ranks still matching.
    """
    version = load_acquire(context + (layout.VERSION << 3))
    if version & 1:
        return BUSY
    hashes = load(context + (layout.LOCAL << 3))
    runs = load(context + (layout.RUNS << 3))
    words = load(context + (layout.N_WORDS << 3))
    runs_max, blocks_max = load(context + (layout.RUNS_MAX << 3)), load(context + (layout.BLOCKS_MAX << 3))
    ranks, tiers, live = get(context, layout.RANK_OF), get(context, layout.TIER_OF), get(context, layout.LIVE)
    # The stamp keeps growing from call to call, so that nothing needs clearing.
    stamp = load(state)
    n_ranks = load(state + 8)
    rows = state + 16
    matching = rows + n_ranks * 48
    n_matching = 0
    run, done, found = 0, 0, 0
    while done < n_blocks:
        child = find_child(context, run, load(query + (done << 3)))
        if child < 0:
            break
        if child >= runs_max:
            return BUSY
        line = runs + (child << 6)
        start, length = load32(line + layout.RUN_START), load32(line + layout.RUN_LENGTH)
        if length <= 0 or start < 0 or start + length > blocks_max:
            return BUSY
        stamp += 1
        store(state, stamp)
        for word in range(words):
            bits = load(coverage_address(context, child, word)) & load(live + (word << 3))
            while bits:
                column = (word << 6) + trailing_zeros(bits)
                bits &= bits - 1
                rank = load32(ranks + (column << 2))
                if rank >= n_ranks:
                    return GROW
                row = rows + rank * 48
                if load(row) != stamp:
                    if run == 0:
                        store(matching + (n_matching << 3), rank)
                        n_matching += 1
                        for tier in range(layout.N_TIERS):
                            store(row + 16 + (tier << 3), 0)
                    store(row, stamp)
                    store(row + 8, 0)
                store(row + 8, load(row + 8) | (1 << load32(tiers + (column << 2))))
        same = common_length(query + (done << 3), hashes + (start << 3), min(length, n_blocks - done))
        kept = 0
        for index in range(n_matching):
            rank = load(matching + (index << 3))
            row = rows + rank * 48
            if load(row) != stamp:
                found = _emit_tiers(row, rank, done, out, found)
                continue
            count = row + 16 + (trailing_zeros(load(row + 8)) << 3)
            store(count, load(count) + same)
            store(matching + (kept << 3), rank)
            kept += 1
        n_matching = kept
        run = child
        if n_matching == 0:
            break
        done += same
        if same < length:
            break
    for index in range(n_matching):
        rank = load(matching + (index << 3))
        found = _emit_tiers(rows + rank * 48, rank, done, out, found)
    fence()
    if load_acquire(context + (layout.VERSION << 3)) != version:
        return BUSY
    return found


@njit(inline="always")
def _emit_tiers(row: int, rank: int, blocks: int, out: int, found: int) -> int:
    answer = out + found * (TIERED_WORDS << 3)
    store(answer, (rank << 32) | blocks)
    for tier in range(layout.N_TIERS):
        store(answer + ((tier + 1) << 3), load(row + 16 + (tier << 3)))
    return found + 1


@njit(inline="always")
def _before_next_try(context: int, tries: int) -> None:
    """After an interrupted try: after some tries, ask the writer to pause, and later also yield the processor to it."""
    if tries == layout.TRIES_BEFORE_WAITING:
        atomic_add(context + (layout.WAITING << 3), 1)
    if tries >= layout.TRIES_BEFORE_YIELDING:
        yield_processor()


@njit(inline="always")
def _after_tries(context: int, tries: int) -> None:
    """Withdraw the request to pause. `tries` is the number of the last try."""
    if tries > layout.TRIES_BEFORE_WAITING:
        atomic_add(context + (layout.WAITING << 3), -1)


@kernel(int64(int64, HASHES, types.Array(types.int64, 1, "C"), types.Array(types.int64, 1, "C")), nogil=False)
def match_tiers(context: int, query: HashArray, out: Int64Array, state: Int64Array) -> int:
    """Match a request when ranks hold blocks in several tiers; returns the number of ranks found, BUSY or GROW.

    out: int64[n_ranks * TIERED_WORDS]. state: int64[2 + n_ranks * 7], zeros at first except state[1] = n_ranks. Returns
    GROW if there are more ranks than n_ranks.
    """
    found, tries = BUSY, 0
    for tries in range(TRIES_MAX):
        found = _match_tiers_once(context, address_of(query), query.size, address_of(out), address_of(state))
        if found != BUSY:
            break
        _before_next_try(context, tries)
    _after_tries(context, tries)
    return found


@kernel(int64(int64, HASHES, types.Array(types.int64, 1, "C")), nogil=False)
def match(context: int, query: HashArray, work: Int64Array) -> int:
    """Match a request; returns the number of ranks found, BUSY, TIERED or GROW.

    The GIL is kept, since the call takes microseconds, and waiting for the GIL while another thread folds would take
    longer.
    query: uint64[n_blocks]. The answers are one int64 per rank, rank << 32 | blocks, in an array that the caller keeps.

    work: int64[words * 65], where `words` is the number of coverage words: one word per column for the answer, and one
    per 64 columns for the columns that still match.
    """
    words = work.size // 65
    out = address_of(work)
    alive = out + (words << 9)
    found, tries = BUSY, 0
    for tries in range(TRIES_MAX):
        found = _match_once(context, address_of(query), query.size, out, alive, words)
        if found != BUSY:
            break
        _before_next_try(context, tries)
    _after_tries(context, tries)
    return found

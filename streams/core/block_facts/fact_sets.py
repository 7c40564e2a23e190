"""Sets of facts by sequence hash, and which ranks may use which block.

A rank may use a block if the block counts for it in a query: because the rank can read it from a pool, or because the
rank's labels of it match. What lives here: `FactSets`, over a compiled map, and the
`QueryMasks` of each `FactQuery`: bitmaps with the ranks that may use the blocks of each fact set. What must not: what a
fact is (block_facts.moe_labels, cxl.pooled_index).

Blocks that were stored together have the same facts, so that a million blocks have few sets. A block is one slot of a
map. The ranks that may use it are worked out once per set, not once per block, and again when the fleet has changed.
Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import numpy as np

from streams.core.ids import U64_MASK, Float64Array, HashArray, Int64Array, RankId, WorkerId
from streams.core.index.interface import Candidates, HolderBitmaps
from streams.errors import IndexFull

#: Sets in use at a time. Only memory limits them: a set of four facts takes about 400 bytes, one of sixteen 1 kB, and
#: each query 8 bytes more per set. Pooled blocks that were stored together share a set. A label belongs to one rank, so
#: that there are 635,376 sets if any four of 64 ranks may hold a block; all of these must fit.
SETS_MAX = 1_048_576

#: Cached steps from a set to the set with one more fact; beyond this limit the cache is cleared. A step saves the 2 us
#: that building a set takes.
_STEPS_MAX = 65_536

#: Cached queries: models, or slices of experts that requests select. Beyond this limit the cache is cleared.
_QUERIES_CACHED_MAX = 64

#: Mask rows of one query, each a different set of ranks. Beyond this limit the next request starts over with no rows,
#: because sets that ended leave theirs behind. 64 ranks take 10 MB then; a row takes a few microseconds to rebuild.
ROWS_MAX = 65_536

_WORD_BYTES = 8
_EMPTY: frozenset[int] = frozenset()
_UNKNOWN = -1
_BLOCKS_MASK = (1 << 32) - 1


class RankNumbering:
    """Numbers for the ranks of a fleet, used as bit positions of masks. Recreated when the fleet changes.

    words: 64-bit words of a mask. workers: for each worker the bits of its ranks.
    """

    def __init__(self, ranks: tuple[RankId, ...]) -> None:
        self.ranks = ranks
        self.number = {rank: index for index, rank in enumerate(ranks)}
        self.words = max(1, -(-len(ranks) // 64))
        self.workers: dict[WorkerId, int] = {}
        for index, rank in enumerate(ranks):
            self.workers[rank.worker_id] = self.workers.get(rank.worker_id, 0) | 1 << index

    def mask_of(self, rank: RankId) -> int:
        """Return the bit of a rank; 0 for a rank that has no number."""
        number = self.number.get(rank)
        return 0 if number is None else 1 << number

    def of(self, candidates: Candidates) -> Int64Array:
        """Return the number of each candidate, -1 for none: int64[n], cached with the candidates."""
        known = candidates.kept.get("numbers")
        if known is None or known[0] is not self:
            numbers = np.array([self.number.get(rank, -1) for rank in candidates.ranks], dtype=np.int64)
            known = candidates.kept["numbers"] = (self, numbers)
        found: Int64Array = known[1]
        return found


class QueryMasks:
    """The ranks that may use the blocks of each set, for one query: one mask row per different set of ranks.

    row_of: int64 by set number, _UNKNOWN for a set that no request has needed yet. bits: the rows, `words` int64 each,
    one bit per rank number. Row 0 has no ranks. n_rows: rows in use, including row 0; see ROWS_MAX. address: address of
    an int64[4] for kernels: addresses of the map, of row_of and of bits, and the words of a row.

    With n_groups groups of facts, a row has n_groups parts. The first has the ranks that may use the set's blocks, and
    part g those that may use them by a fact of the first g groups.
    """

    __slots__ = (
        *("_layout", "_mask_of", "_rows", "address", "bits", "n_groups", "n_rows", "numbers", "row_of", "sets"),
        "words",
    )

    def __init__(
        self, sets: FactSets, numbers: RankNumbering, mask_of: Callable[[frozenset[int]], int], n_groups: int = 1
    ) -> None:
        self.sets = sets
        self.numbers = numbers
        self.n_groups = n_groups
        self.words = numbers.words * n_groups
        self._mask_of = mask_of
        self._rows: dict[int, int] = {0: 0}
        self.n_rows = 1
        self.bits = np.zeros(self.words * 4, dtype=np.int64)
        self.row_of = np.full(16, _UNKNOWN, dtype=np.int64)
        self._layout = np.array([sets.map_address, 0, 0, self.words], dtype=np.int64)
        self.address = int(self._layout.ctypes.data)
        self._note_addresses()

    def _note_addresses(self) -> None:
        self._layout[1:3] = self.row_of.ctypes.data, self.bits.ctypes.data

    def add_set(self, number: int, facts: frozenset[int]) -> None:
        """Work out which ranks may use a set's blocks."""
        mask = self._mask_of(facts)
        row = self._rows.get(mask)
        if row is None:
            row = self._rows[mask] = self.n_rows
            self.n_rows += 1
            if self.n_rows * self.words > len(self.bits):
                # A new array: a RequestPath that still reads the older one refers only to rows that are in it.
                self.bits = np.concatenate([self.bits, np.zeros_like(self.bits)])
                self._note_addresses()
            for word in range(self.words):
                part = mask >> (64 * word) & U64_MASK
                self.bits[row * self.words + word] = _signed(part)
        self.row_of[number] = row

    def widen(self, n_sets: int) -> None:
        """Grow `row_of` to at least this many sets."""
        if len(self.row_of) < n_sets:
            more = np.full(max(n_sets, 2 * len(self.row_of)) - len(self.row_of), _UNKNOWN, dtype=np.int64)
            self.row_of = np.concatenate([self.row_of, more])
            self._note_addresses()

    def drop_set(self, number: int) -> None:
        """Drop a set's row reference, because another set will reuse its number."""
        if number < len(self.row_of):
            self.row_of[number] = _UNKNOWN


class RequestPath:
    """The mask rows of a request's blocks for one query, as they were at the lookup; later changes do not affect it.

    found: int64[k, 2 * n], for each of the keys of a block, see kernels.fact_sets.
    """

    __slots__ = ("_bits", "_n_groups", "_numbers", "_sets", "_words", "found")

    def __init__(self, masks: QueryMasks, found: Int64Array) -> None:
        self._sets = masks.sets
        self._n_groups = masks.n_groups
        self._bits, self._words, self._numbers = masks.bits, masks.words, masks.numbers
        self.found = found

    def rows(self) -> Int64Array:
        """Return the row of each block under its first key, 0 for a block that no rank may use: int64[n]."""
        return self.found[0, : self.found.shape[1] // 2]

    def walk(self, candidates: Candidates, starts: Int64Array, held: HolderBitmaps) -> Int64Array | None:
        """Walk on from the end of each candidate's own blocks, over blocks that it may use or holds.

        starts: int64[m], own leading blocks. held: the candidates that hold each block, see HolderBitmaps. Returns the
        number of blocks that each candidate may use, int64[m], or None if no candidate may use any.
        """
        return self._sets.walk(self.found.ravel(), self._bits, self._words, self._numbers.of(candidates), starts, held)

    def by_group(self, candidates: Candidates, starts: Int64Array, counts: Int64Array) -> Int64Array:
        """Return what `walk` has counted by group of facts: int64[n_groups, m]."""
        n_keys, row_bytes = len(self.found), self.found.shape[1] * _WORD_BYTES
        rows = int(self.found.ctypes.data)
        return self._sets.count_groups(
            rows,
            rows + row_bytes // 2,
            n_keys,
            row_bytes,
            self._bits,
            self._numbers.words,
            self._n_groups,
            self._numbers.of(candidates),
            starts,
            counts,
        )


class FactQuery:
    """A query of the fact sets on behalf of a fleet's ranks; cached for as long as the fleet is the same.

    mask_of: returns, for the facts of a set, the mask of the ranks that may use its blocks. It is evaluated once per
    set, until invalidate_masks is called. groups: names of groups of facts, if blocks are counted by group; a mask has
    the parts of a row of QueryMasks then, the first one in its lowest bits.
    """

    __slots__ = ("_key", "_mask_of", "groups", "numbers", "sets")

    def __init__(
        self,
        sets: FactSets,
        key: Hashable,
        numbers: RankNumbering,
        mask_of: Callable[[frozenset[int]], int],
        groups: tuple[str, ...] = ("",),
    ) -> None:
        self.sets = sets
        self.numbers = numbers
        self.groups = groups
        self._key = key, groups
        self._mask_of = mask_of

    def masks(self) -> QueryMasks:
        """Return the masks worked out so far."""
        return self.sets.masks(self._key, self.numbers, self._mask_of, len(self.groups))

    def path(self, keys: HashArray) -> RequestPath | None:
        """Look up a whole request; None if no rank may use any of its blocks. keys: see FactSets.weigh."""
        return self.sets.path(keys, self.masks())


class FactQueries:
    """A cache of queries, by what they select."""

    def __init__(self) -> None:
        self._cached: dict[Hashable, FactQuery] = {}

    def get(self, key: Hashable, numbers: RankNumbering) -> FactQuery | None:
        """Return the cached query, None if there is none for this fleet."""
        query = self._cached.get(key)
        return query if query is not None and query.numbers is numbers else None

    def put(self, key: Hashable, query: FactQuery) -> FactQuery:
        """Cache a query and return it."""
        if len(self._cached) >= _QUERIES_CACHED_MAX:
            self._cached.clear()
        self._cached[key] = query
        return query


class WeighedMatches(NamedTuple):
    """CXL-accessible and MoE-matching blocks of m candidates, and the candidates' effective blocks with these.

    cxl_accessible_scores: int64[m], pooled blocks directly after a candidate's own leading blocks that it may use;
    moe_scores: int64[m], its own leading blocks whose labels match; either is None if it is 0 for all. with_pooled,
    with_both: float64[m], effective blocks with the pooled blocks, and with both kinds. first_end: the first block at
    which a candidate that uses pooled blocks ends, n if there is none. rows: int64[n], for each block at which such a
    candidate ends, the block's row, 0 if no pool has it; other entries have no meaning. by_group: int64[g, m], the
    CXL-accessible blocks by group of pools; None if there is one group.
    """

    cxl_accessible_scores: Int64Array | None
    moe_scores: Int64Array | None
    with_pooled: Float64Array
    with_both: Float64Array
    first_end: int
    rows: Int64Array
    by_group: Int64Array | None = None

    def of(self, at: Int64Array) -> WeighedMatches:
        """Return the same of the candidates at these positions: int64[k]."""
        return WeighedMatches(
            None if self.cxl_accessible_scores is None else self.cxl_accessible_scores[at],
            None if self.moe_scores is None else self.moe_scores[at],
            self.with_pooled[at],
            self.with_both[at],
            self.first_end,
            self.rows,
            None if self.by_group is None else self.by_group[:, at],
        )


class FactSets:
    """The facts of each block, as numbers. A fact can be added to a block several times; the last removal removes it.

    _sets: the facts of each set, by set number; number 0 is the empty set. _uses: how many blocks have the set.
    _duplicates: for each (block, fact) added more than once, the number of additional times. map_address: where the
    compiled map from a block to its set is.
    """

    def __init__(self) -> None:
        from streams.core.block_facts.kernels import fact_sets as kernels

        self._kernels = kernels
        self._slots = [np.zeros(32, dtype=np.int64) for _ in range(kernels.SEGMENTS)]
        words = [(int(slots.ctypes.data), len(slots) // 2 - 1, 0) for slots in self._slots]
        self._directory = np.array(words, dtype=np.int64).ravel()
        self.map_address = int(self._directory.ctypes.data)
        self._sets: list[frozenset[int]] = [_EMPTY]
        self._uses: list[int] = [0]
        self._numbers: dict[frozenset[int], int] = {}
        self._free: list[int] = []
        self._steps: dict[tuple[int, int], int] = {}
        self._duplicates: Counter[tuple[int, int]] = Counter()
        self._masks: dict[Hashable, QueryMasks] = {}
        self._own_numbers = np.arange(1, dtype=np.int64)  # in place of rows, so that a look-up returns sets
        self._n_blocks = 0

    def __len__(self) -> int:
        """Return the number of blocks that have any fact."""
        return self._n_blocks

    def add_fact(self, block: int, fact: int) -> None:
        """Add a fact to a block; raises IndexFull, and changes nothing, if that would be one set too many."""
        before = self._get(block)
        after = self._steps.get((before, fact))
        if after is None:
            facts = self._sets[before]
            if fact in facts:
                self._duplicates[block, fact] += 1
                return
            after = self._number_of(facts | {fact})
            if len(self._steps) >= _STEPS_MAX:
                self._steps.clear()
            self._steps[before, fact] = after
        self._uses[after] += 1
        self._put(block, after)
        if before:
            self._release(before)
        else:
            self._n_blocks += 1

    def remove_fact(self, block: int, fact: int) -> None:
        """Undo one addition of a fact to a block; a fact that the block does not have changes nothing."""
        before = self._get(block)
        facts = self._sets[before]
        if fact not in facts:
            return
        if self._duplicates and (block, fact) in self._duplicates:
            self._duplicates[block, fact] -= 1
            if not self._duplicates[block, fact]:
                del self._duplicates[block, fact]
            return
        if len(facts) == 1:
            self._drop(block)
            self._n_blocks -= 1
        else:
            # A removal is never refused: its set may exceed the limit, until the sets that it replaces are released.
            after = self._number_of(facts - {fact}, sets_max=len(self._numbers) + 1)
            self._uses[after] += 1
            self._put(block, after)
        self._release(before)

    def invalidate_masks(self) -> None:
        """Drop all masks, because the fleet or the meaning of facts has changed."""
        self._masks.clear()

    def masks(
        self, query: Hashable, numbers: RankNumbering, mask_of: Callable[[frozenset[int]], int], n_groups: int = 1
    ) -> QueryMasks:
        """Return the masks of a query, see FactQuery. They are valid until a fact is added or removed."""
        masks = self._masks.get(query)
        if masks is None or masks.numbers is not numbers or masks.n_rows > ROWS_MAX:
            if len(self._masks) >= _QUERIES_CACHED_MAX:
                self._masks.clear()
            masks = self._masks[query] = QueryMasks(self, numbers, mask_of, n_groups)
        masks.widen(len(self._sets))
        return masks

    def path(self, keys: HashArray, masks: QueryMasks) -> RequestPath | None:
        """Look up a request; None if no rank may use any of its blocks. keys: see `weigh`."""
        lookups = np.atleast_2d(keys)
        found = np.zeros((len(lookups), 2 * lookups.shape[1]), dtype=np.int64)
        n_found_of_all = 0
        for of_lookup, into in zip(lookups, found, strict=True):
            while (n_found := self._find(masks.row_of, of_lookup, into)) < 0:
                self._add_set_to(masks, -n_found)
            n_found_of_all += n_found
        return RequestPath(masks, found) if n_found_of_all else None

    def facts_along(self, keys: HashArray, start: int) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yield the stretches of a request's blocks, from `start` on, that have the same facts: first, end, facts.

        keys: see `weigh`. The facts of a block are those under all of its keys, and may be none.
        """
        n_blocks = keys.shape[-1]
        lookups = [found for found in map(self._numbers_along, np.atleast_2d(keys)) if found is not None]
        at = start
        while at < n_blocks:
            end, facts = n_blocks, _EMPTY
            for found in lookups:
                end = min(end, found.item(n_blocks + at))
                facts |= self._sets[found.item(at)]
            yield at, end, facts
            at = end

    def _numbers_along(self, keys: HashArray) -> Int64Array | None:
        """The number of each block's set, and the end of its stretch: int64[2 * n]; None if no block has a set."""
        if len(self._own_numbers) < len(self._sets):
            self._own_numbers = np.arange(2 * len(self._sets), dtype=np.int64)
        found = np.empty(2 * len(keys), dtype=np.int64)
        return found if self._find(self._own_numbers, keys, found) else None

    def _add_set_to(self, masks: QueryMasks, number: int) -> None:
        masks.add_set(number, self._sets[number])

    def _number_of(self, facts: frozenset[int], sets_max: int = SETS_MAX) -> int:
        number = self._numbers.get(facts)
        if number is None:
            # Free numbers do not count: after many removals there are more numbers than the limit.
            if len(self._numbers) >= sets_max:
                raise IndexFull(f"blocks already have {sets_max} different sets of facts", sets_max=sets_max)
            if self._free:
                number = self._free.pop()
                self._sets[number] = facts
            else:
                number = len(self._sets)
                self._sets.append(facts)
                self._uses.append(0)
            self._numbers[facts] = number
        return number

    def _release(self, number: int) -> None:
        self._uses[number] -= 1
        if self._uses[number]:
            return
        del self._numbers[self._sets[number]]
        self._sets[number] = _EMPTY
        self._free.append(number)
        self._steps.clear()  # some steps lead to this set
        for masks in self._masks.values():
            masks.drop_set(number)

    # -- the map and the walks, see kernels.fact_sets ----------------------------------------------------------------

    def _get(self, block: int) -> int:
        number: int = self._kernels.get_set(self.map_address, _signed(block))
        return number

    def _put(self, block: int, number: int) -> None:
        if self._kernels.put_set(self.map_address, _signed(block), number):
            segment = block >> 56
            slots = np.zeros(2 * len(self._slots[segment]), dtype=np.int64)
            self._kernels.move_segment(self.map_address, segment, int(slots.ctypes.data), len(slots) // 2 - 1)
            self._slots[segment] = slots

    def _drop(self, block: int) -> None:
        self._kernels.drop_set(self.map_address, _signed(block))

    def _find(self, row_of: Int64Array, sequence: HashArray, found: Int64Array) -> int:
        n_found: int = self._kernels.find_rows(self.map_address, row_of, sequence, found)
        return n_found

    def walk(
        self,
        found: Int64Array,
        bits: Int64Array,
        words: int,
        numbers: Int64Array,
        starts: Int64Array,
        held: HolderBitmaps,
    ) -> Int64Array | None:
        """See RequestPath.walk and kernels.fact_sets.walk."""
        out = np.empty(len(numbers), dtype=np.int64)
        return out if self._kernels.walk(found, bits, words, numbers, starts, *held, out) else None

    def count_groups(
        self,
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
    ) -> Int64Array:
        """See kernels.fact_sets.count_groups; returns int64[n_groups, m]."""
        out = np.empty((n_groups, len(numbers)), dtype=np.int64)
        self._kernels.count_groups(
            rows, ends, n_keys, key_bytes, bits, words, n_groups, numbers, starts, counts, out.reshape(-1)
        )
        return out

    def weigh(
        self,
        pooled: QueryMasks | None,
        labelled: QueryMasks | None,
        keys: HashArray,
        numbers: Int64Array,
        overlap: Int64Array,
        effective: Float64Array,
        cxl_weight: float,
        moe_weight: float,
    ) -> WeighedMatches:
        """Count and weigh CXL-accessible and MoE-matching blocks of each candidate; see kernels.fact_sets.weigh.

        pooled, labelled: masks of fact sets of this class. keys: uint64[n] or uint64[k, n], contiguous, the keys under
        which each block's facts are; labels are under the first alone. numbers: int64[m], the rank
        number of each candidate, -1 for none. overlap: int64[m], its own leading blocks. effective: float64[m], the
        weight of those.
        """
        kernels, m = self._kernels, len(numbers)
        n_keys, n_blocks = keys.size, keys.shape[-1]
        counts = np.empty(2 * m + 2 * n_keys + n_blocks, dtype=np.int64)
        weighed = np.empty(2 * m)
        while True:
            found = kernels.weigh(
                0 if pooled is None else pooled.address,
                0 if labelled is None else labelled.address,
                keys.reshape(-1),
                n_blocks,
                numbers,
                overlap,
                effective,
                cxl_weight,
                moe_weight,
                counts,
                weighed,
            )
            if found >= 0:
                accessible = counts[:m] if found & kernels.POOLED_ANY else None
                by_group = None
                if accessible is not None and pooled is not None and pooled.n_groups > 1:
                    at = int(counts.ctypes.data) + 2 * m * _WORD_BYTES
                    by_group = self.count_groups(
                        at,
                        at + n_keys * _WORD_BYTES,
                        n_keys // n_blocks,
                        n_blocks * _WORD_BYTES,
                        pooled.bits,
                        pooled.numbers.words,
                        pooled.n_groups,
                        numbers,
                        overlap,
                        accessible,
                    )
                rows = counts[2 * m : 2 * m + n_keys]
                if n_keys != n_blocks:  # a block that is in a pool under any key is in one
                    rows = (rows.reshape(-1, n_blocks) != 0).any(axis=0).astype(np.int64)
                return WeighedMatches(
                    accessible,
                    counts[m : 2 * m] if found & kernels.LABELLED_ANY else None,
                    weighed[:m],
                    weighed[m:],
                    found & _BLOCKS_MASK,
                    rows,
                    by_group,
                )
            if found < -kernels.LABELLED_SET:
                assert labelled is not None  # the kernel found a set in its map
                labelled.sets._add_set_to(labelled, -found - kernels.LABELLED_SET)
            else:
                assert pooled is not None
                pooled.sets._add_set_to(pooled, -found)


def _signed(value: int) -> int:
    """Return a u64 as the int64 with the same bits, which is the type that kernels take."""
    return value - (1 << 64) if value >> 63 else value

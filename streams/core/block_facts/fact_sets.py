"""What is told of blocks beside who holds them: sets of facts by sequence hash, and who may count which block.

What lives here: `FactSets`, its two maps (of compiled kernels, and plain), and the `QueryMasks` to each `FactQuery`,
bitmaps that say for each set of facts who may count a block that has it. What must not: what a fact is
(core.moe_labels, cxl.pooled_index).

Blocks that went together have the same facts, so that a million of them have few sets: a block is one slot of a map,
and who may count it is worked out once a set, not once a block, and again when the fleet has changed. Not thread-safe.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from streams.core.ids import U64_MASK, Float64Array, HashArray, Int64Array, RankId, WorkerId
from streams.core.index.interface import Candidates, HolderBitmaps
from streams.errors import IndexFull

#: Sets in use at a time. Memory alone limits them: some 400 bytes each where four facts are a set, a kilobyte for
#: sixteen, and 8 for each question that is asked. Pooled blocks that went together share theirs. Labels are of a rank:
#: where any four of 64 ranks hold a block there are 635,376, which must find room.
SETS_MAX = 1_048_576

#: Steps from a set to the next one remembered; beyond it all are forgotten. Each saves 2 us of making a set.
_STEPS_MAX = 65_536
#: Questions whose answers are kept: models, or slices of experts that requests ask for. Beyond it all are forgotten.
_QUERIES_CACHED_MAX = 64

#: Rows of one question's answers, each another mask of ranks; beyond it they begin anew, at the next request. Sets that
#: ended leave theirs behind. With 64 ranks these are 10 MB, and to work one out again takes some microseconds.
ROWS_MAX = 65_536


_EMPTY: frozenset[int] = frozenset()
_UNKNOWN = -1
_BLOCKS_MASK = (1 << 32) - 1


class RankNumbering:
    """Ranks of a fleet by number, as bits of an answer; a value, made anew when the fleet changes.

    workers: for each worker the bits of its ranks.
    """

    def __init__(self, ranks: tuple[RankId, ...]) -> None:
        self.ranks = ranks
        self.number = {rank: index for index, rank in enumerate(ranks)}
        self.words = max(1, -(-len(ranks) // 64))
        self.workers: dict[WorkerId, int] = {}
        for index, rank in enumerate(ranks):
            self.workers[rank.worker_id] = self.workers.get(rank.worker_id, 0) | 1 << index

    def mask_of(self, rank: RankId) -> int:
        """The bit of a rank; 0 for one that is none of them."""
        number = self.number.get(rank)
        return 0 if number is None else 1 << number

    def of(self, candidates: Candidates) -> Int64Array:
        """Number of each candidate, -1 for one that is none of them: int64[n], kept with the candidates."""
        known = candidates.kept.get("numbers")
        if known is None or known[0] is not self:
            numbers = np.array([self.number.get(rank, -1) for rank in candidates.ranks], dtype=np.int64)
            known = candidates.kept["numbers"] = (self, numbers)
        found: Int64Array = known[1]
        return found


class QueryMasks:
    """Who may count a block, by its set, for one question; as many bits as there are numbers of ranks.

    row_of: int64 by number of a set, UNKNOWN where nobody asked yet. Row 0 of bits is nobody's; n_rows: with it, see
    ROWS_MAX. address: of int64[4],
    where the map, row_of and bits lie, and words of a row, for kernels.
    """

    __slots__ = ("_make", "_places", "_rows", "address", "bits", "n_rows", "numbers", "row_of", "sets", "words")

    def __init__(self, sets: FactSets, numbers: RankNumbering, make: Callable[[frozenset[int]], int]) -> None:
        self.sets = sets
        self.numbers = numbers
        self.words = numbers.words
        self._make = make
        self._rows: dict[int, int] = {0: 0}
        self.n_rows = 1
        self.bits = np.zeros(self.words * 4, dtype=np.int64)
        self.row_of = np.full(16, _UNKNOWN, dtype=np.int64)
        self._places = np.array([sets.map_address, 0, 0, self.words], dtype=np.int64)
        self.address = int(self._places.ctypes.data)
        self._note_places()

    def _note_places(self) -> None:
        self._places[1:3] = self.row_of.ctypes.data, self.bits.ctypes.data

    def learn(self, number: int, facts: frozenset[int]) -> None:
        """Work out who may count a set's blocks."""
        mask = self._make(facts)
        row = self._rows.get(mask)
        if row is None:
            row = self._rows[mask] = self.n_rows
            self.n_rows += 1
            if self.n_rows * self.words > len(self.bits):
                # Another array: whoever reads the older one has all the rows that he knows of.
                self.bits = np.concatenate([self.bits, np.zeros_like(self.bits)])
                self._note_places()
            for word in range(self.words):
                part = mask >> (64 * word) & U64_MASK
                self.bits[row * self.words + word] = _signed(part)
        self.row_of[number] = row

    def widen(self, n_sets: int) -> None:
        """Have room for so many sets."""
        if len(self.row_of) < n_sets:
            more = np.full(max(n_sets, 2 * len(self.row_of)) - len(self.row_of), _UNKNOWN, dtype=np.int64)
            self.row_of = np.concatenate([self.row_of, more])
            self._note_places()

    def forget(self, number: int) -> None:
        """A set's number will be another's."""
        if number < len(self.row_of):
            self.row_of[number] = _UNKNOWN


class RequestPath:
    """A request's blocks with the rows of one question's answers: what was found stays what it was.

    found: int64[2 * n], see kernels.block_sets.
    """

    __slots__ = ("_bits", "_numbers", "_sets", "_words", "found")

    def __init__(self, masks: QueryMasks, found: Int64Array) -> None:
        self._sets = masks.sets
        self._bits, self._words, self._numbers = masks.bits, masks.words, masks.numbers
        self.found = found

    def rows(self) -> Int64Array:
        """The row of each block, 0 where nobody may count it: int64[n]."""
        return self.found[: len(self.found) // 2]

    def walk(self, candidates: Candidates, starts: Int64Array, held: HolderBitmaps) -> Int64Array | None:
        """Go on from where each candidate's own blocks end, over what it may count and what it holds.

        starts: int64[m]. held: rows int64[n], bitmaps over the candidates' positions, words of one. Gives the blocks
        that each may count, int64[m], None where nobody may count any.
        """
        return self._sets.walk(self.found, self._bits, self._words, self._numbers.of(candidates), starts, held)


class FactQuery:
    """What is asked of what is told of blocks, and who asks; kept for as long as the fleet is the same.

    make: gives, for the facts of a set, a mask of the numbers of the ranks that may count its blocks; asked once a set,
    until invalidate_masks.
    """

    __slots__ = ("_key", "_make", "numbers", "sets")

    def __init__(
        self, sets: FactSets, key: Hashable, numbers: RankNumbering, make: Callable[[frozenset[int]], int]
    ) -> None:
        self.sets = sets
        self.numbers = numbers
        self._key = key
        self._make = make

    def masks(self) -> QueryMasks:
        """What is known of who may count which set's blocks."""
        return self.sets.masks(self._key, self.numbers, self._make)

    def path(self, sequence: HashArray) -> RequestPath | None:
        """Look a whole request up; None where nobody may count any of its blocks. sequence: uint64[n], contiguous."""
        return self.sets.path(sequence, self.masks())


class FactQueries:
    """The questions that come again and again, by what they ask."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, FactQuery] = {}

    def get(self, key: Hashable, numbers: RankNumbering) -> FactQuery | None:
        """The question, if it was put for this fleet."""
        query = self._kept.get(key)
        return query if query is not None and query.numbers is numbers else None

    def put(self, key: Hashable, query: FactQuery) -> FactQuery:
        """Keep a question."""
        if len(self._kept) >= _QUERIES_CACHED_MAX:
            self._kept.clear()
        self._kept[key] = query
        return query


class WeighedMatches(NamedTuple):
    """Both kinds for each of m candidates, and what these have then.

    pooled, labelled: int64[m], pooled blocks right behind its own leading ones that it may count, and its own leading
    ones whose labels match; None where nobody has any. with_pooled, with_both: float64[m]. first_end: the first block
    at which a candidate that counts pooled ones ends, n where none does. rows: int64[n], for each block before which
    any of these ends whether a pool has it, 0 for no; what is said of others is void.
    """

    cxl_accessible_scores: Int64Array | None
    moe_scores: Int64Array | None
    with_pooled: Float64Array
    with_both: Float64Array
    first_end: int
    rows: Int64Array


class FactSets:
    """Facts, as numbers, of blocks. The same fact may be told of a block several times, and goes with the last.

    _sets, _uses: facts of each set's number and how many blocks have it; number 0 is no set.
    """

    #: Where the map is, for kernels; 0 for none.
    map_address = 0

    def __init__(self) -> None:
        self._sets: list[frozenset[int]] = [_EMPTY]
        self._uses: list[int] = [0]
        self._numbers: dict[frozenset[int], int] = {}
        self._free: list[int] = []
        self._steps: dict[tuple[int, int], int] = {}
        self._again: Counter[tuple[int, int]] = Counter()  # (block, fact) told more than once: how many times more
        self._masks: dict[Hashable, QueryMasks] = {}
        self._n_blocks = 0

    def __len__(self) -> int:
        """Blocks of which anything is told."""
        return self._n_blocks

    def add_fact(self, block: int, fact: int) -> None:
        """A fact is told of a block. Raises IndexFull, and nothing has changed, where there is no room for its set."""
        before = self._get(block)
        after = self._steps.get((before, fact))
        if after is None:
            facts = self._sets[before]
            if fact in facts:
                self._again[block, fact] += 1
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
        """A fact is told of a block once less; one that was not told changes nothing."""
        before = self._get(block)
        facts = self._sets[before]
        if fact not in facts:
            return
        if self._again and (block, fact) in self._again:
            self._again[block, fact] -= 1
            if not self._again[block, fact]:
                del self._again[block, fact]
            return
        if len(facts) == 1:
            self._drop(block)
            self._n_blocks -= 1
        else:
            after = self._number_of(facts - {fact}, sets_max=len(self._numbers) + 1)  # what ends must not find no room
            self._uses[after] += 1
            self._put(block, after)
        self._release(before)

    def facts_of(self, block: int) -> frozenset[int]:
        """What is told of a block."""
        return self._sets[self._get(block)]

    def invalidate_masks(self) -> None:
        """The fleet, or what facts mean, has changed."""
        self._masks.clear()

    def masks(self, query: Hashable, numbers: RankNumbering, make: Callable[[frozenset[int]], int]) -> QueryMasks:
        """What is known of the answers to a question; see Question. Good until anything is told or taken back."""
        masks = self._masks.get(query)
        if masks is None or masks.numbers is not numbers or masks.n_rows > ROWS_MAX:
            if len(self._masks) >= _QUERIES_CACHED_MAX:
                self._masks.clear()
            masks = self._masks[query] = QueryMasks(self, numbers, make)
        masks.widen(len(self._sets))
        return masks

    def path(self, sequence: HashArray, masks: QueryMasks) -> RequestPath | None:
        """Look a request up; None where nobody may count any of its blocks. sequence: uint64[n], contiguous."""
        found = np.empty(2 * len(sequence), dtype=np.int64)
        while True:
            n_found = self._find(masks.row_of, sequence, found)
            if n_found >= 0:
                return RequestPath(masks, found) if n_found else None
            self._learn(masks, -n_found)

    def _learn(self, masks: QueryMasks, number: int) -> None:
        masks.learn(number, self._sets[number])

    def _number_of(self, facts: frozenset[int], sets_max: int = SETS_MAX) -> int:
        number = self._numbers.get(facts)
        if number is None:
            if len(self._numbers) >= sets_max:  # not the free ones: there are more than the limit where much has ended
                raise IndexFull(f"blocks have {sets_max} different sets of facts", sets_max=sets_max)
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
        self._steps.clear()  # some of them lead here
        for masks in self._masks.values():
            masks.forget(number)

    # -- the map and the walks ---------------------------------------------------------------------------------------

    @abstractmethod
    def _get(self, block: int) -> int: ...

    @abstractmethod
    def _put(self, block: int, number: int) -> None: ...

    @abstractmethod
    def _drop(self, block: int) -> None: ...

    @abstractmethod
    def _find(self, row_of: Int64Array, sequence: HashArray, found: Int64Array) -> int:
        """As kernels.block_sets.find_rows."""

    @abstractmethod
    def walk(
        self,
        found: Int64Array,
        bits: Int64Array,
        words: int,
        numbers: Int64Array,
        starts: Int64Array,
        held: HolderBitmaps,
    ) -> Int64Array | None:
        """See Path.walk and kernels.block_sets.walk."""

    @abstractmethod
    def weigh(
        self,
        pooled: QueryMasks | None,
        labelled: QueryMasks | None,
        sequence: HashArray,
        numbers: Int64Array,
        overlap: Int64Array,
        effective: Float64Array,
        cxl_weight: float,
        moe_weight: float,
    ) -> WeighedMatches:
        """Count both kinds for each candidate and weigh them; pooled and labelled are answers of sets of this class.

        sequence: uint64[n], contiguous; numbers: int64[m], of each candidate, -1 for one that has none; overlap:
        int64[m], its own leading blocks; effective: float64[m], what those count.
        """


class PlainFactSets(FactSets):
    """A dict, and walks in Python: where numba cannot be imported, and what the kernels are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self._map: dict[int, int] = {}

    def _get(self, block: int) -> int:
        return self._map.get(block, 0)

    def _put(self, block: int, number: int) -> None:
        self._map[block] = number

    def _drop(self, block: int) -> None:
        del self._map[block]

    def _find(self, row_of: Int64Array, sequence: HashArray, found: Int64Array) -> int:
        numbers = [self._map.get(block, 0) for block in sequence.tolist()]
        rows = [int(row_of[number]) if number else 0 for number in numbers]
        if _UNKNOWN in rows:
            return -numbers[rows.index(_UNKNOWN)]
        ends = list(range(1, len(rows) + 1))
        for index in range(len(rows) - 2, -1, -1):
            if rows[index] == rows[index + 1]:
                ends[index] = ends[index + 1]
        found[:] = rows + ends
        return sum(row != 0 for row in rows)

    def walk(
        self,
        found: Int64Array,
        bits: Int64Array,
        words: int,
        numbers: Int64Array,
        starts: Int64Array,
        held: HolderBitmaps,
    ) -> Int64Array | None:
        """See Path.walk."""
        rows = found[: len(found) // 2].tolist()
        counts = np.zeros(len(starts), dtype=np.int64)
        for candidate, number in enumerate(numbers.tolist()):
            for at in range(starts[candidate], len(rows)):
                if number >= 0 and _is_set(bits, words, rows[at], number):
                    counts[candidate] += 1
                elif not _is_set(held[1], held[2], int(held[0][at]), candidate):
                    break
        return counts if counts.any() else None

    def weigh(
        self,
        pooled: QueryMasks | None,
        labelled: QueryMasks | None,
        sequence: HashArray,
        numbers: Int64Array,
        overlap: Int64Array,
        effective: Float64Array,
        cxl_weight: float,
        moe_weight: float,
    ) -> WeighedMatches:
        """See FactSets.weigh."""
        blocks = sequence.tolist()
        n_pooled, n_labelled = np.zeros_like(overlap), np.zeros_like(overlap)
        for candidate, (number, n_own) in enumerate(zip(numbers.tolist(), overlap.tolist(), strict=True)):
            if pooled is not None:
                reached = itertools.takewhile(lambda block: _counts(pooled, block, number), blocks[n_own:])  # noqa: B023
                n_pooled[candidate] = sum(1 for _ in reached)
            if labelled is not None:
                n_labelled[candidate] = sum(_counts(labelled, block, number) for block in blocks[:n_own])
        with_pooled = effective + cxl_weight * n_pooled
        return WeighedMatches(
            n_pooled if n_pooled.any() else None,
            n_labelled if n_labelled.any() else None,
            with_pooled,
            with_pooled + moe_weight * n_labelled,
            min((overlap + n_pooled)[n_pooled > 0].tolist(), default=len(blocks)),
            np.array(
                [0 if pooled is None else _row_of(pooled, block) for block in blocks],
                dtype=np.int64,
            ),
        )


def _counts(masks: QueryMasks, block: int, number: int) -> bool:
    """Whether the rank of this number may count a block."""
    row = _row_of(masks, block)  # first: where it is worked out there may be another array of bits
    return number >= 0 and _is_set(masks.bits, masks.words, row, number)


def _row_of(masks: QueryMasks, block: int) -> int:
    known = masks.sets._get(block)
    if known and masks.row_of[known] == _UNKNOWN:
        masks.sets._learn(masks, known)
    return int(masks.row_of[known]) if known else 0


def _is_set(bits: Int64Array, words: int, row: int, number: int) -> bool:
    return row != 0 and bool(int(bits[row * words + number // 64]) >> (number % 64) & 1)


class CompiledFactSets(FactSets):
    """The map and the walks by compiled kernels; see kernels.block_sets."""

    def __init__(self) -> None:
        super().__init__()
        from streams.core.block_facts.kernels import fact_sets as block_sets

        self._kernels = block_sets
        self._slots = [np.zeros(32, dtype=np.int64) for _ in range(block_sets.SEGMENTS)]
        words = [(int(slots.ctypes.data), len(slots) // 2 - 1, 0) for slots in self._slots]
        self._directory = np.array(words, dtype=np.int64).ravel()
        self.map_address = int(self._directory.ctypes.data)

    def memory_bytes(self) -> int:
        """Bytes of the map."""
        return sum(slots.nbytes for slots in self._slots) + self._directory.nbytes

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
        """See Path.walk."""
        out = np.empty(len(numbers), dtype=np.int64)
        return out if self._kernels.walk(found, bits, words, numbers, starts, *held, out) else None

    def weigh(
        self,
        pooled: QueryMasks | None,
        labelled: QueryMasks | None,
        sequence: HashArray,
        numbers: Int64Array,
        overlap: Int64Array,
        effective: Float64Array,
        cxl_weight: float,
        moe_weight: float,
    ) -> WeighedMatches:
        """See FactSets.weigh and kernels.block_sets.weigh."""
        kernels, m = self._kernels, len(numbers)
        counts = np.empty(2 * m + 3 * len(sequence), dtype=np.int64)
        weighed = np.empty(2 * m)
        while True:
            found = kernels.weigh(
                0 if pooled is None else pooled.address,
                0 if labelled is None else labelled.address,
                sequence,
                numbers,
                overlap,
                effective,
                cxl_weight,
                moe_weight,
                counts,
                weighed,
            )
            if found >= 0:
                return WeighedMatches(
                    counts[:m] if found & kernels.POOLED_ANY else None,
                    counts[m : 2 * m] if found & kernels.LABELLED_ANY else None,
                    weighed[:m],
                    weighed[m:],
                    found & _BLOCKS_MASK,
                    counts[2 * m :],
                )
            if found < -kernels.LABELLED_SET:
                assert labelled is not None  # the kernel has read its map
                labelled.sets._learn(labelled, -found - kernels.LABELLED_SET)
            else:
                assert pooled is not None
                pooled.sets._learn(pooled, -found)


def _signed(value: int) -> int:
    """Give a u64 as the int64 of the same bits, which is what kernels take."""
    return value - (1 << 64) if value >> 63 else value

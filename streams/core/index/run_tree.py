"""The fast prefix index: a radix tree of runs in flat arenas, operated by compiled kernels.

What lives here: the interface to the kernels. It assigns numbers to ranks, checks arguments and builds answers. What
must not: the tree's logic (streams/core/index/kernels/tree.py), records (run_fold).

One thread writes. Any thread may query at the same time, and sees each event completely or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from streams.core.events import KvEvent
from streams.core.hashing import BASE_SEED, Tokens, local_hashes
from streams.core.ids import U32_MAX, EngineHash, Float64Array, HashArray, Int64Array, RankId, Tier
from streams.core.index.arenas import COLUMNS_MAX, DEFAULT_LIMITS, RANKS_MAX, TreeLimits, TreeMemory
from streams.core.index.interface import (
    Candidates,
    OverlapScores,
    check_query,
    check_rank,
    check_removal,
    check_store,
    check_tier,
)
from streams.core.index.kernels import layout
from streams.core.index.kernels.columns import assign_column, clear_rank, sweep, take_column
from streams.core.index.kernels.events import SWEEP_BUDGET, apply_events
from streams.core.index.kernels.maps import join_segments, split_segments_to
from streams.core.index.kernels.match import TIERED, TIERED_WORDS, match, match_fresh, match_tiers
from streams.core.index.kernels.place import place_scores
from streams.core.index.tree_inspection import Column, TreeReader
from streams.core.kernels.memory import HASHES
from streams.errors import IndexFull, InvalidEvent, SettingsError, TooManyRanks, UnknownParent

N_TIERS = len(Tier)

#: Maps are presized so that their segments have this load on average, which is just below the load that splits them.
_PRESIZED_LOAD = 0.7

#: Peak number of blocks below which no memory is returned to the system: a few megabytes.
_TRIM_BLOCKS_MIN = 65_536
#: Segments joined in one step. Each takes about 40 us if it is not in the cache.
_TRIM_SEGMENTS = 16
#: Folds of records between two checks of the memory in use.
TRIM_CALLS = 128

__all__ = ["HASHES", "EventColumns", "Matcher", "Outcome", "RunTree", "RunTreeIndex", "TreeScores"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of what had no effect: stores with a parent that the rank does not hold, and removals of such blocks."""

    n_unknown_parents: int
    n_unknown_removals: int


_CLEAN = Outcome(0, 0)


class EventColumns:
    """Many events as columns, checked once and applied in batches of any size.

    holder: int64[n], from `holder` of the index that will apply them. kind: int64[n], from layout: STORED_AT_ROOT,
    STORED, REMOVED, CLEARED. parent: uint64[n], read if kind is STORED. offset: int64[n + 1] into names and local.
    names: uint64[m], the engines' hashes. local: uint64[m], read for stores. The arrays must not change afterwards.
    Raises InvalidEvent.
    """

    __slots__ = ("_columns", "_table", "address", "n_events")

    def __init__(
        self,
        *,
        holder: Int64Array,
        kind: Int64Array,
        parent: HashArray,
        offset: Int64Array,
        names: HashArray,
        local: HashArray,
    ) -> None:
        given = (holder, kind, parent, offset, names, local)
        dtypes: tuple[type[np.generic], ...] = (np.int64, np.int64, np.uint64, np.int64, np.uint64, np.uint64)
        for column, dtype in zip(given, dtypes, strict=True):
            if not isinstance(column, np.ndarray) or column.dtype != dtype or column.ndim != 1:
                raise InvalidEvent(f"a column is not {dtype.__name__}[n]")
        n = len(holder)
        if len(kind) != n or len(parent) != n or len(offset) != n + 1 or len(names) != len(local):
            raise InvalidEvent("columns differ in length", n_events=n, n_names=len(names), n_local=len(local))
        if n and (kind.min() < 0 or kind.max() > layout.CLEARED):
            raise InvalidEvent("unknown kind of event")
        if offset[0] < 0 or offset[-1] > len(names) or (n and (np.diff(offset) < 0).any()):
            raise InvalidEvent("offsets decrease or are outside the hashes", n_names=len(names))
        self._columns = tuple(np.ascontiguousarray(column) for column in given)
        self._table = np.array([column.ctypes.data for column in self._columns], dtype=np.int64)
        self.address = int(self._table.ctypes.data)
        self.n_events = n


class TreeScores(OverlapScores):
    """The answer of the kernels; the mappings by rank are created on first use."""

    __slots__ = ("_found", "_made", "_rank_ids", "_tiers")

    def __init__(self, rank_ids: list[RankId], found: Int64Array, tiers: Int64Array | None = None) -> None:
        self._rank_ids = rank_ids
        self._found = found
        self._tiers = tiers
        self._made = False

    def _make(self) -> None:
        found = self._found
        ranks = [self._rank_ids[number] for number in (found >> 32).tolist()]
        self._scores = dict(zip(ranks, (found & U32_MAX).tolist(), strict=True))
        self._by_tier = {}
        if self._tiers is not None:
            rows = zip(ranks, self._tiers.tolist(), strict=True)
            self._by_tier = {rank: tuple(counts) for rank, counts in rows if any(counts[1:])}
        self._made = True

    @property
    def scores(self) -> Mapping[RankId, int]:
        """Number of leading blocks that each rank holds."""
        if not self._made:
            self._make()
        return self._scores

    @property
    def by_tier(self) -> Mapping[RankId, tuple[int, ...]]:
        """Number of these blocks by the tier of their fastest copy; only for ranks that lack some on the device."""
        if not self._made:
            self._make()
        return self._by_tier

    def columns(self, candidates: Candidates, tier_weights: tuple[float, ...]) -> tuple[Int64Array, Float64Array]:
        """Like OverlapScores.columns, without creating the mappings."""
        n = len(candidates.ranks)
        overlap, effective = np.empty(n, dtype=np.int64), np.empty(n)
        positions = candidates.positions(self._rank_ids)
        place_scores(self._found, positions, tier_weights[Tier.DEVICE], overlap, effective)
        if self._tiers is not None:
            position = positions[self._found >> 32]
            known = position < n
            effective[position[known]] = (self._tiers @ np.array(tier_weights))[known]
        return overlap, effective

    @property
    def has_tiers(self) -> bool:
        """Whether a rank lacks device copies of some of its blocks."""
        return self._tiers is not None

    @property
    def max_score(self) -> int:
        """Greatest number of leading blocks that a rank holds; 0 if no rank holds any."""
        return int((self._found & U32_MAX).max()) if self._found.size else 0

    @property
    def best_worker(self) -> RankId | None:
        """Rank with the most leading blocks, the smallest id if several are equal; None if no rank holds any."""
        if not self._found.size:
            return None
        blocks = self._found & U32_MAX
        best = self._found[blocks == blocks.max()] >> 32
        rank_ids: list[RankId] = [self._rank_ids[number] for number in best.tolist()]
        return min(rank_ids)


class RunTree:
    """A tree's memory, the numbers of its ranks, and queries: the base of the index and of the fold of records."""

    def __init__(self, *, blocks_hint: int = 0, limits: TreeLimits = DEFAULT_LIMITS) -> None:
        if not isinstance(limits, TreeLimits):
            raise SettingsError(f"limits is a {type(limits).__name__}, not TreeLimits")
        if not isinstance(blocks_hint, int) or isinstance(blocks_hint, bool):
            raise SettingsError(f"blocks_hint is {blocks_hint!r}, not a whole number")
        if not 0 <= blocks_hint <= limits.blocks_max:
            raise SettingsError(f"blocks_hint is {blocks_hint}, not within 0..{limits.blocks_max}, the limit of blocks")
        self._memory = TreeMemory(limits)
        self._address = self._memory.address
        self._context = self._memory.context
        self._numbers: dict[RankId, int] = {}
        # Replaced by a new list when a number is reused, since an answer keeps the list that it was created with.
        self._rank_ids: list[RankId] = []
        self._free_numbers: list[int] = []
        self._n_holders = 0
        self._peak_blocks = 0
        self._n_calls = 0
        self._holders: dict[tuple[int, int], int] = {}
        if blocks_hint:
            segments = blocks_hint / (_PRESIZED_LOAD * layout.SEGMENT_SLOTS)
            depth = min(layout.DEPTH_MAX, max(0, int(np.ceil(np.log2(max(1.0, segments))))))
            split_segments_to(self._address, layout.NAMES, depth)

    # -- ranks ----------------------------------------------------------------

    def rank_number(self, rank: RankId) -> int:
        """Number of a rank, assigned on first use. Raises InvalidEvent, TooManyRanks."""
        if type(rank) is not RankId:
            check_rank(rank)  # before the lookup, which would accept a plain tuple and raise TypeError for a list
        number = self._numbers.get(rank)
        if number is not None:
            return number
        check_rank(rank)
        if self._free_numbers:
            number = self._free_numbers.pop()
            ids = list(self._rank_ids)
            ids[number] = rank
            self._rank_ids = ids
        else:
            number = len(self._rank_ids)
            if number >= RANKS_MAX:
                raise TooManyRanks(f"an index can hold {RANKS_MAX} ranks")
            self._rank_ids.append(rank)
        self._numbers[rank] = number
        return number

    def holder_index(self, rank: RankId, tier: Tier) -> int:
        """Index of a rank and tier in the arrays of holders, assigned on first use.

        When the rank is removed, a later rank reuses the index.
        Raises InvalidEvent, TooManyRanks.
        """
        check_tier(tier)
        number = self.rank_number(rank)
        holder = self._holders.get((number, int(tier)))
        if holder is not None:
            return holder
        try:
            column = self._take_column()
        except TooManyRanks:
            if not any((number, tier) in self._holders for tier in range(N_TIERS)):
                # Numbers are taken from the end. This one goes to the front, since those with columns are reused first.
                del self._numbers[rank]
                self._free_numbers.insert(0, number)
            raise
        holder = self._n_holders
        self._n_holders += 1
        self._memory.words(layout.HOLDER_RANK).view(np.int32)[holder] = number
        self._memory.words(layout.HOLDER_TIER).view(np.int32)[holder] = tier
        self._memory.words(layout.HOLDERS_OF).view(np.int32)[number * N_TIERS + tier] = holder + 1
        assign_column(self._address, holder, column)
        self._holders[number, int(tier)] = holder
        return holder

    def _take_column(self) -> int:
        context = self._context
        column = take_column(self._address)
        while column < 0:
            if context[layout.N_ENDED]:
                sweep(self._address, int(context[layout.RUNS_MAX]))
            else:
                columns_max = int(context[layout.COLUMNS_MAX])
                if columns_max >= self._memory.limits.columns_max:
                    raise TooManyRanks(
                        f"the index can hold {columns_max} ranks, counted once per tier",
                        remedy="call remove_rank for ranks that no longer exist, or use TreeLimits with a greater "
                        "columns_max",
                        columns_max=columns_max,
                    )
                try:
                    self._memory.widen(min(columns_max * 4, self._memory.limits.columns_max))
                except SettingsError as exc:  # the effect is the same: the index continues, and this rank is refused
                    raise TooManyRanks(
                        f"the index can hold {columns_max} ranks, counted once per tier: {exc.message}",
                        remedy=exc.remedy,
                        columns_max=columns_max,
                    ) from exc
            column = take_column(self._address)
        return column

    def clear(self, rank: RankId) -> None:
        """Remove all blocks of a rank, in all tiers. Raises InvalidEvent."""
        check_rank(rank)
        number = self._numbers.get(rank)
        if number is not None:
            clear_rank(self._address, number)
            self._sweep()
            self._return_memory()

    def _return_memory(self) -> None:
        """Return memory once less than half of the peak is in use, one step per call, since the writer waits for it."""
        context = self._context
        in_use = int(context[layout.N_BLOCKS]) - int(context[layout.N_FREE_BLOCKS])
        self._memory.note_blocks()
        self._peak_blocks = max(self._peak_blocks, in_use)
        if self._peak_blocks >= _TRIM_BLOCKS_MIN and in_use < self._peak_blocks // 2 and self.trim():
            self._peak_blocks = in_use

    def trim(self) -> bool:
        """Return some free memory to the system, within about a millisecond; returns whether nothing is left to do."""
        budget = _TRIM_SEGMENTS
        for which in layout.MAPS:
            budget -= join_segments(self._address, which, budget)
        return budget == _TRIM_SEGMENTS and self._memory.release_free()

    def _sweep(self) -> None:
        if self._context[layout.N_ENDED]:
            sweep(self._address, SWEEP_BUDGET)

    def remove_rank(self, rank: RankId) -> None:
        """Remove a rank with all its blocks; a later rank reuses its number. Raises InvalidEvent."""
        check_rank(rank)
        number = self._numbers.get(rank)
        if number is not None:
            self.clear(rank)
            self._end_holders(number)
            del self._numbers[rank]
            self._free_numbers.append(number)

    def _end_holders(self, number: int) -> None:
        """Invalidate the holder numbers of a rank that is about to be removed."""

    # -- queries --------------------------------------------------------------

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root. Raises InvalidRequest."""
        check_query(local)
        if not local.flags.c_contiguous:
            local = np.ascontiguousarray(local)
        while True:
            rank_ids = self._rank_ids
            # The answer keeps this array: 65 words per 64 columns.
            work = np.empty(65 * int(self._context[layout.N_WORDS]), dtype=np.int64)
            found = match_fresh(self._address, local, work)
            if found == TIERED:
                return self._find_in_tiers(local)
            # If the list was replaced, a number may have passed from one rank to another during the query.
            if found >= 0 and rank_ids is self._rank_ids:
                return TreeScores(rank_ids, work[:found])

    def find_matches_for_request(self, tokens: Tokens, block_size: int, seed: int = BASE_SEED) -> OverlapScores:
        """Score every rank for a request's tokens. Raises BlockSizeMismatch, InvalidRequest."""
        return self.find_matches(local_hashes(tokens, block_size, seed))

    def matcher(self) -> Matcher:
        """A reusable lookup without an answer object; each thread needs its own."""
        return Matcher(self)

    def _find_in_tiers(self, local: HashArray) -> OverlapScores:
        while True:
            rank_ids = self._rank_ids
            n_ranks = len(rank_ids)
            state = np.zeros(2 + n_ranks * 7, dtype=np.int64)
            state[1] = n_ranks
            out = np.empty(n_ranks * TIERED_WORDS, dtype=np.int64)
            found = match_tiers(self._address, local, out, state)
            if found >= 0 and rank_ids is self._rank_ids:
                rows = out[: found * TIERED_WORDS].reshape(found, TIERED_WORDS)
                return TreeScores(rank_ids, rows[:, 0].copy(), rows[:, 1:])

    def __len__(self) -> int:
        return int(self._context[layout.N_FACTS])

    def reader(self) -> TreeReader:
        """A snapshot of the whole tree."""
        columns = self._memory.words(layout.COLUMN_OF).view(np.int32)
        return TreeReader(
            self._memory,
            [
                Column(int(columns[holder]), self._rank_ids[number], Tier(tier))
                for (number, tier), holder in self._holders.items()
            ],
        )

    def check(self) -> None:
        """Raise IndexCorrupt with the first broken invariant; slow, for tests and debugging."""
        self.reader().check()

    def memory_bytes(self) -> int:
        """Bytes of memory that the tree takes, including maps and spare space."""
        return self._memory.resident_bytes()


class Matcher:
    """Lookups into arrays: `n = matcher.match(local)`, then `ranks[:n]` and `blocks[:n]`; `rank_ids` maps ranks to ids.

    match: takes a contiguous uint64[n_blocks]; returns the number of ranks found, or BUSY if a writer does not complete
    a change for tens of milliseconds. The next call overwrites the arrays; each thread needs its own matcher. `match`
    is the compiled function itself with its first argument bound, since a method around it would take a third of the
    time.
    """

    __slots__ = ("_tree", "blocks", "match", "ranks")

    def __init__(self, tree: RunTree) -> None:
        self._tree = tree
        # Large enough for every possible rank; zeros cost no memory until they are touched.
        out = np.zeros(COLUMNS_MAX, dtype=np.int64)
        alive = np.zeros(COLUMNS_MAX // 64, dtype=np.int64)
        tiered = np.zeros(RANKS_MAX * TIERED_WORDS, dtype=np.int64)
        state = np.zeros(2 + RANKS_MAX * 7, dtype=np.int64)
        state[1] = RANKS_MAX
        addresses = [array.ctypes.data for array in (out, alive, tiered, state)]
        matcher = np.array([tree._address, *addresses], dtype=np.int64)
        bound = partial(match, int(matcher.ctypes.data))
        # A caller may keep only the function, so the function keeps the arrays that it points to.
        bound.kept = (tree, out, alive, tiered, state, matcher)  # type: ignore[attr-defined]  # partials have a __dict__
        self.match: Callable[[HashArray], int] = bound
        self.blocks: npt.NDArray[np.int32] = out.view(np.int32)[0::2]
        self.ranks: npt.NDArray[np.int32] = out.view(np.int32)[1::2]

    @property
    def rank_ids(self) -> list[RankId]:
        """Ranks by their numbers."""
        return self._tree._rank_ids


class RunTreeIndex(RunTree):
    """The prefix index over engine events; see PrefixIndex."""

    def __init__(self, *, blocks_hint: int = 0, limits: TreeLimits = DEFAULT_LIMITS) -> None:
        super().__init__(blocks_hint=blocks_hint, limits=limits)
        self._event = np.zeros(5, dtype=np.int64)  # holder, kind, parent, two offsets
        self._row = np.zeros(6, dtype=np.int64)
        base = int(self._event.ctypes.data)
        self._row[:4] = (base, base + 8, base + 16, base + 24)
        self._row_address = int(self._row.ctypes.data)
        self._holder_numbers: dict[int, int] = {}  # by index, of current ranks
        self._n_former_ranks: dict[int, int] = {}  # by index: number of ranks that had it before

    def holder(self, rank: RankId, tier: Tier) -> int:
        """Number of a rank in a tier, for EventColumns; valid until the rank is removed, and never reused.

        Raises InvalidEvent, TooManyRanks.
        """
        return self._holder_number(self.holder_index(rank, tier))

    def _holder_number(self, index: int) -> int:
        number = self._holder_numbers.get(index)
        if number is None:
            number = self._n_former_ranks.get(index, 0) << layout.HOLDER_INDEX_BITS | index
            self._holder_numbers[index] = number
            self._memory.words(layout.HOLDER_NUMBERS)[index] = number + 1
        return number

    def _end_holders(self, number: int) -> None:
        for tier in range(N_TIERS):
            index = self._holders.get((number, tier))
            if index is not None and self._holder_numbers.pop(index, None) is not None:
                self._memory.words(layout.HOLDER_NUMBERS)[index] = 0
                self._n_former_ranks[index] = self._n_former_ranks.get(index, 0) + 1

    def apply(self, events: EventColumns, first: int = 0, last: int | None = None) -> Outcome:
        """Apply events `first` to `last` - 1.

        A store whose parent the rank does not hold changes nothing and is counted. Raises IndexFull if an event does
        not fit: the events before it are applied, this one and the later ones are not. Raises InvalidEvent if a holder
        is not a number of this index or its rank was removed; then no event is applied.
        """
        last = events.n_events if last is None else last
        if not isinstance(events, EventColumns):
            raise InvalidEvent(f"events are a {type(events).__name__}, not EventColumns")
        if not 0 <= first <= last <= events.n_events:
            raise InvalidEvent(f"events {first} to {last} of {events.n_events}")
        applied = apply_events(self._address, events.address, first, last)
        self._n_calls += 1
        if not self._n_calls % TRIM_CALLS:
            self._return_memory()
        return _CLEAN if applied == last - first else self._outcome(-1 - applied, first)

    def _outcome(self, applied: int, first: int) -> Outcome:
        context = self._context
        if context[layout.STALE]:
            event = int(context[layout.STALE]) - 1
            raise InvalidEvent(
                f"the holder of event {event} is not a number of this index, or its rank was removed",
                event=event,
                remedy="call `holder` for the rank again, and build the columns with the new number",
            )
        if context[layout.FULL]:
            raise self._full(first + applied)
        return Outcome(int(context[layout.UNKNOWN_PARENTS]), int(context[layout.UNKNOWN_REMOVALS]))

    def store(self, rank: RankId, tier: Tier, parent: EngineHash | None, names: HashArray, local: HashArray) -> None:
        """Store consecutive blocks of one chain; see PrefixIndex."""
        check_store(rank, tier, parent, names, local)
        names, local = np.ascontiguousarray(names), np.ascontiguousarray(local)
        if parent is not None and rank not in self._numbers:
            raise UnknownParent(f"rank {rank} holds no block {parent}", rank=rank, parent=parent)
        kind = layout.STORED_AT_ROOT if parent is None else layout.STORED
        outcome = self._apply_one(self.holder_index(rank, tier), kind, parent or 0, names, local)
        if outcome.n_unknown_parents:
            raise UnknownParent(f"rank {rank} holds no block {parent}", rank=rank, parent=parent)

    def remove(self, rank: RankId, tier: Tier, names: HashArray) -> int:
        """Remove blocks; returns how many were not held. See PrefixIndex."""
        check_removal(rank, tier, names)
        names = np.ascontiguousarray(names)
        number = self._numbers.get(rank)
        holder = None if number is None else self._holders.get((number, tier))
        if holder is None:
            return len(names)
        return self._apply_one(holder, layout.REMOVED, 0, names, names).n_unknown_removals

    def members(self) -> Iterator[tuple[RankId, Tier, EngineHash]]:
        """Iterate over all facts, in no particular order."""
        return self.reader().members()

    def dump(self) -> Iterator[tuple[RankId, KvEvent]]:
        """Iterate over events that rebuild an equal index; see PrefixIndex."""
        return self.reader().dump()

    def _full(self, event: int) -> IndexFull:
        context = self._context
        needed, blocks_max = int(context[layout.FULL_NEED]), int(context[layout.BLOCKS_MAX])
        in_use = int(context[layout.N_BLOCKS]) - int(context[layout.N_FREE_BLOCKS])
        lacking = "blocks"
        if context[layout.FULL] != layout.FULL_BLOCKS:
            lacking = "aliases" if context[layout.FULL] == layout.FULL_ALIASES else "segments of its maps"
        return IndexFull(
            f"the index is over capacity: an event of {needed} blocks does not fit, since too few {lacking} are left; "
            f"{in_use} of blocks_max {blocks_max} are in use, including spare space; "
            f"a store needs its blocks and {layout.SLACK_MAX} more, in one piece",
            remedy="use TreeLimits with a greater blocks_max, remove blocks, or split the event",
            event=event,
            needed=needed,
            in_use=in_use,
            blocks_max=blocks_max,
        )

    def _apply_one(self, index: int, kind: int, parent: int, names: HashArray, local: HashArray) -> Outcome:
        event, row = self._event, self._row
        number = self._holder_numbers.get(index)
        event[0] = self._holder_number(index) if number is None else number
        event[1], event[4] = kind, len(names)
        event.view(np.uint64)[2] = parent
        row[4], row[5] = names.ctypes.data, local.ctypes.data
        applied = apply_events(self._address, self._row_address, 0, 1)
        return _CLEAN if applied == 1 else self._outcome(-1 - applied, 0)

"""The prefix index: a radix tree of runs in flat arenas, operated by compiled kernels.

What lives here: the numbers of ranks and their columns, queries and their answers. What must not: the tree's logic
(streams/core/index/kernels/tree.py), records (tree_fold).

One thread writes. Any thread may query at the same time, and sees each record completely or not at all.

State: which rank holds what, for queries.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streams.core.ids import U32_MAX, Float64Array, HashArray, Int64Array, RankId, Tier
from streams.core.index.arenas import DEFAULT_LIMITS, RANKS_MAX, TreeLimits, TreeMemory
from streams.core.index.interface import (
    Candidates,
    PrefixScores,
    check_query,
    check_rank,
    check_tier,
)
from streams.core.index.kernels import layout
from streams.core.index.kernels.columns import assign_column, clear_rank, sweep, take_column
from streams.core.index.kernels.maps import join_segments
from streams.core.index.kernels.match import TIERED, TIERED_WORDS, match, match_tiers
from streams.core.index.kernels.place import place_scores
from streams.errors import SettingsError, TooManyRanks

N_TIERS = len(Tier)

#: Runs and blocks that one call sweeps at most: about 50 us.
_SWEEP_BUDGET = 4096

#: Peak number of blocks below which no memory is returned to the system: a few megabytes.
_TRIM_BLOCKS_MIN = 65_536
#: Segments joined in one step. Each takes about 40 us if it is not in the cache.
_TRIM_SEGMENTS = 16
#: Folds of records between two checks of the memory in use.
TRIM_CALLS = 128


class TreeScores(PrefixScores):
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
        """Like PrefixScores.columns, without creating the mappings."""
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
    """A tree's memory, the numbers of its ranks, and queries: the base of the fold of records."""

    def __init__(self, *, limits: TreeLimits = DEFAULT_LIMITS) -> None:
        if not isinstance(limits, TreeLimits):
            raise SettingsError(f"limits is a {type(limits).__name__}, not TreeLimits")
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
            sweep(self._address, _SWEEP_BUDGET)

    def remove_rank(self, rank: RankId) -> None:
        """Remove a rank with all its blocks; a later rank reuses its number. Raises InvalidEvent."""
        check_rank(rank)
        number = self._numbers.get(rank)
        if number is not None:
            self.clear(rank)
            del self._numbers[rank]
            self._free_numbers.append(number)

    # -- queries --------------------------------------------------------------

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root. Raises InvalidRequest."""
        check_query(local)
        if not local.flags.c_contiguous:
            local = np.ascontiguousarray(local)
        while True:
            rank_ids = self._rank_ids
            # The answer keeps this array: 65 words per 64 columns.
            work = np.empty(65 * int(self._context[layout.N_WORDS]), dtype=np.int64)
            found = match(self._address, local, work)
            if found == TIERED:
                return self._find_in_tiers(local)
            # If the list was replaced, a number may have passed from one rank to another during the query.
            if found >= 0 and rank_ids is self._rank_ids:
                return TreeScores(rank_ids, work[:found])

    def _find_in_tiers(self, local: HashArray) -> PrefixScores:
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

    def memory_bytes(self) -> int:
        """Bytes of memory that the tree takes, including maps and spare space."""
        return self._memory.resident_bytes()

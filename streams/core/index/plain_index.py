"""The holders of each block, as dicts and bit masks: what an index of predictions needs.

What lives here: which ranks hold each sequence hash, and queries. What must not: run records and tiers (tree_fold), and
how long a prediction is valid (predicted_index).

Owner of the state: one thread, or the thread that holds the owner's lock. A query during a change is not safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from streams.core.hashing import sequence_hashes
from streams.core.ids import HashArray, RankId
from streams.core.index.interface import PrefixScores


class HolderSets:
    """Map from each sequence hash, as a Python integer, to a bit mask of ranks.

    A query walks the request's chain and intersects the masks block by block, so a hole ends only that rank's match.
    """

    def __init__(self) -> None:
        self._bit_of: dict[RankId, int] = {}
        self._rank_at: list[RankId | None] = []
        self._free_bits: list[int] = []
        self._holders: dict[int, int] = {}
        self._held: dict[RankId, set[int]] = {}

    def hold(self, rank: RankId, blocks: Collection[int]) -> None:
        """Add a rank to the holders of blocks."""
        if not blocks:
            return
        mask = 1 << self._bit(rank)
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) | mask
        self._held.setdefault(rank, set()).update(blocks)

    def drop(self, rank: RankId, blocks: Iterable[int]) -> None:
        """Remove a rank from the holders of blocks."""
        held = self._held.get(rank)
        if not held:
            return
        keep = ~(1 << self._bit_of[rank])
        gone = held.intersection(blocks)
        held.difference_update(gone)
        for block in gone:
            left = self._holders[block] & keep
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]

    def drop_rank(self, rank: RankId) -> None:
        """Remove a rank with all its blocks."""
        if rank not in self._bit_of:
            return
        self.drop(rank, self.holds(rank))
        self._held.pop(rank, None)
        bit = self._bit_of.pop(rank)
        self._rank_at[bit] = None
        self._free_bits.append(bit)

    def holds(self, rank: RankId) -> frozenset[int]:
        """Blocks that a rank holds."""
        return frozenset(self._held.get(rank, ()))

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root."""
        scores: dict[RankId, int] = {}
        active = -1
        chain: list[int] = sequence_hashes(local).tolist()
        for position, block in enumerate(chain):
            holding = self._holders.get(block, 0)
            if position == 0:
                active = holding
            elif active & ~holding:
                self._score(scores, active & ~holding, position)
                active &= holding
            if not active:
                break
        else:
            self._score(scores, active if chain else 0, len(chain))
        return PrefixScores(scores)

    def _bit(self, rank: RankId) -> int:
        bit = self._bit_of.get(rank)
        if bit is None:
            if self._free_bits:
                bit = self._free_bits.pop()
                self._rank_at[bit] = rank
            else:
                bit = len(self._rank_at)
                self._rank_at.append(rank)
            self._bit_of[rank] = bit
        return bit

    def _score(self, scores: dict[RankId, int], mask: int, blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            rank = self._rank_at[lowest.bit_length() - 1]
            assert rank is not None  # a freed bit is cleared from every mask before it is reused
            scores[rank] = blocks
            mask ^= lowest

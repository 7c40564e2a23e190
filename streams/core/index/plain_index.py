"""The holders of each block, as dicts and bit masks: what an index of predictions needs.

What lives here: which ranks hold each sequence hash, and queries. What must not: run records (tree_fold), and how long
a prediction is valid (predicted_index).

Owner of the state: one thread, or the thread that holds the owner's lock. A query during a change is not safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from streams.core.hashing import sequence_hashes
from streams.core.ids import HashArray, RankId, SequenceHash, Tier
from streams.core.index.interface import PrefixScores
from streams.errors import IndexCorrupt

N_TIERS = len(Tier)


class HolderSets:
    """Map from each sequence hash, as a Python integer, to one bit mask of ranks per tier.

    A query walks the request's chain and intersects the masks block by block, so a hole ends only that rank's match.
    """

    def __init__(self) -> None:
        self._bit_of: dict[RankId, int] = {}
        self._rank_at: list[RankId | None] = []
        self._free_bits: list[int] = []
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._held: dict[tuple[RankId, Tier], set[int]] = {}

    def hold(self, rank: RankId, tier: Tier, blocks: Collection[int]) -> list[int]:
        """Add a rank to the holders of blocks; returns the blocks that it held already, usually none."""
        if not blocks:
            return []
        mask = 1 << self._bit(rank)
        holders = self._holders[tier]
        held = self._held.setdefault((rank, tier), set())
        already = [block for block in blocks if block in held]
        for block in blocks:
            holders[block] = holders.get(block, 0) | mask
        held.update(blocks)
        return already

    def drop(self, rank: RankId, tier: Tier, blocks: Iterable[int]) -> set[int]:
        """Remove a rank from the holders of blocks; returns the blocks that it held."""
        held = self._held.get((rank, tier))
        if not held:
            return set()
        keep = ~(1 << self._bit_of[rank])
        holders = self._holders[tier]
        gone = held.intersection(blocks)
        held.difference_update(gone)
        for block in gone:
            left = holders[block] & keep
            if left:
                holders[block] = left
            else:
                del holders[block]
        return gone

    def drop_rank(self, rank: RankId) -> None:
        """Remove a rank with all its blocks."""
        if rank not in self._bit_of:
            return
        for tier in Tier:
            self.drop(rank, tier, self._held.get((rank, tier), set()).copy())
            self._held.pop((rank, tier), None)
        bit = self._bit_of.pop(rank)
        self._rank_at[bit] = None
        self._free_bits.append(bit)

    def holds(self, rank: RankId, tier: Tier) -> frozenset[int]:
        """Blocks that a rank holds in a tier."""
        return frozenset(self._held.get((rank, tier), ()))

    def ranks_of(self, block: int) -> list[RankId]:
        """Ranks that hold a block in any tier."""
        mask = 0
        for holders in self._holders:
            mask |= holders.get(block, 0)
        return [rank for bit, rank in enumerate(self._rank_at) if rank is not None and mask >> bit & 1]

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root."""
        device, *lower = self._holders
        lower = [holders for holders in lower if holders]
        scores: dict[RankId, int] = {}
        off_device: list[tuple[int, int]] = []  # (position, mask of ranks that hold it only below the device)
        active = -1
        chain: list[int] = sequence_hashes(local).tolist()
        for position, block in enumerate(chain):
            holding = on_device = device.get(block, 0)
            for holders in lower:
                holding |= holders.get(block, 0)
            if position == 0:
                active = holding
            elif active & ~holding:
                self._score(scores, active & ~holding, position)
                active &= holding
            if not active:
                break
            if lower and active & ~on_device:
                off_device.append((position, active & ~on_device))
        else:
            self._score(scores, active if chain else 0, len(chain))
        return PrefixScores(scores, self._tiers(scores, chain, off_device))

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Iterate over all facts, in no particular order; two HolderSets are equal if their sets of facts are."""
        for (rank, tier), held in self._held.items():
            for block in held:
                yield rank, tier, SequenceHash(block)

    def check(self) -> None:
        """Raise IndexCorrupt if masks, sets and bits disagree."""
        for tier in Tier:
            masks: dict[int, int] = {}
            for (rank, where), held in self._held.items():
                if where is tier:
                    for block in held:
                        masks[block] = masks.get(block, 0) | 1 << self._bit_of[rank]
            if masks != self._holders[tier]:
                raise IndexCorrupt("holders' masks differ from what the ranks hold", tier=tier)
        if {rank: bit for bit, rank in enumerate(self._rank_at) if rank is not None} != self._bit_of:
            raise IndexCorrupt("bits and ranks disagree")

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

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

    def _tiers(
        self, scores: Mapping[RankId, int], chain: list[int], off_device: list[tuple[int, int]]
    ) -> dict[RankId, tuple[int, ...]]:
        """Count the blocks by the tier of their fastest copy, for ranks with blocks that are not on the device."""
        counts: dict[RankId, list[int]] = {}
        for position, mask in off_device:
            for rank, score in scores.items():
                if position < score and mask >> self._bit_of[rank] & 1:
                    tiers = counts.setdefault(rank, [score] + [0] * (N_TIERS - 1))
                    tiers[Tier.DEVICE] -= 1
                    tiers[self._fastest_below_device(chain[position], rank)] += 1
        return {rank: tuple(tiers) for rank, tiers in counts.items()}

    def _fastest_below_device(self, block: int, rank: RankId) -> Tier:
        bit = 1 << self._bit_of[rank]
        return next(tier for tier in Tier if tier is not Tier.DEVICE and self._holders[tier].get(block, 0) & bit)

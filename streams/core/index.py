"""The prefix index: which rank holds how many leading blocks of a request, with no hole.

What lives here: the interface of every index (`PrefixIndex`), its answer (`OverlapScores`) and the plain one. What must
not: Kafka records (the view folds those) and tokens (hashing).

Owner of the state: the router's view, or the offline simulator. A query and a store may come from different threads;
the owner holds the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from streams.core.hashing import sequence_hashes
from streams.core.ids import HashArray, RankId, SequenceHash, Tier

N_TIERS = len(Tier)


@dataclass(frozen=True, slots=True)
class OverlapScores:
    """What a query found.

    scores: leading blocks that each rank holds in any tier with no hole; ranks with none are absent.
    by_tier: of those, how many have their fastest copy in each tier; ranks that hold all on the device are absent.
    """

    scores: Mapping[RankId, int]
    by_tier: Mapping[RankId, tuple[int, ...]] = field(default_factory=dict)

    @property
    def max_score(self) -> int:
        """Most leading blocks that any rank holds; 0 where none does."""
        return max(self.scores.values(), default=0)

    @property
    def best_worker(self) -> RankId | None:
        """Rank with the most leading blocks, the smallest id among equals; None where none holds any."""
        return min(self.scores, key=lambda rank: (-self.scores[rank], rank), default=None)

    def effective_blocks(self, rank: RankId, tier_weights: tuple[float, ...]) -> float:
        """Blocks of the rank's prefix, each weighted by the tier of its fastest copy (DESIGN section 7)."""
        tiers = self.by_tier.get(rank)
        if tiers is None:
            return tier_weights[Tier.DEVICE] * self.scores.get(rank, 0)
        return sum(weight * count for weight, count in zip(tier_weights, tiers, strict=True))


class PrefixIndex(Protocol):
    """What every index offers; holding a block is a fact, so storing or removing it twice changes nothing."""

    def store(self, rank: RankId, tier: Tier, parent: SequenceHash | None, sequence: HashArray) -> list[int]:
        """Hold consecutive blocks; gives those that were held already, none as a rule.

        sequence: uint64[n]; parent: the block before the first, None at the root.
        """

    def remove(self, rank: RankId, tier: Tier, sequence: HashArray) -> None:
        """Hold these blocks no more. sequence: uint64[n], in any order."""

    def remove_rank(self, rank: RankId) -> None:
        """Forget everything of one rank."""

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root."""

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Give every fact held, in no order: two indexes are equal when these sets are."""

    def __len__(self) -> int:
        """Number of facts held."""


class PlainPrefixIndex:
    """Exact and simple: a dict of sequence hash to a bit mask of holders, one a tier.

    A query walks the request's chain and intersects holders block by block, so a hole ends just that rank's match.
    """

    def __init__(self) -> None:
        self._bit_of: dict[RankId, int] = {}
        self._rank_at: list[RankId | None] = []
        self._free_bits: list[int] = []
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._held: dict[tuple[RankId, Tier], set[int]] = {}

    def store(
        self,
        rank: RankId,
        tier: Tier,
        parent: SequenceHash | None,  # noqa: ARG002 - the interface's; a tree needs it, a dict does not
        sequence: HashArray,
    ) -> list[int]:
        """Hold consecutive blocks; see PrefixIndex."""
        mask = 1 << self._bit(rank)
        holders = self._holders[tier]
        held = self._held.setdefault((rank, tier), set())
        blocks: list[int] = sequence.tolist()
        already = [block for block in blocks if block in held]
        for block in blocks:
            holders[block] = holders.get(block, 0) | mask
        held.update(blocks)
        return already

    def remove(self, rank: RankId, tier: Tier, sequence: HashArray) -> None:
        """Hold these blocks no more; see PrefixIndex."""
        held = self._held.get((rank, tier))
        if held:
            self._drop(rank, tier, held.intersection(sequence.tolist()))

    def remove_rank(self, rank: RankId) -> None:
        """Forget everything of one rank."""
        if rank not in self._bit_of:
            return
        for tier in Tier:
            self._drop(rank, tier, set(self._held.get((rank, tier), ())))
            self._held.pop((rank, tier), None)
        bit = self._bit_of.pop(rank)
        self._rank_at[bit] = None
        self._free_bits.append(bit)

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request; see PrefixIndex."""
        device, *lower = self._holders
        lower = [holders for holders in lower if holders]
        scores: dict[RankId, int] = {}
        off_device: list[tuple[int, int]] = []  # (position, ranks that hold it but not on the device)
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
        return OverlapScores(scores, self._tiers(scores, chain, off_device))

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Give every fact held, in no order."""
        for (rank, tier), held in self._held.items():
            for block in held:
                yield rank, tier, SequenceHash(block)

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

    def _drop(self, rank: RankId, tier: Tier, blocks: set[int]) -> None:
        keep = ~(1 << self._bit_of[rank])
        holders = self._holders[tier]
        self._held.get((rank, tier), set()).difference_update(blocks)
        for block in blocks:
            left = holders[block] & keep
            if left:
                holders[block] = left
            else:
                del holders[block]

    def _score(self, scores: dict[RankId, int], mask: int, blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            rank = self._rank_at[lowest.bit_length() - 1]
            assert rank is not None  # a freed bit is cleared from every mask before it is handed out again
            scores[rank] = blocks
            mask ^= lowest

    def _tiers(
        self, scores: Mapping[RankId, int], chain: list[int], off_device: list[tuple[int, int]]
    ) -> dict[RankId, tuple[int, ...]]:
        """Count, for ranks with blocks off the device, how many have their fastest copy in each tier."""
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

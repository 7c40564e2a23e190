"""The answer of an index: how many leading blocks of a request each rank holds, without a hole.

What lives here: the answer (`PrefixScores`), its form as columns over the candidates, and the checks of what callers
pass. What must not: an index (run_tree, predicted_index), run records (tree_fold).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streams.core.ids import U32_MAX, U64_MASK, HashArray, Int64Array, RankId, Tier
from streams.errors import InvalidEvent, InvalidRequest

#: The candidates that hold each block of a request: a row number for each block, the rows, and the number of words in a
#: row. A row is a bitmap over the candidates' positions.
HolderBitmaps = tuple[Int64Array, Int64Array, int]

_U64 = np.dtype(np.uint64)


class Candidates:
    """Candidates in their order, with the position of each.

    The object is kept as long as the candidates are the same, so that turning an answer into arrays does not have to
    look up each rank.
    """

    __slots__ = ("_n_numbered", "_positions", "_rank_ids", "kept", "position", "ranks")

    def __init__(self, ranks: Sequence[RankId]) -> None:
        self.ranks = ranks
        self.kept: dict[str, Any] = {}  # results that callers cache for these candidates; each checks its own validity
        self.position = {rank: index for index, rank in enumerate(ranks)}
        self._rank_ids: list[RankId] = []
        self._n_numbered = 0
        self._positions = np.empty(0, dtype=np.int64)

    def positions(self, rank_ids: list[RankId]) -> npt.NDArray[np.int64]:
        """Position of each rank number of an index; the number of candidates for ranks that are not candidates.

        rank_ids: ranks by number. Between calls the same list may only have grown; after any other change the index
        passes a new list.
        """
        if rank_ids is not self._rank_ids or len(rank_ids) != self._n_numbered:
            first, n = self._n_numbered if rank_ids is self._rank_ids else 0, len(self.ranks)
            new = np.array([self.position.get(rank, n) for rank in rank_ids[first:]], dtype=np.int64)
            self._positions = np.concatenate([self._positions[:first], new])
            self._rank_ids, self._n_numbered = rank_ids, len(self._positions)
        return self._positions


class PrefixScores:
    """The answer to a query. Callers must not change its mappings, which a subclass may create on first use.

    scores: number of leading blocks that each rank holds in any tier without a hole; ranks with none are absent.
    by_tier: how many of these have their fastest copy in each tier; ranks that hold all of them on the device are
    absent.
    """

    __slots__ = ("_by_tier", "_scores")

    def __init__(self, scores: Mapping[RankId, int], by_tier: Mapping[RankId, tuple[int, ...]] | None = None) -> None:
        self._scores = scores
        self._by_tier: Mapping[RankId, tuple[int, ...]] = {} if by_tier is None else by_tier

    @property
    def scores(self) -> Mapping[RankId, int]:
        """Number of leading blocks of each rank that holds any."""
        return self._scores

    @property
    def by_tier(self) -> Mapping[RankId, tuple[int, ...]]:
        """Blocks of the match by the tier of their fastest copy, for ranks without a device copy of all of them."""
        return self._by_tier

    @property
    def has_tiers(self) -> bool:
        """Whether a rank lacks device copies of some of its blocks."""
        return bool(self.by_tier)

    @property
    def max_score(self) -> int:
        """Greatest number of leading blocks that a rank holds; 0 if no rank holds any."""
        return max(self.scores.values(), default=0)

    @property
    def best_worker(self) -> RankId | None:
        """Rank with the most leading blocks, the smallest id if several are equal; None if no rank holds any."""
        scores = self.scores
        return min(scores, key=lambda rank: (-scores[rank], rank), default=None)

    def effective_blocks(self, rank: RankId, tier_weights: tuple[float, ...]) -> float:
        """Number of blocks in the rank's prefix, each weighted by the tier of its fastest copy."""
        tiers = self.by_tier.get(rank)
        if tiers is None:
            return tier_weights[Tier.DEVICE] * self.scores.get(rank, 0)
        return sum(weight * count for weight, count in zip(tier_weights, tiers, strict=True))

    def columns(
        self, candidates: Candidates, tier_weights: tuple[float, ...]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Leading blocks of each candidate, int64[n], and the same weighted by tier, float64[n]."""
        overlap = np.zeros(len(candidates.ranks), dtype=np.int64)
        for rank, blocks in self.scores.items():
            if rank in candidates.position:
                overlap[candidates.position[rank]] = blocks
        effective: npt.NDArray[np.float64] = np.multiply(overlap, tier_weights[Tier.DEVICE], dtype=np.float64)
        for rank in self.by_tier:
            if rank in candidates.position:
                effective[candidates.position[rank]] = self.effective_blocks(rank, tier_weights)
        return overlap, effective

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixScores):
            return NotImplemented
        return dict(self.scores) == dict(other.scores) and dict(self.by_tier) == dict(other.by_tier)

    __hash__ = None  # type: ignore[assignment]  # equality compares the mappings, which are not hashable

    def __repr__(self) -> str:
        return f"PrefixScores({dict(self.scores)!r}, {dict(self.by_tier)!r})"


def with_predictions(known: PrefixScores, predicted: PrefixScores) -> tuple[PrefixScores, frozenset[RankId]]:
    """Combine an answer from events with one from predictions: each rank gets the longer prefix.

    A predicted prefix counts as held on the device. Returns the ranks whose prefix is a prediction as well.
    """
    known_scores = known.scores
    by_tier = known.by_tier
    # If both are equally long, the prediction matters only for blocks below the device tier, since these will move up.
    longer = {
        rank: blocks
        for rank, blocks in predicted.scores.items()
        if blocks > known_scores.get(rank, 0) or (blocks == known_scores.get(rank) and rank in by_tier)
    }
    if not longer:
        return known, frozenset()
    tiers = {rank: counts for rank, counts in by_tier.items() if rank not in longer}
    return PrefixScores({**known_scores, **longer}, tiers), frozenset(longer)


def _is_whole(value: object) -> bool:
    # True and False are ints, but where a number is expected here they are a caller's mistake.
    return type(value) is int or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def is_u64(value: object) -> bool:
    """Whether a value is a whole number of 64 bits without a sign, such as a hash."""
    return _is_whole(value) and 0 <= value <= U64_MASK  # type: ignore[operator]  # whole numbers can be compared


def check_rank(rank: RankId) -> None:
    """Raise InvalidEvent unless `rank` is a RankId whose worker id and rank are in range: u64 and u32."""
    # A bare tuple equals a RankId with the same numbers, so a lookup would find it by accident.
    if not isinstance(rank, RankId):
        raise InvalidEvent(f"{rank!r} is a {type(rank).__name__}, not a RankId")
    if not _is_whole(rank.worker_id) or not _is_whole(rank.dp_rank):
        raise InvalidEvent(f"rank {rank} does not consist of integers")
    if not (0 <= rank.worker_id <= U64_MASK and 0 <= rank.dp_rank <= U32_MAX):
        raise InvalidEvent(f"rank {rank} is out of range", worker_id=int(rank.worker_id), dp_rank=int(rank.dp_rank))


def check_tier(tier: Tier) -> None:
    """Raise InvalidEvent unless `tier` is one of Tier's numbers."""
    if not _is_whole(tier) or not Tier.DEVICE <= tier <= Tier.EXTERNAL:
        raise InvalidEvent(f"there is no tier {tier!r}")


def check_hashes(what: str, hashes: HashArray) -> None:
    """Raise InvalidEvent unless `hashes` is uint64[n]; negative numbers and floats would have other dtypes."""
    if not isinstance(hashes, np.ndarray) or hashes.dtype != _U64 or hashes.ndim != 1:
        raise InvalidEvent(f"{what} are {_shown(hashes)}, not uint64 of one dimension")


def check_query(local: HashArray) -> None:
    """Raise InvalidRequest unless `local` is uint64[n]."""
    if not isinstance(local, np.ndarray) or local.dtype != _U64 or local.ndim != 1:
        raise InvalidRequest(f"local hashes are {_shown(local)}, not uint64 of one dimension")


def _shown(values: object) -> str:
    if isinstance(values, np.ndarray):
        return f"{values.dtype} with {values.ndim} dimensions"
    return f"a {type(values).__name__}"

"""The prefix index: which rank holds how many leading blocks of a request, with no hole.

What lives here: the interface of every index (`PrefixIndex`), its answer (`OverlapScores`), and the checks of what
callers hand in. What must not: an index (plain_index, run_tree), Kafka records (run_fold).

Owner of the state: whoever applies the events, or the offline simulator. Where a query and a store may come from
different threads, the index says whether it stands that; a plain one's owner holds a lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streams.core.events import KvEvent
from streams.core.hashing import BASE_SEED, Tokens
from streams.core.ids import U32_MAX, U64_MASK, EngineHash, HashArray, Int64Array, RankId, Tier
from streams.errors import InvalidEvent, InvalidRequest

#: Who holds each block of a request: a row number for each block, the rows, which are bitmaps over the candidates'
#: positions, and the number of words in a row.
HolderBitmaps = tuple[Int64Array, Int64Array, int]

_U64 = np.dtype(np.uint64)


class Candidates:
    """Candidates in their order, and where to find each: kept as long as the candidates are the same, so that an answer
    becomes columns without a look at every rank."""

    __slots__ = ("_n_numbered", "_positions", "_rank_ids", "kept", "position", "ranks")

    def __init__(self, ranks: Sequence[RankId]) -> None:
        self.ranks = ranks
        self.kept: dict[str, Any] = {}  # what others worked out for these candidates; they tell when it is void
        self.position = {rank: index for index, rank in enumerate(ranks)}
        self._rank_ids: list[RankId] = []
        self._n_numbered = 0
        self._positions = np.empty(0, dtype=np.int64)

    def positions(self, rank_ids: list[RankId]) -> npt.NDArray[np.int64]:
        """Position of each rank of an index's own numbering, n for those that are no candidates.

        rank_ids: ranks by number; the same list may have grown since, a list that changed otherwise is another one.
        """
        if rank_ids is not self._rank_ids or len(rank_ids) != self._n_numbered:
            known, n = list(rank_ids), len(self.ranks)
            self._positions = np.array([self.position.get(rank, n) for rank in known], dtype=np.int64)
            self._rank_ids, self._n_numbered = rank_ids, len(known)
        return self._positions


class OverlapScores:
    """What a query found. An index may subclass it to make the mappings when they are asked for; nobody changes them.

    scores: leading blocks that each rank holds in any tier with no hole; ranks with none are absent.
    by_tier: of those, how many have their fastest copy in each tier; ranks that hold all on the device are absent.
    """

    __slots__ = ("_by_tier", "_scores")

    def __init__(self, scores: Mapping[RankId, int], by_tier: Mapping[RankId, tuple[int, ...]] | None = None) -> None:
        self._scores = scores
        self._by_tier: Mapping[RankId, tuple[int, ...]] = {} if by_tier is None else by_tier

    @property
    def scores(self) -> Mapping[RankId, int]:
        """Leading blocks of each rank that holds any."""
        return self._scores

    @property
    def by_tier(self) -> Mapping[RankId, tuple[int, ...]]:
        """Blocks of the match by the tier of their fastest copy, of ranks that hold some off the device only."""
        return self._by_tier

    @property
    def max_score(self) -> int:
        """Most leading blocks that any rank holds; 0 where none does."""
        return max(self.scores.values(), default=0)

    @property
    def best_worker(self) -> RankId | None:
        """Rank with the most leading blocks, the smallest id among equals; None where none holds any."""
        scores = self.scores
        return min(scores, key=lambda rank: (-scores[rank], rank), default=None)

    def effective_blocks(self, rank: RankId, tier_weights: tuple[float, ...]) -> float:
        """Blocks of the rank's prefix, each weighted by the tier of its fastest copy."""
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
        if not isinstance(other, OverlapScores):
            return NotImplemented
        return dict(self.scores) == dict(other.scores) and dict(self.by_tier) == dict(other.by_tier)

    __hash__ = None  # type: ignore[assignment]  # equal by their mappings, which have no hash either

    def __repr__(self) -> str:
        return f"OverlapScores({dict(self.scores)!r}, {dict(self.by_tier)!r})"


def with_predictions(known: OverlapScores, predicted: OverlapScores) -> tuple[OverlapScores, frozenset[RankId]]:
    """Join what is known with what is predicted: of each rank the longer prefix, a predicted one on its device.

    Gives the ranks too whose answer is a prediction.
    """
    known_scores = known.scores
    by_tier = known.by_tier
    # Where both are as long the prediction changes something only for blocks that lie below the device: they come up.
    longer = {
        rank: blocks
        for rank, blocks in predicted.scores.items()
        if blocks > known_scores.get(rank, 0) or (blocks == known_scores.get(rank) and rank in by_tier)
    }
    if not longer:
        return known, frozenset()
    tiers = {rank: counts for rank, counts in by_tier.items() if rank not in longer}
    return OverlapScores({**known_scores, **longer}, tiers), frozenset(longer)


class PrefixIndex(Protocol):
    """What every index offers. Events go in as engines tell them, in the engines' own names.

    Holding a block is a fact, so storing or removing it twice changes nothing. Within one rank and tier a block has one
    name and a name one block; the later store wins: what the name named before and the block's older name are gone.
    """

    def store(self, rank: RankId, tier: Tier, parent: EngineHash | None, names: HashArray, local: HashArray) -> None:
        """Hold consecutive blocks of one chain.

        parent: the rank's own name of the block before the first, looked up in this tier first and then in the others,
        fastest first; None at the root. names, local: uint64[n] each; where n is 0 nothing happens, though an unknown
        parent is an error nevertheless.
        Raises UnknownParent, InvalidEvent; the index is then as it was.
        """

    def remove(self, rank: RankId, tier: Tier, names: HashArray) -> int:
        """Hold these blocks no more; gives how many names the rank did not use in this tier.

        names: uint64[n], in any order. A name that comes twice is unknown the second time.
        Raises InvalidEvent; the index is then as it was.
        """

    def clear(self, rank: RankId) -> None:
        """The rank holds nothing any more, in any tier. Raises InvalidEvent."""

    def remove_rank(self, rank: RankId) -> None:
        """The same, and the rank is forgotten; a rank that the index does not know changes nothing.

        Raises InvalidEvent.
        """

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root. Raises InvalidRequest."""

    def find_matches_for_request(self, tokens: Tokens, block_size: int, seed: int = BASE_SEED) -> OverlapScores:
        """Hash a request and score every rank for it; a partial last block is dropped.

        Raises BlockSizeMismatch, InvalidRequest.
        """

    def members(self) -> Iterator[tuple[RankId, Tier, EngineHash]]:
        """Give every fact held, in the ranks' own names and in no order."""

    def dump(self) -> Iterator[tuple[RankId, KvEvent]]:
        """Give events that rebuild an equal index from an empty one, parents first.

        A block whose parent the rank does not hold comes behind a store of that parent under a name that the rank does
        not use, and a removal of it follows. The index must not change meanwhile.
        """

    def check(self) -> None:
        """Raise IndexCorrupt, naming the first invariant found broken; for tests and debugging, it takes long."""

    def __len__(self) -> int:
        """Number of facts held."""


def _is_whole(value: object) -> bool:
    # True is an int and False another one: as a number of anything here they are somebody's mistake.
    return type(value) is int or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def check_rank(rank: RankId) -> None:
    """Raise InvalidEvent unless it is a RankId whose worker id and rank are in range: u64 and u32."""
    # A bare tuple is equal to a RankId and would be found among them, by accident.
    if not isinstance(rank, RankId):
        raise InvalidEvent(f"{rank!r} is a {type(rank).__name__}, not a RankId")
    if not _is_whole(rank.worker_id) or not _is_whole(rank.dp_rank):
        raise InvalidEvent(f"rank {rank} is not of whole numbers")
    if not (0 <= rank.worker_id <= U64_MASK and 0 <= rank.dp_rank <= U32_MAX):
        raise InvalidEvent(f"rank {rank} is out of range", worker_id=int(rank.worker_id), dp_rank=int(rank.dp_rank))


def check_tier(tier: Tier) -> None:
    """Raise InvalidEvent unless it is one of Tier's numbers."""
    if not _is_whole(tier) or not Tier.DEVICE <= tier <= Tier.EXTERNAL:
        raise InvalidEvent(f"there is no tier {tier!r}")


def check_hashes(what: str, hashes: HashArray) -> None:
    """Raise InvalidEvent unless they are uint64[n]: negative numbers and floats come as other dtypes."""
    if not isinstance(hashes, np.ndarray) or hashes.dtype != _U64 or hashes.ndim != 1:
        raise InvalidEvent(f"{what} are {_shown(hashes)}, not uint64 of one dimension")


def check_store(rank: RankId, tier: Tier, parent: EngineHash | None, names: HashArray, local: HashArray) -> None:
    """Raise InvalidEvent unless an index could take this store, whatever it holds."""
    check_rank(rank)
    check_tier(tier)
    check_hashes("names", names)
    check_hashes("local hashes", local)
    if len(names) != len(local):
        raise InvalidEvent(
            f"{len(names)} names for {len(local)} local hashes", rank=rank, n_names=len(names), n_local=len(local)
        )
    if parent is not None and not (_is_whole(parent) and 0 <= parent <= U64_MASK):
        raise InvalidEvent(f"parent {parent!r} is no u64", rank=rank)


def check_removal(rank: RankId, tier: Tier, names: HashArray) -> None:
    """Raise InvalidEvent unless an index could take this removal, whatever it holds."""
    check_rank(rank)
    check_tier(tier)
    check_hashes("names", names)


def check_query(local: HashArray) -> None:
    """Raise InvalidRequest unless they are uint64[n]."""
    if not isinstance(local, np.ndarray) or local.dtype != _U64 or local.ndim != 1:
        raise InvalidRequest(f"local hashes are {_shown(local)}, not uint64 of one dimension")


def _shown(values: object) -> str:
    if isinstance(values, np.ndarray):
        return f"{values.dtype} with {values.ndim} dimensions"
    return f"a {type(values).__name__}"

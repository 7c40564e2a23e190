"""An index of predictions: it assumes that a rank holds the blocks of each request sent to it, for a limited time.

What lives here: predictions, their expiry and their limit, and queries. What must not: clocks (time is an argument),
events, run records and tiers (tree_fold). It is used for engines that send no events, and until the events of a routed
request arrive.

Owner of the state: the router, under its lock. An answer based on predictions is `approximate` (docs/http.md).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from streams.core.hashing import sequence_hashes
from streams.core.ids import HashArray, RankId
from streams.core.index.interface import PrefixScores, check_hashes, check_query, check_rank
from streams.errors import InvalidEvent, SettingsError

#: Seconds for which a prediction is valid; NVIDIA Dynamo's default. An engine under load replaces its cache within
#: minutes, and a prediction that outlives the block sends requests to a rank that has to compute it again.
TTL_S = 120.0

#: Most predicted blocks over all ranks; Dynamo's default. This is 16.8 million tokens in blocks of 16. It takes 290 MB
#: of memory, measured with eight ranks that share no blocks.
BLOCKS_MAX = 1 << 20

#: Share of the limit that is kept when it is exceeded; Dynamo's default. Pruning then happens once in 200,000 blocks
#: instead of at each block.
PRUNE_TARGET = 0.8


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


class PredictedPrefixIndex:
    """Predicted blocks, each valid until `ttl_s` after the last prediction that contained it.

    Blocks are kept in the order of their last predictions, and within one prediction the last block counts as the
    oldest. A prediction that contains a block contains all blocks before it, so an extension is always older than its
    prefix. Expiry and pruning remove the oldest blocks first, and therefore leave no holes.

    Adding, expiring and pruning take amortised constant time per block. A query intersects the holders of one block
    after the other, as bits of integers. Raises SettingsError.
    """

    def __init__(self, ttl_s: float = TTL_S, blocks_max: int = BLOCKS_MAX, prune_target: float = PRUNE_TARGET) -> None:
        if not (_is_number(ttl_s) and math.isfinite(ttl_s) and ttl_s > 0):
            raise SettingsError(f"ttl_s is {ttl_s!r}; it must be a finite number of seconds above 0")
        if not isinstance(blocks_max, int) or isinstance(blocks_max, bool) or blocks_max < 1:
            raise SettingsError(f"blocks_max is {blocks_max!r}; it must be a whole number of at least 1")
        if not (_is_number(prune_target) and 0 < prune_target <= 1):
            raise SettingsError(f"prune_target is {prune_target!r}; it must be above 0 and at most 1")
        self._ttl_s = ttl_s
        self._blocks_max = blocks_max
        self._blocks_kept = max(1, int(blocks_max * prune_target))
        self._holders: dict[int, int] = {}  # by block: a bit for each rank
        self._held: dict[RankId, set[int]] = {}
        self._bit_of: dict[RankId, int] = {}
        self._rank_at: list[RankId | None] = []
        self._free_bits: list[int] = []
        # Oldest first, with the time of the last prediction, which never decreases from one entry to the next.
        self._predicted: OrderedDict[tuple[RankId, int], float] = OrderedDict()
        self._now_s = -math.inf

    def predict(self, rank: RankId, local: HashArray, now_s: float) -> None:
        """Predict that a rank holds the blocks of a request sent to it. local: uint64[n_blocks] from the root.

        now_s: as in `expire`. Raises InvalidEvent; the index is then unchanged.
        """
        check_rank(rank)
        check_hashes("local hashes", local)
        self.expire(now_s)
        chain: list[int] = sequence_hashes(local).tolist()
        if not chain:
            return
        mask = 1 << self._bit(rank)
        self._held.setdefault(rank, set()).update(chain)
        for block in reversed(chain):
            self._holders[block] = self._holders.get(block, 0) | mask
            entry = rank, block
            self._predicted[entry] = self._now_s
            self._predicted.move_to_end(entry)
        if len(self._predicted) > self._blocks_max:
            self._drop_oldest(len(self._predicted) - self._blocks_kept)

    def expire(self, now_s: float) -> int:
        """Remove predictions that are at least `ttl_s` old; returns the number of removed blocks.

        now_s: seconds of any clock. If a thread passes an earlier time than another did before, the later one is used.
        Raises InvalidEvent.
        """
        if not (_is_number(now_s) and math.isfinite(now_s)):
            raise InvalidEvent(f"{now_s!r} is not a time in seconds")
        self._now_s = max(self._now_s, now_s)
        n_expired = 0
        for predicted_s in self._predicted.values():
            if self._now_s - predicted_s < self._ttl_s:
                break
            n_expired += 1
        self._drop_oldest(n_expired)
        return n_expired

    def clear(self, rank: RankId) -> None:
        """Remove all predictions for a rank. Raises InvalidEvent."""
        check_rank(rank)
        if rank not in self._bit_of:
            return
        for block in self._held[rank]:
            del self._predicted[rank, block]
        self._drop(rank, self._held.pop(rank))
        bit = self._bit_of.pop(rank)
        self._rank_at[bit] = None
        self._free_bits.append(bit)

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request, as of the latest time passed to `predict` or `expire`.

        local: uint64[n_blocks] from the root. Raises InvalidRequest.
        """
        check_query(local)
        scores: dict[RankId, int] = {}
        chain: list[int] = sequence_hashes(local).tolist()
        active = self._holders.get(chain[0], 0) if chain else 0
        for position, block in enumerate(chain):
            holding = self._holders.get(block, 0)
            if active & ~holding:
                self._score(scores, active & ~holding, position)
                active &= holding
            if not active:
                break
        self._score(scores, active, len(chain))
        return PrefixScores(scores)

    def __len__(self) -> int:
        return len(self._predicted)

    def _drop_oldest(self, n_blocks: int) -> None:
        gone: dict[RankId, list[int]] = {}
        for _ in range(n_blocks):
            (rank, block), _ = self._predicted.popitem(last=False)
            gone.setdefault(rank, []).append(block)
        for rank, blocks in gone.items():
            self._held[rank].difference_update(blocks)
            self._drop(rank, blocks)

    def _drop(self, rank: RankId, blocks: Iterable[int]) -> None:
        """Remove a rank from the holders of blocks that it holds."""
        keep = ~(1 << self._bit_of[rank])
        for block in blocks:
            left = self._holders[block] & keep
            if left:
                self._holders[block] = left
            else:
                del self._holders[block]

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

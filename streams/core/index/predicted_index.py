"""An index of guesses, for engines that tell no events: a rank that was sent a request will hold its blocks for long.

What lives here: predictions, their expiry and their limit. What must not: clocks (time is an argument), and events:
where there are some, they are facts, and this only covers the time until they come.

Owner of the state: the router, under its lock. An answer made of this is `approximate` (docs/http.md).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from streams.core.hashing import BASE_SEED, Tokens, local_hashes, sequence_hashes
from streams.core.ids import HashArray, RankId, SequenceHash, Tier
from streams.core.index.interface import OverlapScores, check_hashes, check_query, check_rank
from streams.core.index.plain_index import HolderSets
from streams.errors import IndexCorrupt, InvalidEvent, SettingsError

#: Seconds that a prediction lasts, NVIDIA Dynamo's default: an engine under load turns its cache over in minutes, and a
#: guess that outlives the block sends requests to a rank that must compute it anyway.
TTL_S = 120.0

#: Blocks predicted at most, over all ranks, Dynamo's default: 16.8 million tokens in blocks of 16. They take 290 MB
#: here, measured with eight ranks that share nothing.
BLOCKS_MAX = 1 << 20

#: Where the limit is exceeded, the share of it that is kept, Dynamo's default: pruning comes once in 200,000 blocks and
#: not at each one.
PRUNE_TARGET = 0.8


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


class ApproximatePrefixIndex:
    """Predicted blocks, each until `ttl_s` after the last prediction that named it.

    The order of predictions is kept block by block, and of one prediction the last block counts as the oldest. Whatever
    names a block names all blocks before it, so the oldest first are always extensions before their prefixes: neither
    expiry nor pruning leaves a hole.

    Adding, expiring and pruning take constant time a block, over the life of the index. Raises SettingsError.
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
        self._sets = HolderSets()
        # Oldest first; with the time of the last prediction, which never falls from one entry to the next.
        self._predicted: OrderedDict[tuple[RankId, int], float] = OrderedDict()
        self._now_s = -math.inf

    def predict(self, rank: RankId, local: HashArray, now_s: float) -> None:
        """The rank was sent a request of these blocks and will hold them. local: uint64[n_blocks] from the root.

        now_s: as of `expire`. Raises InvalidEvent and stays as it was.
        """
        check_rank(rank)
        check_hashes("local hashes", local)
        self.expire(now_s)
        chain: list[int] = sequence_hashes(local).tolist()
        self._sets.hold(rank, Tier.DEVICE, chain)
        for block in reversed(chain):
            entry = rank, block
            self._predicted[entry] = self._now_s
            self._predicted.move_to_end(entry)
        if len(self._predicted) > self._blocks_max:
            self._drop_oldest(len(self._predicted) - self._blocks_kept)

    def expire(self, now_s: float) -> int:
        """Forget what was predicted `ttl_s` ago or earlier; gives the number of blocks.

        now_s: seconds of any clock; of threads that read it in one order and come in another the latest time holds.
        Raises InvalidEvent.
        """
        if not (_is_number(now_s) and math.isfinite(now_s)):
            raise InvalidEvent(f"{now_s!r} is no time")
        self._now_s = max(self._now_s, now_s)
        n_expired = 0
        for predicted_s in self._predicted.values():
            if self._now_s - predicted_s < self._ttl_s:
                break
            n_expired += 1
        self._drop_oldest(n_expired)
        return n_expired

    def clear(self, rank: RankId) -> None:
        """Nothing is predicted of this rank any more. Raises InvalidEvent."""
        check_rank(rank)
        for block in self._sets.holds(rank, Tier.DEVICE):
            del self._predicted[rank, block]
        self._sets.drop_rank(rank)

    def remove_rank(self, rank: RankId) -> None:
        """The same: of a rank nothing is known but its predictions."""
        self.clear(rank)

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request, as of the latest time told.

        local: uint64[n_blocks] from the root. Raises InvalidRequest.
        """
        check_query(local)
        return self._sets.find_matches(local)

    def find_matches_for_request(self, tokens: Tokens, block_size: int, seed: int = BASE_SEED) -> OverlapScores:
        """Hash a request and score every rank for it; a partial last block is dropped.

        Raises BlockSizeMismatch, InvalidRequest.
        """
        return self._sets.find_matches(local_hashes(tokens, block_size, seed))

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Give every block predicted, all of the device, in no order; engines have told no names."""
        return self._sets.members()

    def check(self) -> None:
        """Raise IndexCorrupt, naming the first invariant found broken; for tests and debugging, it takes long."""
        self._sets.check()
        if self._predicted.keys() != {(rank, int(block)) for rank, _, block in self._sets.members()}:
            raise IndexCorrupt("what is held is not what was predicted")
        times = list(self._predicted.values())
        if times != sorted(times):
            raise IndexCorrupt("predictions are out of order")
        if times and not (self._now_s - times[0] < self._ttl_s and times[0] <= times[-1] <= self._now_s):
            raise IndexCorrupt("a prediction has expired or is yet to come", oldest=times[0], now_s=self._now_s)
        if len(times) > self._blocks_max:
            raise IndexCorrupt("more blocks than may be", n_blocks=len(times), blocks_max=self._blocks_max)

    def __len__(self) -> int:
        return len(self._predicted)

    def _drop_oldest(self, n_blocks: int) -> None:
        gone: dict[RankId, list[int]] = {}
        for _ in range(n_blocks):
            (rank, block), _ = self._predicted.popitem(last=False)
            gone.setdefault(rank, []).append(block)
        for rank, blocks in gone.items():
            self._sets.drop(rank, Tier.DEVICE, blocks)

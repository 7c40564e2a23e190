"""The fold of run records in pure Python, with which the tree is compared.

What lives here: dicts of runs on top of HolderSets, one record at a time. What must not: kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from streams.core.ids import Epoch, HashArray, Int64Array, RankId, SequenceHash, Tier
from streams.core.index.interface import Candidates, HolderBitmaps, PrefixScores, check_query
from streams.core.index.plain_index import HolderSets
from streams.core.runs import Run, RunKey
from streams.errors import IndexCorrupt


def digest_of(tier: Tier, block: int) -> int:
    """Digest of one fact of a rank; the digests of all its facts are combined by exclusive or."""
    return xxhash.xxh3_64_intdigest(bytes([tier]) + block.to_bytes(8, "little"))


class PlainRunFold:
    """The pure-Python fold: dicts of runs on top of HolderSets, one record at a time; see RunFold.

    _claims: for each block that more than one run record claims, the number of additional claims. A reader may see a
    block in its new run before its old run ends, since compaction leaves no order between keys.
    """

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._epochs: dict[RankId, Epoch] = {}
        self._runs: dict[RankId, dict[RunKey, Run]] = {}
        self._claims: dict[RankId, Counter[tuple[Tier, int]]] = {}

    def fold(self, keys: Sequence[RunKey], runs: Sequence[Run | None]) -> None:
        """Fold records; see RunFold."""
        for key, run in zip(keys, runs, strict=True):
            if run is None:
                self._end(key)
            else:
                self._take(key, run)

    def enter_epoch(self, rank: RankId, epoch: Epoch) -> None:
        """Drop older runs of the rank; see RunFold."""
        known = self._epochs.get(rank)
        if known is None or epoch > known:
            self._drop_runs(rank)
            self._epochs[rank] = epoch

    def epoch_of(self, rank: RankId) -> Epoch | None:
        """Greatest epoch seen for a rank."""
        return self._epochs.get(rank)

    def forget_rank(self, rank: RankId) -> None:
        """Drop a rank's runs and its epoch."""
        self._drop_runs(rank)
        self._epochs.pop(rank, None)

    def ranks(self) -> list[RankId]:
        """All ranks that have an epoch."""
        return list(self._epochs)

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request; see RunFold."""
        check_query(local)
        return self._sets.find_matches(local)

    def holders_along(
        self, sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates
    ) -> HolderBitmaps | None:
        """The candidates that hold a request's blocks from `first` on; see RunFold."""
        words = max(1, -(-len(candidates.ranks) // 64))
        held_rows = np.zeros(len(sequence), dtype=np.int64)
        bitmaps = [0]
        for at, block in enumerate(sequence[first:].tolist(), first):
            mask = sum(
                1 << candidates.position[rank] for rank in self._sets.ranks_of(block) if rank in candidates.position
            )
            if mask:
                held_rows[at] = len(bitmaps)
                bitmaps.append(mask)
            elif not rows[at]:
                break
        packed = b"".join(mask.to_bytes(words * 8, "little") for mask in bitmaps)
        return (held_rows, np.frombuffer(packed, dtype=np.int64).copy(), words) if len(bitmaps) > 1 else None

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Iterate over all facts, in no particular order."""
        return self._sets.members()

    def held_by(self, rank: RankId) -> dict[Tier, HashArray]:
        """Sequence hashes that a rank holds, by tier; see RunFold."""
        held = {tier: self._sets.holds(rank, tier) for tier in Tier}
        return {tier: np.fromiter(blocks, dtype=np.uint64, count=len(blocks)) for tier, blocks in held.items()}

    def facts(self, rank: RankId) -> tuple[int, int]:
        """Number of blocks and their digest; see RunFold."""
        n_blocks = digest = 0
        for run in self._runs.get(rank, {}).values():
            for offset in run.held():
                n_blocks += 1
                digest ^= digest_of(run.key.tier, run.sequence[offset])
        return n_blocks, digest

    def memory_bytes(self) -> int:
        """0, since the memory of dicts is not measured."""
        return 0

    def check(self) -> None:
        """Raise IndexCorrupt with the first broken invariant."""
        self._sets.check()
        facts: Counter[tuple[RankId, Tier, int]] = Counter()
        for rank, runs in self._runs.items():
            for key, run in runs.items():
                if key != run.key or key.rank != rank:
                    raise IndexCorrupt("a run is stored under another key", rank=rank, key=key, found=run.key)
                if run.epoch != self._epochs.get(rank):
                    raise IndexCorrupt("a run does not have its rank's epoch", key=key, epoch=run.epoch)
                facts.update((rank, key.tier, block) for block in _held(run))
        if facts.keys() != {(rank, tier, int(block)) for rank, tier, block in self._sets.members()}:
            raise IndexCorrupt("the claimed blocks are not the held blocks")
        more = {fact: count - 1 for fact, count in facts.items() if count > 1}
        if more != {(rank, *fact): n for rank, claims in self._claims.items() for fact, n in claims.items()}:
            raise IndexCorrupt("blocks that several runs claim are miscounted")

    def __len__(self) -> int:
        return len(self._sets)

    def _take(self, key: RunKey, run: Run) -> None:
        rank, tier, _ = key
        if run.epoch < self._epochs.get(rank, run.epoch):
            return
        self.enter_epoch(rank, run.epoch)
        runs = self._runs.setdefault(rank, {})
        old = runs.get(key)
        runs[key] = run
        before = _held(old) if old is not None else set()
        after = _held(run)
        # Compare by block instead of by offset, since a key that was emptied may be reused for other blocks.
        self._unclaim(rank, tier, before - after)
        for block in self._sets.hold(rank, tier, after - before):
            self._claims.setdefault(rank, Counter())[tier, block] += 1

    def _end(self, key: RunKey) -> None:
        old = self._runs.get(key.rank, {}).pop(key, None)
        if old is not None:
            self._unclaim(key.rank, key.tier, _held(old))

    def _unclaim(self, rank: RankId, tier: Tier, blocks: set[int]) -> None:
        """End one claim of each block; blocks without another claim are no longer held."""
        claims = self._claims.get(rank)
        if claims:
            shared = {block for block in blocks if (tier, block) in claims}
            blocks = blocks - shared
            for block in shared:
                claims[tier, block] -= 1
                if not claims[tier, block]:
                    del claims[tier, block]
        self._sets.drop(rank, tier, blocks)

    def _drop_runs(self, rank: RankId) -> None:
        self._claims.pop(rank, None)
        self._runs.pop(rank, None)
        self._sets.drop_rank(rank)


def _held(run: Run) -> set[int]:
    return {run.sequence[offset] for offset in run.held()}

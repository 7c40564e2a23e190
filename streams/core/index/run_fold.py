"""Run records folded into an index: the state that a router builds from the index changelog.

What lives here: the interface of every such fold (`RunFold`) and the pure-Python one. What must not: bytes
(tables.records), partition and worker records and locks (router_api.index_view).

Records arrive in any order that compaction leaves: children before parents, runs before their progress, a key's older
values missing. A rank's epoch is the greatest in any of its records; runs of an older epoch are dropped, and ignored
from then on. Owner of the state: the view, which admits one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash

from streams.core.ids import Epoch, HashArray, Int64Array, RankId, SequenceHash, Tier
from streams.core.index.interface import Candidates, HolderBitmaps, OverlapScores, check_query
from streams.core.index.plain_index import HolderSets
from streams.core.runs import Run, RunKey
from streams.errors import IndexCorrupt


class RunFold(Protocol):
    """The interface of every fold of run records. Facts are (rank, tier, sequence hash).

    concurrent: whether `find_matches` may be called while another thread folds.
    """

    concurrent: bool

    def fold(self, keys: Sequence[RunKey], runs: Sequence[Run | None]) -> None:
        """Fold records, for each key in the log's order; None is a tombstone.

        A run replaces the previous run of its key. A run of an older epoch than its rank's changes nothing; a run of a
        newer epoch first removes all older runs of the rank. The runs are kept and must not change afterwards.
        """

    def enter_epoch(self, rank: RankId, epoch: Epoch) -> None:
        """Enter an epoch from a progress record: older runs of the rank are dropped. An older epoch is ignored."""

    def epoch_of(self, rank: RankId) -> Epoch | None:
        """Greatest epoch seen for a rank; None if there is none."""

    def forget_rank(self, rank: RankId) -> None:
        """Drop a rank's runs and its epoch, which is the effect of its progress record's tombstone."""

    def ranks(self) -> list[RankId]:
        """All ranks that have an epoch, in no particular order."""

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root. Raises InvalidRequest."""

    def holders_along(
        self, sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates
    ) -> HolderBitmaps | None:
        """The candidates that hold a request's blocks from `first` on, with or without the blocks before.

        sequence: uint64[n]. rows: int64[n] or longer; the search ends at a block that no candidate holds and whose
        entry in `rows` is 0. Returns None if no candidate holds any of these blocks.
        Must not be called while another thread folds, even if `concurrent` is true.
        """

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Iterate over all facts, in no particular order."""

    def held_by(self, rank: RankId) -> dict[Tier, HashArray]:
        """Sequence hashes that a rank holds, by tier: uint64[n] each, in no particular order. The arrays are copies.

        Must not be called while another thread folds, even if `concurrent` is true.
        """

    def facts(self, rank: RankId) -> tuple[int, int]:
        """Number of blocks that a rank's runs hold, and an order-independent digest of them (`digest_of`).

        A block that two runs claim counts twice. This happens while the end of one of the claims has not been read yet.
        """

    def check(self) -> None:
        """Raise IndexCorrupt with the first broken invariant; slow, for tests and debugging."""

    def memory_bytes(self) -> int:
        """Bytes of memory that the fold takes, or 0 if it does not measure them."""

    def __len__(self) -> int:
        """Number of facts; a block that two runs claim counts once."""


def digest_of(tier: Tier, block: int) -> int:
    """Digest of one fact of a rank; the digests of all its facts are combined by exclusive or."""
    return xxhash.xxh3_64_intdigest(bytes([tier]) + block.to_bytes(8, "little"))


class PlainRunFold:
    """The pure-Python fold: dicts of runs on top of HolderSets, one record at a time; see RunFold.

    _claims: for each block that more than one run record claims, the number of additional claims. A reader may see a
    block in its new run before its old run ends, since compaction leaves no order between keys.
    """

    concurrent = False

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

    def find_matches(self, local: HashArray) -> OverlapScores:
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

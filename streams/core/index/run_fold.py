"""Run records folded into an index: the state that a router builds from the index changelog.

What lives here: what such a fold promises (`RunFold`), which tests check for the tree (tree_fold). What must not: bytes
(tables.records), partition and worker records and locks (index_view in router_api.knowledge).

Records arrive in any order that compaction leaves: children before parents, runs before their progress, a key's older
values missing. A rank's epoch is the greatest in any of its records; runs of an older epoch are dropped, and ignored
from then on. Owner of the state: the view, which admits one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from streams.core.ids import Epoch, HashArray, Int64Array, RankId, SequenceHash, Tier
from streams.core.index.interface import Candidates, HolderBitmaps, PrefixScores
from streams.core.runs import Run, RunKey


class RunFold(Protocol):
    """The interface of every fold of run records. Facts are (rank, tier, sequence hash)."""

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

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root. Raises InvalidRequest."""

    def holders_along(
        self, sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates
    ) -> HolderBitmaps | None:
        """The candidates that hold a request's blocks from `first` on, with or without the blocks before.

        sequence: uint64[n]. rows: int64[n] or longer; the search ends at a block that no candidate holds and whose
        entry in `rows` is 0. Returns None if no candidate holds any of these blocks.
        Must not be called while another thread folds.
        """

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Iterate over all facts, in no particular order."""

    def held_by(self, rank: RankId) -> dict[Tier, HashArray]:
        """Sequence hashes that a rank holds, by tier: uint64[n] each, in no particular order. The arrays are copies.

        Must not be called while another thread folds.
        """

    def facts(self, rank: RankId) -> tuple[int, int]:
        """Number of blocks that a rank's runs hold, and an order-independent digest of them.

        A block that two runs claim counts twice. This happens while the end of one of the claims has not been read yet.
        """

    def check(self) -> None:
        """Raise IndexCorrupt with the first broken invariant; slow, for tests and debugging."""

    def memory_bytes(self) -> int:
        """Bytes of memory that the fold takes, or 0 if it does not measure them."""

    def __len__(self) -> int:
        """Number of facts; a block that two runs claim counts once."""

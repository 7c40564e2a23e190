"""Run records folded into a run tree by compiled kernels; see run_fold.RunFold.

What lives here: epochs, and records as columns. What must not: bytes, and what a record does to the tree
(kernels/fold).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from streams.core.arenas import DEFAULT_LIMITS, Int64Array, TreeLimits
from streams.core.holdings import Run, RunKey
from streams.core.ids import Epoch, HashArray, RankId, SequenceHash, Tier
from streams.core.kernels import layout
from streams.core.kernels.fold import digest_columns, drop_old_records, fold_runs
from streams.core.run_tree import N_TIERS, RunTree
from streams.errors import IndexCorrupt, IndexFull

#: Records of ended lives looked at behind each call: some 20 us.
_DROP_BUDGET = 4096


class RunColumns:
    """Run records as columns, in the log's order.

    holder: int64[n]. first, parent: uint64[n], sequence hashes. has_parent: int64[n]. present: int64[n], 0 for a
    tombstone. offset: int64[n + 1] into local: uint64[m].
    """

    __slots__ = ("_columns", "_table", "address", "n_records")

    def __init__(
        self,
        *,
        holder: Int64Array,
        first: HashArray,
        parent: HashArray,
        has_parent: Int64Array,
        present: Int64Array,
        offset: Int64Array,
        local: HashArray,
    ) -> None:
        self._columns = (holder, first, parent, has_parent, present, offset, local)
        self._table = np.array([column.ctypes.data for column in self._columns], dtype=np.int64)
        self.address = int(self._table.ctypes.data)
        self.n_records = len(holder)


class TreeRunFold(RunTree):
    """The fold over a run tree; see RunFold."""

    def __init__(self, *, blocks_hint: int = 0, limits: TreeLimits = DEFAULT_LIMITS) -> None:
        super().__init__(blocks_hint=blocks_hint, limits=limits)
        self._epochs: dict[RankId, Epoch] = {}
        self._digested: HashArray | None = None  # of each column; None where something was taken in since
        self._drop_from = -1  # record from which to look for ended lives; -1 where there can be none

    def fold(self, keys: Sequence[RunKey], runs: Sequence[Run | None]) -> None:
        """Take in records; see RunFold. Raises IndexFull."""
        taken: list[tuple[int, RunKey, Run | None]] = []
        for key, run in zip(keys, runs, strict=True):
            self._digested = None
            if run is not None:
                known = self._epochs.get(key.rank)
                if known is not None and run.epoch < known:
                    continue
                if known is None or run.epoch > known:
                    self._fold_columns(taken)
                    taken = []
                    self.enter_epoch(key.rank, run.epoch)
            elif key.rank not in self._epochs:
                continue
            taken.append((self.holder(key.rank, key.tier), key, run))
        self._fold_columns(taken)

    def _fold_columns(self, taken: list[tuple[int, RunKey, Run | None]]) -> None:
        if not taken:
            return
        lengths = [0 if run is None else len(run.local) for _, _, run in taken]
        offset = np.zeros(len(taken) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offset[1:])
        columns = RunColumns(
            holder=np.array([holder for holder, _, _ in taken], dtype=np.int64),
            first=np.array([key.first for _, key, _ in taken], dtype=np.uint64),
            parent=np.array([0 if run is None else run.parent or 0 for _, _, run in taken], dtype=np.uint64),
            has_parent=np.array([run is not None and run.parent is not None for _, _, run in taken], dtype=np.int64),
            present=np.array([0 if run is None else run.present for _, _, run in taken], dtype=np.int64),
            offset=offset,
            local=np.array([one for _, _, run in taken if run is not None for one in run.local], dtype=np.uint64),
        )
        self.fold_columns(columns)

    def fold_columns(self, columns: RunColumns) -> None:
        """Take in records of epochs that are their ranks' own. Raises IndexFull."""
        folded = fold_runs(self._address, columns.address, 0, columns.n_records)
        if folded != columns.n_records:
            raise IndexFull("the index has no room for a run record", record=folded)
        self._tidy()

    def _tidy(self) -> None:
        self._digested = None
        self._sweep()
        if self._drop_from >= 0:
            self._drop_from = int(drop_old_records(self._address, self._drop_from, _DROP_BUDGET)) or -1

    def enter_epoch(self, rank: RankId, epoch: Epoch) -> None:
        """Drop older runs of the rank; see RunFold."""
        known = self._epochs.get(rank)
        if known is None or epoch > known:
            self._drop_runs(rank)
            self._epochs[rank] = epoch

    def epoch_of(self, rank: RankId) -> Epoch | None:
        """Greatest epoch seen of a rank."""
        return self._epochs.get(rank)

    def forget_rank(self, rank: RankId) -> None:
        """Drop a rank's runs and its epoch."""
        self._drop_runs(rank)
        self._epochs.pop(rank, None)
        self.remove_rank(rank)

    def _drop_runs(self, rank: RankId) -> None:
        if rank in self._numbers:
            self.clear(rank)
            self._drop_from = 0
            self._tidy()

    def ranks(self) -> list[RankId]:
        """Every rank that has an epoch."""
        return list(self._epochs)

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Give every fact held, in no order."""
        return ((rank, tier, SequenceHash(name)) for rank, tier, name in self.reader().members())

    def facts(self, rank: RankId) -> tuple[int, int]:
        """Number of blocks and their digest; see RunFold."""
        number = self._numbers.get(rank)
        if number is None:
            return 0, 0
        columns_of, counts = (
            self._memory.words(layout.COLUMN_OF).view(np.int32),
            self._memory.words(layout.COLUMN_FACTS),
        )
        digests = self._digests()
        claims = self._memory.words(layout.CLAIMS)[: int(self._context[layout.N_CLAIMS]) * 2].reshape(-1, 2)
        n_blocks = digest = 0
        for tier in range(N_TIERS):
            holder = self._holders.get((number, tier))
            if holder is not None:
                column = int(columns_of[holder])
                more = claims[(claims[:, 0] >> 32 == column) & (claims[:, 1] > 0), 1]
                n_blocks += int(counts[column]) + int(more.sum())
                digest ^= int(digests[column])
        return n_blocks, digest

    def _digests(self) -> HashArray:
        if self._digested is None:
            digests = np.zeros(int(self._context[layout.N_COLUMNS]), dtype=np.int64)
            digest_columns(self._address, digests.ctypes.data)
            self._digested = digests.view(np.uint64)
        return self._digested

    def check(self) -> None:
        """Raise IndexCorrupt, naming the first invariant found broken."""
        super().check()
        if not self._numbers.keys() <= self._epochs.keys():
            raise IndexCorrupt("a rank holds runs and has no epoch")

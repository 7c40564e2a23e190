"""Run records folded into a run tree by compiled kernels: the state that a router builds from the index changelog.

What lives here: epochs, known holders, and which records are folded. What must not: bytes, records as columns
(run_columns), what a record changes in the tree (kernels/fold), and locks (router_api.knowledge.index_view).

Records arrive in any order that compaction leaves: children before parents, runs before their progress, a key's older
values missing. A rank's epoch is the greatest in any of its records; runs of an older epoch are dropped, and ignored
from then on. Owner of the state: the view, which admits one thread at a time. Facts are (rank, tier, sequence hash).

State: a router's index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from streams.core.ids import (
    Epoch,
    HashArray,
    Int64Array,
    RankId,
    SequenceHash,
    Tier,
)
from streams.core.index.arenas import DEFAULT_LIMITS, TreeLimits, TreeMemory
from streams.core.index.interface import Candidates, HolderBitmaps
from streams.core.index.kernels import layout, run_records
from streams.core.index.kernels.fold import digest_columns, drop_old_records
from streams.core.index.kernels.run_records import KNOWN_WORDS, find_known, fold_known
from streams.core.index.kernels.trace import trace
from streams.core.index.run_columns import RunColumns, columns_of, packed_place
from streams.core.index.run_tree import N_TIERS, TRIM_CALLS, RunTree
from streams.core.runs import Run, RunKey
from streams.errors import IndexFull, TooManyRanks

#: Records examined after each call to find those of ended generations: about 20 us.
_DROP_BUDGET = 4096
#: Initial number of entries in the table of known holders: 4 KiB.
_KNOWN_FIRST = 64


class TreeRunFold(RunTree):
    """The fold over a run tree.

    _known: the table of kernels/run_records, with the holders of folded records. Its entries follow _epochs and the
    indices of holders.
    """

    def __init__(self, *, limits: TreeLimits = DEFAULT_LIMITS) -> None:
        super().__init__(limits=limits)
        self._epochs: dict[RankId, Epoch] = {}
        self._digested: HashArray | None = None  # digest of each column; None if records were folded since
        self._drop_from = -1  # entry from which to search for records of ended generations; -1 if there are none
        self._known = np.zeros((_KNOWN_FIRST, KNOWN_WORDS), dtype=np.int64)
        self._n_known = 0
        self._known_address = int(self._known.ctypes.data)

    def fold(self, keys: Sequence[RunKey], runs: Sequence[Run | None]) -> None:
        """Fold records, for each key in the log's order; None is a tombstone.

        A run replaces the previous run of its key. A run of an older epoch than its rank's changes nothing; a run of a
        newer epoch first removes all older runs of the rank.
        Raises IndexFull if some do not fit; all others are folded.
        """
        refused = self.fold_records(columns_of(keys, runs))
        if refused:
            raise IndexFull(
                f"the index is over capacity: {len(refused)} run records do not fit",
                remedy="use TreeLimits with a greater blocks_max or columns_max",
                records=refused,
            )

    def fold_records(self, records: RunColumns, first: int = 0, last: int | None = None) -> list[int]:
        """Fold records `first` to `last` - 1, as `fold` does; returns those that do not fit.

        Such a record leaves its key unchanged.
        """
        last = records.n_records if last is None else last
        self._digested = None
        refused: list[int] = []
        at = first
        while at < last:
            at = fold_known(self._address, self._known_address, len(self._known) - 1, records.address, at, last)
            if self._context[layout.FULL]:
                refused.append(at)
                at += 1
            elif at < last:
                try:
                    admitted = self._admit(records, at)
                except TooManyRanks:
                    admitted = False
                    refused.append(at)
                at += not admitted
        self._tidy()
        self._n_calls += 1
        if not self._n_calls % TRIM_CALLS:
            self._return_memory()
        return refused

    def _admit(self, records: RunColumns, record: int) -> bool:
        """Enter a record's epoch and add its holder to the known ones; returns False if the record changes nothing.

        Raises TooManyRanks.
        """
        (rank, tier), epoch = records.place_of(record), records.epoch_of(record)
        known = self._epochs.get(rank)
        if epoch is None:
            if known is None:
                return False
        elif known is None or epoch > known:
            self.enter_epoch(rank, epoch)
        elif epoch < known:
            return False
        self._know(rank, tier, self.holder_index(rank, tier))
        return True

    def _tidy(self) -> None:
        self._digested = None
        self._sweep()
        if self._drop_from >= 0:
            self._drop_from = int(drop_old_records(self._address, self._drop_from, _DROP_BUDGET)) or -1

    def enter_epoch(self, rank: RankId, epoch: Epoch) -> None:
        """Enter an epoch from a progress record: older runs of the rank are dropped. An older epoch is ignored."""
        known = self._epochs.get(rank)
        if known is None or epoch > known:
            self._drop_runs(rank)
            self._epochs[rank] = epoch
            for tier in Tier:
                entry = self._known[self._find_known(rank, tier)]
                if entry[run_records.KNOWN_HOLDER]:
                    self._set_epoch(entry, epoch)

    def epoch_of(self, rank: RankId) -> Epoch | None:
        """Greatest epoch seen for a rank; None if there is none."""
        return self._epochs.get(rank)

    def forget_rank(self, rank: RankId) -> None:
        """Drop a rank's runs and its epoch, which is the effect of its progress record's tombstone."""
        self._drop_runs(rank)
        self._epochs.pop(rank, None)
        for tier in Tier:
            # The entry stays in place, since probing for other entries may pass it.
            self._known[self._find_known(rank, tier), run_records.KNOWN_HOLDER] = 0
        self.remove_rank(rank)

    def _drop_runs(self, rank: RankId) -> None:
        if rank in self._numbers:
            self.clear(rank)
            self._drop_from = 0
            self._tidy()

    # -- known holders --------------------------------------------------------

    def _find_known(self, rank: RankId, tier: Tier) -> int:
        found: int = find_known(
            self._known_address, len(self._known) - 1, _signed(rank.worker_id), packed_place(rank, tier)
        )
        return found

    def _know(self, rank: RankId, tier: Tier, holder: int) -> None:
        entry = self._known[self._find_known(rank, tier)]
        if not entry[run_records.KNOWN_PLACE]:
            self._n_known += 1
            if self._n_known * 2 > len(self._known):
                self._grow_known()
                entry = self._known[self._find_known(rank, tier)]
        entry[run_records.KNOWN_WORKER] = _signed(rank.worker_id)
        entry[run_records.KNOWN_PLACE] = packed_place(rank, tier) + 1
        entry[run_records.KNOWN_HOLDER] = holder + 1
        self._set_epoch(entry, self._epochs[rank])

    def _set_epoch(self, entry: Int64Array, epoch: Epoch) -> None:
        entry[run_records.KNOWN_INCARNATION] = _signed(epoch.incarnation)
        entry[run_records.KNOWN_GENERATION] = epoch.generation

    def _grow_known(self) -> None:
        """Grow the table to at least four entries per current holder, without removed ones."""
        alive = self._known[self._known[:, run_records.KNOWN_HOLDER] != 0]
        n_entries = _KNOWN_FIRST
        while n_entries < 4 * (len(alive) + 1):
            n_entries *= 2
        self._known = known = np.zeros((n_entries, KNOWN_WORDS), dtype=np.int64)
        self._known_address = int(known.ctypes.data)
        self._n_known = len(alive) + 1  # and the one that is about to be added
        for row in alive:
            worker, place = int(row[run_records.KNOWN_WORKER]), int(row[run_records.KNOWN_PLACE]) - 1
            known[find_known(self._known_address, n_entries - 1, worker, place)] = row

    # -- queries --------------------------------------------------------------

    def holders_along(
        self, sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates
    ) -> HolderBitmaps | None:
        """The candidates that hold a request's blocks from `first` on, with or without the blocks before.

        sequence: uint64[n]. rows: int64[n] or longer; the search ends at a block that no candidate holds and whose
        entry in `rows` is 0. Returns None if no candidate holds any of these blocks.
        Must not be called while another thread folds.
        """
        n_blocks, n_candidates = len(sequence), len(candidates.ranks)
        words = max(1, -(-n_candidates // 64))
        held_rows = np.zeros(n_blocks, dtype=np.int64)
        held_bits = np.zeros((n_blocks - first + 1) * words, dtype=np.int64)
        positions = candidates.positions(self._rank_ids)
        n_rows = trace(self._address, sequence, first, rows, positions, n_candidates, held_rows, held_bits)
        return (held_rows, held_bits, words) if n_rows else None

    def ranks(self) -> list[RankId]:
        """All ranks that have an epoch, in no particular order."""
        return list(self._epochs)

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Iterate over all facts, in no particular order."""
        for rank in self._epochs:
            for tier, blocks in self.held_by(rank).items():
                for block in blocks.tolist():
                    yield rank, tier, SequenceHash(block)

    def held_by(self, rank: RankId) -> dict[Tier, HashArray]:
        """Sequence hashes that a rank holds, by tier: uint64[n] each, in no particular order. The arrays are copies.

        Must not be called while another thread folds.
        """
        number = self._numbers.get(rank)
        column_of = self._memory.words(layout.COLUMN_OF).view(np.int32)
        holders = {} if number is None else {tier: self._holders.get((number, int(tier))) for tier in Tier}
        return {
            tier: _blocks_in_column(self._memory, int(column_of[holder]))
            for tier, holder in holders.items()
            if holder is not None
        }

    def facts(self, rank: RankId) -> tuple[int, int]:
        """Number of blocks that a rank's runs hold, and an order-independent digest of them.

        A block that two runs claim counts twice. This happens while the end of one of the claims has not been read yet.
        """
        number = self._numbers.get(rank)
        if number is None:
            return 0, 0
        column_of = self._memory.words(layout.COLUMN_OF).view(np.int32)
        counts = self._memory.words(layout.COLUMN_FACTS)
        digests = self._digests()
        claims = self._memory.words(layout.CLAIMS)[: int(self._context[layout.N_CLAIMS]) * 2].reshape(-1, 2)
        n_blocks = digest = 0
        for tier in range(N_TIERS):
            holder = self._holders.get((number, tier))
            if holder is not None:
                column = int(column_of[holder])
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


def _signed(value: int) -> int:
    """Convert a u64 to the int64 with the same bits, as kernels take it."""
    return value - (1 << 64) if value >> 63 else value


def _blocks_in_column(memory: TreeMemory, column: int) -> HashArray:
    """Sequence hashes of the blocks in one column, uint64[n], in no particular order.

    A million blocks take about 10 ms. This does not visit the rest of the tree, since a router's decisions wait for it.
    """
    context = memory.context
    n_runs, word = int(context[layout.N_RUNS]), column >> 6
    if word < layout.INLINE_WORDS:
        covered = memory.words(layout.RUNS)[: n_runs * 8].reshape(n_runs, 8)[:, 4 + word]
    else:
        stride = int(context[layout.WIDE_STRIDE])
        covered = memory.words(layout.WIDE)[: n_runs * stride].reshape(n_runs, stride)[:, word - layout.INLINE_WORDS]
    held = np.flatnonzero((covered >> (column & 63)) & 1)
    fields = memory.words(layout.RUNS)[: n_runs * 8].view(np.int32).reshape(n_runs, 16)
    starts = fields[held, layout.RUN_START // 4].astype(np.int64)
    lengths = fields[held, layout.RUN_LENGTH // 4].astype(np.int64)
    # The blocks of all these runs: each run's first block, and then one after the other.
    blocks = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    sequence: HashArray = memory.words(layout.SEQUENCE).view(np.uint64).take(blocks)
    return sequence

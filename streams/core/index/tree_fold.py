"""Run records folded into a run tree by compiled kernels; see run_fold.RunFold.

What lives here: epochs, and records as columns. What must not: bytes, and what a record does to the tree
(kernels/fold).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from streams.core.ids import (
    U64_MASK,
    DpRank,
    Epoch,
    HashArray,
    Incarnation,
    Int64Array,
    RankId,
    SequenceHash,
    Tier,
    WorkerId,
)
from streams.core.index.arenas import DEFAULT_LIMITS, TreeLimits
from streams.core.index.interface import Candidates, HolderBitmaps
from streams.core.index.kernels import fold as columns_of_fold
from streams.core.index.kernels import layout, run_records
from streams.core.index.kernels.fold import digest_columns, drop_old_records
from streams.core.index.kernels.run_records import KNOWN_WORDS, N_FOLD_COLUMNS, find_known, fold_known
from streams.core.index.kernels.trace import trace
from streams.core.index.run_tree import N_TIERS, RunTree
from streams.core.runs import Run, RunKey
from streams.errors import IndexCorrupt, IndexFull, TooManyRanks

#: Records of ended lives looked at behind each call: some 20 us.
_DROP_BUDGET = 4096
#: Entries of the table of known holders at first: 4 KiB.
_KNOWN_FIRST = 64


class RunColumns:
    """Run records as columns, in the log's order: room for them, which a decoder fills and the fold reads.

    words: int64, the addresses of all columns (see `fold_runs` and kernels/run_records), then the columns. n_records
    each, all int64, hashes and incarnations as the bit patterns of their u64: first, parent, has_parent, present (0 for
    a tombstone), offset (one more: begins and ends in local), worker, place, incarnation, generation; labelled, which
    only a decoder of bytes sets; and holder, which is the fold's to set. local: up to n_blocks_max. data: the bytes
    that were decoded.
    """

    __slots__ = ("_begins", "_words", "address", "data", "n_records")

    def __init__(self, n_records: int, n_blocks_max: int, data: bytes = b"") -> None:
        begin = N_FOLD_COLUMNS
        begins = []
        for column in range(N_FOLD_COLUMNS):
            if column != columns_of_fold.FOLD_LOCAL:
                begins.append(begin)
                begin += n_records + (column == columns_of_fold.FOLD_OFFSET)
            else:
                begins.append(0)
        begins[columns_of_fold.FOLD_LOCAL] = begin
        self._begins = begins
        self._words = np.empty(begin + n_blocks_max, dtype=np.int64)
        self.address = int(self._words.ctypes.data)
        self._words[:N_FOLD_COLUMNS] = [self.address + begin * 8 for begin in begins]
        self.n_records = n_records
        self.data = data

    def column(self, which: int) -> Int64Array:
        """One column, by its number in a table of records: int64[n_records], a view."""
        begin = self._begins[which]
        return self._words[begin : begin + self.n_records]

    @property
    def present(self) -> Int64Array:
        """Presence bits of each record, 0 for a tombstone."""
        return self.column(columns_of_fold.FOLD_PRESENT)

    @property
    def labelled(self) -> Int64Array:
        """Byte of `data` at which a record's labels begin, as a decoder of bytes found it; 0 where it has none."""
        return self.column(run_records.FOLD_LABELLED)

    @property
    def offset(self) -> Int64Array:
        """Where each record's blocks begin in `local`, and where the last one's end: int64[n_records + 1]."""
        begin = self._begins[columns_of_fold.FOLD_OFFSET]
        return self._words[begin : begin + self.n_records + 1]

    @property
    def local(self) -> Int64Array:
        """Local hashes of all records, bit patterns; of meaning up to the last offset."""
        return self._words[self._begins[columns_of_fold.FOLD_LOCAL] :]

    def place_of(self, record: int) -> tuple[RankId, Tier]:
        """Rank and tier of a record."""
        worker_id = int(self.column(run_records.FOLD_WORKER)[record]) & U64_MASK
        place = int(self.column(run_records.FOLD_PLACE)[record])
        return RankId(WorkerId(worker_id), DpRank(place >> 2)), Tier(place & 3)

    def epoch_of(self, record: int) -> Epoch | None:
        """Epoch of a record; None for a tombstone, which has none."""
        if not self.present[record]:
            return None
        incarnation = int(self.column(run_records.FOLD_INCARNATION)[record]) & U64_MASK
        return Epoch(Incarnation(incarnation), int(self.column(run_records.FOLD_GENERATION)[record]))


def columns_of(keys: Sequence[RunKey], runs: Sequence[Run | None]) -> RunColumns:
    """Give runs, None for a tombstone, as columns."""
    lengths = [0 if run is None else len(run.local) for run in runs]
    columns = RunColumns(len(keys), sum(lengths))
    for which, unsigned in (
        (columns_of_fold.FOLD_FIRST, [key.first for key in keys]),
        (columns_of_fold.FOLD_PARENT, [0 if run is None else run.parent or 0 for run in runs]),
        (run_records.FOLD_WORKER, [key.rank.worker_id for key in keys]),
        (run_records.FOLD_INCARNATION, [0 if run is None else run.epoch.incarnation for run in runs]),
    ):
        columns.column(which).view(np.uint64)[:] = unsigned
    columns.column(columns_of_fold.FOLD_HAS_PARENT)[:] = [run is not None and run.parent is not None for run in runs]
    columns.column(run_records.FOLD_PLACE)[:] = [_place(key.rank, key.tier) for key in keys]
    columns.column(run_records.FOLD_GENERATION)[:] = [0 if run is None else run.epoch.generation for run in runs]
    columns.present[:] = [0 if run is None else run.present for run in runs]
    columns.offset[0] = 0
    columns.offset[1:] = np.cumsum(lengths)
    columns.local.view(np.uint64)[:] = [one for run in runs if run is not None for one in run.local]
    return columns


class TreeRunFold(RunTree):
    """The fold over a run tree; see RunFold.

    _known: the table of kernels/run_records, of the holders that records were folded for since their ranks came. Its
    entries follow _epochs and the numbers of holders.
    """

    concurrent = True

    def __init__(self, *, blocks_hint: int = 0, limits: TreeLimits = DEFAULT_LIMITS) -> None:
        super().__init__(blocks_hint=blocks_hint, limits=limits)
        self._epochs: dict[RankId, Epoch] = {}
        self._digested: HashArray | None = None  # of each column; None where something was taken in since
        self._drop_from = -1  # record from which to look for ended lives; -1 where there can be none
        self._known = np.zeros((_KNOWN_FIRST, KNOWN_WORDS), dtype=np.int64)
        self._n_known = 0
        self._known_address = int(self._known.ctypes.data)

    def fold(self, keys: Sequence[RunKey], runs: Sequence[Run | None]) -> None:
        """Take in records; see RunFold. Raises IndexFull where some do not fit; all others are folded."""
        refused = self.fold_records(columns_of(keys, runs))
        if refused:
            raise IndexFull(
                f"the index has no room for {len(refused)} run records",
                remedy="give it TreeLimits with a greater blocks_max or columns_max",
                records=refused,
            )

    def fold_records(self, records: RunColumns, first: int = 0, last: int | None = None) -> list[int]:
        """Take in records `first` to `last` - 1, see RunFold; gives those for which there is no room.

        Such a record leaves its key as it was.
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
        return refused

    def _admit(self, records: RunColumns, record: int) -> bool:
        """Make a record one of its rank's epoch and a known holder; False for one that changes nothing.

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
        self._know(rank, tier, self.holder_place(rank, tier))
        return True

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
            for tier in Tier:
                entry = self._known[self._find_known(rank, tier)]
                if entry[run_records.KNOWN_HOLDER]:
                    self._set_epoch(entry, epoch)

    def epoch_of(self, rank: RankId) -> Epoch | None:
        """Greatest epoch seen of a rank."""
        return self._epochs.get(rank)

    def forget_rank(self, rank: RankId) -> None:
        """Drop a rank's runs and its epoch."""
        self._drop_runs(rank)
        self._epochs.pop(rank, None)
        for tier in Tier:
            # The entry stays where it is, for others were put behind it.
            self._known[self._find_known(rank, tier), run_records.KNOWN_HOLDER] = 0
        self.remove_rank(rank)

    def _drop_runs(self, rank: RankId) -> None:
        if rank in self._numbers:
            self.clear(rank)
            self._drop_from = 0
            self._tidy()

    # -- known holders --------------------------------------------------------

    def _find_known(self, rank: RankId, tier: Tier) -> int:
        found: int = find_known(self._known_address, len(self._known) - 1, _signed(rank.worker_id), _place(rank, tier))
        return found

    def _know(self, rank: RankId, tier: Tier, holder: int) -> None:
        entry = self._known[self._find_known(rank, tier)]
        if not entry[run_records.KNOWN_PLACE]:
            self._n_known += 1
            if self._n_known * 2 > len(self._known):
                self._grow_known()
                entry = self._known[self._find_known(rank, tier)]
        entry[run_records.KNOWN_WORKER] = _signed(rank.worker_id)
        entry[run_records.KNOWN_PLACE] = _place(rank, tier) + 1
        entry[run_records.KNOWN_HOLDER] = holder + 1
        self._set_epoch(entry, self._epochs[rank])

    def _set_epoch(self, entry: Int64Array, epoch: Epoch) -> None:
        entry[run_records.KNOWN_INCARNATION] = _signed(epoch.incarnation)
        entry[run_records.KNOWN_GENERATION] = epoch.generation

    def _grow_known(self) -> None:
        """Make room for as many again as are alive; forgotten ones go."""
        alive = self._known[self._known[:, run_records.KNOWN_HOLDER] != 0]
        n_entries = _KNOWN_FIRST
        while n_entries < 4 * (len(alive) + 1):
            n_entries *= 2
        self._known = known = np.zeros((n_entries, KNOWN_WORDS), dtype=np.int64)
        self._known_address = int(known.ctypes.data)
        self._n_known = len(alive) + 1  # and the one that asks for room
        for row in alive:
            worker, place = int(row[run_records.KNOWN_WORKER]), int(row[run_records.KNOWN_PLACE]) - 1
            known[find_known(self._known_address, n_entries - 1, worker, place)] = row

    # -- what is held ---------------------------------------------------------

    def holders_along(
        self, sequence: HashArray, first: int, rows: Int64Array, candidates: Candidates
    ) -> HolderBitmaps | None:
        """Who holds a request's blocks from `first` on; see RunFold."""
        n_blocks, n_candidates = len(sequence), len(candidates.ranks)
        words = max(1, -(-n_candidates // 64))
        held_rows = np.zeros(n_blocks, dtype=np.int64)
        held_bits = np.zeros((n_blocks - first + 1) * words, dtype=np.int64)
        positions = candidates.positions(self._rank_ids)
        n_rows = trace(self._address, sequence, first, rows, positions, n_candidates, held_rows, held_bits)
        return (held_rows, held_bits, words) if n_rows else None

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
        self._check_known()

    def _check_known(self) -> None:
        n_known = 0
        for worker, place, holder, incarnation, generation, *_ in self._known.tolist():
            n_known += place != 0
            if holder:
                rank = RankId(WorkerId(worker & U64_MASK), DpRank((place - 1) >> 2))
                epoch = Epoch(Incarnation(incarnation & U64_MASK), generation)
                if self._epochs.get(rank) != epoch:
                    raise IndexCorrupt("a known holder is not of its rank's epoch", rank=rank, epoch=epoch)
                if self._holders.get((self._numbers.get(rank, -1), (place - 1) & 3)) != holder - 1:
                    raise IndexCorrupt("a known holder is another's", rank=rank, holder=holder - 1)
        if n_known != self._n_known:
            raise IndexCorrupt("known holders are miscounted", counted=self._n_known, found=n_known)


def _place(rank: RankId, tier: Tier) -> int:
    return rank.dp_rank << 2 | tier


def _signed(value: int) -> int:
    """Give a u64 as the int64 of the same bits, which is what kernels take."""
    return value - (1 << 64) if value >> 63 else value

"""Run records as columns: the form in which decoders pass many records to the fold in one call.

What lives here: the arrays of the columns, and the conversion of runs to them. What must not: bytes (tables), and what
a record changes in the tree (tree_fold, kernels/fold).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streams.core.hashing import sequence_hashes
from streams.core.ids import U64_MASK, DpRank, Epoch, Incarnation, Int64Array, RankId, Tier, WorkerId
from streams.core.index.interface import check_rank, check_tier, is_u64
from streams.core.index.kernels import fold as fold_kernels
from streams.core.index.kernels import run_records
from streams.core.index.kernels.run_records import N_FOLD_COLUMNS
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey
from streams.errors import InvalidEvent


def packed_place(rank: RankId, tier: Tier) -> int:
    """Data-parallel rank and tier in one number, as the columns and the table of known holders have them."""
    return rank.dp_rank << 2 | tier


class RunColumns:
    """Run records as columns, in the log's order: arrays that a decoder fills and the fold reads.

    _words: int64, the addresses of all columns (see `fold_runs` and kernels/run_records), then the columns. Each has
    n_records int64, with hashes and incarnations as the bit patterns of their u64: first, parent, has_parent, present
    (0 for a tombstone), worker, place (data-parallel rank << 2 | tier), incarnation and generation; labelled, which
    only a decoder of bytes sets; and holder, which the fold sets. offset has one more entry, and gives where each
    record's blocks begin and end in local, which has up to n_blocks_max. data: the bytes that were decoded.
    """

    __slots__ = ("_begins", "_words", "address", "data", "n_records")

    def __init__(self, n_records: int, n_blocks_max: int, data: bytes = b"") -> None:
        begin = N_FOLD_COLUMNS
        begins = []
        for column in range(N_FOLD_COLUMNS):
            if column != fold_kernels.FOLD_LOCAL:
                begins.append(begin)
                begin += n_records + (column == fold_kernels.FOLD_OFFSET)
            else:
                begins.append(0)
        begins[fold_kernels.FOLD_LOCAL] = begin
        self._begins = begins
        self._words = np.empty(begin + n_blocks_max, dtype=np.int64)
        self.address = int(self._words.ctypes.data)
        self._words[:N_FOLD_COLUMNS] = [self.address + begin * 8 for begin in begins]
        self.n_records = n_records
        self.data = data

    def column(self, which: int) -> Int64Array:
        """View of a column, by its number in a table of records: int64[n_records]."""
        begin = self._begins[which]
        return self._words[begin : begin + self.n_records]

    @property
    def present(self) -> Int64Array:
        """Presence bits of each record, 0 for a tombstone."""
        return self.column(fold_kernels.FOLD_PRESENT)

    @property
    def labelled(self) -> Int64Array:
        """Byte of `data` at which each record's labels begin, set by a decoder of bytes; 0 if it has none."""
        return self.column(run_records.FOLD_LABELLED)

    @property
    def offset(self) -> Int64Array:
        """Where each record's blocks begin in `local`, and where the last one's end: int64[n_records + 1]."""
        begin = self._begins[fold_kernels.FOLD_OFFSET]
        return self._words[begin : begin + self.n_records + 1]

    @property
    def local(self) -> Int64Array:
        """Local hashes of all records, as bit patterns; valid up to the last offset."""
        return self._words[self._begins[fold_kernels.FOLD_LOCAL] :]

    def place_of(self, record: int) -> tuple[RankId, Tier]:
        """Rank and tier of a record."""
        worker_id = int(self.column(run_records.FOLD_WORKER)[record]) & U64_MASK
        place = int(self.column(run_records.FOLD_PLACE)[record])
        return RankId(WorkerId(worker_id), DpRank(place >> 2)), Tier(place & 3)

    def epoch_of(self, record: int) -> Epoch | None:
        """Epoch of a record; None for a tombstone."""
        if not self.present[record]:
            return None
        incarnation = int(self.column(run_records.FOLD_INCARNATION)[record]) & U64_MASK
        return Epoch(Incarnation(incarnation), int(self.column(run_records.FOLD_GENERATION)[record]))


def columns_of(keys: Sequence[RunKey], runs: Sequence[Run | None]) -> RunColumns:
    """Convert runs to columns; None is a tombstone. Raises InvalidEvent for a record that no agent writes."""
    for key, run in zip(keys, runs, strict=True):
        check_record(key, run)
    lengths = [0 if run is None else len(run.local) for run in runs]
    columns = RunColumns(len(keys), sum(lengths))
    for which, unsigned in (
        (fold_kernels.FOLD_FIRST, [key.first for key in keys]),
        (fold_kernels.FOLD_PARENT, [0 if run is None else run.parent or 0 for run in runs]),
        (run_records.FOLD_WORKER, [key.rank.worker_id for key in keys]),
        (run_records.FOLD_INCARNATION, [0 if run is None else run.epoch.incarnation for run in runs]),
    ):
        columns.column(which).view(np.uint64)[:] = unsigned
    columns.column(fold_kernels.FOLD_HAS_PARENT)[:] = [run is not None and run.parent is not None for run in runs]
    columns.column(run_records.FOLD_PLACE)[:] = [packed_place(key.rank, key.tier) for key in keys]
    columns.column(run_records.FOLD_GENERATION)[:] = [0 if run is None else run.epoch.generation for run in runs]
    columns.present[:] = [0 if run is None else run.present for run in runs]
    columns.offset[0] = 0
    columns.offset[1:] = np.cumsum(lengths)
    columns.local.view(np.uint64)[:] = [one for run in runs if run is not None for one in run.local]
    return columns


def check_record(key: RunKey, run: Run | None) -> None:
    """Raise InvalidEvent for a record that no agent writes: kernels rely on what is checked here."""
    check_rank(key.rank)
    check_tier(key.tier)
    if not is_u64(key.first):
        raise InvalidEvent(f"the first sequence hash {key.first!r} of a run is not a u64", rank=key.rank)
    if run is None:
        return
    if run.parent is not None and not is_u64(run.parent):
        raise InvalidEvent(f"the parent {run.parent!r} of a run is not a u64", rank=key.rank)
    if not 1 <= len(run.local) <= RUN_BLOCKS_MAX or not all(map(is_u64, run.local)):
        raise InvalidEvent(
            f"a run has 1 to {RUN_BLOCKS_MAX} local hashes, each a u64", rank=key.rank, n_local=len(run.local)
        )
    if type(run.present) is not int or not 0 < run.present < 1 << len(run.local):
        raise InvalidEvent(
            f"presence bits {run.present!r} are not those of {len(run.local)} blocks, of which one is held",
            rank=key.rank,
        )
    if not is_u64(run.epoch.incarnation) or not -(1 << 63) <= run.epoch.generation < 1 << 63:
        raise InvalidEvent(f"{run.epoch} is not an epoch", rank=key.rank)
    first = sequence_hashes(np.array(run.local[:1], dtype=np.uint64), run.parent)[0]
    if int(first) != key.first:
        raise InvalidEvent(
            f"a run's key has the sequence hash {key.first}, its parent and its first block have {first}", rank=key.rank
        )

"""The last run records that were folded as they were written: what became of a prompt's blocks since a decision.

What lives here: a ring of these records, and the question. What must not: the index itself (index_view), and what
follows from the answer (core.routing.audit).

A decision promises blocks that the index has at that moment. So a later record of a run of this prompt that lacks one
of them shows that it was removed, whether or not it was stored again afterwards. The ring has the last ROWS_MAX
records; what happened before them is not known.

State: the last run records that were folded.
"""

from __future__ import annotations

import threading

import numpy as np

from streams.core.ids import Int64Array, RankId
from streams.core.index.kernels import fold as fold_kernels
from streams.core.index.kernels import run_records
from streams.core.index.run_columns import RunColumns
from streams.core.routing.audit import Fate

#: Records in the ring, 40 bytes each: about a minute at 1,000 event records/s.
ROWS_MAX = 131_072

_WORKER, _PLACE, _FIRST, _PRESENT, _N_BLOCKS = range(5)

#: Stands for the number of blocks: the rank has begun another epoch, and every block of it was removed.
_EVERYTHING = -1


class RunChanges:
    """The ring. Thread-safe: the thread that folds writes, and the one that decides asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = np.zeros((5, ROWS_MAX), dtype=np.int64)
        self._known_from = 0
        #: Records so far, which a decision remembers as its moment.
        self.n = 0

    def note(self, columns: RunColumns, first: int, last: int) -> None:
        """Take in records `first` to `last` - 1, which are being folded."""
        n_blocks = columns.offset[first + 1 : last + 1] - columns.offset[first:last]
        with self._lock:
            begin = self.n % ROWS_MAX
            n = min(last - first, ROWS_MAX)
            n_before_end = min(n, ROWS_MAX - begin)
            for row, values in (
                (_WORKER, columns.column(run_records.FOLD_WORKER)[first:last]),
                (_PLACE, columns.column(run_records.FOLD_PLACE)[first:last]),
                (_FIRST, columns.column(fold_kernels.FOLD_FIRST)[first:last]),
                (_PRESENT, columns.present[first:last]),
                (_N_BLOCKS, n_blocks),
            ):
                self._rows[row, begin : begin + n_before_end] = values[:n_before_end]
                self._rows[row, : n - n_before_end] = values[n_before_end:n]
            self.n += n

    def note_everything(self, rank: RankId) -> None:
        """Take in that all blocks of a rank were removed."""
        with self._lock:
            self._rows[:, self.n % ROWS_MAX] = _signed(rank.worker_id), rank.dp_rank << 2, 0, 0, _EVERYTHING
            self.n += 1

    def skip(self) -> None:
        """Take in that records were folded which are not in the ring: what happened before this is not known."""
        with self._lock:
            self.n += 1
            self._known_from = self.n

    def fate(self, rank: RankId, sequence: bytes, n_blocks: int, since: int) -> Fate:
        """Return what became of the first `n_blocks` blocks of a prompt on a rank since `n` had this value.

        sequence: the prompt's sequence hashes, packed.
        """
        with self._lock:
            if since < max(self._known_from, self.n - ROWS_MAX):
                return Fate.CHANGED
            begin, end = since % ROWS_MAX, self.n % ROWS_MAX
            parts = [slice(begin, end)] if since == self.n or begin < end else [slice(begin, ROWS_MAX), slice(0, end)]
            rows: Int64Array = np.concatenate([self._of_rank(part, rank) for part in parts], axis=1)
        if (rows[_N_BLOCKS] == _EVERYTHING).any():
            return Fate.CHANGED
        hashes = np.frombuffer(sequence, dtype="<i8")[:n_blocks]
        rows = rows[:, np.isin(rows[_FIRST], hashes)]
        position_of = {value: position for position, value in enumerate(hashes.tolist())} if rows.size else {}
        for first, present, n_in_run in rows[[_FIRST, _PRESENT, _N_BLOCKS]].T.tolist():
            n = max(1, min(n_in_run, len(hashes) - position_of[first]))
            if present & (1 << n) - 1 != (1 << n) - 1:
                return Fate.CHANGED
        return Fate.TOUCHED if rows.size else Fate.KEPT

    def _of_rank(self, part: slice, rank: RankId) -> Int64Array:
        rows = self._rows[:, part]
        matches = (rows[_WORKER] == _signed(rank.worker_id)) & (rows[_PLACE] >> 2 == rank.dp_rank)
        return rows[:, matches]


def _signed(value: int) -> int:
    """Convert a u64 to the int64 with the same bits, as columns have it."""
    return value - (1 << 64) if value >> 63 else value

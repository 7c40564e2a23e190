"""Where candidates are in an index's answer and in the table of loads.

What lives here: these positions, cached as long as the candidates are the same tuple, and a part of them. What must
not: what is read at these positions (pricing, by_policy).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.ids import Int64Array, RankId, WorkerId
from streams.core.index.interface import Candidates
from streams.core.loads.bookings import ActiveLoads
from streams.core.routing.eligibility import RankSelection, base_of
from streams.core.routing.identity_cache import IdentityCache


class CandidateColumns:
    """The positions of n candidates.

    rows: int64[n], the candidates' rows in `loads` as of `numbering`; `update` brings them up to date.
    """

    __slots__ = ("_cpu_workers", "_on_cpu", "candidates", "loads", "numbering", "rows")

    def __init__(self, candidates: Candidates, loads: ActiveLoads) -> None:
        self.candidates = candidates
        self.loads = loads
        self.numbering = -1
        self.rows = np.empty(0, dtype=np.int64)
        self._cpu_workers: Set[WorkerId] | None = None
        self._on_cpu = np.empty(0, dtype=np.bool_)

    def update(self) -> None:
        """Look up the rows of candidates that have got one since the last call; all of them only if some were taken."""
        loads, position = self.loads, self.candidates.position
        if self.numbering == loads.numbering:
            return
        given = None if self.numbering < 0 else loads.rows_given(self.numbering)
        self.numbering = loads.numbering
        if given is None:
            self.rows = loads.rows_of(self.candidates.ranks)
            return
        rows = [(at, row) for rank, row in given if (at := position.get(rank)) is not None]
        if rows:
            self.rows = self.rows.copy()  # decisions that were made before keep theirs
            for at, row in rows:
                self.rows[at] = row

    def on_cpu(self, cpu_workers: Set[WorkerId]) -> npt.NDArray[np.bool_]:
        """Whether each candidate belongs to one of these workers; the same set as before costs nothing."""
        if self._cpu_workers is not cpu_workers:
            self._on_cpu = np.array([rank.worker_id in cpu_workers for rank in self.candidates.ranks], dtype=np.bool_)
            self._cpu_workers = cpu_workers
        return self._on_cpu


class SelectedColumns(NamedTuple):
    """The candidates of one request: all of `base`, or those at some ascending positions of it.

    ranks: the candidates. positions: int64[n]; None for all. rows: int64[n], their rows in the table of loads.
    """

    ranks: Sequence[RankId]
    base: CandidateColumns
    positions: Int64Array | None
    rows: Int64Array

    def only(self, rank: RankId) -> SelectedColumns | None:
        """Return one of the candidates alone; None if the rank is not among them."""
        position = self.base.candidates.position.get(rank)
        if position is None:
            return None
        if self.positions is not None:
            index = int(self.positions.searchsorted(position))
            if index == len(self.positions) or self.positions.item(index) != position:
                return None
        positions = np.array([position], dtype=np.int64)
        base = self.base.candidates.ranks
        ranks = RankSelection(base, positions) if isinstance(base, tuple) else [rank]
        return SelectedColumns(ranks, self.base, positions, self.base.rows[positions])


class ColumnsCache:
    """Columns by tuple of ranks. Looking up 64 ranks takes 20 us."""

    def __init__(self) -> None:
        self._columns: IdentityCache[CandidateColumns] = IdentityCache()

    def of(self, ranks: Sequence[RankId], loads: ActiveLoads) -> SelectedColumns:
        """Return the columns of these candidates, which are cached if they are a tuple or a selection from one."""
        ranks_of_base, positions = base_of(ranks)
        base = self._columns.get(ranks_of_base) if isinstance(ranks_of_base, tuple) else None
        if base is None or base.loads is not loads:
            base = CandidateColumns(Candidates(ranks_of_base), loads)
            if isinstance(ranks_of_base, tuple):  # the contents of a list may change
                self._columns.put(ranks_of_base, base)
        base.update()
        return SelectedColumns(ranks, base, positions, base.rows if positions is None else base.rows[positions])

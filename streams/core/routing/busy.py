"""Busy thresholds: which ranks have so much load that they get no new requests.

What lives here: the filter, and the numbers of blocks that it compares with, as columns that change with each report.
What must not: where reports come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import Int64Array, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads
from streams.core.routing.eligibility import RankSelection, base_of
from streams.core.routing.identity_cache import IdentityCache
from streams.core.workers import Worker

_ROWS_FIRST = 64

#: Ranks that have a row, those that were asked for. Beyond this limit those without a report lose theirs; twice as many
#: as reports are kept.
_ROWS_MAX = 131_072


class BlocksInUse(NamedTuple):
    """Blocks of n ranks, int64[n] each. total: 0 if it is not known. active: as engines report; 0 without a report."""

    total: Int64Array
    active: Int64Array


#: Returns what the registry and the last reports say about the blocks of some ranks, in their order.
BlocksOf = Callable[[Sequence[RankId]], BlocksInUse]


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """A rank over either threshold is busy. 0 switches a threshold off.

    decode_blocks: share of the rank's blocks that are in use, by its bookings or as its engine reports, whichever is
    greater. A rank is never over it if neither its registration nor its engine gives its number of blocks.
    prefill_tokens: prompt tokens that the rank has still to compute.
    """

    decode_blocks: float = 0.0
    prefill_tokens: int = 0

    def __bool__(self) -> bool:
        return self.decode_blocks > 0.0 or self.prefill_tokens > 0


def idle_ranks(
    ranks: Sequence[RankId],
    thresholds: BusyThresholds,
    loads: ActiveLoads,
    blocks_of: BlocksOf | None,
    rows: Int64Array | None = None,
) -> Sequence[RankId]:
    """Return the ranks that are not busy; `ranks` itself if none is busy.

    blocks_of: how many blocks the ranks have and use; None if that is not known. rows: int64[n], the rows of their
    loads (ActiveLoads.rows_of), which are looked up if they are left out.
    """
    if not thresholds or not len(ranks):
        return ranks
    load = loads.table.take(loads.rows_of(ranks) if rows is None else rows, axis=1)
    busy = np.zeros(len(ranks), dtype=np.bool_)
    if thresholds.prefill_tokens > 0:
        busy |= load[0] > thresholds.prefill_tokens
    if thresholds.decode_blocks > 0.0 and blocks_of is not None:
        total, active = blocks_of(ranks)
        busy |= (total > 0) & (np.maximum(load[1], active) > thresholds.decode_blocks * total)
    if not busy.any():
        return ranks
    idle = np.flatnonzero(~busy)
    base, positions = base_of(ranks)
    if not isinstance(base, tuple):
        return [base[index] for index in idle.tolist()]
    return RankSelection(base, idle if positions is None else positions[idle])


def reported_blocks(
    ranks: Sequence[RankId], workers: Mapping[WorkerId, Worker], metrics: Mapping[RankId, WorkerMetrics]
) -> BlocksInUse:
    """Look up the blocks of each rank in the registry and in the last reports."""
    total, active = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
    for index, rank in enumerate(ranks):
        worker, reported = workers.get(rank.worker_id), metrics.get(rank)
        total[index] = (worker.kv_total_blocks if worker else None) or (reported.kv_total_blocks if reported else 0)
        active[index] = reported.kv_active_blocks if reported else 0
    return BlocksInUse(total, active)


class ReportedBlocks:
    """The same as `reported_blocks`, kept as columns that each report changes. Not thread-safe.

    workers: the registry. A tuple of ranks must not outlive a change of these workers' number of blocks.
    """

    def __init__(self, workers: Mapping[WorkerId, Worker]) -> None:
        self._workers = workers
        self._rows: dict[RankId, int] = {}  # row 0 is for ranks that have none and is always zero
        self._numbering = 0  # changes when a row may belong to another rank
        self._reported = np.zeros((2, _ROWS_FIRST), dtype=np.int64)  # blocks in total, and active ones
        # By tuple of ranks: the numbering, the row of each rank, and the registry's number of its blocks.
        self._columns: IdentityCache[tuple[int, Int64Array, Int64Array]] = IdentityCache()

    def note(self, rank: RankId, metrics: WorkerMetrics) -> None:
        """An engine has reported."""
        self._make_room(1)
        row = self._row_of(rank)
        self._reported[0, row] = metrics.kv_total_blocks
        self._reported[1, row] = metrics.kv_active_blocks

    def forget(self, rank: RankId) -> None:
        """A rank's report is no longer valid. The rank keeps its row, since engines that report once do so again."""
        self._reported[:, self._rows.get(rank, 0)] = 0

    def of(self, ranks: Sequence[RankId]) -> BlocksInUse:
        """Return the blocks of these ranks, in their order."""
        base, positions = base_of(ranks)
        known = self._columns.get(base) if isinstance(base, tuple) else None
        if known is None or known[0] != self._numbering:
            self._make_room(len(base))
            rows = np.array([self._row_of(rank) for rank in base], dtype=np.int64)
            registered = reported_blocks(base, self._workers, {}).total
            known = (self._numbering, rows, registered)
            if isinstance(base, tuple):
                self._columns.put(base, known)
        rows, registered = known[1:] if positions is None else (known[1][positions], known[2][positions])
        total, active = self._reported.take(rows, axis=1)
        return BlocksInUse(np.where(registered > 0, registered, total), active)

    def _make_room(self, n: int) -> None:
        """Take the rows of ranks without a report, if n more ranks could exceed the limit."""
        if len(self._rows) + n <= _ROWS_MAX:
            return
        rows = {rank: row for rank, row in self._rows.items() if self._reported[:, row].any()}
        if len(rows) == len(self._rows):
            return
        self._numbering += 1
        kept = self._reported.take([0, *rows.values()], axis=1)
        self._rows = {rank: row for row, rank in enumerate(rows, start=1)}
        self._reported[:] = 0
        self._reported[:, : kept.shape[1]] = kept

    def _row_of(self, rank: RankId) -> int:
        """The row of a rank, which gets one if it has none: its first report must not change the columns of others."""
        row = self._rows.get(rank)
        if row is None:
            row = self._rows[rank] = len(self._rows) + 1
            if row >= self._reported.shape[1]:
                self._reported = np.concatenate([self._reported, np.zeros_like(self._reported)], axis=1)
        return row

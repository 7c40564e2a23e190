"""The load of all registered ranks at one moment, as arrays: by worker and by model, and how evenly it is spread.

What lives here: sums and scores over the ranks' loads. What must not: what a load is (core.loads), and how it is shown
(metrics, live).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from streams.core.ids import Int64Array, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads
from streams.core.workers import Worker, WorkerState


class Load(NamedTuple):
    """Sums over active bookings, as GET /loads returns them for a rank."""

    prefill_tokens: int
    decode_blocks: int
    requests: int


class FleetLoad:
    """The loads of n ranks. Row i of `loads`, int64[n, 3], has the fields of Load for the i-th rank."""

    def __init__(self, workers: Iterable[Worker], active: ActiveLoads) -> None:
        """active: locked, as `LoadsSync.locked` gives it. 1,000 ranks take 0.3 ms."""
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        ranks: list[RankId] = []
        self._firsts: list[int] = []  # row of each worker's first rank; every worker has one
        for worker in self.workers:
            self._firsts.append(len(ranks))
            ranks.extend(worker.ranks())
        rows = active.rows_of(ranks)
        self.loads: Int64Array = active.table[: len(Load._fields)].take(rows, axis=1).T
        sums = np.add.reduceat(self.loads, self._firsts, axis=0).tolist() if ranks else []
        #: The load of each worker, in order of their ids.
        self.by_worker: dict[WorkerId, Load] = {
            worker.worker_id: Load(*row) for worker, row in zip(self.workers, sums, strict=True)
        }

    def total(self) -> Load:
        """The load of all ranks together."""
        return Load(*self.loads.sum(axis=0).tolist())

    def requests_by_model(self) -> dict[str, int]:
        """Requests in flight on the ranks of each model."""
        requests: defaultdict[str, int] = defaultdict(int)
        for worker in self.workers:
            requests[worker.model] += self.by_worker[worker.worker_id].requests
        return requests

    def imbalance(self) -> Mapping[str, tuple[float, float]]:
        """By model, the standard deviation over the mean of its ranks' decode blocks, and of their prefill tokens.

        0 is even, and no load at all is even too. Cordoned workers are left out: they get no requests, so that their
        load falls to 0 whatever the router does. Ranks of different models are not comparable.
        """
        rows: defaultdict[str, list[int]] = defaultdict(list)
        for worker, first in zip(self.workers, self._firsts, strict=True):
            if worker.state is not WorkerState.CORDONED:
                rows[worker.model].extend(range(first, first + worker.dp_size))
        loads = {model: self.loads[of_model] for model, of_model in rows.items()}
        return {model: (_deviation(of_ranks[:, 1]), _deviation(of_ranks[:, 0])) for model, of_ranks in loads.items()}


def _deviation(loads: Int64Array) -> float:
    """The standard deviation over the mean of these loads, int64[n]; 0 if there are none."""
    mean = float(loads.mean()) if loads.size else 0.0
    return float(loads.std()) / mean if mean else 0.0

"""Leases of ranks: which ranks have become silent, and which workers have been silent long enough to be removed.

What lives here: when each rank was last heard from, on the caller's clock. What must not: reading a clock, and what
follows for the rank (maintenance, holdings).

The length of a rank's silence is measured from the moment when its last record was applied, or from the opening of the
partition if none was applied since. Both are later than the record's append time, so a lease never expires too early,
whatever clocks bridges have. A lease is judged as of a time up to which every appended record has been applied; under
load, that time may lag.

State: when each rank was heard from; it is not durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streams.core.ids import RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress

#: An expiry that has had no effect after this time was refused or lost; it is written again.
EXPIRY_RETRY_MS = 30_000


@dataclass(frozen=True, slots=True)
class Overdue:
    """silent: ranks whose lease has expired. dead: workers all of whose ranks have been silent for the grace period."""

    silent: list[RankId]
    dead: list[WorkerId]


class RankLeases:
    """When the ranks of one partition were last heard from. Times are of one monotonic clock, in ms."""

    def __init__(self, opened_ms: int, grace_ms: int) -> None:
        self._opened_ms = opened_ms
        self._grace_ms = grace_ms
        self._last_applied_ms: dict[RankId, int] = {}
        self._expired_ms: dict[WorkerId, int] = {}

    def note_applied(self, ranks: Iterable[RankId], now_ms: int) -> None:
        """Take note that records of these ranks have been applied."""
        self._last_applied_ms.update(dict.fromkeys(ranks, now_ms))

    def overdue(self, progress: Mapping[RankId, Progress], now_ms: int) -> Overdue:
        """Judge every rank. A worker is not dead while one of its ranks is not silent or has no lease."""
        silent: list[RankId] = []
        dead: dict[WorkerId, bool] = {}
        for rank, state in progress.items():
            if state.health is Health.REMOVED:
                self._last_applied_ms.pop(rank, None)
                continue
            quiet_ms = now_ms - self._last_applied_ms.get(rank, self._opened_ms)
            if state.lease_ms and not state.silent and quiet_ms > state.lease_ms:
                silent.append(rank)
            overdue = state.silent and quiet_ms > state.lease_ms + self._grace_ms
            dead[rank.worker_id] = dead.get(rank.worker_id, True) and overdue
        worker_ids = [worker_id for worker_id, is_dead in dead.items() if is_dead]
        self._expired_ms = {
            worker_id: expired_ms for worker_id, expired_ms in self._expired_ms.items() if dead.get(worker_id)
        }
        return Overdue(
            silent, [worker_id for worker_id in worker_ids if now_ms >= self._expired_ms.get(worker_id, now_ms)]
        )

    def expired(self, worker_id: WorkerId, now_ms: int) -> None:
        """Take note that a worker's expiry has been written; it is due again only after EXPIRY_RETRY_MS."""
        self._expired_ms[worker_id] = now_ms + EXPIRY_RETRY_MS

"""The maintenance tick of a partition's ranks: silence, expiry, resync requests, the clearing of degraded ranks.

What lives here: what is due at a given time, and what must be written for it. What must not: reading a clock, bytes,
Kafka.

The times kept here are not durable. The next owner of the partition measures from the moment when it opens the
partition, which is later, and requests resyncs again. Decisions are durable, since they are in the progress records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streams.core.events import EngineBatch, ResyncRequest, WorkerRemoved
from streams.core.ids import RankId, WorkerId
from streams.core.reducer.holdings import Holdings
from streams.core.reducer.leases import RankLeases
from streams.core.reducer.ordering import Health, Progress
from streams.core.reducer.resync import ResyncSchedule

#: How often every rank of the partition is checked; leases are a few seconds long.
MAINTENANCE_TICK_MS = 500

#: Expiries written in one transaction.
EXPIRED_PER_TICK_MAX = 16

#: The reason that an expiry states.
SILENT = "silent"


#: Keys of `MaintenanceActions.counts`: ranks that fell silent (`silent`), expiries of workers (`expiry_written`),
#: resync requests (`resync_requested`), those of them that were the last for their gap (`resync_given_up`), and
#: degraded ranks that were cleared (`cleared`).
MAINTENANCE_COUNTS = ("silent", "expiry_written", "resync_requested", "resync_given_up", "cleared")


@dataclass(slots=True)
class MaintenanceActions:
    """What must be written: requests to `kv-control`, expiries to `kv-events`. counts: by MAINTENANCE_COUNTS."""

    requests: list[ResyncRequest] = field(default_factory=list)
    expiries: list[EngineBatch] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class RankMaintenance:
    """The maintenance of one partition's ranks while the partition is open. clear_degraded_after_ms: 0 for never."""

    def __init__(self, holdings: Holdings[Any, Any], *, grace_ms: int, clear_degraded_after_ms: int) -> None:
        self._holdings = holdings
        self._grace_ms = grace_ms
        self._clear_after_ms = clear_degraded_after_ms
        self._leases: RankLeases | None = None
        self._resyncs = ResyncSchedule()
        self._last_tick_ms = 0
        # How much each rank had lost at the last tick.
        self._losses: dict[RankId, tuple[int, int]] = {}
        self._degraded_since_ms: dict[RankId, int] = {}

    def tick(self, now_ms: int, wall_ms: int, applied_until: Callable[[], int]) -> MaintenanceActions:
        """Return what is due; called between applying records and taking the changes.

        now_ms: monotonic. wall_ms: written into records for people to read. applied_until: returns the time, on the
        monotonic clock, up to which every appended record is applied. It may ask the broker, so it is called only if a
        lease would otherwise expire.
        """
        actions = MaintenanceActions()
        if self._leases is None:
            self._open(now_ms)
        assert self._leases is not None
        self._leases.note_applied(self._holdings.take_heard(), now_ms)
        self._note_losses(now_ms)
        if now_ms - self._last_tick_ms >= MAINTENANCE_TICK_MS:
            self._last_tick_ms = now_ms
            self._judge_leases(self._leases, now_ms, wall_ms, applied_until, actions)
            self._clear_degraded(now_ms, actions)
        self._request_resyncs(now_ms, wall_ms, actions)
        return actions

    def _open(self, now_ms: int) -> None:
        self._leases = RankLeases(now_ms, self._grace_ms)
        self._last_tick_ms = now_ms
        for rank, progress in self._holdings.progress.items():
            self._losses[rank] = _losses(progress)
            if progress.health is Health.DEGRADED:
                # The previous owner may have requested a resync, but we do not know whether it was answered.
                self._resyncs.lost(rank, "its partition was opened")
                if rank in self._holdings.parking:
                    self._resyncs.answering(rank, now_ms)  # wait for the other chunks before requesting all of them

    def _note_losses(self, now_ms: int) -> None:
        """Find which of the changed ranks lost blocks, and which need no resync any more."""
        for rank in self._holdings.touched:
            progress = self._holdings.progress[rank]
            before = self._losses.get(rank, (0, 0))
            self._losses[rank] = _losses(progress)
            if progress.health is not Health.DEGRADED:
                self._resyncs.settled(rank)
            elif before != _losses(progress):
                self._resyncs.lost(rank, "a gap" if progress.n_gaps > before[0] else "an unknown parent")
        for rank in self._holdings.take_restated():
            self._resyncs.settled(rank)  # even if it stays degraded: the bridge has nothing more to restate
        for rank in self._holdings.take_parked():
            self._resyncs.answering(rank, now_ms)

    def _judge_leases(
        self,
        leases: RankLeases,
        now_ms: int,
        wall_ms: int,
        applied_until: Callable[[], int],
        actions: MaintenanceActions,
    ) -> None:
        overdue = leases.overdue(self._holdings.progress, now_ms)
        if not (overdue.silent or overdue.dead):
            return
        overdue = leases.overdue(self._holdings.progress, min(now_ms, applied_until()))
        for rank in overdue.silent:
            self._holdings.mark_silent(rank)
            actions.counts["silent"] += 1
        for worker_id in overdue.dead[:EXPIRED_PER_TICK_MAX]:
            leases.expired(worker_id, now_ms)
            actions.expiries.append(self._expiry(worker_id, wall_ms))
            actions.counts["expiry_written"] += 1

    def _expiry(self, worker_id: WorkerId, wall_ms: int) -> EngineBatch:
        """Return the removal of a silent worker, which names the last sequence number of its newest rank."""
        ranks = [
            progress
            for progress in self._holdings.progress.values()
            if progress.rank.worker_id == worker_id and progress.health is not Health.REMOVED
        ]
        newest = max(ranks, key=lambda progress: (progress.epoch.incarnation, -progress.rank.dp_rank))
        return EngineBatch(
            rank=newest.rank,
            model=newest.model,
            block_size=max(newest.block_size, 1),
            incarnation=newest.epoch.incarnation,
            sequence=0,
            digest=0,
            emitted_at_ms=wall_ms,
            body=WorkerRemoved(SILENT, newest.sequence),
        )

    def _clear_degraded(self, now_ms: int, actions: MaintenanceActions) -> None:
        if not self._clear_after_ms:
            return
        degraded = {
            rank: self._degraded_since_ms.get(rank, now_ms)
            for rank, progress in self._holdings.progress.items()
            if progress.health is Health.DEGRADED
        }
        self._degraded_since_ms = degraded
        for rank, since_ms in degraded.items():
            if now_ms - since_ms >= self._clear_after_ms:
                self._holdings.clear(rank)
                self._resyncs.settled(rank)
                actions.counts["cleared"] += 1

    def _request_resyncs(self, now_ms: int, wall_ms: int, actions: MaintenanceActions) -> None:
        if not self._resyncs.n_pending:
            return
        ranks = self._holdings.progress
        for due in self._resyncs.due(now_ms, lambda rank: not ranks[rank].silent):
            progress = ranks[due.rank]
            actions.requests.append(
                ResyncRequest(
                    rank=due.rank,
                    incarnation=progress.epoch.incarnation,
                    sequence=progress.sequence,
                    attempt=due.attempt,
                    reason=due.reason,
                    asked_at_ms=wall_ms,
                )
            )
            actions.counts["resync_requested"] += 1
            actions.counts["resync_given_up"] += due.last


def _losses(progress: Progress) -> tuple[int, int]:
    return progress.n_gaps, progress.n_unknown_parents

"""All ranks of one partition: engine batches in, verdicts and changed records out.

What lives here: joining a batch's verdict (ordering) with what its events do (run_store). What must not: Kafka, bytes
(tables.records) and time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from streams.core.events import EngineBatch, KvEvent
from streams.core.ids import Epoch, Incarnation, RankId, SequenceHash, Tier
from streams.core.ordering import Health, Judgement, Progress, Verdict, judge, renew
from streams.core.run_store import PlainRunStore, RunStore
from streams.core.runs import Run, RunKey

Events = TypeVar("Events")
Change = TypeVar("Change")


@dataclass(slots=True)
class Changes(Generic[Change]):
    """What one transaction must write."""

    progress: list[Progress]
    runs: list[Change]


class Holdings(Generic[Events, Change]):
    """Progress of all ranks of one partition, over a store of their runs."""

    def __init__(self, runs: RunStore[Events, Change]) -> None:
        self.runs = runs
        self.progress: dict[RankId, Progress] = {}
        self._touched: dict[RankId, None] = {}

    def load(self, progress: Iterable[Progress], runs: Iterable[Run]) -> int:
        """Start from what the table holds; gives the number of runs whose rank has no progress, which are left out.

        There are none unless a stranger wrote them: progress is written first.
        """
        self.progress = {record.rank: record for record in progress}
        return self.runs.load({rank: record.epoch for rank, record in self.progress.items()}, runs)

    def apply(self, batch: EngineBatch, events: Events) -> Verdict:
        """Judge one batch and, if it is news, apply its events."""
        rank = batch.rank
        judgement = judge(self._known(rank), batch)
        progress = judgement.progress
        if judgement.verdict in (Verdict.STALE, Verdict.DUPLICATE):
            return judgement.verdict
        self._begin(judgement)
        applied = self.runs.apply(rank, events)
        if applied.n_clears:
            # An empty cache is known exactly, whatever was lost before it. Blocks that the batch left out may have come
            # after it, though: nobody knows where in the batch they were.
            health = Health.APPROXIMATE if batch.n_unindexed else Health.EXACT
            epoch = Epoch(progress.epoch.incarnation, progress.epoch.generation + applied.n_clears)
            progress = replace(progress, epoch=epoch, health=health)
        if applied.n_unknown_parents or applied.n_unknown_removals:
            progress = replace(
                progress,
                n_unknown_parents=progress.n_unknown_parents + applied.n_unknown_parents,
                n_unknown_removals=progress.n_unknown_removals + applied.n_unknown_removals,
                health=max(progress.health, Health.DEGRADED if applied.parents_since_clear else Health.EXACT),
            )
        self.progress[rank] = progress
        self._touched[rank] = None
        return judgement.verdict

    def renew(self, batch: EngineBatch, lease_ms: int) -> Verdict:
        """Judge a heartbeat; a progress that it does not change is not written."""
        rank = batch.rank
        judgement = renew(self._known(rank), batch, lease_ms)
        if judgement.verdict is not Verdict.STALE:
            self._begin(judgement)
            if self.progress.get(rank) != judgement.progress:
                self.progress[rank] = judgement.progress
                self._touched[rank] = None
        return judgement.verdict

    def remove_worker(self, worker_id: int, incarnation: Incarnation) -> Verdict:
        """End a worker's life in every rank of this partition that is not of a newer one."""
        verdict = Verdict.STALE
        for rank, progress in self.progress.items():
            epoch = progress.epoch
            if rank.worker_id != worker_id or epoch.incarnation > incarnation:
                continue
            if progress.health is Health.REMOVED and epoch.incarnation == incarnation:
                continue
            self._end(replace(progress, epoch=Epoch(incarnation, epoch.generation + 1), health=Health.REMOVED))
            verdict = Verdict.APPLIED
        return verdict

    def degrade_all(self) -> None:
        """The source lost records that no rank of this partition has seen."""
        for rank, progress in self.progress.items():
            if progress.health is Health.EXACT:
                self.progress[rank] = replace(progress, health=Health.DEGRADED, n_gaps=progress.n_gaps + 1)
                self._touched[rank] = None

    def take_changes(self, tombstones_max: int) -> Changes[Change]:
        """Take what changed since the last call, progress first, with at most `tombstones_max` of ended epochs."""
        changes: Changes[Change] = Changes([], self.runs.take_changes(tombstones_max))
        for rank in self._touched:
            progress = replace(self.progress[rank], n_blocks=self.runs.n_blocks(rank))
            self.progress[rank] = progress
            changes.progress.append(progress)
        self._touched.clear()
        return changes

    @property
    def owes_tombstones(self) -> bool:
        """Whether records of ended epochs still lie in the log."""
        return self.runs.owes_tombstones

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Every block held by any rank."""
        return self.runs.members()

    def _known(self, rank: RankId) -> Progress:
        """Progress of a rank; of one that never told anything, that of a life before its first."""
        return self.progress.get(rank) or Progress(rank, Epoch(Incarnation(0), 0))

    def _begin(self, judgement: Judgement) -> None:
        """Make room for what a record tells: end an older epoch, or begin a rank."""
        rank = judgement.progress.rank
        if judgement.begins_epoch or rank not in self.progress:
            self.runs.end(rank, judgement.progress.epoch)

    def _end(self, progress: Progress) -> None:
        """End what a rank holds and take its new progress."""
        self.runs.end(progress.rank, progress.epoch)
        self.progress[progress.rank] = progress
        self._touched[progress.rank] = None


PlainHoldings = Holdings[Iterable[KvEvent], tuple[RunKey, Run | None]]


def plain_holdings() -> PlainHoldings:
    """Holdings over the plain store."""
    return Holdings(PlainRunStore())

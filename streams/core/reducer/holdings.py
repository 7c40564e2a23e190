"""All ranks of one partition: engine batches in, verdicts and changed records out.

What lives here: joining a record's verdict (ordering) with what it does to runs (run_store) and to parked chunks
(restatement). What must not: Kafka, bytes (tables.records) and time (caretaker).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from streams.core.events import EngineBatch, Heartbeat, KvEvent
from streams.core.ids import Epoch, Incarnation, RankId, SequenceHash, Tier
from streams.core.reducer.ordering import (
    Health,
    Judgement,
    Progress,
    Verdict,
    judge,
    judge_chunk,
    refuses_expiry,
    removed,
    renew,
    restated,
)
from streams.core.reducer.restatement import RESTATED_RUNS_FULL, ChunkKey, Parking
from streams.core.reducer.run_store import PlainRunStore, RunStore, unchanged
from streams.core.runs import Run, RunKey

Events = TypeVar("Events")
Change = TypeVar("Change")


@dataclass(slots=True)
class Changes(Generic[Change]):
    """What one transaction must write. parked: rows of chunks as they came, None for a tombstone."""

    progress: list[Progress]
    runs: list[Change]
    parked: list[tuple[ChunkKey, bytes | None]] = field(default_factory=list)


class Holdings(Generic[Events, Change]):
    """Progress of all ranks of one partition, over a store of their runs.

    touched: ranks whose progress must be written. on_effect: called between the numbered effects of a record
    (tables.partition), None where nobody asks.
    """

    def __init__(self, runs: RunStore[Events, Change], on_effect: Callable[[int], None] | None = None) -> None:
        self.runs = runs
        self.progress: dict[RankId, Progress] = {}
        self.parking = Parking()
        self.touched: dict[RankId, None] = {}
        self._on_effect = on_effect
        self._heard: dict[RankId, None] = {}
        self._parked: dict[RankId, None] = {}
        self._restated: dict[RankId, None] = {}
        self._n_restated_runs = 0

    def load(
        self,
        progress: Iterable[Progress],
        runs: Iterable[Run],
        parked: Iterable[tuple[ChunkKey, EngineBatch, int]] = (),
    ) -> int:
        """Start from what the table holds; gives the number of runs whose rank has no progress, which are left out.

        There are none unless a stranger wrote them: progress is written first. parked: rows, and bytes of each.
        """
        self.progress = {record.rank: record for record in progress}
        self.parking.load(parked)
        return self.runs.load({rank: record.epoch for rank, record in self.progress.items()}, runs)

    def apply(self, batch: EngineBatch, events: Events) -> Verdict:
        """Judge one batch and, if it is news, apply its events."""
        rank = batch.rank
        judgement = self._judged(judge(self._known(rank), batch))
        progress = judgement.progress
        if judgement.verdict in (Verdict.STALE, Verdict.DUPLICATE):
            return judgement.verdict
        self._begin(judgement)
        self.parking.drop(rank)  # a restatement would be complete to before this batch
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
        self.touched[rank] = None
        self._heard[rank] = None
        return judgement.verdict

    def renew(self, batch: EngineBatch, heartbeat: Heartbeat) -> Verdict:
        """Judge a heartbeat; a progress that it does not change is not written."""
        judgement = self._judged(renew(self._known(batch.rank), batch, heartbeat.lease_ms))
        if judgement.verdict is not Verdict.STALE:
            self._begin(judgement)
            self._keep(judgement.progress)
            self._heard[batch.rank] = None
        return judgement.verdict

    def restate(self, batch: EngineBatch, raw: bytes) -> Verdict:
        """Judge a chunk of a restatement: park it, or swap the whole in where it is the last one.

        raw: the record as it came. Raises BadRecord for a restatement larger than one may be; the rank is then as it
        was, without anything parked.
        """
        rank = batch.rank
        judgement = self._judged(judge_chunk(self._known(rank), batch))
        if judgement.verdict is not Verdict.PARKED:
            return judgement.verdict
        self._begin(judgement)
        self._keep(judgement.progress)
        self._heard[rank] = None
        found = self.parking.take(batch, raw)
        if isinstance(found, bool):
            self._parked[rank] = None
            return Verdict.PARKED if found else Verdict.DROPPED
        self._end(restated(judgement.progress, batch, exact=found.exact, n_unindexed=found.n_unindexed))
        self.runs.restate(rank, found.runs)
        self._n_restated_runs += found.n_runs
        self._restated[rank] = None
        return Verdict.RESTATED

    def remove_worker(self, worker_id: int, incarnation: Incarnation, *, silent: bool = False) -> Verdict:
        """End a worker's life in every rank of this partition that is not of a newer one.

        silent: nobody asked for it, so its bridge may come back with a heartbeat.
        """
        verdict = Verdict.STALE
        for rank, progress in self.progress.items():
            gone = removed(progress, incarnation, silent=silent) if rank.worker_id == worker_id else None
            if gone is None:
                continue
            if gone.epoch != progress.epoch:
                self._end(gone)
            else:
                self._keep(gone)
            verdict = Verdict.APPLIED
        return verdict

    def expire_worker(self, batch: EngineBatch, seen_sequence: int) -> Verdict:
        """Remove a worker for its silence, unless any of its ranks was heard of since that was written."""
        for rank, progress in self.progress.items():
            if rank.worker_id == batch.rank.worker_id and refuses_expiry(progress, batch, seen_sequence):
                return Verdict.STALE
        return self.remove_worker(batch.rank.worker_id, batch.incarnation, silent=True)

    def mark_silent(self, rank: RankId) -> None:
        """A rank's lease is over: no request goes there until it is heard of."""
        self._keep(replace(self.progress[rank], silent=True))

    def clear(self, rank: RankId) -> None:
        """Forget what a rank holds and what it lost: empty, and exactly so for whatever it tells from now on."""
        progress = self.progress[rank]
        epoch = Epoch(progress.epoch.incarnation, progress.epoch.generation + 1)
        self._end(replace(progress, epoch=epoch, health=Health.EXACT))

    def degrade_all(self) -> None:
        """The source lost records that no rank of this partition has seen."""
        for rank, progress in self.progress.items():
            self.parking.drop(rank)
            if progress.health in (Health.EXACT, Health.DEGRADED):
                self._keep(replace(progress, health=Health.DEGRADED, n_gaps=progress.n_gaps + 1))

    def take_heard(self) -> Iterable[RankId]:
        """Ranks that records were applied of since the last call."""
        heard, self._heard = self._heard, {}
        return heard

    def take_parked(self) -> Iterable[RankId]:
        """Ranks that chunks arrived of since the last call."""
        parked, self._parked = self._parked, {}
        return parked

    def take_restated(self) -> Iterable[RankId]:
        """Ranks that were restated since the last call."""
        done, self._restated = self._restated, {}
        return done

    def take_changes(self, tombstones_max: int) -> Changes[Change]:
        """Take what changed since the last call, progress first, with at most `tombstones_max` of ended epochs."""
        self._n_restated_runs = 0
        changes = Changes[Change]([], self.runs.take_changes(tombstones_max), self.parking.take_changes())
        for rank in self.touched:
            progress = replace(self.progress[rank], n_blocks=self.runs.n_blocks(rank))
            self.progress[rank] = progress
            changes.progress.append(progress)
        self.touched.clear()
        return changes

    @property
    def full(self) -> bool:
        """Whether restatements have changed so much that it is written before more is applied."""
        return self._n_restated_runs >= RESTATED_RUNS_FULL

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

    def _judged(self, judgement: Judgement) -> Judgement:
        """Tell whoever asks that effects 2, fence, and 3, verdict, are behind us and 4 is not."""
        if self._on_effect is not None:
            self._on_effect(2)
            self._on_effect(3)
        return judgement

    def _begin(self, judgement: Judgement) -> None:
        """Make room for what a record tells: end an older epoch, or begin a rank."""
        rank = judgement.progress.rank
        if judgement.begins_epoch or rank not in self.progress:
            self.runs.end(rank, judgement.progress.epoch)
            self.parking.drop(rank)

    def _keep(self, progress: Progress) -> None:
        """Take a rank's progress, to be written if it is another one."""
        if self.progress.get(progress.rank) != progress:
            self.progress[progress.rank] = progress
            self.touched[progress.rank] = None

    def _end(self, progress: Progress) -> None:
        """End what a rank holds and take its new progress."""
        self.runs.end(progress.rank, progress.epoch)
        self.parking.drop(progress.rank)
        self.progress[progress.rank] = progress
        self.touched[progress.rank] = None


PlainHoldings = Holdings[Iterable[KvEvent], tuple[RunKey, Run | None]]


def plain_holdings() -> PlainHoldings:
    """Holdings over the plain store."""
    return Holdings(PlainRunStore(unchanged))

"""All ranks of one partition: engine batches in, verdicts and changed records out.

What lives here: a record's verdict (ordering) combined with its effect on runs (run_store) and on parked chunks
(restatement). What must not: Kafka, bytes (tables.records), time (maintenance).

State: what a partition's ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from streams.core.events import EngineBatch, Heartbeat
from streams.core.ids import Epoch, Incarnation, RankId
from streams.core.reducer.ordering import (
    Health,
    Judgement,
    Progress,
    Verdict,
    judge,
    judge_chunk,
    judge_unusable,
    refuses_expiry,
    removed,
    renew,
    restated,
)
from streams.core.reducer.restatement import RESTATED_RUNS_FULL, ChunkKey, Parking
from streams.core.reducer.run_store import RunStore
from streams.core.runs import Run

Events = TypeVar("Events")
Change = TypeVar("Change")


@dataclass(slots=True)
class HoldingChanges(Generic[Change]):
    """What one transaction must write. parked: chunks as received, None for a tombstone."""

    progress: list[Progress]
    runs: list[Change]
    parked: list[tuple[ChunkKey, bytes | None]] = field(default_factory=list)


class Holdings(Generic[Events, Change]):
    """Progress of all ranks of one partition, over a store of their runs.

    touched: ranks whose progress must be written. on_effect: called between the numbered effects of a record
    (tables.partition), None if no fault point is armed.
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
        """Start from the rows of the table; returns the number of runs whose rank has no progress, which are left out.

        Only a foreign writer can have written such runs, since progress is written first. parked: key, chunk and bytes
        of each parked row.
        """
        self.progress = {record.rank: record for record in progress}
        self.parking.load(parked)
        return self.runs.load({rank: record.epoch for rank, record in self.progress.items()}, runs)

    def apply(self, batch: EngineBatch, events: Events) -> Verdict:
        """Judge one batch and, if it is new, apply its events."""
        rank = batch.rank
        judgement = self._judged(judge(self._progress_of(rank), batch))
        progress = judgement.progress
        if judgement.verdict in (Verdict.STALE, Verdict.DUPLICATE):
            self._keep_feed(judgement)
            return judgement.verdict
        self._begin(judgement)
        self.parking.drop(rank)  # a restatement would not include this batch
        applied = self.runs.apply(rank, events)
        if applied.n_clears:
            # An empty cache is known exactly, whatever was lost before. The batch's missing events and its unindexed
            # blocks may have followed the clear, though: their position in the batch is unknown.
            health = Health.APPROXIMATE if batch.n_unindexed else Health.EXACT
            if batch.incomplete:
                health = Health.DEGRADED
            epoch = Epoch(progress.epoch.incarnation, progress.epoch.generation + applied.n_clears)
            progress = replace(progress, epoch=epoch, health=health)
        if applied.n_unknown_parents or applied.n_unknown_removals:
            progress = replace(
                progress,
                n_unknown_parents=progress.n_unknown_parents + applied.n_unknown_parents,
                n_unknown_removals=progress.n_unknown_removals + applied.n_unknown_removals,
                health=Health.DEGRADED if applied.parents_since_clear else progress.health,
            )
        self.progress[rank] = progress
        self.touched[rank] = None
        self._heard[rank] = None
        return judgement.verdict

    def refuse(self, batch: EngineBatch) -> Verdict:
        """Judge a batch of which no event can be used. It ends an older incarnation all the same."""
        judgement = self._judged(judge_unusable(self._progress_of(batch.rank), batch))
        if judgement.verdict is not Verdict.STALE:
            self._begin(judgement)
            self.parking.drop(batch.rank)
            self._keep(judgement.progress)
            self._heard[batch.rank] = None
        return judgement.verdict

    def renew(self, batch: EngineBatch, heartbeat: Heartbeat) -> Verdict:
        """Judge a heartbeat; progress is written only if the heartbeat changes it."""
        judgement = self._judged(renew(self._progress_of(batch.rank), batch, heartbeat.lease_ms))
        if judgement.verdict is not Verdict.STALE:
            self._begin(judgement)
            self._keep(judgement.progress)
            self._heard[batch.rank] = None
        return judgement.verdict

    def restate(self, batch: EngineBatch, raw: bytes) -> Verdict:
        """Judge a chunk of a restatement: park it, or, if it is the last one, replace what the rank holds.

        raw: the record as received. Raises BadRecord for a restatement over the limits; the rank then keeps what it
        holds, and nothing stays parked.
        """
        rank = batch.rank
        judgement = self._judged(judge_chunk(self._progress_of(rank), batch))
        if judgement.verdict is not Verdict.PARKED:
            self._keep_feed(judgement)
            return judgement.verdict
        self._begin(judgement)
        self._keep(judgement.progress)
        self._heard[rank] = None
        parked = self.parking.take(batch, raw)
        if isinstance(parked, bool):
            self._parked[rank] = None
            return Verdict.PARKED if parked else Verdict.DROPPED
        self._end(restated(judgement.progress, batch, exact=parked.exact, n_unindexed=parked.n_unindexed))
        self.runs.restate(rank, parked.runs)
        self._n_restated_runs += parked.n_runs
        self._restated[rank] = None
        return Verdict.RESTATED

    def remove_worker(self, worker_id: int, incarnation: Incarnation, *, silent: bool = False) -> Verdict:
        """Remove a worker: every rank of it in this partition, unless the rank's incarnation is newer.

        silent: True if the worker expired, so that a heartbeat of its bridge brings it back; False if a client removed
        it.
        """
        verdict = Verdict.STALE
        for rank, progress in self.progress.items():
            after = removed(progress, incarnation, silent=silent) if rank.worker_id == worker_id else None
            if after is None:
                continue
            if after.epoch != progress.epoch:
                self._end(after)
            else:
                self._keep(after)
            verdict = Verdict.APPLIED
        return verdict

    def expire_worker(self, batch: EngineBatch, seen_sequence: int) -> Verdict:
        """Remove a silent worker, unless any of its ranks was heard from after the expiry was written."""
        for rank, progress in self.progress.items():
            if rank.worker_id == batch.rank.worker_id and refuses_expiry(progress, batch, seen_sequence):
                return Verdict.STALE
        return self.remove_worker(batch.rank.worker_id, batch.incarnation, silent=True)

    def mark_silent(self, rank: RankId) -> None:
        """Take note that a rank's lease has expired: no request goes there until it is heard from."""
        self._keep(replace(self.progress[rank], silent=True))

    def clear(self, rank: RankId) -> None:
        """Drop what a rank holds, and clear its degraded state: it is empty and exact until its next batch."""
        progress = self.progress[rank]
        epoch = Epoch(progress.epoch.incarnation, progress.epoch.generation + 1)
        self._end(replace(progress, epoch=epoch, health=Health.EXACT))

    def degrade_all(self) -> None:
        """Degrade every rank, since the source lost records before this partition read them."""
        for rank, progress in self.progress.items():
            self.parking.drop(rank)
            if progress.health is not Health.REMOVED:
                self._keep(replace(progress, health=Health.DEGRADED, n_gaps=progress.n_gaps + 1))

    def take_heard(self) -> Iterable[RankId]:
        """Take the ranks whose records were applied since the last call."""
        heard, self._heard = self._heard, {}
        return heard

    def take_parked(self) -> Iterable[RankId]:
        """Take the ranks whose chunks arrived since the last call."""
        parked, self._parked = self._parked, {}
        return parked

    def take_restated(self) -> Iterable[RankId]:
        """Take the ranks that were restated since the last call."""
        done, self._restated = self._restated, {}
        return done

    def take_changes(self, tombstones_max: int) -> HoldingChanges[Change]:
        """Take what changed since the last call, with at most `tombstones_max` tombstones of ended epochs."""
        self._n_restated_runs = 0
        changes = HoldingChanges[Change]([], self.runs.take_changes(tombstones_max), self.parking.take_changes())
        for rank in self.touched:
            progress = replace(self.progress[rank], n_blocks=self.runs.n_blocks(rank))
            self.progress[rank] = progress
            changes.progress.append(progress)
        self.touched.clear()
        return changes

    @property
    def full(self) -> bool:
        """Whether restatements have changed so much that it must be written before more is applied."""
        return self._n_restated_runs >= RESTATED_RUNS_FULL

    @property
    def has_pending_tombstones(self) -> bool:
        """Whether rows of ended epochs still need their tombstones."""
        return self.runs.has_pending_tombstones

    def _progress_of(self, rank: RankId) -> Progress:
        """Return a rank's progress; for a new rank, that of an incarnation before its first."""
        return self.progress.get(rank) or Progress(rank, Epoch(Incarnation(0), 0))

    def _judged(self, judgement: Judgement) -> Judgement:
        """Report effects 2 (fence) and 3 (verdict) to the armed fault point; return the judgement."""
        if self._on_effect is not None:
            self._on_effect(2)
            self._on_effect(3)
        return judgement

    def _begin(self, judgement: Judgement) -> None:
        """Prepare for a record: end the rank's older epoch, or create the rank."""
        rank = judgement.progress.rank
        if judgement.begins_epoch or rank not in self.progress:
            self.runs.end(rank, judgement.progress.epoch)
            self.parking.drop(rank)

    def _keep(self, progress: Progress) -> None:
        """Set a rank's progress, to be written if it has changed."""
        if self.progress.get(progress.rank) != progress:
            self.progress[progress.rank] = progress
            self.touched[progress.rank] = None

    def _keep_feed(self, judgement: Judgement) -> None:
        """Keep the feed's state of a duplicate; see `judge`. A rank may be unknown if its incarnation is 0."""
        if judgement.verdict is Verdict.DUPLICATE and judgement.progress.rank in self.progress:
            self._keep(judgement.progress)

    def _end(self, progress: Progress) -> None:
        """End everything that a rank holds, and set its new progress."""
        self.runs.end(progress.rank, progress.epoch)
        self.parking.drop(progress.rank)
        self.progress[progress.rank] = progress
        self.touched[progress.rank] = None

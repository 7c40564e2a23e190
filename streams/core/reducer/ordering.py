"""The order of one rank's batches: which is news, which a repeat, what is missing before it (docs/architecture.md).

What lives here: a rank's progress and the verdict on each batch, as values and a pure function. What must not: blocks
(run_store), bytes (tables.records), time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from streams.core.events import BEFORE_FIRST, EngineBatch
from streams.core.ids import Epoch, Incarnation, RankId


class Health(enum.IntEnum):
    """How far a rank's facts can be trusted; the numbers are on Kafka."""

    EXACT = 0
    DEGRADED = 1  # a batch was lost, or a store's parent was never seen
    APPROXIMATE = 2  # a model with groups that are not full attention
    REMOVED = 3  # the worker is gone; kept so that its late events are refused


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has been read, and what was seen on the way.

    sequence: last batch applied, BEFORE_FIRST for none. lease_ms: what the rank's bridge promised to be heard of
    within, 0 where nobody promised. silent: it was not, and no request goes to the rank until it is.
    """

    rank: RankId
    epoch: Epoch
    sequence: int = BEFORE_FIRST
    digest: int = 0
    health: Health = Health.EXACT
    model: str = ""
    block_size: int = 0
    n_blocks: int = 0
    n_gaps: int = 0
    n_unknown_parents: int = 0
    n_unknown_removals: int = 0
    lease_ms: int = 0
    silent: bool = False


class Verdict(enum.StrEnum):
    """What became of a record; a value, not an error."""

    APPLIED = "applied"
    GAP = "gap"  # applied, but batches before it are missing; or a heartbeat told that some are
    DUPLICATE = "duplicate"
    STALE = "stale"  # of an older life of the engine, of a removed worker, or an expiry that came too late
    RENEWED = "renewed"  # a heartbeat: the bridge lives
    PARKED = "parked"  # a chunk of a restatement, waiting for the rest
    DROPPED = "dropped"  # a chunk that follows nothing, or for which there is no room
    RESTATED = "restated"  # the last chunk: the whole was swapped in


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on a record, the rank's progress with it, and whether it ends whatever the rank held."""

    verdict: Verdict
    progress: Progress
    begins_epoch: bool = False


def judge(progress: Progress, batch: EngineBatch) -> Judgement:
    """Judge a batch of events by its incarnation and sequence number."""
    fenced = fence(progress, batch)
    if fenced is None:
        return Judgement(Verdict.STALE, progress)
    progress, begins = fenced
    if batch.sequence <= progress.sequence and not begins:
        return Judgement(Verdict.DUPLICATE, progress)
    gap = batch.sequence > progress.sequence + 1
    health = progress.health
    if gap and health < Health.DEGRADED:
        health = Health.DEGRADED
    if batch.n_unindexed and health < Health.APPROXIMATE:
        health = Health.APPROXIMATE
    news = Progress(
        progress.rank,
        progress.epoch,
        batch.sequence,
        batch.digest,
        health,
        batch.model,
        batch.block_size,
        progress.n_blocks,
        progress.n_gaps + gap,
        progress.n_unknown_parents,
        progress.n_unknown_removals,
        progress.lease_ms,
    )
    return Judgement(Verdict.GAP if gap else Verdict.APPLIED, news, begins)


def renew(progress: Progress, batch: EngineBatch, lease_ms: int) -> Judgement:
    """Judge a heartbeat: whoever feeds the rank lives, and had published up to the batch's sequence.

    It never moves the sequence on. The progress that it gives is the one that it was given where nothing changed, so
    that a quiet fleet writes nothing.
    """
    returned = progress.health is Health.REMOVED and progress.silent and batch.incarnation == progress.epoch.incarnation
    if returned:
        # Taken for dead and not dead: what it held is forgotten, what it told meanwhile was refused. Only a removal
        # that somebody asked for needs a new beginning.
        epoch = Epoch(progress.epoch.incarnation, progress.epoch.generation + 1)
        progress, begins = replace(progress, epoch=epoch, health=Health.EXACT, n_blocks=0), True
    elif progress.health is Health.REMOVED and batch.incarnation == progress.epoch.incarnation:
        return Judgement(Verdict.STALE, progress)
    else:
        fenced = fence(progress, batch)
        if fenced is None:
            return Judgement(Verdict.STALE, progress)
        progress, begins = fenced
        if begins:
            progress = replace(progress, model=batch.model, block_size=batch.block_size)
    if progress.silent or progress.lease_ms != lease_ms:
        progress = replace(progress, lease_ms=lease_ms, silent=False)
    missing = batch.sequence > (BEFORE_FIRST if returned else progress.sequence)
    if not missing or progress.health is not Health.EXACT:  # a loss known already: each heartbeat tells of it again
        return Judgement(Verdict.RENEWED, progress, begins)
    lossy = replace(progress, health=Health.DEGRADED, n_gaps=progress.n_gaps + 1)
    return Judgement(Verdict.GAP, lossy, begins)


def judge_chunk(progress: Progress, batch: EngineBatch) -> Judgement:
    """Judge a chunk of a restatement complete to the batch's sequence: parked where it is of use.

    A newer life begins by it, degraded, since what came before the restatement was never seen.
    """
    fenced = fence(progress, batch)
    if fenced is None:
        return Judgement(Verdict.STALE, progress)
    progress, begins = fenced
    if begins:
        progress = replace(
            progress,
            health=Health.DEGRADED,
            n_gaps=progress.n_gaps + 1,
            model=batch.model,
            block_size=batch.block_size,
        )
    elif batch.sequence < progress.sequence:
        return Judgement(Verdict.DUPLICATE, progress)  # it lacks what was applied behind it
    if progress.silent:
        progress = replace(progress, silent=False)
    return Judgement(Verdict.PARKED, progress, begins)


def restated(progress: Progress, batch: EngineBatch, *, exact: bool, n_unindexed: int) -> Progress:
    """Give a rank's progress behind a restatement: complete to the batch's sequence, under a new epoch.

    exact: the ledger that was restated had no gap itself. Without that the rank stays degraded.
    """
    whole = Health.APPROXIMATE if n_unindexed else Health.EXACT
    return replace(
        progress,
        epoch=Epoch(progress.epoch.incarnation, progress.epoch.generation + 1),
        sequence=batch.sequence,
        digest=batch.digest,
        health=whole if exact else Health.DEGRADED,
        model=batch.model,
        block_size=batch.block_size,
    )


def fence(progress: Progress, batch: EngineBatch) -> tuple[Progress, bool] | None:
    """Give the progress of the life that a batch is of, and whether that life begins here; None for an older one."""
    known = progress.epoch.incarnation
    if batch.incarnation == known and progress.health is not Health.REMOVED:
        return progress, False
    # A batch numbered BEFORE_FIRST only says that a life begins; whoever is removed and begins again is back.
    revived = batch.incarnation == known and batch.sequence == BEFORE_FIRST
    if batch.incarnation <= known and not revived:
        return None
    return replace(
        progress,
        epoch=Epoch(known, progress.epoch.generation + 1) if revived else Epoch(batch.incarnation, 0),
        sequence=BEFORE_FIRST,
        digest=0,
        health=Health.EXACT,
        n_blocks=0,
        lease_ms=0,  # another bridge may feed this life, or none that promises anything
        silent=False,
    ), True


def refuses_expiry(progress: Progress, batch: EngineBatch, seen_sequence: int) -> bool:
    """Whether a rank was heard of since its worker's expiry was written, which then comes too late for the worker.

    It lies in the log behind whatever the worker told before it, and that has been applied by now: a rank that is not
    silent any more refuses it, or is of a newer life, or is the one that it names and has gone on.
    """
    if progress.health is Health.REMOVED:
        return False
    went_on = progress.rank == batch.rank and progress.sequence != seen_sequence
    return not progress.silent or went_on or progress.epoch.incarnation > batch.incarnation


def removed(progress: Progress, incarnation: Incarnation, *, silent: bool) -> Progress | None:
    """Give a rank's progress behind its worker's removal; None where that changes nothing: of a newer life, or gone.

    silent: nobody asked for it, so its bridge may come back with a heartbeat.
    """
    epoch = progress.epoch
    if epoch.incarnation > incarnation:
        return None
    if progress.health is not Health.REMOVED or epoch.incarnation != incarnation:
        epoch = Epoch(incarnation, epoch.generation + 1)
        return replace(progress, epoch=epoch, health=Health.REMOVED, silent=silent)
    # Expired first, and now somebody asks for it?
    return replace(progress, silent=False) if progress.silent and not silent else None

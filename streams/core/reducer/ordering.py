"""The order of one rank's batches: which is new, which is a duplicate, what is missing (docs/architecture.md).

What lives here: a rank's progress, and the verdict on each record, as values and pure functions. What must not: blocks
(run_store), bytes (tables.records), time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from streams.core.events import BEFORE_FIRST, ENDED_LEASE_MS, EngineBatch, FeedState
from streams.core.ids import Epoch, Incarnation, RankId


class Health(enum.IntEnum):
    """How far a rank's facts can be trusted; the numbers are on Kafka.

    A rank that is degraded and approximate is DEGRADED. An approximate rank may hold more than the index has; after
    lost events, it may also hold less.
    """

    EXACT = 0
    DEGRADED = 1  # a batch was lost, or the parent of a stored block is unknown
    APPROXIMATE = 2  # the index cannot represent some blocks that the rank may hold (EngineBatch.n_unindexed)
    REMOVED = 3  # the worker was removed; the row is kept so that its late events are refused


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank's batches are applied, and what was found in them.

    sequence: the last applied batch, BEFORE_FIRST for none. lease_ms: the time within which the rank's bridge must be
    heard from, 0 without a lease. silent: the lease has expired; no request goes to the rank until it is heard from.
    feed: state of the rank's feed according to its last record that was not stale, except for duplicates that say LIVE.
    n_restated: restatements among the epoch's generations, so that the others are clears and removals.
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
    feed: FeedState = FeedState.LIVE
    n_restated: int = 0


class Verdict(enum.StrEnum):
    """What a record turned out to be; a value, not an error."""

    APPLIED = "applied"
    GAP = "gap"  # applied, but events of it or before it are missing; or a heartbeat that shows a missing batch
    DUPLICATE = "duplicate"
    STALE = "stale"  # from an older incarnation or a removed worker, or an expiry that came too late
    WRONG_BLOCK_SIZE = "wrong_block_size"  # its blocks have another size than the scope's; none of them is applied
    RENEWED = "renewed"  # a heartbeat: the bridge is running
    PARKED = "parked"  # a chunk of a restatement that waits for the rest
    DROPPED = "dropped"  # a chunk that does not follow the parked ones, or is over capacity
    RESTATED = "restated"  # the last chunk: the restatement has replaced what the rank held


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on a record, the rank's progress after it, and whether it ends everything that the rank held."""

    verdict: Verdict
    progress: Progress
    begins_epoch: bool = False


def judge(progress: Progress, batch: EngineBatch) -> Judgement:
    """Judge a batch of events by its incarnation and sequence number. A duplicate can change nothing but the feed."""
    fenced = fence(progress, batch)
    if fenced is None:
        return Judgement(Verdict.STALE, progress)
    progress, begins = fenced
    if batch.sequence <= progress.sequence and not begins:
        return Judgement(Verdict.DUPLICATE, _unless_live(progress, batch))
    gap = batch.sequence > progress.sequence + 1 or batch.incomplete
    health = progress.health
    if gap:
        health = Health.DEGRADED
    elif batch.n_unindexed and health is Health.EXACT:
        health = Health.APPROXIMATE
    after = Progress(
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
        feed=batch.feed,
        silent=progress.lease_ms == ENDED_LEASE_MS,
        n_restated=progress.n_restated,
    )
    return Judgement(Verdict.GAP if gap else Verdict.APPLIED, after, begins)


def _unless_live(progress: Progress, batch: EngineBatch) -> Progress:
    """Return a rank's progress after a duplicate, which may say that the feed is behind, but not that it is live.

    Late records of a former bridge may say that the feed is live, and make duplicates of the batches that the next
    bridge publishes while it catches up.
    """
    if not batch.feed or batch.feed is progress.feed:
        return progress
    return replace(progress, feed=batch.feed)


def judge_unusable(progress: Progress, batch: EngineBatch) -> Judgement:
    """Judge a batch of which no event can be used, because its blocks have another size than the scope's.

    A newer incarnation ends what the rank held, as if the batch could be used. The sequence does not advance. Progress
    contains the batch's block size, so that routers do not choose the rank.
    """
    fenced = fence(progress, batch)
    if fenced is None:
        return Judgement(Verdict.STALE, progress)
    progress, begins = fenced
    progress = replace(progress, health=Health.DEGRADED, model=batch.model, block_size=batch.block_size)
    return Judgement(Verdict.WRONG_BLOCK_SIZE, progress, begins)


def renew(progress: Progress, batch: EngineBatch, lease_ms: int) -> Judgement:
    """Judge a heartbeat: the rank's bridge is running, and has published up to the batch's sequence.

    A heartbeat never advances the sequence. If nothing changes, the progress returned is the object passed in, so that
    a quiet fleet writes nothing.
    """
    returned = progress.health is Health.REMOVED and progress.silent and batch.incarnation == progress.epoch.incarnation
    if returned:
        # The worker expired but is still running. It starts with no blocks, since its batches were refused meanwhile. A
        # worker that a client removed does not return this way: its engine must be restarted.
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
    silent = lease_ms == ENDED_LEASE_MS
    if progress.silent is not silent or progress.lease_ms != lease_ms or progress.feed is not batch.feed:
        progress = replace(progress, lease_ms=lease_ms, silent=silent, feed=batch.feed)
    missing = batch.sequence > (BEFORE_FIRST if returned else progress.sequence)
    if not missing or progress.health is Health.DEGRADED:  # every heartbeat shows the same gap; it is counted once
        return Judgement(Verdict.RENEWED, progress, begins)
    lossy = replace(progress, health=Health.DEGRADED, n_gaps=progress.n_gaps + 1)
    return Judgement(Verdict.GAP, lossy, begins)


def judge_chunk(progress: Progress, batch: EngineBatch) -> Judgement:
    """Judge a chunk of a restatement, which contains the rank's state after the batch's sequence.

    A chunk is parked unless it is stale or older than what has been applied. A chunk of a newer incarnation begins that
    incarnation; the rank is then degraded, since the earlier batches of the incarnation were never read.
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
        # It lacks batches that have been applied.
        return Judgement(Verdict.DUPLICATE, _unless_live(progress, batch))
    silent = progress.lease_ms == ENDED_LEASE_MS
    if progress.silent is not silent or progress.feed is not batch.feed:
        progress = replace(progress, silent=silent, feed=batch.feed)
    return Judgement(Verdict.PARKED, progress, begins)


def restated(progress: Progress, batch: EngineBatch, *, exact: bool, n_unindexed: int) -> Progress:
    """Return a rank's progress after a restatement: it has everything up to the batch's sequence, under a new epoch.

    exact: whether the restated ledger itself had no gap; otherwise the rank stays degraded.
    """
    whole = Health.APPROXIMATE if n_unindexed else Health.EXACT
    return replace(
        progress,
        epoch=Epoch(progress.epoch.incarnation, progress.epoch.generation + 1),
        n_restated=progress.n_restated + 1,
        sequence=batch.sequence,
        digest=batch.digest,
        health=whole if exact else Health.DEGRADED,
        model=batch.model,
        block_size=batch.block_size,
    )


def fence(progress: Progress, batch: EngineBatch) -> tuple[Progress, bool] | None:
    """Return the progress of a batch's incarnation, and whether it begins with this batch; None for an older one."""
    known = progress.epoch.incarnation
    if batch.incarnation == known and progress.health is not Health.REMOVED:
        return progress, False
    # A batch numbered BEFORE_FIRST announces that an incarnation starts, which also ends a removal.
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
        lease_ms=0,  # another bridge may feed this incarnation, or a publisher without a lease
        silent=False,
        n_restated=progress.n_restated if revived else 0,
    ), True


def refuses_expiry(progress: Progress, batch: EngineBatch, seen_sequence: int) -> bool:
    """Whether a rank was heard from after its worker's expiry was written, so that the expiry is too late.

    Everything that the worker published before the expiry precedes it in the log and has been applied. A rank refuses
    the expiry if it is no longer silent, if its incarnation is newer, or if it is the rank that the expiry names and
    its sequence has changed.
    """
    if progress.health is Health.REMOVED:
        return False
    advanced = progress.rank == batch.rank and progress.sequence != seen_sequence
    return not progress.silent or advanced or progress.epoch.incarnation > batch.incarnation


def removed(progress: Progress, incarnation: Incarnation, *, silent: bool) -> Progress | None:
    """Return a rank's progress after its worker's removal; None if nothing changes.

    Nothing changes for a rank of a newer incarnation, or one that was removed before. silent: True if the worker
    expired, so that a heartbeat of its bridge brings it back; False if a client removed it.
    """
    epoch = progress.epoch
    if epoch.incarnation > incarnation:
        return None
    if progress.health is not Health.REMOVED or epoch.incarnation != incarnation:
        epoch = Epoch(incarnation, epoch.generation + 1)
        return replace(progress, epoch=epoch, health=Health.REMOVED, silent=silent)
    # It expired first, and now a client removes it.
    return replace(progress, silent=False) if progress.silent and not silent else None

"""The order of one rank's batches: which is news, which a repeat, what is missing before it (DESIGN section 5).

What lives here: a rank's progress and the verdict on each batch, as values and a pure function. What must not: blocks
(run_store), bytes (tables.records), time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from streams.core.events import BEFORE_FIRST, EngineBatch
from streams.core.ids import Epoch, RankId


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
    """What became of a batch; a value, not an error."""

    APPLIED = "applied"
    GAP = "gap"  # applied, but batches before it are missing
    DUPLICATE = "duplicate"
    STALE = "stale"  # of an older life of the engine, or of a removed worker


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict on a batch, the rank's progress with it, and whether it ends whatever the rank held."""

    verdict: Verdict
    progress: Progress
    begins_epoch: bool = False


def judge(progress: Progress, batch: EngineBatch) -> Judgement:
    """Judge a batch of events by its incarnation and sequence number."""
    known = progress.epoch.incarnation
    begins = False
    if batch.incarnation != known or progress.health is Health.REMOVED:
        # A batch numbered BEFORE_FIRST only says that a life begins; whoever is removed and begins again is back.
        revived = batch.incarnation == known and batch.sequence == BEFORE_FIRST
        if batch.incarnation <= known and not revived:
            return Judgement(Verdict.STALE, progress)
        epoch = Epoch(known, progress.epoch.generation + 1) if revived else Epoch(batch.incarnation, 0)
        progress = replace(progress, epoch=epoch, sequence=BEFORE_FIRST, digest=0, health=Health.EXACT, n_blocks=0)
        begins = True
    elif batch.sequence <= progress.sequence:
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
        progress.silent,
    )
    return Judgement(Verdict.GAP if gap else Verdict.APPLIED, news, begins)

"""The verdict on each record of a rank: new, duplicate, a gap, or of an older incarnation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streams.core.events import BEFORE_FIRST, EngineBatch, EngineEvents, FeedState, Heartbeat, RestatementChunk
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress, Verdict, judge, judge_chunk, renew

RANK = RankId(WorkerId(7), DpRank(0))
LEASE_MS = 3000

#: A rank in its fifth incarnation, cleared twice, with batches applied up to 10.
KNOWN = Progress(RANK, Epoch(Incarnation(5), 2), 10, 110, Health.EXACT, "m", 16, n_blocks=4, lease_ms=LEASE_MS)
REMOVED = replace(KNOWN, health=Health.REMOVED)
EXPIRED = replace(REMOVED, silent=True)


def batch(sequence: int, incarnation: int = 5, n_unindexed: int = 0) -> EngineBatch:
    return EngineBatch(
        RANK, "m", 16, Incarnation(incarnation), sequence, sequence + 100, 0, EngineEvents(()), n_unindexed
    )


def heartbeat(sequence: int, incarnation: int = 5) -> EngineBatch:
    return replace(batch(sequence, incarnation), body=Heartbeat("b", LEASE_MS))


@pytest.mark.parametrize(
    ("known", "incarnation", "sequence", "verdict", "epoch"),
    [
        (KNOWN, 4, 11, Verdict.STALE, (5, 2)),
        (KNOWN, 5, BEFORE_FIRST, Verdict.DUPLICATE, (5, 2)),
        (KNOWN, 5, 10, Verdict.DUPLICATE, (5, 2)),
        (KNOWN, 5, 11, Verdict.APPLIED, (5, 2)),
        (KNOWN, 5, 12, Verdict.GAP, (5, 2)),
        (KNOWN, 6, BEFORE_FIRST, Verdict.APPLIED, (6, 0)),
        (KNOWN, 6, 0, Verdict.APPLIED, (6, 0)),
        (KNOWN, 6, 1, Verdict.GAP, (6, 0)),
        (REMOVED, 4, 0, Verdict.STALE, (5, 2)),
        (REMOVED, 5, 11, Verdict.STALE, (5, 2)),
        (REMOVED, 5, BEFORE_FIRST, Verdict.APPLIED, (5, 3)),
        (REMOVED, 6, 0, Verdict.APPLIED, (6, 0)),
        (EXPIRED, 5, 11, Verdict.STALE, (5, 2)),
        (EXPIRED, 5, BEFORE_FIRST, Verdict.APPLIED, (5, 3)),
    ],
)
def test_a_batch_is_judged_by_its_incarnation_and_then_by_its_number(
    known: Progress, incarnation: int, sequence: int, verdict: Verdict, epoch: tuple[int, int]
) -> None:
    """An older incarnation changes nothing, a newer one begins an epoch; within one, only the next number is no gap."""
    judgement = judge(known, batch(sequence, incarnation))
    assert (judgement.verdict, judgement.progress.epoch) == (verdict, epoch)
    assert judgement.begins_epoch == (judgement.progress.epoch != known.epoch)
    if verdict in (Verdict.STALE, Verdict.DUPLICATE):
        assert judgement.progress == known
    else:
        assert (judgement.progress.sequence, judgement.progress.silent) == (sequence, False)
        assert judgement.progress.health is (Health.DEGRADED if verdict is Verdict.GAP else Health.EXACT)


@pytest.mark.parametrize(
    ("known", "incarnation", "sequence", "verdict", "epoch", "health"),
    [
        (KNOWN, 4, 99, Verdict.STALE, (5, 2), Health.EXACT),
        (KNOWN, 5, 10, Verdict.RENEWED, (5, 2), Health.EXACT),
        (KNOWN, 5, 3, Verdict.RENEWED, (5, 2), Health.EXACT),
        (KNOWN, 5, 11, Verdict.GAP, (5, 2), Health.DEGRADED),
        (KNOWN, 6, BEFORE_FIRST, Verdict.RENEWED, (6, 0), Health.EXACT),
        (KNOWN, 6, 0, Verdict.GAP, (6, 0), Health.DEGRADED),
        (replace(KNOWN, health=Health.DEGRADED), 5, 11, Verdict.RENEWED, (5, 2), Health.DEGRADED),
        (replace(KNOWN, health=Health.APPROXIMATE), 5, 11, Verdict.GAP, (5, 2), Health.DEGRADED),
        (REMOVED, 5, BEFORE_FIRST, Verdict.STALE, (5, 2), Health.REMOVED),
        (REMOVED, 5, 10, Verdict.STALE, (5, 2), Health.REMOVED),
        (REMOVED, 6, BEFORE_FIRST, Verdict.RENEWED, (6, 0), Health.EXACT),
        (EXPIRED, 5, BEFORE_FIRST, Verdict.RENEWED, (5, 3), Health.EXACT),
        (EXPIRED, 5, 10, Verdict.GAP, (5, 3), Health.DEGRADED),
        (EXPIRED, 4, 10, Verdict.STALE, (5, 2), Health.REMOVED),
    ],
)
def test_a_heartbeat_shows_missing_batches_and_never_advances_the_sequence(
    known: Progress, incarnation: int, sequence: int, verdict: Verdict, epoch: tuple[int, int], health: Health
) -> None:
    """One above the last batch is a gap, counted once. One of an expired worker or a newer incarnation begins it."""
    judgement = renew(known, heartbeat(sequence, incarnation), LEASE_MS)
    progress = judgement.progress
    assert (judgement.verdict, progress.epoch, progress.health) == (verdict, epoch, health)
    assert progress.sequence == (BEFORE_FIRST if epoch[0] > 5 else known.sequence)
    assert progress.n_gaps == (verdict is Verdict.GAP)
    assert judgement.begins_epoch == (epoch != known.epoch)
    if verdict is not Verdict.STALE:
        assert (progress.lease_ms, progress.silent) == (LEASE_MS, False)


def test_a_heartbeat_that_changes_nothing_returns_the_same_progress_object() -> None:
    """An unchanged progress is not written. A different lease and the end of a silence are changes."""
    assert renew(KNOWN, heartbeat(10), LEASE_MS).progress is KNOWN
    assert renew(KNOWN, heartbeat(10), LEASE_MS + 1).progress == replace(KNOWN, lease_ms=LEASE_MS + 1)
    assert renew(replace(KNOWN, silent=True), heartbeat(10), LEASE_MS).progress == KNOWN


def test_a_new_incarnation_starts_without_a_lease() -> None:
    """With the lease of its predecessor, an engine that switches from a bridge to the publisher would fall silent."""
    assert judge(KNOWN, batch(0, 6)).progress.lease_ms == 0
    assert judge(KNOWN, batch(11)).progress.lease_ms == LEASE_MS


@pytest.mark.parametrize(
    ("health", "n_unindexed", "sequence", "after"),
    [
        (Health.EXACT, 1, 11, Health.APPROXIMATE),
        (Health.DEGRADED, 1, 11, Health.DEGRADED),
        (Health.APPROXIMATE, 0, 11, Health.APPROXIMATE),
        (Health.APPROXIMATE, 0, 12, Health.DEGRADED),
        (Health.DEGRADED, 0, 11, Health.DEGRADED),
    ],
)
def test_a_batch_never_improves_the_health(health: Health, n_unindexed: int, sequence: int, after: Health) -> None:
    """A complete sequence of numbers does not make a rank exact again."""
    assert judge(replace(KNOWN, health=health), batch(sequence, n_unindexed=n_unindexed)).progress.health is after


@pytest.mark.parametrize("sequence", [11, 12])
def test_an_incomplete_batch_counts_as_one_gap(sequence: int) -> None:
    """It degrades the rank like a missing batch; if a batch before it is missing too, both count as one gap."""
    judgement = judge(KNOWN, replace(batch(sequence), incomplete=True))
    assert (judgement.verdict, judgement.progress.health, judgement.progress.n_gaps) == (
        Verdict.GAP,
        Health.DEGRADED,
        1,
    )
    assert judge(KNOWN, replace(batch(10), incomplete=True)).progress == KNOWN


@pytest.mark.parametrize("feed", FeedState)
@pytest.mark.parametrize("before", FeedState)
def test_progress_has_the_feed_of_the_last_record_that_is_not_stale(before: FeedState, feed: FeedState) -> None:
    """Events, heartbeats and chunks set it, also if they begin an incarnation. Duplicates do not make a feed live.

    After a takeover, late records of the former bridge may say that the feed is live. The next bridge's records of the
    same batches, which are duplicates then, say that it is catching up.
    """
    known = replace(KNOWN, feed=before)
    chunk = replace(batch(10), body=RestatementChunk(1, 0, 1, True, ()), feed=feed)
    assert judge(known, replace(batch(11), feed=feed)).progress.feed is feed
    assert judge(known, replace(batch(0, 6), feed=feed)).progress.feed is feed
    of_duplicate = replace(known, feed=feed) if feed else known
    assert judge(known, replace(batch(10), feed=feed)).progress == of_duplicate
    assert judge(known, replace(batch(11, 4), feed=feed)).progress is known
    for sequence, incarnation in [(10, 5), (3, 5), (11, 5), (-1, 6)]:
        assert renew(known, replace(heartbeat(sequence, incarnation), feed=feed), LEASE_MS).progress.feed is feed
    assert renew(known, replace(heartbeat(10, 4), feed=feed), LEASE_MS).progress is known
    assert judge_chunk(known, chunk).progress.feed is feed
    assert judge_chunk(known, replace(chunk, incarnation=Incarnation(6))).progress.feed is feed
    assert judge_chunk(known, replace(chunk, sequence=9)).progress == of_duplicate
    assert judge(known, batch(10)).progress is known

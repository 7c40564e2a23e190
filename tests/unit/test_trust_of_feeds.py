"""How the state of a rank's feed limits the trust in answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streams.core.events import FeedState
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.trust import AnswerMode, DegradedReason, Trust, TrustSnapshot
from streams.router_api.knowledge.owner_trust import SETTLE_MS
from streams.router_api.knowledge.trust_tracker import TrustTracker
from streams.tables.records import PartitionRecord

RANK = RankId(WorkerId(7), DpRank(0))


@pytest.mark.parametrize(
    ("feed", "health", "expected"),
    [
        (FeedState.LIVE, Health.EXACT, Trust(AnswerMode.EXACT)),
        (FeedState.UNPROVEN, Health.EXACT, Trust(AnswerMode.DEGRADED, DegradedReason.NO_EVENTS_YET)),
        (FeedState.CATCHING_UP, Health.EXACT, Trust(AnswerMode.DEGRADED, DegradedReason.FEED_BEHIND)),
        (FeedState.LIVE, Health.APPROXIMATE, Trust(AnswerMode.APPROXIMATE)),
        (FeedState.CATCHING_UP, Health.APPROXIMATE, Trust(AnswerMode.DEGRADED, DegradedReason.FEED_BEHIND)),
        (FeedState.CATCHING_UP, Health.DEGRADED, Trust(AnswerMode.DEGRADED, DegradedReason.EVENTS_LOST)),
        (FeedState.UNPROVEN, Health.REMOVED, Trust(AnswerMode.DEGRADED, DegradedReason.REMOVED)),
    ],
)
def test_a_rank_is_exact_only_while_its_feed_is_live(feed: FeedState, health: Health, expected: Trust) -> None:
    """A feed that is not proven or not caught up makes the answer degraded; a loss is the more serious reason."""
    tracker = TrustTracker(1, 3000, 1000, lambda _: None)
    tracker.note_progress(RANK, Progress(RANK, Epoch(Incarnation(1), 0), 5, health=health, feed=feed))
    tracker.note_partition(PartitionRecord(0, 0, "owner", ()), 0)
    tracker.note_ends(0, 0, {})  # of no sources, so that the owner is not behind
    assert tracker.assess([RANK], frozenset(), 0) == expected


def test_a_rank_is_trusted_again_when_the_transaction_is_folded_that_says_so() -> None:
    """A transaction has progress first, then runs, and a partition record at its end: no answer is exact in between."""
    tracker = TrustTracker(1, 3000, 1000, lambda _: None)
    first, second = (Progress(RANK, Epoch(Incarnation(number), 0), 5) for number in (1, 2))
    owner = PartitionRecord(0, 0, "owner", ())
    tracker.note_partition(owner, 0)
    tracker.note_ends(0, 0, {})

    def reason() -> DegradedReason | None:
        return tracker.assess([RANK], frozenset(), 0).reason

    tracker.note_progress(RANK, first)
    assert reason() is DegradedReason.NO_EVENTS_YET
    tracker.note_partition(owner, 0)
    assert reason() is None
    tracker.note_progress(RANK, replace(first, feed=FeedState.CATCHING_UP))
    assert reason() is DegradedReason.FEED_BEHIND  # less trust counts at once
    tracker.note_partition(owner, 0)
    tracker.note_progress(RANK, first)
    assert reason() is DegradedReason.FEED_BEHIND
    tracker.note_partition(owner, 0)
    assert reason() is None
    tracker.note_progress(RANK, second)  # the rank is empty until its runs are folded
    assert reason() is DegradedReason.FEED_BEHIND
    tracker.note_partition(owner, 0)
    assert reason() is None


def test_an_overlap_that_was_read_before_trust_returned_is_not_exact() -> None:
    """The answer has the reason that ended in between; an overlap that is read afterwards is exact."""
    tracker = TrustTracker(1, 3000, 1000, lambda _: None)
    progress, owner = Progress(RANK, Epoch(Incarnation(1), 0), 5), PartitionRecord(0, 0, "owner", ())

    def reason(recoveries: int) -> DegradedReason | None:
        return tracker.assess([RANK], frozenset(), now_ms, before=TrustSnapshot(recoveries, 0)).reason

    now_ms = 0
    read_before = tracker.recoveries
    tracker.note_progress(RANK, progress)
    tracker.note_partition(owner, now_ms)
    tracker.note_ends(0, now_ms, {})
    assert reason(read_before) is not None
    assert reason(tracker.recoveries) is None
    unchanged = tracker.recoveries
    for now_ms in (500, 1000):
        tracker.note_partition(owner, now_ms)
        tracker.note_ends(0, now_ms, {})
    assert reason(unchanged) is None  # nothing was in doubt meanwhile
    now_ms = 10_000
    assert reason(unchanged) is DegradedReason.OWNER_SILENT
    for now_ms in range(10_000, 10_000 + SETTLE_MS + 1, 500):
        tracker.note_partition(owner, now_ms)
        tracker.note_ends(0, now_ms, {})
    assert reason(unchanged) is DegradedReason.OWNER_BEHIND
    assert reason(tracker.recoveries) is None
    unchanged, asked_ms = tracker.recoveries, now_ms + 900
    now_ms += 1500
    assert reason(unchanged) is DegradedReason.OWNER_BEHIND
    tracker.note_partition(owner, now_ms)
    tracker.note_ends(0, asked_ms, {}, now_ms)  # the answer to a question from before the trust ended
    assert reason(unchanged) is DegradedReason.OWNER_BEHIND
    assert reason(tracker.recoveries) is None

"""How the state of a rank's feed limits the trust in answers."""

from __future__ import annotations

import pytest

from streams.core.events import FeedState
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.router_api.trust import AnswerMode, DegradedReason, Trust, TrustTracker
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
    tracker.note_partition(PartitionRecord(0, 0, "owner", ()), 0)
    tracker.note_ends(0, 0, {})  # of no sources, so that the owner is not behind
    tracker.note_progress(RANK, Progress(RANK, Epoch(Incarnation(1), 0), 5, health=health, feed=feed))
    assert tracker.assess([RANK], frozenset(), 0) == expected

"""Up to which time a partition's sources are applied, from readings of their ends and from applied offsets."""

from __future__ import annotations

import pytest

from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.trust import AnswerMode, DegradedReason, Trust
from streams.kafka.applied_until import OUTAGE_MS, READINGS_MAX, AppliedUntil, SourceOffset
from streams.kafka.clients import partition_of
from streams.kafka.topic_watch import TopicReading, read_every_ms
from streams.router_api.knowledge.trust_tracker import PooledRows, TrustTracker
from streams.tables.records import BEHIND_UNKNOWN_MS, PartitionRecord, SourceProgress

RANK = RankId(WorkerId(1), DpRank(0))
N_PARTITIONS = 4
PARTITION = partition_of(RANK.worker_id, N_PARTITIONS)
STALE_MS, BEHIND_MS = 3000, 1000


def at(offset: int, topic_id: str = "a") -> dict[str, SourceOffset]:
    return {"events": SourceOffset(topic_id, offset)}


def test_nothing_is_known_before_an_end_has_been_read_and_reached() -> None:
    """Applied records alone prove nothing, and neither does an end that is not reached."""
    until = AppliedUntil()
    until.note_applied(at(7))
    assert until.at_ms is None and not until.reached_last_end
    until.note_ends(100, at(8))
    assert until.at_ms is None and not until.reached_last_end
    until.note_applied(at(8))
    assert until.at_ms == 100 and until.reached_last_end


def test_the_time_is_that_of_the_newest_end_that_is_reached_in_every_source() -> None:
    """New records do not move the time back; they keep it from advancing until they are applied."""
    until = AppliedUntil()
    both = {**at(5), "others": SourceOffset("b", 3)}
    until.note_applied({**both, "others": SourceOffset("b", 2)})
    until.note_ends(100, both)
    assert until.at_ms is None
    until.note_applied(both)
    assert until.at_ms == 100
    until.note_ends(200, {**both, **at(9)})
    until.note_ends(300, {**both, **at(11)})
    until.note_applied({**both, **at(10)})
    assert until.at_ms == 200 and not until.reached_last_end
    until.note_applied({**both, **at(11)})
    assert until.at_ms == 300 and until.reached_last_end


def test_ends_of_another_topic_of_the_same_name_prove_nothing() -> None:
    """A recreated topic is shorter than the offset that was applied of the old one, and is still not applied."""
    until = AppliedUntil()
    until.note_applied(at(1000))
    until.note_ends(100, at(1000))
    until.note_ends(200, at(1001))
    until.note_ends(300, at(3, "recreated"))
    assert until.at_ms == 100
    until.note_applied(at(0, "recreated"))
    until.note_ends(400, at(3, "recreated"))
    assert until.at_ms == 100
    until.note_applied(at(3, "recreated"))
    assert until.at_ms == 400


@pytest.mark.parametrize("n_readings", [READINGS_MAX - 1, READINGS_MAX, READINGS_MAX + 1])
def test_the_readings_that_wait_are_limited_and_the_next_ones_count_again(n_readings: int) -> None:
    """During a long lag the oldest readings are kept, so that the time advances as they are reached."""
    until = AppliedUntil()
    until.note_applied(at(0))
    for number in range(1, n_readings + 1):
        until.note_ends(number, at(number))
    until.note_applied(at(n_readings))
    assert until.at_ms == min(n_readings, READINGS_MAX)
    until.note_ends(1000, at(n_readings))
    assert until.at_ms == 1000


@pytest.mark.parametrize("gap_ms", [OUTAGE_MS, OUTAGE_MS + 1])
def test_ends_that_are_read_soon_after_an_outage_prove_nothing(gap_ms: int) -> None:
    """Producers may still have to send what they could not send during the outage."""
    until = AppliedUntil(settle_ms=500)
    until.note_applied(at(5))
    until.note_ends(100, at(5))
    back_ms = 100 + gap_ms
    was_away = gap_ms > OUTAGE_MS
    until.note_ends(back_ms, at(5))
    assert until.at_ms == (100 if was_away else back_ms)
    until.note_ends(back_ms + 499, at(5))
    assert until.at_ms == (100 if was_away else back_ms + 499)
    until.note_ends(back_ms + 500, at(5))
    assert until.at_ms == back_ms + 500


@pytest.mark.parametrize(("behind_after_ms", "every_ms"), [(10, 50), (500, 125), (1000, 250), (60_000, 250)])
def test_four_readings_fit_into_the_tolerated_lag(behind_after_ms: int, every_ms: int) -> None:
    """The interval has bounds: a tiny tolerance does not flood the broker, and a large one still notices a lag."""
    assert read_every_ms(behind_after_ms) == every_ms


def test_a_reading_without_every_end_and_id_is_not_used() -> None:
    """The end of a topic that does not exist, or that was not answered for, is unknown."""
    reading = TopicReading(
        5, {"events": "a", "others": "b"}, (), {("events", 0): 4, ("others", 0): 1, ("events", 1): 2}
    )
    assert reading.ends_of(("events", "others"), 0) == {**at(4), "others": SourceOffset("b", 1)}
    assert reading.ends_of(("events", "others"), 1) is None
    assert TopicReading(5, {}, ("events",), {("events", 0): 4}).ends_of(("events",), 0) is None


class Tracked:
    """A router's trust in answers about one exact rank, whose partition the test feeds."""

    def __init__(self) -> None:
        self.tracker = TrustTracker(N_PARTITIONS, STALE_MS, BEHIND_MS, lambda _: None)
        self.tracker.note_progress(RANK, Progress(RANK, Epoch(Incarnation(1), 0), 0, health=Health.EXACT))

    def record(self, received_ms: int | None, applied_offset: int, behind_ms: int = 0) -> None:
        source = SourceProgress("events", "a", applied_offset, 0, applied_offset + 1, behind_ms)
        self.tracker.note_partition(PartitionRecord(PARTITION, 0, "owner", (source,)), received_ms)

    def ends(self, asked_ms: int, offset: int) -> None:
        self.tracker.note_ends(PARTITION, asked_ms, at(offset))

    def trust(self, now_ms: int, pooled: PooledRows | None = None) -> Trust:
        return self.tracker.assess([RANK], frozenset(), now_ms, pooled=pooled)

    def reason(self, now_ms: int) -> str | None:
        return self.trust(now_ms).reason


def test_an_answer_is_exact_only_while_the_router_has_folded_what_was_in_the_log_a_second_ago() -> None:
    """Without an owner, answers are degraded after a second if events arrive, and as silent after three if none do."""
    tracked = Tracked()
    tracked.record(0, 4)
    assert tracked.reason(0) is DegradedReason.OWNER_BEHIND  # no end was read yet
    tracked.ends(0, 5)
    assert tracked.trust(0).mode is AnswerMode.EXACT
    tracked.ends(250, 6)
    assert tracked.reason(BEHIND_MS) is None
    assert tracked.reason(BEHIND_MS + 1) is DegradedReason.OWNER_BEHIND
    tracked.record(BEHIND_MS + 1, 5)
    assert tracked.reason(250 + BEHIND_MS) is None
    for asked_ms in range(1500, 6000, 250):
        tracked.ends(asked_ms, 6)
    assert tracked.reason(BEHIND_MS + 1 + STALE_MS) is None
    assert tracked.reason(BEHIND_MS + 1 + STALE_MS + 1) is DegradedReason.OWNER_SILENT


def test_ends_that_cannot_be_read_make_answers_degraded() -> None:
    """The owner's records arrive and say that it does not lag; the router cannot tell whether that is still so."""
    tracked = Tracked()
    tracked.record(0, 4)
    tracked.ends(0, 5)
    tracked.record(BEHIND_MS, 4)
    assert tracked.reason(BEHIND_MS) is None
    assert tracked.reason(BEHIND_MS + 1) is DegradedReason.OWNER_BEHIND


def test_a_router_that_lags_behind_the_changelog_is_not_exact_although_records_arrive_at_this_moment() -> None:
    """The records that it receives are old ones; their time of receipt says nothing."""
    tracked = Tracked()
    tracked.record(0, 4)
    tracked.ends(0, 5)
    for now_ms in range(250, 5000, 250):
        tracked.ends(now_ms, 5 + now_ms)
        tracked.record(now_ms, 4 + max(now_ms - 2000, 0))
        assert (tracked.reason(now_ms) is DegradedReason.OWNER_BEHIND) == (now_ms > BEHIND_MS)


def test_an_owner_that_has_not_reached_the_end_yet_says_so() -> None:
    """The greatest tolerance that the settings allow in practice is smaller than an unknown lag."""
    tracked = Tracked()
    tracked.record(0, 4, BEHIND_UNKNOWN_MS)
    tracked.ends(0, 5)
    assert tracked.reason(0) is DegradedReason.OWNER_BEHIND
    tracked.record(10, 4)
    assert tracked.reason(10) is None


def test_pooled_blocks_count_only_while_their_own_changelog_is_folded_to_its_end() -> None:
    """Their rows are in another topic than the partition records, so those do not show how far rows are folded."""
    tracked = Tracked()
    rows = PooledRows(0, (PARTITION,))
    tracked.record(0, 4)
    tracked.ends(0, 5)
    assert tracked.trust(0, rows).reason is DegradedReason.POOLED_OWNER_BEHIND
    tracked.tracker.note_pooled_ends(PARTITION, 0, at(9), at(8))
    assert tracked.trust(0, rows).reason is DegradedReason.POOLED_OWNER_BEHIND
    tracked.tracker.note_pooled_ends(PARTITION, 100, at(9), at(9))
    assert tracked.trust(0, rows).mode is AnswerMode.EXACT

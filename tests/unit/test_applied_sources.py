"""How far a partition has applied its sources: past records, past stretches without records, up to the ends."""

from __future__ import annotations

import pytest

from streams.kafka.applied_until import Lag, SourceOffset
from streams.tables.applied_sources import ENDS_VALID_MS, AppliedSources
from streams.tables.records import BEHIND_UNKNOWN_MS, SourceProgress
from streams.tables.reducer import SourceRecord


def records(*offsets: int) -> list[SourceRecord]:
    return [SourceRecord("a", 0, offset, 1000 + offset, None, b"", ()) for offset in offsets]


def end(offset: int, topic_id: str = "id") -> dict[str, SourceOffset]:
    return {"a": SourceOffset(topic_id, offset)}


@pytest.fixture
def sources() -> AppliedSources:
    """Offset 4 is applied."""
    sources = AppliedSources()
    sources.open({"a": SourceProgress("a", "id", 4, 1004, 5, 0)}, ())
    return sources


def test_it_advances_to_the_last_record(sources: AppliedSources) -> None:
    """With its time; reading continues after it."""
    sources.advance(records(5, 6))
    assert sources.applied("a") == 6
    assert sources.progress["a"].applied_at_ms == 1006
    assert sources.restart() == {"a": 7}
    assert sources.applied("unknown") == -1


def test_a_stretch_without_records_counts_once_everything_before_it_is_applied(sources: AppliedSources) -> None:
    """Records before a stretch further on may have been dropped without acknowledgement."""
    sources.skip("a", 7, 10, False)
    sources.advance(records(5))
    assert sources.applied("a") == 5
    sources.advance(records(6))
    assert sources.applied("a") == 9
    assert not sources.lost


def test_stretches_that_adjoin_are_one(sources: AppliedSources) -> None:
    """After another one, only the last stretch is used."""
    sources.skip("a", 5, 7, False)
    sources.skip("a", 7, 9, True)
    assert sources.lost
    sources.advance(())
    assert sources.applied("a") == 8
    sources.skip("a", 9, 10, False)
    sources.skip("a", 11, 12, False)
    sources.advance(())
    assert sources.applied("a") == 8


def test_reading_again_forgets_what_was_skipped(sources: AppliedSources) -> None:
    """Also a source that was recreated: its offsets start over."""
    sources.skip("a", 5, 7, False)
    assert sources.restart() == {"a": 5}
    sources.advance(())
    assert sources.applied("a") == 4
    sources.skip("a", 5, 7, False)
    sources.open({"a": SourceProgress("a", "new", -1, 0, -1, 0)}, {"a"})
    assert sources.applied("a") == -1
    assert not sources.follows(records(5))


@pytest.mark.parametrize(("first", "follows"), [(4, True), (5, True), (6, False)])
def test_a_kept_batch_follows_if_it_leaves_no_hole(sources: AppliedSources, first: int, follows: bool) -> None:
    """Its first record decides."""
    assert sources.follows(records(first, 8)) is follows
    sources.skip("a", 5, 6, False)
    assert sources.follows(records(6, 8))


def test_it_lags_until_it_has_reached_an_end_that_was_read_a_moment_ago(sources: AppliedSources) -> None:
    """At first its lag is unknown; the change to no lag is written at once."""
    sources.advance(())
    assert sources.lag(100) == Lag(None, None)
    assert sources.write(100)[0].behind_ms == BEHIND_UNKNOWN_MS
    assert not sources.note_ends(100, end(7))
    assert sources.lag(100) == Lag(2, None)
    assert not sources.has_caught_up(100)
    sources.advance(records(5, 6))
    assert sources.applied_until_ms == 100
    assert sources.has_caught_up(100 + ENDS_VALID_MS)
    assert not sources.has_caught_up(101 + ENDS_VALID_MS)
    assert sources.lag(101 + ENDS_VALID_MS) == Lag(0, 1 + ENDS_VALID_MS)
    assert sources.write(200) == (SourceProgress("a", "id", 6, 1006, 7, 0),)
    assert not sources.has_caught_up(200)
    assert not sources.note_ends(300, end(7))


def test_an_end_reached_by_a_skipped_stretch_is_written_at_once(sources: AppliedSources) -> None:
    """Routers compare the applied offset with the ends."""
    sources.advance(())
    sources.note_ends(100, end(5))
    sources.write(100)
    sources.skip("a", 5, 7, False)
    assert sources.has_caught_up(100)
    sources.advance(())
    assert not sources.has_caught_up(100)


def test_a_recreated_source_is_noticed_until_the_partition_is_opened_again(sources: AppliedSources) -> None:
    """Nothing follows from its ends."""
    sources.advance(())
    assert sources.note_ends(100, end(3, "new"))
    assert sources.recreated == "a"
    assert sources.lag(100) == Lag(None, None)
    sources.open({"a": SourceProgress("a", "new", -1, 0, -1, 0)}, {"a"})
    assert sources.recreated is None

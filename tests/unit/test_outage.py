"""When it is logged that a part of an engine does not answer, and that events are missing."""

from __future__ import annotations

from streams.engines.missing_events import MISSED_AFTER_S, MissingEvents
from streams.kafka.outage import REMIND_S, REPETITIONS_MAX, Outage, Repetitions, lasting, repeated


def test_an_outage_is_reported_at_once_then_once_a_minute_and_at_its_end() -> None:
    """A part that fails every second for two minutes causes three lines, and one when it answers again."""
    outage = Outage()
    assert outage.answered(0.0) is None
    reported = [outage.failed(float(second)) for second in range(2 * round(REMIND_S) + 1)]
    assert [lasted_s for lasted_s in reported if lasted_s is not None] == [0.0, REMIND_S, 2 * REMIND_S]
    assert outage.answered(125.0) == 125.0
    assert outage.answered(126.0) is None
    assert outage.failed(127.0) == 0.0


def test_a_line_about_an_outage_says_for_how_long_it_has_lasted() -> None:
    """The first line has no duration."""
    assert (lasting(0.0), lasting(60.4)) == ("", " (for 60 s)")


def test_what_happens_ten_times_a_second_is_reported_at_once_and_then_once_a_minute_with_its_number() -> None:
    """Each thing has lines of its own."""
    things = Repetitions()
    reported = [things.happened("a", n / 10) for n in range(20 * round(REMIND_S) + 1)]
    assert [n for n in reported if n is not None] == [1, 10 * REMIND_S, 10 * REMIND_S]
    assert things.happened("b", 1.0) == 1
    assert (repeated(1), repeated(600)) == ("", " (600 times since the last such line)")


def test_of_too_many_things_some_are_reported_again() -> None:
    """What is remembered is limited."""
    things = Repetitions()
    assert {things.happened(n, 0.0) for n in range(REPETITIONS_MAX)} == {1}
    assert things.happened(0, 1.0) is None
    assert things.happened(REPETITIONS_MAX, 1.0) == 1
    assert things.happened(0, 1.0) == 1


def test_events_are_missed_once_requests_have_been_seen_for_a_while() -> None:
    """One request is not enough, since a prompt may be shorter than a block; and it is reported once."""
    missing = MissingEvents()
    assert not missing.on_requests(0.0)
    assert not missing.on_requests(MISSED_AFTER_S)  # seen twice
    assert missing.on_requests(MISSED_AFTER_S + 1.0)
    assert not missing.on_requests(2 * MISSED_AFTER_S)


def test_events_are_not_missed_after_the_first_one() -> None:
    """An engine that has reported an event reports further ones; requests without any have all their blocks cached."""
    missing = MissingEvents()
    missing.on_event()
    assert not any(missing.on_requests(n * MISSED_AFTER_S) for n in range(5))

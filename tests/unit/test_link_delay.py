"""Batches that arrive late show that others may be on their way (streams.engines.link_delay)."""

from __future__ import annotations

import pytest

from streams.engines.link_delay import DRIFT, LATE_S, QUIET_S_MAX, QUIET_S_MIN, LinkDelay

NEVER = float("-inf")

#: What the engine's clock shows at second 0 of the bridge's monotonic one, and by how much it may differ from that.
UNIX_S = 1_800_000_000.0
CLOCKS = (0.0, -3600.0, 3600.0)


def arrive(link: LinkDelay, emitted_s: float, delay_s: float, ahead_s: float = 0.0) -> float:
    """Let a batch arrive that was published at `emitted_s` of the bridge's time; return when it arrives."""
    now_s = emitted_s + delay_s
    link.on_batch(UNIX_S + emitted_s + ahead_s, now_s)
    return now_s


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_a_late_batch_means_that_others_may_follow(ahead_s: float) -> None:
    """A batch in time, and a pause, end this; the difference of the clocks does not matter."""
    link = LinkDelay()
    arrive(link, 0.0, 0.01, ahead_s)
    assert not link.is_behind(0.01, NEVER)
    arrive(link, 1.0, LATE_S, ahead_s)
    assert not link.is_behind(1.0 + LATE_S, NEVER)
    at_s = arrive(link, 2.0, 0.02 + LATE_S, ahead_s)
    assert link.is_behind(at_s, NEVER) and link.is_behind(at_s + QUIET_S_MIN / 2, NEVER)
    assert not link.is_behind(at_s + QUIET_S_MIN, NEVER)
    at_s = arrive(link, 4.0, 3.0, ahead_s)
    assert link.is_behind(at_s, NEVER)
    at_s = arrive(link, 8.0, 0.01, ahead_s)
    assert not link.is_behind(at_s, NEVER)


def test_the_slower_the_link_the_longer_the_pause() -> None:
    """Between two late batches two seconds passed, so a third one may take as long."""
    link = LinkDelay()
    arrive(link, 0.0, 0.01)
    for n in range(1, 3):
        at_s = arrive(link, 1.9 * n, 0.6)
    assert link.is_behind(at_s + 3.0, NEVER)
    assert not link.is_behind(at_s + 4.0, NEVER)
    for n in range(4):
        at_s = arrive(link, 10.0 + 0.1 * n, 2.0 * n)
    for n in range(4, 8):
        at_s = arrive(link, 0.1 * n, 20.0 * n)
    assert link.is_behind(at_s + QUIET_S_MAX - 1.0, NEVER)
    assert not link.is_behind(at_s + QUIET_S_MAX, NEVER)


def test_a_link_that_pauses_still_holds_what_it_held() -> None:
    """After a batch that was four seconds late, nothing arrives for two seconds; others may still follow."""
    link = LinkDelay()
    arrive(link, 0.0, 0.01)
    at_s = arrive(link, 1.0, 4.01)
    assert link.is_behind(at_s + 3.9, NEVER)
    assert not link.is_behind(at_s + 4.1, NEVER)


def test_a_complete_replay_that_began_after_the_late_batch_shows_that_nothing_is_missing() -> None:
    """One that began before the batch arrived shows nothing."""
    link = LinkDelay()
    arrive(link, 0.0, 0.0)
    at_s = arrive(link, 1.0, 2.0)
    assert link.is_behind(at_s, at_s - 0.1)
    assert not link.is_behind(at_s, at_s)


def test_after_the_engines_clock_was_set_back_its_batches_are_in_time_again() -> None:
    """So is every batch after one with a damaged time far in the future."""
    link = LinkDelay()
    for n in range(10):
        arrive(link, float(n), 0.01)
    at_s = arrive(link, 11.0, 0.01, ahead_s=-60.0)
    assert not link.is_behind(at_s, NEVER)
    arrive(link, 12.0, 0.01, ahead_s=1e9)
    at_s = arrive(link, 13.0, 0.01, ahead_s=-60.0)
    assert not link.is_behind(at_s, NEVER)


def test_a_constant_in_place_of_a_time_makes_no_batch_late() -> None:
    """Nothing is known of such an engine's delays."""
    link = LinkDelay()
    for n in range(10):
        link.on_batch(1.0, float(n))
        assert not link.is_behind(float(n), NEVER)


def test_clocks_that_drift_apart_make_no_batch_late() -> None:
    """The engine's clock loses a second in three hours."""
    link = LinkDelay()
    for n in range(2000):
        at_s = arrive(link, 10.0 * n, 0.01, ahead_s=-10.0 * n / 10_000)
        assert not link.is_behind(at_s, NEVER)


@pytest.mark.parametrize("ahead_s", CLOCKS)
def test_a_link_that_stays_slow_stays_late(ahead_s: float) -> None:
    """It is fast for a minute, then five seconds late; only after hours could the clocks have drifted so far apart."""
    link = LinkDelay()
    for n in range(60):
        arrive(link, float(n), 0.01, ahead_s)
    for n in range(60, 4 * 3600):
        at_s = arrive(link, float(n), 5.0, ahead_s)
        assert link.is_behind(at_s, NEVER)
    drifted_s = (5.0 - LATE_S) / DRIFT
    assert 6 * 3600 < drifted_s < 7 * 3600
    at_s = arrive(link, 60.0 + drifted_s, 5.0, ahead_s)
    assert not link.is_behind(at_s, NEVER)
    at_s = arrive(link, 90.0 + drifted_s, 0.01, ahead_s)
    at_s = arrive(link, 91.0 + drifted_s, 5.0, ahead_s)
    assert link.is_behind(at_s, NEVER)

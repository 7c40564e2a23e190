"""A bridge is silent once its pulses stop, and what follows for its workers (core.bridge_pulses, engine_reports)."""

from __future__ import annotations

import pytest

from streams.core.bridge_pulses import (
    BRIDGES_MAX,
    FED_MAX,
    FORGET_AFTER_MS,
    SILENT_AFTER_MS_MIN,
    BridgePulse,
    BridgePulses,
)
from streams.core.ids import WorkerId
from streams.core.workers import BridgeLease, Worker
from streams.errors import BadRecord
from streams.kafka.records import PULSES
from streams.router_api.knowledge.engine_reports import EngineReports


def worker(worker_id: int, bridge: str | None) -> Worker:
    lease = None if bridge is None else BridgeLease(bridge, 1, 6000, 1)
    return Worker(WorkerId(worker_id), "http://e", "m", 16, lease=lease)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_ms = 1000

    def __call__(self) -> int:
        return self.now_ms


def reports(clock: Clock, *workers: Worker, silent_after_ms: int = 0) -> EngineReports:
    return EngineReports({each.worker_id: each for each in workers}, {}, clock, silent_after_ms)


def pulse(of: EngineReports, bridge: str, number: int = 1, fed: tuple[int, ...] | None = None) -> None:
    listed = None if fed is None else tuple(map(WorkerId, fed))
    of.fold(PULSES.keys.pack(bridge), PULSES.encode(BridgePulse(bridge, number, listed)))


def test_workers_of_a_bridge_without_a_pulse_are_silent_and_others_are_not() -> None:
    """A worker is fed from its bridge's first pulse on; a worker that has no bridge is never silent."""
    clock = Clock()
    known = reports(clock, worker(1, "a"), worker(2, "b"), worker(3, None))
    assert known.bridge_silent() == {1, 2}
    pulse(known, "a")
    assert known.bridge_silent() == {2}


def test_a_bridge_becomes_silent_and_is_heard_again() -> None:
    """The last pulse counts for the tolerated time, to the millisecond; the second one after a silence ends it."""
    clock = Clock()
    known = reports(clock, worker(1, "a"), worker(2, "b"), silent_after_ms=900)
    pulse(known, "a")
    clock.now_ms += 500
    pulse(known, "b")
    clock.now_ms += 400
    assert known.bridge_silent() == frozenset()
    clock.now_ms += 1
    assert known.bridge_silent() == {1}
    clock.now_ms += 499
    assert known.bridge_silent() == {1}
    pulse(known, "a", 2)  # it may have been on its way since before the silence
    assert known.bridge_silent() == {1}
    clock.now_ms += 250
    pulse(known, "a", 3)
    assert known.bridge_silent() == {2}
    clock.now_ms += 900
    assert known.bridge_silent() == {2}
    clock.now_ms += 1
    assert known.bridge_silent() == {1, 2}


def test_the_first_pulse_that_a_router_gets_of_a_running_bridge_shows_nothing() -> None:
    """The bridge may have been stopped before the router started, and run again since then."""
    clock = Clock()
    known = reports(clock, worker(1, "a"))
    pulse(known, "a", 7)
    assert known.bridge_silent() == {1}
    clock.now_ms += 250
    pulse(known, "a", 8)
    assert known.bridge_silent() == frozenset()


def test_pulses_that_are_received_together_end_no_silence() -> None:
    """A router that was stopped gets all pulses of that time at once; the bridge may have been stopped meanwhile."""
    clock = Clock()
    known = reports(clock, worker(1, "a"))
    pulse(known, "a")
    clock.now_ms += 10_000
    for number in range(2, 40):
        pulse(known, "a", number)
        clock.now_ms += 3
        assert known.bridge_silent() == {1}
    clock.now_ms += 250
    pulse(known, "a", 40)
    assert known.bridge_silent() == frozenset()


def test_two_pulses_far_apart_end_no_silence() -> None:
    """A bridge that is stopped again and again may have one old pulse each time."""
    clock = Clock()
    known = reports(clock, worker(1, "a"), silent_after_ms=900)
    pulse(known, "a")
    for number in range(2, 5):
        clock.now_ms += 1000
        pulse(known, "a", number)
        assert known.bridge_silent() == {1}
    clock.now_ms += 900
    pulse(known, "a", 5)
    assert known.bridge_silent() == frozenset()


def test_a_lease_that_moves_to_another_bridge_follows_that_bridges_pulses() -> None:
    """After a change of the registry, the pulses of the new holder of the lease count."""
    clock = Clock()
    workers = {WorkerId(1): worker(1, "old")}
    known = EngineReports(workers, {}, clock, 0)
    pulse(known, "old")
    assert known.bridge_silent() == frozenset()
    workers[WorkerId(1)] = worker(1, "new")
    known.registry_changed(workers[WorkerId(1)])
    assert known.bridge_silent() == {1}
    pulse(known, "new")
    assert known.bridge_silent() == frozenset()


def test_a_bridge_that_takes_over_a_worker_feeds_it_once_its_pulse_says_so() -> None:
    """Its pulses before and during the takeover do not list the worker, and degrade none of the others."""
    clock = Clock()
    workers = {WorkerId(number): worker(number, bridge) for number, bridge in ((1, "old"), (2, "new"))}
    known = EngineReports(workers, {}, clock, 0)
    pulse(known, "old", 1, (1,))
    pulse(known, "new", 1, (2,))
    assert known.bridge_silent() == frozenset()
    workers[WorkerId(1)] = worker(1, "new")
    known.lease_changed(workers[WorkerId(1)])
    silent = known.bridge_silent()
    assert silent == {1}
    pulse(known, "new", 2, (2,))
    assert known.bridge_silent() is silent
    pulse(known, "new", 3, (2, 1))
    assert known.bridge_silent() == frozenset()
    pulse(known, "new", 4, ())
    assert known.bridge_silent() == {1, 2}


def test_a_pulse_lists_a_limited_number_of_workers() -> None:
    """A foreign writer cannot fill memory with them; the list before stays in effect."""
    pulses = BridgePulses(0)
    pulses.note(BridgePulse("a", 1, (WorkerId(1),)), 0)
    with pytest.raises(BadRecord, match="at most"):
        pulses.note(BridgePulse("a", 2, tuple(map(WorkerId, range(FED_MAX + 1)))), 0)
    assert pulses.not_fed("a", {WorkerId(1), WorkerId(2)}) == {WorkerId(2)}


def test_a_renewed_lease_changes_nothing_and_a_moved_one_counts_at_once() -> None:
    """While the same bridge renews a lease, the set of silent workers stays the same object."""
    clock = Clock()
    workers = {WorkerId(number): worker(number, bridge) for number, bridge in ((1, "a"), (2, "b"), (3, None))}
    known = EngineReports(workers, {}, clock, 900)
    pulse(known, "a")
    silent = known.bridge_silent()
    assert silent == {2}
    for number, bridge, expected in ((1, "a", {2}), (3, "c", {2, 3}), (2, "a", {3}), (1, None, {3}), (3, None, set())):
        before = known.bridge_silent()
        workers[WorkerId(number)] = worker(number, bridge)
        known.lease_changed(workers[WorkerId(number)])
        assert known.bridge_silent() == expected
        assert (known.bridge_silent() is before) == (before == expected)


def test_a_tolerance_below_three_pulses_is_raised_to_that() -> None:
    """A router that tolerates less lag than pulses can show would never be exact."""
    pulses = BridgePulses(10)
    pulses.note(BridgePulse("a", 1), 5000)
    assert pulses.silent_from_ms("a") == 5000 + SILENT_AFTER_MS_MIN + 1
    assert pulses.silent_from_ms("b") == -1


def test_the_number_of_bridges_is_limited_and_old_ones_are_forgotten() -> None:
    """A foreign writer cannot fill memory; bridges that have been silent for long make place for new ones."""
    pulses = BridgePulses(0)
    for number in range(BRIDGES_MAX):
        pulses.note(BridgePulse(f"b{number}", 1), 0)
    with pytest.raises(BadRecord, match="already kept"):
        pulses.note(BridgePulse("late", 1), FORGET_AFTER_MS)
    pulses.note(BridgePulse("late", 1), FORGET_AFTER_MS + 1)
    assert pulses.silent_from_ms("late") > 0
    assert pulses.silent_from_ms("b0") == -1


def test_a_pulse_under_another_key_is_refused() -> None:
    """The key and the record must name the same bridge."""
    with pytest.raises(BadRecord, match="is not that of bridge y"):
        reports(Clock()).fold(PULSES.keys.pack("x"), PULSES.encode(BridgePulse("y", 1)))

"""Bookings with a forecast age by the clock of the log, whatever the clocks of machines show."""

from __future__ import annotations

import time

import pytest

from streams.core.loads.bookings import ActiveLoads, BookingId
from streams.core.loads.log_clock import LogClock
from streams.core.loads.observations import Forecast, OutputObserved, PrefillObserved
from tests.helpers.api import rank_of
from tests.helpers.invariants import check
from tests.helpers.shared_loads import Replica, World, booking
from tests.replicas import Loads

FOUR_S = Forecast(3_000_000, 4_000, 60_000)  # both are less than the TTL of these routers' bookings
RANK = rank_of(1)
WAITS: Loads = {RANK: (32, 2, 1)}


def world_with_broker(ahead_s: int) -> World:
    """Three routers whose wall clock is ahead of the broker's. Each of them has ticked once."""
    world = World()
    world.log.now_ms = time.time_ns() // 1_000_000 - ahead_s * 1000
    for replica in world.replicas:
        replica.sync.poll()
    return world


def backlog_ms(replica: Replica) -> float:
    with replica.sync.locked() as active:
        return float(active.backlog_ms(active.rows_of([RANK]), active.times.now_ms)[0])


def read_all(world: World) -> None:
    for replica in world.replicas:
        replica.sync.poll()
    for replica in world.replicas:
        for partition in range(len(world.log.partitions)):
            replica.fold(partition)


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
def test_bookings_age_by_the_log_whatever_the_wall_clock_shows(ahead_s: int) -> None:
    """On each router, a booking waits two seconds after it was made, and counts as prefilled after four."""
    world = world_with_broker(ahead_s)
    world.replicas[0].sync.book("r", booking(1, [1, 2], 32)._replace(forecast=FOUR_S))
    for _ in range(40):
        world.pass_time(50)
        read_all(world)
    assert [each.loads for each in world.replicas] == [WAITS] * 3
    assert [backlog_ms(each) for each in world.replicas] == [pytest.approx(1000.0, abs=100.0)] * 3
    world.pass_time(3_000)
    read_all(world)
    assert [each.loads for each in world.replicas] == [{RANK: (0, 2, 1)}] * 3


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_router_that_starts_reads_bookings_with_their_age(ahead_s: int) -> None:
    """What waited to be read shows the least that the time can be, and the first record that is live shows the rest."""
    world = world_with_broker(ahead_s)
    world.replicas[0].sync.book("r", booking(1, [1, 2], 32)._replace(forecast=FOUR_S))
    read_all(world)
    world.pass_time(1_000)
    late = Replica(world.log, world.clock)
    for records in world.log.partitions:
        late.sync._fold_all([(each.key, each.value, each.timestamp_ms, each.partition) for each in records], live=False)
    assert (late.loads, backlog_ms(late)) == (WAITS, 3000.0)
    world.log.append(0, b"tick", None)
    late.sync.fold(world.log.partitions[0][-1])
    assert (late.loads, backlog_ms(late)) == (WAITS, 2000.0)
    world.pass_time(3_000)
    assert late.loads == {RANK: (0, 2, 1)}


def test_bookings_made_before_the_first_record_keep_their_age() -> None:
    """When the router learns the time of the log from another record, its own bookings are as old as before."""
    world = world_with_broker(3600)
    first = world.replicas[0]
    world.log.away = True
    first.sync.book("r", booking(1, [1, 2], 32)._replace(forecast=FOUR_S))
    world.pass_time(1_000)
    assert (first.loads, backlog_ms(first)) == (WAITS, 2000.0)
    world.log.append(0, b"tick", None)
    first.fold(0)
    assert (first.loads, backlog_ms(first)) == (WAITS, 2000.0)
    world.pass_time(3_000)
    assert first.loads == {RANK: (0, 2, 1)}


def test_a_clock_that_is_set_back_is_followed() -> None:
    """A prompt that was completed before the clock was set back does not keep the rank's backlog from falling."""
    loads = ActiveLoads(1 << 40)
    loads.add(BookingId("r", "router", 1), booking(1)._replace(forecast=FOUR_S), 100_000)
    loads.advance(100_000)
    loads.prefill_complete(BookingId("r", "router", 1), 100_000)
    loads.advance(40_000)
    loads.add(BookingId("s", "router", 2), booking(1)._replace(forecast=FOUR_S), None)
    loads.advance(42_000)
    check(loads)
    assert loads.backlog_ms(loads.rows_of([RANK]), 42_000).tolist() == [1000.0]


def test_what_is_learnt_of_a_request_does_not_depend_on_a_jump() -> None:
    """A clock that jumps in between does not change how long a prompt or an output took."""
    loads = ActiveLoads(1 << 40, observe=True)
    request, booked = BookingId("r", "router", 1), booking(1)._replace(forecast=FOUR_S)
    loads.advance(10)
    loads.add(request, booked, None)
    loads.shift([request], 1_000_000)
    loads.advance(1_000_310)
    loads.prefill_complete(request, None)
    loads.shift([request], 1_000)
    loads.advance(1_001_710)
    loads.add(request, booked._replace(output_blocks=1), None)
    check(loads)
    assert loads.observations is not None
    prefill, output = loads.observations
    assert isinstance(prefill, PrefillObserved) and prefill.took_ms == 300
    assert isinstance(output, OutputObserved) and output.took_ms == 400


def test_the_clock_is_the_fastest_record_and_jumps_only_until_one_is_live() -> None:
    """Records that waited to be read only raise the time; live ones set it, and later ones refine it."""
    clock = LogClock()
    assert clock.now_ms(5) == 5
    assert clock.note(1000, 10, live=False) == 990
    assert clock.note(900, 20, live=False) == 0
    assert clock.note(1500, 30, live=False) == 480
    assert clock.note(1600, 40) == 90
    assert clock.now_ms(40) == 1600
    assert clock.note(1700, 100) == 0 == clock.note(9999, 100, live=False)
    assert clock.now_ms(100) == 1700
    assert clock.note(1000, 100) == 0
    assert clock.now_ms(100) == 1700

"""What clients report of a reassigned booking, to routers that have not read its reassignment yet.

Times of day decide whether a report came before a reassignment or after it. Routers that disagree on them are not
tested here.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.loads.bookings import BookingId, BookingPhase
from streams.kafka.load_records import time_written_ms
from streams.kafka.records import decode_load
from streams.router_api.sharing import attempts as attempts_module
from streams.router_api.sharing.reassignments import Reassigned
from tests.helpers.api import rank_of
from tests.helpers.shared_loads import TOPIC, TTL_MS, Replica, World, booking, live, read_all

#: Kernels leave ids as short as the first one to Python.
ids = pytest.mark.parametrize("request_id", ["r", "request-1"])
#: The replica that reassigns a booking: the one that made it, or another one.
replica_numbers = pytest.mark.parametrize("number", [0, 1])


def booked(request_id: str) -> World:
    """A world whose first router has booked a request, which all have read."""
    world = World()
    world.replicas[0].sync.book(request_id, booking(1))
    world.settle()
    return world


def assert_never_read_as_ended(replica: Replica, request_id: str) -> None:
    """Read one record after another, and check that an active booking is known after each."""
    while any(replica.fold(partition, 1) for partition in range(TOPIC.partitions)):
        assert live(replica, request_id) >= 1


@ids
@replica_numbers
@pytest.mark.parametrize("is_away", [False, True])
def test_a_free_at_a_router_that_has_not_read_the_reassignment_ends_the_new_booking(
    request_id: str, number: int, *, is_away: bool
) -> None:
    """It is reported in the same millisecond, while Kafka is there or away."""
    world = booked(request_id)
    world.log.away = is_away
    world.replicas[number].sync.book(request_id, booking(2), reassigns=True)
    world.replicas[number].sync.poll()
    assert world.replicas[2].sync.report_phase(request_id, BookingPhase.FREE) is True
    world.replicas[2].sync.poll()
    assert live(world.replicas[number], request_id) == 1
    assert world.same() == {}


@ids
@replica_numbers
def test_a_buffered_free_ends_the_new_booking(request_id: str, number: int) -> None:
    """The router that buffers it has read neither booking, and reads the former one first."""
    world = World()
    world.replicas[0].sync.book(request_id, booking(1))
    world.replicas[0].sync.poll()
    read_all(world.replicas[number])
    world.replicas[number].sync.book(request_id, booking(2), reassigns=True)
    assert world.replicas[2].sync.report_phase(request_id, BookingPhase.FREE) is False
    world.pass_time(50)
    assert world.same() == {}


@ids
@replica_numbers
@pytest.mark.parametrize("is_buffered", [False, True])
def test_a_free_that_came_before_the_reassignment_leaves_the_new_booking(
    request_id: str, number: int, *, is_buffered: bool
) -> None:
    """A client may end a request and then repeat it under its id, with the worker excluded that failed."""
    world = World()
    world.replicas[0].sync.book(request_id, booking(1))
    world.replicas[0].sync.poll()
    read_all(world.replicas[number])
    if not is_buffered:
        read_all(world.replicas[2])
    assert world.replicas[2].sync.report_phase(request_id, BookingPhase.FREE) is not is_buffered
    world.pass_time(1)
    world.replicas[number].sync.book(request_id, booking(2), reassigns=True)
    world.pass_time(50)
    assert world.same() == {rank_of(2): (16, 1, 1)}


@ids
@pytest.mark.parametrize("routers_in_turn", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_free_ends_a_booking_that_was_reassigned_twice(request_id: str, routers_in_turn: tuple[int, int]) -> None:
    """The router that gets the report knows only the booking before both reassignments."""
    world = booked(request_id)
    for worker_id, number in enumerate(routers_in_turn, 2):
        world.replicas[number].sync.book(request_id, booking(worker_id), reassigns=True)
        for replica in world.replicas[:2]:
            replica.sync.poll()
            read_all(replica)
    world.replicas[2].sync.report_phase(request_id, BookingPhase.FREE)
    assert world.same() == {}


@ids
@replica_numbers
def test_a_prefill_complete_at_a_router_that_has_not_read_the_reassignment_counts(request_id: str, number: int) -> None:
    world = booked(request_id)
    world.replicas[number].sync.book(request_id, booking(2), reassigns=True)
    world.replicas[2].sync.report_phase(request_id, BookingPhase.PREFILL)
    assert world.same() == {rank_of(2): (0, 1, 1)}


@ids
@replica_numbers
def test_a_reassignment_without_reports_leaves_the_new_booking(request_id: str, number: int) -> None:
    """The end of the former booking, which routers write themselves, is not a report: its time is 0."""
    world = booked(request_id)
    world.replicas[number].sync.book(request_id, booking(2), reassigns=True)
    world.pass_time(1)
    assert world.same() == {rank_of(2): (16, 1, 1)}
    frees = [
        each.value
        for each in world.log.written
        if each.value is not None and decode_load(each.value)[1] is BookingPhase.FREE
    ]
    assert frees
    assert {time_written_ms(value) for value in frees} == {0}


@ids
@replica_numbers
def test_a_reassignment_is_never_read_as_an_end(request_id: str, number: int) -> None:
    """However far a router has read, it knows an active booking, so that a report finds one."""
    world = booked(request_id)
    world.replicas[number].sync.book(request_id, booking(2), reassigns=True)
    world.replicas[number].sync.poll()
    assert_never_read_as_ended(world.replicas[2], request_id)


@ids
def test_a_report_before_a_reassigned_booking_is_sent_keeps_the_order_of_records(request_id: str) -> None:
    """The booking with its output takes the place of the one that waits, before the end of the former one."""
    world = booked(request_id)
    world.replicas[0].sync.book(request_id, booking(2), reassigns=True)
    world.replicas[0].sync.report_output(request_id, 64)
    world.replicas[0].sync.poll()
    assert_never_read_as_ended(world.replicas[2], request_id)


@ids
@pytest.mark.parametrize("what", [BookingPhase.PREFILL, BookingPhase.FREE])
def test_bookings_that_replace_each_other_are_followed_once(request_id: str, what: BookingPhase) -> None:
    """Records that no router writes, or that came very late, may say so."""
    world = booked(request_id)
    first, second, third = world.replicas
    second.sync.book(request_id, booking(2), reassigns=True)
    world.settle()
    ((former, reassignment),) = second.sync._attempts._reassignments.items()
    second.sync._note_reassignment(Reassigned(reassignment.latter, former, reassignment.at_ms))
    first.sync._note_reassignment(Reassigned(reassignment.latter, former, reassignment.at_ms))
    n_before = len(world.log.written)
    third.sync.report_phase(request_id, what)
    world.settle()
    assert len(world.log.written) <= n_before + 4
    assert world.same() == ({} if what is BookingPhase.FREE else {rank_of(2): (0, 1, 1)})


def test_an_add_without_a_time_does_not_make_the_routers_own_free_a_report() -> None:
    """A foreign writer may leave the time 0, which is that of the frees that routers write by themselves."""
    world = booked("request-1")
    first, second, _ = world.replicas
    own, other = BookingId("request-1", first.sync.router_id, 1), BookingId("request-1", "other", 1)
    first.sync._note_reassignment(Reassigned(own, other, 0))
    second.sync.book("request-1", booking(2), reassigns=True)
    world.settle()
    assert not any(b"other" in record.key for record in world.log.written)
    assert world.same() == {rank_of(2): (16, 1, 1)}


def test_reassignments_are_forgotten_after_the_ttl_or_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later report then applies to the former booking alone."""
    monkeypatch.setattr(attempts_module, "REASSIGNMENTS_MAX", 1)
    world = World()
    first, second, _ = world.replicas
    for request_id in ("request-1", "request-2"):
        first.sync.book(request_id, booking(1))
    world.settle()
    for request_id in ("request-1", "request-2"):
        first.sync.book(request_id, booking(2), reassigns=True)
        second.sync.report_phase(request_id, BookingPhase.FREE)
        assert len(first.sync._attempts._reassignments) == 1
    assert world.same() == {rank_of(2): (16, 1, 1)}
    assert not first.sync._attempts._reassignments  # it was used
    first.sync.book("request-1", booking(3), reassigns=True)
    assert len(first.sync._attempts._reassignments) == 1
    world.pass_time(TTL_MS)
    first.sync.poll()
    assert not first.sync._attempts._reassignments


actions = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("prefill"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("read"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("poll"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("time"), st.integers(0, 2), st.just(0)),
    ),
    max_size=20,
)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(actions=actions, last=st.integers(0, 2), request_id=st.sampled_from(["r", "request-1"]))
def test_a_free_ends_all_that_was_booked_before_it(
    actions: list[tuple[str, int, int]], last: int, request_id: str
) -> None:
    """A client asks any routers, one after the other, excluding what it got before, and at last reports the end."""
    world = booked(request_id)
    for what, router, n in actions:
        replica = world.replicas[router]
        match what:
            case "ask":
                replica.sync.book(request_id, booking(n), reassigns=True)
            case "prefill":
                replica.sync.report_phase(request_id, BookingPhase.PREFILL)
            case "read":
                read_all(replica, n)
            case "poll":
                replica.sync.poll()
            case _:
                world.pass_time(n)
    world.replicas[last].sync.report_phase(request_id, BookingPhase.FREE)
    assert world.same() == {}

"""One request id, booked by several routers that have not read each other's bookings, and what its client ends.

Times of day decide which booking is the later one, and whether it was made before a request ended.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.loads.bookings import BookingPhase
from streams.router_api.sharing import attempts as attempts_module
from tests.helpers.api import rank_of
from tests.helpers.shared_loads import TTL_MS, World, booking, live, read_all

#: Kernels leave ids as short as the first one to Python.
ids = pytest.mark.parametrize("request_id", ["r", "request-1"])


def free(world: World, router: int, request_id: str, phase: str | None = None) -> bool:
    return world.replicas[router].sync.report_phase(request_id, BookingPhase.FREE, phase)


@ids
@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("phase", [None, "decode"])
def test_a_free_of_an_unsent_booking_ends_that_of_another_router(
    request_id: str, phase: str | None, *, is_away: bool
) -> None:
    """A client that got no answer in time asked a second router, and then gave up. No record says what it ended."""
    world = World()
    world.log.away = is_away
    first, second, _ = world.replicas
    first.sync.book(request_id, booking(1, phase=phase))
    second.sync.book(request_id, booking(2, phase=phase))
    world.pass_time(1)
    assert free(world, 0, request_id)
    assert world.same() == {}
    assert not any(first.sync.router_id.encode() in each.key for each in world.log.written)


@ids
def test_a_free_of_one_phase_leaves_the_other_one(request_id: str) -> None:
    world = World()
    first, second, _ = world.replicas
    first.sync.book(request_id, booking(1, phase="prefill"))
    second.sync.book(request_id, booking(2, phase="prefill"))
    second.sync.book(request_id, booking(3, phase="decode"))
    world.pass_time(1)
    free(world, 0, request_id, "prefill")
    assert world.same() == {rank_of(3): (16, 1, 1)}


@ids
def test_a_repeated_free_ends_a_booking_that_was_not_read_yet(request_id: str) -> None:
    """The router knows only that the request has ended, when the client ends it again after another attempt."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book(request_id, booking(1))
    world.settle()
    free(world, 0, request_id)
    world.settle()
    second.sync.book(request_id, booking(2))
    world.pass_time(1)
    assert free(world, 0, request_id)
    assert world.same() == {}


@ids
@pytest.mark.parametrize("later_ms", [0, 1])
def test_a_booking_made_after_the_free_remains(request_id: str, later_ms: int) -> None:
    """So does one of the same millisecond: a client that repeats a request does so at once."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book(request_id, booking(1))
    world.pass_time(1)
    free(world, 0, request_id)
    world.pass_time(later_ms)
    second.sync.book(request_id, booking(2))
    assert world.same() == {rank_of(2): (16, 1, 1)}


@ids
def test_a_buffered_free_ends_the_bookings_of_two_routers(request_id: str) -> None:
    """It applies at once to the one that the router makes itself, and to the other one when that is read."""
    world = World()
    first, second, _ = world.replicas
    second.sync.book(request_id, booking(2))
    world.pass_time(1)
    assert free(world, 0, request_id) is False
    first.sync.book(request_id, booking(1))
    assert world.same() == {}


@ids
@pytest.mark.parametrize("reversed_", [False, True])
@pytest.mark.parametrize("was_read", [False, True])
def test_of_two_bookings_the_one_that_was_made_later_remains(
    request_id: str, *, reversed_: bool, was_read: bool
) -> None:
    """Whichever comes first into the log, and whether its router has read it when it reads the other one."""
    world = World()
    world.log.away = True
    first, second, third = world.replicas
    first.sync.book(request_id, booking(1))
    first.sync.poll()
    world.pass_time(1)
    second.sync.book(request_id, booking(2))
    second.sync.poll()
    world.log.away = False
    for replica in (second, first) if reversed_ else (first, second):
        replica.sync.poll()
        if was_read:
            read_all(replica)
    read_all(third)
    assert world.same() == {rank_of(2): (16, 1, 1)}


@ids
@pytest.mark.parametrize("reversed_", [False, True])
def test_of_two_bookings_of_one_millisecond_the_later_one_in_the_log_remains(
    request_id: str, *, reversed_: bool
) -> None:
    world = World()
    for replica, worker_id in zip(world.replicas, (1, 2), strict=False):
        replica.sync.book(request_id, booking(worker_id))
    for replica in world.replicas[1::-1] if reversed_ else world.replicas:
        replica.sync.poll()
    assert world.same() == {rank_of(1 if reversed_ else 2): (16, 1, 1)}


@ids
@pytest.mark.parametrize("reversed_", [False, True])
def test_a_booking_that_grew_keeps_the_time_when_it_was_made(request_id: str, *, reversed_: bool) -> None:
    """Its record is written again with its output, which makes it no later than the next attempt."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book(request_id, booking(1))
    world.pass_time(1)
    second.sync.book(request_id, booking(2))
    world.pass_time(1)
    first.sync.report_output(request_id, 64)
    for replica in world.replicas[1::-1] if reversed_ else world.replicas:
        replica.sync.poll()
    assert world.same() == {rank_of(2): (16, 1, 1)}


@ids
def test_booked_ended_and_booked_again_while_kafka_is_away(request_id: str) -> None:
    """The records of the first attempt come into the log after those of the second one."""
    world = World()
    world.log.away = True
    first, second, third = world.replicas
    first.sync.book(request_id, booking(1))
    first.sync.poll()  # Kafka's client has it, so that it cannot be withdrawn
    free(world, 0, request_id)
    first.sync.poll()
    world.pass_time(1)
    second.sync.book(request_id, booking(2))
    world.log.away = False
    second.sync.poll()
    for replica in (second, third):
        read_all(replica)
    first.sync.poll()
    assert live(second, request_id) == 1
    assert world.same() == {rank_of(2): (16, 1, 1)}
    world.pass_time(1)
    free(world, 2, request_id)
    assert world.same() == {}


@ids
def test_a_free_at_a_router_that_knows_only_an_ended_attempt_ends_the_next_one(request_id: str) -> None:
    """It does not know yet that the attempt has ended, and its record names that one alone."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book(request_id, booking(1))
    world.settle()
    world.pass_time(1)
    free(world, 1, request_id)
    second.sync.book(request_id, booking(2))
    world.pass_time(1)
    assert free(world, 0, request_id)
    assert world.same() == {}


@ids
@pytest.mark.parametrize("named", [None, "decode"])
def test_a_free_of_all_phases_ends_one_that_was_not_read_yet(request_id: str, named: str | None) -> None:
    """One that names a phase leaves the other phase."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book(request_id, booking(1, phase="decode"))
    world.settle()
    second.sync.book(request_id, booking(2, phase="prefill"))
    world.pass_time(1)
    assert free(world, 0, request_id, named)
    assert world.same() == ({} if named is None else {rank_of(2): (16, 1, 1)})


@ids
def test_a_buffered_free_ends_an_attempt_after_one_that_has_ended(request_id: str) -> None:
    """The first booking that its router reads has ended when the call came, and the next one has not."""
    world = World()
    first, second, _ = world.replicas
    second.sync.book(request_id, booking(1))
    second.sync.poll()
    free(world, 1, request_id)
    world.pass_time(1)
    second.sync.book(request_id, booking(2))
    world.pass_time(1)
    assert free(world, 0, request_id) is False
    assert first.loads == {}
    assert world.same() == {}


@ids
def test_a_free_that_comes_into_the_log_before_its_add_ends_other_bookings_too(request_id: str) -> None:
    world = World()
    first, second, _ = world.replicas
    world.log.away = True
    first.sync.book(request_id, booking(1))
    first.sync.poll()
    second.sync.book(request_id, booking(2))
    world.pass_time(1)
    free(world, 0, request_id)
    first.sync.poll()
    first.client.time_out(1)  # it is sent again, after the free
    assert world.same() == {}


@ids
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_two_bookings_never_both_end_because_each_seems_the_earlier_one(
    request_id: str, monkeypatch: pytest.MonkeyPatch, *, is_forgotten: bool
) -> None:
    """Another router has written the earlier one again, and compaction has removed when it was made; or its own router
    has forgotten that."""
    if is_forgotten:
        monkeypatch.setattr(attempts_module, "MADE_MAX", 1)
    world = World()
    first, second, third = world.replicas
    first.sync.book(request_id, booking(1))
    if is_forgotten:
        first.sync.book(f"{request_id}-other", booking(1))
        world.pass_time(1)
    first.sync.poll()
    for replica in (first, second):
        read_all(replica)
    if not is_forgotten:
        world.pass_time(1)
    third.sync.book(request_id, booking(3))
    world.pass_time(1)
    second.sync.report_output(request_id, 64)
    second.sync.poll()
    world.log.compact()
    world.settle()
    assert live(third, request_id) >= 1
    free(world, 1, request_id)
    free(world, 1, f"{request_id}-other")
    assert world.same() == {}


def test_ends_and_times_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "ENDS_MAX", 2)
    monkeypatch.setattr(attempts_module, "MADE_MAX", 2)
    world = World()
    first, _, _ = world.replicas
    for number in range(3):
        first.sync.book(f"request-{number}", booking(1))
        free(world, 0, f"request-{number}")
        assert not first.sync._attempts._made
    assert list(first.sync._attempts._ends) == ["request-1", "request-2"]
    for number in range(4):
        first.sync.book(f"other-{number}", booking(1))
    assert len(first.sync._attempts._made) == 2
    world.settle()
    world.replicas[1].sync.report_phase("other-3", BookingPhase.FREE)
    world.settle()
    assert len(first.sync._attempts._made) == 1
    for _ in range(TTL_MS // 1000 + 3):
        world.pass_time(1000)
        world.settle()
    assert not first.sync._attempts._ends


attempts = st.one_of(
    st.tuples(st.just("attempt"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("output"), st.integers(0, 2), st.integers(0, 100)),
    st.tuples(st.just("read"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("poll"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("away"), st.just(0), st.integers(0, 1)),
)
frees = st.tuples(st.just("free"), st.integers(0, 2), st.just(0))


def go_on(world: World, what: str, router: int, n: int, request_id: str) -> None:
    """Do what is neither an attempt nor its end."""
    replica = world.replicas[router]
    match what:
        case "output":
            if live(replica, request_id):
                replica.sync.report_output(request_id, n)
        case "read":
            read_all(replica, n)
        case "poll":
            replica.sync.poll()
        case "away":
            world.log.away = bool(n)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    actions=st.lists(attempts, max_size=25),
    request_id=st.sampled_from(["r", "request-1"]),
    ends=st.booleans(),
    ends_attempts=st.booleans(),
)
def test_only_the_last_attempt_remains(
    actions: list[tuple[str, int, int]], request_id: str, *, ends: bool, ends_attempts: bool
) -> None:
    """A client makes one attempt after the other, each at any router, and ends them, or only the last one, where it
    was made."""
    world = World()
    last: tuple[int, int] | None = None
    for what, router, n in actions:
        match what:
            case "attempt":
                if last is not None and ends_attempts:
                    free(world, last[0], request_id)
                world.pass_time(1)
                world.replicas[router].sync.book(request_id, booking(n), reassigns=True)
                last = router, n
            case _:
                go_on(world, what, router, n, request_id)
        world.pass_time(1)
    if last is not None and ends:
        free(world, last[0], request_id)
    loads = world.same()
    assert list(loads) == ([rank_of(last[1])] if last is not None and not ends else [])
    assert all(load[2] == 1 for load in loads.values())


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    actions=st.lists(st.one_of(attempts, frees), max_size=25),
    last=st.integers(0, 2),
    request_id=st.sampled_from(["r", "request-1"]),
)
def test_a_free_at_any_router_ends_all_attempts(
    actions: list[tuple[str, int, int]], last: int, request_id: str
) -> None:
    """A client makes attempts and ends them at any routers, and at last ends the request at any of them."""
    world = World()
    for what, router, n in actions:
        match what:
            case "attempt":
                world.replicas[router].sync.book(request_id, booking(n), reassigns=True)
            case "free":
                free(world, router, request_id)
            case _:
                go_on(world, what, router, n, request_id)
        world.pass_time(1)
    free(world, last, request_id)
    assert world.same() == {}

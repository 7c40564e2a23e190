"""Routers that share bookings through one log, in memory: whatever their order, all end with the loads of the log.

The log stands in for Kafka, so that a test decides when it is away, what it acknowledges and what is compacted; the
same with a real Kafka is in test_replica_sync. The contents of the log are folded here a second time, by a rule of two
lines.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.loads.bookings import ENDED_BOOKING_BYTES, BookingId, BookingPhase
from streams.core.loads.observations import LEASE, LEASE_MS, NO_FORECAST, Forecast
from streams.core.loads.rank_times import RECENT_TOKENS
from streams.errors import BadRecord, BookingConflict
from streams.kafka.clients import Record, producer
from streams.kafka.load_records import request_partition
from streams.kafka.records import decode_load, load_key
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.router_api.sharing import loads_sync as loads_sync_module
from streams.router_api.sharing import outbox as outbox_module
from streams.router_api.sharing.late_calls import BUFFERED_CALL_TTL_MS
from streams.router_api.sharing.loads_sync import READ_INTERVAL_S, READ_INTERVAL_WHILE_WAITED_FOR_S, LoadsSync
from streams.router_api.sharing.log_time import QUIET_MS
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import PATIENCE_S, rank_of
from tests.helpers.invariants import check
from tests.helpers.shared_loads import (
    KNOBS,
    TOPIC,
    TTL_MS,
    Client,
    Log,
    Replica,
    World,
    booking,
    live,
    read_all,
)
from tests.replicas import Loads

REQUESTS = ["a", "request-b", "request-c", "request-d"]
routers = st.integers(0, 2)
requests = st.sampled_from(REQUESTS)
phases = st.sampled_from([None, None, "prefill", "decode"])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("book"), routers, requests, st.integers(1, 3), st.integers(0, 4), phases),
        st.tuples(st.just("move"), routers, requests, st.integers(1, 3), st.integers(0, 4), phases),
        st.tuples(st.just("prefill"), routers, requests, phases),
        st.tuples(st.just("free"), routers, requests, phases),
        st.tuples(st.just("output"), routers, requests, st.integers(0, 70), phases),
        st.tuples(st.just("renew"), routers, requests, phases),
        st.tuples(st.just("fold"), routers, st.integers(0, TOPIC.partitions - 1), st.integers(1, 4)),
        st.tuples(st.just("poll"), routers),
        st.tuples(st.just("restart"), routers),
        st.tuples(st.just("away"), st.booleans()),
        st.tuples(st.just("time out"), routers, st.integers(1, 3)),
        st.tuples(st.just("compact")),
        st.tuples(st.just("time"), st.integers(1, 100)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(actions=actions, in_flight_max=st.sampled_from([1, 2, 10_000]))
def test_whatever_happens_all_routers_end_with_the_same_loads(
    actions: list[tuple[Any, ...]], in_flight_max: int
) -> None:
    """Before any expiry, all routers have the loads of the log; after it, no booking remains anywhere.

    The actions are bookings, phases and reads at any router, routers that crash, Kafka that is away, records that time
    out, and compaction. Each fall of a router's load is announced to its listener.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(outbox_module, "IN_FLIGHT_RECORDS_MAX", in_flight_max)
        play(actions)


def play(actions: list[tuple[Any, ...]]) -> None:
    """Do these actions, and check that all routers end with the same loads, and then without any."""
    world = World()
    act(world, actions)
    world.same()
    for _ in range(TTL_MS // QUIET_MS + 3):
        world.pass_time(QUIET_MS)
        world.settle()
    for replica in world.replicas:
        replica.check_announcements()
    assert [len(replica) for replica in world.replicas] == [0, 0, 0]
    assert [replica.sync.unacknowledged for replica in world.replicas] == [0, 0, 0]


def act(world: World, actions: list[tuple[Any, ...]]) -> None:
    for name, *given_ in actions:
        match name, given_:
            case "book" | "move", (router, request_id, worker_id, n, phase):
                forecast = LEASE if n % 2 else NO_FORECAST
                carried = booking(worker_id, list(range(1, n + 1)), 16 * n, phase)._replace(forecast=forecast)
                try:
                    world.replicas[router].sync.book(request_id, carried, reassigns=name == "move")
                except BookingConflict:
                    assert live(world.replicas[router], request_id)
            case "prefill" | "free", (router, request_id, phase):
                world.replicas[router].sync.report_phase(request_id, BookingPhase(name), phase)
            case "output", (router, request_id, output_tokens, phase):
                world.replicas[router].sync.report_output(request_id, output_tokens, phase)
            case "renew", (router, request_id, phase):
                world.replicas[router].sync.renew(request_id, phase)
            case "fold", (router, partition, n):
                world.replicas[router].fold(partition, n)
            case "poll", (router,):
                world.replicas[router].sync.poll()
            case "restart", (router,):  # unsent records are lost, and the log is read from its beginning
                world.replicas[router] = Replica(world.log, world.clock)
            case "time out", (router, n):
                world.replicas[router].client.time_out(n)
            case "away", (away,):
                world.log.away = away
            case "compact", ():
                world.log.compact()
            case "time", (ms,):
                world.pass_time(ms)
        for replica in world.replicas:
            replica.check_announcements()


@settings(max_examples=100, deadline=None, print_blob=True)
@given(actions=actions, sizes=st.lists(st.integers(1, 70), min_size=1, max_size=8))
def test_records_folded_together_give_the_state_of_one_at_a_time(
    actions: list[tuple[Any, ...]], sizes: list[int]
) -> None:
    """However the log of several routers is divided into batches, a router ends with the same bookings and loads."""
    world = World()
    act(world, actions)
    world.settle()
    written = world.log.written
    one_by_one, together = Replica(world.log, world.clock), Replica(world.log, world.clock)
    for record in written:
        one_by_one.sync.fold(record)
    at = 0
    for size in itertools.cycle(sizes):
        batch = [(each.key, each.value, each.timestamp_ms, each.partition) for each in written[at : at + size]]
        assert together.sync._fold_all(batch) == []
        at += size
        if at >= len(written):
            break
    with one_by_one.sync.locked() as expected, together.sync.locked() as found:
        check(found)
        assert found.ranks() == expected.ranks()
        for request_id in REQUESTS:
            assert found.live_ids(request_id) == expected.live_ids(request_id)
            assert [found.booking(each) for each in found.live_ids(request_id)] == [
                expected.booking(each) for each in expected.live_ids(request_id)
            ]
            assert found.knows(request_id) == expected.knows(request_id)
        assert (len(found), found.n_bytes, found.expired) == (len(expected), expected.n_bytes, expected.expired)


def test_a_listener_is_called_when_load_falls_and_only_then() -> None:
    """A free, a prefill-complete, an expiry and another router's free are announced; bookings and output are not."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book("r", booking(1))
    first.sync.book("s", booking(1))
    world.settle()
    first.sync.report_output("r", 16)
    world.settle()
    assert (first.falls, second.falls) == (0, 0)
    first.sync.report_phase("r", BookingPhase.PREFILL)
    assert first.falls == 1
    first.sync.report_phase("r", BookingPhase.FREE)
    first.sync.report_phase("r", BookingPhase.FREE)
    assert first.falls == 2
    world.settle()
    assert (first.falls, second.falls) == (2, 2)
    for _ in range(TTL_MS // QUIET_MS + 3):
        world.pass_time(QUIET_MS)
        world.settle()
    assert (first.falls, second.falls) == (3, 3)


def test_a_listener_is_not_called_after_it_ended_and_reset_is_a_fall() -> None:
    """A reset drops all bookings and is announced; a listener that has ended is not called again."""
    world = World()
    first = world.replicas[0]
    calls: list[str] = []
    end = first.sync.listen(lambda: calls.append("fell"))
    first.sync.book("r", booking(1))
    first.sync.reset()
    assert calls == ["fell"]
    end()
    first.sync.book("s", booking(1))
    first.sync.report_phase("s", BookingPhase.FREE)
    assert calls == ["fell"]


def test_a_prefill_told_behind_another_routers_free_changes_nothing() -> None:
    """A prefill-complete at a router that has not read the free yet does not revive the booking."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book("r", booking(1))
    world.settle()
    first.sync.report_phase("r", BookingPhase.FREE)
    assert second.sync.report_phase("r", BookingPhase.PREFILL) is True  # it has not read the free
    assert world.same() == {}


def test_an_id_used_again_while_its_free_is_under_way_lives() -> None:
    """A free ends the booking that its router knew, and not a later one of the same id, in whatever order they are
    read."""
    world = World()
    first, second, third = world.replicas
    first.sync.book("r", booking(1))
    world.settle()
    third.sync.report_phase("r", BookingPhase.FREE)
    with third.sync.locked() as active:
        assert active.live("r") is None
    third.sync.book("r", booking(2, [7, 8]))  # first and second have read neither
    assert (live(first, "r"), live(second, "r")) == (1, 1)
    assert world.same() == {rank_of(2): (16, 2, 1)}


@pytest.mark.parametrize("n_rivals", [2, 3])
def test_of_bookings_of_one_millisecond_the_last_in_the_log_stays(n_rivals: int) -> None:
    """If two routers book one id at once, one of the bookings remains, the same one for all routers."""
    world = World()
    for number, replica in enumerate(world.replicas[:n_rivals], 1):
        replica.sync.book("r", booking(number))
        replica.sync.poll()
    assert world.same() == {rank_of(n_rivals): (16, 1, 1)}
    world.replicas[0].sync.report_phase("r", BookingPhase.FREE)
    assert world.same() == {}


def test_a_free_ends_all_bookings_of_its_id() -> None:
    """A free ends the bookings of two routers that have not read each other's."""
    world = World()
    first, second, third = world.replicas
    for number, replica in ((1, first), (2, second)):
        replica.sync.book("r", booking(number))
        replica.sync.poll()
    read_all(third)
    assert live(third, "r") == 2
    third.sync.report_phase("r", BookingPhase.FREE)
    assert live(third, "r") == 0
    assert world.same() == {}


def test_what_another_router_states_anew_is_so_for_its_owner_too() -> None:
    """A booking that another router replaces, with another overlap, is replaced at its owner too."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book("r", booking(1, prefill=64))
    world.settle()
    second.sync.book("r", booking(1, prefill=16))
    assert world.same() == {rank_of(1): (16, 1, 1)}


def test_phases_of_one_id_are_booked_and_ended_separately_everywhere() -> None:
    """A prefill and a decode booking of one id do not end each other, and a call that names one leaves the other."""
    world = World()
    first, second, third = world.replicas
    first.sync.book("r", booking(1, phase="prefill"))
    second.sync.book("r", booking(2, [7], phase="decode"))
    assert world.same() == {rank_of(1): (16, 1, 1), rank_of(2): (16, 1, 1)}
    with pytest.raises(BookingConflict):
        third.sync.book("r", booking(3, phase="decode"))
    assert third.sync.report_output("r", 16, "decode") is True
    assert third.sync.report_phase("r", BookingPhase.FREE, "prefill") is True
    assert world.same() == {rank_of(2): (16, 2, 1)}
    first.sync.book("r", booking(3, phase="decode"), reassigns=True)
    assert world.same() == {rank_of(3): (16, 1, 1)}
    assert second.sync.report_phase("r", BookingPhase.FREE) is True
    assert world.same() == {}


@pytest.mark.parametrize(("greater", "later"), [(1, 2), (0, 1), (1, 0)])
def test_a_late_report_of_output_at_another_router_changes_nothing(greater: int, later: int) -> None:
    """It is written by a router that has not read the greater report yet; the booking's own router corrects it."""
    world = World()
    world.replicas[0].sync.book("r", booking(1))
    world.settle()
    for replica, output_tokens in ((world.replicas[greater], 20 * 16), (world.replicas[later], 16)):
        replica.sync.report_output("r", output_tokens)
        replica.sync.poll()  # it is in the log before the other one is written
    assert world.same() == {rank_of(1): (16, 1 + 20, 1)}
    world.replicas[later].sync.report_output("r", 16)
    assert world.same() == {rank_of(1): (16, 1 + 20, 1)}
    world.replicas[later].sync.report_phase("r", BookingPhase.FREE)
    assert world.same() == {}


def test_a_call_for_a_phase_waits_for_the_booking_of_that_phase() -> None:
    """A call that names a phase is buffered while only the other phase was booked; one that names none takes the
    first booking that arrives."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book("r", booking(1, phase="prefill"))
    world.settle()
    assert second.sync.report_phase("r", BookingPhase.PREFILL, "decode") is False
    assert second.sync.report_output("r", 16, "decode") is False
    first.sync.report_phase("r", BookingPhase.FREE, "prefill")
    world.settle()
    assert second.sync.report_phase("r", BookingPhase.FREE, "prefill") is True  # it has ended
    first.sync.book("r", booking(1, phase="decode"))
    assert world.same() == {rank_of(1): (0, 2, 1)}
    assert second.sync.report_phase("s", BookingPhase.FREE) is False
    for phase in ("prefill", "decode"):
        first.sync.book("s", booking(2, phase=phase))
    assert world.same() == {rank_of(1): (0, 2, 1), rank_of(2): (16, 1, 1)}
    assert second.sync.unknown_calls == 0


def test_generated_tokens_make_a_booking_grow_for_all() -> None:
    """Output reported to any router grows the booking everywhere; repeated or smaller numbers are not published."""
    world = World()
    first, second, third = world.replicas
    first.sync.book("r", booking(1))
    world.settle()
    for replica, tokens, blocks in ((second, 1, 1), (third, 17, 2), (first, 33, 3), (second, 48, 3), (third, 5, 3)):
        n_written = len(world.log.written)
        assert replica.sync.report_output("r", tokens) is True
        assert replica.loads == {rank_of(1): (16, 1 + blocks, 1)}
        assert world.same() == replica.loads
        assert len(world.log.written) - n_written == (tokens in (1, 17, 33))
    second.sync.book("r", booking(1, prefill=0))
    assert world.same() == {rank_of(1): (0, 4, 1)}
    first.sync.report_phase("r", BookingPhase.FREE)
    assert third.sync.report_output("r", 100) is True  # it has not read the free
    assert world.same() == {}
    assert first.sync.report_output("r", 200) is True
    assert world.same() == {}


@pytest.mark.parametrize("forecast", [NO_FORECAST, Forecast(40_000, 500, 0)])
def test_reports_of_the_same_length_keep_a_booking_alive(forecast: Forecast) -> None:
    """They renew it everywhere with one record per half of its TTL, and change no load, no prefill and no time."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book("r", booking(1)._replace(forecast=forecast))
    world.settle()
    first.sync.report_output("r", 1)
    first.sync.report_phase("r", BookingPhase.PREFILL)
    world.settle()
    n_falls = [replica.falls for replica in world.replicas]
    times = [times_of(replica) for replica in world.replicas]
    n_adds = sum(b"add" in each.key for each in world.log.written)
    for minute in range(100):
        world.pass_time(TTL_MS // 10)
        world.settle()
        (first, second)[minute % 2].sync.report_output("r", 1)
        assert world.same() == {rank_of(1): (0, 2, 1)}
        if minute == 25:  # the records of prefills are deleted after two TTLs
            for records in world.log.partitions:
                records[:] = [each for each in records if b"prefill" not in each.key]
            late = Replica(world.log, world.clock)
            read_all(late)
            assert late.loads == {rank_of(1): (0, 2, 1)}
    assert 10 <= sum(b"add" in each.key for each in world.log.written) - n_adds <= 20
    assert [replica.falls for replica in world.replicas] == n_falls
    assert [times_of(replica) for replica in world.replicas] == times
    second.sync.report_phase("r", BookingPhase.FREE)
    assert world.same() == {}


#: The TTL is longer than a lease, as it is by default.
LEASING = replace(KNOBS, booking_ttl_s=4 * LEASE_MS / 1000)
HALF_MS = LEASE_MS // 2


def now_same(world: World) -> Loads:
    """The loads of all routers at this time, of which the ticks of quiet partitions tell them."""
    world.settle()
    world.pass_time(QUIET_MS)
    world.settle()
    return world.same()


def test_the_bookings_of_a_router_that_was_killed_end_with_their_leases() -> None:
    """They do so on every router, and on one that starts later; those that are renewed stay."""
    world = World(LEASING)
    first, second, _ = world.replicas
    first.sync.book("lost", booking(1)._replace(forecast=LEASE))
    second.sync.book("long", booking(2)._replace(forecast=LEASE))
    second.sync.book("reported", booking(3))
    world.settle()
    world.replicas[0] = world.new_replica()  # it has another id now, and renews nothing of its former one
    for n_halves in range(7):
        running = (1, 2, 3) if n_halves < 2 else (2, 3)
        assert now_same(world) == {rank_of(worker_id): (16, 1, 1) for worker_id in running}
        world.pass_time(HALF_MS - QUIET_MS)
        second.sync.renew("long", None)
        second.sync.renew("reported", None)
    world.settle()
    assert sum(b"add" in each.key for each in world.log.written) == 3 + 7
    for request_id in ("long", "reported"):
        second.sync.report_phase(request_id, BookingPhase.FREE)
    assert now_same(world) == {}


def test_a_lease_is_renewed_without_prefill_tokens_once_these_were_computed() -> None:
    """The record of the prefill may be deleted before the booking ends, as with reports of output."""
    world = World(LEASING)
    first, second, _ = world.replicas
    first.sync.book("r", booking(1)._replace(forecast=LEASE))
    first.sync.report_phase("r", BookingPhase.PREFILL)
    world.settle()
    falls = [replica.falls for replica in world.replicas]
    second.sync.renew("r", None)  # a retry of the request came to another picker
    world.settle()
    for records in world.log.partitions:
        records[:] = [each for each in records if b"prefill" not in each.key]
    late = world.new_replica()
    read_all(late)
    assert [replica.loads for replica in (*world.replicas, late)] == [{rank_of(1): (0, 1, 1)}] * 4
    assert [replica.falls for replica in world.replicas] == falls


def test_leases_are_renewed_while_kafka_is_away() -> None:
    """Also of a booking that the log does not have yet. Other routers read it when Kafka is back."""
    world = World(LEASING)
    first, second, _ = world.replicas
    first.sync.book("before", booking(1)._replace(forecast=LEASE))
    world.settle()
    world.log.away = True
    first.sync.book("since", booking(2)._replace(forecast=LEASE))
    for _ in range(3):
        first.sync.poll()
        world.pass_time(HALF_MS)
        first.sync.renew("before", None)
        first.sync.renew("since", None)
    running = {rank_of(1): (16, 1, 1), rank_of(2): (16, 1, 1)}
    assert first.loads == running and second.loads == {}
    assert now_same(world) == running


def test_a_lease_gives_way_to_a_forecast() -> None:
    """The request goes on unseen: the booking then counts as prefilled, and as over, without its router."""
    world = World(LEASING)
    first = world.replicas[0]
    first.sync.book("r", booking(1)._replace(forecast=LEASE))
    world.settle()
    first.sync.renew("r", None, Forecast(40_000, 2_000, 5_000))
    assert world.same() == {rank_of(1): (16, 1, 1)}
    first.sync.renew("r", None)  # it has no lease any more
    world.pass_time(2_000)
    assert now_same(world) == {rank_of(1): (0, 1, 1)}
    world.pass_time(2_000)
    assert now_same(world) == {}


def times_of(replica: Replica) -> list[list[int]]:
    with replica.sync.locked() as active:
        return [row[:4] for row in active.times.table.tolist()]


def recent_of(replica: Replica) -> dict[int, int]:
    """The tokens that each worker was given to compute lately."""
    with replica.sync.locked() as active:
        ranks = {number: rank_of(number) for number in (1, 2, 3)}
        return dict(zip(ranks, active.times.table[RECENT_TOKENS].take(active.rows_of(ranks.values())), strict=True))


def test_a_router_that_starts_knows_what_the_log_has_of_what_ranks_computed_lately() -> None:
    """It agrees with the others, whose bookings have ended; what was deleted from the log counts as not computed."""
    world = World()
    for number, tokens in enumerate((400, 100, 50)):
        router = world.replicas[number].sync
        router.book(f"r{number}", booking(number + 1, prefill=tokens))
        router.report_phase(f"r{number}", BookingPhase.PREFILL)
        world.settle()
        router.report_phase(f"r{number}", BookingPhase.FREE)
        world.settle()
        world.pass_time(1_000)
    late = Replica(world.log, world.clock)
    read_all(late)
    assert [recent_of(replica) for replica in (*world.replicas, late)] == [{1: 400, 2: 100, 3: 50}] * 4
    for records in world.log.partitions:
        records[:] = [each for each in records if b"r0" not in each.key]
    later = Replica(world.log, world.clock)
    read_all(later)
    assert recent_of(later) == {1: 0, 2: 100, 3: 50}


def test_generated_tokens_told_too_soon_wait_for_their_booking() -> None:
    """Early reports are buffered, the greatest number applies, and a booking that has already ended does not grow."""
    world = World()
    first, second, _ = world.replicas
    for tokens in (33, 20):
        assert second.sync.report_output("r", tokens) is False
    assert second.sync.report_phase("r", BookingPhase.PREFILL) is False
    assert second.sync.report_output("s", 16) is False
    first.sync.book("r", booking(1))
    first.sync.book("s", booking(2))
    first.sync.poll()  # otherwise the booking would end before it is sent
    first.sync.report_phase("s", BookingPhase.FREE)
    assert world.same() == {rank_of(1): (0, 1 + 3, 1)}
    assert second.sync.unknown_calls == 0
    assert second.sync.report_output("t", 1) is False
    world.pass_time(BUFFERED_CALL_TTL_MS)
    second.sync.poll()
    assert second.sync.unknown_calls == 1


@pytest.mark.parametrize("request_id", ["r", "request-1"])
@pytest.mark.parametrize("is_late", [False, True])
def test_of_an_id_used_again_at_a_router_that_has_heard_of_nothing_a_free_ends_what_was_booked_before_it(
    request_id: str, *, is_late: bool
) -> None:
    """In the log, the two cases look the same: both bookings, and a free of the first one. The clocks tell them apart.

    A router that was asked for both bookings and the free would do the same.
    """
    world = World()
    first, second, third = world.replicas
    first.sync.book(request_id, booking(1))
    first.sync.poll()
    read_all(third)
    if not is_late:
        third.sync.report_phase(request_id, BookingPhase.FREE)
        world.pass_time(1)
    second.sync.book(request_id, booking(2))
    second.sync.poll()
    if is_late:
        third.sync.report_phase(request_id, BookingPhase.FREE)
    assert world.same() == ({} if is_late else {rank_of(2): (16, 1, 1)})


def test_while_kafka_is_away_bookings_go_on_and_are_not_in_sync() -> None:
    """Bookings continue while Kafka is away, and are published when it is back, except those that ended meanwhile."""
    world = World()
    first, second, _ = world.replicas
    first.sync.book("before", booking(1))
    world.settle()
    assert first.sync.in_sync
    world.log.away = True
    n_in_log = len(world.log.written)
    first.sync.book("during", booking(2))
    first.sync.report_phase("before", BookingPhase.FREE)
    assert first.loads == {rank_of(2): (16, 1, 1)}
    world.pass_time(KNOBS.stale_after_ms)
    assert first.sync.in_sync
    world.pass_time(1)
    assert not first.sync.in_sync
    assert second.sync.in_sync  # everything that it published is acknowledged
    world.pass_time(QUIET_MS)
    second.sync.poll()  # a tick, since it has bookings there
    world.pass_time(KNOBS.stale_after_ms + 1)
    assert not second.sync.in_sync
    assert len(world.log.written) == n_in_log
    assert world.same() == {rank_of(2): (16, 1, 1)}
    assert first.sync.in_sync and second.sync.in_sync


def test_bookings_that_end_before_they_are_sent_take_no_more_memory_than_other_ended_ones() -> None:
    """They leave no record, are known to have ended until their TTL by the router's own clock, and cause no ticks."""
    world = World()
    first = world.replicas[0]
    for number in range(100):
        first.sync.book(f"short-{number}", booking(1))
        first.sync.report_phase(f"short-{number}", BookingPhase.FREE)
    with first.sync.locked() as active:
        assert active.n_bytes == 100 * ENDED_BOOKING_BYTES
    world.settle()
    assert first.sync.report_phase("short-0", BookingPhase.FREE)  # it is not buffered as that of an unknown booking
    world.pass_time(TTL_MS - 1)
    world.settle()
    assert len(first) == 100
    world.pass_time(1)
    world.settle()
    assert len(first) == 0
    assert world.log.written == []


def test_a_router_without_bookings_finds_out_that_kafka_is_away() -> None:
    """A router without bookings writes ticks while `in_sync` is read, and none otherwise."""
    world = World()
    first, second, _ = world.replicas

    def pass_time(ms: int) -> bool:
        """Return whether the first router is in sync after some time in which it was asked often, the second never."""
        asked = [first.sync.in_sync]
        for _ in range(ms // 100):
            world.pass_time(100)
            for replica in (first, second):
                replica.sync.poll()
                for partition in range(TOPIC.partitions):
                    replica.fold(partition)
            asked.append(first.sync.in_sync)
        return asked[-1]

    assert pass_time(5 * QUIET_MS)
    assert 4 <= len(world.log.written) <= 5
    world.log.away = True
    n_written = len(world.log.written)
    assert pass_time(QUIET_MS)
    assert not pass_time(KNOBS.stale_after_ms + QUIET_MS)
    assert second.sync.in_sync  # `in_sync` was never read, so that it wrote no tick
    world.settle()
    assert first.sync.in_sync
    for _ in range(5):
        world.pass_time(QUIET_MS)
        world.settle()
    assert (
        len(world.log.written) - n_written <= 3
    )  # the waiting tick, and one of each router whose `in_sync` was read at the end


def test_the_queue_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full outbox drops the oldest record and counts it; its router is out of sync while that booking is active.

    The limits are three records in flight and four that wait. A booking that begins and ends meanwhile takes no space.
    """
    monkeypatch.setattr(outbox_module, "IN_FLIGHT_RECORDS_MAX", 3)
    monkeypatch.setattr(outbox_module, "WAITING_RECORDS_MAX", 4)
    world = World()
    first, second, _ = world.replicas
    world.log.away = True
    for number in range(10):
        first.sync.book(f"short-{number}", booking(99))
        first.sync.poll()
        if number >= 3:  # earlier ones are in flight, and their free is a record of its own
            first.sync.report_phase(f"short-{number}", BookingPhase.FREE)
        first.sync.book(str(number), booking(number))
        first.sync.poll()
    assert first.sync.unacknowledged == 3 + 4
    assert first.sync.unpublished > 0
    world.settle()
    dropped = {rank for rank in first.loads if rank not in second.loads}
    assert dropped and rank_of(9) not in dropped
    assert {rank: second.loads[rank] for rank in second.loads} == world.log.loads()
    world.pass_time(KNOBS.stale_after_ms + 1)
    assert not first.sync.in_sync
    for number in range(10):
        first.sync.report_phase(str(number), BookingPhase.FREE)
        first.sync.report_phase(f"short-{number}", BookingPhase.FREE)
        first.sync.poll()
    world.same()
    assert first.sync.in_sync


def test_the_queue_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outbox has room for fewer records if they are long."""
    monkeypatch.setattr(outbox_module, "IN_FLIGHT_RECORDS_MAX", 0)
    monkeypatch.setattr(outbox_module, "WAITING_BYTES_MAX", 30_000)
    world = World()
    for number in range(5):
        world.replicas[0].sync.book(str(number), booking(number, list(range(1, 1001))))
    assert (world.replicas[0].sync.unacknowledged, world.replicas[0].sync.unpublished) == (3, 2)


def test_a_newer_word_replaces_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer record replaces a waiting one of its key, and a failed one is not sent after it."""
    monkeypatch.setattr(outbox_module, "IN_FLIGHT_RECORDS_MAX", 1)
    world = World()
    world.log.away = True
    first = world.replicas[0]
    for prefill in (64, 48, 32):  # the first of them is in flight
        first.sync.book("r", booking(1, prefill=prefill))
        first.sync.poll()
    assert first.sync.unacknowledged == 2
    first.client.failing = KafkaError(KafkaError._MSG_TIMED_OUT)
    first.client.poll(0)
    assert first.sync.unacknowledged == 1
    first.client.failing = None
    assert world.same() == {rank_of(1): (32, 1, 1)}
    assert sum(record.value is not None for record in world.log.written) == 1


def test_a_word_that_timed_out_is_not_sent_behind_a_newer_one() -> None:
    """If two records of one key were in flight and only the older failed, it is not sent again."""
    world = World()
    world.log.away = True
    first = world.replicas[0]
    for prefill in (64, 32):
        first.sync.book("r", booking(1, prefill=prefill))
        first.sync.poll()
    assert first.sync.unacknowledged == 2
    first.client.time_out(1)
    assert first.sync.unacknowledged == 1
    assert world.same() == {rank_of(1): (32, 1, 1)}


def test_a_booking_that_is_partly_in_flight_is_freed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A booking whose first record may have reached Kafka gets its free published."""
    monkeypatch.setattr(outbox_module, "IN_FLIGHT_RECORDS_MAX", 1)
    world = World()
    world.log.away = True
    first = world.replicas[0]
    for prefill in (64, 32):
        first.sync.book("r", booking(1, prefill=prefill))
        first.sync.poll()
    first.sync.report_phase("r", BookingPhase.FREE)
    assert world.same() == {}


def test_a_record_that_timed_out_is_sent_again() -> None:
    """A record that the client gave up after minutes is sent again."""
    world = World()
    world.log.away = True
    first = world.replicas[0]
    first.sync.book("r", booking(1))
    first.sync.poll()
    first.client.failing = KafkaError(KafkaError._MSG_TIMED_OUT)
    first.client.poll(0)
    first.client.failing = None
    assert (first.sync.unacknowledged, first.sync.unpublished) == (1, 0)
    assert world.same() == {rank_of(1): (16, 1, 1)}


@pytest.mark.parametrize("when", ["at once", "by the broker"])
def test_a_record_that_no_topic_takes_is_counted_and_not_tried_again(when: str) -> None:
    """A record that can never be written is counted, and its router is out of sync while the booking is active."""
    world = World()
    first = world.replicas[0]
    too_large = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    if when == "at once":
        first.client.refusing = too_large
    else:
        first.client.failing = too_large
    first.sync.book("r", booking(1))
    first.sync.poll()
    first.client.refusing = first.client.failing = None
    assert (first.sync.unacknowledged, first.sync.unpublished) == (0, 1)
    world.settle()
    assert first.loads == {rank_of(1): (16, 1, 1)}
    world.pass_time(KNOBS.stale_after_ms + 1)
    assert not first.sync.in_sync
    world.pass_time(TTL_MS)
    world.settle()
    assert (first.loads, first.sync.in_sync) == ({}, True)


def test_an_add_and_its_free_cancel_out_before_they_are_sent() -> None:
    """A booking that ends before its record was sent leaves none, and one that was sent leaves an add and a free."""
    world = World()
    first = world.replicas[0]
    for request_id in ("short", "long"):
        first.sync.book(request_id, booking(1))
        if request_id == "long":
            first.sync.poll()
        first.sync.report_phase(request_id, BookingPhase.PREFILL)
        first.sync.report_phase(request_id, BookingPhase.FREE)
    first.sync.poll()
    assert [decode_load(record.value)[:2] for record in world.log.written] == [
        (BookingId("long", first.sync.router_id, 2), phase) for phase in BookingPhase
    ]
    assert world.same() == {}


def test_own_records_are_not_decoded_when_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router recognises its own records by their bytes, and decodes what other routers write about its bookings."""
    world = World()
    first, second, _ = world.replicas
    decoded: list[bytes] = []

    def noted(raw: bytes) -> Any:
        decoded.append(raw)
        return decode_load(raw)

    fold = first.fold

    def folded(*given: Any) -> int:
        with monkeypatch.context() as patched:  # the other routers decode as well
            patched.setattr(loads_sync_module, "decode_load", noted)
            return fold(*given)

    monkeypatch.setattr(first, "fold", folded)
    for request_id in ("r", "s"):
        first.sync.book(request_id, booking(1))
        first.sync.poll()
        first.sync.report_output(request_id, 17)  # a second record of the same key, while the first is on its way
    first.sync.report_phase("s", BookingPhase.FREE)
    assert world.same() == {rank_of(1): (16, 3, 1)}
    second.sync.report_phase("r", BookingPhase.FREE)
    world.settle()
    adds = [record.value or b"" for record in world.log.written if record.key.endswith(b"add")]
    others = [record.value or b"" for record in world.log.written if record.key.endswith(b"free")][-1:]
    superseded = {load_key(decode_load(value)[0], BookingPhase.ADD): value for value in reversed(adds)}
    assert len(adds) == 4
    assert sorted(decoded) == sorted([*superseded.values(), *others])
    assert world.same() == {}


def test_a_full_client_is_asked_again() -> None:
    """Records that the client's full queue refuses wait in the outbox."""
    world = World()
    first = world.replicas[0]
    first.client.refusing = BufferError()
    for number in range(3):
        first.sync.book(str(number), booking(number))
        first.sync.poll()
    assert (first.sync.unacknowledged, len(world.log.written)) == (3, 0)
    first.client.refusing = None
    assert world.same() == {rank_of(number): (16, 1, 1) for number in range(3)}


def test_bookings_end_by_the_logs_clock() -> None:
    """Bookings expire by the log's time and not by a router's clock, also at a router that starts late."""
    world = World()
    first = world.replicas[0]
    first.sync.book("r", booking(1))
    world.settle()
    world.clock[0] += 100 * TTL_MS  # this machine was suspended; the log's time did not advance
    assert first.loads == {rank_of(1): (16, 1, 1)}
    world.log.now_ms += TTL_MS - 1
    world.settle()  # its tick advances the log's time
    assert first.loads == {rank_of(1): (16, 1, 1)}
    world.log.now_ms += 1
    world.clock[0] += QUIET_MS
    world.settle()
    for replica in (*world.replicas, late := Replica(world.log, world.clock)):
        if replica is late:
            read_all(late)
        assert len(replica) == 0


def test_ticks_end_with_the_bookings() -> None:
    """No ticks are written to a scope without bookings."""
    world = World()
    world.replicas[0].sync.book("r", booking(1))
    for _ in range(30):
        world.pass_time(QUIET_MS)
        world.settle()
    n_written = len(world.log.written)
    assert 8 <= n_written <= 1 + 3 * (TTL_MS // QUIET_MS + 1)
    for _ in range(30):
        world.pass_time(QUIET_MS)
        world.settle()
    assert len(world.log.written) == n_written
    world.log.compact()
    assert sum(map(len, world.log.partitions)) <= 3  # the add, and a tick


def test_without_replica_sync_nothing_is_said_and_bookings_end_by_our_clock() -> None:
    """Without router_replica_sync nothing is published, and bookings expire by the router's own clock."""
    log, clock = Log(), [0]
    alone = Replica(log, clock, Settings(partitions=2, booking_ttl_s=TTL_MS / 1000, router_replica_sync=False))
    alone.sync.book("r", booking(1))
    alone.sync.book("s", booking(1))
    alone.sync.report_phase("s", BookingPhase.FREE)
    clock[0] += TTL_MS - 1
    alone.sync.poll()
    assert alone.loads == {rank_of(1): (16, 1, 1)}
    assert alone.sync.in_sync
    clock[0] += 1
    alone.sync.poll()
    assert (len(alone), log.written) == (0, [])
    alone.sync.book("r", booking(1))
    for _ in range(20):
        alone.sync.report_output("r", 1)
        clock[0] += TTL_MS // 4
        alone.sync.poll()
        assert alone.loads == {rank_of(1): (16, 2, 1)}


@dataclass(frozen=True)
class Read:
    """A record as Kafka's client returns it."""

    of: Record

    def key(self) -> bytes:
        return self.of.key

    def value(self) -> bytes | None:
        return self.of.value

    def timestamp(self) -> tuple[int, int]:
        return 2, self.of.timestamp_ms

    def partition(self) -> int:
        return self.of.partition


def folded_parts(world: World, monkeypatch: pytest.MonkeyPatch, *more: Record) -> tuple[list[int], list[int]]:
    """Let the first router fold the log, and a few records more after its third one.

    Returns how many were folded under each lock, and the positions of bad records.
    """
    sync = world.replicas[0].sync
    records = [record for partition in world.log.partitions for record in partition]
    records[3:3] = more
    sizes: list[int] = []
    fold_all = sync._fold_all

    def noting(records: Any, **kwargs: Any) -> list[tuple[int, BadRecord]]:
        sizes.append(len(records))
        return fold_all(records, **kwargs)

    monkeypatch.setattr(sync, "_fold_all", noting)
    messages: list[Any] = [Read(record) for record in records]
    return sizes, [number for number, _ in sync.fold_messages(messages, True)]


def test_records_are_folded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests get their turn in between. Bad records are found by place."""
    monkeypatch.setattr(loads_sync_module, "_FOLDED_TOGETHER_MAX", 2)
    world = World()
    first, second, _ = world.replicas
    for number in range(5):
        second.sync.book(f"request-{number}", booking(1))
    second.sync.poll()
    bad = Record(TOPIC.name, 0, 0, 0, b"k", b"\x00")
    assert folded_parts(world, monkeypatch, bad) == ([2, 2, 2], [3])
    assert first.loads == {rank_of(1): (80, 1, 5)}


def test_long_records_are_folded_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of long prompts would hold up requests for milliseconds."""
    monkeypatch.setattr(loads_sync_module, "_FOLDED_TOGETHER_BYTES", 1000)
    world = World()
    first, second, _ = world.replicas
    for number in range(6):
        second.sync.book(f"request-{number}", booking(1, list(range(70))))
    second.sync.poll()
    assert folded_parts(world, monkeypatch) == ([2, 2, 2], [])
    assert first.loads == {rank_of(1): (96, 70, 6)}


def test_records_are_read_more_often_while_requests_wait_and_for_some_time_after() -> None:
    """A queue that is empty for a moment does not change the interval."""
    clock = [0]
    sync = LoadsSync(KNOBS, TOPIC, Client(Log()), lambda: clock[0])  # type: ignore[arg-type]
    assert sync.read_interval_s() == READ_INTERVAL_S
    end_listening = sync.listen(lambda: None)
    assert sync.read_interval_s() == READ_INTERVAL_WHILE_WAITED_FOR_S < READ_INTERVAL_S
    clock[0] = 1_000_000
    end_listening()
    clock[0] += loads_sync_module._WAITED_FOR_MS - 1
    assert sync.read_interval_s() == READ_INTERVAL_WHILE_WAITED_FOR_S
    clock[0] += 1
    assert sync.read_interval_s() == READ_INTERVAL_S


def test_a_real_client_writes_all_records_of_a_request_to_its_partition() -> None:
    """The client ignores the partitions of single messages in a batch, so that it gets a batch for each partition."""
    knobs = Settings(kafka=f"127.0.0.1:{free_port()}", partitions=4)  # the client's own stand-in has 4 by default
    client = producer(knobs, **{"test.mock.num.brokers": 1, "allow.auto.create.topics": True, "log_level": 0})
    sync = LoadsSync(knobs, topics(knobs).router_loads, client, lambda: 0)
    written: dict[str, list[int]] = {}
    deliver = sync._own.outbox._on_delivery

    def noting(error: KafkaError | None, message: Any) -> None:
        assert error is None
        written.setdefault(decode_load(message.value())[0].request_id, []).append(message.partition())
        deliver(error, message)

    sync._own.outbox._on_delivery = noting  # type: ignore[method-assign]
    for number in range(20):
        sync.book(str(number), booking(1))
    sync.poll()
    for number in range(20):
        sync.report_phase(str(number), BookingPhase.FREE)
    sync.flush(PATIENCE_S)
    assert sync.unacknowledged == 0
    assert written == {str(number): [request_partition(str(number), 4)] * 2 for number in range(20)}


@contextmanager
def nobody(**limits: int) -> Iterator[LoadsSync]:
    """Loads whose real client finds no broker."""
    knobs = Settings(kafka=f"127.0.0.1:{free_port()}", partitions=2)
    clock = [0]
    client = producer(knobs, **{"message.timeout.ms": 200, "log_level": 0, **limits})
    yield LoadsSync(knobs, TOPIC, client, lambda: clock[0])
    client.purge()


def test_a_real_client_that_gives_up_gives_the_record_back() -> None:
    """A record that the real client gives up is tried again and not lost."""
    with nobody() as sync:
        sync.book("r", booking(1))
        tries = 0

        def tried() -> bool:
            nonlocal tries
            before = len(sync._own.outbox._in_flight)
            sync._kafka.poll(0.05)
            tries += len(sync._own.outbox._in_flight) < before
            sync.poll()
            return tries >= 2

        wait_for(tried, PATIENCE_S, "the client to give up twice")
        assert (sync.unacknowledged, sync.unpublished) == (1, 0)


def test_a_real_client_whose_queue_is_full_gets_the_rest_later() -> None:
    """Records for which the real client has no room wait, in order; one that is too large is dropped and counted."""
    with nobody(**{"queue.buffering.max.messages": 2, "message.max.bytes": 2000, "message.timeout.ms": 60_000}) as sync:
        sync.book("large", booking(9, list(range(1000))))
        for number in range(4):
            sync.book(str(number), booking(number))
        sync.poll()
        assert (sync.unacknowledged, sync.unpublished, len(sync._own.outbox._in_flight)) == (4, 1, 2)
        waiting = sync._own.outbox._waiting.values()
        assert [key.split(b"\x1f")[0] for queue in waiting for key in queue] == [b"2", b"3"]


def test_an_assumed_end_reaches_all_routers_as_one() -> None:
    """The booking ends everywhere, no policy learns from it, and another router's booking of the id stays."""
    world = World()
    first, second, third = world.replicas
    first.sync.book("r", booking(1))
    world.settle()
    with third.sync.locked() as loads:
        loads.observations = deque()
    second.sync.end_unreported("r")
    world.settle()
    assert live(first, "r") and live(third, "r")
    first.sync.end_unreported("r")
    world.settle()
    assert not live(first, "r") and not live(second, "r") and not live(third, "r")
    with third.sync.locked() as loads:
        assert not loads.observations
    assert world.same() == {}

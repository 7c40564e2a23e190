"""The feed of a group of processes on a real Kafka: the parent's thread, and processes that follow it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streams.codec import load_key
from streams.core.hashing import pack_hashes
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.errors import KvStreamsError
from streams.kafka import delete_topics, describe_topics, ensure_topics, missing_topics, producer
from streams.load_records import encoded_load
from streams.local.ports import free_port, free_ports_in_a_row
from streams.local.processes import Child, Children
from streams.local.stack import READY_TIMEOUT_S, Stack, is_ready, wait_workers
from streams.router_api.booking_ring import Frame, RingReader, RingRecord, RingWriter
from streams.router_api.group_feed import GroupFeed, group_feed
from streams.router_api.group_reader import LOST_AFTER_S
from streams.router_api.router import Router
from streams.settings import Settings, as_environ
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.api import PATIENCE_S, Api, metrics, rank_of

TOKENS = list(range(64))
WORKERS = (1, 2)


def later(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, PATIENCE_S, what)


# -- the parent's thread -----------------------------------------------------------------------------------------------


class Written:
    """A feed of a scope, and what a reader found in its ring."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topic = topics(settings).router_loads
        self.feed = GroupFeed(settings, RingWriter(settings.partitions))
        self.ring = RingReader(self.feed.fd)
        self.records: list[RingRecord] = []
        self._producer = producer(settings)

    def produce(self, partition: int, *values: bytes | None) -> None:
        for value in values:
            self._producer.produce(self.topic.name, key=b"k", value=value, partition=partition)
        assert self._producer.flush(PATIENCE_S) == 0

    def read(self) -> list[tuple[int, int, bytes | None]]:
        while (payload := self.ring.read()) is not None:
            self.records += Frame(payload).records()
        return [(each.partition, each.offset, each.value) for each in self.records]

    def is_covered(self) -> bool:
        return -1 not in self.ring.covered_from()


@pytest.fixture
def written(scope: Settings) -> Iterator[Written]:
    made = Written(scope)
    try:
        yield made
    finally:
        made.feed.stop()
        assert made.ring.closed


def test_the_parent_passes_on_exactly_what_follows_the_offsets_that_it_names(written: Written) -> None:
    """Each partition is covered from its end, and every record from there on is passed on once, in order."""
    ensure_topics(written.settings, topics(written.settings).all())
    written.produce(0, b"old", b"old")
    written.feed.start()
    later(written.is_covered, "the parent to cover all partitions")
    assert written.ring.covered_from() == [2, 0, 0, 0]
    written.produce(0, b"a", None, b"b")
    written.produce(2, *(b"%d" % number for number in range(3000)))
    expected = [(0, 2, b"a"), (0, 3, None), (0, 4, b"b")]
    later(lambda: len(written.read()) == 3003, "all records")
    assert [each for each in written.read() if not each[0]] == expected
    assert [each[1:] for each in written.read() if each[0] == 2] == [(n, b"%d" % n) for n in range(3000)]
    assert written.ring.read_to() == [5, 0, 3000, 0]
    assert all(abs(each.append_ms - time.time() * 1000) < 60_000 for each in written.records)


def test_the_heart_of_the_parent_beats_while_there_is_no_kafka_or_no_topic(scope: Settings) -> None:
    """A parent that cannot read covers nothing, so that no process follows it, and does not look dead."""
    for settings in (scope, replace(scope, kafka=f"127.0.0.1:{free_port()}")):
        made = Written(settings)
        made.feed.start()
        beats = []
        until_s = time.monotonic() + 2.5
        while time.monotonic() < until_s:
            beats.append(time.monotonic_ns() - made.ring.heartbeat_ns)
            time.sleep(0.01)
        made.feed.stop()
        assert max(beats) < LOST_AFTER_S * 1e9
        assert not made.is_covered()
        assert made.ring.closed


def test_a_topic_that_is_recreated_begins_a_new_epoch(written: Written) -> None:
    """Readers see that all must be read again, and then get what the new topic has."""
    spec = topics(written.settings).router_loads
    ensure_topics(written.settings, topics(written.settings).all())
    written.produce(1, b"a", b"b", b"c")
    written.feed.start()
    later(written.is_covered, "the parent to cover all partitions")
    written.produce(1, b"d")
    later(lambda: len(written.read()) == 1, "a record")
    delete_topics(written.settings, [spec])
    later(lambda: spec.name in _missing(written.settings), "the topic to be gone")
    ensure_topics(written.settings, [spec])
    written.produce(1, b"e")
    later(lambda: written.ring.epoch == 1 and written.is_covered(), "a new epoch")
    assert written.ring.covered_from()[1] <= 1
    (state,) = describe_topics(written.settings, [spec]).values()
    assert state is not None
    assert written.ring.is_of(state.topic_id)
    written.produce(1, b"f")
    later(lambda: (1, 1, b"f") in written.read(), "a record of the new topic")


def _missing(settings: Settings) -> list[str]:
    try:
        return missing_topics(settings, topics(settings).all())
    except KvStreamsError:  # a topic was deleted between two questions
        return []


def test_a_record_that_is_too_long_for_the_ring_closes_it(scope: Settings) -> None:
    """The processes then read Kafka themselves, which has records of any length."""
    ensure_topics(scope, topics(scope).all())
    made = Written(scope)
    made.feed = GroupFeed(scope, RingWriter(scope.partitions, 4096))
    made.ring = RingReader(made.feed.fd)
    made.feed.start()
    later(made.is_covered, "the parent to cover all partitions")
    made.produce(0, b"v" * 900)
    later(lambda: len(made.read()) == 1, "a record that fits")
    made.produce(0, b"v" * 1024)
    later(lambda: made.ring.closed, "the ring to be closed")
    made.feed.stop()


def test_a_group_that_shares_no_bookings_has_no_feed(scope: Settings) -> None:
    """Without router_replica_sync there is nothing to read."""
    assert group_feed(replace(scope, router_replica_sync=False)) is None


# -- a router that follows it ------------------------------------------------------------------------------------------


def test_a_router_follows_its_feed_from_one_epoch_to_the_next(scope: Settings) -> None:
    """It switches while records come, has each of them, and reads all again after the topic was recreated."""
    spec = topics(scope).router_loads
    ensure_topics(scope, topics(scope).all())
    feed = GroupFeed(scope, RingWriter(scope.partitions))
    ring = RingReader(feed.fd)
    client = producer(scope)
    n_booked, over = 0, threading.Event()

    def book() -> None:
        nonlocal n_booked
        booking_id = BookingId(f"r{n_booked}", "other", n_booked)
        booking = Booking(rank_of(1), "m", 16, pack_hashes([1]), 0, 1)
        client.produce(
            spec.name,
            key=load_key(booking_id, BookingPhase.ADD),
            value=encoded_load(booking_id, BookingPhase.ADD, booking, time.time_ns() // 1_000_000),
            partition=n_booked % scope.partitions,
        )
        n_booked += 1

    def booking_on() -> None:
        while not over.is_set():
            book()
            client.poll(0)
            time.sleep(0.0005)

    for _ in range(1000):
        book()
    assert client.flush(PATIENCE_S) == 0
    router = Router(replace(scope, router_min_initial_workers=0), ring)

    def n_known() -> int:
        with router.loads.locked() as loads:
            loads.check()
            return len(loads)

    going_on = threading.Thread(target=booking_on)
    feed.start()
    going_on.start()
    router.start()
    try:
        later(lambda: router.loads.follows_group, "the router to follow the group")
        assert not router.feeds.pending()
        time.sleep(0.5)
        over.set()
        going_on.join()
        assert client.flush(PATIENCE_S) == 0
        later(lambda: n_known() == n_booked, f"all {n_booked} bookings")
        assert router.loads.follows_group
        assert sum(router.feeds.read_to(spec.name, partition) for partition in range(scope.partitions)) >= n_booked

        delete_topics(scope, [spec])
        later(lambda: spec.name in _missing(scope), "the topic to be gone")
        ensure_topics(scope, [spec])
        n_before = n_booked
        book()
        assert client.flush(PATIENCE_S) == 0
        later(lambda: n_known() == n_booked - n_before, "the router to have only the bookings of the new topic")
        later(lambda: router.loads.follows_group, "the router to follow the group again")
        book()
        assert client.flush(PATIENCE_S) == 0
        later(lambda: n_known() == n_booked - n_before, "a booking that the group passes on")
        assert router.feeds.bad_records == 0
    finally:
        over.set()
        going_on.join()
        router.stop()
        feed.stop()


# -- a group as processes ----------------------------------------------------------------------------------------------


class GroupOfTwo:
    """The parent, both processes' own ports, and a router alone on the same topics."""

    def __init__(self, settings: Settings, child: Child, alone: Api) -> None:
        self.child = child
        self.own = [Api(f"http://{settings.host}:{settings.process_port + n}") for n in range(2)]
        self.apis = [*self.own, alone]

    def pids(self) -> list[int]:
        """The last process id of each process, from the log."""
        found = re.findall(r"process (\d) has pid (\d+)", self.child.log_path.read_text())
        return [pid for _, pid in sorted({number: int(pid) for number, pid in found}.items())]

    def follows(self, n: int) -> bool:
        try:
            return metrics(self.own[n])[f"kvstreams_bookings_from_group/{n + 1}"] == 1
        except OSError:
            return False

    def same(self, n_requests: int) -> bool:
        loads = [api.loads(WORKERS) for api in self.apis]
        return loads[0] == loads[1] == loads[2] and sum(each[2] for each in loads[0].values()) == n_requests


@pytest.fixture
def group(scope: Settings, tmp_path: Path) -> Iterator[GroupOfTwo]:
    with Children() as children:
        settings = replace(
            scope, port=free_port(), processes=2, process_port=free_ports_in_a_row(2), drain_timeout_s=1.0
        )
        alone = Api(Stack(scope, tmp_path, children).router("alone").url)
        arguments = ["-m", "streams.cli", "router"]
        child = children.add(Child("routers", arguments, tmp_path / "routers.log", as_environ(settings))).start()
        made = GroupOfTwo(settings, child, alone)
        for api in made.own:
            child.wait_ready(lambda api=api: is_ready(api.url), READY_TIMEOUT_S)  # type: ignore[misc]
        for worker_id in WORKERS:
            body = {"url": f"http://engine-{worker_id}:8000", "model": "m", "block_size": 16}
            alone.call("PUT", f"/workers/{worker_id}", body).given()
        for api in made.own:
            wait_workers(api.url, len(WORKERS))
        yield made
        assert "Traceback" not in child.log_path.read_text()


def test_bookings_made_at_any_router_are_the_same_at_all(group: GroupOfTwo) -> None:
    """Also while a process is killed and started again, and after bookings were freed at another router."""
    later(lambda: group.follows(0) and group.follows(1), "both processes to follow the group")
    ids = iter(range(1_000_000))
    over = threading.Event()
    made: list[str] = []

    def book_on() -> None:  # at process 1 and at the router alone; the other process is killed meanwhile
        apis = [Api(group.apis[n].url) for n in (0, 2)]
        while not over.is_set():
            for api in apis:
                request_id = f"r{next(ids)}"
                api.route(request_id=request_id, token_ids=TOKENS)
                made.append(request_id)

    booking = threading.Thread(target=book_on)
    booking.start()
    try:
        later(lambda: len(made) > 50, "bookings")
        group.own[1].route(request_id="of-2", token_ids=TOKENS)
        made.append("of-2")
        time.sleep(0.5)  # a process that is killed takes with it what it has not sent yet
        first = group.pids()[1]
        os.kill(first, signal.SIGKILL)
        later(lambda: group.pids()[1] != first, "the process to be started again")
        later(lambda: is_ready(group.own[1].url), "the new process to be ready")
        later(lambda: group.follows(1), "the new process to follow the group, while bookings are made")
    finally:
        over.set()
        booking.join()
    later(lambda: group.same(len(made)), f"{len(made)} bookings at all routers")
    assert group.follows(0)

    # One made at a process is known at the other one, and nothing freed anywhere is left.
    for number, request_id in enumerate(made):
        assert group.apis[number % 3].call("DELETE", f"/loads/{request_id}").given()["buffered"] is False
    later(lambda: group.same(0), "all bookings to be freed at all routers")
    assert group.follows(0)
    assert group.follows(1)
    for n in range(2):
        counted = metrics(group.own[n])
        assert counted[f"kvstreams_bad_records_total/{n + 1}"] == 0
        assert counted[f"kvstreams_bookings_in_sync/{n + 1}"] == 1


def test_processes_read_kafka_themselves_while_their_parent_stands_still(group: GroupOfTwo) -> None:
    """They notice within seconds, have the bookings of others, and follow the parent again when it goes on."""
    later(lambda: group.follows(0) and group.follows(1), "both processes to follow the group")
    group.child.signal(signal.SIGSTOP)
    try:
        group.apis[2].route(request_id="meanwhile", token_ids=TOKENS)
        later(lambda: group.same(1), "the processes to know a booking that their parent has not read")
        assert not group.follows(0)
        assert not group.follows(1)
        assert group.own[0].get("/loads")["in_sync"]
    finally:
        group.child.signal(signal.SIGCONT)
    later(lambda: group.follows(0) and group.follows(1), "both processes to follow the group again")
    group.apis[2].route(request_id="afterwards", token_ids=TOKENS)
    later(lambda: group.same(2), "all bookings at all routers")
    text = group.child.log_path.read_text()
    assert text.count("bookings are read from Kafka again") == 2
    assert text.count("is read by the group's parent from now on") == 4

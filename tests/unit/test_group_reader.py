"""A process of a group that takes its bookings from the group's feed: the switch, what calls see, and the way back.

A log in memory stands in for Kafka, so that a test decides who has read how far. The same with a real Kafka and real
processes is in tests/kafka/test_group_feed.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.codec import load_key
from streams.core.hashing import pack_hashes
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.errors import BadRecord
from streams.kafka import producer
from streams.load_records import encoded_load
from streams.router_api import group_reader
from streams.router_api.booking_ring import Frame, RingReader, RingRecord, RingWriter, encode_frame
from streams.router_api.group_reader import GroupReader, Mark
from streams.router_api.loads_sync import CAUGHT_UP_BYTES, CAUGHT_UP_MAX, LOOKED_THROUGH_MAX, LoadsSync
from streams.settings import Settings
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.api import rank_of

PARTITIONS = 2
KNOBS = Settings(partitions=PARTITIONS, kafka="127.0.0.1:1")
CAPACITY = 4096
PATIENCE_S = 10.0


class Group:
    """A log, the parent that writes what it reads of it into a ring, and one process that reads the ring."""

    def __init__(self, follower: Any, capacity: int = CAPACITY) -> None:
        self.log: list[list[RingRecord]] = [[] for _ in range(PARTITIONS)]
        self.writer = RingWriter(PARTITIONS, capacity)
        self.topic_id: str | None = "topic"
        self.reader = GroupReader(RingReader(self.writer.fd), follower, lambda: self.topic_id)
        self.writer.note_topic("topic")
        self.parents = [0] * PARTITIONS
        self.framed = dict(enumerate(self.parents))
        self.bad: list[tuple[int, int]] = []
        self.beat()

    def beat(self, ago_s: float = 0.0) -> None:
        self.writer.beat(time.monotonic_ns() - int(ago_s * 1e9))

    def append(self, partition: int, key: bytes = b"", value: bytes | None = b"", skipped: int = 0) -> None:
        """skipped: offsets without records, as compaction leaves them."""
        log = self.log[partition]
        offset = (log[-1].offset + 1 if log else 0) + skipped
        log.append(RingRecord(partition, offset, 1_000_000 + offset, key, value))

    def ends(self) -> list[int]:
        return [log[-1].offset + 1 if log else 0 for log in self.log]

    def cover(self) -> None:
        self.parents = self.ends()
        self.framed = dict(enumerate(self.parents))
        for partition, offset in enumerate(self.parents):
            self.writer.cover(partition, offset)

    def pass_on(self, n: int = 1000) -> None:
        """The parent reads at most n records of each partition and writes them as one frame."""
        read = []
        for partition, log in enumerate(self.log):
            read += [record for record in log if record.offset >= self.parents[partition]][:n]
        if read:
            self.writer.write(encode_frame(read, time.monotonic_ns() // 1_000_000, self.framed))
        for record in read:
            self.framed[record.partition] = record.offset + 1
            self.parents[record.partition] = record.offset + 1
            self.writer.note_read(record.partition, record.offset + 1)

    def begin(self, mark: Mark | None = None, next_offsets: list[int] | None = None) -> bool:
        mark = self.reader.mark() if mark is None else mark
        assert mark is not None
        return self.reader.begin(mark, next_offsets or self.ends(), lambda *bad: self.bad.append(bad[:2]))


class Taking:
    """A follower that keeps what it takes."""

    def __init__(self) -> None:
        self.group: GroupReader | None = None
        self.taken: list[RingRecord] = []
        self.is_waited_for = False
        self.reads_back = True

    def follow(self, group: GroupReader, begin: Callable[[], bool]) -> bool:
        if not begin():
            return False
        self.group = group
        return True

    def unfollow(self) -> None:
        self.group = None

    def catch_up(self, records_max: int) -> bool:
        part = None if self.group is None else self.group.take(records_max)
        if part is None:
            return False
        assert len(part) <= records_max
        self.taken += part.frame.records()[part.first : part.stop]
        return True


partitions = st.integers(0, PARTITIONS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), partitions, st.integers(0, 2)),
        st.tuples(st.just("parent"), st.integers(1, 3)),
        st.tuples(st.just("parent is assigned")),
        st.tuples(st.just("child"), partitions, st.integers(1, 3)),
        st.tuples(st.just("mark")),
        st.tuples(st.just("ask for ends")),
        st.tuples(st.just("switch")),
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("leave")),
    ),
    max_size=60,
)


@settings(max_examples=500, deadline=None)
@given(steps=steps)
def test_whenever_a_process_switches_it_reads_every_record_once(steps: list[tuple[Any, ...]]) -> None:
    """Parent and process read at their own pace, before, during and after the switch to the ring and back."""
    taking = Taking()
    group = Group(taking, 1 << 20)
    own = [0] * PARTITIONS  # what the process reads next from Kafka
    seen: list[RingRecord] = []
    mark: Mark | None = None
    ends: list[int] | None = None
    covered = False
    n_switches = 0

    def child(partition: int, n: int) -> None:
        for record in [each for each in group.log[partition] if each.offset >= own[partition]][:n]:
            seen.append(record)
            own[partition] = record.offset + 1

    def leave() -> None:
        group.reader.end()
        seen.extend(taking.taken)
        taking.taken.clear()
        own[:] = group.reader.next_offsets()

    # At the end, all of it: so that every example switches if it can.
    last: list[tuple[Any, ...]] = [("mark",), ("ask for ends",), ("append", 0, 0), ("parent", 1000)]
    last += [("child", partition, 1000) for partition in range(PARTITIONS)]
    last += [("switch",), ("append", 1, 0), ("parent", 1000)]
    for action, *how in [*steps, ("parent is assigned",), *last]:
        group.beat()
        if action == "append":
            group.append(how[0], skipped=how[1])
        elif action == "parent is assigned" and not covered:
            covered = True
            group.cover()
        elif action == "parent" and covered:
            group.pass_on(how[0])
        elif action == "take":
            taking.catch_up(how[0])
        elif action == "leave" and taking.group is not None:
            leave()
            mark = ends = None
        elif taking.group is None:
            if action == "child":
                child(*how)
            elif action == "mark":
                mark, ends = group.reader.mark(), None
            elif action == "ask for ends" and mark is not None:
                ends = group.ends()
            elif (
                action == "switch" and mark is not None and ends is not None and group.reader.covers(ends, own)
            ):  # however late it is
                assert group.begin(mark, list(own))
                n_switches += 1
    assert n_switches
    if taking.group is not None:
        while taking.catch_up(3):
            pass
        leave()
    for partition, log in enumerate(group.log):
        child(partition, 1000)
        assert [record for record in seen if record.partition == partition] == log


def test_of_a_frame_only_what_kafka_did_not_give_is_read() -> None:
    """The process was ahead of the parent: one frame has what it has read already, and what comes next."""
    taking = Taking()
    group = Group(taking)
    group.cover()
    mark = group.reader.mark()
    for partition in (0, 0, 0, 1):
        group.append(partition, b"k", b"v%d" % partition)
    assert group.begin(mark, [2, 1])
    group.pass_on()
    assert taking.catch_up(10)
    assert not taking.catch_up(10)
    assert taking.taken == [group.log[0][2]]
    assert group.reader.next_offsets() == [3, 1]


def test_a_feed_that_does_not_cover_a_partition_or_does_not_run_is_not_used() -> None:
    """A switch begins only if the parent has all partitions, runs, and goes on; and ends where the parent has read."""
    group = Group(Taking())
    assert group.reader.mark() is None
    group.writer.cover(0, 0)
    assert group.reader.mark() is None
    group.cover()
    assert group.reader.mark() is not None
    group.append(1)
    assert not group.reader.covers(group.ends(), group.ends())  # the parent has not read what Kafka has
    group.pass_on()
    assert group.reader.covers(group.ends(), group.ends())
    assert not group.reader.covers(group.ends(), [0, 0])
    group.writer.cover(0, 1000)  # of a former topic, which the parent still reads
    assert not group.reader.covers(group.ends(), group.ends())
    group.cover()
    for topic_id in (None, "recreated"):
        group.topic_id = topic_id
        assert group.reader.mark() is None
    group.topic_id = "topic"
    group.beat(ago_s=5.0)
    assert group.reader.mark() is None
    group.beat()
    mark = group.reader.mark()
    group.writer.begin_epoch()
    assert not group.reader.covers(group.ends(), group.ends())
    assert not group.begin(mark)
    group.cover()
    mark = group.reader.mark()
    assert mark is not None
    group.writer.close()
    assert group.reader.mark() is None
    assert not group.begin(mark)
    assert not group.reader.reads


def test_a_mark_that_the_writer_has_overwritten_is_not_used() -> None:
    """A process that takes too long for the switch begins anew."""
    group = Group(Taking())
    group.cover()
    mark = group.reader.mark()
    for _ in range(60):
        group.append(0, b"k" * 20)
        group.pass_on()
    assert not group.begin(mark)
    assert group.begin()


def test_a_parent_that_goes_on_in_a_recreated_topic_where_it_was_before_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new topic was longer than the parent's offset before it noticed. The process reads the rest from Kafka."""
    monkeypatch.setattr(group_reader, "FOLLOW_INTERVAL_MIN_S", 60.0)  # the process must not wait for its next turn
    taking = Taking()
    group = Group(taking)
    group.cover()
    for _ in range(10):
        group.append(0)
    group.pass_on()
    group.log[0].clear()  # recreated, and read up to its end by the process
    for _ in range(6):
        group.append(0)
    mark = group.reader.mark()
    assert mark is not None
    assert group.reader.covers(group.ends(), group.ends())
    assert group.begin(mark)
    for _ in range(7):
        group.append(0)
    group.append(1)
    with following(group) as returned:
        group.pass_on()
        taking.catch_up(10)
        wait_for(lambda: len(returned) == 1, PATIENCE_S, "the process to notice")
    assert returned == [[6, 0]]
    assert not taking.taken


def test_frames_that_were_read_from_kafka_are_skipped_without_looking_at_their_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Just after a switch, a decision finds all that the parent has read since the mark."""
    taking = Taking()
    group = Group(taking)
    group.cover()
    mark = group.reader.mark()
    for _ in range(5):
        group.append(0)
        group.pass_on()
    assert group.begin(mark)
    monkeypatch.setattr(Frame, "records", None)
    assert not taking.catch_up(10)
    assert not group.reader.has_news()
    group.append(0)
    group.pass_on()
    assert group.reader.take(10) is not None


@contextmanager
def following(group: Group) -> Iterator[list[list[int] | None]]:
    """Run the thread that follows the ring; give what it returns."""
    over = threading.Event()
    returned: list[list[int] | None] = []
    thread = threading.Thread(target=lambda: returned.append(group.reader.follow(over.is_set)))
    thread.start()
    try:
        yield returned
    finally:
        over.set()
        thread.join()
        group.reader.end()


def test_a_process_returns_to_kafka_if_the_parent_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads on at the offsets that follow what it has taken, none lost and none twice, and may return later."""
    monkeypatch.setattr(group_reader, "LOST_AFTER_S", 0.3)
    taking = Taking()
    group = Group(taking)
    group.cover()
    assert group.begin()
    with following(group) as returned:
        for _ in range(10):
            group.append(0)
            group.pass_on()
            group.beat()
            time.sleep(0.05)
        assert group.reader.reads
        assert not returned
        group.append(1)  # the parent does not run any more
        wait_for(lambda: len(returned) == 1, PATIENCE_S, "the process to notice")
        assert returned == [[10, 0]]
        assert len(taking.taken) == 10
        assert not group.reader.reads
    group.beat()
    mark = group.reader.mark()
    group.pass_on()
    assert group.begin(mark, [10, 0])
    assert taking.catch_up(10)
    assert taking.taken[10:] == group.log[1]


def test_a_pause_of_the_process_itself_is_not_one_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is how often the process looked, so that one that was stopped goes on with a parent that ran."""
    group = Group(Taking())
    clock = iter([100.0, 100.05, 200.0, 300.0, 400.0])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(group.reader, "_wait", lambda _: None)
    group.cover()
    assert group.begin()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    looks = iter([False, False, False, True])
    assert group.reader.follow(lambda: next(looks)) is None
    assert group.reader.reads


@pytest.mark.parametrize("how", ["closed", "overtaken", "torn"])
def test_a_feed_that_ends_or_cannot_be_read_is_left(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets are those after what was taken."""
    monkeypatch.setattr(group_reader, "LOST_AFTER_S", 0.3)
    taking = Taking()
    group = Group(taking)
    group.cover()
    assert group.begin()
    group.append(0)
    group.pass_on()
    assert taking.catch_up(10)
    group.append(0)
    if how == "torn":
        writer, position = group.writer, group.writer.position
        group.pass_on()
        writer._map[writer._data_at + position + 20] ^= 1
    elif how == "overtaken":
        for _ in range(60):
            group.append(0, b"k" * 20)
            group.pass_on()
    else:
        group.writer.close()
    with following(group) as returned:
        for _ in range(400):
            group.beat()
            if returned:
                break
            time.sleep(0.02)
        assert returned == [[1, 0]]
    assert taking.taken == group.log[0][:1]


@pytest.mark.parametrize(
    ("taken_s", "is_hurried", "waits"),
    [
        (50.0, False, [0.25, 0.0]),  # nobody has taken records for long
        (100.15, False, [0.25, 0.2]),
        (100.15, True, [0.25]),
    ],
)
def test_the_thread_does_not_fold_soon_after_a_request_has(
    taken_s: float, is_hurried: bool, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it folds takes 0.5 ms for the wake-up, however few records have come."""
    reader = Group(Taking()).reader
    waited: list[float] = []

    def wait(timeout_s: float) -> bool:
        waited.append(timeout_s)
        return is_hurried

    monkeypatch.setattr(reader._hurry, "wait", wait)
    monkeypatch.setattr(reader, "_taken_s", taken_s)
    monkeypatch.setattr(time, "monotonic", lambda: 100.2)
    reader._wait(0.25)
    assert waited == pytest.approx(waits)


def test_taking_records_is_noted_for_the_thread() -> None:
    """A request takes them as the thread does, and asking in vain is not noted."""
    group = Group(Taking())
    group.cover()
    assert group.begin()
    before_s = time.monotonic()
    assert group.reader.take(10) is None
    assert group.reader._taken_s == 0.0
    group.append(0)
    group.pass_on()
    assert group.reader.take(10) is not None
    assert group.reader._taken_s >= before_s


def test_a_feed_that_lacks_what_this_process_wrote_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent runs, but this process's own records do not come back for long."""
    n_often = 30

    class Looked(Taking):
        looks = 0

        @property
        def reads_back(self) -> bool:
            self.looks += 1
            return self.looks < n_often and self.looks % 4 == 0

        @reads_back.setter
        def reads_back(self, value: bool) -> None:
            pass

    # A look counts for at most twice this interval, however busy the machine is: three in a row are not enough.
    monkeypatch.setattr(group_reader, "UNREAD_AFTER_S", 0.35)
    monkeypatch.setattr(group_reader, "FOLLOW_INTERVAL_MAX_S", 0.05)
    taking = Looked()
    group = Group(taking)
    group.cover()
    assert group.begin(Mark(0, 0))
    with following(group) as returned:
        until_s = time.monotonic() + PATIENCE_S
        while not returned and time.monotonic() < until_s:
            group.beat()
            time.sleep(0.02)
    assert taking.looks > n_often
    assert returned == [[0, 0]]


def test_if_the_topic_began_anew_everything_is_read_again() -> None:
    """No offset is returned, and nothing that was written after that is folded into the former loads."""
    taking = Taking()
    group = Group(taking)
    group.cover()
    assert group.begin()
    group.writer.begin_epoch()
    group.append(0)
    group.pass_on()
    with following(group) as returned:
        wait_for(lambda: len(returned) == 1, PATIENCE_S, "the process to notice")
    assert returned == [None]
    assert not taking.taken


# -- what the calls of a router see ------------------------------------------------------------------------------------


@pytest.fixture
def sync() -> LoadsSync:
    client = producer(KNOBS, log_level=0)
    return LoadsSync(KNOBS, topics(KNOBS).router_loads, client, lambda: time.monotonic_ns() // 1_000_000)


@pytest.fixture
def group(sync: LoadsSync) -> Group:
    made = Group(sync, 1 << 20)
    made.cover()
    assert made.begin()
    return made


def book(group: Group, request_id: str, worker_id: int = 1, phase: BookingPhase = BookingPhase.ADD) -> None:
    """Another router's record, which the parent has read."""
    booking_id = BookingId(request_id, "other", 1)
    booking = Booking(rank_of(worker_id), "m", 16, pack_hashes([1, 2]), 0, 2) if phase is BookingPhase.ADD else None
    group.append(0, load_key(booking_id, phase), encoded_load(booking_id, phase, booking, 1_700_000_000_000))


def n_live(sync: LoadsSync, request_id: str) -> int:
    with sync.locked() as loads:
        return len(loads.live_ids(request_id))


def test_a_decision_sees_what_the_parent_has_read(sync: LoadsSync, group: Group) -> None:
    """No thread folds here: a call that takes the loads folds what has come, and sees it."""
    book(group, "r")
    assert not n_live(sync, "r")
    group.pass_on()
    assert n_live(sync, "r") == 1
    book(group, "r", phase=BookingPhase.FREE)
    group.pass_on()
    assert n_live(sync, "r") == 0


def test_one_decision_folds_a_limited_number_of_records(sync: LoadsSync, group: Group) -> None:
    """The rest is left to the thread, or to the next decision."""
    for number in range(CAUGHT_UP_MAX + 1):
        book(group, f"r{number}")
    group.pass_on()
    with sync.locked() as loads:
        assert len(loads) == CAUGHT_UP_MAX
    with sync.locked() as loads:
        assert len(loads) == CAUGHT_UP_MAX + 1


def test_long_prompts_do_not_hold_up_a_decision(sync: LoadsSync, group: Group) -> None:
    """A decision folds a limited number of bytes, and the next one goes on there."""
    n_blocks = CAUGHT_UP_BYTES // 8 // 8
    for number in range(12):
        booking = Booking(rank_of(1), "m", 16, pack_hashes(range(1, n_blocks + 1)), 0, n_blocks)
        booking_id = BookingId(f"r{number}", "other", number)
        group.append(0, load_key(booking_id, BookingPhase.ADD), encoded_load(booking_id, BookingPhase.ADD, booking, 1))
        group.pass_on()
    with sync.locked() as loads:
        first = len(loads)
    assert 8 <= first <= 9
    with sync.locked() as loads:
        assert len(loads) == 12


@pytest.mark.parametrize("output", [False, True])
def test_a_call_finds_a_booking_that_is_far_back_in_the_ring(sync: LoadsSync, group: Group, output: bool) -> None:
    """A booking of another process that is not folded yet is no unknown id."""
    for number in range(CAUGHT_UP_MAX + 300):
        book(group, f"r{number}")
    group.pass_on()
    last = f"r{CAUGHT_UP_MAX + 299}"
    if output:
        assert sync.report_output(last, 1)
    else:
        assert sync.report_phase(last, BookingPhase.FREE)
        assert not n_live(sync, last)
    assert not sync.report_phase("unknown", BookingPhase.FREE)
    assert LOOKED_THROUGH_MAX > CAUGHT_UP_MAX + 300


def test_a_call_about_an_id_with_two_bookings_applies_to_both(sync: LoadsSync, group: Group) -> None:
    """This router knows one of them; that of the other process is in the ring, and is freed too."""
    sync.book("r", Booking(rank_of(1), "m", 16, pack_hashes([1, 2]), 0, 2))
    book(group, "r", worker_id=2)
    group.pass_on()
    assert sync.report_phase("r", BookingPhase.FREE)
    assert not n_live(sync, "r")


def test_loads_do_not_change_while_a_decision_is_made(sync: LoadsSync, group: Group) -> None:
    """What comes after the decision began is not folded by its own booking: the rank was chosen by the loads before."""
    with sync.locked() as loads:
        book(group, "r", worker_id=2)
        group.pass_on()
        sync.book("r", Booking(rank_of(1), "m", 16, pack_hashes([1, 2]), 0, 2))
        assert [loads.load(rank_of(each)).requests for each in (1, 2)] == [1, 0]
    assert n_live(sync, "r") == 2


def test_a_waiting_request_learns_of_load_that_falls_without_delay(
    sync: LoadsSync, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread wakes up as soon as somebody listens, and then often."""
    monkeypatch.setattr(group_reader, "FOLLOW_INTERVAL_MIN_S", 60.0)
    book(group, "r")
    group.pass_on()
    fell = threading.Event()
    with following(group):
        assert n_live(sync, "r") == 1
        time.sleep(0.1)  # the thread waits for 60 s now
        end = sync.listen(fell.set)
        time.sleep(0.1)
        assert not fell.is_set()
        book(group, "r", phase=BookingPhase.FREE)
        group.pass_on()
        assert fell.wait(1.0)
        group.reader.hurry()
        end()
        group.reader.hurry()


def test_the_thread_folds_what_no_request_asks_for(sync: LoadsSync, group: Group) -> None:
    """An idle process folds within the interval, in steps, and none of its records is left."""
    for number in range(1000):
        book(group, f"r{number}")
    group.pass_on()
    with following(group):
        wait_for(lambda: len(sync._loads) == 1000, PATIENCE_S, "all records to be folded")


def test_a_record_that_cannot_be_used_is_reported_with_its_place(sync: LoadsSync, group: Group) -> None:
    """Those around it are folded."""
    book(group, "r0")
    group.append(0, b"k", b"no datum")
    book(group, "r1")
    group.pass_on()
    with sync.locked() as loads:
        assert len(loads) == 2
    assert group.bad == [(0, 1)]


def test_a_fault_of_the_fold_fails_no_request_and_everything_is_read_again(
    sync: LoadsSync, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is answered from what is there; the thread then lets all topics be read again."""

    def fold(*_: Any, **__: Any) -> list[tuple[int, BadRecord]]:
        raise ZeroDivisionError

    monkeypatch.setattr(sync, "_fold_batch", fold)
    book(group, "r")
    group.pass_on()
    assert n_live(sync, "r") == 0
    with following(group) as returned:
        wait_for(lambda: len(returned) == 1, PATIENCE_S, "the thread to end")
    assert returned == [None]


def test_the_time_of_the_log_is_that_at_which_the_parent_read(sync: LoadsSync, group: Group) -> None:
    """Folding a record late does not make the log's clock late."""
    read_ms = time.monotonic_ns() // 1_000_000 - 40
    book(group, "r")
    group.writer.write(encode_frame(group.log[0], read_ms, group.framed))
    n_live(sync, "r")
    assert sync._log_clock.now_ms(read_ms) == group.log[0][0].append_ms


def test_after_the_end_nothing_is_folded_from_the_ring(sync: LoadsSync, group: Group) -> None:
    """`end` folds what was taken and not folded yet, and leaves the rest to Kafka."""
    for number in range(3):
        book(group, f"r{number}")
    group.pass_on()
    assert sync.catch_up(1)
    assert sync.follows_group
    book(group, "later")
    group.pass_on()
    group.reader.end()
    assert not sync.follows_group
    assert group.reader.next_offsets() == [3, 0]
    with sync.locked() as loads:
        assert len(loads) == 3

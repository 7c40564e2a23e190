"""A router that sends and folds records of bookings on the loop that answers requests, and what its threads do."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import pytest
from confluent_kafka import Producer

from streams.errors import BadRecord
from streams.kafka import Record
from streams.router_api import answering_loop
from streams.router_api import loads_sync as loads_sync_module
from streams.router_api import outbox as outbox_module
from streams.router_api.answering_loop import AnsweringLoop
from streams.router_api.outbox import BUSY_RECORDS_PER_S, BUSY_SEND_INTERVAL_S, SEND_INTERVAL_S, Outbox
from streams.waiting import wait_for
from tests.helpers.api import PATIENCE_S, rank_of
from tests.helpers.shared_loads import TOPIC, World, booking


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


def on_a_loop(world: World, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this on a loop that answers the requests of the first router, which has started."""
    first = world.replicas[0]

    async def run() -> None:
        first.sync.answer_on(asyncio.get_running_loop())
        await scenario()

    first.sync.start()
    try:
        asyncio.run(run())
    finally:
        first.sync.stop(PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition without holding up the loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_the_loop_that_answers_requests_sends_records_between_them(
    monkeypatch: pytest.MonkeyPatch, *, is_elsewhere: bool
) -> None:
    """All are sent on its thread, whichever thread has booked, and not within the step that has."""
    monkeypatch.setattr(outbox_module, "_SENT_BETWEEN_REQUESTS_MAX", 2)
    world = World()
    first = world.replicas[0]
    threads: set[int] = set()
    produce = first.client.produce_batch

    def noting(*args: Any, **kwargs: Any) -> int:
        threads.add(threading.get_ident())
        return produce(*args, **kwargs)

    monkeypatch.setattr(first.client, "produce_batch", noting)

    def book_all() -> None:
        for number in range(5):
            first.sync.book(f"r{number}", booking(1))

    async def scenario() -> None:
        if is_elsewhere:
            await asyncio.to_thread(book_all)
        else:
            book_all()
            time.sleep(0.2)  # the same step of the loop; the clock of the records stands still meanwhile
            assert (first.sync.unacknowledged, len(first.client._queue)) == (5, 0)
        await until(lambda: not first.sync.unacknowledged)
        assert threads == {threading.get_ident()}

    on_a_loop(world, scenario)
    assert len(world.log.written) == 5


def test_records_that_the_loop_cannot_send_are_sent_by_the_thread() -> None:
    """The loop is blocked by something else."""
    world = World()
    first = world.replicas[0]

    async def scenario() -> None:
        for request_id in ("r", "s"):
            first.sync.book(request_id, booking(1))
            world.pass_time(50)
            wait_for(lambda: not first.sync.unacknowledged, PATIENCE_S, "the record to be sent and acknowledged")

    on_a_loop(world, scenario)
    assert len(world.log.written) == 2


def test_after_the_loop_has_ended_the_thread_sends_records() -> None:
    """A router that drains has closed its server, and may still end bookings."""
    world = World()
    first = world.replicas[0]

    async def answer() -> None:
        first.sync.answer_on(asyncio.get_running_loop())

    first.sync.start()
    try:
        asyncio.run(answer())
        for number, is_elsewhere in enumerate((False, True, False)):
            if is_elsewhere:
                other = threading.Thread(target=first.sync.book, args=(f"r{number}", booking(1)))
                other.start()
                other.join()
            else:
                first.sync.book(f"r{number}", booking(1))
            wait_for(lambda: not first.sync.unacknowledged, PATIENCE_S, "the record to be sent and acknowledged")
    finally:
        first.sync.stop(PATIENCE_S)
    assert len(world.log.written) == 3


def test_records_that_the_client_does_not_take_are_offered_again() -> None:
    """Its queue is full. The thread offers them again, and the loop sends what is booked later."""
    world = World()
    first = world.replicas[0]

    async def scenario() -> None:
        first.client.refusing = BufferError()
        first.sync.book("r", booking(1))
        await asyncio.sleep(0.1)
        assert (first.sync.unacknowledged, len(world.log.written)) == (1, 0)
        first.client.refusing = None
        world.pass_time(50)
        await until(lambda: not first.sync.unacknowledged)

    on_a_loop(world, scenario)
    assert len(world.log.written) == 1


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_loop_that_answers_requests_folds_records_between_them(
    monkeypatch: pytest.MonkeyPatch, *, is_blocked: bool
) -> None:
    """Unless it is blocked: then the thread that has read them folds them. Either way, bad ones are found by place."""
    monkeypatch.setattr(loads_sync_module, "_BETWEEN_REQUESTS_MAX", 2)
    monkeypatch.setattr(loads_sync_module, "_BY_KERNELS_TOGETHER_MAX", 2)
    if not is_blocked:
        monkeypatch.setattr(answering_loop, "LATE_S", PATIENCE_S)
    world = World()
    first, second, _ = world.replicas
    for number in range(5):
        second.sync.book(f"request-{number}", booking(1))
    second.sync.poll()
    records = [record for partition in world.log.partitions for record in partition]
    records.insert(3, Record(TOPIC.name, 0, 0, 0, b"k", b"\x00"))
    messages: list[Any] = [Read(each) for each in records]
    threads: set[int] = set()
    fold_all = first.sync._fold_all

    def noting(*args: Any, **kwargs: Any) -> list[tuple[int, BadRecord]]:
        threads.add(threading.get_ident())
        return fold_all(*args, **kwargs)

    monkeypatch.setattr(first.sync, "_fold_all", noting)
    found: list[int] = []
    reading = threading.Thread(
        target=lambda: found.extend(number for number, _ in first.sync.fold_messages(messages, True))
    )

    async def scenario() -> None:
        reading.start()
        if is_blocked:
            reading.join(PATIENCE_S)
        await until(lambda: not reading.is_alive())
        assert (threading.get_ident() in threads) is not is_blocked

    on_a_loop(world, scenario)
    assert found == [3]
    assert first.loads == {rank_of(1): (80, 1, 5)}
    assert len(threads) == 1


def test_a_step_that_raises_ends_its_work_and_the_caller_raises_it() -> None:
    """The loop goes on."""
    n_steps = 0

    def step() -> bool:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 2:
            raise LookupError("the second step")
        return True

    async def scenario() -> None:
        with pytest.raises(LookupError, match="the second step"):
            await asyncio.to_thread(AnsweringLoop(asyncio.get_running_loop()).run, step)
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert n_steps == 2


def test_work_for_a_loop_that_has_ended_is_done_by_the_caller() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    left = [1, 2, 3]

    def step() -> bool:
        left.pop()
        return bool(left)

    AnsweringLoop(loop).run(step)
    assert not left


def test_requests_do_not_wait_while_the_thread_sends() -> None:
    """After an outage it may send for long. The loop tries again, and sends what is left by then."""
    world = World()
    first = world.replicas[0]

    async def scenario() -> None:
        with first.sync._outbox._pumping:  # as the thread holds it
            first.sync.book("r", booking(1))
            began_s = time.monotonic()
            await asyncio.sleep(0.1)
            assert time.monotonic() - began_s < PATIENCE_S / 2
            assert (first.sync.unacknowledged, len(first.client._queue)) == (1, 0)
        await until(lambda: not first.sync.unacknowledged)

    on_a_loop(world, scenario)
    assert len(world.log.written) == 1


def test_a_blocked_loop_keeps_nothing_of_what_the_thread_has_done() -> None:
    """The thread waits for it once only, and the loop does not come to work that is over."""

    class Work:
        def __call__(self) -> bool:
            return False

    done: list[weakref.ref[Work]] = []

    def work(answering: AnsweringLoop) -> None:
        for _ in range(3):
            step = Work()
            done.append(weakref.ref(step))
            answering.run(step)

    async def scenario() -> None:
        thread = threading.Thread(target=work, args=(AnsweringLoop(asyncio.get_running_loop()),))
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert [each() for each in done] == [None] * 3

    asyncio.run(scenario())


def test_long_records_are_folded_in_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of long prompts would hold up requests for milliseconds."""
    monkeypatch.setattr(loads_sync_module, "_BETWEEN_REQUESTS_BYTES", 1000)
    monkeypatch.setattr(answering_loop, "LATE_S", PATIENCE_S)
    world = World()
    first, second, _ = world.replicas
    for number in range(6):
        second.sync.book(f"request-{number}", booking(1, list(range(70))))
    second.sync.poll()
    messages: list[Any] = [Read(record) for partition in world.log.partitions for record in partition]
    sizes: list[int] = []
    fold_all = first.sync._fold_all

    def noting(records: Any, **kwargs: Any) -> list[tuple[int, BadRecord]]:
        sizes.append(len(records))
        return fold_all(records, **kwargs)

    monkeypatch.setattr(first.sync, "_fold_all", noting)

    async def scenario() -> None:
        await asyncio.to_thread(first.sync.fold_messages, messages, True)

    on_a_loop(world, scenario)
    assert sizes == [2, 2, 2]
    assert first.loads == {rank_of(1): (96, 70, 6)}


class Clock:
    """The time, and a loop that has nothing to do but its timers."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sent_s: list[float] = []
        self._due: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._due.append((self.now_s + delay_s, callback))

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._due and min(at_s for at_s, _ in self._due) <= until_s:
            self._due.sort(key=lambda each: each[0])
            self.now_s, callback = self._due.pop(0)
            callback()
        self.now_s = until_s

    def produce_batch(self, _topic: str, messages: list[Any], **_options: Any) -> int:
        self.sent_s.append(self.now_s)
        return len(messages)


def test_records_are_sent_less_often_while_many_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(outbox_module, "time", clock)
    outbox = Outbox[bytes](
        cast(Producer, clock), "loads", lambda: 0, nullcontext, lambda batch: [content for _, content in batch]
    )
    outbox.send_on(cast(asyncio.AbstractEventLoop, clock))
    numbers = itertools.count()

    def put(records_per_s: float) -> float:
        """Put records for a second; returns the mean time between two sendings in its second half."""
        for _ in range(int(records_per_s)):
            outbox.put(b"%d" % next(numbers), b"", 0, 0)
            clock.advance(1 / records_per_s)
        return 0.5 / sum(sent_s > clock.now_s - 0.5 for sent_s in clock.sent_s)

    assert put(BUSY_RECORDS_PER_S * 0.8) == pytest.approx(SEND_INTERVAL_S, rel=0.1)
    assert put(BUSY_RECORDS_PER_S * 1.2) == pytest.approx(BUSY_SEND_INTERVAL_S, rel=0.1)
    assert put(BUSY_RECORDS_PER_S * 0.8) == pytest.approx(SEND_INTERVAL_S, rel=0.1)
    assert put(20) == pytest.approx(1 / 20, rel=0.11)  # each by itself
    clock.advance(1.0)
    assert len(outbox) == next(numbers) and not outbox._waiting

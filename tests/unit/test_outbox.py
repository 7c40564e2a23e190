"""A router that sends its bookings on the loop that answers requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from streams.kafka.clients import IN_FLIGHT_FREELY
from streams.router_api.sharing import outbox as outbox_module
from tests.helpers.api import PATIENCE_S, rank_of
from tests.helpers.shared_loads import TOPIC, Delivered, World, booking


def on_a_loop(world: World, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this on a loop that answers the requests of the first router; then the router stops."""
    first = world.replicas[0]

    async def run() -> None:
        first.sync.send_on(asyncio.get_running_loop())
        await scenario()

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
    monkeypatch.setattr(outbox_module, "_SENT_TOGETHER_MAX", 2)
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


def test_a_router_sends_without_being_asked_and_the_rest_when_it_stops() -> None:
    """What was booked before the loop began is sent as well."""
    world = World()
    first = world.replicas[0]
    first.sync.book("r", booking(1))

    async def scenario() -> None:
        await until(lambda: not first.sync.unacknowledged)
        first.sync.book("s", booking(2))

    on_a_loop(world, scenario)
    assert len(world.log.written) == 2
    assert world.same() == {rank_of(1): (16, 1, 1), rank_of(2): (16, 1, 1)}


def test_after_the_loop_has_ended_ticks_send_records() -> None:
    """A router that drains has closed its server, and may still end bookings."""
    world = World()
    first = world.replicas[0]

    async def answer() -> None:
        first.sync.send_on(asyncio.get_running_loop())

    asyncio.run(answer())
    first.sync.book("r", booking(1))
    first.sync.poll()
    other = threading.Thread(target=first.sync.book, args=("s", booking(1)))
    other.start()
    other.join()
    first.sync.poll()
    first.sync.stop(PATIENCE_S)
    assert len(world.log.written) == 2


def test_records_that_the_client_does_not_take_are_offered_again() -> None:
    """Its queue is full."""
    world = World()
    first = world.replicas[0]

    async def scenario() -> None:
        first.client.refusing = BufferError()
        first.sync.book("r", booking(1))
        await asyncio.sleep(0.1)
        assert (first.sync.unacknowledged, len(world.log.written)) == (1, 0)
        first.client.refusing = None
        await until(lambda: not first.sync.unacknowledged)

    on_a_loop(world, scenario)
    assert len(world.log.written) == 1


def test_requests_do_not_wait_while_another_thread_sends() -> None:
    """After an outage it may send for long. The loop tries again, and sends what is left by then."""
    world = World()
    first = world.replicas[0]

    async def scenario() -> None:
        with first.sync._own.outbox._pumping:  # as the thread holds it
            first.sync.book("r", booking(1))
            began_s = time.monotonic()
            await asyncio.sleep(0.1)
            assert time.monotonic() - began_s < PATIENCE_S / 2
            assert (first.sync.unacknowledged, len(first.client._queue)) == (1, 0)
        await until(lambda: not first.sync.unacknowledged)

    on_a_loop(world, scenario)
    assert len(world.log.written) == 1


def test_a_mistake_in_a_report_ends_neither_the_requests_nor_the_sending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reports that cannot be served are logged, and later ones are served."""
    world = World()
    first = world.replicas[0]
    serve = first.client.poll

    def failing(timeout_s: float) -> int:
        raise RuntimeError(timeout_s)

    async def scenario() -> None:
        monkeypatch.setattr(first.client, "poll", failing)
        first.sync.book("r", booking(1))
        await until(lambda: "were not sent" in caplog.text)
        monkeypatch.setattr(first.client, "poll", serve)
        await until(lambda: not first.sync.unacknowledged)

    on_a_loop(world, scenario)
    assert world.same() == {rank_of(1): (16, 1, 1)}


def test_the_records_of_an_interval_are_sent_together() -> None:
    """However many bookings are made, the client gets at most one batch for each partition per interval."""
    world = World()
    first = world.replicas[0]
    batches: dict[int, list[int]] = {}
    send = first.client.produce_batch

    def counting(topic: str, messages: list[dict[str, Any]], partition: int, on_delivery: Any) -> int:
        batches.setdefault(partition, []).append(len(messages))
        return send(topic, messages, partition, on_delivery)

    first.client.produce_batch = counting  # type: ignore[method-assign]
    took_s = 0.0

    async def scenario() -> None:
        nonlocal took_s
        began_s = time.monotonic()
        for number in range(100):
            first.sync.book(f"r{number}", booking(1))
            await asyncio.sleep(0.0005)
        await until(lambda: sum(map(sum, batches.values())) == 100)
        took_s = time.monotonic() - began_s

    on_a_loop(world, scenario)
    assert len(batches) == TOPIC.partitions
    assert max(map(len, batches.values())) <= took_s / outbox_module.SEND_INTERVAL_S + 1


def test_a_partition_whose_records_are_unacknowledged_gets_no_others_until_they_are() -> None:
    """Its client would keep them. Other partitions get theirs, and a waiting record is replaced in its place."""
    handed: list[tuple[int, list[bytes]]] = []
    reports: list[tuple[bytes, Callable[..., None]]] = []

    class Client:
        def poll(self, _timeout_s: float) -> int:
            return 0

        def produce_batch(self, _topic: str, messages: list[dict[str, Any]], partition: int, on_delivery: Any) -> int:
            handed.append((partition, [message["value"] for message in messages]))
            reports.extend((message["key"], on_delivery) for message in messages)
            return len(messages)

    clock = [0]
    outbox: outbox_module.Outbox[bytes] = outbox_module.Outbox(
        Client(),  # type: ignore[arg-type]
        "t",
        lambda: clock[0],
        contextlib.nullcontext,
        lambda records: [content for _, content in records],
    )

    def put(key: bytes, content: bytes, partition: int) -> None:
        clock[0] += 1
        outbox.put(key, content, partition, len(content))

    for number in range(IN_FLIGHT_FREELY):
        put(b"%d" % number, b"%d" % number, 0)
    outbox.pump()
    put(b"a", b"older", 0)
    put(b"b", b"b", 0)
    put(b"a", b"newer", 0)
    put(b"c", b"c", 1)
    put(b"gone", b"gone", 0)
    assert outbox.withdraw(b"gone", 0)
    outbox.pump()
    assert handed == [(0, [b"0", b"1", b"2", b"3", b"4"]), (1, [b"c"])]
    assert (len(outbox), outbox.oldest_ms()) == (IN_FLIGHT_FREELY + 3, clock[0] - 1)
    key, on_delivery = reports.pop(0)
    on_delivery(None, Delivered(key))
    outbox.pump()
    assert handed[2:] == [(0, [b"newer", b"b"])]
    for key, on_delivery in reports:
        on_delivery(None, Delivered(key))
    assert (len(outbox), outbox.oldest_ms(), outbox.lost) == (0, 0, 0)

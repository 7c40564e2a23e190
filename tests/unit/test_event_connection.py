"""The subscribing socket of a rank: each socket has one connection, and it is known when that is complete or broken."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest
import zmq
import zmq.asyncio

from streams.engines.connection import Change, EventConnection
from streams.lab.kafka.ports import free_port

PATIENCE_S = 20.0


def connecting(address: str, act: Callable[[EventConnection], Awaitable[None]]) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        try:
            with EventConnection(context, address) as connection:
                await act(connection)
        finally:
            context.destroy(linger=0)

    asyncio.run(main())


async def next_change(connection: EventConnection) -> Change:
    deadline_s = time.monotonic() + PATIENCE_S
    while (change := connection.attend(time.monotonic())) is None:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
    return change


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


def test_the_messages_of_a_broken_connection_can_be_taken_and_those_of_the_next_are_separate() -> None:
    """After the publisher is replaced, its last messages are in the old socket, and the new one has none of them."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        first = context.socket(zmq.XPUB)
        first.bind(address)

        async def act(connection: EventConnection) -> None:
            assert await next_change(connection) is Change.COMPLETED
            assert connection.completed_at_s is not None
            await until(lambda: bool(first.poll(0)))  # the subscription has arrived
            first.send(b"of the first")
            await until(lambda: connection.has_message)
            first.close(linger=0)
            assert await next_change(connection) is Change.BROKEN
            assert connection.completed_at_s is None
            assert connection.take() == [b"of the first"] and not connection.has_message
            with context.socket(zmq.XPUB) as second:
                second.bind(address)
                connection.reopen(time.monotonic())
                assert await next_change(connection) is Change.COMPLETED
                await until(lambda: bool(second.poll(0)))
                second.send(b"of the second")
                await until(lambda: connection.has_message)
                assert connection.take() == [b"of the second"]

        connecting(address, act)


def test_a_message_that_was_put_back_is_taken_before_the_others_and_goes_with_its_connection() -> None:
    """It waits as if it had never been taken."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        publisher = context.socket(zmq.XPUB)
        publisher.bind(address)

        async def act(connection: EventConnection) -> None:
            assert await next_change(connection) is Change.COMPLETED
            await until(lambda: bool(publisher.poll(0)))
            publisher.send(b"1")
            await until(lambda: connection.has_message)
            first = connection.take()
            assert not connection.has_message
            connection.put_back(first)
            assert connection.has_message
            publisher.send(b"2")
            assert connection.take() == [b"1"]
            await until(lambda: connection.has_message)
            connection.put_back(connection.take())
            connection.close()
            assert not connection.has_message

        connecting(address, act)
        publisher.close(linger=0)


@pytest.mark.parametrize(("kind", "reason"), [(None, "nothing listens"), (zmq.ROUTER, "swapped")])
def test_an_attempt_to_connect_to_something_else_fails_with_its_reason(kind: int | None, reason: str) -> None:
    """Nothing listens at the address, or a socket of another kind does; attempts are repeated after a pause."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context:
        peer = None if kind is None else context.socket(kind)
        if peer is not None:
            peer.bind(address)

        async def act(connection: EventConnection) -> None:
            for _ in range(2):
                assert await next_change(connection) is Change.FAILED
                assert reason in connection.reason
                now_s = time.monotonic()
                connection.reopen(now_s)
                assert connection.attend(now_s) is None and not connection.is_open

        connecting(address, act)
        if peer is not None:
            peer.close(linger=0)


def test_publishers_that_die_while_they_send_do_not_abort_the_reader() -> None:
    """ZMQ aborted the process when a connection broke between two frames of a message that was being read."""
    reader = subprocess.run(
        [sys.executable, "-m", "tests.helpers.flooded_connection", "12"], capture_output=True, text=True, timeout=120
    )
    assert reader.returncode == 0, reader.stderr
    assert [int(line) > 0 for line in reader.stdout.split()] == [True] * 12

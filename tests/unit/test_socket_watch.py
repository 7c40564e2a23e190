"""The watch of all event sockets of a bridge: what is readable is read together, and nothing is missed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

from streams.engines import socket_watch
from streams.engines.socket_watch import POLL_EVERY_S, POLL_S_MAX, SocketWatch

PATIENCE_S = 20.0


class Pipe:
    """A pipe whose reading end is watched; each byte is a message."""

    def __init__(self, watch: SocketWatch, log: list[tuple[float, Pipe]]) -> None:
        self.descriptor, self._write_to = os.pipe()
        self._log = log
        self._watch = watch
        watch.add(self.descriptor, self.read)

    def read(self) -> None:
        for _ in os.read(self.descriptor, 100):
            self._log.append((time.monotonic(), self))

    def write(self, n: int = 1) -> None:
        os.write(self._write_to, bytes(n))

    def close(self) -> None:
        self._watch.remove(self.descriptor)
        os.close(self.descriptor)
        os.close(self._write_to)


def watching(n: int, act: Callable[[SocketWatch, list[Pipe], list[tuple[float, Pipe]]], Awaitable[None]]) -> None:
    async def main() -> None:
        watch, log = SocketWatch(), list[tuple[float, Pipe]]()
        pipes = [Pipe(watch, log) for _ in range(n)]
        try:
            await act(watch, pipes, log)
        finally:
            for pipe in pipes:
                pipe.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


def test_every_message_is_read_however_they_arrive() -> None:
    """One after a pause, many without a pause, and one after the watch has found nothing to read again."""

    async def act(_: SocketWatch, pipes: list[Pipe], log: list[tuple[float, Pipe]]) -> None:
        pipes[0].write()
        await until(lambda: len(log) == 1)
        for n in range(50):
            pipes[n % 3].write(2)
            await asyncio.sleep(POLL_EVERY_S / 5)
        await until(lambda: len(log) == 101)
        await asyncio.sleep(10 * POLL_EVERY_S)
        pipes[2].write()
        await until(lambda: len(log) == 102)
        assert {pipe for _, pipe in log} == set(pipes)

    watching(3, act)


def test_while_messages_arrive_sockets_are_read_together() -> None:
    """The second message of a pair waits for the next poll, together with that of another socket."""

    async def act(watch: SocketWatch, pipes: list[Pipe], log: list[tuple[float, Pipe]]) -> None:
        polls: list[int] = []
        poll = watch.poll

        def counted() -> bool:
            found = poll()
            polls.append(len(log))
            return found

        watch.poll = counted  # type: ignore[method-assign]
        pipes[0].write()
        await until(lambda: len(log) == 1)
        pipes[1].write()
        pipes[2].write()
        await until(lambda: len(log) == 3)
        assert 2 not in polls  # no poll found one of the two alone

    watching(3, act)


def test_a_poll_in_between_finds_what_waits_for_the_next_one() -> None:
    """So a bridge knows, when it writes a pulse, that no message waits that it has not seen."""

    async def act(watch: SocketWatch, pipes: list[Pipe], log: list[tuple[float, Pipe]]) -> None:
        pipes[0].write()
        await until(lambda: len(log) == 1)
        pipes[1].write()
        assert watch.poll() and len(log) == 2
        assert not watch.poll()

    watching(2, act)


async def test_a_long_poll_is_continued_after_everything_else() -> None:
    """Other tasks have their turn in between, and every message is read."""
    watch, log = SocketWatch(), list[tuple[float, Pipe]]()
    pipes = [Pipe(watch, log) for _ in range(6)]
    turns: list[int] = []

    def read_slowly(pipe: Pipe) -> None:
        time.sleep(POLL_S_MAX)
        pipe.read()

    for pipe in pipes:
        watch.remove(pipe.descriptor)
        watch.add(pipe.descriptor, partial(read_slowly, pipe))
        pipe.write()
    assert watch.poll() and watch.is_cut_short and 0 < len(log) < len(pipes)
    while len(log) < len(pipes):
        turns.append(len(log))
        await asyncio.sleep(0)
    assert len(set(turns)) >= 3
    await until(lambda: not watch.poll())
    assert not watch.is_cut_short
    for pipe in pipes:
        pipe.close()


async def test_a_callback_that_fails_or_removes_another_socket_does_not_stop_the_watch() -> None:
    """The other sockets are read at the same poll, and all of them later; a removed one is not called any more."""
    watch, log = SocketWatch(), list[tuple[float, Pipe]]()
    failing, removed, other = (Pipe(watch, log) for _ in range(3))

    def fail() -> None:
        failing.read()
        watch.remove(removed.descriptor)
        raise RuntimeError("a test")

    watch.remove(failing.descriptor)
    watch.add(failing.descriptor, fail)
    removed_reads = len(log)
    for pipe in (failing, other):
        pipe.write()
    await until(lambda: len(log) == 2)
    removed.write()
    for pipe in (failing, other):
        pipe.write()
    await until(lambda: len(log) == 4)
    assert {pipe for _, pipe in log[removed_reads:]} == {failing, other}
    for pipe in (failing, removed, other):
        pipe.close()


async def test_a_watch_whose_last_socket_was_removed_watches_the_next_one() -> None:
    """An engine's connection breaks, and another socket replaces the first one."""
    watch, log = SocketWatch(), list[tuple[float, Pipe]]()
    for n in range(3):
        pipe = Pipe(watch, log)
        pipe.write()
        await until(lambda n=n: len(log) == n + 1)  # type: ignore[misc]
        pipe.close()
    watch.remove(pipe.descriptor)  # a socket that was never added, or removed before, changes nothing
    assert not watch.poll()


def test_the_interval_is_a_small_part_of_what_a_batch_may_need() -> None:
    """A batch waits for a whole interval at most, and a batch has 50 ms until it is on Kafka."""
    assert 0 < socket_watch.POLL_EVERY_S <= 0.01

"""A thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from streams.process.loop_thread import LoopThread


def with_thread(use: Callable[[LoopThread], Coroutine[Any, Any, None]]) -> None:
    """Run `use` on a loop of the test, with a thread that is stopped afterwards."""

    async def main() -> None:
        thread = LoopThread("of-its-own")
        try:
            await use(thread)
        finally:
            await thread.stop()

    asyncio.run(main())
    assert "of-its-own" not in {each.name for each in threading.enumerate()}


def test_what_runs_there_does_not_wait_for_the_loop_that_started_it() -> None:
    """Coroutines go on while the other loop is blocked, and their results come back to it."""
    called = threading.Event()

    async def use(thread: LoopThread) -> None:
        async def call() -> str:
            await asyncio.sleep(0.01)
            called.set()
            return threading.current_thread().name

        running = asyncio.ensure_future(thread.run(call))
        await asyncio.sleep(0)
        assert called.wait(30)  # blocks this loop
        assert await running == "of-its-own"

    with_thread(use)


def test_exceptions_come_back() -> None:
    """What a coroutine raises there is raised here."""

    async def use(thread: LoopThread) -> None:
        async def fail() -> None:
            raise ValueError("there")

        with pytest.raises(ValueError, match="there"):
            await thread.run(fail)

    with_thread(use)


def endless(began: threading.Event, cancelled: threading.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    """Make coroutines that only a cancellation ends, and that nothing else refers to."""

    async def wait() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    return wait


@pytest.mark.parametrize("stopped", [False, True])
def test_coroutines_are_cancelled_with_their_callers_and_at_the_stop(stopped: bool) -> None:
    """A coroutine gets the cancellation of the one that waits for it, and of a thread that is stopped."""
    began, cancelled = threading.Event(), threading.Event()
    wait = endless(began, cancelled)

    async def use(thread: LoopThread) -> None:
        waiting = asyncio.create_task(thread.run(wait))
        await asyncio.to_thread(began.wait, 30)
        if not stopped:
            waiting.cancel()
            assert await asyncio.to_thread(cancelled.wait, 30)
            with pytest.raises(asyncio.CancelledError):
                await waiting

    with_thread(use)
    assert cancelled.wait(30)


def test_a_coroutine_for_which_nothing_waits_any_more_is_not_lost() -> None:
    """The thread itself refers to what it runs, so that the garbage collector does not take it before the stop."""
    began, cancelled = threading.Event(), threading.Event()
    wait = endless(began, cancelled)

    async def begin(thread: LoopThread) -> None:
        waiting = asyncio.create_task(thread.run(wait))
        await asyncio.to_thread(began.wait, 30)
        assert not waiting.done()

    async def use(thread: LoopThread) -> None:
        await begin(thread)
        gc.collect()

    with_thread(use)
    assert cancelled.wait(30)

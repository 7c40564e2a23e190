"""Calls that serve several engines: who shares one, and what each of them gets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping

import pytest

from streams.core.ids import WorkerId
from streams.engines import shared_calls
from streams.engines.shared_calls import SharedCalls


class Reads:
    """A blocking function that records its calls, and waits for `go`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.n_running = self.n_running_max = 0
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def __call__(self, key: str, worker_ids: Collection[WorkerId]) -> Mapping[WorkerId, str]:
        with self._lock:
            self.calls.append((key, sorted(worker_ids)))
            self.n_running += 1
            self.n_running_max = max(self.n_running_max, self.n_running)
        assert self.go.wait(10.0)
        with self._lock:
            self.n_running -= 1
        if self.error is not None:
            raise self.error
        return {worker_id: f"{key}{worker_id}" for worker_id in worker_ids}


async def until_called(reads: Reads, n: int) -> None:
    while len(reads.calls) < n:
        await asyncio.sleep(0.005)


async def test_engines_that_wait_with_the_same_key_share_a_call() -> None:
    """Each gets its own result; the other keys have calls of their own, at most two at a time."""
    reads = Reads()
    shared = SharedCalls(reads, asyncio.Semaphore(2))
    asked = [(key, WorkerId(n)) for n in range(5) for key in "abcd"]
    results = await asyncio.gather(*(shared.result(*each) for each in asked))
    assert results == [f"{key}{worker_id}" for key, worker_id in asked]
    assert sorted(reads.calls) == [(key, [0, 1, 2, 3, 4]) for key in "abcd"]
    assert reads.n_running_max <= 2


async def test_an_engine_never_joins_a_call_that_has_begun() -> None:
    """What it reads must include everything that was written before it asked."""
    reads = Reads()
    shared = SharedCalls(reads, asyncio.Semaphore(2))
    reads.go.clear()
    first = asyncio.create_task(shared.result("a", WorkerId(1)))
    await until_called(reads, 1)
    later = [asyncio.create_task(shared.result("a", WorkerId(n))) for n in (1, 2)]
    await asyncio.sleep(2 * shared_calls.JOIN_S)
    assert len(reads.calls) == 1
    reads.go.set()
    assert await asyncio.gather(first, *later) == ["a1", "a1", "a2"]
    assert reads.calls == [("a", [1]), ("a", [1, 2])]


async def test_an_error_reaches_every_engine_of_the_call_and_no_other() -> None:
    """The next call is made all the same."""
    reads = Reads()
    reads.error = ValueError("no answer")
    shared = SharedCalls(reads, asyncio.Semaphore(1))
    found = await asyncio.gather(*(shared.result("a", WorkerId(n)) for n in range(3)), return_exceptions=True)
    assert [str(each) for each in found] == ["no answer"] * 3
    reads.error = None
    assert await shared.result("a", WorkerId(7)) == "a7"


async def test_an_engine_that_is_released_while_it_waits_is_not_read() -> None:
    """The others get their results; with no engine left, nothing is called."""
    reads = Reads()
    shared = SharedCalls(reads, asyncio.Semaphore(1))
    tasks = [asyncio.create_task(shared.result("a", WorkerId(n))) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert [await tasks[0], await tasks[2]] == ["a0", "a2"]
    alone = asyncio.create_task(shared.result("b", WorkerId(1)))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.sleep(3 * shared_calls.JOIN_S)
    assert reads.calls == [("a", [0, 2])]


async def test_a_call_has_a_limited_number_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others follow in the next call."""
    monkeypatch.setattr(shared_calls, "ENGINES_PER_CALL_MAX", 4)
    reads = Reads()
    shared = SharedCalls(reads, asyncio.Semaphore(2))
    assert len(await asyncio.gather(*(shared.result("a", WorkerId(n)) for n in range(10)))) == 10
    assert [len(worker_ids) for _, worker_ids in reads.calls] == [4, 4, 2]

"""Failed engines are reported once a second, in the background, and not after the end."""

from __future__ import annotations

import asyncio

from streams.client.failed_engines import FailedEngines


class Router:
    """Notes which workers are to be avoided; `holds` delays its answers."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.holds = asyncio.Event()
        self.holds.set()

    async def avoid(self, worker_id: int) -> bool:
        self.asked.append(worker_id)
        await self.holds.wait()
        return True


async def background() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_failures_of_one_engine_at_the_same_time_are_one_call() -> None:
    """Every request that an engine had fails when it dies."""
    router = Router()
    failed = FailedEngines(router)
    for worker_id in (1, 1, 2, 1):
        failed.note(worker_id)
    await background()
    assert router.asked == [1, 2]
    assert failed.n_reported == 2
    await failed.close()


async def test_nothing_is_reported_after_the_end() -> None:
    """A failure is noted some time after it happened; then the client may be closed, and its loop may end."""
    router = Router()
    router.holds.clear()
    failed = FailedEngines(router)
    failed.note(1)
    await background()
    asyncio.get_running_loop().call_later(0.01, failed.note, 2)
    await failed.close()
    await asyncio.sleep(0.05)
    assert router.asked == [1]
    assert failed.n_reported == 0

"""Faust's consumer as this project changes it; the tests simulate what only a rebalance would cause."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import IllegalStateError
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from faust.types import TP

from streams import delivery
from streams.settings import Settings
from streams.worker import create_app


def consumer() -> Any:
    """Return the consumer of a worker that is not started."""
    return create_app(Settings(router=False)).consumer


@pytest.mark.parametrize(
    "revoked",
    [
        IllegalStateError("No current assignment for partition"),
        AssertionError("No partitions are currently assigned"),
    ],
)
def test_a_revocation_while_offsets_are_requested_does_not_end_the_worker(
    revoked: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer keeps the offsets that it has, and the next assignment seeks again."""

    async def play() -> None:
        faust_consumer = consumer()
        tp = TP("kv-events", 0)
        faust_consumer._read_offset[tp] = 7

        async def answer() -> dict[TP, int]:
            raise revoked

        monkeypatch.setattr(faust_consumer, "seek_to_committed", answer)
        await faust_consumer.perform_seek()
        assert faust_consumer._read_offset[tp] == 7

    asyncio.run(play())


def test_committed_offsets_are_sought_and_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read starts at the committed offsets."""

    async def play() -> None:
        faust_consumer = consumer()
        tp = TP("kv-events", 0)

        async def answer() -> dict[TP, int]:
            return {tp: 42}

        monkeypatch.setattr(faust_consumer, "seek_to_committed", answer)
        await faust_consumer.perform_seek()
        assert faust_consumer._read_offset[tp] == 42

        async def fail() -> dict[TP, int]:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(faust_consumer, "seek_to_committed", fail)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await faust_consumer.perform_seek()

    asyncio.run(play())


def test_only_fetches_that_follow_each_other_wait_for_more_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """While records keep coming, each fetch waits for some of them; a record after a pause is fetched at once."""
    found: list[dict[TP, list[int]]] = []

    async def fetched(*_: Any, **__: Any) -> dict[TP, list[int]]:
        return found.pop()

    async def play() -> None:
        thread, client = consumer()._thread, SimpleNamespace(_fetcher=SimpleNamespace())
        some = {TP("kv-events", 0): [1]}

        async def waits_after(records: dict[TP, list[int]]) -> bool:
            found.append(records)
            assert await thread._fetch_records(client, None, timeout=1.0, max_records=None) == records
            return bool(client._fetcher._fetch_min_bytes > 1 and client._fetcher._fetch_max_wait_ms < 100)

        assert not await waits_after(some)
        assert await waits_after(some)
        assert not await waits_after({})
        assert await waits_after(some)
        monkeypatch.setattr(thread, "_fetched_s", time.monotonic() - 90.0)
        assert not await waits_after(some)

    monkeypatch.setattr(AIOKafkaConsumerThread, "_fetch_records", fetched)
    monkeypatch.setattr(delivery, "BUSY_WITHIN_S", 60.0)  # however busy this machine is
    asyncio.run(play())

"""Faust's consumer as this project alters it; what needs a rebalance to happen is told to it here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.errors import IllegalStateError
from faust.types import TP

from streams.settings import Settings
from streams.worker import create_app


def consumer() -> Any:
    """The consumer of a worker that was not started."""
    return create_app(Settings(router=False)).consumer


@pytest.mark.parametrize(
    "revoked",
    [
        IllegalStateError("No current assignment for partition"),
        AssertionError("No partitions are currently assigned"),
    ],
)
def test_what_is_revoked_while_offsets_are_asked_for_does_not_end_the_worker(
    revoked: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another assignment comes and is sought then; what was known of offsets stays."""

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


def test_what_is_committed_is_sought_and_other_faults_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets that the group knows become what is read next."""

    async def play() -> None:
        faust_consumer = consumer()
        tp = TP("kv-events", 0)

        async def answer() -> dict[TP, int]:
            return {tp: 42}

        monkeypatch.setattr(faust_consumer, "seek_to_committed", answer)
        await faust_consumer.perform_seek()
        assert faust_consumer._read_offset[tp] == 42

        async def break_down() -> dict[TP, int]:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(faust_consumer, "seek_to_committed", break_down)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await faust_consumer.perform_seek()

    asyncio.run(play())

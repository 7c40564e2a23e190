"""Faust's consumer as this project changes it; the tests simulate what only a rebalance would cause."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.errors import IllegalStateError
from faust.types import TP

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
async def test_a_revocation_while_offsets_are_requested_does_not_end_the_worker(
    revoked: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer keeps the offsets that it has, and the next assignment seeks again."""
    faust_consumer = consumer()
    tp = TP("kv-events", 0)
    faust_consumer._read_offset[tp] = 7

    async def answer() -> dict[TP, int]:
        raise revoked

    monkeypatch.setattr(faust_consumer, "seek_to_committed", answer)
    await faust_consumer.perform_seek()
    assert faust_consumer._read_offset[tp] == 7


async def test_committed_offsets_are_sought_and_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read starts at the committed offsets."""
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

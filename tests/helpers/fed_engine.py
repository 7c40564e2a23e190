"""One engine of a bridge whose Kafka takes every record: feeding it, and what its records say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from streams.core.events import EngineBatch, EngineEvents, FeedState
from streams.core.ids import Incarnation
from streams.engines.address import EngineAddress
from streams.engines.recovery import RecoveredRank
from streams.kafka.records import decode_batch, decode_worker
from tests.helpers import bridged_engine
from tests.helpers.bridged_engine import EngineUnderTest
from tests.helpers.engine_double import EngineDouble

#: Ample for a subscription to reach the engine.
SUBSCRIBED_S = 0.7

#: Before every incarnation of a test.
NONE_YET = Incarnation(0)


def bridging(
    address: EngineAddress, act: Callable[[EngineUnderTest], Awaitable[None]], *recovered: RecoveredRank
) -> list[EngineBatch]:
    """Run an engine of a bridge while `act` runs, with a Kafka that takes all records; return those of its ranks."""
    batches: list[EngineBatch] = []

    async def acknowledged(engine: EngineUnderTest) -> None:
        async def acknowledge() -> None:
            while True:
                engine.producer.acknowledge()
                await asyncio.sleep(0.01)

        engine.table.is_read.set()
        engine.table.apply_from(engine.producer)
        acknowledging = asyncio.create_task(acknowledge())
        try:
            await act(engine)
        finally:
            acknowledging.cancel()
        batches.extend(batches_of(engine))

    bridged_engine.bridging(address, acknowledged, *recovered)
    return batches


def batches_of(engine: EngineUnderTest) -> list[EngineBatch]:
    """Every record of kv-events, in order."""
    return [decode_batch(value) for value in engine.producer.values("kv-events")]


def registered(engine: EngineUnderTest) -> list[str]:
    """The models under which the engine was registered, in order, without repetitions."""
    return list(dict.fromkeys(decode_worker(value).model for value in engine.producer.values("workers")))


def is_live(engine: EngineUnderTest, model: str, after: Incarnation = NONE_YET) -> bool:
    """Whether the last record says that the feed is live, under this model, in an incarnation after this one."""
    batches = batches_of(engine)
    last = batches[-1] if batches else None
    return last is not None and (last.model, last.feed) == (model, FeedState.LIVE) and last.incarnation > after


async def fed_with_a_batch(engine: EngineUnderTest, double: EngineDouble, model: str) -> Incarnation:
    """Wait until the feed is live and has published a batch; return the incarnation."""
    await engine.until(lambda: bool(batches_of(engine)), "the feed")
    await asyncio.sleep(SUBSCRIBED_S)
    double.store(1)
    await engine.until(lambda: stores(batches_of(engine)[-1]) and is_live(engine, model), "the first batch")
    return batches_of(engine)[-1].incarnation


def stores(batch: EngineBatch) -> bool:
    return isinstance(batch.body, EngineEvents) and bool(batch.body.events)


def warnings_of(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    """The warnings that contain this text."""
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    return [line for line in lines if part in line]

"""A feed of one rank without Kafka, whose engine is a double."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from streams.core.events import (
    EngineBatch,
    EngineEvents,
    FeedState,
)
from streams.core.ids import WorkerId
from streams.core.workers import Worker
from streams.cxl.events import CxlTransition
from streams.cxl.records import decode_transition
from streams.engines.address import EngineAddress
from streams.engines.feed import RankFeed
from streams.engines.lease import EngineLease
from streams.engines.lease_handle import LeaseHandle
from streams.engines.recovery import RecoveredRank
from streams.engines.wiring import EngineWiring
from streams.kafka.records import decode_batch
from streams.settings import Settings
from tests.helpers.engine_double import EngineDouble
from tests.helpers.recording_producer import RecordingProducer

#: Ample for what takes a fraction of a second on a quiet machine.
PATIENCE_S = 20.0


class FeedUnderTest:
    """A running feed, and the records that it has published."""

    def __init__(self, feed: RankFeed, producer: RecordingProducer) -> None:
        self.feed = feed
        self._producer = producer
        self.running: asyncio.Task[None] | None = None

    @property
    def batches(self) -> list[EngineBatch]:
        """Every record of kv-events, in order."""
        return [decode_batch(value) for value in self._producer.values("kv-events")]

    @property
    def transitions(self) -> list[CxlTransition]:
        """Every record of cxl-events, in order."""
        return [decode_transition(value) for value in self._producer.values("cxl-events")]

    @property
    def state(self) -> FeedState | None:
        """The state that the last record states."""
        batches = self.batches
        return batches[-1].feed if batches else None

    def numbers(self) -> list[int]:
        """The numbers of all batches of events, without the announcements of incarnations."""
        return [
            batch.sequence for batch in self.batches if isinstance(batch.body, EngineEvents) and batch.sequence >= 0
        ]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}: {self.batches[-5:]}"
            await asyncio.sleep(0.01)


def held_lease(settings: Settings, worker: Worker) -> LeaseHandle:
    """A lease that this process holds, without a log: what it writes is read back at once."""
    lease = EngineLease("test", settings.bridge_lease_s)
    written: list[Worker | None] = []
    handle = LeaseHandle(lease, written.append)
    lease.want(worker)
    handle.on_end()
    while written:
        handle.on_record(written.pop(0))
    assert handle.may_publish()
    return handle


def feeding(
    address: EngineAddress,
    act: Callable[[FeedUnderTest], Awaitable[None]],
    settings: Settings | None = None,
    may_end: bool = False,
    recovered: RecoveredRank | None = None,
    acknowledged_after_s: float = 0.0,
    **more: Any,
) -> list[EngineBatch]:
    """Feed an engine while `act` runs; return all records.

    may_end: whether the feed may end by itself. recovered: what the bridge has read from Kafka. acknowledged_after_s:
    how long Kafka takes for a record. more: further parts of its wiring.
    """

    async def main() -> list[EngineBatch]:
        chosen = settings or Settings(bridge_lease_s=600.0)
        producer = RecordingProducer(acknowledges=True, after_s=acknowledged_after_s)
        context = zmq.asyncio.Context()
        try:
            worker = Worker(address.worker_id, address.url, "m", 16)
            async with aiohttp.ClientSession() as http:
                wiring = EngineWiring(
                    chosen,
                    producer,
                    context,
                    http,
                    address,
                    "m",
                    held_lease(replace(chosen, bridge_lease_s=600.0), worker),
                    1,
                    lambda _: 0,
                    lambda _: None,
                    lambda _: None,
                    **more,
                )
                under_test = FeedUnderTest(RankFeed(wiring, 0, recovered), producer)
                under_test.running = running = asyncio.create_task(under_test.feed.run())
                try:
                    await act(under_test)
                    assert may_end or not running.done()
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
        finally:
            context.destroy(linger=0)
        return under_test.batches

    return asyncio.run(main())


def address_of(engine: EngineDouble, *, replay: str | None = "") -> EngineAddress:
    return EngineAddress(WorkerId(7), engine.url, engine.events, engine.replay if replay == "" else replay)

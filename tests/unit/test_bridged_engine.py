"""Whether a bridge says that it feeds an engine: in a takeover, if the engine is not reached, and after a failure."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from streams.core.events import FeedState
from streams.core.ids import Epoch, Incarnation
from streams.core.reducer.ordering import Progress
from streams.core.workers import Worker
from streams.engines import batch_publishing
from streams.engines import bridged_engine as bridged_engine_module
from streams.engines.acknowledgements import Acknowledgements
from streams.engines.address import EngineAddress
from streams.engines.ledger import Ledger
from streams.engines.rank_writer import RankWriter
from streams.engines.recovery import RecoveredRank
from streams.kafka.records import decode_batch
from streams.lab.kafka.ports import free_port
from streams.settings import Settings
from tests.helpers.bridged_engine import (
    MUCH_LATER_S,
    RANK,
    EngineUnderTest,
    address_of,
    bridging,
)
from tests.helpers.engine_double import EngineDouble
from tests.helpers.recording_producer import RecordingProducer


def recovered_live() -> RecoveredRank:
    """A rank as a former bridge left it: its last record says that its feed is live."""
    progress = Progress(RANK, Epoch(Incarnation(1), 0), 5, model="m", block_size=16, lease_ms=6000, feed=FeedState.LIVE)
    return RecoveredRank(progress, Ledger(False))


@pytest.mark.parametrize("with_events", [True, False])
def test_an_engine_that_is_taken_over_is_fed_once_routers_know_the_new_feeds_state(with_events: bool) -> None:
    """Not while the table is read, not before Kafka has a record of the feed, and not before routers have read it."""

    async def act(engine: EngineUnderTest) -> None:
        await engine.until(lambda: engine.table.is_asked, "the table to be read")
        assert not engine.is_fed_later()
        engine.table.is_read.set()
        await engine.until(lambda: bool(engine.producer.values("kv-events")), "a record of the feed")
        assert not engine.is_fed_later()
        before_s = time.monotonic()
        engine.producer.acknowledge()
        assert not engine.bridged.is_fed(before_s)
        assert engine.is_fed_later()

    with EngineDouble() as double:
        address = address_of(double)
        bridging(address if with_events else replace(address, events=None, replay=None), act, recovered_live())


def test_an_engine_that_is_taken_over_and_not_reached_is_not_fed() -> None:
    """Nothing says that the former feed's last state is out of date, so the pulse must."""

    async def act(engine: EngineUnderTest) -> None:
        engine.bridged.lease_handle.on_record(Worker(RANK.worker_id, url, "m", 16))
        engine.table.is_read.set()
        await engine.until(lambda: engine.table.is_asked, "the table to be read")
        for _ in range(100):
            assert not engine.is_fed_later()
            await asyncio.sleep(0.01)

    url, events, replay = (f"{scheme}://127.0.0.1:{free_port()}" for scheme in ("http", "tcp", "tcp"))
    bridging(EngineAddress(RANK.worker_id, url, events, replay, model="m"), act, recovered_live())


def test_an_engine_without_a_former_state_is_fed_at_once() -> None:
    """No record says anything about it that could be out of date; answers say that there are no events yet."""

    async def act(engine: EngineUnderTest) -> None:
        def is_fed() -> bool:
            engine.producer.acknowledge()
            return engine.bridged.is_fed(time.monotonic() - MUCH_LATER_S)

        engine.table.is_read.set()
        await engine.until(is_fed, "the feed")

    with EngineDouble() as double:
        bridging(address_of(double), act)


def test_an_engine_whose_feeds_failed_is_not_fed_until_they_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads its events meanwhile, whatever the reason is."""
    monkeypatch.setattr(bridged_engine_module, "RETRY_S", 0.2)

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of this test")

    async def act(engine: EngineUnderTest) -> None:
        def is_unfed() -> bool:
            engine.producer.acknowledge()  # what the feed published before it failed
            return not engine.is_fed_later()

        engine.table.is_read.set()
        await engine.until(lambda: bool(engine.producer.values("kv-events")), "a record of the feed")
        assert not is_unfed()
        engine.table.is_read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(batch_publishing, "decode_payload", fail)
            double.store(1)
            await engine.until(is_unfed, "the feed to fail")
        n_records = len(engine.producer.values("kv-events"))
        engine.table.is_read.set()
        await engine.until(lambda: len(engine.producer.values("kv-events")) > n_records, "a record of the next feed")
        assert not engine.is_fed_later()
        engine.producer.acknowledge()
        assert engine.is_fed_later()

    with EngineDouble() as double:
        bridging(address_of(double), act, recovered_live())


@pytest.mark.parametrize("dp_size", [1, 2])
def test_an_engine_is_not_fed_while_kafka_does_not_take_a_record_of_it(dp_size: int) -> None:
    """A record that is on its way for longer than answers may lag counts, and each rank; Kafka takes the pulse."""

    async def act(engine: EngineUnderTest) -> None:
        engine.table.is_read.set()
        published = dict.fromkeys(range(dp_size), 0)

        def all_published() -> bool:
            engine.producer.acknowledge()
            for value in engine.producer.values("kv-events"):
                published[int(decode_batch(value).rank.dp_rank)] += 1
            return all(published.values())

        await engine.until(all_published, "the feeds")
        assert engine.is_fed_later()
        before_s = time.monotonic()
        n_records = len(engine.producer.values("kv-events"))
        double.store(1)
        await engine.until(lambda: len(engine.producer.values("kv-events")) > n_records, "the next record")
        assert engine.bridged.is_fed(before_s)
        assert not engine.is_fed_later()
        engine.producer.acknowledge()
        assert engine.is_fed_later()

    with EngineDouble() as double:
        bridging(replace(address_of(double), dp_size=dp_size), act)


def test_the_oldest_record_on_its_way_decides_whether_one_is_late() -> None:
    """Kafka takes the records of one topic in order; a refused one is on its way no longer, but no router reads it."""
    acknowledgements = Acknowledgements(tolerated_s=0.75)
    acknowledgements.written(10.0)
    acknowledgements.written(11.0)
    acknowledgements.written(11.5)
    acknowledgements.withdrawn()
    assert not acknowledgements.are_late(10.75) and acknowledgements.are_late(10.76)
    acknowledgements.ended(11.0, acknowledged=False)
    assert not acknowledgements.is_first_read(99.0)
    assert not acknowledgements.are_late(11.75) and acknowledgements.are_late(11.76)
    acknowledgements.ended(13.0, acknowledged=True)
    assert not acknowledgements.is_first_read(13.74) and acknowledgements.is_first_read(13.75)


def test_a_record_that_came_late_counts_as_late_until_routers_have_read_it() -> None:
    """A router whose lag is tolerated does not know yet what Kafka has just taken. A record in time has no effect."""
    acknowledgements = Acknowledgements(tolerated_s=0.75)
    acknowledgements.written(10.0)
    acknowledgements.ended(14.0, acknowledged=True)
    assert acknowledgements.are_late(14.74) and not acknowledgements.are_late(14.75)
    acknowledgements.written(20.0)
    acknowledgements.ended(20.5, acknowledged=True)
    assert not acknowledgements.are_late(20.5)


def test_records_that_a_writer_gives_up_are_not_late() -> None:
    """A client without space took none of them, and the writer starts over."""

    class Full(RecordingProducer):
        def produce(self, *_: Any, **__: Any) -> None:
            raise BufferError

    writer = RankWriter(Settings(), Full(), RANK, "m", Incarnation(1), False)
    writer.heartbeat("b", 1000, 0)
    assert writer.records.is_late(time.monotonic() + MUCH_LATER_S)
    writer.begin_incarnation(Incarnation(2))
    assert not writer.records.is_late(time.monotonic() + MUCH_LATER_S)

"""A feed while Kafka's client has no space: what waits, what is filled in later, and what shows as a gap."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import zmq.asyncio
from confluent_kafka import KafkaError, Message, Producer

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import BlocksStored, EngineEvents, FeedState
from streams.core.ids import DpRank, Incarnation, RankId, Tier, WorkerId
from streams.core.workers import Worker
from streams.cxl.events import CxlStateChanged
from streams.engines.address import EngineAddress
from streams.engines.connection import RECEIVE_HWM, RECEIVE_HWM_MIN, RECEIVE_HWM_OF_ALL, receive_hwm
from streams.engines.feed import RankFeed
from streams.engines.rank_writer import RankWriter
from streams.engines.wiring import EngineWiring
from streams.kafka.records import decode_batch
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.feeds import held_lease
from tests.helpers.recording_producer import RecordingProducer

#: Records that the client of these tests buffers, and batches that wait in a socket.
BUFFERED_MAX = 20
RECEIVED_MAX = 30

N_BLOCKS = 64
PATIENCE_S = 30.0


class SmallBuffer(Producer):
    """A real client with a small queue and no broker. `purge` empties the queue, as a broker would; it keeps a list."""

    def __init__(self) -> None:
        super().__init__(
            {"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "queue.buffering.max.messages": BUFFERED_MAX}
        )
        self.taken: list[bytes] = []

    def produce(self, topic: str, *_: Any, **record: Any) -> None:
        del record["on_delivery"]
        super().produce(topic, **record)
        if topic.endswith("kv-events"):
            self.taken.append(record["value"])


def payload(number: int) -> bytes:
    """A batch that stores the blocks of a prompt of its own."""
    tokens = list(range(number * 10_000, number * 10_000 + N_BLOCKS * BLOCK_SIZE))
    names = [number * 1000 + block for block in range(N_BLOCKS)]
    return bytes(msgpack.packb([time.time(), [["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"]], 0]))


# Without a replay socket, more batches than the engine's own socket (1,000) and the operating system's buffers keep.
@pytest.mark.parametrize(("with_replay", "n_batches"), [(True, 300), (False, 2500)])
def test_batches_wait_while_kafka_is_slow_and_none_is_lost_silently(with_replay: bool, n_batches: int) -> None:
    """The loop goes on, memory is bounded, and every number is published or a gap that the feed counts."""

    async def main() -> None:
        settings = Settings(bridge_lease_s=600.0)
        context, kafka = zmq.asyncio.Context(), SmallBuffer()
        address = EngineAddress(WorkerId(7), engine.url, engine.events, engine.replay if with_replay else None)
        async with aiohttp.ClientSession() as http:
            handle = held_lease(settings, Worker(address.worker_id, address.url, "m", 16))
            wiring = EngineWiring(
                settings, kafka, context, http, address, "m", handle, 1, lambda _: 0, receive_hwm=lambda: RECEIVED_MAX
            )
            feed = RankFeed(wiring, 0, None)
            running = asyncio.create_task(feed.run())
            deadline_s = time.monotonic() + PATIENCE_S

            async def until(condition: Any, *, purges: bool = False) -> float:
                """Wait for a condition; return the longest time for which the loop stood still."""
                longest_s = 0.0
                while not condition():
                    assert time.monotonic() < deadline_s and not running.done(), feed.counters
                    before_s = time.monotonic()
                    await asyncio.sleep(0.005)
                    longest_s = max(longest_s, time.monotonic() - before_s)
                    if purges:
                        kafka.purge()
                        kafka.poll(0)
                return longest_s

            try:
                await until(lambda: kafka.taken and feed._receiver.connection.completed_at_s is not None)
                for n in range(n_batches):
                    engine.send(payload(n))
                    if n % 20 == 0:
                        await asyncio.sleep(0)
                stood_still_s = await until(lambda: feed.has_waited_for_kafka(time.monotonic(), 1.0))
                assert stood_still_s < 1.0
                assert len(kafka.taken) == BUFFERED_MAX
                if with_replay:
                    await until(lambda: feed.counters.batches_published >= n_batches, purges=True)
                else:
                    await until(lambda: not feed.has_waited_for_kafka(time.monotonic(), 0.0), purges=True)
                    last, quiet_from_s = 0, time.monotonic()
                    while time.monotonic() - quiet_from_s < 1.0:  # until what the sockets kept has been read
                        kafka.purge()
                        kafka.poll(0)
                        await asyncio.sleep(0.01)
                        if feed.counters.batches_published != last:
                            last, quiet_from_s = feed.counters.batches_published, time.monotonic()
                engine.send(payload(n_batches))
                await until(lambda: decode_batch(kafka.taken[-1]).sequence >= n_batches, purges=True)
                assert not feed.has_waited_for_kafka(time.monotonic(), 0.0)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                context.destroy(linger=0)
        batches = [decode_batch(value) for value in kafka.taken]
        numbers = [batch.sequence for batch in batches if isinstance(batch.body, EngineEvents) and batch.sequence >= 0]
        missing = set(range(n_batches + 1)) - set(numbers)
        assert numbers == sorted(set(numbers))  # in order, and none twice
        assert feed.counters.gap_batches_lost == len(missing)
        assert (not missing) if with_replay else (len(missing) > n_batches // 10)
        if missing:
            assert not feed._writer.ledger.complete
        assert any(batch.feed is FeedState.CATCHING_UP for batch in batches)

    with EngineDouble() as engine:
        asyncio.run(main())


def test_all_sockets_of_a_bridge_hold_a_bounded_number_of_batches() -> None:
    """Each rank has its share, and never so little that a short pause loses batches."""
    assert receive_hwm(0) == receive_hwm(1) == RECEIVE_HWM
    assert receive_hwm(200) * 200 == RECEIVE_HWM_OF_ALL
    assert receive_hwm(10_000) == RECEIVE_HWM_MIN


class _Pooling:
    """A writer whose second batch lets a block enter a pool and be evicted from it."""

    def __init__(self, *, may_resume: bool) -> None:
        self.producer = RecordingProducer()
        rank = RankId(WorkerId(7), DpRank(0))
        self.writer = RankWriter(Settings(), self.producer, rank, "m", Incarnation(1), False, may_resume=may_resume)
        names, local = np.array([11], dtype=np.uint64), np.array([5], dtype=np.uint64)
        self.writer.write(0, 1, 0, [BlocksStored(None, names, local, Tier.DEVICE)])
        states = (CxlMemoryState.IN_TRANSIT, CxlMemoryState.EVICTED)
        self.writer.write(1, 2, 0, [CxlStateChanged(1, names, state, "p", ()) for state in states])

    @property
    def topics(self) -> list[str]:
        return [topic for topic, _ in self.producer.records]

    def deliver(self, error: KafkaError | None) -> None:
        """Report both transitions as delivered, or as refused."""
        for _, record in self.producer.records[1:3]:
            record["on_delivery"](error, Message())


_EVENTS, _TRANSITIONS = topics(Settings()).kv_events.name, topics(Settings()).cxl_events.name


def test_a_bridge_sends_a_batch_once_kafka_has_its_transitions() -> None:
    """A bridge that resumed after a batch whose transitions were lost would never publish them."""
    pooling = _Pooling(may_resume=True)
    assert pooling.topics == [_EVENTS, _TRANSITIONS, _TRANSITIONS]
    assert pooling.writer.records.has_unsent
    assert not pooling.writer.records.send()
    pooling.deliver(None)
    assert pooling.writer.records.send()
    assert pooling.topics == [_EVENTS, _TRANSITIONS, _TRANSITIONS, _EVENTS]
    assert not pooling.writer.records.has_unsent


def test_a_bridge_does_not_send_a_batch_whose_transition_kafka_refused() -> None:
    """The next feed of the engine resumes before this batch, and publishes its transitions again."""
    pooling = _Pooling(may_resume=True)
    pooling.deliver(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    assert pooling.writer.records.failed
    assert not pooling.writer.records.send()
    assert pooling.topics == [_EVENTS, _TRANSITIONS, _TRANSITIONS]


def test_a_publisher_inside_an_engine_does_not_wait_for_transitions() -> None:
    """Its calls come from the engine's threads, and if it crashes, its incarnation ends with everything it held."""
    pooling = _Pooling(may_resume=False)
    assert pooling.topics == [_EVENTS, _TRANSITIONS, _TRANSITIONS, _EVENTS]


def test_records_in_flight_are_counted_over_all_writers_of_a_worker() -> None:
    """A bridge that feeds an engine again reads its state once Kafka has all of them, whatever other engines send."""
    producer, in_flight = RecordingProducer(), Counter[WorkerId]()
    ranks = [RankId(WorkerId(worker), DpRank(rank)) for worker, rank in ((7, 0), (7, 1), (8, 0))]
    for rank in ranks:
        writer = RankWriter(Settings(), producer, rank, "m", Incarnation(1), False, in_flight=in_flight)
        writer.heartbeat("b", 1000, 0)
    assert in_flight == {WorkerId(7): 2, WorkerId(8): 1}
    delivered: list[Callable[[KafkaError | None, Message], None]] = [
        record["on_delivery"] for _, record in producer.records
    ]
    error = KafkaError(KafkaError._MSG_TIMED_OUT)
    for on_delivery in delivered[:2]:
        on_delivery(error, Message())
    assert in_flight == {WorkerId(8): 1}
    assert WorkerId(7) not in in_flight

"""A worker that falls silent, expires and returns, on a real Kafka; unit/test_maintenance tests the rules."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from streams.core.events import BEFORE_FIRST, EngineBatch, EngineEvents, ResyncRequest
from streams.core.ids import WorkerId
from streams.kafka.clients import partition_of, producer, reader
from streams.kafka.records import decode_resync, encode_batch
from streams.lab.processes import Children
from streams.lab.stack import Stack, facts, get_json
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.holdings import RANK, batch, chunks, heartbeat, names, run, stored, u64
from tests.helpers.reference import chain_hashes
from tests.helpers.support import VISIBLE_TIMEOUT_S, dead_letters


class Bridge:
    """Publishes to Kafka what a bridge publishes of one rank."""

    def __init__(self, settings: Settings, worker_id: int, lease_ms: int) -> None:
        self._topic = topics(settings).kv_events.name
        self._kafka = producer(settings)
        self._rank = RANK._replace(worker_id=WorkerId(worker_id))
        self._lease_ms = lease_ms
        self.sequence = BEFORE_FIRST

    def publish(self, *batches: EngineBatch) -> None:
        for one in batches:
            raw = encode_batch(replace(one, rank=self._rank))
            self._kafka.produce(self._topic, key=str(self._rank.worker_id).encode(), value=raw)
            if isinstance(one.body, EngineEvents):
                self.sequence = one.sequence
        assert self._kafka.flush(30.0) == 0

    def renew(self) -> None:
        self.publish(heartbeat(self.sequence, lease_ms=self._lease_ms))

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish a batch every few milliseconds while the block runs, so that the source always has unread records."""
        with self._repeating(0.005, lambda: self.publish(batch(self.sequence + 1))):
            yield

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renew the lease while the block runs."""
        with self._repeating(self._lease_ms / 5000, self.renew):
            yield

    @contextmanager
    def _repeating(self, every_s: float, act: Callable[[], None]) -> Iterator[None]:
        over = threading.Event()

        def repeat() -> None:
            while not over.wait(every_s):
                act()

        thread = threading.Thread(target=repeat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def put_worker(url: str, worker_id: int) -> None:
    body = b'{"url": "http://nowhere", "model": "m", "block_size": 16}'
    request = urllib.request.Request(f"{url}/workers/{worker_id}", data=body, method="PUT")
    with urllib.request.urlopen(request) as response:
        assert response.status == 200


def route(url: str) -> dict[str, Any]:
    body = json.dumps({"block_hashes": [1, 2, 3, 4], "update_states": False, "explain": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/route", data=body, method="POST")) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def candidates(url: str) -> list[int]:
    return [each["worker_id"] for each in route(url)["candidates"]]


def requests_on_control(settings: Settings, partition: int) -> list[ResyncRequest]:
    consumer = reader(settings)
    found: list[ResyncRequest] = []
    try:
        consumer.assign([TopicPartition(topics(settings).kv_control.name, partition, OFFSET_BEGINNING)])
        while True:
            for message in consumer.consume(100, 5.0):
                if message.error() is not None:
                    return found
                found.append(decode_resync(message.value()))
    finally:
        consumer.close()


def test_a_silent_worker_gets_no_requests_then_is_removed_and_returns_with_all_its_blocks(
    scope: Settings, tmp_path: Path, children: Children
) -> None:
    """Two workers share a partition and one of them falls silent; answers about the other one never degrade."""
    settings = replace(scope, worker_grace_s=1.0)
    worker = Stack(settings, tmp_path, children).worker()
    one = next(n for n in range(1, 100) if partition_of(n, settings.partitions) == 0)
    other = next(n for n in range(one + 1, 100) if partition_of(n, settings.partitions) == 0)
    shaky, steady = Bridge(settings, one, 1500), Bridge(settings, other, 60_000)

    def rank_of(worker_id: int) -> dict[str, Any]:
        ranks = get_json(f"{worker.url}/state")["ranks"]
        return next(rank for rank in ranks if rank["worker_id"] == worker_id)

    def await_that(condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, VISIBLE_TIMEOUT_S, what)

    for worker_id, bridge in ((one, shaky), (other, steady)):
        put_worker(worker.url, worker_id)
        bridge.publish(batch(BEFORE_FIRST))
        bridge.renew()
        bridge.publish(batch(0, stored(names(4), u64(1, 2, 3, 4))))
    await_that(lambda: len(facts(worker.url)) == 8, "both workers' blocks")
    with shaky.renewing():
        await_that(lambda: route(worker.url)["mode"] == "exact", "exact answers")
        assert candidates(worker.url) == [one, other]
    with steady.publishing():
        await_that(lambda: candidates(worker.url) == [other], "the silent worker to get no requests")
    assert route(worker.url)["mode"] == "exact"
    listed = {each["worker_id"]: each["silent_dp_ranks"] for each in get_json(f"{worker.url}/workers")["workers"]}
    assert listed == {one: [0], other: []}

    await_that(lambda: rank_of(one)["health"] == "removed", "its removal")
    assert (rank_of(one)["silent"], rank_of(one)["blocks"], rank_of(other)["blocks"]) == (True, 0, 4)
    assert candidates(worker.url) == [other] and route(worker.url)["mode"] == "exact"

    with shaky.renewing():
        await_that(lambda: rank_of(one)["health"] == "degraded", "the worker to return")
        partition = partition_of(one, settings.partitions)
        await_that(lambda: bool(requests_on_control(settings, partition)), "a resync request")
        request = requests_on_control(settings, partition)[0]
        assert (request.rank.worker_id, request.incarnation, request.sequence) == (one, 1, 0)
        shaky.publish(*chunks(0, run(2, 3), run(0, 1)))
        await_that(lambda: rank_of(one)["health"] == "exact", "the restatement")
        blocks = {block for worker_id, _, _, block in facts(worker.url) if worker_id == one}
        assert blocks == set(chain_hashes([1, 2, 3, 4]))
        await_that(lambda: route(worker.url)["mode"] == "exact", "exact answers again")
        assert candidates(worker.url) == [one, other]
        shaky.publish(batch(1))
        await_that(lambda: rank_of(one)["sequence"] == 1, "its next batch")
        assert rank_of(one)["health"] == "exact"
    assert dead_letters(settings) == []

"""Partition owners that come back, brokers that were away, and topics that are recreated: no answer is exact and old.

An engine stores one block after another of one prompt, so the overlap of each answer shows how old its knowledge is.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

import numpy as np
import pytest

from streams.core.events import BlocksStored
from streams.core.ids import EngineHash
from streams.engines.publisher import KvEventPublisher
from streams.kafka.clients import delete_topics, ensure_topics, partition_of
from streams.lab.kafka.broker import LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, get_json
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import TopicSpec, topics
from tests.helpers.api import Api, metrics
from tests.helpers.broker import BreakableKafka
from tests.helpers.trust import PATIENCE_S, WATCH_EVERY_S, Sample

BLOCK_SIZE = 16

#: The engine stores a block this often. A prompt of N_BLOCKS blocks takes longer than any test.
STORE_EVERY_S = 0.05
N_BLOCKS = 1500

#: `behind_after_ms`, by which an exact answer may lag, and what delivery may take while two cores are busy.
TOLERATED_S = 1.0 + 1.0

#: How long a fault lasts, in the short form and in the long one.
FAULT_S = (4.0, 12.0)

#: Batches of another engine that are published while no owner is running. An owner needs seconds for them.
BACKLOG_BATCHES = (10_000, 100_000)

#: Watching goes on for this long after answers are exact again.
AFTERWARDS_S = 0.5

_FOLLOWED = "kvstreams_agent_standby_partitions/current"
_TAKEN_OVER = "kvstreams_agent_takeovers_total"

_numbers = itertools.count(1)


class StoringEngine:
    """An engine that stores blocks of one prompt, one after another, in a thread of its own. local: all of them."""

    def __init__(self, settings: Settings, worker_id: int, model: str) -> None:
        self.local = np.random.default_rng(worker_id).integers(1, 1 << 62, N_BLOCKS, dtype=np.uint64)
        self._publisher = KvEventPublisher(settings, worker_id, model)
        self._stored_s: list[float] = []  # when each block was stored; the producer may send it much later
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    def held_at(self, time_s: float) -> int:
        """Number of blocks that the engine held at a time."""
        return bisect_right(self._stored_s, time_s)

    def stop(self) -> None:
        """Stop storing, and wait until everything is in the log."""
        self._stopping.set()
        self._thread.join()
        self._publisher.close()

    def _run(self) -> None:
        for number in range(N_BLOCKS):
            if self._stopping.wait(STORE_EVERY_S):
                return
            self._stored_s.append(time.monotonic())
            parent = EngineHash(number) if number else None
            engine = np.array([number + 1], dtype=np.uint64)
            self._publisher.publish([BlocksStored(parent, engine, self.local[number : number + 1])])


@dataclass
class Watched:
    """Answers about one engine that stores blocks. n_reading: refusals, since the router was reading its topics."""

    engine: StoringEngine
    worker_id: int
    samples: list[Sample] = field(default_factory=list)
    n_reading: int = 0

    def wrong(self) -> list[str]:
        """Describe the answers that say exact, with an overlap that the engine did not have in the last moments."""
        found = []
        for sample in self.samples:
            least = self.engine.held_at(sample.sent_s - TOLERATED_S)
            most = self.engine.held_at(sample.received_s)
            if sample.mode == "exact" and not least <= sample.overlap <= most:
                at_s = sample.sent_s - self.samples[0].sent_s
                found.append(f"after {at_s:.2f} s: exact {sample.overlap}, not {least} to {most}")
        return found

    def reasons(self) -> set[str]:
        """Every reason for which an answer was degraded."""
        return {sample.answer["degraded_because"] for sample in self.samples if sample.mode == "degraded"}


class Rig:
    """A broker that tests may stop, one worker without a router, and one router."""

    def __init__(self, broker: BreakableKafka, stack: Stack) -> None:
        self.broker = broker
        self.stack = stack
        self.worker = stack.worker("owner", router=False)
        self.router = stack.router("router")
        self.api = Api(self.router.url)

    def worker_id(self, partition: int | None = None) -> int:
        """Return an id that no other test uses."""
        n = self.stack.settings.partitions
        return next(each for each in _numbers if partition is None or partition_of(each, n) == partition)

    def register(self, worker_id: int, model: str) -> None:
        body = {"url": "http://nowhere", "model": model, "block_size": BLOCK_SIZE}
        self.api.call("PUT", f"/workers/{worker_id}", body).given()

    def publish_backlog(self, worker_id: int, n_batches: int) -> None:
        """Publish what an owner needs seconds for, to the partition of a worker."""
        other = self.worker_id(partition_of(worker_id, self.stack.settings.partitions))
        with KvEventPublisher(self.stack.settings, other, "backlog") as publisher:
            for number in range(1, n_batches + 1):
                blocks = np.arange(number * 100, number * 100 + 8, dtype=np.uint64)
                publisher.publish([BlocksStored(None, blocks, blocks)])

    @contextmanager
    def watching(self) -> Iterator[Watched]:
        """Watch an engine that stores blocks while the block runs, from exact answers to exact answers."""
        worker_id = self.worker_id()
        model = f"m{worker_id}"
        self.register(worker_id, model)
        engine = StoringEngine(self.stack.settings, worker_id, model)
        watched, stopping = Watched(engine, worker_id), threading.Event()
        body = json.dumps({"model": model, "block_hashes": engine.local.tolist(), "update_states": False}).encode()

        def ask() -> None:
            while not stopping.wait(WATCH_EVERY_S):
                sent_s = time.monotonic()
                try:
                    answer = self.api.call("POST", "/route", body)
                except (OSError, HTTPException):
                    continue
                if answer.status == 200:
                    watched.samples.append(Sample(sent_s, time.monotonic(), answer.json))
                elif "partitions_left" in answer.json["error"]["detail"]:
                    watched.n_reading += 1

        def exact_for(n: int, after: int = 0) -> bool:
            newest = watched.samples[after:][-n:]
            return len(newest) == n and all(sample.mode == "exact" for sample in newest)

        thread = threading.Thread(target=ask, name="watch")
        thread.start()
        try:
            wait_for(lambda: exact_for(10), PATIENCE_S, "exact answers")
            yield watched
            n_before = len(watched.samples)
            wait_for(lambda: exact_for(10, n_before), PATIENCE_S * 2, "exact answers again")
            time.sleep(AFTERWARDS_S)
        finally:
            stopping.set()
            thread.join()
            engine.stop()
        assert not watched.wrong()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Start a broker, a worker and a router of their own, since these tests stop them."""
    directory = tmp_path_factory.mktemp("owners")
    config = LocalKafkaConfig(directory / "kafka", {"group.min.session.timeout.ms": "1000"})
    broker = BreakableKafka(config)
    settings = Settings(
        kafka=broker.up().bootstrap,
        topic_prefix="owners-",
        partitions=2,
        session_timeout_s=2.0,
        transaction_timeout_ms=2000,
        data_dir=str(directory / "state"),
    )
    try:
        with Children() as children:
            yield Rig(broker, Stack(settings, directory, children))
    finally:
        broker.down()


def test_an_owner_that_was_killed_and_comes_back_is_behind_until_it_has_read_to_the_end(
    rig: Rig, long_form: bool
) -> None:
    """From the kill to the last record of the backlog, no exact answer is older than the tolerance."""
    with rig.watching() as watched:
        rig.worker.child.kill()
        began = time.monotonic()
        rig.publish_backlog(watched.worker_id, BACKLOG_BATCHES[long_form])
        time.sleep(max(0.0, began + FAULT_S[long_form] - time.monotonic()))
        rig.stack.restart_worker(rig.worker)
    assert {"owner_silent", "owner_behind"} <= watched.reasons()


@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_a_broker_that_was_away_makes_answers_degraded_until_everything_is_delivered(
    rig: Rig, long_form: bool, fault: str
) -> None:
    """Its logs lack what engines could not send meanwhile, and neither owner nor router can know what that is."""
    with rig.watching() as watched:
        if fault == "paused":
            rig.broker.pause()
            time.sleep(FAULT_S[long_form])
            rig.broker.resume()
        else:
            rig.broker.kill()
            time.sleep(FAULT_S[long_form] if long_form else 0.0)  # starting takes seconds anyway
            rig.broker.up()
    assert "owner_behind" in watched.reasons()


def test_no_answer_is_exact_and_old_while_partitions_move(rig: Rig, long_form: bool) -> None:
    """A second worker joins, takes partitions, and is killed; the first one, their standby, takes them back."""
    with rig.watching() as watched:
        second = rig.stack.worker("second", router=False)
        wait_for(lambda: "is open" in second.child.log_path.read_text(), PATIENCE_S, "a partition to move")
        first = Api(rig.worker.url)
        wait_for(lambda: metrics(first)[_FOLLOWED] > 0, PATIENCE_S, "the first one to follow that partition")
        n_before = metrics(first)[_TAKEN_OVER]
        time.sleep(1.0 + FAULT_S[long_form] / 4)
        second.child.kill()
        wait_for(lambda: metrics(first)[_TAKEN_OVER] > n_before, PATIENCE_S, "the standby to take over")
    assert watched.samples


def ready(process: RouterProcess) -> tuple[bool, list[str]]:
    answer: dict[str, Any] = get_json(f"{process.url}/ready")
    return answer["ready"], answer["topics_missing"]


def recreate(rig: Rig, spec: TopicSpec, *, at_once: bool = False) -> None:
    """Delete a topic, wait until the router is not ready unless it happens at once, and create the topic again."""
    delete_topics(rig.stack.settings, [spec])
    if not at_once:
        wait_for(lambda: ready(rig.router) == (False, [spec.name]), PATIENCE_S, "the router to miss its topic")
        assert spec.name in get_json(f"{rig.router.url}/ready")["reason"]
    ensure_topics(rig.stack.settings, [spec])
    wait_for(lambda: ready(rig.router) == (True, []), PATIENCE_S, "the router to be ready again")


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("changelog", ["index", "pooled"])
def test_a_changelog_that_is_recreated_under_its_owner_makes_no_answer_exact_and_wrong(
    rig: Rig, changelog: str, at_once: bool
) -> None:
    """What the owner writes to the new one before it notices is not exact: the rows written before are missing."""
    names = topics(rig.stack.settings)
    n_logged = recreations_logged(rig.router)
    with rig.watching() as watched:
        recreate(rig, names.index_changelog if changelog == "index" else names.cxl_changelog, at_once=at_once)
        wait_for(lambda: recreations_logged(rig.router) > n_logged, PATIENCE_S, "the router to notice it")
        n_before = watched.n_reading  # until it begins to read, the router answers from what it has read before
        wait_for(lambda: watched.n_reading > n_before, PATIENCE_S, "the router to read its topics again")


def recreations_logged(process: RouterProcess) -> int:
    lines = process.child.log_path.read_text().splitlines()
    return len([line for line in lines if "WARNING" in line and "deleted and recreated" in line])


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
def test_events_are_consumed_again_after_their_topic_was_deleted_and_recreated(rig: Rig, at_once: bool) -> None:
    """The ranks are degraded because records may be lost, the worker says so in one line, and new records apply."""
    settings = rig.stack.settings
    spec = topics(settings).kv_events
    worker_id = rig.worker_id()
    model = f"m{worker_id}"
    n_logged = recreations_logged(rig.worker)
    rig.register(worker_id, model)

    def answer() -> tuple[str, str | None, int]:
        asked = rig.api.ask(model=model, block_hashes=[11, 12])
        return asked["mode"], asked.get("degraded_because"), asked["overlap_blocks"]

    def becomes(*expected: object) -> None:
        wait_for(lambda: answer() == expected, PATIENCE_S, f"{expected}")

    local = np.array([11, 12], dtype=np.uint64)
    with KvEventPublisher(settings, worker_id, model) as publisher:
        publisher.publish([BlocksStored(None, local[:1], local[:1])])
        becomes("exact", None, 1)
        recreate(rig, spec, at_once=at_once)
        becomes("degraded", "events_lost", 1)
        publisher.publish([BlocksStored(EngineHash(11), local[1:], local[1:])])
        becomes("degraded", "events_lost", 2)
        publisher.cleared()
        becomes("exact", None, 0)
    assert recreations_logged(rig.worker) == n_logged + 1


def test_a_router_reads_its_topics_again_after_they_were_deleted_and_recreated(rig: Rig) -> None:
    """What is written to the new topics arrives; without a restart it would never be read."""
    recreate(rig, topics(rig.stack.settings).workers)
    worker_id = rig.worker_id()
    rig.register(worker_id, "again")
    wait_for(lambda: set(rig.api.workers()) == {worker_id}, PATIENCE_S, "the registry as it is now")

"""Topics that a bridge writes and reads are deleted and recreated while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from streams.core.events import ResyncRequest
from streams.core.ids import WorkerId
from streams.core.workers import Worker
from streams.engines.registry_reader import RegistryReader
from streams.kafka.clients import delete_topics, ensure_topics, partition_of, producer, worker_key
from streams.kafka.records import encode_worker
from streams.lab.processes import Children
from streams.lab.stack import Stack
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.trust import PATIENCE_S, TrustFleet, engine_option

N_BLOCKS = 20

#: Lines that a bridge may log while its topics are away, for one engine: an outage is logged once a minute.
LINES_MAX = 40

#: How long a topic is away, so that its deletion has ended when it is created again.
AWAY_S = 3.0


def test_a_bridge_outlives_the_deletion_of_its_topics(stack: Stack, children: Children) -> None:
    """It neither ends nor fills its log; once the topics are back, its engine is registered and gets requests again."""
    fleet = TrustFleet(stack, stack.worker(), children)
    specs, model = topics(stack.settings), fleet.model()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=model) as engine:
        engine.store(1000, N_BLOCKS)
        bridge = fleet.bridge(engine_option(1, engine))
        fleet.wait_exact(model, prompt, N_BLOCKS)
        n_before = len(bridge.log_path.read_text().splitlines())
        delete_topics(stack.settings, [specs.workers, specs.kv_events])
        wait_for(lambda: fleet.api.call("GET", "/ready").status == 503, PATIENCE_S, "the router to notice")
        engine.store(5000)
        ensure_topics(stack.settings, specs.all())
        engine.clear()
        engine.store(1000, 3)

        def chosen_with_blocks() -> bool:
            answer = fleet.answered(model, prompt)
            return answer.status == 200 and answer.json["overlap_blocks"] == 3

        wait_for(chosen_with_blocks, 2 * PATIENCE_S, "the engine to get requests again")
        assert bridge.running
        lines = bridge.log_path.read_text().splitlines()[n_before:]
        assert len(lines) < LINES_MAX, lines
        assert not [line for line in lines if "Traceback" in line]


def test_ranks_without_a_batch_are_known_again_after_their_topic_was_recreated(
    stack: Stack, children: Children
) -> None:
    """An idle engine is exact, since its replay socket shows that it is empty; one without events is predicted."""
    fleet = TrustFleet(stack, stack.worker(), children)
    spec, idle_model, eventless_model = topics(stack.settings).kv_events, fleet.model(), fleet.model()
    prompt = range(1000, 1000 + N_BLOCKS * BLOCK_SIZE)
    with EngineDouble(model=idle_model) as idle, EngineDouble(model=eventless_model) as eventless:
        fleet.bridge(engine_option(1, idle), f"id=2,url={eventless.url}")

        def are_known() -> None:
            fleet.wait_exact(idle_model, prompt, 0)
            fleet.wait_answer(eventless_model, prompt, lambda found: found["mode"] == "approximate", "a prediction")

        are_known()
        delete_topics(stack.settings, [spec])
        for model in (idle_model, eventless_model):
            fleet.wait_answer(model, prompt, lambda found: found["mode"] == "degraded", "the loss to be noticed")
        ensure_topics(stack.settings, topics(stack.settings).all())
        are_known()
        idle.store(1000, N_BLOCKS)
        fleet.wait_exact(idle_model, prompt, N_BLOCKS)


class Listener:
    """Keeps the last record of a worker, and counts them."""

    def __init__(self) -> None:
        self.n = 0
        self.url = ""

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        assert (worker_id, worker is not None) == (1, True)
        self.n, self.url = self.n + 1, "" if worker is None else worker.url

    def on_end(self, worker_ids: Collection[WorkerId]) -> None:
        pass

    def on_resync(self, request: ResyncRequest) -> None:
        raise AssertionError(request)

    def on_any_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        raise AssertionError(worker_id, worker)

    def on_record(self, key: bytes, value: bytes | None) -> None:
        raise AssertionError(key, value)

    def on_registry_read(self) -> None:
        pass


def register(settings: Settings, url: str, n: int) -> None:
    """Write a worker's record n times."""
    kafka = producer(settings)
    for _ in range(n):
        kafka.produce(
            topics(settings).workers.name,
            key=worker_key(WorkerId(1)),
            value=encode_worker(Worker(WorkerId(1), url, "m", BLOCK_SIZE)),
            partition=partition_of(WorkerId(1), settings.partitions),
        )
    assert kafka.flush(PATIENCE_S) == 0


def test_a_registry_that_is_recreated_is_read_again_from_its_beginning(scope: Settings) -> None:
    """Also if the recreated topic has as many records as were read, so that the client notices nothing."""
    ensure_topics(scope, topics(scope).all())
    listener = Listener()

    async def until_url(url: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while listener.url != url:
                await asyncio.sleep(0.05)

    async def main() -> None:
        reader = RegistryReader(scope, listener)
        reader.watch(WorkerId(1))
        reading = asyncio.create_task(reader.run())
        await asyncio.to_thread(register, scope, "http://h:1", 100)
        await until_url("http://h:1")
        for port in (2, 3):
            delete_topics(scope, [topics(scope).workers])
            await asyncio.sleep(AWAY_S)
            await asyncio.to_thread(ensure_topics, scope, topics(scope).all())
            await asyncio.to_thread(register, scope, f"http://h:{port}", 3)
            await until_url(f"http://h:{port}")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(main())

"""Block sizes of models as records on a real Kafka: who writes them, and which processes are refused."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from streams.core.workers import ServedModel
from streams.engines.publisher import KvEventPublisher
from streams.errors import BlockSizeContradicted, KvStreamsError
from streams.kafka.clients import describe_topics, ensure_topics, partition_of_key, producer
from streams.kafka.records import MODELS
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port
from streams.lab.stack import Stack, wait_workers
from streams.model_registry import check_model, check_models, claim_model, delete_models, registered_models
from streams.process.waiting import wait_for
from streams.reset import reset_scope
from streams.settings import Settings, as_environ
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.api import PATIENCE_S, Api, served
from tests.helpers.commands import Run, Start

RACES = 6


def write(settings: Settings, block_size: int | None) -> None:
    """Write a record without reading anything, as a writer does that is ended before it reads back."""
    kafka = producer(settings)
    value = None if block_size is None else MODELS.encode(ServedModel("m", block_size, "a test", 1))
    kafka.produce(topics(settings).workers.name, key=MODELS.keys.pack("m"), value=value)
    assert kafka.flush(PATIENCE_S) == 0


def sizes(settings: Settings) -> dict[str, int]:
    return {name: model.block_size for name, model in registered_models(settings).items()}


@pytest.fixture
def small(scope: Settings) -> Settings:
    """Give settings with blocks of 16 tokens, in a scope whose topics exist."""
    ensure_topics(scope, topics(scope).all())
    return scope


def test_the_first_writer_of_a_model_wins(small: Settings) -> None:
    """A process with another size is refused, with both sizes and the remedy; other models are not affected."""
    large = replace(small, block_size=32)
    assert claim_model(small, "m", "bridge a").block_size == 16
    assert claim_model(small, "m", "bridge b").writer == "bridge a"
    with pytest.raises(BlockSizeContradicted, match=r"blocks of 32 tokens.* it has blocks of 16") as refused:
        claim_model(large, "m", "bridge c")
    assert "block_size" in refused.value.remedy and "kvstreams reset" in refused.value.remedy
    assert refused.value.detail == {"model": "m", "block_size": 32, "scope_block_size": 16}
    with pytest.raises(BlockSizeContradicted):
        check_model(large, "m")
    with pytest.raises(BlockSizeContradicted):
        check_models(large)
    check_model(large, "other")  # without a record, nothing is written
    assert claim_model(replace(large, model_block_sizes={"m": 16}), "m", "router").block_size == 16
    claim_model(large, "n", "bridge c")
    assert sizes(small) == {"m": 16, "n": 32}
    assert delete_models(small) == 2
    assert sizes(small) == {}
    assert claim_model(large, "m", "bridge c").block_size == 32


def test_writers_that_race_agree_on_the_first_record(small: Settings) -> None:
    """Of several writers with two sizes, all with one size succeed and the others are refused, in every race."""
    outcomes: dict[str, list[tuple[int, bool]]] = {f"m{race}": [] for race in range(RACES)}

    def claim(model: str, block_size: int, together: threading.Barrier) -> None:
        together.wait()
        try:
            claim_model(replace(small, block_size=block_size), model, "a thread")
            outcomes[model].append((block_size, True))
        except BlockSizeContradicted:
            outcomes[model].append((block_size, False))

    for model in outcomes:
        together = threading.Barrier(4)
        threads = [threading.Thread(target=claim, args=(model, size, together)) for size in (16, 32, 16, 32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = sizes(small)
    for model, results in outcomes.items():
        assert sorted(results) == sorted((size, size == found[model]) for size in (16, 32, 16, 32)), model


def test_a_loser_that_ended_before_it_read_back_is_corrected(small: Settings) -> None:
    """The next writer restores the first record, since compaction would keep the last one."""
    write(small, 16)
    write(small, 32)
    assert sizes(small) == {"m": 16}
    with pytest.raises(BlockSizeContradicted):
        claim_model(replace(small, block_size=32), "m", "router")
    seen: list[int] = []

    home = partition_of_key(MODELS.keys.pack("m"), small.partitions)
    read_to_end(
        small,
        topics(small).workers.name,
        home,
        None,
        lambda records: seen.extend(
            MODELS.decode_row(record.key, record.value).block_size
            for record in records
            if record.key == MODELS.keys.pack("m")
        ),
    )
    assert seen == [16, 32, 16]


def test_processes_that_contradict_a_models_record_are_refused_at_start(stack: Stack, run: Run) -> None:
    """A router, a Faust worker, a bridge and a publisher each end with both sizes in their message."""
    settings = stack.settings
    ensure_topics(settings, topics(settings).all())
    claim_model(settings, "demo-model", "a test")
    large = replace(settings, block_size=32, port=free_port())
    (engine,) = stack.engines(1, EngineConfig(block_size=32, n_blocks=64), "demo-model", 100.0)
    address = f"id=1,url={engine.url},events={engine.events},replay={engine.replay}"
    for command in (["router"], ["worker"], ["bridge", "--engine", address]):
        done = run(*command, env=as_environ(large))
        assert done.returncode == 1, command
        assert "blocks of 32 tokens" in done.stderr and "it has blocks of 16" in done.stderr, command
        assert "Traceback" not in done.stderr, command
    with pytest.raises(BlockSizeContradicted, match="blocks of 32 tokens"):
        KvEventPublisher(large, worker_id=1, model="demo-model")
    assert sizes(settings) == {"demo-model": 16}


def test_a_reset_deletes_the_models(stack: Stack) -> None:
    """After a reset the scope can be used with another block size; its workers stay registered."""
    settings = stack.settings
    ensure_topics(settings, topics(settings).all())
    with served(settings) as api:
        api.call("PUT", "/workers/1", {"url": "http://e", "model": "m", "block_size": 16}).given()
        api.call("PUT", "/workers/1/cordon").given()
        assert sizes(settings) == {"m": 16}
        assert api.workers()[1]["model_block_size"] == 16
        assert reset_scope(settings, force=True).models == 1
        wait_for(lambda: api.workers()[1]["model_block_size"] is None, PATIENCE_S, "the router to know")
        assert api.workers()[1]["state"] == "cordoned"
    assert claim_model(replace(settings, block_size=32), "m", "a test").block_size == 32


def test_a_bridge_whose_scope_has_no_topics_waits_and_creates_none(scope: Settings, start: Start, run: Run) -> None:
    """The bridge says what is missing and names both remedies, and begins as soon as the topics exist."""
    specs = topics(scope).all()
    process = start("bridge", "--engine", "id=1,url=http://127.0.0.1:1,events=tcp://127.0.0.1:1", env=as_environ(scope))
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    line = next(line for line in lines if "missing" in line)
    assert "10 topics of this scope are missing" in line and specs[0].name in line
    assert "kvstreams topics create" in line and "a worker that starts" in line
    assert set(describe_topics(scope, specs).values()) == {None}
    assert run("topics", "create", env=as_environ(scope)).returncode == 0
    assert any(
        "does not name the engine's model" in line for line in lines
    )  # it begins; the test's own time limit ends a hang


def test_a_reset_of_a_scope_without_topics_creates_none(scope: Settings, start: Start, run: Run) -> None:
    """`kvstreams reset` is refused, and a router that resets at start waits for the topics."""
    specs = topics(scope).all()
    done = run("reset", env=as_environ(scope))
    assert done.returncode == 1
    assert "10 topics of this scope are missing" in done.stderr and "kvstreams topics create" in done.stderr
    api = Api(f"http://127.0.0.1:{free_port()}")
    start("router", "--router-reset-states", "--port", api.url.rpartition(":")[2], env=as_environ(scope))

    def not_ready() -> bool:
        try:
            return api.call("GET", "/ready").status == 503
        except OSError:
            return False

    wait_for(not_ready, PATIENCE_S, "the router to serve")
    assert set(describe_topics(scope, specs).values()) == {None}
    ensure_topics(scope, specs[:3])
    done = run("router", "--router-reset-states", env=as_environ(replace(scope, port=free_port())))
    assert done.returncode == 1
    assert "7 topics of this scope are missing" in done.stderr


def test_a_publisher_of_a_scope_without_topics_is_refused_and_creates_none(scope: Settings) -> None:
    """The message names both remedies."""
    with pytest.raises(KvStreamsError, match="has no topic") as refused:
        KvEventPublisher(scope, worker_id=1, model="m")
    assert "kvstreams topics create" in refused.value.remedy and "a worker that starts" in refused.value.remedy
    assert set(describe_topics(scope, topics(scope).all()).values()) == {None}


def test_a_bridge_of_several_engines_feeds_those_that_it_may(stack: Stack) -> None:
    """A model whose record contradicts the settings keeps only its own engines from being fed."""
    settings = stack.settings
    worker = stack.worker()
    claim_model(replace(settings, block_size=32), "other", "a test")
    (refused,) = stack.engines(1, EngineConfig(block_size=16, n_blocks=64), "other", 100.0, 1)
    (fed,) = stack.engines(1, EngineConfig(block_size=16, n_blocks=64), "m", 100.0, 2)
    bridge = stack.bridge([refused, fed])
    wait_workers(worker.url, 1)
    assert list(Api(worker.url).workers()) == [2]
    assert bridge.running
    log = bridge.log_path.read_text()
    assert log.count("worker 1 is not fed") == 1

"""Changes of the registry while Kafka does not answer or the router reads late: what the caller learns and finds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Message

from streams.engines.publisher import KvEventPublisher
from streams.errors import KvStreamsError
from streams.kafka.clients import admin, consume, producer
from streams.lab.kafka.broker import LocalKafkaConfig
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.router_api.knowledge import topic_readers
from streams.router_api.sharing.registry import DELIVERY_TIMEOUT_MS, PUBLISH_TIMEOUT_S
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.api import PATIENCE_S, Answer, Api, served
from tests.helpers.broker import BreakableKafka
from tests.helpers.commands import Run, Start

AUTO_CREATE = {"auto.create.topics.enable": "true"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakableKafka]:
    """Give a broker of this module alone, which creates topics on demand; tests pause it and kill it."""
    own = BreakableKafka(LocalKafkaConfig(tmp_path_factory.mktemp("kafka"), AUTO_CREATE))
    own.up()
    yield own
    own.down()


def at_once(api: Api, calls: list[tuple[str, str]]) -> list[Answer]:
    """Make several calls that each wait for Kafka."""
    answers: dict[int, Answer] = {}

    def call(position: int, method: str, path: str) -> None:
        answers[position] = api.call(method, path)

    threads = [threading.Thread(target=call, args=(at, *each)) for at, each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[at] for at in range(len(calls))]


def test_a_change_that_kafka_does_not_confirm_has_an_unknown_outcome(broker: BreakableKafka, scope: Settings) -> None:
    """The answer is 503 with `outcome` unknown. Repeated when Kafka is back, the call succeeds; none comes late."""
    settings = replace(scope, kafka=broker.up().bootstrap)
    with served(settings) as api:
        for worker_id in range(1, 4):
            body = {"url": "http://e", "model": "m", "block_size": 16}
            api.call("PUT", f"/workers/{worker_id}", body).given()
        calls = [("PUT", "/workers/1/cordon"), ("DELETE", "/workers/2"), ("DELETE", "/workers/3/cordon")]
        broker.kill()
        began_s = time.monotonic()
        for answer in at_once(api, calls):
            assert "may have taken effect or not" in answer.refused(503, "not_ready")
            assert answer.json["error"]["detail"]["outcome"] == "unknown"
        assert time.monotonic() - began_s < PUBLISH_TIMEOUT_S + 5.0
        assert (api.workers()[1]["state"], 2 in api.workers()) == ("active", True)
        broker.up()
        time.sleep(3.0)  # a record that were still queued would be written now
        assert (api.workers()[1]["state"], 2 in api.workers()) == ("active", True)
        for _ in range(2):
            assert api.call("PUT", "/workers/1/cordon").given()["state"] == "cordoned"
            assert api.call("DELETE", "/workers/3/cordon").given() == {"worker_id": 3, "cordoned": False}
        assert api.call("DELETE", "/workers/2").given() == {"worker_id": 2, "removed": True}
        api.call("DELETE", "/workers/2").refused(404, "unknown_id")
        assert api.workers()[1]["state"] == "cordoned"
    assert DELIVERY_TIMEOUT_MS < PUBLISH_TIMEOUT_S * 1000


def test_a_deleted_worker_does_not_come_back_while_the_router_reads_late(
    scope: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router reads the registration after it has answered DELETE."""

    def late(consumer: Consumer, n_messages: int, timeout_s: float, collect_s: float = 0.0) -> list[Message]:
        messages = consume(consumer, n_messages, timeout_s, collect_s)
        if any(message.error() is None for message in messages):
            time.sleep(0.2)
        return messages

    monkeypatch.setattr(topic_readers, "consume", late)
    body = {"url": "http://e", "model": "m", "block_size": 16}
    with served(scope) as api:
        for worker_id in (1, 2, 3):
            api.call("PUT", f"/workers/{worker_id}", body).given()
            api.call("DELETE", f"/workers/{worker_id}").given()
            end_s = time.monotonic() + 0.6
            while time.monotonic() < end_s:
                assert worker_id not in api.workers()
                time.sleep(0.005)


def test_a_removal_that_took_effect_unconfirmed_is_confirmed_by_the_repeated_call(
    broker: BreakableKafka, scope: Settings
) -> None:
    """The broker takes the tombstone while its answer is late: the repeated call is answered with 200."""
    settings = replace(scope, kafka=broker.up().bootstrap)
    with served(settings) as api:
        body = {"url": "http://e", "model": "m", "block_size": 16}
        api.call("PUT", "/workers/1", body).given()
        broker.pause()
        (answer,) = at_once(api, [("DELETE", "/workers/1")])
        assert answer.json["error"]["detail"]["outcome"] == "unknown"
        broker.resume()  # what waits in the broker's socket is written now
        time.sleep(3.0)
        print(f"took effect: {1 not in api.workers()}")
        assert api.call("DELETE", "/workers/1").given() == {"worker_id": 1, "removed": True}
        assert 1 not in api.workers()
        api.call("DELETE", "/workers/1").refused(404, "unknown_id")


def names(settings: Settings) -> set[str]:
    found = admin(settings).list_topics(timeout=10.0).topics
    return {name for name in found if name.startswith(settings.topic_prefix)}


def test_no_client_creates_a_topic_on_a_broker_that_creates_them_on_demand(
    broker: BreakableKafka, scope: Settings, start: Start, run: Run
) -> None:
    """With a mistyped prefix, neither a bridge, a router, a reset nor a publisher leaves a topic behind."""
    settings = replace(scope, kafka=broker.up().bootstrap, topic_prefix="mistyped-", port=free_port())
    address = "id=1,url=http://127.0.0.1:1,events=tcp://127.0.0.1:1"
    bridge = start("bridge", "--engine", address, env=as_environ(settings))
    start("router", "--router-reset-states", env=as_environ(settings))
    assert run("reset", env=as_environ(settings)).returncode == 1
    with pytest.raises(KvStreamsError, match="has no topic"):
        KvEventPublisher(settings, 1, "m")
    kafka = producer(settings, **{"message.timeout.ms": 1000})
    kafka.produce(topics(settings).kv_events.name, b"x")
    kafka.flush(5.0)
    client = admin(settings)
    client.list_topics(topics(settings).workers.name, timeout=10.0)
    assert bridge.stderr is not None
    seen = list(
        itertools.takewhile(
            lambda line: "10 topics of this scope are missing" not in line, iter(bridge.stderr.readline, "")
        )
    )
    assert bridge.poll() is None, seen
    api = Api(f"http://127.0.0.1:{settings.port}")
    wait_for(lambda: is_reset(api), PATIENCE_S, "the router to wait for topics")
    assert names(settings) == set()


def is_reset(api: Api) -> bool:
    try:
        return len(api.call("GET", "/ready").json.get("topics_missing", ())) == 10
    except OSError:
        return False

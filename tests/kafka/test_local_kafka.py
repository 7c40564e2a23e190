"""The Kafka for one machine, with real brokers: they start, are found again, survive a kill, and fail readably."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from streams.errors import LocalKafkaError
from streams.lab.kafka import KAFKA_VERSION, LocalKafkaConfig
from streams.lab.kafka import broker as kafka
from tests.helpers.broker import BreakableKafka


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakableKafka]:
    """Give a broker's directory; each test calls `up`, which starts the broker only if the previous test ended it."""
    overrides = {"broker.session.timeout.ms": "1000"}  # what `up` waits for after `kill`
    local = BreakableKafka(LocalKafkaConfig(tmp_path_factory.mktemp("kafka") / "a café", overrides=overrides))
    yield local
    local.down()
    assert brokers_of(local.directory) == []


def brokers_of(directory: Path) -> list[int]:
    """Return the pids of all brokers that run on this directory, whatever state.json says."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if str(directory / "server.properties") in (process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def create_topic(bootstrap: str, name: str) -> None:
    client = AdminClient({"bootstrap.servers": bootstrap})  # kept until its requests have ended
    client.create_topics([NewTopic(name, 1, 1)])[name].result(30)


def produce(bootstrap: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def consume(bootstrap: str, topic: str, *, in_group: bool = False) -> bytes:
    """Return the first message, read as a member of a group, or faster without one."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": f"of-{topic}", "auto.offset.reset": "earliest"})
    try:
        if in_group:
            consumer.subscribe([topic])
        else:
            consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        message = consumer.poll(30)
    finally:
        consumer.close()
    assert message is not None
    assert message.error() is None
    value = message.value()
    assert isinstance(value, bytes)
    return value


# -- start and stop -------------------------------------------------------------------------------------------------


def test_a_message_goes_through_a_new_broker(broker: BreakableKafka) -> None:
    """A new broker takes a message from one client and gives it to another, and prints nothing."""
    state = broker.up()
    assert not state.reused
    assert state.notes == ()
    assert state.version == KAFKA_VERSION
    create_topic(state.bootstrap, "round-trip")
    produce(state.bootstrap, "round-trip", b"there and back")
    assert consume(state.bootstrap, "round-trip", in_group=True) == b"there and back"
    # Neither SLF4J nor the JVM warned, and the broker's own log is in its file.
    assert (broker.directory / "console.log").read_text() == ""
    assert "RUNNING" in (broker.directory / "server.log").read_text()


def test_a_second_up_finds_the_running_broker(broker: BreakableKafka) -> None:
    """If a broker runs, `up` returns it, even from another object, and `status` returns the same."""
    first = broker.up()
    again = BreakableKafka(broker.config).up()
    assert again.reused
    assert (again.pid, again.bootstrap) == (first.pid, first.bootstrap)
    assert broker.status() == again
    assert broker.answers()


def test_up_with_other_properties_notes_that_it_changed_nothing(broker: BreakableKafka) -> None:
    """A running broker is not restarted for other overrides; the result has a note about it."""
    first = broker.up()
    other = BreakableKafka(LocalKafkaConfig(broker.directory, overrides={"num.io.threads": "3"})).up()
    assert other.pid == first.pid
    assert len(other.notes) == 1


def test_a_killed_broker_comes_back_with_its_data_and_port(broker: BreakableKafka) -> None:
    """A message that was acknowledged before SIGKILL can be read after the next `up`, at the same address."""
    before = broker.up()
    create_topic(before.bootstrap, "survivor")
    produce(before.bootstrap, "survivor", b"still here")
    broker.kill()
    assert broker.status() is None
    assert brokers_of(broker.directory) == []
    after = broker.up()
    assert after.pid != before.pid
    assert not after.reused
    assert after.bootstrap == before.bootstrap
    assert consume(after.bootstrap, "survivor") == b"still here"


def test_a_paused_broker_runs_and_does_not_answer(broker: BreakableKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `pause` and `resume`, the process exists, `answers` is false, and the error of `up` gives the reason."""
    monkeypatch.setattr(kafka, "ANSWER_TIMEOUT_S", 0.3)
    state = broker.up()
    broker.pause()
    try:
        assert broker.status() is not None
        assert not broker.answers()
        with pytest.raises(LocalKafkaError, match="is paused"):
            broker.up()
    finally:
        broker.resume()
    monkeypatch.undo()
    assert broker.up().pid == state.pid


def test_down_leaves_no_process_and_may_be_repeated(broker: BreakableKafka) -> None:
    """`down` ends even a paused broker and returns whether there was one; `kill` then fails because none runs."""
    broker.up()
    broker.pause()
    assert broker.down()
    assert brokers_of(broker.directory) == []
    assert broker.status() is None
    assert not broker.answers()
    assert not broker.down()
    with pytest.raises(LocalKafkaError, match="No broker runs"):
        broker.kill()


def test_two_ups_at_once_start_one_broker(broker: BreakableKafka) -> None:
    """Of two simultaneous calls, one starts the broker and the other finds it."""
    broker.down()
    with ThreadPoolExecutor(2) as threads:
        states = list(threads.map(lambda _: BreakableKafka(broker.config).up(), range(2)))
    assert sorted(state.reused for state in states) == [False, True]
    assert brokers_of(broker.directory) == [states[0].pid] == [states[1].pid]


def test_a_port_that_another_server_has_taken_is_replaced(broker: BreakableKafka) -> None:
    """If another server uses the saved port, the broker starts on a new one, with its data and a note about it."""
    before = broker.up()
    broker.down()
    port = int(before.bootstrap.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        after = broker.up()
    assert after.bootstrap != before.bootstrap
    assert [note for note in after.notes if str(port) in note and after.bootstrap in note] == list(after.notes) != []
    assert after.bootstrap == broker.up().bootstrap


# -- starts that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "reason", "remedy"),
    [
        ({"log.dirs": "{file}"}, "No available log directories", "write permission"),
        ({"num.io.threads": "many"}, "Invalid value many for configuration num.io.threads", "property"),
        ({"authorizer.class.name": "no.such.Class"}, "ClassNotFoundException: no.such.Class", "class"),
        ({"listeners": "PLAINTEXT://0.0.0.0:9092"}, "sets listeners itself", "overrides"),
    ],
    ids=["data-in-a-file", "no-number", "no-class", "reserved"],
)
def test_the_error_of_a_broker_that_cannot_start_has_the_reason(
    tmp_path: Path, overrides: dict[str, str], reason: str, remedy: str
) -> None:
    """The error quotes Kafka's own reason and says what to do, and no process is left."""
    file = tmp_path / "file"
    file.touch()
    overrides = {key: value.format(file=file) for key, value in overrides.items()}
    local = BreakableKafka(LocalKafkaConfig(tmp_path / "kafka", overrides=overrides))
    with pytest.raises(LocalKafkaError, match=reason) as caught:
        local.up()
    assert remedy in caught.value.remedy
    assert brokers_of(local.directory) == []
    assert local.status() is None


def test_a_start_that_takes_too_long_is_ended(broker: BreakableKafka) -> None:
    """A broker that does not answer within `start_timeout_s` is killed, and the error says so."""
    broker.down()
    local = BreakableKafka(LocalKafkaConfig(broker.directory, start_timeout_s=0.1))
    with pytest.raises(LocalKafkaError, match=r"did not answer within 0\.1 s"):
        local.up()
    assert brokers_of(broker.directory) == []
    assert not local.down()


def test_an_interrupted_start_leaves_no_broker(broker: BreakableKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while `up` waits kills the broker that `up` has just started."""
    broker.down()

    def interrupted(_: BreakableKafka, saved: object) -> bool:
        assert len(brokers_of(broker.directory)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(BreakableKafka, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        broker.up()
    assert brokers_of(broker.directory) == []
    assert broker.status() is None

"""The command line as a process on a real Kafka: topics, and routers that start, wait and end."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from streams.kafka.clients import admin, describe_topics, ensure_topics
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.api import Api
from tests.helpers.commands import PATIENCE_S, Run, Start, assert_one_line


@pytest.mark.first_ring("topics")
def test_topics_are_created_once_and_described_as_wanted(scope: Settings, run: Run) -> None:
    """`topics create` creates all topics and may be repeated; `topics describe` then finds them as wanted."""
    names = [spec.name for spec in topics(scope).all()]
    done = run("topics", "describe", env=as_environ(scope))
    assert done.returncode == 1
    assert done.stdout.count("missing: kvstreams topics create") == len(names)
    first = run("topics", "create", env=as_environ(scope))
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines() == [f"{name}: partitions {scope.partitions}, replicas 1" for name in names]
    before = describe_topics(scope, topics(scope).all())
    again = run("topics", "create", env=as_environ(scope))
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert describe_topics(scope, topics(scope).all()) == before
    done = run("topics", "describe", env=as_environ(scope))
    assert (done.returncode, done.stderr) == (0, "")
    for name in names:
        assert any(line.split()[0] == name and "as wanted" in line for line in done.stdout.splitlines())


def test_another_number_of_partitions_is_refused(scope: Settings, run: Run) -> None:
    """The refusal names both numbers and the remedy, and the topics stay as they are."""
    ensure_topics(scope, topics(scope).all())
    before = describe_topics(scope, topics(scope).all())
    other = as_environ(replace(scope, partitions=scope.partitions + 1))
    described = run("topics", "describe", env=other)
    assert described.returncode == 1
    assert described.stdout.count("differs, see below") == len(before)
    line = assert_one_line(run("topics", "create", env=other))
    for text in (described.stdout, line):
        assert "has 4 partitions, but the settings have 5" in text
        assert "move to another topic_prefix" in text
    assert describe_topics(scope, topics(scope).all()) == before


def test_a_topic_with_other_settings_is_refused(scope: Settings, run: Run) -> None:
    """The refusal shows the command that fixes the topic, and nothing is altered."""
    name = topics(scope).workers.name
    client = admin(scope)
    client.create_topics([NewTopic(name, scope.partitions, 1)])[name].result(30)
    ensure_topics(scope, [spec for spec in topics(scope).all() if spec.name != name])
    before = describe_topics(scope, topics(scope).all())
    described = run("topics", "describe", env=as_environ(scope))
    assert described.returncode == 1
    assert described.stdout.count("differs, see below") == 1
    line = assert_one_line(run("topics", "create", env=as_environ(scope)))
    for text in (described.stdout, line):
        assert f"topic {name} has other settings: cleanup.policy is delete, not compact" in text
        assert f"--alter --entity-type topics --entity-name {name} --add-config 'cleanup.policy=[compact]," in text
        assert "segment.ms=[600000]'" in text
    assert describe_topics(scope, topics(scope).all()) == before


def test_a_refusal_of_kafka_is_quoted(scope: Settings, run: Run) -> None:
    """When the broker refuses to create a topic, its reason is printed; it is not reported as a missing Kafka."""
    line = assert_one_line(run("topics", "create", "--replication", "3", env=as_environ(scope)))
    assert f"topic {topics(scope).kv_events.name} cannot be created" in line
    assert "replication factor" in line


def test_a_router_reports_an_address_that_it_cannot_listen_on(scope: Settings, run: Run) -> None:
    """A port that is taken, or a host that is not local, is reported in one line."""
    taken = scope.kafka.rpartition(":")[2]  # the broker itself listens there
    done = run("router", "--port", taken, "--log-level", "error", env=as_environ(scope))
    assert f"cannot listen on 127.0.0.1:{taken}" in assert_one_line(done)
    others = replace(scope, allow_anonymous=True)
    done = run("router", "--host", "192.0.2.1", "--log-level", "error", env=as_environ(others))
    assert "cannot listen on 192.0.2.1" in assert_one_line(done)


def test_a_router_of_a_scope_without_topics_is_not_ready_and_creates_none(
    scope: Settings, start: Start, run: Run
) -> None:
    """The router explains what is missing, creates nothing, and becomes ready as soon as the topics exist."""
    api = Api(f"http://127.0.0.1:{free_port()}")
    process = start("router", "--port", api.url.rpartition(":")[2], env=as_environ(scope))
    assert process.stderr is not None
    assert "routing on" in process.stderr.readline()
    assert "kvstreams topics create" in process.stderr.readline()
    names = [spec.name for spec in topics(scope).all()]
    answer = api.call("GET", "/ready")
    assert (answer.status, answer.json["ready"], answer.json["topics_missing"]) == (503, False, names)
    assert "kvstreams topics create" in answer.json["reason"]
    for method, path, body in (
        ("POST", "/route", {"token_ids": [1]}),
        ("GET", "/loads", None),
        ("PUT", "/workers/1", {"url": "http://e", "model": "m", "block_size": 16}),
        ("PUT", "/pools/p", {"members": [1]}),
    ):
        assert "kvstreams topics create" in api.call(method, path, body).refused(503, "not_ready")
    assert api.call("GET", "/metrics").status == 200
    assert set(describe_topics(scope, topics(scope).all()).values()) == {None}
    assert run("topics", "create", env=as_environ(scope)).returncode == 0
    wait_for(lambda: api.call("GET", "/ready").status == 200, PATIENCE_S, "the router to be ready")
    assert api.call("PUT", "/pools/p", {"members": [1]}).given()["members"] == [1]


def test_a_router_ends_when_topics_appear_with_other_partitions(scope: Settings, start: Start) -> None:
    """A router that waits for its topics ends with the same remedy as one that finds such topics at its start."""
    process = start("router", "--port", "0", env=as_environ(scope))
    assert process.stderr is not None
    assert "routing on" in process.stderr.readline()
    ensure_topics(scope, topics(replace(scope, partitions=scope.partitions + 1)).all())
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "move to another topic_prefix" in rest.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_logs_json_and_ends_on_a_signal(number: signal.Signals, scope: Settings, start: Start) -> None:
    """With --log-json every line is a JSON object; after SIGTERM and Ctrl-C the exit status is 0."""
    process = start("router", "--port", "0", "--log-json", env=as_environ(scope))
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "routing on" in json.loads(first)["message"]
    process.send_signal(number)
    out, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    for line in rest.splitlines():
        assert set(json.loads(line)) >= {"at", "level", "logger", "message"}

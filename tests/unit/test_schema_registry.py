"""Schemas for others: registered in a registry, and described as AsyncAPI."""

from __future__ import annotations

import base64
import json
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fastavro
import pytest
from click.testing import CliRunner, Result

from streams.cli import cli
from streams.kafka.asyncapi import asyncapi
from streams.kafka.avro_frames import codec, schemas_dir
from streams.kafka.schema_registry import subjects
from streams.security.acls import TOPIC_OPERATIONS
from streams.settings import Settings, load
from streams.topics import topics
from tests.helpers.pages import block_of

SETTINGS = Settings(topic_prefix="team.")


@dataclass
class Registry:
    """A registry with the one call that is made, as Confluent documents it. An equal schema keeps its id."""

    url: str = ""
    password: str = ""
    refuses: str = ""
    ids: dict[str, int] = field(default_factory=dict)
    by_subject: dict[str, list[str]] = field(default_factory=dict)

    def registered(self, path: str, headers: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.password:
            given = base64.b64decode(headers.get("Authorization", "").removeprefix("Basic ")).decode()
            if given != f"me:{self.password}":
                return 401, {"error_code": 401, "message": "Unauthorized"}
        _, word, subject, last = path.split("/")
        if (word, last, headers["Content-Type"]) != ("subjects", "versions", "application/vnd.schemaregistry.v1+json"):
            return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
        if unquote(subject) == self.refuses:
            return 409, {"error_code": 409, "message": "Schema being registered is incompatible"}
        text = json.dumps(fastavro.parse_schema(json.loads(body["schema"])))  # what is no schema is an error here
        self.by_subject.setdefault(unquote(subject), []).append(text)
        return 200, {"id": self.ids.setdefault(text, 100 + len(self.ids))}


@pytest.fixture
def registry() -> Iterator[Registry]:
    """Give a running registry."""
    double = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = double.registered(self.path, self.headers, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        double.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield double
        server.shutdown()
        thread.join()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["schemas", *arguments, "--topic-prefix", SETTINGS.topic_prefix])


def test_every_schema_belongs_to_one_topic() -> None:
    """A schema that is added to the folder must be named in streams.topics."""
    named = [schema for spec in topics(SETTINGS).all() for schema in spec.schemas]
    assert sorted(named) == sorted(path.stem for path in schemas_dir().glob("*.avsc"))


@pytest.mark.first_ring("schemas")
def test_the_command_registers_every_schema_and_prints_the_setting(registry: Registry) -> None:
    """The setting has the ids as the processes read them; a second run gets the same ones."""
    command = shlex.split(block_of("docs/kafka.md", "kvstreams schemas register"))[2:]
    for _ in range(2):
        done = run(*(registry.url if word == "http://registry:8081" else word for word in command))
        assert done.exit_code == 0, done.output
        name, _, value = done.stdout.strip().partition("=")
        ids = load({}, {name: value}).settings.schema_ids
        assert ids == {each.schema: registry.ids[registry.by_subject[each.name][-1]] for each in subjects(SETTINGS)}
    assert len(set(ids.values())) == len(ids)
    names = set(registry.by_subject)
    assert {"team.kv-events-value", "team.workers-value", "team.workers-io.kvstreams.CordonRecord"} <= names
    assert not any(name.startswith("team.kv-dead-letters") for name in names)
    assert registry.by_subject["team.kv-events-value"][0] == json.dumps(
        fastavro.parse_schema(codec("kv-events").source)
    )


def test_a_registry_may_ask_for_a_password(registry: Registry, tmp_path: Path) -> None:
    """It comes from a file, and is not part of the error if it is wrong."""
    registry.password = "sesame"
    file = tmp_path / "password"
    file.write_text("sesame\n")
    assert run("register", "--url", registry.url, "--user", "me", "--password-file", str(file)).exit_code == 0
    registry.password = "another"
    done = run("register", "--url", registry.url, "--user", "me", "--password-file", str(file))
    assert "401" in str(done.exception)
    assert str(done.exception).endswith("--user and --password-file name the credentials for the registry")
    assert "sesame" not in str(done.exception)


def test_what_a_registry_refuses_is_named(registry: Registry) -> None:
    """The error has the subject and the registry's own words; what is no registry is named as well."""
    registry.refuses = "team.workers-value"
    done = run("register", "--url", registry.url)
    assert "workers of team.workers-value: 409" in str(done.exception)
    assert "incompatible" in str(done.exception)
    done = run("register", "--url", f"{registry.url}/elsewhere/x")
    assert done.exit_code == 1
    assert str(done.exception).endswith("Check --url")
    done = run("register", "--url", registry.url, "--ca", "no-file.pem")
    assert str(done.exception) == "--ca no-file.pem cannot be used: No such file or directory"
    for half in (("--user", "me"), ("--password-file", "file")):
        done = run("register", "--url", registry.url, *half)
        assert done.exit_code == 2
        assert "belong together" in done.output


def test_the_asyncapi_document_has_every_topic_record_and_operation() -> None:
    """Channels are our topics with their settings, messages our schemas, and operations what the ACLs allow."""
    document = json.loads(run("asyncapi").stdout)
    assert document == asyncapi(SETTINGS)
    assert {each["address"] for each in document["channels"].values()} == {each.name for each in topics(SETTINGS).all()}
    messages = document["components"]["messages"]
    for spec in topics(SETTINGS).all():
        (channel,) = [each for each in document["channels"].values() if each["address"] == spec.name]
        assert set(channel["messages"]) == set(spec.schemas or ("as-received",))
        topic = channel["bindings"]["kafka"]
        assert (topic["partitions"], topic["replicas"]) == (spec.partitions, spec.replication)
        assert topic["topicConfiguration"]["cleanup.policy"] == spec.config["cleanup.policy"].split(",")
        for schema in spec.schemas:
            assert messages[schema]["payload"]["schema"] == codec(schema).source
    found = {
        (name.split("-")[0], each["action"], each["channel"]["$ref"]) for name, each in document["operations"].items()
    }
    expected = {
        (process, action, f"#/channels/{field}")
        for process in ("worker", "router", "bridge", "publisher")
        for field, operations in TOPIC_OPERATIONS[process].items()
        for operation, action in (("Read", "receive"), ("Write", "send"))
        if operation in operations
    }
    assert found == expected

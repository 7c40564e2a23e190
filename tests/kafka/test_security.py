"""A real broker that requires TLS, SASL and ACLs: every mechanism with every client, and the least ACLs."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import aiokafka
import pytest
from confluent_kafka import TopicPartition
from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth

from streams.engines.publisher import KvEventPublisher
from streams.errors import KafkaRefused
from streams.kafka.clients import admin, assign, consume, describe_topics, ensure_topics, producer, reader
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Child, Children
from streams.lab.stack import Engine, Stack, get_json, held_blocks, known_blocks, wait_workers
from streams.process.waiting import wait_for
from streams.security import token_providers
from streams.security.acls import TOPIC_OPERATIONS, acls_of
from streams.security.faust_credentials import faust_credentials
from streams.settings import SaslMechanism, Settings, as_environ
from streams.topics import Topics, topics
from tests.helpers.api import Api, metrics
from tests.helpers.commands import Run, assert_one_line
from tests.helpers.posting import posting_server
from tests.helpers.secure_kafka import Decision, SecureKafka, unsigned_token

PATIENCE_S = 60.0

#: Operations that need events which this test does not cause: requests to bridges after lost records, and dead letters;
#: a bridge that continues another one's work, and engines with a pool; a publisher that is the first to serve a model;
#: a transition after others, or after batches, that the agents have not applied yet; a sample of --verify with blocks
#: in a pool.
RARE = {
    ("worker", "kv_control", "Write"),
    ("worker", "dead_letters", "Write"),
    ("bridge", "dead_letters", "Write"),
    ("bridge", "kv_events", "Read"),
    ("bridge", "cxl_events", "Read"),
    ("bridge", "cxl_events", "Write"),
    ("bridge", "cxl_changelog", "Read"),
    ("publisher", "workers", "Write"),
    ("cxl transition", "cxl_events", "Read"),
    ("cxl transition", "kv_events", "Read"),
    ("doctor", "cxl_changelog", "Read"),
}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """Give a broker of this module alone."""
    broker = SecureKafka(tmp_path_factory.mktemp("secure"))
    yield broker
    broker.stop()


@contextmanager
def token_endpoint(lifetime_s: float) -> Iterator[tuple[str, list[str]]]:
    """Serve a token endpoint; give its URL and the credentials of each request."""
    credentials: list[str] = []

    def answer(path: str, headers: Mapping[str, str], body: bytes) -> tuple[str, bytes]:
        credentials.append(headers["authorization"])
        given = {"access_token": unsigned_token("oidc", lifetime_s), "token_type": "bearer", "expires_in": lifetime_s}
        return "application/json", json.dumps(given).encode()

    with posting_server(answer) as url:
        yield f"{url}/token", credentials


def round_trip(settings: Settings, topic: str) -> None:
    """Write with librdkafka, and read with librdkafka and with Faust's client."""
    value = uuid.uuid4().bytes
    kafka = producer(settings)
    kafka.produce(topic, value, b"key", partition=0)
    assert kafka.flush(PATIENCE_S) == 0
    consumer = reader(settings)
    try:
        high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=PATIENCE_S)[1]
        assign(consumer, [TopicPartition(topic, 0, high - 1)])
        assert [message.value() for message in consume(consumer, 1, PATIENCE_S)] == [value]
    finally:
        consumer.close()

    async def with_faust() -> bytes:
        auth = credentials_to_aiokafka_auth(faust_credentials(settings))
        client = aiokafka.AIOKafkaConsumer(bootstrap_servers=settings.kafka, **auth)
        await client.start()
        try:
            where = aiokafka.TopicPartition(topic, 0)
            client.assign([where])
            client.seek(where, high - 1)
            record = await asyncio.wait_for(client.getone(), PATIENCE_S)
            return bytes(record.value)
        finally:
            await client.stop()

    assert asyncio.run(with_faust()) == value


def test_every_mechanism_works_with_every_client(
    secure: SecureKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PLAIN, both SCRAMs, and OAUTHBEARER with a file, a function and an endpoint, over TLS with a certificate."""
    owner = replace(secure.admin, topic_prefix="m-", partitions=1)
    ensure_topics(owner, topics(owner).all())
    topic = topics(owner).workers.name
    acls = acls_of("cxl pool", owner)

    round_trip(owner, topic)  # PLAIN
    for sha in (256, 512):
        round_trip(replace(secure.user(f"scram-{sha}", acls, sha), topic_prefix="m-"), topic)

    oauth = replace(
        owner, kafka_sasl_username="", kafka_sasl_password_file="", kafka_sasl_mechanism=SaslMechanism.OAUTHBEARER
    )
    for name in ("file", "oidc", "function"):
        secure.allow(name, acls)
    own = unsigned_token("function", 600.0), time.time() + 600.0
    monkeypatch.setitem(token_providers._BUILT_IN, "own", lambda _: own)
    round_trip(replace(oauth, kafka_oauth_provider="own"), topic)
    file = tmp_path / "token"
    file.write_text(unsigned_token("file", 600.0))
    round_trip(replace(oauth, kafka_oauth_token_file=str(file)), topic)
    with token_endpoint(600.0) as (url, credentials):
        provider = replace(
            oauth, kafka_oidc_token_url=url, kafka_oidc_client_id="me", kafka_oidc_client_secret="sesame"
        )
        round_trip(provider, topic)
        assert len(set(credentials)) == 1  # both clients send them in the same way


def test_a_token_is_read_again_by_a_client_that_is_idle(secure: SecureKafka, tmp_path: Path) -> None:
    """An admin client that nothing polls works after its token has expired, with the next token of the file."""
    owner = replace(secure.admin, topic_prefix="m-", partitions=1)
    ensure_topics(owner, topics(owner).all())
    secure.allow("idle", acls_of("cxl pool", owner))
    file = tmp_path / "token"
    file.write_text(unsigned_token("idle", 4.0))
    settings = replace(
        owner,
        kafka_sasl_username="",
        kafka_sasl_password_file="",
        kafka_sasl_mechanism=SaslMechanism.OAUTHBEARER,
        kafka_oauth_token_file=str(file),
    )
    client = admin(settings, None, **{"connections.max.idle.ms": 1000})
    client.list_topics(timeout=PATIENCE_S)
    file.write_text(unsigned_token("idle", 600.0))
    time.sleep(5.0)  # the first token has expired, and the connection was closed
    assert topics(owner).workers.name in client.list_topics(timeout=PATIENCE_S).topics


def test_credentials_that_are_refused_are_named_and_not_shown(secure: SecureKafka, run: Run, tmp_path: Path) -> None:
    """A wrong password, a missing certificate and an unknown authority each give one line, without the password."""
    user = secure.user("known")
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-sesame")
    cases = {
        "SASL authentication error": replace(user, kafka_sasl_password_file=str(wrong)),
        "SSL|certificate|ssl": replace(user, kafka_tls_certificate=""),
        "certificate verify failed": replace(user, kafka_tls_ca=""),
    }

    def refused(reason: str) -> str:
        settings = cases[reason]
        with pytest.raises(KafkaRefused, match=f"cannot be used with these credentials: .*({reason})") as caught:
            describe_topics(settings, topics(settings).all())
        return str(caught.value)

    # At the same time, since each of them waits for an answer until its time is over.
    with ThreadPoolExecutor(len(cases) + 1) as threads:
        command = threads.submit(run, "topics", "create", env=as_environ(cases["SASL authentication error"]))
        assert not any("sesame" in message for message in threads.map(refused, cases))
    line = assert_one_line(command.result())
    assert "SASL authentication error" in line and "sesame" not in line
    line = assert_one_line(run("topics", "describe", env=as_environ(user)))  # it has no ACLs
    assert "docs/security.md lists the ACLs" in line


def complete(engine: Engine, tokens: list[int]) -> None:
    body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.status == 200


def blocks_by_worker(url: str) -> set[tuple[int, int]]:
    """Pairs of a worker and the number of its blocks."""
    return set(Counter(worker_id for worker_id, _ in known_blocks(url)).items())


def unused_operations(decisions: set[Decision], scope: Settings) -> set[tuple[str, str, str]]:
    """Operations of the ACLs that the authorizer has allowed to nobody: process, field of Topics or name, operation."""
    fields = {getattr(topics(scope), field).name: field for field in Topics.__dataclass_fields__}
    allowed = [each for each in decisions if each.allowed]
    unused = set()
    for process in TOPIC_OPERATIONS:
        for acl, operation in ((each, operation) for each in acls_of(process, scope) for operation in each.operations):
            code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()
            names = {each.name for each in allowed if (each.user, each.operation) == (process.replace(" ", "-"), code)}
            if not any(name.startswith(acl.name) if acl.prefixed else name == acl.name for name in names):
                unused.add((process, fields.get(acl.name, acl.name), operation))
    return unused


@pytest.mark.long_running
def test_each_process_works_with_the_least_acls(
    secure: SecureKafka, run: Run, tmp_path: Path, children: Children
) -> None:
    """With exactly the ACLs of docs/security.md, nothing is denied and each ACL is used. No secret is shown."""
    scope = Settings(topic_prefix="least-", partitions=2, session_timeout_s=3.0, worker_grace_s=1.0, bridge_lease_s=2.0)
    users: dict[str, Settings] = {}
    for process in TOPIC_OPERATIONS:
        user = secure.user(process.replace(" ", "-"), acls_of(process, scope))
        names = [name for name in Settings.__dataclass_fields__ if name.startswith("kafka")]
        users[process] = replace(scope, **{name: getattr(user, name) for name in names})

    def ran(process: str, *arguments: str, status: int = 0) -> str:
        done = run(*process.split(), *arguments, env=as_environ(users[process]))
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    def stack(process: str) -> Stack:
        return Stack(users[process], tmp_path / process, children)

    output = [ran("topics create"), ran("topics describe"), ran("topics window", "1h")]
    worker = stack("worker").worker("worker", router=False)
    router = stack("router").router("router", decision_log=True)
    engines = stack("bridge").engines(1, EngineConfig(block_size=16, n_blocks=64), "m", time_scale=100.0)
    bridge = stack("bridge").bridge(engines)
    wait_workers(router.url, 1)
    complete(engines[0], list(range(320)))
    wait_for(lambda: known_blocks(router.url) == held_blocks(engines) != set(), PATIENCE_S, "the engine's blocks")
    api = Api(router.url)
    assert api.route(request_id="r1", token_ids=list(range(320)))["overlap_blocks"] >= 10
    api.call("DELETE", "/loads/r1").given()

    # A worker that an engine's own publisher feeds, with blocks in a pool.
    output.append(ran("cxl pool", "pool-1", "--member", "50"))
    api.call("PUT", "/workers/50", {"url": "http://engine:1", "model": "m", "block_size": 16}).given()
    with KvEventPublisher(users["publisher"], 50, "m") as publisher:
        publisher.stored([11, 12], token_ids=list(range(1000, 1032)))
        publisher.flush()
        wait_for(
            lambda: len([w for w, _ in known_blocks(router.url) if w == 50]) == 2, PATIENCE_S, "the publisher's blocks"
        )
        publisher.publish_cxl_state_transition(1, [11], "in_transit", "pool-1")
    transition = ("--worker-id", "50", "--state", "in_transit", "--pool-id", "pool-1", "--wait", "30", "12")
    output.append(ran("cxl transition", *transition))
    assert "applied" in output[-1]
    api.call("PUT", "/workers/50/cordon").given()
    api.call("DELETE", "/workers/50").given()

    # The decision log was written within a second.
    wait_for(lambda: metrics(api)["kvstreams_decisions_recorded_total"] >= 1, PATIENCE_S, "a recorded decision")
    output.append(ran("explain", "r1"))
    output.append(ran("replay-decisions", "--policy", "round-robin"))

    # The doctor may read everything that it needs, and finds nothing.
    output.append(ran("doctor", "--router", router.url, "--verify", "--json"))
    assert json.loads(output[-1])["findings"] == []
    output.append(ran("replay", "--verify", router.url))
    output.append(ran("replay", "--until", "0s"))

    # An engine that ends is removed after its grace, by the partition's owner.
    bridge.kill()
    wait_for(lambda: not known_blocks(router.url), PATIENCE_S, "the engine's blocks to be removed")
    assert get_json(f"{router.url}/ready")["ready"]
    arguments = [Path(f"/proc/{child.pid}/cmdline").read_bytes() for child in (worker.child, router.child)]
    children.stop()
    # Without --force, so that the group is asked for. Partition records must be older than stale_after_ms.
    time.sleep(scope.stale_after_ms / 1000 + 0.5)
    output.append(ran("reset"))
    output.append(run("config", env=as_environ(users["worker"])).stdout)

    decisions = secure.decisions()
    assert [each for each in decisions if each.name.startswith("least-") and not each.allowed] == []
    unused = unused_operations(decisions, scope)
    assert unused <= RARE, unused - RARE

    logs = "".join(log.read_text(errors="replace") for log in tmp_path.glob("*/logs/*.log"))
    for text in (logs, "".join(output), b"".join(arguments).decode()):
        assert text and "sesame" not in text


@pytest.mark.long_running
def test_a_move_works_with_the_least_acls(secure: SecureKafka, tmp_path: Path, children: Children) -> None:
    """With the ACLs that docs/replay.md names, a scope moves, and nothing is denied."""
    old = replace(secure.admin, topic_prefix="moved-old-", partitions=2)
    new = replace(secure.admin, topic_prefix="moved-new-", partitions=3)
    for scope in (old, new):
        ensure_topics(scope, topics(scope).all())
    acls = [*acls_of("replay", old), *acls_of("bridge", old), *acls_of("bridge", new)]
    user = secure.user("mover", acls)
    old_worker = Stack(old, tmp_path / "old", children).worker()
    new_worker = Stack(new, tmp_path / "new", children).worker()
    api = Api(old_worker.url)
    api.call("PUT", "/workers/50", {"url": "http://engine:1", "model": "m", "block_size": 16}).given()
    api.call("PUT", "/pools/p", {"members": [50]}).given()
    names = [name for name in Settings.__dataclass_fields__ if name.startswith("kafka")]
    environ = as_environ(replace(old, **{name: getattr(user, name) for name in names}))
    arguments = ["-m", "streams.cli", "replay", "--into", new.topic_prefix]
    moving = children.add(Child("move", arguments, tmp_path / "move.log", environ)).start()
    with KvEventPublisher(old, 50, "m") as publisher:
        publisher.stored([11, 12], token_ids=list(range(1000, 1032)))
        publisher.flush()
        for state in ("in_transit", "cxl_pooled"):
            publisher.publish_cxl_state_transition(1, [11], state, "p")
        publisher.flush()

        def moved() -> bool:
            assert moving.running, moving.tail()
            pooled = get_json(f"{new_worker.url}/state/cxl")["blocks"]
            return len(known_blocks(new_worker.url)) == 2 and [each["state"] for each in pooled] == ["cxl_pooled"]

        wait_for(moved, PATIENCE_S, "the new scope to have what the old one has")
    moving.stop()
    assert moving.exit_code == 0, moving.tail()
    assert [each for each in secure.decisions() if each.user == "mover" and not each.allowed] == []

"""Each container of the Helm chart runs as its manifest says, on a real Kafka, and together they answer a request.

Helm is built from its Go module, once. Where there is no Go, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from streams.kafka.clients import admin
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.broker import KafkaState
from streams.lab.kafka.ports import free_port
from streams.lab.kafka.secure_files import USER, SecureFiles
from streams.lab.processes import Children
from streams.lab.stack import Engine, Stack
from streams.settings import Settings
from tests.helpers.go_program import BUILD_TIMEOUT_S
from tests.helpers.helm import HELM, pods, rendered, values_files
from tests.helpers.kubernetes_api import ApiServer, Pools, serving, write_account
from tests.helpers.pod_process import Node, PodProcess
from tests.helpers.secure_kafka import OVERRIDES, SecureKafka
from tests.helpers.strimzi import acls_of_user

pytestmark = [pytest.mark.timeout(BUILD_TIMEOUT_S), pytest.mark.long_running]

#: A Strimzi listener asks for no certificate, and accepts those that clients have.
LISTENER = {**OVERRIDES, "listener.name.sasl_ssl.ssl.client.auth": "requested"}

_ANSWER_S = 30.0

TOKENS = {"front": ["route", "read"], "metrics": ["read"], "client": ["generate"]}


@pytest.fixture(scope="module", autouse=True)
def _helm() -> None:
    HELM.skip_without()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """Give a broker of this module alone."""
    broker = SecureKafka(tmp_path_factory.mktemp("secure"), LISTENER)
    yield broker
    broker.stop()


def engines_of(values: dict[str, Any], stack: Stack) -> dict[str, Engine]:
    """Start a simulated engine for each bridge of a file of values, with the block size of its scope."""
    settings = values.get("settings", {})
    model, sizes = "my-model", settings.get("model_block_sizes", {})
    if sizes:
        model = next(iter(sizes))
    config = EngineConfig(block_size=sizes.get(model, settings.get("block_size", 16)), n_blocks=256)
    started = stack.engines(len(values["bridges"]), config, model, time_scale=100.0)
    return dict(zip(values["bridges"], started, strict=True))


def template_of(engine: Engine) -> str:
    """The template of a bridge whose engines all have the ports of this one."""
    return ",".join(
        f"{name}={address.replace('127.0.0.1', '{host}')}"
        for name, address in (("url", engine.url), ("events", engine.events), ("replay", engine.replay))
    )


def overrides(values: dict[str, Any], kafka: str, engines: dict[str, Engine]) -> dict[str, Any]:
    """Values in which this machine differs from a cluster: one broker, and the ports of the engines."""
    changed: dict[str, Any] = {
        "kafka": {"bootstrapServers": kafka},
        "settings": {"topic_prefix": f"c{uuid.uuid4().hex[:12]}-", "replication": 1},
        "bridges": {name: {"template": template_of(engine)} for name, engine in engines.items()},
    }
    for name, bridge in values["bridges"].items():
        # One rank, whatever the file says. A name is resolved by this machine's resolver.
        options = ",".join(each for each in bridge.get("options", "").split(",") if not each.startswith("dp="))
        changed["bridges"][name] |= {"options": options, **({"dns": "127.0.0.1"} if "dns" in bridge else {})}
    return changed


def tokens_secret() -> dict[str, str]:
    """A Secret for auth.existingSecret."""
    made = {name: f"{name}-{uuid.uuid4().hex}" for name in TOKENS}
    toml = "".join(
        f'[{name}]\ntoken = "{made[name]}"\nrights = {json.dumps(rights)}\n' for name, rights in TOKENS.items()
    )
    return {"tokens.toml": toml, **{f"{name}-token": token for name, token in made.items()}}


def tls_secret(names: list[str]) -> dict[str, str]:
    """A Secret with a certificate for these names, and its authority's."""
    authority = trustme.CA()
    issued = authority.issue_cert(*names)
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems).decode()
    key = issued.private_key_pem.bytes().decode()
    return {"tls.crt": chain, "tls.key": key, "ca.crt": authority.cert_pem.bytes().decode()}


def kafka_secrets(files: SecureFiles) -> dict[str, dict[str, str]]:
    """The Secrets of an administrator of Kafka."""
    pem = (files.folder / "client.pem").read_text()
    return {
        "kafka-ca": {"ca.crt": (files.folder / "ca.pem").read_text()},
        "kafka-client": {"tls.crt": pem, "tls.key": pem},
        f"kafka-{USER}": {"password": files.password(USER)},
        "main-cluster-ca-cert": {"ca.crt": (files.folder / "ca.pem").read_text()},
    }


def reconcile(objects: list[dict[str, Any]], secure: SecureKafka) -> dict[str, dict[str, str]]:
    """Do what Strimzi's operators do: create the topics and users; return the Secrets of the users."""
    made = [each["spec"] for each in objects if each["kind"] == "KafkaTopic"]
    topics = [NewTopic(each["topicName"], each["partitions"], each["replicas"], config=each["config"]) for each in made]
    if topics:
        client = admin(secure.admin)  # kept until its requests have ended
        for created in client.create_topics(topics).values():
            created.result(_ANSWER_S)
    secrets = {}
    for user in (each for each in objects if each["kind"] == "KafkaUser"):
        name = user["metadata"]["name"]
        settings = secure.user(name, acls_of_user(user))
        secrets[name] = {"password": Path(settings.kafka_sasl_password_file).read_text()}
    return secrets


@pytest.mark.parametrize("file", values_files())
async def test_every_container_starts_as_its_manifest_says(
    file: str, kafka: KafkaState, tmp_path: Path, children: Children, request: pytest.FixtureRequest
) -> None:
    """All pods become ready, a request is answered, metrics need a token, and each pod ends in its grace period."""
    values = yaml.safe_load(values_files()[file].read_text())
    is_secure = file in ("production", "strimzi")
    secure: SecureKafka | None = request.getfixturevalue("secure") if is_secure else None
    bootstrap = kafka.bootstrap if secure is None else secure.state.bootstrap

    def run(api_port: int, account: Path) -> None:
        engines = engines_of(values, Stack(Settings(), tmp_path, children))
        (tmp_path / "overrides.yaml").write_text(json.dumps(overrides(values, bootstrap, engines)))
        objects = rendered(values=[values_files()[file], tmp_path / "overrides.yaml"])

        secrets: dict[str, dict[str, str]] = {
            each["metadata"]["name"]: each["stringData"] for each in objects if each["kind"] == "Secret"
        }
        if secure is not None:
            secrets |= kafka_secrets(secure.files) | reconcile(objects, secure)
        secrets |= {"kvstreams-tokens": tokens_secret(), "kvstreams-salt": {"salt": "pepper"}, "vllm": {"api-key": "k"}}
        secrets["kvstreams-tls"] = tls_secret(["127.0.0.1"])
        models = tmp_path / "claims/models"
        for model in values.get("front", {}).get("tokenizers", {}):
            (models / model).mkdir(parents=True)
            for name, text in tokenizer_files().items():
                (models / model / name).write_text(text)

        ports = {name: free_port() for name in pods(objects)}
        services = [each for each in objects if each["kind"] == "Service" and each["metadata"]["name"] in ports]
        node = Node(
            tmp_path / "pods",
            children,
            secrets,
            claims={"models": models},
            names={
                f"{name}:{each['spec']['ports'][0]['port']}": f"127.0.0.1:{ports[name]}"
                for each in services
                for name in [each["metadata"]["name"]]
            },
            api_port=api_port,
            account=account,
            tls=ssl.create_default_context(cadata=secrets["kvstreams-tls"]["ca.crt"]),
        )
        running = [PodProcess(node, name, pod, ports[name]) for name, pod in pods(objects).items()]
        for pod in running:
            pod.wait_ready()

        auth = values.get("auth", {})
        tokens = secrets[auth.get("existingSecret", "kvs-kvstreams-tokens")] if auth.get("enabled", True) else {}
        (front,) = (pod for pod in running if pod.name.endswith("-front"))
        status, answer = front.call(
            "/v1/completions", {"prompt": "Hello", "max_tokens": 4}, token=tokens.get("client-token")
        )
        assert status == 200, answer
        assert json.loads(answer)["usage"]["completion_tokens"] == 4
        for pod in running:
            status, page = pod.call("/metrics", token=tokens.get("metrics-token"))
            assert status == 200
            assert b"\nkvstreams_" in page
            assert pod.call("/metrics")[0] == (401 if tokens else 200)

        for pod in running:
            pod.ask_to_stop()
        assert {pod.name: pod.wait_stopped() for pod in running} == dict.fromkeys(ports, 0)
        for pod in running:
            log = pod.child.log_path.read_text(errors="replace")
            assert "is not a setting" not in log
            assert "Traceback" not in log

    account = tmp_path / "account"
    account.mkdir()
    services = [bridge["service"] for bridge in values["bridges"].values() if "service" in bridge]
    api = ApiServer(*services)
    api.slices["engines"] = [("127.0.0.1", True)]
    port = free_port()
    pools, pool = Pools(), values.get("picker", {}).get("inferencePool", {})
    if pool:
        pools.put_pool(pool["name"], pool["matchLabels"], [8000])
    tls = write_account(account, "llm", api.token)
    async with serving(api, pools, tls=tls, port=port):
        await asyncio.to_thread(run, port, account)
    assert bool(api.requests) == bool(services)
    assert bool(pools.pods.requests) == bool(pool)


def test_the_tokens_of_a_secret_are_read(tmp_path: Path) -> None:
    """The Secret that this module makes has the keys that the chart's own one has."""
    made = next(each["stringData"] for each in rendered(values=[values_files()["default"]]) if each["kind"] == "Secret")
    own = tokens_secret()
    assert own.keys() <= made.keys()
    assert tomllib.loads(own["tokens.toml"]).keys() <= tomllib.loads(made["tokens.toml"]).keys()

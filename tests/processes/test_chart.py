"""The Helm chart as Helm renders it: for each file of values, objects that Kubernetes accepts, and safe pods.

Helm is built from its Go module, once. Where there is no Go, these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from streams.security.acls import Acl, acls_of
from streams.settings import Settings, load
from streams.topics import topics
from tests.helpers.command_line import parse_command
from tests.helpers.crds import definition_of
from tests.helpers.go_program import BUILD_TIMEOUT_S
from tests.helpers.helm import (
    CHART,
    HELM,
    HelmError,
    helm,
    objects_to_record,
    pods,
    recorded_objects,
    rendered,
    values_files,
)
from tests.helpers.pages import ROOT, blocks
from tests.helpers.strimzi import acls_of_user, settings_of_user

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S)

#: Versions of Kubernetes whose schemas are compared: from the chart's own minimum to the newest one that there is.
OLDEST = "1.30"
VERSIONS = [
    version
    for version in kubernetes_validate.utils.all_versions()
    if tuple(map(int, version.split(".")[:2])) >= tuple(map(int, OLDEST.split(".")))
]


@pytest.fixture(scope="module", autouse=True)
def _helm() -> None:
    HELM.skip_without()


@pytest.fixture(scope="module", params=values_files())
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Give the objects of one file of values."""
    return rendered(values=[values_files()[request.param]])


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def test_the_chart_has_no_fault_that_helm_finds() -> None:
    """`helm lint --strict` accepts the chart with each file of values."""
    for path in values_files().values():
        helm("lint", "--strict", CHART, "--values", path)


def test_the_objects_are_recorded() -> None:
    """The first ring of tests reads the record, so it must be what Helm renders."""
    assert recorded_objects() == objects_to_record(), "run: python -m tests.helpers.helm"


def test_the_newest_schemas_are_used() -> None:
    """The versions begin at the chart's minimum, which its Chart.yaml names."""
    minimum = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert minimum == f">={OLDEST}.0-0"
    assert VERSIONS[0].startswith(OLDEST)
    with pytest.raises(HelmError, match="incompatible"):
        rendered(values=[values_files()["default"]], kube_version="1.29.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid_in_each_version_of_kubernetes(objects: list[dict[str, Any]], version: str) -> None:
    """Kubernetes' own schemas accept each object, without any field that they lack."""
    assert objects
    for each in objects:
        if definition_of(each) is None:
            kubernetes_validate.validate(each, version, strict=True)


def test_each_custom_resource_is_valid(objects: list[dict[str, Any]]) -> None:
    """The definitions of Strimzi, KEDA and the Prometheus operator accept each of their objects in the same way."""
    for each in objects:
        definition = definition_of(each)
        if definition is not None:
            jsonschema.Draft202012Validator(definition).validate(each)


def test_a_custom_resource_with_an_unknown_field_is_found() -> None:
    """The API server would drop such a field without a word."""
    (user, *_) = of_kind(rendered(values=[values_files()["strimzi"]]), "KafkaUser")
    user["spec"]["authorisation"] = {}
    with pytest.raises(jsonschema.ValidationError, match="authorisation"):
        jsonschema.Draft202012Validator(definition_of(user)).validate(user)


def test_the_six_files_render_every_kind() -> None:
    """Each template is used by some file of values."""
    kinds = {each["kind"] for path in values_files().values() for each in rendered(values=[path])}
    written = {
        kind
        for template in (CHART / "templates").glob("*.yaml")
        for kind in re.findall(r"^kind: (\w+)$", template.read_text(), re.MULTILINE)
    }
    assert kinds == written


def named_secrets(pod: Mapping[str, Any]) -> Iterator[str]:
    for volume in pod["volumes"]:
        if "secret" in volume:
            yield volume["secret"]["secretName"]


# -- Strimzi -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"topic_prefix": "a.b_", "partitions": 3, "replication": 2},
        {"booking_ttl_s": 0.001 + 1, "retention_ms": 60_000},
        {"booking_ttl_s": 1_234_567.875, "retention_ms": 10**13},
        {"history_window_s": 3600},
        {"history_window_s": 0.25, "booking_ttl_s": 60},
        {"decision_log_bytes_max": 10**9 + 7, "decision_log_retention_ms": 70_000, "partitions": 7},
        {"decision_log_bytes_max": 10**13, "partitions": 1},
        {"decision_log_bytes_max": 64 * 1024 * 1024, "partitions": 64},
    ],
    ids=json.dumps,
)
def test_strimzi_makes_the_topics_and_users_of_the_code(changes: dict[str, Any]) -> None:
    """For any settings, the topics and their configuration are those of streams/topics.py, and so are the ACLs."""
    sets = [part for name, value in changes.items() for part in ("--set-json", f"settings.{name}={json.dumps(value)}")]
    objects = rendered(*sets, values=[values_files()["strimzi"]])
    (router,) = (pod["containers"][0] for pod in pods(objects).values() if pod["containers"][0]["args"][0] == "router")
    settings: Settings = load({}, {each["name"]: each["value"] for each in router["env"]}).settings

    expected = {spec.name: (spec.partitions, spec.replication, dict(spec.config)) for spec in topics(settings).all()}
    made = {
        each["spec"]["topicName"]: (each["spec"]["partitions"], each["spec"]["replicas"], each["spec"]["config"])
        for each in of_kind(objects, "KafkaTopic")
    }
    assert made == expected
    for user in of_kind(objects, "KafkaUser"):
        process = user["metadata"]["labels"]["app.kubernetes.io/component"]

        def sortable(acl: Acl) -> tuple[str, str]:
            return acl.kind, acl.name

        of_lmcache = [Acl("topic", "lmcache-cache-events", ("Describe", "Read"))] if process == "bridge" else []
        expected_acls = [*acls_of(process, settings), *of_lmcache]
        assert sorted(acls_of_user(user), key=sortable) == sorted(expected_acls, key=sortable)
    assert {user["metadata"]["name"].rpartition("-")[2] for user in of_kind(objects, "KafkaUser")} == {
        "worker",
        "router",
        "bridge",
    }


@pytest.mark.parametrize("authentication", ["scram-sha-512", "tls"])
def test_each_process_is_its_own_user_of_strimzi(authentication: str) -> None:
    """The credentials of a pod are those of the Secret that the User Operator makes for its user."""
    objects = rendered("--set", f"strimzi.authentication={authentication}", values=[values_files()["strimzi"]])
    users = {user["metadata"]["name"] for user in of_kind(objects, "KafkaUser")}
    for pod in pods(objects).values():
        (container,) = pod["containers"]
        process = container["args"][0]
        if process != "front":
            assert f"kvs-kvstreams-{process}" in users
            assert {"main-cluster-ca-cert", f"kvs-kvstreams-{process}"} <= set(named_secrets(pod))
            settings = settings_of_user(container)
            assert settings.kafka_security == ("ssl" if authentication == "tls" else "sasl_ssl")
            assert settings.kafka == "main-kafka-bootstrap:9093"


# -- the page of the docs ----------------------------------------------------------------------------------------------

PAGE = "docs/kubernetes.md"


@pytest.mark.parametrize(
    "command",
    [
        line
        for _, code in blocks(PAGE, "sh")
        for line in code.replace("\\\n", " ").splitlines()
        if line.startswith("helm ")
    ],
)
def test_the_commands_of_the_page_are_understood(command: str) -> None:
    """Helm renders the chart with the options of each command, and an upgrade with those of the installation."""
    verb, release, chart, *options = shlex.split(command)[1:]
    assert (release, ROOT / chart) == ("kvs", CHART)
    options = [option for option in options if option not in ("--create-namespace", "--reset-then-reuse-values")]
    base = [] if verb == "install" else [values_files()["default"]]
    assert rendered(*options, values=base)


def test_the_commands_of_the_page_name_objects_of_the_chart() -> None:
    """Each Deployment, Service and Secret after `kubectl` is rendered, and so is the field of the Secret."""
    commands = "".join(code for _, code in blocks(PAGE, "sh"))
    names = {(kind, name) for kind, name in re.findall(r"\b(deployment|service)/([\w-]+)", commands)}
    names |= {("secret", name) for name in re.findall(r"\bget secret ([\w-]+)", commands)}
    found = {
        (each["kind"].lower(), each["metadata"]["name"]): each for each in rendered(values=[values_files()["default"]])
    }
    assert len(names) >= 4 and names <= found.keys()
    (field,) = re.findall(r"\{\.data\.([\w-]+)\}", commands)
    assert field in found["secret", "kvs-kvstreams-tokens"]["stringData"]
    (port,) = re.findall(r"port-forward service/kvs-kvstreams-front \d+:(\d+)", commands)
    assert int(port) in [each["port"] for each in found["service", "kvs-kvstreams-front"]["spec"]["ports"]]
    for command in re.findall(r" -- kvstreams (.*)", commands):
        parse_command(shlex.split(command))


@pytest.mark.parametrize("text", [code for _, code in blocks(PAGE, "yaml") if not code.startswith("rules:")])
def test_the_values_of_the_page_are_valid(text: str, tmp_path: Path) -> None:
    """The chart renders with each example."""
    (tmp_path / "values.yaml").write_text(text)
    assert rendered(values=[values_files()["default"], tmp_path / "values.yaml"])


# -- values that do not fit together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "kafka.bootstrapServers="], "kafka.bootstrapServers: host:port of a broker is required"),
        (["--set", "bridges.a.replicas=1"], "bridges.a: the bridge has no engines"),
        (["--set", "strimzi.enabled=true"], "strimzi.cluster: the name of the Kafka resource is required"),
        (["--set", "router.replica=3"], "replica"),
        (["--set", "auth.generate=false"], "auth: name a Secret with tokens in auth.existingSecret"),
        (["--set", "front.ingress.enabled=true"], "front.ingress.host: the name that clients call is required"),
        (["--set", "front.httpRoute.enabled=true"], "front.httpRoute.parentRefs: the Gateway is required"),
        (
            [
                "--set-json",
                'engineAutoscaling.targets.a={"model":"/m","role":"both","name":"x","minReplicas":1,"maxReplicas":2}',
            ],
            'engineAutoscaling.targets.a: HPA cannot select the model "/m"',
        ),
        (
            [
                *("--set", "engineAutoscaling.kind=keda"),
                *(
                    "--set-json",
                    'engineAutoscaling.targets.a={"model":"m","role":"both","name":"x","minReplicas":1,"maxReplicas":2}',
                ),
            ],
            "engineAutoscaling.prometheus: the address of Prometheus is required",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(options: list[str], message: str) -> None:
    """Helm ends with a message that names the value."""
    with pytest.raises(HelmError, match=re.escape(message)):
        rendered(*options, values=[values_files()["default"]])


def test_an_own_secret_has_tokens_for_all(objects: list[dict[str, Any]]) -> None:
    """The tokens that the chart makes are random, long, and have the rights that their owners need."""
    from streams.security.tokens import parse_tokens

    for secret in of_kind(objects, "Secret"):
        made = secret["stringData"]
        tokens = parse_tokens([("tokens.toml", made["tokens.toml"])])
        rights = {
            name: {str(right) for right in tokens.grant_of(made[f"{name}-token"]).rights}  # type: ignore[union-attr]
            for name in ("front", "metrics", "client", "operator")
        }
        assert rights == {
            "front": {"route", "read"},
            "metrics": {"read"},
            "client": {"generate"},
            "operator": {"route", "read", "operate"},
        }


def test_tokens_change_with_each_rendering_only_if_the_chart_makes_them() -> None:
    """Tools that render a chart without a cluster cannot keep random tokens, so all else has to be the same."""
    for path in values_files().values():
        first, second = rendered(values=[path]), rendered(values=[path])
        changed = [each["kind"] for each, again in zip(first, second, strict=True) if each != again]
        generates = yaml.safe_load(path.read_text()).get("auth", {}).get("generate", False)
        assert changed == (["Secret"] if generates else [])


def test_a_budget_of_one_bridge_is_its_own() -> None:
    """Values of an entry of `bridges` replace those of all bridges, for its budget as well."""
    objects = rendered("--set", "bridges.a.dns=a", values=[values_files()["production"]])
    most = {
        each["metadata"]["name"]: each["spec"]["maxUnavailable"] for each in of_kind(objects, "PodDisruptionBudget")
    }
    assert (most["kvs-kvstreams-bridge-llama"], most["kvs-kvstreams-bridge-a"]) == ("50%", 1)
    objects = rendered("--set", "bridges.engines.podDisruptionBudget.enabled=false", values=[values_files()["default"]])
    assert not any("bridge" in each["metadata"]["name"] for each in of_kind(objects, "PodDisruptionBudget"))


def test_a_cluster_may_choose_users_itself() -> None:
    """OpenShift assigns users and groups, and refuses pods that name others."""
    null = ("runAsUser", "runAsGroup", "fsGroup")
    objects = rendered(
        *(part for name in null for part in ("--set", f"podSecurityContext.{name}=null")),
        values=[values_files()["default"]],
    )
    for pod in pods(objects).values():
        assert pod["securityContext"].keys().isdisjoint(null)
        assert pod["securityContext"]["runAsNonRoot"] is True

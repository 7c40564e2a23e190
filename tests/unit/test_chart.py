"""The Helm chart without Helm: its values, what follows from the code, and what each container's process is given.

tests/processes/test_chart.py renders the chart; tests/kafka/test_chart.py starts the processes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any

import jsonschema
import pytest
import yaml

from streams.client.base import CLOSE_TIMEOUT_S
from streams.engines.address import engine_address, engine_template
from streams.engines.bridged_engine import FLUSH_TIMEOUT_S
from streams.frontend.metrics import FRONT_METRICS
from streams.prompts.engine_keys import parse_by_model
from streams.router_api.http.metrics import ROUTER_METRICS
from streams.router_api.processes.process_group import END_MARGIN_S
from streams.settings import (
    ENV_PREFIX,
    BridgeServerSettings,
    FrontServerSettings,
    PickerServerSettings,
    RouterServerSettings,
    Settings,
    WorkerServerSettings,
    load,
    unknown_variables,
)
from tests.helpers.command_line import parse_command
from tests.helpers.helm import CHART, recorded_containers, values_files
from tests.helpers.pages import ROOT
from tools.chart import NOT_IN_THE_CHART, PROCESSES, generated, settings_of

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

#: The settings of each command.
GROUPS = {
    "worker": WorkerServerSettings,
    "router": RouterServerSettings,
    "front": FrontServerSettings,
    "bridge": BridgeServerSettings,
    "picker": PickerServerSettings,
}

CONTAINERS = [
    pytest.param(container, id=f"{file}:{name}")
    for file, by_name in recorded_containers().items()
    for name, container in by_name.items()
]


def given_settings(container: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a container's environment by variable; one from a Secret has some text."""
    return {
        name: value if isinstance(value, str) else "of-a-secret"
        for name, value in container["env"].items()
        if name.startswith(ENV_PREFIX)
    }


def test_what_follows_from_the_code_is_up_to_date() -> None:
    """The schema's settings, their defaults and the ACLs are those of the code."""
    for path, text in generated().items():
        assert path.read_text() == text, f"run: python -m tools.chart, which writes {path.name}"


def test_each_setting_is_a_value_of_the_chart_or_is_left_out_for_a_reason() -> None:
    """A new setting of a process is a value at once; the others follow from values, or are listed."""
    offered = {name for process in PROCESSES for name in settings_of(process)}
    # A worker of the chart has no router.
    assert {setting.name for setting in fields(Settings)} - offered == NOT_IN_THE_CHART | {"router", "router_process"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_each_variable_and_option_is_accepted_by_the_process_that_gets_it(container: Mapping[str, Any]) -> None:
    """Each variable is a setting of this process, with a value in its range, and the command takes the arguments."""
    command = container["args"][0]
    environ = given_settings(container)
    assert unknown_variables(environ) == {}
    of_process = {ENV_PREFIX + setting.name.upper() for setting in fields(GROUPS[command])}
    assert environ.keys() <= of_process
    settings = load({}, environ).settings
    assert settings.host == "0.0.0.0"
    # Gateways have no tokens, so a picker accepts them without; the calls of its HTTP API still need one.
    assert settings.allow_anonymous is (command == "picker" or not settings.tokens_file)

    context = parse_command(container["args"])
    for engine in context.params.get("engines", ()):
        engine_address(engine)
    if context.params.get("engine_template"):
        has_pool = bool(context.params["engines_inference_pool"])
        engine_template(context.params["engine_template"], ports=has_pool)
    parse_by_model("--tokenizer", context.params.get("tokenizers", ()))
    parse_by_model("--engine-key", context.params.get("engine_keys", ()))


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_pod_is_not_killed_while_it_drains(container: Mapping[str, Any]) -> None:
    """The grace period is longer than all that the process waits for at its end, by its own settings."""
    settings = load({}, given_settings(container)).settings
    drain_s = settings.drain_notice_s + settings.drain_timeout_s
    ends_s = {
        "picker": drain_s + END_MARGIN_S,
        "router": drain_s + END_MARGIN_S,  # the parent of several processes kills them after this time
        "front": drain_s + CLOSE_TIMEOUT_S,  # the last reports on bookings
        "bridge": FLUSH_TIMEOUT_S,
        "worker": settings.session_timeout_s,  # of its consumer group
    }
    assert ends_s[container["args"][0]] + 10.0 <= container["grace_s"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_process_writes_to_volumes_only(container: Mapping[str, Any]) -> None:
    """A worker's tables are in its volume. The image has compiled kernels, so the others need no volume for data."""
    assert "kvstreams warm" in (ROOT / "docker/Dockerfile").read_text()
    written = ["/tmp"]
    if container["args"][0] == "worker":
        written.append(load({}, given_settings(container)).settings.data_dir)
    assert container["writable"] == sorted(written)


def test_every_file_of_values_is_recorded() -> None:
    """The recorded containers are those of the six files, each with a worker and a router; two have pickers."""
    recorded = recorded_containers()
    assert recorded.keys() == values_files().keys()
    assert len(recorded) == 6
    for file, containers in recorded.items():
        commands = {container["args"][0] for container in containers.values()}
        assert commands == (GROUPS.keys() if file in ("keda", "production") else GROUPS.keys() - {"picker"})


def test_the_image_and_the_chart_agree() -> None:
    """Arguments go to the image's entry point, pods run as its user, and the versions are the project's."""
    image = (ROOT / "docker/Dockerfile").read_text()
    assert 'ENTRYPOINT ["kvstreams"]' in image
    uid = re.search(r"--uid (\d+)", image)
    assert VALUES["podSecurityContext"]["runAsUser"] == (1000 if uid is None else int(uid[1]))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version


def test_the_chart_and_its_page_name_metrics_that_exist() -> None:
    """An autoscaler whose metric does not exist would do nothing."""
    declared = {metric.name for metric in ROUTER_METRICS} | {metric.name for metric in FRONT_METRICS}
    files = (*CHART.glob("templates/*.yaml"), *values_files().values(), ROOT / "docs/kubernetes.md")
    named = {name for file in files for name in re.findall(r"\bkvstreams_\w+", file.read_text())}
    assert {"kvstreams_front_active_requests", "kvstreams_pool_replicas_wanted"} <= named
    assert named <= declared


# -- the schema of the values ------------------------------------------------------------------------------------------


def merged(base: Any, over: Any) -> Any:
    """Values as Helm merges them."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def check(values: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(values)


def places(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each map in the values of the chart."""
    if isinstance(values, dict):
        yield path
        for key, value in values.items():
            yield from places(value, (*path, key))


#: Maps whose keys the user chooses, and objects of Kubernetes, which its own schemas check.
OPEN = re.compile(
    r"(commonLabels|service\.spec|matchLabels|nodeSelector|affinity|podAnnotations|podLabels|annotations|labels|requests|limits|tokenizers|engineKeys|bridges"
    r"|podSecurityContext|podSecurityContext\.seccompProfile)$"
)

CLOSED = [path for path in places(VALUES) if not OPEN.search(".".join(path))]


def test_the_files_of_values_are_valid() -> None:
    """So is the chart's own file."""
    check(VALUES)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for path in values_files().values():
        check(merged(VALUES, yaml.safe_load(path.read_text())))


@pytest.mark.parametrize("path", CLOSED, ids=".".join)
def test_an_unknown_value_is_refused_at_every_level(path: tuple[str, ...]) -> None:
    """A mistyped name has no effect in most charts. Here it is an error that names it."""
    values = deepcopy(VALUES)
    place = values
    for key in path:
        place = place[key]
    place["mistyped"] = 1
    with pytest.raises(jsonschema.ValidationError, match="mistyped"):
        check(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"settings": {"partitions": 0}}, "minimum"),
        ({"settings": {"log_json": "yes"}}, "boolean"),
        ({"settings": {"kafka": "kafka:9092"}}, "kafka"),
        ({"router": {"settings": {"router_mode": "best"}}}, "best"),
        ({"router": {"settings": {"topic_prefix": "a."}}}, "topic_prefix"),  # of all processes, or of none
        ({"front": {"settings": {"router_mode": "kv"}}}, "router_mode"),
        ({"worker": {"settings": {"router_reset_states": True}}}, "router_reset_states"),
        ({"router": {"extraEnv": [{"name": "KVSTREAMS_PORT", "value": "1"}]}}, "KVSTREAMS_PORT"),
        ({"bridges": {"a": {"servce": "vllm"}}}, "servce"),
        ({"picker": {"settings": {"picker_port": 1}}}, "picker_port"),  # the service and the probes have fixed ports
        ({"picker": {"inferencePool": {"targetPorts": [*range(1, 10)]}}}, "too long"),
        ({"picker": {"inferencePool": {"failureMode": "Open"}}}, "Open"),
        ({"bridges": {"A_B": {"service": "vllm"}}}, "A_B"),
        ({"bridge": {"template": "url=http://gpu1:8000"}}, "host"),
        ({"front": {"engineKeys": {"m": {"name": "vllm"}}}}, "key"),
        ({"image": {"digest": "latest"}}, "latest"),
        ({"front": {"service": {"spec": {"selector": {"app": "other"}}}}}, "selector"),
        ({"front": {"ingress": {"hosts": ["a"]}}}, "hosts"),
        ({"networkPolicy": {"egress": [{"ports": [{"port": 9092}]}]}}, "object"),
        ({"auth": {"generate": "yes"}}, "boolean"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused(values: dict[str, Any], message: str) -> None:
    """Ranges, kinds and names are those of the settings, by process."""
    with pytest.raises(jsonschema.ValidationError, match=message):
        check(merged(VALUES, values))

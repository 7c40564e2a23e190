"""Helm for tests of the chart.

What lives here: running Helm, rendering the chart, and the record of its objects. What must not: building Helm
(go_program), and what is expected of the chart.

To use another Helm than this version, set KVSTREAMS_TEST_HELM to its path. Building it takes minutes, so the first ring
of tests does not need Helm. It reads the objects from chart_objects.json. After a change of the chart,
`python -m tests.helpers.helm` writes this file again.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.go_program import GoProgram

CHART = Path(__file__).parents[2] / "deploy/helm/kvstreams"
RECORD = Path(__file__).with_name("chart_objects.json")

HELM = GoProgram("helm", "helm.sh/helm/v4@v4.3.1", "h1:UndCoLe9UPmNoL7IvWzaUXveL7T5t/ijoorEmgJdI9g=", "./cmd/helm")

_RUN_TIMEOUT_S = 60


class HelmError(Exception):
    """Helm refused something. The message is Helm's own."""


def helm(*arguments: str | Path, folder: Path | None = None) -> str:
    """Run Helm and return what it prints. Raises HelmError. It needs no cluster, and reads no file of the user's."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [HELM.installed(), *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_RUN_TIMEOUT_S,
            env={"HOME": home, "PATH": os.environ["PATH"]},
        )
    if done.returncode:
        raise HelmError((done.stderr + done.stdout).strip())
    return done.stdout


def rendered(*options: str | Path, values: Sequence[Path] = (), kube_version: str = "1.30.0") -> list[dict[str, Any]]:
    """Return the objects of a release `kvs` in the namespace `llm`. Raises HelmError."""
    files = [option for file in values for option in ("--values", file)]
    text = helm("template", "kvs", CHART, "--namespace", "llm", "--kube-version", kube_version, *files, *options)
    return [found for found in yaml.safe_load_all(text) if found]


def values_files() -> dict[str, Path]:
    """The files of values that the chart is tested with, by name."""
    return {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}


def pods(objects: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specification of each workload's pods, by the workload's name."""
    kinds = ("Deployment", "StatefulSet")
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in objects if each["kind"] in kinds}


def containers(objects: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what the process of each workload is given, by the workload's name.

    args: of the image's entry point. env: values, or where they come from. grace_s: time for its end. writable: paths.
    """
    found = {}
    for name, pod in pods(objects).items():
        (container,) = pod["containers"]
        mounts = container["volumeMounts"]
        found[name] = {
            "args": container["args"],
            "env": {
                variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]
            },
            "grace_s": pod["terminationGracePeriodSeconds"],
            "writable": sorted(mount["mountPath"] for mount in mounts if not mount.get("readOnly")),
        }
    return found


def objects_to_record() -> dict[str, list[dict[str, Any]]]:
    """Return the objects of each file of values, as Helm renders them now, without what is random or in other files."""
    return {name: [_for_the_record(each) for each in rendered(values=[path])] for name, path in values_files().items()}


def _for_the_record(rendered_object: dict[str, Any]) -> dict[str, Any]:
    left_out = {"Secret": "stringData", "ConfigMap": "data", "PrometheusRule": "spec"}.get(rendered_object["kind"])
    return {key: value for key, value in rendered_object.items() if key != left_out}


@cache
def recorded_objects() -> dict[str, list[dict[str, Any]]]:
    """Return the same as it was recorded. Tests do not change it."""
    recorded: dict[str, list[dict[str, Any]]] = json.loads(RECORD.read_text())
    return recorded


def recorded_containers() -> dict[str, dict[str, dict[str, Any]]]:
    """Return `containers` for each file of values, as recorded."""
    return {name: containers(objects) for name, objects in recorded_objects().items()}


if __name__ == "__main__":
    files = (
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(each, sort_keys=True) for each in objects) + "\n]"
        for name, objects in objects_to_record().items()
    )
    RECORD.write_text("{" + ",\n".join(files) + "}\n")

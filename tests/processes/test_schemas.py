"""Processes whose schemas cannot read the records of the last release do not start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streams.lab.kafka.ports import free_port
from tests.helpers.commands import PATIENCE_S, assert_one_line, environment
from tests.helpers.pages import ROOT

BRIDGE = ("--engine", "id=1,url=http://127.0.0.1:9,events=tcp://127.0.0.1:9")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package, in which a field without a default was added to a schema."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "streams", folder / "streams", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "schemas", folder / "schemas")
    path = folder / "schemas" / "workers.avsc"
    schema = json.loads(path.read_text())
    schema["fields"].append({"name": "colour", "type": "string"})
    path.write_text(json.dumps(schema))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [("streams.cli", "router"), ("streams.cli", "bridge", *BRIDGE), ("faust", "--quiet", "-A", "streams", "worker")],
    ids=["router", "bridge", "worker"],
)
def test_a_process_ends_with_one_line_before_it_touches_kafka(arguments: tuple[str, ...], changed: Path) -> None:
    """The line names the schema and the field; that no Kafka answers is not noticed."""
    settings = {"KVSTREAMS_KAFKA": f"127.0.0.1:{free_port()}", "KVSTREAMS_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment({**settings, "PYTHONPATH": str(changed)}),
        cwd=changed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    line = assert_one_line(done)
    assert "cannot read the records of the last release: workers (" in line
    assert "colour" in line

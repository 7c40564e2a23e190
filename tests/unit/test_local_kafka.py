"""The Kafka for one machine without starting a broker: its saved state, its folder, and its properties."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from streams.errors import LocalKafkaError
from streams.lab.kafka import KAFKA_VERSION, LocalKafkaConfig
from streams.lab.kafka import broker as kafka
from tests.helpers.broker import BreakableKafka


@pytest.mark.parametrize("version", ["3.9.1", "5.0.0", "4.99.0"])
def test_data_of_another_kafka_is_refused(tmp_path: Path, version: str) -> None:
    """Data of another major version, or of a newer one, is not touched, and the error names both versions."""
    saved = kafka._Saved(version, "AAAAAAAAAAAAAAAAAAAAAA", broker_port=20_001, controller_port=20_002)
    (tmp_path / "state.json").write_text(json.dumps(asdict(saved)))
    with pytest.raises(LocalKafkaError, match=rf"Kafka {version}, and this is Kafka {KAFKA_VERSION}") as caught:
        BreakableKafka(LocalKafkaConfig(tmp_path)).up()
    assert "another directory" in caught.value.remedy
    assert not (tmp_path / "data").exists()


def test_a_reused_pid_is_neither_mistaken_nor_killed(tmp_path: Path) -> None:
    """A process with the saved pid but another creation time is not the broker."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        try:
            process = kafka._Process(other.pid, psutil.Process(other.pid).create_time() - 60, "17", "")
            saved = kafka._Saved(KAFKA_VERSION, "AAAAAAAAAAAAAAAAAAAAAA", 20_001, 20_002, process)
            (tmp_path / "state.json").write_text(json.dumps(asdict(saved)))
            local = BreakableKafka(LocalKafkaConfig(tmp_path))
            assert local.status() is None
            with pytest.raises(LocalKafkaError, match="No broker runs"):
                local.kill()
            assert not local.down()
            assert other.poll() is None
        finally:
            other.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": null}'])
def test_an_unreadable_state_is_reported_and_kept(tmp_path: Path, text: str) -> None:
    """With an invalid state.json, every call raises an error that names the file, and the file stays as it is."""
    (tmp_path / "state.json").write_text(text)
    local = BreakableKafka(LocalKafkaConfig(tmp_path))
    for call in (local.up, local.down, local.status, local.kill):
        with pytest.raises(LocalKafkaError, match=r"state\.json cannot be read"):
            call()
    assert (tmp_path / "state.json").read_text() == text


def test_a_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    """A file in place of the parent directory gives an error, and `status` and `down` find no broker."""
    (tmp_path / "file").touch()
    local = BreakableKafka(LocalKafkaConfig(tmp_path / "file" / "kafka"))
    assert local.status() is None
    assert not local.down()
    with pytest.raises(LocalKafkaError, match="cannot be used"):
        local.up()


def test_a_directory_with_a_comma_is_refused(tmp_path: Path) -> None:
    """Kafka would read the name as two directories and store its data elsewhere."""
    with pytest.raises(LocalKafkaError, match="comma"):
        BreakableKafka(LocalKafkaConfig(tmp_path / "a, b")).up()
    assert not list(tmp_path.iterdir())


def test_properties_are_written_as_java_reads_them() -> None:
    """Characters that have a meaning in a properties file, or are not ASCII, are escaped."""
    text = kafka._as_properties({"log.dirs": "/tmp/a b:c=d\\é\U0001d11e\n#!"}).splitlines()[1]
    assert text == r"log.dirs=/tmp/a b:c=d\u005c\u00e9\ud834\udd1e\u000a\u0023\u0021"

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
from streams.lab.kafka import KAFKA_VERSION, LocalKafka, LocalKafkaConfig
from streams.lab.kafka import broker as kafka
from streams.lab.kafka.cluster import LocalCluster, local_kafka
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
    for n_brokers in (1, 3):
        local = local_kafka(LocalKafkaConfig(tmp_path / "file" / "kafka"), n_brokers)
        assert local.status() is None
        assert not local.down()
        with pytest.raises(LocalKafkaError, match="cannot be used"):
            local.up()


@pytest.mark.parametrize("n_brokers", [1, 3])
def test_a_directory_with_a_comma_is_refused(tmp_path: Path, n_brokers: int) -> None:
    """Kafka would read the name as two directories and store its data elsewhere."""
    with pytest.raises(LocalKafkaError, match="comma"):
        local_kafka(LocalKafkaConfig(tmp_path / "a, b"), n_brokers).up()
    assert not list(tmp_path.iterdir())


def test_properties_are_written_as_java_reads_them() -> None:
    """Characters that have a meaning in a properties file, or are not ASCII, are escaped."""
    text = kafka._as_properties({"log.dirs": "/tmp/a b:c=d\\é\U0001d11e\n#!"}).splitlines()[1]
    assert text == r"log.dirs=/tmp/a b:c=d\u005c\u00e9\ud834\udd1e\u000a\u0023\u0021"


def cluster(directory: Path, n_brokers: int | None = None) -> LocalKafka | LocalCluster:
    return local_kafka(LocalKafkaConfig(directory), n_brokers)


LAYOUT = {"cluster_id": "AAAAAAAAAAAAAAAAAAAAAA", "broker_ports": [1, 2, 3], "controller_ports": [4, 5, 6]}


def test_a_directory_keeps_its_number_of_brokers(tmp_path: Path) -> None:
    """Without --brokers it is what the directory has, and one in a new directory; another number is refused."""
    assert isinstance(cluster(tmp_path), LocalKafka)
    assert isinstance(cluster(tmp_path, 1), LocalKafka)
    assert isinstance(cluster(tmp_path, 3), LocalCluster)
    (tmp_path / "cluster.json").write_text(json.dumps(LAYOUT))
    found = cluster(tmp_path)
    assert isinstance(found, LocalCluster)
    assert found.n_brokers == 3
    assert found.status() is None
    assert not found.answers()
    for n_brokers in (1, 5):
        with pytest.raises(LocalKafkaError, match=f"has 3 brokers, not {n_brokers}"):
            cluster(tmp_path, n_brokers).up()


def test_several_brokers_do_not_start_on_the_data_of_one(tmp_path: Path) -> None:
    """The data stays as it is."""
    (tmp_path / "state.json").write_text("")
    with pytest.raises(LocalKafkaError, match="a Kafka of one broker"):
        cluster(tmp_path, 3).up()
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_an_unreadable_cluster_is_reported_and_kept(tmp_path: Path, text: str) -> None:
    """With an invalid cluster.json, every call raises an error that names the file."""
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(LocalKafkaError, match=r"cluster\.json cannot be read"):
        cluster(tmp_path)
    made = LocalCluster(LocalKafkaConfig(tmp_path), 3)
    for call in (made.up, made.down, made.status, made.answers, made.brokers):
        with pytest.raises(LocalKafkaError, match=r"cluster\.json cannot be read"):
            call()
    assert (tmp_path / "cluster.json").read_text() == text


@pytest.mark.parametrize(("n_brokers", "replication", "in_sync"), [(2, 2, 1), (3, 3, 2), (5, 3, 2)])
def test_a_broker_may_be_lost_where_there_are_three(n_brokers: int, replication: int, in_sync: int) -> None:
    """Every topic, internal ones included, has so many replicas, and so many of them must have a record."""
    ports = tuple(range(1, n_brokers + 1))
    properties = kafka.Member(2, "AAAAAAAAAAAAAAAAAAAAAA", ports, ports).properties
    assert properties["node.id"] == "2"
    assert properties["controller.quorum.voters"].count("@127.0.0.1:") == n_brokers
    factors = {value for name, value in properties.items() if name.endswith("replication.factor")}
    minima = {value for name, value in properties.items() if name.endswith(("min.isr", "min.insync.replicas"))}
    assert (factors, minima) == ({str(replication)}, {str(in_sync)})

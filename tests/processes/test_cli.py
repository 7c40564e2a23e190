"""The command line as a process without Kafka: its exit status, and what it prints to stdout and stderr."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from streams import __version__
from streams.lab.kafka.ports import free_port
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.commands import PATIENCE_S, Run, Start, assert_one_line, environment


def test_the_version_is_printed(run: Run) -> None:
    """--version prints the package's version."""
    assert __version__ in run("--version").stdout


@pytest.mark.first_ring("config")
def test_config_shows_value_and_source_of_every_setting(run: Run, tmp_path: Path) -> None:
    """`kvstreams config` prints each setting once, with its value, its source and its environment variable."""
    (tmp_path / "kvstreams.toml").write_text("block_size = 64\n")
    done = run("config", "--port", "8123", "--no-router", env={"KVSTREAMS_PARTITIONS": "3"})
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:] if not line.startswith(" ")}
    assert set(rows) == {setting.name for setting in fields(Settings)}
    assert rows["port"].split()[1:5] == ["8123", "command", "line", "KVSTREAMS_PORT"]
    assert rows["router"].split()[1:4] == ["False", "command", "line"]
    assert rows["partitions"].split()[1:4] == ["3", "KVSTREAMS_PARTITIONS", "KVSTREAMS_PARTITIONS"]
    assert rows["block_size"].split()[1:3] == ["64", "kvstreams.toml"]
    assert rows["host"].split()[1:3] == ["127.0.0.1", "default"]


def test_config_prints_values_verbatim(run: Run) -> None:
    """A value that looks like markup or an emoji code is printed as it is."""
    done = run("config", "--data-dir", "[red]x[/red] :smile: [compact]")
    assert "[red]x[/red] :smile: [compact]" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (("config", "--port", "x"), {}, ("port is 'x'", "command line")),
        (("config",), {"KVSTREAMS_PORT": "70000"}, ("port is 70000", "at most 65535", "KVSTREAMS_PORT")),
        (("config", "--config", "nowhere.toml"), {}, ("nowhere.toml does not exist",)),
        (("router", "--router-mode", "best"), {}, ("router_mode is 'best'", "kv, round-robin, random")),
        (("worker", "--partitions", "0"), {}, ("partitions is 0", "at least 1")),
        (("topics", "create", "--topic-prefix", "a/b"), {}, ("topic_prefix is 'a/b'",)),
        (("kafka", "up", "--set", "novalue"), {}, ("--set 'novalue' is not KEY=VALUE",)),
        (("demo", "--policy", "best"), {}, ("--policy", "best", "round-robin")),
        (("bridge", "--engine", "id=1"), {}, ("--engine 'id=1'", "url missing")),
        (("bridge", "--engine", "id=1,url=u,events=e,zmq=z"), {}, ("zmq unknown",)),
        (("bridge", "--engine", "id=x,url=u,events=e"), {}, ("whole numbers",)),
        (("bridge", "--engine", "id=18446744073709551616,url=u,events=e"), {}, ("0 to 2^64-1",)),
        (("bridge", "--engine", "id=-1,url=u,events=e"), {}, ("0 to 2^64-1",)),
        (("bridge", "--engine", "id=1,url=u,events=e,dp=0"), {}, ("dp 1 to",)),
        (("bridge", "--engine", ""), {}, ("missing",)),
    ],
)
def test_a_wrong_value_is_reported_in_one_line(
    arguments: tuple[str, ...], env: dict[str, str], words: tuple[str, ...], run: Run
) -> None:
    """A command with an unusable value names it in one line on stderr and exits with 1, before it connects to Kafka."""
    line = assert_one_line(run(*arguments, env={"KVSTREAMS_KAFKA": "no-such-host.invalid:1", **env}))
    for word in words:
        assert word in line


def test_a_variable_that_is_not_a_setting_is_reported_once_with_the_nearest_setting(run: Run) -> None:
    """Commands warn about an unknown KVSTREAMS_ variable once; variables that other parts read are ignored."""
    strange = {"KVSTREAMS_PROT": "1", "KVSTREAMS_TEST_KAFKA": "x", "KVSTREAMS_CONFIG": "none.toml"}
    warning = "kvstreams: KVSTREAMS_PROT is set but is not a setting; the nearest is KVSTREAMS_PORT"
    lines = run("config", env=strange).stderr.splitlines()
    assert lines[0].startswith(warning)
    assert "none.toml does not exist" in lines[1]
    assert len(lines) == 2
    for arguments in (("config",), ("worker",)):
        # x is not a valid fault, so a worker exits while its App is built.
        lines = run(*arguments, env={"KVSTREAMS_PROT": "1", "KVSTREAMS_FAULT": "x"}).stderr.splitlines()
        assert [line.startswith(warning) for line in lines if "KVSTREAMS_PROT" in line] == [True]


def test_faust_reports_a_variable_that_is_not_a_setting(tmp_path: Path) -> None:
    """A worker that is started by Faust's own command line warns as well."""
    done = subprocess.run(
        [sys.executable, "-m", "faust", "-A", "streams", "worker"],
        env=environment({"KVSTREAMS_BLOCKSIZE": "16", "KVSTREAMS_FAULT": "x"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode != 0
    warning = "KVSTREAMS_BLOCKSIZE is set but is not a setting; the nearest is KVSTREAMS_BLOCK_SIZE"
    assert done.stderr.count(warning) == 1


@pytest.mark.parametrize("arguments", [("config", "--prot", "1"), ("nothing",), ("bridge",), ("topics", "drop")])
def test_a_wrong_command_prints_usage(arguments: tuple[str, ...], run: Run) -> None:
    """Unknown options and commands exit with 2 and print usage, without a stack trace."""
    done = run(*arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_kafka_is_reported_in_one_line_with_the_remedy(start: Start) -> None:
    """Every command that needs Kafka names the address that it tried, the cause, and what to do."""
    unused = f"127.0.0.1:{free_port()}"
    cases: list[tuple[tuple[str, ...], str]] = [
        (("topics", "create"), unused),
        (("topics", "describe"), unused),
        (("router", "--port", "0"), unused),
        (("bridge", "--engine", "id=1,url=http://u,events=tcp://e:1"), unused),
        (("topics", "describe"), "no-such-host.invalid:9092"),
        (("topics", "describe"), "localhost:port"),
    ]
    started = [(start(*arguments, "--kafka", kafka), kafka) for arguments, kafka in cases]
    for process, kafka in started:
        out, err = process.communicate(timeout=PATIENCE_S)
        line = assert_one_line(subprocess.CompletedProcess((), process.returncode, out, err))
        assert f"no Kafka answers at {kafka}: " in line
        assert "refused" in line or "resolve" in line
        assert "kvstreams kafka up" in line


def test_kafka_status_and_down_where_no_kafka_runs(run: Run) -> None:
    """`kafka status` exits with 1 and says that no Kafka runs; `kafka down` changes nothing."""
    done = run("kafka", "status", "--directory", "k")
    assert (done.returncode, done.stdout) == (1, "no Kafka runs in k\n")
    done = run("kafka", "down", "--directory", "k")
    assert (done.returncode, done.stdout) == (0, "no Kafka was running here\n")


def test_a_sim_engine_starts_by_command(start: Start, tmp_path: Path) -> None:
    """`kvstreams sim` prints its addresses, writes them to the --info file, and ends on SIGTERM.

    It does without numba, whose memory the kernel would have to free before the connections of a killed engine close.
    """
    info = tmp_path / "info.json"
    ports = ("--port", "0", "--events-port", "0", "--replay-port", "0")
    process = start("sim", "--worker", "7", *ports, "--info", str(info))
    wait_for(info.exists, PATIENCE_S, "the engine's addresses")
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out) == json.loads(info.read_text())
    assert "numpy" in mapped and "llvmlite" not in mapped and "numba" not in mapped + err


@pytest.mark.first_ring("warm")
def test_kernels_are_compiled_once(run: Run) -> None:
    """`kvstreams warm` compiles nothing if all kernels are in the cache."""
    assert run("warm").returncode == 0
    again = run("warm")
    assert (again.returncode, again.stdout, again.stderr) == (0, "no kernel had to be compiled\n", "")


@pytest.mark.first_ring("tune")
def test_weights_of_a_policy_are_compared(run: Run) -> None:
    """`kvstreams tune` serves a trace with a policy's own weights and with others, and shows both."""
    done = run("tune", "agentic:requests=100", "--trials", "2", "--workers", "2")
    assert done.returncode == 0, done.stderr
    header, *rows = [line.split() for line in done.stdout.splitlines()[:3]]
    assert header[:2] == ["uncached_weight", "decode_weight"]
    assert [row[:2] == ["own", "own"] for row in rows].count(True) == 1

"""The command line as a person meets it: real processes, their exit status, and what they print where."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from streams import __version__
from streams.cli import ESSENTIAL, cli
from streams.errors import LocalKafkaError
from streams.kafka import admin, describe_topics, ensure_topics
from streams.local.ports import free_port
from streams.log import JsonFormatter
from streams.settings import ENV_PREFIX, Settings, as_environ
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.api import Api

#: Only a hang is a failure.
PATIENCE_S = 60.0

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without settings of whoever runs the tests."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    return {**ours, **extra}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `kvstreams` in an empty folder; what still runs when the test is over is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "streams.cli", *arguments],
            env=environment(env or {}),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with process:  # closes its pipes
            process.kill()


@pytest.fixture
def run(start: Start) -> Run:
    """Runs `kvstreams` to its end."""

    def to_the_end(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, env=env)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return to_the_end


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group, by the words that call it."""
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def assert_one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Exit status 1, nothing on stdout, one line on stderr; gives the line."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kvstreams: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.strip()


@pytest.mark.parametrize("words", list(commands(cli)), ids=lambda words: " ".join(words) or "kvstreams")
def test_every_command_explains_itself(words: tuple[str, ...]) -> None:
    """--help and -h work for every command, starting nothing."""
    for flag in ("--help", "-h"):
        done = CliRunner().invoke(cli, [*words, flag])
        assert done.exit_code == 0
        assert "Usage:" in done.output


def test_the_version_is_told(run: Run) -> None:
    """--version prints the package's version."""
    assert __version__ in run("--version").stdout


@pytest.mark.parametrize(
    "command", [("topics", "create"), ("topics", "describe"), ("router",), ("worker",), ("bridge",)]
)
def test_commands_with_settings_take_every_knob(command: tuple[str, ...]) -> None:
    """Every knob is an option of every command that uses settings."""
    text = CliRunner().invoke(cli, [*command, "--help"]).output
    for knob in fields(Settings):
        assert f"--{knob.name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (("router",), ["--help"]),
        (("bridge",), ["--engine", "--help"]),
        (("cxl", "pool"), ["--member", "--no-members", "--lost", "--help"]),
        (("kafka", "up"), ["--directory", "--help"]),
    ],
)
def test_help_shows_a_commands_own_options_before_the_knobs(command: tuple[str, ...], own: list[str]) -> None:
    """And of the knobs those first that one cannot do without."""
    text = CliRunner().invoke(cli, [*command, "--help"]).output
    first, settings, others = (*re.split(r"^(?:Settings|Other settings)[^\n]*$", text, flags=re.MULTILINE), "", "")[:3]
    assert all(option in first for option in own)
    if command == ("kafka", "up"):
        assert not settings + others
        return
    knobs = [f"--{knob.name.replace('_', '-')} " for knob in fields(Settings)]
    essential = [f"--{name.replace('_', '-')} " for name in ESSENTIAL]
    assert not any(knob in first for knob in knobs)
    assert sorted(knob for knob in knobs if knob in settings) == sorted(essential)
    assert "--config " in settings
    assert sorted(knob for knob in knobs if knob in others) == sorted(set(knobs) - set(essential))


def test_needless_options_of_dynamo_are_taken_with_a_warning() -> None:
    """On stderr, saying why; the command goes on."""
    flags = ["--router-snapshot-threshold", "10000", "--durable-kv-events", "--no-router-durable-kv-events"]
    done = CliRunner().invoke(cli, ["config", *flags])
    assert done.exit_code == 0
    warnings = done.stderr.splitlines()
    assert len(warnings) == 3
    assert all(line.startswith("kvstreams: ") and "is not needed: " in line for line in warnings)
    assert "overlap_score" in done.stdout


def test_config_shows_value_and_source_of_every_knob(run: Run, tmp_path: Path) -> None:
    """`kvstreams config` prints each knob once, with its value, its source and its variable."""
    (tmp_path / "kvstreams.toml").write_text("block_size = 64\n")
    done = run("config", "--port", "8123", "--no-router", env={"KVSTREAMS_PARTITIONS": "3"})
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:] if not line.startswith(" ")}
    assert set(rows) == {knob.name for knob in fields(Settings)}
    assert rows["port"].split()[1:5] == ["8123", "command", "line", "KVSTREAMS_PORT"]
    assert rows["router"].split()[1:4] == ["False", "command", "line"]
    assert rows["partitions"].split()[1:4] == ["3", "KVSTREAMS_PARTITIONS", "KVSTREAMS_PARTITIONS"]
    assert rows["block_size"].split()[1:3] == ["64", "kvstreams.toml"]
    assert rows["host"].split()[1:3] == ["127.0.0.1", "default"]


def test_config_prints_values_as_they_are(run: Run) -> None:
    """What looks like markup or an emoji in a value is printed as it is."""
    done = run("config", "--data-dir", "[red]x[/red] :smile: [compact]")
    assert "[red]x[/red] :smile: [compact]" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (("config", "--port", "x"), {}, ("port is 'x'", "command line")),
        (("config",), {"KVSTREAMS_PORT": "70000"}, ("port is 70000", "at most 65535", "KVSTREAMS_PORT")),
        (("config", "--config", "nowhere.toml"), {}, ("nowhere.toml is not there",)),
        (("router", "--router-mode", "best"), {}, ("router_mode is 'best'", "kv, round-robin, random")),
        (("worker", "--partitions", "0"), {}, ("partitions is 0", "at least 1")),
        (("topics", "create", "--topic-prefix", "a/b"), {}, ("topic_prefix is 'a/b'",)),
        (("kafka", "up", "--set", "novalue"), {}, ("--set 'novalue' is not KEY=VALUE",)),
        (("demo", "--policy", "best"), {}, ("--policy", "best", "round-robin")),
        (("bridge", "--engine", "id=1"), {}, ("--engine 'id=1'", "events, url missing")),
        (("bridge", "--engine", "id=1,url=u,events=e,zmq=z"), {}, ("zmq unknown",)),
        (("bridge", "--engine", "id=x,url=u,events=e"), {}, ("whole numbers",)),
        (("bridge", "--engine", "id=18446744073709551616,url=u,events=e"), {}, ("0 to 2^64-1",)),
        (("bridge", "--engine", "id=-1,url=u,events=e"), {}, ("0 to 2^64-1",)),
        (("bridge", "--engine", "id=1,url=u,events=e,dp=0"), {}, ("dp 1 to",)),
        (("bridge", "--engine", ""), {}, ("missing",)),
    ],
)
def test_a_wrong_value_is_one_line(
    arguments: tuple[str, ...], env: dict[str, str], words: tuple[str, ...], run: Run
) -> None:
    """A value that cannot be used is one line on stderr that names it, exit status 1, and no trace; Kafka is not
    asked."""
    line = assert_one_line(run(*arguments, env={"KVSTREAMS_KAFKA": "no-such-host.invalid:1", **env}))
    for word in words:
        assert word in line


def test_a_variable_that_is_no_knob_is_told_once_with_the_nearest(run: Run) -> None:
    """By the command and by the Faust worker that a command becomes, and what others read is passed over."""
    strange = {"KVSTREAMS_PROT": "1", "KVSTREAMS_TEST_KAFKA": "x", "KVSTREAMS_CONFIG": "none.toml"}
    told = "kvstreams: KVSTREAMS_PROT is set and is no knob; the nearest is KVSTREAMS_PORT"
    lines = run("config", env=strange).stderr.splitlines()
    assert lines[0].startswith(told)
    assert "none.toml is not there" in lines[1]
    assert len(lines) == 2
    for arguments in (("config",), ("worker",)):
        # The fault is none, which ends a worker while its App is built.
        lines = run(*arguments, env={"KVSTREAMS_PROT": "1", "KVSTREAMS_FAULT": "x"}).stderr.splitlines()
        assert [line.startswith(told) for line in lines if "KVSTREAMS_PROT" in line] == [True]


def test_faust_tells_of_a_variable_that_is_no_knob(tmp_path: Path) -> None:
    """The worker's own command line has none of ours around it."""
    done = subprocess.run(
        [sys.executable, "-m", "faust", "-A", "streams", "worker"],
        env=environment({"KVSTREAMS_BLOCKSIZE": "16", "KVSTREAMS_FAULT": "x"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode != 0
    assert done.stderr.count("KVSTREAMS_BLOCKSIZE is set and is no knob; the nearest is KVSTREAMS_BLOCK_SIZE") == 1


@pytest.mark.parametrize(("command", "package"), [("demo", "matplotlib"), ("demo", "psutil"), ("up", "psutil")])
def test_what_needs_an_extra_says_so_first(command: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than after minutes, or as an ImportError."""
    monkeypatch.setitem(sys.modules, package, None)
    failed = CliRunner().invoke(cli, [command]).exception
    assert isinstance(failed, LocalKafkaError)
    assert package in failed.message
    assert "kvstreams[local]" in failed.remedy


@pytest.mark.parametrize("arguments", [("config", "--prot", "1"), ("nothing",), ("bridge",), ("topics", "drop")])
def test_a_wrong_command_is_usage(arguments: tuple[str, ...], run: Run) -> None:
    """Unknown options and commands are told as usage, exit status 2, and no trace."""
    done = run(*arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_kafka_is_told_in_one_line_with_the_remedy(start: Start) -> None:
    """Every command that needs Kafka says where it looked, why nothing came of it, and what to do."""
    nobody = f"127.0.0.1:{free_port()}"
    asked: list[tuple[tuple[str, ...], str]] = [
        (("topics", "create"), nobody),
        (("topics", "describe"), nobody),
        (("router", "--port", "0"), nobody),
        (("bridge", "--engine", "id=1,url=http://u,events=tcp://e:1"), nobody),
        (("topics", "describe"), "no-such-host.invalid:9092"),
        (("topics", "describe"), "localhost:port"),
    ]
    started = [(start(*arguments, "--kafka", kafka), kafka) for arguments, kafka in asked]
    for process, kafka in started:
        out, err = process.communicate(timeout=PATIENCE_S)
        line = assert_one_line(subprocess.CompletedProcess((), process.returncode, out, err))
        assert f"no Kafka answers at {kafka}: " in line
        assert "refused" in line or "resolve" in line
        assert "kvstreams kafka up" in line


def test_kafka_status_where_none_runs(run: Run) -> None:
    """Where no Kafka runs, status says so with exit status 1, and down changes nothing."""
    done = run("kafka", "status", "--directory", "k")
    assert (done.returncode, done.stdout) == (1, "no Kafka runs in k\n")
    done = run("kafka", "down", "--directory", "k")
    assert (done.returncode, done.stdout) == (0, "no Kafka was running here\n")


def test_topics_are_created_once_and_described_as_wanted(scope: Settings, run: Run) -> None:
    """`topics create` makes all of them, may be repeated, and `topics describe` finds them as wanted."""
    names = [spec.name for spec in topics(scope).all()]
    done = run("topics", "describe", env=as_environ(scope))
    assert done.returncode == 1
    assert done.stdout.count("missing: kvstreams topics create") == len(names)
    first = run("topics", "create", env=as_environ(scope))
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines() == [f"{name}: {scope.partitions} partitions, 1 replicas" for name in names]
    before = describe_topics(scope, topics(scope).all())
    again = run("topics", "create", env=as_environ(scope))
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert describe_topics(scope, topics(scope).all()) == before
    done = run("topics", "describe", env=as_environ(scope))
    assert (done.returncode, done.stderr) == (0, "")
    for name in names:
        assert any(line.split()[0] == name and "as wanted" in line for line in done.stdout.splitlines())


def test_other_partitions_are_told_and_left(scope: Settings, run: Run) -> None:
    """Another number of partitions is refused with the remedy, and the topics stay as they are."""
    ensure_topics(scope, topics(scope).all())
    before = describe_topics(scope, topics(scope).all())
    other = as_environ(replace(scope, partitions=scope.partitions + 1))
    described = run("topics", "describe", env=other)
    assert described.returncode == 1
    assert described.stdout.count("differs, see below") == len(before)
    line = assert_one_line(run("topics", "create", env=other))
    for text in (described.stdout, line):
        assert "has 4 partitions, the settings say 5" in text
        assert "take another topic_prefix" in text
    assert describe_topics(scope, topics(scope).all()) == before


def test_other_settings_are_told_and_left(scope: Settings, run: Run) -> None:
    """Another setting of a topic is told with the very command that mends it, and nothing is altered."""
    name = topics(scope).workers.name
    client = admin(scope)
    client.create_topics([NewTopic(name, scope.partitions, 1)])[name].result(30)
    ensure_topics(scope, [spec for spec in topics(scope).all() if spec.name != name])
    before = describe_topics(scope, topics(scope).all())
    described = run("topics", "describe", env=as_environ(scope))
    assert described.returncode == 1
    assert described.stdout.count("differs, see below") == 1
    line = assert_one_line(run("topics", "create", env=as_environ(scope)))
    for text in (described.stdout, line):
        assert f"topic {name} has other settings: cleanup.policy is delete, not compact" in text
        assert f"--alter --entity-type topics --entity-name {name} --add-config 'cleanup.policy=[compact]," in text
        assert "segment.ms=[600000]'" in text
    assert describe_topics(scope, topics(scope).all()) == before


def test_what_kafka_refuses_is_told_as_its_answer(scope: Settings, run: Run) -> None:
    """A topic that the broker will not create is told in its own words, and not as a missing Kafka."""
    line = assert_one_line(run("topics", "create", "--replication", "3", env=as_environ(scope)))
    assert f"topic {topics(scope).kv_events.name} cannot be created" in line
    assert "replication factor" in line


def test_a_router_says_that_its_port_is_taken(scope: Settings, run: Run) -> None:
    """An address that cannot be listened on is one line with the remedy."""
    taken = scope.kafka.rpartition(":")[2]  # the broker itself listens there
    done = run("router", "--port", taken, "--log-level", "error", env=as_environ(scope))
    assert f"cannot listen on 127.0.0.1:{taken}" in assert_one_line(done)
    done = run("router", "--host", "192.0.2.1", "--log-level", "error", env=as_environ(scope))
    assert "cannot listen on 192.0.2.1" in assert_one_line(done)


def test_a_router_of_a_scope_without_topics_is_not_ready_and_creates_none(
    scope: Settings, start: Start, run: Run
) -> None:
    """It says why and what to do, changes nothing, and goes on as soon as the topics are there."""
    api = Api(f"http://127.0.0.1:{free_port()}")
    process = start("router", "--port", api.url.rpartition(":")[2], env=as_environ(scope))
    assert process.stderr is not None
    assert "routing on" in process.stderr.readline()
    assert "kvstreams topics create" in process.stderr.readline()
    names = [spec.name for spec in topics(scope).all()]
    told = api.call("GET", "/ready")
    assert (told.status, told.json["ready"], told.json["topics_missing"]) == (503, False, names)
    assert "kvstreams topics create" in told.json["reason"]
    for method, path, body in (
        ("POST", "/route", {"token_ids": [1]}),
        ("GET", "/loads", None),
        ("PUT", "/workers/1", {"url": "http://e", "model": "m", "block_size": 16}),
        ("PUT", "/pools/p", {"members": [1]}),
    ):
        assert "kvstreams topics create" in api.call(method, path, body).refused(503, "not_ready")
    assert api.call("GET", "/metrics").status == 200
    assert set(describe_topics(scope, topics(scope).all()).values()) == {None}
    assert run("topics", "create", env=as_environ(scope)).returncode == 0
    wait_for(lambda: api.call("GET", "/ready").status == 200, PATIENCE_S, "the router to be ready")
    assert api.call("PUT", "/pools/p", {"members": [1]}).given()["members"] == [1]


def test_a_router_ends_where_topics_appear_that_are_not_as_they_must_be(
    scope: Settings, start: Start, run: Run
) -> None:
    """With the remedy, as it would have been refused at its start."""
    process = start("router", "--port", "0", env=as_environ(scope))
    assert process.stderr is not None
    assert "routing on" in process.stderr.readline()
    ensure_topics(scope, topics(replace(scope, partitions=scope.partitions + 1)).all())
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "take another topic_prefix" in rest.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_logs_json_and_ends_when_asked(number: signal.Signals, scope: Settings, start: Start) -> None:
    """With --log-json every line is a JSON object; SIGTERM and Ctrl-C are ordinary ends."""
    process = start("router", "--port", "0", "--log-json", env=as_environ(scope))
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "routing on" in json.loads(first)["message"]
    process.send_signal(number)
    out, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    for line in rest.splitlines():
        assert set(json.loads(line)) >= {"at", "level", "logger", "message"}


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"worker_id": (1 << 64) - 1}, (1 << 64) - 1),
        ({"worker_id": 1 << 64}, str(1 << 64)),
        ({"worker_id": "\ud800"}, "\ud800"),
        ({"worker_id": {1: "x"}}, {"1": "x"}),
        ({"worker_id": Path("a/b")}, "a/b"),
        ({"worker_id": None}, None),
    ],
)
def test_a_json_log_line_holds_whatever_is_logged(extra: dict[str, object], field: object) -> None:
    """Any value becomes a field, a line never breaks in two, and the time names its zone."""
    record = logging.makeLogRecord(
        {"name": "n", "levelno": 30, "levelname": "WARNING", "msg": "two\nlines %s", "args": ("ü",), **extra}
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    told = json.loads(text)
    assert told["worker_id"] == field
    assert (told["level"], told["logger"], told["message"]) == ("warning", "n", "two\nlines ü")
    assert told["at"].endswith("+00:00")


def test_a_json_log_line_holds_the_trace() -> None:
    """An exception's trace is a field of the same line."""
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    told = json.loads(JsonFormatter().format(record))
    assert told["exception"].endswith("ValueError: why")


def test_a_sim_engine_starts_by_command(start: Start, tmp_path: Path) -> None:
    """`kvstreams sim` says where it listens, on stdout and in the file that was asked for, and ends when asked."""
    info = tmp_path / "info.json"
    ports = ("--port", "0", "--events-port", "0", "--replay-port", "0")
    process = start("sim", "--worker", "7", *ports, "--info", str(info))
    wait_for(info.exists, PATIENCE_S, "the engine's addresses")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out) == json.loads(info.read_text())

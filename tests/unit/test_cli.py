"""The command line in process: help, options, and JSON log lines."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from streams.cli import ESSENTIAL, cli
from streams.errors import InvalidRequest, KvStreamsError, LocalKafkaError
from streams.lab.kafka.broker import KafkaState
from streams.process.log import JsonFormatter, dict_config
from streams.settings import SECRETS, Settings


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Give every command and group as the words that call it."""
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("words", list(commands(cli)), ids=lambda words: " ".join(words) or "kvstreams")
def test_every_command_has_help(words: tuple[str, ...]) -> None:
    """Every command accepts --help and -h, and starts nothing then."""
    for flag in ("--help", "-h"):
        done = CliRunner().invoke(cli, [*words, flag])
        assert done.exit_code == 0
        assert "Usage:" in done.output


@pytest.mark.parametrize(
    "command", [("topics", "create"), ("topics", "describe"), ("router",), ("worker",), ("bridge",)]
)
def test_commands_that_use_settings_have_an_option_for_each(command: tuple[str, ...]) -> None:
    """Every setting is an option of every command that uses settings, except secrets."""
    text = CliRunner().invoke(cli, [*command, "--help"]).output
    for setting in fields(Settings):
        shown = re.search(rf"--{setting.name.replace('_', '-')}\b(?!-)", text)
        assert bool(shown) is (setting.name not in SECRETS)


def test_a_secret_is_masked_by_config_and_refused_as_an_option() -> None:
    """`kvstreams config` says where a secret came from, and the error for an option does not repeat its value."""
    environ = {f"KVSTREAMS_{name.upper()}": "sesame" for name in SECRETS}
    done = CliRunner().invoke(cli, ["config"], env=environ)
    assert done.exit_code == 0
    assert "sesame" not in done.output
    for name in SECRETS:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name} ")]
        assert "set, not shown" in line and f"KVSTREAMS_{name.upper()}" in line
        refused = CliRunner().invoke(cli, ["config", f"--{name.replace('_', '-')}=sesame"])
        assert refused.exit_code == 2
        assert "sesame" not in refused.output


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (("router",), ["--help"]),
        (("bridge",), ["--engine", "--help"]),
        (("cxl", "pool"), ["--member", "--no-members", "--lost", "--help"]),
        (("kafka", "up"), ["--directory", "--help"]),
    ],
)
def test_help_shows_a_commands_own_options_before_the_settings(command: tuple[str, ...], own: list[str]) -> None:
    """Help lists a command's own options first, then the essential settings, then all other settings."""
    text = CliRunner().invoke(cli, [*command, "--help"]).output
    first, settings, others = (*re.split(r"^(?:Settings|Other settings)[^\n]*$", text, flags=re.MULTILINE), "", "")[:3]
    assert all(option in first for option in own)
    if command == ("kafka", "up"):
        assert not settings + others
        return
    names = [setting.name for setting in fields(Settings) if setting.name not in SECRETS]
    options = [f"--{name.replace('_', '-')} " for name in names]
    essential = [f"--{name.replace('_', '-')} " for name in ESSENTIAL]
    assert not any(option in first for option in options)
    assert sorted(option for option in options if option in settings) == sorted(essential)
    assert "--config " in settings
    assert sorted(option for option in options if option in others) == sorted(set(options) - set(essential))


def test_each_setting_takes_one_line_if_the_output_is_piped() -> None:
    """So that `grep` finds it with its value and meaning, however long these are."""
    done = CliRunner().invoke(cli, ["config"])
    assert done.exit_code == 0
    names = [line.split(maxsplit=1)[0] for line in done.stdout.splitlines()]
    assert names == ["setting", *(each.name for each in fields(Settings))]


def test_unneeded_options_of_dynamo_are_accepted_with_a_warning() -> None:
    """Each warning is printed to stderr with the reason, and the command continues."""
    flags = ["--router-snapshot-threshold", "10000", "--durable-kv-events", "--no-router-durable-kv-events"]
    done = CliRunner().invoke(cli, ["config", *flags])
    assert done.exit_code == 0
    warnings = done.stderr.splitlines()
    assert len(warnings) == 3
    assert all(line.startswith("kvstreams: ") and "is not needed: " in line for line in warnings)
    assert "overlap_score" in done.stdout


@pytest.mark.parametrize(("command", "package"), [("demo", "matplotlib"), ("demo", "psutil"), ("up", "psutil")])
def test_a_missing_extra_is_reported_before_anything_starts(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the missing package and the extra to install."""
    monkeypatch.setitem(sys.modules, package, None)
    failed = CliRunner().invoke(cli, [command]).exception
    assert isinstance(failed, LocalKafkaError)
    assert package in failed.message
    assert "kvstreams[local]" in failed.remedy


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "uniform", "--json"],
        ["compare", "--router", "http://router:8000", "--json"],
        ["plan", "uniform", "--engines", "1", "--json"],
        ["replay-decisions", "--trace"],
        ["replay-decisions", "--json"],
        ["replay", "--out"],
        ["sim", "--info"],
        ["sim-pool", "--journal"],
    ],
)
def test_a_file_that_could_not_be_written_is_refused_before_anything_runs(arguments: list[str], tmp_path: Path) -> None:
    """The error names the option and what is wrong: the figures of an hour must not be lost at its end."""
    for file, said in ((tmp_path / "none" / "a", f"there is no folder {tmp_path / 'none'}"), (tmp_path, "a directory")):
        done = CliRunner().invoke(cli, [*arguments, str(file)])
        assert done.exit_code == 2
        assert f"'{arguments[-1]}'" in done.output
        assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--directory"],
        ["up", "--kafka-directory"],
        ["demo", "--directory"],
        ["kafka", "up", "--directory"],
    ],
)
def test_a_folder_that_is_a_file_is_refused_before_anything_starts(arguments: list[str], tmp_path: Path) -> None:
    """The error names the option."""
    file = tmp_path / "file"
    file.touch()
    done = CliRunner().invoke(cli, [*arguments, str(file)])
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[-1]}'" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "uniform", "--engine"], "--engine: {file} is not UTF-8 text"),
        (["plan", "uniform", "--engines", "1", "--engine"], "--engine: {file} is not UTF-8 text"),
        (["replay-decisions", "--engine"], "--engine: {file} is not UTF-8 text"),
        (["simulate"], "trace line 1 is not JSON"),
        (["compare", "--router", "http://router:8000", "--trace"], "trace line 1 is not JSON"),
    ],
)
def test_a_file_that_is_not_text_is_refused_in_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    """Such as a compressed one."""
    file = tmp_path / "file"
    file.write_bytes(b"\x1f\x8b\xff\xfe\n")
    failed = CliRunner().invoke(cli, [*arguments, str(file)]).exception
    assert isinstance(failed, KvStreamsError)
    assert said.format(file=file) in failed.message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "--into-kafka", "kafka-b:9092"], "--into-kafka is of use with --into only"),
        (["replay", "--token-file", "token"], "--token-file is of use with --verify only"),
        (["replay", "--into", "v2-", "--json"], "cannot be combined"),
        (["replay", "--verify", "http://router:8000", "--until", "15m"], "cannot be combined"),
        (["doctor", "--verify"], "name them with --router"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(arguments: list[str], said: str) -> None:
    """A move to another Kafka that copies nothing, or a doctor that compares no router, would look like a success."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_a_request_that_cannot_be_read_is_refused_before_topics_are_read(tmp_path: Path) -> None:
    """The error names the file."""
    file = tmp_path / "request.json"
    file.write_text('{"token_ids": [1, 2')
    failed = CliRunner().invoke(cli, ["replay", "--route", str(file), "--kafka", "127.0.0.1:1"]).exception
    assert isinstance(failed, InvalidRequest)
    assert failed.message.startswith(f"{file} is no body of POST /route: ")


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
def test_a_json_log_line_holds_any_value(extra: dict[str, object], field: object) -> None:
    """Any value becomes a field, a message with a line break stays on one line, and the time has a zone."""
    record = logging.makeLogRecord(
        {"name": "n", "levelno": 30, "levelname": "WARNING", "msg": "two\nlines %s", "args": ("ü",), **extra}
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["worker_id"] == field
    assert (line["level"], line["logger"], line["message"]) == ("warning", "n", "two\nlines ü")
    assert line["at"].endswith("+00:00")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_line_names_its_process_if_it_is_one_of_several(as_json: bool) -> None:
    """The processes of a group write to the same place."""
    for number in (None, 2):
        formatters = dict_config(Settings(log_json=as_json), number)["formatters"]
        line = (
            logging.config.DictConfigurator({})
            .configure_formatter(formatters["chosen"])
            .format(logging.makeLogRecord({"name": "n", "levelno": 20, "levelname": "INFO", "msg": "x"}))
        )
        found = json.loads(line).get("process") if as_json else 2 if "INFO    process 2  n  x" in line else None
        assert found == number


@pytest.mark.parametrize("directory", [None, "other place"])
def test_kafka_up_prints_the_command_that_stops_this_kafka(
    directory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the folder unless that is the default one."""

    def started(directory: Path, *_: object, **__: object) -> KafkaState:
        return KafkaState("127.0.0.1:9092", (1,), "4", "17", directory, reused=False)

    monkeypatch.setattr("streams.lab.commands.kafka.start_kafka", started)
    given = [] if directory is None else ["--directory", directory]
    lines = CliRunner().invoke(cli, ["kafka", "up", *given]).stdout.splitlines()
    assert lines[-1] == "stop it:  kvstreams kafka down" + ("" if directory is None else " --directory 'other place'")


@pytest.mark.parametrize(
    "exported", [[], ["KVSTREAMS_KAFKA"], ["KVSTREAMS_KAFKA", "KVSTREAMS_KAFKA_SASL_PASSWORD_FILE"]]
)
def test_the_command_that_uses_a_secure_kafka_unsets_variables_that_its_file_cannot_replace(
    exported: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A variable that is left from another Kafka takes precedence over the file."""

    def started(directory: Path, *_: object, **__: object) -> KafkaState:
        return KafkaState("127.0.0.1:9092", (1,), "4", "17", directory, reused=False, secure=True)

    monkeypatch.setattr("streams.lab.commands.kafka.start_kafka", started)
    for name in [name for name in os.environ if name.startswith("KVSTREAMS_KAFKA")]:
        monkeypatch.delenv(name)
    for name in exported:
        monkeypatch.setenv(name, "another")
    lines = CliRunner().invoke(cli, ["kafka", "up", "--secure", "--directory", str(tmp_path)]).stdout.splitlines()
    unset = f"unset {' '.join(exported)} && " if exported else ""
    assert f"use it:   {unset}export KVSTREAMS_CONFIG={tmp_path}/secure/kvstreams.toml" in lines


def test_a_json_log_line_holds_the_stack_trace() -> None:
    """An exception's stack trace is a field of the same line."""
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    line = json.loads(JsonFormatter().format(record))
    assert line["exception"].endswith("ValueError: why")

"""What all tests share: child processes, commands, the fast profile, and the end of the broker of tests/kafka.

A test that uses none of these fixtures starts nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from streams.local.kafka import LocalKafka
from streams.local.processes import Children
from tests.helpers.broker import DIRECTORY_ENV, broker_config
from tests.helpers.commands import PATIENCE_S, Run, Start, start_command


def pytest_configure(config: pytest.Config) -> None:
    """Choose the folder of the broker that all worker processes of this run share."""
    if not hasattr(config, "workerinput"):
        os.environ[DIRECTORY_ENV] = tempfile.mkdtemp(prefix="kvstreams-test-kafka-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the broker, if any test started it, after the last worker process has ended."""
    if not hasattr(config, "workerinput"):
        directory = Path(os.environ.pop(DIRECTORY_ENV))
        LocalKafka(broker_config(directory)).down()
        shutil.rmtree(directory)


@pytest.fixture
def children() -> Iterator[Children]:
    """Give the owner of the test's child processes, which ends each of them by its own id."""
    with Children() as owned:
        yield owned


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Give a function that starts `kvstreams` in an empty folder; processes that still run are killed afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        started.append(start_command(tmp_path, arguments, env or {}))
        return started[-1]

    yield begin
    for process in started:
        with process:  # closes its pipes
            process.kill()


@pytest.fixture
def run(start: Start) -> Run:
    """Give a function that runs `kvstreams` to its end."""

    def to_the_end(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, env=env)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return to_the_end

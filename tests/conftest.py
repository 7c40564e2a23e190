"""What all tests share: the rings of tests, coroutines as tests, processes, and the end of the broker of tests/kafka.

A test that uses none of these fixtures starts nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from streams.lab.kafka import ports
from streams.lab.kafka.broker import LocalKafka
from streams.lab.processes import Children
from tests.helpers.broker import DIRECTORY_ENV, broker_config
from tests.helpers.commands import PATIENCE_S, Run, Start, kill_with_children, start_command
from tests.helpers.order import dealt
from tests.helpers.rings import in_first_ring

#: With --fast, tests of generated examples run one in so many of them, and at least FAST_EXAMPLES_MIN.
FAST_EXAMPLES_DIVISOR = 5
FAST_EXAMPLES_MIN = 10

#: Where hypothesis keeps the settings of a test, and where its own pytest plugin replaces them for --hypothesis-seed
#: and similar options. `settings` as a decorator can be applied only once, and most tests apply it themselves.
_HYPOTHESIS_SETTINGS = "_hypothesis_internal_use_settings"

# Hypothesis fails a test whose example takes 200 ms, unless a profile says otherwise. On a busy machine any may.
settings.register_profile("kvstreams", deadline=None)
settings.load_profile("kvstreams")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --fast, which `make test` and `make fast` use, and --long, which `make trust` and `make lmcache` use."""
    parser.addoption("--fast", action="store_true", help="the first ring of tests, with fewer generated examples")
    parser.addoption("--long", action="store_true", help="tests that have a long form, in that form")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for several processes; with --fast, keep only the first ring, with fewer generated examples."""
    _select(config, items)
    n_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if n_processes > 1:
        long = [item for item in items if item.get_closest_marker("long_running")]
        others = [item for item in items if not item.get_closest_marker("long_running")]
        heavy = [item for item in others if _starts_processes(item)]
        # Tests that share the two routers of one process stay together, so that few processes start them.
        rest = sorted((item for item in others if not _starts_processes(item)), key=lambda item: not _on_kafka(item))
        items[:] = dealt(long, heavy, rest, n_processes)


def _on_kafka(item: pytest.Item) -> bool:
    return item.path.parent.name in ("kafka", "browser", "fault_tolerance")


def _starts_processes(item: pytest.Item) -> bool:
    """Whether a test takes seconds, because it starts processes of its own."""
    return _on_kafka(item) and "fleet" not in getattr(item, "fixturenames", ())


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fast, deselect tests outside the first ring and reduce the number of generated examples of the others."""
    if not config.getoption("--fast"):
        return
    config.hook.pytest_deselected(items=[item for item in items if not in_first_ring(item)])
    items[:] = [item for item in items if in_first_ring(item)]
    # One function may be several items, by its parameters, and must be changed once.
    for function in {item.function for item in items if isinstance(item, pytest.Function)}:
        full = getattr(function, _HYPOTHESIS_SETTINGS, None)
        if full is not None:
            fewer = min(full.max_examples, max(FAST_EXAMPLES_MIN, full.max_examples // FAST_EXAMPLES_DIVISOR))
            setattr(function, _HYPOTHESIS_SETTINGS, settings(full, max_examples=fewer))


def pytest_configure(config: pytest.Config) -> None:
    """Choose the folder of the broker that all worker processes of this run share, and the ports of each."""
    # A shell without job control starts background processes with Ctrl-C ignored, and their children inherit that. The
    # commands that tests interrupt would not end.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "long_running: takes 15 s and more by itself; it begins before others")
    config.addinivalue_line("markers", "thorough: takes seconds of computing; only `make test-all` runs it")
    config.addinivalue_line("markers", "first_ring(*shows): `make test` runs it; names as of tests/unit/test_rings.py")
    if not hasattr(config, "workerinput"):
        os.environ[DIRECTORY_ENV] = tempfile.mkdtemp(prefix="kvstreams-test-kafka-")
    else:
        # A port is chosen seconds before its server listens, and a server that restarts leaves it for as long. In one
        # of two hundred cases another worker process would choose the same one meanwhile.
        # Workers that replace crashed ones are numbered on.
        count = config.workerinput["workercount"]
        number = int(config.workerinput["workerid"].removeprefix("gw")) % count
        share = len(ports.PORTS) // count
        ports.PORTS = ports.PORTS[number * share : (number + 1) * share]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the broker, if any test started it, after the last worker process has ended."""
    if not hasattr(config, "workerinput"):
        directory = Path(os.environ.pop(DIRECTORY_ENV))
        LocalKafka(broker_config(directory)).down()
        shutil.rmtree(directory)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own, which its fixture `new_loop` makes, if it has one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    new_loop: Any = pyfuncitem.funcargs.get("new_loop")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def long_form(request: pytest.FixtureRequest) -> bool:
    """Give whether the test runs in its long form, with --long."""
    return bool(request.config.getoption("--long"))


@pytest.fixture
def children() -> Iterator[Children]:
    """Give the owner of the test's child processes, which ends each of them by its own id."""
    with Children() as owned:
        yield owned


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Give a function that starts `kvstreams` in an empty folder.

    Processes that still run are killed afterwards, and with them those that they started.
    """
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        started.append(start_command(tmp_path, arguments, env or {}))
        return started[-1]

    yield begin
    for process in started:
        with process:  # closes its pipes
            kill_with_children(process)


@pytest.fixture
def run(start: Start) -> Run:
    """Give a function that runs `kvstreams` to its end."""

    def to_the_end(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, env=env)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return to_the_end

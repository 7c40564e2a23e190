"""A Faust worker with `router_process`, as real processes: its router has a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, get_bytes, is_ready, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from tests.helpers.api import PATIENCE_S, Api
from tests.helpers.commands import environment
from tests.helpers.workers import is_running, n_requests

TOKENS = list(range(64))


class Apart:
    """A worker whose router is another process, and an engine."""

    def __init__(self, stack: Stack) -> None:
        metrics_port = free_port()
        self.worker: RouterProcess = stack.worker(env={"KVSTREAMS_METRICS_PORT": str(metrics_port)})
        self.api = Api(self.worker.url)
        self.agents = f"http://{stack.settings.host}:{metrics_port}"
        stack.bridge(stack.engines(1, EngineConfig(), "m", 1.0))
        wait_workers(self.worker.url, 1)

    def router_pid(self) -> int:
        """The process of the router that was started last, from the log."""
        found = re.findall(r"process 1 has pid (\d+) and port (\d+)", self.worker.child.log_path.read_text())
        pid, port = found[-1]
        assert int(port) == self.worker.settings.port
        return int(pid)


@pytest.fixture
def apart(scope: Settings, tmp_path: Path) -> Iterator[Apart]:
    with Children() as children:
        settings = replace(scope, router_process=True, drain_timeout_s=3.0)
        yield Apart(Stack(settings, tmp_path, children))


def is_published(url: str) -> bool:
    """Whether Kafka has acknowledged all bookings of a router."""
    return b"\nkvstreams_bookings_unacknowledged 0" in get_bytes(f"{url}/metrics")


def families(url: str) -> set[str]:
    """The names of all metrics."""
    return set(re.findall(r"# TYPE (\S+)", get_bytes(f"{url}/metrics").decode()))


@pytest.mark.first_ring("worker --router-process")
def test_a_workers_router_answers_from_a_process_of_its_own(apart: Apart) -> None:
    """It is started again when it is killed, with all bookings, while the worker goes on; SIGTERM ends both."""
    apart.api.route(request_id="r", token_ids=TOKENS)
    pid = apart.router_pid()
    assert psutil.Process(pid).ppid() == apart.worker.child.pid
    agents, router = families(apart.agents), families(apart.worker.url)
    assert "kvstreams_agent_lag_records" in agents - router
    assert "kvstreams_kv_hit_rate" in router - agents
    wait_for(lambda: is_ready(apart.agents), PATIENCE_S, "the worker to be ready")
    wait_for(lambda: is_published(apart.worker.url), PATIENCE_S, "the booking in Kafka")

    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: apart.router_pid() != pid and is_ready(apart.worker.url), PATIENCE_S, "the router's return")
    assert n_requests(apart.api) == 1
    assert is_ready(apart.agents)

    pids = [pid, apart.router_pid()]
    apart.worker.child.stop()
    log = apart.worker.child.log_path.read_text()
    assert apart.worker.child.exit_code == 0, log
    assert not any(map(is_running, pids))
    assert log.count("stopped after") == 1
    assert "Traceback" not in log


def test_the_router_ends_with_a_worker_that_was_killed(apart: Apart) -> None:
    """Then the worker that is started in its place can listen on the same port."""
    pid = apart.router_pid()
    apart.worker.child.kill()
    wait_for(lambda: not is_running(pid), PATIENCE_S, "the router to end")
    apart.worker.child.start()
    Stack.wait_ready(apart.worker)
    assert apart.router_pid() != pid


def test_a_worker_whose_routers_port_is_in_use_ends_with_one_line(scope: Settings) -> None:
    """It does so before it connects to Kafka."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = replace(scope, router_process=True, port=other.getsockname()[1], kafka="127.0.0.1:1")
        ended = subprocess.run(
            [sys.executable, *settings.faust_arguments],
            env=environment(as_environ(settings)),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.strip().splitlines()
    assert f"cannot listen on 127.0.0.1:{settings.port}" in line


def test_a_worker_ends_if_its_router_cannot_be_kept_running(apart: Apart) -> None:
    """What watches the worker sees the fault. Here another program has taken the port of a router that was killed."""
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with other:
        os.kill(apart.router_pid(), signal.SIGKILL)
        wait_for(lambda: _takes(other, apart.worker.settings.port), PATIENCE_S, "the port")
        # Five starts, which take 10 s each next to other tests, and 15 s between them.
        wait_for(lambda: not apart.worker.child.running, 4 * PATIENCE_S, "the worker to end")
    assert apart.worker.child.exit_code == 1
    log = apart.worker.child.log_path.read_text()
    assert "process 1 ended with code 1, 6 times in a row" in log


def _takes(other: socket.socket, port: int) -> bool:
    try:
        other.bind(("127.0.0.1", port))
        other.listen()
    except OSError:  # the router was not ended yet
        return False
    return True

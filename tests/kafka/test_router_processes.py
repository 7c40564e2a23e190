"""`kvstreams router --processes 2`: two routers on one port, as real processes."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

import pytest

from streams.kafka.clients import ensure_topics
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port, free_ports_in_a_row
from streams.lab.processes import Child, Children
from streams.lab.stack import READY_TIMEOUT_S, Stack, is_ready, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.api import PATIENCE_S, Api
from tests.helpers.authority import Authority
from tests.helpers.commands import environment
from tests.helpers.workers import is_running, n_requests

TOKENS = list(range(64))


class Processes:
    """The parent, and the APIs of the common port and of each process."""

    def __init__(self, settings: Settings, child: Child) -> None:
        self.settings = settings
        self.child = child
        self.common = Api(f"http://{settings.host}:{settings.port}")
        self.own = [Api(f"http://{settings.host}:{settings.process_port + n}") for n in range(2)]

    def pids(self) -> list[int]:
        """The last process id of each process, from the log."""
        found = re.findall(r"process (\d) has pid (\d+)", self.child.log_path.read_text())
        return [pid for _, pid in sorted({number: int(pid) for number, pid in found}.items())]


@pytest.fixture
def processes(scope: Settings, tmp_path: Path) -> Iterator[Processes]:
    with Children() as children:
        settings = replace(
            scope, port=free_port(), processes=2, process_port=free_ports_in_a_row(2), drain_timeout_s=3.0
        )
        stack = Stack(settings, tmp_path, children)
        stack.worker(router=False)
        arguments = ["-m", "streams.cli", "router"]
        child = children.add(Child("routers", arguments, tmp_path / "routers.log", as_environ(settings))).start()
        both = Processes(settings, child)
        for api in both.own:
            child.wait_ready(lambda api=api: is_ready(api.url), READY_TIMEOUT_S)  # type: ignore[misc]
        stack.bridge(stack.engines(1, EngineConfig(), "m", 1.0))
        for api in both.own:
            wait_workers(api.url, 1)
        yield both


def answering(api: Api) -> str:
    """Which process answers a new connection."""
    page = api.call("GET", "/metrics").body.decode()
    (process,) = set(re.findall(r'process="(\d)"', page))
    samples = [line for line in page.splitlines() if line and not line.startswith("#")]
    assert all('process="' in line for line in samples if not line.startswith("process_"))
    assert isinstance(process, str)
    return process


def later(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, PATIENCE_S, what)


@pytest.mark.first_ring("router --processes", "bridge", "sim")
def test_two_processes_share_a_port_their_bookings_and_their_end(processes: Processes) -> None:
    """Connections reach both, a killed one is started again while the other answers, and SIGTERM ends both."""
    assert [answering(api) for api in processes.own] == ["1", "2"]
    assert {answering(processes.common) for _ in range(64)} == {"1", "2"}
    assert {*re.findall(r" process (\d)  streams", processes.child.log_path.read_text())} == {"1", "2"}

    processes.common.route(request_id="r", token_ids=TOKENS)
    for api in processes.own:
        later(lambda api=api: n_requests(api) == 1, "both processes to have the booking")  # type: ignore[misc]
    assert processes.own[1].call("DELETE", "/loads/r").given()["buffered"] is False
    later(lambda: n_requests(processes.own[0]) == 0, "the other process to have its end")

    first = processes.pids()
    os.kill(first[1], signal.SIGKILL)
    later(lambda: len(processes.pids()) == 2 and processes.pids()[1] != first[1], "the process to be started again")
    assert {answering(processes.common) for _ in range(32)} == {"1"}  # the new one joins once it is ready
    later(lambda: is_ready(processes.own[1].url), "the new process to be ready")
    later(lambda: answering(processes.common) == "2", "the new process to join")

    # A second command does not take half of the connections of the first one.
    again = subprocess.run(
        [sys.executable, "-m", "streams.cli", "router"],
        env=environment(as_environ(processes.settings)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert again.returncode == 1
    assert "cannot listen on" in again.stderr

    pids = processes.pids()
    processes.child.signal(signal.SIGTERM)
    later(lambda: not processes.child.running, "the parent to end")
    assert processes.child.exit_code == 0
    assert not any(map(is_running, [first[1], *pids]))
    assert processes.child.log_path.read_text().count("stopped after") == 2


def test_processes_serve_tls_and_renew_their_certificate(scope: Settings, tmp_path: Path) -> None:
    """Both answer over TLS only, on the common port and on their own, and both use a certificate that replaces it."""
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    served = tmp_path / "served.pem"
    served.write_bytes(Path(first.sign("one", "127.0.0.1")).read_bytes())
    settings = replace(
        scope,
        port=free_port(),
        processes=2,
        process_port=free_ports_in_a_row(2),
        drain_timeout_s=3.0,
        router_min_initial_workers=0,
        tls_certificate=str(served),
    )
    ensure_topics(settings, topics(settings).all())

    def apis(authority: Authority) -> list[Api]:
        context = ssl.create_default_context(cafile=authority.file)
        ports = (settings.port, settings.process_port, settings.process_port + 1)
        return [Api(f"https://{settings.host}:{port}", tls=context) for port in ports]

    def ready(authority: Authority) -> bool:
        try:
            return all(api.call("GET", "/ready").status == 200 for api in apis(authority))
        except OSError:  # nothing listens yet, or another certificate is served
            return False

    with Children() as children:
        arguments = ["-m", "streams.cli", "router"]
        child = children.add(Child("routers", arguments, tmp_path / "routers.log", as_environ(settings))).start()
        child.wait_ready(lambda: ready(first), READY_TIMEOUT_S)
        common, *own = apis(first)
        assert [answering(api) for api in own] == ["1", "2"]
        assert {answering(common) for _ in range(64)} == {"1", "2"}
        with pytest.raises((OSError, HTTPException)):
            Api(f"http://{settings.host}:{settings.port}").call("GET", "/healthz")
        served.write_bytes(Path(second.sign("two", "127.0.0.1")).read_bytes())
        later(lambda: ready(second) and not ready(first), "the new certificate")
        assert {answering(apis(second)[0]) for _ in range(64)} == {"1", "2"}
        child.stop()
        assert child.exit_code == 0
        assert "Traceback" not in child.log_path.read_text()


def test_processes_end_with_their_parent(processes: Processes) -> None:
    """Processes whose parent was killed stop by themselves."""
    pids = processes.pids()
    assert all(map(is_running, pids))
    processes.child.kill()
    later(lambda: not any(map(is_running, pids)), "the processes to end")

"""Several processes on one port: their ports, restarts and end, with small programs in place of routers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from streams.errors import ProcessError, SettingsError
from streams.lab.kafka.ports import free_port
from streams.process import kept_processes
from streams.process.kept_processes import ENDS_MAX
from streams.process.metrics import Metric, MetricsRegistry, counter, gauge, histogram
from streams.process.waiting import wait_for
from streams.router_api.processes import process_group
from streams.router_api.processes.process_group import ProcessGroup, ProcessPlace, check_ports
from streams.settings import Settings

PATIENCE_S = 20.0

#: Writes its process id, number and way of joining to a file of its own, and stays.
STAYING = """
import os, sys, time, pathlib
folder, _, _, number, _, joins = sys.argv[1:]
pathlib.Path(folder, f"{number}-{joins}-{os.getpid()}").touch()
time.sleep(60)
"""


def settings(**changes: int | float) -> Settings:
    return Settings(**{"port": free_port(), "processes": 2, "drain_timeout_s": 0.1, **changes})  # type: ignore[arg-type]


def program(code: str, *arguments: object) -> Sequence[str]:
    return (sys.executable, "-c", code, *map(str, arguments))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("port", "process_port", "processes", "ports"),
    [(8000, 0, 2, [8001, 8002]), (8000, 9000, 3, [9000, 9001, 9002]), (8000, 7999, 1, [7999])],
)
def test_each_process_has_a_port_of_its_own(port: int, process_port: int, processes: int, ports: list[int]) -> None:
    """The ports of the processes follow each other."""
    given = settings(port=port, process_port=process_port, processes=processes)
    check_ports(given)
    assert [ProcessPlace(number).own_port(given) for number in range(1, processes + 1)] == ports


@pytest.mark.parametrize(
    ("port", "process_port", "processes"), [(0, 0, 2), (8000, 8000, 2), (8000, 7999, 2), (65535, 0, 2), (1, 65534, 3)]
)
def test_ports_that_processes_cannot_have_are_refused(port: int, process_port: int, processes: int) -> None:
    """No port, a port of a process that is the common one, and ports beyond the last one are refused."""
    with pytest.raises(SettingsError, match="port is"):
        check_ports(settings(port=port, process_port=process_port, processes=processes))


def test_a_port_that_is_taken_is_refused_before_a_process_starts() -> None:
    """The parent finds another program on the common port, even one that shares it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        group = ProcessGroup(settings(port=other.getsockname()[1]), program("raise SystemExit(0)"))
        with pytest.raises(SettingsError, match="cannot listen on"):
            asyncio.run(group.run())


def test_processes_are_started_again_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed is started again, to join once it is ready; a cancellation ends all processes."""
    monkeypatch.setattr(kept_processes, "RESTART_FIRST_S", 0.05)

    def started() -> dict[tuple[str, str], int]:
        names = [path.name.rsplit("-", 1) for path in tmp_path.iterdir()]
        return {(name[0], name[2:]): int(pid) for name, pid in names}

    async def run() -> list[int]:
        running = asyncio.create_task(ProcessGroup(settings(), program(STAYING, tmp_path)).run())
        await asyncio.to_thread(wait_for, lambda: len(started()) == 2, PATIENCE_S, "both processes")
        first = started()
        assert first.keys() == {("1", "at-once"), ("2", "at-once")}
        os.kill(first["2", "at-once"], signal.SIGKILL)
        await asyncio.to_thread(wait_for, lambda: len(started()) == 3, PATIENCE_S, "a third process")
        assert ("2", "when-ready") in started()
        assert is_running(first["1", "at-once"])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return list(started().values())

    assert not any(map(is_running, asyncio.run(run())))


def test_a_process_that_ends_again_and_again_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ENDS_MAX ends in a row, with growing pauses, the parent ends the others and fails."""
    monkeypatch.setattr(kept_processes, "RESTART_FIRST_S", 0.05)
    code = """
import os, sys, time, pathlib
folder, _, _, number, _, joins = sys.argv[1:]
pathlib.Path(folder, f"{number}-{time.monotonic_ns()}-{os.getpid()}").touch()
time.sleep(60 if number == "1" else 0)
sys.exit(3)
"""
    with pytest.raises(ProcessError, match=f"process 2 ended with code 3, {ENDS_MAX} times in a row"):
        asyncio.run(ProcessGroup(settings(), program(code, tmp_path)).run())
    starts = sorted(int(path.name.split("-")[1]) / 1e9 for path in tmp_path.glob("2-*"))
    assert len(starts) == ENDS_MAX
    # Each pause is at least twice the one before, apart from the time that a start takes.
    for number, (earlier, later) in enumerate(pairwise(starts)):
        assert later - earlier >= 0.05 * 2**number
    assert not any(is_running(int(path.name.rsplit("-", 1)[1])) for path in tmp_path.iterdir())


async def test_a_process_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end within its time is killed."""
    monkeypatch.setattr(process_group, "END_MARGIN_S", 0.2)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAYING
    running = asyncio.create_task(ProcessGroup(settings(), program(code, tmp_path)).run())
    await asyncio.to_thread(wait_for, lambda: len(list(tmp_path.iterdir())) == 2, PATIENCE_S, "both processes")
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began < PATIENCE_S
    assert not any(is_running(int(path.name.rsplit("-", 1)[1])) for path in tmp_path.iterdir())


def test_every_metric_of_one_of_several_processes_names_it() -> None:
    """The label `process` is on counters, gauges with labels of their own, and histograms, and only if it is given."""
    metrics: tuple[Metric[int], ...] = (
        counter("kvstreams_a_total", "A", lambda now: now),
        gauge("kvstreams_b", "B", lambda now: now + 1),
        histogram("kvstreams_c_seconds", "C", 1.0),
    )
    for process, labels in (("2", '{process="2"}'), ("", "")):
        registry = MetricsRegistry(metrics, lambda: 1, process)
        registry.histogram("kvstreams_c_seconds").observe(0.5)
        page = registry.page().decode()
        for sample in (
            f"kvstreams_a_total{labels} 1.0",
            f"kvstreams_b{labels} 2.0",
            f"kvstreams_c_seconds_count{labels} 1.0",
        ):
            assert f"\n{sample}\n" in page

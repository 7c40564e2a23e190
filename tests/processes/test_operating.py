"""Processes without Kafka: importing the App has no effects, a worker that cannot start, the loop that runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streams.lab.kafka.ports import free_port
from streams.lab.stack import get_json
from streams.process.waiting import wait_for
from tests.helpers.commands import PATIENCE_S, Start, assert_one_line, environment

BRIDGE = ("bridge", "--engine", "id=1,url=http://127.0.0.1:9,events=tcp://127.0.0.1:9")


def faust(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Faust's own command line in an empty folder, with an address at which no Kafka is."""
    no_kafka = {"KVSTREAMS_KAFKA": f"127.0.0.1:{free_port()}", "KVSTREAMS_PORT": str(free_port())}
    return subprocess.run(
        [sys.executable, "-m", "faust", "-A", "streams", *arguments],
        env=environment({**no_kafka, **env}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("agents",), "kv-events, cxl-events"),
        (("tables",), "Tables"),
        (("models",), "name"),
        (("--help",), "worker"),
        (("worker", "--help"), "--web-port"),
    ],
)
def test_other_commands_of_faust_work_offline_and_have_no_effect(
    arguments: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    """No line about Kafka, no folder, no compiled kernel, and no reset, although the settings ask for one."""
    folder, cache = tmp_path / "empty", tmp_path / "kernels"
    folder.mkdir()
    done = faust(folder, *arguments, KVSTREAMS_ROUTER_RESET_STATES="on", NUMBA_CACHE_DIR=str(cache))
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout
    assert list(folder.iterdir()) == []
    assert not list(cache.rglob("*.nbc"))


def test_importing_the_app_makes_no_client_and_compiles_nothing() -> None:
    """Importing `streams.app` starts no thread, opens no socket and loads no kernel."""
    program = (
        "import threading, streams\n"
        "app = streams.app\n"
        "from streams.core.kernels.compiling import is_ready\n"
        "from streams.warming import WORKER, _kernel\n"
        "import gc; from confluent_kafka import Consumer, Producer\n"
        "clients = [each for each in gc.get_objects() if isinstance(each, (Consumer, Producer))]\n"
        "print(threading.active_count(), len(clients), sum(is_ready(_kernel(name)) for name in WORKER))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment({}), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr) == ("1 0 0\n", "")


def test_a_worker_without_kafka_ends_with_one_line(start: Start) -> None:
    """The line names the address that was tried, the cause and the remedy."""
    unused = f"127.0.0.1:{free_port()}"
    process = start("worker", "--kafka", unused, "--port", str(free_port()))
    out, err = process.communicate(timeout=PATIENCE_S)
    line = assert_one_line(subprocess.CompletedProcess((), process.returncode, out, err))
    assert f"no Kafka answers at {unused}: " in line
    assert "refused" in line
    assert "kvstreams kafka up" in line


@pytest.mark.parametrize("command", [("worker",), ("router",), ("worker", "--no-router"), BRIDGE])
def test_a_port_in_use_is_one_line(command: tuple[str, ...], start: Start) -> None:
    """Every process that listens reports it at once, before it waits for Kafka, and names the option to change."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        option = "--port" if command in (("worker",), ("router",)) else "--metrics-port"
        process = start(*command, option, port, "--kafka", f"127.0.0.1:{free_port()}")
        out, err = process.communicate(timeout=PATIENCE_S)
    line = assert_one_line(subprocess.CompletedProcess((), process.returncode, out, err))
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert option in line


@pytest.mark.parametrize("command", [("worker",), ("router",), ("worker", "--no-router"), BRIDGE])
def test_a_process_answers_while_it_waits_for_kafka_and_ends_on_a_signal(
    command: tuple[str, ...], start: Start
) -> None:
    """Before Kafka has answered, /healthz is 200 and /ready says what the process does; SIGTERM ends it with 0."""
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = free_port()
        kafka = f"127.0.0.1:{silent.getsockname()[1]}"
        option = "--port" if command in (("worker",), ("router",)) else "--metrics-port"
        process = start(*command, "--kafka", kafka, option, str(port))
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(url), PATIENCE_S, "the process to answer")
        assert get_json(f"{url}/healthz") == {"status": "ok"}
        assert get_json(f"{url}/ready")["reason"] == "connecting to Kafka"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, "", "")


def answers(url: str) -> bool:
    try:
        get_json(f"{url}/healthz")
    except OSError:
        return False
    return True


RUN = """
import asyncio, sys
from streams.cli.serving import run_until_signalled

async def main():
    print(type(asyncio.get_running_loop()).__module__, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.1)
        print("cleaned up", flush=True)

run_until_signalled(main())
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_router_and_bridge_run_on_uvloop_and_clean_up_on_a_signal(number: signal.Signals) -> None:
    """The running loop is uvloop's. A signal cancels what runs, which may still await while it cleans up."""
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "uvloop\n"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest) == (0, "cleaned up\nended\n")


WARM = """
import asyncio, os, sys
from streams import warming

notes = []

async def main():
    task = asyncio.create_task(warming.warm_while_serving(warming.WORKER, notes.append))
    while not notes:
        await asyncio.sleep(0.01)  # the loop runs while kernels are compiled
    print(notes[-1], flush=True)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("cancelled", flush=True)

asyncio.run(main())
"""


def test_compiling_does_not_block_the_loop_and_leaves_no_process_when_it_is_cancelled(tmp_path: Path) -> None:
    """The progress is noted while the loop runs; a cancelled compilation ends at once, and its processes with it."""
    env = environment({"NUMBA_CACHE_DIR": str(tmp_path / "kernels")})
    process = subprocess.Popen([sys.executable, "-c", WARM], stdout=subprocess.PIPE, text=True, env=env)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("compiling kernels, 0 of ")
        rest, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest) == (0, "cancelled\n")
    deadline = time.monotonic() + PATIENCE_S
    while any(str(tmp_path) in environment_of(int(pid.name)) for pid in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def environment_of(pid: int) -> str:
    """The environment of a process, or "" if it has ended."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return ""

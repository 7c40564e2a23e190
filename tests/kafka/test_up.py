"""`kvstreams kafka` and `kvstreams up`, as a user runs them, on a Kafka that they start themselves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from streams.process.waiting import wait_for
from tests.helpers.api import Api
from tests.helpers.commands import PATIENCE_S, Run, Start, environment
from tests.helpers.pages import block_of, shape


def pasted(line: str) -> str:
    """The output of a command that `up` has printed, as a reader pastes it into another terminal."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line], env=environment({"PATH": path}), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


def shown_when_ready(process: subprocess.Popen[str]) -> list[str]:
    """Wait until `up` has started everything, and return the lines that it has printed."""
    assert process.stdout is not None
    shown: list[str] = []
    while not shown or "Ctrl-C" not in shown[-1]:
        line = process.stdout.readline()
        assert line, f"it ended: {''.join(shown)}{process.communicate()[1]}"
        shown.append(line)
    return shown


def numberless(line: str) -> str:
    """A printed line without ports, and with lists of numbers in short."""
    return re.sub(r"(0, )+0", "0", shape(line))


@pytest.mark.first_ring("kafka", "up")
@pytest.mark.long_running
def test_everything_runs_on_a_kafka_that_was_started_before_and_leaves_it_running(
    run: Run, start: Start, tmp_path: Path
) -> None:
    """The commands that `up` prints do what docs/first-request.md says. Ctrl-C ends all but Kafka."""
    folder = ("--directory", str(tmp_path / "kafka"))
    done = run("kafka", "up", *folder)
    assert done.returncode == 0, done.stderr
    try:
        process = start(
            "up", "--workers", "1", "--directory", str(tmp_path / "up"), "--kafka-directory", str(tmp_path / "kafka")
        )
        shown = shown_when_ready(process)
        page = block_of("docs/first-request.md", "curl").replace("…", "2").splitlines()
        assert {numberless(line) for line in page} <= {numberless(line) for line in "".join(shown).splitlines()}
        lines = [line for line in "".join(shown).splitlines() if line.startswith(("curl ", "kvstreams "))]
        (url,) = re.findall(r"^curl -s (http://\S+)/loads$", "\n".join(lines), re.MULTILINE)
        assert '"object":"text_completion"' in pasted(lines[0])
        question = {"token_ids": list(range(32)), "update_states": False}

        def has_events() -> bool:
            asked = Api(url).route(**question)
            return (asked["overlap_blocks"], asked["mode"]) == (2, "exact")

        wait_for(has_events, PATIENCE_S, "the engine's events")
        route, loads, end, doctor = map(pasted, lines[1:])
        answer = json.loads(route)
        assert (answer["worker_id"], answer["overlap_blocks"], answer["request_blocks"]) == (1, 2, 2)
        on_page = json.loads(block_of("docs/first-request.md", '{"request_id"').replace("[...]", "[]"))
        same = ("request_id", "worker_id", "dp_rank", "overlap_blocks", "request_blocks", "router_mode", "mode")
        assert on_page.keys() <= answer.keys() and [on_page[name] for name in same] == [answer[name] for name in same]
        assert json.loads(loads)["loads"][0]["active_requests"] == 1
        assert json.loads(end)["request_id"] == "r1"
        assert not doctor
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out + err
        assert run("kafka", "status", *folder).returncode == 0
    finally:
        down = run("kafka", "down", *folder)
    assert down.returncode == 0
    assert run("kafka", "status", *folder).returncode == 1


@pytest.mark.long_running
def test_sigterm_ends_everything_as_ctrl_c_does(run: Run, start: Start, tmp_path: Path) -> None:
    """The exit status is 0, and none of its processes is left, not even the Kafka that it has started."""
    folder = ("--directory", str(tmp_path / "kafka"))
    process = start(
        "up", "--workers", "1", "--directory", str(tmp_path / "up"), "--kafka-directory", str(tmp_path / "kafka")
    )
    shown_when_ready(process)
    children = psutil.Process(process.pid).children(recursive=True)
    try:
        assert any("kafka.Kafka" in each.cmdline() for each in children)
        assert len(children) > 2  # an engine and a worker as well
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out + err
        assert "stopping" in out
        _, left = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert left == []
        assert run("kafka", "status", *folder).returncode == 1
    finally:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

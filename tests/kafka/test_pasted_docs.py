"""The shell examples of README and docs, pasted in order into one shell, with real processes on a real Kafka.

What lives here: which lines are not pasted, and which addresses a reader replaces. All other lines are pasted as they
are.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.broker import KafkaState
from streams.lab.kafka.ports import free_ports
from streams.lab.stack import Engine, Stack
from tests.helpers.commands import environment
from tests.helpers.pages import ROOT, blocks_of

PAGES = ("README.md", "docs/http.md", "docs/sim.md", "docs/cxl.md")

#: Beginnings of lines that are not pasted, and why.
LEFT_OUT = {
    "make ": "starts a broker of its own, or runs for minutes; tests of the demo and CI run these",
    ".venv/bin/pytest ": "runs the tests",
    "pip install .": "the test runs from a checkout whose dependencies are installed",
    "kvstreams front ": "needs the files of a model",
    "kvstreams cxl transition --worker-id 7": "names blocks of an engine of the reader's own",
}

#: Ports of the pages. Each is replaced with a free one, since tests run at the same time.
PORTS = (8000, 8001, 8300, 8101, 8102, 8200, 5561, 5562, 5571, 5572)

#: Long enough for three fleets to start and stop on a busy machine.
PATIENCE_S = 540.0

#: Reports each command that fails, as the reader would see it. A condition of `until` may fail.
PREAMBLE = """
set -E -o pipefail
trap 'status=$?; echo "$WHERE: status $status: $BASH_COMMAND" >> "$FAILURES"' ERR
"""


def replacements(kafka: KafkaState, engine: Engine, prefix: str) -> dict[str, str]:
    """Return what a reader replaces in the pages: Kafka's address, an engine of the fleet, prefixes and ports."""
    events, replay = (address.rpartition(":")[2] for address in (engine.events, engine.replay))
    changes = {
        r"broker1:9092,broker2:9092": kafka.bootstrap,
        r"KVSTREAMS_REPLICATION=3": "KVSTREAMS_REPLICATION=1",
        r"KVSTREAMS_HOST=0\.0\.0\.0": "KVSTREAMS_HOST=127.0.0.1",
        r"KVSTREAMS_TOPIC_PREFIX=": f"KVSTREAMS_TOPIC_PREFIX={prefix}",
        r"http://gpu1:8000": engine.url,
        r"gpu1:5557": f"127.0.0.1:{events}",
        r"gpu1:5558": f"127.0.0.1:{replay}",
    }
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        changes[rf"(?<=localhost:){port}\b|(?<=127\.0\.0\.1:){port}\b|(?<=port ){port}\b"] = str(free)
    return changes


def pasted(code: str, changes: dict[str, str]) -> str:
    """Return a block as it is pasted."""
    code = "".join(line for line in code.splitlines(keepends=True) if not line.startswith(tuple(LEFT_OUT)))
    for pattern, text in changes.items():
        code = re.sub(pattern, text.replace("\\", r"\\"), code)
    return code


def script(changes: dict[str, str]) -> str:
    """Return everything that is pasted."""
    parts, n_running = [PREAMBLE], 0
    for page in PAGES:
        for line, language, code in blocks_of(page):
            if language == "python" and page == "README.md":
                parts.append(
                    step(
                        f"{page}:{line}", f"python3 - <<'END_OF_PAGE'\n{pasted(code, changes)}\nEND_OF_PAGE", n_running
                    )
                )
            if language == "sh":
                block = pasted(code, changes)
                n_running += len(re.findall(r"(?<!&)&[ \t]*(?:#.*)?$", block, re.MULTILINE))
                n_running = 0 if "kill $(jobs -p)" in block else n_running
                parts.append(step(f"{page}:{line}", block, n_running))
    parts.append(step("end", "kill $(jobs -p); wait", 0))
    return "".join(parts)


def step(where: str, block: str, n_running: int) -> str:
    """Return a block with a line of output before it, and a check after it of how many background processes run."""
    return f"""
WHERE={where}; printf '\\n== {where}\\n'
{block}
[ "$(jobs -rp | wc -l)" -eq {n_running} ] || echo "{where}: not {n_running} in the background: $(jobs)" >> "$FAILURES"
"""


def shims(folder: Path) -> Path:
    """Return a folder with the commands of the pages, which run this checkout."""
    folder.mkdir()
    for name, arguments in {"kvstreams": "-m streams.cli", "faust": "-m faust", "python3": ""}.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        path.chmod(0o755)
    # An answer of 4xx or 5xx is a failure. Calls with -f, which wait for a server, fail anyway.
    curl = folder / "curl"
    option = 'case "$1" in -sf) option=;; *) option=--fail-with-body;; esac'
    curl.write_text(f'#!/bin/sh\n{option}\nexec {shutil.which("curl")} $option "$@"\n')
    curl.chmod(0o755)
    return folder


def paste(text: str, folder: Path, env: dict[str, str]) -> dict[str, str]:
    """Run a script as one shell reads it from its input, and return the output of each block by its place."""
    log = folder / "shell.log"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            shell.communicate(text.encode(), timeout=PATIENCE_S)
        finally:
            try:
                os.killpg(shell.pid, signal.SIGKILL)  # the shell's own processes, if it did not reach its end
            except ProcessLookupError:
                pass
            shell.wait()
    parts = re.split(r"^== (\S+)$", log.read_text(errors="replace"), flags=re.MULTILINE)
    assert "end" in parts, parts[-1][-3000:]
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
def test_the_examples_of_the_pages_pasted_in_order_into_one_shell_work(
    kafka: KafkaState, stack: Stack, tmp_path: Path
) -> None:
    """No command fails, no background process ends, and the answers show what the pages say."""
    (engine,) = stack.engines(1, EngineConfig(block_size=16, n_blocks=256), "demo-model", time_scale=100.0)
    folder, failures = tmp_path / "shell", tmp_path / "failures"
    folder.mkdir()
    changes = replacements(kafka, engine, stack.settings.topic_prefix)
    api_port = next(text for pattern, text in changes.items() if "8000" in pattern and text.isdigit())
    env = environment(
        {
            "PATH": f"{shims(tmp_path / 'bin')}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FAILURES": str(failures),
            # What the pages leave at its default, and what keeps three scopes on one broker cheap.
            "KVSTREAMS_KAFKA": kafka.bootstrap,
            "KVSTREAMS_PORT": api_port,
            "KVSTREAMS_PARTITIONS": "2",
        }
    )
    output = paste(script(changes), folder, env)

    shown = "\n".join(f"== {where}\n{text}" for where, text in output.items())
    assert not failures.exists(), f"{failures.read_text()}\n{shown[-20_000:]}"
    by_page = {page: "".join(text for where, text in output.items() if where.startswith(page)) for page in PAGES}
    assert '"worker_id": 7' in _spaced(by_page["README.md"])
    assert '"request_blocks": 128' in _spaced(by_page["README.md"])
    assert '"request_id": "r2", "worker_id": 7' in _spaced(by_page["docs/http.md"])
    assert '"worker_id": 1, "dp_rank": 0' in _spaced(by_page["docs/sim.md"])
    assert '"overlap_blocks": 62' in _spaced(by_page["docs/sim.md"])
    assert '"pooled_tokens": 992' in _spaced(by_page["docs/sim.md"])
    assert "near" in by_page["docs/cxl.md"]


@pytest.mark.parametrize(
    ("block", "n_running", "failure"),
    [
        ("true\nuntil [ -e there ]; do touch there; done\nsleep 100 &", 1, ""),
        ("true | false | true", 0, "here: status 1: "),
        ("kvstreams no-such-command", 0, "here: status 2: kvstreams no-such-command"),
        ("sleep 0 &\nsleep 0.5", 1, "here: not 1 in the background"),
    ],
)
def test_a_command_that_fails_and_a_process_that_ends_are_noticed(
    block: str, n_running: int, failure: str, tmp_path: Path
) -> None:
    """The shell goes on, as a reader's does, and the failure is noted with its place."""
    failures = tmp_path / "failures"
    env = environment({"PATH": f"{shims(tmp_path / 'bin')}:{os.environ['PATH']}", "FAILURES": str(failures)})
    end = step("end", "kill $(jobs -p) || true; wait", 0)
    assert "end" in paste(PREAMBLE + step("here", block, n_running) + end, tmp_path, {**env, "PYTHONPATH": str(ROOT)})
    noted = failures.read_text() if failures.exists() else ""
    assert noted.startswith(failure) and bool(noted) == bool(failure), noted


def _spaced(text: str) -> str:
    """JSON with a space after each colon and comma, as the pages show it."""
    return re.sub(r'(?<=[\w"\]}])([:,])(?=["\w\[{])', r"\1 ", text)


def test_each_line_that_is_left_out_is_on_a_page() -> None:
    """A reason to leave a line out goes when the line goes."""
    code = "".join(code for page in PAGES for _, language, code in blocks_of(page) if language == "sh")
    lines = code.splitlines()
    assert all(any(line.startswith(beginning) for line in lines) for beginning in LEFT_OUT)

"""The shell examples of the docs, pasted in order into one shell, with real processes on a real Kafka.

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
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.broker import KafkaState
from streams.lab.kafka.ports import free_port, free_ports, free_ports_in_a_row
from streams.lab.stack import Engine, Stack
from tests.helpers.commands import environment
from tests.helpers.pages import JOURNEYS, ROOT, block_of, blocks_of, is_pasted, shape

#: Environment variable with a Python environment that has litellm[proxy], which needs versions of packages of its own.
LITELLM_ENV = "KVSTREAMS_LITELLM"

#: Beginnings of lines that are not pasted, and why.
LEFT_OUT = {
    "pip install 'kvstreams[front]'": "the test runs from a checkout whose dependencies are installed",
    "pip install 'kvstreams[gateway]'": "the test runs from a checkout whose dependencies are installed",
    "pip install 'litellm[proxy]'": "it is installed in an environment of its own",
    "kvstreams cxl transition --worker-id 7": "names blocks of an engine of the reader's own",
}

#: Ports of the pages. Each is replaced with a free one, since tests run at the same time.
PORTS = (4000, 8000, 8001, 8002, 8080, 8081, 8300, 8101, 8102, 8200, 5561, 5562, 5571, 5572)

#: Seconds in which a process ends that a page has asked to.
END_S = 20

#: Long enough for three fleets to start and stop on a busy machine.
PATIENCE_S = 540.0

#: Reports each command that fails, as the reader would see it. A condition of `until` may fail.
PREAMBLE = """
set -E -o pipefail
trap 'status=$?; echo "$WHERE: status $status: $BASH_COMMAND" >> "$FAILURES"' ERR
"""


def replacements(kafka: KafkaState, engine: Engine, model: Path, prefix: str) -> dict[str, str]:
    """Return what a reader replaces in the pages: Kafka's address, an engine and its files, prefixes and ports."""
    events, replay = (address.rpartition(":")[2] for address in (engine.events, engine.replay))
    changes = {
        r"broker1:9092,broker2:9092": kafka.bootstrap,
        r"KVSTREAMS_REPLICATION=3": "KVSTREAMS_REPLICATION=1",
        r"--host 0\.0\.0\.0": "--host 127.0.0.1",
        r"KVSTREAMS_TOPIC_PREFIX=": f"KVSTREAMS_TOPIC_PREFIX={prefix}",
        r"http://gpu1:8000": engine.url,
        r"gpu1:5557": f"127.0.0.1:{events}",
        r"gpu1:5558": f"127.0.0.1:{replay}",
        r"http://front:": "http://localhost:",
        r"kvstreams gateway ": (
            f"kvstreams gateway --picker-port {free_ports_in_a_row(2)} --gateway-admin-port {free_port()} "
        ),
        r"/models/my-model": str(model),
    }
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        changes[rf"(?<=localhost:){port}\b|(?<=127\.0\.0\.1:){port}\b|(?<=port ){port}\b|(?<=state ){port}\b"] = str(
            free
        )
    return changes


def pasted(code: str, changes: dict[str, str]) -> str:
    """Return a block as it is pasted."""
    code = "".join(line for line in code.splitlines(keepends=True) if not line.startswith(tuple(LEFT_OUT)))
    for pattern, text in changes.items():
        code = re.sub(pattern, text.replace("\\", r"\\"), code)
    return code


def script(pages: Sequence[str], changes: dict[str, str]) -> str:
    """Return everything that is pasted of these pages."""
    parts, n_running = [PREAMBLE], 0
    for page in pages:
        for line, language, code in blocks_of(page):
            where = f"{page}:{line}"
            if not is_pasted(page, language, code):
                continue
            if language == "python":
                parts.append(step(where, f"python3 - <<'END_OF_PAGE'\n{pasted(code, changes)}\nEND_OF_PAGE", n_running))
            else:
                block = pasted(code, changes)
                n_running = 0 if "kill $(jobs -p)" in block else n_running + started(block)
                parts.append(step(where, block, n_running))
    parts.append(step("end", "kill $(jobs -p) || true; wait", 0))
    return "".join(parts)


def started(block: str) -> int:
    """Return how many more processes run in the background after a block than before."""
    n_started = len(re.findall(r"(?<!&)&[ \t]*(?:#.*)?$", block, re.MULTILINE))
    return n_started - len(re.findall(r'^kill (?:-9 )?"%', block, re.MULTILINE))


def step(where: str, block: str, n_running: int) -> str:
    """Return a block with a line of output before it, and a check after it of how many background processes run.

    A process that was asked to end has a while for it.
    """
    return f"""
WHERE={where}; printf '\\n== {where}\\n'
{block}
for _ in {{1..{END_S * 10}}}; do [ "$(jobs -rp | wc -l)" -gt {n_running} ] && sleep 0.1; done
[ "$(jobs -rp | wc -l)" -eq {n_running} ] || echo "{where}: not {n_running} in the background: $(jobs)" >> "$FAILURES"
"""


def shims(folder: Path) -> Path:
    """Return a folder with the commands of the pages, which run this checkout."""
    folder.mkdir()
    commands = {name: f"{sys.executable} {run}" for name, run in (("kvstreams", "-m streams.cli"), ("python3", ""))}
    commands["litellm"] = f"{os.environ.get(LITELLM_ENV)}/bin/litellm"
    for name, command in commands.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)
    # An answer of 4xx or 5xx is a failure. Calls with -f, which wait for a server, fail anyway.
    curl = folder / "curl"
    option = 'case "$1" in -sf|-so) option=;; *) option=--fail-with-body;; esac'
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


@pytest.fixture
def shell(kafka: KafkaState, stack: Stack, tmp_path: Path) -> Callable[[Sequence[str]], dict[str, str]]:
    """Give a function that pastes pages into one shell, and returns the output of each page."""
    (engine,) = stack.engines(1, EngineConfig(block_size=16, n_blocks=1024), "my-model", time_scale=100.0)
    folder, failures, model = tmp_path / "shell", tmp_path / "failures", tmp_path / "model"
    folder.mkdir()
    model.mkdir()
    for name, text in tokenizer_files().items():
        (model / name).write_text(text)
    changes = replacements(kafka, engine, model, stack.settings.topic_prefix)
    env = environment(
        {
            "PATH": f"{shims(tmp_path / 'bin')}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FAILURES": str(failures),
            # What the pages leave at its default, and what keeps three scopes on one broker cheap.
            "KVSTREAMS_PARTITIONS": "2",
        }
    )

    def run(pages: Sequence[str]) -> dict[str, str]:
        output = paste(script(pages, changes), folder, env)
        shown = "\n".join(f"== {where}\n{text}" for where, text in output.items())
        assert not failures.exists(), f"{failures.read_text()}\n{shown[-20_000:]}"
        return {page: "".join(text for where, text in output.items() if where.startswith(page)) for page in pages}

    return run


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
def test_the_examples_of_the_api_pasted_in_order_into_one_shell_work(
    shell: Callable[[Sequence[str]], dict[str, str]],
) -> None:
    """No command fails, no background process ends, and the answers show what the pages say."""
    by_page = shell(JOURNEYS["api"])
    first, second = re.findall(r"^X-Kvstreams-Overlap-Blocks: (\d+)/", by_page["docs/own-fleet.md"], re.MULTILINE)
    assert (first, int(second) > 0) == ("0", True)
    assert_shows(by_page["docs/own-fleet.md"], block_of("docs/own-fleet.md", "X-Kvstreams-Worker"))
    assert '"request_blocks": 128' in _spaced(by_page["docs/own-fleet.md"])
    assert '"request_id": "r2", "worker_id": 7' in _spaced(by_page["docs/http.md"])
    assert '"worker_id": 1, "dp_rank": 0' in _spaced(by_page["docs/sim.md"])
    assert '"overlap_blocks": 62' in _spaced(by_page["docs/sim.md"])
    assert '"pooled_tokens": 992' in _spaced(by_page["docs/sim.md"])
    assert "near" in by_page["docs/cxl.md"]


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
def test_a_fleet_is_operated_with_the_commands_of_the_pages(
    shell: Callable[[Sequence[str]], dict[str, str]],
) -> None:
    """A second router has the same blocks, a stopped bridge is found, and a worker's lost disk changes nothing."""
    by_page = shell(JOURNEYS["operating"])
    assert "1 ranks, equal on both routers" in by_page["docs/more-routers.md"]
    assert re.search(
        r"^kvstreams_degraded_ranks\S*bridge_silent\S* 1", by_page["docs/troubleshooting.md"], re.MULTILINE
    )
    assert re.search(r"^worker 1: its bridge \S+ gave up its lease", by_page["docs/troubleshooting.md"], re.MULTILINE)
    assert "[(1, 0, " in by_page["docs/recovery.md"]


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
def test_recorded_decisions_are_used_as_the_pages_say(shell: Callable[[Sequence[str]], dict[str, str]]) -> None:
    """A decision is explained, an hour is replayed, simulated, tuned and planned."""
    by_page = shell(JOURNEYS["decisions"])
    assert re.search(
        r"^Request \w+ for model my-model was routed to 1/0 at ", by_page["docs/decisions.md"], re.MULTILINE
    )
    assert_shows(by_page["docs/decisions.md"], block_of("docs/decisions.md", "1,500 requests"))
    assert_shows(by_page["docs/scaling.md"], block_of("docs/scaling.md", "2,000 requests"))
    assert '"replicas_wanted"' in by_page["docs/scaling.md"]


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
def test_a_front_tokenizes_with_the_files_of_a_model(shell: Callable[[Sequence[str]], dict[str, str]]) -> None:
    """A chat over HTTP is streamed, and OpenAI's client gets a completion."""
    shown = shell(JOURNEYS["front"])["docs/front.md"]
    assert "data: [DONE]" in shown
    assert "object='text_completion'" in shown


def assert_shows(printed: str, on_page: str) -> None:
    """Each line of a page's block is in what its commands have printed, apart from numbers."""
    missing = {shape(line) for line in on_page.splitlines()} - {shape(line) for line in printed.splitlines()}
    assert not missing, f"{missing} in {printed[-3000:]}"


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
def test_a_fleet_is_protected_with_the_commands_of_the_page(shell: Callable[[Sequence[str]], dict[str, str]]) -> None:
    """Kafka and the HTTP API require what the page sets up, requests with the right tokens work, and a token ends."""
    shown = shell(JOURNEYS["security"])["docs/tls-and-tokens.md"]
    assert re.search(r"^401\n403\n", shown, re.MULTILINE)
    assert '"object": "text_completion"' in _spaced(shown)


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
def test_an_envoy_serves_users_with_the_commands_of_the_page(shell: Callable[[Sequence[str]], dict[str, str]]) -> None:
    """A gateway without Kubernetes: the second request finds its prompt in the engine's cache."""
    shown = shell(JOURNEYS["gateway"])["docs/gateway.md"]
    first, second = re.findall(r'"prompt_tokens_details":{"cached_tokens":(\d+)}', shown)
    assert int(first) == 0 < int(second)


@pytest.mark.long_running
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.skipif(LITELLM_ENV not in os.environ, reason=f"{LITELLM_ENV} names no environment with litellm[proxy]")
def test_litellm_serves_users_in_front_of_the_front(shell: Callable[[Sequence[str]], dict[str, str]]) -> None:
    """Its answer shows that the front chose an engine that had the prompt, and a stream ends as a stream does."""
    shown = shell(JOURNEYS["litellm"])["docs/litellm.md"]
    assert re.search(r"^llm_provider-x-kvstreams-overlap-blocks: [1-9]\d*/", shown, re.MULTILINE | re.IGNORECASE)
    assert "data: [DONE]" in shown


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
    pages = {page for pages in JOURNEYS.values() for page in pages}
    code = "".join(code for page in pages for _, language, code in blocks_of(page) if language == "sh")
    lines = code.splitlines()
    assert all(any(line.startswith(beginning) for line in lines) for beginning in LEFT_OUT)

"""What the documentation shows runs, and answers what is shown.

A block of Python in docs/index.md or docs/sim.md is run as it stands, all of a page in order in one namespace. `# -> X`
behind an expression says what it gives; an expression without it gives None.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from streams.cli import cli
from streams.errors import (
    API_ERRORS,
    HTTP_CODES,
    HTTP_ERROR,
    AllWorkersBusy,
    BadRecord,
    EpochConflict,
    IndexFull,
    InvalidEvent,
    InvalidRequest,
    KvStreamsError,
    api_error,
)
from streams.local.ports import free_port
from streams.settings import ENV_PREFIX
from streams.sim.pool_server import PoolServer, PoolServerConfig
from streams.sim.server import SimServer, SimServerConfig

ROOT = Path(__file__).parents[2]
SHOWN = "# -> "

#: Importing takes a laden machine seconds; what is promised is counted from there.
PATIENCE_S = 60.0


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Code of a page in one language, each with the line before its first."""
    text = (ROOT / page).read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: block.start(1)].count("\n"), block[1]) for block in found]


def statements(page: str) -> Iterator[tuple[str, ast.stmt, str]]:
    """Each statement of a page: where it stands, itself, and the answer shown behind it, "" for none."""
    for above, code in blocks(page, "python"):
        lines = code.splitlines()
        for statement in ast.parse(code).body:
            last = lines[(statement.end_lineno or 0) - 1]
            yield f"{page}:{above + statement.lineno}", statement, last.partition(SHOWN)[2]


def test_the_index_page_runs_and_answers_what_it_shows() -> None:
    """Every block, in order; what is shown is what comes."""
    namespace, n_shown = run_page("docs/index.md")
    assert n_shown > 15
    namespace["index"].check()


def test_the_page_of_simulations_runs_and_answers_what_it_shows() -> None:
    """A trace with a pool and without computes as many tokens as are told."""
    assert run_page("docs/sim.md")[1] == 3


def run_page(page: str) -> tuple[dict[str, Any], int]:
    """Run a page's Python; gives its names, and how many answers it shows."""
    namespace: dict[str, Any] = {}
    n_shown = 0
    for where, statement, shown in statements(page):
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), where, "eval"), namespace)
            told = shown or "None"
            # Of a mapping the order is nobody's business.
            assert repr(value) == told or value == eval(told, namespace), f"{where} gives {value!r}"
            n_shown += bool(shown)
        else:
            assert not shown, f"{where} shows an answer of what is no expression"
            exec(compile(ast.Module([statement], []), where, "exec"), namespace)
    return namespace, n_shown


@pytest.mark.parametrize("name", ["sim", "sim-pool"])
def test_the_page_of_simulations_has_every_option_and_its_default(name: str) -> None:
    """And none that is not there."""
    options_of = (ROOT / "docs/sim.md").read_text().partition("## Options")[2].partition("\n## ")[0]
    section = options_of.partition(f"\n`kvstreams {name}`")[2].partition("\n\n`kvstreams")[0]
    shown: dict[str, str] = {}
    for options, default in re.findall(r"^\| (`--.*?`) \| (\S+) \|", section, re.MULTILINE):
        shown.update(dict.fromkeys(re.findall(r"`(--[a-z-]+)`", options), default))
    params = [param for param in cli.commands[name].params if isinstance(param, click.Option)]
    assert shown == {param.opts[0]: "none" if param.default is None else str(param.default) for param in params}


def test_the_page_of_simulations_has_every_call() -> None:
    """Of an engine and of a pool, and none that nobody serves."""
    engine, pool = (ROOT / "docs/sim.md").read_text().partition("## Calls")[2].split("\nA pool's")
    for section, served in ((engine, SimServer(SimServerConfig())), (pool, PoolServer(PoolServerConfig()))):
        rows = "".join(re.findall(r"^\| (`(?:GET|POST) .*?) \|", section.partition("\n## ")[0], re.MULTILINE))
        assert set(re.findall(r"`([A-Z]+ /[^`]+)`", rows)) == {
            f"{route.method} {route.path}" for route in served.routes()
        }


@pytest.mark.parametrize("page", ["docs/sim.md", "docs/cxl.md"])
def test_lines_to_be_copied_are_commands_with_options_that_they_take(page: str) -> None:
    """Each `kvstreams` line of a shell block is parsed as the shell and the command would."""
    n_lines = 0
    for _, code in blocks(page, "sh"):
        for line in re.findall(r"^kvstreams (.*)$", code.replace("\\\n", ""), re.MULTILINE):
            command: click.Command = cli
            words = shlex.split(line.removesuffix("&"))
            while isinstance(command, click.Group):
                command = command.commands[words.pop(0)]
            # As the group's: a command keeps the names of its help from the first context that it is in.
            command.make_context(line, words, parent=click.Context(cli, **cli.context_settings))
            n_lines += 1
    assert n_lines > 4


def test_every_name_of_the_index_page_is_where_it_says() -> None:
    """Dotted names of our modules can be imported, or are attributes of one that can."""
    text = (ROOT / "docs/index.md").read_text()
    names = set(re.findall(r"(streams(?:\.\w+)+)", text))
    assert len(names) > 10
    for name in sorted(names):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/http.md", "docs/architecture.md", "docs/sim.md", "docs/cxl.md"]
)
def test_pages_name_commands_and_pages_that_exist(page: str) -> None:
    """`kvstreams X` is a command, and a link within the project leads somewhere."""
    text = (ROOT / page).read_text()
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for code in (*spans, *(code for _, code in blocks(page, ""))):
        for words in re.findall(r"^(?:\S*/)?kvstreams((?: [a-z]+)*)", code, re.MULTILINE):
            command: click.Command = cli
            for word in words.split():
                if isinstance(command, click.Group):
                    assert word in command.commands, f"kvstreams{words}"
                    command = command.commands[word]
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("http") or ((ROOT / page).parent / target).exists(), target


def test_the_table_of_errors_has_every_code_of_the_api_and_no_other() -> None:
    """With its status; the server's own refusals among them, of which some have no code of their own."""
    page = (ROOT / "docs/http.md").read_text()
    rows = re.findall(r"^\| (\d\d\d|4xx) \| ([^|]+) \|", page, re.MULTILINE)
    told = [(code, status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)]
    wanted = [(error.code, str(error.http_status)) for error in API_ERRORS]
    wanted += [(code, str(status)) for status, code in HTTP_CODES.items()]
    assert sorted(told) == sorted([*wanted, (HTTP_ERROR, "4xx")])


@pytest.mark.parametrize(
    ("exc", "told"),
    [
        (EpochConflict("x"), EpochConflict),
        (AllWorkersBusy("x"), AllWorkersBusy),
        (InvalidEvent("x"), InvalidRequest),
        (IndexFull("x"), KvStreamsError),
        (BadRecord("reason", "x"), KvStreamsError),
    ],
)
def test_an_error_that_the_api_does_not_know_is_told_as_one_that_it_does(
    exc: KvStreamsError, told: type[KvStreamsError]
) -> None:
    """So that no answer has a code which the page lacks."""
    assert api_error(exc) is told


def test_the_publisher_of_the_readme_says_within_ten_seconds_that_no_kafka_answers(tmp_path: Path) -> None:
    """Address and remedy, and not at the end of thirty seconds of silence."""
    ((_, code),) = blocks("README.md", "python")
    kafka = f"127.0.0.1:{free_port()}"
    script = "import time, streams.engines.publisher\nbegun = time.monotonic()\ntry:\n"
    script += "".join(f"    {line}\n" for line in code.splitlines())
    script += "finally:\n    print(time.monotonic() - begun)\n"
    env = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "KVSTREAMS_KAFKA": kafka, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert f"no Kafka answers at {kafka}: " in done.stderr
    assert "KVSTREAMS_KAFKA" in done.stderr
    assert float(done.stdout) < 10.0

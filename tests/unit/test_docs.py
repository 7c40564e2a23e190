"""The documentation's examples run and give the results that the pages show.

The Python blocks of docs/prefix-index.md and docs/sim.md run as they are, all blocks of a page in order in one
namespace. `# -> X` after an expression is its expected value; an expression without it must give None.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from streams.cli import cli
from streams.core.routing.selection import RouterMode
from streams.engines.dialects.interface import NOT_INDEXED_REASONS
from streams.engines.dialects.registry import DIALECTS
from streams.errors import (
    AllWorkersBusy,
    BadRecord,
    EpochConflict,
    IndexFull,
    InvalidEvent,
    InvalidRequest,
    KvStreamsError,
    api_error,
)
from streams.lab.engines.pool_server import PoolServer, PoolServerConfig
from streams.lab.engines.server import SimServer, SimServerConfig
from streams.router_api.deciding.router import Router
from streams.router_api.http.handlers import Handlers
from streams.settings import Settings
from tests.helpers import picker_obligations
from tests.helpers.command_line import parse_command
from tests.helpers.invariants import check
from tests.helpers.pages import PAGES, ROOT, TOP_PAGES, blocks, blocks_of

SHOWN = "# -> "

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def statements(page: str) -> Iterator[tuple[str, ast.stmt, str]]:
    """Give each statement of a page: its location, the statement, and the result shown after it, "" for none."""
    for above, code in blocks(page, "python"):
        lines = code.splitlines()
        for statement in ast.parse(code).body:
            last = lines[(statement.end_lineno or 0) - 1]
            yield f"{page}:{above + statement.lineno}", statement, last.partition(SHOWN)[2]


def test_the_index_page_runs_and_gives_the_results_that_it_shows() -> None:
    """All Python blocks of docs/prefix-index.md run in order, and the index is consistent at the end."""
    namespace, n_shown = run_page("docs/prefix-index.md")
    assert n_shown > 15
    check(namespace["index"])


def test_the_simulation_page_runs_and_gives_the_results_that_it_shows() -> None:
    """A trace computes as many tokens as docs/sim.md shows, without a pool and with two pools."""
    assert run_page("docs/sim.md")[1] == 3


def run_page(page: str) -> tuple[dict[str, Any], int]:
    """Run a page's Python blocks; returns their namespace and the number of results that the page shows."""
    namespace: dict[str, Any] = {}
    n_shown = 0
    for where, statement, shown in statements(page):
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), where, "eval"), namespace)
            expected = shown or "None"
            # The second comparison ignores the order of a mapping.
            assert repr(value) == expected or value == eval(expected, namespace), f"{where} gives {value!r}"
            n_shown += bool(shown)
        else:
            assert not shown, f"{where} shows a result of a statement that is not an expression"
            exec(compile(ast.Module([statement], []), where, "exec"), namespace)
    return namespace, n_shown


def test_the_simulation_page_has_every_call() -> None:
    """The tables in docs/sim.md have exactly the HTTP calls that an engine and a pool serve."""
    engine, pool = (ROOT / "docs/sim.md").read_text().partition("## Calls")[2].split("\nA pool's")
    for section, served in ((engine, SimServer(SimServerConfig())), (pool, PoolServer(PoolServerConfig()))):
        rows = "".join(re.findall(r"^\| (`(?:GET|POST) .*?) \|", section.partition("\n## ")[0], re.MULTILINE))
        assert set(re.findall(r"`([A-Z]+ /[^`]+)`", rows)) == {
            f"{route.method} {route.path}" for route in served.routes()
        }


def test_commands_in_shell_blocks_are_valid() -> None:
    """Each `kvstreams` line of a shell block parses, as the shell and then the command would parse it."""
    n_lines = 0
    for page in (*TOP_PAGES, *PAGES):
        for language, code in ((language, code) for _, language, code in blocks_of(page)):
            if language not in ("sh", "bash"):
                continue
            for line in re.findall(r"^kvstreams ([^#\n]*)", code.replace("\\\n", ""), re.MULTILINE):
                words = shlex.split(re.split(r" \|\|| > ", line)[0].rstrip().removesuffix("&"))
                # Whether a file exists is up to the reader.
                words = [
                    str(ROOT / "LICENSE") if word.endswith((".json", ".jsonl", ".token")) else word for word in words
                ]
                parse_command(words)
                n_lines += 1
    assert n_lines > 50


@pytest.mark.parametrize("page", [*TOP_PAGES, *PAGES])
def test_commands_are_in_blocks_that_are_marked_as_shell(page: str) -> None:
    """tests/kafka/test_pasted_docs.py pastes these blocks, so a command in another block would not be tested."""
    commands = ("kvstreams ", "curl ", "pip ", "faust ", "export ", "$ ")
    for above, code in blocks(page, ""):
        lines = code.splitlines()
        assert not [line for line in lines if line.startswith(commands)], f"{page}:{above}"


def test_the_commands_of_the_readme_are_those_of_the_page_that_is_pasted() -> None:
    """README.md starts a fleet with the commands of docs/own-fleet.md, and is at most 8 kB."""
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 8_000
    commands = {line.partition("#")[0].rstrip() for _, code in blocks("README.md", "sh") for line in code.splitlines()}
    pasted = {line.rstrip() for line in blocks("docs/own-fleet.md", "sh")[0][1].splitlines()}
    assert commands - pasted == {"make up"}
    assert len(commands) == 7


def test_every_dotted_name_on_the_index_page_exists() -> None:
    """Each dotted name in docs/prefix-index.md is a module of this package or an attribute of one."""
    text = (ROOT / "docs/prefix-index.md").read_text()
    names = set(re.findall(r"(streams(?:\.\w+)+)", text))
    assert len(names) > 10
    for name in sorted(names):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", [*TOP_PAGES, *PAGES])
def test_pages_name_commands_and_pages_that_exist(page: str) -> None:
    """Each `kvstreams X` is a command, and each link within the project leads to a file."""
    text = (ROOT / page).read_text()
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for code in (*spans, *(code for _, code in blocks(page, "sh"))):
        for words in re.findall(r"^(?:\S*/)?kvstreams((?: [a-z]+(?:-[a-z]+)*)*)", code, re.MULTILINE):
            command: click.Command = cli
            for word in words.split():
                if isinstance(command, click.Group):
                    assert word in command.commands, f"kvstreams{words}"
                    command = command.commands[word]
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", re.sub(r"`[^`\n]+`", "", text)):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert target.startswith("http") or path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{target}#{anchor}"


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_paths_of_where_to_change_what_exist() -> None:
    """Each step in docs/modules.md names a file and a function, class or method that is defined there."""
    section = (ROOT / "docs/modules.md").read_text().split("## Where to change what")[1].split("\n## ")[0]
    steps = re.findall(r"^\d\. `([^`]+\.py)`, `([^`]+)`", section, flags=re.M)
    assert len(steps) == len(re.findall(r"^\d\.", section, flags=re.M)) >= 16
    for path, name in steps:
        scope: ast.AST = ast.parse((ROOT / path).read_text())
        for part in name.split("."):
            defined = {node.name: node for node in ast.iter_child_nodes(scope) if isinstance(node, _DEFINITIONS)}
            assert part in defined, f"{path} has no {name}"
            scope = defined[part]


def test_the_http_page_has_every_call() -> None:
    """docs/http.md names every call that a router serves, apart from the files of its pages, and no other."""
    page = (ROOT / "docs/http.md").read_text()
    shown = re.findall(r"(?:^## |`)((?:GET|POST|PUT|DELETE) /[^`\n]*)", page, re.MULTILINE)
    routes = [route for route in Handlers(Router(Settings())).routes() if not route.path.endswith((".css", ".js"))]
    assert set(shown) == {f"{route.method} {re.sub(r':[^}]*', '', route.path)}" for route in routes}


def test_the_table_of_router_modes_is_complete() -> None:
    """The table in docs/policies.md names every mode once."""
    assert sorted(first_cells("docs/policies.md", "| `router_mode` | chooses |")) == sorted(RouterMode)


def test_the_table_of_dialects_is_complete() -> None:
    """The table in docs/bridges.md names every dialect that `--engine` can select once."""
    names = first_cells("docs/bridges.md", "| name | engine |")
    assert sorted(names) == sorted(DIALECTS)


def test_the_table_of_what_is_not_indexed_is_complete() -> None:
    """The table in docs/engines.md has every reason of the metric once."""
    assert sorted(first_cells("docs/engines.md", "| reason | what it counts |")) == sorted(NOT_INDEXED_REASONS)


def first_cells(page: str, header: str) -> list[str]:
    """The names, in code format, in the first column of the table whose header begins like this."""
    _, found, table = (ROOT / page).read_text().partition(f"\n{header}")
    assert found, f"{page} has no table {header}"
    rows = table.partition("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize(
    ("exc", "answered_as"),
    [
        (EpochConflict("x"), EpochConflict),
        (AllWorkersBusy("x"), AllWorkersBusy),
        (InvalidEvent("x"), InvalidRequest),
        (IndexFull("x"), KvStreamsError),
        (BadRecord("reason", "x"), KvStreamsError),
    ],
)
def test_an_error_without_an_api_code_is_answered_as_one_that_has_a_code(
    exc: KvStreamsError, answered_as: type[KvStreamsError]
) -> None:
    """The API answers every error with a code from its table."""
    assert api_error(exc) is answered_as


def test_the_page_on_trust_has_a_row_for_every_test_of_trust() -> None:
    """Each test in tests/trust is named in docs/trust.md, and each test that the page names exists."""
    page = (ROOT / "docs/trust.md").read_text()
    assert set(re.findall(r"`(test_\w+\.py::test_\w+)`", page)) == functions_in("trust", "")
    elsewhere = set(re.findall(r"`(\w+/test_\w+\.py::test_\w+)`", page))
    folders = ("unit", "kafka", "faults")
    assert elsewhere <= set().union(*(functions_in(folder, f"{folder}/") for folder in folders))


def test_the_page_on_the_protocol_of_pickers_has_every_obligation() -> None:
    """Its table is the one of the tests. Each obligation of a picker is shown, and each test that is named exists."""
    page = picker_obligations.PAGE.read_text()
    table = page.partition(picker_obligations.BEGIN)[2].partition(picker_obligations.END)[0]
    assert table == picker_obligations.table(), "run python -m tests.helpers.picker_obligations"
    assert {row.shows for row in picker_obligations.ROWS} <= picker_obligations.OBLIGATIONS.keys()
    unshown = {name for name in picker_obligations.OBLIGATIONS if not picker_obligations.shown_by(name)}
    assert unshown == picker_obligations.OF_THE_GATEWAY
    named = set(re.findall(r"`(\w+/test_\w+\.py::test_\w+)`", page))
    assert named <= set().union(*(functions_in(folder, f"{folder}/") for folder in ("unit", "kafka")))


def functions_in(folder: str, prefix: str) -> set[str]:
    return {
        f"{prefix}{path.name}::{statement.name}"
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_")
    }

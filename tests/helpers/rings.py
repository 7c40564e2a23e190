"""The first ring of tests, which `make test` runs.

What lives here: which tests belong to it, and its markers in the source. What must not: a list of tests, since the
choice stands with each test, as `@pytest.mark.first_ring(...)`.

The first ring consists of tests/unit without tests marked `thorough`, and of the tests elsewhere that are marked
`first_ring`. The marker names what a test shows: a process that it runs, or an answer that it gets from a router.
tests/unit/test_rings.py has these names, and fails if one of them is shown by no test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

#: The folder whose tests need no marker.
UNIT = "unit"


class Mark(NamedTuple):
    """One marker in the source of the tests. shows: its arguments."""

    file: str
    line: int
    shows: tuple[str, ...]


def in_first_ring(item: pytest.Item) -> bool:
    """Whether `make test` runs a test."""
    if item.get_closest_marker("first_ring") is not None:
        return True
    return item.path.parent.name == UNIT and item.get_closest_marker("thorough") is None


def marks(tests: Path) -> Iterator[Mark]:
    """Give every marker `first_ring` in the test modules of a folder. Its arguments must be literals."""
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text()
        if "mark.first_ring" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.first_ring":
                shows = tuple(ast.literal_eval(argument) for argument in node.args)
                yield Mark(path.relative_to(tests).as_posix(), node.lineno, shows)

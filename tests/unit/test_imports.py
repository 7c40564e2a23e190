"""What tests may import from each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.pages import ROOT


def imported_from(path: Path) -> Iterator[str]:
    """Give the dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nothing_is_imported_from_a_test_module() -> None:
    """What several tests use is in tests/helpers, so that a test can be removed without others."""
    folders = ("tests", "benchmarks", "examples", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported_from(path)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert len(files) > 300 and not found

"""What tests may import from each other, and that modules of the package import each other in one direction."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT


def imported_from(path: Path) -> Iterator[str]:
    """Give the dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of_modules(package: Path) -> dict[str, set[str]]:
    """Return, for each module of a package, its other modules that it imports: for types only and in functions too."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in modules.items():
        # `from a import b` imports the module a.b if there is one, and otherwise the module a.
        names = ((name, name.rpartition(".")[0]) for name in imported_from(path))
        imported = {name if name in modules else parent for name, parent in names}
        graph[module] = imported & modules.keys() - {module}
    return graph


def cycle_in(graph: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Return one cycle of a graph, which begins and ends with the same node, or None if there is none."""
    finished: set[str] = set()
    for start in graph:
        path: list[str] = []
        pending = [(start, iter(graph[start]))] if start not in finished else []
        while pending:
            node, targets = pending[-1]
            if len(path) < len(pending):
                path.append(node)
            target = next(targets, None)
            if target is None:
                finished.add(node)
                pending.pop()
                path.pop()
            elif target in path:
                return [*path[path.index(target) :], target]
            elif target not in finished:
                pending.append((target, iter(graph[target])))
    return None


@pytest.mark.parametrize(
    ("graph", "cycle"),
    [
        ({"a": ["b", "c"], "b": ["c"], "c": []}, None),
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, ["b", "c", "b"]),
        ({"a": ["d"], "d": [], "b": ["d", "c"], "c": ["a", "b"]}, ["b", "c", "b"]),
    ],
)
def test_cycles_are_found(graph: dict[str, list[str]], cycle: list[str] | None) -> None:
    """A node that several paths reach is no cycle; a path that comes back to itself is one."""
    assert cycle_in(graph) == cycle


def test_imports_of_types_and_in_functions_count(tmp_path: Path) -> None:
    """A module that imports another one lazily, or for its types only, depends on it."""
    package = tmp_path / "package"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part" / "__init__.py").write_text("value = 1\n")
    (package / "a.py").write_text("if TYPE_CHECKING:\n    from package.b import B\n")
    (package / "b.py").write_text("def f():\n    from package import a\n    from package.part import value\n")
    assert imports_of_modules(package) == {
        "package": set(),
        "package.part": set(),
        "package.a": {"package.b"},
        "package.b": {"package.a", "package.part"},
    }


def test_no_modules_import_each_other() -> None:
    """Imports go in one direction, so that each module can be read after those that it uses."""
    graph = imports_of_modules(ROOT / "streams")
    assert sum(map(len, graph.values())) > 1_000
    assert cycle_in(graph) is None


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

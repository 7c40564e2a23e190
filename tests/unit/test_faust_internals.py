"""The private parts of Faust, mode and aiokafka that we use are all listed, and all exist in the installed versions."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.helpers.faust_internals import INTERNALS, Internal
from tests.helpers.pages import ROOT

#: Packages whose private parts are used, by the name under which they are imported.
DISTRIBUTIONS = {"aiokafka": "aiokafka", "faust": "faust-streaming", "mode": "mode-streaming"}

#: Names behind which an object of another package is reached. What is used of such an object is listed.
FOREIGN_OBJECTS = ("consumer", "_thread", "_client")

#: Documented parts that the checks below find as well.
DOCUMENTED = {"faust.types.TP"}

#: Attributes that ABCMeta and mode's Service give to each of their subclasses.
MADE_BY_THE_CLASS_STATEMENT = {"_abc_impl", "abstract", "logger", "shortlabel", "_tasks"}


def problem_of(internal: Internal) -> str | None:
    """Return what is wrong with a part, or None."""
    try:
        owner: Any = importlib.import_module(internal.module)
    except ImportError as exc:
        return f"{internal} has moved: {exc}. It is used because: {internal.why}"
    for name in internal.name.split("."):
        found = getattr(owner, name, None)
        is_set_later = inspect.isclass(owner) and _is_set_by_constructor(owner, name)
        if not hasattr(owner, name) and not is_set_later:
            return f"{internal} has moved: {name} does not exist. It is used because: {internal.why}"
        owner = found
    if internal.parameters is not None:
        parameters = tuple(name for name in inspect.signature(owner).parameters if name != "self")
        if parameters != internal.parameters:
            return f"{internal} has other parameters: {parameters}. It is used because: {internal.why}"
    return None


def _is_set_by_constructor(owner: type, name: str) -> bool:
    constructors = (vars(base).get("__init__") for base in owner.__mro__)
    return any(name in each.__code__.co_names for each in constructors if inspect.isfunction(each))


def our_modules() -> Iterator[tuple[Path, ast.Module]]:
    """The modules of ours that import one of the packages, with their syntax trees."""
    for path in sorted((ROOT / "streams").rglob("*.py")):
        tree = ast.parse(path.read_text())
        if any(_roots(node) & DISTRIBUTIONS.keys() for node in ast.walk(tree)):
            yield path, tree


def _roots(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def listed_names() -> set[str]:
    """Every part of every name in the list, for example Consumer and getmany of Consumer.getmany."""
    return {part for internal in INTERNALS for part in internal.name.split(".")}


@pytest.mark.parametrize("internal", INTERNALS, ids=str)
def test_a_part_that_is_used_exists_as_it_is_used(internal: Internal) -> None:
    """A new version of one of the packages that moved a part fails here, with the part's name and what it is for."""
    assert problem_of(internal) is None


@pytest.mark.parametrize(
    ("moved", "message"),
    [
        (Internal("faust.nowhere", "App", "why"), "faust.nowhere:App has moved: No module named"),
        (Internal("faust", "App._moved", "why"), "faust:App._moved has moved: _moved does not exist"),
        (Internal("aiokafka", "AIOKafkaConsumer._gone", "why"), "AIOKafkaConsumer._gone has moved"),
        (Internal("faust", "App._new_transport", "why", ("url",)), "faust:App._new_transport has other parameters: ()"),
    ],
)
def test_a_part_that_moved_is_named(moved: Internal, message: str) -> None:
    """The check fails for a module, a class attribute and an instance attribute that are gone, and for parameters."""
    problem = problem_of(moved)
    assert problem is not None
    assert message in problem


def test_every_private_name_that_is_used_is_listed() -> None:
    """A private name that a module of ours uses is defined in that module, or listed."""
    unlisted = []
    for path, tree in our_modules():
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        own |= {each.attr for each in nodes if isinstance(each, ast.Attribute) and _is_assigned_to_self(each)}
        used = {each.attr for each in nodes if isinstance(each, ast.Attribute) and each.attr.startswith("_")}
        private = {name for name in used - own - listed_names() if not name.startswith("__")}
        # librdkafka's error codes begin with an underscore, and are documented.
        private = {name for name in private if not name.isupper()}
        unlisted += [f"{path.name}: {name}" for name in sorted(private)]
    assert not unlisted


def _is_assigned_to_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def test_every_call_of_faust_s_consumer_is_listed() -> None:
    """The consumer is not documented for users of Faust, so each of its parts that is used is listed."""
    unlisted = []
    for path, tree in our_modules():
        if path.match("kafka/clients.py"):  # its consumers are those of confluent-kafka
            continue
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        own = {each.name for cls in classes for each in cls.body if isinstance(each, ast.AsyncFunctionDef)}
        own |= {each.name for cls in classes for each in cls.body if isinstance(each, ast.FunctionDef)}
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        foreign = [node for node in attributes if ast.unparse(node.value).rstrip("()").endswith(FOREIGN_OBJECTS)]
        known = listed_names() | own | {"refresh_topics"}  # the last one is a method of delivery._Consumer
        unlisted += [f"{path.name}:{node.lineno}: {ast.unparse(node)}" for node in foreign if node.attr not in known]
    assert not unlisted


def test_every_method_that_is_overridden_is_listed() -> None:
    """A method or attribute of ours that hides one of another package's class is listed."""
    unlisted = []
    for path, _ in our_modules():
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for cls in vars(module).values():
            if not (inspect.isclass(cls) and cls.__module__ == module.__name__):
                continue
            bases = [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] in DISTRIBUTIONS]
            names = {name for name in vars(cls) if not name.startswith("__")} - MADE_BY_THE_CLASS_STATEMENT
            hiding = {name for name in names if any(name in vars(base) for base in bases)}
            unlisted += [f"{cls.__qualname__}.{name}" for name in sorted(hiding - listed_names())]
    assert not unlisted


def test_every_import_from_a_module_that_is_not_public_is_listed() -> None:
    """What is imported from inside a package, rather than from its top, is listed."""
    listed = {f"{internal.module}.{internal.name.split('.')[0]}" for internal in INTERNALS}
    listed |= {internal.module for internal in INTERNALS} | DOCUMENTED
    unlisted = []
    for path, tree in our_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _roots(node) & DISTRIBUTIONS.keys():
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                names = {name for name in names if not name.startswith("aiokafka.errors.")}
                unlisted += [f"{path.name}: {name}" for name in sorted(names - listed)]
    assert not unlisted


@pytest.mark.parametrize("name", DISTRIBUTIONS.values())
def test_each_package_has_bounds_that_admit_what_was_tested(name: str) -> None:
    """pyproject.toml has a lower and an upper bound, and the version of constraints.txt and of this test are inside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = (each for each in map(Requirement, project["dependencies"]) if each.name == name)
    assert {"<", ">="} == {each.operator for each in requirement.specifier}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pins[name] in requirement.specifier
    assert version(name) in requirement.specifier

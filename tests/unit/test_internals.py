"""The private parts of other packages that we use are all listed, and all exist in the installed versions."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from streams.process import aiohttp_internals
from streams.process.internals import Internal
from tests.helpers import faust_internals
from tests.helpers.pages import ROOT


@dataclass(frozen=True, slots=True)
class Packages:
    """Packages whose private parts are used, and their list.

    roots: the names under which they are imported. objects: names behind which an object of such a package is reached;
    what is used of it is listed. public: modules whose content is documented. documented: further names of which the
    checks below would say that they are not.
    """

    internals: tuple[Internal, ...]
    roots: frozenset[str]
    objects: tuple[str, ...]
    public: frozenset[str] = frozenset()
    documented: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return "+".join(sorted(self.roots))

    def listed_names(self) -> set[str]:
        """Every part of every name in the list, for example Consumer and getmany of Consumer.getmany."""
        return {part for internal in self.internals for part in internal.name.split(".")}


PACKAGES = (
    Packages(
        faust_internals.INTERNALS,
        roots=frozenset({"aiokafka", "faust", "mode"}),
        objects=("consumer", "assignor", "_thread", "_client"),
        documented=frozenset({"faust.types.TP"}),
    ),
    Packages(
        aiohttp_internals.INTERNALS,
        roots=frozenset({"aiohttp"}),
        objects=("manager", "self._parser", "message", "http.writer", "request.writer"),
        public=frozenset({"aiohttp"}),
        documented=frozenset({"aiohttp.typedefs.Middleware"}),
    ),
)

of_each_list = pytest.mark.parametrize("packages", PACKAGES, ids=str)

#: Versions that pyproject.toml admits, by distribution. Without a part of aiohttp's, requests are served without it.
BOUNDS = {
    **{name: {"<", ">="} for name in ("aiokafka", "faust-streaming", "mode-streaming")},
    "aiohttp": {">="},
}

#: Attributes that ABCMeta and mode's Service give to each of their subclasses.
MADE_BY_THE_CLASS_STATEMENT = {"_abc_impl", "abstract", "logger", "shortlabel", "_tasks"}


def our_modules(packages: Packages) -> Iterator[tuple[Path, ast.Module]]:
    """The modules of ours that import one of the packages, with their syntax trees."""
    for path in sorted((ROOT / "streams").rglob("*.py")):
        tree = ast.parse(path.read_text())
        if any(_roots(node) & packages.roots for node in ast.walk(tree)):
            yield path, tree


def _roots(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


@pytest.mark.parametrize("internal", [each for packages in PACKAGES for each in packages.internals], ids=str)
def test_a_part_that_is_used_exists_as_it_is_used(internal: Internal) -> None:
    """A new version of one of the packages that moved a part fails here, with the part's name and what it is for."""
    assert internal.problem() is None


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
    problem = moved.problem()
    assert problem is not None
    assert message in problem


@of_each_list
def test_every_private_name_that_is_used_is_listed(packages: Packages) -> None:
    """A private name that a module of ours uses is defined in that module or a base class of ours, or listed."""
    unlisted = []
    for path, tree in our_modules(packages):
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        own |= {each.attr for each in nodes if isinstance(each, ast.Attribute) and _is_assigned_to_self(each)}
        for cls in _classes_of(path):
            foreign = set(_foreign_bases(cls, packages))
            own = own.union(*(vars(base) for base in cls.__mro__ if base.__module__.startswith("streams.")))
            own = own.difference(*(vars(base) for base in foreign), *map(_set_by_constructor, foreign))
        used = {each.attr for each in nodes if isinstance(each, ast.Attribute) and each.attr.startswith("_")}
        private = {name for name in used - own - packages.listed_names() if not name.startswith("__")}
        # librdkafka's error codes begin with an underscore, and are documented, as is NamedTuple's method.
        private = {name for name in private if not name.isupper() and name != "_replace"}
        unlisted += [f"{path.name}: {name}" for name in sorted(private)]
    assert not unlisted


def _classes_of(path: Path) -> list[type]:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]


def _foreign_bases(cls: type, packages: Packages) -> list[type]:
    return [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] in packages.roots]


def _set_by_constructor(cls: type) -> tuple[str, ...]:
    constructor = vars(cls).get("__init__")
    return constructor.__code__.co_names if inspect.isfunction(constructor) else ()


def _is_assigned_to_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


@of_each_list
def test_everything_that_is_used_of_an_undocumented_object_is_listed(packages: Packages) -> None:
    """Faust's consumer is not documented for users, nor what aiohttp parses, so each part that is used is listed."""
    unlisted = []
    for path, tree in our_modules(packages):
        if path.match("kafka/clients.py"):  # its consumers are those of confluent-kafka
            continue
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        own = {each.name for cls in classes for each in cls.body if isinstance(each, ast.AsyncFunctionDef)}
        own |= {each.name for cls in classes for each in cls.body if isinstance(each, ast.FunctionDef)}
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        foreign = [node for node in attributes if ast.unparse(node.value).rstrip("()").endswith(packages.objects)]
        known = packages.listed_names() | own | {"refresh_topics"}  # the last one is a method of delivery._Consumer
        unlisted += [f"{path.name}:{node.lineno}: {ast.unparse(node)}" for node in foreign if node.attr not in known]
    assert not unlisted


@of_each_list
def test_every_method_that_is_overridden_is_listed(packages: Packages) -> None:
    """A method or attribute of ours that hides one of another package's class is listed."""
    unlisted = []
    for path, _ in our_modules(packages):
        for cls in _classes_of(path):
            bases = _foreign_bases(cls, packages)
            names = {name for name in vars(cls) if not name.startswith("__")} - MADE_BY_THE_CLASS_STATEMENT
            hiding = {name for name in names if any(name in vars(base) for base in bases)}
            unlisted += [f"{cls.__qualname__}.{name}" for name in sorted(hiding - packages.listed_names())]
    assert not unlisted


@of_each_list
def test_every_import_from_a_module_that_is_not_public_is_listed(packages: Packages) -> None:
    """What is imported from inside a package, rather than from its top, is listed."""
    listed = {f"{internal.module}.{internal.name.split('.')[0]}" for internal in packages.internals}
    listed |= {internal.module for internal in packages.internals} | packages.documented
    unlisted = []
    for path, tree in our_modules(packages):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _roots(node) & packages.roots:
                names = {f"{node.module}.{alias.name}" for alias in node.names if node.module not in packages.public}
                names = {name for name in names if not name.startswith("aiokafka.errors.")}
                unlisted += [f"{path.name}: {name}" for name in sorted(names - listed)]
    assert not unlisted


@pytest.mark.parametrize("name", BOUNDS)
def test_each_package_has_bounds_that_admit_what_was_tested(name: str) -> None:
    """The bounds of pyproject.toml contain the version of constraints.txt and of this test."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = (each for each in map(Requirement, project["dependencies"]) if each.name == name)
    assert BOUNDS[name] == {each.operator for each in requirement.specifier}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pins[name] in requirement.specifier
    assert version(name) in requirement.specifier

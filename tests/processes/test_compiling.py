"""Kernels: compiled when they are needed and not before, once, by one process; and what happens without numba."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from numba.core import caching
from numba.core.dispatcher import Dispatcher
from rich.console import Console

import streams
from streams import warming
from streams.core.kernels.compiling import _alone, _sources_of, compile_ahead, is_cached, is_ready
from streams.errors import ProcessError

PATIENCE_S = 120.0

SOURCE = """
from __future__ import annotations
from numba import int64
from streams.core.kernels.compiling import kernel

@kernel()
def scaled(value: int, factor: int) -> int:
    return value * factor

@kernel()
def summed(value: int) -> int:
    return scaled(value, 2) + scaled(value, 3) + scaled(3, value)

@kernel(int64(int64))
def declared(value: int) -> int:
    return value + 1

@kernel()
def other(value: int) -> int:
    return value - 1

@kernel()
def more(value: int, really: bool) -> int:
    return value + 2 if really else value

@kernel()
def broken(value: int) -> int:
    return value.no_such_attribute
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of kernels of this test alone; its folder is on the path of child processes as well."""
    name = f"kernels_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(name)
    del sys.modules[name]


def again(package: ModuleType) -> Any:
    """The same module as a process sees it that starts later."""
    del sys.modules[package.__name__]
    return importlib.import_module(package.__name__)


def kernels_of(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Dispatcher)}


# -- which kernels there are -----------------------------------------------------------------------------------------


def test_every_kernel_that_python_calls_is_an_entry_point() -> None:
    """Each kernel that is imported outside its package is declared there, so that it is compiled before it is used."""
    called: set[str] = set()
    for found in pkgutil.walk_packages(streams.__path__, "streams."):
        if ".kernels" in found.name or found.name == "streams.cli.__main__":
            continue
        module = importlib.import_module(found.name)
        called |= {f"{kernel.py_func.__module__}.{name}" for name, kernel in kernels_of(module).items()}
    assert called <= set(warming.ALL)
    assert len(called) > 20


@pytest.mark.parametrize("name", warming.ALL)
def test_every_entry_point_is_a_kernel(name: str) -> None:
    """The declared names exist, and their annotations or signatures suffice to compile them ahead."""
    module, _, kernel = name.rpartition(".")
    compiled = vars(importlib.import_module(module))[kernel]
    compile_ahead(compiled)
    assert is_ready(compiled)


def test_a_router_and_an_agent_each_need_a_part() -> None:
    """A worker needs the kernels of both."""
    assert set(warming.ROUTER) | set(warming.AGENT) == set(warming.WORKER)
    assert set(warming.HASHING) == set(warming.ROUTER) & set(warming.AGENT)


# -- one kernel ------------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_before_it_is_called(package: Any) -> None:
    """Importing a module of kernels compiles none of them, declared signatures or not."""
    assert not any(is_ready(kernel) or is_cached(kernel) for kernel in kernels_of(package).values())
    assert package.declared(1) == 2
    assert is_ready(package.declared)
    assert is_cached(package.declared)
    assert not is_ready(package.other)


def test_a_declared_signature_is_the_only_one(package: Any) -> None:
    """Other arguments are refused, at the first call as at later ones."""
    for _ in range(2):
        with pytest.raises(TypeError):
            package.declared("1")
    assert package.declared(1) == 2


def test_constants_do_not_make_another_variant(package: Any) -> None:
    """A kernel that is called with several constants is compiled once for all of them."""
    assert package.summed(5) == 40
    assert len(package.scaled.signatures) == 1


def test_compiled_code_is_loaded_by_the_next_process(package: Any) -> None:
    """From numba's cache, with its callees in it."""
    compile_ahead(package.summed)
    later = again(package)
    assert is_cached(later.summed)
    compile_ahead(later.summed)
    assert later.summed.stats.cache_misses == {}
    assert later.summed(5) == 40


def test_a_kernel_depends_on_the_modules_that_it_imports() -> None:
    """Also on one that it imports as a whole, and not on others in the same package."""
    kernels = Path(streams.__file__).resolve().parent / "core" / "index" / "kernels"
    sources = _sources_of(kernels / "spans.py")
    assert {kernels / "layout.py", kernels / "fields.py"} <= sources
    assert kernels / "fold.py" not in sources


def test_a_process_waits_for_another_that_compiles_the_same_kernel(package: Any, tmp_path: Path) -> None:
    """It then loads what the other one has compiled, instead of compiling it again."""
    program = (
        f"import {package.__name__} as package; from streams.core.kernels.compiling import compile_ahead\n"
        "print('ready', flush=True); compile_ahead(package.other)\n"
        "print(sum(package.other.stats.cache_hits.values()), len(package.other.stats.cache_misses))"
    )
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n"
    with _alone(package.other):
        child = subprocess.Popen([sys.executable, "-c", path + program], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.5)
        assert not is_cached(package.other)
        compile_ahead(package.other)
    rest, _ = child.communicate(timeout=PATIENCE_S)
    assert rest == "1 0\n"


# -- all of a command ------------------------------------------------------------------------------------------------


def names_in(package: ModuleType, *kernels: str) -> list[str]:
    return [f"{package.__name__}.{each}" for each in kernels]


def warm(names: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    return warming.warm(names, Console(file=out, width=200)), out.getvalue()


def test_children_compile_and_this_process_loads(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two children share the kernels; here they are loaded, and the next time there is nothing to do or to print."""
    monkeypatch.setattr(warming, "_n_cores", lambda: 2)
    monkeypatch.setattr(warming, "KERNELS_PER_CHILD_MIN", 1)
    names = names_in(package, "summed", "declared", "other", "more")
    compiled, text = warm(names)
    assert compiled == 4
    assert "Compiling 4 kernels in 2 processes. This is done once." in text
    assert "compiling kernels: 4 of 4" in text
    kernels = kernels_of(package)
    assert all(not kernels[name].stats.cache_misses for name in ("summed", "scaled", "declared", "other", "more"))
    assert package.summed(5) == 40
    again(package)
    assert warm(names) == (0, "")


def test_a_kernel_that_cannot_be_compiled_is_named(package: Any) -> None:
    """A child that fails prints its trace, and the error has the kernel's name."""
    with pytest.raises(ProcessError, match=r"broken"):
        warm(names_in(package, "other", "broken"))


def test_without_a_cache_this_process_compiles_and_says_why(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names NUMBA_CACHE_DIR, since nothing that children compile could be kept."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    fresh = again(package)
    compiled, text = warm(names_in(package, "other", "declared"))
    assert compiled == 2
    assert "NUMBA_CACHE_DIR" in text
    assert fresh.declared(1) == 2


_READ_ONLY = """
import sys
import {package} as kernels
from streams.core.kernels.compiling import compile_ahead, is_cacheable, is_cached

print([is_cached(each) for each in (kernels.summed, kernels.other)], is_cacheable(kernels.other))
for each in (kernels.summed, kernels.other):
    compile_ahead(each)
print(len(kernels.summed.stats.cache_misses), kernels.summed(5), kernels.other(5))
"""


def test_kernels_are_loaded_from_a_folder_that_cannot_be_written(package: Any, tmp_path: Path) -> None:
    """As in the container image: what was compiled in advance is loaded, and the rest is compiled and not stored.

    A folder that has no kernels either is no cache.
    """
    folder = tmp_path / "kernels"
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(folder),
        "NUMBA_CACHE_LOCATOR_CLASSES": "streams.core.kernels.shipped_cache.ShippedCacheLocator",
    }
    # Root without capabilities obeys the permissions of files, as every other user does.
    bound = [] if os.geteuid() else ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]

    def python(*command: str) -> list[str]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    reading = [*bound, sys.executable, "-c", _READ_ONLY.format(package=package.__name__)]
    folder.chmod(0o555)
    assert python(*reading) == ["[False, False] False", "1 40 4"]
    folder.chmod(0o755)
    compiling = f"import {package.__name__} as kernels; kernels.summed(5)"
    python(sys.executable, "-c", compiling)
    stored = sorted(folder.rglob("*"))
    for path in (folder, *stored):
        path.chmod(path.stat().st_mode & 0o555)
    assert python(*reading) == ["[True, False] False", "0 40 4"]
    assert sorted(folder.rglob("*")) == stored


def test_a_process_that_serves_warns_in_its_log_if_there_is_no_cache(
    package: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names NUMBA_CACHE_DIR; the progress is in the log as well, and in what /ready answers."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    again(package)
    notes: list[str] = []
    with caplog.at_level("INFO"):
        asyncio.run(warming.warm_while_serving(names_in(package, "other", "declared"), notes.append))
    assert [record.levelname for record in caplog.records if "NUMBA_CACHE_DIR" in record.message] == ["WARNING"]
    assert any("compiling kernels: 2 of 2" in record.message for record in caplog.records)
    assert notes == ["compiling kernels, 0 of 2 are done", "compiling kernels, 1 of 2 are done"]


# -- without numba ---------------------------------------------------------------------------------------------------


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_process_may_do_without_numba_unless_it_uses_kernels_already() -> None:
    """It hashes in pure Python and nothing warns; a process that has kernels keeps them."""
    without = "from streams.core.kernels.available import do_without_kernels\ndo_without_kernels()\n"
    shown = "from streams.core import hashing\nimport sys\nprint(hashing.KERNELS_AVAILABLE, 'numba' in sys.modules)\n"
    done = run(without + shown)
    assert (done.stdout.split(), done.stderr) == (["False", "False"], "")
    done = run(
        shown + without + "from streams.core.kernels.available import kernels_available as kernels\nprint(kernels())"
    )
    assert done.stdout.split() == ["True", "True", "True"]


def test_a_numba_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    """An installed numba that refuses this NumPy is not taken for a missing one."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')")
    done = run(f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\nfrom streams.core import hashing")
    assert done.returncode != 0
    assert "ImportError: Numba needs NumPy 2.4 or less" in done.stderr

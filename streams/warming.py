"""Compiling the kernels that a command needs, before it serves.

What lives here: which packages of kernels each command needs, the processes that compile them, and what the reader
sees meanwhile. What must not: the entry points of a package, which it declares itself.

numba compiles a kernel in one thread, and all kernels take half a minute of a fast core. So child processes compile
them side by side into numba's cache, one kernel each at a time, and this process loads them from there. From the cache
it takes a few tenths of a second, without children and without a word.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from rich.console import Console

import streams.core.block_facts.kernels as block_facts
import streams.core.index.kernels as index
import streams.core.kernels as hashing
import streams.core.reducer.kernels as reducer
import streams.core.routing.kernels as routing
import streams.tables.kernels as tables
from streams.core.kernels.available import kernels_available
from streams.errors import ProcessError
from streams.progress import shown


def _named(package: ModuleType, entry_points: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{package.__name__}.{each}" for each in entry_points)


# Kernels by their full names, the slowest to compile first: the last to end should be a short one.

#: What a bridge, a publisher and a simulated engine need.
HASHING = _named(hashing, hashing.ENTRY_POINTS)
ROUTER = (
    *_named(index, index.FOLDING),
    *HASHING,
    *_named(index, index.TREE),
    *_named(tables, tables.DECODING),
    *_named(block_facts, block_facts.ENTRY_POINTS),
    *_named(routing, routing.ENTRY_POINTS),
)
#: What a Faust worker without a router needs.
AGENT = (*_named(reducer, reducer.ENTRY_POINTS), *HASHING, *_named(tables, tables.STORING))
#: What a Faust worker needs, and all processes of the demo together.
WORKER = tuple(dict.fromkeys((*ROUTER, *AGENT)))
#: The index as a library as well.
EVERYTHING = (*_named(index, index.EVENTS), *WORKER)

#: A child needs 200 MB, and beyond the longest chain of kernels that call each other more children gain nothing.
CHILDREN_MAX = 8

#: Fewer kernels are compiled in this process: a child takes a second to start.
KERNELS_A_CHILD_MIN = 4


def warm(names: Sequence[str] = EVERYTHING, console: Console | None = None) -> int:
    """Compile or load kernels; returns how many had to be compiled, 0 as well where numba is missing.

    console: where progress is shown, by default on standard error: a worker warms before its logs are set up. Raises
    ProcessError where a kernel cannot be compiled.
    """
    if not kernels_available():
        return 0
    from streams.core.kernels.compiling import compile_ahead, is_cacheable, is_cached, is_ready

    kernels = {name: _kernel(name) for name in names}
    missing = [name for name, kernel in kernels.items() if not is_ready(kernel) and not is_cached(kernel)]
    if missing:
        console = console or Console(stderr=True)
        if all(is_cacheable(kernels[name]) for name in missing):
            _compile_in_children(missing, console)
        else:
            console.print(_NO_CACHE, markup=False, highlight=False, soft_wrap=True)
            _compile_here({name: kernels[name] for name in missing}, console)
    for kernel in kernels.values():
        if not is_ready(kernel):
            compile_ahead(kernel)
    return len(missing)


_NO_CACHE = (
    "Compiled kernels cannot be kept, because neither the installation nor the user's cache folder is writable, so"
    " every start compiles them again. Set NUMBA_CACHE_DIR to a writable folder."
)


def _kernel(name: str) -> Any:
    module, _, kernel = name.rpartition(".")
    return getattr(importlib.import_module(module), kernel)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _compile_here(kernels: dict[str, Any], console: Console) -> None:
    from streams.core.kernels.compiling import compile_ahead

    with shown(console, "compiling kernels", len(kernels), keep=True) as step:
        for name, kernel in kernels.items():
            step.doing = _short(name)
            compile_ahead(kernel)
            step.done += 1


def _compile_in_children(names: list[str], console: Console) -> None:
    """Have children compile kernels into numba's cache, each the next one when it is ready. Raises ProcessError."""
    n_children = min(_n_cores(), CHILDREN_MAX, -(-len(names) // KERNELS_A_CHILD_MIN))
    text = f"Compiling {len(names)} kernels in {n_children} processes. This is done once."
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    with shown(console, "compiling kernels", len(names), keep=True) as step:
        children = _Children(names, lambda done, doing: step.update(done, ", ".join(map(_short, doing))))
        children.run(n_children)


def _n_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


class _Children:
    """Children that share a list of kernels: one thread for each child, which gives it the next kernel."""

    def __init__(self, names: Sequence[str], report: Callable[[int, list[str]], None]) -> None:
        """report: called with how many kernels are compiled, and those that are being compiled."""
        self._waiting = deque(names)
        self._compiling: list[str] = []
        self._n_compiled = 0
        self._report = report
        self._lock = threading.Lock()
        self._error: ProcessError | None = None

    def run(self, n_children: int) -> None:
        """Compile them all; raises ProcessError."""
        folders = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        children = [
            subprocess.Popen(
                # -P: the folder that the reader happens to be in holds no module of ours.
                [sys.executable, "-P", "-m", "streams.warming"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them
            )
            for _ in range(n_children)
        ]
        threads = [threading.Thread(target=self._feed, args=(child,), daemon=True) for child in children]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for child in children:
                child.kill()
                child.communicate()
        if self._error is not None:
            raise self._error

    def _feed(self, child: subprocess.Popen[str]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        while (name := self._next()) is not None:
            try:
                print(name, file=child.stdin, flush=True)
                answer = child.stdout.readline()
            except OSError:
                answer = ""
            if not answer:
                with self._lock:
                    self._error = ProcessError(f"the process that compiled the kernel {name} ended")
                    self._waiting.clear()
                return
            self._note_compiled(name)

    def _next(self) -> str | None:
        with self._lock:
            if not self._waiting:
                return None
            name = self._waiting.popleft()
            self._compiling.append(name)
            self._report(self._n_compiled, self._compiling)
            return name

    def _note_compiled(self, name: str) -> None:
        with self._lock:
            self._compiling.remove(name)
            self._n_compiled += 1
            self._report(self._n_compiled, self._compiling)


def _serve(names: IO[str]) -> None:
    """What a child does: compile each kernel that is named on standard input, and answer with its name."""
    from streams.core.kernels.compiling import compile_ahead

    for line in names:
        compile_ahead(_kernel(line.strip()))
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.stdin)

"""Compiles the kernels that a command needs, before the command serves.

What lives here: which packages of kernels each command needs, the processes that compile them, and what is printed in
the meantime. What must not: the entry points of a package, which the package declares itself.

numba compiles in one thread, and all kernels take about 50 s of a core. Therefore child processes compile them into
numba's cache in parallel, each child one kernel at a time, and this process loads them from there. If all kernels are
in the cache, this takes less than half a second, starts no child and prints nothing.
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


# Kernels by their full names. Children take them in this order, so the slowest come first. Those that share most of
# their callees are far apart: a child that needs a kernel which another child is compiling waits for it.

#: For a bridge, a publisher and a simulated engine.
HASHING = _named(hashing, hashing.ENTRY_POINTS)
ROUTER = (
    *_named(index, index.FOLDING),
    *HASHING,
    *_named(index, index.TREE),
    *_named(tables, tables.DECODING),
    *_named(block_facts, block_facts.ENTRY_POINTS),
    *_named(routing, routing.ENTRY_POINTS),
)
#: For a Faust worker without a router.
AGENT = (*_named(reducer, reducer.ENTRY_POINTS), *HASHING, *_named(tables, tables.STORING))
#: For a Faust worker with a router, and for all processes of the demo together.
WORKER = tuple(dict.fromkeys((*ROUTER, *AGENT)))
#: For the index as a library as well.
EVERYTHING = tuple(dict.fromkeys((*ROUTER, *_named(index, index.EVENTS), *AGENT)))

#: Each child takes 300 MB. More children would wait for the longest chain of kernels that call each other.
CHILDREN_MAX = 8

#: A child takes a second to start, which does not pay off for fewer kernels than this.
KERNELS_PER_CHILD_MIN = 4


def warm(names: Sequence[str] = EVERYTHING, console: Console | None = None) -> int:
    """Compile or load kernels; returns how many had to be compiled, or 0 if numba is missing.

    console: where progress is shown. The default is standard error, since a worker calls this before it sets up its
    logs. Raises ProcessError if a kernel cannot be compiled.
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
    "Compiled kernels cannot be stored, because neither the installation nor the user's cache folder is writable:"
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
    """Compile kernels into numba's cache, in child processes. Raises ProcessError."""
    n_children = min(_n_cores(), CHILDREN_MAX, -(-len(names) // KERNELS_PER_CHILD_MIN))
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
    """Child processes that share a list of kernels. One thread per child gives it the next kernel."""

    def __init__(self, names: Sequence[str], report: Callable[[int, list[str]], None]) -> None:
        """report: called with the number of compiled kernels, and with those that are being compiled."""
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
                # -P: modules in the current folder must not replace ours.
                [sys.executable, "-P", "-m", "streams.warming"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only this process, which then stops the children
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
                    self._error = ProcessError(f"the process that was compiling the kernel {name} exited")
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
    """Run as a child: compile each kernel that is named on standard input, and answer with its name."""
    from streams.core.kernels.compiling import compile_ahead

    for line in names:
        compile_ahead(_kernel(line.strip()))
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.stdin)

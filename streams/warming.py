"""Compiles the kernels that a command needs, before the command serves.

What lives here: which packages of kernels each command needs, the processes that compile them, and what is printed in
the meantime. What must not: the entry points of a package, which the package declares itself.

numba compiles in one thread, and all kernels take about 50 s of a core. Therefore child processes compile them into
numba's cache in parallel, each child one kernel at a time, and this process loads them from there. If all kernels are
in the cache, this takes less than half a second, starts no child and prints nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
from streams.errors import ProcessError
from streams.process.progress import log_console, shown

log = logging.getLogger(__name__)


def _named(package: ModuleType, entry_points: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{package.__name__}.{module}" for module in entry_points)


# Kernels by their full names. Children take them in this order, so the slowest come first. Those that share most of
# their callees are far apart: a child that needs a kernel which another child is compiling waits for it.

#: For a publisher and a bridge.
HASHING = _named(hashing, hashing.ENTRY_POINTS)
ROUTER = (
    *_named(index, index.ENTRY_POINTS),
    *HASHING,
    *_named(tables, tables.DECODING),
    *_named(block_facts, block_facts.ENTRY_POINTS),
    *_named(routing, routing.ENTRY_POINTS),
    *_named(hashing, hashing.PARSING),
)
#: For a bridge of LMCache's events.
LMCACHE = (*HASHING, *_named(hashing, hashing.PARSING), *_named(hashing, hashing.CHUNKS))
#: For a Faust worker without a router.
AGENT = (*_named(reducer, reducer.ENTRY_POINTS), *HASHING, *_named(tables, tables.STORING))
#: For a Faust worker with a router, and for all processes of the demo together.
WORKER = tuple(dict.fromkeys((*ROUTER, *AGENT)))
#: Of every command.
ALL = tuple(dict.fromkeys((*WORKER, *LMCACHE)))

#: Each child takes 300 MB. More children would wait for the longest chain of kernels that call each other.
CHILDREN_MAX = 8

#: A child takes a second to start, which does not pay off for fewer kernels than this.
KERNELS_PER_CHILD_MIN = 4

#: Interval at which it is checked whether the compilation must end.
_STOP_POLL_S = 0.2


def warm(
    names: Sequence[str] = ALL,
    console: Console | None = None,
    note: Callable[[str], None] | None = None,
    stopping: threading.Event | None = None,
    warn: Callable[[str], None] | None = None,
) -> int:
    """Compile or load kernels; returns how many had to be compiled.

    console: where progress is shown, by default standard error. note: called with the progress as text whenever it
    changes, from any thread. stopping: ends the compilation between two kernels once it is set. warn: called if no
    folder for compiled kernels is writable; by default this is printed as well. Raises ProcessError if a kernel cannot
    be compiled.
    """
    note = note or _no_note
    stopping = stopping or threading.Event()
    from streams.core.kernels.compiling import compile_ahead, is_cacheable, is_cached, is_ready

    kernels = {name: _kernel(name) for name in names}
    missing = [name for name, kernel in kernels.items() if not is_ready(kernel) and not is_cached(kernel)]
    if missing:
        console = console or Console(stderr=True)
        if all(is_cacheable(kernels[name]) for name in missing):
            _compile_in_children(missing, console, note, stopping)
        else:
            if warn is None:
                console.print(_NO_CACHE, markup=False, highlight=False, soft_wrap=True)
            else:
                warn(_NO_CACHE)
            _compile_here({name: kernels[name] for name in missing}, console, note, stopping)
    for kernel in kernels.values():
        if stopping.is_set():
            break
        if not is_ready(kernel):
            compile_ahead(kernel)
    return len(missing)


async def warm_while_serving(names: Sequence[str], note: Callable[[str], None]) -> None:
    """Warm kernels on a thread, while the loop continues to serve. Progress goes to the log. Raises what `warm` raises.

    note: as of `warm`. If this is cancelled, the processes that compile are killed. A kernel that this process compiles
    itself, which takes up to 20 s, is not waited for.
    """
    loop = asyncio.get_running_loop()
    warmed: asyncio.Future[None] = loop.create_future()
    stopping = threading.Event()

    def finish(exc: BaseException | None) -> None:
        if not warmed.done():
            if exc is None:
                warmed.set_result(None)
            else:
                warmed.set_exception(exc)

    def run() -> None:
        failure: BaseException | None = None
        try:
            warm(names, log_console(log), note, stopping, log.warning)
        except BaseException as exc:
            failure = exc
        with suppress(RuntimeError):  # the loop was closed meanwhile: the process ends
            loop.call_soon_threadsafe(finish, failure)

    thread = threading.Thread(target=run, name="warming", daemon=True)
    thread.start()
    try:
        await warmed
    finally:
        stopping.set()
        thread.join(2 * _STOP_POLL_S)


def _no_note(_: str) -> None:
    """Do nothing: the default where nobody asks for the progress."""


_NO_CACHE = (
    "Compiled kernels cannot be stored, because neither the installation nor the user's cache folder is writable:"
    " every start compiles them again. Set NUMBA_CACHE_DIR to a writable folder."
)


def _kernel(name: str) -> Any:
    module, _, kernel = name.rpartition(".")
    return getattr(importlib.import_module(module), kernel)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _compile_here(
    kernels: dict[str, Any], console: Console, note: Callable[[str], None], stopping: threading.Event
) -> None:
    from streams.core.kernels.compiling import compile_ahead

    with shown(console, "compiling kernels", len(kernels), keep=True) as step:
        for name, kernel in kernels.items():
            if stopping.is_set():
                return
            step.doing = _short(name)
            note(_progress(step.done, len(kernels)))
            compile_ahead(kernel)
            step.done += 1


def _progress(done: int, total: int) -> str:
    return f"compiling kernels, {done} of {total} are done"


def _compile_in_children(
    names: list[str], console: Console, note: Callable[[str], None], stopping: threading.Event
) -> None:
    """Compile kernels into numba's cache, in child processes. Raises ProcessError."""
    n_children = min(_n_cores(), CHILDREN_MAX, -(-len(names) // KERNELS_PER_CHILD_MIN))
    text = f"Compiling {len(names)} kernels in {n_children} processes. This is done once."
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    with shown(console, "compiling kernels", len(names), keep=True) as step:

        def report(done: int, doing: list[str]) -> None:
            step.update(done, ", ".join(map(_short, doing)))
            note(_progress(done, len(names)))

        _Children(names, report, stopping).run(n_children)


def _n_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


class _Children:
    """Child processes that share a list of kernels. One thread per child gives it the next kernel."""

    def __init__(
        self, names: Sequence[str], report: Callable[[int, list[str]], None], stopping: threading.Event
    ) -> None:
        """report: called with the number of compiled kernels, and with those that are being compiled.

        stopping: once it is set, the children are killed.
        """
        self._waiting = deque(names)
        self._compiling: list[str] = []
        self._n_compiled = 0
        self._report = report
        self._stopping = stopping
        self._lock = threading.Lock()
        self._error: ProcessError | None = None

    def run(self, n_children: int) -> None:
        """Compile them all; raises ProcessError."""
        folders = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
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
                while thread.is_alive() and not self._stopping.is_set():
                    thread.join(_STOP_POLL_S)
        finally:
            for child in children:
                child.kill()
                child.wait()
            for thread in threads:
                thread.join()  # it has read the end of its child's output
            for child in children:
                child.communicate()
        if self._error is not None and not self._stopping.is_set():
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

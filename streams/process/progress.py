"""Progress of a step that takes longer than a few seconds: a bar in a terminal, lines everywhere else.

What lives here: how progress is shown. What must not: the work itself.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Without a terminal, a line is printed at this interval. After ten silent seconds a reader suspects a fault.
LINE_EVERY_S = 5.0

#: Longer than any line of ours, so that none is broken into two lines of a log.
_LOG_COLUMNS = 1000

#: A bar is redrawn at this interval, with its clock, so that a long part does not look like a standstill.
BAR_EVERY_S = 0.1


class Step:
    """The progress of a step. The thread that does the work writes it, and the one that shows it reads it."""

    def __init__(self, name: str, total: int | None) -> None:
        """total: number of parts; None if the step has no countable parts."""
        self.name = name
        self.total = total
        self.done = 0
        self.doing = ""

    def advance(self, doing: str = "") -> None:
        """Count one more part. doing: the current part, in a word or two."""
        self.update(self.done + 1, doing)

    def update(self, done: int, doing: str = "", total: int | None = None) -> None:
        """Set the number of parts that are done, and the total if it was not known before."""
        self.done, self.doing = done, doing
        if total is not None:
            self.total = total

    def line(self, elapsed_s: float) -> str:
        """The progress as one line."""
        count = "" if self.total is None else f"{self.done} of {self.total}, "
        return f"{self.name}: {count}{elapsed_s:.0f} s" + (f" ({self.doing})" if self.doing else "")


@contextmanager
def shown(console: Console, name: str, total: int | None = None, keep: bool = False) -> Iterator[Step]:
    """Show the progress of the step that runs inside the block. The block updates the `Step` that it gets.

    keep: leave the finished bar in the terminal, or print a last line, instead of removing the bar.
    """
    step = Step(name, total)
    # `console.is_terminal` is true for a file as well if FORCE_COLOR is set, as in many CI services.
    interactive = console.file.isatty() and not console.is_dumb_terminal
    with _bar(console, step, keep) if interactive else _lines(console, step, keep):
        yield step


@contextmanager
def _bar(console: Console, step: Step, keep: bool) -> Iterator[None]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}", markup=False),
    )
    with Progress(*columns, console=console, transient=not keep, auto_refresh=False) as bar:
        task = bar.add_task(step.name, total=step.total, count="", doing="")

        def draw() -> None:
            bar.update(
                task,
                description=step.name,
                completed=step.done,
                total=step.total,
                count="" if step.total is None else f"{step.done}/{step.total}",
                doing=step.doing,
                refresh=True,
            )

        with _repeated(BAR_EVERY_S, draw):
            yield
        step.doing = ""
        draw()


class _LogFile(io.TextIOBase):
    """A file whose lines become lines of a log."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__()
        self._log = log
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in filter(None, lines):
            self._log.info("%s", line)
        return len(text)


def log_console(log: logging.Logger) -> Console:
    """A console whose lines go to a log, for a process that serves."""
    file: Any = _LogFile(log)
    return Console(file=file, width=_LOG_COLUMNS)


#: When the last line was printed, by any step: many short steps in a row must not be silent either.
_last_line_s = time.monotonic()


@contextmanager
def _lines(console: Console, step: Step, keep: bool) -> Iterator[None]:
    began = time.monotonic()

    def print_line() -> None:
        global _last_line_s
        _last_line_s = time.monotonic()
        console.print(step.line(_last_line_s - began), markup=False, highlight=False, soft_wrap=True)
        console.file.flush()

    with _repeated(LINE_EVERY_S, print_line, first_s=_last_line_s + LINE_EVERY_S - began):
        yield
    if keep:
        step.doing = ""
        print_line()


@contextmanager
def _repeated(every_s: float, show: Callable[[], None], first_s: float = 0.0) -> Iterator[None]:
    """Call `show` in a thread for as long as the block runs: after `first_s`, and then after every `every_s`."""
    over = threading.Event()

    def repeat() -> None:
        wait_s = max(0.0, first_s)
        while not over.wait(wait_s):
            show()
            wait_s = every_s

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

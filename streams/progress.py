"""Progress of a step that takes longer than a few seconds: a bar in a terminal, lines everywhere else.

What lives here: how progress is shown. What must not: the work itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Where there is no terminal, a line is printed this often. A reader of a log begins to doubt after ten seconds.
LINE_EVERY_S = 5.0

#: A bar moves this often, together with its clock, so that a long part does not look like a standstill.
BAR_EVERY_S = 0.1


class Step:
    """How far a step is. The thread that does the work writes it; the one that shows it reads it."""

    def __init__(self, name: str, total: int | None) -> None:
        """total: parts of the step; None where it has no countable parts."""
        self.name = name
        self.total = total
        self.done = 0
        self.doing = ""

    def advance(self, doing: str = "") -> None:
        """Count one part more. doing: what is being done now, in a word or two."""
        self.update(self.done + 1, doing)

    def update(self, done: int, doing: str = "", total: int | None = None) -> None:
        """Set the parts that are done; total: set it as well, where it was not known before."""
        self.done, self.doing = done, doing
        if total is not None:
            self.total = total

    def line(self, elapsed_s: float) -> str:
        """The step in one line."""
        count = "" if self.total is None else f"{self.done} of {self.total}, "
        return f"{self.name}: {count}{elapsed_s:.0f} s" + (f" ({self.doing})" if self.doing else "")


@contextmanager
def shown(console: Console, name: str, total: int | None = None, keep: bool = False) -> Iterator[Step]:
    """Show the step that runs inside the block, which reports to the value given.

    keep: leave the finished bar in the terminal, or print a last line, instead of removing every trace of the bar.
    """
    step = Step(name, total)
    # Not `console.is_terminal`: FORCE_COLOR, which CI services set, makes that true for a file.
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


@contextmanager
def _lines(console: Console, step: Step, keep: bool) -> Iterator[None]:
    began = time.monotonic()

    def say() -> None:
        console.print(step.line(time.monotonic() - began), markup=False, highlight=False, soft_wrap=True)
        console.file.flush()

    with _repeated(LINE_EVERY_S, say):
        yield
    if keep:
        step.doing = ""
        say()


@contextmanager
def _repeated(every_s: float, show: Callable[[], None]) -> Iterator[None]:
    """Call `show` in a thread for as long as the block runs, for the first time after `every_s`."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            show()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

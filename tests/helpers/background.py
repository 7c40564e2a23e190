"""A step that is repeated on a thread while a test does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(step: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `step` while the block runs, at once and then with this pause after each call."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            step()
            over.wait(every_s)

    thread = threading.Thread(target=run, name="repeated")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

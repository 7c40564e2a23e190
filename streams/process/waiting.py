"""Waiting for a condition, with a limit and a name for what is missing.

What lives here: the loop that waits, and its error. What must not: the conditions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from streams.errors import ProcessError

POLL_S = 0.05


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str, poll_s: float = POLL_S) -> None:
    """Poll until the condition is true; raises ProcessError, which names `what`, after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ProcessError(f"timed out after {timeout_s:g} s, waiting for {what}")
        time.sleep(poll_s)

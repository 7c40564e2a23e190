"""Waiting for a condition, with a limit and a name for what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable

from streams.errors import ProcessError

POLL_S = 0.05


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str, poll_s: float = POLL_S) -> None:
    """Poll until the condition holds; raises ProcessError naming `what` after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ProcessError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(poll_s)

"""Fault points: `KVSTREAMS_FAULT=5:100` kills this process with SIGKILL at the 100th occurrence of effect 5.

What lives here: reading the variable, which only tests set. What must not: the effects. tables.partition numbers them
from 1; fault point 0 is inside an open transaction (tables.transactions).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from streams.errors import SettingsError

FAULT_ENV = "KVSTREAMS_FAULT"


def armed() -> Callable[[int], None] | None:
    """Return a function to call at every effect; None if no fault point is armed. Raises SettingsError."""
    text = os.environ.get(FAULT_ENV)
    if not text:
        return None
    try:
        effect, times = (int(part) for part in text.split(":"))
    except ValueError as exc:
        raise SettingsError(f"{FAULT_ENV} is {text!r}, not EFFECT:TIMES as in 5:100") from exc
    left = times

    def at(reached: int) -> None:
        nonlocal left
        if reached == effect:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return at

"""Ids of requests whose clients give none.

What lives here: making them. What must not: what a request id stands for (core.loads).
"""

from __future__ import annotations

import os

#: Bytes of an id: as many random bits as a UUID has, so that two routers never make the same one.
_ID_BYTES = 16

#: Ids that are made together. Reading random bytes is a system call, which takes as long as 20 ids.
_MADE_TOGETHER = 256


class RequestIds:
    """Makes ids of 32 hexadecimal digits from the random numbers of the operating system. Thread-safe."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    def next(self) -> str:
        """Return an id that was never returned before."""
        while True:
            try:
                return self._ids.pop()  # in one step, so that no two threads get the same one
            except IndexError:
                digits = os.urandom(_ID_BYTES * _MADE_TOGETHER).hex()
                step = 2 * _ID_BYTES
                self._ids.extend([digits[start : start + step] for start in range(0, len(digits), step)])

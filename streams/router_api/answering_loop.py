"""Work that a thread has for the router, done on the loop that answers requests, between two of them.

What lives here: taking turns with requests, and what happens if the loop has no time. What must not: the work.

Only one thread runs Python at a time. A thread that folds records while requests are answered takes the interpreter
from the thread that answers, which takes it back after SWITCH_INTERVAL_S, and each of these changes costs both of them
time: with 1,700 bookings per second, a sixth of the processor time of a booking (measured). If the thread that answers
does the work itself, in short steps, nothing changes hands, and a request waits for one step at most.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

#: A loop that does not come to a step for so long is busy with something else. The thread then does the rest itself.
LATE_S = 0.02


class _Turn:
    """The steps of one piece of work. Any thread may take the next one."""

    __slots__ = ("_lock", "_step", "error", "over", "taken_over")

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step: Callable[[], bool] | None = step
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.taken_over = False  # whether the thread does the rest
        self.error: Exception | None = None

    def advance(self) -> bool:
        """Do the next step; returns whether there may be another one."""
        with self._lock:
            if self._step is None:
                return False
            try:
                is_left = self._step()
            except Exception as exc:  # the thread that has the work raises it
                self.error, is_left = exc, False
            except BaseException as exc:
                self.error = RuntimeError(f"interrupted by {type(exc).__name__}")
                self._end()
                raise
            if not is_left:
                self._end()
            return is_left

    def _end(self) -> None:
        self._step = None  # a loop that is blocked may keep this object for long, but not what the step refers to
        self.over.set()


class AnsweringLoop:
    """The loop that answers requests. One thread at a time has work for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_awaited = False  # whether the loop has not come to the last work yet

    def run(self, step: Callable[[], bool]) -> None:
        """Call `step` until it returns False, and wait for that. Raises what it raises.

        The steps are called one after the other, on the loop's thread or on this one. Each should take well under a
        millisecond. Call it on another thread than the loop's.
        """
        turn = _Turn(step)
        if not self._is_awaited:  # otherwise the loop is still blocked
            self._is_awaited = True
            try:
                self._loop.call_soon_threadsafe(self._begin, turn)
                turn.over.wait(LATE_S)
            except RuntimeError:  # the loop has ended
                pass
        turn.taken_over = True
        while turn.advance():
            pass
        if turn.error is not None:
            raise turn.error

    def _begin(self, turn: _Turn) -> None:
        self._is_awaited = False
        self._advance(turn)

    def _advance(self, turn: _Turn) -> None:
        # The loop must not wait for the steps of the thread.
        if not turn.taken_over and turn.advance():
            self._loop.call_soon(self._advance, turn)

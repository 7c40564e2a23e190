"""The time of the log, estimated from when its records were read.

What lives here: the estimate. What must not: clocks (time is an argument).

Backlogs subtract append times, which brokers set, from the present time, so the present must be on the same clock. A
record is read some time after it was appended: the difference of both clocks is at least what any record shows, and
nearly that of the record that was read the fastest. Nothing is assumed about clocks of machines: a wall clock that is
ahead of the broker's would make every booking old.

State: a part of active load: the time of the log.
"""

from __future__ import annotations

#: The estimate is the greatest difference of the last one or two such intervals, so that a clock that is set is
#: followed.
INTERVAL_MS = 30_000


class LogClock:
    """Estimates the present time of the log. Until a record was read, its time is the local time."""

    __slots__ = ("_before_ms", "_difference_ms", "_since_ms")

    def __init__(self) -> None:
        self._before_ms: int | None = None
        self._difference_ms: int | None = None  # of the present interval; None until a live record
        self._since_ms = 0

    def note(self, append_ms: int, local_ms: int, *, live: bool = True) -> int:
        """A record with this append time was read now. Return how far the time of the log jumped, in ms.

        live: whether it was just written. Until such a record was read, those that had waited to be read show the
        least that the difference can be; afterwards they are ignored. The time jumps only until then: what was timed
        by it before, and has no time of its own, has to jump with it.
        """
        difference_ms, before_ms = append_ms - local_ms, self._before_ms
        if self._difference_ms is None:
            self._before_ms = difference_ms if before_ms is None else max(before_ms, difference_ms)
            if live:
                self._difference_ms, self._since_ms = difference_ms, local_ms
            return self._before_ms - (before_ms or 0)
        if live:
            if local_ms - self._since_ms >= INTERVAL_MS:
                self._before_ms, self._difference_ms, self._since_ms = self._difference_ms, difference_ms, local_ms
            elif difference_ms > self._difference_ms:
                self._difference_ms = difference_ms
        return 0

    def now_ms(self, local_ms: int) -> int:
        """The present time of the log."""
        if self._before_ms is None:
            return local_ms
        if self._difference_ms is None:
            return local_ms + self._before_ms
        return local_ms + max(self._before_ms, self._difference_ms)

"""The time of the log, estimated from when its records were read.

What lives here: the estimate. What must not: clocks (time is an argument).

Backlogs subtract append times, which brokers set, from the present time, so the present must be on the same clock. A
record is read some time after it was appended: the difference of both clocks is at least what any record shows, and
nearly that of the record that was read the fastest.
"""

from __future__ import annotations

#: The estimate is the greatest difference of the last one or two such intervals, so that a clock that is set is
#: followed.
INTERVAL_MS = 30_000


class LogClock:
    """Estimates the present time of the log. assumed_ms: the time of the log minus the local time, until a record."""

    __slots__ = ("_before_ms", "_difference_ms", "_since_ms")

    def __init__(self, assumed_ms: int) -> None:
        self._before_ms = assumed_ms
        self._difference_ms: int | None = None
        self._since_ms = 0

    def note(self, append_ms: int, local_ms: int) -> None:
        """A record with this append time was read now; records that had waited to be read must be left out."""
        difference_ms = append_ms - local_ms
        if self._difference_ms is None:
            # What was assumed at the start gives way to the first record.
            self._before_ms = self._difference_ms = difference_ms
            self._since_ms = local_ms
        elif local_ms - self._since_ms >= INTERVAL_MS:
            self._before_ms, self._difference_ms, self._since_ms = self._difference_ms, difference_ms, local_ms
        elif difference_ms > self._difference_ms:
            self._difference_ms = difference_ms

    def now_ms(self, local_ms: int) -> int:
        """The present time of the log."""
        if self._difference_ms is None:
            return local_ms + self._before_ms
        return local_ms + max(self._before_ms, self._difference_ms)

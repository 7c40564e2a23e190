"""When Kafka acknowledged one rank's records (pure; the clock is an argument).

What lives here: what follows from these times for readers of the records. What must not: Kafka.
"""

from __future__ import annotations

from streams.core.bridge_pulses import SILENT_AFTER_MS_MIN
from streams.settings import Settings


def tolerated_s(settings: Settings) -> float:
    """Return by how many seconds a router's view of the log may lag in an answer that is exact."""
    return max(settings.behind_after_ms, SILENT_AFTER_MS_MIN) / 1000


class Acknowledgements:
    """The records of one rank in one topic."""

    def __init__(self) -> None:
        self._first_at_s = float("inf")

    def acknowledged(self, now_s: float) -> None:
        """Note that Kafka acknowledged a record."""
        self._first_at_s = min(self._first_at_s, now_s)

    def is_first_read(self, now_s: float, after_s: float) -> bool:
        """Whether each reader that lags by less than `after_s` has read the first record."""
        return now_s - self._first_at_s >= after_s

"""When Kafka acknowledged one rank's records (pure; the clock is an argument).

What lives here: what follows from these times for readers of the records. What must not: Kafka.

State: the times of acknowledgements.
"""

from __future__ import annotations

from collections import deque

from streams.core.bridge_pulses import SILENT_AFTER_MS_MIN
from streams.settings import TopicSettings


def tolerated_s(settings: TopicSettings) -> float:
    """Return by how many seconds a router's view of the log may lag in an answer that is exact."""
    return max(settings.behind_after_ms, SILENT_AFTER_MS_MIN) / 1000


class Acknowledgements:
    """The records of one rank in one topic. Kafka acknowledges them in the order in which they were sent."""

    def __init__(self) -> None:
        self._written_at_s: deque[float] = deque()  # of the records on their way
        self._first_at_s = float("inf")

    def written(self, now_s: float) -> None:
        """Note a record for Kafka's client, which may have no space for it yet."""
        self._written_at_s.append(now_s)

    def withdrawn(self) -> None:
        """Note that the last record is not handed to the client."""
        self._written_at_s.pop()

    def ended(self, now_s: float, *, acknowledged: bool) -> None:
        """Note that Kafka acknowledged the oldest record on its way, or refused it."""
        self._written_at_s.popleft()
        if acknowledged:
            self._first_at_s = min(self._first_at_s, now_s)

    def are_late(self, now_s: float, after_s: float) -> bool:
        """Whether a record has been on its way for longer than `after_s`."""
        return bool(self._written_at_s) and now_s - self._written_at_s[0] > after_s

    def is_first_read(self, now_s: float, after_s: float) -> bool:
        """Whether each reader that lags by less than `after_s` has read the first record."""
        return now_s - self._first_at_s >= after_s

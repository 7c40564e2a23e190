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

    def __init__(self, tolerated_s: float) -> None:
        """tolerated_s: how long a record may be on its way, and by how much a reader may lag."""
        self._tolerated_s = tolerated_s
        self._written_at_s: deque[float] = deque()  # of the records on their way
        self._first_at_s = float("inf")
        self._late_at_s = float("-inf")  # when Kafka acknowledged the last record that came late

    def written(self, now_s: float) -> None:
        """Note a record for Kafka's client, which may have no space for it yet."""
        self._written_at_s.append(now_s)

    def withdrawn(self) -> None:
        """Note that the last record is not handed to the client."""
        self._written_at_s.pop()

    def ended(self, now_s: float, *, acknowledged: bool) -> None:
        """Note that Kafka acknowledged the oldest record on its way, or refused it."""
        on_its_way_s = now_s - self._written_at_s.popleft()
        if acknowledged:
            self._first_at_s = min(self._first_at_s, now_s)
            if on_its_way_s > self._tolerated_s:
                self._late_at_s = now_s

    def are_late(self, now_s: float) -> bool:
        """Whether a record is on its way for too long, or came so late that a reader may not have read it yet.

        A reader whose lag is tolerated knows nothing of a record that Kafka has just taken, however old it is.
        """
        if self._written_at_s and now_s - self._written_at_s[0] > self._tolerated_s:
            return True
        return now_s - self._late_at_s < self._tolerated_s

    def is_first_read(self, now_s: float) -> bool:
        """Whether each reader whose lag is tolerated has read the first record."""
        return now_s - self._first_at_s >= self._tolerated_s

"""What happens at later times of a run (pure).

What lives here: events in the order of their times. What must not: what they do; arrivals and engines' steps, which
have an order of their own (arrivals, fleet).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

_NEVER = float("inf")


class Agenda:
    """Events of engines, which reach the router after the same lag, and events at any other time."""

    def __init__(self, lag_ms: float) -> None:
        self._lag_ms = lag_ms
        self._lagged: deque[tuple[float, Callable[[], None]]] = deque()  # in order, since all have the same lag
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # heap
        self._n_timers = 0  # so far; those of the same time keep their order

    def at(self, at_ms: float, event: Callable[[], None]) -> None:
        """Let an event happen at a time."""
        self._n_timers += 1
        heapq.heappush(self._timers, (at_ms, self._n_timers, event))

    def after_lag(self, now_ms: float, event: Callable[[], None]) -> None:
        """Let an engine's event reach the router: at once without a lag."""
        if self._lag_ms:
            self._lagged.append((now_ms + self._lag_ms, event))
        else:
            event()

    def next_ms(self) -> float:
        """Return the time of the next event."""
        at_ms = self._lagged[0][0] if self._lagged else _NEVER
        return min(at_ms, self._timers[0][0]) if self._timers else at_ms

    def run(self, now_ms: float) -> None:
        """Let everything happen that is due: first events of engines."""
        while self._lagged and self._lagged[0][0] <= now_ms:
            self._lagged.popleft()[1]()
        while self._timers and self._timers[0][0] <= now_ms:
            heapq.heappop(self._timers)[2]()

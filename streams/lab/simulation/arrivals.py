"""When the requests of a run arrive: at their times or as others end, each after the answer that it needs (pure).

What lives here: which requests arrive at a time, and when the next ones may. What must not: routing, engines.
"""

from __future__ import annotations

import heapq

from streams.lab.simulation.workload import NO_REQUEST, Workload

_NEVER = float("inf")


class Arrivals:
    """The requests of a workload by time. n_ended: those whose answer is there.

    - _held: requests whose session's answer before them is missing, by that answer's request.
    - _paused: heap of requests that come after a pause, by time.
    - _ready: heap of requests before _next that may start now.
    """

    def __init__(self, workload: Workload, concurrency: int, speedup: float) -> None:
        """concurrency: requests at the same time; 0: they come at their times, divided by speedup."""
        self._concurrency = concurrency
        # The arrays' elements as Python numbers, since they are read one at a time.
        self._at_ms: list[float] = (workload.at_ms / speedup).tolist()
        self._pause_ms: list[float] = (workload.pause_ms / speedup).tolist()
        self._previous: list[int] = workload.previous.tolist()
        self._last_ms = [_NEVER] * len(workload)  # when each answer ended
        self._next = 0
        self._held: dict[int, list[int]] = {}
        self._paused: list[tuple[float, int]] = []
        self._ready: list[int] = []
        self._n_in_flight = 0
        self.n_ended = 0

    def take(self, now_ms: float) -> list[int]:
        """Return the requests that arrive now. Each is in flight until it has ended."""
        while self._paused and self._paused[0][0] <= now_ms:
            heapq.heappush(self._ready, heapq.heappop(self._paused)[1])
        arrived: list[int] = []
        n_max = self._concurrency - self._n_in_flight if self._concurrency else len(self._at_ms)
        while self._ready and len(arrived) < n_max:
            arrived.append(heapq.heappop(self._ready))
        while self._next < len(self._at_ms) and len(arrived) < n_max:
            if not self._concurrency and self._at_ms[self._next] > now_ms:
                break
            number = self._next
            self._next += 1
            previous = self._previous[number]
            if previous != NO_REQUEST and self._last_ms[previous] == _NEVER:
                self._held.setdefault(previous, []).append(number)
            elif previous != NO_REQUEST and self._pause_ms[number] > 0.0:  # its pause began when the answer ended
                heapq.heappush(self._paused, (self._last_ms[previous] + self._pause_ms[number], number))
            else:
                arrived.append(number)
        self._n_in_flight += len(arrived)
        return arrived

    def ended(self, number: int, now_ms: float, last_ms: float) -> None:
        """Note that an answer is there, which ended at last_ms: requests that need it come after their pauses."""
        self._last_ms[number] = last_ms
        self._n_in_flight -= 1
        self.n_ended += 1
        for follower in self._held.pop(number, ()):
            if self._pause_ms[follower] > 0.0:  # not if it is NaN
                heapq.heappush(self._paused, (now_ms + self._pause_ms[follower], follower))
            else:
                heapq.heappush(self._ready, follower)

    def next_ms(self) -> float:
        """Return the time at which a request may arrive although none ends before."""
        at_ms = self._paused[0][0] if self._paused else _NEVER
        if not self._concurrency and self._next < len(self._at_ms):
            return min(at_ms, self._at_ms[self._next])
        return at_ms

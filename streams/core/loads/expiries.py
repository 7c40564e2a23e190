"""When bookings, or reports of engines, are due to be looked at, by clock.

What lives here: the order in which they become due. What must not: whether a booking ends then (bookings), and those
that have ended already (ended_bookings).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

_K = TypeVar("_K")

#: Entries of bookings that have ended may stay in a heap, up to this number, or twice as many as there are bookings.
_STALE_MAX = 10_000


class _Clock(Generic[_K]):
    """The bookings of one clock.

    in_order: when each of them is due. Records of one partition come in the order of their times, so nearly all are
    here, and one that ends leaves nothing behind. late: the others, and heap: the same with entries that are stale.
    """

    __slots__ = ("heap", "in_order", "last_ms", "late", "number")

    def __init__(self) -> None:
        self.in_order: OrderedDict[_K, int] = OrderedDict()
        self.last_ms = 0
        self.late: dict[_K, int] = {}
        self.heap: list[tuple[int, int, _K]] = []
        self.number = 0  # breaks ties, since keys have no order


class Expiries(Generic[_K]):
    """When each of the bookings, or reports, that have a time is to be looked at: never later than it expires."""

    def __init__(self) -> None:
        self._clocks: dict[int, _Clock[_K]] = {}

    def schedule(self, key: _K, clock: int, due_ms: int) -> None:
        """Look at a booking at this time. It must not be scheduled yet."""
        of = self._clocks.get(clock)
        if of is None:
            of = self._clocks[clock] = _Clock()
        if due_ms >= of.last_ms:
            of.last_ms = due_ms
            of.in_order[key] = due_ms
            return
        if len(of.heap) > max(_STALE_MAX, 2 * len(of.late)):
            of.heap = [entry for entry in of.heap if of.late.get(entry[2]) == entry[0]]
            heapq.heapify(of.heap)
        of.late[key] = due_ms
        of.number += 1
        heapq.heappush(of.heap, (due_ms, of.number, key))

    def discard(self, key: _K, clock: int) -> None:
        """Do not look at a booking any more; one that is not scheduled is ignored."""
        of = self._clocks.get(clock)
        if of is not None and of.in_order.pop(key, None) is None:
            of.late.pop(key, None)

    def take_due(self, clock: int, now_ms: int) -> Iterator[_K]:
        """Remove and return what is due at now_ms or before. The caller may schedule it again, for a later time."""
        of = self._clocks.get(clock)
        if of is None:
            return
        while of.in_order:
            key, due_ms = next(iter(of.in_order.items()))
            if due_ms > now_ms:
                break
            del of.in_order[key]
            yield key
        while of.heap and of.heap[0][0] <= now_ms:
            due_ms, _, key = heapq.heappop(of.heap)
            if of.late.get(key) == due_ms:
                del of.late[key]
                yield key

    def clocks(self) -> list[int]:
        """Clocks of which anything is scheduled."""
        return [clock for clock, of in self._clocks.items() if of.in_order or of.late]

"""Ids of requests whose clients give none.

What lives here: making them. What must not: what a request id stands for (core.loads).

The records of a request are in one partition of `router-loads`, which follows from its id. Ids that are made together
are handed out in the order of their partitions. So the records that a router sends in one interval, and the frees of
these bookings later, are in one or two partitions and not in all of them. A broker's work for a batch of records
hardly depends on their number, and a batch is of one partition.
"""

from __future__ import annotations

import os
from collections.abc import Callable

#: Bytes of an id: as many random bits as a UUID has, so that two routers never make the same one.
_ID_BYTES = 16

#: Ids that are made together, which takes 0.8 ms. With eight partitions, 256 requests in a row have the same one; at
#: 3,000 requests per second these are the requests of 85 ms, which is six of the intervals in which records are sent.
_MADE_TOGETHER = 2048


class RequestIds:
    """Makes ids of 32 hexadecimal digits from the random numbers of the operating system. Thread-safe."""

    def __init__(self, partition_of: Callable[[str], int]) -> None:
        """partition_of: the partition of a request's records."""
        self._partition_of = partition_of
        self._ids: list[str] = []

    def next(self) -> str:
        """Return an id that was never returned before."""
        while True:
            try:
                return self._ids.pop()  # in one step, so that no two threads get the same one
            except IndexError:
                digits = os.urandom(_ID_BYTES * _MADE_TOGETHER).hex()
                step = 2 * _ID_BYTES
                made = [digits[start : start + step] for start in range(0, len(digits), step)]
                self._ids.extend(sorted(made, key=self._partition_of))

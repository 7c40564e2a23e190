"""The avoidances that a router has read, until they expire.

What lives here: which records count, and for how long. What must not: Kafka (registry), locks (view), and the limit of
what may be avoided at a time (core.routing.avoidance).

A record counts for its time from when this router read it, by this router's own clock, so that clocks of other machines
do not matter. Records that were there before this router had read the topic to its end are ignored: most of them are
over, and the others would be within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streams.core.ids import WorkerId
from streams.core.workers import Avoidance

#: Records that are kept. Many more workers cannot be avoided at a time: it is a third of a fleet at most.
AVOIDANCES_MAX = 4096


class _Known(NamedTuple):
    avoidance: Avoidance
    until_ms: int


class Avoidances:
    """The avoidances that have not expired. Times are of this process's monotonic clock, in ms."""

    def __init__(self) -> None:
        self._known: dict[WorkerId, _Known] = {}
        #: Records that were read and counted, since the start.
        self.n_read = 0

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Avoidance]:
        return (known.avoidance for known in self._known.values())

    def add(self, avoidance: Avoidance, now_ms: int) -> bool:
        """Take in a record; returns whether it is a new one. A router reads back the records that it has written."""
        known = self._known.get(avoidance.worker_id)
        if known is not None and known.avoidance == avoidance:
            return False
        if known is None and len(self._known) >= AVOIDANCES_MAX:
            return False
        self._known[avoidance.worker_id] = _Known(avoidance, now_ms + avoidance.ttl_ms)
        self.n_read += 1
        return True

    def expire(self, now_ms: int) -> list[Avoidance]:
        """Remove and return the avoidances that are over."""
        over = [known.avoidance for known in self._known.values() if known.until_ms <= now_ms]
        for avoidance in over:
            del self._known[avoidance.worker_id]
        return over

    def remaining_ms(self, worker_id: WorkerId, now_ms: int) -> int:
        """Return for how long requests are to avoid a worker; 0 if they are not."""
        known = self._known.get(worker_id)
        return 0 if known is None else max(0, known.until_ms - now_ms)

"""The clock of a replay: the time of the record that is folded, and otherwise the moment that is replayed.

What lives here: that clock, and folds that set it. What must not: reading topics (topic_readers), and the choice of a
moment (replay).

Routers count ages from when they read a record, by their own clocks. A replay reads the records of hours within
seconds. With the records' times, reports, avoidances and partition records are as old as they were at that moment.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

from confluent_kafka import Message

from streams.errors import BadRecord
from streams.router_api.knowledge.topic_readers import Fold


class _Folding(threading.local):
    """The time of the record that this thread folds; None if it folds none."""

    at_ms: int | None = None


class RecordClock:
    """Times are in ms since the epoch, as records have them. Thread-safe: each thread folds records of its own."""

    def __init__(self, moment_ms: int) -> None:
        """moment_ms: the moment that is replayed."""
        self.moment_ms = moment_ms
        self.latest_ms = 0  # of all records so far
        self._folding = _Folding()

    def now_ms(self) -> int:
        """The time."""
        at_ms = self._folding.at_ms
        return self.moment_ms if at_ms is None else at_ms

    def timed(self, fold: Fold, *, by_partition: bool) -> Fold:
        """Make a fold that folds records at their own times, as a router does that reads them when they are written.

        by_partition: consecutive records of a partition are folded together, at the time of the last one.
        """
        parts: Callable[[Sequence[Message]], Iterable[Sequence[Message]]] = _runs if by_partition else _each

        def fold_all(messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:  # noqa: ARG001 - the signature of every fold
            bad: list[tuple[int, BadRecord]] = []
            first = 0
            try:
                for part in parts(messages):
                    self._folding.at_ms = at_ms = part[-1].timestamp()[1]
                    if at_ms > self.latest_ms:
                        self.latest_ms = at_ms
                    bad += [(first + position, exc) for position, exc in fold(part, True)]
                    first += len(part)
            finally:
                self._folding.at_ms = None
            return bad

        return fold_all


def _runs(messages: Sequence[Message]) -> Iterable[Sequence[Message]]:
    return (list(run) for _, run in itertools.groupby(messages, Message.partition))


def _each(messages: Sequence[Message]) -> Iterable[Sequence[Message]]:
    return ((message,) for message in messages)

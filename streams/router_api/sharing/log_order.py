"""The registry's records in the order of the log, although a router's own changes are folded before they are read.

What lives here: which records a fold gets, of those that this router has read and those that it has written. What must
not: what a record means (view), and writing (registry).

A call that changes the registry is folded once Kafka has it, so that the caller finds its effect at once. The reader
may be behind: the earlier records that it reads afterwards would undo the change until it reaches the change itself. It
may also be ahead: then a later record of another router was folded already, and would be lost.

State: offsets of own changes that the reader has not reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from streams.kafka.clients import Record

#: Own changes that the reader has not reached yet. Beyond this number, earlier records may be folded after the oldest.
UNREAD_MAX = 65_536


class LogOrder:
    """Folds each record of one topic once, and none after a later one with the same key. Thread-safe."""

    def __init__(self, fold: Callable[[bytes, bytes | None, bool], None]) -> None:
        """fold: takes key, value, and whether the record was written after the reader had first reached the end."""
        self._fold = fold
        self._lock = threading.Lock()
        self._reading = 0
        self._read_to: dict[int, int] = {}  # by partition, the offset after the last record that was read
        self._unread: dict[bytes, int] = {}  # by key, the offset of the last own change; in order of the changes

    @property
    def reading(self) -> int:
        """How often the topic was read from its beginning, other than at the start. Offsets may begin anew then."""
        return self._reading

    def begin_again(self) -> None:
        """The topic is read from its beginning again, and may be another one."""
        with self._lock:
            self._reading += 1
            self._read_to.clear()
            self._unread.clear()

    def read(self, record: Record, live: bool) -> None:
        """Fold a record that was read, unless it is an own change or an earlier record. Raises what the fold raises."""
        with self._lock:
            self._read_to[record.partition] = record.offset + 1
            own = self._unread.get(record.key)
            if own is not None:
                if record.offset >= own:
                    del self._unread[record.key]
                if record.offset <= own:
                    return
            self._fold(record.key, record.value, live)

    def written(self, reading: int, key: bytes, value: bytes | None, partition: int, offset: int) -> None:
        """Fold an own change that Kafka has taken, unless the reader has reached it already.

        reading: what it was before the change was sent. offset: negative if the broker did not name it.
        """
        with self._lock:
            if reading != self._reading:
                return  # the reader is on its way from the beginning
            if offset >= 0:
                if offset < self._read_to.get(partition, 0) or offset < self._unread.get(key, 0):
                    return
                self._unread.pop(key, None)
                self._unread[key] = offset
                if len(self._unread) > UNREAD_MAX:
                    del self._unread[next(iter(self._unread))]
            self._fold(key, value, True)

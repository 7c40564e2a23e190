"""The records of one partition that wait to be processed.

What lives here: which offsets are taken, in which order, and the limits in records and bytes. What must not: what is
done with the records, locks, waiting. Owner: the partition, under its lock.

State: the records that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from streams.settings import TableSettings
from streams.tables.pacing import BATCH_BYTES_MAX
from streams.tables.reducer import SourceRecord


class SourceQueue:
    """A queue over all sources of a partition. It takes only the next offset of each source, and only while it is open.

    n_bytes: of the queued records' values.
    """

    def __init__(self, settings: TableSettings) -> None:
        self._settings = settings
        self._records: deque[SourceRecord] = deque()
        self._next: dict[str, int] | None = None  # topic to the next offset to take; None while closed
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_open(self) -> bool:
        """Whether it takes records."""
        return self._next is not None

    def open(self, next_offsets: dict[str, int]) -> None:
        """Take records from these offsets on."""
        self._next = next_offsets

    def close(self) -> None:
        """Drop all records, and take none until it is opened."""
        self._next = None
        self._records.clear()
        self.n_bytes = 0

    def next_offset(self, topic: str) -> int | None:
        """Next offset to take; None while closed."""
        return None if self._next is None else self._next.get(topic, 0)

    def skip(self, topic: str, next_offset: int, offset: int) -> bool:
        """Move the next offset to this one, if it is still `next_offset` and this moves it forward."""
        if self._next is None or not self._next.get(topic, 0) == next_offset < offset:
            return False
        self._next[topic] = offset
        return True

    def offer(self, records: Sequence[SourceRecord], applied: int) -> tuple[int | None, list[Any]]:
        """Take records as `TablePartition.offer` describes it.

        applied: the last applied offset of their topic. Returns the offset to which the source must be sought, None if
        it need not be, and the handles of records that had been applied before.
        """
        assert self._next is not None
        topic = records[0].topic
        next_offset = self._next.get(topic, 0)
        applied_before: list[Any] = []
        missing: int | None = None
        before = -1
        for record in records:
            if 0 <= before < next_offset < record.offset:
                next_offset = record.offset
            before = record.offset
            if record.offset == next_offset:
                next_offset += 1
                self._records.append(record)
                self.n_bytes += len(record.value or b"")
            elif record.offset > next_offset:
                missing = next_offset
                break
            elif record.offset <= applied:
                applied_before.append(record.handle)
        self._next[topic] = next_offset
        return missing, applied_before

    def take_batch(self) -> list[SourceRecord]:
        """Take the records of the next transaction, limited in number and bytes."""
        batch: list[SourceRecord] = []
        n_bytes = 0
        while self._records and len(batch) < self._settings.batch_records_max and n_bytes < BATCH_BYTES_MAX:
            record = self._records.popleft()
            n_bytes += len(record.value or b"")
            batch.append(record)
        self.n_bytes -= n_bytes
        return batch

    def put_back(self, records: Sequence[SourceRecord]) -> None:
        """Return the last records of a batch, which come first in the next one."""
        self._records.extendleft(reversed(records))
        self.n_bytes += sum(len(record.value or b"") for record in records)

    @property
    def has_full_batch(self) -> bool:
        """Whether a batch would be ended by its limits."""
        return len(self._records) >= self._settings.batch_records_max or self.n_bytes >= BATCH_BYTES_MAX

    @property
    def is_full(self) -> bool:
        """Whether so much is queued, in records or bytes, that the source must be paused."""
        return self._exceeds(1)

    @property
    def has_drained(self) -> bool:
        """Whether so little is queued that a paused source may continue."""
        return not self._exceeds(2)

    def _exceeds(self, part: int) -> bool:
        return (
            len(self._records) > self._settings.queue_records_high // part
            or self.n_bytes > self._settings.queue_bytes_high // part
        )

"""Records of `router-loads` that are folded together: one buffer, and where each record is in it.

What lives here: this form, which kernels read without an object for each record. What must not: what a record means
(load_records), which needs kernels; the parent of several router processes, which only passes records on, has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streams.core.ids import Int64Array

#: One record as it comes from Kafka: key, value (None for a tombstone), append time and partition.
RawLoad = tuple[bytes, bytes | None, int, int]

#: Kernels copy whole words, and so read up to seven bytes after the end of a record.
PADDING = bytes(8)


#: Columns of LoadBatch.places: where the value begins and ends (-1: a tombstone), append time, partition, where the key
#: begins, and the offset (0 if it is not known).
BEGIN, END, AT_MS, PARTITION, KEY, OFFSET = range(6)
N_COLUMNS = 6


class LoadBatch(NamedTuple):
    """Records that are folded together, in one buffer.

    raw: each record's key and then its value, in any order, and PADDING after the last one.
    places: int64[n, N_COLUMNS].
    """

    raw: bytes
    places: Int64Array

    def __len__(self) -> int:
        return len(self.places)

    def part(self, first: int, stop: int) -> LoadBatch:
        """The records from `first` up to `stop`."""
        return LoadBatch(self.raw, self.places[first:stop])

    def record(self, number: int) -> RawLoad:
        """One record."""
        begin, end, at_ms, partition, key, _ = self.places[number].tolist()
        return self.raw[key:begin], None if end < 0 else self.raw[begin:end], at_ms, partition


def batch_of(records: Sequence[RawLoad]) -> LoadBatch:
    """Records that came one by one."""
    parts: list[bytes] = []
    places, at = [], 0
    for key, value, at_ms, partition in records:
        begin = at + len(key)
        parts.append(key)
        if value is None:
            places.append((begin, -1, at_ms, partition, at, 0))
            at = begin
        else:
            parts.append(value)
            end = begin + len(value)
            places.append((begin, end, at_ms, partition, at, 0))
            at = end
    parts.append(PADDING)
    return LoadBatch(b"".join(parts), np.array(places, dtype=np.int64).reshape(-1, N_COLUMNS))


def joined(batches: Sequence[LoadBatch]) -> LoadBatch:
    """The records of several batches, in their order."""
    if len(batches) == 1:
        return batches[0]
    places = np.concatenate([batch.places for batch in batches])
    sizes = [len(batch.raw) for batch in batches]
    bases = np.repeat(np.cumsum([0, *sizes[:-1]]), [len(batch) for batch in batches])
    places[:, BEGIN] += bases
    places[:, KEY] += bases
    places[:, END] += np.where(places[:, END] < 0, 0, bases)
    return LoadBatch(b"".join([batch.raw for batch in batches]), places)

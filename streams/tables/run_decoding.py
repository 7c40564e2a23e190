"""Many run records to columns in one call of a compiled kernel.

What lives here: records joined to one stretch of bytes, and columns for the kernel to fill; it needs numba. What must
not: the bytes of a record (kernels.runs), and reasons (records.decode_run).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from streams.codec import codec
from streams.core.events import MoeLabels
from streams.core.ids import U64_MASK, Int64Array, SequenceHash
from streams.core.index.run_columns import RunColumns
from streams.core.reducer.kernels.layout import NO_LABEL
from streams.tables.kernels.avro import HEADER_BYTES
from streams.tables.kernels.runs import LABEL_ROW_WORDS, OTHER, decode_labels, decode_records

#: Each block of a record is in it as a local and an engine hash.
_BYTES_PER_BLOCK = 16

#: Labels that are kept as they are: of 64 layers with 256 experts each.
_KEPT_LABELS = 16_384

#: A block and its labels.
LabelledBlock = tuple[SequenceHash, MoeLabels]


@cache
def frame_header(schema: str) -> tuple[int, int]:
    """What every value of a schema begins with, as kernels take it: its first eight bytes and the next two."""
    header = b"\xc3\x01" + codec(schema).fingerprint
    assert len(header) == HEADER_BYTES
    return int.from_bytes(header[:8], "little", signed=True), int.from_bytes(header[8:], "little")


def join(records: Sequence[tuple[bytes, bytes | None]]) -> tuple[bytes, Int64Array]:
    """Keys and values one behind the other, and their lengths, two a record: int64[2 * n], -1 for a tombstone's."""
    parts: Iterable[Any] = list(chain.from_iterable(records))
    try:
        return b"".join(parts), np.fromiter(map(len, parts), dtype=np.int64, count=2 * len(records))
    except TypeError:  # there is a tombstone; looking for one first takes longer than this
        lengths = [-1 if part is None else len(part) for part in parts]
        return b"".join(filter(None, parts)), np.array(lengths, dtype=np.int64)


def address_of(data: bytes) -> int:
    """Where bytes lie, for as long as somebody keeps them; 0 where there are none."""
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data) if data else 0


def decode(data: bytes, lengths: Int64Array) -> tuple[RunColumns, list[int]]:
    """Decode what `join` gave; see `decode_runs`."""
    n_records = len(lengths) // 2
    columns = RunColumns(n_records, len(data) // _BYTES_PER_BLOCK, data)
    n_others = decode_records(
        address_of(data), len(data), lengths.ctypes.data, n_records, *frame_header("prefix-index-run"), columns.address
    )
    return columns, np.flatnonzero(columns.present == OTHER).tolist() if n_others else []


def labels_of(columns: RunColumns, first: int, last: int) -> dict[int, list[LabelledBlock]]:
    """Held blocks that have labels, of records first to last of what `decode_runs` gave, by record."""
    offset = columns.offset
    rows = np.empty((int(offset[last] - offset[first]), LABEL_ROW_WORDS), dtype=np.int64)
    n_rows = decode_labels(address_of(columns.data), len(columns.data), columns.address, first, last, rows.ctypes.data)
    found: dict[int, list[LabelledBlock]] = {}
    for record, sequence, *labels in rows[:n_rows].tolist():
        found.setdefault(record, []).append((SequenceHash(sequence & U64_MASK), _labels(*labels)))
    return found


@lru_cache(maxsize=_KEPT_LABELS)
def _labels(*words: int) -> MoeLabels:
    """Labels of words; a model has few."""
    return MoeLabels(*[None if word == NO_LABEL else word for word in words])


def decode_runs(records: Sequence[tuple[bytes, bytes | None]]) -> tuple[RunColumns, list[int]]:
    """Decode keys and values, None for a tombstone's.

    Gives columns, and the positions that are no run records or are left to `records.decode_run`: in the columns these
    have no blocks and presence bits OTHER.
    """
    return decode(*join(records))

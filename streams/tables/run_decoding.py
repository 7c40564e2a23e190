"""Decodes many run records into columns with one call of a compiled kernel.

What lives here: joining records into one bytes object, and columns for the kernel to fill. Needs numba. What must not:
the layout of a record's bytes (kernels.runs), and error messages (records.decode_run).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import numpy as np

from streams.core.events import MoeLabels
from streams.core.ids import U64_MASK, Int64Array, SequenceHash
from streams.core.index.run_columns import RunColumns
from streams.core.reducer.kernels import layout
from streams.kafka.avro_frames import codec
from streams.tables.kernels.avro import HEADER_BYTES
from streams.tables.kernels.runs import LABEL_ROW_WORDS, OTHER, decode_labels, decode_records

#: A record stores a local and an engine hash per block.
_BYTES_PER_BLOCK = 16

#: Cached label objects: enough for 64 layers with 256 experts each.
_KEPT_LABELS = 16_384

#: A block and its labels.
LabelledBlock = tuple[SequenceHash, MoeLabels]


@cache
def frame_header(schema: str) -> tuple[int, int]:
    """Return the header of every value of a schema, as kernels take it: its first eight bytes, and the next two."""
    header = b"\xc3\x01" + codec(schema).fingerprint
    assert len(header) == HEADER_BYTES
    return int.from_bytes(header[:8], "little", signed=True), int.from_bytes(header[8:], "little")


def join(records: Sequence[tuple[bytes, bytes | None]]) -> tuple[bytes, Int64Array]:
    """Concatenate keys and values; returns the bytes, and int64[2 * n] lengths of key and value, -1 for a tombstone."""
    parts: Iterable[Any] = list(chain.from_iterable(records))
    try:
        return b"".join(parts), np.fromiter(map(len, parts), dtype=np.int64, count=2 * len(records))
    except TypeError:  # there is a tombstone; testing for one first would cost more
        lengths = [-1 if part is None else len(part) for part in parts]
        return b"".join(filter(None, parts)), np.array(lengths, dtype=np.int64)


def address_of(data: bytes) -> int:
    """Return the address of bytes, valid while a reference to them exists; 0 if they are empty."""
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data) if data else 0


def decode(data: bytes, lengths: Int64Array) -> tuple[RunColumns, list[int]]:
    """Decode the result of `join`; see `decode_runs`."""
    n_records = len(lengths) // 2
    columns = RunColumns(n_records, len(data) // _BYTES_PER_BLOCK, data)
    n_others = decode_records(
        address_of(data), len(data), lengths.ctypes.data, n_records, *frame_header("prefix-index-run"), columns.address
    )
    return columns, np.flatnonzero(columns.present == OTHER).tolist() if n_others else []


def labels_of(columns: RunColumns, first: int, last: int) -> dict[int, list[LabelledBlock]]:
    """Return the held blocks that have labels, by record, for records `first` to `last` - 1 of these columns."""
    offset = columns.offset
    rows = np.empty((int(offset[last] - offset[first]), LABEL_ROW_WORDS), dtype=np.int64)
    n_rows = decode_labels(address_of(columns.data), len(columns.data), columns.address, first, last, rows.ctypes.data)
    blocks: dict[int, list[LabelledBlock]] = {}
    for record, sequence, *labels in rows[:n_rows].tolist():
        blocks.setdefault(record, []).append((SequenceHash(sequence & U64_MASK), _labels(*labels)))
    return blocks


@lru_cache(maxsize=_KEPT_LABELS)
def _labels(*words: int) -> MoeLabels:
    """Build labels from words. Cached, since a model has few different labels."""
    return MoeLabels(*[None if word == layout.NO_LABEL else word for word in words])


def decode_runs(records: Sequence[tuple[bytes, bytes | None]]) -> tuple[RunColumns, list[int]]:
    """Decode keys and values, None for a tombstone.

    Returns columns, and the positions of records that are not run records or are left to `records.decode_run`. In the
    columns, these records have no blocks, and OTHER as their presence bits.
    """
    return decode(*join(records))

"""Decodes many records of kv-events into batches with one call of a compiled kernel.

What lives here: the batches that the kernel decodes, whose events stay rows of an array until they are read. Needs
numba. What must not: the layout of a record's bytes (kernels.events), and the errors of bad records
(kafka.records.decode_batch).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import overload

import numpy as np

from streams.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvents,
    KvEvent,
    MoeLabels,
)
from streams.core.ids import U64_MASK, DpRank, EngineHash, HashArray, Incarnation, Int64Array, RankId, Tier, WorkerId
from streams.core.reducer.kernels import layout
from streams.errors import BadRecord
from streams.kafka.records import decode_batch_or_error
from streams.tables.kernels.events import HEAD_WORDS, decode_batches
from streams.tables.run_decoding import address_of, frame_header

#: Bytes of input for which one row is reserved. An event of one block has about 30. If shorter events use up all rows,
#: the remaining records are decoded one by one.
_BYTES_PER_ROW = 16
_ROWS_MIN = 64


class EventRows(Sequence[KvEvent]):
    """The events of one batch, as rows of a table; a row becomes an event when it is read.

    rows: int64[n, EVENT_WORDS], contiguous, at `address`. data: the bytes that their addresses point into.
    """

    __slots__ = ("_data", "address", "rows")

    def __init__(self, rows: Int64Array, address: int, data: bytes) -> None:
        self.rows = rows
        self.address = address
        self._data = data

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> KvEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KvEvent]: ...
    def __getitem__(self, index: int | slice) -> KvEvent | Sequence[KvEvent]:
        if isinstance(index, slice):
            rows = np.ascontiguousarray(self.rows[index])
            return EventRows(rows, rows.ctypes.data, self._data)
        return self._event(self.rows[index].tolist())

    def __iter__(self) -> Iterator[KvEvent]:
        return map(self._event, self.rows.tolist())

    def _event(self, row: list[int]) -> KvEvent:
        if row[layout.EVENT_KIND] not in (layout.STORED, layout.REMOVED):
            return AllBlocksCleared()
        engine, tier = self._hashes(row[layout.EVENT_ENGINE], row[layout.EVENT_BLOCKS]), Tier(row[layout.EVENT_TIER])
        if row[layout.EVENT_KIND] == layout.REMOVED:
            return BlocksRemoved(engine, tier)
        labels = [
            None if label == layout.NO_LABEL else label
            for label in row[layout.EVENT_LABELS : layout.EVENT_LABELS + layout.LABEL_WORDS]
        ]
        return BlocksStored(
            EngineHash(row[layout.EVENT_PARENT] & U64_MASK) if row[layout.EVENT_HAS_PARENT] else None,
            engine,
            self._hashes(row[layout.EVENT_LOCAL], row[layout.EVENT_BLOCKS]),
            tier,
            MoeLabels(*labels) if row[layout.EVENT_LABELLED] else None,
        )

    def _hashes(self, address: int, n_hashes: int) -> HashArray:
        begin = address - address_of(self._data)
        return np.frombuffer(self._data, dtype="<u8", count=n_hashes, offset=begin)


def rows_of(events: Iterable[KvEvent]) -> tuple[Int64Array, int, object]:
    """Return rows of events, int64[n, EVENT_WORDS], their address, and an object to keep while addresses are used."""
    if isinstance(events, EventRows):
        return events.rows, events.address, events
    events = list(events)
    rows = np.zeros((len(events), layout.EVENT_WORDS), dtype=np.int64)
    kept: list[HashArray] = []
    for row, event in zip(rows, events, strict=True):
        if isinstance(event, AllBlocksCleared):
            row[layout.EVENT_KIND] = layout.CLEARED
            continue
        engine = np.ascontiguousarray(event.engine, dtype=np.uint64)
        kept.append(engine)
        row[layout.EVENT_TIER] = event.tier
        row[layout.EVENT_BLOCKS], row[layout.EVENT_ENGINE] = len(engine), engine.ctypes.data
        if isinstance(event, BlocksRemoved):
            row[layout.EVENT_KIND] = layout.REMOVED
            continue
        local = np.ascontiguousarray(event.local, dtype=np.uint64)
        kept.append(local)
        row[layout.EVENT_KIND], row[layout.EVENT_LOCAL] = layout.STORED, local.ctypes.data
        if event.parent is not None:
            row[layout.EVENT_HAS_PARENT], row[layout.EVENT_PARENT] = 1, np.uint64(event.parent).view(np.int64)
        if event.moe is not None:
            row[layout.EVENT_LABELLED] = 1
            row[layout.EVENT_LABELS : layout.EVENT_LABELS + layout.LABEL_WORDS] = label_words(event.moe)
    return rows, rows.ctypes.data, kept


def label_words(moe: MoeLabels) -> list[int]:
    """Return the LABEL_WORDS words by which kernels know a block's labels."""
    return [layout.NO_LABEL if label is None else label for label in (moe.layer_id, moe.expert_id, moe.expert_group)]


def decode_events(
    values: Sequence[bytes | None], schema_ids: Mapping[str, int] | None = None
) -> list[EngineBatch | BadRecord]:
    """Decode values of kv-events; returns a batch or an error for each value."""
    data = b"".join(filter(None, values))
    lengths = np.array([len(value) if value else 0 for value in values], dtype=np.int64)
    heads = np.empty((len(values), HEAD_WORDS), dtype=np.int64)
    rows = np.empty((_ROWS_MIN + len(data) // _BYTES_PER_ROW, layout.EVENT_WORDS), dtype=np.int64)
    decode_batches(
        address_of(data),
        lengths.ctypes.data,
        len(values),
        *frame_header("kv-events"),
        heads.ctypes.data,
        rows.ctypes.data,
        len(rows),
    )
    address = rows.ctypes.data
    # A negative head, and a batch that cannot be built, are left to the codec.
    return [
        (None if head[0] < 0 else _batch(head, data, rows, address)) or decode_batch_or_error(value, schema_ids)
        for value, head in zip(values, heads.tolist(), strict=True)
    ]


def _batch(head: list[int], data: bytes, rows: Int64Array, address: int) -> EngineBatch | None:
    """Build the batch that a head describes; None if its model's name is not valid UTF-8."""
    (
        n_rows,
        first_row,
        worker,
        dp_rank,
        model,
        n_model,
        block_size,
        incarnation,
        sequence,
        digest,
        emitted_at,
        n_unindexed,
    ) = head
    try:
        name = _text(data[model : model + n_model])
    except UnicodeDecodeError:
        return None
    return EngineBatch(
        RankId(WorkerId(worker & U64_MASK), DpRank(dp_rank)),
        name,
        block_size,
        Incarnation(incarnation & U64_MASK),
        sequence,
        digest & U64_MASK,
        emitted_at,
        EngineEvents(
            EventRows(rows[first_row : first_row + n_rows], address + first_row * layout.EVENT_WORDS * 8, data)
        ),
        n_unindexed,
    )


@lru_cache(maxsize=1024)
def _text(raw: bytes) -> str:
    """Decode a model's name. Cached, since a scope has few models."""
    return raw.decode()

"""Decodes records of kv-events into rows that a store of runs applies.

What lives here: the bytes of an ordinary batch, as a kernel reads them. What must not: error messages. Every other
record is left to `codec.decode_batch`, which decodes or refuses it: restatements, removals, heartbeats, incomplete
batches, batches of a feed that is not live, stores into CXL memory, frames of a schema registry, records of earlier
schemas, invalid bytes.

Rows point into the records' bytes, which must stay in place until the rows are applied. Whatever the bytes contain,
nothing outside the record is read.
"""

from __future__ import annotations

from streams.core.events import BEFORE_FIRST, LABEL_MAX, FeedState
from streams.core.ids import Tier
from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import load, load_byte, signed, store
from streams.core.kernels.xxh3 import load_u64
from streams.core.reducer.kernels import layout
from streams.tables.kernels.avro import HEADER_BYTES, read_long

#: Words of a head: number of rows, -1 for a record that is left to decode_batch; the first row; fields of the record.
#: The model is given by the offset at which it begins and its length in bytes.
(
    HEAD_ROWS,
    HEAD_FIRST_ROW,
    HEAD_WORKER,
    HEAD_DP_RANK,
    HEAD_MODEL,
    HEAD_MODEL_BYTES,
    HEAD_BLOCK_SIZE,
    HEAD_INCARNATION,
    HEAD_SEQUENCE,
    HEAD_DIGEST,
    HEAD_EMITTED_AT,
    HEAD_UNINDEXED,
) = range(12)
HEAD_WORDS = 12

_TIER_MAX = max(Tier)
_LIVE = int(FeedState.LIVE)
_I32_MAX = (1 << 31) - 1


@inlined
def _read_hashes(cursor: int, end: int) -> tuple[int, int, int]:
    """Return the address and number of packed hashes, and the address after them; end + 1 if they are invalid."""
    n_bytes, cursor = read_long(cursor, end)
    if n_bytes < 0 or n_bytes & 7 or n_bytes > end - cursor:
        return 0, 0, end + 1
    return cursor, n_bytes >> 3, cursor + n_bytes


@inlined
def _read_event(cursor: int, end: int, row: int) -> int:
    """Read one event into its row; returns the address after it, end + 1 if the record is left to decode_batch."""
    kind, cursor = read_long(cursor, end)
    if cursor > end or kind < layout.STORED or kind > layout.CLEARED:
        return end + 1
    store(row + layout.EVENT_KIND * 8, kind)
    store(row + layout.EVENT_BLOCKS * 8, 0)
    if kind == layout.CLEARED:
        return cursor
    if kind == layout.STORED:
        branch, cursor = read_long(cursor, end)
        if branch == 1 and end - cursor >= 8:
            store(row + layout.EVENT_PARENT * 8, signed(load_u64(cursor)))
            cursor += 8
        elif branch != 0:
            return end + 1
        store(row + layout.EVENT_HAS_PARENT * 8, branch)
    engines, n_blocks, cursor = _read_hashes(cursor, end)
    store(row + layout.EVENT_ENGINE * 8, engines)
    store(row + layout.EVENT_BLOCKS * 8, n_blocks)
    if kind == layout.STORED:
        locals_, n_locals, cursor = _read_hashes(cursor, end)
        if n_locals != n_blocks:
            return end + 1
        store(row + layout.EVENT_LOCAL * 8, locals_)
    tier, cursor = read_long(cursor, end)
    if cursor > end or tier < 0 or tier > _TIER_MAX:
        return end + 1
    store(row + layout.EVENT_TIER * 8, tier)
    if kind == layout.STORED:
        labelled, cursor = read_long(cursor, end)
        if labelled == 1:
            for word in range(layout.LABEL_WORDS):
                branch, cursor = read_long(cursor, end)
                label = layout.NO_LABEL
                if branch == 1:
                    label, cursor = read_long(cursor, end)
                    if label < 0 or label > LABEL_MAX:
                        return end + 1
                elif branch != 0:
                    return end + 1
                store(row + (layout.EVENT_LABELS + word) * 8, label)
        elif labelled != 0:
            return end + 1
        store(row + layout.EVENT_LABELLED * 8, labelled)
        in_pool, cursor = read_long(cursor, end)
        if in_pool != 0:
            return end + 1
    return cursor


@inlined
def _read_batch(begin: int, end: int, head: int, rows: int, rows_left: int) -> int:
    """Read one datum; returns its number of rows, -1 if it is left to decode_batch."""
    worker, cursor = read_long(begin, end)
    dp_rank, cursor = read_long(cursor, end)
    n_model, cursor = read_long(cursor, end)
    if n_model < 0 or n_model > end - cursor:
        return -1
    model = cursor
    block_size, cursor = read_long(cursor + n_model, end)
    incarnation, cursor = read_long(cursor, end)
    sequence, cursor = read_long(cursor, end)
    if end - cursor < 8:
        return -1
    digest = signed(load_u64(cursor))
    emitted_at, cursor = read_long(cursor + 8, end)
    n_unindexed, cursor = read_long(cursor, end)
    if cursor >= end or load_byte(cursor) != 0:  # incomplete
        return -1
    feed, cursor = read_long(cursor + 1, end)
    body, cursor = read_long(cursor, end)
    if (
        cursor > end
        or feed != _LIVE
        or body != 0
        or block_size < 1
        or block_size > _I32_MAX
        or n_unindexed < 0
        or n_unindexed > _I32_MAX
        or dp_rank < 0
        or dp_rank > _I32_MAX
        or sequence < BEFORE_FIRST
    ):
        return -1
    n_rows = 0
    count, cursor = read_long(cursor, end)
    while count != 0:
        if count < 0:
            count = -count
            _, cursor = read_long(cursor, end)
        if cursor > end or count < 0 or count > rows_left - n_rows:
            return -1
        for _ in range(count):
            cursor = _read_event(cursor, end, rows + n_rows * (layout.EVENT_WORDS * 8))
            if cursor > end:
                return -1
            n_rows += 1
        count, cursor = read_long(cursor, end)
    if cursor != end or (sequence == BEFORE_FIRST and n_rows > 0):
        return -1
    store(head + HEAD_WORKER * 8, worker)
    store(head + HEAD_DP_RANK * 8, dp_rank)
    store(head + HEAD_MODEL * 8, model)
    store(head + HEAD_MODEL_BYTES * 8, n_model)
    store(head + HEAD_BLOCK_SIZE * 8, block_size)
    store(head + HEAD_INCARNATION * 8, incarnation)
    store(head + HEAD_SEQUENCE * 8, sequence)
    store(head + HEAD_DIGEST * 8, digest)
    store(head + HEAD_EMITTED_AT * 8, emitted_at)
    store(head + HEAD_UNINDEXED * 8, n_unindexed)
    return n_rows


@kernel()
def decode_batches(
    data: int, lengths: int, n_records: int, header: int, header_end: int, heads: int, rows: int, rows_max: int
) -> int:
    """Decode records; returns the number of those that are left to decode_batch.

    data: address of the records' bytes, one record after the other. lengths: address of one int64 per record. header,
    header_end: the first eight bytes of every record, and the next two. heads: address of HEAD_WORDS int64 per record,
    the model as an offset from `data`. rows: address of rows_max rows; a record that needs more rows is left.
    """
    begin, n_rows, others = data, 0, 0
    for record in range(n_records):
        n_bytes = load(lengths + (record << 3))
        head = heads + record * (HEAD_WORDS * 8)
        n_batch_rows = -1
        if (
            n_bytes >= HEADER_BYTES
            and signed(load_u64(begin)) == header
            and load_byte(begin + 8) | (load_byte(begin + 9) << 8) == header_end
        ):
            n_batch_rows = _read_batch(
                begin + HEADER_BYTES, begin + n_bytes, head, rows + n_rows * (layout.EVENT_WORDS * 8), rows_max - n_rows
            )
        store(head + HEAD_ROWS * 8, n_batch_rows)
        store(head + HEAD_FIRST_ROW * 8, n_rows)
        if n_batch_rows < 0:
            others += 1
        else:
            store(head + HEAD_MODEL * 8, load(head + HEAD_MODEL * 8) - data)
            n_rows += n_batch_rows
        begin += n_bytes
    return others

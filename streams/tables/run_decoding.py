"""Many run records to columns in one call of a compiled kernel.

What lives here: the bytes of a run record as a kernel reads them; it needs numba. What must not: reasons. Of a record
that the kernel does not take, `records.decode_run` tells what is wrong, or takes it: the two agree on every byte, but
for varints of more than ten bytes and array counts of -2^63, which no writer makes and which are left to it.

Nothing outside of a record's own bytes is read, whatever they are. Read in the machine's byte order, so on
little-endian machines alone, as all kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from streams.codec import codec
from streams.core.arenas import Int64Array
from streams.core.ids import Tier
from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.fold import (
    FOLD_FIRST,
    FOLD_HAS_PARENT,
    FOLD_LOCAL,
    FOLD_OFFSET,
    FOLD_PARENT,
    FOLD_PRESENT,
)
from streams.core.kernels.memory import copy_words, load, shift_right, signed, store
from streams.core.kernels.run_records import FOLD_GENERATION, FOLD_INCARNATION, FOLD_PLACE, FOLD_WORKER, load_byte
from streams.core.kernels.xxh3 import chain_step, load_u32, load_u64, swap_bytes
from streams.core.runs import RUN_BLOCKS_MAX
from streams.core.tree_fold import RunColumns
from streams.tables.records import RUN_PREFIX

_PREFIX = RUN_PREFIX[0]
_KEY_BYTES = 22
_TIER_MAX = max(Tier)
#: Marker of Avro's single-object encoding and fingerprint.
_HEADER_BYTES = 10
_HASHES_BYTES_MAX = RUN_BLOCKS_MAX * 8
#: A long of 64 bits takes ten groups of seven.
_VARINT_BITS_MAX = 70
#: Each block of a record is in it as a local and an engine hash.
_BYTES_A_BLOCK = 16
#: Presence bits of a record that is none, or that is left to decode_run.
OTHER = -1


@inlined  # type: ignore[untyped-decorator]  # numba ships no types
def _read_long(at: int, end: int) -> tuple[int, int]:
    """A zigzag varint and the address behind it; 0 and end + 1 where there is none, from where nothing can be read."""
    value, shift = 0, 0
    while at < end and shift < _VARINT_BITS_MAX:
        byte = load_byte(at)
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return int(shift_right(value, 1) ^ -(value & 1)), at
        shift += 7
    return 0, end + 1


@inlined  # type: ignore[untyped-decorator]  # numba ships no types
def _skip_labels(at: int, end: int, n_blocks: int) -> int:
    """Address behind the labels; beyond `end` where they are none, or of blocks that the run has not.

    fastavro takes an index of a union from the end, -1 for the last of its branches, as Python does; so it is here.
    """
    count, at = _read_long(at, end)
    while count != 0:
        if count < 0:
            count = -count
            _, at = _read_long(at, end)
            if count < 0:
                return end + 1
        while count > 0:
            offset, at = _read_long(at, end)
            if at > end or offset < 0 or offset >= n_blocks:
                return end + 1
            for _ in range(3):
                branch, at = _read_long(at, end)
                if branch == 1 or branch == -1:  # numba makes a tuple of the other
                    _, at = _read_long(at, end)
                elif branch != 0 and branch != -2:
                    return end + 1
            count -= 1
        count, at = _read_long(at, end)
    return at


@inlined  # type: ignore[untyped-decorator]  # numba ships no types
def _decode_datum(at: int, end: int, table: int, row: int, first: int, local_out: int) -> int:
    """Fields of one datum to its row; gives the number of its blocks, 0 where decode_run is to look at it.

    row: offset in bytes of the record's place in a column; local_out: where its local hashes go.
    """
    incarnation, at = _read_long(at, end)
    generation, at = _read_long(at, end)
    start, at = _read_long(at, end)
    branch, at = _read_long(at, end)
    parent, has_parent = 0, 0
    if branch == 1 or branch == -1:
        if end - at < 8:
            return 0
        parent, has_parent = signed(load_u64(at)), 1
        at += 8
    elif branch != 0 and branch != -2:
        return 0
    if start < 0 or (start == 0) == (has_parent == 1):
        return 0
    n_bytes, at = _read_long(at, end)
    if n_bytes < 8 or n_bytes > _HASHES_BYTES_MAX or n_bytes & 7 or n_bytes > end - at:
        return 0
    local = at
    n_engine_bytes, at = _read_long(at + n_bytes, end)
    if n_engine_bytes != n_bytes or n_bytes > end - at:
        return 0
    n_blocks: int = n_bytes >> 3
    n_present, at = _read_long(at + n_bytes, end)
    if n_present < 1 or n_present > end - at:
        return 0
    present = 0
    for index in range(n_present):
        byte = load_byte(at + index)
        if index < 4:
            present |= byte << (index << 3)
        elif byte != 0:
            return 0
    if present == 0 or present >> n_blocks != 0:
        return 0
    if _skip_labels(at + n_present, end, n_blocks) != end:
        return 0
    name = signed(load_u64(local))
    if has_parent:
        name = signed(chain_step(parent, name))
    if name != first:
        return 0
    copy_words(local_out, local, n_blocks)
    store(load(table + FOLD_PARENT * 8) + row, parent)
    store(load(table + FOLD_HAS_PARENT * 8) + row, has_parent)
    store(load(table + FOLD_PRESENT * 8) + row, present)
    store(load(table + FOLD_INCARNATION * 8) + row, incarnation)
    store(load(table + FOLD_GENERATION * 8) + row, generation)
    return n_blocks


@kernel()
def decode_records(
    data: int, n_bytes: int, lengths: int, n_records: int, header: int, header_end: int, table: int
) -> int:
    """Decode records into the columns of a table; gives the number of those that are left to decode_run.

    data: address of keys and values, one behind the other, n_bytes together. lengths: address of two int64 a record,
    its key's and its value's bytes, -1 for a tombstone's. header, header_end: the first eight bytes and the next two
    of every value. table: of RunColumns; the holder is not set.
    """
    presents, offsets = load(table + FOLD_PRESENT * 8), load(table + FOLD_OFFSET * 8)
    locals_ = load(table + FOLD_LOCAL * 8)
    key, data_end = data, data + n_bytes
    n_blocks, n_others = 0, 0
    store(offsets, 0)
    for record in range(n_records):
        row = record << 3
        n_key, n_value = load(lengths + (row << 1)), load(lengths + (row << 1) + 8)
        value = key + n_key
        end = value + max(n_value, 0)
        store(presents + row, OTHER)
        taken = False
        if n_key == _KEY_BYTES and end <= data_end and load_byte(key) == _PREFIX:
            tier = load_byte(key + 13)
            if tier <= _TIER_MAX:
                first = signed(swap_bytes(load_u64(key + 14)))
                dp_rank = shift_right(signed(swap_bytes(load_u32(key + 9))), 32)
                store(load(table + FOLD_FIRST * 8) + row, first)
                store(load(table + FOLD_WORKER * 8) + row, signed(swap_bytes(load_u64(key + 1))))
                store(load(table + FOLD_PLACE * 8) + row, (dp_rank << 2) | tier)
                if n_value < 0:
                    store(presents + row, 0)
                    taken = True
                elif (
                    n_value >= _HEADER_BYTES
                    and signed(load_u64(value)) == header
                    and load_byte(value + 8) | (load_byte(value + 9) << 8) == header_end
                ):
                    begin = locals_ + (n_blocks << 3)
                    found = _decode_datum(value + _HEADER_BYTES, end, table, row, first, begin)
                    n_blocks += found
                    taken = found > 0
        n_others += not taken
        store(offsets + row + 8, n_blocks)
        key = end
    return n_others


def _stamp() -> None:
    """Make the cache notice when this file changes: it is stamped with the sources of the kernels' folder alone."""
    cached = getattr(getattr(decode_records, "_cache", None), "_cache_file", None)
    stamp = getattr(cached, "_source_stamp", None)
    if cached is not None and isinstance(stamp, str):
        cached._source_stamp = stamp + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


_stamp()


@cache
def _header() -> tuple[int, int]:
    """What every value begins with, as `decode_records` takes it."""
    header = b"\xc3\x01" + codec("prefix-index-run").fingerprint
    assert len(header) == _HEADER_BYTES
    return int.from_bytes(header[:8], "little", signed=True), int.from_bytes(header[8:], "little")


def join(records: Sequence[tuple[bytes, bytes | None]]) -> tuple[bytes, Int64Array]:
    """Keys and values one behind the other, and their lengths, two a record: int64[2 * n], -1 for a tombstone's."""
    parts: Iterable[Any] = list(chain.from_iterable(records))
    try:
        return b"".join(parts), np.fromiter(map(len, parts), dtype=np.int64, count=2 * len(records))
    except TypeError:  # there is a tombstone; looking for one first takes longer than this
        lengths = [-1 if part is None else len(part) for part in parts]
        return b"".join(filter(None, parts)), np.array(lengths, dtype=np.int64)


def decode(data: bytes, lengths: Int64Array) -> tuple[RunColumns, list[int]]:
    """Decode what `join` gave; see `decode_runs`."""
    n_records = len(lengths) // 2
    columns = RunColumns(n_records, len(data) // _BYTES_A_BLOCK)
    address = np.frombuffer(data, dtype=np.uint8).ctypes.data if data else 0
    n_others = decode_records(address, len(data), lengths.ctypes.data, n_records, *_header(), columns.address)
    return columns, np.flatnonzero(columns.present == OTHER).tolist() if n_others else []


def decode_runs(records: Sequence[tuple[bytes, bytes | None]]) -> tuple[RunColumns, list[int]]:
    """Decode keys and values, None for a tombstone's.

    Gives columns, and the positions that are no run records or are left to `records.decode_run`: in the columns these
    have no blocks and presence bits OTHER.
    """
    return decode(*join(records))

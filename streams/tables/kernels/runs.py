"""Decodes run records into columns or into a store of runs, and encodes a store's changes.

What lives here: the bytes of a run record as kernels read and write them. What must not: error messages. A record that
a kernel does not take is left to `records.decode_run`, which decodes it or raises the error. The two agree on every
byte, except for varints of more than ten bytes and array counts of -2^63: no writer produces these, and they are left
to decode_run.

Whatever the bytes contain, nothing outside the record is read.
"""

from __future__ import annotations

from streams.core.ids import Tier
from streams.core.index.kernels.fold import (
    FOLD_FIRST,
    FOLD_HAS_PARENT,
    FOLD_LOCAL,
    FOLD_OFFSET,
    FOLD_PARENT,
    FOLD_PRESENT,
)
from streams.core.index.kernels.run_records import (
    FOLD_GENERATION,
    FOLD_INCARNATION,
    FOLD_LABELLED,
    FOLD_PLACE,
    FOLD_WORKER,
)
from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import copy_words, load, load_byte, shift_right, signed, store, trailing_zeros
from streams.core.kernels.words import get, put
from streams.core.kernels.xxh3 import chain_step, load_u32, load_u64, store_u64, swap_bytes
from streams.core.reducer.kernels import layout
from streams.core.reducer.kernels.changes import add_stale, adopt_run, free_run, next_stale, set_labels
from streams.core.reducer.kernels.maps import delete_slot, tag_in
from streams.core.reducer.kernels.spans import capacity_of, engine_at, locals_at, run_at
from streams.core.runs import RUN_BLOCKS_MAX
from streams.tables.kernels.avro import HEADER_BYTES, read_long, store_byte, write_long
from streams.tables.records import RUN_KEY

_PREFIX = RUN_KEY.prefix[0]
KEY_BYTES = 22
_TIER_MAX = max(Tier)
_HASHES_BYTES_MAX = RUN_BLOCKS_MAX * 8
#: Presence bits of a record that is not a run record, or is left to decode_run.
OTHER = -1
#: Bytes of the longest key and value: the numbers, the hashes, and 32 blocks with all their labels.
RECORD_BYTES_MAX = 2048
#: Words of a row of decode_labels.
LABEL_ROW_WORDS = 2 + layout.LABEL_WORDS
_LABEL_ROW_BYTES = LABEL_ROW_WORDS * 8
_SIGN = -(1 << 63)
_ID_MASK = (1 << 32) - 1


# -- reading -------------------------------------------------------------------------------------------------


@inlined
def _skip_labels(cursor: int, end: int, n_blocks: int) -> int:
    """Return the address after the labels; an address beyond `end` if they are invalid or of a block outside the run.

    As in fastavro, the index of a union's branch may count from the end, with -1 for the last branch.
    """
    count, cursor = read_long(cursor, end)
    while count != 0:
        if count < 0:
            count = -count
            _, cursor = read_long(cursor, end)
            if count < 0:
                return end + 1
        while count > 0:
            offset, cursor = read_long(cursor, end)
            if cursor > end or offset < 0 or offset >= n_blocks:
                return end + 1
            for _ in range(3):
                branch, cursor = read_long(cursor, end)
                if branch == 1 or branch == -1:  # not `in`, for which numba builds a tuple
                    _, cursor = read_long(cursor, end)
                elif branch != 0 and branch != -2:
                    return end + 1
            count -= 1
        count, cursor = read_long(cursor, end)
    return cursor


@inlined
def _parse_run(cursor: int, end: int, first: int) -> tuple[int, int, int, int, int, int, int, int, int]:
    """Read one datum; returns its fields, with 0 blocks if the record is left to decode_run.

    The fields: number of blocks, incarnation, generation, start, parent, whether it has one, presence bits, and the
    addresses of the local hashes and of the labels.
    """
    incarnation, cursor = read_long(cursor, end)
    generation, cursor = read_long(cursor, end)
    start, cursor = read_long(cursor, end)
    branch, cursor = read_long(cursor, end)
    n_blocks, parent, has_parent, present, local, labels = 0, 0, 0, 0, 0, 0
    good = True
    if branch == 1 or branch == -1:
        if end - cursor < 8:
            good = False
        else:
            parent, has_parent = signed(load_u64(cursor)), 1
            cursor += 8
    elif branch != 0 and branch != -2:
        good = False
    if start < 0 or (start == 0) == (has_parent == 1):
        good = False
    if good:
        n_bytes, cursor = read_long(cursor, end)
        good = 8 <= n_bytes <= _HASHES_BYTES_MAX and n_bytes & 7 == 0 and n_bytes <= end - cursor
        if good:
            local = cursor
            n_engine_bytes, cursor = read_long(cursor + n_bytes, end)
            good = n_engine_bytes == n_bytes and n_bytes <= end - cursor
        if good:
            n_blocks = n_bytes >> 3
            n_present, cursor = read_long(cursor + n_bytes, end)
            good = 1 <= n_present <= end - cursor
            if good:
                for index in range(n_present):
                    byte = load_byte(cursor + index)
                    if index < 4:
                        present |= byte << (index << 3)
                    elif byte != 0:
                        good = False
                labels = cursor + n_present
    if good:
        good = present != 0 and present >> n_blocks == 0 and _skip_labels(labels, end, n_blocks) == end
    if good:
        name = signed(load_u64(local))
        if has_parent:
            name = signed(chain_step(parent, name))
        good = name == first
    if not good:
        n_blocks = 0
    return n_blocks, incarnation, generation, start, parent, has_parent, present, local, labels


@inlined
def _begins_with(value: int, n_bytes: int, header: int, header_end: int) -> bool:
    return bool(
        n_bytes >= HEADER_BYTES
        and signed(load_u64(value)) == header
        and load_byte(value + 8) | (load_byte(value + 9) << 8) == header_end
    )


@kernel()
def decode_records(
    data: int, n_bytes: int, lengths: int, n_records: int, header: int, header_end: int, table: int
) -> int:
    """Decode records into the columns of a table; returns the number of those that are left to decode_run.

    data: address of keys and values, one after the other, n_bytes in all. lengths: address of two int64 per record, the
    bytes of its key and of its value, -1 for a tombstone. header, header_end: the first eight bytes of every value, and
    the next two. table: that of RunColumns; the holder is not set, and records that are left have no labels.
    """
    presents, offsets = load(table + FOLD_PRESENT * 8), load(table + FOLD_OFFSET * 8)
    locals_, labelled = load(table + FOLD_LOCAL * 8), load(table + FOLD_LABELLED * 8)
    key, data_end = data, data + n_bytes
    n_blocks, n_others = 0, 0
    store(offsets, 0)
    for record in range(n_records):
        row = record << 3
        n_key, n_value = load(lengths + (row << 1)), load(lengths + (row << 1) + 8)
        value = key + n_key
        end = value + max(n_value, 0)
        store(presents + row, OTHER)
        store(labelled + row, 0)
        taken = False
        if n_key == KEY_BYTES and end <= data_end and load_byte(key) == _PREFIX:
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
                elif _begins_with(value, n_value, header, header_end):
                    n_run_blocks, incarnation, generation, _, parent, has_parent, present, local, labels = _parse_run(
                        value + HEADER_BYTES, end, first
                    )
                    if n_run_blocks > 0:
                        # Labels come last: without any, only the end marker of an empty array is left.
                        store(labelled + row, labels - data if labels + 1 != end else 0)
                        copy_words(locals_ + (n_blocks << 3), local, n_run_blocks)
                        store(load(table + FOLD_PARENT * 8) + row, parent)
                        store(load(table + FOLD_HAS_PARENT * 8) + row, has_parent)
                        store(presents + row, present)
                        store(load(table + FOLD_INCARNATION * 8) + row, incarnation)
                        store(load(table + FOLD_GENERATION * 8) + row, generation)
                        n_blocks += n_run_blocks
                        taken = True
        n_others += not taken
        store(offsets + row + 8, n_blocks)
        key = end
    return n_others


@kernel()
def decode_labels(data: int, n_bytes: int, table: int, first: int, last: int, out: int) -> int:
    """Write the labels of the held blocks of records `first` to `last` - 1; returns the number of rows.

    Skips records that decode_records left. data, table: as in decode_records. out: address of rows of LABEL_ROW_WORDS
    int64: record, sequence hash, layer, expert and group, NO_LABEL for none. The rows are in order of records, and of
    blocks within each. If a block has labels twice, the later ones apply.
    """
    presents, offsets = load(table + FOLD_PRESENT * 8), load(table + FOLD_OFFSET * 8)
    locals_, labelled = load(table + FOLD_LOCAL * 8), load(table + FOLD_LABELLED * 8)
    end = data + n_bytes
    n_rows = 0
    for record in range(first, last):
        row = record << 3
        begin = load(labelled + row)
        if begin == 0:
            continue
        block, block_end = load(offsets + row), load(offsets + row + 8)
        # First a line for each block, with or without labels; then the lines with labels are moved together.
        lines = out + n_rows * _LABEL_ROW_BYTES
        sequence = load(load(table + FOLD_PARENT * 8) + row)
        has_sequence = load(load(table + FOLD_HAS_PARENT * 8) + row)
        for offset in range(block_end - block):
            local = load(locals_ + ((block + offset) << 3))
            sequence = signed(chain_step(sequence, local)) if has_sequence else local
            has_sequence = 1
            store(lines + offset * _LABEL_ROW_BYTES, 0)
            store(lines + offset * _LABEL_ROW_BYTES + 8, sequence)
        count, cursor = read_long(data + begin, end)
        while count != 0:
            if count < 0:
                count = -count
                _, cursor = read_long(cursor, end)
            while count > 0:
                offset, cursor = read_long(cursor, end)
                line = lines + offset * _LABEL_ROW_BYTES
                store(line, 1)
                for word in range(layout.LABEL_WORDS):
                    branch, cursor = read_long(cursor, end)
                    label = layout.NO_LABEL
                    if branch == 1 or branch == -1:
                        label, cursor = read_long(cursor, end)
                    store(line + 16 + (word << 3), label)
                count -= 1
            count, cursor = read_long(cursor, end)
        present = load(presents + row)
        for offset in range(block_end - block):
            line = lines + offset * _LABEL_ROW_BYTES
            if load(line) and present >> offset & 1:
                into = out + n_rows * _LABEL_ROW_BYTES
                copy_words(into, line, LABEL_ROW_WORDS)
                store(into, record)
                n_rows += 1
    return n_rows


@inlined
def _find_rank(context: int, key: int, n_ranks: int, last: int) -> int:
    """Return the number of a key's rank, -1 for an unknown one. last: that of the key before; -1 for none."""
    worker = signed(swap_bytes(load_u64(key + 1)))
    dp_rank = shift_right(signed(swap_bytes(load_u32(key + 9))), 32)
    ranks = get(context, layout.RANKS)
    if last >= 0:
        words = ranks + last * (layout.RANK_WORDS * 8)
        if load(words + layout.RANK_WORKER * 8) == worker and load(words + layout.RANK_DP * 8) == dp_rank:
            return last
    for rank in range(n_ranks):
        words = ranks + rank * (layout.RANK_WORDS * 8)
        if load(words + layout.RANK_WORKER * 8) == worker and load(words + layout.RANK_DP * 8) == dp_rank:
            return rank
    return -1


@inlined
def _drop_run(context: int, column: int, first: int) -> None:
    """Drop the run that begins with this block, if there is one. No record of it needs to be written."""
    table = get(context, layout.BY_SEQUENCE + layout.MAP_ADDRESS)
    mask = get(context, layout.BY_SEQUENCE + layout.MAP_MASK)
    tag = tag_in(context, column, first)
    position = tag & mask
    entry = load(table + (position << 3))
    while entry != 0:
        slot = (entry & _ID_MASK) - 1
        line = run_at(context, slot >> layout.SLOT_SHIFT)
        # Not the first entry with this block: while rows are read one by one, another run may have it, too.
        if (
            shift_right(entry, 32) == tag
            and slot & layout.OFFSET_MASK == 0
            and load(line + layout.RUN_COLUMN * 8) == column
            and load(line + layout.RUN_FIRST * 8) == first
        ):
            present, held = load(line + layout.RUN_PRESENT * 8), 0
            for offset in range(load(line + layout.RUN_SHAPE * 8) & layout.LENGTH_MASK):
                if (present >> offset) & 1:
                    tag = tag_in(context, column, load(engine_at(context, line, offset)))
                    delete_slot(context, layout.BY_ENGINE, tag, slot + offset)
                    held += 1
            counter = get(context, layout.COLUMNS) + (column * layout.COLUMN_WORDS + layout.COLUMN_HELD) * 8
            store(counter, load(counter) - held)
            free_run(context, slot >> layout.SLOT_SHIFT)
            return
        position = (position + 1) & mask
        entry = load(table + (position << 3))


@kernel()
def drop_records(
    context: int, data: int, lengths: int, n_records: int, n_ranks: int, header: int, header_end: int, newer: int
) -> int:
    """Drop the runs that records replace or delete; returns the number of records of unknown ranks or newer epochs.

    data, lengths: as in decode_records. newer: address of one int64 per record, set to 1 for these records.
    """
    key, rank, n_newer = data, -1, 0
    for record in range(n_records):
        n_key, n_value = load(lengths + (record << 4)), load(lengths + (record << 4) + 8)
        value = key + n_key
        end = value + max(n_value, 0)
        if n_key == KEY_BYTES and load_byte(key) == _PREFIX and load_byte(key + 13) <= _TIER_MAX:
            rank = _find_rank(context, key, n_ranks, rank)
            is_newer = rank < 0
            if rank >= 0:
                _drop_run(context, (rank << 2) | load_byte(key + 13), signed(swap_bytes(load_u64(key + 14))))
                if n_value >= HEADER_BYTES:
                    incarnation, cursor = read_long(value + HEADER_BYTES, end)
                    generation, cursor = read_long(cursor, end)
                    words = get(context, layout.RANKS) + rank * (layout.RANK_WORDS * 8)
                    current = load(words + layout.RANK_INCARNATION * 8)
                    # Incarnations are unsigned.
                    is_newer = cursor <= end and (
                        (incarnation ^ _SIGN) > (current ^ _SIGN)
                        or (incarnation == current and generation > load(words + layout.RANK_GENERATION * 8))
                    )
            if is_newer and n_value >= 0:
                store(newer + (record << 3), 1)
                n_newer += 1
        key = end
    return n_newer


@kernel()
def load_records(
    context: int, data: int, lengths: int, n_records: int, n_ranks: int, header: int, header_end: int, scratch: int
) -> int:
    """Load run records into a store, which has capacity for them; returns the number of records that were not taken.

    data, lengths: as in decode_records, without tombstones. The key length of each record is overwritten: 0 if it was
    taken, 1 if its rank is unknown, 2 if it is left to decode_run. scratch: address of LABEL_WORDS int64.
    """
    key, rank, others = data, -1, 0
    ranks = get(context, layout.RANKS)
    for record in range(n_records):
        entry = lengths + (record << 4)
        n_key, n_value = load(entry), load(entry + 8)
        value = key + n_key
        end = value + n_value
        fate = 2
        if n_key == KEY_BYTES and load_byte(key) == _PREFIX and load_byte(key + 13) <= _TIER_MAX:
            first = signed(swap_bytes(load_u64(key + 14)))
            # Records are in order of their keys, so those of one rank are adjacent.
            rank = _find_rank(context, key, n_ranks, rank)
            if _begins_with(value, n_value, header, header_end):
                n_blocks, incarnation, generation, start, parent, has_parent, present, local, labels = _parse_run(
                    value + HEADER_BYTES, end, first
                )
                if n_blocks > 0 and rank < 0:
                    fate = 1
                elif n_blocks > 0:
                    fate = 0
                    words = ranks + rank * (layout.RANK_WORDS * 8)
                    column = (rank << 2) | load_byte(key + 13)
                    current = load(words + layout.RANK_INCARNATION * 8)
                    # Incarnations are unsigned.
                    if (incarnation ^ _SIGN) < (current ^ _SIGN) or (
                        incarnation == current and generation < load(words + layout.RANK_GENERATION * 8)
                    ):
                        add_stale(context, column, first)
                    else:
                        engines = local + (n_blocks << 3)
                        _, engines = read_long(engines, end)
                        run = adopt_run(
                            context, column, first, start, parent, has_parent, n_blocks, present, local, engines
                        )
                        line = run_at(context, run)
                        count, labels = read_long(labels, end)
                        while count != 0:
                            if count < 0:
                                count = -count
                                _, labels = read_long(labels, end)
                            while count > 0:
                                offset, labels = read_long(labels, end)
                                for word in range(layout.LABEL_WORDS):
                                    branch, labels = read_long(labels, end)
                                    label = layout.NO_LABEL
                                    if branch == 1 or branch == -1:
                                        label, labels = read_long(labels, end)
                                    store(scratch + (word << 3), label)
                                set_labels(context, line, offset, 1, scratch)
                                count -= 1
                            count, labels = read_long(labels, end)
        others += fate != 0
        store(entry, fate)
        key = end
    return others


# -- writing -------------------------------------------------------------------------------------------------


@inlined
def _write_key(context: int, cursor: int, column: int, first: int) -> int:
    """Write a key; returns the address after it."""
    words = get(context, layout.RANKS) + (column >> 2) * (layout.RANK_WORDS * 8)
    store_byte(cursor, _PREFIX)
    store_u64(cursor + 1, swap_bytes(load(words + layout.RANK_WORKER * 8)))
    store_u64(cursor + 9, swap_bytes(load(words + layout.RANK_DP * 8) << 32))
    store_byte(cursor + 13, column & 3)
    store_u64(cursor + 14, swap_bytes(first))
    return cursor + KEY_BYTES


@inlined
def _write_hashes(cursor: int, hashes: int, n_blocks: int) -> int:
    cursor = write_long(cursor, n_blocks << 3)
    copy_words(cursor, hashes, n_blocks)
    return cursor + (n_blocks << 3)


@inlined
def _write_labels(context: int, cursor: int, line: int) -> int:
    labelled = load(line + layout.RUN_LABELLED * 8)
    if labelled:
        count, left = 0, labelled
        while left:
            left &= left - 1
            count += 1
        cursor = write_long(cursor, count)
        labels = get(context, layout.SPANS) + ((load(line + layout.RUN_LABELS * 8) - 1) << 3)
        while labelled:
            offset = trailing_zeros(labelled)
            labelled &= labelled - 1
            cursor = write_long(cursor, offset)
            for word in range(layout.LABEL_WORDS):
                label = load(labels + ((offset * layout.LABEL_WORDS + word) << 3))
                cursor = write_long(cursor, 0) if label == layout.NO_LABEL else write_long(write_long(cursor, 1), label)
    return write_long(cursor, 0)


@kernel()
def encode_dirty(
    context: int, begin: int, out: int, n_bytes: int, ends: int, n_records: int, header: int, header_end: int
) -> int:
    """Write records of changed runs, from entry `begin` of DIRTY on; returns the entry to continue from.

    out: address of n_bytes. ends: address of n_records + 1 int64: the number of records written, then the end of each,
    in bytes from `out`.
    """
    cursor, written = out, 0
    while begin < get(context, layout.N_DIRTY) and written < n_records and cursor - out + RECORD_BYTES_MAX <= n_bytes:
        run = load(get(context, layout.DIRTY) + (begin << 3))
        begin += 1
        line = run_at(context, run)
        shape = load(line + layout.RUN_SHAPE * 8)
        if shape & layout.IS_DIRTY == 0:
            continue  # it ended, or was written under an earlier entry
        store(line + layout.RUN_SHAPE * 8, shape & ~layout.IS_DIRTY)
        column, n_blocks = load(line + layout.RUN_COLUMN * 8), shape & layout.LENGTH_MASK
        words = get(context, layout.RANKS) + (column >> 2) * (layout.RANK_WORDS * 8)
        cursor = _write_key(context, cursor, column, load(line + layout.RUN_FIRST * 8))
        store_u64(cursor, header)
        store_byte(cursor + 8, header_end)
        store_byte(cursor + 9, header_end >> 8)
        cursor = write_long(cursor + HEADER_BYTES, load(words + layout.RANK_INCARNATION * 8))
        cursor = write_long(cursor, load(words + layout.RANK_GENERATION * 8))
        cursor = write_long(cursor, load(line + layout.RUN_START * 8))
        if shape & layout.HAS_PARENT:
            cursor = write_long(cursor, 1)
            store_u64(cursor, load(line + layout.RUN_PARENT * 8))
            cursor += 8
        else:
            cursor = write_long(cursor, 0)
        hashes = locals_at(context, line)
        cursor = _write_hashes(cursor, hashes, n_blocks)
        cursor = _write_hashes(cursor, hashes + (capacity_of(line) << 3), n_blocks)
        n_present = (n_blocks + 7) >> 3
        cursor = write_long(cursor, n_present)
        for index in range(n_present):
            store_byte(cursor + index, load(line + layout.RUN_PRESENT * 8) >> (index << 3))
        cursor = _write_labels(context, cursor + n_present, line)
        written += 1
        store(ends + (written << 3), cursor - out)
    store(ends, written)
    if begin >= get(context, layout.N_DIRTY):
        begin = 0
        put(context, layout.N_DIRTY, 0)
    return begin


@kernel()
def encode_emptied(context: int, begin: int, out: int, n_keys: int) -> int:
    """Write keys of runs that ended, from entry `begin` of EMPTIED on; returns how many."""
    n_keys = min(n_keys, get(context, layout.N_EMPTIED) - begin)
    for index in range(n_keys):
        entry = get(context, layout.EMPTIED) + ((begin + index) << 4)
        out = _write_key(context, out, load(entry), load(entry + 8))
    return n_keys


@kernel()
def encode_stale(context: int, out: int, n_keys: int) -> int:
    """Write keys of ended epochs, whose tombstones are then no longer pending; returns how many."""
    written = 0
    while written < n_keys:
        entry = next_stale(context)
        if entry == 0:
            break
        out = _write_key(context, out, load(entry), load(entry + 8))
        put(context, layout.STALE_BEGIN, get(context, layout.STALE_BEGIN) + 1)
        written += 1
    return written

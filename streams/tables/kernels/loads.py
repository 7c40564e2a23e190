"""Reading records of `router-loads`, in one pass over their bytes: one that adds a booking, or many of any kind.

What lives here: where each field of such a record is, and the numbers in it. What must not: Python objects, and the
meaning of the fields (load_records, which has the same in Python).
"""

from __future__ import annotations

from typing import Any

from numba import int64, typeof, types

from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import address_of, shift_right
from streams.core.loads.kernels.layout import (
    ADD,
    CHAIN_MAX,
    FIELD_AT_MS,
    FIELD_BLOCKS,
    FIELD_CHAIN,
    FIELD_CLOCK,
    FIELD_COUNTER,
    FIELD_DP_RANK,
    FIELD_EXPECTED,
    FIELD_HEAD,
    FIELD_HEAD_BYTES,
    FIELD_KIND,
    FIELD_MODEL,
    FIELD_MODEL_BYTES,
    FIELD_OUTPUT,
    FIELD_OVERLAP,
    FIELD_PREFILL,
    FIELD_REQUEST,
    FIELD_REQUEST_AT,
    FIELD_REQUEST_BLOCKS,
    FIELD_REQUEST_BYTES,
    FIELD_ROUTER,
    FIELD_ROUTER_BYTES,
    FIELD_WORKER,
    FREE,
    ID_BYTES_MAX,
    ID_BYTES_MIN,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    OTHER,
    PREFILL,
    TICK,
)
from streams.tables.kernels.avro import HEADER_BYTES

#: Numbers that `read_add` returns.
N_FIELDS = 22

_HASH_BYTES = 8
_PRESENT = 2
_DP_RANK_MAX = (1 << 31) - 1

#: A long of up to 63 bits takes nine groups of seven; the tenth one has the bit that is left.
_LAST_SHIFT = 63


#: Phases as they are encoded: zigzag numbers of `add`, `prefill` and `free`.
_PREFILL_BYTE = 2
_FREE_BYTE = 4

_ASCII_MAX = 127

# In these functions `raw` is bytes or uint8[n], and a record ends before `end`.


@inlined
def _read(raw: Any, at: int, end: int) -> tuple[int, int]:
    """Return an Avro long and where the next field begins; the end and one more if there is none."""
    value, shift = 0, 0
    while at < end and shift <= _LAST_SHIFT:
        byte = int64(raw[at])
        at += 1
        if shift == _LAST_SHIFT and byte > 1:
            break  # more than 64 bits
        value |= (byte & 127) << shift
        if byte < 128:
            return int64(shift_right(value, 1) ^ -(value & 1)), at
        shift += 7
    return -1, end + 1


@inlined
def _read_length(raw: Any, at: int, end: int) -> tuple[int, int]:
    """Return where a text or bytes begin and end; what does not fit ends one byte after the end, as in `_read`."""
    length, at = _read(raw, at, end)
    if at > end or length < 0 or length > end - at:
        return end + 1, end + 1
    return at, at + length


@inlined
def _find_fields(raw: Any, begin: int, end: int) -> tuple[int, ...]:
    """What `read_add` returns for the record whose header ends at `begin`."""
    none = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    request, request_end = _read_length(raw, begin, end)
    router, router_end = _read_length(raw, request_end, end)
    counter, head_end = _read(raw, router_end, end)
    if head_end >= end or raw[head_end] != 0 or counter < 0:
        return none
    _, at = _read(raw, head_end + 1, end)  # when it was written
    if at >= end or raw[at] != _PRESENT:
        return none
    worker_id, at = _read(raw, at + 1, end)
    dp_rank, at = _read(raw, at, end)
    model, model_end = _read_length(raw, at, end)
    prefill, at = _read(raw, model_end, end)
    request_blocks, at = _read(raw, at, end)
    overlap, at = _read(raw, at, end)
    sequence, sequence_end = _read_length(raw, at, end)
    if sequence_end >= end or (sequence_end - sequence) % _HASH_BYTES != 0:
        return none
    if dp_rank < 0 or dp_rank > _DP_RANK_MAX or min(prefill, request_blocks, overlap) < 0:
        return none
    if max(prefill, request_blocks, overlap) > NUMBER_MAX:
        return none
    if max(request_end - request, router_end - router, model_end - model) > NAME_BYTES_MAX:
        return none
    expected, at = -1, sequence_end + 1
    if raw[sequence_end] == _PRESENT:
        expected, at = _read(raw, at, end)
        if expected < 0 or expected > NUMBER_MAX:
            return none
    elif raw[sequence_end] != 0:
        return none
    output, at = _read(raw, at, end)
    if at >= end or output < 0 or output > NUMBER_MAX:
        return none
    phase = 0
    if raw[at] == _PRESENT and at + 1 < end and (raw[at + 1] == 0 or raw[at + 1] == _PRESENT):
        phase, at = 1 + (int64(raw[at + 1]) >> 1), at + 2
    elif raw[at] == 0:
        at += 1
    else:
        return none
    prefill_us, at = _read(raw, at, end)
    prefilled_within_ms, at = _read(raw, at, end)
    over_within_ms, at = _read(raw, at, end)
    load_us, at = _read(raw, at, end)
    if at != end or min(prefill_us, prefilled_within_ms, over_within_ms, load_us) < 0:
        return none
    if max(prefill_us, prefilled_within_ms, over_within_ms, load_us) > NUMBER_MAX:
        return none
    return (
        request, request_end, router, router_end, counter, head_end,
        worker_id, dp_rank, model, model_end, prefill, request_blocks, overlap, sequence, sequence_end,
        expected, output, phase, prefill_us, prefilled_within_ms, over_within_ms, load_us,
    )  # fmt: skip


# It keeps the GIL: it takes a fifth of a microsecond, and asking for the GIL again can take milliseconds.
@kernel(types.UniTuple(int64, N_FIELDS)(typeof(b"")), nogil=False)
def read_add(raw: bytes) -> tuple[int, ...]:
    """Find the fields of an add. The first number is 0 if the record has any other form.

    raw: a record with the header of the current schema. Returns, in this order: begin and end of the request id; of the
    router id; the counter; where the phase begins; worker id as a signed long; dp_rank; begin and end of the model;
    prefill tokens; request blocks; overlap blocks; begin and end of the packed hashes; expected output tokens, -1 if
    they are absent; output blocks; the request's phase (0 none, 1 prefill, 2 decode); and the forecast's four numbers.
    """
    return _find_fields(raw, HEADER_BYTES, len(raw))


@inlined
def _is_plain(raw: Any, begin: int, end: int) -> bool:
    """Whether an id has a length that kernels digest, and is ASCII."""
    if end - begin < ID_BYTES_MIN or end - begin > ID_BYTES_MAX:
        return False
    return _is_ascii(raw, begin, end)


@inlined
def _is_ascii(raw: Any, begin: int, end: int) -> bool:
    found = 0
    for at in range(begin, end):
        found |= int64(raw[at])
    return found <= _ASCII_MAX


@inlined
def _is_same(raw: Any, begin: int, end: int, name: bytes) -> bool:
    if end - begin != len(name):
        return False
    is_same = True
    for at in range(len(name)):
        if raw[begin + at] != name[at]:
            is_same = False
    return is_same


@inlined
def _phase_alone(raw: Any, at: int, end: int) -> int:
    """The kind of a record without a booking, by the bytes after its ids."""
    if at >= end or (raw[at] != _PREFILL_BYTE and raw[at] != _FREE_BYTE):
        return OTHER
    _, after = _read(raw, at + 1, end)  # when it was written
    if after != end - 1 or raw[after] != 0:
        return OTHER
    return PREFILL if raw[at] == _PREFILL_BYTE else FREE


_PLACES = types.Array(int64, 2, "C", readonly=True)
_FIELDS = types.Array(int64, 2, "C")


# It keeps the GIL, as `read_add` does: 64 records take 30 us.
@kernel(
    types.void(types.Array(types.uint8, 1, "C", readonly=True), typeof(b""), typeof(b""), _PLACES, _FIELDS), nogil=False
)
def read_records(raw: Any, header: bytes, own_router: bytes, places: Any, fields: Any) -> None:
    """Find the fields of many records, as core.loads folds them; see its kernels' `layout` for the columns.

    raw: uint8[n_bytes], the records. header: with which each begins. own_router: whose records get the kind OTHER.
    places: int64[n, 4 or more], where a record begins and ends (-1: it has no content), its append time, and its
    partition. fields: int64[n, FIELD_WORDS], which is written. A record of another form than routers write has the kind
    OTHER, and so has one with a forecast or of one part of a request.
    """
    start = address_of(raw)
    for nth in range(len(places)):
        begin, end = places[nth, 0], places[nth, 1]
        row = fields[nth]
        row[FIELD_AT_MS], row[FIELD_CLOCK] = places[nth, 2], places[nth, 3]
        row[FIELD_KIND] = OTHER
        if end < 0:
            row[FIELD_KIND] = TICK
            continue
        if end - begin <= HEADER_BYTES:
            continue
        is_current = True
        for at in range(HEADER_BYTES):
            if raw[begin + at] != header[at]:
                is_current = False
        if not is_current:
            continue
        head = begin + HEADER_BYTES
        request, request_end = _read_length(raw, head, end)
        router, router_end = _read_length(raw, request_end, end)
        counter, head_end = _read(raw, router_end, end)
        if head_end >= end or counter < 0:
            continue
        if not _is_plain(raw, request, request_end) or not _is_plain(raw, router, router_end):
            continue
        if _is_same(raw, router, router_end, own_router):
            continue
        row[FIELD_HEAD], row[FIELD_HEAD_BYTES] = start + head, head_end - head
        row[FIELD_REQUEST], row[FIELD_REQUEST_BYTES] = start + request, request_end - request
        row[FIELD_REQUEST_AT] = request
        row[FIELD_ROUTER], row[FIELD_ROUTER_BYTES] = start + router, router_end - router
        row[FIELD_COUNTER] = counter
        if raw[head_end] != 0:
            row[FIELD_KIND] = _phase_alone(raw, head_end, end)
            continue
        (
            found, _, _, _, _, _,
            worker_id, dp_rank, model, model_end, prefill, request_blocks, overlap, sequence, sequence_end,
            expected, output, phase, prefill_us, prefilled_within_ms, over_within_ms, load_us,
        ) = _find_fields(raw, head, end)  # fmt: skip
        n_blocks = (sequence_end - sequence) // _HASH_BYTES
        if found == 0 or phase != 0 or n_blocks > CHAIN_MAX or not _is_ascii(raw, model, model_end):
            continue
        if prefill_us | prefilled_within_ms | over_within_ms | load_us:
            continue
        row[FIELD_WORKER], row[FIELD_DP_RANK] = worker_id, dp_rank
        row[FIELD_MODEL], row[FIELD_MODEL_BYTES] = start + model, model_end - model
        row[FIELD_PREFILL], row[FIELD_REQUEST_BLOCKS], row[FIELD_OVERLAP] = prefill, request_blocks, overlap
        row[FIELD_CHAIN], row[FIELD_BLOCKS] = start + sequence, n_blocks
        row[FIELD_EXPECTED], row[FIELD_OUTPUT] = expected, output
        row[FIELD_KIND] = ADD

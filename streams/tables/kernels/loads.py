"""Reading a record of `router-loads` that adds a booking, in one pass over its bytes.

What lives here: where each field of such a record is, and the numbers in it. What must not: Python objects, and the
meaning of the fields (load_records, which has the same in Python).
"""

from __future__ import annotations

from numba import int64, typeof, types

from streams.core.kernels.compiling import inlined, kernel
from streams.core.kernels.memory import shift_right
from streams.tables.kernels.avro import HEADER_BYTES

#: Numbers that `read_add` returns.
N_FIELDS = 22

_HASH_BYTES = 8
_PRESENT = 2
_DP_RANK_MAX = (1 << 31) - 1

#: A long of up to 63 bits takes nine groups of seven; the tenth one has the bit that is left.
_LAST_SHIFT = 63


@inlined
def _read(raw: bytes, at: int) -> tuple[int, int]:
    """Return an Avro long and where the next field begins; the end and one more if there is none."""
    end = len(raw)
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
def _read_length(raw: bytes, at: int) -> tuple[int, int]:
    """Return where a text or bytes begin and end; what does not fit ends one byte after the end, as in `_read`."""
    length, at = _read(raw, at)
    end = len(raw)
    if at > end or length < 0 or length > end - at:
        return end + 1, end + 1
    return at, at + length


# It keeps the GIL: it takes a fifth of a microsecond, and asking for the GIL again can take milliseconds.
@kernel(types.UniTuple(int64, N_FIELDS)(typeof(b"")), nogil=False)
def read_add(raw: bytes) -> tuple[int, ...]:
    """Find the fields of an add. The first number is 0 if the record has any other form.

    raw: a record with the header of the current schema. Returns, in this order: begin and end of the request id; of the
    router id; the counter; where the phase begins; worker id as a signed long; dp_rank; begin and end of the model;
    prefill tokens; request blocks; overlap blocks; begin and end of the packed hashes; expected output tokens, -1 if
    they are absent; output blocks; the request's phase (0 none, 1 prefill, 2 decode); and the forecast's four numbers.
    """
    none = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    n_bytes = len(raw)
    request, request_end = _read_length(raw, HEADER_BYTES)
    router, router_end = _read_length(raw, request_end)
    counter, head_end = _read(raw, router_end)
    if head_end >= n_bytes or raw[head_end] != 0 or counter < 0:
        return none
    _, at = _read(raw, head_end + 1)  # when it was written
    if at >= n_bytes or raw[at] != _PRESENT:
        return none
    worker_id, at = _read(raw, at + 1)
    dp_rank, at = _read(raw, at)
    model, model_end = _read_length(raw, at)
    prefill, at = _read(raw, model_end)
    request_blocks, at = _read(raw, at)
    overlap, at = _read(raw, at)
    sequence, sequence_end = _read_length(raw, at)
    if sequence_end >= n_bytes or (sequence_end - sequence) % _HASH_BYTES != 0:
        return none
    if dp_rank < 0 or dp_rank > _DP_RANK_MAX or min(prefill, request_blocks, overlap) < 0:
        return none
    expected, at = -1, sequence_end + 1
    if raw[sequence_end] == _PRESENT:
        expected, at = _read(raw, at)
        if expected < 0:
            return none
    elif raw[sequence_end] != 0:
        return none
    output, at = _read(raw, at)
    if at >= n_bytes or output < 0:
        return none
    phase = 0
    if raw[at] == _PRESENT and at + 1 < n_bytes and (raw[at + 1] == 0 or raw[at + 1] == _PRESENT):
        phase, at = 1 + (int64(raw[at + 1]) >> 1), at + 2
    elif raw[at] == 0:
        at += 1
    else:
        return none
    prefill_us, at = _read(raw, at)
    prefilled_within_ms, at = _read(raw, at)
    over_within_ms, at = _read(raw, at)
    load_us, at = _read(raw, at)
    if at != n_bytes or min(prefill_us, prefilled_within_ms, over_within_ms, load_us) < 0:
        return none
    return (
        request, request_end, router, router_end, counter, head_end,
        worker_id, dp_rank, model, model_end, prefill, request_blocks, overlap, sequence, sequence_end,
        expected, output, phase, prefill_us, prefilled_within_ms, over_within_ms, load_us,
    )  # fmt: skip

"""Records of `router-loads` in bytes, as fast as a router needs them.

What lives here: keys, values, and the partition of a request. What must not: the meaning of a booking (core.loads), and
Kafka. `codec` converts the same records with fastavro, which takes two to seven times as long. What is written here has
the same bytes, and a record of any other form is left to `codec`; tests compare both.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import fastavro

from streams.codec import codec, decode_load, encode_load, from_long, load_key, to_long
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import Booking, BookingId, BookingPhase

#: A datum of router-loads begins with this header; then come request id, router id and counter, which are the same in
#: all records of one booking.
_CODEC = codec("router-loads")
_HEADER = _CODEC.header
_HEADER_BYTES = len(_HEADER)

#: After them, a record without a booking has one byte for its phase, six for its time, and one for the absent booking.
_TIME_BYTES = 6
_TAIL_BYTES = 1 + _TIME_BYTES + 1

_PHASE_BYTES: Mapping[BookingPhase, bytes] = MappingProxyType(
    {BookingPhase.ADD: b"\x00", BookingPhase.PREFILL: b"\x02", BookingPhase.FREE: b"\x04"}
)
_PHASE_OF_BYTE: Mapping[int, BookingPhase] = MappingProxyType({2: BookingPhase.PREFILL, 4: BookingPhase.FREE})
_REQUEST_PHASES: Mapping[str | None, bytes] = MappingProxyType(
    {None: b"\x00", "prefill": b"\x02\x00", "decode": b"\x02\x02"}
)

#: Bookings whose leading bytes a decoder keeps, so that it recognises their next records; about 400 bytes each. A
#: booking is removed when its free is read. Beyond the limit the oldest one is removed.
BOOKINGS_KEPT_MAX = 100_000

_SHORT = tuple(bytes([number]) for number in range(128))
_I63 = 1 << 63
_I32 = 1 << 31


def request_partition(request_id: str, n_partitions: int) -> int:
    """Partition of all records of a request: CRC-32 of its id. The hash of other topics, in Python, takes 5 us."""
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) % n_partitions


def encoded_load(booking_id: BookingId, phase: BookingPhase, booking: Booking | None, written_at_ms: int) -> bytes:
    """Encode the value of a record; raises KvStreamsError for what does not fit the schema. Its key is `load_key`."""
    try:
        head = _head(booking_id)
        if booking is None:
            return b"".join((head, _PHASE_BYTES[phase], _long(written_at_ms), b"\x00"))
        model, expected = booking.model.encode(), booking.expected_output_tokens
        return b"".join(
            (
                head,
                _PHASE_BYTES[phase],
                _long(written_at_ms),
                b"\x02",
                _long(to_long(booking.rank.worker_id)),
                _long(booking.rank.dp_rank),
                _long(len(model)),
                model,
                _long(booking.prefill_tokens),
                _long(booking.request_blocks),
                _long(booking.overlap_blocks),
                _long(len(booking.sequence)),
                booking.sequence,
                b"\x00" if expected is None else b"\x02" + _long(expected),
                _long(booking.output_blocks),
                _REQUEST_PHASES[booking.phase],
            )
        )
    except (ValueError, KeyError):  # the slow way says what is wrong
        return encode_load(booking_id, phase, booking, written_at_ms)[1]


class LoadDecoder:
    """Decodes the records of other routers. Not thread-safe."""

    def __init__(self) -> None:
        self._bookings: dict[bytes, BookingId] = {}  # by the leading bytes of their records

    def decode(self, raw: bytes) -> tuple[BookingId, BookingPhase, Booking | None]:
        """Decode a value; raises BadRecord."""
        booking_id = self._bookings.get(raw[:-_TAIL_BYTES])
        if booking_id is not None:
            phase = _PHASE_OF_BYTE.get(raw[-_TAIL_BYTES])
            if phase is not None and raw[-1] == 0 and _is_time(raw[-1 - _TIME_BYTES : -1]):
                if phase is BookingPhase.FREE:
                    del self._bookings[raw[:-_TAIL_BYTES]]
                return booking_id, phase, None
        decoded = _decode_add(raw)
        if decoded is None:
            return decode_load(raw)
        self._keep(decoded[0], raw)
        return decoded[0], BookingPhase.ADD, decoded[1]

    def _keep(self, booking_id: BookingId, raw: bytes) -> None:
        head = _head(booking_id)
        if raw.startswith(head):  # otherwise its writer encodes numbers in another way
            if len(self._bookings) >= BOOKINGS_KEPT_MAX:
                del self._bookings[next(iter(self._bookings))]
            self._bookings[head] = booking_id


def _decode_add(raw: bytes) -> tuple[BookingId, Booking] | None:
    """Decode a good add of the current schema; None for any other record."""
    if raw[:_HEADER_BYTES] != _HEADER:
        return None
    stream = io.BytesIO(raw)
    stream.seek(_HEADER_BYTES)
    try:
        datum: Any = fastavro.schemaless_reader(stream, _CODEC.schema, None)
    except Exception:  # fastavro passes on any exception of its C code; codec says what is wrong
        return None
    found = datum["booking"]
    if found is None or datum["phase"] != "add" or stream.tell() != len(raw):
        return None
    worker_id, dp_rank, model, prefill, request_blocks, overlap, sequence, expected, output, phase = found.values()
    if min(prefill, request_blocks, overlap, output) < 0 or not 0 <= dp_rank < _I32 or len(sequence) % 8:
        return None
    return BookingId(datum["request_id"], datum["router_id"], datum["counter"]), Booking(
        RankId(WorkerId(from_long(worker_id)), DpRank(dp_rank)),
        model,
        prefill,
        sequence,
        overlap,
        request_blocks,
        expected,
        output,
        phase,
    )


def _head(booking_id: BookingId) -> bytes:
    request_id, router_id = booking_id.request_id.encode(), booking_id.router_id.encode()
    return b"".join(
        (_HEADER, _long(len(request_id)), request_id, _long(len(router_id)), router_id, _long(booking_id.counter))
    )


def _is_time(raw: bytes) -> bool:
    """Whether these bytes are one Avro long: all but the last have their highest bit set."""
    return raw[-1] < 0x80 and min(raw[:-1]) >= 0x80


def _long(number: int) -> bytes:
    """An Avro long: zigzag, then seven bits per byte, the lowest first. Raises ValueError if it has over 64 bits."""
    if 0 <= number < 64:
        return _SHORT[number << 1]
    if not -_I63 <= number < _I63:
        raise ValueError(number)
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left >= 0x80:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


__all__ = ["BOOKINGS_KEPT_MAX", "LoadDecoder", "encoded_load", "load_key", "request_partition"]

"""Records of `router-loads` as a router writes them: their bytes, and the partition of a request.

What lives here: encoding. What must not: the meaning of a booking (core.loads), reading records (codec), and Kafka.
`codec` writes the same bytes with fastavro, which takes ten times as long; every booking of a router is two records.
Tests compare both.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from types import MappingProxyType

from streams.core.ids import RankId
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.loads.observations import NO_FORECAST
from streams.kafka.avro_frames import codec
from streams.kafka.avro_numbers import encoded_long
from streams.kafka.records import encode_load, load_key
from streams.kafka.shapes import to_long

#: A datum of router-loads begins with this header; then come request id, router id and counter, which are the same in
#: all records of one booking.
_CODEC = codec("router-loads")
_HEADER = _CODEC.header

_PHASE_BYTES: Mapping[BookingPhase, bytes] = MappingProxyType(
    {BookingPhase.ADD: b"\x00", BookingPhase.PREFILL: b"\x02", BookingPhase.FREE: b"\x04"}
)
_REQUEST_PHASES: Mapping[str | None, bytes] = MappingProxyType(
    {None: b"\x00", "prefill": b"\x02\x00", "decode": b"\x02\x02"}
)
_NO_FORECAST_BYTES = bytes(len(NO_FORECAST))

#: Ranks whose bytes are kept.
_RANKS_KEPT_MAX = 4096


def request_partition(request_id: str, n_partitions: int) -> int:
    """Partition of all records of a request: CRC-32 of its id. The hash of other topics, in Python, takes 5 us."""
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) % n_partitions


def encoded_load(booking_id: BookingId, phase: BookingPhase, booking: Booking | None, written_at_ms: int) -> bytes:
    """Encode the value of a record; raises KvStreamsError for what does not fit the schema. Its key is `load_key`."""
    try:
        head = _head(booking_id)
        if booking is None:
            return b"".join((head, _PHASE_BYTES[phase], _time(written_at_ms), b"\x00"))
        model, expected = booking.model.encode(), booking.expected_output_tokens
        return b"".join(
            (
                head,
                _PHASE_BYTES[phase],
                _time(written_at_ms),
                b"\x02",
                _rank(booking.rank),
                encoded_long(len(model)),
                model,
                encoded_long(booking.prefill_tokens),
                encoded_long(booking.request_blocks),
                encoded_long(booking.overlap_blocks),
                encoded_long(len(booking.sequence)),
                booking.sequence,
                b"\x00" if expected is None else b"\x02" + encoded_long(expected),
                encoded_long(booking.output_blocks),
                _REQUEST_PHASES[booking.phase],
                _NO_FORECAST_BYTES
                if booking.forecast is NO_FORECAST
                else b"".join(map(encoded_long, booking.forecast)),
            )
        )
    except (ValueError, KeyError):  # the slow way says what is wrong
        return encode_load(booking_id, phase, booking, written_at_ms)[1]


def time_written_ms(raw: bytes) -> int:
    """When the value of a record was written, which no other reader needs; raises BadRecord."""
    return int(_CODEC.decode(raw)["written_at_ms"])


def is_end_without_report(raw: bytes) -> bool:
    """Whether a record without a booking has the time 0: its router ended the booking, and no client reported that.

    No other value ends with these two bytes: the second is that of a null, and a number ends with a zero only if it is
    one.
    """
    return raw.endswith(b"\0\0")


def _head(booking_id: BookingId) -> bytes:
    request_id = booking_id.request_id.encode()
    return b"".join(
        (
            _HEADER,
            encoded_long(len(request_id)),
            request_id,
            _text(booking_id.router_id),
            encoded_long(booking_id.counter),
        )
    )


@functools.lru_cache(maxsize=1)
def _text(router_id: str) -> bytes:
    """All records that a router encodes have its id."""
    raw = router_id.encode()
    return encoded_long(len(raw)) + raw


@functools.lru_cache(maxsize=_RANKS_KEPT_MAX)
def _rank(rank: RankId) -> bytes:
    """A fleet has few ranks, and worker ids may be numbers of 64 bits."""
    return encoded_long(to_long(rank.worker_id)) + encoded_long(rank.dp_rank)


@functools.lru_cache(maxsize=1)
def _time(written_at_ms: int) -> bytes:
    """Records that are encoded together were mostly written within a few milliseconds."""
    return encoded_long(written_at_ms)


__all__ = ["encoded_load", "is_end_without_report", "load_key", "request_partition", "time_written_ms"]

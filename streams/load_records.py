"""Records of `router-loads` in bytes, as fast as a router needs them.

What lives here: keys, values, and the partition of a request. What must not: the meaning of a booking (core.loads), and
Kafka. `codec` converts the same records with fastavro, which takes two to seven times as long. What is written here has
the same bytes, and a record of any other form is left to `codec`; tests compare both.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from streams.avro_frames import codec
from streams.avro_numbers import encoded_long
from streams.codec import decode_load, encode_load, load_key
from streams.core.ids import DpRank, Int64Array, RankId, WorkerId
from streams.core.kernels.available import kernels_available
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.loads.kernels.layout import (
    ADD,
    FIELD_COUNTER,
    FIELD_KIND,
    FIELD_REQUEST,
    FIELD_REQUEST_AT,
    FIELD_REQUEST_BYTES,
    FIELD_ROUTER,
    FIELD_ROUTER_BYTES,
    FIELD_WORDS,
    FREE,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    PREFILL,
)
from streams.core.loads.observations import NO_FORECAST, Forecast
from streams.load_batches import PARTITION, LoadBatch
from streams.shapes import from_long, to_long

_HAS_KERNEL = kernels_available()
if _HAS_KERNEL:
    from streams.tables.kernels.loads import read_add, read_records

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

#: Different values of one kind that a decoder keeps: times of writing, ranks, and names. Beyond the limit, all of them
#: are dropped. A name that is longer than this is not kept.
_SHARED_VALUES_MAX = 4096
_SHARED_TEXT_BYTES_MAX = 256

_REQUEST_PHASES_READ = MappingProxyType({raw: (phase,) for phase, raw in _REQUEST_PHASES.items()})
_NAMING = (ADD, PREFILL, FREE)  # kinds whose fields name a booking
_REQUEST_PHASE_OF_CODE = (None, "prefill", "decode")  # by what the kernel returns

#: The second branch of a union, which is the value that may be absent; and bytes that are a whole number from 0 to 63.
_PRESENT = 2
_ONE_BYTE = frozenset(range(0, 128, 2))
_LONG_BITS_MAX = 63
_HASH_BYTES = 8

_N_FORECAST = len(NO_FORECAST)
_NO_FORECAST_BYTES = bytes(_N_FORECAST)

_new = tuple.__new__
_I32 = 1 << 31


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


class LoadFields(NamedTuple):
    """Many records as numbers, for `ActiveLoads.fold`.

    fields: int64[n, FIELD_WORDS] (core.loads.kernels.layout); the addresses in it are those of `raw`. kinds: its first
    column. clocks: the partitions that occur.
    """

    fields: Int64Array
    kinds: list[int]
    clocks: frozenset[int]
    raw: bytes

    def part(self, n_records: int) -> LoadFields:
        """The first records."""
        return LoadFields(self.fields[:n_records], self.kinds[:n_records], self.clocks, self.raw)

    def request_ids(self) -> list[str]:
        """The request id of each record; "" for those of other kinds."""
        raw = self.raw
        begins, lengths = self.fields[:, FIELD_REQUEST_AT].tolist(), self.fields[:, FIELD_REQUEST_BYTES].tolist()
        return [
            raw[begin : begin + length].decode() if kind in _NAMING else ""
            for kind, begin, length in zip(self.kinds, begins, lengths, strict=True)
        ]

    def booking_id(self, number: int) -> BookingId:
        """What the record names; its kind must be ADD, PREFILL or FREE."""
        row = self.fields[number].tolist()
        request, router = row[FIELD_REQUEST_AT], row[FIELD_REQUEST_AT] + row[FIELD_ROUTER] - row[FIELD_REQUEST]
        return BookingId(
            self.raw[request : request + row[FIELD_REQUEST_BYTES]].decode(),
            self.raw[router : router + row[FIELD_ROUTER_BYTES]].decode(),
            row[FIELD_COUNTER],
        )


def read_fields(batch: LoadBatch, own_router: bytes = b"") -> LoadFields:
    """Find the fields of many records. Needs kernels. own_router: the records of this router get the kind OTHER."""
    fields = np.empty((len(batch), FIELD_WORDS), dtype=np.int64)
    read_records(np.frombuffer(batch.raw, dtype=np.uint8), _HEADER, own_router, batch.places, fields)
    clocks = frozenset(batch.places[:, PARTITION].tolist())
    return LoadFields(fields, fields[:, FIELD_KIND].tolist(), clocks, batch.raw)


class LoadDecoder:
    """Decodes the records of other routers. Not thread-safe."""

    def __init__(self) -> None:
        self._bookings: dict[bytes, BookingId] = {}  # by the leading bytes of their records
        self._tails: dict[bytes, BookingPhase] = {}  # phases by the bytes that follow, if these are valid
        # Values that many bookings have in common, so that one object serves all of them.
        self._ranks: dict[tuple[int, int], RankId] = {}
        self._texts: dict[bytes, str] = {}

    def decode(self, raw: bytes) -> tuple[BookingId, BookingPhase, Booking | None]:
        """Decode a value; raises BadRecord."""
        # Only a record without a booking is looked up by its leading bytes: an add is long, and so takes long to hash.
        if len(raw) > _TAIL_BYTES and raw[-_TAIL_BYTES] in _PHASE_OF_BYTE and raw[-1] == 0:
            phase = self._phase(raw[-_TAIL_BYTES:])
            if phase is not None:
                head = raw[:-_TAIL_BYTES]
                known = self._bookings.get(head) if phase is BookingPhase.PREFILL else self._bookings.pop(head, None)
                if known is not None:
                    return known, phase, None
        try:
            decoded = self._decode_add(raw) if _HAS_KERNEL else _decode_add(raw)
        except (IndexError, UnicodeDecodeError):  # codec says what is wrong
            decoded = None
        if decoded is None:
            return decode_load(raw)
        head, booking_id, booking = decoded
        if len(self._bookings) >= BOOKINGS_KEPT_MAX:
            del self._bookings[next(iter(self._bookings))]
        self._bookings[head] = booking_id
        return booking_id, BookingPhase.ADD, booking

    def _phase(self, tail: bytes) -> BookingPhase | None:
        """The phase of a record without a booking, by the bytes after its booking id. None if they are anything else.

        Records that were written within the same millisecond have the same bytes there.
        """
        phase = self._tails.get(tail)
        if phase is None and _is_time(tail[1 : 1 + _TIME_BYTES]):
            if len(self._tails) >= _SHARED_VALUES_MAX:
                self._tails.clear()
            phase = self._tails[tail] = _PHASE_OF_BYTE[tail[0]]
        return phase

    def _decode_add(self, raw: bytes) -> tuple[bytes, BookingId, Booking] | None:
        """The same as the function `_decode_add`, with a kernel that finds the fields."""
        if not raw.startswith(_HEADER):
            return None
        (
            request, request_end, router, router_end, counter, head_end,
            worker_id, dp_rank, model, model_end, prefill, request_blocks, overlap, sequence, sequence_end,
            expected, output, phase, prefill_us, prefilled_within_ms, over_within_ms, load_us,
        ) = read_add(raw)  # fmt: skip
        if not request:
            return None
        rank = self._ranks.get((worker_id, dp_rank)) or self._rank(worker_id, dp_rank)
        router_id, name = raw[router:router_end], raw[model:model_end]
        forecast = NO_FORECAST
        if prefill_us or prefilled_within_ms or over_within_ms or load_us:
            forecast = Forecast(prefill_us, prefilled_within_ms, over_within_ms, load_us)
        texts = self._texts
        return (
            raw[:head_end],
            # Made without their classes' own constructors, which are Python functions and take twice as long.
            _new(
                BookingId, (raw[request:request_end].decode(), texts.get(router_id) or self._text(router_id), counter)
            ),
            _new(
                Booking,
                (
                    rank,
                    texts.get(name) or self._text(name),
                    prefill,
                    raw[sequence:sequence_end],
                    overlap,
                    request_blocks,
                    None if expected < 0 else expected,
                    output,
                    _REQUEST_PHASE_OF_CODE[phase],
                    forecast,
                ),
            ),
        )

    def _rank(self, worker_id: int, dp_rank: int) -> RankId:
        if len(self._ranks) >= _SHARED_VALUES_MAX:
            self._ranks.clear()
        rank = self._ranks[worker_id, dp_rank] = RankId(WorkerId(from_long(worker_id)), DpRank(dp_rank))
        return rank

    def _text(self, raw: bytes) -> str:
        text = raw.decode()
        if len(raw) <= _SHARED_TEXT_BYTES_MAX:
            if len(self._texts) >= _SHARED_VALUES_MAX:
                self._texts.clear()
            self._texts[raw] = text
        return text


def _decode_add(raw: bytes) -> tuple[bytes, BookingId, Booking] | None:
    """Decode an add as routers write it, without kernels; returns its leading bytes too. None for any other record.

    Numbers that need one byte are read in place, which is most of what makes this faster than fastavro.
    """
    if not raw.startswith(_HEADER):
        return None
    length, at = _read(raw, _HEADER_BYTES)
    request_id, at = raw[at : at + length], at + length
    length, at = _read(raw, at)
    router_id, at = raw[at : at + length], at + length
    counter, at = _read(raw, at)
    head = raw[:at]
    # Phase `add`, then six bytes of time, then the branch of the union that is a booking.
    if raw[at] != 0 or raw[at + 1 + _TIME_BYTES] != _PRESENT or not _is_time(raw[at + 1 : at + 1 + _TIME_BYTES]):
        return None
    worker_id, at = _read(raw, at + 2 + _TIME_BYTES)
    dp_rank, at = (raw[at] >> 1, at + 1) if raw[at] in _ONE_BYTE else _read(raw, at)
    length, at = (raw[at] >> 1, at + 1) if raw[at] in _ONE_BYTE else _read(raw, at)
    model, at = raw[at : at + length], at + length
    prefill, at = _read(raw, at)
    request_blocks, at = _read(raw, at)
    overlap, at = (raw[at] >> 1, at + 1) if raw[at] in _ONE_BYTE else _read(raw, at)
    length, at = _read(raw, at)
    sequence, at = raw[at : at + length], at + length
    expected = None
    if raw[at] == _PRESENT:
        expected, at = _read(raw, at + 1)
    elif raw[at] == 0:
        at += 1
    else:
        return None
    output, at = (raw[at] >> 1, at + 1) if raw[at] in _ONE_BYTE else _read(raw, at)
    # The request's phase, which takes one byte if there is none and two otherwise, and the numbers of the forecast.
    n_phase_bytes = 1 if raw[at] == 0 else 2
    phase = _REQUEST_PHASES_READ.get(raw[at : at + n_phase_bytes])
    at += n_phase_bytes
    forecast = NO_FORECAST
    if raw[at:] != _NO_FORECAST_BYTES:
        times = []
        for _ in range(_N_FORECAST):
            number, at = _read(raw, at)
            times.append(number)
        if at != len(raw):
            return None
        forecast = Forecast(*times)
    # A length beyond the end makes the next number fail; a negative one is refused by `_read`.
    if phase is None or len(sequence) % _HASH_BYTES or dp_rank >= _I32:
        return None
    numbers = (prefill, request_blocks, overlap, output, expected or 0, *forecast)
    if max(numbers) > NUMBER_MAX or max(len(request_id), len(router_id), len(model)) > NAME_BYTES_MAX:
        return None
    return (
        head,
        BookingId(request_id.decode(), router_id.decode(), counter),
        Booking(
            RankId(WorkerId(from_long(worker_id)), DpRank(dp_rank)),
            model.decode(),
            prefill,
            sequence,
            overlap,
            request_blocks,
            expected,
            output,
            phase[0],
            forecast,
        ),
    )


def _read(raw: bytes, at: int) -> tuple[int, int]:
    """Read an Avro long that is not negative; returns it, and where the next field begins.

    Raises IndexError at the end of the record, and for what is left to codec: negative numbers, and those of over 63
    bits.
    """
    byte = raw[at]
    found, shift = byte & 0x7F, 7
    while byte >= 0x80:
        at += 1
        byte = raw[at]
        found |= (byte & 0x7F) << shift
        shift += 7
    if found & 1 or shift > _LONG_BITS_MAX:
        raise IndexError(at)
    return found >> 1, at + 1


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


@functools.lru_cache(maxsize=_SHARED_VALUES_MAX)
def _rank(rank: RankId) -> bytes:
    """A fleet has few ranks, and worker ids may be numbers of 64 bits."""
    return encoded_long(to_long(rank.worker_id)) + encoded_long(rank.dp_rank)


@functools.lru_cache(maxsize=1)
def _time(written_at_ms: int) -> bytes:
    """Records that are encoded together were mostly written within a few milliseconds."""
    return encoded_long(written_at_ms)


def _is_time(raw: bytes) -> bool:
    """Whether these bytes are one Avro long: all but the last have their highest bit set."""
    return raw[-1] < 0x80 and min(raw[:-1]) >= 0x80


__all__ = [
    "BOOKINGS_KEPT_MAX",
    "LoadDecoder",
    "LoadFields",
    "encoded_load",
    "load_key",
    "read_fields",
    "request_partition",
    "time_written_ms",
]

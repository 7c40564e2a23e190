"""This router's own bookings on their way to the log, and back.

What lives here: their records in the outbox, and which of them have not been read back. What must not: loads, other
routers' bookings, and what a call does (loads_sync, whose lock guards this state). A router gets a new id at every
start, which distinguishes its records from those of earlier starts.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from confluent_kafka import Producer

from streams.core.loads.bookings import BOOKINGS_MAX, Booking, BookingId, BookingPhase
from streams.kafka.load_records import encoded_load, load_key, request_partition
from streams.router_api.sharing.outbox import Outbox
from streams.topics import TopicSpec

#: Own records that are kept until they are read back, so that they need not be decoded. Beyond this limit the oldest
#: one is dropped; it is then decoded like any other.
RECORDS_MAX = 20_000

#: About how long a record is, without its hashes.
_RECORD_BYTES = 150


class Content(NamedTuple):
    """What a record of router-loads says."""

    booking_id: BookingId
    phase: BookingPhase
    booking: Booking | None


class _Unsent(NamedTuple):
    """A record that is not encoded yet."""

    content: Content
    written_at_ms: int


class OwnBookings:
    """Owner of the outbox. Times are of a monotonic clock, except those in records."""

    def __init__(
        self, topic: TopicSpec, kafka: Producer, now_ms: Callable[[], int], lock: AbstractContextManager[object]
    ) -> None:
        """lock: the owner's, which the outbox takes."""
        self._topic = topic
        self._kafka = kafka
        self._now_ms = now_ms
        self._lock = lock
        self._outbox: Outbox[_Unsent] = Outbox(kafka, topic.name, now_ms, lambda: lock, self._encode)
        # Records that were sent and not read back yet, by key: values, and what they say.
        self._records: OrderedDict[bytes, tuple[bytes, Content]] = OrderedDict()
        self._counter = 0
        self.begin()

    def begin(self) -> None:
        """The log is read from its beginning. Bookings made until now come back from it, under the former id."""
        self.router_id = uuid.uuid4().hex
        self._records.clear()
        # Bookings that have not been read back, with the times when they were made: active ones, and ended ones.
        self._unlogged: OrderedDict[BookingId, int] = OrderedDict()
        self._ended_unlogged: OrderedDict[BookingId, int] = OrderedDict()
        self._sent: set[BookingId] = set()  # those of the active ones that may be in the log, or whose end must be

    @property
    def outbox(self) -> Outbox[_Unsent]:
        """The records that Kafka has not acknowledged."""
        return self._outbox

    def send_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send records on this loop from now on."""
        self._outbox.send_on(loop)

    def new_id(self, request_id: str) -> BookingId:
        """An id for a booking of this router."""
        self._counter += 1
        return BookingId(request_id, self.router_id, self._counter)

    def note_made(self, booking_id: BookingId) -> None:
        """A booking was made, and its record will be read back."""
        self._unlogged[booking_id] = self._now_ms()

    def must_end_in_log(self, booking_id: BookingId) -> None:
        """Even if this booking ends before it is sent, its end must be in the log."""
        self._sent.add(booking_id)

    def is_unlogged(self, booking_id: BookingId) -> bool:
        """Whether an active booking of this router has not been read back."""
        return booking_id in self._unlogged

    @property
    def unlogged(self) -> list[BookingId]:
        """All of these."""
        return list(self._unlogged)

    def publish(self, content: Content, written_at_ms: int) -> None:
        """Send a record soon. written_at_ms: the time of day that it says."""
        booking_id, phase, booking = content
        self._outbox.put(
            load_key(booking_id, phase),
            _Unsent(content, written_at_ms),
            self._partition_of(booking_id),
            _RECORD_BYTES if booking is None else _RECORD_BYTES + len(booking.sequence),
        )

    def withdraw(self, booking_id: BookingId) -> bool:
        """A booking ends. Returns whether it was not sent yet, as short ones are while Kafka is away.

        No other router needs it then, and the log will never give its end a time. Otherwise its end is to be published.
        """
        since_ms = self._unlogged.pop(booking_id, None)
        if since_ms is None:
            return False
        was_sent = booking_id in self._sent
        self._sent.discard(booking_id)
        # An update of a booking may wait while the booking itself was sent and not read back yet.
        partition = self._partition_of(booking_id)
        if not was_sent and self._outbox.withdraw(load_key(booking_id, BookingPhase.ADD), partition):
            self._outbox.discard(load_key(booking_id, BookingPhase.PREFILL), partition)
            return True
        self._ended_unlogged[booking_id] = since_ms
        return False

    def drop_ended(self) -> BookingId | None:
        """Forget the oldest booking that has ended and was not read back, if there are too many."""
        if len(self._ended_unlogged) <= BOOKINGS_MAX:
            return None
        return self._ended_unlogged.popitem(last=False)[0]

    def take_record(self, key: bytes, value: bytes | None) -> Content | None:
        """What a record says that this router wrote; it is then forgotten. None for any other record."""
        known = self._records.get(key)
        if known is None or known[0] != value:
            return None
        self._records.pop(key, None)  # not `del`: sending may have dropped it in between
        return known[1]

    def note_read(self, booking_id: BookingId) -> None:
        """An add of this booking was read."""
        if self._unlogged.pop(booking_id, None) is not None:
            self._sent.discard(booking_id)
        self._ended_unlogged.pop(booking_id, None)

    def output_coming(self, booking_id: BookingId) -> int:
        """The output blocks of the last add that was sent and not read back; 0 if there is none."""
        known = self._records.get(load_key(booking_id, BookingPhase.ADD))
        return 0 if known is None or known[1].booking is None else known[1].booking.output_blocks

    def reads_back(self, stale_after_ms: int) -> bool:
        """Whether everything that was published longer ago than that has been acknowledged and read back."""
        since_ms = self._now_ms() - stale_after_ms
        if self._unlogged and next(iter(self._unlogged.values())) < since_ms:
            return False
        return self._outbox.oldest_ms() <= stale_after_ms

    def expire(self, now_ms: int, ttl_ms: int) -> list[BookingId]:
        """Forget bookings that never reached the log, and their records; returns those that expired by now."""
        expired = []
        for bookings in (self._unlogged, self._ended_unlogged):
            while bookings:
                booking_id = next(iter(bookings))
                if bookings[booking_id] + ttl_ms > now_ms:
                    break
                del bookings[booking_id]
                self._sent.discard(booking_id)
                for phase in BookingPhase:
                    self._outbox.discard(load_key(booking_id, phase), self._partition_of(booking_id))
                expired.append(booking_id)
        return expired

    def _partition_of(self, booking_id: BookingId) -> int:
        return request_partition(booking_id.request_id, self._topic.partitions)

    def _encode(self, records: Sequence[tuple[bytes, _Unsent]]) -> list[bytes]:
        """Encode records that are about to be sent, and remember them until they are read back."""
        values = [encoded_load(*content, written_at_ms) for _, (content, written_at_ms) in records]
        with self._lock:
            for (key, (content, _)), value in zip(records, values, strict=True):
                self._records[key] = (value, content)
                if content.booking_id in self._unlogged:
                    self._sent.add(content.booking_id)
            while len(self._records) > RECORDS_MAX:
                self._records.popitem(last=False)
        return values

"""Bookings shared between routers through `router-loads` (docs/architecture.md, Loads).

What lives here: applying our own bookings at once, publishing them, folding those of other routers. What must not: the
rules of a booking (core.loads). A router's id is new at every start, so its own records are told apart from those of
its former life.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.codec import decode_load, encode_load
from streams.core.loads import ActiveLoads, Booking, BookingId, Phase
from streams.errors import BookingConflict
from streams.kafka import Record, partition_of_key
from streams.settings import Settings
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: Calls for ids that no booking is known for, held for a booking still on its way from another router.
HELD_CALLS_MAX = 10_000
HELD_CALL_TTL_MS = 60_000


class LoadsSync:
    """Owner of this router's ActiveLoads. Its lock makes a decision and its booking one step."""

    def __init__(self, settings: Settings, topic: TopicSpec, kafka: Producer, now_ms: Callable[[], int]) -> None:
        self._ttl_ms = int(settings.booking_ttl_s * 1000)
        self._topic = topic
        self._kafka = kafka
        self._now_ms = now_ms
        self._shared = settings.router_replica_sync
        self._lock = threading.RLock()
        self._loads = ActiveLoads(self._ttl_ms)
        self._held: OrderedDict[tuple[str, Phase], int] = OrderedDict()  # to the time of the call
        self._counter = 0
        self.router_id = uuid.uuid4().hex
        self.unpublished = 0
        self.unknown_calls = 0

    @contextmanager
    def locked(self) -> Iterator[ActiveLoads]:
        """The loads, expired and held still for as long as the block runs."""
        with self._lock:
            self._expire()
            yield self._loads

    def book(self, request_id: str, booking: Booking) -> BookingId:
        """Book at once here and tell the others; raises BookingConflict where the id is booked on another rank."""
        with self._lock:
            live = self._loads.live(request_id)
            if live is not None and live[1].rank != booking.rank:
                raise BookingConflict(
                    f"request {request_id!r} is booked on rank {live[1].rank}",
                    remedy=f"DELETE /loads/{request_id} first, or take another id",
                )
            if live is not None:
                booking_id = live[0]
            else:
                self._counter += 1
                booking_id = BookingId(request_id, self.router_id, self._counter)
            self._loads.add(booking_id, booking, self._now_ms())
            self._publish(booking_id, Phase.ADD, booking)
            self._release_held(booking_id)
            return booking_id

    def tell(self, request_id: str, phase: Phase) -> bool:
        """Apply prefill-complete or free; False where no booking of the id is known and the call is held.

        A call repeated for a booking that has ended changes nothing: held, it would end the next one of that id.
        """
        with self._lock:
            live = self._loads.live(request_id)
            if live is None:
                if self._loads.knows(request_id):
                    return True
                self._hold(request_id, phase)
                return False
            self._apply(live[0], phase)
            self._publish(live[0], phase, None)
            return True

    def fold(self, record: Record) -> None:
        """Fold one record of router-loads; raises BadRecord. Our own come back and are skipped."""
        if record.value is None:
            return
        booking_id, phase, booking = decode_load(record.value)
        if booking_id.router_id == self.router_id and phase is Phase.ADD:
            return
        at_ms = record.timestamp_ms
        with self._lock:
            if phase is Phase.ADD:
                assert booking is not None
                self._loads.add(booking_id, booking, at_ms)
                self._release_held(booking_id)
            else:
                self._apply(booking_id, phase, at_ms)

    def reset(self) -> None:
        """Forget what others told, to be folded anew; our own bookings come back from the topic under an id of old."""
        if not self._shared:
            return  # nobody else told anything, and our own bookings are nowhere but here
        with self._lock:
            self._loads = ActiveLoads(self._ttl_ms)
            self.router_id = uuid.uuid4().hex

    def flush(self, timeout_s: float) -> None:
        """Wait for what was published."""
        self._kafka.flush(timeout_s)

    def poll(self) -> None:
        """Serve delivery reports, and end what has expired."""
        self._kafka.poll(0)
        with self._lock:
            self._expire()

    def _apply(self, booking_id: BookingId, phase: Phase, at_ms: int | None = None) -> None:
        at = self._now_ms() if at_ms is None else at_ms
        if phase is Phase.PREFILL:
            self._loads.prefill_complete(booking_id, at)
        else:
            self._loads.free(booking_id, at)

    def _hold(self, request_id: str, phase: Phase) -> None:
        self._held[request_id, phase] = self._now_ms()
        self._held.move_to_end((request_id, phase))
        if len(self._held) > HELD_CALLS_MAX:
            self._held.popitem(last=False)
            self.unknown_calls += 1

    def _release_held(self, booking_id: BookingId) -> None:
        for phase in (Phase.PREFILL, Phase.FREE):
            if self._held.pop((booking_id.request_id, phase), None) is not None:
                self._apply(booking_id, phase)
                self._publish(booking_id, phase, None)

    def _expire(self) -> None:
        now_ms = self._now_ms()
        self._loads.expire(now_ms)
        while self._held:
            oldest = next(iter(self._held))
            if self._held[oldest] + HELD_CALL_TTL_MS > now_ms:
                break
            del self._held[oldest]
            self.unknown_calls += 1

    def _publish(self, booking_id: BookingId, phase: Phase, booking: Booking | None) -> None:
        if not self._shared:
            return
        key, value = encode_load(booking_id, phase, booking, self._now_ms())
        partition = partition_of_key(booking_id.request_id.encode(), self._topic.partitions)
        try:
            self._kafka.produce(self._topic.name, key=key, value=value, partition=partition, on_delivery=self._told)
        except BufferError:
            # Kafka is away and the client's queue is full: decisions go on, the others learn of it by TTL.
            self.unpublished += 1
        except KafkaException as exc:
            # A booking of more hashes than one record may carry: it is charged here, and nowhere else.
            self.unpublished += 1
            log.warning("a booking does not fit %s: %s", self._topic.name, exc.args[0].str())
        self._kafka.poll(0)

    def _told(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.unpublished += 1
            log.warning("a booking did not reach %s: %s", message.topic(), error.str())

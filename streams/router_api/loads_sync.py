"""Bookings shared between routers through `router-loads` (docs/architecture.md, Loads).

What lives here: applying our own bookings at once, publishing them, folding those of other routers. What must not: the
rules of a booking (core.loads), the queue towards Kafka (outbox). A router's id is new at every start, so its own
records are told apart from those of its former life.

Time of a booking is the log's: append times of its partition, which the broker gives, and which are the same for every
router. It goes on by records; where nobody writes any more, routers that remember bookings there write a tick.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.codec import decode_load, encode_load, load_key
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId, BookingPhase, with_output
from streams.errors import BookingConflict
from streams.kafka import Record, partition_of_key
from streams.router_api.outbox import Outbox
from streams.settings import Settings
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: Calls for ids that no booking is known for, held for a booking still on its way from another router.
BUFFERED_CALLS_MAX = 10_000
BUFFERED_CALL_TTL_MS = 60_000

#: A partition without a record for so long is moved on by a tick.
QUIET_MS = 1_000

#: The partition that is ticked where no bookings are remembered and somebody asks whether Kafka is there.
_PROBED = 0

#: Key of a tick, whose value is a tombstone: compaction leaves none of them, and it is no booking's key.
TICK_KEY = b"tick"


#: What a call may have to wait with for its booking: a phase, or the tokens generated so far, which are none of it.
_Call = BookingPhase | Literal["output"]


class _BufferedCall(NamedTuple):
    """A call that waits for its booking. output_tokens: of one that tells them."""

    since_ms: int
    output_tokens: int


class LoadsSync:
    """Owner of this router's ActiveLoads. Its lock makes a decision and its booking one step."""

    def __init__(self, settings: Settings, topic: TopicSpec, kafka: Producer, now_ms: Callable[[], int]) -> None:
        """now_ms: monotonic."""
        self._ttl_ms = int(settings.booking_ttl_s * 1000)
        self._stale_after_ms = settings.stale_after_ms
        self._block_size_of = settings.block_size_of
        self._topic = topic
        self._kafka = kafka
        self._now_ms = now_ms
        self._shared = settings.router_replica_sync
        self._lock = threading.RLock()
        self._outbox = Outbox(kafka, topic.name, now_ms, lambda: self._lock)
        self._buffered: OrderedDict[tuple[str, _Call], _BufferedCall] = OrderedDict()
        self._heard_ms = [now_ms()] * topic.partitions  # when each partition's last record was read, or our tick taken
        self._ticking: dict[int, int] = {}  # partitions whose tick Kafka has not acknowledged, since when
        self._asked = False  # whether anybody asked for `in_sync` since a tick last answered that
        self._counter = 0
        self.unknown_calls = 0
        self._begin()

    def _begin(self) -> None:
        self._loads = ActiveLoads(self._ttl_ms)
        self._stream_ms = [0] * self._topic.partitions  # newest append time of each partition
        # Our own bookings that the log has not given back yet, and when they were made; the live ones, and the ended.
        self._unlogged: OrderedDict[BookingId, int] = OrderedDict()
        self._ended_unlogged: OrderedDict[BookingId, int] = OrderedDict()
        self.router_id = uuid.uuid4().hex

    @contextmanager
    def locked(self) -> Iterator[ActiveLoads]:
        """The loads, expired and held still for as long as the block runs."""
        with self._lock:
            self._expire()
            yield self._loads

    @property
    def unpublished(self) -> int:
        """Records that Kafka did not take, or that found no room to wait for it."""
        return self._outbox.lost

    @property
    def unacknowledged(self) -> int:
        """Records that Kafka has not acknowledged yet."""
        return len(self._outbox)

    @property
    def in_sync(self) -> bool:
        """Whether the log has all that we said until `stale_after_ms` ago, and gave it back; else Kafka is away, and
        other routers and we do not know of each other's bookings. One that was dropped counts as long as it lives.

        Where nobody has said anything for a while, having asked makes the next `poll` find out.
        """
        with self._lock:
            self._asked = True
            now_ms = self._now_ms()
            since = [next(iter(each.values())) for each in (self._unlogged, self._ticking) if each]
            oldest_ms = max(self._outbox.oldest_ms(), now_ms - min(since, default=now_ms))
            return not self._shared or oldest_ms <= self._stale_after_ms

    def book(self, request_id: str, booking: Booking) -> BookingId:
        """Book at once here and tell the others; raises BookingConflict where the id is booked on another rank.

        A booking that stands is stated anew; the blocks of output that were told of it stay.
        """
        with self._lock:
            live = self._loads.live(request_id)
            if live is not None and live[1].rank != booking.rank:
                raise BookingConflict(
                    f"request {request_id!r} is booked on rank {live[1].rank}",
                    remedy=f"DELETE /loads/{request_id} first, or take another id",
                )
            if live is not None:
                booking_id = live[0]
                booking = booking._replace(output_blocks=max(booking.output_blocks, live[1].output_blocks))
            else:
                self._counter += 1
                booking_id = BookingId(request_id, self.router_id, self._counter)
                if self._shared:
                    self._unlogged[booking_id] = self._now_ms()
            self._loads.add(booking_id, booking, self._local_time())
            self._publish(booking_id, BookingPhase.ADD, booking)
            self._release_buffered(booking_id)
            return booking_id

    def report_phase(self, request_id: str, phase: BookingPhase) -> bool:
        """Apply prefill-complete or free; False where no booking of the id is known and the call is held.

        It is for every live booking of the id: two routers that were asked at once may each have made one. A call
        repeated for a booking that has ended changes nothing: held, it would end the next one of that id.
        """
        with self._lock:
            live = self._loads.live_ids(request_id)
            if not live:
                if self._loads.knows(request_id):
                    return True
                self._buffer_call(request_id, phase)
                return False
            for booking_id in live:
                self._publish_phase(booking_id, phase)
            return True

    def report_output(self, request_id: str, output_tokens: int) -> bool:
        """State bookings anew with all tokens generated so far; False where the call is held, as by `report_phase`.

        What fills no more blocks than were told of changes nothing, and is not published.
        """
        with self._lock:
            live = self._loads.live_ids(request_id)
            if not live:
                if self._loads.knows(request_id):
                    return True
                self._buffer_call(request_id, "output", output_tokens)
                return False
            for booking_id in live:
                self._grow(booking_id, output_tokens)
            return True

    def fold(self, record: Record) -> None:
        """Fold one record of router-loads; raises BadRecord, and has taken its time from it all the same."""
        clock, at_ms = record.partition, record.timestamp_ms
        try:
            decoded = None if record.value is None else decode_load(record.value)
            with self._lock:
                if decoded is not None:
                    self._fold(*decoded, at_ms, clock)
        finally:
            with self._lock:
                self._heard_ms[clock] = self._now_ms()
                self._stream_ms[clock] = max(self._stream_ms[clock], at_ms)
                self._loads.expire(self._stream_ms[clock], clock)

    def reset(self) -> None:
        """Forget what others told, to be folded anew; our own bookings come back from the topic under an id of old."""
        if not self._shared:
            return  # nobody else told anything, and our own bookings are nowhere but here
        with self._lock:
            self._begin()

    def flush(self, timeout_s: float) -> None:
        """Wait for what was published."""
        until_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._outbox.pump()
            left = self._kafka.flush(min(0.1, timeout_s))
            if (not left and not len(self._outbox)) or time.monotonic() >= until_s:
                return

    def poll(self) -> None:
        """Serve delivery reports, send what waits, end what has expired, and move quiet partitions on."""
        with self._lock:
            self._outbox.pump()
            self._expire()
            if self._shared:
                self._tick()

    # -- words ---------------------------------------------------------------------------------------------------------

    def _fold(
        self, booking_id: BookingId, phase: BookingPhase, booking: Booking | None, at_ms: int, clock: int
    ) -> None:
        if phase is not BookingPhase.ADD:
            self._apply(booking_id, phase, at_ms, clock)
            return
        assert booking is not None
        self._unlogged.pop(booking_id, None)
        self._ended_unlogged.pop(booking_id, None)
        if self._loads.logged(booking_id, booking, at_ms, clock):
            return
        # News; or our own as it was before we stated it anew. Of two adds of a booking the later one in the log counts,
        # whoever wrote it, so that all routers end with the same one.
        before = self._loads.live_ids(booking_id.request_id)
        self._loads.add(booking_id, booking, at_ms, clock)
        self._release_buffered(booking_id)
        if booking_id not in before and booking_id in self._loads.live_ids(booking_id.request_id):
            self._yield_to(booking_id, before)

    def _yield_to(self, newer: BookingId, before: tuple[BookingId, ...]) -> None:
        """Two routers booked one request id at once: of two live bookings the earlier in the log ends, by its owner.

        A booking of ours that the log has not given back is the later one; its rival's owner sees to that.
        """
        if newer.router_id == self.router_id:
            return
        for booking_id in before:
            if booking_id.router_id == self.router_id and booking_id not in self._unlogged:
                self._publish_phase(booking_id, BookingPhase.FREE)

    def _publish_phase(self, booking_id: BookingId, phase: BookingPhase) -> None:
        """Apply a phase and tell the others."""
        self._apply(booking_id, phase, self._local_time())
        since_ms = self._unlogged.get(booking_id)
        if phase is BookingPhase.FREE and since_ms is not None:
            del self._unlogged[booking_id]
            self._ended_unlogged[booking_id] = since_ms
            if self._outbox.withdraw(load_key(booking_id, BookingPhase.ADD)):
                # It began and ended while Kafka was away; nobody else has heard of it, and nobody need.
                self._outbox.discard(load_key(booking_id, BookingPhase.PREFILL))
                return
        self._publish(booking_id, phase, None)

    def _grow(self, booking_id: BookingId, output_tokens: int) -> None:
        booking = self._loads.booking(booking_id)
        if booking is None:
            return  # a call that was held, and a booking that had ended when it came
        grown = with_output(booking, output_tokens, self._block_size_of(booking.model))
        if grown is not booking:
            self._loads.add(booking_id, grown, self._local_time())
            self._publish(booking_id, BookingPhase.ADD, grown)

    def _apply(self, booking_id: BookingId, phase: BookingPhase, at_ms: int | None, clock: int = 0) -> None:
        if phase is BookingPhase.PREFILL:
            self._loads.prefill_complete(booking_id, at_ms, clock)
        else:
            self._loads.free(booking_id, at_ms, clock)

    def _local_time(self) -> int | None:
        """The time of a word of our own: the log's, which nobody knows yet; ours where there is no log."""
        return None if self._shared else self._now_ms()

    def _buffer_call(self, request_id: str, call: _Call, output_tokens: int = 0) -> None:
        before = self._buffered.pop((request_id, call), None)
        if before is not None:
            output_tokens = max(output_tokens, before.output_tokens)
        self._buffered[request_id, call] = _BufferedCall(self._now_ms(), output_tokens)
        if len(self._buffered) > BUFFERED_CALLS_MAX:
            self._buffered.popitem(last=False)
            self.unknown_calls += 1

    def _release_buffered(self, booking_id: BookingId) -> None:
        output = self._buffered.pop((booking_id.request_id, "output"), None)
        if output is not None:
            self._grow(booking_id, output.output_tokens)
        for phase in (BookingPhase.PREFILL, BookingPhase.FREE):
            if self._buffered.pop((booking_id.request_id, phase), None) is not None:
                self._publish_phase(booking_id, phase)

    def _publish(self, booking_id: BookingId, phase: BookingPhase, booking: Booking | None) -> None:
        if self._shared:
            key, value = encode_load(booking_id, phase, booking, time.time_ns() // 1_000_000)
            self._outbox.put(key, value, partition_of_key(booking_id.request_id.encode(), self._topic.partitions))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now_ms = self._now_ms()
        if not self._shared:
            self._loads.expire(now_ms)
        # What never reached the log ends by our own clock.
        for unlogged in (self._unlogged, self._ended_unlogged):
            while unlogged:
                booking_id = next(iter(unlogged))
                if unlogged[booking_id] + self._ttl_ms > now_ms:
                    break
                del unlogged[booking_id]
                self._loads.forget(booking_id)
                for phase in BookingPhase:
                    self._outbox.discard(load_key(booking_id, phase))
        while self._buffered:
            oldest = next(iter(self._buffered))
            if self._buffered[oldest].since_ms + BUFFERED_CALL_TTL_MS > now_ms:
                break
            del self._buffered[oldest]
            self.unknown_calls += 1

    def _tick(self) -> None:
        """Move on the time of partitions where bookings are remembered and nobody writes.

        Where there are none, a tick is written as long as somebody asks whether Kafka is there: else a scope that was
        idle when Kafka went away would call its first answers exact.
        """
        now_ms = self._now_ms()
        quiet = self._loads.expiring()
        if self._asked and not quiet:
            quiet = [_PROBED]
        self._asked = False
        for partition in quiet:
            if partition in self._ticking or now_ms - self._heard_ms[partition] < QUIET_MS:
                continue

            def on_delivery(error: KafkaError | None, _: Message, partition: int = partition) -> None:
                with self._lock:
                    del self._ticking[partition]
                    if error is None:  # it is there to be read: no need of another one until it was
                        self._heard_ms[partition] = self._now_ms()

            try:
                self._kafka.produce(
                    self._topic.name, key=TICK_KEY, value=None, partition=partition, on_delivery=on_delivery
                )
            except (BufferError, KafkaException):
                continue  # Kafka is away; what waits for it says so
            self._ticking[partition] = now_ms

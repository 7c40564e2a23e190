"""The feed of a group of router processes: their parent reads `router-loads` once for all of them.

What lives here: the parent's thread, which reads the topic from its end and writes what comes into a ring of shared
memory (booking_ring). What must not: what a record means, and what the processes do with it (group_reader). The parent
imports nothing of a router, which would take 100 MB.

The feed is an economy and never a condition: a process that cannot use it reads Kafka itself. So the thread only has to
be honest. It notes from which offset on it passes on every record of a partition, that it runs, and when the topic has
begun anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from streams.interpreter import run_soon_after_waking, run_thread_in_real_time
from streams.kafka import assign, consume, ends_of, fetched_in_intervals, reader
from streams.router_api.booking_ring import RingWriter, encode_frame, encoded_bytes
from streams.settings import Settings
from streams.topic_watch import TopicReading, TopicWatch
from streams.topics import topics

log = logging.getLogger(__name__)

#: The parent fetches in this interval, somewhat less often than a router alone (loads_sync.READ_INTERVAL_S). At 5 ms,
#: it would need 39 instead of 27 us per booking, and the processes more as well, since they get more frames.
FETCH_INTERVAL_S = 0.010

#: After the first message of a fetch, those of other partitions are there within this time (topic_readers).
_COLLECT_S = 0.001
_CONSUME_RECORDS = 1000

#: The longest wait for a record, after which the heartbeat is renewed. Readers give the writer 1 s.
_POLL_S = 0.05

#: A frame is closed at this length, so that a reader copies little at a time. One long record may exceed it.
_FRAME_BYTES = 256 * 1024

#: After an error, and while the topic does not exist yet.
_RETRY_S = 1.0

#: How long a broker has to answer with the ends of the partitions, during which the heart does not beat.
_ENDS_TIMEOUT_S = 0.7

#: How long `stop` waits for a call of the client.
_STOP_S = 2.0

#: A record as it was read: partition, offset, append time, key and value. It is a plain tuple because one is made for
#: every record.
_Read = tuple[int, int, int, bytes, bytes | None]

_BEGUN_ANEW = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})


class GroupFeed:
    """Owner of the ring, and of the thread that writes it.

    `fd` is inherited by the processes. Nothing is left of the memory once they and the parent have ended.
    """

    def __init__(self, settings: Settings, ring: RingWriter) -> None:
        self._settings = settings
        self._topic = topics(settings).router_loads
        self._ring = ring
        self._next: dict[int, int] = {}  # the offsets that come next, once the partitions are covered
        self._topic_id = ""  # of the topic that is read
        self._seen_id: str | None = None  # of the topic that exists, by the watch's thread
        self._watch = TopicWatch(settings, [self._topic], (), self._note_reading)
        self._framed: dict[int, int] = {}  # where the last frame of each partition ended, at first what is covered
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group-feed", daemon=True)

    @property
    def fd(self) -> int:
        """The descriptor of the ring."""
        return self._ring.fd

    def start(self) -> None:
        """Begin to read."""
        self._beat()
        self._watch.start()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(_STOP_S)
        self._watch.stop()

    def _note_reading(self, reading: TopicReading) -> None:
        self._seen_id = reading.ids.get(self._topic.name, self._seen_id)

    def _beat(self) -> None:
        self._ring.beat(time.monotonic_ns())

    def _run(self) -> None:
        try:
            run_soon_after_waking()
            if self._settings.router_realtime:
                run_thread_in_real_time()
            while not self._stopping.is_set():
                try:
                    if not self._read():
                        return
                except KafkaException as exc:
                    log.warning("the bookings for all processes are not read, trying again: %s", exc)
                self._pause()
        except Exception:
            log.exception("the bookings are no longer read for all processes; each of them reads Kafka itself")
        finally:
            self._ring.close()

    def _pause(self) -> None:
        until_s = time.monotonic() + _RETRY_S
        while time.monotonic() < until_s and not self._stopping.is_set():
            self._beat()
            self._stopping.wait(_POLL_S)

    def _read(self) -> bool:
        """Read until stopped or until the topic has begun anew; returns False if the ring cannot take a record."""
        consumer = reader(self._settings, **fetched_in_intervals(FETCH_INTERVAL_S))
        try:
            self._find_ends(consumer)
            assign(consumer, [TopicPartition(self._topic.name, *each) for each in self._next.items()])
            self._beat()
            self._ring.note_topic(self._topic_id)
            for partition, offset in self._next.items():
                self._ring.cover(partition, offset)
            return self._pass_on(consumer)
        finally:
            consumer.close()

    def _find_ends(self, consumer: Consumer) -> None:
        """Begin at the ends of all partitions, unless the topic was read before. Waits for topic and broker."""
        is_logged = False
        while not self._next and not self._stopping.is_set():
            self._beat()
            topic_id = self._seen_id  # before the ends, so that these are not of a former topic
            if topic_id is None:
                self._stopping.wait(_POLL_S)
                continue
            try:
                ends = ends_of(consumer, self._topic.name, self._topic.partitions, _ENDS_TIMEOUT_S)
            except KafkaException as exc:
                if not is_logged:
                    log.warning("the bookings cannot be read for all processes yet: %s", exc)
                    is_logged = True
                self._pause()
            else:
                self._topic_id = topic_id
                self._next = dict(enumerate(ends))
                self._framed = dict(self._next)

    def _pass_on(self, consumer: Consumer) -> bool:
        while not self._stopping.is_set():
            messages = consume(consumer, _CONSUME_RECORDS, _POLL_S, _COLLECT_S)
            read_ms = time.monotonic_ns() // 1_000_000
            records: list[_Read] = []
            ends: dict[int, int] = {}
            anew = False
            for message in messages:
                error = message.error()
                if error is None:
                    record = (
                        *(message.partition(), message.offset(), message.timestamp()[1]),
                        *(message.key() or b"", message.value()),
                    )
                    records.append(cast(_Read, record))  # only an error may lack partition or offset
                    continue
                code = error.code()
                if code == KafkaError._PARTITION_EOF:
                    partition, end = message.partition(), message.offset()
                    assert partition is not None
                    if end is not None and end >= 0:
                        ends[partition] = end
                elif code in _BEGUN_ANEW:
                    anew = True
                elif error.fatal():
                    raise KafkaException(error)
                else:
                    log.warning("reading: %s", error.str())
            if not self._write(records, read_ms):
                return False
            for partition, end in ends.items():
                if end > self._next[partition]:  # markers, which are no records
                    self._note_read(partition, end)
            self._beat()
            # A consumer may get nothing of a recreated topic, and no error either, if its leader has a lower epoch.
            if anew or self._seen_id != self._topic_id:
                log.warning("%s was truncated or recreated", self._topic.name)
                self._next = {}
                self._ring.begin_epoch()
                return True
        return True

    def _write(self, records: Sequence[_Read], read_ms: int) -> bool:
        """Write records in frames; returns False if one of them is too long for the ring."""
        first, n_bytes = 0, 0
        for position, (_, _, _, key, value) in enumerate(records):
            n_bytes += encoded_bytes(key, value)
            if n_bytes > _FRAME_BYTES and position > first:
                if not self._write_frame(records[first:position], read_ms):
                    return False
                first, n_bytes = position, encoded_bytes(key, value)
        return first == len(records) or self._write_frame(records[first:], read_ms)

    def _write_frame(self, records: Sequence[_Read], read_ms: int) -> bool:
        payload = encode_frame(records, read_ms, self._framed)
        if len(payload) > self._ring.payload_bytes_max:
            log.error(
                "%s [%d] at %d has %d bytes, too many for the ring: each process reads Kafka itself",
                *(self._topic.name, *records[0][:2], len(payload)),
            )
            return False
        self._ring.write(payload)
        for partition, offset in {record[0]: record[1] for record in records}.items():
            self._framed[partition] = offset + 1
            self._note_read(partition, offset + 1)
        return True

    def _note_read(self, partition: int, offset: int) -> None:
        self._next[partition] = offset
        self._ring.note_read(partition, offset)


def group_feed(settings: Settings) -> GroupFeed | None:
    """The feed of a group with these settings; None if it shares no bookings, or if there is no shared memory."""
    if not settings.router_replica_sync:
        return None
    try:
        ring = RingWriter(settings.partitions)
    except OSError as exc:
        log.warning("no shared memory, so each process reads the bookings from Kafka itself: %s", exc)
        return None
    return GroupFeed(settings, ring)

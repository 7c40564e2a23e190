"""The lease of a publisher inside an engine: a thread that says that the engine lives, and answers resync requests.

What lives here: when heartbeats are published, and reading the requests for one rank. What must not: writing records
(publisher), and which requests are answered (restatements).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from streams.core.events import ENDED_LEASE_MS, ResyncRequest
from streams.core.ids import RankId
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.clients import assign, partition_of, reader, require_topic, worker_key
from streams.kafka.records import decode_resync
from streams.settings import ScopeSettings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Heartbeats per lease: two may be lost or late before the rank becomes silent.
HEARTBEATS_PER_LEASE = 3

#: How long one read of requests waits; the end of the lease is noticed after at most this time.
_POLL_S = 0.1


class HeldLease:
    """Holds one rank's lease from its creation until `close`. Its thread is a daemon, so a crash ends the lease."""

    def __init__(
        self,
        settings: ScopeSettings,
        rank: RankId,
        lease_s: float,
        heartbeat: Callable[[str, int], None],
        restate: Callable[[ResyncRequest], None],
    ) -> None:
        """heartbeat: publishes one, with this publisher's name and the length of the lease in ms. restate: answers a
        request. Raises KvStreamsError if the topic of requests is missing.
        """
        self._settings = settings
        self._rank = rank
        self._lease_s = lease_s
        self._heartbeat = heartbeat
        self._restate = restate
        self._name = f"publisher:{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._stopping = threading.Event()
        require_topic(settings, topics(settings).kv_control.name)
        self._beat(round(lease_s * 1000))
        self._thread = threading.Thread(target=self._run, name=f"lease-{rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and the lease: the rank gets no more requests."""
        self._stopping.set()
        self._thread.join()
        self._beat(ENDED_LEASE_MS)

    def _beat(self, lease_ms: int) -> None:
        try:
            self._heartbeat(self._name, lease_ms)
        except (KvStreamsError, KafkaException) as exc:
            log.warning("rank %s: no heartbeat was published: %s", self._rank, exc)

    def _run(self) -> None:
        consumer = reader(self._settings)
        try:
            topic = topics(self._settings).kv_control.name
            home = partition_of(self._rank.worker_id, self._settings.partitions)
            assign(consumer, [TopicPartition(topic, home, OFFSET_END)])
            beat_at_s = time.monotonic() + self._lease_s / HEARTBEATS_PER_LEASE
            while not self._stopping.is_set():
                self._read(consumer)
                if time.monotonic() >= beat_at_s:
                    beat_at_s = time.monotonic() + self._lease_s / HEARTBEATS_PER_LEASE
                    self._beat(round(self._lease_s * 1000))
        finally:
            consumer.close()

    def _read(self, consumer: Consumer) -> None:
        """Answer the next request for this rank, if one arrives in time."""
        message = consumer.poll(min(_POLL_S, self._lease_s / HEARTBEATS_PER_LEASE))
        if message is None or message.error() is not None or message.key() != worker_key(self._rank.worker_id):
            return
        try:
            request = decode_resync(message.value(), self._settings.schema_ids)
            if request.rank == self._rank:
                self._restate(request)
        except BadRecord as exc:
            log.warning("a resync request is skipped: %s", exc)
        except (KvStreamsError, KafkaException) as exc:
            log.warning("rank %s was not restated: %s", self._rank, exc)

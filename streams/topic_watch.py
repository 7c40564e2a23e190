"""Asks the broker several times per second which topics of a scope exist, and where the logs of some of them end.

What lives here: one thread, its calls, and their result as a value. What must not: what follows from it (indexer_agent,
tables.partition, router_api).

Owners and routers need this. A partition's owner must not take the end that its consumer fetched last for the end of
the log: a consumer that was cut off, paused or assigned a moment ago does not know it. A router must notice that the
table lags even if no owner is left to report it. And only a topic's id shows that it was deleted and recreated; the
clients of Kafka do not report it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from streams.kafka import admin
from streams.settings import Settings
from streams.tables.applied_until import SourceOffset
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: The interval of the readings, as a part of `behind_after_ms` and within these bounds. Four readings fit into the lag
#: that is tolerated, so one that is late does not make an answer degraded. A reading costs the broker two requests.
READINGS_PER_TOLERATED_LAG = 4
READ_EVERY_MS = (50, 250)

#: A broker answers within milliseconds. One that is slower than this counts as not reached.
READ_TIMEOUT_S = 2.0

#: librdkafka ends a call at its timeout; its future is waited for a little longer.
_FUTURE_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class TopicReading:
    """What the broker answered. asked_ms: monotonic, before it was asked. ids: topic id of each topic that exists.

    missing: topics that do not exist. ends: by topic and partition, the offset after everything in the log, markers and
    open transactions included; what could not be read is missing.
    """

    asked_ms: int
    ids: Mapping[str, str]
    missing: tuple[str, ...]
    ends: Mapping[tuple[str, int], int]

    def ends_of(self, topics: Sequence[str], partition: int) -> dict[str, SourceOffset] | None:
        """Return the ends of one partition of these topics; None if any of them is unknown."""
        if any(topic not in self.ids or (topic, partition) not in self.ends for topic in topics):
            return None
        return {topic: SourceOffset(self.ids[topic], self.ends[topic, partition]) for topic in topics}


def read_every_ms(behind_after_ms: int) -> int:
    """Return the interval of the readings if an owner may lag by this much."""
    shortest, longest = READ_EVERY_MS
    return min(max(behind_after_ms // READINGS_PER_TOLERATED_LAG, shortest), longest)


class TopicWatch:
    """Reads until `stop`, and passes each reading on, from its own thread. A reading that fails is not passed on."""

    def __init__(
        self,
        settings: Settings,
        topics: Sequence[TopicSpec],
        with_ends: Sequence[TopicSpec],
        on_reading: Callable[[TopicReading], None],
    ) -> None:
        """topics: those that are watched. with_ends: those of them whose ends are read."""
        self._settings = settings
        self._names = [spec.name for spec in topics]
        self._partitions = [(spec.name, partition) for spec in with_ends for partition in range(spec.partitions)]
        self._on_reading = on_reading
        self._every_s = read_every_ms(settings.behind_after_ms) / 1000
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="topics", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        client = admin(self._settings)
        # Only topics that existed a moment ago are asked for their ends: the call for a missing one takes its timeout.
        existing: frozenset[str] = frozenset()
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                reading = self._read(client, existing)
            except (KafkaException, TimeoutError) as exc:
                log.debug("topics cannot be read: %s", exc or "no answer in time")
            except Exception:  # nothing may end the readings: answers would stay degraded
                log.exception("topics cannot be read")
            else:
                first, existing = not existing, frozenset(reading.ids)
                try:
                    self._on_reading(reading)
                except Exception:  # as above
                    log.exception("a reading of the topics was not taken in")
                if first and existing:
                    continue  # the first reading only finds out which topics exist
            self._stopping.wait(max(began + self._every_s - time.monotonic(), 0.0))

    def _read(self, client: AdminClient, existing: frozenset[str]) -> TopicReading:
        """Read the ends, then the ids, so that the end of a recreated topic never comes with the old topic's id."""
        asked_ms = time.monotonic_ns() // 1_000_000
        ends: dict[tuple[str, int], int] = {}
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {TopicPartition(*each): latest for each in self._partitions if each[0] in existing}
        if wanted:
            listed = client.list_offsets(
                wanted, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=READ_TIMEOUT_S
            )
            for where, future in listed.items():
                try:
                    ends[where.topic, where.partition] = future.result(READ_TIMEOUT_S + _FUTURE_SLACK_S).offset
                except (KafkaException, TimeoutError) as exc:
                    log.debug("the end of %s [%d] cannot be read: %s", where.topic, where.partition, exc)
        ids: dict[str, str] = {}
        missing: list[str] = []
        described = client.describe_topics(TopicCollection(self._names), request_timeout=READ_TIMEOUT_S)
        for name, future in described.items():
            try:
                ids[name] = str(future.result(READ_TIMEOUT_S + _FUTURE_SLACK_S).topic_id)
            except KafkaException as exc:
                if exc.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                    raise
                missing.append(name)
        return TopicReading(asked_ms, ids, tuple(missing), ends)

"""Asks the broker several times per second which topics of a scope exist, and where the logs of some of them end.

What lives here: one thread, its calls, and their result as a value. What must not: what follows from it (indexer_agent,
tables.partition, router_api).

Owners and routers need this. A partition's owner must not take the end that its consumer fetched last for the end of
the log: a consumer that was cut off, paused or assigned a moment ago does not know it. A router must notice that the
table lags even if no owner is left to report it. And only a topic's id shows that it was deleted and recreated; the
clients of Kafka do not report it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from streams.kafka.applied_until import SourceOffset
from streams.kafka.clients import admin
from streams.kafka.log_offsets import ask_offsets
from streams.settings import ScopeSettings
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: The interval of the readings, as a part of `behind_after_ms` and within these bounds. Four readings fit into the lag
#: that is tolerated, so one that is late does not make an answer degraded. A reading costs the broker two requests.
READINGS_PER_TOLERATED_LAG = 4
READ_EVERY_MS = (50, 250)

#: Time between two looks at the topics that are not watched closely. Each answer describes every partition of every
#: topic that was asked for, and making objects of that takes much of a reading's processor time.
OTHERS_EVERY_S = 1.0

#: A broker answers within milliseconds. One that is slower than this counts as not reached.
READ_TIMEOUT_S = 2.0

#: librdkafka ends a call at its timeout; its future is waited for a little longer.
_FUTURE_SLACK_S = 1.0


@dataclass(frozen=True, slots=True)
class TopicReading:
    """What the broker answered. asked_ms: monotonic, before it was asked. ids: topic id of each topic that exists.

    missing: topics that do not exist. What both say about topics that are not watched closely may be OTHERS_EVERY_S
    old. ends: by topic and partition, the offset after everything in the log, markers and open transactions included;
    what could not be read is missing.
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


#: A client is replaced after so many readings that failed one after the other. One was seen whose calls all timed out
#: for minutes after its broker had been stopped for 13 s and went on, while other clients got answers.
CLIENT_READINGS_MAX = 5


def read_every_ms(behind_after_ms: int) -> int:
    """Return the interval of the readings if an owner may lag by this much."""
    shortest, longest = READ_EVERY_MS
    return min(max(behind_after_ms // READINGS_PER_TOLERATED_LAG, shortest), longest)


class TopicWatch:
    """Reads until `stop`, and passes each reading on, from its own thread. A reading that fails is not passed on."""

    def __init__(
        self,
        settings: ScopeSettings,
        topics: Sequence[TopicSpec],
        with_ends: Sequence[TopicSpec],
        on_reading: Callable[[TopicReading], None],
        closely: Sequence[TopicSpec] = (),
    ) -> None:
        """topics: those that are watched. with_ends: those of them whose ends are read.

        closely: further ones of which each reading has the id, as it has of those with ends.
        """
        self._settings = settings
        self._names = [spec.name for spec in topics]
        self._closely = [spec.name for spec in (*with_ends, *closely)]
        self._known: tuple[dict[str, str], frozenset[str]] = ({}, frozenset())  # ids, and what is missing
        self._partitions = [(spec.name, partition) for spec in with_ends for partition in range(spec.partitions)]
        self._on_reading = on_reading
        self._every_s = read_every_ms(settings.behind_after_ms) / 1000 if self._closely else OTHERS_EVERY_S
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
        others_due_s, n_failed = 0.0, 0
        while not self._stopping.is_set():
            began = time.monotonic()
            with_others = began >= others_due_s
            try:
                reading = self._read(client, existing, with_others=with_others)
            except (KafkaException, TimeoutError) as exc:
                log.debug("topics cannot be read: %s", exc or "no answer in time")
                n_failed += 1
                if n_failed % CLIENT_READINGS_MAX == 0:
                    client = admin(self._settings)
            except Exception:  # nothing may end the readings: answers would stay degraded
                log.exception("topics cannot be read")
            else:
                n_failed = 0
                first, existing = not existing, frozenset(reading.ids)
                if with_others:
                    others_due_s = began + OTHERS_EVERY_S
                try:
                    self._on_reading(reading)
                except Exception:  # as above
                    log.exception("a reading of the topics was not taken in")
                if first and existing:
                    continue  # the first reading only finds out which topics exist
            self._stopping.wait(max(began + self._every_s - time.monotonic(), 0.0))

    def _read(self, client: AdminClient, existing: frozenset[str], *, with_others: bool) -> TopicReading:
        """Read the ends, then the ids, so that the end of a recreated topic never comes with the old topic's id.

        with_others: whether the topics that are not watched closely are looked at as well.
        """
        asked_ms = time.monotonic_ns() // 1_000_000
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {partition: latest for partition in self._partitions if partition[0] in existing}
        ends, failed = ask_offsets(client, wanted, committed=False, timeout_s=READ_TIMEOUT_S)
        for (topic, number), exc in failed.items():
            log.debug("the end of %s [%d] cannot be read: %s", topic, number, exc)
        self._known = ids, missing = self._described(client, self._names if with_others else self._closely)
        return TopicReading(asked_ms, ids, tuple(name for name in self._names if name in missing), ends)

    def _described(self, client: AdminClient, names: Sequence[str]) -> tuple[dict[str, str], frozenset[str]]:
        """Ask for the ids of these topics; return those of all topics, and which are missing, as far as is known."""
        asked = frozenset(names)
        ids = {name: topic_id for name, topic_id in self._known[0].items() if name not in asked}
        missing = set(self._known[1] - asked)
        described = client.describe_topics(TopicCollection(list(names)), request_timeout=READ_TIMEOUT_S)
        concurrent.futures.wait(described.values(), READ_TIMEOUT_S + _FUTURE_SLACK_S)
        for name, future in described.items():
            try:
                ids[name] = str(future.result(0).topic_id)
            except KafkaException as exc:
                if exc.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                    raise
                missing.add(name)
        return ids, frozenset(missing)

"""Moving a scope: its state is restated on another scope, which then follows it until this process ends.

What lives here: reading the old scope, and in which order the new one is written. What must not: which records are
copied and when (copying), how they are written (copy_writer), and what a rank's restatement is (restating).

Nothing is kept between two runs. A run that starts restates everything, so it does not matter where the last one ended.
The partitions are loaded one after the other, each at a moment at which its owner has applied everything that may have
been copied before; the loaded ones are followed in between.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, Message, TopicPartition

from streams.core.events import ResyncRequest
from streams.core.ids import RankId
from streams.cxl.records import BlockKey
from streams.errors import KvStreamsError, OffsetLost, ProcessError
from streams.kafka.applied_until import AppliedUntil, SourceOffset
from streams.kafka.clients import assign, consume, partition_of, reader
from streams.kafka.log_offsets import Place
from streams.kafka.records import AVOIDANCES
from streams.kafka.topic_watch import READ_EVERY_MS, READINGS_PER_TOLERATED_LAG, TopicReading, TopicWatch
from streams.process.progress import Step
from streams.replay.copy_writer import CopyWriter, decoded_worker
from streams.replay.copying import Holders, WaitingRecords
from streams.replay.cuts import log_ends, places_of
from streams.replay.new_scope import REGISTRY_TIMEOUT_S, NewScope, place_of
from streams.replay.partition_tables import PartitionTables, read_tables
from streams.replay.restating import restate
from streams.settings import ScopeSettings
from streams.tables.changelog import READ_BATCH_RECORDS, check_error
from streams.topics import topics

log = logging.getLogger(__name__)

#: How long one step of reading waits for records.
_POLL_S = 0.02

#: A broker takes records within milliseconds. What it has not taken is waited for in the next step.
_FLUSH_S = 5.0

#: How long an owner may take to apply what its sources have, before its tables are read.
OWNER_TIMEOUT_S = 60.0
_OWNER_POLL_S = 0.5

#: An owner of the new scope that has asked so often for a restatement asks in vain: it needs one of this process. A
#: partition is loaded again at most once in this time.
RESYNC_ATTEMPTS = 3
RELOAD_EVERY_S = 10.0

#: How often is logged how far the move is.
LOG_EVERY_S = 10.0


class Move:
    """Copies one scope to another one, until it is closed."""

    def __init__(self, old: ScopeSettings, new: ScopeSettings) -> None:
        self._old, self._new = old, new
        self._names = topics(old)
        self._events = (self._names.kv_events.name, self._names.cxl_events.name)
        self._holders = Holders()
        self._writer = CopyWriter(old, new, self._holders)
        self._target = NewScope(new, self._holders, self._note_request)
        self._source = reader(old)
        self._next: dict[Place, int] = {}  # of each partition that is read, the offset of its next record
        self._live_from: dict[Place, int] = {}  # where the registry ended when this began
        self._readings: deque[TopicReading] = deque()  # from the watch's thread
        often = replace(old, behind_after_ms=READ_EVERY_MS[0] * READINGS_PER_TOLERATED_LAG)
        with_ends = (self._names.kv_events, self._names.cxl_events, self._names.worker_metrics)
        self._watch = TopicWatch(often, self._names.all(), with_ends, self._readings.append)
        self._ids: dict[str, str] = {}  # of the topics that are read
        self._until = AppliedUntil()
        self._waiting = WaitingRecords()
        self._loaded_s: dict[int, float] = {}  # partitions that are followed, and when they were loaded
        self._due: set[int] = set()  # partitions that are to be loaded again

    @property
    def is_following(self) -> bool:
        """Whether everything has been loaded."""
        return len(self._loaded_s) == self._old.partitions

    def load(self, until: Callable[[], bool], step: Step | None = None) -> None:
        """Restate everything, or as much as there is time for until `until`. step: shows the progress.

        Raises KvStreamsError if a topic is lost or recreated, or Kafka refuses a record.
        """
        self._watch.start()
        self._begin()
        known = self._known_rows()
        for partition in range(self._old.partitions):
            if until():
                return
            self._load(partition, known)
            if step is not None:
                step.update(partition + 1, "partitions loaded", self._old.partitions)
            self.follow(lambda: until() or self._until.at_ms is not None)  # so that no lease ends in the meantime
        log.info("everything is loaded; %s follows until this process ends", self._new.app_id)

    def follow(self, until: Callable[[], bool]) -> None:
        """Copy what is new until `until`. Raises what `load` does."""
        logged_s = time.monotonic()
        while not until():
            self._step()
            if self.is_following and self._due:
                self._load(self._due.pop())
            if self.is_following and time.monotonic() - logged_s > LOG_EVERY_S:
                logged_s = time.monotonic()
                self._log_state()

    def close(self) -> None:
        """Wait for what was written, and close the clients."""
        self._watch.stop()
        n_left = self._writer.kafka.flush(_FLUSH_S)
        self._source.close()
        self._target.close()
        log.info(
            "stopped. Records copied: %d; left out, as they cannot be used: %d; not acknowledged: %d",
            self._writer.n_copied,
            self._writer.n_skipped,
            n_left,
        )

    # -- loading -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Copy the registry as it is now."""
        self._target.begin()
        places = places_of((self._names.workers,))
        self._live_from = log_ends(self._old, places)
        metrics = [TopicPartition(*place, OFFSET_END) for place in places_of((self._names.worker_metrics,))]
        assign(self._source, [*(TopicPartition(*place, OFFSET_BEGINNING) for place in places), *metrics])
        deadline_s = time.monotonic() + REGISTRY_TIMEOUT_S
        while any(self._next.get(place, 0) < end for place, end in self._live_from.items()):
            if time.monotonic() > deadline_s:
                raise ProcessError(f"the registry of {self._old.app_id} cannot be read", remedy="Start again")
            self._step()
        n_moved = len(self._holders.moved())
        if n_moved:
            log.info("%d workers are not copied: bridges of %s feed them", n_moved, self._new.app_id)

    def _known_rows(self) -> dict[RankId, list[BlockKey]]:
        """Return the rows of pooled blocks that the new scope has from another run."""
        known: defaultdict[RankId, list[BlockKey]] = defaultdict(list)
        for (_, partition), end in log_ends(self._new, places_of((topics(self._new).cxl_events,))).items():
            if end:
                for block in self._applied_tables(self._new, partition).pooled:
                    known[block.owner].append(block)
        return known

    def _load(self, partition: int, known: dict[RankId, list[BlockKey]] | None = None) -> None:
        """Restate the ranks of a partition, and follow its events from then on. known: see restate."""
        if not self._writer.flush(OWNER_TIMEOUT_S):
            raise KvStreamsError(
                f"Kafka at {self._new.kafka} takes no records", remedy="Check that Kafka, and start the command again"
            )
        tables = self._applied_tables(self._old, partition)
        self._target.read()  # so that no rank is restated that has moved meanwhile
        leases, moved = self._holders.lease_ms, self._holders.moved()
        n_ranks = restate(self._new, self._writer.kafka, tables, leases, moved, known or {})
        where = [TopicPartition(topic, partition, tables.applied[topic] + 1) for topic in self._events]
        if partition in self._loaded_s:
            for each in where:
                self._source.seek(each)
        else:
            self._source.incremental_assign(where)
        self._next |= {(each.topic, partition): each.offset for each in where}
        self._until = AppliedUntil()
        self._loaded_s[partition] = time.monotonic()
        log.info("partition %d: %d ranks are restated", partition, n_ranks)

    def _applied_tables(self, settings: ScopeSettings, partition: int) -> PartitionTables:
        """Return a partition's tables once its owner has applied what the sources have now."""
        names = topics(settings)
        ends = log_ends(settings, [(spec.name, partition) for spec in (names.kv_events, names.cxl_events)])
        deadline_s = time.monotonic() + OWNER_TIMEOUT_S
        while True:
            tables = read_tables(settings, partition)
            if all(tables.applied[topic] >= end - 1 for (topic, _), end in ends.items()):
                return tables
            if time.monotonic() > deadline_s:
                raise ProcessError(
                    f"no owner has applied the events of partition {partition} of {settings.app_id}",
                    remedy="Run Faust workers on both scopes",
                )
            time.sleep(_OWNER_POLL_S)

    def _note_request(self, request: ResyncRequest) -> None:
        """Load a partition again whose rank an owner of the new scope asks for in vain."""
        worker_id = request.rank.worker_id
        partition = partition_of(worker_id, self._old.partitions)
        loaded_s = self._loaded_s.get(partition)
        if loaded_s is None or request.attempt < RESYNC_ATTEMPTS or self._holders.has_moved(worker_id):
            return
        if time.monotonic() - loaded_s > RELOAD_EVERY_S and partition not in self._due:
            log.warning("rank %s lacks events on the new scope (%s); it is loaded again", request.rank, request.reason)
            self._due.add(partition)

    # -- following -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Copy what has arrived, and release what waited for it."""
        self._target.read()
        for message in consume(self._source, READ_BATCH_RECORDS, _POLL_S):
            self._take(message)
        if self._writer.flush(_FLUSH_S):
            self._until.note_applied(self._followed())
        while self._readings:
            self._note_reading(self._readings.popleft())
        self._release()

    def _take(self, message: Message) -> None:
        """Copy an event, or let a record of the registry or of worker-metrics wait."""
        place, offset = place_of(message)
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                self._next[place] = max(offset, self._next.get(place, 0))
            else:
                check_error(error, *place, offset)
            return
        key, value = message.key() or b"", message.value()
        self._next[place] = offset + 1
        if place[0] == self._names.kv_events.name:
            self._writer.copy_batch(place[1], key, value)
        elif place[0] == self._names.cxl_events.name:
            self._writer.copy_transition(place[1], key, value)
        elif not self._is_over(place, offset, key):
            if place[0] == self._names.workers.name:
                self._holders.note_old(decoded_worker(self._old, key, value))
            self._waiting.add(place, offset, key, value, _now_ms())

    def _is_over(self, place: Place, offset: int, key: bytes) -> bool:
        """Whether a record is an avoidance that was there before: readers would count its time from now on."""
        return key.startswith(AVOIDANCES.keys.prefix) and offset < self._live_from.get(place, 0)

    def _followed(self) -> dict[str, SourceOffset]:
        """Up to where the events of each followed partition are read."""
        return {
            _name(topic, partition): SourceOffset(self._ids.get(topic, ""), self._next[topic, partition])
            for topic in self._events
            for partition in self._loaded_s
        }

    def _note_reading(self, reading: TopicReading) -> None:
        for topic in (*self._events, self._names.workers.name, self._names.worker_metrics.name):
            if topic in reading.ids and self._ids.setdefault(topic, reading.ids[topic]) != reading.ids[topic]:
                raise OffsetLost(f"{topic} was recreated", remedy="Start the command again")
        self._waiting.note_ends(reading.asked_ms, reading.ends)
        ends: dict[str, SourceOffset] = {}
        for partition in self._loaded_s:
            of_partition = reading.ends_of(self._events, partition)
            if of_partition is None:
                return  # the broker did not answer
            ends |= {_name(topic, partition): end for topic, end in of_partition.items()}
        self._until.note_ends(reading.asked_ms, ends)

    def _release(self) -> None:
        """Copy the records of the registry and of worker-metrics whose turn it is."""
        now_ms = _now_ms()
        until_ms = self._until.at_ms if self._loaded_s else now_ms
        for record in self._waiting.due(until_ms, now_ms):
            if self.is_following or not record.is_pulse:
                self._writer.copy_record(record)

    def _log_state(self) -> None:
        at_ms = self._until.at_ms
        n_moved = len(self._holders.moved())
        n_left = sum(not self._holders.has_moved(worker_id) for worker_id in self._holders.lease_ms)
        log.info(
            "%d records copied, %s; bridges of the new scope feed %d of %d workers",
            self._writer.n_copied,
            "not up to date yet" if at_ms is None else f"up to {_now_ms() - at_ms} ms ago",
            n_moved,
            n_moved + n_left,
        )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _name(topic: str, partition: int) -> str:
    return f"{topic} [{partition}]"

"""One partition of the tables: its thread, its queue, and the order of effects.

What lives here: what happens to a batch in which order, and how a partition is opened again after any failure. What
must not: which records are taken (source_queue), how far the sources are applied (applied_sources), when a batch ends
(pacing), what a record means (the reducers), what a transaction contains (transactions), how a store and a reducer are
brought up to date (opening), asyncio, Faust.

A batch of one partition is one Kafka transaction: changed records of every table, dead letters, and the partition
record. Every batch has these effects, in this order; the code below numbers them again (docs/architecture.md):

1. decode, or make a dead letter       (reducer)
2. fence by incarnation                (reducer)
3. verdict: apply, duplicate, gap      (reducer; by source offset here)
4. apply to memory                     (reducer)
5. commit the transaction
6. write RocksDB, values and changelog offsets in one batch
7. acknowledge, in offset order

A batch is kept until it is acknowledged. If anything fails between 4 and 6, the partition drops its memory and its
producer, fences every older producer, reads the changelog to its end and processes the same batch again; records that
the log already contains are duplicates then. Only the owner may do that: an agent that was suspended until another one
took over would otherwise fence its successor. The suspended agent's own Faust does not yet know of the takeover, so the
partition asks the group's coordinator which worker is the owner.

State: the current batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaException

from streams.errors import BadRecord, KvStreamsError, TableError
from streams.kafka.applied_until import Lag, SourceOffset
from streams.tables.applied_sources import AppliedSources
from streams.tables.opening import OpenedTables, open_tables
from streams.tables.pacing import PARTITION_RECORD_EVERY_S, Pacer, interval_s
from streams.tables.records import PARTITION_KEY, PartitionRecord, SourceProgress, encode_partition
from streams.tables.reducer import Reducer, SourceRecord
from streams.tables.source_queue import SourceQueue
from streams.tables.standby import Standby
from streams.tables.transactions import TransactionWriter
from streams.tables.wiring import PartitionWiring

log = logging.getLogger(__name__)

#: Time between two flushes of a store. A killed worker loses at most the writes of this time on disk, and reads them
#: from the changelog when it starts again.
FLUSH_EVERY_S = 600.0

#: The wait between two attempts to open a partition, doubled up to the second number.
REOPEN_BACKOFF_S = (0.2, 5.0)

#: How often a partition that may have moved to another worker asks whether it is ours, until it is or Faust revokes it.
OWNERSHIP_POLL_S = 0.5

#: A record that makes the reducer fail this many times, which is a bug of ours, becomes a dead letter.
REDUCER_FAILURES_MAX = 3

#: How long a revoked partition may take to finish its running batch.
STOP_TIMEOUT_S = 15.0

#: Keys of `TablePartition.counts`, all counted since the process started: records that were processed, duplicates
#: included (`applied`); those of them that became dead letters (`dead_letters`); committed transactions
#: (`transactions`); failures after which the partition was opened again (`reopened`); partitions that were opened with
#: what their standby had in memory (`taken_over`).
PARTITION_COUNTS = ("applied", "dead_letters", "transactions", "reopened", "taken_over")


class TablePartition:
    """The owner of one partition while it is assigned.

    The feeding loop's thread calls `offer` and `skip_to`, and any thread `note_ends`; everything else happens on the
    partition's own thread.
    """

    def __init__(
        self,
        partition: int,
        wiring: PartitionWiring,
        counts: Counter[str] | None = None,
        standby: Standby | None = None,
    ) -> None:
        """counts: what earlier owners of this partition in this process have counted, to continue from.

        standby: of this partition in this process, whose copy it takes over.
        """
        self.partition = partition
        self._wiring = wiring
        self._lock = threading.Condition()  # guards the queue, the sources and the thread's state
        self._queue = SourceQueue(wiring.settings)
        self._sources = AppliedSources()
        self._stopping = False
        self._is_open = False
        self._suspended = False
        self._at_rest = False  # suspended, and the running batch is finished
        # Whether the thread waits until the next transaction may begin. Further records do not wake it up, which would
        # cost more than taking them.
        self._pacing = False
        self._batch: list[SourceRecord] = []
        self._standby = standby  # until its copy is taken over
        self._tables: OpenedTables | None = None
        self._writer = TransactionWriter(partition, wiring)
        self._pacer = Pacer()
        self._written_at = 0.0
        self._flushed_at = 0.0
        # Of the record that made the reducer fail last: topic and offset, and how often it did.
        self._failing: tuple[tuple[str, int], int] | None = None
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._thread = threading.Thread(target=self._run, name=f"table-{partition}", daemon=True)

    def start(self) -> None:
        """Start to open; records are refused until `opened` is called."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the running batch and release everything; queued records are dropped without acknowledgement."""
        with self._lock:
            self._stopping = True
            self._queue.close()
            self._lock.notify_all()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("partition %d did not stop within %g s", self.partition, STOP_TIMEOUT_S)
        elif self._standby is not None:
            self._standby.stop()

    def suspend(self) -> bool:
        """Finish the running batch and write nothing more until `resume`.

        Queued records are dropped without acknowledgement. Memory, RocksDB and producer are kept, for a partition that
        a rebalance returns to its owner; if another worker owned it meanwhile, the producer is fenced, and the
        partition is opened again. Returns False if there is nothing to keep because the partition is not open; it must
        be stopped then.
        """
        with self._lock:
            self._suspended = True
            self._queue.close()
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._at_rest or not self._is_open, STOP_TIMEOUT_S)
            return self._at_rest

    def resume(self) -> None:
        """Continue after `suspend`; records are refused until `opened` is called."""
        with self._lock:
            self._suspended = False
            self._lock.notify_all()

    def offer(self, records: Sequence[SourceRecord]) -> int | None:
        """Take records of one topic that one fetch returned, in order of their offsets, from the next offset on.

        Offsets missing between two of them have no record for a consumer: they are transaction markers, or records of
        aborted transactions. Offsets missing before the first one may be records that were fetched earlier and not
        taken.

        Returns None if all were taken or had been applied before. Otherwise returns the next offset: what follows was
        dropped without acknowledgement, and the source must be sought back. -1 means that the partition is still
        opening and takes nothing. A full partition takes nothing either and returns None; once it has drained, the
        source is sought back.
        """
        with self._lock:
            if not self._queue.is_open:
                return -1
            if self._queue.is_full:
                return None
            n_queued = len(self._queue)
            missing, applied_before = self._queue.offer(records, self._sources.applied(records[0].topic))
            if len(self._queue) > n_queued and (not self._pacing or self._queue.has_full_batch):
                self._lock.notify_all()
        if applied_before:
            # The offset alone shows that these were applied; they need no verdict.
            self._wiring.acknowledge(applied_before)
        return missing

    def counts(self) -> Mapping[str, int]:
        """A snapshot of the totals, one for each of PARTITION_COUNTS; any thread may take it."""
        return {name: self._counts[name] for name in PARTITION_COUNTS}

    def lag(self) -> Lag:
        """How far the table is behind its sources; any thread may ask."""
        with self._lock:
            return self._sources.lag(_monotonic_ms())

    def next_offset(self, topic: str) -> int | None:
        """Next offset to enqueue; None while opening."""
        with self._lock:
            return self._queue.next_offset(topic)

    def skip_to(self, topic: str, next_offset: int, offset: int, lost: bool) -> None:
        """Take note that the log has nothing from `next_offset` up to `offset`; `lost` if it once had.

        Nothing happens if another offset is next by now: the partition was opened again meanwhile, and may need records
        before this stretch.
        """
        with self._lock:
            if self._queue.skip(topic, next_offset, offset):
                self._sources.skip(topic, next_offset, offset, lost)
                self._lock.notify_all()

    def note_ends(self, asked_ms: int, ends: Mapping[str, SourceOffset]) -> None:
        """Take in where the sources' logs end, as the broker was asked for at this time, monotonic, in ms."""
        with self._lock:
            if not self._queue.is_open:
                return  # what is applied is not known before the partition is open
            if self._sources.note_ends(asked_ms, ends):
                self._lock.notify_all()
            if self._sources.recreated is not None:
                return  # the partition is opened again
            for topic, end in ends.items():
                applied = self._sources.applied(topic)
                if self._writer.marker_follows(topic, applied, end.offset, asked_ms):
                    self.skip_to(topic, applied + 1, end.offset, False)

    def note_changelogs(self, ids: Mapping[str, str]) -> None:
        """Take in the ids of the topics that exist: the partition is opened again if a changelog was recreated.

        A commit notices only offsets that go backwards. Those of a new changelog do not if it has grown past the end
        of the old one, or if a transaction began in the old one.
        """
        with self._lock:
            if not self._queue.is_open:
                return  # it is opened with the ids of that moment
            for table in self._wiring.tables:
                written = self._writer.topic_ids[table.changelog_topic]
                if ids.get(table.changelog_topic, written) != written:
                    self._sources.recreated = table.changelog_topic
                    self._lock.notify_all()

    @property
    def queued(self) -> int:
        """Number of queued records."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Bytes of their values."""
        return self._queue.n_bytes

    @property
    def is_full(self) -> bool:
        """Whether so much is queued, in records or bytes, that the source must be paused."""
        return self._queue.is_full

    @property
    def has_drained(self) -> bool:
        """Whether so little is queued that a paused source may continue."""
        return self._queue.has_drained

    def _run(self) -> None:
        backoff = REOPEN_BACKOFF_S[0]
        failed = False
        while not self._stopping:
            try:
                if failed and not self._await_ownership():
                    return
                self._open()
                backoff = REOPEN_BACKOFF_S[0]
                while not self._stopping:
                    if self._suspended:
                        self._rest()
                    else:
                        self._step()
            except Exception as exc:  # only `stop` may end this thread
                if self._stopping:
                    log.info("partition %d has ended: %s", self.partition, exc, exc_info=not _expected(exc))
                    return
                failed = True
                self._counts["reopened"] += 1
                log.log(
                    logging.INFO
                    if self._sources.recreated
                    else logging.WARNING,  # a recreated source is logged once, by topic; a changelog when it is opened
                    "partition %d is opened again: %s",
                    *(self.partition, exc),
                    exc_info=not _expected(exc),
                )
                with self._lock:
                    self._is_open = False
                    self._lock.notify_all()
                    if not self._stopping:
                        self._lock.wait(backoff)
                backoff = min(backoff * 2, REOPEN_BACKOFF_S[1])
            finally:
                self._close()

    def _await_ownership(self) -> bool:
        """Wait until the group's coordinator assigns the partition to us; False if it was stopped meanwhile."""
        logged = False
        while not self._stopping:
            if self._wiring.is_ours(self.partition):
                return True
            if not logged:
                log.warning("partition %d is assigned to another worker or to none: nothing is written", self.partition)
                logged = True
            with self._lock:
                if not self._stopping:
                    self._lock.wait(OWNERSHIP_POLL_S)
        return False

    def _rest(self) -> None:
        """Keep everything open until `resume`, then verify that no other worker has written, and request records."""
        with self._lock:
            self._at_rest = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._stopping or not self._suspended)
            self._at_rest = False
            if self._stopping:
                return
        self._process([])  # fails if another worker has fenced our producer
        self._request_records()

    def _open(self) -> None:
        # The writer fences earlier owners, so the changelog cannot grow without us. The folder is ours too from here
        # on, since the partition's previous thread in this process has been stopped.
        if self._standby is not None:
            self._standby.ask_to_end()
        self._writer.open()
        copy = self._standby.release() if self._standby is not None else None
        self._standby = None
        followed = copy.reducer if copy is not None else None
        self._tables = tables = open_tables(self.partition, self._wiring, self._writer, self._check_needed, copy)
        if tables.reducer is followed:
            self._counts["taken_over"] += 1
            log.info("partition %d is taken over from its standby", self.partition)
        for topic in tables.recreated:
            self._wiring.source_recreated(topic, tables.sources[topic].topic_id)
        with self._lock:
            self._sources.open(tables.sources, tables.recreated)
        self._written_at = 0.0
        self._flushed_at = time.monotonic()  # opening has flushed
        if self._batch:
            # The kept batch: records that the log contains are at or below the applied offset by now, and the rest is
            # processed again.
            kept, self._batch = self._batch, []
            if self._sources.follows(kept):
                self._process(kept)
        self._is_open = True
        self._request_records()

    def _check_needed(self) -> None:
        """Raise TableError if the partition was stopped, by a rebalance or at the worker's end."""
        if self._stopping:
            raise TableError(f"partition {self.partition} was stopped while it was opened")

    def _request_records(self) -> None:
        """Request the records that follow the applied ones."""
        with self._lock:
            if self._stopping or self._suspended:
                return
            self._queue.close()  # drops what is left of an earlier attempt
            next_offsets = self._sources.restart()
            self._queue.open(next_offsets.copy())
        self._wiring.opened(self.partition, next_offsets)

    def _step(self) -> None:
        if self._sources.recreated is not None:
            raise TableError(f"{self._sources.recreated} was deleted and recreated")
        batch = self._take()
        due = time.monotonic() - self._written_at >= PARTITION_RECORD_EVERY_S
        if batch or self._sources.lost or due or self._has_caught_up():
            self._process(batch)

    def _has_caught_up(self) -> bool:
        with self._lock:
            return self._sources.has_caught_up(_monotonic_ms())

    def _take(self) -> list[SourceRecord]:
        """Wait for records, or until the partition record is due; take what is queued, limited in number and bytes."""
        with self._lock:
            due = self._written_at + PARTITION_RECORD_EVERY_S - time.monotonic()
            if not self._queue and not self._stopping and not self._suspended and due > 0 and not self._has_caught_up():
                self._lock.wait(due)
            pause_s = interval_s(self._wiring.partitions_open(), answers=self._wiring.answers())
            wait_s = self._pacer.next_at(pause_s) - time.monotonic()
            if self._queue and wait_s > 0:
                self._pacing = True
                self._lock.wait_for(lambda: self._stopping or self._suspended or self._queue.has_full_batch, wait_s)
                self._pacing = False
            taken_at = time.monotonic()
            batch = self._queue.take_batch()
            self._pacer.took(len(batch), taken_at, pause_s)
            drained = bool(batch) and self._queue.has_drained
        if drained:
            self._wiring.drained(self.partition)
        return batch

    def _process(self, batch: list[SourceRecord]) -> None:
        """Carry out the seven effects of one batch; raises if the partition must be opened again."""
        assert self._tables is not None
        store, reducer = self._tables.store, self._tables.reducer
        self._batch = batch
        effect = self._wiring.on_effect or _no_fault
        lost = self._sources.lost
        if lost:
            reducer.source_lost()
        dead: list[tuple[SourceRecord, BadRecord]] = []
        applied = self._sources.progress
        # A record at or below the applied offset is a duplicate: the log contains its effects.
        fresh = [record for record in batch if record.offset > applied[record.topic].applied_offset]
        decoded = reducer.decode(fresh)
        for n_applied, (record, what) in enumerate(zip(fresh, decoded, strict=True), 1):
            effect(1)
            try:
                self._apply(reducer, record, what)  # effects 2 to 4
            except BadRecord as exc:
                dead.append((record, exc))
            effect(4)
            if reducer.full and record is not batch[-1]:
                batch, fresh = self._cut(batch, record), fresh[:n_applied]
                break
        with self._lock:
            self._sources.advance(fresh)
            applied_until_ms = self._sources.applied_until_ms or 0
        outgoing = reducer.tick(_monotonic_ms(), self._wiring.now_ms(), lambda: applied_until_ms)
        dead += reducer.take_refused()
        changes = reducer.take_changes()
        changes.setdefault(self._wiring.tables[0], []).append(
            (PARTITION_KEY.pack(self.partition), encode_partition(self._partition_record()))
        )
        positions = self._writer.commit(changes, outgoing, dead)  # effect 5
        effect(5)
        store.write(changes, positions)  # effect 6
        effect(6)
        self._batch = []
        if lost:
            self._sources.lost = False  # only now: after a failed attempt, the next reducer must learn of the loss too
        if batch:
            self._wiring.acknowledge([record.handle for record in batch])  # effect 7
        effect(7)
        self._written_at = time.monotonic()
        if self._written_at - self._flushed_at >= FLUSH_EVERY_S:
            store.flush()
            self._flushed_at = self._written_at
        self._counts["applied"] += len(batch)
        self._counts["dead_letters"] += len(dead)
        self._counts["transactions"] += 1

    def _cut(self, batch: list[SourceRecord], last: SourceRecord) -> list[SourceRecord]:
        """End the running batch after a record, since a transaction has limited time; the rest goes into the next."""
        n_done = next(n for n, record in enumerate(batch, 1) if record is last)
        with self._lock:
            self._queue.put_back(batch[n_done:])
        self._batch = batch[:n_done]
        return self._batch

    def _apply(self, reducer: Reducer[Any], record: SourceRecord, decoded: Any) -> None:
        """Pass a record to the reducer; one that always makes it fail becomes a dead letter, so that others proceed."""
        where = (record.topic, record.offset)
        n_failures = self._failing[1] if self._failing is not None and self._failing[0] == where else 0
        if n_failures >= REDUCER_FAILURES_MAX:
            raise BadRecord("internal_error", f"applying it failed {n_failures} times")
        try:
            reducer.apply(record, decoded)
        except BadRecord:
            raise
        except Exception:
            self._failing = (where, n_failures + 1)
            raise

    def _partition_record(self) -> PartitionRecord:
        now_ms = self._wiring.now_ms()
        with self._lock:
            sources = self._sources.write(_monotonic_ms())
        # A changelog's entry contains only the topic's id. A reader that finds this record in a recreated topic of the
        # same name sees that the id differs, so the rest of the table is missing there.
        changelogs = [
            SourceProgress(table.changelog_topic, self._writer.topic_ids[table.changelog_topic], -1, 0, -1, 0)
            for table in self._wiring.tables
        ]
        return PartitionRecord(self.partition, now_ms, self._wiring.owner, (*sources, *changelogs))

    def _close(self) -> None:
        with self._lock:
            self._queue.close()
            self._is_open = False
            self._lock.notify_all()
        if self._tables is not None:
            self._tables.store.close()
        self._tables = None
        self._writer.close()


def _no_fault(_: int) -> None:
    """Do nothing: the default when no fault point is armed."""


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _expected(exc: Exception) -> bool:
    return isinstance(exc, KafkaException | KvStreamsError)

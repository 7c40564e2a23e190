"""One partition of the tables: its thread, its producer, its RocksDB, and the order of effects.

What lives here: how source records become transactions, and how a partition is opened again after whatever went wrong.
What must not: what a record means (the reducer's), asyncio, Faust.

A batch of one partition is one Kafka transaction: changed records of every table, dead letters, and the partition
record. The effects of every batch, in this order and numbered again in the code (docs/architecture.md):

1. decode, or make a dead letter       (reducer)
2. fence by incarnation                (reducer)
3. verdict: apply, duplicate, gap      (reducer; by source offset here)
4. apply to memory                     (reducer)
5. commit the transaction
6. write RocksDB, values and changelog offsets in one batch
7. acknowledge, in offset order

A batch is kept until it is acknowledged. Whatever fails between 4 and 6 throws memory and producer away, fences every
older producer, reads the changelog to its end and judges the same batch again: what the log has is a duplicate then.
Only an owner does that: one that was paused until another took over would otherwise fence its successor. Whose the
partition is, the group's coordinator says, since a paused worker's own Faust does not know yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.errors import BadRecord, KvStreamsError, OffsetLost, TableError
from streams.kafka import as_record, dead_letter_headers, dead_letter_value, describe_topics, producer
from streams.settings import Settings, tables_path
from streams.tables.changelog import read_messages
from streams.tables.records import (
    PARTITION_PREFIX,
    Change,
    PartitionRecord,
    SourceProgress,
    decode_partition,
    encode_partition,
    partition_key,
)
from streams.tables.store import ChangelogPosition, Changes, PartitionStore, TableSpec
from streams.topics import TopicSpec

log = logging.getLogger(__name__)

#: Readers call a partition record older than 3 s stale; three may be late before that happens.
PARTITION_RECORD_EVERY_S = 1.0

#: A worker begins this many transactions a second at most, unless whole batches wait: each partition in its turn, so
#: that one of four waits for 10 ms. Each costs the broker four requests, be it of one record or of a hundred; at 1,000
#: records a second it did little else, and what was saved in waiting was lost in its queue.
TRANSACTIONS_PER_SECOND_MAX = 400

#: Where more records than this come between two of them, they wait for one another: twice as many, twice as long, at
#: most so many times. Ranks and runs that change again meanwhile are written once, and at thousands of records a second
#: it is that which broker and worker have no time for.
RECORDS_PER_TRANSACTION = 4
BATCH_WAIT_FACTOR_MAX = 5.0

#: How much of what is known of the rate is of the last transaction.
_RATE_WEIGHT = 0.1

#: Between two flushes of a store: the age of what a killed worker has on disk, which the changelog must still tell of.
FLUSH_EVERY_S = 600.0

#: Bytes of source records in one transaction: a batch must commit well within the transaction's timeout.
BATCH_BYTES_MAX = 1 << 20

#: `init_transactions` waits for an older producer's transaction to end; 0.5 s measured, the timeout is 10 s.
INIT_TIMEOUT_S = 30.0

#: A commit is repeated until it answers; after this the partition is opened again, which settles the outcome.
COMMIT_TIMEOUT_S = 30.0

#: Between two attempts to open a partition, doubled up to the second number.
REOPEN_BACKOFF_S = (0.2, 5.0)

#: A partition that may be another worker's by now is looked at this often, until it is ours or Faust takes it away.
OWNERSHIP_POLL_S = 0.5

#: The fault point inside an open transaction: its records are in the log, its commit is not.
IN_TRANSACTION = 0

#: Records of a table that begins anew that one transaction deletes.
TOMBSTONES_AT_ONCE = 1000

#: Times that one record may break the reducer, a fault of ours, before it goes to the dead letters.
REDUCER_FAILURES_MAX = 3

#: Bytes of a bad record's own headers that are kept with it.
HEADER_BYTES_MAX = 16 * 1024

#: How long a revoked partition may take to finish its running batch.
STOP_TIMEOUT_S = 15.0


Decoded = TypeVar("Decoded")


@dataclass(slots=True)
class SourceRecord:
    """One record as the source topic holds it. handle: what is acknowledged, opaque here; None where a later record's
    handle stands for this one too."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, str | bytes | None]]
    handle: Any = field(compare=False, default=None)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record for another topic, in the same transaction; its partition has our number."""

    topic: str
    key: bytes
    value: bytes | None


class Reducer(Protocol[Decoded]):
    """Pure state of one partition: source records in, changed records out."""

    def load(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> None:
        """Start from what a table holds; the partition record is not among the items."""

    def decode(self, records: Sequence[SourceRecord]) -> Sequence[Decoded]:
        """Effect 1 of many records: what `apply` takes, one for each."""

    def apply(self, record: SourceRecord, decoded: Decoded) -> None:
        """Effects 2 to 4. Raises BadRecord for what belongs to the dead letters, be it that it was not decoded."""

    @property
    def full(self) -> bool:
        """Whether so much has changed that it is committed before more is applied."""

    def source_lost(self) -> None:
        """Records of the source were lost before this partition saw them."""

    def tick(self, monotonic_ms: int, wall_ms: int, applied_until: Callable[[], int]) -> list[Outgoing]:
        """What time alone brings, between `apply` and `take_changes`, at least every PARTITION_RECORD_EVERY_S.

        applied_until: up to what time, on the monotonic clock, all that was appended was applied; it asks the broker.
        """

    def take_refused(self) -> list[tuple[SourceRecord, BadRecord]]:
        """Records applied earlier that have become dead letters since, as they came."""

    def take_changes(self) -> dict[TableSpec, list[Change]]:
        """What changed since the last call, by table; a table may be missing."""


@dataclass(frozen=True, slots=True)
class PartitionWiring:
    """What a partition is told once: its tables and topics, and how to reach the loop that feeds it.

    Called on the partition's thread: acknowledge (handles, in offset order), drained (there is room again), opened
    (topic to the first offset wanted). is_ours asks the group's coordinator whether a partition is this worker's.
    source_end gives the end of a source's log as last seen, or -1; log_end asks the broker for it, and raises where
    none answers. on_effect: a fault that a test armed. partitions_open: how many this worker has. turn: held while what
    was read of a changelog is worked upon; four partitions that are opened at once would hand the interpreter to each
    other at every call into RocksDB, and take twice as long as one behind the other (measured). Nobody waits for a
    broker with it.
    """

    settings: Settings
    tables: tuple[TableSpec, ...]
    sources: tuple[TopicSpec, ...]
    dead_letters: TopicSpec
    owner: str
    make_reducer: Callable[[], Reducer[Any]]
    acknowledge: Callable[[list[Any]], None]
    drained: Callable[[int], None]
    opened: Callable[[int, dict[str, int]], None]
    is_ours: Callable[[int], bool]
    source_end: Callable[[str, int], int]
    log_end: Callable[[str, int], int]
    on_effect: Callable[[int], None] | None
    now_ms: Callable[[], int]
    partitions_open: Callable[[], int] = lambda: 1
    turn: threading.Lock = field(default_factory=threading.Lock)


class TablePartition:
    """Owner of one partition while it is assigned. `offer` and `skip_to` come from the feeding loop's thread, all else
    happens on the partition's own."""

    def __init__(self, partition: int, wiring: PartitionWiring) -> None:
        self.partition = partition
        self._wiring = wiring
        self._lock = threading.Condition()
        self._queue: deque[SourceRecord] = deque()
        self._queued_bytes = 0
        self._next: dict[str, int] | None = None  # topic to the next offset to enqueue; None while opening
        self._applied: dict[str, int] = {}
        self._skipped: dict[str, tuple[int, int]] = {}  # topic to first and last offset of a stretch without records
        self._marked: dict[str, int] = {}  # source topic to the last record of our own there; its marker lies behind it
        # When the broker was last asked for the sources' ends, and what it said, until we have come so far.
        self._asked: tuple[int, dict[str, int]] | None = None
        self._applied_until_ms = 0
        self._lost = False
        self._stopping = False
        self._is_open = False
        self._suspended = False
        self._at_rest = False  # suspended, and the running batch is finished
        self._batch: list[SourceRecord] = []
        self._sources: dict[str, SourceProgress] = {}
        self._behind_since_ms: dict[str, int] = {}
        self._reducer: Reducer[Any] | None = None
        self._store: PartitionStore | None = None
        self._producer: Producer | None = None
        self._topic_ids: dict[str, str] = {}
        self._tombstones_kept_ms: dict[str, int] = {}  # by changelog: how long it tells of what was deleted
        self._ends: dict[str, int] = {}  # by changelog: the offset behind what we read or wrote last
        self._written_at = 0.0
        self._flushed_at = 0.0
        self._took_at = 0.0
        self._came = 0.0  # records that come between two transactions, smoothed
        self._breaker: tuple[str, int] | None = None
        self._breaks = 0
        self.counts = {"applied": 0, "dead_letters": 0, "transactions": 0, "reopened": 0}
        self._thread = threading.Thread(target=self._run, name=f"table-{partition}", daemon=True)

    def start(self) -> None:
        """Begin opening; records are refused until `opened` is called."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the running batch and release everything; what is queued is dropped un-acknowledged."""
        with self._lock:
            self._stopping = True
            self._next = None
            self._lock.notify_all()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("partition %d did not stop in %g s", self.partition, STOP_TIMEOUT_S)

    def suspend(self) -> bool:
        """Finish the running batch and write nothing more until `resume`; what is queued is dropped un-acknowledged.

        Memory, RocksDB and producer are kept, for a partition that a rebalance gives back to its owner. Had another
        been its owner meanwhile, the producer is fenced, and the partition is opened again. False where there is
        nothing to keep, since the partition is not open; it is to be stopped then.
        """
        with self._lock:
            self._suspended = True
            self._next = None
            self._forget_queue()
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._at_rest or not self._is_open, STOP_TIMEOUT_S)
            return self._at_rest

    def resume(self) -> None:
        """Go on after `suspend`; records are refused until `opened` is called."""
        with self._lock:
            self._suspended = False
            self._lock.notify_all()

    def offer(self, records: Sequence[SourceRecord]) -> int | None:
        """Take records of one topic, as one fetch gave them, in order of their offsets, from the next one on.

        Between two of them the log has nothing: the marker of a transaction, or what one left that was aborted. Before
        the first there may be records that were fetched earlier and not taken.

        Returns None when all were taken or are known already, else the offset that is wanted instead; what follows is
        then dropped un-acknowledged and the source must be sought back. -1: none is wanted yet, the partition is
        opening. A full partition takes nothing: when it has drained, the source is sought back.
        """
        known: list[Any] = []
        missing: int | None = None
        with self._lock:
            if self._next is None:
                return -1
            if self.is_full:
                return None
            topic = records[0].topic
            next_offset, applied = self._next.get(topic, 0), self._applied.get(topic, -1)
            before = -1
            for record in records:
                if 0 <= before < next_offset < record.offset:
                    next_offset = record.offset
                before = record.offset
                if record.offset == next_offset:
                    next_offset += 1
                    self._queue.append(record)
                    self._queued_bytes += len(record.value or b"")
                elif record.offset > next_offset:
                    missing = next_offset
                    break
                elif record.offset <= applied:
                    known.append(record.handle)
            if next_offset != self._next.get(topic, 0):
                self._next[topic] = next_offset
                self._lock.notify_all()
        if known:
            # Applied before, delivered again: the offset tells, so no verdict is needed.
            self._wiring.acknowledge(known)
        return missing

    def next_offset(self, topic: str) -> int | None:
        """Next offset to enqueue; None while opening."""
        with self._lock:
            return None if self._next is None else self._next.get(topic, 0)

    def skip_to(self, topic: str, next_offset: int, offset: int, lost: bool) -> None:
        """The log has nothing between the offset that was wanted and this one; `lost` if it had.

        Where another is wanted by now the partition was opened again meanwhile, and may want what lies before.
        """
        with self._lock:
            if self._next is not None and self._next.get(topic, 0) == next_offset < offset:
                self._next[topic] = offset
                first, last = self._skipped.get(topic, (next_offset, next_offset - 1))
                self._skipped[topic] = (first if last + 1 == next_offset else next_offset, offset - 1)
                self._lost = self._lost or lost
                self._lock.notify_all()

    @property
    def queued(self) -> int:
        """Records waiting."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Bytes of their values."""
        return self._queued_bytes

    @property
    def is_full(self) -> bool:
        """Whether so much waits, in records or bytes, that the source is to be paused."""
        return self._waits_for(1)

    @property
    def has_drained(self) -> bool:
        """Whether so little waits that a paused source may go on."""
        return not self._waits_for(2)

    def _waits_for(self, part: int) -> bool:
        settings = self._wiring.settings
        return (
            len(self._queue) > settings.queue_records_high // part
            or self._queued_bytes > settings.queue_bytes_high // part
        )

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
            except Exception as exc:  # nothing may end this thread but being stopped
                if self._stopping:
                    log.info("partition %d has ended: %s", self.partition, exc, exc_info=not _expected(exc))
                    return
                failed = True
                self.counts["reopened"] += 1
                log.warning("partition %d is opened again: %s", self.partition, exc, exc_info=not _expected(exc))
                with self._lock:
                    self._is_open = False
                    self._lock.notify_all()
                    if not self._stopping:
                        self._lock.wait(backoff)
                backoff = min(backoff * 2, REOPEN_BACKOFF_S[1])
            finally:
                self._close()

    def _await_ownership(self) -> bool:
        """Wait until the group says that the partition is ours; False where it was taken away meanwhile."""
        logged = False
        while not self._stopping:
            if self._wiring.is_ours(self.partition):
                return True
            if not logged:
                log.warning("partition %d is another worker's, or nobody's yet: nothing is written", self.partition)
                logged = True
            with self._lock:
                if not self._stopping:
                    self._lock.wait(OWNERSHIP_POLL_S)
        return False

    def _rest(self) -> None:
        """Hold what is open until `resume`, then see that nobody else has written, and ask for records again."""
        with self._lock:
            self._at_rest = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._stopping or not self._suspended)
            self._at_rest = False
            if self._stopping:
                return
        self._process([])
        self._begin()

    def _open(self) -> None:
        wiring = self._wiring
        settings = wiring.settings
        self._producer = table_producer(settings, self.partition)
        # Fences whoever owned the partition before, so that the changelog cannot grow behind our back.
        self._producer.init_transactions(INIT_TIMEOUT_S)
        # From here on we own the folder too, since the old thread of this process has been stopped.
        scope = scope_of(settings, self.partition)
        self._store = PartitionStore(tables_path(settings) / scope, scope, settings.rocksdb_cache_mb)
        states = describe_topics(settings, (*wiring.sources, *_changelog_specs(wiring)))
        if gone := sorted(name for name, state in states.items() if state is None):
            # The copy on disk is kept: what is gone may be back.
            raise TableError(f"Kafka has no topic {', '.join(gone)}", remedy="`kvstreams topics create` creates it")
        self._topic_ids = {name: state.topic_id for name, state in states.items() if state is not None}
        self._tombstones_kept_ms = {
            name: int(state.config["delete.retention.ms"])
            for name, state in states.items()
            if state is not None and "delete.retention.ms" in state.config
        }
        reducer, record = self._load_or_rebuild(self._store)
        if record is not None and self._is_torn(record):
            self._clear_tables(self._store)
            reducer, record = self._wiring.make_reducer(), None
            for table in self._wiring.tables:
                reducer.load(table, iter(()))
        self._adopt_sources(record, reducer)
        self._reducer = reducer
        self._written_at = 0.0
        self._flushed_at = time.monotonic()  # the last of `_catch_up`
        if self._batch:
            # The kept batch: what of it the log has is known by now, the rest is judged again.
            kept, self._batch = self._batch, []
            if self._follows(kept):
                self._process(kept)
        self._is_open = True
        self._begin()

    def _begin(self) -> None:
        """Ask for the records behind those that are applied."""
        with self._lock:
            if self._stopping or self._suspended:
                return
            self._forget_queue()
            self._skipped.clear()
            self._asked = None
            self._next = {topic: applied + 1 for topic, applied in self._applied.items()}
            next_offset = dict(self._next)
        self._wiring.opened(self.partition, next_offset)

    def _follows(self, kept: list[SourceRecord]) -> bool:
        """Whether nothing lies between what is applied and these; a table that begins anew is behind them."""
        firsts = {record.topic: record.offset for record in reversed(kept)}
        return all(first <= self._done_with(topic) + 1 for topic, first in firsts.items())

    def _done_with(self, topic: str) -> int:
        """Last offset that is applied, or lies in a stretch without records right behind.

        A stretch further on waits: what lies before it may have been taken and dropped again, un-acknowledged.
        """
        applied = self._applied[topic]
        first, last = self._skipped.get(topic, (0, -1))
        return max(applied, last) if first <= applied + 1 else applied

    def _load_or_rebuild(self, store: PartitionStore) -> tuple[Reducer[Any], PartitionRecord | None]:
        """Load; a store that cannot be gone on with is emptied first, and its changelogs are read from their starts."""
        try:
            stale = [reason for table in self._wiring.tables if (reason := self._stale(table, store.position(table)))]
            if stale:
                store.rebuild(stale[0])
            return self._load(store)
        except OffsetLost as exc:
            store.rebuild(str(exc))
        except KvStreamsError:
            raise  # a changelog that cannot be read, or a full disk, is no fault of the files
        except Exception as exc:
            store.rebuild(f"it cannot be read: {exc}", aside=True)
        return self._load(store)

    def _stale(self, table: TableSpec, position: ChangelogPosition | None) -> str | None:
        """Why a store at this position cannot be brought to its changelog's end; None where it can."""
        if position is None:
            return None
        if position.topic_id != self._topic_ids[table.changelog_topic]:
            return f"{table.changelog_topic} was recreated"
        kept_ms = self._tombstones_kept_ms[table.changelog_topic]
        # Half, since clocks differ and reading takes time; a time to come is as little to be trusted as an old one.
        if abs(age_ms := self._wiring.now_ms() - position.as_of_ms) > kept_ms // 2:
            return (
                f"it is {age_ms / 3_600_000:.3g} h old, and {table.changelog_topic} tells for "
                f"{kept_ms / 3_600_000:.3g} h what was deleted"
            )
        return None

    def _is_torn(self, record: PartitionRecord) -> bool:
        """Whether a changelog was recreated under its owner: it has changes of a state, and not the state."""
        changelogs = {table.changelog_topic for table in self._wiring.tables}
        return any(
            source.topic in changelogs and source.topic_id != self._topic_ids[source.topic] for source in record.sources
        )

    def _clear_tables(self, store: PartitionStore) -> None:
        """Delete every record but the partition's, which is replaced behind them: until then the table is torn."""
        log.warning(
            "a changelog of partition %d was recreated under its owner: the table begins anew from its sources",
            self.partition,
        )
        for table in self._wiring.tables:
            keys = [key for key, _ in store.items(table) if not key.startswith(PARTITION_PREFIX)]
            for first in range(0, len(keys), TOMBSTONES_AT_ONCE):
                changes = {table: [(key, None) for key in keys[first : first + TOMBSTONES_AT_ONCE]]}
                store.write(changes, self._commit(changes, [], []))

    def _load(self, store: PartitionStore) -> tuple[Reducer[Any], PartitionRecord | None]:
        """Bring every table to its changelog's end, and memory to the tables."""
        begun_ms = self._wiring.now_ms()  # one for all: the tables of a store are equally old
        for table in self._wiring.tables:
            self._catch_up(store, table, begun_ms)
        store.flush()
        with self._wiring.turn:
            self._go_on()
            reducer = self._wiring.make_reducer()
            record: PartitionRecord | None = None
            for table in self._wiring.tables:
                held = list(store.items(table))
                for key, value in held:
                    if key == partition_key(self.partition):
                        record = decode_partition(key, value)
                reducer.load(table, (item for item in held if not item[0].startswith(PARTITION_PREFIX)))
        return reducer, record

    def _go_on(self) -> None:
        """Raise TableError where nobody waits any more for what is opened: a rebalance, or a worker's end, does."""
        if self._stopping:
            raise TableError(f"partition {self.partition} was stopped while it was opened")

    def _catch_up(self, store: PartitionStore, table: TableSpec, begun_ms: int) -> None:
        """Bring the store to the end of a changelog."""
        topic_id = self._topic_ids[table.changelog_topic]
        position = store.position(table)
        # On the way it is as old as where it began: what was deleted since may lie ahead.
        as_of_ms = begun_ms if position is None else position.as_of_ms

        def keep(records: list[Message]) -> None:
            last = records[-1].offset()
            assert last is not None  # only an error may lack it
            with self._wiring.turn:
                self._go_on()
                changes = [(record.key() or b"", record.value()) for record in records]
                store.write({table: changes}, {table: ChangelogPosition(topic_id, last + 1, as_of_ms)})

        start = None if position is None else position.next_offset
        end = read_messages(self._wiring.settings, table.changelog_topic, self.partition, start, keep)
        store.write({}, {table: ChangelogPosition(topic_id, end, begun_ms)})
        self._ends[table.changelog_topic] = end

    def _adopt_sources(self, record: PartitionRecord | None, reducer: Reducer[Any]) -> None:
        known = {source.topic: source for source in record.sources} if record else {}
        for spec in self._wiring.sources:
            topic_id = self._topic_ids[spec.name]
            source = known.get(spec.name)
            if source is not None and source.topic_id != topic_id:
                log.warning("%s was recreated: its offsets start anew", spec.name)
                self._skipped.pop(spec.name, None)
                reducer.source_lost()
                source = None
            self._sources[spec.name] = source or SourceProgress(spec.name, topic_id, -1, 0, -1, 0)
        self._applied = {topic: source.applied_offset for topic, source in self._sources.items()}

    def _step(self) -> None:
        batch = self._take()
        if batch or self._lost or time.monotonic() - self._written_at >= PARTITION_RECORD_EVERY_S:
            self._process(batch)

    def _take(self) -> list[SourceRecord]:
        """Wait for records, or until the partition record is due; take what is there, bounded in number and bytes."""
        limit = self._wiring.settings.batch_records_max
        with self._lock:
            due = self._written_at + PARTITION_RECORD_EVERY_S - time.monotonic()
            if not self._queue and not self._stopping and not self._suspended and due > 0:
                self._lock.wait(due)
            usual_s = self._wiring.partitions_open() / TRANSACTIONS_PER_SECOND_MAX
            step_s = usual_s * min(max(self._came / RECORDS_PER_TRANSACTION, 1.0), BATCH_WAIT_FACTOR_MAX)
            rest_s = self._took_at + step_s - time.monotonic()
            if self._queue and rest_s > 0:
                self._lock.wait_for(
                    lambda: (
                        self._stopping
                        or self._suspended
                        or len(self._queue) >= limit
                        or self._queued_bytes >= BATCH_BYTES_MAX
                    ),
                    rest_s,
                )
            took_at = time.monotonic()
            since_s, self._took_at = took_at - self._took_at, took_at
            batch: list[SourceRecord] = []
            n_bytes = 0
            while self._queue and len(batch) < limit and n_bytes < BATCH_BYTES_MAX:
                record = self._queue.popleft()
                n_bytes += len(record.value or b"")
                batch.append(record)
            self._queued_bytes -= n_bytes
            self._came += (len(batch) * usual_s / max(since_s, usual_s) - self._came) * _RATE_WEIGHT
            drained = bool(batch) and self.has_drained
        if drained:
            self._wiring.drained(self.partition)
        return batch

    def _process(self, batch: list[SourceRecord]) -> None:
        """The seven effects of one batch; raises where the partition must be opened again."""
        assert self._reducer is not None and self._store is not None and self._producer is not None
        self._batch = batch
        effect = self._wiring.on_effect or _no_fault
        lost = self._lost
        if lost:
            self._reducer.source_lost()
        dead: list[tuple[SourceRecord, BadRecord]] = []
        # What is at or below the applied offset is a duplicate: in the log already.
        news = [record for record in batch if record.offset > self._applied[record.topic]]
        decoded = self._reducer.decode(news)
        for n_applied, (record, what) in enumerate(zip(news, decoded, strict=True), 1):
            effect(1)
            try:
                self._apply(record, what)  # effects 2 to 4
            except BadRecord as exc:
                dead.append((record, exc))
            effect(4)
            if self._reducer.full and record is not batch[-1]:
                batch, news = self._cut(batch, record), news[:n_applied]
                break
        for topic, record in {record.topic: record for record in news}.items():
            self._applied[topic] = record.offset
            self._sources[topic] = replace(
                self._sources[topic], applied_offset=record.offset, applied_at_ms=record.timestamp_ms
            )
        for topic, applied in self._applied.items():
            if (done := self._done_with(topic)) > applied:
                self._applied[topic] = done
                self._sources[topic] = replace(self._sources[topic], applied_offset=done)
        outgoing = self._reducer.tick(time.monotonic_ns() // 1_000_000, self._wiring.now_ms(), self._applied_until)
        dead += self._reducer.take_refused()
        changes = self._reducer.take_changes()
        changes.setdefault(self._wiring.tables[0], []).append(
            (partition_key(self.partition), encode_partition(self._partition_record()))
        )
        positions = self._commit(changes, outgoing, dead)  # effect 5
        effect(5)
        self._store.write(changes, positions)  # effect 6
        effect(6)
        self._batch = []
        if lost:
            self._lost = False  # only now: an attempt that failed must tell the next reducer again
        if batch:
            self._wiring.acknowledge([record.handle for record in batch])  # effect 7
        effect(7)
        self._written_at = time.monotonic()
        if self._written_at - self._flushed_at >= FLUSH_EVERY_S:
            self._store.flush()
            self._flushed_at = self._written_at
        self.counts["applied"] += len(batch)
        self.counts["dead_letters"] += len(dead)
        self.counts["transactions"] += 1

    def _cut(self, batch: list[SourceRecord], last: SourceRecord) -> list[SourceRecord]:
        """End the running batch behind a record; the rest is taken next, since one transaction has its time."""
        n_done = next(n for n, record in enumerate(batch, 1) if record is last)
        with self._lock:
            self._queue.extendleft(reversed(batch[n_done:]))
            self._queued_bytes += sum(len(record.value or b"") for record in batch[n_done:])
        self._batch = batch[:n_done]
        return self._batch

    def _apply(self, record: SourceRecord, decoded: Any) -> None:
        """Hand a record to the reducer; one that breaks it every time is a dead letter, not the partition's end."""
        assert self._reducer is not None
        if self._breaker == (record.topic, record.offset) and self._breaks >= REDUCER_FAILURES_MAX:
            raise BadRecord("internal_error", f"applying it failed {self._breaks} times")
        try:
            self._reducer.apply(record, decoded)
        except BadRecord:
            raise
        except Exception:
            self._breaks = self._breaks + 1 if self._breaker == (record.topic, record.offset) else 1
            self._breaker = (record.topic, record.offset)
            raise

    def _partition_record(self) -> PartitionRecord:
        now_ms = self._wiring.now_ms()
        for topic, source in self._sources.items():
            end = max(self._wiring.source_end(topic, self.partition), source.applied_offset + 1)
            if self._marked.get(topic) == source.applied_offset == end - 2:
                end -= 1  # behind a record of our own lies the marker of its transaction, which nobody is given
            if end > source.applied_offset + 1:
                since = self._behind_since_ms.setdefault(topic, now_ms)
                behind_ms = max(now_ms - since, 0)
            else:
                self._behind_since_ms.pop(topic, None)
                behind_ms = 0
            self._sources[topic] = replace(source, end_offset=end, behind_ms=behind_ms)
        # Of a changelog its id alone: whoever reads this in another topic of the name knows that the rest is missing.
        changelogs = [
            SourceProgress(table.changelog_topic, self._topic_ids[table.changelog_topic], -1, 0, -1, 0)
            for table in self._wiring.tables
        ]
        return PartitionRecord(self.partition, now_ms, self._wiring.owner, (*self._sources.values(), *changelogs))

    def _applied_until(self) -> int:
        """Up to what time all that was appended to the sources was applied, monotonic, in ms; 0 while that is unknown.

        What Faust fetched last may be old, so the broker is asked where its logs end, and asked again only when we have
        come so far: under load there is always something behind, but not for ever the same.
        """
        if self._next is None:
            return 0
        if self._asked is None:
            asked_ms = time.monotonic_ns() // 1_000_000  # before the answer: what comes while it is made is not counted
            try:
                ends = {topic: self._wiring.log_end(topic, self.partition) for topic in self._applied}
            except (KafkaException, KvStreamsError) as exc:
                log.warning("partition %d does not know whether it has caught up: %s", self.partition, exc)
                return self._applied_until_ms
            self._asked = (asked_ms, ends)
        asked_ms, ends = self._asked
        if all(self._applied[topic] + 1 >= end for topic, end in ends.items()):
            self._asked, self._applied_until_ms = None, asked_ms
        return self._applied_until_ms

    def _commit(
        self, changes: Changes, outgoing: list[Outgoing], dead: list[tuple[SourceRecord, BadRecord]]
    ) -> dict[TableSpec, ChangelogPosition]:
        """Write everything in one transaction; gives where the changelogs stand behind it."""
        kafka = self._producer
        assert kafka is not None
        starts: dict[str, int] = {}
        ends: dict[str, int] = {}
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append(error)
            else:
                record = as_record(message)
                starts[record.topic] = min(starts.get(record.topic, record.offset), record.offset)
                ends[record.topic] = max(ends.get(record.topic, -1), record.offset)

        kafka.begin_transaction()
        # Of each changelog only the first and last records' offsets are wanted, and a callback costs more than a record
        # does. One that is not delivered fails the commit by itself.
        for table, records in changes.items():
            topic = table.changelog_topic
            for callback, some in ((delivered, records[:1]), (None, records[1:-1]), (delivered, records[1:][-1:])):
                for key, value in some:
                    produce(kafka, topic, self.partition, key, value, callback)
        for out in outgoing:
            produce(kafka, out.topic, self.partition, out.key, out.value, delivered)
        for record, exc in dead:
            log.warning("dead letter from %s [%d] at %d: %s", record.topic, record.partition, record.offset, exc)
            size = len(record.value or b"")
            headers = dead_letter_headers(record.topic, exc, size, record.partition, record.offset)
            # Its own headers go along as long as they leave room for the record itself.
            if sum(len(name) + len(value or b"") for name, value in record.headers) <= HEADER_BYTES_MAX:
                headers = [*record.headers, *headers]
            value = dead_letter_value(record.value)
            produce(kafka, self._wiring.dead_letters.name, self.partition, record.key, value, delivered, headers)
        if self._wiring.on_effect is not None:
            kafka.flush(COMMIT_TIMEOUT_S)  # the commit does that too; only a fault needs it to be over before
            self._wiring.on_effect(IN_TRANSACTION)
        commit_until_answered(kafka)
        if failed:
            raise TableError(f"a record of a committed transaction was not delivered: {failed[0].str()}")
        for topic, end in self._ends.items():
            if starts.get(topic, end) < end:
                raise TableError(f"{topic} [{self.partition}] was recreated: offset {starts[topic]} behind {end - 1}")
        self._ends.update({topic: ends[topic] + 1 for topic in self._ends if topic in ends})
        self._marked.update({topic: ends[topic] for topic in self._sources if topic in ends})
        # Of those without a record in it too: nobody but us writes them, so they are known to end there still, and a
        # copy of a table that seldom changes does not grow old.
        now_ms = self._wiring.now_ms()
        return {
            table: ChangelogPosition(self._topic_ids[table.changelog_topic], self._ends[table.changelog_topic], now_ms)
            for table in self._wiring.tables
        }

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0

    def _close(self) -> None:
        with self._lock:
            self._next = None
            self._is_open = False
            self._forget_queue()
            self._lock.notify_all()
        if self._store is not None:
            self._store.close()
        self._store = None
        self._reducer = None
        self._producer = None


def scope_of(settings: Settings, partition: int) -> str:
    """A partition's name among all scopes: of its producer, and of its copy below `tables_path`."""
    return f"{settings.app_id}-{partition}"


def table_producer(settings: Settings, partition: int) -> Producer:
    """The one producer that may write a partition's tables: its `init_transactions` fences all before it."""
    return producer(
        settings,
        **{
            "transactional.id": scope_of(settings, partition),
            "transaction.timeout.ms": settings.transaction_timeout_ms,
            "linger.ms": 0,
        },
    )


def produce(
    kafka: Producer,
    topic: str,
    partition: int,
    key: bytes | None,
    value: bytes | None,
    on_delivery: Callable[[KafkaError | None, Message], None] | None,
    headers: list[tuple[str, str | bytes | None]] | None = None,
) -> None:
    """Hand a record to the client, waiting while its own queue is full."""
    while True:
        try:
            kafka.produce(topic, value, key, partition, on_delivery, headers=headers)
            return
        except BufferError:
            kafka.poll(0.1)  # it empties as the broker answers


def commit_until_answered(kafka: Producer) -> None:
    """Repeat the commit while it times out: the broker may have done it already, and abort would then fail."""
    deadline = time.monotonic() + COMMIT_TIMEOUT_S
    while True:
        try:
            kafka.commit_transaction(max(deadline - time.monotonic(), 0.1))
            return
        except KafkaException as exc:
            error: KafkaError = exc.args[0]
            retry = error.retriable() or error.code() == KafkaError._TIMED_OUT
            if error.fatal() or error.txn_requires_abort() or not retry or time.monotonic() >= deadline:
                raise TableError(f"the transaction did not commit: {error.str()}") from exc


def _changelog_specs(wiring: PartitionWiring) -> list[TopicSpec]:
    asked = {"delete.retention.ms": ""}  # as the broker has it, whatever the settings say
    return [TopicSpec(table.changelog_topic, "", None, 0, 0, asked) for table in wiring.tables]


def _no_fault(_: int) -> None:
    """Stand where no fault is armed."""


def _expected(exc: Exception) -> bool:
    return isinstance(exc, KafkaException | KvStreamsError)

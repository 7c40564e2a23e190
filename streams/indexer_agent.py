"""The indexer: decode, apply, commit. Faust assigns partitions and delivers events; the tables do the rest.

What lives here: the reducer that gives `kv-events` their meaning, and the agent that feeds partitions from a Faust
stream. What must not: transactions (tables.partition) and the rules of a rank (core.holdings).

The agent's loop never waits for one partition. A partition takes its next offset and no other; whatever else comes is
dropped un-acknowledged and the source is sought to where the table stands, so that neither Faust's committed offsets
nor its buffers decide what is applied.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import faust
from faust.types import TP

from streams.codec import decode_batch, encode_batch, encode_resync
from streams.core.events import EngineBatch, EngineEvents, Heartbeat, RestatementChunk, WorkerRemoved
from streams.core.reducer.holdings import Holdings
from streams.core.reducer.maintenance import RankMaintenance
from streams.core.reducer.ordering import Progress, Verdict
from streams.core.reducer.restatement import ChunkKey
from streams.errors import BadRecord
from streams.kafka import first_offset, group_members, log_end, partition_of, worker_key
from streams.settings import Settings
from streams.tables.index_runs import index_runs
from streams.tables.partition import Outgoing, PartitionWiring, Reducer, SourceRecord, TablePartition
from streams.tables.records import (
    PARKED_PREFIX,
    PROGRESS_PREFIX,
    RUN_PREFIX,
    Change,
    decode_progress,
    encode_progress,
    parked_key,
    parse_parked_key,
    progress_key,
)
from streams.tables.store import TableSpec
from streams.topics import PARKED_CHUNK_BYTES_MAX, PREFIX_INDEX, TopicSpec, topics

log = logging.getLogger(__name__)

#: Tombstones of ended epochs in one transaction: a restart of a worker with a million blocks must not stop the others.
TOMBSTONES_PER_BATCH = 1000

#: Run records taken in with one call when a partition is opened.
LOAD_RECORDS = 4096

#: A partition that nothing reaches while its source has more is sought again after this; doubled up to the second.
REALIGN_EVERY_S = (0.5, 30.0)

#: Verdicts that nobody wants to read of.
_USUAL = frozenset({Verdict.APPLIED, Verdict.RENEWED, Verdict.PARKED})


def prefix_index_table(settings: Settings) -> TableSpec:
    """The table of runs, progress and partition records."""
    return TableSpec(PREFIX_INDEX, 1, topics(settings).index_changelog.name)


class IndexReducer:
    """Gives `kv-events` their meaning: the pure state of one partition, and its records."""

    def __init__(
        self, settings: Settings, verdicts: Counter[str], on_effect: Callable[[int], None] | None = None
    ) -> None:
        self._settings = settings
        self._table = prefix_index_table(settings)
        self._verdicts = verdicts
        self._runs, self._decode_events = index_runs()
        self.holdings = Holdings(self._runs, on_effect)
        self._maintenance = RankMaintenance(
            self.holdings,
            grace_ms=int(settings.worker_grace_s * 1000),
            clear_degraded_after_ms=int(settings.clear_degraded_after_s * 1000),
        )

    def load(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> None:
        """Start from what the table holds."""
        progress: list[Progress] = []
        parked: list[tuple[ChunkKey, EngineBatch, int]] = []
        runs: list[tuple[bytes, bytes]] = []
        strays, begun = 0, False
        for key, value in items:  # in order of their keys: parked chunks, progress, runs
            if key.startswith(RUN_PREFIX):
                if not begun:
                    self.holdings.load(progress, (), parked)
                    begun = True
                runs.append((key, value))
                if len(runs) == LOAD_RECORDS:
                    strays += self._load_runs(table, runs)
                    runs.clear()
                continue
            try:
                if key.startswith(PROGRESS_PREFIX):
                    progress.append(decode_progress(key, value))
                elif key.startswith(PARKED_PREFIX):
                    parked.append(self._decode_parked(key, value))
                else:
                    raise BadRecord("bad_key", f"{key.hex()} is no key of ours")
            except BadRecord as exc:
                self._skip(table, exc)
        if not begun:
            self.holdings.load(progress, (), parked)
        strays += self._load_runs(table, runs)
        if strays:
            log.warning("%s: %d runs of ranks without progress are passed over", table.name, strays)

    def _load_runs(self, table: TableSpec, runs: list[tuple[bytes, bytes]]) -> int:
        strays, bad = self._runs.load_records(runs)
        for _, exc in bad:
            self._skip(table, exc)
        return strays

    def _skip(self, table: TableSpec, exc: BadRecord) -> None:
        # A stranger wrote to the changelog. It stops nobody; what the rank lacks of it can only under-report.
        self._verdicts["bad_table_record"] += 1
        log.warning("%s: a record is passed over: %s", table.name, exc)

    def _decode_parked(self, key: bytes, value: bytes) -> tuple[ChunkKey, EngineBatch, int]:
        batch = decode_batch(value, self._settings.schema_ids)
        if not isinstance(batch.body, RestatementChunk):
            raise BadRecord("bad_parked", f"{key.hex()} holds no chunk of a restatement")
        return parse_parked_key(key), batch, len(value)

    def decode(self, records: Sequence[SourceRecord]) -> Sequence[EngineBatch | BadRecord]:
        """Effect 1: decode, or say why not."""
        return self._decode_events([record.value for record in records], self._settings.schema_ids)

    def apply(self, record: SourceRecord, decoded: EngineBatch | BadRecord) -> None:
        """Effects 2 to 4 of one record; raises BadRecord for what belongs to the dead letters."""
        if isinstance(decoded, BadRecord):
            raise decoded
        batch = decoded
        check_home(record, batch.rank.worker_id, self._settings)
        expected = self._settings.block_size_of(batch.model)
        if batch.block_size != expected and not isinstance(batch.body, WorkerRemoved):
            raise BadRecord(
                "wrong_block_size",
                f"rank {batch.rank} has blocks of {batch.block_size} tokens; {batch.model} has {expected} here",
            )
        match batch.body:
            case EngineEvents(events):
                verdict = self.holdings.apply(batch, events)  # 2 fence, 3 verdict, 4 apply
            case WorkerRemoved():
                verdict = self._remove(batch, batch.body)
            case Heartbeat():
                verdict = self.holdings.renew(batch, batch.body)
            case RestatementChunk():
                raw = record.value or b""
                if len(raw) > PARKED_CHUNK_BYTES_MAX:
                    raise BadRecord("bad_restatement", f"a chunk of {len(raw)} bytes; at most {PARKED_CHUNK_BYTES_MAX}")
                verdict = self.holdings.restate(batch, raw)
        self._verdicts[verdict.value] += 1
        if verdict not in _USUAL:
            log.info(
                "%s: batch %d of rank %s, incarnation %d",
                verdict.value,
                batch.sequence,
                batch.rank,
                batch.incarnation,
            )

    def _remove(self, batch: EngineBatch, removed: WorkerRemoved) -> Verdict:
        if removed.seen_sequence is None:
            return self.holdings.remove_worker(batch.rank.worker_id, batch.incarnation)
        return self.holdings.expire_worker(batch, removed.seen_sequence)

    @property
    def full(self) -> bool:
        """Whether it is time to commit."""
        return self.holdings.full

    def source_lost(self) -> None:
        """Records of the source were lost before this partition saw them."""
        self.holdings.degrade_all()

    def tick(self, monotonic_ms: int, wall_ms: int, applied_until: Callable[[], int]) -> list[Outgoing]:
        """Requests to bridges, and expiries, which are applied when they come back in order with everything else."""
        actions = self._maintenance.tick(monotonic_ms, wall_ms, applied_until)
        self._verdicts.update(actions.counts)
        names = topics(self._settings)
        for request in actions.requests:
            log.info(
                "rank %s is asked for a restatement, attempt %d: %s", request.rank, request.attempt, request.reason
            )
        for expiry in actions.expiries:
            log.warning("worker %s has been silent for too long and is removed", expiry.rank.worker_id)
        return [
            Outgoing(names.kv_control.name, worker_key(request.rank.worker_id), encode_resync(request))
            for request in actions.requests
        ] + [
            Outgoing(names.kv_events.name, worker_key(expiry.rank.worker_id), encode_batch(expiry))
            for expiry in actions.expiries
        ]

    def take_refused(self) -> list[tuple[SourceRecord, BadRecord]]:
        """Nothing: what is refused is refused when it is applied."""
        return []

    def take_changes(self) -> dict[TableSpec, list[Change]]:
        """What changed since the last call; progress first, since readers drop an older epoch's runs by it."""
        changes = self.holdings.take_changes(TOMBSTONES_PER_BATCH)
        records: list[Change] = [(progress_key(each.rank), encode_progress(each)) for each in changes.progress]
        records += [(parked_key(key), raw) for key, raw in changes.parked]
        records += changes.runs
        return {self._table: records}


def check_home(record: SourceRecord, worker_id: int, settings: Settings) -> None:
    """Raise BadRecord for a record that is not under its worker's key, or not in its worker's partition."""
    if record.key is not None and record.key != worker_key(worker_id):
        raise BadRecord("wrong_key", f"key {record.key!r} is not worker {worker_id}")
    home = partition_of(worker_id, settings.partitions)
    if record.partition != home:
        # Two owners of one rank would each know half of it. Librdkafka's default partitioner does this.
        raise BadRecord("wrong_partition", f"worker {worker_id} belongs to partition {home} (murmur2)")


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What an owner of a partition does: its tables, the topics that it folds into them, and how.

    The sources have equally many partitions and one subscriber, so Faust gives all that have one number to one worker;
    the first tells which partitions are ours. make_reducer: takes the counts of verdicts, and a fault that was armed.
    """

    tables: tuple[TableSpec, ...]
    sources: tuple[TopicSpec, ...]
    make_reducer: Callable[[Counter[str], Callable[[int], None] | None], Reducer[Any]]


class Indexer:
    """Feeds the assigned partitions of one Faust worker. All methods but the wiring's callbacks run on Faust's loop.

    A partition is paused, and resumed, in all its sources: what waits for it is one queue.
    """

    def __init__(
        self,
        app: faust.App,
        settings: Settings,
        plan: PartitionPlan,
        on_effect: Callable[[int], None] | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._plan = plan
        self._source = plan.sources[0]
        self._armed = on_effect
        self._partitions: dict[int, TablePartition] = {}
        self._paused: set[int] = set()
        self._realigning: set[TP] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wiring: PartitionWiring | None = None
        self.verdicts: Counter[str] = Counter()

    async def run(self, stream: Any) -> None:
        """The agent's loop. Nothing raises out of it: an agent that raises acknowledges its event and loses it."""
        events: AsyncIterator[Any] = stream.noack().events()
        async for event in events:
            message = event.message
            try:
                self._feed(event)
            except Exception:  # a fault of ours; the event stays un-acknowledged and is sought back to
                log.exception("%s [%d] up to %d was not fed", message.topic, message.partition, message.offset)

    async def assigned(self, partitions: set[TP]) -> None:
        """Open what is assigned, go on with what was ours before, release the rest; comes after `revoked`."""
        self._loop = asyncio.get_running_loop()
        mine = {tp.partition for tp in partitions if tp.topic == self._source.name}
        await self._stop([self._partitions.pop(partition) for partition in sorted(self._partitions.keys() - mine)])
        for partition in sorted(mine):
            if partition in self._partitions:
                self._partitions[partition].resume()
            else:
                table = TablePartition(partition, self._wire())
                self._partitions[partition] = table
                table.start()
        log.info("partitions assigned: %s", sorted(mine))

    async def revoked(self, partitions: set[TP]) -> None:
        """Finish the running batches of revoked partitions; those that come back with `assigned` stay open.

        Every rebalance revokes all of them, and most come back at once: opened anew, each would be read from disk
        while those that really move are waited for.
        """
        mine = {tp.partition for tp in partitions if tp.topic == self._source.name} & self._partitions.keys()
        tables = [self._partitions[partition] for partition in sorted(mine)]
        self._paused.difference_update(mine)
        kept = await asyncio.gather(*(asyncio.to_thread(table.suspend) for table in tables))
        closed = [table for table, is_kept in zip(tables, kept, strict=True) if not is_kept]
        for table in closed:
            self._partitions.pop(table.partition, None)  # `close` may have taken it meanwhile
        await self._stop(closed)

    async def close(self) -> None:
        """Release everything."""
        tables, self._partitions = list(self._partitions.values()), {}
        await self._stop(tables)

    async def watch(self) -> None:
        """Seek a partition that nothing reaches while its source has more: Faust may stand beyond the table.

        Runs until cancelled; one look a REALIGN_EVERY_S[0].
        """
        seen: dict[TP, tuple[int, float, float]] = {}  # topic and partition to (wanted, since, wait)
        first, longest = REALIGN_EVERY_S
        while True:
            await asyncio.sleep(first)
            now = time.monotonic()
            for partition, table in list(self._partitions.items()):
                if partition in self._paused and table.next_offset(self._source.name) is not None and table.has_drained:
                    self._resume(partition)  # it drained between being found full and being paused
                for tp in self._topic_partitions(partition):
                    next_offset = table.next_offset(tp.topic)
                    # What waits is of any source; one that nothing reaches is sought however busy the others are.
                    paused = partition in self._paused or table.is_full
                    if next_offset is None or paused or self._source_end(tp.topic, partition) <= next_offset:
                        seen.pop(tp, None)
                        continue
                    last = seen.get(tp)
                    if last is None or last[0] != next_offset:
                        seen[tp] = (next_offset, now, first * 2)
                    elif now - last[1] >= last[2]:
                        seen[tp] = (next_offset, now, min(last[2] * 2, longest))
                        self._realign(tp)

    def _feed(self, event: Any) -> None:
        """Offer the records of one event (delivery.RecordsMessage) to their partition."""
        records = event.value
        partition = records[0].partition
        table = self._partitions.get(partition)
        if table is None:
            return  # not owned any more: whoever owns it is given the event
        offered = [
            SourceRecord(
                record.topic,
                partition,
                record.offset,
                record.timestamp,
                record.key,
                record.value,
                record.headers,
            )
            for record in records
        ]
        offered[-1].handle = event
        next_offset = table.offer(offered)
        if next_offset is not None and next_offset >= 0:
            self._realign(TP(records[0].topic, partition))
        elif table.is_full and partition not in self._paused:
            self._paused.add(partition)
            self._app.consumer.pause_partitions(set(self._topic_partitions(partition)))

    def _topic_partitions(self, partition: int) -> list[TP]:
        return [TP(source.name, partition) for source in self._plan.sources]

    def _realign(self, tp: TP) -> None:
        if tp not in self._realigning:
            self._realigning.add(tp)
            self._tasks.add(task := asyncio.get_running_loop().create_task(self._seek_to_table(tp)))
            task.add_done_callback(self._tasks.discard)

    async def _seek_to_table(self, tp: TP) -> None:
        """Seek a source to the offset that the table wants, or tell the table that the log has no such offset."""
        topic, partition = tp.topic, tp.partition
        try:
            table = self._partitions.get(partition)
            next_offset = table.next_offset(topic) if table else None
            if table is None or next_offset is None:
                return
            found = await asyncio.to_thread(first_offset, self._settings, topic, partition, next_offset)
            first = found.end if found.first is None else found.first
            if first > next_offset:
                lost = found.low > next_offset
                log.log(
                    logging.WARNING if lost else logging.INFO,
                    "%s [%d] has nothing from %d to %d",
                    *(topic, partition, next_offset, first - 1),
                )
                table.skip_to(topic, next_offset, first, lost)
            # What Faust fetched before the seek is still on its way and would move its own position on again.
            await asyncio.sleep(REALIGN_EVERY_S[0] / 2)
            if self._partitions.get(partition) is table:
                next_offset = table.next_offset(topic)
                if next_offset is not None:
                    await self._seek(tp, next_offset)
        except Exception as exc:
            log.warning("%s [%d] was not sought back: %s", topic, partition, exc)  # `watch` tries again
        finally:
            self._realigning.discard(tp)

    async def _seek(self, tp: TP, next_offset: int) -> None:
        # Not `seek`: that reaches from this thread into a client that lives in another, where a fetch may be handing
        # out what the seek throws away, and the whole consumer ends.
        try:
            await self._app.consumer.seek_wait({tp: next_offset})
        except Exception as exc:  # revoked in between, in words that differ between drivers
            log.warning("%s [%d] was not sought back: %s", tp.topic, tp.partition, exc)  # `watch` tries again

    async def _stop(self, tables: list[TablePartition]) -> None:
        self._paused.difference_update(table.partition for table in tables)
        await asyncio.gather(*(asyncio.to_thread(table.stop) for table in tables))

    def _wire(self) -> PartitionWiring:
        if self._wiring is None:
            self._wiring = PartitionWiring(
                settings=self._settings,
                tables=self._plan.tables,
                sources=self._plan.sources,
                dead_letters=topics(self._settings).dead_letters,
                owner=f"{os.uname().nodename}:{os.getpid()}",
                make_reducer=lambda: self._plan.make_reducer(self.verdicts, self._armed),
                acknowledge=self._acknowledge,
                drained=self._drained,
                opened=self._opened,
                is_ours=self._is_ours,
                source_end=self._source_end,
                log_end=lambda topic, partition: log_end(self._settings, topic, partition),
                on_effect=self._armed,
                now_ms=lambda: time.time_ns() // 1_000_000,
                partitions_open=lambda: len(self._partitions),
            )
        return self._wiring

    def _is_ours(self, partition: int) -> bool:
        next_offset = (self._source.name, partition)
        members = group_members(self._settings)
        return members is not None and any(
            member.client_id == self._app.conf.broker_client_id and next_offset in member.assigned for member in members
        )

    def _acknowledge(self, handles: list[Any]) -> None:
        events = [event for event in handles if event is not None]
        if events:
            self._call(lambda: [event.ack() for event in events])

    def _drained(self, partition: int) -> None:
        if partition in self._paused:
            self._call(lambda: self._resume(partition))

    def _opened(self, partition: int, next_offset: dict[str, int]) -> None:
        where = ", ".join(f"{topic} from {offset}" for topic, offset in next_offset.items())
        log.info("partition %d is open, and wants %s", partition, where)
        self._call(lambda: self._begin(partition))

    def _begin(self, partition: int) -> None:
        """Feed a partition from where its table stands."""
        tps = self._topic_partitions(partition)
        if partition in self._paused:
            self._paused.discard(partition)
            self._app.consumer.resume_partitions(set(tps))
        for tp in tps:
            self._realign(tp)

    def _resume(self, partition: int) -> None:
        table = self._partitions.get(partition)
        tps = self._topic_partitions(partition)
        next_offset = {tp: table.next_offset(tp.topic) for tp in tps} if table else {}
        if not next_offset or None in next_offset.values():
            return  # it is being opened again, and `_opened` comes
        self._paused.discard(partition)
        self._app.consumer.resume_partitions(set(tps))
        for tp, offset in next_offset.items():
            assert offset is not None
            # Faust drops what it had fetched of a paused partition; without this nothing flows until `watch` looks.
            self._tasks.add(task := asyncio.get_running_loop().create_task(self._seek(tp, offset)))
            task.add_done_callback(self._tasks.discard)

    def _source_end(self, topic: str, partition: int) -> int:
        try:
            end: int | None = self._app.consumer.highwater(TP(topic, partition))
        except Exception:  # not assigned at this moment, in words that differ between drivers
            return -1
        return -1 if end is None else end

    def _call(self, action: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(action)
            except RuntimeError:
                pass  # the loop closed in between: the process ends, and what was not acknowledged comes again

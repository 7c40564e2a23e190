"""The Faust agent: Faust assigns partitions and delivers events, the tables do the rest.

What lives here: feeding partitions from a Faust stream. What must not: the meaning of records (tables.index_reducer,
tables.cxl_reducer), transactions (tables.transactions).

The agent's loop never waits for a single partition. A partition takes only its next offset; anything else is dropped
without acknowledgement, and the source is sought to the table's next offset. Neither Faust's committed offsets nor its
buffers therefore decide what is applied.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import faust
from faust.types import TP

from streams.core.reducer.maintenance import MAINTENANCE_COUNTS
from streams.core.reducer.ordering import Verdict
from streams.kafka.applied_until import Lag
from streams.kafka.clients import group_members
from streams.kafka.log_offsets import first_offset
from streams.kafka.topic_watch import TopicReading, TopicWatch
from streams.settings import AgentSettings
from streams.tables.index_reducer import BAD_TABLE_RECORD
from streams.tables.partition import PARTITION_COUNTS, TablePartition
from streams.tables.reducer import PartitionPlan, SourceRecord
from streams.tables.standby import Standby
from streams.tables.wiring import PartitionWiring
from streams.topics import TopicSpec, topics

log = logging.getLogger(__name__)

#: If a partition receives nothing although its source has more, its source is sought again after the first time. The
#: time doubles with each attempt, up to the second.
REALIGN_EVERY_S = (0.5, 30.0)

#: Acknowledgements of all partitions are passed to Faust together, at most once in this time. They only decide where a
#: new group starts, and passing each on alone would wake up Faust's loop for every transaction.
ACKNOWLEDGE_EVERY_S = 0.05

#: The task that looks for new topics; there is one at a time.
_REFRESH = "refresh topics"

#: The keys that `Indexer.verdict_counts` always has.
_VERDICT_COUNTS = (*(verdict.value for verdict in Verdict), BAD_TABLE_RECORD, *MAINTENANCE_COUNTS)


class Indexer:
    """Feeds the assigned partitions of one Faust worker.

    All methods run on Faust's loop, except the wiring's callbacks, and the counts and `not_ready`, which any thread may
    read. A partition is paused and resumed in all its sources, because they share one queue.
    """

    def __init__(
        self,
        app: faust.App,
        settings: AgentSettings,
        plan: PartitionPlan,
        on_effect: Callable[[int], None] | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._plan = plan
        self._armed = on_effect
        self._partitions: dict[int, TablePartition] = {}
        self._standbys: dict[int, Standby] = {}
        self._paused: set[int] = set()
        self._realigning: set[TP] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = threading.Lock()
        self._applied: list[Any] = []  # Faust's events that are to be acknowledged
        self._applied_lock = threading.Lock()
        self._watch: TopicWatch | None = None
        self._ids: dict[str, str] = {}  # of the sources, as last read; a deleted source keeps its id
        self._recreated: dict[str, str] = {}  # by source, the id that was logged last
        #: Whether this process answers requests at the moment. Set it before the first partition is opened.
        self.answers: Callable[[], bool] = lambda: False
        #: Sources that have been deleted and not recreated yet.
        self.sources_missing: tuple[str, ...] = ()
        # By partition, since each is written by that partition's thread alone. They outlast a partition that moves.
        self._verdicts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)

    @property
    def _source(self) -> TopicSpec:
        """The source whose assignment decides which partitions this worker owns."""
        return self._plan.sources[0]

    def verdict_counts(self) -> Mapping[str, int]:
        """A snapshot of what records turned out to be, over all partitions since the process started.

        The keys: each value of `Verdict`; BAD_TABLE_RECORD for unreadable rows of a changelog; MAINTENANCE_COUNTS for
        what maintenance ticks did; `cxl_<outcome>` for each value of `TransitionOutcome`; `cxl_refused_<reason>` for
        refused transitions. A key of the last two kinds is missing until its first count, the others start from 0.
        """
        return dict.fromkeys(_VERDICT_COUNTS, 0) | _sum(self._verdicts)

    def partition_counts(self) -> Mapping[str, int]:
        """A snapshot of `TablePartition.counts` (keys PARTITION_COUNTS), over all partitions since the process started.

        Partitions that have moved to another worker are included, so that the totals never fall.
        """
        return dict.fromkeys(PARTITION_COUNTS, 0) | _sum(self._counts)

    def partition_lags(self) -> Mapping[int, Lag]:
        """How far the table of each partition that this process owns is behind its sources."""
        return {partition: table.lag() for partition, table in sorted(self._partitions.copy().items())}

    def standbys(self) -> Mapping[int, bool]:
        """The partitions that this process follows as a standby, and whether each is up to date."""
        return {partition: standby.is_current for partition, standby in sorted(self._standbys.copy().items())}

    def not_ready(self) -> str | None:
        """Return why events are not applied yet, or None. A worker without partitions is ready: others have them."""
        if self._loop is None:
            return "Kafka has not assigned partitions to this worker yet"
        if self.sources_missing:
            return f"topics of this scope were deleted: {', '.join(self.sources_missing)}"
        opening = self._opening()
        return f"partitions are being opened: {opening}" if opening else None

    def _opening(self) -> list[int]:
        return sorted(n for n, table in self._partitions.copy().items() if table.next_offset(self._source.name) is None)

    async def run(self, stream: Any) -> None:
        """Run the agent's loop.

        It raises nothing: Faust acknowledges the event of an agent that raises, and the event would be lost.
        """
        events: AsyncIterator[Any] = stream.noack().events()
        async for event in events:
            message = event.message
            try:
                self._feed(event)
            except Exception:  # a fault of ours; the event is not acknowledged, so the source is sought back to it
                log.exception("%s [%d] up to %d was not fed", message.topic, message.partition, message.offset)

    async def assigned(self, partitions: set[TP]) -> None:
        """Open new partitions, resume those that were ours before, release the rest. Faust calls `revoked` first.

        Faust's assignor also says which partitions this worker follows as a standby. It makes a standby the owner
        before any other worker.
        """
        self._loop = asyncio.get_running_loop()
        mine = {tp.partition for tp in partitions if tp.topic == self._source.name}
        assigned = self._app.assignor.assigned_standbys()
        followed = {tp.partition for tp in assigned if tp.topic == self._source.name} - mine
        unneeded = [self._standbys.pop(partition) for partition in sorted(self._standbys.keys() - mine - followed)]
        await asyncio.gather(
            self._stop([self._partitions.pop(partition) for partition in sorted(self._partitions.keys() - mine)]),
            *(asyncio.to_thread(standby.stop) for standby in unneeded),
        )
        for partition in sorted(mine):
            if partition in self._partitions:
                self._partitions[partition].resume()
            else:
                standby = self._standbys.pop(partition, None)
                table = TablePartition(partition, self._wire(partition), self._counts[partition], standby)
                self._partitions[partition] = table
                table.start()
        for partition in sorted(followed - self._standbys.keys()):
            standby = Standby(partition, self._wire(partition), lambda: not self._opening())
            self._standbys[partition] = standby
            standby.start()
        log.info("partitions assigned: %s, as a standby: %s", sorted(mine), sorted(followed))

    async def revoked(self, partitions: set[TP]) -> None:
        """Finish the running batches of revoked partitions; those that return with `assigned` stay open.

        Every rebalance revokes all partitions, and most of them return at once. If they were closed, each would be read
        from disk again, while the group waits for the ones that really move.
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
        if self._watch is not None:
            await asyncio.to_thread(self._watch.stop)
        tables, self._partitions = list(self._partitions.values()), {}
        standbys, self._standbys = list(self._standbys.values()), {}
        await asyncio.gather(self._stop(tables), *(asyncio.to_thread(standby.stop) for standby in standbys))
        self._acknowledge_all()

    async def watch(self) -> None:
        """Seek every partition that receives nothing although its source has more: Faust may be past its next offset.

        Runs until cancelled, and checks every REALIGN_EVERY_S[0]. Meanwhile a thread reads where the sources end.
        """
        self._loop = asyncio.get_running_loop()
        written = {table.changelog_topic for table in self._plan.tables}
        changelogs = [spec for spec in topics(self._settings).all() if spec.name in written]
        self._watch = TopicWatch(self._settings, self._plan.sources, self._plan.sources, self._note_reading, changelogs)
        self._watch.start()
        seen: dict[TP, tuple[int, float, float]] = {}  # topic and partition to (next offset, since, wait)
        first, longest = REALIGN_EVERY_S
        while True:
            await asyncio.sleep(first)
            now = time.monotonic()
            for partition, table in list(self._partitions.items()):
                if partition in self._paused and table.next_offset(self._source.name) is not None and table.has_drained:
                    self._resume(partition)  # it drained after it was found full and before it was paused
                for tp in self._topic_partitions(partition):
                    next_offset = table.next_offset(tp.topic)
                    # The queue is shared by all sources; a source that delivers nothing is sought even if the
                    # others are busy.
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

    def _note_reading(self, reading: TopicReading) -> None:
        """Pass the sources' ends and the changelogs' ids to the partitions; the watch's thread calls this."""
        names = [source.name for source in self._plan.sources]
        for partition, table in list(self._partitions.items()):
            ends = reading.ends_of(names, partition)
            if ends is not None:
                table.note_ends(reading.asked_ms, ends)
            table.note_changelogs(reading.ids)
        for name in set(reading.missing) - set(self.sources_missing):
            log.warning(
                "%s does not exist any more, so nothing is consumed from it. `kvstreams topics create` with the same "
                "settings creates it again",
                name,
            )
        self.sources_missing = reading.missing
        for name in names:
            topic_id = reading.ids.get(name)
            if topic_id is not None and self._ids.setdefault(name, topic_id) != topic_id:
                self._source_recreated(name, topic_id)
        self._call(lambda: self._notice_topics(reading))

    def _source_recreated(self, name: str, topic_id: str) -> None:
        """Log that a source was recreated, once for all partitions."""
        if self._recreated.get(name) != topic_id:
            self._ids[name] = self._recreated[name] = topic_id
            log.warning(
                "%s was deleted and recreated, so records may be lost: every rank is degraded until its bridge has "
                "restated it",
                name,
            )

    def _notice_topics(self, reading: TopicReading) -> None:
        """Make Faust's consumer look for sources that exist and are unknown to it: it takes minutes by itself."""
        consumer = self._app.consumer
        unknown = any(name in reading.ids and not consumer.topic_partitions(name) for name in self._ids)
        if unknown and all(task.get_name() != _REFRESH for task in self._tasks):
            self._tasks.add(task := asyncio.get_running_loop().create_task(self._refresh_topics(), name=_REFRESH))
            task.add_done_callback(self._tasks.discard)

    async def _refresh_topics(self) -> None:
        try:
            await self._app.consumer.refresh_topics()
        except Exception as exc:  # the next reading tries again
            log.info("Faust's consumer did not look for new topics: %s", exc)

    def _feed(self, event: Any) -> None:
        """Offer the records of one event (delivery.RecordsMessage) to their partition."""
        records = event.value
        partition = records[0].partition
        table = self._partitions.get(partition)
        if table is None:
            return  # not ours any more; its owner receives the event
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
        """Seek a source to the table's next offset, or move the table past offsets that the log does not have."""
        topic, partition = tp.topic, tp.partition
        try:
            table = self._partitions.get(partition)
            next_offset = table.next_offset(topic) if table else None
            if table is None or next_offset is None:
                return
            # Records that Faust fetched before the seek are still in its queues; one of them would move Faust's own
            # position again.
            offsets, _ = await asyncio.gather(
                asyncio.to_thread(first_offset, self._settings, topic, partition, next_offset),
                asyncio.sleep(REALIGN_EVERY_S[0] / 2),
            )
            first = offsets.end if offsets.first is None else offsets.first
            if first > next_offset:
                lost = offsets.low > next_offset
                log.log(
                    logging.WARNING if lost else logging.INFO,
                    "%s [%d] has nothing from %d to %d",
                    *(topic, partition, next_offset, first - 1),
                )
                table.skip_to(topic, next_offset, first, lost)
            if self._partitions.get(partition) is table:
                next_offset = table.next_offset(topic)
                if next_offset is not None:
                    await self._seek(tp, next_offset)
        except Exception as exc:
            log.warning("%s [%d] was not sought back: %s", topic, partition, exc)  # `watch` tries again
        finally:
            self._realigning.discard(tp)

    async def _seek(self, tp: TP, next_offset: int) -> None:
        # Not `seek`: that reaches from this thread into a client of another thread, where a fetch may be returning
        # records that the seek discards, which ends the whole consumer.
        try:
            await self._app.consumer.seek_wait({tp: next_offset})
        except Exception as exc:  # revoked meanwhile; the class of the error differs between drivers
            log.warning("%s [%d] was not sought back: %s", tp.topic, tp.partition, exc)  # `watch` tries again

    async def _stop(self, tables: list[TablePartition]) -> None:
        self._paused.difference_update(table.partition for table in tables)
        await asyncio.gather(*(asyncio.to_thread(table.stop) for table in tables))

    def _wire(self, partition: int) -> PartitionWiring:
        verdicts = self._verdicts[partition]
        return PartitionWiring(
            settings=self._settings,
            tables=self._plan.tables,
            sources=self._plan.sources,
            dead_letters=topics(self._settings).dead_letters,
            owner=f"{os.uname().nodename}:{os.getpid()}",
            make_reducer=lambda: self._plan.make_reducer(verdicts, self._armed),
            acknowledge=self._acknowledge,
            drained=self._drained,
            opened=self._opened,
            is_ours=self._is_ours,
            source_recreated=self._source_recreated,
            on_effect=self._armed,
            now_ms=lambda: time.time_ns() // 1_000_000,
            partitions_open=lambda: len(self._partitions),
            answers=self.answers,
            turn=self._turn,
        )

    def _is_ours(self, partition: int) -> bool:
        assignment = (self._source.name, partition)
        members = group_members(self._settings)
        return members is not None and any(
            member.client_id == self._app.conf.broker_client_id and assignment in member.assigned for member in members
        )

    def _acknowledge(self, handles: list[Any]) -> None:
        events = [event for event in handles if event is not None]
        if not events:
            return
        with self._applied_lock:
            waiting = bool(self._applied)
            self._applied += events
        if not waiting and not self._call(self._acknowledge_later):
            with self._applied_lock:
                self._applied.clear()  # they are delivered again, and recognised as applied

    def _acknowledge_later(self) -> None:
        asyncio.get_running_loop().call_later(ACKNOWLEDGE_EVERY_S, self._acknowledge_all)

    def _acknowledge_all(self) -> None:
        with self._applied_lock:
            events, self._applied = self._applied, []
        for event in events:
            event.ack()

    def _drained(self, partition: int) -> None:
        if partition in self._paused:
            self._call(lambda: self._resume(partition))

    def _opened(self, partition: int, next_offset: dict[str, int]) -> None:
        where = ", ".join(f"{topic} from {offset}" for topic, offset in next_offset.items())
        log.info("partition %d is open, next: %s", partition, where)
        self._call(lambda: self._begin(partition))

    def _begin(self, partition: int) -> None:
        """Feed a partition from its table's next offset."""
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
            return  # it is being opened again, and will call `_opened`
        self._paused.discard(partition)
        self._app.consumer.resume_partitions(set(tps))
        for tp, offset in next_offset.items():
            assert offset is not None
            # Faust drops records that it had fetched of a paused partition; without a seek, nothing would arrive until
            # the next check of `watch`.
            self._tasks.add(task := asyncio.get_running_loop().create_task(self._seek(tp, offset)))
            task.add_done_callback(self._tasks.discard)

    def _source_end(self, topic: str, partition: int) -> int:
        try:
            end: int | None = self._app.consumer.highwater(TP(topic, partition))
        except Exception:  # not assigned at this moment; the class of the error differs between drivers
            return -1
        return -1 if end is None else end

    def _call(self, action: Callable[[], object]) -> bool:
        """Run an action on Faust's loop; returns whether there is one."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:  # it closed meanwhile: the process ends, and what was not acknowledged is delivered again
            return False
        return True


def _sum(by_partition: Mapping[int, Counter[str]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in list(by_partition.values()):
        total.update(dict(counts))  # a copy, since its thread may add a key meanwhile
    return dict(total)

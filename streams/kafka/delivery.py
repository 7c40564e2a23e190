"""Faust's delivery of records, changed so that the records of one fetch arrive together.

What lives here: a Kafka transport whose consumer makes one message, and so one event, of all the records of a partition
that one fetch returns. What must not: what happens to records (indexer_agent).

Faust delivers records one by one: each costs four tasks, a message, an event, two queues and an acknowledgement, 100 us
of a core. At thousands of records per second that is ten times the work of the tables. Delivered together, the records
of a fetch cost this once. The value of an agent's event is then a list of aiokafka's records. Faust still assigns,
seeks, pauses and commits: when the event is acknowledged, so is each of its offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Coroutine, Generator
from itertools import pairwise
from types import coroutine
from typing import Any

import faust
from aiokafka.errors import KafkaError
from faust.transport.drivers import aiokafka
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from mode.services import WaitResults

log = logging.getLogger(__name__)

#: How long a worker that stops waits for the commit of its group's offsets, and then until it has left the group.
STOP_STEP_TIMEOUT_S = 10.0


class RecordsMessage(ConsumerMessage):  # type: ignore[misc]  # Faust ships no types that mypy follows
    """The records of one partition, in order of their offsets. value: their list. offset: that of the last record."""

    def on_final_ack(self, consumer: _Consumer) -> bool:
        """Acknowledge every record's offset."""
        consumer.ack_offsets(self.topic, self.tp, {record.offset for record in self.value[:-1]})
        acknowledged: bool = consumer.ack(self)
        return acknowledged


class _ConsumerThread(aiokafka.AIOKafkaConsumerThread):  # type: ignore[misc]
    def _create_worker_consumer(self, transport: Any) -> Any:
        """Create Faust's own consumer, for committed records only; Faust does so only with its own transactions.

        An agent writes expiries to a source within its transaction. If the transaction is aborted, as that of a fenced
        owner is, its expiries must not be applied.
        """
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"  # takes effect when the consumer starts
        return consumer

    async def on_thread_stop(self) -> None:
        """Stop as Faust's own thread does, but not wait for long until the group is left if no broker answers.

        aiokafka's consumer also raises CancelledError when it stops while a fetch waits to be repeated. Faust's thread
        would end of it without a word, and the worker would wait a minute for its end.
        """
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(super().on_thread_stop(), STOP_STEP_TIMEOUT_S)

    async def refresh_topics(self) -> None:
        """Ask the broker for the subscribed topics; the group is joined again if one of them appeared or vanished.

        By itself, aiokafka asks every five minutes, and when a fetch fails. A topic without partitions is not fetched.
        """
        await self._ensure_consumer()._client.force_metadata_update()


class _Consumer(aiokafka.Consumer):  # type: ignore[misc]
    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, RecordsMessage]]:
        """Yield as Faust's own consumer does, but one message for each partition that has records."""
        fetched, active = await self._wait_next_records(timeout)
        generation = self.app.consumer_generation_id
        if fetched is None or self.should_stop:
            return
        if not self.flow_active:
            await self.perform_seek()
            return
        for tp, records in fetched.items():
            if not self.flow_active or self.app.consumer_generation_id != generation:
                return  # the records belong to an assignment that has ended
            if active is not None and tp not in active and tp not in self._buffered_partitions:
                continue
            self.app.monitor.track_tp_end_offset(tp, self.highwater(tp))
            read_to = self._read_offset[tp]
            if read_to is not None:
                records = [record for record in records if record.offset >= read_to]
                # Offsets without a record, those of markers and of compacted records, count as acknowledged.
                for before, after in pairwise((read_to, *(record.offset for record in records))):
                    if after - before > 1 and self.app.topics.acks_enabled_for(tp.topic):
                        await self._add_gap(tp, before + 1, after - 1)
            if records:
                # Faust checks for a gap between the offset read last and that of a message.
                self._read_offset[tp] = records[-1].offset
                yield tp, _message(self, tp, records)

    def ack_offsets(self, topic: str, tp: TP, offsets: set[int]) -> None:
        """Acknowledge offsets as `ack` does per message, in a tenth of its time; the caller holds Faust's ack lock."""
        if not self.app.topics.acks_enabled_for(topic):
            return
        committed = self._committed_offset[tp]
        if committed is not None:
            offsets = {offset for offset in offsets if offset >= committed}
        offsets -= self._acked_index[tp]
        self._acked_index[tp] |= offsets
        self._acked[tp] += offsets
        self._n_acked += len(offsets)

    async def perform_seek(self) -> None:
        """Seek as Faust's own consumer does, but tolerate that partitions are revoked meanwhile.

        Faust requests the committed offsets of the assigned partitions and then seeks each. A rebalance may revoke the
        assignment in between; Faust's own code then ends the worker, with all the partitions that it had just received.
        The next assignment seeks again.
        """
        try:
            await super().perform_seek()
        except (KafkaError, AssertionError) as exc:  # aiokafka asserts that anything is assigned
            log.info("did not seek to committed offsets; the tables' own offsets are used: %s", exc)

    async def on_stop(self) -> None:
        """Stop as Faust's own consumer does, but not wait for ever for the group's coordinator if no broker answers.

        Nothing is lost without this commit: the tables have their own offsets.
        """
        try:
            await asyncio.wait_for(super().on_stop(), STOP_STEP_TIMEOUT_S)
        except TimeoutError:
            log.warning("the group's offsets were not committed, because no broker answered; the tables' are used")

    async def _seek(self, partition: TP, offset: int) -> None:
        """Seek on the thread of aiokafka's consumer, which is the only one that may touch fetched records.

        Faust's own code seeks from the app's thread: a partition's records then disappear while the other thread reads
        them, and the worker ends with a KeyError. This happened to three of 30 workers that started on a busy machine.
        """
        await self._thread.call_thread(self._thread.seek, partition, offset)

    async def refresh_topics(self) -> None:
        """Look for subscribed topics that were created since the last rebalance."""
        await self._thread.call_thread(self._thread.refresh_topics)

    async def wait_first(self, *coros: Any, timeout: Any = None) -> Any:
        """Wait as Service.wait_first does, without a task for what ends in its first step, as most deliveries do."""
        first = coros[0]
        if not inspect.iscoroutine(first):
            return await super().wait_first(*coros, timeout=timeout)
        try:
            waiting = first.send(None)
        except StopIteration as ended:
            for other in coros[1:]:
                if inspect.iscoroutine(other):
                    other.close()  # it was never started and will not be awaited
            return WaitResults([first], [ended.value], False)
        return await super().wait_first(_continue(first, waiting), *coros[1:], timeout=timeout)


def _message(consumer: Any, tp: TP, records: list[Any]) -> RecordsMessage:
    last = records[-1]
    return RecordsMessage(
        last.topic,
        last.partition,
        last.offset,
        last.timestamp / 1000.0,
        last.timestamp_type,
        None,
        None,
        records,
        None,
        tp=tp,
        generation_id=consumer.app.consumer_generation_id,
    )


async def _continue(started: Coroutine[Any, Any, Any], waiting: Any) -> Any:
    return await _rest_of(started, waiting)


@coroutine
def _rest_of(started: Coroutine[Any, Any, Any], waiting: Any) -> Generator[Any, Any, Any]:
    """Run the rest of a coroutine that has been started and now waits for `waiting`."""
    while True:
        thrown: BaseException | None = None
        value = None
        try:
            value = yield waiting
        except GeneratorExit:
            started.close()
            raise
        except BaseException as exc:
            thrown = exc
        try:
            waiting = started.send(value) if thrown is None else started.throw(thrown)
        except StopIteration as ended:
            return ended.value


class _Transport(aiokafka.Transport):  # type: ignore[misc]
    Consumer = _Consumer


class _BootStrategy(faust.App.BootStrategy):  # type: ignore[misc]
    #: Faust's own pages (/router/, /table/, /graph and others) are not part of our API.
    enable_web = False


class _Topic(faust.Topic):  # type: ignore[misc]
    """A topic of Faust, which may consist of several topics of Kafka."""

    def get_topic_name(self) -> str:
        """Return all names. Faust's own method refuses several, and `faust -A streams agents` then fails."""
        return ", ".join(self.topics)


class App(faust.App):  # type: ignore[misc]
    """A Faust App whose agents receive the records of a fetch together, and that serves none of Faust's web pages."""

    BootStrategy = _BootStrategy

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"Topic": _Topic, **options})

    def _new_transport(self) -> Any:
        return _Transport(self.conf.broker_consumer, self, loop=self.loop)

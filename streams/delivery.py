"""Faust's delivery of records, a partition's fetched ones together.

What lives here: a Kafka transport whose consumer makes one message, and so one event, of all records of a partition
that one fetch gave. What must not: what becomes of records (indexer_agent).

Faust hands records over one by one: four tasks, a message, an event, two queues and an acknowledgement each, 100 us of
a core that takes in thousands of records a second, ten times what the table does with them. Together they cost that
once. An agent's event then has a list of aiokafka's records as its value. Faust goes on assigning, seeking, pausing and
committing: when the event is acknowledged, each of its offsets is.
"""

from __future__ import annotations

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


class RecordsMessage(ConsumerMessage):  # type: ignore[misc]  # Faust ships no types that mypy follows
    """Records of one partition, in order of their offsets. value: the list of them. offset: the last one's."""

    def on_final_ack(self, consumer: _Consumer) -> bool:
        """Acknowledge every record's offset."""
        consumer.ack_offsets(self.topic, self.tp, {record.offset for record in self.value[:-1]})
        acknowledged: bool = consumer.ack(self)
        return acknowledged


class _ConsumerThread(aiokafka.AIOKafkaConsumerThread):  # type: ignore[misc]
    def _create_worker_consumer(self, transport: Any) -> Any:
        """As Faust's own, for committed records only, which Faust asks for with its own transactions alone.

        An agent writes expiries to a source within its transaction: of one that was aborted, as a fenced owner's is,
        they never happened.
        """
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"  # read when it is started
        return consumer


class _Consumer(aiokafka.Consumer):  # type: ignore[misc]
    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, RecordsMessage]]:
        """As Faust's own, a message for each partition that has records."""
        fetched, active = await self._wait_next_records(timeout)
        generation = self.app.consumer_generation_id
        if fetched is None or self.should_stop:
            return
        if not self.flow_active:
            await self.perform_seek()
            return
        for tp, records in fetched.items():
            if not self.flow_active or self.app.consumer_generation_id != generation:
                return  # what was fetched belongs to an assignment that is over
            if active is not None and tp not in active and tp not in self._buffered_partitions:
                continue
            self.app.monitor.track_tp_end_offset(tp, self.highwater(tp))
            read_to = self._read_offset[tp]
            if read_to is not None:
                records = [record for record in records if record.offset >= read_to]
                # Offsets that no record has, markers' and compacted ones', count as acknowledged.
                for before, behind in pairwise((read_to, *(record.offset for record in records))):
                    if behind - before > 1 and self.app.topics.acks_enabled_for(tp.topic):
                        await self._add_gap(tp, before + 1, behind - 1)
            if records:
                # Faust looks for a hole between the offset read last and a message's own.
                self._read_offset[tp] = records[-1].offset
                yield tp, _message(self, tp, records)

    def ack_offsets(self, topic: str, tp: TP, offsets: set[int]) -> None:
        """As `ack` of a message for each, which takes ten times as long; whoever calls holds Faust's lock of acks."""
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
        """As Faust's own, unless partitions are revoked meanwhile; whoever is assigned them is sought anew.

        Faust asks for the committed offsets of what is assigned and then seeks each: in a rebalance the assignment may
        be gone in between, and the worker ended of it, with all the partitions that had just come to it.
        """
        try:
            await super().perform_seek()
        except (KafkaError, AssertionError) as exc:  # aiokafka asserts that anything is assigned
            log.info("not sought to what is committed, the tables say where to begin: %s", exc)

    async def _seek(self, partition: TP, offset: int) -> None:
        """On the thread of aiokafka's consumer, where all else is done that touches what it has fetched.

        Faust's own seeks from the thread of the app: a partition's records then go while the other thread looks at
        them, and the worker ends with a KeyError. Three of 30 workers that started on a laden machine did.
        """
        await self._thread.call_thread(self._thread.seek, partition, offset)

    async def wait_first(self, *coros: Any, timeout: Any = None) -> Any:
        """As Service.wait_first; what ends in its first step, as a delivery almost always does, needs no task."""
        first = coros[0]
        if not inspect.iscoroutine(first):
            return await super().wait_first(*coros, timeout=timeout)
        try:
            waiting = first.send(None)
        except StopIteration as ended:
            for other in coros[1:]:
                if inspect.iscoroutine(other):
                    other.close()  # never begun, and nobody will await it
            return WaitResults([first], [ended.value], False)
        return await super().wait_first(_go_on(first, waiting), *coros[1:], timeout=timeout)


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


async def _go_on(begun: Coroutine[Any, Any, Any], waiting: Any) -> Any:
    return await _rest_of(begun, waiting)


@coroutine
def _rest_of(begun: Coroutine[Any, Any, Any], waiting: Any) -> Generator[Any, Any, Any]:
    """A coroutine that has been begun, from what it waits for on."""
    while True:
        thrown: BaseException | None = None
        value = None
        try:
            value = yield waiting
        except GeneratorExit:
            begun.close()
            raise
        except BaseException as exc:
            thrown = exc
        try:
            waiting = begun.send(value) if thrown is None else begun.throw(thrown)
        except StopIteration as ended:
            return ended.value


class _Transport(aiokafka.Transport):  # type: ignore[misc]
    Consumer = _Consumer


class App(faust.App):  # type: ignore[misc]
    """A Faust App whose agents get the records of a partition together."""

    def _new_transport(self) -> Any:
        return _Transport(self.conf.broker_consumer, self, loop=self.loop)

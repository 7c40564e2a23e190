"""What an agent does when partitions are revoked and assigned, on a real Kafka; the test plays Faust's part."""

from __future__ import annotations

import asyncio
import threading

import faust
from faust.types import TP

from streams.indexer_agent import Indexer
from streams.kafka.clients import ensure_topics
from streams.settings import Settings
from streams.tables.index_reducer import prefix_index_table
from streams.tables.reducer import PartitionPlan, SourceRecord
from streams.topics import topics
from tests.helpers.slow_reducer import Slow
from tests.helpers.support import VISIBLE_TIMEOUT_S


def test_a_worker_may_end_while_its_partitions_are_revoked(scope: Settings) -> None:
    """Both calls wait for the running batch, and the second one finds nothing left to release."""
    names = topics(scope)
    ensure_topics(scope, names.all())
    source = names.kv_events.name
    proceed = threading.Event()
    plan = PartitionPlan((prefix_index_table(scope),), (names.kv_events,), lambda *_: Slow(proceed))

    async def scenario() -> None:
        indexer = Indexer(faust.App(scope.app_id, broker=f"kafka://{scope.kafka}"), scope, plan)
        await indexer.assigned({TP(source, 0)})
        (table,) = indexer._partitions.values()
        while table.next_offset(source) is None:
            await asyncio.sleep(0.01)
        assert table.offer([SourceRecord(source, 0, 0, 0, b"1", b"1", ())]) is None
        while table.queued:
            await asyncio.sleep(0.01)
        revoked = asyncio.create_task(indexer.revoked({TP(source, 0)}))
        while table.next_offset(source) is not None:
            await asyncio.sleep(0.01)
        closed = asyncio.create_task(indexer.close())
        await asyncio.sleep(0)
        while indexer._partitions:
            await asyncio.sleep(0.01)
        proceed.set()
        await asyncio.gather(revoked, closed)

    try:
        asyncio.run(asyncio.wait_for(scenario(), VISIBLE_TIMEOUT_S))
    finally:
        proceed.set()

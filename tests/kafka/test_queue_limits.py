"""A partition's queue is limited in records and in bytes, on a real Kafka."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streams.kafka.clients import ensure_topics
from streams.lab.processes import Children
from streams.lab.stack import Stack
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.index_reducer import prefix_index_table
from streams.tables.partition import TablePartition
from streams.tables.reducer import SourceRecord
from streams.tables.wiring import PartitionWiring
from streams.topics import topics
from tests.helpers.slow_reducer import Slow
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.truth import Engines, assert_equal

MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    ("changes", "size", "taken"),
    [
        ({}, MEGABYTE, 65),
        ({"queue_bytes_high": 10 * MEGABYTE}, MEGABYTE, 11),
        ({"queue_bytes_high": 10 * MEGABYTE}, MEGABYTE // 2, 21),
        ({"queue_records_high": 20}, 0, 21),
    ],
)
def test_a_full_partition_takes_no_records_until_it_has_drained(
    scope: Settings, changes: dict[str, Any], size: int, taken: int
) -> None:
    """Of 4,096 offered records it queues one more than its limit, and takes the next ones after it has drained."""
    settings = replace(scope, **changes)
    names = topics(settings)
    ensure_topics(settings, names.all())
    proceed, drained, opened = threading.Event(), threading.Event(), threading.Event()
    acknowledged: list[int] = []
    table = TablePartition(
        0,
        PartitionWiring(
            settings=settings,
            tables=(prefix_index_table(settings),),
            sources=(names.kv_events,),
            dead_letters=names.dead_letters,
            owner="test",
            make_reducer=lambda: Slow(proceed),
            acknowledge=acknowledged.extend,
            drained=lambda _: drained.set(),
            opened=lambda *_: opened.set(),
            is_ours=lambda _: True,
            on_effect=None,
            now_ms=lambda: 0,
        ),
    )
    value = bytes(size)

    def offer(first: int, last: int) -> None:
        for offset in range(first, last):
            record = SourceRecord(names.kv_events.name, 0, offset, 0, b"1", value, (), offset)
            assert table.offer([record]) is None

    table.start()
    try:
        assert opened.wait(VISIBLE_TIMEOUT_S)
        offer(0, 1)
        wait_for(lambda: table.queued == 0, VISIBLE_TIMEOUT_S, "the first record to be taken")
        drained.clear()
        offer(1, 4097)
        assert (table.queued, table.queued_bytes) == (taken, taken * size)
        assert table.is_full
        assert not table.has_drained
        assert table.next_offset(names.kv_events.name) == taken + 1
        proceed.set()
        assert drained.wait(VISIBLE_TIMEOUT_S)
        wait_for(lambda: len(acknowledged) == taken + 1, VISIBLE_TIMEOUT_S, "all queued records to be acknowledged")
        assert (table.queued, table.queued_bytes, table.has_drained) == (0, 0, True)
        offer(taken + 1, taken + 3)
        wait_for(lambda: acknowledged == list(range(taken + 3)), VISIBLE_TIMEOUT_S, "the rest")
    finally:
        proceed.set()
        table.stop()


def test_a_worker_whose_sources_are_always_paused_loses_nothing(
    scope: Settings, tmp_path: Path, children: Children
) -> None:
    """With limits of a few hundred bytes, almost every fetch is partly dropped and sought back."""
    settings = replace(scope, queue_bytes_high=500, batch_records_max=3)
    stack = Stack(settings, tmp_path, children)
    worker = stack.worker()
    engines = Engines(settings, seed=5)
    engines.publish(300)
    assert_equal(worker.url, engines.reference)

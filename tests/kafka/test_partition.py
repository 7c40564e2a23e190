"""One partition by itself on a real Kafka: batches that a reducer ends, stretches without records, and rebalances."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from streams.errors import BadRecord
from streams.kafka.clients import Record, delete_topics, ensure_topics, producer
from streams.kafka.log_offsets import log_end
from streams.process.waiting import wait_for
from streams.settings import Settings, tables_path
from streams.tables.changelog import read_to_end
from streams.tables.index_reducer import prefix_index_table
from streams.tables.pacing import PARTITION_RECORD_EVERY_S, TRANSACTIONS_PER_SECOND_MAX
from streams.tables.partition import TablePartition
from streams.tables.records import PARTITION_KEY, Change, decode_partition
from streams.tables.reducer import Outgoing, SourceRecord
from streams.tables.standby import Standby
from streams.tables.store import PartitionStore, TableSpec
from streams.tables.transactions import INIT_TIMEOUT_S, commit_until_answered, produce, table_producer
from streams.tables.wiring import PartitionWiring
from streams.topics import topics
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.workers import recreate_changelog


@dataclass
class Thirds:
    """A reducer that is full after every third record; it writes each value under its own key."""

    table: TableSpec
    applied: list[bytes] = field(default_factory=list)

    loaded: list[bytes] = field(default_factory=list)

    def load(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> None:  # noqa: ARG002 - the signature
        self.loaded.extend(value for _, value in items)

    def follow(self, table: TableSpec, changes: Sequence[Change]) -> None:  # noqa: ARG002 - the signature
        self.loaded.extend(value for key, value in changes if key.startswith(b"K") and value is not None)

    def resume(self, *_: object) -> bool:
        return True

    def take_refused(self) -> list[tuple[SourceRecord, BadRecord]]:
        return []

    def decode(self, records: Sequence[SourceRecord]) -> Sequence[bytes]:
        return [record.value or b"" for record in records]

    def apply(self, record: SourceRecord, decoded: bytes) -> None:  # noqa: ARG002 - the signature
        self.applied.append(decoded)

    @property
    def full(self) -> bool:
        return len(self.applied) == 3

    def source_lost(self) -> None:
        raise AssertionError("nothing was lost")

    def tick(self, *_: object) -> list[Outgoing]:
        return []

    def take_changes(self) -> dict[TableSpec, list[Change]]:
        taken, self.applied = self.applied, []
        return {self.table: [(b"K" + value, value) for value in taken]}


@dataclass
class Opened:
    """Opens a partition; has what it acknowledged, and the reducers that it created."""

    settings: Settings
    acknowledged: list[Any] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    reducers: list[Thirds] = field(default_factory=list)
    partitions_open: int = 1
    turn: threading.Lock = field(default_factory=threading.Lock)
    on_effect: Callable[[int], None] | None = None
    now_ms: int = 0

    def make_reducer(self) -> Thirds:
        self.reducers.append(Thirds(prefix_index_table(self.settings)))
        return self.reducers[-1]

    def open(self, standby: Standby | None = None) -> TablePartition:
        partition = self.start(standby)
        assert self.ready.wait(VISIBLE_TIMEOUT_S)
        return partition

    def start(self, standby: Standby | None = None) -> TablePartition:
        partition = TablePartition(0, self.wiring(), standby=standby)
        partition.start()
        return partition

    def follow(self) -> Standby:
        """Follow the partition as another process does, and wait until the copy is up to date."""
        standby = Standby(0, self.wiring(), lambda: True)
        standby.start()
        wait_for(lambda: standby.is_current, VISIBLE_TIMEOUT_S, "a standby that is up to date")
        return standby

    def wiring(self) -> PartitionWiring:
        names = topics(self.settings)
        return PartitionWiring(
            settings=self.settings,
            tables=(prefix_index_table(self.settings),),
            sources=(names.kv_events,),
            dead_letters=names.dead_letters,
            owner="a test",
            make_reducer=self.make_reducer,
            acknowledge=self.acknowledged.extend,
            drained=lambda _: None,
            opened=lambda *_: self.ready.set(),
            is_ours=lambda _: True,
            on_effect=self.on_effect,
            now_ms=lambda: self.now_ms,
            partitions_open=lambda: self.partitions_open,
            turn=self.turn,
        )

    def transactions(self) -> list[tuple[int, list[bytes]]]:
        """Return the applied offset of each transaction that wrote values, and these values."""
        found: list[tuple[int, list[bytes]]] = []
        written: list[bytes] = []

        def take(records: list[Record]) -> None:
            for record in records:
                if record.key != PARTITION_KEY.pack(0):
                    written.append(record.value or b"")
                elif written:
                    applied = decode_partition(record.key, record.value or b"").sources[0].applied_offset
                    found.append((applied, written.copy()))
                    written.clear()

        read_to_end(self.settings, topics(self.settings).index_changelog.name, 0, None, take)
        return found


@pytest.fixture
def opened(scope: Settings) -> Opened:
    ensure_topics(scope, topics(scope).all())
    return Opened(scope)


@pytest.fixture
def other(opened: Opened, tmp_path: Path) -> Opened:
    """Another process, with a folder of its own."""
    return Opened(replace(opened.settings, data_dir=str(tmp_path / "other")))


def records(settings: Settings, first: int, last: int) -> list[SourceRecord]:
    source = topics(settings).kv_events.name
    return [SourceRecord(source, 0, n, 0, None, b"%d" % n, (), n) for n in range(first, last + 1)]


def test_a_batch_that_a_reducer_ends_becomes_several_transactions_in_order(opened: Opened) -> None:
    """Records after the cut are not lost, and are applied and acknowledged in turn; no offset is skipped."""
    partition = opened.open()
    try:
        assert partition.offer(records(opened.settings, 0, 7)) is None
        wait_for(lambda: len(opened.acknowledged) == 8, VISIBLE_TIMEOUT_S, "eight acknowledgements")
        source = topics(opened.settings).kv_events.name
        partition.skip_to(source, 6, 10, False)  # determined before the partition was opened again
        assert partition.next_offset(source) == 8
        partition.skip_to(source, 8, 12, False)
        assert partition.offer(records(opened.settings, 12, 15)) is None
        wait_for(lambda: len(opened.acknowledged) == 12, VISIBLE_TIMEOUT_S, "four more")
    finally:
        partition.stop()
    assert opened.acknowledged == [*range(8), *range(12, 16)]
    written = [(applied, [int(value) for value in values]) for applied, values in opened.transactions()]
    assert [applied for applied, _ in written][-1] == 15
    assert [number for _, numbers in written for number in numbers] == opened.acknowledged
    for applied, numbers in written:
        assert len(numbers) <= 3 and applied == numbers[-1]


def test_a_partition_that_a_rebalance_returns_continues_without_being_read_again(opened: Opened) -> None:
    """While suspended it finishes its batch, and takes and writes nothing; then it requests the next records."""
    partition = opened.open()
    try:
        assert partition.offer(records(opened.settings, 0, 4)) is None
        wait_for(lambda: len(opened.acknowledged) == 5, VISIBLE_TIMEOUT_S, "five acknowledgements")
        assert partition.suspend()
        assert partition.suspend()  # a second rebalance before the first is over
        written = partition.counts()["transactions"]
        source = topics(opened.settings).kv_events.name
        assert partition.offer(records(opened.settings, 5, 6)) == -1
        assert partition.next_offset(source) is None
        time.sleep(1.5 * PARTITION_RECORD_EVERY_S)
        assert partition.counts()["transactions"] == written
        opened.ready.clear()
        partition.resume()
        assert opened.ready.wait(VISIBLE_TIMEOUT_S)
        assert partition.next_offset(source) == 5
        assert partition.offer(records(opened.settings, 5, 6)) is None
        wait_for(lambda: len(opened.acknowledged) == 7, VISIBLE_TIMEOUT_S, "two more")
        assert len(opened.reducers) == 1 and partition.counts()["reopened"] == 0
        assert partition.suspend()
    finally:
        partition.stop()  # as when it moves to another worker
    assert opened.acknowledged == list(range(7))


def test_a_partition_that_another_owned_while_it_was_suspended_is_read_again(opened: Opened) -> None:
    """It loads what the other owner wrote before it takes a record, although nothing announced that owner."""
    partition = opened.open()
    try:
        assert partition.offer(records(opened.settings, 0, 2)) is None
        wait_for(lambda: len(opened.acknowledged) == 3, VISIBLE_TIMEOUT_S, "three acknowledgements")
        assert partition.suspend()
        other = table_producer(opened.settings, 0)
        other.init_transactions(INIT_TIMEOUT_S)
        other.begin_transaction()
        changelog = topics(opened.settings).index_changelog.name
        produce(other, changelog, 0, b"Kanother", b"another", None, None)
        commit_until_answered(other)
        opened.ready.clear()
        partition.resume()
        assert opened.ready.wait(VISIBLE_TIMEOUT_S)
        assert partition.counts()["reopened"] == 1
        assert opened.reducers[-1].loaded == [b"0", b"1", b"2", b"another"]
        assert partition.next_offset(topics(opened.settings).kv_events.name) == 3
    finally:
        partition.stop()


def test_a_hole_within_a_fetch_is_skipped_and_one_before_it_is_reported(opened: Opened) -> None:
    """Otherwise each marker in a backlog would need a seek and a query, and cost more than a second."""
    partition = opened.open()
    try:
        source = topics(opened.settings).kv_events.name
        fetched = [*records(opened.settings, 0, 2), *records(opened.settings, 4, 6), *records(opened.settings, 9, 9)]
        assert partition.offer(fetched) is None
        assert partition.next_offset(source) == 10
        assert partition.offer(records(opened.settings, 12, 12)) == 10
        again = [*records(opened.settings, 6, 6), *records(opened.settings, 9, 9), *records(opened.settings, 11, 12)]
        assert partition.offer(again) is None
        assert partition.next_offset(source) == 13
        wait_for(lambda: set(opened.acknowledged) >= {11, 12}, VISIBLE_TIMEOUT_S, "the last two")
    finally:
        partition.stop()
    written = [int(value) for _, values in opened.transactions() for value in values]
    assert written == [0, 1, 2, 4, 5, 6, 9, 11, 12]


def test_a_rebalance_does_not_wait_for_the_pause_between_transactions(opened: Opened) -> None:
    """Records that were queued during the pause are requested again, even if a stretch without records follows."""
    partition = opened.open()
    try:
        source = topics(opened.settings).kv_events.name
        assert partition.offer(records(opened.settings, 0, 2)) is None
        wait_for(lambda: len(opened.acknowledged) == 3, VISIBLE_TIMEOUT_S, "three acknowledgements")
        opened.partitions_open = int(TRANSACTIONS_PER_SECOND_MAX * VISIBLE_TIMEOUT_S)
        assert partition.offer(records(opened.settings, 3, 5)) is None
        partition.skip_to(source, 6, 9, False)
        assert partition.queued == 3
        assert partition.suspend()
        opened.partitions_open = 1
        opened.ready.clear()
        partition.resume()
        assert opened.ready.wait(VISIBLE_TIMEOUT_S)
        assert partition.next_offset(source) == 3
        assert partition.offer(records(opened.settings, 3, 5)) is None
        wait_for(lambda: len(opened.acknowledged) == 6, VISIBLE_TIMEOUT_S, "three more")
    finally:
        partition.stop()
    assert opened.acknowledged == list(range(6))


def test_records_queued_after_a_failed_batch_are_requested_again_before_a_skipped_stretch(
    scope: Settings,
) -> None:
    """The batch is processed again by itself, and the skipped stretch does not follow it directly."""
    opened = Opened(replace(scope, batch_records_max=3))
    ensure_topics(scope, topics(scope).all())
    reached, proceed = threading.Event(), threading.Event()

    def fail_once(effect: int) -> None:
        if effect == 4 and not reached.is_set():
            reached.set()
            proceed.wait()
            raise RuntimeError("raised by a test")

    opened.on_effect = fail_once
    partition = opened.open()
    try:
        source = topics(scope).kv_events.name
        opened.ready.clear()
        assert partition.offer(records(scope, 0, 5)) is None
        assert reached.wait(VISIBLE_TIMEOUT_S)
        partition.skip_to(source, 6, 9, False)
        assert partition.queued == 3
        proceed.set()
        assert opened.ready.wait(VISIBLE_TIMEOUT_S)
        assert partition.counts()["reopened"] == 1
        assert partition.next_offset(source) == 3
        assert opened.acknowledged == [0, 1, 2]
    finally:
        proceed.set()
        partition.stop()


@pytest.mark.first_ring
def test_a_standby_becomes_the_owner_with_what_it_has_in_memory(opened: Opened, other: Opened) -> None:
    """It follows what the owner writes, and continues after the owner's last record without loading the table."""
    first = opened.open()
    try:
        assert first.offer(records(opened.settings, 0, 2)) is None
        wait_for(lambda: len(opened.acknowledged) == 3, VISIBLE_TIMEOUT_S, "three acknowledgements")
        standby = other.follow()
        assert first.offer(records(opened.settings, 3, 5)) is None
        wait_for(lambda: other.reducers[0].loaded[3:] == [b"3", b"4", b"5"], VISIBLE_TIMEOUT_S, "what the owner writes")
        assert first.offer(records(opened.settings, 6, 6)) is None
        wait_for(lambda: len(opened.acknowledged) == 7, VISIBLE_TIMEOUT_S, "seven acknowledgements")
        assert first.suspend()  # as a process that is paused
        second = other.open(standby)
        try:
            assert second.next_offset(topics(opened.settings).kv_events.name) == 7
            assert [reducer.loaded for reducer in other.reducers] == [[b"%d" % n for n in range(7)]]
            assert second.counts()["taken_over"] == 1
            assert second.offer(records(opened.settings, 7, 7)) is None
            wait_for(lambda: other.acknowledged == [7], VISIBLE_TIMEOUT_S, "an acknowledgement")
        finally:
            second.stop()
    finally:
        first.stop()
    assert opened.transactions()[-1] == (7, [b"7"])


@pytest.mark.parametrize("fault", ["paused", "recreated"])
def test_a_standby_whose_copy_cannot_be_continued_reads_the_changelog_from_its_start(
    opened: Opened, other: Opened, fault: str
) -> None:
    """It was paused for so long that tombstones may be gone, or the changelog is another one."""
    first = opened.open()
    try:
        assert first.offer(records(opened.settings, 0, 2)) is None
        wait_for(lambda: len(opened.acknowledged) == 3, VISIBLE_TIMEOUT_S, "three acknowledgements")
        standby = other.follow()
        assert first.suspend()
        if fault == "paused":
            other.now_ms = 365 * 86_400_000
        else:
            recreate_changelog(opened.settings)
        second = other.open(standby)
        try:
            left = 3 if fault == "paused" else 0
            assert second.next_offset(topics(opened.settings).kv_events.name) == left
            assert len(other.reducers) >= 2
            assert other.reducers[-1].loaded == [b"0", b"1", b"2"][:left]
        finally:
            second.stop()
    finally:
        first.stop()


def test_a_partition_that_is_stopped_while_it_is_opened_reads_no_further(opened: Opened) -> None:
    """A rebalance meanwhile, as when several workers start, waits for a piece of the log and not for all of it."""
    first = opened.open()
    assert first.offer(records(opened.settings, 0, 2)) is None
    wait_for(lambda: len(opened.acknowledged) == 3, VISIBLE_TIMEOUT_S, "three acknowledgements")
    first.stop()
    shutil.rmtree(opened.settings.data_dir)
    reducers = len(opened.reducers)
    with opened.turn:  # the second partition needs it to keep its first piece
        second = opened.start()
        wait_for(lambda: any(Path(opened.settings.data_dir).rglob("CURRENT")), VISIBLE_TIMEOUT_S, "a RocksDB")
        ending = threading.Thread(target=second.stop)
        ending.start()
        wait_for(lambda: second._stopping, VISIBLE_TIMEOUT_S, "the stop to be requested")
    ending.join()
    assert len(opened.reducers) == reducers
    assert second.counts()["reopened"] == 0


def test_a_missing_changelog_does_not_cost_the_copy_on_disk(opened: Opened) -> None:
    """The partition logs this and tries again; its copy is still valid if the topic returns."""
    first = opened.open()
    assert first.offer(records(opened.settings, 0, 2)) is None
    wait_for(lambda: len(opened.acknowledged) == 3, VISIBLE_TIMEOUT_S, "three acknowledgements")
    first.stop()
    delete_topics(opened.settings, [topics(opened.settings).index_changelog])
    second = opened.start()
    try:
        wait_for(lambda: second.counts()["reopened"] >= 2, VISIBLE_TIMEOUT_S, "two attempts")
    finally:
        second.stop()
    (path,) = tables_path(opened.settings).iterdir()
    store = PartitionStore(path, path.name, opened.settings.rocksdb_cache_mb)
    try:
        assert [value for key, value in store.items(prefix_index_table(opened.settings)) if key[:1] == b"K"] == [
            b"0",
            b"1",
            b"2",
        ]
    finally:
        store.close()


def test_a_changelog_that_was_recreated_and_is_longer_than_the_old_one_is_noticed_by_its_id(opened: Opened) -> None:
    """Offsets do not go backwards then, so no commit notices it. The table starts over from its sources."""
    partition = opened.open()
    changelog, source = topics(opened.settings).index_changelog.name, topics(opened.settings).kv_events.name
    try:
        assert partition.offer(records(opened.settings, 0, 2)) is None
        wait_for(lambda: len(opened.acknowledged) == 3, VISIBLE_TIMEOUT_S, "three acknowledgements")
        assert partition.suspend()
        old_end = log_end(opened.settings, changelog, 0)
        new_id = recreate_changelog(opened.settings)
        other = producer(opened.settings)
        for _ in range(old_end):
            other.produce(changelog, b"another", b"Kanother", 0)
        assert other.flush(VISIBLE_TIMEOUT_S) == 0
        opened.ready.clear()
        partition.resume()
        assert opened.ready.wait(VISIBLE_TIMEOUT_S)  # it has committed to the new changelog
        assert partition.next_offset(source) == 3 and partition.counts()["reopened"] == 0
        opened.ready.clear()
        partition.note_changelogs({changelog: new_id})
        assert opened.ready.wait(VISIBLE_TIMEOUT_S)
        assert partition.next_offset(source) == 0 and partition.counts()["reopened"] == 1
        assert partition.offer(records(opened.settings, 0, 2)) is None
        wait_for(lambda: len(opened.acknowledged) == 6, VISIBLE_TIMEOUT_S, "three more")
        partition.note_changelogs({changelog: new_id})
    finally:
        partition.stop()
    assert partition.counts()["reopened"] == 1
    assert opened.transactions()[-1] == (2, [b"0", b"1", b"2"])


def test_a_partition_that_is_not_open_cannot_be_suspended(opened: Opened) -> None:
    """A partition that was stopped or is opening has no state to keep."""
    partition = opened.open()
    partition.stop()
    assert not partition.suspend()

"""Which records the queue of a partition takes, and in which batches it returns them."""

from __future__ import annotations

import pytest

from streams.settings import Settings
from streams.tables.pacing import BATCH_BYTES_MAX
from streams.tables.reducer import SourceRecord
from streams.tables.source_queue import SourceQueue


def records(*offsets: int, topic: str = "a", size: int = 1) -> list[SourceRecord]:
    return [SourceRecord(topic, 0, offset, 0, None, bytes(size), (), handle=f"{topic}{offset}") for offset in offsets]


def open_queue(**changes: int) -> SourceQueue:
    queue = SourceQueue(Settings(**changes))  # type: ignore[arg-type] # settings that are whole numbers
    queue.open({"a": 5})
    return queue


def offsets(queue: SourceQueue) -> list[int]:
    return [record.offset for record in queue.take_batch()]


@pytest.mark.parametrize(
    ("offered", "taken", "missing", "applied_before"),
    [
        ((5, 6), [5, 6], None, []),
        ((5, 8, 9), [5, 8, 9], None, []),  # markers between two records
        ((3, 4, 5), [5], None, ["a3"]),  # applied, queued or dropped earlier, and next
        ((4, 7), [7], None, []),
        ((6, 7), [], 5, []),  # records before the first one may have been dropped
    ],
)
def test_it_takes_the_next_offset_only(
    offered: tuple[int, ...], taken: list[int], missing: int | None, applied_before: list[str]
) -> None:
    """Offsets missing between two records of one fetch are markers; those missing before the first are not."""
    queue = open_queue()
    assert queue.offer(records(*offered), applied=3) == (missing, applied_before)
    assert offsets(queue) == taken
    assert queue.next_offset("a") == (taken[-1] + 1 if taken else 5)


def test_each_source_has_its_own_offsets() -> None:
    """A source that was never read starts at its first offset."""
    queue = open_queue()
    assert queue.offer(records(0, 1, topic="b"), applied=-1) == (None, [])
    assert (queue.next_offset("a"), queue.next_offset("b")) == (5, 2)


def test_a_stretch_is_skipped_only_from_the_next_offset_and_only_forward() -> None:
    """What was determined before the partition was opened again does not count."""
    queue = open_queue()
    assert not queue.skip("a", 4, 9)
    assert not queue.skip("a", 5, 5)
    assert queue.skip("a", 5, 9)
    assert queue.next_offset("a") == 9


def test_a_batch_ends_at_a_number_of_records_and_at_a_number_of_bytes() -> None:
    """The record that exceeds the bytes is still in the batch."""
    queue = open_queue(batch_records_max=2)
    queue.offer(records(5, 6, 7), applied=4)
    assert queue.has_full_batch
    assert offsets(queue) == [5, 6]
    assert not queue.has_full_batch
    queue = open_queue()
    queue.offer(records(5, 6, 7, size=BATCH_BYTES_MAX // 2 + 1), applied=4)
    assert queue.has_full_batch
    assert offsets(queue) == [5, 6]
    assert (len(queue), queue.n_bytes) == (1, BATCH_BYTES_MAX // 2 + 1)


def test_records_that_are_put_back_come_first() -> None:
    """They keep their order and their bytes."""
    queue = open_queue(batch_records_max=3)
    queue.offer(records(5, 6, 7, 8), applied=4)
    batch = queue.take_batch()
    queue.put_back(batch[1:])
    assert queue.n_bytes == 3
    assert offsets(queue) == [6, 7, 8]


def test_a_closed_queue_has_dropped_its_records() -> None:
    """It has no next offset and skips nothing until it is opened again."""
    queue = open_queue()
    queue.offer(records(5, 6), applied=4)
    queue.close()
    assert (len(queue), queue.n_bytes, queue.is_open, queue.next_offset("a")) == (0, 0, False, None)
    assert not queue.skip("a", 0, 9)
    queue.open({"a": 7})
    assert queue.next_offset("a") == 7


@pytest.mark.parametrize("changes", [{"queue_records_high": 4}, {"queue_bytes_high": 4}])
def test_it_is_full_above_a_limit_and_has_drained_at_half_of_it(changes: dict[str, int]) -> None:
    """The limits are in records and in bytes; each record here has one byte."""
    queue = open_queue(**changes, batch_records_max=1)
    queue.offer(records(5, 6, 7, 8), applied=4)
    assert not queue.is_full
    queue.offer(records(9), applied=4)
    assert queue.is_full
    drained = []
    while queue.take_batch():
        drained.append((len(queue), queue.has_drained))
    assert drained == [(4, False), (3, False), (2, True), (1, True), (0, True)]

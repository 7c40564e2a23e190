"""The registry's records in the order of the log: own changes, and readers that are behind or ahead of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.kafka.clients import Record
from streams.router_api.sharing import log_order
from streams.router_api.sharing.log_order import LogOrder


class Folded:
    """What was folded: the last value of each key, and the number of folds."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes | None] = {}
        self.count = 0
        self.order = LogOrder(self.fold)

    def fold(self, key: bytes, value: bytes | None, _: bool) -> None:
        self.values[key] = value
        self.count += 1

    def read(self, offset: int, key: bytes, value: bytes | None, partition: int = 0) -> None:
        self.order.read(Record("workers", partition, offset, 0, key, value), True)

    def write(self, offset: int, key: bytes, value: bytes | None, partition: int = 0) -> None:
        self.order.written(self.order.reading, key, value, partition, offset)


def test_an_own_change_is_not_undone_by_earlier_records() -> None:
    """A worker that was registered and deleted here does not come back while the reader reads the registration."""
    folded = Folded()
    folded.write(4, b"1", b"registered")
    folded.write(5, b"1", None)
    for offset, value in ((3, b"former"), (4, b"registered"), (5, None)):
        folded.read(offset, b"1", value)
        assert folded.values == {b"1": None}
    folded.read(6, b"1", b"again")
    assert folded.values == {b"1": b"again"}


def test_an_own_change_does_not_replace_a_later_record() -> None:
    """The reader may have read the change, and a later one of another router, before the call knows of its own."""
    folded = Folded()
    folded.read(7, b"1", b"ours")
    folded.read(8, b"1", None)
    folded.write(7, b"1", b"ours")
    assert folded.values == {b"1": None}
    folded.write(3, b"1", b"of another partition", partition=1)
    assert folded.values == {b"1": b"of another partition"}


def test_two_own_changes_are_folded_in_the_order_of_the_log() -> None:
    """The calls of two threads may end in the other order."""
    folded = Folded()
    folded.write(5, b"1", b"second")
    folded.write(4, b"1", b"first")
    assert folded.values == {b"1": b"second"}


def test_what_was_sent_before_the_topic_is_read_again_is_left_to_the_reader() -> None:
    """Offsets of a recreated topic begin at 0: an own change at 900 must not hide its records."""
    folded = Folded()
    before = folded.order.reading
    folded.write(900, b"1", b"former topic")
    folded.order.begin_again()
    folded.order.written(before, b"1", b"former topic, late", 0, 901)
    folded.read(0, b"1", b"new topic")
    assert folded.values == {b"1": b"new topic"}


def test_a_change_without_an_offset_is_folded() -> None:
    """The caller finds its effect in any case."""
    folded = Folded()
    folded.read(7, b"1", b"a")
    folded.write(-1001, b"1", b"b")
    assert folded.values == {b"1": b"b"}


def test_only_so_many_own_changes_wait_for_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the oldest one is forgotten, which shows for the moment in which the reader is behind."""
    monkeypatch.setattr(log_order, "UNREAD_MAX", 2)
    folded = Folded()
    for offset, key in enumerate((b"1", b"2", b"3"), start=10):
        folded.write(offset, key, b"own")
    folded.read(2, b"1", b"former")
    folded.read(3, b"2", b"former")
    assert folded.values == {b"1": b"former", b"2": b"own", b"3": b"own"}


@given(st.lists(st.tuples(st.sampled_from([b"1", b"2"]), st.booleans()), max_size=12), st.randoms())
def test_every_order_ends_with_the_log_and_never_goes_back(log: list[tuple[bytes, bool]], rng: random.Random) -> None:
    """Whatever the moments at which own changes are confirmed, a key never has an earlier record after a later one."""
    seen: dict[bytes, int] = {}

    def fold(key: bytes, value: bytes | None, _: bool) -> None:
        assert value is not None
        assert int(value) > seen.get(key, -1)
        seen[key] = int(value)

    order = LogOrder(fold)
    reads = [(offset, key) for offset, (key, _) in enumerate(log)]
    own = [(offset, key) for offset, (key, is_own) in enumerate(log) if is_own]
    rng.shuffle(own)
    while reads or own:
        if own and (not reads or rng.random() < 0.5):
            offset, key = own.pop()
            order.written(0, key, str(offset).encode(), 0, offset)
        else:
            offset, key = reads.pop(0)
            order.read(Record("workers", 0, offset, 0, key, str(offset).encode()), True)
    assert seen == {key: offset for offset, (key, _) in enumerate(log)}
    assert not order._unread

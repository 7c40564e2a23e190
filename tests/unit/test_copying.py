"""What a move copies, and when: the rules of streams.replay.copying."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streams.core.bridge_pulses import BridgePulse
from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    Body,
    EngineBatch,
    EngineEvents,
    FeedState,
    Heartbeat,
    WorkerRemoved,
)
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Progress, Verdict, judge, renew
from streams.core.workers import BridgeLease, Worker
from streams.errors import KvStreamsError
from streams.kafka.records import PULSES
from streams.replay import copying
from streams.replay.copying import PULSE_AGE_MS_MAX, Holders, WaitingRecords, copies_of

RANK = RankId(WorkerId(1), DpRank(0))
METRICS = ("worker-metrics", 0)
PULSE = PULSES.keys.pack("b")


def batch(body: Body, sequence: int = 3, feed: FeedState = FeedState.LIVE) -> EngineBatch:
    return EngineBatch(RANK, "m", 16, Incarnation(5), sequence, 0, 0, body, feed=feed)


def worker(bridge: str | None, lease_ms: int = 6000) -> Worker:
    lease = None if bridge is None else BridgeLease(bridge, 1, lease_ms, 1)
    return Worker(WorkerId(1), "http://e", "m", 16, lease=lease)


def test_an_event_of_a_worker_with_a_bridge_is_copied_as_it_is() -> None:
    """The same object stands for the record itself."""
    event = batch(EngineEvents((AllBlocksCleared(),)))
    assert copies_of(event, 6000) == (event,)
    assert copies_of(event, 6000)[0] is event


def test_an_expiry_is_left_out_and_a_removal_is_copied() -> None:
    """An expiry is the conclusion of an owner; a removal is what an operator asked for."""
    assert copies_of(batch(WorkerRemoved("silent", 7)), 6000) == ()
    removal = batch(WorkerRemoved("DELETE /workers"))
    assert copies_of(removal, 6000) == (removal,)


def test_events_of_a_worker_without_a_bridge_are_those_of_a_feed_that_is_behind() -> None:
    """Without pulses, nothing else would make its answers degraded once the copying has ended."""
    (copied,) = copies_of(batch(EngineEvents(())), None)
    assert copied.feed is FeedState.CATCHING_UP


def test_an_incarnation_that_begins_has_a_lease_from_its_first_record_on() -> None:
    """A rank without a lease would be exact without pulses. The record itself follows, since it also ends a removal."""
    begun = batch(EngineEvents(()), BEFORE_FIRST, FeedState.UNPROVEN)
    heartbeat, record = copies_of(begun, 6000)
    assert record is begun
    assert isinstance(heartbeat.body, Heartbeat)
    progress = Progress(RANK, Epoch(Incarnation(4), 2), 9)
    after = renew(progress, heartbeat, heartbeat.body.lease_ms)
    assert (after.verdict, after.progress.lease_ms, after.begins_epoch) == (Verdict.RENEWED, 6000, True)
    assert judge(after.progress, record).verdict is Verdict.DUPLICATE
    assert judge(progress, record).progress.lease_ms == 0


def test_the_first_record_of_an_engine_without_events_stays_what_makes_its_rank_approximate() -> None:
    """Another record before it in the same incarnation would make it a duplicate."""
    begun = replace(batch(EngineEvents(()), BEFORE_FIRST), n_unindexed=1)
    assert copies_of(begun, 6000) == (begun,)


def test_a_record_waits_until_every_event_before_it_is_copied() -> None:
    """Records that were received later wait for a later reading."""
    waiting = WaitingRecords()
    for offset, received_ms in enumerate((100, 150, 200)):
        waiting.add(("workers", 0), offset, b"1", b"value", received_ms)
    assert list(waiting.due(None, 210)) == []
    assert list(waiting.due(99, 210)) == []
    assert [record.received_ms for record in waiting.due(150, 210)] == [100, 150]
    assert [record.received_ms for record in waiting.due(300, 310)] == [200]
    assert len(waiting) == 0


@pytest.mark.parametrize(
    ("offset", "now_ms", "is_copied"),
    [
        (7, 1000 + PULSE_AGE_MS_MAX, True),  # written after the reading at 1000
        (7, 1000 + PULSE_AGE_MS_MAX + 1, False),
        (6, 900 + PULSE_AGE_MS_MAX, True),  # before that one, and after the one at 900
        (6, 900 + PULSE_AGE_MS_MAX + 1, False),
        (4, 1000, False),  # before the first reading
    ],
)
def test_a_pulse_is_copied_while_it_is_known_to_be_fresh(offset: int, now_ms: int, is_copied: bool) -> None:
    """Its age is that of the last reading whose end it is not before, whatever clock its bridge has."""
    waiting = WaitingRecords()
    waiting.note_ends(900, {METRICS: 5})
    waiting.note_ends(1000, {METRICS: 7})
    waiting.add(METRICS, offset, PULSE, PULSES.encode(BridgePulse("b", 2)), 1010)
    waiting.note_ends(1100, {METRICS: 9})
    assert bool(list(waiting.due(1100, now_ms))) is is_copied
    assert len(waiting) == 0


def test_records_that_are_no_pulses_are_copied_however_old_they_are() -> None:
    """A lease or a cordon is in effect whenever it is read."""
    waiting = WaitingRecords()
    waiting.add(("workers", 0), 0, b"1", None, 10)
    assert [record.value for record in waiting.due(20, 1_000_000)] == [None]


def test_records_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The move ends with an error in place of filling its memory."""
    monkeypatch.setattr(copying, "WAITING_MAX", 2)
    waiting = WaitingRecords()
    waiting.add(("workers", 0), 0, b"1", None, 10)
    waiting.add(("workers", 0), 1, b"1", None, 10)
    with pytest.raises(KvStreamsError, match="wait for events"):
        waiting.add(("workers", 0), 2, b"1", None, 10)


def test_a_worker_has_moved_once_a_bridge_that_the_old_scope_does_not_know_holds_its_lease() -> None:
    """A registration that an operator writes on the new scope copies the lease of the old bridge."""
    holders = Holders()
    holders.note_old(worker("old"))
    holders.note_new(WorkerId(1), worker("old"))
    assert not holders.has_moved(WorkerId(1))
    holders.note_new(WorkerId(1), worker(None))
    assert not holders.has_moved(WorkerId(1))
    holders.note_new(WorkerId(1), worker("new"))
    assert holders.moved() == {WorkerId(1)}


def test_a_lease_that_was_given_up_keeps_the_length_that_it_had() -> None:
    """The worker still has a bridge's records, which must not count without pulses."""
    holders = Holders()
    holders.note_copied(WorkerId(1), worker("old"))
    holders.note_copied(WorkerId(1), worker("old", lease_ms=0))
    assert holders.lease_ms == {WorkerId(1): 6000}
    holders.note_copied(WorkerId(1), replace(worker("old"), lease=None))
    assert holders.lease_ms == {}

"""A worker's life: leases, silence, expiry and coming back; and ranks that are asked for what they lost."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from streams.codec import decode_resync, encode_batch
from streams.core.events import BEFORE_FIRST, EngineBatch, EngineEvents, Heartbeat, ResyncRequest, WorkerRemoved
from streams.core.ids import Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.holdings import PlainHoldings, plain_holdings
from streams.core.reducer.leases import EXPIRY_RETRY_MS, RankLeases
from streams.core.reducer.maintenance import MAINTENANCE_TICK_MS, SILENT, MaintenanceActions, RankMaintenance
from streams.core.reducer.ordering import Health, Progress, Verdict
from streams.core.reducer.resync import ATTEMPTS_MAX, RESYNC_BACKOFF_MS, RESYNCS_PER_TICK_MAX, ResyncSchedule
from streams.kafka import partition_of, producer, reader
from streams.local.processes import Children
from streams.local.stack import Stack, facts, get_json
from streams.settings import Settings
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.reference import chain_hashes
from tests.helpers.support import VISIBLE_TIMEOUT_S, dead_letters
from tests.unit.test_holdings import RANK, SIBLING, STRANGER, batch, judge, members, names, stored, u64
from tests.unit.test_restatement import chunks, run

LEASE_MS = 3000
GRACE_MS = 10_000


def heartbeat(sequence: int, rank: RankId = RANK, incarnation: int = 1, lease_ms: int = LEASE_MS) -> EngineBatch:
    return replace(batch(sequence, rank=rank, incarnation=incarnation), body=Heartbeat("b", lease_ms))


class Partition:
    """Holdings and their caretaker, with a clock of their own; what is written to kv-events comes back at once."""

    def __init__(self, holdings: PlainHoldings | None = None, clear_degraded_after_ms: int = 0) -> None:
        self.holdings = holdings or plain_holdings()
        self.maintenance = RankMaintenance(
            self.holdings, grace_ms=GRACE_MS, clear_degraded_after_ms=clear_degraded_after_ms
        )
        self.now_ms = 1_000_000
        self.applied_until_ms: int | None = None  # None: all is applied at once
        self.asked_broker = 0

    def step(self, ms: int = 0, *batches: EngineBatch) -> MaintenanceActions:
        """Let time pass, apply batches, look around."""
        self.now_ms += ms
        for one in batches:
            judge(self.holdings, one)

        def applied_until() -> int:
            self.asked_broker += 1
            return self.now_ms if self.applied_until_ms is None else self.applied_until_ms

        actions = self.maintenance.tick(self.now_ms, 0, applied_until)
        self.holdings.take_changes(1000)
        return actions

    def silent(self, rank: RankId = RANK) -> bool:
        return self.holdings.progress[rank].silent


def test_a_rank_is_silent_when_its_lease_is_over_and_not_before() -> None:
    """Counted from the last record that was applied; at the lease's very end it still holds."""
    partition = Partition()
    partition.step(0, heartbeat(BEFORE_FIRST))
    partition.step(LEASE_MS - 1000, batch(0))
    partition.step(LEASE_MS)
    assert not partition.silent()
    assert partition.step(MAINTENANCE_TICK_MS).counts["silent"] == 1
    assert partition.silent()
    assert partition.step(MAINTENANCE_TICK_MS).counts["silent"] == 0
    partition.step(0, heartbeat(0))
    assert not partition.silent()


def test_a_rank_is_judged_as_of_when_all_was_applied() -> None:
    """The broker is asked only when somebody would be silent; a record of the rank may lie behind what was applied."""
    partition = Partition()
    partition.step(0, heartbeat(BEFORE_FIRST))
    heard_ms = partition.applied_until_ms = partition.now_ms
    partition.step(LEASE_MS)
    assert partition.asked_broker == 0
    for applied_ms, silent in ((0, False), (LEASE_MS, False), (LEASE_MS + 1, True)):
        partition.applied_until_ms = heard_ms + applied_ms
        partition.step(MAINTENANCE_TICK_MS)
        assert partition.silent() == silent
    assert partition.asked_broker == 3


def test_whoever_promised_nothing_is_never_silent() -> None:
    """An engine that embeds the publisher has no bridge to be heard of."""
    partition = Partition()
    partition.step(0, batch(0))
    partition.step(10**9)
    assert not partition.silent() and partition.asked_broker == 0


def test_a_new_owner_counts_from_when_it_opened_the_partition() -> None:
    """It does not know when its predecessor heard of a rank, and never judges early."""
    before = Partition()
    before.step(0, heartbeat(BEFORE_FIRST))
    heir = Partition(before.holdings)
    heir.now_ms = 5_000_000
    heir.step()
    heir.step(LEASE_MS)
    assert not heir.silent()
    heir.step(MAINTENANCE_TICK_MS)
    assert heir.silent()


def test_a_worker_is_expired_once_all_of_its_ranks_were_silent_for_the_grace() -> None:
    """The expiry names the progress that it saw, is written again where nothing comes of it, and ends every rank."""
    partition = Partition()
    partition.step(0, *(heartbeat(BEFORE_FIRST, rank) for rank in (RANK, SIBLING, STRANGER)))
    partition.step(0, batch(0, stored(names(2), u64(1, 2))), batch(0, rank=SIBLING))
    partition.step(LEASE_MS + MAINTENANCE_TICK_MS, batch(1, rank=SIBLING), heartbeat(BEFORE_FIRST, STRANGER))
    assert (partition.silent(), partition.silent(SIBLING)) == (True, False)
    assert not partition.step(GRACE_MS + MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, STRANGER)).expiries
    assert partition.silent(SIBLING)
    assert not partition.step(LEASE_MS - MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, STRANGER)).expiries
    (expiry,) = partition.step(MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, STRANGER)).expiries
    assert (expiry.rank, expiry.incarnation, expiry.body) == (RANK, 1, WorkerRemoved(SILENT, 0))
    assert not partition.step(EXPIRY_RETRY_MS - MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, STRANGER)).expiries
    assert partition.step(MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, STRANGER)).expiries == [expiry]
    partition.step(0, expiry)
    assert {rank: progress.health for rank, progress in partition.holdings.progress.items()} == {
        RANK: Health.REMOVED,
        SIBLING: Health.REMOVED,
        STRANGER: Health.EXACT,
    }
    assert not members(partition.holdings)
    assert not partition.step(10 * EXPIRY_RETRY_MS, heartbeat(BEFORE_FIRST, STRANGER)).expiries


@pytest.mark.parametrize(
    "news",
    [heartbeat(1), heartbeat(BEFORE_FIRST, SIBLING), batch(2), batch(0, incarnation=2)],
    ids=["heartbeat", "of another rank", "batch", "life"],
)
def test_an_expiry_is_refused_by_whoever_was_heard_of_since(news: EngineBatch) -> None:
    """It lies in the log behind the news, and the worker keeps what it holds."""
    holdings = plain_holdings()
    for one in (batch(0, stored(names(2), u64(1, 2))), batch(1), heartbeat(1), heartbeat(BEFORE_FIRST, SIBLING)):
        judge(holdings, one)
    for rank in (RANK, SIBLING):
        holdings.mark_silent(rank)
    expiry = replace(batch(0), body=WorkerRemoved(SILENT, 1))
    judge(holdings, news)
    held = members(holdings)
    assert judge(holdings, expiry) is Verdict.STALE
    assert members(holdings) == held
    assert all(progress.health is not Health.REMOVED for progress in holdings.progress.values())


def test_an_expiry_that_saw_less_is_refused() -> None:
    """Silent again or not: the rank has gone on since."""
    holdings = plain_holdings()
    judge(holdings, heartbeat(BEFORE_FIRST))
    judge(holdings, batch(0))
    holdings.mark_silent(RANK)
    assert judge(holdings, replace(batch(0), body=WorkerRemoved(SILENT, BEFORE_FIRST))) is Verdict.STALE
    assert judge(holdings, replace(batch(0), body=WorkerRemoved(SILENT, 0))) is Verdict.APPLIED


def test_a_worker_taken_for_dead_is_back_with_its_heartbeat_and_one_that_was_deleted_is_not() -> None:
    """Expired, it is empty, degraded and asked for; deleted, also after it was expired, only a life begins it again."""
    partition = Partition()
    partition.step(0, heartbeat(BEFORE_FIRST), batch(0, stored(names(2), u64(1, 2))))
    partition.holdings.mark_silent(RANK)
    partition.step(0, replace(batch(0), body=WorkerRemoved(SILENT, 0)))
    assert partition.silent() and partition.holdings.progress[RANK].health is Health.REMOVED
    assert judge(partition.holdings, batch(1)) is Verdict.STALE
    actions = partition.step(0, heartbeat(1))
    progress = partition.holdings.progress[RANK]
    assert (progress.health, progress.sequence, progress.silent) == (Health.DEGRADED, 0, False)
    assert [(ask.rank, ask.sequence, ask.attempt) for ask in actions.requests] == [(RANK, 0, 1)]
    assert judge(partition.holdings, chunks(1, run(0, 3))[0]) is Verdict.RESTATED
    assert partition.holdings.progress[RANK].health is Health.EXACT

    partition.holdings.mark_silent(RANK)
    partition.step(0, replace(batch(0), body=WorkerRemoved(SILENT, 1)))
    assert partition.holdings.remove_worker(RANK.worker_id, Incarnation(1)) is Verdict.APPLIED
    assert partition.holdings.remove_worker(RANK.worker_id, Incarnation(1)) is Verdict.STALE
    assert judge(partition.holdings, heartbeat(1)) is Verdict.STALE
    assert judge(partition.holdings, batch(BEFORE_FIRST)) is Verdict.APPLIED


def test_a_removed_workers_progress_outlives_its_tombstones() -> None:
    """Its late events are refused by a table in which nothing else of it is left."""
    holdings = plain_holdings()
    judge(holdings, batch(0, stored(names(40), u64(*range(1, 41)))))
    table: dict[Any, Any] = dict(holdings.take_changes(0).runs)
    holdings.remove_worker(RANK.worker_id, Incarnation(1))
    kept: list[Progress] = []
    while holdings.owes_tombstones or holdings.touched:
        changes = holdings.take_changes(1)
        kept += changes.progress
        table.update(changes.runs)
    assert not any(table.values()) and len(table) == 2
    heir = plain_holdings()
    heir.load(kept, ())
    assert judge(heir, batch(1)) is Verdict.STALE
    assert heir.progress[RANK].epoch == Epoch(Incarnation(1), 1)


def test_leases_remember_no_rank_that_was_removed() -> None:
    """Nor an expiry of a worker that is not dead any more."""
    leases = RankLeases(0, GRACE_MS)
    known = Progress(RANK, Epoch(Incarnation(1), 0), lease_ms=LEASE_MS, silent=True)
    assert leases.overdue({RANK: known}, LEASE_MS + GRACE_MS + 1).dead == [RANK.worker_id]
    leases.expired(RANK.worker_id, LEASE_MS + GRACE_MS + 1)
    assert leases.overdue({RANK: known}, LEASE_MS + GRACE_MS + 2).dead == []
    leases.note_applied([RANK], LEASE_MS + GRACE_MS + 3)
    assert leases.overdue({RANK: known}, LEASE_MS + GRACE_MS + 4).dead == []
    assert leases.overdue({RANK: known}, 2 * (LEASE_MS + GRACE_MS) + 4).dead == [RANK.worker_id]


def test_a_gap_is_asked_for_at_once_and_then_ever_more_rarely() -> None:
    """One request is outstanding, the wait doubles, and after the last attempt nobody is asked."""
    partition = Partition()
    asked: list[tuple[int, ResyncRequest]] = []
    partition.step(0, batch(0))
    start = partition.now_ms
    asked += [(0, request) for request in partition.step(0, batch(5)).requests]
    while partition.now_ms < start + 20 * RESYNC_BACKOFF_MS[1]:
        actions = partition.step(250)
        asked += [(partition.now_ms - start, request) for request in actions.requests]
    waits = [after - before for (before, _), (after, _) in pairwise(asked)]
    assert waits == [1000, 2000, 4000, 8000, 16000, 32000, 60000]
    assert [request.attempt for _, request in asked] == list(range(1, ATTEMPTS_MAX + 1))
    first = asked[0][1]
    assert (first.rank, first.incarnation, first.sequence, first.reason) == (RANK, 1, 5, "a gap")
    actions = partition.step(0, batch(9))  # another gap is another matter
    assert [request.attempt for request in actions.requests] == [1]


@pytest.mark.parametrize(
    "end",
    [
        chunks(5, run(0, 1))[0],
        chunks(5, run(0, 1), exact=False)[0],
        batch(BEFORE_FIRST, incarnation=2),
        replace(batch(0), body=WorkerRemoved("told")),
    ],
    ids=["restated", "restated, not exact", "life", "removed"],
)
def test_a_rank_that_was_answered_is_not_asked_again(end: EngineBatch) -> None:
    """Also where it stays degraded: what its bridge does not know cannot be restated."""
    partition = Partition()
    assert len(partition.step(0, batch(0), batch(5)).requests) == 1
    partition.step(10, end)
    assert not [request for _ in range(100) for request in partition.step(5000).requests]


def test_a_rank_that_loses_something_all_the_time_is_asked_once_in_the_longest_wait() -> None:
    """One whose ledger has a gap itself meets unknown parents with every batch."""
    partition = Partition()
    asked = 0
    for number in range(1000):
        orphan = batch(number, stored(names(1), u64(1), parent=99))
        asked += len(partition.step(1000, orphan).requests)
        if number % 10 == 5:
            partition.step(0, chunks(number, run(0, 1), exact=False)[0])
    assert 1000 / 60 < asked < 1000 / 60 + ATTEMPTS_MAX


def test_chunks_that_arrive_are_waited_for() -> None:
    """A rank that is being restated is asked again only where the rest does not come."""
    partition = Partition()
    first, _ = chunks(5, run(0, 1), run(2, 3))
    assert len(partition.step(0, batch(0), batch(5)).requests) == 1
    assert not partition.step(900, first).requests
    assert not partition.step(900).requests
    assert len(partition.step(1200).requests) == 1


def test_few_ranks_are_asked_at_a_time() -> None:
    """A source that lost records degrades all of them; the rest is asked with the next transactions."""
    partition = Partition()
    ranks = [RankId(WorkerId(n), RANK.dp_rank) for n in range(RESYNCS_PER_TICK_MAX + 3)]
    partition.step(0, *(batch(0, rank=rank) for rank in ranks))
    partition.holdings.degrade_all()
    first = partition.step().requests
    second = partition.step(10).requests
    assert (len(first), len(second)) == (RESYNCS_PER_TICK_MAX, 3)
    assert {request.rank for request in first + second} == set(ranks)
    assert not partition.step(10).requests


def test_silent_ranks_are_not_asked_until_they_are_heard_of() -> None:
    """Nobody listens for them."""
    partition = Partition()
    partition.step(0, heartbeat(BEFORE_FIRST))
    partition.step(LEASE_MS + 1)
    partition.holdings.degrade_all()
    assert not partition.step(1000).requests
    assert len(partition.step(1000, heartbeat(BEFORE_FIRST)).requests) == 1


def test_a_new_owner_asks_anew() -> None:
    """Whoever was degraded is asked once more, whatever the owner before did."""
    before = Partition()
    before.step(0, batch(0), batch(5), batch(0, rank=STRANGER))
    heir = Partition(before.holdings)
    (request,) = heir.step().requests
    assert (request.rank, request.attempt) == (RANK, 1)


def test_a_new_owner_waits_for_the_rest_of_a_restatement_that_is_parked() -> None:
    """And asks where it does not come."""
    for comes in (True, False):
        old = Partition()
        old.step(0, batch(5))
        first, second = chunks(5, run(0, 1), run(2, 3))
        old.step(0, first)
        heir = Partition(old.holdings)
        assert heir.step().requests == []
        if comes:
            heir.step(RESYNC_BACKOFF_MS[0] // 2, second)
            assert heir.step(RESYNC_BACKOFF_MS[1]).requests == []
        else:
            assert [request.attempt for request in heir.step(RESYNC_BACKOFF_MS[0]).requests] == [1]


def test_requests_of_a_quiet_trouble_begin_at_the_shortest_wait_again() -> None:
    """Two gaps an hour apart have nothing to do with each other."""
    resyncs = ResyncSchedule()
    for now_ms in (0, 3_600_000):
        resyncs.lost(RANK, "a gap")
        assert len(resyncs.due(now_ms, lambda _: True)) == 1
        assert not resyncs.due(now_ms + RESYNC_BACKOFF_MS[0] - 1, lambda _: True)
        assert len(resyncs.due(now_ms + RESYNC_BACKOFF_MS[0], lambda _: True)) == 1
        resyncs.settled(RANK)
        assert resyncs.n_owed == 0


@pytest.mark.parametrize("after_ms", [0, 5000])
def test_a_rank_degraded_for_long_is_cleared_where_the_settings_say_so(after_ms: int) -> None:
    """Empty and exact under a new epoch; without the setting it stays as it is."""
    partition = Partition(clear_degraded_after_ms=after_ms)
    partition.step(0, batch(0, stored(names(2), u64(1, 2))), batch(5))
    partition.step(MAINTENANCE_TICK_MS)
    partition.step(4999)
    assert partition.holdings.progress[RANK].health is Health.DEGRADED
    actions = partition.step(MAINTENANCE_TICK_MS)
    progress = partition.holdings.progress[RANK]
    if after_ms:
        assert (progress.health, progress.epoch.generation, actions.counts["cleared"]) == (Health.EXACT, 1, 1)
        assert not members(partition.holdings)
        assert not [request for _ in range(50) for request in partition.step(5000).requests]
    else:
        assert progress.health is Health.DEGRADED and len(members(partition.holdings)) == 2
    assert judge(partition.holdings, batch(6)) is Verdict.APPLIED


class Bridge:
    """Says what a bridge says of one rank, straight to Kafka."""

    def __init__(self, settings: Settings, worker_id: int, lease_ms: int) -> None:
        self._topic = topics(settings).kv_events.name
        self._kafka = producer(settings)
        self._rank = RANK._replace(worker_id=WorkerId(worker_id))
        self._lease_ms = lease_ms
        self.sequence = BEFORE_FIRST

    def say(self, *batches: EngineBatch) -> None:
        for one in batches:
            raw = encode_batch(replace(one, rank=self._rank))
            self._kafka.produce(self._topic, key=str(self._rank.worker_id).encode(), value=raw)
            if isinstance(one.body, EngineEvents):
                self.sequence = one.sequence
        assert self._kafka.flush(30.0) == 0

    def live(self) -> None:
        self.say(heartbeat(self.sequence, lease_ms=self._lease_ms))

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Publish a batch every few milliseconds beside what the block does, so that something is always unread."""
        with self._beside(0.005, lambda: self.say(batch(self.sequence + 1))):
            yield

    @contextmanager
    def living(self) -> Iterator[None]:
        """Renew the lease beside what the block does."""
        with self._beside(self._lease_ms / 5000, self.live):
            yield

    @contextmanager
    def _beside(self, every_s: float, act: Callable[[], None]) -> Iterator[None]:
        over = threading.Event()

        def go_on() -> None:
            while not over.wait(every_s):
                act()

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def put_worker(url: str, worker_id: int) -> None:
    body = b'{"url": "http://nowhere", "model": "m", "block_size": 16}'
    request = urllib.request.Request(f"{url}/workers/{worker_id}", data=body, method="PUT")
    with urllib.request.urlopen(request) as response:
        assert response.status == 200


def route(url: str) -> dict[str, Any]:
    body = json.dumps({"block_hashes": [1, 2, 3, 4], "update_states": False, "explain": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/route", data=body, method="POST")) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def candidates(url: str) -> list[int]:
    return [each["worker_id"] for each in route(url)["candidates"]]


def requests_on_control(settings: Settings, partition: int) -> list[ResyncRequest]:
    consumer = reader(settings)
    found: list[ResyncRequest] = []
    try:
        consumer.assign([TopicPartition(topics(settings).kv_control.name, partition, OFFSET_BEGINNING)])
        while True:
            for message in consumer.consume(100, 5.0):
                if message.error() is not None:
                    return found
                found.append(decode_resync(message.value()))
    finally:
        consumer.close()


def test_a_silent_worker_is_passed_over_then_removed_and_comes_back_whole(
    scope: Settings, tmp_path: Path, children: Children
) -> None:
    """Of two workers of one partition one falls silent twice; answers of the other never degrade by it."""
    settings = replace(scope, worker_grace_s=1.0)
    worker = Stack(settings, tmp_path, children).worker()
    one = next(n for n in range(1, 100) if partition_of(n, settings.partitions) == 0)
    other = next(n for n in range(one + 1, 100) if partition_of(n, settings.partitions) == 0)
    shaky, steady = Bridge(settings, one, 1500), Bridge(settings, other, 60_000)

    def rank_of(worker_id: int) -> dict[str, Any]:
        ranks = get_json(f"{worker.url}/state")["ranks"]
        return next(rank for rank in ranks if rank["worker_id"] == worker_id)

    def await_that(condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, VISIBLE_TIMEOUT_S, what)

    for worker_id, bridge in ((one, shaky), (other, steady)):
        put_worker(worker.url, worker_id)
        bridge.say(batch(BEFORE_FIRST))
        bridge.live()
        bridge.say(batch(0, stored(names(4), u64(1, 2, 3, 4))))
    await_that(lambda: len(facts(worker.url)) == 8, "both workers' blocks")
    with shaky.living():
        await_that(lambda: route(worker.url)["mode"] == "exact", "exact answers")
        assert candidates(worker.url) == [one, other]
    with steady.talking():
        await_that(lambda: candidates(worker.url) == [other], "the silent worker to be passed over")
    assert route(worker.url)["mode"] == "exact"
    listed = {each["worker_id"]: each["silent_dp_ranks"] for each in get_json(f"{worker.url}/workers")["workers"]}
    assert listed == {one: [0], other: []}

    await_that(lambda: rank_of(one)["health"] == "removed", "its removal")
    assert (rank_of(one)["silent"], rank_of(one)["blocks"], rank_of(other)["blocks"]) == (True, 0, 4)
    assert candidates(worker.url) == [other] and route(worker.url)["mode"] == "exact"

    with shaky.living():
        await_that(lambda: rank_of(one)["health"] == "degraded", "the worker to be back")
        partition = partition_of(one, settings.partitions)
        await_that(lambda: bool(requests_on_control(settings, partition)), "a resync request")
        request = requests_on_control(settings, partition)[0]
        assert (request.rank.worker_id, request.incarnation, request.sequence) == (one, 1, 0)
        shaky.say(*chunks(0, run(2, 3), run(0, 1)))
        await_that(lambda: rank_of(one)["health"] == "exact", "the restatement")
        blocks = {block for worker_id, _, _, block in facts(worker.url) if worker_id == one}
        assert blocks == set(chain_hashes([1, 2, 3, 4]))
        await_that(lambda: route(worker.url)["mode"] == "exact", "exact answers again")
        assert candidates(worker.url) == [one, other]
        shaky.say(batch(1))
        await_that(lambda: rank_of(one)["sequence"] == 1, "its next batch")
        assert rank_of(one)["health"] == "exact"
    assert dead_letters(settings) == []

"""What happens to a partition's ranks by time alone: silence, expiry, resync requests, clearing of degraded ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from streams.core.events import BEFORE_FIRST, EngineBatch, ResyncRequest, WorkerRemoved
from streams.core.ids import Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.leases import EXPIRY_RETRY_MS, RankLeases
from streams.core.reducer.maintenance import MAINTENANCE_TICK_MS, SILENT, MaintenanceActions, RankMaintenance
from streams.core.reducer.ordering import Health, Progress, Verdict
from streams.core.reducer.resync import ATTEMPTS_MAX, RESYNC_BACKOFF_MS, RESYNCS_PER_TICK_MAX, ResyncSchedule
from tests.helpers.holdings import (
    LEASE_MS,
    OTHER_WORKER,
    RANK,
    SIBLING,
    batch,
    chunks,
    heartbeat,
    judge,
    members,
    names,
    run,
    stored,
    u64,
)
from tests.helpers.plain_run_store import PlainHoldings, plain_holdings

GRACE_MS = 10_000


class Partition:
    """Holdings and their maintenance, with a clock of their own."""

    def __init__(self, holdings: PlainHoldings | None = None, clear_degraded_after_ms: int = 0) -> None:
        self.holdings = holdings or plain_holdings()
        self.maintenance = RankMaintenance(
            self.holdings, grace_ms=GRACE_MS, clear_degraded_after_ms=clear_degraded_after_ms
        )
        self.now_ms = 1_000_000
        self.applied_until_ms: int | None = None  # None: every record is applied at once
        self.n_broker_calls = 0

    def step(self, ms: int = 0, *batches: EngineBatch) -> MaintenanceActions:
        """Let time pass, apply batches, run a maintenance tick."""
        self.now_ms += ms
        for one in batches:
            judge(self.holdings, one)

        def applied_until() -> int:
            self.n_broker_calls += 1
            return self.now_ms if self.applied_until_ms is None else self.applied_until_ms

        actions = self.maintenance.tick(self.now_ms, 0, applied_until)
        self.holdings.take_changes(1000)
        return actions

    def silent(self, rank: RankId = RANK) -> bool:
        return self.holdings.progress[rank].silent


def test_a_rank_is_silent_after_its_lease_expires_and_not_before() -> None:
    """The lease runs from the last applied record of the rank, and is still valid at its very end."""
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


def test_a_lease_is_judged_as_of_the_time_up_to_which_everything_is_applied() -> None:
    """A record of the rank may be appended and not yet applied. The broker is asked only if a rank would be silent."""
    partition = Partition()
    partition.step(0, heartbeat(BEFORE_FIRST))
    heard_ms = partition.applied_until_ms = partition.now_ms
    partition.step(LEASE_MS)
    assert partition.n_broker_calls == 0
    for applied_ms, silent in ((0, False), (LEASE_MS, False), (LEASE_MS + 1, True)):
        partition.applied_until_ms = heard_ms + applied_ms
        partition.step(MAINTENANCE_TICK_MS)
        assert partition.silent() == silent
    assert partition.n_broker_calls == 3


def test_a_rank_without_a_lease_is_never_silent() -> None:
    """An engine that embeds the publisher has no bridge that sends heartbeats."""
    partition = Partition()
    partition.step(0, batch(0))
    partition.step(10**9)
    assert not partition.silent() and partition.n_broker_calls == 0


def test_a_new_owner_counts_leases_from_when_it_opened_the_partition() -> None:
    """It does not know when its predecessor last heard from a rank, and must not judge too early."""
    before = Partition()
    before.step(0, heartbeat(BEFORE_FIRST))
    owner = Partition(before.holdings)
    owner.now_ms = 5_000_000
    owner.step()
    owner.step(LEASE_MS)
    assert not owner.silent()
    owner.step(MAINTENANCE_TICK_MS)
    assert owner.silent()


def test_a_worker_expires_once_all_its_ranks_have_been_silent_for_the_grace_period() -> None:
    """The expiry names the progress that its writer saw, is retried if it has no effect, and removes every rank."""
    partition = Partition()
    partition.step(0, *(heartbeat(BEFORE_FIRST, rank) for rank in (RANK, SIBLING, OTHER_WORKER)))
    partition.step(0, batch(0, stored(names(2), u64(1, 2))), batch(0, rank=SIBLING))
    partition.step(LEASE_MS + MAINTENANCE_TICK_MS, batch(1, rank=SIBLING), heartbeat(BEFORE_FIRST, OTHER_WORKER))
    assert (partition.silent(), partition.silent(SIBLING)) == (True, False)
    assert not partition.step(GRACE_MS + MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, OTHER_WORKER)).expiries
    assert partition.silent(SIBLING)
    assert not partition.step(LEASE_MS - MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, OTHER_WORKER)).expiries
    (expiry,) = partition.step(MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, OTHER_WORKER)).expiries
    assert (expiry.rank, expiry.incarnation, expiry.body) == (RANK, 1, WorkerRemoved(SILENT, 0))
    assert not partition.step(EXPIRY_RETRY_MS - MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, OTHER_WORKER)).expiries
    assert partition.step(MAINTENANCE_TICK_MS, heartbeat(BEFORE_FIRST, OTHER_WORKER)).expiries == [expiry]
    partition.step(0, expiry)
    assert {rank: progress.health for rank, progress in partition.holdings.progress.items()} == {
        RANK: Health.REMOVED,
        SIBLING: Health.REMOVED,
        OTHER_WORKER: Health.EXACT,
    }
    assert not members(partition.holdings)
    assert not partition.step(10 * EXPIRY_RETRY_MS, heartbeat(BEFORE_FIRST, OTHER_WORKER)).expiries


@pytest.mark.parametrize(
    "later",
    [heartbeat(1), heartbeat(BEFORE_FIRST, SIBLING), batch(2), batch(0, incarnation=2)],
    ids=["heartbeat", "of another rank", "batch", "incarnation"],
)
def test_an_expiry_is_refused_if_a_rank_was_heard_from_after_it_was_written(later: EngineBatch) -> None:
    """The record of the rank precedes the expiry in the log, and the worker keeps what it holds."""
    holdings = plain_holdings()
    for one in (batch(0, stored(names(2), u64(1, 2))), batch(1), heartbeat(1), heartbeat(BEFORE_FIRST, SIBLING)):
        judge(holdings, one)
    for rank in (RANK, SIBLING):
        holdings.mark_silent(rank)
    expiry = replace(batch(0), body=WorkerRemoved(SILENT, 1))
    judge(holdings, later)
    held = members(holdings)
    assert judge(holdings, expiry) is Verdict.STALE
    assert members(holdings) == held
    assert all(progress.health is not Health.REMOVED for progress in holdings.progress.values())


def test_an_expiry_that_names_an_older_batch_is_refused() -> None:
    """The rank has published since the expiry was written, even if it is silent again."""
    holdings = plain_holdings()
    judge(holdings, heartbeat(BEFORE_FIRST))
    judge(holdings, batch(0))
    holdings.mark_silent(RANK)
    assert judge(holdings, replace(batch(0), body=WorkerRemoved(SILENT, BEFORE_FIRST))) is Verdict.STALE
    assert judge(holdings, replace(batch(0), body=WorkerRemoved(SILENT, 0))) is Verdict.APPLIED


def test_an_expired_worker_returns_with_a_heartbeat_and_a_deleted_worker_does_not() -> None:
    """An expired worker returns empty and degraded, and a resync is requested. A deleted worker, expired before or not,
    returns only when it starts again."""
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
    """A table that contains nothing else of the worker still refuses its late events."""
    holdings = plain_holdings()
    judge(holdings, batch(0, stored(names(40), u64(*range(1, 41)))))
    table: dict[Any, Any] = dict(holdings.take_changes(0).runs)
    holdings.remove_worker(RANK.worker_id, Incarnation(1))
    kept: list[Progress] = []
    while holdings.has_pending_tombstones or holdings.touched:
        changes = holdings.take_changes(1)
        kept += changes.progress
        table.update(changes.runs)
    assert not any(table.values()) and len(table) == 2
    reopened = plain_holdings()
    reopened.load(kept, ())
    assert judge(reopened, batch(1)) is Verdict.STALE
    assert reopened.progress[RANK].epoch == Epoch(Incarnation(1), 1)


def test_an_expiry_is_forgotten_when_its_worker_is_heard_from_again() -> None:
    """A worker that falls silent a second time need not wait for the retry of its first expiry."""
    leases = RankLeases(0, GRACE_MS)
    known = Progress(RANK, Epoch(Incarnation(1), 0), lease_ms=LEASE_MS, silent=True)
    assert leases.overdue({RANK: known}, LEASE_MS + GRACE_MS + 1).dead == [RANK.worker_id]
    leases.expired(RANK.worker_id, LEASE_MS + GRACE_MS + 1)
    assert leases.overdue({RANK: known}, LEASE_MS + GRACE_MS + 2).dead == []
    leases.note_applied([RANK], LEASE_MS + GRACE_MS + 3)
    assert leases.overdue({RANK: known}, LEASE_MS + GRACE_MS + 4).dead == []
    assert leases.overdue({RANK: known}, 2 * (LEASE_MS + GRACE_MS) + 4).dead == [RANK.worker_id]


def test_a_gap_requests_a_resync_at_once_and_then_at_growing_intervals() -> None:
    """One request is outstanding at a time, the wait doubles, and the last attempt ends the requests."""
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
    actions = partition.step(0, batch(9))  # another gap starts over
    assert [request.attempt for request in actions.requests] == [1]


@pytest.mark.parametrize(
    "end",
    [
        chunks(5, run(0, 1))[0],
        chunks(5, run(0, 1), exact=False)[0],
        batch(BEFORE_FIRST, incarnation=2),
        replace(batch(0), body=WorkerRemoved("deleted")),
    ],
    ids=["restated", "restated, not exact", "incarnation", "removed"],
)
def test_no_resync_is_requested_of_a_rank_that_has_answered(end: EngineBatch) -> None:
    """This includes a rank that remains degraded, since its bridge has nothing more to restate."""
    partition = Partition()
    assert len(partition.step(0, batch(0), batch(5)).requests) == 1
    partition.step(10, end)
    assert not [request for _ in range(100) for request in partition.step(5000).requests]


def test_a_rank_that_keeps_losing_blocks_gets_one_request_per_longest_wait() -> None:
    """A rank whose ledger itself has a gap has unknown parents in every batch."""
    partition = Partition()
    asked = 0
    for number in range(1000):
        orphan = batch(number, stored(names(1), u64(1), parent=99))
        asked += len(partition.step(1000, orphan).requests)
        if number % 10 == 5:
            partition.step(0, chunks(number, run(0, 1), exact=False)[0])
    assert 1000 / 60 < asked < 1000 / 60 + ATTEMPTS_MAX


def test_a_chunk_that_arrives_delays_the_next_resync_request() -> None:
    """A rank that is being restated gets another request only if the remaining chunks do not arrive."""
    partition = Partition()
    first, _ = chunks(5, run(0, 1), run(2, 3))
    assert len(partition.step(0, batch(0), batch(5)).requests) == 1
    assert not partition.step(900, first).requests
    assert not partition.step(900).requests
    assert len(partition.step(1200).requests) == 1


def test_only_a_few_resyncs_are_requested_per_tick() -> None:
    """A source that lost records degrades every rank; the next ticks request the remaining resyncs."""
    partition = Partition()
    ranks = [RankId(WorkerId(n), RANK.dp_rank) for n in range(RESYNCS_PER_TICK_MAX + 3)]
    partition.step(0, *(batch(0, rank=rank) for rank in ranks))
    partition.holdings.degrade_all()
    first = partition.step().requests
    second = partition.step(10).requests
    assert (len(first), len(second)) == (RESYNCS_PER_TICK_MAX, 3)
    assert {request.rank for request in first + second} == set(ranks)
    assert not partition.step(10).requests


def test_no_resync_is_requested_of_a_silent_rank_until_it_is_heard_from() -> None:
    """While a rank is silent, no bridge reads requests for it."""
    partition = Partition()
    partition.step(0, heartbeat(BEFORE_FIRST))
    partition.step(LEASE_MS + 1)
    partition.holdings.degrade_all()
    assert not partition.step(1000).requests
    assert len(partition.step(1000, heartbeat(BEFORE_FIRST)).requests) == 1


def test_a_new_owner_requests_resyncs_of_degraded_ranks_again() -> None:
    """It does not know which requests its predecessor wrote."""
    before = Partition()
    before.step(0, batch(0), batch(5), batch(0, rank=OTHER_WORKER))
    (request,) = Partition(before.holdings).step().requests
    assert (request.rank, request.attempt) == (RANK, 1)


def test_a_new_owner_waits_for_the_rest_of_a_parked_restatement() -> None:
    """It requests a resync if the remaining chunks do not arrive."""
    for arrives in (True, False):
        old = Partition()
        old.step(0, batch(5))
        first, second = chunks(5, run(0, 1), run(2, 3))
        old.step(0, first)
        owner = Partition(old.holdings)
        assert owner.step().requests == []
        if arrives:
            owner.step(RESYNC_BACKOFF_MS[0] // 2, second)
            assert owner.step(RESYNC_BACKOFF_MS[1]).requests == []
        else:
            assert [request.attempt for request in owner.step(RESYNC_BACKOFF_MS[0]).requests] == [1]


def test_the_wait_starts_over_for_a_gap_long_after_the_previous_one() -> None:
    """Two gaps an hour apart are unrelated, so the second one starts with the shortest wait."""
    resyncs = ResyncSchedule()
    for now_ms in (0, 3_600_000):
        resyncs.lost(RANK, "a gap")
        assert len(resyncs.due(now_ms, lambda _: True)) == 1
        assert not resyncs.due(now_ms + RESYNC_BACKOFF_MS[0] - 1, lambda _: True)
        assert len(resyncs.due(now_ms + RESYNC_BACKOFF_MS[0], lambda _: True)) == 1
        resyncs.settled(RANK)
        assert resyncs.n_pending == 0


@pytest.mark.parametrize("after_ms", [0, 5000])
def test_a_rank_that_stays_degraded_is_cleared_if_the_settings_ask_for_it(after_ms: int) -> None:
    """The rank is then empty and exact under a new epoch; without the setting it remains degraded."""
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

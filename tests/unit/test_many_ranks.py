"""Filters, busy thresholds and trust over many ranks: columns give the answers of the same rules rank by rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.engine_metrics import WorkerMetrics
from streams.core.events import FeedState
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.index.interface import PrefixScores
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.loads.load_table import ROWS_FIRST
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing import busy
from streams.core.routing.busy import BusyThresholds, ReportedBlocks, idle_ranks, reported_blocks
from streams.core.routing.candidate_columns import ColumnsCache
from streams.core.routing.decision import Chooser
from streams.core.routing.eligibility import (
    EligibleRanks,
    RankSelection,
    WorkerFilter,
    base_of,
    eligible_ranks,
)
from streams.core.routing.identity_cache import TUPLES_MAX, IdentityCache
from streams.core.routing.request import RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode, DegradedReason, Trust
from streams.core.workers import BridgeLease, Role, Worker, WorkerState, differs_in_lease_only
from streams.kafka.applied_until import AppliedUntil, SourceOffset
from streams.kafka.clients import partition_of
from streams.router_api.knowledge import rank_trust
from streams.router_api.knowledge.owner_trust import SETTLE_MS
from streams.router_api.knowledge.trust_tracker import PooledRows, TrustTracker
from streams.settings import Settings
from streams.tables.records import PartitionRecord, SourceProgress
from tests.helpers.local_router import local_router
from tests.helpers.routing import routing_request

N_PARTITIONS = 3
STALE_MS, BEHIND_MS = 3000, 1000
NO_RANKS: frozenset[RankId] = frozenset()
N_WORKERS = 14


def rank(worker_id: int, dp_rank: int = 0) -> RankId:
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


RANKS = tuple(rank(worker_id, dp_rank) for worker_id in range(N_WORKERS) for dp_rank in range(1 + worker_id % 3))


# --- trust --------------------------------------------------------------------------------------------------------


@dataclass
class Plain:
    """The rules of docs/architecture.md for one rank after another, without anything that is kept between answers."""

    progress: dict[RankId, Progress] = field(default_factory=dict)
    epochs: dict[RankId, Epoch] = field(default_factory=dict)
    incomplete: dict[RankId, Epoch] = field(default_factory=dict)
    unsettled: dict[RankId, AnswerMode | DegradedReason] = field(default_factory=dict)
    records: dict[int, tuple[PartitionRecord, int | None]] = field(default_factory=dict)
    folded: dict[int, AppliedUntil] = field(
        default_factory=lambda: {partition: AppliedUntil(SETTLE_MS) for partition in range(N_PARTITIONS)}
    )

    def owner(self, partition: int, now_ms: int) -> DegradedReason | None:
        record, received_ms = self.records.get(partition, (None, None))
        if record is None or received_ms is None or now_ms - received_ms > STALE_MS:
            return DegradedReason.OWNER_SILENT
        until_ms = self.folded[partition].at_ms
        behind = until_ms is None or now_ms - until_ms > BEHIND_MS
        if behind or any(source.behind_ms > BEHIND_MS for source in record.sources):
            return DegradedReason.OWNER_BEHIND
        return None

    def of_rank(
        self,
        each: RankId,
        predicted: frozenset[RankId],
        now_ms: int,
        silent: frozenset[WorkerId],
        missing: frozenset[RankId],
    ) -> AnswerMode | DegradedReason:
        own = self.unsettled.get(each) or self.own(each)
        if isinstance(own, DegradedReason):
            return own
        progress = self.progress[each]
        if each.worker_id in silent and progress.lease_ms:
            return DegradedReason.BRIDGE_SILENT
        if each in self.incomplete and self.incomplete[each] == self.epochs.get(each):
            return DegradedReason.OVER_CAPACITY
        if each in missing:
            return DegradedReason.LABELS_OVER_CAPACITY
        reason = self.owner(partition_of(each.worker_id, N_PARTITIONS), now_ms)
        if reason is not None:
            return reason
        return AnswerMode.APPROXIMATE if each in predicted else own

    def own(self, each: RankId) -> AnswerMode | DegradedReason:
        """What a rank's progress record says by itself."""
        progress = self.progress.get(each)
        if progress is None:
            return DegradedReason.NO_EVENTS_YET
        if progress.health is Health.DEGRADED:
            return DegradedReason.EVENTS_LOST
        if progress.health is Health.REMOVED:
            return DegradedReason.REMOVED
        if progress.feed is FeedState.UNPROVEN:
            return DegradedReason.NO_EVENTS_YET
        if progress.feed is FeedState.CATCHING_UP:
            return DegradedReason.FEED_BEHIND
        return AnswerMode.APPROXIMATE if progress.health is Health.APPROXIMATE else AnswerMode.EXACT

    def note_progress(self, each: RankId, progress: Progress | None) -> None:
        """More trust, and trust in another epoch, waits for the partition record."""
        known, before = self.progress.get(each), self.unsettled.pop(each, None) or self.own(each)
        if progress is None:
            self.progress.pop(each, None)
            return
        self.progress[each] = progress
        now = self.own(each)
        if isinstance(now, DegradedReason):
            return
        if isinstance(before, DegradedReason):
            self.unsettled[each] = before
        elif known is not None and known.epoch != progress.epoch:
            self.unsettled[each] = DegradedReason.FEED_BEHIND
        elif (before, now) == (AnswerMode.APPROXIMATE, AnswerMode.EXACT):
            self.unsettled[each] = before

    def of(
        self,
        ranks: Sequence[RankId],
        predicted: frozenset[RankId],
        now_ms: int,
        silent: frozenset[WorkerId],
        missing: frozenset[RankId],
    ) -> Trust:
        found = [self.of_rank(each, predicted, now_ms, silent, missing) for each in ranks]
        for each in found:
            if isinstance(each, DegradedReason):
                return Trust(AnswerMode.DEGRADED, each)
        return Trust(AnswerMode.APPROXIMATE if AnswerMode.APPROXIMATE in found else AnswerMode.EXACT)


class Both:
    """A tracker and the plain rules, which get the same records."""

    def __init__(self) -> None:
        self.plain = Plain()
        self.tracker = TrustTracker(N_PARTITIONS, STALE_MS, BEHIND_MS, self.plain.epochs.get)
        self.now_ms = 1_000_000
        self.offset = 0
        self.silent: frozenset[WorkerId] = frozenset()
        self.missing: frozenset[RankId] = NO_RANKS
        self.predicted: frozenset[RankId] = NO_RANKS

    def make_exact(self) -> None:
        """Bring every rank and every owner into the state of a fleet at work."""
        for each in RANKS:
            self.progress(each, Health.EXACT, FeedState.LIVE, lease_ms=6000)
        for partition in range(N_PARTITIONS):
            self.partition(partition)

    def progress(self, each: RankId, health: Health, feed: FeedState, lease_ms: int) -> None:
        epoch = self.plain.epochs.setdefault(each, Epoch(Incarnation(1), 0))
        progress = Progress(each, epoch, 0, health=health, feed=feed, lease_ms=lease_ms)
        self.plain.note_progress(each, progress)
        self.tracker.note_progress(each, progress)

    def partition(self, partition: int, behind_ms: int = 0, *, live: bool = True, with_ends: bool = True) -> None:
        self.offset += 1
        source = SourceProgress("events", "a", self.offset, 0, self.offset + 1, behind_ms)
        record, received_ms = PartitionRecord(partition, 0, "owner", (source,)), self.now_ms if live else None
        self.plain.records[partition] = (record, received_ms)
        self.plain.folded[partition].note_applied({"events": SourceOffset("a", self.offset + 1)})
        for each in RANKS:
            if partition_of(each.worker_id, N_PARTITIONS) == partition:
                self.plain.unsettled.pop(each, None)
        self.tracker.note_partition(record, received_ms)
        if with_ends:
            ends = {"events": SourceOffset("a", self.offset + 1)}
            self.plain.folded[partition].note_ends(self.now_ms, ends)
            self.tracker.note_ends(partition, self.now_ms, ends)

    def change(self, rng: random.Random) -> None:
        """Make one change of any kind; most of them are those of a fleet in which little is wrong."""
        each, partition = rng.choice(RANKS), rng.randrange(N_PARTITIONS)
        match rng.randrange(13):
            case 0 | 1:
                health = rng.choice([Health.EXACT] * 4 + list(Health))
                feed = rng.choice([FeedState.LIVE] * 4 + list(FeedState))
                self.progress(each, health, feed, rng.choice([0, 6000, 6000]))
            case 2:
                self.plain.note_progress(each, None)
                self.tracker.note_progress(each, None)
            case 3:
                if each in self.plain.epochs:
                    self.plain.incomplete[each] = self.plain.epochs[each]
                self.tracker.note_over_capacity(each)
            case 4 if each in self.plain.epochs:
                self.plain.epochs[each] = Epoch(Incarnation(self.plain.epochs[each].incarnation + 1), 0)
            case 5:
                self.silent = frozenset(WorkerId(n) for n in rng.sample(range(N_WORKERS), rng.choice([0, 0, 1, 3])))
            case 6:
                self.missing = frozenset(rng.sample(RANKS, rng.choice([0, 0, 0, 1])))
            case 7:
                self.predicted = frozenset(rng.sample(RANKS, rng.choice([0, 0, 2])))
            case 8:
                self.partition(partition, rng.choice([0, 0, 0, 2000]), live=rng.random() < 0.9)
            case 9:
                self.partition(partition, with_ends=False)
            case 10:
                self.now_ms += rng.choice([1, 900, 1000, 1001, 3000, 3001])
            case 11:
                self.make_exact()
                self.silent, self.missing, self.plain.incomplete = frozenset(), NO_RANKS, {}
                self.tracker._ranks._incomplete.clear()
            case _:
                for owner in range(N_PARTITIONS):
                    self.partition(owner)

    def compare_counts(self) -> None:
        """Compare how many ranks have each reason by themselves."""
        found = [self.plain.of_rank(each, NO_RANKS, self.now_ms, self.silent, NO_RANKS) for each in RANKS]
        reasons = Counter(each for each in found if isinstance(each, DegradedReason))
        assert self.tracker.count(RANKS, self.now_ms, self.silent) == (found.count(AnswerMode.APPROXIMATE), reasons)

    def compare(self, ranks: Sequence[RankId]) -> None:
        found = self.tracker.assess(
            ranks, self.predicted, self.now_ms, bridge_silent=self.silent, ranks_missing_labels=self.missing
        )
        assert found == self.plain.of(tuple(ranks), self.predicted, self.now_ms, self.silent, self.missing)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_trust_over_many_ranks_is_that_of_each_rank(seed: int) -> None:
    """After any change, mode and reason are those of the first degraded rank, for a whole fleet and any part of it."""
    rng = random.Random(seed)
    both = Both()
    both.make_exact()
    fewer = RANKS[3:17]
    for _ in range(40):
        both.change(rng)
        both.compare(RANKS)
        both.compare(fewer)
        both.compare_counts()
        both.compare(list(RANKS))
        at = np.flatnonzero(np.array([rng.random() < 0.4 for _ in RANKS]))
        both.compare(RankSelection(RANKS, at))
        both.compare((rng.choice(RANKS),))


def test_every_reason_is_found_at_every_position() -> None:
    """One degraded rank decides wherever it is, and of two reasons of one rank the first check's counts."""
    for position, each in enumerate(RANKS):
        both = Both()
        both.make_exact()
        both.compare(RANKS)
        both.missing = frozenset({each})
        both.compare(RANKS)
        both.tracker.note_over_capacity(each)
        both.plain.incomplete[each] = both.plain.epochs[each]
        both.compare(RANKS)
        both.silent = frozenset({each.worker_id})
        both.compare(RANKS)
        both.progress(each, Health.EXACT, FeedState.CATCHING_UP, 6000)
        both.compare(RANKS)
        found = both.tracker.assess(RANKS[: position + 1], NO_RANKS, both.now_ms)
        assert found.reason is DegradedReason.FEED_BEHIND
        both.progress(each, Health.DEGRADED, FeedState.CATCHING_UP, 6000)
        both.compare(RANKS)
        both.compare(RankSelection(RANKS, np.arange(position, len(RANKS))))


def test_pooled_rows_count_after_the_ranks() -> None:
    """Answers that use pooled blocks need the owners of their rows, whatever the ranks are."""
    both = Both()
    both.make_exact()
    owner = PooledRows(0, (1,))
    assert both.tracker.assess(RANKS, NO_RANKS, both.now_ms, pooled=owner).reason is DegradedReason.POOLED_OWNER_BEHIND
    at = {"blocks": SourceOffset("p", 5)}
    both.tracker.note_pooled_ends(1, both.now_ms, at, at)
    assert both.tracker.assess(RANKS, NO_RANKS, both.now_ms, pooled=owner).mode is AnswerMode.EXACT
    over = PooledRows(1, (1,))
    assert both.tracker.assess(RANKS, NO_RANKS, both.now_ms, pooled=over).reason is DegradedReason.POOLED_OVER_CAPACITY
    both.progress(RANKS[4], Health.DEGRADED, FeedState.LIVE, 0)
    assert both.tracker.assess(RANKS, NO_RANKS, both.now_ms, pooled=over).reason is DegradedReason.EVENTS_LOST


def test_ranks_that_left_do_not_fill_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of places all ranks get new ones, and answers stay right."""
    monkeypatch.setattr(rank_trust, "_NUMBERED_MAX", 40)
    both = Both()
    both.make_exact()
    for first in range(0, len(RANKS) - 10, 3):
        both.progress(RANKS[first + 2], Health.DEGRADED, FeedState.LIVE, 0)
        both.compare(RANKS[first : first + 10])
        both.compare(RANKS)
        assert len(both.tracker._ranks._places) <= 40


# --- filters ------------------------------------------------------------------------------------------------------

_ids = st.frozensets(st.integers(0, N_WORKERS + 2).map(WorkerId), max_size=N_WORKERS + 3)
_filters = st.builds(
    WorkerFilter,
    model=st.sampled_from(["m", "m", "m", "other"]),
    worker_id=st.none() | st.integers(0, N_WORKERS).map(WorkerId),
    dp_rank=st.none() | st.integers(0, 3).map(DpRank),
    allowed=st.none() | _ids,
    excluded=st.just(frozenset()) | _ids,
    phase=st.none() | st.sampled_from(Role),
    required_taints=st.sampled_from([frozenset(), frozenset({"a"}), frozenset({"a", "b"})]),
    block_size=st.sampled_from([None, 16]),
    lora_name=st.sampled_from([None, "a", "b"]),
)
_workers = st.builds(
    Worker,
    worker_id=st.just(WorkerId(0)),
    url=st.just("http://w"),
    model=st.sampled_from(["m", "m", "m", "other"]),
    block_size=st.sampled_from([16, 16, 32]),
    dp_size=st.integers(1, 3),
    role=st.sampled_from(Role),
    state=st.sampled_from([WorkerState.ACTIVE] * 3 + [WorkerState.CORDONED]),
    taints=st.sampled_from([(), ("a",), ("a", "b")]),
    lora_names=st.sampled_from([None, (), ("a",)]),
)


@given(
    fleet=st.lists(_workers, max_size=N_WORKERS),
    asked=_filters,
    silent=st.frozensets(st.sampled_from(RANKS), max_size=4),
    wrong=st.frozensets(st.sampled_from(RANKS), max_size=2),
)
@settings(max_examples=400, deadline=None)
def test_narrowing_shared_filters_gives_what_all_filters_give(
    fleet: list[Worker], asked: WorkerFilter, silent: frozenset[RankId], wrong: frozenset[RankId]
) -> None:
    """The ranks of a filter are the same and in the same order, whether ids are applied at once or afterwards."""
    workers = {WorkerId(number): replace(each, worker_id=WorkerId(number)) for number, each in enumerate(fleet)}
    table = EligibleRanks(eligible_ranks(workers, asked.shared(), silent, wrong))
    found = table.narrowed(asked)
    expected = eligible_ranks(workers, asked, silent, wrong)
    assert list(found) == expected
    assert found == tuple(expected) and len(found) == len(expected)
    assert base_of(found)[0] is table.ranks
    assert all(found[index] == each for index, each in enumerate(expected))
    assert found[1:3] == tuple(expected[1:3])
    assert (found is table.ranks) == (len(expected) == len(table.ranks))


def test_only_a_lease_may_change_without_a_new_list_of_ranks() -> None:
    """Every other field of a worker counts as a change of the fleet."""
    worker = Worker(WorkerId(1), "http://w", "m", 16)
    lease = BridgeLease("bridge", 1, 6000, 2)
    assert differs_in_lease_only(worker, replace(worker, lease=lease, registered_at_ms=5))
    for changed in (
        replace(worker, url="http://v"),
        replace(worker, model="n"),
        replace(worker, block_size=32),
        replace(worker, dp_size=2),
        replace(worker, role=Role.DECODE),
        replace(worker, state=WorkerState.CORDONED),
        replace(worker, kv_total_blocks=9),
        replace(worker, max_requests=9),
        replace(worker, device_class="cpu"),
        replace(worker, taints=("a",)),
        replace(worker, lora_names=("a",)),
    ):
        assert not differs_in_lease_only(worker, changed)


# --- busy ranks ---------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), rows_max=st.sampled_from([12, 40, busy._ROWS_MAX]))
@settings(max_examples=150, deadline=None)
def test_busy_thresholds_over_columns_leave_the_same_ranks(seed: int, rows_max: int) -> None:
    """Reports that come, change and end leave the ranks that a look at each rank leaves, also above a limit of rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(busy, "_ROWS_MAX", rows_max)
        _compare_busy(random.Random(seed))


def _compare_busy(rng: random.Random) -> None:
    totals = [None, 0, 10, 20]
    workers = {
        WorkerId(number): Worker(WorkerId(number), "http://w", "m", 16, kv_total_blocks=rng.choice([None, 10, 20]))
        for number in range(N_WORKERS)
    }
    blocks, metrics = ReportedBlocks(workers), dict[RankId, WorkerMetrics]()
    loads = ActiveLoads(60_000)
    for step in range(30):
        each = rng.choice(RANKS)
        if rng.random() < 0.2:
            metrics.pop(each, None)
            blocks.forget(each)
        else:
            reported = WorkerMetrics(kv_total_blocks=rng.choice(totals) or 0, kv_active_blocks=rng.randrange(25))
            metrics[each] = reported
            blocks.note(each, reported)
        names = pack_hashes([step * 1000 + number for number in range(rng.randrange(12))])
        loads.add(BookingId(str(step), "r", step), Booking(each, "m", rng.randrange(80), names, 0, 12), 0)
        thresholds = BusyThresholds(rng.choice([0.0, 0.5, 0.9, 1.0]), rng.choice([0, 40, 64]))
        at = np.flatnonzero(np.array([rng.random() < 0.5 for _ in RANKS]))
        for ranks in (RANKS, RankSelection(RANKS, at), list(RANKS)):
            known = blocks.of(ranks)
            looked_up = reported_blocks(ranks, workers, metrics)
            assert (known.total.tolist(), known.active.tolist()) == (
                looked_up.total.tolist(),
                looked_up.active.tolist(),
            )
            idle = idle_ranks(ranks, thresholds, loads, blocks.of)
            assert list(idle) == [each for each in ranks if not _is_busy(each, thresholds, workers, loads, metrics)]
            assert (idle is ranks) == (len(idle) == len(ranks))


def _is_busy(
    each: RankId,
    thresholds: BusyThresholds,
    workers: dict[WorkerId, Worker],
    loads: ActiveLoads,
    metrics: dict[RankId, WorkerMetrics],
) -> bool:
    load, reported = loads.load(each), metrics.get(each)
    if 0 < thresholds.prefill_tokens < load.prefill_tokens:
        return True
    total = workers[each.worker_id].kv_total_blocks or (reported.kv_total_blocks if reported else 0)
    active = max(load.decode_blocks, reported.kv_active_blocks if reported else 0)
    return thresholds.decode_blocks > 0.0 and total > 0 and active > thresholds.decode_blocks * total


# --- the choice ---------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(RouterMode), temperature=st.sampled_from([0.0, 0.7]))
@settings(max_examples=200, deadline=None)
def test_a_choice_among_a_selection_is_that_among_its_ranks(seed: int, mode: RouterMode, temperature: float) -> None:
    """The chosen rank and every term are the same, whether the ranks are selected by position or listed."""
    rng = random.Random(seed)
    loads = ActiveLoads(60_000)
    for number in range(20):
        names = pack_hashes([rng.randrange(4) * 100 + at for at in range(rng.randrange(8))])
        loads.add(BookingId(str(number), "r", 1), Booking(rng.choice(RANKS), "m", rng.randrange(99), names, 0, 8), 0)
    scores = PrefixScores({each: rng.randrange(1, 9) for each in RANKS if rng.random() < 0.6})
    policy = RoutePolicy(mode=mode, temperature=temperature, name="dynamo-tuned")
    one, other = Chooser(random.Random(seed)), Chooser(random.Random(seed))
    for _ in range(3):
        at = np.flatnonzero(np.array([rng.random() < 0.5 for _ in RANKS]))
        if not len(at):
            continue
        selected = RankSelection(RANKS, at)
        sequence = pack_hashes([rng.randrange(4) * 100 + n for n in range(8)])
        decisions = [
            chooser.choose(
                routing_request(policy, ranks, scores, sequence=sequence, request_blocks=8, block_size=16), loads
            )
            for chooser, ranks in ((one, selected), (other, tuple(selected)))
        ]
        assert decisions[0].chosen == decisions[1].chosen
        assert decisions[0].candidates == decisions[1].candidates
        columns = one._columns.of(selected, loads)
        assert columns.rows.tolist() == loads.rows_of(selected).tolist()
        for each in RANKS:
            only = columns.only(each)
            assert (only is not None) == (each in tuple(selected))
            assert only is None or (tuple(only.ranks), only.rows.tolist()) == ((each,), loads.rows_of([each]).tolist())


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_rows_of_a_fleet_follow_the_bookings(seed: int) -> None:
    """Whichever ranks get a row or lose it, as rows are reused and their table grows, a decision has all rows."""
    rng = random.Random(seed)
    loads, columns = ActiveLoads(60_000), ColumnsCache()
    fleet = tuple(rank(worker_id) for worker_id in range(1, 400))
    active: list[BookingId] = []
    for number in range(600):
        if active and rng.random() < (0.3 if number < 400 else 0.7):
            loads.free(active.pop(rng.randrange(len(active))), number)
        else:
            active.append(BookingId(str(number), "r", number))
            loads.add(active[-1], Booking(rng.choice(fleet), "m", 0, b"", 0, 1), number)
        if rng.random() < 0.2:
            assert columns.of(fleet, loads).rows.tolist() == loads.rows_of(fleet).tolist()
    assert loads.table.shape[1] > ROWS_FIRST


# --- over HTTP ----------------------------------------------------------------------------------------------------


def test_a_large_fleet_is_filtered_as_a_small_one() -> None:
    """With 300 workers, each filter of a request leaves the ranks that it names, whatever was asked before."""
    with local_router(Settings(active_prefill_tokens_threshold=100), 300) as served:
        every = set(range(1, 301))

        def candidates(**asked: Any) -> set[int]:
            body = {"token_ids": list(range(64)), "explain": True, "update_states": False, **asked}
            return {each["worker_id"] for each in served.api.call("POST", "/route", body).given()["candidates"]}

        assert candidates() == every
        assert candidates(excluded_worker_ids=[7, "300", 999]) == every - {7, 300}
        assert candidates(allowed_worker_ids=[5, 6, 7], excluded_worker_ids=[6]) == {5, 7}
        assert candidates(worker_id=9, dp_rank=0) == {9}
        served.api.call("POST", "/route", {"dp_rank": 1, "token_ids": [1]}).refused(503, "no_eligible_worker")
        for number in (3, 4):
            served.api.call("POST", f"/loads/r{number}", {"worker_id": number, "token_ids": list(range(101))}).given()
        assert candidates() == every - {3, 4}
        assert candidates(excluded_worker_ids=[1, 3]) == every - {1, 3, 4}
        served.api.call("POST", "/route", {"worker_id": 3, "token_ids": [1]}).refused(503, "all_workers_busy")
        served.api.call("DELETE", "/loads/r3").given()
        served.router.view.fold_worker(b"300", None)
        assert candidates() == every - {4, 300}


def test_values_are_kept_by_identity_up_to_a_limit() -> None:
    """Equal tuples are different keys, and the oldest value is dropped."""
    cache: IdentityCache[int] = IdentityCache()
    tuples = [tuple(RANKS) + (rank(99),) * (number + 1) for number in range(TUPLES_MAX + 1)]
    for number, each in enumerate(tuples):
        cache.put(each, number)
    assert len(cache) == TUPLES_MAX
    assert cache.get(tuples[0]) is None
    assert cache.get(tuples[1]) == 1
    equal = (*tuples[1][:-1], tuples[1][-1])
    assert equal == tuples[1] and cache.get(equal) is None

"""What a router counts about its decisions, and how evenly it finds the load spread."""

from __future__ import annotations

import math

import pytest

from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import FALLBACK, NOT_IN_SYNC, AnswerMode, DegradedReason
from streams.core.workers import Worker, WorkerState
from streams.process.metrics import OTHER, VALUES_MAX
from streams.router_api.deciding.decision_counts import WINDOW_STEP_S, WINDOW_STEPS, DecisionCounts
from streams.router_api.http.fleet_load import FleetLoad, Load
from tests.helpers.reference import chain_hashes, u64


def note(counts: DecisionCounts, worker: int, hit: int, blocks: int = 10, *, reads_index: bool = True) -> None:
    counts.note(RouterMode.KV, WorkerId(worker), hit, blocks, FALLBACK, FALLBACK, reads_index=reads_index)


def test_decisions_are_counted_by_mode_and_reason() -> None:
    """Each combination of router mode, answer mode and reason has its own count."""
    counts = DecisionCounts()
    for mode, trust in ((RouterMode.KV, FALLBACK), (RouterMode.KV, NOT_IN_SYNC), (RouterMode.RANDOM, FALLBACK)):
        counts.note(mode, WorkerId(1), 0, 1, trust, trust, reads_index=False)
    note(counts, 2, 0)
    assert counts.by_reason == {
        (RouterMode.KV, AnswerMode.FALLBACK, None): 2,
        (RouterMode.KV, AnswerMode.DEGRADED, DegradedReason.BOOKINGS_NOT_IN_SYNC): 1,
        (RouterMode.RANDOM, AnswerMode.FALLBACK, None): 1,
    }


def test_the_hit_rate_is_that_of_blocks_and_leaves_out_decisions_without_the_index() -> None:
    """A long prompt weighs more than a short one; a decision by load says nothing about what was cached."""
    counts = DecisionCounts()
    note(counts, 1, 90, 100)
    note(counts, 1, 0, 10)
    note(counts, 1, 0, 1000, reads_index=False)
    note(counts, 2, 0, 5)
    note(counts, 3, 0, 0)  # a prompt without blocks
    assert counts.hit_rates() == {1: pytest.approx(90 / 110), 2: 0.0}
    assert (counts.blocks, counts.hit_blocks) == (115, 90)
    assert {worker: each.decisions for worker, each in counts.by_worker.items()} == {1: 3, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("hit", "blocks", "bound"), [(0, 7, 0.0), (1, 100, 0.1), (1, 10, 0.1), (2, 10, 0.2), (7, 7, 1.0)]
)
def test_the_share_of_a_decision_is_in_the_bucket_of_the_next_bound(hit: int, blocks: int, bound: float) -> None:
    """A share that equals a bound is within it, as in every histogram of Prometheus."""
    counts = DecisionCounts()
    note(counts, 1, hit, blocks)
    observed = DecisionCounts().hit_ratio
    observed.observe(hit / blocks)
    assert counts.hit_ratio.cumulative() == observed.cumulative()
    assert counts.hit_ratio.counts[counts.hit_ratio.bounds.index(bound)] == 1


def test_the_hit_rate_forgets_what_is_older_than_the_window() -> None:
    """After a change of traffic, the rate is that of the new traffic one window later."""
    counts, workers = DecisionCounts(), {WorkerId(1)}
    counts.roll(0.0, workers)
    note(counts, 1, 10)
    for step in range(1, WINDOW_STEPS):
        counts.roll(step * WINDOW_STEP_S, workers)
    note(counts, 1, 0)
    assert counts.hit_rates() == {1: 0.5}
    counts.roll(WINDOW_STEPS * WINDOW_STEP_S, workers)
    assert counts.hit_rates() == {1: 0.0}
    counts.roll(WINDOW_STEPS * WINDOW_STEP_S, workers)  # more often changes nothing
    assert counts.hit_rates() == {1: 0.0}
    for step in range(WINDOW_STEPS + 1, 2 * WINDOW_STEPS + 1):
        counts.roll(step * WINDOW_STEP_S, workers)
    assert counts.hit_rates() == {}


@pytest.mark.parametrize("n_others", [0, 1, 3])
def test_workers_beyond_the_limit_are_counted_together(n_others: int) -> None:
    """However many workers there are, memory and time series are limited, and no decision is lost."""
    counts = DecisionCounts()
    n_workers = VALUES_MAX + n_others
    for worker in range(n_workers):
        note(counts, worker, 5)
        note(counts, worker, 5)
    assert sum(each.decisions for each in counts.by_worker.values()) == 2 * n_workers
    assert (counts.by_worker[OTHER].decisions if n_others else 0) == 2 * n_others
    assert len(counts.by_worker) == VALUES_MAX + bool(n_others)
    counts.roll(0.0, {WorkerId(1)})  # all others were removed from the registry
    assert counts.by_worker.keys() == ({1, OTHER} if n_others else {1})
    note(counts, n_workers, 5)
    assert counts.by_worker[WorkerId(n_workers)].decisions == 1


def loaded(*per_rank: tuple[int, int, int]) -> ActiveLoads:
    """Loads with one booking for each (worker, n_blocks, prefill tokens); blocks are not shared."""
    loads = ActiveLoads(60_000)
    for number, (worker, n_blocks, prefill) in enumerate(per_rank):
        sequence = pack_hashes(u64(chain_hashes(range(1000 * number, 1000 * number + n_blocks))))
        rank = RankId(WorkerId(worker), DpRank(0))
        loads.add(BookingId(f"r{number}", "me", number), Booking(rank, "m", prefill, sequence, 0, n_blocks), None)
    return loads


def worker(number: int, model: str = "m", **more: object) -> Worker:
    return Worker(WorkerId(number), "http://e", model, 16, **more)  # type: ignore[arg-type]


def test_load_is_summed_by_worker_and_model() -> None:
    """Every registered worker has a load, and ranks that are not registered count nowhere."""
    fleet = FleetLoad(
        [worker(3, "b"), worker(1), worker(2, dp_size=2)], loaded((1, 4, 64), (1, 2, 0), (2, 3, 48), (9, 5, 80))
    )
    assert fleet.by_worker == {1: Load(64, 6, 2), 2: Load(48, 3, 1), 3: Load(0, 0, 0)}
    assert list(fleet.by_worker) == [1, 2, 3]
    assert fleet.requests_by_model() == {"m": 3, "b": 0}
    assert fleet.total() == Load(112, 9, 3)


def test_the_balance_score_is_the_deviation_over_the_mean_of_ranks_of_one_model() -> None:
    """Equal loads give 0; a single loaded rank of n gives the root of n - 1; models and cordoned workers are apart."""
    active = loaded((1, 4, 100), (2, 4, 300), (3, 8, 0))
    cordoned = worker(4, state=WorkerState.CORDONED)
    even = dict(FleetLoad([worker(1), worker(2), worker(3, "b"), cordoned], active).imbalance())
    assert even.keys() == {"m", "b"}
    assert even["m"] == pytest.approx((0.0, 0.5))
    assert even["b"] == (0.0, 0.0)
    skewed = FleetLoad([worker(3), *map(worker, range(10, 14))], active).imbalance()
    assert skewed["m"] == pytest.approx((math.sqrt(5 - 1), 0.0))
    ranks = FleetLoad([worker(1, dp_size=2)], active).imbalance()
    assert ranks == {"m": (1.0, 1.0)}


def test_a_fleet_without_workers_or_load_is_even() -> None:
    """Nothing is divided by zero."""
    assert FleetLoad([], loaded()).imbalance() == {}
    assert FleetLoad([], loaded()).total() == Load(0, 0, 0)
    assert FleetLoad([worker(1), worker(2)], loaded()).imbalance() == {"m": (0.0, 0.0)}

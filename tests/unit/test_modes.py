"""Every router mode, without a router: what decides its choice, what it does without data, that it books nothing."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.engine_metrics import WorkerMetrics, with_bookings
from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.index.interface import PrefixScores, with_predictions
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.routing import unreported as unreported_module
from streams.core.routing.busy import BusyThresholds, idle_ranks, reported_blocks
from streams.core.routing.decision import Chooser
from streams.core.routing.policies.engine_reports import hit_rates, hit_usage_waiting, load_deviation
from streams.core.routing.request import FleetState, RoutePolicy
from streams.core.routing.selection import (
    RouterMode,
    select_by_cost,
    select_device_aware,
    select_least_loaded,
    select_power_of_two,
)
from streams.core.routing.sessions import SessionAffinity
from streams.core.routing.unreported import REPORT_DELAY_MS, UnreportedBookings
from streams.core.workers import Worker
from streams.errors import AllWorkersBusy
from tests.helpers.routing import routing_request

SEED = 20_251_121
N_DRAWS = 100_000
BLOCK_SIZE = 16


def rank(worker_id: int, dp_rank: int = 0) -> RankId:
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


RANKS = tuple(rank(worker_id) for worker_id in (1, 2, 3))
HITS = PrefixScores({RANKS[0]: 2, RANKS[1]: 5, RANKS[2]: 8})


NO_REPORTS = FleetState()


class Untouchable(PrefixScores):
    """Scores that must not be read."""

    def __init__(self) -> None:
        super().__init__({})

    @property
    def scores(self) -> Mapping[RankId, int]:
        refuse()

    @property
    def by_tier(self) -> Mapping[RankId, tuple[int, ...]]:
        refuse()

    def effective_blocks(self, rank: RankId, tier_weights: tuple[float, ...]) -> float:  # noqa: ARG002
        refuse()


def refuse() -> NoReturn:
    raise AssertionError("overlap was read")


def loads_of(*requests: int, blocks: int = 0) -> ActiveLoads:
    """Loads with the given number of requests on each rank, each with blocks of its own."""
    loads = ActiveLoads(60_000)
    for each, n in zip(RANKS, requests, strict=True):
        for number in range(n):
            first = 1000 * number + 10**6 * each.worker_id
            carried = Booking(each, "m", 0, pack_hashes(range(first, first + blocks)), 0, blocks)
            loads.add(BookingId(f"{each}-{number}", "router", number), carried, 0)
    return loads


def choose(
    mode: RouterMode,
    loads: ActiveLoads,
    *,
    scores: PrefixScores = HITS,
    fleet: FleetState = NO_REPORTS,
    seed: int = SEED,
    **policy: Any,
) -> Any:
    request = routing_request(
        RoutePolicy(mode=mode, name="expected-time", **policy),
        RANKS,
        scores,
        sequence=pack_hashes([1, 2]),
        request_blocks=10,
        block_size=BLOCK_SIZE,
        fleet=fleet,
    )
    return Chooser(random.Random(seed)).choose(request, loads)


# --- the cost of mode kv ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.2, 0.5, 2.0])
def test_frequencies_of_the_softmax_are_those_of_theory(temperature: float) -> None:
    """Over 100,000 draws, the three costs are chosen with the frequencies of the softmax, within 1 % of all draws."""
    costs = [18.0, 10.0, 11.0]
    weights = [math.exp(-cost / (8.0 * temperature)) for cost in costs]
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    counts = Counter(select_by_cost(costs, temperature, rng) for _ in range(N_DRAWS))
    for index, weight in enumerate(weights):
        assert abs(counts[index] / N_DRAWS - weight / sum(weights)) < 0.01


@pytest.mark.parametrize("mode", RouterMode)
def test_overlap_is_read_only_if_it_can_change_the_choice(mode: RouterMode) -> None:
    """With weight 0 no mode reads scores. Modes that choose by turns, by load or at random never read them."""
    loads = loads_of(1, 2, 3)
    choose(mode, loads, scores=Untouchable(), overlap_score_weight=0.0)
    if RoutePolicy(mode=mode).reads_index:
        with pytest.raises(AssertionError, match="overlap was read"):
            choose(mode, loads, scores=Untouchable())
    else:
        choose(mode, loads, scores=Untouchable())


def test_without_track_active_blocks_decode_blocks_cost_nothing() -> None:
    """Without track_active_blocks, the rank with the longest prefix is chosen despite its many decode blocks."""
    loads = loads_of(1, 1, 9, blocks=10)
    tracked, untracked = (choose(RouterMode.KV, loads, track_active_blocks=on) for on in (True, False))
    assert [each.decode_blocks for each in tracked.candidates] == [12, 12, 92]
    assert [each.cost for each in untracked.candidates] == [8.0, 5.0, 2.0]
    assert (tracked.chosen.rank, untracked.chosen.rank) == (RANKS[1], RANKS[2])


# --- by load ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_flight", "expected"), [([3, 1, 2], {1}), ([0], {0}), ([1, 1, 2], {0, 1}), ([4, 4, 4], {0, 1, 2})]
)
def test_least_loaded_takes_the_fewest_requests(in_flight: list[int], expected: set[int]) -> None:
    """A rank with the fewest requests is chosen; over 100 draws, each of several such ranks is."""
    rng = random.Random(SEED)
    assert {select_least_loaded(in_flight, rng) for _ in range(100)} == expected


def test_power_of_two_draws_pairs_uniformly_and_takes_the_better() -> None:
    """With loads 1, 2, 3 and 4, the first wins three of the six pairs, the second two, the third one, the last none."""
    rng = random.Random(SEED)
    counts = Counter(select_power_of_two([1, 2, 3, 4], rng) for _ in range(N_DRAWS))
    assert counts[3] == 0
    for index, share in enumerate((3 / 6, 2 / 6, 1 / 6)):
        assert abs(counts[index] / N_DRAWS - share) < 0.01, f"seed {SEED}"


def test_power_of_two_is_fair_among_equals_and_takes_the_only_one() -> None:
    """With equal loads, power-of-two chooses each position equally often; a single candidate is always chosen."""
    rng = random.Random(SEED)
    counts = Counter(select_power_of_two([5, 5, 5], rng) for _ in range(N_DRAWS))
    assert all(abs(counts[index] / N_DRAWS - 1 / 3) < 0.01 for index in range(3))
    assert select_power_of_two([7], rng) == 0


@pytest.mark.parametrize(
    ("in_flight", "on_cpu", "ratio", "expected"),
    [
        # A CPU and a device of eight times its throughput: the CPU is chosen below an eighth of the load.
        ([0, 0], [True, False], 8.0, {1}),
        ([0, 1], [True, False], 8.0, {0}),
        ([1, 8], [True, False], 8.0, {1}),
        ([1, 9], [True, False], 8.0, {0}),
        ([2, 9], [True, False], 8.0, {1}),
        ([1, 1], [True, False], 1.0, {1}),
        ([1, 2], [True, False], 1.0, {0}),
        # Groups are compared as wholes, by their size; within a group the least loaded is chosen.
        ([1, 0, 9, 8], [True, True, False, False], 8.0, {1}),
        ([2, 1, 9, 8], [True, True, False, False], 8.0, {3}),
        ([1, 7, 9], [True, False, False], 8.0, {1}),  # 1 / 1 is 16 / 16
        ([1, 8, 9], [True, False, False], 8.0, {0}),  # 1 / 1 is less than 17 / 16
        # Only one group.
        ([3, 1, 2], [True, True, True], 8.0, {1}),
        ([3, 1, 1], [False, False, False], 8.0, {1, 2}),
    ],
)
def test_devices_are_compared_by_normalised_load(
    in_flight: list[int], on_cpu: list[bool], ratio: float, expected: set[int]
) -> None:
    """Groups are compared by requests in flight / (candidates * throughput); if equal, the faster devices win."""
    rng = random.Random(SEED)
    assert {select_device_aware(in_flight, on_cpu, ratio, rng) for _ in range(60)} == expected


@pytest.mark.parametrize(
    ("mode", "requests", "expected"),
    [
        (RouterMode.LEAST_LOADED, (2, 1, 3), {RANKS[1]}),
        (RouterMode.DIRECT, (2, 1, 3), {RANKS[1]}),
        (RouterMode.POWER_OF_TWO, (2, 1, 3), {RANKS[0], RANKS[1]}),
        (RouterMode.DEVICE_AWARE_WEIGHTED, (0, 8, 8), {RANKS[0]}),
        (RouterMode.DEVICE_AWARE_WEIGHTED, (2, 8, 9), {RANKS[1]}),
    ],
)
def test_modes_by_load_read_requests_in_flight(
    mode: RouterMode, requests: tuple[int, ...], expected: set[RankId]
) -> None:
    """The modes that choose by load compare requests in flight. In this test, the first worker is a CPU."""
    fleet = FleetState(cpu_workers=frozenset({RANKS[0].worker_id}))
    loads = loads_of(*requests)
    assert {choose(mode, loads, fleet=fleet, seed=seed).chosen.rank for seed in range(40)} == expected


# --- the older policies -------------------------------------------------------------------------------------------


def metrics(**fields: Any) -> WorkerMetrics:
    return WorkerMetrics(**fields)


@pytest.mark.parametrize(
    ("n_tokens", "held", "rates"),
    [(20, [0, 1], [0.0, 0.8]), (16, [0, 1], [0.0, 1.0]), (31, [1], [16 / 31]), (33, [1, 2], [16 / 33, 32 / 33])],
)
def test_a_hit_rate_is_a_share_of_tokens(n_tokens: int, held: list[int], rates: list[float]) -> None:
    """A partial last block counts with the tokens that it has: of 20 tokens one cached block of 16 is 0.8."""
    assert hit_rates(np.array(held), n_tokens, BLOCK_SIZE) == pytest.approx(rates)


@pytest.mark.parametrize("mode", [RouterMode.HIT_USAGE_WAITING, RouterMode.LOAD_DEVIATION])
@pytest.mark.parametrize(("n_tokens", "rate"), [(20, 0.8), (None, 0.5)])
def test_the_older_policies_compute_in_tokens_and_from_the_plain_overlap(
    mode: RouterMode, n_tokens: int | None, rate: float
) -> None:
    """A block on the host is as much of a hit as one on the device, and a request without a length has full blocks."""
    scores = PrefixScores({RANKS[0]: 1, RANKS[1]: 1}, {RANKS[1]: (0, 1, 0, 0)})
    even = {each: metrics(kv_total_blocks=10) for each in RANKS}
    request = routing_request(
        RoutePolicy(mode=mode),
        RANKS,
        scores,
        sequence=pack_hashes([1]),
        request_blocks=2,
        block_size=BLOCK_SIZE,
        n_tokens=n_tokens,
        fleet=FleetState(even),
    )
    decision = Chooser(random.Random(SEED)).choose(request, loads_of(0, 0, 0))
    hit, miss = (-2.0 * rate, 0.0) if mode is RouterMode.HIT_USAGE_WAITING else (0.7 * (1.0 - rate), 0.7)
    assert [each.cost for each in decision.candidates] == pytest.approx([hit, hit, miss])


def test_hit_usage_waiting_weighs_hits_twice() -> None:
    """The cost is -(2 * hit rate - cache usage - waiting / the most waiting)."""
    reported = [
        metrics(gpu_cache_usage_perc=0.5, num_requests_waiting=2),
        metrics(gpu_cache_usage_perc=0.25, num_requests_waiting=4),
        None,
    ]
    assert hit_usage_waiting([0.2, 0.5, 0.8], reported) == pytest.approx([-0.4 + 0.5 + 0.5, -1.0 + 0.25 + 1.0, -1.6])
    assert hit_usage_waiting([0.0, 0.5], [metrics(), metrics()]) == [0.0, -1.0]


@pytest.mark.parametrize("reported", [[None, None], [metrics(), None], [metrics(), metrics(kv_active_blocks=9)]])
def test_all_zero_is_no_preference(reported: list[WorkerMetrics | None]) -> None:
    """If every cost of hit-usage-waiting is zero, it returns no costs."""
    assert hit_usage_waiting([0.0, 0.0], reported) is None


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 50)), min_size=1, max_size=6),
)
def test_hit_usage_waiting_is_its_formula(rows: list[tuple[float, float, int]]) -> None:
    """For any numbers, hit-usage-waiting returns the costs of its formula."""
    most = max(waiting for _, _, waiting in rows)
    expected = [2 * hit - usage - (waiting / most if most else 0) for hit, usage, waiting in rows]
    reported = [metrics(gpu_cache_usage_perc=usage, num_requests_waiting=waiting) for _, usage, waiting in rows]
    found = hit_usage_waiting([hit for hit, _, _ in rows], reported)
    if found is None:
        assert not any(expected)
    else:
        assert [-cost for cost in found] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("active", "alpha"), [((50, 50), 0.3), ((10, 90), 0.7), ((50, 60), 0.3), ((50, 62), 0.7), ((0, 0), 0.3)]
)
def test_uneven_loads_weigh_more(active: tuple[int, int], alpha: float) -> None:
    """The deviation's weight is 0.7 if the standard deviation of loads exceeds a tenth of their mean, otherwise 0.3.

    For loads of 50 and 60 of 100, the standard deviation is 0.05 and the limit is 0.055. For 50 and 62, they are 0.06
    and 0.056.
    """
    reported = [
        metrics(kv_active_blocks=blocks, kv_total_blocks=100, request_active_slots=n, request_total_slots=10)
        for blocks, n in zip(active, (1, 4), strict=True)
    ]
    mean = sum(active) / 200
    expected = [
        alpha * (blocks / 100 - mean) + (1 - alpha) * new + 0.1 * n / 10
        for blocks, n, new in zip(active, (1, 4), (0.8, 0.2), strict=True)
    ]
    assert load_deviation([0.8, 0.2], reported) == pytest.approx(expected)


def test_full_ranks_are_never_the_cheapest() -> None:
    """A rank without a free block or slot costs infinity; one without metrics is priced at mean load."""
    reported = [
        metrics(kv_active_blocks=100, kv_total_blocks=100),
        metrics(kv_active_blocks=1, kv_total_blocks=100, request_active_slots=8, request_total_slots=8),
        metrics(kv_active_blocks=50, kv_total_blocks=100),
        None,
    ]
    costs = load_deviation([0.0, 0.0, 1.0, 1.0], reported)
    assert costs is not None
    assert costs[:2] == [math.inf, math.inf]
    mean = (1.0 + 0.01 + 0.5) / 3
    assert costs[2:] == pytest.approx([0.7 * (0.5 - mean) + 0.3, 0.3])


def test_load_deviation_without_metrics_has_no_costs() -> None:
    """If no rank has metrics, load-deviation returns no costs."""
    assert load_deviation([0.1, 0.9], [None, None]) is None


def test_the_older_policies_return_their_costs_or_mark_a_fallback() -> None:
    """The costs are the policy's. If the policy has none, the choice is random or least-loaded, and not `preferred`."""
    reported = {each: metrics(gpu_cache_usage_perc=usage) for each, usage in zip(RANKS, (0.0, 0.0, 1.0), strict=True)}
    decision = choose(RouterMode.HIT_USAGE_WAITING, loads_of(0, 0, 0), fleet=FleetState(reported))
    assert (decision.chosen.rank, decision.preferred) == (RANKS[1], True)
    assert [each.cost for each in decision.candidates] == pytest.approx([-0.4, -1.0, -0.6])
    undecided = {
        seed: choose(RouterMode.HIT_USAGE_WAITING, loads_of(9, 0, 0), scores=PrefixScores({}), seed=seed)
        for seed in range(40)
    }
    assert {decision.chosen.rank for decision in undecided.values()} == set(RANKS)
    assert not any(decision.preferred for decision in undecided.values())

    even = {each: metrics(kv_active_blocks=5, kv_total_blocks=10) for each in RANKS}
    decision = choose(RouterMode.LOAD_DEVIATION, loads_of(0, 0, 0), fleet=FleetState(even))
    assert (decision.chosen.rank, decision.preferred) == (RANKS[2], True)
    assert [each.cost for each in decision.candidates] == pytest.approx([0.7 * 0.8, 0.7 * 0.5, 0.7 * 0.2])
    decision = choose(RouterMode.LOAD_DEVIATION, loads_of(1, 0, 1))
    assert (decision.chosen.rank, decision.preferred) == (RANKS[1], False)


def test_full_engines_are_all_workers_busy() -> None:
    """Load-deviation raises AllWorkersBusy if all engines report that they are full."""
    full = FleetState({each: metrics(kv_active_blocks=10, kv_total_blocks=10) for each in RANKS})
    with pytest.raises(AllWorkersBusy) as caught:
        choose(RouterMode.LOAD_DEVIATION, loads_of(0, 0, 0), fleet=full)
    assert (caught.value.code, caught.value.http_status) == ("all_workers_busy", 503)
    some = FleetState({each: metrics(kv_active_blocks=10, kv_total_blocks=10) for each in RANKS[1:]})
    assert choose(RouterMode.LOAD_DEVIATION, loads_of(0, 0, 0), fleet=some).chosen.rank == RANKS[0]


# --- bookings since the last report -------------------------------------------------------------------------------


def booking_id(number: int) -> BookingId:
    return BookingId(str(number), "router", number)


def since(unreported: UnreportedBookings, reported_ms: int, *ranks: RankId) -> list[tuple[int, int]]:
    """Requests and blocks on each of these ranks, all of which reported at this time; all of RANKS by default."""
    asked = ranks or RANKS
    found = unreported.since(dict.fromkeys(asked, reported_ms))
    return [tuple(found.get(each, (0, 0))) for each in asked]  # type: ignore[misc]


def test_bookings_count_from_when_they_are_made_until_a_later_report() -> None:
    """A booking counts on its rank until it ends, or until a report of which it must be part was received."""
    unreported = UnreportedBookings()
    for number, (each, blocks, at_ms) in enumerate([(RANKS[0], 3, 1000), (RANKS[0], 2, 1100), (RANKS[1], 7, 1100)]):
        unreported.add(booking_id(number), each, blocks, at_ms)
    unreported.add(booking_id(0), RANKS[2], 9, 1200)  # the same booking again
    assert since(unreported, 900) == [(2, 5), (1, 7), (0, 0)]
    assert since(unreported, 1000 + REPORT_DELAY_MS, RANKS[0]) == [(2, 5)]
    assert since(unreported, 1001 + REPORT_DELAY_MS, RANKS[0]) == [(1, 2)]
    unreported.end(booking_id(1))
    unreported.end(booking_id(1))
    assert since(unreported, 900) == [(0, 0), (1, 7), (0, 0)]
    assert since(unreported, 10_000, RANKS[1]) == [(0, 0)]
    assert len(unreported) == 0


def test_bookings_that_are_kept_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the oldest booking is dropped."""
    monkeypatch.setattr(unreported_module, "UNREPORTED_MAX", 2)
    unreported = UnreportedBookings()
    for number, each in enumerate(RANKS):
        unreported.add(booking_id(number), each, 1, 1000)
    assert since(unreported, 0) == [(0, 0), (1, 1), (1, 1)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 400)), max_size=40))
def test_unreported_bookings_are_those_of_a_list(calls: list[tuple[int, int, int]]) -> None:
    """For any calls, the sums are those of a plain list of bookings."""
    unreported, now_ms = UnreportedBookings(), 0
    kept: dict[int, tuple[RankId, int, int]] = {}
    for number, (what, at, passed_ms) in enumerate(calls):
        now_ms += passed_ms
        if what <= 2:
            unreported.add(booking_id(number), RANKS[at], what, now_ms)
            kept[number] = (RANKS[at], what, now_ms)
        elif what <= 4:
            unreported.end(booking_id(number - what))
            kept.pop(number - what, None)
        since_ms = now_ms - 300 * (what == 5)
        stale = [
            each for each, (of, _, at_ms) in kept.items() if of == RANKS[at] and at_ms < since_ms - REPORT_DELAY_MS
        ]
        for each in stale:
            del kept[each]
        mine = [blocks for of, blocks, _ in kept.values() if of == RANKS[at]]
        assert since(unreported, since_ms, RANKS[at]) == [(len(mine), sum(mine))]
        assert len(unreported) == len(kept)


def test_booked_requests_take_slots_and_blocks_and_then_wait() -> None:
    """Booked blocks raise the usage, and requests beyond the slots wait, if the totals are known."""
    reported = metrics(
        gpu_cache_usage_perc=0.5, request_active_slots=2, request_total_slots=4, kv_active_blocks=5, kv_total_blocks=10
    )
    assert with_bookings(reported, 1, 2) == metrics(
        gpu_cache_usage_perc=0.7, request_active_slots=3, request_total_slots=4, kv_active_blocks=7, kv_total_blocks=10
    )
    assert with_bookings(reported, 5, 20) == metrics(
        gpu_cache_usage_perc=1.0,
        num_requests_waiting=3,
        request_active_slots=4,
        request_total_slots=4,
        kv_active_blocks=25,
        kv_total_blocks=10,
    )
    over = metrics(request_active_slots=6, request_total_slots=4)
    assert with_bookings(over, 2, 0) == metrics(request_active_slots=6, request_total_slots=4, num_requests_waiting=2)
    assert with_bookings(metrics(), 3, 4) == metrics(request_active_slots=3, kv_active_blocks=4)


# --- busy ranks ---------------------------------------------------------------------------------------------------


def worker(worker_id: int, kv_total_blocks: int | None) -> Worker:
    return Worker(WorkerId(worker_id), "http://w", "m", BLOCK_SIZE, kv_total_blocks=kv_total_blocks)


@pytest.mark.parametrize(
    ("share", "tokens", "idle"),
    [
        (0.0, 0, {1, 2, 3}),
        (0.5, 0, {1, 3}),
        (0.49, 0, {3}),
        (0.6, 0, {1, 2, 3}),
        (0.0, 64, {1, 3}),
        (0.0, 65, {1, 2, 3}),
    ],
)
def test_busy_ranks_are_left_out(share: float, tokens: int, idle: set[int]) -> None:
    """A rank is busy above a threshold and not at it; a rank of unknown capacity is not busy."""
    loads = ActiveLoads(60_000)
    for each, blocks, prefill in zip(RANKS, (10, 12, 12), (0, 65, 0), strict=True):
        loads.add(BookingId(str(each), "r", 1), Booking(each, "m", prefill, pack_hashes(range(blocks)), 0, blocks), 0)
    workers = {WorkerId(n): worker(n, total) for n, total in ((1, 20), (2, 20), (3, None))}
    found = idle_ranks(RANKS, BusyThresholds(share, tokens), loads, lambda ranks: reported_blocks(ranks, workers, {}))
    assert {each.worker_id for each in found} == idle
    assert (found is RANKS) == (len(idle) == 3)


def test_an_engine_may_report_that_it_is_busier_than_our_bookings() -> None:
    """An engine's report raises its load, and gives its capacity if the registration has none."""
    reported = {RANKS[0]: metrics(kv_active_blocks=9, kv_total_blocks=10)}
    workers = {WorkerId(n): worker(n, None) for n in (1, 2, 3)}
    idle = idle_ranks(
        RANKS, BusyThresholds(0.8), loads_of(0, 0, 0), lambda ranks: reported_blocks(ranks, workers, reported)
    )
    assert idle == RANKS[1:]


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_stays_until_it_was_idle_for_its_ttl() -> None:
    """Each use of a session renews its binding, and a new rank replaces the previous one."""
    sessions = SessionAffinity(ttl_s=10.0)
    assert sessions.rank_of("s", 0.0) is None
    sessions.bind("s", RANKS[0], 0.0)
    assert sessions.rank_of("s", 9.999) == RANKS[0]
    sessions.bind("s", RANKS[0], 9.0)
    assert sessions.rank_of("s", 18.999) == RANKS[0]
    sessions.bind("s", RANKS[1], 18.0)
    assert sessions.rank_of("s", 27.999) == RANKS[1]
    assert sessions.rank_of("s", 28.0) is None
    assert len(sessions) == 0


def test_without_a_ttl_nothing_is_bound() -> None:
    """A TTL of 0 disables session bindings."""
    sessions = SessionAffinity(ttl_s=0.0)
    sessions.bind("s", RANKS[0], 5.0)
    assert sessions.rank_of("s", 5.0) is None
    assert len(sessions) == 0


def test_beyond_the_limit_the_least_recently_used_session_is_dropped() -> None:
    """Beyond the limit of sessions, the least recently used one is dropped and counted."""
    sessions = SessionAffinity(ttl_s=100.0, sessions_max=2)
    for now, session in enumerate(("a", "b", "a", "c")):
        sessions.bind(session, RANKS[0], float(now))
    assert [sessions.rank_of(session, 5.0) for session in "abc"] == [RANKS[0], None, RANKS[0]]
    assert sessions.evicted == 1


# --- predictions --------------------------------------------------------------------------------------------------


def test_a_prediction_is_used_if_it_is_longer() -> None:
    """A longer prediction replaces a rank's score. An equal one moves its blocks to the device tier. A shorter one
    changes nothing."""
    one, two, three = RANKS
    known = PrefixScores({one: 4, two: 4}, {one: (1, 3, 0, 0)})
    joined, predicted = with_predictions(known, PrefixScores({one: 4, two: 3, three: 2}))
    assert dict(joined.scores) == {one: 4, two: 4, three: 2}
    assert dict(joined.by_tier) == {}
    assert predicted == {one, three}
    same, none = with_predictions(known, PrefixScores({one: 3, two: 4}))
    assert same is known
    assert none == frozenset()


def test_a_choice_changes_neither_loads_nor_metrics() -> None:
    """In every mode, choosing a rank changes neither loads nor metrics."""
    loads = loads_of(1, 2, 3, blocks=4)
    before = {each: (load.requests, load.decode_blocks, load.prefill_tokens) for each, load in loads.ranks().items()}
    fleet = FleetState({each: metrics(kv_active_blocks=1, kv_total_blocks=9) for each in RANKS})
    for mode, seed in itertools.product(RouterMode, range(3)):
        choose(mode, loads, fleet=fleet, seed=seed)
    after = {each: (load.requests, load.decode_blocks, load.prefill_tokens) for each, load in loads.ranks().items()}
    assert after == before

"""Policy `expected-time`: its formula, what it learns, and how it treats memory that is not on the device."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, Float64Array, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.loads.observations import NO_FORECAST, Forecast, OutputObserved, PrefillObserved, Unreported
from streams.core.routing.cost import RECENT_PREFILL_WEIGHT
from streams.core.routing.kernels.price_times import price_times
from streams.core.routing.policies.expected_time import NAMES, ExpectedTime, ExpectedTimeParameters
from streams.core.routing.policies.expected_time_defaults import UNCACHED_WEIGHT
from streams.core.routing.policies.interface import NO_CLASSES, Prices, Situation
from streams.core.routing.policies.timings import PREFILL_DEFAULT, Line, LineFit, Timings
from streams.errors import SettingsError
from streams.policy_plugins import find_policy, policy_names
from tests.helpers.invariants import check
from tests.helpers.plain_prices import price_times_in_numpy
from tests.helpers.reference import chain_hashes

A, B, C = RANKS = tuple(RankId(WorkerId(number), DpRank(0)) for number in (1, 2, 3))
TTL_MS = 1 << 40
BLOCK = 16
PREFILL, DECODE = Line(20.0, 0.02), Line(8.0, 4e-5)
PARAMETERS = ExpectedTimeParameters(
    prefill_base_ms=PREFILL.base,
    prefill_ms_per_token=PREFILL.slope,
    decode_base_ms=DECODE.base,
    decode_ms_per_token=DECODE.slope,
)
HUNDRED_MS = Forecast(100_000)


def sequence_of(*blocks: int) -> bytes:
    return pack_hashes(chain_hashes(list(blocks)))


def booked(loads: ActiveLoads, name: str, rank: RankId, *blocks: int, forecast: Forecast = HUNDRED_MS) -> None:
    sequence = sequence_of(*blocks)
    loads.add(BookingId(name, "r", 1), Booking(rank, "m", 64, sequence, 0, len(blocks), forecast=forecast), 1000)


def situation(
    loads: ActiveLoads, held: Sequence[tuple[int, ...]] = (), pooled: Sequence[int] = (), **changes: Any
) -> Situation:
    """A request of 8 blocks. held: blocks by tier of each rank. pooled: blocks that each rank reaches in a pool."""
    tiers = np.array(held or [(0, 0, 0, 0)] * len(RANKS), dtype=np.float64)
    in_pools = np.array(pooled or [0] * len(RANKS), dtype=np.float64)

    def value(
        tier_values: tuple[float, ...], pool_value: float, _: Mapping[str, float] = NO_CLASSES, /
    ) -> Float64Array:
        found: Float64Array = tiers @ np.array(tier_values) + pool_value * in_pools
        return found

    sequence = sequence_of(*range(1, 9))
    shared, users = loads.shared_and_users(sequence)
    given = Situation(
        ranks=RANKS,
        rows=loads.rows_of(RANKS),
        loads=loads,
        scores=tiers.sum(axis=1).astype(np.int64),
        held=value,
        shared=shared,
        sequence=sequence,
        request_blocks=8,
        n_tokens=8 * BLOCK,
        block_size=BLOCK,
        now_ms=1000.0,
        model="m",
        on_device=not tiers[:, 1:].any() and not in_pools.any(),
        users=users,
    )
    return given._replace(**changes)


def terms(prices: Prices, rank: int = 0) -> dict[str, float]:
    return dict(zip(prices.names, prices.terms[:, rank].tolist(), strict=True))


def test_a_cost_is_the_sum_of_its_terms_in_milliseconds() -> None:
    """Every term of a rank with one waiting and one decoding request follows from the lines and the bookings."""
    loads = ActiveLoads(TTL_MS)
    booked(loads, "decoding", A, 101, 102)
    loads.prefill_complete(BookingId("decoding", "r", 1), 1000)
    booked(loads, "waiting", A, 1, 2, 201)
    prices = ExpectedTime(PARAMETERS).price(
        situation(loads, [(1, 0, 0, 0), (5, 0, 0, 0), (0, 0, 0, 0)], now_ms=1040.0, expected_output_tokens=100)
    )
    own = 20.0 + 0.02 * 6 * BLOCK
    assert terms(prices) == pytest.approx(
        {
            "cached_blocks": 2.0,  # a running request has them, and the index only the first one yet
            "uncached_tokens": 6.0 * BLOCK,
            "backlog_ms": 60.0,
            "kv_room_ms": 0.0,
            "prefill_ms": own,
            "load_ms": 0.0,
            "uncached_ms": UNCACHED_WEIGHT * 0.02 * 6 * BLOCK,
            "recent_prefill_ms": RECENT_PREFILL_WEIGHT * (3 / 5) ** 2 * (1.0 + UNCACHED_WEIGHT) * 0.02 * 6 * BLOCK,
            "popular_ms": 0.0,
            "slowed_decodes_ms": 0.01 * 1 * own,
            "own_decode_ms": 0.01 * 100 * (8.0 + 4e-5 * BLOCK * (2 + 8 + 1)),
        }
    )
    assert prices.costs[0] == pytest.approx(sum(list(terms(prices).values())[2:]))
    assert terms(prices, 1)["cached_blocks"] == 5.0
    assert prices.best == (1, 1)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    """An engine has to compute one token at least to have something to sample from."""
    prices = ExpectedTime(PARAMETERS).price(situation(ActiveLoads(TTL_MS), [(8, 0, 0, 0)] * 3))
    assert terms(prices)["uncached_tokens"] == 1.0


def test_blocks_that_running_requests_use_are_charged_less_on_further_ranks() -> None:
    """Six requests on one rank use the prompt's first three blocks: a copy elsewhere would soon serve three of them."""
    loads = ActiveLoads(TTL_MS)
    for number in range(6):
        booked(loads, f"r{number}", A, 1, 2, 3, *([4] if number < 2 else []), 100 + number)
    prices = ExpectedTime(PARAMETERS).price(situation(loads, [(4, 0, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0)]))
    per_block = -(1.0 + UNCACHED_WEIGHT) * 0.02 * BLOCK
    of_six, of_two = 1 - 1 / (1 + 6 / 2), 1 - 1 / (1 + 2 / 2)
    assert [terms(prices, rank)["popular_ms"] for rank in range(3)] == pytest.approx(
        [0.0, (of_six + of_two) * per_block, (3 * of_six + of_two) * per_block]
    )
    assert terms(prices, 2)["prefill_ms"] == 20.0 + 0.02 * 8 * BLOCK  # the request itself waits for all of it


def test_a_rank_without_room_makes_a_request_wait() -> None:
    """Where the blocks in use would exceed the room, the request waits for outputs to end."""
    loads = ActiveLoads(TTL_MS)
    booked(loads, "running", A, *range(101, 121))
    given = situation(loads, capacity_blocks=np.array([24, 240, 0]), expected_output_tokens=32)
    prices = ExpectedTime(PARAMETERS).price(given)
    expected = 20 + 32 / 2 / BLOCK
    excess = expected + 8 - 0.95 * 24
    step_ms = 8.0 + 4e-5 * BLOCK * 24
    assert terms(prices)["kv_room_ms"] == pytest.approx(excess / expected * 32 * step_ms)
    assert [terms(prices, rank)["kv_room_ms"] for rank in (1, 2)] == [0.0, 0.0]


def test_bookings_without_a_forecast_count_by_their_tokens() -> None:
    """Requests that another mode or an older router booked are part of the backlog until their prefill is reported."""
    loads = ActiveLoads(TTL_MS)
    booked(loads, "old", A, 101, forecast=NO_FORECAST)
    policy = ExpectedTime(PARAMETERS)
    assert terms(policy.price(situation(loads)))["backlog_ms"] == pytest.approx(0.02 * 64)
    loads.prefill_complete(BookingId("old", "r", 1), 1000)
    assert terms(policy.price(situation(loads)))["backlog_ms"] == 0.0


def test_blocks_in_other_memory_cost_the_time_to_load_them() -> None:
    """The time is bytes over bandwidth; memory without a bandwidth is not credited."""
    parameters = replace(PARAMETERS, kv_bytes_per_token=1e6, host_gb_per_s=20.0, disk_gb_per_s=4.0, pool_gb_per_s=10.0)
    held = [(2, 2, 0, 0), (2, 0, 2, 0), (2, 0, 0, 2)]
    prices = ExpectedTime(parameters).price(situation(ActiveLoads(TTL_MS), held, (0, 2, 0)))
    assert prices.cached_blocks.tolist() == [4.0, 6.0, 2.0]
    per_block = BLOCK * 1e6 / 1e6  # in ms, at 1 GB/s
    assert prices.terms[NAMES.index("load_ms")].tolist() == pytest.approx(
        [2 * per_block / 20.0, 2 * per_block / 4.0 + 2 * per_block / 10.0, 0.0]
    )


def test_blocks_that_a_running_request_uses_are_not_loaded_again() -> None:
    """They are on the device, though the index has them in host memory."""
    loads = ActiveLoads(TTL_MS)
    booked(loads, "running", A, 1, 2, 3)
    parameters = replace(PARAMETERS, kv_bytes_per_token=1e6, host_gb_per_s=1.0)
    prices = ExpectedTime(parameters).price(situation(loads, [(0, 4, 0, 0), (0, 4, 0, 0), (0, 0, 0, 0)]))
    assert prices.terms[NAMES.index("load_ms")].tolist() == [BLOCK, 4.0 * BLOCK, 0.0]


def test_matching_labels_are_worth_the_time_of_their_blocks() -> None:
    """Of two equal ranks the one whose labels match is the cheaper one."""
    given = situation(ActiveLoads(TTL_MS), labelled=np.array([0.0, 1.5, 0.0]))
    costs = ExpectedTime(PARAMETERS).price(given).costs.tolist()
    assert costs[0] - costs[1] == pytest.approx(1.5 * BLOCK * 0.02)
    assert costs[0] == costs[2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_kernel_and_numpy_return_the_same_bits(seed: int) -> None:
    """For random loads, both fill in the same terms and find the same cheapest candidates."""
    rng = np.random.default_rng(seed)
    n, n_rows = int(rng.integers(1, 9)), 16
    table = rng.integers(0, 5000, (4, n_rows))
    times = rng.integers(0, 3000, (8, n_rows)) * rng.integers(0, 2, (8, n_rows))
    shared = rng.integers(0, 9, n_rows)
    some, n_runs = bool(rng.integers(0, 2)), int(rng.integers(0, 4))
    runs = np.column_stack([np.sort(rng.integers(0, 9, n_runs)), rng.random(n_runs)])
    given = (
        table,
        times,
        rng.integers(0, n_rows, n),
        shared,
        rng.random(n) * 8 if some else np.empty(0),
        rng.random(n) if some else np.empty(0),
        rng.integers(0, 2, n) * 4000 if rng.integers(0, 2) else np.empty(0, dtype=np.int64),
        130,
        8,
        16,
        np.array([2000.0, 20.0, 0.02, 8.0, 6e-4, 300.0, 1.0, 0.15, 0.01, 0.95, *runs.ravel()]),
    )
    mine, theirs = np.empty((len(NAMES) + 1, n)), np.empty((len(NAMES) + 1, n))
    assert price_times_in_numpy(*given, mine) == price_times(*given, theirs)
    assert mine.tobytes() == theirs.tobytes()


def observed(n_tokens: int, took_ms: float, rank: RankId = A, load_us: int = 0) -> PrefillObserved:
    return PrefillObserved(rank, "m", n_tokens, took_ms, Forecast(load_us=load_us))


def block_size_of(_: str) -> int:
    return BLOCK


@pytest.mark.parametrize("true", [Line(16.0, 0.018), Line(300.0, 0.4), Line(5.0, 0.002)], ids=str)
def test_the_line_follows_the_engines(true: Line) -> None:
    """After some hundred noisy prompts, with some that waited for something else, it is right or a little slow."""
    rng = random.Random(5)
    fit = LineFit(PREFILL_DEFAULT, (0.0, 16_384.0))
    for _ in range(800):
        n_tokens = int(10 ** rng.uniform(1.5, 4.5))
        noise = rng.choice((0.8, 0.9, 1.0, 1.1, 1.2)) * (30.0 if rng.random() < 0.02 else 1.0)
        fit.add(n_tokens, true.at(n_tokens) * noise)
    for n_tokens in (100, 2000, 20_000):
        assert 0.9 < fit.line.at(n_tokens) / true.at(n_tokens) < 1.3


def test_prompts_of_one_length_say_nothing_about_others_but_their_speed() -> None:
    """The line passes through them, and its shape stays that of the default."""
    fit = LineFit(PREFILL_DEFAULT, (0.0, 16_384.0))
    for _ in range(500):
        fit.add(1000, 5.0 * PREFILL_DEFAULT.at(1000))
    assert fit.line.at(1000) == pytest.approx(5.0 * PREFILL_DEFAULT.at(1000), rel=0.05)
    assert fit.line.at(10_000) == pytest.approx(5.0 * PREFILL_DEFAULT.at(10_000), rel=0.3)


def test_prompts_that_are_computed_together_show_the_same_line() -> None:
    """An engine with steps of many prompts is as fast as their sum says, whatever the first one's share of it seems.

    The first of four prompts is complete when nearly all are, as its step has parts of the others.
    """
    rng = random.Random(5)
    policy, true = ExpectedTime(PARAMETERS), Line(16.0, 0.02)
    for _ in range(400):
        lengths = [int(10 ** rng.uniform(2.0, 4.3)) for _ in range(4)]
        total = sum(true.at(n_tokens) for n_tokens in lengths)
        times = [0.85 * total, 0.15 * total, 0.0, 0.0]
        policy.observe(
            [
                PrefillObserved(A, "m", n_tokens, took_ms, Forecast(), continues=number > 0)
                for number, (n_tokens, took_ms) in enumerate(zip(lengths, times, strict=True))
            ],
            block_size_of,
        )
    found = policy.timings.of("m").prefill
    for n_tokens in (200, 2000, 20_000):
        assert found.at(n_tokens) == pytest.approx(true.at(n_tokens), rel=0.1)


def test_a_slow_rank_is_slow_in_its_backlog_only() -> None:
    """Its forecasts are longer, while its price without a backlog is that of the others: its cache stays in use."""
    policy = ExpectedTime(PARAMETERS)
    for _ in range(300):
        policy.observe([observed(2000, 60.0, A), observed(2000, 180.0, B)], block_size_of)
    given = situation(ActiveLoads(TTL_MS))
    prices = policy.price(given)
    assert prices.costs[0] == prices.costs[1]
    slow, fast = (policy.forecast(given, prices, index).prefill_us for index in (1, 0))
    assert slow / fast == pytest.approx(3.0, rel=0.2)


def test_the_time_to_load_blocks_does_not_change_the_line() -> None:
    """What a prompt's blocks took to load is not taken for time of computing."""
    policy = ExpectedTime(PARAMETERS)
    policy.observe([observed(1000, 40.0 + 500.0, load_us=500_000)] * 300, block_size_of)
    assert policy.timings.of("m").prefill.at(1000) == pytest.approx(40.0, rel=0.05)


def test_steps_and_lengths_of_outputs_are_learnt_from_reports() -> None:
    """A client that reports output shows both; one that only ends its requests shows their product."""
    timings = Timings(PREFILL, DECODE)
    for _ in range(1000):
        timings.observe([OutputObserved(A, "m", 10, 9.5 * BLOCK * 20.0, 1000, ended=True)], block_size_of)
    assert timings.of("m").output_tokens == pytest.approx(9.5 * BLOCK, rel=0.05)
    assert timings.of("m").decode.at(1000 * BLOCK) == pytest.approx(20.0, rel=0.1)
    mixed = Timings(PREFILL, DECODE)
    for _ in range(1000):  # half of the time went to the prompts of others
        mixed.observe(
            [OutputObserved(A, "m", 10, 9.5 * BLOCK * 40.0, 1000, ended=True, prefills_ms=9.5 * BLOCK * 20.0)],
            block_size_of,
        )
    assert mixed.of("m").decode.at(1000 * BLOCK) == pytest.approx(20.0, rel=0.1)
    silent = Timings(PREFILL, DECODE)
    for _ in range(1000):
        silent.observe([OutputObserved(A, "m", 0, 4000.0, 1000, ended=True)], block_size_of)
    learnt = silent.of("m")
    assert learnt.output_tokens * learnt.decode.at(1000 * BLOCK) == pytest.approx(4000.0, rel=0.05)


def test_silent_clients_do_not_keep_a_rank_busy() -> None:
    """With a client that never reports, bookings end when their forecasts say so, and load stays bounded."""
    policy, loads = ExpectedTime(PARAMETERS), ActiveLoads(TTL_MS, observe=True)
    in_flight, backlogs = [], []
    for number in range(1500):
        now_ms = 1000 + 100 * number
        loads.advance(now_ms)
        assert loads.observations is not None
        policy.observe(list(loads.observations), block_size_of)
        loads.observations.clear()
        given = situation(loads, now_ms=float(now_ms), rows=loads.rows_of(RANKS[:1]), ranks=RANKS[:1])
        given = given._replace(held=lambda *_: np.zeros(1), sequence=sequence_of(number + 10_000), n_tokens=1500)
        prices = policy.price(given)
        forecast = policy.forecast(given, prices, 0)
        booking = Booking(A, "m", 1500, given.sequence, 0, 94, forecast=forecast)
        loads.add(BookingId(str(number), "r", number), booking, now_ms)
        in_flight.append(loads.load(A).requests)
        backlogs.append(terms(prices)["backlog_ms"])
    check(loads)
    # A prompt takes 50 ms, and an output of 300 tokens 2.4 s, at 10 requests per second.
    assert max(in_flight[-100:]) < 40
    assert max(backlogs[-100:]) == 0.0
    assert max(in_flight) < 350


def test_bookings_of_clients_that_report_are_given_more_time() -> None:
    """A long output is not taken for a request that ended, as long as requests of clients that report do end."""
    policy = ExpectedTime(PARAMETERS)
    given = situation(ActiveLoads(TTL_MS), n_tokens=1000)
    prices = policy.price(given)
    patient = policy.forecast(given, prices, 0)
    policy.observe([Unreported(A, ended=False), Unreported(A, ended=True)] * 500, block_size_of)
    impatient = policy.forecast(given, prices, 0)
    assert patient.prefill_us == impatient.prefill_us
    assert impatient.prefilled_within_ms == math.ceil(impatient.prefill_us / 1000 - 0.5)
    assert patient.prefilled_within_ms == pytest.approx(4 * impatient.prefilled_within_ms, rel=0.05)
    assert patient.over_within_ms > 4 * impatient.over_within_ms


def test_the_policy_is_found_by_name_with_parameters() -> None:
    """A wrong name of a policy or a parameter is refused, with those that there are."""
    policy = find_policy("expected-time", {"decode_weight": 0.003})
    assert isinstance(policy, ExpectedTime)
    assert policy.parameters.decode_weight == 0.003
    assert "expected-time" in policy_names()
    with pytest.raises(SettingsError, match=r"there is no policy 'no-such'; there are .*expected-time"):
        find_policy("no-such")
    with pytest.raises(SettingsError, match=r"no parameter 'weight'; it has .*decode_weight"):
        find_policy("expected-time", {"weight": 1.0})
    with pytest.raises(SettingsError, match="decode_weight of policy expected-time is -1"):
        find_policy("expected-time", {"decode_weight": -1.0})

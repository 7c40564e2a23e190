"""The cost of a rank, which ranks are eligible, and how often each one is chosen."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, EngineHash, RankId, Tier, WorkerId
from streams.core.index.interface import PrefixScores
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.routing.cost import TIER_WEIGHTS, RankTerms, TermColumns
from streams.core.routing.decision import Chooser, Decision
from streams.core.routing.eligibility import WorkerFilter, eligible_ranks, refusals
from streams.core.routing.request import Matches, PromptBlocks, RoutePolicy, RoutingRequest
from streams.core.routing.selection import RoundRobin, RouterMode, select_by_cost, select_random
from streams.core.workers import DP_SIZE_MAX, Role, Worker, WorkerState
from streams.errors import InvalidRequest
from tests.helpers.folded_index import FoldedIndex
from tests.helpers.plain_prices import price_terms
from tests.helpers.routing import routing_request

SEED = 20_240_607
BLOCK_SIZE = 16


def rank(worker_id: int, dp_rank: int = 0) -> RankId:
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


def terms(**changes: Any) -> RankTerms:
    return columns_of(**changes).row(0)


def columns_of(**changes: Any) -> TermColumns:
    """The terms of one candidate."""
    known: dict[str, Any] = {
        "request_blocks": 10,
        "overlap_blocks": 0,
        "effective_cached_blocks": 0.0,
        "active_prefill_tokens": 0,
        "decode_blocks": 0,
        "block_size": BLOCK_SIZE,
        "overlap_score_weight": 1.0,
        **changes,
    }
    columns = {"overlap_blocks", "effective_cached_blocks", "active_prefill_tokens", "decode_blocks"}
    given: dict[str, Any] = {name: np.array([value]) if name in columns else value for name, value in known.items()}
    overlap = given.pop("overlap_blocks")
    return TermColumns([rank(1)], overlap, given["effective_cached_blocks"], price_terms(**given))


@pytest.mark.parametrize(
    ("overlap", "decode", "cost"), [(2, 10, 18.0), (5, 5, 10.0), (8, 9, 11.0)], ids=["18", "10", "11"]
)
def test_the_costs_of_the_documented_example(overlap: int, decode: int, cost: float) -> None:
    """Ranks are priced by ten prefill blocks, their overlap and their decode load."""
    found = terms(overlap_blocks=overlap, effective_cached_blocks=float(overlap), decode_blocks=decode)
    assert found.cost == cost


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({}, 10.0),
        ({"active_prefill_tokens": 40}, 12.5),
        ({"active_prefill_tokens": 40, "decode_blocks": 7, "overlap_score_weight": 2.0}, 32.0),
        ({"overlap_score_weight": 0.0, "decode_blocks": 7, "active_prefill_tokens": 999}, 7.0),
        ({"effective_cached_blocks": 9.25}, 0.75),
        ({"effective_cached_blocks": 10.0}, 0.0),
        ({"effective_cached_blocks": 12.0, "active_prefill_tokens": 16}, 1.0),
        ({"request_blocks": 0}, 0.0),
    ],
)
def test_a_cost_is_weighted_prefill_and_decode(changes: dict[str, Any], cost: float) -> None:
    """A cost is the weight times own and active prefill in blocks, never below 0, plus decode blocks."""
    assert terms(**changes).cost == pytest.approx(cost)


def test_columns_and_rows_have_the_same_terms() -> None:
    """Each term that a mode may choose by has the same value in its column as in the candidate's row."""
    n_cached, active_tokens, decode = np.array([0.0, 4.0]), np.array([40, 0]), np.array([7, 9])
    found = TermColumns(
        [rank(1), rank(2)],
        np.array([0, 4]),
        n_cached,
        price_terms(10, n_cached, active_tokens, decode, BLOCK_SIZE, 1.0),
    )
    assert found.active_prefill_blocks.tolist() == [2.5, 0.0]
    rows = [found.row(index) for index in range(len(found))]
    for term in ("own_prefill_blocks", "active_prefill_blocks", "decode_blocks", "cost"):
        assert getattr(found, term).tolist() == [getattr(row, term) for row in rows]


class Spread:
    """A generator that returns n evenly spread floats, in order."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._next = 0

    def random(self) -> float:
        self._next += 1
        return (self._next - 0.5) / self._n


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("costs", [[18.0, 10.0, 11.0], [0.0, 1.0], [3.0, 3.0, 4.0, 100.0]])
def test_a_temperature_samples_softmax(temperature: float, costs: list[float]) -> None:
    """Evenly spread draws choose each rank as often as the softmax predicts, to 1 %, and random draws nearly so."""
    span = max(costs) - min(costs)
    weights = [math.exp(-cost / (span * temperature)) for cost in costs]
    theory = [weight / sum(weights) for weight in weights]
    n_draws = 4000
    for rng, tolerance in ((Spread(n_draws), 0.001), (random.Random(SEED), 0.03)):
        counts = Counter(select_by_cost(costs, temperature, rng) for _ in range(n_draws))
        for index, share in enumerate(theory):
            assert counts[index] / n_draws == pytest.approx(share, abs=tolerance), f"seed {SEED}"


@pytest.mark.parametrize("temperature", [0.0, 0.5, 10.0, math.inf])
def test_equal_costs_are_chosen_uniformly(temperature: float) -> None:
    """Ranks of equal cost are equally likely at any temperature."""
    counts = Counter(select_by_cost([7.0] * 4, temperature, rng) for rng in [Spread(400)] for _ in range(400))
    assert counts == {0: 100, 1: 100, 2: 100, 3: 100}


def test_without_temperature_the_cheapest_wins_and_ties_are_uniform() -> None:
    """At temperature 0 only the exact minima are chosen, all of them equally often."""
    spread = Spread(300)
    counts = Counter(select_by_cost([5.0, 2.0, 9.0, 2.0, 2.0], 0.0, spread) for _ in range(300))
    assert counts == {1: 100, 3: 100, 4: 100}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
@pytest.mark.parametrize("costs", [[2.0, 1.0, 3.0], [0.2, 0.1, 0.3], [1e300, 1.0, 1e300], [2e-320, 1e-320, 3e-320]])
def test_a_temperature_near_zero_takes_the_cheapest(temperature: float, costs: list[float]) -> None:
    """However small cost differences and temperature are, nothing is divided by zero."""
    assert {select_by_cost(costs, temperature, rng) for rng in [Spread(50)] for _ in range(50)} == {1}


def test_an_infinite_temperature_ignores_cost() -> None:
    """At an infinite temperature every rank is equally likely."""
    spread = Spread(300)
    counts = Counter(select_by_cost([0.0, 5.0, 100.0], math.inf, spread) for _ in range(300))
    assert counts == {0: 100, 1: 100, 2: 100}


class Fixed:
    def __init__(self, value: float) -> None:
        self._value = value

    def random(self) -> float:
        return self._value


@pytest.mark.parametrize("draw", [0.0, 0.5, math.nextafter(1.0, 0.0)])
@settings(max_examples=50, deadline=None)
@given(
    costs=st.lists(st.floats(0, 1e12), min_size=1, max_size=8),
    temperature=st.one_of(st.just(0.0), st.floats(0, 1e6)),
)
def test_every_draw_chooses_one_of_the_candidates(draw: float, costs: list[float], temperature: float) -> None:
    """Draws at both ends of the generator's range choose a candidate too."""
    assert select_by_cost(costs, temperature, Fixed(draw)) in range(len(costs))
    assert select_random(len(costs), Fixed(draw)) in range(len(costs))


def test_round_robin_takes_turns_over_whoever_is_there() -> None:
    """Every candidate gets its turn, also when the number of candidates changes."""
    turns = RoundRobin()
    assert [turns.select(3) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [turns.select(2) for _ in range(4)] == [1, 0, 1, 0]
    assert turns.select(1) == 0


def test_random_is_uniform() -> None:
    """Evenly spread draws choose every candidate equally often."""
    spread = Spread(300)
    assert Counter(select_random(3, spread) for _ in range(300)) == {0: 100, 1: 100, 2: 100}


RANKS = [rank(1), rank(2), rank(3)]
#: The documented example: overlap 2, 5 and 8 of ten blocks, and decode blocks of 10, 5 and 9 including the request's.
OVERLAP = PrefixScores(dict(zip(RANKS, (2, 5, 8), strict=True)))
SEQUENCE = b""


def example_loads() -> ActiveLoads:
    loads = ActiveLoads(60_000)
    for each, blocks in zip(RANKS, (10, 5, 9), strict=True):
        carried = Booking(each, "m", 0, pack_hashes(range(100, 100 + blocks)), 0, blocks)
        loads.add(BookingId(str(each), "router", 1), carried, 0)
    return loads


def choose(chooser: Chooser, policy: RoutePolicy, scores: PrefixScores = OVERLAP) -> Any:
    request = routing_request(policy, RANKS, scores, sequence=SEQUENCE, request_blocks=10, block_size=BLOCK_SIZE)
    return chooser.choose(request, example_loads())


def test_the_documented_example_is_decided_for_the_second_rank() -> None:
    """The costs are 18, 10 and 11, and the terms of all ranks come in the candidates' order."""
    decision = choose(Chooser(random.Random(SEED)), RoutePolicy())
    assert [each.cost for each in decision.candidates] == [18.0, 10.0, 11.0]
    assert [each.rank for each in decision.candidates] == RANKS
    assert decision.chosen == decision.candidates[1]
    assert (decision.chosen.scores, decision.chosen.decode_blocks) == (5, 5)


def test_a_weight_of_nothing_balances_load_only() -> None:
    """With weight 0 the rank with the fewest decode blocks wins, whatever ranks hold."""
    policy = RoutePolicy(overlap_score_weight=0.0)
    assert choose(Chooser(random.Random(SEED)), policy).chosen.rank == rank(2)
    assert not policy.reads_index


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        (RoutePolicy(), True),
        (RoutePolicy(overlap_score_weight=0.1), True),
        (RoutePolicy(mode=RouterMode.RANDOM), False),
        (RoutePolicy(mode=RouterMode.ROUND_ROBIN), False),
    ],
)
def test_only_a_policy_that_overlap_can_change_reads_the_index(policy: RoutePolicy, reads: bool) -> None:
    """Other policies decide without scores."""
    assert policy.reads_index is reads


def test_modes_choose_in_their_own_way() -> None:
    """Round robin takes turns and random is uniform, and both return the terms of every rank."""
    chooser = Chooser(Spread(300))
    robin = RoutePolicy(mode=RouterMode.ROUND_ROBIN)
    assert [choose(chooser, robin).chosen.rank for _ in range(4)] == [*RANKS, RANKS[0]]
    chooser = Chooser(Spread(300))
    policy = RoutePolicy(mode=RouterMode.RANDOM)
    counts = Counter(choose(chooser, policy).chosen.rank for _ in range(300))
    assert counts == dict.fromkeys(RANKS, 100)


def test_a_temperature_reaches_the_choice() -> None:
    """At a high temperature the most expensive rank is chosen too."""
    chooser = Chooser(Spread(200))
    counts = Counter(choose(chooser, RoutePolicy(temperature=1.0)).chosen.rank for _ in range(200))
    assert counts.keys() == set(RANKS)
    assert counts[RANKS[1]] > counts[RANKS[2]] > counts[RANKS[0]]


def test_a_choice_changes_no_load_and_no_score() -> None:
    """A choice books nothing, so that the same draws make the same choice again."""
    loads = example_loads()
    before = {each: (load.requests, load.decode_blocks) for each, load in loads.ranks().items()}
    for mode in RouterMode:
        policy, sequence = RoutePolicy(mode=mode, name="expected-time"), pack_hashes([7, 8])
        request = routing_request(policy, RANKS, OVERLAP, sequence=sequence, request_blocks=10, block_size=BLOCK_SIZE)
        Chooser(random.Random(SEED)).choose(request, loads)
    assert {each: (load.requests, load.decode_blocks) for each, load in loads.ranks().items()} == before


@pytest.mark.parametrize(
    ("weights", "effective"),
    [(TIER_WEIGHTS, 2 + 0.75 + 0.25), ((1.0, 1.0, 1.0, 1.0), 5.0), ((1.0, 0.0, 0.0, 0.0), 2.0)],
)
def test_blocks_off_the_device_are_worth_less(weights: tuple[float, ...], effective: float) -> None:
    """Blocks on host, disk and external memory count with the weights that the policy gives their tiers."""
    index = FoldedIndex()
    local = np.arange(1, 6, dtype=np.uint64)
    named = local + np.uint64(1000)
    index.store(rank(1), Tier.DEVICE, None, named[:2], local[:2])
    for last, tier in enumerate((Tier.HOST, Tier.DISK, Tier.EXTERNAL), 2):
        index.store(rank(1), tier, EngineHash(1000 + last), named[last : last + 1], local[last : last + 1])
    decision = choose(Chooser(random.Random(SEED)), RoutePolicy(tier_weights=weights), index.find_matches(local))
    found = decision.candidates[0]
    assert (found.scores, found.effective_cached_blocks) == (5, effective)
    assert found.own_prefill_blocks == 10 - effective


@pytest.mark.parametrize(
    ("n_tokens", "cached", "prefill"), [(160, 0.0, 160), (160, 5.0, 80), (155, 9.25, 7), (100, 10.0, 0), (0, 0.0, 0)]
)
def test_a_booking_charges_what_the_rank_must_compute(n_tokens: int, cached: float, prefill: int) -> None:
    """A booking charges the tokens that are not cached, never fewer than 0, and all of the request's blocks."""
    columns = columns_of(overlap_blocks=7, effective_cached_blocks=cached)
    prompt = PromptBlocks(pack_hashes([1, 2, 3]), n_tokens, 10, 16, "m", 9)
    request = RoutingRequest(RoutePolicy(), prompt, Matches([rank(1)]))
    booked = Decision(request, columns, 0).booking()
    assert booked == Booking(rank(1), "m", prefill, pack_hashes([1, 2, 3]), 7, 10, 9)


def worker(worker_id: int, **changes: Any) -> Worker:
    return replace(Worker(WorkerId(worker_id), "http://w", "m", BLOCK_SIZE), **changes)


FLEET = {
    each.worker_id: each
    for each in (
        worker(4, dp_size=2, taints=("spot", "h100")),
        worker(1),
        worker(2, role=Role.PREFILL),
        worker(3, role=Role.DECODE, taints=("spot",)),
        worker(5, state=WorkerState.CORDONED),
        worker(6, model="other"),
    )
}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [(1, 0), (2, 0), (3, 0), (4, 0), (4, 1)]),
        ({"model": "other"}, [(6, 0)]),
        ({"model": "nobody's"}, []),
        ({"worker_id": 4}, [(4, 0), (4, 1)]),
        ({"worker_id": 4, "dp_rank": 1}, [(4, 1)]),
        ({"worker_id": 4, "dp_rank": 2}, []),
        ({"worker_id": 5}, []),
        ({"worker_id": 6}, []),
        ({"dp_rank": 1}, [(4, 1)]),
        ({"allowed": frozenset({1, 4, 5, 99})}, [(1, 0), (4, 0), (4, 1)]),
        ({"allowed": frozenset()}, []),
        ({"excluded": frozenset({1, 2, 3})}, [(4, 0), (4, 1)]),
        ({"allowed": frozenset({1, 2}), "excluded": frozenset({1})}, [(2, 0)]),
        ({"phase": Role.PREFILL}, [(1, 0), (2, 0), (4, 0), (4, 1)]),
        ({"phase": Role.DECODE}, [(1, 0), (3, 0), (4, 0), (4, 1)]),
        ({"required_taints": frozenset({"spot"})}, [(3, 0), (4, 0), (4, 1)]),
        ({"required_taints": frozenset({"spot", "h100"})}, [(4, 0), (4, 1)]),
        ({"required_taints": frozenset({"spot", "none"})}, []),
    ],
)
def test_filters_leave_the_ranks_that_may_serve(wanted: dict[str, Any], found: list[tuple[int, int]]) -> None:
    """Each filter leaves the ranks that pass it, in order of worker and rank."""
    asked = WorkerFilter(**({"model": "m"} | wanted))
    assert eligible_ranks(FLEET, asked) == [rank(*each) for each in found]
    n_ranks = sum(each.dp_size for each in FLEET.values())
    assert sum(refusals(FLEET.values(), asked, frozenset()).values()) == n_ranks - len(found)


@pytest.mark.parametrize(
    ("lora_name", "found"),
    [(None, [1, 2, 3]), ("", [1, 2, 3]), ("a", [1, 3]), ("b", [1, 3]), ("c", [3])],
)
def test_an_adapter_leaves_the_workers_that_list_it_and_those_that_list_none(
    lora_name: str | None, found: list[int]
) -> None:
    """An empty list serves the model itself only; without a list, a worker may serve any adapter."""
    fleet = (worker(1, lora_names=("a", "b")), worker(2, lora_names=()), worker(3))
    asked = WorkerFilter("m", lora_name=lora_name)
    passing = eligible_ranks({each.worker_id: each for each in fleet}, asked)
    assert [each.worker_id for each in passing] == found
    missing = len(fleet) - len(found)
    assert refusals(fleet, asked, frozenset()) == ({"lora_missing": missing} if missing else {})


@pytest.mark.parametrize(
    ("wanted", "silent", "counts"),
    [
        ({}, [], {"other_model": 1, "cordoned": 1}),
        ({"model": "nobody's"}, [], {"other_model": 7}),
        ({}, [(1, 0), (4, 1), (5, 0), (9, 0)], {"other_model": 1, "cordoned": 1, "silent": 2}),
        ({"worker_id": WorkerId(4)}, [(1, 0)], {"other_model": 1, "cordoned": 1, "other_worker": 3}),
        ({"dp_rank": 1}, [(4, 1)], {"other_model": 1, "cordoned": 1, "other_dp_rank": 4, "silent": 1}),
        ({"allowed": frozenset({4}), "excluded": frozenset({4, 1})}, [], {"not_allowed": 3, "excluded": 2}),
        ({"phase": Role.PREFILL}, [], {"other_role": 1}),
        ({"required_taints": frozenset({"h100"}), "phase": Role.DECODE}, [], {"other_role": 1, "taints_missing": 2}),
    ],
)
def test_ranks_that_do_not_pass_are_counted_by_the_first_filter(
    wanted: dict[str, Any], silent: list[tuple[int, int]], counts: dict[str, int]
) -> None:
    """Each refused rank is counted once, by the first filter in their order; silence comes last."""
    asked = WorkerFilter(**({"model": "m"} | wanted))
    found = refusals(FLEET.values(), asked, frozenset(rank(*each) for each in silent))
    assert found == {**({"other_model": 1, "cordoned": 1} if asked.model == "m" else {}), **counts}


@given(
    workers=st.lists(
        st.builds(
            worker,
            st.integers(0, 3),
            model=st.sampled_from("mn"),
            dp_size=st.integers(1, 2),
            role=st.sampled_from(Role),
            state=st.sampled_from(WorkerState),
            taints=st.sampled_from([(), ("a",), ("a", "b")]),
        ),
        unique_by=lambda each: each.worker_id,
    ),
    wanted=st.builds(
        WorkerFilter,
        model=st.sampled_from("mn"),
        worker_id=st.none() | st.integers(0, 3),
        dp_rank=st.none() | st.integers(0, 2),
        allowed=st.none() | st.frozensets(st.integers(0, 3)),
        excluded=st.frozensets(st.integers(0, 3)),
        phase=st.none() | st.sampled_from(Role),
        required_taints=st.sampled_from([frozenset(), frozenset("a"), frozenset("ab")]),
    ),
)
def test_a_rank_either_passes_or_is_counted(workers: list[Worker], wanted: WorkerFilter) -> None:
    """Every rank is either listed as eligible or counted as refused."""
    for each in workers:
        passing = eligible_ranks({each.worker_id: each}, wanted)
        refused = refusals([each], wanted, frozenset())
        assert len(passing) + sum(refused.values()) == each.dp_size


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"block_size": 1}, True),
        ({"block_size": 0}, False),
        ({"dp_size": 0}, False),
        ({"dp_size": DP_SIZE_MAX}, True),
        ({"dp_size": DP_SIZE_MAX + 1}, False),
        ({"model": ""}, False),
    ],
)
def test_a_worker_has_blocks_ranks_and_a_model(changes: dict[str, Any], fits: bool) -> None:
    """A worker without a valid block size, number of ranks or model is refused."""
    if fits:
        worker(1, **changes)
    else:
        with pytest.raises(InvalidRequest):
            worker(1, **changes)

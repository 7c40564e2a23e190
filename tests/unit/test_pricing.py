"""The kernel of prices against the formula in Python, and breaking ties against a comparison of every cost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes, sequence_hashes, unpack_hashes
from streams.core.ids import DpRank, Float64Array, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import Candidates
from streams.core.index.tree_fold import TreeRunFold
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.routing import pricing
from streams.core.routing.candidate_columns import ColumnsCache
from streams.core.routing.kernels.price import price_ranks
from streams.core.routing.pricing import NO_PREFERENCE, HeldBlocks, price
from streams.core.routing.request import RoutePolicy
from streams.core.routing.selection import select_by_cost, select_lowest
from tests.helpers.plain_prices import price_in_numpy
from tests.helpers.reference import chain_hashes
from tests.helpers.routing import routing_request
from tests.helpers.run_records import fold_runs, runs_of

WEIGHTS = st.sampled_from([0.0, 0.1, 1.0, 2.5])


def rank(worker_id: int) -> RankId:
    return RankId(WorkerId(worker_id), DpRank(0))


def loads_of(rng: random.Random, n_ranks: int) -> tuple[ActiveLoads, dict[RankId, set[int]]]:
    """Loads of a few bookings whose chains share beginnings, and the blocks that each rank uses."""
    loads, blocks = ActiveLoads(1000), dict[RankId, set[int]]()
    for number in range(rng.randint(0, 3 * n_ranks)):
        each = rank(rng.randrange(n_ranks))
        chain = chain_of(rng)
        loads.add(BookingId(str(number), "r", 1), Booking(each, "m", rng.randrange(500), chain, 0, 9), 0)
        blocks.setdefault(each, set()).update(unpack_hashes(chain).tolist())
    return loads, blocks


def chain_of(rng: random.Random) -> bytes:
    shared, own = rng.randrange(5), rng.randrange(4)
    return pack_hashes(chain_hashes([*range(1, shared + 1), *(100 * rng.randint(1, 3) + n for n in range(own))]))


@settings(max_examples=100, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32),
    n_ranks=st.sampled_from([1, 3, 64, 130]),
    weight=WEIGHTS,
    more_credit=st.sampled_from([0.0, 1.55]),
    request_weight=st.sampled_from([0.0, 278.0]),
    recent_weight=st.sampled_from([0.0, 0.15]),
    tracked=st.booleans(),
    preferring=st.booleans(),
)
def test_the_kernel_gives_the_bits_of_the_formula(
    seed: int,
    n_ranks: int,
    weight: float,
    more_credit: float,
    request_weight: float,
    recent_weight: float,
    tracked: bool,
    preferring: bool,
) -> None:
    """For any loads, shared blocks and overlaps the kernel returns the formula's bits, and decode blocks are those of
    sets."""
    rng = random.Random(seed)
    loads, blocks = loads_of(rng, n_ranks)
    ranks = [rank(number) for number in rng.sample(range(n_ranks + 1), rng.randint(1, n_ranks))]  # one has no load
    rows, sequence = loads.rows_of(ranks), chain_of(rng)
    effective = np.array([rng.choice([0.0, rng.uniform(0.0, 12.0)]) for _ in ranks])
    request_blocks, full_blocks, block_size = rng.randrange(12), len(sequence) // 8, rng.choice([1, 3, 16, 64])
    shared = loads.shared_blocks(sequence)
    preference = np.array([rng.randrange(3) for _ in ranks]) if preferring else NO_PREFERENCE

    def by(priced: Any) -> tuple[int, Float64Array]:
        terms, tables = np.empty((5, len(ranks))), (loads.table, loads.times.table)
        sizes = (request_blocks, full_blocks, block_size)
        weights = (weight, more_credit, request_weight, recent_weight)
        return priced(*tables, rows, shared, effective, preference, *sizes, *weights, tracked, terms), terms

    (lowest, by_kernel), (lowest_in_numpy, by_formula) = by(price_ranks), by(price_in_numpy)
    assert lowest == lowest_in_numpy
    assert by_kernel.tobytes() == by_formula.tobytes()
    if tracked:
        asked = set(unpack_hashes(sequence).tolist())
        assert by_kernel[2].tolist() == [len(blocks.get(each, set()) | asked) for each in ranks]
    else:
        assert not by_kernel[2].any()


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=70), seed=st.integers(0, 2**32))
def test_the_first_of_the_cheapest_is_chosen_as_by_all_costs(costs: list[float], seed: int) -> None:
    """A single minimum is chosen without a draw; of several, a draw chooses the same one as from all costs."""
    first, n_lowest = costs.index(min(costs)), costs.count(min(costs))
    ours, theirs = random.Random(seed), random.Random(seed)
    assert select_lowest(np.array(costs), first, n_lowest, ours) == select_by_cost(costs, 0.0, theirs)
    assert ours.random() == theirs.random()


@pytest.mark.parametrize("by", [price_ranks, price_in_numpy], ids=["kernel", "plain"])
def test_prices_say_which_is_the_cheapest_and_how_many_are(by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented example has one cheapest rank, and two with another rank of the same cost."""
    monkeypatch.setattr(pricing, "price_ranks", by)
    loads = ActiveLoads(1000)
    ranks = [rank(number) for number in range(1, 5)]
    for each, n_blocks in zip(ranks, (10, 5, 9, 5), strict=True):
        carried = Booking(each, "m", 0, pack_hashes(range(100, 100 + n_blocks)), 0, n_blocks)
        loads.add(BookingId(str(each), "r", 1), carried, 0)
    overlap = np.array([2, 5, 8, 5])
    for n, n_lowest in ((3, 1), (4, 2)):
        request = routing_request(RoutePolicy(), ranks[:n], request_blocks=10, block_size=16)
        held = HeldBlocks(overlap[:n], overlap[:n].astype(np.float64), overlap[:n].astype(np.float64))
        priced = price(request, ColumnsCache().of(ranks[:n], loads), loads, held)
        assert (priced.first, priced.n_lowest) == (1, n_lowest)
        assert priced.columns.cost.tolist() == [18.0, 10.0, 11.0, 10.0][:n]


@pytest.mark.parametrize("by", [price_ranks, price_in_numpy], ids=["kernel", "plain"])
@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, 1.0, 4.0]), st.integers(0, 2)), min_size=1, max_size=70),
    seed=st.integers(0, 2**32),
)
def test_a_preference_decides_exact_ties_and_nothing_else(by: Any, rows: list[tuple[float, int]], seed: int) -> None:
    """Of the candidates with the lowest cost, those with the greatest preference remain, and one of them is drawn."""
    costs, preference = [cost for cost, _ in rows], np.array([preferred for _, preferred in rows])
    best = [at for at, row in enumerate(rows) if row == (min(costs), max(p for c, p in rows if c == min(costs)))]
    # Without loads, a candidate's cost is the part of the request that it does not hold.
    held, none = 4.0 - np.array(costs), np.zeros(len(rows), dtype=np.int64)
    terms = np.empty((5, len(rows)))
    sizes, weights = (4, 0, 16), (1.0, 0.0, 0.0, 0.15)
    loads, shared = ActiveLoads(1000), np.zeros(64, np.int64)
    found = by(loads.table, loads.times.table, none, shared, held, preference, *sizes, *weights, False, terms)
    assert terms[-1].tolist() == costs
    assert (found >> 32, found & 0xFFFFFFFF) == (best[0], len(best))
    ours, theirs = random.Random(seed), random.Random(seed)
    drawn = best[0] if len(best) == 1 else best[int(theirs.random() * len(best))]
    assert select_lowest(terms[-1], best[0], len(best), ours, preference) == drawn
    assert ours.random() == theirs.random()


@settings(max_examples=60, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32), tiered=st.booleans())
def test_an_answers_columns_are_its_mappings(seed: int, tiered: bool) -> None:
    """Columns equal the mappings, also for candidates that hold nothing and ranks that are not candidates."""
    rng = random.Random(seed)
    fold, local = TreeRunFold(), np.arange(1, 9, dtype=np.uint64)
    chain = sequence_hashes(local).tolist()
    for number in rng.sample(range(80), rng.randint(0, 80)):
        n_device, n_all = sorted((rng.randrange(9), rng.randrange(9)))
        n_device = n_device if tiered else n_all
        fold_runs(fold, runs_of(rank(number), local[:n_device]))
        parent = SequenceHash(chain[n_device - 1]) if n_device else None
        fold_runs(fold, runs_of(rank(number), local[n_device:n_all], Tier.HOST, parent))
    answer, weights = fold.find_matches(local), (1.0, 0.75, 0.25, 0.0)
    candidates = [rank(number) for number in rng.sample(range(90), rng.randint(1, 90))]
    overlap, effective = answer.columns(Candidates(candidates), weights)
    assert overlap.tolist() == [answer.scores.get(each, 0) for each in candidates]
    assert effective.tolist() == [answer.effective_blocks(each, weights) for each in candidates]

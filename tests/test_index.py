"""Every index answers like a brute-force count of its facts: one suite, run over each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cost import TIER_WEIGHTS
from streams.core.ids import DpRank, HashArray, RankId, SequenceHash, Tier, WorkerId
from streams.core.index import OverlapScores, PlainPrefixIndex, PrefixIndex
from tests.reference import Member, chain_hashes, overlap_of

FACTORIES: list[Callable[[], PrefixIndex]] = [PlainPrefixIndex]

every_index = pytest.mark.parametrize("make_index", FACTORIES, ids=lambda factory: factory.__name__)

A, B, C = (RankId(WorkerId(worker), DpRank(rank)) for worker, rank in ((1, 0), (1, 1), (2, 0)))
LOCAL = [101, 102, 103, 104, 105, 106]
CHAIN = chain_hashes(LOCAL)


def u64(*values: int) -> HashArray:
    return np.array(values, dtype=np.uint64)


def hold(index: PrefixIndex, rank: RankId, *positions: int, tier: Tier = Tier.DEVICE) -> None:
    """Hold these positions of CHAIN, which follow each other."""
    parent = SequenceHash(CHAIN[positions[0] - 1]) if positions[0] else None
    index.store(rank, tier, parent, u64(*(CHAIN[position] for position in positions)))


def drop(index: PrefixIndex, rank: RankId, *positions: int, tier: Tier = Tier.DEVICE) -> None:
    index.remove(rank, tier, u64(*(CHAIN[position] for position in positions)))


def ask(index: PrefixIndex, n_blocks: int = len(LOCAL)) -> OverlapScores:
    return index.find_matches(u64(*LOCAL[:n_blocks]))


def members(index: PrefixIndex) -> set[Member]:
    return {(rank, tier, int(block)) for rank, tier, block in index.members()}


def tiers_of(facts: set[Member], rank: RankId, blocks: list[int]) -> tuple[int, ...]:
    """How many of these blocks a rank holds with their fastest copy in each tier."""
    counts = [0] * len(Tier)
    for block in blocks:
        counts[min(tier for holder, tier, held in facts if holder == rank and held == block)] += 1
    return tuple(counts)


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.__name__)
def index(request: pytest.FixtureRequest) -> Iterator[PrefixIndex]:
    """An index; what it says it holds and how much must agree after every test."""
    made: PrefixIndex = request.param()
    yield made
    assert len(made) == len(list(made.members())) == len(members(made))


@every_index
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_histories_are_answered_as_by_brute_force(make_index: Callable[[], PrefixIndex], seed: int) -> None:
    """Stores, removals and departures in any order: scores, tiers and facts are those counted one by one."""
    rng = random.Random(seed)
    index, facts = make_index(), set[Member]()
    ranks = [RankId(WorkerId(worker), DpRank(rank)) for worker in range(rng.choice((1, 3, 40))) for rank in (0, 1)]
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 12))] for _ in range(6)]
    for _ in range(rng.randint(1, 80)):
        rank, tier, local = rng.choice(ranks), rng.choice(list(Tier)[: rng.randint(1, 4)]), rng.choice(prompts)
        chain = chain_hashes(local)
        first = rng.randrange(len(chain))
        blocks = chain[first : rng.randint(first, len(chain))]
        action = rng.random()
        if action < 0.6:
            parent = SequenceHash(chain[first - 1]) if first else None
            already = index.store(rank, tier, parent, u64(*blocks))
            assert already == [block for block in blocks if (rank, tier, block) in facts]
            facts |= {(rank, tier, block) for block in blocks}
        elif action < 0.95:
            rng.shuffle(blocks)
            index.remove(rank, tier, u64(*blocks))
            facts -= {(rank, tier, block) for block in blocks}
        else:
            index.remove_rank(rank)
            facts = {fact for fact in facts if fact[0] != rank}
        assert members(index) == facts
        assert len(index) == len(facts)
        asked = rng.choice(prompts)
        answer = index.find_matches(u64(*asked))
        assert answer.scores == overlap_of(facts, asked)
        for holder, score in answer.scores.items():
            tiers = tiers_of(facts, holder, chain_hashes(asked)[:score])
            assert answer.by_tier.get(holder, (score, 0, 0, 0)) == tiers
            weighted = sum(weight * count for weight, count in zip(TIER_WEIGHTS, tiers, strict=True))
            assert answer.effective_blocks(holder, TIER_WEIGHTS) == pytest.approx(weighted)


def test_an_empty_index_and_an_empty_request_match_nothing(index: PrefixIndex) -> None:
    """No ranks, no best one, a score of nothing."""
    assert ask(index) == OverlapScores({})
    hold(index, A, 0, 1)
    answer = index.find_matches(u64())
    assert (answer.scores, answer.max_score, answer.best_worker) == ({}, 0, None)


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 4, 6])
def test_a_rank_scores_what_is_asked_and_held(index: PrefixIndex, n_blocks: int) -> None:
    """No more than the request has blocks, no more than the rank holds."""
    hold(index, A, 0, 1, 2)
    assert ask(index, n_blocks).scores == {A: min(n_blocks, 3)}


@pytest.mark.parametrize("hole", range(5))
def test_a_hole_ends_the_match_of_its_rank_only(index: PrefixIndex, hole: int) -> None:
    """Blocks behind it count again as soon as it is filled."""
    for rank in (A, B):
        hold(index, rank, 0, 1, 2, 3, 4)
    drop(index, A, hole)
    assert ask(index).scores == ({B: 5} if hole == 0 else {A: hole, B: 5})
    hold(index, A, hole)
    assert ask(index).scores == {A: 5, B: 5}


def test_divergence_ends_the_match(index: PrefixIndex) -> None:
    """A rank with another block there, and all behind it, matches up to it."""
    hold(index, A, 0, 1)
    other = chain_hashes([103, 104, 105], CHAIN[0])
    index.store(A, Tier.DEVICE, SequenceHash(CHAIN[0]), u64(*other))
    assert ask(index).scores == {A: 2}
    assert index.find_matches(u64(101, 103, 104, 105)).scores == {A: 4}


def test_blocks_behind_the_root_match_nobody_without_it(index: PrefixIndex) -> None:
    """Held with no first block they wait for it."""
    hold(index, A, 1, 2)
    assert ask(index).scores == {}
    hold(index, A, 0)
    assert ask(index).scores == {A: 3}


def test_storing_or_removing_twice_changes_nothing(index: PrefixIndex) -> None:
    """Holding a block is a fact, not a number."""
    hold(index, A, 0, 1, 2)
    hold(index, A, 0, 1, 2)
    drop(index, A, 2)
    assert ask(index).scores == {A: 2}
    drop(index, A, 2)
    drop(index, B, 0)
    drop(index, A, 0, tier=Tier.HOST)
    assert ask(index).scores == {A: 2}
    assert len(index) == 2


def test_a_store_tells_what_was_held_before(index: PrefixIndex) -> None:
    """Of this rank and in this tier only."""
    hold(index, B, 0, 1, 2)
    hold(index, A, 0, tier=Tier.HOST)
    hold(index, A, 1)
    assert index.store(A, Tier.DEVICE, None, u64(*CHAIN[:3])) == [CHAIN[1]]
    assert index.store(A, Tier.DEVICE, None, u64(*CHAIN[:3])) == CHAIN[:3]


def test_each_block_counts_in_its_fastest_tier(index: PrefixIndex) -> None:
    """Device before host before disk; what only slower tiers hold keeps the prefix whole."""
    hold(index, A, 0, 1)
    hold(index, A, 1, 2, 3, tier=Tier.HOST)
    hold(index, A, 3, 4, tier=Tier.DISK)
    hold(index, A, 5, tier=Tier.EXTERNAL)
    hold(index, B, 0, 1)
    answer = ask(index)
    assert answer.scores == {A: 6, B: 2}
    assert answer.by_tier == {A: (2, 2, 1, 1)}
    assert answer.effective_blocks(A, (1.0, 0.75, 0.25, 0.0)) == 2 + 1.5 + 0.25
    assert answer.effective_blocks(B, (0.5, 0.75, 0.25, 0.0)) == 1.0
    assert answer.effective_blocks(C, TIER_WEIGHTS) == 0.0


def test_tiers_behind_a_hole_count_for_nothing(index: PrefixIndex) -> None:
    """Only blocks of the match are told by tier."""
    hold(index, A, 0, 1)
    hold(index, A, 3, 4, tier=Tier.HOST)
    answer = ask(index)
    assert (answer.scores, answer.by_tier) == ({A: 2}, {})


def test_a_device_copy_lost_leaves_the_hosts(index: PrefixIndex) -> None:
    """The block is still part of the prefix, in its other tier."""
    hold(index, A, 0, 1, 2)
    hold(index, A, 1, tier=Tier.HOST)
    drop(index, A, 1)
    assert ask(index).by_tier == {A: (2, 1, 0, 0)}
    drop(index, A, 1, tier=Tier.HOST)
    assert ask(index).scores == {A: 1}


def test_a_removed_rank_leaves_nothing_in_any_tier(index: PrefixIndex) -> None:
    """Nor does it take anything from others, and removing it again or a stranger changes nothing."""
    hold(index, A, 0, 1)
    hold(index, A, 2, tier=Tier.HOST)
    hold(index, B, 0)
    index.remove_rank(A)
    index.remove_rank(A)
    index.remove_rank(C)
    assert ask(index).scores == {B: 1}
    assert members(index) == {(B, Tier.DEVICE, CHAIN[0])}


@pytest.mark.parametrize("n_ranks", [1, 2, 63, 64, 65, 130])
def test_a_place_left_by_one_rank_is_taken_clean_by_the_next(index: PrefixIndex, n_ranks: int) -> None:
    """However many come and go, a new rank holds just what it stored."""
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(2 * n_ranks)]
    for rank in ranks[:n_ranks]:
        hold(index, rank, 0, 1, 2)
        hold(index, rank, 3, tier=Tier.HOST)
    for rank in ranks[:n_ranks:2]:
        index.remove_rank(rank)
    for rank in ranks[n_ranks:]:
        hold(index, rank, 0)
    expected = dict.fromkeys(ranks[1:n_ranks:2], 4) | dict.fromkeys(ranks[n_ranks:], 1)
    assert ask(index).scores == expected


def test_the_best_rank_holds_most_and_of_equals_the_smallest() -> None:
    """Worker before rank; with no scores there is none."""
    assert OverlapScores({C: 3, B: 3, A: 2}).best_worker == B
    assert OverlapScores({C: 3, B: 3, A: 2}).max_score == 3
    assert OverlapScores({C: 4, B: 3, A: 3}).best_worker == C
    assert OverlapScores({}).best_worker is None

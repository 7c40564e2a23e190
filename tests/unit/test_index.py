"""What an index of engine events promises, one rule a test, through every store and fold.

The events go the way of the product: a store of runs makes records of them, and a fold answers from the records. The
rules of folds about records are at the end.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streams.core.hashing import hash_seed, local_hashes, sequence_hashes
from streams.core.ids import (
    U32_MAX,
    U64_MASK,
    DpRank,
    EngineHash,
    Epoch,
    HashArray,
    Incarnation,
    RankId,
    Tier,
    WorkerId,
)
from streams.core.index.arenas import TreeLimits
from streams.core.index.interface import PrefixScores
from streams.core.index.kernels import layout
from streams.core.index.run_tree import TRIM_CALLS
from streams.core.index.tree_fold import TreeRunFold
from streams.core.routing.cost import TIER_WEIGHTS
from streams.core.runs import Run
from streams.errors import (
    BlockSizeMismatch,
    IndexFull,
    InvalidEvent,
    InvalidRequest,
    SettingsError,
    TooManyRanks,
)
from tests.helpers.folded_index import FoldedIndex, UnknownParent
from tests.helpers.invariants import check
from tests.helpers.reference import Member
from tests.helpers.run_records import end_runs, fold_runs, runs_of

A, B, C = (RankId(WorkerId(worker), DpRank(rank)) for worker, rank in ((1, 0), (1, 1), (2, 0)))
LOCAL = [101, 102, 103, 104, 105, 106]
#: The engine hashes of these blocks in A, B and C.
NAMES = [1001, 1002, 1003, 1004, 1005, 1006]

#: An engine hash that no block keeps in these tests.
SPARE = EngineHash(999)


def u64(*values: int) -> HashArray:
    return np.array(values, dtype=np.uint64)


def hold(index: FoldedIndex, rank: RankId, *positions: int, tier: Tier = Tier.DEVICE) -> None:
    """Store consecutive positions of LOCAL; missing positions before them stay holes."""
    first = positions[0]
    parent = EngineHash(NAMES[first - 1]) if first else None
    if parent is not None and all(holder != rank or name != parent for holder, _, name in index.members()):
        index.store(rank, tier, None, u64(*range(SPARE - first + 1, SPARE + 1)), u64(*LOCAL[:first]))
        parent = SPARE
    names, local = (u64(*(of[position] for position in positions)) for of in (NAMES, LOCAL))
    index.store(rank, tier, parent, names, local)
    index.remove(rank, tier, u64(*range(SPARE - first + 1, SPARE + 1)))


def drop(index: FoldedIndex, rank: RankId, *positions: int, tier: Tier = Tier.DEVICE) -> int:
    return index.remove(rank, tier, u64(*(NAMES[position] for position in positions)))


def ask(index: FoldedIndex | TreeRunFold, n_blocks: int = len(LOCAL)) -> PrefixScores:
    return index.find_matches(u64(*LOCAL[:n_blocks]))


def members(index: FoldedIndex) -> set[Member]:
    return {(rank, tier, int(name)) for rank, tier, name in index.members()}


@pytest.fixture
def index() -> Iterator[FoldedIndex]:
    """An index; after each test its length, its members and an index that reads its records must agree."""
    made = FoldedIndex()
    yield made
    made.check()
    assert len(made) == len(list(made.members())) == len(members(made))
    copy = made.rebuilt()
    copy.check()
    assert members(copy) == members(made)
    assert copy.blocks() == made.blocks()
    assert ask(copy) == ask(made)


def test_an_empty_index_and_an_empty_request_match_nothing(index: FoldedIndex) -> None:
    """The answer has no ranks, no best worker and a greatest score of 0."""
    assert ask(index) == PrefixScores({})
    hold(index, A, 0, 1)
    answer = index.find_matches(u64())
    assert (answer.scores, answer.max_score, answer.best_worker) == ({}, 0, None)


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 4, 6])
def test_a_score_is_limited_by_the_request_and_by_the_held_blocks(index: FoldedIndex, n_blocks: int) -> None:
    """A rank's score exceeds neither the blocks of the request nor the blocks that it holds."""
    hold(index, A, 0, 1, 2)
    assert ask(index, n_blocks).scores == {A: min(n_blocks, 3)}


@pytest.mark.parametrize("hole", range(5))
def test_a_hole_ends_the_match_of_its_rank_only(index: FoldedIndex, hole: int) -> None:
    """A hole ends the match of its rank, and blocks after it count again as soon as it is filled."""
    for rank in (A, B):
        hold(index, rank, 0, 1, 2, 3, 4)
    drop(index, A, hole)
    assert ask(index).scores == ({B: 5} if hole == 0 else {A: hole, B: 5})
    hold(index, A, hole)
    assert ask(index).scores == {A: 5, B: 5}


def test_divergence_ends_the_match(index: FoldedIndex) -> None:
    """A rank that holds another block at a position matches only the blocks before it."""
    hold(index, A, 0, 1)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(7, 8, 9), u64(103, 104, 105))
    assert ask(index).scores == {A: 2}
    assert index.find_matches(u64(101, 103, 104, 105)).scores == {A: 4}


def test_blocks_without_the_first_one_do_not_match(index: FoldedIndex) -> None:
    """Blocks whose first block is not held match only once it is stored."""
    hold(index, A, 1, 2)
    assert ask(index).scores == {}
    hold(index, A, 0)
    assert ask(index).scores == {A: 3}


def test_storing_or_removing_twice_changes_nothing(index: FoldedIndex) -> None:
    """An index does not count copies, and a removal returns how many names were not in use."""
    hold(index, A, 0, 1, 2)
    hold(index, A, 0, 1, 2)
    assert drop(index, A, 2) == 0
    assert ask(index).scores == {A: 2}
    assert drop(index, A, 2) == 1
    assert drop(index, B, 0) == 1
    assert drop(index, A, 0, 1, tier=Tier.HOST) == 2
    assert index.remove(A, Tier.DEVICE, u64()) == 0
    assert ask(index).scores == {A: 2}
    assert len(index) == 2


def test_a_repeated_name_in_a_removal_is_unknown_the_second_time(index: FoldedIndex) -> None:
    """The first occurrence removes the block, so the second one counts as unknown."""
    hold(index, A, 0, 1, 2)
    assert drop(index, A, 1, 1, 0) == 1
    assert members(index) == {(A, Tier.DEVICE, NAMES[2])}


def test_each_block_counts_in_its_fastest_tier(index: FoldedIndex) -> None:
    """A block counts in the fastest tier that holds it, and blocks in slower tiers continue the prefix."""
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


def test_tiers_of_blocks_after_a_hole_are_ignored(index: FoldedIndex) -> None:
    """Counts by tier contain only blocks of the match."""
    hold(index, A, 0, 1)
    hold(index, A, 3, 4, tier=Tier.HOST)
    answer = ask(index)
    assert (answer.scores, answer.by_tier) == ({A: 2}, {})


def test_a_block_without_its_device_copy_counts_in_the_host_tier(index: FoldedIndex) -> None:
    """A block that is removed from one tier stays part of the prefix if another tier holds it."""
    hold(index, A, 0, 1, 2)
    hold(index, A, 1, tier=Tier.HOST)
    drop(index, A, 1)
    assert ask(index).by_tier == {A: (2, 1, 0, 0)}
    drop(index, A, 1, tier=Tier.HOST)
    assert ask(index).scores == {A: 1}


def test_a_removed_rank_leaves_nothing_in_any_tier(index: FoldedIndex) -> None:
    """Removing a rank does not affect other ranks, and removing it again or an unknown rank changes nothing."""
    hold(index, A, 0, 1)
    hold(index, A, 2, tier=Tier.HOST)
    hold(index, B, 0)
    index.remove_rank(A)
    index.remove_rank(A)
    index.remove_rank(C)
    assert ask(index).scores == {B: 1}
    assert members(index) == {(B, Tier.DEVICE, NAMES[0])}


@pytest.mark.parametrize("n_ranks", [1, 2, 63, 64, 65, 130])
def test_a_rank_that_reuses_the_column_of_another_holds_only_its_own_blocks(index: FoldedIndex, n_ranks: int) -> None:
    """After any number of removals, a new rank holds exactly what it stored."""
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


def test_a_name_that_moves_to_another_block_is_lost_by_the_first(index: FoldedIndex) -> None:
    """A name has one block: the later store wins, in its tier only."""
    hold(index, A, 0, 1, 2)
    hold(index, A, 1, tier=Tier.HOST)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(NAMES[1]), u64(107))
    assert ask(index).by_tier == {A: (2, 1, 0, 0)}
    assert index.find_matches(u64(101, 107)).scores == {A: 2}
    assert len(index) == 4


def test_a_block_stored_under_another_name_loses_the_first(index: FoldedIndex) -> None:
    """A block has one name in a rank and tier, so only its new name removes it."""
    hold(index, A, 0, 1)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(77), u64(LOCAL[1]))
    assert drop(index, A, 1) == 1
    assert ask(index).scores == {A: 2}
    assert index.remove(A, Tier.DEVICE, u64(77)) == 0
    assert ask(index).scores == {A: 1}


def test_a_repeated_name_in_a_store_belongs_to_the_last_block(index: FoldedIndex) -> None:
    """Earlier blocks with the same name are not held, so no rank matches them or the blocks after them."""
    index.store(A, Tier.DEVICE, None, u64(7, 7, 8), u64(*LOCAL[:3]))
    assert members(index) == {(A, Tier.DEVICE, 7), (A, Tier.DEVICE, 8)}
    assert ask(index).scores == {}
    index.store(A, Tier.DEVICE, None, u64(9), u64(LOCAL[0]))
    assert ask(index).scores == {A: 3}


def test_ranks_may_use_the_same_name_for_different_blocks(index: FoldedIndex) -> None:
    """A name is meaningful only within its rank."""
    index.store(A, Tier.DEVICE, None, u64(1, 2), u64(101, 102))
    index.store(B, Tier.DEVICE, None, u64(2, 1), u64(101, 102))
    index.store(B, Tier.DEVICE, EngineHash(1), u64(3), u64(103))
    index.store(A, Tier.DEVICE, EngineHash(1), u64(3), u64(109))
    assert ask(index).scores == {A: 2, B: 3}
    assert index.find_matches(u64(101, 109)).scores == {A: 2, B: 1}
    index.remove(A, Tier.DEVICE, u64(1))
    assert ask(index).scores == {B: 3}


def test_a_parent_is_looked_up_in_its_own_tier_first(index: FoldedIndex) -> None:
    """A store looks for its parent in its own tier, then in the others, fastest first."""
    index.store(A, Tier.DEVICE, None, u64(1), u64(101))
    index.store(A, Tier.HOST, None, u64(1), u64(201))
    index.store(A, Tier.HOST, EngineHash(1), u64(2), u64(102))
    index.store(A, Tier.DISK, EngineHash(1), u64(3), u64(102))
    assert index.find_matches(u64(201, 102)).by_tier == {A: (0, 2, 0, 0)}
    assert ask(index).by_tier == {A: (1, 0, 1, 0)}


@pytest.mark.parametrize("n_blocks", [0, 1, 3])
def test_a_store_with_an_unknown_parent_is_refused(index: FoldedIndex, n_blocks: int) -> None:
    """A parent that only another rank holds, or that was removed, is unknown, even for an event without blocks."""
    hold(index, A, 0, 1)
    hold(index, B, 0, 1, 2)
    drop(index, A, 1)
    before = members(index)
    for parent in (NAMES[1], NAMES[2], 5):
        with pytest.raises(UnknownParent) as caught:
            index.store(A, Tier.HOST, EngineHash(parent), u64(*range(n_blocks)), u64(*range(n_blocks)))
        assert (caught.value.rank, caught.value.parent) == (A, parent)
    assert members(index) == before


def test_an_event_without_blocks_changes_nothing(index: FoldedIndex) -> None:
    """A store without blocks, at the root or after a held block, leaves the index unchanged."""
    index.store(A, Tier.DEVICE, None, u64(), u64())
    hold(index, A, 0)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(), u64())
    assert len(index) == 1


FLOATS, SIGNED, SQUARE = (np.ones(2), np.array([1, -2]), np.ones((2, 2), dtype=np.uint64))


def test_the_smallest_and_greatest_ids_and_hashes_are_valid(index: FoldedIndex) -> None:
    """Names and hashes may be 0 and 2^64 - 1, and ranks may have the greatest ids."""
    far = RankId(WorkerId(U64_MASK), DpRank(U32_MAX))
    for rank in (far, RankId(WorkerId(0), DpRank(0))):
        index.store(rank, Tier.DEVICE, None, u64(0, U64_MASK), u64(U64_MASK, 0))
        index.store(rank, Tier.DEVICE, EngineHash(U64_MASK), u64(1), u64(U64_MASK))
    index.store(far, Tier.DEVICE, EngineHash(0), u64(2), u64(0x8000000000000000))
    assert set(index.find_matches(u64(U64_MASK, 0, U64_MASK)).scores.values()) == {3}
    assert index.find_matches(u64(U64_MASK, 0x8000000000000000)).scores[far] == 2


def test_a_clear_empties_all_tiers_of_its_rank_only(index: FoldedIndex) -> None:
    """A clear affects no other rank, and clearing an unknown rank changes nothing."""
    hold(index, A, 0, 1)
    hold(index, A, 2, tier=Tier.HOST)
    hold(index, B, 0, 1)
    index.clear(A)
    index.clear(C)
    assert ask(index).scores == {B: 2}
    assert drop(index, A, 0, 1) == 2
    with pytest.raises(UnknownParent):
        index.store(A, Tier.DEVICE, EngineHash(NAMES[1]), u64(1), u64(1))
    hold(index, A, 0)
    assert ask(index).scores == {A: 1, B: 2}


def test_records_have_holes_and_names_of_two_blocks(index: FoldedIndex) -> None:
    """A chain with holes in each tier, and a name with another block in each tier, survive the fixture's rebuilding."""
    hold(index, A, 0, 1, 2, 3, 4, 5)
    drop(index, A, 0, 1, 3)
    hold(index, A, 3, tier=Tier.DISK)
    index.store(A, Tier.HOST, None, u64(NAMES[4], 0), u64(301, 302))
    index.store(A, Tier.HOST, EngineHash(0), u64(1), u64(303))
    index.remove(A, Tier.HOST, u64(0))
    assert len(index) == 6


def test_a_request_is_hashed_before_it_is_matched(index: FoldedIndex) -> None:
    """A request is hashed with its own block size and seed, and a partial last block is ignored."""
    tokens = list(range(70))
    adapter = hash_seed("my-adapter")
    index.store(A, Tier.DEVICE, None, u64(1, 2, 3, 4), local_hashes(tokens, 16))
    index.store(B, Tier.DEVICE, None, u64(1, 2, 3, 4), local_hashes(tokens, 16, adapter))
    assert index.find_matches(local_hashes(tokens, 16)).scores == {A: 4}
    assert index.find_matches(local_hashes(tokens[:47], 16, adapter)).scores == {B: 2}
    assert index.find_matches(local_hashes(np.array(tokens, dtype=np.uint32), 32)).scores == {}
    assert index.find_matches(local_hashes([], 16)).scores == {}
    for block_size in (0, -1):
        with pytest.raises(BlockSizeMismatch):
            local_hashes(tokens, block_size)


@pytest.mark.parametrize("local", [FLOATS, SIGNED, SQUARE, [101]], ids=str)
def test_a_query_that_is_not_an_array_of_hashes_is_refused(index: FoldedIndex, local: Any) -> None:
    """A query that is not uint64[n] raises InvalidRequest instead of being converted."""
    with pytest.raises(InvalidRequest):
        index.find_matches(local)


def test_the_best_worker_has_the_greatest_score_and_the_smallest_id() -> None:
    """Of ranks with equal scores, the one with the smallest worker id and then the smallest rank is the best."""
    assert PrefixScores({C: 3, B: 3, A: 2}).best_worker == B
    assert PrefixScores({C: 3, B: 3, A: 2}).max_score == 3
    assert PrefixScores({C: 4, B: 3, A: 3}).best_worker == C
    assert PrefixScores({}).best_worker is None


def test_answers_are_equal_when_their_mappings_are() -> None:
    """Answers with equal scores and tiers are equal, and differ from every other kind of object."""
    assert PrefixScores({A: 1}, {A: (0, 1, 0, 0)}) == PrefixScores({A: 1}, {A: (0, 1, 0, 0)})
    assert PrefixScores({A: 1}) != PrefixScores({A: 1}, {A: (0, 1, 0, 0)})
    assert PrefixScores({A: 1}) != {A: 1}


# -- run records in the tree -----------------------------------------------------------------------------


def held_run(**changes: Any) -> Run:
    """The record of the first two blocks of LOCAL in rank A, with some fields changed."""
    rank, tier, first = changes.pop("rank", A), changes.pop("tier", Tier.DEVICE), changes.pop("first", None)
    (run,) = runs_of(A, u64(*LOCAL[:2]))
    key = run.key._replace(rank=rank, tier=tier)
    return replace(run, key=key if first is None else key._replace(first=first), **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": RankId(WorkerId(-1), DpRank(0))},
        {"rank": RankId(WorkerId(U64_MASK + 1), DpRank(0))},
        {"rank": RankId(WorkerId(1), DpRank(-1))},
        {"rank": RankId(WorkerId(1), DpRank(U32_MAX + 1))},
        {"rank": RankId(WorkerId(True), DpRank(0))},
        {"rank": (1, 0)},
        {"rank": 1},
        {"rank": None},
        {"tier": 4},
        {"tier": True},
        {"tier": None},
        {"tier": -1},
        {"first": -1},
        {"first": U64_MASK + 1},
        {"first": LOCAL[1]},
        {"parent": -1},
        {"parent": U64_MASK + 1},
        {"parent": 5},
        {"parent": 1.5},
        {"local": [1, -2]},
        {"local": [1, U64_MASK + 1]},
        {"local": [1.0, 2.5]},
        {"local": []},
        {"local": [1] * 33},
        {"present": 0},
        {"present": 4},
        {"present": -1},
        {"present": None},
        {"epoch": Epoch(Incarnation(-1), 0)},
        {"epoch": Epoch(Incarnation(U64_MASK + 1), 0)},
        {"epoch": Epoch(Incarnation(1), 1 << 63)},
    ],
    ids=str,
)
def test_an_invalid_record_changes_nothing(change: dict[str, Any]) -> None:
    """A record with bad hashes, presence bits, rank, tier or epoch raises InvalidEvent, and no record is folded."""
    fold = TreeRunFold()
    valid = runs_of(B, u64(*LOCAL))
    invalid = held_run(**change)
    with pytest.raises(InvalidEvent):
        fold_runs(fold, [*valid, invalid])
    assert (len(fold), fold.ranks()) == (0, [])
    fold_runs(fold, [*valid, held_run()])
    assert ask(fold).scores == {A: 2, B: len(LOCAL)}
    check(fold)


def test_a_tree_returns_memory_and_grows_again() -> None:
    """After clears, memory is returned in steps, and the same records fill the tree again without taking more."""
    fold = TreeRunFold()
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(4)]
    chain = np.arange(1, 60_001, dtype=np.uint64)

    def fill(generation: int) -> int:
        for number, rank in enumerate(ranks):
            fold_runs(fold, runs_of(rank, chain + np.uint64(number << 32), epoch=Epoch(Incarnation(1), generation)))
        return fold.memory_bytes()

    full = fill(0)
    for rank in ranks:
        fold.enter_epoch(rank, Epoch(Incarnation(1), 1))
    for generation in range(2, 202):
        fold.enter_epoch(ranks[0], Epoch(Incarnation(1), generation))
    assert len(fold) == 0
    assert fold.memory_bytes() < full / 3
    check(fold)
    assert fill(202) <= 1.1 * full
    assert len(fold) == 4 * len(chain)
    check(fold)


def test_a_tree_returns_memory_after_tombstones_too() -> None:
    """Memory is returned although nothing but records empties the tree, step by step with later records."""
    fold = TreeRunFold()
    runs = runs_of(A, np.arange(1, 200_001, dtype=np.uint64))
    for run in runs:
        fold_runs(fold, [run])
    full = fold.memory_bytes()
    end_runs(fold, runs[1:])
    for _ in range(20 * TRIM_CALLS):
        fold_runs(fold, runs[:1])
    assert len(fold) == len(runs[0].local)
    assert fold.memory_bytes() < full / 2
    check(fold)


def test_a_record_that_does_not_fit_changes_nothing() -> None:
    """A full tree refuses whole records, folds those that fit, and folds the others once there is space."""
    fold = TreeRunFold(limits=TreeLimits(blocks_max=4096))
    small, big = runs_of(A, np.arange(1, 1001, dtype=np.uint64)), runs_of(B, np.arange(10_001, 14_001, dtype=np.uint64))
    fold_runs(fold, small)
    with pytest.raises(IndexFull, match="TreeLimits with a greater blocks_max") as caught:
        fold_runs(fold, big)
    refused = set(caught.value.detail["records"])
    n_folded = sum(len(run.local) for number, run in enumerate(big) if number not in refused)
    assert 0 < len(refused) < len(big)
    assert len(fold) == 1000 + n_folded
    assert fold.find_matches(np.arange(1, 1001, dtype=np.uint64)).scores == {A: 1000}
    check(fold)
    fold.forget_rank(A)
    with pytest.raises(IndexFull) as caught:
        fold_runs(fold, [big[number] for number in sorted(refused)])
    assert len(fold) == n_folded + sum(
        len(big[number].local) for at, number in enumerate(sorted(refused)) if at not in caught.value.detail["records"]
    )
    assert len(fold) > n_folded
    check(fold)


@pytest.mark.parametrize("n_ranks", [63, 64, 65, 256, 257, 1025])
def test_more_ranks_than_a_row_of_coverage_has_columns(n_ranks: int) -> None:
    """Every rank gets its score, however many ranks there are."""
    fold = TreeRunFold()
    local = np.arange(1, 9, dtype=np.uint64)
    expected = {}
    for worker in range(n_ranks):
        rank = RankId(WorkerId(worker), DpRank(0))
        depth = 1 + worker % len(local)
        fold_runs(fold, runs_of(rank, local[:depth]))
        expected[rank] = depth
    assert fold.find_matches(local).scores == expected
    check(fold)


def test_an_answer_stays_as_it_is_when_its_ranks_are_forgotten() -> None:
    """The ranks of an answer are those of the query, although other ranks have their numbers by now."""
    fold = TreeRunFold()
    fold_runs(fold, [*runs_of(A, u64(*LOCAL)), *runs_of(B, u64(*LOCAL[:2]))])
    answer = ask(fold)
    fold.forget_rank(A)
    fold_runs(fold, runs_of(C, u64(*LOCAL[:3])))
    assert answer.scores == {A: len(LOCAL), B: 2}
    assert ask(fold).scores == {B: 2, C: 3}
    del fold
    assert answer.best_worker == A


def test_a_forgotten_rank_leaves_no_holder_behind() -> None:
    """Whichever rank has the number of a forgotten one next holds only what its own records say."""
    fold = TreeRunFold()
    for rank in (A, C, A):
        fold_runs(fold, runs_of(B, u64(*LOCAL[:1])))
        fold_runs(fold, runs_of(rank, u64(*LOCAL)))
        assert ask(fold).scores == {rank: len(LOCAL), B: 1}
        fold.forget_rank(rank)
        assert ask(fold).scores == {B: 1}
        end_runs(fold, runs_of(rank, u64(*LOCAL)))  # its tombstones may come late
        assert fold.ranks() == [B]
        check(fold)


@pytest.mark.parametrize("query", [FLOATS, SIGNED, SQUARE, [101], (101,), None, 5], ids=str)
def test_a_fold_refuses_an_invalid_query(query: Any) -> None:
    """Anything but uint64[n] raises InvalidRequest."""
    with pytest.raises(InvalidRequest):
        TreeRunFold().find_matches(query)


@pytest.mark.parametrize("limits", [None, 1024, TreeLimits], ids=str)
def test_a_tree_refuses_invalid_limits(limits: Any) -> None:
    """An invalid argument raises SettingsError, whose message begins with the argument's name."""
    with pytest.raises(SettingsError, match=r"^limits is "):
        TreeRunFold(limits=limits)


@pytest.mark.parametrize(
    "given",
    [
        {"blocks_max": 1e6},
        {"blocks_max": "4096"},
        {"blocks_max": 1023},
        {"blocks_max": True},
        {"columns_max": 64.0},
        {"columns_max": 65},
        {"columns_max": 0},
        {"columns_max": -64},
        {"columns_max": 1 << 20},
        {"columns_max": None},
        {"blocks_max": 0},
        {"blocks_max": -4096},
        {"blocks_max": (1 << 28) + 1},
        {"blocks_max": None},
        {"blocks_max": float("nan")},
        {"blocks_max": np.int64(4096)},
        {"huge_pages": 1},
        {"huge_pages": None},
    ],
    ids=str,
)
def test_limits_are_whole_numbers_in_range(given: dict[str, Any]) -> None:
    """Invalid limits, such as the float 1e6, raise SettingsError, whose message begins with the argument's name."""
    with pytest.raises(SettingsError, match=f"^{next(iter(given))} is "):
        TreeLimits(**given)


def refuse(*_: object, **__: object) -> None:
    """The system refuses address space."""
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_refused_address_space_raises_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses address space, SettingsError names TreeLimits as a remedy."""
    monkeypatch.setattr("streams.core.index.arenas.mmap.mmap", refuse)
    with pytest.raises(SettingsError, match="TreeLimits"):
        TreeRunFold()


def test_a_refused_rank_is_accepted_after_another_one_was_removed() -> None:
    """A rank that was refused keeps no number, so it can use the column of a removed rank later."""
    fold = TreeRunFold(limits=TreeLimits(columns_max=64))
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(66)]
    local = u64(1, 2, 3)
    for rank in ranks[:64]:
        fold_runs(fold, runs_of(rank, local))
    for rank in ranks[64:]:
        with pytest.raises(IndexFull, match="columns_max"):
            fold_runs(fold, runs_of(rank, local))
        with pytest.raises(TooManyRanks, match="hold 64 ranks") as caught:
            fold.holder_index(rank, Tier.DEVICE)
        assert caught.value.detail == {"columns_max": 64}
    fold.forget_rank(ranks[0])
    fold_runs(fold, runs_of(ranks[65], local))
    with pytest.raises(IndexFull):
        fold_runs(fold, runs_of(ranks[64], local))
    with pytest.raises(TooManyRanks):
        fold.holder_index(ranks[1], Tier.HOST)
    fold_runs(fold, runs_of(ranks[1], u64(9)))  # a rank that has a column keeps it
    assert fold.find_matches(local).scores == dict.fromkeys([*ranks[1:64], ranks[65]], len(local))
    check(fold)


def test_existing_ranks_continue_if_the_system_refuses_more_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rank that needs more columns is refused, with the reason, and can be added later."""
    fold = TreeRunFold(limits=TreeLimits(blocks_max=4096))
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(1025)]
    for rank in ranks[:-1]:
        fold_runs(fold, runs_of(rank, u64(1)))
    with monkeypatch.context() as patched:
        patched.setattr("streams.core.index.arenas.mmap.mmap", refuse)
        with pytest.raises(IndexFull):
            fold_runs(fold, runs_of(ranks[-1], u64(1)))
        with pytest.raises(TooManyRanks, match="the system refused"):
            fold.holder_index(ranks[-1], Tier.DEVICE)
    assert fold.find_matches(u64(1)).scores == dict.fromkeys(ranks[:-1], 1)
    fold_runs(fold, runs_of(ranks[-1], u64(1)))
    assert len(fold) == len(ranks)
    check(fold)


BLOCKS = 1 << 16


@pytest.mark.parametrize("run_blocks", [1, 16, 32])
def test_most_of_the_limit_is_usable(run_blocks: int) -> None:
    """Prompts of one block use more than a fifth of the limit, not a seventeenth, and longer ones more than half."""
    fold = TreeRunFold(limits=TreeLimits(blocks_max=BLOCKS))
    n_prompts = BLOCKS // run_blocks
    prompts = np.arange(1, BLOCKS + 1, dtype=np.uint64).reshape(n_prompts, run_blocks)
    with pytest.raises(IndexFull) as caught:
        fold_runs(fold, [run for prompt in prompts for run in runs_of(A, prompt)])
    assert len(fold) == (n_prompts - len(caught.value.detail["records"])) * run_blocks
    assert len(fold) > (BLOCKS // 2 if run_blocks > 1 else BLOCKS // 5)
    check(fold)


def test_freed_blocks_are_reused() -> None:
    """Freed blocks are reused even if blocks after them are still held."""
    fold = TreeRunFold(limits=TreeLimits(blocks_max=BLOCKS))
    local = np.arange(1, BLOCKS + 1, dtype=np.uint64)
    half = runs_of(A, local[: BLOCKS // 2])
    fold_runs(fold, half)
    rest = runs_of(B, local[BLOCKS // 2 : -4 * layout.SLACK_MAX])
    fold_runs(fold, rest)
    quarter = runs_of(A, local[: BLOCKS // 4 - 1])
    end_runs(fold, half)
    for _ in range(3):
        fold_runs(fold, quarter)
        assert len(fold) == sum(len(run.local) for run in (*rest, *quarter))
        end_runs(fold, quarter)
    check(fold)


def test_blocks_with_one_sequence_hash_do_not_break_the_tree() -> None:
    """Two different blocks with one hash, as only a forger makes them, leave all other blocks and all counts right."""
    fold = TreeRunFold()
    chain = sequence_hashes(u64(*LOCAL))
    honest = [*runs_of(A, u64(*LOCAL)), *runs_of(B, u64(*LOCAL[:3]))]
    forged = [*runs_of(C, chain[2:3]), *runs_of(A, chain[1:2])]  # at the root, with hashes of later blocks
    after = runs_of(C, u64(7, 8), parent=chain[2].item())
    for first, second in ((honest, forged), (forged, honest)):
        fold_runs(fold, first)
        fold_runs(fold, second)
        fold_runs(fold, after)
        check(fold)
        assert ask(fold).scores[B] == 3
        assert fold.find_matches(chain[2:3]).scores == {C: 1}
        end_runs(fold, after)
        end_runs(fold, second)
        check(fold)
        end_runs(fold, first)
        check(fold)
        for rank in (A, B, C):
            fold.forget_rank(rank)
        assert len(fold) == 0
        check(fold)

"""What every index promises, one rule a test: one suite, run over each of them."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator
from typing import Any, assert_never

import numpy as np
import pytest

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from streams.core.hashing import hash_seed, local_hashes
from streams.core.ids import U32_MAX, U64_MASK, DpRank, EngineHash, HashArray, RankId, Tier, WorkerId
from streams.core.index.arenas import TreeLimits
from streams.core.index.interface import OverlapScores, PrefixIndex
from streams.core.index.kernels import layout
from streams.core.index.plain_index import PlainPrefixIndex
from streams.core.index.run_tree import EventColumns, RunTreeIndex
from streams.core.routing.cost import TIER_WEIGHTS
from streams.errors import (
    BlockSizeMismatch,
    IndexFull,
    InvalidEvent,
    InvalidRequest,
    SettingsError,
    TooManyRanks,
    UnknownParent,
)
from tests.helpers.reference import Member

FACTORIES: list[Callable[[], PrefixIndex]] = [PlainPrefixIndex, RunTreeIndex]

A, B, C = (RankId(WorkerId(worker), DpRank(rank)) for worker, rank in ((1, 0), (1, 1), (2, 0)))
LOCAL = [101, 102, 103, 104, 105, 106]
#: The names of these blocks in A, B and C.
NAMES = [1001, 1002, 1003, 1004, 1005, 1006]

#: A name that no block keeps in these tests.
SPARE = EngineHash(999)


def u64(*values: int) -> HashArray:
    return np.array(values, dtype=np.uint64)


def hold(index: PrefixIndex, rank: RankId, *positions: int, tier: Tier = Tier.DEVICE) -> None:
    """Store consecutive positions of LOCAL; missing positions before them stay holes."""
    first = positions[0]
    parent = EngineHash(NAMES[first - 1]) if first else None
    if parent is not None and all(holder != rank or name != parent for holder, _, name in index.members()):
        index.store(rank, tier, None, u64(*range(SPARE - first + 1, SPARE + 1)), u64(*LOCAL[:first]))
        parent = SPARE
    index.store(rank, tier, parent, *(u64(*(of[each] for each in positions)) for of in (NAMES, LOCAL)))
    index.remove(rank, tier, u64(*range(SPARE - first + 1, SPARE + 1)))


def drop(index: PrefixIndex, rank: RankId, *positions: int, tier: Tier = Tier.DEVICE) -> int:
    return index.remove(rank, tier, u64(*(NAMES[position] for position in positions)))


def ask(index: PrefixIndex, n_blocks: int = len(LOCAL)) -> OverlapScores:
    return index.find_matches(u64(*LOCAL[:n_blocks]))


def members(index: PrefixIndex) -> set[Member]:
    return {(rank, tier, int(name)) for rank, tier, name in index.members()}


def apply_event(index: PrefixIndex, rank: RankId, event: KvEvent) -> None:
    """Apply one event of a dump to an index."""
    match event:
        case BlocksStored():
            index.store(rank, event.tier, event.parent, event.engine, event.local)
        case BlocksRemoved():
            index.remove(rank, event.tier, event.engine)
        case AllBlocksCleared():
            index.clear(rank)
        case _:
            assert_never(event)


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.__name__)
def index(request: pytest.FixtureRequest) -> Iterator[PrefixIndex]:
    """An index; after each test its length, its members and an index rebuilt from its dump must agree."""
    made: PrefixIndex = request.param()
    yield made
    made.check()
    assert len(made) == len(list(made.members())) == len(members(made))
    copy: PrefixIndex = request.param()
    for rank, event in made.dump():
        apply_event(copy, rank, event)
    copy.check()
    assert members(copy) == members(made)
    assert ask(copy) == ask(made)


def test_an_empty_index_and_an_empty_request_match_nothing(index: PrefixIndex) -> None:
    """The answer has no ranks, no best worker and a greatest score of 0."""
    assert ask(index) == OverlapScores({})
    hold(index, A, 0, 1)
    answer = index.find_matches(u64())
    assert (answer.scores, answer.max_score, answer.best_worker) == ({}, 0, None)


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 4, 6])
def test_a_score_is_limited_by_the_request_and_by_the_held_blocks(index: PrefixIndex, n_blocks: int) -> None:
    """A rank's score exceeds neither the blocks of the request nor the blocks that it holds."""
    hold(index, A, 0, 1, 2)
    assert ask(index, n_blocks).scores == {A: min(n_blocks, 3)}


@pytest.mark.parametrize("hole", range(5))
def test_a_hole_ends_the_match_of_its_rank_only(index: PrefixIndex, hole: int) -> None:
    """A hole ends the match of its rank, and blocks after it count again as soon as it is filled."""
    for rank in (A, B):
        hold(index, rank, 0, 1, 2, 3, 4)
    drop(index, A, hole)
    assert ask(index).scores == ({B: 5} if hole == 0 else {A: hole, B: 5})
    hold(index, A, hole)
    assert ask(index).scores == {A: 5, B: 5}


def test_divergence_ends_the_match(index: PrefixIndex) -> None:
    """A rank that holds another block at a position matches only the blocks before it."""
    hold(index, A, 0, 1)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(7, 8, 9), u64(103, 104, 105))
    assert ask(index).scores == {A: 2}
    assert index.find_matches(u64(101, 103, 104, 105)).scores == {A: 4}


def test_blocks_without_the_first_one_do_not_match(index: PrefixIndex) -> None:
    """Blocks whose first block is not held match only once it is stored."""
    hold(index, A, 1, 2)
    assert ask(index).scores == {}
    hold(index, A, 0)
    assert ask(index).scores == {A: 3}


def test_storing_or_removing_twice_changes_nothing(index: PrefixIndex) -> None:
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


def test_a_repeated_name_in_a_removal_is_unknown_the_second_time(index: PrefixIndex) -> None:
    """The first occurrence removes the block, so the second one counts as unknown."""
    hold(index, A, 0, 1, 2)
    assert drop(index, A, 1, 1, 0) == 1
    assert members(index) == {(A, Tier.DEVICE, NAMES[2])}


def test_each_block_counts_in_its_fastest_tier(index: PrefixIndex) -> None:
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


def test_tiers_of_blocks_after_a_hole_are_ignored(index: PrefixIndex) -> None:
    """Counts by tier contain only blocks of the match."""
    hold(index, A, 0, 1)
    hold(index, A, 3, 4, tier=Tier.HOST)
    answer = ask(index)
    assert (answer.scores, answer.by_tier) == ({A: 2}, {})


def test_a_block_without_its_device_copy_counts_in_the_host_tier(index: PrefixIndex) -> None:
    """A block that is removed from one tier stays part of the prefix if another tier holds it."""
    hold(index, A, 0, 1, 2)
    hold(index, A, 1, tier=Tier.HOST)
    drop(index, A, 1)
    assert ask(index).by_tier == {A: (2, 1, 0, 0)}
    drop(index, A, 1, tier=Tier.HOST)
    assert ask(index).scores == {A: 1}


def test_a_removed_rank_leaves_nothing_in_any_tier(index: PrefixIndex) -> None:
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
def test_a_rank_that_reuses_the_column_of_another_holds_only_its_own_blocks(index: PrefixIndex, n_ranks: int) -> None:
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


def test_a_name_that_moves_to_another_block_is_lost_by_the_first(index: PrefixIndex) -> None:
    """A name has one block: the later store wins, in its tier only."""
    hold(index, A, 0, 1, 2)
    hold(index, A, 1, tier=Tier.HOST)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(NAMES[1]), u64(107))
    assert ask(index).by_tier == {A: (2, 1, 0, 0)}
    assert index.find_matches(u64(101, 107)).scores == {A: 2}
    assert len(index) == 4


def test_a_block_stored_under_another_name_loses_the_first(index: PrefixIndex) -> None:
    """A block has one name in a rank and tier, so only its new name removes it."""
    hold(index, A, 0, 1)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(77), u64(LOCAL[1]))
    assert drop(index, A, 1) == 1
    assert ask(index).scores == {A: 2}
    assert index.remove(A, Tier.DEVICE, u64(77)) == 0
    assert ask(index).scores == {A: 1}


def test_a_repeated_name_in_a_store_belongs_to_the_last_block(index: PrefixIndex) -> None:
    """Earlier blocks with the same name are not held, so no rank matches them or the blocks after them."""
    index.store(A, Tier.DEVICE, None, u64(7, 7, 8), u64(*LOCAL[:3]))
    assert members(index) == {(A, Tier.DEVICE, 7), (A, Tier.DEVICE, 8)}
    assert ask(index).scores == {}
    index.store(A, Tier.DEVICE, None, u64(9), u64(LOCAL[0]))
    assert ask(index).scores == {A: 3}


def test_ranks_may_use_the_same_name_for_different_blocks(index: PrefixIndex) -> None:
    """A name is meaningful only within its rank."""
    index.store(A, Tier.DEVICE, None, u64(1, 2), u64(101, 102))
    index.store(B, Tier.DEVICE, None, u64(2, 1), u64(101, 102))
    index.store(B, Tier.DEVICE, EngineHash(1), u64(3), u64(103))
    index.store(A, Tier.DEVICE, EngineHash(1), u64(3), u64(109))
    assert ask(index).scores == {A: 2, B: 3}
    assert index.find_matches(u64(101, 109)).scores == {A: 2, B: 1}
    index.remove(A, Tier.DEVICE, u64(1))
    assert ask(index).scores == {B: 3}


def test_a_parent_is_looked_up_in_its_own_tier_first(index: PrefixIndex) -> None:
    """A store looks for its parent in its own tier, then in the others, fastest first."""
    index.store(A, Tier.DEVICE, None, u64(1), u64(101))
    index.store(A, Tier.HOST, None, u64(1), u64(201))
    index.store(A, Tier.HOST, EngineHash(1), u64(2), u64(102))
    index.store(A, Tier.DISK, EngineHash(1), u64(3), u64(102))
    assert index.find_matches(u64(201, 102)).by_tier == {A: (0, 2, 0, 0)}
    assert ask(index).by_tier == {A: (1, 0, 1, 0)}


@pytest.mark.parametrize("n_blocks", [0, 1, 3])
def test_a_store_with_an_unknown_parent_is_refused(index: PrefixIndex, n_blocks: int) -> None:
    """A parent that only another rank holds, or that was removed, is unknown, even for an event without blocks."""
    hold(index, A, 0, 1)
    hold(index, B, 0, 1, 2)
    drop(index, A, 1)
    before = members(index)
    for parent in (NAMES[1], NAMES[2], 5):
        with pytest.raises(UnknownParent) as caught:
            index.store(A, Tier.HOST, EngineHash(parent), u64(*range(n_blocks)), u64(*range(n_blocks)))
        assert (caught.value.detail["rank"], caught.value.detail["parent"]) == (A, parent)
    assert members(index) == before


def test_an_event_without_blocks_changes_nothing(index: PrefixIndex) -> None:
    """A store without blocks, at the root or after a held block, leaves the index unchanged."""
    index.store(A, Tier.DEVICE, None, u64(), u64())
    hold(index, A, 0)
    index.store(A, Tier.DEVICE, EngineHash(NAMES[0]), u64(), u64())
    assert len(index) == 1


FLOATS, SIGNED, SQUARE = (np.ones(2), np.array([1, -2]), np.ones((2, 2), dtype=np.uint64))


@pytest.mark.parametrize(
    "change",
    [
        {"names": u64(1)},
        {"local": u64(1, 2, 3)},
        {"names": FLOATS},
        {"local": SIGNED},
        {"names": SQUARE, "local": SQUARE},
        {"names": [1, 2]},
        {"parent": -1},
        {"parent": U64_MASK + 1},
        {"rank": RankId(WorkerId(-1), DpRank(0))},
        {"rank": RankId(WorkerId(U64_MASK + 1), DpRank(0))},
        {"rank": RankId(WorkerId(1), DpRank(-1))},
        {"rank": RankId(WorkerId(1), DpRank(U32_MAX + 1))},
        {"rank": RankId(WorkerId(True), DpRank(0))},
        {"rank": (1, 0)},
        {"rank": 1},
        {"rank": None},
        {"parent": True},
        {"parent": 1.0},
        {"tier": 4},
        {"tier": True},
        {"tier": None},
        {"tier": -1},
    ],
    ids=str,
)
def test_an_invalid_event_changes_nothing(index: PrefixIndex, change: dict[str, Any]) -> None:
    """Stores and removals with bad hashes, ranks or tiers raise InvalidEvent and leave the index unchanged."""
    hold(index, A, 0, 1)
    event: dict[str, Any] = {"rank": A, "tier": Tier.DEVICE, "parent": None, "names": u64(5, 6), "local": u64(7, 8)}
    with pytest.raises(InvalidEvent):
        index.store(**event | change)
    if change.keys() & {"rank", "tier"} or ("names" in change and len(change) + len(change["names"]) > 2):
        event = {name: (event | change)[name] for name in ("rank", "tier", "names")}
        with pytest.raises(InvalidEvent):
            index.remove(**event)
    if "rank" in change:
        for end in (index.clear, index.remove_rank):
            with pytest.raises(InvalidEvent):
                end(change["rank"])
    assert members(index) == {(A, Tier.DEVICE, name) for name in NAMES[:2]}


def test_the_smallest_and_greatest_ids_and_hashes_are_valid(index: PrefixIndex) -> None:
    """Names and hashes may be 0 and 2^64 - 1, and ranks may have the greatest ids."""
    far = RankId(WorkerId(U64_MASK), DpRank(U32_MAX))
    for rank in (far, RankId(WorkerId(0), DpRank(0))):
        index.store(rank, Tier.DEVICE, None, u64(0, U64_MASK), u64(U64_MASK, 0))
        index.store(rank, Tier.DEVICE, EngineHash(U64_MASK), u64(1), u64(U64_MASK))
    index.store(far, Tier.DEVICE, EngineHash(0), u64(2), u64(0x8000000000000000))
    assert set(index.find_matches(u64(U64_MASK, 0, U64_MASK)).scores.values()) == {3}
    assert index.find_matches(u64(U64_MASK, 0x8000000000000000)).scores[far] == 2


def test_a_clear_empties_all_tiers_of_its_rank_only(index: PrefixIndex) -> None:
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


def test_a_dump_works_with_holes_and_with_names_of_two_blocks(index: PrefixIndex) -> None:
    """A chain with holes in each tier, and a name with another block in each tier, survive the fixture's dump."""
    hold(index, A, 0, 1, 2, 3, 4, 5)
    drop(index, A, 0, 1, 3)
    hold(index, A, 3, tier=Tier.DISK)
    index.store(A, Tier.HOST, None, u64(NAMES[4], 0), u64(301, 302))
    index.store(A, Tier.HOST, EngineHash(0), u64(1), u64(303))
    index.remove(A, Tier.HOST, u64(0))
    assert len(index) == 6


def test_a_request_is_hashed_before_it_is_matched(index: PrefixIndex) -> None:
    """A request is hashed with its own block size and seed, and a partial last block is ignored."""
    tokens = list(range(70))
    adapter = hash_seed("my-adapter")
    index.store(A, Tier.DEVICE, None, u64(1, 2, 3, 4), local_hashes(tokens, 16))
    index.store(B, Tier.DEVICE, None, u64(1, 2, 3, 4), local_hashes(tokens, 16, adapter))
    assert index.find_matches_for_request(tokens, 16).scores == {A: 4}
    assert index.find_matches_for_request(tokens[:47], 16, adapter).scores == {B: 2}
    assert index.find_matches_for_request(np.array(tokens, dtype=np.uint32), 32).scores == {}
    assert index.find_matches_for_request([], 16).scores == {}
    for block_size in (0, -1):
        with pytest.raises(BlockSizeMismatch):
            index.find_matches_for_request(tokens, block_size)


@pytest.mark.parametrize("local", [FLOATS, SIGNED, SQUARE, [101]], ids=str)
def test_a_query_that_is_not_an_array_of_hashes_is_refused(index: PrefixIndex, local: Any) -> None:
    """A query that is not uint64[n] raises InvalidRequest instead of being converted."""
    with pytest.raises(InvalidRequest):
        index.find_matches(local)


def test_the_best_worker_has_the_greatest_score_and_the_smallest_id() -> None:
    """Of ranks with equal scores, the one with the smallest worker id and then the smallest rank is the best."""
    assert OverlapScores({C: 3, B: 3, A: 2}).best_worker == B
    assert OverlapScores({C: 3, B: 3, A: 2}).max_score == 3
    assert OverlapScores({C: 4, B: 3, A: 3}).best_worker == C
    assert OverlapScores({}).best_worker is None


def test_answers_are_equal_when_their_mappings_are() -> None:
    """Answers with equal scores and tiers are equal, and differ from every other kind of object."""
    assert OverlapScores({A: 1}, {A: (0, 1, 0, 0)}) == OverlapScores({A: 1}, {A: (0, 1, 0, 0)})
    assert OverlapScores({A: 1}) != OverlapScores({A: 1}, {A: (0, 1, 0, 0)})
    assert OverlapScores({A: 1}) != {A: 1}


def test_a_tree_returns_memory_and_grows_again() -> None:
    """After clears, memory is returned in steps, and the same events fill the tree again without taking more."""
    index = RunTreeIndex()
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(4)]
    chain = np.arange(1, 60_001, dtype=np.uint64)

    def fill() -> int:
        for number, rank in enumerate(ranks):
            own = chain + np.uint64(number << 32)
            index.store(rank, Tier.DEVICE, None, own, own)
        return index.memory_bytes()

    full = fill()
    for rank in ranks:
        index.clear(rank)
    for _ in range(200):
        index.clear(ranks[0])
    assert len(index) == 0
    assert index.memory_bytes() < full / 3
    index.check()
    assert fill() <= 1.1 * full
    assert len(index) == 4 * len(chain)
    index.check()


def test_a_presized_tree_gives_the_same_answers() -> None:
    """Reserving space with blocks_hint changes no answer."""
    index = RunTreeIndex(blocks_hint=100_000)
    names = np.arange(1, 20_001, dtype=np.uint64)
    index.store(A, Tier.DEVICE, None, names, names)
    assert index.find_matches(names).scores == {A: len(names)}
    assert index.remove(A, Tier.DEVICE, names[100:]) == 0
    assert index.find_matches(names).scores == {A: 100}
    index.check()


def test_an_event_that_does_not_fit_changes_nothing() -> None:
    """A full tree refuses the whole event, and still accepts events that fit."""
    index = RunTreeIndex(limits=TreeLimits(blocks_max=4096))
    small = np.arange(1, 1001, dtype=np.uint64)
    big = np.arange(10_001, 14_001, dtype=np.uint64)
    index.store(A, Tier.DEVICE, None, small, small)
    with pytest.raises(IndexFull):
        index.store(B, Tier.DEVICE, None, big, big)
    assert len(index) == len(small)
    assert index.find_matches(small).scores == {A: len(small)}
    assert index.find_matches(big).scores == {}
    index.check()
    index.store(B, Tier.DEVICE, None, big[:500], big[:500])
    assert index.find_matches(big).scores == {B: 500}
    index.check()


@pytest.mark.parametrize("n_ranks", [63, 64, 65, 256, 257, 1025])
def test_more_ranks_than_a_row_of_coverage_has_columns(n_ranks: int) -> None:
    """Every rank gets its score, however many ranks there are, also from a matcher that was created before them."""
    index = RunTreeIndex()
    matcher = index.matcher()
    names = np.arange(1, 9, dtype=np.uint64)
    expected = {}
    for worker in range(n_ranks):
        rank = RankId(WorkerId(worker), DpRank(0))
        depth = 1 + worker % len(names)
        index.store(rank, Tier.DEVICE, None, names[:depth], names[:depth])
        expected[rank] = depth
    assert index.find_matches(names).scores == expected
    found = matcher.match(names)
    ranks, blocks = matcher.ranks[:found].tolist(), matcher.blocks[:found].tolist()
    assert {matcher.rank_ids[rank]: depth for rank, depth in zip(ranks, blocks, strict=True)} == expected
    index.check()


def test_a_lookup_outlives_its_matcher_and_its_tree() -> None:
    """The function of a matcher keeps the memory that it reads and writes alive."""
    index = RunTreeIndex()
    names = np.arange(1, 9, dtype=np.uint64)
    index.store(A, Tier.DEVICE, None, names, names)
    match = index.matcher().match
    del index
    gc.collect()
    for _ in range(100):
        np.zeros(1 << 16)
        assert match(names) == 1


def columns(holders: list[int], names: HashArray, kind: int = layout.STORED_AT_ROOT) -> EventColumns:
    """One event per holder, each with all these names, which are also the local hashes."""
    n = len(holders)
    return EventColumns(
        holder=np.array(holders, dtype=np.int64),
        kind=np.full(n, kind, dtype=np.int64),
        parent=np.zeros(n, dtype=np.uint64),
        offset=np.arange(n + 1, dtype=np.int64) * len(names),
        names=np.tile(names, n),
        local=np.tile(names, n),
    )


def test_the_holder_number_of_a_removed_rank_is_refused() -> None:
    """The number is valid neither for the next rank with the same index nor for the same rank added again."""
    index = RunTreeIndex()
    names = u64(*LOCAL)
    first = index.holder(A, Tier.DEVICE)
    events = columns([index.holder(B, Tier.DEVICE), first], names)
    index.remove_rank(A)
    for rank in (None, C, A):
        if rank is not None:
            assert index.holder(rank, Tier.DEVICE) != first
        with pytest.raises(InvalidEvent):
            index.apply(events)
        assert len(index) == 0
        if rank is not None:
            index.apply(columns([index.holder(rank, Tier.DEVICE)], names))
            index.store(rank, Tier.DEVICE, None, names[:1], names[:1])
            assert ask(index).scores == {rank: len(names)}
            index.remove_rank(rank)
    index.check()


@pytest.mark.parametrize("number", [-1, 1, 1 << 16, 1 << 32, 1 << 62])
def test_an_unassigned_holder_number_is_refused(number: int) -> None:
    """Numbers that are out of range or not assigned yet raise InvalidEvent."""
    index = RunTreeIndex()
    assert index.holder(A, Tier.DEVICE) == 0
    with pytest.raises(InvalidEvent):
        index.apply(columns([0, number], u64(*LOCAL)))
    assert len(index) == 0
    with pytest.raises(InvalidEvent):
        RunTreeIndex().apply(columns([0], u64(*LOCAL)))


def test_a_cleared_rank_keeps_its_number() -> None:
    """A clear does not invalidate the holder number of its rank."""
    index = RunTreeIndex()
    events = columns([index.holder(A, Tier.DEVICE)], u64(*LOCAL))
    for _ in range(3):
        index.apply(events)
        index.clear(A)
    index.apply(events)
    assert ask(index).scores == {A: len(LOCAL)}


@pytest.mark.parametrize("query", [FLOATS, SIGNED, SQUARE, [101], (101,), None, 5, u64(*LOCAL)[::2]], ids=str)
def test_a_matcher_refuses_an_invalid_query(query: Any) -> None:
    """A matcher raises InvalidRequest for anything but a contiguous uint64[n]."""
    with pytest.raises(InvalidRequest):
        RunTreeIndex().matcher().match(query)


@pytest.mark.parametrize(
    "given",
    [
        {"blocks_hint": -1},
        {"blocks_hint": 1.5},
        {"blocks_hint": True},
        {"blocks_hint": 1 << 40},
        {"blocks_hint": None},
        {"blocks_hint": "1000"},
        {"limits": None},
        {"limits": 1024},
        {"limits": TreeLimits},
    ],
    ids=str,
)
def test_a_tree_refuses_invalid_sizes(given: dict[str, Any]) -> None:
    """An invalid argument raises SettingsError, whose message begins with the argument's name."""
    with pytest.raises(SettingsError, match=f"^{next(iter(given))} is "):
        RunTreeIndex(**given)


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


def test_refused_address_space_raises_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses address space, SettingsError names TreeLimits as a remedy."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("streams.core.index.arenas.mmap.mmap", refuse)
    with pytest.raises(SettingsError, match="TreeLimits"):
        RunTreeIndex()


def test_a_refused_rank_is_accepted_after_another_one_was_removed() -> None:
    """A rank that was refused with TooManyRanks keeps no number, so it can use the column of a removed rank later."""
    index = RunTreeIndex(limits=TreeLimits(columns_max=64))
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(66)]
    names = u64(1, 2, 3)
    for rank in ranks[:64]:
        index.store(rank, Tier.DEVICE, None, names, names)
    for rank in ranks[64:]:
        with pytest.raises(TooManyRanks, match="hold 64 ranks") as caught:
            index.store(rank, Tier.DEVICE, None, names, names)
        assert caught.value.detail == {"columns_max": 64}
    index.remove_rank(ranks[0])
    index.store(ranks[65], Tier.DEVICE, None, names, names)
    with pytest.raises(TooManyRanks):
        index.store(ranks[64], Tier.DEVICE, None, names, names)
    with pytest.raises(TooManyRanks):
        index.holder(ranks[1], Tier.HOST)
    index.store(ranks[1], Tier.DEVICE, None, u64(9), u64(9))  # a rank that has a column keeps it
    assert index.find_matches(names).scores == dict.fromkeys([*ranks[1:64], ranks[65]], len(names))
    index.check()


def test_existing_ranks_continue_if_the_system_refuses_more_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rank that needs more columns is refused, with the reason, and can be added later."""
    index = RunTreeIndex(limits=TreeLimits(blocks_max=4096))
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(1025)]
    for rank in ranks[:-1]:
        index.store(rank, Tier.DEVICE, None, u64(1), u64(1))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("streams.core.index.arenas.mmap.mmap", refuse)
        with pytest.raises(TooManyRanks, match="the system refused"):
            index.store(ranks[-1], Tier.DEVICE, None, u64(1), u64(1))
    assert index.find_matches(u64(1)).scores == dict.fromkeys(ranks[:-1], 1)
    index.store(ranks[-1], Tier.DEVICE, None, u64(1), u64(1))
    assert len(index) == len(ranks)
    index.check()


BLOCKS = 1 << 16


def test_a_store_fits_up_to_the_limit_and_names_what_is_missing() -> None:
    """All blocks but the spare space of one run are usable, and IndexFull states the limit, the need and a remedy."""
    names = np.arange(1, BLOCKS + 1, dtype=np.uint64)
    most = BLOCKS - layout.SLACK_MAX
    index = RunTreeIndex(limits=TreeLimits(blocks_max=BLOCKS))
    with pytest.raises(IndexFull, match="TreeLimits with a greater blocks_max") as caught:
        index.store(A, Tier.DEVICE, None, names[: most + 1], names[: most + 1])
    assert caught.value.detail == {"event": 0, "needed": most + 1, "in_use": 0, "blocks_max": BLOCKS}
    index.store(A, Tier.DEVICE, None, names[:most], names[:most])
    assert len(index) == most
    # Aliases of another rank for all of them fit as well.
    index.store(B, Tier.DEVICE, None, names[:most] + np.uint64(1 << 40), names[:most])
    assert len(index) == 2 * most
    index.check()


def test_single_blocks_get_no_spare_space_when_little_is_left() -> None:
    """An index of single blocks holds more than a quarter of its limit, not a seventeenth."""
    index = RunTreeIndex(limits=TreeLimits(blocks_max=BLOCKS))
    names = np.arange(1, BLOCKS + 1, dtype=np.uint64)
    index.holder(A, Tier.DEVICE)
    events = EventColumns(
        holder=np.zeros(BLOCKS, dtype=np.int64),
        kind=np.full(BLOCKS, layout.STORED_AT_ROOT, dtype=np.int64),
        parent=np.zeros(BLOCKS, dtype=np.uint64),
        offset=np.arange(BLOCKS + 1, dtype=np.int64),
        names=names,
        local=names,
    )
    with pytest.raises(IndexFull) as caught:
        index.apply(events)
    assert len(index) == caught.value.detail["event"] > BLOCKS // 4
    index.check()


def test_freed_blocks_are_reused() -> None:
    """Freed blocks are reused even if blocks after them are still held."""
    index = RunTreeIndex(limits=TreeLimits(blocks_max=BLOCKS))
    names = np.arange(1, BLOCKS + 1, dtype=np.uint64)
    half = names[: BLOCKS // 2]
    index.store(A, Tier.DEVICE, None, half, half)
    rest = names[BLOCKS // 2 : -2 * layout.SLACK_MAX]
    index.store(B, Tier.DEVICE, None, rest, rest)
    quarter = half[: BLOCKS // 4 - 1]
    for _ in range(3):
        index.remove(A, Tier.DEVICE, half)
        index.store(A, Tier.DEVICE, None, quarter, quarter)
        assert len(index) == len(rest) + len(quarter)
    index.check()

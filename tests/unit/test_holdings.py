"""What a rank holds: random histories compared with the reference, and the rules one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlocksRemoved,
    FeedState,
    KvEvent,
    MoeLabels,
)
from streams.core.ids import Epoch, HashArray, Incarnation, SequenceHash, Tier, WorkerId
from streams.core.reducer.holdings import HoldingChanges, Holdings
from streams.core.reducer.ordering import Health, Progress, Verdict
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey
from tests.helpers.holdings import OTHER_WORKER, RANK, SIBLING, batch, judge, members, names, stored, u64
from tests.helpers.invariants import check
from tests.helpers.plain_run_store import PlainHoldings, PlainRunStore, plain_holdings
from tests.helpers.reference import ReferenceFleet, chain_hashes, input_history

ALL_TOMBSTONES = 1_000_000


def locals_(n: int, first: int = 1) -> HashArray:
    return np.arange(first, first + n, dtype=np.uint64)


class Fleet:
    """Holdings to which events of RANK are applied, one batch each."""

    def __init__(self) -> None:
        self.store = PlainRunStore()
        self.holdings: PlainHoldings = Holdings(self.store)
        self._sequence = -1

    def apply(self, *events: KvEvent) -> Verdict | None:
        self._sequence += 1
        return judge(self.holdings, batch(self._sequence, *events))

    def blocks(self, tier: Tier = Tier.DEVICE) -> set[int]:
        return {block for _, where, block in members(self.holdings) if where is tier}

    def progress(self) -> Progress:
        return self.holdings.progress[RANK]

    @property
    def runs(self) -> dict[RunKey, Run]:
        return self.store.runs_of(RANK)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    check(fleet.holdings)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), n_ranks=st.integers(1, 5), begins=st.booleans(), bridged=st.booleans())
def test_every_history_ends_in_the_state_of_the_reference(seed: int, n_ranks: int, begins: bool, bridged: bool) -> None:
    """After each batch, verdict, epoch and blocks equal the reference's, and every invariant holds."""
    holdings, reference = plain_holdings(), ReferenceFleet()
    history = input_history(
        random.Random(seed), 120, n_ranks, n_blocks_max=150, begins=begins, bridged=bridged, silences=bridged
    )
    for one in history:
        assert (judge(holdings, one) or "silent") == reference.apply(one)
        check(holdings)
        assert members(holdings) == reference.members()
    assert {rank: progress.epoch for rank, progress in holdings.progress.items()} == reference.epochs()
    for rank, progress in holdings.progress.items():
        expected = reference.ranks[rank]
        assert progress.n_unknown_parents == expected.n_unknown_parents
        assert progress.silent == expected.silent
        assert progress.feed == expected.feed
        lossy = Health.DEGRADED if expected.lossy else Health.EXACT
        assert progress.health is (Health.REMOVED if expected.removed else lossy)
        assert holdings.runs.n_blocks(rank) == len(reference.ranks[rank].facts)


#: Engine hashes and contents from so small a space that every store collides with an older one.
small_stores = st.tuples(
    st.sampled_from([None, 0, 1, 2, 3, 4, 5]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
)
small_removals = st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([Tier.DEVICE, Tier.HOST]))


@settings(max_examples=300, deadline=None)
@given(ops=st.lists(st.one_of(small_stores, small_removals, st.none()), max_size=25))
def test_colliding_engine_hashes_end_in_the_state_of_the_reference(
    ops: list[tuple[int | None, list[tuple[int, int]], Tier] | tuple[list[int], Tier] | None],
) -> None:
    """With six engine hashes and three contents, moved, repeated and reused hashes leave what the reference holds."""
    holdings, reference = plain_holdings(), ReferenceFleet()
    for sequence, op in enumerate(ops):
        event: KvEvent
        if op is None:
            event = AllBlocksCleared()
        elif len(op) == 3:
            parent, blocks, tier = op
            event = stored(u64(*(name for name, _ in blocks)), u64(*(local for _, local in blocks)), parent, tier)
        else:
            event = BlocksRemoved(u64(*op[0]), op[1])
        one = batch(sequence, event)
        judge(holdings, one)
        reference.apply(one)
        check(holdings)
        assert members(holdings) == reference.members()


@pytest.mark.parametrize(
    ("sequence", "verdict"),
    [(0, Verdict.DUPLICATE), (4, Verdict.DUPLICATE), (5, Verdict.APPLIED), (6, Verdict.GAP), (90, Verdict.GAP)],
)
def test_a_sequence_number_is_judged_against_the_last_one_applied(sequence: int, verdict: Verdict) -> None:
    """After batch 4, number 5 is next. Older numbers change nothing; later ones are applied and degrade the rank."""
    holdings = plain_holdings()
    for number in range(5):
        assert judge(holdings, batch(number)) is Verdict.APPLIED
    before = holdings.progress[RANK]
    assert judge(holdings, batch(sequence, stored(names(1), locals_(1)))) is verdict
    after = holdings.progress[RANK]
    if verdict is Verdict.DUPLICATE:
        assert after == before and not members(holdings)
    else:
        assert after.sequence == sequence and len(members(holdings)) == 1
        assert after.digest == sequence + 100
        assert (after.health, after.n_gaps) == (
            (Health.EXACT, 0) if verdict is Verdict.APPLIED else (Health.DEGRADED, 1)
        )


def test_late_records_of_a_former_bridge_do_not_hide_that_the_next_one_is_catching_up(fleet: Fleet) -> None:
    """They say that the feed is live. Duplicates of them that the next bridge writes say that it is not."""
    live, behind = FeedState.LIVE, FeedState.CATCHING_UP
    for sequence, feed in [(0, live), (1, behind), (2, live), (3, live)]:
        judge(fleet.holdings, replace(batch(sequence), feed=feed))
    fleet.holdings.take_changes(ALL_TOMBSTONES)
    assert fleet.progress().feed is live
    assert judge(fleet.holdings, replace(batch(2), feed=behind)) is Verdict.DUPLICATE
    assert [each.feed for each in fleet.holdings.take_changes(ALL_TOMBSTONES).progress] == [behind]
    assert judge(fleet.holdings, replace(batch(3), feed=live)) is Verdict.DUPLICATE
    assert not fleet.holdings.take_changes(ALL_TOMBSTONES).progress
    assert judge(fleet.holdings, replace(batch(4), feed=live)) is Verdict.APPLIED
    assert fleet.progress().feed is live


def test_a_duplicate_of_an_unknown_rank_does_not_create_it(fleet: Fleet) -> None:
    """The first record of incarnation 0 looks like one that was applied before."""
    start = replace(batch(BEFORE_FIRST, incarnation=0), feed=FeedState.UNPROVEN)
    assert judge(fleet.holdings, start) is Verdict.DUPLICATE
    assert RANK not in fleet.holdings.progress


def test_a_first_batch_above_the_engines_first_is_a_gap() -> None:
    """Engines count from 0, so a rank whose first batch has a greater number has lost batches."""
    holdings = plain_holdings()
    assert judge(holdings, batch(1)) is Verdict.GAP
    assert judge(holdings, batch(0, rank=SIBLING)) is Verdict.APPLIED


def test_an_older_incarnation_is_stale_and_a_newer_one_ends_it(fleet: Fleet) -> None:
    """A greater incarnation starts empty and exact, at its own first number; a lesser one changes nothing."""
    fleet.apply(stored(names(2), locals_(2)))
    judge(fleet.holdings, batch(9, incarnation=1))
    assert judge(fleet.holdings, batch(0, stored(names(1), locals_(1, 50)), incarnation=3)) is Verdict.APPLIED
    assert fleet.blocks() == {50}
    assert fleet.progress().epoch == Epoch(Incarnation(3), 0)
    assert fleet.progress().health is Health.EXACT
    assert judge(fleet.holdings, batch(10, AllBlocksCleared(), incarnation=1)) is Verdict.STALE
    assert judge(fleet.holdings, batch(0, AllBlocksCleared(), incarnation=2)) is Verdict.STALE
    assert fleet.blocks() == {50}


def test_a_removed_worker_is_refused_until_its_next_incarnation(fleet: Fleet) -> None:
    """A removal empties every rank of the worker and no other; only a newer incarnation is accepted afterwards."""
    fleet.apply(stored(names(2), locals_(2)))
    judge(fleet.holdings, batch(0, stored(names(1), locals_(1)), rank=SIBLING))
    judge(fleet.holdings, batch(0, stored(names(1), locals_(1)), rank=OTHER_WORKER))
    assert fleet.holdings.remove_worker(WorkerId(7), Incarnation(1)) is Verdict.APPLIED
    assert {rank for rank, _, _ in members(fleet.holdings)} == {OTHER_WORKER}
    assert (fleet.progress().epoch, fleet.progress().health) == (Epoch(Incarnation(1), 1), Health.REMOVED)
    assert fleet.holdings.remove_worker(WorkerId(7), Incarnation(1)) is Verdict.STALE
    assert judge(fleet.holdings, batch(1, stored(names(1), locals_(1)))) is Verdict.STALE
    assert judge(fleet.holdings, batch(0, stored(names(1), locals_(1)), incarnation=2)) is Verdict.APPLIED
    assert fleet.holdings.remove_worker(WorkerId(7), Incarnation(1)) is Verdict.STALE
    assert fleet.progress().health is Health.EXACT
    assert len(fleet.blocks()) == 1


def test_an_incarnation_that_starts_ends_the_older_one_before_its_first_batch(fleet: Fleet) -> None:
    """A batch numbered BEFORE_FIRST stores and loses nothing: the rank is empty, and its first batch is next."""
    fleet.apply(stored(names(2), locals_(2)))
    assert judge(fleet.holdings, batch(BEFORE_FIRST, incarnation=2)) is Verdict.APPLIED
    assert fleet.blocks() == set()
    assert fleet.progress().sequence == BEFORE_FIRST
    assert judge(fleet.holdings, batch(BEFORE_FIRST, incarnation=2)) is Verdict.DUPLICATE
    assert judge(fleet.holdings, batch(BEFORE_FIRST, incarnation=1)) is Verdict.STALE
    assert judge(fleet.holdings, batch(0, stored(names(1), locals_(1)), incarnation=2)) is Verdict.APPLIED
    assert judge(fleet.holdings, batch(BEFORE_FIRST, incarnation=2)) is Verdict.DUPLICATE
    assert len(fleet.blocks()) == 1


def test_a_removed_worker_that_starts_again_returns_in_the_same_incarnation(fleet: Fleet) -> None:
    """It returns empty, under a new epoch, with its first batch next."""
    fleet.apply(stored(names(2), locals_(2)))
    fleet.holdings.remove_worker(WorkerId(7), Incarnation(1))
    assert judge(fleet.holdings, batch(BEFORE_FIRST)) is Verdict.APPLIED
    assert (fleet.progress().epoch, fleet.progress().health) == (Epoch(Incarnation(1), 2), Health.EXACT)
    assert judge(fleet.holdings, batch(0, stored(names(1), locals_(1)))) is Verdict.APPLIED
    assert len(fleet.blocks()) == 1


def test_a_run_whose_rank_is_unknown_is_left_out_and_counted() -> None:
    """A foreign writer's row in the table does not prevent the others from loading."""
    first, second = Fleet(), plain_holdings()
    first.apply(stored(names(2), locals_(2)))
    changes = first.holdings.take_changes(0)
    runs = [run for _, run in changes.runs if run is not None]
    stray = replace(runs[0], key=runs[0].key._replace(rank=OTHER_WORKER))
    assert second.load(changes.progress, [*runs, stray]) == 1
    assert members(second) == members(first.holdings)


def test_the_removal_of_an_unknown_worker_changes_nothing() -> None:
    """The table holds nothing of the worker, so nothing is written."""
    holdings = plain_holdings()
    assert holdings.remove_worker(WorkerId(7), Incarnation(1)) is Verdict.STALE
    assert holdings.take_changes(10) == HoldingChanges([], [])


def test_a_clear_empties_its_own_rank_only_and_makes_it_exact(fleet: Fleet) -> None:
    """A degraded rank is exact after a clear; blocks stored later in the same batch are held."""
    judge(fleet.holdings, batch(0, stored(names(1), locals_(1)), rank=SIBLING))
    fleet.apply(stored(names(2), locals_(2)), stored(names(1), locals_(1), parent=99))
    assert fleet.progress().health is Health.DEGRADED
    fleet.apply(stored(names(1, 70), locals_(1, 70)), AllBlocksCleared(), stored(names(1), locals_(1, 5)))
    assert fleet.progress().health is Health.EXACT
    assert fleet.progress().epoch == Epoch(Incarnation(1), 1)
    assert fleet.blocks() == {5, 1}  # 1 is the sibling's
    assert {block for rank, _, block in members(fleet.holdings) if rank == RANK} == {5}


def test_an_unknown_parent_after_a_clear_degrades_the_rank_again(fleet: Fleet) -> None:
    """A clear makes up for losses before it, not for a later store whose parent is unknown."""
    fleet.apply(AllBlocksCleared(), stored(names(1), locals_(1), parent=99))
    assert fleet.progress().health is Health.DEGRADED
    assert fleet.progress().n_unknown_parents == 1


@pytest.mark.parametrize("cleared", [False, True])
def test_unindexed_blocks_make_a_rank_approximate(fleet: Fleet, cleared: bool) -> None:
    """A batch with unindexed blocks is never exact, even with a clear, since they may have been stored after it."""
    events = (AllBlocksCleared(),) if cleared else ()
    judge(fleet.holdings, batch(0, *events, n_unindexed=3))
    assert fleet.progress().health is Health.APPROXIMATE
    judge(fleet.holdings, batch(1))
    assert fleet.progress().health is Health.APPROXIMATE
    judge(fleet.holdings, batch(2, AllBlocksCleared()))
    assert fleet.progress().health is Health.EXACT


@pytest.mark.parametrize("cleared", [False, True])
def test_an_incomplete_batch_degrades_its_rank_until_a_clear(fleet: Fleet, cleared: bool) -> None:
    """Its events are applied; a clear in the same batch does not help, since the lost events may have followed it."""
    fleet.apply(stored(names(1), locals_(1)))
    events = (AllBlocksCleared(),) if cleared else ()
    lossy = replace(batch(1, *events, stored(names(1, 70), locals_(1, 70))), incomplete=True)
    assert judge(fleet.holdings, lossy) is Verdict.GAP
    assert (fleet.progress().health, fleet.progress().n_gaps) == (Health.DEGRADED, 1)
    assert fleet.blocks() == ({70} if cleared else {1, 70})
    assert judge(fleet.holdings, lossy) is Verdict.DUPLICATE
    judge(fleet.holdings, batch(2, AllBlocksCleared()))
    assert fleet.progress().health is Health.EXACT


def test_a_lost_source_degrades_every_exact_rank_and_no_other(fleet: Fleet) -> None:
    """Exact ranks are degraded and written; a removed rank remains removed."""
    fleet.apply()
    judge(fleet.holdings, batch(0, rank=OTHER_WORKER))
    fleet.holdings.remove_worker(WorkerId(8), Incarnation(1))
    fleet.holdings.take_changes(0)
    fleet.holdings.degrade_all()
    assert [(p.rank, p.health) for p in fleet.holdings.take_changes(0).progress] == [(RANK, Health.DEGRADED)]
    assert fleet.holdings.progress[OTHER_WORKER].health is Health.REMOVED


def test_a_store_after_an_unknown_parent_is_rejected_completely(fleet: Fleet) -> None:
    """None of its blocks is held, and the rank is degraded."""
    fleet.apply(stored(names(3), locals_(3)), BlocksRemoved(names(1, 1002)))
    fleet.apply(stored(names(2, 50), locals_(2, 50), parent=1002))  # the parent is removed
    fleet.apply(stored(names(2, 60), locals_(2, 60), parent=4242))  # the parent was never stored
    assert fleet.blocks() == set(chain_hashes([1, 2]))
    assert (fleet.progress().n_unknown_parents, fleet.progress().health) == (2, Health.DEGRADED)


def test_removals_of_unknown_engine_hashes_are_counted_and_do_not_degrade(fleet: Fleet) -> None:
    """An engine hash that is unknown, unknown in its tier, or removed before leaves the rank exact."""
    fleet.apply(stored(names(2), locals_(2)))
    fleet.apply(BlocksRemoved(u64(5)), BlocksRemoved(names(2), Tier.HOST), BlocksRemoved(u64(1001, 1001)))
    assert fleet.blocks() == {1}
    assert (fleet.progress().n_unknown_removals, fleet.progress().health) == (4, Health.EXACT)


def test_a_parent_may_be_in_another_tier_and_is_first_sought_in_its_own(fleet: Fleet) -> None:
    """A host copy attaches to a device block, or to the host's own block if host has the same engine hash."""
    fleet.apply(stored(names(2), locals_(2)))
    fleet.apply(stored(u64(9), u64(3), parent=1001, tier=Tier.HOST))
    assert fleet.blocks(Tier.HOST) == {chain_hashes([1, 2, 3])[2]}
    fleet.apply(stored(u64(1001), u64(40), tier=Tier.HOST))
    fleet.apply(stored(u64(10), u64(41), parent=1001, tier=Tier.HOST))
    assert chain_hashes([40, 41])[1] in fleet.blocks(Tier.HOST)


@pytest.mark.parametrize(
    ("n_blocks", "sizes"),
    [(1, [1]), (31, [31]), (32, [32]), (33, [32, 1]), (64, [32, 32]), (65, [32, 32, 1])],
)
@pytest.mark.parametrize("step", [1, 7, 100])
def test_runs_have_at_most_thirty_two_blocks(fleet: Fleet, n_blocks: int, sizes: list[int], step: int) -> None:
    """In whatever portions the blocks arrive, a chain is stored in full runs followed by a last, shorter one."""
    parent: int | None = None
    for first in range(0, n_blocks, step):
        n = min(step, n_blocks - first)
        fleet.apply(stored(names(n, 1000 + first), locals_(n, 1 + first), parent))
        parent = 1000 + first + n - 1
    chain = chain_hashes(range(1, n_blocks + 1))
    runs = sorted(fleet.runs.values(), key=lambda run: run.start)
    assert RUN_BLOCKS_MAX == 32
    assert [len(run.sequence) for run in runs] == sizes
    assert [block for run in runs for block in run.sequence] == chain
    assert [run.start for run in runs] == list(range(0, n_blocks, 32))
    assert [run.parent for run in runs] == [None, *chain[31::32]][: len(runs)]
    assert fleet.blocks() == set(chain)


def test_a_branch_starts_a_new_run(fleet: Fleet) -> None:
    """A child of a block in the middle of a run does not change that run."""
    fleet.apply(stored(names(4), locals_(4)))
    fleet.apply(stored(u64(77), u64(50), parent=1001))
    branch = chain_hashes([1, 2, 50])[2]
    assert fleet.runs.keys() == {
        RunKey(RANK, Tier.DEVICE, SequenceHash(1)),
        RunKey(RANK, Tier.DEVICE, SequenceHash(branch)),
    }
    assert fleet.runs[RunKey(RANK, Tier.DEVICE, SequenceHash(branch))].start == 2


def test_a_removal_clears_a_presence_bit_and_the_last_one_writes_a_tombstone(fleet: Fleet) -> None:
    """A run with a hole keeps its hashes; a run without held blocks ends with one tombstone."""
    key = RunKey(RANK, Tier.DEVICE, SequenceHash(1))
    fleet.apply(stored(names(3), locals_(3)))
    fleet.holdings.take_changes(0)
    fleet.apply(BlocksRemoved(u64(1001)))
    ((written, run),) = fleet.holdings.take_changes(0).runs
    assert written == key and run is not None and run.present == 0b101
    fleet.apply(BlocksRemoved(u64(1002, 1000)))
    assert fleet.holdings.take_changes(0).runs == [(key, None)]
    assert fleet.holdings.take_changes(0) == HoldingChanges([], [])


def test_a_block_stored_again_fills_its_hole(fleet: Fleet) -> None:
    """It returns to its old offset in the run, under its new engine hash."""
    fleet.apply(stored(names(3), locals_(3)), BlocksRemoved(u64(1001)))
    fleet.apply(stored(u64(500), u64(2), parent=1000))
    (run,) = fleet.runs.values()
    assert run.engine == [1000, 500, 1002]
    assert fleet.blocks() == set(chain_hashes([1, 2, 3]))


def test_an_engine_hash_reused_for_its_own_child_names_the_child(fleet: Fleet) -> None:
    """The later store wins, even if the run's only block loses its engine hash."""
    fleet.apply(stored(u64(9), u64(1)))
    fleet.apply(stored(u64(9), u64(2), parent=9))
    assert fleet.blocks() == {chain_hashes([1, 2])[1]}
    fleet.apply(stored(u64(8, 8), u64(1, 2)))  # twice in one event
    assert fleet.blocks() == {chain_hashes([1, 2])[1]}
    fleet.apply(BlocksRemoved(u64(9)))  # an older engine hash of that block
    assert fleet.blocks() == {chain_hashes([1, 2])[1]}
    fleet.apply(BlocksRemoved(u64(8)))
    assert fleet.blocks() == set()


def test_labels_follow_their_block(fleet: Fleet) -> None:
    """Labels are removed with their block, and a block stored again without labels does not inherit them."""
    labels = MoeLabels(2, 7, 3)
    fleet.apply(replace(stored(names(2), locals_(2)), moe=labels))
    (run,) = fleet.runs.values()
    assert run.moe == {0: labels, 1: labels}
    fleet.apply(BlocksRemoved(u64(1001)))
    assert run.moe == {0: labels}
    fleet.apply(stored(u64(1001), u64(2), parent=1000))
    assert run.moe == {0: labels}


def test_progress_of_every_touched_rank_is_written_once(fleet: Fleet) -> None:
    """Each rank with new records since the last call is written, with its current number of blocks."""
    fleet.apply(stored(names(3), locals_(3)))
    fleet.apply(BlocksRemoved(u64(1000)))
    judge(fleet.holdings, batch(0, rank=OTHER_WORKER))
    judge(fleet.holdings, batch(0, rank=OTHER_WORKER))
    changes = fleet.holdings.take_changes(0)
    assert [(p.rank, p.sequence, p.n_blocks) for p in changes.progress] == [(RANK, 1, 2), (OTHER_WORKER, 0, 0)]
    judge(fleet.holdings, batch(0))
    assert fleet.holdings.take_changes(0) == HoldingChanges([], [])


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 100])
def test_tombstones_of_an_ended_epoch_are_written_a_few_at_a_time(fleet: Fleet, limit: int) -> None:
    """No call returns more than its limit. Later calls return the rest, and none for a key that was written again."""
    for first in range(5):
        fleet.apply(stored(u64(first + 1), u64(10 + first)))
    fleet.holdings.take_changes(0)
    fleet.apply(AllBlocksCleared(), stored(u64(90), u64(11)))
    changes = fleet.holdings.take_changes(limit)
    assert [p.epoch.generation for p in changes.progress] == [1]
    assert [key.first for key, run in changes.runs if run is not None] == [11]
    tombstones = [key.first for key, run in changes.runs if run is None]
    assert len(tombstones) == min(limit, 4)
    assert fleet.holdings.has_pending_tombstones == (limit < 4)
    while limit and fleet.holdings.has_pending_tombstones:
        later = fleet.holdings.take_changes(limit)
        assert not later.progress
        assert 0 < len(later.runs) <= limit
        tombstones += [key.first for key, _ in later.runs]
    if limit:
        assert sorted(tombstones) == [10, 12, 13, 14]


def test_a_key_written_again_and_emptied_again_gets_its_tombstone(fleet: Fleet) -> None:
    """An old row, rewritten in the new epoch and then emptied, is deleted."""
    key = RunKey(RANK, Tier.DEVICE, SequenceHash(10))
    fleet.apply(stored(u64(1), u64(10)))
    fleet.holdings.take_changes(0)
    fleet.apply(AllBlocksCleared())
    fleet.apply(stored(u64(1), u64(10)), BlocksRemoved(u64(1)))
    assert fleet.holdings.take_changes(0).runs == [(key, None)]
    assert not fleet.holdings.has_pending_tombstones


def test_a_run_emptied_in_the_batch_that_clears_gets_its_tombstone(fleet: Fleet) -> None:
    """Its old row is in the table whether the block was removed or cleared."""
    key = RunKey(RANK, Tier.DEVICE, SequenceHash(10))
    fleet.apply(stored(u64(1), u64(10)))
    fleet.holdings.take_changes(0)
    fleet.apply(BlocksRemoved(u64(1)), AllBlocksCleared())
    assert fleet.holdings.take_changes(10).runs == [(key, None)]

"""Supplementary matches: random histories of runs, labels, rows, pools and workers against a walk of every fact."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from streams.core.block_facts.moe_labels import MoeSelector
from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import MoeLabels
from streams.core.hashing import sequence_hashes
from streams.core.ids import EngineHash, Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import Candidates
from streams.core.reducer.ordering import Health, Progress
from streams.core.runs import Run, RunKey
from streams.core.workers import Worker
from streams.cxl.events import CxlPool
from streams.cxl.records import BlockKey, BlockRow, Placement, block_key, encode_block, encode_pool, pool_key
from streams.kafka.records import encode_worker
from streams.router_api.knowledge.view import View
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, RUN_KEY, encode_progress, encode_run
from tests.helpers.runs import FIRST, run_of
from tests.helpers.views import rank

LABELS = [
    MoeLabels(2, 7, 3),
    MoeLabels(2, 7, None),
    MoeLabels(2, 8, 3),
    MoeLabels(None, None, 3),
    MoeLabels(1, None, 3),
]
WANTED = [
    MoeSelector(2, frozenset({7}), 3),
    MoeSelector(2),
    MoeSelector(expert_ids=frozenset({7, 8})),
    MoeSelector(expert_group=3),
    MoeSelector(9),
    MoeSelector(),
]


def register(view: View, worker_id: int, model: str = "m", dp_size: int = 1) -> None:
    worker = Worker(WorkerId(worker_id), "http://w", model, 16, dp_size=dp_size)
    view.fold_worker(str(worker_id).encode(), encode_worker(worker))


@dataclass
class History:
    """A view that folds random records, and the same records kept simply: runs by key, pooled rows, and pools.

    Which ranks hold blocks and reach rows is read from the view's own dumps, which have tests of their own.
    """

    rng: random.Random
    view: View
    chains: list[HashArray] = field(default_factory=list)
    epochs: dict[RankId, Epoch] = field(default_factory=dict)
    runs: dict[RunKey, Run] = field(default_factory=dict)
    found: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        stem = self.rng.sample(range(1, 1 << 62), 6)
        for _ in range(3):
            fork = self.rng.randrange(7)
            own = self.rng.sample(range(1, 1 << 62), 14 - fork)
            self.chains.append(np.array(stem[:fork] + own, dtype=np.uint64))

    def rank(self) -> RankId:
        return rank(self.rng.randrange(1, 6), self.rng.randrange(2))

    def fold_run(self) -> None:
        """Fold a record of the current epoch, of the next one, or of an ended one."""
        rng, of = self.rng, self.rank()
        now = self.epochs.get(of, FIRST)
        epoch = Epoch(Incarnation(1), max(0, now.generation + rng.choices([0, 1, -1], [20, 1, 1])[0]))
        local = rng.choice(self.chains)
        first = rng.choice([0, rng.randrange(len(local))])
        last = rng.randrange(first, len(local)) + 1
        present = rng.getrandbits(last - first) | 1 << rng.randrange(last - first) if rng.random() < 0.4 else -1
        moe = {at: rng.choice(LABELS) for at in range(last - first) if rng.random() < 0.7}
        run = run_of(
            local,
            of,
            first,
            last,
            present=present,
            epoch=epoch,
            tier=rng.choice([Tier.DEVICE, Tier.HOST]),
            moe=moe if rng.random() < 0.6 else None,
        )
        self._fold(RUN_KEY.pack(run.key), encode_run(run))
        if epoch >= now:
            self._enter(of, epoch)
            self.runs[run.key] = run

    def end_run(self) -> None:
        if self.runs:
            key = self.rng.choice(sorted(self.runs))
            self._fold(RUN_KEY.pack(key), None)
            del self.runs[key]

    def new_epoch(self) -> None:
        of = self.rank()
        epoch = Epoch(Incarnation(1), self.epochs.get(of, FIRST).generation + 1)
        told = Progress(of, epoch, 0, health=Health.EXACT, model="m", block_size=16)
        self._fold(PROGRESS_KEY.pack(of), encode_progress(told))
        self._enter(of, epoch)

    def forget(self) -> None:
        of = self.rank()
        self._fold(PROGRESS_KEY.pack(of), None)
        self.epochs.pop(of, None)
        self.runs = {key: run for key, run in self.runs.items() if key.rank != of}

    def fold_row(self) -> None:
        rng = self.rng
        chain = sequence_hashes(rng.choice(self.chains)).tolist()
        first = rng.randrange(len(chain))
        placement = Placement(
            state=rng.choices(list(CxlMemoryState)[1:], [1, 6, 1])[0],
            pool_id=rng.choice("pq"),
            pool_epoch=rng.randrange(3),
            accessible_workers=tuple(map(WorkerId, rng.sample(range(1, 6), rng.choice([0, 0, 2, 4])))),
            model=rng.choice("mmn"),
            incarnation=Incarnation(1),
            entered_at_ms=0,
        )
        owner = self.rank()
        for at in range(first, rng.randrange(first, len(chain)) + 1):
            key = block_key(BlockKey(SequenceHash(chain[at]), owner, placement.pool_id))
            row = BlockRow(placement, SequenceHash(chain[at - 1]) if at else None, at, EngineHash(at))
            self.view.fold_pooled(key, encode_block(row) if rng.random() < 0.85 else None)

    def fold_pool(self) -> None:
        rng = self.rng
        members = tuple(map(WorkerId, rng.sample(range(1, 6), rng.randrange(6))))
        pool = CxlPool(rng.choice("pq"), members=members, epoch=rng.randrange(2), lost=rng.random() < 0.1)
        self.view.fold_worker(pool_key(pool.pool_id), encode_pool(pool) if rng.random() < 0.9 else None)

    def fold_worker(self) -> None:
        worker_id = self.rng.randrange(1, 6)
        if self.rng.random() < 0.7:
            register(self.view, worker_id, dp_size=self.rng.randrange(1, 3))
        else:
            self.view.fold_worker(str(worker_id).encode(), None)

    def _fold(self, key: bytes, value: bytes | None) -> None:
        if self.rng.random() < 0.5:
            self.view.fold_index(key, value)
        else:
            assert self.view.fold_index_batch([(key, value)]) == []

    def _enter(self, of: RankId, epoch: Epoch) -> None:
        if epoch != self.epochs.get(of):
            self.runs = {key: run for key, run in self.runs.items() if key.rank != of}
        self.epochs[of] = epoch

    def check(self) -> None:
        """Compare the matches of one request."""
        rng, view = self.rng, self.view
        local = rng.choice(self.chains)[: rng.randrange(15)]
        model, wanted = rng.choice("mn"), rng.choice([None, *WANTED])
        sequence = sequence_hashes(local)
        candidates = [each for each in view.fleet.all_ranks() if rng.random() < 0.8]
        rng.shuffle(candidates)
        places = Candidates(candidates)
        overlap, effective = view.index.find_matches(local).columns(places, (0.9, 0.9, 0.9, 0.9))
        supplementary = view.supplementary(sequence, model, wanted, pooled=True)
        weighed = None if supplementary is None else supplementary.weigh(places, overlap, effective, 0.7, 0.3)
        reached, matched = (None, None) if weighed is None else (weighed.cxl_accessible_scores, weighed.moe_scores)
        blocks = [SequenceHash(block) for block in sequence.tolist()]
        held = {(each, block) for each, _, block in view.index.members()}
        pooled: set[tuple[WorkerId, SequenceHash]] = set()
        for block, workers in view.facts.pooled_blocks(frozenset(view.fleet.workers)):
            if block.model == model:
                pooled |= {(worker, block.sequence) for worker in workers}
        labelled = {
            (run.key.rank, run.sequence[at])
            for run in self.runs.values()
            for at in run.held()
            if wanted is not None and at in run.moe and wanted.matches(run.moe[at])
        }
        for position, each in enumerate(candidates):
            at = n_own = int(overlap[position])
            n_reached = 0
            while at < len(blocks):
                if (each.worker_id, blocks[at]) in pooled:
                    n_reached += 1
                elif (each, blocks[at]) not in held:
                    break
                at += 1
            n_matched = sum((each, block) in labelled for block in blocks[:n_own])
            assert (0 if reached is None else reached[position]) == n_reached
            assert (0 if matched is None else matched[position]) == n_matched
            if weighed is not None:
                with_pooled = effective[position] + 0.7 * n_reached
                assert weighed.with_pooled[position] == with_pooled
                assert weighed.with_both[position] == with_pooled + 0.3 * n_matched
            self.found["pooled"] += n_reached
            self.found["labelled"] += n_matched


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 6))])
def test_every_history_gives_the_blocks_of_a_walk_of_all_facts(seed: int) -> None:
    """In whatever order a history is folded, the counts are those of a walk of all facts, and often not zero."""
    history = History(random.Random(seed), View(Settings(), lambda: 0))
    steps: list[Callable[[], None]] = [
        *[history.fold_run] * 12,
        *[history.fold_row] * 4,
        *[history.end_run, history.fold_worker, history.fold_pool] * 2,
        history.new_epoch,
        history.forget,
    ]
    for worker_id in range(1, 6):
        register(history.view, worker_id, dp_size=2)
    for _ in range(600):
        history.rng.choice(steps)()
        history.check()
    assert min(history.found["pooled"], history.found["labelled"]) > 50


CHAIN = np.arange(1, 11, dtype=np.uint64)
POOL = CxlPool("p", members=tuple(map(WorkerId, (1, 2, 3))))
PLACED = Placement(CxlMemoryState.CXL_POOLED, "p", 0, (), "m", Incarnation(1), 0)


def put(view: View, *positions: int, owner: int = 9, placement: Placement = PLACED) -> None:
    """These blocks of CHAIN are pooled, by an owner that is not registered."""
    chain = [SequenceHash(block) for block in sequence_hashes(CHAIN).tolist()]
    for at in positions:
        row = BlockRow(placement, chain[at - 1] if at else None, at, EngineHash(at))
        view.fold_pooled(block_key(BlockKey(chain[at], rank(owner), placement.pool_id)), encode_block(row))


def reached(view: View, *workers: int) -> list[int]:
    places = Candidates([rank(worker) for worker in workers])
    overlap, effective = view.index.find_matches(CHAIN).columns(places, (1.0, 1.0, 1.0, 1.0))
    supplementary = view.supplementary(sequence_hashes(CHAIN), "m", None, pooled=True)
    weighed = None if supplementary is None else supplementary.weigh(places, overlap, effective, 1.0, 0.0)
    blocks = None if weighed is None else weighed.cxl_accessible_scores
    return [0] * len(workers) if blocks is None else blocks.tolist()


@pytest.fixture
def pooled() -> View:
    """A view with workers 1 to 4, of which 1 to 3 are members of the pool."""
    view = View(Settings(), lambda: 0)
    for worker_id in range(1, 5):
        register(view, worker_id)
    view.fold_worker(pool_key("p"), encode_pool(POOL))
    return view


def hold(view: View, worker_id: int, first: int, last: int) -> None:
    run = run_of(CHAIN, rank(worker_id), first, last)
    view.fold_index(RUN_KEY.pack(run.key), encode_run(run))


def test_the_prefix_goes_over_own_blocks_and_pooled_ones_to_the_first_hole(pooled: View) -> None:
    """A prefix continues over own blocks that follow pooled ones without counting them, and ends at a hole."""
    put(pooled, 0, 1, 2, 3, 6, 7, 9)
    assert reached(pooled, 1, 2, 3, 4) == [4, 4, 4, 0]
    hold(pooled, 1, 0, 2)  # both pooled too
    hold(pooled, 2, 4, 6)  # between pooled ones
    hold(pooled, 3, 5, 9)  # after a hole at 4
    hold(pooled, 4, 0, 9)  # not a member of the pool
    assert reached(pooled, 1, 2, 3, 4) == [2, 6, 4, 0]
    hold(pooled, 3, 4, 5)
    assert reached(pooled, 1, 2, 3, 4) == [2, 6, 7, 0]


def test_losing_a_pool_or_a_host_or_an_epoch_is_one_record(pooled: View) -> None:
    """One record of a pool makes all its blocks inaccessible at once, and accessible again."""
    put(pooled, *range(10))
    assert reached(pooled, 1, 3) == [10, 10]
    pooled.fold_worker(pool_key("p"), encode_pool(replace(POOL, members=(WorkerId(1),))))
    assert reached(pooled, 1, 3) == [10, 0]
    pooled.fold_worker(pool_key("p"), encode_pool(replace(POOL, lost=True)))
    assert reached(pooled, 1, 3) == [0, 0]
    pooled.fold_worker(pool_key("p"), encode_pool(replace(POOL, epoch=1)))
    assert reached(pooled, 1, 3) == [0, 0]
    put(pooled, 0, 1, placement=replace(PLACED, pool_epoch=1))
    assert reached(pooled, 1, 3) == [2, 2]
    pooled.fold_worker(b"3", None)
    assert reached(pooled, 1, 3) == [2, 0]


def test_a_block_of_several_owners_counts_once_and_as_long_as_one_of_them_has_it(pooled: View) -> None:
    """A block of several owners counts once while any of them has it, in one pool or several."""
    put(pooled, 0, 1, owner=8)
    put(pooled, 0, 1, owner=9)
    put(pooled, 0, owner=9, placement=replace(PLACED, pool_id="q", accessible_workers=(WorkerId(4),)))
    assert reached(pooled, 1, 4) == [2, 1]
    put(pooled, 0, 1, owner=9, placement=replace(PLACED, state=CxlMemoryState.EVICTED))
    assert reached(pooled, 1, 4) == [2, 1]
    put(pooled, 1, owner=8, placement=replace(PLACED, state=CxlMemoryState.IN_TRANSIT))
    assert reached(pooled, 1, 4) == [1, 1]


def test_a_lease_renewed_leaves_every_answer_as_it_was(pooled: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewed lease, which arrives every few seconds for each worker, keeps all cached queries."""
    put(pooled, 0, 1)
    assert reached(pooled, 1) == [2]
    monkeypatch.setattr("streams.cxl.pooled_index.reachable_workers", None)
    register(pooled, 1)
    assert reached(pooled, 1) == [2]


def test_a_forgotten_rank_that_comes_again_in_a_smaller_epoch_has_its_labels() -> None:
    """A rank that was dropped and returns in a smaller epoch gets its labels, whether or not it had any before."""
    view = View(Settings(), lambda: 0)
    register(view, 1)
    first = run_of(CHAIN, rank(1), 0, 1, epoch=Epoch(Incarnation(5), 1), moe={0: LABELS[0]})
    view.fold_index(RUN_KEY.pack(first.key), encode_run(first))
    view.fold_index(RUN_KEY.pack(first.key), None)
    view.fold_index(PROGRESS_KEY.pack(rank(1)), None)
    again = replace(first, epoch=FIRST)
    view.fold_index(RUN_KEY.pack(again.key), encode_run(again))
    scores = view.index.find_matches(CHAIN)
    supplementary = view.supplementary(sequence_hashes(CHAIN), "m", MoeSelector(2), pooled=False)
    assert supplementary is not None and supplementary.matching([rank(1)], scores) == {rank(1)}

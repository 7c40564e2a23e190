"""The index of pooled blocks: which rows share a fact, and what happens to rows over capacity."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from streams.core.block_facts import fact_sets as fact_sets
from streams.core.block_facts.fact_sets import FactSets, RankNumbering
from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import DpRank, Incarnation, RankId, SequenceHash, WorkerId
from streams.core.index.interface import Candidates
from streams.cxl.pooled_index import PooledIndex
from streams.cxl.records import Placement

RANKS = RankNumbering(tuple(RankId(WorkerId(number), DpRank(0)) for number in range(8)))
BLOCK = SequenceHash(7)


def placed(*named: int) -> Placement:
    """Return the placement of a block that names these workers, in a pool that is not registered."""
    return Placement(CxlMemoryState.CXL_POOLED, "p", 0, tuple(map(WorkerId, named)), "m", Incarnation(1), 0)


def reached(index: PooledIndex, sets: FactSets, block: SequenceHash = BLOCK) -> set[int]:
    """Return the workers that can read a block."""
    masks = index.query("m", RANKS).masks()
    none = np.zeros(len(RANKS.ranks), dtype=np.int64)
    query = np.array([block], dtype=np.uint64)
    weighed = sets.weigh(masks, None, query, RANKS.of(Candidates(RANKS.ranks)), none, none.astype(float), 1.0, 0.0)
    return (
        set() if weighed.cxl_accessible_scores is None else set(np.flatnonzero(weighed.cxl_accessible_scores).tolist())
    )


def test_the_end_of_a_row_over_capacity_removes_no_other_owners_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has a fact for as long as any row with the fact is indexed, whichever owner's row was added first."""
    monkeypatch.setattr(fact_sets.FactSets._number_of, "__defaults__", (1,))
    sets = FactSets()
    index = PooledIndex(sets, {})
    full, here, there = SequenceHash(1), placed(1, 2), placed(3)
    index.replace(full, None, there)  # the only set that fits
    index.replace(BLOCK, None, here)  # owner B
    assert (reached(index, sets), index.over_capacity) == (set(), 1)
    index.replace(full, there, None)
    index.replace(BLOCK, None, here)  # owner A
    assert (reached(index, sets), index.over_capacity) == ({1, 2}, 0)
    index.replace(BLOCK, here, None)  # owner B
    assert reached(index, sets) == {1, 2}
    index.replace(BLOCK, here, there)  # owner A; the removed set frees the space of the new one
    assert (reached(index, sets), index.over_capacity) == ({3}, 0)
    index.replace(BLOCK, there, None)
    assert (reached(index, sets), len(index), index.over_capacity) == (set(), 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_added_and_removed_in_any_order_near_capacity(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker gets a block that no row gives it; while no row is over capacity, each gets all that any row gives."""
    monkeypatch.setattr(fact_sets.FactSets._number_of, "__defaults__", (2,))
    rng, sets = random.Random(seed), FactSets()
    index = PooledIndex(sets, {})
    rows: dict[tuple[int, int], Placement] = {}  # by block and owner
    n_complete = n_incomplete = 0
    for _ in range(3000):
        key = (rng.randrange(1, 4), rng.randrange(4))
        before, after = rows.pop(key, None), rng.choice([None, None, placed(1), placed(2), placed(3)])
        if after is not None:
            rows[key] = after
        index.replace(SequenceHash(key[0]), before, after)
        for block in range(1, 4):
            named = {worker for (of, _), row in rows.items() if of == block for worker in row.accessible_workers}
            found = reached(index, sets, SequenceHash(block))
            assert found <= named
            if index.over_capacity == 0:
                assert found == named
        n_complete += index.over_capacity == 0
        n_incomplete += index.over_capacity > 0
    assert min(n_complete, n_incomplete) > 100
    for (block, _), row in rows.items():
        index.replace(SequenceHash(block), row, None)
    assert (len(index), index.over_capacity) == (0, 0)


def test_the_order_and_repetition_of_named_workers_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand blocks share one set, and a row that names the same workers in another order changes nothing."""
    monkeypatch.setattr(fact_sets.FactSets._number_of, "__defaults__", (1,))
    rng, sets = random.Random(1), FactSets()
    index = PooledIndex(sets, {})
    for block in range(1, 1001):
        named = rng.choices(range(8), k=3) + list(range(8))
        rng.shuffle(named)
        index.replace(SequenceHash(block), None, placed(*named))
        assert reached(index, sets, SequenceHash(block)) == set(range(8))
    assert (len(index), index.over_capacity) == (1000, 0)
    index.replace(SequenceHash(1), placed(*range(8)), placed(*reversed(range(8))))
    index.replace(SequenceHash(1), placed(3, *range(8)), replace(placed(), state=CxlMemoryState.EVICTED))
    assert (len(index), reached(index, sets, SequenceHash(1))) == (999, set())


def _walked(pooled: list[set[int]], held: list[set[int]], worker: int, start: int) -> int:
    """Count the pooled blocks that a worker reads from `start` on, over own blocks that follow them."""
    at, n_read = start, 0
    while at < len(pooled) and (worker in pooled[at] or worker in held[at]):
        n_read += worker in pooled[at]
        at += 1
    return n_read


@pytest.mark.parametrize("seed", range(60))
def test_a_row_that_stands_for_several_blocks_is_read_as_a_whole(seed: int) -> None:
    """Blocks of a stretch can be read if its row is there, and its stretch is in the request as a whole."""
    rng, sets = random.Random(seed), FactSets()
    index = PooledIndex(sets, {})
    n_blocks, spans = rng.randrange(1, 40), rng.sample([1, 2, 4, 8], rng.randrange(1, 4))
    sequence = np.array([rng.randrange(1, 1 << 64) for _ in range(n_blocks)], dtype=np.uint64)
    pooled: list[set[int]] = [set() for _ in range(n_blocks)]
    rows = []
    for span in spans:
        for last in range(span - 1, n_blocks, span):
            if rng.random() < 0.7:
                named = rng.sample(range(3), rng.randrange(1, 3))
                row = replace(placed(*named), span=span)
                index.replace(SequenceHash(int(sequence[last])), None, row)
                rows.append((SequenceHash(int(sequence[last])), row))
                if rng.random() < 0.1:  # it ends again
                    index.replace(*rows.pop(), None)
                    continue
                for part in range(last - span + 1, last + 1):
                    pooled[part].update(named)
    keys, candidates = index.keys_of(sequence), Candidates(RANKS.ranks)
    masks, numbers = index.query("m", RANKS).masks(), RANKS.of(candidates)
    starts = np.array([rng.randrange(n_blocks + 1) for _ in RANKS.ranks], dtype=np.int64)
    weighed = sets.weigh(masks, None, keys, numbers, starts, starts.astype(float), 0.5, 0.0)
    nothing: list[set[int]] = [set() for _ in range(n_blocks)]
    read = [_walked(pooled, nothing, worker, start) for worker, start in enumerate(starts.tolist())]
    found = weighed.cxl_accessible_scores
    assert read == ([0] * len(read) if found is None else found.tolist())
    held = [{worker for worker in range(8) if rng.random() < 0.3} for _ in range(n_blocks)]
    bits = np.array([sum(1 << worker for worker in workers) for workers in held], dtype=np.int64)
    path = index.query("m", RANKS).path(keys)
    walked = None if path is None else path.walk(candidates, starts, (np.arange(n_blocks), bits, 1))
    read = [_walked(pooled, held, worker, start) for worker, start in enumerate(starts.tolist())]
    assert read == ([0] * len(read) if walked is None else walked.tolist())
    for block, row in rows:
        index.replace(block, row, None)
    assert len(index) == 0 and index.keys_of(sequence) is sequence

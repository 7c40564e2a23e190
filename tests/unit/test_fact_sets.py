"""Fact sets: the map compared with counters of every fact, and walks compared with a walk over single blocks."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from streams.core.block_facts import fact_sets
from streams.core.block_facts.fact_sets import (
    FactQuery,
    FactSets,
    RankNumbering,
    RequestPath,
)
from streams.core.ids import DpRank, Float64Array, HashArray, RankId, WorkerId
from streams.core.index.interface import Candidates, HolderBitmaps
from streams.errors import IndexFull


def rank(number: int) -> RankId:
    return RankId(WorkerId(number), DpRank(0))


def chain(*blocks: int) -> HashArray:
    return np.array(blocks, dtype=np.uint64)


def facts_of(sets: FactSets, block: int) -> frozenset[int]:
    return sets._sets[sets._get(block)]


def numbers_of(n: int) -> RankNumbering:
    return RankNumbering(tuple(rank(number) for number in range(n)))


def query_of(sets: FactSets, numbers: RankNumbering) -> FactQuery:
    """Return a query in which the rank numbered f may use blocks with fact f."""
    return FactQuery(sets, "q", numbers, lambda facts: sum(1 << fact for fact in facts))


def held_of(holders: list[set[int]], n_candidates: int) -> HolderBitmaps:
    """Return bitmaps of the positions of the candidates that hold each block, as a walk reads them."""
    words = max(1, -(-n_candidates // 64))
    bits = [0, *(sum(1 << position for position in positions) for positions in holders)]
    packed = b"".join(each.to_bytes(words * 8, "little") for each in bits)
    return np.arange(1, len(holders) + 1, dtype=np.int64), np.frombuffer(packed, dtype=np.int64).copy(), words


@pytest.mark.parametrize("seed", range(4))
def test_a_fact_that_was_added_several_times_goes_with_the_last_removal(seed: int) -> None:
    """Thousands of facts of hundreds of blocks, many in one segment, are added and removed in any order."""
    rng = random.Random(seed)
    sets, added = FactSets(), Counter[tuple[int, int]]()
    # Hashes with few different low and high bits collide in the map, and wrap around at the ends of its segments.
    blocks = [rng.getrandbits(4) << 56 | rng.getrandbits(7) | rng.getrandbits(3) << 20 for _ in range(300)]
    for step in range(6000):
        block, fact = rng.choice(blocks), rng.randrange(4)
        if rng.random() < (0.7 if step < 3000 else 0.35):
            sets.add_fact(block, fact)
            added[block, fact] += 1
        else:
            sets.remove_fact(block, fact)
            added[block, fact] -= added[block, fact] > 0
        if step % 500 == 0:
            for each in set(blocks):
                assert facts_of(sets, each) == {fact for fact in range(4) if added[each, fact]}
    assert len(sets) == len({block for (block, _), count in added.items() if count})
    for (block, fact), count in added.items():
        for _ in range(count):
            sets.remove_fact(block, fact)
    assert len(sets) == 0
    assert not any(facts_of(sets, block) for block in blocks)


def add_chain(rng: random.Random, sets: FactSets, sequence: list[int], n_ranks: int) -> list[set[int]]:
    """Add random facts to the blocks of a chain; stretches of blocks share them, and some blocks have none."""
    facts: list[set[int]] = []
    for block in sequence:
        fresh = {rng.randrange(n_ranks) for _ in range(rng.randrange(2 * n_ranks))} if rng.random() < 0.9 else set()
        facts.append(facts[-1] if facts and rng.random() < 0.6 else fresh)
        for fact in facts[-1]:
            sets.add_fact(block, fact)
    return facts


@pytest.mark.parametrize("n_ranks", [1, 3, 64, 65, 130])
def test_a_walk_covers_blocks_that_a_candidate_may_use_or_holds(n_ranks: int) -> None:
    """A walk ends at the first block that is neither, as a check of each single block shows."""
    rng = random.Random(n_ranks)
    numbers = numbers_of(n_ranks)
    for _ in range(60):
        n_blocks = rng.randrange(1, 40)
        sequence = [rng.getrandbits(64) for _ in range(n_blocks)]
        sets = FactSets()
        facts = add_chain(rng, sets, sequence, n_ranks)
        # The candidates are in random order, and one of them is not registered.
        candidates = [rank(n_ranks), *map(rank, rng.sample(range(n_ranks), rng.randrange(n_ranks) + 1))]
        in_order = Candidates(candidates)
        starts = np.array([rng.randrange(n_blocks + 1) for _ in candidates], dtype=np.int64)
        holding = [{n for n in range(len(candidates)) if rng.random() < 0.3} for _ in range(n_blocks)]
        found = query_of(sets, numbers).path(chain(*sequence))
        assert (found is None) == (not any(facts))
        if found is None:
            continue
        assert [row != 0 for row in found.rows()] == [bool(each) for each in facts]
        counted = []
        for position, candidate in enumerate(candidates):
            at, count = int(starts[position]), 0
            while at < n_blocks and (candidate.worker_id in facts[at] or position in holding[at]):
                count += candidate.worker_id in facts[at]
                at += 1
            counted.append(count)
        blocks = found.walk(in_order, starts, held_of(holding, len(candidates)))
        assert (blocks is None) == (not any(counted))
        assert blocks is None or blocks.tolist() == counted


@pytest.mark.parametrize("n_ranks", [1, 3, 64, 65, 130])
def test_both_kinds_of_matches_are_weighed_as_by_a_check_of_each_block(n_ranks: int) -> None:
    """The results are equal to the bit, with one kind or both, with cached masks, and after facts were removed."""
    rng = random.Random(n_ranks)
    numbers = numbers_of(n_ranks)
    n_counted = 0
    for _ in range(60):
        n_blocks = rng.randrange(1, 40)
        sequence = [rng.getrandbits(64) for _ in range(n_blocks)]
        chains = [(sets := FactSets(), add_chain(rng, sets, sequence, n_ranks)) for _ in range(2)]
        kinds = [(query_of(sets, numbers), facts) if rng.random() < 0.8 else None for sets, facts in chains]
        candidates = [rank(n_ranks), *map(rank, rng.sample(range(n_ranks), rng.randrange(n_ranks) + 1))]
        overlap = np.array([rng.randrange(n_blocks + 1) for _ in candidates], dtype=np.int64)
        effective: Float64Array = np.multiply(overlap, rng.random(), dtype=np.float64)
        for again in range(3):
            if again == 2:
                for sets, facts in chains:
                    at = rng.randrange(n_blocks)
                    for fact in facts[at]:
                        sets.remove_fact(sequence[at], fact)
                    facts[at] = set()
            masks = [None if kind is None else kind[0].masks() for kind in kinds]
            positions = numbers.of(Candidates(candidates))
            weighed = chains[0][0].weigh(masks[0], masks[1], chain(*sequence), positions, overlap, effective, 0.7, 0.3)
            pooled, labelled, ends = [], [], [n_blocks]
            for candidate, n_own in zip(candidates, overlap.tolist(), strict=True):
                reaches, matches = (
                    [] if kind is None else [candidate.worker_id in each for each in kind[1]] for kind in kinds
                )
                pooled.append(sum(1 for _ in itertools.takewhile(bool, reaches[n_own:])))
                labelled.append(sum(matches[:n_own]))
                if pooled[-1]:
                    ends.append(n_own + pooled[-1])
            assert (weighed.cxl_accessible_scores is None) == (not any(pooled))
            assert weighed.cxl_accessible_scores is None or weighed.cxl_accessible_scores.tolist() == pooled
            assert (weighed.moe_scores is None) == (not any(labelled))
            assert weighed.moe_scores is None or weighed.moe_scores.tolist() == labelled
            assert weighed.first_end == min(ends)
            for end in ends[1:]:
                assert end == n_blocks or (weighed.rows[end] == 0) == (not chains[0][1][end])
            with_pooled = effective + 0.7 * np.array(pooled)
            assert weighed.with_pooled.tolist() == with_pooled.tolist()
            assert weighed.with_both.tolist() == (with_pooled + 0.3 * np.array(labelled)).tolist()
            n_counted += sum(pooled) + sum(labelled)
    assert n_counted > 500


def test_a_mask_is_cached_until_the_fleet_changes() -> None:
    """When a set's number is reused for another set, the mask is evaluated again."""
    sets, made = FactSets(), list[frozenset[int]]()

    def answer(facts: frozenset[int]) -> int:
        made.append(facts)
        return 1

    def is_usable(numbers: RankNumbering) -> bool:
        return FactQuery(sets, "q", numbers, answer).path(chain(5)) is not None

    sets.add_fact(5, 1)
    one, other = numbers_of(1), numbers_of(1)
    assert is_usable(one)
    assert is_usable(one)
    assert len(made) == 1
    assert is_usable(other)
    assert len(made) == 2
    sets.invalidate_masks()
    assert is_usable(other)
    assert len(made) == 3
    sets.remove_fact(5, 1)
    assert not is_usable(other)
    sets.add_fact(5, 2)
    assert is_usable(other)
    assert made == [{1}, {1}, {1}, {2}]


def test_rows_of_ended_sets_are_dropped_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request adds at most one row per block to the limit, and paths that were looked up earlier do not change."""
    monkeypatch.setattr(fact_sets, "ROWS_MAX", 20)
    rng, sets, numbers = random.Random(1), FactSets(), numbers_of(64)
    query, n_begun, earlier = chain(5, 6, 7), 0, None
    fact_query = query_of(sets, numbers)
    candidates = Candidates([rank(number) for number in range(64)])
    nothing = np.zeros(64, dtype=np.int64)
    holds_nothing = held_of([set()] * 3, 64)
    kept: list[tuple[RequestPath, list[int]]] = []
    for _ in range(300):
        added = [set(rng.sample(range(64), 8)) for _ in range(3)]
        for block, facts in zip(query.tolist(), added, strict=True):
            for fact in facts:
                sets.add_fact(block, fact)
        masks = fact_query.masks()
        n_begun += masks is not earlier
        earlier = masks
        expected = [len(list(itertools.takewhile(lambda facts: number in facts, added))) for number in range(64)]  # noqa: B023
        weighed = sets.weigh(masks, None, query, numbers.of(candidates), nothing, nothing.astype(np.float64), 1.0, 0.0)
        assert weighed.cxl_accessible_scores is not None
        assert weighed.cxl_accessible_scores.tolist() == expected
        assert masks.n_rows <= 20 + 3
        path = fact_query.path(query)
        assert path is not None
        kept.append((path, expected))
        for block, facts in zip(query.tolist(), added, strict=True):
            for fact in facts:
                sets.remove_fact(block, fact)
    assert len(sets) == 0
    assert n_begun > 10
    for path, expected in kept:
        counts = path.walk(candidates, nothing, holds_nothing)
        assert counts is not None
        assert counts.tolist() == expected


@pytest.mark.thorough
def test_as_many_sets_fit_as_the_limit_allows() -> None:
    """The last set works like the first, and one more set is refused."""
    sets, ranks = FactSets(), numbers_of(2)
    blocks = [number * 0x9E37_79B9_7F4A_7C15 % 2**64 for number in range(1, fact_sets.SETS_MAX + 2)]
    for fact, block in enumerate(blocks[:-1]):
        sets.add_fact(block, fact)
    with pytest.raises(IndexFull):
        sets.add_fact(blocks[-1], fact_sets.SETS_MAX)
    assert len(sets) == fact_sets.SETS_MAX == 1_048_576
    path = FactQuery(sets, "q", ranks, lambda facts: 1 if facts & {0, fact_sets.SETS_MAX - 1} else 2).path(
        chain(blocks[0], blocks[1], *blocks[-2:])
    )
    assert path is not None
    first, second, last, refused = path.rows().tolist()
    assert first == last != second
    assert refused == 0


def test_a_new_set_beyond_the_limit_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal always succeeds, and frees space for another set."""
    monkeypatch.setattr(fact_sets.FactSets._number_of, "__defaults__", (3,))
    sets = FactSets()
    for block in range(3):
        sets.add_fact(block, block)
    sets.add_fact(9, 2)
    with pytest.raises(IndexFull):
        sets.add_fact(2, 7)
    assert facts_of(sets, 2) == {2}
    sets.remove_fact(0, 0)
    sets.add_fact(2, 7)
    assert facts_of(sets, 2) == {2, 7}
    sets.remove_fact(2, 2)
    assert facts_of(sets, 2) == {7}

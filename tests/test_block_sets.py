"""Facts of blocks: both maps against counters of every fact told, and walks against a walk of every block."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from streams.core import block_sets
from streams.core.block_sets import BlockSets, BlockSetTable, Held, Path, PlainBlockSets, RankNumbers
from streams.core.ids import DpRank, HashArray, RankId, WorkerId
from streams.core.index import RankPlaces
from streams.errors import IndexFull

SETS: list[type[BlockSets]] = [PlainBlockSets, BlockSetTable]


def rank(number: int) -> RankId:
    return RankId(WorkerId(number), DpRank(0))


def chain(*blocks: int) -> HashArray:
    return np.array(blocks, dtype=np.uint64)


def numbers_of(n: int) -> RankNumbers:
    return RankNumbers(tuple(rank(number) for number in range(n)))


def path(sets: BlockSets, sequence: HashArray, numbers: RankNumbers, question: str = "q") -> Path | None:
    """Fact f may be counted by the rank numbered f."""
    return sets.path(sequence, question, numbers, lambda facts: sum(1 << fact for fact in facts))


def held_of(told: list[set[int]], n_candidates: int) -> Held:
    """Positions of the candidates that hold each block, as a walk reads them."""
    words = max(1, -(-n_candidates // 64))
    bits = [0, *(sum(1 << position for position in positions) for positions in told)]
    packed = b"".join(each.to_bytes(words * 8, "little") for each in bits)
    return np.arange(1, len(told) + 1, dtype=np.int64), np.frombuffer(packed, dtype=np.int64).copy(), words


@pytest.mark.parametrize("make", SETS)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_told_again_goes_with_the_last(make: type[BlockSets], seed: int) -> None:
    """Thousands of facts of hundreds of blocks, some of them in one segment, told and taken back in any order."""
    rng = random.Random(seed)
    sets, told = make(), Counter[tuple[int, int]]()
    # Hashes with few different low and high bits: they meet in the map, and go round its segments' ends.
    blocks = [rng.getrandbits(4) << 56 | rng.getrandbits(7) | rng.getrandbits(3) << 20 for _ in range(300)]
    for step in range(6000):
        block, fact = rng.choice(blocks), rng.randrange(4)
        if rng.random() < (0.7 if step < 3000 else 0.35):
            sets.tell(block, fact)
            told[block, fact] += 1
        else:
            sets.take_back(block, fact)
            told[block, fact] -= told[block, fact] > 0
        if step % 500 == 0:
            for each in set(blocks):
                assert sets.facts_of(each) == {fact for fact in range(4) if told[each, fact]}
    assert len(sets) == len({block for (block, _), count in told.items() if count})
    for (block, fact), count in told.items():
        for _ in range(count):
            sets.take_back(block, fact)
    assert len(sets) == 0
    assert not any(sets.facts_of(block) for block in blocks)


@pytest.mark.parametrize("make", SETS)
@pytest.mark.parametrize("n_ranks", [1, 3, 64, 65, 130])
def test_walks_and_counts_are_those_of_a_walk_of_every_block(make: type[BlockSets], n_ranks: int) -> None:
    """On over what a candidate may count and what it holds, to the first block that is neither."""
    rng = random.Random(n_ranks)
    numbers = numbers_of(n_ranks)
    for _ in range(60):
        n_blocks = rng.randrange(1, 40)
        sequence = [rng.getrandbits(64) for _ in range(n_blocks)]
        sets = make()
        facts: list[set[int]] = []
        for block in sequence:
            fresh = {rng.randrange(n_ranks) for _ in range(rng.randrange(2 * n_ranks))} if rng.random() < 0.9 else set()
            facts.append(facts[-1] if facts and rng.random() < 0.6 else fresh)
            for fact in facts[-1]:
                sets.tell(block, fact)
        # Candidates in an order of their own, one of them nobody that is registered.
        candidates = [rank(n_ranks), *map(rank, rng.sample(range(n_ranks), rng.randrange(n_ranks) + 1))]
        places = RankPlaces(candidates)
        starts = np.array([rng.randrange(n_blocks + 1) for _ in candidates], dtype=np.int64)
        holding = [{n for n in range(len(candidates)) if rng.random() < 0.3} for _ in range(n_blocks)]
        found = path(sets, chain(*sequence), numbers)
        assert (found is None) == (not any(facts))
        if found is None:
            continue
        for held in (None, held_of(holding, len(candidates))):
            blocks, ends, first = found.walk(places, starts, held)
            assert first == min([end for end, count in zip(ends, blocks, strict=True) if count], default=n_blocks)
            for position, candidate in enumerate(candidates):
                at, count = int(starts[position]), 0
                while at < n_blocks:
                    if candidate.worker_id in facts[at]:
                        count += 1
                    elif held is None or position not in holding[at]:
                        break
                    at += 1
                assert (blocks[position], ends[position]) == (count, at)
        within = found.count_within(places, starts)
        assert within.tolist() == [
            sum(candidate.worker_id in facts[at] for at in range(starts[position]))
            for position, candidate in enumerate(candidates)
        ]


@pytest.mark.parametrize("make", SETS)
def test_an_answer_is_kept_until_the_fleet_changes(make: type[BlockSets]) -> None:
    """And a set's number that becomes another set's is asked anew."""
    sets, asked = make(), list[frozenset[int]]()

    def answer(facts: frozenset[int]) -> int:
        asked.append(facts)
        return 1

    def look(numbers: RankNumbers) -> bool:
        return sets.path(chain(5), "q", numbers, answer) is not None

    sets.tell(5, 1)
    one, other = numbers_of(1), numbers_of(1)
    assert look(one)
    assert look(one)
    assert len(asked) == 1
    assert look(other)
    assert len(asked) == 2
    sets.forget_answers()
    assert look(other)
    assert len(asked) == 3
    sets.take_back(5, 1)
    assert not look(other)
    sets.tell(5, 2)
    assert look(other)
    assert asked == [{1}, {1}, {1}, {2}]


@pytest.mark.parametrize("make", SETS)
def test_beyond_the_limit_a_new_set_is_refused_and_nothing_changes(
    make: type[BlockSets], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends always finds room, and makes some."""
    monkeypatch.setattr(block_sets.BlockSets._number_of, "__defaults__", (3,))
    sets = make()
    for block in range(3):
        sets.tell(block, block)
    sets.tell(9, 2)
    with pytest.raises(IndexFull):
        sets.tell(2, 7)
    assert sets.facts_of(2) == {2}
    sets.take_back(0, 0)
    sets.tell(2, 7)
    assert sets.facts_of(2) == {2, 7}
    sets.take_back(2, 2)
    assert sets.facts_of(2) == {7}

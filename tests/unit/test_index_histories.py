"""Long seeded histories: the index and the fold give the same answers as the reference."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.events import BlocksRemoved, BlocksStored
from streams.core.ids import DpRank, EngineHash, HashArray, RankId, Tier, WorkerId
from tests import soak
from tests.helpers.folded_index import FoldedIndex, UnknownParent
from tests.helpers.reference_index import IndexHistory, ReferenceIndex
from tests.soak import HISTORY_OPERATIONS, Differs, play, play_fold

#: Together 200,000 operations, at about 60 microseconds each.
N_HISTORIES = 100
HISTORIES_PER_TEST = 10


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.thorough if first else ())
        for first in range(0, N_HISTORIES, HISTORIES_PER_TEST)
    ],
)
def test_an_index_answers_like_the_reference(first: int) -> None:
    """Stores, removals, clears, removed ranks and queries in any order agree, also after a start from the records."""
    for seed in range(first, first + HISTORIES_PER_TEST):
        play(seed)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(N_HISTORIES, 1 << 62), n_operations=st.integers(1, 60))
def test_an_index_answers_like_the_reference_in_short_histories(seed: int, n_operations: int) -> None:
    """Histories of up to 60 operations agree for any seed; a failure here is short enough to read."""
    play(seed, n_operations)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(4, 24, 4))])
def test_a_fold_reaches_the_reference_state(first: int) -> None:
    """A fold agrees for records in log order, twice, shuffled, repeated, or without records lost to compaction."""
    for seed in range(first, first + 4):
        play_fold(seed)


def test_histories_contain_the_difficult_cases() -> None:
    """In the histories, more than 256 ranks hold one block, and every kind of refusal, tier and answer occurs."""
    most_holders, unknown_parents, unknown_removals, tiered = 0, 0, 0, 0
    for seed in range(40):
        history = IndexHistory(random.Random(seed))
        for step in history.steps(400):
            unknown_parents += step.expected is False
            unknown_removals += type(step.expected) is int and step.expected > 0
            tiered += bool(getattr(step.expected, "by_tier", None))
        most_holders = max(most_holders, *map(len, history.reference.holders.values()), 0)
    assert most_holders > 256
    assert min(unknown_parents, unknown_removals, tiered) > 100


class _AcceptsAnyParent(FoldedIndex):
    """A faulty index: stores blocks with an unknown parent at the root."""

    def store(self, rank, tier, parent, engine, local):  # type: ignore[no-untyped-def]
        try:
            super().store(rank, tier, parent, engine, local)
        except UnknownParent:
            super().store(rank, tier, None, engine, local)


def test_a_difference_is_reported_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a difference, the soak returns 1 and prints the command that repeats the history."""
    play_faulty = partial(play, make_index=_AcceptsAnyParent)
    with pytest.raises(Differs, match="seed 3, operation"):
        play_faulty(3)
    monkeypatch.setattr(soak, "play", play_faulty)
    assert soak.main(["--operations", "1", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "--seed 3" in printed and "_AcceptsAnyParent" in printed


def test_a_soak_without_a_difference_returns_0(capsys: pytest.CaptureFixture[str]) -> None:
    """A soak without a difference prints the first and the last seed."""
    assert soak.main(["--operations", str(HISTORY_OPERATIONS), "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "first seed 7" in printed and "no difference in seeds 7 to 7" in printed


def _names(rng: random.Random, n_blocks: int, n_names: int) -> HashArray:
    """A few different names, with or without repetitions, so that names often move from block to block."""
    if rng.random() < 0.5:
        return np.array([rng.randint(1, n_names) for _ in range(n_blocks)], dtype=np.uint64)
    return np.array(rng.sample(range(1, n_names + 31), min(n_blocks, n_names)), dtype=np.uint64)


@pytest.mark.parametrize("seed", range(6))
def test_an_index_agrees_when_names_move_between_blocks(seed: int) -> None:
    """The index and the reference agree when names move to later blocks of one event, back, and between tiers."""
    rng = random.Random(seed)
    reference, index = ReferenceIndex(), FoldedIndex()
    n_names = rng.choice((6, 12, 40))
    prompts = [np.array([rng.randint(1, 2) for _ in range(30)], dtype=np.uint64) for _ in range(4)]
    for number in range(300):
        rank, tier = RankId(WorkerId(rng.randrange(3)), DpRank(0)), Tier(rng.choice((0, 0, 0, 1)))
        if rng.random() < 0.65:
            names = _names(rng, rng.randint(1, 30), n_names)
            local = rng.choice(prompts)[: len(names)]
            parent = EngineHash(rng.randint(1, n_names)) if rng.random() < 0.4 else None
            accepted = reference.store(rank, BlocksStored(parent, names, local, tier))
            try:
                index.store(rank, tier, parent, names, local)
            except UnknownParent:
                assert not accepted, number
            else:
                assert accepted, number
        else:
            names = _names(rng, rng.randint(1, 10), n_names)
            unknown = reference.remove(rank, BlocksRemoved(names, tier))
            assert index.remove(rank, tier, names) == unknown, number
        assert sorted(index.members()) == sorted(reference.members()), number
        for prompt in prompts:
            answer = index.find_matches(prompt)
            assert (answer.scores, answer.by_tier) == reference.find_matches(prompt.tolist()), number
    index.check()


@pytest.mark.parametrize("n_operations", ["0", "-5"])
def test_a_soak_without_operations_is_refused(n_operations: str) -> None:
    """A soak of fewer than one operation would never find a difference, so it exits with 2."""
    with pytest.raises(SystemExit) as caught:
        soak.main(["--operations", n_operations])
    assert caught.value.code == 2

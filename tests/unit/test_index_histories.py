"""Every index and every fold agrees with the reference on long seeded histories, on every answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.ids import DpRank, EngineHash, HashArray, RankId, Tier, WorkerId
from streams.core.index.plain_index import PlainPrefixIndex
from streams.core.index.run_tree import RunTreeIndex
from streams.errors import UnknownParent
from tests import soak
from tests.helpers.reference import IndexHistory
from tests.soak import FOLDS, HISTORY_OPERATIONS, INDEXES, Differs, play, play_fold

#: The plain index is not what is fast here: it plays every so manieth history, unless there is no other.
PLAIN_EVERY = 4

#: Together 200,000 operations, at some 60 microseconds each.
N_HISTORIES = 100
HISTORIES_PER_TEST = 10


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.thorough if first else ())
        for first in range(0, N_HISTORIES, HISTORIES_PER_TEST)
    ],
)
def test_every_index_answers_as_the_reference(first: int) -> None:
    """Stores, removals, clears, departures and queries in any order; a dump of what is left gives an equal index."""
    for seed in range(first, first + HISTORIES_PER_TEST):
        plain = seed % PLAIN_EVERY == 0 or len(INDEXES) == 1
        play(seed, [make for make in INDEXES if plain or make is not PlainPrefixIndex])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(N_HISTORIES, 1 << 62), n_operations=st.integers(1, 60))
def test_short_histories_of_any_seed_do_too(seed: int, n_operations: int) -> None:
    """What fails here is short enough to read."""
    play(seed, INDEXES, n_operations)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(4, 24, 4))])
def test_every_fold_reaches_the_reference_state(first: int) -> None:
    """Run records along the log, all of it twice, permuted, repeated, or with what compaction took away missing."""
    for seed in range(first, first + 4):
        play_fold(seed, FOLDS)


def test_histories_hold_what_is_hard() -> None:
    """More than 256 ranks hold one block, and every kind of refusal, tier and answer comes up."""
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


class _Forgetful(PlainPrefixIndex):
    """Takes blocks behind any parent."""

    def store(self, rank, tier, parent, names, local):  # type: ignore[no-untyped-def]
        try:
            super().store(rank, tier, parent, names, local)
        except UnknownParent:
            super().store(rank, tier, None, names, local)


@pytest.fixture
def forgetful() -> Iterator[None]:
    soak.INDEXES.append(_Forgetful)
    yield
    soak.INDEXES.remove(_Forgetful)


def test_a_difference_is_told_with_its_seed(forgetful: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The soak ends with 1 and says how to play the history again."""
    with pytest.raises(Differs, match="seed 3, operation"):
        play(3, [_Forgetful])
    assert soak.main(["--operations", "1", "--seed", "3"]) == 1
    told = capsys.readouterr().out
    assert "--seed 3" in told and "_Forgetful" in told


def test_a_soak_without_a_difference_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    """It says where it began, and where it ended."""
    assert soak.main(["--operations", str(HISTORY_OPERATIONS), "--seed", "7"]) == 0
    told = capsys.readouterr().out
    assert "first seed 7" in told and "no difference in seeds 7 to 7" in told


def _names(rng: random.Random, n_blocks: int, n_names: int) -> HashArray:
    """Names of which some come twice, or names that differ, drawn from few: they move about all the time."""
    if rng.random() < 0.5:
        return np.array([rng.randint(1, n_names) for _ in range(n_blocks)], dtype=np.uint64)
    return np.array(rng.sample(range(1, n_names + 31), min(n_blocks, n_names)), dtype=np.uint64)


@pytest.mark.parametrize("seed", range(6))
def test_names_that_move_about_mean_the_same_to_both_indexes(seed: int) -> None:
    """Few names, few tokens, few ranks: names move to later blocks of the same event, back, and between tiers."""
    rng = random.Random(seed)
    plain, tree = PlainPrefixIndex(), RunTreeIndex()
    n_names = rng.choice((6, 12, 40))
    prompts = [np.array([rng.randint(1, 2) for _ in range(30)], dtype=np.uint64) for _ in range(4)]
    for number in range(300):
        rank, tier = RankId(WorkerId(rng.randrange(3)), DpRank(0)), Tier(rng.choice((0, 0, 0, 1)))
        if rng.random() < 0.65:
            names = _names(rng, rng.randint(1, 30), n_names)
            local = rng.choice(prompts)[: len(names)]
            parent = EngineHash(rng.randint(1, n_names)) if rng.random() < 0.4 else None
            refused = []
            for index in (plain, tree):
                try:
                    index.store(rank, tier, parent, names, local)
                except UnknownParent:
                    refused.append(index)
            assert len(refused) != 1, number
        else:
            names = _names(rng, rng.randint(1, 10), n_names)
            assert tree.remove(rank, tier, names) == plain.remove(rank, tier, names), number
        assert sorted(tree.members()) == sorted(plain.members()), number
        assert all(tree.find_matches(prompt) == plain.find_matches(prompt) for prompt in prompts), number
    tree.check()


@pytest.mark.parametrize("n_operations", ["0", "-5"])
def test_a_soak_of_no_operations_is_refused(n_operations: str) -> None:
    """It would find no difference."""
    with pytest.raises(SystemExit) as caught:
        soak.main(["--operations", n_operations])
    assert caught.value.code == 2

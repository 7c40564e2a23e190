"""Every index and every fold agrees with the reference on long seeded histories, on every answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.plain_index import PlainPrefixIndex
from streams.errors import UnknownParent
from tests import soak
from tests.reference import IndexHistory
from tests.soak import FOLDS, HISTORY_OPERATIONS, INDEXES, Differs, play, play_fold

#: The plain index is not what is fast here: it plays every so manieth history, unless there is no other.
PLAIN_EVERY = 4

#: Together 200,000 operations, at some 60 microseconds each.
N_HISTORIES = 100
HISTORIES_A_TEST = 10


@pytest.mark.parametrize("first", range(0, N_HISTORIES, HISTORIES_A_TEST))
def test_every_index_answers_as_the_reference(first: int) -> None:
    """Stores, removals, clears, departures and queries in any order; a dump of what is left gives an equal index."""
    for seed in range(first, first + HISTORIES_A_TEST):
        plain = seed % PLAIN_EVERY == 0 or len(INDEXES) == 1
        play(seed, [make for make in INDEXES if plain or make is not PlainPrefixIndex])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(N_HISTORIES, 1 << 62), n_operations=st.integers(1, 60))
def test_short_histories_of_any_seed_do_too(seed: int, n_operations: int) -> None:
    """What fails here is short enough to read."""
    play(seed, INDEXES, n_operations)


@pytest.mark.parametrize("first", range(0, 24, 4))
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

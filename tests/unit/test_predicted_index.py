"""The index of predictions: expiry, pruning and answers, compared with a brute-force reference."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import local_hashes
from streams.core.ids import U32_MAX, DpRank, HashArray, RankId, Tier, WorkerId
from streams.core.index.predicted_index import TTL_S, PredictedPrefixIndex
from streams.errors import BlockSizeMismatch, InvalidEvent, InvalidRequest, SettingsError
from tests.helpers.invariants import check, predicted
from tests.helpers.reference import Member, chain_hashes, overlap_of

A, B = (RankId(WorkerId(worker), DpRank(0)) for worker in (1, 2))


def u64(*values: int) -> HashArray:
    return np.array(values, dtype=np.uint64)


class ReferencePredictions:
    """The brute-force reference: for each block the time and number of its last prediction, and its position in it."""

    def __init__(self, ttl_s: float, blocks_max: int, prune_target: float) -> None:
        self._ttl_s, self._blocks_max, self._kept = ttl_s, blocks_max, max(1, int(blocks_max * prune_target))
        self._n_predictions, self._now_s = 0, -math.inf
        self.of: dict[tuple[RankId, int], tuple[float, int, int]] = {}

    def predict(self, rank: RankId, local: list[int], now_s: float) -> None:
        self.expire(now_s)
        self._n_predictions += 1
        for position, block in enumerate(chain_hashes(local)):
            self.of[rank, block] = (self._now_s, self._n_predictions, -position)
        if len(self.of) > self._blocks_max:
            newest = sorted(self.of, key=lambda entry: self.of[entry], reverse=True)[: self._kept]
            self.of = {entry: self.of[entry] for entry in newest}

    def expire(self, now_s: float) -> int:
        self._now_s = max(self._now_s, now_s)
        before = len(self.of)
        self.of = {entry: at for entry, at in self.of.items() if self._now_s - at[0] < self._ttl_s}
        return before - len(self.of)

    def remove_rank(self, rank: RankId) -> None:
        self.of = {entry: at for entry, at in self.of.items() if entry[0] != rank}

    def members(self) -> set[Member]:
        return {(rank, Tier.DEVICE, block) for rank, block in self.of}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 62))
def test_random_predictions_agree_with_the_reference(seed: int) -> None:
    """Predictions, late times, removed ranks and limits leave the same blocks as in the reference, without holes."""
    rng = random.Random(seed)
    limits = rng.choice((5.0, 60.0)), rng.choice((1, 7, 40, 1000)), rng.choice((0.1, 0.8, 1.0))
    index, reference = PredictedPrefixIndex(*limits), ReferencePredictions(*limits)
    ranks = [RankId(WorkerId(worker), DpRank(0)) for worker in range(rng.choice((1, 3, 9)))]
    now_s = 100.0
    for _ in range(rng.randint(1, 60)):
        now_s += rng.choice((0.0, 0.0, 0.5, 5.0, -0.5, 31.0))
        rank, local = rng.choice(ranks), [rng.randrange(3) for _ in range(rng.randint(0, 12))]
        action = rng.random()
        if action < 0.8:
            index.predict(rank, u64(*local), now_s)
            reference.predict(rank, local, now_s)
        elif action < 0.95:
            assert index.expire(now_s) == reference.expire(now_s)
        else:
            index.clear(rank)
            reference.remove_rank(rank)
        check(index)
        facts = reference.members()
        assert {(holder, Tier.DEVICE, block) for holder, block in predicted(index)} == facts
        assert len(index) == len(facts)
        asked = [rng.randrange(3) for _ in range(12)]
        answer = index.find_matches(u64(*asked))
        assert (answer.scores, answer.by_tier) == (overlap_of(facts, asked), {})
        assert overlap_of(facts, local).get(rank, 0) == sum(
            (rank, Tier.DEVICE, block) in facts for block in chain_hashes(local)
        )


@pytest.mark.parametrize(("age_s", "score"), [(0.0, 2), (TTL_S - 1e-6, 2), (TTL_S, 0), (TTL_S + 1, 0)])
def test_a_prediction_expires_after_its_ttl(age_s: float, score: int) -> None:
    """A prediction is removed exactly `ttl_s` after it was made."""
    index = PredictedPrefixIndex()
    index.predict(A, u64(1, 2), 0.0)
    assert index.expire(age_s) == 2 - score
    assert index.find_matches(u64(1, 2)).max_score == score


def test_a_repeated_prediction_renews_only_its_own_blocks() -> None:
    """Blocks after the end of the repeated prediction keep their older time."""
    index = PredictedPrefixIndex(ttl_s=10.0)
    index.predict(A, u64(1, 2, 3), 0.0)
    index.predict(A, u64(1, 2), 9.0)
    index.predict(B, u64(1), 10.0)
    assert index.find_matches(u64(1, 2, 3)).scores == {A: 2, B: 1}


def test_an_earlier_time_does_not_turn_back_the_clock() -> None:
    """A prediction with an earlier time than one passed before gets the latest time."""
    index = PredictedPrefixIndex(ttl_s=10.0)
    index.expire(100.0)
    index.predict(A, u64(1), 95.0)
    assert index.expire(109.0) == 0
    assert index.expire(110.0) == 1


@pytest.mark.parametrize(("n_blocks", "kept"), [(9, 9), (10, 10), (11, 8), (30, 8)])
def test_beyond_its_limit_an_index_keeps_the_newest_blocks_and_their_prefixes(n_blocks: int, kept: int) -> None:
    """Pruning keeps four fifths of the limit, and the beginning of a prediction that is longer than that."""
    index = PredictedPrefixIndex(blocks_max=10)
    index.predict(A, u64(*range(n_blocks)), 0.0)
    assert index.find_matches(u64(*range(n_blocks))).scores == {A: kept}
    assert len(index) == kept


def test_the_oldest_predictions_of_all_ranks_are_pruned_first() -> None:
    """Pruning ignores ranks, and treats a repeated prediction as new."""
    index = PredictedPrefixIndex(blocks_max=10)
    index.predict(A, u64(1, 2, 3, 4), 0.0)
    index.predict(B, u64(1, 2, 3, 4), 1.0)
    index.predict(A, u64(1, 2, 3, 4), 1.0)
    index.predict(B, u64(7, 8, 9), 1.0)
    assert index.find_matches(u64(1, 2, 3, 4)).scores == {A: 4, B: 1}
    assert index.find_matches(u64(7, 8, 9)).scores == {B: 3}


def test_a_request_is_hashed_before_it_is_matched() -> None:
    """A request is hashed with the given block size, as in every index."""
    index, tokens = PredictedPrefixIndex(), list(range(40))
    index.predict(A, local_hashes(tokens, 16), 0.0)
    assert index.find_matches(local_hashes(tokens, 16)).scores == {A: 2}
    assert index.find_matches(local_hashes(tokens, 8)).scores == {}
    with pytest.raises(BlockSizeMismatch):
        local_hashes(tokens, 0)
    bad: Any = [1, 2]
    with pytest.raises(InvalidRequest):
        index.find_matches(bad)


@pytest.mark.parametrize(
    ("rank", "local", "now_s"),
    [
        (RankId(WorkerId(-1), DpRank(0)), u64(1), 1.0),
        (RankId(WorkerId(1), DpRank(U32_MAX + 1)), u64(1), 1.0),
        (A, np.array([1, 2]), 1.0),
        (A, np.array([1.0]), 1.0),
        (A, [1], 1.0),
        (A, u64(1), math.nan),
        (A, u64(1), math.inf),
        (A, u64(1), "1"),
        (A, u64(1), None),
        (A, u64(1), True),
        ((1, 0), u64(1), 1.0),
        (1, u64(1), 1.0),
        (None, u64(1), 1.0),
    ],
)
def test_an_invalid_prediction_changes_nothing(rank: RankId, local: Any, now_s: float) -> None:
    """Invalid ranks, hashes and times raise InvalidEvent and leave the index unchanged."""
    index = PredictedPrefixIndex()
    index.predict(B, u64(5), 0.0)
    with pytest.raises(InvalidEvent):
        index.predict(rank, local, now_s)
    assert predicted(index) == {(B, 5)}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ttl_s", (0.0, -1.0, math.nan, math.inf, "120", None, True)),
        ("blocks_max", (0, -1, 2.5, math.nan, "9", None, True)),
        ("prune_target", (0.0, -0.5, 1.1, math.nan, math.inf, "0.8", None, True)),
    ],
)
def test_invalid_limits_are_refused(name: str, values: tuple[Any, ...]) -> None:
    """Invalid limits raise SettingsError, whose message begins with the argument's name."""
    for value in values:
        with pytest.raises(SettingsError, match=f"^{name} is "):
            PredictedPrefixIndex(**{name: value})


@pytest.mark.parametrize("rank", [(1, 0), 1, None, RankId(WorkerId(-1), DpRank(0))], ids=str)
def test_only_a_rank_can_be_cleared(rank: Any) -> None:
    """Clearing anything but a valid RankId raises InvalidEvent."""
    index = PredictedPrefixIndex()
    index.predict(A, u64(5), 0.0)
    with pytest.raises(InvalidEvent):
        index.clear(rank)
    assert len(index) == 1

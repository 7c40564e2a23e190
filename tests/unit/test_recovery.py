"""What a bridge remembers of a worker is what the agents will make of the same records."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from streams.core.events import BEFORE_FIRST, AllBlocksCleared, EngineBatch, EngineEvents, Heartbeat, WorkerRemoved
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank, fold_removal
from tests.helpers.reference import ReferenceFleet, random_history

RANKS = [RankId(WorkerId(7), DpRank(n)) for n in range(2)]


def batch(rank: RankId, sequence: int) -> EngineBatch:
    return EngineBatch(rank, "m", 16, Incarnation(1), sequence, 0, 0, EngineEvents(()))


def recovered_ranks(*, silent: bool) -> list[RecoveredRank]:
    """Two ranks of one worker that have come to different batches."""
    return [
        RecoveredRank(Progress(rank, Epoch(Incarnation(1), 0), 10 - rank.dp_rank, silent=silent), Ledger(False))
        for rank in RANKS
    ]


def expiry(seen: int) -> EngineBatch:
    return replace(batch(RANKS[0], 0), body=WorkerRemoved("silent", seen))


def test_an_expiry_ends_every_rank_of_a_silent_worker_though_it_names_the_progress_of_one() -> None:
    """The others stand at other batches, of which it says nothing."""
    ranks = recovered_ranks(silent=True)
    fold_removal(ranks, expiry(10), 10)
    assert [(rank.is_removed, rank.known_incarnation.sequence) for rank in ranks] == [(True, BEFORE_FIRST)] * 2


@pytest.mark.parametrize("late", ["not silent", "gone on", "one was heard of"])
def test_an_expiry_that_comes_too_late_ends_no_rank(late: str) -> None:
    """A worker goes as a whole or stays."""
    ranks = recovered_ranks(silent=late != "not silent")
    if late == "one was heard of":
        ranks[1].fold(replace(batch(RANKS[1], 9), body=Heartbeat("b", 1000)))
    fold_removal(ranks, expiry(10), 9 if late == "gone on" else 10)
    assert [rank.is_removed for rank in ranks] == [False, False]


def test_a_heartbeat_brings_an_expired_rank_back_and_no_other() -> None:
    """As agents do; what was deleted stays so until a life begins."""
    for seen, is_removed in ((10, False), (None, True)):
        ranks = recovered_ranks(silent=True)
        fold_removal(ranks, expiry(10), seen)
        ranks[0].fold(replace(batch(RANKS[0], 10), body=Heartbeat("b", 1000)))
        assert ranks[0].is_removed is is_removed and ranks[1].is_removed
    ranks[0].fold(batch(RANKS[0], BEFORE_FIRST))
    assert not ranks[0].is_removed and ranks[0].progress.health is Health.EXACT


@pytest.mark.parametrize("seed", range(8))
def test_any_history_leaves_each_rank_in_the_life_and_at_the_batch_where_agents_have_it(seed: int) -> None:
    """Gaps, repeats, restatements, heartbeats, new lives, removals."""
    told, known = ReferenceFleet(), dict[RankId, RecoveredRank]()
    for each in random_history(random.Random(seed), 400, 6, begins=True, bridged=True):
        told.apply(each)
        if isinstance(each.body, WorkerRemoved):
            ranks = [recovered for rank, recovered in known.items() if rank.worker_id == each.rank.worker_id]
            fold_removal(ranks, each, each.body.seen_sequence)
            continue
        never = Progress(each.rank, Epoch(Incarnation(0), 0))
        known.setdefault(each.rank, RecoveredRank(never, Ledger(False))).fold(each)
        for rank, recovered in known.items():
            truth = told.ranks[rank]
            assert (recovered.is_removed, recovered.incarnation, recovered.sequence) == (
                truth.removed,
                truth.epoch.incarnation,
                truth.sequence,
            )


def test_a_ledger_lacks_what_a_heartbeat_tells_of_until_the_engine_clears() -> None:
    """And again when another one is lost behind the clear."""
    rank, _ = recovered_ranks(silent=False)
    clear = replace(batch(RANKS[0], 0), body=EngineEvents((AllBlocksCleared(),)))
    for number in (12, 14):
        rank.fold(replace(batch(RANKS[0], number), body=Heartbeat("b", 1000)))
        assert not rank.ledger.complete
        rank.fold(replace(clear, sequence=number + 1))
        assert rank.ledger.complete

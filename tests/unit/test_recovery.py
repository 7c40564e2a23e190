"""A bridge that starts folds a worker's records into the state that the agents reach from the same records."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlocksStored,
    EngineBatch,
    EngineEvents,
    Heartbeat,
    WorkerRemoved,
)
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank, fold_removal
from tests.helpers.plain_run_store import plain_holdings
from tests.helpers.reference import ReferenceFleet, random_history

RANKS = [RankId(WorkerId(7), DpRank(n)) for n in range(2)]


def batch(rank: RankId, sequence: int) -> EngineBatch:
    return EngineBatch(rank, "m", 16, Incarnation(1), sequence, 0, 0, EngineEvents(()))


def recovered_ranks(*, silent: bool) -> list[RecoveredRank]:
    """Two ranks of one worker whose last batches have different numbers."""
    return [
        RecoveredRank(Progress(rank, Epoch(Incarnation(1), 0), 10 - rank.dp_rank, silent=silent), Ledger(False))
        for rank in RANKS
    ]


def stored() -> BlocksStored:
    return BlocksStored(None, np.array([11], dtype=np.uint64), np.array([5], dtype=np.uint64))


def expiry(seen: int) -> EngineBatch:
    return replace(batch(RANKS[0], 0), body=WorkerRemoved("silent", seen))


def test_an_expiry_removes_every_rank_of_a_silent_worker() -> None:
    """An expiry names the progress of one rank only; the other ranks are at other batches and are removed as well."""
    ranks = recovered_ranks(silent=True)
    fold_removal(ranks, expiry(10), 10)
    assert [(rank.is_removed, rank.known_incarnation.sequence) for rank in ranks] == [(True, BEFORE_FIRST)] * 2


@pytest.mark.parametrize("why_late", ["not silent", "a later batch", "one rank was heard from"])
def test_an_expiry_that_comes_too_late_removes_no_rank(why_late: str) -> None:
    """A worker is removed as a whole or not at all."""
    ranks = recovered_ranks(silent=why_late != "not silent")
    if why_late == "one rank was heard from":
        ranks[1].fold(replace(batch(RANKS[1], 9), body=Heartbeat("b", 1000)))
    fold_removal(ranks, expiry(10), 9 if why_late == "a later batch" else 10)
    assert [rank.is_removed for rank in ranks] == [False, False]


def test_a_heartbeat_brings_an_expired_rank_back_and_no_other() -> None:
    """A rank that an operator removed stays removed until an incarnation begins."""
    for seen, is_removed in ((10, False), (None, True)):
        ranks = recovered_ranks(silent=True)
        fold_removal(ranks, expiry(10), seen)
        ranks[0].fold(replace(batch(RANKS[0], 10), body=Heartbeat("b", 1000)))
        assert ranks[0].is_removed is is_removed and ranks[1].is_removed
    ranks[0].fold(batch(RANKS[0], BEFORE_FIRST))
    assert not ranks[0].is_removed and ranks[0].progress.health is Health.EXACT


@pytest.mark.parametrize("seed", range(8))
def test_any_history_leaves_each_rank_in_the_incarnation_and_at_the_batch_that_agents_have(seed: int) -> None:
    """The histories contain gaps, repetitions, restatements, heartbeats, new incarnations and removals."""
    fleet, known = ReferenceFleet(), dict[RankId, RecoveredRank]()
    for each in random_history(random.Random(seed), 400, 6, begins=True, bridged=True):
        fleet.apply(each)
        if isinstance(each.body, WorkerRemoved):
            ranks = [recovered for rank, recovered in known.items() if rank.worker_id == each.rank.worker_id]
            fold_removal(ranks, each, each.body.seen_sequence)
            continue
        nothing = Progress(each.rank, Epoch(Incarnation(0), 0))
        known.setdefault(each.rank, RecoveredRank(nothing, Ledger(False))).fold(each)
        for rank, recovered in known.items():
            truth = fleet.ranks[rank]
            assert (recovered.is_removed, recovered.incarnation, recovered.sequence) == (
                truth.removed,
                truth.epoch.incarnation,
                truth.sequence,
            )


def test_a_ledger_is_incomplete_after_a_heartbeat_shows_a_lost_batch_until_the_engine_clears() -> None:
    """A heartbeat that names a batch which never arrived makes the ledger incomplete, before and after a clear."""
    rank, _ = recovered_ranks(silent=False)
    clear = replace(batch(RANKS[0], 0), body=EngineEvents((AllBlocksCleared(),)))
    for number in (12, 14):
        rank.fold(replace(batch(RANKS[0], number), body=Heartbeat("b", 1000)))
        assert not rank.ledger.complete
        rank.fold(replace(clear, sequence=number + 1))
        assert rank.ledger.complete


@pytest.mark.parametrize("incomplete", [False, True])
def test_a_clear_in_an_incomplete_batch_leaves_the_ledger_incomplete(incomplete: bool) -> None:
    """What is missing of a batch may have followed its clear, so agents and a starting bridge both count it as lost."""
    rank, _ = recovered_ranks(silent=False)
    holdings = plain_holdings()
    holdings.apply(batch(RANKS[0], 10), ())
    both = replace(batch(RANKS[0], 11), body=EngineEvents((AllBlocksCleared(), stored())), incomplete=incomplete)
    holdings.apply(both, (AllBlocksCleared(), stored()))
    rank.fold(both)
    assert rank.progress.health is holdings.progress[RANKS[0]].health
    ledger = rank.table_ledger(counts_copies=True)
    assert (ledger.complete, len(ledger)) == (not incomplete, 1)

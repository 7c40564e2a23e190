"""Batches and restatements for the reducer, and how tests apply them and read what a rank holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streams.core.events import (
    BlocksStored,
    EngineBatch,
    EngineEvents,
    Heartbeat,
    KvEvent,
    RestatedRun,
    RestatementChunk,
    WorkerRemoved,
)
from streams.core.ids import DpRank, EngineHash, HashArray, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.reducer.ordering import Verdict
from streams.kafka.records import encode_batch
from tests.helpers.invariants import members_of
from tests.helpers.plain_run_store import PlainHoldings
from tests.helpers.reference import Member, ReferenceInput, Silence, chain_hashes

RANK = RankId(WorkerId(7), DpRank(0))
SIBLING = RankId(WorkerId(7), DpRank(1))
OTHER_WORKER = RankId(WorkerId(8), DpRank(0))


CHAIN = chain_hashes([1, 2, 3, 4])


LEASE_MS = 3000


def judge(holdings: PlainHoldings, batch: ReferenceInput) -> Verdict | None:
    """Apply one batch to the holdings, as the agent does; returns None for a silence, which is not a record."""
    if isinstance(batch, Silence):
        holdings.mark_silent(batch.rank)
        return None
    if isinstance(batch.body, WorkerRemoved):
        if batch.body.seen_sequence is not None:
            return holdings.expire_worker(batch, batch.body.seen_sequence)
        return holdings.remove_worker(batch.rank.worker_id, batch.incarnation)
    if isinstance(batch.body, Heartbeat):
        return holdings.renew(batch, batch.body)
    if isinstance(batch.body, RestatementChunk):
        return holdings.restate(batch, encode_batch(batch))
    assert isinstance(batch.body, EngineEvents)
    return holdings.apply(batch, batch.body.events)


def members(holdings: PlainHoldings) -> set[Member]:
    return {(rank, tier, int(block)) for rank, tier, block in members_of(holdings.runs)}


def u64(*values: int) -> HashArray:
    return np.array(values, dtype=np.uint64)


def names(n: int, first: int = 1000) -> HashArray:
    return np.arange(first, first + n, dtype=np.uint64)


def stored(engine: HashArray, local: HashArray, parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlocksStored:
    return BlocksStored(None if parent is None else EngineHash(parent), engine, local, tier)


def batch(
    sequence: int, *events: KvEvent, rank: RankId = RANK, incarnation: int = 1, n_unindexed: int = 0
) -> EngineBatch:
    return EngineBatch(
        rank, "m", 16, Incarnation(incarnation), sequence, sequence + 100, 0, EngineEvents(events), n_unindexed
    )


def run(first: int, last: int) -> RestatedRun:
    """Return blocks of CHAIN, from one index to another."""
    parent = SequenceHash(CHAIN[first - 1]) if first else None
    local = np.arange(first + 1, last + 2, dtype=np.uint64)
    return RestatedRun(first, parent, local + np.uint64(1000), local, Tier.DEVICE)


def chunks(
    sequence: int, *pieces: RestatedRun, exact: bool = True, incarnation: int = 1, restatement_id: int = 9
) -> list[EngineBatch]:
    """Return a restatement that is complete up to a sequence, with one chunk per run."""
    return [
        replace(
            batch(sequence, incarnation=incarnation),
            body=RestatementChunk(restatement_id, number, len(pieces), exact, (piece,)),
        )
        for number, piece in enumerate(pieces)
    ]


def heartbeat(sequence: int, rank: RankId = RANK, incarnation: int = 1, lease_ms: int = LEASE_MS) -> EngineBatch:
    return replace(batch(sequence, rank=rank, incarnation=incarnation), body=Heartbeat("b", lease_ms))

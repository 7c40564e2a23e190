"""Random histories of both topics of engines with pools, and the reference that they are compared with."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import BEFORE_FIRST, EngineBatch
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import BlockAddress, CxlTransition, addressed
from streams.cxl.records import (
    encode_transition,
)
from streams.kafka.records import encode_batch
from streams.settings import Settings
from streams.tables.cxl_reducer import partition_plan
from streams.tables.reducer import SourceRecord
from tests.helpers.reference import ReferenceFleet, input_history

SETTINGS = Settings(partitions=1)
KV, CXL = (source.name for source in partition_plan(SETTINGS).sources)
LOCAL, TRANSIT, POOLED, EVICTED = CxlMemoryState
RANK = RankId(WorkerId(1), DpRank(0))
WORKERS = (WorkerId(7), WorkerId(8))

#: Append time of the first record of a log; the others follow a millisecond apart.
BEGUN_MS = 1_000_000


def address_of(block: int) -> BlockAddress:
    """Return the address of a block; blocks 1 to 6 are one chain."""
    return BlockAddress(SequenceHash(block), SequenceHash(block - 1) if block > 1 else None, block - 1)


def moved(
    state: CxlMemoryState,
    *blocks: int,
    follows: int = 0,
    incarnation: int = 1,
    pool: str | None = None,
    rank: RankId = RANK,
    workers: tuple[WorkerId, ...] = (),
    epoch: int = 0,
    event_id: int = 0,
) -> CxlTransition:
    places = addressed([(address_of(block), EngineHash(100 + block)) for block in blocks])
    return CxlTransition(rank, "m", Incarnation(incarnation), follows, event_id, state, pool, epoch, workers, 0, places)


@dataclass
class History:
    """Both logs of a partition."""

    kv: list[EngineBatch]
    cxl: list[CxlTransition]

    def records(self) -> dict[str, list[SourceRecord]]:
        return {
            KV: [record(KV, at, each.rank, encode_batch(each)) for at, each in enumerate(self.kv)],
            CXL: [record(CXL, at, each.rank, encode_transition(each)) for at, each in enumerate(self.cxl)],
        }


def record(topic: str, offset: int, rank: RankId, value: bytes) -> SourceRecord:
    return SourceRecord(topic, 0, offset, BEGUN_MS + offset, str(rank.worker_id).encode(), value, ())


def random_cxl(rng: random.Random, kv: list[EngineBatch], n_transitions: int) -> list[CxlTransition]:
    """Return transitions of ranks, mostly after their batches and in order, and sometimes not."""
    incarnations: dict[RankId, dict[int, int]] = {}
    for each in kv:
        known = incarnations.setdefault(each.rank, {})
        known[each.incarnation] = max(known.get(each.incarnation, BEFORE_FIRST), each.sequence)
    at = {rank: (min(known), BEFORE_FIRST) for rank, known in incarnations.items()}
    events_so_far: list[CxlTransition] = []
    for number in range(n_transitions):
        rank = rng.choice(sorted(incarnations))
        incarnation, follows = at[rank]
        if rng.random() < 0.15:
            incarnation = rng.choice([each for each in incarnations[rank] if each >= incarnation] or [incarnation + 1])
            follows = BEFORE_FIRST
        follows = min(follows + rng.randint(0, 3), incarnations[rank].get(incarnation, 5) + (rng.random() < 0.05))
        at[rank] = (incarnation, follows)
        strays = rng.random()
        if strays < 0.05:
            follows = max(follows - rng.randint(0, 5), BEFORE_FIRST)
        elif strays < 0.08:
            incarnation = max(incarnation + rng.choice((-1, 1)), 0)
        events_so_far.append(
            moved(
                rng.choices(list(CxlMemoryState), (1, 5, 5, 2))[0],
                *rng.sample(range(1, 7), rng.randint(1, 3)),
                follows=follows,
                incarnation=incarnation,
                pool=rng.choice((None, "a", "a", "a", "b")),
                rank=rank,
                workers=WORKERS[: rng.randint(0, 2)],
                epoch=rng.randint(0, 2),
                event_id=number,
            )
        )
    return events_so_far


def random_history(seed: int, n_batches: int, n_transitions: int) -> History:
    rng = random.Random(seed)
    announced = seed % 2 == 1
    kv = input_history(rng, n_batches, 3, n_blocks_max=60, begins=announced, bridged=announced)
    batches = [each for each in kv if isinstance(each, EngineBatch)]
    return History(batches, random_cxl(rng, batches, n_transitions))


@dataclass
class ExpectedRank:
    """One rank after all of kv-events: its incarnation, whether it was removed, and each incarnation's last batch."""

    incarnation: int = 0
    removed: bool = False
    reached: dict[int, int] = field(default_factory=dict)


@dataclass
class Row:
    """A block of one owner."""

    state: CxlMemoryState
    pool: str
    workers: tuple[WorkerId, ...]
    epoch: int
    incarnation: int


@dataclass
class Reference:
    """Rows by owner and block; refusals by reason; parked transitions of each rank, in order."""

    rows: dict[tuple[RankId, int], Row] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    waiting: dict[RankId, list[int]] = field(default_factory=dict)


def expected_ranks(kv: list[EngineBatch]) -> dict[RankId, ExpectedRank]:
    fleet, found = ReferenceFleet(), dict[RankId, ExpectedRank]()
    for each in kv:
        fleet.apply(each)
        for rank, state in fleet.ranks.items():
            expected_rank = found.setdefault(rank, ExpectedRank())
            expected_rank.incarnation, expected_rank.removed = state.epoch.incarnation, state.removed
            if not state.removed:
                known = expected_rank.reached.get(expected_rank.incarnation, BEFORE_FIRST)
                expected_rank.reached[expected_rank.incarnation] = max(known, state.sequence)
    return found


def reference_of(history: History) -> Reference:
    found = Reference()
    ranks = expected_ranks(history.kv)
    newest: dict[RankId, int] = {}
    for each in history.cxl:
        if each.incarnation < newest.get(each.rank, 0):
            found.refused["older_incarnation"] += 1
            continue
        newest[each.rank] = each.incarnation
        expected_rank = ranks.get(each.rank, ExpectedRank())
        reached = expected_rank.reached.get(each.incarnation)
        is_reached = reached is not None and each.follows <= reached
        if each.rank in found.waiting or (not is_reached and each.incarnation >= expected_rank.incarnation):
            found.waiting.setdefault(each.rank, []).append(each.event_id)
        elif is_reached:
            enter(found, each)
    for (rank, _), row in found.rows.items():
        over = row.incarnation < ranks[rank].incarnation or (
            row.incarnation == ranks[rank].incarnation and ranks[rank].removed
        )
        if row.state is TRANSIT and over:
            row.state = EVICTED
    return found


def enter(found: Reference, each: CxlTransition) -> None:
    reasons = []
    for address, _ in each.blocks.rows():
        at = (each.rank, address.sequence)
        row = found.rows.get(at)
        state = LOCAL if row is None else row.state
        if row is not None and state is TRANSIT and row.incarnation < each.incarnation:
            state = EVICTED
        elsewhere = row is not None and each.pool_id not in (None, row.pool) and state in (TRANSIT, POOLED)
        if each.state is TRANSIT and each.pool_id is None:
            reasons.append("no_pool")
        elif each.state is TRANSIT:
            assert each.pool_id is not None
            found.rows[at] = Row(TRANSIT, each.pool_id, each.accessible_workers, each.pool_epoch, each.incarnation)
        elif each.state is POOLED and state is not TRANSIT:
            reasons.append("not_in_transit")
        elif elsewhere:
            reasons.append("other_pool")
        elif row is None:
            pass  # the block has no placement to drop or to keep
        elif each.state is LOCAL:
            del found.rows[at]
        elif state is not each.state:
            row.state, row.incarnation = each.state, each.incarnation
    if reasons:
        found.refused[reasons[0]] += 1


def expected_blocks(reference: Reference) -> dict[tuple[RankId, int], tuple[CxlMemoryMetadata, int, BlockAddress]]:
    return {
        (rank, block): (CxlMemoryMetadata(row.state, row.pool, row.workers), row.epoch, address_of(block))
        for (rank, block), row in reference.rows.items()
    }

"""The state of a worker's ranks as a starting bridge reads it from Kafka: the tables, and the records after them.

What lives here: folding table records, and the batches that no agent has applied yet, into each rank's ledger and its
names in CXL pools (pure); and reading them. What must not: what follows from this state (continuity, feed).

The table alone is not enough. The names under which agents know the rank's blocks also depend on batches that no agent
has applied yet. A ledger without these batches would publish removals under names that the agents do not have, and
would never remove others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlockFacts,
    EngineBatch,
    EngineEvents,
    Heartbeat,
    RestatedRun,
    RestatementChunk,
    WorkerRemoved,
)
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.reducer.ordering import (
    Health,
    Judgement,
    Progress,
    Verdict,
    judge,
    judge_chunk,
    refuses_expiry,
    removed,
    renew,
    restated,
)
from streams.core.runs import Run, RunKey
from streams.cxl.events import BlockAddress, CxlTransition
from streams.cxl.records import BLOCK_PREFIX, BlockRow, decode_block, decode_parked, decode_transition, owner_of_row
from streams.engines.continuity import KnownIncarnation
from streams.engines.cxl_names import PLACED, CxlNames
from streams.engines.ledger import Ledger
from streams.engines.pooled_rows import read_rows
from streams.errors import BadRecord
from streams.kafka.clients import Record, partition_of, worker_key
from streams.kafka.log_offsets import first_offset
from streams.kafka.records import decode_batch
from streams.settings import ScopeSettings
from streams.tables.changelog import read_to_end
from streams.tables.records import PARTITION_KEY, PROGRESS_KEY, RUN_KEY, decode_partition, decode_progress, decode_run
from streams.topics import topics

#: Bytes of a key of the index's table up to the end of the worker's id.
_BEGINNING_BYTES = 9


@dataclass(slots=True)
class RecoveredRank:
    """One rank as read from Kafka. A rank whose worker was removed holds nothing and starts from its first batch."""

    progress: Progress
    ledger: Ledger
    names: CxlNames = field(default_factory=CxlNames)
    _pieces: list[RestatementChunk] = field(default_factory=list)

    @property
    def incarnation(self) -> Incarnation:
        """The rank's last incarnation."""
        return self.progress.epoch.incarnation

    @property
    def sequence(self) -> int:
        """The number of the rank's last batch."""
        return self.progress.sequence

    @property
    def digest(self) -> int:
        """The digest of that batch's payload."""
        return self.progress.digest

    @property
    def is_removed(self) -> bool:
        """Whether its worker was removed."""
        return self.progress.health is Health.REMOVED

    @property
    def known_incarnation(self) -> KnownIncarnation:
        """The incarnation as `continuity` takes it. A removed rank starts over, so it has no batch to compare."""
        return KnownIncarnation(self.incarnation, BEFORE_FIRST if self.is_removed else self.sequence, self.digest)

    def fold(self, batch: EngineBatch) -> None:
        """Apply a batch of the rank that the table does not contain yet, as the agent will."""
        match batch.body:
            case EngineEvents(events):
                judgement = judge(self.progress, batch)
                if judgement.verdict not in (Verdict.STALE, Verdict.DUPLICATE):
                    self._pieces.clear()
                    self._take(judgement)
                    n_left_out = self.ledger.left_out
                    for event in events:
                        self.ledger.apply(event)
                        if isinstance(event, AllBlocksCleared):
                            health = Health.APPROXIMATE if batch.n_unindexed else Health.EXACT
                            self.progress = replace(self.progress, health=health)
                    if self.ledger.left_out > n_left_out:  # the table lacks a block that the record names as a parent
                        self.ledger.lost_events()
                    if batch.incomplete:  # what is missing of the batch may have followed its clear
                        self.ledger.lost_events()
                        self.progress = replace(self.progress, health=Health.DEGRADED)
                else:
                    self.progress = judgement.progress  # a duplicate may say that the feed is behind
            case Heartbeat(lease_ms=lease_ms):
                judgement = renew(self.progress, batch, lease_ms)
                if judgement.verdict is not Verdict.STALE:
                    self._take(judgement)
            case RestatementChunk():
                judgement = judge_chunk(self.progress, batch)
                if judgement.verdict is Verdict.PARKED:
                    self._take(judgement)
                    self._restate(batch, batch.body)
            case WorkerRemoved():
                pass  # `fold_removal` applies it to all ranks at once
            case _:
                assert_never(batch.body)

    def table_ledger(self, counts_copies: bool) -> Ledger:
        """Return a ledger of what agents hold of the rank, for a bridge that has nothing better to continue with."""
        runs, complete = self.ledger.restated(), self.ledger.complete
        approximate = self.progress.health is Health.APPROXIMATE
        return ledger_of(runs, complete, counts_copies=counts_copies, removed_early=approximate)

    def end(self, progress: Progress) -> None:
        """Note that the worker was removed. progress: the rank's progress after the removal."""
        if progress.epoch != self.progress.epoch:
            self._empty()
        self.progress = progress

    def _take(self, judgement: Judgement) -> None:
        if judgement.begins_epoch:
            self._empty()
        if judgement.progress.n_gaps > self.progress.n_gaps:
            self.ledger.lost_events()
        self.progress = judgement.progress

    def fold_transition(self, transition: CxlTransition) -> None:
        """Apply a transition that the table does not contain yet, legal or not: an additional name does no harm."""
        if transition.incarnation != self.incarnation:
            return
        blocks = transition.blocks.rows()
        if transition.state in PLACED:
            self.names.enter(blocks, transition.state, transition.pool_id, transition.accessible_workers)
        else:
            for _, engine in blocks:
                self.names.drop(engine)

    def adopt_row(self, block: SequenceHash, row: BlockRow) -> None:
        """Take a row of the agents' table: the name of a block that is in a pool, if this incarnation put it there."""
        placement = row.placement
        if placement.state in PLACED and placement.incarnation == self.incarnation:
            metadata = CxlMemoryMetadata(placement.state, placement.pool_id, placement.accessible_workers)
            self.names.adopt(row.engine, BlockAddress(block, row.parent, row.position), metadata)

    def _empty(self) -> None:
        self.ledger = Ledger(counts_copies=False)
        self._pieces.clear()

    def _restate(self, batch: EngineBatch, piece: RestatementChunk) -> None:
        begun = self._pieces
        if piece.chunk != len(begun) or (begun and begun[0].restatement_id != piece.restatement_id):
            begun.clear()
        if piece.chunk == len(begun):
            begun.append(piece)
        if len(begun) == piece.n_chunks:
            self.ledger = ledger_of((run for done in begun for run in done.runs), piece.exact, counts_copies=False)
            self.progress = restated(self.progress, batch, exact=piece.exact, n_unindexed=batch.n_unindexed)
            begun.clear()


def fold_removal(recovered_ranks: Collection[RecoveredRank], batch: EngineBatch, seen_sequence: int | None) -> None:
    """Apply a worker's removal to all its ranks.

    seen_sequence: the sequence number that an expiry names, None for a removal that an operator requested. An expiry
    removes no rank if any of them has been heard from since.
    """
    if seen_sequence is not None and any(
        refuses_expiry(recovered.progress, batch, seen_sequence) for recovered in recovered_ranks
    ):
        return
    for recovered in recovered_ranks:
        progress = removed(recovered.progress, batch.incarnation, silent=seen_sequence is not None)
        if progress is not None:
            recovered.end(progress)


def ledger_of(
    runs: Iterable[RestatedRun], complete: bool, *, counts_copies: bool, removed_early: bool = False
) -> Ledger:
    """Return a ledger that holds these runs, with one copy of each block."""
    ledger = Ledger(counts_copies)
    for run in runs:
        ledger.adopt(run)
    ledger.complete, ledger.removed_early = complete, removed_early
    return ledger


def held_runs(run: Run) -> list[RestatedRun]:
    """Return the blocks that a run record holds, as runs without holes."""
    stretches: list[list[int]] = []
    for offset in run.held():
        if stretches and stretches[-1][-1] == offset - 1:
            stretches[-1].append(offset)
        else:
            stretches.append([offset])
    return [
        RestatedRun(
            start=run.start + offsets[0],
            parent=run.parent if offsets[0] == 0 else SequenceHash(run.sequence[offsets[0] - 1]),
            engine=np.array(run.engine[offsets[0] : offsets[-1] + 1], dtype=np.uint64),
            local=np.array(run.local[offsets[0] : offsets[-1] + 1], dtype=np.uint64),
            tier=run.key.tier,
            facts=tuple(BlockFacts(offset - offsets[0], 1, run.moe[offset]) for offset in offsets if offset in run.moe),
        )
        for offsets in stretches
    ]


def recovered_rank(progress: Progress, runs: Iterable[Run]) -> RecoveredRank:
    """Build a rank from its table records. Runs of other epochs are ignored."""
    is_removed = progress.health is Health.REMOVED
    complete = progress.health in (Health.EXACT, Health.APPROXIMATE)
    held = [] if is_removed else [part for run in runs if run.epoch == progress.epoch for part in held_runs(run)]
    return RecoveredRank(progress, ledger_of(held, complete, counts_copies=False))


#: The ranks of each worker, by rank number.
RanksOf = dict[WorkerId, dict[int, RecoveredRank]]


def recover_ranks(settings: ScopeSettings, worker_id: WorkerId) -> dict[int, RecoveredRank]:
    """Read the state of one worker's ranks from Kafka, by rank number; as `recover_workers`."""
    return recover_workers(settings, partition_of(worker_id, settings.partitions), [worker_id])[worker_id]


def recover_workers(settings: ScopeSettings, partition: int, worker_ids: Collection[WorkerId]) -> RanksOf:
    """Read the state of workers whose records are in one partition, each topic once.

    Blocks; raises TableError, KafkaException.
    """
    names = topics(settings)
    table: dict[bytes, bytes] = {}
    of_partition = PARTITION_KEY.pack(partition)
    beginnings = {beginning for worker_id in worker_ids for beginning in _key_beginnings(worker_id)}

    def take(records: list[Record]) -> None:
        for record in records:
            if record.key[:_BEGINNING_BYTES] in beginnings or record.key == of_partition:
                if record.value is None:
                    table.pop(record.key, None)
                else:
                    table[record.key] = record.value

    read_to_end(settings, names.index_changelog.name, partition, None, take)
    ranks_of = ranks_of_table(table)
    recovered_ranks: RanksOf = {worker_id: ranks_of.get(worker_id, {}) for worker_id in worker_ids}
    after_table = applied_offset(table, of_partition, names.kv_events.name) + 1
    keys = {worker_key(worker_id): worker_id for worker_id in worker_ids}

    def fold(records: list[Record]) -> None:
        for record in records:
            worker_id = keys.get(record.key)
            if worker_id is not None:
                _fold_record(recovered_ranks[worker_id], settings, worker_id, record)

    log = first_offset(settings, names.kv_events.name, partition, after_table)
    if log.low > after_table:
        for ranks in recovered_ranks.values():
            for recovered in ranks.values():
                recovered.ledger.lost_events()  # no agent was running for longer than events are kept
    if log.first is not None:
        read_to_end(settings, names.kv_events.name, partition, log.first, fold)
    with_ranks = {worker_id: ranks for worker_id, ranks in recovered_ranks.items() if ranks}
    if with_ranks:
        _recover_names(settings, with_ranks, partition, applied_offset(table, of_partition, names.cxl_events.name))
    return recovered_ranks


def _key_beginnings(worker_id: WorkerId) -> tuple[bytes, bytes]:
    """Return how the keys of a worker's runs and of its ranks' progress begin."""
    rank = RankId(worker_id, DpRank(0))
    run = RUN_KEY.pack(RunKey(rank, Tier.DEVICE, SequenceHash(0)))
    assert run.startswith(RUN_KEY.prefix)
    return run[:_BEGINNING_BYTES], PROGRESS_KEY.pack(rank)[:_BEGINNING_BYTES]


def _recover_names(settings: ScopeSettings, ranks_of: RanksOf, partition: int, applied: int) -> None:
    """Read which blocks are in CXL pools, and under which names: the table, then the transitions after it."""
    keys = {worker_key(worker_id): worker_id for worker_id in ranks_of}

    def fold(records: list[Record]) -> None:
        for record in records:
            worker_id = keys.get(record.key)
            if worker_id is not None:
                _fold_transition(ranks_of[worker_id], record.value, settings)

    table = read_rows(settings, partition, ranks_of)
    for key, value in sorted(table.items()):  # blocks come before parked transitions, and these in order
        owner = owner_of_row(key)
        if owner is None:
            continue
        ranks = ranks_of[WorkerId(owner)]
        try:
            if key.startswith(BLOCK_PREFIX):
                where, row = decode_block(key, value)
                recovered = ranks.get(where.owner.dp_rank)
                if recovered is not None:
                    recovered.adopt_row(where.sequence, row)
            else:
                _fold_transition(ranks, decode_parked(key, value)[1].raw, settings)
        except BadRecord:
            continue  # agents and routers skip the record as well
    topic = topics(settings).cxl_events.name
    log = first_offset(settings, topic, partition, applied + 1)
    if log.first is not None:
        read_to_end(settings, topic, partition, log.first, fold)


def _fold_transition(ranks: Mapping[int, RecoveredRank], raw: bytes | None, settings: ScopeSettings) -> None:
    try:
        transition = decode_transition(raw, settings.schema_ids)
    except BadRecord:
        return  # the agent copies it to the dead letters
    recovered = ranks.get(transition.rank.dp_rank)
    if recovered is not None and recovered.progress.rank == transition.rank:
        recovered.fold_transition(transition)


def ranks_of_table(table: Mapping[bytes, bytes]) -> RanksOf:
    """Return the ranks in rows of the index's table, each with what it holds; rows of other kinds are skipped."""
    progress: dict[RankId, Progress] = {}
    runs: dict[RankId, list[Run]] = {}
    for key, value in table.items():
        try:
            if key.startswith(PROGRESS_KEY.prefix):
                rank_progress = decode_progress(key, value)
                progress[rank_progress.rank] = rank_progress
            elif key.startswith(RUN_KEY.prefix):
                runs.setdefault(RUN_KEY.parse(key).rank, []).append(decode_run(key, value))
        except BadRecord:
            continue  # agents and routers skip the record as well
    ranks_of: RanksOf = {}
    for rank, rank_progress in progress.items():
        ranks_of.setdefault(rank.worker_id, {})[rank.dp_rank] = recovered_rank(rank_progress, runs.get(rank, []))
    return ranks_of


def applied_offset(table: Mapping[bytes, bytes], key: bytes, topic: str) -> int:
    """Return the offset of the last record of a source that the table contains; -1 if it contains none."""
    assert key.startswith(PARTITION_KEY.prefix)
    try:
        sources = decode_partition(key, table[key]).sources if key in table else ()
    except BadRecord:
        sources = ()
    return next((source.applied_offset for source in sources if source.topic == topic), -1)


def _fold_record(ranks: dict[int, RecoveredRank], settings: ScopeSettings, worker_id: WorkerId, record: Record) -> None:
    try:
        batch = decode_batch(record.value, settings.schema_ids)
    except BadRecord:
        return  # the agent copies it to the dead letters
    if batch.rank.worker_id != worker_id:
        return
    if isinstance(batch.body, WorkerRemoved):
        fold_removal(ranks.values(), batch, batch.body.seen_sequence)
        return
    rank = batch.rank
    recovered = ranks.get(rank.dp_rank)
    if recovered is None:
        recovered = RecoveredRank(Progress(rank, Epoch(Incarnation(0), 0)), Ledger(counts_copies=False))
        ranks[rank.dp_rank] = recovered
    recovered.fold(batch)

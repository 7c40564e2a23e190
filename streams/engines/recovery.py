"""The state of a worker's ranks as a starting bridge reads it from Kafka: the tables, and the records after them.

What lives here: folding table records, and the batches that no agent has applied yet, into each rank's ledger and its
names in CXL pools (pure); and reading them. What must not: what follows from this state (continuity, feed).

The table alone is not enough. The names under which agents know the rank's blocks also depend on batches that no agent
has applied yet. A ledger without these batches would publish removals under names that the agents do not have, and
would never remove others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np

from streams.codec import decode_batch
from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
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
from streams.cxl.records import (
    BLOCK_PREFIX,
    TRANSITION_ROWS,
    decode_block,
    decode_parked,
    decode_transition,
    owner_of_row,
)
from streams.engines.continuity import KnownIncarnation
from streams.engines.cxl_names import CxlNames
from streams.engines.ledger import Ledger
from streams.errors import BadRecord
from streams.kafka import Record, first_offset, partition_of, worker_key
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.records import (
    PARTITION_PREFIX,
    PROGRESS_PREFIX,
    RUN_PREFIX,
    decode_partition,
    decode_progress,
    decode_run,
    parse_run_key,
    partition_key,
    progress_key,
    run_key,
)
from streams.topics import topics

#: States in which an engine's name of a block is kept.
_PLACED = (CxlMemoryState.IN_TRANSIT, CxlMemoryState.CXL_POOLED)


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
                    for event in events:
                        self.ledger.apply(event)
                        if isinstance(event, AllBlocksCleared):
                            health = Health.APPROXIMATE if batch.n_unindexed else Health.EXACT
                            self.progress = replace(self.progress, health=health)
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
        if transition.state in _PLACED:
            self.names.enter(blocks, transition.state, transition.pool_id, transition.accessible_workers)
        else:
            for _, engine in blocks:
                self.names.drop(engine)

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
            start=run.start + at[0],
            parent=run.parent if at[0] == 0 else SequenceHash(run.sequence[at[0] - 1]),
            engine=np.array(run.engine[at[0] : at[-1] + 1], dtype=np.uint64),
            local=np.array(run.local[at[0] : at[-1] + 1], dtype=np.uint64),
            tier=run.key.tier,
            facts=tuple(BlockFacts(offset - at[0], 1, run.moe[offset]) for offset in at if offset in run.moe),
        )
        for at in stretches
    ]


def recovered_rank(progress: Progress, runs: Iterable[Run]) -> RecoveredRank:
    """Build a rank from its table records. Runs of other epochs are ignored."""
    is_removed = progress.health is Health.REMOVED
    complete = progress.health in (Health.EXACT, Health.APPROXIMATE)
    held = [] if is_removed else [part for run in runs if run.epoch == progress.epoch for part in held_runs(run)]
    return RecoveredRank(progress, ledger_of(held, complete, counts_copies=False))


def recover_ranks(settings: Settings, worker_id: WorkerId) -> dict[int, RecoveredRank]:
    """Read the state of a worker's ranks from Kafka, by rank number. Blocks; raises TableError, KafkaException."""
    names = topics(settings)
    partition = partition_of(worker_id, settings.partitions)
    table: dict[bytes, bytes] = {}
    ours = run_key(RunKey(RankId(worker_id, DpRank(0)), Tier.DEVICE, SequenceHash(0)))[:9]
    rank_prefixes = (ours, progress_key(RankId(worker_id, DpRank(0)))[:9], partition_key(partition))
    assert ours[:1] == RUN_PREFIX

    def take(records: list[Record]) -> None:
        for record in records:
            if record.key.startswith(rank_prefixes):
                if record.value is None:
                    table.pop(record.key, None)
                else:
                    table[record.key] = record.value

    read_to_end(settings, names.index_changelog.name, partition, None, take)
    recovered_ranks = _from_table(table)
    after_table = _applied_offset(table, partition_key(partition), names.kv_events.name) + 1

    def fold(records: list[Record]) -> None:
        for record in records:
            _fold_record(recovered_ranks, settings, worker_id, record)

    found = first_offset(settings, names.kv_events.name, partition, after_table)
    if found.low > after_table:
        for recovered in recovered_ranks.values():
            recovered.ledger.lost_events()  # no agent was running for longer than events are kept
    if found.first is not None:
        read_to_end(settings, names.kv_events.name, partition, found.first, fold)
    if recovered_ranks:
        _recover_names(
            settings, recovered_ranks, partition, _applied_offset(table, partition_key(partition), _cxl(settings))
        )
    return recovered_ranks


def _cxl(settings: Settings) -> str:
    return topics(settings).cxl_events.name


def _recover_names(settings: Settings, recovered_ranks: dict[int, RecoveredRank], partition: int, applied: int) -> None:
    """Read which blocks are in CXL pools, and under which names: the table, then the transitions after it."""
    worker_id = next(iter(recovered_ranks.values())).progress.rank.worker_id
    table: dict[bytes, bytes] = {}

    def take(records: list[Record]) -> None:
        for record in records:
            if record.value is None:
                table.pop(record.key, None)
            elif record.key.startswith(TRANSITION_ROWS) and owner_of_row(record.key) == worker_id:
                table[record.key] = record.value

    def fold(records: list[Record]) -> None:
        for record in records:
            if record.key == worker_key(worker_id):
                _fold_transition(recovered_ranks, record.value, settings)

    read_to_end(settings, topics(settings).cxl_changelog.name, partition, None, take)
    for key, value in sorted(table.items()):  # blocks come before parked transitions, and these in order
        try:
            if key.startswith(BLOCK_PREFIX):
                where, row = decode_block(key, value)
                recovered = recovered_ranks.get(where.owner.dp_rank)
                placement = row.placement
                placed = placement.state in _PLACED
                if recovered is not None and placed and placement.incarnation == recovered.incarnation:
                    metadata = CxlMemoryMetadata(placement.state, placement.pool_id, placement.accessible_workers)
                    recovered.names.adopt(row.engine, BlockAddress(where.sequence, row.parent, row.position), metadata)
            else:
                _fold_transition(recovered_ranks, decode_parked(key, value)[1].raw, settings)
        except BadRecord:
            continue  # agents and routers skip the record as well
    found = first_offset(settings, _cxl(settings), partition, applied + 1)
    if found.first is not None:
        read_to_end(settings, _cxl(settings), partition, found.first, fold)


def _fold_transition(recovered_ranks: dict[int, RecoveredRank], raw: bytes | None, settings: Settings) -> None:
    try:
        transition = decode_transition(raw, settings.schema_ids)
    except BadRecord:
        return  # the agent copies it to the dead letters
    recovered = recovered_ranks.get(transition.rank.dp_rank)
    if recovered is not None and recovered.progress.rank == transition.rank:
        recovered.fold_transition(transition)


def _from_table(table: dict[bytes, bytes]) -> dict[int, RecoveredRank]:
    progress: dict[RankId, Progress] = {}
    runs: dict[RankId, list[Run]] = {}
    for key, value in table.items():
        try:
            if key.startswith(PROGRESS_PREFIX):
                found = decode_progress(key, value)
                progress[found.rank] = found
            elif key.startswith(RUN_PREFIX):
                runs.setdefault(parse_run_key(key).rank, []).append(decode_run(key, value))
        except BadRecord:
            continue  # agents and routers skip the record as well
    return {rank.dp_rank: recovered_rank(found, runs.get(rank, [])) for rank, found in progress.items()}


def _applied_offset(table: dict[bytes, bytes], key: bytes, topic: str) -> int:
    """Return the offset of the last record of a source that the table contains; -1 if it contains none."""
    assert key.startswith(PARTITION_PREFIX)
    try:
        sources = decode_partition(key, table[key]).sources if key in table else ()
    except BadRecord:
        sources = ()
    return next((source.applied_offset for source in sources if source.topic == topic), -1)


def _fold_record(
    recovered_ranks: dict[int, RecoveredRank], settings: Settings, worker_id: WorkerId, record: Record
) -> None:
    if record.key != worker_key(worker_id):
        return
    try:
        batch = decode_batch(record.value, settings.schema_ids)
    except BadRecord:
        return  # the agent copies it to the dead letters
    if batch.rank.worker_id != worker_id:
        return
    if isinstance(batch.body, WorkerRemoved):
        fold_removal(recovered_ranks.values(), batch, batch.body.seen_sequence)
        return
    rank = batch.rank
    recovered = recovered_ranks.get(rank.dp_rank)
    if recovered is None:
        recovered = RecoveredRank(Progress(rank, Epoch(Incarnation(0), 0)), Ledger(counts_copies=False))
        recovered_ranks[rank.dp_rank] = recovered
    recovered.fold(batch)

"""One partition's ranks, restated on another scope as a bridge would restate them.

What lives here: the records from which workers of the other scope make the same rows. What must not: reading tables
(partition_tables), and what follows afterwards (copying).

A rank is restated with its incarnation and the number and digest of its last batch. So a bridge that starts on the
other scope recognises its engine, and records that are copied twice are duplicates. A heartbeat comes first: without a
lease, answers for the rank would not depend on the pulses that are copied.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from confluent_kafka import Producer

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import (
    BEFORE_FIRST,
    ENDED_LEASE_MS,
    Body,
    EngineBatch,
    EngineEvents,
    FeedState,
    WorkerRemoved,
)
from streams.core.ids import EngineHash, Incarnation, RankId, WorkerId
from streams.core.reducer.maintenance import SILENT
from streams.cxl.events import TRANSITION_BLOCKS_MAX, BlockAddress, CxlTransition, addressed
from streams.cxl.records import BlockKey, BlockRow, Placement, encode_transition
from streams.cxl.states import stored_as
from streams.engines.rank_records import RankRecords
from streams.engines.rank_writer import RankWriter
from streams.engines.recovery import RecoveredRank
from streams.errors import KvStreamsError
from streams.kafka.records import encode_batch
from streams.replay.partition_tables import PartitionTables
from streams.settings import ScopeSettings

#: How long Kafka may take no record before the move gives up.
SEND_TIMEOUT_S = 60.0

#: The name that heartbeats of a move have in place of a bridge's.
NAME = "kvstreams replay --into"

#: A block that leaves its pool needs no name.
_NO_NAME = EngineHash(0)

_Rows = list[tuple[BlockKey, BlockRow]]


def restate(
    settings: ScopeSettings,
    kafka: Producer,
    tables: PartitionTables,
    lease_ms_of: Mapping[WorkerId, int],
    skipped: Collection[WorkerId],
    known: Mapping[RankId, Collection[BlockKey]],
) -> int:
    """Write the records of a partition's ranks to another scope; return how many ranks. Blocks.

    settings, kafka: of the other scope. lease_ms_of: the workers that have bridges, each with the length of its lease.
    skipped: workers that are left out. known: rows of pooled blocks that the other scope has, by owner.
    Raises KvStreamsError if Kafka does not take them.
    """
    rows_of: defaultdict[RankId, _Rows] = defaultdict(list)
    for block, row in tables.pooled.items():
        rows_of[block.owner].append((block, row))
    parked_of: defaultdict[RankId, list[bytes]] = defaultdict(list)
    for owner, raw in tables.parked:
        parked_of[owner].append(raw)
    written: list[RankRecords] = []
    for found in tables.ranks():
        rank = found.progress.rank
        if rank.worker_id not in skipped:
            one = _Rank(settings, kafka, found, lease_ms_of.get(rank.worker_id))
            one.restate(rows_of[rank], parked_of[rank], known.get(rank, ()))
            written.append(one.records)
    n_left = kafka.flush(SEND_TIMEOUT_S)
    refused = [reason for records in written for reason in records.failed]
    if n_left or refused:
        raise KvStreamsError(
            f"Kafka at {settings.kafka} has not taken all records: {(refused or ['no answer'])[0]}",
            remedy="Check that Kafka, and start the command again",
        )
    return len(written)


class _Rank:
    """The records of one rank."""

    def __init__(self, settings: ScopeSettings, kafka: Producer, found: RecoveredRank, lease_ms: int | None) -> None:
        """lease_ms: of its bridge; None if it has none."""
        self._found = found
        self._progress = progress = found.progress
        self._lease_ms = lease_ms
        self._now_ms = time.time_ns() // 1_000_000
        self._block_size = settings.block_size_of(progress.model)
        self._writer = RankWriter(
            settings, kafka, progress.rank, progress.model, found.incarnation, counts_copies=False
        )

    def restate(self, rows: _Rows, parked: Collection[bytes], known: Collection[BlockKey]) -> None:
        """Write everything. rows, parked, known: of this rank."""
        progress, writer = self._progress, self._writer
        if not self._found.is_removed:
            for block, row in rows:
                self._found.adopt_row(block.sequence, row)
            writer.resume(progress.sequence, progress.digest, self._found.table_ledger(False), self._found.names)
            writer.feed = progress.feed if self._lease_ms is not None else FeedState.CATCHING_UP
        self._restate_rows(rows, parked, known)
        if self._found.is_removed:
            self._remove()
        else:
            lease_ms = progress.lease_ms or self._lease_ms
            if lease_ms:
                writer.heartbeat(NAME, ENDED_LEASE_MS if progress.silent else lease_ms, self._now_ms)
            for chunk in writer.restatement(time.time_ns() // 1000):
                writer.send_chunk(chunk, self._now_ms)
                writer.records.send_within(SEND_TIMEOUT_S)
        writer.records.send_within(SEND_TIMEOUT_S)

    @property
    def records(self) -> RankRecords:
        """What was written, until Kafka has it."""
        return self._writer.records

    def _remove(self) -> None:
        """Write that the worker was removed, in this incarnation. An expired one returns with its next heartbeat."""
        current = self._progress.epoch.incarnation
        if self._progress.silent:
            self._writer.heartbeat(NAME, ENDED_LEASE_MS, self._now_ms)
            self._put(current, WorkerRemoved(SILENT, BEFORE_FIRST))
        else:
            self._put(current, EngineEvents(()))
            self._put(current, WorkerRemoved(NAME))

    def _restate_rows(self, rows: _Rows, parked: Collection[bytes], known: Collection[BlockKey]) -> None:
        """Write where blocks are in CXL pools, also those of ended incarnations, which stay there."""
        current = self._progress.epoch.incarnation
        groups: defaultdict[Placement, list[tuple[BlockAddress, EngineHash]]] = defaultdict(list)
        for block, row in rows:
            state, incarnation = row.placement.state, row.placement.incarnation
            # What was in transit when its owner ended never arrives.
            if state is CxlMemoryState.CXL_POOLED or (state is CxlMemoryState.IN_TRANSIT and incarnation == current):
                groups[row.placement].append((BlockAddress(block.sequence, row.parent, row.position), row.engine))
        placed = {address.sequence for group in groups.values() for address, _ in group}
        gone = [block.sequence for block in known if block.sequence not in placed]
        self._transit(current, CxlMemoryState.LOCAL_GPU, [(BlockAddress(each, None, 0), _NO_NAME) for each in gone])
        for incarnation in sorted({placement.incarnation for placement in groups} - {current}):
            self._put(incarnation, EngineEvents(()))  # it began, and ends with the next one
        for placement, group in sorted(groups.items(), key=lambda item: item[0].incarnation):
            for state in stored_as(placement.state):
                self._transit(placement.incarnation, state, group, placement)
        for raw in parked:
            self._writer.records.put_transition(raw)
        self._writer.records.send_within(SEND_TIMEOUT_S)

    def _put(self, incarnation: Incarnation, body: Body) -> None:
        """Write a record that comes before the first batch of an incarnation."""
        progress = self._progress
        size = self._block_size
        batch = EngineBatch(progress.rank, progress.model, size, incarnation, BEFORE_FIRST, 0, self._now_ms, body)
        if isinstance(body, WorkerRemoved):
            batch = replace(batch, sequence=0)
        self._writer.records.put_batch(encode_batch(batch))

    def _transit(
        self,
        incarnation: Incarnation,
        state: CxlMemoryState,
        blocks: list[tuple[BlockAddress, EngineHash]],
        placement: Placement | None = None,
    ) -> None:
        """Write that blocks enter a state. placement: their pool."""
        for first in range(0, len(blocks), TRANSITION_BLOCKS_MAX):
            transition = CxlTransition(
                rank=self._progress.rank,
                model=self._progress.model if placement is None else placement.model,
                incarnation=incarnation,
                follows=BEFORE_FIRST,
                event_id=0,
                state=state,
                pool_id=None if placement is None else placement.pool_id,
                pool_epoch=0 if placement is None else placement.pool_epoch,
                accessible_workers=() if placement is None else placement.accessible_workers,
                emitted_at_ms=self._now_ms,
                blocks=addressed(blocks[first : first + TRANSITION_BLOCKS_MAX]),
                span=1 if placement is None else placement.span,
            )
            self._writer.records.put_transition(encode_transition(transition))

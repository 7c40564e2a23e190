"""The agents' side of CXL: `cxl-events` and `kv-events` of a partition, folded into the same transactions.

What lives here: the reducer of a partition with both topics, and its table of pooled blocks. What must not: the meaning
of `kv-events` (the index reducer), when a transition is applied (pooled_block_table), transactions (tables.partition).

Both topics of a partition have one owner, one thread and one transaction, so that parked, applied and acknowledged
records are always consistent.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from streams.core.events import EngineBatch, WorkerRemoved
from streams.core.ids import RankId
from streams.cxl.events import CxlTransition
from streams.cxl.records import (
    BLOCK_PREFIX,
    OWNER_KEY,
    PARKED_KEY,
    BlockKey,
    BlockRow,
    OwnerRow,
    ParkedKey,
    ParkedRow,
    block_key,
    decode_block,
    decode_owner,
    decode_parked,
    decode_transition,
    encode_block,
    encode_owner,
    encode_parked,
)
from streams.errors import BadRecord
from streams.kafka.clients import partition_of, worker_key
from streams.settings import AgentSettings
from streams.tables.index_reducer import BAD_TABLE_RECORD, IndexReducer, check_home, prefix_index_table
from streams.tables.pooled_block_table import PooledBlockTable, TransitionOutcome
from streams.tables.records import Change
from streams.tables.reducer import Outgoing, PartitionPlan, SourceRecord
from streams.tables.store import TableSpec
from streams.topics import CXL_BLOCKS, topics

log = logging.getLogger(__name__)

Decoded = EngineBatch | CxlTransition | BadRecord


def cxl_blocks_table(settings: AgentSettings) -> TableSpec:
    """Return the spec of the table of pooled blocks, their owners and parked transitions."""
    return TableSpec(CXL_BLOCKS, 2, topics(settings).cxl_changelog.name)


def partition_plan(settings: AgentSettings) -> PartitionPlan:
    """Return the tables and sources of a partition; the first of each is the index's."""
    names = topics(settings)
    return PartitionPlan(
        tables=(prefix_index_table(settings), cxl_blocks_table(settings)),
        sources=(names.kv_events, names.cxl_events),
        make_reducer=lambda verdicts, on_effect: PartitionReducer(settings, verdicts, on_effect),
    )


class PartitionReducer:
    """Reduces both topics of a partition: the index's reducer, and the pooled blocks that follow its progress."""

    def __init__(
        self, settings: AgentSettings, verdicts: Counter[str], on_effect: Callable[[int], None] | None = None
    ) -> None:
        self._settings = settings
        self._verdicts = verdicts
        self._on_effect = on_effect
        self._cxl_topic = topics(settings).cxl_events.name
        self._table = cxl_blocks_table(settings)
        self.index = IndexReducer(settings, verdicts, on_effect)
        self.pooled = PooledBlockTable(
            lambda rank: self.index.holdings.progress.get(rank),
            evicted_ttl_ms=int(settings.cxl_evicted_ttl_s * 1000),
            # After that time, kv-events no longer retains the batch that a transition waits for.
            parked_ttl_ms=settings.retention_ms,
            # After that time, cxl-events no longer retains transitions of an incarnation that ended.
            owner_ttl_ms=settings.retention_ms,
        )

    def load(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> None:
        """Start from the rows of a table; the index's table comes first."""
        if table != self._table:
            self.index.load(table, items)
            return
        blocks: list[tuple[BlockKey, BlockRow]] = []
        owners: list[tuple[RankId, OwnerRow]] = []
        parked: list[tuple[ParkedKey, ParkedRow, CxlTransition]] = []
        for key, value in items:
            try:
                if key.startswith(BLOCK_PREFIX):
                    blocks.append(decode_block(key, value))
                elif key.startswith(OWNER_KEY.prefix):
                    owners.append(decode_owner(key, value))
                elif key.startswith(PARKED_KEY.prefix):
                    parked_at, row = decode_parked(key, value)
                    parked.append((parked_at, row, decode_transition(row.raw, self._settings.schema_ids)))
                else:
                    raise BadRecord("bad_key", f"{key.hex()} is not a key of this table")
            except BadRecord as exc:
                # A foreign writer wrote to the changelog. The partition opens without the record: a missing row can
                # only make answers report fewer pooled blocks than there are.
                self._verdicts[BAD_TABLE_RECORD] += 1
                log.warning("%s: a record is skipped: %s", table.name, exc)
        self.pooled.load(blocks, owners, parked)

    def follow(self, table: TableSpec, changes: Sequence[Change]) -> None:
        """Take in rows of the index's table; those of pooled blocks, of which there are few, wait for `resume`."""
        if table != self._table:
            self.index.follow(table, changes)

    def resume(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> bool:
        """Become what `load` makes; the index's table comes first."""
        if table != self._table:
            return self.index.resume(table, items)
        self.load(table, items)
        return True

    def decode(self, records: Sequence[SourceRecord]) -> Sequence[Decoded]:
        """Effect 1: decode each record, or return why it cannot be decoded."""
        if all(record.topic != self._cxl_topic for record in records):
            return self.index.decode(records)
        batches = iter(self.index.decode([record for record in records if record.topic != self._cxl_topic]))
        return [self._transition(record) if record.topic == self._cxl_topic else next(batches) for record in records]

    def _transition(self, record: SourceRecord) -> CxlTransition | BadRecord:
        try:
            return decode_transition(record.value, self._settings.schema_ids)
        except BadRecord as exc:
            return exc

    def apply(self, record: SourceRecord, decoded: Decoded) -> None:
        """Effects 2 to 4 of one record; raises BadRecord if the record belongs in the dead letters."""
        if isinstance(decoded, BadRecord):
            raise decoded
        if isinstance(decoded, CxlTransition):
            self._apply_transition(record, decoded)
            return
        progress = self.index.holdings.progress
        if isinstance(decoded.body, WorkerRemoved):
            ranks = {rank: before for rank, before in progress.items() if rank.worker_id == decoded.rank.worker_id}
            self.index.apply(record, decoded)
            for rank, before in ranks.items():
                self.pooled.progress_changed(rank, before, progress[rank], record.timestamp_ms)
            return
        known = progress.get(decoded.rank)
        try:
            self.index.apply(record, decoded)
        finally:  # a batch that is refused may nevertheless have begun an incarnation
            after = progress.get(decoded.rank)
            if after is not None and after is not known:
                self.pooled.progress_changed(decoded.rank, known, after, record.timestamp_ms)

    def _apply_transition(self, record: SourceRecord, transition: CxlTransition) -> None:
        check_home(record, transition.rank.worker_id, self._settings)
        if self._on_effect is not None:
            self._on_effect(2)
            self._on_effect(3)
        try:
            outcome = self.pooled.apply(transition, record.value or b"", record.offset, record.timestamp_ms)
        except BadRecord as exc:
            self._verdicts[f"cxl_refused_{exc.reason}"] += 1
            raise
        self._verdicts[f"cxl_{outcome}"] += 1
        if outcome is TransitionOutcome.DROPPED:
            log.info(
                "event %d of rank %s is dropped: incarnation %d ended before the batch that the event follows",
                transition.event_id,
                transition.rank,
                transition.incarnation,
            )

    @property
    def full(self) -> bool:
        """Whether the transaction must be committed before more is applied."""
        return self.index.full or self.pooled.full

    def source_lost(self) -> None:
        """Degrade the ranks, because records of a source were lost before this partition read them."""
        self.index.source_lost()

    def tick(self, monotonic_ms: int, wall_ms: int, applied_until: Callable[[], int]) -> list[Outgoing]:
        """Run the maintenance tick: expire rows, and do what is due for the index's ranks."""
        self.pooled.expire(wall_ms)
        return self.index.tick(monotonic_ms, wall_ms, applied_until)

    def take_refused(self) -> list[tuple[SourceRecord, BadRecord]]:
        """Return parked transitions that turned out to be illegal, or whose batch never arrived."""
        late = self.pooled.take_refused()
        self._verdicts.update(f"cxl_refused_{refusal.why.reason}" for refusal in late)
        return [
            (
                SourceRecord(
                    topic=self._cxl_topic,
                    partition=partition_of(refusal.owner.worker_id, self._settings.partitions),
                    offset=refusal.row.offset,
                    timestamp_ms=refusal.row.timestamp_ms,
                    key=worker_key(refusal.owner.worker_id),
                    value=refusal.row.raw,
                    headers=(),
                ),
                refusal.why,
            )
            for refusal in late
        ]

    def take_changes(self) -> dict[TableSpec, list[Change]]:
        """Return the changed rows of both tables since the last call.

        Owners come before blocks, because an owner's row decides the effective state of its blocks. Owners that are
        removed come last, after the removal of their blocks.
        """
        changes = self.pooled.take_changes()
        records: list[Change] = [(OWNER_KEY.pack(rank), encode_owner(row)) for rank, row in changes.owners if row]
        records += [(block_key(key), None if row is None else encode_block(row)) for key, row in changes.blocks]
        records += [(PARKED_KEY.pack(key), None if row is None else encode_parked(row)) for key, row in changes.parked]
        records += [(OWNER_KEY.pack(rank), None) for rank, row in changes.owners if row is None]
        return {**self.index.take_changes(), self._table: records}

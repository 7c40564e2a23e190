"""What a feed had published, as a bridge that takes it over reads it from Kafka: the table of pooled blocks, and after
it.

What lives here: reading both, and putting the chunks into the feed's pools. What must not: what follows (bridge).

The table lags what was published, so that the transitions that no agent has applied yet are read as well. A transition
that is read twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import Incarnation, RankId, SequenceHash
from streams.cxl.events import BlockAddress, CxlTransition
from streams.cxl.records import BLOCK_PREFIX, decode_block, decode_transition
from streams.engines.pooled_rows import read_rows
from streams.engines.recovery import applied_offset
from streams.errors import BadRecord
from streams.kafka.clients import Record, partition_of, worker_key
from streams.kafka.log_offsets import first_offset
from streams.lmcache.pools import Chunk, Feed, FeedPools, ModelNames, Owner
from streams.lmcache.rows import chunk_of
from streams.settings import ScopeSettings
from streams.tables.changelog import read_to_end
from streams.tables.records import PARTITION_KEY
from streams.topics import topics

#: A row of the table: its owner, and the hash of its last block.
_RowKey = tuple[RankId, SequenceHash]


@dataclass(frozen=True, slots=True)
class RecoveredFeed:
    """Chunks that a feed had published, each with its owner and its pool's epoch.

    incarnation: the greatest one in which that was.
    """

    chunks: list[tuple[Owner, Chunk, int]]
    incarnation: Incarnation

    def adopted_by(self, pools: FeedPools, models: ModelNames) -> None:
        """Put the chunks into the feed's pools. Its cursors must be those of its record, which may be older than the
        rows.

        Rows of earlier epochs have ended. Those of a later one are evicted: the server was restarted after the feed's
        position, and what it has stored and deleted since then is about to be read again. Rows of a model that has
        another name by now are evicted, and published again under that name. Each row has a name, which what is about
        to be read may need; the chunks that were stored last are tried first.
        """
        for owner, chunk, epoch in sorted(self.chunks, key=lambda each: each[1].stored_s):
            pools.adopt_name(owner, chunk)
            current, model = pools.epoch_of(owner.pool), models.our_name(owner.model)
            if model != owner.model:
                if epoch == current and models.block_size_of(model) == chunk.key[1].block_size:
                    pools.adopt(owner._replace(model=model), replace(chunk, published=None))
                pools.adopt_ended(owner, chunk)
            elif epoch == current:
                pools.adopt(owner, chunk)
            else:
                pools.adopt_ended(owner, chunk if epoch > current else None)


def recover(settings: ScopeSettings, feed: Feed, models: ModelNames) -> RecoveredFeed:
    """Read what a feed had published. Blocks; raises TableError, KafkaException."""
    worker_id = feed.worker_id
    partition, key = partition_of(worker_id, settings.partitions), worker_key(worker_id)
    topic = topics(settings).cxl_events.name
    applied = _applied(settings, partition, topic)
    rows: dict[_RowKey, tuple[Owner, Chunk, int]] = {}
    newest = 0

    def fold(records: list[Record]) -> None:
        nonlocal newest
        for record in records:
            if record.key == key:
                newest = max(newest, _fold(rows, record.value, settings, models))

    for row_key, value in read_rows(settings, partition, [worker_id]).items():
        if not row_key.startswith(BLOCK_PREFIX):
            continue
        try:
            where, row = decode_block(row_key, value)
        except BadRecord:
            continue  # agents and routers skip the record as well
        placement = row.placement
        newest = max(newest, placement.incarnation)
        if placement.state is CxlMemoryState.EVICTED:
            continue
        block = BlockAddress(where.sequence, row.parent, row.position), row.engine
        size = models.block_size_of(placement.model)
        found = chunk_of(
            where.owner, where.pool_id, placement.model, placement.state, block, row.note, placement.span, size
        )
        if found is not None:
            rows[where.owner, where.sequence] = *found, placement.pool_epoch
    log = first_offset(settings, topic, partition, applied + 1)
    if log.first is not None:
        read_to_end(settings, topic, partition, log.first, fold)
    return RecoveredFeed(list(rows.values()), Incarnation(newest))


def _applied(settings: ScopeSettings, partition: int, topic: str) -> int:
    """Read up to which offset of a topic the tables contain its records; -1 for none."""
    key, found = PARTITION_KEY.pack(partition), dict[bytes, bytes]()

    def take(records: list[Record]) -> None:
        found.update((record.key, record.value) for record in records if record.key == key and record.value is not None)

    read_to_end(settings, topics(settings).index_changelog.name, partition, None, take)
    return applied_offset(found, key, topic)


def _fold(
    rows: dict[_RowKey, tuple[Owner, Chunk, int]], raw: bytes | None, settings: ScopeSettings, models: ModelNames
) -> int:
    """Apply a record of `cxl-events`, and return its incarnation; 0 for one that cannot be used."""
    try:
        read: CxlTransition = decode_transition(raw, settings.schema_ids)
    except BadRecord:
        return 0  # the agent copies it to the dead letters
    size = models.block_size_of(read.model)
    notes = read.blocks.notes or (b"",) * len(read.blocks)
    for block, note in zip(read.blocks.rows(), notes, strict=True):
        where = read.rank, block[0].sequence
        found = chunk_of(read.rank, read.pool_id, read.model, read.state, block, note, read.span, size)
        if read.state is CxlMemoryState.EVICTED or found is None:
            rows.pop(where, None)
        else:
            rows[where] = *found, read.pool_epoch
    return read.incarnation

"""Keys and values of the prefix-index table, to bytes and back: run, progress and partition records, parked chunks.

What lives here: pure conversion. What must not: reading or writing Kafka or RocksDB. A key is one letter followed by
fixed-width big-endian fields, so that rows of one kind are adjacent in RocksDB, and among them rows of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streams.core.events import FeedState, MoeLabels
from streams.core.hashing import pack_hashes, sequence_hashes
from streams.core.ids import SequenceHash, Tier
from streams.core.reducer.ordering import Health, Progress
from streams.core.reducer.restatement import ChunkKey
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey
from streams.errors import BadRecord
from streams.kafka.avro_frames import codec
from streams.kafka.shapes import (
    EPOCH,
    HASH,
    FixedKey,
    RecordShape,
    Shape,
    by_name,
    hashes,
    many,
    optional,
    rank_key,
    rank_of,
)

#: `SourceProgress.behind_ms` of an owner that has not reached the end of its sources since it opened the partition, so
#: that it cannot know how long their oldest records have been waiting. Greater than any lag that settings tolerate.
BEHIND_UNKNOWN_MS = (1 << 53) - 1

#: Key and value of a changed record; None is a tombstone.
Change = tuple[bytes, bytes | None]

_PARENT = optional(HASH)
_LABELS = Shape(MoeLabels)

RUN_KEY: FixedKey[RunKey] = FixedKey(
    b"R",
    "QIBQ",
    "a run",
    lambda key: (*key.rank, key.tier, key.first),
    lambda worker_id, dp_rank, tier, first: RunKey(rank_of(worker_id, dp_rank), Tier(tier), SequenceHash(first)),
)
PROGRESS_KEY = rank_key(b"P", "a progress record")
PARTITION_KEY: FixedKey[int] = FixedKey(b"Z", "I", "a partition record", lambda partition: (partition,), int)

#: Chunks of an incomplete restatement. The value is the record of kv-events as received; views skip it.
CHUNK_KEY: FixedKey[ChunkKey] = FixedKey(
    b"C",
    "QII",
    "a parked chunk",
    lambda key: (*key.rank, key.chunk),
    lambda worker_id, dp_rank, chunk: ChunkKey(rank_of(worker_id, dp_rank), chunk),
)


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """How far one source topic is applied.

    Offsets are -1 before the first record. behind_ms: for how long the sources may have had records that the owner has
    not applied, by the owner's monotonic clock: the time since the broker was asked for the newest end that is reached.
    0 if it was asked a moment ago, BEHIND_UNKNOWN_MS if no end has been reached yet.
    """

    topic: str
    topic_id: str
    applied_offset: int
    applied_at_ms: int
    end_offset: int
    behind_ms: int


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """The state of a partition's sources at its last transaction."""

    partition: int
    written_at_ms: int
    owner: str
    sources: tuple[SourceProgress, ...]


def encode_run(run: Run) -> bytes:
    """Return the value of a run record."""
    n_bytes = (len(run.sequence) + 7) // 8
    return codec("prefix-index-run").encode(
        {
            **EPOCH.write(run.epoch),
            "start": run.start,
            "parent": _PARENT.write(run.parent),
            "local_hashes": pack_hashes(run.local),
            "engine_hashes": pack_hashes(run.engine),
            "present": run.present.to_bytes(n_bytes, "little"),
            "labels": [{"offset": offset, **_LABELS.write(moe)} for offset, moe in sorted(run.moe.items())],
        }
    )


def decode_run(key: bytes, value: bytes) -> Run:
    """Decode a run from its key and value; raises BadRecord.

    Sequence hashes are not stored, since they follow from the parent and the local hashes; the key, which contains the
    first one, verifies them.
    """
    run_id = RUN_KEY.parse(key)
    datum = codec("prefix-index-run").decode(value)
    local, engine = hashes(datum["local_hashes"]), hashes(datum["engine_hashes"])
    parent: SequenceHash | None = _PARENT.read(datum["parent"])
    sequence = sequence_hashes(local, parent)
    if not 1 <= len(local) == len(engine) <= RUN_BLOCKS_MAX or np.uint64(run_id.first) != sequence[0]:
        raise BadRecord("bad_run", f"run {run_id.first} of rank {run_id.rank} does not match its key")
    present = int.from_bytes(datum["present"], "little")
    offsets = [labels["offset"] for labels in datum["labels"]]
    if not 0 < present < 1 << len(local) or not all(0 <= offset < len(local) for offset in offsets):
        raise BadRecord(
            "bad_run", f"run {run_id.first} of rank {run_id.rank} has no held block, or names blocks beyond its end"
        )
    if datum["start"] < 0 or (datum["start"] == 0) != (parent is None):
        raise BadRecord("bad_run", f"run {run_id.first} of rank {run_id.rank} is at {datum['start']}, parent {parent}")
    return Run(
        key=run_id,
        epoch=EPOCH.read(datum),
        start=datum["start"],
        parent=parent,
        local=local.tolist(),
        engine=engine.tolist(),
        sequence=sequence.tolist(),
        present=present,
        moe={labels["offset"]: _LABELS.read(labels) for labels in datum["labels"]},
    )


_PROGRESS = RecordShape(
    "prefix-index-progress",
    Shape(Progress, in_key=("rank",), epoch=EPOCH, digest=HASH, health=by_name(Health), feed=by_name(FeedState)),
)
encode_progress = _PROGRESS.encode


def decode_progress(key: bytes, value: bytes) -> Progress:
    """Decode progress from its key and value; raises BadRecord."""
    return _PROGRESS.decode(value, rank=PROGRESS_KEY.parse(key))


_PARTITION = RecordShape(
    "prefix-index-partition",
    Shape(PartitionRecord, in_key=("partition",), sources=many(Shape(SourceProgress).nested())),
)
encode_partition = _PARTITION.encode


def decode_partition(key: bytes, value: bytes) -> PartitionRecord:
    """Decode a partition record from its key and value; raises BadRecord."""
    return _PARTITION.decode(value, partition=PARTITION_KEY.parse(key))

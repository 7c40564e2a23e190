"""Keys and values of the prefix-index table, to bytes and back: run, progress and partition records, parked chunks.

What lives here: pure conversion. What must not: reading or writing Kafka or RocksDB. A key is one letter followed by
fixed-width big-endian fields, so that rows of one kind are adjacent in RocksDB, and among them rows of one rank.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from streams.avro_numbers import encoded_long, read_long, read_text
from streams.codec import codec, from_hash, from_long, to_hash, to_long
from streams.core.events import FeedState, MoeLabels
from streams.core.hashing import pack_hashes, sequence_hashes, unpack_hashes
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.reducer.restatement import ChunkKey
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey
from streams.errors import BadRecord, InvalidRequest, KvStreamsError

RUN_PREFIX = b"R"
PROGRESS_PREFIX = b"P"
PARTITION_PREFIX = b"Z"

#: Chunks of an incomplete restatement. The value is the record of kv-events as received; views skip it.
PARKED_PREFIX = b"C"

#: `SourceProgress.behind_ms` of an owner that has not reached the end of its sources since it opened the partition, so
#: that it cannot know how long their oldest records have been waiting. Greater than any lag that settings tolerate.
BEHIND_UNKNOWN_MS = (1 << 53) - 1

#: Key and value of a changed record; None is a tombstone.
Change = tuple[bytes, bytes | None]

_RUN_KEY = struct.Struct(">cQIBQ")
_PROGRESS_KEY = struct.Struct(">cQI")
_PARKED_KEY = struct.Struct(">cQII")
_PARTITION_KEY = struct.Struct(">cI")
_PARTITION_HEADER = codec("prefix-index-partition").header


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


def run_key(key: RunKey) -> bytes:
    """Return the key of a run record."""
    return _RUN_KEY.pack(RUN_PREFIX, key.rank.worker_id, key.rank.dp_rank, key.tier, key.first)


def parse_run_key(raw: bytes) -> RunKey:
    """Parse the key of a run record; raises BadRecord."""
    try:
        prefix, worker_id, dp_rank, tier, first = _RUN_KEY.unpack(raw)
        if prefix != RUN_PREFIX:
            raise ValueError(prefix)
        return RunKey(RankId(WorkerId(worker_id), DpRank(dp_rank)), Tier(tier), SequenceHash(first))
    except (struct.error, ValueError) as exc:
        raise BadRecord("bad_key", f"{raw.hex()} is not the key of a run") from exc


def progress_key(rank: RankId) -> bytes:
    """Return the key of a progress record."""
    return _PROGRESS_KEY.pack(PROGRESS_PREFIX, rank.worker_id, rank.dp_rank)


def parse_progress_key(raw: bytes) -> RankId:
    """Parse the key of a progress record; raises BadRecord."""
    try:
        prefix, worker_id, dp_rank = _PROGRESS_KEY.unpack(raw)
    except struct.error as exc:
        raise BadRecord("bad_key", f"{raw.hex()} is not the key of a progress record") from exc
    if prefix != PROGRESS_PREFIX:
        raise BadRecord("bad_key", f"{raw.hex()} is not the key of a progress record")
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


def parked_key(key: ChunkKey) -> bytes:
    """Return the key of a parked chunk."""
    return _PARKED_KEY.pack(PARKED_PREFIX, key.rank.worker_id, key.rank.dp_rank, key.chunk)


def parse_parked_key(raw: bytes) -> ChunkKey:
    """Parse the key of a parked chunk; raises BadRecord."""
    try:
        prefix, worker_id, dp_rank, chunk = _PARKED_KEY.unpack(raw)
        if prefix != PARKED_PREFIX:
            raise ValueError(prefix)
    except (struct.error, ValueError) as exc:
        raise BadRecord("bad_key", f"{raw.hex()} is not the key of a parked chunk") from exc
    return ChunkKey(RankId(WorkerId(worker_id), DpRank(dp_rank)), chunk)


def partition_key(partition: int) -> bytes:
    """Return the key of the partition record."""
    return _PARTITION_KEY.pack(PARTITION_PREFIX, partition)


def encode_run(run: Run) -> bytes:
    """Return the value of a run record."""
    n_bytes = (len(run.sequence) + 7) // 8
    return codec("prefix-index-run").encode(
        {
            "incarnation": to_long(run.epoch.incarnation),
            "generation": run.epoch.generation,
            "start": run.start,
            "parent": to_hash(run.parent),
            "local_hashes": pack_hashes(run.local),
            "engine_hashes": pack_hashes(run.engine),
            "present": run.present.to_bytes(n_bytes, "little"),
            "labels": [
                {
                    "offset": offset,
                    "layer_id": moe.layer_id,
                    "expert_id": moe.expert_id,
                    "expert_group": moe.expert_group,
                }
                for offset, moe in sorted(run.moe.items())
            ],
        }
    )


def decode_run(key: bytes, value: bytes) -> Run:
    """Decode a run from its key and value; raises BadRecord.

    Sequence hashes are not stored, since they follow from the parent and the local hashes; the key, which contains the
    first one, verifies them.
    """
    run_id = parse_run_key(key)
    datum = codec("prefix-index-run").decode(value)
    try:
        local = unpack_hashes(datum["local_hashes"])
        engine = unpack_hashes(datum["engine_hashes"])
    except InvalidRequest as exc:
        raise BadRecord("bad_hashes", exc.message) from exc
    parent = from_hash(datum["parent"])
    sequence = sequence_hashes(local, None if parent is None else SequenceHash(parent))
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
        epoch=Epoch(Incarnation(from_long(datum["incarnation"])), datum["generation"]),
        start=datum["start"],
        parent=None if parent is None else SequenceHash(parent),
        local=local.tolist(),
        engine=engine.tolist(),
        sequence=sequence.tolist(),
        present=present,
        moe={
            labels["offset"]: MoeLabels(labels["layer_id"], labels["expert_id"], labels["expert_group"])
            for labels in datum["labels"]
        },
    )


def encode_progress(progress: Progress) -> bytes:
    """Return the value of a progress record."""
    return codec("prefix-index-progress").encode(
        {
            "incarnation": to_long(progress.epoch.incarnation),
            "generation": progress.epoch.generation,
            "sequence": progress.sequence,
            "digest": to_hash(progress.digest),
            "health": progress.health.name.lower(),
            "model": progress.model,
            "block_size": progress.block_size,
            "n_blocks": progress.n_blocks,
            "n_gaps": progress.n_gaps,
            "n_unknown_parents": progress.n_unknown_parents,
            "n_unknown_removals": progress.n_unknown_removals,
            "lease_ms": progress.lease_ms,
            "silent": progress.silent,
            "feed": progress.feed.name.lower(),
        }
    )


def decode_progress(key: bytes, value: bytes) -> Progress:
    """Decode progress from its key and value; raises BadRecord."""
    rank = parse_progress_key(key)
    datum = codec("prefix-index-progress").decode(value)
    return Progress(
        rank=rank,
        epoch=Epoch(Incarnation(from_long(datum["incarnation"])), datum["generation"]),
        sequence=datum["sequence"],
        digest=from_hash(datum["digest"]) or 0,
        health=Health[datum["health"].upper()],
        model=datum["model"],
        block_size=datum["block_size"],
        n_blocks=datum["n_blocks"],
        n_gaps=datum["n_gaps"],
        n_unknown_parents=datum["n_unknown_parents"],
        n_unknown_removals=datum["n_unknown_removals"],
        lease_ms=datum["lease_ms"],
        silent=datum["silent"],
        feed=FeedState[datum["feed"].upper()],
    )


def encode_partition(record: PartitionRecord) -> bytes:
    """Return the value of a partition record. It has the bytes of fastavro, which takes three times as long.

    Raises KvStreamsError for a value that does not fit the schema.
    """
    try:
        owner = record.owner.encode()
        parts = [_PARTITION_HEADER, encoded_long(record.written_at_ms), encoded_long(len(owner)), owner]
        if record.sources:
            parts.append(encoded_long(len(record.sources)))
        for source in record.sources:
            topic, topic_id = source.topic.encode(), source.topic_id.encode()
            parts += (
                encoded_long(len(topic)),
                topic,
                encoded_long(len(topic_id)),
                topic_id,
                encoded_long(source.applied_offset),
                encoded_long(source.applied_at_ms),
                encoded_long(source.end_offset),
                encoded_long(source.behind_ms),
            )
    except ValueError as exc:
        raise KvStreamsError(f"cannot encode a prefix-index-partition record: {exc}") from exc
    parts.append(b"\x00")  # the end of the array
    return b"".join(parts)


def decode_partition(key: bytes, value: bytes) -> PartitionRecord:
    """Decode a partition record from its key and value; raises BadRecord."""
    try:
        prefix, partition = _PARTITION_KEY.unpack(key)
        if prefix != PARTITION_PREFIX:
            raise ValueError(prefix)
    except (struct.error, ValueError) as exc:
        raise BadRecord("bad_key", f"{key.hex()} is not the key of a partition record") from exc
    try:
        return _plain_partition(partition, value)
    except (IndexError, UnicodeDecodeError):  # fastavro reads every form, and says what is wrong
        pass
    datum = codec("prefix-index-partition").decode(value)
    return PartitionRecord(
        partition=partition,
        written_at_ms=datum["written_at_ms"],
        owner=datum["owner"],
        sources=tuple(SourceProgress(**source) for source in datum["sources"]),
    )


def _plain_partition(partition: int, value: bytes) -> PartitionRecord:
    """Decode the value of a partition record as `encode_partition` writes it; raises IndexError for any other form.

    A router reads one for each partition of each transaction, and fastavro takes three times as long.
    """
    if not value.startswith(_PARTITION_HEADER):
        raise IndexError(0)
    written_at_ms, at = read_long(value, len(_PARTITION_HEADER))
    owner, at = read_text(value, at)
    n_sources, at = read_long(value, at)
    sources = []
    for _ in range(n_sources):
        topic, at = read_text(value, at)
        topic_id, at = read_text(value, at)
        applied_offset, at = read_long(value, at)
        applied_at_ms, at = read_long(value, at)
        end_offset, at = read_long(value, at)
        behind_ms, at = read_long(value, at)
        sources.append(SourceProgress(topic, topic_id, applied_offset, applied_at_ms, end_offset, behind_ms))
    # The array ends with a block of no items; if it was empty, that was the block whose number was read above.
    if n_sources < 0 or value[at if n_sources else at - 1] != 0 or at + (n_sources > 0) != len(value):
        raise IndexError(at)
    return PartitionRecord(partition, written_at_ms, owner, tuple(sources))

"""Bytes of CXL records: `cxl-events`, pools of the registry, and keys and values of the table of pooled blocks.

What lives here: pure conversion, and the values of the table's rows. What must not: reading or writing Kafka or
RocksDB, and the meaning of a record. A key of the table is one letter followed by fixed-width big-endian numbers; the
pool id, which varies in length, comes last.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streams.codec import codec, from_hash, from_long, to_hash, to_long
from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import BEFORE_FIRST
from streams.core.hashing import pack_hashes, unpack_hashes
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import (
    POOL_EPOCH_MAX,
    POOL_MEMBERS_MAX,
    TRANSITION_BLOCKS_MAX,
    AddressedBlocks,
    CxlPool,
    CxlTransition,
    check_pool_id,
)
from streams.errors import BadRecord, InvalidRequest
from streams.topics import CXL_EVENT_BYTES_MAX

#: Prefix of a pool's key in the topic `workers`, where a worker's key is its id in decimal digits.
POOL_KEY_PREFIX = b"pool/"

BLOCK_PREFIX = b"B"
OWNER_PREFIX = b"O"
PARKED_PREFIX = b"K"

#: Prefixes of the rows that transitions of a rank leave.
TRANSITION_ROWS = (BLOCK_PREFIX, PARKED_PREFIX)

_NO_INCARNATION = Incarnation(0)
_I32_MAX = (1 << 31) - 1
_BLOCK_KEY = struct.Struct(">cQQI")
_OWNER_KEY = struct.Struct(">cQI")
_PARKED_KEY = struct.Struct(">cQIQ")


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The row of a block of one owner in one pool."""

    sequence: SequenceHash
    owner: RankId
    pool_id: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a block is according to one transition. Rows of blocks from the same transition share one placement.

    state: the state entered (in_transit, cxl_pooled or evicted), even if the owner's incarnation has ended since.
    incarnation: the owner's incarnation in which the state was entered. entered_at_ms: append time of the transition.
    """

    state: CxlMemoryState
    pool_id: str
    pool_epoch: int
    accessible_workers: tuple[WorkerId, ...]
    model: str
    incarnation: Incarnation
    entered_at_ms: int


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row of the table: a block's position in its chain, its owner's name of it, and its placement."""

    placement: Placement
    parent: SequenceHash | None
    position: int
    engine: EngineHash


class EndedIncarnation(NamedTuple):
    """An incarnation that ended, or that started to number its batches again.

    sequence: its last batch on kv-events. ended_at_ms: append time of the record that ended it.
    """

    incarnation: Incarnation
    sequence: int
    ended_at_ms: int


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """What the table keeps about an owner in addition to its blocks.

    newest_incarnation: the newest one for which a transition was read. incarnation, ended, ended_at_ms: the current
    incarnation according to kv-events, whether the owner was removed in it, and since when this is so.
    ended_incarnations: those that ended, in ascending order.
    """

    newest_incarnation: Incarnation = _NO_INCARNATION
    incarnation: Incarnation = _NO_INCARNATION
    ended: bool = False
    ended_at_ms: int = 0
    ended_incarnations: tuple[EndedIncarnation, ...] = ()


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """The row of a parked transition; the number is its position in order of arrival."""

    owner: RankId
    number: int


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """A transition that waits for its batch of `kv-events`, or for an earlier parked one. raw: its unchanged record."""

    offset: int
    timestamp_ms: int
    raw: bytes


# -- cxl-events ----------------------------------------------------------------------------------------------------


def encode_transition(transition: CxlTransition) -> bytes:
    """Encode one record of cxl-events."""
    return codec("cxl-events").encode(
        {
            "worker_id": to_long(transition.rank.worker_id),
            "dp_rank": transition.rank.dp_rank,
            "model": transition.model,
            "incarnation": to_long(transition.incarnation),
            "follows": transition.follows,
            "event_id": to_long(transition.event_id),
            "emitted_at_ms": transition.emitted_at_ms,
            "state": transition.state.value,
            "pool_id": transition.pool_id,
            "pool_epoch": transition.pool_epoch,
            "accessible_workers": [to_long(worker) for worker in transition.accessible_workers],
            "sequence_hashes": pack_hashes(transition.blocks.sequence),
            "parents": pack_hashes(transition.blocks.parents),
            "positions": transition.blocks.positions.astype("<u4").tobytes(),
            "engine_hashes": pack_hashes(transition.blocks.engine),
        }
    )


def decode_transition(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> CxlTransition:
    """Decode one record of cxl-events; raises BadRecord."""
    if raw is not None and len(raw) > CXL_EVENT_BYTES_MAX:
        raise BadRecord("too_large", f"a transition of {len(raw)} bytes; at most {CXL_EVENT_BYTES_MAX}")
    datum = codec("cxl-events").decode(raw, schema_ids)
    if not 0 <= datum["dp_rank"] <= _I32_MAX:
        raise BadRecord("bad_rank", f"data-parallel rank is {datum['dp_rank']}")
    if datum["follows"] < BEFORE_FIRST:
        raise BadRecord("bad_sequence", f"a transition cannot follow batch {datum['follows']}")
    if not 0 <= datum["pool_epoch"] <= POOL_EPOCH_MAX:
        raise BadRecord("bad_pool", f"epoch {datum['pool_epoch']} of a pool is out of range")
    if len(datum["accessible_workers"]) > POOL_MEMBERS_MAX:
        raise BadRecord("bad_transition", f"{len(datum['accessible_workers'])} workers; at most {POOL_MEMBERS_MAX}")
    try:
        if datum["pool_id"] is not None:
            check_pool_id(datum["pool_id"])
    except InvalidRequest as exc:
        raise BadRecord("bad_pool", exc.message) from exc
    return CxlTransition(
        rank=RankId(WorkerId(from_long(datum["worker_id"])), DpRank(datum["dp_rank"])),
        model=datum["model"],
        incarnation=Incarnation(from_long(datum["incarnation"])),
        follows=datum["follows"],
        event_id=from_long(datum["event_id"]),
        state=CxlMemoryState(datum["state"]),
        pool_id=datum["pool_id"],
        pool_epoch=datum["pool_epoch"],
        accessible_workers=_workers(datum["accessible_workers"]),
        emitted_at_ms=datum["emitted_at_ms"],
        blocks=_blocks(datum),
    )


def _blocks(datum: Mapping[str, bytes]) -> AddressedBlocks:
    try:
        sequence, parents, engine = (
            unpack_hashes(datum[name]) for name in ("sequence_hashes", "parents", "engine_hashes")
        )
        if len(datum["positions"]) % 4:
            raise InvalidRequest(f"{len(datum['positions'])} bytes are not a whole number of 4-byte positions")
    except InvalidRequest as exc:
        raise BadRecord("bad_hashes", exc.message) from exc
    positions = np.frombuffer(datum["positions"], dtype="<u4")
    if not len(sequence) == len(parents) == len(engine) == len(positions):
        counts = [len(each) for each in (sequence, parents, positions, engine)]
        raise BadRecord("bad_hashes", f"columns differ in length: {counts} hashes, parents, positions, engine hashes")
    if len(positions) and int(positions.max()) > _I32_MAX:
        raise BadRecord("bad_hashes", f"position {positions.max()} is out of range")
    if not 1 <= len(sequence) <= TRANSITION_BLOCKS_MAX:
        raise BadRecord("bad_transition", f"{len(sequence)} blocks; a record has 1 to {TRANSITION_BLOCKS_MAX}")
    return AddressedBlocks(sequence, parents, positions, engine)


# -- pools ---------------------------------------------------------------------------------------------------------


def pool_key(pool_id: str) -> bytes:
    """Return a pool's key in the topic `workers`."""
    return POOL_KEY_PREFIX + pool_id.encode()


def parse_pool_key(key: bytes) -> str:
    """Return the pool id in a key; raises BadRecord."""
    try:
        pool_id = key.removeprefix(POOL_KEY_PREFIX).decode()
        check_pool_id(pool_id)
    except (UnicodeDecodeError, InvalidRequest) as exc:
        raise BadRecord("bad_key", f"a key of {len(key)} bytes does not contain a valid pool id") from exc
    return pool_id


def encode_pool(pool: CxlPool) -> bytes:
    """Encode one pool."""
    return codec("cxl-pools").encode(
        {
            "pool_id": pool.pool_id,
            "latency_class": pool.latency_class,
            "capacity_blocks": pool.capacity_blocks,
            "members": [to_long(member) for member in pool.members],
            "epoch": pool.epoch,
            "lost": pool.lost,
            "registered_at_ms": pool.registered_at_ms,
        }
    )


def decode_pool(key: bytes, value: bytes, schema_ids: Mapping[str, int] | None = None) -> CxlPool:
    """Decode one pool; raises BadRecord."""
    pool_id = parse_pool_key(key)
    datum = codec("cxl-pools").decode(value, schema_ids)
    if datum["pool_id"] != pool_id:
        raise BadRecord("wrong_key", "the key is not that of the record's pool")
    try:
        return CxlPool(
            pool_id=pool_id,
            latency_class=datum["latency_class"],
            capacity_blocks=datum["capacity_blocks"],
            members=_workers(datum["members"]),
            epoch=datum["epoch"],
            lost=datum["lost"],
            registered_at_ms=datum["registered_at_ms"],
        )
    except InvalidRequest as exc:
        raise BadRecord("bad_pool", exc.message) from exc


# -- the table -----------------------------------------------------------------------------------------------------


def block_key(key: BlockKey) -> bytes:
    """Return the key of a block's row."""
    return _BLOCK_KEY.pack(BLOCK_PREFIX, key.sequence, key.owner.worker_id, key.owner.dp_rank) + key.pool_id.encode()


def parse_block_key(raw: bytes) -> BlockKey:
    """Decode the key of a block's row; raises BadRecord."""
    try:
        prefix, sequence, worker_id, dp_rank = _BLOCK_KEY.unpack_from(raw)
        pool_id = raw[_BLOCK_KEY.size :].decode()
        if prefix != BLOCK_PREFIX or not pool_id:
            raise ValueError(prefix)
    except (struct.error, ValueError) as exc:
        raise BadRecord("bad_key", f"{raw.hex()} is not the key of a pooled block") from exc
    return BlockKey(SequenceHash(sequence), RankId(WorkerId(worker_id), DpRank(dp_rank)), pool_id)


def encode_block(row: BlockRow) -> bytes:
    """Encode the value of a block's row."""
    placement = row.placement
    return codec("cxl-block").encode(
        {
            "state": placement.state.value,
            "pool_epoch": placement.pool_epoch,
            "accessible_workers": [to_long(worker) for worker in placement.accessible_workers],
            "model": placement.model,
            "incarnation": to_long(placement.incarnation),
            "entered_at_ms": placement.entered_at_ms,
            "parent": to_hash(row.parent),
            "position": row.position,
            "engine_hash": to_hash(row.engine),
        }
    )


def decode_block(key: bytes, value: bytes) -> tuple[BlockKey, BlockRow]:
    """Decode a block's row; raises BadRecord."""
    block = parse_block_key(key)
    datum = codec("cxl-block").decode(value)
    parent = from_hash(datum["parent"])
    if datum["position"] < 0 or (datum["position"] == 0) != (parent is None):
        raise BadRecord("bad_row", f"block {block.sequence} at position {datum['position']} has parent {parent}")
    placement = Placement(
        state=CxlMemoryState(datum["state"]),
        pool_id=block.pool_id,
        pool_epoch=datum["pool_epoch"],
        accessible_workers=_workers(datum["accessible_workers"]),
        model=datum["model"],
        incarnation=Incarnation(from_long(datum["incarnation"])),
        entered_at_ms=datum["entered_at_ms"],
    )
    engine = EngineHash(from_hash(datum["engine_hash"]) or 0)
    return block, BlockRow(placement, None if parent is None else SequenceHash(parent), datum["position"], engine)


def owner_key(rank: RankId) -> bytes:
    """Return the key of an owner's row."""
    return _OWNER_KEY.pack(OWNER_PREFIX, rank.worker_id, rank.dp_rank)


def encode_owner(row: OwnerRow) -> bytes:
    """Encode the value of an owner's row."""
    return codec("cxl-owner").encode(
        {
            "newest_incarnation": to_long(row.newest_incarnation),
            "incarnation": to_long(row.incarnation),
            "ended": row.ended,
            "ended_at_ms": row.ended_at_ms,
            "ended_incarnations": [
                {
                    "incarnation": to_long(ended.incarnation),
                    "sequence": ended.sequence,
                    "ended_at_ms": ended.ended_at_ms,
                }
                for ended in row.ended_incarnations
            ],
        }
    )


def parse_owner_key(raw: bytes) -> RankId:
    """Decode the key of an owner's row; raises BadRecord."""
    try:
        prefix, worker_id, dp_rank = _OWNER_KEY.unpack(raw)
        if prefix != OWNER_PREFIX:
            raise ValueError(prefix)
    except (struct.error, ValueError) as exc:
        raise BadRecord("bad_key", f"{raw.hex()} is not the key of an owner") from exc
    return RankId(WorkerId(worker_id), DpRank(dp_rank))


def decode_owner(key: bytes, value: bytes) -> tuple[RankId, OwnerRow]:
    """Decode an owner's row; raises BadRecord."""
    rank = parse_owner_key(key)
    datum = codec("cxl-owner").decode(value)
    return rank, OwnerRow(
        newest_incarnation=Incarnation(from_long(datum["newest_incarnation"])),
        incarnation=Incarnation(from_long(datum["incarnation"])),
        ended=datum["ended"],
        ended_at_ms=datum["ended_at_ms"],
        ended_incarnations=tuple(
            EndedIncarnation(Incarnation(from_long(ended["incarnation"])), ended["sequence"], ended["ended_at_ms"])
            for ended in datum["ended_incarnations"]
        ),
    )


def parked_key(key: ParkedKey) -> bytes:
    """Return the key of a parked transition."""
    return _PARKED_KEY.pack(PARKED_PREFIX, key.owner.worker_id, key.owner.dp_rank, key.number)


def encode_parked(row: ParkedRow) -> bytes:
    """Encode the value of a parked transition."""
    return codec("cxl-parked").encode({"offset": row.offset, "timestamp_ms": row.timestamp_ms, "raw": row.raw})


def decode_parked(key: bytes, value: bytes) -> tuple[ParkedKey, ParkedRow]:
    """Decode a parked transition; raises BadRecord."""
    try:
        prefix, worker_id, dp_rank, number = _PARKED_KEY.unpack(key)
        if prefix != PARKED_PREFIX:
            raise ValueError(prefix)
    except (struct.error, ValueError) as exc:
        raise BadRecord("bad_key", f"{key.hex()} is not the key of a parked transition") from exc
    row = ParkedRow(**codec("cxl-parked").decode(value))
    return ParkedKey(RankId(WorkerId(worker_id), DpRank(dp_rank)), number), row


def owner_of_row(key: bytes) -> int | None:
    """Return the worker whose block or parked transition has this key; None for a key that is neither."""
    try:
        return int(_BLOCK_KEY.unpack_from(key)[2] if key.startswith(BLOCK_PREFIX) else _PARKED_KEY.unpack(key)[1])
    except struct.error:
        return None


def _workers(longs: list[int]) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(from_long(each)) for each in longs)

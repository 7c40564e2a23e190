"""Bytes of CXL records: `cxl-events`, pools of the registry, and keys and values of the table of pooled blocks.

What lives here: pure conversion, and the values of the table's rows. What must not: reading or writing Kafka or
RocksDB, and the meaning of a record. A key of the table is one letter followed by fixed-width big-endian numbers; the
pool id, which varies in length, comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import (
    NOTE_BYTES_MAX,
    POOL_EPOCH_MAX,
    POOL_MEMBERS_MAX,
    SPAN_MAX,
    STANDS_ALONE,
    TRANSITION_BLOCKS_MAX,
    AddressedBlocks,
    CxlPool,
    CxlTransition,
    check_pool_id,
)
from streams.errors import BadRecord, InvalidRequest
from streams.kafka.shapes import (
    HASH,
    HASHES,
    I32_MAX,
    RANK,
    TEXTS,
    U64,
    Field,
    FixedKey,
    KeyedRecord,
    NameKey,
    RecordShape,
    Shape,
    by_value,
    many,
    optional,
    rank_key,
    rank_of,
)
from streams.topics import CXL_EVENT_BYTES_MAX

#: Prefix of a pool's key in the topic `workers`, where a worker's key is its id in decimal digits.
POOL_KEY_PREFIX = b"pool/"

BLOCK_PREFIX = b"B"
_NO_INCARNATION = Incarnation(0)
#: The beginning of a block's key; the pool id follows.
_BLOCK_KEY: FixedKey[tuple[int, int, int]] = FixedKey(BLOCK_PREFIX, "QQI", "a pooled block", tuple, lambda *key: key)


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
    span: how many blocks a row stands for, itself and those before it.
    """

    state: CxlMemoryState
    pool_id: str
    pool_epoch: int
    accessible_workers: tuple[WorkerId, ...]
    model: str
    incarnation: Incarnation
    entered_at_ms: int
    span: int = 1


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row of the table: a block's position in its chain, its owner's name and note of it, and its placement."""

    placement: Placement
    parent: SequenceHash | None
    position: int
    engine: EngineHash
    note: bytes = b""


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


def _positions(packed: bytes) -> npt.NDArray[np.uint32]:
    if len(packed) % 4:
        raise BadRecord("bad_hashes", f"{len(packed)} bytes are not a whole number of 4-byte positions")
    return np.frombuffer(packed, dtype="<u4")


def _check_blocks(blocks: AddressedBlocks) -> None:
    counts = [len(column) for column in (blocks.sequence, blocks.parents, blocks.positions, blocks.engine)]
    if len(set(counts)) > 1:
        raise BadRecord("bad_hashes", f"columns differ in length: {counts} hashes, parents, positions, engine hashes")
    if counts[0] and int(blocks.positions.max()) > I32_MAX:
        raise BadRecord("bad_hashes", f"position {blocks.positions.max()} is out of range")
    if blocks.notes and (len(blocks.notes) != counts[0] or max(map(len, blocks.notes)) > NOTE_BYTES_MAX):
        raise BadRecord("bad_transition", f"{len(blocks.notes)} notes on {counts[0]} blocks, or one is too long")
    if not 1 <= counts[0] <= TRANSITION_BLOCKS_MAX:
        raise BadRecord("bad_transition", f"{counts[0]} blocks; a record has 1 to {TRANSITION_BLOCKS_MAX}")


def _check_transition(transition: CxlTransition) -> None:
    if transition.follows < STANDS_ALONE:
        raise BadRecord("bad_sequence", f"a transition cannot follow batch {transition.follows}")
    if not 0 <= transition.pool_epoch <= POOL_EPOCH_MAX:
        raise BadRecord("bad_pool", f"epoch {transition.pool_epoch} of a pool is out of range")
    if not 1 <= transition.span <= SPAN_MAX:
        raise BadRecord("bad_transition", f"each block stands for {transition.span}; at most {SPAN_MAX}")
    n_workers = len(transition.accessible_workers)
    if n_workers > POOL_MEMBERS_MAX:
        raise BadRecord("bad_transition", f"{n_workers} workers; at most {POOL_MEMBERS_MAX}")
    try:
        if transition.pool_id is not None:
            check_pool_id(transition.pool_id)
    except InvalidRequest as exc:
        raise BadRecord("bad_pool", exc.message) from exc


_WORKERS = many(U64)
_STATE = by_value(CxlMemoryState)
_BLOCKS = Shape(
    AddressedBlocks,
    check=_check_blocks,
    sequence=HASHES.named("sequence_hashes"),
    parents=HASHES,
    positions=Field(lambda positions: positions.astype("<u4").tobytes(), _positions),
    engine=HASHES.named("engine_hashes"),
    notes=TEXTS,
)
_TRANSITION = RecordShape(
    "cxl-events",
    Shape(
        CxlTransition,
        check=_check_transition,
        rank=RANK,
        incarnation=U64,
        event_id=U64,
        state=_STATE,
        accessible_workers=_WORKERS,
        blocks=_BLOCKS,
    ),
)
encode_transition = _TRANSITION.encode


def decode_transition(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> CxlTransition:
    """Decode one record of cxl-events; raises BadRecord."""
    if raw is not None and len(raw) > CXL_EVENT_BYTES_MAX:
        raise BadRecord("too_large", f"a transition of {len(raw)} bytes; at most {CXL_EVENT_BYTES_MAX}")
    return _TRANSITION.decode(raw, schema_ids)


# -- pools ---------------------------------------------------------------------------------------------------------


_POOL_KEY = NameKey(POOL_KEY_PREFIX, "pool")
_POOL = KeyedRecord("cxl-pools", Shape(CxlPool, refused="bad_pool", members=_WORKERS), _POOL_KEY, "pool_id")
pool_key, encode_pool = _POOL_KEY.pack, _POOL.encode


def parse_pool_key(key: bytes) -> str:
    """Return the pool id in a key; raises BadRecord."""
    try:
        pool_id = key.removeprefix(POOL_KEY_PREFIX).decode()
        check_pool_id(pool_id)
    except (UnicodeDecodeError, InvalidRequest) as exc:
        raise BadRecord("bad_key", f"a key of {len(key)} bytes does not contain a valid pool id") from exc
    return pool_id


def decode_pool(key: bytes, value: bytes, schema_ids: Mapping[str, int] | None = None) -> CxlPool:
    """Decode one pool; raises BadRecord."""
    parse_pool_key(key)
    return _POOL.decode_row(key, value, schema_ids)


# -- the table -----------------------------------------------------------------------------------------------------


def block_key(key: BlockKey) -> bytes:
    """Return the key of a block's row."""
    return _BLOCK_KEY.pack((key.sequence, *key.owner)) + key.pool_id.encode()


def parse_block_key(raw: bytes) -> BlockKey:
    """Decode the key of a block's row; raises BadRecord."""
    sequence, worker_id, dp_rank = _BLOCK_KEY.parse(raw[: _BLOCK_KEY.n_bytes])
    try:
        pool_id = raw[_BLOCK_KEY.n_bytes :].decode()
    except UnicodeDecodeError as exc:
        raise _BLOCK_KEY.bad(raw) from exc
    if not pool_id:
        raise _BLOCK_KEY.bad(raw)
    return BlockKey(SequenceHash(sequence), rank_of(worker_id, dp_rank), pool_id)


_PLACEMENT = Shape(Placement, in_key=("pool_id",), state=_STATE, accessible_workers=_WORKERS, incarnation=U64)
_BLOCK = RecordShape(
    "cxl-block",
    Shape(BlockRow, placement=_PLACEMENT, parent=optional(HASH), engine=HASH.named("engine_hash")),
)
encode_block = _BLOCK.encode


def decode_block(key: bytes, value: bytes) -> tuple[BlockKey, BlockRow]:
    """Decode a block's row; raises BadRecord."""
    block = parse_block_key(key)
    row = _BLOCK.decode(value, pool_id=block.pool_id)
    if row.position < 0 or (row.position == 0) != (row.parent is None) or row.placement.span < 1:
        raise BadRecord("bad_row", f"block {block.sequence} at position {row.position} has parent {row.parent}")
    return block, row


OWNER_KEY = rank_key(b"O", "an owner")
_OWNER = RecordShape(
    "cxl-owner",
    Shape(
        OwnerRow,
        newest_incarnation=U64,
        incarnation=U64,
        ended_incarnations=many(Shape(EndedIncarnation, incarnation=U64).nested()),
    ),
)
encode_owner = _OWNER.encode


def decode_owner(key: bytes, value: bytes) -> tuple[RankId, OwnerRow]:
    """Decode an owner's row; raises BadRecord."""
    return OWNER_KEY.parse(key), _OWNER.decode(value)


PARKED_KEY: FixedKey[ParkedKey] = FixedKey(
    b"K",
    "QIQ",
    "a parked transition",
    lambda key: (*key.owner, key.number),
    lambda worker_id, dp_rank, number: ParkedKey(rank_of(worker_id, dp_rank), number),
)
_PARKED = RecordShape("cxl-parked", Shape(ParkedRow))
encode_parked = _PARKED.encode


def decode_parked(key: bytes, value: bytes) -> tuple[ParkedKey, ParkedRow]:
    """Decode a parked transition; raises BadRecord."""
    return PARKED_KEY.parse(key), _PARKED.decode(value)


#: Prefixes of the rows that transitions of a rank leave.
TRANSITION_ROWS = (BLOCK_PREFIX, PARKED_KEY.prefix)


def owner_of_row(key: bytes) -> int | None:
    """Return the worker whose block or parked transition has this key; None for a key that is neither."""
    try:
        if key.startswith(BLOCK_PREFIX):
            return _BLOCK_KEY.parse(key[: _BLOCK_KEY.n_bytes])[1]
        return PARKED_KEY.parse(key).owner.worker_id
    except BadRecord:
        return None

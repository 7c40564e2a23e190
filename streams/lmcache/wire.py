"""LMCache's cache events as its servers publish them to Kafka: bytes in, batches out (pure).

What lives here: the JSON of `lmcache.v1.mp_coordinator.api` (0.5.6), and its checks. What must not: what a batch
changes (pools), and Kafka.

A record is `{"batches": [...]}`, with the instance's id as its key. Fields that we do not know are ignored, so that a
later version that only adds fields can be read. A record that LMCache's own coordinator would refuse is refused as a
whole: the numbers of its batches are missing then, which shows that something was lost.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from streams.errors import BadRecord

#: Bytes of a record. LMCache's producer sends at most 1 MB, librdkafka's default, and brokers may allow more.
RECORD_BYTES_MAX = 16 * 1024 * 1024

#: Tokens of a chunk, unless a server has another `--chunk-size`.
CHUNK_TOKENS = 256

#: The position of a chunk whose server did not report it.
NO_OFFSET = -1

#: Characters of an instance's id and of a backend's name, as they are in the path of a URL. Pool ids contain both.
NAME_CHARS_MAX = 56

#: Characters of a model's name, as many as a request's model may have.
MODEL_CHARS_MAX = 512

#: The greatest incarnation, as pools' epochs have one. It is the server's start in seconds.
INCARNATION_MAX = (1 << 52) - 1

_HASH_BYTES_MAX = 64
_I64_MAX = (1 << 63) - 1


class EventType(enum.StrEnum):
    """What a batch reports of all its entries."""

    STORE = "store"
    DELETE = "delete"
    ACCESS = "access"
    CONFIG = "config"


class Tier(enum.StrEnum):
    """The tier of a cache: memory of the server, or what it offloads to."""

    L1 = "l1"
    L2 = "l2"


class Entry(NamedTuple):
    """One rank's object of a chunk, which a batch is about.

    world_size, rank: as in `ObjectKey.ComputeKVRank`; group: of layers. n_bytes, tokens, offset: only stores have them;
    tokens is JSON of a list, empty if they are unknown.
    """

    chunk_hash: bytes
    model: str
    world_size: int
    rank: int
    group: int
    salt: str
    n_bytes: int
    tokens: bytes
    offset: int


class CacheBatch(NamedTuple):
    """Events of one kind from one server, in order. number: counted from 1 in each incarnation."""

    instance: str
    incarnation: int
    number: int
    kind: EventType
    tier: Tier
    backend: str
    shared: bool
    entries: list[Entry]
    capacity_bytes: int
    capacity_revision: int


class _Key(msgspec.Struct, gc=False):
    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class _Entry(msgspec.Struct, gc=False):
    key: _Key
    size_bytes: int = 0
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    token_offset: int = NO_OFFSET


class _Batch(msgspec.Struct):
    instance_id: str
    incarnation: int
    seq: int
    event_type: EventType
    tier: Tier
    backend: str
    entries: list[_Entry] = []
    shared: bool = False
    ts: float = 0.0
    capacity_bytes: int = 0
    capacity_revision: int = 0


class _Record(msgspec.Struct):
    batches: list[_Batch]


_DECODER = msgspec.json.Decoder(_Record)
_NO_TOKENS = (b"", b"[]")


def decode_record(value: bytes | None) -> list[CacheBatch]:
    """Decode one record. Raises BadRecord; its message contains no tokens and no salt."""
    if not value:
        raise BadRecord("empty", "the record has no value")
    if len(value) > RECORD_BYTES_MAX:
        raise BadRecord("too_large", f"a record of {len(value)} bytes; at most {RECORD_BYTES_MAX}")
    try:
        record = _DECODER.decode(value)
    except msgspec.ValidationError as exc:
        raise BadRecord("not_cache_events", _without_values(str(exc))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last one for lists within lists within …
        raise BadRecord("not_json", f"{len(value)} bytes that are not JSON") from None
    return [_batch(batch) for batch in record.batches]


def _without_values(message: str) -> str:
    """Return msgspec's message, which names a field and what was expected there, without a value that it may quote."""
    what, _, where = message.partition(" - at ")
    return f"{what.partition(' ')[0]} value{f' at {where}' if where else ''} is not as in LMCache 0.5.6"


def _batch(batch: _Batch) -> CacheBatch:
    kind = batch.event_type
    has_backend = bool(batch.backend) or kind is not EventType.ACCESS
    if not _is_name(batch.instance_id) or (has_backend and not _is_name(batch.backend)):
        raise BadRecord(
            "bad_name", f"an instance or a backend has no name of 1 to {NAME_CHARS_MAX} printable characters"
        )
    if not 0 <= batch.incarnation <= INCARNATION_MAX or not 1 <= batch.seq <= _I64_MAX:
        raise BadRecord("bad_sequence", f"incarnation {batch.incarnation}, batch {batch.seq}")
    if not 0 <= batch.capacity_bytes <= _I64_MAX or not 0 <= batch.capacity_revision <= _I64_MAX or not batch.ts >= 0:
        raise BadRecord("bad_batch", f"a capacity of {batch.capacity_bytes} bytes, or a time, is out of range")
    if kind is EventType.CONFIG and batch.entries:
        raise BadRecord("bad_batch", "a declaration of capacity has entries")
    return CacheBatch(
        batch.instance_id,
        batch.incarnation,
        batch.seq,
        kind,
        batch.tier,
        batch.backend,
        batch.shared and has_backend,
        [_entry(entry) for entry in batch.entries],
        batch.capacity_bytes,
        batch.capacity_revision,
    )


@functools.lru_cache(maxsize=1024)
def _is_name(name: str) -> bool:
    try:
        return 1 <= len(quote(name, safe="")) <= NAME_CHARS_MAX and name.isprintable()
    except UnicodeEncodeError:
        return False


def _entry(entry: _Entry) -> Entry:
    key = entry.key
    try:
        chunk_hash = bytes.fromhex(key.chunk_hash_hex)
    except ValueError:
        raise BadRecord("bad_key", "a chunk's hash is not hexadecimal") from None
    if not 1 <= len(chunk_hash) <= _HASH_BYTES_MAX:
        raise BadRecord("bad_key", f"a chunk's hash has {len(chunk_hash)} bytes")
    if not 1 <= len(key.model_name) <= MODEL_CHARS_MAX:
        raise BadRecord("bad_key", f"a model's name has {len(key.model_name)} characters; 1 to {MODEL_CHARS_MAX}")
    if key.object_group_id < 0 or not 0 <= key.kv_rank < 1 << 32:
        raise BadRecord("bad_key", f"rank {key.kv_rank} or group {key.object_group_id} is out of range")
    # As ObjectKey.ComputeKVRank packs them, with 8 bits each. Without a world size, the rank's object is the chunk.
    world_size, rank = (key.kv_rank >> 24) or 1, key.kv_rank >> 16 & 0xFF
    if rank >= world_size:
        raise BadRecord("bad_key", f"rank {rank} of {world_size}")
    if entry.size_bytes < 0 or entry.token_offset < NO_OFFSET:
        raise BadRecord("bad_entry", f"{entry.size_bytes} bytes at token {entry.token_offset}")
    tokens = bytes(entry.token_ids)
    return Entry(
        chunk_hash,
        key.model_name,
        world_size,
        rank,
        key.object_group_id,
        key.cache_salt,
        entry.size_bytes,
        b"" if tokens in _NO_TOKENS else tokens,
        entry.token_offset,
    )

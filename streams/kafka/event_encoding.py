"""The bytes of an ordinary record of kv-events, written without a datum for each of its parts.

What lives here: batches of events without labels and CXL metadata, which are nearly all records. What must not: any
other record (streams.kafka.records, with fastavro). The bytes are the same as fastavro's, which
`tests/unit/test_codec.py` checks. A batch of four blocks takes 5 us instead of 16, and a bridge writes thousands per
second.
"""

from __future__ import annotations

from functools import lru_cache

from streams.core.events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvents, FeedState
from streams.core.hashing import pack_hashes
from streams.core.ids import Tier

#: Ranks whose first bytes are kept. All records of an incarnation have the same.
RANKS_KEPT_MAX = 4096

_I32_MAX, _I64_MIN, _I64_MAX, _U64_MAX = (1 << 31) - 1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1

#: Numbers of one byte, by their value.
_ONE_BYTE = tuple(bytes((value,)) for value in range(128))

# Avro writes a member of a union after its number. Each of these is a number below 64, so it is twice itself in a byte.
_BODY_EVENTS, _STORED, _REMOVED, _CLEARED = b"\x00", b"\x00", b"\x02", b"\x04"
_NULL, _HASH = b"\x00", b"\x02"
_END_OF_ARRAY = b"\x00"
_NO_FACTS = _NULL + _NULL  # neither labels nor CXL metadata
_TIERS = {tier: _ONE_BYTE[2 * tier] for tier in Tier}
_FEEDS = {feed: _ONE_BYTE[2 * feed] for feed in FeedState}


def _long(value: int) -> bytes:
    """Write a number as Avro's int and long: zigzag, seven bits per byte."""
    left = value << 1 if value >= 0 else ~(value << 1)
    if left < 128:
        return _ONE_BYTE[left]
    out = bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    out.append(left)
    return bytes(out)


@lru_cache(maxsize=RANKS_KEPT_MAX)
def _beginning(worker_id: int, dp_rank: int, model: str, block_size: int, incarnation: int) -> bytes:
    name = model.encode()
    worker, process = (value - (1 << 64) if value > _I64_MAX else value for value in (worker_id, incarnation))
    return b"".join((_long(worker), _long(dp_rank), _long(len(name)), name, _long(block_size), _long(process)))


def datum_of(batch: EngineBatch) -> bytes | None:
    """Return the datum of a batch of events; None for any other record, and for values that do not fit the schema."""
    body, sequence = batch.body, batch.sequence
    if not (
        type(body) is EngineEvents
        and 0 <= batch.rank.worker_id <= _U64_MAX
        and 0 <= batch.rank.dp_rank <= _I32_MAX
        and 0 <= batch.block_size <= _I32_MAX
        and 0 <= batch.incarnation <= _U64_MAX
        and -1 <= sequence <= _I64_MAX
        and 0 <= batch.digest <= _U64_MAX
        and _I64_MIN <= batch.emitted_at_ms <= _I64_MAX
        and 0 <= batch.n_unindexed <= _I32_MAX
    ):
        return None
    try:
        beginning = _beginning(
            batch.rank.worker_id, batch.rank.dp_rank, batch.model, batch.block_size, batch.incarnation
        )
    except UnicodeEncodeError:
        return None
    parts = [
        beginning,
        _long(sequence),
        batch.digest.to_bytes(8, "little"),
        _long(batch.emitted_at_ms),
        _long(batch.n_unindexed),
        b"\x01" if batch.incomplete else b"\x00",
        _FEEDS[batch.feed],
        _BODY_EVENTS,
    ]
    if body.events:
        parts.append(_long(len(body.events)))
    for event in body.events:
        if type(event) is BlocksStored:
            if event.moe is not None or event.cxl is not None:
                return None
            engine, local = pack_hashes(event.engine), pack_hashes(event.local)
            parts += (
                _STORED + _NULL if event.parent is None else _STORED + _HASH + event.parent.to_bytes(8, "little"),
                _long(len(engine)),
                engine,
                _long(len(local)),
                local,
                _TIERS[event.tier] + _NO_FACTS,
            )
        elif type(event) is BlocksRemoved:
            engine = pack_hashes(event.engine)
            parts += (_REMOVED + _long(len(engine)), engine, _TIERS[event.tier])
        else:
            parts.append(_CLEARED)
    parts.append(_END_OF_ARRAY)
    return b"".join(parts)

"""Values for property tests of records, and what the avro package reads of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import avro.io
import avro.schema
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import (
    U64_MASK,
    DpRank,
    EngineHash,
    Incarnation,
    RankId,
    SequenceHash,
    WorkerId,
)
from streams.cxl.events import BlockAddress, CxlTransition, addressed
from streams.errors import BadRecord
from streams.kafka.avro_frames import schemas_dir

HEADER_BYTES = 10
I31 = (1 << 31) - 1
I63 = (1 << 63) - 1
u64s = st.integers(0, U64_MASK)
counts = st.integers(0, I31)
longs = st.integers(-I63 - 1, I63)
texts = st.text(max_size=12)
ranks = st.builds(lambda worker, rank: RankId(WorkerId(worker), DpRank(rank)), u64s, counts)


def witnessed(schema_name: str, raw: bytes) -> dict[str, Any]:
    """Return what the avro package reads after the header, with nothing but the schema file."""
    schema = avro.schema.parse((schemas_dir() / f"{schema_name}.avsc").read_text())
    stream = io.BytesIO(raw[HEADER_BYTES:])
    datum: dict[str, Any] = avro.io.DatumReader(schema).read(avro.io.BinaryDecoder(stream))
    assert not stream.read()
    return datum


def reason_of(decode: Callable[[], Any]) -> str | None:
    """Return the reason why a record is refused, None if it is not; any exception but BadRecord fails the test."""
    try:
        decode()
    except BadRecord as exc:
        return exc.reason
    return None


RANK = RankId(WorkerId(U64_MASK), DpRank(3))

ADDRESSES = [
    (BlockAddress(SequenceHash(5), SequenceHash(4), 1), EngineHash(11)),
    (BlockAddress(SequenceHash(6), SequenceHash(5), 2), EngineHash(12)),
]

TRANSITION = CxlTransition(
    RANK,
    "m",
    Incarnation(2),
    7,
    1,
    CxlMemoryState.IN_TRANSIT,
    "pool",
    3,
    (WorkerId(7),),
    9,
    addressed(ADDRESSES),
)

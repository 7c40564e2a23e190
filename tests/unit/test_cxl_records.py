"""Records of CXL: written and read back, read by a second Avro library, and refused if they are invalid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import U64_MASK, EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import (
    POOL_EPOCH_MAX,
    POOL_MEMBERS_MAX,
    POOL_NAME_CHARS_MAX,
    TRANSITION_BLOCKS_MAX,
    BlockAddress,
    CxlPool,
    CxlTransition,
    addressed,
)
from streams.cxl.records import (
    OWNER_KEY,
    PARKED_KEY,
    BlockKey,
    BlockRow,
    EndedIncarnation,
    OwnerRow,
    ParkedKey,
    ParkedRow,
    Placement,
    block_key,
    decode_block,
    decode_owner,
    decode_parked,
    decode_pool,
    decode_transition,
    encode_block,
    encode_owner,
    encode_parked,
    encode_pool,
    encode_transition,
    pool_key,
)
from streams.errors import BadRecord, InvalidRequest
from streams.kafka.avro_frames import codec
from streams.kafka.shapes import from_long
from streams.topics import CXL_EVENT_BYTES_MAX
from tests.helpers.encoding import RANK, TRANSITION, counts, longs, ranks, reason_of, texts, u64s, witnessed

positions = st.integers(0, (1 << 31) - 1)
pool_ids = st.text(min_size=1, max_size=12).filter(lambda name: name.isprintable() and name not in (".", ".."))
epochs = st.integers(0, POOL_EPOCH_MAX)
workers = st.lists(u64s.map(WorkerId), max_size=3).map(tuple)
incarnations = u64s.map(Incarnation)
sequences = st.integers(-1, (1 << 63) - 1)


@st.composite
def addresses(draw: st.DrawFn) -> BlockAddress:
    position = draw(positions)
    return BlockAddress(SequenceHash(draw(u64s)), SequenceHash(draw(u64s)) if position else None, position)


blocks = st.lists(st.tuples(addresses(), u64s.map(EngineHash)), min_size=1, max_size=4)
transitions = st.builds(
    CxlTransition,
    ranks,
    texts,
    incarnations,
    sequences,
    u64s,
    st.sampled_from(CxlMemoryState),
    st.one_of(st.none(), pool_ids),
    epochs,
    workers,
    longs,
    blocks.map(addressed),
)
placements = st.builds(
    Placement,
    st.sampled_from(CxlMemoryState),
    pool_ids,
    st.integers(0, (1 << 63) - 1),
    workers,
    texts,
    incarnations,
    longs,
)
pools = st.builds(
    CxlPool,
    pool_ids,
    pool_ids,
    st.one_of(st.none(), st.integers(1, (1 << 63) - 1)),
    workers,
    epochs,
    st.booleans(),
    longs,
)


@settings(max_examples=150, deadline=None)
@given(sent=transitions)
def test_transitions_come_back_as_they_were(sent: CxlTransition) -> None:
    """A transition keeps every field and every block, and the avro package reads the same values."""
    raw = encode_transition(sent)
    back = decode_transition(raw)
    assert back.blocks.rows() == sent.blocks.rows()
    assert replace(back, blocks=sent.blocks) == sent
    datum = witnessed("cxl-events", raw)
    assert (datum["dp_rank"], datum["follows"], datum["state"]) == (sent.rank.dp_rank, sent.follows, sent.state)


@settings(max_examples=100, deadline=None)
@given(address=addresses(), owner=ranks, engine=u64s, placement=placements)
def test_rows_of_blocks_come_back_as_they_were(
    address: BlockAddress, owner: RankId, engine: int, placement: Placement
) -> None:
    """The key contains the pool, and the value everything else."""
    key = BlockKey(address.sequence, owner, placement.pool_id)
    row = BlockRow(placement, address.parent, address.position, EngineHash(engine))
    assert decode_block(block_key(key), encode_block(row)) == (key, row)


@settings(max_examples=100, deadline=None)
@given(
    owner=ranks,
    newest=incarnations,
    current=incarnations,
    ended=st.booleans(),
    at=longs,
    earlier=st.lists(st.builds(EndedIncarnation, incarnations, sequences, longs)),
)
def test_rows_of_owners_come_back_as_they_were(
    owner: RankId, newest: Incarnation, current: Incarnation, ended: bool, at: int, earlier: list[EndedIncarnation]
) -> None:
    """An owner's row keeps every ended incarnation, and the avro package reads the same values."""
    row = OwnerRow(newest, current, ended, at, tuple(earlier))
    raw = encode_owner(row)
    assert decode_owner(OWNER_KEY.pack(owner), raw) == (owner, row)
    datum = witnessed("cxl-owner", raw)
    assert (from_long(datum["newest_incarnation"]), datum["ended"]) == (newest, ended)
    assert [each["sequence"] for each in datum["ended_incarnations"]] == [each.sequence for each in earlier]


@settings(max_examples=100, deadline=None)
@given(owner=ranks, number=counts, offset=longs, at=longs, raw=st.binary(max_size=20))
def test_parked_transitions_come_back_as_they_were(
    owner: RankId, number: int, offset: int, at: int, raw: bytes
) -> None:
    """The original record is kept byte for byte, even if it is not valid."""
    key, row = ParkedKey(owner, number), ParkedRow(offset, at, raw)
    assert decode_parked(PARKED_KEY.pack(key), encode_parked(row)) == (key, row)


@settings(max_examples=100, deadline=None)
@given(pool=pools)
def test_pools_come_back_as_they_were(pool: CxlPool) -> None:
    """A pool keeps every field, and a record under another pool's key is refused."""
    key = pool_key(pool.pool_id)
    assert decode_pool(key, encode_pool(pool)) == pool
    assert reason_of(lambda: decode_pool(key + b"x", encode_pool(pool))) == "wrong_key"


def test_the_largest_transition_fits_a_record() -> None:
    """A transition with the most blocks and workers and the longest pool id can be sent, and parked unchanged."""
    block = (BlockAddress(SequenceHash(U64_MASK), SequenceHash(U64_MASK), 1), EngineHash(U64_MASK))
    largest = replace(
        TRANSITION,
        pool_id="\N{GRINNING FACE}" * POOL_NAME_CHARS_MAX,
        accessible_workers=(WorkerId(1 << 63),) * POOL_MEMBERS_MAX,
        blocks=addressed([block] * TRANSITION_BLOCKS_MAX),
    )
    raw = encode_transition(largest)
    assert len(raw) <= CXL_EVENT_BYTES_MAX
    assert len(decode_transition(raw).blocks) == TRANSITION_BLOCKS_MAX


def datum(**changed: object) -> bytes:
    """Return a record that is valid except for some fields."""
    good = codec("cxl-events").decode(encode_transition(TRANSITION))
    return codec("cxl-events").encode({**good, **changed})


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (datum(dp_rank=-1), "bad_rank"),
        (datum(follows=-3), "bad_sequence"),
        (datum(pool_epoch=-1), "bad_pool"),
        (datum(pool_id=""), "bad_pool"),
        (datum(pool_id="p" * 129), "bad_pool"),
        (datum(accessible_workers=list(range(POOL_MEMBERS_MAX + 1))), "bad_transition"),
        (datum(sequence_hashes=b"1234567"), "bad_hashes"),
        (datum(positions=b"123"), "bad_hashes"),
        (datum(parents=b""), "bad_hashes"),
        (datum(positions=bytes(4)), "bad_hashes"),
        (datum(sequence_hashes=b"", parents=b"", positions=b"", engine_hashes=b""), "bad_transition"),
        (
            datum(
                sequence_hashes=bytes(8 * (TRANSITION_BLOCKS_MAX + 1)),
                parents=bytes(8 * (TRANSITION_BLOCKS_MAX + 1)),
                positions=bytes(4 * (TRANSITION_BLOCKS_MAX + 1)),
                engine_hashes=bytes(8 * (TRANSITION_BLOCKS_MAX + 1)),
            ),
            "bad_transition",
        ),
        (datum(positions=np.array([0, 1 << 31], dtype="<u4").tobytes()), "bad_hashes"),
        (b"", "not_avro"),
        (b"\x00\x01", "not_avro"),
        (encode_transition(TRANSITION)[:-1], "bad_avro"),
        (encode_transition(TRANSITION) + b"x", "bad_avro"),
        (encode_transition(TRANSITION) + bytes(CXL_EVENT_BYTES_MAX), "too_large"),
    ],
)
def test_an_invalid_transition_is_refused_with_its_reason(raw: bytes, reason: str) -> None:
    """The reason is the one of the dead letter that the record becomes."""
    assert reason_of(lambda: decode_transition(raw)) == reason


@pytest.mark.parametrize(
    "key", [b"", b"B", b"O" + bytes(20), b"K" + bytes(3), block_key(BlockKey(SequenceHash(5), RANK, ""))]
)
def test_an_invalid_key_is_refused(key: bytes) -> None:
    """Every decoder of the table's rows refuses it."""
    for decode in (decode_block, decode_owner, decode_parked):
        with pytest.raises(BadRecord):
            decode(key, b"")


@pytest.mark.parametrize(
    "fields",
    [
        {"pool_id": ""},
        {"pool_id": "p" * 129},
        {"pool_id": "\ud800"},
        {"pool_id": "a\nb"},
        {"pool_id": "a\0"},
        {"pool_id": "."},
        {"pool_id": ".."},
        {"latency_class": ""},
        {"latency_class": "\ud800"},
        {"epoch": -1},
        {"epoch": POOL_EPOCH_MAX + 1},
        {"capacity_blocks": 0},
    ],
)
def test_an_invalid_pool_is_refused(fields: dict[str, object]) -> None:
    """It cannot be built, and so never reaches the registry."""
    with pytest.raises(InvalidRequest):
        CxlPool(**{"pool_id": "p", **fields})  # type: ignore[arg-type]

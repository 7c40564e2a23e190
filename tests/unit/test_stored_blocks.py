"""Blocks with attributes of their own, and pools that are numbers: what reaches Kafka."""

from __future__ import annotations

import time

import msgpack
import pytest

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import BlocksRemoved, BlocksStored, EngineEvents, MoeLabels
from streams.core.hashing import local_hashes
from streams.core.ids import EngineHash, Tier
from streams.cxl.events import CxlStateChanged, state_changed
from streams.cxl.records import decode_transition
from streams.engines.dialects.registry import DIALECTS
from streams.engines.publisher import KvEventPublisher
from streams.engines.stored_blocks import StoredBlock
from streams.errors import InvalidRequest
from streams.kafka.records import decode_batch
from streams.settings import Settings
from tests.helpers.recording_producer import RecordingProducer

SIZE = 16


def tokens(block: int) -> list[int]:
    return list(range(block * SIZE, (block + 1) * SIZE))


def test_blocks_carry_their_own_attributes() -> None:
    """Consecutive blocks with equal attributes are one event; the next event continues their chain."""
    kafka = RecordingProducer(acknowledges=True)
    publisher = KvEventPublisher(Settings(), 1, "m", incarnation=5, kafka=kafka)
    publisher._writer._epoch_of = lambda _: 3  # instead of the registry's, which no broker serves here
    blocks = [StoredBlock(100 + n, tokens(n)) for n in range(5)]
    for stored_block in blocks[1:3]:
        stored_block.cxl_metadata = CxlMemoryMetadata("cxl_pooled", 7, (1, 2))
    blocks[3].moe = MoeLabels(1, 2)
    blocks[4].moe = MoeLabels(1, 2)
    publisher.stored_blocks(blocks)
    body = decode_batch(kafka.values("kv-events")[-1]).body
    assert isinstance(body, EngineEvents)
    stores = [event for event in body.events if isinstance(event, BlocksStored)]
    assert [(event.parent, event.engine.tolist()) for event in stores] == [
        (None, [100]),
        (100, [101, 102]),
        (102, [103, 104]),
    ]
    assert [(event.moe, None if event.cxl is None else event.cxl.pool_id) for event in stores] == [
        (None, None),
        (None, "7"),
        (MoeLabels(1, 2), None),
    ]
    whole = [token for n in range(5) for token in tokens(n)]
    assert [value for event in stores for value in event.local.tolist()] == local_hashes(whole, SIZE, 1337).tolist()
    transitions = [decode_transition(value, {}) for value in kafka.values("cxl-events")]
    assert {(each.pool_id, len(each.blocks)) for each in transitions} == {("7", 2)}


def test_single_blocks_are_created_and_removed_by_the_names_that_users_of_dynamo_know() -> None:
    """`create_kv_block` takes the attributes of a block, and `remove_kv_block` its hash and tier."""
    kafka = RecordingProducer()
    publisher = KvEventPublisher(Settings(), 1, "m", incarnation=5, kafka=kafka)
    publisher.create_kv_block(11, tokens(0))
    block = publisher.create_kv_block(12, tokens(1), parent_hash=11, tier=Tier.HOST)
    publisher.remove_kv_block(12, tier=Tier.HOST)
    batches = [decode_batch(value).body for value in kafka.values("kv-events")[1:]]
    events = [event for body in batches if isinstance(body, EngineEvents) for event in body.events]
    assert [type(event) for event in events] == [BlocksStored, BlocksStored, BlocksRemoved]
    assert isinstance(events[1], BlocksStored) and events[1].parent == EngineHash(11)
    assert (block.tier, events[1].tier) == (Tier.HOST, Tier.HOST)
    with pytest.raises(InvalidRequest, match="a block has 15 tokens; a full one has 16"):
        publisher.create_kv_block(13, tokens(0)[:-1])


def test_a_pools_number_is_written_as_text() -> None:
    """In metadata, in a call and on the wire; other types of ids are refused as before."""
    assert CxlMemoryMetadata("in_transit", 7).pool_id == "7"
    assert state_changed(1, [1], "in_transit", 7, None).pool_id == "7"
    with pytest.raises(InvalidRequest, match="must be a string"):
        state_changed(1, [1], "in_transit", True, None)
    names = {"type": "CxlStateTransition", "event_id": 1, "block_hashes": [5], "new_state": "in_transit", "pool_id": 12}
    decoded = DIALECTS["vllm"].decoder(SIZE).decode(msgpack.packb([time.time(), [names], 0]))
    (event,) = decoded.events
    assert isinstance(event, CxlStateChanged)
    assert event.pool_id == "12"

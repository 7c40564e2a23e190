"""Engine hashes of blocks in CXL pools: resolved by the ledger, and later by the names that the blocks entered with."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvents,
    MoeLabels,
)
from streams.core.hashing import sequence_hashes
from streams.core.ids import EngineHash, SequenceHash, Tier
from streams.cxl.events import BlockAddress, CxlStateChanged
from streams.engines.cxl_names import CxlNames, stored_states
from streams.engines.dialects.vllm import decode_payload
from streams.engines.ledger import Ledger
from streams.engines.publisher import KvEventPublisher
from streams.errors import BadRecord
from streams.kafka.records import decode_batch
from streams.settings import Settings
from streams.topics import EVENT_BYTES_MAX
from tests.helpers.holdings import u64
from tests.helpers.recording_producer import RecordingProducer

LOCAL, TRANSIT, POOLED, EVICTED = CxlMemoryState

CHAIN = [SequenceHash(each) for each in sequence_hashes(u64(1, 2, 3)).tolist()]
FIRST, SECOND, THIRD = (
    BlockAddress(block, parent, position)
    for position, (block, parent) in enumerate(zip(CHAIN, [None, *CHAIN[:2]], strict=True))
)


def ledger_of_three() -> Ledger:
    """A ledger that holds blocks 11, 12 and 13 of one chain."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(BlocksStored(None, u64(11, 12), u64(1, 2)))
    ledger.apply(BlocksStored(EngineHash(12), u64(13), u64(3), Tier.HOST))
    return ledger


def enter(names: CxlNames, ledger: Ledger, state: CxlMemoryState, *engine: int) -> tuple[list[BlockAddress], list[int]]:
    pool_id = "p" if state is TRANSIT else None
    blocks, unknown = names.resolve(CxlStateChanged(0, u64(*engine), state, pool_id), ledger)
    return [address for address, _ in blocks.rows()], unknown


def test_a_ledger_returns_the_address_of_a_block() -> None:
    """A block is found in any tier; a name that the ledger does not have has no address."""
    ledger = ledger_of_three()
    assert [ledger.address(EngineHash(name)) for name in (11, 12, 13, 14)] == [FIRST, SECOND, THIRD, None]


@pytest.mark.parametrize("removal", [BlocksRemoved(u64(11, 12)), AllBlocksCleared()])
def test_a_name_is_kept_while_its_block_is_in_transit_or_pooled(removal: BlocksRemoved | AllBlocksCleared) -> None:
    """The ledger loses the block when the GPU's copy is removed; later transitions find it until it is evicted."""
    ledger, names = ledger_of_three(), CxlNames()
    assert enter(names, ledger, TRANSIT, 11, 12) == ([FIRST, SECOND], [])
    ledger.apply(removal)
    assert enter(names, ledger, POOLED, 12, 11) == ([SECOND, FIRST], [])
    assert enter(names, ledger, EVICTED, 11, 14) == ([FIRST], [14])
    assert enter(names, ledger, EVICTED, 11) == ([], [11])
    assert len(names) == 1
    assert enter(names, ledger, LOCAL, 12) == ([SECOND], [])
    assert len(names) == 0


def test_a_name_given_to_another_block_still_stands_for_the_one_in_the_pool() -> None:
    """A name stands for the pooled block until the other block enters a pool under the same name."""
    ledger, names = ledger_of_three(), CxlNames()
    enter(names, ledger, TRANSIT, 11)
    ledger.apply(BlocksRemoved(u64(11)))
    ledger.apply(BlocksStored(None, u64(11), u64(9)))
    other = BlockAddress(SequenceHash(9), None, 0)
    assert enter(names, ledger, POOLED, 11) == ([FIRST], [])
    assert enter(names, ledger, TRANSIT, 11) == ([other], [])
    assert enter(names, ledger, EVICTED, 11) == ([other], [])


def test_reading_an_engines_batches_again_leads_to_the_same_names() -> None:
    """A bridge that rebuilds its state from the replay buffer has the names that the bridge before it had."""
    names, ledger = CxlNames(), Ledger(counts_copies=True)
    names.apply(BlocksStored(None, u64(11, 12), u64(1, 2), cxl=CxlMemoryMetadata("cxl_pooled", "p", ())), ledger)
    names.apply(BlocksRemoved(u64(11, 12)), ledger)
    names.apply(CxlStateChanged(1, u64(12), EVICTED), ledger)
    assert enter(names, ledger, POOLED, 11, 12) == ([FIRST], [12])


def test_a_store_in_a_pool_becomes_the_transitions_that_lead_there() -> None:
    """A block that is stored in a pool enters it through in_transit."""
    stored = BlocksStored(None, u64(11), u64(1), cxl=CxlMemoryMetadata("cxl_pooled", "p", (7,)))
    assert [(each.state, each.pool_id, each.accessible_workers) for each in stored_states(stored)] == [
        (TRANSIT, "p", (7,)),
        (POOLED, "p", (7,)),
    ]
    assert stored_states(BlocksStored(None, u64(11), u64(1))) == []


TRANSITION = {
    "type": "CxlStateTransition",
    "event_id": 5,
    "block_hashes": [11, -1],
    "new_state": "in_transit",
    "pool_id": "p",
    "accessible_workers": [7, 8],
}
STORED = {
    "type": "BlockStored",
    "block_hashes": [11],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 4,
    "cxl_metadata": {"state": "cxl_pooled", "pool_id": "p", "accessible_workers": [7]},
}


def payload_of(*events: Any) -> bytes:
    packed: bytes = msgpack.packb([1.0, list(events), 0])
    return packed


@pytest.mark.parametrize("event", [TRANSITION, ["CxlStateTransition", *list(TRANSITION.values())[1:]]])
def test_a_transition_is_read_from_a_map_or_an_array(event: Any) -> None:
    """An engine reports transitions in the same two forms as vLLM's own events."""
    (found,) = decode_payload(payload_of(event), 4).events
    assert isinstance(found, CxlStateChanged)
    assert (found.event_id, found.state, found.pool_id, found.accessible_workers) == (5, TRANSIT, "p", (7, 8))
    assert found.engine.tolist() == [11, (1 << 64) - 1]


def test_the_cxl_metadata_of_a_store_is_read() -> None:
    """A store that is a map may name the state, the pool and the workers of its blocks."""
    (found,) = decode_payload(payload_of(STORED), 4).events
    assert isinstance(found, BlocksStored)
    assert found.cxl == CxlMemoryMetadata("cxl_pooled", "p", (7,))


@pytest.mark.parametrize(
    "event",
    [
        {**TRANSITION, "new_state": "elsewhere"},
        {**TRANSITION, "pool_id": 5.5},
        {**TRANSITION, "pool_id": True},
        {**TRANSITION, "pool_id": ""},
        {**TRANSITION, "block_hashes": None},
        {**TRANSITION, "accessible_workers": 7},
        {**TRANSITION, "accessible_workers": list(range(5000))},
        {**STORED, "cxl_metadata": {"pool_id": "p"}},
        {**STORED, "cxl_metadata": 5},
        {**STORED, "cxl_metadata": {"state": "nowhere"}},
        {**STORED, "cxl_metadata": {"state": "in_transit"}},
        {**TRANSITION, "new_state": "in_transit", "pool_id": None},
    ],
)
def test_an_invalid_transition_is_lost_and_the_other_events_are_not(event: Any) -> None:
    """The reason is `bad_event`, as for every other event that cannot be read."""
    batch = decode_payload(payload_of(event, ["BlockRemoved", [1], "GPU"]), 4)
    assert [each.error.reason for each in batch.unusable] == ["bad_event"]
    assert batch.is_incomplete and len(batch.events) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"cxl": CxlMemoryMetadata("in_transit", None, ())},
        {"cxl": CxlMemoryMetadata("in_transit", "", ())},
        {"moe": MoeLabels(layer_id=-1)},
        {"moe": MoeLabels(expert_id=True)},
        {"moe": MoeLabels(expert_group=1 << 31)},
    ],
)
def test_a_refused_batch_leaves_publisher_and_log_as_they_were(bad: dict[str, Any]) -> None:
    """None of its events is in the ledger, and the next batch gets its number."""
    kafka = RecordingProducer()
    publisher = KvEventPublisher(Settings(), 1, "m", incarnation=5, kafka=kafka)
    good = BlocksStored(None, u64(11), u64(1))
    with pytest.raises(BadRecord):
        publisher.publish([good, BlocksStored(EngineHash(11), u64(12), u64(2), **bad)])
    assert publisher.publish([good, BlocksStored(EngineHash(11), u64(12), u64(2))]) == 0
    begun, batch = map(decode_batch, kafka.values("kv-events"))
    assert (begun.sequence, batch.sequence) == (BEFORE_FIRST, 0)
    assert isinstance(batch.body, EngineEvents)
    assert [each.engine.tolist() for each in batch.body.events if isinstance(each, BlocksStored)] == [[11], [12]]


def test_a_batch_that_is_too_large_is_published_without_its_events_and_incomplete() -> None:
    """The ledger has the batch already, so no other batch may take its number. A restatement heals the rank."""
    kafka = RecordingProducer()
    publisher = KvEventPublisher(Settings(), 1, "m", incarnation=5, kafka=kafka)
    n = EVENT_BYTES_MAX // 16
    names = np.arange(1, n + 1, dtype=np.uint64)
    with pytest.raises(BadRecord, match="bytes"):
        publisher.publish([BlocksStored(None, names, names)])
    assert publisher.publish([BlocksRemoved(names[:1])]) == 1
    _, large, _ = batches = [decode_batch(value) for value in kafka.values("kv-events")]
    assert [(batch.sequence, batch.incomplete) for batch in batches] == [(BEFORE_FIRST, False), (0, True), (1, False)]
    assert large.body == EngineEvents(())

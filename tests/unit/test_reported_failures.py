"""Failures of other routers on engines' events, as their issues report them: each passes here, and names its issue.

The ones that need real processes are in tests/trust and tests/kafka: an engine that restarts on its port
(test_bridge_faults.py, test_an_engine_that_restarts_keeps_credit_for_nothing), a store whose parent was lost
(test_dropped_batches_are_filled_in_order_and_lost_ones_leave_a_gap), a payload that cannot be read
(trust/test_events.py), a publisher that died (kafka/test_worker_expiry.py).
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from streams.core.hashing import hash_seed, local_hashes, salted_seed
from streams.core.ids import DpRank, RankId, WorkerId
from streams.engines.dialects.interface import DecodedBatch
from streams.engines.dialects.registry import DIALECTS
from streams.engines.ledger import Ledger
from tests.helpers.folded_index import FoldedIndex, apply_event
from tests.helpers.trtllm_events import block, created, removed, stored

BLOCK = 4
RANK = RankId(WorkerId(1), DpRank(0))
TOKENS = list(range(100, 100 + 5 * BLOCK))


class Rank:
    """One rank: a decoder for any engine, its ledger, and an index of what is published."""

    def __init__(self) -> None:
        self._decoder = DIALECTS["auto"].decoder(BLOCK)
        self._ledger = Ledger(counts_copies=True)
        self._index = FoldedIndex()

    def take(self, *events: Any) -> DecodedBatch:
        """Take one payload in msgpack."""
        return self.take_bytes(msgpack.packb([1.0, list(events), 0]))

    def take_bytes(self, payload: bytes) -> DecodedBatch:
        decoded = self._decoder.decode(payload)
        if decoded.dialect is not None:
            self._ledger.count_copies(decoded.dialect.counts_copies)
        changes = [change for event in decoded.events for change in self._ledger.apply(event, may_wait=True)]  # type: ignore[arg-type]
        for change in changes + self._ledger.end_batch():
            apply_event(self._index, RANK, change)
        return decoded

    def overlap(self, tokens: list[int] = TOKENS, salt: str | None = None) -> int:
        """Leading blocks of a prompt that the rank holds."""
        seed = hash_seed()
        local = local_hashes(tokens, BLOCK, seed, first_seed=salted_seed(seed, salt))
        return self._index.find_matches(local).scores.get(RANK, 0)


def array(names: list[Any], first: int = 0, *more: Any) -> list[Any]:
    """A store that is an array: consecutive blocks of TOKENS, of which the first is at a position."""
    tokens = TOKENS[first * BLOCK : (first + len(names)) * BLOCK]
    return ["BlockStored", names, None if first == 0 else names[0] - 1, tokens, BLOCK, None, *more]


def test_dynamo_14530_a_salt_in_a_map_at_position_7_loses_neither_its_event_nor_its_batch() -> None:
    """ai-dynamo/dynamo 14530: SGLang 0.5.18 has a map where vLLM has the adapter's name."""
    rank = Rank()
    salted = array([-9], 0, "GPU", {"cache_salt": "tenant", "session_id": "s"})
    decoded = rank.take(array([-5, -4], 0, "GPU"), salted)
    assert not decoded.unusable
    assert (rank.overlap(), rank.overlap(TOKENS, "tenant"), rank.overlap(TOKENS, "other")) == (2, 1, 0)


@pytest.mark.parametrize("as_map", [False, True])
def test_llm_d_router_2944_events_are_read_as_maps_and_as_arrays(as_map: bool) -> None:
    """llm-d/llm-d-router 2944, volcano-sh/kthena 1535: newer engines write maps with a tag, and lost all events."""
    rank = Rank()
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": TOKENS[: 2 * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
    }
    assert not rank.take(event if as_map else array([1, 2])).unusable
    assert rank.overlap() == 2


@pytest.mark.parametrize(
    "names", [[1, 2], [-2, -1], [(1 << 63) + 5, (1 << 63) + 6], [b"\x07" * 31 + b"\x01", b"\x02" * 32]]
)
@pytest.mark.parametrize("n_later", [0, 1, 9])
def test_dynamo_3180_later_fields_and_every_form_of_a_hash_are_read(names: list[Any], n_later: int) -> None:
    """ai-dynamo/dynamo 3180: each field that vLLM added broke the index, as did hashes above 2^63 or of bytes."""
    rank = Rank()
    media_and_later = ["GPU", None, None, 0, "full_attention", None, "LOCAL", None, "later", {"x": 1}][: n_later + 1]
    assert not rank.take(array(names, 0, *media_and_later)).unusable
    assert rank.overlap() == 2
    rank.take(["BlockRemoved", names[1:], "GPU"])
    assert rank.overlap() == 1


def test_dynamo_9376_blocks_of_another_size_are_refused_with_their_size() -> None:
    """ai-dynamo/dynamo 9376: a hybrid model's blocks had 2,096 tokens, and were dropped without a word."""
    rank = Rank()
    tokens = list(range(2096))
    decoded = rank.take(["BlockStored", [1], None, tokens, 2096, None, "GPU", None, None, 0, "full_attention"])
    assert [(each.error.reason, each.error.detail["block_size"]) for each in decoded.unusable] == [
        ("wrong_block_size", 2096)
    ]
    assert decoded.is_incomplete and decoded.not_indexed == {"block_size": 1}


def test_dynamo_866_partial_blocks_of_tensorrt_llm_are_neither_stored_nor_unknown_when_removed() -> None:
    """ai-dynamo/dynamo 866: the engine reports the beginning of a block, and removes it later."""
    rank = Rank()
    whole, part = block(1, TOKENS[:BLOCK]), block(2, TOKENS[BLOCK : BLOCK + 2])
    rank.take_bytes(json.dumps([created(), stored(whole, part)]).encode())
    assert rank.overlap() == 1
    decoded = rank.take_bytes(json.dumps([removed(2)]).encode())
    assert (decoded.unusable, decoded.n_unindexed, rank.overlap()) == ((), 0, 1)


def test_dynamo_4395_a_block_that_is_its_own_parent_ends_its_store() -> None:
    """ai-dynamo/dynamo 4395: an index that followed such a chain never came to its end."""
    rank = Rank()
    rank.take(array([1, 2]))
    decoded = rank.take(["BlockStored", [3, 2], 2, TOKENS[2 * BLOCK : 4 * BLOCK], BLOCK, None, "GPU"])
    assert (decoded.not_indexed, rank.overlap()) == ({"duplicate_hash": 1}, 3)


def test_a_middle_block_that_returns_brings_the_blocks_after_it_back() -> None:
    """A peer removed a middle block, got it again, and never counted the tail (its own report, not an issue)."""
    rank = Rank()
    rank.take(array([1, 2, 3, 4, 5]))
    rank.take(["BlockRemoved", [3], "GPU"])
    assert rank.overlap() == 2
    rank.take(array([3], 2))
    assert rank.overlap() == 5


def test_an_event_that_cannot_be_decoded_does_not_lose_its_batch() -> None:
    """A peer turned one such event into a gap, which dropped the others of the batch."""
    rank = Rank()
    decoded = rank.take(array([1, 2]), ["BlockStored", "these are no hashes"], array([3], 2))
    assert ([each.index for each in decoded.unusable], rank.overlap()) == ([1], 3)
    assert decoded.is_incomplete  # the rank is degraded, and says so

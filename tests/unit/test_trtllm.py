"""TensorRT-LLM's payloads: JSON of both of its cache managers, tiers, windows, ranks and images."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streams.core.events import AllBlocksCleared, BlocksStored
from streams.core.hashing import content_hash, hash_seed, request_hashes, salted_seed, with_pad_values
from streams.core.ids import Tier
from streams.engines.dialects.interface import BlocksDropped, DecodedBatch
from streams.engines.dialects.trtllm import TRTLLM, TrtllmDecoder
from streams.engines.ledger import Ledger
from streams.engines.polling import numbered
from streams.engines.recovery import ledger_of
from streams.errors import BadRecord
from tests.helpers.reference import chain_hashes
from tests.helpers.trtllm_events import (
    BLOCK,
    TOKENS,
    block,
    created,
    event,
    pack,
    prompt,
    removed,
    stored,
    updated,
)


def chain(tokens: Any, **options: Any) -> list[int]:
    found: list[int] = request_hashes(tokens, BLOCK, **options)[1].tolist()
    return found


class Rank:
    """A decoder and its ledger. `held` is what an index would hold, by tier."""

    def __init__(self) -> None:
        self.decoder = TrtllmDecoder(BLOCK)
        self.ledger = Ledger(TRTLLM.counts_copies)

    def take(self, *events: Any) -> DecodedBatch:
        batch = self.decoder.decode(pack(*events))
        for each in batch.events:
            self.ledger.apply(each, may_wait=True)  # type: ignore[arg-type]
        assert self.ledger.end_batch() == []
        return batch

    def held(self) -> set[tuple[Tier, int]]:
        return {
            (run.tier, one) for run in self.ledger.restated() for one in chain_hashes(run.local.tolist(), run.parent)
        }


@pytest.mark.parametrize("payload", [stored(*prompt([1, 2, 3])), [stored(*prompt([1, 2, 3]))]])
def test_one_event_and_a_list_of_events_are_payloads(payload: Any) -> None:
    """Consecutive blocks become one store, whose hashes are those of a prompt."""
    batch = TrtllmDecoder(BLOCK).decode(json.dumps(payload).encode())
    (found,) = batch.events
    assert isinstance(found, BlocksStored)
    assert (found.parent, found.engine.tolist(), found.tier) == (None, [1, 2, 3], Tier.DEVICE)
    assert chain_hashes(found.local.tolist(), None) == chain(TOKENS)
    assert (batch.dp_rank, batch.n_unindexed, batch.unusable) == (None, 0, ())


def test_hashes_of_both_cache_managers_are_names() -> None:
    """The older manager sends u64, the newer one 64 hexadecimal digits, of which the last 16 count."""
    rank = Rank()
    rank.take(stored(*prompt([1, 2, 3])))
    rank.take(removed("ff" * 24 + "00" * 7 + "03", 2))
    assert rank.held() == {(Tier.DEVICE, chain(TOKENS)[0])}


def test_a_block_follows_its_tier_through_updates() -> None:
    """An update of the cache level moves the block; a removal removes it from where it is."""
    rank = Rank()
    rank.take(created())
    rank.take(stored(*prompt([1, 2, 3])))
    rank.take(updated(3, 0, 1))
    one, two, three = chain(TOKENS)
    assert rank.held() == {(Tier.DEVICE, one), (Tier.DEVICE, two), (Tier.HOST, three)}
    rank.take(updated(3, 1, 2), event({"type": "updated", "block_hash": 1, "cache_level": None, "priority": {}}))
    assert rank.held() == {(Tier.DEVICE, one), (Tier.DEVICE, two), (Tier.DISK, three)}
    rank.take(removed(3))
    assert rank.held() == {(Tier.DEVICE, one), (Tier.DEVICE, two)}
    assert rank.ledger.complete and not rank.ledger.left_out


def test_a_restarted_bridge_removes_blocks_from_the_tier_that_they_are_in() -> None:
    """Removals name no tier. The decoder begins anew with the bridge; the ledger comes from the table."""
    rank = Rank()
    rank.take(stored(*prompt([1, 2, 3])), updated(2, 0, 1), updated(3, 0, 2))
    one, two, _ = chain(TOKENS)
    rank.decoder = TrtllmDecoder(BLOCK)
    rank.ledger = ledger_of(rank.ledger.restated(), True, counts_copies=TRTLLM.counts_copies)
    rank.take(removed(3))
    assert rank.held() == {(Tier.DEVICE, one), (Tier.HOST, two)}
    rank.take(removed(2, 1))
    assert rank.held() == set()
    assert (rank.ledger.complete, rank.ledger.unknown_removals) == (True, 0)


def test_a_removed_block_stops_waiting_for_its_parent_in_each_tier() -> None:
    """A block in a lower tier waits if its parent is not known yet."""
    rank = Rank()
    rank.take(stored(block(2, TOKENS[4:8], cache_level=1), parent=1), removed(2))
    rank.take(stored(block(1, TOKENS[:4])))
    assert rank.held() == {(Tier.DEVICE, chain(TOKENS)[0])}


def test_a_restored_block_is_not_a_copy() -> None:
    """The first removal removes it."""
    rank = Rank()
    rank.take(stored(*prompt([1, 2, 3])))
    rank.take(stored(*prompt([1, 2, 3])))
    rank.take(removed(3))
    assert rank.held() == {(Tier.DEVICE, each) for each in chain(TOKENS)[:2]}


def test_a_created_cache_is_empty() -> None:
    """An engine that restarts begins with this event."""
    rank = Rank()
    rank.take(stored(*prompt([1, 2, 3])))
    batch = rank.take(7, created())
    assert (rank.held(), batch.is_incomplete) == (set(), False)


def test_only_the_largest_window_is_indexed() -> None:
    """Blocks of smaller windows are counted, and the rank is approximate."""
    rank = Rank()
    rank.take(created(window_size=512), created())
    batch = rank.take(stored(*prompt([1, 2, 3])), stored(*prompt([1, 2, 3]), window_size=512))
    assert (batch.n_unindexed, batch.not_indexed) == (3, {"cache_group": 3})
    batch = rank.take(removed(3, 2, window_size=512))
    assert (batch.n_unindexed, batch.events) == (2, ())
    assert rank.held() == {(Tier.DEVICE, each) for each in chain(TOKENS)}


def test_a_larger_window_that_was_never_created_hides_nothing() -> None:
    """One damaged event must not replace the window that is indexed; the engine reports the windows at its start."""
    rank = Rank()
    rank.take(created(window_size=512), created())
    batch = rank.take(stored(*prompt([7, 8]), window_size=1 << 31))
    assert batch.not_indexed == {"cache_group": 2}
    rank.take(stored(*prompt([1, 2, 3])))
    assert rank.held() == {(Tier.DEVICE, each) for each in chain(TOKENS)}
    rank.take(created(window_size=1 << 31))  # damaged as well
    rank.take(created(), stored(*prompt([1, 2])))  # the engine has restarted
    assert rank.held() == {(Tier.DEVICE, each) for each in chain(TOKENS)[:2]}


def test_blocks_of_a_window_that_proves_to_be_smaller_are_cleared() -> None:
    """Without a `created` event, the first window is taken for the largest until a larger one appears."""
    rank = Rank()
    rank.take(stored(*prompt([1, 2, 3]), window_size=512))
    batch = rank.take(stored(*prompt([7, 8, 9])))
    assert batch.events[0] == AllBlocksCleared()
    assert rank.held() == {(Tier.DEVICE, each) for each in chain(TOKENS)}
    rank.take(removed(1, 2, 3, window_size=512))
    assert len(rank.held()) == 3


def test_salts_and_adapters_are_part_of_the_hashes() -> None:
    """A salt is in the seed of the first block, an adapter in that of each block."""
    rank = Rank()
    rank.take(stored(*prompt([1, 2, 3], cache_salt="s", lora_id=7)))
    seed = hash_seed("7")
    expected = chain(TOKENS, seed=seed, first_seed=salted_seed(seed, "s"))
    assert rank.held() == {(Tier.DEVICE, each) for each in expected}


def test_a_partial_block_is_the_tail_of_a_prompt() -> None:
    """It makes no block; its removal is no unknown one."""
    rank = Rank()
    batch = rank.take(stored(*prompt([1, 2]), block(3, [7, 8, 9])))
    assert (batch.not_indexed, batch.n_unindexed, batch.unusable) == ({"tail": 1}, 0, ())
    rank.take(removed(3))
    assert rank.held() == {(Tier.DEVICE, each) for each in chain(TOKENS[:8])}
    assert rank.ledger.unknown_removals == 0


def test_smaller_blocks_make_blocks_of_the_scope() -> None:
    """Two of the engine's blocks make one; removals do not name a tier."""
    rank = Rank()
    halves = [block(at, TOKENS[at * 2 : at * 2 + 2], cache_level=1) for at in range(6)]
    rank.take(stored(*halves))
    assert rank.held() == {(Tier.HOST, each) for each in chain(TOKENS)}
    rank.take(removed(3))
    one, _, three = chain(TOKENS)
    assert rank.held() == {(Tier.HOST, one), (Tier.HOST, three)}


def test_images_hash_with_their_pad_values() -> None:
    """The first token of an image is its digest, the others count up from the vocabulary; it continues in a block."""
    digest, vocabulary = "0123456789abcdef" + "7" * 48, 50_000
    key = {"type": "mm_key", "hash": digest, "start_offset": 0}
    first = block(1, [5, digest, vocabulary + 1, vocabulary + 2], mm_keys=[key])
    second = block(2, [vocabulary + 3, vocabulary + 4, 6, 7], mm_keys=[key | {"start_offset": 3}])
    rank = Rank()
    batch = rank.take(stored(first, second, block(3, [8, 9, 10, 11])))
    asked = with_pad_values([5, 0, 0, 0, 0, 0, 6, 7, 8, 9, 10, 11], [(1, 5, content_hash(digest))])
    assert rank.held() == {(Tier.DEVICE, each) for each in chain(asked)}
    assert batch.n_unindexed == 0


@pytest.mark.parametrize(
    ("unknown", "reason"),
    [
        (
            block(2, [50_003, 50_004, 6, 7], mm_keys=[{"type": "mm_key", "hash": "a" * 64, "start_offset": 3}]),
            "key_unknown",
        ),
        (block(2, ["a" * 64, 6, 7, 8]), "key_unknown"),
        (
            block(2, [5, 6, 7, 8]) | {"tokens": [{"token_id": token, "token_extra_id": 9} for token in range(4)]},
            "content_unknown",
        ),
    ],
)
def test_blocks_whose_content_is_not_known_end_the_prefix(unknown: dict[str, Any], reason: str) -> None:
    """They and the blocks after them are counted; the rank is approximate if a request can name an image of theirs."""
    rank = Rank()
    batch = rank.take(stored(block(1, TOKENS[:4]), unknown, block(3, TOKENS[8:])))
    assert (batch.n_unindexed, batch.not_indexed) == (2 if reason == "key_unknown" else 0, {reason: 2})
    assert rank.held() == {(Tier.DEVICE, chain(TOKENS)[0])}
    rank.take(stored(block(4, TOKENS[:4]), parent=3))
    assert (rank.ledger.complete, rank.ledger.skipped.counts) == (True, {reason: 1})


def test_the_batches_of_an_http_answer_have_the_engines_numbers() -> None:
    """An event without a usable number is not lost: it belongs to the batch before it, or to the first one."""
    answer = [7, created(event_id=3), removed(1, event_id="4"), removed(2, event_id=5), removed(3, event_id=-1)]
    batches = [(number, len(json.loads(payload))) for number, payload in numbered(answer)[0]]
    assert batches == [(3, 3), (5, 2)]
    assert numbered([7, {}]) == {0: []}


def test_the_events_of_an_http_answer_are_divided_by_rank() -> None:
    """Each attention dp rank gets its own events, in order; an event of another rank is unusable."""
    answer = pack(
        stored(*prompt([1]), attention_dp_rank=0),
        stored(*prompt([2]), attention_dp_rank=1),
        removed(1, attention_dp_rank=0),
    )
    parts = numbered(json.loads(answer))
    decoder = TrtllmDecoder(BLOCK)
    zero, later = (decoder.decode(payload) for _, payload in parts[0])
    (one,) = (TrtllmDecoder(BLOCK).decode(payload) for _, payload in parts[1])
    assert [type(each) for each in (*zero.events, *later.events)] == [BlocksStored, BlocksDropped]
    assert (zero.dp_rank, one.dp_rank, len(one.events)) == (0, 1, 1)
    mixed = TrtllmDecoder(BLOCK).decode(answer)
    assert [each.index for each in mixed.unusable] == [1]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (stored(block(1, list(range(8)))), "wrong_block_size"),
        (stored(block("zz", TOKENS[:4])), "bad_event"),
        (stored(block(1, [1.5] * 4)), "bad_event"),
        (stored(block(1, TOKENS[:4], cache_level=9)), "bad_event"),
        (removed("x"), "bad_event"),
        (event({"type": "removed", "block_hashes": 5}), "bad_event"),
        (event({"type": "moved"}), "bad_event"),
        (event({}), "bad_event"),
        (7, "bad_event"),
        (None, "bad_event"),
    ],
)
def test_an_unusable_event_is_lost_with_its_reason(bad: Any, reason: str) -> None:
    """The other events of the payload are used."""
    batch = TrtllmDecoder(BLOCK).decode(pack(bad, stored(*prompt([1, 2, 3]))))
    assert [type(each) for each in batch.events] == [BlocksStored]
    assert [each.error.reason for each in batch.unusable] == [reason]
    assert batch.is_incomplete


@pytest.mark.parametrize(("payload", "reason"), [(b"[", "not_json"), (b"7", "bad_event"), (b"[" * 100_000, "not_json")])
def test_a_payload_that_is_no_list_of_events_is_refused(payload: bytes, reason: str) -> None:
    """The reason does not quote it."""
    with pytest.raises(BadRecord) as caught:
        TrtllmDecoder(BLOCK).decode(payload)
    assert caught.value.reason == reason

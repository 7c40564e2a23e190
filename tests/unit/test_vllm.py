"""vLLM's payloads: every form that vLLM writes, and what is done with everything else."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EngineBatch, EngineEvents, MoeLabels
from streams.core.hashing import content_hash, hash_seed, local_hashes, salted_seed, with_pad_values
from streams.core.ids import U64_MASK, DpRank, EngineHash, Incarnation, RankId, Tier, WorkerId
from streams.cxl.events import CxlStateChanged
from streams.engines.dead_letters import of_payload
from streams.engines.dialects import vllm as vllm_module
from streams.engines.dialects.auto import AutoDecoder
from streams.engines.dialects.interface import BlocksLeftOut, DecodedBatch, DeviceCleared, UnusableEvent
from streams.engines.dialects.vllm import (
    PARTIAL_NAMES_MAX,
    PAYLOAD_BYTES_MAX,
    VLLM,
    VllmDecoder,
    decode_payload,
    engine_hash,
)
from streams.engines.ledger import Ledger
from streams.engines.recovery import ledger_of
from streams.errors import WRONG_BLOCK_SIZE, BadRecord
from streams.kafka.records import decode_batch, encode_batch
from streams.lab.engines.engine_messages import KvCleared, KvRemoved, KvReused, KvStored
from streams.lab.engines.event_publisher import BlockEvent, EventDialect, HashDialect, WireForm
from tests.helpers.vllm_events import BLOCK, TOKENS, stored_event

LOCAL = local_hashes(TOKENS, BLOCK).tolist()
REASONS = ("bad_event", "wrong_block_size", "not_msgpack")


def pack(*events: Any, ts: Any = 1.5, rank: Any = 0) -> bytes:
    raw: bytes = msgpack.packb([ts, list(events), rank])
    return raw


def chunk_event(**changes: Any) -> dict[str, Any]:
    """A store of LMCache, as its connector sends it through vLLM: one chunk under a name of its own, and no adapter."""
    chunk = {"block_hashes": [901], "token_ids": TOKENS, "block_size": len(TOKENS), "medium": "cpu"}
    return stored_event(**chunk) | changes


def removed_event(*names: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium}


def only_stored(payload: DecodedBatch) -> BlocksStored:
    (event,) = payload.events
    assert isinstance(event, BlocksStored)
    return event


def stored_from(**changes: Any) -> BlocksStored:
    return only_stored(decode_payload(pack(stored_event(**changes)), BLOCK))


def as_array(event: dict[str, Any]) -> list[Any]:
    return list(event.values())


def decoded_or_reason(raw: bytes) -> DecodedBatch | str:
    """Return the batch, or the reason why its payload or its first unusable event cannot be used."""
    try:
        payload = decode_payload(raw, BLOCK)
    except BadRecord as exc:
        return exc.reason
    return payload.unusable[0].error.reason if payload.unusable else payload


def decodable(raw: bytes) -> bool:
    try:
        decode_payload(raw, BLOCK)
    except BadRecord:
        return False
    return True


def lost(event: Any) -> BadRecord:
    """Return why an event is lost; checks that nothing of it becomes an event, and that the batch is incomplete."""
    payload = decode_payload(pack(event), BLOCK)
    (unusable,) = payload.unusable
    assert payload.events == () and unusable.is_lost and payload.is_incomplete
    return unusable.error


@pytest.mark.parametrize("form", ["array", "map", "map_batch"])
def test_every_form_of_a_batch_is_read(form: str) -> None:
    """Events may be arrays or maps, and so may the batch: time, rank and events are those that were sent."""
    raw_events: list[dict[str, Any]] = [
        stored_event(parent_block_hash=10),
        {"type": "BlockRemoved", "block_hashes": [11, 12], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]
    events: list[Any] = raw_events if form != "array" else [as_array(event) for event in raw_events]
    outer: Any = {"ts": 1.5, "events": events, "data_parallel_rank": 3} if form == "map_batch" else [1.5, events, 3]
    payload = decode_payload(msgpack.packb(outer), BLOCK)
    assert (payload.emitted_at_ms, payload.dp_rank, payload.n_unindexed) == (1500, 3, 0)
    stored, removed, cleared = payload.events
    assert isinstance(stored, BlocksStored)
    assert (stored.parent, stored.engine.tolist(), stored.local.tolist()) == (10, [11, 12, 13], LOCAL)
    assert stored.engine.dtype == stored.local.dtype == np.uint64
    assert isinstance(removed, BlocksRemoved)
    assert (removed.engine.tolist(), removed.tier) == ([11, 12], Tier.DEVICE)
    assert cleared == DeviceCleared()


@pytest.mark.parametrize("outer", [[1.5, []], [1.5, [], None], {"ts": 1.5, "events": []}])
def test_a_batch_without_a_rank_names_none(outer: Any) -> None:
    """Engines without data parallelism leave the rank out; then it is that of the socket."""
    assert decode_payload(msgpack.packb(outer), BLOCK) == DecodedBatch(1500, None, (), 0)


def test_a_short_event_of_an_older_vllm_is_read() -> None:
    """The last fields may be missing: medium, LoRA name and later additions."""
    payload = decode_payload(pack(["BlockStored", [11], None, TOKENS[:4], BLOCK], ["BlockRemoved", [11]]), BLOCK)
    stored, removed = payload.events
    assert isinstance(stored, BlocksStored) and isinstance(removed, BlocksRemoved)
    assert stored.local.tolist() == LOCAL[:1]
    assert stored.tier is removed.tier is Tier.DEVICE


def test_a_longer_event_of_a_newer_vllm_is_read() -> None:
    """Unknown fields at the end of an event are ignored."""
    event = [*as_array(stored_event()), None, None, "full_attention", None, "local"]
    assert only_stored(decode_payload(pack(event), BLOCK)).local.tolist() == LOCAL


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (0, 0),
        (U64_MASK, U64_MASK),
        (-1, U64_MASK),
        (-(1 << 63), 1 << 63),
        (b"\x00" * 24 + b"\x01\x02\x03\x04\x05\x06\x07\x08", 0x0102030405060708),
        (b"\xff" * 32, U64_MASK),
        (b"\x01\x02\x03\x04\x05\x06\x07\x08", 0x0102030405060708),
    ],
)
def test_a_block_hash_is_a_u64_however_it_is_written(raw: Any, name: int) -> None:
    """Signed values are bit-cast, and of bytes the last eight are used, for block hashes and parents alike."""
    assert engine_hash(raw) == name
    assert stored_from(block_hashes=[raw, 1, 2]).engine.tolist() == [name, 1, 2]
    assert stored_from(parent_block_hash=raw).parent == name


@pytest.mark.parametrize("raw", [None, "11", 1.0, True, [1], {}])
def test_a_value_that_is_not_a_block_hash_is_refused(raw: Any) -> None:
    """Text, floats, bools and containers are not block hashes."""
    with pytest.raises(TypeError):
        engine_hash(raw)
    assert "not block hashes" in lost(["BlockRemoved", [raw]]).message
    assert lost(stored_event(block_hashes=[raw, 1, 2])).reason == "bad_event"


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("gpu", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("DEVICE", Tier.DEVICE),
        ("cpu_pinned", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.DISK),
        ("DISK", Tier.DISK),
        ("NVME", Tier.DISK),
        ("FS", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("OBJ", Tier.EXTERNAL),
        ("EXTERNAL", Tier.EXTERNAL),
        ("NETWORK", Tier.EXTERNAL),
        ("REMOTE", Tier.EXTERNAL),
        ("SHARED", Tier.EXTERNAL),
        ("a lake", Tier.EXTERNAL),
    ],
)
def test_the_medium_becomes_the_tier(medium: str | None, tier: Tier) -> None:
    """Stores and removals get the medium's tier; an unknown medium is external, whose weight is 0 by default."""
    stored, removed = decode_payload(
        pack(stored_event(medium=medium), {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}), BLOCK
    ).events
    assert isinstance(stored, BlocksStored) and isinstance(removed, BlocksRemoved)
    assert stored.tier is removed.tier is tier


@pytest.mark.parametrize(
    ("lora_id", "lora_name", "hashed_as"),
    [(None, None, None), (None, "", None), (3, "poet", "poet"), (None, "poet", "poet"), (3, None, "3"), (3, "", "3")],
)
def test_blocks_of_an_adapter_are_hashed_with_its_name(
    lora_id: int | None, lora_name: str | None, hashed_as: str | None
) -> None:
    """Without a name the adapter's id is hashed, so that the blocks never match those of the base model."""
    stored = stored_from(lora_id=lora_id, lora_name=lora_name)
    assert stored.local.tolist() == local_hashes(TOKENS, BLOCK, hash_seed(hashed_as)).tolist()


IMAGE = "0123456789abcdef" + "5" * 48


def request_local(tokens: Any, lora: str | None = None, salt: str | None = None) -> list[int]:
    """The local hashes of a request for these tokens."""
    seed = hash_seed(lora)
    found: list[int] = local_hashes(tokens, BLOCK, seed, first_seed=salted_seed(seed, salt)).tolist()
    return found


@pytest.mark.parametrize(
    ("extra_keys", "lora_name", "salt"),
    [
        (None, None, None),
        ([None, None, None], None, None),
        ([None, [], None], None, None),
        ([["a salt"], None, None], None, "a salt"),
        ([["poet"], ["poet"], ["poet"]], "poet", None),
        ([["poet", "a salt"], ["poet"], ["poet"]], "poet", "a salt"),
        ([["poet", "poet"], ["poet"], ["poet"]], "poet", "poet"),
    ],
)
def test_a_salt_is_part_of_the_seed_of_the_first_block(
    extra_keys: Any, lora_name: str | None, salt: str | None
) -> None:
    """The other blocks, and so the blocks of later stores, have the plain seed; the chain carries the salt on."""
    payload = decode_payload(pack(stored_event(extra_keys=extra_keys, lora_name=lora_name)), BLOCK)
    assert (payload.n_unindexed, payload.not_indexed) == (0, {})
    assert only_stored(payload).local.tolist() == request_local(TOKENS, lora_name, salt)


@pytest.mark.parametrize(
    ("tokens", "extra_keys", "image_at"),
    [
        ([1, 9, 9, 9, 9, 9, 2, 3, 4, 5, 6, 7], [[[IMAGE, 1]], [[IMAGE, -3]], None], (1, 5)),
        ([9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 2, 3], [[[IMAGE, 0]], [[IMAGE, -4]], [[IMAGE, -8]]], (0, 10)),
        ([1, 2, 3, 9, 4, 5, 6, 7, 8, 10, 11, 12], [["a salt", [IMAGE, 3]], None, None], (3, 1)),
    ],
)
def test_blocks_with_an_image_hash_with_its_pad_value(
    tokens: list[int], extra_keys: Any, image_at: tuple[int, int]
) -> None:
    """A request with the pad values of its image in place of the image's tokens has the same hashes."""
    payload = decode_payload(pack(stored_event(token_ids=tokens, extra_keys=extra_keys)), BLOCK)
    asked = with_pad_values(tokens, [(*image_at, content_hash(IMAGE))])
    salt = "a salt" if "a salt" in extra_keys[0] else None
    assert only_stored(payload).local.tolist() == request_local(asked, salt=salt)
    assert payload.n_unindexed == 0


def test_two_images_in_one_block_have_their_own_pad_values() -> None:
    """The second one begins where its offset says, although both are filled with the same token."""
    tokens, other = [9, 9, 9, 9], "f" * 64
    event = stored_event(block_hashes=[1], token_ids=tokens, extra_keys=[[[IMAGE, 0], [other, 2]]])
    asked = with_pad_values(tokens, [(0, 2, content_hash(IMAGE)), (2, 2, content_hash(other))])
    assert only_stored(decode_payload(pack(event), BLOCK)).local.tolist() == request_local(asked)


@pytest.mark.parametrize(
    ("extra_keys", "lora_name", "n_kept", "reason"),
    [
        ([[IMAGE], [IMAGE], None], None, 0, "key_unknown"),  # older versions report no offset
        ([None, [IMAGE], None], None, 1, "key_unknown"),
        ([None, ["a salt"], None], None, 1, "key_unknown"),  # salts are in the first block only
        ([["poet"], ["poet"], ["poet"]], None, 0, "key_unknown"),
        ([["poet"], ["poet"], ["poet"]], "painter", 0, "key_unknown"),
        ([None, None, [b"an embedding"]], None, 2, "content_unknown"),
        ([["a salt", b"an embedding"], None, None], None, 0, "content_unknown"),
        ([[[IMAGE, 1]], None, None], None, 0, "key_unknown"),  # the image's token comes again later in the block
    ],
)
def test_blocks_of_unknown_content_are_counted_and_not_indexed(
    extra_keys: Any, lora_name: str | None, n_kept: int, reason: str
) -> None:
    """No block from the first of them on is indexed; the rank is approximate if a request can name their content."""
    tokens = [1, 2, 3, 2, *TOKENS[4:]]
    event = stored_event(token_ids=tokens, extra_keys=extra_keys, lora_name=lora_name)
    payload = decode_payload(pack(event), BLOCK)
    n_unindexed = 0 if reason == "content_unknown" else 3 - n_kept
    assert (payload.n_unindexed, payload.not_indexed) == (n_unindexed, {reason: 3 - n_kept})
    assert [len(event.engine) for event in payload.events if isinstance(event, BlocksStored)] == [n_kept] * bool(n_kept)


def test_a_salted_block_keeps_its_hash_when_it_is_offloaded() -> None:
    """Offloading connectors report the blocks of a request in a lower tier without their extra keys."""
    decoder = VllmDecoder(BLOCK)
    decoder.decode(pack(stored_event(extra_keys=[["a salt"], None, None])))
    offloaded = only_stored(decoder.decode(pack(stored_event(medium="CPU"))))
    assert offloaded.tier is Tier.HOST
    assert offloaded.local.tolist() == request_local(TOKENS, salt="a salt")


class Rank:
    """A decoder and its ledger."""

    def __init__(self) -> None:
        self.decoder = VllmDecoder(BLOCK)
        self.ledger = Ledger(VLLM.counts_copies)

    def take(self, *events: Any) -> int:
        """Take one batch; return how many of its blocks are not indexed, or not exactly."""
        before = self.ledger.left_out
        batch = self.decoder.decode(pack(*events))
        for each in batch.events:
            assert not isinstance(each, CxlStateChanged)
            self.ledger.apply(each, may_wait=True)
        self.ledger.end_batch()
        return self.ledger.count_unindexed(batch.n_unindexed, before)

    def resume(self) -> None:
        """Restart the bridge, which finds the table and no earlier batch of the engine."""
        self.decoder = VllmDecoder(BLOCK)
        self.ledger = ledger_of(self.ledger.restated(), True, counts_copies=True)

    def held(self, tier: Tier) -> list[int]:
        """The local hashes of the blocks in a tier, which are of one prompt."""
        return [local for run in self.ledger.restated() if run.tier is tier for local in run.local.tolist()]


def offloaded() -> list[dict[str, Any]]:
    """The three blocks in a lower tier, each as a chunk of its own."""
    return [
        stored_event(
            block_hashes=[11 + number],
            parent_block_hash=10 + number if number else None,
            token_ids=TOKENS[number * BLOCK : (number + 1) * BLOCK],
            medium="CPU",
        )
        for number in range(3)
    ]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    "first",
    [{}, {"extra_keys": [["a salt"], None, None]}, {"lora_name": "poet", "lora_id": 1}],
    ids=["ordinary", "salted", "adapter"],
)
def test_an_offloaded_block_has_the_hash_that_the_ledger_has_under_its_name(
    first: dict[str, Any], resumed: bool
) -> None:
    """A bridge that restarted has the ledger of the table and a new decoder, which has read no salt."""
    rank = Rank()
    rank.take(stored_event(**first))
    if resumed:
        rank.resume()
    assert rank.take(*offloaded()) == 0
    assert rank.held(Tier.HOST) == rank.held(Tier.DEVICE)
    assert len(rank.held(Tier.HOST)) == 3


@pytest.mark.parametrize("why", ["resumed", "lost events", "too many salts"])
def test_an_offloaded_block_whose_salt_may_be_unknown_is_not_indexed(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """No tier holds the block any more, and the bridge has not read or kept all salts; the rank is approximate."""
    monkeypatch.setattr(vllm_module, "SPECIAL_NAMES_MAX", 1)
    rank = Rank()
    rank.take(stored_event(extra_keys=[["a salt"], None, None]), removed_event(11, 12, 13))
    rank.take(stored_event(block_hashes=[21, 22, 23]))
    assert rank.take(*offloaded()) == 0
    rank.take(removed_event(11, 12, 13, medium="CPU"))
    if why == "resumed":
        rank.resume()
    elif why == "lost events":
        rank.ledger.lost_events()
        rank.decoder = VllmDecoder(BLOCK)
    else:
        rank.take(stored_event(block_hashes=[31, 32, 33], extra_keys=[["another salt"], None, None]))
    assert rank.take(*offloaded()) == 3
    assert (rank.held(Tier.HOST), rank.ledger.has_unindexed) == ([], True)
    assert rank.take(["AllBlocksCleared"]) > 0  # the lower tier may have kept its blocks
    assert rank.take(stored_event(), *offloaded()) == 0
    assert rank.held(Tier.HOST) == LOCAL


def test_a_block_of_unknown_content_is_not_indexed_when_it_is_offloaded() -> None:
    """Its tokens alone are those of other prompts; no request can name its content, so the rank stays exact."""
    rank = Rank()
    rank.take(stored_event(extra_keys=[None, [b"an embedding"], None]))
    assert rank.take(*offloaded()) == 0
    assert rank.held(Tier.HOST) == LOCAL[:1]


#: Stores of connectors that never report evictions: a chunk that is larger than a block, as large as one, and smaller;
#: one of an older vLLM; one of a newer LMCache, whose medium is that of vLLM's own connector; and one of Mooncake.
NEVER_REMOVED = {
    "larger": chunk_event(),
    "as large": chunk_event(token_ids=TOKENS[:BLOCK], block_size=BLOCK),
    "smaller": chunk_event(token_ids=TOKENS[:2], block_size=2),
    "array": as_array(chunk_event(block_hashes=[-901]))[:7],
    "newer": chunk_event(medium="CPU"),
    "mooncake": chunk_event(token_ids=None, block_size=BLOCK, group_idx=0),
}


@pytest.mark.parametrize("chunk", NEVER_REMOVED.values(), ids=NEVER_REMOVED.keys())
def test_chunks_of_a_cache_that_never_reports_evictions_are_counted_and_not_indexed(chunk: Any) -> None:
    """Their size says nothing about the engine's. The engine's own blocks come and go as without them."""
    payload = decode_payload(pack(chunk), BLOCK)
    assert (payload.events, payload.unusable, payload.is_incomplete) == ((), (), False)
    assert (payload.n_unindexed, payload.not_indexed) == (1, {"connector": 1})
    rank = Rank()
    assert rank.take(stored_event()) == 0
    assert rank.take(chunk) == 1
    assert (rank.held(Tier.HOST), rank.held(Tier.DEVICE)) == ([], LOCAL)
    rank.take(removed_event(12, 13))
    assert rank.held(Tier.DEVICE) == LOCAL[:1]
    assert (rank.ledger.complete, rank.ledger.may_lack_blocks) == (True, True)


def test_a_clear_does_not_clear_the_chunks_of_a_cache_that_never_reports_evictions() -> None:
    """vLLM clears its own cache alone, so the rank stays approximate. It was exact until the first chunk."""
    rank = Rank()
    assert rank.take(["AllBlocksCleared"], stored_event()) == 0
    rank.take(chunk_event())
    assert rank.take(["AllBlocksCleared"], stored_event()) == 1
    assert (rank.held(Tier.DEVICE), rank.ledger.may_lack_blocks) == (LOCAL, True)


def test_chunks_of_another_cache_do_not_hide_the_kind_of_a_group() -> None:
    """A chunk names no group, so the kind of group 0 stays unknown, and a removal in that group removes."""
    decoder = VllmDecoder(BLOCK)
    decoder.decode(pack(chunk_event(), stored_event(group_idx=1, kv_cache_spec_kind="full_attention")))
    batch = decoder.decode(pack(removed_event(12) | {"group_idx": 0}))
    assert [each.engine.tolist() for each in batch.events if isinstance(each, BlocksRemoved)] == [[12]]


def test_a_chunk_of_another_cache_does_not_show_the_dialect() -> None:
    """Its size and the sign of its name are those of LMCache; vLLM's own store decides."""
    decoder = AutoDecoder(BLOCK)
    chunk = as_array(chunk_event(block_hashes=[-901], token_ids=TOKENS[:2], block_size=2))[:7]
    assert decoder.decode(pack(chunk)).dialect is None
    own = as_array(stored_event(block_hashes=[1 << 63, 12, 13]))[:7]
    assert decoder.decode(pack(chunk, own)).dialect is VLLM


@pytest.mark.parametrize("locality", ["REMOTE", "remote", "NEARBY", 5])
def test_blocks_that_are_not_local_are_counted_and_not_indexed(locality: Any) -> None:
    """They are not what the rank holds, so its answers stay exact."""
    payload = decode_payload(
        pack(
            stored_event(locality=locality, medium="STORAGE"),
            {"type": "BlockRemoved", "block_hashes": [11, 12], "medium": "STORAGE", "locality": locality},
        ),
        BLOCK,
    )
    (left_out,) = payload.events
    assert isinstance(left_out, BlocksLeftOut)
    assert (left_out.engine.tolist(), left_out.reason, left_out.tier) == ([11, 12, 13], "locality", Tier.DEVICE)
    assert (payload.n_unindexed, payload.n_ignored, payload.not_indexed) == (0, 2, {"locality": 5})
    local = stored_event(locality="LOCAL", ownership="fs", session_id="s", medium="STORAGE")
    assert only_stored(decode_payload(pack(local), BLOCK)).tier is Tier.DISK


@pytest.mark.parametrize(
    ("hashes", "reason"),
    [
        ([11, 12, 11], "duplicate_hash"),
        ([b"a" * 24 + b"12345678", 12, b"b" * 24 + b"12345678"], "colliding_hash"),
        ([11, 12, 10], "duplicate_hash"),  # its own parent, as in ai-dynamo/dynamo 4395
    ],
)
def test_a_repeated_name_in_a_store_ends_it(hashes: list[Any], reason: str) -> None:
    """A chain contains no block twice; with truncated hashes, the removal of one would remove the other."""
    payload = decode_payload(pack(stored_event(block_hashes=hashes, parent_block_hash=10)), BLOCK)
    kept, left_out = payload.events
    assert isinstance(kept, BlocksStored) and isinstance(left_out, BlocksLeftOut)
    assert (len(kept.engine), len(left_out.engine), left_out.reason) == (2, 1, reason)
    assert (payload.n_unindexed, payload.not_indexed) == (1, {reason: 1})


@pytest.mark.parametrize("comes_first", [True, False])
def test_the_group_with_full_attention_is_indexed_whichever_number_it_has(comes_first: bool) -> None:
    """Group 0 has sliding windows here; its removals do not remove the blocks of group 1, which have the same names."""
    sliding = stored_event(
        group_idx=0, kv_cache_spec_kind="sliding_window", block_hashes=[12, 13], token_ids=TOKENS[4:]
    )
    full = stored_event(group_idx=1, kv_cache_spec_kind="full_attention")
    decoder, ledger = VllmDecoder(BLOCK), Ledger(counts_copies=True)
    first = decoder.decode(pack(*((full, sliding) if comes_first else (sliding, full))))
    second = decoder.decode(pack({"type": "BlockRemoved", "block_hashes": [12, 13], "medium": "GPU", "group_idx": 0}))
    third = decoder.decode(pack({"type": "BlockRemoved", "block_hashes": [13], "medium": "GPU", "group_idx": 1}))
    for event in (*first.events, *second.events):
        ledger.apply(event)  # type: ignore[arg-type]
    assert len(ledger) == 3
    assert (first.not_indexed, second.not_indexed) == ({"cache_group": 2}, {"cache_group": 2})
    for event in third.events:
        ledger.apply(event)  # type: ignore[arg-type]
    assert len(ledger) == 2


def test_blocks_of_a_window_are_cleared_when_a_group_with_full_attention_appears() -> None:
    """Until then group 0 was the only one, and its blocks were indexed as a prefix."""
    decoder = VllmDecoder(BLOCK)
    alone = decoder.decode(pack(stored_event(group_idx=0, kv_cache_spec_kind="sliding_window")))
    assert (len(alone.events), alone.n_unindexed) == (1, 3)
    full = decoder.decode(pack(stored_event(group_idx=1, kv_cache_spec_kind="full_attention")))
    assert [type(event) for event in full.events] == [AllBlocksCleared, BlocksStored]


def test_a_removal_in_a_group_of_unknown_kind_removes_and_is_approximate() -> None:
    """A bridge that resumes has not seen the stores, so the group may be the one that is indexed."""
    removal = {"type": "BlockRemoved", "block_hashes": [12, 13], "medium": "GPU", "group_idx": 1}
    payload = decode_payload(pack(removal), BLOCK)
    assert ([type(event) for event in payload.events], payload.n_unindexed) == ([BlocksRemoved], 2)


@pytest.mark.parametrize("group", [1, 2])
def test_other_cache_groups_are_counted_and_not_indexed(group: int) -> None:
    """Blocks of sliding windows and state spaces are counted, whatever their size, and change nothing else."""
    payload = decode_payload(
        pack(
            stored_event(group_idx=group, block_size=1024, token_ids=[]),
            {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU", "group_idx": group},
            stored_event(group_idx=0),
        ),
        BLOCK,
    )
    assert payload.n_unindexed == 5
    assert only_stored(payload).engine.tolist() == [11, 12, 13]


def test_a_store_without_blocks_is_not_an_event() -> None:
    """A store without blocks and tokens leaves its batch without events."""
    assert decode_payload(pack(stored_event(block_hashes=[], token_ids=[])), BLOCK).events == ()


@pytest.mark.parametrize("block_size", [None, 0, 3, 5, 16, "4"])
def test_another_block_size_is_refused_with_its_reason(block_size: Any) -> None:
    """Hashes of blocks of another size would never match, and no one would notice."""
    error = lost(stored_event(block_size=block_size))
    assert error.reason == "wrong_block_size"
    assert error.detail["block_size"] == (block_size if block_size in (0, 16) else None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        pack(stored_event())[:-1],
        pack(stored_event()) + b"\x00",
        b"\x91" * 2000,
        msgpack.packb({"ts": 1.0})[:-1],
    ],
)
def test_a_payload_that_is_not_msgpack_is_refused_with_its_reason(raw: bytes) -> None:
    """Refused are empty and truncated payloads, payloads with trailing bytes, and payloads with deep nesting."""
    with pytest.raises(BadRecord) as caught:
        decode_payload(raw, BLOCK)
    assert caught.value.reason == "not_msgpack"


def test_a_payload_over_the_limit_is_refused_without_decoding() -> None:
    """The reason is its size, whatever its content."""
    with pytest.raises(BadRecord) as caught:
        decode_payload(b"\xc0" * (PAYLOAD_BYTES_MAX + 1), BLOCK)
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize(
    "event",
    [
        7,
        None,
        [],
        "BlockStored",
        ["BlockMoved", [1]],
        {"type": "BlockMoved"},
        {"block_hashes": [1]},
        ["BlockRemoved"],
        ["BlockRemoved", 5],
        ["BlockRemoved", b"\x01" * 32],
        ["BlockRemoved", {"1": 2}],
        stored_event(block_hashes=None),
        stored_event(block_hashes=[1, 2, 3, 4]),
        stored_event(token_ids=[]),
        stored_event(token_ids=[[1, 2]] * 12),
        stored_event(group_idx="1"),
        stored_event(cxl_metadata={"state": "in_transit"}),
        {"type": "CxlStateTransition", "block_hashes": [1], "new_state": "in_transit"},
        stored_event(token_ids=None),
        stored_event(token_ids=TOKENS[:-1]),
        stored_event(token_ids=[*TOKENS[:-1], -1]),
        stored_event(token_ids=[*TOKENS[:-1], 1 << 32]),
        stored_event(token_ids=[*TOKENS[:-1], 1.5]),
        stored_event(token_ids=bytes(12)),
        stored_event(token_ids="abcdefghijkl"),
        stored_event(token_ids={str(token): 1 for token in TOKENS}),
        stored_event(parent_block_hash="x"),
        stored_event(lora_name=5),
        stored_event(lora_name=b"poet"),
        stored_event(medium=5),
        stored_event(extra_keys=5),
    ],
)
def test_an_invalid_event_is_lost_with_its_reason(event: Any) -> None:
    """A field has a value that vLLM does not write, and what the event reported could matter."""
    assert lost(event).reason == "bad_event"


def test_each_event_is_judged_on_its_own() -> None:
    """The events around an unusable one are used; the batch says which one it is, and that something is lost."""
    payload = decode_payload(
        pack(
            stored_event(),
            stored_event(block_hashes=[21], token_ids=TOKENS[:4], block_size=64),
            ["BlockRemoved", [12, 13], "GPU"],
            "nonsense",
        ),
        BLOCK,
    )
    stored, removed = payload.events
    assert isinstance(stored, BlocksStored) and isinstance(removed, BlocksRemoved)
    assert (stored.engine.tolist(), removed.engine.tolist()) == ([11, 12, 13], [12, 13])
    assert [(each.index, each.error.reason, each.is_lost) for each in payload.unusable] == [
        (1, "wrong_block_size", True),
        (3, "bad_event", True),
    ]
    assert payload.is_incomplete


@pytest.mark.parametrize(
    ("events", "is_incomplete"), [([7, ["AllBlocksCleared"]], False), ([["AllBlocksCleared"], 7], True)]
)
def test_what_was_lost_before_a_clear_does_not_matter(events: list[Any], is_incomplete: bool) -> None:
    """An empty cache is known completely."""
    payload = decode_payload(pack(*events), BLOCK)
    assert (len(payload.unusable), payload.is_incomplete) == (1, is_incomplete)


@pytest.mark.parametrize(
    "event",
    [["BlockRemoved", [11, 12], 5], {"type": "BlockRemoved", "block_hashes": [11, 12], "group_idx": "x"}],
)
def test_an_unusable_removal_removes_the_blocks_that_it_names_from_every_tier(event: Any) -> None:
    """This can only report too few blocks, so the rank is approximate and nothing is lost."""
    payload = decode_payload(pack(event), BLOCK)
    assert [(each.tier, each.engine.tolist()) for each in payload.events if isinstance(each, BlocksRemoved)] == [
        (tier, [11, 12]) for tier in Tier
    ]
    (unusable,) = payload.unusable
    assert unusable.removed is not None and unusable.removed.tolist() == [11, 12]
    assert (unusable.is_lost, payload.is_incomplete, payload.n_unindexed) == (False, False, 2)


def test_a_removal_with_an_unreadable_name_removes_the_others_and_is_incomplete() -> None:
    """Which block the unreadable name means is not known."""
    payload = decode_payload(pack(["BlockRemoved", [11, "x", 12], "CPU"]), BLOCK)
    (removed,) = payload.events
    assert isinstance(removed, BlocksRemoved)
    assert (removed.engine.tolist(), removed.tier) == ([11, 12], Tier.HOST)
    assert (payload.unusable[0].is_lost, payload.is_incomplete) == (True, True)


@pytest.mark.parametrize(
    ("changes", "n_events", "n_unindexed", "n_ignored"),
    [
        # An offloading connector reports blocks of a lower tier by their hash alone.
        ({"block_hashes": [11], "token_ids": [], "block_size": 0, "medium": "CPU"}, 1, 1, 0),
        ({"token_ids": [], "medium": "STORAGE"}, 1, 3, 0),
        # The beginning of a block, of which only the last hash boundary is an entry in the engine's cache.
        ({"block_hashes": [11], "token_ids": TOKENS[:2], "block_size": 2}, 1, 0, 1),
        # Null or masked blocks have tokens and no hashes.
        ({"block_hashes": [11, 13]}, 1, 2, 0),
        ({"block_hashes": []}, 0, 0, 1),
        # Blocks hashed with the tokens after them are indexed, but may match one block too many.
        ({"lookahead_token_ids": [[5], [9], [13]]}, 1, 3, 0),
        ({"kv_cache_spec_kind": "full_attention"}, 1, 0, 0),
        ({"kv_cache_spec_kind": "mla_attention"}, 1, 0, 0),
        ({"kv_cache_spec_kind": "sliding_window"}, 1, 3, 0),
        ({"kv_cache_spec_kind": "mamba", "block_size": 6, "block_hashes": [11, 12]}, 0, 2, 0),
    ],
)
def test_events_that_the_index_cannot_represent_lose_nothing(
    changes: dict[str, Any], n_events: int, n_unindexed: int, n_ignored: int
) -> None:
    """They are counted. Blocks that the index does not represent, or not exactly, make the rank approximate."""
    payload = decode_payload(pack(stored_event(**changes), ["BlockRemoved", [1], "GPU"]), BLOCK)
    assert (len(payload.events) - 1, payload.n_unindexed, payload.n_ignored) == (n_events, n_unindexed, n_ignored)
    assert (payload.unusable, payload.is_incomplete) == ((), False)


#: Tokens that no other number in a payload resembles.
SECRET = [4_100_001, 4_200_003, 4_300_007, 4_400_009, 4_500_011, 4_600_013, 4_700_017, 4_800_019]


def assert_nothing_secret(letter: bytes, *texts: str) -> None:
    """Check that no token of SECRET is in a text or in bytes, however it is written."""
    for token in SECRET:
        for form in (str(token).encode(), f"{token:x}".encode(), token.to_bytes(4, "little"), token.to_bytes(4, "big")):
            assert form not in letter
            assert all(form not in text.encode() for text in texts)
    for text in (letter.decode(), *texts):
        assert "secret" not in text


forms_of_tokens = [
    SECRET,
    [SECRET],
    [[token] for token in SECRET],
    {str(token): token for token in SECRET},
    {"secret prompt": SECRET},
    SECRET[0],
    str(SECRET),
    "secret prompt",
    b"".join(token.to_bytes(4, "little") for token in SECRET),
    [token.to_bytes(4, "big") for token in SECRET],
    [*SECRET, "secret prompt"],
]
names_of_fields = [*stored_event(), "extra_keys", "group_idx", "kv_cache_spec_kind", "moe", "cxl_metadata", "secret"]


@pytest.mark.parametrize("form", forms_of_tokens, ids=range(len(forms_of_tokens)))
@pytest.mark.parametrize("name", names_of_fields)
@pytest.mark.parametrize("tag", ["BlockStored", "BlockRemoved", "CxlStateTransition", "secret"])
def test_nothing_of_a_prompt_is_in_a_dead_letter_or_a_message(tag: str, name: str, form: Any) -> None:
    """Tokens and text may be in any field, in any shape, in a store, a removal, an unknown event, or as a payload."""
    event = stored_event(token_ids=SECRET, block_size=4, block_hashes=[1 << 40], type=tag) | {name: form}
    array: Any = list(event.values())
    for raw in (pack(event), pack(array), pack(form), msgpack.packb(form), msgpack.packb([form, [], 0])):
        for payload in (raw, raw[:-1], b"\xc1" + raw):
            try:
                unusable: tuple[UnusableEvent, ...] = decode_payload(payload, BLOCK).unusable
            except BadRecord as exc:
                unusable = (UnusableEvent(None, exc),)
            letter = of_payload(0, len(payload), 0, unusable)
            assert_nothing_secret(letter, *(str(each.error) for each in unusable))


def test_a_dead_letter_shows_where_an_event_was_and_what_it_was_about() -> None:
    """It has the position, the reason, lengths, hashes, medium and sizes of each unusable event."""
    stored = stored_event(block_hashes=[1 << 40, b"\x01" * 32, 7], block_size=16, parent_block_hash=-1)
    payload = decode_payload(pack(["AllBlocksCleared"], stored, ["BlockRemoved", [1 << 50], 5]), BLOCK)
    assert json.loads(of_payload(3, 99, 255, payload.unusable)) == {
        "sequence": 3,
        "bytes": 99,
        "digest": "00000000000000ff",
        "n_unusable": 2,
        "unusable": [
            {
                "index": 1,
                "reason": "wrong_block_size",
                "message": "blocks have 16 tokens; this scope has 4 for the model",
                "lost": True,
                "event": {
                    "type": "BlockStored",
                    "n_block_hashes": 3,
                    "n_token_ids": 12,
                    "block_hashes": [str(1 << 40), str(0x0101010101010101), None],
                    "parent_block_hash": str(U64_MASK),
                    "medium": "GPU",
                    "block_size": 16,
                },
            },
            {
                "index": 2,
                "reason": "bad_event",
                "message": "medium is a int, not a name",
                "lost": False,
                "n_removed": 1,
                "event": {"type": "BlockRemoved", "n_block_hashes": 1, "block_hashes": [str(1 << 50)]},
            },
        ],
    }


def test_a_dead_letter_has_a_limit() -> None:
    """A payload of unusable events with many hashes each becomes a letter of at most 100 KB."""
    hashes = list(range(1 << 60, (1 << 60) + 1000))
    events = [stored_event(block_hashes=hashes, block_size=16) for _ in range(200)]
    payload = decode_payload(pack(*events), BLOCK)
    letter = of_payload(0, 0, 0, payload.unusable)
    assert len(payload.unusable) == 200 and len(letter) < 100_000


@pytest.mark.parametrize(
    "outer",
    [
        None,
        5,
        "abc",
        [],
        [1.0],
        [1.0, None],
        [1.0, 5],
        ["x", []],
        [None, []],
        [float("nan"), []],
        [float("inf"), []],
        [1e300, []],
        [-1e300, []],
        [1.0, [], "x"],
        [1.0, [], -1],
        [1.0, [], 1 << 40],
        {},
        {"ts": 1.0},
        {"events": []},
    ],
)
def test_an_invalid_batch_is_refused_with_its_reason(outer: Any) -> None:
    """A batch needs a time, events and a rank, and both numbers must fit into a record."""
    with pytest.raises(BadRecord) as caught:
        decode_payload(msgpack.packb(outer), BLOCK)
    assert caught.value.reason == "bad_event"


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), U64_MASK),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=34),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", BLOCK]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(0, 5), st.sampled_from(["type", "ts"])), inner),
    ),
    max_leaves=10,
)
fields = ["type", *stored_event(), "extra_keys", "group_idx", "kv_cache_spec_kind", "lookahead_token_ids"]
nearly_stored = st.builds(
    lambda name, value: stored_event() | {name: value}, st.sampled_from(fields), st.one_of(scalars, anything)
)
nearly_an_event = st.one_of(
    nearly_stored,
    nearly_stored.map(as_array),
    st.lists(anything, max_size=3).map(lambda rest: ["BlockRemoved", *rest]),
    anything,
)


@settings(max_examples=300, deadline=None)
@given(
    outer=st.one_of(
        anything,
        st.tuples(st.one_of(st.floats(), scalars), st.lists(nearly_an_event, max_size=3), scalars),
        st.lists(nearly_an_event, max_size=3).map(lambda events: {"ts": 1.0, "events": events}),
    )
)
def test_any_message_is_a_batch_that_can_be_published_or_a_dead_letter(outer: Any) -> None:
    """No exception but BadRecord is raised, and every batch passes the ledger and the codec unchanged."""
    raw = msgpack.packb(outer)
    if decoded_or_reason(raw) in REASONS and not decodable(raw):
        return
    payload = decode_payload(raw, BLOCK)
    assert {each.error.reason for each in payload.unusable} <= set(REASONS)
    assert payload.is_incomplete <= any(each.is_lost for each in payload.unusable)
    json.loads(of_payload(0, 0, 0, payload.unusable))
    ledger = Ledger(counts_copies=True)
    changes = tuple(
        out for event in payload.events if not isinstance(event, CxlStateChanged) for out in ledger.apply(event)
    )
    rank = RankId(WorkerId(1), DpRank(payload.dp_rank or 0))
    body = EngineEvents(changes)
    batch = EngineBatch(rank, "m", BLOCK, Incarnation(1), 0, 0, payload.emitted_at_ms, body, payload.n_unindexed)
    back = decode_batch(encode_batch(batch))
    assert (back.rank, back.emitted_at_ms, back.n_unindexed) == (rank, payload.emitted_at_ms, payload.n_unindexed)
    assert isinstance(back.body, EngineEvents) and len(back.body.events) == len(changes)


@settings(max_examples=200, deadline=None)
@given(raw=st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, 200), st.integers(0, 255))))
def test_any_bytes_are_a_batch_or_a_dead_letter(raw: bytes | tuple[int, int]) -> None:
    """Random bytes, and a valid payload with one byte changed, raise no exception but BadRecord."""
    if isinstance(raw, tuple):
        good = bytearray(pack(stored_event(), ["BlockRemoved", [11, 12], "GPU"]))
        good[raw[0] % len(good)] = raw[1]
        raw = bytes(good)
    payload = decoded_or_reason(raw)
    assert isinstance(payload, DecodedBatch) or payload in REASONS


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (None, None),
        ({"layer_id": 2, "expert_id": 7, "expert_group": 3}, MoeLabels(2, 7, 3)),
        ({"expert_id": 0}, MoeLabels(None, 0, None)),
        ({}, MoeLabels(None, None, None)),
    ],
)
def test_labels_of_a_store_are_read(sent: dict[str, int] | None, expected: MoeLabels | None) -> None:
    """Each of the three labels may be missing, and so may all of them."""
    assert only_stored(decode_payload(pack(stored_event(moe=sent)), BLOCK)).moe == expected


@pytest.mark.parametrize(
    "sent", [{"layer_id": -1}, {"expert_id": 1 << 31}, {"expert_group": "3"}, {"layer_id": True}, 7]
)
def test_invalid_labels_are_a_bad_event(sent: Any) -> None:
    """A label must be a number from 0 to LABEL_MAX."""
    assert decoded_or_reason(pack(stored_event(moe=sent))) == "bad_event"


@pytest.mark.parametrize("event_dialect", ["array", "map"])
@pytest.mark.parametrize("hash_dialect", ["int", "bytes32"])
@pytest.mark.parametrize("lora_name", [None, "poet"])
def test_the_simulated_engine_speaks_this_dialect(
    event_dialect: EventDialect, hash_dialect: HashDialect, lora_name: str | None
) -> None:
    """The decoder reads from the simulated engine's payloads the events that its model produced."""
    form = WireForm(BLOCK, event_dialect=event_dialect, hash_dialect=hash_dialect, lora_names=("poet",))
    engine = np.array([U64_MASK, 5, 1 << 63], dtype=np.uint64)
    local = local_hashes(TOKENS, BLOCK, hash_seed(lora_name))
    tokens = np.array(TOKENS, dtype="<u4").tobytes()
    events: list[BlockEvent] = [
        KvStored(0.0, EngineHash(77), engine, local, local, tokens, 4, lora_name),
        KvReused(0.0, engine, tokens, lora_name),
        KvRemoved(1.0, engine[:2]),
        KvCleared(2.0),
    ]
    sent = [wire_event for event in events for wire_event in form.events(event)]
    stored, reused, *removals, cleared = decode_payload(pack(*sent), BLOCK).events
    assert isinstance(stored, BlocksStored) and isinstance(reused, BlocksStored)
    assert (stored.parent, stored.engine.tolist(), stored.local.tolist()) == (77, engine.tolist(), local.tolist())
    assert (reused.parent, reused.engine.tolist(), reused.local.tolist()) == (None, engine.tolist(), local.tolist())
    assert [event.engine.tolist() for event in removals if isinstance(event, BlocksRemoved)] == [[U64_MASK], [5]]
    assert cleared == DeviceCleared()


def test_an_engine_with_smaller_blocks_is_noticed_by_its_second_block() -> None:
    """A single half may be the beginning of a block. With another one behind it, a whole block would have come."""
    decoder = VllmDecoder(BLOCK)
    half = BLOCK // 2

    def small(name: int, parent: int | None) -> DecodedBatch:
        tokens = list(range(name * 100, name * 100 + half))
        event = ["BlockStored", [name], parent, tokens, half, None, "GPU"]
        return decoder.decode(msgpack.packb([1.0, [event], 0]))

    assert not small(1, None).is_incomplete
    assert not small(2, 77).is_incomplete  # the beginning of a block after one of the full size
    batch = small(3, 1)
    assert batch.is_incomplete
    assert [unusable.error.reason for unusable in batch.unusable] == [WRONG_BLOCK_SIZE]


def test_the_number_of_partial_blocks_that_a_decoder_keeps_is_limited() -> None:
    """An engine that reports nothing else does not fill memory."""
    decoder = VllmDecoder(BLOCK)
    for name in range(PARTIAL_NAMES_MAX + 10):
        decoder.decode(msgpack.packb([1.0, [["BlockStored", [name], None, [1], 1, None, "GPU"]], 0]))
    assert len(decoder.partial) == PARTIAL_NAMES_MAX

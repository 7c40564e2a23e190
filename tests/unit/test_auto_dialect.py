"""The dialect `auto`: recognised from the bytes, confirmed, and not misled by damaged payloads."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from streams.engines.dialects.auto import CONFIRMATIONS, AutoDecoder
from streams.engines.dialects.sglang import SglangDecoder
from streams.engines.dialects.vllm import VllmDecoder
from streams.errors import BadRecord
from tests.helpers import sglang_events, trtllm_events, vllm_events

BLOCK = 4
TOKENS = list(range(1, 13))
U64 = 1 << 63

VLLM_EVENTS = [
    pytest.param(["BlockStored", [U64, 1, 2], None, TOKENS, BLOCK, None, "GPU"], id="an unsigned hash"),
    pytest.param(["BlockStored", [b"\x01" * 32] * 3, None, TOKENS, BLOCK, None, "GPU"], id="a hash of bytes"),
    pytest.param(
        ["BlockStored", [1, 2, 3], None, TOKENS, BLOCK, None, "GPU", None], id="a field for the adapter's name"
    ),
    pytest.param(vllm_events.stored_event(), id="a map with lora_name"),
    pytest.param(vllm_events.stored_event(lora_name="poet", lora_id=3), id="a map with an adapter"),
    pytest.param({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}, id="a group"),
    pytest.param(["BlockRemoved", [1], "GPU", 0], id="a removal with a group"),
    pytest.param({"type": "CxlStateTransition", "block_hashes": [1], "new_state": "local_gpu"}, id="CXL"),
]
SGLANG_EVENTS = [
    pytest.param(sglang_events.array(None, "GPU"), id="a signed hash"),
    pytest.param(["BlockStored", [1], None, [5], 1, None, "GPU"], id="a page of one token"),
    pytest.param(["BlockStored", [1], None, TOKENS[:4], BLOCK, None, "CPU_PINNED"], id="a medium"),
    pytest.param(["BlockStored", [1], None, TOKENS[:4], BLOCK, None, "GPU", {"cache_salt": "s"}], id="a map at 7"),
    pytest.param(["BlockStored", [1], None, [[1, 2], [2, 3], [3, 4], [4, 5]], BLOCK, None], id="pairs of tokens"),
    pytest.param(sglang_events.stored(), id="a map without lora_name"),
    pytest.param(sglang_events.stored(lora_name="poet"), id="a map with an adapter"),
    pytest.param(sglang_events.stored(cache_salt="s", extra_keys=[["s"], None, None]), id="a salt of its own"),
    pytest.param(["BlockRemoved", [1], "CPU_PINNED"], id="a removal's medium"),
    pytest.param({"type": "BlockRemoved", "block_hashes": [-1], "medium": "GPU"}, id="a removal's hash"),
]


def pack(*events: Any) -> bytes:
    raw: bytes = msgpack.packb([1.5, list(events), 0])
    return raw


@pytest.mark.parametrize("event", VLLM_EVENTS)
def test_vllm_is_recognised(event: Any) -> None:
    """The first event that only vLLM writes decides, and the payload is decoded as vLLM's."""
    decoder = AutoDecoder(BLOCK)
    batch = decoder.decode(pack(["AllBlocksCleared"], event))
    assert batch.dialect is not None and batch.dialect.name == "vllm" and batch.dialect.counts_copies
    assert (len(batch.events), batch.unusable) == (
        len(VllmDecoder(BLOCK).decode(pack(["AllBlocksCleared"], event)).events),
        (),
    )


@pytest.mark.parametrize("event", SGLANG_EVENTS)
def test_sglang_is_recognised(event: Any) -> None:
    """The first event that only SGLang writes decides, and the payload is decoded as SGLang's."""
    decoder = AutoDecoder(BLOCK)
    batch = decoder.decode(pack(["AllBlocksCleared"], event))
    assert batch.dialect is not None and batch.dialect.name == "sglang" and not batch.dialect.counts_copies
    assert (len(batch.events), batch.unusable) == (
        len(SglangDecoder(BLOCK).decode(pack(["AllBlocksCleared"], event)).events),
        (),
    )


def test_tensorrt_llm_is_recognised() -> None:
    """A payload that is JSON is TensorRT-LLM's."""
    batch = AutoDecoder(BLOCK).decode(trtllm_events.pack(trtllm_events.stored(*trtllm_events.prompt([1, 2, 3]))))
    assert batch.dialect is not None and batch.dialect.name == "trtllm"
    assert len(batch.events) == 1


def test_a_batch_that_is_a_map_is_vllms() -> None:
    """SGLang's batches are arrays in all versions."""
    batch = AutoDecoder(BLOCK).decode(msgpack.packb({"ts": 1.0, "events": []}))
    assert batch.dialect is not None and batch.dialect.name == "vllm"


def test_nothing_is_decided_from_events_that_both_engines_write() -> None:
    """Until an event shows the dialect, payloads are read as vLLM's."""
    decoder = AutoDecoder(BLOCK)
    batch = decoder.decode(pack(["BlockStored", [1, 2, 3], None, TOKENS, BLOCK, None, "GPU"], ["AllBlocksCleared"]))
    assert (batch.dialect, len(batch.events)) == (None, 2)
    assert decoder.decode(pack(sglang_events.stored())).dialect is not None


def test_a_damaged_payload_does_not_decide_for_good() -> None:
    """JSON and a negative hash among vLLM's first payloads mislead for one payload; later ones decide again."""
    decoder = AutoDecoder(BLOCK)
    good = pack(vllm_events.stored_event())
    for damaged in (b"[1]", b"{", pack(["BlockStored", [-1], None, TOKENS[:4], BLOCK, None, "GPU"])):
        try:
            decoder.decode(damaged)
        except BadRecord:
            pass
        batch = decoder.decode(good)
        assert batch.dialect is not None and batch.dialect.name == "vllm"
        assert len(batch.events) == 1
    for _ in range(CONFIRMATIONS):
        decoder.decode(good)
    decoder.decode(pack(sglang_events.stored()))
    with pytest.raises(BadRecord):
        decoder.decode(b"[1]")
    assert decoder.dialect is not None and decoder.dialect.name == "vllm"  # the decision is final

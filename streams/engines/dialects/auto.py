"""The dialect of any engine, recognised from its bytes (pure).

What lives here: how the dialects differ on the wire. What must not: the formats themselves (one module per dialect).

| the payload | the dialect |
|---|---|
| begins like JSON | trtllm |
| is a map | vllm |
| has a store or removal that is a map with group_idx, or a store with a lora_name that is None | vllm |
| has another store or removal that is a map | sglang |
| has a store that is an array with a map at position 7 | sglang |
| has a store that is an array of more than 7 entries | vllm |
| has a negative block hash, a medium that only SGLang has, pairs of tokens, or pages smaller than a block | sglang |
| has a block hash of bytes, or one above 2^63 | vllm |

Until an event shows the dialect, payloads are read as vLLM's: the oldest stores of both engines have the same form.
Each block hash of such a store decides with a probability of one half. A damaged payload may show a wrong dialect, so
the decision is final only after `CONFIRMATIONS` payloads in a row that show the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streams.engines.dialects.fields import FIELD_ERRORS
from streams.engines.dialects.interface import DecodedBatch, Dialect
from streams.engines.dialects.sglang import METADATA_AT, SGLANG, SglangDecoder
from streams.engines.dialects.trtllm import TRTLLM, TrtllmDecoder
from streams.engines.dialects.vllm import VLLM, VllmDecoder, opened, unpacked
from streams.errors import BadRecord

#: Media that SGLang has and vLLM has not.
_SGLANG_MEDIA = frozenset({"CPU_PINNED", "EXTERNAL"})

#: Bytes with which JSON can begin. None of them is the beginning of a payload in msgpack, which is an array or a map.
_JSON_STARTS = frozenset(b"[{ \t\r\n")


#: Payloads in a row that must show the same dialect until it is final.
CONFIRMATIONS = 8


@dataclass(slots=True)
class AutoDecoder:
    """Recognises the dialect of an incarnation from its first payloads, and decodes them with it.

    block_size: tokens, as the scope has it for the model. dialect: None until a payload shows it. n_confirmed: payloads
    in a row that showed it.
    """

    block_size: int
    dialect: Dialect | None = None
    n_confirmed: int = 0
    _decoder: VllmDecoder | SglangDecoder | TrtllmDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = VllmDecoder(self.block_size)

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload. Raises BadRecord if it cannot be divided into events."""
        if self.n_confirmed >= CONFIRMATIONS:
            return self._decoder.decode(payload)
        if payload[:1] and payload[0] in _JSON_STARTS:
            return self._decode_json(payload)
        outer = unpacked(payload)
        self._note(_recognised(outer, self.block_size))
        decoder = self._decoder
        if isinstance(decoder, TrtllmDecoder):  # no event of the payload shows another dialect
            return decoder.decode(payload)
        return replace(decoder.decode_opened(outer), dialect=self.dialect)

    def _decode_json(self, payload: bytes) -> DecodedBatch:
        decoder = self._decoder if isinstance(self._decoder, TrtllmDecoder) else TrtllmDecoder(self.block_size)
        batch = decoder.decode(payload)
        if batch.events:
            if decoder is not self._decoder:
                self._decoder, self.dialect, self.n_confirmed = decoder, TRTLLM, 0
            self.n_confirmed += 1
        return replace(batch, dialect=self.dialect)

    def _note(self, dialect: Dialect | None) -> None:
        """Note which dialect the events of a payload show."""
        if dialect is None:
            return
        if dialect is self.dialect:
            self.n_confirmed += 1
            return
        if dialect is not VLLM or self.dialect is not None:  # until the first decision, payloads were read as vLLM's
            self._decoder = VllmDecoder(self.block_size) if dialect is VLLM else SglangDecoder(self.block_size)
        self.dialect, self.n_confirmed = dialect, 1


#: Copies are counted until the dialect is known, and then as that dialect does it.
AUTO = Dialect("auto", counts_copies=True, computed_tokens_min=1, decoder=AutoDecoder)


def _recognised(outer: Any, block_size: int) -> Dialect | None:
    """Return the dialect that the payload's events show; None if none does."""
    _, _, raw_events = opened(outer)
    if isinstance(outer, dict):
        return VLLM
    for raw in raw_events:
        try:
            dialect = _by_map(raw) if isinstance(raw, dict) else _by_array(raw, block_size)
        except (BadRecord, *FIELD_ERRORS):
            continue  # it becomes an unusable event
        if dialect is not None:
            return dialect
    return None


def _by_map(event: dict[str, Any]) -> Dialect | None:
    kind = event["type"]
    if kind == "CxlStateTransition" or "group_idx" in event or "moe" in event or "cxl_metadata" in event:
        return VLLM
    if kind == "BlockRemoved":
        return _by_hashes(event["block_hashes"]) or (SGLANG if event.get("medium") in _SGLANG_MEDIA else None)
    if kind != "BlockStored":
        return None
    if "cache_salt" in event:
        return SGLANG  # vLLM has the salt among its extra keys
    has_vllm_fields = "lora_name" in event and (event["lora_name"] is None or event.get("lora_id") is not None)
    return VLLM if has_vllm_fields or "extra_keys" in event else SGLANG


def _by_array(event: list[Any], block_size: int) -> Dialect | None:
    tag, *values = event
    if tag == "CxlStateTransition":
        return VLLM
    if tag == "BlockRemoved":
        medium = values[1] if len(values) > 1 else None
        return SGLANG if medium in _SGLANG_MEDIA else VLLM if len(values) > 2 else _by_hashes(values[0])
    if tag != "BlockStored":
        return None
    if len(values) >= METADATA_AT:
        return SGLANG if isinstance(values[METADATA_AT - 1], dict) else VLLM
    if len(values) > 5 and values[5] == "cpu":
        return None  # its chunk size and its hashes are a connector's, not the engine's
    tokens, size = values[2], values[3]
    # The versions of vLLM that report the beginnings of blocks have more fields.
    is_page = type(size) is int and 0 < size < block_size
    is_bigram = not isinstance(tokens, np.ndarray) and tokens and isinstance(tokens[0], list)
    if is_page or is_bigram or (len(values) > 5 and values[5] in _SGLANG_MEDIA):
        return SGLANG
    return _by_hashes([*values[0], values[1]])


def _by_hashes(hashes: Iterable[Any]) -> Dialect | None:
    for value in hashes:
        if isinstance(value, bytes) or (type(value) is int and value >= 1 << 63):
            return VLLM
        if type(value) is int and value < 0:
            return SGLANG
    return None

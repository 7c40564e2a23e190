"""The dialect of SGLang: msgpack payloads to events (pure).

What lives here: the format that SGLang's ZmqEventPublisher writes. What must not: sockets (feed), and which pages make
a block (pages).

A payload is `[ts, [events], attn_dp_rank]`. Until 0.5.17, an event is an array that starts with its tag, and ends at
lora_id or at medium. 0.5.18 adds a map at position 7 if the request had a salt; vLLM has the name of the adapter there.
From 0.5.20 on, events are maps with `type`, without the fields that are None. The versions are the first with the field
among those of tests/golden_events.json. BlockStored, by position:

| # | field | sent by | what is done with it |
|---|---|---|---|
| 1 | block_hashes | all | the engine's names of the pages, signed 64 bits |
| 2 | parent_block_hash | all | the name of the page before the first one; None at the root |
| 3 | token_ids | all | hashed; with EAGLE, pairs of each token and the next one, of which the first is hashed |
| 4 | block_size | all | tokens per page, which divides the scope's block size; less in the last page of a prompt |
| 5 | lora_id | all | part of the seed, if there is no lora_name; SGLang sends None |
| 6 | medium | 0.5.14 on | the tier: GPU, CPU_PINNED, DISK, EXTERNAL |
| 7 | a map | 0.5.18 | cache_salt, which is part of the seed of the first block; others are read as below |
| - | cache_salt | 0.5.20 on | part of the seed of the first block |
| - | lora_name | 0.5.23 | part of the seed |
| - | session_id | 0.5.20 on | ignored |

BlockRemoved: block_hashes, medium. AllBlocksCleared has no fields. A page's store is repeated when a request inserts
the page again; that is no further copy of it. In the engine's default format, requests that differ in `extra_key` alone
report the same hashes, so nothing can tell their blocks apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from streams.engines.dialects.fields import (
    FIELD_ERRORS,
    HASHES_SHOWN_MAX,
    TIERS,
    BatchBuilder,
    Get,
    adapter_of,
    distinct_prefix,
    engine_hash,
    engine_hashes,
    hash_blocks,
    shown_hash,
    shown_size,
    tier_of,
    wrong_block_size,
)
from streams.engines.dialects.interface import DecodedBatch, Dialect, PagesStored
from streams.engines.dialects.pages import Pages, Salting
from streams.engines.dialects.vllm import opened, unpacked
from streams.errors import BadRecord

_STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED_FIELDS = ("block_hashes", "medium")

#: Position of the map that 0.5.18 adds to a store that is an array, counted from the tag.
METADATA_AT = 7


@dataclass(frozen=True, slots=True)
class SglangDecoder:
    """Decodes SGLang's payloads. block_size: tokens, as the scope has it for the model."""

    block_size: int
    pages: Pages = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", Pages(self.block_size))

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload. Raises BadRecord if it cannot be divided into events."""
        return self.decode_opened(unpacked(payload))

    def decode_opened(self, outer: Any) -> DecodedBatch:
        """Decode a payload that has been unpacked."""
        emitted_at_ms, dp_rank, raw_events = opened(outer)
        batch = BatchBuilder()
        for index, raw in enumerate(raw_events):
            try:
                self._read(batch, raw)
            except BadRecord as exc:
                batch.lose(index, exc, _shown(raw))
            except FIELD_ERRORS as exc:
                error = BadRecord("bad_event", f"a field of the event has an impossible value ({type(exc).__name__})")
                batch.lose(index, error, _shown(raw))
        return batch.built(emitted_at_ms, dp_rank)

    def _read(self, batch: BatchBuilder, raw: Any) -> None:
        tag, get = fields_of(raw)
        match tag:
            case "BlockStored":
                self._store(batch, get)
            case "BlockRemoved":
                removed, unknown = self.pages.remove(engine_hashes(get("block_hashes")), tier_of(get("medium")))
                batch.events += removed
                if unknown:
                    batch.events.append(BlocksRemoved(engine_hashes(unknown), tier_of(get("medium"))))
            case "AllBlocksCleared":
                self.pages.clear()
                batch.events.append(AllBlocksCleared())
                batch.is_incomplete = False  # an empty cache is known, whatever was lost before
            case _:
                raise BadRecord("bad_event", "the event is of an unknown type")

    def _store(self, batch: BatchBuilder, get: Get) -> None:
        values, tokens, size = get("block_hashes"), get("token_ids"), get("block_size")
        hashes, tier = engine_hashes(values), tier_of(get("medium"))
        if not len(hashes):
            return
        if not isinstance(tokens, list):
            raise BadRecord("bad_event", f"token_ids is a {type(tokens).__name__}, not a list")
        if type(size) is not int or size < 1 or size > self.block_size:
            raise wrong_block_size(size, self.block_size)
        if len(tokens) != len(hashes) * size:
            raise BadRecord("bad_event", f"{len(tokens)} tokens for {len(hashes)} pages of {size}")
        is_bigram = isinstance(tokens[0], list)
        if is_bigram:
            tokens = [first for first, _ in tokens]
        parent = None if get("parent_block_hash") is None else engine_hash(get("parent_block_hash"))
        salting = Salting(adapter_of(get), get("cache_salt"))
        keep, reason = distinct_prefix(values, hashes, get("parent_block_hash"))
        batch.leave_out(reason, len(hashes) - keep)
        if not keep:
            return
        names, kept = hashes[:keep], tokens[: keep * size]
        if size == self.block_size and (parent is None or parent not in self.pages):
            local = hash_blocks(kept, size, salting.lora, salting.cache_salt, at_root=parent is None)
            batch.events.append(BlocksStored(parent, names, local, tier))
        else:
            check_tokens(kept)
            if parent is not None and parent not in self.pages:
                batch.events.append(PagesStored(parent, len(names), tier))
            batch.events += self.pages.store(parent, names, kept, tier, salting)
            if self.block_size % size:
                batch.count("tail", len(names))
        if is_bigram:
            # The engine holds a page for the prompts that have the token after it as well, which the index cannot know.
            batch.leave_out("lookahead", keep)


#: A repeated store changes nothing.
SGLANG = Dialect("sglang", counts_copies=False, computed_tokens_min=1, decoder=SglangDecoder)


def check_tokens(tokens: list[Any]) -> None:
    """Raise BadRecord for values that are not tokens; those of a page are hashed later, with its block."""
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise BadRecord("bad_event", "token_ids has an impossible value")


def fields_of(raw: Any) -> tuple[Any, Get]:
    """Return an event's tag, and its fields by name."""
    if isinstance(raw, dict):
        return raw["type"], raw.get
    tag, *values = raw
    fields = dict(zip(_REMOVED_FIELDS if tag == "BlockRemoved" else _STORED_FIELDS, values, strict=False))
    if tag == "BlockStored" and len(values) >= METADATA_AT and isinstance(values[METADATA_AT - 1], dict):
        fields = values[METADATA_AT - 1] | fields
    return tag, fields.get


def _shown(raw: Any) -> dict[str, object]:
    """Return what is known not to be tokens or text of a prompt."""
    try:
        tag, get = fields_of(raw)
    except FIELD_ERRORS:
        return {"kind": type(raw).__name__}
    if tag not in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        return {"type": "unknown"}
    shown: dict[str, object] = {"type": tag}
    for name in ("block_hashes", "token_ids"):
        value = get(name)
        if value is not None:
            shown[f"n_{name}"] = len(value) if isinstance(value, list) else type(value).__name__
    hashes = get("block_hashes")
    if isinstance(hashes, list):
        shown["block_hashes"] = [shown_hash(value) for value in hashes[:HASHES_SHOWN_MAX]]
    medium, size = get("medium"), get("block_size")
    if isinstance(medium, str) and medium.upper() in TIERS:
        shown["medium"] = medium
    if shown_size(size) is not None:
        shown["block_size"] = size
    return shown

"""The dialect of TensorRT-LLM: JSON to events (pure).

What lives here: the format of `LLM.get_kv_cache_events` and of the HTTP endpoint `/kv_cache_events`. What must not:
sockets and HTTP (feed), and which blocks of the engine make a block of the scope (pages).

A payload is one event or a list of them. An event is a map:

| field | sent by | what is done with it |
|---|---|---|
| event_id | all | ignored here; the number of the batch if events are polled (engines.polling) |
| data | all | by `type`, see below |
| window_size | 1.0 on | tokens of the attention window; only the largest window of the engine is indexed |
| attention_dp_rank | 1.1 on | the rank; an answer over HTTP has the events of all ranks |
| layer_group_id, hash_algo | V2 cache manager | ignored |

| data.type | fields | what is done |
|---|---|---|
| created | num_blocks_per_cache_level | the engine's cache is new, so everything is cleared |
| stored | parent_hash, blocks | see below |
| removed | block_hashes | the blocks are removed from the tier that they are in, which only the ledger knows |
| updated | block_hash, cache_level, priority | with a new cache_level, the block moves to another tier |

| field of a stored block | what is done with it |
|---|---|
| block_hash | u64, or 64 hexadecimal digits of which the last 16 count |
| tokens | their token_id is hashed; a digest in place of a token begins an image |
| lora_id | part of the seed |
| cache_level | the tier: 0 device, 1 host, 2 disk |
| cache_salt | part of the seed of the first block |
| mm_keys | the images of the block: hash, and the offset in the image of the first token that the block has |
| priority | ignored |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from streams.core.hashing import content_hash, pad_value
from streams.core.ids import U64_MASK, EngineHash, HashArray, Tier
from streams.engines.dialects.fields import (
    FIELD_ERRORS,
    HASHES_SHOWN_MAX,
    BatchBuilder,
    check_envelope,
    check_length,
    hash_blocks,
    shown_hash,
    shown_size,
    wrong_block_size,
)
from streams.engines.dialects.interface import (
    BlocksCopied,
    BlocksDropped,
    BlocksLeftOut,
    DecodedBatch,
    Dialect,
    PagesStored,
)
from streams.engines.dialects.pages import Pages, Salting
from streams.engines.dialects.sglang import check_tokens
from streams.errors import BadRecord

#: Attention windows of an engine. Models have two or three.
WINDOWS_MAX = 64

#: Characters of a block hash of 32 bytes, in hexadecimal.
_HEX_HASH_CHARS = 64

_LEVELS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.EXTERNAL)


@dataclass(slots=True)
class TrtllmDecoder:
    """Decodes TensorRT-LLM's payloads. block_size: tokens, as the scope has it for the model.

    window: the attention window that is indexed, None until an event has named one. It is the largest one of which the
    engine has reported the creation, or, if it has reported none, the largest one of any event. created: the windows of
    which it has reported the creation; a second report means that the cache is new. vocabulary: the number that image
    tokens are counted from, None until a block with the beginning of an image shows it. has_stored: whether a block was
    indexed since the last clear.
    """

    block_size: int
    pages: Pages = field(init=False)
    window: int | None = None
    created: set[int] = field(default_factory=set)
    vocabulary: int | None = None
    has_stored: bool = False

    def __post_init__(self) -> None:
        self.pages = Pages(self.block_size)

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload. Raises BadRecord if it cannot be divided into events."""
        raw_events = events_of(payload)
        ranks = [raw.get("attention_dp_rank") for raw in raw_events if isinstance(raw, dict)]
        dp_rank = next((rank for rank in ranks if type(rank) is int), None)
        check_envelope(dp_rank, 0)
        batch = BatchBuilder()
        self._find_window(batch, raw_events)
        for index, raw in enumerate(raw_events):
            try:
                self._read(batch, raw, dp_rank)
            except BadRecord as exc:
                batch.lose(index, exc, _shown(raw))
            except FIELD_ERRORS as exc:
                error = BadRecord("bad_event", f"a field of the event has an impossible value ({type(exc).__name__})")
                batch.lose(index, error, _shown(raw))
        return batch.built(0, dp_rank)

    def _find_window(self, batch: BatchBuilder, raw_events: list[Any]) -> None:
        """Find the largest window. If blocks of a smaller one were indexed until now, they are cleared.

        Once the engine has reported which windows it has, another one is damaged.
        """
        if self.created:
            return
        windows = [raw.get("window_size") for raw in raw_events if isinstance(raw, dict)]
        largest = max((window for window in windows if type(window) is int), default=None)
        if largest is None or (self.window is not None and largest <= self.window):
            return
        if self.window is not None and self.has_stored:
            self._clear(batch)
        self.window = largest

    def _create(self, batch: BatchBuilder, window: Any) -> None:
        """Begin with an empty cache, unless it is that of a window smaller than the one that is indexed."""
        if window is not None and type(window) is not int:
            raise BadRecord("bad_event", f"window_size is a {type(window).__name__}, not a number")
        if window is None or window in self.created:
            self.created.clear()
        if window is None:
            self.window = None
            self._clear(batch)
            return
        if len(self.created) == WINDOWS_MAX:
            raise BadRecord("over_capacity", f"the engine has more than {WINDOWS_MAX} attention windows")
        self.created.add(window)
        if window == max(self.created):
            self.window = window
            self._clear(batch)

    def _clear(self, batch: BatchBuilder) -> None:
        self.pages.clear()
        self.has_stored = False
        batch.events.append(AllBlocksCleared())
        batch.is_incomplete = False  # an empty cache is known, whatever was lost before

    def _read(self, batch: BatchBuilder, raw: Any, dp_rank: int | None) -> None:
        data, window, rank = raw["data"], raw.get("window_size"), raw.get("attention_dp_rank")
        if rank is not None and rank != dp_rank:
            raise BadRecord("bad_event", "the event is of another rank than the first one of its payload")
        kind = data["type"]
        if kind == "created":
            self._create(batch, window)
            return
        if kind not in ("stored", "removed", "updated"):
            raise BadRecord("bad_event", "the event is of an unknown type")
        if window is not None and window != self.window:
            n_blocks = len(data.get("blocks") or data.get("block_hashes") or (None,))
            batch.leave_out("cache_group", n_blocks)
        elif kind == "stored":
            self._store(batch, data)
        elif kind == "removed":
            self._remove(batch, data["block_hashes"])
        elif data.get("cache_level") is not None:
            self._move(batch, data)

    def _store(self, batch: BatchBuilder, data: dict[str, Any]) -> None:
        """Store blocks, each with its tier. Whole blocks that follow each other become one event."""
        parent = None if data.get("parent_hash") is None else block_name(data["parent_hash"])
        stored: list[BlocksStored] = []
        begun: list[PagesStored] = []
        read: list[tuple[EngineHash, list[Any], Tier, Salting]] = []
        seen: set[int | None] = {parent}
        for index, block in enumerate(data["blocks"]):
            name, tokens = block_name(block["block_hash"]), [token["token_id"] for token in block["tokens"]]
            if len(tokens) > self.block_size:
                raise wrong_block_size(len(tokens), self.block_size)
            if name in seen:
                batch.leave_out("duplicate_hash", len(data["blocks"]) - index)
                break
            padded = self._with_images(tokens, block)
            if padded is None:
                self._leave_out(batch, data["blocks"][index:], block)
                break
            check_tokens(padded)
            seen.add(name)
            lora = None if block.get("lora_id") is None else str(block["lora_id"])
            salting = Salting(lora, block.get("cache_salt"))
            read.append((name, padded, _tier(block.get("cache_level", 0)), salting))
        for index, (name, tokens, tier, salting) in enumerate(read):
            names = _array([name])
            if not tokens:
                continue
            if len(tokens) == self.block_size and (parent is None or parent not in self.pages):
                local = hash_blocks(tokens, self.block_size, salting.lora, salting.cache_salt, at_root=parent is None)
                stored.append(BlocksStored(parent, names, local, tier))
            else:
                if self.block_size % len(tokens):
                    batch.count("tail", 1)
                if parent is not None and parent not in self.pages:
                    begun.append(PagesStored(parent, len(read) - index, tier))
                stored += self.pages.store(parent, names, tokens, tier, salting)
            parent = name
        self.has_stored |= bool(stored)
        batch.events += [*_joined(stored), *begun]

    def _leave_out(self, batch: BatchBuilder, blocks: list[dict[str, Any]], first: dict[str, Any]) -> None:
        """Leave out blocks from the first one of unknown content on. No request can name tokens with an extra id."""
        names = _array([block_name(block["block_hash"]) for block in blocks])
        is_image = first.get("mm_keys") or any(isinstance(token["token_id"], str) for token in first["tokens"])
        reason = "key_unknown" if is_image else "content_unknown"
        if is_image:
            batch.leave_out(reason, len(blocks))
        else:
            batch.count(reason, len(blocks))
        batch.events.append(BlocksLeftOut(names, reason, _tier(first.get("cache_level", 0))))

    def _with_images(self, tokens: list[Any], block: dict[str, Any]) -> list[Any] | None:
        """Return a block's tokens with pad values in place of images; None if their places are not known.

        The first token of an image is its digest; the others are numbers that count up from the vocabulary's size.
        """
        keys = block.get("mm_keys") or ()
        if not keys and not any(isinstance(token, str) for token in tokens):
            extra = any(token.get("token_extra_id") for token in block["tokens"])
            return None if extra else tokens
        padded = list(tokens)
        position = 0
        for key in keys:
            digest, offset = key["hash"], key.get("start_offset", 0)
            while position < len(tokens) and not self._is_image(tokens[position], offset):
                position += 1
            if position == len(tokens):
                return None
            pad = pad_value(content_hash(digest))
            if isinstance(tokens[position], str) and position + 1 < len(tokens) and type(tokens[position + 1]) is int:
                first = tokens[position + 1] - 1
                self.vocabulary = first if self.vocabulary is None else self.vocabulary
            while position < len(tokens) and self._is_image(tokens[position], offset):
                padded[position] = pad
                position, offset = position + 1, offset + 1
        return None if any(isinstance(token, str) for token in padded) else padded

    def _is_image(self, token: Any, offset: int) -> bool:
        """Whether a token is the one of an image that is `offset` tokens from its beginning."""
        if offset == 0:
            return isinstance(token, str)
        return self.vocabulary is not None and token == self.vocabulary + offset

    def _remove(self, batch: BatchBuilder, values: Any) -> None:
        if not isinstance(values, list):
            raise BadRecord("bad_event", f"block_hashes is a {type(values).__name__}, not a list")
        names = [block_name(value) for value in values]
        pages: dict[Tier, list[int]] = {}
        for name in names:
            for tier in self.pages.tiers_of(name):
                pages.setdefault(tier, []).append(name)
        dropped = [name for name in names if name not in self.pages]
        for tier, of_tier in pages.items():
            batch.events += self.pages.remove(_array(of_tier), tier)[0]
        if dropped:
            batch.events.append(BlocksDropped(_array(dropped)))

    def _move(self, batch: BatchBuilder, data: dict[str, Any]) -> None:
        """Move a block to another tier: it is stored there before it is removed, so that the ledger knows it."""
        name, level = block_name(data["block_hash"]), data["cache_level"]
        old, new = _tier(level["old_value"]), _tier(level["new_value"])
        if old is new:
            return
        if name in self.pages:
            batch.leave_out("placeholder", 1)  # a part of a block; the block is in no tier as a whole
            removed, _ = self.pages.remove(_array([name]), old)
            batch.events += removed
            return
        batch.events += [BlocksCopied(_array([name]), new), BlocksRemoved(_array([name]), old)]


#: A repeated store changes nothing.
TRTLLM = Dialect("trtllm", counts_copies=False, computed_tokens_min=1, decoder=TrtllmDecoder)


def events_of(payload: bytes) -> list[Any]:
    """Return the events of a payload. Raises BadRecord."""
    check_length(payload)
    try:
        outer = json.loads(payload)
    except (ValueError, RecursionError) as exc:  # its message quotes the payload
        raise BadRecord("not_json", f"the payload is not JSON ({type(exc).__name__})") from None
    if isinstance(outer, dict):
        outer = [outer]
    if not isinstance(outer, list):
        raise BadRecord("bad_event", f"the payload is a {type(outer).__name__}, not a list of events")
    return outer


def rank_of_event(raw: Any) -> int:
    """Return the attention dp rank of an event, 0 if it names none."""
    rank = raw.get("attention_dp_rank") if isinstance(raw, dict) else None
    return rank if type(rank) is int and rank >= 0 else 0


def block_name(value: Any) -> EngineHash:
    """Return a block's name as u64. Raises TypeError, ValueError."""
    if isinstance(value, str) and len(value) == _HEX_HASH_CHARS:
        return EngineHash(int(value, 16) & U64_MASK)
    if isinstance(value, int) and not isinstance(value, bool):
        return EngineHash(value & U64_MASK)
    raise TypeError(f"a {type(value).__name__} is not a block hash")


def _tier(level: Any) -> Tier:
    if type(level) is not int or not 0 <= level < len(_LEVELS):
        raise BadRecord("bad_event", "a cache level is not a number from 0 to 3")
    return _LEVELS[level]


def _array(names: Sequence[int]) -> HashArray:
    return np.array(names, dtype=np.uint64)


def _joined(stored: list[BlocksStored]) -> list[BlocksStored]:
    """Join stores that continue each other in the same tier."""
    out: list[list[BlocksStored]] = []
    for event in stored:
        last = out[-1][-1] if out else None
        if last is not None and last.tier is event.tier and event.parent == int(last.engine[-1]):
            out[-1].append(event)
        else:
            out.append([event])
    return [
        BlocksStored(
            run[0].parent,
            np.concatenate([event.engine for event in run]),
            np.concatenate([event.local for event in run]),
            run[0].tier,
        )
        for run in out
    ]


def _shown(raw: Any) -> dict[str, object]:
    """Return what is known not to be tokens or text of a prompt."""
    try:
        data = raw["data"]
        kind = data["type"]
    except FIELD_ERRORS:
        return {"kind": type(raw).__name__}
    if kind not in ("created", "stored", "removed", "updated"):
        return {"type": "unknown"}
    shown: dict[str, object] = {"type": kind}
    blocks, hashes = data.get("blocks"), data.get("block_hashes")
    if isinstance(blocks, list):
        shown["n_blocks"] = len(blocks)
        hashes = [block.get("block_hash") for block in blocks if isinstance(block, dict)]
        sizes = {len(block["tokens"]) for block in blocks if isinstance(block, dict) and _has_tokens(block)}
        size = max(sizes, default=None)
        if shown_size(size) is not None:
            shown["block_size"] = size
    if isinstance(hashes, list):
        shown["n_block_hashes"] = len(hashes)
        shown["block_hashes"] = [_shown_name(value) for value in hashes[:HASHES_SHOWN_MAX]]
    return shown


def _has_tokens(block: dict[str, Any]) -> bool:
    return isinstance(block.get("tokens"), list)


def _shown_name(value: Any) -> str | None:
    try:
        return shown_hash(int(block_name(value)))
    except (TypeError, ValueError):
        return None

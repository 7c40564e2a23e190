"""The dialect of vLLM: msgpack payloads to events (pure).

What lives here: the format that vLLM's ZmqEventPublisher writes. A payload is `[ts, [events], dp_rank]` or a map with
these names. Each event is an array that starts with its tag, or a map with `type`. Engines with CXL memory add the
event `CxlStateTransition`, and add the field `cxl_metadata` to stores that are maps. Engines that label blocks with
slices of a mixture of experts add the field `moe` (docs/cxl.md). What must not: sockets (feed) and copies (ledger).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import (
    LABEL_NAMES,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    MoeLabels,
    check_labels,
)
from streams.core.hashing import hash_seed, local_hashes
from streams.core.ids import U64_MASK, EngineHash, HashArray, Tier, WorkerId
from streams.cxl.events import POOL_MEMBERS_MAX, CxlStateChanged, check_pool_id
from streams.engines.dialects.interface import DecodedBatch, Dialect, EngineEvent
from streams.errors import BadRecord, InvalidRequest

#: Bytes of one payload. A prompt of 1M tokens that is stored at once takes 5 MB; a payload more than ten times as large
#: is not an event batch.
PAYLOAD_BYTES_MAX = 64 * 1024 * 1024

#: The greatest values of a record's rank and of its times, which are Avro's int and long.
_I32_MAX = (1 << 31) - 1
_I64_MAX = (1 << 63) - 1

_TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "DISK": Tier.DISK, "STORAGE": Tier.DISK}

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_CXL_FIELDS = ("event_id", "block_hashes", "new_state", "pool_id", "accessible_workers")

#: Fields by tag, in the order in which an event that is an array has them. Stores are the default.
_FIELDS = {"BlockRemoved": _REMOVED_FIELDS, "CxlStateTransition": _CXL_FIELDS}


@dataclass(frozen=True, slots=True)
class VllmDecoder:
    """Decodes vLLM's payloads and keeps no state. block_size: tokens, as the scope has it for the model."""

    block_size: int

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload; see decode_payload."""
        return decode_payload(payload, self.block_size)


#: vLLM reports each physical copy of a block, so copies are counted.
VLLM = Dialect("vllm", counts_copies=True, decoder=VllmDecoder)


def decode_payload(raw: bytes, block_size: int) -> DecodedBatch:
    """Decode one payload; block_size in tokens is the one that the scope has for the model.

    Raises BadRecord with reason too_large, not_msgpack, bad_event or wrong_block_size.
    """
    if len(raw) > PAYLOAD_BYTES_MAX:
        raise BadRecord("too_large", f"the payload has {len(raw)} bytes; the limit is {PAYLOAD_BYTES_MAX}")
    try:
        outer = msgpack.unpackb(raw, strict_map_key=False)
    except Exception as exc:  # msgpack raises exceptions of its own as well as ValueError
        raise BadRecord("not_msgpack", f"the payload is not msgpack: {exc}") from exc
    try:
        if isinstance(outer, dict):  # newer versions of vLLM write the batch itself as a map, too
            outer = [outer["ts"], outer["events"], outer.get("data_parallel_rank")]
        emitted_s, raw_events, *rest = outer
        emitted_at_ms = int(float(emitted_s) * 1000)
        dp_rank = int(rest[0]) if rest and rest[0] is not None else 0
        if not (0 <= dp_rank <= _I32_MAX and abs(emitted_at_ms) <= _I64_MAX):
            raise BadRecord("bad_event", f"rank {dp_rank} or time {emitted_s} s does not fit into a record")
        events: list[EngineEvent] = []
        n_unindexed = 0
        for raw_event in raw_events:
            event, skipped = _event(raw_event, block_size)
            n_unindexed += skipped
            if event is not None:
                events.append(event)
        return DecodedBatch(emitted_at_ms, dp_rank, tuple(events), n_unindexed)
    except BadRecord:
        raise
    except (InvalidRequest, TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as exc:
        raise BadRecord("bad_event", f"the payload is not an event batch: {exc}") from exc


def engine_hash(value: Any) -> EngineHash:
    """Return an engine's block id as u64: an integer's low 64 bits, or the last 8 bytes, big-endian.

    A negative integer becomes its two's complement. Raises TypeError.
    """
    if isinstance(value, bytes):
        return EngineHash(int.from_bytes(value[-8:], "big"))
    if isinstance(value, int) and not isinstance(value, bool):
        return EngineHash(value & U64_MASK)
    raise TypeError(f"{value!r} is not a block hash")


def _event(raw: Any, block_size: int) -> tuple[EngineEvent | None, int]:
    """Return one event, or None if none of its blocks is indexed, and the number of its blocks that are not indexed."""
    if isinstance(raw, dict):
        tag, get = raw["type"], raw.get
    else:
        tag, *values = raw
        fields = dict(zip(_FIELDS.get(tag, _STORED_FIELDS), values, strict=False))
        get = fields.get
    match tag:
        case "BlockStored":
            return _stored(get, block_size)
        case "BlockRemoved":
            hashes = _hashes(get("block_hashes"))
            if get("group_idx"):
                return None, len(hashes)
            return BlocksRemoved(hashes, _tier(get("medium"))), 0
        case "AllBlocksCleared":
            return AllBlocksCleared(), 0
        case "CxlStateTransition":
            state, pool_id, workers = _placed(get("new_state"), get("pool_id"), get("accessible_workers"))
            event_id = int(get("event_id") or 0) & U64_MASK
            return CxlStateChanged(event_id, _hashes(get("block_hashes")), state, pool_id, workers), 0
        case _:
            raise BadRecord("bad_event", f"unknown event {tag!r}")


def _stored(get: Any, block_size: int) -> tuple[KvEvent | None, int]:
    hashes = _hashes(get("block_hashes"))
    if get("group_idx"):
        # Groups after the first are sliding windows or state-space layers, which a prefix does not describe.
        return None, len(hashes)
    if get("block_size") != block_size:
        raise BadRecord(
            "wrong_block_size",
            f"blocks have {get('block_size')} tokens; this scope has {block_size} for the model",
            block_size=get("block_size"),
        )
    tokens = get("token_ids")
    if not isinstance(tokens, list):  # bytes would be read as packed tokens, four bytes per token
        raise BadRecord("bad_event", f"token_ids is {type(tokens).__name__}, not a list")
    if len(tokens) != len(hashes) * block_size:
        raise BadRecord("bad_event", f"{len(tokens)} tokens for {len(hashes)} blocks of {block_size}")
    lora = get("lora_name")
    if not lora and get("lora_id") is not None:
        # Without a name, the id is hashed. If nothing were, the block would match requests for the base model.
        lora = str(get("lora_id"))
    local = local_hashes(tokens, block_size, hash_seed(lora))
    keep = _plain_prefix(get("extra_keys"), len(hashes), get("lora_name"))
    parent = get("parent_block_hash")
    if keep == 0:
        return None, len(hashes)
    stored = BlocksStored(
        parent=None if parent is None else engine_hash(parent),
        engine=hashes[:keep],
        local=local[:keep],
        tier=_tier(get("medium")),
        moe=_moe_labels(get("moe")),
        cxl=_cxl_metadata(get("cxl_metadata")),
    )
    return stored, len(hashes) - keep


def _moe_labels(raw: dict[str, Any] | None) -> MoeLabels | None:
    if raw is None:
        return None
    labels = MoeLabels(**{name: raw.get(name) for name in LABEL_NAMES})
    check_labels(labels)
    return labels


def _cxl_metadata(raw: dict[str, Any] | None) -> CxlMemoryMetadata | None:
    if raw is None:
        return None
    state, pool_id, workers = _placed(raw["state"], raw.get("pool_id"), raw.get("accessible_workers"))
    return CxlMemoryMetadata(state, pool_id, workers)


def _placed(state: Any, pool_id: Any, workers: Any) -> tuple[CxlMemoryState, str | None, tuple[WorkerId, ...]]:
    """Check the state, pool and workers that an engine names. Raises ValueError, TypeError, InvalidRequest."""
    if pool_id is not None:
        check_pool_id(pool_id)
    if len(workers or ()) > POOL_MEMBERS_MAX:
        raise ValueError(f"{len(workers)} accessible workers; the limit is {POOL_MEMBERS_MAX}")
    return CxlMemoryState(state), pool_id, tuple(WorkerId(int(worker) & U64_MASK) for worker in workers or ())


def _plain_prefix(extra_keys: Sequence[Any] | None, n_blocks: int, lora_name: str | None) -> int:
    """Count the leading blocks whose content is determined by their tokens, up to the first image or cache salt.

    From that block on, a hash of the tokens would match prompts with other content. vLLM also writes the adapter's name
    as the first key of every block; that name is already part of our hash.
    """
    for index, keys in enumerate((extra_keys or ())[:n_blocks]):
        if keys and not (lora_name and list(keys) == [lora_name]):
            return index
    return n_blocks


def _hashes(values: Any) -> HashArray:
    if not isinstance(values, list):  # each byte of a bytes value would be read as a hash
        raise TypeError(f"block_hashes is {type(values).__name__}, not a list")
    return np.array([engine_hash(value) for value in values], dtype=np.uint64)


def _tier(medium: str | None) -> Tier:
    return Tier.DEVICE if medium is None else _TIERS.get(medium.upper(), Tier.EXTERNAL)

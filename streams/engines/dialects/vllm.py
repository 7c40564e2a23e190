"""vLLM's KV events: msgpack payloads to events (pure).

What lives here: the dialect, as vLLM's ZmqEventPublisher writes it: `[ts, [events], dp_rank]`, each event an array that
starts with its tag or a map with `type`, the batch itself an array or a map. Engines with CXL memory add an event,
`CxlStateTransition`, and to stores that are maps the field `cxl_metadata`; those that label blocks with slices of a
mixture of experts add `moe` (docs/cxl.md). What must not: sockets (bridge) and copies (ledger).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from streams.core.events import (
    LABEL_NAMES,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CxlMetadata,
    KvEvent,
    MoeLabels,
    check_labels,
)
from streams.core.hashing import hash_seed, local_hashes
from streams.core.ids import U64_MASK, EngineHash, HashArray, Tier, WorkerId
from streams.cxl.events import POOL_MEMBERS_MAX, CxlStateChanged, check_pool_id
from streams.cxl.states import CxlMemoryState
from streams.errors import BadRecord, InvalidRequest

#: Bytes of one payload: a 1M-token prompt stored at once is 5 MB; ten times that is no event batch.
PAYLOAD_BYTES_MAX = 64 * 1024 * 1024

#: vLLM announces each physical copy of a block.
COUNTS_COPIES = True

#: What a record's rank and times have room for.
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

#: Fields by tag, in the order of an event that is an array.
_FIELDS = {"BlockRemoved": _REMOVED_FIELDS, "CxlStateTransition": _CXL_FIELDS}


@dataclass(frozen=True, slots=True)
class Payload:
    """One engine batch. n_unindexed: blocks that prefix matching cannot tell (other cache groups, multimodal keys)."""

    emitted_at_ms: int
    dp_rank: int
    events: tuple[KvEvent | CxlStateChanged, ...]
    n_unindexed: int


def decode_payload(raw: bytes, block_size: int) -> Payload:
    """Decode one payload; block_size in tokens is what the scope says for the model.

    Raises BadRecord with reason not_msgpack, bad_event or wrong_block_size.
    """
    if len(raw) > PAYLOAD_BYTES_MAX:
        raise BadRecord("too_large", f"a payload of {len(raw)} bytes; {PAYLOAD_BYTES_MAX} is the limit")
    try:
        outer = msgpack.unpackb(raw, strict_map_key=False)
    except Exception as exc:  # msgpack raises a family of its own and ValueError
        raise BadRecord("not_msgpack", f"the payload is no msgpack: {exc}") from exc
    try:
        if isinstance(outer, dict):  # newer vLLM writes the batch itself as a map too
            outer = [outer["ts"], outer["events"], outer.get("data_parallel_rank")]
        emitted_s, raw_events, *rest = outer
        emitted_at_ms = int(float(emitted_s) * 1000)
        dp_rank = int(rest[0]) if rest and rest[0] is not None else 0
        if not (0 <= dp_rank <= _I32_MAX and abs(emitted_at_ms) <= _I64_MAX):
            raise BadRecord("bad_event", f"a batch of rank {dp_rank} at {emitted_s} s has no room in a record")
        events: list[KvEvent | CxlStateChanged] = []
        n_unindexed = 0
        for raw_event in raw_events:
            event, skipped = _event(raw_event, block_size)
            n_unindexed += skipped
            if event is not None:
                events.append(event)
        return Payload(emitted_at_ms, dp_rank, tuple(events), n_unindexed)
    except BadRecord:
        raise
    except (InvalidRequest, TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as exc:
        raise BadRecord("bad_event", f"the payload is no event batch: {exc}") from exc


def engine_hash(value: Any) -> EngineHash:
    """An engine's block id as u64: signed integers bit-cast, of bytes the last 8, big-endian. Raises TypeError."""
    if isinstance(value, bytes):
        return EngineHash(int.from_bytes(value[-8:], "big"))
    if isinstance(value, int) and not isinstance(value, bool):
        return EngineHash(value & U64_MASK)
    raise TypeError(f"{value!r} is no block hash")


def _event(raw: Any, block_size: int) -> tuple[KvEvent | CxlStateChanged | None, int]:
    """One event and the number of its blocks that are not indexed."""
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
        # Groups behind the first are sliding windows or state-space layers: a prefix does not describe them.
        return None, len(hashes)
    if get("block_size") != block_size:
        raise BadRecord("wrong_block_size", f"blocks of {get('block_size')} tokens; this model has {block_size} here")
    tokens = get("token_ids")
    if not isinstance(tokens, list):  # bytes would be taken for packed tokens, of which there are fewer
        raise BadRecord("bad_event", f"token_ids is {type(tokens).__name__}, not a list")
    if len(tokens) != len(hashes) * block_size:
        raise BadRecord("bad_event", f"{len(tokens)} tokens for {len(hashes)} blocks of {block_size}")
    lora = get("lora_name")
    if not lora and get("lora_id") is not None:
        # Without a name the id must do: hashed as the base model, the block would match requests that it cannot serve.
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


def _cxl_metadata(raw: dict[str, Any] | None) -> CxlMetadata | None:
    if raw is None:
        return None
    state, pool_id, workers = _placed(raw["state"], raw.get("pool_id"), raw.get("accessible_workers"))
    return CxlMetadata(state.value, pool_id, workers)


def _placed(state: Any, pool_id: Any, workers: Any) -> tuple[CxlMemoryState, str | None, tuple[WorkerId, ...]]:
    """A state, pool and workers as an engine names them; raises ValueError, TypeError, InvalidRequest."""
    if pool_id is not None:
        check_pool_id(pool_id)
    if len(workers or ()) > POOL_MEMBERS_MAX:
        raise ValueError(f"{len(workers)} accessible workers; at most {POOL_MEMBERS_MAX}")
    return CxlMemoryState(state), pool_id, tuple(WorkerId(int(worker) & U64_MASK) for worker in workers or ())


def _plain_prefix(extra_keys: Sequence[Any] | None, n_blocks: int, lora_name: str | None) -> int:
    """Blocks before the first whose content is more than its tokens (images, cache salts): its hash here would lie.

    vLLM writes the adapter's name there too, on every block, first of its keys; that one is in our hash already.
    """
    for index, keys in enumerate((extra_keys or ())[:n_blocks]):
        if keys and not (lora_name and list(keys) == [lora_name]):
            return index
    return n_blocks


def _hashes(values: Any) -> HashArray:
    if not isinstance(values, list):  # of bytes, each would pass for a hash
        raise TypeError(f"block_hashes is {type(values).__name__}, not a list")
    return np.array([engine_hash(value) for value in values], dtype=np.uint64)


def _tier(medium: str | None) -> Tier:
    return Tier.DEVICE if medium is None else _TIERS.get(medium.upper(), Tier.EXTERNAL)

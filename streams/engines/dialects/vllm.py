"""The dialect of vLLM: msgpack payloads to events (pure).

What lives here: the format that vLLM's ZmqEventPublisher writes. A payload is `[ts, [events], dp_rank]` or a map with
these names. Each event is an array that starts with its tag, or a map with `type`. Engines with CXL memory add the
event `CxlStateTransition`, and add the field `cxl_metadata` to stores that are maps. Engines that label blocks with
slices of a mixture of experts add the field `moe` (docs/cxl.md). What must not: sockets (feed) and copies (ledger).

Each event is judged on its own (docs/architecture.md, Unusable events). No message and nothing that a dead letter may
show contains a value of an event, except values that are known not to be tokens or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import (
    LABEL_NAMES,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    MoeLabels,
    check_labels,
)
from streams.core.hashing import hash_seed, local_hashes
from streams.core.ids import U64_MASK, EngineHash, HashArray, Tier, WorkerId
from streams.cxl.events import POOL_MEMBERS_MAX, CxlStateChanged, check_change, check_pool_id
from streams.cxl.states import stored_as
from streams.engines.dialects.interface import DecodedBatch, Dialect, EngineEvent, UnusableEvent
from streams.errors import WRONG_BLOCK_SIZE, BadRecord, InvalidRequest

#: Bytes of one payload. A prompt of 1M tokens that is stored at once takes 5 MB; a payload more than ten times as large
#: is not an event batch.
PAYLOAD_BYTES_MAX = 64 * 1024 * 1024

#: Hashes of one event that a dead letter shows. A few dozen identify the prompt's blocks in the logs of the engine.
HASHES_SHOWN_MAX = 32

#: The greatest values of a record's rank and of its times, which are Avro's int and long.
_I32_MAX = (1 << 31) - 1
_I64_MAX = (1 << 63) - 1

#: Engine hashes of partial blocks that a decoder keeps. Blocks of a prompt follow each other closely.
PARTIAL_NAMES_MAX = 1024

_TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "DISK": Tier.DISK, "STORAGE": Tier.DISK}

#: Kinds of cache groups in which a prefix is held as far as its blocks are held one after the other. A sliding window
#: needs only the last blocks of a prefix, and Mamba only one of them.
_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_OTHER_KINDS = frozenset(
    {
        "sliding_window",
        "sliding_window_mla",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
        "unknown",
    }
)

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
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_CXL_FIELDS = ("event_id", "block_hashes", "new_state", "pool_id", "accessible_workers")

#: Fields by tag, in the order in which an event that is an array has them. Stores are the default.
_FIELDS = {"BlockRemoved": _REMOVED_FIELDS, "CxlStateTransition": _CXL_FIELDS}
_TAGS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared", "CxlStateTransition"})

_Get = Callable[[str], Any]

#: What reading a field of the wrong type raises, here or in what is called. Such messages may contain the field.
_FIELD_ERRORS = (InvalidRequest, TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError)


@dataclass(frozen=True, slots=True)
class VllmDecoder:
    """Decodes vLLM's payloads. block_size: tokens, as the scope has it for the model.

    partial: engine hashes of the last entries that were taken for the beginning of a block. If one of them turns out to
    be the parent of another block, it was a whole block, and the engine has another block size.
    """

    block_size: int
    partial: dict[int, None] = field(default_factory=dict)

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload; see decode_payload."""
        return decode_payload(payload, self.block_size, self.partial)


#: vLLM reports each physical copy of a block, so copies are counted.
VLLM = Dialect("vllm", counts_copies=True, decoder=VllmDecoder)


@dataclass(slots=True)
class _Batch:
    """What has been read of one payload so far; the fields are those of DecodedBatch."""

    events: list[EngineEvent]
    unusable: list[UnusableEvent]
    partial: dict[int, None]
    n_unindexed: int = 0
    is_incomplete: bool = False
    n_ignored: int = 0


def decode_payload(raw: bytes, block_size: int, partial: dict[int, None] | None = None) -> DecodedBatch:
    """Decode one payload; block_size in tokens is the one that the scope has for the model. partial: see VllmDecoder.

    Raises BadRecord with reason too_large, not_msgpack or bad_event if it cannot be divided into events. An event that
    cannot be used has reason bad_event or wrong_block_size.
    """
    if len(raw) > PAYLOAD_BYTES_MAX:
        raise BadRecord("too_large", f"the payload has {len(raw)} bytes; the limit is {PAYLOAD_BYTES_MAX}")
    try:
        outer = msgpack.unpackb(raw, strict_map_key=False)
    except Exception as exc:  # msgpack raises exceptions of its own as well as ValueError; some quote the payload
        raise BadRecord("not_msgpack", f"the payload is not msgpack ({type(exc).__name__})") from None
    emitted_at_ms, dp_rank, raw_events = _opened(outer)
    batch = _Batch([], [], {} if partial is None else partial)
    for index, raw_event in enumerate(raw_events):
        try:
            _read(batch, index, raw_event, block_size)
        except BadRecord as exc:
            _lose(batch, index, raw_event, exc)
        except _FIELD_ERRORS as exc:
            error = BadRecord("bad_event", f"a field of the event has an impossible value ({type(exc).__name__})")
            _lose(batch, index, raw_event, error)
    return DecodedBatch(
        emitted_at_ms,
        dp_rank,
        tuple(batch.events),
        batch.n_unindexed,
        tuple(batch.unusable),
        batch.is_incomplete,
        batch.n_ignored,
    )


def _opened(outer: Any) -> tuple[int, int, list[Any]]:
    """Return a payload's time in ms, its rank and its events; raises BadRecord."""
    try:
        if isinstance(outer, dict):  # newer versions of vLLM write the batch itself as a map, too
            outer = [outer["ts"], outer["events"], outer.get("data_parallel_rank")]
        emitted_s, raw_events, *rest = outer
        emitted_at_ms = int(float(emitted_s) * 1000)
        dp_rank = int(rest[0]) if rest and rest[0] is not None else 0
    except _FIELD_ERRORS as exc:
        raise BadRecord("bad_event", f"the payload is not an event batch ({type(exc).__name__})") from None
    if not (0 <= dp_rank <= _I32_MAX and abs(emitted_at_ms) <= _I64_MAX):
        raise BadRecord("bad_event", "the rank or the time of the payload does not fit into a record")
    if not isinstance(raw_events, list):
        raise BadRecord("bad_event", f"the payload's events are a {type(raw_events).__name__}, not a list")
    return emitted_at_ms, dp_rank, raw_events


def engine_hash(value: Any) -> EngineHash:
    """Return an engine's block id as u64: an integer's low 64 bits, or the last 8 bytes, big-endian.

    A negative integer becomes its two's complement. Raises TypeError.
    """
    if isinstance(value, bytes):
        return EngineHash(int.from_bytes(value[-8:], "big"))
    if isinstance(value, int) and not isinstance(value, bool):
        return EngineHash(value & U64_MASK)
    raise TypeError(f"a {type(value).__name__} is not a block hash")


def _fields(raw: Any) -> tuple[Any, _Get]:
    """Return an event's tag, and its fields by name."""
    if isinstance(raw, dict):
        return raw["type"], raw.get
    tag, *values = raw
    return tag, dict(zip(_FIELDS.get(tag, _STORED_FIELDS), values, strict=False)).get


def _read(batch: _Batch, index: int, raw: Any, block_size: int) -> None:
    """Read one event into the batch. Raises BadRecord or one of _FIELD_ERRORS, and then has changed nothing."""
    tag, get = _fields(raw)
    match tag:
        case "BlockStored":
            _store(batch, get, block_size)
        case "BlockRemoved":
            _remove(batch, index, raw, get)
        case "AllBlocksCleared":
            batch.events.append(AllBlocksCleared())
            batch.is_incomplete = False  # an empty cache is known, whatever was lost before
        case "CxlStateTransition":
            batch.events.append(_transition(get))
        case _:
            raise BadRecord("bad_event", "the event is of an unknown type")


def _lose(batch: _Batch, index: int, raw: Any, error: BadRecord) -> None:
    batch.unusable.append(UnusableEvent(index, error, shown=_shown(raw)))
    batch.is_incomplete = True


def _store(batch: _Batch, get: _Get, block_size: int) -> None:
    hashes = _hashes(get("block_hashes"))
    if not len(hashes):
        batch.n_ignored += bool(get("token_ids"))  # all blocks of the event are null or masked in the engine
        return
    if _group(get):
        # Groups after the first are sliding windows or state-space layers, which a prefix does not describe.
        batch.n_unindexed += len(hashes)
        return
    tokens, size, tier, kind = get("token_ids"), get("block_size"), _tier(get("medium")), get("kv_cache_spec_kind")
    if not isinstance(tokens, list):  # bytes would be read as packed tokens, four bytes per token
        raise BadRecord("bad_event", f"token_ids is a {type(tokens).__name__}, not a list")
    is_other_kind = isinstance(kind, str) and kind not in _PREFIX_KINDS
    if not tokens and tier is not Tier.DEVICE:
        # Offloading connectors report blocks of lower tiers by their hash alone.
        batch.n_unindexed += len(hashes)
        return
    if size != block_size:
        if is_other_kind:
            batch.n_unindexed += len(hashes)
            return
        if type(size) is int and 0 < size == len(tokens) < block_size and len(hashes) == 1:
            parent = get("parent_block_hash")
            if parent is None or engine_hash(parent) not in batch.partial:
                # An entry for the beginning of a block, which makes no block of a prefix. The engine reports the whole
                # block once it is full.
                batch.n_ignored += 1
                batch.partial[int(hashes[0])] = None
                if len(batch.partial) > PARTIAL_NAMES_MAX:
                    del batch.partial[next(iter(batch.partial))]
                return
        raise _wrong_block_size(size, block_size)
    if len(tokens) > len(hashes) * block_size and len(tokens) % block_size == 0:
        # Some blocks are null or masked in the engine (sliding windows, Mamba), and the event does not say which.
        batch.n_unindexed += len(hashes)
        return
    if len(tokens) != len(hashes) * block_size:
        raise BadRecord("bad_event", f"{len(tokens)} tokens for {len(hashes)} blocks of {block_size}")
    lora = get("lora_name")
    if not lora and get("lora_id") is not None:
        # Without a name, the id is hashed. If nothing were, the block would match requests for the base model.
        lora = str(get("lora_id"))
    try:
        local = local_hashes(tokens, block_size, hash_seed(lora))
    except InvalidRequest:  # its message quotes the value
        raise BadRecord("bad_event", "token_ids or lora_name has an impossible value") from None
    keep = _plain_prefix(get("extra_keys"), len(hashes), get("lora_name"))
    parent = get("parent_block_hash")
    if keep:
        stored = BlocksStored(
            parent=None if parent is None else engine_hash(parent),
            engine=hashes[:keep],
            local=local[:keep],
            tier=tier,
            moe=_moe_labels(get("moe")),
            cxl=_cxl_metadata(get("cxl_metadata")),
        )
        batch.events.append(stored)
    # With EAGLE, the engine hashes each block together with the tokens after it. A prompt that continues differently
    # does not match the last block, which the index cannot know. Nor can it know when a window's blocks are enough.
    is_inexact = is_other_kind or get("lookahead_token_ids") is not None
    batch.n_unindexed += len(hashes) if is_inexact else len(hashes) - keep


def _wrong_block_size(size: Any, block_size: int) -> BadRecord:
    shown = _shown_size(size)
    found = "another number of" if shown is None else shown
    message = f"blocks have {found} tokens; this scope has {block_size} for the model"
    return BadRecord(WRONG_BLOCK_SIZE, message, block_size=shown)


def _remove(batch: _Batch, index: int, raw: Any, get: _Get) -> None:
    """Read a removal. If it cannot be used as it is, remove the blocks that it names."""
    try:
        hashes, group, tier = _hashes(get("block_hashes")), _group(get), _tier(get("medium"))
    except (BadRecord, TypeError):
        _remove_named(batch, index, raw, get)
        return
    if group:
        batch.n_unindexed += len(hashes)
    else:
        batch.events.append(BlocksRemoved(hashes, tier))


def _remove_named(batch: _Batch, index: int, raw: Any, get: _Get) -> None:
    """Remove the blocks that an unusable removal names, from every tier if its tier or group cannot be read."""
    values = get("block_hashes")
    if not isinstance(values, list):  # each byte of a bytes value would be read as a hash
        raise BadRecord("bad_event", f"block_hashes is a {type(values).__name__}, not a list")
    names = [engine_hash(value) for value in values if _is_hash(value)]
    hashes = np.array(names, dtype=np.uint64)
    error = BadRecord("bad_event", f"{len(values) - len(names)} of {len(values)} block_hashes are not block hashes")
    try:
        group, tier = _group(get), _tier(get("medium"))
    except BadRecord as exc:
        error, group, tiers = exc, 0, tuple(Tier)
        batch.n_unindexed += len(names)  # copies in other tiers may still be held
    else:
        tiers = (tier,)
    if group:
        batch.n_unindexed += len(values)
        return
    if names:
        batch.events += [BlocksRemoved(hashes, tier) for tier in tiers]
    is_lost = len(names) < len(values)
    batch.unusable.append(UnusableEvent(index, error, is_lost, hashes, _shown(raw)))
    batch.is_incomplete |= is_lost


def _transition(get: _Get) -> CxlStateChanged:
    state, pool_id, workers = _placed(get("new_state"), get("pool_id"), get("accessible_workers"))
    event_id = int(get("event_id") or 0) & U64_MASK
    changed = CxlStateChanged(event_id, _hashes(get("block_hashes")), state, pool_id, workers)
    check_change(changed)
    return changed


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
    for each in stored_as(state):
        check_change(CxlStateChanged(0, np.empty(0, dtype=np.uint64), each, pool_id, workers))
    return CxlMemoryMetadata(state, pool_id, workers)


def _placed(state: Any, pool_id: Any, workers: Any) -> tuple[CxlMemoryState, str | None, tuple[WorkerId, ...]]:
    """Check the state, pool and workers that an engine names. Raises ValueError, TypeError, InvalidRequest."""
    if pool_id is not None:
        check_pool_id(pool_id)
    if len(workers or ()) > POOL_MEMBERS_MAX:
        raise BadRecord("bad_event", f"{len(workers)} accessible workers; the limit is {POOL_MEMBERS_MAX}")
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
        raise BadRecord("bad_event", f"block_hashes is a {type(values).__name__}, not a list")
    return np.array([engine_hash(value) for value in values], dtype=np.uint64)


def _is_hash(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, int) and not isinstance(value, bool))


def _group(get: _Get) -> int:
    group = get("group_idx")
    if group is None:
        return 0
    if type(group) is not int:
        raise BadRecord("bad_event", f"group_idx is a {type(group).__name__}, not a number")
    return group


def _tier(medium: Any) -> Tier:
    if medium is None:
        return Tier.DEVICE
    if not isinstance(medium, str):
        raise BadRecord("bad_event", f"medium is a {type(medium).__name__}, not a name")
    return _TIERS.get(medium.upper(), Tier.EXTERNAL)


# -- what a dead letter may show ---------------------------------------------------------------------------------------


def _shown(raw: Any) -> dict[str, object]:
    """Return what is known not to be tokens or text of a prompt: lengths, hashes, and values out of short lists.

    Fields that this dialect does not know are left out. So are extra keys, which contain hashes of images and cache
    salts; names of adapters; and the values of fields that have another type than vLLM gives them.
    """
    try:
        tag, get = _fields(raw)
    except _FIELD_ERRORS:
        return {"kind": type(raw).__name__}
    shown: dict[str, object] = {"type": tag if isinstance(tag, str) and tag in _TAGS else "unknown"}
    if shown["type"] == "unknown":
        return shown
    for name in ("block_hashes", "token_ids", "extra_keys", "accessible_workers", "lookahead_token_ids"):
        value = get(name)
        if value is not None:
            shown[f"n_{name}"] = len(value) if isinstance(value, list) else type(value).__name__
    hashes = get("block_hashes")
    if isinstance(hashes, list):
        shown["block_hashes"] = [_shown_hash(value) for value in hashes[:HASHES_SHOWN_MAX]]
    if get("parent_block_hash") is not None:
        shown["parent_block_hash"] = _shown_hash(get("parent_block_hash"))
    medium, group, kind, size = (get(name) for name in ("medium", "group_idx", "kv_cache_spec_kind", "block_size"))
    if isinstance(medium, str) and medium.upper() in _TIERS:
        shown["medium"] = medium
    if type(group) is int and 0 <= group < 64:
        shown["group_idx"] = group
    if isinstance(kind, str) and kind in _PREFIX_KINDS | _OTHER_KINDS:
        shown["kv_cache_spec_kind"] = kind
    if _shown_size(size) is not None:
        shown["block_size"] = size
    return shown


def _shown_hash(value: Any) -> str | None:
    """Return a block hash as text; None for what may be a token, since tokens have at most 32 bits."""
    if isinstance(value, bytes) and len(value) == 32:
        return str(engine_hash(value))
    if type(value) is int and not 0 <= value < 1 << 32:
        return str(engine_hash(value))
    return None


def _shown_size(size: Any) -> int | None:
    """Return a block size; None for what may be a token instead. Blocks have a power of two or a multiple of 16."""
    plausible = type(size) is int and 0 <= size <= 65_536 and (size % 16 == 0 or size & (size - 1) == 0)
    return size if plausible else None

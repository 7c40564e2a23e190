"""The dialect of vLLM: msgpack payloads to events (pure).

What lives here: the format that vLLM's ZmqEventPublisher writes. What must not: sockets (feed) and copies (ledger).

A payload is `[ts, [events], dp_rank]` or a map with these names. An event is an array that starts with its tag, or a
map with `type`. Fields at the end of an array may be absent, later ones are ignored. BlockStored, by position:

| # | field | sent by | what is done with it |
|---|---|---|---|
| 1 | block_hashes | all | the engine's names of the blocks: u64, or bytes whose last 8 count |
| 2 | parent_block_hash | all | the name of the block before the first one; None at the root |
| 3 | token_ids | all | hashed; empty for blocks of an offloading connector that names them only |
| 4 | block_size | all | must be the scope's for the model |
| 5 | lora_id | all | part of the seed, if there is no lora_name |
| 6 | medium | 0.10.2 on | the tier |
| 7 | lora_name | 0.16.0 on | part of the seed |
| 8 | extra_keys | 0.19.0 on | cache salt and images of each block; both are part of the blocks' hashes |
| 9 | group_idx | 0.22.0 on | one group with full attention is indexed, as far as a hit can use it with the others |
| 10 | kv_cache_spec_kind | 0.22.0 on | says which groups have full attention; removals do not have it |
| 11 | kv_cache_spec_sliding_window | 0.22.0 on | how much of the group a hit needs |
| - | locality | 0.26.0 on | blocks that are not local are not indexed |
| - | ownership, session_id | 0.30.0 on | ignored |
| - | lookahead_token_ids | 0.33.0 on | makes the rank approximate: the last block of a match is uncertain |
| - | cxl_metadata, moe | this project's engines | docs/cxl.md |

Connectors to other caches (LMCache, Mooncake, Ascend) report their stores through vLLM, and never their evictions, or
not all of them. Such stores are not indexed (`_is_never_removed`).

BlockRemoved: block_hashes, medium, group_idx; then locality and ownership. AllBlocksCleared has no fields; it is the
clear of the device tier, and lower tiers may keep their blocks. TierBlocksCleared: medium. Engines with CXL memory add
the event CxlStateTransition. Up to 0.22.0 events are arrays, from 0.26.0 on maps. The versions are the
first with the field among those of tests/golden_events.json.

Each event is judged on its own (docs/bridges.md, Unusable events). No message and nothing that a dead letter may
show contains a value of an event, except values that are known not to be tokens or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgpack
import numpy as np

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState, pool_name
from streams.core.events import (
    LABEL_NAMES,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    MoeLabels,
    check_labels,
)
from streams.core.ids import U64_MASK, HashArray, Tier, WorkerId
from streams.cxl.events import POOL_MEMBERS_MAX, CxlStateChanged, check_change, check_pool_id
from streams.cxl.states import stored_as
from streams.engines.dialects.extra_keys import block_contents, shows_bare_item
from streams.engines.dialects.fields import (
    FIELD_ERRORS,
    HASHES_SHOWN_MAX,
    PAYLOAD_BYTES_MAX,
    TIERS,
    BatchBuilder,
    Get,
    adapter_of,
    check_envelope,
    check_length,
    distinct_prefix,
    engine_hash,
    engine_hashes,
    group_of,
    hash_blocks,
    is_elsewhere,
    is_hash,
    shown_hash,
    shown_size,
    tier_of,
    wrong_block_size,
)
from streams.engines.dialects.interface import (
    BlocksCopied,
    BlocksLeftOut,
    BlocksOffloaded,
    DecodedBatch,
    DeviceCleared,
    Dialect,
    GroupChanged,
    TierCleared,
    UnusableEvent,
)
from streams.errors import BadRecord

__all__ = ["PARTIAL_NAMES_MAX", "PAYLOAD_BYTES_MAX", "VLLM", "VllmDecoder", "decode_payload", "engine_hash"]

#: Engine hashes of partial blocks that a decoder keeps. Blocks of a prompt follow each other closely.
PARTIAL_NAMES_MAX = 1024

#: Blocks with a salt, an image or an adapter whose local hash a decoder keeps, about 150 bytes each.
SPECIAL_NAMES_MAX = 65_536

#: What a group with full attention needs of a prefix: more blocks than any has.
ALL_BLOCKS = 1 << 40

#: Cache groups whose kind a decoder keeps. Hybrid models have a few.
GROUPS_MAX = 256

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
#: Where a store that is an array has the kind of its cache group, after the tag.
_KIND_AT = 1 + _STORED_FIELDS.index("kv_cache_spec_kind")
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_CXL_FIELDS = ("event_id", "block_hashes", "new_state", "pool_id", "accessible_workers")

#: Fields by tag, in the order in which an event that is an array has them. Stores are the default.
_FIELDS = {"BlockRemoved": _REMOVED_FIELDS, "TierBlocksCleared": ("medium",), "CxlStateTransition": _CXL_FIELDS}
_TAGS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared", "TierBlocksCleared", "CxlStateTransition"})


@dataclass(slots=True)
class _State:
    """What a decoder keeps between payloads.

    partial: engine hashes of the last entries that were taken for the beginning of a block, with the tokens from the
    first of the entries that follow each other to the end of this one. Entries that follow each other for as many
    tokens as a block has show that the engine has another block size: it would have reported the whole block.
    has_whole: whether the engine has reported a whole block since its last clear, so that its block size is known.
    has_bare_items: whether it reports images without their places (extra_keys).
    kinds: the kind of each cache group that a store has named, None if the store did not say it.
    needed: for each other group, how many blocks before its end a hit needs of it. main: the group that
    is indexed: the first with full attention. None until a store shows which one it is; group 0 is indexed until then.
    is_provisional: whether a block of group 0 was indexed although that group has not full attention.
    special: local hashes of the last blocks with a salt, an image or an adapter, by engine hash; None for unknown
    content. Offloading connectors report such blocks again, in a lower tier, without their extra keys. has_all_special:
    whether none of them was dropped because of the limit.
    has_never_removed: whether a connector reported a store whose eviction is never reported.
    """

    partial: dict[int, int] = field(default_factory=dict)
    has_whole: bool = False
    has_bare_items: bool = False
    kinds: dict[int, str | None] = field(default_factory=dict)
    needed: dict[int, int] = field(default_factory=dict)
    main: int | None = None
    is_provisional: bool = False
    special: dict[int, int | None] = field(default_factory=dict)
    has_all_special: bool = True
    has_never_removed: bool = False

    def forget_shown(self) -> None:
        """Forget what events have shown of the engine, after a clear: one of them may have been damaged."""
        self.has_whole = self.has_bare_items = False
        self.kinds.clear()
        self.needed.clear()
        self.main, self.is_provisional = None, False


@dataclass(frozen=True, slots=True)
class VllmDecoder:
    """Decodes vLLM's payloads. block_size: tokens, as the scope has it for the model."""

    block_size: int
    state: _State = field(default_factory=_State)

    @property
    def partial(self) -> dict[int, int]:
        """See _State."""
        return self.state.partial

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload; see decode_payload."""
        return decode_payload(payload, self.block_size, self.state)

    def decode_opened(self, outer: Any) -> DecodedBatch:
        """Decode a payload that has been unpacked."""
        return _decode_opened(outer, self.block_size, self.state)


#: vLLM reports each physical copy of a block, so copies are counted.
VLLM = Dialect("vllm", counts_copies=True, computed_tokens_min=1, decoder=VllmDecoder)


def decode_payload(raw: bytes, block_size: int, state: _State | None = None) -> DecodedBatch:
    """Decode one payload; block_size in tokens is the one that the scope has for the model.

    Raises BadRecord with reason too_large, not_msgpack or bad_event if it cannot be divided into events. An event that
    cannot be used has reason bad_event or wrong_block_size.
    """
    return _decode_opened(unpacked(raw), block_size, _State() if state is None else state)


def unpacked(raw: bytes) -> Any:
    """Unpack a payload; raises BadRecord."""
    check_length(raw)
    try:
        return msgpack.unpackb(raw, strict_map_key=False)
    except Exception as exc:  # msgpack raises exceptions of its own as well as ValueError; some quote the payload
        raise BadRecord("not_msgpack", f"the payload is not msgpack ({type(exc).__name__})") from None


def _decode_opened(outer: Any, block_size: int, state: _State) -> DecodedBatch:
    emitted_at_ms, dp_rank, raw_events = opened(outer)
    batch = BatchBuilder()
    if state.main is None:
        _find_main_group(batch, state, raw_events)
    for index, raw_event in enumerate(raw_events):
        n_before = len(batch.events)
        try:
            _read(batch, state, index, raw_event, block_size)
            if len(batch.events) > n_before and isinstance(batch.events[-1], AllBlocksCleared):
                state.forget_shown()
                _find_main_group(batch, state, raw_events[index + 1 :])
                if state.has_never_removed:
                    batch.leave_out("connector", 1)  # vLLM clears its own cache, and the connector may keep its blocks
        except BadRecord as exc:
            batch.lose(index, exc, _shown(raw_event))
        except FIELD_ERRORS as exc:
            error = BadRecord("bad_event", f"a field of the event has an impossible value ({type(exc).__name__})")
            batch.lose(index, error, _shown(raw_event))
    return batch.built(emitted_at_ms, dp_rank)


def opened(outer: Any) -> tuple[int, int | None, list[Any]]:
    """Return a payload's time in ms, its rank and its events; raises BadRecord."""
    try:
        if isinstance(outer, dict):  # newer versions of vLLM write the batch itself as a map, too
            outer = [outer["ts"], outer["events"], outer.get("data_parallel_rank")]
        emitted_s, raw_events, *rest = outer
        emitted_at_ms = int(float(emitted_s) * 1000)
        dp_rank = int(rest[0]) if rest and rest[0] is not None else None
    except FIELD_ERRORS as exc:
        raise BadRecord("bad_event", f"the payload is not an event batch ({type(exc).__name__})") from None
    check_envelope(dp_rank, emitted_at_ms)
    if not isinstance(raw_events, list):
        raise BadRecord("bad_event", f"the payload's events are a {type(raw_events).__name__}, not a list")
    return emitted_at_ms, dp_rank, raw_events


def _fields(raw: Any) -> tuple[Any, Get]:
    """Return an event's tag, and its fields by name."""
    if isinstance(raw, dict):
        return raw["type"], raw.get
    tag, *values = raw
    return tag, dict(zip(_FIELDS.get(tag, _STORED_FIELDS), values, strict=False)).get


def _read(batch: BatchBuilder, state: _State, index: int, raw: Any, block_size: int) -> None:
    """Read one event into the batch. Raises BadRecord or one of FIELD_ERRORS, and then has changed nothing."""
    tag, get = _fields(raw)
    match tag:
        case "BlockStored":
            _store(batch, state, get, block_size)
        case "BlockRemoved":
            _remove(batch, state, index, raw, get)
        case "AllBlocksCleared":
            batch.events.append(DeviceCleared())
            batch.is_incomplete = False  # an empty cache is known, whatever was lost before
        case "TierBlocksCleared":
            batch.events.append(TierCleared(tier_of(get("medium"))))
        case "CxlStateTransition":
            batch.events.append(_transition(get))
        case _:
            raise BadRecord("bad_event", "the event is of an unknown type")


def _find_main_group(batch: BatchBuilder, state: _State, raw_events: list[Any]) -> None:
    """Find the first group with full attention; groups with sliding windows or state spaces hold less than a prefix.

    If blocks of another group were indexed until now, they are cleared: groups share the names of blocks.
    """
    for raw in raw_events:
        if type(raw) is list and len(raw) <= _KIND_AT:
            continue  # it ends before the kind, as all events of older versions do
        try:
            tag, get = _fields(raw)
            if tag == "BlockStored" and get("kv_cache_spec_kind") in _PREFIX_KINDS and not is_elsewhere(get):
                state.main = group_of(get)
                break
        except (BadRecord, *FIELD_ERRORS):
            continue  # it becomes an unusable event
    if state.main is not None and state.is_provisional:
        batch.events.append(AllBlocksCleared())
        batch.leave_out("cache_group", 1)  # what the other group holds is not known
        state.is_provisional = False


def _blocks_needed(kind: Any, window: Any, block_size: int) -> int | None:
    """Return how many blocks a group must hold before the end of a hit; None if the event does not say it."""
    if not isinstance(kind, str):
        return None
    if kind in _PREFIX_KINDS:
        return ALL_BLOCKS
    if kind == "mamba":
        return 1
    if kind in ("sliding_window", "sliding_window_mla") and type(window) is int and 0 < window < ALL_BLOCKS:
        return -(-(window - 1) // block_size)  # the next token sees window - 1 tokens before it
    return None


def _store(batch: BatchBuilder, state: _State, get: Get, block_size: int) -> None:
    values = get("block_hashes")
    hashes = engine_hashes(values)
    if not len(hashes):
        tokens = get("token_ids")
        if isinstance(tokens, np.ndarray) or tokens:
            batch.ignore("masked", 0)  # all blocks of the event are null or masked in the engine
        return
    if is_elsewhere(get):
        batch.ignore("locality", len(hashes))
        batch.events.append(BlocksLeftOut(hashes, "locality"))
        return
    if _is_never_removed(get, block_size):
        # Its block size is the connector's, so it shows nothing about the engine's.
        batch.leave_out("connector", len(hashes))
        state.has_never_removed = True
        return
    group, kind = group_of(get), get("kv_cache_spec_kind")
    if group not in state.kinds and len(state.kinds) < GROUPS_MAX:
        state.kinds[group] = kind if isinstance(kind, str) else None
    if group != (state.main or 0):
        needed = _blocks_needed(kind, get("kv_cache_spec_sliding_window"), block_size)
        if needed is None or get("block_size") != block_size:
            batch.leave_out("cache_group", len(hashes))
            return
        state.needed[group] = needed
        at_root = get("parent_block_hash") is None
        batch.events.append(GroupChanged(group, needed, hashes, is_stored=True, at_root=at_root))
        return
    tokens, size, tier = get("token_ids"), get("block_size"), tier_of(get("medium"))
    if not isinstance(tokens, list):  # bytes would be read as packed tokens, four bytes per token
        raise BadRecord("bad_event", f"token_ids is a {type(tokens).__name__}, not a list")
    if not len(tokens) and tier is not Tier.DEVICE:
        # Offloading connectors report a chunk of blocks in a lower tier by the hash of its last block alone. The ledger
        # knows that block if another tier holds it; how many more the chunk has is not known.
        batch.events.append(BlocksCopied(hashes, tier))
        batch.leave_out("placeholder", len(hashes))
        return
    is_other_kind = isinstance(kind, str) and kind not in _PREFIX_KINDS
    if size != block_size:
        if is_other_kind:
            batch.leave_out("cache_group", len(hashes))
            return
        if _is_beginning(state, get, hashes, tokens, size, block_size):
            # Entries within a block, which make no block of a prefix. The engine reports the whole block once it is
            # full.
            batch.ignore("tail", len(hashes))
            batch.events.append(BlocksLeftOut(hashes, "tail", tier))
            return
        raise wrong_block_size(size, block_size)
    if len(tokens) > len(hashes) * block_size and len(tokens) % block_size == 0:
        # Some blocks are null or masked in the engine (sliding windows, Mamba), and the event does not say which.
        batch.leave_out("masked", len(hashes))
        batch.events.append(BlocksLeftOut(hashes, "masked", tier))
        return
    if len(tokens) != len(hashes) * block_size:
        raise BadRecord("bad_event", f"{len(tokens)} tokens for {len(hashes)} blocks of {block_size}")
    if tier is Tier.DEVICE:
        state.has_whole = True
    for name in hashes.tolist() if state.partial else ():
        state.partial.pop(name, None)
    n_stored = _store_blocks(batch, state, get, values, hashes, tokens, tier, block_size)
    if is_other_kind:
        # The index does not know which blocks of a window are enough for a hit.
        batch.leave_out("cache_group", n_stored)
        state.is_provisional = True


def _is_never_removed(get: Get, block_size: int) -> bool:
    """Whether a store is by a connector that never reports evictions, nor the adapters and salts of its blocks.

    The connectors of LMCache, Mooncake and Ascend write the medium `cpu`. Newer versions of LMCache write `CPU`, as
    vLLM's own offloading connector does. Its chunks then differ from that connector's stores if they have another size,
    and tokens, but no cache group.
    """
    medium = get("medium")
    if medium == "cpu":
        return True
    tokens = get("token_ids")
    is_chunk = (
        get("group_idx") is None and isinstance(tokens, list) and len(tokens) > 0 and get("block_size") != block_size
    )
    return medium == "CPU" and is_chunk


def _store_blocks(
    batch: BatchBuilder,
    state: _State,
    get: Get,
    values: list[Any],
    hashes: HashArray,
    tokens: list[Any],
    tier: Tier,
    block_size: int,
) -> int:
    """Store as many of the blocks as have a known content and a name of their own; return how many."""
    parent, lora, extra_keys = get("parent_block_hash"), adapter_of(get), get("extra_keys")
    keep, reason = distinct_prefix(values, hashes, parent)
    salt: str | None = None
    if extra_keys and (type(extra_keys) is not list or any(extra_keys)):
        at_root, lora_name = parent is None, get("lora_name")
        state.has_bare_items |= shows_bare_item(extra_keys, lora_name, at_root=at_root)
        contents = block_contents(
            tokens,
            block_size,
            extra_keys,
            lora_name,
            at_root=at_root,
            has_bare_items=state.has_bare_items,
        )
        tokens, salt = contents.tokens, contents.cache_salt
        if contents.n_known < keep:
            keep, reason = contents.n_known, contents.unknown
    local = hash_blocks(tokens, block_size, lora, salt, at_root=parent is None)
    names = hashes.tolist()
    known: frozenset[int] | None = None
    if extra_keys:
        n_noted = len(names) if reason in ("content_unknown", "key_unknown") else keep
        _note_special(state, names[:n_noted], local[:keep].tolist(), extra_keys)
    elif tier is not Tier.DEVICE:
        known = frozenset(state.special.keys() & names)
        n_known = _take_special(state, names[:keep], local, known)
        if n_known < keep:
            keep, reason = n_known, "content_unknown"
    if keep:
        stored = BlocksStored(
            parent=None if parent is None else engine_hash(parent),
            engine=hashes[:keep],
            local=local[:keep],
            tier=tier,
            moe=_moe_labels(get("moe")),
            cxl=_cxl_metadata(get("cxl_metadata")),
        )
        batch.events.append(stored if known is None else _offloaded(stored, known, state))
    if reason == "content_unknown":
        batch.count(reason, len(hashes) - keep)  # no request can name the content either, so no answer lacks anything
    else:
        batch.leave_out(reason, len(hashes) - keep)
    if keep < len(hashes):
        batch.events.append(BlocksLeftOut(hashes[keep:], reason, tier))
    if tier is not Tier.DEVICE and len(hashes) > 1:
        # Offloading connectors report a chunk of blocks with one store, and load all of them or none. So a prompt that
        # ends within the chunk finds none of its blocks.
        batch.leave_out("chunk", min(keep, len(hashes) - 1))
    if get("lookahead_token_ids") is not None:
        # With EAGLE, the engine hashes each block together with the tokens after it. A prompt that continues
        # differently does not match the last block, which the index cannot know.
        batch.leave_out("lookahead", keep)
    return keep


def _take_special(state: _State, names: list[int], local: HashArray, known: frozenset[int]) -> int:
    """Replace the hashes of the blocks in `known` by those that were kept; return how many blocks have a known content.

    They are the ones before the first block of unknown content.
    """
    for index, name in enumerate(names):
        if name in known:
            own = state.special[name]
            if own is None:
                return index
            local[index] = own
    return len(names)


def _offloaded(stored: BlocksStored, known: frozenset[int], state: _State) -> BlocksOffloaded:
    parent, engine, local, tier = stored.parent, stored.engine, stored.local, stored.tier
    return BlocksOffloaded(parent, engine, local, tier, stored.moe, stored.cxl, known, state.has_all_special)


def _note_special(state: _State, names: list[int], local: list[int], extra_keys: Sequence[Any]) -> None:
    """Keep the hashes of the blocks that have extra keys. Blocks after the last hash are of unknown content."""
    for name, own, keys in zip_longest(names, local, extra_keys[: len(names)]):
        if keys or own is None:
            state.special.pop(name, None)
            state.special[name] = own
    while len(state.special) > SPECIAL_NAMES_MAX:
        del state.special[next(iter(state.special))]
        state.has_all_special = False


def _is_beginning(state: _State, get: Get, hashes: HashArray, tokens: list[Any], size: Any, block_size: int) -> bool:
    """Whether a store has boundaries within a block; their names are kept then."""
    if not (type(size) is int and size > 0 and len(hashes) * size == len(tokens) < block_size):
        return False
    parent = get("parent_block_hash")
    end = 0 if parent is None else state.partial.get(int(engine_hash(parent)), 0)
    if end + len(tokens) >= block_size and not state.has_whole:
        return False
    for name in hashes.tolist():
        end += size
        state.partial.pop(name, None)
        state.partial[name] = end
    while len(state.partial) > PARTIAL_NAMES_MAX:
        del state.partial[next(iter(state.partial))]
    return True


def _remove(batch: BatchBuilder, state: _State, index: int, raw: Any, get: Get) -> None:
    """Read a removal. If it cannot be used as it is, remove the blocks that it names."""
    if is_elsewhere(get):
        batch.ignore("locality", len(engine_hashes(get("block_hashes"))))
        return
    try:
        hashes, group, tier = engine_hashes(get("block_hashes")), group_of(get), tier_of(get("medium"))
    except (BadRecord, TypeError):
        _remove_named(batch, state, index, raw, get)
        return
    if group == (state.main or 0):
        batch.events.append(BlocksRemoved(hashes, tier))
        return
    if group in state.needed:
        batch.events.append(GroupChanged(group, state.needed[group], hashes, is_stored=False))
        return
    batch.leave_out("cache_group", len(hashes))
    if group not in state.kinds:
        # No store has shown this group's kind yet, so it may be the one that is indexed. Groups share the names of
        # blocks, so this can only report too few blocks.
        batch.events.append(BlocksRemoved(hashes, tier))


def _remove_named(batch: BatchBuilder, state: _State, index: int, raw: Any, get: Get) -> None:
    """Remove the blocks that an unusable removal names, from every tier if its tier or group cannot be read."""
    values = get("block_hashes")
    if not isinstance(values, list):  # each byte of a bytes value would be read as a hash
        raise BadRecord("bad_event", f"block_hashes is a {type(values).__name__}, not a list")
    names = [engine_hash(value) for value in values if is_hash(value)]
    hashes = np.array(names, dtype=np.uint64)
    error = BadRecord("bad_event", f"{len(values) - len(names)} of {len(values)} block_hashes are not block hashes")
    try:
        group, tier = group_of(get), tier_of(get("medium"))
    except BadRecord as exc:
        error, group, tiers = exc, state.main or 0, tuple(Tier)
        batch.n_unindexed += len(names)  # copies in other tiers may still be held
    else:
        tiers = (tier,)
    if group != (state.main or 0):
        batch.leave_out("cache_group", len(values))
        if names and group in state.needed:
            batch.events.append(GroupChanged(group, state.needed[group], hashes, is_stored=False))
        return
    if names:
        batch.events += [BlocksRemoved(hashes, tier) for tier in tiers]
    is_lost = len(names) < len(values)
    batch.unusable.append(UnusableEvent(index, error, is_lost, hashes, _shown(raw)))
    batch.is_incomplete |= is_lost


def _transition(get: Get) -> CxlStateChanged:
    state, pool_id, workers = _placed(get("new_state"), get("pool_id"), get("accessible_workers"))
    event_id = int(get("event_id") or 0) & U64_MASK
    changed = CxlStateChanged(event_id, engine_hashes(get("block_hashes")), state, pool_id, workers)
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
    for entered in stored_as(state):
        check_change(CxlStateChanged(0, np.empty(0, dtype=np.uint64), entered, pool_id, workers))
    return CxlMemoryMetadata(state, pool_id, workers)


def _placed(state: Any, pool_id: Any, workers: Any) -> tuple[CxlMemoryState, str | None, tuple[WorkerId, ...]]:
    """Check the state, pool and workers that an engine names. Raises ValueError, TypeError, InvalidRequest."""
    pool_id = pool_name(pool_id)  # some engines number their pools
    if pool_id is not None:
        check_pool_id(pool_id)
    if len(workers or ()) > POOL_MEMBERS_MAX:
        raise BadRecord("bad_event", f"{len(workers)} accessible workers; the limit is {POOL_MEMBERS_MAX}")
    return CxlMemoryState(state), pool_id, tuple(WorkerId(int(worker) & U64_MASK) for worker in workers or ())


# -- what a dead letter may show ---------------------------------------------------------------------------------------


def _shown(raw: Any) -> dict[str, object]:
    """Return what is known not to be tokens or text of a prompt: lengths, hashes, and values out of short lists.

    Fields that this dialect does not know are left out. So are extra keys, which contain hashes of images and cache
    salts; names of adapters; and the values of fields that have another type than vLLM gives them.
    """
    try:
        tag, get = _fields(raw)
    except FIELD_ERRORS:
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
        shown["block_hashes"] = [shown_hash(value) for value in hashes[:HASHES_SHOWN_MAX]]
    if get("parent_block_hash") is not None:
        shown["parent_block_hash"] = shown_hash(get("parent_block_hash"))
    medium, group, kind, size = (get(name) for name in ("medium", "group_idx", "kv_cache_spec_kind", "block_size"))
    if isinstance(medium, str) and medium.upper() in TIERS:
        shown["medium"] = medium
    if type(group) is int and 0 <= group < 64:
        shown["group_idx"] = group
    if isinstance(kind, str) and kind in _PREFIX_KINDS | _OTHER_KINDS:
        shown["kv_cache_spec_kind"] = kind
    if shown_size(size) is not None:
        shown["block_size"] = size
    return shown

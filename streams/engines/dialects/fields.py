"""What the dialects have in common: the values of fields, and the batch that a decoder builds (pure).

What lives here: block hashes, media, the hashes of blocks with adapters and salts, the batch under construction, and
which values a dead letter may show. What must not: the format of any engine (one module per dialect).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streams.core.hashing import hash_seed, local_hashes, salted_seed
from streams.core.ids import U64_MASK, EngineHash, HashArray, Tier
from streams.engines.dialects.interface import DecodedBatch, EngineEvent, UnusableEvent
from streams.errors import WRONG_BLOCK_SIZE, BadRecord, InvalidRequest

#: Bytes of one payload. A prompt of 1M tokens that is stored at once takes 5 MB; a payload more than ten times as large
#: is not an event batch.
PAYLOAD_BYTES_MAX = 64 * 1024 * 1024

#: Hashes of one event that a dead letter shows. A few dozen identify the prompt's blocks in the logs of the engine.
HASHES_SHOWN_MAX = 32

#: Of so few hashes, Python finds the least in 0.5 us, and NumPy those below 2 in 4 us.
FEW_HASHES = 32

#: The greatest values of a record's rank and of its times, which are Avro's int and long.
I32_MAX = (1 << 31) - 1
I64_MAX = (1 << 63) - 1

#: Media by the tier that they are in, in capitals. An unknown medium is external, whose weight is 0 by default.
TIERS: Mapping[str, Tier] = {
    **dict.fromkeys(("GPU", "DEVICE"), Tier.DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), Tier.HOST),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "FS", "STORAGE"), Tier.DISK),
    **dict.fromkeys(("OBJ", "EXTERNAL", "NETWORK", "REMOTE", "SHARED"), Tier.EXTERNAL),
}

#: What reading a field of the wrong type raises, here or in what is called. Such messages may contain the field.
FIELD_ERRORS = (InvalidRequest, TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError)

#: A field of an event by name; None if the event does not have it.
Get = Callable[[str], Any]


@dataclass(slots=True)
class BatchBuilder:
    """What has been read of one payload so far; the fields are those of DecodedBatch."""

    events: list[EngineEvent] = field(default_factory=list)
    unusable: list[UnusableEvent] = field(default_factory=list)
    n_unindexed: int = 0
    is_incomplete: bool = False
    n_ignored: int = 0
    not_indexed: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str, n_blocks: int) -> None:
        """Count blocks that are not indexed, or not exactly; the rank's answers are approximate because of them."""
        if n_blocks:
            self.count(reason, n_blocks)
            self.n_unindexed += n_blocks

    def ignore(self, reason: str, n_blocks: int = 1) -> None:
        """Count one event that cannot matter, and its blocks by reason."""
        self.count(reason, n_blocks)
        self.n_ignored += 1

    def count(self, reason: str, n: int) -> None:
        """Count what is not indexed, or not exactly, by its reason (NOT_INDEXED_REASONS)."""
        if not n:
            return
        self.not_indexed[reason] = self.not_indexed.get(reason, 0) + n

    def lose(self, index: int, error: BadRecord, shown: Mapping[str, object]) -> None:
        """Note an event that cannot be used and that could matter."""
        if error.reason == WRONG_BLOCK_SIZE:
            self.count("block_size", 1)
        self.unusable.append(UnusableEvent(index, error, shown=shown))
        self.is_incomplete = True

    def built(self, emitted_at_ms: int, dp_rank: int | None) -> DecodedBatch:
        """Return the batch."""
        return DecodedBatch(
            emitted_at_ms,
            dp_rank,
            tuple(self.events),
            self.n_unindexed,
            tuple(self.unusable),
            self.is_incomplete,
            self.n_ignored,
            self.not_indexed,
        )


def check_envelope(dp_rank: int | None, emitted_at_ms: int) -> None:
    """Raise BadRecord for a rank or a time that does not fit into a record."""
    if not (0 <= (dp_rank or 0) <= I32_MAX and abs(emitted_at_ms) <= I64_MAX):
        raise BadRecord("bad_event", "the rank or the time of the payload does not fit into a record")


def check_length(raw: bytes) -> None:
    """Raise BadRecord for a payload that is longer than any engine's."""
    if len(raw) > PAYLOAD_BYTES_MAX:
        raise BadRecord("too_large", f"the payload has {len(raw)} bytes; the limit is {PAYLOAD_BYTES_MAX}")


# -- block hashes ------------------------------------------------------------------------------------------------------


def engine_hash(value: Any) -> EngineHash:
    """Return an engine's block id as u64: an integer's low 64 bits, or the last 8 bytes, big-endian.

    A negative integer becomes its two's complement. Raises TypeError.
    """
    if isinstance(value, bytes):
        return EngineHash(int.from_bytes(value[-8:], "big"))
    if isinstance(value, int) and not isinstance(value, bool):
        return EngineHash(value & U64_MASK)
    raise TypeError(f"a {type(value).__name__} is not a block hash")


def is_hash(value: Any) -> bool:
    """Whether a value is a block hash."""
    return isinstance(value, bytes) or (isinstance(value, int) and not isinstance(value, bool))


def engine_hashes(values: Any) -> HashArray:
    """Return block hashes as uint64[n]. Raises BadRecord, TypeError."""
    if not isinstance(values, list):  # each byte of a bytes value would be read as a hash
        raise BadRecord("bad_event", f"block_hashes is a {type(values).__name__}, not a list")
    # array() checks and converts in C what most engines send: 20 ns per hash, compared with 150. It takes True for 1.
    for code in ("Q", "q"):
        try:
            packed = array(code, values)
        except (TypeError, OverflowError):
            continue
        hashes = np.frombuffer(packed, dtype=np.uint64)
        if 0 < len(packed) <= FEW_HASHES and min(packed) > 1:
            return hashes
        if not any(isinstance(values[index], bool) for index in np.flatnonzero(hashes < 2).tolist()):
            return hashes
    return np.array([engine_hash(value) for value in values], dtype=np.uint64)


def distinct_prefix(values: Sequence[Any], hashes: HashArray, parent: Any) -> tuple[int, str]:
    """Return how many leading hashes of a store differ from each other, and the reason why the next one is not used.

    parent: the hash of the block before the first one, None at the root. A chain never contains a block twice. Two
    hashes of 32 bytes that differ may still end in the same 8 bytes, and the engine's removal of one of them would then
    remove the other.
    """
    names = hashes.tolist()
    distinct = set(names)
    if len(distinct) == len(names) and (parent is None or int(engine_hash(parent)) not in distinct):
        return len(names), ""
    seen: dict[int, Any] = {} if parent is None else {int(engine_hash(parent)): parent}
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if name in seen:
            return index, "duplicate_hash" if seen[name] == value else "colliding_hash"
        seen[name] = value
    raise AssertionError("a hash is repeated")


# -- other fields ------------------------------------------------------------------------------------------------------


def tier_of(medium: Any) -> Tier:
    """Return the tier of a medium; raises BadRecord for a value that is not a name."""
    if medium is None:
        return Tier.DEVICE
    if not isinstance(medium, str):
        raise BadRecord("bad_event", f"medium is a {type(medium).__name__}, not a name")
    return TIERS.get(medium.upper(), Tier.EXTERNAL)


def group_of(get: Get) -> int:
    """Return an event's cache group; raises BadRecord."""
    group = get("group_idx")
    if group is None:
        return 0
    if type(group) is not int:
        raise BadRecord("bad_event", f"group_idx is a {type(group).__name__}, not a number")
    return group


def is_elsewhere(get: Get) -> bool:
    """Whether the event is about blocks that are not with this rank, or not known to be."""
    locality = get("locality")
    return locality is not None and not (isinstance(locality, str) and locality.upper() == "LOCAL")


def adapter_of(get: Get) -> str | None:
    """Return what the seed has of the adapter: its name, or else its id as text.

    If nothing of an adapter without a name were hashed, its blocks would match requests for the base model.
    """
    lora = get("lora_name")
    if not lora and get("lora_id") is not None:
        return str(get("lora_id"))
    return lora  # type: ignore[no-any-return]  # hash_seed refuses everything but text


def hash_blocks(
    tokens: Any, block_size: int, lora: str | None, cache_salt: str | None = None, *, at_root: bool = False
) -> HashArray:
    """Hash the blocks of a store. at_root: whether its first block is the first one of the prompt.

    Raises BadRecord for impossible values.
    """
    try:
        seed = hash_seed(lora)
        return local_hashes(
            tokens, block_size, seed, first_seed=salted_seed(seed, cache_salt) if at_root and cache_salt else None
        )
    except InvalidRequest:  # its message quotes the value
        raise BadRecord("bad_event", "token_ids, the adapter or the salt has an impossible value") from None


def wrong_block_size(size: Any, block_size: int) -> BadRecord:
    """Return the error of an event whose blocks have another size than the scope's."""
    plausible = shown_size(size)
    shown = "another number of" if plausible is None else plausible
    message = f"blocks have {shown} tokens; this scope has {block_size} for the model"
    return BadRecord(WRONG_BLOCK_SIZE, message, block_size=plausible)


# -- what a dead letter may show ---------------------------------------------------------------------------------------


def shown_hash(value: Any) -> str | None:
    """Return a block hash as text; None for what may be a token, since tokens have at most 32 bits."""
    if isinstance(value, bytes) and len(value) == 32:
        return str(engine_hash(value))
    if type(value) is int and not 0 <= value < 1 << 32:
        return str(engine_hash(value))
    return None


def shown_size(size: Any) -> int | None:
    """Return a block size; None for what may be a token instead. Blocks have a power of two or a multiple of 16."""
    plausible = type(size) is int and 0 <= size <= 65_536 and (size % 16 == 0 or size & (size - 1) == 0)
    return size if plausible else None

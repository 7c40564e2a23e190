"""The interface of a dialect: from one engine's payloads to events (pure).

What lives here: what every dialect provides, and what the feed may rely on. What must not: any engine's format (one
module per dialect), the list of dialects (registry), sockets (feed) and the counting of copies (ledger).

State: what a decoder has kept of former payloads, if anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from streams.core.events import AllBlocksCleared, BlocksStored, KvEvent
from streams.core.ids import EngineHash, HashArray, Tier
from streams.cxl.events import CxlStateChanged
from streams.errors import BadRecord

#: Reasons why an event, or some of its blocks, are not indexed, or not exactly. They are the values of the label
#: `reason` of `kvstreams_bridge_not_indexed_total`, and docs/engines.md explains them.
NOT_INDEXED_REASONS = (
    "block_size",
    "cache_group",
    "chunk",
    "colliding_hash",
    "connector",
    "content_unknown",
    "duplicate_hash",
    "key_unknown",
    "locality",
    "lookahead",
    "lower_tier",
    "masked",
    "placeholder",
    "tail",
    "unknown_parent",
    "unplaced",
)


@dataclass(frozen=True, slots=True)
class BlocksCopied:
    """Blocks that the rank holds in some tier are now also held in another one; the event has no tokens.

    Only the ledger can say which blocks the names stand for. engine: uint64[n]. tier: the further one.
    """

    engine: HashArray
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlocksOffloaded(BlocksStored):
    """A store that reports the tokens of its blocks, but not their salts, images and adapters.

    Only the ledger can say what they are, if a tier holds the blocks: it outlives the decoder when a bridge restarts.
    local: as if the blocks had none of them, except for `known`. known: names of blocks whose hashes the decoder has
    kept. is_whole: whether it has kept those of all blocks with a salt, an image or an adapter that it has read.
    """

    known: frozenset[int] = frozenset()
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class BlocksDropped:
    """Blocks are no longer held in any tier; the event names no tier. engine: uint64[n].

    Only the ledger can say which tiers hold them: it outlives the decoder when a bridge restarts.
    """

    engine: HashArray


@dataclass(frozen=True, slots=True)
class BlocksLeftOut:
    """Blocks that the decoder has left out and counted. The ledger leaves out the blocks behind them.

    engine: uint64[n]. reason: one of NOT_INDEXED_REASONS. tier: where the engine holds them.
    """

    engine: HashArray
    reason: str
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages smaller than a block now follow a page or a block that the decoder does not hold.

    Only the ledger can say whether they begin a block, behind one that it holds; otherwise their place is not known.
    parent: the name before the first page. tier: where the engine holds them.
    """

    parent: EngineHash
    n_pages: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class DeviceCleared(AllBlocksCleared):
    """The device tier holds no blocks any more. Whether lower tiers still hold theirs is not reported."""


@dataclass(frozen=True, slots=True)
class TierCleared:
    """One tier holds no blocks any more; the others are as before."""

    tier: Tier


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """A cache group other than the one that is indexed holds blocks, or no longer holds one copy of each.

    needed: how many blocks before the end of a hit the group must hold. engine: uint64[n], under the names that the
    blocks have in the indexed group. at_root: whether a store names no parent.
    """

    group: int
    needed: int
    engine: HashArray
    is_stored: bool
    at_root: bool = False


#: What an engine can report: a change of its cache, or a change of state of blocks in CXL memory.
EngineEvent = (
    KvEvent | CxlStateChanged | BlocksCopied | BlocksDropped | BlocksLeftOut | PagesStored | TierCleared | GroupChanged
)


@dataclass(frozen=True, slots=True)
class UnusableEvent:
    """An event that cannot be used as the engine sent it, or a whole payload that cannot be read.

    index: position in the payload, None for the whole payload.
    error: the reason, and a message that contains neither tokens nor text of a prompt.
    is_lost: whether what the event reported could matter and is now missing. False for a removal that names its blocks.
    removed: uint64[n]; the blocks that such a removal names. The batch has events that remove them from every tier.
    shown: what a dead letter may show of the event. Only what is known not to be a token or text is in it.
    """

    index: int | None
    error: BadRecord
    is_lost: bool = True
    removed: HashArray | None = None
    shown: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """One payload, decoded. Each of its events is judged on its own.

    emitted_at_ms: the engine's clock; 0 if the payload has no time. dp_rank: the rank that the payload names, None if
    it names none. They become an Avro long and an Avro int, and a decoder refuses a payload whose values do not fit.
    n_unindexed: blocks that the payload reports and that prefix matching cannot represent, or not exactly. The rank's
    answers are approximate because of them. not_indexed: everything that the payload reports and that is not indexed,
    or not exactly, by reason (NOT_INDEXED_REASONS): blocks, or events that name none.
    unusable: the events that cannot be used, in order. is_incomplete: whether one of them is lost; a loss before the
    last clear does not count. n_ignored: events that cannot matter. dialect: the one that a decoder for any engine has
    recognised from the bytes; None if it has not, and of decoders for one engine.
    """

    emitted_at_ms: int
    dp_rank: int | None
    events: tuple[EngineEvent, ...]
    n_unindexed: int = 0
    unusable: tuple[UnusableEvent, ...] = ()
    is_incomplete: bool = False
    n_ignored: int = 0
    not_indexed: Mapping[str, int] = field(default_factory=dict)
    dialect: Dialect | None = None


def undecodable(error: BadRecord, received_at_ms: int) -> DecodedBatch:
    """Return the batch of a payload that a decoder refused: it has no events, and all that it reported is lost."""
    return DecodedBatch(received_at_ms, None, (), unusable=(UnusableEvent(None, error),), is_incomplete=True)


class Decoder(Protocol):
    """Decodes the payloads of one rank within one incarnation.

    A decoder may keep state between payloads, such as blocks whose parent has not arrived yet. The feed creates one
    decoder per rank and incarnation and gives it every payload once, in the order of the batch numbers. A bridge that
    resumes from Kafka's table starts with a fresh decoder in the middle of an incarnation, and payloads may be lost; a
    decoder must cope with both, and must limit what it keeps.
    """

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload. An event that cannot be used does not affect the others.

        Raises BadRecord for a payload that cannot be divided into events; the decoder is then as before the call.
        No message contains tokens or text of a prompt.
        """


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of engine.

    name: what `dialect=` of `--engine` selects. counts_copies: whether the engine reports every physical copy of a
    block with a store and every eviction with a removal; otherwise a repeated store changes nothing.
    computed_tokens_min: tokens at the end of a prompt that the engine computes even if all of it is cached, so that
    routers promise no more (core.routing.audit). decoder: creates a decoder, given the block size in tokens that the
    scope has for the engine's model.
    """

    name: str
    counts_copies: bool
    computed_tokens_min: int
    decoder: Callable[[int], Decoder]

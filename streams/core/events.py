"""The events with which engines report changes of their caches, independent of the transport.

What lives here: the events in past tense, and the records of `kv-events` and `kv-control` as values. What must not:
bytes (kafka.records) and engine dialects (engines).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.ids import EngineHash, HashArray, Incarnation, RankId, SequenceHash, Tier
from streams.errors import BadRecord

#: Sequence number before the first one; vLLM counts its batches from 0. A batch with this number and no events
#: announces that an incarnation starts: the blocks of older ones are gone, even before the new one sends any events.
BEFORE_FIRST = -1

#: Names of a block's labels, and their greatest value.
LABEL_NAMES = ("layer_id", "expert_id", "expert_group")
LABEL_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class MoeLabels:
    """The layer, expert and expert group that a stored block belongs to in a mixture of experts; None is unlabelled.

    Values are 0 to LABEL_MAX, which `check_labels` and the decoders enforce.
    """

    layer_id: int | None = None
    expert_id: int | None = None
    expert_group: int | None = None


def check_labels(labels: MoeLabels) -> None:
    """Raise BadRecord for labels that are not integers from 0 to LABEL_MAX."""
    for name in LABEL_NAMES:
        value = getattr(labels, name)
        if value is not None and (type(value) is not int or not 0 <= value <= LABEL_MAX):
            raise BadRecord("bad_event", f"{name} is not a number from 0 to {LABEL_MAX}")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one chain are now held in one tier.

    parent: engine hash of the block before the first, None at the root.
    engine: uint64[n]; the engine's own names. local: uint64[n]; hashes of the blocks' tokens.
    """

    parent: EngineHash | None
    engine: HashArray
    local: HashArray
    tier: Tier = Tier.DEVICE
    moe: MoeLabels | None = None
    cxl: CxlMemoryMetadata | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no longer held in one tier. engine: uint64[n]."""

    engine: HashArray
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The rank no longer holds any blocks."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Labels and CXL metadata that consecutive blocks of a restated run have in common.

    first: offset of the first of them in the run. cxl: where the blocks are in CXL memory, None if they are in no pool.
    """

    first: int
    n_blocks: int
    moe: MoeLabels | None = None
    cxl: CxlMemoryMetadata | None = None


@dataclass(frozen=True, slots=True)
class RestatedRun:
    """Consecutive blocks that a rank holds according to a restatement, addressed without their parent's engine hash.

    start: position of the first block on its chain. parent: sequence hash of the block before it, None at the root.
    facts: in ascending order, without overlaps; all other blocks have neither labels nor CXL metadata.
    """

    start: int
    parent: SequenceHash | None
    engine: HashArray
    local: HashArray
    tier: Tier
    facts: tuple[BlockFacts, ...] = ()

    def by_labels(self) -> Iterator[tuple[int, int, MoeLabels | None]]:
        """Return the run in parts with equal labels: the offsets of a part's first block and of its end, its labels."""
        position = 0
        for fact in self.facts:
            if fact.first > position:
                yield position, fact.first, None
            position = fact.first + fact.n_blocks
            yield fact.first, position, fact.moe
        if position < len(self.local):
            yield position, len(self.local), None


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Body of an ordinary batch: its events in the engine's order."""

    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True)
class RestatementChunk:
    """One part of a rank's complete ledger. The restatement is complete when all `n_chunks` of its id have arrived."""

    restatement_id: int
    chunk: int
    n_chunks: int
    exact: bool
    runs: tuple[RestatedRun, ...]


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """The worker was removed or has expired; the record is ordered among the worker's events.

    reason: shown to people. seen_sequence: the last sequence number that an expiry was based on; None for a removal
    that was requested.
    """

    reason: str
    seen_sequence: int | None = None


#: The lease of a heartbeat that says that the rank takes no requests: its engine has exited or sleeps, or is fed no
#: longer. The rank is silent until a heartbeat has a longer one, whatever else is published.
ENDED_LEASE_MS = 1


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The bridge is still feeding this rank; the batch's sequence is the last one that it published.

    bridge: the bridge's name, shown to people. lease_ms: a rank that is not heard from for longer than this is silent,
    and ineligible until it is heard from again. See ENDED_LEASE_MS.
    """

    bridge: str
    lease_ms: int


Body = EngineEvents | RestatementChunk | WorkerRemoved | Heartbeat


class FeedState(enum.IntEnum):
    """State of a rank's feed when a record was written; the numbers are on Kafka. Only LIVE is false."""

    LIVE = 0  # the rank's events arrive as they happen
    UNPROVEN = 1  # the engine's event stream has not been proven to work, so an empty rank may hold blocks
    CATCHING_UP = 2  # the engine has published batches that the feed has not


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """One record of `kv-events`: one batch of one rank.

    sequence: the engine's own number of the batch; in a restatement the last number that it includes, in a heartbeat
    the last one published.
    digest: xxh3_64 of the engine's payload, which shows whether two batches with the same number are the same batch.
    emitted_at_ms: time on the engine's clock, used only for measurements.
    n_unindexed: blocks that the rank holds, or may hold, and that events cannot represent, or not exactly: for example
    those of KV cache groups that are not full attention, and those that were removed although a further copy may exist.
    They make the rank's answers approximate. In a restatement, and after an early removal, only whether the number is 0
    has a meaning.
    incomplete: whether the batch lacks events that the engine reported and that could matter; it counts as a gap.
    feed: state of the rank's feed when the record was written, whatever its body is.
    """

    rank: RankId
    model: str
    block_size: int
    incarnation: Incarnation
    sequence: int
    digest: int
    emitted_at_ms: int
    body: Body
    n_unindexed: int = 0
    incomplete: bool = False
    feed: FeedState = FeedState.LIVE


@dataclass(frozen=True, slots=True)
class ResyncRequest:
    """One record of `kv-control`: a partition owner requests that a rank's bridge restate what the rank holds.

    incarnation, sequence: the incarnation that the partition owner has, and the last batch of it that it applied.
    attempt: 1 for the first request after this gap.
    """

    rank: RankId
    incarnation: Incarnation
    sequence: int
    attempt: int
    reason: str
    asked_at_ms: int

"""What engines say about their caches, as one value an engine batch, whatever wire it came by.

What lives here: the events in past tense. What must not: bytes (codec) and engine dialects (engines).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.ids import EngineHash, HashArray, Incarnation, RankId, SequenceHash, Tier
from streams.errors import BadRecord

#: Sequence number before the first, since vLLM counts its batches from 0. A batch with this number and no events says
#: that a life begins: what an older one held is gone, though the new one has told nothing yet.
BEFORE_FIRST = -1

#: Names of a block's labels, and the greatest number of one.
LABEL_NAMES = ("layer_id", "expert_id", "expert_group")
LABEL_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class MoeLabels:
    """Which mixture-of-experts slice a stored block belongs to; None is unlabelled in that respect.

    Numbers from 0 to LABEL_MAX; `check_labels` says so, and decoders know it.
    """

    layer_id: int | None = None
    expert_id: int | None = None
    expert_group: int | None = None


def check_labels(labels: MoeLabels) -> None:
    """Raise BadRecord for labels that are no numbers, or out of range."""
    for name in LABEL_NAMES:
        value = getattr(labels, name)
        if value is not None and (type(value) is not int or not 0 <= value <= LABEL_MAX):
            raise BadRecord("bad_event", f"{name} is {value!r}, not a number from 0 to {LABEL_MAX}")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one chain now held in one tier.

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
    """Blocks no longer held in one tier. engine: uint64[n]."""

    engine: HashArray
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The emitting rank holds nothing any more."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class RestatedRun:
    """Consecutive blocks that a restatement says are held, addressed without their parent's engine name.

    start: position of the first block on its chain. parent: sequence hash of the block before it, None at the root.
    """

    start: int
    parent: SequenceHash | None
    engine: HashArray
    local: HashArray
    tier: Tier


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Body of an ordinary batch: its events in the engine's order."""

    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True)
class RestatementChunk:
    """One piece of a rank's whole ledger; complete when all `n_chunks` of one id have come."""

    restatement_id: int
    chunk: int
    n_chunks: int
    exact: bool
    runs: tuple[RestatedRun, ...]


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """The worker is gone, in order with its events.

    reason: told to people. seen_sequence: the progress that an expiry saw; None when somebody asked for the removal.
    """

    reason: str
    seen_sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The bridge goes on feeding this rank; the batch's sequence is the last one that it published.

    bridge: who, told to people. lease_ms: silent for longer, the rank is ineligible until it is heard of again.
    """

    bridge: str
    lease_ms: int


Body = EngineEvents | RestatementChunk | WorkerRemoved | Heartbeat


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """One record of `kv-events`: one batch of one rank.

    sequence: the engine's own number of the batch; of a restatement the last one it includes, of a heartbeat the last
    one published.
    digest: xxh3_64 of the engine's payload, proof that two lives told the same thing.
    emitted_at_ms: the engine's clock, for measuring only.
    n_unindexed: blocks of groups that are not full attention; their rank's answers are approximate.
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


@dataclass(frozen=True, slots=True)
class ResyncRequest:
    """One record of `kv-control`: a partition's owner asks a rank's bridge to restate what the rank holds.

    incarnation, sequence: the life that the asker knows, and the last batch of it that it applied. attempt: 1 for the
    first of this gap.
    """

    rank: RankId
    incarnation: Incarnation
    sequence: int
    attempt: int
    reason: str
    asked_at_ms: int

"""The interface of a dialect: from one engine's payloads to events (pure).

What lives here: what every dialect provides, and what the feed may rely on. What must not: any engine's format (one
module per dialect), the list of dialects (registry), sockets (feed) and the counting of copies (ledger).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streams.core.events import KvEvent
from streams.cxl.events import CxlStateChanged

#: What an engine can report: a change of its cache, or a change of state of blocks in CXL memory.
EngineEvent = KvEvent | CxlStateChanged


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """One payload, decoded.

    emitted_at_ms: the engine's clock. dp_rank: the rank that the payload names, 0 if it names none. They become an Avro
    long and an Avro int, and a decoder refuses a payload whose values do not fit. n_unindexed: blocks that the payload
    reports and that prefix matching cannot represent; they are counted and do not appear in `events`.
    """

    emitted_at_ms: int
    dp_rank: int
    events: tuple[EngineEvent, ...]
    n_unindexed: int = 0


class Decoder(Protocol):
    """Decodes the payloads of one rank within one incarnation.

    A decoder may keep state between payloads, such as blocks whose parent has not arrived yet. The feed creates one
    decoder per rank and incarnation and gives it every payload once, in the order of the batch numbers. A bridge that
    resumes from Kafka's table starts with a fresh decoder in the middle of an incarnation, and payloads may be lost; a
    decoder must cope with both, and must limit what it keeps.
    """

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one payload.

        Raises BadRecord, with a reason for the dead letter; the decoder is then as it was before the call.
        """


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of engine.

    name: what `dialect=` of `--engine` selects. counts_copies: whether the engine reports every physical copy of a
    block with a store and every eviction with a removal; otherwise a repeated store changes nothing. decoder: creates a
    decoder, given the block size in tokens that the scope has for the engine's model.
    """

    name: str
    counts_copies: bool
    decoder: Callable[[int], Decoder]

"""A rank's ledger as of its last batch on Kafka, rebuilt from the engine's own batches.

What lives here: reading the engine's replay socket for a bridge that resumes an incarnation. What must not: the table's
ledger, which serves where the engine does not keep its batches (recovery), and publishing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from streams.core.ids import RankId
from streams.engines.batch_publishing import decode_payload
from streams.engines.cxl_names import CxlNames
from streams.engines.dialects.interface import DecodedBatch, Decoder, UnusableEvent
from streams.engines.gap_filling import Digests
from streams.engines.ledger import Ledger
from streams.engines.replay import ReplaySilent, replay
from streams.engines.wiring import EngineWiring
from streams.errors import BadRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RebuiltRank:
    """What an engine's batches say that its rank holds. decoder: the one that decoded these batches, and continues."""

    ledger: Ledger
    names: CxlNames
    decoder: Decoder


async def rebuild(
    wiring: EngineWiring,
    replay_address: str,
    rank: RankId,
    until: int,
    digests: Digests,
    decoder: Decoder,
    on_batch: Callable[[Sequence[UnusableEvent]], None],
) -> RebuiltRank | None:
    """Rebuild the ledger as of batch `until`, and the names of blocks in CXL pools, from the engine's own batches.

    Returns None if the engine does not return all of these batches. Nothing is published, since Kafka has them. The
    result contains copies and second names, which the table lacks. digests: gets the digest of each batch. on_batch:
    called for each batch, with its unusable events.
    """
    ledger, names, following = Ledger(wiring.engine.dialect.counts_copies), CxlNames(), 0
    try:
        async with aclosing(replay(wiring.context, replay_address, 0)) as batches:
            async for batch in batches:
                if batch.sequence != following:
                    on_batch(())
                    return None
                digests.add(batch)
                decoded = decode_payload(decoder, batch.payload)
                on_batch(decoded.unusable)
                _apply(decoded, ledger, names)
                following += 1
                if following > until:
                    return RebuiltRank(ledger, names, decoder)
    except ReplaySilent as exc:
        log.warning("rank %s: %s", rank, exc)
    return None


def _apply(decoded: DecodedBatch, ledger: Ledger, names: CxlNames) -> None:
    """Apply a batch as the writer did that published it."""
    if decoded.dialect is not None:
        ledger.count_copies(decoded.dialect.counts_copies)
    left_out_before = ledger.left_out
    try:
        for event in decoded.events:
            names.apply(event, ledger)
    except BadRecord:
        ledger.lost_events()
    ledger.end_batch()
    ledger.count_unindexed(decoded.n_unindexed, left_out_before)
    if decoded.is_incomplete:
        ledger.lost_events()

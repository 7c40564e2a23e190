"""Writes `kv-events` and `cxl-events` of one rank, for a bridge or for a publisher inside an engine.

What lives here: combining a rank's ledger, names and sequence numbers into records. What must not: any engine's message
format, and sending (rank_records).

State: one rank's sequence number and incarnation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from confluent_kafka import Producer

from streams.core.events import (
    BEFORE_FIRST,
    Body,
    EngineBatch,
    EngineEvents,
    FeedState,
    Heartbeat,
    KvEvent,
    RestatementChunk,
)
from streams.core.ids import Incarnation, RankId, WorkerId
from streams.cxl.events import TRANSITION_BLOCKS_MAX, AddressedBlocks, CxlStateChanged, CxlTransition, addressed
from streams.cxl.records import encode_transition
from streams.cxl.states import stored_as
from streams.engines.cxl_names import CxlNames, PooledRows, announced_states
from streams.engines.dialects.interface import EngineEvent
from streams.engines.ledger import Ledger
from streams.engines.rank_records import RankRecords
from streams.engines.restatements import chunks
from streams.errors import BadRecord
from streams.kafka.records import encode_batch
from streams.settings import ScopeSettings
from streams.topics import EVENT_BYTES_MAX

log = logging.getLogger(__name__)


def no_pools(pool_id: str) -> int:  # noqa: ARG001 - the signature is that of every `epoch_of`
    """Return epoch 0, which is before that of any registered pool; for writers that do not read the registry."""
    return 0


class RankWriter:
    """Writes one rank's batches in the order given. Owner of that rank's ledger and of its names in CXL pools."""

    def __init__(
        self,
        settings: ScopeSettings,
        kafka: Producer,
        rank: RankId,
        model: str,
        incarnation: Incarnation,
        counts_copies: bool,
        epoch_of: Callable[[str], int] = no_pools,
        in_flight: Counter[WorkerId] | None = None,
        *,
        may_resume: bool = False,
    ) -> None:
        """epoch_of: returns the epoch of a CXL pool from the registry.

        in_flight, may_resume: see RankRecords.
        """
        self._epoch_of = epoch_of
        self._block_size = settings.block_size_of(model)
        self._counts_copies = counts_copies
        self.rank = rank
        self.model = model
        self.incarnation = incarnation
        self.ledger = Ledger(counts_copies)
        self.names = CxlNames()
        #: The last batch published in this incarnation, and the digest of its payload.
        self.sequence = BEFORE_FIRST
        self.digest = 0
        #: State of the rank's feed, which every record states; and the state that the last record stated.
        self.feed = FeedState.LIVE
        self.feed_shown: FeedState | None = None
        #: Blocks for which no transition was published, since neither ledger nor pool names contain their engine hash.
        self.unknown_names = 0
        self.published = 0
        #: What was written, until Kafka has it.
        self.records = RankRecords(settings, kafka, rank.worker_id, in_flight, may_resume=may_resume)

    def write(
        self,
        sequence: int,
        digest: int,
        emitted_at_ms: int,
        events: Iterable[EngineEvent],
        n_unindexed: int = 0,
        *,
        is_incomplete: bool = False,
    ) -> None:
        """Publish one batch. A batch that changes nothing is published as well, so that its number is not missing.

        is_incomplete: whether events of the batch are lost that could matter.
        Raises BadRecord if an event has invalid CXL metadata, and for a batch that is too large. Its number is on Kafka
        even then: in an incomplete batch with the other events, and in one without events.
        """
        changes: list[KvEvent] = []
        was_early, was_left_out = self.ledger.removed_early, self.ledger.left_out
        refused: BadRecord | None = None
        for event in events:
            try:
                states = announced_states(event)
                if not isinstance(event, CxlStateChanged):
                    changes += self.ledger.apply(event, may_wait=True)
                for changed in states:
                    self._change(changed, sequence, emitted_at_ms)
            except BadRecord as exc:
                refused = refused or exc
        changes += self.ledger.end_batch()
        n_unindexed = self.ledger.count_unindexed(n_unindexed, was_left_out)
        if is_incomplete or refused:
            self.ledger.lost_events()
        if self.ledger.removed_early and not was_early:
            log.info(
                "rank %s is approximate from batch %d on: the engine may hold further copies of a removed block",
                self.rank,
                sequence,
            )
        n_unindexed += self.ledger.removed_early
        body = EngineEvents(tuple(changes))
        try:
            self._send(sequence, digest, emitted_at_ms, body, n_unindexed, is_incomplete or refused is not None)
        except BadRecord as exc:  # too large; the ledger has its events, so a restatement contains them
            refused = exc
            self._send(sequence, digest, emitted_at_ms, EngineEvents(()), n_unindexed, is_incomplete=True)
        self.sequence, self.digest = sequence, digest
        if refused is not None:
            raise refused

    def count_copies(self, counts_copies: bool) -> None:
        """Change whether the rank's ledger counts copies, once it is known what kind of engine it is."""
        self._counts_copies = counts_copies
        self.ledger.count_copies(counts_copies)

    def change_state(self, changed: CxlStateChanged, emitted_at_ms: int) -> list[int]:
        """Publish that blocks enter a state of CXL memory after the last batch.

        Returns the engine hashes that name no block; the transition is published for all others.
        """
        return self._change(changed, self.sequence, emitted_at_ms)

    def _change(self, changed: CxlStateChanged, follows: int, emitted_at_ms: int) -> list[int]:
        blocks, unknown = self.names.resolve(changed, self.ledger)
        self.unknown_names += len(unknown)
        for first in range(0, len(blocks), TRANSITION_BLOCKS_MAX):
            self._send_transition(changed, blocks[first : first + TRANSITION_BLOCKS_MAX], follows, emitted_at_ms)
        return unknown

    def _send_transition(
        self, changed: CxlStateChanged, blocks: AddressedBlocks, follows: int, emitted_at_ms: int
    ) -> None:
        transition = CxlTransition(
            rank=self.rank,
            model=self.model,
            incarnation=self.incarnation,
            follows=follows,
            event_id=changed.event_id,
            state=changed.state,
            pool_id=changed.pool_id,
            pool_epoch=0 if changed.pool_id is None else self._epoch_of(changed.pool_id),
            accessible_workers=changed.accessible_workers,
            emitted_at_ms=emitted_at_ms,
            blocks=blocks,
        )
        self.records.put_transition(encode_transition(transition))

    def restate_placements(self, rows: PooledRows, emitted_at_ms: int) -> int:
        """Publish where blocks are in CXL memory, for those that the agents' table lacks; return their number.

        rows: the rank's rows in that table. They are gone after a reset of the scope, and a restatement has only the
        blocks that the rank holds itself. A transition that the agents have not applied yet is published twice, which
        changes nothing.
        """
        missing = self.names.missing(rows, self.incarnation)
        for metadata, named in missing.items():
            blocks = addressed(named)
            for state in stored_as(metadata.state):
                changed = CxlStateChanged(0, blocks.engine, state, metadata.pool_id, metadata.accessible_workers)
                for first in range(0, len(blocks), TRANSITION_BLOCKS_MAX):
                    piece = blocks[first : first + TRANSITION_BLOCKS_MAX]
                    self._send_transition(changed, piece, self.sequence, emitted_at_ms)
        return sum(map(len, missing.values()))

    def restatement(self, restatement_id: int) -> list[RestatementChunk]:
        """Return the whole ledger, complete to the last batch, in chunks.

        This takes about a second for 100,000 blocks, so call it on a thread. Until all chunks are sent, nothing but
        heartbeats may be written.
        """
        runs = self.ledger.restated(self.names.placements())
        return chunks(runs, restatement_id, exact=self.ledger.complete)

    def send_chunk(self, chunk: RestatementChunk, emitted_at_ms: int) -> None:
        """Publish one chunk of a restatement of the last batch."""
        self._send(self.sequence, self.digest, emitted_at_ms, chunk, int(self.ledger.may_lack_blocks))

    def heartbeat(self, bridge: str, lease_ms: int, emitted_at_ms: int) -> None:
        """Publish that this rank is being fed, with the number of its last batch, so that a lost last batch is noticed.

        bridge: the bridge's name, shown to people. lease_ms: for how long the heartbeat is valid.
        """
        self._send(self.sequence, self.digest, emitted_at_ms, Heartbeat(bridge, lease_ms), 0)

    def _send(
        self,
        sequence: int,
        digest: int,
        emitted_at_ms: int,
        body: Body,
        n_unindexed: int,
        is_incomplete: bool = False,
    ) -> None:
        value = encode_batch(
            EngineBatch(
                rank=self.rank,
                model=self.model,
                block_size=self._block_size,
                incarnation=self.incarnation,
                sequence=sequence,
                digest=digest,
                emitted_at_ms=emitted_at_ms,
                body=body,
                n_unindexed=n_unindexed,
                incomplete=is_incomplete,
                feed=self.feed,
            )
        )
        if len(value) > EVENT_BYTES_MAX:
            raise BadRecord("too_large", f"batch {sequence} of rank {self.rank} has {len(value)} bytes")
        self.records.put_batch(value)
        self.feed_shown = self.feed
        self.published += 1

    def begin_incarnation(self, incarnation: Incarnation) -> None:
        """Start over with an empty ledger, in this incarnation or a greater one."""
        self.incarnation = incarnation
        self.resume(BEFORE_FIRST, 0, Ledger(self._counts_copies))

    def resume(self, sequence: int, digest: int, ledger: Ledger, names: CxlNames | None = None) -> None:
        """Continue this incarnation after a batch, with the ledger as of that batch and the names of pooled blocks."""
        self.sequence, self.digest, self.ledger = sequence, digest, ledger
        self.names = names or CxlNames()
        self.records.withdraw()

"""One rank's batches on their way to Kafka: decoded, written, and what of them could not be used.

What lives here: decoding, dead letters, the size of the engine's blocks, and waiting until Kafka's client takes a
record. What must not: the order of batches (gap_filling), which batches may be published (feed_machine), what a payload
means (dialects), and which events change what the rank holds (ledger).

State: the incarnation's decoder.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from streams.core.events import BEFORE_FIRST, AllBlocksCleared, BlocksStored, FeedState
from streams.engines.dead_letters import of_frames, of_payload
from streams.engines.dialects.interface import DecodedBatch, Decoder, Dialect, UnusableEvent, undecodable
from streams.engines.engine_ranks import Naming, RanksMoved
from streams.engines.feed_counters import FeedCounters
from streams.engines.feed_machine import FeedMachine, LiveBatchPublished
from streams.engines.gap_filling import Digests
from streams.engines.heartbeats import Heartbeats
from streams.engines.missing_events import MissingEvents
from streams.engines.rank_writer import RankWriter
from streams.engines.replay import Batch
from streams.engines.wiring import EngineWiring
from streams.errors import WRONG_BLOCK_SIZE, BadRecord, KvStreamsError
from streams.kafka.clients import dead_letter_headers, worker_key
from streams.kafka.outage import Repetitions, repeated
from streams.topics import topics

log = logging.getLogger(__name__)

#: Pause before Kafka's client is offered a record again that it had no space for.
FULL_S = 0.02

#: Pause before it is asked whether Kafka has the transitions that a batch waits for, which takes some milliseconds.
TRANSITION_S = 0.005


class BatchPublisher:
    """Publishes one rank's batches in the order given. Owner of the incarnation's decoder and block size."""

    def __init__(
        self,
        wiring: EngineWiring,
        address: str,
        writer: RankWriter,
        heartbeats: Heartbeats,
        counters: FeedCounters,
        machine: FeedMachine,
        feed_state: Callable[[], FeedState],
        socket: int,
    ) -> None:
        """address: of the engine's events. feed_state: returns what a record states about the feed. socket: which of
        the engine's sockets is the rank's.
        """
        self._socket = socket
        self._wiring = wiring
        self._address = address
        self._writer = writer
        self._heartbeats = heartbeats
        self._counters = counters
        self._machine = machine
        self._feed_state = feed_state
        self._block_size = wiring.settings.block_size_of(wiring.model)
        self._digests = Digests()
        #: Of the incarnation that is being fed.
        self.decoder: Decoder = self.new_decoder()
        #: Whether the engine serves requests and reports no events.
        self.missing_events = MissingEvents()
        self._recognised: Dialect | None = None  # the dialect that a decoder for any engine has found out
        self._stored_block_size: int | None = None  # of the blocks that this incarnation stored, if it stored any
        self._wrong_block_size_reported = False  # whether this incarnation has a dead letter for that reason
        self._unsent_since_s: float | None = None  # since when a record has waited for space in Kafka's client
        self._letters_logged = Repetitions()  # by reason
        self._is_asleep = False
        #: Whether the engine has slept, and no batch has arrived since. It drops its cache, and reports that with its
        #: next batch.
        self.may_lack_clear = False

    def new_decoder(self) -> Decoder:
        """Return a decoder for an incarnation of the engine."""
        return self._wiring.engine.dialect.decoder(self._block_size)

    def expect(self, digests: Digests, decoder: Decoder | None = None) -> None:
        """Take the batches of an incarnation from now on. digests: of its batches. decoder: a new one without it."""
        self._digests = digests
        self.decoder = self.new_decoder() if decoder is None else decoder

    async def begin(self) -> None:
        """Publish the beginning of the writer's incarnation, which empties the rank."""
        await self.may_write()
        self._writer.feed = FeedState.UNPROVEN
        self._writer.write(BEFORE_FIRST, 0, _now_ms(), ())
        # The first heartbeat follows at once. Without it, the rank would have no lease in this incarnation yet, so a
        # crash of the bridge would not be noticed.
        self._heartbeats.renew()
        self._heartbeats.begun = True

    def forget_block_size(self) -> None:
        """Note that another process runs, whose blocks may have another size."""
        self._note_block_size(None)
        self._wrong_block_size_reported = False

    def note_sleep(self, sleeps: bool) -> None:
        """Note whether the engine sleeps."""
        self._is_asleep = sleeps
        self.may_lack_clear = self.may_lack_clear or sleeps

    # -- batches in order (gap_filling.BatchSink) ----------------------------------------------------------------------

    async def publish(self, batch: Batch, arrived_at_s: float | None = None) -> None:
        """Decode and publish the next batch of the incarnation. Raises what `may_write` does.

        Its number is on Kafka afterwards, whatever the payload contains: otherwise nothing would show that it is
        missing until the engine sends another batch.
        """
        await self.may_write()
        self.publish_now(batch, arrived_at_s)

    def publish_now(self, batch: Batch, arrived_at_s: float | None) -> None:
        """Decode and publish the next batch, when it may be written. arrived_at_s: see BatchSink."""
        self.missing_events.on_event()
        decoded = self._of_this_rank(decode_payload(self.decoder, batch.payload))
        digest = self._digests.add(batch)
        if not self._is_asleep:
            self.may_lack_clear = False
        if arrived_at_s is not None and decoded.emitted_at_ms:
            self._machine.handle(LiveBatchPublished(decoded.emitted_at_ms / 1000, arrived_at_s))
        self._writer.feed = self._feed_state()
        if decoded.dialect is not None:
            self._note_dialect(decoded.dialect)
        unusable = list(decoded.unusable)
        skipped_before, between_before = self._writer.ledger.skipped.counts.copy(), self._writer.ledger.n_between
        try:
            self._writer.write(
                batch.sequence,
                digest,
                decoded.emitted_at_ms or _now_ms(),
                decoded.events,
                decoded.n_unindexed,
                is_incomplete=decoded.is_incomplete,
            )
        except BadRecord as exc:
            unusable.append(UnusableEvent(None, exc))
        self._count(decoded, skipped_before, between_before)
        if self._stored_block_size != self._block_size and any(
            isinstance(event, BlocksStored) for event in decoded.events
        ):
            self._note_block_size(self._block_size)
        if unusable:
            self._note_unusable(batch, digest, unusable)

    def _of_this_rank(self, decoded: DecodedBatch) -> DecodedBatch:
        """Return a batch if it is about this rank; otherwise one without its events, of which it is not known whose.

        Raises RanksMoved if the engine's sockets have other ranks than assumed.
        """
        if decoded.dp_rank is None:
            return decoded
        ranks, rank = self._wiring.ranks, self._writer.rank
        now_s = time.monotonic()
        was_contradicted = ranks.are_contradicted(now_s)
        match ranks.on_batch(self._socket, decoded.dp_rank, now_s):
            case Naming.FITS:
                if was_contradicted and any(isinstance(event, AllBlocksCleared) for event in decoded.events):
                    ranks.on_clear(self._socket)
                return decoded
            case Naming.MOVED:
                raise RanksMoved(f"{self._address} has the batches of rank {decoded.dp_rank}, not of {rank.dp_rank}")
            case Naming.CONTRADICTS:
                if not was_contradicted:
                    log.warning(
                        "worker %d: it is not known which rank the events of %s are about: a batch names rank %d, and "
                        "rank %d was expected. No answer about this engine is exact until it clears its cache. Each "
                        "rank needs an event socket of its own; check events, dp and dp_start of its --engine",
                        rank.worker_id,
                        self._address,
                        decoded.dp_rank,
                        rank.dp_rank,
                    )
                return replace(decoded, events=(), is_incomplete=True)

    def on_batches_lost(self) -> None:
        """Note that the ledger lacks what the lost batches contained."""
        self._writer.ledger.lost_events()

    def on_engine_heard(self) -> None:
        """Note that the engine answered a replay request."""
        self._heartbeats.heard()

    def _count(self, decoded: DecodedBatch, skipped_before: Counter[str], between_before: int) -> None:
        """Count a batch that was published. The numbers are the ledger's from before the batch."""
        counters, ledger = self._counters, self._writer.ledger
        counters.batches_published += 1
        counters.blocks_unindexed += decoded.n_unindexed
        counters.events_ignored += decoded.n_ignored
        for reason, n in decoded.not_indexed.items():
            counters.not_indexed[reason] += n
        counters.not_indexed += ledger.skipped.counts - skipped_before
        if ledger.n_between > between_before:
            counters.not_indexed["cache_group"] += ledger.n_between - between_before

    def _note_dialect(self, dialect: Dialect) -> None:
        """Count copies as the engine reports them, now that its dialect is known."""
        if dialect is not self._recognised:
            self._recognised = dialect
            log.info("rank %s: the engine's events are in the dialect %s", self._writer.rank, dialect.name)
            self._writer.count_copies(dialect.counts_copies)

    # -- what cannot be used -------------------------------------------------------------------------------------------

    def _note_unusable(self, batch: Batch, digest: int, unusable: Sequence[UnusableEvent]) -> None:
        """Write the dead letter of a batch with unusable events."""
        self._counters.events_unusable += len(unusable)
        self.note_refused(unusable)
        if all(event.error.reason == WRONG_BLOCK_SIZE for event in unusable):
            self._counters.batches_of_wrong_block_size += 1
            if self._wrong_block_size_reported:
                return  # every further batch would be one; the bridge has logged why, and registered the engine's size
            self._wrong_block_size_reported = True
        letter = of_payload(batch.sequence, len(batch.payload), digest, unusable)
        self._dead_letter(letter, len(batch.payload), unusable[0].error)

    def note_bad_frames(self, frames: Sequence[bytes]) -> None:
        """Write the dead letter of a message that is no batch."""
        exc = BadRecord("bad_frames", f"the message has {len(frames)} frames and no sequence number")
        self._dead_letter(of_frames(frames), sum(map(len, frames)), exc)

    def note_refused(self, unusable: Sequence[UnusableEvent]) -> None:
        """Report the size of the engine's blocks to the bridge if it is the reason why an event cannot be used.

        An engine has one size until it restarts. So once it has stored blocks of the scope's size, an event with
        another one is damaged.
        """
        if self._stored_block_size == self._block_size:
            return
        for event in unusable:
            size = event.error.detail.get("block_size")
            if event.error.reason == WRONG_BLOCK_SIZE and isinstance(size, int) and size > 0:
                self._note_block_size(size)

    def _note_block_size(self, size: int | None) -> None:
        """size: None if it is not known, at the start of an incarnation."""
        if size != self._stored_block_size:
            self._stored_block_size = size
            self._wiring.on_stored_block_size(size)

    def _dead_letter(self, letter: bytes, n_bytes: int, exc: BadRecord) -> None:
        """Write a dead letter. n_bytes: the length of the engine's message, which is not part of it."""
        self._counters.dead_letters += 1
        n = self._letters_logged.happened(exc.reason, time.monotonic())
        if n is not None:
            log.warning("dead letter from rank %s at %s: %s%s", self._writer.rank, self._address, exc, repeated(n))
        self._wiring.kafka.produce(
            topics(self._wiring.settings).dead_letters.name,
            key=worker_key(self._writer.rank.worker_id),
            value=letter,
            headers=dead_letter_headers(self._address, exc, n_bytes),
        )

    # -- Kafka's client ------------------------------------------------------------------------------------------------

    async def may_write(self) -> None:
        """Wait until a batch may be written: this bridge holds the lease, and Kafka's client has taken the last one.

        Raises LeaseLost, and KvStreamsError if Kafka refused a record.
        Meanwhile nothing is taken from the socket, where at most `receive_hwm` batches wait. Further ones are missing
        in the engine's numbers, so they are requested from the replay socket, and show as a gap if that lacks them.
        """
        while True:
            await self._wiring.lease_handle.allowed(self._wiring.term)
            if self._writer.records.waits_for_transitions:
                self._wiring.kafka.poll(0)  # their acknowledgements
                self.check_deliveries()
            if self._writer.records.send():
                self._unsent_since_s = None
                return
            if self._unsent_since_s is None:
                self._unsent_since_s = time.monotonic()
            await asyncio.sleep(TRANSITION_S if self._writer.records.waits_for_transitions else FULL_S)

    @property
    def may_write_now(self) -> bool:
        """Whether a batch may be written without waiting."""
        return (
            not self._writer.records.failed
            and self._wiring.lease_handle.is_allowed(self._wiring.term)
            and self._writer.records.send()
        )

    @property
    def states_live_feed(self) -> bool:
        """Whether the rank's last record says that its feed is live, and Kafka's client has all records."""
        return self._writer.feed is FeedState.LIVE and not self._writer.records.has_unsent

    async def send_unsent(self) -> None:
        """Wait until Kafka's client has all records; perhaps nothing follows for long that would send them."""
        if self._writer.records.has_unsent:
            await self.may_write()

    def check_deliveries(self) -> None:
        """Raise KvStreamsError if Kafka refused a record."""
        if self._writer.records.failed:
            raise KvStreamsError(
                f"Kafka did not take {len(self._writer.records.failed)} records: {self._writer.records.failed[0]}"
            )

    def has_waited(self, now_s: float, longer_than_s: float) -> bool:
        """Whether a record has waited for space in Kafka's client for so long."""
        return self._unsent_since_s is not None and now_s - self._unsent_since_s > longer_than_s


def decode_payload(decoder: Decoder, payload: bytes) -> DecodedBatch:
    """Decode a payload; one that cannot be decoded is a batch without events, whose events are lost."""
    try:
        return decoder.decode(payload)
    except BadRecord as exc:
        return undecodable(exc, _now_ms())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

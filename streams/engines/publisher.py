"""Writes `kv-events` and `cxl-events`: for engines that embed it (`KvEventPublisher`), and for bridges (`RankWriter`).

What lives here: the writers, which combine a rank's ledger, names, sequence numbers and producer. What must not: any
engine's message format.

A CXL transition is sent before the batch that it follows. Agents park a transition that arrives early. In the other
order, a bridge that crashed between the two and resumed after its last batch would never publish the transition. Topics
have different leaders, so a bridge's batch waits until Kafka has acknowledged the transition. A publisher inside an
engine does not wait, since nobody resumes its incarnation if it crashes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import xxhash
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.codec import encode_batch
from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Body,
    EngineBatch,
    EngineEvents,
    FeedState,
    Heartbeat,
    KvEvent,
    MoeLabels,
    RestatementChunk,
    ResyncRequest,
    check_labels,
)
from streams.core.hashing import Tokens, hash_seed, local_hashes, salted_seed
from streams.core.ids import U64_MASK, DpRank, EngineHash, HashArray, Incarnation, RankId, Tier, WorkerId
from streams.cxl.events import (
    TRANSITION_BLOCKS_MAX,
    AddressedBlocks,
    CxlStateChanged,
    CxlTransition,
    addressed,
    state_changed,
)
from streams.cxl.pool_registry import PoolDirectory
from streams.cxl.records import encode_transition
from streams.cxl.states import stored_as
from streams.engines.acknowledgements import Acknowledgements, tolerated_s
from streams.engines.cxl_names import CxlNames, PooledRows, announced_states
from streams.engines.dialects.interface import EngineEvent
from streams.engines.held_lease import HeldLease
from streams.engines.ledger import Ledger
from streams.engines.pooled_rows import read_pooled
from streams.engines.restatements import Restatements, chunks
from streams.engines.stored_blocks import StoredBlock, store_events
from streams.errors import BadRecord, BlockSizeContradicted, InvalidEvent, InvalidRequest, KvStreamsError
from streams.kafka import partition_of, producer, require_topic, worker_key
from streams.model_registry import claim_model, writer_name
from streams.settings import Settings
from streams.topics import EVENT_BYTES_MAX, topics
from streams.warming import HASHING, warm

log = logging.getLogger(__name__)

#: How long a publisher waits for space in the client's queue, and a flush for the broker.
PUBLISH_TIMEOUT_S = 30.0

#: Records, and their kilobytes, that wait in the client of one process until Kafka takes them. While this buffer is
#: full, a bridge takes no further batches from its engines' sockets.
BUFFERED_RECORDS_MAX = 100_000
BUFFERED_KBYTES_MAX = 256 * 1024


#: How long the client waits for further records of a partition before it sends one. Each request costs it and the
#: broker about 0.1 ms of processor time, whatever it contains. With 4,000 batches per second over 8 partitions and the
#: usual 2 ms, nearly each batch would be a request of its own.
LINGER_MS = 5


def event_producer(settings: Settings) -> Producer:
    """Return a producer of events. It never drops a record, since only the engine could fill the gap.

    While Kafka is slower than the engines, its queue fills, up to the limits above. `RankWriter.send` then returns
    False, and the writer keeps the records of the batch that did not fit.
    """
    limits = {
        "queue.buffering.max.messages": BUFFERED_RECORDS_MAX,
        "queue.buffering.max.kbytes": BUFFERED_KBYTES_MAX,
        "linger.ms": LINGER_MS,
    }
    return producer(settings, **{"message.timeout.ms": 0, **limits})


def no_pools(pool_id: str) -> int:  # noqa: ARG001 - the signature is that of every `epoch_of`
    """Return epoch 0, which is before that of any registered pool; for writers that do not read the registry."""
    return 0


class RankWriter:
    """Writes one rank's batches in the order given. Owner of that rank's ledger and of its names in CXL pools."""

    def __init__(
        self,
        settings: Settings,
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

        in_flight: counts each worker's records that Kafka has neither acknowledged nor refused, for several writers.
        may_resume: the incarnation may go on after this writer, so that its batches wait for their transitions.
        """
        self._may_resume = may_resume
        self._transitions_sent = 0  # those that Kafka has neither acknowledged nor refused
        self._in_flight = Counter[WorkerId]() if in_flight is None else in_flight
        self._topic = topics(settings).kv_events.name
        self._cxl_topic = topics(settings).cxl_events.name
        self._epoch_of = epoch_of
        self._kafka = kafka
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
        self.delivered = 0
        self.failed: list[str] = []
        self._key = worker_key(rank.worker_id)
        # Records of the last batch that the client had no space for, or that wait for its transitions.
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._tolerated_s = tolerated_s(settings)
        self._acknowledgements = {topic: Acknowledgements() for topic in (self._topic, self._cxl_topic)}
        self._on_delivery_of = {topic: partial(self._on_delivery, topic) for topic in self._acknowledgements}
        #: If a caller sets a list here, the offsets in `cxl-events` of all later transitions are appended to it.
        self.transitions_at: list[int] | None = None

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
        self._produce(self._cxl_topic, encode_transition(transition))

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
        self._produce(self._topic, value)
        self.feed_shown = self.feed
        self.published += 1

    def _produce(self, topic: str, value: bytes) -> None:
        self._unsent.append((topic, value))
        self._acknowledgements[topic].written(time.monotonic())
        self.send()

    def send(self) -> bool:
        """Hand the records that wait to Kafka's client; return whether none waits any more.

        Call it before a batch, and write no batch while it returns False: the number of records that wait is limited
        only in that way.
        """
        waiting = self._unsent
        try:
            while waiting:
                topic, value = waiting[0]
                if topic == self._topic and self.waits_for_transitions:
                    return False
                self._kafka.produce(topic, key=self._key, value=value, on_delivery=self._on_delivery_of[topic])
                waiting.popleft()
                self._transitions_sent += topic == self._cxl_topic
                self._in_flight[self.rank.worker_id] += 1
        except BufferError:
            return False
        return True

    @property
    def waits_for_transitions(self) -> bool:
        """Whether no batch may be sent now, because Kafka has not acknowledged a transition, or has refused one."""
        return self._may_resume and (self._transitions_sent > 0 or bool(self.failed))

    @property
    def has_unsent(self) -> bool:
        """Whether records wait for space in Kafka's client, or for transitions."""
        return bool(self._unsent)

    def send_within(self, timeout_s: float) -> None:
        """Block until no record waits. Raises KvStreamsError after the timeout; the records are kept."""
        deadline = time.monotonic() + timeout_s
        while not self.send():
            if time.monotonic() > deadline:
                raise KvStreamsError(f"Kafka took no event for {timeout_s:g} s")
            self._kafka.poll(0.05)
        self._kafka.poll(0)

    def begin_incarnation(self, incarnation: Incarnation) -> None:
        """Start over with an empty ledger, in this incarnation or a greater one."""
        self.incarnation = incarnation
        self.resume(BEFORE_FIRST, 0, Ledger(self._counts_copies))

    def resume(self, sequence: int, digest: int, ledger: Ledger, names: CxlNames | None = None) -> None:
        """Continue this incarnation after a batch, with the ledger as of that batch and the names of pooled blocks."""
        self.sequence, self.digest, self.ledger = sequence, digest, ledger
        self.names = names or CxlNames()
        self.failed.clear()
        while self._unsent:
            topic, _ = self._unsent.pop()
            self._acknowledgements[topic].withdrawn()

    def is_late(self, now_s: float) -> bool:
        """Whether Kafka has not taken a record for longer than an exact answer may lag behind the log."""
        return any(each.are_late(now_s, self._tolerated_s) for each in self._acknowledgements.values())

    def is_read(self, now_s: float) -> bool:
        """Whether this writer's first record has been read by each router whose answers may be exact."""
        return self._acknowledgements[self._topic].is_first_read(now_s, self._tolerated_s)

    def _on_delivery(self, topic: str, error: KafkaError | None, message: Message) -> None:
        self._acknowledgements[topic].ended(time.monotonic(), acknowledged=error is None)
        self._transitions_sent -= topic == self._cxl_topic
        worker_id = self.rank.worker_id
        self._in_flight[worker_id] -= 1
        if not self._in_flight[worker_id]:
            del self._in_flight[worker_id]
        if error is None:
            self.delivered += 1
            if self.transitions_at is not None and topic == self._cxl_topic:
                self.transitions_at.append(message.offset() or 0)
        else:
            self.failed.append(error.str())


class KvEventPublisher:
    """Publishes one rank's cache events from inside the engine's process.

    Each call publishes one batch with the next sequence number. A publisher is one incarnation of its rank. Threads may
    share it; `async_publisher` has it for asyncio.

        with KvEventPublisher(settings, worker_id=7, model="m", lease_s=6.0) as publisher:
            publisher.stored([11, 12], token_ids, parent=None)
            publisher.removed([12])

    With a lease, a thread publishes heartbeats and answers requests to restate the rank. So an engine that is killed
    gets no more requests after one lease, and a rank that lost a batch is exact again, because the publisher knows what
    it holds. `close` ends the lease at once.
    """

    def __init__(
        self,
        settings: Settings,
        worker_id: int,
        model: str,
        dp_rank: int = 0,
        incarnation: int | None = None,
        counts_copies: bool = False,
        kafka: Producer | None = None,
        lease_s: float = 0.0,
    ) -> None:
        """incarnation: greater than any earlier one of the rank; the current time in microseconds by default. All that
        a publisher with a smaller one writes is ignored, and the rank keeps its former blocks.

        lease_s: length of the lease; 0 holds none, and the rank then stays as it is when the process ends.

        kafka: a producer to share, if the caller has checked that a broker answers and has called `claim_model`.
        Without one, a producer is created. KvStreamsError is then raised after some seconds if no broker answers or
        the topic is missing (a producer alone would retry for ever), and BlockSizeContradicted if the scope has another
        block size for the model than the settings.
        """
        own_incarnation = Incarnation(time.time_ns() // 1000 if incarnation is None else incarnation)
        rank = RankId(WorkerId(worker_id), DpRank(dp_rank))
        if kafka is None:
            require_topic(settings, topics(settings).kv_events.name)
            try:
                claim_model(settings, model, writer_name(f"publisher of worker {worker_id}"))
            except BlockSizeContradicted as exc:
                _end_former_incarnation(settings, rank, model, exc.detail["scope_block_size"], own_incarnation)
                raise
        warm(HASHING)  # before the first event, which would otherwise wait for a compiler
        self._kafka = kafka or event_producer(settings)
        self._settings = settings
        self._pools: PoolDirectory | None = None
        self._address = settings.kafka
        self._block_size = settings.block_size_of(model)
        self._writer = RankWriter(settings, self._kafka, rank, model, own_incarnation, counts_copies, self._epoch_of)
        self._sequence = 0
        self._lost = False  # whether events were lost that no batch shows yet
        self._lock = threading.RLock()  # guards the writer, which the lease's thread uses as well
        self._restatements = Restatements()
        self._lease: HeldLease | None = None
        # This empties the rank of everything that an earlier incarnation held, before the first batch of this one.
        self._writer.write(BEFORE_FIRST, 0, time.time_ns() // 1_000_000, ())
        if lease_s:
            self._lease = HeldLease(settings, rank, lease_s, self._heartbeat, self._restate)

    def stored(
        self,
        engine_hashes: Sequence[int],
        token_ids: Tokens,
        parent: int | None = None,
        *,
        tier: Tier = Tier.DEVICE,
        lora_name: str | None = None,
        namespace: str | None = None,
        cache_salt: str | None = None,
        moe: MoeLabels | None = None,
        cxl: CxlMemoryMetadata | None = None,
    ) -> None:
        """Publish that the rank now holds these blocks, which follow each other and `parent`.

        token_ids: of all blocks, len(engine_hashes) * block_size of them. Raises InvalidRequest if the numbers do not
        match, and what `publish` raises.
        """
        seed = hash_seed(lora_name, namespace)
        first_seed = salted_seed(seed, cache_salt) if parent is None else None
        local = local_hashes(token_ids, self._block_size, seed, first_seed=first_seed)
        if len(local) != len(engine_hashes):
            raise InvalidRequest(
                f"{len(engine_hashes)} engine hashes for {len(local)} full blocks of {self._block_size} tokens"
            )
        engine = np.array([value & U64_MASK for value in engine_hashes], dtype=np.uint64)
        parent_hash = None if parent is None else EngineHash(parent & U64_MASK)
        self.publish([BlocksStored(parent_hash, engine, local, tier, moe, cxl)])

    def stored_blocks(
        self,
        blocks: Sequence[StoredBlock],
        parent: int | None = None,
        *,
        lora_name: str | None = None,
        namespace: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Publish that the rank now holds these blocks, which follow each other and `parent`, as one batch.

        Each block has its own tier, labels and CXL metadata. Raises InvalidRequest for a block that is not full, and
        what `publish` raises.
        """
        seed = hash_seed(lora_name, namespace)
        first_seed = salted_seed(seed, cache_salt) if parent is None else None
        self.publish(store_events(blocks, parent, self._block_size, seed, first_seed))

    def create_kv_block(
        self, block_hash: int, token_ids: Tokens, parent_hash: int | None = None, **attributes: Any
    ) -> StoredBlock:
        """Publish that the rank now holds one block, and return it. attributes: those of StoredBlock.

        It has the name that users of NVIDIA Dynamo know; `stored_blocks` publishes several blocks for the price of one.
        """
        block = StoredBlock(block_hash, token_ids, **attributes)
        self.stored_blocks([block], parent_hash)
        return block

    def remove_kv_block(self, block_hash: int, *, tier: Tier = Tier.DEVICE) -> None:
        """Publish that the rank no longer holds one block; see `create_kv_block`."""
        self.removed([block_hash], tier=tier)

    def removed(self, engine_hashes: Sequence[int], *, tier: Tier = Tier.DEVICE) -> None:
        """Publish that the rank no longer holds these blocks."""
        engine: HashArray = np.array([value & U64_MASK for value in engine_hashes], dtype=np.uint64)
        self.publish([BlocksRemoved(engine, tier)])

    def cleared(self) -> None:
        """Publish that the rank's cache is empty."""
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[KvEvent]) -> int:
        """Publish several events as one batch; return its sequence number.

        Raises BadRecord for invalid CXL metadata or labels. Nothing was published then, and the caller may publish the
        batch again without them. Raises KvStreamsError if Kafka takes nothing for PUBLISH_TIMEOUT_S. If an earlier
        batch still waits then, this one is lost: the next call or heartbeat says so, and the rank is degraded until its
        cache is cleared. Otherwise the next call sends it. After any other exception the batch is missing in the log or
        has no events there, and its rank is degraded.
        """
        for event in events:
            announced_states(event)
            if isinstance(event, BlocksStored) and event.moe is not None:
                check_labels(event.moe)
        with self._lock:
            self._make_room()
            sequence = self._write(events)
            self._writer.send_within(PUBLISH_TIMEOUT_S)
        return sequence

    def _make_room(self) -> None:
        """Wait until no earlier record waits. If that fails, what was to be written now is lost."""
        try:
            self._writer.send_within(PUBLISH_TIMEOUT_S)
        except (KvStreamsError, KafkaException):
            self._lost = True
            self._writer.ledger.lost_events()
            raise
        self._write_loss()

    def _write_loss(self) -> None:
        """Publish that events were lost, if some were: the numbers of batches do not show it."""
        if self._lost:
            self._lost = False
            self._write((), is_incomplete=True)

    def _write(self, events: Sequence[KvEvent], *, is_incomplete: bool = False) -> int:
        """Write the next batch; return its number."""
        sequence = self._sequence
        self._sequence += 1
        digest = xxhash.xxh3_64_intdigest(f"{self._writer.incarnation}/{sequence}".encode())
        self._writer.write(sequence, digest, time.time_ns() // 1_000_000, events, is_incomplete=is_incomplete)
        return sequence

    def publish_cxl_state_transition(
        self,
        event_id: int,
        block_hashes: Sequence[int],
        new_state: str,
        pool_id: str | int | None = None,
        accessible_workers: Sequence[int] | None = None,
    ) -> None:
        """Publish that blocks, named by the engine's own hashes, enter a state of CXL memory.

        new_state: local_gpu, in_transit, cxl_pooled or evicted. pool_id: a number is written as decimal text.
        accessible_workers: the workers that can read the blocks, for in_transit; all members of the pool by default. An
        engine hash is known while the rank holds the block, and from in_transit until the block is evicted or
        local_gpu. The agents decide whether the state may follow the block's last one; a transition that may not
        becomes a dead letter.

        Raises InvalidEvent for an unknown state, for in_transit without a pool, or if a hash names no block. In the
        last case the transition is published for the other blocks.
        """
        workers = [WorkerId(worker & U64_MASK) for worker in accessible_workers or ()]
        changed = state_changed(event_id, block_hashes, new_state, pool_id, workers)
        with self._lock:
            self._make_room()
            unknown = self._writer.change_state(changed, time.time_ns() // 1_000_000)
            self._writer.send_within(PUBLISH_TIMEOUT_S)
        if unknown:
            raise InvalidEvent(
                f"{len(unknown)} of {len(block_hashes)} hashes name no block that this rank holds or has in a pool",
                unknown=unknown[:10],
            )

    def _epoch_of(self, pool_id: str) -> int:
        if self._pools is None:
            require_topic(self._settings, topics(self._settings).cxl_events.name)
            self._pools = PoolDirectory(self._settings)
        return self._pools.epoch_of(pool_id)

    def close(self) -> None:
        """End the lease, and wait until the broker has acknowledged everything, as `flush` does."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
        try:
            self.flush()
        finally:
            if self._pools is not None:
                self._pools.close()
                self._pools = None

    def _heartbeat(self, bridge: str, lease_ms: int) -> None:
        """Publish a heartbeat, unless the last batch still waits for space."""
        with self._lock:
            if self._writer.send():
                self._write_loss()
                self._writer.heartbeat(bridge, lease_ms, time.time_ns() // 1_000_000)
            self._kafka.poll(0)

    def _restate(self, request: ResyncRequest) -> None:
        """Publish what the rank holds, if the request has not been answered yet. Calls of other threads wait."""
        writer = self._writer
        with self._lock:
            now_ns = time.time_ns()
            # An engine that has published nothing holds nothing, since this publisher is part of it.
            if not self._restatements.answers(
                request, writer.incarnation, writer.sequence, time.monotonic(), is_proven=True
            ):
                return
            for piece in writer.restatement(now_ns // 1000):
                writer.send_chunk(piece, now_ns // 1_000_000)
                writer.send_within(PUBLISH_TIMEOUT_S)
            self._restatements.sent(writer.sequence, time.monotonic())
            log.info("rank %s: restated to batch %d: %s", writer.rank, writer.sequence, request.reason)
            has_names = len(writer.names) > 0
        if has_names:
            worker_id = writer.rank.worker_id
            rows = read_pooled(self._settings, partition_of(worker_id, self._settings.partitions), [worker_id])
            with self._lock:
                writer.restate_placements(rows[worker_id].get(writer.rank, {}), time.time_ns() // 1_000_000)
                writer.send_within(PUBLISH_TIMEOUT_S)

    def flush(self, timeout_s: float = PUBLISH_TIMEOUT_S) -> None:
        """Wait until the broker has acknowledged everything. Raises KvStreamsError if it has not within the timeout."""
        with self._lock:
            self._writer.send_within(timeout_s)
            self._write_loss()
            self._writer.send_within(timeout_s)
        left = self._kafka.flush(timeout_s)
        if left or self._writer.failed:
            why = self._writer.failed[0] if self._writer.failed else "no answer"
            raise KvStreamsError(
                f"{left + len(self._writer.failed)} batches were not acknowledged by Kafka at {self._address}: {why}",
                remedy="Queued batches are sent when the broker answers, unless this process ends before that",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_former_incarnation(
    settings: Settings, rank: RankId, model: str, block_size: int, incarnation: Incarnation
) -> None:
    """Publish that the process of a rank's former incarnation is gone, for a publisher that is refused.

    block_size: that of the scope. Otherwise the rank would keep the blocks of the former process as exact, although
    nothing reports their eviction any more.
    """
    kafka = event_producer(settings)
    sizes = {**settings.model_block_sizes, model: block_size}
    writer = RankWriter(replace(settings, model_block_sizes=sizes), kafka, rank, model, incarnation, False)
    writer.feed = FeedState.UNPROVEN  # the engine may run, and nothing is known of its cache
    writer.write(BEFORE_FIRST, 0, time.time_ns() // 1_000_000, ())
    writer.send_within(PUBLISH_TIMEOUT_S)
    if kafka.flush(PUBLISH_TIMEOUT_S):
        log.warning("rank %s: Kafka did not take the end of its former incarnation", rank)

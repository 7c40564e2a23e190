"""Publishes a rank's cache events from inside the engine's process.

What lives here: the publisher that an engine embeds, its lease and its answers to resync requests. What must not: any
engine's message format, and what a record contains (rank_writer).

State: the number of its next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import xxhash
from confluent_kafka import KafkaException, Producer

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    FeedState,
    KvEvent,
    MoeLabels,
    ResyncRequest,
    check_labels,
)
from streams.core.hashing import Tokens, hash_seed, local_hashes, salted_seed
from streams.core.ids import U64_MASK, DpRank, EngineHash, HashArray, Incarnation, RankId, Tier, WorkerId
from streams.cxl.events import state_changed
from streams.cxl.pool_registry import PoolDirectory
from streams.engines.cxl_names import announced_states
from streams.engines.held_lease import HeldLease
from streams.engines.pooled_rows import read_pooled
from streams.engines.rank_records import event_producer
from streams.engines.rank_writer import RankWriter
from streams.engines.restatements import Restatements
from streams.engines.stored_blocks import StoredBlock, store_events
from streams.errors import BlockSizeContradicted, InvalidEvent, InvalidRequest, KvStreamsError
from streams.kafka.clients import partition_of, require_topic
from streams.model_registry import claim_model, writer_name
from streams.settings import ScopeSettings
from streams.topics import topics
from streams.warming import HASHING, warm

log = logging.getLogger(__name__)

#: How long a publisher waits for space in the client's queue, and a flush for the broker.
PUBLISH_TIMEOUT_S = 30.0


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
        settings: ScopeSettings,
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
            self._writer.records.send_within(PUBLISH_TIMEOUT_S)
        return sequence

    def _make_room(self) -> None:
        """Wait until no earlier record waits. If that fails, what was to be written now is lost."""
        try:
            self._writer.records.send_within(PUBLISH_TIMEOUT_S)
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
            self._writer.records.send_within(PUBLISH_TIMEOUT_S)
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
            if self._writer.records.send():
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
                writer.records.send_within(PUBLISH_TIMEOUT_S)
            self._restatements.sent(writer.sequence, time.monotonic())
            log.info("rank %s: restated to batch %d: %s", writer.rank, writer.sequence, request.reason)
            has_names = len(writer.names) > 0
        if has_names:
            worker_id = writer.rank.worker_id
            rows = read_pooled(self._settings, partition_of(worker_id, self._settings.partitions), [worker_id])
            with self._lock:
                writer.restate_placements(rows[worker_id].get(writer.rank, {}), time.time_ns() // 1_000_000)
                writer.records.send_within(PUBLISH_TIMEOUT_S)

    def flush(self, timeout_s: float = PUBLISH_TIMEOUT_S) -> None:
        """Wait until the broker has acknowledged everything. Raises KvStreamsError if it has not within the timeout."""
        with self._lock:
            self._writer.records.send_within(timeout_s)
            self._write_loss()
            self._writer.records.send_within(timeout_s)
        left = self._kafka.flush(timeout_s)
        failed = self._writer.records.failed
        if left or failed:
            why = failed[0] if failed else "no answer"
            raise KvStreamsError(
                f"{left + len(failed)} batches were not acknowledged by Kafka at {self._address}: {why}",
                remedy="Queued batches are sent when the broker answers, unless this process ends before that",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_former_incarnation(
    settings: ScopeSettings, rank: RankId, model: str, block_size: int, incarnation: Incarnation
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
    writer.records.send_within(PUBLISH_TIMEOUT_S)
    if kafka.flush(PUBLISH_TIMEOUT_S):
        log.warning("rank %s: Kafka did not take the end of its former incarnation", rank)

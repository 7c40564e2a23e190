"""The calls that change the registry: workers and CXL pools.

What lives here: one method per call, each of which returns after Kafka has taken the change. What must not: HTTP,
decisions (router), and the epochs of pools (cxl.pool_registry).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from confluent_kafka import KafkaError, KafkaException, Producer

from streams.codec import encode_batch, encode_worker
from streams.core.events import EngineBatch, WorkerRemoved
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.workers import Worker, WorkerState
from streams.cxl.events import CxlPool
from streams.cxl.pool_registry import next_epoch, registered_pool, write_pool_change
from streams.cxl.records import encode_pool, pool_key
from streams.errors import BlockSizeMismatch, NotReady, ProcessError, UnknownId
from streams.kafka import worker_key
from streams.router_api.view import View
from streams.router_api.wire import PoolBody, pool_members
from streams.settings import Settings
from streams.topics import topics
from streams.waiting import wait_for

#: How long a call that changes the registry waits for Kafka to take the change.
PUBLISH_TIMEOUT_S = 10.0


class Registry:
    """Writes the registry. Every change is also folded into this router's view at once."""

    def __init__(self, settings: Settings, view: View, kafka: Producer, check_topics: Callable[[], None]) -> None:
        """check_topics: raises NotReady while topics of the scope are missing."""
        self._settings = settings
        self._topics = topics(settings)
        self._view = view
        self._kafka = kafka
        self._check_topics = check_topics

    def workers(self) -> list[Worker]:
        """The registered workers, in order of worker id."""
        return [worker for _, worker in sorted(self._view.workers.copy().items())]

    def worker(self, worker_id: WorkerId) -> Worker:
        """Return a registered worker; raises UnknownId."""
        worker = self._view.workers.get(worker_id)
        if worker is None:
            raise UnknownId(f"no worker {worker_id} is registered")
        return worker

    def put_worker(self, worker: Worker) -> None:
        """Register a worker; raises BlockSizeMismatch if the model has another block size in this scope."""
        expected = self._settings.block_size_of(worker.model)
        if worker.block_size != expected:
            raise BlockSizeMismatch(
                f"worker {worker.worker_id} has blocks of {worker.block_size} tokens, but in this scope "
                f"{worker.model} has blocks of {expected}",
                remedy="Set block_size or model_block_sizes; a model has one block size within a scope",
            )
        self._publish(self._topics.workers.name, worker_key(worker.worker_id), encode_worker(worker))
        self._view.fold_worker(worker_key(worker.worker_id), encode_worker(worker))

    def cordon(self, worker_id: WorkerId) -> Worker:
        """Keep new requests from a worker; running ones continue. Returns the cordoned worker."""
        cordoned = replace(self.worker(worker_id), state=WorkerState.CORDONED)
        self.put_worker(cordoned)
        return cordoned

    def delete_worker(self, worker_id: WorkerId) -> None:
        """Remove a worker from the registry, and from the index in order with its events."""
        worker = self.worker(worker_id)
        incarnation = max((progress.epoch.incarnation for progress in self._view.progress_of(worker_id)), default=None)
        if incarnation is not None:
            removed = EngineBatch(
                rank=RankId(worker_id, DpRank(0)),
                model=worker.model,
                block_size=worker.block_size,
                incarnation=incarnation,
                sequence=0,
                digest=0,
                emitted_at_ms=_now_ms(),
                body=WorkerRemoved("DELETE /workers"),
            )
            self._publish(self._topics.kv_events.name, worker_key(worker_id), encode_batch(removed))
        self._publish(self._topics.workers.name, worker_key(worker_id), None)
        self._view.fold_worker(worker_key(worker_id), None)

    def put_pool(self, pool_id: str, body: PoolBody) -> CxlPool:
        """Register a CXL pool, or change it; raises EpochConflict for an epoch that has ended.

        If the body has no epoch, the pool keeps its own, or begins the next one if it was lost.
        """
        epoch = next_epoch(pool_id, self._view.pools().get(pool_id), body.epoch)
        return self._register_pool(
            CxlPool(
                pool_id=pool_id,
                latency_class=body.latency_class,
                capacity_blocks=body.capacity_blocks,
                members=pool_members(body),
                epoch=epoch,
                registered_at_ms=_now_ms(),
            )
        )

    def lose_pool(self, pool_id: str) -> CxlPool:
        """Mark a pool and its contents as lost. Its record stays, so that it returns in a later epoch."""
        known = self._view.pools().get(pool_id)
        if known is None:
            raise UnknownId(f"no pool {pool_id} is registered")
        return self._register_pool(replace(known, epoch=known.epoch + 1, lost=True, registered_at_ms=_now_ms()))

    def _register_pool(self, pool: CxlPool) -> CxlPool:
        self._publish_pool(pool)
        # What this router has folded may lag behind what another router has written.
        write_pool_change(pool, registered_pool(self._settings, pool.pool_id), self._publish_pool)
        return pool

    def _publish_pool(self, pool: CxlPool) -> None:
        key, value = pool_key(pool.pool_id), encode_pool(pool)
        self._publish(self._topics.workers.name, key, value)
        self._view.fold_worker(key, value)

    def _publish(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Publish a record and wait for Kafka to take it: a change that was confirmed must outlive this process.

        Waits for this record alone: bookings are published meanwhile, and the client's queue may never be empty.
        """
        # A broker that creates topics on demand would create a missing one with settings of its own.
        self._check_topics()
        outcome: list[KafkaError | None] = []
        try:
            self._kafka.produce(topic, key=key, value=value, on_delivery=lambda error, _: outcome.append(error))
            wait_for(lambda: self._kafka.poll(0.1) >= 0 and bool(outcome), PUBLISH_TIMEOUT_S, "Kafka to take it")
        except (BufferError, KafkaException, ProcessError) as exc:
            raise NotReady(f"Kafka did not take the change: {exc}") from exc
        if outcome[0] is not None:
            raise NotReady(f"Kafka did not take the change: {outcome[0].str()}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

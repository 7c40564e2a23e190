"""The calls that change the registry: workers, cordons, avoidances, render parities and CXL pools.

What lives here: one method per call. Each of them, except for `avoid` and `put_render`, returns after Kafka has taken
the change. What must not: HTTP, decisions (router), and the epochs of pools (cxl.pool_registry).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.core.events import EngineBatch, WorkerRemoved
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.workers import Avoidance, Cordon, RenderOutcome, RenderParity, Worker, WorkerState
from streams.cxl.events import CxlPool
from streams.cxl.pool_registry import next_epoch, registered_pool, write_pool_change
from streams.cxl.records import encode_pool, pool_key
from streams.errors import (
    BlockSizeMismatch,
    KvStreamsError,
    NotReady,
    OutcomeUnknown,
    ProcessError,
    UnknownId,
    WorkerChanged,
)
from streams.kafka.clients import producer, worker_key
from streams.kafka.records import AVOIDANCES, CORDONS, MODELS, RENDER_PARITIES, encode_batch, encode_worker
from streams.model_registry import claim_model, writer_name
from streams.process.waiting import wait_for
from streams.router_api.knowledge.view import View
from streams.router_api.messages.requests import PoolBody, pool_members
from streams.router_api.sharing.log_order import LogOrder
from streams.settings import RouterSettings
from streams.topics import topics

log = logging.getLogger(__name__)

#: An avoidance is written at most once in this time for each worker. When an engine dies, every request that it had
#: fails at the same moment, and every front reports it.
AVOID_AGAIN_MS = 1000

#: How long a call that changes the registry waits for Kafka to take the change.
PUBLISH_TIMEOUT_S = 10.0

#: The client drops a record of the registry that was not delivered within this time, before the call gives up on it.
#: Its own default is five minutes: a cordon would then take effect long after its caller received an error.
DELIVERY_TIMEOUT_MS = 8000

#: Removals of workers whose outcome is unknown. A repeated call succeeds if the worker is gone by then.
REMOVALS_UNKNOWN_MAX = 1024

#: Codes with which the client reports that a record was not confirmed in time; the broker may have it nevertheless.
_TIMEOUTS = frozenset({KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})


class Registry:
    """Writes the registry. Every change is also folded into this router's view at once.

    order: what reads the registry's topic folds its records through it.
    """

    def __init__(self, settings: RouterSettings, view: View, check_topics: Callable[[], None]) -> None:
        """check_topics: raises NotReady while topics of the scope are missing."""
        self._settings = settings
        self._topics = topics(settings)
        self._view = view
        self.order = LogOrder(view.fold_worker)
        self._check_topics = check_topics
        self._kafka: Producer | None = None
        self._creating = threading.Lock()
        self._removals_unknown: dict[WorkerId, None] = {}  # in order of the calls
        self._avoidances: dict[WorkerId, Avoidance] = {}  # those that this router wrote last, until they are over

    def poll(self) -> None:
        """Take what the client reports; call it about every half second.

        Otherwise its lines about an outage would wait for the next change, and be logged long after the outage.
        """
        if self._kafka is not None:
            self._kafka.poll(0)

    def workers(self) -> list[Worker]:
        """The registered workers, in order of worker id."""
        return [worker for _, worker in sorted(self._view.fleet.workers.copy().items())]

    def worker(self, worker_id: WorkerId) -> Worker:
        """Return a registered worker; raises UnknownId."""
        worker = self._view.fleet.workers.get(worker_id)
        if worker is None:
            raise UnknownId(f"no worker {worker_id} is registered")
        return worker

    def registration(self, worker_id: WorkerId) -> Worker | None:
        """Return a worker's record as the registry has it, without its cordon; None if it is not registered."""
        return self._view.fleet.registration(worker_id)

    def put_worker(self, worker: Worker) -> Worker:
        """Register a worker, and return it with the state that follows from its cordon.

        Raises UnknownModel if this router does not serve the model, BlockSizeMismatch if the model or the worker's
        engine has another block size, and BlockSizeContradicted if this router's settings contradict the model's
        record.
        """
        self._view.served.check(worker.model)
        expected = self._view.fleet.block_size_of(worker.model)
        if worker.block_size != expected:
            raise BlockSizeMismatch(
                f"worker {worker.worker_id} has blocks of {worker.block_size} tokens, but in this scope "
                f"{worker.model} has blocks of {expected}",
                remedy="Set block_size or model_block_sizes; a model has one block size within a scope",
            )
        known = self._view.fleet.registration(worker.worker_id)
        if known is not None and known.lease is not None and known.block_size != worker.block_size:
            raise BlockSizeMismatch(
                f"worker {worker.worker_id} cannot have blocks of {worker.block_size} tokens: its bridge reports that "
                f"its engine has blocks of {known.block_size}",
                remedy="Restart the engine with the block size of the scope, and its bridge corrects the registration. "
                "If no bridge feeds it any more, delete the worker first",
            )
        if self._view.fleet.served_model(worker.model) is None:
            self._check_topics()
            try:
                served = claim_model(self._settings, worker.model, writer_name("router"))
            except NotReady:
                raise
            except KvStreamsError as exc:
                raise NotReady(f"Kafka did not take the change: the model has no record yet, and {exc}") from exc
            self._view.fold_worker(MODELS.keys.pack(served.name), MODELS.encode(served))
        self._publish_registry(worker_key(worker.worker_id), encode_worker(worker))
        # Another router may have deleted it already, and a recreated topic may not be read again yet.
        return self._view.fleet.workers.get(worker.worker_id, worker)

    def cordon(self, worker_id: WorkerId) -> Worker:
        """Keep new requests from a worker until `uncordon`; running ones continue. Returns the cordoned worker."""
        worker = self.worker(worker_id)
        self._publish_registry(CORDONS.keys.pack(worker_id), CORDONS.encode(Cordon(worker_id, _now_ms())))
        return self._view.fleet.workers.get(worker_id, replace(worker, state=WorkerState.CORDONED))

    def uncordon(self, worker_id: WorkerId) -> None:
        """End a worker's cordon. Raises UnknownId if there is neither a cordon nor such a worker."""
        registered = self._view.fleet.registration(worker_id)
        if registered is None and not self._view.fleet.has_cordon(worker_id):
            raise UnknownId(f"worker {worker_id} is not registered, and has no cordon")
        self._publish_registry(CORDONS.keys.pack(worker_id), None)
        if registered is not None and registered.state is WorkerState.CORDONED:
            # An earlier version cordoned the worker in the worker's own record.
            self._publish_registry(worker_key(worker_id), encode_worker(replace(registered, state=WorkerState.ACTIVE)))

    def avoid(self, worker_id: WorkerId) -> None:
        """Let requests avoid a worker for router_avoid_s, on this router at once.

        The other routers follow as soon as they read the record. The call does not wait for Kafka: while Kafka is away,
        only this router avoids the worker. Raises UnknownId.
        """
        self.worker(worker_id)
        ttl_ms = int(self._settings.router_avoid_s * 1000)
        if not ttl_ms or self._view.fleet.avoided(worker_id)[1] > max(0, ttl_ms - AVOID_AGAIN_MS):
            return
        avoidance = Avoidance(worker_id, _now_ms(), ttl_ms)
        self._view.fold_worker(AVOIDANCES.keys.pack(worker_id), AVOIDANCES.encode(avoidance))
        self._avoidances[worker_id] = avoidance
        self._check_topics()
        self._send(AVOIDANCES.keys.pack(worker_id), AVOIDANCES.encode(avoidance))

    def forget(self, avoidances: Iterable[Avoidance]) -> None:
        """Delete the records of avoidances that are over, as far as this router wrote them."""
        for avoidance in avoidances:
            if self._avoidances.get(avoidance.worker_id) == avoidance:
                del self._avoidances[avoidance.worker_id]
                self._send(AVOIDANCES.keys.pack(avoidance.worker_id), None)

    def put_render(self, parity: RenderParity) -> None:
        """Note whether a worker's engine makes the same tokens as a front, on this router at once.

        The other routers follow as soon as they read the record. The call does not wait for Kafka: fronts report a
        result again that routers do not show.

        Raises UnknownId, and WorkerChanged if the worker is another engine by now.
        """
        worker = self.worker(parity.worker_id)
        known, probed = self._view.fleet.incarnation_of(worker), parity.incarnation
        # The front may know a newer incarnation than this router, which it has from another one.
        is_older = known is not None and (probed is None or probed < known)
        if is_older or (parity.url, parity.model) != (worker.url, worker.model):
            raise WorkerChanged(
                f"worker {worker.worker_id} is no longer the engine that was probed: it has another URL or model, or "
                "was restarted",
                remedy="Probe it again as GET /workers lists it now",
            )
        before = self._view.fleet.render_of(worker)
        is_known = before is not None and before.result.outcome is not RenderOutcome.UNKNOWN
        if is_known and parity.result.outcome is RenderOutcome.UNKNOWN:
            return  # a front that could not compare, for example without a tokenizer, knows less than the other one
        self._check_topics()
        self._view.fold_worker(RENDER_PARITIES.keys.pack(worker.worker_id), RENDER_PARITIES.encode(parity))
        self._send(RENDER_PARITIES.keys.pack(worker.worker_id), RENDER_PARITIES.encode(parity))

    def _send(self, key: bytes, value: bytes | None) -> None:
        """Publish a record of the registry without waiting. It is lost if Kafka is away for longer than seconds."""
        kafka = self._producer()
        try:
            kafka.produce(self._topics.workers.name, key=key, value=value)
            kafka.poll(0.0)
        except (BufferError, KafkaException) as exc:
            log.warning("a record of the registry is lost: %s", exc)

    def delete_worker(self, worker_id: WorkerId) -> None:
        """Remove a worker from the registry, and from the index in order with its events. Its cordon stays.

        Its render parity is removed as well, without waiting for Kafka.
        """
        if self._view.fleet.registration(worker_id) is None and worker_id in self._removals_unknown:
            del self._removals_unknown[worker_id]  # the removal took effect after its outcome had been unknown
            return
        worker = self.worker(worker_id)
        incarnation = max(
            (progress.epoch.incarnation for progress in self._view.index.progress_of(worker_id)), default=None
        )
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
        try:
            self._publish_registry(worker_key(worker_id), None)
        except OutcomeUnknown:
            self._removals_unknown[worker_id] = None
            if len(self._removals_unknown) > REMOVALS_UNKNOWN_MAX:
                del self._removals_unknown[next(iter(self._removals_unknown))]
            raise
        self._removals_unknown.pop(worker_id, None)
        if self._view.fleet.has_render(worker_id):
            self._view.fold_worker(RENDER_PARITIES.keys.pack(worker_id), None)
            self._send(RENDER_PARITIES.keys.pack(worker_id), None)

    def put_pool(self, pool_id: str, body: PoolBody) -> CxlPool:
        """Register a CXL pool, or change it; raises EpochConflict for an epoch that has ended.

        If the body has no epoch, the pool keeps its own, or begins the next one if it was lost.
        """
        epoch = next_epoch(pool_id, self._view.facts.pools().get(pool_id), body.epoch)
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
        known = self._view.facts.pools().get(pool_id)
        if known is None:
            raise UnknownId(f"no pool {pool_id} is registered")
        return self._register_pool(replace(known, epoch=known.epoch + 1, lost=True, registered_at_ms=_now_ms()))

    def _register_pool(self, pool: CxlPool) -> CxlPool:
        self._publish_pool(pool)
        # What this router has folded may lag behind what another router has written.
        write_pool_change(pool, registered_pool(self._settings, pool.pool_id), self._publish_pool)
        return pool

    def _publish_pool(self, pool: CxlPool) -> None:
        self._publish_registry(pool_key(pool.pool_id), encode_pool(pool))

    def _publish_registry(self, key: bytes, value: bytes | None) -> None:
        """Publish a record of the registry, and fold it once Kafka has it."""
        reading = self.order.reading
        partition, offset = self._publish(self._topics.workers.name, key, value)
        self.order.written(reading, key, value, partition, offset)

    def _publish(self, topic: str, key: bytes, value: bytes | None) -> tuple[int, int]:
        """Publish a record and wait for Kafka to take it: a change that was confirmed must outlive this process.

        Returns its partition and its offset, which is negative if the broker did not name it.

        Raises OutcomeUnknown if Kafka does not answer in time: the record may have reached it. After that time the
        client drops the record, so that it cannot undo a later change when Kafka returns.
        """
        # A broker that creates topics on demand would create a missing one with settings of its own.
        self._check_topics()
        outcome: list[tuple[KafkaError | None, Message]] = []
        kafka = self._producer()
        try:
            kafka.produce(topic, key=key, value=value, on_delivery=lambda *delivery: outcome.append(delivery))
        except (BufferError, KafkaException) as exc:
            raise NotReady(f"Kafka did not take the change: {exc}") from exc
        try:
            wait_for(lambda: kafka.poll(0.1) >= 0 and bool(outcome), PUBLISH_TIMEOUT_S, "Kafka to take it")
        except ProcessError as exc:
            raise _outcome_unknown("Kafka does not answer") from exc
        error, message = outcome[0]
        if error is None:
            partition, offset = message.partition(), message.offset()
            return (0 if partition is None else partition), (-1 if offset is None else offset)
        if error.code() in _TIMEOUTS:
            raise _outcome_unknown(error.str())
        raise NotReady(f"Kafka did not take the change: {error.str()}")

    def _producer(self) -> Producer:
        """Return the producer of registry records, which is created at the first change."""
        with self._creating:
            if self._kafka is None:
                self._kafka = producer(self._settings, **{"message.timeout.ms": DELIVERY_TIMEOUT_MS})
            return self._kafka


def _outcome_unknown(reason: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"Kafka did not confirm the change: {reason}",
        remedy="It may have taken effect or not. Repeat the call, which changes nothing if it has",
        outcome="unknown",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

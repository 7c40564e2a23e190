"""`kvstreams bridge`: publishes engines' ZMQ events to `kv-events`, and registers the engines in `workers`.

What lives here: connecting the parts of a bridge, which feeds an engine while it holds the engine's lease. What must
not: the order of batches and their incarnation (gap_filling, feed), and which bridge holds a lease (lease).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import aiohttp
import zmq
import zmq.asyncio
from confluent_kafka import KafkaException

from streams.codec import encode_worker
from streams.core.events import ResyncRequest
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.workers import Worker
from streams.cxl.pool_registry import PoolDirectory
from streams.engines.address import EngineAddress
from streams.engines.block_size import EngineBlockSize
from streams.engines.feed import RETRY_S, RankFeed
from streams.engines.feed_counters import FeedCounters
from streams.engines.lease import EngineLease
from streams.engines.lease_handle import LeaseHandle, LeaseLost
from streams.engines.polling import polled
from streams.engines.process_start import read_body
from streams.engines.publisher import event_producer
from streams.engines.pulse import Pulse
from streams.engines.recovery import RecoveredRank, recover_ranks
from streams.engines.registry_reader import RegistryReader
from streams.engines.scraping import Scraper, reported_block_size
from streams.engines.wiring import EngineWiring
from streams.errors import BlockSizeContradicted, KafkaUnreachable, KvStreamsError
from streams.kafka import worker_key
from streams.model_registry import check_model, claim_model, writer_name
from streams.outage import Outage, lasting
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

#: A stopping bridge waits this long for Kafka to acknowledge its last records.
FLUSH_TIMEOUT_S = 3.0

#: Changelogs read at the same time. Each contains the whole table of a partition, and a starting bridge reads one for
#: every engine.
RECOVERIES_AT_ONCE = 2

#: Checks of the leases per lease length; a claim is late by at most one such interval.
_TICKS_PER_LEASE = 30

#: How often a bridge checks whether a model's record, which contradicts its settings, is gone after a reset.
REFUSED_RETRY_S = 30.0

#: Feeds that Kafka refuses start again at once. If they have run for this long, Kafka takes their events.
REFUSED_FOR_S = 5.0

_HTTP_TIMEOUT = aiohttp.ClientTimeout(total=5.0)

#: Connections to one engine's HTTP server at a time; each of its ranks and the scraper needs one. There is no common
#: limit, since engines that do not answer would use it up, and the others would wait.
HTTP_CONNECTIONS_PER_ENGINE = 16

#: Threads for everything but lookups of names: recoveries, restatements and long pages.
THREADS_MIN = 8

#: Bytes of an answer of /v1/models; one with a hundred adapters has 50 KB.
MODELS_BYTES_MAX = 1024 * 1024


class Bridge:
    """Bridges any number of engines with one producer."""

    def __init__(self, settings: Settings, engines: list[EngineAddress]) -> None:
        self._settings = settings
        self._engines = engines
        self._kafka = event_producer(settings)
        # One for each engine: a context has one thread for the network, which waits for each name to be resolved.
        self._contexts = {engine.worker_id: zmq.asyncio.Context() for engine in engines}
        self._recoveries = asyncio.Semaphore(RECOVERIES_AT_ONCE)
        self.name = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._lease_handles = {engine.worker_id: self._lease_handle(engine.worker_id) for engine in engines}
        self._feeds: dict[RankId, RankFeed] = {}
        self._counters: dict[RankId, FeedCounters] = {}
        self._pools: PoolDirectory | None = None
        self._unpublished: dict[WorkerId, Outage] = {}
        self._refused_at_s: dict[WorkerId, float] = {}  # when Kafka last did not take an engine's events
        self._pulse = Pulse(self._kafka, topics(settings).worker_metrics.name, self.name, self._keeps_up)
        self._unread = {engine.worker_id for engine in engines}
        self._refused: set[WorkerId] = set()  # engines of models whose record contradicts the settings

    async def run(self) -> None:
        """Run until cancelled. Raises BlockSizeContradicted if there is no engine that it may feed."""
        contradictions: list[Exception] = []
        registry_reader = RegistryReader(self._settings, [engine.worker_id for engine in self._engines], self)
        try:
            # A lookup of a name occupies a thread, for a minute if no DNS server answers. Each engine has two names.
            threads = ThreadPoolExecutor(2 * len(self._engines) + THREADS_MIN)
            asyncio.get_running_loop().set_default_executor(threads)
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=HTTP_CONNECTIONS_PER_ENGINE)
            session = aiohttp.ClientSession(timeout=_HTTP_TIMEOUT, connector=connector)
            async with session as http, asyncio.TaskGroup() as tasks:
                tasks.create_task(registry_reader.run())
                tasks.create_task(self._tick())
                tasks.create_task(self._pulse.run())
                for engine in self._engines:
                    tasks.create_task(self._bridge(engine, http))
        except* BlockSizeContradicted as refused:
            contradictions += refused.exceptions
        finally:
            for lease_handle in self._lease_handles.values():
                lease_handle.release()
            if self._pools is not None:
                self._pools.close()
            for context in self._contexts.values():
                context.destroy(linger=0)
            log.info("stopped. Records that Kafka did not acknowledge: %d", self._kafka.flush(FLUSH_TIMEOUT_S))
        if contradictions:  # raised here, since `except*` would put it into another group
            raise contradictions[0]

    def feed_counts(self) -> Mapping[RankId, Mapping[str, int]]:
        """Return a copy of the counters of every rank that this bridge has fed, by rank and name (see FeedCounters).

        A rank's totals survive a lost lease, so none of them decreases while the process runs. Call it on the loop.
        """
        return {rank: counters.counts() for rank, counters in self._counters.items()}

    def not_ready(self) -> str | None:
        """Return why no engine can be fed yet, or None: the registry says which bridge feeds an engine."""
        if self._unread:
            return f"the registry has not been read yet for {len(self._unread)} of {len(self._engines)} engines"
        since_s = time.monotonic() - REFUSED_FOR_S
        n_refused = sum(at_s > since_s for at_s in self._refused_at_s.values())
        if n_refused:
            return f"Kafka does not take the events of {n_refused} of {len(self._engines)} engines"
        return None

    # -- called by the registry reader, on the loop --------------------------------------------------------------------

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """See registry_reader.RegistryListener."""
        self._lease_handles[worker_id].on_record(worker)

    def on_end(self, worker_ids: Collection[WorkerId]) -> None:
        """See registry_reader.RegistryListener."""
        self._unread.difference_update(worker_ids)
        for worker_id in worker_ids:
            self._lease_handles[worker_id].on_end()

    def on_resync(self, request: ResyncRequest) -> None:
        """See registry_reader.RegistryListener."""
        feed = self._feeds.get(request.rank)
        if feed is not None:  # otherwise another bridge feeds the rank, and reads the same request
            feed.request_restatement(request)

    # -- engines -------------------------------------------------------------------------------------------------------

    def _keeps_up(self) -> bool:
        """Whether no message of an engine waits in a socket, except where the rank's records say so themselves."""
        return not any(feed.has_backlog for feed in self._feeds.values())

    async def _tick(self) -> None:
        while True:
            self._kafka.poll(0)
            for lease_handle in self._lease_handles.values():
                lease_handle.tick()
            await asyncio.sleep(min(0.05, self._settings.bridge_lease_s / _TICKS_PER_LEASE))

    async def _bridge(self, engine: EngineAddress, http: aiohttp.ClientSession) -> None:
        """Claim an engine's lease once its model is known, and feed the engine whenever the lease is held.

        Whatever the engine sends, or does not send, ends nothing but this round; the other engines' tasks continue.
        """
        model = engine.model or await _await_model(http, engine)
        lease_handle = self._lease_handles[engine.worker_id]
        block_size = EngineBlockSize(self._settings.block_size_of(model))
        block_size.on_page(await reported_block_size(http, engine.metrics_url))
        await self._claim_model(engine, model, block_size)
        registration = self._registration(engine, model)

        def register() -> None:
            """Register the engine with the size that its blocks have."""
            own = replace(registration, block_size=block_size.size)
            if own.block_size != lease_handle.lease.wanted_block_size:
                if block_size.is_wrong:
                    log.warning("%s", _wrong_block_size(engine, model, block_size))
                lease_handle.lease.want(own)

        def on_page(size: int | None) -> None:
            block_size.on_page(size)
            register()

        def on_stored(size: int | None) -> None:
            if size is None:
                block_size.on_incarnation(page_is_read=self._settings.metrics_interval_s > 0)
            else:
                block_size.on_stored(size)
            register()

        register()
        while True:
            term = await lease_handle.held()
            log.info("worker %d: %s serves %s; this bridge holds term %d", engine.worker_id, engine.url, model, term)
            wiring = EngineWiring(
                self._settings,
                self._kafka,
                self._contexts[engine.worker_id],
                http,
                engine,
                model,
                lease_handle,
                term,
                self._epoch_of,
                on_page,
                on_stored,
            )
            try:
                await self._feed(wiring)
            except* LeaseLost as lost:
                log.warning("worker %d: %s", engine.worker_id, lost.exceptions[0])
            except* (KvStreamsError, KafkaException, BufferError) as refused:
                self._not_published(engine.worker_id, refused)
                await asyncio.sleep(RETRY_S)
            except* Exception:
                log.exception("worker %d: the feeds failed and start again", engine.worker_id)
                await asyncio.sleep(RETRY_S)

    def _not_published(self, worker_id: WorkerId, refused: BaseExceptionGroup[Exception]) -> None:
        """Log that Kafka does not take an engine's events, once and then once a minute; its feeds start again."""
        now_s, outage = time.monotonic(), self._unpublished.setdefault(worker_id, Outage())
        if now_s - self._refused_at_s.get(worker_id, now_s) > REFUSED_FOR_S:
            outage.answered(now_s)  # the feeds have run since the last time
        self._refused_at_s[worker_id] = now_s
        lasted_s = outage.failed(now_s)
        if lasted_s is not None:
            first: BaseException = refused
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            # As an error about Kafka, so that the line is left out while Kafka is away, which has lines of its own.
            reason = KafkaUnreachable(str(first))
            log.warning("worker %d: its events are not published: %s%s", worker_id, reason, lasting(lasted_s))

    async def _claim_model(self, engine: EngineAddress, model: str, block_size: EngineBlockSize) -> None:
        """Wait until the scope's record of the model agrees with the settings; write it if there is none.

        An engine with another size than the settings is no reason to write them: the settings may be what is wrong.
        Raises BlockSizeContradicted if this bridge has no engine left that it may feed.
        """
        while True:
            try:
                if block_size.is_wrong:
                    await asyncio.to_thread(check_model, self._settings, model)
                else:
                    await asyncio.to_thread(claim_model, self._settings, model, writer_name("bridge"))
            except BlockSizeContradicted as exc:
                if engine.worker_id not in self._refused:
                    log.error("worker %d is not fed: %s", engine.worker_id, exc)
                    self._refused.add(engine.worker_id)
                if len(self._refused) == len(self._engines):
                    raise
                await asyncio.sleep(REFUSED_RETRY_S)
            except KvStreamsError as exc:
                log.info("worker %d: the record of its model cannot be read yet: %s", engine.worker_id, exc)
                await asyncio.sleep(RETRY_S)
            else:
                self._refused.discard(engine.worker_id)
                return

    async def _feed(self, wiring: EngineWiring) -> None:
        """Feed every rank of an engine, until one of the feeds ends with an exception."""
        recovered_ranks = await self._recover(wiring.engine.worker_id)
        async with polled(wiring) as read:
            await self._feed_ranks(read, recovered_ranks)

    async def _feed_ranks(self, wiring: EngineWiring, recovered_ranks: Mapping[int, RecoveredRank]) -> None:
        feeds = [
            RankFeed(wiring, dp_rank, recovered_ranks.get(dp_rank), self._counters_of(wiring.engine.worker_id, dp_rank))
            for dp_rank in range(wiring.engine.dp_size)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in feeds:
                    self._feeds[feed.rank] = feed
                    tasks.create_task(feed.run())
                tasks.create_task(
                    Scraper(wiring, lambda dp_rank: feeds[dp_rank].note_requests_running()).run(),
                )
        finally:
            for feed in feeds:
                self._feeds.pop(feed.rank, None)

    def _counters_of(self, worker_id: WorkerId, dp_rank: int) -> FeedCounters:
        return self._counters.setdefault(RankId(worker_id, DpRank(dp_rank)), FeedCounters())

    def _epoch_of(self, pool_id: str) -> int:
        """Return a CXL pool's epoch; the registry's pools are read when the first engine names one."""
        if self._pools is None:
            self._pools = PoolDirectory(self._settings)
        return self._pools.epoch_of(pool_id)

    async def _recover(self, worker_id: WorkerId) -> dict[int, RecoveredRank]:
        """Read the state of a worker's ranks from Kafka, once Kafka has everything that this process published."""
        async with self._recoveries:
            left = await asyncio.to_thread(self._kafka.flush, FLUSH_TIMEOUT_S)
            if left:
                raise KvStreamsError(f"Kafka has not taken {left} records yet")
            try:
                return await asyncio.to_thread(recover_ranks, self._settings, worker_id)
            except KafkaException as exc:
                raise KvStreamsError(f"the table cannot be read: {exc.args[0].str()}") from exc

    def _lease_handle(self, worker_id: WorkerId) -> LeaseHandle:
        topic, key = topics(self._settings).workers.name, worker_key(worker_id)

        def write(worker: Worker | None) -> None:
            try:
                self._kafka.produce(topic, key=key, value=None if worker is None else encode_worker(worker))
            # Kafka does not answer, or the topic was deleted. The lease expires, and is claimed again afterwards.
            except (BufferError, KafkaException) as exc:
                log.debug("worker %d: the lease was not written: %s", worker_id, exc)

        return LeaseHandle(EngineLease(self.name, self._settings.bridge_lease_s), write)

    def _registration(self, engine: EngineAddress, model: str) -> Worker:
        return Worker(
            worker_id=engine.worker_id,
            url=engine.url,
            model=model,
            block_size=self._settings.block_size_of(model),
            dp_size=engine.dp_size,
            events_endpoint=engine.events,
            replay_endpoint=engine.replay,
            lora_names=engine.lora_names,
            registered_at_ms=time.time_ns() // 1_000_000,
        )


def _wrong_block_size(engine: EngineAddress, model: str, block_size: EngineBlockSize) -> str:
    return (
        f"worker {engine.worker_id}: the engine at {engine.url} has blocks of {block_size.size} tokens, but this scope "
        f"has blocks of {block_size.scope} for {model}. The engine gets no requests. Restart it with "
        f"--block-size {block_size.scope}, or set block_size or model_block_sizes in every process of the scope"
    )


async def _await_model(http: aiohttp.ClientSession, engine: EngineAddress) -> str:
    """Ask an engine which model it serves, until it answers."""
    outage = Outage()
    while True:
        try:
            model = await _served_model(http, engine.models_url)
        except Exception as exc:  # whatever an HTTP server sends, it must not end the bridge
            lasted_s = outage.failed(time.monotonic())
            if lasted_s is not None:
                log.warning(
                    "worker %d: %s does not name the engine's model, so the engine is not fed: %s%s. "
                    "To feed it from its events alone, add model=NAME to its --engine",
                    engine.worker_id,
                    engine.models_url,
                    str(exc) or repr(exc),
                    lasting(lasted_s),
                )
            await asyncio.sleep(RETRY_S)
            continue
        lasted_s = outage.answered(time.monotonic())
        if lasted_s is not None:
            log.info("worker %d: %s answers after %.0f s", engine.worker_id, engine.url, lasted_s)
        return model


async def _served_model(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url) as response:
        response.raise_for_status()
        body = await read_body(response, MODELS_BYTES_MAX)
    return first_model(body)


def first_model(body: bytes) -> str:
    """Return the id of the first model in an answer of /v1/models. Raises KvStreamsError for any other answer."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise KvStreamsError("the answer is not JSON") from exc
    models = answer.get("data") if isinstance(answer, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name:
        raise KvStreamsError("the answer names no model")
    if not name.isprintable():
        raise KvStreamsError(f"the answer names the model {name!r}, which contains control characters")
    return name

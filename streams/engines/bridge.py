"""`kvstreams bridge`: publishes engines' ZMQ events to `kv-events`, and registers the engines in `workers`.

What lives here: the set of a bridge's engines, which follows its sources, and what they share. What must not: feeding
one engine (bridged_engine), and where lists of engines come from (sources).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohttp

from streams.core.events import ResyncRequest
from streams.core.ids import RankId, WorkerId
from streams.core.workers import Worker
from streams.cxl.pool_registry import PoolDirectory
from streams.engines.acknowledgements import tolerated_s
from streams.engines.address import EngineAddress
from streams.engines.bridged_engine import FLUSH_TIMEOUT_S, BridgedEngine, BridgeParts
from streams.engines.connection import receive_hwm, shared_context
from streams.engines.feed_counters import RankCounters
from streams.engines.pooled_rows import read_pooled
from streams.engines.pulse import Pulse
from streams.engines.rank_records import BUFFERED_RECORDS_MAX, event_producer
from streams.engines.recovery import recover_workers
from streams.engines.registry_reader import RegistryReader
from streams.engines.shared_calls import SharedCalls
from streams.engines.socket_watch import SocketWatch
from streams.engines.sources.interface import ENGINES_MAX, EngineSource, MergedEngines
from streams.engines.sources.registry import RegistryEngines
from streams.errors import BlockSizeContradicted
from streams.kafka.outage import Outage, lasting
from streams.lmcache.bridge import LmcacheBridge
from streams.lmcache.counters import LmcacheCounts
from streams.lmcache.event_log import LmcacheSource
from streams.model_registry import check_model, claim_model, writer_name
from streams.process.interpreter import collect_by_the_clock
from streams.settings import BridgeSettings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Partitions read at the same time, each with its whole changelog. A bridge that starts reads all of them.
READS_AT_ONCE = 2

#: Models claimed at the same time; each claim reads a partition of the registry.
CLAIMS_AT_ONCE = 2

#: Checks of the leases per lease length; a claim is late by at most one such interval.
_TICKS_PER_LEASE = 30

#: Leases claimed or renewed in one go, while batches wait. Engines that started together renew theirs together.
ENGINES_AT_ONCE = 16

_HTTP_TIMEOUT = aiohttp.ClientTimeout(total=5.0)

#: Connections to one engine's HTTP server at a time; each of its ranks and the scraper needs one. There is no common
#: limit, since engines that do not answer would use it up, and the others would wait.
HTTP_CONNECTIONS_PER_ENGINE = 16

#: Threads, which are started when they are needed. A lookup of a name occupies one, for a minute if no DNS server
#: answers, and each engine has two names; the others are for recoveries, restatements and long pages.
THREADS_MAX = 2 * ENGINES_MAX + 8


class Bridge:
    """Bridges the engines of its sources, and the instances of LMCache, with one producer."""

    def __init__(
        self, settings: BridgeSettings, sources: Sequence[EngineSource], lmcache: LmcacheSource | None = None
    ) -> None:
        self._settings = settings
        self._sources = tuple(sources)
        self._merged = MergedEngines(len(sources))
        self._kafka = event_producer(settings)
        self.name = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._engines: dict[WorkerId, BridgedEngine] = {}
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._renewals = 0  # the greatest number of a lease's write of an engine that was released
        #: Of every rank that this bridge has fed; its methods are called on the loop. A rank's totals survive a lost
        #: lease, so none of them decreases while the process runs.
        self.counters = RankCounters()
        self._pools: PoolDirectory | None = None
        self._refused: dict[WorkerId, BlockSizeContradicted] = {}  # engines whose model contradicts the settings
        self._slow_kafka = Outage()
        self._watch = SocketWatch()
        self._context = shared_context()
        self._pulse = Pulse(
            self._kafka,
            topics(settings).worker_metrics.name,
            self.name,
            self._keeps_up,
            self._fed,
            tolerated_s(settings),
        )
        self._registry_sources = [source for source in sources if isinstance(source, RegistryEngines)]
        for source in self._registry_sources:
            source.name_bridge(self.name)
        self._lmcache = None if lmcache is None else LmcacheBridge(settings, lmcache, self._kafka, self.name)
        of_all_workers = bool(self._registry_sources) or lmcache is not None
        self._registry = RegistryReader(settings, self, of_all_workers=of_all_workers)
        self._changes: asyncio.Queue[tuple[int, Sequence[EngineAddress]]] = asyncio.Queue()

    async def run(self) -> None:
        """Run until cancelled. Raises BlockSizeContradicted if there is no engine that it may feed."""
        contradictions: list[Exception] = []
        try:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS_MAX))
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=HTTP_CONNECTIONS_PER_ENGINE)
            session = aiohttp.ClientSession(timeout=_HTTP_TIMEOUT, connector=connector)
            async with session as http, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._registry.run())
                tasks.create_task(self._tick())
                tasks.create_task(self._pulse.run())
                tasks.create_task(collect_by_the_clock())
                if self._lmcache is not None:
                    tasks.create_task(self._lmcache.run())
                tasks.create_task(self._follow(self._parts(http), tasks))
                for number, source in enumerate(self._sources):
                    tasks.create_task(source.run(partial(self._note, number)))
        except* BlockSizeContradicted as refused:
            contradictions += refused.exceptions
        finally:
            for bridged in self._engines.values():
                bridged.release()
            self._context.destroy(linger=0)
            if self._pools is not None:
                self._pools.close()
            log.info("stopped. Records that Kafka did not acknowledge: %d", self._kafka.flush(FLUSH_TIMEOUT_S))
        if contradictions:  # raised here, since `except*` would put it into another group
            raise contradictions[0]

    @property
    def n_engines(self) -> int:
        """The number of engines that its sources name."""
        return len(self._engines)

    @property
    def n_buffered(self) -> int:
        """The number of records that Kafka has not acknowledged."""
        return len(self._kafka)

    @property
    def lmcache_counts(self) -> LmcacheCounts | None:
        """What was counted of LMCache's events; None if this bridge reads none."""
        return None if self._lmcache is None else self._lmcache.counts()

    def not_ready(self) -> str | None:
        """Return why no engine can be fed yet, or None: the registry says which bridge feeds an engine."""
        if self._merged.n_unread:
            return f"{self._merged.n_unread} of {len(self._sources)} sources of engines have not been read yet"
        engines, now_s = self._engines.values(), time.monotonic()
        n_unread = sum(not bridged.is_read for bridged in engines)
        if n_unread:
            return f"the registry has not been read yet for {n_unread} of {len(engines)} engines"
        n_refused = sum(bridged.is_refused_by_kafka(now_s) for bridged in engines)
        if n_refused:
            return f"Kafka does not take the events of {n_refused} of {len(engines)} engines"
        return None

    # -- called by the registry reader, on the loop --------------------------------------------------------------------

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """See registry_reader.RegistryListener."""
        bridged = self._engines.get(worker_id)
        if bridged is not None:
            bridged.lease_handle.on_record(worker)

    def on_end(self, worker_ids: Collection[WorkerId]) -> None:
        """See registry_reader.RegistryListener."""
        for worker_id in worker_ids:
            bridged = self._engines.get(worker_id)
            if bridged is not None:
                bridged.is_read = True
                bridged.lease_handle.on_end()

    def on_resync(self, request: ResyncRequest) -> None:
        """See registry_reader.RegistryListener."""
        bridged = self._engines.get(request.rank.worker_id)
        if bridged is not None:
            bridged.on_resync(request)

    def on_any_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """See registry_reader.RegistryListener."""
        for source in self._registry_sources:
            source.on_worker(worker_id, worker)
        if self._lmcache is not None:
            self._lmcache.on_worker(worker_id, worker)

    def on_record(self, key: bytes, value: bytes | None) -> None:
        """See registry_reader.RegistryListener."""
        if self._lmcache is not None:
            self._lmcache.on_record(key, value)

    def on_registry_read(self) -> None:
        """See registry_reader.RegistryListener."""
        if self._lmcache is not None:
            self._lmcache.on_registry_read()
        for source in self._registry_sources:
            source.on_end()

    # -- engines -------------------------------------------------------------------------------------------------------

    def _note(self, source: int, engines: Sequence[EngineAddress]) -> None:
        """Take a source's list of engines; `_follow` acts on it."""
        self._changes.put_nowait((source, engines))

    async def _follow(self, parts: BridgeParts, tasks: asyncio.TaskGroup) -> None:
        """Add and remove engines as the sources say."""
        while True:
            source, engines = await self._changes.get()
            wanted = self._merged.replace(source, engines)
            for worker_id, bridged in list(self._engines.items()):
                if wanted.get(worker_id) != bridged.engine:
                    await self._remove(bridged, str(self._sources[source]))
            for worker_id, engine in wanted.items():
                if worker_id not in self._engines:
                    self._add(parts, engine, tasks)

    def _add(self, parts: BridgeParts, engine: EngineAddress, tasks: asyncio.TaskGroup) -> None:
        bridged = BridgedEngine(parts, engine, self._renewals)
        self._engines[engine.worker_id] = bridged
        self._tasks[engine.worker_id] = tasks.create_task(bridged.run())
        self._registry.watch(engine.worker_id)

    async def _remove(self, bridged: BridgedEngine, source: str) -> None:
        """Release an engine. Its worker stays registered; after `worker_grace_s` without a bridge, its blocks go."""
        worker_id = bridged.engine.worker_id
        log.info("worker %d: %s no longer has the engine at %s; it is released", worker_id, source, bridged.engine.url)
        await bridged.finish()
        bridged.retire(f"{source} no longer has it")
        task = self._tasks.pop(worker_id)
        task.cancel()
        await asyncio.wait([task])
        bridged.release()
        self._registry.unwatch(worker_id)
        # Another bridge would take a smaller number than it has read from this process for an operator's record.
        self._renewals = max(self._renewals, bridged.lease_handle.lease.renewal + 1)
        self._refused.pop(worker_id, None)
        for socket in range(bridged.engine.dp_size):
            self.counters.release(RankId(worker_id, bridged.ranks.of(socket)))
        del self._engines[worker_id]

    def _parts(self, http: aiohttp.ClientSession) -> BridgeParts:
        reads = asyncio.Semaphore(READS_AT_ONCE)
        return BridgeParts(
            self._settings,
            self._kafka,
            self.name,
            http,
            SharedCalls(partial(recover_workers, self._settings), reads),
            SharedCalls(self._claim_model, asyncio.Semaphore(CLAIMS_AT_ONCE)),
            SharedCalls(partial(read_pooled, self._settings), reads),
            self.counters,
            Counter(),
            self._epoch_of,
            self._receive_hwm,
            self._note_refused,
            self._watch,
            self._context,
        )

    def _claim_model(self, model: tuple[str, bool], worker_ids: Collection[WorkerId]) -> Mapping[WorkerId, None]:
        """See BridgeParts. Blocks."""
        name, writes = model
        if writes:
            claim_model(self._settings, name, writer_name("bridge"))
        else:
            check_model(self._settings, name)
        return dict.fromkeys(worker_ids)

    def _receive_hwm(self) -> int:
        return receive_hwm(sum(bridged.engine.dp_size for bridged in self._engines.values()))

    def _note_refused(self, worker_id: WorkerId, refused: BlockSizeContradicted | None) -> None:
        """See BridgeParts. Raises BlockSizeContradicted if no engine can ever be fed."""
        if refused is None:
            self._refused.pop(worker_id, None)
            return
        self._refused[worker_id] = refused
        if len(self._refused) == len(self._engines) and all(source.is_fixed for source in self._sources):
            raise refused

    def _keeps_up(self) -> bool:
        """Whether no message of an engine waits in a socket, except where the rank's records say so themselves."""
        self._watch.poll()  # what arrived since the last poll would otherwise not be seen
        if self._watch.is_cut_short:
            return False
        return not any(bridged.has_backlog for bridged in self._engines.values())

    def _fed(self) -> list[WorkerId]:
        """Return the workers whose events are passed on, for the pulse."""
        now_s = time.monotonic()
        fed = [worker_id for worker_id, bridged in self._engines.items() if bridged.is_fed(now_s)]
        return fed if self._lmcache is None else [*fed, *self._lmcache.fed()]

    async def _tick(self) -> None:
        while True:
            self._kafka.poll(0)
            self._log_if_kafka_is_slow()
            for number, bridged in enumerate(list(self._engines.values()), 1):
                bridged.lease_handle.tick()
                if number % ENGINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(min(0.05, self._settings.bridge_lease_s / _TICKS_PER_LEASE))

    def _log_if_kafka_is_slow(self) -> None:
        """Log that the engines' batches wait for Kafka, once and then once a minute."""
        now_s = time.monotonic()
        if len(self._kafka) < BUFFERED_RECORDS_MAX // 2 and not self._slow_kafka.is_running:
            return
        if any(bridged.is_refused_by_kafka(now_s) for bridged in self._engines.values()):
            lasted_s = self._slow_kafka.failed(now_s)
            if lasted_s is not None:
                log.warning(
                    "Kafka takes fewer events than the engines send: %d records wait here, and further batches wait in "
                    "the engines' sockets%s",
                    len(self._kafka),
                    lasting(lasted_s),
                )
        elif (lasted_s := self._slow_kafka.answered(now_s)) is not None:
            log.info("Kafka has taken the events that waited, after %.0f s", lasted_s)

    def _epoch_of(self, pool_id: str) -> int:
        """Return a CXL pool's epoch; the registry's pools are read when the first engine names one."""
        if self._pools is None:
            self._pools = PoolDirectory(self._settings)
        return self._pools.epoch_of(pool_id)

"""`kvstreams bridge`: engines' ZMQ events to `kv-events`, and the engines themselves to `workers`.

What lives here: the parts of a bridge, joined; an engine is fed while this bridge holds its lease. What must not: the
order of batches and which life they belong to (feed), and who holds a lease (lease).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Collection
from urllib.parse import urlsplit

import aiohttp
import zmq
import zmq.asyncio
from confluent_kafka import KafkaException

from streams.codec import encode_worker
from streams.core.events import ResyncRequest
from streams.core.ids import U64_MASK, RankId, WorkerId
from streams.core.workers import DP_SIZE_MAX, Worker
from streams.cxl.pool_registry import PoolDirectory
from streams.engines.feed import RETRY_S, EngineAddress, FeedWiring, RankFeed
from streams.engines.lease import EngineLease
from streams.engines.lease_handle import LeaseHandle, LeaseLost
from streams.engines.publisher import event_producer
from streams.engines.recovery import RecoveredRank, recover_ranks
from streams.engines.registry_reader import RegistryReader
from streams.engines.scraping import Scraper
from streams.errors import KvStreamsError, SettingsError
from streams.kafka import worker_key
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

#: What a stopping bridge still says must reach Kafka within this.
FLUSH_TIMEOUT_S = 3.0

#: Changelogs read at once. Each is a partition's whole table; a bridge that starts has many engines to look up.
RECOVERIES_AT_ONCE = 2

#: Leases are looked at this often within one: a claim comes this much late at most.
_TICKS_PER_LEASE = 30

#: What each address of an engine may begin with, and what one looks like.
_SCHEMES = {
    "url": (("http", "https"), "http://HOST:PORT"),
    "metrics": (("http", "https"), "http://HOST:PORT/metrics"),
    "events": (("tcp", "ipc"), "tcp://HOST:PORT"),
    "replay": (("tcp", "ipc"), "tcp://HOST:PORT"),
}

_HTTP_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class Bridge:
    """Bridges any number of engines with one producer."""

    def __init__(self, settings: Settings, engines: list[EngineAddress]) -> None:
        self._settings = settings
        self._engines = engines
        self._kafka = event_producer(settings)
        self._context = zmq.asyncio.Context()
        self._recoveries = asyncio.Semaphore(RECOVERIES_AT_ONCE)
        self.name = f"{os.uname().nodename}:{os.getpid()}:{secrets.token_hex(4)}"
        self._lease_handles = {engine.worker_id: self._lease_handle(engine.worker_id) for engine in engines}
        self._feeds: dict[RankId, RankFeed] = {}
        self._pools: PoolDirectory | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        registry_reader = RegistryReader(self._settings, [engine.worker_id for engine in self._engines], self)
        try:
            async with aiohttp.ClientSession(timeout=_HTTP_TIMEOUT) as http, asyncio.TaskGroup() as tasks:
                tasks.create_task(registry_reader.run())
                tasks.create_task(self._tick())
                for engine in self._engines:
                    tasks.create_task(self._bridge(engine, http))
        finally:
            for lease_handle in self._lease_handles.values():
                lease_handle.release()
            if self._pools is not None:
                self._pools.close()
            self._context.destroy(linger=0)
            self._kafka.flush(FLUSH_TIMEOUT_S)

    # -- told by the inbox, on the loop --------------------------------------------------------------------------------

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """See inbox.Reader."""
        self._lease_handles[worker_id].on_record(worker)

    def on_end(self, worker_ids: Collection[WorkerId]) -> None:
        """See inbox.Reader."""
        for worker_id in worker_ids:
            self._lease_handles[worker_id].on_end()

    def on_resync(self, request: ResyncRequest) -> None:
        """See inbox.Reader."""
        feed = self._feeds.get(request.rank)
        if feed is not None:  # else another bridge feeds it, and is asked by the same record
            feed.ask(request)

    # -- engines -------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            self._kafka.poll(0)
            for lease_handle in self._lease_handles.values():
                lease_handle.tick()
            await asyncio.sleep(min(0.05, self._settings.bridge_lease_s / _TICKS_PER_LEASE))

    async def _bridge(self, engine: EngineAddress, http: aiohttp.ClientSession) -> None:
        """Want an engine's lease as soon as the engine answers, and feed it whenever that is held."""
        while True:
            try:
                model = engine.model or await _served_model(http, engine.url)
                break
            except (aiohttp.ClientError, TimeoutError, KvStreamsError) as exc:
                log.info("worker %d at %s does not answer yet: %s", engine.worker_id, engine.url, exc)
                await asyncio.sleep(RETRY_S)
        lease_handle = self._lease_handles[engine.worker_id]
        lease_handle.lease.want(self._registration(engine, model))
        while True:
            term = await lease_handle.held()
            log.info("worker %d: %s serves %s; term %d is ours", engine.worker_id, engine.url, model, term)
            wiring = FeedWiring(
                self._settings, self._kafka, self._context, http, engine, model, lease_handle, term, self._epoch_of
            )
            try:
                await self._feed(wiring)
            except* LeaseLost as lost:
                log.warning("worker %d: %s", engine.worker_id, lost.exceptions[0])
            except* Exception:
                log.exception("worker %d: the feeds begin again", engine.worker_id)
                await asyncio.sleep(RETRY_S)

    async def _feed(self, wiring: FeedWiring) -> None:
        """Feed every rank of an engine until one cannot be fed any more."""
        recovered_ranks = await self._recover(wiring.engine.worker_id)
        feeds = [RankFeed(wiring, rank, recovered_ranks.get(rank)) for rank in range(wiring.engine.dp_size)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in feeds:
                    self._feeds[feed.rank] = feed
                    tasks.create_task(feed.run())
                tasks.create_task(Scraper(wiring).run())
        finally:
            for feed in feeds:
                self._feeds.pop(feed.rank, None)

    def _epoch_of(self, pool_id: str) -> int:
        """A CXL pool's epoch; the registry's pools are read when the first engine names one."""
        if self._pools is None:
            self._pools = PoolDirectory(self._settings)
        return self._pools.epoch_of(pool_id)

    async def _recover(self, worker_id: WorkerId) -> dict[int, RecoveredRank]:
        """What Kafka has of a worker, after everything that this process has said of it."""
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
            except BufferError as exc:  # Kafka is away; the lease runs out, and is claimed again when it is back
                log.warning("worker %d: the lease is not written: %s", worker_id, exc)

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
            registered_at_ms=time.time_ns() // 1_000_000,
        )


async def _served_model(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        models = (await response.json()).get("data") or []
    if not models:
        raise KvStreamsError(f"{url} serves no model")
    return str(models[0]["id"])


def engine_address(text: str) -> EngineAddress:
    """Read `id=1,url=…,events=…[,replay=…][,dp=…][,model=…][,metrics=…]`; raises SettingsError naming what is wrong."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = parts.keys() - {"id", "url", "events", "replay", "dp", "model", "metrics"}
    missing = {"id", "url", "events"} - {name for name, value in parts.items() if value}
    if unknown or missing:
        words = [f"{', '.join(sorted(missing))} missing"] if missing else []
        words += [f"{', '.join(sorted(unknown))} unknown"] if unknown else []
        raise SettingsError(f"--engine {text!r}: {'; '.join(words)}")
    try:
        worker_id, dp_size = int(parts["id"]), int(parts.get("dp", "1"))
    except ValueError as exc:
        raise SettingsError(f"--engine {text!r}: id and dp are whole numbers") from exc
    if not 0 <= worker_id <= U64_MASK or not 1 <= dp_size <= DP_SIZE_MAX:
        raise SettingsError(f"--engine {text!r}: id is 0 to 2^64-1, dp 1 to {DP_SIZE_MAX}")
    _check_urls(text, parts)
    return EngineAddress(
        worker_id=WorkerId(worker_id),
        url=parts["url"].rstrip("/"),
        events=parts["events"],
        replay=parts.get("replay") or None,
        dp_size=dp_size,
        model=parts.get("model") or None,
        metrics=parts.get("metrics") or None,
    )


def _check_urls(text: str, parts: dict[str, str]) -> None:
    """Raise SettingsError for an address that no client could use: each would try it for ever, and say so each time."""
    for name, (schemes, example) in _SCHEMES.items():
        value = parts.get(name)
        if not value:
            continue
        try:
            url = urlsplit(value)
            fits = url.scheme in schemes and (url.scheme == "ipc" or bool(url.hostname))
            # ZMQ has no port of its own for a scheme; asking for one that is no number raises.
            fits = fits and (url.port is not None or url.scheme != "tcp")
        except ValueError:
            fits = False
        if not fits:
            raise SettingsError(f"--engine {text!r}: {name} is {value!r}", remedy=f"It looks like {example}")

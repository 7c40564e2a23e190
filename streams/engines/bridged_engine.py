"""One engine of a bridge: claiming its lease, registering it, and feeding its ranks while the lease is held.

What lives here: connecting the parts that feed one engine. What must not: which engines a bridge has (bridge, sources),
the order of batches and their incarnation (gap_filling, feed), and which bridge holds a lease (lease).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import aiohttp
import zmq.asyncio
from confluent_kafka import KafkaException, Producer

from streams.core.events import ResyncRequest
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.core.workers import Worker
from streams.engines.address import EngineAddress, needs_lookup
from streams.engines.batch_publishing import FULL_S
from streams.engines.block_size import EngineBlockSize
from streams.engines.cxl_names import PooledRows
from streams.engines.engine_http import engine_session
from streams.engines.engine_ranks import EngineRanks, RanksMoved
from streams.engines.eventless_feed import EventlessFeed
from streams.engines.feed import RankFeed
from streams.engines.feed_counters import FeedCounters, RankCounters
from streams.engines.feed_machine import RETRY_S
from streams.engines.lease import EngineLease, LeasePhase
from streams.engines.lease_handle import LeaseHandle, LeaseLost
from streams.engines.metrics import parse_block_size, ranks_on_page
from streams.engines.model_list import ModelEntry, model_entries, names_of
from streams.engines.polling import polled
from streams.engines.process_start import ListedModel, ModelChanged, read_models, refuses_connections
from streams.engines.recovery import RecoveredRank
from streams.engines.registration import Registration
from streams.engines.scraping import Scraper, first_page
from streams.engines.shared_calls import SharedCalls
from streams.engines.socket_watch import SocketWatch
from streams.engines.wiring import EngineWiring
from streams.errors import BlockSizeContradicted, KafkaUnreachable, KvStreamsError
from streams.kafka.clients import partition_of, worker_key
from streams.kafka.outage import Outage, lasting
from streams.kafka.records import RENDER_PARITIES, encode_worker
from streams.settings import BridgeSettings
from streams.topics import topics

log = logging.getLogger(__name__)

#: A bridge waits this long for Kafka to acknowledge its last records, when it stops and before it reads a table.
FLUSH_TIMEOUT_S = 3.0

#: How often a bridge checks whether a model's record, which contradicts its settings, is gone after a reset.
REFUSED_RETRY_S = 30.0

#: Feeds that Kafka refuses start again at once. If they have run for this long, Kafka takes their events.
REFUSED_FOR_S = 5.0

#: How often a bridge that waits for an engine's lease checks which model the engine serves. Such a bridge has no feed
#: that finds out when the engine is restarted, and would register it under the model of before when it takes over.
STANDBY_CHECK_S = 10.0

#: Engines whose model changes more often than this are fed again after a pause. An address behind which several engines
#: answer in turn would otherwise begin incarnations as fast as Kafka takes them.
MODEL_CHANGES_S = 30.0


@dataclass(frozen=True, slots=True)
class BridgeParts:
    """What the engines of one bridge share.

    name: the bridge's. recoveries: reads the ranks of the workers of a partition. models: claims a model, or only
    checks its record if the second part of the key is False. pooled: reads the rows of the workers of a partition in
    the agents' table of pooled blocks. counters: of every rank, which outlive their feeds. in_flight: see RankRecords.
    epoch_of: returns a CXL pool's epoch. receive_hwm: see EngineWiring. refused: called when the block size of an
    engine's model contradicts the scope's, with the contradiction, and with None when it no longer does; raises if the
    bridge shall end. watch: of all event sockets. context: of the engines whose addresses need no lookup.
    """

    settings: BridgeSettings
    kafka: Producer
    name: str
    http: aiohttp.ClientSession
    recoveries: SharedCalls[int, dict[int, RecoveredRank]]
    models: SharedCalls[tuple[str, bool], None]
    pooled: SharedCalls[int, Mapping[RankId, PooledRows]]
    counters: RankCounters
    in_flight: Counter[WorkerId]
    epoch_of: Callable[[str], int]
    receive_hwm: Callable[[], int]
    refused: Callable[[WorkerId, BlockSizeContradicted | None], None]
    watch: SocketWatch
    context: zmq.asyncio.Context


class BridgedEngine:
    """One engine, for as long as the bridge's sources name it."""

    def __init__(self, parts: BridgeParts, engine: EngineAddress, renewal: int) -> None:
        """renewal: see EngineLease."""
        self.engine = engine
        self._parts = parts
        self._http = engine_session(parts.http, engine)
        self._settings = parts.settings
        self._kafka = parts.kafka
        # A context has one thread for the network, which waits for each name to be resolved. So an engine with a name
        # has a context of its own. All others share one: hundreds of threads, each woken up by every message of its
        # engine, cost more than a single one.
        self._own_context = zmq.asyncio.Context() if needs_lookup(engine) else None
        self._context = self._own_context or parts.context
        self.lease_handle = self._lease_handle(renewal)
        #: Which rank each of the engine's sockets has.
        self.ranks = EngineRanks(engine.dp_size, engine.dp_start)
        self._feeds: dict[RankId, RankFeed] = {}
        self._eventless: EventlessFeed | None = None
        self._unpublished = Outage()
        self._refused_at_s: float | None = None  # when Kafka last did not take the engine's events
        self._model_changed_at_s = float("-inf")
        #: Whether the registry has been read to its end for this engine.
        self.is_read = False

    def on_resync(self, request: ResyncRequest) -> None:
        """Pass a partition owner's request on to the feed of its rank."""
        feed = self._feeds.get(request.rank)
        if feed is not None:  # otherwise another bridge feeds the rank, and reads the same request
            feed.request_restatement(request)
        elif self._eventless is not None:
            self._eventless.restate(request)

    @property
    def has_backlog(self) -> bool:
        """Whether a message waits in a socket, except where the rank's records say so themselves."""
        return any(feed.has_backlog for feed in self._feeds.values())

    def is_fed(self, now_s: float) -> bool:
        """Whether each rank has a feed that passes its events on (see RankFeed.passes_on).

        None has while this bridge waits for the lease, reads the ranks' state from Kafka, or waits after a failure.
        """
        feeds = [self._eventless] if self._eventless is not None else list(self._feeds.values())
        return bool(feeds) and all(feed.passes_on(now_s) for feed in feeds)

    def is_refused_by_kafka(self, now_s: float) -> bool:
        """Whether Kafka does not take the engine's events."""
        refused = self._refused_at_s is not None and now_s - self._refused_at_s < REFUSED_FOR_S
        return refused or any(feed.has_waited_for_kafka(now_s, REFUSED_FOR_S) for feed in self._feeds.values())

    def release(self) -> None:
        """Give the lease up, and free the sockets. The engine's task has ended."""
        self.lease_handle.release()
        self._http.detach()  # the connections are the bridge's
        if self._own_context is not None:
            self._own_context.destroy(linger=0)

    async def finish(self) -> None:
        """Wait a short time until what the engine has sent is on its way to Kafka, before its feeds end."""
        await asyncio.gather(*(feed.finish() for feed in self._feeds.values()))

    def retire(self, reason: str) -> None:
        """Let the engine's ranks get no requests from now on, since the bridge has no such engine any more."""
        for feed in self._feeds.values():
            feed.retire(reason)
        if self._eventless is not None:
            self._eventless.retire(reason)

    async def run(self) -> None:
        """Claim the engine's lease once its model is known, and feed the engine whenever the lease is held.

        Whatever the engine sends, or does not send, ends nothing but this round; the other engines' tasks continue.
        """
        model = self.engine.model or await self._listed_model()
        while True:
            other = await self._run_model(model)
            now_s = time.monotonic()
            log.warning(
                "worker %d: the engine at %s was restarted with another model: it serves %s, not %s. From now on, this "
                "bridge registers and feeds it under the new model",
                self.engine.worker_id,
                self.engine.url,
                other,
                model,
            )
            if now_s - self._model_changed_at_s < MODEL_CHANGES_S:
                await asyncio.sleep(RETRY_S)
            model, self._model_changed_at_s = other, now_s

    async def _run_model(self, model: str) -> str:
        """Register and feed the engine under a model, until it serves another one; return that."""
        engine, http, lease_handle = self.engine, self._http, self.lease_handle
        block_size = EngineBlockSize(self._settings.block_size_of(model))
        registration = Registration(engine, model, block_size, self.ranks, lease_handle.lease)
        served = ListedModel(
            http, engine.worker_id, engine.models_url, model, registration.on_list, is_set=engine.model is not None
        )
        page = await first_page(http, engine.metrics_url)
        block_size.on_page(parse_block_size(page))
        self.ranks.on_page(ranks_on_page(page))
        await self._claim_model(model, block_size)
        other = await served.ask_once()
        if other is not None:
            return other
        await self._accepts_requests()
        registration.renew()
        # A bridge that holds the lease already writes the registration now. At its next tick, the records of another
        # model's blocks might precede it, and routers would take the blocks for those of the model of before.
        lease_handle.tick()
        while True:
            term, other = await self._held(served)
            if other is not None:
                return other
            log.info("worker %d: %s serves %s; this bridge holds term %d", engine.worker_id, engine.url, model, term)
            wiring = EngineWiring(
                self._settings,
                self._kafka,
                self._context,
                http,
                engine,
                model,
                lease_handle,
                term,
                self._parts.epoch_of,
                registration.on_page_block_size,
                partial(registration.on_stored_block_size, page_is_read=self._settings.metrics_interval_s > 0),
                self._parts.receive_hwm,
                self._read_pooled,
                self._parts.in_flight,
                self._parts.watch,
                ranks=self.ranks,
            )
            try:
                await self._feed(wiring, served)
            except* ModelChanged as changed:
                other = cast(ModelChanged, _first(changed)).model
            except* RanksMoved as moved:
                log.warning("worker %d: %s. Its feeds start again with these ranks", engine.worker_id, _first(moved))
                registration.renew()
                lease_handle.tick()
            except* LeaseLost as lost:
                log.warning("worker %d: %s", engine.worker_id, _first(lost))
            except* (KvStreamsError, KafkaException, BufferError) as refused:
                self._not_published(refused)
                await asyncio.sleep(RETRY_S)
            except* Exception:
                log.exception("worker %d: the feeds failed and start again", engine.worker_id)
                await asyncio.sleep(RETRY_S)
            if other is not None:
                return other

    async def _listed_model(self) -> str:
        """Return the engine's model: that of its names which the registry has, so that their order does not matter."""
        entries = await _await_list(self._http, self.engine)
        lease = self.lease_handle.lease
        while lease.phase is LeasePhase.READING:  # nothing could be registered before
            await asyncio.sleep(FULL_S)
        first, registered = entries[0].name, lease.registered_model
        return registered if registered in names_of(entries, first) else first

    async def _accepts_requests(self) -> None:
        """Wait while a worker that is not registered yet refuses connections: as soon as it is, it gets requests.

        A registered worker's feeds find that out, and state it.
        """
        lease, url, outage = self.lease_handle.lease, self.engine.models_url, Outage()
        while lease.registered_model is None and await refuses_connections(self._http, url):
            if outage.failed(time.monotonic()) is not None:
                log.info("worker %d: it is registered once %s accepts connections", self.engine.worker_id, url)
            await asyncio.sleep(RETRY_S)

    async def _held(self, served: ListedModel) -> tuple[int, str | None]:
        """Wait until this bridge holds the lease, or the engine serves another model.

        Returns the lease's term, and the other model or None.
        """
        while True:
            try:
                async with asyncio.timeout(STANDBY_CHECK_S):
                    return await self.lease_handle.held(), None
            except TimeoutError:
                other = await served.ask_once()
                if other is not None:
                    return self.lease_handle.lease.term, other

    def _not_published(self, refused: BaseExceptionGroup[Exception]) -> None:
        """Log that Kafka does not take the engine's events, once and then once a minute; its feeds start again."""
        now_s, outage = time.monotonic(), self._unpublished
        if self._refused_at_s is not None and now_s - self._refused_at_s > REFUSED_FOR_S:
            outage.answered(now_s)  # the feeds have run since the last time
        self._refused_at_s = now_s
        lasted_s = outage.failed(now_s)
        if lasted_s is not None:
            # As an error about Kafka, so that the line is left out while Kafka is away, which has lines of its own.
            reason = KafkaUnreachable(str(_first(refused)))
            log.warning(
                "worker %d: its events are not published: %s%s", self.engine.worker_id, reason, lasting(lasted_s)
            )

    async def _claim_model(self, model: str, block_size: EngineBlockSize) -> None:
        """Wait until the scope's record of the model agrees with the settings; write it if there is none.

        An engine with another size than the settings is no reason to write them: the settings may be what is wrong.
        Raises BlockSizeContradicted if the bridge shall end for that reason.
        """
        worker_id, is_refused = self.engine.worker_id, False
        while True:
            try:
                await self._parts.models.result((model, not block_size.is_wrong), worker_id)
            except BlockSizeContradicted as exc:
                if not is_refused:
                    log.error("worker %d is not fed: %s", worker_id, exc)
                    is_refused = True
                self._parts.refused(worker_id, exc)
                await asyncio.sleep(REFUSED_RETRY_S)
            except KvStreamsError as exc:
                log.info("worker %d: the record of its model cannot be read yet: %s", worker_id, exc)
                await asyncio.sleep(RETRY_S)
            else:
                self._parts.refused(worker_id, None)
                return

    async def _feed(self, wiring: EngineWiring, served: ListedModel) -> None:
        """Feed every rank of an engine, until one of the feeds ends with an exception."""
        recovered_ranks = await self._recover(wiring.engine.worker_id)
        if wiring.engine.events is None:
            await self._feed_without_events(wiring, recovered_ranks, served)
            return
        async with polled(wiring) as read:
            await self._feed_ranks(read, recovered_ranks, served)

    async def _feed_ranks(
        self, wiring: EngineWiring, recovered_ranks: Mapping[int, RecoveredRank], served: ListedModel
    ) -> None:
        worker_id = wiring.engine.worker_id
        numbers = [self.ranks.of(socket) for socket in range(wiring.engine.dp_size)]
        feeds = [
            RankFeed(wiring, socket, recovered_ranks.get(dp_rank), self._counters_of(worker_id, dp_rank), served)
            for socket, dp_rank in enumerate(numbers)
        ]
        feed_of = dict(zip(numbers, feeds, strict=True))
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in feeds:
                    self._feeds[feed.rank] = feed
                    tasks.create_task(feed.run())

                def note_start(started: Incarnation) -> None:
                    for feed in feeds:
                        feed.note_start_on_page(started)

                def note_unreachable_page() -> None:
                    for feed in feeds:
                        feed.note_unreachable_page()

                scraper = Scraper(
                    wiring,
                    lambda dp_rank: feed_of[dp_rank].note_requests_running(),
                    note_start,
                    lambda dp_rank, sleeps: feed_of[dp_rank].note_sleep(sleeps),
                    note_unreachable_page,
                )
                tasks.create_task(scraper.run())
                tasks.create_task(served.follow())
        except* ModelChanged as changed:
            self.retire(str(_first(changed)))  # until the new model is registered, which may take until Kafka answers
            raise
        finally:
            for feed in feeds:
                self._feeds.pop(feed.rank, None)

    async def _feed_without_events(
        self, wiring: EngineWiring, recovered_ranks: Mapping[int, RecoveredRank], served: ListedModel
    ) -> None:
        """State that an engine without events is running, and read its metrics, until one of both ends.

        Each time the metrics show another process, the engine is asked for its model.
        """
        numbers = [self.ranks.of(number) for number in range(wiring.engine.dp_size)]
        counters = [self._counters_of(wiring.engine.worker_id, dp_rank) for dp_rank in numbers]
        self._eventless = eventless = EventlessFeed(wiring, recovered_ranks, counters)
        known_start: Incarnation | None = None
        checking: asyncio.Task[None] | None = None

        async def check_model() -> None:
            other = await served.check()
            if other is not None:
                raise ModelChanged(other)

        try:
            async with asyncio.TaskGroup() as tasks:

                def note_start(started: Incarnation) -> None:
                    nonlocal known_start, checking
                    if started == known_start:
                        return
                    if checking is not None:
                        checking.cancel()
                    known_start, checking = started, tasks.create_task(check_model())

                tasks.create_task(eventless.run())
                tasks.create_task(Scraper(wiring, on_start=note_start, on_sleep=eventless.note_sleep).run())
                tasks.create_task(served.follow())
        except* ModelChanged as changed:
            self.retire(str(_first(changed)))
            raise
        finally:
            self._eventless = None

    def _counters_of(self, worker_id: WorkerId, dp_rank: DpRank) -> FeedCounters:
        return self._parts.counters.of(RankId(worker_id, dp_rank))

    async def _recover(self, worker_id: WorkerId) -> dict[int, RecoveredRank]:
        """Read the state of a worker's ranks from Kafka, once Kafka has what this process published about them."""
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        while n_left := self._parts.in_flight[worker_id]:
            if time.monotonic() > deadline_s:
                raise KvStreamsError(f"Kafka has not taken {n_left} records yet")
            await asyncio.sleep(FULL_S)
        try:
            return await self._parts.recoveries.result(self._partition, worker_id)
        except KafkaException as exc:
            raise KvStreamsError(f"the table cannot be read: {exc.args[0].str()}") from exc

    async def _read_pooled(self, worker_id: WorkerId) -> Mapping[RankId, PooledRows]:
        return await self._parts.pooled.result(self._partition, worker_id)

    @property
    def _partition(self) -> int:
        return partition_of(self.engine.worker_id, self._settings.partitions)

    def _lease_handle(self, renewal: int) -> LeaseHandle:
        worker_id = self.engine.worker_id
        topic, key = topics(self._settings).workers.name, worker_key(worker_id)

        def write(worker: Worker | None) -> None:
            try:
                self._kafka.produce(topic, key=key, value=None if worker is None else encode_worker(worker))
                if worker is None:  # what a front found about its tokens goes with it
                    self._kafka.produce(topic, key=RENDER_PARITIES.keys.pack(worker_id), value=None)
            # Kafka does not answer, or the topic was deleted. The lease expires, and is claimed again afterwards.
            except (BufferError, KafkaException) as exc:
                log.debug("worker %d: the lease was not written: %s", worker_id, exc)

        return LeaseHandle(EngineLease(self._parts.name, self._settings.bridge_lease_s, renewal), write)


async def _await_list(http: aiohttp.ClientSession, engine: EngineAddress) -> tuple[ModelEntry, ...]:
    """Ask an engine which models it serves, until it answers."""
    outage = Outage()
    while True:
        try:
            entries = model_entries(await read_models(http, engine.models_url))
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
        return entries


def first_model(body: bytes) -> str:
    """Return the id of the first model in an answer of /v1/models. Raises KvStreamsError for any other answer."""
    return model_entries(body)[0].name


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """Return the first exception in a group of groups."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception)
    return first

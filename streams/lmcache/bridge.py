"""The part of `kvstreams bridge` that passes LMCache's events on: its topic in, `cxl-events` and pools out.

What lives here: the feeds that this bridge holds, and their records. What must not: reading the topic (event_log), what
a batch changes (pools), the rules of a lease (engines.lease), and other processes' records of the registry
(registry_reader).

The topic is read without a consumer group. Each feed has its own position in it, and ignores records before that. When
a feed is taken over, reading goes back to its position. Every bridge reads the whole topic: a shared backend's events
are in all partitions, and an instance that nobody passes on yet is found in any.

State: the feeds of one bridge.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.core.ids import Incarnation, WorkerId
from streams.core.workers import Worker
from streams.cxl.events import CxlPool
from streams.cxl.records import encode_pool, encode_transition, pool_key
from streams.engines.lease import LeasePhase, Write
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.clients import dead_letter_headers, worker_key
from streams.kafka.outage import Repetitions, repeated
from streams.lmcache.chunk_names import ChunkNames
from streams.lmcache.counters import LmcacheCounters, LmcacheCounts
from streams.lmcache.event_log import POLL_S, EventLog, LmcacheSource
from streams.lmcache.feed_lease import FeedLease
from streams.lmcache.feeds import MODELS_SHOWN_MAX, KnownFeed, decode_feed, encode_feed, known_cursors
from streams.lmcache.pools import (
    FEEDS_MAX,
    INSTANCE_PREFIX,
    SHARED_PREFIX,
    Feed,
    FeedPools,
    ModelNames,
    Pool,
    parse_feed,
)
from streams.lmcache.recovery import RecoveredFeed, recover
from streams.lmcache.rows import transitions
from streams.lmcache.wire import CacheBatch, decode_record
from streams.settings import BridgeSettings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Interval at which changes are published. Chunks that change together share a record.
PUBLISH_EVERY_S = 0.1

#: Interval at which positions are written. A bridge that takes over reads as much again.
CHECKPOINT_EVERY_S = 1.0

#: Wait before a topic that does not exist, or that cannot be read, is tried again.
RETRY_S = 1.0

#: Transitions that wait for Kafka. Beyond them, changes wait in the pools.
UNSENT_MAX = 10_000

#: Interval at which Kafka is asked for the topic's partitions: others may have been added, and a client whose brokers
#: are all away only waits.
METADATA_EVERY_S = 5.0

#: Producers of the scope that are full are waited for in such steps.
_FULL_S = 0.02

_PREFIXES = (INSTANCE_PREFIX.encode(), SHARED_PREFIX.encode())

#: How the origin of these dead letters begins in their headers.
ORIGIN = "lmcache:"


_NO_INCARNATION = Incarnation(0)

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _HeldFeed:
    """A feed that this bridge knows.

    is_wanted: whether its events are in the topic that this bridge reads. pools: None unless its lease is held and what
    it had published has been read. positions: by partition, the offset of the first record that is not in `pools`.
    ends: the positions from which on it is up to date. sent, acknowledged: transitions and pools' records handed to
    Kafka, and answered by it. checkpoint: a record, and the number of them that Kafka must have acknowledged before it
    is written.
    """

    feed: Feed
    lease: FeedLease
    is_wanted: bool = False
    term: int = 0
    incarnation: Incarnation = _NO_INCARNATION
    pools: FeedPools | None = None
    positions: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    acknowledged: int = 0
    failed: bool = False
    checkpoint: tuple[KnownFeed, int] | None = None
    written: dict[str, CxlPool] = field(default_factory=dict)
    is_registered: bool = False
    recovering: asyncio.Task[RecoveredFeed] | None = None


class LmcacheBridge:
    """Passes on the events of one topic of LMCache."""

    def __init__(self, settings: BridgeSettings, source: LmcacheSource, kafka: Producer, name: str) -> None:
        self._settings = settings
        self._events = EventLog(settings, source)
        self._kafka = kafka
        self._name = name
        self._models = ModelNames(settings.block_size_of, dict(settings.lmcache_models))
        self._names = ChunkNames()
        self._feeds: dict[str, _HeldFeed] = {}
        self._shared: list[_HeldFeed] = []
        # Records of the registry that arrived while a thread was at work.
        self._arrived: deque[tuple[bytes, bytes | None]] = deque()
        self._instance_of: dict[WorkerId, str] = {}
        self._registry_read = asyncio.Event()
        self._letters_logged = Repetitions()  # by reason
        self._publish_at_s = self._checkpoint_at_s = 0.0
        self._counters = LmcacheCounters()

    # -- called by the registry reader, on the loop --------------------------------------------------------------------

    def on_record(self, key: bytes, value: bytes | None) -> None:
        """Take a record of the registry that is no worker's, in log order."""
        if key.startswith(_PREFIXES):
            self._arrived.append((key, value))

    def on_worker(self, worker_id: WorkerId, worker: Worker | None) -> None:
        """Take the record of any worker: engines that use an instance are members of its pools."""
        if worker is None or worker.lmcache is None:
            self._instance_of.pop(worker_id, None)
        else:
            self._instance_of[worker_id] = worker.lmcache

    def on_registry_read(self) -> None:
        """Note that the registry has been read to its end."""
        self._registry_read.set()

    def fed(self) -> list[WorkerId]:
        """Return the owners of the rows of feeds that are passed on and up to date, for the pulse."""
        if not self._events.can_read:
            return []
        return [
            held.feed.worker_id
            for held in self._feeds.values()
            if held.pools is not None and all(held.positions.get(number, 0) >= end for number, end in held.ends.items())
        ]

    def counts(self) -> LmcacheCounts:
        """Return what this bridge has counted, for its metrics."""
        passed_on = [held.pools for held in list(self._feeds.values()) if held.pools is not None]
        return self._counters.snapshot(passed_on)

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled."""
        await self._registry_read.wait()
        self._take_arrived()
        for held in self._feeds.values():
            held.lease.on_end()
        try:
            while True:
                try:
                    await self._read_on()
                except (KvStreamsError, KafkaException) as exc:
                    self._events.failed(exc)
                    await self._wait(RETRY_S)
        finally:
            for held in self._feeds.values():
                self._perform(held, held.lease.release())
            self._events.close()

    async def _read_on(self) -> None:
        """Read the topic until its partitions change. Raises KvStreamsError or KafkaException if it cannot be read."""
        await self._begin()
        look_at_s = time.monotonic() + METADATA_EVERY_S
        while True:
            self._tick()
            if time.monotonic() >= look_at_s:
                if await self._asking(self._events.partitions) != self._events.read_at.keys():
                    log.info("LMCache's topic %s has other partitions than before", self._events.topic)
                    return
                look_at_s = time.monotonic() + METADATA_EVERY_S
            if any(held.lease.phase is LeasePhase.CLAIMING and not held.is_registered for held in self._feeds.values()):
                await asyncio.sleep(_FULL_S)  # its first records must not be passed over
                continue
            for held in self._feeds.values():
                if held.pools is not None:  # one that was taken over may be behind
                    self._events.rewind(held.positions)
            messages = await asyncio.to_thread(self._events.read)
            if messages:
                await asyncio.to_thread(self._take_all, messages)
            self._kafka.poll(0)

    async def _wait(self, wait_s: float) -> None:
        """Wait, while records of the registry are taken."""
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            self._tick()
            await asyncio.sleep(POLL_S)

    async def _asking(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask Kafka on a thread, while leases are kept."""
        asked = asyncio.ensure_future(asyncio.to_thread(ask))
        while not (await asyncio.wait({asked}, timeout=POLL_S))[0]:
            self._tick()
        return asked.result()

    async def _begin(self) -> None:
        """Read every partition from the first position of any feed, or else from its beginning."""
        ends = await self._asking(self._events.connect)
        first: dict[int, int] = {}
        for held in self._feeds.values():
            known = held.lease.registered
            for number, at in (*enumerate(() if known is None else known.positions), *held.positions.items()):
                first[number] = min(at, first.get(number, at))
            if held.pools is not None:
                held.positions = {number: held.positions.get(number, 0) for number in ends}
                held.ends = dict(ends)
        self._events.begin(ends, first)

    # -- leases --------------------------------------------------------------------------------------------------------

    def _feed(self, feed: Feed) -> _HeldFeed | None:
        """Return a feed, which is added if it is new; None beyond FEEDS_MAX."""
        held = self._feeds.get(feed.key)
        if held is None and len(self._feeds) < FEEDS_MAX:
            lease = FeedLease(self._name, self._settings.bridge_lease_s)
            held = self._feeds[feed.key] = _HeldFeed(feed, lease)
            if feed.is_shared:
                self._shared.append(held)
            if self._registry_read.is_set():
                lease.on_end()
        return held

    def _take_arrived(self) -> None:
        """Take the registry's records of feeds."""
        while self._arrived:
            key, value = self._arrived.popleft()
            feed = parse_feed(key.decode(errors="replace"))
            held = None if feed is None else self._feed(feed)
            if held is None:
                continue
            try:
                known = None if value is None else decode_feed(value, self._settings.schema_ids)
            except BadRecord as exc:
                log.warning("the record of %s is skipped: %s", held.feed.key, exc)
                continue
            held.is_registered = known is not None
            if known is not None and known.topic == self._events.topic and not held.is_wanted:
                self._want(held, ())
            if known is None:  # an operator: what was published may be gone
                self._drop_pools(held)
            self._perform(held, held.lease.on_record(known, time.monotonic()))
            if known is not None and known.is_set_back:
                self._begin_again(held)

    def _tick(self) -> None:
        """Keep the leases, take over feeds, and publish and write what is due.

        While the topic cannot be read, leases run out, for a bridge that can read it.
        """
        self._take_arrived()
        now_s = time.monotonic()
        for held in self._feeds.values():
            if self._events.can_read:
                self._perform(held, held.lease.tick(now_s))
            holds = held.lease.phase is LeasePhase.HOLDING
            if held.pools is not None and (not holds or held.term != held.lease.term or held.failed):
                log.warning("%s: its events are passed on by another bridge, or again from its position", held.feed.key)
                self._drop_pools(held)
                held.checkpoint = None
            if holds and held.pools is None and held.lease.may_publish(now_s):
                self._take_over(held)
        is_due = now_s >= self._checkpoint_at_s
        if is_due or now_s >= self._publish_at_s:
            self._publish_at_s = now_s + PUBLISH_EVERY_S
            self._publish(now_s, registers=is_due)
        if is_due:
            self._checkpoint_at_s = now_s + CHECKPOINT_EVERY_S
            self._checkpoint()
        for held in self._feeds.values():
            if held.checkpoint is not None and held.acknowledged >= held.checkpoint[1]:
                held.lease.want(held.checkpoint[0])
                held.checkpoint = None

    def _take_over(self, held: _HeldFeed) -> None:
        """Read what the feed had published, and once that is read, continue from there."""
        if held.recovering is None:
            held.term = held.lease.term
            reading = asyncio.to_thread(recover, self._settings, held.feed, self._models)
            held.recovering = asyncio.get_running_loop().create_task(reading)
            return
        if not held.recovering.done():
            return
        recovering, held.recovering = held.recovering, None
        try:
            recovered = recovering.result()
        except (KvStreamsError, KafkaException) as exc:
            log.warning("%s: the table of pooled blocks cannot be read: %s", held.feed.key, exc)
            return
        if held.term != held.lease.term:
            return  # the lease was lost meanwhile
        known, pools = held.lease.registered, FeedPools(held.feed, self._names, self._models)
        if known is not None:
            pools.cursors = known.cursors_by_instance()
        recovered.adopted_by(pools, self._models)
        positions = () if known is None or known.topic != self._events.topic else known.positions
        read_at = self._events.read_at
        at = {n: positions[n] if n < len(positions) else 0 for n in read_at}
        held.positions = {n: self._events.position(n, known_at) for n, known_at in at.items()}
        held.ends = {n: max(end, read_at[n]) for n, end in self._events.ends.items()}
        held.failed, held.sent, held.acknowledged = False, 0, 0
        # The rows' incarnation goes on. Agents take blocks in transit of an earlier one for evicted already, so
        # that such rows would stay in transit when their chunks are deleted.
        held.incarnation = recovered.incarnation or Incarnation(time.time_ns() // 1000)
        held.written.clear()
        held.pools = pools
        self._publish_at_s = 0.0  # evictions of rows come before what is read now
        log.info("%s: this bridge passes its events on (term %d, %d chunks)", held.feed.key, held.term, len(pools))

    def _begin_again(self, held: _HeldFeed) -> None:
        """Publish everything again, since the scope was emptied."""
        held.recovering = held.checkpoint = None
        held.written.clear()
        if held.pools is not None:
            log.info("%s: the scope was emptied, so its %d chunks are published again", held.feed.key, len(held.pools))
            held.pools.publish_all()

    def _drop_pools(self, held: _HeldFeed) -> None:
        if held.pools is not None:
            self._counters.end(held.pools)
        held.pools = None

    def _perform(self, held: _HeldFeed, writes: Iterable[Write[KnownFeed]]) -> None:
        for write in writes:
            value = None if write.record is None else encode_feed(write.record)
            self._produce(topics(self._settings).workers.name, held.feed.key.encode(), value)

    def _produce(self, topic: str, key: bytes, value: bytes | None) -> None:
        """Send a record that will be sent again if it is lost."""
        try:
            self._kafka.produce(topic, key=key, value=value)
        except (BufferError, KafkaException) as exc:
            log.debug("%s was not written: %s", key, exc)

    # -- records -------------------------------------------------------------------------------------------------------

    def _take_all(self, messages: list[Message]) -> None:
        """Take records in order. Raises KafkaException if the topic cannot be read. Called on a thread."""
        for message, number, offset, begins_again in self._events.records(messages):
            if begins_again:  # the numbers of batches show whether any was lost
                for held in self._feeds.values():
                    held.ends[number] = 0
                    if held.pools is not None:
                        held.positions[number] = offset
            self._take(message, number, offset)
        for held in self._feeds.values():
            if held.pools is not None:
                for number, at in self._events.read_at.items():
                    held.positions[number] = max(at, held.positions.get(number, 0))
        self._counters.behind = self._events.n_left()

    def _take(self, message: Message, number: int, offset: int) -> None:
        value = message.value()
        at_s = min(max(message.timestamp()[1] // 1000, 0), int(time.time()))  # a server's clock may be wrong
        try:
            batches = decode_record(value)
        except BadRecord as exc:
            self._dead_letter(message, number, offset, exc)
            return
        for batch in batches:
            self._counters.batches[batch.kind] += 1
            self._discover(batch, number, offset)
            for held in self._held(batch):
                if held.pools is not None and offset >= held.positions.get(number, 0):
                    self._counters.verdicts[held.pools.apply(batch, at_s)] += 1
        if self._names.added:
            for held in self._feeds.values():
                if held.pools is not None:
                    held.pools.take_names(self._names.added)
            self._names.added.clear()

    def _held(self, batch: CacheBatch) -> Iterable[_HeldFeed]:
        """Return the feeds that a batch concerns: its instance, and backends that instances share, each of which keeps
        the cursor of every instance."""
        own = self._feeds.get(Feed(batch.instance).key)
        return self._shared if own is None else [own, *self._shared]

    def _discover(self, batch: CacheBatch, number: int, offset: int) -> None:
        """Add the feeds that a batch is the first of."""
        for feed in (Feed(batch.instance), Feed(batch.backend, True))[: 1 + batch.shared]:
            held = self._feed(feed)
            if held is not None and not held.is_wanted:
                at = {**self._events.read_at, number: offset}
                self._want(held, tuple(max(at.get(each, 0), 0) for each in range(max(at) + 1)))

    def _want(self, held: _HeldFeed, positions: tuple[int, ...]) -> None:
        """Claim a feed whenever its lease is free. positions: of one that has no record yet."""
        held.is_wanted = True
        held.lease.want(KnownFeed(held.feed.key, self._events.topic, positions))

    def _dead_letter(self, message: Message, number: int, offset: int, exc: BadRecord) -> None:
        """Keep what a record was that cannot be used: not its content, which has tokens."""
        key = message.key() or b""
        held = self._feeds.get(Feed(key.decode(errors="replace")).key)
        if held is not None and (held.pools is None or offset < held.positions.get(number, 0)):
            return  # the bridge that passes the instance on writes it
        value = message.value() or b""
        self._counters.dead_letters += 1
        letter = json.dumps({"reason": exc.reason, "bytes": len(value), "partition": number, "offset": offset}).encode()
        try:
            self._kafka.produce(
                topics(self._settings).dead_letters.name,
                key=key[:128],
                value=letter,
                headers=dead_letter_headers(ORIGIN + self._events.topic, exc, len(value), number, offset),
            )
        except (BufferError, KafkaException) as full:
            log.warning("a dead letter was not written: %s", full)
        n = self._letters_logged.happened(exc.reason, time.monotonic())
        if n is not None:
            log.warning("dead letter from %s [%d] at %d: %s%s", self._events.topic, number, offset, exc, repeated(n))

    # -- what is written -----------------------------------------------------------------------------------------------

    def _publish(self, now_s: float, *, registers: bool) -> None:
        """Publish what has changed in the pools of feeds whose leases are held. registers: all pools are looked at."""
        emitted_at_ms = time.time_ns() // 1_000_000
        for held in self._feeds.values():
            pools = held.pools
            if pools is None or not held.lease.may_publish(now_s) or len(self._kafka) > UNSENT_MAX:
                continue
            n_expired = pools.expire(emitted_at_ms // 1000, round(self._settings.lmcache_unconfirmed_ttl_s))
            if n_expired:
                log.warning("%s: %d chunks that were in doubt after a gap are evicted", held.feed.key, n_expired)
            if registers or pools.has_changes:
                self._register_pools(held, pools)
            topic, key = topics(self._settings).cxl_events.name, worker_key(held.feed.worker_id)
            for transition in transitions(pools.take_changes(), held.incarnation, pools.epoch_of, emitted_at_ms):
                self._send(held, pools, topic, key, encode_transition(transition))

    def _send(self, held: _HeldFeed, pools: FeedPools, topic: str, key: bytes, value: bytes) -> None:
        """Send a transition, or a pool's record. If Kafka does not take it, the feed starts over from its position."""
        held.sent += 1
        try:
            self._kafka.produce(topic, key=key, value=value, on_delivery=partial(self._on_delivery, held, pools))
        except (BufferError, KafkaException) as exc:
            log.warning("%s: a record was not published: %s", held.feed.key, exc)
            held.failed = True

    def _on_delivery(self, held: _HeldFeed, pools: FeedPools, error: KafkaError | None, message: Message) -> None:  # noqa: ARG002 - the signature of every callback
        if pools is held.pools:  # it has not started over since
            held.acknowledged += error is None
            held.failed = held.failed or error is not None

    def _register_pools(self, held: _HeldFeed, pools: FeedPools) -> None:
        """Write the registry's records of the pools that have changed."""
        for pool in pools.pools():
            wanted = self._pool(pools, pool)
            known = held.written.get(pool.id)
            if known is None or replace(known, registered_at_ms=0) != replace(wanted, registered_at_ms=0):
                held.written[pool.id] = wanted
                self._send(held, pools, topics(self._settings).workers.name, pool_key(pool.id), encode_pool(wanted))

    def _pool(self, pools: FeedPools, pool: Pool) -> CxlPool:
        instances = pools.instances_of(pool)
        members = tuple(sorted(worker for worker, name in self._instance_of.items() if name in instances))
        capacity, (n_bytes, n_blocks) = pools.capacities.get(pool, 0), pools.chunk_bytes.get(pool, (0, 0))
        return CxlPool(
            pool_id=pool.id,
            latency_class=pool.backend,
            capacity_blocks=capacity // n_bytes * n_blocks or None if n_bytes else None,
            members=members,
            epoch=pools.epoch_of(pool),
            registered_at_ms=time.time_ns() // 1_000_000,
        )

    def _checkpoint(self) -> None:
        """Note the positions, to be written once Kafka has what was published before them."""
        for held in self._feeds.values():
            pools = held.pools
            if pools is None or held.checkpoint is not None or not held.positions or pools.has_changes:
                continue
            positions = tuple(held.positions.get(number, 0) for number in range(max(held.positions) + 1))
            record = KnownFeed(
                held.feed.key,
                self._events.topic,
                positions,
                known_cursors(pools.cursors),
                {str(reason): n for reason, n in pools.counts.items()},
                pools.n_stored,
                tuple(pools.models()[:MODELS_SHOWN_MAX]),
            )
            held.checkpoint = record, held.sent

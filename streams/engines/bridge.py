"""`kvstreams bridge`: engines' ZMQ events to `kv-events`, and the engines themselves to `workers`.

What lives here: sockets, the order of batches, and which life of an engine they belong to. What must not: what an event
means (vllm) and which of them are news (ledger).

An engine's batches are numbered from 0. The bridge publishes them in order: whatever is missing, before it connected or
behind a dropped message, is asked of the engine's replay socket; only what the engine has forgotten stays missing, and
the agent then sees the gap in the numbers. An engine is one life as long as its process start time stays the same; a
new one is announced before it has told anything, since what the old one held is gone already.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import xxhash
import zmq
import zmq.asyncio
from confluent_kafka import Producer
from prometheus_client.parser import text_string_to_metric_families

from streams.codec import encode_worker
from streams.core.events import BEFORE_FIRST
from streams.core.ids import U64_MASK, DpRank, Incarnation, RankId, WorkerId
from streams.core.registry import DP_SIZE_MAX, Worker
from streams.engines.publisher import RankWriter, event_producer
from streams.engines.vllm import COUNTS_COPIES, decode_payload
from streams.errors import BadRecord, KvStreamsError, SettingsError
from streams.kafka import dead_letter_headers, dead_letter_value
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Batches waiting in the socket; beyond it ZMQ drops, which the numbers show and the replay socket heals.
RECEIVE_HWM = 100_000

#: The replay socket answers from the engine's publishing thread, which looks every 100 ms.
REPLAY_TIMEOUT_S = 3.0

#: How often an engine's start time is read: a restarted engine counts from 0 again, so its own numbers tell too.
LIFE_CHECK_S = 2.0

#: Between attempts to reach an engine that does not answer.
RETRY_S = 1.0

_HTTP_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_SEQUENCE = struct.Struct(">Q")
_END_MARKER = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine. events, replay: ZMQ addresses of rank 0; rank n listens n ports above, as in vLLM."""

    worker_id: WorkerId
    url: str
    events: str
    replay: str | None = None
    dp_size: int = 1
    model: str | None = None


class Bridge:
    """Bridges any number of engines with one producer."""

    def __init__(self, settings: Settings, engines: list[EngineAddress]) -> None:
        self._settings = settings
        self._engines = engines
        self._kafka = event_producer(settings)
        self._context = zmq.asyncio.Context()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with aiohttp.ClientSession(timeout=_HTTP_TIMEOUT) as http, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve_delivery())
                for engine in self._engines:
                    tasks.create_task(self._bridge(engine, http))
        finally:
            self._context.destroy(linger=0)
            self._kafka.flush(REPLAY_TIMEOUT_S)

    async def _serve_delivery(self) -> None:
        while True:
            self._kafka.poll(0)
            await asyncio.sleep(0.05)

    async def _bridge(self, engine: EngineAddress, http: aiohttp.ClientSession) -> None:
        """Register an engine as soon as it answers, then bridge each of its ranks."""
        while True:
            try:
                model = engine.model or await _served_model(http, engine.url)
                life = await _life(http, engine.url)
                break
            except (aiohttp.ClientError, TimeoutError, KvStreamsError) as exc:
                log.info("worker %d at %s does not answer yet: %s", engine.worker_id, engine.url, exc)
                await asyncio.sleep(RETRY_S)
        self._register(engine, model)
        async with asyncio.TaskGroup() as tasks:
            for dp_rank in range(engine.dp_size):
                feed = _RankFeed(self._settings, self._kafka, self._context, http, engine, model, dp_rank, life)
                tasks.create_task(feed.run())

    def _register(self, engine: EngineAddress, model: str) -> None:
        worker = Worker(
            worker_id=engine.worker_id,
            url=engine.url,
            model=model,
            block_size=self._settings.block_size_of(model),
            dp_size=engine.dp_size,
            events_endpoint=engine.events,
            replay_endpoint=engine.replay,
            registered_at_ms=time.time_ns() // 1_000_000,
        )
        self._kafka.produce(
            topics(self._settings).workers.name, key=str(engine.worker_id).encode(), value=encode_worker(worker)
        )
        log.info("worker %d registered: %s serves %s", engine.worker_id, engine.url, model)


class _RankFeed:
    """One rank of one engine: its sockets, the next batch wanted, its writer."""

    def __init__(
        self,
        settings: Settings,
        kafka: Producer,
        context: zmq.asyncio.Context,
        http: aiohttp.ClientSession,
        engine: EngineAddress,
        model: str,
        dp_rank: int,
        life: Incarnation | None,
    ) -> None:
        self._settings = settings
        self._kafka = kafka
        self._context = context
        self._http = http
        self._engine = engine
        self._events = port_above(engine.events, dp_rank)
        self._replay = port_above(engine.replay, dp_rank) if engine.replay else None
        self._block_size = settings.block_size_of(model)
        self._life = life
        rank = RankId(engine.worker_id, DpRank(dp_rank))
        self._writer = RankWriter(settings, kafka, rank, model, life or _minted(), COUNTS_COPIES)
        self._next = 0
        self._life_checked_at = time.monotonic()

    async def run(self) -> None:
        """Receive, order, publish, until cancelled; what fails begins again from the engine's first batch.

        A new ledger is built from the engine's replay buffer then, and what Kafka has already comes as duplicates.
        """
        while True:
            try:
                await self._run()
            except Exception:
                log.exception("rank %s: the feed begins again", self._writer.rank)
                await asyncio.sleep(RETRY_S)
                self._begin(self._writer.incarnation)

    async def _run(self) -> None:
        """One life of the engine after the other; each has a socket of its own."""
        while True:
            # What waits in an older life's socket looks like the new one's batches: numbers are all that frames carry.
            with self._context.socket(zmq.SUB) as socket:
                socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                socket.connect(self._events)
                self._announce_life()
                await self._fill()  # what was published before we connected
                await self._receive(socket)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        """Receive until the engine begins a new life."""
        while True:
            if await socket.poll(int(LIFE_CHECK_S * 1000)):
                if await self._received(await socket.recv_multipart()):
                    return
            else:
                await self._fill()  # the last batch before a quiet time may have been dropped as well
            if time.monotonic() - self._life_checked_at >= LIFE_CHECK_S and await self._new_life():
                return
            if self._writer.failed:
                raise KvStreamsError(f"Kafka did not take {len(self._writer.failed)} batches: {self._writer.failed[0]}")

    async def _received(self, frames: list[bytes]) -> bool:
        """Take one message; True where it shows that the engine began a new life."""
        if len(frames) < 2 or len(frames[-2]) != _SEQUENCE.size:
            exc = BadRecord("bad_frames", f"{len(frames)} frames, no sequence number")
            self._dead_letter(b"".join(frames), exc)
            return False
        sequence, payload = _SEQUENCE.unpack(frames[-2])[0], frames[-1]
        if sequence < self._next:
            # Either it came by replay already, or the engine restarted and counts from 0 again.
            return await self._new_life()
        if sequence > self._next:
            known = await self._fill(until=sequence)
            if known is not None and known < sequence:
                # The engine itself has never numbered so high: the frame is an older life's.
                log.warning("rank %s: batch %d is none of this life", self._writer.rank, sequence)
                return await self._new_life()
            if self._next < sequence:
                self._forgotten(sequence)
        if sequence == self._next:
            self._publish(sequence, payload)
        return False

    async def _fill(self, until: int | None = None) -> int | None:
        """Publish what the engine's replay buffer has from the next batch wanted on, up to `until`.

        Returns the highest number that the engine told of, BEFORE_FIRST for none; None where it did not answer.
        """
        if self._replay is None:
            return None
        highest = BEFORE_FIRST
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
            socket.connect(self._replay)
            await socket.send_multipart([b"", _SEQUENCE.pack(self._next)])
            while await socket.poll(int(REPLAY_TIMEOUT_S * 1000)):
                frames = await socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != _SEQUENCE.size:
                    log.warning("rank %s: a replay answer of %d frames", self._writer.rank, len(frames))
                    return None
                if frames[-2] == _END_MARKER:
                    return highest
                sequence = _SEQUENCE.unpack(frames[-2])[0]
                highest = max(highest, sequence)
                if sequence < self._next or (until is not None and sequence >= until):
                    continue
                if sequence > self._next:
                    self._forgotten(sequence)
                self._publish(sequence, frames[-1])
        log.warning("rank %s: %s does not answer", self._writer.rank, self._replay)
        return None

    def _forgotten(self, until: int) -> None:
        """The engine has forgotten batches. If Kafka lacks them too, the agent sees it in the numbers."""
        log.warning("rank %s: the engine has forgotten batches %d to %d", self._writer.rank, self._next, until - 1)
        self._next = until

    def _publish(self, sequence: int, payload: bytes) -> None:
        try:
            batch = decode_payload(payload, self._block_size)
            digest = xxhash.xxh3_64_intdigest(payload)
            self._writer.write(sequence, digest, batch.emitted_at_ms, batch.events, batch.n_unindexed)
        except BadRecord as exc:
            # Its number is then missing on Kafka: the agent degrades the rank, which is the truth.
            self._dead_letter(payload, exc)
        self._next = sequence + 1

    async def _new_life(self) -> bool:
        """Read the engine's start time; True where it is another one, and everything begins anew."""
        self._life_checked_at = time.monotonic()
        try:
            life = await _life(self._http, self._engine.url)
        except (aiohttp.ClientError, TimeoutError, KvStreamsError):
            return False  # an engine that does not answer has not proven a new life
        if life is None or life == self._life:
            return False
        log.info("worker %d began a new life: %d", self._engine.worker_id, life)
        self._life = life
        self._begin(max(life, Incarnation(self._writer.incarnation + 1)))
        return True

    def _begin(self, incarnation: Incarnation) -> None:
        self._writer.new_life(incarnation)
        self._next = 0

    def _announce_life(self) -> None:
        """Say that this life begins, or goes on: what an older one held is gone before the new one tells anything."""
        self._writer.write(BEFORE_FIRST, 0, time.time_ns() // 1_000_000, ())

    def _dead_letter(self, payload: bytes, exc: BadRecord) -> None:
        log.warning("dead letter from rank %s at %s: %s", self._writer.rank, self._events, exc)
        self._kafka.produce(
            topics(self._settings).dead_letters.name,
            key=str(self._writer.rank.worker_id).encode(),
            value=dead_letter_value(payload),
            headers=dead_letter_headers(self._events, exc, len(payload)),
        )


def port_above(endpoint: str, offset: int) -> str:
    """The ZMQ address `offset` ports above; ipc addresses get the rank as a suffix. Raises KvStreamsError."""
    if offset == 0:
        return endpoint
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return f"{endpoint}_{offset}"
    if parts.port is None or parts.hostname is None:
        raise KvStreamsError(f"{endpoint} has no port", remedy="Give it as tcp://host:port")
    return urlunsplit(("tcp", f"{parts.hostname}:{parts.port + offset}", "", "", ""))


async def _served_model(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        models = (await response.json()).get("data") or []
    if not models:
        raise KvStreamsError(f"{url} serves no model")
    return str(models[0]["id"])


async def _life(http: aiohttp.ClientSession, url: str) -> Incarnation | None:
    """The engine process's start time in microseconds; None where its metrics do not tell."""
    async with http.get(f"{url}/metrics") as response:
        if response.status != 200:
            return None
        text = await response.text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "process_start_time_seconds":
                return Incarnation(round(sample.value * 1_000_000))
    return None


def _minted() -> Incarnation:
    return Incarnation(time.time_ns() // 1000)


def engine_address(text: str) -> EngineAddress:
    """Read `id=1,url=…,events=…[,replay=…][,dp=…][,model=…]`; raises SettingsError naming what is wrong."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = parts.keys() - {"id", "url", "events", "replay", "dp", "model"}
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
    return EngineAddress(
        worker_id=WorkerId(worker_id),
        url=parts["url"].rstrip("/"),
        events=parts["events"],
        replay=parts.get("replay") or None,
        dp_size=dp_size,
        model=parts.get("model") or None,
    )

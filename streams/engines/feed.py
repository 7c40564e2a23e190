"""One rank of one engine: its sockets, its life, the order of its batches, its restatements.

What lives here: receiving, proving, filling, publishing, in one loop a rank. What must not: whether this bridge may
feed the engine (tenure), what a batch means (vllm), which of it is news (ledger), whether a life goes on (continuity).

An engine's batches are numbered from 0 and published in order. Whatever is missing, before this bridge connected or
behind a dropped message, is asked of the engine's replay socket, while the live batches behind it are held; only what
the engine has forgotten, or does not give in time, stays missing, and the agent then sees the gap in the numbers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import xxhash
import zmq
import zmq.asyncio
from confluent_kafka import Producer

from streams.core.events import BEFORE_FIRST, ResyncRequest
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.engines.continuity import (
    Decision,
    Evidence,
    KnownIncarnation,
    NewIncarnation,
    ReplayCheck,
    Undecided,
    decide_at_start,
    decide_while_feeding,
    needs_replay_check,
)
from streams.engines.cxl_names import CxlNames
from streams.engines.dialects.vllm import COUNTS_COPIES, decode_payload
from streams.engines.lease_handle import LeaseHandle
from streams.engines.ledger import Ledger
from streams.engines.publisher import RankWriter
from streams.engines.recovery import RecoveredRank, ledger_of
from streams.engines.replay import FILL_BACKOFF_S, SEQUENCE, Batch, ReplaySilent, Window, check_last_batch, replay
from streams.engines.restatements import Restatements
from streams.errors import BadRecord, KvStreamsError
from streams.kafka import dead_letter_headers, dead_letter_value, worker_key
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Batches waiting in the socket; beyond it ZMQ drops, which the numbers show and the replay socket heals.
RECEIVE_HWM = 100_000

#: How often an engine's life is checked when nothing else tells of it, and its last batches are asked for.
INCARNATION_CHECK_S = 2.0

#: Between attempts to reach an engine that does not answer.
RETRY_S = 1.0

#: A gap is given up when the replay socket has not filled it for so long, however it failed.
GAP_HOLD_S = 10.0

#: Payload digests kept, by which a batch that comes twice is told from another life's of the same number. A replay of a
#: whole buffer, 10,000 batches by default, comes a second time from the socket.
DIGESTS_MAX = 16_384

#: A connection that broke and came back is looked into for so long, if nobody answers, before batches are taken again.
RECONNECT_CHECK_S = 10.0

#: Requests waiting for the loop; a partition's owner asks one at a time, and again.
REQUESTS_MAX = 4

#: What a bridge promises of a rank whose engine is gone: the next owner's look finds it silent.
ENDED_ENGINE_LEASE_MS = 1

#: How long the loop waits for a batch before it looks at everything else.
IDLE_S = 0.25

_START_TIME = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine. events, replay: ZMQ addresses of rank 0; rank n listens n ports above, as in vLLM.

    metrics: its Prometheus page, where that is not at /metrics of `url`.
    """

    worker_id: WorkerId
    url: str
    events: str
    replay: str | None = None
    dp_size: int = 1
    model: str | None = None
    metrics: str | None = None

    @property
    def metrics_url(self) -> str:
        """Where its Prometheus page is."""
        return self.metrics or f"{self.url}/metrics"


@dataclass(slots=True)
class FeedCounters:
    """What happened to a rank's feed; the log shows it whenever something else than `published` has changed."""

    published: int = 0
    repeated: int = 0  # batches that came twice
    dead_letters: int = 0
    gaps: int = 0
    gap_batches_filled: int = 0
    gap_batches_lost: int = 0
    replays: int = 0
    replays_silent: int = 0
    foreign: int = 0  # batches of another life than the one that answers
    incarnations: int = 0
    resumed: int = 0
    resumed_from_table: int = 0
    resyncs_asked: int = 0
    restatements: int = 0
    restatement_chunks: int = 0
    heartbeats: int = 0


@dataclass(frozen=True, slots=True)
class FeedWiring:
    """What the feeds of one engine share."""

    settings: Settings
    kafka: Producer
    context: zmq.asyncio.Context
    http: aiohttp.ClientSession
    engine: EngineAddress
    model: str
    lease_handle: LeaseHandle
    term: int
    epoch_of: Callable[[str], int]


@dataclass(slots=True)
class _Gap:
    """A gap that is being filled. due_at_s: of the next attempt."""

    since_s: float
    due_at_s: float
    attempts: int = 0


@dataclass(slots=True)
class _Fill:
    """What a replay gave. highest: the last number told, BEFORE_FIRST for none."""

    answered: bool = False
    progressed: bool = False
    contradicted: bool = False
    highest: int = BEFORE_FIRST


@dataclass(slots=True)
class _IncarnationState:
    """What belongs to one life of the engine and ends with it."""

    window: Window
    started: Incarnation | None
    digests: OrderedDict[int, int] = field(default_factory=OrderedDict)
    restatements: Restatements = field(default_factory=Restatements)
    gap: _Gap | None = None

    def remember(self, batch: Batch) -> int:
        """Keep a batch's digest, and give it."""
        digest = xxhash.xxh3_64_intdigest(batch.payload)
        self.digests[batch.sequence] = digest
        if len(self.digests) > DIGESTS_MAX:
            self.digests.popitem(last=False)
        return digest

    def differs(self, batch: Batch) -> bool:
        """Whether a batch is another than the one that came under its number; False where that is not known."""
        known = self.digests.get(batch.sequence)
        return known is not None and known != xxhash.xxh3_64_intdigest(batch.payload)


class RankFeed:
    """Feeds one rank, as long as the lease is held."""

    def __init__(self, wiring: FeedWiring, dp_rank: int, recovered: RecoveredRank | None) -> None:
        """memory: what Kafka has of the rank."""
        self._wiring = wiring
        self._recovered = recovered
        self.rank = RankId(wiring.engine.worker_id, DpRank(dp_rank))
        self._events = port_above(wiring.engine.events, dp_rank)
        self._replay = port_above(wiring.engine.replay, dp_rank) if wiring.engine.replay else None
        self._block_size = wiring.settings.block_size_of(wiring.model)
        known = recovered.incarnation if recovered else Incarnation(0)
        self._writer = RankWriter(
            wiring.settings, wiring.kafka, self.rank, wiring.model, known, COUNTS_COPIES, wiring.epoch_of
        )
        self._state = _IncarnationState(Window(0), None)
        self._requests: deque[ResyncRequest] = deque(maxlen=REQUESTS_MAX)
        self._last_message_at_s = time.monotonic()
        self._checked_at_s = 0.0
        self._begun = False
        self._engine_ended_at_s = float("-inf")  # when we last said that the engine is gone
        self._break_checked_at_s = 0.0
        self._lease_s = wiring.settings.bridge_lease_s
        self.counters = FeedCounters()

    def ask(self, request: ResyncRequest) -> None:
        """Take a request to restate; the loop answers it between two batches."""
        self.counters.resyncs_asked += 1
        self._requests.append(request)

    async def run(self) -> None:
        """Feed until cancelled; raises LeaseLost, and whatever else ends the feed."""
        try:
            await self._run_incarnations()
        finally:
            log.info("rank %s: the feed ends: %s", self.rank, counters_text(self.counters))

    # -- lives ---------------------------------------------------------------------------------------------------------

    async def _run_incarnations(self) -> None:
        """One life of the engine after the other; each has a socket of its own."""
        decision: Decision | None = None
        while True:
            # What waits in an older life's socket looks like the new one's batches: numbers are all that frames carry.
            with self._wiring.context.socket(zmq.SUB) as socket:
                socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                try:
                    socket.connect(self._events)
                    started, decision = await self._first_decision() if decision is None else (None, decision)
                    if isinstance(decision, NewIncarnation):
                        await self._begin(decision.incarnation, started)
                        contradicted = await self._fill_and_judge()
                    else:
                        contradicted = await self._resume(started)
                    decision = contradicted or await self._receive(socket, monitor)
                finally:
                    self._begun = False
                    socket.disable_monitor()
                    monitor.close(linger=0)

    async def _first_decision(self) -> tuple[Incarnation | None, Decision]:
        """Decide which life this is, as soon as the engine tells anything."""
        known = self._recovered.known_incarnation if self._recovered else None
        while True:
            evidence = await self._start_time()
            if needs_replay_check(known, evidence) and known is not None:
                evidence = await self._with_replay_check(evidence, known)
            decision = decide_at_start(known, evidence, _now_us())
            if not isinstance(decision, Undecided):
                log.info("rank %s: %s: %s", self.rank, decision, evidence)
                return evidence.started, decision
            await asyncio.sleep(RETRY_S)

    async def _begin(self, incarnation: Incarnation, started: Incarnation | None) -> None:
        """Begin a life, and say so: what an older one held is gone before the new one tells anything."""
        log.info("rank %s: life %d begins", self.rank, incarnation)
        self.counters.incarnations += 1
        if started is None:
            started = (await self._start_time()).started
        self._state = _IncarnationState(Window(0), started)
        self._writer.begin_incarnation(incarnation)
        await self._announce()

    async def _announce(self) -> None:
        await self._allowed()
        self._writer.write(BEFORE_FIRST, 0, _now_us() // 1000, ())
        # At once: nobody has promised anything of this life yet, and a bridge that died now would not be missed.
        self._renew()
        self._begun = True

    async def _resume(self, started: Incarnation | None) -> NewIncarnation | None:
        """Go on in the life that Kafka knows, behind its last batch; a NewIncarnation where the engine contradicts."""
        recovered = self._recovered
        assert recovered is not None  # else there was no life to go on with
        self._recovered = None  # it is of this moment only
        self.counters.resumed += 1
        self._state = _IncarnationState(Window(0), started)
        if recovered.is_removed or recovered.sequence == BEFORE_FIRST:
            self._writer.begin_incarnation(recovered.incarnation)
            await self._announce()  # a removed worker comes back by it
            return await self._fill_and_judge()
        from_engine = await self._ledger_from_engine(recovered.sequence)
        if from_engine is None:
            self.counters.resumed_from_table += 1
            ledger = ledger_of(recovered.ledger.restated(), recovered.ledger.complete, counts_copies=COUNTS_COPIES)
            names = recovered.names
        else:
            ledger, names = from_engine
        log.info("rank %s: goes on behind batch %d with %d blocks", self.rank, recovered.sequence, len(ledger))
        self._writer.resume(recovered.sequence, recovered.digest, ledger, names)
        self._state.window = Window(recovered.sequence + 1)
        self._state.digests[recovered.sequence] = recovered.digest
        self._begun = True
        return await self._fill_and_judge()

    async def _ledger_from_engine(self, until: int) -> tuple[Ledger, CxlNames] | None:
        """The ledger as of batch `until`, and the names of what is in CXL pools, from the engine's own batches; None
        where it has forgotten the first.

        Better than the table's, which knows neither copies nor second names. Nothing is published: Kafka has it.
        """
        if self._replay is None:
            return None
        ledger, names, following = Ledger(COUNTS_COPIES), CxlNames(), 0
        try:
            async with aclosing(replay(self._wiring.context, self._replay, 0)) as batches:
                async for batch in batches:
                    self._heard()
                    if batch.sequence != following:
                        return None
                    self._state.remember(batch)
                    try:
                        for event in decode_payload(batch.payload, self._block_size).events:
                            names.apply(event, ledger)
                    except BadRecord:
                        ledger.lost_events()
                    following += 1
                    if following > until:
                        return ledger, names
        except ReplaySilent as exc:
            log.warning("rank %s: %s", self.rank, exc)
        return None

    async def _judge(self, *, contradicted: bool = False) -> NewIncarnation | None:
        """Ask whether the engine is the same process still."""
        state, writer = self._state, self._writer
        self._checked_at_s = time.monotonic()
        evidence = await self._start_time()
        known = KnownIncarnation(writer.incarnation, writer.sequence, writer.digest)
        if evidence.started is None or state.started is None:
            evidence = await self._with_replay_check(evidence, known)
        decision = decide_while_feeding(known, state.started, evidence, _now_us(), contradicted=contradicted)
        if isinstance(decision, NewIncarnation):
            log.info("rank %s: the engine began a new life: %s", self.rank, evidence)
            return decision
        if state.started is None and evidence.replay_check is ReplayCheck.SAME:
            state.started = evidence.started
        return None

    async def _with_replay_check(self, evidence: Evidence, known: KnownIncarnation) -> Evidence:
        if known.sequence == BEFORE_FIRST:
            return evidence
        replay_check = await check_last_batch(self._wiring.context, self._replay, known.sequence, known.digest)
        if replay_check is not ReplayCheck.SILENT:
            self._heard()
        return Evidence(evidence.reachable, evidence.started, replay_check)

    async def _start_time(self) -> Evidence:
        try:
            evidence = await engine_start(self._wiring.http, self._wiring.engine.metrics_url)
        except (aiohttp.ClientError, TimeoutError):
            return Evidence(reachable=False, started=None)
        self._heard()
        return evidence

    # -- batches -------------------------------------------------------------------------------------------------------

    async def _receive(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> NewIncarnation:
        """Receive until the engine begins a new life."""
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat())
            try:
                return await self._receive_all(socket, monitor)
            finally:
                beating.cancel()

    async def _receive_all(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> NewIncarnation:
        quiet_since_s = time.monotonic()
        logged_counters = counters_text(self.counters)
        while True:
            begun: NewIncarnation | None = None
            if await socket.poll(int(IDLE_S * 1000)):
                frames = await socket.recv_multipart()
                self._heard()
                quiet_since_s = time.monotonic()
                if await monitor.poll(0):
                    begun = await self._reconnected(monitor)
                begun = begun or await self._received(frames)
            elif await monitor.poll(0):
                await self._attend_break()
            begun = begun or await self._attend_gap()
            now_s = time.monotonic()
            if begun is None and now_s - quiet_since_s >= INCARNATION_CHECK_S:
                quiet_since_s = now_s
                begun = await self._fill_and_judge()  # the last batch before a quiet time may have been dropped as well
            if begun is None and now_s - self._checked_at_s >= INCARNATION_CHECK_S:
                begun = await self._judge()
            if begun is not None:
                return begun
            while self._requests:
                await self._restate(self._requests.popleft())
            if self._writer.failed:
                raise KvStreamsError(f"Kafka did not take {len(self._writer.failed)} batches: {self._writer.failed[0]}")
            if counters_text(self.counters) != logged_counters:
                logged_counters = counters_text(self.counters)
                log.info("rank %s: %s", self.rank, logged_counters)

    async def _reconnected(self, monitor: zmq.asyncio.Socket) -> NewIncarnation | None:
        """The connection broke: what comes now may be another process's, whose numbers happen to fit."""
        while await monitor.poll(0):
            await monitor.recv_multipart()
        until_s = time.monotonic() + RECONNECT_CHECK_S
        while True:
            evidence = await self._start_time()
            if evidence.reachable or time.monotonic() > until_s:
                return await self._judge()
            await asyncio.sleep(RETRY_S)

    async def _attend_break(self) -> None:
        """The connection broke and nothing has come since: where nobody listens at the engine's metrics either, its
        process is gone, and no request need go there until the lease is over. Whoever listens again is fed again.

        A host that is gone refuses nothing, and a proxy answers for a dead engine: for these there is the lease.
        """
        now_s = time.monotonic()
        if now_s - self._break_checked_at_s < RETRY_S:
            return
        self._break_checked_at_s = now_s
        try:
            await engine_start(self._wiring.http, self._wiring.engine.metrics_url)
        except aiohttp.ClientConnectorError as exc:
            if (
                exc.os_error.errno == errno.ECONNREFUSED
                and not self._engine_ended
                and self._wiring.lease_handle.may_publish()
            ):
                log.warning("rank %s: the engine is gone: its connection broke, and %s", self.rank, exc)
                self._engine_ended_at_s = now_s
                self._promise(ENDED_ENGINE_LEASE_MS)
        except (aiohttp.ClientError, TimeoutError):
            pass  # it may be busy
        else:
            was_gone = self._engine_ended
            self._heard()
            if was_gone and self._wiring.lease_handle.may_publish():
                self._renew()

    @property
    def _engine_ended(self) -> bool:
        """Whether we said that the engine is gone, and have not heard of it since."""
        return self._engine_ended_at_s >= self._last_message_at_s

    async def _received(self, frames: list[bytes]) -> NewIncarnation | None:
        """Take one message of the live socket."""
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE.size:
            exc = BadRecord("bad_frames", f"{len(frames)} frames, no sequence number")
            self._dead_letter(b"".join(frames), exc)
            return None
        batch, state = Batch(SEQUENCE.unpack(frames[-2])[0], frames[-1]), self._state
        if batch.sequence < state.window.next:
            # It came by replay already, or the engine restarted and counts from 0 again.
            if state.differs(batch):
                return await self._judge(contradicted=True)
            if batch.sequence not in state.digests:
                return await self._judge()
            self.counters.repeated += 1
            return None
        state.window.offer(batch)
        await self._drain()
        return None

    async def _drain(self) -> None:
        """Publish whatever has its turn."""
        while (batch := self._state.window.take()) is not None:
            await self._publish(batch)

    async def _publish(self, batch: Batch) -> None:
        await self._allowed()
        digest = self._state.remember(batch)
        try:
            payload = decode_payload(batch.payload, self._block_size)
            self._writer.write(batch.sequence, digest, payload.emitted_at_ms, payload.events, payload.n_unindexed)
            self.counters.published += 1
        except BadRecord as exc:
            # Its number is then missing on Kafka: the agent degrades the rank, which is the truth.
            if exc.reason != "too_large":
                self._writer.ledger.lost_events()  # one that is only too large is in the ledger, and can be restated
            self._dead_letter(batch.payload, exc)

    # -- gaps ----------------------------------------------------------------------------------------------------------

    async def _attend_gap(self) -> NewIncarnation | None:
        """Fill the gap before the batches held, or give it up."""
        state = self._state
        while (until := state.window.gap_until) is not None:
            now_s = time.monotonic()
            if state.gap is None:
                self.counters.gaps += 1
                state.gap = _Gap(now_s, now_s)
            gap = state.gap
            over = gap.attempts > len(FILL_BACKOFF_S) or now_s - gap.since_s >= GAP_HOLD_S or state.window.full
            if self._replay is None or over:
                await self._lose(until)
                state.gap = None
                continue
            if now_s < gap.due_at_s:
                return None  # live batches are taken meanwhile
            missing = state.window.next
            fill = await self._fill()
            if fill.contradicted:
                return await self._judge(contradicted=True)
            if fill.answered and fill.highest < until:
                # The engine itself has never numbered so high: what is held is an older life's.
                log.warning("rank %s: batch %d is none of this life", self.rank, until)
                self.counters.foreign += state.window.drop()
                state.gap = None
                return await self._judge()
            if fill.progressed:
                self.counters.gap_batches_filled += max(0, min(until, state.window.next) - missing)
                gap.attempts = 0
            else:
                gap.due_at_s = time.monotonic() + FILL_BACKOFF_S[min(gap.attempts, len(FILL_BACKOFF_S) - 1)]
                gap.attempts += 1
        state.gap = None
        return None

    async def _fill_and_judge(self) -> NewIncarnation | None:
        """Fill what is missing at the end; a NewIncarnation where the engine's batches are not those published."""
        if self._replay is None:
            return None
        fill = await self._fill()
        return await self._judge(contradicted=True) if fill.contradicted else None

    async def _fill(self) -> _Fill:
        """Publish what the engine has kept, from the next batch wanted on.

        The last one published is asked for as well: its bytes prove that this is the life that they continue.
        """
        state, fill = self._state, _Fill()
        assert self._replay is not None
        replay_check = state.window.next - 1
        start = replay_check if replay_check in state.digests else state.window.next
        self.counters.replays += 1
        first = True
        try:
            async with aclosing(replay(self._wiring.context, self._replay, start)) as batches:
                async for batch in batches:
                    self._heard()
                    fill.highest = max(fill.highest, batch.sequence)
                    if state.differs(batch):
                        fill.contradicted = True
                        return fill
                    if first and batch.sequence > start:
                        # A jump further on is the socket's, which drops beyond its mark: the next attempt asks again.
                        await self._forgotten(batch.sequence)
                    first = False
                    before = state.window.next
                    state.window.offer(batch)
                    await self._drain()
                    fill.progressed |= state.window.next > before
            fill.answered = True
            # Of what it sent an engine has kept at least the last, so who has nothing from here on never sent it.
            fill.contradicted = fill.highest == BEFORE_FIRST and start == replay_check
        except ReplaySilent as exc:
            self.counters.replays_silent += 1
            log.warning("rank %s: %s", self.rank, exc)
        return fill

    async def _forgotten(self, kept_from: int) -> None:
        """The engine has nothing before `kept_from`; what is held may still be older."""
        while self._state.window.next < kept_from:
            held = self._state.window.gap_until
            await self._lose(kept_from if held is None else min(kept_from, held))

    async def _lose(self, until: int) -> None:
        """Publish what is there behind a gap; if Kafka lacks it too, the agent sees that in the numbers."""
        first = self._state.window.next
        lost = self._state.window.skip_to(until)
        if lost:
            log.warning("rank %s: batches %d to %d are lost", self.rank, first, until - 1)
            self.counters.gap_batches_lost += lost
            self._writer.ledger.lost_events()
        await self._drain()

    # -- what else is said ---------------------------------------------------------------------------------------------

    async def _restate(self, request: ResyncRequest) -> None:
        """Send the whole ledger, if the request is for this life and was not answered already."""
        state, writer = self._state, self._writer
        if not state.restatements.wanted(request, writer.incarnation, writer.sequence, time.monotonic()):
            log.info("rank %s: not restated for attempt %d at %d", self.rank, request.attempt, request.sequence)
            return
        now_us = _now_us()
        # On a thread: other ranks' batches, and everybody's leases, would wait for seconds.
        pieces = await asyncio.to_thread(writer.restatement, now_us)
        for piece in pieces:
            await self._allowed()
            writer.send_chunk(piece, now_us // 1000)
            await asyncio.sleep(0)
        state.restatements.sent(writer.sequence, time.monotonic())
        self.counters.restatements += 1
        self.counters.restatement_chunks += len(pieces)
        log.info(
            "rank %s: restated to batch %d, %d blocks, %s: %s",
            self.rank,
            writer.sequence,
            len(writer.ledger),
            "exact" if writer.ledger.complete else "not exact",
            request.reason,
        )

    async def _beat(self) -> None:
        """Say every third of the lease that this rank is fed, while its engine is heard of."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            heard = time.monotonic() - self._last_message_at_s < self._lease_s
            if self._begun and heard and not self._engine_ended and self._wiring.lease_handle.may_publish():
                self._renew()

    def _renew(self) -> None:
        self._promise(round(self._lease_s * 1000))

    def _promise(self, lease_ms: int) -> None:
        self._writer.heartbeat(self._wiring.lease_handle.lease.bridge, lease_ms, _now_us() // 1000)
        self.counters.heartbeats += 1

    async def _allowed(self) -> None:
        await self._wiring.lease_handle.allowed(self._wiring.term)

    def _heard(self) -> None:
        self._last_message_at_s = time.monotonic()

    def _dead_letter(self, payload: bytes, exc: BadRecord) -> None:
        self.counters.dead_letters += 1
        log.warning("dead letter from rank %s at %s: %s", self.rank, self._events, exc)
        self._wiring.kafka.produce(
            topics(self._wiring.settings).dead_letters.name,
            key=worker_key(self.rank.worker_id),
            value=dead_letter_value(payload),
            headers=dead_letter_headers(self._events, exc, len(payload)),
        )


def counters_text(counters: FeedCounters) -> str:
    """The counters that a person may want to know of, as text; the rest follows from traffic."""
    usual = ("published", "heartbeats", "replays", "repeated")
    return (
        ", ".join(f"{name} {n}" for name, n in asdict(counters).items() if n and name not in usual) or "nothing unusual"
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


async def engine_start(http: aiohttp.ClientSession, url: str) -> Evidence:
    """The engine process's start time in microseconds, as its metrics tell it. Raises ClientError, TimeoutError."""
    async with http.get(url) as response:
        text = await response.text() if response.status == 200 else ""
    found = _START_TIME.search(text)
    try:
        return Evidence(True, Incarnation(round(float(found[1]) * 1_000_000)) if found else None)
    except (ValueError, OverflowError):
        return Evidence(True, None)


def _now_us() -> int:
    return time.time_ns() // 1000

"""The feed of one rank: from the engine's sockets to Kafka, one incarnation after another.

What lives here: the receive loop, the change of incarnations, publishing, restatements. What must not: whether this
bridge may feed the engine (lease), the order of batches and the filling of gaps (gap_filling), what a payload means
(dialects), which events change what the rank holds (ledger), and whether it is the same incarnation (continuity).

An engine numbers its batches from 0 in each incarnation and sends them in that order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import assert_never

import aiohttp
import zmq
import zmq.asyncio

from streams.core.events import BEFORE_FIRST, ResyncRequest
from streams.core.ids import DpRank, Incarnation, RankId
from streams.engines.address import port_above
from streams.engines.continuity import (
    Evidence,
    KnownIncarnation,
    NewIncarnation,
    ReplayCheck,
    SameIncarnation,
    Undecided,
    decide_at_start,
    decide_while_feeding,
    needs_replay_check,
)
from streams.engines.cxl_names import CxlNames
from streams.engines.dead_letters import of_frames, of_payload
from streams.engines.dialects.interface import DecodedBatch, Decoder, UnusableEvent, undecodable
from streams.engines.feed_counters import FeedCounters
from streams.engines.gap_filling import GapFiller, ReplayFinding
from streams.engines.heartbeats import Heartbeats
from streams.engines.ledger import Ledger
from streams.engines.process_start import read_process_start
from streams.engines.publisher import RankWriter
from streams.engines.recovery import RecoveredRank, ledger_of
from streams.engines.replay import SEQUENCE, Batch, ReplaySilent, check_last_batch, replay
from streams.engines.restatements import Restatements
from streams.engines.wiring import EngineWiring
from streams.errors import BadRecord, KvStreamsError
from streams.kafka import dead_letter_headers, worker_key
from streams.topics import topics

log = logging.getLogger(__name__)

#: Batches that wait in the socket. ZMQ drops further ones; the numbers then show a gap, which the replay socket fills.
RECEIVE_HWM = 100_000

#: Time between two checks of an engine's incarnation, and between two requests for its last batches while it is quiet.
INCARNATION_CHECK_S = 2.0

#: Time between two attempts to reach an engine that does not answer.
RETRY_S = 1.0

#: After a reconnection, the next batch is held back for at most this long until the engine's metrics answer.
RECONNECT_CHECK_S = 10.0

#: Resync requests that wait for the loop. A partition's owner sends one at a time and repeats it.
REQUESTS_MAX = 4

#: How long the loop waits for a batch before it does its other work.
IDLE_S = 0.25


@dataclass(slots=True)
class _IncarnationState:
    """What belongs to one incarnation of the engine and ends with it. started: from its metrics, None if not known."""

    started: Incarnation | None
    batches: GapFiller
    decoder: Decoder
    restatements: Restatements = field(default_factory=Restatements)


class RankFeed:
    """Feeds one rank, for as long as the bridge holds the engine's lease."""

    def __init__(
        self, wiring: EngineWiring, dp_rank: int, recovered: RecoveredRank | None, counters: FeedCounters | None = None
    ) -> None:
        """recovered: the rank's state as read from Kafka. counters: the rank's counters, which outlive this feed."""
        self._wiring = wiring
        self._recovered = recovered
        self.rank = RankId(wiring.engine.worker_id, DpRank(dp_rank))
        self._events = port_above(wiring.engine.events, dp_rank)
        self._replay = port_above(wiring.engine.replay, dp_rank) if wiring.engine.replay else None
        self._dialect = wiring.engine.dialect
        self._block_size = wiring.settings.block_size_of(wiring.model)
        self.counters = FeedCounters() if counters is None else counters
        self._writer = RankWriter(
            wiring.settings,
            wiring.kafka,
            self.rank,
            wiring.model,
            recovered.incarnation if recovered else Incarnation(0),
            self._dialect.counts_copies,
            wiring.epoch_of,
        )
        self._heartbeats = Heartbeats(wiring, self._writer, self.counters)
        self._state = self._incarnation_state(None)
        self._requests: deque[ResyncRequest] = deque(maxlen=REQUESTS_MAX)
        self._judged_at_s = 0.0

    def counts(self) -> Mapping[str, int]:
        """Return a copy of the rank's counters by name (see FeedCounters)."""
        return self.counters.counts()

    def request_restatement(self, request: ResyncRequest) -> None:
        """Queue a request; the loop answers it between two batches."""
        self.counters.resyncs_requested += 1
        self._requests.append(request)

    async def run(self) -> None:
        """Feed until cancelled. Raises LeaseLost, and KvStreamsError if Kafka does not take a batch."""
        try:
            await self._run_incarnations()
        finally:
            log.info("rank %s: the feed ends: %s", self.rank, self.counters)

    # -- incarnations --------------------------------------------------------------------------------------------------

    async def _run_incarnations(self) -> None:
        """Feed one incarnation of the engine after another, each through a socket of its own."""
        decision: NewIncarnation | SameIncarnation | None = None
        while True:
            # A batch carries a number but no incarnation. Batches of an older incarnation that wait in its socket could
            # not be distinguished from those of the new one, so that socket is closed.
            with self._wiring.context.socket(zmq.SUB) as socket:
                socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                try:
                    socket.connect(self._events)
                    started: Incarnation | None = None
                    if decision is None:
                        started, decision = await self._decide_at_start()
                    match decision:
                        case NewIncarnation(incarnation):
                            await self._begin(incarnation, started)
                            contradicted = await self._catch_up()
                        case SameIncarnation():
                            contradicted = await self._resume(started)
                        case _:
                            assert_never(decision)
                    decision = contradicted or await self._receive(socket, monitor)
                finally:
                    self._heartbeats.begun = False
                    socket.disable_monitor()
                    monitor.close(linger=0)

    async def _decide_at_start(self) -> tuple[Incarnation | None, NewIncarnation | SameIncarnation]:
        """Wait until the engine answers; return its start time, if reported, and whether its incarnation is new."""
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
        """Begin an incarnation, and publish its start, which empties the rank before the incarnation's first batch."""
        log.info("rank %s: incarnation %d begins", self.rank, incarnation)
        self.counters.incarnations += 1
        if started is None:
            started = (await self._start_time()).started
        self._state = self._incarnation_state(started)
        self._writer.begin_incarnation(incarnation)
        await self._publish_beginning()

    async def _publish_beginning(self) -> None:
        await self._wait_for_lease()
        self._writer.write(BEFORE_FIRST, 0, _now_us() // 1000, ())
        # The first heartbeat follows at once. Without it, the rank would have no lease in this incarnation yet, so a
        # crash of the bridge would not be noticed.
        self._heartbeats.renew()
        self._heartbeats.begun = True

    async def _resume(self, started: Incarnation | None) -> NewIncarnation | None:
        """Continue the incarnation that Kafka has, after its last batch.

        Returns a NewIncarnation if the engine's batches contradict those on Kafka.
        """
        recovered = self._recovered
        assert recovered is not None  # without it there was no incarnation to continue
        self._recovered = None  # valid only at the start of this feed
        self.counters.resumed += 1
        self._state = self._incarnation_state(started)
        if recovered.is_removed or recovered.sequence == BEFORE_FIRST:
            self._writer.begin_incarnation(recovered.incarnation)
            await self._publish_beginning()  # this also brings back a worker that was removed
            return await self._catch_up()
        ledger_and_names = await self._ledger_from_engine(recovered.sequence)
        if ledger_and_names is None:
            self.counters.resumed_from_table += 1
            counts_copies = self._dialect.counts_copies
            ledger = ledger_of(recovered.ledger.restated(), recovered.ledger.complete, counts_copies=counts_copies)
            names = recovered.names
        else:
            ledger, names = ledger_and_names
        log.info("rank %s: continues after batch %d with %d blocks", self.rank, recovered.sequence, len(ledger))
        self._writer.resume(recovered.sequence, recovered.digest, ledger, names)
        self._state.batches.continue_after(recovered.sequence, recovered.digest)
        self._heartbeats.begun = True
        return await self._catch_up()

    async def _ledger_from_engine(self, until: int) -> tuple[Ledger, CxlNames] | None:
        """Rebuild the ledger as of batch `until`, and the names of blocks in CXL pools, from the engine's own batches.

        Returns None if the engine does not return all of these batches. Nothing is published, since Kafka has them. The
        result contains copies and second names, which the table lacks. On success, the incarnation continues with the
        decoder that decoded these batches.
        """
        if self._replay is None:
            return None
        ledger, names, following = Ledger(self._dialect.counts_copies), CxlNames(), 0
        decoder = self._dialect.decoder(self._block_size)
        try:
            async with aclosing(replay(self._wiring.context, self._replay, 0)) as batches:
                async for batch in batches:
                    self._heartbeats.heard()
                    if batch.sequence != following:
                        return None
                    self._state.batches.digests.add(batch)
                    decoded = _decode(decoder, batch.payload)
                    try:
                        for event in decoded.events:
                            names.apply(event, ledger)
                    except BadRecord:
                        ledger.lost_events()
                    if decoded.is_incomplete:
                        ledger.lost_events()
                    following += 1
                    if following > until:
                        self._state.decoder = decoder
                        return ledger, names
        except ReplaySilent as exc:
            log.warning("rank %s: %s", self.rank, exc)
        return None

    async def _judge(self, *, contradicted: bool = False) -> NewIncarnation | None:
        """Check whether the engine is still the same process; return the new incarnation if not."""
        state, writer = self._state, self._writer
        self._judged_at_s = time.monotonic()
        evidence = await self._start_time()
        known = KnownIncarnation(writer.incarnation, writer.sequence, writer.digest)
        if evidence.started is None or state.started is None:
            evidence = await self._with_replay_check(evidence, known)
        decision = decide_while_feeding(known, state.started, evidence, _now_us(), contradicted=contradicted)
        if isinstance(decision, NewIncarnation):
            log.info("rank %s: the engine restarted: %s", self.rank, evidence)
            return decision
        if state.started is None and evidence.replay_check is ReplayCheck.SAME:
            state.started = evidence.started
        return None

    async def _judge_finding(self, finding: ReplayFinding) -> NewIncarnation | None:
        match finding:
            case ReplayFinding.CONSISTENT:
                return None
            case ReplayFinding.CONTRADICTED:
                return await self._judge(contradicted=True)
            case ReplayFinding.FOREIGN:
                return await self._judge()
            case _:
                assert_never(finding)

    async def _with_replay_check(self, evidence: Evidence, known: KnownIncarnation) -> Evidence:
        if known.sequence == BEFORE_FIRST:
            return evidence
        replay_check = await check_last_batch(self._wiring.context, self._replay, known.sequence, known.digest)
        if replay_check is not ReplayCheck.SILENT:
            self._heartbeats.heard()
        return Evidence(evidence.reachable, evidence.started, replay_check)

    async def _start_time(self) -> Evidence:
        try:
            evidence = await read_process_start(self._wiring.http, self._wiring.engine.metrics_url)
        except (aiohttp.ClientError, TimeoutError):
            return Evidence(reachable=False, started=None)
        self._heartbeats.heard()
        return evidence

    def _incarnation_state(self, started: Incarnation | None) -> _IncarnationState:
        batches = GapFiller(self, self._wiring.context, self._replay, self.rank, self.counters)
        return _IncarnationState(started, batches, self._dialect.decoder(self._block_size))

    # -- the receive loop ----------------------------------------------------------------------------------------------

    async def _receive(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> NewIncarnation:
        """Receive until the engine begins a new incarnation."""
        async with asyncio.TaskGroup() as tasks:
            heartbeats = tasks.create_task(self._heartbeats.run())
            try:
                return await self._receive_all(socket, monitor)
            finally:
                heartbeats.cancel()

    async def _receive_all(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> NewIncarnation:
        quiet_since_s = time.monotonic()
        logged_counters = str(self.counters)
        while True:
            begun: NewIncarnation | None = None
            if await socket.poll(int(IDLE_S * 1000)):
                frames = await socket.recv_multipart()
                self._heartbeats.heard()
                quiet_since_s = time.monotonic()
                if await monitor.poll(0):
                    begun = await self._judge_reconnection(monitor)
                begun = begun or await self._take(frames)
            elif await monitor.poll(0):
                await self._heartbeats.check_break()
            begun = begun or await self._judge_finding(await self._state.batches.fill_gap())
            now_s = time.monotonic()
            if begun is None and now_s - quiet_since_s >= INCARNATION_CHECK_S:
                quiet_since_s = now_s
                begun = await self._catch_up()  # the last batch before a quiet time may have been dropped as well
            if begun is None and now_s - self._judged_at_s >= INCARNATION_CHECK_S:
                begun = await self._judge()
            if begun is not None:
                return begun
            while self._requests:
                await self._restate(self._requests.popleft())
            if self._writer.failed:
                raise KvStreamsError(f"Kafka did not take {len(self._writer.failed)} batches: {self._writer.failed[0]}")
            if str(self.counters) != logged_counters:
                logged_counters = str(self.counters)
                log.info("rank %s: %s", self.rank, logged_counters)

    async def _judge_reconnection(self, monitor: zmq.asyncio.Socket) -> NewIncarnation | None:
        """Judge the incarnation after a reconnection: the next batch may come from another process and still fit."""
        while await monitor.poll(0):
            await monitor.recv_multipart()
        until_s = time.monotonic() + RECONNECT_CHECK_S
        while True:
            evidence = await self._start_time()
            if evidence.reachable or time.monotonic() > until_s:
                return await self._judge()
            await asyncio.sleep(RETRY_S)

    async def _take(self, frames: list[bytes]) -> NewIncarnation | None:
        """Take one message of the live socket."""
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE.size:
            exc = BadRecord("bad_frames", f"the message has {len(frames)} frames and no sequence number")
            self._dead_letter(of_frames(frames), sum(map(len, frames)), exc)
            return None
        batch, batches = Batch(SEQUENCE.unpack(frames[-2])[0], frames[-1]), self._state.batches
        if batch.sequence < batches.next:
            # Either a replay brought it already, or the engine restarted and numbers its batches from 0 again.
            if batches.digests.contradict(batch):
                return await self._judge(contradicted=True)
            if batch.sequence not in batches.digests:
                return await self._judge()
            self.counters.batches_repeated += 1
            return None
        await batches.offer(batch)
        return None

    async def _catch_up(self) -> NewIncarnation | None:
        """Publish what the engine has after the last batch; return a new incarnation if its batches contradict ours."""
        return await self._judge_finding(await self._state.batches.catch_up())

    # -- the sink of batches in order (gap_filling.BatchSink) ----------------------------------------------------------

    async def publish(self, batch: Batch) -> None:
        """Decode and publish the next batch of the incarnation. Raises LeaseLost.

        Its number is on Kafka afterwards, whatever the payload contains: otherwise nothing would show that it is
        missing until the engine sends another batch.
        """
        await self._wait_for_lease()
        state = self._state
        digest = state.batches.digests.add(batch)
        decoded = _decode(state.decoder, batch.payload)
        unusable = list(decoded.unusable)
        try:
            self._writer.write(
                batch.sequence,
                digest,
                decoded.emitted_at_ms,
                decoded.events,
                decoded.n_unindexed,
                is_incomplete=decoded.is_incomplete,
            )
        except BadRecord as exc:
            unusable.append(UnusableEvent(None, exc))
        self.counters.batches_published += 1
        self.counters.blocks_unindexed += decoded.n_unindexed
        self.counters.events_ignored += decoded.n_ignored
        if unusable:
            self.counters.events_unusable += len(unusable)
            letter = of_payload(batch.sequence, len(batch.payload), digest, unusable)
            self._dead_letter(letter, len(batch.payload), unusable[0].error)

    def on_batches_lost(self) -> None:
        """Note that the ledger lacks what the lost batches contained."""
        self._writer.ledger.lost_events()

    def on_engine_heard(self) -> None:
        """Note that the engine answered a replay request."""
        self._heartbeats.heard()

    # -- everything else that is published -----------------------------------------------------------------------------

    async def _restate(self, request: ResyncRequest) -> None:
        """Publish the whole ledger, if the request is for this incarnation and has not been answered yet."""
        state, writer = self._state, self._writer
        if not state.restatements.answers(request, writer.incarnation, writer.sequence, time.monotonic()):
            log.info("rank %s: no restatement for attempt %d at batch %d", self.rank, request.attempt, request.sequence)
            return
        now_us = _now_us()
        # On a thread: the batches of other ranks and the renewals of all leases would otherwise wait for seconds.
        pieces = await asyncio.to_thread(writer.restatement, now_us)
        for piece in pieces:
            await self._wait_for_lease()
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

    async def _wait_for_lease(self) -> None:
        await self._wiring.lease_handle.allowed(self._wiring.term)

    def _dead_letter(self, letter: bytes, n_bytes: int, exc: BadRecord) -> None:
        """Write a dead letter. n_bytes: the length of the engine's message, which is not part of it."""
        self.counters.dead_letters += 1
        log.warning("dead letter from rank %s at %s: %s", self.rank, self._events, exc)
        self._wiring.kafka.produce(
            topics(self._wiring.settings).dead_letters.name,
            key=worker_key(self.rank.worker_id),
            value=letter,
            headers=dead_letter_headers(self._events, exc, n_bytes),
        )


def _decode(decoder: Decoder, payload: bytes) -> DecodedBatch:
    """Decode a payload; one that cannot be decoded is a batch without events, whose events are lost."""
    try:
        return decoder.decode(payload)
    except BadRecord as exc:
        return undecodable(exc, _now_us() // 1000)


def _now_us() -> int:
    return time.time_ns() // 1000

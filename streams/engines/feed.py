"""The feed of one rank: from the engine's sockets to Kafka, one incarnation after another.

What lives here: the loop, and performing what the machine decides. What must not: what is decided (feed_machine, after
the table in feed_table), messages and their order (receiving, gap_filling), decoding and writing (batch_publishing),
restatements (restating), how evidence about the engine's process is obtained (evidence), and whether this bridge may
feed the engine (lease).

An engine numbers its batches from 0 in each incarnation and sends them in that order.

The loop never waits for the engine's HTTP server, and never for its replay socket while batches arrive. Through one
connection, all batches come from one process. So once it is known which incarnation a connection belongs to, its
batches are published until it breaks, whatever the HTTP server does. Until it is known, they wait in the socket (at
most RECEIVE_HWM), and nothing of the connection is published.

Another process may serve another model. So whenever an incarnation begins, a task asks the engine which model it
serves. Until it is answered, the feed is not live; after MODEL_WAIT_S, it is live without an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streams.core.events import BEFORE_FIRST, FeedState, ResyncRequest
from streams.core.ids import Incarnation, RankId
from streams.engines.address import port_above
from streams.engines.batch_publishing import BatchPublisher
from streams.engines.connection import RECONNECT_S_MIN
from streams.engines.continuity import Evidence, KnownIncarnation
from streams.engines.dialects.interface import UnusableEvent
from streams.engines.evidence import EvidenceReader
from streams.engines.feed_counters import FeedCounters
from streams.engines.feed_machine import (
    Ask,
    BeginIncarnation,
    CheckModel,
    EvidenceFound,
    FeedMachine,
    Instruction,
    Occurred,
    PageRead,
    PageUnreachable,
    ReportDecision,
    Tick,
)
from streams.engines.feed_table import Action, Signal
from streams.engines.gap_filling import ReplayFinding
from streams.engines.heartbeats import Heartbeats, Withheld
from streams.engines.model_check import ModelCheck
from streams.engines.process_start import ListedModel
from streams.engines.rank_writer import RankWriter
from streams.engines.receiving import Receiver
from streams.engines.recovery import RecoveredRank
from streams.engines.restating import Restater
from streams.engines.resuming import RebuiltRank, rebuild
from streams.engines.turns import share_of
from streams.engines.wiring import EngineWiring
from streams.errors import KvStreamsError

log = logging.getLogger(__name__)

#: How long a feed that is no longer wanted waits until its last batch is sent.
FINISH_S = 1.0

#: Time between two checks whether there is something new to log about the rank.
LOG_COUNTERS_S = 1.0

#: How long the loop waits for a batch before it does its other work.
IDLE_S = 0.25


class RankFeed:
    """Feeds one rank, for as long as the bridge holds the engine's lease."""

    def __init__(
        self,
        wiring: EngineWiring,
        socket: int,
        recovered: RecoveredRank | None,
        counters: FeedCounters | None = None,
        served: ListedModel | None = None,
    ) -> None:
        """socket: which of the engine's sockets, in the order of their ports; `wiring.ranks` has its rank.

        recovered: the rank's state as read from Kafka. counters: the rank's counters, which outlive this feed.

        served: whether the engine serves the model of this feed; it is not checked without it.
        """
        engine = wiring.engine
        assert engine.events is not None  # an engine without events has another feed (eventless_feed)
        self._wiring = wiring
        self._recovered = recovered
        self._replaces_state = recovered is not None and not recovered.is_removed
        self._socket = socket
        self.rank = RankId(engine.worker_id, wiring.ranks.of(socket))
        self._address = port_above(engine.events, socket)
        self._replay_address = port_above(engine.replay, socket) if engine.replay else None
        self.counters = FeedCounters() if counters is None else counters
        self._writer = RankWriter(
            wiring.settings,
            wiring.kafka,
            self.rank,
            wiring.model,
            recovered.incarnation if recovered else Incarnation(0),
            engine.dialect.counts_copies,
            wiring.epoch_of,
            wiring.in_flight,
            may_resume=True,
        )
        self._machine = FeedMachine(
            recovered.known_incarnation if recovered else None,
            share_of(self.rank),
            is_of_another=recovered is not None
            and (recovered.progress.model not in ("", wiring.model) or wiring.ranks.is_moved(socket)),
        )
        self._heartbeats = Heartbeats(wiring, self._writer, self.counters)
        self._publisher = BatchPublisher(
            wiring,
            self._address,
            self._writer,
            self._heartbeats,
            self.counters,
            self._machine,
            self._feed_state,
            socket,
        )
        self._receiver = Receiver(
            wiring, self._publisher, self._heartbeats, self.counters, self._machine, self._perform_at_once, socket
        )
        self._restater = Restater(wiring, self._writer, self._publisher, self.counters)
        self._evidence = EvidenceReader(wiring, self._replay_address, self.rank, self._heartbeats.note_http)
        self._model_check = ModelCheck(served)

    def counts(self) -> Mapping[str, int]:
        """Return a copy of the rank's counters by name (see FeedCounters)."""
        return self.counters.counts()

    def request_restatement(self, request: ResyncRequest) -> None:
        """Queue a request; the loop answers it between two batches."""
        self._restater.request(request)
        self._receiver.wake()

    def note_requests_running(self) -> None:
        """Note that the engine's metrics show requests that are running, or tokens that were processed."""
        # A proven stream has no events to report while all prompts are cached, or shorter than a block.
        missing_events = self._publisher.missing_events
        if self._feed_state() is not FeedState.LIVE and missing_events.on_requests(time.monotonic()):
            log.warning(
                "rank %s: requests are running, but no event has arrived from %s. Either the engine publishes no "
                "events (vLLM: --kv-events-config with enable_kv_cache_events and publisher zmq), or the port is "
                "wrong, or the ports of events and replay are swapped",
                self.rank,
                self._address,
            )

    def note_sleep(self, sleeps: bool) -> None:
        """Note whether the engine sleeps, by its metrics: then it takes no requests, and may have dropped its cache."""
        self._publisher.note_sleep(sleeps)
        if sleeps:
            self._heartbeats.withhold(Withheld.ASLEEP)
            self._heartbeats.show(self._feed_state())
        else:
            self._heartbeats.admit(Withheld.ASLEEP)

    def note_start_on_page(self, started: Incarnation) -> None:
        """Note when the engine's process started, as a page shows that was read to scrape metrics.

        If it is the process that is being fed, there is no need to read another page for that reason. Otherwise it is
        examined at once.
        """
        self._heartbeats.note_http(Evidence(reachable=True, started=started))
        for instruction in self._machine.handle(PageRead(started, time.monotonic())):
            self._perform_at_once(instruction)

    def note_unreachable_page(self) -> None:
        """Note that the engine's metrics page could not be requested: the process may have ended."""
        self._machine.handle(PageUnreachable(time.monotonic()))
        self._receiver.wake()

    @property
    def has_backlog(self) -> bool:
        """Whether a message waits in the socket although the rank's last record says that its feed is live."""
        return self._writer.feed is FeedState.LIVE and self._receiver.connection.has_message

    def passes_on(self, now_s: float) -> bool:
        """Whether Kafka takes the rank's records, and routers know the state of this feed.

        Until then they have the last record of a former feed, which may say that it is live.
        """
        return not self._writer.records.is_late(now_s) and (
            not self._replaces_state or self._writer.records.is_read(now_s)
        )

    def has_waited_for_kafka(self, now_s: float, longer_than_s: float) -> bool:
        """Whether a record has waited for space in Kafka's client for so long."""
        return self._publisher.has_waited(now_s, longer_than_s)

    async def finish(self) -> None:
        """Wait until Kafka's client has a batch that waits for its CXL transitions, at most FINISH_S."""
        if not self._writer.records.waits_for_transitions:
            return
        try:
            async with asyncio.timeout(FINISH_S):
                await self._publisher.may_write()
        except (TimeoutError, KvStreamsError) as exc:
            log.info("rank %s: its last batch was not sent: %s", self.rank, str(exc) or type(exc).__name__)

    def retire(self, reason: str) -> None:
        """Let the rank get no requests from now on. The caller then ends the feed."""
        self._heartbeats.retire(reason)

    async def run(self) -> None:
        """Feed until cancelled. Raises LeaseLost, ModelChanged, and KvStreamsError if Kafka refuses a record."""
        try:
            async with asyncio.TaskGroup() as tasks:
                heartbeats = tasks.create_task(self._heartbeats.run())
                try:
                    with self._receiver.connection:
                        await self._feed()
                finally:
                    heartbeats.cancel()
                    self._restater.close()
                    self._model_check.close()
                    self._evidence.close()
                    self._receiver.order.abort()
        finally:
            log.info("rank %s: the feed ends: %s", self.rank, self.counters)

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Do everything that is due, then wait for the next thing that happens."""
        self._state_the_known_incarnation()
        logged_counters, log_at_s = str(self.counters), 0.0
        while True:
            await self._wait()
            await self._receiver.attend()
            await self._take_evidence()
            self._model_check.attend()
            await self._receiver.take_live()
            await self._advance_replay()
            await self._tick()
            self._heartbeats.show(self._feed_state())
            while self._restater.has_requests and self._machine.has_incarnation:
                await self._restater.answer(is_proven=self._feed_state() is FeedState.LIVE)
            await self._restater.restate_placements()
            if self._receiver.failure is not None:
                raise self._receiver.failure
            self._publisher.check_deliveries()
            if (now_s := time.monotonic()) >= log_at_s:
                log_at_s = now_s + LOG_COUNTERS_S
                if str(self.counters) != logged_counters:
                    logged_counters = str(self.counters)
                    log.info("rank %s: %s", self.rank, logged_counters)

    async def _wait(self) -> None:
        """Wait until a message, an answer, or evidence arrives, at most IDLE_S. Other tasks always get their turn."""
        receiver, connection = self._receiver, self._receiver.connection
        answer = receiver.order.answer if self._machine.may_replay else None
        pending: tuple[asyncio.Future[Any] | None, ...] = (
            connection.event,
            self._evidence.pending,
            answer,
            self._restater.pending,
            self._model_check.pending,
        )
        futures = [future for future in pending if future is not None]
        await receiver.wait(futures, IDLE_S if connection.is_open else RECONNECT_S_MIN)

    async def _take_evidence(self) -> None:
        answer = self._evidence.take()
        if answer is not None:
            question, evidence = answer
            event = EvidenceFound(question, evidence, self._published(), time.monotonic(), _now_us())
            await self._perform(self._machine.handle(event))

    async def _advance_replay(self) -> None:
        if not self._machine.may_replay:
            return
        match await self._receiver.order.advance():
            case ReplayFinding.CONTRADICTED:
                await self._perform(self._machine.handle(Occurred(Signal.REPLAY_DIFFERS, time.monotonic())))
            case ReplayFinding.FOREIGN:
                await self._perform(self._machine.handle(Occurred(Signal.REPLAY_TOO_SHORT, time.monotonic())))
            case ReplayFinding.CONSISTENT:
                pass

    async def _tick(self) -> None:
        replays = self._receiver.order.answer is not None
        await self._perform(self._machine.handle(Tick(self._published(), replays, time.monotonic(), _now_us())))

    def _published(self) -> KnownIncarnation:
        """Return the writer's incarnation and its last batch."""
        return KnownIncarnation(self._writer.incarnation, self._writer.sequence, self._writer.digest)

    def _feed_state(self) -> FeedState:
        """Return what the rank's records state about its feed at this moment."""
        now_s, order = time.monotonic(), self._receiver.order
        return self._machine.feed_state(
            now_s,
            order.answered_from_s,
            is_behind=order.is_behind(now_s),
            is_late=self._wiring.is_late(now_s),
            is_unconfirmed=self._model_check.is_unconfirmed(now_s)
            or self._wiring.ranks.are_contradicted(now_s)
            or self._publisher.may_lack_clear,
        )

    # -- instructions --------------------------------------------------------------------------------------------------

    async def _perform(self, instructions: Iterable[Instruction]) -> None:
        """Perform instructions in their order."""
        for instruction in instructions:
            match instruction:
                case BeginIncarnation(incarnation):
                    await self._begin(incarnation)
                case Action.RESUME:
                    await self._resume()
                case _:
                    self._perform_at_once(instruction)

    def _perform_at_once(self, instruction: Instruction) -> None:
        """Perform an instruction for which nothing is waited."""
        match instruction:
            case Ask():
                self._evidence.ask(instruction)
            case Action.STOP_ASKING:
                self._evidence.close()
            case Action.REPLAY:
                self._receiver.order.catch_up()
            case Action.STOP_REPLAY:
                self._receiver.order.abort()
            case Action.REOPEN:
                self._receiver.connection.reopen(time.monotonic())
            case Action.DROP:
                self._receiver.drop_held()
            case CheckModel(waits):
                self._model_check.start(waits=waits)
            case Action.NOTE_HEARD:
                self._heartbeats.heard()
            case ReportDecision(decision, evidence):
                log.info("rank %s: %s: %s", self.rank, decision, evidence)
            case Action.REPORT_UNREACHABLE:
                log.warning(
                    "rank %s: %s does not answer, but events arrive: the engine is fed from its events alone",
                    self.rank,
                    self._wiring.engine.metrics_url,
                )
            case _:
                raise AssertionError(f"{instruction} is about a message (receiving), or something is waited for")

    def _state_the_known_incarnation(self) -> None:
        """Let heartbeats state the incarnation that Kafka has, as one that is not fed yet.

        The rank's last records may say that its feed is live, and answers would be exact until the incarnation is
        decided.
        """
        recovered = self._recovered
        if recovered is not None and not recovered.is_removed and recovered.incarnation:
            self._writer.resume(recovered.sequence, recovered.digest, recovered.ledger)
            self._writer.feed = FeedState.UNPROVEN
            self._heartbeats.begun = True

    async def _begin(self, incarnation: Incarnation) -> None:
        """Begin an incarnation, and publish its start, which empties the rank before the incarnation's first batch."""
        await self._publisher.may_write()  # the last batch of the former one, whose transitions are sent already
        log.info("rank %s: incarnation %d begins", self.rank, incarnation)
        self.counters.incarnations += 1
        self._publisher.forget_block_size()
        self._expect_incarnation()
        self._writer.begin_incarnation(incarnation)
        await self._publisher.begin()

    def _expect_incarnation(self) -> None:
        """Start over with an empty order, and another decoder."""
        self._wiring.ranks.begin(self._socket)
        self._receiver.begin()
        self._publisher.expect(self._receiver.order.digests)
        self._restater.begin()

    async def _resume(self) -> None:
        """Continue the incarnation that Kafka has, after its last batch."""
        recovered = self._recovered
        assert recovered is not None  # without it there was no incarnation to continue
        self._recovered = None  # valid only at the start of this feed
        self.counters.resumed += 1
        self._expect_incarnation()
        if recovered.is_removed or recovered.sequence == BEFORE_FIRST:
            self._writer.begin_incarnation(recovered.incarnation)
            await self._publisher.begin()  # this also brings back a worker that was removed
            return
        self._heartbeats.show(FeedState.UNPROVEN)  # the rank's last record may say that it is live
        rebuilt = await self._rebuild(recovered.sequence)
        if rebuilt is None:
            self.counters.resumed_from_table += 1
            ledger = recovered.table_ledger(self._wiring.engine.dialect.counts_copies)
            names = recovered.names
        else:
            ledger, names = rebuilt.ledger, rebuilt.names
            self._publisher.expect(self._receiver.order.digests, rebuilt.decoder)
        log.info("rank %s: continues after batch %d with %d blocks", self.rank, recovered.sequence, len(ledger))
        self._writer.resume(recovered.sequence, recovered.digest, ledger, names)
        self._receiver.order.continue_after(recovered.sequence, recovered.digest)
        self._heartbeats.begun = True

    async def _rebuild(self, until: int) -> RebuiltRank | None:
        """Rebuild what the rank holds as of batch `until` from the engine's replay socket, if it keeps all of them."""
        if self._replay_address is None:
            return None
        return await rebuild(
            self._wiring,
            self._replay_address,
            self.rank,
            until,
            self._receiver.order.digests,
            self._publisher.new_decoder(),
            self._note_replayed,
        )

    def _note_replayed(self, unusable: Sequence[UnusableEvent]) -> None:
        """Note that the engine returned a batch, with these unusable events."""
        self._heartbeats.heard()
        self._publisher.note_refused(unusable)


def _now_us() -> int:
    return time.time_ns() // 1000

"""The feed of one rank: from the engine's sockets to Kafka, one incarnation after another.

What lives here: the receive loop, the change of incarnations, publishing, restatements. What must not: whether this
bridge may feed the engine (lease), the socket (connection), the order of batches and the filling of gaps (gap_filling),
what a payload means (dialects), which events change what the rank holds (ledger), how evidence about the engine's
process is obtained (evidence), and what follows from it (continuity).

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
import enum
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, assert_never

from confluent_kafka import KafkaException

from streams.core.events import BEFORE_FIRST, BlocksStored, FeedState, ResyncRequest
from streams.core.ids import DpRank, Incarnation, RankId
from streams.engines.address import port_above
from streams.engines.connection import RECONNECT_S_MIN, Change, EventConnection
from streams.engines.continuity import (
    Decision,
    Evidence,
    KnownIncarnation,
    NewIncarnation,
    ReplayCheck,
    SameIncarnation,
    Undecided,
    decide_after_connecting,
    decide_at_start,
    decide_while_feeding,
    mint_incarnation,
    needs_replay_check,
)
from streams.engines.cxl_names import CxlNames, PooledRows
from streams.engines.dead_letters import of_frames, of_payload
from streams.engines.dialects.interface import DecodedBatch, Decoder, Dialect, UnusableEvent, undecodable
from streams.engines.evidence import EvidenceReader, Finding
from streams.engines.feed_counters import FeedCounters
from streams.engines.first_of import FirstOf
from streams.engines.gap_filling import GapFiller, ReplayFinding
from streams.engines.heartbeats import Heartbeats
from streams.engines.ledger import Ledger
from streams.engines.link_delay import LinkDelay
from streams.engines.missing_events import MissingEvents
from streams.engines.process_start import ModelChanged, ServedModel
from streams.engines.publisher import RankWriter
from streams.engines.recovery import RecoveredRank
from streams.engines.replay import SEQUENCE, Batch, ReplaySilent, replay
from streams.engines.restatements import Restatements
from streams.engines.turns import HALF, next_turn, share_of
from streams.engines.wiring import EngineWiring
from streams.errors import WRONG_BLOCK_SIZE, BadRecord, KvStreamsError
from streams.kafka import dead_letter_headers, worker_key
from streams.outage import Outage, Repetitions, lasting, repeated
from streams.topics import topics

log = logging.getLogger(__name__)

#: Time between two checks of an engine's incarnation, and between two requests for its last batches. They are requested
#: from a busy engine too: its live batches may be waiting on a slow link, which looks like an engine that does little.
INCARNATION_CHECK_S = 2.0

#: Time between two attempts to reach an engine that does not answer.
RETRY_S = 1.0

#: Batches of another connection are held back for at most this long until something shows which process sends them;
#: the second limit is for a rank without an earlier incarnation, which has no blocks to lose.
EVIDENCE_WAIT_S = 10.0
FIRST_EVIDENCE_WAIT_S = 3.0

#: An engine drops batches until the subscription has reached it, which follows the connection at once. What a replay
#: brings that is requested this much later includes the dropped ones: a round trip takes less.
SUBSCRIBED_AFTER_S = 0.25

#: If messages have been waiting in the socket without a pause for this long, the feed is behind.
BACKLOG_S = 0.5

#: Messages taken at once, before the loop does its other work.
MESSAGES_AT_ONCE = 64

#: Resync requests that wait for the loop. A partition's owner sends one at a time and repeats it.
REQUESTS_MAX = 4

#: Pause before Kafka's client is offered a record again that it had no space for.
FULL_S = 0.02

#: Pause before it is asked whether Kafka has the transitions that a batch waits for, which takes some milliseconds.
TRANSITION_S = 0.005

#: How long a feed that is no longer wanted waits until its last batch is sent.
FINISH_S = 1.0

#: Time between two checks whether there is something new to log about the rank.
LOG_COUNTERS_S = 1.0

#: How long the loop waits for a batch before it does its other work.
IDLE_S = 0.25


class Doubt(enum.Enum):
    """Why no live batch may be published: what has to be found out first."""

    START = "which incarnation the engine is in; the rank has none yet"
    FIRST_CONNECTION = "whether the first connection is to the incarnation that was found out before it was complete"
    RECONNECTION = "whether the engine is still the same process after its connection broke"
    STRAY = "whether a first batch that differs from the published one is from another process than the connection's"
    CONTRADICTED = "whether a batch that differs from the published one is from another process"
    REPLAY_DIFFERS = "whether the replay socket, which contradicts what was published, is another process's"
    FOREIGN = "whether buffered batches were from another process"


#: Doubts because of a live batch or a replay; in all others, the connection is what is not known yet.
_OF_BATCHES = frozenset({Doubt.STRAY, Doubt.CONTRADICTED, Doubt.REPLAY_DIFFERS, Doubt.FOREIGN})


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
        self,
        wiring: EngineWiring,
        dp_rank: int,
        recovered: RecoveredRank | None,
        counters: FeedCounters | None = None,
        served: ServedModel | None = None,
    ) -> None:
        """recovered: the rank's state as read from Kafka. counters: the rank's counters, which outlive this feed.

        served: whether the engine serves the model of this feed; it is not checked without it.
        """
        self._wiring = wiring
        self._served = served
        self._checking_model: asyncio.Task[str | None] | None = None  # `check` of `_served`, until it was answered
        self._unconfirmed_until_s = float("-inf")  # until when the feed is not live for that reason
        self._recovered = recovered
        self._replaces_state = recovered is not None and not recovered.is_removed
        self.rank = RankId(wiring.engine.worker_id, DpRank(dp_rank))
        assert wiring.engine.events is not None  # an engine without events has another feed (eventless_feed)
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
            wiring.in_flight,
            may_resume=True,
        )
        self._heartbeats = Heartbeats(wiring, self._writer, self.counters)
        self._first_of = FirstOf()
        self._connection = EventConnection(
            wiring.context, self._events, wiring.receive_hwm, self._on_message, wiring.watch
        )
        self._evidence = EvidenceReader(wiring, self._replay, self.rank)
        self._events_outage, self._replay_outage = Outage(), Outage()
        self._missing_events = MissingEvents()
        self._state = self._incarnation_state(None)
        self._stored_block_size: int | None = None  # of the blocks that this incarnation stored, if it stored any
        self._recognised: Dialect | None = None  # the dialect that a decoder for any engine has found out
        self._wrong_block_size_reported = False  # whether this incarnation has a dead letter for that reason
        self._requests: deque[ResyncRequest] = deque(maxlen=REQUESTS_MAX)
        self._share = share_of(self.rank)  # of each interval, after which the rank's periodic work is due
        self._doubt: Doubt | None = Doubt.START
        self._ask_at_s = float("-inf")  # when evidence is due
        self._catch_up_at_s = float("inf")  # when a catch-up is due
        self._message_since_s: float | None = None  # since when messages have been waiting in the socket
        self._batch_seen = False  # whether a batch of this incarnation has arrived through this connection
        self._unexplained = False  # whether a batch did not fit, and none that fits has arrived since
        self._contradicted_at_s = float("-inf")  # when the evidence about the last contradiction was due
        self._link = LinkDelay()
        self._live: tuple[int, float] | None = None  # number and time of the live batch that is being offered
        self._failure: Exception | None = None  # why a message that was taken on arrival is not published
        self._unsent_since_s: float | None = None  # since when a record has waited for space in Kafka's client
        self._letters_logged = Repetitions()  # by reason
        self._reading_rows: asyncio.Future[Mapping[RankId, PooledRows]] | None = None  # of blocks in CXL pools
        self._fed_alone = False  # whether it was logged that only events show that the engine is running

    def counts(self) -> Mapping[str, int]:
        """Return a copy of the rank's counters by name (see FeedCounters)."""
        return self.counters.counts()

    def request_restatement(self, request: ResyncRequest) -> None:
        """Queue a request; the loop answers it between two batches."""
        self.counters.resyncs_requested += 1
        self._requests.append(request)
        self._first_of.wake()

    def note_requests_running(self) -> None:
        """Note that the engine's metrics show requests that are running, or tokens that were processed."""
        # A proven stream has no events to report while all prompts are cached, or shorter than a block.
        if self._feed_state() is not FeedState.LIVE and self._missing_events.on_requests(time.monotonic()):
            log.warning(
                "rank %s: requests are running, but no event has arrived from %s. Either the engine publishes no "
                "events (vLLM: --kv-events-config with enable_kv_cache_events and publisher zmq), or the port is "
                "wrong, or the ports of events and replay are swapped",
                self.rank,
                self._events,
            )

    def note_start_on_page(self, started: Incarnation) -> None:
        """Note when the engine's process started, as a page shows that was read to scrape metrics.

        If it is the process that is being fed, there is no need to read another page for that reason. Otherwise it is
        examined at once.
        """
        if self._doubt is not None or self._state.started is None:
            return
        now_s = time.monotonic()
        if started == self._state.started:
            self._heartbeats.heard()
            self._ask_at_s = now_s + INCARNATION_CHECK_S
        else:
            self._ask_at_s = now_s

    @property
    def has_backlog(self) -> bool:
        """Whether a message waits in the socket although the rank's last record says that its feed is live."""
        return self._writer.feed is FeedState.LIVE and self._connection.has_message

    def passes_on(self, now_s: float) -> bool:
        """Whether Kafka takes the rank's records, and routers know the state of this feed.

        Until then they have the last record of a former feed, which may say that it is live.
        """
        return not self._writer.is_late(now_s) and (not self._replaces_state or self._writer.is_read(now_s))

    def has_waited_for_kafka(self, now_s: float, longer_than_s: float) -> bool:
        """Whether a record has waited for space in Kafka's client for so long."""
        return self._unsent_since_s is not None and now_s - self._unsent_since_s > longer_than_s

    async def finish(self) -> None:
        """Wait until Kafka's client has a batch that waits for its CXL transitions, at most FINISH_S."""
        if not self._writer.waits_for_transitions:
            return
        try:
            async with asyncio.timeout(FINISH_S):
                await self._may_write()
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
                    with self._connection:
                        await self._feed()
                finally:
                    heartbeats.cancel()
                    if self._reading_rows is not None:
                        self._reading_rows.cancel()
                    if self._checking_model is not None:
                        self._checking_model.cancel()
                    self._evidence.close()
                    self._state.batches.abort()
        finally:
            log.info("rank %s: the feed ends: %s", self.rank, self.counters)

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Do everything that is due, then wait for the next thing that happens."""
        self._state_the_known_incarnation()
        logged_counters, log_at_s = str(self.counters), 0.0
        while True:
            await self._wait()
            await self._attend_connection()
            await self._attend_evidence()
            self._attend_model()
            await self._take_live()
            if self._may_replay:
                self._on_finding(await self._state.batches.advance())
            self._ask_what_is_due()
            self._heartbeats.show(self._feed_state())
            while self._requests and self._doubt is not Doubt.START:
                await self._restate(self._requests.popleft())
            if self._reading_rows is not None and self._reading_rows.done():
                reading, self._reading_rows = self._reading_rows, None
                await self._restate_placements(reading)
            if self._failure is not None:
                raise self._failure
            self._check_deliveries()
            if (now_s := time.monotonic()) >= log_at_s:
                log_at_s = now_s + LOG_COUNTERS_S
                if str(self.counters) != logged_counters:
                    logged_counters = str(self.counters)
                    log.info("rank %s: %s", self.rank, logged_counters)

    def _check_deliveries(self) -> None:
        """Raise KvStreamsError if Kafka refused a record."""
        if self._writer.failed:
            raise KvStreamsError(f"Kafka did not take {len(self._writer.failed)} records: {self._writer.failed[0]}")

    async def _wait(self) -> None:
        """Wait until a message, an answer, or evidence arrives, at most IDLE_S. Other tasks always get their turn."""
        connection = self._connection
        waiting: list[asyncio.Future[Any]] = []
        if connection.event is not None:
            waiting.append(connection.event)
        if self._evidence.pending is not None:
            waiting.append(self._evidence.pending)
        if self._may_replay and self._state.batches.answer is not None:
            waiting.append(self._state.batches.answer)
        if self._reading_rows is not None:
            waiting.append(self._reading_rows)
        if self._checking_model is not None:
            waiting.append(self._checking_model)
        is_ready = connection.has_message and self._takes_live
        await self._first_of.wait(waiting, IDLE_S if connection.is_open else RECONNECT_S_MIN, is_ready=is_ready)

    @property
    def _takes_live(self) -> bool:
        """Whether live batches may be taken from the socket."""
        return self._doubt is None and self._state.batches.takes_live

    @property
    def _may_replay(self) -> bool:
        """Whether what the replay socket returns belongs to the incarnation that is being fed."""
        return self._doubt in (None, Doubt.FIRST_CONNECTION)

    def _feed_state(self) -> FeedState:
        """Return what the rank's records say about its feed at this moment."""
        now_s, batches = time.monotonic(), self._state.batches
        waiting_s = 0.0 if self._message_since_s is None else now_s - self._message_since_s
        held_back = self._message_since_s is not None and self._doubt is not None
        if self._unexplained:
            return FeedState.CATCHING_UP
        if batches.is_behind(now_s) or held_back or waiting_s >= BACKLOG_S:
            return FeedState.CATCHING_UP
        if self._link.is_behind(now_s, batches.answered_from_s) or self._wiring.is_late(now_s):
            return FeedState.CATCHING_UP
        completed_at_s = self._connection.completed_at_s
        if self._doubt is not None or completed_at_s is None or self._is_model_unconfirmed(now_s):
            return FeedState.UNPROVEN
        caught_up = batches.answered_from_s >= completed_at_s + SUBSCRIBED_AFTER_S
        return FeedState.LIVE if self._batch_seen or caught_up else FeedState.UNPROVEN

    def _ask_what_is_due(self) -> None:
        """Ask for evidence, and for the batches that the live socket may have lost."""
        now_s = time.monotonic()
        if now_s >= self._ask_at_s and self._evidence.pending is None:
            in_turn_s = next_turn(now_s, INCARNATION_CHECK_S, self._share)
            self._ask_at_s = in_turn_s if self._doubt is None else now_s + RETRY_S
            self._ask_for_evidence()
        if now_s >= self._catch_up_at_s and self._may_replay and self._state.batches.answer is None:
            self._catch_up_at_s = next_turn(now_s, INCARNATION_CHECK_S, (self._share + HALF) % 1.0)
            self._state.batches.catch_up()

    def _start_to_doubt(self, doubt: Doubt) -> None:
        """Publish no live batch until evidence that is asked for from now on has decided."""
        self._doubt = doubt
        self._evidence.close()
        self._ask_at_s = time.monotonic()
        self._state.batches.abort()
        self._unexplained |= doubt in _OF_BATCHES

    def _on_contradiction(self, doubt: Doubt) -> None:
        """Doubt because of batches that do not fit; two processes may contradict each other for as long as both run."""
        self._start_to_doubt(doubt)
        self._ask_at_s = self._contradicted_at_s = max(self._ask_at_s, self._contradicted_at_s + RETRY_S)

    # -- the connection ------------------------------------------------------------------------------------------------

    async def _attend_connection(self) -> None:
        """Follow what happens to the connection."""
        now_s, connection = time.monotonic(), self._connection
        change = connection.attend(now_s)
        if connection.has_message and self._message_since_s is None:
            self._message_since_s = now_s
            self._heartbeats.heard()
        match change:
            case Change.COMPLETED:
                lasted_s = self._events_outage.answered(now_s)
                if lasted_s is not None:
                    log.info("rank %s: %s is connected after %.0f s", self.rank, self._events, lasted_s)
                self._evidence.close()  # what was asked for before shows nothing about this connection
                self._ask_at_s = now_s
            case Change.BROKEN:
                # What has arrived until now is from the process that was connected.
                while self._takes_live and connection.has_message:
                    await self._take_live()
                    await asyncio.sleep(0)
                self._start_to_doubt(Doubt.START if self._doubt is Doubt.START else Doubt.RECONNECTION)
                self._connection_failed(now_s)
            case Change.FAILED:
                self._connection_failed(now_s)
            case None:
                pass
            case _:
                assert_never(change)

    def _connection_failed(self, now_s: float) -> None:
        lasted_s = self._events_outage.failed(now_s)
        if lasted_s is not None:
            reason, duration = self._connection.reason, lasting(lasted_s)
            log.warning("rank %s: no events can be received from %s: %s%s", self.rank, self._events, reason, duration)
        self._reopen()

    def _reopen(self) -> None:
        """Give up the connection with everything that waits in its socket."""
        self._connection.reopen(time.monotonic())
        self._message_since_s, self._batch_seen, self._unexplained = None, False, False

    async def _take_live(self) -> None:
        """Take the messages that have arrived."""
        for _ in range(MESSAGES_AT_ONCE):
            if not self._takes_live or not self._connection.has_message:
                break
            batch = self._read(self._connection.take())
            if batch is not None:
                self._live = batch.sequence, time.monotonic()
                await self._state.batches.offer(batch)
                self._live = None
        if not self._connection.has_message:
            self._message_since_s = None
        if self._writer.has_unsent:  # perhaps nothing follows for long that would send it
            await self._may_write()

    def _on_message(self) -> None:
        """Take the messages that have arrived, at once if they only have to be published; otherwise wake the loop.

        Nearly all messages are taken here. To wake the loop for each of them takes as long as publishing it, mostly to
        find out that there is nothing else to do.
        """
        try:
            is_done = self._take_in_order()
        except Exception as exc:  # it ends the feed, as one of the loop does
            self._failure, is_done = exc, False
        if not is_done:
            self._first_of.wake()

    def _take_in_order(self) -> bool:
        """Publish messages for as long as they are the next ones and nothing has to be waited for.

        Returns whether the loop has nothing to do because of them. The loop must be waiting: otherwise it may be
        publishing something else.
        """
        self._heartbeats.heard()
        for _ in range(MESSAGES_AT_ONCE):
            if not (self._first_of.is_waiting and self._may_take_at_once):
                return False
            frames = self._connection.take()
            batch = self._read(frames)
            if batch is None:
                return False
            if not self._state.batches.pass_next(batch):
                self._connection.put_back(frames)
                return False
            self._live = batch.sequence, time.monotonic()
            self._publish(batch)
            self._live = None
            if not self._connection.has_message:
                return self._writer.feed is FeedState.LIVE and not self._writer.has_unsent
        return False

    @property
    def _may_take_at_once(self) -> bool:
        """Whether a batch that is the next one may be taken and published at this moment."""
        return (
            self._takes_live
            and self._failure is None
            and not self._writer.failed
            and self._wiring.lease_handle.is_allowed(self._wiring.term)
            and self._writer.send()
        )

    def _read(self, frames: list[bytes]) -> Batch | None:
        """Read one message of the live socket; None if it brings no batch that is new."""
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE.size:
            exc = BadRecord("bad_frames", f"the message has {len(frames)} frames and no sequence number")
            self._dead_letter(of_frames(frames), sum(map(len, frames)), exc)
            return None
        batch, batches = Batch(SEQUENCE.unpack(frames[-2])[0], frames[-1]), self._state.batches
        if batch.sequence < batches.next:
            # Either a replay brought it already, or the engine restarted and numbers its batches from 0 again.
            if batches.digests.contradict(batch):
                is_first = self._batch_seen and not self._unexplained
                self._connection.put_back(frames)  # the incarnation that it belongs to may begin with it
                self._on_contradiction(Doubt.STRAY if is_first else Doubt.CONTRADICTED)
            elif batch.sequence not in batches.digests:
                self._start_to_doubt(Doubt.FOREIGN)
            else:
                self._note_known_batch()
                self.counters.batches_repeated += 1
            return None
        self._note_known_batch()
        return batch

    def _note_known_batch(self) -> None:
        """Note that a batch has arrived through this connection that the incarnation's process sent."""
        self._batch_seen, self._unexplained = True, False

    def _on_finding(self, finding: ReplayFinding) -> None:
        match finding:
            case ReplayFinding.CONSISTENT:
                pass
            case ReplayFinding.CONTRADICTED:
                self._on_contradiction(Doubt.REPLAY_DIFFERS)
            case ReplayFinding.FOREIGN:
                self._on_contradiction(Doubt.FOREIGN)
            case _:
                assert_never(finding)

    # -- incarnations --------------------------------------------------------------------------------------------------

    def _known(self) -> KnownIncarnation | None:
        """Return the last known incarnation of the rank, None if there is none."""
        if self._doubt is Doubt.START:
            return self._recovered.known_incarnation if self._recovered else None
        return KnownIncarnation(self._writer.incarnation, self._writer.sequence, self._writer.digest)

    def _ask_for_evidence(self) -> None:
        known, doubt, seen_start = self._known(), self._doubt, self._state.started

        def decides_alone(evidence: Evidence) -> bool:
            if doubt is Doubt.START:
                return not needs_replay_check(known, evidence)
            if evidence.started is None or seen_start is None:
                return False
            # While nothing is in doubt, the catch-ups compare the last batch as well.
            return evidence.started != seen_start or doubt in (None, Doubt.FOREIGN)

        self._evidence.ask(known, decides_alone, at_once=self._doubt is not None)

    async def _attend_evidence(self) -> None:
        """Take evidence that has been found out, and begin or continue an incarnation if it decides."""
        finding = self._evidence.take() or self._no_evidence()
        if finding is None:
            return
        connection, evidence, doubt = self._connection, finding.evidence, self._doubt
        if evidence.shows_life:
            self._heartbeats.heard()
        elif evidence.refused and doubt is Doubt.RECONNECTION and connection.completed_at_s is None:
            self._heartbeats.engine_exited("its connection broke, and its HTTP port refuses connections")
        # Evidence is about the process at the other end of the connection only if it was asked for through it.
        completed_at_s = connection.completed_at_s
        of_connection = completed_at_s is not None and finding.asked_at_s >= completed_at_s
        decision = self._decide(finding, of_connection=of_connection)
        if isinstance(decision, Undecided):
            return
        if doubt is None and isinstance(decision, SameIncarnation):
            self._note_start(evidence)
            return
        if isinstance(decision, NewIncarnation) or doubt not in _OF_BATCHES:
            log.info("rank %s: %s: %s", self.rank, decision, evidence)
        if self._may_be_another_process(decision, evidence):
            self._check_model(evidence)
        match decision:
            case NewIncarnation(incarnation):
                await self._begin(incarnation, evidence.started)
            case SameIncarnation() if doubt is Doubt.START:
                await self._resume(evidence.started)
            case SameIncarnation():
                self._note_start(evidence)
                if doubt in (Doubt.STRAY, Doubt.CONTRADICTED):
                    self._connection.take()  # the batch that was put back
                    self.counters.batches_foreign += 1
            case _:
                assert_never(decision)
        self._doubt = None
        if doubt in (Doubt.START, Doubt.FIRST_CONNECTION, Doubt.RECONNECTION):
            if not of_connection:
                self._start_to_doubt(Doubt.FIRST_CONNECTION)
        elif isinstance(decision, NewIncarnation) and not (doubt is Doubt.CONTRADICTED and not self._batch_seen):
            # The connection was to the older process, and so are the batches that wait in its socket. One that has
            # brought nothing but a contradiction is to the new process.
            self._reopen()
            self._start_to_doubt(Doubt.FIRST_CONNECTION)
        now_s = time.monotonic()
        if self._doubt is None and connection.completed_at_s is not None:
            self._catch_up_at_s = max(now_s, connection.completed_at_s + SUBSCRIBED_AFTER_S)
        else:
            self._catch_up_at_s = now_s

    @property
    def _waited_long(self) -> bool:
        """Whether a message has waited long enough for evidence about its process."""
        since_s, known = self._message_since_s, self._known()
        nothing_to_lose = known is None or known.sequence == BEFORE_FIRST
        longest_s = FIRST_EVIDENCE_WAIT_S if nothing_to_lose else EVIDENCE_WAIT_S
        return since_s is not None and time.monotonic() - since_s >= longest_s

    def _no_evidence(self) -> Finding | None:
        """Give up evidence that has not arrived in time: messages wait for it, and they show that an engine runs."""
        asked_at_s, completed_at_s = self._evidence.asked_at_s, self._connection.completed_at_s
        connecting = self._doubt in (Doubt.START, Doubt.FIRST_CONNECTION, Doubt.RECONNECTION)
        if not connecting or not self._waited_long or completed_at_s is None or asked_at_s < completed_at_s:
            return None
        self._evidence.close()
        return Finding(asked_at_s, self._known(), Evidence(reachable=False, started=None))

    def _decide(self, finding: Finding, *, of_connection: bool) -> Decision:
        """Decide what evidence shows. of_connection: whether it was found out after the connection was complete."""
        evidence, known, started, now_us = finding.evidence, self._known(), self._state.started, _now_us()
        alone = of_connection and self._waited_long
        match self._doubt:
            case Doubt.START:
                decision = decide_at_start(known, evidence, now_us, alone=alone)
                if known is not None and isinstance(decision, SameIncarnation) and self._was_of_another_model:
                    # Only the beginning of an incarnation changes the rank's model, and empties it.
                    decision = NewIncarnation(mint_incarnation(known.incarnation, now_us))
            case Doubt.FIRST_CONNECTION | Doubt.RECONNECTION if of_connection:
                assert known is not None
                asked = finding.known
                first_batches = asked is None or asked.sequence == BEFORE_FIRST != known.sequence
                if first_batches and (evidence.started is None or started is None) and not alone:
                    self._ask_at_s = time.monotonic()  # now there is a batch that the replay socket can be asked for
                    return Undecided()
                decision = decide_after_connecting(known, started, evidence, now_us, alone=alone)
            case Doubt.FIRST_CONNECTION | Doubt.RECONNECTION:
                assert known is not None
                decision = decide_while_feeding(known, started, evidence, now_us)
                if isinstance(decision, SameIncarnation):
                    return Undecided()
            case Doubt.STRAY | Doubt.CONTRADICTED | Doubt.REPLAY_DIFFERS | Doubt.FOREIGN | None:
                assert known is not None
                stray, contradicted = self._doubt is Doubt.STRAY, self._doubt not in (Doubt.FOREIGN, None)
                decision = decide_while_feeding(
                    known, started, evidence, now_us, contradicted=contradicted, stray=stray
                )
            case _:
                assert_never(self._doubt)
        if alone and not evidence.reachable and not isinstance(decision, Undecided) and not self._fed_alone:
            self._fed_alone = True
            log.warning(
                "rank %s: %s does not answer, but events arrive: the engine is fed from its events alone",
                self.rank,
                self._wiring.engine.metrics_url,
            )
        return decision

    def _note_start(self, evidence: Evidence) -> None:
        """Keep the process's start time, if it is reported only now and is that of this incarnation."""
        same = evidence.replay_check is ReplayCheck.SAME or self._writer.sequence == BEFORE_FIRST
        if self._state.started is None and same:
            self._state.started = evidence.started

    # -- the model -----------------------------------------------------------------------------------------------------

    @property
    def _was_of_another_model(self) -> bool:
        """Whether the incarnation that Kafka has was published under another model than that of this feed."""
        recovered = self._recovered
        return recovered is not None and recovered.progress.model not in ("", self._wiring.model)

    def _may_be_another_process(self, decision: Decision, evidence: Evidence) -> bool:
        """Whether a decision leaves open which model the process serves.

        An incarnation also continues after a reconnection if it has no batches yet, whatever process that is.
        """
        if isinstance(decision, NewIncarnation) or self._doubt is Doubt.START:
            return True
        same_start = evidence.started is not None and evidence.started == self._state.started
        reconnected = self._doubt in (Doubt.FIRST_CONNECTION, Doubt.RECONNECTION)
        return reconnected and self._writer.sequence == BEFORE_FIRST and not same_start

    def _check_model(self, evidence: Evidence) -> None:
        """Find out, in a task of its own, whether the engine's process serves the model of this feed."""
        if self._served is None:
            return
        if self._checking_model is not None:
            self._checking_model.cancel()
        # Batches that have waited for an HTTP server that does not answer have waited for this as well.
        wait_s = 0.0 if self._waited_long and not evidence.reachable else self._served.wait_s
        self._unconfirmed_until_s = time.monotonic() + wait_s
        self._checking_model = asyncio.create_task(self._served.check())

    def _attend_model(self) -> None:
        """Raise ModelChanged if the engine serves another model."""
        if self._checking_model is not None and self._checking_model.done():
            checking, self._checking_model = self._checking_model, None
            other = checking.result()
            if other is not None:
                raise ModelChanged(other)

    def _is_model_unconfirmed(self, now_s: float) -> bool:
        """Whether the feed must not be live, since its process may not serve the model."""
        if self._served is None or self._checking_model is None:
            return False
        return self._served.is_missing or now_s < self._unconfirmed_until_s

    # -- beginning and continuing --------------------------------------------------------------------------------------

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

    async def _begin(self, incarnation: Incarnation, started: Incarnation | None) -> None:
        """Begin an incarnation, and publish its start, which empties the rank before the incarnation's first batch."""
        await self._may_write()  # the last batch of the former incarnation, whose transitions are sent already
        log.info("rank %s: incarnation %d begins", self.rank, incarnation)
        self.counters.incarnations += 1
        self._note_block_size(None)
        self._wrong_block_size_reported = False
        self._state.batches.abort()
        self._state = self._incarnation_state(started)
        self._unexplained = False
        self._link = LinkDelay()  # the process may run on another host, with another clock
        self._writer.begin_incarnation(incarnation)
        await self._publish_beginning()

    async def _publish_beginning(self) -> None:
        await self._may_write()
        self._writer.feed = FeedState.UNPROVEN
        self._writer.write(BEFORE_FIRST, 0, _now_us() // 1000, ())
        # The first heartbeat follows at once. Without it, the rank would have no lease in this incarnation yet, so a
        # crash of the bridge would not be noticed.
        self._heartbeats.renew()
        self._heartbeats.begun = True

    async def _resume(self, started: Incarnation | None) -> None:
        """Continue the incarnation that Kafka has, after its last batch."""
        recovered = self._recovered
        assert recovered is not None  # without it there was no incarnation to continue
        self._recovered = None  # valid only at the start of this feed
        self.counters.resumed += 1
        self._state = self._incarnation_state(started)
        if recovered.is_removed or recovered.sequence == BEFORE_FIRST:
            self._writer.begin_incarnation(recovered.incarnation)
            await self._publish_beginning()  # this also brings back a worker that was removed
            return
        self._heartbeats.show(FeedState.UNPROVEN)  # the rank's last record may say that it is live
        ledger_and_names = await self._ledger_from_engine(recovered.sequence)
        if ledger_and_names is None:
            self.counters.resumed_from_table += 1
            ledger, names = recovered.table_ledger(self._dialect.counts_copies), recovered.names
        else:
            ledger, names = ledger_and_names
        log.info("rank %s: continues after batch %d with %d blocks", self.rank, recovered.sequence, len(ledger))
        self._writer.resume(recovered.sequence, recovered.digest, ledger, names)
        self._state.batches.continue_after(recovered.sequence, recovered.digest)
        self._heartbeats.begun = True

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
                    if decoded.dialect is not None:
                        ledger.count_copies(decoded.dialect.counts_copies)
                    self._note_refused(decoded.unusable)
                    left_out_before = ledger.left_out
                    try:
                        for event in decoded.events:
                            names.apply(event, ledger)
                    except BadRecord:
                        ledger.lost_events()
                    ledger.end_batch()
                    ledger.count_unindexed(decoded.n_unindexed, left_out_before)
                    if decoded.is_incomplete:
                        ledger.lost_events()
                    following += 1
                    if following > until:
                        self._state.decoder = decoder
                        return ledger, names
        except ReplaySilent as exc:
            log.warning("rank %s: %s", self.rank, exc)
        return None

    def _incarnation_state(self, started: Incarnation | None) -> _IncarnationState:
        batches = GapFiller(self, self._wiring.context, self._replay, self.rank, self.counters, self._replay_outage)
        return _IncarnationState(started, batches, self._dialect.decoder(self._block_size))

    # -- the sink of batches in order (gap_filling.BatchSink) ----------------------------------------------------------

    async def publish(self, batch: Batch) -> None:
        """Decode and publish the next batch of the incarnation. Raises what `_may_write` does.

        Its number is on Kafka afterwards, whatever the payload contains: otherwise nothing would show that it is
        missing until the engine sends another batch.
        """
        await self._may_write()
        self._publish(batch)

    def _publish(self, batch: Batch) -> None:
        """Decode and publish the next batch, when it may be written."""
        state = self._state
        self._missing_events.on_event()
        digest = state.batches.digests.add(batch)
        decoded = _decode(state.decoder, batch.payload)
        if self._live is not None and self._live[0] == batch.sequence and decoded.emitted_at_ms:
            self._link.on_batch(decoded.emitted_at_ms / 1000, self._live[1])
        self._writer.feed = self._feed_state()
        if decoded.dialect is not None:
            self._note_dialect(decoded.dialect)
        unusable = list(decoded.unusable)
        left_out_before, between_before = self._writer.ledger.left_out, self._writer.ledger.n_between
        try:
            self._writer.write(
                batch.sequence,
                digest,
                decoded.emitted_at_ms or _now_us() // 1000,
                decoded.events,
                decoded.n_unindexed,
                is_incomplete=decoded.is_incomplete,
            )
        except BadRecord as exc:
            unusable.append(UnusableEvent(None, exc))
        self.counters.batches_published += 1
        self.counters.blocks_unindexed += decoded.n_unindexed
        self.counters.events_ignored += decoded.n_ignored
        for reason, n in decoded.not_indexed.items():
            self.counters.not_indexed[reason] += n
        if self._writer.ledger.left_out > left_out_before:
            self.counters.not_indexed["unplaced"] += self._writer.ledger.left_out - left_out_before
        if self._writer.ledger.n_between > between_before:
            self.counters.not_indexed["cache_group"] += self._writer.ledger.n_between - between_before
        if self._stored_block_size != self._block_size and any(
            isinstance(event, BlocksStored) for event in decoded.events
        ):
            self._note_block_size(self._block_size)
        if unusable:
            self._note_unusable(batch, digest, unusable)

    def _note_dialect(self, dialect: Dialect) -> None:
        """Count copies as the engine reports them, now that its dialect is known."""
        if dialect is not self._recognised:
            self._recognised = dialect
            log.info("rank %s: the engine's events are in the dialect %s", self.rank, dialect.name)
            self._writer.count_copies(dialect.counts_copies)

    def _note_unusable(self, batch: Batch, digest: int, unusable: Sequence[UnusableEvent]) -> None:
        """Write the dead letter of a batch with unusable events."""
        self.counters.events_unusable += len(unusable)
        self._note_refused(unusable)
        if all(each.error.reason == WRONG_BLOCK_SIZE for each in unusable):
            self.counters.batches_of_wrong_block_size += 1
            if self._wrong_block_size_reported:
                return  # every further batch would be one; the bridge has logged why, and registered the engine's size
            self._wrong_block_size_reported = True
        letter = of_payload(batch.sequence, len(batch.payload), digest, unusable)
        self._dead_letter(letter, len(batch.payload), unusable[0].error)

    def _note_refused(self, unusable: Sequence[UnusableEvent]) -> None:
        """Report the size of the engine's blocks to the bridge if it is the reason why an event cannot be used.

        An engine has one size until it restarts. So once it has stored blocks of the scope's size, an event with
        another one is damaged.
        """
        if self._stored_block_size == self._block_size:
            return
        for each in unusable:
            size = each.error.detail.get("block_size")
            if each.error.reason == WRONG_BLOCK_SIZE and isinstance(size, int) and size > 0:
                self._note_block_size(size)

    def _note_block_size(self, size: int | None) -> None:
        """size: None if it is not known, at the start of an incarnation."""
        if size != self._stored_block_size:
            self._stored_block_size = size
            self._wiring.on_stored_block_size(size)

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
        is_proven = self._feed_state() is FeedState.LIVE
        if not state.restatements.answers(
            request, writer.incarnation, writer.sequence, time.monotonic(), is_proven=is_proven
        ):
            log.info("rank %s: no restatement for attempt %d at batch %d", self.rank, request.attempt, request.sequence)
            return
        now_us = _now_us()
        # On a thread: the batches of other ranks and the renewals of all leases would otherwise wait for seconds.
        pieces = await asyncio.to_thread(writer.restatement, now_us)
        for piece in pieces:
            await self._may_write()
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

        if len(writer.names) and self._reading_rows is None:
            self._reading_rows = asyncio.ensure_future(self._wiring.read_pooled(self.rank.worker_id))

    async def _restate_placements(self, reading: asyncio.Future[Mapping[RankId, PooledRows]]) -> None:
        """Publish where blocks are in CXL memory, if the agents' table no longer has that."""
        try:
            rows = reading.result().get(self.rank, {})
        except (KvStreamsError, KafkaException) as exc:
            log.warning("rank %s: its pooled blocks are not restated: %s", self.rank, exc)
            return
        await self._may_write()
        n_blocks = self._writer.restate_placements(rows, _now_us() // 1000)
        if n_blocks:
            log.info("rank %s: the places of %d blocks in CXL pools are restated", self.rank, n_blocks)

    async def _may_write(self) -> None:
        """Wait until a batch may be written: this bridge holds the lease, and Kafka's client has taken the last one.

        Raises LeaseLost, and KvStreamsError if Kafka refused a record.
        Meanwhile nothing is taken from the socket, where at most `receive_hwm` batches wait. Further ones are missing
        in the engine's numbers, so they are requested from the replay socket, and show as a gap if that lacks them.
        """
        while True:
            await self._wiring.lease_handle.allowed(self._wiring.term)
            if self._writer.waits_for_transitions:
                self._wiring.kafka.poll(0)  # their acknowledgements
                self._check_deliveries()
            if self._writer.send():
                self._unsent_since_s = None
                return
            if self._unsent_since_s is None:
                self._unsent_since_s = time.monotonic()
            await asyncio.sleep(TRANSITION_S if self._writer.waits_for_transitions else FULL_S)

    def _dead_letter(self, letter: bytes, n_bytes: int, exc: BadRecord) -> None:
        """Write a dead letter. n_bytes: the length of the engine's message, which is not part of it."""
        self.counters.dead_letters += 1
        n = self._letters_logged.happened(exc.reason, time.monotonic())
        if n is not None:
            log.warning("dead letter from rank %s at %s: %s%s", self.rank, self._events, exc, repeated(n))
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

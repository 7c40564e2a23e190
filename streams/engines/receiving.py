"""The messages of one rank's connection: taken from the socket, and published in their order.

What lives here: following the connection, taking messages, and what a message is to the incarnation that is being fed.
What must not: what follows from it (feed_machine), the socket (connection), the order of batches and the replay socket
(gap_filling), decoding (batch_publishing).

Nearly all messages are the next batch of a rank, and are published when they arrive, in the callback of the socket. To
wake the feed's loop for each of them takes as long as publishing it, mostly to find out that there is nothing else to
do. Every other message is left to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, assert_never

from streams.core.ids import RankId
from streams.engines.address import BIND, port_above
from streams.engines.batch_publishing import BatchPublisher
from streams.engines.connection import (
    PING_TIMEOUT_S,
    PING_TIMEOUT_WITHOUT_REPLAY_S,
    Change,
    EventConnection,
)
from streams.engines.feed_counters import FeedCounters
from streams.engines.feed_machine import (
    Event,
    FeedMachine,
    Instruction,
    MessagesWait,
    Occurred,
    OtherBatch,
    SocketEmptied,
)
from streams.engines.feed_table import Action, Signal
from streams.engines.gap_filling import GapFiller
from streams.engines.heartbeats import Heartbeats
from streams.engines.replay import SEQUENCE, Batch
from streams.engines.wiring import EngineWiring
from streams.kafka.outage import Outage, lasting

log = logging.getLogger(__name__)

#: Messages taken at once, before the loop does its other work.
MESSAGES_AT_ONCE = 64

_NEW_BATCH = Occurred(Signal.NEW_BATCH)


class Receiver:
    """Receives one rank's messages. Owner of the connection, and of the order of the incarnation's batches."""

    def __init__(
        self,
        wiring: EngineWiring,
        publisher: BatchPublisher,
        heartbeats: Heartbeats,
        counters: FeedCounters,
        machine: FeedMachine,
        perform: Callable[[Instruction], None],
        socket: int,
    ) -> None:
        """perform: performs an instruction that is not about a message, and for which nothing is waited. socket: which
        of the engine's sockets is the rank's.
        """
        assert wiring.engine.events is not None  # an engine without events has another feed (eventless_feed)
        self._wiring = wiring
        self._publisher = publisher
        self._heartbeats = heartbeats
        self._counters = counters
        self._machine = machine
        self._perform = perform
        self._rank = RankId(wiring.engine.worker_id, wiring.ranks.of(socket))
        self._address = port_above(wiring.engine.events, socket)
        self._replay_address = port_above(wiring.engine.replay, socket) if wiring.engine.replay else None
        self._outage, self._replay_outage = Outage(), Outage()
        self.connection = EventConnection(
            wiring.context,
            self._address.removeprefix(BIND),
            wiring.receive_hwm,
            self._on_message,
            wiring.watch,
            listens=self._address.startswith(BIND),
            ping_timeout_s=PING_TIMEOUT_S if self._replay_address else PING_TIMEOUT_WITHOUT_REPLAY_S,
        )
        #: The order of the incarnation's batches; `begin` replaces it.
        self.order = self._new_order()
        # Ends the wait of the feed's loop; None while the loop does not wait.
        self._woken: asyncio.Future[None] | None = None
        #: Why a message that was taken on arrival is not published; it ends the feed.
        self.failure: Exception | None = None

    def _new_order(self) -> GapFiller:
        return GapFiller(
            self._publisher,
            self._wiring.context,
            self._replay_address,
            self._rank,
            self._counters,
            self._replay_outage,
        )

    def begin(self) -> None:
        """Expect the first batch of another incarnation."""
        self.order.abort()
        self.order = self._new_order()

    @property
    def takes_live(self) -> bool:
        """Whether live batches may be taken from the socket."""
        return self._machine.takes_live and self.order.takes_live

    @property
    def is_ready(self) -> bool:
        """Whether a message waits that may be taken."""
        return self.connection.has_message and self.takes_live

    # -- the feed's loop -----------------------------------------------------------------------------------------------

    async def wait(self, futures: Iterable[asyncio.Future[Any]], timeout_s: float) -> None:
        """Wait for a message, a future, a call of `wake`, or the timeout. Other tasks get their turn in any case."""
        if self.is_ready:
            await asyncio.sleep(0)
            return
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([self._woken, *futures], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._woken = None

    def wake(self) -> None:
        """End the wait of the feed's loop, if it waits."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # -- the connection ------------------------------------------------------------------------------------------------

    async def attend(self) -> None:
        """Follow what happens to the connection."""
        now_s, connection = time.monotonic(), self.connection
        change = connection.attend(now_s)
        if connection.has_message and self._machine.messages_since_s is None:
            self._handle(MessagesWait(now_s))
            self._heartbeats.heard()
        match change:
            case Change.COMPLETED:
                lasted_s = self._outage.answered(now_s)
                if lasted_s is not None:
                    log.info("rank %s: %s is connected after %.0f s", self._rank, self._address, lasted_s)
                self._handle(Occurred(Signal.CONNECTED, now_s))
            case Change.BROKEN:
                # What has arrived until now is from the process that was connected.
                while self.is_ready:
                    await self.take_live()
                    await asyncio.sleep(0)
                self._log_failure(now_s)
                self._handle(Occurred(Signal.BROKE, time.monotonic()))
            case Change.FAILED:
                self._log_failure(now_s)
                self._handle(Occurred(Signal.FAILED, now_s))
            case None:
                pass
            case _:
                assert_never(change)

    def _log_failure(self, now_s: float) -> None:
        lasted_s = self._outage.failed(now_s)
        if lasted_s is not None:
            reason, duration = self.connection.reason, lasting(lasted_s)
            log.warning("rank %s: no events can be received from %s: %s%s", self._rank, self._address, reason, duration)

    def drop_held(self) -> None:
        """Drop the message that is held back as the next one."""
        self.connection.take()
        self._counters.batches_foreign += 1

    # -- messages ------------------------------------------------------------------------------------------------------

    async def take_live(self) -> None:
        """Take the messages that have arrived."""
        for _ in range(MESSAGES_AT_ONCE):
            if not self.is_ready:
                break
            frames = self.connection.take()
            batch = _batch_of(frames)
            if batch is None:
                self._publisher.note_bad_frames(frames)
            else:
                await self._take(frames, batch)
        if not self.connection.has_message:
            self._handle(SocketEmptied())
        await self._publisher.send_unsent()

    async def _take(self, frames: list[bytes], batch: Batch) -> None:
        now_s = time.monotonic()
        for instruction in self._machine.handle(self._event_of(batch, now_s)):
            match instruction:
                case Action.PUBLISH:
                    await self.order.offer(batch, now_s)
                case Action.SKIP:
                    self._counters.batches_repeated += 1
                case Action.HOLD:
                    self.connection.put_back(frames)
                case _:
                    self._perform(instruction)

    def _event_of(self, batch: Batch, now_s: float) -> Event:
        """Return what a batch is to the incarnation that is being fed."""
        order = self.order
        if batch.sequence >= order.next:
            return _NEW_BATCH
        # Either a replay brought it already, or the engine restarted and numbers its batches from 0 again.
        if order.digests.contradict(batch):
            return OtherBatch(now_s)
        is_repeated = batch.sequence in order.digests
        return Occurred(Signal.REPEATED_BATCH if is_repeated else Signal.UNKNOWN_BATCH, now_s)

    def _on_message(self) -> None:
        """Take the messages that have arrived, at once if they only have to be published; otherwise wake the loop."""
        try:
            is_done = self._take_in_order()
        except Exception as exc:  # it ends the feed, as one of the loop does
            self.failure, is_done = exc, False
        if not is_done:
            self.wake()

    def _take_in_order(self) -> bool:
        """Publish messages for as long as they are the next ones and nothing has to be waited for.

        Returns whether the loop has nothing to do because of them. The loop must be waiting: otherwise it may be
        publishing something else.
        """
        self._heartbeats.heard()
        for _ in range(MESSAGES_AT_ONCE):
            if not self._may_take_at_once:
                return False
            frames = self.connection.take()
            batch = _batch_of(frames)
            if batch is None or not self.order.pass_next(batch):
                self.connection.put_back(frames)
                return False
            self._machine.handle(_NEW_BATCH)
            self._publisher.publish_now(batch, time.monotonic())
            if not self.connection.has_message:
                return self._publisher.states_live_feed
        return False

    @property
    def _may_take_at_once(self) -> bool:
        """Whether a batch that is the next one may be taken and published at this moment."""
        is_waiting = self._woken is not None and not self._woken.done()
        return is_waiting and self.takes_live and self.failure is None and self._publisher.may_write_now

    def _handle(self, event: Event) -> None:
        for instruction in self._machine.handle(event):
            self._perform(instruction)


def _batch_of(frames: list[bytes]) -> Batch | None:
    """Return the batch that a message of the live socket brings; None if it is none."""
    if len(frames) < 2 or len(frames[-2]) != SEQUENCE.size:
        return None
    return Batch(SEQUENCE.unpack(frames[-2])[0], frames[-1])

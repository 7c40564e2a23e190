"""Batches of one incarnation in order: the next one is published, early ones wait, missing ones are requested.

What lives here: when a gap is filled from the engine's replay socket, when it is given up, and what the answers show
about the incarnation. What must not: the live socket (receiving), decoding (batch_publishing), and the decision whether
the engine is still the same process (feed_machine, continuity).

A message is lost if the engine sends it before this bridge connects, or while a socket's queue is full. While a gap is
being filled, live batches after it are buffered. Batches that the engine no longer keeps, or does not send in time,
stay missing; the agent then sees the gap in the sequence numbers.

Nothing here waits for the replay socket: the feed's loop calls `advance` whenever an answer may have arrived, and
publishes live batches in between.

State: the next expected batch, and buffered batches.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import xxhash
import zmq.asyncio

from streams.core.events import BEFORE_FIRST
from streams.core.ids import RankId
from streams.engines.feed_counters import GapCounters
from streams.engines.replay import (
    FILL_BACKOFF_S,
    REPLAY_TIMEOUT_S,
    REPLAY_TIMEOUT_S_MAX,
    Batch,
    ReplayRequest,
    ReplaySilent,
    Window,
)
from streams.kafka.outage import Outage, lasting

log = logging.getLogger(__name__)

#: A gap that the replay socket has not filled after this time is given up, whatever the cause.
GAP_HOLD_S = 10.0

#: Answers taken at once, before the feed does its other work.
ANSWERS_AT_ONCE = 64

#: A socket that answered before and now needs longer than this shows that the engine may have batches that were not
#: published. The engine checks the socket every 100 ms.
ANSWER_LATE_S = 1.0

#: Payload digests kept per incarnation. They show whether a second batch under one number is the same batch. The replay
#: of a whole buffer (10,000 batches by default) repeats batches that were received live.
DIGESTS_MAX = 16_384


class ReplayFinding(enum.Enum):
    """What a replay showed about the incarnation that is being fed."""

    CONSISTENT = "nothing contradicts the batches published"
    CONTRADICTED = "the engine has another batch under a number that was published, or never sent that number"
    FOREIGN = "the engine has never reached the numbers of the batches that were buffered"


class BatchSink(Protocol):
    """Takes batches in order; in a bridge, this is the rank's BatchPublisher."""

    async def publish(self, batch: Batch, arrived_at_s: float | None = None) -> None:
        """Publish the next batch of the incarnation. Raises LeaseLost.

        arrived_at_s: when it arrived, if it is live and has not been buffered.
        """

    def on_batches_lost(self) -> None:
        """Note that some batches before the next one will never be published."""

    def on_engine_heard(self) -> None:
        """Note that the engine answered."""


class Digests:
    """Digests of an incarnation's last batches by number: xxh3_64 of the payload."""

    def __init__(self) -> None:
        self._by_number: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._by_number

    def add(self, batch: Batch) -> int:
        """Keep a batch's digest, and return it."""
        digest = xxhash.xxh3_64_intdigest(batch.payload)
        self.put(batch.sequence, digest)
        return digest

    def put(self, sequence: int, digest: int) -> None:
        """Keep a digest that was computed earlier."""
        self._by_number[sequence] = digest
        if len(self._by_number) > DIGESTS_MAX:
            self._by_number.popitem(last=False)

    def contradict(self, batch: Batch) -> bool:
        """Return whether a different batch had this number before; False if no digest of this number is kept."""
        known = self._by_number.get(batch.sequence)
        return known is not None and known != xxhash.xxh3_64_intdigest(batch.payload)


@dataclass(slots=True)
class _Gap:
    """A gap that is being filled. due_at_s: when the next attempt is due."""

    since_s: float
    due_at_s: float
    attempts: int = 0


@dataclass(slots=True)
class _Replay:
    """A replay that is running.

    until: the buffered batch before which the gap was when it was requested, None for a catch-up. includes_last:
    whether the last published batch was requested as well. next_before: the next batch to publish at that time.
    highest: the greatest batch number received, BEFORE_FIRST if none was. brings_new: whether it contains batches that
    had not been published.
    """

    request: ReplayRequest
    until: int | None
    includes_last: bool
    next_before: int
    highest: int = BEFORE_FIRST
    n_answers: int = 0
    brings_new: bool = False


class GapFiller:
    """Puts one incarnation's batches in order. Owner of the window of early batches and of the digests.

    replay_address: None if the engine has no replay socket; a gap is then given up at once.
    """

    def __init__(
        self,
        sink: BatchSink,
        context: zmq.asyncio.Context,
        replay_address: str | None,
        rank: RankId,
        counters: GapCounters,
        outage: Outage | None = None,
    ) -> None:
        """outage: of the engine's replay socket, which outlives an incarnation."""
        self._sink = sink
        self._context = context
        self._replay_address = replay_address
        self._rank = rank
        self._counters = counters
        self._outage = Outage() if outage is None else outage
        self._window = Window(0)
        self._gap: _Gap | None = None
        self._replay: _Replay | None = None
        self._has_answered = False
        self._n_unanswered = 0  # in a row, for which no live batch has shown that nothing is missing
        self.digests = Digests()
        #: When the last replay that was answered completely began; minus infinity before the first one.
        self.answered_from_s = float("-inf")

    @property
    def next(self) -> int:
        """The number of the next batch to publish."""
        return self._window.next

    @property
    def answer(self) -> asyncio.Future[list[bytes]] | None:
        """The next answer of the running replay, None if none is running. `advance` takes it."""
        return None if self._replay is None else self._replay.request.answer

    @property
    def takes_live(self) -> bool:
        """Whether live batches may be offered. While a replay brings what precedes them, they wait in their socket."""
        return not self._window.full and not (self._replay is not None and self._replay.n_answers)

    def is_behind(self, now_s: float) -> bool:
        """Whether batches exist, or may exist, that have not been published."""
        running = self._replay
        if self._window.gap_until is not None or (running is not None and running.brings_new):
            return True
        late = running is not None and not running.n_answers and now_s - running.request.began_at_s >= ANSWER_LATE_S
        return self._has_answered and (late or self._n_unanswered > 0)

    def continue_after(self, sequence: int, digest: int) -> None:
        """Expect the batch after `sequence`, which was published with this digest."""
        self._window = Window(sequence + 1)
        self.digests.put(sequence, digest)

    def pass_next(self, batch: Batch) -> bool:
        """Take a live batch if it is the next one and no other is buffered; the caller then publishes it.

        Returns False, and changes nothing, for any other batch. This is `offer` for a caller that cannot wait.
        """
        if batch.sequence != self._window.next or not self._window.pass_next():
            return False
        self._n_unanswered = 0  # it shows that no batch before it is missing
        return True

    async def offer(self, batch: Batch, arrived_at_s: float | None = None) -> None:
        """Take a live batch; it is published now if it is the next one, and buffered if it is early."""
        if batch.sequence == self._window.next:
            self._n_unanswered = 0  # it shows that no batch before it is missing
        self._window.offer(batch)
        while (ready := self._window.take()) is not None:
            await self._sink.publish(ready, arrived_at_s if ready.sequence == batch.sequence else None)

    def catch_up(self) -> None:
        """Request what the engine has from the next batch on, in case the last live message was lost."""
        if self._replay_address is not None and self._replay is None:
            self._request(self._replay_address)

    async def advance(self) -> ReplayFinding:
        """Take answers that have arrived, request what is missing if that is due, and give up what cannot be obtained.

        Any finding other than CONSISTENT ends the replay, and the caller decides how to continue.
        """
        if self._replay is not None:
            finding = await self._take_answers(self._replay)
            if finding is not ReplayFinding.CONSISTENT or self._replay is not None:
                return finding
        while (until := self._window.gap_until) is not None:
            now_s = time.monotonic()
            if self._gap is None:
                self._counters.gaps += 1
                self._gap = _Gap(now_s, now_s)
            gap = self._gap
            expired = gap.attempts > len(FILL_BACKOFF_S) or now_s - gap.since_s >= GAP_HOLD_S or self._window.full
            if self._replay_address is not None and not expired:
                if now_s >= gap.due_at_s:
                    self._request(self._replay_address)
                return ReplayFinding.CONSISTENT  # the caller receives live batches in the meantime
            await self._give_up(until)
            self._gap = None
        self._gap = None
        return ReplayFinding.CONSISTENT

    def abort(self) -> None:
        """End the running replay, if there is one. A gap stays, and is requested again when `advance` is called."""
        if self._replay is not None:
            self._replay.request.close()
            self._replay = None

    def _request(self, address: str) -> None:
        """Request what the engine has kept from the next batch on.

        The request includes the last batch published: identical bytes show that it is the same incarnation.
        """
        last_published = self._window.next - 1
        includes_last = last_published in self.digests
        start = last_published if includes_last else self._window.next
        until = self._window.gap_until
        # Live batches wait for an attempt to fill a gap, but not for a catch-up.
        longest_s = REPLAY_TIMEOUT_S_MAX if until is None else REPLAY_TIMEOUT_S
        timeout_s = min(longest_s, REPLAY_TIMEOUT_S * 2.0**self._n_unanswered)
        self._counters.replays += 1
        self._replay = _Replay(
            ReplayRequest(self._context, address, start, timeout_s),
            until,
            includes_last,
            self._window.next,
        )

    async def _take_answers(self, running: _Replay) -> ReplayFinding:
        """Publish what has arrived of a replay."""
        request = running.request
        for _ in range(ANSWERS_AT_ONCE):
            if not request.answer.done():
                if time.monotonic() >= request.due_at_s:
                    self._silent(running, f"{self._replay_address} does not answer")
                return ReplayFinding.CONSISTENT
            try:
                batch = request.take()
            except ReplaySilent as exc:
                self._silent(running, str(exc))
                return ReplayFinding.CONSISTENT
            self._sink.on_engine_heard()
            if batch is None:
                return self._ended(running)
            if self.digests.contradict(batch):
                self.abort()
                return ReplayFinding.CONTRADICTED
            running.n_answers += 1
            running.highest = max(running.highest, batch.sequence)
            running.brings_new |= batch.sequence >= self._window.next
            if running.n_answers == 1 and batch.sequence > request.start:
                # Only a jump at the start means that the engine no longer keeps the batches. A later jump means that
                # the socket's queue was full; the next attempt requests these batches again.
                await self._give_up_before(batch.sequence)
            self._window.offer(batch)
            await self._publish_ready()
        return ReplayFinding.CONSISTENT

    def _ended(self, running: _Replay) -> ReplayFinding:
        """Judge a replay that was answered completely."""
        self.abort()
        self._has_answered, self._n_unanswered = True, 0
        self.answered_from_s = running.request.began_at_s
        lasted_s = self._outage.answered(time.monotonic())
        if lasted_s is not None:
            log.info("rank %s: %s answers again after %.0f s", self._rank, self._replay_address, lasted_s)
        if running.highest == BEFORE_FIRST and running.includes_last:
            # An engine keeps at least the last batch that it sent. If it returns nothing from `start` on, it never sent
            # batch `start`.
            return ReplayFinding.CONTRADICTED
        until = running.until
        if until is not None and running.highest < until and self._window.gap_until == until:
            # The engine has never reached this number, so the buffered batches are from an older incarnation.
            log.warning("rank %s: batch %d is not from this incarnation", self._rank, until)
            self._counters.batches_foreign += self._window.drop()
            self._gap = None
            return ReplayFinding.FOREIGN
        self._count_attempt(running)
        return ReplayFinding.CONSISTENT

    def _silent(self, running: _Replay, reason: str) -> None:
        """End a replay that was not answered completely. Batches received before remain valid."""
        self.abort()
        self._n_unanswered += 1
        self._counters.replays_unanswered += 1
        lasted_s = self._outage.failed(time.monotonic())
        if lasted_s is not None:
            log.warning("rank %s: the replay socket: %s%s", self._rank, reason, lasting(lasted_s))
        self._count_attempt(running)

    def _count_attempt(self, running: _Replay) -> None:
        """Note whether an attempt to fill a gap made progress, and when the next one is due."""
        gap = self._gap
        if gap is None or running.until is None:
            return
        if self._window.next > running.next_before:
            self._counters.gap_batches_filled += max(0, min(running.until, self._window.next) - running.next_before)
            gap.attempts = 0
        else:
            gap.due_at_s = time.monotonic() + FILL_BACKOFF_S[min(gap.attempts, len(FILL_BACKOFF_S) - 1)]
            gap.attempts += 1

    async def _publish_ready(self) -> None:
        while (batch := self._window.take()) is not None:
            await self._sink.publish(batch)

    async def _give_up_before(self, kept_from: int) -> None:
        """Give up the missing batches before `kept_from`, the first one that the engine has kept.

        Buffered batches before it are published.
        """
        while self._window.next < kept_from:
            buffered = self._window.gap_until
            await self._give_up(kept_from if buffered is None else min(kept_from, buffered))

    async def _give_up(self, until: int) -> None:
        """Continue with batch `until`. If Kafka lacks the skipped batches, too, the agent sees the gap."""
        first = self._window.next
        lost = self._window.skip_to(until)
        if lost:
            log.warning("rank %s: batches %d to %d are lost", self._rank, first, until - 1)
            self._counters.gap_batches_lost += lost
            self._sink.on_batches_lost()
        await self._publish_ready()

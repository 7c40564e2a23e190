"""Batches of one incarnation in order: the next one is published, early ones wait, missing ones are requested.

What lives here: when a gap is filled from the engine's replay socket, when it is given up, and what the answers show
about the incarnation. What must not: the live socket and decoding (feed), and the decision whether the engine is still
the same process (continuity).

A message is lost if the engine sends it before this bridge connects, or while a socket's queue is full. While a gap is
being filled, live batches after it are buffered. Batches that the engine no longer keeps, or does not send in time,
stay missing; the agent then sees the gap in the sequence numbers.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import xxhash
import zmq.asyncio

from streams.core.events import BEFORE_FIRST
from streams.core.ids import RankId
from streams.engines.feed_counters import FeedCounters
from streams.engines.replay import FILL_BACKOFF_S, Batch, ReplaySilent, Window, replay

log = logging.getLogger(__name__)

#: A gap that the replay socket has not filled after this time is given up, whatever the cause.
GAP_HOLD_S = 10.0

#: Payload digests kept per incarnation. They show whether a second batch under one number is the same batch. The replay
#: of a whole buffer (10,000 batches by default) repeats batches that were received live.
DIGESTS_MAX = 16_384


class ReplayFinding(enum.Enum):
    """What a replay showed about the incarnation that is being fed."""

    CONSISTENT = "nothing contradicts the batches published"
    CONTRADICTED = "the engine has another batch under a number that was published, or never sent that number"
    FOREIGN = "the engine has never reached the numbers of the batches that were buffered"


class BatchSink(Protocol):
    """Takes batches in order; in a bridge, this is the feed."""

    async def publish(self, batch: Batch) -> None:
        """Publish the next batch of the incarnation. Raises LeaseLost."""

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
    """The result of one replay.

    answered: whether the engine sent its whole answer. progressed: whether a batch was published. contradicted: see
    ReplayFinding. highest: the greatest batch number received, BEFORE_FIRST if none was.
    """

    answered: bool = False
    progressed: bool = False
    contradicted: bool = False
    highest: int = BEFORE_FIRST


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
        counters: FeedCounters,
    ) -> None:
        self._sink = sink
        self._context = context
        self._replay_address = replay_address
        self._rank = rank
        self._counters = counters
        self._window = Window(0)
        self._gap: _Gap | None = None
        self.digests = Digests()

    @property
    def next(self) -> int:
        """The number of the next batch to publish."""
        return self._window.next

    def continue_after(self, sequence: int, digest: int) -> None:
        """Expect the batch after `sequence`, which was published with this digest."""
        self._window = Window(sequence + 1)
        self.digests.put(sequence, digest)

    async def offer(self, batch: Batch) -> None:
        """Take a batch; it is published now if it is the next one, and buffered if it is early."""
        self._window.offer(batch)
        await self._publish_ready()

    async def fill_gap(self) -> ReplayFinding:
        """Fill the gaps before the buffered batches, or give them up; return early while the next attempt is not due.

        Any finding other than CONSISTENT ends the attempt, and the caller decides how to continue.
        """
        while (until := self._window.gap_until) is not None:
            now_s = time.monotonic()
            if self._gap is None:
                self._counters.gaps += 1
                self._gap = _Gap(now_s, now_s)
            gap = self._gap
            expired = gap.attempts > len(FILL_BACKOFF_S) or now_s - gap.since_s >= GAP_HOLD_S or self._window.full
            if self._replay_address is None or expired:
                await self._give_up(until)
                self._gap = None
                continue
            if now_s < gap.due_at_s:
                return ReplayFinding.CONSISTENT  # the caller receives live batches until then
            missing = self._window.next
            replayed = await self._request(self._replay_address)
            if replayed.contradicted:
                return ReplayFinding.CONTRADICTED
            if replayed.answered and replayed.highest < until:
                # The engine has never reached this number, so the buffered batches are from an older incarnation.
                log.warning("rank %s: batch %d is not from this incarnation", self._rank, until)
                self._counters.batches_foreign += self._window.drop()
                self._gap = None
                return ReplayFinding.FOREIGN
            if replayed.progressed:
                self._counters.gap_batches_filled += max(0, min(until, self._window.next) - missing)
                gap.attempts = 0
            else:
                gap.due_at_s = time.monotonic() + FILL_BACKOFF_S[min(gap.attempts, len(FILL_BACKOFF_S) - 1)]
                gap.attempts += 1
        self._gap = None
        return ReplayFinding.CONSISTENT

    async def catch_up(self) -> ReplayFinding:
        """Request what the engine has from the next batch on, in case the last live message was lost."""
        if self._replay_address is None:
            return ReplayFinding.CONSISTENT
        replayed = await self._request(self._replay_address)
        return ReplayFinding.CONTRADICTED if replayed.contradicted else ReplayFinding.CONSISTENT

    async def _request(self, address: str) -> _Replay:
        """Publish what the engine has kept from the next batch on.

        The request includes the last batch published: identical bytes show that it is the same incarnation.
        """
        replayed = _Replay()
        last_published = self._window.next - 1
        start = last_published if last_published in self.digests else self._window.next
        self._counters.replays += 1
        first = True
        try:
            async with aclosing(replay(self._context, address, start)) as batches:
                async for batch in batches:
                    self._sink.on_engine_heard()
                    replayed.highest = max(replayed.highest, batch.sequence)
                    if self.digests.contradict(batch):
                        replayed.contradicted = True
                        return replayed
                    if first and batch.sequence > start:
                        # Only a jump at the start means that the engine no longer keeps the batches. A later jump means
                        # that the socket's queue was full; the next attempt requests these batches again.
                        await self._give_up_before(batch.sequence)
                    first = False
                    before = self._window.next
                    self._window.offer(batch)
                    await self._publish_ready()
                    replayed.progressed |= self._window.next > before
            replayed.answered = True
            # An engine keeps at least the last batch that it sent. If it returns nothing from `start` on, it never sent
            # batch `start`.
            replayed.contradicted = replayed.highest == BEFORE_FIRST and start == last_published
        except ReplaySilent as exc:
            self._counters.replays_unanswered += 1
            log.warning("rank %s: %s", self._rank, exc)
        return replayed

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

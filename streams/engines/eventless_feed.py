"""The feed of an engine that publishes no events: its ranks are alive, and routers predict what they hold.

What lives here: an incarnation for each process of the engine, and heartbeats. What must not: predictions, which a
router makes for a worker that has a bridge and no address of events (router_api.knowledge.predictions).

The first record of an incarnation says that the rank may hold blocks that no event represents, so that its answers are
`approximate`. Without a start time on the engine's metrics page, a new incarnation begins each time the engine answers
again after it did not: a router then drops its predictions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from streams.core.events import BEFORE_FIRST, ResyncRequest
from streams.core.ids import DpRank, Incarnation, RankId
from streams.engines.continuity import mint_incarnation
from streams.engines.evidence import evidence_over_http
from streams.engines.feed_counters import FeedCounters
from streams.engines.heartbeats import Heartbeats, Withheld
from streams.engines.rank_writer import RankWriter
from streams.engines.recovery import RecoveredRank
from streams.engines.restatements import Restatements
from streams.engines.wiring import EngineWiring
from streams.kafka.outage import Outage, lasting

log = logging.getLogger(__name__)

#: Time between two questions to the engine whether it is the same process.
CHECK_S = 1.0


class EventlessFeed:
    """States that the ranks of one engine are running, for as long as the bridge holds the engine's lease."""

    def __init__(
        self, wiring: EngineWiring, recovered_ranks: Mapping[int, RecoveredRank], counters: Sequence[FeedCounters]
    ) -> None:
        """recovered_ranks: their state as read from Kafka, by number. counters: one for each rank."""
        self._wiring = wiring
        self._recovered = recovered_ranks
        self._replaced = {number for number, rank in recovered_ranks.items() if not rank.is_removed}
        self._counters = counters
        self._writers = [
            RankWriter(
                wiring.settings,
                wiring.kafka,
                RankId(wiring.engine.worker_id, wiring.ranks.of(number)),
                wiring.model,
                Incarnation(0),
                False,
                wiring.epoch_of,
                wiring.in_flight,
            )
            for number in range(wiring.engine.dp_size)
        ]
        self._heartbeats = [
            Heartbeats(wiring, writer, counter) for writer, counter in zip(self._writers, counters, strict=True)
        ]
        self._restatements = [Restatements() for _ in self._writers]
        self._incarnation: Incarnation | None = None
        self._started: Incarnation | None = None
        self._answered = False  # whether the engine answered when it was last asked
        self._outage = Outage()

    async def run(self) -> None:
        """Feed until cancelled. Raises LeaseLost."""
        async with asyncio.TaskGroup() as tasks:
            for heartbeats in self._heartbeats:
                tasks.create_task(heartbeats.run())
            while True:
                await self._check()
                await asyncio.sleep(CHECK_S)

    def note_sleep(self, dp_rank: DpRank, sleeps: bool) -> None:
        """Note whether a rank of the engine sleeps, by its metrics: then it takes no requests."""
        for writer, heartbeats in zip(self._writers, self._heartbeats, strict=True):
            if writer.rank.dp_rank == dp_rank:
                (heartbeats.withhold if sleeps else heartbeats.admit)(Withheld.ASLEEP)

    def retire(self, reason: str) -> None:
        """Let the ranks get no requests from now on. The caller then ends the feed."""
        for heartbeats in self._heartbeats:
            heartbeats.retire(reason)

    def passes_on(self, now_s: float) -> bool:
        """Whether Kafka takes the ranks' records, and routers know the first one of each rank; see RankFeed."""
        return all(
            not writer.records.is_late(now_s)
            and (writer.rank.dp_rank not in self._replaced or writer.records.is_read(now_s))
            for writer in self._writers
        )

    def restate(self, request: ResyncRequest) -> None:
        """Publish again that a rank may hold blocks that no event represents, which is all that is known of it."""
        numbers, now_s = [writer.rank for writer in self._writers], time.monotonic()
        if request.rank not in numbers or not self._wiring.lease_handle.may_publish():
            return
        number = numbers.index(request.rank)
        writer, restatements, counters = self._writers[number], self._restatements[number], self._counters[number]
        counters.resyncs_requested += 1
        if not (
            restatements.answers(request, writer.incarnation, writer.sequence, now_s, is_proven=True)
            and writer.records.send()
        ):
            return
        now_us = time.time_ns() // 1000
        for piece in writer.restatement(now_us):
            writer.send_chunk(piece, now_us // 1000)
            counters.restatement_chunks += 1
        restatements.sent(writer.sequence, now_s)
        counters.restatements += 1
        log.info("rank %s: restated, without events: %s", writer.rank, request.reason)

    async def _check(self) -> None:
        evidence = await evidence_over_http(self._wiring, f"worker {self._wiring.engine.worker_id}")
        await self._wiring.lease_handle.allowed(self._wiring.term)
        for heartbeats in self._heartbeats:
            heartbeats.note_http(evidence)
        now_s, answered = time.monotonic(), self._answered
        self._answered = evidence.reachable
        if not evidence.reachable:
            lasted_s = self._outage.failed(now_s)
            if lasted_s is not None:
                url = self._wiring.engine.metrics_url
                log.warning("worker %d: %s does not answer%s", self._wiring.engine.worker_id, url, lasting(lasted_s))
            return
        self._outage.answered(now_s)
        same_process = self._started is not None and evidence.started == self._started
        if self._incarnation is None or not (same_process or (evidence.started is None and answered)):
            self._begin(evidence.started)
        for heartbeats in self._heartbeats:
            heartbeats.heard()

    def _begin(self, started: Incarnation | None) -> None:
        """Begin an incarnation of every rank."""
        recovered_ranks = self._recovered.values()
        last = max([self._incarnation or Incarnation(0), *(rank.incarnation for rank in recovered_ranks)])
        # An earlier bridge may have published events in the incarnation of this process; they are no longer followed.
        had_events = any(rank.sequence != BEFORE_FIRST for rank in recovered_ranks)
        continues = self._incarnation is None and not had_events and started == last
        if continues or (started is not None and started > last):
            assert started is not None
            incarnation = started
        else:
            incarnation = mint_incarnation(last, time.time_ns() // 1000)
        self._incarnation, self._started = incarnation, started
        log.info("worker %d: incarnation %d begins; it has no events", self._wiring.engine.worker_id, incarnation)
        for writer, heartbeats, counters in zip(self._writers, self._heartbeats, self._counters, strict=True):
            writer.begin_incarnation(incarnation)
            writer.write(BEFORE_FIRST, 0, time.time_ns() // 1_000_000, (), n_unindexed=1)
            heartbeats.renew()
            heartbeats.begun = True
            counters.incarnations += 1
        self._restatements = [Restatements() for _ in self._writers]

"""Answers to resync requests: a rank's whole ledger, between two of its batches.

What lives here: which requests wait, and publishing the chunks and where blocks are in CXL memory. What must not: which
requests are answered, and how runs are cut into chunks (restatements), what the rank holds (ledger).

State: the resync requests that wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping

from confluent_kafka import KafkaException

from streams.core.events import ResyncRequest
from streams.core.ids import RankId
from streams.engines.batch_publishing import BatchPublisher
from streams.engines.cxl_names import PooledRows
from streams.engines.feed_counters import FeedCounters
from streams.engines.rank_writer import RankWriter
from streams.engines.restatements import Restatements
from streams.engines.wiring import EngineWiring
from streams.errors import KvStreamsError

log = logging.getLogger(__name__)

#: Resync requests that wait for the loop. A partition's owner sends one at a time and repeats it.
REQUESTS_MAX = 4


class Restater:
    """Restates one rank. Owner of the requests that wait, and of what the incarnation has answered."""

    def __init__(
        self, wiring: EngineWiring, writer: RankWriter, publisher: BatchPublisher, counters: FeedCounters
    ) -> None:
        self._wiring = wiring
        self._writer = writer
        self._publisher = publisher
        self._counters = counters
        self._requests: deque[ResyncRequest] = deque(maxlen=REQUESTS_MAX)
        self._restatements = Restatements()
        self._reading_rows: asyncio.Future[Mapping[RankId, PooledRows]] | None = None  # of blocks in CXL pools

    def request(self, request: ResyncRequest) -> None:
        """Queue a request; `answer` answers it."""
        self._counters.resyncs_requested += 1
        self._requests.append(request)

    def begin(self) -> None:
        """Note that another incarnation begins, which has answered nothing."""
        self._restatements = Restatements()

    @property
    def pending(self) -> asyncio.Future[Mapping[RankId, PooledRows]] | None:
        """The rows of blocks in CXL pools, while they are read; `restate_placements` takes them."""
        return self._reading_rows

    @property
    def has_requests(self) -> bool:
        """Whether a request waits."""
        return bool(self._requests)

    async def answer(self, *, is_proven: bool) -> None:
        """Publish the whole ledger, if the oldest request is for this incarnation and has not been answered yet.

        is_proven: whether the feed is live. Raises what `BatchPublisher.may_write` does.
        """
        request, writer = self._requests.popleft(), self._writer
        if not self._restatements.answers(
            request, writer.incarnation, writer.sequence, time.monotonic(), is_proven=is_proven
        ):
            log.info(
                "rank %s: no restatement for attempt %d at batch %d", writer.rank, request.attempt, request.sequence
            )
            return
        now_us = time.time_ns() // 1000
        # On a thread: the batches of other ranks and the renewals of all leases would otherwise wait for seconds.
        pieces = await asyncio.to_thread(writer.restatement, now_us)
        for piece in pieces:
            await self._publisher.may_write()
            writer.send_chunk(piece, now_us // 1000)
            await asyncio.sleep(0)
        self._restatements.sent(writer.sequence, time.monotonic())
        self._counters.restatements += 1
        self._counters.restatement_chunks += len(pieces)
        log.info(
            "rank %s: restated to batch %d, %d blocks, %s: %s",
            writer.rank,
            writer.sequence,
            len(writer.ledger),
            "exact" if writer.ledger.complete else "not exact",
            request.reason,
        )
        if len(writer.names) and self._reading_rows is None:
            self._reading_rows = asyncio.ensure_future(self._wiring.read_pooled(writer.rank.worker_id))

    async def restate_placements(self) -> None:
        """Publish where blocks are in CXL memory, if that was read and the agents' table no longer has it."""
        if self._reading_rows is None or not self._reading_rows.done():
            return
        reading, self._reading_rows = self._reading_rows, None
        rank = self._writer.rank
        try:
            rows = reading.result().get(rank, {})
        except (KvStreamsError, KafkaException) as exc:
            log.warning("rank %s: its pooled blocks are not restated: %s", rank, exc)
            return
        await self._publisher.may_write()
        n_blocks = self._writer.restate_placements(rows, time.time_ns() // 1_000_000)
        if n_blocks:
            log.info("rank %s: the places of %d blocks in CXL pools are restated", rank, n_blocks)

    def close(self) -> None:
        """Stop reading."""
        if self._reading_rows is not None:
            self._reading_rows.cancel()

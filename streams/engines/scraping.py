"""Reads an engine's Prometheus page at intervals, and publishes each rank's gauges.

What lives here: when the page is read, within which limits, and what is counted. What must not: the meaning of the
names (metrics), and whether this bridge may publish for the engine (lease). If an engine's page cannot be read, nothing
is published, and its last numbers expire on every router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from confluent_kafka import KafkaError, KafkaException, Message

from streams.core.engine_metrics import METRICS_TTL_MS_MAX, MetricsReport, WorkerMetrics
from streams.core.ids import DpRank, Incarnation, RankId
from streams.engines.metrics import parse_block_size, parse_metrics, parse_sleep, tokens_processed
from streams.engines.process_start import PAGE_BYTES_MAX, parse_process_start, read_body
from streams.engines.turns import next_turn, share_of
from streams.engines.wiring import EngineWiring
from streams.errors import BadRecord
from streams.kafka.clients import worker_key
from streams.kafka.outage import Outage, lasting
from streams.kafka.records import encode_metrics
from streams.topics import topics

log = logging.getLogger(__name__)

#: A page that takes longer would be too old to use.
SCRAPE_TIMEOUT_S = 2.0

#: How many scrapes may fail in a row before the last report expires.
INTERVALS_KEPT = 3

#: Longer pages are parsed on a thread, since the batches of all other engines would wait: 50 KB take 10 ms.
PAGE_BYTES_AT_ONCE = 4096

#: The shortest pause between two scrapes, however long one took, so that a slow engine is not kept busy with them.
_PAUSE_S_MIN = 0.05


@dataclass(slots=True)
class ScrapeCounters:
    """failed: the engine did not answer, or its page cannot be used. unpublished: Kafka did not take the report."""

    scrapes: int = 0
    failed: int = 0
    published: int = 0
    unpublished: int = 0

    def __str__(self) -> str:
        return f"{self.scrapes} scrapes, {self.failed} failed; {self.published} published, {self.unpublished} not taken"


class Scraper:
    """Reads one engine's page while this bridge holds its lease."""

    def __init__(
        self,
        wiring: EngineWiring,
        on_requests: Callable[[DpRank], None] = lambda _: None,
        on_start: Callable[[Incarnation], None] = lambda _: None,
        on_sleep: Callable[[DpRank, bool], None] = lambda _rank, _sleeps: None,
        on_unreachable: Callable[[], None] = lambda: None,
    ) -> None:
        """on_requests: called for each rank whose requests were running, or tokens were processed, since the last page.

        The page may be read when no request happens to be running, so counters of tokens are compared as well.
        on_start: called with the start time of the engine's process, if the page has it. on_sleep: called for each rank
        with whether it sleeps, as of each page. on_unreachable: called if a page cannot be requested, since nothing
        takes the connection, or it breaks.
        """
        self._on_unreachable = on_unreachable
        self._on_sleep = on_sleep
        self._on_start = on_start
        self._wiring = wiring
        self._interval_s = wiring.settings.metrics_interval_s
        self._ttl_ms = min(METRICS_TTL_MS_MAX, round((INTERVALS_KEPT * self._interval_s + SCRAPE_TIMEOUT_S) * 1000))
        self._dp_start = wiring.ranks.start
        self._topic = topics(wiring.settings).worker_metrics.name
        self._on_requests = on_requests
        self._outage = Outage()
        self._tokens: dict[DpRank, float] = {}  # as of the last page
        self.counters = ScrapeCounters()

    async def run(self) -> None:
        """Scrape until cancelled; return at once if `metrics_interval_s` is 0."""
        if not self._interval_s:
            return
        share = share_of(self._wiring.engine.worker_id)
        try:
            while True:
                await self._scrape()
                now_s = time.monotonic()
                await asyncio.sleep(max(_PAUSE_S_MIN, next_turn(now_s, self._interval_s, share) - now_s))
        finally:
            log.info("worker %d: scraping ends: %s", self._wiring.engine.worker_id, self.counters)

    async def _scrape(self) -> None:
        engine, settings = self._wiring.engine, self._wiring.settings
        self.counters.scrapes += 1
        try:
            page = await _fetch(self._wiring.http, engine.metrics_url)
            block_size = settings.block_size_of(self._wiring.model)
            if len(page) > PAGE_BYTES_AT_ONCE:
                parsed = await asyncio.to_thread(_parsed, page, engine.dp_size, self._dp_start, block_size)
            else:
                parsed = _parsed(page, engine.dp_size, self._dp_start, block_size)
            self._wiring.on_page_block_size(parsed.block_size)
            if parsed.started is not None:
                self._on_start(parsed.started)
            for dp_rank, sleeps in parsed.sleeps.items():
                self._on_sleep(dp_rank, sleeps)
            if parsed.error is not None:
                raise parsed.error
            ranks, tokens = parsed.ranks, parsed.tokens
        except (aiohttp.ClientError, TimeoutError, BadRecord) as exc:
            self._failed(exc)
            if isinstance(exc, aiohttp.ClientConnectionError):
                self._on_unreachable()
            return
        lasted_s = self._outage.answered(time.monotonic())
        if lasted_s is not None:
            log.info("worker %d: %s can be read again after %.0f s", engine.worker_id, engine.metrics_url, lasted_s)
        self._note_requests(ranks, tokens)
        for dp_rank, metrics in ranks.items():
            rank = RankId(engine.worker_id, dp_rank)
            scraped_at_ms = time.time_ns() // 1_000_000
            self._publish(MetricsReport(rank, metrics, self._ttl_ms, scraped_at_ms, self.counters.failed))

    def _note_requests(self, ranks: Mapping[DpRank, WorkerMetrics], tokens: Mapping[DpRank, float]) -> None:
        earlier, self._tokens = self._tokens, dict(tokens)
        for dp_rank in ranks.keys() | tokens.keys():
            running = dp_rank in ranks and ranks[dp_rank].request_active_slots > 0
            if running or (dp_rank in earlier and tokens.get(dp_rank, 0.0) > earlier[dp_rank]):
                self._on_requests(dp_rank)

    def _failed(self, exc: Exception) -> None:
        """Count a failure. It is logged like every outage: each failure would fill the log of a restarting fleet."""
        self.counters.failed += 1
        lasted_s = self._outage.failed(time.monotonic())
        if lasted_s is not None:
            log.warning(
                "worker %d: %s cannot be read: %s%s",
                self._wiring.engine.worker_id,
                self._wiring.engine.metrics_url,
                str(exc) or repr(exc),
                lasting(lasted_s),
            )

    def _publish(self, report: MetricsReport) -> None:
        if not self._wiring.lease_handle.may_publish():
            return  # another bridge may feed the engine by now
        try:
            self._wiring.kafka.produce(
                self._topic,
                key=worker_key(report.rank.worker_id),
                value=encode_metrics(report),
                on_delivery=self._on_delivery,
            )
        except (BufferError, KafkaException):
            self.counters.unpublished += 1  # not repeated, since the next report replaces it

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self.counters.published += 1
        else:
            self.counters.unpublished += 1


@dataclass(slots=True)
class _Page:
    """What a page says. block_size: of the engine. started: when its process started.

    tokens: processed, by rank. sleeps: whether each rank sleeps; a rank that the page says nothing about is awake.
    error: why ranks and tokens cannot be used.
    """

    block_size: int | None
    started: Incarnation | None
    ranks: Mapping[DpRank, WorkerMetrics] = field(default_factory=dict)
    tokens: Mapping[DpRank, float] = field(default_factory=dict)
    sleeps: Mapping[DpRank, bool] = field(default_factory=dict)
    error: BadRecord | None = None


def _parsed(page: bytes, dp_size: int, dp_start: int, block_size: int) -> _Page:
    """Parse a page. block_size: the scope's, in tokens."""
    parsed = _Page(parse_block_size(page), parse_process_start(page.decode(errors="replace")).started)
    try:
        sleeps = parse_sleep(page, dp_size=dp_size, dp_start=dp_start)
        parsed.sleeps = {DpRank(dp_start + n): sleeps.get(DpRank(dp_start + n), False) for n in range(dp_size)}
        parsed.ranks = parse_metrics(page, dp_size=dp_size, block_size=block_size, dp_start=dp_start)
        parsed.tokens = tokens_processed(page, dp_size=dp_size, dp_start=dp_start)
    except BadRecord as exc:
        parsed.error = exc
    return parsed


async def first_page(http: aiohttp.ClientSession, url: str) -> bytes:
    """Return an engine's page as it is before the engine is fed; an empty one if it cannot be read."""
    try:
        return await _fetch(http, url)
    except (aiohttp.ClientError, TimeoutError, BadRecord):
        return b""


async def _fetch(http: aiohttp.ClientSession, url: str) -> bytes:
    """Fetch a page. Raises ClientError, TimeoutError, and BadRecord for another status or a page that is too long."""
    async with asyncio.timeout(SCRAPE_TIMEOUT_S), http.get(url) as response:
        if response.status != 200:
            raise BadRecord("bad_status", f"the answer's status is {response.status}")
        page = await read_body(response, PAGE_BYTES_MAX)
        if len(page) > PAGE_BYTES_MAX:
            raise BadRecord("too_large", f"the page has more than {PAGE_BYTES_MAX} bytes")
        return page

"""Reads an engine's Prometheus page at intervals, and publishes each rank's gauges.

What lives here: when the page is read, within which limits, and what is counted. What must not: the meaning of the
names (metrics), and whether this bridge may publish for the engine (lease). If an engine's page cannot be read, nothing
is published, and its last numbers expire on every router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import aiohttp
from confluent_kafka import KafkaError, KafkaException, Message

from streams.codec import encode_metrics
from streams.core.engine_metrics import METRICS_TTL_MS_MAX, MetricsReport
from streams.core.ids import RankId
from streams.engines.metrics import parse_block_size, parse_metrics
from streams.engines.wiring import EngineWiring
from streams.errors import BadRecord
from streams.kafka import worker_key
from streams.topics import topics

log = logging.getLogger(__name__)

#: A page that takes longer would be too old to use.
SCRAPE_TIMEOUT_S = 2.0

#: Bytes of a page. vLLM's page of eight ranks with all its histograms is about 500 KB.
PAGE_BYTES_MAX = 8 * 1024 * 1024

#: How many scrapes may fail in a row before the last report expires.
INTERVALS_KEPT = 3

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

    def __init__(self, wiring: EngineWiring) -> None:
        self._wiring = wiring
        self._interval_s = wiring.settings.metrics_interval_s
        self._ttl_ms = min(METRICS_TTL_MS_MAX, round((INTERVALS_KEPT * self._interval_s + SCRAPE_TIMEOUT_S) * 1000))
        self._topic = topics(wiring.settings).worker_metrics.name
        self._failing = 0  # in a row
        self.counters = ScrapeCounters()

    async def run(self) -> None:
        """Scrape until cancelled; return at once if `metrics_interval_s` is 0."""
        if not self._interval_s:
            return
        try:
            while True:
                began_s = time.monotonic()
                await self._scrape()
                await asyncio.sleep(max(_PAUSE_S_MIN, self._interval_s - (time.monotonic() - began_s)))
        finally:
            log.info("worker %d: scraping ends: %s", self._wiring.engine.worker_id, self.counters)

    async def _scrape(self) -> None:
        engine, settings = self._wiring.engine, self._wiring.settings
        self.counters.scrapes += 1
        try:
            page = await _fetch(self._wiring.http, engine.metrics_url)
            block_size = settings.block_size_of(self._wiring.model)
            self._wiring.on_page_block_size(parse_block_size(page))
            ranks = parse_metrics(page, dp_size=engine.dp_size, block_size=block_size)
        except (aiohttp.ClientError, TimeoutError, BadRecord) as exc:
            self._failed(exc)
            return
        if self._failing:
            log.info("worker %d: %s can be read again", engine.worker_id, engine.metrics_url)
            self._failing = 0
        for dp_rank, metrics in ranks.items():
            rank = RankId(engine.worker_id, dp_rank)
            scraped_at_ms = time.time_ns() // 1_000_000
            self._publish(MetricsReport(rank, metrics, self._ttl_ms, scraped_at_ms, self.counters.failed))

    def _failed(self, exc: Exception) -> None:
        """Count a failure, and log the first one in a row; the others would fill the log of a restarting fleet."""
        self.counters.failed += 1
        self._failing += 1
        if self._failing == 1:
            engine = self._wiring.engine
            log.warning("worker %d: %s cannot be read: %s", engine.worker_id, engine.metrics_url, str(exc) or repr(exc))

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


async def reported_block_size(http: aiohttp.ClientSession, url: str) -> int | None:
    """Return the number of tokens per block on an engine's page; None if the page cannot be read or reports none."""
    try:
        return parse_block_size(await _fetch(http, url))
    except (aiohttp.ClientError, TimeoutError, BadRecord):
        return None


async def _fetch(http: aiohttp.ClientSession, url: str) -> bytes:
    """Fetch a page. Raises ClientError, TimeoutError, and BadRecord for another status or a page that is too long."""
    async with asyncio.timeout(SCRAPE_TIMEOUT_S), http.get(url) as response:
        if response.status != 200:
            raise BadRecord("bad_status", f"the answer's status is {response.status}")
        page = bytearray()
        async for part in response.content.iter_any():
            page += part
            if len(page) > PAGE_BYTES_MAX:
                raise BadRecord("too_large", f"the page has more than {PAGE_BYTES_MAX} bytes")
        return bytes(page)

"""Reading an engine's Prometheus page again and again, and publishing what it says of its ranks.

What lives here: when, with which limits, and what is counted. What must not: what the names mean (metrics), and whether
this bridge may speak for the engine (tenure). An engine that does not tell is told of nobody: its last numbers run out
on every router.
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
from streams.engines.feed import FeedWiring
from streams.engines.metrics import parse_metrics
from streams.errors import BadRecord
from streams.kafka import worker_key
from streams.topics import topics

log = logging.getLogger(__name__)

#: A page that takes longer is of a time that is over.
SCRAPE_TIMEOUT_S = 2.0

#: Bytes of a page: vLLM's of eight ranks with all its histograms is some 500 KB.
PAGE_BYTES_MAX = 8 * 1024 * 1024

#: So many scrapes may fail in a row before what was told last is too old.
INTERVALS_KEPT = 3

#: Between two scrapes at least, however long one took: an engine that is slow to tell has other things to do.
_PAUSE_S_MIN = 0.05


@dataclass(slots=True)
class ScrapeCounters:
    """What happened. failed: the engine did not answer, or not with a page that can be used; unpublished: Kafka."""

    scrapes: int = 0
    failed: int = 0
    published: int = 0
    unpublished: int = 0

    def __str__(self) -> str:
        return f"{self.scrapes} scrapes, {self.failed} failed; {self.published} published, {self.unpublished} not taken"


class Scraper:
    """Reads one engine's page while this bridge holds its lease."""

    def __init__(self, wiring: FeedWiring) -> None:
        self._wiring = wiring
        self._interval_s = wiring.settings.metrics_interval_s
        self._ttl_ms = min(METRICS_TTL_MS_MAX, round((INTERVALS_KEPT * self._interval_s + SCRAPE_TIMEOUT_S) * 1000))
        self._topic = topics(wiring.settings).worker_metrics.name
        self._failing = 0  # in a row
        self.counters = ScrapeCounters()

    async def run(self) -> None:
        """Scrape until cancelled; returns at once where the knob says that nothing is to be scraped."""
        if not self._interval_s:
            return
        try:
            while True:
                began_s = time.monotonic()
                await self._scrape()
                await asyncio.sleep(max(_PAUSE_S_MIN, self._interval_s - (time.monotonic() - began_s)))
        finally:
            log.info("worker %d: the scraping ends: %s", self._wiring.engine.worker_id, self.counters)

    async def _scrape(self) -> None:
        engine, settings = self._wiring.engine, self._wiring.settings
        self.counters.scrapes += 1
        try:
            page = await _fetch(self._wiring.http, engine.metrics_url)
            block_size = settings.block_size_of(self._wiring.model)
            ranks = parse_metrics(page, dp_size=engine.dp_size, block_size=block_size)
        except (aiohttp.ClientError, TimeoutError, BadRecord) as exc:
            self._failed(exc)
            return
        if self._failing:
            log.info("worker %d: %s tells again", engine.worker_id, engine.metrics_url)
            self._failing = 0
        for dp_rank, metrics in ranks.items():
            rank = RankId(engine.worker_id, dp_rank)
            scraped_at_ms = time.time_ns() // 1_000_000
            self._publish(MetricsReport(rank, metrics, self._ttl_ms, scraped_at_ms, self.counters.failed))

    def _failed(self, exc: Exception) -> None:
        """Count it; the first of a row is told, since the others would fill the log of a fleet that restarts."""
        self.counters.failed += 1
        self._failing += 1
        if self._failing == 1:
            engine = self._wiring.engine
            log.warning("worker %d: %s does not tell: %s", engine.worker_id, engine.metrics_url, str(exc) or repr(exc))

    def _publish(self, report: MetricsReport) -> None:
        if not self._wiring.lease_handle.may_publish():
            return  # another bridge may speak for the engine by now
        try:
            self._wiring.kafka.produce(
                self._topic,
                key=worker_key(report.rank.worker_id),
                value=encode_metrics(report),
                on_delivery=self._on_delivery,
            )
        except (BufferError, KafkaException):
            self.counters.unpublished += 1  # the next one says more than this one would

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self.counters.published += 1
        else:
            self.counters.unpublished += 1


async def _fetch(http: aiohttp.ClientSession, url: str) -> bytes:
    """A page as it is; raises ClientError, TimeoutError, and BadRecord for one that is no page or too long."""
    async with asyncio.timeout(SCRAPE_TIMEOUT_S), http.get(url) as response:
        if response.status != 200:
            raise BadRecord("bad_status", f"the answer's status is {response.status}")
        page = bytearray()
        async for part in response.content.iter_any():
            page += part
            if len(page) > PAGE_BYTES_MAX:
                raise BadRecord("too_large", f"the page has more than {PAGE_BYTES_MAX} bytes")
        return bytes(page)

"""The metrics of a bridge, declared once; docs/metrics-reference.md has their table.

What lives here: the declarations, the snapshot of a Bridge that they read, and running a bridge with a server for them.
What must not: counting (the feeds count) and Prometheus' formats (streams.process.metrics). Totals are summed over all
ranks that the bridge has fed, since the number of time series must not grow with the number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streams.engines.bridge import Bridge
from streams.engines.dialects.interface import NOT_INDEXED_REASONS
from streams.engines.feed_counters import NOT_INDEXED, RankCounters
from streams.engines.sources.interface import EngineSource
from streams.kafka.clients import wait_for_topics
from streams.kafka.outage_log import unreachable
from streams.lmcache.counters import REASONS, LmcacheCounts
from streams.lmcache.event_log import LmcacheSource
from streams.lmcache.pools import Verdict
from streams.lmcache.wire import EventType
from streams.process.http_server import Startup, monitoring_app, monitoring_server
from streams.process.metrics import Label, Metric, MetricsRegistry, counter, gauge
from streams.security.access import Access
from streams.settings import BridgeServerSettings
from streams.topics import topics
from streams.warming import HASHING, LMCACHE, warm_while_serving

log = logging.getLogger(__name__)

NO_LMCACHE = LmcacheCounts()


@dataclass(frozen=True, slots=True)
class BridgeSnapshot:
    """What the declarations read. totals: FeedCounters by name, over all ranks that this bridge has fed.

    n_engines: named by the bridge's sources now. n_buffered: records that Kafka has not acknowledged. lmcache: what it
    counts of LMCache's events; all zero without them.
    """

    n_ranks: int
    totals: Mapping[str, int]
    n_engines: int = 0
    n_buffered: int = 0
    lmcache: LmcacheCounts = NO_LMCACHE


def bridge_snapshot(
    counters: RankCounters, n_engines: int = 0, n_buffered: int = 0, lmcache: LmcacheCounts = NO_LMCACHE
) -> BridgeSnapshot:
    """Sum the counters of all ranks."""
    return BridgeSnapshot(len(counters), counters.totals(), n_engines, n_buffered, lmcache)


def _total(name: str, text: str) -> Metric[BridgeSnapshot]:
    """Declare the counter of one field of FeedCounters."""
    return counter(f"kvstreams_bridge_{name}_total", text, lambda now: now.totals[name])


_KINDS, _VERDICTS = tuple(map(str, EventType)), tuple(map(str, Verdict))

BRIDGE_METRICS: tuple[Metric[BridgeSnapshot], ...] = (
    gauge(
        "kvstreams_bridge_ranks",
        "Ranks that this bridge has fed since it started",
        lambda now: now.n_ranks,
    ),
    gauge(
        "kvstreams_bridge_engines",
        "Engines that the bridge's sources name",
        lambda now: now.n_engines,
    ),
    gauge(
        "kvstreams_bridge_buffered_records",
        "Records that Kafka has not acknowledged. At 100,000, further batches wait in the engines' sockets",
        lambda now: now.n_buffered,
    ),
    _total("batches_published", "Batches of engines that were published to `kv-events`"),
    _total("batches_repeated", "Batches that an engine sent a second time, for example from its replay socket"),
    _total(
        "batches_foreign",
        "Batches that were dropped because they belong to another incarnation than the one that is running",
    ),
    _total(
        "batches_of_wrong_block_size",
        "Batches with blocks of another size than the scope's; only the first one of an incarnation is a dead letter",
    ),
    _total("dead_letters", "Messages of engines that could not be used as they are, and went to the dead letters"),
    _total("events_unusable", "Events in these messages that could not be used"),
    _total("events_ignored", "Events that cannot matter, for example an entry for the beginning of a block"),
    _total(
        "blocks_unindexed",
        "Blocks that engines reported and that the index cannot represent, or not exactly; their rank is approximate",
    ),
    counter(
        "kvstreams_bridge_not_indexed_total",
        "Blocks of engines' events, or events without blocks, that are not indexed, or not exactly",
        lambda now: {reason: now.totals[f"{NOT_INDEXED}{reason}"] for reason in NOT_INDEXED_REASONS},
        Label("reason", values=NOT_INDEXED_REASONS),
    ),
    _total("gaps", "Gaps in the engines' batch numbers"),
    _total("gap_batches_filled", "Missing batches that an engine's replay socket returned"),
    _total("gap_batches_lost", "Missing batches that could not be obtained; their rank becomes degraded"),
    _total("replays", "Requests to engines' replay sockets"),
    _total("replays_unanswered", "Requests to engines' replay sockets that were not answered"),
    _total("incarnations", "Incarnations of engines that were fed from their start"),
    _total("resumed", "Incarnations of engines that were continued after an earlier holder of the lease"),
    _total("resumed_from_table", "Resumed incarnations whose ledger came from the table and not from the engine"),
    _total("resyncs_requested", "Requests of partition owners to restate a rank"),
    _total("restatements", "Restatements that were published"),
    _total("restatement_chunks", "Chunks of these restatements"),
    _total("heartbeats", "Heartbeats that were published"),
    gauge(
        "kvstreams_bridge_lmcache_feeds",
        "Servers and shared backends of LMCache whose events this bridge passes on",
        lambda now: now.lmcache.n_feeds,
    ),
    gauge(
        "kvstreams_bridge_lmcache_feeds_incomplete",
        "Those of them of which batches are missing; answers that use their chunks are degraded",
        lambda now: now.lmcache.n_incomplete,
    ),
    gauge(
        "kvstreams_bridge_lmcache_chunks",
        "Chunks that these servers and backends hold",
        lambda now: now.lmcache.n_chunks,
    ),
    gauge(
        "kvstreams_bridge_lmcache_records_behind",
        "Records of LMCache's topic that this bridge has not read yet",
        lambda now: now.lmcache.behind,
    ),
    counter(
        "kvstreams_bridge_lmcache_batches_total",
        "Batches of LMCache's events that were read, of all servers",
        lambda now: {kind: now.lmcache.batches.get(kind, 0) for kind in _KINDS},
        Label("kind", values=_KINDS),
    ),
    counter(
        "kvstreams_bridge_lmcache_verdicts_total",
        "Batches by what they are in the order of their server, for each server and shared backend that is passed on",
        lambda now: {verdict: now.lmcache.verdicts.get(verdict, 0) for verdict in _VERDICTS},
        Label("verdict", values=_VERDICTS),
    ),
    counter(
        "kvstreams_bridge_lmcache_stored_total",
        "Objects that LMCache has stored: chunks, for each rank of an engine",
        lambda now: now.lmcache.stored,
    ),
    counter(
        "kvstreams_bridge_lmcache_not_counted_total",
        "Those of them that are in no pool",
        lambda now: {reason: now.lmcache.not_counted.get(reason, 0) for reason in REASONS},
        Label("reason", values=REASONS),
    ),
    counter(
        "kvstreams_bridge_lmcache_dead_letters_total",
        "Records that are not LMCache's events, or of a later version, and went to the dead letters",
        lambda now: now.lmcache.dead_letters,
    ),
)


def bridge_registry(bridge: Bridge) -> MetricsRegistry[BridgeSnapshot]:
    """The registry of a bridge."""

    def snapshot() -> BridgeSnapshot:
        return bridge_snapshot(
            bridge.counters, bridge.n_engines, bridge.n_buffered, bridge.lmcache_counts or NO_LMCACHE
        )

    return MetricsRegistry(BRIDGE_METRICS, snapshot)


async def run_bridge(
    settings: BridgeServerSettings, sources: Sequence[EngineSource], lmcache: LmcacheSource | None = None
) -> None:
    """Run a bridge until cancelled, and serve /healthz, /ready and /metrics if `metrics_port` is set.

    A bridge creates no topics, and waits while some are missing. Raises SettingsError if it cannot listen on that port,
    and KvStreamsError if Kafka cannot be reached.
    """
    startup, access = Startup(), Access(settings)
    async with monitoring_server(settings.host, settings.metrics_port, startup, access) as server:
        startup.note("connecting to Kafka")
        await wait_for_topics(settings, topics(settings).all(), startup.note)
        await warm_while_serving(HASHING if lmcache is None else LMCACHE, startup.note)
        bridge = Bridge(settings, sources, lmcache)
        if server is not None:

            def not_ready() -> str | None:
                return unreachable(settings.kafka) or bridge.not_ready()

            await server.serve(monitoring_app(not_ready, [bridge_registry(bridge)], access))
            log.info("/healthz, /ready and /metrics on %s", server.url)
        await bridge.run()

"""The topics of a scope, as data (docs/architecture.md, Topics).

What lives here: name, key, schema, partitions, replication, retention and cleanup of every topic. What must not: calls
to Kafka (streams.kafka.clients). An operator can read this file instead of a broker's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streams.core.engine_metrics import METRICS_TTL_MS_MAX
from streams.errors import SettingsError
from streams.settings import TopicProfile, TopicSettings

#: TopicSettings that make compaction run soon. Kafka's defaults (segments of 1 GiB, 7 days, half of the log dirty)
#: would leave hours of superseded records, which every starting reader has to read: for one hour at full rate, 85 GB
#: and 18 minutes.
_COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": str(64 * 1024 * 1024),
    "segment.ms": str(10 * 60 * 1000),
    "min.cleanable.dirty.ratio": "0.2",
    "delete.retention.ms": str(24 * 3600 * 1000),
}
COMPACTION_LAG = "min.compaction.lag.ms"
RETENTION = "retention.ms"
_COMPACTION_LAG_MS_MIN = 60 * 1000

#: What superseded records take at the design load, 1,000 event records and 1,000 bookings per second: 85 GB for an
#: hour, without replicas, which a router or a worker without a local copy reads in 18 minutes.
HISTORY_BYTES_PER_S = 85 * 1000**3 // 3600
HISTORY_READ_BYTES_PER_S = 80 * 1000**2

#: A partition owner repeats a request that is not answered, so older requests need not be kept.
_CONTROL_RETENTION_MS = 10 * 60 * 1000
_DEAD_LETTER_RETENTION_MS = 7 * 24 * 3600 * 1000

#: Limit of the topics with the largest records. MSK Serverless and Confluent Cloud allow no more. It covers a record's
#: key and headers as well.
MESSAGE_BYTES_MAX = 8 * 1024 * 1024

#: What a record's key and headers take at most, and what Kafka adds. The headers of a dead letter state its reason.
_HEADERS_BYTES_MAX = 64 * 1024

#: Bytes of one record of kv-events: 16 per block, so that a prompt of 8 million tokens in blocks of 16 is one record. A
#: dead letter is the record itself if it has a schema of ours.
EVENT_BYTES_MAX = MESSAGE_BYTES_MAX - _HEADERS_BYTES_MAX

#: Bytes of a chunk of a restatement, which is parked in the index's changelog unchanged. Bridges start a new chunk at
#: 1 MiB of hashes.
PARKED_CHUNK_BYTES_MAX = 1536 * 1024

#: Bytes of one record of cxl-events: 28 per block, for 4,096 blocks and as many workers. A record may be parked
#: unchanged in a changelog, which has the broker's default limit of 1 MB; a larger record would stop its partition.
CXL_EVENT_BYTES_MAX = 256 * 1024

#: Bytes of one record of router-decisions: 256 decisions with the longest request ids, the most candidates and the most
#: families have less than 3.5 MiB (streams.decision_log.records).
DECISION_BYTES_MAX = 4 * 1024 * 1024

#: Kafka deletes whole segments, and never the one that is written. With these bounds, a partition of the decision log
#: has at most a quarter more than its share, and a segment is not smaller than a record.
_DECISION_SEGMENT_BYTES_MIN, _DECISION_SEGMENT_BYTES_MAX = 8 * 1024 * 1024, 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _ProfileRules:
    """What a service allows. names: the settings that topics may have there, or None for all. least: lowest values."""

    names: frozenset[str] | None = None
    least: Mapping[str, int] = field(default_factory=dict)
    replication_min: int = 1

    def allowed(self, config: Mapping[str, str]) -> Mapping[str, str]:
        """The settings of a topic that the service allows, each with the value that comes closest."""
        return {
            name: str(max(int(value), self.least[name])) if name in self.least else value
            for name, value in config.items()
            if self.names is None or name in self.names
        }


_EVERYWHERE = frozenset(
    {"cleanup.policy", "max.message.bytes", "message.timestamp.type", "retention.bytes", "retention.ms"}
)

#: By the documentation of each service; none of them was tried. docs/kafka.md says what a profile costs.
_PROFILES: Mapping[TopicProfile, _ProfileRules] = {
    TopicProfile.STANDARD: _ProfileRules(),
    # Replicas are MSK's, in three zones.
    TopicProfile.MSK_SERVERLESS: _ProfileRules(_EVERYWHERE, replication_min=3),
    # All cluster types allow these values; a Dedicated cluster allows lower ones.
    TopicProfile.CONFLUENT_CLOUD: _ProfileRules(
        _EVERYWHERE | {"delete.retention.ms", "min.compaction.lag.ms", "segment.bytes", "segment.ms"},
        {"segment.bytes": 50 * 1024 * 1024, "segment.ms": 4 * 3600 * 1000, "retention.ms": 3600 * 1000},
        replication_min=3,
    ),
    # Redpanda acts as if `segment.ms` were at least `log_segment_ms_min`, which is 10 minutes by default.
    TopicProfile.REDPANDA: _ProfileRules(_EVERYWHERE | {"segment.bytes", "segment.ms"}, {"segment.ms": 600 * 1000}),
}

#: By the schema of a topic, those of its other records.
_FURTHER_SCHEMAS: Mapping[str, tuple[str, ...]] = {
    "workers": ("cordons", "avoidances", "render-parities", "models", "cxl-pools", "lmcache-feeds"),
    "worker-metrics": ("bridge-pulses",),
    "prefix-index-run": ("prefix-index-progress", "prefix-index-partition"),
    "cxl-block": ("cxl-owner", "cxl-parked"),
}

PREFIX_INDEX = "prefix-index"
CXL_BLOCKS = "cxl-blocks"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """One topic. key: what records are keyed by. schema: name of the .avsc file, or None for bytes as received.

    further_schemas: of its other records.
    history: names of the settings that keep the records of `history_window_s`. A broker may have greater numbers.
    """

    name: str
    key: str
    schema: str | None
    partitions: int
    replication: int
    config: Mapping[str, str]
    further_schemas: tuple[str, ...] = ()
    history: frozenset[str] = frozenset()

    @property
    def schemas(self) -> tuple[str, ...]:
        """The schemas of all its records."""
        return () if self.schema is None else (self.schema, *self.further_schemas)


@dataclass(frozen=True, slots=True)
class Topics:
    """Every topic of a scope."""

    kv_events: TopicSpec
    cxl_events: TopicSpec
    workers: TopicSpec
    worker_metrics: TopicSpec
    router_loads: TopicSpec
    kv_control: TopicSpec
    dead_letters: TopicSpec
    router_decisions: TopicSpec
    index_changelog: TopicSpec
    cxl_changelog: TopicSpec

    def all(self) -> tuple[TopicSpec, ...]:
        """All topics, in the order in which they are created."""
        return (
            self.kv_events,
            self.cxl_events,
            self.workers,
            self.worker_metrics,
            self.router_loads,
            self.kv_control,
            self.dead_letters,
            self.router_decisions,
            self.index_changelog,
            self.cxl_changelog,
        )

    def with_history(self) -> tuple[TopicSpec, ...]:
        """The topics that keep every record for `history_window_s`."""
        return tuple(spec for spec in self.all() if spec.history)


def history_group(settings: TopicSettings) -> str:
    """The group whose offsets say where topics begin to have their history (replay.window)."""
    return f"{settings.app_id}-history"


def topics(settings: TopicSettings) -> Topics:
    """The topics of the scope that the settings describe. Raises SettingsError for a window that they cannot keep."""
    rules = _PROFILES[settings.topic_profile]
    replication = max(settings.replication, rules.replication_min)
    keeps_history = COMPACTION_LAG in rules.allowed({COMPACTION_LAG: "0"})
    if settings.history_window_s and not keeps_history:
        raise SettingsError(
            f"with topic_profile {settings.topic_profile.value}, topics cannot keep their history",
            remedy="Set history_window_s to 0",
        )

    def spec(name: str, key: str, schema: str | None, config: Mapping[str, str], *history: str) -> TopicSpec:
        further = _FURTHER_SCHEMAS.get(schema or "", ())
        kept = frozenset(history) if keeps_history else frozenset[str]()
        return TopicSpec(name, key, schema, settings.partitions, replication, rules.allowed(config), further, kept)

    window_ms = round(settings.history_window_s * 1000)
    compacted = {**_COMPACTED, COMPACTION_LAG: str(max(_COMPACTION_LAG_MS_MIN, window_ms))}
    prefix = settings.topic_prefix
    decision_bytes = settings.decision_log_bytes_max // settings.partitions
    return Topics(
        kv_events=spec(
            f"{prefix}kv-events",
            "worker id, ASCII decimal",
            "kv-events",
            {
                "cleanup.policy": "delete",
                "retention.ms": str(settings.retention_ms),
                "max.message.bytes": str(MESSAGE_BYTES_MAX),
            },
        ),
        cxl_events=spec(
            f"{prefix}cxl-events",
            "worker id, ASCII decimal",
            "cxl-events",
            {"cleanup.policy": "delete", "retention.ms": str(settings.retention_ms)},
        ),
        workers=spec(
            f"{prefix}workers",
            "worker id, ASCII decimal; avoid/, cordon/ or render/ and a worker id; model/ and a model; pool/ and a "
            "pool; lmcache/ and an instance; lmcache-shared/ and a backend",
            "workers",
            compacted,
            COMPACTION_LAG,
        ),
        worker_metrics=spec(
            f"{prefix}worker-metrics",
            "worker id, ASCII decimal; bridge/ and a bridge's name",
            "worker-metrics",
            # Routers start reading at its end, since only the newest record of a rank is of use to them.
            {
                "cleanup.policy": "delete",
                RETENTION: str(METRICS_TTL_MS_MAX + window_ms),
                "segment.ms": str(60 * 1000),
            },
            RETENTION,
        ),
        router_loads=spec(
            f"{prefix}router-loads",
            "request id, router id, counter, phase; partitioned by request id",
            "router-loads",
            {
                **_COMPACTED,
                "cleanup.policy": "compact,delete",
                # Bookings expire by append time, so that all routers use one clock: the broker's.
                "message.timestamp.type": "LogAppendTime",
                # Twice the TTL: a starting router must see the `add` of every booking that may still be active.
                RETENTION: str(round(settings.booking_ttl_s * 2 * 1000) + window_ms),
                "segment.ms": str(60 * 1000),
                COMPACTION_LAG: str(window_ms),
                # 8 bytes per block, so that the longest request accepted fits unless blocks have a single token.
                "max.message.bytes": str(MESSAGE_BYTES_MAX),
            },
            COMPACTION_LAG,
            RETENTION,
        ),
        kv_control=spec(
            f"{prefix}kv-control",
            "worker id, ASCII decimal",
            "kv-control",
            {"cleanup.policy": "delete", "retention.ms": str(_CONTROL_RETENTION_MS), "segment.ms": str(60 * 1000)},
        ),
        dead_letters=spec(
            f"{prefix}kv-dead-letters",
            "as received",
            None,
            {
                "cleanup.policy": "delete",
                "retention.ms": str(_DEAD_LETTER_RETENTION_MS),
                "max.message.bytes": str(MESSAGE_BYTES_MAX),
            },
        ),
        router_decisions=spec(
            f"{prefix}router-decisions",
            "none",
            "router-decisions",
            {
                "cleanup.policy": "delete",
                "retention.ms": str(settings.decision_log_retention_ms),
                "retention.bytes": str(decision_bytes),
                "segment.bytes": str(
                    max(_DECISION_SEGMENT_BYTES_MIN, min(_DECISION_SEGMENT_BYTES_MAX, decision_bytes // 4))
                ),
                "max.message.bytes": str(DECISION_BYTES_MAX),
            },
        ),
        index_changelog=spec(
            f"{settings.app_id}-{PREFIX_INDEX}-changelog",
            "run, progress or partition key, big-endian",
            "prefix-index-run",
            # The default limit of brokers and clients is 1 MB.
            {**compacted, "max.message.bytes": str(PARKED_CHUNK_BYTES_MAX + 64 * 1024)},
            COMPACTION_LAG,
        ),
        cxl_changelog=spec(
            f"{settings.app_id}-{CXL_BLOCKS}-changelog",
            "block, owner or parked transition, big-endian",
            "cxl-block",
            compacted,
            COMPACTION_LAG,
        ),
    )

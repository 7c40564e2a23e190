"""The topics as data (docs/architecture.md, Topics)."""

from __future__ import annotations

import json

import avro.schema
import faust
import pytest

from streams.errors import SettingsError
from streams.kafka.avro_frames import schemas_dir
from streams.settings import Settings, TopicProfile
from streams.topics import CXL_BLOCKS, PREFIX_INDEX, TopicSpec, topics

HOUR_MS = 3_600_000

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": str(64 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.2",
    "min.compaction.lag.ms": "60000",
    "delete.retention.ms": str(24 * HOUR_MS),
}

#: Kafka settings of every topic by its name without the prefix, written out a second time, independently of the code
#: (docs/architecture.md, Topics).
EXPECTED: dict[str, dict[str, str]] = {
    "kv-events": {"cleanup.policy": "delete", "retention.ms": str(HOUR_MS), "max.message.bytes": str(8 << 20)},
    "cxl-events": {"cleanup.policy": "delete", "retention.ms": str(HOUR_MS)},
    "workers": COMPACTED,
    "worker-metrics": {"cleanup.policy": "delete", "retention.ms": "600000", "segment.ms": "60000"},
    # Bookings last minutes, so segments are closed, and therefore compacted, ten times as often.
    "router-loads": {
        **COMPACTED,
        "cleanup.policy": "compact,delete",
        "message.timestamp.type": "LogAppendTime",
        "min.compaction.lag.ms": "0",
        "segment.ms": "60000",
        "retention.ms": str(2 * 600 * 1000),
        "max.message.bytes": str(8 << 20),
    },
    "kv-control": {"cleanup.policy": "delete", "retention.ms": "600000", "segment.ms": "60000"},
    "kv-dead-letters": {
        "cleanup.policy": "delete",
        "retention.ms": str(7 * 24 * HOUR_MS),
        "max.message.bytes": str(8 << 20),
    },
    # 2 GiB over 5 partitions, in segments of at most 64 MiB.
    "router-decisions": {
        "cleanup.policy": "delete",
        "retention.ms": str(24 * HOUR_MS),
        "retention.bytes": str((2 << 30) // 5),
        "segment.bytes": str(64 << 20),
        "max.message.bytes": str(4 << 20),
    },
    # A parked chunk of a restatement is a row of its own, as large as it arrived.
    "kvstreams-prefix-index-changelog": {**COMPACTED, "max.message.bytes": str((3 << 19) + 65536)},
    "kvstreams-cxl-blocks-changelog": COMPACTED,
}


@pytest.mark.parametrize("prefix", ["", "fleet-a.", "x" * 200])
def test_every_topic_of_a_scope(prefix: str) -> None:
    """A scope has the topics of the design, each with the scope's prefix, partitions and replicas."""
    specs = topics(Settings(topic_prefix=prefix, partitions=5, replication=3)).all()
    assert {spec.name: dict(spec.config) for spec in specs} == {prefix + name: own for name, own in EXPECTED.items()}
    assert {(spec.partitions, spec.replication) for spec in specs} == {(5, 3)}
    assert all(len(spec.name) <= 249 for spec in specs)  # Kafka's limit


#: Settings that topics may have, and their lowest and highest values, by each service's own documentation.
MIB = 1 << 20
LIMITS: dict[TopicProfile, dict[str, tuple[int, int]]] = {
    TopicProfile.MSK_SERVERLESS: {"max.message.bytes": (1, 8 * MIB)},
    TopicProfile.CONFLUENT_CLOUD: {
        "delete.retention.ms": (0, 60_566_400_000),
        "max.message.bytes": (1, 8 * MIB),
        "min.compaction.lag.ms": (0, 1 << 62),
        "segment.bytes": (50 * MIB, 1 << 30),
        "segment.ms": (4 * HOUR_MS, 1 << 62),
        "retention.ms": (HOUR_MS, 1 << 62),
    },
    TopicProfile.REDPANDA: {"segment.bytes": (MIB, 1 << 40), "segment.ms": (600_000, 1 << 62)},
}
ANYWHERE = {"cleanup.policy", "message.timestamp.type", "max.message.bytes", "retention.bytes", "retention.ms"}


@pytest.mark.parametrize("profile", TopicProfile)
def test_a_profile_keeps_a_window_of_history_or_refuses_the_setting(profile: TopicProfile) -> None:
    """Without min.compaction.lag.ms, superseded records are lost, whatever the setting says."""
    if profile in (TopicProfile.MSK_SERVERLESS, TopicProfile.REDPANDA):
        assert topics(Settings(topic_profile=profile)).with_history() == ()
        with pytest.raises(SettingsError, match="cannot keep their history"):
            topics(Settings(topic_profile=profile, history_window_s=60.0))
        return
    short, long = (topics(Settings(topic_profile=profile, history_window_s=window_s)) for window_s in (0.0, 7200.0))
    for before, after in zip(short.all(), long.all(), strict=True):
        grown = {name for name in before.config if int_of(after.config[name]) > int_of(before.config[name])}
        assert grown == after.history
    names = {spec.name for spec in long.with_history()}
    kept = (long.workers, long.worker_metrics, long.router_loads, long.index_changelog, long.cxl_changelog)
    assert names == {spec.name for spec in kept}


def int_of(value: str) -> int:
    """A setting as a number; 0 for one that is not."""
    return int(value) if value.lstrip("-").isdigit() else 0


@pytest.mark.parametrize("profile", LIMITS)
def test_a_profile_sets_only_what_its_service_allows(profile: TopicProfile) -> None:
    """Other settings are left out, values outside of a service's limits are moved to them, and the rest is the same."""
    standard = topics(Settings()).all()
    specs = topics(Settings(topic_profile=profile)).all()
    limits = LIMITS[profile]
    for ours, spec in zip(standard, specs, strict=True):
        assert (spec.name, spec.partitions) == (ours.name, ours.partitions)
        assert set(spec.config) == {name for name in ours.config if name in limits or name in ANYWHERE}
        for name, value in spec.config.items():
            low, high = limits.get(name, (0, 0))
            wanted = ours.config[name]
            assert value == (str(min(max(int(wanted), low), high)) if high else wanted)
    assert {spec.replication for spec in specs} == ({1} if profile is TopicProfile.REDPANDA else {3})


def test_a_prefix_that_kafka_would_refuse_is_refused_at_once() -> None:
    """The longest prefix leaves space for the longest topic name; one character more is an invalid setting."""
    with pytest.raises(SettingsError):
        Settings(topic_prefix="x" * 201)


@pytest.mark.parametrize("prefix", ["", "fleet-a."])
def test_changelogs_have_the_names_that_faust_would_give_them(prefix: str) -> None:
    """Faust tables with the same app id and table names would use the same changelogs."""
    settings = Settings(topic_prefix=prefix)
    app = faust.App(settings.app_id, store="memory://")
    assert topics(settings).index_changelog.name == app.Table(PREFIX_INDEX).changelog_topic_name
    assert topics(settings).cxl_changelog.name == app.Table(CXL_BLOCKS).changelog_topic_name


def test_the_longest_request_fits_a_record_of_its_booking() -> None:
    """A request with the largest accepted number of tokens, in blocks of two tokens, fits one record."""
    assert Settings().request_tokens_max // 2 * 8 + 4096 <= int(
        topics(Settings()).router_loads.config["max.message.bytes"]
    )


def test_retention_follows_the_settings() -> None:
    """Events are kept for `retention_ms`, bookings for twice `booking_ttl_s`."""
    named = topics(Settings(retention_ms=120_000, booking_ttl_s=1.5))
    assert named.kv_events.config["retention.ms"] == named.cxl_events.config["retention.ms"] == "120000"
    assert named.router_loads.config["retention.ms"] == "3000"


@pytest.mark.parametrize(
    ("n_bytes", "partitions", "retention_bytes", "segment_bytes"),
    [(1 << 30, 8, 1 << 27, 1 << 25), (1 << 26, 8, 1 << 23, 1 << 23), (1 << 40, 1, 1 << 40, 1 << 26)],
)
def test_the_decision_log_is_limited_in_time_and_bytes(
    n_bytes: int, partitions: int, retention_bytes: int, segment_bytes: int
) -> None:
    """Each partition has its share of the bytes. Kafka deletes whole segments, so these are smaller than the share."""
    knobs = Settings(decision_log_bytes_max=n_bytes, decision_log_retention_ms=60_000, partitions=partitions)
    config = topics(knobs).router_decisions.config
    assert config["retention.ms"] == "60000"
    assert (config["retention.bytes"], config["segment.bytes"]) == (str(retention_bytes), str(segment_bytes))


@pytest.mark.parametrize("spec", topics(Settings()).all(), ids=lambda spec: spec.name)
def test_every_topics_schema_parses(spec: TopicSpec) -> None:
    """Each topic's schema file exists and the `avro` package, which is independent of ours, reads it.

    Dead letters are the only topic without a schema.
    """
    if spec.schema is None:
        assert spec.name == "kv-dead-letters"
        return
    text = (schemas_dir() / f"{spec.schema}.avsc").read_text()
    assert isinstance(avro.schema.parse(text), avro.schema.RecordSchema)


def test_every_schema_file_parses() -> None:
    """Every schema file is valid and in our namespace, whether or not a topic uses it."""
    files = sorted(schemas_dir().glob("*.avsc"))
    assert {spec.schema for spec in topics(Settings()).all()} - {None} <= {file.stem for file in files}
    for file in files:
        avro.schema.parse(file.read_text())
        assert json.loads(file.read_text())["namespace"] == "io.kvstreams"

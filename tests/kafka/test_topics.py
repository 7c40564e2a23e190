"""The topics as data (docs/architecture.md, Topics), and their creation on a real Kafka."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import avro.schema
import faust
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from streams.codec import schemas_dir
from streams.errors import KvStreamsError, SettingsError, TopicMismatch
from streams.kafka import FirstOffset, admin, check_topic, describe_topics, ensure_topics, first_offset, producer
from streams.settings import Settings
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

#: Settings of every topic by its name without the prefix, written out a second time (docs/architecture.md, Topics).
WANTED: dict[str, dict[str, str]] = {
    "kv-events": {"cleanup.policy": "delete", "retention.ms": str(HOUR_MS), "max.message.bytes": str(8 << 20)},
    "cxl-events": {"cleanup.policy": "delete", "retention.ms": str(HOUR_MS)},
    "workers": COMPACTED,
    "worker-metrics": {"cleanup.policy": "delete", "retention.ms": "600000", "segment.ms": "60000"},
    # Bookings live for minutes, so segments are closed, and with it compacted, ten times as often.
    "router-loads": {
        **COMPACTED,
        "cleanup.policy": "compact,delete",
        "message.timestamp.type": "LogAppendTime",
        "min.compaction.lag.ms": "0",
        "segment.ms": "60000",
        "retention.ms": str(2 * 600 * 1000),
        "max.message.bytes": str((8 << 20) + 65536),
    },
    "kv-control": {"cleanup.policy": "delete", "retention.ms": "600000", "segment.ms": "60000"},
    "kv-dead-letters": {
        "cleanup.policy": "delete",
        "retention.ms": str(7 * 24 * HOUR_MS),
        "max.message.bytes": str((8 << 20) + 65536),
    },
    # A parked chunk of a restatement lies there as it came.
    "kvstreams-prefix-index-changelog": {**COMPACTED, "max.message.bytes": str((3 << 19) + 65536)},
    "kvstreams-cxl-blocks-changelog": COMPACTED,
}


@pytest.mark.parametrize("prefix", ["", "fleet-a.", "x" * 200])
def test_every_topic_of_a_scope(prefix: str) -> None:
    """A scope's topics are those of the design, each behind the prefix, with the scope's partitions and replicas."""
    specs = topics(Settings(topic_prefix=prefix, partitions=5, replication=3)).all()
    assert {spec.name: dict(spec.config) for spec in specs} == {prefix + name: own for name, own in WANTED.items()}
    assert {(spec.partitions, spec.replication) for spec in specs} == {(5, 3)}
    assert all(len(spec.name) <= 249 for spec in specs)  # Kafka's limit


def test_a_prefix_that_kafka_would_refuse_is_refused_here() -> None:
    """The longest prefix leaves room for the longest name; one character more is no setting."""
    with pytest.raises(SettingsError):
        Settings(topic_prefix="x" * 201)


@pytest.mark.parametrize("prefix", ["", "fleet-a."])
def test_changelogs_are_named_as_faust_names_it(prefix: str) -> None:
    """Faust tables of the same app and names would have these very changelogs."""
    settings = Settings(topic_prefix=prefix)
    app = faust.App(settings.app_id, store="memory://")
    assert topics(settings).index_changelog.name == app.Table(PREFIX_INDEX).changelog_topic_name
    assert topics(settings).cxl_changelog.name == app.Table(CXL_BLOCKS).changelog_topic_name


def test_the_longest_request_fits_a_record_of_its_booking() -> None:
    """A request of as many tokens as are accepted by default, in blocks of one token, fits one record."""
    assert Settings().request_tokens_max * 8 + 4096 <= int(topics(Settings()).router_loads.config["max.message.bytes"])


def test_retention_follows_the_settings() -> None:
    """Events are kept as long as the settings say, bookings twice as long as they may live."""
    named = topics(Settings(retention_ms=120_000, booking_ttl_s=1.5))
    assert named.kv_events.config["retention.ms"] == named.cxl_events.config["retention.ms"] == "120000"
    assert named.router_loads.config["retention.ms"] == "3000"


@pytest.mark.parametrize("spec", topics(Settings()).all(), ids=lambda spec: spec.name)
def test_every_schema_that_is_named_parses(spec: TopicSpec) -> None:
    """Each topic's schema file is there and `avro`, the independent witness, reads it; dead letters have none."""
    if spec.schema is None:
        assert spec.name == "kv-dead-letters"
        return
    text = (schemas_dir() / f"{spec.schema}.avsc").read_text()
    assert isinstance(avro.schema.parse(text), avro.schema.RecordSchema)


def test_every_schema_file_parses() -> None:
    """No schema file is broken, named by a topic or not, and every record says what it is."""
    files = sorted(schemas_dir().glob("*.avsc"))
    assert {spec.schema for spec in topics(Settings()).all()} - {None} <= {file.stem for file in files}
    for file in files:
        avro.schema.parse(file.read_text())
        assert json.loads(file.read_text())["namespace"] == "io.kvstreams"


def test_topics_are_made_as_they_are_described(scope: Settings) -> None:
    """What the broker says of a new topic is what the data says."""
    specs = topics(scope).all()
    states = ensure_topics(scope, specs)
    assert list(states) == [spec.name for spec in specs]
    for spec in specs:
        state = states[spec.name]
        assert (state.partitions, state.replication, state.config) == (spec.partitions, 1, dict(spec.config))
        check_topic(spec, state)
    assert len({state.topic_id for state in states.values()}) == len(specs)


def test_processes_that_start_at_once_make_the_topics_together(scope: Settings) -> None:
    """Any number of processes may create the same topics at the same moment; all find them ready."""
    at_once = 4
    barrier = threading.Barrier(at_once)

    def create(_: int) -> dict[str, str]:
        barrier.wait()
        return {name: state.topic_id for name, state in ensure_topics(scope, topics(scope).all()).items()}

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(create, range(at_once)))
    assert all(each == found[0] for each in found)


def test_what_is_missing_is_added_beside_what_is_there(scope: Settings) -> None:
    """A scope that lacks some topics gets those, and the others stay the same topics."""
    specs = topics(scope).all()
    before = ensure_topics(scope, specs[:2])
    after = ensure_topics(scope, specs)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(specs)


def test_nothing_is_known_of_topics_that_are_not_there(scope: Settings) -> None:
    """Describing creates nothing, though the broker itself would create what is asked for."""
    for _ in range(2):
        assert set(describe_topics(scope, topics(scope).all()).values()) == {None}


@pytest.mark.parametrize("change", [1, -1])
def test_other_partitions_are_refused(change: int, scope: Settings) -> None:
    """More partitions or fewer than the scope has are refused, with both numbers."""
    ensure_topics(scope, topics(scope).all())
    other = replace(scope, partitions=scope.partitions + change)
    refusal = rf"has {scope.partitions} partitions, but the settings have {other.partitions}"
    with pytest.raises(TopicMismatch, match=refusal):
        ensure_topics(other, topics(other).all())


def test_a_topic_that_somebody_made_with_defaults_is_refused(scope: Settings) -> None:
    """A topic that the broker created by itself has settings that would break us, and is refused before it does."""
    name = topics(scope).index_changelog.name
    client = admin(scope)
    client.create_topics([NewTopic(name, scope.partitions, 1)])[name].result(30)
    with pytest.raises(TopicMismatch, match=r"cleanup\.policy is delete, not compact"):
        ensure_topics(scope, topics(scope).all())


def test_a_topic_that_cannot_be_created_names_itself(scope: Settings) -> None:
    """The broker's refusal to create is told with the topic's name."""
    other = replace(scope, replication=2)
    with pytest.raises(KvStreamsError, match=rf"topic {topics(other).kv_events.name} cannot be created"):
        ensure_topics(other, topics(other).all())


def test_the_first_offset_behind_a_gap(scope: Settings) -> None:
    """The first record at or behind an offset is found where transaction markers and deleted records leave none."""
    spec = topics(scope).dead_letters
    ensure_topics(scope, [spec])
    assert first_offset(scope, spec.name, 0, 0) == FirstOffset(low=0, first=None)
    kafka = producer(scope, **{"transactional.id": scope.app_id})
    kafka.init_transactions(30.0)
    for values in ((b"0", b"1"), (b"3",)):  # markers take offsets 2 and 4
        kafka.begin_transaction()
        for value in values:
            kafka.produce(spec.name, value=value, partition=0)
        kafka.commit_transaction(30.0)
    found = [first_offset(scope, spec.name, 0, wanted).first for wanted in range(7)]
    assert found == [0, 1, 3, 3, None, None, None]
    beyond = TopicPartition(spec.name, 0, 1)
    client = admin(scope)
    client.delete_records([beyond])[beyond].result(30)
    assert first_offset(scope, spec.name, 0, 0) == FirstOffset(low=1, first=1)

"""Creating, describing and checking topics on a real Kafka."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from streams.errors import KvStreamsError, SettingsError, TopicMismatch
from streams.kafka import clients
from streams.kafka.clients import (
    admin,
    check_topic,
    delete_topics,
    describe_topics,
    ensure_topics,
    missing_topics,
    producer,
)
from streams.kafka.log_offsets import FirstOffset, first_offset
from streams.kafka.topic_watch import TopicReading, TopicWatch
from streams.process.waiting import wait_for
from streams.settings import Settings, TopicProfile
from streams.topics import MESSAGE_BYTES_MAX, topics

PATIENCE_S = 20.0


def test_topics_are_created_as_specified(scope: Settings) -> None:
    """The broker reports a new topic with the partitions, replicas and settings of its specification."""
    specs = topics(scope).all()
    states = ensure_topics(scope, specs)
    assert list(states) == [spec.name for spec in specs]
    for spec in specs:
        state = states[spec.name]
        assert (state.partitions, state.replication, state.config) == (spec.partitions, 1, dict(spec.config))
        check_topic(spec, state)
    assert len({state.topic_id for state in states.values()}) == len(specs)


@pytest.mark.parametrize("profile", TopicProfile)
def test_topics_of_every_profile_are_created_and_found_as_specified(scope: Settings, profile: TopicProfile) -> None:
    """Kafka knows each setting that is left, and the check of every process finds it."""
    settings = replace(scope, topic_profile=profile)
    specs = [replace(spec, replication=1) for spec in topics(settings).all()]  # this Kafka has one broker
    ensure_topics(settings, specs)
    assert missing_topics(settings, topics(settings).all()) == []


def test_a_topic_may_take_larger_records_than_wanted(scope: Settings) -> None:
    """Topics of an earlier version, whose limit was higher, stay usable; a lower limit is refused."""
    spec = topics(scope).router_loads
    for bytes_max, fits in ((MESSAGE_BYTES_MAX + 65_536, True), (MESSAGE_BYTES_MAX - 1, False)):
        name = f"{spec.name}-{bytes_max}"
        made = replace(spec, name=name, config={**spec.config, "max.message.bytes": str(bytes_max)})
        ensure_topics(scope, [made])
        if fits:
            ensure_topics(scope, [replace(spec, name=name)])
        else:
            with pytest.raises(TopicMismatch, match=r"max\.message\.bytes"):
                ensure_topics(scope, [replace(spec, name=name)])


def test_processes_that_start_at_the_same_time_can_all_create_the_topics(scope: Settings) -> None:
    """When several processes create the same topics at once, all of them succeed and see the same topics."""
    at_once = 4
    barrier = threading.Barrier(at_once)

    def create(_: int) -> dict[str, str]:
        barrier.wait()
        return {name: state.topic_id for name, state in ensure_topics(scope, topics(scope).all()).items()}

    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(create, range(at_once)))
    assert all(each == found[0] for each in found)


def test_missing_topics_are_created_and_existing_ones_are_kept(scope: Settings) -> None:
    """A scope that has some of its topics gets the missing ones; the others keep their topic ids."""
    specs = topics(scope).all()
    before = ensure_topics(scope, specs[:2])
    after = ensure_topics(scope, specs)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(specs)


def test_describing_topics_does_not_create_them(scope: Settings) -> None:
    """Missing topics are described as None, although the broker would auto-create a topic that a client asks for."""
    for _ in range(2):
        assert set(describe_topics(scope, topics(scope).all()).values()) == {None}


@pytest.mark.parametrize("change", [1, -1])
def test_another_number_of_partitions_is_refused(change: int, scope: Settings) -> None:
    """Settings with more or fewer partitions than the topics have are refused, and the error has both numbers."""
    ensure_topics(scope, topics(scope).all())
    other = replace(scope, partitions=scope.partitions + change)
    refusal = rf"has {scope.partitions} partitions, but the settings have {other.partitions}"
    with pytest.raises(TopicMismatch, match=refusal):
        ensure_topics(other, topics(other).all())


def test_a_topic_with_default_settings_is_refused(scope: Settings) -> None:
    """A changelog that the broker created by itself is not compacted, so it is refused."""
    name = topics(scope).index_changelog.name
    client = admin(scope)
    client.create_topics([NewTopic(name, scope.partitions, 1)])[name].result(30)
    with pytest.raises(TopicMismatch, match=r"cleanup\.policy is delete, not compact"):
        ensure_topics(scope, topics(scope).all())


def test_the_error_names_the_topic_that_cannot_be_created(scope: Settings) -> None:
    """When the broker refuses to create a topic, the error has the topic's name."""
    other = replace(scope, replication=2)
    with pytest.raises(KvStreamsError, match=rf"topic {topics(other).kv_events.name} cannot be created"):
        ensure_topics(other, topics(other).all())


def test_the_first_record_at_or_after_an_offset(scope: Settings) -> None:
    """`first_offset` skips offsets without a record: transaction markers and deleted records."""
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


def test_a_deleted_topic_that_the_broker_still_lists_is_waited_for(
    scope: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a process that creates it again at once would take it for an existing one, and there would be none."""
    spec = topics(scope).workers
    old = ensure_topics(scope, [spec])[spec.name].topic_id
    existing = clients._existing
    before = existing(admin(scope), [spec.name])
    late = [before] * 3

    def listed(client: AdminClient, names: list[str]) -> dict[str, Any]:
        return late.pop() if late else existing(client, names)

    monkeypatch.setattr(clients, "_existing", listed)
    delete_topics(scope, [spec])
    assert ensure_topics(scope, [spec])[spec.name].topic_id != old


def test_a_watch_reads_some_topics_each_time_and_notices_changes_of_all(scope: Settings) -> None:
    """Ends and ids of the sources are in every reading; that another topic was deleted or recreated shows soon."""
    specs = topics(scope)
    ids = {name: state.topic_id for name, state in ensure_topics(scope, specs.all()).items()}
    readings: list[TopicReading] = []
    watch = TopicWatch(scope, specs.all(), (specs.kv_events,), readings.append, (specs.index_changelog,))
    client, last = admin(scope), specs.router_loads.name
    kafka = producer(scope)
    watch.start()
    try:
        wait_for(lambda: bool(readings) and readings[-1].ids == ids, PATIENCE_S, "the ids of all topics")
        kafka.produce(specs.kv_events.name, b"x", partition=0)
        kafka.flush()
        wait_for(lambda: readings[-1].ends.get((specs.kv_events.name, 0)) == 1, PATIENCE_S, "the end of a source")
        assert {name for name, _ in readings[-1].ends} == {specs.kv_events.name}
        client.delete_topics([last])[last].result(PATIENCE_S)
        wait_for(lambda: readings[-1].missing == (last,), PATIENCE_S, "a topic to be missing")
        wait_for(lambda: readings[-1].ids.keys() == ids.keys() - {last}, PATIENCE_S, "its id to be unknown")
        changed = ensure_topics(scope, specs.all())[last].topic_id
        wait_for(lambda: readings[-1].ids.get(last) == changed != ids[last], PATIENCE_S, "the id of a recreated topic")
        assert readings[-1].missing == ()
    finally:
        watch.stop()
        kafka.close()


def test_properties_of_clients_are_passed_on(scope: Settings) -> None:
    """They replace ours, in clients of every kind; one that librdkafka does not have is an error with its reason."""
    ensure_topics(scope, topics(scope).all())
    settings = replace(scope, kafka_properties={"linger.ms": "1", "fetch.wait.max.ms": "7", "client.id": "mine"})
    kafka, consumer = producer(settings), clients.reader(settings)
    assert topics(scope).workers.name in admin(settings).list_topics(timeout=PATIENCE_S).topics
    kafka.produce(topics(scope).workers.name, b"v", b"k", 0)
    assert kafka.flush(PATIENCE_S) == 0
    clients.assign(consumer, [TopicPartition(topics(scope).workers.name, 0, 0)])
    assert [message.value() for message in consumer.consume(1, PATIENCE_S)] == [b"v"]
    consumer.close()
    wrong = replace(scope, kafka_properties={"no.such": "x"})
    for make in (producer, clients.reader, admin):
        with pytest.raises(SettingsError, match=r'kafka_properties cannot be used: .*"no\.such"'):
            make(wrong)

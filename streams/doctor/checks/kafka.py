"""Kafka and the topics of the scope (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from streams.doctor.findings import Finding, Group, listed
from streams.doctor.observations import Observations
from streams.errors import KafkaRefused, TopicMismatch
from streams.kafka.clients import TOPICS_REMEDY, check_topic


def check_kafka(seen: Observations) -> Iterator[Finding]:
    """Kafka answers, accepts these credentials, and allows what the doctor reads."""
    settings = seen.settings
    if seen.kafka is None:
        return
    subject = f"Kafka at {settings.kafka}"
    error = seen.kafka.error
    if error is not None:
        code = "kafka_refuses" if isinstance(error, KafkaRefused) else "kafka_unreachable"
        remedy = error.remedy or "Check the brokers and their logs"
        yield Finding(Group.KAFKA, code, subject, error.message, f"{remedy}. Nothing else of Kafka was checked")
    topics_seen = seen.kafka.topics
    if topics_seen is None:
        return
    for name, reason in topics_seen.refused.items():
        yield Finding(
            Group.KAFKA,
            "not_authorized",
            name,
            f"these credentials may not read it: {reason}",
            "`kvstreams topics acls doctor --principal User:NAME` prints the ACLs that the doctor needs",
        )
    if topics_seen.without_leader:
        yield Finding(
            Group.KAFKA,
            "no_leader",
            listed(topics_seen.without_leader),
            "these partitions have no leader, so nothing can be read from them or written to them",
            "Start the brokers that have their replicas",
        )
    if topics_seen.out_of_sync:
        yield Finding(
            Group.KAFKA,
            "replicas_out_of_sync",
            listed(topics_seen.out_of_sync),
            "some replicas of these partitions are not in sync: a broker is down or slow",
            "Check the brokers. If another one fails, these partitions may stop or lose records",
        )


def check_topics(seen: Observations) -> Iterator[Finding]:
    """Every topic exists and has the partitions, replicas and settings that this version needs."""
    settings = seen.settings
    topics_seen = None if seen.kafka is None else seen.kafka.topics
    if topics_seen is None:
        return
    missing = [name for name, state in topics_seen.states.items() if state is None]
    if missing:
        others = f" Other scopes on this Kafka: {listed(list(map(repr, topics_seen.other_prefixes)))}." * bool(
            topics_seen.other_prefixes
        )
        yield Finding(
            Group.TOPICS,
            "topic_missing",
            f"scope {settings.topic_prefix!r}",
            f"{len(missing)} of {len(topics_seen.specs)} topics are missing: {listed(missing)}.{others}",
            TOPICS_REMEDY,
        )
    for spec in topics_seen.specs:
        state = topics_seen.states.get(spec.name)
        if state is None:
            continue
        try:
            check_topic(spec, state)
        except TopicMismatch as exc:
            code = "wrong_partitions" if state.partitions != spec.partitions else "wrong_topic_settings"
            yield Finding(Group.TOPICS, code, f"topic {spec.name}", exc.message, exc.remedy)
        if state.replication < spec.replication:
            yield Finding(
                Group.TOPICS,
                "too_few_replicas",
                f"topic {spec.name}",
                f"it has {state.replication} replicas, but the settings have {spec.replication}",
                "Add replicas with kafka-reassign-partitions, or correct `replication`",
            )


def check_schemas_read(seen: Observations) -> Iterator[Finding]:
    """Every record that was read has a schema that this version knows."""
    logs = None if seen.kafka is None else seen.kafka.logs
    for topic, (number, reason) in sorted(({} if logs is None else logs.bad).items()):
        yield Finding(
            Group.SCHEMAS,
            "unreadable_records",
            f"topic {topic}",
            f"{number} of the records that the doctor read cannot be read by this version ({reason})",
            "A newer version of kvstreams or another application writes there. Upgrade routers and workers before "
            "bridges and publishers, and let nothing else write to the topics of the scope",
        )

"""Clients of Kafka, each configured in one place, and the creation of topics.

What lives here: admin calls, producers, consumers, and the reasons for their configuration. What must not: the content
of records.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.partitioner import murmur2
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]

from streams.errors import BadRecord, KafkaRefused, KafkaUnreachable, KvStreamsError, SettingsError, TopicMismatch
from streams.kafka.outage_log import CLIENT_LOGGER, UNREACHED, Ask, watch_of
from streams.process.waiting import wait_for
from streams.security.kafka import librdkafka_config
from streams.settings import ScopeSettings, TopicSettings
from streams.topics import MESSAGE_BYTES_MAX, TopicSpec

log = logging.getLogger(__name__)

#: A broker answers requests about its topics within milliseconds. If it has not answered after this time, there is
#: probably none at the address, and a user who mistyped the address should see the error soon.
ANSWER_TIMEOUT_S = 8.0

#: Creating topics takes a busy broker seconds, since each partition is a folder with files of its own.
CREATE_TIMEOUT_S = 20.0

#: A client replaces its connections to bootstrap addresses by those to the brokers that answer there. A request that is
#: on its way then fails with _DESTROY_BROKER (librdkafka 2.16), and is sent again, at most so often.
BOOTSTRAPS_REPLACED_MAX = 5

#: What an operator does about missing topics. Only these two create any: with a mistyped prefix, every other process
#: would create a scope to which nothing else is ever written.
TOPICS_REMEDY = (
    "Check topic_prefix. `kvstreams topics create` with the same settings creates the topics, and so does a worker "
    "that starts"
)

#: Interval at which missing topics are checked for (each check is one call to the broker), and logged again.
TOPICS_POLL_S = 1.0
MISSING_LOG_S = 60.0

#: A client's call ends at its own timeout, with the reason. We wait for its future a little longer, to receive that
#: reason.
_FUTURE_SLACK_S = 5.0

#: A reader that does not learn its topics' leaders within this time starts without them.
LEADERS_TIMEOUT_S = 2.0

#: Workers and keys whose partition is cached: the hash is computed in Python, and every answer needs it for every rank.
PARTITIONS_KEPT_MAX = 65_536

#: How long the watch of outage_log waits for an answer. A broker that is up answers within milliseconds.
ASK_TIMEOUT_S = 2.0

#: Otherwise producers and admin clients cause a broker with auto.create.topics.enable to create a topic that they name,
#: with the broker's own settings (measured; consumers do not).
_CREATES_NO_TOPIC = {"allow.auto.create.topics": False}

#: Otherwise an admin client that asks a dead broker for offsets takes a core or more until its call times out: its main
#: thread demands a connection, is told of each step of the attempt, and demands it again (librdkafka 2.16, measured).
_CONNECTS_TO_ALL_BROKERS = {"enable.sparse.connections": False}

#: Beyond so many unacknowledged records of a partition, an idempotent client sends no others. It keeps them, and when
#: one has waited for linger.ms, it polls for the acknowledgement without a pause, which takes up to a core. So they had
#: better wait elsewhere (librdkafka 2.16, measured while one of three brokers was paused or slow).
IN_FLIGHT_FREELY = 5

#: The hash of Faust and Java. With librdkafka's own default, one worker's records would be in two partitions.
PARTITIONER = "murmur2_random"


@dataclass(frozen=True, slots=True)
class Record:
    """One record as a reader returns it. timestamp_ms: append time."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as the broker has it. config: only the entries that our TopicSpec contains."""

    name: str
    topic_id: str
    partitions: int
    replication: int
    config: dict[str, str]


def _common(settings: ScopeSettings) -> dict[str, Any]:
    """What every client's configuration has in common: the brokers, and how the client authenticates.

    Raises SettingsError for credentials that cannot be used.
    """
    return {"bootstrap.servers": settings.kafka, "client.id": client_id(settings), **librdkafka_config(settings)}


def client_id(settings: TopicSettings) -> str:
    """How the clients of this process are named in logs and metrics of brokers."""
    return f"{settings.app_id}-{os.uname().nodename}-{os.getpid()}"


_Client = TypeVar("_Client")


def _make(kind: Callable[[dict[str, Any]], _Client], settings: ScopeSettings, config: dict[str, Any]) -> _Client:
    """Make a client. Properties of the settings replace ours; raises SettingsError for one that librdkafka refuses."""
    try:
        return kind({**config, **settings.kafka_properties})
    except KafkaException as exc:
        if settings.kafka_properties:
            raise SettingsError(f"kafka_properties cannot be used: {exc.args[0].str()}") from exc
        raise


def _logs(settings: ScopeSettings) -> dict[str, Any]:
    """What producers and consumers have in common: their errors start the watch, and Python logs their lines."""
    watch = watch_of(settings.kafka, lambda: _asks(settings))
    # librdkafka hands its lines over when the client is polled.
    return {"error_cb": watch.on_error, "logger": CLIENT_LOGGER, "log_level": 3}


def _asks(settings: ScopeSettings) -> Ask:
    """Return a function that asks Kafka whether it is there, with a client of its own."""
    reasons: list[KafkaError] = []
    # After the default of up to 10 s between attempts, the end of an outage would be noticed late.
    client = admin(settings, reasons.append, **{"reconnect.backoff.max.ms": 500})

    def ask() -> str | None:
        reasons.clear()
        try:
            client.list_topics(timeout=ASK_TIMEOUT_S)
        except KafkaException as exc:
            client.poll(0)  # calls back with the reasons that the client has collected
            if exc.args[0].code() in UNREACHED:
                return _most_telling([*reasons, exc.args[0]]).str()
        return None

    return ask


def _most_telling(errors: Sequence[KafkaError]) -> KafkaError:
    """The first error with a cause; that all brokers are down follows from the others, and a timeout names none."""
    vague = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT)
    return next((error for error in errors if error.code() not in vague), errors[0])


def producer(settings: ScopeSettings, **overrides: Any) -> Producer:
    """An idempotent producer with acks=all, which partitions keys in the same way as Faust and Java."""
    return producer_of_kind(Producer, settings, overrides)


def producer_of_kind(
    kind: Callable[[dict[str, Any]], Producer], settings: ScopeSettings, overrides: Mapping[str, Any]
) -> Producer:
    """Such a producer. kind: makes it from its configuration."""
    return _make(
        kind,
        settings,
        {
            **_common(settings),
            "enable.idempotence": True,
            "acks": "all",
            **_CREATES_NO_TOPIC,
            "partitioner": PARTITIONER,
            "linger.ms": 2,
            # Reconnect to a restarted broker after 1.5 s at most (1 s and jitter), not after the default 10 s: routers
            # wait for records that an outage held back.
            "reconnect.backoff.max.ms": 1000,
            # The client refuses larger records before the broker sees them; its own default is 1 MB.
            "message.max.bytes": MESSAGE_BYTES_MAX,
            **_logs(settings),
            **overrides,
        },
    )


def reader(settings: ScopeSettings, **overrides: Any) -> Consumer:
    """A consumer of assigned partitions, without a group, that reads committed records only.

    auto.offset.reset is `error`: otherwise a saved offset beyond the end of a recreated topic would be taken for that
    topic's end.
    """
    return _make(
        Consumer,
        settings,
        {
            **_common(settings),
            "group.id": f"{settings.app_id}-reader",  # librdkafka requires one even if nothing is committed
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 50,
            # Reconnect to a restarted broker after 1 s at most, not after the default 10 s.
            "reconnect.backoff.max.ms": 1000,
            **_logs(settings),
            **overrides,
        },
    )


def assign(consumer: Consumer, where: Sequence[TopicPartition]) -> None:
    """Read these partitions, each from its own offset.

    After an assignment, the client takes 0.5 s to look up the leaders (measured). If it already has the topics'
    metadata, the first record arrives within 20 ms.
    """
    try:
        for topic in sorted({partition.topic for partition in where}):
            consumer.list_topics(topic, LEADERS_TIMEOUT_S)
    except KafkaException:
        pass  # no broker answers; the client keeps trying by itself
    consumer.assign(list(where))


def fetched_in_intervals(interval_s: float) -> dict[str, Any]:
    """Configuration of a reader that fetches once in this time, and not once for each record that is appended.

    A fetch that waits for more bytes than will come ends after its longest wait, with what has been appended meanwhile.
    With the default of one byte, the broker ends and begins a fetch for each batch of each partition.
    """
    return {"fetch.min.bytes": 1024 * 1024, "fetch.wait.max.ms": max(1, round(interval_s * 1000))}


def consume(consumer: Consumer, n_messages: int, timeout_s: float, collect_s: float = 0.0) -> list[Message]:
    """At most n_messages messages that have arrived; waits only while there is none.

    The client's own `consume` waits its whole timeout unless n_messages arrive, which would delay every record of a
    quiet topic. collect_s: after the first message, wait for others for this long.
    """
    first = consumer.poll(timeout_s)
    if first is None:
        return []
    if collect_s:
        time.sleep(collect_s)
    return [first, *consumer.consume(n_messages - 1, 0)]


def worker_key(worker_id: int) -> bytes:
    """Key of a worker's records, the same in every topic."""
    return str(worker_id).encode()


@functools.lru_cache(maxsize=PARTITIONS_KEPT_MAX)
def partition_of(worker_id: int, n_partitions: int) -> int:
    """Partition of a worker's records: murmur2 of its key, as in Faust, Java and our producers."""
    return partition_of_key(worker_key(worker_id), n_partitions)


@functools.lru_cache(maxsize=PARTITIONS_KEPT_MAX)
def partition_of_key(key: bytes, n_partitions: int) -> int:
    """Partition that Java's default partitioner chooses for a key."""
    digest: int = murmur2(key)
    return (digest & 0x7FFFFFFF) % n_partitions


def dead_letter_headers(
    origin: str, exc: BadRecord, size: int, partition: int | None = None, offset: int | None = None
) -> list[tuple[str, str | bytes | None]]:
    """Headers that state where a dead letter came from, and the reason. size: bytes received."""
    values = {
        "topic": origin,
        "partition": partition,
        "offset": offset,
        "reason": exc.reason,
        "message": str(exc),
        "bytes": size,
    }
    return [(f"kvstreams.{name}", str(value).encode()) for name, value in values.items() if value is not None]


def as_record(message: Message) -> Record:
    """Convert a message without an error; a record without a key gets b""."""
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None and partition is not None and offset is not None  # only an error may lack them
    return Record(topic, partition, offset, message.timestamp()[1], message.key() or b"", message.value())


def admin(
    settings: ScopeSettings, on_error: Callable[[KafkaError], None] | None = None, **overrides: Any
) -> AdminClient:
    """An admin client that logs nothing. Its calls raise; on_error receives the reasons why no broker is reached."""
    config: dict[str, Any] = {
        **_common(settings),
        **_CREATES_NO_TOPIC,
        **_CONNECTS_TO_ALL_BROKERS,
        "log_level": 0,
        **overrides,
    }
    if on_error is not None:
        config["error_cb"] = on_error
    return _make(AdminClient, settings, config)


def describe_topics(settings: ScopeSettings, specs: Iterable[TopicSpec]) -> dict[str, TopicState | None]:
    """Each topic as the broker has it, or None if it has none. Raises KvStreamsError if no broker answers."""
    specs = list(specs)
    states: dict[str, TopicState | None] = {}
    reasons: list[KafkaError] = []
    client = admin(settings, reasons.append)
    try:
        existing, configs = _described(client, [spec.name for spec in specs])
    except KafkaException as exc:
        client.poll(0)  # calls on_error with the reasons that the client has collected
        raise _refused(settings, exc.args[0], reasons) from exc
    for spec in specs:
        topic = existing.get(spec.name)
        if topic is None or spec.name not in configs:
            states[spec.name] = None
            continue
        states[spec.name] = TopicState(
            name=spec.name,
            topic_id=str(topic.topic_id),
            partitions=len(topic.partitions),
            replication=len(topic.partitions[0].replicas),
            config={key: configs[spec.name][key].value for key in spec.config if key in configs[spec.name]},
        )
    return states


def _described(client: AdminClient, names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Descriptions and settings of those of these topics that the broker has. Raises KafkaException."""
    for _ in range(BOOTSTRAPS_REPLACED_MAX):
        try:
            existing = _existing(client, names)
            resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in existing]
            asked = client.describe_configs(resources, request_timeout=ANSWER_TIMEOUT_S) if resources else {}
            # The answer may come from another broker, which does not have the topic yet, or no longer.
            return existing, _known({resource.name: future for resource, future in asked.items()})
        except KafkaException as exc:
            replaced = exc
            if exc.args[0].code() != KafkaError._DESTROY_BROKER:
                raise
    raise replaced


def _existing(client: AdminClient, names: list[str]) -> dict[str, Any]:
    """Descriptions of those of these topics that the broker lists. Raises KafkaException if it does not say."""
    return _known(client.describe_topics(TopicCollection(names), request_timeout=ANSWER_TIMEOUT_S))


def _known(asked: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """The answers by topic, without the topics that the broker does not have. Raises KafkaException."""
    known = {}
    for name, future in asked.items():
        try:
            known[name] = future.result(ANSWER_TIMEOUT_S + _FUTURE_SLACK_S)
        except KafkaException as exc:
            if exc.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                raise
    return known


def ensure_topics(settings: ScopeSettings, specs: Iterable[TopicSpec]) -> dict[str, TopicState]:
    """Create the topics that are missing and check the others; an existing topic is never altered.

    Raises TopicMismatch, with the remedy, for other partitions or settings, and KvStreamsError if no broker answers.
    """
    specs = list(specs)
    states = describe_topics(settings, specs)
    missing = [spec for spec in specs if states[spec.name] is None]
    if missing:
        client = admin(settings)
        created = client.create_topics(
            [NewTopic(spec.name, spec.partitions, spec.replication, config=dict(spec.config)) for spec in missing],
            operation_timeout=CREATE_TIMEOUT_S,
            request_timeout=CREATE_TIMEOUT_S,
        )
        for name, future in created.items():
            try:
                future.result(CREATE_TIMEOUT_S + _FUTURE_SLACK_S)
            except KafkaException as exc:
                reason = exc.args[0]
                if reason.code() == KafkaError.TOPIC_ALREADY_EXISTS:  # another process was faster
                    continue
                remedy = ""
                if reason.code() == KafkaError.INVALID_REPLICATION_FACTOR:
                    remedy = "Set `replication` to at most the number of brokers"
                raise KvStreamsError(f"topic {name} cannot be created: {reason.str()}", remedy=remedy) from exc
        states = _await_created(settings, specs)
    ready = {name: state for name, state in states.items() if state is not None}
    for spec in specs:
        check_topic(spec, ready[spec.name])
    return ready


def missing_topics(settings: ScopeSettings, specs: Iterable[TopicSpec]) -> list[str]:
    """Names of the topics that the broker does not have; the others are checked, and none is created.

    Raises the same errors as `ensure_topics`.
    """
    specs = list(specs)
    states = describe_topics(settings, specs)
    for spec in specs:
        state = states[spec.name]
        if state is not None:
            check_topic(spec, state)
    return [name for name, state in states.items() if state is None]


def check_topic(spec: TopicSpec, state: TopicState) -> None:
    """Raise TopicMismatch if a topic differs from its spec."""
    if state.partitions != spec.partitions:
        raise TopicMismatch(
            f"topic {spec.name} has {state.partitions} partitions, but the settings have {spec.partitions}",
            remedy="The number cannot be changed within a scope: set `partitions` to the topic's number, or move to "
            "another topic_prefix (docs/replay.md)",
        )
    other = {
        key: (state.config.get(key), value)
        for key, value in spec.config.items()
        if not _suffices(spec, key, state.config.get(key))
    }
    if other:
        differences = "; ".join(f"{key} is {has}, not {wants}" for key, (has, wants) in sorted(other.items()))
        changes = ",".join(f"{key}=[{wants}]" for key, (_, wants) in sorted(other.items()))
        remedy = f"kafka-configs --alter --entity-type topics --entity-name {spec.name} --add-config '{changes}', "
        if other.keys() <= spec.history:
            remedy = "`kvstreams topics window` with history_window_s as the duration keeps the history, "
        raise TopicMismatch(
            f"topic {spec.name} has other settings: {differences}", remedy=f"{remedy}or take another topic_prefix"
        )


def _suffices(spec: TopicSpec, name: str, has: str | None) -> bool:
    """Whether a topic's setting is as wanted. Larger records and a longer history do no harm; -1 is for ever."""
    wants = spec.config[name]
    if has is not None and (name == "max.message.bytes" or name in spec.history):
        return int(has) >= int(wants) or int(has) == -1
    return has == wants


def topics_missing(missing: Sequence[str]) -> str:
    """What is wrong if a process that creates no topics finds that these are missing; TOPICS_REMEDY is the remedy."""
    return f"{len(missing)} topics of this scope are missing, {missing[0]} among them"


def require_topics(settings: ScopeSettings, specs: Iterable[TopicSpec]) -> None:
    """Raise KvStreamsError, with the remedies, if any of these topics is missing, and what `missing_topics` raises."""
    missing = missing_topics(settings, specs)
    if missing:
        raise KvStreamsError(topics_missing(missing), remedy=TOPICS_REMEDY, topics_missing=missing)


async def wait_for_topics(settings: ScopeSettings, specs: Iterable[TopicSpec], note: Callable[[str], None]) -> None:
    """Wait until none of these topics is missing, and log what the wait is for. note: called with the reason.

    Raises what `missing_topics` raises at its first call. Later, the broker may be unreachable for a while.
    """
    specs = list(specs)
    missing = await asyncio.to_thread(missing_topics, settings, specs)
    logged_s = float("-inf")
    while missing:
        note(topics_missing(missing))
        if time.monotonic() - logged_s >= MISSING_LOG_S:
            log.warning("not ready: %s. %s", topics_missing(missing), TOPICS_REMEDY)
            logged_s = time.monotonic()
        note(f"{topics_missing(missing)}. {TOPICS_REMEDY}")
        await asyncio.sleep(TOPICS_POLL_S)
        try:
            missing = await asyncio.to_thread(missing_topics, settings, specs)
        except TopicMismatch:
            raise
        except KvStreamsError as exc:
            log.debug("cannot check for missing topics, trying again: %s", exc)


def require_topic(settings: ScopeSettings, name: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Raise KvStreamsError if no broker answers, or if the topic does not exist. Needs only a writer's rights."""
    reasons: list[KafkaError] = []
    client = admin(settings, reasons.append)
    try:
        known = client.list_topics(timeout=timeout_s).topics
    except KafkaException as exc:
        client.poll(0)
        raise _refused(settings, exc.args[0], reasons) from exc
    if name not in known:
        raise KvStreamsError(
            f"Kafka at {settings.kafka} has no topic {name}",
            remedy=TOPICS_REMEDY,
        )


def _await_created(settings: ScopeSettings, specs: list[TopicSpec]) -> dict[str, TopicState | None]:
    """Poll until the broker has all created topics; for a moment it may not list them."""
    states: dict[str, TopicState | None] = {}

    def all_there() -> bool:
        states.update(describe_topics(settings, specs))
        return all(state is not None for state in states.values())

    wait_for(all_there, CREATE_TIMEOUT_S, "the created topics to appear on the broker")
    return states


#: Codes with which a connection ends because of credentials or certificates.
_NO_CREDENTIALS = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError.SASL_AUTHENTICATION_FAILED})

#: Codes of operations that no ACL allows.
_NOT_ALLOWED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)

_ACLS_REMEDY = "docs/security.md lists the ACLs that each process needs"


def _is_about_credentials(error: KafkaError) -> bool:
    """Whether a connection ended because of credentials; an alert about a certificate has no code of its own."""
    return error.code() in _NO_CREDENTIALS or "SSL routines" in error.str()


def _refused(settings: ScopeSettings, error: KafkaError, reasons: list[KafkaError]) -> KvStreamsError:
    credentials = next((reason for reason in (*reasons, error) if _is_about_credentials(reason)), None)
    if credentials is not None:
        return KafkaRefused(
            f"Kafka at {settings.kafka} cannot be used with these credentials: {credentials.str()}",
            remedy="Check kafka_security and the settings kafka_sasl_... and kafka_tls_... (docs/security.md)",
        )
    if error.code() in _NOT_ALLOWED:
        return KafkaRefused(f"Kafka at {settings.kafka} refuses: {error.str()}", remedy=_ACLS_REMEDY)
    if error.code() not in UNREACHED:
        return KvStreamsError(f"Kafka at {settings.kafka} refuses: {error.str()}")
    why = _most_telling([*reasons, error])  # the call's own error only has the timeout
    return KafkaUnreachable(
        f"no Kafka answers at {settings.kafka}: {why.str()}",
        remedy="Set --kafka or KVSTREAMS_KAFKA, or start one with `kvstreams kafka up`",
    )


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of the agents' consumer group. assigned: pairs of topic and partition, none during a rebalance."""

    client_id: str
    host: str
    assigned: frozenset[tuple[str, int]]


def group_members(settings: ScopeSettings) -> list[GroupMember] | None:
    """Members of the agents' group as its coordinator has them, or None during a rebalance.

    Raises KvStreamsError if no broker answers.
    """
    # Not `describe_consumer_groups`: if a broker disconnects during that call, librdkafka aborts the process (its open
    # issue 4605), and an owner calls this exactly when something went wrong.
    try:
        groups = admin(settings).list_groups(settings.app_id, ANSWER_TIMEOUT_S)
    except KafkaException as exc:
        raise _refused(settings, exc.args[0], []) from exc
    members: list[GroupMember] = []
    for group in groups:
        if group.error is not None:
            raise _refused(settings, group.error, [])
        if group.state in _BETWEEN_ASSIGNMENTS:
            return None
        members += map(_member, group.members)
    return members


#: States of a group, as DescribeGroups names them, in which its members' assignments are not valid.
_BETWEEN_ASSIGNMENTS = frozenset({"PreparingRebalance", "CompletingRebalance"})


def _member(description: Any) -> GroupMember:  # a class of the client, without types
    assigned: frozenset[tuple[str, int]] = frozenset()
    if description.assignment:  # encoded by the consumer group protocol
        partitions = ConsumerProtocolMemberAssignment.decode(description.assignment).partitions()
        assigned = frozenset((partition.topic, partition.partition) for partition in partitions)
    return GroupMember(description.client_id, description.client_host, assigned)


def delete_topics(settings: ScopeSettings, specs: Iterable[TopicSpec]) -> None:
    """Delete topics; those that do not exist are skipped. Afterwards the broker no longer lists them.

    A broker may list a deleted topic for a moment. `ensure_topics` would take it for an existing one, and would create
    none. Raises KafkaException.
    """
    client, names = admin(settings), [spec.name for spec in specs]
    ids = {name: topic.topic_id for name, topic in _existing(client, names).items()}
    for future in client.delete_topics(names, operation_timeout=CREATE_TIMEOUT_S).values():
        try:
            future.result(CREATE_TIMEOUT_S + _FUTURE_SLACK_S)
        except KafkaException as exc:
            if exc.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                raise

    def gone() -> bool:
        return all(str(topic.topic_id) != str(ids.get(name)) for name, topic in _existing(client, names).items())

    wait_for(gone, CREATE_TIMEOUT_S, "the deleted topics to disappear from the broker")

"""Reads a scope's topics, and watches its logs for a few seconds. It writes nothing.

What lives here: calls of Kafka, and the watch. What must not: what is wrong with what was read (checks).

Silence shows only by waiting: an owner writes a partition record at least every second, and a bridge renews a lease
three times in its length. The watch ends as soon as everything was heard that is expected, so it is short when all is
well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from streams.core.ids import WorkerId
from streams.core.workers import BridgeLease, ServedModel
from streams.doctor.observations import (
    ClockReading,
    FeedSeen,
    KafkaSeen,
    LogsSeen,
    OwnerRecord,
    Registration,
    TopicsSeen,
)
from streams.errors import BadRecord, KafkaRefused, KafkaUnreachable, KvStreamsError
from streams.kafka.clients import (
    ANSWER_TIMEOUT_S,
    TopicState,
    admin,
    as_record,
    assign,
    consume,
    describe_topics,
    group_members,
    reader,
    require_topic,
)
from streams.kafka.log_offsets import list_offsets
from streams.kafka.records import AVOIDANCES, CORDONS, MODELS, PULSES, RENDER_PARITIES, decode_metrics, decode_worker
from streams.kafka.shapes import KeyedRecord, WorkerKey
from streams.lmcache.feeds import decode_feed
from streams.lmcache.pools import parse_feed
from streams.settings import ScopeSettings
from streams.tables.records import PARTITION_KEY, PROGRESS_KEY, RUN_KEY, decode_partition, decode_progress, decode_run
from streams.topics import TopicSpec, topics

#: Records of workers of which nothing is checked but that they can be read.
_OF_WORKERS: tuple[KeyedRecord[Any, WorkerKey], ...] = (CORDONS, AVOIDANCES, RENDER_PARITIES)

#: A broker that is there answers within milliseconds; the doctor says after this time that none answers.
REACH_TIMEOUT_S = 4.0

#: Records before the end of each partition of the changelog that are read: they show who owned it last. Records of
#: dead letters, for their reasons.
TAIL_RECORDS = 200
DEAD_LETTERS_READ_MAX = 1000

#: How old a dead letter may be that is reported. They are kept for 7 days, and an old one may be fixed already.
DEAD_LETTERS_RECENT_MS = 10 * 60 * 1000

#: The watch ends after the longest of what it waits for, and this margin.
WATCH_MARGIN_S = 1.0

#: Records of the registry that are read. A million is more than any fleet has, compacted or not.
RECORDS_MAX = 1_000_000

_NOT_ALLOWED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)

_READ_RECORDS = 1000
_POLL_S = 0.1
_SLACK_S = 5.0


def read_kafka(
    settings: ScopeSettings, watch_s: float | None = None, *, with_logs: bool = True, until_heard: bool = True
) -> KafkaSeen:
    """Read everything of Kafka. watch_s: the longest watch; None for as long as silence needs to show.

    with_logs: whether to read the logs at all. until_heard: whether to wait for owners and bridges.
    """
    specs = topics(settings).all()
    try:
        _reach(settings)
        seen = _read_topics(settings, specs)
    except (KvStreamsError, KafkaException, TimeoutError) as exc:
        return KafkaSeen(error=_error(exc))
    existing = {name: state for name, state in seen.states.items() if state is not None}
    members = None
    try:
        if not with_logs:
            return KafkaSeen(None, seen)
        members = group_members(settings)
        logs = _Watch(settings, existing).run(watch_s, until_heard)
    except (KvStreamsError, KafkaException, TimeoutError) as exc:
        error = _error(exc)
        if isinstance(error, KafkaRefused):
            seen = replace(seen, refused={**seen.refused, "the logs and the group": error.message})
            return KafkaSeen(None, seen)
        return KafkaSeen(error, seen)
    return KafkaSeen(None, seen, None if members is None else tuple(members), logs)


def _error(exc: Exception) -> KvStreamsError:
    if isinstance(exc, KvStreamsError):
        return exc
    reason = exc.args[0].str() if isinstance(exc, KafkaException) else str(exc) or "no answer in time"
    return KafkaUnreachable(f"Kafka does not answer as expected: {reason}", remedy="Check the brokers and their logs")


def _reach(settings: ScopeSettings) -> None:
    """Raise the error of an address at which no broker answers, sooner than other calls notice it."""
    try:
        require_topic(settings, topics(settings).workers.name, REACH_TIMEOUT_S)
    except (KafkaUnreachable, KafkaRefused):
        raise
    except KvStreamsError:
        pass  # the topic is missing, which is a check


# -- topics ------------------------------------------------------------------------------------------------------------


def _read_topics(settings: ScopeSettings, specs: tuple[TopicSpec, ...]) -> TopicsSeen:
    refused: dict[str, str] = {}
    try:
        states = describe_topics(settings, specs)
    except KafkaRefused as exc:
        if not exc.message.startswith(f"Kafka at {settings.kafka} refuses"):
            raise  # the credentials are wrong, not only their rights
        states = {}
        for spec in specs:
            try:
                states |= describe_topics(settings, [spec])
            except KafkaRefused as refusal:
                refused[spec.name] = refusal.message
    client = admin(settings)
    existing = [name for name, state in states.items() if state is not None]
    without_leader, out_of_sync = _partitions(client, existing)
    metadata = client.list_topics(timeout=ANSWER_TIMEOUT_S)
    return TopicsSeen(
        specs,
        states,
        refused,
        without_leader,
        out_of_sync,
        _other_prefixes(settings, metadata.topics),
    )


def _partitions(client: AdminClient, names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Partitions without a leader, and those with replicas that are not in sync."""
    without_leader: list[str] = []
    out_of_sync: list[str] = []
    if names:
        described = client.describe_topics(TopicCollection(names), request_timeout=ANSWER_TIMEOUT_S)
        for name, future in described.items():
            for partition in future.result(ANSWER_TIMEOUT_S + _SLACK_S).partitions:
                if partition.leader is None or partition.leader.id < 0:
                    without_leader.append(f"{name} [{partition.id}]")
                elif len(partition.isr) < len(partition.replicas):
                    out_of_sync.append(f"{name} [{partition.id}]")
    return tuple(sorted(without_leader)), tuple(sorted(out_of_sync))


def _other_prefixes(settings: ScopeSettings, names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of scopes on this Kafka that have the topics of events and of workers, the most similar first."""
    known = set(names)
    plain = topics(replace(settings, topic_prefix=""))
    prefixes = {name.removesuffix(plain.kv_events.name) for name in known if name.endswith(plain.kv_events.name)}
    complete = {prefix for prefix in prefixes if f"{prefix}{plain.workers.name}" in known}
    others = sorted(complete - {settings.topic_prefix})
    return tuple(sorted(others, key=lambda prefix: -SequenceMatcher(None, prefix, settings.topic_prefix).ratio()))


# -- logs --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """What the watch has read so far."""

    owners: dict[int, list[OwnerRecord]] = field(default_factory=dict)
    workers: dict[WorkerId, Registration] = field(default_factory=dict)
    models: dict[str, ServedModel] = field(default_factory=dict)
    pulses: Counter[str] = field(default_factory=Counter)
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)
    dead_letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    clocks: dict[str, ClockReading] = field(default_factory=dict)
    feeds: dict[str, FeedSeen] = field(default_factory=dict)


class _Watch:
    """Reads the tails of the logs, the whole registry, and then what is appended."""

    def __init__(self, settings: ScopeSettings, existing: Mapping[str, TopicState]) -> None:
        self._settings = settings
        self._existing = existing
        self._names = topics(settings)
        self._seen = _Seen()
        self._ends: dict[tuple[str, int], int] = {}
        self._began_s = 0.0

    def run(self, watch_s: float | None, until_heard: bool) -> LogsSeen:
        """Watch until everything that is expected was heard, or for watch_s. Raises KafkaException, KvStreamsError.

        until_heard: whether anything is expected, apart from what is in the logs already.
        """
        starts = self._starts()
        consumer = reader(self._settings)
        try:
            assign(consumer, [TopicPartition(*where, offset) for where, offset in starts.items()])
            self._began_s = time.monotonic()
            unread = {where for where, end in self._ends.items() if starts.get(where, end) < end}
            n_records = 0
            while True:
                for message in consume(consumer, _READ_RECORDS, _POLL_S):
                    where, offset = (message.topic() or "", message.partition() or 0), message.offset()
                    error = message.error()
                    if error is not None and error.code() in _NOT_ALLOWED:
                        raise KafkaRefused(f"{where[0]} cannot be read: {error.str()}")
                    if error is None:
                        self._take(message, live=offset is not None and offset >= self._ends[where])
                        n_records += 1
                    at_end = error is not None and error.code() == KafkaError._PARTITION_EOF
                    if at_end or (offset is not None and offset + 1 >= self._ends.get(where, 0)):
                        unread.discard(where)
                watched_s = time.monotonic() - self._began_s
                limit_s = self._limit_s() if watch_s is None else watch_s
                late = watched_s >= limit_s and (not unread or watched_s >= limit_s + ANSWER_TIMEOUT_S)
                if late or n_records >= RECORDS_MAX or (not unread and (not until_heard or self._all_heard())):
                    return self._result(watched_s)
        finally:
            consumer.close()

    def _starts(self) -> dict[tuple[str, int], int]:
        """The offset from which each partition is read, and note the ends."""
        names, client = self._names, admin(self._settings)
        wanted = (names.workers, names.worker_metrics, names.router_loads, names.dead_letters, names.index_changelog)
        where = [
            (spec.name, partition)
            for spec in wanted
            if spec.name in self._existing
            for partition in range(self._existing[spec.name].partitions)
        ]
        recent_ms = time.time_ns() // 1_000_000 - DEAD_LETTERS_RECENT_MS
        earliest: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        first = list_offsets(client, dict.fromkeys(where, earliest), committed=False, wait_s=ANSWER_TIMEOUT_S)
        self._ends = list_offsets(client, dict.fromkeys(where, latest), committed=False, wait_s=ANSWER_TIMEOUT_S)
        letters = [partition for partition in where if partition[0] == names.dead_letters.name]
        at_recent: OffsetSpec = OffsetSpec.for_timestamp(recent_ms)
        recent = list_offsets(client, dict.fromkeys(letters, at_recent), committed=False, wait_s=ANSWER_TIMEOUT_S)
        starts: dict[tuple[str, int], int] = {}
        for partition in where:
            low, high = first[partition], self._ends[partition]
            if partition[0] == names.workers.name:
                starts[partition] = low
            elif partition[0] == names.index_changelog.name:
                starts[partition] = max(low, high - TAIL_RECORDS)
            elif partition[0] == names.dead_letters.name:
                since = recent[partition] if recent[partition] >= 0 else high  # -1: no record is that recent
                starts[partition] = max(low, since, high - DEAD_LETTERS_READ_MAX)
            else:
                starts[partition] = high
        return starts

    def _limit_s(self) -> float:
        """How long the watch lasts at most: as long as it takes until silence is certain."""
        leases = [
            registration.worker.lease.lease_ms / 1000
            for registration in self._seen.workers.values()
            if registration.worker.lease
        ]
        leases += [seen.feed.lease.lease_ms / 1000 for seen in self._seen.feeds.values() if seen.feed.lease]
        return max(self._settings.stale_after_ms / 1000, *leases, 0.0) + WATCH_MARGIN_S

    def _all_heard(self) -> bool:
        """Whether each owner, lease and bridge was heard from since the watch began."""
        seen = self._seen
        changelog = self._existing.get(self._names.index_changelog.name)
        partitions = range(0 if changelog is None else changelog.partitions)
        if not all(any(record.live for record in seen.owners.get(number, ())) for number in partitions):
            return False
        leased = [registration for registration in seen.workers.values() if registration.worker.lease is not None]
        bridges = {registration.worker.lease.bridge for registration in leased if registration.worker.lease is not None}
        renewals = [registration.renewed_after_s for registration in leased]
        renewals += [each.renewed_after_s for each in seen.feeds.values() if each.feed.lease is not None]
        return None not in renewals and bridges <= seen.pulses.keys()

    def _result(self, watched_s: float) -> LogsSeen:
        seen = self._seen
        return LogsSeen(
            watched_s=watched_s,
            owners={number: tuple(records) for number, records in seen.owners.items()},
            workers=dict(sorted(seen.workers.items())),
            models=seen.models,
            pulses=seen.pulses,
            bad=seen.bad,
            dead_letters=seen.dead_letters,
            clocks=seen.clocks,
            feeds=dict(sorted(seen.feeds.items())),
        )

    def _take(self, message: Message, live: bool) -> None:
        names, topic = self._names, message.topic() or ""
        try:
            if topic == names.workers.name:
                self._take_registration(message, live)
            elif topic == names.worker_metrics.name:
                self._take_metrics(message, live)
            elif topic == names.index_changelog.name:
                self._take_row(message, live)
            elif topic == names.dead_letters.name:
                self._take_dead_letter(message)
            elif live:
                self._note_clock("the broker", as_record(message).timestamp_ms)
        except BadRecord as exc:
            number, first = self._seen.bad.get(topic, (0, f"{exc.reason}: {exc.message}"))
            self._seen.bad[topic] = (number + 1, first)

    def _take_registration(self, message: Message, live: bool) -> None:
        record, seen, schema_ids = as_record(message), self._seen, self._settings.schema_ids
        key = record.key
        if key.startswith(MODELS.keys.prefix):
            name = MODELS.keys.parse(key)
            if record.value is None:
                seen.models.pop(name, None)
            else:
                seen.models.setdefault(name, MODELS.decode_row(key, record.value, schema_ids))
        elif key.isdigit():
            worker_id = WorkerId(int(key))
            if record.value is None:
                seen.workers.pop(worker_id, None)
                return
            worker, before = decode_worker(record.value, schema_ids), seen.workers.get(worker_id)
            renewed_after_s = None if before is None else before.renewed_after_s
            known = None if before is None else before.worker.lease
            seen.workers[worker_id] = Registration(worker, self._renewed(known, worker.lease, renewed_after_s, live))
        elif (feed := parse_feed(key.decode(errors="replace"))) is not None:
            if record.value is None:
                seen.feeds.pop(feed.key, None)
                return
            has, known_feed = decode_feed(record.value, schema_ids), seen.feeds.get(feed.key)
            renewed_after_s = None if known_feed is None else known_feed.renewed_after_s
            known = None if known_feed is None else known_feed.feed.lease
            seen.feeds[feed.key] = FeedSeen(has, self._renewed(known, has.lease, renewed_after_s, live))
        elif record.value is not None:
            for records in _OF_WORKERS:
                if key.startswith(records.keys.prefix):
                    records.decode_row(key, record.value, schema_ids)

    def _renewed(
        self, known: BridgeLease | None, lease: BridgeLease | None, renewed_after_s: float | None, live: bool
    ) -> float | None:
        """When a lease was first renewed while the doctor watches. known: the lease before this record."""
        is_first = live and renewed_after_s is None
        if is_first and lease is not None and lease != known and not lease.is_released:
            return time.monotonic() - self._began_s
        return renewed_after_s

    def _take_metrics(self, message: Message, live: bool) -> None:
        record, schema_ids = as_record(message), self._settings.schema_ids
        if record.key.startswith(PULSES.keys.prefix):
            pulse = PULSES.decode(record.value, schema_ids)
            self._seen.pulses[pulse.bridge] += live
            if live:
                self._note_clock(f"bridge {pulse.bridge}", record.timestamp_ms)
        else:
            decode_metrics(record.value, schema_ids)

    def _take_row(self, message: Message, live: bool) -> None:
        record = as_record(message)
        if record.value is None:
            return
        prefix = record.key[:1]
        if prefix == PARTITION_KEY.prefix:
            row = decode_partition(record.key, record.value)
            self._seen.owners.setdefault(record.partition, []).append(OwnerRecord(row, record.timestamp_ms, live))
            if live:
                self._note_clock(f"worker {row.owner}", row.written_at_ms)
        elif prefix == PROGRESS_KEY.prefix:
            decode_progress(record.key, record.value)
        elif prefix == RUN_KEY.prefix:
            decode_run(record.key, record.value)

    def _take_dead_letter(self, message: Message) -> None:
        pairs: Any = message.headers() or []
        headers = {name: value for name, value in pairs if isinstance(value, bytes)}
        origin, reason = (
            headers.get(f"kvstreams.{name}", b"").decode(errors="replace") or "unknown" for name in ("topic", "reason")
        )
        self._seen.dead_letters[origin, reason] += 1

    def _note_clock(self, subject: str, at_ms: int) -> None:
        """Keep the reading that is nearest to no difference: of a clock that is right, most records only come late."""
        if at_ms <= 0:
            return
        ahead_s = at_ms / 1000 - time.time()
        before = self._seen.clocks.get(subject)
        if before is None or abs(ahead_s) < abs(before.least_s):
            self._seen.clocks[subject] = ClockReading(ahead_s, ahead_s)

"""The window for which topics keep every record, and the earliest moment that can be replayed.

What lives here: setting the window on existing topics, what follows from what the broker has, and cuts within it. What
must not: the settings of new topics (streams.topics), and what a moment is in each topic (cuts).

Compaction keeps the last record of each key. While it leaves the records of the last hour alone, the state of every
moment of that hour is a fold. A topic whose window grows has lost what was compacted before. So its ends at that time
are committed, as offsets of a consumer group that nothing else uses.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
)

from streams.core.engine_metrics import METRICS_TTL_MS_MAX
from streams.errors import InvalidRequest, KvStreamsError, OutsideWindow
from streams.kafka.clients import (
    ANSWER_TIMEOUT_S,
    TOPICS_REMEDY,
    TopicState,
    admin,
    describe_topics,
    reader,
    topics_missing,
)
from streams.kafka.log_offsets import Place
from streams.process.waiting import wait_for
from streams.replay.cuts import Cut, cut_at, log_begins, log_ends, offsets_at, places_of, time_text
from streams.settings import ScopeSettings
from streams.topics import COMPACTION_LAG, RETENTION, TopicSpec, history_group, topics

#: The broker applies a change of a topic's settings within milliseconds.
_APPLY_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Window:
    """How far back topics have every record. window_ms: 0 if they keep no history.

    begins: where the history of a partition begins that has not been kept for that long yet, and when that was.
    """

    window_ms: int
    begins: Mapping[Place, tuple[int, int]]

    def earliest_ms(self, now_ms: int) -> int:
        """The earliest moment that can be replayed."""
        return max((now_ms - self.window_ms, *(since_ms for _, since_ms in self.begins.values())))


def window_of(settings: ScopeSettings) -> Window:
    """Return the window of a scope's topics, as the broker has it. Raises KvStreamsError."""
    specs = topics(settings).with_history()
    states = _states(settings, specs)
    window_ms = min((_kept_ms(settings, spec, states[spec.name]) for spec in specs), default=0)
    return Window(window_ms, _begins(settings, places_of(specs)))


def moment_in_window(settings: ScopeSettings, specs: Iterable[TopicSpec], moment_ms: int, now_ms: int) -> Cut:
    """Return where topics were at a moment. Raises OutsideWindow if they do not have everything since then."""
    if moment_ms > now_ms:
        raise OutsideWindow(f"{time_text(moment_ms)} is in the future", remedy=f"It is {time_text(now_ms)} now")
    window = window_of(settings)
    if moment_ms < window.earliest_ms(now_ms):
        raise _outside(settings, window, now_ms)
    cut = cut_at(settings, specs, moment_ms)
    # By offsets as well, since the clocks of writers may differ.
    if any(cut.ends[place] < begin for place, (begin, _) in window.begins.items() if place in cut.ends):
        raise _outside(settings, window, now_ms)
    return cut


def offsets_in_window(
    settings: ScopeSettings, specs: Iterable[TopicSpec], offsets: Mapping[Place, int], moment_ms: int, now_ms: int
) -> Cut:
    """Return a cut at these offsets; partitions that they do not name are cut at their ends.

    moment_ms: 0 if it is not known. Raises OutsideWindow if topics do not have everything since then, and
    InvalidRequest for offsets that do not exist.
    """
    places = places_of(specs)
    begins, ends = log_begins(settings, places), log_ends(settings, places)
    for place, offset in offsets.items():
        if not 0 <= offset <= ends.get(place, -1):
            where = f"{place[0]} [{place[1]}]"
            raise InvalidRequest(
                f"{where} ends at {ends[place]}, before offset {offset}" if place in ends else f"nothing reads {where}",
                remedy="Take a file that `kvstreams replay` made of this scope with --json or --out",
            )
    window = window_of(settings)
    kept = {spec.name for spec in topics(settings).with_history()}
    first = offsets_at(settings, {place: now_ms - window.window_ms for place in places if place[0] in kept})
    for place, offset in offsets.items():
        if offset < max(first.get(place, 0), window.begins.get(place, (0, 0))[0]):
            raise _outside(settings, window, now_ms)
    return Cut(moment_ms, begins, {**ends, **offsets})


def _outside(settings: ScopeSettings, window: Window, now_ms: int) -> OutsideWindow:
    earliest = time_text(window.earliest_ms(now_ms))
    return OutsideWindow(
        f"the topics of {settings.app_id} keep no history of that: the earliest moment is {earliest}",
        remedy="`kvstreams topics window DURATION` lets them keep more from then on",
        earliest=earliest,
    )


def set_window(settings: ScopeSettings, seconds: float) -> list[TopicState]:
    """Let existing topics keep every record for so long; return them as they are then. Raises KvStreamsError."""
    specs = topics(replace(settings, history_window_s=seconds)).with_history()
    if not specs:
        return []
    before = _states(settings, specs)
    resources = [
        ConfigResource(
            ConfigResource.Type.TOPIC,
            spec.name,
            incremental_configs=[
                ConfigEntry(
                    key,
                    spec.config[key],
                    ConfigSource.DYNAMIC_TOPIC_CONFIG,
                    incremental_operation=AlterConfigOpType.SET,
                )
                for key in sorted(spec.history)
            ],
        )
        for spec in specs
    ]
    client = admin(settings)  # kept until it has answered
    try:
        for altered in client.incremental_alter_configs(resources, request_timeout=ANSWER_TIMEOUT_S).values():
            altered.result(_APPLY_TIMEOUT_S)
    except KafkaException as exc:
        raise KvStreamsError(
            f"Kafka refuses to change the topics: {exc.args[0].str()}",
            remedy="`kvstreams topics acls 'topics window'` prints the rights that it needs",
        ) from exc

    def applied() -> bool:
        states = _states(settings, specs)
        return all(states[spec.name].config[key] == spec.config[key] for spec in specs for key in spec.history)

    wait_for(applied, _APPLY_TIMEOUT_S, "the broker to apply the settings")
    former = {name: state.config for name, state in before.items()}
    grown = [spec for spec in specs if any(int(spec.config[key]) > int(former[spec.name][key]) for key in spec.history)]
    if grown:
        # The ends are asked for now: the last compaction with the former window began before.
        _begin(settings, log_ends(settings, places_of(grown)))
    return list(_states(settings, specs).values())


def _states(settings: ScopeSettings, specs: Iterable[TopicSpec]) -> dict[str, TopicState]:
    states = describe_topics(settings, specs)
    missing = [name for name, state in states.items() if state is None]
    if missing:
        raise KvStreamsError(topics_missing(missing), remedy=TOPICS_REMEDY)
    return {name: state for name, state in states.items() if state is not None}


def _kept_ms(settings: ScopeSettings, spec: TopicSpec, state: TopicState) -> int:
    """How far back a topic has everything that a moment needs: also the records that were valid at that moment."""
    kept = []
    if COMPACTION_LAG in spec.history:
        kept.append(int(state.config[COMPACTION_LAG]))
    retention_ms = int(state.config.get(RETENTION, -1))
    if RETENTION in spec.history and retention_ms >= 0:
        is_loads = spec.name == topics(settings).router_loads.name
        kept.append(retention_ms - (round(settings.booking_ttl_s * 2 * 1000) if is_loads else METRICS_TTL_MS_MAX))
    return max(0, min(kept))


def _client(settings: ScopeSettings) -> Consumer:
    return reader(settings, **{"group.id": history_group(settings)})


def _begin(settings: ScopeSettings, ends: Mapping[Place, int]) -> None:
    """Note that the history of these partitions begins at these offsets, now."""
    now_ms = time.time_ns() // 1_000_000
    consumer = _client(settings)
    try:
        offsets = [TopicPartition(*place, end, str(now_ms)) for place, end in ends.items()]
        consumer.commit(offsets=offsets, asynchronous=False)
    except KafkaException as exc:
        raise KvStreamsError(
            f"Kafka does not take since when the topics keep their history: {exc.args[0].str()}",
            remedy=f"The window is set. Repeat the command; it needs the right to read {history_group(settings)}",
        ) from exc
    finally:
        consumer.close()


def _begins(settings: ScopeSettings, places: Iterable[Place]) -> dict[Place, tuple[int, int]]:
    """Where and when the history of partitions begins whose window has grown within a week."""
    consumer = _client(settings)
    try:
        committed = consumer.committed([TopicPartition(*place) for place in places], ANSWER_TIMEOUT_S)
    except KafkaException as exc:
        raise KvStreamsError(
            f"Kafka does not say since when the topics keep their history: {exc.args[0].str()}",
            remedy=f"A replay needs the right to describe {history_group(settings)}",
        ) from exc
    finally:
        consumer.close()
    return {
        (where.topic, where.partition): (where.offset, int(where.metadata or 0))
        for where in committed
        if where.offset >= 0
    }

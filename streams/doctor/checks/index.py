"""The owners of the index's partitions, and how far they lag (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from streams.doctor.findings import Finding, Group, listed
from streams.doctor.observations import LogsSeen, Observations, OwnerRecord
from streams.settings import TableSettings
from streams.tables.records import BEHIND_UNKNOWN_MS
from streams.topics import topics

#: How far back records count for the question whether two owners write in turn.
TURNS_MS = 60_000


def check_owners(seen: Observations) -> Iterator[Finding]:
    """Every partition has one owner, which writes its record at least every second."""
    settings = seen.settings
    if seen.kafka is None or seen.kafka.logs is None or seen.kafka.topics is None:
        return
    changelog = seen.kafka.topics.states.get(topics(settings).index_changelog.name)
    logs, members = seen.kafka.logs, seen.kafka.members
    partitions = range(0 if changelog is None else changelog.partitions)
    silent = [
        partition for partition in partitions if not any(record.live for record in logs.owners.get(partition, ()))
    ]
    enough = logs.watched_s >= settings.stale_after_ms / 1000
    if silent and enough and members is not None and not members:
        yield Finding(
            Group.INDEX,
            "no_worker",
            f"scope {settings.topic_prefix!r}",
            "no Faust worker is running, so nothing that engines report reaches the index",
            "Start one with `kvstreams worker` or `faust -A streams worker`, with the same Kafka and topic_prefix",
        )
    elif silent and enough:
        yield from _silent(silent, logs, settings, in_rebalance=members is None)
    for partition in partitions:
        names = taking_turns(logs.owners.get(partition, ()))
        if names:
            yield Finding(
                Group.INDEX,
                "two_owners",
                f"partition {partition}",
                f"several workers write it in turn: {listed(names)}. They fence each other, and it makes no progress",
                "Stop all of them but one, and check that no worker is frozen and resumed again and again",
            )


def _silent(silent: list[int], logs: LogsSeen, settings: TableSettings, *, in_rebalance: bool) -> Iterator[Finding]:
    by_owner: dict[str | None, list[int]] = {}
    for partition in silent:
        records = logs.owners.get(partition, ())
        by_owner.setdefault(records[-1].record.owner if records else None, []).append(partition)
    for owner, partitions in by_owner.items():
        who = "no worker was seen as their owner" if owner is None else f"their last owner is the worker {owner}"
        state = "; the workers are rebalancing" if in_rebalance else ""
        yield Finding(
            Group.INDEX,
            "owner_silent",
            f"partitions {listed(partitions)}",
            f"no owner was heard from for {logs.watched_s:.1f} s; {who}{state}",
            "The process hangs, is stopped (SIGSTOP, a debugger, no processor), or cannot reach Kafka. Check its log, "
            f"and restart it; Kafka gives its partitions to another worker after {settings.session_timeout_s:g} s",
        )


def taking_turns(records: Sequence[OwnerRecord]) -> list[str]:
    """The owners of a partition, if one of them came back after another within a minute; otherwise none."""
    since_ms = records[-1].at_ms - TURNS_MS if records else 0
    owners = [record.record.owner for record in records if record.at_ms >= since_ms]
    turns = owners[:1] + [after for before, after in pairwise(owners) if after != before]
    return sorted(set(turns)) if len(turns) > len(set(turns)) else []


def check_lag(seen: Observations) -> Iterator[Finding]:
    """No owner lags behind the events."""
    settings = seen.settings
    if seen.kafka is None or seen.kafka.logs is None or seen.kafka.topics is None:
        return
    names = topics(settings)
    sources = (names.kv_events.name, names.cxl_events.name)
    for partition, records in sorted(seen.kafka.logs.owners.items()):
        if not records[-1].live:
            continue
        record = records[-1].record
        behind_ms = max((source.behind_ms for source in record.sources if source.topic in sources), default=0)
        if behind_ms > settings.behind_after_ms:
            lag = "an unknown time" if behind_ms >= BEHIND_UNKNOWN_MS else f"{behind_ms / 1000:.1f} s"
            yield Finding(
                Group.INDEX,
                "owner_behind",
                f"partition {partition}",
                f"its owner {record.owner} is {lag} behind the events, more than {settings.behind_after_ms} ms",
                "A worker that has just started catches up by itself. Otherwise add workers, or give them more "
                "processor; `kvstreams_agent_lag_records` shows how much is left",
            )
        for source in record.sources:
            state = seen.kafka.topics.states.get(source.topic)
            if state is not None and source.topic_id and source.topic_id != state.topic_id:
                yield Finding(
                    Group.INDEX,
                    "topic_recreated",
                    f"topic {source.topic}",
                    f"it was deleted and created again, and the owner of partition {partition} has not noticed it",
                    f"Restart the worker {record.owner}",
                )

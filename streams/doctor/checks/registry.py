"""The registry: engines, block sizes, leases of bridges; and dead letters (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from streams.core.workers import Worker
from streams.doctor.findings import Finding, Group, listed
from streams.doctor.observations import LogsSeen, Observations
from streams.settings import TopicSettings

#: The share of a lease after which a healthy bridge has renewed it: it does so after a third.
RENEWED_WITHIN = 2 / 3


def check_registry(seen: Observations) -> Iterator[Finding]:
    """Engines are registered once, in this scope, with the block size of their model."""
    settings = seen.settings
    if seen.kafka is None or seen.kafka.logs is None or seen.kafka.topics is None:
        return
    logs = seen.kafka.logs
    if not logs.workers:
        others = seen.kafka.topics.other_prefixes
        elsewhere = f"; other scopes on this Kafka: {listed(list(map(repr, others)))}" if others else ""
        yield Finding(
            Group.REGISTRY,
            "no_engine",
            f"scope {settings.topic_prefix!r}",
            f"no engine is registered{elsewhere}",
            "Start a bridge, or register engines with PUT /workers/{id}. If they are running, they publish to another "
            "Kafka or topic_prefix: compare KVSTREAMS_KAFKA and KVSTREAMS_TOPIC_PREFIX of all processes",
        )
    yield from _duplicates(logs, "url", lambda worker: worker.url)
    yield from _duplicates(logs, "address of events", lambda worker: worker.events_endpoint)
    yield from _block_sizes(logs, settings)


def _duplicates(logs: LogsSeen, what: str, address_of: Callable[[Worker], str | None]) -> Iterator[Finding]:
    by_address: dict[str, list[int]] = {}
    for worker_id, registration in logs.workers.items():
        address = address_of(registration.worker)
        if address:
            by_address.setdefault(address.rstrip("/"), []).append(worker_id)
    for address, ids in by_address.items():
        if len(ids) > 1:
            yield Finding(
                Group.REGISTRY,
                "registered_twice",
                f"workers {listed(ids)}",
                f"they have the same {what}, {address}: one engine counts as several",
                "Give each engine one id in the --engine options, and remove the others with DELETE /workers/{id}",
            )


def _block_sizes(logs: LogsSeen, settings: TopicSettings) -> Iterator[Finding]:
    for name, model in sorted(logs.models.items()):
        own = settings.block_size_of(name)
        if own != model.block_size:
            yield Finding(
                Group.REGISTRY,
                "settings_block_size",
                f"model {name}",
                f"these settings give it blocks of {own} tokens, but in the scope it has {model.block_size} "
                f"(written by {model.writer})",
                f"Set block_size, or model_block_sizes for this model, to {model.block_size} in every process. To give "
                "the model another size, run `kvstreams reset`",
            )
    for worker_id, registration in logs.workers.items():
        worker = registration.worker
        served = logs.models.get(worker.model)
        if served is not None and worker.block_size != served.block_size:
            yield Finding(
                Group.REGISTRY,
                "wrong_block_size",
                f"worker {worker_id}",
                f"its blocks have {worker.block_size} tokens, but those of {worker.model} have {served.block_size} in "
                "this scope, so it gets no requests",
                f"Restart the engine at {worker.url} with --block-size {served.block_size}",
            )


def check_leases(seen: Observations) -> Iterator[Finding]:
    """Every engine with an event socket is fed by a bridge, which renews its lease and keeps up."""
    logs = None if seen.kafka is None else seen.kafka.logs
    if logs is None:
        return
    without_pulse: dict[str, list[int]] = {}
    for worker_id, registration in logs.workers.items():
        worker, lease = registration.worker, registration.worker.lease
        if lease is None:
            if worker.events_endpoint:
                yield Finding(
                    Group.LEASES,
                    "no_bridge",
                    f"worker {worker_id}",
                    f"it has events at {worker.events_endpoint}, but no bridge feeds them",
                    f"Start a bridge with --engine id={worker_id},url={worker.url},events={worker.events_endpoint}",
                )
            continue
        lease_s, after_s = lease.lease_ms / 1000, registration.renewed_after_s
        if lease.is_released:
            yield Finding(
                Group.LEASES,
                "lease_released",
                f"worker {worker_id}",
                f"its bridge {lease.bridge} gave up its lease: it was stopped, or no longer has this engine in its "
                "list. No other bridge has taken over, so the engine gets no requests",
                "Start the bridge again, or another one for this engine. If the engine is gone for good, run "
                f"DELETE /workers/{worker_id}",
            )
        elif after_s is None and logs.watched_s >= lease_s:
            yield Finding(
                Group.LEASES,
                "lease_expired",
                f"worker {worker_id}",
                f"its bridge {lease.bridge} has not renewed the lease of {lease_s:g} s for {logs.watched_s:.1f} s: "
                "it was stopped, hangs, or cannot reach Kafka. The engine gets no requests",
                "Start the bridge again, or another one for this engine. If the engine is gone for good, run "
                f"DELETE /workers/{worker_id}",
            )
        elif (after_s or logs.watched_s) > RENEWED_WITHIN * lease_s:
            yield Finding(
                Group.LEASES,
                "lease_about_to_expire",
                f"worker {worker_id}",
                f"its bridge {lease.bridge} renewed nothing for {after_s or logs.watched_s:.1f} s of a lease of "
                f"{lease_s:g} s",
                "The bridge is short of processor or Kafka is slow. Check both, or raise bridge_lease_s",
            )
        elif lease.bridge not in logs.pulses and logs.watched_s >= 1.0:
            without_pulse.setdefault(lease.bridge, []).append(worker_id)
    for bridge, ids in without_pulse.items():
        yield Finding(
            Group.LEASES,
            "bridge_behind",
            f"bridge {bridge}",
            f"it renews its leases but writes no pulses: messages of workers {listed(ids)} wait in its sockets",
            "Give it more processor, or divide its engines among several bridges",
        )


def check_dead_letters(seen: Observations) -> Iterator[Finding]:
    """Nothing that was written in the last minutes could not be used."""
    logs = None if seen.kafka is None else seen.kafka.logs
    for (origin, reason), number in sorted(({} if logs is None else logs.dead_letters).items()):
        yield Finding(
            Group.DEAD_LETTERS,
            "dead_letters",
            origin,
            f"{number} dead letters in the last 10 minutes: {reason}",
            "docs/engines.md explains the reasons of engines. Read the headers and values of kv-dead-letters with any "
            "Kafka client; they contain no tokens",
        )

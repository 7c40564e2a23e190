"""LMCache: the feeds of its events, the engines that name its servers, and chunks that count nowhere (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from streams.doctor.findings import Finding, Group, listed
from streams.doctor.observations import FeedSeen, LogsSeen, Observations
from streams.lmcache.chunk_names import Unnamed
from streams.lmcache.pools import CHUNKS_MAX, NotCounted, parse_feed

#: Objects of one reason that are left out, and their share of all that were stored, from which they are a finding. A
#: server leaves a few out whenever it begins in the middle of a prompt.
LEFT_OUT_MIN = 50
LEFT_OUT_SHARE = 0.05

_LEFT_OUT = {
    Unnamed.NO_TOKENS: (
        "their stores came without tokens: the engine copies its blocks itself (engine_driven), or the server had "
        "forgotten them before it reported a slow store",
        "Set lmcache.mp.mp_transfer_mode to lmcache_driven in the engine's connector, where the device allows it. "
        "With this mode, a faster storage behind the server avoids it",
    ),
    Unnamed.BAD_TOKENS: (
        "their tokens are no numbers of 32 bits",
        "This version of LMCache writes something else than 0.5.6; docs/lmcache.md says which one is read",
    ),
    Unnamed.UNKNOWN_PARENT: (
        "the chunk before them is not known",
        "Let LMCache hash with its default, blake3. After a bridge was started in the middle of the events, they count "
        "once their prompts are stored again",
    ),
    Unnamed.CHUNK_SIZE: (
        "their tokens are no whole number of the scope's blocks",
        "Start the server with a --chunk-size that is a multiple of the model's block size in this scope",
    ),
    NotCounted.OTHER_GROUP: (
        "they belong to further groups of layers",
        "Start the server without --separate-object-groups, or take it as it is: the first group counts",
    ),
    NotCounted.OVER_CAPACITY: (
        f"a bridge keeps at most {CHUNKS_MAX:,} chunks of one server",
        "Start the server with a larger --chunk-size",
    ),
}


def check_feeds(seen: Observations) -> Iterator[Finding]:
    """Engines name servers whose events a bridge passes on, these are complete, and their chunks can count."""
    logs = None if seen.kafka is None else seen.kafka.logs
    if logs is None:
        return
    named: dict[str, list[int]] = {}
    for worker_id, registration in logs.workers.items():
        if registration.worker.lmcache is not None:
            named.setdefault(registration.worker.lmcache, []).append(worker_id)
    instances = {feed.name for feed in map(parse_feed, logs.feeds) if feed is not None and not feed.is_shared}
    for name, workers in sorted(named.items()):
        if name not in instances:
            yield _unknown_server(name, workers, instances)
    for name in sorted(instances - named.keys()):
        similar = get_close_matches(name, named.keys() - instances, n=1)
        yield Finding(
            Group.LMCACHE,
            "lmcache_unused",
            f"LMCache server {name}",
            "a bridge reads its events, but no engine names it, so that its chunks count for none",
            f"Set lmcache={name} in the --engine of each engine that uses it"
            + (f", perhaps instead of lmcache={similar[0]}" if similar else ""),
        )
    for key, feed in logs.feeds.items():
        yield from _feed_findings(key, feed, logs)


def _unknown_server(name: str, workers: list[int], instances: set[str]) -> Finding:
    known = f"known: {listed(sorted(instances))}" if instances else "no bridge has read events of any server"
    return Finding(
        Group.LMCACHE,
        "lmcache_unknown_server",
        f"workers {listed(workers)}" if len(workers) > 1 else f"worker {workers[0]}",
        f"they name the LMCache server {name}, of which no bridge has read an event ({known})"
        if len(workers) > 1
        else f"it names the LMCache server {name}, of which no bridge has read an event ({known})",
        "Start a bridge with --lmcache TOPIC, and the server with this --instance-id and the options of "
        "docs/lmcache.md, among them --coordinator-url. If it has another id, correct lmcache= in --engine",
    )


def _feed_findings(key: str, seen: FeedSeen, logs: LogsSeen) -> Iterator[Finding]:
    feed, lease, subject = seen.feed, seen.feed.lease, f"LMCache feed {key}"
    if lease is None or lease.is_released or (seen.renewed_after_s is None and logs.watched_s >= lease.lease_ms / 1000):
        last = "nobody" if lease is None else f"bridge {lease.bridge}, which has not renewed its lease"
        yield Finding(
            Group.LMCACHE,
            "lmcache_silent",
            subject,
            f"its events are passed on by {last}: answers that use its chunks are degraded",
            f"Start a bridge with --lmcache {feed.topic}",
        )
    incomplete = [cursor.instance for cursor in feed.cursors if cursor.gap_s]
    if incomplete:
        yield Finding(
            Group.LMCACHE,
            "lmcache_incomplete",
            subject,
            f"batches of {listed(incomplete)} are missing, so that answers that use its chunks are degraded",
            "They end within lmcache_unconfirmed_ttl_s. If it happens again, the server gives batches up: start it "
            "with --coordinator-event-flush-interval 0.05, since it sends none of more than 1 MB, and check its log "
            "and Kafka, and the retention of the topic",
        )
    for reason, (problem, remedy) in _LEFT_OUT.items():
        n_objects = feed.counts.get(reason, 0)
        if n_objects >= max(LEFT_OUT_MIN, LEFT_OUT_SHARE * feed.stored):
            yield Finding(
                Group.LMCACHE,
                "lmcache_left_out",
                subject,
                f"{n_objects} of {feed.stored} stored objects count nowhere ({reason}): {problem}",
                remedy,
            )
    yield from _other_models(subject, feed.models, logs)


def _other_models(subject: str, models: tuple[str, ...], logs: LogsSeen) -> Iterator[Finding]:
    """Models under names that no engine of the scope has."""
    served = {registration.worker.model for registration in logs.workers.values()}
    by_alias: Mapping[str, str] = {
        alias: registration.worker.model
        for registration in logs.workers.values()
        for alias in registration.worker.aliases
    }
    for model in models:
        if served and model not in served:
            last_part = [name for name in served if name.rpartition("/")[2] == model.rstrip("/").rpartition("/")[2]]
            ours = by_alias.get(model) or (last_part or sorted(served))[0]
            yield Finding(
                Group.LMCACHE,
                "lmcache_other_model",
                subject,
                f"it has chunks of {model}, a name of no engine's model here ({listed(sorted(served))}), so that they "
                "count for no request",
                f"Set lmcache_models of the bridge to {model}={ours}, if that is the model",
            )


def check_connectors(seen: Observations) -> Iterator[Finding]:
    """Chunks that a connector of vLLM reports are not indexed; LMCache's own events could be used instead."""
    using = [engine.worker.worker_id for engine in seen.engines if engine.has_lmcache and not engine.worker.lmcache]
    if using:
        yield Finding(
            Group.LMCACHE,
            "lmcache_not_named",
            f"workers {listed(using)}" if len(using) > 1 else f"worker {using[0]}",
            "their metrics show that they use LMCache, and what it has counts for no request",
            _REMEDY,
        )
    for page in seen.pages:
        n_blocks = sum(
            number
            for name, labels, number in page.samples
            if name == "kvstreams_bridge_not_indexed_total" and labels.get("reason") == "connector"
        )
        if n_blocks:
            yield Finding(
                Group.LMCACHE,
                "connector_chunks",
                page.url,
                f"its engines reported {n_blocks:.0f} chunks of a connector such as LMCache's, which are not indexed, "
                "so that their ranks are approximate",
                _REMEDY,
            )


_REMEDY = (
    "Run LMCache as a server (lmcache server, with vLLM's LMCacheMPConnector), let it publish its events to Kafka, and "
    "name it with lmcache= in --engine (docs/lmcache.md). Turn off enable_kv_events of the connector, whose chunks are "
    "not used"
)

"""The parts of a router, made from its settings: which topics it reads, and which part folds which records.

What lives here: composition. What must not: anything that happens while requests are served (router).
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

from confluent_kafka import Producer

from streams.core.routing.audit import Audit, Evidence
from streams.core.routing.busy import BusyThresholds
from streams.core.routing.decision import Chooser
from streams.core.routing.policies.expected_time import ExpectedTime, ExpectedTimeParameters
from streams.core.routing.policies.interface import Policy
from streams.core.routing.request import RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.core.routing.sessions import SessionAffinity
from streams.kafka.clients import producer
from streams.policy_plugins import find_policy
from streams.router_api.deciding.decision_recorder import DecisionRecorder
from streams.router_api.knowledge.dead_letters import DeadLetterCounts
from streams.router_api.knowledge.readiness import Readiness, ScopeTopics
from streams.router_api.knowledge.record_clock import RecordClock
from streams.router_api.knowledge.served_models import Rereading
from streams.router_api.knowledge.topic_readers import Feed, Feeds, one_by_one, one_by_one_live
from streams.router_api.knowledge.view import View
from streams.router_api.sharing.loads_sync import LoadsSync
from streams.router_api.sharing.registry import Registry
from streams.settings import RouterSettings, RoutingSettings
from streams.topics import Topics, topics

#: How long the client waits for further records of a batch. The outbox hands over those of an interval in one step.
_LINGER_MS = 0.5


class RouterParts(NamedTuple):
    """What a router consists of. kafka: the producer of bookings and of the decision log. recorder: None without one.

    policy: that of requests that override nothing.
    """

    kafka: Producer
    view: View
    loads: LoadsSync
    registry: Registry
    recorder: DecisionRecorder | None
    dead_letters: DeadLetterCounts
    feeds: Feeds
    rereading: Rereading
    readiness: Readiness
    policy: RoutePolicy
    chooser: Chooser
    audit: Audit


def compose(settings: RouterSettings, replayed: RecordClock | None = None) -> RouterParts:
    """Make the parts of a router; raises SettingsError. Nothing is read before they are started.

    replayed: the clock of a replay, which reads every topic from its beginning (replay.rebuilding).
    """
    scope, topics_of_scope = ScopeTopics(), topics(settings)
    kafka = producer(settings, **{"linger.ms": _LINGER_MS})
    now_ms = monotonic_ms if replayed is None else replayed.now_ms
    view = View(settings, now_ms)
    loads = LoadsSync(settings, topics_of_scope.router_loads, kafka, now_ms)
    registry = Registry(settings, view, scope.check)
    recorder = None
    if settings.decision_log:
        recorder = DecisionRecorder(settings, topics_of_scope.router_decisions, kafka, view, lambda: loads.router_id)
    dead_letters = DeadLetterCounts(settings)

    def restart() -> None:
        view.reset()
        registry.order.begin_again()  # afterwards: a change that is confirmed in between is read again
        loads.reset()

    by_name = _feeds(settings, topics_of_scope, view, registry, loads, dead_letters)
    if replayed is not None:
        by_name = _replayed_feeds(by_name, replayed)
    feeds = Feeds(settings, by_name, restart)
    readiness = Readiness(settings, scope, view, feeds, (feed.topic.name for feed in by_name.values()))
    policy = default_policy(settings)
    chooser = Chooser(
        random.Random(settings.router_seed or None),
        lambda name: _find_policy(settings, name),
        BusyThresholds(settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold),
        SessionAffinity(settings.router_session_affinity_ttl_s),
        loads.unreported,
    )
    if policy.policy_name:
        chooser.policy(policy.policy_name)  # a wrong name ends the process here
    evidence = Evidence(view.run_changes.fate, view.held_prefix, view.is_known, view.cache_of, loads.is_alone)
    audit = Audit(evidence, view.disagreeing, int(settings.booking_ttl_s * 1000))
    rereading = Rereading(settings, topics_of_scope.index_changelog, view.served)
    return RouterParts(
        kafka, view, loads, registry, recorder, dead_letters, feeds, rereading, readiness, policy, chooser, audit
    )


def _feeds(
    settings: RouterSettings,
    topics_of_scope: Topics,
    view: View,
    registry: Registry,
    loads: LoadsSync,
    dead_letters: DeadLetterCounts,
) -> dict[str, Feed]:
    """What the router reads, by the names that answers of `GET /ready` show."""
    feeds = {
        # Read first by a router of some models, so that what others need is not kept meanwhile.
        "workers": Feed(
            topics_of_scope.workers, one_by_one_live(registry.order.read), is_first=bool(view.served.models)
        ),
        # Read from its end, because bridges soon report every engine again.
        "metrics": Feed(
            topics_of_scope.worker_metrics,
            one_by_one(lambda record: view.fold_report(record.key, record.value)),
            from_end=True,
        ),
    }
    if settings.reads_index:
        feeds["index"] = Feed(topics_of_scope.index_changelog, view.served.fold)
        feeds["pooled"] = Feed(
            topics_of_scope.cxl_changelog,
            one_by_one(lambda record: view.fold_pooled(record.key, record.value)),
        )
    # Read from its end, so that the counts begin when this router starts. They include the dead letters of agents that
    # run without a router.
    feeds["dead letters"] = Feed(topics_of_scope.dead_letters, dead_letters.fold, from_end=True)
    if settings.router_replica_sync:
        feeds["loads"] = Feed(topics_of_scope.router_loads, loads.fold_messages, interval_s=loads.read_interval_s)
    return feeds


def _replayed_feeds(feeds: dict[str, Feed], clock: RecordClock) -> dict[str, Feed]:
    """The same feeds, from their beginnings and by the times of their records. Dead letters are no knowledge."""
    return {
        name: Feed(feed.topic, clock.timed(feed.fold, by_partition=name == "index"))
        for name, feed in feeds.items()
        if name != "dead letters"
    }


def default_policy(settings: RoutingSettings) -> RoutePolicy:
    """The policy of requests that override nothing."""
    return RoutePolicy(
        mode=settings.router_mode,
        overlap_score_weight=settings.kv_overlap_score_weight,
        temperature=settings.router_temperature,
        tier_weights=settings.tier_weights,
        cxl_score_weight=settings.cxl_score_weight,
        moe_score_weight=settings.moe_score_weight,
        track_active_blocks=settings.track_active_blocks,
        cuda_to_cpu_ratio=settings.encoder_cuda_to_cpu_ratio,
        name=settings.router_policy,
        overlap_credit=settings.kv_overlap_score_credit,
        request_weight=settings.decode_active_request_weight,
        recent_prefill_weight=settings.recent_prefill_weight,
    )


def _find_policy(settings: RouterSettings, name: str) -> Policy:
    """Make a policy with the parameters that the settings give it; raises SettingsError."""
    if name != RouterMode.EXPECTED_TIME:
        return find_policy(name)
    host, disk, external = settings.kv_load_gb_per_s
    return ExpectedTime(
        ExpectedTimeParameters(
            uncached_weight=settings.expected_time_uncached_weight,
            recent_prefill_weight=settings.recent_prefill_weight,
            decode_weight=settings.expected_time_decode_weight,
            kv_bytes_per_token=settings.kv_bytes_per_token,
            host_gb_per_s=host,
            disk_gb_per_s=disk,
            external_gb_per_s=external,
            pool_gb_per_s=settings.pool_load_gb_per_s,
        ),
        settings.pool_class_load_gb_per_s,
    )


def monotonic_ms() -> int:
    """The clock of a router."""
    return time.monotonic_ns() // 1_000_000

"""The metrics of a router, declared once; docs/metrics-reference.md has the table that is made from them.

What lives here: the declarations, and the snapshot of a Router that they read. What must not: counting (the router and
its parts count for themselves) and Prometheus' formats (streams.process.metrics).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.ids import WorkerId
from streams.core.routing.audit import AuditOutcome
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.core.workers import RenderOutcome, Role
from streams.errors import API_ERRORS, HTTP_CODES, HTTP_ERROR, NotReady
from streams.kafka.applied_until import Lag, lag_records, lag_seconds
from streams.process.connections import REFUSAL_REASONS, Connections
from streams.process.metrics import (
    OTHER,
    PARTITION,
    VALUES_MAX,
    Distribution,
    Label,
    Metric,
    MetricsRegistry,
    counter,
    gauge,
    histogram,
)
from streams.router_api.deciding.admission import Admission, Outcome
from streams.router_api.deciding.decision_counts import WINDOW_STEP_S, WINDOW_STEPS, WorkerCounts
from streams.router_api.deciding.prompt_matches import MODELS_MAX
from streams.router_api.deciding.router import Router
from streams.router_api.http.bodies import Bodies
from streams.router_api.http.fleet_load import FleetLoad
from streams.router_api.http.scaling import PoolKey, PoolNow, Scaling
from streams.router_api.knowledge.dead_letters import ENGINE, PAIRS_MAX
from streams.router_api.knowledge.engine_reports import REPORTS_MAX
from streams.router_api.knowledge.fleet_view import RankCounts
from streams.settings import Settings
from streams.topics import topics

#: Upper bounds of the time that a decision takes, in seconds.
LATENCY_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

#: Label value of a decision's reason if its answer is not degraded.
NO_REASON = "none"

#: Priorities with a time series of their own.
PRIORITIES_MAX = 32

#: Reasons for which a rank by itself makes answers degraded.
RANK_DEGRADED_REASONS = (
    DegradedReason.NO_EVENTS_YET,
    DegradedReason.BRIDGE_SILENT,
    DegradedReason.FEED_BEHIND,
    DegradedReason.EVENTS_LOST,
    DegradedReason.REMOVED,
    DegradedReason.OVER_CAPACITY,
    DegradedReason.OWNER_SILENT,
    DegradedReason.OWNER_BEHIND,
)

_RANK_STATES = ("registered", "cordoned", "wrong_block_size", "silent", "avoided", "degraded", "approximate")
_ERROR_CODES = tuple(sorted({*(error.code for error in API_ERRORS), *HTTP_CODES.values(), HTTP_ERROR}))
_PLAIN_TOPICS = topics(Settings())
_WORKER = Label("worker", values_max=VALUES_MAX)
_MODEL = Label("model", values_max=VALUES_MAX)
_ROLE = Label("role", tuple(Role))
_DEAD_LETTER_SOURCES = (_PLAIN_TOPICS.kv_events.name, _PLAIN_TOPICS.cxl_events.name, ENGINE, OTHER)


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """What the declarations read. n_labelled_records and n_labels_over_capacity are read from the view together."""

    router: Router
    admission: Admission
    route_seconds: Distribution
    load: FleetLoad
    pools: Mapping[PoolKey, PoolNow]
    lags: Mapping[int, Lag]
    reports: Sequence[MetricsReport]
    ranks: RankCounts
    renders: Counter[RenderOutcome]
    errors: Mapping[str, int]
    n_scrapes_failed: int
    n_bookings: int
    bookings_bytes: int
    n_bookings_dropped: int
    n_connections: int
    connections_refused: Mapping[str, int]
    body_bytes: int
    n_labelled_records: int
    n_labels_over_capacity: int

    def ranks_by_state(self) -> dict[str, int]:
        """Ranks of registered workers by state; one rank may be in several states."""
        ranks = self.ranks
        counts = (
            ranks.registered,
            ranks.cordoned,
            ranks.wrong_block_size,
            ranks.silent,
            ranks.avoided,
            ranks.degraded.total(),
            ranks.approximate,
        )
        return dict(zip(_RANK_STATES, counts, strict=True))

    def by_pool(self, field: Callable[[PoolNow], float]) -> dict[PoolKey, float]:
        """A number of each worker pool, by its model and role."""
        return {key: field(pool) for key, pool in self.pools.items()}

    def by_worker(self, field: Callable[[WorkerCounts], int]) -> dict[WorkerId | str, int]:
        """A count of decisions by the chosen worker."""
        return {worker_id: field(counts) for worker_id, counts in self.router.decisions.by_worker.items()}

    def mean(self, field: Callable[[WorkerMetrics], float]) -> float:
        """The mean of what the ranks' engines report; 0 if none of them reports anything."""
        values = [field(report.metrics) for report in self.reports]
        return sum(values) / len(values) if values else 0.0

    def ready(self) -> bool:
        """Whether the router answers requests."""
        try:
            self.router.readiness.check()
        except NotReady:
            return False
        return True


ROUTER_METRICS: tuple[Metric[RouterSnapshot], ...] = (
    gauge(
        "kvstreams_ready",
        "1 while this router answers requests, 0 while it refuses them as not ready",
        RouterSnapshot.ready,
    ),
    histogram(
        "kvstreams_routing_latency_seconds",
        "Time inside `POST /route`: parsing, deciding and booking. Refusals are left out",
        read=lambda now: now.route_seconds,
    ),
    histogram(
        "kvstreams_route_seconds",
        "The same as `kvstreams_routing_latency_seconds`, under its former name",
        read=lambda now: now.route_seconds,
    ),
    gauge(
        "kvstreams_kv_hit_rate",
        f"The share of the prompts' blocks that the chosen rank had already, over the last "
        f"{WINDOW_STEPS * WINDOW_STEP_S / 60:g} minutes, by worker. Only decisions that read the index count",
        lambda now: now.router.decisions.hit_rates(),
        _WORKER,
    ),
    histogram(
        "kvstreams_prefix_indexer_hit_ratio",
        "The same share for each decision since the router started, of all workers",
        read=lambda now: now.router.decisions.hit_ratio,
    ),
    counter(
        "kvstreams_prompt_blocks_total",
        "Blocks of the prompts that were routed to a worker by overlap",
        lambda now: now.by_worker(lambda counts: counts.blocks),
        _WORKER,
    ),
    counter(
        "kvstreams_prompt_hit_blocks_total",
        "The leading ones of these blocks that the chosen rank had already",
        lambda now: now.by_worker(lambda counts: counts.hit_blocks),
        _WORKER,
    ),
    counter(
        "kvstreams_worker_decisions_total",
        "Decisions by the chosen worker",
        lambda now: now.by_worker(lambda counts: counts.decisions),
        _WORKER,
    ),
    counter(
        "kvstreams_decisions_total",
        "Decisions by router mode, by the answer's mode, and by the reason if that is `degraded`. A repeated request "
        "id is no decision",
        lambda now: {
            (router_mode, mode, reason or NO_REASON): n
            for (router_mode, mode, reason), n in now.router.decisions.by_reason.items()
        },
        Label("router_mode", tuple(RouterMode)),
        Label("mode", tuple(AnswerMode)),
        Label("reason", (NO_REASON, *DegradedReason)),
    ),
    gauge(
        "kvstreams_load_balance_score",
        "The standard deviation over the mean of the decode blocks in use on the ranks of a model; 0 is even. Cordoned "
        "workers are left out",
        lambda now: {model: decode for model, (decode, _) in now.load.imbalance().items()},
        _MODEL,
    ),
    gauge(
        "kvstreams_load_balance_prefill_score",
        "The same for the prompt tokens that the ranks still have to compute",
        lambda now: {model: prefill for model, (_, prefill) in now.load.imbalance().items()},
        _MODEL,
    ),
    gauge(
        "kvstreams_worker_requests",
        "Requests in flight on a worker's ranks, by the bookings of all routers",
        lambda now: {worker_id: load.requests for worker_id, load in now.load.by_worker.items()},
        _WORKER,
    ),
    gauge(
        "kvstreams_worker_prefill_tokens",
        "Prompt tokens that a worker's ranks still have to compute, by these bookings",
        lambda now: {worker_id: load.prefill_tokens for worker_id, load in now.load.by_worker.items()},
        _WORKER,
    ),
    gauge(
        "kvstreams_worker_decode_blocks",
        "Distinct blocks in use on a worker's ranks, by these bookings",
        lambda now: {worker_id: load.decode_blocks for worker_id, load in now.load.by_worker.items()},
        _WORKER,
    ),
    gauge(
        "kvstreams_running_requests",
        "Requests in flight by model, by these bookings",
        lambda now: now.load.requests_by_model(),
        _MODEL,
    ),
    gauge(
        "kvstreams_pool_saturation",
        "What a worker pool is asked to do, divided by what it can do: 0 while it is idle, 1 when it needs all of its "
        "capacity, above 1 when requests wait longer and longer. A worker pool is all workers of a model and role to "
        "which requests may go. Use the mean over routers",
        lambda now: now.by_pool(lambda pool: pool.signals.saturation),
        _MODEL,
        _ROLE,
    ),
    gauge(
        "kvstreams_pool_backlog_seconds",
        "How long a request that arrives now waits until its prompt begins, in the router's queue and at the first "
        "rank that has no other prompt to compute",
        lambda now: now.by_pool(lambda pool: pool.signals.backlog_ms / 1000.0),
        _MODEL,
        _ROLE,
    ),
    gauge(
        "kvstreams_pool_replicas",
        "Workers of a pool to which requests may go",
        lambda now: now.by_pool(lambda pool: pool.replicas),
        _MODEL,
        _ROLE,
    ),
    gauge(
        "kvstreams_pool_replicas_wanted",
        "How many of them would have the saturation `scale_saturation_target`. It is no whole number, so that "
        "autoscalers can apply their tolerance before they round it up",
        lambda now: now.by_pool(lambda pool: pool.replicas_wanted),
        _MODEL,
        _ROLE,
    ),
    gauge(
        "kvstreams_average_kv_cache_utilization",
        "The mean share of the KV cache that is in use, from 0 to 1, as engines report it",
        lambda now: now.mean(lambda engine: engine.gpu_cache_usage_perc),
    ),
    gauge(
        "kvstreams_average_queue_size",
        "The mean number of requests that wait in an engine, as engines report it",
        lambda now: now.mean(lambda engine: engine.num_requests_waiting),
    ),
    gauge(
        "kvstreams_average_running_requests",
        "The mean number of requests that run in an engine, as engines report it",
        lambda now: now.mean(lambda engine: engine.request_active_slots),
    ),
    gauge(
        "kvstreams_view_lag_seconds",
        "How old the newest moment is up to which this router's view has every event of a partition. The ends of the "
        "logs are read a few times per second, so it is never 0. Absent while it is not known",
        lambda now: lag_seconds(now.lags),
        PARTITION,
    ),
    gauge(
        "kvstreams_view_lag_records",
        "Records of `kv-events` and `cxl-events`, transaction markers included, that this router's view of a partition "
        "lacks. Absent while it is not known",
        lambda now: lag_records(now.lags),
        PARTITION,
    ),
    counter(
        "kvstreams_answers_total",
        "Answers of `POST /route` by mode",
        lambda now: {mode: now.router.decisions.answers[mode] for mode in AnswerMode},
        Label("mode", tuple(AnswerMode)),
    ),
    counter(
        "kvstreams_answers_by_chosen_mode_total",
        "Answers of `POST /route` by `chosen_mode`, the trust in the chosen rank alone",
        lambda now: {mode: now.router.decisions.chosen_modes[mode] for mode in AnswerMode},
        Label("chosen_mode", tuple(AnswerMode)),
    ),
    counter(
        "kvstreams_overlap_audited_total",
        "Decisions by how their overlap compares with the prompt tokens that the engine then took from its cache: it "
        "found as many blocks (`agreed`), fewer (`over`) or more (`under`), or another number that an eviction or "
        "another request explains (`excused`), or nothing was reported (`not_reported`). Only decisions that read "
        "the index and were booked count, once the request has ended",
        lambda now: {outcome: now.router.audit.outcomes[outcome] for outcome in AuditOutcome},
        Label("outcome", tuple(AuditOutcome)),
    ),
    gauge(
        "kvstreams_overlap_agreed_share",
        "The share of the decisions with chosen_mode `exact`, of those whose engine reported, that were `agreed`, "
        "since the router started. 1 before the first one",
        lambda now: 1.0 if (share := now.router.audit.share_agreed()) is None else share,
    ),
    counter(
        "kvstreams_prompts_without_blocks_total",
        "Decisions by overlap whose prompt is shorter than one block, so that it can match nothing",
        lambda now: now.router.prompt_matches.n_without_blocks,
    ),
    gauge(
        "kvstreams_unmatched_prompts",
        "Decisions for a model whose prompts have never matched a block although its ranks hold blocks; absent for all "
        "other models. The prompts are probably not hashed like the engines' blocks, and the log names likely causes",
        lambda now: now.router.prompt_matches.unmatched(),
        Label("model", values_max=MODELS_MAX),
    ),
    gauge(
        "kvstreams_flow_control_queue_size",
        "Requests that wait for a rank, by priority",
        lambda now: now.admission.lengths(),
        Label("priority", values_max=PRIORITIES_MAX),
    ),
    gauge(
        "kvstreams_flow_control_queue_bytes",
        "Memory that they use, in bytes, as an estimate",
        lambda now: now.admission.n_bytes,
    ),
    histogram(
        "kvstreams_flow_control_request_queue_duration_seconds",
        "Time that requests waited, of those that got a rank after it",
        read=lambda now: now.admission.waited_s,
    ),
    counter(
        "kvstreams_queue_outcomes_total",
        "Requests with `queue` on, by what became of them: `at_once` and `routed` got a rank without waiting and after "
        "it; `full`, `bytes` and `tenant` were refused by a limit of the queue; `timeout` missed their deadline; "
        "`cancelled` were given up by their clients; `refused` got another error",
        lambda now: {outcome: now.admission.outcomes[outcome] for outcome in Outcome},
        Label("outcome", tuple(Outcome)),
    ),
    counter(
        "kvstreams_errors_total",
        "Calls answered with an error, by its code",
        lambda now: now.errors,
        Label("code", _ERROR_CODES),
    ),
    gauge("kvstreams_connections", "Open HTTP connections", lambda now: now.n_connections),
    counter(
        "kvstreams_connections_refused_total",
        "HTTP connections that were closed before they had a request: beyond `connections_max` (`too_many`), or "
        "because no request came for 10 s (`no_request`)",
        lambda now: {reason: now.connections_refused.get(reason, 0) for reason in REFUSAL_REASONS},
        Label("reason", REFUSAL_REASONS),
    ),
    gauge(
        "kvstreams_body_bytes",
        "Bytes of HTTP bodies over 64 KiB that are being read or parsed",
        lambda now: now.body_bytes,
    ),
    counter(
        "kvstreams_dead_letters_total",
        "Dead letters of the whole scope since this router started; do not add up the counts of several routers. The "
        "source is the topic of the record (`cxl-events` for a refused transition), or `engine` for a message that a "
        "bridge could not use as it is",
        lambda now: now.router.dead_letters.counts(),
        Label("source", _DEAD_LETTER_SOURCES),
        Label("reason", values_max=PAIRS_MAX),
    ),
    gauge("kvstreams_workers", "Registered workers", lambda now: len(now.router.view.fleet.workers)),
    gauge(
        "kvstreams_ranks",
        "Ranks of registered workers by state. `registered` counts all ranks; a rank may also be in several other "
        "states. No request goes to a `cordoned`, `wrong_block_size` or `silent` rank, and none to an `avoided` "
        "one while there is another. Answers that involve a `degraded` or `approximate` rank have that mode",
        RouterSnapshot.ranks_by_state,
        Label("state", _RANK_STATES),
    ),
    gauge(
        "kvstreams_render_parity_workers",
        "Registered workers by whether their engines make the same tokens of probe prompts as a front: `equal`, "
        "`differs`, or `unknown`. Prompts of a worker that differs match less than it holds; `GET /workers` says where "
        "they begin to differ, and why it is unknown",
        lambda now: {outcome.value: now.renders[outcome] for outcome in RenderOutcome},
        Label("outcome", tuple(outcome.value for outcome in RenderOutcome)),
    ),
    counter(
        "kvstreams_avoidances_total",
        "Records read that make routers avoid a worker for a while, since a request that was sent there failed",
        lambda now: now.router.view.fleet.avoidances.n_read,
    ),
    gauge(
        "kvstreams_degraded_ranks",
        "Degraded ranks, by the first reason that applies",
        lambda now: {reason: now.ranks.degraded[reason] for reason in RANK_DEGRADED_REASONS},
        Label("reason", tuple(RANK_DEGRADED_REASONS)),
    ),
    gauge(
        "kvstreams_ranks_with_metrics",
        "Ranks whose engine reports its load",
        lambda now: len(now.reports),
    ),
    counter(
        "kvstreams_scrapes_failed_total",
        "Scrapes of engines' metrics that failed, as bridges report them",
        lambda now: now.n_scrapes_failed,
    ),
    gauge(
        "kvstreams_index_blocks",
        "Facts in the index. A fact is one block that one rank holds in one tier",
        lambda now: len(now.router.view.index),
    ),
    gauge(
        "kvstreams_prefix_indexer_size",
        "The same as `kvstreams_index_blocks`, under the name that llm-d's scheduler has for it",
        lambda now: len(now.router.view.index),
    ),
    gauge(
        "kvstreams_rank_gaps",
        "Gaps in the batches of registered ranks, as partition owners have counted them for the current incarnations",
        lambda now: now.router.view.fleet.n_gaps(),
    ),
    gauge(
        "kvstreams_index_bytes",
        "Memory that the index uses, in bytes",
        lambda now: now.router.view.index.runs.memory_bytes(),
    ),
    counter(
        "kvstreams_records_over_capacity_total",
        "Run records that were dropped because the index is over capacity. Their ranks are degraded",
        lambda now: now.router.view.index.records_over_capacity,
    ),
    gauge(
        "kvstreams_pooled_blocks",
        "Rows of the table of pooled blocks, in any state",
        lambda now: now.router.view.facts.n_pooled(),
    ),
    gauge(
        "kvstreams_pooled_over_capacity",
        "Rows of pooled blocks that were dropped because the table is over capacity. While there are any, answers that "
        "count pooled blocks are degraded",
        lambda now: now.router.view.facts.pooled_over_capacity(),
    ),
    gauge(
        "kvstreams_labelled_records",
        "Run records with expert labels",
        lambda now: now.n_labelled_records,
    ),
    gauge(
        "kvstreams_labels_over_capacity",
        "Labels of blocks that were dropped because the table is over capacity",
        lambda now: now.n_labels_over_capacity,
    ),
    gauge(
        "kvstreams_bookings_known",
        "Bookings that this router has, including those that have ended and not expired yet",
        lambda now: now.n_bookings,
    ),
    gauge(
        "kvstreams_bookings_bytes",
        "Memory that these bookings use, in bytes, as an estimate, with the ids of those that `models` skips",
        lambda now: now.bookings_bytes,
    ),
    counter(
        "kvstreams_bookings_over_capacity_total",
        "Bookings that were dropped before they expired, because there were too many or they used too much memory",
        lambda now: now.n_bookings_dropped,
    ),
    gauge(
        "kvstreams_bookings_in_sync",
        "1 while every router has the bookings of all others, 0 while Kafka is unreachable",
        lambda now: now.router.loads.in_sync,
    ),
    gauge(
        "kvstreams_bookings_unacknowledged",
        "Records of bookings that Kafka has not acknowledged yet",
        lambda now: now.router.loads.unacknowledged,
    ),
    counter(
        "kvstreams_bookings_dropped_total",
        "Records of bookings that Kafka refused, or that were dropped because too many waited for it",
        lambda now: now.router.loads.unpublished,
    ),
    counter(
        "kvstreams_unknown_calls_total",
        "Calls for request ids whose booking did not arrive while they were buffered",
        lambda now: now.router.loads.unknown_calls,
    ),
    counter(
        "kvstreams_sessions_evicted_total",
        "Session bindings that were dropped before they expired, because too many were in use",
        lambda now: now.router.sessions_evicted,
    ),
    counter(
        "kvstreams_decisions_recorded_total",
        "Decisions that Kafka has taken for the decision log. 0 while `decision_log` is off",
        lambda now: 0 if now.router.recorder is None else now.router.recorder.recorded,
    ),
    counter(
        "kvstreams_decisions_unrecorded_total",
        "Decisions that are missing in the decision log, because its buffer was full or Kafka did not take them",
        lambda now: 0 if now.router.recorder is None else now.router.recorder.dropped,
    ),
    counter(
        "kvstreams_bad_records_total",
        "Records of the router's topics that it could not use",
        lambda now: now.router.feeds.bad_records,
    ),
)


class RouterMetrics:
    """The metrics of one router. Owner of the errors' counts; all methods run on the loop that serves the API."""

    def __init__(
        self, router: Router, connections: Connections, bodies: Bodies, admission: Admission, process: str = ""
    ) -> None:
        """process: value of the label `process` of every metric; "" for no such label."""
        self._router = router
        self._admission = admission
        self._connections = connections
        self._bodies = bodies
        self._scrapes = _FailedScrapes()
        self.scaling = Scaling(router, admission)
        self.errors: Counter[str] = Counter()
        self.route_seconds = Distribution(*LATENCY_BOUNDS)
        self.registry = MetricsRegistry(ROUTER_METRICS, self._snapshot, process)

    def _snapshot(self) -> RouterSnapshot:
        view = self._router.view
        reports = view.fleet.engines.reports()
        self._scrapes.update(reports)
        with self._router.loads.locked() as loads:
            n_bookings, n_bookings_dropped = len(loads), loads.dropped
            bookings_bytes = loads.n_bytes + self._router.loads.skipped_bytes
            load = FleetLoad(view.fleet.workers.copy().values(), loads)
        n_labelled, n_labels_over_capacity = view.facts.labelled()
        return RouterSnapshot(
            router=self._router,
            admission=self._admission,
            route_seconds=self.route_seconds,
            load=load,
            pools=self.scaling.pools,
            lags=view.lags(),
            reports=reports,
            ranks=view.rank_counts(),
            renders=view.fleet.render_outcomes(),
            errors=self.errors,
            n_scrapes_failed=self._scrapes.total,
            n_bookings=n_bookings,
            bookings_bytes=bookings_bytes,
            n_bookings_dropped=n_bookings_dropped,
            n_connections=len(self._connections),
            connections_refused=self._connections.refused,
            body_bytes=self._bodies.bytes_held,
            n_labelled_records=n_labelled,
            n_labels_over_capacity=n_labels_over_capacity,
        )


class _FailedScrapes:
    """Failed scrapes of all engines as one total that never decreases.

    A bridge reports a count for each engine. The count starts from 0 again when another bridge takes over, and the
    report that contains it expires.
    """

    def __init__(self) -> None:
        self.total = 0
        self._last: dict[WorkerId, int] = {}

    def update(self, reports: Iterable[MetricsReport]) -> None:
        """Add the increase of each worker's count since its last report."""
        now = {report.rank.worker_id: report.n_scrapes_failed for report in reports if report.rank.dp_rank == 0}
        for worker_id, count in now.items():
            before = self._last.get(worker_id, 0)
            self.total += count - before if count >= before else count
        # A worker without a report is kept: when it reports again, its count continues.
        self._last |= now
        if len(self._last) > REPORTS_MAX:
            self._last = now

"""The types of the HTTP API's answers. The OpenAPI document is generated from them, and tests check real answers.

What lives here: the shape of each JSON answer, with the names that clients read. What must not: requests, how an
answer is found (router), and calls (calls).

Answers are written as dictionaries, so that these types cost nothing while requests are answered.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from streams.core.cxl_memory import CxlMemoryState
from streams.core.routing.audit import AuditOutcome
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.core.workers import RenderOutcome, RenderPart, RenderReason, Role, WorkerState


class ErrorBody(TypedDict):
    """What is wrong. code: one of those in docs/errors.md. message: for people. detail: ids and numbers by name."""

    code: str
    message: str
    detail: dict[str, Any]


class ErrorAnswer(TypedDict):
    """Every error has this shape."""

    error: ErrorBody


class Candidate(TypedDict):
    """One candidate with every term of its cost, in blocks. policy_terms: in the modes that have a policy by name."""

    worker_id: int
    dp_rank: int
    scores: int
    cxl_accessible_scores: int
    moe_scores: int
    effective_cached_blocks: float
    own_prefill_blocks: float
    active_prefill_blocks: float
    decode_blocks: float
    recent_prefill_blocks: float
    cost: float | None
    policy_terms: NotRequired[dict[str, float]]


class Alternative(TypedDict):
    """A rank on another worker, for a client whose chosen one fails."""

    worker_id: int
    dp_rank: int


class RouteAnswerBody(TypedDict):
    """The chosen rank, and how far the choice can be trusted."""

    request_id: str
    worker_id: int
    dp_rank: int
    dp_size: int | None
    url: str | None
    overlap_blocks: int
    request_blocks: int
    cost: float | None
    router_mode: RouterMode
    mode: AnswerMode
    chosen_mode: AnswerMode
    degraded_because: NotRequired[DegradedReason]
    chosen_degraded_because: NotRequired[DegradedReason]
    moe_filter_applied: NotRequired[bool]
    pooled_blocks: NotRequired[int]
    queued_ms: NotRequired[float]
    alternatives: NotRequired[list[Alternative]]
    block_size: NotRequired[int]
    candidates: NotRequired[list[Candidate]]


class WorkerMatches(TypedDict):
    """Matched blocks of one worker: for each count, that of its best rank."""

    worker_id: int
    scores: int
    cxl_accessible_scores: int
    moe_scores: int


class RankMatches(TypedDict):
    """Matched blocks of one rank: its own leading blocks, those that it reaches in CXL pools after them, and those of
    its own whose labels match."""

    worker_id: int
    dp_rank: int
    scores: int
    cxl_accessible_scores: int
    moe_scores: int


class MatchesAnswer(TypedDict):
    """The matched blocks of every worker and rank that has any."""

    request_blocks: int
    workers: list[WorkerMatches]
    ranks: list[RankMatches]
    mode: AnswerMode
    degraded_because: NotRequired[DegradedReason]


class EngineMetrics(TypedDict):
    """The metrics that an engine reports for one rank; a total of 0 is unknown."""

    gpu_cache_usage_perc: float
    num_requests_waiting: int
    request_active_slots: int
    request_total_slots: int
    kv_active_blocks: int
    kv_total_blocks: int


class RankLoad(TypedDict):
    """The active load of one rank."""

    worker_id: int
    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int
    active_requests: int
    engine_metrics: EngineMetrics | None


class LoadsAnswer(TypedDict):
    """The load of every rank. in_sync: whether this router reads the bookings of all others."""

    loads: list[RankLoad]
    in_sync: bool


class ScalePool(TypedDict):
    """A worker pool: the workers of one model and role to which requests may go (docs/scaling.md).

    saturation: the greatest of compute, blocks and slots; the last two are null if no capacity is known. backlog_ms:
    how long a request that arrives now waits. queued_requests: those that wait for the pool in this router.
    """

    model: str
    role: Role
    replicas: int
    ranks: int
    saturation: float
    compute: float
    blocks: float | None
    slots: float | None
    backlog_ms: float
    queued_requests: int
    replicas_wanted: float


class ScaleAnswer(TypedDict):
    """The signals of every worker pool. in_sync: whether this router reads the bookings of all others."""

    pools: list[ScalePool]
    saturation_target: float
    in_sync: bool


class PotentialLoad(TypedDict):
    """The load that one rank would have with a request."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int


class PotentialAnswer(TypedDict):
    """The load that each eligible rank would have with a request."""

    loads: list[PotentialLoad]
    mode: AnswerMode
    degraded_because: NotRequired[DegradedReason]


class BookingAnswer(TypedDict):
    """A booking as it is now."""

    request_id: str
    worker_id: int
    dp_rank: int
    overlap_blocks: int
    request_blocks: int


class PhaseAnswer(TypedDict):
    """A reported phase. buffered: no booking of the id was read yet, so the call waits for it."""

    request_id: str
    phase: Literal["prefill", "free"]
    buffered: bool


class OutputAnswer(TypedDict):
    """Reported output. buffered: no booking of the id was read yet, so the call waits for it."""

    request_id: str
    output_tokens: int
    buffered: bool


class Lease(TypedDict):
    """The lease of the bridge that feeds a worker."""

    bridge: str
    term: int
    lease_ms: int
    renewal: int


class ReportedMetrics(EngineMetrics):
    """The metrics of one rank, and when they were read."""

    dp_rank: int
    scraped_at_ms: int
    scrapes_failed: int


class Render(TypedDict):
    """Whether an engine makes the same tokens of probe prompts as the front that probed it; see docs/http.md."""

    outcome: RenderOutcome
    reason: RenderReason | None
    part: RenderPart | None
    from_token: int | None
    probed_at_ms: int | None
    probed_by: str | None


class WorkerAnswer(TypedDict):
    """A registered worker."""

    worker_id: int
    url: str
    model: str
    block_size: int
    dp_size: int
    dp_start: int
    role: Role
    state: WorkerState
    kv_total_blocks: int | None
    max_requests: int | None
    device_class: str
    taints: list[str]
    aliases: list[str]
    max_model_len: int | None
    lora_names: list[str] | None
    events_endpoint: str | None
    replay_endpoint: str | None
    registered_at_ms: int
    lease: Lease | None
    model_block_size: int | None
    wrong_block_size_dp_ranks: list[int]
    silent_dp_ranks: list[int]
    avoided: bool
    avoided_ms: int
    incarnation: int | None
    render: Render
    metrics: list[ReportedMetrics]


class WorkersAnswer(TypedDict):
    """The registered workers, in order of id. router_mode: of this router."""

    workers: list[WorkerAnswer]
    router_mode: RouterMode


class AvoidedAnswer(TypedDict):
    """Whether requests avoid a worker, and for how long they were asked to; see docs/http.md."""

    worker_id: int
    avoided: bool
    avoided_ms: int


class RenderAnswer(TypedDict):
    """Whether a worker's engine makes the same tokens as a front."""

    worker_id: int
    render: Render


class RemovedAnswer(TypedDict):
    """A worker was removed."""

    worker_id: int
    removed: bool


class UncordonedAnswer(TypedDict):
    """A cordon was ended."""

    worker_id: int
    cordoned: bool


class PoolAnswer(TypedDict):
    """A CXL pool."""

    pool_id: str
    latency_class: str
    capacity_blocks: int | None
    members: list[int]
    epoch: int
    lost: bool
    registered_at_ms: int


class PoolsAnswer(TypedDict):
    """The registered CXL pools, in order of id."""

    pools: list[PoolAnswer]


class RankAnswer(TypedDict):
    """What a router has of one rank. digest: 16 hexadecimal digits, equal on routers that hold the same blocks."""

    worker_id: int
    dp_rank: int
    incarnation: int
    generation: int
    sequence: int
    health: Literal["exact", "degraded", "approximate", "removed"]
    blocks: int
    gaps: int
    unknown_parents: int
    lease_ms: int
    silent: bool
    digest: str


class StateAnswer(TypedDict):
    """What a router has of each rank. applied_offsets: by partition."""

    blocks: int
    applied_offsets: dict[str, int]
    ranks: list[RankAnswer]


class PooledBlockAnswer(TypedDict):
    """A pooled block with its placement and the workers that can read it now."""

    sequence_hash: int
    parent: int | None
    position: int
    engine_hash: int
    worker_id: int
    dp_rank: int
    model: str
    state: CxlMemoryState
    pool_id: str | None
    pool_epoch: int
    accessible_workers: list[int]
    reachable_workers: list[int]


class PooledStateAnswer(TypedDict):
    """Every pooled block."""

    blocks: list[PooledBlockAnswer]


class HealthAnswer(TypedDict):
    """The process is running."""

    status: Literal["ok"]


class ReadyAnswer(TypedDict):
    """Whether the router is ready, and what it waits for. reason: only if it is not ready."""

    ready: bool
    partitions_left: dict[str, int]
    workers_left: int
    topics_missing: list[str]
    reason: NotRequired[str]


class OpenApiAnswer(TypedDict):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    tags: list[dict[str, str]]


class LiveRouter(TypedDict):
    """The router itself. not_ready_because: null while it is ready. dead_letters: of the scope, since its start.

    audited: decisions by how their overlap compares with what the engine found. agreed_share: of the exact ones whose
    engine reported, those that agreed; null before the first one.
    """

    id: str
    router_mode: RouterMode
    not_ready_because: str | None
    bookings_in_sync: bool
    index_blocks: int
    dead_letters: int
    audited: dict[AuditOutcome, int]
    agreed_share: float | None


class LiveSamples(TypedDict):
    """The last minutes as columns, the oldest sample first. A number that is not known is null.

    modes: decisions per second by the mode of the chosen rank.
    """

    age_s: list[float]
    decisions_per_s: list[float]
    hit_rate: list[float | None]
    latency_ms_p50: list[float | None]
    latency_ms_p99: list[float | None]
    lag_s: list[float | None]
    requests: list[int]
    prefill_tokens: list[int]
    decode_blocks: list[int]
    imbalance: list[float]
    gaps: list[int]
    queue: list[int]
    agreed_share: list[float | None]
    modes: dict[AnswerMode, list[float]]


class LivePartition(TypedDict):
    """How far the router's view is behind the log of events in one partition."""

    partition: int
    lag_s: float | None
    lag_records: int | None


class LiveWorker(TypedDict):
    """One worker. worker_id: as text, since JavaScript rounds numbers of 64 bits. reason: why it is not exact.

    hit_rate: the share of its prompts' blocks that were cached there, over the last minutes.
    """

    worker_id: str
    model: str
    ranks: int
    state: str
    reason: DegradedReason | None
    cache_usage: float | None
    prefill_tokens: int
    decode_blocks: int
    requests: int
    hit_rate: float | None


class LiveExplanation(TypedDict):
    """What a reason or a state of a worker means, and what to do about it."""

    meaning: str
    remedy: str


class LiveNextBest(TypedDict):
    """The candidate with the lowest cost, of those that were not chosen."""

    worker_id: str
    dp_rank: int
    overlap_blocks: int
    cost: float


class LiveDecision(TypedDict):
    """A decision of the last minute; at most one per second is kept. worker_id: as text, as of LiveWorker.

    load_blocks: distinct blocks in use at the chosen rank, with those of the request. terms: what the cost is made of.
    candidates: how many ranks were eligible. mode, reason: of the chosen rank.
    """

    age_s: float
    model: str
    router_mode: RouterMode
    worker_id: str
    dp_rank: int
    overlap_blocks: int
    request_blocks: int
    load_blocks: float
    cost: float
    terms: dict[str, float]
    candidates: int
    next_best: LiveNextBest | None
    mode: AnswerMode
    reason: DegradedReason | None


class LiveAnswer(TypedDict):
    """What the live page shows. workers: those with the most requests first. decisions: the newest first. pools: as in
    GET /scale, at most 20.

    explanations: of each reason that a worker has, or of its state if it has none and is not exact. term_meanings: of
    terms of these decisions, as words that follow a number.
    """

    every_s: float
    router: LiveRouter
    samples: LiveSamples
    partitions: list[LivePartition]
    workers: list[LiveWorker]
    workers_left_out: int
    pools: list[ScalePool]
    explanations: dict[str, LiveExplanation]
    decisions: list[LiveDecision]
    term_meanings: dict[str, str]

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
from streams.core.routing.sources import SourceTier
from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.core.workers import RenderOutcome, RenderPart, RenderReason, Role, WorkerState


class ErrorBody(TypedDict):
    """What is wrong, and what to do about it.

    code: one of those in docs/errors.md
    message: what is wrong, and what to do about it
    detail: ids and numbers by name
    """

    code: str
    message: str
    detail: dict[str, Any]


class ErrorAnswer(TypedDict):
    """Every error has this shape."""

    error: ErrorBody


class PoolShareBody(TypedDict):
    """Blocks that a candidate reads from one pool.

    latency_class: of the pool; LMCache's backend for its pools
    load_gb_per_s: at which it loads them, by this router's settings
    """

    pool_id: str
    latency_class: str
    blocks: int
    load_gb_per_s: float


class Candidate(TypedDict):
    """One candidate with every term of its cost, in blocks.

    scores: the request's leading blocks that it holds itself
    cxl_accessible_scores: blocks that it reaches in CXL pools, after its own leading blocks
    moe_scores: those of its own leading blocks whose labels match
    effective_cached_blocks: `scores`, `cxl_accessible_scores` and `moe_scores`, weighted
    own_prefill_blocks: what this request must compute there
    active_prefill_blocks: what earlier requests still have to compute there
    decode_blocks: distinct blocks in use there, with those of this request
    recent_prefill_blocks: what the request pays because the rank computed more than others lately
        (`recent_prefill_weight`); 0 in modes that have a policy by name
    cost: the lowest wins. Null for a full rank in mode `load-deviation`
    policy_terms: only in modes `expected-time` and `policy`: what the cost is made of, by name
    pools: from which pools its `cxl_accessible_scores` come, if there are any, those with the most blocks first
    """

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
    pools: NotRequired[list[PoolShareBody]]


class Alternative(TypedDict):
    """A rank on another worker, for a client whose chosen one fails."""

    worker_id: int
    dp_rank: int


class RemoteKvSource(TypedDict):
    """From where a vLLM engine pulls blocks (OffloadingConnector with a tier `p2p`).

    kv_request_id: another one in each answer
    """

    kv_request_id: str
    remote_host: str
    remote_port: int


class KvTransferParams(TypedDict):
    """What a request to a vLLM engine has so that the engine pulls blocks from another one."""

    remote_kv_source: RemoteKvSource


class KvSource(TypedDict):
    """A rank or a pool that has more of the prompt than the chosen rank has in device memory.

    worker_id: of a rank, and so is `dp_rank`
    pool_id: of a pool
    blocks: how many of the prompt's leading blocks the chosen rank has with this source, without a hole. For a rank,
        those that it holds; for a pool, the chosen rank's own in device memory and those of the pool that follow them
    tier: the slowest one that some of them have to be read from. For a rank, `device`, `host`, `disk` or `external`, by
        the fastest copy of each block
    accessible: of a pool: whether the chosen rank can read it itself
    kv_transfer_params: of a rank, with `router_kv_p2p_port`: the field of this name of a request to the chosen rank's
        engine that makes it pull blocks from this one
    """

    worker_id: NotRequired[int]
    dp_rank: NotRequired[int]
    pool_id: NotRequired[str]
    blocks: int
    tier: SourceTier
    accessible: NotRequired[bool]
    kv_transfer_params: NotRequired[KvTransferParams]


class RouteAnswerBody(TypedDict):
    """The chosen rank, and how far the choice can be trusted.

    worker_id: the chosen worker
    dp_rank: the chosen rank, by the engine's own number
    dp_size: number of the worker's ranks. If it has several, the request to the engine names the rank in the header
        `X-data-parallel-rank`. Null as `url` is
    url: where the worker takes requests; null if the id is repeated and the worker was removed meanwhile
    overlap_blocks: how many of the request's leading blocks the rank holds
    request_blocks: the request's length in blocks
    cost: the cost of the chosen rank, in milliseconds in mode `expected-time` and in blocks in mode `kv`; null for a
        repeated id. `hit-usage-waiting` returns its negative score
    router_mode: the mode that decided; for a repeated id, the mode that would decide
    mode: how far the answer can be trusted: the worst over all eligible ranks
    chosen_mode: like `mode`, for the chosen rank alone. Pooled blocks and labels limit it only if they are
        part of its own score
    degraded_because: the first reason found, if `mode` is `degraded`, or `approximate` because of the audit
    chosen_degraded_because: like `degraded_because`, for the chosen rank alone
    moe_filter_applied: only for a `moe_query` with `fallback_to_unlabeled` false: whether only ranks with a match were
        candidates. False if no rank has one, or if the index is not read
    pooled_blocks: blocks after `overlap_blocks` that the rank reads from a CXL pool, if there are any
    queued_ms: for how long the request waited, if it did
    block_size: with `explain`: tokens per block of the model
    candidates: with `explain`: the terms of every candidate
    alternatives: further ranks, if the request asks for them
    kv_sources: if the request asks for them, and does not repeat an id: at most three, those with the most blocks
        first, then the fastest tier, then the lowest cost
    """

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
    kv_sources: NotRequired[list[KvSource]]
    block_size: NotRequired[int]
    candidates: NotRequired[list[Candidate]]


class WorkerMatches(TypedDict):
    """Matched blocks of one worker: for each count, that of its best rank."""

    worker_id: int
    scores: int
    cxl_accessible_scores: int
    moe_scores: int


class RankMatches(TypedDict):
    """Matched blocks of one rank.

    scores: the request's leading blocks that it holds itself
    cxl_accessible_scores: blocks that it reaches in CXL pools, after its own leading blocks
    moe_scores: those of its own leading blocks whose labels match the request's `moe_query`
    """

    worker_id: int
    dp_rank: int
    scores: int
    cxl_accessible_scores: int
    moe_scores: int


class MatchesAnswer(TypedDict):
    """The matched blocks of every worker and rank that has any.

    workers: workers without any match are left out
    ranks: ranks without any match are left out, and so are those that the request's filters refuse
    mode: as for `POST /route`; `fallback` if the router does not read the index
    """

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
    """The active load of one rank.

    active_prefill_tokens: tokens that active requests still have to compute
    active_decode_blocks: distinct blocks that active requests use
    engine_metrics: null if the engine reports none
    """

    worker_id: int
    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int
    active_requests: int
    engine_metrics: EngineMetrics | None


class LoadsAnswer(TypedDict):
    """The load of every rank.

    in_sync: whether this router reads the bookings of all others; false while Kafka is away. If no bookings are active,
        it becomes false only `stale_after_ms` after the first call
    """

    loads: list[RankLoad]
    in_sync: bool


class ScalePool(TypedDict):
    """A worker pool: the workers of one model and role to which requests may go (docs/scaling.md).

    replicas: workers of the pool
    saturation: the greatest of `compute`, `blocks` and `slots`; above 1, requests wait longer and longer
    compute: time to compute the prompts that arrive, divided by the time that the ranks have
    backlog_ms: how long a request that arrives now waits until its prompt begins
    queued_requests: those that wait for the pool in this router
    replicas_wanted: workers with which the saturation would be the target
    blocks, slots: null if no capacity is known
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
    """The signals of every worker pool.

    pools: a pool is missing in about the first ten seconds after the router is ready or the pool has its first worker
    in_sync: whether this router reads the bookings of all others
    """

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
    """A reported phase.

    phase: what was reported
    buffered: no booking of the id was read yet, so the call waits for it (status 202)
    """

    request_id: str
    phase: Literal["prefill", "free"]
    buffered: bool


class OutputAnswer(TypedDict):
    """Reported output.

    buffered: no booking of the id was read yet, so the call waits for it (status 202)
    """

    request_id: str
    output_tokens: int
    buffered: bool


class Lease(TypedDict):
    """The lease of the bridge that feeds a worker.

    bridge: the bridge that holds it
    term: grows with each bridge that takes the worker over
    lease_ms: how long it is valid without a renewal
    renewal: counts the bridge's writes
    """

    bridge: str
    term: int
    lease_ms: int
    renewal: int


class ReportedMetrics(EngineMetrics):
    """The metrics of one rank, and when they were read.

    scrapes_failed: scrapes that failed since this bridge began to feed the engine
    """

    dp_rank: int
    scraped_at_ms: int
    scrapes_failed: int


class Render(TypedDict):
    """Whether an engine makes the same tokens of probe prompts as the front that probed it (docs/http.md).

    reason: why the outcome is `unknown`; otherwise null
    part: the prompt that differs or could not be compared
    from_token: position of the first token that differs; null if none does
    probed_at_ms: when a front found this
    probed_by: the front that found it
    """

    outcome: RenderOutcome
    reason: RenderReason | None
    part: RenderPart | None
    from_token: int | None
    probed_at_ms: int | None
    probed_by: str | None


class WorkerAnswer(TypedDict):
    """A registered worker: what it was registered with (WorkerBody), and what this router knows of it.

    registered_at_ms: of its last registration
    lmcache: the instance of LMCache that its engine uses; null if none is known
    lease: null if no bridge feeds it
    model_block_size: the scope's block size for the model; null before its first record
    wrong_block_size_dp_ranks: ranks that get no requests because their blocks, or this router's settings, have another
        block size than the scope
    silent_dp_ranks: ranks that get no requests because they were not heard from within their lease
    avoided: whether requests avoid it now
    avoided_ms: for how many ms requests were asked to avoid it; 0 if they were not
    incarnation: of its engine, by its events; null if this router knows none
    render: whether its engine makes the same tokens as a front
    pools: ids of the registered pools that it can read, those of its instance of LMCache among them
    metrics: of each rank whose engine reports any
    """

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
    lmcache: str | None
    lease: Lease | None
    model_block_size: int | None
    wrong_block_size_dp_ranks: list[int]
    silent_dp_ranks: list[int]
    avoided: bool
    avoided_ms: int
    incarnation: int | None
    render: Render
    pools: list[str]
    metrics: list[ReportedMetrics]


class WorkersAnswer(TypedDict):
    """The registered workers.

    workers: in order of id
    router_mode: of this router
    """

    workers: list[WorkerAnswer]
    router_mode: RouterMode


class AvoidedAnswer(TypedDict):
    """Whether requests avoid a worker (docs/http.md).

    avoided: false if as many ranks as allowed are avoided already
    avoided_ms: for how long requests were asked to avoid the worker
    """

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
    """A CXL pool.

    latency_class: of pools from which blocks are loaded at the same speed; LMCache's backend for its pools
    blocks: that this router knows in it
    load_gb_per_s: at which ranks load blocks from it, by this router's settings
    """

    pool_id: str
    latency_class: str
    capacity_blocks: int | None
    members: list[int]
    epoch: int
    lost: bool
    registered_at_ms: int
    blocks: int
    load_gb_per_s: float


class PoolsAnswer(TypedDict):
    """The registered CXL pools, in order of id."""

    pools: list[PoolAnswer]


class RankAnswer(TypedDict):
    """What a router has of one rank.

    incarnation: with `generation`, the rank's epoch
    sequence: the engine's number of the last batch
    gaps: gaps in the numbers of its batches
    unknown_parents: stored blocks whose parent was never seen
    lease_ms: how long a heartbeat is valid
    silent: whether the rank gets no requests because its lease has expired
    digest: 16 hexadecimal digits, equal on routers that hold the same blocks
    """

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
    """What a router has of each rank.

    blocks: of all ranks
    applied_offsets: by partition
    """

    blocks: int
    applied_offsets: dict[str, int]
    ranks: list[RankAnswer]


class RankDigestsAnswer(TypedDict):
    """What a router has of one rank, as digests.

    digests: number and sum of its facts by kind: `progress`, `blocks`, `labels`, `pooled` and `bookings`
    """

    worker_id: int
    dp_rank: int
    digests: dict[str, str]


class StateDigestAnswer(TypedDict):
    """What a router has of everything, as digests, at exactly known offsets.

    offsets: by topic, for each partition the offset before which all records are included
    registry: the digest of each of its records, by key
    models: those that the router serves; empty for all models
    """

    models: list[str]
    offsets: dict[str, list[int]]
    ranks: list[RankDigestsAnswer]
    registry: dict[str, str]


class RankFactsAnswer(TypedDict):
    """What a router has of one rank, at exactly known offsets.

    offsets: by topic, for each partition the offset before which all records are included
    facts: by kind, each with what it is about and what is known of that
    """

    offsets: dict[str, list[int]]
    facts: dict[str, list[tuple[str, str]]]


class PooledBlockAnswer(TypedDict):
    """A pooled block with its placement and the workers that can read it now.

    position: number of the block in its prefix, from 0
    worker_id: of its owner
    accessible_workers: as the owner named them; an empty list means all members of the pool
    reachable_workers: those that can read it now
    """

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
    """Whether the router is ready, and what it waits for.

    partitions_left: partitions that are not read to their end, by what their topic has
    workers_left: workers that must still register (`router_min_initial_workers`)
    topics_missing: topics that do not exist
    reason: what it waits for; only if it is not ready
    """

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
    """The router itself.

    not_ready_because: null while it is ready
    dead_letters: of the scope, since the router's start
    audited: decisions by how their overlap compares with what the engine found
    agreed_share: of the exact ones whose engine reported, those that agreed; null before the first one
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

    modes: decisions per second, by the mode of the chosen rank
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
    """One worker.

    worker_id: as text, since JavaScript rounds numbers of 64 bits
    reason: why it is not exact
    hit_rate: the share of its prompts' blocks that were cached there, over the last minutes
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


class LiveMemoryPool(TypedDict):
    """A pool of KV blocks that workers load from (docs/cxl.md).

    gb_per_s: at which they do, by this router's settings
    members: number of workers that can read it
    """

    pool_id: str
    latency_class: str
    gb_per_s: float
    blocks: int
    capacity_blocks: int | None
    members: int


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
    """A decision of the last minute.

    worker_id: as text
    load_blocks: distinct blocks in use at the chosen rank, with those of the request
    terms: what the cost is made of
    candidates: how many ranks were eligible
    mode, reason: of the chosen rank
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
    """What the live page shows.

    samples: of the last 5 minutes
    workers: those with the most requests first, at most 200
    pools: as in `GET /scale`, at most 20
    memory_pools: CXL pools and those of LMCache, those with the most blocks first, at most 20
    explanations: of each reason that a worker has, or of its state if it has none and is not exact
    decisions: of the last minute, at most one per second, the newest first. They have no request id and nothing of a
        prompt
    term_meanings: of the terms of these decisions, as words that follow a number
    """

    every_s: float
    router: LiveRouter
    samples: LiveSamples
    partitions: list[LivePartition]
    workers: list[LiveWorker]
    workers_left_out: int
    pools: list[ScalePool]
    memory_pools: list[LiveMemoryPool]
    explanations: dict[str, LiveExplanation]
    decisions: list[LiveDecision]
    term_meanings: dict[str, str]

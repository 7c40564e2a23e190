"""The JSON of answers of the HTTP API (docs/http.md).

What lives here: from values of the router to what is written as JSON. What must not: the types of answers in the
OpenAPI document (http/answers), requests (requests), and aiohttp (http/handlers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.ids import RankId, WorkerId
from streams.core.loads.bookings import Booking
from streams.core.routing.cost import RankTerms
from streams.core.routing.sources import KvSource
from streams.core.routing.trust import Trust
from streams.core.workers import (
    NOT_PROBED,
    RenderParity,
    Worker,
)
from streams.cxl.events import CxlPool
from streams.cxl.pooled_index import PoolShare
from streams.cxl.pooled_view import PooledBlock
from streams.router_api.messages.answer import RouteAnswer


def render_json(parity: RenderParity | None) -> dict[str, Any]:
    """Whether a worker's engine makes the same tokens as a front, as in GET /workers. None: no front has probed it."""
    result = NOT_PROBED if parity is None else parity.result
    return {
        "outcome": result.outcome,
        "reason": result.reason,
        "part": result.part,
        "from_token": result.from_token,
        "probed_at_ms": None if parity is None else parity.probed_at_ms,
        "probed_by": None if parity is None else parity.probed_by,
    }


def pool_json(pool: CxlPool, n_blocks: int, gb_per_s: float) -> dict[str, Any]:
    """A pool as in GET /pools, with what a router has of it."""
    return {**asdict(pool), "blocks": n_blocks, "load_gb_per_s": gb_per_s}


def pooled_json(block: PooledBlock, reachable: Iterable[WorkerId]) -> dict[str, Any]:
    """A pooled block as in GET /state/cxl."""
    return {
        "sequence_hash": block.sequence,
        "parent": block.parent,
        "position": block.position,
        "engine_hash": block.engine,
        "worker_id": block.owner.worker_id,
        "dp_rank": block.owner.dp_rank,
        "model": block.model,
        "state": block.metadata.state.value,
        "pool_id": block.metadata.pool_id,
        "pool_epoch": block.pool_epoch,
        "accessible_workers": list(block.metadata.accessible_workers),
        "reachable_workers": sorted(reachable),
    }


def terms_json(terms: RankTerms, shares: Sequence[PoolShare] = ()) -> dict[str, Any]:
    """One candidate with every term of its cost, in blocks, and those of its policy. shares: of its pooled blocks."""
    more: dict[str, Any] = {} if terms.policy_terms is None else {"policy_terms": dict(terms.policy_terms)}
    if shares:
        more["pools"] = [
            {
                "pool_id": share.pool_id,
                "latency_class": share.latency_class,
                "blocks": share.n_blocks,
                "load_gb_per_s": share.gb_per_s,
            }
            for share in shares
        ]
    return {
        "worker_id": terms.rank.worker_id,
        "dp_rank": terms.rank.dp_rank,
        "scores": terms.scores,
        "cxl_accessible_scores": terms.cxl_accessible_scores,
        "moe_scores": terms.moe_scores,
        "effective_cached_blocks": terms.effective_cached_blocks,
        "own_prefill_blocks": terms.own_prefill_blocks,
        "active_prefill_blocks": terms.active_prefill_blocks,
        "decode_blocks": terms.decode_blocks,
        "recent_prefill_blocks": terms.recent_prefill_blocks,
        "cost": terms.cost,
        **more,
    }


#: Fields by name, and a getter of their values. dataclasses.asdict copies every value, which takes five times as long;
#: orjson writes what is nested.
_WORKER = tuple(each.name for each in fields(Worker))
_worker_values = attrgetter(*_WORKER)
_METRICS = tuple(each.name for each in fields(WorkerMetrics))
_metrics_values = attrgetter(*_METRICS)

#: What POST /matches counts of each rank, in the order of `matches_json`.
_MATCHED = ("scores", "cxl_accessible_scores", "moe_scores")


def matches_json(request_blocks: int, matched: Mapping[RankId, Sequence[int]], trust: Trust) -> dict[str, Any]:
    """The answer to POST /matches. matched: own, CXL-accessible and MoE-matching blocks of each rank that has any.

    A worker's counts are the greatest of its ranks, each for itself.
    """
    ranks, by_worker = [], dict[WorkerId, list[int]]()
    for rank, counts in sorted(matched.items()):
        ranks.append({"worker_id": rank.worker_id, "dp_rank": rank.dp_rank, **dict(zip(_MATCHED, counts, strict=True))})
        known = by_worker.setdefault(rank.worker_id, [0] * len(_MATCHED))
        by_worker[rank.worker_id] = [max(pair) for pair in zip(known, counts, strict=True)]
    workers = [
        {"worker_id": worker_id, **dict(zip(_MATCHED, counts, strict=True))} for worker_id, counts in by_worker.items()
    ]
    return {"request_blocks": request_blocks, "workers": workers, "ranks": ranks, **trust_json(trust)}


def trust_json(trust: Trust) -> dict[str, Any]:
    """How far an answer can be trusted, and why it is degraded if it is."""
    if trust.reason is None:
        return {"mode": trust.mode.value}
    return {"mode": trust.mode.value, "degraded_because": trust.reason.value}


def answer_json(answer: RouteAnswer) -> dict[str, Any]:
    """The answer to POST /route."""
    rank, trust, chosen_trust = answer.rank, answer.trust, answer.chosen_trust
    fields: dict[str, Any] = {
        "request_id": answer.request_id,
        "worker_id": rank.worker_id,
        "dp_rank": rank.dp_rank,
        "dp_size": answer.dp_size,
        "url": answer.worker_url,
        "overlap_blocks": answer.overlap_blocks,
        "request_blocks": answer.request_blocks,
        "cost": answer.cost,
        "router_mode": answer.router_mode,
        "mode": trust.mode,  # a StrEnum: reading its `value` takes longer, and orjson writes the same
        "chosen_mode": chosen_trust.mode,
    }
    if trust.reason is not None:
        fields["degraded_because"] = trust.reason
    if chosen_trust.reason is not None:
        fields["chosen_degraded_because"] = chosen_trust.reason
    if answer.moe_filter_applied is not None:
        fields["moe_filter_applied"] = answer.moe_filter_applied
    if answer.pooled_blocks:
        fields["pooled_blocks"] = answer.pooled_blocks
    if answer.queued_ms is not None:
        fields["queued_ms"] = answer.queued_ms
    if answer.alternatives:
        fields["alternatives"] = [
            {"worker_id": rank.worker_id, "dp_rank": rank.dp_rank} for rank in answer.alternatives
        ]
    if answer.kv_sources is not None:
        fields["kv_sources"] = [source_json(source) for source in answer.kv_sources]
    if answer.candidates is not None:
        fields["block_size"] = answer.block_size
        fields["candidates"] = [
            terms_json(terms, answer.pool_shares.get(terms.rank, ())) for terms in answer.candidates
        ]
    return fields


def source_json(source: KvSource) -> dict[str, Any]:
    """A rank or a pool that has blocks of the prompt."""
    held = {"blocks": source.blocks, "tier": source.tier}
    if source.rank is None:
        return {"pool_id": source.pool_id, **held, "accessible": source.accessible}
    params = {} if source.transfer_params is None else {"kv_transfer_params": source.transfer_params}
    return {"worker_id": source.rank.worker_id, "dp_rank": source.rank.dp_rank, **held, **params}


def error_json(code: str, message: str, detail: dict[str, Any] | None = None) -> dict[str, Any]:
    """An error in the shape of all errors."""
    return {"error": {"code": code, "message": message, "detail": detail or {}}}


def booking_json(request_id: str, booking: Booking) -> dict[str, Any]:
    """A booking as POST /loads/{request_id} returns it."""
    return {
        "request_id": request_id,
        "worker_id": booking.rank.worker_id,
        "dp_rank": booking.rank.dp_rank,
        "overlap_blocks": booking.overlap_blocks,
        "request_blocks": booking.request_blocks,
    }


def worker_json(worker: Worker) -> dict[str, Any]:
    """A worker of the registry, as in GET /workers."""
    return dict(zip(_WORKER, _worker_values(worker), strict=True))


def metrics_json(metrics: WorkerMetrics) -> dict[str, Any]:
    """The metrics that an engine reports."""
    return dict(zip(_METRICS, _metrics_values(metrics), strict=True))


def report_json(report: MetricsReport) -> dict[str, Any]:
    """The metrics that an engine reported for one rank, unchanged."""
    return {
        "dp_rank": report.rank.dp_rank,
        **metrics_json(report.metrics),
        "scraped_at_ms": report.scraped_at_ms,
        "scrapes_failed": report.n_scrapes_failed,
    }

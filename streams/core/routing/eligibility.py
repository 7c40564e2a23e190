"""Which ranks a request may go to.

What lives here: the filters that come before cost. What must not: Kafka, HTTP, and busy thresholds (busy).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Set
from typing import NamedTuple

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.workers import Role, Worker, WorkerState


class WorkerFilter(NamedTuple):
    """What a request asks of the workers it may go to; None asks nothing."""

    model: str
    worker_id: WorkerId | None = None
    dp_rank: DpRank | None = None
    allowed: frozenset[WorkerId] | None = None
    excluded: frozenset[WorkerId] = frozenset()
    phase: Role | None = None
    required_taints: frozenset[str] = frozenset()


def eligible_ranks(workers: dict[WorkerId, Worker], worker_filter: WorkerFilter) -> list[RankId]:
    """Give the ranks that pass every filter, in order of worker and rank, so that equal costs mean equal candidates on
    every router."""
    ranks: list[RankId] = []
    for worker_id in sorted(workers):
        worker = workers[worker_id]
        if (
            worker.model != worker_filter.model
            or worker.state is not WorkerState.ACTIVE
            or (worker_filter.worker_id is not None and worker_id != worker_filter.worker_id)
            or (worker_filter.allowed is not None and worker_id not in worker_filter.allowed)
            or worker_id in worker_filter.excluded
            or (worker_filter.phase is not None and worker.role not in (Role.BOTH, worker_filter.phase))
            or not worker_filter.required_taints.issubset(worker.taints)
        ):
            continue
        ranks.extend(
            rank for rank in worker.ranks() if worker_filter.dp_rank is None or rank.dp_rank == worker_filter.dp_rank
        )
    return ranks


class FilterReason(enum.StrEnum):
    """The first filter that a rank does not pass; in the order in which they are looked at."""

    OTHER_MODEL = "other_model"
    CORDONED = "cordoned"
    OTHER_WORKER = "other_worker"  # the request names another one
    NOT_ALLOWED = "not_allowed"
    EXCLUDED = "excluded"
    OTHER_ROLE = "other_role"
    TAINTS_MISSING = "taints_missing"
    OTHER_DP_RANK = "other_dp_rank"  # the request names another one
    SILENT = "silent"  # its bridge was not heard of for longer than it promised


def refusals(workers: Iterable[Worker], worker_filter: WorkerFilter, silent: Set[RankId]) -> dict[FilterReason, int]:
    """Count the ranks that do not pass, each by the first filter that takes it out; for whoever finds that none passes.

    The filters are those of `eligible_ranks`, which every request goes through and which says of none why.
    """
    counts: Counter[FilterReason] = Counter()
    for worker in workers:
        refusal = _refusal_of(worker, worker_filter)
        for rank in worker.ranks():
            if refusal is not None:
                counts[refusal] += 1
            elif worker_filter.dp_rank is not None and rank.dp_rank != worker_filter.dp_rank:
                counts[FilterReason.OTHER_DP_RANK] += 1
            elif rank in silent:
                counts[FilterReason.SILENT] += 1
    return {refusal: counts[refusal] for refusal in FilterReason if counts[refusal]}


def _refusal_of(worker: Worker, worker_filter: WorkerFilter) -> FilterReason | None:
    if worker.model != worker_filter.model:
        return FilterReason.OTHER_MODEL
    if worker.state is not WorkerState.ACTIVE:
        return FilterReason.CORDONED
    if worker_filter.worker_id is not None and worker.worker_id != worker_filter.worker_id:
        return FilterReason.OTHER_WORKER
    if worker_filter.allowed is not None and worker.worker_id not in worker_filter.allowed:
        return FilterReason.NOT_ALLOWED
    if worker.worker_id in worker_filter.excluded:
        return FilterReason.EXCLUDED
    if worker_filter.phase is not None and worker.role not in (Role.BOTH, worker_filter.phase):
        return FilterReason.OTHER_ROLE
    return None if worker_filter.required_taints.issubset(worker.taints) else FilterReason.TAINTS_MISSING

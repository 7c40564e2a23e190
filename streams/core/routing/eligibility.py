"""Which ranks a request may go to.

What lives here: the filters that are applied before ranks are priced, each of them once. What must not: Kafka, HTTP,
and busy thresholds (busy).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.workers import Role, Worker, WorkerState

_NO_RANKS: frozenset[RankId] = frozenset()


class WorkerFilter(NamedTuple):
    """What a request requires of the ranks that it may go to. A field that is None requires nothing.

    block_size: of the request's blocks. Blocks of another size never match, whatever the rank holds.
    """

    model: str
    worker_id: WorkerId | None = None
    dp_rank: DpRank | None = None
    allowed: frozenset[WorkerId] | None = None
    excluded: frozenset[WorkerId] = frozenset()
    phase: Role | None = None
    required_taints: frozenset[str] = frozenset()
    block_size: int | None = None


class FilterReason(enum.StrEnum):
    """The first filter that a rank does not pass, in the order in which filters are applied."""

    OTHER_MODEL = "other_model"
    WRONG_BLOCK_SIZE = "wrong_block_size"  # the engine's blocks have another size than the scope's for the model
    CORDONED = "cordoned"
    OTHER_WORKER = "other_worker"  # the request names another worker
    NOT_ALLOWED = "not_allowed"
    EXCLUDED = "excluded"
    OTHER_ROLE = "other_role"
    TAINTS_MISSING = "taints_missing"
    OTHER_DP_RANK = "other_dp_rank"  # the request names another rank number
    SILENT = "silent"  # the rank was not heard from within its lease


def names_another_rank(rank: RankId, worker_filter: WorkerFilter) -> bool:
    """Whether a request's lists of workers rule out a rank: they exclude its worker, or name others only."""
    worker_id = rank.worker_id
    return (
        worker_id in worker_filter.excluded
        or worker_filter.worker_id not in (None, worker_id)
        or (worker_filter.allowed is not None and worker_id not in worker_filter.allowed)
        or worker_filter.dp_rank not in (None, rank.dp_rank)
    )


def first_refusal(worker: Worker, worker_filter: WorkerFilter) -> FilterReason | None:
    """Return the first filter that no rank of a worker passes, or None if its ranks are to be checked one by one."""
    if worker.model != worker_filter.model:
        return FilterReason.OTHER_MODEL
    if worker_filter.block_size is not None and worker.block_size != worker_filter.block_size:
        return FilterReason.WRONG_BLOCK_SIZE
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


def rank_refusal(
    rank: RankId, worker_filter: WorkerFilter, silent: Set[RankId], wrong_size: Set[RankId] = _NO_RANKS
) -> FilterReason | None:
    """Return the first filter that a rank of an accepted worker does not pass, or None if it passes all of them."""
    if worker_filter.dp_rank is not None and rank.dp_rank != worker_filter.dp_rank:
        return FilterReason.OTHER_DP_RANK
    if rank in wrong_size:
        return FilterReason.WRONG_BLOCK_SIZE
    return FilterReason.SILENT if rank in silent else None


def eligible_ranks(
    workers: Mapping[WorkerId, Worker],
    worker_filter: WorkerFilter,
    silent: Set[RankId] = _NO_RANKS,
    wrong_size: Set[RankId] = _NO_RANKS,
) -> list[RankId]:
    """List the ranks that pass every filter.

    They are ordered by worker and rank, so that candidates have the same positions on every router. silent: ranks that
    were not heard from within their lease. wrong_size: ranks whose events have blocks of another size than the scope's.
    """
    ranks: list[RankId] = []
    for worker_id in sorted(workers):
        worker = workers[worker_id]
        if first_refusal(worker, worker_filter) is None:
            ranks.extend(
                rank for rank in worker.ranks() if rank_refusal(rank, worker_filter, silent, wrong_size) is None
            )
    return ranks


def refusals(
    workers: Iterable[Worker], worker_filter: WorkerFilter, silent: Set[RankId], wrong_size: Set[RankId] = _NO_RANKS
) -> dict[FilterReason, int]:
    """Count the ranks that do not pass, by the first filter that refuses each of them.

    This explains an error; the ranks that pass are listed by `eligible_ranks`, which applies the same filters.
    """
    counts: Counter[FilterReason] = Counter()
    for worker in workers:
        reason = first_refusal(worker, worker_filter)
        if reason is not None:
            counts[reason] += worker.dp_size
            continue
        reasons = (rank_refusal(rank, worker_filter, silent, wrong_size) for rank in worker.ranks())
        counts.update(filter(None, reasons))
    return {reason: counts[reason] for reason in FilterReason if counts[reason]}

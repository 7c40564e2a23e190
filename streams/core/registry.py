"""Workers as the registry knows them, and which of their ranks a request may go to.

What lives here: the worker's record and the filters that come before cost. What must not: Kafka, HTTP.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from streams.core.ids import DpRank, RankId, WorkerId
from streams.errors import InvalidRequest

#: Device class of workers without an accelerator; every other one is "another device" (mode device-aware-weighted).
CPU_CLASS = "cpu"

#: Ranks one worker may announce; beyond it is a typing error, since the largest deployments run some hundreds.
DP_SIZE_MAX = 4096


class Role(enum.StrEnum):
    """What a worker does with a request."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.StrEnum):
    """Whether new requests may come."""

    ACTIVE = "active"
    CORDONED = "cordoned"


@dataclass(frozen=True, slots=True)
class BridgeLease:
    """Which bridge feeds a worker's events, and for how long without a word; the rules are engines.lease's.

    renewal: counts this bridge's writes, so that a copy of one, as a cordon makes it, is no renewal.
    """

    bridge: str
    term: int
    lease_ms: int
    renewal: int


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine instance. kv_total_blocks: room of each rank's cache, where known. lease: its bridge's, if any."""

    worker_id: WorkerId
    url: str
    model: str
    block_size: int
    dp_size: int = 1
    role: Role = Role.BOTH
    state: WorkerState = WorkerState.ACTIVE
    kv_total_blocks: int | None = None
    max_requests: int | None = None
    device_class: str = "cuda"
    taints: tuple[str, ...] = ()
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    registered_at_ms: int = 0
    lease: BridgeLease | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidRequest(f"worker {self.worker_id}: block_size is {self.block_size}; at least 1 token")
        if not 1 <= self.dp_size <= DP_SIZE_MAX:
            raise InvalidRequest(f"worker {self.worker_id}: dp_size is {self.dp_size}; 1 to {DP_SIZE_MAX}")
        if not self.model:
            raise InvalidRequest(f"worker {self.worker_id}: model is empty")

    def ranks(self) -> Iterator[RankId]:
        """The worker's ranks, in order."""
        return (RankId(self.worker_id, DpRank(rank)) for rank in range(self.dp_size))


class Wanted(NamedTuple):
    """What a request asks of the workers it may go to; None asks nothing."""

    model: str
    worker_id: WorkerId | None = None
    dp_rank: DpRank | None = None
    allowed: frozenset[WorkerId] | None = None
    excluded: frozenset[WorkerId] = frozenset()
    phase: Role | None = None
    required_taints: frozenset[str] = frozenset()


def eligible_ranks(workers: dict[WorkerId, Worker], wanted: Wanted) -> list[RankId]:
    """Give the ranks that pass every filter, in order of worker and rank, so that equal costs mean equal candidates on
    every router."""
    ranks: list[RankId] = []
    for worker_id in sorted(workers):
        worker = workers[worker_id]
        if (
            worker.model != wanted.model
            or worker.state is not WorkerState.ACTIVE
            or (wanted.worker_id is not None and worker_id != wanted.worker_id)
            or (wanted.allowed is not None and worker_id not in wanted.allowed)
            or worker_id in wanted.excluded
            or (wanted.phase is not None and worker.role not in (Role.BOTH, wanted.phase))
            or not wanted.required_taints.issubset(worker.taints)
        ):
            continue
        ranks.extend(rank for rank in worker.ranks() if wanted.dp_rank is None or rank.dp_rank == wanted.dp_rank)
    return ranks


class Refusal(enum.StrEnum):
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


def refusals(workers: Iterable[Worker], wanted: Wanted, silent: Set[RankId]) -> dict[Refusal, int]:
    """Count the ranks that do not pass, each by the first filter that takes it out; for whoever finds that none passes.

    The filters are those of `eligible_ranks`, which every request goes through and which says of none why.
    """
    counts: Counter[Refusal] = Counter()
    for worker in workers:
        refusal = _refusal_of(worker, wanted)
        for rank in worker.ranks():
            if refusal is not None:
                counts[refusal] += 1
            elif wanted.dp_rank is not None and rank.dp_rank != wanted.dp_rank:
                counts[Refusal.OTHER_DP_RANK] += 1
            elif rank in silent:
                counts[Refusal.SILENT] += 1
    return {refusal: counts[refusal] for refusal in Refusal if counts[refusal]}


def _refusal_of(worker: Worker, wanted: Wanted) -> Refusal | None:
    if worker.model != wanted.model:
        return Refusal.OTHER_MODEL
    if worker.state is not WorkerState.ACTIVE:
        return Refusal.CORDONED
    if wanted.worker_id is not None and worker.worker_id != wanted.worker_id:
        return Refusal.OTHER_WORKER
    if wanted.allowed is not None and worker.worker_id not in wanted.allowed:
        return Refusal.NOT_ALLOWED
    if worker.worker_id in wanted.excluded:
        return Refusal.EXCLUDED
    if wanted.phase is not None and worker.role not in (Role.BOTH, wanted.phase):
        return Refusal.OTHER_ROLE
    return None if wanted.required_taints.issubset(worker.taints) else Refusal.TAINTS_MISSING

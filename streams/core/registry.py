"""Workers as the registry knows them, and which of their ranks a request may go to.

What lives here: the worker's record and the filters that come before cost. What must not: Kafka, HTTP.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
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

"""Workers as the registry knows them.

What lives here: the worker's record. What must not: Kafka, HTTP, and which workers a request may go to
(routing.eligibility).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

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

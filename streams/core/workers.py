"""Workers, cordons, avoidances and models as the registry has them.

What lives here: the records of the registry as values. What must not: Kafka, HTTP, which workers a request may go to
(routing.eligibility), and who may write a model's record (model_registry).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter

from streams.core.ids import DpRank, RankId, WorkerId
from streams.errors import InvalidRequest

#: Device class of workers without an accelerator. Mode device-aware-weighted treats all other classes alike.
CPU_CLASS = "cpu"

#: Ranks that a worker may have. The largest deployments run a few hundred, so that a greater number is a mistake.
DP_SIZE_MAX = 4096

#: LoRA adapters that a worker may list, and the characters of a name. Engines that swap adapters serve some hundred.
#: The list is part of every renewal of the worker's lease.
LORA_NAMES_MAX = 1024
LORA_NAME_CHARS_MAX = 512


#: The longest time for which one record makes routers avoid a worker. What fails for longer is removed by other means.
AVOID_MS_MAX = 600_000


class Role(enum.StrEnum):
    """Which phases of a request a worker serves."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.StrEnum):
    """Whether a worker gets new requests.

    A cordon is a record of its own. A router shows it here; in a worker's record, only earlier versions wrote it.
    """

    ACTIVE = "active"
    CORDONED = "cordoned"


@dataclass(frozen=True, slots=True)
class BridgeLease:
    """The bridge that feeds a worker's events, and how long its lease is valid (the rules are in engines.lease).

    renewal: counts this bridge's writes, so that a copy of the lease, as a cordon writes it, is not taken for a
    renewal.
    """

    bridge: str
    term: int
    lease_ms: int
    renewal: int


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine.

    kv_total_blocks: capacity of each rank's cache, if known. lora_names: the LoRA adapters that it serves; None if they
    are not listed, so that it may serve any. lease: its bridge's, if it has a bridge.
    """

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
    lora_names: tuple[str, ...] | None = None
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    registered_at_ms: int = 0
    lease: BridgeLease | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidRequest(f"worker {self.worker_id}: block_size is {self.block_size}, but must be at least 1")
        if not 1 <= self.dp_size <= DP_SIZE_MAX:
            raise InvalidRequest(f"worker {self.worker_id}: dp_size is {self.dp_size}, but must be 1 to {DP_SIZE_MAX}")
        if not self.model:
            raise InvalidRequest(f"worker {self.worker_id}: model is empty")

    def may_serve(self, lora_name: str | None) -> bool:
        """Whether requests for an adapter may go to this worker. None and "" stand for the model itself."""
        return not lora_name or self.lora_names is None or lora_name in self.lora_names

    def ranks(self) -> Iterator[RankId]:
        """The worker's ranks, in order."""
        return (RankId(self.worker_id, DpRank(rank)) for rank in range(self.dp_size))


#: Every field of a worker except those that the renewal of a lease changes.
_KEPT_BY_A_RENEWAL = attrgetter(
    *(field.name for field in fields(Worker) if field.name not in ("lease", "registered_at_ms"))
)


def differs_in_lease_only(before: Worker, after: Worker) -> bool:
    """Whether two records of a worker differ in nothing but its lease and its time of registration, or not at all."""
    same: bool = _KEPT_BY_A_RENEWAL(before) == _KEPT_BY_A_RENEWAL(after)
    return same


@dataclass(frozen=True, slots=True)
class Cordon:
    """A mark that keeps new requests from a worker. It outlives registrations of the worker, until it is deleted."""

    worker_id: WorkerId
    cordoned_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Avoidance:
    """A mark that requests avoid a worker for `ttl_ms`, since one that was sent there has failed.

    avoided_at_ms: by the clock of the router that wrote it. It identifies the mark; readers count `ttl_ms` from when
    they read it.
    """

    worker_id: WorkerId
    avoided_at_ms: int
    ttl_ms: int

    def __post_init__(self) -> None:
        if not 1 <= self.ttl_ms <= AVOID_MS_MAX:
            raise InvalidRequest(
                f"worker {self.worker_id} is avoided for {self.ttl_ms} ms, but it must be 1 to {AVOID_MS_MAX}"
            )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all processes of a scope must agree on about a model. writer: who wrote the record, shown to people."""

    name: str
    block_size: int
    writer: str = ""
    written_at_ms: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidRequest(f"model {self.name}: block_size is {self.block_size}, but must be at least 1")
        if not self.name:
            raise InvalidRequest("a model's name is empty")

"""One request as routing sees it: its prompt, the policy, and what a router knows of the ranks that may serve it.

What lives here: `RoutingRequest`, the one value from which a decision is made, and its parts. What must not: how a
choice is made of it (decision), the loads, which change with every booking (core.loads), and HTTP.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import RankId, WorkerId
from streams.core.index.interface import PrefixScores
from streams.core.routing.busy import BlocksOf
from streams.core.routing.cost import CXL_SCORE_WEIGHT, MOE_SCORE_WEIGHT, RECENT_PREFILL_WEIGHT, TIER_WEIGHTS
from streams.core.routing.policies.engine_reports import MODES as POLICY_MODES
from streams.core.routing.selection import CUDA_TO_CPU_RATIO, NAMED_MODES, RouterMode
from streams.core.routing.supplementary import SupplementaryMatches
from streams.core.routing.trust import TrustSnapshot
from streams.errors import KvStreamsError

#: Modes whose choice depends on what ranks hold, unless the weight is 0.
_OVERLAP_MODES = frozenset({RouterMode.KV, *NAMED_MODES, *POLICY_MODES})

#: Modes whose choice depends on what engines report, or on the workers' devices.
_FLEET_MODES = frozenset({RouterMode.DEVICE_AWARE_WEIGHTED, *NAMED_MODES, *POLICY_MODES})

NO_SCORES = PrefixScores({})


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """What decides between ranks that can all serve the request.

    temperature: used in mode kv only. cxl_score_weight: weight of a block that a rank reaches in a CXL pool.
    moe_score_weight: additional weight of a cached block whose labels match. track_active_blocks: whether decode blocks
    are part of the cost. name: of the policy, in mode policy. overlap_credit: how many blocks of prefill load a cached
    block takes off a rank's cost; above 1, also those of the requests before it. request_weight: in blocks, for each
    request in flight. Both are parts of the cost in mode kv, where they are what NVIDIA Dynamo calls overlap score
    credit and decode active request weight. recent_prefill_weight: how much more own prefill costs on the rank that was
    given the most tokens to compute lately; in mode kv, and in expected-time by its parameters.
    """

    mode: RouterMode = RouterMode.KV
    overlap_score_weight: float = 1.0
    temperature: float = 0.0
    tier_weights: tuple[float, ...] = TIER_WEIGHTS
    cxl_score_weight: float = CXL_SCORE_WEIGHT
    moe_score_weight: float = MOE_SCORE_WEIGHT
    track_active_blocks: bool = True
    cuda_to_cpu_ratio: float = CUDA_TO_CPU_RATIO
    name: str = ""
    overlap_credit: float = 1.0
    request_weight: float = 0.0
    recent_prefill_weight: float = RECENT_PREFILL_WEIGHT

    @property
    def policy_name(self) -> str:
        """The name by which the policy of this mode is found; empty in modes without one."""
        if self.mode is RouterMode.POLICY:
            return self.name
        return self.mode.value if self.mode in NAMED_MODES else ""

    @property
    def reads_index(self) -> bool:
        """Whether overlap can change the choice."""
        return self.mode in _OVERLAP_MODES and self.overlap_score_weight > 0.0

    @property
    def counts_unreported(self) -> bool:
        """Whether bookings that the engines' reports cannot contain yet are added to these reports."""
        return self.mode in POLICY_MODES

    @property
    def reads_fleet(self) -> bool:
        """Whether a choice uses the FleetState."""
        return self.mode in _FLEET_MODES


@dataclass(frozen=True, slots=True)
class FleetState:
    """What some modes read about the ranks' engines.

    metrics: the last report of each rank. cpu_workers: workers whose device class is `cpu`. blocks_of: how many
    blocks ranks have and use; unlike the other fields, it follows later reports. received_ms: when the last reports
    were received, if `RoutePolicy.counts_unreported`.
    """

    metrics: Mapping[RankId, WorkerMetrics] = field(default_factory=dict)
    cpu_workers: Set[WorkerId] = frozenset()
    blocks_of: BlocksOf | None = None
    received_ms: Mapping[RankId, int] | None = None


NO_FLEET_STATE = FleetState()


class PromptBlocks(NamedTuple):
    """The prompt of a request, in blocks.

    sequence: its sequence hashes, packed as in its booking. n_tokens: its length. request_blocks: its length in blocks,
    including a partial last one. block_size: tokens per block. expected_output_tokens: from the client.
    """

    sequence: bytes
    n_tokens: int
    request_blocks: int
    block_size: int
    model: str = ""
    expected_output_tokens: int | None = None


class Matches(NamedTuple):
    """The ranks that may serve a request, and what they hold of it. It is found again while the request waits.

    ranks: those that pass every filter; busy thresholds are checked later. Passing the same tuple again, or a selection
    from it, saves time, since what follows from it is cached. scores, supplementary: what the ranks hold. predicted:
    ranks whose score is a prediction. snapshot: what the trust in the scores depends on; None if the index was not
    read. refusal: why there are no ranks. moe_filter_applied: whether only ranks with matching labels are left; None if
    the request does not ask for that.
    """

    ranks: Sequence[RankId]
    scores: PrefixScores = NO_SCORES
    predicted: Set[RankId] = frozenset()
    supplementary: SupplementaryMatches | None = None
    snapshot: TrustSnapshot | None = None
    refusal: KvStreamsError | None = None
    moe_filter_applied: bool | None = None


class LabelUse(enum.Enum):
    """How a request uses labels of blocks: not at all, as a preference, or as a requirement."""

    NONE = enum.auto()
    PREFERRED = enum.auto()
    REQUIRED = enum.auto()


class RoutingRequest(NamedTuple):
    """One request, and what a router knows of the ranks for it. It is a tuple because one is made for every request.

    session: requests with the same one go to the same rank; None for no session.
    """

    policy: RoutePolicy
    prompt: PromptBlocks
    matches: Matches
    fleet: FleetState = NO_FLEET_STATE
    session: Hashable | None = None
    labels: LabelUse = LabelUse.NONE

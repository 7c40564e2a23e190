"""One routing decision: candidates, their costs, the choice.

What lives here: the composition that the live router and the offline simulator share, so that both follow one policy.
What must not: booking (the caller's), HTTP, time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import RankId, WorkerId
from streams.core.index.interface import Candidates, OverlapScores
from streams.core.loads.bookings import ActiveLoads, Booking
from streams.core.routing.cost import (
    CXL_SCORE_WEIGHT,
    MOE_SCORE_WEIGHT,
    TIER_WEIGHTS,
    RankTerms,
    TermColumns,
    prefill_tokens,
)
from streams.core.routing.policies import hit_usage_waiting, load_deviation
from streams.core.routing.pricing import price
from streams.core.routing.selection import (
    CUDA_TO_CPU_RATIO,
    Rng,
    RoundRobin,
    RouterMode,
    select_by_cost,
    select_device_aware,
    select_least_loaded,
    select_lowest,
    select_power_of_two,
    select_random,
)
from streams.core.routing.supplementary import SupplementaryMatches
from streams.errors import AllWorkersBusy

#: Modes whose choice depends on what ranks hold, as long as the weight is not 0.
_OVERLAP_MODES = frozenset({RouterMode.KV, RouterMode.HIT_USAGE_WAITING, RouterMode.LOAD_DEVIATION})


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """What decides between ranks that may all serve the request.

    track_active_blocks: whether decode blocks are part of the cost. temperature counts in mode kv. cxl_score_weight,
    moe_score_weight: of a block that a rank reaches in a CXL pool, and of a cached one whose labels match.
    """

    mode: RouterMode = RouterMode.KV
    overlap_score_weight: float = 1.0
    temperature: float = 0.0
    tier_weights: tuple[float, ...] = TIER_WEIGHTS
    cxl_score_weight: float = CXL_SCORE_WEIGHT
    moe_score_weight: float = MOE_SCORE_WEIGHT
    track_active_blocks: bool = True
    cuda_to_cpu_ratio: float = CUDA_TO_CPU_RATIO

    @property
    def reads_index(self) -> bool:
        """Whether overlap can change the choice."""
        return self.mode in _OVERLAP_MODES and self.overlap_score_weight > 0.0


@dataclass(frozen=True, slots=True)
class FleetState:
    """What some modes want to know of the ranks' engines. cpu_workers: workers whose device class is `cpu`."""

    metrics: Mapping[RankId, WorkerMetrics] = field(default_factory=dict)
    cpu_workers: Set[WorkerId] = frozenset()


_NOTHING_KNOWN = FleetState()

#: Tuples of candidates of which it is kept where their numbers are found, as many as there are models and filters in
#: use at a time; beyond it all are forgotten. 64 ranks take 20 us to be looked up anew.
_CANDIDATES_CACHED_MAX = 256


class Decision:
    """The choice, and every candidate's terms. preferred: False where the mode had nothing to go by and chose as
    least-loaded would, or by lot; its answer is `fallback`."""

    __slots__ = ("_columns", "chosen", "preferred")

    def __init__(self, columns: TermColumns, index: int, preferred: bool) -> None:
        self._columns = columns
        self.chosen: RankTerms = columns.row(index)
        self.preferred = preferred

    @property
    def candidates(self) -> tuple[RankTerms, ...]:
        """Terms in the candidates' order, made when they are asked for."""
        return tuple(self._columns.row(index) for index in range(len(self._columns)))


class _CandidateColumns:
    """Where the candidates' loads and overlaps are found; `rows` are good for `numbering` of `loads`."""

    __slots__ = ("candidates", "loads", "numbering", "rows")

    def __init__(self, candidates: Candidates, loads: ActiveLoads) -> None:
        self.candidates = candidates
        self.loads = loads
        self.numbering = -1
        self.rows = np.empty(0, dtype=np.int64)


class Chooser:
    """Chooses ranks; its only state is whose turn it is and the generator it was given."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._turns = RoundRobin()
        self._located: dict[
            int, _CandidateColumns
        ] = {}  # by the identity of the candidates, which are kept so that it stays theirs

    def choose(
        self,
        policy: RoutePolicy,
        ranks: Sequence[RankId],
        scores: OverlapScores,
        loads: ActiveLoads,
        *,
        sequence: bytes,
        request_blocks: int,
        block_size: int,
        fleet: FleetState = _NOTHING_KNOWN,
        supplementary: SupplementaryMatches | None = None,
    ) -> Decision:
        """Choose one of `ranks`, which must not be empty; a tuple that comes again takes less time. Raises
        AllWorkersBusy.

        sequence: the request's sequence hashes, packed as in its booking. request_blocks: its length in blocks, a
        partial last one included. beside: what is pooled and labelled of it, None for nothing.
        """
        located = self._columns_of(ranks, loads)
        n = len(ranks)
        if policy.reads_index:
            overlap, effective = scores.columns(located.candidates, policy.tier_weights)
        else:
            overlap, effective = np.zeros(n, np.int64), np.zeros(n)
        cached, cxl, moe = effective, None, None
        if supplementary is not None and policy.reads_index:
            weighed = supplementary.weigh(
                located.candidates, overlap, effective, policy.cxl_score_weight, policy.moe_score_weight
            )
            if weighed is not None:
                cxl, moe, cached, effective = weighed[:4]
        columns, first, n_lowest = price(
            ranks,
            loads,
            located.rows,
            sequence=sequence,
            request_blocks=request_blocks,
            scores=overlap,
            effective_cached_blocks=effective,
            block_size=block_size,
            overlap_score_weight=policy.overlap_score_weight,
            track_active_blocks=policy.track_active_blocks,
            cached_blocks=cached,
            cxl_accessible_scores=cxl,
            moe_scores=moe,
        )
        rng = self._rng
        preferred = True
        match policy.mode:
            case RouterMode.KV if policy.temperature:
                index = select_by_cost(columns.cost.tolist(), policy.temperature, rng)
            case RouterMode.KV:
                index = select_lowest(columns.cost, first, n_lowest, rng)
            case RouterMode.ROUND_ROBIN:
                index = self._turns.select(n)
            case RouterMode.RANDOM:
                index = select_random(n, rng)
            # Direct: the request has named its worker, and what is left to choose are that worker's ranks.
            case RouterMode.LEAST_LOADED | RouterMode.DIRECT:
                index = select_least_loaded(loads.requests(located.rows), rng)
            case RouterMode.POWER_OF_TWO:
                index = select_power_of_two(loads.requests(located.rows), rng)
            case RouterMode.DEVICE_AWARE_WEIGHTED:
                on_cpu = [rank.worker_id in fleet.cpu_workers for rank in ranks]
                index = select_device_aware(loads.requests(located.rows), on_cpu, policy.cuda_to_cpu_ratio, rng)
            case RouterMode.HIT_USAGE_WAITING | RouterMode.LOAD_DEVIATION:
                in_flight = loads.requests(located.rows)
                index, preferred = self._choose_by_policy(policy.mode, columns, request_blocks, in_flight, fleet)
        return Decision(columns, index, preferred)

    def _columns_of(self, ranks: Sequence[RankId], loads: ActiveLoads) -> _CandidateColumns:
        located = self._located.get(id(ranks))
        if located is None or located.loads is not loads:
            located = _CandidateColumns(Candidates(ranks), loads)
            if isinstance(ranks, tuple):  # a list may hold others the next time
                if len(self._located) >= _CANDIDATES_CACHED_MAX:
                    self._located.clear()
                self._located[id(ranks)] = located
        if located.numbering != loads.numbering:
            located.numbering, located.rows = loads.numbering, loads.rows_of(ranks)
        return located

    def _choose_by_policy(
        self, mode: RouterMode, columns: TermColumns, request_blocks: int, in_flight: list[int], fleet: FleetState
    ) -> tuple[int, bool]:
        metrics = [fleet.metrics.get(rank) for rank in columns.ranks]
        blocks = max(1, request_blocks)
        if mode is RouterMode.HIT_USAGE_WAITING:
            costs = hit_usage_waiting((columns.effective_cached_blocks / blocks).tolist(), metrics)
            if costs is None:
                return select_random(len(columns), self._rng), False
        else:
            costs = load_deviation((columns.own_prefill_blocks / blocks).tolist(), metrics)
            if costs is None:
                return select_least_loaded(in_flight, self._rng), False
            if min(costs) == math.inf:
                raise AllWorkersBusy(
                    f"all {len(costs)} ranks that may serve the request say that they are full",
                    remedy="Try again, or add workers",
                    ranks=len(costs),
                )
        columns.cost = costs
        return select_by_cost(costs, 0.0, self._rng), True


def booking_of(
    chosen: RankTerms,
    *,
    model: str,
    sequence: bytes,
    n_tokens: int,
    request_blocks: int,
    block_size: int,
    expected_output_tokens: int | None = None,
) -> Booking:
    """What the chosen rank is to be charged: tokens that it must compute, and the request's blocks."""
    return Booking(
        rank=chosen.rank,
        model=model,
        prefill_tokens=prefill_tokens(n_tokens, chosen.cached_blocks, block_size),
        sequence=sequence,
        overlap_blocks=chosen.scores,
        request_blocks=request_blocks,
        expected_output_tokens=expected_output_tokens,
    )

"""One routing decision: candidates, their costs, the choice.

What lives here: the composition that the live router and the offline simulator share, so that both follow the same
policy. What must not: booking (the caller books), HTTP, time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
import numpy.typing as npt

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import Int64Array, RankId, WorkerId
from streams.core.index.interface import Candidates, OverlapScores
from streams.core.loads.bookings import ActiveLoads, Booking
from streams.core.loads.observations import NO_FORECAST, Forecast
from streams.core.routing.by_policy import PolicyColumns, price_by
from streams.core.routing.cost import (
    CXL_SCORE_WEIGHT,
    MOE_SCORE_WEIGHT,
    TIER_WEIGHTS,
    RankTerms,
    TermColumns,
    prefill_tokens,
)
from streams.core.routing.eligibility import base_of
from streams.core.routing.identity_cache import IdentityCache
from streams.core.routing.policies import MODES as POLICY_MODES
from streams.core.routing.policies import hit_rates, hit_usage_waiting, load_deviation
from streams.core.routing.policies.interface import Policy
from streams.core.routing.policies.registry import built_in_policy
from streams.core.routing.pricing import NO_PREFERENCE, price
from streams.core.routing.selection import (
    CUDA_TO_CPU_RATIO,
    NAMED_MODES,
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

#: Modes whose choice depends on what ranks hold, unless the weight is 0.
_OVERLAP_MODES = frozenset({RouterMode.KV, *NAMED_MODES, *POLICY_MODES})

#: A policy by its name.
Policies = Callable[[str], Policy]

#: Observations that policies learn from under one lock.
LEARNT_TOGETHER_MAX = 64


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """What decides between ranks that can all serve the request.

    temperature: used in mode kv only. cxl_score_weight: weight of a block that a rank reaches in a CXL pool.
    moe_score_weight: additional weight of a cached block whose labels match. track_active_blocks: whether decode blocks
    are part of the cost. name: of the policy, in mode policy. overlap_credit: how many blocks of prefill load a cached
    block takes off a rank's cost; above 1, also those of the requests before it. request_weight: in blocks, for each
    request in flight. Both are parts of the cost in mode kv, where they are what NVIDIA Dynamo calls overlap score
    credit and decode active request weight.
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
    def reads_metrics(self) -> bool:
        """Whether what engines report can change the choice."""
        return self.mode in POLICY_MODES

    @property
    def reads_fleet(self) -> bool:
        """Whether a choice uses the FleetState: reports, or the workers' devices."""
        return self.mode is RouterMode.DEVICE_AWARE_WEIGHTED or self.mode in POLICY_MODES


@dataclass(frozen=True, slots=True)
class FleetState:
    """What some modes read about the ranks' engines. cpu_workers: workers whose device class is `cpu`."""

    metrics: Mapping[RankId, WorkerMetrics] = field(default_factory=dict)
    cpu_workers: Set[WorkerId] = frozenset()


_NOTHING_REPORTED = FleetState()


class Decision:
    """The choice, and every candidate's terms.

    columns, index: the candidates' terms, and the position of the chosen one among them. Costs and terms never change,
    but PolicyColumns.row reads loads that do. preferred: False if the mode had nothing to choose by and fell back to
    least-loaded or random; the answer is then `fallback`.
    """

    __slots__ = ("chosen", "columns", "index", "preferred")

    def __init__(self, columns: TermColumns | PolicyColumns, index: int, preferred: bool) -> None:
        self.columns = columns
        self.index = index
        self.chosen: RankTerms = columns.row(index)
        self.preferred = preferred

    @property
    def candidates(self) -> tuple[RankTerms, ...]:
        """Every candidate's terms, in the candidates' order. The tuple is built on each call."""
        return self.columns.rows()

    def forecast(self) -> Forecast:
        """What the policy expects of the request on the chosen rank; call it before the loads change."""
        columns = self.columns
        return columns.forecast(self.index) if isinstance(columns, PolicyColumns) else NO_FORECAST


class _CandidateColumns:
    """The positions of candidates in an index's answer and in the table of loads.

    rows: int64[n], the candidates' rows in `loads`; valid as long as `loads.numbering` equals `numbering`.
    """

    __slots__ = ("_cpu_workers", "_on_cpu", "candidates", "loads", "numbering", "rows")

    def __init__(self, candidates: Candidates, loads: ActiveLoads) -> None:
        self.candidates = candidates
        self.loads = loads
        self.numbering = -1
        self.rows = np.empty(0, dtype=np.int64)
        self._cpu_workers: Set[WorkerId] | None = None
        self._on_cpu = np.empty(0, dtype=np.bool_)

    def on_cpu(self, cpu_workers: Set[WorkerId]) -> npt.NDArray[np.bool_]:
        """Whether each candidate belongs to one of these workers; the same set as before costs nothing."""
        if self._cpu_workers is not cpu_workers:
            self._on_cpu = np.array([rank.worker_id in cpu_workers for rank in self.candidates.ranks], dtype=np.bool_)
            self._cpu_workers = cpu_workers
        return self._on_cpu


class Chooser:
    """Chooses ranks. Its only state is whose turn it is, the given generator, and caches."""

    def __init__(self, rng: Rng, policies: Policies = built_in_policy) -> None:
        """policies: finds a policy by name, for the modes that have one; raises SettingsError."""
        self._rng = rng
        self._find_policy = policies
        self._policies: dict[str, Policy] = {}
        self._turns = RoundRobin()
        # Looking up 64 ranks takes 20 us.
        self._cached_columns: IdentityCache[_CandidateColumns] = IdentityCache()

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
        n_tokens: int | None = None,
        fleet: FleetState = _NOTHING_REPORTED,
        supplementary: SupplementaryMatches | None = None,
        model: str = "",
        capacity_blocks: Int64Array | None = None,
        expected_output_tokens: int | None = None,
    ) -> Decision:
        """Choose one of `ranks`, which must not be empty.

        Passing the same tuple again, or a selection from it, saves time, since what follows from it is cached.

        sequence: the request's sequence hashes, packed as in its booking. request_blocks: its length in blocks,
        including a partial last one. n_tokens: its length in tokens; if it is left out, all blocks are full. fleet:
        what engines report, and what was booked since. supplementary: its supplementary matches, or None. model,
        capacity_blocks, expected_output_tokens: as in policies.interface.Situation, for policies found by name. Raises
        AllWorkersBusy.
        """
        base, at = base_of(ranks)
        found = self._columns_of(base, loads)
        rows = found.rows if at is None else found.rows[at]
        if policy.mode in NAMED_MODES:
            priced = price_by(
                self.policy(policy.policy_name),
                ranks,
                found.candidates,
                at,
                rows,
                scores if policy.reads_index else None,
                loads,
                sequence=sequence,
                request_blocks=request_blocks,
                n_tokens=n_tokens or request_blocks * block_size,
                block_size=block_size,
                model=model,
                capacity_blocks=capacity_blocks,
                expected_output_tokens=expected_output_tokens,
                supplementary=supplementary,
                label_weight=policy.moe_score_weight,
                metrics=fleet.metrics,
            )
            costs, best = priced.cost, priced.prices.best
            return Decision(
                priced,
                select_by_cost(costs, 0.0, self._rng) if best is None else select_lowest(costs, *best, self._rng),
                True,
            )
        n = len(ranks)
        if policy.reads_index:
            own_scores, effective = scores.columns(found.candidates, policy.tier_weights)
        else:
            own_scores, effective = np.zeros(len(base), np.int64), np.zeros(len(base))
        weighed = None
        if supplementary is not None and policy.reads_index:
            weighed = supplementary.weigh(
                found.candidates, own_scores, effective, policy.cxl_score_weight, policy.moe_score_weight
            )
        if at is not None:
            own_scores, effective = own_scores[at], effective[at]
        cached, cxl_accessible_scores, moe_scores, preference = effective, None, None, NO_PREFERENCE
        if weighed is not None:
            if at is not None:
                weighed = weighed.of(at)
            cxl_accessible_scores, moe_scores, cached, effective = weighed[:4]
            # Own prefill is never below 0, so ranks that hold the whole request cost the same whatever their labels
            # are: there, labels decide the tie. With weight 0 labels are not part of the choice.
            if moe_scores is not None and policy.moe_score_weight > 0.0:
                preference = moe_scores
        columns, first, n_lowest = price(
            ranks,
            loads,
            rows,
            sequence=sequence,
            request_blocks=request_blocks,
            scores=own_scores,
            effective_cached_blocks=effective,
            block_size=block_size,
            overlap_score_weight=policy.overlap_score_weight,
            track_active_blocks=policy.track_active_blocks,
            cached_blocks=cached,
            cxl_accessible_scores=cxl_accessible_scores,
            moe_scores=moe_scores,
            preference=preference,
            overlap_credit=policy.overlap_credit,
            request_weight=policy.request_weight,
        )
        rng = self._rng
        preferred = True
        match policy.mode:
            case RouterMode.KV if policy.temperature:
                index = select_by_cost(columns.cost, policy.temperature, rng)
            case RouterMode.KV:
                index = select_lowest(columns.cost, first, n_lowest, rng, preference)
            case RouterMode.ROUND_ROBIN:
                index = self._turns.select(n)
            case RouterMode.RANDOM:
                index = select_random(n, rng)
            # In mode direct the request names its worker, and only that worker's ranks are candidates.
            case RouterMode.LEAST_LOADED | RouterMode.DIRECT:
                index = select_least_loaded(loads.requests(rows), rng)
            case RouterMode.POWER_OF_TWO:
                index = select_power_of_two(loads.requests(rows), rng)
            case RouterMode.DEVICE_AWARE_WEIGHTED:
                on_cpu = found.on_cpu(fleet.cpu_workers)
                if at is not None:
                    on_cpu = on_cpu[at]
                index = select_device_aware(loads.requests(rows), on_cpu, policy.cuda_to_cpu_ratio, rng)
            case RouterMode.HIT_USAGE_WAITING:
                rates = hit_rates(own_scores, n_tokens or request_blocks * block_size, block_size)
                index, preferred = self._by_hit_usage_waiting(columns, rates, fleet)
            case RouterMode.LOAD_DEVIATION:
                rates = hit_rates(own_scores, n_tokens or request_blocks * block_size, block_size)
                index, preferred = self._by_load_deviation(columns, rates, loads.requests(rows), fleet)
            case RouterMode.EXPECTED_TIME | RouterMode.POLICY:
                raise AssertionError(policy.mode)  # they have returned above
            case _:
                assert_never(policy.mode)
        return Decision(columns, index, preferred)

    def policy(self, name: str) -> Policy:
        """The policy of this name, made when it is first used; raises SettingsError."""
        found = self._policies.get(name)
        if found is None:
            found = self._policies[name] = self._find_policy(name)
        return found

    def learn(self, loads: ActiveLoads, block_size_of: Callable[[str], int]) -> int:
        """Let the policies in use learn from some of what happened; return how many observations are left.

        The caller holds the lock of the loads. block_size_of: tokens per block of a model.
        """
        observations = loads.observations
        if not observations:
            return 0
        some = [observations.popleft() for _ in range(min(LEARNT_TOGETHER_MAX, len(observations)))]
        for policy in self._policies.values():
            policy.observe(some, block_size_of)
        return len(observations)

    def rows_of(self, ranks: Sequence[RankId], loads: ActiveLoads) -> Int64Array:
        """Return the rows of these candidates' loads, int64[n], as ActiveLoads.rows_of does; cached for a tuple."""
        base, at = base_of(ranks)
        rows = self._columns_of(base, loads).rows
        return rows if at is None else rows[at]

    def includes(self, ranks: Sequence[RankId], rank: RankId, loads: ActiveLoads) -> bool:
        """Whether a rank is one of these candidates, without comparing it with each of them if they are a tuple."""
        base, at = base_of(ranks)
        position = self._columns_of(base, loads).candidates.position.get(rank)
        if position is None or at is None:
            return position is not None
        found = int(at.searchsorted(position))
        return found < len(at) and at.item(found) == position

    def _columns_of(self, ranks: Sequence[RankId], loads: ActiveLoads) -> _CandidateColumns:
        found = self._cached_columns.get(ranks) if isinstance(ranks, tuple) else None
        if found is None or found.loads is not loads:
            found = _CandidateColumns(Candidates(ranks), loads)
            if isinstance(ranks, tuple):  # the contents of a list may change
                self._cached_columns.put(ranks, found)
        if found.numbering != loads.numbering:
            found.numbering, found.rows = loads.numbering, loads.rows_of(ranks)
        return found

    def _by_hit_usage_waiting(self, columns: TermColumns, rates: list[float], fleet: FleetState) -> tuple[int, bool]:
        """Return the index of the choice, and whether there was a preference."""
        metrics = [fleet.metrics.get(rank) for rank in columns.ranks]
        costs = hit_usage_waiting(rates, metrics)
        if costs is None:
            return select_random(len(columns), self._rng), False
        columns.cost = costs
        return select_by_cost(costs, 0.0, self._rng), True

    def _by_load_deviation(
        self, columns: TermColumns, rates: list[float], in_flight: list[int], fleet: FleetState
    ) -> tuple[int, bool]:
        """Return the index of the choice, and whether there was a preference. Raises AllWorkersBusy."""
        metrics = [fleet.metrics.get(rank) for rank in columns.ranks]
        costs = load_deviation([1.0 - rate for rate in rates], metrics)
        if costs is None:
            return select_least_loaded(in_flight, self._rng), False
        if min(costs) == math.inf:
            raise AllWorkersBusy(
                f"all {len(costs)} ranks that pass the request's filters are full, by what their engines reported last "
                "and what was booked since",
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
    phase: str | None = None,
    forecast: Forecast = NO_FORECAST,
) -> Booking:
    """Return what the chosen rank is charged: the tokens that it must compute, and the request's blocks."""
    return Booking(
        rank=chosen.rank,
        model=model,
        prefill_tokens=prefill_tokens(n_tokens, chosen.cached_blocks, block_size),
        sequence=sequence,
        overlap_blocks=chosen.scores,
        request_blocks=request_blocks,
        expected_output_tokens=expected_output_tokens,
        phase=phase,
        forecast=forecast,
    )

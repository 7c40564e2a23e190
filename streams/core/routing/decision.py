"""One routing decision: candidates, their costs, the choice.

What lives here: the composition that the live router and the laboratory share, so that both follow the same policy.
What must not: changing the loads (the caller books), HTTP, and clocks (time is an argument).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, assert_never

import numpy as np

from streams.core.engine_metrics import WorkerMetrics, with_bookings
from streams.core.ids import RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads, Booking
from streams.core.loads.observations import NO_FORECAST, Forecast
from streams.core.routing.busy import BlocksOf, BusyThresholds, idle_ranks
from streams.core.routing.by_policy import PolicyColumns, price_by
from streams.core.routing.candidate_columns import ColumnsCache, SelectedColumns
from streams.core.routing.cost import RankTerms, TermColumns, prefill_tokens
from streams.core.routing.eligibility import RankSelection, base_of
from streams.core.routing.policies.engine_reports import hit_rates, hit_usage_waiting, load_deviation
from streams.core.routing.policies.interface import Policy
from streams.core.routing.policies.registry import built_in_policy
from streams.core.routing.pricing import Priced, held_blocks, price
from streams.core.routing.request import (
    FleetState,
    LabelUse,
    Matches,
    PromptBlocks,
    RoutePolicy,
    RoutingRequest,
)
from streams.core.routing.selection import (
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
from streams.core.routing.sessions import SessionAffinity
from streams.core.routing.trust import FALLBACK, AnswerMode, Trust
from streams.core.routing.unreported import UnreportedLoad
from streams.errors import AllWorkersBusy

__all__ = ["Chooser", "Decision", "FleetState", "Matches", "Policies", "PromptBlocks", "RoutePolicy", "RoutingRequest"]

#: A policy by its name.
Policies = Callable[[str], Policy]

#: Returns what was booked on ranks since their engines' reports, which were received at these times.
Unreported = Callable[[Mapping[RankId, int]], Mapping[RankId, UnreportedLoad]]

#: Observations that policies learn from under one lock.
LEARNT_TOGETHER_MAX = 64


class Assess(Protocol):
    """Tells how far ranks can be trusted. pooled: the model, if pooled blocks count. labelled: whether labels do."""

    def __call__(self, ranks: Sequence[RankId], matches: Matches, *, pooled: str | None, labelled: bool) -> Trust:
        """Return the least trust that any of these ranks deserves."""


class Decision:
    """The choice, and every candidate's terms.

    columns, index: the candidates' terms, and the position of the chosen one among them. Costs and terms never change,
    but PolicyColumns.row reads loads that do. preferred: False if the mode had nothing to choose by and fell back to
    least-loaded or random; the answer is then `fallback`.
    """

    __slots__ = ("chosen", "columns", "index", "preferred", "request")

    def __init__(
        self, request: RoutingRequest, columns: TermColumns | PolicyColumns, index: int, preferred: bool = True
    ) -> None:
        self.request = request
        self.columns = columns
        self.index = index
        self.chosen: RankTerms = columns.row(index)
        self.preferred = preferred

    @property
    def candidates(self) -> tuple[RankTerms, ...]:
        """Every candidate's terms, in the candidates' order. The tuple is built on each call."""
        return self.columns.rows()

    def alternatives(self, n: int) -> tuple[RankId, ...]:
        """Return up to n further candidates in the order of their costs, each on another worker."""
        found: dict[WorkerId, RankId] = {}
        for index in np.argsort(self.columns.cost, kind="stable").tolist():
            rank = self.columns.ranks[index]
            if rank.worker_id != self.chosen.rank.worker_id and rank.worker_id not in found:
                if len(found) == n:
                    break
                found[rank.worker_id] = rank
        return tuple(found.values())

    def forecast(self) -> Forecast:
        """What the policy expects of the request on the chosen rank; call it before the loads change."""
        columns = self.columns
        return columns.forecast(self.index) if isinstance(columns, PolicyColumns) else NO_FORECAST

    def booking(self, phase: str | None = None) -> Booking:
        """What the chosen rank is charged: the tokens that it must compute, and the request's blocks.

        Call it before the loads change. phase: the part of the request that the booking is for; None for all of it.
        """
        prompt, chosen = self.request.prompt, self.chosen
        return Booking(
            rank=chosen.rank,
            model=prompt.model,
            prefill_tokens=prefill_tokens(prompt.n_tokens, chosen.cached_blocks, prompt.block_size),
            sequence=prompt.sequence,
            overlap_blocks=chosen.scores,
            request_blocks=prompt.request_blocks,
            expected_output_tokens=prompt.expected_output_tokens,
            phase=phase,
            forecast=self.forecast(),
        )

    def trust(self, assess: Assess) -> tuple[Trust, Trust]:
        """Return the least trust that any eligible rank deserves, and that of the chosen rank alone.

        For the chosen rank, pooled blocks and labels limit trust only if its own score is made of them.
        """
        request, chosen = self.request, self.chosen
        matches, model = request.matches, request.prompt.model
        if not self.preferred or matches.snapshot is None:
            return FALLBACK, FALLBACK
        labelled = request.labels is not LabelUse.NONE
        pooled = model if request.policy.cxl_score_weight > 0.0 else None
        trust = assess(matches.ranks, matches, pooled=pooled, labelled=labelled)
        if trust.mode is AnswerMode.EXACT:  # then it is exact for each of them
            return trust, trust
        labelled = request.labels is LabelUse.REQUIRED or (labelled and chosen.moe_scores > 0)
        pooled = model if chosen.cxl_accessible_scores > 0 else None
        return trust, assess(self._chosen_alone(), matches, pooled=pooled, labelled=labelled)

    def _chosen_alone(self) -> Sequence[RankId]:
        """The chosen rank, as a selection from the candidates, whose columns are cached."""
        base, positions = base_of(self.columns.ranks)
        if not isinstance(base, tuple):
            return [self.chosen.rank]
        position = self.index if positions is None else positions.item(self.index)
        return RankSelection(base, np.array([position], dtype=np.int64))


class Chooser:
    """Chooses ranks. Its state is whose turn it is, the given generator, sessions, and caches."""

    def __init__(
        self,
        rng: Rng,
        policies: Policies = built_in_policy,
        thresholds: BusyThresholds | None = None,
        sessions: SessionAffinity | None = None,
        unreported: Unreported | None = None,
    ) -> None:
        """policies: finds a policy by name, for the modes that have one; raises SettingsError. thresholds: ranks above
        them get no requests. sessions: to which ranks sessions are bound. unreported: see `Unreported`; it is called
        under the lock of the loads."""
        self._rng = rng
        self._find_policy = policies
        self._policies: dict[str, Policy] = {}
        self._turns = RoundRobin()
        self._columns = ColumnsCache()
        self._thresholds = BusyThresholds() if thresholds is None else thresholds
        self.sessions = SessionAffinity(0.0) if sessions is None else sessions
        self._unreported = unreported

    def choose(self, request: RoutingRequest, loads: ActiveLoads, now_s: float = 0.0) -> Decision:
        """Choose one of a request's ranks. now_s: for sessions, on a clock that does not go backwards.

        Raises the refusal of `request.matches`, and AllWorkersBusy.
        """
        if request.matches.refusal is not None:
            raise request.matches.refusal
        columns = self._candidates(request, loads, now_s)
        policy, rng = request.policy, self._rng
        if policy.mode in NAMED_MODES:
            priced_by = price_by(self.policy(policy.policy_name), request, columns, loads)
            costs, best = priced_by.cost, priced_by.prices.best
            index = select_by_cost(costs, 0.0, rng) if best is None else select_lowest(costs, *best, rng)
            return Decision(request, priced_by, index)
        held = held_blocks(request, columns)
        priced = price(request, columns, loads, held)
        cost, rows = priced.columns.cost, columns.rows
        match policy.mode:
            case RouterMode.KV if policy.temperature:
                index = select_by_cost(cost, policy.temperature, rng)
            case RouterMode.KV:
                index = select_lowest(cost, priced.first, priced.n_lowest, rng, held.preference)
            case RouterMode.ROUND_ROBIN:
                index = self._turns.select(len(rows))
            case RouterMode.RANDOM:
                index = select_random(len(rows), rng)
            # In mode direct the request names its worker, and only that worker's ranks are candidates.
            case RouterMode.LEAST_LOADED | RouterMode.DIRECT:
                index = select_least_loaded(loads.requests(rows), rng)
            case RouterMode.POWER_OF_TWO:
                index = select_power_of_two(loads.requests(rows), rng)
            case RouterMode.DEVICE_AWARE_WEIGHTED:
                on_cpu = columns.base.on_cpu(request.fleet.cpu_workers)
                on_cpu = on_cpu if columns.positions is None else on_cpu[columns.positions]
                index = select_device_aware(loads.requests(rows), on_cpu, policy.cuda_to_cpu_ratio, rng)
            case RouterMode.HIT_USAGE_WAITING | RouterMode.LOAD_DEVIATION:
                return self._by_reports(request, priced, loads.requests(rows))
            case RouterMode.EXPECTED_TIME | RouterMode.POLICY:
                raise AssertionError(policy.mode)  # they have returned above
            case _:
                assert_never(policy.mode)
        return Decision(request, priced.columns, index)

    def bind(self, request: RoutingRequest, rank: RankId, now_s: float) -> None:
        """Bind a request's session to the rank that it goes to."""
        if request.session is not None:
            self.sessions.bind(request.session, rank, now_s)

    def policy(self, name: str) -> Policy:
        """The policy of this name, made when it is first used; raises SettingsError."""
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies[name] = self._find_policy(name)
        return policy

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

    @property
    def has_thresholds(self) -> bool:
        """Whether ranks can be busy."""
        return bool(self._thresholds)

    def reads_fleet(self, policy: RoutePolicy) -> bool:
        """Whether a choice by a policy uses the FleetState."""
        return policy.reads_fleet or self._thresholds.decode_blocks > 0.0

    def idle(self, ranks: Sequence[RankId], loads: ActiveLoads, blocks_of: BlocksOf | None) -> Sequence[RankId]:
        """Return those of these ranks that are not over a busy threshold."""
        return idle_ranks(ranks, self._thresholds, loads, blocks_of)

    def _candidates(self, request: RoutingRequest, loads: ActiveLoads, now_s: float) -> SelectedColumns:
        """The ranks that are not busy, or the one to which the request's session is bound, if that is among them."""
        ranks = request.matches.ranks
        columns = self._columns.of(ranks, loads)
        if self._thresholds:
            idle = idle_ranks(ranks, self._thresholds, loads, request.fleet.blocks_of, columns.rows)
            if idle is not ranks:
                columns = self._columns.of(idle, loads)
        if not len(columns.rows):
            raise AllWorkersBusy(
                f"all {len(ranks)} ranks that pass the request's filters are busy",
                remedy="Try again; active_decode_blocks_threshold and active_prefill_tokens_threshold define busy",
                ranks=len(ranks),
            )
        if request.session is not None:
            bound = self.sessions.rank_of(request.session, now_s)
            only = None if bound is None else columns.only(bound)
            return columns if only is None else only
        return columns

    def _by_reports(self, request: RoutingRequest, priced: Priced, in_flight: list[int]) -> Decision:
        """Choose in one of the older modes, by what engines report and what was booked since. Raises AllWorkersBusy."""
        columns, prompt = priced.columns, request.prompt
        reported = self._with_unreported(request.fleet)
        metrics = [reported.get(rank) for rank in columns.ranks]
        rates = hit_rates(columns.scores, prompt.n_tokens, prompt.block_size)
        if request.policy.mode is RouterMode.HIT_USAGE_WAITING:
            costs = hit_usage_waiting(rates, metrics)
            if costs is None:
                return Decision(request, columns, select_random(len(columns), self._rng), preferred=False)
        else:
            costs = load_deviation([1.0 - rate for rate in rates], metrics)
            if costs is None:
                return Decision(request, columns, select_least_loaded(in_flight, self._rng), preferred=False)
            if min(costs) == math.inf:
                raise AllWorkersBusy(
                    f"all {len(costs)} ranks that pass the request's filters are full, by what their engines reported "
                    "last and what was booked since",
                    remedy="Try again, or add workers",
                    ranks=len(costs),
                )
        columns.cost = costs
        return Decision(request, columns, select_by_cost(costs, 0.0, self._rng))

    def _with_unreported(self, fleet: FleetState) -> Mapping[RankId, WorkerMetrics]:
        """The engines' reports with what was booked on each rank since its last report."""
        if self._unreported is None or not fleet.received_ms:
            return fleet.metrics
        metrics, booked = fleet.metrics, self._unreported(fleet.received_ms)
        known = [rank for rank in booked if rank in metrics]  # a report may have expired in between
        return {**metrics, **{rank: with_bookings(metrics[rank], *booked[rank]) for rank in known}}

"""Choosing a rank by a policy of `policies.interface`: what the policy is given, and the columns of its answer.

What lives here: turning a RoutingRequest and the loads into a Situation, and prices into terms that an answer can
show. What must not: the policies, and breaking ties (selection).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streams.core.ids import Float64Array, Int64Array
from streams.core.loads.bookings import ActiveLoads
from streams.core.loads.observations import Forecast
from streams.core.routing.candidate_columns import SelectedColumns
from streams.core.routing.cost import RankTerms
from streams.core.routing.policies.interface import NO_CLASSES, Policy, Prices, Situation
from streams.core.routing.request import RoutingRequest

#: Every tier counts, for policies that do not say otherwise.
_ALL_TIERS = (1.0, 1.0, 1.0, 1.0)


class HeldValues:
    """The blocks that candidates hold of one request, by value (`WeighHeld`).

    scores: int64[n], leading blocks in any tier. cxl_accessible_scores, moe_scores: int64[n], None without any.
    on_device: whether all of them are on the candidates' devices. _pooled: int64[n] by latency class: the parts of
    cxl_accessible_scores that are loaded at different speeds.
    """

    __slots__ = (
        *("_columns", "_first", "_overlap", "_pooled", "cxl_accessible_scores", "moe_scores", "on_device"),
        "scores",
    )

    def __init__(self, columns: SelectedColumns, request: RoutingRequest, first: tuple[float, ...]) -> None:
        """first: tier values that will be asked for first."""
        self._columns = columns
        self._overlap = request.matches.scores if request.policy.reads_index else None
        self.cxl_accessible_scores: Int64Array | None = None
        self.moe_scores: Int64Array | None = None
        self._pooled: dict[str, Int64Array] = {}
        if self._overlap is None:
            n = len(columns.rows)
            self.scores, self._first, self.on_device = np.zeros(n, np.int64), (first, np.zeros(n)), True
            return
        candidates, supplementary = columns.base.candidates, request.matches.supplementary
        scores, weighed = self._overlap.columns(candidates, first)
        self.on_device = not self._overlap.has_tiers
        if supplementary is not None:
            matched = supplementary.weigh(candidates, scores, weighed, 1.0, 1.0)
            if matched is not None:
                if matched.moe_scores is not None:
                    self.moe_scores = self._of(matched.moe_scores)
                if matched.cxl_accessible_scores is not None:
                    self.cxl_accessible_scores = self._of(matched.cxl_accessible_scores)
                    self.on_device = False
                    groups, parts = supplementary.groups, matched.by_group
                    if parts is None:
                        self._pooled[groups[0]] = self.cxl_accessible_scores
                    else:
                        self._pooled.update(zip(groups, map(self._of, parts), strict=True))
        positions = columns.positions
        self.scores = scores if positions is None else scores[positions]
        self._first = first, weighed if positions is None else weighed[positions]

    def __call__(
        self, tier_values: tuple[float, ...], pool_value: float, by_class: Mapping[str, float] = NO_CLASSES, /
    ) -> Float64Array:
        """The value of each candidate's blocks: float64[n]."""
        if tier_values == self._first[0]:
            value = self._first[1]
        else:
            if self._overlap is None:
                return np.zeros(len(self.scores))
            value = self._overlap.columns(self._columns.base.candidates, tier_values)[1]
            value = value if self._columns.positions is None else value[self._columns.positions]
        for latency_class, blocks in self._pooled.items():
            of_class = by_class.get(latency_class, pool_value)
            if of_class:
                value = value + of_class * blocks
        return value

    def _of(self, column: Int64Array) -> Int64Array:
        positions = self._columns.positions
        return column if positions is None else column[positions]


class PolicyColumns:
    """A policy's prices of all candidates, with the interface of TermColumns."""

    __slots__ = ("_policy", "_situation", "held", "prices", "ranks")

    def __init__(self, policy: Policy, situation: Situation, prices: Prices, held: HeldValues) -> None:
        self._policy = policy
        self._situation = situation
        self.prices = prices
        self.held = held
        self.ranks = situation.ranks

    @property
    def cost(self) -> Float64Array:
        """float64[n]; the lowest wins."""
        return self.prices.costs

    def forecast(self, index: int) -> Forecast:
        """What to expect of the request on this candidate."""
        return self._policy.forecast(self._situation, self.prices, index)

    def row(self, index: int, *, explained: bool = False) -> RankTerms:
        """One candidate's terms: those that every mode has and, if explained, the policy's own."""
        given, prices, held = self._situation, self.prices, self.held
        cached = prices.cached_blocks.item(index)
        load = given.loads.table
        row = given.rows.item(index)
        return RankTerms(
            self.ranks[index],
            held.scores.item(index),
            0 if held.cxl_accessible_scores is None else held.cxl_accessible_scores.item(index),
            0 if held.moe_scores is None else held.moe_scores.item(index),
            cached,
            cached,
            max(0.0, given.request_blocks - cached),
            load.item(0, row) / given.block_size,
            float(load.item(1, row) + len(given.sequence) // 8 - given.shared.item(row)),
            0.0,
            prices.costs.item(index),
            dict(zip(prices.names, prices.terms[:, index].tolist(), strict=True)) if explained else None,
        )

    def rows(self) -> tuple[RankTerms, ...]:
        """The terms of all candidates, in their order."""
        return tuple(self.row(index, explained=True) for index in range(len(self.ranks)))

    def __len__(self) -> int:
        return len(self.ranks)


def price_by(policy: Policy, request: RoutingRequest, columns: SelectedColumns, loads: ActiveLoads) -> PolicyColumns:
    """Price a request at its candidates by a policy."""
    prompt, fleet, weight = request.prompt, request.fleet, request.policy.moe_score_weight
    held = HeldValues(columns, request, getattr(policy, "tier_credits", _ALL_TIERS))
    labelled: Float64Array | None = None
    if held.moe_scores is not None and weight > 0.0:
        labelled = np.multiply(held.moe_scores, weight, dtype=np.float64)
    shared, users = loads.shared_and_users(prompt.sequence)
    situation = Situation(
        columns.ranks,
        columns.rows,
        loads,
        held.scores,
        held,
        shared,
        prompt.sequence,
        prompt.request_blocks,
        prompt.n_tokens,
        prompt.block_size,
        float(loads.times.now_ms),
        prompt.model,
        None if fleet.blocks_of is None else fleet.blocks_of(columns.ranks).total,
        held.on_device,
        labelled,
        prompt.expected_output_tokens,
        fleet.metrics,
        users,
    )
    return PolicyColumns(policy, situation, policy.price(situation), held)

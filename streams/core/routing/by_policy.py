"""Choosing a rank by a policy of `policies.interface`: what the policy is given, and the columns of its answer.

What lives here: turning an index's answer and the loads into a Situation, and prices into terms that an answer can
show. What must not: the policies, and breaking ties (selection).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.index.interface import Candidates, OverlapScores
from streams.core.loads.bookings import ActiveLoads
from streams.core.loads.observations import Forecast
from streams.core.routing.cost import RankTerms
from streams.core.routing.policies.interface import Policy, Prices, Situation
from streams.core.routing.supplementary import SupplementaryMatches

#: Every tier counts, for policies that do not say otherwise.
_ALL_TIERS = (1.0, 1.0, 1.0, 1.0)


class Held:
    """The blocks that candidates hold of one request, by value (`WeighHeld`).

    scores: int64[n], leading blocks in any tier. cxl_accessible_scores, moe_scores: int64[n], None without any.
    on_device: whether all of them are on the candidates' devices.
    """

    __slots__ = ("_at", "_candidates", "_first", "_found", "cxl_accessible_scores", "moe_scores", "on_device", "scores")

    def __init__(
        self,
        candidates: Candidates,
        at: Int64Array | None,
        found: OverlapScores | None,
        supplementary: SupplementaryMatches | None,
        first: tuple[float, ...],
    ) -> None:
        """at: the positions of those that count; None for all. found: None if the index is not read. first: tier values
        that will be asked for first.
        """
        self._candidates = candidates
        self._at = at
        self._found = found
        self.cxl_accessible_scores: Int64Array | None = None
        self.moe_scores: Int64Array | None = None
        if found is None:
            n = len(candidates.ranks) if at is None else len(at)
            self.scores, self._first, self.on_device = np.zeros(n, np.int64), (first, np.zeros(n)), True
            return
        scores, weighed = found.columns(candidates, first)
        self.on_device = not found.has_tiers
        if supplementary is not None:
            matched = supplementary.weigh(candidates, scores, weighed, 1.0, 1.0)
            if matched is not None:
                self.cxl_accessible_scores = self._of(matched.cxl_accessible_scores)
                self.moe_scores = self._of(matched.moe_scores)
                self.on_device = self.on_device and self.cxl_accessible_scores is None
        self.scores = scores if at is None else scores[at]
        self._first = first, weighed if at is None else weighed[at]

    def __call__(self, tier_values: tuple[float, ...], pool_value: float) -> Float64Array:
        """The value of each candidate's blocks: float64[n]."""
        if tier_values == self._first[0]:
            value = self._first[1]
        else:
            if self._found is None:
                return np.zeros(len(self.scores))
            value = self._found.columns(self._candidates, tier_values)[1]
            value = value if self._at is None else value[self._at]
        if pool_value and self.cxl_accessible_scores is not None:
            value = value + pool_value * self.cxl_accessible_scores
        return value

    def _of(self, column: Int64Array | None) -> Int64Array | None:
        return column if column is None or self._at is None else column[self._at]


class PolicyColumns:
    """A policy's prices of all candidates, with the interface of TermColumns."""

    __slots__ = ("_policy", "_situation", "held", "prices", "ranks")

    def __init__(self, policy: Policy, situation: Situation, prices: Prices, held: Held) -> None:
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
            prices.costs.item(index),
            dict(zip(prices.names, prices.terms[:, index].tolist(), strict=True)) if explained else None,
        )

    def rows(self) -> tuple[RankTerms, ...]:
        """The terms of all candidates, in their order."""
        return tuple(self.row(index, explained=True) for index in range(len(self.ranks)))

    def __len__(self) -> int:
        return len(self.ranks)


def price_by(
    policy: Policy,
    ranks: Sequence[RankId],
    candidates: Candidates,
    at: Int64Array | None,
    rows: Int64Array,
    found: OverlapScores | None,
    loads: ActiveLoads,
    *,
    sequence: bytes,
    request_blocks: int,
    n_tokens: int,
    block_size: int,
    model: str,
    capacity_blocks: Int64Array | None,
    expected_output_tokens: int | None,
    supplementary: SupplementaryMatches | None,
    label_weight: float,
    metrics: Mapping[RankId, WorkerMetrics],
) -> PolicyColumns:
    """Price a request at `ranks` by a policy. The arguments are those of Chooser.choose.

    candidates, at: for which the index's answer is turned into columns, and which of them are `ranks`. found: None if
    the index is not read. label_weight: how many cached blocks a block with matching labels is worth.
    """
    held = Held(candidates, at, found, supplementary, getattr(policy, "tier_credits", _ALL_TIERS))
    labelled: Float64Array | None = None
    if held.moe_scores is not None and label_weight > 0.0:
        labelled = np.multiply(held.moe_scores, label_weight, dtype=np.float64)
    shared, users = loads.shared_and_users(sequence)
    situation = Situation(
        ranks,
        rows,
        loads,
        held.scores,
        held,
        shared,
        sequence,
        request_blocks,
        n_tokens,
        block_size,
        float(loads.times.now_ms),
        model,
        capacity_blocks,
        held.on_device,
        labelled,
        expected_output_tokens,
        metrics,
        users,
    )
    return PolicyColumns(policy, situation, policy.price(situation), held)

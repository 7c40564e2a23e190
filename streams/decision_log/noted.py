"""Decisions as a router notes them, and which of their candidates and terms the log keeps (pure).

What lives here: `NotedDecision`, and selecting its candidates. What must not: records (records), and how many decisions
wait (the router's recorder).

Candidates are selected when a batch is written, and not while its requests are served: one decision after the other,
the same work takes half of the processor time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, HashArray, Int64Array, RankId
from streams.core.routing.by_policy import PolicyColumns
from streams.core.routing.cost import TermColumns

#: Flags of a decision.
BOOKED, PREFERRED = 1, 2

#: Terms of the modes without a policy by name. The first four are rows of TermColumns.terms, whose last row is the
#: cost.
COST_TERMS = (
    "own_prefill_blocks",
    "active_prefill_blocks",
    "decode_blocks",
    "recent_prefill_blocks",
    "effective_cached_blocks",
)
_N_PRICED = 4

#: Further terms, of decisions that have them.
CXL_TERM, MOE_TERM = "cxl_accessible_blocks", "moe_matching_blocks"


class DecisionKind(NamedTuple):
    """What many decisions have in common; the schema explains the fields."""

    model: str
    block_size: int
    router_mode: str
    policy: str
    temperature: float
    mode: str
    degraded_because: str | None
    chosen_mode: str
    chosen_degraded_because: str | None
    phase: str | None = None


class NotedDecision(NamedTuple):
    """A decision. It shares its columns and hashes with the request: nothing is computed or copied to note it.

    expected_output_tokens: 0 if it is not known. chain: uint64[n], the prompt's sequence hashes. chosen: the position
    of the chosen candidate in the columns.
    """

    request_id: str
    decided_at_ms: int
    queued_ms: int
    kind: DecisionKind
    n_tokens: int
    request_blocks: int
    expected_output_tokens: int
    flags: int
    chain: HashArray
    columns: TermColumns | PolicyColumns
    chosen: int


class ListedCandidates(NamedTuple):
    """The chosen candidate of a decision, and then the cheapest ones in order of cost.

    n_eligible: how many ranks the choice was made of. n_lowest: how many of them had the lowest cost. blocks: leading
    blocks of the prompt that each rank held. terms: float32, for each rank one number per term name.
    """

    n_eligible: int
    n_lowest: int
    term_names: tuple[str, ...]
    ranks: list[RankId]
    costs: list[float]
    blocks: list[int]
    terms: bytes


def listed_candidates(columns: TermColumns | PolicyColumns, chosen: int, n_best: int) -> ListedCandidates:
    """Select the chosen candidate and the n_best cheapest ones of a decision.

    Among equal costs, the first ones count as cheaper. Raises ValueError if a policy of another package returns arrays
    that are not what it names.
    """
    names: tuple[str, ...]
    more: list[Float64Array | Int64Array] = []
    if isinstance(columns, PolicyColumns):
        prices, held = columns.prices, columns.held
        costs, names, blocks = np.asarray(prices.costs, dtype=np.float64), prices.names, held.scores
        terms = np.asarray(prices.terms, dtype=np.float64)
        supplementary = held.cxl_accessible_scores, held.moe_scores
    else:
        costs, names, blocks = columns.terms[_N_PRICED], COST_TERMS, columns.scores
        terms, more = columns.terms[:_N_PRICED], [columns.effective_cached_blocks]
        supplementary = columns.cxl_accessible_scores, columns.moe_scores
    if costs.shape != blocks.shape or terms.shape != (len(names) - len(more), len(blocks)):
        raise ValueError(f"the policy names the terms {names}, and has {terms.shape} of them")
    for name, column in zip((CXL_TERM, MOE_TERM), supplementary, strict=True):
        if column is not None:
            names, more = (*names, name), [*more, column]
    order = costs.argsort(kind="stable")
    listed = [chosen, *(index for index in order[:n_best].tolist() if index != chosen)]
    positions = np.array(listed)
    kept = np.empty((len(names), len(listed)), dtype=np.float32)
    kept[: len(terms)] = terms.take(positions, 1)
    for row, further in enumerate(more, len(terms)):
        kept[row] = further.take(positions)
    return ListedCandidates(
        len(blocks),
        int(np.count_nonzero(costs == costs[order[0]])),
        names,
        [columns.ranks[index] for index in listed],
        costs.take(positions).tolist(),
        blocks.take(positions).tolist(),
        kept.T.tobytes(),
    )

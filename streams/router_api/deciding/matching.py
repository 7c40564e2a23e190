"""Which ranks may serve a request, and what they hold of it.

What lives here: filtering and matching, in the order in which both have to be read so that an answer can be trusted,
and the error that explains why no rank is left. What must not: the choice among these ranks (core.routing.decision),
and loads.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from streams.core.ids import RankId
from streams.core.index.interface import PrefixScores
from streams.core.routing.eligibility import FilterReason, WorkerFilter
from streams.core.routing.request import NO_SCORES, Matches, RoutePolicy
from streams.core.routing.selection import RouterMode
from streams.core.routing.supplementary import SupplementaryMatches
from streams.errors import InvalidRequest, NoEligibleWorker
from streams.router_api.knowledge.view import View
from streams.router_api.messages.requests import Blocks, MoeQuery

_NO_RANKS: frozenset[RankId] = frozenset()


def match(
    view: View,
    filters: WorkerFilter,
    blocks: Blocks,
    policy: RoutePolicy,
    query: MoeQuery | None,
    *,
    reads_index: bool,
    strict: bool,
) -> Matches:
    """List the ranks that a request may go to, and match it against the index.

    If no rank passes, the error is not raised but stored as `refusal`. strict: only ranks with matching labels pass, if
    there are any and the index is read.
    """
    scores, predicted, supplementary = NO_SCORES, _NO_RANKS, None
    labels_filter = False if strict else None
    snapshot = view.snapshot() if reads_index else None  # before anything is read that is trusted by it
    try:
        ranks = _eligible(view, filters, policy.mode)
        if reads_index:
            scores, predicted = view.overlap(blocks.local)
            if view.facts.has_any:
                selector = None if query is None else query.selector()
                pooled = policy.cxl_score_weight > 0.0
                supplementary = view.supplementary(blocks.chain, filters.model, selector, pooled=pooled)
            if strict:
                ranks, labels_filter = _with_matching_labels(view, ranks, filters, scores, supplementary)
    except (NoEligibleWorker, InvalidRequest) as exc:
        return Matches((), scores, predicted, supplementary, snapshot, exc, labels_filter)
    return Matches(ranks, scores, predicted, supplementary, snapshot, None, labels_filter)


def _eligible(view: View, filters: WorkerFilter, mode: RouterMode) -> Sequence[RankId]:
    if mode is RouterMode.DIRECT and filters.worker_id is None:
        raise InvalidRequest("worker_id is missing: in mode direct every request names its worker")
    ranks = view.fleet.eligible(filters)
    if not ranks:
        raise _no_eligible_worker(view, filters)
    return ranks


def _no_eligible_worker(view: View, filters: WorkerFilter) -> NoEligibleWorker:
    serving = sum(filters.model in worker.names for worker in view.fleet.workers.copy().values())
    if not serving:
        return NoEligibleWorker(
            "no worker is registered",
            remedy="`kvstreams bridge` or PUT /workers/{id} registers one",
            workers=0,
            refused_ranks={},
        )
    refused = view.fleet.refusals(filters)
    reasons = ", ".join(f"{reason} {n}" for reason, n in refused.items() if reason is not FilterReason.OTHER_MODEL)
    return NoEligibleWorker(
        f"{serving} workers serve {filters.model!r}, but none of their ranks passes the filters ({reasons})",
        remedy="Check the request's worker_id, dp_rank, allowed_worker_ids, excluded_worker_ids, required_taints, "
        "lora_name and phase, and lora_names, state, wrong_block_size_dp_ranks and silent_dp_ranks in GET /workers",
        workers=serving,
        refused_ranks=refused,
    )


def _with_matching_labels(
    view: View,
    passing: Sequence[RankId],
    filters: WorkerFilter,
    scores: PrefixScores,
    supplementary: SupplementaryMatches | None,
) -> tuple[Sequence[RankId], bool]:
    """Return the passing ranks that hold a matching block, or all passing ranks if no rank holds one.

    Also returns whether any rank holds one, so that the filter applied. A rank stays as well if it holds leading blocks
    and some of its labels were dropped, since it may match. Exclusions apply last: if only excluded ranks match, the
    request is refused, and no other rank is used instead.
    """
    considered = view.fleet.eligible(filters._replace(excluded=frozenset())) if filters.excluded else passing
    matching: Set[RankId] = _NO_RANKS if supplementary is None else supplementary.matching(considered, scores)
    if not matching:
        return passing, False
    held = scores.scores
    matching |= {rank for rank in view.index.ranks_missing_labels(passing) if held.get(rank, 0)}
    left = [rank for rank in passing if rank in matching]
    if not left:
        raise NoEligibleWorker(
            "every rank whose cached blocks match moe_query is excluded",
            remedy="Set fallback_to_unlabeled, or exclude fewer workers",
            matching=len(matching),
        )
    return left, True

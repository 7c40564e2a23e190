"""Decisions of the last minute with their terms, for the live page and `kvstreams top`.

What lives here: which decisions are kept, for how long, and their terms as JSON. What must not: prompts, hashes and
request ids, which the answer of GET /live never has; and the decision log, which has every decision (decision_log).

`note` runs for one decision per second and keeps references; `settle` computes what is shown, in the router's tick.

State: at most 60 decisions of one router.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from streams.core.routing.decision import Decision
from streams.core.routing.trust import Trust
from streams.decision_log.noted import ListedCandidates, listed_candidates

log = logging.getLogger(__name__)

#: One decision is kept in this time, the first one. A busy router makes thousands, of which a person reads a few.
KEPT_EVERY_S = 1.0

#: Decisions that are kept: those of a minute, in about 50 KB.
RECENT_MAX = 60

#: Decisions whose terms are not computed yet. A tick comes twice per second, so there is rarely more than one. Each has
#: the terms of all its candidates, 6 KB with 64 ranks.
NOTED_MAX = 4

#: A decision is compared with the cheapest other candidate. If it was not the cheapest itself, that is the first one.
_COMPARED = 2


class _Noted(NamedTuple):
    at_s: float
    decision: Decision
    chosen_trust: Trust


class _Recent(NamedTuple):
    """A decision as it is kept. load_blocks: as `decode_blocks` of RankTerms."""

    at_s: float
    model: str
    router_mode: str
    request_blocks: int
    load_blocks: float
    chosen_trust: Trust
    listed: ListedCandidates


class RecentDecisions:
    """Owner of the recent decisions of one router. Used on the thread that decides.

    due_s: when the next decision is kept; monotonic.
    """

    def __init__(self) -> None:
        self.due_s = float("-inf")
        self._noted: deque[_Noted] = deque(maxlen=NOTED_MAX)
        self._recent: deque[_Recent] = deque(maxlen=RECENT_MAX)

    def note(self, now_s: float, decision: Decision, chosen_trust: Trust) -> None:
        """Keep a decision that was made at or after `due_s`."""
        self.due_s = now_s + KEPT_EVERY_S
        self._noted.append(_Noted(now_s, decision, chosen_trust))

    def settle(self) -> None:
        """Compute what is shown of the decisions noted since the last call, and let go of everything else of them."""
        while self._noted:
            at_s, decision, trust = self._noted.popleft()
            request = decision.request
            try:
                listed = listed_candidates(decision.columns, decision.index, _COMPARED)
            except Exception as exc:  # for example, terms of a policy of another package that are no numbers
                log.debug("a decision is not shown: %s", exc)
                continue
            self._recent.append(
                _Recent(
                    at_s,
                    request.prompt.model,
                    request.policy.mode,
                    request.prompt.request_blocks,
                    decision.chosen.decode_blocks,
                    trust,
                    listed,
                )
            )

    def answer(self, now_s: float) -> list[dict[str, Any]]:
        """The decisions of the last minute, the newest first, as in GET /live."""
        since_s = now_s - RECENT_MAX * KEPT_EVERY_S
        return [_json(recent, now_s) for recent in reversed(self._recent) if recent.at_s >= since_s]


def _json(recent: _Recent, now_s: float) -> dict[str, Any]:
    listed = recent.listed
    names = listed.term_names
    terms = np.frombuffer(listed.terms, dtype=np.float32, count=len(names)).astype(np.float64).round(2).tolist()
    rank, others = listed.ranks[0], range(1, len(listed.ranks))
    other = min(others, key=listed.costs.__getitem__, default=None)
    return {
        "age_s": round(now_s - recent.at_s, 1),
        "model": recent.model,
        "router_mode": recent.router_mode,
        "worker_id": str(rank.worker_id),
        "dp_rank": rank.dp_rank,
        "overlap_blocks": listed.blocks[0],
        "request_blocks": recent.request_blocks,
        "load_blocks": recent.load_blocks,
        "cost": round(listed.costs[0], 2),
        "terms": dict(zip(names, terms, strict=True)),
        "candidates": listed.n_eligible,
        "next_best": None
        if other is None
        else {
            "worker_id": str(listed.ranks[other].worker_id),
            "dp_rank": listed.ranks[other].dp_rank,
            "overlap_blocks": listed.blocks[other],
            "cost": round(listed.costs[other], 2),
        },
        "mode": recent.chosen_trust.mode,
        "reason": recent.chosen_trust.reason,
    }

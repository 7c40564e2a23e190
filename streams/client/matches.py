"""How many of a request's blocks each worker and rank has, as `find_matches_for_request` returns it.

What lives here: these values, read from the answer to POST /matches. What must not: calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class WorkerRank(NamedTuple):
    """One data-parallel rank of a worker. It equals the tuple of both numbers."""

    worker_id: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class RankOverlapScores:
    """Matched blocks by rank; ranks without a match are left out. The fields are those of OverlapScores."""

    scores: dict[WorkerRank, int]
    cxl_accessible_scores: dict[WorkerRank, int]
    moe_scores: dict[WorkerRank, int]


@dataclass(frozen=True, slots=True)
class OverlapScores:
    """Matched blocks by worker id; workers without a match are left out.

    scores: leading blocks that the worker's best rank holds itself. cxl_accessible_scores: blocks that a rank reaches
    in CXL pools after its own leading blocks. moe_scores: own leading blocks whose labels match the request's
    moe_query. by_rank: the same by rank. mode: how far the counts can be trusted, as in docs/http.md.
    """

    scores: dict[int, int]
    cxl_accessible_scores: dict[int, int]
    moe_scores: dict[int, int]
    by_rank: RankOverlapScores
    request_blocks: int
    mode: str


def overlap_scores(answer: Mapping[str, Any]) -> OverlapScores:
    """Read the answer to POST /matches."""
    workers, ranks = answer["workers"], answer["ranks"]

    def by_worker(name: str) -> dict[int, int]:
        return {row["worker_id"]: row[name] for row in workers if row[name]}

    def by_rank(name: str) -> dict[WorkerRank, int]:
        return {WorkerRank(row["worker_id"], row["dp_rank"]): row[name] for row in ranks if row[name]}

    return OverlapScores(
        by_worker("scores"),
        by_worker("cxl_accessible_scores"),
        by_worker("moe_scores"),
        RankOverlapScores(by_rank("scores"), by_rank("cxl_accessible_scores"), by_rank("moe_scores")),
        answer["request_blocks"],
        answer["mode"],
    )

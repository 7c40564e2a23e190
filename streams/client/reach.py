"""How much of a prompt the chosen worker can reach, from a router's answer with `explain` (pure).

What lives here: reading it. What must not: what is done with it (streams.client.migration).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Reach(NamedTuple):
    """Leading tokens of a prompt that a rank has in its own memory, and those that follow them in CXL pools."""

    own_tokens: int
    pooled_tokens: int


def reach_of(answer: Mapping[str, Any]) -> Reach:
    """Return the reach of the chosen rank; 0 where the answer does not say, as that of an older router."""
    chosen = answer["worker_id"], answer["dp_rank"]
    block_size = answer.get("block_size", 0)
    for terms in answer.get("candidates", ()):
        if (terms["worker_id"], terms["dp_rank"]) == chosen:
            return Reach(terms["scores"] * block_size, terms["cxl_accessible_scores"] * block_size)
    return Reach(0, 0)

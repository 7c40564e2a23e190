"""Requests as routing sees them, for tests of choices."""

from __future__ import annotations

from collections.abc import Sequence

from streams.core.ids import RankId
from streams.core.index.interface import PrefixScores
from streams.core.routing.request import (
    NO_FLEET_STATE,
    NO_SCORES,
    FleetState,
    Matches,
    PromptBlocks,
    RoutePolicy,
    RoutingRequest,
)


def routing_request(
    policy: RoutePolicy,
    ranks: Sequence[RankId],
    scores: PrefixScores = NO_SCORES,
    *,
    sequence: bytes = b"",
    request_blocks: int,
    block_size: int,
    n_tokens: int | None = None,
    fleet: FleetState = NO_FLEET_STATE,
) -> RoutingRequest:
    """A request for these ranks. n_tokens: if it is left out, all blocks are full."""
    length = request_blocks * block_size if n_tokens is None else n_tokens
    return RoutingRequest(
        policy, PromptBlocks(sequence, length, request_blocks, block_size), Matches(ranks, scores), fleet
    )

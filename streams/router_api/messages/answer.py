"""The answer to one request for a rank.

What lives here: the value that `Router` returns. What must not: JSON (answer_json), and how it was found (router).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from streams.core.ids import RankId
from streams.core.routing.cost import RankTerms
from streams.core.routing.selection import RouterMode
from streams.core.routing.sources import KvSource
from streams.core.routing.trust import Trust
from streams.cxl.pooled_index import PoolShare


class RouteAnswer(NamedTuple):
    """A chosen rank, and how far the choice can be trusted. It is a tuple because one is made for every request.

    worker_url, dp_size: the worker's URL and number of ranks in the registry; None if the worker of an existing booking
    was removed.
    overlap_blocks: leading blocks of the request that the rank holds. request_blocks: the request's length in blocks.
    cost: the cost of the chosen rank; None for a repeated request id, which gets the existing choice. router_mode: the
    mode that decided; for a repeated request id, the one that would. trust: the least
    trust that any eligible rank deserves. chosen_trust: that of the chosen rank alone. moe_filter_applied: whether only
    ranks with matching labels were candidates; None if the request does not ask for that, or repeats an id.
    candidates: every candidate's terms, if the request asks for them. pool_shares: from which pools their pooled blocks
    come, for those that have any; only with candidates. queued_ms: how long the request waited; None
    if it did not. pooled_blocks: blocks after the overlap that the rank reads in a CXL pool. block_size: tokens of a
    block of the model, only with candidates. alternatives: further ranks on other workers, the cheapest first, as many
    as the request asks for. kv_sources: where else the prompt's KV cache is; None if the request does not ask for that
    or repeats an id.
    """

    request_id: str
    rank: RankId
    worker_url: str | None
    overlap_blocks: int
    request_blocks: int
    cost: float | None
    router_mode: RouterMode
    trust: Trust
    chosen_trust: Trust
    moe_filter_applied: bool | None = None
    candidates: tuple[RankTerms, ...] | None = None
    queued_ms: float | None = None
    pooled_blocks: int = 0
    block_size: int | None = None
    dp_size: int | None = None
    alternatives: tuple[RankId, ...] = ()
    kv_sources: tuple[KvSource, ...] | None = None
    pool_shares: Mapping[RankId, tuple[PoolShare, ...]] = MappingProxyType({})

"""Where a prompt's KV cache is, besides the rank that its request goes to (docs/http.md).

What lives here: the ranks that hold more of a prompt than the chosen one has in device memory, and the order of all
sources. What must not: which blocks a pool has (cxl.pooled_index), which ranks may be a source
(router_api.deciding.kv_sources), and how an engine is told to read from one (router_api.messages.kv_transfer).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.ids import Float64Array, Int64Array, RankId, Tier
from streams.core.index.interface import Candidates, PrefixScores

#: Sources that an answer names at most. An engine pulls from one; the others are for when that one fails or is busy.
KV_SOURCES_MAX = 3

#: The value of a block that has to be read from each tier, so far apart that the sum over a rank's blocks shows the
#: slowest tier among them: no prompt has as many blocks.
_TIER_STEP = float(1 << 30)
_BY_SLOWEST = (0.0, 1.0, _TIER_STEP, _TIER_STEP**2)
_ON_DEVICE = (1.0, 0.0, 0.0, 0.0)

#: One block of each lower tier: where the sums of the next slower one begin.
_SLOWEST_FROM = np.array(_BY_SLOWEST[1:])


class SourceTier(enum.StrEnum):
    """From where the blocks of a source have to be read, the fastest first: the tiers of a rank, and a pool."""

    DEVICE = "device"
    HOST = "host"
    POOL = "pool"
    DISK = "disk"
    EXTERNAL = "external"


#: Its place in this order; the first four are those of the tiers of a rank, by their numbers.
_PLACE = {tier: place for place, tier in enumerate(SourceTier)}
_TIERS = tuple(SourceTier[tier.name] for tier in Tier)
_PLACE_OF_RANK = np.array([_PLACE[tier] for tier in _TIERS], dtype=np.int64)
_PLACES = 8


class KvSource(NamedTuple):
    """A rank or a pool from which the chosen rank's engine may read blocks of a prompt instead of computing them.

    blocks: how many of the prompt's leading blocks the chosen rank has with it, without a hole. tier: the slowest one
    that some of them have to be read from. rank: None for a pool. cost: the rank's cost for the request; infinite if it
    was no candidate. pool_id: None for a rank. accessible: whether the chosen rank can read the pool itself.
    transfer_params: what its engine is told so that it pulls from this rank; None if that is not known.
    """

    blocks: int
    tier: SourceTier
    rank: RankId | None = None
    cost: float = math.inf
    pool_id: str | None = None
    accessible: bool = False
    transfer_params: Mapping[str, Any] | None = None


def blocks_on_device(scores: PrefixScores, candidates: Candidates, rank: RankId) -> int:
    """How many of the leading blocks that a rank holds are in its device memory."""
    position = candidates.position.get(rank)
    if position is None:  # it gets requests for another reason than being a candidate, for example while it is avoided
        candidates, position = Candidates((rank,)), 0
    return int(scores.columns(candidates, _ON_DEVICE)[1].item(position))


def rank_sources(
    scores: PrefixScores,
    candidates: Candidates,
    costs: Float64Array,
    more_than: int,
    left_out: npt.NDArray[np.bool_],
    n_max: int = KV_SOURCES_MAX,
) -> list[KvSource]:
    """Return the ranks that hold more than so many leading blocks: the first n_max in the order of `in_order`.

    candidates: the m ranks that may be a source. costs: float64[m]; infinite for one whose cost is not known.
    left_out: bool[m], those of them that are none. There is no loop over ranks.
    """
    held, depth = scores.columns(candidates, _BY_SLOWEST)
    found = np.flatnonzero((held > more_than) & ~left_out)
    if not found.size:
        return []
    tier = _SLOWEST_FROM.searchsorted(depth[found], side="right")
    value = held[found] * _PLACES - _PLACE_OF_RANK[tier]
    best = _greatest(value, costs[found], n_max)
    rows = zip(found[best].tolist(), tier[best].tolist(), strict=True)
    return [
        KvSource(held.item(position), _TIERS[number], candidates.ranks[position], costs.item(position))
        for position, number in rows
    ]


def in_order(sources: Iterable[KvSource], n_max: int = KV_SOURCES_MAX) -> tuple[KvSource, ...]:
    """Return the first n_max sources: the most blocks first, then the fastest tier, then the lowest cost.

    Of pools that are equal, those that the chosen rank can read come first.
    """
    return tuple(sorted(sources, key=_sort_key)[:n_max])


def _sort_key(source: KvSource) -> tuple[int, int, float, bool, RankId | tuple[()], str]:
    return (
        -source.blocks,
        _PLACE[source.tier],
        source.cost,
        not source.accessible,
        source.rank or (),
        source.pool_id or "",
    )


def _greatest(values: Int64Array, costs: Float64Array, n_max: int) -> Int64Array:
    """Return the positions of the n_max greatest values, in no order; of equal ones, those with the lowest costs.

    values: int64[k], costs: float64[k]. Returns int64[min(k, n_max)].
    """
    if len(values) <= n_max:
        return np.arange(len(values))
    least = np.partition(values, -n_max)[-n_max]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    n_left = n_max - len(above)
    if n_left < len(equal):
        equal = equal[np.argpartition(costs[equal], n_left - 1)[:n_left]]
    return np.concatenate([above, equal])

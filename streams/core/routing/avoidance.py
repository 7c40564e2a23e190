"""Which workers requests avoid for a while, because a request that was sent there has just failed (pure).

What lives here: the limit on how much of a model can be avoided at a time. What must not: records and their expiry
(router_api.knowledge.avoidances), and the other filters (eligibility).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from streams.core.ids import RankId, WorkerId
from streams.core.workers import Avoidance, Worker, WorkerState

#: At most one rank in this many is avoided, of the ranks of a model that get requests. A front that lost its network
#: sees every engine fail, and must not empty the fleet for the others.
AVOIDED_RANKS_DIVISOR = 3


def avoided_workers(
    avoidances: Iterable[Avoidance], workers: Mapping[WorkerId, Worker], unusable: Set[RankId]
) -> frozenset[WorkerId]:
    """Return the workers that are avoided: the earliest ones within the limit of each model, so that routers agree.

    unusable: ranks that get no requests anyway. They count neither as ranks of the model nor as avoided.
    """
    marked = [avoidance for avoidance in avoidances if avoidance.worker_id in workers]
    if not marked:
        return frozenset()
    usable: Counter[WorkerId] = Counter()
    allowed: Counter[str] = Counter()
    for worker_id, worker in workers.items():
        if worker.state is WorkerState.ACTIVE:
            usable[worker_id] = sum(rank not in unusable for rank in worker.ranks())
            allowed[worker.model] += usable[worker_id]
    for model in allowed:
        allowed[model] //= AVOIDED_RANKS_DIVISOR
    avoided: set[WorkerId] = set()
    for avoidance in sorted(marked, key=lambda avoidance: (avoidance.avoided_at_ms, avoidance.worker_id)):
        model, n_ranks = workers[avoidance.worker_id].model, usable[avoidance.worker_id]
        if n_ranks <= allowed[model]:
            allowed[model] -= n_ranks
            avoided.add(avoidance.worker_id)
    return frozenset(avoided)

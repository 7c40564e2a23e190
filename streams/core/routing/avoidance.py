"""Which workers requests avoid for a while, because a request that was sent there has just failed (pure).

What lives here: the limit on how much of a model can be avoided at a time. What must not: records and their expiry
(router_api.knowledge.avoidances), and the other filters (eligibility).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from streams.core.ids import RankId, WorkerId
from streams.core.workers import Avoidance, Worker, WorkerState

#: At most one rank in this many is avoided, of the ranks of a model that get requests, but always one worker while
#: another one can serve. A front that lost its network sees every engine fail, and must not empty the fleet for the
#: others.
AVOIDED_RANKS_DIVISOR = 3


def avoided_workers(
    avoidances: Iterable[Avoidance], workers: Mapping[WorkerId, Worker], unusable: Set[RankId]
) -> frozenset[WorkerId]:
    """Return the workers that are avoided: the earliest ones within the limit of each model, so that routers agree.

    If the limit allows none of a model's marked workers, the earliest one is avoided, unless no other can serve.
    unusable: ranks that get no requests anyway. They count neither as ranks of the model nor as avoided.
    """
    marked = [avoidance for avoidance in avoidances if avoidance.worker_id in workers]
    if not marked:
        return frozenset()
    usable: Counter[WorkerId] = Counter()
    n_ranks: Counter[str] = Counter()
    for worker_id, worker in workers.items():
        if worker.state is WorkerState.ACTIVE:
            usable[worker_id] = sum(rank not in unusable for rank in worker.ranks())
            n_ranks[worker.model] += usable[worker_id]
    allowed = {model: n // AVOIDED_RANKS_DIVISOR for model, n in n_ranks.items()}
    avoided: set[WorkerId] = set()
    over_the_limit: dict[str, WorkerId] = {}  # the earliest of each model
    for avoidance in sorted(marked, key=lambda avoidance: (avoidance.avoided_at_ms, avoidance.worker_id)):
        worker_id = avoidance.worker_id
        model, n_own = workers[worker_id].model, usable[worker_id]
        if n_own <= allowed.get(model, 0):
            allowed[model] = allowed.get(model, 0) - n_own
            avoided.add(worker_id)
        else:
            over_the_limit.setdefault(model, worker_id)
    for model, worker_id in over_the_limit.items():
        is_any_avoided = any(usable[other] and workers[other].model == model for other in avoided)
        if not is_any_avoided and usable[worker_id] < n_ranks[model]:
            avoided.add(worker_id)
    return frozenset(avoided)

"""The ranks and pools from which the engine of a decision may read the prompt's KV cache (docs/http.md).

What lives here: which ranks and pools may be a source, and what is kept between decisions to find them without a pass
over all ranks. What must not: the order of sources (core.routing.sources), and JSON (messages.answer_json).

Nothing of this is on the path of a request that does not ask for sources.
"""

from __future__ import annotations

import math

import numpy as np

from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.index.interface import Candidates
from streams.core.routing.decision import Decision
from streams.core.routing.eligibility import WorkerFilter, base_of
from streams.core.routing.identity_cache import IdentityCache
from streams.core.routing.sources import KvSource, SourceTier, blocks_on_device, in_order, rank_sources
from streams.router_api.deciding.prepared_request import PreparedRequest
from streams.router_api.knowledge.view import View
from streams.router_api.messages.kv_transfer import pull_params


class KvSources:
    """Finds sources. Used by the thread that decides."""

    def __init__(self, view: View, p2p_port: int) -> None:
        """p2p_port: the setting router_kv_p2p_port."""
        self._view = view
        self._p2p_port = p2p_port
        self._candidates: IdentityCache[Candidates] = IdentityCache()
        # By the ranks of a decision: where they are among those that may be a source.
        self._positions: IdentityCache[tuple[Candidates, Int64Array]] = IdentityCache()

    def of(self, prepared: PreparedRequest, decision: Decision) -> tuple[KvSource, ...]:
        """Return the first sources of a decision's prompt, none if the decision did not read the index.

        A rank may be a source if requests of the model go to it, whatever its role, and unless the request excludes its
        worker. Ranks whose blocks are predictions are none. A rank or pool is one if the chosen rank has more leading
        blocks with it than in its own device memory.
        """
        routing, filters, view = prepared.routing, prepared.filters, self._view
        matches = routing.matches
        if matches.snapshot is None:
            return ()
        every = WorkerFilter(filters.model, block_size=filters.block_size, excluded=filters.excluded)
        base, positions = base_of(view.fleet.eligible(every))
        assert isinstance(base, tuple)
        candidates = self._candidates_of(base)
        chosen = decision.chosen.rank
        on_device = blocks_on_device(matches.scores, candidates, chosen)
        left_out = np.zeros(len(base), dtype=np.bool_)
        if positions is not None:
            left_out[:] = True
            left_out[positions] = False
        for rank in (chosen, *matches.predicted):
            position = candidates.position.get(rank)
            if position is not None:
                left_out[position] = True
        costs = self._costs(candidates, decision)
        sources = rank_sources(matches.scores, candidates, costs, on_device, left_out)
        if routing.policy.cxl_score_weight > 0.0 and view.facts.has_any:
            registered = view.fleet.numbers().workers
            runs = view.facts.pools_from(prepared.blocks.chain, filters.model, on_device, registered, chosen.worker_id)
            sources += [
                KvSource(run.end, SourceTier.POOL, pool_id=run.pool_id, accessible=run.accessible) for run in runs
            ]
        found = in_order(sources)
        return tuple(map(self._with_params, found)) if self._p2p_port else found

    def _with_params(self, source: KvSource) -> KvSource:
        worker = None if source.rank is None else self._view.fleet.workers.get(source.rank.worker_id)
        if source.rank is None or worker is None:
            return source
        return source._replace(transfer_params=pull_params(worker.url, source.rank.dp_rank, self._p2p_port))

    def _candidates_of(self, ranks: tuple[RankId, ...]) -> Candidates:
        candidates = self._candidates.get(ranks)
        if candidates is None:
            candidates = Candidates(ranks)
            self._candidates.put(ranks, candidates)
        return candidates

    def _costs(self, candidates: Candidates, decision: Decision) -> Float64Array:
        """The cost of each rank that may be a source: float64[m], infinite for ranks that were no candidates."""
        costs = np.full(len(candidates.ranks), math.inf)
        decided = decision.columns
        base, positions = base_of(decided.ranks)
        if base is candidates.ranks:
            costs[slice(None) if positions is None else positions] = decided.cost
        elif isinstance(base, tuple):
            kept = self._positions.get(base)
            if kept is None or kept[0] is not candidates:
                n = len(candidates.ranks)
                kept = candidates, np.array([candidates.position.get(rank, n) for rank in base], dtype=np.int64)
                self._positions.put(base, kept)
            at = kept[1] if positions is None else kept[1][positions]
            known = at < len(costs)
            costs[at[known]] = decided.cost[known]
        return costs

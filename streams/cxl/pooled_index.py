"""Pooled blocks by sequence hash, for routing: which workers can read which block, in microseconds per request.

What lives here: `PooledIndex`. What must not: records (pooled_view), locks, and the weight of a pooled block (cost).

The facts of a block are its placements: model, pool, epoch and accessible workers. Which workers can read a block
follows from these, from the registry's pools and from the registered workers. The result is computed when a request
needs it, and cached until one of them changes. So the loss of a pool or the departure of a host needs no change of any
block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from streams.core.block_facts.fact_sets import FactQueries, FactQuery, FactSets, RankNumbering
from streams.core.block_facts.interner import FactInterner
from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import SequenceHash, WorkerId
from streams.cxl.events import CxlPool
from streams.cxl.records import Placement
from streams.cxl.visibility import reachable_workers
from streams.errors import IndexFull


@dataclass(frozen=True, slots=True)
class _PoolFact:
    """The part of a pooled block's placement that decides which workers can read it, whichever rank owns it.

    accessible_workers: sorted and without duplicates, so that owners who name the same workers share one fact.
    """

    model: str
    pool_id: str
    pool_epoch: int
    accessible_workers: tuple[WorkerId, ...]


class PooledIndex:
    """Rows of the table whose state is cxl_pooled, by sequence hash. Not thread-safe: the view has a lock.

    pools: the registry's pools; the view changes them, and calls invalidate_masks after each change. over_capacity: the
    number of rows that are not indexed at the moment because the fact sets were full. _refused: the number of such rows
    by block and fact; either all owners' rows of one block and fact are indexed, or none.
    """

    def __init__(self, sets: FactSets, pools: Mapping[str, CxlPool]) -> None:
        self._sets = sets
        self._pools = pools
        self._queries = FactQueries()
        self._facts: FactInterner[_PoolFact] = FactInterner()
        self._refused: Counter[tuple[SequenceHash, _PoolFact]] = Counter()
        self.over_capacity = 0

    def __len__(self) -> int:
        """Return the number of blocks that are in any pool."""
        return len(self._sets)

    def replace(self, sequence: SequenceHash, before: Placement | None, after: Placement | None) -> None:
        """Replace a row of a block by another; None stands for no row.

        A row over capacity is counted and not indexed. It is indexed later if another row with the same block and fact
        arrives while there is capacity.
        """
        old, new = _fact_of(before), _fact_of(after)
        if old == new:
            return
        if old is not None:  # first: it may free the space that the new one needs
            self._remove_fact(sequence, old)
        if new is not None:
            self._add_fact(sequence, new)

    def invalidate_masks(self) -> None:
        """Drop the cached results, because a pool has changed."""
        self._sets.invalidate_masks()

    def query(self, model: str, numbers: RankNumbering) -> FactQuery:
        """Return the query for the ranks that can read a model's blocks; the same object for the same arguments."""
        known = self._queries.get(model, numbers)
        if known is not None:
            return known
        mask_of = partial(self._mask_of, model, numbers)
        return self._queries.put(model, FactQuery(self._sets, model, numbers, mask_of))

    def _add_fact(self, sequence: SequenceHash, fact: _PoolFact) -> None:
        number = self._facts.intern(fact)
        try:
            self._sets.add_fact(sequence, number)
        except IndexFull:
            self._facts.release(number)
            self._refused[sequence, fact] += 1
            self.over_capacity += 1
            return
        if self._refused:
            n_refused = self._refused.pop((sequence, fact), 0)
            self.over_capacity -= n_refused
            for _ in range(n_refused):  # other owners' rows: the block's set has the fact now, so they need no new set
                self._sets.add_fact(sequence, self._facts.intern(fact))

    def _remove_fact(self, sequence: SequenceHash, fact: _PoolFact) -> None:
        if (sequence, fact) in self._refused:
            self._refused[sequence, fact] -= 1
            self.over_capacity -= 1
            if not self._refused[sequence, fact]:
                del self._refused[sequence, fact]
            return
        number = self._facts.number_of(fact)
        assert number is not None  # a row is either indexed or refused
        self._sets.remove_fact(sequence, number)
        self._facts.release(number)

    def _mask_of(self, model: str, numbers: RankNumbering, facts: frozenset[int]) -> int:
        mask = 0
        for fact in map(self._facts.facts.__getitem__, facts):
            if fact.model == model:
                for worker in reachable_workers(
                    fact.pool_id, fact.pool_epoch, fact.accessible_workers, self._pools, numbers.workers
                ):
                    mask |= numbers.workers[worker]
        return mask


def _fact_of(placement: Placement | None) -> _PoolFact | None:
    """Return the fact that is indexed for a row; None for a block that is not in a pool."""
    if placement is None or placement.state is not CxlMemoryState.CXL_POOLED:
        return None
    named = placement.accessible_workers
    return _PoolFact(
        placement.model,
        placement.pool_id,
        placement.pool_epoch,
        tuple(sorted(set(named))) if len(named) > 1 else named,
    )

"""Pooled blocks for routing: which workers reach which block, a million of them in some microseconds a request.

What lives here: `PooledIndex`. What must not: records (pooled_view), locks, and what a pooled block is worth (cost).

A block's facts are where it is pooled: pool, epoch, who was named, model. Who reaches it follows from these, from the
registry's pools and from its workers when it is asked for, and is kept until one of them changes: a pool that is lost,
or a host that leaves, is one record here too.
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
from streams.cxl.pooled_view import reachable_workers
from streams.cxl.records import Placement
from streams.errors import IndexFull


@dataclass(frozen=True, slots=True)
class _PoolFact:
    """Where blocks are pooled, as far as it decides who reaches them; whoever owns them.

    accessible_workers: in order and each once, so that owners who name the same ones name one place.
    """

    model: str
    pool_id: str
    pool_epoch: int
    accessible_workers: tuple[WorkerId, ...]


class PooledIndex:
    """Rows of the table whose state is cxl_pooled, by sequence hash. Not thread-safe: its shell has a lock.

    pools: of the registry, which its shell changes; it says so by invalidate_masks.
    """

    def __init__(self, sets: FactSets, pools: Mapping[str, CxlPool]) -> None:
        self._sets = sets
        self._pools = pools
        self._queries = FactQueries()
        self._places: FactInterner[_PoolFact] = FactInterner()
        # Rows that found no room, of one block and place each; no more than there are rows. A place is either told of
        # a block or refused, for all of its owners.
        self._refused: Counter[tuple[SequenceHash, _PoolFact]] = Counter()
        self.over_capacity = 0

    def __len__(self) -> int:
        """Blocks that are pooled anywhere."""
        return len(self._sets)

    def replace(self, sequence: SequenceHash, before: Placement | None, after: Placement | None) -> None:
        """A row has changed: what it said before and says now, None for nothing.

        A place for which there is no room is counted, and its blocks count for nobody, until another row says the same
        of the block when there is room. over_capacity: rows of which that is true now.
        """
        old, new = _counted(before), _counted(after)
        if old == new:
            return
        if old is not None:  # first: it may make the room that the new one needs
            self._remove_facts(sequence, old)
        if new is not None:
            self._add_fact(sequence, new)

    def invalidate_masks(self) -> None:
        """A pool has changed."""
        self._sets.invalidate_masks()

    def query(self, model: str, numbers: RankNumbering) -> FactQuery:
        """Who of these reaches a model's blocks; the same object for the same question."""
        known = self._queries.get(model, numbers)
        if known is not None:
            return known
        return self._queries.put(model, FactQuery(self._sets, model, numbers, partial(self._reached, model, numbers)))

    def _add_fact(self, sequence: SequenceHash, place: _PoolFact) -> None:
        number = self._places.intern(place)
        try:
            self._sets.add_fact(sequence, number)
        except IndexFull:
            self._places.release(number)
            self._refused[sequence, place] += 1
            self.over_capacity += 1
            return
        if self._refused:
            n_refused = self._refused.pop((sequence, place), 0)
            self.over_capacity -= n_refused
            for _ in range(n_refused):  # other owners' rows: the place is in the block's set now, and needs no other
                self._sets.add_fact(sequence, self._places.intern(place))

    def _remove_facts(self, sequence: SequenceHash, place: _PoolFact) -> None:
        if (sequence, place) in self._refused:
            self._refused[sequence, place] -= 1
            self.over_capacity -= 1
            if not self._refused[sequence, place]:
                del self._refused[sequence, place]
            return
        number = self._places.number_of(place)
        assert number is not None  # a row's place is told or refused
        self._sets.remove_fact(sequence, number)
        self._places.release(number)

    def _reached(self, model: str, numbers: RankNumbering, places: frozenset[int]) -> int:
        mask = 0
        for place in map(self._places.facts.__getitem__, places):
            if place.model == model:
                for worker in reachable_workers(
                    place.pool_id, place.pool_epoch, place.accessible_workers, self._pools, numbers.workers
                ):
                    mask |= numbers.workers[worker]
        return mask


def _counted(placement: Placement | None) -> _PoolFact | None:
    """What counts of a row; in transit and evicted nobody scores it."""
    if placement is None or placement.state is not CxlMemoryState.CXL_POOLED:
        return None
    named = placement.accessible_workers
    return _PoolFact(
        placement.model,
        placement.pool_id,
        placement.pool_epoch,
        tuple(sorted(set(named))) if len(named) > 1 else named,
    )

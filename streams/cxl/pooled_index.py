"""Pooled blocks by sequence hash, for routing: which workers can read which block, in microseconds per request.

What lives here: `PooledIndex`. What must not: records (pooled_view), locks, and the weight of a pooled block (cost).

A row may stand for several blocks that can be read only together, as LMCache's chunks. Its fact is under a key made of
the hash of the last of them and of their number, the span. A request looks each of its blocks up under its own hash,
and for each span in use under the key of the stretch that it is part of. Stretches begin at multiples of their span. So
what a worker can read ends with a whole stretch.

Pools from which blocks are loaded at different speeds are different groups, so that a request's blocks are counted by
speed. A block that is in several pools counts for the fastest of those that a worker can read.

The facts of a block are its placements: model, pool, epoch and accessible workers. Which workers can read a block
follows from these, from the registry's pools and from the registered workers. The result is computed when a request
needs it, and cached until one of them changes. So the loss of a pool or the departure of a host needs no change of any
block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from streams.core.block_facts.fact_sets import FactQueries, FactQuery, FactSets, RankNumbering
from streams.core.block_facts.interner import FactInterner
from streams.core.cxl_memory import CxlMemoryState, PoolSpeeds
from streams.core.ids import U64_MASK, HashArray, SequenceHash, WorkerId
from streams.cxl.events import CxlPool
from streams.cxl.records import Placement
from streams.cxl.visibility import reachable_workers
from streams.errors import IndexFull

#: Different spans in use at a time; each is one more lookup per block. Rows with further ones count for no request.
SPANS_MAX = 4

#: Without other settings, every pool is as fast as any other one.
ONE_SPEED = PoolSpeeds(1.0)

#: Different speeds of pools that are told apart; slower ones count as the slowest of these. Each is one more mask.
SPEEDS_MAX = 8

#: Tells the keys of stretches from hashes, and those of different spans from each other: 2^64 divided by the golden
#: ratio.
_SPAN_STEP = 0x9E3779B97F4A7C15


#: Stretches of blocks with the same placements that `pools_from` examines at most, since decisions wait for it: about
#: a millisecond. What comes after them does not count.
STRETCHES_MAX = 256


class PoolRun(NamedTuple):
    """Blocks of a request that one pool has, one after the other.

    end: the block after the last one. accessible: whether the worker that asked can read all of them itself.
    """

    pool_id: str
    end: int
    accessible: bool


class PoolShare(NamedTuple):
    """Blocks of a request that a worker reads from one pool. gb_per_s: at which it loads them."""

    pool_id: str
    latency_class: str
    n_blocks: int
    gb_per_s: float


class PooledScore(NamedTuple):
    """How many blocks of a request a worker reads from pools, after its own leading blocks."""

    worker: WorkerId
    own: int
    n_blocks: int


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
    number of rows that are not indexed at the moment because the fact sets were full. _spans: the number of rows by
    span, of those above 1, in order of their first rows; the first SPANS_MAX of them are looked up. _refused: the
    number of such rows by block and fact; either all owners' rows of one block and fact are indexed, or none. _groups:
    see `query`; None if pools have changed since.
    """

    def __init__(self, sets: FactSets, pools: Mapping[str, CxlPool], speeds: PoolSpeeds = ONE_SPEED) -> None:
        self._sets = sets
        self._pools = pools
        self._speeds = speeds
        self._groups: tuple[str, ...] | None = None
        self._queries = FactQueries()
        self._facts: FactInterner[_PoolFact] = FactInterner()
        self._spans: dict[int, int] = {}
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
        old_key, new_key = _key(sequence, before), _key(sequence, after)
        if (old, old_key) == (new, new_key):
            return
        if old is not None and before is not None:  # first: it may free the space that the new one needs
            self._remove_fact(old_key, old)
            self._count_span(before.span, -1)
        if new is not None and after is not None:
            self._add_fact(new_key, new)
            self._count_span(after.span, 1)

    def keys_of(self, sequence: HashArray) -> HashArray:
        """Return the keys under which a request's blocks are looked up.

        sequence: uint64[n]. Returns uint64[n], the hashes themselves, or with k spans in use uint64[1 + k, n]. A block
        that is in no whole stretch has the key 0.
        """
        spans = list(self._spans)[:SPANS_MAX]
        if not spans:
            return sequence
        keys = np.zeros((1 + len(spans), len(sequence)), dtype=np.uint64)
        keys[0] = sequence
        for number, span in enumerate(spans, 1):
            lasts = sequence[span - 1 :: span] ^ np.uint64(span * _SPAN_STEP & U64_MASK)
            keys[number, : len(lasts) * span] = np.repeat(lasts, span)
        return keys

    def _count_span(self, span: int, more: int) -> None:
        if span > 1:
            n_rows = self._spans.get(span, 0) + more
            if n_rows:
                self._spans[span] = n_rows
            else:
                del self._spans[span]

    def invalidate_masks(self) -> None:
        """Drop the cached results, because a pool has changed."""
        self._groups = None
        self._sets.invalidate_masks()

    def query(self, model: str, numbers: RankNumbering) -> FactQuery:
        """Return the query for the ranks that can read a model's blocks; the same object for the same arguments, until
        the groups of pools change. Its groups are a latency class of each, the fastest first."""
        if self._groups is None:
            self._groups = _groups_of(self._pools, self._speeds)
        groups = self._groups
        known = self._queries.get((model, groups), numbers)
        if known is not None:
            return known
        mask_of = partial(self._mask_of, model, numbers, tuple(map(self._speeds.of, groups)))
        return self._queries.put((model, groups), FactQuery(self._sets, model, numbers, mask_of, groups))

    def pools_from(
        self, keys: HashArray, model: str, start: int, registered: Collection[WorkerId], worker: WorkerId
    ) -> list[PoolRun]:
        """Return the pools that have a model's blocks of a request from block `start` on, and up to where.

        keys: from `keys_of`. registered: the workers that are registered. worker: the one that asks. A pool that none
        of the registered workers can read is left out.
        """
        readers: dict[int, frozenset[WorkerId]] = {}

        def can_read(number: int) -> frozenset[WorkerId]:
            if number not in readers:
                readers[number] = self._readers_of(self._facts.facts[number], registered)
            return readers[number]

        at, ended = start, list[PoolRun]()
        running: dict[str, bool] | None = None  # by pool: whether the worker can read all of it
        for first, end, numbers in islice(self._sets.facts_along(keys, start), STRETCHES_MAX):
            facts = [(self._facts.facts[number], can_read(number)) for number in numbers]
            here = {fact.pool_id: False for fact, workers in facts if workers and fact.model == model}
            here |= {fact.pool_id: True for fact, workers in facts if worker in workers and fact.model == model}
            known = here if running is None else running
            ended += [PoolRun(pool_id, first, known[pool_id]) for pool_id in known.keys() - here.keys()]
            running = {pool_id: known[pool_id] and here[pool_id] for pool_id in known.keys() & here.keys()}
            if not running:
                return ended
            at = end
        return ended + [PoolRun(pool_id, at, accessible) for pool_id, accessible in (running or {}).items()]

    def shares(
        self, keys: HashArray, model: str, scores: Sequence[PooledScore], registered: Collection[WorkerId]
    ) -> list[tuple[PoolShare, ...]]:
        """Return from which pools the blocks of each score come, those with the most blocks first.

        A block counts for the fastest of the pools that the worker can read. Blocks after STRETCHES_MAX stretches are
        left out. keys, registered: as for `pools_from`.
        """
        first = min((score.own for score in scores), default=0)
        stretches: list[tuple[int, int, list[tuple[CxlPool, float, frozenset[WorkerId]]]]] = []
        for begin, end, numbers in islice(self._sets.facts_along(keys, first), STRETCHES_MAX):
            facts = [fact for fact in map(self._facts.facts.__getitem__, numbers) if fact.model == model]
            readers = []
            for fact in facts:
                pool = self._pools.get(fact.pool_id) or CxlPool(fact.pool_id)
                readers.append((pool, self._speed_of(fact), self._readers_of(fact, registered)))
            readers.sort(key=lambda each: (-each[1], each[0].pool_id))
            stretches.append((begin, end, readers))
        found = []
        for worker, own, n_blocks in scores:
            shares: dict[str, PoolShare] = {}
            left = n_blocks
            for begin, end, readers in stretches:
                at = max(begin, own)
                taken = min(end - at, left)
                reads = next(((pool, speed) for pool, speed, workers in readers if worker in workers and speed), None)
                if taken > 0 and reads is not None:
                    (pool, speed), known = reads, shares.get(reads[0].pool_id)
                    n_before = 0 if known is None else known.n_blocks
                    shares[pool.pool_id] = PoolShare(pool.pool_id, pool.latency_class, n_before + taken, speed)
                    left -= taken
            found.append(tuple(sorted(shares.values(), key=lambda share: (-share.n_blocks, share.pool_id))))
        return found

    def _speed_of(self, fact: _PoolFact) -> float:
        """GB/s at which blocks are loaded from a pool, which need not be registered."""
        pool = self._pools.get(fact.pool_id)
        return self._speeds.of("" if pool is None else pool.latency_class)

    def _readers_of(self, fact: _PoolFact, registered: Collection[WorkerId]) -> frozenset[WorkerId]:
        return reachable_workers(fact.pool_id, fact.pool_epoch, fact.accessible_workers, self._pools, registered)

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

    def _mask_of(self, model: str, numbers: RankNumbering, speeds: Sequence[float], facts: frozenset[int]) -> int:
        """Return the masks of a set of facts, one after the other, see QueryMasks. speeds: of the groups."""
        of_group = [0] * len(speeds)
        for fact in map(self._facts.facts.__getitem__, facts):
            speed = self._speed_of(fact)
            if fact.model != model or not speed > 0.0:
                continue
            group = next((n for n, of_one in enumerate(speeds) if of_one <= speed), len(speeds) - 1)
            for worker in self._readers_of(fact, numbers.workers):
                of_group[group] |= numbers.workers[worker]
        mask = of_any = 0
        for group, of_one in enumerate(of_group, 1):
            of_any |= of_one
            mask |= of_any << 64 * numbers.words * (group % len(of_group))
        return mask


def _groups_of(pools: Mapping[str, CxlPool], speeds: PoolSpeeds) -> tuple[str, ...]:
    """Return a latency class of each speed at which blocks are loaded from pools, the fastest first; at least one."""
    classes: dict[float, str] = {}
    for pool in pools.values():
        classes.setdefault(speeds.of(pool.latency_class), pool.latency_class)
    ordered = sorted((speed for speed in classes if speed > 0.0), reverse=True)
    return tuple(classes[speed] for speed in ordered[:SPEEDS_MAX]) or ("",)


def _key(sequence: SequenceHash, placement: Placement | None) -> SequenceHash:
    """Return the key of a row's fact: the block's hash, changed by the span if the row stands for several blocks."""
    if placement is None or placement.span == 1:
        return sequence
    return SequenceHash(sequence ^ (placement.span * _SPAN_STEP & U64_MASK))


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

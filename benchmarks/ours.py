"""Our index as the benchmarks use it: filled with a workload's events, and queried.

What lives here: all uses of the index's API in the benchmarks. What must not: peers, repetitions, reports.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.workload import REMOVED, U32Array, U64Array, Workload
from streams.core import hashing
from streams.core.ids import DpRank, RankId, Tier, WorkerId
from streams.core.index.run_tree import EventColumns, RunTreeIndex

#: Kinds of an event in EventColumns.
STORED_AT_ROOT, STORED, REMOVED_BLOCKS = 0, 1, 2

clock = time.perf_counter_ns


#: The arguments of EventColumns, by name.
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Grown:
    """An index, and the columns of the events that fill it. ranks, holders: by the workload's numbers."""

    index: RunTreeIndex
    columns: EventColumns
    arrays: Arrays
    ranks: list[RankId]
    holders: list[int]
    n_events: int


def empty(workload: Workload) -> Grown:
    """Create an empty index, and the workload's events as its columns."""
    index = RunTreeIndex()
    ranks = [RankId(WorkerId(number), DpRank(0)) for number in range(workload.n_ranks)]
    holders = [index.holder(rank, Tier.DEVICE) for rank in ranks]
    kind = np.where(workload.ev_parent == 0, STORED_AT_ROOT, STORED).astype(np.int64)
    kind[workload.ev_kind == REMOVED] = REMOVED_BLOCKS
    arrays: Arrays = {
        "holder": np.array(holders, dtype=np.int64)[workload.ev_worker],
        "kind": kind,
        "parent": workload.ev_parent,
        "offset": workload.ev_off.astype(np.int64),
        "names": workload.blk_seq,
        "local": workload.blk_local,
    }
    return Grown(index, EventColumns(**arrays), arrays, ranks, holders, workload.n_events)


def again(target: Grown, workload: Workload, *, presized: bool = False) -> Grown:
    """Create another empty index for the same columns. Raises ValueError if it numbers its holders differently."""
    index = RunTreeIndex(blocks_hint=workload.facts.distinct_live) if presized else RunTreeIndex()
    if [index.holder(rank, Tier.DEVICE) for rank in target.ranks] != target.holders:
        raise ValueError("a second index numbers the same holders differently")
    return replace(target, index=index)


def grown(workload: Workload) -> Grown:
    """Create an index that has applied all of the workload's events."""
    fresh = empty(workload)
    fresh.index.apply(fresh.columns, 0, fresh.n_events)
    return fresh


def time_apply(target: Grown, batch: int, first: int = 0) -> int:
    """Apply events from `first` on, `batch` per call; returns the nanoseconds of the whole loop."""
    apply, columns, last = target.index.apply, target.columns, target.n_events
    start = clock()
    for at in range(first, last, batch):
        apply(columns, at, min(at + batch, last))
    return clock() - start


def time_each_apply(target: Grown) -> list[int]:
    """Apply one event per call; returns the nanoseconds of each call."""
    apply, columns = target.index.apply, target.columns
    took = [0] * target.n_events
    for at in range(target.n_events):
        start = clock()
        apply(columns, at, at + 1)
        took[at] = clock() - start
    return took


def match_sum(target: Grown, queries: list[U64Array]) -> int:
    """Add up the depths of all ranks over all queries, a sum by which engines are compared."""
    matcher = target.index.matcher()
    total = 0
    for query in queries:
        n = matcher.match(query)
        total += int(matcher.blocks[:n].sum())
    return total


def time_matches(target: Grown, queries: list[U64Array], passes: int) -> list[int]:
    """Time the bare lookup of each query, after one untimed pass."""
    match = target.index.matcher().match
    took: list[int] = []
    for number in range(passes + 1):
        lap = [0] * len(queries)
        for at, query in enumerate(queries):
            start = clock()
            match(query)
            lap[at] = clock() - start
        if number:
            took += lap
    return took


def time_scores(target: Grown, queries: list[U64Array], passes: int) -> tuple[list[int], int]:
    """Time the lookup that builds a mapping of ranks to blocks; returns nanoseconds, and the sum of one pass."""
    find, some_rank = target.index.find_matches, target.ranks[0]
    took: list[int] = []
    total = 0
    for number in range(passes + 1):
        lap = [0] * len(queries)
        for at, query in enumerate(queries):
            start = clock()
            scores = find(query).scores
            scores.get(some_rank)  # so that a mapping that is built on first use is built within the timed part
            lap[at] = clock() - start
            if not number:
                total += sum(scores.values())
        if number:
            took += lap
    return took, total


def time_tokens(target: Grown, prompts: list[U32Array], block_size: int, passes: int) -> list[int]:
    """Time the way from tokens to the best rank in separate calls: hash, match, argmax."""
    matcher = target.index.matcher()
    hashes = hashing.local_hashes
    took: list[int] = []
    for number in range(passes + 1):
        lap = [0] * len(prompts)
        for at, prompt in enumerate(prompts):
            start = clock()
            n = matcher.match(hashes(prompt, block_size))
            if n:
                matcher.ranks[matcher.blocks[:n].argmax()]
            lap[at] = clock() - start
        if number:
            took += lap
    return took


def time_requests(target: Grown, prompts: list[U32Array], block_size: int, passes: int) -> list[int] | None:
    """Time the way from tokens to the best worker in the index's single call; None if it has no such call."""
    find: Any = getattr(target.index, "find_matches_for_request", None)
    if find is None:
        return None
    took: list[int] = []
    for number in range(passes + 1):
        lap = [0] * len(prompts)
        for at, prompt in enumerate(prompts):
            start = clock()
            _ = find(prompt, block_size).best_worker
            lap[at] = clock() - start
        if number:
            took += lap
    return took


def cycle(target: Grown, workload: Workload, n_event_blocks: int = 32) -> tuple[EventColumns, list[int]]:
    """Columns that undo the workload and then apply it again, for a writer that never pauses; and their offsets.

    Undoing removes the blocks that are held at the end, latest first, in events of `n_event_blocks` blocks of one rank.
    """
    live = workload.live()[::-1]
    offset = workload.ev_off.astype(np.int64)
    rank = workload.ev_worker[np.searchsorted(offset, live, side="right") - 1]
    order = np.argsort(rank, kind="stable")
    live, rank = live[order], rank[order]
    starts: list[int] = []
    edges = np.flatnonzero(np.diff(rank.astype(np.int64))) + 1
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(live)], strict=True):
        starts += range(first, last, n_event_blocks)
    n_removals = len(starts)
    done = target.arrays
    undo_offset = np.array([*starts, len(live)], dtype=np.int64)
    holders = np.array(target.holders, dtype=np.int64)
    shuffle = np.random.default_rng(1).permutation(n_removals)  # mixes the events of different ranks, as a fleet does
    sizes = np.diff(undo_offset)[shuffle]
    names = np.concatenate([live[undo_offset[at] : undo_offset[at + 1]] for at in shuffle])
    begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    offset = np.concatenate([begin[:-1], done["offset"] + begin[-1]])
    columns = EventColumns(
        holder=np.concatenate([holders[rank[undo_offset[:-1][shuffle]]], done["holder"]]),
        kind=np.concatenate([np.full(n_removals, REMOVED_BLOCKS, dtype=np.int64), done["kind"]]),
        parent=np.concatenate([np.zeros(n_removals, dtype=np.uint64), done["parent"]]),
        offset=offset,
        names=np.concatenate([workload.blk_seq[names], done["names"]]),
        local=np.concatenate([np.zeros(len(names), dtype=np.uint64), done["local"]]),
    )
    return columns, offset.tolist()

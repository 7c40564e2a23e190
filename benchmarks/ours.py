"""Our index as the benchmarks use it: from engines' events to answers, on the way of the product.

What lives here: all uses of the product's API in the benchmarks of the index. What must not: peers, repetitions,
reports.

An agent applies batches of events to its store of runs (`reduce`) and writes the changed records (`records`). A router
joins and decodes them (`decode`), folds them into its tree (`fold`), and answers queries from the tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.workload import REMOVED, U32Array, U64Array, Workload
from streams.core import hashing
from streams.core.events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvents, KvEvent
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, Tier, WorkerId
from streams.core.index.interface import Candidates
from streams.core.index.tree_fold import TreeRunFold
from streams.core.reducer.holdings import Holdings
from streams.kafka.records import encode_batch
from streams.tables.event_decoding import decode_events
from streams.tables.run_decoding import decode, join
from streams.tables.run_table import RunTable

clock = time.perf_counter_ns

#: Weights of the four tiers, as routers use them.
WEIGHTS = (1.0, 0.75, 0.25, 0.0)

_ALL = 1 << 30
_DECODED_TOGETHER = 512

#: One row of the table, as Kafka has it.
Record = tuple[bytes, bytes | None]


def ranks_of(workload: Workload) -> list[RankId]:
    """The ranks of a workload, by its numbers."""
    return [RankId(WorkerId(number), DpRank(0)) for number in range(workload.n_ranks)]


def batches_of(workload: Workload) -> list[EngineBatch]:
    """The workload's events, each as the batch of an engine, in the form in which an agent decodes them."""
    ranks, offset = ranks_of(workload), workload.ev_off.astype(int).tolist()
    parents, sequence = workload.ev_parent.tolist(), [0] * len(ranks)
    batches = []
    for number, worker in enumerate(workload.ev_worker.tolist()):
        event = _event(workload, offset[number], offset[number + 1], parents[number], workload.ev_kind[number])
        batches.append(_batch(workload, ranks[worker], sequence[worker], event))
        sequence[worker] += 1
    return as_decoded(batches)


def as_decoded(batches: Sequence[EngineBatch]) -> list[EngineBatch]:
    """The same batches, decoded from the bytes of kv-events: their events are rows for the kernels of the store."""
    decoded: list[EngineBatch] = []
    for first in range(0, len(batches), _DECODED_TOGETHER):
        for batch in decode_events([encode_batch(batch) for batch in batches[first : first + _DECODED_TOGETHER]]):
            assert isinstance(batch, EngineBatch)
            decoded.append(batch)
    return decoded


def _event(workload: Workload, first: int, last: int, parent: int, kind: int) -> KvEvent:
    names = workload.blk_seq[first:last]
    if kind == REMOVED:
        return BlocksRemoved(names, Tier.DEVICE)
    return BlocksStored(EngineHash(parent) if parent else None, names, workload.blk_local[first:last], Tier.DEVICE)


def _batch(workload: Workload, rank: RankId, sequence: int, event: KvEvent) -> EngineBatch:
    return EngineBatch(rank, "m", workload.block_size, Incarnation(1), sequence, 0, 0, EngineEvents((event,)))


@dataclass(slots=True)
class Took:
    """Nanoseconds of each part of the way from events to the tree."""

    reduce: int = 0
    records: int = 0
    decode: int = 0
    fold: int = 0

    @property
    def path(self) -> int:
        """The sum of all parts."""
        return self.reduce + self.records + self.decode + self.fold


class Path:
    """An agent's store of runs and a router's tree, without Kafka between them."""

    def __init__(self, workload: Workload) -> None:
        self.ranks = ranks_of(workload)
        self.holdings: Holdings[Sequence[KvEvent], Record] = Holdings(RunTable())
        self.tree = TreeRunFold()

    def apply(self, batches: Sequence[EngineBatch], transaction: int) -> Took:
        """Take batches to the tree, `transaction` of them at a time; returns how long each part took."""
        took = Took()
        for first in range(0, len(batches), transaction):
            self.take(batches[first : first + transaction], took)
        return took

    def take(self, batches: Sequence[EngineBatch], took: Took) -> None:
        """Take the batches of one transaction to the tree."""
        apply, begun = self.holdings.apply, clock()
        for batch in batches:
            assert isinstance(batch.body, EngineEvents)
            apply(batch, batch.body.events)
        reduced = clock()
        records = self.holdings.take_changes(_ALL).runs
        written = clock()
        columns, _ = decode(*join(records))
        decoded = clock()
        refused = self.tree.fold_records(columns)
        folded = clock()
        assert not refused
        took.reduce += reduced - begun
        took.records += written - reduced
        took.decode += decoded - written
        took.fold += folded - decoded


def filled(workload: Workload, batches: Sequence[EngineBatch], transaction: int) -> Path:
    """A path that has applied all batches."""
    path = Path(workload)
    path.apply(batches, transaction)
    return path


def logged(holdings: Holdings[Sequence[KvEvent], Record], batches: Sequence[EngineBatch]) -> list[Record]:
    """Apply the batches of one transaction; returns the records that it writes."""
    for batch in batches:
        assert isinstance(batch.body, EngineEvents)
        holdings.apply(batch, batch.body.events)
    return holdings.take_changes(_ALL).runs


def match_sum(path: Path, queries: list[U64Array]) -> int:
    """Add up the depths of all ranks over all queries, a sum by which engines are compared."""
    candidates = Candidates(path.ranks)
    return sum(int(path.tree.find_matches(query).columns(candidates, WEIGHTS)[0].sum()) for query in queries)


def time_matches(path: Path, queries: list[U64Array], passes: int) -> list[int]:
    """Time the lookup as a decision uses it, up to the columns over its candidates, after one untimed pass."""
    find, candidates = path.tree.find_matches, Candidates(path.ranks)
    took: list[int] = []
    for number in range(passes + 1):
        lap = [0] * len(queries)
        for position, query in enumerate(queries):
            start = clock()
            find(query).columns(candidates, WEIGHTS)
            lap[position] = clock() - start
        if number:
            took += lap
    return took


def time_scores(path: Path, queries: list[U64Array], passes: int) -> tuple[list[int], int]:
    """Time the lookup that builds a mapping of ranks to blocks; returns nanoseconds, and the sum of one pass."""
    find, some_rank = path.tree.find_matches, path.ranks[0]
    took: list[int] = []
    total = 0
    for number in range(passes + 1):
        lap = [0] * len(queries)
        for position, query in enumerate(queries):
            start = clock()
            scores = find(query).scores
            scores.get(some_rank)  # so that a mapping that is built on first use is built within the timed part
            lap[position] = clock() - start
            if not number:
                total += sum(scores.values())
        if number:
            took += lap
    return took, total


def time_tokens(path: Path, prompts: list[U32Array], block_size: int, passes: int) -> list[int]:
    """Time the way from tokens to the best rank: hash, match, compare."""
    find, hashes = path.tree.find_matches, hashing.local_hashes
    took: list[int] = []
    for number in range(passes + 1):
        lap = [0] * len(prompts)
        for position, prompt in enumerate(prompts):
            start = clock()
            _ = find(hashes(prompt, block_size)).best_worker
            lap[position] = clock() - start
        if number:
            took += lap
    return took


def undoing(workload: Workload, n_event_blocks: int = 32) -> list[tuple[RankId, KvEvent]]:
    """Events that remove what is held at the end, latest first, in events of `n_event_blocks` blocks of one rank."""
    ranks = ranks_of(workload)
    live = workload.live()[::-1]
    offset = workload.ev_off.astype(np.int64)
    rank = workload.ev_worker[np.searchsorted(offset, live, side="right") - 1]
    order = np.argsort(rank, kind="stable")
    live, rank = live[order], rank[order]
    edges = (np.flatnonzero(np.diff(rank.astype(np.int64))) + 1).tolist()
    events: list[tuple[RankId, KvEvent]] = []
    for first, last in zip([0, *edges], [*edges, len(live)], strict=True):
        for begin in range(first, last, n_event_blocks):
            names = workload.blk_seq[live[begin : min(begin + n_event_blocks, last)]]
            events.append((ranks[int(rank[begin])], BlocksRemoved(names, Tier.DEVICE)))
    mixed = np.random.default_rng(1).permutation(len(events)).tolist()  # the events of different ranks, as a fleet's
    return [events[number] for number in mixed]


def cycle(path: Path, workload: Workload, batches: Sequence[EngineBatch], transaction: int) -> Iterator[list[Record]]:
    """The records of transactions that undo the workload and then apply it again, for a writer that never pauses.

    path: has applied all batches; its store goes through the cycle, its tree does not.
    """
    numbers = {rank: path.holdings.progress[rank].sequence for rank in path.ranks if rank in path.holdings.progress}
    events = undoing(workload)
    for batch in batches:
        assert isinstance(batch.body, EngineEvents)
        events += [(batch.rank, event) for event in batch.body.events]
    again: list[EngineBatch] = []
    for rank, event in events:
        numbers[rank] = numbers.get(rank, -1) + 1
        again.append(_batch(workload, rank, numbers[rank], event))
    again = as_decoded(again)
    for first in range(0, len(again), transaction):
        yield logged(path.holdings, again[first : first + transaction])

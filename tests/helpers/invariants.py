"""Checks of the product's data structures as wholes, for the tests: slow, and they read private attributes.

What lives here: `check`, which raises AssertionError with the first broken invariant of a structure, and the contents
of structures. What must not: expectations about answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import singledispatch

import numpy as np

from streams.core.hashing import sequence_hashes
from streams.core.ids import U64_MASK, DpRank, Epoch, Incarnation, Int64Array, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.predicted_index import PredictedPrefixIndex
from streams.core.index.tree_fold import TreeRunFold
from streams.core.loads.active_prefixes import _BYTES_PER_BLOCK, ActivePrefixes, PrefixNode
from streams.core.loads.bookings import ActiveLoads, _active_bytes, _known_bytes
from streams.core.loads.ended_bookings import EndedBookings
from streams.core.loads.load_table import DECODE, OUTPUT, PREFILL, REQUESTS
from streams.core.loads.rank_times import (
    CHARGED_US,
    COMPUTED_US,
    EARLIEST_MS,
    N_WAITING,
    PREFILLED_MS,
    RECENT_TOKENS,
    WAITING_TOKENS,
    WAITING_US,
    RankTimes,
    TimedBooking,
)
from streams.core.reducer.holdings import Holdings
from streams.core.reducer.kernels import layout
from streams.core.routing.queue import RequestQueue
from streams.tables.run_table import RunTable
from tests.helpers.plain_run_store import PlainRunStore
from tests.helpers.tree_reader import TreeReader


@singledispatch
def check(structure: object) -> None:
    """Raise AssertionError with the first broken invariant of a structure."""
    raise TypeError(f"nothing is known of the invariants of {type(structure).__name__}")


@check.register
def _(plain: PlainRunStore) -> None:
    plain.check()


@check.register
def check_holdings(holdings: Holdings) -> None:  # type: ignore[type-arg]  # singledispatch needs the class itself
    """Check the store of runs."""
    check(holdings.runs)


def members_of(runs: object) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
    """Every block that a rank holds, by a store of runs."""
    if isinstance(runs, RunTable):
        return table_members(runs)
    assert isinstance(runs, PlainRunStore)
    return runs.members()


# -- the index of routers ----------------------------------------------------------------------------------------------


@check.register
def check_tree(fold: TreeRunFold) -> None:
    """Check the tree, and the table of known holders."""
    TreeReader(fold._memory).check()
    assert fold._numbers.keys() <= fold._epochs.keys(), "a rank with runs has an epoch"
    n_known = 0
    for worker, place, holder, incarnation, generation, *_ in fold._known.tolist():
        n_known += place != 0
        if holder:
            rank = RankId(WorkerId(worker & U64_MASK), DpRank((place - 1) >> 2))
            epoch = Epoch(Incarnation(incarnation & U64_MASK), generation)
            assert fold._epochs.get(rank) == epoch, f"a known holder has the epoch of its rank {rank}"
            owner = fold._holders.get((fold._numbers.get(rank, -1), (place - 1) & 3))
            assert owner == holder - 1, f"a known holder belongs to its rank {rank} and tier"
    assert n_known == fold._n_known, "known holders are counted"


@check.register
def check_predictions(index: PredictedPrefixIndex) -> None:
    """Check the held blocks, and the times of predictions."""
    times = list(index._predicted.values())
    assert index._predicted.keys() == predicted(index), "the held blocks are the predicted blocks"
    masks: dict[int, int] = {}
    for rank, block in predicted(index):
        masks[block] = masks.get(block, 0) | 1 << index._bit_of[rank]
    assert masks == index._holders, "the masks of holders are those of what the ranks hold"
    assert {rank: bit for bit, rank in enumerate(index._rank_at) if rank is not None} == index._bit_of
    assert times == sorted(times), "predictions are in order"
    if times:
        assert index._now_s - times[0] < index._ttl_s, "no prediction has expired"
        assert times[0] <= times[-1] <= index._now_s, "no prediction is in the future"
    assert len(times) <= index._blocks_max, "there are no more blocks than the limit"


def predicted(index: PredictedPrefixIndex) -> set[tuple[RankId, int]]:
    """The ranks and sequence hashes of all predicted blocks."""
    return {(rank, block) for rank, held in index._held.items() for block in held}


# -- the agents' store of runs -----------------------------------------------------------------------------------------


@check.register
def check_table(table: RunTable) -> None:
    """Check every run, and the counts of all of them."""
    ranks = list(table._numbers)
    n_held, n_blocks, heads = 0, 0, 0
    for line in _runs(table):
        column, shape, present = (int(line[word]) for word in (layout.RUN_COLUMN, layout.RUN_SHAPE, layout.RUN_PRESENT))
        length = shape & layout.LENGTH_MASK
        local, sequence = _hashes(table, line)
        parent = int(line[layout.RUN_PARENT]) & U64_MASK if shape & layout.HAS_PARENT else None
        chain = sequence_hashes(local.view(np.uint64), None if parent is None else SequenceHash(parent))
        assert chain.tolist() == sequence.view(np.uint64).tolist(), "sequence hashes follow from the parent"
        assert int(line[layout.RUN_FIRST]) == int(sequence[0]), "a run's key names its first block"
        assert present and present >> length == 0, "presence bits are of blocks in the run"
        assert int(line[layout.RUN_LABELLED]) & ~present == 0, "labels are of held blocks"
        is_first = int(line[layout.RUN_START]) == 0
        assert is_first == (parent is None), "only a run at the start of a prompt has no parent"
        assert column >> 2 < len(ranks), "a run belongs to a known rank"
        n_blocks += length
        n_held += present.bit_count()
        heads += int(line[layout.RUN_PREVIOUS]) == 0
    words, columns = table._words, table._columns[: len(ranks) * layout.N_TIERS]
    assert n_blocks == int(words[layout.BY_SEQUENCE + layout.MAP_ENTRIES]), "each block is in the map by sequence hash"
    assert n_held == int(words[layout.BY_ENGINE + layout.MAP_ENTRIES]), "each held block is in the map by engine hash"
    assert n_held == int(columns[:, layout.COLUMN_HELD].sum())
    assert heads == np.count_nonzero(columns[:, layout.COLUMN_HEAD])
    for which, arena in table._maps.items():
        found = int(np.count_nonzero(arena.words[: int(words[which + layout.MAP_MASK]) + 1]))
        assert found == int(words[which + layout.MAP_ENTRIES]), "the count of a map is its number of entries"


def table_members(table: RunTable) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
    """Every block that a rank of a store of runs holds."""
    ranks = list(table._numbers)
    for line in _runs(table):
        column, present = int(line[layout.RUN_COLUMN]), int(line[layout.RUN_PRESENT])
        for offset, block in enumerate(_hashes(table, line)[1].tolist()):
            if present >> offset & 1:
                yield ranks[column >> 2], Tier(column & 3), SequenceHash(block & U64_MASK)


def _runs(table: RunTable) -> Iterator[Int64Array]:
    """Yield the words of every run."""
    n_runs = int(table._words[layout.N_RUNS])
    lines = table._arenas[layout.RUNS].words[: n_runs * layout.RUN_WORDS].reshape(-1, layout.RUN_WORDS)
    # Every id below N_RUNS has been written once, so -1 reliably marks the free ones.
    yield from lines[lines[:, layout.RUN_COLUMN] >= 0]


def _hashes(table: RunTable, line: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return local and sequence hashes of a run, as bit patterns."""
    shape = int(line[layout.RUN_SHAPE])
    length = shape & layout.LENGTH_MASK
    capacity = layout.SPAN_BLOCKS_MIN << (shape >> layout.CLASS_SHIFT & 255)
    spans, at = table._arenas[layout.SPANS].words, int(line[layout.RUN_SPAN])
    return spans[at:][:length], spans[at + 2 * capacity :][:length]


# -- loads -------------------------------------------------------------------------------------------------------------


@check.register
def check_loads(loads: ActiveLoads) -> None:
    """Check all bookings, and the sums over them."""
    states = loads._states
    check(loads._prefixes)
    _check_sums(loads)
    assert not any(state.freed and state.booking is not None for state in states.values()), "no ended booking is active"
    n_bytes = sum(map(_known_bytes, states))
    n_bytes += sum(
        _active_bytes(state.booking)
        for state in states.values()
        if state.booking is not None and state.node is not None
    )
    assert n_bytes == loads._n_bytes, "the bytes of bookings are counted"
    check_times(loads.times, (state.timed for state in states.values() if state.timed is not None))
    check(loads._ended)
    timed = sorted(key for key, state in states.items() if state.expires_ms is not None)
    scheduled = [key for clock in loads._expiries._clocks.values() for key in (*clock.in_order, *clock.late)]
    assert sorted(scheduled) == timed, "exactly the bookings that have a time are due"
    by_request = [state for of_request in loads._by_request.values() for state in of_request]
    assert set(map(id, by_request)) == set(map(id, states.values())), "the bookings of requests are those that are kept"
    assert len(by_request) == len(states)


def _check_sums(loads: ActiveLoads) -> None:
    sums = np.zeros_like(loads.table)
    for node in prefix_nodes(loads._prefixes):
        for row in node.uses:
            sums[DECODE, row] += node.n_blocks
    for state in loads._states.values():
        if state.booking is not None and state.node is not None:
            row, output = loads._ranks.row_of(state.booking.rank), state.booking.output_blocks
            sums[PREFILL, row] += state.counted_prefill
            sums[DECODE, row] += output
            sums[REQUESTS, row] += 1
            sums[OUTPUT, row] += output
    assert np.array_equal(sums, loads.table), "loads are counted"


def decode_blocks_with(loads: ActiveLoads, rank: RankId, sequence: bytes) -> int:
    """Distinct active blocks of a rank if a request with this chain joined it."""
    row = loads._ranks.row_of(rank)
    shared = loads.shared_blocks(sequence)[row] if row else 0
    return loads.load(rank).decode_blocks + len(sequence) // _BYTES_PER_BLOCK - int(shared)


def check_times(times: RankTimes, timed: Iterable[TimedBooking]) -> None:
    """Check that the numbers are those of these bookings."""
    found = np.zeros_like(times._table)
    others = [PREFILLED_MS, CHARGED_US, COMPUTED_US, RECENT_TOKENS]
    assert times._table[RECENT_TOKENS].min() >= 0, "what a rank computed lately is not negative"
    found[others] = times._table[others]
    for booking in timed:
        if not (booking.counted and booking.waiting):
            continue
        if not found[N_WAITING, booking.row] or booking.since_ms < found[EARLIEST_MS, booking.row]:
            found[EARLIEST_MS, booking.row] = booking.since_ms
        found[N_WAITING, booking.row] += 1
        found[WAITING_US, booking.row] += booking.forecast.prefill_us
        found[WAITING_TOKENS, booking.row] += booking.tokens
    assert np.array_equal(found, times._table), "the times of ranks are counted"


@check.register
def check_prefixes(tree: ActivePrefixes) -> None:
    """Check every run of the tree."""
    for node in prefix_nodes(tree):
        assert node.chain and not len(node.chain) % _BYTES_PER_BLOCK and node.uses, "no run is empty"
        assert node.n_requests == sum(node.uses.values()), "the requests of a run are counted"
        assert node.bits == sum(1 << row for row in node.uses), "the bits of a run are the rows that use it"
        assert min(node.uses.values()) >= 1, "each row of a run uses it"
        through: dict[int, int] = {}
        for first, child in node.children.items():
            assert child.parent is node and child.chain[:_BYTES_PER_BLOCK] == first, "a run is attached to its parent"
            for row, uses in child.uses.items():
                through[row] = through.get(row, 0) + uses
        assert all(uses <= node.uses.get(row, 0) for row, uses in through.items()), "no more requests leave than enter"
        assert len(node.children) != 1 or through != node.uses, "runs that the same requests use are joined"


def prefix_nodes(tree: ActivePrefixes) -> Iterator[PrefixNode]:
    """Every run of a tree of active prefixes, parents first."""
    todo = list(tree._root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo += node.children.values()


@check.register
def check_ended(ended: EndedBookings) -> None:
    """Check the counts of entries, and the shard of each."""
    shards = {id(shard): shard for shard in ended._directory}.values()
    n_alive = sum(int(ended._alive(shard).sum()) for shard in shards)
    assert n_alive == ended._n, "ended bookings are counted"
    assert sum(map(len, ended._clocks.values())) == ended._n, "each ended booking has a time"
    for index, shard in enumerate(ended._directory):
        request = shard.entries()[0]
        low = np.uint64((1 << shard.depth) - 1)
        assert not (request[ended._alive(shard)] & low != np.uint64(index) & low).any(), f"shard {index} has its own"


# -- the queue ---------------------------------------------------------------------------------------------------------


@check.register
def check_queue(queue: RequestQueue) -> None:
    """Check the places of all requests, and the counts of them."""
    flows = [flow for of_priority in queue._flows.values() for flow in of_priority.values()]
    placed = {
        number: (priority, tenant)
        for priority, of_priority in queue._flows.items()
        for tenant, flow in of_priority.items()
        for _, number in flow.places
    }
    assert placed == {number: (request.priority, request.tenant) for number, (request, _) in queue._waiting.items()}
    assert all(flow.places == sorted(flow.places) for flow in flows)
    assert all(queue._flows.values()) and all(flow.places for flow in flows)
    assert queue._by_tenant == Counter(request.tenant for request, _ in queue._waiting.values())
    assert queue.n_bytes == sum(request.n_bytes for request, _ in queue._waiting.values())

"""The compiled store of runs compared with the pure-Python one, and the kernels' decoder compared with fastavro."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvents,
    FeedState,
    KvEvent,
    MoeLabels,
    RestatedRun,
)
from streams.core.ids import DpRank, EngineHash, Epoch, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.reducer.holdings import Holdings
from streams.core.reducer.kernels import layout
from streams.core.reducer.kernels.layout import EVENT_BLOCKS, EVENT_KIND
from streams.errors import BadRecord
from streams.kafka.records import decode_batch, encode_batch
from streams.tables.event_decoding import EventRows, decode_events, rows_of
from streams.tables.records import RUN_KEY, decode_run, encode_run
from streams.tables.run_table import RunTable
from tests.helpers.holdings import RANK, batch, names, stored, u64
from tests.helpers.invariants import check, members_of, table_members
from tests.helpers.plain_run_store import PlainHoldings, PlainRunStore, plain_holdings
from tests.helpers.reference import random_history

ALL = 1 << 30

seeds = st.integers(0, 2**32)
feeds = st.sampled_from([FeedState.LIVE, *FeedState])

Records = dict[bytes, bytes]


def folded(records: Records, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
    """Apply changes to a table."""
    for key, value in changes:
        if value is None:
            records.pop(key, None)
        else:
            records[key] = value


def plain_changes(holdings: PlainHoldings, tombstones_max: int = ALL) -> list[tuple[bytes, bytes | None]]:
    return [
        (RUN_KEY.pack(key), None if run is None else encode_run(run))
        for key, run in holdings.take_changes(tombstones_max).runs
    ]


class Pair:
    """Both stores, with the same batches applied; `check` compares what they hold and what they have written."""

    def __init__(self) -> None:
        self.table = RunTable()
        self.fast: Holdings[Iterable[KvEvent], tuple[bytes, bytes | None]] = Holdings(self.table)
        self.plain = plain_holdings()
        self.written: tuple[Records, Records] = ({}, {})

    def apply(self, one: EngineBatch, events: Iterable[KvEvent]) -> None:
        assert self.fast.apply(one, events) is self.plain.apply(one, list(events))

    def remove(self, worker_id: int, incarnation: Incarnation) -> None:
        assert self.fast.remove_worker(worker_id, incarnation) is self.plain.remove_worker(worker_id, incarnation)

    def take(self, tombstones_max: int = ALL) -> None:
        changes = self.fast.take_changes(tombstones_max)
        assert {p.rank: p for p in changes.progress} == {
            rank: replace(self.plain.progress[rank], n_blocks=self.plain.runs.n_blocks(rank))
            for rank in (p.rank for p in changes.progress)
        }
        folded(self.written[0], changes.runs)
        folded(self.written[1], plain_changes(self.plain, tombstones_max))

    def check(self) -> None:
        check(self.table)
        check(self.plain)
        assert set(members_of(self.fast.runs)) == set(members_of(self.plain.runs))
        assert self.fast.progress.keys() == self.plain.progress.keys()
        for rank in self.plain.progress:
            assert self.fast.runs.n_blocks(rank) == self.plain.runs.n_blocks(rank)

    def check_written(self) -> None:
        """Take all remaining changes, and compare what both have written byte by byte."""
        self.take()
        assert self.written[0] == self.written[1]
        assert not self.fast.has_pending_tombstones
        assert not self.plain.has_pending_tombstones

    def recovered(self) -> None:
        """Load both stores from what they have written."""
        self.table.begin_load({rank: progress.epoch for rank, progress in self.fast.progress.items()})
        n_strays, bad = self.table.load_records(sorted(self.written[0].items()))
        assert (n_strays, bad) == (0, [])
        runs = [decode_run(key, value) for key, value in self.written[1].items()]
        self.plain.load(list(self.plain.progress.values()), runs)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, n_ranks=st.integers(1, 5), takes=st.floats(0.0, 1.0), recovers=st.floats(0.0, 0.1))
def test_every_history_leaves_both_stores_with_the_same_blocks_and_rows(
    seed: int, n_ranks: int, takes: float, recovers: float
) -> None:
    """The kernel decodes the batches; transactions have one or many; both stores are reloaded now and then."""
    rng = random.Random(seed)
    pair = Pair()
    for one in random_history(random.Random(seed), 150, n_ranks, n_blocks_max=150):
        if isinstance(one.body, EngineEvents):
            (decoded,) = decode_events([encode_batch(one)])
            assert isinstance(decoded, EngineBatch)
            assert isinstance(decoded.body, EngineEvents)
            pair.apply(decoded, decoded.body.events)
        else:
            pair.remove(one.rank.worker_id, one.incarnation)
        if rng.random() < takes:
            pair.take(rng.choice((0, 1, 5, ALL)))
        if rng.random() < recovers:
            pair.take(rng.choice((0, 3)))
            pair.recovered()
        pair.check()
    pair.check_written()


#: Engine hashes and contents from so small a space that every store collides with an older one.
small_events = st.one_of(
    st.builds(
        lambda parent, blocks, tier, moe: (
            stored(u64(*(name for name, _ in blocks)), u64(*(local for _, local in blocks)), parent, tier)
            if moe is None
            else BlocksStored(
                None if parent is None else EngineHash(parent),
                u64(*(name for name, _ in blocks)),
                u64(*(local for _, local in blocks)),
                tier,
                MoeLabels(*moe),
            )
        ),
        st.sampled_from([None, None, 0, 1, 2, 3, 4, 5]),
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=5),
        st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
        st.sampled_from([None, None, (1, None, 3), (None, None, None), (2**31 - 1, 2**31 - 2, 0)]),
    ),
    st.builds(
        BlocksRemoved,
        st.lists(st.integers(0, 5), max_size=4).map(lambda found: u64(*found)),
        st.sampled_from([Tier.DEVICE, Tier.HOST]),
    ),
    st.just(AllBlocksCleared()),
)


@settings(max_examples=300, deadline=None)
@given(batches=st.lists(st.lists(small_events, max_size=4), max_size=12), seed=seeds)
def test_engine_hashes_that_move_and_contents_that_repeat(batches: list[list[KvEvent]], seed: int) -> None:
    """The later store wins an engine hash, a block is stored once, and labels stay with it, as in pure Python."""
    rng = random.Random(seed)
    pair = Pair()
    for number, events in enumerate(batches):
        (decoded,) = decode_events([encode_batch(batch(number, *events))])
        assert isinstance(decoded, EngineBatch)
        assert isinstance(decoded.body, EngineEvents)
        pair.apply(decoded, decoded.body.events)
        pair.check()
        if rng.random() < 0.5:
            pair.take(rng.choice((0, 1, ALL)))
        if rng.random() < 0.2:
            pair.take(0)
            pair.recovered()
            pair.check()
    pair.check_written()


@settings(max_examples=100, deadline=None)
@given(events=st.lists(small_events, max_size=8))
def test_rows_are_equivalent_to_their_events(events: list[KvEvent]) -> None:
    """The kernel's rows from bytes and the rows made from events have the same meaning."""
    original = batch(3, *events)
    (decoded,) = decode_events([encode_batch(original)])
    assert isinstance(decoded, EngineBatch)
    assert isinstance(decoded.body, EngineEvents)
    assert isinstance(decoded.body.events, EventRows)
    assert replace(decoded, body=original.body) == original
    again = replace(original, body=EngineEvents(tuple(decoded.body.events)))
    assert encode_batch(again) == encode_batch(original)
    by_hand, by_kernel = rows_of(events)[0], rows_of(decoded.body.events)[0]
    for one, other in zip(by_hand.tolist(), by_kernel.tolist(), strict=True):
        assert one[EVENT_KIND] == other[EVENT_KIND]
        assert one[EVENT_BLOCKS] == other[EVENT_BLOCKS]


@settings(max_examples=300, deadline=None)
@given(seed=seeds, data=st.data())
def test_both_decoders_agree_on_any_bytes(seed: int, data: st.DataObject) -> None:
    """Of good, cut, changed and joined records, the kernel takes what decode_batch takes, or leaves it to that."""
    rng = random.Random(seed)
    events: list[KvEvent] = data.draw(st.lists(small_events, max_size=3))
    one = replace(batch(rng.randrange(-1, 3), *events), incomplete=rng.random() < 0.1, feed=data.draw(feeds))
    raw = bytearray(encode_batch(one))
    for _ in range(rng.randrange(3)):
        kind = rng.randrange(4)
        at = rng.randrange(len(raw) or 1)
        if kind == 0:
            del raw[at:]
        elif kind == 1 and raw:
            raw[at] = rng.randrange(256)
        elif kind == 2:
            raw[at:at] = rng.randbytes(rng.randrange(12))
        else:
            raw += rng.randbytes(rng.randrange(4))
    value = bytes(raw)
    (found,) = decode_events([value])
    try:
        expected: EngineBatch | BadRecord = decode_batch(value)
    except BadRecord as exc:
        expected = exc
    if isinstance(expected, BadRecord):
        assert isinstance(found, BadRecord)
        assert (found.reason, str(found)) == (expected.reason, str(expected))
    else:
        assert isinstance(found, EngineBatch)
        assert encode_batch(found) == encode_batch(expected)


def test_unusual_records_are_left_to_the_codec() -> None:
    """Stores into CXL memory, empty values and None among good records are decoded in their order."""
    pooled = replace(stored(names(1), u64(1)), cxl=CxlMemoryMetadata("in_transit", "p", (1,)))
    values = [encode_batch(batch(1)), None, b"", encode_batch(batch(2, pooled)), encode_batch(batch(3))]
    found = decode_events(values)
    assert [isinstance(each, BadRecord) for each in found] == [False, True, True, False, False]
    last = found[3]
    assert isinstance(last, EngineBatch)
    assert isinstance(last.body, EngineEvents)
    assert last.body.events[0].cxl is not None  # type: ignore[union-attr]


def test_only_live_and_complete_batches_are_decoded_by_the_kernel() -> None:
    """They are nearly all batches, and their events stay rows; both decoders read the others alike."""
    usual = batch(1, stored(names(1), u64(1)))
    for one in (usual, replace(usual, incomplete=True), *(replace(usual, feed=feed) for feed in FeedState)):
        (found,) = decode_events([encode_batch(one)])
        assert isinstance(found, EngineBatch) and isinstance(found.body, EngineEvents)
        assert isinstance(found.body.events, EventRows) == (one == usual)
        assert (found.incomplete, found.feed) == (one.incomplete, one.feed)


def test_a_batch_of_many_clears_is_decoded_when_rows_run_out() -> None:
    """An event of one byte needs a row too; a record that needs more rows than are left is decoded by the codec."""
    many = batch(1, *[AllBlocksCleared()] * 5000)
    (found,) = decode_events([encode_batch(many)])
    assert isinstance(found, EngineBatch)
    assert isinstance(found.body, EngineEvents)
    assert len(found.body.events) == 5000


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 31, 32, 33, pytest.param(5000, marks=pytest.mark.thorough)])
def test_both_stores_agree_on_runs_of_every_length(n_blocks: int) -> None:
    """The lengths need spans of every class, maps that grow, and more records than one kernel call takes."""
    pair = Pair()
    for number in range(3):
        first = number * n_blocks
        event = stored(names(n_blocks, 1 + first), names(n_blocks, 10**6 + first), None if number == 0 else first)
        pair.apply(batch(number, event), [event])
    singles: list[KvEvent] = [stored(u64(10**7 + n), u64(10**8 + n)) for n in range(n_blocks)]
    pair.apply(batch(3, *singles), singles)
    pair.check()
    pair.take()
    pair.recovered()
    pair.check()
    removals: list[KvEvent] = [
        BlocksRemoved(names(n_blocks, 1)),
        BlocksRemoved(u64(*range(10**7, 10**7 + n_blocks, 2))),
    ]
    pair.apply(batch(4, *removals), removals)
    pair.check()
    pair.apply(batch(5, AllBlocksCleared()), [AllBlocksCleared()])
    pair.take(2)
    pair.check()
    pair.check_written()
    assert pair.written == ({}, {})


def test_both_stores_agree_on_restated_runs() -> None:
    """A restated run names its parent by sequence hash, and the parent need not be held."""
    rng = random.Random(5)
    table, plain = RunTable(), PlainRunStore()
    epoch = Epoch(Incarnation(1), 1)
    for store in (table, plain):
        store.end(RANK, epoch)
    for n in range(200):
        n_blocks = rng.randrange(1, 40)
        parent = None if rng.random() < 0.4 else SequenceHash(rng.choice([b for _, _, b in plain.members()] or [7]))
        run = RestatedRun(
            0 if parent is None else 3,
            parent,
            u64(*(rng.randrange(500) for _ in range(n_blocks))),
            u64(*(rng.randrange(3) for _ in range(n_blocks))),
            rng.choice([Tier.DEVICE, Tier.DISK]),
        )
        table.restate(RANK, [run])
        plain.restate(RANK, [run])
        assert set(table_members(table)) == set(plain.members()), n
    written = [(RUN_KEY.pack(key), encode_run(run)) for key, run in plain.take_changes(ALL) if run is not None]
    assert {key: value for key, value in table.take_changes(ALL) if value is not None} == dict(written)


def test_bad_records_unknown_ranks_and_old_epochs_are_distinguished_on_loading() -> None:
    """Bad bytes are returned by position, a run of an unknown rank is counted, one of an old epoch gets a tombstone."""
    plain = plain_holdings()
    unknown = RankId(WorkerId(99), DpRank(1))
    for rank in (RANK, unknown):
        plain.apply(batch(0, rank=rank), [stored(names(3), u64(1, 2, 3))])
    good = {key: value for key, value in plain_changes(plain) if value is not None}
    table = RunTable()
    table.begin_load({RANK: Epoch(Incarnation(1), 0)})
    records = [*good.items(), (b"Rx", b"y"), (next(iter(good)), b"\xc3\x01")]
    n_strays, bad = table.load_records(records)
    assert (n_strays, [(position, exc.reason) for position, exc in bad]) == (1, [(2, "bad_key"), (3, "not_avro")])
    assert len(list(table_members(table))) == 3
    table.begin_load({RANK: Epoch(Incarnation(1), 1)})
    assert table.load_records([*good.items()]) == (1, [])
    assert list(table_members(table)) == []
    assert table.has_pending_tombstones
    ((key, value),) = table.take_changes(ALL)
    assert value is None
    assert key in good
    assert not table.has_pending_tombstones


def test_incarnations_are_compared_as_unsigned() -> None:
    """The largest incarnation is newer than all others although its sign bit is set."""
    plain = plain_holdings()
    plain.apply(batch(0, incarnation=2**63 + 5), [stored(names(3), u64(1, 2, 3))])
    records = [(key, value) for key, value in plain_changes(plain) if value is not None]
    table = RunTable()
    table.begin_load({RANK: Epoch(Incarnation(2**63 + 5), 0)})
    assert table.load_records(records) == (0, [])
    assert len(list(table_members(table))) == 3
    table.begin_load({RANK: Epoch(Incarnation(2**63 + 6), 0)})
    assert table.load_records(records) == (0, [])
    assert list(table_members(table)) == []
    table.begin_load({RANK: Epoch(Incarnation(6), 0)})
    table.load_records(records)
    assert len(list(table_members(table))) == 3


def test_memory_of_removed_blocks_is_reused() -> None:
    """Storing and removing the same blocks many times needs no more spans and runs than doing it once."""
    table = RunTable()
    table.end(RANK, Epoch(Incarnation(1), 0))
    store, remove = stored(names(500), names(500)), BlocksRemoved(names(500))
    table.apply(RANK, [store])
    table.apply(RANK, [remove])
    table.take_changes(ALL)
    high_water = table._words[[layout.N_RUNS, layout.N_SPAN_WORDS]].tolist()
    for _ in range(50):
        table.apply(RANK, [store])
        table.apply(RANK, [remove])
        table.take_changes(ALL)
    assert table._words[[layout.N_RUNS, layout.N_SPAN_WORDS]].tolist() == high_water
    check(table)
    assert np.count_nonzero(table._maps[layout.BY_ENGINE].words) == 0

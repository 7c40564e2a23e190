"""The compiled decoder of run records takes what decode_run takes, with the same result, and reads nothing else."""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streams.core.events import FeedState, MoeLabels
from streams.core.hashing import sequence_hashes
from streams.core.ids import DpRank, Epoch, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.arenas import TreeLimits
from streams.core.index.kernels.fold import FOLD_FIRST, FOLD_PRESENT
from streams.core.index.run_columns import RunColumns, columns_of
from streams.core.index.tree_fold import TreeRunFold
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.trust import AnswerMode
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey
from streams.errors import BadRecord, IndexFull
from streams.kafka.avro_frames import codec
from streams.kafka.clients import partition_of
from streams.router_api.knowledge.view import View
from streams.settings import Settings
from streams.tables.kernels.runs import OTHER, decode_records
from streams.tables.records import (
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    PartitionRecord,
    decode_run,
    encode_partition,
    encode_progress,
    encode_run,
)
from streams.tables.run_decoding import decode, decode_runs, join, labels_of
from tests.helpers.holdings import batch, names, stored, u64
from tests.helpers.invariants import check
from tests.helpers.plain_run_store import plain_holdings
from tests.helpers.table_logs import Record, commit, compacted, folded, random_log, state_of_view

HEADER = b"\xc3\x01" + codec("prefix-index-run").fingerprint

hashes = st.integers(0, 2**64 - 1) | st.integers(0, 3)
numbers = st.none() | st.integers(-(2**31), 2**31 - 1)


@st.composite
def any_run(draw: st.DrawFn) -> Run:
    """Return a run that an agent could write."""
    local = draw(st.lists(hashes, min_size=1, max_size=RUN_BLOCKS_MAX))
    parent = draw(st.none() | hashes)
    chained = sequence_hashes(
        np.array(local, dtype=np.uint64), None if parent is None else SequenceHash(parent)
    ).tolist()
    rank = RankId(WorkerId(draw(hashes)), DpRank(draw(st.integers(0, 2**32 - 1))))
    return Run(
        key=RunKey(rank, draw(st.sampled_from(list(Tier))), SequenceHash(chained[0])),
        epoch=Epoch(Incarnation(draw(hashes)), draw(st.integers(0, 2**31 - 1))),
        start=0 if parent is None else draw(st.integers(1, 2**31 - 1)),
        parent=None if parent is None else SequenceHash(parent),
        local=local,
        engine=[draw(hashes)] * len(local),
        sequence=chained,
        present=draw(st.integers(1, (1 << len(local)) - 1)),
        moe=draw(
            st.dictionaries(st.integers(0, len(local) - 1), st.builds(MoeLabels, numbers, numbers, numbers), max_size=3)
        ),
    )


def zigzag(value: int) -> bytes:
    """Encode an Avro long."""
    left = (value << 1 ^ value >> 63) & (1 << 64) - 1
    out = bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    return bytes([*out, left])


def datum(**fields: bytes) -> bytes:
    """Return the value of a run with the one block 42 at position 0, with some fields replaced."""
    usual = {
        "incarnation": zigzag(1),
        "generation": zigzag(2),
        "start": zigzag(0),
        "parent": zigzag(0),
        "local": zigzag(8) + struct.pack("<Q", 42),
        "engine": zigzag(8) + bytes(8),
        "present": zigzag(1) + b"\x01",
        "labels": zigzag(0),
    }
    return HEADER + b"".join({**usual, **fields}.values())


ROOT_KEY = struct.pack(">cQIBQ", b"R", 7, 1, 0, 42)


def slow(key: bytes, value: bytes | None) -> Run | None:
    """Return the result of decode_run; None if it refuses the record."""
    try:
        return decode_run(key, value or b"")
    except BadRecord:
        return None


def same(columns: RunColumns, at: int, expected: Run) -> None:
    """Assert that one row equals this run in every column."""
    wanted, row = columns_of([expected.key], [expected]), slice(*columns.offset[at : at + 2].tolist())
    assert columns.place_of(at) == (expected.key.rank, expected.key.tier)
    assert columns.epoch_of(at) == expected.epoch
    assert columns.local[row].view(np.uint64).tolist() == expected.local
    for which in range(FOLD_FIRST, FOLD_PRESENT + 1):
        assert columns.column(which)[at] == wanted.column(which)[0]


def agree(records: list[Record]) -> None:
    """Assert that the decoder and decode_run agree on every record."""
    columns, others = decode_runs(records)
    for at, (key, value) in enumerate(records):
        if value is None:
            try:
                expected = RUN_KEY.parse(key)
            except BadRecord:
                assert at in others
            else:
                assert at not in others and columns.present[at] == 0
                assert columns.place_of(at) == (expected.rank, expected.tier)
                assert int(columns.column(FOLD_FIRST)[at]) & (1 << 64) - 1 == expected.first
            continue
        run = slow(key, value)
        assert (run is None) == (at in others), (key.hex(), value.hex())
        if run is None:
            assert columns.present[at] == OTHER
            assert columns.offset[at] == columns.offset[at + 1]
        else:
            same(columns, at, run)
    n = len(records)
    for first, last in ((0, n), (n // 2, n), (0, n // 2)):
        runs = {at: slow(*records[at]) for at in range(first, last)}
        labelled = {at: labelled_blocks(run) for at, run in runs.items() if run is not None}
        assert labels_of(columns, first, last) == {at: blocks for at, blocks in labelled.items() if blocks}


def labelled_blocks(run: Run) -> list[tuple[int, MoeLabels]]:
    """Return the held blocks of a run, with their labels."""
    return [(run.sequence[at], run.moe[at]) for at in run.held() if at in run.moe]


@settings(max_examples=100, deadline=None)
@given(runs=st.lists(any_run(), max_size=8), data=st.data())
def test_every_run_that_is_encoded_is_decoded(runs: list[Run], data: st.DataObject) -> None:
    """The runs are mixed with tombstones and records of other kinds, and have MoE labels."""
    records: list[Record] = [(RUN_KEY.pack(run.key), encode_run(run)) for run in runs]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(records)))
        strange = [(ROOT_KEY, None), (b"", None), (b"", b""), (ROOT_KEY, b""), (b"P" * 22, None), (b"R", b"\xc3\x01")]
        records.insert(at, data.draw(st.sampled_from(strange)))
    agree(records)
    for at, run in zip(range(len(runs)), runs, strict=True):
        columns, others = decode_runs([(RUN_KEY.pack(run.key), encode_run(run))])
        assert not others, at
        same(columns, 0, run)


@settings(max_examples=150, deadline=None)
@given(run=any_run(), seed=st.integers(0, 2**32))
def test_a_record_that_was_tampered_with_is_judged_as_decode_run_does(run: Run, seed: int) -> None:
    """Value and key are cut, or have bytes flipped, inserted, removed or repeated."""
    rng = random.Random(seed)
    key, value = RUN_KEY.pack(run.key), encode_run(run)
    records: list[Record] = [(key, value)]
    for _ in range(60):
        raw = bytearray(rng.choice((value, value, value, key)))
        in_key = bytes(raw) == key
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(len(raw) or 1)
            match rng.randrange(6):
                case 0:
                    raw = raw[:at]
                case 1 if raw:
                    raw[at] ^= 1 << rng.randrange(8)
                case 2 if raw:
                    raw[at] = rng.choice((0, 1, 2, 3, 127, 128, 254, 255))
                case 3:
                    raw.insert(at, rng.choice((0, 1, 2, 128, 255)))
                case 4:
                    del raw[at : at + rng.choice((1, 2, 8))]
                case _:
                    raw[at:at] = raw[at : at + rng.choice((1, 8))]
        records.append((bytes(raw), value) if in_key else (key, bytes(raw)))
    agree([record for record in records if not left_alone(record[1])])


def left_alone(value: bytes | None) -> bool:
    """Whether a value may contain a varint of more than ten bytes, which decode_run reads differently per platform."""
    run = 0
    for byte in value or b"":
        run = run + 1 if byte & 128 else 0
        if run >= 10:
            return True
    return False


@settings(max_examples=150, deadline=None)
@given(key=st.binary(max_size=30), value=st.binary(max_size=120), framed=st.booleans(), keyed=st.booleans())
def test_random_bytes_are_judged_as_decode_run_does(key: bytes, value: bytes, framed: bool, keyed: bool) -> None:
    """This holds with and without the header, and with and without a matching key."""
    if not left_alone(value):
        agree([(ROOT_KEY if keyed else key, HEADER + value if framed else value)])


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (datum(), True),
        (datum(parent=zigzag(-2)), True),  # as Python counts a union's branches
        (datum(parent=zigzag(2)), False),
        (datum(parent=zigzag(-3)), False),
        (datum(parent=zigzag(1) + bytes(8)), False),
        (datum(start=zigzag(1)), False),
        (datum(start=zigzag(-1)), False),
        (datum(generation=b"\x84\x80\x80\x00"), True),
        (datum(generation=b"\xff" * 9 + b"\x01"), True),
        (datum(incarnation=b"\xff" * 9 + b"\x7f"), True),
        (datum(present=zigzag(9) + b"\x01" + bytes(8)), True),
        (datum(present=zigzag(5) + b"\x01\0\0\0\x01"), False),
        (datum(present=zigzag(1) + b"\x02"), False),
        (datum(present=zigzag(1) + b"\x00"), False),
        (datum(present=zigzag(0)), False),
        (datum(present=zigzag(-1)), False),
        (datum(present=zigzag((1 << 63) - 1) + b"\x01"), False),
        (datum(local=zigzag(7) + bytes(7)), False),
        (datum(local=zigzag(1 << 62) + bytes(8)), False),
        (datum(local=zigzag(0), engine=zigzag(0)), False),
        (datum(engine=zigzag(0)), False),
        (datum(engine=zigzag(16) + bytes(16)), False),
        (datum(labels=zigzag(1) + zigzag(0) * 4 + zigzag(0)), True),
        (datum(labels=zigzag(1) + zigzag(1) + zigzag(0) * 3 + zigzag(0)), False),
        (datum(labels=zigzag(1) + zigzag(-1) + zigzag(0) * 3 + zigzag(0)), False),
        (datum(labels=zigzag(-1) + zigzag(9999) + zigzag(0) * 4 + zigzag(0)), True),
        (datum(labels=zigzag(1) + zigzag(0) + zigzag(-1) + zigzag(77) + zigzag(0) * 2 + zigzag(0)), True),
        (datum(labels=zigzag(1) + zigzag(0) + zigzag(2) + zigzag(0) * 2 + zigzag(0)), False),
        (datum(labels=zigzag(1 << 60) + zigzag(0)), False),
        (datum() + b"\0", False),
        (b"", False),
        (b"\0\0\0\0\1" + datum()[10:], False),  # a registry's id: none is configured for the index
        (b"\xc3\x01" + bytes(8) + datum()[10:], False),
        (datum()[:9], False),
    ],
)
def test_the_decoder_allows_what_avro_and_the_rules_of_a_run_allow(value: bytes, taken: bool) -> None:
    """The decoder takes what decode_run takes, and leaves what decode_run refuses."""
    assert (slow(ROOT_KEY, value) is not None) == taken
    agree([(ROOT_KEY, value), (ROOT_KEY, datum())])


@pytest.mark.parametrize(
    "value",
    [datum(generation=b"\x80" * 20 + b"\x00"), datum(labels=zigzag(-(1 << 63)) + zigzag(0) + zigzag(0))],
)
def test_values_that_no_writer_produces_are_left_to_decode_run(value: bytes) -> None:
    """decode_run takes them, and so does a view."""
    assert slow(ROOT_KEY, value) is not None
    assert decode_runs([(ROOT_KEY, value)])[1] == [0]
    view = View(Settings(), lambda: 0)
    assert view.fold_index_batch([(ROOT_KEY, value)]) == []
    assert len(view.index.members()) == 1


@settings(max_examples=40, deadline=None)
@given(run=any_run())
@example(run=slow(ROOT_KEY, datum()) or pytest.fail("a plain datum is refused"))
def test_no_record_is_read_beyond_its_end(run: Run) -> None:
    """A record that is cut anywhere is refused, even if the missing bytes follow it as the next record's key."""
    key, value = RUN_KEY.pack(run.key), encode_run(run)
    for cut in range(len(value)):
        columns, others = decode_runs([(key, value[:cut]), (value[cut:], b"")])
        assert others == [0, 1] and columns.present.tolist() == [OTHER, OTHER]
        # And at the end of the buffer, with lengths greater than the bytes that are left.
        data, lengths = join([(key, value)])
        assert decode(data[: len(key) + cut], lengths)[1] == [0]


@settings(max_examples=40, deadline=None)
@given(run=any_run(), seed=st.integers(0, 2**32))
def test_no_byte_after_the_buffer_is_read(run: Run, seed: int) -> None:
    """A protected page follows the buffer: a load beyond the end would crash this process."""
    rng = random.Random(seed)
    key, value = RUN_KEY.pack(run.key), encode_run(run)
    with guarded(2 * mmap.PAGESIZE) as put:
        for _ in range(40):
            raw = bytearray(value[: rng.randint(0, len(value))])
            if len(raw) > len(HEADER):
                raw[rng.randrange(len(HEADER), len(raw))] = rng.choice((1, 127, 128, 255, rng.randrange(256)))
            data, lengths = join([(key, bytes(raw)), (key, bytes(raw[: rng.randint(0, 12)]))])
            columns = RunColumns(2, len(data) // 16)
            decode_records(put(data), len(data), lengths.ctypes.data, 2, *header(), columns.address)


def header() -> tuple[int, int]:
    """Return the header as `decode_records` takes it."""
    return int.from_bytes(HEADER[:8], "little", signed=True), int.from_bytes(HEADER[8:], "little")


@contextmanager
def guarded(n_bytes: int) -> Iterator[Callable[[bytes], int]]:
    """Return a function that puts bytes right before a protected page, and returns their address."""
    whole = mmap.mmap(-1, n_bytes + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(begin + n_bytes)
    assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def put(data: bytes) -> int:
        whole[n_bytes - len(data) : n_bytes] = data
        return begin + n_bytes - len(data)

    try:
        yield put
    finally:
        libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE)


# --- folding decoded records ----------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 200))
def test_folding_in_batches_of_any_size_equals_folding_one_by_one(seed: int, size: int) -> None:
    """The records mix ranks, epochs, progress and bad ones, in the order of the log and permuted."""
    rng = random.Random(seed)
    log = random_log(seed, 80, 4, 6)
    permuted = [*compacted(log.records).items()]
    rng.shuffle(permuted)
    for records in (log.records, permuted, log.records + permuted):
        some = list(records)
        for _ in range(5):
            key, value = rng.choice(records)
            some.insert(rng.randrange(len(some)), (key, (value or b"x")[:-1]))
        view, one_by_one = View(Settings(), lambda: 0), View(Settings(), lambda: 0)
        bad: list[tuple[int, str]] = []
        for at in range(0, len(some), size):
            found = view.fold_index_batch(some[at : at + size])
            bad += [(at + position, f"{reason.reason} {reason}") for position, reason in found]
        expected: list[tuple[int, str]] = []
        for position, record in enumerate(some):
            try:
                one_by_one.fold_index(*record)
            except BadRecord as exc:
                expected.append((position, f"{exc.reason} {exc}"))
        assert bad == expected
        assert state_of_view(view) == state_of_view(one_by_one) == state_of_view(folded(records))
        assert view.index.rank_states() == one_by_one.index.rank_states()
        check(view.index.runs)


def test_a_rank_ends_at_its_tombstones_position_among_its_runs() -> None:
    """A tombstone of progress ends the runs that precede it in the batch, and none that follow."""
    log = commit(plain_holdings(), [batch(0, stored(names(3), u64(1, 2, 3)))])
    forget = (log[0][0], None)
    for records, held in (([*log, forget], 0), ([*log, forget, *log], 3), ([log[1], forget, log[1], log[0]], 3)):
        view = View(Settings(), lambda: 0)
        assert view.fold_index_batch(records) == []
        assert len(view.index.members()) == held
        check(view.index.runs)


def test_a_rank_that_returns_after_it_was_dropped_gets_a_new_number() -> None:
    """Another rank that got the old number meanwhile keeps its own blocks."""
    fold = TreeRunFold()
    for n_ranks in (3, 200):  # the second exceeds the initial table of holders
        ranks = [RankId(WorkerId(n), DpRank(0)) for n in range(n_ranks)]
        for rank in ranks:
            fold.fold_records(columns_of(*_run_of(rank, 1)))
        for rank in ranks[::2]:
            fold.forget_rank(rank)
        fold.fold_records(columns_of(*_run_of(RankId(WorkerId(5000 + n_ranks), DpRank(0)), 1)))
        for rank in ranks[::2]:
            fold.fold_records(columns_of(*_run_of(rank, 1)))
        check(fold)
        assert {rank for rank, _, _ in fold.members()} >= set(ranks)


def _run_of(rank: RankId, block: int, epoch: int = 1) -> tuple[list[RunKey], list[Run | None]]:
    key = RunKey(rank, Tier.DEVICE, SequenceHash(block))
    return [key], [Run(key, Epoch(Incarnation(epoch), 0), 0, None, [block], [block], [block], 1)]


def test_a_full_index_takes_what_fits_and_reports_the_rest() -> None:
    """Tombstones and new epochs are folded even when the index is full."""
    fold = TreeRunFold(limits=TreeLimits(blocks_max=1024))
    rank, other = RankId(WorkerId(1), DpRank(0)), RankId(WorkerId(2), DpRank(0))
    runs = [_run_of(rank, block) for block in range(1, 400)]
    keys, values = [key for (key,), _ in runs], [value for _, (value,) in runs]
    refused = fold.fold_records(columns_of(keys, values))
    assert refused and len(fold) == 399 - len(refused)
    with pytest.raises(IndexFull, match="over capacity"):
        fold.fold(*_run_of(other, 1000))
    fold.fold(keys, [None] * 399)
    assert not len(fold)
    check(fold)


def test_a_rank_over_the_index_capacity_is_degraded_until_its_next_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once, counted, and shown in every answer; other ranks remain exact."""
    full, well = RankId(WorkerId(1), DpRank(0)), RankId(WorkerId(2), DpRank(0))
    view = View(Settings(), lambda: 0, lambda: TreeRunFold(limits=TreeLimits(blocks_max=1024)))

    def progress(rank: RankId, epoch: int) -> Record:
        state = Progress(rank, Epoch(Incarnation(epoch), 0), 0, 0, Health.EXACT, "m", 16)
        return PROGRESS_KEY.pack(rank), encode_progress(state)

    def run(rank: RankId, block: int) -> Record:
        (key,), (value,) = _run_of(rank, block)
        assert value is not None
        return RUN_KEY.pack(key), encode_run(value)

    def partition(number: int) -> Record:
        return PARTITION_KEY.pack(number), encode_partition(PartitionRecord(number, 0, "o", ()))

    records = [progress(well, 1), progress(full, 1), run(well, 1), *(run(full, block) for block in range(2, 600))]
    partitions = [partition(number) for number in range(Settings().partitions)]
    assert view.fold_index_batch([*records, *partitions]) == []
    for number in range(Settings().partitions):
        view.note_ends(number, 0, {})  # of no sources, so that no owner is behind
    assert view.index.records_over_capacity > 100
    assert len([record for record in caplog.records if "over capacity" in record.message]) == 1
    assert view.assess([well]).mode is AnswerMode.EXACT
    assert view.assess([well, full]).mode is AnswerMode.DEGRADED
    view.fold_index_batch([progress(full, 2), *partitions])
    assert view.assess([well, full]).mode is AnswerMode.EXACT
    view.reset()
    assert view.index.records_over_capacity == 0


def test_the_blocks_of_each_rank_are_all_members() -> None:
    """`held_by` returns the facts of one rank as `members` does, also beyond 256 columns and after removals."""
    rng = random.Random(5)
    fold = TreeRunFold()
    ranks = [RankId(WorkerId(n), DpRank(n % 2)) for n in range(300)]
    for _ in range(1500):
        rank, tier, branch = rng.choice(ranks), rng.choice(list(Tier)), rng.randrange(3)
        at, n_blocks = rng.choice([(0, 8), (8, 3), (11, 1)])
        prompt = np.arange(1000 * branch, 1000 * branch + 12, dtype=np.uint64)
        chain = sequence_hashes(prompt).tolist()
        own, local = chain[at : at + n_blocks], prompt[at : at + n_blocks].tolist()
        key = RunKey(rank, tier, SequenceHash(own[0]))
        parent = None if at == 0 else SequenceHash(chain[at - 1])
        run = Run(key, Epoch(Incarnation(1), 0), at, parent, local, own, own, rng.randrange(1, 1 << n_blocks))
        fold.fold([key], [run if rng.random() < 0.9 else None])
        if rng.random() < 0.01:
            fold.forget_rank(rng.choice(ranks))
    check(fold)
    expected: dict[tuple[RankId, Tier], list[int]] = {}
    for rank, tier, block in fold.members():
        expected.setdefault((rank, tier), []).append(int(block))
    found = {(rank, tier): blocks.tolist() for rank in ranks for tier, blocks in fold.held_by(rank).items()}
    assert {place: sorted(blocks) for place, blocks in found.items() if blocks} == {
        place: sorted(blocks) for place, blocks in expected.items()
    }
    assert len(expected) > 256


def test_no_answer_is_exact_while_the_transaction_is_folded_that_makes_its_rank_exact() -> None:
    """Another thread matches and asks for trust all the time: it is exact only with everything that the rank holds."""
    rank, n_runs = RankId(WorkerId(1), DpRank(0)), 4000
    view = View(Settings(), lambda: 0)
    number = partition_of(rank.worker_id, Settings().partitions)

    def progress(feed: FeedState) -> Record:
        state = Progress(rank, Epoch(Incarnation(1), 0), 0, 0, Health.EXACT, "m", 16, feed=feed)
        return PROGRESS_KEY.pack(rank), encode_progress(state)

    owner = PARTITION_KEY.pack(number), encode_partition(PartitionRecord(number, 0, "o", ()))
    runs: list[Record] = []
    for block in range(2, n_runs + 2):
        (key,), (value,) = _run_of(rank, block)
        assert value is not None
        runs.append((RUN_KEY.pack(key), encode_run(value)))
    asked = u64(n_runs + 1)  # what the last run holds
    assert view.fold_index_batch([progress(FeedState.CATCHING_UP), owner]) == []
    view.note_ends(number, 0, {})
    found: list[tuple[AnswerMode, int]] = []

    def ask() -> None:
        while not found or found[-1][0] is not AnswerMode.EXACT:
            basis = view.snapshot()
            scores = view.index.find_matches(asked).scores
            found.append((view.assess([rank], before=basis).mode, scores.get(rank, 0)))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=ask)
        thread.start()
        assert view.fold_index_batch([progress(FeedState.LIVE), *runs, owner]) == []
        thread.join(60.0)
    finally:
        sys.setswitchinterval(interval_s)
    assert found[-1] == (AnswerMode.EXACT, len(asked))

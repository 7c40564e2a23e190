"""A reducer that follows another owner's changelog, compared with one that is loaded from the same rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.events import AllBlocksCleared, BlocksRemoved, KvEvent
from streams.core.ids import Epoch, Incarnation
from streams.core.reducer.holdings import Holdings
from streams.settings import Settings
from streams.tables.index_reducer import IndexReducer, prefix_index_table
from streams.tables.records import PROGRESS_KEY, RUN_KEY, Change, encode_progress
from streams.tables.run_table import RunTable
from tests.helpers.holdings import RANK, batch, names, stored, u64
from tests.helpers.invariants import check, members_of
from tests.helpers.table_logs import compacted, random_log

TABLE = prefix_index_table(Settings())
ALL = 1 << 30

seeds = st.integers(0, 2**32)


def rows(records: Iterable[Change]) -> list[tuple[bytes, bytes]]:
    """Return the rows that a log leaves, in order of their keys."""
    return sorted((key, value) for key, value in compacted(records).items() if value is not None)


def loaded(records: Iterable[Change]) -> IndexReducer:
    reducer = IndexReducer(Settings(), Counter())
    reducer.load(TABLE, iter(rows(records)))
    return reducer


def assert_same(followed: IndexReducer, records: list[Change]) -> None:
    """Compare a follower that has become the owner with a new owner, in what it holds and has yet to write."""
    fresh = loaded(records)
    check(followed.holdings.runs)
    assert followed.holdings.progress == fresh.holdings.progress
    assert set(members_of(followed.holdings.runs)) == set(members_of(fresh.holdings.runs))
    for rank, progress in fresh.holdings.progress.items():
        assert followed.holdings.runs.n_blocks(rank) == fresh.holdings.runs.n_blocks(rank) == progress.n_blocks
    taken = [dict(each.holdings.take_changes(ALL).runs) for each in (followed, fresh)]
    assert taken[0] == taken[1]
    assert not any(taken[0].values())
    parked = [dict(each.holdings.parking.take_changes()) for each in (followed, fresh)]
    assert parked[0] == parked[1]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, batches_max=st.integers(1, 8), read_max=st.integers(1, 60), compacts=st.booleans(), data=st.data())
def test_a_reducer_that_follows_a_log_becomes_the_one_that_is_loaded_from_it(
    seed: int, batches_max: int, read_max: int, compacts: bool, data: st.DataObject
) -> None:
    """It is loaded at any record, and reads the rest in pieces of any size; what it has not read may be compacted."""
    log = random_log(seed, 80, 3, batches_max).records
    cut = data.draw(st.integers(0, len(log)))
    rest: list[Change] = list(compacted(log[cut:]).items()) if compacts else list(log[cut:])
    rng = random.Random(seed)
    followed = loaded(log[:cut])
    while rest:
        n = rng.randint(1, read_max)
        followed.follow(TABLE, rest[:n])
        rest = rest[n:]
    assert followed.resume(TABLE, iter(rows(log)))
    assert_same(followed, list(log))


def owner_log(events: Iterable[list[KvEvent]], tombstones_max: int) -> list[Change]:
    """Return what an owner writes, one batch in each transaction."""
    holdings = Holdings(RunTable())
    log: list[Change] = []
    for sequence, some in enumerate(events):
        holdings.apply(batch(sequence), some)
        changes = holdings.take_changes(tombstones_max)
        log += [(PROGRESS_KEY.pack(p.rank), encode_progress(p)) for p in changes.progress]
        log += changes.runs
    return log


def test_tombstones_that_the_former_owner_has_not_written_are_written_by_the_new_one() -> None:
    """Of a hundred runs of an ended epoch, ninety are left, and one of their keys is used again."""
    chains = [stored(names(2, first=2 * n + 1), u64(1000 + n, 2000 + n)) for n in range(100)]
    log = owner_log([[*chains], [AllBlocksCleared()], [chains[99]]], tombstones_max=5)
    followed = loaded([])
    followed.follow(TABLE, log)
    assert followed.resume(TABLE, iter(rows(log)))
    pending = followed.holdings.take_changes(ALL).runs
    left = {key for key, _ in rows(log) if key.startswith(RUN_KEY.prefix)}
    live = {key for key, value in log[-6:] if value is not None and key.startswith(RUN_KEY.prefix)}
    assert len(live) == 1
    assert {key for key, value in pending if value is None} == left - live
    assert len(left) > 80


def test_a_table_that_is_reset_begins_again_with_any_epoch() -> None:
    """The follower takes the smaller epoch, since the rows of the greater one were deleted."""
    before = owner_log([[stored(names(3), u64(1, 2, 3))], [AllBlocksCleared()], [stored(names(3), u64(4, 5, 6))]], ALL)
    reset: list[Change] = [(key, None) for key, _ in rows(before)]
    after = owner_log([[stored(names(2), u64(7, 8))]], ALL)
    for pieces in ([before, reset, after], [before, reset + after], [before + reset + after]):
        followed = loaded([])
        for piece in pieces:
            followed.follow(TABLE, piece)
        assert followed.resume(TABLE, iter(rows(before + reset + after)))
        assert followed.holdings.progress[RANK].epoch == Epoch(Incarnation(1), 0)
        assert_same(followed, before + reset + after)


def test_a_follower_that_missed_a_row_is_not_used() -> None:
    """Progress names the number of blocks that a rank holds."""
    log = owner_log([[stored(names(3), u64(1, 2, 3))], [BlocksRemoved(u64(1002))]], ALL)
    followed = loaded([])
    followed.follow(TABLE, log[:-1])
    assert not followed.resume(TABLE, iter(rows(log)))


def test_bad_rows_are_counted_and_change_nothing() -> None:
    """A foreign writer's rows of a known and of an unknown kind."""
    log = owner_log([[stored(names(3), u64(1, 2, 3))]], ALL)
    foreign: list[Change] = [(b"Rx", b"y"), (b"Px", b"y"), (b"R" + bytes(21), b"\xc3\x01 no run"), (b"X", b"y")]
    verdicts: Counter[str] = Counter()
    followed = IndexReducer(Settings(), verdicts)
    followed.load(TABLE, iter(()))
    followed.follow(TABLE, foreign + log)
    assert verdicts["bad_table_record"] == 3
    assert followed.resume(TABLE, iter(rows(log)))
    assert_same(followed, log)

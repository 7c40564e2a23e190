"""The table's log, without Kafka: cut anywhere, compacted, permuted, read during compaction (docs/architecture.md).

Each history is judged in transactions of one to a few batches. The log is the list of the records of these
transactions, with the bytes that Kafka would store; its readers see only committed transactions.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.events import BlocksRemoved
from streams.core.ids import Epoch, Incarnation, Tier, WorkerId
from streams.core.reducer.ordering import Health
from streams.core.workers import Worker
from streams.errors import BadRecord
from streams.kafka.records import encode_worker
from streams.router_api.knowledge.view import View
from streams.settings import Settings
from streams.tables.records import RUN_KEY, decode_progress, decode_run
from tests.helpers.holdings import RANK, batch, members, names, stored, u64
from tests.helpers.invariants import check
from tests.helpers.plain_run_store import plain_holdings
from tests.helpers.table_logs import (
    TOMBSTONES_MAX,
    Record,
    State,
    commit,
    compacted,
    folded,
    random_log,
    recovered,
    state_of_holdings,
    state_of_view,
    written,
)

WORKER = Worker(WorkerId(7), "http://w", "m", 16)

seeds = st.integers(0, 2**32)


@settings(max_examples=4, deadline=None)
@given(seed=seeds, batches_max=st.integers(1, 4))
def test_a_log_cut_at_any_record_continues_to_the_reference_state(seed: int, batches_max: int) -> None:
    """Complete transactions are recovered, the batches of the others are judged again, and the state is the same."""
    log = random_log(seed, 60, 3, batches_max)
    n_records = len(log.records)
    complete = [n for n, transaction in enumerate(log.transactions) for _ in transaction]
    cuts_of_transaction: dict[int, int] = {}
    for cut in range(n_records + 1):
        # Readers see only committed transactions, and so nothing of the one that is cut.
        first_lost = complete[cut] if cut < n_records else len(log.transactions)
        cuts_of_transaction[first_lost] = cuts_of_transaction.get(first_lost, 0) + 1
    assert sum(cuts_of_transaction.values()) == n_records + 1
    for first_lost in cuts_of_transaction:
        kept = [record for transaction in log.transactions[:first_lost] for record in transaction]
        table = compacted(kept)
        holdings = recovered(table)
        if first_lost:
            assert state_of_holdings(holdings) == log.states[first_lost - 1]
        for number in range(first_lost, len(log.batches)):
            for key, value in commit(holdings, log.batches[number]):
                table[key] = value
            check(holdings)
            assert state_of_holdings(holdings) == log.states[number]
        assert state_of_view(folded(table.items())) == log.states[-1]


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_a_batch_judged_again_after_its_commit_changes_nothing_but_the_feed(seed: int) -> None:
    """An agent recognises by their offsets the records that its table contains; judging them again would be harmless.

    A rank could be degraded until its next record, since a duplicate may say that the feed is not live.
    """
    log = random_log(seed, 60, 3, 3, begins=False)
    for number in range(len(log.batches)):
        holdings = recovered(compacted(r for transaction in log.transactions[: number + 1] for r in transaction))
        before = dict(holdings.progress)
        for key, value in commit(holdings, log.batches[number]):
            if value is not None:
                after = decode_progress(key, value)
                assert after.feed and replace(after, feed=before[after.rank].feed) == before[after.rank]
        assert state_of_holdings(holdings) == log.states[number]


@settings(max_examples=12, deadline=None)
@given(seed=seeds, batches_max=st.integers(1, 12))
def test_a_view_equals_the_reference_after_every_transaction(seed: int, batches_max: int) -> None:
    """A router that follows the log has the blocks and epochs of the reference, and counts the same blocks."""
    log = random_log(seed, 150, 4, batches_max)
    view = View(Settings(), lambda: 0)
    for transaction, state in zip(log.transactions, log.states, strict=True):
        assert state_of_view(folded(transaction, view)) == state
    states = {state.rank: state.n_blocks for state in view.index.rank_states()}
    assert states == {
        rank: sum(1 for member in log.states[-1].members if member[0] == rank) for rank in log.states[-1].epochs
    }


@settings(max_examples=20, deadline=None)
@given(seed=seeds, batches_max=st.integers(1, 8), tombstones=st.booleans())
def test_any_permutation_of_the_compacted_log_gives_the_same_view(
    seed: int, batches_max: int, tombstones: bool
) -> None:
    """Children may precede parents, runs their progress, and tombstones may be missing: the state is the same."""
    log = random_log(seed, 80, 3, batches_max)
    records = [item for item in compacted(log.records).items() if tombstones or item[1] is not None]
    random.Random(seed).shuffle(records)
    assert state_of_view(folded(records)) == log.states[-1]


@settings(max_examples=20, deadline=None)
@given(seed=seeds, batches_max=st.integers(1, 8), data=st.data())
def test_a_reader_overtaken_by_compaction_ends_in_the_same_state(
    seed: int, batches_max: int, data: st.DataObject
) -> None:
    """A reader may miss any record that a later one replaces, and still reaches the same state."""
    log = random_log(seed, 120, 3, batches_max)
    records = log.records
    last = {key: number for number, (key, _) in enumerate(records)}
    rng = random.Random(data.draw(seeds))
    share = rng.random()
    seen = [record for number, record in enumerate(records) if last[record[0]] == number or rng.random() > share]
    assert state_of_view(folded(seen)) == log.states[-1]


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_everything_delivered_again_changes_nothing_but_the_feed(seed: int) -> None:
    """Repeated batches are duplicates or stale; a repeated log ends in the same view."""
    log = random_log(seed, 80, 3, 4, begins=False)
    holdings = recovered(compacted(log.records))
    before = dict(holdings.progress)
    again = [record for batches in log.batches for record in commit(holdings, batches)]
    for key, value in again:
        if value is not None:  # pending tombstones are written, and feeds that are not live
            after = decode_progress(key, value)
            assert after.feed and replace(after, feed=before[after.rank].feed) == before[after.rank]
    assert state_of_holdings(holdings) == log.states[-1]
    view = folded(log.records)
    assert state_of_view(folded(log.records, view)) == log.states[-1]
    assert state_of_view(folded(again, view)) == log.states[-1]


@settings(max_examples=20, deadline=None)
@given(seed=seeds, data=st.data())
def test_tombstones_pending_at_a_cut_are_written_by_the_next_owner(seed: int, data: st.DataObject) -> None:
    """However few of them the former owner wrote, in the end the table has no row of an ended epoch."""
    log = random_log(seed, 60, 3, 4)
    cut = data.draw(st.integers(0, len(log.transactions)))
    table = compacted(record for transaction in log.transactions[:cut] for record in transaction)
    holdings = recovered(table)
    for batches in log.batches[cut:]:
        table.update(commit(holdings, batches))
    while holdings.has_pending_tombstones:
        records = written(holdings.take_changes(TOMBSTONES_MAX))
        assert 0 < len(records) <= TOMBSTONES_MAX
        table.update(records)
    live = {key: value for key, value in table.items() if value is not None}
    for key, value in live.items():
        if key.startswith(RUN_KEY.prefix):
            run = decode_run(key, value)
            assert run.epoch == log.states[-1].epochs[run.key.rank]
    assert state_of_holdings(recovered(dict(live))) == log.states[-1]


def test_a_block_that_moves_to_another_run_stays_in_the_view() -> None:
    """A run that is stored again grows over a block whose own run then ends; the block remains in the grown run."""
    holdings = plain_holdings()
    log = commit(
        holdings,
        [
            batch(0, stored(names(2), u64(1, 50))),
            batch(1, stored(u64(2000), u64(2), parent=1000)),  # a branch, in its own run
            batch(2, BlocksRemoved(u64(1000, 1001))),
        ],
    )
    log += commit(holdings, [batch(3, stored(u64(1000), u64(1)))])  # the first run again, now with one block
    log += commit(
        holdings,
        [
            batch(4, BlocksRemoved(u64(1000)), stored(u64(1000), u64(1))),
            batch(5, BlocksRemoved(u64(2000)), stored(u64(2000), u64(2), parent=1000)),
        ],
    )
    assert state_of_view(folded(log)) == state_of_holdings(holdings)
    assert len(members(holdings)) == 2


def test_a_new_incarnation_drops_the_old_one_before_any_tombstone() -> None:
    """One progress record ends all runs of an epoch at once, and late copies of them are not taken again."""
    holdings = plain_holdings()
    old = commit(holdings, [batch(0, stored(names(3), u64(1, 2, 3)))])
    new = [record for record in commit(holdings, [batch(0, incarnation=2)]) if record[1] is not None]
    view = folded(old + new)
    assert state_of_view(view) == State(set(), {RANK: Epoch(Incarnation(2), 0)})
    assert state_of_view(folded(old[1:], view)).members == set()


def test_a_run_of_a_new_incarnation_is_enough_to_end_the_old_one() -> None:
    """In a permuted log, the run may precede its progress record."""
    holdings = plain_holdings()
    old = commit(holdings, [batch(0, stored(names(3), u64(1, 2, 3)))])
    new = commit(holdings, [batch(0, stored(u64(5), u64(6)), incarnation=2)])
    run = [record for record in new if record[0].startswith(RUN_KEY.prefix) and record[1] is not None]
    view = folded(old + run)
    assert state_of_view(view) == State({(RANK, Tier.DEVICE, 6)}, {RANK: Epoch(Incarnation(2), 0)})


def test_an_older_copy_of_a_progress_record_changes_nothing() -> None:
    """This holds for a copy of an older epoch, and for one of an older batch of the same epoch."""
    holdings = plain_holdings()
    first = commit(holdings, [batch(0)])
    second = commit(holdings, [batch(2)])
    third = commit(holdings, [batch(0, incarnation=2)])
    view = folded([*second, *first])
    assert [(state.sequence, state.health) for state in view.index.rank_states()] == [(2, Health.DEGRADED)]
    folded([*third, *second], view)
    assert [(state.epoch.incarnation, state.sequence) for state in view.index.rank_states()] == [(2, 0)]


def test_bad_records_in_a_batch_do_not_prevent_the_others_from_being_folded() -> None:
    """The view returns the bad ones by position."""
    holdings = plain_holdings()
    log = commit(holdings, [batch(0, stored(names(3), u64(1, 2, 3)))])
    (key, run), (progress_of, progress) = log[-1], log[0]
    assert run is not None
    view = View(Settings(), lambda: 0)
    records: list[Record] = [(b"?", run), (key, run), (key, b""), (progress_of, progress), (key[:-1], None)]
    bad = view.fold_index_batch(records)
    assert [position for position, _ in bad] == [0, 2, 4]
    assert all(type(reason) is BadRecord for _, reason in bad)
    assert state_of_view(view) == state_of_holdings(holdings)
    assert view.fold_index_batch([]) == []


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"", encode_worker(WORKER), "bad_key"),
        (b"pool/1", encode_worker(WORKER), "unknown_schema"),
        (b"8", encode_worker(WORKER), "wrong_key"),
        (b" 7", encode_worker(WORKER), "wrong_key"),
        (b"0_7", None, "wrong_key"),
        (b"7", b"", "not_avro"),
    ],
)
def test_only_a_record_under_the_workers_own_key_changes_it(key: bytes, value: bytes | None, reason: str) -> None:
    """A registry record under another key changes nothing, and a tombstone under the own key removes the worker."""
    view = View(Settings(), lambda: 0)
    view.fold_worker(b"7", encode_worker(WORKER))
    with pytest.raises(BadRecord) as caught:
        view.fold_worker(key, value)
    assert caught.value.reason == reason
    assert view.fleet.workers == {WORKER.worker_id: WORKER}
    view.fold_worker(b"7", None)
    assert view.fleet.workers == {}


@pytest.mark.parametrize("tier", list(Tier))
def test_tiers_are_independent(tier: Tier) -> None:
    """A copy in one tier is written, recovered and removed without an effect on the others."""
    holdings = plain_holdings()
    log = commit(holdings, [batch(0, *(stored(names(2), u64(1, 2), tier=each) for each in Tier))])
    log += commit(recovered(compacted(log)), [batch(1, BlocksRemoved(names(2), tier))])
    view = folded(log)
    assert {where for _, where, _ in view.index.members()} == set(Tier) - {tier}
    assert len(view.index.members()) == 6

"""Restatements: chunks are parked, dropped or applied, even if an owner crashes between two of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    EngineBatch,
    Heartbeat,
    RestatedRun,
    RestatementChunk,
)
from streams.core.ids import Epoch, Incarnation, Tier, WorkerId
from streams.core.reducer import restatement
from streams.core.reducer.ordering import Health, Verdict
from streams.core.reducer.restatement import CHUNKS_MAX, ChunkKey, Parking
from streams.errors import BadRecord
from streams.kafka.records import decode_batch, encode_batch
from streams.settings import Settings
from streams.tables.index_reducer import IndexReducer
from streams.tables.records import CHUNK_KEY
from streams.tables.reducer import SourceRecord
from streams.topics import topics
from tests.helpers.holdings import (
    CHAIN,
    RANK,
    SIBLING,
    batch,
    chunks,
    judge,
    members,
    names,
    run,
    stored,
    u64,
)
from tests.helpers.invariants import check
from tests.helpers.plain_run_store import PlainHoldings, plain_holdings
from tests.helpers.table_logs import compacted, folded, recovered, state_of_holdings, state_of_view, written


def blocks(holdings: PlainHoldings) -> set[int]:
    return {block for _, _, block in members(holdings)}


def degraded() -> PlainHoldings:
    """Return a rank that lost batches 1 to 4 and holds the first block of another chain."""
    holdings = plain_holdings()
    judge(holdings, batch(0, stored(names(1), u64(50))))
    assert judge(holdings, batch(5)) is Verdict.GAP
    return holdings


@pytest.mark.parametrize("exact", [True, False])
def test_the_last_chunk_of_a_restatement_applies_it_under_a_new_epoch(exact: bool) -> None:
    """Until then nothing changes. Then the rank holds exactly the restated blocks, in whatever order they arrived."""
    holdings = degraded()
    first, second = chunks(5, run(2, 3), run(0, 1), exact=exact)
    assert judge(holdings, first) is Verdict.PARKED
    assert blocks(holdings) == {50}
    assert judge(holdings, second) is Verdict.RESTATED
    assert blocks(holdings) == set(CHAIN)
    progress = holdings.progress[RANK]
    assert (progress.epoch, progress.sequence, progress.digest) == (Epoch(Incarnation(1), 1), 5, 105)
    assert progress.health is (Health.EXACT if exact else Health.DEGRADED)
    assert judge(holdings, batch(6, stored(u64(77), u64(9), parent=1004))) is Verdict.APPLIED
    assert holdings.progress[RANK].health is progress.health
    check(holdings)


def test_unindexed_blocks_leave_a_restated_rank_approximate() -> None:
    """One chunk with unindexed blocks, whichever it is, makes the rank approximate."""
    holdings = degraded()
    first, second = chunks(5, run(0, 1), run(2, 3))
    judge(holdings, replace(first, n_unindexed=3))
    judge(holdings, second)
    assert holdings.progress[RANK].health is Health.APPROXIMATE


def test_an_empty_restatement_leaves_nothing_and_is_exact() -> None:
    """The restatement of an empty rank is one chunk without runs."""
    holdings = degraded()
    empty = replace(batch(5), body=RestatementChunk(9, 0, 1, True, ()))
    assert judge(holdings, empty) is Verdict.RESTATED
    assert (blocks(holdings), holdings.progress[RANK].health) == (set(), Health.EXACT)


def test_a_rank_without_a_batch_is_exact_again_after_a_restatement() -> None:
    """Its source lost records, and its bridge knows that none of them was a batch; the first batch is no gap."""
    holdings = plain_holdings()
    judge(holdings, batch(BEFORE_FIRST))
    holdings.degrade_all()
    assert holdings.progress[RANK].health is Health.DEGRADED
    empty = replace(batch(BEFORE_FIRST), body=RestatementChunk(9, 0, 1, True, ()))
    assert judge(holdings, decode_batch(encode_batch(empty))) is Verdict.RESTATED
    assert (holdings.progress[RANK].health, holdings.progress[RANK].sequence) == (Health.EXACT, BEFORE_FIRST)
    assert judge(holdings, batch(0)) is Verdict.APPLIED


def test_a_restatement_older_than_the_applied_batches_changes_nothing() -> None:
    """It lacks batches that are applied, so it is not parked; chunks that are parked remain."""
    holdings = degraded()
    first, second = chunks(5, run(0, 1), run(2, 3))
    judge(holdings, first)
    assert judge(holdings, chunks(4, run(0, 1), restatement_id=8)[0]) is Verdict.DUPLICATE
    assert judge(holdings, replace(first, incarnation=Incarnation(0))) is Verdict.STALE
    assert judge(holdings, second) is Verdict.RESTATED


@pytest.mark.parametrize(
    "between",
    [
        batch(6),
        batch(6, AllBlocksCleared()),
        batch(BEFORE_FIRST, incarnation=2),
        replace(batch(BEFORE_FIRST, incarnation=2), body=Heartbeat("b", 1000)),
        chunks(5, run(0, 1), run(2, 3), restatement_id=8)[1],
        chunks(6, run(0, 1), run(2, 3))[1],
        chunks(5, run(0, 1), run(2, 3), exact=False)[1],
        chunks(5, run(0, 1), run(2, 3))[0],
    ],
    ids=["batch", "clear", "incarnation", "its heartbeat", "another id", "another sequence", "not exact", "again"],
)
def test_any_other_record_between_two_chunks_drops_the_parked_ones(between: EngineBatch) -> None:
    """The last chunk then completes nothing; a repeated first chunk starts over."""
    holdings = degraded()
    first, _, last = chunks(5, run(0, 1), run(2, 2), run(3, 3))
    judge(holdings, first)
    judge(holdings, between)
    assert judge(holdings, last) in (Verdict.DROPPED, Verdict.STALE, Verdict.DUPLICATE)
    assert not blocks(holdings) & set(CHAIN)


def test_a_removal_drops_parked_chunks_and_records_of_another_rank_do_not() -> None:
    """Chunks must be consecutive among the records of their own rank only; a heartbeat may come between them."""
    holdings = degraded()
    first, second = chunks(5, run(0, 1), run(2, 3))
    judge(holdings, first)
    judge(holdings, batch(0, rank=SIBLING))
    judge(holdings, replace(batch(5), body=Heartbeat("b", 1000)))
    assert RANK in holdings.parking
    holdings.remove_worker(WorkerId(7), Incarnation(1))
    assert RANK not in holdings.parking
    assert judge(holdings, second) is Verdict.STALE


def test_a_restatement_of_a_newer_incarnation_begins_it() -> None:
    """Its first chunk removes the blocks of the old incarnation; its last one makes the new one exact."""
    holdings = degraded()
    first, second = chunks(3, run(0, 1), run(2, 3), incarnation=2)
    assert judge(holdings, first) is Verdict.PARKED
    assert (blocks(holdings), holdings.progress[RANK].health) == (set(), Health.DEGRADED)
    assert judge(holdings, second) is Verdict.RESTATED
    assert (blocks(holdings), holdings.progress[RANK].health) == (set(CHAIN), Health.EXACT)
    assert holdings.progress[RANK].epoch == Epoch(Incarnation(2), 1)


def test_parked_chunks_outlive_their_owner_and_leave_no_rows_behind() -> None:
    """Chunks are written as rows as received, the next owner recovers them, and the last chunk deletes them."""
    holdings = degraded()
    log = written(holdings.take_changes(100))
    first, second, third = chunks(5, run(0, 1), run(2, 2), run(3, 3))
    for chunk in (first, second):
        judge(holdings, chunk)
        log += written(holdings.take_changes(100))
        holdings = recovered(compacted(log))  # another owner for each chunk
    rows = {key: value for key, value in compacted(log).items() if key.startswith(b"C")}
    assert sorted(rows.values(), key=str) == sorted((encode_batch(first), encode_batch(second)), key=str)
    assert state_of_view(folded(log)).members == {(RANK, Tier.DEVICE, 50)}
    assert judge(holdings, third) is Verdict.RESTATED
    log += written(holdings.take_changes(100))
    assert not any(value for key, value in compacted(log).items() if key.startswith(b"C"))
    assert state_of_view(folded(log)) == state_of_holdings(holdings)
    assert blocks(holdings) == set(CHAIN)


def test_rows_that_are_not_the_first_chunks_of_a_restatement_are_deleted() -> None:
    """A foreign writer's row becomes a tombstone at the next commit and has no other effect."""
    _, second, third = chunks(5, run(0, 1), run(2, 2), run(3, 3))
    parking = Parking()
    parking.load([(ChunkKey(RANK, 1), second, 10), (ChunkKey(SIBLING, 0), third, 10)])
    assert RANK not in parking and SIBLING not in parking
    assert parking.take_changes() == [(ChunkKey(RANK, 1), None), (ChunkKey(SIBLING, 0), None)]


@pytest.mark.parametrize("n_chunks", [CHUNKS_MAX, CHUNKS_MAX + 1])
def test_a_restatement_of_too_many_chunks_is_refused(n_chunks: int) -> None:
    """At the limit its chunk is parked; beyond the limit it is a bad record, and nothing is parked."""
    holdings = degraded()
    first = replace(batch(5), body=RestatementChunk(9, 0, n_chunks, True, ()))
    if n_chunks <= CHUNKS_MAX:
        assert judge(holdings, first) is Verdict.PARKED
    else:
        with pytest.raises(BadRecord) as caught:
            judge(holdings, first)
        assert caught.value.reason == "bad_restatement"
        assert RANK not in holdings.parking


def test_a_restatement_of_too_many_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not fit in one transaction, so its parked chunks are dropped."""
    monkeypatch.setattr(restatement, "RESTATED_RUNS_MAX", 2)
    holdings = degraded()
    first, second, third = chunks(5, run(0, 1), run(2, 2), run(3, 3))
    assert [judge(holdings, first), judge(holdings, second)] == [Verdict.PARKED] * 2
    with pytest.raises(BadRecord):
        judge(holdings, third)
    assert RANK not in holdings.parking and blocks(holdings) == {50}


def test_a_chunk_over_the_capacity_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one rank's chunks are parked, another's exceed the capacity; a later resync request repeats them."""
    size = len(encode_batch(chunks(5, run(0, 1), run(2, 3))[0]))
    monkeypatch.setattr(restatement, "PARKED_BYTES_MAX", size + 1)
    holdings = degraded()
    judge(holdings, batch(5, rank=SIBLING))
    first, second = chunks(5, run(0, 1), run(2, 3))
    assert judge(holdings, first) is Verdict.PARKED
    assert judge(holdings, replace(first, rank=SIBLING)) is Verdict.DROPPED
    assert judge(holdings, second) is Verdict.RESTATED
    assert judge(holdings, replace(first, rank=SIBLING)) is Verdict.PARKED


@pytest.mark.parametrize(("n_blocks", "fits"), [(90_000, True), (100_000, False)])
def test_a_chunk_too_large_for_the_changelog_is_refused(n_blocks: int, fits: bool) -> None:
    """Its transaction would never commit, so it is a dead letter. At 16 bytes per block, 1.5 MiB are 98,304 blocks."""
    hashes = np.arange(n_blocks, dtype=np.uint64)
    whole = RestatedRun(0, None, hashes, hashes, Tier.DEVICE)
    raw = encode_batch(replace(batch(5), body=RestatementChunk(9, 0, 2, True, (whole,))))
    settings = Settings(partitions=1)
    reducer = IndexReducer(settings, Counter())
    record = SourceRecord(topics(settings).kv_events.name, 0, 0, 0, b"7", raw, ())
    (decoded,) = reducer.decode([record])
    if fits:
        reducer.apply(record, decoded)
        assert [(key[:1], value) for changes in reducer.take_changes().values() for key, value in changes][1:] == [
            (CHUNK_KEY.prefix, raw)
        ]
    else:
        with pytest.raises(BadRecord) as caught:
            reducer.apply(record, decoded)
        assert caught.value.reason == "bad_restatement"


def test_a_source_that_lost_records_drops_parked_chunks() -> None:
    """The lost records may include a batch that would have dropped them."""
    holdings = degraded()
    judge(holdings, chunks(5, run(0, 1), run(2, 3))[0])
    holdings.degrade_all()
    assert RANK not in holdings.parking


def test_a_chunk_is_decoded_as_it_was_encoded() -> None:
    """A parked row is read back as the chunk that was written."""
    (chunk,) = chunks(5, run(1, 3))
    again = decode_batch(encode_batch(chunk))
    assert isinstance(again.body, RestatementChunk) and isinstance(chunk.body, RestatementChunk)
    assert again.body.runs[0].parent == CHAIN[0]
    assert (again.body.runs[0].local == chunk.body.runs[0].local).all()

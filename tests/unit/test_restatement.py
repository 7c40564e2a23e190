"""Restatements: chunks are parked, dropped or swapped in, whoever dies between two of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from streams.codec import decode_batch, encode_batch
from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    EngineBatch,
    Heartbeat,
    RestatedRun,
    RestatementChunk,
)
from streams.core.ids import Epoch, Incarnation, SequenceHash, Tier, WorkerId
from streams.core.reducer import restatement
from streams.core.reducer.holdings import PlainHoldings, plain_holdings
from streams.core.reducer.ordering import Health, Verdict
from streams.core.reducer.restatement import CHUNKS_MAX, ChunkKey, Parking
from streams.errors import BadRecord
from streams.settings import Settings
from streams.tables.index_reducer import IndexReducer
from streams.tables.records import PARKED_PREFIX
from streams.tables.reducer import SourceRecord
from streams.topics import topics
from tests.helpers.reference import chain_hashes
from tests.unit.test_holdings import RANK, SIBLING, batch, check, judge, members, names, stored, u64
from tests.unit.test_table_properties import compacted, folded, recovered, state_of_holdings, state_of_view, written

CHAIN = chain_hashes([1, 2, 3, 4])


def run(first: int, last: int) -> RestatedRun:
    """Blocks of CHAIN, from one to another."""
    parent = SequenceHash(CHAIN[first - 1]) if first else None
    local = np.arange(first + 1, last + 2, dtype=np.uint64)
    return RestatedRun(first, parent, local + np.uint64(1000), local, Tier.DEVICE)


def chunks(
    sequence: int, *pieces: RestatedRun, exact: bool = True, incarnation: int = 1, restatement_id: int = 9
) -> list[EngineBatch]:
    """A restatement complete to a sequence, a chunk for each run."""
    return [
        replace(
            batch(sequence, incarnation=incarnation),
            body=RestatementChunk(restatement_id, number, len(pieces), exact, (piece,)),
        )
        for number, piece in enumerate(pieces)
    ]


def degraded() -> PlainHoldings:
    """A rank that lost batches 1 to 4 and holds the first block of another chain."""
    holdings = plain_holdings()
    judge(holdings, batch(0, stored(names(1), u64(50))))
    assert judge(holdings, batch(5)) is Verdict.GAP
    return holdings


def blocks(holdings: PlainHoldings) -> set[int]:
    return {block for _, _, block in members(holdings)}


@pytest.mark.parametrize("exact", [True, False])
def test_a_restatement_is_swapped_in_under_a_new_epoch_when_its_last_chunk_has_come(exact: bool) -> None:
    """Until then nothing changes; then the rank holds just what was restated, children first or not."""
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


def test_blocks_that_are_not_indexed_leave_a_restated_rank_approximate() -> None:
    """In whichever chunk they are told."""
    holdings = degraded()
    first, second = chunks(5, run(0, 1), run(2, 3))
    judge(holdings, replace(first, n_unindexed=3))
    judge(holdings, second)
    assert holdings.progress[RANK].health is Health.APPROXIMATE


def test_an_empty_restatement_leaves_nothing_and_is_exact() -> None:
    """A rank that holds nothing says so in one chunk without runs."""
    holdings = degraded()
    empty = replace(batch(5), body=RestatementChunk(9, 0, 1, True, ()))
    assert judge(holdings, empty) is Verdict.RESTATED
    assert (blocks(holdings), holdings.progress[RANK].health) == (set(), Health.EXACT)


def test_a_restatement_from_before_what_was_applied_changes_nothing() -> None:
    """It lacks batches that are there already: not parked, and what is parked stays."""
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
    ids=["batch", "clear", "life", "life by heartbeat", "another id", "another sequence", "not exact", "again"],
)
def test_whatever_comes_between_two_chunks_drops_what_was_parked(between: EngineBatch) -> None:
    """The last chunk then completes nothing; the first one again begins anew."""
    holdings = degraded()
    first, _, last = chunks(5, run(0, 1), run(2, 2), run(3, 3))
    judge(holdings, first)
    judge(holdings, between)
    assert judge(holdings, last) in (Verdict.DROPPED, Verdict.STALE, Verdict.DUPLICATE)
    assert not blocks(holdings) & set(CHAIN)


def test_a_removal_drops_what_was_parked_and_another_rank_does_not() -> None:
    """Chunks are consecutive for their rank."""
    holdings = degraded()
    first, second = chunks(5, run(0, 1), run(2, 3))
    judge(holdings, first)
    judge(holdings, batch(0, rank=SIBLING))
    judge(holdings, replace(batch(5), body=Heartbeat("b", 1000)))
    assert RANK in holdings.parking
    holdings.remove_worker(WorkerId(7), Incarnation(1))
    assert RANK not in holdings.parking
    assert judge(holdings, second) is Verdict.STALE


def test_a_restatement_of_a_newer_life_begins_it() -> None:
    """The old life's blocks are gone with its first chunk; the whole makes the new one exact."""
    holdings = degraded()
    first, second = chunks(3, run(0, 1), run(2, 3), incarnation=2)
    assert judge(holdings, first) is Verdict.PARKED
    assert (blocks(holdings), holdings.progress[RANK].health) == (set(), Health.DEGRADED)
    assert judge(holdings, second) is Verdict.RESTATED
    assert (blocks(holdings), holdings.progress[RANK].health) == (set(CHAIN), Health.EXACT)
    assert holdings.progress[RANK].epoch == Epoch(Incarnation(2), 1)


def test_parked_chunks_outlive_their_owner_and_leave_no_rows_behind() -> None:
    """Rows are written as the chunks came, recovered by the next owner, and tombstones when the whole is swapped in."""
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


def test_rows_that_are_no_beginning_of_a_restatement_are_forgotten() -> None:
    """A stranger's row is a tombstone at the next commit, and stops nobody."""
    _, second, third = chunks(5, run(0, 1), run(2, 2), run(3, 3))
    parking = Parking()
    parking.load([(ChunkKey(RANK, 1), second, 10), (ChunkKey(SIBLING, 0), third, 10)])
    assert RANK not in parking and SIBLING not in parking
    assert parking.take_changes() == [(ChunkKey(RANK, 1), None), (ChunkKey(SIBLING, 0), None)]


@pytest.mark.parametrize("n_chunks", [CHUNKS_MAX, CHUNKS_MAX + 1])
def test_a_restatement_of_too_many_chunks_is_refused(n_chunks: int) -> None:
    """At the limit it is parked, beyond it a bad record, and nothing is parked of it."""
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
    """It would not fit one transaction; what was parked of it is dropped."""
    monkeypatch.setattr(restatement, "RESTATED_RUNS_MAX", 2)
    holdings = degraded()
    first, second, third = chunks(5, run(0, 1), run(2, 2), run(3, 3))
    assert [judge(holdings, first), judge(holdings, second)] == [Verdict.PARKED] * 2
    with pytest.raises(BadRecord):
        judge(holdings, third)
    assert RANK not in holdings.parking and blocks(holdings) == {50}


def test_more_than_there_is_room_for_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's chunks are in memory, another's do not fit beside them and are asked for again later."""
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
def test_a_chunk_that_the_changelog_cannot_hold_is_refused(n_blocks: int, fits: bool) -> None:
    """Its transaction would fail for ever; a dead letter stops nobody. At 16 bytes a block, 1.5 MiB are 98,304."""
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
            (PARKED_PREFIX, raw)
        ]
    else:
        with pytest.raises(BadRecord) as caught:
            reducer.apply(record, decoded)
        assert caught.value.reason == "bad_restatement"


def test_a_source_that_lost_records_drops_what_was_parked() -> None:
    """What is lost may have been the very batch that would have dropped it."""
    holdings = degraded()
    judge(holdings, chunks(5, run(0, 1), run(2, 3))[0])
    holdings.degrade_all()
    assert RANK not in holdings.parking


def test_a_chunk_survives_its_bytes() -> None:
    """A parked row is read back as the chunk that was written."""
    (chunk,) = chunks(5, run(1, 3))
    again = decode_batch(encode_batch(chunk))
    assert isinstance(again.body, RestatementChunk) and isinstance(chunk.body, RestatementChunk)
    assert again.body.runs[0].parent == CHAIN[0]
    assert (again.body.runs[0].local == chunk.body.runs[0].local).all()

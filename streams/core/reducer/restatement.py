"""Incomplete restatements: a rank's chunks are parked until the last one has arrived (docs/architecture.md).

What lives here: which chunk is next, what is parked, and how much of it. What must not: Kafka, keys and values
(tables.records), and what a complete restatement changes (holdings).

A parked chunk is a row of the table. The transaction that consumes the chunk writes the row; the transaction that
applies or drops the restatement deletes it. State is therefore a function of the log, even if an owner crashes between
two chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from streams.core.events import EngineBatch, RestatedRun, RestatementChunk
from streams.core.ids import RankId
from streams.core.runs import RUN_BLOCKS_MAX
from streams.errors import BadRecord

#: Chunks of one restatement. A bridge cuts chunks of 1 MiB, which is 65,536 blocks; a rank with 4 million blocks of
#: 16 tokens would have more cache than any engine today.
CHUNKS_MAX = 64

#: Run records of one restatement. They are written in one transaction, which takes 2 s for this many and must not take
#: 10 s.
RESTATED_RUNS_MAX = 100_000

#: After this many restated runs, a transaction is committed before more is applied: several large restatements in one
#: transaction would exceed its timeout. A transaction with almost this many runs and then the largest restatement takes
#: 2.2 s.
RESTATED_RUNS_FULL = 10_000

#: Bytes of parked chunks in one partition; they are kept in memory too.
PARKED_BYTES_MAX = 128 * 1024 * 1024


class ChunkKey(NamedTuple):
    """Address of a parked row."""

    rank: RankId
    chunk: int


@dataclass(slots=True)
class _Parked:
    """The first chunks of one restatement, in order."""

    batches: list[EngineBatch] = field(default_factory=list)
    runs: list[RestatedRun] = field(default_factory=list)
    n_bytes: int = 0
    n_runs: int = 0


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete restatement.

    runs: parents before children. n_runs: the number of run records. n_unindexed: unindexed blocks in all chunks.
    """

    exact: bool
    n_runs: int
    runs: list[RestatedRun]
    n_unindexed: int


class Parking:
    """The parked chunks of each rank of one partition, and the rows that must be written."""

    def __init__(self) -> None:
        self._parked: dict[RankId, _Parked] = {}
        self._changes: dict[ChunkKey, bytes | None] = {}
        self._n_bytes = 0

    def __contains__(self, rank: RankId) -> bool:
        """Whether chunks of a rank are parked."""
        return rank in self._parked

    def load(self, rows: Iterable[tuple[ChunkKey, EngineBatch, int]]) -> None:
        """Start from the rows of the table, in any order, each with its bytes.

        Rows that are not the first chunks of one restatement become tombstones; only a foreign writer can have written
        them.
        """
        self._parked, self._changes, self._n_bytes = {}, {}, 0
        for key, batch, n_bytes in sorted(rows, key=lambda row: row[0]):
            held = self._parked.setdefault(key.rank, _Parked())
            if key == (batch.rank, _chunk(batch).chunk) and _follows(held.batches, batch):
                self._add(held, batch, n_bytes)
            else:
                self._changes[key] = None
            if not held.batches:
                del self._parked[key.rank]

    def take(self, batch: EngineBatch, raw: bytes) -> Whole | bool:
        """Take a chunk; returns the restatement that it completes, otherwise whether the chunk is parked.

        raw: the record as received, which becomes the row's value. A chunk that does not follow the parked ones drops
        them; a first chunk starts a new restatement. Raises BadRecord for a restatement over the limits, and then
        keeps nothing of it.
        """
        rank, chunk = batch.rank, _chunk(batch)
        held = self._parked.get(rank)
        if held is None or not _follows(held.batches, batch):
            self.drop(rank)
            if chunk.chunk:
                return False
            held = self._parked[rank] = _Parked()
        self._add(held, batch, len(raw))
        if chunk.n_chunks > CHUNKS_MAX or held.n_runs > RESTATED_RUNS_MAX:
            self.drop(rank)
            raise BadRecord(
                "bad_restatement",
                f"the restatement of rank {rank} has {chunk.n_chunks} chunks, with {held.n_runs} runs in the first "
                f"{len(held.batches)}; the limits are {CHUNKS_MAX} chunks and {RESTATED_RUNS_MAX} runs",
            )
        if len(held.batches) == chunk.n_chunks:
            self.drop(rank)
            runs = sorted(held.runs, key=lambda run: run.start)  # a parent starts before its children on every chain
            return Whole(chunk.exact, held.n_runs, runs, sum(batch.n_unindexed for batch in held.batches))
        if self._n_bytes > PARKED_BYTES_MAX:
            self.drop(rank)  # a later resync request repeats it, when other restatements are complete
            return False
        self._changes[ChunkKey(rank, chunk.chunk)] = raw
        return True

    def drop(self, rank: RankId) -> None:
        """Drop the parked chunks of a rank."""
        held = self._parked.pop(rank, None)
        if held is not None:
            self._n_bytes -= held.n_bytes
            self._changes.update((ChunkKey(rank, number), None) for number in range(len(held.batches)))

    def take_changes(self) -> list[tuple[ChunkKey, bytes | None]]:
        """Take the rows to write and to delete since the last call."""
        changes = list(self._changes.items())
        self._changes.clear()
        return changes

    def _add(self, held: _Parked, batch: EngineBatch, n_bytes: int) -> None:
        runs = _chunk(batch).runs
        held.batches.append(batch)
        held.runs += runs
        held.n_runs += sum(-(-len(run.local) // RUN_BLOCKS_MAX) for run in runs)
        held.n_bytes += n_bytes
        self._n_bytes += n_bytes


def _follows(parked: list[EngineBatch], batch: EngineBatch) -> bool:
    """Whether a chunk is the next one of the parked restatement."""
    chunk = _chunk(batch)
    if not parked:
        return chunk.chunk == 0
    before = _chunk(parked[0])
    return (
        chunk.chunk == len(parked)
        and (chunk.restatement_id, chunk.n_chunks, chunk.exact)
        == (before.restatement_id, before.n_chunks, before.exact)
        and (batch.incarnation, batch.sequence) == (parked[0].incarnation, parked[0].sequence)
    )


def _chunk(batch: EngineBatch) -> RestatementChunk:
    assert isinstance(batch.body, RestatementChunk)
    return batch.body

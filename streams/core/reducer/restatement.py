"""Restatements on their way: a rank's chunks are parked until the last one has come (docs/architecture.md).

What lives here: which chunk is next, what is parked, and how much of it. What must not: Kafka, keys and values
(tables.records), and what a complete restatement changes (holdings).

A parked chunk is a row of the table, written in the transaction that consumes it, and gone in the one that swaps the
whole restatement in or drops it: so state is a function of the log, whoever dies between two chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from streams.core.events import EngineBatch, RestatedRun, RestatementChunk
from streams.core.ids import RankId
from streams.core.runs import RUN_BLOCKS_MAX
from streams.errors import BadRecord

#: Chunks of one restatement. A bridge cuts at a MiB, which is 65,536 blocks; a rank of 4 million blocks of 16 tokens
#: has more cache than any engine today.
CHUNKS_MAX = 64

#: Run records that one restatement may become: they are written in one transaction, which takes 2 s for so many and
#: must not take 10.
RESTATED_RUNS_MAX = 100_000

#: With so many runs restated a transaction is committed before anything else is applied: several large restatements in
#: one would take longer than it may be open. The largest on top of nearly so many take 2.2 s.
RESTATED_RUNS_FULL = 10_000

#: Bytes parked of all ranks of a partition: they lie in memory too.
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
    """A complete restatement. runs: parents before children. n_runs: records that they become. n_unindexed: of all
    chunks."""

    exact: bool
    n_runs: int
    runs: list[RestatedRun]
    n_unindexed: int


class Parking:
    """What is parked of each rank of one partition, and which rows must be written."""

    def __init__(self) -> None:
        self._parked: dict[RankId, _Parked] = {}
        self._changes: dict[ChunkKey, bytes | None] = {}
        self._n_bytes = 0

    def __contains__(self, rank: RankId) -> bool:
        """Whether chunks of a rank wait for the rest."""
        return rank in self._parked

    def load(self, rows: Iterable[tuple[ChunkKey, EngineBatch, int]]) -> None:
        """Start from the rows of the table, in any order, with each one's bytes.

        Rows that are no beginning of one restatement, which only a stranger can have written, become tombstones.
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
        """Take a chunk; gives the restatement that it completes, else whether it is parked.

        raw: the record as it came, which is the row's value. A chunk that does not follow what is parked drops that; a
        first one begins anew. Raises BadRecord for a restatement larger than one may be, of which nothing stays.
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
                f"rank {rank} is restated in {chunk.n_chunks} chunks, {held.n_runs} runs in the first "
                f"{len(held.batches)}; at most {CHUNKS_MAX} and {RESTATED_RUNS_MAX}",
            )
        if len(held.batches) == chunk.n_chunks:
            self.drop(rank)
            runs = sorted(held.runs, key=lambda run: run.start)  # a parent lies before its children on every chain
            return Whole(chunk.exact, held.n_runs, runs, sum(each.n_unindexed for each in held.batches))
        if self._n_bytes > PARKED_BYTES_MAX:
            self.drop(rank)  # it is asked for again when others are through
            return False
        self._changes[ChunkKey(rank, chunk.chunk)] = raw
        return True

    def drop(self, rank: RankId) -> None:
        """Forget what is parked of a rank."""
        held = self._parked.pop(rank, None)
        if held is not None:
            self._n_bytes -= held.n_bytes
            self._changes.update((ChunkKey(rank, number), None) for number in range(len(held.batches)))

    def take_changes(self) -> list[tuple[ChunkKey, bytes | None]]:
        """Rows written and tombstones since the last call."""
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
    """Whether a chunk is the next one of the restatement that is parked."""
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

"""A router's read-only copy of the prefix index, folded from the index changelog.

What lives here: the fold of run, progress and partition records, of labels, and what decisions read of it. What must
not: consuming topics (topic_readers), choosing (core.routing), the registry (fleet_view), and how far an answer can be
trusted (trust_tracker). Only agents write the index; a router has a replica of it.

Records come in any order that compaction leaves: children before parents, runs before their rank's progress. The fold
of blocks is core.index.tree_fold; this module has keys and bytes, and one lock, so that a query sees each record either
completely or not at all. Pooled blocks and labels are in supplementary_facts.

State: the index of one router.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streams.core.ids import Epoch, HashArray, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import Candidates, PrefixScores
from streams.core.index.run_columns import RunColumns
from streams.core.index.tree_fold import TreeRunFold
from streams.core.reducer.ordering import Health, Progress
from streams.errors import BadRecord
from streams.router_api.knowledge.fleet_view import FleetView
from streams.router_api.knowledge.predictions import Predictions
from streams.router_api.knowledge.run_changes import RunChanges
from streams.router_api.knowledge.supplementary_facts import SupplementaryFacts
from streams.router_api.knowledge.trust_tracker import TrustTracker
from streams.settings import ScopeSettings
from streams.tables.records import (
    CHUNK_KEY,
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    decode_partition,
    decode_progress,
    decode_run,
    encode_run,
)
from streams.tables.run_decoding import decode_runs, labels_of
from streams.warming import ROUTER, warm

log = logging.getLogger(__name__)

#: Run records that are folded while queries wait: 128 of them take 130 to 200 us.
_LOCKED_RECORDS = 128

#: One fact as GET /state/blocks returns it, 21 bytes, little-endian.
FACT = np.dtype([("worker_id", "<u8"), ("dp_rank", "<u4"), ("tier", "u1"), ("block", "<u8")])

#: Facts in a page of them, about 1 MB.
PAGE_FACTS = 50_000


@dataclass(frozen=True, slots=True)
class RankState:
    """What the index has of one rank. digest: order-independent hash of its (tier, sequence hash) facts."""

    rank: RankId
    epoch: Epoch
    sequence: int
    health: Health
    n_blocks: int
    n_gaps: int
    n_unknown_parents: int
    digest: int
    lease_ms: int = 0
    silent: bool = False


def new_tree() -> TreeRunFold:
    """An empty index, whose kernels are ready."""
    warm(ROUTER)  # before the first answer, which would otherwise wait for a compiler
    return TreeRunFold()


class IndexView:
    """The fold of the index changelog. Thread-safe.

    changes: grows with each change of what `find_matches` returns. runs: the fold of blocks. records_over_capacity: run
    records that were dropped because the index was full.
    """

    def __init__(
        self,
        settings: ScopeSettings,
        runs: TreeRunFold,
        lock: threading.Lock,
        trust: TrustTracker,
        facts: SupplementaryFacts,
        fleet: FleetView,
        predictions: Predictions,
        run_changes: RunChanges,
    ) -> None:
        """lock: held while records are folded. A thread that holds it may take the locks of all other arguments, and
        none that holds one of these takes it."""
        self._settings = settings
        self._lock = lock
        self._trust = trust
        self._facts = facts
        self._fleet = fleet
        self._predictions = predictions
        self._run_changes = run_changes
        self.changes = 0
        self.runs = runs
        self.records_over_capacity = 0

    # -- the fold ------------------------------------------------------------------------------------------------------

    def fold_batch(
        self, records: Sequence[tuple[bytes, bytes | None]], received_ms: int | None
    ) -> list[tuple[int, BadRecord]]:
        """Fold records of the index changelog in order; return those that cannot be used, each with its position.

        A bad record changes nothing, and does not keep the others from being folded. received_ms: the time; None if
        the records were written before this reader had reached the end of its partition.
        """
        bad: list[tuple[int, BadRecord]] = []
        if received_ms is None:
            self._run_changes.skip()
        columns, others = decode_runs(records)  # others: positions of records that are not decoded as columns
        # Asked for once: between two records that are not runs there are few runs, and asking takes as long as folding
        # them. Most batches have no labels.
        are_labelled = bool(columns.labelled.any())
        n_folded = 0
        for position in others:
            self._fold_runs(columns, n_folded, position, records, are_labelled)
            n_folded = position + 1
            try:
                self._fold_other(*records[position], received_ms)
            except BadRecord as exc:
                bad.append((position, exc))
        self._fold_runs(columns, n_folded, len(records), records, are_labelled)
        return bad

    def _fold_other(self, key: bytes, value: bytes | None, received_ms: int | None) -> None:
        """Fold a record that is not decoded as columns. Raises BadRecord; nothing is changed then."""
        if key.startswith(RUN_KEY.prefix):
            # Only a foreign writer's value is left to decode_run. Once it is encoded again, it becomes a column.
            RUN_KEY.parse(key)
            run = [(key, None if value is None else encode_run(decode_run(key, value)))]
            columns, _ = decode_runs(run)
            self._fold_runs(columns, 0, 1, run, bool(columns.labelled.any()))
        elif key.startswith(PROGRESS_KEY.prefix):
            rank = PROGRESS_KEY.parse(key)
            progress = None if value is None else decode_progress(key, value)
            with self._lock:
                self._fold_progress(rank, progress)
                self.changes += 1
        elif key.startswith(PARTITION_KEY.prefix):
            if value is not None:
                self._trust.note_partition(decode_partition(key, value), received_ms)
        elif not key.startswith(CHUNK_KEY.prefix):  # parked chunks become runs when their restatement is complete
            raise BadRecord("bad_key", f"{key.hex()} is not a valid key of the index")

    def forget_ranks(self, ranks: Iterable[RankId]) -> None:
        """Drop everything about these ranks, as after the tombstones of their progress."""
        for rank in ranks:
            with self._lock:
                self._fold_progress(rank, None)
                self.changes += 1

    def _fold_runs(
        self,
        columns: RunColumns,
        first: int,
        last: int,
        records: Sequence[tuple[bytes, bytes | None]],
        are_labelled: bool,
    ) -> None:
        for begin in range(first, last, _LOCKED_RECORDS):
            end = min(begin + _LOCKED_RECORDS, last)
            with self._lock:
                for record in self.runs.fold_records(columns, begin, end):
                    self._note_over_capacity(columns.place_of(record)[0])
                # After the fold: what a decision reads in between is then older than the moment that it remembers.
                self._run_changes.note(columns, begin, end)
                self.changes += 1  # afterwards: requests may read the index without the lock
            if are_labelled or self._facts.has_labels():
                self._fold_labels_of(columns, begin, end, records)

    def _fold_labels_of(
        self, columns: RunColumns, first: int, last: int, records: Sequence[tuple[bytes, bytes | None]]
    ) -> None:
        """Fold the labels of records that the index has folded, one record at a time so that requests wait briefly."""
        labelled = labels_of(columns, first, last)
        for record in range(first, last):
            key = records[record][0]
            if record in labelled or self._facts.has_labels_of(key):
                rank, epoch = columns.place_of(record)[0], columns.epoch_of(record)
                with self._lock:
                    self._facts.fold_labels(key, rank, epoch, labelled.get(record, ()))
        with self._lock:
            self._facts.end_stale_labels()

    def _note_over_capacity(self, rank: RankId) -> None:
        self.records_over_capacity += 1
        if self._trust.note_over_capacity(rank):
            log.error(
                "The index is over capacity and lacks run records of rank %s. Answers for it are degraded until its "
                "cache is cleared or its engine restarts. Give this router a smaller scope",
                rank,
            )

    def _fold_progress(self, rank: RankId, progress: Progress | None) -> None:
        if progress is None:
            self._trust.note_progress(rank, None)
            self._run_changes.note_everything(rank)
            self._fleet.note_rank(rank, silent=False, wrong_size=False)
            self.runs.forget_rank(rank)
            self._facts.forget_rank(rank)
            return
        last = self._trust.progress.get(rank)
        if last is not None and (progress.epoch, progress.sequence) < (last.epoch, last.sequence):
            return
        self._trust.note_progress(rank, progress)  # before the index, which empties the rank if a new epoch begins
        self.runs.enter_epoch(rank, progress.epoch)
        if self._facts.has_labels():
            self._facts.end_stale_labels()
        if last is None or last.epoch != progress.epoch:
            self._run_changes.note_everything(rank)
            self._predictions.note_restart(rank)
        expected = self._settings.block_size_of(progress.model)
        wrong = progress.block_size not in (0, expected) and progress.health is not Health.REMOVED
        self._fleet.note_rank(rank, silent=progress.silent, wrong_size=wrong)

    # -- what decisions read -------------------------------------------------------------------------------------------

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request by the folded records. local: uint64[n_blocks] from the root."""
        return self.runs.find_matches(local)

    def held_prefix(self, rank: RankId, sequence: HashArray) -> int:
        """How many leading blocks of a chain a rank holds. sequence: uint64[n] from the root, contiguous."""
        rows = np.zeros(len(sequence), dtype=np.int64)
        with self._lock:
            held = self.runs.holders_along(sequence, 0, rows, Candidates((rank,)))
        if held is None:
            return 0
        missing = np.flatnonzero(held[0] == 0)
        return int(missing[0]) if len(missing) else len(sequence)

    def ranks_missing_labels(self, ranks: Iterable[RankId]) -> set[RankId]:
        """Return those of these ranks whose labels were dropped: blocks of theirs without labels may match."""
        with self._lock:  # labels are folded under this lock as well
            incomplete = self._facts.ranks_missing_labels()
            return {rank for rank in ranks if rank in incomplete} if incomplete else set()

    # -- what people read ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.runs)

    def progress_of(self, worker_id: WorkerId) -> list[Progress]:
        """Progress of those of a worker's ranks that have any."""
        with self._lock:
            return [progress for rank, progress in self._trust.progress.items() if rank.worker_id == worker_id]

    def rank_states(self) -> list[RankState]:
        """Every rank of which any record was folded, in order."""
        with self._lock:
            return [self._rank_state(rank) for rank in sorted(self.runs.ranks())]

    def _rank_state(self, rank: RankId) -> RankState:
        n_blocks, digest = self.runs.facts(rank)
        epoch = self.runs.epoch_of(rank)
        assert epoch is not None  # the index lists only ranks with an epoch
        progress = self._trust.progress.get(rank)
        return RankState(
            rank=rank,
            epoch=epoch,
            sequence=progress.sequence if progress else -1,
            health=progress.health if progress else Health.DEGRADED,
            n_blocks=n_blocks,
            n_gaps=progress.n_gaps if progress else 0,
            n_unknown_parents=progress.n_unknown_parents if progress else 0,
            digest=digest,
            lease_ms=progress.lease_ms if progress else 0,
            silent=progress.silent if progress else False,
        )

    def held_by(self, rank: RankId) -> dict[Tier, HashArray]:
        """Sequence hashes that a rank holds, by tier: uint64[n] each."""
        with self._lock:
            return self.runs.held_by(rank)

    def members(self) -> set[tuple[RankId, Tier, SequenceHash]]:
        """Every fact held. Two indexes are equal if these sets and the ranks' epochs are equal."""
        return {
            (rank, tier, SequenceHash(block))
            for rank, tier, blocks in self._facts_in_order()
            for block in blocks.tolist()
        }

    def fact_pages(self) -> Iterator[bytes]:
        """Every fact held, in order, as packed FACTs. A page has whole ranks, and at least PAGE_FACTS facts.

        The facts of each rank are those of one moment, and those of several ranks are not: decisions need the lock, so
        it is held for one rank at a time.
        """
        pages: list[bytes] = []
        n_facts = 0
        for rank, tier, blocks in self._facts_in_order():
            rows = np.empty(len(blocks), dtype=FACT)
            rows["worker_id"], rows["dp_rank"], rows["tier"], rows["block"] = rank.worker_id, rank.dp_rank, tier, blocks
            pages.append(rows.tobytes())
            n_facts += len(blocks)
            if n_facts >= PAGE_FACTS:
                yield b"".join(pages)
                pages, n_facts = [], 0
        if pages:
            yield b"".join(pages)

    def _facts_in_order(self) -> Iterator[tuple[RankId, Tier, HashArray]]:
        """The sequence hashes of each rank and tier, in order: uint64[n]. Holds the lock for one rank at a time."""
        with self._lock:
            ranks = sorted(self.runs.ranks())
        for rank in ranks:
            with self._lock:
                held = self.runs.held_by(rank)
            for tier, blocks in sorted(held.items()):
                blocks.sort()
                yield rank, tier, blocks

"""Pooled blocks and labels of blocks, folded for routing: everything that counts in addition to a rank's own prefix.

What lives here: the folds of the changelog of pooled blocks, of CXL pools and of labels, and their locks. What must
not: what a match is worth (core.routing.cost), and how far it can be trusted (trust).
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from streams.core.block_facts.fact_sets import FactSets, RankNumbering
from streams.core.block_facts.moe_labels import LabelIndex, MoeSelector
from streams.core.cxl_memory import CxlMemoryState, PoolSpeeds
from streams.core.events import MoeLabels
from streams.core.ids import Epoch, HashArray, RankId, SequenceHash, WorkerId
from streams.core.routing.supplementary import HoldersAlong, SupplementaryMatches
from streams.cxl.events import CxlPool
from streams.cxl.pooled_index import ONE_SPEED, PooledIndex, PooledScore, PoolRun, PoolShare
from streams.cxl.pooled_view import PooledBlock, PooledView
from streams.cxl.records import BlockRow, OwnerRow, Placement, parse_block_key
from streams.kafka.clients import partition_of
from streams.router_api.knowledge.trust_tracker import PooledRows


class PoolContents(NamedTuple):
    """A pool and what a router has of it: blocks of its epoch, and GB/s at which ranks load them."""

    pool: CxlPool
    n_blocks: int
    gb_per_s: float


class SupplementaryFacts:
    """The folds. Pooled blocks may be folded by any thread; labels are folded under the view's lock.

    Listing a million pooled rows must not delay an answer, so there are two locks: one for the rows, and one for the
    pooled blocks and labels that answers read. The second is always taken last, and is held for microseconds.
    """

    def __init__(
        self,
        n_partitions: int,
        schema_ids: Mapping[str, int],
        epoch_of: Callable[[RankId], Epoch | None],
        holders_along: HoldersAlong,
        serves: Callable[[str], bool] | None = None,
        speeds: PoolSpeeds = ONE_SPEED,
    ) -> None:
        """epoch_of, holders_along: methods of the index; the first is called under the view's lock. serves: whether
        pooled blocks of a model are kept. speeds: of pools."""
        self._n_partitions = n_partitions
        self._epoch_of = epoch_of
        self._holders_along = holders_along
        self._rows_lock = threading.Lock()
        self._facts_lock = threading.Lock()
        self._rows = PooledView(schema_ids, serves=serves)
        self._pooled = PooledIndex(FactSets(), self._rows.pools, speeds)
        self._speeds = speeds
        self._blocks_by_pool: Counter[tuple[str, int]] = Counter()  # by pool and epoch; changed under the rows' lock
        self._labels = LabelIndex(FactSets())
        # Rows of pooled blocks by model and owner, which need not be registered any more, and what follows from it: the
        # owners by model, and their partitions. Both are replaced, never changed: answers read them without a lock.
        self._rows_by_owner: Counter[tuple[str, RankId]] = Counter()
        self._ranks_with_rows: Mapping[str, tuple[RankId, ...]] = {}
        self._partitions_with_rows: tuple[int, ...] = ()
        self._had_rows = False  # whether there was ever one
        #: Whether any block is pooled or labelled. If none is, a decision reads nothing else here.
        self.has_any = False

    # -- the folds -----------------------------------------------------------------------------------------------------

    def fold_pool(self, key: bytes, value: bytes | None) -> None:
        """Fold a CXL pool's record of the registry; raises BadRecord."""
        with self._rows_lock:
            self._rows.fold_pool(key, value)
            with self._facts_lock:
                self._pooled.invalidate_masks()

    def fold_pooled(self, key: bytes, value: bytes | None) -> None:
        """Fold one record of the changelog of pooled blocks. A record that raises BadRecord changes nothing."""
        with self._rows_lock:
            change = self._rows.fold(key, value)
            if change is None:
                return
            with self._facts_lock:
                self._pooled.replace(*change)
                self._note_whether_any()
            self._count_blocks(change.before, -1)
            self._count_blocks(change.after, 1)
            before, after = (None if row is None else row.model for row in (change.before, change.after))
            if before != after:
                owner = parse_block_key(key).owner
                self._count_row(before, owner, -1)
                self._count_row(after, owner, 1)

    def _count_blocks(self, placement: Placement | None, more: int) -> None:
        if placement is not None and placement.state is CxlMemoryState.CXL_POOLED:
            where = placement.pool_id, placement.pool_epoch
            self._blocks_by_pool[where] += more * placement.span
            if not self._blocks_by_pool[where]:
                del self._blocks_by_pool[where]

    def _count_row(self, model: str | None, owner: RankId, more: int) -> None:
        if model is None:
            return
        counts = self._rows_by_owner
        counts[model, owner] += more
        if counts[model, owner] == max(more, 0):  # the first row, or the last one
            self._note_owners()

    def _note_owners(self) -> None:
        self._rows_by_owner = +self._rows_by_owner
        ranks = defaultdict[str, list[RankId]](list)
        for model, rank in self._rows_by_owner:
            ranks[model].append(rank)
        partitions = {partition_of(rank.worker_id, self._n_partitions) for _, rank in self._rows_by_owner}
        self._ranks_with_rows = {model: tuple(owners) for model, owners in ranks.items()}
        self._partitions_with_rows = tuple(sorted(partitions))
        self._had_rows = True

    def has_labels(self) -> bool:
        """Whether any record has labels, or had labels that are still to be removed."""
        return bool(self._labels)

    def has_labels_of(self, key: bytes) -> bool:
        """Whether a run record has labels."""
        return key in self._labels

    def fold_labels(
        self, key: bytes, rank: RankId, epoch: Epoch | None, labelled: Iterable[tuple[SequenceHash, MoeLabels]]
    ) -> None:
        """Fold the labels of one run record. epoch: None for a tombstone; labels of an ended epoch are ignored."""
        with self._facts_lock:
            if epoch is None:
                self._labels.end(key)
            elif epoch == self._epoch_of(rank):
                self._labels.fold(key, rank, epoch, labelled)
            self._note_whether_any()

    def end_stale_labels(self) -> None:
        """Remove the labels of ranks for which the index has seen a newer epoch."""
        with self._facts_lock:
            self._labels.tidy()
            for rank, epoch in self._labels.ranks():
                if self._epoch_of(rank) != epoch:
                    self._labels.forget_rank(rank)
            self._note_whether_any()

    def forget_rank(self, rank: RankId) -> None:
        """Drop a rank's labels and its epoch, since the rank's next epoch may be smaller."""
        with self._facts_lock:
            self._labels.forget_rank(rank)
            self._note_whether_any()

    # -- what decisions and answers read -------------------------------------------------------------------------------

    def matches(
        self, sequence: HashArray, model: str, moe: MoeSelector | None, numbers: RankNumbering, *, pooled: bool
    ) -> SupplementaryMatches:
        """Return the supplementary matches of one request. See `wants` for when there are any.

        sequence: uint64[n], the request's sequence hashes, contiguous. pooled: whether pooled blocks are used.
        """
        with self._facts_lock:
            reached = self._pooled.query(model, numbers) if pooled and len(self._pooled) else None
            labelled = self._labels.query(moe, numbers) if moe is not None and self._labels else None
            keys = sequence if reached is None else self._pooled.keys_of(sequence)
        return SupplementaryMatches(sequence, reached, labelled, self._holders_along, self._facts_lock, keys)

    def pools_from(
        self, sequence: HashArray, model: str, start: int, registered: Collection[WorkerId], worker: WorkerId
    ) -> list[PoolRun]:
        """Return the pools that have a request's blocks from `start` on; see PooledIndex.pools_from."""
        with self._facts_lock:
            if not len(self._pooled):
                return []
            return self._pooled.pools_from(self._pooled.keys_of(sequence), model, start, registered, worker)

    def pool_shares(
        self, sequence: HashArray, model: str, scores: Sequence[PooledScore], registered: Collection[WorkerId]
    ) -> list[tuple[PoolShare, ...]]:
        """Return from which pools the blocks of each score come; see PooledIndex.shares."""
        with self._facts_lock:
            return self._pooled.shares(self._pooled.keys_of(sequence), model, scores, registered)

    def wants(self, moe: MoeSelector | None, *, pooled: bool) -> bool:
        """Whether a request with this query of labels can have supplementary matches."""
        return (pooled and len(self._pooled) > 0) or (moe is not None and bool(self._labels))

    def pooled_rows(self, model: str) -> PooledRows | None:
        """Return what limits the trust in answers that use a model's pooled blocks; None if there was never a row."""
        if not self._had_rows:
            return None
        ranks = self._ranks_with_rows.get(model, ())
        return PooledRows(self.pooled_over_capacity(), self._partitions_with_rows, ranks)

    def ranks_missing_labels(self) -> Set[RankId]:
        """Ranks of which labels were dropped. A live set: read it under the view's lock."""
        return self._labels.incomplete

    # -- what people read ----------------------------------------------------------------------------------------------

    def pools(self) -> dict[str, CxlPool]:
        """The registry's CXL pools by id."""
        with self._rows_lock:
            return dict(self._rows.pools)

    def pool_contents(self, pool: CxlPool) -> PoolContents:
        """What this router has of a pool."""
        n_blocks = 0 if pool.lost else self._blocks_by_pool[pool.pool_id, pool.epoch]
        return PoolContents(pool, n_blocks, self._speeds.of(pool.latency_class))

    def pools_of_workers(self) -> Mapping[WorkerId, list[str]]:
        """The registered pools that each worker is a member of, in order of id; pools that are lost are left out."""
        found = defaultdict[WorkerId, list[str]](list)
        for pool_id, pool in sorted(self.pools().items()):
            if not pool.lost:
                for worker in pool.members:
                    found[worker].append(pool_id)
        return found

    def pooled_blocks(self, registered: frozenset[WorkerId]) -> list[tuple[PooledBlock, frozenset[WorkerId]]]:
        """Every pooled block with the registered workers that can reach it, by sequence hash, owner and pool."""
        with self._rows_lock:
            blocks = [(block, self._rows.reachable(block, registered)) for block in self._rows.blocks()]
        return sorted(
            blocks, key=lambda pooled: (pooled[0].sequence, pooled[0].owner, pooled[0].metadata.pool_id or "")
        )

    def rows(self) -> tuple[list[tuple[SequenceHash, RankId, str, BlockRow]], dict[RankId, OwnerRow]]:
        """The rows of pooled blocks and of their owners, as the log has them."""
        with self._rows_lock:
            return list(self._rows.rows()), self._rows.owners()

    def labels(self) -> list[tuple[RankId, int, MoeLabels]]:
        """Every label with its rank and its block's sequence hash."""
        with self._facts_lock:
            return list(self._labels.members())

    def n_pooled(self) -> int:
        """Number of rows of the table of pooled blocks, in any state."""
        with self._rows_lock:
            return len(self._rows)

    def pooled_over_capacity(self) -> int:
        """Number of rows of pooled blocks, or of placements of such rows, that were dropped."""
        return self._rows.over_capacity + self._pooled.over_capacity

    def labelled(self) -> tuple[int, int]:
        """Number of run records with labels, and of labels that were dropped."""
        return len(self._labels), self._labels.over_capacity

    def _note_whether_any(self) -> None:
        self.has_any = len(self._pooled) > 0 or len(self._labels) > 0

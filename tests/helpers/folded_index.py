"""Events in, answers out, as an agent and a router do it together, without Kafka between them.

What lives here: the agents' store of runs, the rows that it writes, and the routers' fold of these rows
(`FoldedIndex`). What must not: which batch is new (holdings), expectations (reference_index).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Self, assert_never

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from streams.core.ids import EngineHash, Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier
from streams.core.index.interface import PrefixScores
from streams.core.index.tree_fold import TreeRunFold
from streams.core.reducer.run_store import Applied
from streams.tables.records import Change, decode_run
from streams.tables.run_decoding import decode_runs
from streams.tables.run_table import RunTable
from tests.helpers.invariants import check, table_members

_ALL = 1 << 30


class UnknownParent(Exception):
    """Stored blocks follow a parent that the rank does not hold."""

    def __init__(self, rank: RankId, parent: EngineHash | None) -> None:
        super().__init__(f"rank {rank} holds no block {parent}")
        self.rank = rank
        self.parent = parent


class FoldedIndex:
    """An index of engine events. The owner of a store of runs and of a fold.

    table: the store's rows, the last value of each key, without tombstones: what Kafka would keep.
    """

    def __init__(self) -> None:
        self.runs = RunTable()
        self.fold = TreeRunFold()
        self.table: dict[bytes, bytes] = {}
        self._epochs: dict[RankId, Epoch] = {}
        self._is_folded = True

    def store(self, rank: RankId, tier: Tier, parent: EngineHash | None, engine: HashArray, local: HashArray) -> None:
        """Store consecutive blocks of one chain. Raises UnknownParent; the index is then unchanged."""
        if self._apply(rank, BlocksStored(parent, engine, local, tier)).n_unknown_parents:
            raise UnknownParent(rank, parent)

    def remove(self, rank: RankId, tier: Tier, engine: HashArray) -> int:
        """Remove blocks; returns how many of the hashes the rank did not use in this tier."""
        return self._apply(rank, BlocksRemoved(engine, tier)).n_unknown_removals

    def clear(self, rank: RankId) -> None:
        """Remove all blocks of a rank, in all tiers."""
        if rank in self._epochs:
            self._apply(rank, AllBlocksCleared())

    def remove_rank(self, rank: RankId) -> None:
        """Remove a rank with all its blocks; an unknown rank changes nothing."""
        if rank in self._epochs:
            self._epochs[rank] = epoch = Epoch(Incarnation(self._epochs[rank].incarnation + 1), 0)
            self.runs.end(rank, epoch)
            self._is_folded = False
            self._fold_changes()  # the rows' tombstones come before that of the progress
            self.fold.forget_rank(rank)

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request. local: uint64[n] from the root. Raises InvalidRequest."""
        self._fold_changes()
        return self.fold.find_matches(local)

    def members(self) -> Iterator[tuple[RankId, Tier, EngineHash]]:
        """Iterate over all facts, with the ranks' own engine hashes, as the rows have them."""
        self._fold_changes()
        for key, value in self.table.items():
            run = decode_run(key, value)
            if run.epoch == self._epochs[run.key.rank]:
                for offset in run.held():
                    yield run.key.rank, run.key.tier, EngineHash(run.engine[offset])

    def blocks(self) -> set[tuple[RankId, Tier, SequenceHash]]:
        """All facts of the fold, by sequence hash."""
        self._fold_changes()
        return set(self.fold.members())

    def rebuilt(self, seed: int = 0) -> Self:
        """An index that reads the table in any order, as an agent and a router do when they start."""
        self._fold_changes()
        fresh = type(self)()
        rows = list(self.table.items())
        random.Random(seed).shuffle(rows)
        fresh.runs.begin_load(self._epochs)
        assert fresh.runs.load_records(rows) == (0, [])
        fresh.table, fresh._epochs = dict(self.table), dict(self._epochs)
        for rank in self.fold.ranks():
            fresh.fold.enter_epoch(rank, self._epochs[rank])
        fresh._fold_rows(rows)
        return fresh

    def check(self) -> None:
        """Raise AssertionError if an invariant of the store, of the fold, or between them is broken."""
        self._fold_changes()
        check(self.runs)
        check(self.fold)
        assert set(table_members(self.runs)) == set(self.fold.members())

    def __len__(self) -> int:
        self._fold_changes()
        return len(self.fold)

    def _apply(self, rank: RankId, event: KvEvent) -> Applied:
        epoch = self._epochs.get(rank)
        if epoch is None:
            epoch = Epoch(Incarnation(1), 0)
            self.runs.end(rank, epoch)
        applied = self.runs.apply(rank, (event,))
        self._epochs[rank] = epoch = Epoch(epoch.incarnation, epoch.generation + applied.n_clears)
        if applied.n_clears:
            self.fold.enter_epoch(rank, epoch)
        self._is_folded = False
        return applied

    def _fold_changes(self) -> None:
        """Fold what changed since the last call."""
        if self._is_folded:
            return
        self._is_folded = True
        rows = self.runs.take_changes(_ALL)
        for key, value in rows:
            self.table.pop(key, None)
            if value is not None:
                self.table[key] = value
        self._fold_rows(rows)

    def _fold_rows(self, rows: Sequence[Change]) -> None:
        columns, others = decode_runs(rows)
        assert not others
        assert self.fold.fold_records(columns) == []


def apply_event(index: FoldedIndex, rank: RankId, event: KvEvent) -> None:
    """Apply one event to an index. Raises UnknownParent."""
    match event:
        case BlocksStored():
            index.store(rank, event.tier, event.parent, event.engine, event.local)
        case BlocksRemoved():
            index.remove(rank, event.tier, event.engine)
        case AllBlocksCleared():
            index.clear(rank)
        case _:
            assert_never(event)

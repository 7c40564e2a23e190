"""The index of a run: an agent's store of runs and a router's tree in one process, without Kafka between them (pure).

What lives here: the way from an engine's event to an answer, as agents and routers have it. What must not: which batch
is new (core.reducer.ordering), and time.
"""

from __future__ import annotations

from streams.core.events import BlocksRemoved, BlocksStored, KvEvent
from streams.core.ids import EngineHash, Epoch, HashArray, Incarnation, RankId, Tier
from streams.core.index.interface import PrefixScores
from streams.core.index.tree_fold import TreeRunFold
from streams.errors import IndexFull
from streams.tables.run_decoding import decode_runs
from streams.tables.run_table import RunTable

#: Rows of removed ranks that end with one fold. They do not affect answers, so the rest may end with later folds.
_TOMBSTONES_MAX = 1000


class LabIndex:
    """The owner of the runs and of the tree. Events wait for the next query, which first applies and folds them.

    So the events of a rank between two queries are one batch, and the batches between two queries are one transaction.
    """

    def __init__(self) -> None:
        self._runs = RunTable()
        self._tree = TreeRunFold()
        self._epochs: dict[RankId, Epoch] = {}
        self._waiting: dict[RankId, list[KvEvent]] = {}
        self._is_folded = True

    def store(self, rank: RankId, tier: Tier, parent: EngineHash | None, engine: HashArray, local: HashArray) -> None:
        """Store consecutive blocks of one chain after `parent`, None at the root; without effect if it is not held.

        engine, local: uint64[n] each.
        """
        self._wait(rank, BlocksStored(parent, engine, local, tier))

    def remove(self, rank: RankId, tier: Tier, engine: HashArray) -> None:
        """Remove blocks. engine: uint64[n]."""
        self._wait(rank, BlocksRemoved(engine, tier))

    def clear(self, rank: RankId) -> None:
        """Remove all blocks of a rank: its engine restarts."""
        self._waiting.pop(rank, None)
        incarnation = Incarnation(self._begin(rank).incarnation + 1)
        self._epochs[rank] = epoch = Epoch(incarnation, 0)
        self._runs.end(rank, epoch)
        self._tree.enter_epoch(rank, epoch)
        self._is_folded = False

    def find_matches(self, local: HashArray) -> PrefixScores:
        """Score every rank for a request. local: uint64[n] from the root. Raises IndexFull, InvalidRequest."""
        if not self._is_folded:
            self._fold()
        return self._tree.find_matches(local)

    def _wait(self, rank: RankId, event: KvEvent) -> None:
        self._waiting.setdefault(rank, []).append(event)
        self._is_folded = False

    def _begin(self, rank: RankId) -> Epoch:
        epoch = self._epochs.get(rank)
        if epoch is None:
            self._epochs[rank] = epoch = Epoch(Incarnation(1), 0)
            self._runs.end(rank, epoch)
        return epoch

    def _fold(self) -> None:
        for rank, events in self._waiting.items():
            self._begin(rank)
            self._runs.apply(rank, events)
        self._waiting.clear()
        rows = self._runs.take_changes(_TOMBSTONES_MAX)
        columns, _ = decode_runs(rows)
        if self._tree.fold_records(columns):
            raise IndexFull("the index of this run is over capacity", remedy="use a smaller fleet or shorter traces")
        self._is_folded = True

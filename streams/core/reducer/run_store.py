"""What ranks hold, as runs: the agents' side of the index.

What lives here: what a store of runs promises (`RunStore`): to Holdings, and to the tests, which compare the compiled
store (tables.run_table) with one in pure Python. What must not: Kafka, bytes (tables.records), time, and which batch is
new (ordering).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from streams.core.events import RestatedRun
from streams.core.ids import Epoch, RankId
from streams.core.runs import Run

Events_contra = TypeVar("Events_contra", contravariant=True)
Change = TypeVar("Change")


@dataclass(frozen=True, slots=True)
class Applied:
    """Counts of a batch's events.

    n_unknown_parents: stores whose parent the rank does not hold. parents_since_clear: those of them after the batch's
    last clear, or all if it has none. n_unknown_removals: removed blocks that the rank does not hold.
    """

    n_clears: int = 0
    n_unknown_parents: int = 0
    parents_since_clear: int = 0
    n_unknown_removals: int = 0


class RunStore(Protocol[Events_contra, Change]):
    """The runs that the ranks of one partition hold. Events: those of one batch. Change: one row to write."""

    def load(self, epochs: Mapping[RankId, Epoch], runs: Iterable[Run]) -> int:
        """Start from runs that were read back; those of older epochs only need their tombstones.

        Returns the number of runs whose rank has no epoch, which are left out.
        """

    def end(self, rank: RankId, epoch: Epoch) -> None:
        """End everything that a rank holds, and begin this epoch.

        The tombstones may follow later, since readers drop older epochs when they read the progress.
        """

    def apply(self, rank: RankId, events: Events_contra) -> Applied:
        """Apply the events of one batch in order; a clear begins the next generation of the rank's epoch."""

    def restate(self, rank: RankId, runs: Iterable[RestatedRun]) -> None:
        """Add the blocks of restated runs, parents before children."""

    def n_blocks(self, rank: RankId) -> int:
        """Return the number of blocks that a rank holds, counting each tier separately."""

    def take_changes(self, tombstones_max: int) -> list[Change]:
        """Take what changed since the last call, with at most `tombstones_max` tombstones of ended epochs.

        Tombstones come before runs, including the tombstone of a key that is written again: every reader then sees a
        moved block leave its first run before it appears in the second.
        """

    @property
    def has_pending_tombstones(self) -> bool:
        """Whether rows of ended epochs still need their tombstones."""

"""Run records as values: what tests fold when no engine's events are involved.

What lives here: building the records of a chain of blocks. What must not: folding them.
"""

from __future__ import annotations

from collections.abc import Sequence

from streams.core.hashing import sequence_hashes
from streams.core.ids import Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier
from streams.core.index.tree_fold import TreeRunFold
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey

FIRST_EPOCH = Epoch(Incarnation(1), 0)


def runs_of(
    rank: RankId,
    local: HashArray,
    tier: Tier = Tier.DEVICE,
    parent: SequenceHash | None = None,
    epoch: Epoch = FIRST_EPOCH,
) -> list[Run]:
    """The records of a chain of blocks, all of which are held. local: uint64[n] after `parent`."""
    sequence = sequence_hashes(local, parent).tolist()
    start = 0 if parent is None else 1
    runs = []
    for first in range(0, len(sequence), RUN_BLOCKS_MAX):
        own = slice(first, first + RUN_BLOCKS_MAX)
        before = SequenceHash(sequence[first - 1]) if first else parent
        key = RunKey(rank, tier, SequenceHash(sequence[first]))
        n_blocks = len(sequence[own])
        present = (1 << n_blocks) - 1
        hashes = local[own].tolist()
        runs.append(Run(key, epoch, start + first, before, hashes, list(hashes), sequence[own], present))
    return runs


def fold_runs(fold: TreeRunFold, runs: Sequence[Run]) -> None:
    """Fold runs. Raises IndexFull."""
    fold.fold([run.key for run in runs], runs)


def end_runs(fold: TreeRunFold, runs: Sequence[Run]) -> None:
    """Fold the tombstones of runs."""
    fold.fold([run.key for run in runs], [None] * len(runs))

"""Query the prefix index as a library, in one process and without Kafka: how much of a prompt does each rank hold?

python examples/index_as_a_library.py

The index is the one of routers: it folds run records, in which agents keep what each rank holds.
"""

from __future__ import annotations

from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import DpRank, Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.tree_fold import TreeRunFold
from streams.core.runs import Run, RunKey

BLOCK_SIZE = 16


def run_of(rank: RankId, local: HashArray, present: int) -> Run:
    """The record of a rank that holds some of the first blocks of a prompt, at most 32; bit i is that of block i."""
    sequence = sequence_hashes(local).tolist()
    key = RunKey(rank, Tier.DEVICE, SequenceHash(sequence[0]))
    epoch = Epoch(Incarnation(1), 0)
    return Run(key, epoch, start=0, parent=None, local=local.tolist(), sequence=sequence, present=present)


def main() -> None:
    """Two ranks cache parts of one prompt, and one of them evicts a block in the middle."""
    tokens = list(range(8 * BLOCK_SIZE))
    local = local_hashes(tokens, BLOCK_SIZE)
    first, second = RankId(WorkerId(1), DpRank(0)), RankId(WorkerId(2), DpRank(0))

    index = TreeRunFold()
    stored = [run_of(first, local, 0b1111_1111), run_of(second, local[:5], 0b1_1111)]
    index.fold([run.key for run in stored], stored)
    print("both ranks store a prefix: ", index.find_matches(local).scores)

    evicted = run_of(first, local, 0b1111_1011)
    index.fold([evicted.key], [evicted])
    answer = index.find_matches(local)
    print("rank 1/0 evicts its block 3:", answer.scores)
    print("best rank:", answer.best_worker, "with", answer.max_score, "of", len(local), "blocks")


if __name__ == "__main__":
    main()

"""Query the prefix index as a library, in one process and without Kafka: how much of a prompt does each rank hold?

python examples/index_as_a_library.py
"""

from __future__ import annotations

import numpy as np

from streams.core.hashing import local_hashes
from streams.core.ids import DpRank, RankId, Tier, WorkerId
from streams.core.index.run_tree import RunTreeIndex

BLOCK_SIZE = 16


def main() -> None:
    """Two ranks cache parts of one prompt, and one of them evicts a block in the middle."""
    tokens = list(range(8 * BLOCK_SIZE))
    local = local_hashes(tokens, BLOCK_SIZE)
    engine_hashes = np.arange(1, len(local) + 1, dtype=np.uint64)
    first, second = RankId(WorkerId(1), DpRank(0)), RankId(WorkerId(2), DpRank(0))

    index = RunTreeIndex()
    index.store(first, Tier.DEVICE, None, engine_hashes, local)
    index.store(second, Tier.DEVICE, None, engine_hashes[:5], local[:5])
    print("both ranks store a prefix: ", index.find_matches(local).scores)

    index.remove(first, Tier.DEVICE, engine_hashes[2:3])
    answer = index.find_matches(local)
    print("rank 1/0 evicts its block 3:", answer.scores)
    print("best rank:", answer.best_worker, "with", answer.max_score, "of", len(local), "blocks")


if __name__ == "__main__":
    main()

"""The runs by which a rank holds a chain of blocks, for measurements and tests that fold records themselves (pure).

What lives here: cutting a chain into runs as an agent writes them, with sequence hashes as the engine's names. What
must not: engines that cache and evict (block_cache), and records (tables.records).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from streams.core.events import MoeLabels
from streams.core.hashing import sequence_hashes
from streams.core.ids import Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey

#: The first incarnation of an engine, before any restatement.
FIRST_EPOCH = Epoch(Incarnation(1), 0)


def runs_of_chain(
    rank: RankId,
    local: HashArray,
    *,
    last: int | None = None,
    epoch: Epoch = FIRST_EPOCH,
    tier: Tier = Tier.DEVICE,
    absent: Collection[int] = (),
    labels: MoeLabels | None = None,
) -> Iterator[Run]:
    """Yield the runs of a chain's blocks before `last`, which is the whole chain by default.

    local: uint64[n], the chain's local hashes. absent: positions of blocks that the rank does not hold. labels: of
    every block.
    """
    sequence, blocks = sequence_hashes(local).tolist(), local.tolist()
    end = len(blocks) if last is None else last
    for start in range(0, end, RUN_BLOCKS_MAX):
        stop = min(start + RUN_BLOCKS_MAX, end)
        yield Run(
            key=RunKey(rank, tier, SequenceHash(sequence[start])),
            epoch=epoch,
            start=start,
            parent=SequenceHash(sequence[start - 1]) if start else None,
            local=blocks[start:stop],
            engine=sequence[start:stop],
            sequence=sequence[start:stop],
            present=sum(1 << (position - start) for position in range(start, stop) if position not in absent),
            moe={} if labels is None else dict.fromkeys(range(stop - start), labels),
        )

"""Run records of chains, for tests that fold them."""

from __future__ import annotations

from streams.core.events import MoeLabels
from streams.core.hashing import sequence_hashes
from streams.core.ids import Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier
from streams.core.runs import Run, RunKey

FIRST = Epoch(Incarnation(1), 0)


def run_of(
    local: HashArray,
    of: RankId,
    first: int,
    last: int,
    *,
    present: int = -1,
    epoch: Epoch = FIRST,
    tier: Tier = Tier.DEVICE,
    moe: dict[int, MoeLabels] | None = None,
) -> Run:
    """The record of blocks `first` to `last` - 1 of a chain."""
    sequence = sequence_hashes(local).tolist()
    return Run(
        key=RunKey(of, tier, SequenceHash(sequence[first])),
        epoch=epoch,
        start=first,
        parent=SequenceHash(sequence[first - 1]) if first else None,
        local=local[first:last].tolist(),
        engine=sequence[first:last],
        sequence=sequence[first:last],
        present=present & ((1 << (last - first)) - 1),
        moe=moe or {},
    )

"""Ids and hashes, each a type of its own, so that a local hash is never mistaken for a sequence hash.

What lives here: the NewTypes, `RankId`, tiers. What must not: anything that computes.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

WorkerId = NewType("WorkerId", int)  # u64
DpRank = NewType("DpRank", int)  # u32
EngineHash = NewType("EngineHash", int)  # u64, opaque, meaningful only within one rank
LocalHash = NewType("LocalHash", int)  # u64, hash of one block's own tokens
SequenceHash = NewType("SequenceHash", int)  # u64, hash of the whole prefix that ends in this block
Incarnation = NewType("Incarnation", int)  # u64, microseconds by convention; only its order matters

U64_MASK = (1 << 64) - 1
U32_MAX = (1 << 32) - 1

#: uint64[n]; hashes of n consecutive blocks.
HashArray = npt.NDArray[np.uint64]

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class RankId(NamedTuple):
    """One data-parallel rank of one worker. A rank holds blocks, and requests are sent to ranks."""

    worker_id: WorkerId
    dp_rank: DpRank

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.dp_rank}"


class Epoch(NamedTuple):
    """A rank's incarnation, and the number of clears, removals and restatements in it.

    A greater epoch ends everything that the rank held in an older one.
    """

    incarnation: Incarnation
    generation: int


class Tier(enum.IntEnum):
    """Where a copy of a block is stored, fastest first; the numbers are stored on Kafka and never change."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3

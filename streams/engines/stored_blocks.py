"""Blocks that carry their own attributes, and the events that store them (pure).

What lives here: one block as an embedding engine describes it, and splitting a chain of them into events. What must
not: publishing (publisher).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import BlocksStored, MoeLabels
from streams.core.hashing import Tokens, local_hashes
from streams.core.ids import U64_MASK, EngineHash, Tier
from streams.errors import InvalidRequest


@dataclass(slots=True)
class StoredBlock:
    """One full block.

    block_hash: the engine's own. token_ids: of this block. cxl_metadata: where it is in CXL memory. moe: its labels.
    All attributes may be set after the block was made.
    """

    block_hash: int
    token_ids: Tokens
    tier: Tier = Tier.DEVICE
    cxl_metadata: CxlMemoryMetadata | None = None
    moe: MoeLabels | None = None


def store_events(
    blocks: Sequence[StoredBlock], parent: int | None, block_size: int, seed: int, first_seed: int | None
) -> list[BlocksStored]:
    """Return the stores of consecutive blocks: one for each stretch of blocks with equal attributes.

    parent: the hash of the block before the first one, None at the root. Raises InvalidRequest for a block that is not
    full.
    """
    for block in blocks:
        if len(block.token_ids) != block_size:
            raise InvalidRequest(f"a block has {len(block.token_ids)} tokens; a full one has {block_size}")
    if not blocks:
        return []
    tokens = np.concatenate([np.asarray(block.token_ids, dtype=np.uint32) for block in blocks])
    local = local_hashes(tokens, block_size, seed, first_seed=first_seed)
    names = [block.block_hash & U64_MASK for block in blocks]
    events: list[BlocksStored] = []
    attributes = [(block.tier, block.moe, block.cxl_metadata) for block in blocks]
    first = 0
    for (tier, moe, cxl), same in groupby(attributes):
        end = first + len(list(same))
        before = parent if first == 0 else names[first - 1]
        parent_hash = None if before is None else EngineHash(before & U64_MASK)
        engine = np.array(names[first:end], dtype=np.uint64)
        events.append(BlocksStored(parent_hash, engine, local[first:end], tier, moe, cxl))
        first = end
    return events

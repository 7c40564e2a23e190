"""What owners tell of their blocks in CXL memory: values of `cxl-events` and of the registry's pools.

What lives here: dataclasses and their limits. What must not: bytes (records), what a transition does (states,
pooled_blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.ids import U64_MASK, EngineHash, HashArray, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.states import RULES, CxlMemoryState
from streams.errors import InvalidEvent, InvalidRequest

#: Blocks of one record: each becomes a row of 100 to 200 bytes, written in the transaction that takes the record in.
TRANSITION_BLOCKS_MAX = 4096

#: Characters of a pool's id and of its latency class: they stand in keys and rows.
POOL_NAME_CHARS_MAX = 128

#: Hosts that one pool has, and workers that one block names; the largest switches announced connect some hundreds.
POOL_MEMBERS_MAX = 4096


#: The greatest epoch that a pool may be given: exact in every JSON reader, and room above it to be lost as often again.
POOL_EPOCH_GIVEN_MAX = (1 << 52) - 1

#: The greatest that it can come to by being lost.
POOL_EPOCH_MAX = (1 << 53) - 1


class BlockAddress(NamedTuple):
    """Where a block lies on its chain, in words that are the same on every worker. parent: None at the root."""

    sequence: SequenceHash
    parent: SequenceHash | None
    position: int


@dataclass(frozen=True, slots=True)
class CxlStateChanged:
    """What an engine says: blocks, by its own hashes, enter a state.

    engine: uint64[n]. accessible_workers: who can reach them, for in_transit; none named are all members of the pool.
    """

    event_id: int
    engine: HashArray
    state: CxlMemoryState
    pool_id: str | None = None
    accessible_workers: tuple[WorkerId, ...] = ()


def state_changed(
    event_id: int,
    block_hashes: Sequence[int],
    new_state: str,
    pool_id: str | None,
    accessible_workers: Sequence[WorkerId] | None,
) -> CxlStateChanged:
    """What a caller tells, checked; hashes and event id may be signed.

    Raises InvalidEvent where no state has that name or in_transit names no pool, InvalidRequest for a pool's id that is
    none or too many workers.
    """
    try:
        state = CxlMemoryState(new_state)
    except ValueError as exc:
        raise InvalidEvent(f"{new_state!r} is no state of CXL memory; one of {', '.join(CxlMemoryState)}") from exc
    engine = np.array([value & U64_MASK for value in block_hashes], dtype=np.uint64)
    changed = CxlStateChanged(event_id & U64_MASK, engine, state, pool_id, tuple(accessible_workers or ()))
    check_change(changed)
    return changed


def check_change(changed: CxlStateChanged) -> None:
    """Raise InvalidEvent or InvalidRequest for what is illegal whatever state a block is in."""
    if changed.pool_id is not None:
        check_pool_id(changed.pool_id)
    elif RULES[changed.state].needs_pool:
        raise InvalidEvent(f"{changed.state} names no pool")
    if len(changed.accessible_workers) > POOL_MEMBERS_MAX:
        raise InvalidEvent(f"{len(changed.accessible_workers)} accessible workers; at most {POOL_MEMBERS_MAX}")


@dataclass(frozen=True, slots=True)
class AddressedBlocks:
    """Blocks of one transition, column by column.

    sequence, parents, engine: uint64[n]; positions: uint32[n]. parents of blocks at position 0 say nothing. engine: the
    owner's own names, for whoever must find his blocks again.
    """

    sequence: HashArray
    parents: HashArray
    positions: npt.NDArray[np.uint32]
    engine: HashArray

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, part: slice) -> AddressedBlocks:
        return AddressedBlocks(self.sequence[part], self.parents[part], self.positions[part], self.engine[part])

    def rows(self) -> list[tuple[BlockAddress, EngineHash]]:
        """One block after the other."""
        return [
            (BlockAddress(SequenceHash(block), SequenceHash(parent) if position else None, position), EngineHash(name))
            for block, parent, position, name in zip(
                self.sequence.tolist(),
                self.parents.tolist(),
                self.positions.tolist(),
                self.engine.tolist(),
                strict=True,
            )
        ]


def addressed(blocks: list[tuple[BlockAddress, EngineHash]]) -> AddressedBlocks:
    """Columns of blocks."""
    return AddressedBlocks(
        np.array([address.sequence for address, _ in blocks], dtype=np.uint64),
        np.array([address.parent or 0 for address, _ in blocks], dtype=np.uint64),
        np.array([address.position for address, _ in blocks], dtype=np.uint32),
        np.array([engine for _, engine in blocks], dtype=np.uint64),
    )


@dataclass(frozen=True, slots=True)
class CxlTransition:
    """One record of `cxl-events`: blocks of one rank enter a state.

    follows: the last batch of this life on `kv-events` that it comes behind, BEFORE_FIRST for none. event_id: the
    engine's own, told to people. pool_epoch: of the pool as its owner knew it, 0 where he knew none.
    """

    rank: RankId
    model: str
    incarnation: Incarnation
    follows: int
    event_id: int
    state: CxlMemoryState
    pool_id: str | None
    pool_epoch: int
    accessible_workers: tuple[WorkerId, ...]
    emitted_at_ms: int
    blocks: AddressedBlocks


@dataclass(frozen=True, slots=True)
class CxlPool:
    """A pool as the registry knows it.

    epoch: grows when what the pool held is lost; blocks of older epochs count for nothing. lost: it is not there at
    all. members: workers whose hosts reach it. latency_class, capacity_blocks: for people to see, nothing is decided by
    them; capacity_blocks is None where unknown.
    """

    pool_id: str
    latency_class: str = "default"
    capacity_blocks: int | None = None
    members: tuple[WorkerId, ...] = ()
    epoch: int = 0
    lost: bool = False
    registered_at_ms: int = 0

    def __post_init__(self) -> None:
        check_pool_id(self.pool_id)
        if not 1 <= len(self.latency_class) <= POOL_NAME_CHARS_MAX or not self.latency_class.isprintable():
            raise InvalidRequest(
                f"pool {self.pool_id}: latency_class has 1 to {POOL_NAME_CHARS_MAX} printable characters"
            )
        if len(self.members) > POOL_MEMBERS_MAX:
            raise InvalidRequest(f"pool {self.pool_id}: {len(self.members)} members; at most {POOL_MEMBERS_MAX}")
        if not 0 <= self.epoch <= POOL_EPOCH_MAX or (self.capacity_blocks is not None and self.capacity_blocks < 1):
            raise InvalidRequest(f"pool {self.pool_id}: epoch {self.epoch}, {self.capacity_blocks} blocks")


def newest_pool(known: CxlPool | None, arriving: CxlPool) -> CxlPool:
    """Of two records of a pool, in order of the log, the one that counts: of the greater epoch, of equal ones the lost.

    Whoever wrote the other had not read this one yet, and would bring back what was lost. Of equals the later counts.
    """
    if known is not None and (arriving.epoch, arriving.lost) < (known.epoch, known.lost):
        return known
    return arriving


def check_pool_id(pool_id: str) -> None:
    """Raise InvalidRequest for what is no pool's id: a name of printable characters that a path of a URL can have.

    What is not printable is a newline, NUL, half of a surrogate pair, or a space other than the plain one. `.` and `..`
    are taken out of a path before it is sent.
    """
    if not isinstance(pool_id, str):  # as an engine's message may have it
        raise InvalidRequest(f"a pool's id is a text, not {pool_id!r}")
    if not 1 <= len(pool_id) <= POOL_NAME_CHARS_MAX:
        raise InvalidRequest(f"a pool's id has 1 to {POOL_NAME_CHARS_MAX} characters, not {len(pool_id)}")
    if not pool_id.isprintable() or pool_id in (".", ".."):
        raise InvalidRequest(f"a pool's id has printable characters, and is neither . nor .., not {pool_id!a}")

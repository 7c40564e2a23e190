"""What owners report about their blocks in CXL memory: the values of `cxl-events` and of the registry's pools.

What lives here: dataclasses and their limits. What must not: bytes (records), what a transition does (states,
tables.pooled_block_table).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.cxl_memory import CxlMemoryState, pool_name, state_of
from streams.core.events import BEFORE_FIRST
from streams.core.ids import U64_MASK, EngineHash, HashArray, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.states import RULES
from streams.errors import InvalidEvent, InvalidRequest

#: Blocks per record. Each becomes a row of 100 to 200 bytes, written in the transaction that applies the record.
TRANSITION_BLOCKS_MAX = 4096

#: Blocks that one row stands for, because they can be read only together. LMCache's chunks have 16 with default
#: settings.
SPAN_MAX = 65_536

#: Bytes of an owner's note on one block.
NOTE_BYTES_MAX = 256

#: `follows` of a transition whose owner has no `kv-events`, so that it waits for no batch.
STANDS_ALONE = BEFORE_FIRST - 1

#: Characters of a pool's id and of its latency class, both of which are part of keys and rows.
POOL_NAME_CHARS_MAX = 128

#: Members of one pool, and accessible workers of one block. The largest CXL switches announced connect a few hundred
#: hosts.
POOL_MEMBERS_MAX = 4096

#: The greatest epoch that a caller can set. Every JSON reader represents it exactly, and it leaves as many epochs again
#: for losses of the pool.
POOL_EPOCH_GIVEN_MAX = (1 << 52) - 1

#: The greatest epoch that a pool can reach by being lost.
POOL_EPOCH_MAX = (1 << 53) - 1


class BlockAddress(NamedTuple):
    """A block's position in its chain, in terms that are the same on every worker. parent: None at the root."""

    sequence: SequenceHash
    parent: SequenceHash | None
    position: int


@dataclass(frozen=True, slots=True)
class CxlStateChanged:
    """What an engine reports: blocks, named by its own hashes, enter a state.

    engine: uint64[n]. accessible_workers: the workers that can read the blocks, for in_transit; if empty, all members
    of the pool.
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
    pool_id: str | int | None,
    accessible_workers: Sequence[WorkerId] | None,
) -> CxlStateChanged:
    """Check a caller's arguments and build the event; hashes and event id may be signed, and the pool a number.

    Raises InvalidEvent for an unknown state, too many workers, or in_transit without a pool, and InvalidRequest for an
    invalid pool id.
    """
    engine = np.array([value & U64_MASK for value in block_hashes], dtype=np.uint64)
    state, workers = state_of(new_state), tuple(accessible_workers or ())
    changed = CxlStateChanged(event_id & U64_MASK, engine, state, pool_name(pool_id), workers)
    check_change(changed)
    return changed


def check_change(changed: CxlStateChanged) -> None:
    """Raise InvalidEvent or InvalidRequest for a change that is illegal for a block in any state."""
    if changed.pool_id is not None:
        check_pool_id(changed.pool_id)
    elif RULES[changed.state].needs_pool:
        raise InvalidEvent(f"{changed.state} must name a pool")
    if len(changed.accessible_workers) > POOL_MEMBERS_MAX:
        raise InvalidEvent(f"{len(changed.accessible_workers)} accessible workers; at most {POOL_MEMBERS_MAX}")


@dataclass(frozen=True, slots=True)
class AddressedBlocks:
    """The blocks of one transition, as columns.

    sequence, parents, engine: uint64[n]; positions: uint32[n]. The parent of a block at position 0 has no meaning.
    engine: the owner's own names, by which a restarted bridge finds the blocks of its engine again. notes: what else
    the owner needs for that, for each block or for none; it has no meaning for anybody else.
    """

    sequence: HashArray
    parents: HashArray
    positions: npt.NDArray[np.uint32]
    engine: HashArray
    notes: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, part: slice) -> AddressedBlocks:
        return AddressedBlocks(
            self.sequence[part], self.parents[part], self.positions[part], self.engine[part], self.notes[part]
        )

    def rows(self) -> list[tuple[BlockAddress, EngineHash]]:
        """Return one entry per block."""
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
    """Turn one entry per block into columns."""
    return AddressedBlocks(
        np.array([address.sequence for address, _ in blocks], dtype=np.uint64),
        np.array([address.parent or 0 for address, _ in blocks], dtype=np.uint64),
        np.array([address.position for address, _ in blocks], dtype=np.uint32),
        np.array([engine for _, engine in blocks], dtype=np.uint64),
    )


@dataclass(frozen=True, slots=True)
class CxlTransition:
    """One record of `cxl-events`: blocks of one rank enter a state.

    follows: the number of the last batch on `kv-events`, within the same incarnation, that the engine published before
    this transition; BEFORE_FIRST for none, STANDS_ALONE if its owner is no engine. event_id: the engine's own number,
    shown to people. pool_epoch: the pool's epoch as its owner knew it, 0 if it knew none. span: how many blocks each of
    `blocks` stands for, itself and those before it, because they can be read only together.
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
    span: int = 1


@dataclass(frozen=True, slots=True)
class CxlPool:
    """A pool as the registry has it.

    epoch: grows when the pool loses its contents; blocks of older epochs are ignored. lost: the pool does not exist at
    the moment. members: workers whose hosts can address it. latency_class: of pools from which blocks are loaded at
    the same speed. capacity_blocks: shown to people, and used for no decision; None if unknown.
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
                f"pool {self.pool_id}: latency_class must have 1 to {POOL_NAME_CHARS_MAX} printable characters"
            )
        if len(self.members) > POOL_MEMBERS_MAX:
            raise InvalidRequest(f"pool {self.pool_id}: {len(self.members)} members; at most {POOL_MEMBERS_MAX}")
        if not 0 <= self.epoch <= POOL_EPOCH_MAX or (self.capacity_blocks is not None and self.capacity_blocks < 1):
            raise InvalidRequest(
                f"pool {self.pool_id}: epoch {self.epoch} or capacity of {self.capacity_blocks} blocks is out of range"
            )


def newest_pool(known: CxlPool | None, arriving: CxlPool) -> CxlPool:
    """Return which of two records of a pool is in effect; `arriving` is later in the log.

    The greater epoch wins; within an epoch the record that marks the pool as lost wins, and otherwise the later one.
    If `arriving` loses, its writer had not read the other record, and taking it would bring back lost contents.
    """
    if known is not None and (arriving.epoch, arriving.lost) < (known.epoch, known.lost):
        return known
    return arriving


def check_pool_id(pool_id: str) -> None:
    """Raise InvalidRequest unless this is a valid pool id: printable characters that fit in the path of a URL.

    Line breaks, NUL, halves of surrogate pairs and all spaces except U+0020 are not printable. `.` and `..` are removed
    from a path before it is sent.
    """
    if not isinstance(pool_id, str):  # an engine's message can contain any type
        raise InvalidRequest(f"a pool id must be a string, not {pool_id!r}")
    if not 1 <= len(pool_id) <= POOL_NAME_CHARS_MAX:
        raise InvalidRequest(f"a pool id must have 1 to {POOL_NAME_CHARS_MAX} characters, not {len(pool_id)}")
    if not pool_id.isprintable() or pool_id in (".", ".."):
        raise InvalidRequest(f"a pool id must consist of printable characters and be neither . nor .., not {pool_id!a}")

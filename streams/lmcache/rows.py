"""Chunks of LMCache as transitions of `cxl-events`, and as rows of the table of pooled blocks (pure).

What lives here: both directions, so that the table is the memory of a bridge that takes over a feed. What must not:
which chunks are published (pools), and reading the table (recovery).

A row is a chunk: it is under the hash of the chunk's last block, and its span is the number of its blocks. Its owner's
name is the beginning of LMCache's hash of the chunk. The note has what the row itself lacks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import EngineHash, Incarnation, RankId, SequenceHash
from streams.cxl.events import (
    STANDS_ALONE,
    AddressedBlocks,
    BlockAddress,
    CxlTransition,
)
from streams.lmcache.chunk_names import ChunkAddress, NameSpace
from streams.lmcache.pools import Change, Chunk, Owner, Pool, parse_pool

#: Length of the hash, world size, time of the last store in s, seed of the name space.
_NOTE = struct.Struct("<BBIQ")

_NAME_BYTES = 8

#: Chunks in one record. With its note, the largest takes 140 bytes, and a record may have 256 kB.
RECORD_CHUNKS_MAX = 1024


def transitions(
    changes: Iterable[Change], incarnation: Incarnation, epoch_of: Callable[[Pool], int], emitted_at_ms: int
) -> Iterator[CxlTransition]:
    """Return the records of changes, in their order."""
    for change in changes:
        rank, pool = change.owner.rank, change.owner.pool
        pool_id, epoch = pool.id, epoch_of(pool)
        by_span: dict[int, list[Chunk]] = {}
        for chunk in change.chunks:
            if chunk.address is not None:
                by_span.setdefault(chunk.address.n_blocks, []).append(chunk)
        for span, chunks in by_span.items():
            for first in range(0, len(chunks), RECORD_CHUNKS_MAX):
                blocks = _blocks(chunks[first : first + RECORD_CHUNKS_MAX], change)
                for state in change.states:
                    yield CxlTransition(
                        rank=rank,
                        model=change.owner.model,
                        incarnation=incarnation,
                        follows=STANDS_ALONE,
                        event_id=0,
                        state=state,
                        pool_id=pool_id,
                        pool_epoch=epoch,
                        accessible_workers=(),
                        emitted_at_ms=emitted_at_ms,
                        blocks=blocks,
                        span=span,
                    )


def _blocks(chunks: list[Chunk], change: Change) -> AddressedBlocks:
    addresses = [chunk.address for chunk in chunks if chunk.address is not None]
    has_notes = CxlMemoryState.EVICTED not in change.states
    return AddressedBlocks(
        np.array([address.sequence for address in addresses], dtype=np.uint64),
        np.array([address.parent or 0 for address in addresses], dtype=np.uint64),
        np.array([address.position for address in addresses], dtype=np.uint32),
        np.frombuffer(b"".join([_name(chunk) for chunk in chunks]), dtype="<u8"),
        tuple(_note(chunk, change.owner.world_size) for chunk in chunks) if has_notes else (),
    )


def _name(chunk: Chunk) -> bytes:
    return chunk.key[0][:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _note(chunk: Chunk, world_size: int) -> bytes:
    chunk_hash, space = chunk.key
    head = _NOTE.pack(len(chunk_hash), world_size, chunk.stored_s, space.first_seed)
    return head + chunk_hash + chunk.ranks.to_bytes(-(-world_size // 8), "little")


def chunk_of(
    rank: RankId,
    pool_id: str | None,
    model: str,
    state: CxlMemoryState,
    block: tuple[BlockAddress, EngineHash],
    note: bytes,
    span: int,
    block_size: int,
) -> tuple[Owner, Chunk] | None:
    """Return the chunk that a row or a block of a transition stands for; None for what is not one of ours."""
    pool = None if pool_id is None else parse_pool(pool_id)
    if pool is None or len(note) < _NOTE.size:
        return None
    n_hash_bytes, world_size, stored_s, first_seed = _NOTE.unpack_from(note)
    chunk_hash, ranks = note[_NOTE.size :][:n_hash_bytes], note[_NOTE.size + n_hash_bytes :]
    owner = Owner(pool, model, world_size)
    if owner.rank != rank or len(chunk_hash) != n_hash_bytes or len(ranks) != -(-world_size // 8):
        return None
    address, held = block[0], int.from_bytes(ranks, "little")
    chunk = Chunk(
        (chunk_hash, NameSpace(first_seed, block_size)),
        held,
        stored_s,
        ChunkAddress(SequenceHash(address.sequence), address.parent, address.position, span),
        state,
        held,
    )
    return owner, chunk

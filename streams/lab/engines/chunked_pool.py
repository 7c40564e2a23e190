"""A simulated pool that stores whole chunks, as LMCache does, and what it reports of them (pure).

What lives here: which blocks form a chunk, what LMCache calls it, and the records of LMCache's Kafka topic. What must
not: how much a pool holds and how long transfers take (pool), and Kafka.

Engines offload blocks and ask for blocks. LMCache stores and loads chunks of a prompt, which begin at multiples of
their length, and finds a chunk only if it has all those before it. Here, a chunk has the key of its last block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import orjson

from streams.core.cxl_memory import CxlMemoryState
from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.kernels.blake3 import SCRATCH_WORDS, find_parent
from streams.errors import SettingsError
from streams.lab.engines.block_cache import require
from streams.lab.engines.pool import Offload, PoolConfig, PoolEvent, PoolLoad, PoolStats, SharedPool
from streams.lmcache.wire import CHUNK_TOKENS, NO_OFFSET, EventType, Tier

#: Blocks that are kept until their chunks are complete; without the oldest ones, chunks are not stored.
BLOCKS_MAX = 1 << 16
#: Chunks that are kept although the pool does not have them, since others may follow them. Each takes 1.5 kB.
CHUNKS_MAX = 1 << 14
#: Chunks per batch: 2 kB each, and LMCache's producer sends records of up to 1 MB.
BATCH_CHUNKS_MAX = 256

#: The engines' blocks are the pool's own.
_OWNER = "lmcache"
#: LMCache's hash before the first chunk (0.5.6, `TokenHasher.none_hash`).
_ROOT = bytes.fromhex("7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b")
#: No message is known that has this digest.
_NO_DIGEST = np.frombuffer(bytes(32), np.uint8)
#: As ObjectKey.ComputeKVRank packs the only rank of a world of one: world size, rank, and both of the host.
_ONLY_RANK = 1 << 24 | 1 << 8


@dataclass(frozen=True, slots=True)
class LmcacheReports:
    """What a pool says of itself in its records. chunk_tokens: tokens per chunk."""

    instance: str
    backend: str = "devdax"
    chunk_tokens: int = CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class _Block:
    before: int | None
    position: int
    tokens: bytes


@dataclass(slots=True)
class _Chunk:
    digest: bytes
    before: int | None
    offset: int
    tokens: bytes
    is_held: bool = False


class ChunkedPool:
    """A pool of chunks. incarnation: the start of its process in seconds, which is greater after each restart."""

    def __init__(self, config: PoolConfig, reports: LmcacheReports, model: str, incarnation: int) -> None:
        if reports.chunk_tokens % config.block_size:
            raise SettingsError(
                f"a chunk of {reports.chunk_tokens} tokens is no whole number of blocks of {config.block_size}"
            )
        self._chunk_blocks = reports.chunk_tokens // config.block_size
        if config.capacity_blocks < self._chunk_blocks or config.link != "shared":
            raise SettingsError("a pool of chunks has room for at least one, and one link for all engines")
        capacity = config.capacity_blocks // self._chunk_blocks
        self._pool = SharedPool(replace(config, block_size=reports.chunk_tokens, capacity_blocks=capacity))
        self._block_size = config.block_size
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # the oldest first
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()  # the oldest first
        self._chunks_max = capacity + CHUNKS_MAX
        self._scratch = np.empty(SCRATCH_WORDS, dtype=np.int64)
        self._reports, self._model, self._incarnation = reports, model, incarnation
        self._n_batches = 0
        self._chunk_bytes = reports.chunk_tokens * config.bytes_per_token
        self._records = [self._record(EventType.CONFIG, [], capacity_bytes=capacity * self._chunk_bytes)]

    def offload(self, at_ms: float, offload: Offload) -> None:
        """Take blocks that an engine offloads, and write the chunks that are complete with them."""
        complete: list[int] = []
        before, size = offload.before, 4 * self._block_size
        for index, key in enumerate(offload.keys):
            position = offload.start + index
            self._blocks[key] = _Block(before, position, offload.tokens[index * size : (index + 1) * size])
            self._blocks.move_to_end(key)
            if (position + 1) % self._chunk_blocks == 0 and (key in self._chunks or self._form(key)):
                complete.append(key)
            before = key
        while len(self._blocks) > BLOCKS_MAX:
            self._blocks.popitem(last=False)
        if complete:
            self._pool.offload(at_ms, _OWNER, complete)

    def load(self, at_ms: float, keys: Sequence[int], engine: str, *, in_place: bool = False) -> PoolLoad:
        """Load leading blocks, of which the last one ends a chunk. As SharedPool.load."""
        first = self._blocks.get(keys[0]) if keys else None
        skipped = 0 if first is None else first.position % self._chunk_blocks
        ends = [] if first is None else keys[self._chunk_blocks - 1 - skipped :: self._chunk_blocks]
        earlier = self._found_before(ends[0]) if ends else None
        if earlier is None:
            return PoolLoad(0, at_ms)
        self._pool.touch(earlier)
        load = self._pool.load(at_ms, ends, engine, in_place=in_place)
        return PoolLoad(max(load.n_blocks * self._chunk_blocks - skipped, 0), load.end_ms)

    def leave(self, at_ms: float, engine: str) -> None:
        """An engine has exited. Its blocks stay, and so do its unfinished writes: what LMCache has read is its own."""

    def advance(self, to_ms: float) -> list[PoolEvent]:
        """Bring the pool to this time. It has no events for engines, but records."""
        for event in self._pool.advance(to_ms):
            arrived = event.state is CxlMemoryState.CXL_POOLED
            if not arrived and event.state is not CxlMemoryState.EVICTED:
                continue  # refused
            changed = [chunk for key in event.keys if (chunk := self._chunks[key]).is_held is not arrived]
            for chunk in changed:
                chunk.is_held = arrived
            for at in range(0, len(changed), BATCH_CHUNKS_MAX):
                kind = EventType.STORE if arrived else EventType.DELETE
                self._records.append(self._record(kind, changed[at : at + BATCH_CHUNKS_MAX]))
        return []

    def take_records(self) -> list[bytes]:
        """Return the records of what has changed until the last `advance`, in order, and forget them."""
        records, self._records = self._records, []
        return records

    def next_event_ms(self) -> float | None:
        """As SharedPool.next_event_ms."""
        return self._pool.next_event_ms()

    def stats(self) -> PoolStats:
        """As SharedPool.stats, in chunks."""
        return self._pool.stats()

    def check(self) -> None:
        """As SharedPool.check; a chunk that is held has arrived, unless the caller has not advanced since."""
        self._pool.check()
        pooled = set(self._pool.pooled())
        held = {key for key, chunk in self._chunks.items() if chunk.is_held}
        require(held == pooled, "what was reported differs from what has arrived")

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _form(self, last: int) -> bool:
        """Note the chunk that ends with a block, if its blocks and the chunk before it are known."""
        blocks: list[_Block] = []
        key: int | None = last
        while len(blocks) < self._chunk_blocks:
            block = None if key is None else self._blocks.get(key)
            if block is None:
                return False
            blocks.append(block)
            key = block.before
        tokens = b"".join(block.tokens for block in reversed(blocks))
        words = np.frombuffer(tokens, dtype="<u4")
        if key is None:
            # Hashes of adapters and of cache salts differ from those of the tokens alone, and records have neither.
            if int(sequence_hashes(local_hashes(words, self._block_size))[-1]) != last:
                return False
            before = _ROOT
        else:
            parent = self._chunks.get(key)
            if parent is None:
                return False
            before = parent.digest
        # The search computes the digest, and leaves it in its scratch space.
        find_parent(np.frombuffer(before, np.uint8), words.copy(), _NO_DIGEST, self._scratch)
        digest = self._scratch[:8].astype("<u4").tobytes()
        self._chunks[last] = _Chunk(digest, key, blocks[-1].position * self._block_size, tokens)
        while len(self._chunks) > self._chunks_max:
            oldest, chunk = self._chunks.popitem(last=False)
            if chunk.is_held:  # its deletion has to be reported once
                self._chunks[oldest] = chunk
        return True

    def _found_before(self, key: int) -> list[int] | None:
        """Return the chunks before one, the first one first, or None if the pool lacks one of them or that one."""
        found: list[int] = []
        following: int | None = key
        while following is not None:
            chunk = self._chunks.get(following)
            if chunk is None or not chunk.is_held:
                return None
            found.append(following)
            following = chunk.before
        return found[:0:-1]

    def _record(self, kind: EventType, chunks: Sequence[_Chunk], capacity_bytes: int = 0) -> bytes:
        self._n_batches += 1
        is_store = kind is EventType.STORE
        entries = [
            {
                "key": {
                    "chunk_hash_hex": chunk.digest.hex(),
                    "model_name": self._model,
                    "kv_rank": _ONLY_RANK,
                    "object_group_id": 0,
                    "cache_salt": "",
                },
                "size_bytes": self._chunk_bytes if is_store else 0,
                "token_ids": np.frombuffer(chunk.tokens, dtype="<u4").tolist() if is_store else [],
                "token_offset": chunk.offset if is_store else NO_OFFSET,
            }
            for chunk in chunks
        ]
        batch = {
            "instance_id": self._reports.instance,
            "incarnation": self._incarnation,
            "seq": self._n_batches,
            "event_type": kind,
            "tier": Tier.L1,
            "backend": self._reports.backend,
            "entries": entries,
            "shared": False,
            "ts": float(self._incarnation),
            "capacity_bytes": capacity_bytes,
            "capacity_revision": 1 if kind is EventType.CONFIG else 0,
        }
        return orjson.dumps({"batches": [batch]})

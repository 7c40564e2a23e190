"""The paged KV cache of one engine, with vLLM's rules (pure).

What lives here: the physical blocks, lookup by sequence hash, allocation, eviction, and the chain of engine hashes.
What must not: requests, time and scheduling (model). `EngineModel` owns the cache and is the only one that changes it.

State: a simulated engine's cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from streams.core.ids import EngineHash, HashArray


class CachedBlocks(NamedTuple):
    """All blocks that can be found, one row per physical copy.

    engine, sequence: uint64[n]; position: int64[n], in blocks.
    """

    engine: HashArray
    sequence: HashArray
    position: npt.NDArray[np.int64]


class BlockCache:
    """Physical blocks, by id.

    Each block is in one of three states: free (no content), used (held by requests, hashed or not yet), or cached
    (hashed, held by none, in the order of eviction). `check` verifies this.
    """

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))  # a stack
        self._n_holders = [0] * n_blocks  # by block id
        self._key: list[int | None] = [None] * n_blocks  # by block id: sequence hash, None while not hashed
        self._idle: OrderedDict[int, None] = OrderedDict()  # ids of cached blocks, the next to be evicted first
        self._found: dict[int, int] = {}  # sequence hash -> the copy that lookups return
        self._others: dict[int, list[int]] = {}  # sequence hash -> its further copies, oldest first
        self.engine: HashArray = np.zeros(n_blocks, dtype=np.uint64)  # by block id, valid where hashed
        self._sequence: HashArray = np.zeros(n_blocks, dtype=np.uint64)  # as engine
        self._position: npt.NDArray[np.int64] = np.zeros(n_blocks, dtype=np.int64)  # as engine

    @property
    def n_cached(self) -> int:
        return len(self._idle)

    @property
    def n_allocatable(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def n_used(self) -> int:
        return self._n_blocks - self.n_allocatable

    def lookup(self, keys: list[int], n_max: int) -> list[int]:
        """Return the blocks of the longest cached prefix, at most `n_max`, without holding them."""
        found = self._found
        blocks: list[int] = []
        for key in keys[:n_max]:
            block = found.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def n_allocatable_excluding(self, hits: list[int]) -> int:
        """Count the blocks that could be taken once `hits` are held."""
        holders = self._n_holders
        return self.n_allocatable - sum(1 for block in hits if not holders[block])

    def hold(self, blocks: list[int]) -> None:
        """Add one holder to each hashed block."""
        holders, idle = self._n_holders, self._idle
        for block in blocks:
            if not holders[block]:
                del idle[block]
            holders[block] += 1

    def take(self, n_blocks: int) -> tuple[list[int], HashArray]:
        """Take `n_blocks` empty blocks, with one holder each: free ones first, then the least recently used.

        Returns their ids and the engine hashes of the evicted blocks, uint64[k]. The caller ensures that there are
        enough.
        """
        n_free = min(n_blocks, len(self._free))
        blocks = self._free[len(self._free) - n_free :][::-1]
        del self._free[len(self._free) - n_free :]
        evicted = [self._idle.popitem(last=False)[0] for _ in range(n_blocks - n_free)]
        for block in evicted:
            self._unregister(block)
        blocks += evicted
        holders = self._n_holders
        for block in blocks:
            holders[block] = 1
        return blocks, self.engine[evicted]

    def register(self, blocks: list[int], keys: list[int], engine: HashArray, sequence: HashArray, start: int) -> None:
        """Make held blocks available to lookups. As in vLLM, one hash may have several physical copies.

        start: position of the first block on its chain.
        """
        found, key_of = self._found, self._key
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if found.setdefault(key, block) != block:
                self._others.setdefault(key, []).append(block)
        self.engine[blocks] = engine
        self._sequence[blocks] = sequence
        self._position[blocks] = np.arange(start, start + len(blocks))

    def release(self, blocks: list[int]) -> None:
        """Remove one holder from each block, the last block first, so that a prefix outlives what follows it."""
        holders, idle, key_of = self._n_holders, self._idle, self._key
        for block in reversed(blocks):
            holders[block] -= 1
            if holders[block]:
                continue
            if key_of[block] is None:
                self._free.append(block)
            else:
                idle[block] = None

    def clear(self) -> None:
        """Drop all content. No block may be held."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._found.clear()
        self._others.clear()
        self._key = [None] * self._n_blocks

    def findable(self) -> CachedBlocks:
        """Return every hashed block, one row per physical copy."""
        blocks = [*self._found.values(), *(block for copies in self._others.values() for block in copies)]
        return CachedBlocks(self.engine[blocks], self._sequence[blocks], self._position[blocks])

    def _unregister(self, block: int) -> None:
        """Remove a cached block from lookups; a further copy of its hash takes its place."""
        key = self._key[block]
        assert key is not None, f"block {block} was cached without a hash"
        self._key[block] = None
        others = self._others.get(key)
        if self._found[key] != block:
            assert others is not None, f"block {block} is not a copy of its hash"
            others.remove(block)
        elif others:
            self._found[key] = others.pop(0)
        else:
            del self._found[key]
        if others is not None and not others:
            del self._others[key]

    def check(self, holders: Sequence[int]) -> None:
        """Raise AssertionError unless every invariant holds. holders: by block id, as counted from the requests."""
        require(list(holders) == self._n_holders, "holder counts differ from what the running requests hold")
        used = {block for block, n in enumerate(holders) if n}
        states = [set(self._free), set(self._idle), used]
        require(len(self._free) == len(states[0]), "a block is free twice")
        require(sum(map(len, states)) == self._n_blocks, "free + cached + used is not the whole cache")
        require(set().union(*states) == set(range(self._n_blocks)), "a block is in two states")
        require(all(self._key[block] is None for block in self._free), "a free block is hashed")
        require(all(self._key[block] is not None for block in self._idle), "a cached block is not hashed")
        hashed = {block: key for block, key in enumerate(self._key) if key is not None}
        known = {block: key for key, block in self._found.items()}
        known.update((block, key) for key, copies in self._others.items() for block in copies)
        require(hashed == known, "the hashed blocks are not the blocks that lookups find")
        require(all(self._others.values()), "an empty list of copies was kept")
        require(all(int(self._sequence[block]) == key for block, key in hashed.items()), "a block has a wrong hash")


def engine_hashes(tokens: bytes, width: int, parent: EngineHash | None, seed: int) -> HashArray:
    """Chain the private engine hashes of whole blocks.

    tokens: blocks of `width` bytes each. parent: hash of the preceding block, None at the root. Returns uint64[n].
    """
    digest = xxhash.xxh3_64_intdigest
    previous: int = 0 if parent is None else parent
    chained: list[int] = []
    for start in range(0, len(tokens), width):
        previous = digest(previous.to_bytes(8, "little") + tokens[start : start + width], seed)
        chained.append(previous)
    return np.array(chained, dtype=np.uint64)


def adapter_seed(engine_seed: int, lora_name: str | None) -> int:
    """Return the hash seed of an adapter, so that equal tokens under two adapters are different blocks."""
    return engine_seed if not lora_name else engine_seed ^ xxhash.xxh3_64_intdigest(lora_name.encode())


def require(holds: bool, what: str) -> None:
    """Raise AssertionError with `what` unless an invariant holds."""
    if not holds:
        raise AssertionError(what)

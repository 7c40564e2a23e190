"""Memory behind a link: a pool that a fleet's engines share, or the memory of one engine's host (pure).

What lives here: which blocks are in the pool, and how long loading them takes. What must not: engines and routers.

Engines write through: a prompt's block is in the pool as soon as it is computed. Loads take bytes over a bandwidth,
either of each engine's own link, or of one link for all, where a load waits for those before it. Writes use the other
direction of the link and are never waited for. The pool evicts the least recently used blocks, of a prompt the last one
first.

A pool of chunks is like LMCache: it stores and loads only whole chunks, which begin at multiples of their length, and
finds a chunk only if it has all those before it. A chunk has the key of its last block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from streams.errors import SettingsError


@dataclass(frozen=True, slots=True)
class LabPoolConfig:
    """A pool. is_shared: whether gb_per_s (10^9 bytes per second) is for all engines together or for each of them.

    is_credited: whether the router knows of the pool. chunk_blocks: blocks per chunk; 1 for a pool of single blocks.
    """

    capacity_blocks: int
    gb_per_s: float = 64.0
    is_shared: bool = False
    is_credited: bool = True
    chunk_blocks: int = 1

    def __post_init__(self) -> None:
        if self.capacity_blocks < self.chunk_blocks or not 0.0 < self.gb_per_s < float("inf"):
            raise SettingsError(
                "a pool must have at least one block, or one chunk, and a bandwidth that is finite and above 0"
            )
        if self.chunk_blocks < 1:
            raise SettingsError("a chunk must have at least one block")


class LabPool:
    """The pool of one run. Keys are those of a workload."""

    def __init__(self, config: LabPoolConfig, bytes_per_block: int) -> None:
        self._config = config
        self._chunk = config.chunk_blocks
        self._capacity = config.capacity_blocks // config.chunk_blocks
        self._ms_per_chunk = config.chunk_blocks * bytes_per_block / config.gb_per_s / 1e6
        self._keys: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._free_ms = 0.0  # when a shared link is free

    def __len__(self) -> int:
        return len(self._keys)

    def n_continuing(self, chain: Sequence[int], first: int) -> int:
        """How many blocks of a chain the pool has without a hole, from block `first` on."""
        begin = self._looked_up_from(first)
        ends = chain[begin + self._chunk - 1 :: self._chunk]
        if not ends or ends[0] not in self._keys:
            return 0
        n_chunks = sum(1 for _ in takewhile(self._keys.__contains__, ends))
        return max(begin + n_chunks * self._chunk - first, 0)

    def load(self, now_ms: float, chain: Sequence[int], first: int, n_blocks: int) -> float:
        """Load these blocks of a chain, which the pool has; return after how long they are there."""
        chunk = self._chunk
        last = (first + n_blocks - 1) // chunk
        for number in range(last, self._looked_up_from(first) // chunk - 1, -1):  # the beginning last
            self._keys.move_to_end(chain[(number + 1) * chunk - 1])
        took_ms = (last - first // chunk + 1) * self._ms_per_chunk
        if not self._config.is_shared:
            return took_ms
        self._free_ms = max(self._free_ms, now_ms) + took_ms
        return self._free_ms - now_ms

    def store(self, chain: Sequence[int], first: int) -> tuple[list[int], list[int]]:
        """Write the blocks of a chain from `first` on; return the keys of what is new, and of what was evicted."""
        keys, chunk, new = self._keys, self._chunk, []
        for position in range(len(chain) // chunk * chunk - 1, -1, -chunk):  # the beginning last, so it stays longest
            key = chain[position]
            if key in keys:
                keys.move_to_end(key)
            elif position >= first:
                keys[key] = None
                new.append(key)
        n_evicted = len(keys) - self._capacity
        evicted = [keys.popitem(last=False)[0] for _ in range(n_evicted)] if n_evicted > 0 else []
        return new, evicted

    def _looked_up_from(self, first: int) -> int:
        """Where a lookup for what follows block `first` begins."""
        return first if self._chunk == 1 else 0

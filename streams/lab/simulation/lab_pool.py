"""Memory behind a link: a pool that a fleet's engines share, or the memory of one engine's host (pure).

What lives here: which blocks are in the pool, and how long loading them takes. What must not: engines and routers.

Engines write through: a prompt's block is in the pool as soon as it is computed. Loads take bytes over a bandwidth,
either of each engine's own link, or of one link for all, where a load waits for those before it. Writes use the other
direction of the link and are never waited for. The pool evicts the least recently used blocks, of a prompt the last one
first.
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

    is_credited: whether the router knows of the pool.
    """

    capacity_blocks: int
    gb_per_s: float = 64.0
    is_shared: bool = False
    is_credited: bool = True

    def __post_init__(self) -> None:
        if self.capacity_blocks < 1 or not 0.0 < self.gb_per_s < float("inf"):
            raise SettingsError("a pool must have at least one block, and a bandwidth that is finite and above 0")


class LabPool:
    """The pool of one run. Keys are those of a workload."""

    def __init__(self, config: LabPoolConfig, bytes_per_block: int) -> None:
        self._config = config
        self._ms_per_block = bytes_per_block / config.gb_per_s / 1e6
        self._keys: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._free_ms = 0.0  # when a shared link is free

    def __len__(self) -> int:
        return len(self._keys)

    def n_continuing(self, chain: Sequence[int]) -> int:
        """How many leading blocks of a part of a chain the pool has."""
        keys = self._keys
        if not chain or chain[0] not in keys:
            return 0
        return sum(1 for _ in takewhile(keys.__contains__, chain))

    def load(self, now_ms: float, chain: Sequence[int]) -> float:
        """Load these blocks, which the pool has; return after how long they are there."""
        for key in reversed(chain):
            self._keys.move_to_end(key)
        took_ms = len(chain) * self._ms_per_block
        if not self._config.is_shared:
            return took_ms
        self._free_ms = max(self._free_ms, now_ms) + took_ms
        return self._free_ms - now_ms

    def store(self, chain: Sequence[int], first: int) -> tuple[list[int], list[int]]:
        """Write the blocks of a chain from `first` on; return those that are new, and those that were evicted."""
        keys, new = self._keys, []
        for position in range(len(chain) - 1, -1, -1):  # the beginning last, so that it stays the longest
            key = chain[position]
            if key in keys:
                keys.move_to_end(key)
            elif position >= first:
                keys[key] = None
                new.append(key)
        n_evicted = len(keys) - self._config.capacity_blocks
        evicted = [keys.popitem(last=False)[0] for _ in range(n_evicted)] if n_evicted > 0 else []
        return new, evicted

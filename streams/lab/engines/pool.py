"""A CXL pool that simulated engines share, and what each of them owns there (pure).

What lives here: the content of the pool, the time that its link takes, and its evictions (`SharedPool`); the
transitions that an engine reports for its blocks (`EnginePoolBlocks`). What must not: clocks, HTTP, and the choice of
what a request loads (model). Time is an argument in model milliseconds and never goes back. A live pool and an offline
simulation run the same code.

Engines write through. A block is offloaded as soon as it is full, as in vLLM's OffloadingConnector, and stays on the
GPU until it is evicted there. A write copies its blocks off the GPU when it begins, so they arrive even if the GPU
evicts them in the meantime. Content is stored once: an engine that offloads a block that the pool has, or that is in
transit, becomes one more owner of it and uses no bandwidth.

The link is full duplex, as in CXL. In each direction, transfers follow each other at the full bandwidth; a transfer
arrives as a whole, `latency_us` after its last byte. All engines share one link, or each has its own. Blocks in transit
count towards the capacity. When the capacity is short, the pool evicts the least recently used blocks that are neither
in transit nor being loaded; of a chain that was written or used together, the tail goes first. If that is not enough,
the rest of an offload is refused.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import HashArray
from streams.cxl.events import CxlPool
from streams.errors import SettingsError
from streams.lab.engines.block_cache import require
from streams.lab.engines.engine_config import BLOCK_SIZE_MAX
from streams.lab.engines.engine_messages import KvStored

#: Blocks of one pool: 8 TiB at 2 MiB per block, which take about 2 GB in this process.
CAPACITY_BLOCKS_MAX = 1 << 22


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Size and speed of a pool; the defaults are 128 GiB behind a CXL 2.0 device with eight PCIe 5 lanes.

    block_size: tokens per block, the same as in its engines. offload_gb_per_s, load_gb_per_s: 10^9 bytes per second,
    for all engines together, or with link `own` for each of them. latency_us: of each transfer, in addition to the time
    for its bytes. latency_class: the value for its registration. Raises SettingsError, and InvalidRequest for an
    invalid name.
    """

    pool_id: str = "pool"
    block_size: int = 16
    bytes_per_token: int = 131_072  # of an 8B model with grouped-query attention, as in EngineConfig
    capacity_blocks: int = 65_536
    offload_gb_per_s: float = 25.0  # eight PCIe 5 lanes carry 32 GB/s each way; flits and protocol take a fifth
    load_gb_per_s: float = 25.0
    latency_us: float = 20.0  # to set up a copy; the latency of the memory itself, about 0.3 us, is negligible
    latency_class: str = "default"
    link: Literal["shared", "own"] = "shared"

    def __post_init__(self) -> None:
        for name, value, most in (
            ("block_size", self.block_size, BLOCK_SIZE_MAX),
            ("bytes_per_token", self.bytes_per_token, 1 << 30),
            ("capacity_blocks", self.capacity_blocks, CAPACITY_BLOCKS_MAX),
        ):
            if not 1 <= value <= most:
                raise SettingsError(f"{name} is {value}; it must be 1..{most}")
        for name, rate in (("offload_gb_per_s", self.offload_gb_per_s), ("load_gb_per_s", self.load_gb_per_s)):
            if not 0.0 < rate < float("inf"):
                raise SettingsError(f"{name} is {rate}; it must be finite and above 0")
        if not 0.0 <= self.latency_us < float("inf"):
            raise SettingsError(f"latency_us is {self.latency_us}; it must be finite and not negative")
        if self.link not in ("shared", "own"):
            raise SettingsError(f"link is {self.link!r}, not shared or own")
        CxlPool(self.pool_id, self.latency_class)  # refuses the names that the registry would refuse

    @property
    def offload_ms_per_block(self) -> float:
        """Time that one block takes on the link to the pool."""
        return self._bytes_per_block / self.offload_gb_per_s / 1e6

    @property
    def load_ms_per_block(self) -> float:
        """Time that one block takes on the link from the pool."""
        return self._bytes_per_block / self.load_gb_per_s / 1e6

    @property
    def latency_ms(self) -> float:
        """Latency of each transfer."""
        return self.latency_us / 1000.0

    @property
    def _bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A change of some of an owner's blocks.

    state: cxl_pooled, evicted, or local_gpu for the refused part of an offload. keys: sequence hashes.
    """

    at_ms: float
    owner: str
    state: CxlMemoryState
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """How many leading blocks the pool gives, and when the last of them has arrived."""

    n_blocks: int
    end_ms: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks in the pool and in transit, and counts since the start, in blocks.

    joined: offloaded while the pool had them or was receiving them. unreported: evicted blocks of which an owner had
    left, so that no engine reports their eviction for that owner.
    """

    n_pooled: int
    n_in_transit: int
    capacity_blocks: int
    n_owners: int
    offloaded: int
    joined: int
    loaded: int
    evicted: int
    unreported: int
    refused: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Consecutive blocks of one chain that an engine offloads.

    keys: their sequence hashes. before: that of the block before them, None at the root. start: the position of the
    first one. tokens: u32 LE of all blocks. A pool of single blocks needs only the keys.
    """

    keys: tuple[int, ...]
    before: int | None = None
    start: int = 0
    tokens: bytes = b""


@dataclass(slots=True)
class _Write:
    """A transfer into the pool. Its keys are removed if its writer leaves."""

    end_ms: float
    writer: str
    keys: list[int]


@dataclass(slots=True)
class _Block:
    """write: the transfer that brings the block, None once it has arrived. loading_until_ms: not evicted before."""

    write: _Write | None
    owners: dict[str, None] = field(default_factory=dict)  # in the order in which they offloaded it
    loading_until_ms: float = float("-inf")
    an_owner_left: bool = False


def _end_ms(write: _Write) -> float:
    return write.end_ms


class SharedPool:
    """One pool. Every call first brings it to `at_ms`; `advance` returns the events up to its time."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self._blocks: dict[int, _Block] = {}
        self._pooled: OrderedDict[int, None] = OrderedDict()  # keys that have arrived, the next to be evicted first
        self._writes: deque[_Write] = deque()  # by their ends
        self._owned: dict[str, dict[int, None]] = {}  # keys by owner; an owner without keys has no entry
        # By engine if each has a link of its own, otherwise under "": when the link will have sent what it was given.
        self._write_free_ms: dict[str, float] = {}
        self._read_free_ms: dict[str, float] = {}
        self._now_ms = float("-inf")
        self._events: list[PoolEvent] = []
        self._offloaded = self._joined = self._loaded = self._evicted = self._unreported = self._refused = 0

    # -- in ------------------------------------------------------------------------------------------------------------

    def offload(self, at_ms: float, owner: str, keys: Sequence[int]) -> None:
        """Take blocks that an engine offloads, parents before children. keys: sequence hashes."""
        self._advance_to(at_ms)
        offered = list(dict.fromkeys(keys))
        new = [key for key in offered if key not in self._blocks]
        known = [key for key in offered if key in self._blocks]
        arrived = [key for key in known if self._blocks[key].write is None]
        self._touch(arrived)
        for key in known:
            self._own(key, owner)
        self._joined += len(known)
        self._emit(owner, CxlMemoryState.CXL_POOLED, arrived)
        n_short = len(self._blocks) + len(new) - self.config.capacity_blocks
        if n_short > 0:
            n_short -= self._evict(n_short, frozenset(offered))
        taken, refused = (new[:-n_short], new[-n_short:]) if n_short > 0 else (new, [])
        self._refused += len(refused)
        self._emit(owner, CxlMemoryState.LOCAL_GPU, refused)
        if taken:
            duration_ms = len(taken) * self.config.offload_ms_per_block
            end_ms = self._occupy(self._write_free_ms, owner, duration_ms) + self.config.latency_ms
            write = _Write(end_ms, owner, taken)
            # With links of their own, an engine's small transfer overtakes another one's large transfer.
            insort(self._writes, write, key=_end_ms)
            for key in taken:
                self._blocks[key] = _Block(write)
                self._own(key, owner)
            self._offloaded += len(taken)

    def load(self, at_ms: float, keys: Sequence[int], engine: str = "", *, in_place: bool = False) -> PoolLoad:
        """Load the leading blocks that have arrived; blocks in transit cannot be loaded yet.

        in_place: the engine reads them where they are, so that nothing is transferred before it begins.
        """
        self._advance_to(at_ms)
        loadable: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.write is not None:
                break
            loadable.append(key)
        if not loadable:
            return PoolLoad(0, self._now_ms)
        end_ms = self._now_ms + self.config.latency_ms
        if not in_place:
            end_ms = self._occupy(self._read_free_ms, engine, len(loadable) * self.config.load_ms_per_block)
            end_ms += self.config.latency_ms
        for key in loadable:
            block = self._blocks[key]
            block.loading_until_ms = max(block.loading_until_ms, end_ms)
        self._touch(loadable)
        self._loaded += len(loadable)
        return PoolLoad(len(loadable), end_ms)

    def touch(self, keys: Sequence[int]) -> None:
        """Count blocks of one chain as used, the last one first, so that a prefix outlives what follows it."""
        self._touch([key for key in keys if key in self._pooled])

    def leave(self, at_ms: float, owner: str) -> None:
        """Remove an engine that has exited: its unfinished writes are dropped, its other blocks stay.

        Transfers that follow on the link keep their times.
        """
        self._advance_to(at_ms)
        if self.config.link == "own":
            self._write_free_ms.pop(owner, None)
            self._read_free_ms.pop(owner, None)
        for write in self._writes:
            if write.writer == owner:
                self._drop(write.keys)
                write.keys = []
        for key in self._owned.pop(owner, {}):
            block = self._blocks[key]
            del block.owners[owner]
            block.an_owner_left = True

    # -- time ----------------------------------------------------------------------------------------------------------

    def next_event_ms(self) -> float | None:
        """Return the time of the next event: now if events wait, None if there are none and nothing is in transit."""
        if self._events:
            return self._now_ms
        return self._writes[0].end_ms if self._writes else None

    def advance(self, to_ms: float) -> list[PoolEvent]:
        """Bring the pool to this time, and return all events since the last call, in order."""
        self._advance_to(to_ms)
        events, self._events = self._events, []
        return events

    def _advance_to(self, at_ms: float) -> None:
        """Complete the writes that are due. A time before the pool's own changes nothing."""
        while self._writes and self._writes[0].end_ms <= at_ms:
            write = self._writes.popleft()
            self._now_ms = max(self._now_ms, write.end_ms)
            for key in write.keys:
                self._blocks[key].write = None
            for key in reversed(write.keys):
                self._pooled[key] = None
            self._emit_to_owners(CxlMemoryState.CXL_POOLED, write.keys)
        self._now_ms = max(self._now_ms, at_ms)

    # -- views ---------------------------------------------------------------------------------------------------------

    def pooled(self) -> list[int]:
        """Return the sequence hashes of blocks that have arrived, the next to be evicted first."""
        return list(self._pooled)

    def stats(self) -> PoolStats:
        """Return the counts at the time of the last call that had a time."""
        return PoolStats(
            n_pooled=len(self._pooled),
            n_in_transit=len(self._blocks) - len(self._pooled),
            capacity_blocks=self.config.capacity_blocks,
            n_owners=len(self._owned),
            offloaded=self._offloaded,
            joined=self._joined,
            loaded=self._loaded,
            evicted=self._evicted,
            unreported=self._unreported,
            refused=self._refused,
        )

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests: it visits every block."""
        require(len(self._blocks) <= self.config.capacity_blocks, "more blocks than the capacity")
        in_transit = [key for write in self._writes for key in write.keys]
        require(len(in_transit) == len(set(in_transit)), "a block is in transit twice")
        require(set(self._pooled) | set(in_transit) == set(self._blocks), "a block is neither pooled nor in transit")
        require(len(self._pooled) + len(in_transit) == len(self._blocks), "a block is both pooled and in transit")
        require(all(self._blocks[key].write is None for key in self._pooled), "a pooled block has a write")
        for write in self._writes:
            require(all(self._blocks[key].write is write for key in write.keys), "a block belongs to another write")
        ends = [write.end_ms for write in self._writes]
        require(ends == sorted(ends), "writes overtake each other")
        owned = {(owner, key) for owner, keys in self._owned.items() for key in keys}
        owners = {(owner, key) for key, block in self._blocks.items() for owner in block.owners}
        require(owned == owners, "the keys by owner and the owners by key differ")
        require(all(self._owned.values()), "an owner without blocks was kept")
        n_left = self._offloaded - self._evicted - len(self._blocks)
        require(n_left >= 0, "there are more blocks than were offloaded")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _occupy(self, free_ms: dict[str, float], engine: str, duration_ms: float) -> float:
        """Use an engine's link for this long, once it is free; returns when that ends."""
        link = engine if self.config.link == "own" else ""
        end_ms = free_ms[link] = max(self._now_ms, free_ms.get(link, float("-inf"))) + duration_ms
        return end_ms

    def _own(self, key: int, owner: str) -> None:
        self._blocks[key].owners[owner] = None
        self._owned.setdefault(owner, {})[key] = None

    def _touch(self, chain: Sequence[int]) -> None:
        """Mark pooled blocks as used, the tail first, so that a prefix outlives what follows it."""
        for key in reversed(chain):
            self._pooled.move_to_end(key)

    def _evict(self, n_blocks: int, keep: frozenset[int]) -> int:
        """Evict this many blocks, or as many as can be evicted; returns their number."""
        evicted: list[int] = []
        for key in self._pooled:
            if len(evicted) == n_blocks:
                break
            if key not in keep and self._blocks[key].loading_until_ms <= self._now_ms:
                evicted.append(key)
        self._evicted += len(evicted)
        self._unreported += sum(1 for key in evicted if self._blocks[key].an_owner_left)
        for key in evicted:
            del self._pooled[key]
        self._drop(evicted)
        return len(evicted)

    def _drop(self, keys: Iterable[int]) -> None:
        """Remove blocks and notify their owners. The caller removes the keys from the pooled blocks or the write."""
        keys = list(keys)
        self._emit_to_owners(CxlMemoryState.EVICTED, keys)
        for key in keys:
            for owner in self._blocks.pop(key).owners:
                owned = self._owned[owner]
                del owned[key]
                if not owned:
                    del self._owned[owner]

    def _emit_to_owners(self, state: CxlMemoryState, keys: Iterable[int]) -> None:
        """Emit one event for each owner of any of these blocks."""
        keys_by_owner: dict[str, list[int]] = {}
        for key in keys:
            for owner in self._blocks[key].owners:
                keys_by_owner.setdefault(owner, []).append(key)
        for owner, own in keys_by_owner.items():
            self._emit(owner, state, own)

    def _emit(self, owner: str, state: CxlMemoryState, keys: Sequence[int]) -> None:
        if keys:
            self._events.append(PoolEvent(self._now_ms, owner, state, tuple(keys)))


@dataclass(frozen=True, slots=True)
class CxlChanged:
    """An engine's blocks enter a state of CXL memory. engine: uint64[n], the engine's own hashes."""

    engine: HashArray
    state: CxlMemoryState
    pool_id: str


class EnginePoolBlocks:
    """One engine's blocks in a pool or in transit to it, with their engine hashes. It returns legal transitions only.

    The transition to `in_transit` is reported together with the store, while consumers of the events still know the
    engine hash. All further transitions are reported when the pool reports them.
    """

    def __init__(self, pool_id: str) -> None:
        self._pool_id = pool_id
        self._names: dict[int, int] = {}  # engine hash by sequence hash
        self._in_transit: set[int] = set()

    def __len__(self) -> int:
        return len(self._names)

    def states(self) -> dict[int, CxlMemoryState]:
        """Return the state of each block by its sequence hash."""
        return {
            key: CxlMemoryState.IN_TRANSIT if key in self._in_transit else CxlMemoryState.CXL_POOLED
            for key in self._names
        }

    def stored(self, stored: KvStored) -> tuple[tuple[int, ...], CxlChanged | None]:
        """Take full blocks; returns the sequence hashes to offload, and the transition to report."""
        names = {
            key: name
            for key, name in zip(stored.sequence.tolist(), stored.engine.tolist(), strict=True)
            if key not in self._names
        }
        self._names.update(names)
        self._in_transit.update(names)
        return tuple(names), self._changed(names.values(), CxlMemoryState.IN_TRANSIT)

    def pool_changed(self, state: CxlMemoryState, changed_keys: Sequence[int]) -> CxlChanged | None:
        """Take a PoolEvent; returns the transition to report, None if it concerns no block of this engine."""
        keys = [key for key in changed_keys if key in self._names]
        if state is CxlMemoryState.CXL_POOLED:
            keys = [key for key in keys if key in self._in_transit]
            names = [self._names[key] for key in keys]
        else:
            names = [self._names.pop(key) for key in keys]
        self._in_transit.difference_update(keys)
        return self._changed(names, state)

    def lost(self) -> CxlChanged | None:
        """Drop all blocks, because the pool or the session is lost; returns the transition to report."""
        names = list(self._names.values())
        self._names.clear()
        self._in_transit.clear()
        return self._changed(names, CxlMemoryState.EVICTED)

    def _changed(self, names: Iterable[int], state: CxlMemoryState) -> CxlChanged | None:
        engine: HashArray = np.fromiter(names, dtype=np.uint64)
        return CxlChanged(engine, state, self._pool_id) if len(engine) else None

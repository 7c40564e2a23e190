"""A CXL pool that simulated engines share, and what each of them keeps of its own blocks there (pure).

What lives here: what the pool holds, the time that its link takes, whom it evicts (`SharedPool`), and the transitions
that an engine reports for its blocks (`EnginePoolBlocks`). What must not: clocks, HTTP, which request loads what
(model). Time is an argument in model milliseconds and never goes back. A live pool and an offline simulation run the
same code.

Engines write through: a block is offloaded as soon as it is full, as vLLM's OffloadingConnector does, and stays on the
GPU until it is evicted there. A write has taken its blocks off the GPU when it begins; what the GPU evicts in the
meantime arrives all the same. Content is kept once: an engine that offloads what the pool has, or what is on its way,
becomes one more owner of it and uses no bandwidth.

The link is full duplex, as CXL's is. In each direction transfers go one behind the other at its full bandwidth; a
transfer arrives as a whole, `latency_us` behind its last byte. What is on its way takes room like what is there. Where
room is short the least recently used block goes that nobody loads and that is not on its way; of a chain that came or
was used together, the tail first. Where that is not enough either, the rest of an offload is refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import HashArray
from streams.cxl.events import CxlPool
from streams.errors import SettingsError
from streams.sim.engine_config import BLOCK_SIZE_MAX
from streams.sim.engine_messages import KvStored

#: Blocks of one pool: 8 TiB at 2 MiB a block, and some 2 GB of this process.
CAPACITY_BLOCKS_MAX = 1 << 22


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What a pool is like; the defaults are 128 GiB behind a CXL 2.0 device of eight PCIe 5 lanes.

    block_size: tokens a block, as the engines have it. offload_gb_per_s, load_gb_per_s: 10^9 bytes a second, of all
    engines together. latency_us: of each transfer, beside its bytes. latency_class: what its registration is to say.
    Raises SettingsError, and InvalidRequest for a name that is none.
    """

    pool_id: str = "pool"
    block_size: int = 16
    bytes_per_token: int = 131_072  # of an 8B model with grouped-query attention, as EngineConfig counts its cache
    capacity_blocks: int = 65_536
    offload_gb_per_s: float = 25.0  # eight PCIe 5 lanes carry 32 GB/s each way; flits and protocol take a fifth
    load_gb_per_s: float = 25.0
    latency_us: float = 20.0  # to set a copy up; the memory's own some 0.3 us are nothing beside it
    latency_class: str = "default"

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
        CxlPool(self.pool_id, self.latency_class)  # names that the registry would refuse are refused here

    @property
    def offload_ms_per_block(self) -> float:
        """Time of the link for one block, to the pool."""
        return self._bytes_per_block / self.offload_gb_per_s / 1e6

    @property
    def load_ms_per_block(self) -> float:
        """Time of the link for one block, from the pool."""
        return self._bytes_per_block / self.load_gb_per_s / 1e6

    @property
    def latency_ms(self) -> float:
        """Of each transfer."""
        return self.latency_us / 1000.0

    @property
    def _bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """What became of an owner's blocks.

    state: cxl_pooled, evicted, or local_gpu for an offload that found no room. keys: sequence hashes.
    """

    at_ms: float
    owner: str
    state: CxlMemoryState
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """How many leading blocks come, and when the last of them is there."""

    n_blocks: int
    end_ms: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks that are there and on their way; counts since the start, in blocks.

    joined: offloaded while the pool had them already. untold: evicted ones of which an owner had left, who can tell
    nobody.
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


@dataclass(slots=True)
class _Write:
    """A transfer into the pool; its keys are taken out where its mover dies."""

    end_ms: float
    mover: str
    keys: list[int]


@dataclass(slots=True)
class _Block:
    """write: the transfer that brings it, None once it is there. loading_until_ms: not evicted before."""

    write: _Write | None
    owners: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    loading_until_ms: float = float("-inf")
    an_owner_left: bool = False


class SharedPool:
    """One pool. Every call brings it to `at_ms` first; what became of blocks by then, `advance` gives."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self._blocks: dict[int, _Block] = {}
        self._pooled: OrderedDict[int, None] = OrderedDict()  # keys of what is there, the next to be evicted first
        self._writes: deque[_Write] = deque()  # by their ends
        self._owned: dict[str, dict[int, None]] = {}  # by owner, of those that have any
        self._write_free_ms = self._read_free_ms = self._now_ms = float("-inf")
        self._pool_events: list[PoolEvent] = []
        self._offloaded = self._joined = self._loaded = self._evicted = self._unreported = self._refused = 0

    # -- in ------------------------------------------------------------------------------------------------------------

    def offload(self, at_ms: float, owner: str, keys: Sequence[int]) -> None:
        """An engine offloads blocks, parents before children. keys: sequence hashes."""
        self._advance_to(at_ms)
        wanted = list(dict.fromkeys(keys))
        new = [key for key in wanted if key not in self._blocks]
        known = [key for key in wanted if key in self._blocks]
        there = [key for key in known if self._blocks[key].write is None]
        self._touch(there)
        for key in known:
            self._own(key, owner)
        self._joined += len(known)
        self._emit(owner, CxlMemoryState.CXL_POOLED, there)
        n_short = len(self._blocks) + len(new) - self.config.capacity_blocks
        if n_short > 0:
            n_short -= self._evict(n_short, frozenset(wanted))
        taken, refused = (new[:-n_short], new[-n_short:]) if n_short > 0 else (new, [])
        self._refused += len(refused)
        self._emit(owner, CxlMemoryState.LOCAL_GPU, refused)
        if taken:
            begin_ms = max(self._now_ms, self._write_free_ms)
            self._write_free_ms = begin_ms + len(taken) * self.config.offload_ms_per_block
            write = _Write(self._write_free_ms + self.config.latency_ms, owner, taken)
            self._writes.append(write)
            for key in taken:
                self._blocks[key] = _Block(write)
                self._own(key, owner)
            self._offloaded += len(taken)

    def load(self, at_ms: float, keys: Sequence[int]) -> PoolLoad:
        """Load the leading blocks that are there; what is on its way is not."""
        self._advance_to(at_ms)
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.write is not None:
                break
            found.append(key)
        if not found:
            return PoolLoad(0, self._now_ms)
        begin_ms = max(self._now_ms, self._read_free_ms)
        self._read_free_ms = begin_ms + len(found) * self.config.load_ms_per_block
        end_ms = self._read_free_ms + self.config.latency_ms
        for key in found:
            block = self._blocks[key]
            block.loading_until_ms = max(block.loading_until_ms, end_ms)
        self._touch(found)
        self._loaded += len(found)
        return PoolLoad(len(found), end_ms)

    def leave(self, at_ms: float, owner: str) -> None:
        """An engine is gone: what it was writing never arrives, what is there stays. The link keeps its schedule."""
        self._advance_to(at_ms)
        for write in self._writes:
            if write.mover == owner:
                self._drop(write.keys)
                write.keys = []
        for key in self._owned.pop(owner, {}):
            block = self._blocks[key]
            del block.owners[owner]
            block.an_owner_left = True

    # -- time ----------------------------------------------------------------------------------------------------------

    def next_event_ms(self) -> float | None:
        """When something arrives, None if nothing is on its way; at once where news wait."""
        if self._pool_events:
            return self._now_ms
        return self._writes[0].end_ms if self._writes else None

    def advance(self, to_ms: float) -> list[PoolEvent]:
        """Bring the pool to this time; gives all that became of blocks since the last call, in its order."""
        self._advance_to(to_ms)
        pool_events, self._pool_events = self._pool_events, []
        return pool_events

    def _advance_to(self, at_ms: float) -> None:
        """Let arrive what is due. An older time is taken for the newest one known."""
        while self._writes and self._writes[0].end_ms <= at_ms:
            write = self._writes.popleft()
            self._now_ms = max(self._now_ms, write.end_ms)
            for key in write.keys:
                self._blocks[key].write = None
            for key in reversed(write.keys):
                self._pooled[key] = None
            self._emit_all(CxlMemoryState.CXL_POOLED, write.keys)
        self._now_ms = max(self._now_ms, at_ms)

    # -- views ---------------------------------------------------------------------------------------------------------

    def pooled(self) -> list[int]:
        """Sequence hashes of what is there, the next to be evicted first."""
        return list(self._pooled)

    def stats(self) -> PoolStats:
        """As of the last call that named a time."""
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
        """Raise AssertionError unless every invariant holds; for tests, it visits every block."""
        _require(len(self._blocks) <= self.config.capacity_blocks, "more blocks than there is room for")
        on_their_way = [key for write in self._writes for key in write.keys]
        _require(len(on_their_way) == len(set(on_their_way)), "a block is on its way twice")
        _require(set(self._pooled) | set(on_their_way) == set(self._blocks), "a block is neither there nor on its way")
        _require(len(self._pooled) + len(on_their_way) == len(self._blocks), "a block is there and on its way")
        _require(all(self._blocks[key].write is None for key in self._pooled), "what is there is on its way")
        for write in self._writes:
            _require(all(self._blocks[key].write is write for key in write.keys), "a block is another write's")
        ends = [write.end_ms for write in self._writes]
        _require(ends == sorted(ends), "writes overtake each other")
        owned = {(owner, key) for owner, keys in self._owned.items() for key in keys}
        owners = {(owner, key) for key, block in self._blocks.items() for owner in block.owners}
        _require(owned == owners, "who owns what is told in two ways")
        _require(all(self._owned.values()), "an owner of nothing was kept")
        n_left = self._offloaded - self._evicted - len(self._blocks)
        _require(n_left >= 0, "blocks came from nowhere")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _own(self, key: int, owner: str) -> None:
        self._blocks[key].owners[owner] = None
        self._owned.setdefault(owner, {})[key] = None

    def _touch(self, chain: Sequence[int]) -> None:
        """Use blocks that are there, the tail first, so that a prefix outlives what follows it."""
        for key in reversed(chain):
            self._pooled.move_to_end(key)

    def _evict(self, n_wanted: int, keep: frozenset[int]) -> int:
        """Evict so many blocks, or as many as may go; gives their number."""
        gone: list[int] = []
        for key in self._pooled:
            if len(gone) == n_wanted:
                break
            if key not in keep and self._blocks[key].loading_until_ms <= self._now_ms:
                gone.append(key)
        self._evicted += len(gone)
        self._unreported += sum(1 for key in gone if self._blocks[key].an_owner_left)
        for key in gone:
            del self._pooled[key]
        self._drop(gone)
        return len(gone)

    def _drop(self, keys: Iterable[int]) -> None:
        """Forget blocks, and tell all their owners; whoever calls has taken them out of what is there or on its way."""
        keys = list(keys)
        self._emit_all(CxlMemoryState.EVICTED, keys)
        for key in keys:
            for owner in self._blocks.pop(key).owners:
                owned = self._owned[owner]
                del owned[key]
                if not owned:
                    del self._owned[owner]

    def _emit_all(self, state: CxlMemoryState, keys: Iterable[int]) -> None:
        """Tell each owner of his blocks among these."""
        told: dict[str, list[int]] = {}
        for key in keys:
            for owner in self._blocks[key].owners:
                told.setdefault(owner, []).append(key)
        for owner, own in told.items():
            self._emit(owner, state, own)

    def _emit(self, owner: str, state: CxlMemoryState, keys: Sequence[int]) -> None:
        if keys:
            self._pool_events.append(PoolEvent(self._now_ms, owner, state, tuple(keys)))


@dataclass(frozen=True, slots=True)
class CxlChanged:
    """An engine's blocks enter a state of CXL memory. engine: uint64[n], its own hashes."""

    engine: HashArray
    state: CxlMemoryState
    pool_id: str


class EnginePoolBlocks:
    """One engine's own blocks that are in a pool or on their way there, under its names; gives legal transitions only.

    A block is told `in_transit` together with the store that it follows, so that whoever follows the events still knows
    the name; what the pool then says of it is told when it says so.
    """

    def __init__(self, pool_id: str) -> None:
        self._pool_id = pool_id
        self._names: dict[int, int] = {}  # by sequence hash
        self._in_transit: set[int] = set()

    def __len__(self) -> int:
        return len(self._names)

    def states(self) -> dict[int, CxlMemoryState]:
        """State by sequence hash."""
        return {
            key: CxlMemoryState.IN_TRANSIT if key in self._in_transit else CxlMemoryState.CXL_POOLED
            for key in self._names
        }

    def stored(self, stored: KvStored) -> tuple[tuple[int, ...], CxlChanged | None]:
        """Blocks are full: gives those to be offloaded, by sequence hash, and what is to be told of them."""
        names = {
            key: name
            for key, name in zip(stored.sequence.tolist(), stored.engine.tolist(), strict=True)
            if key not in self._names
        }
        self._names.update(names)
        self._in_transit.update(names)
        return tuple(names), self._changed(names.values(), CxlMemoryState.IN_TRANSIT)

    def pool_changed(self, state: CxlMemoryState, changed_keys: Sequence[int]) -> CxlChanged | None:
        """The pool says what became of own blocks, see PoolEvent; of what is not own any more nothing is told."""
        keys = [key for key in changed_keys if key in self._names]
        if state is CxlMemoryState.CXL_POOLED:
            keys = [key for key in keys if key in self._in_transit]
            names = [self._names[key] for key in keys]
        else:
            names = [self._names.pop(key) for key in keys]
        self._in_transit.difference_update(keys)
        return self._changed(names, state)

    def lost(self) -> CxlChanged | None:
        """The pool is gone, or has forgotten this engine: nothing that was there counts any more."""
        names = list(self._names.values())
        self._names.clear()
        self._in_transit.clear()
        return self._changed(names, CxlMemoryState.EVICTED)

    def _changed(self, names: Iterable[int], state: CxlMemoryState) -> CxlChanged | None:
        engine: HashArray = np.fromiter(names, dtype=np.uint64)
        return CxlChanged(engine, state, self._pool_id) if len(engine) else None


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)

"""Which chunks LMCache's pools have, folded from the batches of its instances (pure).

What lives here: the gate that orders an instance's batches, the ranks that hold each chunk, and the changes that
follow. What must not: bytes (wire, rows), Kafka, leases (bridge). The rules are those of LMCache's coordinator
(`EventGate`, `KeyDirectory`), so that its directory and these pools agree chunk by chunk.

A feed is what one bridge folds at a time: an instance, or a backend that instances share. In a shared backend any
instance may delete what another one has stored, so that its batches of all instances are one feed.

A pool is one backend of one tier, so that it has one medium. A chunk counts once all ranks of its world size hold it.
Memory of a server (L1) is empty after its restart, and what it has offloaded (L2) is not.

State: the pools of one feed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, unquote

import xxhash

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import DpRank, RankId, WorkerId
from streams.cxl.states import stored_as
from streams.lmcache.chunk_names import ChunkAddress, ChunkNames, NameKey, NameSpace, Unnamed, name_space
from streams.lmcache.wire import CacheBatch, Entry, EventType, Tier

INSTANCE_PREFIX = "lmcache/"
SHARED_PREFIX = "lmcache-shared/"

#: Chunks of one feed, 600 bytes each. Further ones are counted, and are in no pool of ours.
CHUNKS_MAX = 2_000_000

#: Instances that share a backend. The cursor of each is part of the feed's record.
INSTANCES_MAX = 1024

#: Feeds of one scope. Beyond this limit, the events of further instances are not passed on.
FEEDS_MAX = 2048

#: The only group of layers whose objects count. With `--separate-object-groups`, other groups have windows, and a hit
#: may need fewer of their objects than a prefix has chunks.
_FIRST_GROUP = 0


class NotCounted(enum.StrEnum):
    """Why stored objects are in no pool of ours, besides the reasons of `Unnamed`. The values are in metrics."""

    OTHER_GROUP = "other_group"
    OVER_CAPACITY = "over_capacity"


class Verdict(enum.StrEnum):
    """What a batch is, in the order of its instance's batches. The values are in metrics."""

    APPLIED = "applied"
    GAP = "gap"  # applied, but batches before it are missing
    DUPLICATE = "duplicate"
    STALE = "stale"  # of an earlier incarnation; dropped, so that the batches are missing
    OVER_CAPACITY = "over_capacity"  # of an instance beyond INSTANCES_MAX


class Feed(NamedTuple):
    """What one lease covers: an instance, or a backend that instances share. name: of either."""

    name: str
    is_shared: bool = False

    @property
    def key(self) -> str:
        """Its key in the registry, which is also the beginning of its pools' ids."""
        return (SHARED_PREFIX if self.is_shared else INSTANCE_PREFIX) + quote(self.name, safe="")

    @property
    def worker_id(self) -> WorkerId:
        """The id under which its rows are owned and its records are partitioned."""
        return WorkerId(xxhash.xxh3_64_intdigest(self.key.encode()))


def parse_feed(key: str) -> Feed | None:
    """Return the feed with a key; None for any other key."""
    for prefix, is_shared in ((INSTANCE_PREFIX, False), (SHARED_PREFIX, True)):
        name = key.removeprefix(prefix)
        if name != key and name and "/" not in name:
            return Feed(unquote(name), is_shared)
    return None


class Pool(NamedTuple):
    """One backend of one tier. instance: None if instances share it."""

    instance: str | None
    tier: Tier
    backend: str

    @property
    def id(self) -> str:
        """Its id in the registry: `lmcache/INSTANCE/BACKEND`, with `l2/` before the backend if it is one of L2."""
        feed = Feed(self.backend, True) if self.instance is None else Feed(self.instance)
        tier = "" if self.tier is (Tier.L2 if self.instance is None else Tier.L1) else f"/{self.tier}"
        return feed.key + tier + ("" if self.instance is None else f"/{quote(self.backend, safe='')}")


def parse_pool(pool_id: str) -> Pool | None:
    """Return the pool of LMCache with an id; None for any other pool."""
    parts = pool_id.split("/")
    feed = parse_feed("/".join(parts[:2]))
    if feed is None:
        return None
    if feed.is_shared:
        pool = Pool(None, Tier(parts[2]) if parts[2:] in (["l1"], ["l2"]) else Tier.L2, feed.name)
    elif len(parts) in (3, 4):
        pool = Pool(feed.name, Tier.L1 if len(parts) == 3 else Tier.L2, unquote(parts[-1]))
    else:
        return None
    return pool if pool.id == pool_id else None


class Owner(NamedTuple):
    """The owner of rows: a pool's chunks of one model and world size. model: by our name."""

    pool: Pool
    model: str
    world_size: int

    @property
    def rank(self) -> RankId:
        """The owner as the table of pooled blocks has it."""
        feed = Feed(self.pool.backend, True) if self.pool.instance is None else Feed(self.pool.instance)
        text = f"{self.pool.id}\0{self.model}\0{self.world_size}"
        return RankId(feed.worker_id, DpRank(xxhash.xxh3_64_intdigest(text.encode()) & 0x7FFFFFFF))


@dataclass(slots=True)
class Chunk:
    """A chunk in one pool.

    ranks: bits of the ranks that hold it. stored_s: when it was last stored, by its record's append time. published:
    the state that routers know, None for none; published_ranks: the ranks at that time.
    """

    key: NameKey
    ranks: int = 0
    stored_s: int = 0
    address: ChunkAddress | None = None
    published: CxlMemoryState | None = None
    published_ranks: int = 0


@dataclass(slots=True)
class Cursor:
    """How far an instance's batches were applied.

    gap_s: since when batches are missing whose loss matters; 0: none. uses_backend: in the feed of a shared backend,
    whether the instance has named it since it was started.
    """

    incarnation: int
    number: int = 0
    gap_s: int = 0
    uses_backend: bool = False


@dataclass(slots=True, eq=False)
class _Held:
    """One owner's chunks that any rank holds. changed: those that must be published, also if no rank holds them."""

    owner: Owner
    chunks: dict[NameKey, Chunk] = field(default_factory=dict)
    changed: dict[NameKey, Chunk] = field(default_factory=dict)


#: By model (LMCache's name), world size and salt, what the entries of one batch are about.
_Places = dict[tuple[str, int, str], tuple[_Held, NameSpace]]


class Change(NamedTuple):
    """Chunks of one owner that enter states together, one after the other."""

    owner: Owner
    states: tuple[CxlMemoryState, ...]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """LMCache's names of models, which are those that its engines were started with, and ours.

    ours: for names that differ. block_size_of: of one of our models.
    """

    block_size_of: Callable[[str], int]
    ours: dict[str, str] = field(default_factory=dict)

    def our_name(self, name: str) -> str:
        """Return our name of a model."""
        return self.ours.get(name, name)


class FeedPools:
    """The pools of one feed. n_stored: objects that were stored; counts: those that are not counted, by reason;
    capacities: bytes, by pool."""

    def __init__(self, feed: Feed, names: ChunkNames, models: ModelNames, chunks_max: int = CHUNKS_MAX) -> None:
        self.feed = feed
        self.cursors: dict[str, Cursor] = {}
        self.n_stored = 0
        self.counts: Counter[str] = Counter()
        self.capacities: dict[Pool, int] = {}
        self.chunk_bytes: dict[Pool, tuple[int, int]] = {}  # bytes of the last chunk stored, and its blocks
        self._names = names
        self._models = models
        self._chunks_max = chunks_max
        self._n_chunks = 0
        self._held: dict[Owner, _Held] = {}
        self._unnamed: dict[NameKey, set[_Held]] = {}  # chunks that are held, and have no address yet
        self._revision = 0  # of the capacities
        self._now_s = 0  # the time of the last batch: the greatest append time so far, and later after each gap
        self._spaces: dict[tuple[str, str], NameSpace] = {}

    def __len__(self) -> int:
        """Return the number of chunks that any rank holds."""
        return self._n_chunks

    def chunks(self) -> Iterator[tuple[Owner, Chunk]]:
        """Iterate over all chunks that any rank holds."""
        for owner, held in self._held.items():
            for chunk in held.chunks.values():
                yield owner, chunk

    @property
    def has_changes(self) -> bool:
        """Whether anything must be published."""
        return any(held.changed for held in self._held.values())

    def pools(self) -> set[Pool]:
        """Return the pools that have, had or declared anything."""
        return {owner.pool for owner in self._held} | set(self.capacities)

    def instances_of(self, pool: Pool) -> set[str]:
        """Return the instances whose engines can read a pool."""
        if pool.instance is not None:
            return {pool.instance}
        return {instance for instance, cursor in self.cursors.items() if cursor.uses_backend}

    def models(self) -> list[str]:
        """Return our names of the models whose chunks are held."""
        return sorted({owner.model for owner, held in self._held.items() if held.chunks})

    def is_incomplete(self) -> bool:
        """Whether batches are missing whose loss still matters."""
        return any(cursor.gap_s for cursor in self.cursors.values())

    def epoch_of(self, pool: Pool) -> int:
        """Return a pool's epoch: the incarnation of the server whose memory it is, 0 for what outlives a server."""
        cursor = None if pool.instance is None or pool.tier is Tier.L2 else self.cursors.get(pool.instance)
        return 0 if cursor is None else cursor.incarnation

    # -- batches -------------------------------------------------------------------------------------------------------

    def apply(self, batch: CacheBatch, at_s: int) -> Verdict:
        """Apply one batch. at_s: its record's append time. Batches of other instances or backends only count."""
        if not self.feed.is_shared and batch.instance != self.feed.name:
            return Verdict.APPLIED
        known = self.cursors.get(batch.instance)
        verdict = self._admit(batch)
        if verdict in (Verdict.DUPLICATE, Verdict.OVER_CAPACITY):
            return verdict
        cursor = self.cursors[batch.instance]
        is_ours = batch.shared == self.feed.is_shared and (not batch.shared or batch.backend == self.feed.name)
        if verdict is not Verdict.STALE:
            cursor.uses_backend = cursor.uses_backend or (is_ours and batch.shared)
        # Servers' clocks differ, and what was stored before a gap must have an earlier time than the gap.
        at_s = self._now_s = max(at_s, self._now_s + (verdict is Verdict.GAP))
        used = cursor.uses_backend or (known is not None and known.uses_backend)
        if verdict is not Verdict.APPLIED and (used or not self.feed.is_shared):
            cursor.gap_s = max(at_s, 1)
        if verdict is Verdict.STALE:  # of a server whose clock was set back, or of another one with its id
            return verdict
        if is_ours:
            pool = Pool(None if batch.shared else batch.instance, batch.tier, batch.backend)
            match batch.kind:
                case EventType.STORE:
                    self._store(pool, batch.instance, batch.entries, at_s)
                case EventType.DELETE:
                    self._delete(pool, batch.entries)
                case EventType.CONFIG:
                    self._declare(pool, batch)
                case EventType.ACCESS:
                    pass
        if batch.kind is EventType.ACCESS:  # it names no backend
            for entry in batch.entries:
                self._names.used(batch.instance, entry.chunk_hash, self._space(entry.salt, entry.model))
        return verdict

    def _admit(self, batch: CacheBatch) -> Verdict:
        """Fence by incarnation, drop duplicates, and notice gaps, as LMCache's EventGate does."""
        cursor = self.cursors.get(batch.instance)
        if cursor is None:
            if len(self.cursors) >= INSTANCES_MAX:
                return Verdict.OVER_CAPACITY
            # The feed of a shared backend begins with the first batch that names it. What an instance did before that
            # is none of its concern.
            number = batch.number - 1 if self.feed.is_shared else 0
            cursor = self.cursors[batch.instance] = Cursor(batch.incarnation, number)
        elif batch.incarnation < cursor.incarnation:
            return Verdict.STALE
        elif batch.incarnation > cursor.incarnation:
            self._fence(batch.instance)
            # A restart shows that its memory is empty, and nothing about what storage has.
            gap_s = cursor.gap_s if self._n_chunks else 0
            cursor = self.cursors[batch.instance] = Cursor(batch.incarnation, gap_s=gap_s)
        elif batch.number <= cursor.number:
            return Verdict.DUPLICATE
        is_gap = batch.number > cursor.number + 1
        cursor.number = batch.number
        return Verdict.GAP if is_gap else Verdict.APPLIED

    def _fence(self, instance: str) -> None:
        """Empty the memory of a server that was restarted. Its pools' next epoch ends their rows."""
        for owner, held in self._held.items():
            if owner.pool.tier is Tier.L1 and owner.pool.instance == instance:
                self._n_chunks -= len(held.chunks)
                for key in held.chunks:
                    self._forget_unnamed(key, held)
                held.chunks.clear()
                held.changed.clear()

    def _store(self, pool: Pool, instance: str, entries: list[Entry], at_s: int) -> None:
        places: _Places = {}
        self.n_stored += len(entries)
        for entry in entries:
            if entry.group != _FIRST_GROUP:
                self.counts[NotCounted.OTHER_GROUP] += 1
                continue
            held, space = self._place(places, pool, entry)
            key = entry.chunk_hash, space
            chunk = held.chunks.get(key)
            if chunk is None:
                if self._n_chunks >= self._chunks_max:
                    self.counts[NotCounted.OVER_CAPACITY] += 1
                    continue
                if not held.chunks:
                    self._held[held.owner] = held
                # One that was deleted a moment ago is still published.
                chunk = held.chunks[key] = held.changed.get(key) or Chunk(key)
                self._n_chunks += 1
            chunk.ranks |= 1 << entry.rank
            chunk.stored_s = at_s
            if chunk.address is None:
                named = self._names.resolve(instance, *key, entry.tokens, entry.offset)
                if isinstance(named, Unnamed):
                    self.counts[named] += 1
                    self._unnamed.setdefault(key, set()).add(held)
                    continue
                chunk.address = named
                self._forget_unnamed(key, held)
            self.chunk_bytes[pool] = entry.n_bytes * entry.world_size, chunk.address.n_blocks
            held.changed[key] = chunk

    def _delete(self, pool: Pool, entries: list[Entry]) -> None:
        places: _Places = {}
        for entry in entries:
            held, space = self._place(places, pool, entry)
            chunk = held.chunks.get((entry.chunk_hash, space))
            if chunk is not None and entry.group == _FIRST_GROUP:
                chunk.ranks &= ~(1 << entry.rank)
                self._touch(held, chunk)

    def _touch(self, held: _Held, chunk: Chunk) -> None:
        """Note that a chunk's ranks have changed; one that no rank holds is dropped."""
        if not chunk.ranks:
            held.chunks.pop(chunk.key, None)
            self._n_chunks -= 1
            self._forget_unnamed(chunk.key, held)
        if chunk.address is not None:
            held.changed[chunk.key] = chunk

    def _declare(self, pool: Pool, batch: CacheBatch) -> None:
        """Note a pool's capacity. A declaration has one batch for each pool, all with the same revision."""
        if not self.feed.is_shared and batch.capacity_revision != self._revision:
            self._revision = batch.capacity_revision
            self.capacities.clear()
        self.capacities[pool] = batch.capacity_bytes

    def take_names(self, named: Iterable[NameKey]) -> None:
        """Take the names of chunks that had none when they were stored, whichever instance has shown them."""
        if not self._unnamed:
            return
        for key in named:
            for held in self._unnamed.pop(key, ()):
                chunk = held.chunks[key]
                chunk.address = self._names.get(*key)
                if chunk.address is not None:
                    held.changed[key] = chunk

    def _forget_unnamed(self, key: NameKey, held: _Held) -> None:
        owners = self._unnamed.get(key)
        if owners is not None:
            owners.discard(held)
            if not owners:
                del self._unnamed[key]

    def _place(self, places: _Places, pool: Pool, entry: Entry) -> tuple[_Held, NameSpace]:
        """Return whose chunk an entry of a batch is about, and the name space of its hash."""
        key = entry.model, entry.world_size, entry.salt
        place = places.get(key)
        if place is None:
            owner = Owner(pool, self._models.our_name(entry.model), entry.world_size)
            held = self._held.get(owner) or _Held(owner)
            place = places[key] = held, self._space(entry.salt, entry.model)
        return place

    def _space(self, salt: str, model: str) -> NameSpace:
        space = self._spaces.get((salt, model))
        if space is None:
            if len(self._spaces) > _SPACES_KEPT_MAX:
                self._spaces.clear()
            block_size = self._models.block_size_of(self._models.our_name(model))
            space = self._spaces[salt, model] = name_space(salt, block_size)
        return space

    # -- what follows --------------------------------------------------------------------------------------------------

    def adopt_name(self, owner: Owner, chunk: Chunk) -> None:
        """Take the name of a chunk that was published before, whether or not it is held now."""
        if chunk.address is not None:
            self._names.adopt(*chunk.key, chunk.address)
            if owner.pool.instance is not None:
                self._names.used(owner.pool.instance, *chunk.key)

    def adopt(self, owner: Owner, chunk: Chunk) -> None:
        """Add a chunk that was published before, under this owner or another one."""
        held = self._held.setdefault(owner, _Held(owner))
        self._n_chunks += chunk.key not in held.chunks
        self._now_s = max(self._now_s, chunk.stored_s)
        held.chunks[chunk.key] = chunk
        if chunk.address is not None and chunk.published is None:
            held.changed[chunk.key] = chunk

    def adopt_ended(self, owner: Owner, chunk: Chunk | None) -> None:
        """Note an owner of rows of another epoch. chunk: one that is to be evicted, None for one that has ended."""
        held = self._held.setdefault(owner, _Held(owner))  # its pool's record must have the current epoch
        if chunk is not None:
            chunk.ranks = 0
            held.changed[chunk.key] = chunk

    def expire(self, now_s: int, unconfirmed_ttl_s: int) -> int:
        """End gaps whose time is over: evict what was last stored before them. Returns the number of these chunks.

        unconfirmed_ttl_s: 0 for never.
        """
        ended = {
            instance: cursor.gap_s
            for instance, cursor in self.cursors.items()
            if cursor.gap_s and unconfirmed_ttl_s and now_s >= cursor.gap_s + unconfirmed_ttl_s
        }
        if not ended:
            return 0
        before_s = max(ended.values())
        unconfirmed = [
            (held, chunk) for held in self._held.values() for chunk in held.chunks.values() if chunk.stored_s < before_s
        ]
        for held, chunk in unconfirmed:
            chunk.ranks = 0
            self._touch(held, chunk)
        for instance in ended:
            self.cursors[instance].gap_s = 0
        return len(unconfirmed)

    def take_changes(self) -> list[Change]:
        """Return what must be published since the last call, in this order."""
        changes: list[Change] = []
        for owner, held in self._held.items():
            if not held.changed:
                continue
            whole = (1 << owner.world_size) - 1
            entered: dict[CxlMemoryState, list[Chunk]] = {state: [] for state in _ENTERED}
            for chunk in held.changed.values():
                state = _state_of(chunk, whole)
                if state != chunk.published or chunk.ranks != chunk.published_ranks:
                    entered[state or CxlMemoryState.EVICTED].append(chunk)
                    chunk.published, chunk.published_ranks = state, chunk.ranks
            changes += [Change(owner, _ENTERED[state], chunks) for state, chunks in entered.items() if chunks]
            held.changed.clear()
        return changes

    def publish_all(self) -> None:
        """Have every chunk published again: routers know nothing of them."""
        for held in self._held.values():
            for chunk in held.chunks.values():
                chunk.published = None
            held.changed = {key: chunk for key, chunk in held.chunks.items() if chunk.address is not None}


#: Pairs of a salt and a model whose name space is cached.
_SPACES_KEPT_MAX = 65_536

#: By the state that is published, those that chunks enter for it; in the order in which they are published.
_ENTERED: dict[CxlMemoryState, tuple[CxlMemoryState, ...]] = {
    state: stored_as(state) for state in (CxlMemoryState.EVICTED, CxlMemoryState.IN_TRANSIT, CxlMemoryState.CXL_POOLED)
}


def _state_of(chunk: Chunk, whole: int) -> CxlMemoryState | None:
    """Return the state of a chunk: all ranks hold it, or some of them; None if none does."""
    if chunk.ranks == whole:
        return CxlMemoryState.CXL_POOLED
    return CxlMemoryState.IN_TRANSIT if chunk.ranks else None

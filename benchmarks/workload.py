"""Workloads of the index benchmark: generating, writing and reading them.

What lives here: the file format that all engines read, and the generators of its contents. What must not: engines and
clocks. A workload depends only on its seed and parameters, so equal parameters give equal bytes.

KVWL v1, little-endian; each array starts on an 8-byte boundary, filled up with zero bytes:

    magic 'KVWL0001'
    u64 n_workers, depth, block_size, n_events, n_event_blocks, n_queries, n_query_blocks, n_token_queries
    u32 ev_worker[n_events]
    u32 ev_kind[n_events]            0 stored, 1 removed
    u64 ev_parent[n_events]          sequence hash of the block before the first; 0 at the root
    u64 ev_off[n_events + 1]         into blk_*
    u64 blk_local[n_event_blocks]    0 in a removal
    u64 blk_seq[n_event_blocks]
    u32 q_class[n_queries]           QueryClass; 0 in a trace
    u64 q_off[n_queries + 1]
    u64 q_local[n_query_blocks]
    u64 q_seq[n_query_blocks]
    u32 tok[n_token_queries * depth * block_size]   token ids of the first queries; none in a trace

Local and sequence hashes are those of streams.core.hashing (xxh3-64, seed 1337), so Dynamo's own engines accept them.
"""

from __future__ import annotations

import enum
import json
import os
import random
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from streams.core.hashing import BASE_SEED

MAGIC = b"KVWL0001"
STORED, REMOVED = 0, 1
BLOCK_SIZE = 16

#: Written next to each file; a file from another version of these generators is generated again.
GENERATOR_VERSION = 1

SEED = 20261120
VOCABULARY = 128_000  # token ids are below this, about the size of Llama 3's vocabulary
TRACE_BLOCK_TOKENS = 512  # tokens per hash id of a Mooncake trace

_HEAD = struct.Struct("<8Q")
_PAIR = struct.Struct("<QQ")
_ALIGN = 8

U32Array = npt.NDArray[np.uint32]
U64Array = npt.NDArray[np.uint64]


class QueryClass(enum.IntEnum):
    """The kind of request that a query of a synthetic workload stands for."""

    SERVED = 0  # a whole sequence that was served recently
    NEXT_TURN = 1  # the next turn of a conversation
    SYSTEM_PROMPT = 2  # only the system prompt is cached
    HOT = 3  # held by every rank, each to a different depth
    MISS = 4


class Event(NamedTuple):
    """One stored or removed event, as lists of hashes. local: empty in a removal; parent: 0 at the root."""

    rank: int
    kind: int
    parent: int
    local: Sequence[int]
    sequence: Sequence[int]


class Query(NamedTuple):
    """One request's hashes, from the root."""

    kind: QueryClass
    local: Sequence[int]
    sequence: Sequence[int]


@dataclass(frozen=True, slots=True)
class Facts:
    """Summary of a workload, written next to it as JSON.

    live_entries: facts (rank, block) held after the last event; distinct_live: blocks among them.
    """

    generator_version: int
    live_entries: int
    distinct_live: int
    requests: int
    events: int
    stored_blocks: int
    removed_blocks: int
    queries: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload in columns, with the names of the file's fields; tokens have one row per query."""

    name: str
    n_ranks: int
    depth: int
    block_size: int
    facts: Facts
    ev_worker: U32Array
    ev_kind: U32Array
    ev_parent: U64Array
    ev_off: U64Array
    blk_local: U64Array
    blk_seq: U64Array
    q_class: U32Array
    q_off: U64Array
    q_local: U64Array
    q_seq: U64Array
    tokens: U32Array

    @property
    def n_events(self) -> int:
        """Number of events, stored and removed."""
        return len(self.ev_kind)

    @property
    def n_blocks(self) -> int:
        """Number of blocks in all events, stored and removed."""
        return len(self.blk_seq)

    @property
    def first_removal(self) -> int:
        """Index of the first removal, from which on a workload of evictions is timed."""
        removed = np.flatnonzero(self.ev_kind == REMOVED)
        return int(removed[0]) if len(removed) else self.n_events

    def queries(self) -> list[U64Array]:
        """Local hashes of each query, each an array of its own."""
        offsets = self.q_off.tolist()
        return [self.q_local[a:b].copy() for a, b in pairwise(offsets)]

    def live(self) -> npt.NDArray[np.int64]:
        """Positions in blk_seq of the stored blocks that are held after the last event, in the order of the file."""
        offset = self.ev_off.astype(np.int64)
        n_blocks = offset[1:] - offset[:-1]
        rank = np.repeat(self.ev_worker, n_blocks)
        stored = np.repeat(self.ev_kind == STORED, n_blocks)
        # A rank holds a block if its last event for the block is a store. lexsort is stable, so it keeps the order of
        # events.
        order = np.lexsort((self.blk_seq, rank))
        last = np.ones(len(order), dtype=bool)
        last[:-1] = (rank[order][1:] != rank[order][:-1]) | (self.blk_seq[order][1:] != self.blk_seq[order][:-1])
        kept = order[last]
        return np.sort(kept[stored[kept]])


# --- hashes ---------------------------------------------------------------------------------------------------------


def block_hashes(tokens: U32Array) -> list[int]:
    """Hash blocks of tokens. tokens: uint32[n_blocks, block_size]; returns n_blocks local hashes."""
    raw = memoryview(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
    width = tokens.shape[1] * 4
    digest = xxhash.xxh3_64_intdigest
    return [digest(raw[at : at + width], BASE_SEED) for at in range(0, len(raw), width)]


def chain(local: Iterable[int], parent: int | None = None) -> list[int]:
    """Chain local hashes into sequence hashes, from the root or from `parent`."""
    digest, pack = xxhash.xxh3_64_intdigest, _PAIR.pack
    chained: list[int] = []
    for own in local:
        parent = own if parent is None else digest(pack(parent, own), BASE_SEED)
        chained.append(parent)
    return chained


class _Blocks:
    """Distinct blocks of random tokens, generated on demand and identified by their numbers."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.Philox(seed))
        self._tokens: list[U32Array] = []
        self._local: list[int] = []

    def make(self, n: int) -> list[int]:
        """Generate n blocks; returns their numbers."""
        first = len(self._local)
        tokens = self._rng.integers(0, VOCABULARY, (n, BLOCK_SIZE), dtype=np.uint32)
        self._tokens.append(tokens)
        self._local.extend(block_hashes(tokens))
        return list(range(first, first + n))

    def hashes(self, blocks: Iterable[int]) -> list[int]:
        """Local hashes of these blocks."""
        return [self._local[block] for block in blocks]

    def tokens(self, sequences: Iterable[Sequence[int]]) -> U32Array:
        """Tokens of sequences of equal length, one row each."""
        made = np.concatenate(self._tokens)
        return np.stack([made[list(blocks)].reshape(-1) for blocks in sequences])


#: Result of a generator: events, queries, tokens of the first queries, and the fields of Facts about the caches.
Made = tuple[list[Event], list[Query], U32Array | None, dict[str, int]]


# --- one rank's cache -----------------------------------------------------------------------------------------------


class _Cache:
    """Prefix cache of one rank. The tail of a sequence is evicted first, as in engines."""

    __slots__ = ("capacity_blocks", "held", "rank")

    def __init__(self, rank: int, capacity_blocks: int) -> None:
        self.rank, self.capacity_blocks = rank, capacity_blocks
        self.held: OrderedDict[int, None] = OrderedDict()

    def serve(self, local: Sequence[int], sequence: Sequence[int], events: list[Event]) -> int:
        """Serve one request: store missing blocks, then evict. Returns the number of stored blocks."""
        held, n = self.held, len(sequence)
        matched = 0
        while matched < n and sequence[matched] in held:
            matched += 1
        if matched < n:
            parent = sequence[matched - 1] if matched else 0
            events.append(Event(self.rank, STORED, parent, local[matched:], sequence[matched:]))
        held.update(dict.fromkeys(sequence[matched:]))
        self.touch(sequence)
        self.evict(events)
        return n - matched

    def touch(self, sequence: Sequence[int]) -> None:
        """Mark held blocks of a sequence as used now, its tail as the least recent of them."""
        for block in reversed(sequence):
            self.held.move_to_end(block)

    def evict(self, events: list[Event], n_event_blocks: int | None = None) -> None:
        """Remove the least recent blocks over capacity, in one event or in events of `n_event_blocks` blocks."""
        over = len(self.held) - self.capacity_blocks
        if over <= 0:
            return
        gone = [self.held.popitem(last=False)[0] for _ in range(over)]
        width = n_event_blocks or over
        events.extend(Event(self.rank, REMOVED, 0, (), gone[at : at + width]) for at in range(0, over, width))


# --- generators -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Conversation:
    """Turns of one conversation; each adds a quarter of the part after the system prompt."""

    blocks: list[int]
    local: list[int]
    sequence: list[int]
    ends: list[int]  # blocks at the end of each turn
    home: int  # the rank that serves most turns
    turn: int = 0


N_FAMILIES = 32  # system prompts
N_TURNS = 4
N_TOKEN_QUERIES = 64


def synthetic(
    n_ranks: int,
    depth: int,
    *,
    total_entries: int = 1_000_000,
    stored_blocks: int = 1_300_000,
    n_queries: int = 2_000,
) -> Made:
    """Generate conversations of `depth` blocks over system prompts with Zipf weights, and a hot sequence on every rank.

    total_entries: capacity of all ranks together. Four of five turns go to the conversation's home rank, and one to a
    random rank. Each QueryClass has a fifth of the queries.
    """
    draw = random.Random(SEED * 1_000_003 + n_ranks * 4096 + depth)
    blocks = _Blocks(SEED + n_ranks * 7919 + depth)
    caches = [_Cache(rank, max(total_entries // n_ranks, 2 * depth)) for rank in range(n_ranks)]
    system_blocks = max(depth // 8, 4)
    families = [blocks.make(system_blocks + draw.randrange(system_blocks)) for _ in range(N_FAMILIES)]
    weights = [1 / (at + 1) for at in range(N_FAMILIES)]
    hot = blocks.make(depth)
    hot_local = blocks.hashes(hot)
    hot_sequence = chain(hot_local)

    def fresh() -> tuple[int, list[int], list[int], list[int]]:
        family = draw.choices(families, weights)[0]
        numbers = family + blocks.make(depth - len(family))
        local = blocks.hashes(numbers)
        return len(family), numbers, local, chain(local)

    def begin() -> _Conversation:
        shared, numbers, local, sequence = fresh()
        ends = [shared + (depth - shared) * (turn + 1) // N_TURNS for turn in range(N_TURNS)]
        return _Conversation(numbers, local, sequence, ends, draw.randrange(n_ranks))

    events: list[Event] = []
    active: list[_Conversation] = []
    done: list[_Conversation] = []
    n_active = max(8, min(4096, total_entries // (2 * depth)))
    stored = requests = 0
    while stored < stored_blocks:
        if len(active) < n_active or draw.random() < 0.15:
            active.append(begin())
        at = draw.randrange(len(active))
        talk = active[at]
        rank = talk.home if draw.random() < 0.8 else draw.randrange(n_ranks)
        end = talk.ends[talk.turn]
        stored += caches[rank].serve(talk.local[:end], talk.sequence[:end], events)
        requests += 1
        talk.turn += 1
        if talk.turn == N_TURNS:
            done.append(talk)
            active[at] = active[-1]
            active.pop()
    for cache in caches:  # last, so that all of them hold it
        end = draw.randint(depth // 4, depth)
        cache.serve(hot_local[:end], hot_sequence[:end], events)

    recent = done[-max(16, len(done) // 4) :] or active
    asked: list[tuple[Query, list[int]]] = []
    for number in range(n_queries):
        kind = QueryClass(number % len(QueryClass))
        if kind is QueryClass.HOT:
            asked.append((Query(kind, hot_local, hot_sequence), hot))
        elif kind is QueryClass.SYSTEM_PROMPT:
            _, numbers, local, sequence = fresh()
            asked.append((Query(kind, local, sequence), numbers))
        elif kind is QueryClass.MISS:
            numbers = blocks.make(depth)
            local = blocks.hashes(numbers)
            asked.append((Query(kind, local, chain(local)), numbers))
        else:
            talk = draw.choice(recent if kind is QueryClass.SERVED else active)
            asked.append((Query(kind, talk.local, talk.sequence), talk.blocks))
    draw.shuffle(asked)
    tokens = blocks.tokens(numbers for _, numbers in asked[:N_TOKEN_QUERIES])
    return events, [query for query, _ in asked], tokens, _held(caches, requests)


#: Sequences that decode at once on a rank, their greatest length, and the steps after which a running one is marked as
#: used.
N_RUNNING = 16
DECODE_PROMPT_BLOCKS_MAX = 8 + 48
DECODE_GROWTH_BLOCKS_MAX = 256
TOUCH_STEPS = 64
#: Capacity that keeps running sequences from being evicted, as in an engine: they must fit together with the blocks
#: stored since they were last marked as used.
DECODE_CAPACITY_BLOCKS_MIN = N_RUNNING * (DECODE_PROMPT_BLOCKS_MAX + DECODE_GROWTH_BLOCKS_MAX + TOUCH_STEPS)


@dataclass(slots=True)
class _Running:
    """A sequence that grows. n_blocks: its current length."""

    local: list[int]
    sequence: list[int]
    n_blocks: int


def decode(
    n_ranks: int,
    *,
    total_entries: int = 500_000,
    stored_blocks: int = 900_000,
    n_queries: int = 2_000,
) -> Made:
    """Generate sequences that grow by one block per event, like decoding, 16 at a time on each rank.

    A sequence starts with one event for its prompt, 16 to 48 blocks after one of 32 system prompts of 8 blocks, and
    grows by 64 to 256 blocks. Blocks over capacity are evicted tail first, one per event. Queries are recent, complete
    sequences.
    """
    draw = random.Random(SEED * 31 + n_ranks)
    blocks = _Blocks(SEED * 31 + n_ranks)
    caches = [_Cache(rank, max(total_entries // n_ranks, DECODE_CAPACITY_BLOCKS_MIN)) for rank in range(n_ranks)]
    families = [blocks.make(8) for _ in range(N_FAMILIES)]
    events: list[Event] = []
    recent: list[_Running] = []
    running: list[list[_Running]] = [[] for _ in caches]
    stored = requests = step = 0
    while stored < stored_blocks:
        step += 1
        for cache, sequences in zip(caches, running, strict=True):
            if len(sequences) < N_RUNNING:
                numbers = draw.choice(families) + blocks.make(draw.randint(16, 48))
                prompt = len(numbers)
                local = blocks.hashes(numbers + blocks.make(draw.randint(64, DECODE_GROWTH_BLOCKS_MAX)))
                begun = _Running(local, chain(local), prompt)
                stored += cache.serve(local[:prompt], begun.sequence[:prompt], events)
                sequences.append(begun)
                requests += 1
            for grown in sequences:
                n = grown.n_blocks
                parent, block = grown.sequence[n - 1], grown.sequence[n]
                events.append(Event(cache.rank, STORED, parent, (grown.local[n],), (block,)))
                cache.held[block] = None
                grown.n_blocks += 1
            stored += len(sequences)
            ended = [grown for grown in sequences if grown.n_blocks == len(grown.sequence)]
            for grown in sequences if step % TOUCH_STEPS == 0 else ended:
                cache.touch(grown.sequence[: grown.n_blocks])
            recent += ended
            sequences[:] = [grown for grown in sequences if grown.n_blocks < len(grown.sequence)]
            cache.evict(events, n_event_blocks=1)
    recent = recent[-2 * n_queries :]
    asked = [draw.choice(recent) for _ in range(n_queries)]
    queries = [Query(QueryClass.SERVED, grown.local, grown.sequence) for grown in asked]
    return events, queries, None, _held(caches, requests)


def mooncake(trace: Path, n_ranks: int, *, total_entries: int = 4_000_000, limit: int | None = None) -> Made:
    """Replay a Mooncake trace: each request is first a query and is then served by the rank with the longest match.

    A hash id stands for 512 tokens, that is 32 blocks. If several ranks match equally, the one that served least serves
    the request; it also replaces a rank that has served 1.3 times its share.
    """
    blocks_of_id = TRACE_BLOCK_TOKENS // BLOCK_SIZE
    caches = [_Cache(rank, total_entries // n_ranks) for rank in range(n_ranks)]
    served = [0] * n_ranks
    digest, pack = xxhash.xxh3_64_intdigest, _PAIR.pack
    local_of: dict[int, list[int]] = {}
    sequence_of: dict[tuple[int | None, int], list[int]] = {}
    events: list[Event] = []
    queries: list[Query] = []
    for number, line in enumerate(trace.read_text().splitlines()):
        if limit is not None and number >= limit:
            break
        request = json.loads(line)
        local: list[int] = []
        sequence: list[int] = []
        for hash_id in request["hash_ids"]:
            own = local_of.get(hash_id)
            if own is None:
                own = local_of[hash_id] = [digest(pack(hash_id, at), BASE_SEED) for at in range(blocks_of_id)]
            before = sequence[-1] if sequence else None
            chained = sequence_of.get((before, hash_id))
            if chained is None:
                chained = sequence_of[before, hash_id] = chain(own, before)
            local += own
            sequence += chained
        n = min(len(local), request["input_length"] // BLOCK_SIZE)
        if not n:
            continue
        del local[n:], sequence[n:]
        queries.append(Query(QueryClass.SERVED, local, sequence))
        depths = [_matched(cache, sequence) for cache in caches]
        most = max(depths)
        rank = min((at for at in range(n_ranks) if depths[at] == most), key=served.__getitem__)
        if served[rank] > 1.3 * sum(served) / n_ranks + 50_000:
            rank = min(range(n_ranks), key=served.__getitem__)
        served[rank] += n
        caches[rank].serve(local, sequence, events)
    return events, queries, None, _held(caches, len(queries))


def long_runs(n_runs: int, n_event_blocks: int, *, evict: bool) -> Made:
    """Generate runs of 2,048 blocks on one rank, stored by events of `n_event_blocks` blocks.

    evict: then remove one random block of each run, neither its first nor its last, in random order and one per event.
    """
    depth = 2048
    draw = random.Random(SEED * 67 + n_runs)
    rng = np.random.Generator(np.random.Philox(SEED * 67 + n_runs))
    cache = _Cache(0, n_runs * depth)
    events: list[Event] = []
    queries: list[Query] = []
    middles: list[int] = []
    for _ in range(n_runs):
        # These hashes are only compared with themselves, so random numbers suffice.
        local = rng.integers(1, 1 << 63, depth, dtype=np.uint64).tolist()
        sequence = rng.integers(1, 1 << 63, depth, dtype=np.uint64).tolist()
        for at in range(0, depth, n_event_blocks):
            parent = sequence[at - 1] if at else 0
            end = at + n_event_blocks
            events.append(Event(0, STORED, parent, local[at:end], sequence[at:end]))
        cache.held.update(dict.fromkeys(sequence))
        middles.append(sequence[draw.randrange(1, depth - 1)])
        if len(queries) < 100:
            queries.append(Query(QueryClass.SERVED, local, sequence))
    if evict:
        draw.shuffle(middles)
        for block in middles:
            events.append(Event(0, REMOVED, 0, (), (block,)))
            del cache.held[block]
    return events, queries, None, _held([cache], n_runs)


def _matched(cache: _Cache, sequence: Sequence[int]) -> int:
    """Count leading blocks held. A cache that evicts tails first has no holes, so binary search is exact."""
    low, high = 0, len(sequence)
    while low < high:
        middle = (low + high + 1) // 2
        if sequence[middle - 1] in cache.held:
            low = middle
        else:
            high = middle - 1
    return low


def _held(caches: Sequence[_Cache], requests: int) -> dict[str, int]:
    return {
        "live_entries": sum(len(cache.held) for cache in caches),
        "distinct_live": len(set().union(*[cache.held.keys() for cache in caches])),
        "requests": requests,
    }


# --- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to generate the workload of one file, and the cases that use it.

    needs_trace: it is generated from a Mooncake trace.
    """

    name: str
    n_ranks: int
    depth: int
    make: Callable[[Path | None], Made]
    cases: tuple[str, ...]
    needs_trace: bool = False


#: Cases measured with each workload of prefixes, and cases for which one fleet size is enough.
PREFIX_CASES = ("apply", "match", "memory")
ONE_FLEET_CASES = ("tokens", "writer")


def _synthetic(name: str, n_ranks: int, depth: int, small: bool = False) -> Recipe:
    sizes = {"total_entries": 20_000, "stored_blocks": 30_000, "n_queries": 200} if small else {}
    cases = PREFIX_CASES + (ONE_FLEET_CASES if small or n_ranks == 64 else ())
    return Recipe(name, n_ranks, depth, lambda _: synthetic(n_ranks, depth, **sizes), cases)


def _trace(name: str, n_ranks: int, small: bool = False) -> Recipe:
    def make(trace: Path | None) -> Made:
        assert trace is not None  # without a trace, callers skip recipes that need one
        return mooncake(trace, n_ranks, limit=300 if small else None)

    return Recipe(name, n_ranks, 0, make, PREFIX_CASES, needs_trace=True)


#: The files of a full run, and the small ones of a quick run, in the order in which they are measured.
RECIPES: tuple[Recipe, ...] = (
    *(_synthetic(f"synth_w{w}_d{d}", w, d) for d in (128, 2048) for w in (8, 64, 256)),
    _synthetic("synth_w1024_d128", 1024, 128),
    _synthetic("synth_w4096_d128", 4096, 128),
    Recipe("decode_w64", 64, 0, lambda _: decode(64), PREFIX_CASES),
    _trace("moon_conv_w64", 64),
    Recipe("evict_w1_d2048", 1, 2048, lambda _: long_runs(1024, 2048, evict=True), ("evict",)),
    Recipe("grow_w1_d2048", 1, 2048, lambda _: long_runs(489, 16, evict=False), ("pause",)),
)
QUICK_RECIPES: tuple[Recipe, ...] = (
    _synthetic("quick_synth_w8_d128", 8, 128, small=True),
    _synthetic("quick_synth_w64_d2048", 64, 2048, small=True),
    Recipe(
        "quick_decode_w2", 2, 0, lambda _: decode(2, total_entries=0, stored_blocks=20_000, n_queries=200), PREFIX_CASES
    ),
    _trace("quick_moon_conv_w8", 8, small=True),
    Recipe("quick_evict_w1_d2048", 1, 2048, lambda _: long_runs(64, 2048, evict=True), ("evict",)),
    Recipe("quick_grow_w1_d2048", 1, 2048, lambda _: long_runs(32, 16, evict=False), ("pause",)),
)


def ensure(recipe: Recipe, directory: Path, trace: Path | None) -> Path:
    """Generate the file of a recipe unless there is one of this version; returns its path.

    Both files are put in place only when complete, since another run may be reading in the same directory.
    """
    path = directory / f"{recipe.name}.kvwl"
    if path.exists() and _read_facts(path) is not None:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    events, queries, tokens, held = recipe.make(trace)
    facts = Facts(
        generator_version=GENERATOR_VERSION,
        **held,
        events=len(events),
        stored_blocks=sum(len(event.sequence) for event in events if event.kind == STORED),
        removed_blocks=sum(len(event.sequence) for event in events if event.kind == REMOVED),
        queries=len(queries),
    )
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as out:
        out.write(MAGIC)
        for column in _columns(recipe, events, queries, tokens):
            raw = column.tobytes()
            out.write(raw)
            out.write(b"\0" * (-len(raw) % _ALIGN))
    part.replace(path)
    part.write_text(json.dumps(asdict(facts)))
    part.replace(_facts_path(path))
    return path


def load(path: Path) -> Workload:
    """Read a workload into memory. Raises ValueError if the file is not KVWL v1."""
    raw = np.fromfile(path, dtype=np.uint8)
    if raw[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError(f"{path} is not a KVWL v1 file")
    at = len(MAGIC)
    n_ranks, depth, block_size, n_events, n_blocks, n_queries, n_query_blocks, n_tokens = _HEAD.unpack(
        raw[at : at + _HEAD.size].tobytes()
    )
    at += _HEAD.size

    def u32(n: int) -> U32Array:
        nonlocal at
        taken = raw[at : at + 4 * n].view(np.uint32).copy()
        at += 4 * n + (-4 * n) % _ALIGN
        return taken

    def u64(n: int) -> U64Array:
        nonlocal at
        taken = raw[at : at + 8 * n].view(np.uint64).copy()
        at += 8 * n
        return taken

    return Workload(
        name=path.stem,
        n_ranks=n_ranks,
        depth=depth,
        block_size=block_size,
        facts=_read_facts(path) or Facts(GENERATOR_VERSION, 0, 0, 0, n_events, 0, 0, n_queries),
        ev_worker=u32(n_events),
        ev_kind=u32(n_events),
        ev_parent=u64(n_events),
        ev_off=u64(n_events + 1),
        blk_local=u64(n_blocks),
        blk_seq=u64(n_blocks),
        q_class=u32(n_queries),
        q_off=u64(n_queries + 1),
        q_local=u64(n_query_blocks),
        q_seq=u64(n_query_blocks),
        tokens=u32(n_tokens * depth * block_size).reshape(n_tokens, depth * block_size),
    )


def _columns(
    recipe: Recipe, events: Sequence[Event], queries: Sequence[Query], tokens: U32Array | None
) -> list[npt.NDArray[np.unsignedinteger]]:
    """Header and arrays of the file, in their order."""
    n_blocks = sum(len(event.sequence) for event in events)
    n_query_blocks = sum(len(query.local) for query in queries)
    n_tokens = 0 if tokens is None else len(tokens)
    head = (recipe.n_ranks, recipe.depth, BLOCK_SIZE, len(events), n_blocks, len(queries), n_query_blocks, n_tokens)
    local = np.zeros(n_blocks, dtype=np.uint64)
    sequence = np.zeros(n_blocks, dtype=np.uint64)
    offset = np.zeros(len(events) + 1, dtype=np.uint64)
    at = 0
    for number, event in enumerate(events):
        end = at + len(event.sequence)
        if event.kind == STORED:
            local[at:end] = event.local
        sequence[at:end] = event.sequence
        offset[number + 1] = at = end
    query_offset = np.zeros(len(queries) + 1, dtype=np.uint64)
    query_offset[1:] = np.cumsum([len(query.local) for query in queries])
    columns: list[npt.NDArray[np.unsignedinteger]] = [
        np.array(head, dtype=np.uint64),
        np.fromiter((event.rank for event in events), np.uint32, len(events)),
        np.fromiter((event.kind for event in events), np.uint32, len(events)),
        np.fromiter((event.parent for event in events), np.uint64, len(events)),
        offset,
        local,
        sequence,
        np.fromiter((query.kind for query in queries), np.uint32, len(queries)),
        query_offset,
        np.fromiter((block for query in queries for block in query.local), np.uint64, n_query_blocks),
        np.fromiter((block for query in queries for block in query.sequence), np.uint64, n_query_blocks),
    ]
    return columns if tokens is None else [*columns, tokens]


def _facts_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _read_facts(path: Path) -> Facts | None:
    """Read the summary of a workload; None if it is missing or from another version."""
    try:
        facts = Facts(**json.loads(_facts_path(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return facts if facts.generator_version == GENERATOR_VERSION else None

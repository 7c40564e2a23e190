"""The brute-force reference of a fleet: sets, one block at a time, with hashes of its own; and histories of batches.

What lives here: what a fleet holds after some batches, written as simply as possible (`ReferenceFleet`), and seeded
histories with common and adversarial events (`random_history`). What must not: the reference of an index
(reference_index); any code under test except the events and ids that it takes, so no hashing, runs or index.

The rules of docs/architecture.md, as sets:
- A batch of an older incarnation or of a removed worker is stale. A sequence number that was applied is a duplicate,
  which changes nothing, except that it may say that the feed is not live.
- A newer incarnation ends everything older. `cleared` removes everything of its rank.
- A store whose parent the rank does not hold is rejected.
- Within a rank and tier, a block has one engine name and a name has one block; the later store wins.
- A restatement replaces a rank's blocks when its last chunk directly follows the others.
- A worker whose ranks are all silent is expired by a record that states the last sequence number of the rank it names.
- A heartbeat ends a silence, and reveals missing batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np
import xxhash

from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Body,
    EngineBatch,
    EngineEvents,
    FeedState,
    Heartbeat,
    KvEvent,
    MoeLabels,
    RestatedRun,
    RestatementChunk,
    WorkerRemoved,
)
from streams.core.ids import DpRank, EngineHash, Epoch, HashArray, Incarnation, RankId, SequenceHash, Tier, WorkerId

Member = tuple[RankId, Tier, int]
Names = dict[tuple[Tier, int], int]

#: Seed of the chain; see docs/architecture.md, Hashes.
CHAIN_SEED = 1337


def chain_hash(parent: int | None, local: int) -> int:
    """Sequence hash of a block, as defined in docs/architecture.md, Hashes."""
    if parent is None:
        return local
    return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + local.to_bytes(8, "little"), CHAIN_SEED)


def chain_hashes(local: Iterable[int], parent: int | None = None) -> list[int]:
    """Sequence hashes of consecutive blocks."""
    chain: list[int] = []
    for one in local:
        parent = chain_hash(parent, one)
        chain.append(parent)
    return chain


@dataclass(frozen=True)
class Silence:
    """An input that is not a record: the partition owner finds that a rank's lease has expired."""

    rank: RankId


ReferenceInput = EngineBatch | Silence


@dataclass
class ReferenceRank:
    """State of one rank. facts: (tier, sequence hash) to engine hash; names: the reverse.

    lossy: data is missing that only a clear, a new incarnation or a complete restatement repairs. parked: chunks of an
    incomplete restatement.
    """

    epoch: Epoch = field(default_factory=lambda: Epoch(Incarnation(0), 0))
    sequence: int = BEFORE_FIRST
    removed: bool = False
    lossy: bool = False
    silent: bool = False
    feed: FeedState = FeedState.LIVE
    parked: list[EngineBatch] = field(default_factory=list)
    n_unknown_parents: int = 0
    facts: dict[tuple[Tier, int], int] = field(default_factory=dict)
    names: Names = field(default_factory=dict)

    def begin(self, epoch: Epoch) -> None:
        """Start a new epoch: nothing older is held, and batches are numbered from the start again."""
        self.epoch = epoch
        self.sequence = BEFORE_FIRST
        self.lossy = self.silent = self.removed = False
        self.parked.clear()
        self.facts.clear()
        self.names.clear()

    def apply(self, event: KvEvent) -> None:
        """Apply the next event."""
        if isinstance(event, AllBlocksCleared):
            sequence = self.sequence
            self.begin(Epoch(self.epoch.incarnation, self.epoch.generation + 1))
            self.sequence = sequence
        elif isinstance(event, BlocksRemoved):
            for engine in event.engine.tolist():
                block = self.names.pop((event.tier, engine), None)
                if block is not None:
                    del self.facts[event.tier, block]
        else:
            self.store(event)

    def store(self, event: BlocksStored) -> None:
        """Attach blocks to a parent that the rank holds, preferably in the same tier; reject them otherwise."""
        parent: int | None = None
        if event.parent is not None:
            found = [self.names.get((tier, event.parent)) for tier in (event.tier, *Tier)]
            parent = next((block for block in found if block is not None), None)
            if parent is None:
                self.n_unknown_parents += 1
                self.lossy = True
                return
        for engine, block in zip(event.engine.tolist(), chain_hashes(event.local.tolist(), parent), strict=True):
            self.hold(event.tier, engine, block)

    def hold(self, tier: Tier, engine: int, block: int) -> None:
        """Hold a block under a name; the block that had this name, and the block's older name, are dropped."""
        moved = self.names.pop((tier, engine), None)
        if moved is not None:
            del self.facts[tier, moved]
        older = self.facts.pop((tier, block), None)
        if older is not None:
            del self.names[tier, older]
        self.names[tier, engine] = block
        self.facts[tier, block] = engine


class ReferenceFleet:
    """The state of all ranks, updated one batch at a time."""

    def __init__(self) -> None:
        self.ranks: dict[RankId, ReferenceRank] = {}

    def apply(self, record: ReferenceInput) -> str:
        """Apply a batch; returns its verdict, by the name under which agents count it."""
        if isinstance(record, Silence):
            self.ranks[record.rank].silent = True
            return "silent"
        match record.body:
            case WorkerRemoved():
                if record.body.seen_sequence is None:
                    return self.remove_worker(record.rank.worker_id, record.incarnation)
                return self.expire_worker(record, record.body.seen_sequence)
            case Heartbeat():
                return self.renew(self._rank(record.rank), record)
            case RestatementChunk():
                return self.restate(self._rank(record.rank), record, record.body)
            case EngineEvents():
                return self.apply_events(self._rank(record.rank), record, record.body.events)
            case _:
                assert_never(record.body)

    def _rank(self, rank: RankId) -> ReferenceRank:
        """State of a rank, created by its first record."""
        return self.ranks.setdefault(rank, ReferenceRank())

    def begins(self, rank: ReferenceRank, batch: EngineBatch) -> bool | None:
        """Whether a batch starts an incarnation; None if it belongs to an older one."""
        same = batch.incarnation == rank.epoch.incarnation
        if same and not rank.removed:
            return False
        if same and batch.sequence == BEFORE_FIRST:
            rank.begin(Epoch(batch.incarnation, rank.epoch.generation + 1))
        elif batch.incarnation > rank.epoch.incarnation:
            rank.begin(Epoch(batch.incarnation, 0))
        else:
            return None
        return True

    def apply_events(self, rank: ReferenceRank, batch: EngineBatch, events: Iterable[KvEvent]) -> str:
        """Apply an ordinary batch."""
        begins = self.begins(rank, batch)
        if begins is None:
            return "stale"
        if not begins and batch.sequence <= rank.sequence:
            rank.feed = batch.feed or rank.feed
            return "duplicate"
        gap = batch.sequence > rank.sequence + 1 or batch.incomplete
        rank.sequence, rank.lossy, rank.silent = batch.sequence, rank.lossy or gap, False
        rank.feed = batch.feed
        rank.parked.clear()
        for event in events:
            rank.apply(event)
        rank.lossy = rank.lossy or batch.incomplete  # what is missing may have followed a clear
        return "gap" if gap else "applied"

    def renew(self, rank: ReferenceRank, batch: EngineBatch) -> str:
        """Apply a heartbeat."""
        missing = batch.sequence > rank.sequence
        if rank.removed and batch.incarnation == rank.epoch.incarnation:
            if not rank.silent:
                return "stale"
            sequence = rank.sequence
            rank.begin(Epoch(batch.incarnation, rank.epoch.generation + 1))
            rank.sequence, missing = sequence, batch.sequence > BEFORE_FIRST
        else:
            begins = self.begins(rank, batch)
            if begins is None:
                return "stale"
            missing = batch.sequence > rank.sequence
        rank.silent, rank.feed = False, batch.feed
        if not missing or rank.lossy:
            return "renewed"
        rank.lossy = True
        return "gap"

    def restate(self, rank: ReferenceRank, batch: EngineBatch, chunk: RestatementChunk) -> str:
        """Apply a chunk of a restatement."""
        begins = self.begins(rank, batch)
        if begins is None:
            return "stale"
        if begins:
            rank.lossy = True
        elif batch.sequence < rank.sequence:
            rank.feed = batch.feed or rank.feed
            return "duplicate"
        rank.silent, rank.feed = False, batch.feed
        ids = {(each.body.restatement_id, each.sequence) for each in rank.parked}  # type: ignore[union-attr]
        if len(rank.parked) != chunk.chunk or not ids <= {(chunk.restatement_id, batch.sequence)}:
            rank.parked.clear()
            if chunk.chunk:
                return "dropped"
        rank.parked.append(batch)
        if len(rank.parked) < chunk.n_chunks:
            return "parked"
        runs = [run for each in rank.parked for run in each.body.runs]  # type: ignore[union-attr]
        rank.begin(Epoch(rank.epoch.incarnation, rank.epoch.generation + 1))
        rank.sequence, rank.lossy = batch.sequence, not chunk.exact
        for run in sorted(runs, key=lambda run: run.start):
            for engine, block in zip(run.engine.tolist(), chain_hashes(run.local.tolist(), run.parent), strict=True):
                rank.hold(run.tier, engine, block)
        return "restated"

    def remove_worker(self, worker_id: WorkerId, incarnation: Incarnation, silent: bool = False) -> str:
        """Remove a worker: end the incarnation of all of its ranks that have no newer one."""
        verdict = "stale"
        for rank_id, rank in self.ranks.items():
            if rank_id.worker_id != worker_id or rank.epoch.incarnation > incarnation:
                continue
            if rank.epoch.incarnation < incarnation or not rank.removed:
                sequence = rank.sequence
                rank.begin(Epoch(incarnation, rank.epoch.generation + 1))
                rank.sequence, rank.removed, rank.silent = sequence, True, silent
                verdict = "applied"
            elif rank.silent and not silent:
                rank.silent = False
                verdict = "applied"
        return verdict

    def expire_worker(self, batch: EngineBatch, seen: int | None) -> str:
        """Remove a silent worker, unless one of its ranks has been heard from."""
        for rank_id, rank in self.ranks.items():
            if rank_id.worker_id != batch.rank.worker_id or rank.removed:
                continue
            moved = rank_id == batch.rank and rank.sequence != seen
            if not rank.silent or moved or rank.epoch.incarnation > batch.incarnation:
                return "stale"
        return self.remove_worker(batch.rank.worker_id, batch.incarnation, silent=True)

    def members(self) -> set[Member]:
        """All facts."""
        return {(rank_id, tier, block) for rank_id, rank in self.ranks.items() for tier, block in rank.facts}

    def epochs(self) -> dict[RankId, Epoch]:
        """Epoch of every rank that ever sent a record."""
        return {rank_id: rank.epoch for rank_id, rank in self.ranks.items()}

    def overlap(self, local: Iterable[int]) -> dict[RankId, int]:
        """Number of leading blocks of a request that each rank holds in any tier; ranks with none are absent."""
        return overlap_of(self.members(), local)


def overlap_of(members: set[Member], local: Iterable[int]) -> dict[RankId, int]:
    """Number of leading blocks of a request that each rank holds in any tier, counted one by one from the facts."""
    chain = chain_hashes(local)
    held = {(rank, block) for rank, _, block in members}
    scores: dict[RankId, int] = {}
    for rank in {rank for rank, _ in held}:
        count = 0
        while count < len(chain) and (rank, chain[count]) in held:
            count += 1
        if count:
            scores[rank] = count
    return scores


@dataclass(frozen=True)
class _Node:
    """A block of a prompt, with its position in the tree of all prompts."""

    local: int
    block: int
    path: tuple[int, ...]  # local hashes from the root to this block


class _Engine:
    """One rank that generates events, with access to the reference's state of what it has sent."""

    def __init__(self, rng: random.Random, rank: RankId, fleet: ReferenceFleet, prompts: list[list[int]]) -> None:
        self._rng = rng
        self._prompts = prompts
        self._fleet = fleet
        self._nodes: dict[int, _Node] = {}  # every block that it ever stored, by sequence hash
        self.rank = rank
        self.worker_id = rank.worker_id
        self.incarnation = rng.randrange(1, 50)
        self.sequence = BEFORE_FIRST

    def path(self, block: int) -> tuple[int, ...]:
        """Local hashes from the root to a block that this rank stored; empty if a moved name put it elsewhere."""
        node = self._nodes.get(block)
        return node.path if node else ()

    def event(self, n_blocks_max: int) -> KvEvent:
        """Generate a new event."""
        held = self._fleet.ranks.get(self.rank, ReferenceRank()).names
        if len(held) > n_blocks_max:
            return self._removal(held, len(held) // 2)
        kinds: list[tuple[float, Callable[[Names], KvEvent]]] = [
            (28, self._prefix),
            (22, self._decode),
            (10, self._divergence),
            (14, lambda names: self._removal(names, self._rng.choice((1, 1, 2, 5, 20)))),
            (8, self._host_copy),
            (5, self._repeat),
            (5, self._second_name),
            (4, self._moved_name),
            (3, lambda _: self._orphan()),
            (2, lambda _: self._unknown_removal()),
            (1, lambda _: AllBlocksCleared()),
        ]
        (chosen,) = self._rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        return chosen(held)

    def _store(
        self, parent: int | None, engine: list[int], path: tuple[int, ...], local: list[int], tier: Tier = Tier.DEVICE
    ) -> BlocksStored:
        """Store blocks. path: local hashes of the blocks before the first."""
        chain = chain_hashes((*path, *local))
        for index in range(len(path), len(chain)):
            whole = (*path, *local)[: index + 1]
            self._nodes[chain[index]] = _Node(whole[-1], chain[index], whole)
        moe = MoeLabels(self._rng.randrange(3), self._rng.choice((None, 7)), None) if self._rng.random() < 0.1 else None
        return BlocksStored(None if parent is None else EngineHash(parent), u64(engine), u64(local), tier, moe)

    def _name(self, block: int, variant: int = 0) -> int:
        """An engine's name for a block: always the same within a rank, and different in each rank."""
        raw = repr((self.rank, block, variant)).encode()
        return xxhash.xxh3_64_intdigest(raw)

    def _pick(self, names: Names, tier: Tier) -> tuple[int, _Node] | None:
        """Choose a name in use in a tier, and its block."""
        mine = [(engine, block) for (where, engine), block in names.items() if where is tier]
        if not mine:
            return None
        engine, block = self._rng.choice(mine)
        return engine, self._nodes[block]

    def _prefix(self, names: Names) -> KvEvent:
        """Store the missing part of a shared prompt, after the last block that is held."""
        prompt = self._rng.choice(self._prompts)
        prompt = prompt[: self._rng.randint(1, len(prompt))]
        by_block = {block: engine for (tier, engine), block in names.items() if tier is Tier.DEVICE}
        chain = chain_hashes(prompt)
        n_held = 0
        while n_held < len(chain) and chain[n_held] in by_block:
            n_held += 1
        if n_held == len(chain):
            n_held = 0  # all of it is held: report it again
        parent = by_block[chain[n_held - 1]] if n_held else None
        return self._store(parent, [self._name(b) for b in chain[n_held:]], tuple(prompt[:n_held]), prompt[n_held:])

    def _decode(self, names: Names) -> KvEvent:
        """Store one block after one that is held, like a decoding request."""
        found = self._pick(names, Tier.DEVICE)
        if found is None:
            return self._prefix(names)
        parent, node = found
        local = self._rng.choice((self._rng.getrandbits(64), 1, 2))
        return self._store(parent, [self._name(chain_hash(node.block, local))], node.path, [local])

    def _divergence(self, names: Names) -> KvEvent:
        found = self._pick(names, Tier.DEVICE)
        if found is None:
            return self._prefix(names)
        parent, node = found
        local = [self._rng.getrandbits(64) for _ in range(self._rng.randint(1, 6))]
        return self._store(parent, [self._name(b) for b in chain_hashes(local, node.block)], node.path, local)

    def _host_copy(self, names: Names) -> KvEvent:
        """Copy a stretch of held blocks to a slower tier, or drop copies there."""
        tier = self._rng.choice((Tier.HOST, Tier.HOST, Tier.DISK))
        copies = [engine for (where, engine) in names if where is tier]
        found = self._pick(names, Tier.DEVICE)
        if copies and (found is None or self._rng.random() < 0.3):
            return BlocksRemoved(u64(self._rng.sample(copies, self._rng.randint(1, len(copies)))), tier)
        if found is None:
            return self._prefix(names)
        path = found[1].path
        chain = chain_hashes(path)
        first = self._rng.randrange(len(path))
        parent = self._name(chain[first - 1]) if first else None
        return self._store(parent, [self._name(b) for b in chain[first:]], path[:first], list(path[first:]), tier)

    def _repeat(self, names: Names) -> KvEvent:
        """Store the whole path to a held block again, from the root."""
        found = self._pick(names, Tier.DEVICE)
        if found is None:
            return self._prefix(names)
        path = found[1].path
        return self._store(None, [self._name(b) for b in chain_hashes(path)], (), list(path))

    def _second_name(self, names: Names) -> KvEvent:
        """Store a held path again under names that were never used before."""
        found = self._pick(names, Tier.DEVICE)
        if found is None:
            return self._prefix(names)
        path, variant = found[1].path, self._rng.getrandbits(32)
        return self._store(None, [self._name(b, variant) for b in chain_hashes(path)], (), list(path))

    def _moved_name(self, names: Names) -> KvEvent:
        """Give names in use to other blocks: to children of one that is held, or to a path from the root."""
        mine = [engine for (tier, engine) in names if tier is Tier.DEVICE]
        found = self._pick(names, Tier.DEVICE)
        if found is None:
            return self._prefix(names)
        parent, node = found
        n = self._rng.randint(1, 3)
        engine = [self._rng.choice(mine) for _ in range(n)]
        if self._rng.random() < 0.3:
            engine[0] = parent  # the parent's own name goes to its child
        if self._rng.random() < 0.5:
            return self._store(parent, engine, node.path, [self._rng.getrandbits(64) for _ in range(n)])
        local = self._rng.choice(self._prompts)[:n]
        return self._store(None, engine[: len(local)], (), local)

    def _orphan(self) -> KvEvent:
        local = [self._rng.getrandbits(64) for _ in range(self._rng.randint(1, 3))]
        return BlocksStored(EngineHash(self._rng.getrandbits(64)), u64([self._name(b) for b in local]), u64(local))

    def _unknown_removal(self) -> KvEvent:
        return BlocksRemoved(u64([self._rng.getrandbits(64)]), self._rng.choice(tuple(Tier)))

    def _removal(self, names: Names, n: int) -> KvEvent:
        """Remove some blocks of the device tier, in random order so that there are holes; sometimes all of them."""
        mine = [engine for (tier, engine) in names if tier is Tier.DEVICE]
        if self._rng.random() < 0.05:
            n = len(mine)
        return BlocksRemoved(u64(self._rng.sample(mine, min(n, len(mine)))))


def random_history(
    rng: random.Random,
    n_batches: int,
    n_ranks: int,
    *,
    model: str = "m",
    block_size: int = 16,
    n_blocks_max: int = 300,
    begins: bool = False,
    bridged: bool = False,
) -> list[EngineBatch]:
    """Generate a log of `n_batches` batches from `n_ranks` engines.

    Ranks share prompts, and each odd rank is the second rank of the worker of the even one before it. In addition to
    normal events there are gaps, batches delivered again, batches of an older incarnation, new incarnations, removed
    workers, and batches that arrive after the removal.

    n_blocks_max: a rank that holds more removes half of its blocks. begins: incarnations are announced by an empty
    batch before the first, which can also bring a removed worker back in the same incarnation; only their offsets
    distinguish such batches from repeated ones. bridged: also generate heartbeats and restatements, for which the same
    is true.
    """
    history = input_history(rng, n_batches, n_ranks, model, block_size, n_blocks_max, begins=begins, bridged=bridged)
    return [record for record in history if isinstance(record, EngineBatch)]


def input_history(
    rng: random.Random,
    n_batches: int,
    n_ranks: int,
    model: str = "m",
    block_size: int = 16,
    n_blocks_max: int = 300,
    *,
    begins: bool = False,
    bridged: bool = False,
    silences: bool = False,
) -> list[ReferenceInput]:
    """Like random_history. silences: ranks also fall silent, and silent workers are expired."""
    fleet = ReferenceFleet()
    prompts = random_prompts(rng)
    engines = [_Engine(rng, RankId(WorkerId(n // 2 + 1), DpRank(n % 2)), fleet, prompts) for n in range(n_ranks)]
    history: list[ReferenceInput] = []
    while len(history) < n_batches:
        engine = rng.choice(engines)
        inputs = _bridge(rng, engine, fleet, model, block_size, silences=silences) if bridged else []
        if inputs:
            for each in inputs:
                fleet.apply(each)
            history += inputs
            continue
        chance = rng.random()
        if chance < 0.04 and history:
            again = rng.choice(history[-40:])  # delivered again
            if isinstance(again, EngineBatch):
                history.append(again)
                fleet.apply(again)
            continue
        refused = fleet.ranks.get(engine.rank, ReferenceRank()).removed
        if chance < (0.4 if refused else 0.05):
            engine.incarnation += rng.randint(0 if begins and refused else 1, 3)
            engine.sequence = BEFORE_FIRST
            if begins:
                history.append(replace(_batch(engine, model, block_size, EngineEvents(())), sequence=BEFORE_FIRST))
                fleet.apply(history[-1])
                continue
        elif chance < 0.06:
            engine.sequence += rng.randint(1, 3)  # these batches are lost
        elif chance < 0.065 and all(each.rank in fleet.ranks for each in engines if each.worker_id == engine.worker_id):
            # Only workers whose ranks have all sent records, since the removal of an unknown rank has no effect.
            history.append(_batch(engine, model, block_size, WorkerRemoved("removed by a test")))
            fleet.apply(history[-1])
            for other in engines:
                # Most ranks return with a new incarnation; the others continue in the old one and are refused.
                if other.worker_id == engine.worker_id and rng.random() < 0.7:
                    other.incarnation = max(other.incarnation, engine.incarnation) + rng.randint(1, 3)
                    other.sequence = BEFORE_FIRST
            continue
        old = engine.incarnation > 1 and 0.065 <= chance < 0.08
        if not old:
            engine.sequence += 1
        batch = _batch(engine, model, block_size, EngineEvents(()))
        if old:
            batch = replace(batch, incarnation=Incarnation(engine.incarnation - 1))
        # Apply the sequence number first and then each event, so that an event can build on the previous one.
        accepted = fleet.apply(batch) in ("applied", "gap")
        events: list[KvEvent] = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 5))):
            events.append(engine.event(n_blocks_max))
            if accepted:
                fleet.ranks[engine.rank].apply(events[-1])
        if accepted and batch.incomplete:
            fleet.ranks[engine.rank].lossy = True
        history.append(replace(batch, body=EngineEvents(tuple(events))))
    return history


def _bridge(
    rng: random.Random, engine: _Engine, fleet: ReferenceFleet, model: str, block_size: int, *, silences: bool
) -> list[ReferenceInput]:
    """Inputs for a rank other than its batches: heartbeats, restatements, silences and expiries; mostly none."""
    rank = fleet.ranks.get(engine.rank)
    kind = rng.random()
    if rank is None or kind > 0.25:
        return []
    if kind < 0.08:
        heartbeat = _batch(engine, model, block_size, Heartbeat("b", rng.choice((1000, 1000, 3000))))
        last_published = max(engine.sequence + rng.choice((0, 0, 0, 0, 1)), BEFORE_FIRST)
        return [replace(heartbeat, sequence=last_published)]
    if kind < 0.16:
        return list(_restatement(rng, engine, rank, model, block_size))
    worker = {each: state for each, state in fleet.ranks.items() if each.worker_id == engine.worker_id}
    if not silences:
        return []
    if kind < 0.22:
        quiet = [each for each, state in worker.items() if not state.removed and rng.random() < 0.7]
        if rng.random() < 0.5:
            return [Silence(each) for each in quiet]
        expiry: list[ReferenceInput] = [Silence(each) for each, state in worker.items() if not state.removed]
        return [*expiry, _batch(engine, model, block_size, WorkerRemoved("silent", rank.sequence))]
    seen = rank.sequence + rng.choice((0, 0, 0, -1))
    return [_batch(engine, model, block_size, WorkerRemoved("silent", max(seen, BEFORE_FIRST)))]


def _restatement(
    rng: random.Random, engine: _Engine, rank: ReferenceRank, model: str, block_size: int
) -> Iterator[EngineBatch]:
    """Generate the chunks of a restatement of what is held, without some blocks; some chunks are lost or repeated."""
    runs: list[RestatedRun] = []
    open_ends: dict[tuple[Tier, int], int] = {}
    facts = [(len(engine.path(block)), tier, block, name) for (tier, block), name in rank.facts.items()]
    for _, tier, block, name in sorted(facts):
        path = engine.path(block)
        before = chain_hashes(path)[-2] if len(path) > 1 else None
        if not path or rng.random() < 0.05:
            continue
        at = open_ends.pop((tier, before), None) if before is not None else None
        if at is None or rng.random() < 0.1:
            parent = None if before is None else SequenceHash(before)
            runs.append(RestatedRun(len(path) - 1, parent, u64([name]), u64([path[-1]]), tier))
            at = len(runs) - 1
        else:
            run = runs[at]
            runs[at] = replace(
                run, engine=np.append(run.engine, np.uint64(name)), local=np.append(run.local, np.uint64(path[-1]))
            )
        open_ends[tier, block] = at
    rng.shuffle(runs)
    n_chunks = rng.choice((1, 2, 2, 3, 4))
    restatement_id, exact, lag = rng.getrandbits(64), rng.random() < 0.8, rng.choice((0, 0, 0, 0, -1))
    for number in range(n_chunks):
        chunk = RestatementChunk(restatement_id, number, n_chunks, exact, tuple(runs[number::n_chunks]))
        whole = replace(_batch(engine, model, block_size, chunk), sequence=max(engine.sequence + lag, 0))
        for _ in range(rng.choice((1,) * 20 + (0, 2))):
            yield whole
        if rng.random() < 0.05:
            yield replace(_batch(engine, model, block_size, Heartbeat("b", 1000)), sequence=max(engine.sequence, 0))
        if rng.random() < 0.02:
            return


def _batch(engine: _Engine, model: str, block_size: int, body: Body) -> EngineBatch:
    digest = xxhash.xxh3_64_intdigest(repr((engine.rank, engine.incarnation, engine.sequence)).encode())
    return EngineBatch(
        rank=engine.rank,
        model=model,
        block_size=block_size,
        incarnation=Incarnation(engine.incarnation),
        sequence=max(engine.sequence, 0),
        digest=digest,
        emitted_at_ms=0,
        body=body,
        incomplete=isinstance(body, EngineEvents) and digest % 64 == 0,
        feed=FeedState(digest // 64 % 16) if digest // 64 % 16 in tuple(FeedState) else FeedState.LIVE,
    )


def random_prompts(rng: random.Random) -> list[list[int]]:
    """Generate prompts that share prefixes, of up to 80 blocks, which need one to three run records."""
    prompts: list[list[int]] = []
    for _ in range(12):
        shared = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
        shared = shared[: rng.randint(0, len(shared))]
        prompts.append(shared + [rng.getrandbits(64) for _ in range(rng.choice((1, 3, 8, 31, 32, 33, 45)))])
        prompts[-1] = prompts[-1][:80]
    return prompts


def u64(values: list[int]) -> HashArray:
    return np.array(values, dtype=np.uint64)

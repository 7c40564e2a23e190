"""The plain reference: sets, one block at a time, with hashes of its own; and histories that engines might tell.

What lives here: what a fleet holds after some batches, said as simply as possible (`ReferenceFleet`), what an index
answers (`ReferenceIndex`), and seeded histories of both, realistic and nasty (`random_history`, `IndexHistory`). What
must not: anything of the code under test but the events and ids that go in; not its hashing, its runs or its index.

The rules of docs/architecture.md, as sets: a batch of an older life or of a removed worker is stale, a sequence number
applied already is a duplicate, a newer life ends everything older, `cleared` ends everything of that rank, a store
whose parent the rank does not hold is rejected. Within a rank and tier a block has one engine name and a name one
block; the later store wins. A restatement replaces a rank's blocks when its last chunk comes right behind the others; a
worker whose ranks are all silent is expired by a record that saw how far the named one had come; a heartbeat ends a
silence, and tells of what is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

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

#: Seed of the chain (docs/architecture.md, Hashes).
CHAIN_SEED = 1337


def chain_hash(parent: int | None, local: int) -> int:
    """Sequence hash of a block, straight from docs/architecture.md, Hashes."""
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
    """Not a record: the owner finds that a rank's lease is over."""

    rank: RankId


ReferenceInput = EngineBatch | Silence


@dataclass
class ReferenceRank:
    """What one rank holds. facts: (tier, sequence hash) to its engine hash; names: the other way round.

    lossy: something is missing that only a clear, a new life or a whole restatement makes good. parked: chunks.
    """

    epoch: Epoch = field(default_factory=lambda: Epoch(Incarnation(0), 0))
    sequence: int = BEFORE_FIRST
    removed: bool = False
    lossy: bool = False
    silent: bool = False
    parked: list[EngineBatch] = field(default_factory=list)
    n_unknown_parents: int = 0
    facts: dict[tuple[Tier, int], int] = field(default_factory=dict)
    names: Names = field(default_factory=dict)

    def begin(self, epoch: Epoch) -> None:
        """A new epoch: nothing older is held. All but a clear count their batches anew."""
        self.epoch = epoch
        self.sequence = BEFORE_FIRST
        self.lossy = self.silent = self.removed = False
        self.parked.clear()
        self.facts.clear()
        self.names.clear()

    def apply(self, event: KvEvent) -> None:
        """One event, in order."""
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
        """Attach blocks behind a parent that is held, its own tier's before the others'; reject them otherwise."""
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
        """Hold a block under a name; what the name named before, and the block's older name, are gone."""
        moved = self.names.pop((tier, engine), None)
        if moved is not None:
            del self.facts[tier, moved]
        older = self.facts.pop((tier, block), None)
        if older is not None:
            del self.names[tier, older]
        self.names[tier, engine] = block
        self.facts[tier, block] = engine


class ReferenceFleet:
    """Every rank, fed one batch at a time."""

    def __init__(self) -> None:
        self.ranks: dict[RankId, ReferenceRank] = {}

    def apply(self, told: ReferenceInput) -> str:
        """Apply a batch; gives what became of it, as the agents count it."""
        if isinstance(told, Silence):
            self.ranks[told.rank].silent = True
            return "silent"
        match told.body:
            case WorkerRemoved(seen_sequence=None):
                return self.remove_worker(told.rank.worker_id, told.incarnation)
            case WorkerRemoved(seen_sequence=seen):
                return self.expire_worker(told, seen)
        rank = self.ranks.setdefault(told.rank, ReferenceRank())
        match told.body:
            case Heartbeat():
                return self.renew(rank, told)
            case RestatementChunk():
                return self.restate(rank, told, told.body)
            case EngineEvents(events):
                return self.apply_events(rank, told, events)
        raise AssertionError(told.body)

    def begins(self, rank: ReferenceRank, batch: EngineBatch) -> bool | None:
        """Whether a life begins by a batch, None where it is of an older one."""
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
        """An ordinary batch."""
        begins = self.begins(rank, batch)
        if begins is None:
            return "stale"
        if not begins and batch.sequence <= rank.sequence:
            return "duplicate"
        gap = batch.sequence > rank.sequence + 1
        rank.sequence, rank.lossy, rank.silent = batch.sequence, rank.lossy or gap, False
        rank.parked.clear()
        for event in events:
            rank.apply(event)
        return "gap" if gap else "applied"

    def renew(self, rank: ReferenceRank, batch: EngineBatch) -> str:
        """A heartbeat."""
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
        rank.silent = False
        if not missing or rank.lossy:
            return "renewed"
        rank.lossy = True
        return "gap"

    def restate(self, rank: ReferenceRank, batch: EngineBatch, chunk: RestatementChunk) -> str:
        """A chunk of a restatement."""
        begins = self.begins(rank, batch)
        if begins is None:
            return "stale"
        if begins:
            rank.lossy = True
        elif batch.sequence < rank.sequence:
            return "duplicate"
        rank.silent = False
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
        """End a worker's life in all of its ranks that have no newer one."""
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
        """End a silent worker's life, unless it was heard of."""
        for rank_id, rank in self.ranks.items():
            if rank_id.worker_id != batch.rank.worker_id or rank.removed:
                continue
            moved = rank_id == batch.rank and rank.sequence != seen
            if not rank.silent or moved or rank.epoch.incarnation > batch.incarnation:
                return "stale"
        return self.remove_worker(batch.rank.worker_id, batch.incarnation, silent=True)

    def members(self) -> set[Member]:
        """Every fact held."""
        return {(rank_id, tier, block) for rank_id, rank in self.ranks.items() for tier, block in rank.facts}

    def epochs(self) -> dict[RankId, Epoch]:
        """Epoch of every rank that ever told anything."""
        return {rank_id: rank.epoch for rank_id, rank in self.ranks.items()}

    def overlap(self, local: Iterable[int]) -> dict[RankId, int]:
        """Leading blocks of a request that each rank holds in any tier; ranks with none are absent."""
        return overlap_of(self.members(), local)


def overlap_of(members: set[Member], local: Iterable[int]) -> dict[RankId, int]:
    """Leading blocks of a request that each rank holds in any tier, counted one by one from the facts themselves."""
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
    """A block of some prompt: its place in the tree of all prompts."""

    local: int
    block: int
    path: tuple[int, ...]  # local hashes from the root to this block


class _Engine:
    """One rank that tells a history. Knows what it told through a reference of its own."""

    def __init__(self, rng: random.Random, rank: RankId, told: ReferenceFleet, prompts: list[list[int]]) -> None:
        self._rng = rng
        self._prompts = prompts
        self._told = told
        self._nodes: dict[int, _Node] = {}  # of every block that it ever stored, by sequence hash
        self.rank = rank
        self.worker_id = rank.worker_id
        self.incarnation = rng.randrange(1, 50)
        self.sequence = BEFORE_FIRST

    def path(self, block: int) -> tuple[int, ...]:
        """Local hashes from the root to a block that this rank stored; empty where a moved name put it elsewhere."""
        node = self._nodes.get(block)
        return node.path if node else ()

    def event(self, n_blocks_max: int) -> KvEvent:
        """Tell something new."""
        held = self._told.ranks.get(self.rank, ReferenceRank()).names
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
        """path: local hashes of the blocks before the first."""
        chain = chain_hashes((*path, *local))
        for index in range(len(path), len(chain)):
            whole = (*path, *local)[: index + 1]
            self._nodes[chain[index]] = _Node(whole[-1], chain[index], whole)
        moe = MoeLabels(self._rng.randrange(3), self._rng.choice((None, 7)), None) if self._rng.random() < 0.1 else None
        return BlocksStored(None if parent is None else EngineHash(parent), _u64(engine), _u64(local), tier, moe)

    def _name(self, block: int, life: int = 0) -> int:
        """An engine's name for a block: the same each time, another one in each rank."""
        raw = repr((self.rank, block, life)).encode()
        return xxhash.xxh3_64_intdigest(raw)

    def _pick(self, names: Names, tier: Tier) -> tuple[int, _Node] | None:
        """A name in use in a tier, and the block that it names."""
        mine = [(engine, block) for (where, engine), block in names.items() if where is tier]
        if not mine:
            return None
        engine, block = self._rng.choice(mine)
        return engine, self._nodes[block]

    def _prefix(self, names: Names) -> KvEvent:
        """Store what is missing of a shared prompt, behind the last block that is held."""
        prompt = self._rng.choice(self._prompts)
        prompt = prompt[: self._rng.randint(1, len(prompt))]
        by_block = {block: engine for (tier, engine), block in names.items() if tier is Tier.DEVICE}
        chain = chain_hashes(prompt)
        n_held = 0
        while n_held < len(chain) and chain[n_held] in by_block:
            n_held += 1
        if n_held == len(chain):
            n_held = 0  # all of it is held: say so again
        parent = by_block[chain[n_held - 1]] if n_held else None
        return self._store(parent, [self._name(b) for b in chain[n_held:]], tuple(prompt[:n_held]), prompt[n_held:])

    def _decode(self, names: Names) -> KvEvent:
        """One more block behind one that is held, as a decoding request stores them."""
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
            return BlocksRemoved(_u64(self._rng.sample(copies, self._rng.randint(1, len(copies)))), tier)
        if found is None:
            return self._prefix(names)
        path = found[1].path
        chain = chain_hashes(path)
        first = self._rng.randrange(len(path))
        parent = self._name(chain[first - 1]) if first else None
        return self._store(parent, [self._name(b) for b in chain[first:]], path[:first], list(path[first:]), tier)

    def _repeat(self, names: Names) -> KvEvent:
        """Store again, from the root, the whole path to a block that is held."""
        found = self._pick(names, Tier.DEVICE)
        if found is None:
            return self._prefix(names)
        path = found[1].path
        return self._store(None, [self._name(b) for b in chain_hashes(path)], (), list(path))

    def _second_name(self, names: Names) -> KvEvent:
        """Store a held path again under names never used before."""
        found = self._pick(names, Tier.DEVICE)
        if found is None:
            return self._prefix(names)
        path, life = found[1].path, self._rng.getrandbits(32)
        return self._store(None, [self._name(b, life) for b in chain_hashes(path)], (), list(path))

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
        return BlocksStored(EngineHash(self._rng.getrandbits(64)), _u64([self._name(b) for b in local]), _u64(local))

    def _unknown_removal(self) -> KvEvent:
        return BlocksRemoved(_u64([self._rng.getrandbits(64)]), self._rng.choice(tuple(Tier)))

    def _removal(self, names: Names, n: int) -> KvEvent:
        """Remove some blocks of the device, in no order, so that holes come up; now and then all of them."""
        mine = [engine for (tier, engine) in names if tier is Tier.DEVICE]
        if self._rng.random() < 0.05:
            n = len(mine)
        return BlocksRemoved(_u64(self._rng.sample(mine, min(n, len(mine)))))


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
    """Tell what `n_ranks` engines might, as the batches of one log, `n_batches` of them.

    Ranks share prompts, and each odd one is the second rank of the even one's worker. Beside what engines do every day
    there are gaps, batches delivered again, batches of an older life, new lives, workers removed and batches that come
    after their removal.

    n_blocks_max: a rank that holds more removes half of it. begins: lives are announced by an empty batch before the
    first, which also brings a removed worker back in the same life; only their offsets tell such batches from repeats.
    bridged: there are heartbeats and restatements too, of which the same is true.
    """
    history = input_history(rng, n_batches, n_ranks, model, block_size, n_blocks_max, begins=begins, bridged=bridged)
    return [told for told in history if isinstance(told, EngineBatch)]


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
    """See random_history. silences: ranks fall silent, and silent workers are expired."""
    told = ReferenceFleet()
    prompts = _prompts(rng)
    engines = [_Engine(rng, RankId(WorkerId(n // 2 + 1), DpRank(n % 2)), told, prompts) for n in range(n_ranks)]
    history: list[ReferenceInput] = []
    while len(history) < n_batches:
        engine = rng.choice(engines)
        news = _bridge(rng, engine, told, model, block_size, silences=silences) if bridged else []
        if news:
            for each in news:
                told.apply(each)
            history += news
            continue
        chance = rng.random()
        if chance < 0.04 and history:
            again = rng.choice(history[-40:])  # delivered again
            if isinstance(again, EngineBatch):
                history.append(again)
                told.apply(again)
            continue
        refused = told.ranks.get(engine.rank, ReferenceRank()).removed
        if chance < (0.4 if refused else 0.05):
            engine.incarnation += rng.randint(0 if begins and refused else 1, 3)
            engine.sequence = BEFORE_FIRST
            if begins:
                history.append(replace(_batch(engine, model, block_size, EngineEvents(())), sequence=BEFORE_FIRST))
                told.apply(history[-1])
                continue
        elif chance < 0.06:
            engine.sequence += rng.randint(1, 3)  # what it said there is lost
        elif chance < 0.065 and all(each.rank in told.ranks for each in engines if each.worker_id == engine.worker_id):
            # Of a rank never heard of there is nothing to remove, nor to know of the removal by.
            history.append(_batch(engine, model, block_size, WorkerRemoved("a test says so")))
            told.apply(history[-1])
            for other in engines:
                # Most workers come back; others go on as if nothing had happened and are refused.
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
        # The number is told first and its events one by one, so that each can build on the one before.
        is_news = told.apply(batch) in ("applied", "gap")
        events: list[KvEvent] = []
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 5))):
            events.append(engine.event(n_blocks_max))
            if is_news:
                told.ranks[engine.rank].apply(events[-1])
        history.append(replace(batch, body=EngineEvents(tuple(events))))
    return history


def _bridge(
    rng: random.Random, engine: _Engine, told: ReferenceFleet, model: str, block_size: int, *, silences: bool
) -> list[ReferenceInput]:
    """What a bridge says of a rank beside its batches, and what is said of one that says nothing; mostly nothing."""
    rank = told.ranks.get(engine.rank)
    kind = rng.random()
    if rank is None or kind > 0.25:
        return []
    if kind < 0.08:
        heartbeat = _batch(engine, model, block_size, Heartbeat("b", rng.choice((1000, 1000, 3000))))
        inputs_of = max(engine.sequence + rng.choice((0, 0, 0, 0, 1)), BEFORE_FIRST)
        return [replace(heartbeat, sequence=inputs_of)]
    if kind < 0.16:
        return list(_restatement(rng, engine, rank, model, block_size))
    worker = {each: state for each, state in told.ranks.items() if each.worker_id == engine.worker_id}
    if not silences:
        return []
    if kind < 0.22:
        quiet = [each for each, state in worker.items() if not state.removed and rng.random() < 0.7]
        if rng.random() < 0.5:
            return [Silence(each) for each in quiet]
        everybody: list[ReferenceInput] = [Silence(each) for each, state in worker.items() if not state.removed]
        return [*everybody, _batch(engine, model, block_size, WorkerRemoved("silent", rank.sequence))]
    seen = rank.sequence + rng.choice((0, 0, 0, -1))
    return [_batch(engine, model, block_size, WorkerRemoved("silent", max(seen, BEFORE_FIRST)))]


def _restatement(
    rng: random.Random, engine: _Engine, rank: ReferenceRank, model: str, block_size: int
) -> Iterator[EngineBatch]:
    """The chunks of a restatement: of what is held, less some blocks; some lost, doubled, or of another one."""
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
            runs.append(RestatedRun(len(path) - 1, parent, _u64([name]), _u64([path[-1]]), tier))
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
    return EngineBatch(
        rank=engine.rank,
        model=model,
        block_size=block_size,
        incarnation=Incarnation(engine.incarnation),
        sequence=max(engine.sequence, 0),
        digest=xxhash.xxh3_64_intdigest(repr((engine.rank, engine.incarnation, engine.sequence)).encode()),
        emitted_at_ms=0,
        body=body,
    )


def _prompts(rng: random.Random) -> list[list[int]]:
    """Prompts that share prefixes, up to 80 blocks: runs of one, two and three records."""
    prompts: list[list[int]] = []
    for _ in range(12):
        shared = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
        shared = shared[: rng.randint(0, len(shared))]
        prompts.append(shared + [rng.getrandbits(64) for _ in range(rng.choice((1, 3, 8, 31, 32, 33, 45)))])
        prompts[-1] = prompts[-1][:80]
    return prompts


def _u64(values: list[int]) -> HashArray:
    return np.array(values, dtype=np.uint64)


class ReferenceIndex:
    """An index of engine events, as sets: every rank's blocks by tier and name, and who holds each block.

    facts: of each rank and tier, sequence hash to name; names: the other way round. holders: of each sequence hash, the
    tiers in which each rank holds it.
    """

    def __init__(self) -> None:
        self.facts: dict[RankId, dict[Tier, dict[int, int]]] = {}
        self.names: dict[RankId, dict[Tier, dict[int, int]]] = {}
        self.holders: dict[int, dict[RankId, set[Tier]]] = {}

    def block_named(self, rank: RankId, tier: Tier, name: int) -> int | None:
        """The block that a rank means by a name: of this tier, else of the fastest that knows it."""
        for where in (tier, *Tier):
            block = self.names.get(rank, {}).get(where, {}).get(name)
            if block is not None:
                return block
        return None

    def store(self, rank: RankId, event: BlocksStored) -> bool:
        """Hold blocks; gives whether the parent was known."""
        parent: int | None = None
        if event.parent is not None:
            parent = self.block_named(rank, event.tier, event.parent)
            if parent is None:
                return False
        for name, block in zip(event.engine.tolist(), chain_hashes(event.local.tolist(), parent), strict=True):
            self._hold(rank, event.tier, name, block)
        return True

    def remove(self, rank: RankId, event: BlocksRemoved) -> int:
        """Hold blocks no more; gives how many names were not in use."""
        return sum(not self._drop(rank, event.tier, name) for name in event.engine.tolist())

    def clear(self, rank: RankId) -> None:
        """Nothing is held any more."""
        for tier, names in self.names.get(rank, {}).items():
            for name in list(names):
                self._drop(rank, tier, name)

    def find_matches(self, local: Iterable[int]) -> tuple[dict[RankId, int], dict[RankId, tuple[int, ...]]]:
        """Scores, and the tiers of those who hold any of it off the device, one block after the other."""
        counts: dict[RankId, list[int]] = {}
        active: set[RankId] = set()
        for position, block in enumerate(chain_hashes(local)):
            holders = self.holders.get(block, {})
            active = active & holders.keys() if position else set(holders)
            if not active:
                break
            for rank in active:
                counts.setdefault(rank, [0] * len(Tier))[min(holders[rank])] += 1
        scores = {rank: sum(tiers) for rank, tiers in counts.items()}
        return scores, {rank: tuple(tiers) for rank, tiers in counts.items() if any(tiers[1:])}

    def members(self) -> set[Member]:
        """Every fact held, by name."""
        return {
            (rank, tier, name) for rank, tiers in self.names.items() for tier, names in tiers.items() for name in names
        }

    def __len__(self) -> int:
        return sum(len(names) for tiers in self.names.values() for names in tiers.values())

    def _hold(self, rank: RankId, tier: Tier, name: int, block: int) -> None:
        names = self.names.setdefault(rank, {}).setdefault(tier, {})
        facts = self.facts.setdefault(rank, {}).setdefault(tier, {})
        if names.get(name) == block:
            return
        self._drop(rank, tier, name)
        if block in facts:
            self._drop(rank, tier, facts[block])
        names[name], facts[block] = block, name
        self.holders.setdefault(block, {}).setdefault(rank, set()).add(tier)

    def _drop(self, rank: RankId, tier: Tier, name: int) -> bool:
        block = self.names.get(rank, {}).get(tier, {}).pop(name, None)
        if block is None:
            return False
        del self.facts[rank][tier][block]
        tiers = self.holders[block][rank]
        tiers.remove(tier)
        if not tiers:
            del self.holders[block][rank]
        if not self.holders[block]:
            del self.holders[block]
        return True


@dataclass(frozen=True)
class RankGone:
    """The rank is removed and forgotten."""


@dataclass(frozen=True)
class Query:
    """A request. local: uint64[n]."""

    local: HashArray


@dataclass(frozen=True)
class Answer:
    """What a query must find."""

    scores: dict[RankId, int]
    by_tier: dict[RankId, tuple[int, ...]]


@dataclass(frozen=True)
class Step:
    """One operation and what comes of it.

    expected: of a store whether it is taken, False for an unknown parent; of a removal the names not in use; of a query
    its answer; otherwise None.
    """

    rank: RankId
    action: KvEvent | RankGone | Query
    expected: bool | int | Answer | None


class IndexHistory:
    """Operations on an index, each made when it is asked for, from what the reference holds then.

    Beside what engines do every day there are names that move, blocks with two names, names that ranks use for
    different blocks, holes that are filled again, parents that are unknown or known in another tier only.

    n_ranks: 1 to 300 come up where it is left open, so that sets of holders of every shape do.
    """

    def __init__(self, rng: random.Random, n_ranks: int | None = None) -> None:
        self._rng = rng
        self.reference = ReferenceIndex()
        n = n_ranks or rng.choice((1, 2, 3, 5, 9, 20, 40, 70, 130, 300))
        self._ranks = [RankId(WorkerId(rng.choice((m // 2, m, m << 40))), DpRank(m % 2)) for m in range(n)]
        self._n_blocks_max = rng.choice((20, 60, 200)) if n < 20 else rng.choice((10, 30))
        self._tiers = rng.choice(((Tier.DEVICE,), (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST), tuple(Tier)))
        self._alphabet = [rng.getrandbits(64) for _ in range(rng.choice((2, 5, 1000)))]
        self._prompts = _prompts(rng) if n < 100 else [prompt[:12] for prompt in _prompts(rng)]
        self._places: dict[int, tuple[int | None, int]] = {}  # of each block ever stored: the one before it, its tokens
        self._stored: list[int] = []  # the same blocks, to pick from
        # Ranks name blocks as their fleet does, as only they do, or by small numbers that mean other blocks elsewhere.
        self._styles = {rank: rng.choice("ffos") for rank in self._ranks}
        self._changes: list[tuple[int, Callable[[RankId, Tier], KvEvent | RankGone]]] = [
            (20, self._prefix),
            (18, self._extension),
            (6, self._filled),
            (5, self._copied),
            (4, self._second_names),
            (4, self._moved_names),
            (2, self._scrambled_names),
            (2, self._orphan),
            (1, self._nothing),
            (12, self._tail),
            (10, self._holes),
            (2, self._strangers),
            (1, self._everything),
        ]

    def steps(self, n: int) -> Iterator[Step]:
        """Give the next `n` operations; each is done to the reference before it is given."""
        kinds, weights = [kind for _, kind in self._changes], [weight for weight, _ in self._changes]
        if not self._stored and self._rng.random() < 0.5:
            for rank in self._ranks[:n]:  # a system prompt that all know: as many holders of one run as there are ranks
                yield self._done(rank, self._store(rank, Tier.DEVICE, None, self._prompts[0]))
            n -= len(self._ranks[:n])
        for kind in self._rng.choices(kinds, weights, k=n):
            rank = self._rng.choice(self._ranks)
            if self._rng.random() < 0.3:
                yield self._query(rank)
                continue
            if sum(map(len, self.reference.names.get(rank, {}).values())) > self._n_blocks_max:
                yield self._done(rank, self._holes(rank, self._tier_held(rank), share=0.5))
            elif self._rng.random() < 0.004:
                yield self._done(rank, self._rng.choice((AllBlocksCleared(), RankGone())))
            else:
                yield self._done(rank, kind(rank, self._rng.choice(self._tiers)))

    def queries(self, n: int) -> Iterator[Step]:
        """Give `n` queries, as of now."""
        for _ in range(n):
            yield self._query(self._rng.choice(self._ranks))

    def _done(self, rank: RankId, action: KvEvent | RankGone) -> Step:
        expected: bool | int | None = None
        match action:
            case BlocksStored():
                expected = self.reference.store(rank, action)
            case BlocksRemoved():
                expected = self.reference.remove(rank, action)
            case _:
                self.reference.clear(rank)
        return Step(rank, action, expected)

    def _query(self, rank: RankId) -> Step:
        local = list(self._rng.choice(self._prompts))
        chance = self._rng.random()
        held = self._names(rank, self._tier_held(rank))
        if chance < 0.6 and held:
            local = self._path(held[self._rng.choice(list(held))])
        if chance < 0.2:
            local = local[: self._rng.randint(0, len(local))]
        elif chance < 0.4:
            local = local + self._rng.choices(self._alphabet, k=self._rng.randint(1, 3))
        elif chance < 0.5:
            local[self._rng.randrange(len(local))] = self._rng.choice((self._rng.getrandbits(64), *self._alphabet[:3]))
        elif chance > 0.98:
            local = []
        return Step(rank, Query(_u64(local)), Answer(*self.reference.find_matches(local)))

    def _names(self, rank: RankId, tier: Tier) -> dict[int, int]:
        return self.reference.names.get(rank, {}).get(tier, {})

    def _tier_held(self, rank: RankId) -> Tier:
        """A tier in which the rank holds something, if there is one."""
        held = [tier for tier, names in self.reference.names.get(rank, {}).items() if names]
        return self._rng.choice(held) if held else Tier.DEVICE

    def _path(self, block: int) -> list[int]:
        """Local hashes from the root to a block."""
        path: list[int] = []
        at: int | None = block
        while at is not None:
            at, local = self._places[at]
            path.append(local)
        return path[::-1]

    def _name(self, rank: RankId, block: int) -> int:
        style = self._styles[rank]
        if style == "f":
            return block
        own = block ^ (hash(rank) & 0xFFFF_FFFF_FFFF)
        return own if style == "o" else own % (4 * self._n_blocks_max)

    def _store(
        self,
        rank: RankId,
        tier: Tier,
        parent: tuple[int, int] | None,
        local: list[int],
        names: list[int] | None = None,
    ) -> BlocksStored:
        """parent: its name and itself."""
        before = None if parent is None else parent[1]
        chain = chain_hashes(local, before)
        for block, one in zip(chain, local, strict=True):
            if block not in self._places:
                self._places[block] = before, one
                self._stored.append(block)
            before = block
        if names is None:
            names = [self._name(rank, block) for block in chain]
        return BlocksStored(None if parent is None else EngineHash(parent[0]), _u64(names), _u64(local), tier)

    def _pick(self, rank: RankId, tier: Tier) -> tuple[int, int] | None:
        """A name in use and the block that a store in this tier would find by it."""
        where = tier if self._names(rank, tier) and self._rng.random() < 0.8 else self._tier_held(rank)
        names = self._names(rank, where)
        if not names:
            return None
        name = self._rng.choice(list(names))
        block = self.reference.block_named(rank, tier, name)
        assert block is not None
        return name, block

    def _prefix(self, rank: RankId, tier: Tier) -> KvEvent:
        """A shared prompt: from the root, said again or not, or behind what is held of it."""
        prompt = self._rng.choice(self._prompts)
        prompt = prompt[: self._rng.randint(1, len(prompt))]
        facts = self.reference.facts.get(rank, {}).get(tier, {})
        chain = chain_hashes(prompt)
        n_held = 0
        while self._rng.random() < 0.95 and n_held < len(chain) - 1 and chain[n_held] in facts:
            n_held += 1
        parent = (facts[chain[n_held - 1]], chain[n_held - 1]) if n_held else None
        return self._store(rank, tier, parent, prompt[n_held:])

    def _extension(self, rank: RankId, tier: Tier) -> KvEvent:
        """A few blocks behind one that is held, in the middle of others or at their end."""
        parent = self._pick(rank, tier)
        if parent is None:
            return self._prefix(rank, tier)
        n = self._rng.choice((1, 1, 1, 2, 5))
        return self._store(rank, tier, parent, self._rng.choices(self._alphabet, k=n))

    def _filled(self, rank: RankId, tier: Tier) -> KvEvent:
        """All that leads to a block that is held or was, holes or not: from the root, or the last of it."""
        if not self._stored:
            return self._prefix(rank, tier)
        known = self._pick(rank, tier)
        block = known[1] if known and self._rng.random() < 0.7 else self._rng.choice(self._stored)
        path = self._path(block)
        facts = self.reference.facts.get(rank, {}).get(tier, {})
        before = self._places[block][0]
        if before in facts and self._rng.random() < 0.5:
            return self._store(rank, tier, (facts[before], before), path[-1:])
        return self._store(rank, tier, None, path)

    def _copied(self, rank: RankId, tier: Tier) -> KvEvent:
        """The end of a path that is held, in any tier, behind a parent that may be held in another one."""
        tier = self._rng.choice(tuple(Tier) if len(self._tiers) > 1 else self._tiers)
        known = self._pick(rank, self._tier_held(rank))
        if known is None:
            return self._prefix(rank, tier)
        path = self._path(known[1])
        chain = chain_hashes(path)
        first = self._rng.randrange(len(path))
        name = self._name(rank, chain[first - 1]) if first else 0
        if first and self.reference.block_named(rank, tier, name) != chain[first - 1]:
            first = 0
        return self._store(rank, tier, (name, chain[first - 1]) if first else None, path[first:])

    def _second_names(self, rank: RankId, tier: Tier) -> KvEvent:
        """A path that is held, under names never used before."""
        known = self._pick(rank, tier)
        if known is None:
            return self._prefix(rank, tier)
        path = self._path(known[1])
        return self._store(rank, tier, None, path, [self._rng.getrandbits(64) for _ in path])

    def _moved_names(self, rank: RankId, tier: Tier) -> KvEvent:
        """Names in use for other blocks, the parent's own among them."""
        mine = list(self._names(rank, tier))
        parent = self._pick(rank, tier)
        if parent is None or not mine:
            return self._prefix(rank, tier)
        local = self._rng.choices(self._alphabet, k=self._rng.randint(1, 4))
        names = self._rng.choices([*mine, parent[0]], k=len(local))
        return self._store(rank, tier, parent if self._rng.random() < 0.7 else None, local, names)

    def _scrambled_names(self, rank: RankId, tier: Tier) -> KvEvent:
        """A prompt under a few small names, several of them twice."""
        prompt = self._rng.choice(self._prompts)[:8]
        return self._store(rank, tier, None, prompt, self._rng.choices(range(2 * len(prompt)), k=len(prompt)))

    def _orphan(self, rank: RankId, tier: Tier) -> KvEvent:
        """Blocks, or none, behind a name that nobody uses, or another rank only."""
        others = list(self._names(self._rng.choice(self._ranks), tier))
        name = self._rng.choice(others) if others and self._rng.random() < 0.5 else self._rng.getrandbits(64)
        local = _u64(self._rng.choices(self._alphabet, k=self._rng.randint(0, 3)))
        block = self.reference.block_named(rank, tier, name)
        if block is not None:  # the rank uses the other one's name too
            return self._store(rank, tier, (name, block), local.tolist())
        return BlocksStored(EngineHash(name), local, local, tier)

    def _nothing(self, rank: RankId, tier: Tier) -> KvEvent:
        """An event of no blocks."""
        parent = self._pick(rank, tier)
        if self._rng.random() < 0.3:
            return BlocksRemoved(_u64([]), tier)
        return self._store(rank, tier, parent, [])

    def _tail(self, rank: RankId, tier: Tier) -> KvEvent:
        """The last blocks of a path, last first, as engines evict."""
        known = self._pick(rank, tier)
        if known is None:
            return self._strangers(rank, tier)
        facts = self.reference.facts.get(rank, {}).get(tier, {})
        chain = chain_hashes(self._path(known[1]))[::-1]
        held = [facts[block] for block in chain[: self._rng.choice((1, 2, 5, 40))] if block in facts]
        return BlocksRemoved(_u64(held), tier)

    def _holes(self, rank: RankId, tier: Tier, share: float = 0.1) -> KvEvent:
        """Some blocks from anywhere, in no order, one perhaps twice."""
        mine = list(self._names(rank, tier))
        names = self._rng.sample(mine, max(min(1, len(mine)), int(share * len(mine))))
        if names and self._rng.random() < 0.2:
            names.append(self._rng.choice(names))
        return BlocksRemoved(_u64(names), tier)

    def _strangers(self, rank: RankId, tier: Tier) -> KvEvent:
        """Names of others, or nobody's, with one that is held among them."""
        names = [*list(self._names(self._rng.choice(self._ranks), tier))[:2], self._rng.getrandbits(64)]
        return BlocksRemoved(_u64(names + list(self._names(rank, tier))[:1]), tier)

    def _everything(self, rank: RankId, tier: Tier) -> KvEvent:
        """All that a tier holds, in no order."""
        mine = list(self._names(rank, tier))
        self._rng.shuffle(mine)
        return BlocksRemoved(_u64(mine), tier)

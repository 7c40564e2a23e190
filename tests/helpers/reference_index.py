"""The brute-force reference of an index, and histories of operations on it.

What lives here: the answers of an index, written as simply as possible (`ReferenceIndex`), and seeded histories with
common and adversarial operations (`IndexHistory`). What must not: any code under test except the events and ids that it
takes, so no hashing, runs or index.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from streams.core.ids import DpRank, EngineHash, HashArray, RankId, Tier, WorkerId
from tests.helpers.reference import Member, chain_hashes, random_prompts, u64


class ReferenceIndex:
    """An index of engine events, as sets: each rank's blocks by tier and name, and the holders of each block.

    facts: for each rank and tier, sequence hash to name; names: the reverse. holders: for each sequence hash, the tiers
    in which each rank holds it.
    """

    def __init__(self) -> None:
        self.facts: dict[RankId, dict[Tier, dict[int, int]]] = {}
        self.names: dict[RankId, dict[Tier, dict[int, int]]] = {}
        self.holders: dict[int, dict[RankId, set[Tier]]] = {}

    def block_named(self, rank: RankId, tier: Tier, name: int) -> int | None:
        """The block that a rank has under a name: in this tier, otherwise in the fastest tier with that name."""
        for where in (tier, *Tier):
            block = self.names.get(rank, {}).get(where, {}).get(name)
            if block is not None:
                return block
        return None

    def store(self, rank: RankId, event: BlocksStored) -> bool:
        """Store blocks; returns whether the parent was known."""
        parent: int | None = None
        if event.parent is not None:
            parent = self.block_named(rank, event.tier, event.parent)
            if parent is None:
                return False
        for name, block in zip(event.engine.tolist(), chain_hashes(event.local.tolist(), parent), strict=True):
            self._hold(rank, event.tier, name, block)
        return True

    def remove(self, rank: RankId, event: BlocksRemoved) -> int:
        """Remove blocks; returns how many names were not in use."""
        return sum(not self._drop(rank, event.tier, name) for name in event.engine.tolist())

    def clear(self, rank: RankId) -> None:
        """Remove all blocks of a rank."""
        for tier, names in self.names.get(rank, {}).items():
            for name in list(names):
                self._drop(rank, tier, name)

    def find_matches(self, local: Iterable[int]) -> tuple[dict[RankId, int], dict[RankId, tuple[int, ...]]]:
        """Scores, and the tiers of ranks that hold a part only below the device tier, computed block by block."""
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
        """All facts, by name."""
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
    """A rank is removed with all its blocks."""


@dataclass(frozen=True)
class Query:
    """A request. local: uint64[n]."""

    local: HashArray


@dataclass(frozen=True)
class Answer:
    """The expected answer to a query."""

    scores: dict[RankId, int]
    by_tier: dict[RankId, tuple[int, ...]]


@dataclass(frozen=True)
class Step:
    """One operation and its expected result.

    expected: for a store whether it is accepted, False for an unknown parent; for a removal the number of names that
    are not in use; for a query its answer; otherwise None.
    """

    rank: RankId
    action: KvEvent | RankGone | Query
    expected: bool | int | Answer | None


class IndexHistory:
    """Operations on an index, each generated on demand from the current state of the reference.

    In addition to normal events there are names that move, blocks with two names, names that ranks use for different
    blocks, holes that are filled again, and parents that are unknown or held only in another tier.

    n_ranks: by default random from 1 to 300, so that sets of holders of every shape occur.
    """

    def __init__(self, rng: random.Random, n_ranks: int | None = None) -> None:
        self._rng = rng
        self.reference = ReferenceIndex()
        n = n_ranks or rng.choice((1, 2, 3, 5, 9, 20, 40, 70, 130, 300))
        self._ranks = [RankId(WorkerId(rng.choice((m // 2, m, m << 40))), DpRank(m % 2)) for m in range(n)]
        self._n_blocks_max = rng.choice((20, 60, 200)) if n < 20 else rng.choice((10, 30))
        self._tiers = rng.choice(((Tier.DEVICE,), (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST), tuple(Tier)))
        self._alphabet = [rng.getrandbits(64) for _ in range(rng.choice((2, 5, 1000)))]
        self._prompts = random_prompts(rng) if n < 100 else [prompt[:12] for prompt in random_prompts(rng)]
        self._chain: dict[int, tuple[int | None, int]] = {}  # each block ever stored: its parent and its local hash
        self._stored: list[int] = []  # the same blocks, to choose from
        # How each rank names blocks: f, like its fleet; o, with names of its own; s, with small numbers that other
        # ranks use for other blocks.
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
            (2, self._unknown_names),
            (1, self._everything),
        ]

    def steps(self, n: int) -> Iterator[Step]:
        """Generate the next `n` operations; each is applied to the reference before it is yielded."""
        kinds, weights = [kind for _, kind in self._changes], [weight for weight, _ in self._changes]
        if not self._stored and self._rng.random() < 0.5:
            for rank in self._ranks[:n]:  # all ranks store the same system prompt, so that one run has many holders
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
        """Generate `n` queries in the current state."""
        for _ in range(n):
            yield self._query(self._rng.choice(self._ranks))

    def _done(self, rank: RankId, action: KvEvent | RankGone) -> Step:
        expected: bool | int | None = None
        match action:
            case BlocksStored():
                expected = self.reference.store(rank, action)
            case BlocksRemoved():
                expected = self.reference.remove(rank, action)
            case AllBlocksCleared() | RankGone():
                self.reference.clear(rank)
            case _:
                assert_never(action)
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
        return Step(rank, Query(u64(local)), Answer(*self.reference.find_matches(local)))

    def _names(self, rank: RankId, tier: Tier) -> dict[int, int]:
        return self.reference.names.get(rank, {}).get(tier, {})

    def _tier_held(self, rank: RankId) -> Tier:
        """A tier in which the rank holds blocks, if there is one."""
        held = [tier for tier, names in self.reference.names.get(rank, {}).items() if names]
        return self._rng.choice(held) if held else Tier.DEVICE

    def _path(self, block: int) -> list[int]:
        """Local hashes from the root to a block."""
        path: list[int] = []
        at: int | None = block
        while at is not None:
            at, local = self._chain[at]
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
        """Store blocks. parent: name and sequence hash of the block before the first."""
        before = None if parent is None else parent[1]
        chain = chain_hashes(local, before)
        for block, one in zip(chain, local, strict=True):
            if block not in self._chain:
                self._chain[block] = before, one
                self._stored.append(block)
            before = block
        if names is None:
            names = [self._name(rank, block) for block in chain]
        return BlocksStored(None if parent is None else EngineHash(parent[0]), u64(names), u64(local), tier)

    def _pick(self, rank: RankId, tier: Tier) -> tuple[int, int] | None:
        """Choose a name in use, and the block that a store in this tier finds by it."""
        where = tier if self._names(rank, tier) and self._rng.random() < 0.8 else self._tier_held(rank)
        names = self._names(rank, where)
        if not names:
            return None
        name = self._rng.choice(list(names))
        block = self.reference.block_named(rank, tier, name)
        assert block is not None
        return name, block

    def _prefix(self, rank: RankId, tier: Tier) -> KvEvent:
        """Store a shared prompt, from the root or after the part that is held."""
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
        """Store a few blocks after one that is held, in the middle or at the end of a chain."""
        parent = self._pick(rank, tier)
        if parent is None:
            return self._prefix(rank, tier)
        n = self._rng.choice((1, 1, 1, 2, 5))
        return self._store(rank, tier, parent, self._rng.choices(self._alphabet, k=n))

    def _filled(self, rank: RankId, tier: Tier) -> KvEvent:
        """Store the path to a block that is or was held, with or without holes: all of it, or its last block."""
        if not self._stored:
            return self._prefix(rank, tier)
        known = self._pick(rank, tier)
        block = known[1] if known and self._rng.random() < 0.7 else self._rng.choice(self._stored)
        path = self._path(block)
        facts = self.reference.facts.get(rank, {}).get(tier, {})
        before = self._chain[block][0]
        if before in facts and self._rng.random() < 0.5:
            return self._store(rank, tier, (facts[before], before), path[-1:])
        return self._store(rank, tier, None, path)

    def _copied(self, rank: RankId, tier: Tier) -> KvEvent:
        """Store the end of a held path in any tier, after a parent that may be held in another tier."""
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
        """Store a held path under names that were never used before."""
        known = self._pick(rank, tier)
        if known is None:
            return self._prefix(rank, tier)
        path = self._path(known[1])
        return self._store(rank, tier, None, path, [self._rng.getrandbits(64) for _ in path])

    def _moved_names(self, rank: RankId, tier: Tier) -> KvEvent:
        """Store blocks under names that are in use for other blocks, including the parent's own name."""
        mine = list(self._names(rank, tier))
        parent = self._pick(rank, tier)
        if parent is None or not mine:
            return self._prefix(rank, tier)
        local = self._rng.choices(self._alphabet, k=self._rng.randint(1, 4))
        names = self._rng.choices([*mine, parent[0]], k=len(local))
        return self._store(rank, tier, parent if self._rng.random() < 0.7 else None, local, names)

    def _scrambled_names(self, rank: RankId, tier: Tier) -> KvEvent:
        """Store a prompt under a few small names, several of them repeated."""
        prompt = self._rng.choice(self._prompts)[:8]
        return self._store(rank, tier, None, prompt, self._rng.choices(range(2 * len(prompt)), k=len(prompt)))

    def _orphan(self, rank: RankId, tier: Tier) -> KvEvent:
        """Store blocks, or none, after a parent that no rank or only another rank has."""
        others = list(self._names(self._rng.choice(self._ranks), tier))
        name = self._rng.choice(others) if others and self._rng.random() < 0.5 else self._rng.getrandbits(64)
        local = u64(self._rng.choices(self._alphabet, k=self._rng.randint(0, 3)))
        block = self.reference.block_named(rank, tier, name)
        if block is not None:  # this rank uses the name as well
            return self._store(rank, tier, (name, block), local.tolist())
        return BlocksStored(EngineHash(name), local, local, tier)

    def _nothing(self, rank: RankId, tier: Tier) -> KvEvent:
        """An event without blocks."""
        parent = self._pick(rank, tier)
        if self._rng.random() < 0.3:
            return BlocksRemoved(u64([]), tier)
        return self._store(rank, tier, parent, [])

    def _tail(self, rank: RankId, tier: Tier) -> KvEvent:
        """Remove the last blocks of a path, last first, like an engine's eviction."""
        known = self._pick(rank, tier)
        if known is None:
            return self._unknown_names(rank, tier)
        facts = self.reference.facts.get(rank, {}).get(tier, {})
        chain = chain_hashes(self._path(known[1]))[::-1]
        held = [facts[block] for block in chain[: self._rng.choice((1, 2, 5, 40))] if block in facts]
        return BlocksRemoved(u64(held), tier)

    def _holes(self, rank: RankId, tier: Tier, share: float = 0.1) -> KvEvent:
        """Remove random blocks in random order, sometimes one of them twice."""
        mine = list(self._names(rank, tier))
        names = self._rng.sample(mine, max(min(1, len(mine)), int(share * len(mine))))
        if names and self._rng.random() < 0.2:
            names.append(self._rng.choice(names))
        return BlocksRemoved(u64(names), tier)

    def _unknown_names(self, rank: RankId, tier: Tier) -> KvEvent:
        """Remove names of other ranks or of no rank, and one that is held."""
        names = [*list(self._names(self._rng.choice(self._ranks), tier))[:2], self._rng.getrandbits(64)]
        return BlocksRemoved(u64(names + list(self._names(rank, tier))[:1]), tier)

    def _everything(self, rank: RankId, tier: Tier) -> KvEvent:
        """Remove all blocks of a tier, in random order."""
        mine = list(self._names(rank, tier))
        self._rng.shuffle(mine)
        return BlocksRemoved(u64(mine), tier)

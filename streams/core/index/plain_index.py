"""The pure-Python index of dicts and sets: the reference for the fast index, and its fallback without numba.

What lives here: the holders of each sequence hash (`HolderSets`), and an index of engine events on top of them
(`PlainPrefixIndex`). What must not: Kafka records (run_fold) and tokens (hashing).

Owner of the state: one thread, or the thread that holds the owner's lock. A query during a store is not safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from streams.core.events import BlocksRemoved, BlocksStored, KvEvent
from streams.core.hashing import BASE_SEED, Tokens, local_hashes, sequence_hashes
from streams.core.ids import EngineHash, HashArray, RankId, SequenceHash, Tier
from streams.core.index.interface import OverlapScores, check_query, check_rank, check_removal, check_store
from streams.errors import IndexCorrupt, UnknownParent

N_TIERS = len(Tier)


class HolderSets:
    """Map from each sequence hash, as a Python integer, to one bit mask of ranks per tier.

    A query walks the request's chain and intersects the masks block by block, so a hole ends only that rank's match.
    """

    def __init__(self) -> None:
        self._bit_of: dict[RankId, int] = {}
        self._rank_at: list[RankId | None] = []
        self._free_bits: list[int] = []
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._held: dict[tuple[RankId, Tier], set[int]] = {}

    def hold(self, rank: RankId, tier: Tier, blocks: Collection[int]) -> list[int]:
        """Add a rank to the holders of blocks; returns the blocks that it held already, usually none."""
        if not blocks:
            return []
        mask = 1 << self._bit(rank)
        holders = self._holders[tier]
        held = self._held.setdefault((rank, tier), set())
        already = [block for block in blocks if block in held]
        for block in blocks:
            holders[block] = holders.get(block, 0) | mask
        held.update(blocks)
        return already

    def drop(self, rank: RankId, tier: Tier, blocks: Iterable[int]) -> set[int]:
        """Remove a rank from the holders of blocks; returns the blocks that it held."""
        held = self._held.get((rank, tier))
        if not held:
            return set()
        keep = ~(1 << self._bit_of[rank])
        holders = self._holders[tier]
        gone = held.intersection(blocks)
        held.difference_update(gone)
        for block in gone:
            left = holders[block] & keep
            if left:
                holders[block] = left
            else:
                del holders[block]
        return gone

    def drop_rank(self, rank: RankId) -> None:
        """Remove a rank with all its blocks."""
        if rank not in self._bit_of:
            return
        for tier in Tier:
            self.drop(rank, tier, self._held.get((rank, tier), set()).copy())
            self._held.pop((rank, tier), None)
        bit = self._bit_of.pop(rank)
        self._rank_at[bit] = None
        self._free_bits.append(bit)

    def holds(self, rank: RankId, tier: Tier) -> frozenset[int]:
        """Blocks that a rank holds in a tier."""
        return frozenset(self._held.get((rank, tier), ()))

    def ranks_of(self, block: int) -> list[RankId]:
        """Ranks that hold a block in any tier."""
        mask = 0
        for holders in self._holders:
            mask |= holders.get(block, 0)
        return [rank for bit, rank in enumerate(self._rank_at) if rank is not None and mask >> bit & 1]

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request. local: uint64[n_blocks] from the root."""
        device, *lower = self._holders
        lower = [holders for holders in lower if holders]
        scores: dict[RankId, int] = {}
        off_device: list[tuple[int, int]] = []  # (position, mask of ranks that hold it only below the device)
        active = -1
        chain: list[int] = sequence_hashes(local).tolist()
        for position, block in enumerate(chain):
            holding = on_device = device.get(block, 0)
            for holders in lower:
                holding |= holders.get(block, 0)
            if position == 0:
                active = holding
            elif active & ~holding:
                self._score(scores, active & ~holding, position)
                active &= holding
            if not active:
                break
            if lower and active & ~on_device:
                off_device.append((position, active & ~on_device))
        else:
            self._score(scores, active if chain else 0, len(chain))
        return OverlapScores(scores, self._tiers(scores, chain, off_device))

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Iterate over all facts, in no particular order; two HolderSets are equal if their sets of facts are."""
        for (rank, tier), held in self._held.items():
            for block in held:
                yield rank, tier, SequenceHash(block)

    def check(self) -> None:
        """Raise IndexCorrupt if masks, sets and bits disagree."""
        for tier in Tier:
            masks: dict[int, int] = {}
            for (rank, where), held in self._held.items():
                if where is tier:
                    for block in held:
                        masks[block] = masks.get(block, 0) | 1 << self._bit_of[rank]
            if masks != self._holders[tier]:
                raise IndexCorrupt("holders' masks differ from what the ranks hold", tier=tier)
        if {rank: bit for bit, rank in enumerate(self._rank_at) if rank is not None} != self._bit_of:
            raise IndexCorrupt("bits and ranks disagree")

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def _bit(self, rank: RankId) -> int:
        bit = self._bit_of.get(rank)
        if bit is None:
            if self._free_bits:
                bit = self._free_bits.pop()
                self._rank_at[bit] = rank
            else:
                bit = len(self._rank_at)
                self._rank_at.append(rank)
            self._bit_of[rank] = bit
        return bit

    def _score(self, scores: dict[RankId, int], mask: int, blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            rank = self._rank_at[lowest.bit_length() - 1]
            assert rank is not None  # a freed bit is cleared from every mask before it is reused
            scores[rank] = blocks
            mask ^= lowest

    def _tiers(
        self, scores: Mapping[RankId, int], chain: list[int], off_device: list[tuple[int, int]]
    ) -> dict[RankId, tuple[int, ...]]:
        """Count the blocks by the tier of their fastest copy, for ranks with blocks that are not on the device."""
        counts: dict[RankId, list[int]] = {}
        for position, mask in off_device:
            for rank, score in scores.items():
                if position < score and mask >> self._bit_of[rank] & 1:
                    tiers = counts.setdefault(rank, [score] + [0] * (N_TIERS - 1))
                    tiers[Tier.DEVICE] -= 1
                    tiers[self._fastest_below_device(chain[position], rank)] += 1
        return {rank: tuple(tiers) for rank, tiers in counts.items()}

    def _fastest_below_device(self, block: int, rank: RankId) -> Tier:
        bit = 1 << self._bit_of[rank]
        return next(tier for tier in Tier if tier is not Tier.DEVICE and self._holders[tier].get(block, 0) & bit)


@dataclass(slots=True)
class _ChainBlock:
    """Parent and local hash of a block, shared by all ranks.

    n_uses: ranks and tiers that hold the block, plus its known children; at 0 the entry is removed.
    """

    parent: int | None
    local: int
    n_uses: int = 0


class _Names:
    """Names and blocks of one rank in one tier, mapped both ways."""

    __slots__ = ("block_of", "name_of")

    def __init__(self) -> None:
        self.block_of: dict[int, int] = {}
        self.name_of: dict[int, int] = {}

    def give(self, name: int, block: int) -> int | None:
        """Name a block; returns the block that had this name before, if it was another one. See PrefixIndex."""
        if self.block_of.get(name) == block:
            return None
        moved = self.block_of.pop(name, None)
        if moved is not None:
            del self.name_of[moved]
        older = self.name_of.get(block)
        if older is not None:
            del self.block_of[older]
        self.block_of[name] = block
        self.name_of[block] = name
        return moved

    def take(self, names: Iterable[int]) -> list[int]:
        """Remove names; returns the blocks of those that were in use."""
        blocks = [self.block_of.pop(name) for name in names if name in self.block_of]
        for block in blocks:
            del self.name_of[block]
        return blocks


class PlainPrefixIndex:
    """An index of engine events: names and chains on top of HolderSets; see PrefixIndex."""

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._names: dict[tuple[RankId, Tier], _Names] = {}
        self._chain: dict[int, _ChainBlock] = {}

    def store(self, rank: RankId, tier: Tier, parent: EngineHash | None, names: HashArray, local: HashArray) -> None:
        """Store consecutive blocks of one chain; see PrefixIndex."""
        check_store(rank, tier, parent, names, local)
        before = None if parent is None else self._find(rank, tier, parent)
        if not len(names):
            return
        chain: list[int] = sequence_hashes(local, before).tolist()
        for block, one in zip(chain, local.tolist(), strict=True):
            self._add_to_chain(block, before, one)
            before = SequenceHash(block)
        own = self._names.setdefault((rank, tier), _Names())
        moved = [own.give(name, block) for name, block in zip(names.tolist(), chain, strict=True)]
        # One event can move a name twice, so which blocks are held is certain only after all names.
        held = list(dict.fromkeys(block for block in chain if block in own.name_of))
        already = set(self._sets.hold(rank, tier, held))
        for block in held:
            self._chain[block].n_uses += block not in already
        self._drop(rank, tier, [block for block in moved if block is not None and block not in own.name_of])
        self._remove_unused(chain)

    def remove(self, rank: RankId, tier: Tier, names: HashArray) -> int:
        """Remove blocks; see PrefixIndex."""
        check_removal(rank, tier, names)
        own = self._names.get((rank, tier))
        if own is None:
            return len(names)
        blocks = own.take(names.tolist())
        self._drop(rank, tier, blocks)
        return len(names) - len(blocks)

    def clear(self, rank: RankId) -> None:
        """Remove all blocks of a rank, in all tiers."""
        check_rank(rank)
        for tier in Tier:
            self._drop(rank, tier, self._sets.holds(rank, tier))
            self._names.pop((rank, tier), None)

    def remove_rank(self, rank: RankId) -> None:
        """Remove a rank with all its blocks."""
        self.clear(rank)
        self._sets.drop_rank(rank)

    def find_matches(self, local: HashArray) -> OverlapScores:
        """Score every rank for a request; see PrefixIndex."""
        check_query(local)
        return self._sets.find_matches(local)

    def find_matches_for_request(self, tokens: Tokens, block_size: int, seed: int = BASE_SEED) -> OverlapScores:
        """Hash a request and score every rank for it; see PrefixIndex."""
        return self._sets.find_matches(local_hashes(tokens, block_size, seed))

    def members(self) -> Iterator[tuple[RankId, Tier, EngineHash]]:
        """Iterate over all facts, with the ranks' own names and in no particular order."""
        for (rank, tier), own in self._names.items():
            for name in own.block_of:
                yield rank, tier, EngineHash(name)

    def dump(self) -> Iterator[tuple[RankId, KvEvent]]:
        """Iterate over events that rebuild an equal index, tier by tier; see PrefixIndex."""
        for (rank, tier), own in self._names.items():
            for event in self._dump_tier(tier, own):
                yield rank, event

    def check(self) -> None:
        """Raise IndexCorrupt with the first broken invariant."""
        self._sets.check()
        n_uses = dict.fromkeys(self._chain, 0)
        for (rank, tier), own in self._names.items():
            if {block: name for name, block in own.block_of.items()} != own.name_of:
                raise IndexCorrupt("names and blocks are not one to one", rank=rank, tier=tier)
            if own.name_of.keys() != self._sets.holds(rank, tier):
                raise IndexCorrupt("the named blocks are not the held blocks", rank=rank, tier=tier)
            for block in own.name_of:
                if block not in n_uses:
                    raise IndexCorrupt("a held block has no chain entry", rank=rank, tier=tier, block=block)
                n_uses[block] += 1
        if sum(len(own.name_of) for own in self._names.values()) != len(self._sets):
            raise IndexCorrupt("a held block has no name")
        for block, entry in self._chain.items():
            if entry.parent is not None:
                if entry.parent not in n_uses:
                    raise IndexCorrupt("a block's parent has no chain entry", block=block, parent=entry.parent)
                n_uses[entry.parent] += 1
        for block, entry in self._chain.items():
            if not entry.n_uses or entry.n_uses != n_uses[block]:
                raise IndexCorrupt(
                    "uses of a chain entry are miscounted", block=block, counted=entry.n_uses, found=n_uses[block]
                )

    def __len__(self) -> int:
        return len(self._sets)

    def _find(self, rank: RankId, tier: Tier, name: EngineHash) -> SequenceHash:
        for where in (tier, *Tier):
            own = self._names.get((rank, where))
            block = None if own is None else own.block_of.get(name)
            if block is not None:
                return SequenceHash(block)
        raise UnknownParent(f"rank {rank} holds no block named {name}", rank=rank, parent=name)

    def _add_to_chain(self, block: int, parent: int | None, local: int) -> None:
        if block not in self._chain:
            self._chain[block] = _ChainBlock(parent, local)
            if parent is not None:
                self._chain[parent].n_uses += 1

    def _drop(self, rank: RankId, tier: Tier, blocks: Iterable[int]) -> None:
        """Remove the rank from the holders of blocks that lost their name."""
        gone = self._sets.drop(rank, tier, blocks)
        for block in gone:
            self._chain[block].n_uses -= 1
        self._remove_unused(gone)

    def _remove_unused(self, blocks: Iterable[int]) -> None:
        """Remove the unused chain entries among these blocks, and then those of parents that this leaves unused."""
        for block in blocks:
            at: int | None = block
            while at is not None and (entry := self._chain.get(at)) is not None and not entry.n_uses:
                del self._chain[at]
                at = entry.parent
                if at is not None:
                    self._chain[at].n_uses -= 1

    def _dump_tier(self, tier: Tier, own: _Names) -> Iterator[KvEvent]:
        name_of, children = dict(own.name_of), dict[int | None, list[int]]()
        holes: list[int] = []
        unused = 0
        for held in own.name_of:
            block: int | None = held
            while block is not None:
                if block not in name_of:
                    while unused in own.block_of:
                        unused += 1
                    name_of[block] = unused
                    holes.append(unused)
                    unused += 1
                elif block != held:
                    break  # this block is held, so its own iteration covers it and its ancestors
                parent = self._chain[block].parent
                children.setdefault(parent, []).append(block)
                block = parent
        starts = children.get(None, [])[:]
        while starts:
            # Follow the chain as one event as long as there is a child; other children start events of their own.
            first = block = starts.pop()
            run = [block]
            while following := children.get(block):
                block, *siblings = following
                starts += siblings
                run.append(block)
            parent = self._chain[first].parent
            yield BlocksStored(
                None if parent is None else EngineHash(name_of[parent]),
                np.array([name_of[block] for block in run], dtype=np.uint64),
                np.array([self._chain[block].local for block in run], dtype=np.uint64),
                tier,
            )
        if holes:
            yield BlocksRemoved(np.array(holes, dtype=np.uint64), tier)

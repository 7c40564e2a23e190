"""The plain index: dicts and sets, exact and simple; what the fast one is compared with and falls back to.

What lives here: who holds which sequence hash (`HolderSets`), and an index of engine events on top of it
(`PlainPrefixIndex`). What must not: Kafka records (run_fold) and tokens (hashing).

Owner of the state: one thread, or whoever holds the owner's lock; a query beside a store is not safe.
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
    """Sequence hash to a bit mask of holders, one a tier. Takes sequence hashes as Python integers.

    A query walks the request's chain and intersects holders block by block, so a hole ends just that rank's match.
    """

    def __init__(self) -> None:
        self._bit_of: dict[RankId, int] = {}
        self._rank_at: list[RankId | None] = []
        self._free_bits: list[int] = []
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._held: dict[tuple[RankId, Tier], set[int]] = {}

    def hold(self, rank: RankId, tier: Tier, blocks: Collection[int]) -> list[int]:
        """Hold blocks; gives those that were held already, none as a rule."""
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
        """Hold these blocks no more, in any order; gives those that were held."""
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
        """Forget everything of one rank."""
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
        off_device: list[tuple[int, int]] = []  # (position, ranks that hold it but not on the device)
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
        """Give every fact held, in no order: two of these are equal when these sets are."""
        for (rank, tier), held in self._held.items():
            for block in held:
                yield rank, tier, SequenceHash(block)

    def check(self) -> None:
        """Raise IndexCorrupt where masks, sets and bits disagree."""
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
            assert rank is not None  # a freed bit is cleared from every mask before it is handed out again
            scores[rank] = blocks
            mask ^= lowest

    def _tiers(
        self, scores: Mapping[RankId, int], chain: list[int], off_device: list[tuple[int, int]]
    ) -> dict[RankId, tuple[int, ...]]:
        """Count, for ranks with blocks off the device, how many have their fastest copy in each tier."""
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
    """Where a block lies on its chain, told once for all ranks.

    n_uses: ranks and tiers that hold it, and blocks known behind it; at 0 it is forgotten.
    """

    parent: int | None
    local: int
    n_uses: int = 0


class _Names:
    """What one rank calls its blocks in one tier, both ways."""

    __slots__ = ("block_of", "name_of")

    def __init__(self) -> None:
        self.block_of: dict[int, int] = {}
        self.name_of: dict[int, int] = {}

    def give(self, name: int, block: int) -> int | None:
        """Name a block; gives the block that had this name before, if it was another one. See PrefixIndex."""
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
        """Forget names; gives the blocks of those that were in use."""
        blocks = [self.block_of.pop(name) for name in names if name in self.block_of]
        for block in blocks:
            del self.name_of[block]
        return blocks


class PlainPrefixIndex:
    """An index of engine events: names and places around HolderSets; see PrefixIndex."""

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._names: dict[tuple[RankId, Tier], _Names] = {}
        self._places: dict[int, _ChainBlock] = {}

    def store(self, rank: RankId, tier: Tier, parent: EngineHash | None, names: HashArray, local: HashArray) -> None:
        """Hold consecutive blocks of one chain; see PrefixIndex."""
        check_store(rank, tier, parent, names, local)
        before = None if parent is None else self._find(rank, tier, parent)
        if not len(names):
            return
        chain: list[int] = sequence_hashes(local, before).tolist()
        for block, one in zip(chain, local.tolist(), strict=True):
            self._place(block, before, one)
            before = SequenceHash(block)
        own = self._names.setdefault((rank, tier), _Names())
        moved = [own.give(name, block) for name, block in zip(names.tolist(), chain, strict=True)]
        # One event can move a name twice, so only now is it known what is held.
        held = list(dict.fromkeys(block for block in chain if block in own.name_of))
        already = set(self._sets.hold(rank, tier, held))
        for block in held:
            self._places[block].n_uses += block not in already
        self._lose(rank, tier, [block for block in moved if block is not None and block not in own.name_of])
        self._tidy(chain)

    def remove(self, rank: RankId, tier: Tier, names: HashArray) -> int:
        """Hold these blocks no more; see PrefixIndex."""
        check_removal(rank, tier, names)
        own = self._names.get((rank, tier))
        if own is None:
            return len(names)
        blocks = own.take(names.tolist())
        self._lose(rank, tier, blocks)
        return len(names) - len(blocks)

    def clear(self, rank: RankId) -> None:
        """The rank holds nothing any more, in any tier."""
        check_rank(rank)
        for tier in Tier:
            self._lose(rank, tier, self._sets.holds(rank, tier))
            self._names.pop((rank, tier), None)

    def remove_rank(self, rank: RankId) -> None:
        """The same, and the rank is forgotten."""
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
        """Give every fact held, in the ranks' own names and in no order."""
        for (rank, tier), own in self._names.items():
            for name in own.block_of:
                yield rank, tier, EngineHash(name)

    def dump(self) -> Iterator[tuple[RankId, KvEvent]]:
        """Give events that rebuild an equal index, each tier for itself; see PrefixIndex."""
        for (rank, tier), own in self._names.items():
            for event in self._dump_tier(tier, own):
                yield rank, event

    def check(self) -> None:
        """Raise IndexCorrupt, naming the first invariant found broken."""
        self._sets.check()
        n_uses = dict.fromkeys(self._places, 0)
        for (rank, tier), own in self._names.items():
            if {block: name for name, block in own.block_of.items()} != own.name_of:
                raise IndexCorrupt("names and blocks are not one to one", rank=rank, tier=tier)
            if own.name_of.keys() != self._sets.holds(rank, tier):
                raise IndexCorrupt("what is named is not what is held", rank=rank, tier=tier)
            for block in own.name_of:
                if block not in n_uses:
                    raise IndexCorrupt("a block that is held has no place", rank=rank, tier=tier, block=block)
                n_uses[block] += 1
        if sum(len(own.name_of) for own in self._names.values()) != len(self._sets):
            raise IndexCorrupt("something is held that nobody named")
        for block, place in self._places.items():
            if place.parent is not None:
                if place.parent not in n_uses:
                    raise IndexCorrupt("a block's parent has no place", block=block, parent=place.parent)
                n_uses[place.parent] += 1
        for block, place in self._places.items():
            if not place.n_uses or place.n_uses != n_uses[block]:
                raise IndexCorrupt("uses of a place miscounted", block=block, counted=place.n_uses, found=n_uses[block])

    def __len__(self) -> int:
        return len(self._sets)

    def _find(self, rank: RankId, tier: Tier, name: EngineHash) -> SequenceHash:
        for where in (tier, *Tier):
            own = self._names.get((rank, where))
            block = None if own is None else own.block_of.get(name)
            if block is not None:
                return SequenceHash(block)
        raise UnknownParent(f"rank {rank} holds no block named {name}", rank=rank, parent=name)

    def _place(self, block: int, parent: int | None, local: int) -> None:
        if block not in self._places:
            self._places[block] = _ChainBlock(parent, local)
            if parent is not None:
                self._places[parent].n_uses += 1

    def _lose(self, rank: RankId, tier: Tier, blocks: Iterable[int]) -> None:
        """Blocks that have no name any more are not held either."""
        gone = self._sets.drop(rank, tier, blocks)
        for block in gone:
            self._places[block].n_uses -= 1
        self._tidy(gone)

    def _tidy(self, blocks: Iterable[int]) -> None:
        """Forget the places among these that nobody uses, and what was kept for their sake."""
        for block in blocks:
            at: int | None = block
            while at is not None and (place := self._places.get(at)) is not None and not place.n_uses:
                del self._places[at]
                at = place.parent
                if at is not None:
                    self._places[at].n_uses -= 1

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
                    break  # this one, and with it all before it, is walked for itself
                parent = self._places[block].parent
                children.setdefault(parent, []).append(block)
                block = parent
        starts = children.get(None, [])[:]
        while starts:
            # Downwards as one event while there is a block behind; its siblings wait for theirs.
            first = block = starts.pop()
            run = [block]
            while behind := children.get(block):
                block, *siblings = behind
                starts += siblings
                run.append(block)
            parent = self._places[first].parent
            yield BlocksStored(
                None if parent is None else EngineHash(name_of[parent]),
                np.array([name_of[block] for block in run], dtype=np.uint64),
                np.array([self._places[block].local for block in run], dtype=np.uint64),
                tier,
            )
        if holes:
            yield BlocksRemoved(np.array(holes, dtype=np.uint64), tier)

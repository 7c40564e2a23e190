"""Cache groups of a hybrid model: which blocks of its full attention a hit can use (pure).

What lives here: the blocks that each group of one rank holds, and which of them are published. What must not: names and
copies of the group that is indexed (ledger), and the format of any engine (dialects).

A hybrid model keeps several groups of layers, each with its own blocks; a block has the same name in all of them. A
prefix of n blocks is a hit if the group with full attention holds all of them, each group with a sliding window holds
the last blocks that the window reaches, and each group with a state (Mamba) holds the last block. Here, a block is an
end if a hit can end after it.

The index has leading blocks only. So a block is published while it is an end or leads to one: for a prompt that
continues a chain, the overlap is then what a hit can use. Only a prompt that leaves a chain between two ends gets too
much. So the rank is approximate once a published block is no end (`n_between`).

State: the blocks of one rank's cache groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import BlocksRemoved, BlocksStored, KvEvent, MoeLabels
from streams.core.ids import EngineHash, Tier
from streams.engines.dialects.interface import GroupChanged

#: Blocks that the groups which are not indexed hold in one rank, about 100 bytes each.
GROUP_NAMES_MAX = 1 << 21

_TIERS = tuple(Tier)


@dataclass(slots=True, eq=False)
class _Block:
    """One block of the group that is indexed, held or with blocks after it.

    names: the name in each tier that holds it. published: the same, for the tiers in which it is published. is_led_to:
    whether it and all blocks before it are held. held: for each other group, how many consecutive blocks up to this one
    it holds, at most as many as a hit needs. n_useful: blocks right after it that are ends, or lead to one.
    """

    sequence: int
    before: _Block | None
    local: int
    position: int
    moe: MoeLabels | None = None
    cxl: CxlMemoryMetadata | None = None
    names: dict[Tier, int] = field(default_factory=dict)
    published: dict[Tier, int] = field(default_factory=dict)
    is_led_to: bool = False
    is_end: bool = False
    is_between: bool = False
    n_useful: int = 0
    held: tuple[int, ...] = ()
    after: dict[int, _Block] = field(default_factory=dict)

    @property
    def is_useful(self) -> bool:
        """Whether a hit can end after this block, or after one that follows it."""
        return self.is_end or self.n_useful > 0


class CacheGroups:
    """The blocks of one rank with several cache groups.

    n_between: published blocks that are no ends. removed_early: whether a block of another group was removed of which
    the engine may have further copies. n_over: blocks of other groups that were not noted, since the limit is reached.
    """

    def __init__(self) -> None:
        self.n_between = 0
        self.removed_early = False
        self.n_over = 0
        self._groups: dict[int, int] = {}  # their places in the following
        self._needed: tuple[int, ...] = ()
        self._copies: list[dict[int, int]] = []  # by name; negative if there may be more
        self._blocks: dict[int, _Block] = {}
        self._by_name: dict[int, _Block] = {}
        self._changed: dict[int, _Block] = {}

    # -- other groups --------------------------------------------------------------------------------------------------

    def change(self, event: GroupChanged) -> None:
        """Note that another group holds blocks, or no longer holds one copy of each.

        A store at the root whose blocks are all held may report that a request reuses them, as in the ledger.
        """
        place = self._groups.get(event.group)
        if place is None:
            if not event.is_stored:
                return
            place = self._add(event.group, event.needed)
        copies, names = self._copies[place], event.engine.tolist()
        if not event.is_stored:
            for name in names:
                self._remove_copy(copies, name)
            return
        room = GROUP_NAMES_MAX - sum(map(len, self._copies))
        self.n_over += max(0, len(names) - room)
        names = names[: max(0, room)]
        is_repeated = event.at_root and all(name in copies for name in names)
        for name in names:
            known = copies.get(name, 0)
            copies[name] = -abs(known) if is_repeated else known - 1 if known < 0 else known + 1
            if not known and name in self._by_name:
                self._recompute([self._by_name[name]])

    def _add(self, group: int, needed: int) -> int:
        self._groups[group] = place = len(self._copies)
        self._copies.append({})
        self._needed += (needed,)
        self._recompute([block for block in self._blocks.values() if block.before is None])
        return place

    def _remove_copy(self, copies: dict[int, int], name: int) -> None:
        known = copies.get(name, 0)
        if abs(known) > 1:
            copies[name] = known + (1 if known < 0 else -1)
        elif known:
            self.removed_early |= known < 0
            del copies[name]
            if name in self._by_name:
                self._recompute([self._by_name[name]])

    def forget_others(self) -> int:
        """Note that the other groups hold nothing that is known; return the number of names that they held."""
        n_names = sum(map(len, self._copies))
        for copies in self._copies:
            copies.clear()
        self._recompute(list(self._blocks.values()))
        return n_names

    # -- the group that is indexed -------------------------------------------------------------------------------------

    def store(
        self,
        tier: Tier,
        name: int,
        sequence: int,
        local: int,
        before: int | None,
        position: int,
        *,
        moe: MoeLabels | None = None,
        cxl: CxlMemoryMetadata | None = None,
        is_published: bool = False,
    ) -> None:
        """Note that a tier holds a block. Blocks before it must have been noted. is_published: as it is now."""
        old = self._by_name.get(name)
        if old is not None and old.sequence != sequence:
            self.remove(tier, name)  # the engine has given the name to another block
        block = self._blocks.get(sequence)
        if block is None:
            parent = None if before is None else self._blocks.get(before)
            block = self._blocks[sequence] = _Block(sequence, parent, local, position, moe, cxl)
            if parent is not None:
                parent.after[sequence] = block
        block.names[tier] = name
        self._by_name[name] = block
        if is_published:
            block.published[tier] = name
        self._changed[sequence] = block
        self._recompute([block])

    def remove(self, tier: Tier, name: int) -> bool:
        """Note that a tier no longer holds a block; return whether it was known."""
        block = self._by_name.get(name)
        if block is None or block.names.get(tier) != name:
            return False
        del block.names[tier]
        if name not in block.names.values():
            del self._by_name[name]
        self._changed[block.sequence] = block
        self._recompute([block])
        return True

    def is_published(self, tier: Tier, sequence: int) -> bool:
        """Whether a block is published in a tier."""
        block = self._blocks.get(sequence)
        return block is not None and tier in block.published

    def changes(self) -> list[KvEvent]:
        """Return the events that publish what has changed since the last call, parents first."""
        if not self._changed:
            return []
        changed = sorted(self._changed.values(), key=lambda block: block.position)
        self._changed.clear()
        runs: list[tuple[Tier, list[_Block]]] = []
        ends: dict[tuple[Tier, int], int] = {}  # tier and last block of a run, to its number
        gone: dict[Tier, list[int]] = {}
        for block in changed:
            wanted = block.names if block.is_useful else {}
            for tier in _TIERS:
                new, old = wanted.get(tier), block.published.get(tier)
                if new == old:
                    continue
                if old is not None:
                    gone.setdefault(tier, []).append(old)
                if new is not None:
                    _extend(runs, ends, tier, block)
            block.published = dict(wanted)
            is_between = bool(block.published) and not block.is_end
            self.n_between += is_between - block.is_between
            block.is_between = is_between
        for block in reversed(changed):
            self._drop(block)
        out: list[KvEvent] = [_stored(tier, blocks) for tier, blocks in runs]
        taken = {(tier, block.names[tier]) for tier, blocks in runs for block in blocks}
        # After the stores: a block that moves to another tier is known there before it leaves the first one.
        for tier, names in gone.items():
            kept = [name for name in names if (tier, name) not in taken]  # a store has ended the others
            if kept:
                out.append(BlocksRemoved(np.array(kept, dtype=np.uint64), tier))
        return out

    # -- what follows --------------------------------------------------------------------------------------------------

    def _recompute(self, changed: Iterable[_Block]) -> None:
        """Compute what follows from changes of blocks, for them and for the blocks after them."""
        stack = list(changed)
        while stack:
            block = stack.pop()
            before = block.before
            is_led_to = bool(block.names) and (block.position == 0 if before is None else before.is_led_to)
            held = tuple(
                min(needed, 1 + (needed if before is None else before.held[place]))
                if any(name in self._copies[place] for name in block.names.values())
                else 0
                for place, needed in enumerate(self._needed)
            )
            if (is_led_to, held) != (block.is_led_to, block.held):
                block.is_led_to, block.held = is_led_to, held
                stack += block.after.values()
            is_end = is_led_to and held == self._needed
            if is_end != block.is_end:
                was_useful = block.is_useful
                block.is_end = is_end
                self._changed[block.sequence] = block
                self._note_useful(block, was_useful)

    def _note_useful(self, block: _Block, was_useful: bool) -> None:
        """Note in the blocks before a block whether it is useful."""
        while block.is_useful != was_useful:
            self._changed[block.sequence] = block
            if block.before is None:
                return
            was_before = block.before.is_useful
            block.before.n_useful += -1 if was_useful else 1
            block, was_useful = block.before, was_before

    def _drop(self, block: _Block | None) -> None:
        """Forget a block that no tier holds and that no block follows, and such blocks before it."""
        while block is not None and not block.names and not block.after:
            self._blocks.pop(block.sequence, None)
            if block.before is not None:
                block.before.after.pop(block.sequence, None)
            block = block.before


def _extend(
    runs: list[tuple[Tier, list[_Block]]], ends: dict[tuple[Tier, int], int], tier: Tier, block: _Block
) -> None:
    """Append a block to the run that it continues, or begin another one."""
    number = None if block.before is None else ends.pop((tier, block.before.sequence), None)
    if number is not None and (runs[number][1][-1].moe, runs[number][1][-1].cxl) != (block.moe, block.cxl):
        number = None
    if number is None:
        number = len(runs)
        runs.append((tier, []))
    runs[number][1].append(block)
    ends[tier, block.sequence] = number


def _stored(tier: Tier, blocks: list[_Block]) -> BlocksStored:
    first, parent = blocks[0], None
    if first.before is not None:
        names = first.before.names
        parent = EngineHash(names.get(tier, next(iter(names.values()))))
    return BlocksStored(
        parent,
        np.array([block.names[tier] for block in blocks], dtype=np.uint64),
        np.array([block.local for block in blocks], dtype=np.uint64),
        tier,
        first.moe,
        first.cxl,
    )

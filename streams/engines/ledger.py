"""The ledger: one rank's map of engine hashes to sequence hashes and copies (docs/architecture.md, Ledgers).

What lives here: the translation of an engine's events into the events that are published. An engine reports every
physical copy of a block, under any name; Kafka carries only whether a block is held. What must not: transport. Owner: a
publisher or a bridge; one ledger per rank.

In vLLM, one block may have several physical copies. Each copy is reported by a store and each eviction of a copy by a
removal; only the first store and the last removal are published. Other engines repeat a store that changes nothing;
their copies are not counted. Two engine names for one sequence hash count as two copies of it, published under the
first name. An engine may drop that name while others remain, and give it to another block. The other block is then
published under its sequence hash, since on Kafka a name identifies one block.

With `kv_cache_report_mode=full`, vLLM also reports the cached blocks that a request reuses, with an event that has the
form of a store (`BlockPool.emit_cached_block_events`). Such a report always begins at the first block of the prompt,
and all of its blocks are held. So a repeated store that names a parent, or that also has a new block, has copies. Any
other repeated store may or may not have copies; none are counted.

A store may come before that of its parent: vLLM's offloading connector reports chunks of blocks in any order. Such a
store waits within the ledger. In the device tier it waits until the end of its batch, since the engine allocates
parents first and a missing one was lost. In lower tiers it waits until the parent comes, at most `WAITING_STORES_MAX`
stores at a time. Nothing is uncertain meanwhile: without its parent, a block is part of no prefix that the rank holds.

A ledger can list everything that it holds as runs of consecutive blocks (`restated`), and can start from such runs
(`adopt`) with one copy of each block. A block whose copies are not known is removed with its first removal, so the
ledger can remove it too early, but never too late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, count
from operator import eq
from types import MappingProxyType
from typing import NamedTuple, assert_never

import numpy as np

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import (
    AllBlocksCleared,
    BlockFacts,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    MoeLabels,
    RestatedRun,
)
from streams.core.hashing import sequence_hashes
from streams.core.ids import U64_MASK, EngineHash, SequenceHash, Tier
from streams.cxl.events import BlockAddress
from streams.engines.cache_groups import CacheGroups
from streams.engines.dialects.interface import BlocksCopied, BlocksDropped, BlocksOffloaded, GroupChanged

#: Stores that wait for their parent in one rank. An offloading connector completes some hundred chunks at a time.
WAITING_STORES_MAX = 4096


#: Going through the enumeration itself takes 2 us, for each event.
_TIERS = tuple(Tier)


#: What changes which blocks of the indexed group a rank holds.
_Change = KvEvent | BlocksCopied | BlocksDropped


class _HeldBlock(NamedTuple):
    """One block held.

    published_as: the name that it was published under. position: on its chain, from 0. before: sequence hash of the
    block before it, None at the root.
    """

    published_as: int
    local: int
    before: int | None
    position: int


class _Found(NamedTuple):
    """The parent of a store."""

    sequence: int
    published_as: int
    position: int


#: The placements of a rank without blocks in CXL memory.
NO_PLACEMENTS: Mapping[int, CxlMemoryMetadata] = MappingProxyType({})


class Ledger:
    """Takes one rank's events, and returns the events to publish.

    _names[tier]: engine hash to the sequence hash of the block that it names. _copies[tier]: engine hash to the number
    of its copies, unless it is one; negative if there may be more. _held[tier]: sequence hash to the fields of
    _HeldBlock, for every block that has a name. _more_names[tier]: sequence hash to the number of its further names,
    for blocks with several. _other_names[tier]: published name to sequence hash, for the blocks that
    are published under a name that the engine does not give them, or no longer. _labels[tier]:
    sequence hash to labels, for those of the blocks that have labels.
    complete: whether the ledger contains everything that the engine reported. False after a lost batch, or a store
    whose parent is unknown, until the engine clears its cache.
    removed_early: whether a block was removed of which the engine may have further copies. has_unindexed: whether the
    engine reported blocks that no event can represent. Both are false again when the engine clears its cache.
    _waiting: stores whose parent is unknown, by the parent's name. n_waiting: their number. left_out: blocks that were
    reported by name only and that no tier holds, blocks of stores that waited too long, and offloaded blocks whose
    salts, images and adapters are not known.
    _groups: the model's further cache groups, None until the engine reports one. is_adopted: whether there are blocks
    from the table. It is not known what the engine reported before them: whether those groups hold them, and which
    further blocks have a salt, an image or an adapter.
    """

    def __init__(self, counts_copies: bool) -> None:
        self._counts_copies = counts_copies
        self._names: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._copies: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        # The values are plain tuples: a batch adds thousands of them, and a NamedTuple takes four times as long.
        self._held: tuple[dict[int, tuple[int, int, int | None, int]], ...] = tuple({} for _ in Tier)
        self._more_names: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._other_names: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._labels: tuple[dict[int, MoeLabels], ...] = tuple({} for _ in Tier)
        self.complete = True
        self.removed_early = False
        self.has_unindexed = False
        self.unknown_parents = 0
        self.unknown_removals = 0
        self.left_out = 0
        self._waiting: dict[int, list[BlocksStored]] = {}
        self.n_waiting = 0
        self._groups: CacheGroups | None = None
        self.is_adopted = False

    def count_copies(self, counts_copies: bool) -> None:
        """Change whether copies are counted, once it is known what kind of engine it is.

        If they are not counted from now on, every block has one copy.
        """
        if self._counts_copies and not counts_copies:
            for copies in self._copies:
                copies.clear()
        self._counts_copies = counts_copies

    def apply(self, event: _Change | GroupChanged, *, may_wait: bool = False) -> list[KvEvent]:
        """Take one event; return the events to publish, in order: those that change which blocks are held.

        An event that the ledger cannot place is returned unchanged, so that the agent counts it and degrades the rank.
        may_wait: whether a store may wait for its parent; the caller then calls `end_batch` after the batch. Once the
        engine has reported further cache groups, what they change is returned by `end_batch`.
        """
        if isinstance(event, GroupChanged):
            self._change_group(event)
            return []
        if isinstance(event, BlocksOffloaded):
            event = self._with_held_hashes(event)
            if not len(event.engine):
                return []
        if self._groups is None or isinstance(event, AllBlocksCleared):
            return self._apply(event, may_wait)
        n_unknown = self.unknown_parents
        changes = self._apply(event, may_wait)
        return self._grouped(self._groups, changes, event if self.unknown_parents > n_unknown else None)

    def _apply(self, event: _Change, may_wait: bool) -> list[KvEvent]:
        match event:
            case BlocksStored():
                return self._store(event, may_wait=may_wait)
            case BlocksCopied():
                return self._copy(event)
            case BlocksRemoved():
                if self._waiting:
                    self._stop_waiting(event)
                return self._remove(event)
            case BlocksDropped():
                return [each for part in self._by_tier(event) for each in self._apply(part, may_wait)]
            case AllBlocksCleared():
                for tier in _TIERS:
                    self._names[tier].clear()
                    self._copies[tier].clear()
                    self._held[tier].clear()
                    self._more_names[tier].clear()
                    self._other_names[tier].clear()
                    self._labels[tier].clear()
                self._waiting.clear()
                self.n_waiting = 0
                self.complete = True  # an empty ledger is complete, since the rank holds nothing
                self.removed_early = self.has_unindexed = self.is_adopted = False
                self._groups = None
                return [event]
            case _:
                assert_never(event)

    def end_batch(self) -> list[KvEvent]:
        """Return what follows from a whole batch.

        That is the stores in the device tier whose parent did not come within the batch, which cannot be placed, and
        what changes because of cache groups.
        """
        if not self._waiting and self._groups is None:
            return []
        out: list[KvEvent] = []
        for parent, stores in list(self._waiting.items()):
            lost = [store for store in stores if store.tier is Tier.DEVICE]
            self.unknown_parents += len(lost)
            self.complete &= not lost
            out += lost
            self._keep_waiting(parent, [store for store in stores if store.tier is not Tier.DEVICE])
        while self.n_waiting > WAITING_STORES_MAX:
            parent = next(iter(self._waiting))
            self.left_out += sum(len(store.engine) for store in self._waiting[parent])
            self._keep_waiting(parent, [])
        if self._groups is not None:
            out += self._groups.changes()
            self.removed_early |= self._groups.removed_early
            self.left_out, self._groups.n_over = self.left_out + self._groups.n_over, 0
        return out

    @property
    def n_between(self) -> int:
        """Number of published blocks that a hit cannot end after, because of the model's further cache groups."""
        return 0 if self._groups is None else self._groups.n_between

    def count_unindexed(self, n_reported: int, left_out_before: int) -> int:
        """Return the number of blocks that are not indexed, or not exactly, after a batch; note if there are any.

        n_reported: those that the decoder found in the batch. left_out_before: `left_out` as of the batch before. Call
        it after the batch's events, since a clear may come before these blocks.
        """
        n_unindexed = n_reported + self.left_out - left_out_before + self.n_between
        self.has_unindexed |= n_unindexed > 0
        return n_unindexed

    def lost_events(self) -> None:
        """Note that events of the engine were lost, or could not be decoded."""
        self.complete = False

    @property
    def may_lack_blocks(self) -> bool:
        """Whether the engine may hold blocks that the ledger lacks, although no event was lost."""
        return self.removed_early or self.has_unindexed

    def __len__(self) -> int:
        """The number of blocks held; a block in two tiers counts twice."""
        return sum(map(len, self._held))

    def adopt(self, run: RestatedRun) -> None:
        """Hold the blocks of a run, one copy each under its published name; blocks already held do not change."""
        before = run.parent
        self.is_adopted = True
        chained: list[int] = sequence_hashes(run.local, before).tolist()
        engines, locals_, tier = run.engine.tolist(), run.local.tolist(), run.tier
        for first, end, moe in run.by_labels():
            for offset in range(first, end):
                engine, block = engines[offset], chained[offset]
                if block not in self._held[tier] and engine not in self._names[tier]:
                    self._names[tier][engine] = block
                    if self._counts_copies:
                        self._copies[tier][engine] = -1
                    self._held[tier][block] = (engine, locals_[offset], before, run.start + offset)
                    if moe is not None:
                        self._labels[tier][block] = moe
                before = SequenceHash(block)

    def address(self, engine: EngineHash) -> BlockAddress | None:
        """Return the chain position of the block that an engine hash names in any tier; None if it names none."""
        for where in _TIERS:
            block = self._names[where].get(engine)
            if block is None:
                block = self._other_names[where].get(engine)
            if block is not None:
                held = _HeldBlock(*self._held[where][block])
                before = None if held.before is None else SequenceHash(held.before)
                return BlockAddress(SequenceHash(block), before, held.position)
        return None

    def restated(self, placements: Mapping[int, CxlMemoryMetadata] = NO_PLACEMENTS) -> list[RestatedRun]:
        """Return every block held, as the longest runs of consecutive blocks, parents before children.

        placements: where blocks are in CXL memory, by sequence hash.
        """
        by_position = [
            (held[-1], tier, block, _HeldBlock(*held))
            for tier in _TIERS
            for block, held in self._held[tier].items()
            if self._groups is None or self._groups.is_published(tier, block)
        ]
        by_position.sort(key=lambda row: row[:3])  # so that a block's run exists before those of its children
        runs: list[tuple[Tier, _HeldBlock, list[int], list[int], list[BlockFacts]]] = []
        ends: dict[tuple[Tier, int | None], int] = {}  # tier and last block of a run, to its number
        for _, tier, block, held in by_position:
            number = ends.pop((tier, held.before), None) if held.before is not None else None
            if number is None:
                number = len(runs)
                runs.append((tier, held, [], [], []))
            _, _, engine, local, facts = runs[number]
            moe, cxl = self._labels[tier].get(block), placements.get(block)
            if moe is not None or cxl is not None:
                _append_fact(facts, len(engine), moe, cxl)
            engine.append(held.published_as)
            local.append(held.local)
            ends[tier, block] = number
        return [
            RestatedRun(
                start=first.position,
                parent=None if first.before is None else SequenceHash(first.before),
                engine=np.array(engine, dtype=np.uint64),
                local=np.array(local, dtype=np.uint64),
                tier=tier,
                facts=tuple(facts),
            )
            for tier, first, engine, local, facts in runs
        ]

    def _change_group(self, event: GroupChanged) -> None:
        """Note what another cache group holds; which blocks are published because of it is computed once per batch."""
        if self._groups is None:
            if self.is_adopted:
                self.left_out += len(event.engine) * event.is_stored
                return
            if not event.is_stored:
                return
            self._groups = CacheGroups()
            rows = [(held[-1], tier, block) for tier in _TIERS for block, held in self._held[tier].items()]
            for position, tier, block in sorted(rows):
                name, local, before, _ = self._held[tier][block]
                moe = self._labels[tier].get(block)
                self._groups.store(tier, name, block, local, before, position, moe=moe, is_published=True)
        self._groups.change(event)

    def _grouped(self, groups: CacheGroups, changes: list[KvEvent], unplaced: _Change | None) -> list[KvEvent]:
        """Note changes of the blocks held; return those that no block is known for."""
        out: list[KvEvent] = []
        for change in changes:
            if change is unplaced or isinstance(change, AllBlocksCleared):
                out.append(change)
                continue
            names: list[int] = change.engine.tolist()
            tier = change.tier
            if isinstance(change, BlocksRemoved):
                unknown = [name for name in names if not groups.remove(tier, name)]
                if unknown:
                    out.append(BlocksRemoved(np.array(unknown, dtype=np.uint64), tier))
                continue
            for name in names:
                block = self._published_as(tier, name)
                if block is not None:  # otherwise the same event has ended it
                    _, local, before, position = self._held[tier][block]
                    groups.store(tier, name, block, local, before, position, moe=change.moe, cxl=change.cxl)
        return out

    def _copy(self, event: BlocksCopied) -> list[KvEvent]:
        """Store the blocks that other tiers hold under these names."""
        out: list[KvEvent] = []
        for engine in map(EngineHash, event.engine.tolist()):
            source = next((where for where in _TIERS if engine in self._names[where]), None)
            held = None if source is None else _HeldBlock(*self._held[source][self._names[source][engine]])
            parent = None if held is None or held.before is None else self._name_of(held.before)
            if held is None or (parent is None) != (held.before is None):
                self.left_out += 1
                continue
            local = np.array([held.local], dtype=np.uint64)
            out += self._store(BlocksStored(parent, np.array([engine], dtype=np.uint64), local, event.tier))
        return out

    def _with_held_hashes(self, event: BlocksOffloaded) -> BlocksStored:
        """Return a store with the hashes that its blocks have in the tiers that hold them under the same names.

        A block that no tier holds may have a salt, an image or an adapter that nobody reports again. So unless all
        reports about it were read, it is left out with those after it: its hash could be that of other prompts.
        """
        is_whole = event.is_whole and self.complete and not self.is_adopted
        local, n_kept = event.local.copy(), len(event.engine)
        for at, name in enumerate(event.engine.tolist()):
            tier = next((where for where in _TIERS if name in self._names[where]), None)
            if tier is not None:
                local[at] = self._held[tier][self._names[tier][name]][1]
            elif not is_whole and name not in event.known:
                n_kept = at
                break
        self.left_out += len(event.engine) - n_kept
        return BlocksStored(event.parent, event.engine[:n_kept], local[:n_kept], event.tier, event.moe, event.cxl)

    def _by_tier(self, event: BlocksDropped) -> list[BlocksRemoved]:
        """Return the removals of blocks from each tier that holds them, or in which they wait for their parent.

        Any other name is removed from the device tier, which counts it as unknown.
        """
        waiting = {
            (store.tier, name)
            for stores in self._waiting.values()
            for store in stores
            for name in store.engine.tolist()
        }
        by_tier: dict[Tier, list[int]] = {}
        for name in event.engine.tolist():
            tiers = [tier for tier in _TIERS if name in self._names[tier] or (tier, name) in waiting]
            for tier in tiers or [Tier.DEVICE]:
                by_tier.setdefault(tier, []).append(name)
        return [BlocksRemoved(np.array(names, dtype=np.uint64), tier) for tier, names in by_tier.items()]

    def _name_of(self, block: int) -> EngineHash | None:
        """Return the name that a block was published under in some tier; None if no tier holds it."""
        found = (self._held[where][block][0] for where in _TIERS if block in self._held[where])
        name = next(found, None)
        return None if name is None else EngineHash(name)

    def _keep_waiting(self, parent: int, stores: list[BlocksStored]) -> None:
        """Replace the stores that wait for a parent."""
        self.n_waiting += len(stores) - len(self._waiting.pop(parent, []))
        if stores:
            self._waiting[parent] = stores

    def _stop_waiting(self, removed: BlocksRemoved) -> None:
        """End the stores that wait before the first of their blocks that is removed; its children have no parent."""
        names = set(removed.engine.tolist())
        for parent, stores in list(self._waiting.items()):
            kept: list[BlocksStored] = []
            for store in stores:
                gone = store.tier is removed.tier and not names.isdisjoint(store.engine.tolist())
                if not gone:
                    kept.append(store)
                    continue
                first = next(at for at, name in enumerate(store.engine.tolist()) if name in names)
                if first:
                    kept.append(replace(store, engine=store.engine[:first], local=store.local[:first]))
            self._keep_waiting(parent, kept)

    def _end_waiting(self, names: list[int]) -> list[KvEvent]:
        """Place the stores whose parents are among the blocks that were just stored."""
        out: list[KvEvent] = []
        for name in names:
            stores = self._waiting.get(name)
            if stores is not None:
                self._keep_waiting(name, [])
                for store in stores:
                    out += self._store(store)
        return out

    def _store(self, event: BlocksStored, *, may_wait: bool = False) -> list[KvEvent]:
        parent_published: int | None = None
        before: int | None = None
        position = 0
        if event.parent is not None:
            found = self._find(event.parent, event.tier)
            if found is None and may_wait:
                self._keep_waiting(event.parent, [*self._waiting.get(event.parent, ()), event])
                return []
            if found is None:
                self.unknown_parents += 1
                self.complete = False
                return [event]
            before, parent_published, position = found.sequence, found.published_as, found.position + 1
        tier = event.tier
        blocks: list[int] = sequence_hashes(event.local, None if before is None else SequenceHash(before)).tolist()
        local: list[int] = event.local.tolist()
        engines: list[int] = event.engine.tolist()
        if self._are_new(tier, engines, blocks):
            self._names[tier].update(zip(engines, blocks, strict=True))
            held = zip(engines, local, chain((before,), blocks), count(position), strict=False)
            self._held[tier].update(zip(blocks, held, strict=False))
            if event.moe is not None:
                self._labels[tier].update(dict.fromkeys(blocks, event.moe))
            parent = None if parent_published is None else EngineHash(parent_published)
            stored: list[KvEvent] = [event if parent == event.parent else replace(event, parent=parent)]
            return stored + self._end_waiting(engines) if self._waiting else stored
        adds_copies = self._counts_copies and self._adds_copies(event)
        out: list[KvEvent] = []
        new: list[int] = []  # published names of the consecutive new blocks that end before `index`
        for index, (engine, block) in enumerate(zip(engines, blocks, strict=True)):
            name = self._names[tier].get(engine)
            removed = None
            if name is not None and name != block:
                # The engine gave the name to another block, so the block that it named before has one name fewer.
                removed, name = self._drop_name(engine, tier), None
            if name is None:
                is_new = self._take(engine, block, tier, local[index], before, position + index)
            else:
                is_new = False
                self._note_copy(engine, tier, adds_copies)
            if is_new and event.moe is not None:
                self._labels[tier][block] = event.moe
            before = block
            published_as = self._held[tier][block][0]
            if is_new:
                new.append(published_as)
            if removed == published_as:
                removed = None  # the store under this name already ends the older block
            if removed is None and is_new:
                continue
            self._flush(out, event, new, index + is_new, parent_published)
            parent_published = published_as
            if removed is not None:
                # After the store and not before it: the removed block may be the parent that the store names.
                out.append(BlocksRemoved(np.array([removed], dtype=np.uint64), tier))
        self._flush(out, event, new, len(blocks), parent_published)
        return out + self._end_waiting(engines) if self._waiting else out

    def _are_new(self, tier: Tier, engines: list[int], blocks: list[int]) -> bool:
        """Whether a store has blocks and names that are all new, so that each is published under its own name.

        This is what most stores have, and needs a fifth of the time.
        """
        if not engines or not self._names[tier].keys().isdisjoint(engines):
            return False
        if not self._held[tier].keys().isdisjoint(blocks) or len(set(engines)) < len(engines):
            return False
        if self._other_names[tier] and not self._other_names[tier].keys().isdisjoint(engines):
            return False
        for where in _TIERS:
            for table in (self._names[where], self._other_names[where]) if where is not tier else ():
                if table and not all(map(eq, map(table.get, engines, blocks), blocks)):
                    return False
        return True

    def _adds_copies(self, event: BlocksStored) -> bool:
        """Whether the blocks of a store that are held already have one more copy now; otherwise they may have.

        If the ledger lacks a block that the engine holds, a report of reused blocks seems to have a new one.
        """
        if event.parent is not None:
            return True
        names = self._names[event.tier]
        return self.complete and not self.removed_early and any(engine not in names for engine in event.engine.tolist())

    def _note_copy(self, engine: int, tier: Tier, adds_copies: bool) -> None:
        """Count one reported copy of a block that has this name already."""
        if not adds_copies and not self._counts_copies:
            return
        copies = self._copies[tier].get(engine, 1)
        if adds_copies:
            self._copies[tier][engine] = copies + (1 if copies > 0 else -1)
        else:
            self._copies[tier][engine] = -abs(copies)

    def _take(self, engine: int, block: int, tier: Tier, local: int, before: int | None, position: int) -> bool:
        """Give a block another name; return whether it was not held before."""
        self._names[tier][engine] = block
        if block in self._held[tier]:
            if self._other_names[tier].get(engine) == block:
                del self._other_names[tier][engine]  # the engine gives it its old name again
            self._more_names[tier][block] = self._more_names[tier].get(block, 0) + 1
            return False
        published_as = self._free_name(engine, block)
        self._held[tier][block] = (published_as, local, before, position)
        if published_as != engine:
            self._other_names[tier][published_as] = block
        return True

    def _free_name(self, engine: int, block: int) -> int:
        """Return the engine's name for a block, or its sequence hash while another block is published under that name.

        All tiers are checked, since agents look up a parent's name in all of them.
        """
        names = chain((engine,), (block + more & U64_MASK for more in count()))
        return next(name for name in names if all(self._published_as(where, name) in (None, block) for where in _TIERS))

    def _published_as(self, tier: Tier, name: int) -> int | None:
        """Return the block that is published under a name in a tier; None if there is none."""
        block = self._names[tier].get(name)
        if block is not None and block in self._held[tier] and self._held[tier][block][0] == name:
            return block
        return self._other_names[tier].get(name)

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        engines: list[int] = event.engine.tolist()
        removed = self._drop_blocks(engines, event.tier)
        if removed is None:
            removed = self._remove_each(engines, event.tier)
        if removed == engines:
            return [event] if engines else []
        return [replace(event, engine=np.array(removed, dtype=np.uint64))] if removed else []

    def _drop_blocks(self, engines: list[int], tier: Tier) -> list[int] | None:
        """Drop blocks that have one name and one copy each; return the names that they were published under.

        This is what most removals have, and needs a third of the time. Returns None, and drops nothing, for any other.
        """
        names = self._names[tier]
        if self._copies[tier] or self._more_names[tier]:
            return None
        if len(set(engines)) < len(engines) or not all(map(names.__contains__, engines)):
            return None
        blocks = list(map(names.pop, engines))
        removed = [held[0] for held in map(self._held[tier].pop, blocks)]
        if self._other_names[tier]:
            for engine, name in zip(engines, removed, strict=True):
                if name != engine:
                    del self._other_names[tier][name]
        if self._labels[tier]:
            for block in blocks:
                self._labels[tier].pop(block, None)
        return removed

    def _remove_each(self, engines: list[int], tier: Tier) -> list[int]:
        """Remove one copy of each block; return the published names of those that are no longer held."""
        names, counted = self._names[tier], self._copies[tier]
        removed: list[int] = []
        for engine in engines:
            if engine not in names:
                self.unknown_removals += 1
                if engine not in self._other_names[tier]:  # otherwise a block with other names would be removed
                    removed.append(engine)
                continue
            copies = counted.get(engine, 1)
            if abs(copies) > 1:
                counted[engine] = copies + (1 if copies < 0 else -1)
                continue
            self.removed_early |= copies < 0
            published_as = self._drop_name(engine, tier)
            if published_as is not None:
                removed.append(published_as)
        return removed

    def _drop_name(self, engine: int, tier: Tier) -> int | None:
        """Drop a name; if its block has no other, drop the block and return the name that it was published under."""
        block = self._names[tier].pop(engine)
        self._copies[tier].pop(engine, None)
        more = self._more_names[tier]
        if block in more:
            more[block] -= 1
            if not more[block]:
                del more[block]
            if self._held[tier][block][0] == engine:
                self._other_names[tier][engine] = block
            return None
        published_as = self._held[tier].pop(block)[0]
        if published_as != engine:
            del self._other_names[tier][published_as]
        self._labels[tier].pop(block, None)
        return published_as

    def _find(self, engine: EngineHash, tier: Tier) -> _Found | None:
        """Find a block by its name, in its own tier first.

        A name that the engine dropped is still valid as a parent while its block is held under another name.
        """
        for where in (tier, *_TIERS):
            block = self._names[where].get(engine)
            if block is not None:
                published_as, _, _, position = self._held[where][block]
                return _Found(block, published_as, position)
        for where in (tier, *_TIERS):
            block = self._other_names[where].get(engine)
            if block is not None:
                return _Found(block, engine, self._held[where][block][-1])
        return None

    @staticmethod
    def _flush(out: list[KvEvent], event: BlocksStored, new: list[int], end: int, parent: int | None) -> None:
        """Append a store of the new blocks that end before `end`, under the names in `new`, and empty `new`."""
        if new:
            out.append(
                replace(
                    event,
                    parent=None if parent is None else EngineHash(parent),
                    engine=np.array(new, dtype=np.uint64),
                    local=event.local[end - len(new) : end],
                )
            )
            new.clear()


def _append_fact(facts: list[BlockFacts], offset: int, moe: MoeLabels | None, cxl: CxlMemoryMetadata | None) -> None:
    """Add the facts of the block at an offset: to those of the block before it if they are equal, else on their own."""
    last = facts[-1] if facts else None
    if last is not None and last.first + last.n_blocks == offset and (last.moe, last.cxl) == (moe, cxl):
        facts[-1] = replace(last, n_blocks=last.n_blocks + 1)
    else:
        facts.append(BlockFacts(offset, 1, moe, cxl))

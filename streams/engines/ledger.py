"""The ledger: one rank's map of engine hashes to sequence hashes and copies (docs/bridges.md, Ledgers).

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

A block whose parent is not held has no known place. While no events were lost, it is left out: its parent was left out
before, or the engine never reported it, as with blocks that came by transfer (left_out). After lost events, it is
published as it is, and agents count it.

vLLM's clear empties the device tier, and does not report whether lower tiers keep their blocks. So the rank then holds
nothing that is known, and if lower tiers were in use, it may hold more.

A store may come before that of its parent: vLLM's offloading connector reports chunks of blocks in any order. Such a
store waits within the ledger. In the device tier it waits until the end of its batch, since the engine allocates
parents first. In lower tiers it waits until the parent comes, for at most `WAITING_BATCHES_MAX` batches, and at most
`WAITING_STORES_MAX` stores at a time. Nothing is uncertain meanwhile: a block that comes before its parent is part of
no prefix that the rank holds. After that, the parent was not reported, and the block is left out.

A ledger can list everything that it holds as runs of consecutive blocks (`restated`), and can start from such runs
(`adopt`) with one copy of each block. A block whose copies are not known is removed with its first removal, so the
ledger can remove it too early, but never too late.

State: one rank's ledger.
"""

from __future__ import annotations

from collections import Counter
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
from streams.core.ids import U64_MASK, EngineHash, HashArray, SequenceHash, Tier
from streams.cxl.events import BlockAddress
from streams.engines.cache_groups import CacheGroups
from streams.engines.dialects.interface import (
    BlocksCopied,
    BlocksDropped,
    BlocksLeftOut,
    BlocksOffloaded,
    DeviceCleared,
    GroupChanged,
    PagesStored,
    TierCleared,
)
from streams.engines.left_out import LOWER_TIER, UNKNOWN_PARENT, LeftOut
from streams.engines.tier_blocks import HeldBlock, TierBlocks

#: Stores that wait for their parent in one rank. An offloading connector completes some hundred chunks at a time.
WAITING_STORES_MAX = 4096

#: Batches after which a parent comes no more. vLLM sends a batch for each step, and a transfer takes a few steps.
WAITING_BATCHES_MAX = 100


#: What changes which blocks of the indexed group a rank holds.
_Change = KvEvent | BlocksCopied | BlocksDropped | BlocksLeftOut | PagesStored | TierCleared


class _Parent(NamedTuple):
    """The parent of a store."""

    sequence: int
    published_as: int
    position: int


#: The placements of a rank without blocks in CXL memory.
NO_PLACEMENTS: Mapping[int, CxlMemoryMetadata] = MappingProxyType({})


class Ledger:
    """Takes one rank's events, and returns the events to publish.

    _tiers: the blocks of each tier, by the tier's number.
    complete: whether the ledger contains everything that the engine reported, except for what was left out. False
    after lost events, until the engine clears its cache.
    removed_early: whether a block was removed of which the engine may have further copies. has_unindexed: whether the
    engine reported blocks that no event can represent. Both are false again when the engine clears its cache.
    unknown_parents: stores after lost events whose parent is not held.
    uses_lower_tiers: whether the engine has ever reported blocks in a tier below the device.
    _waiting: stores whose parent is unknown, by the parent's name. n_waiting: their number. _n_waited: for how many
    batches stores have waited for each parent. skipped: what was left out.
    _groups: the model's further cache groups, None until the engine reports one. is_adopted: whether there are blocks
    from the table. It is not known what the engine reported before them: whether those groups hold them, and which
    further blocks have a salt, an image or an adapter.
    """

    def __init__(self, counts_copies: bool) -> None:
        self._counts_copies = counts_copies
        self._tiers = tuple(TierBlocks(tier) for tier in Tier)
        self.complete = True
        self.removed_early = False
        self.has_unindexed = False
        self.unknown_parents = 0
        self.unknown_removals = 0
        self.uses_lower_tiers = False
        self.skipped = LeftOut()
        self._waiting: dict[int, list[BlocksStored]] = {}
        self.n_waiting = 0
        self._n_waited: Counter[int] = Counter()
        self._groups: CacheGroups | None = None
        self.is_adopted = False

    def count_copies(self, counts_copies: bool) -> None:
        """Change whether copies are counted, once it is known what kind of engine it is.

        If they are not counted from now on, every block has one copy.
        """
        if self._counts_copies and not counts_copies:
            for blocks in self._tiers:
                blocks.copies.clear()
        self._counts_copies = counts_copies

    @property
    def left_out(self) -> int:
        """Number of blocks that the ledger has left out and that make the rank approximate."""
        return self.skipped.n_blocks

    def apply(self, event: _Change | GroupChanged, *, may_wait: bool = False) -> list[KvEvent]:
        """Take one event; return the events to publish, in order: those that change which blocks are held.

        A removal of unknown blocks is returned unchanged, so that the agent counts it. So is a store after lost events
        that the ledger cannot place; the agent degrades the rank.
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
                return [change for part in self._by_tier(event) for change in self._apply(part, may_wait)]
            case BlocksLeftOut():
                self.uses_lower_tiers |= event.tier is not Tier.DEVICE
                self.skipped.remember(event.engine.tolist(), event.reason)
                return []
            case PagesStored():
                if self._find(event.parent, event.tier) is None:
                    self.skipped.add(self.skipped.reason_of(event.parent) or UNKNOWN_PARENT, event.n_pages)
                return []
            case TierCleared():
                return self._clear_tier(event.tier)
            case AllBlocksCleared():
                self._clear(may_keep_lower=isinstance(event, DeviceCleared))
                return [AllBlocksCleared()]
            case _:
                assert_never(event)

    def end_batch(self) -> list[KvEvent]:
        """Return what follows from a whole batch.

        That is, after lost events, the stores in the device tier whose parent did not come within the batch, and what
        changes because of cache groups.
        """
        if not self._waiting and self._groups is None:
            return []
        out: list[KvEvent] = []
        for parent, stores in list(self._waiting.items()):
            self._n_waited[parent] += 1
            kept = [store for store in stores if store.tier is not Tier.DEVICE]
            if self._n_waited[parent] > WAITING_BATCHES_MAX:
                for store in kept:
                    self._skip(store.engine, UNKNOWN_PARENT)
                kept = []
            for store in stores:
                if store.tier is Tier.DEVICE:
                    out += self._without_parent(store, parent)
            self._keep_waiting(parent, kept)
        while self.n_waiting > WAITING_STORES_MAX:
            parent = next(iter(self._waiting))
            for store in self._waiting[parent]:
                self._skip(store.engine, "unplaced")
            self._keep_waiting(parent, [])
        if self._groups is not None:
            out += self._groups.changes()
            self.removed_early |= self._groups.removed_early
            self.skipped.add("unplaced", self._groups.n_over)
            self._groups.n_over = 0
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
        return sum(len(blocks.held) for blocks in self._tiers)

    def adopt(self, run: RestatedRun) -> None:
        """Hold the blocks of a run, one copy each under its published name; blocks already held do not change."""
        before = run.parent
        self.is_adopted = True
        self.uses_lower_tiers |= run.tier is not Tier.DEVICE
        chained: list[int] = sequence_hashes(run.local, before).tolist()
        engines, locals_, blocks = run.engine.tolist(), run.local.tolist(), self._tiers[run.tier]
        for first, end, moe in run.by_labels():
            for offset in range(first, end):
                engine, block = engines[offset], chained[offset]
                if block not in blocks.held and engine not in blocks.names:
                    blocks.names[engine] = block
                    if self._counts_copies:
                        blocks.copies[engine] = -1
                    blocks.held[block] = (engine, locals_[offset], before, run.start + offset)
                    if moe is not None:
                        blocks.labels[block] = moe
                before = SequenceHash(block)

    def address(self, engine: EngineHash) -> BlockAddress | None:
        """Return the chain position of the block that an engine hash names in any tier; None if it names none."""
        for blocks in self._tiers:
            block = blocks.names.get(engine)
            if block is None:
                block = blocks.other_names.get(engine)
            if block is not None:
                held = HeldBlock(*blocks.held[block])
                before = None if held.before is None else SequenceHash(held.before)
                return BlockAddress(SequenceHash(block), before, held.position)
        return None

    def restated(self, placements: Mapping[int, CxlMemoryMetadata] = NO_PLACEMENTS) -> list[RestatedRun]:
        """Return every block held, as the longest runs of consecutive blocks, parents before children.

        placements: where blocks are in CXL memory, by sequence hash.
        """
        by_position = [
            (held[-1], blocks.tier, block, HeldBlock(*held))
            for blocks in self._tiers
            for block, held in blocks.held.items()
            if self._groups is None or self._groups.is_published(blocks.tier, block)
        ]
        by_position.sort(key=lambda row: row[:3])  # so that a block's run exists before those of its children
        runs: list[tuple[Tier, HeldBlock, list[int], list[int], list[BlockFacts]]] = []
        ends: dict[tuple[Tier, int | None], int] = {}  # tier and last block of a run, to its number
        for _, tier, block, held in by_position:
            number = ends.pop((tier, held.before), None) if held.before is not None else None
            if number is None:
                number = len(runs)
                runs.append((tier, held, [], [], []))
            _, _, engine, local, facts = runs[number]
            moe, cxl = self._tiers[tier].labels.get(block), placements.get(block)
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
                self.skipped.add("unplaced", len(event.engine) * event.is_stored)
                return
            if not event.is_stored:
                return
            self._groups = CacheGroups()
            rows = [(held[-1], blocks.tier, block) for blocks in self._tiers for block, held in blocks.held.items()]
            for position, tier, block in sorted(rows):
                name, local, before, _ = self._tiers[tier].held[block]
                moe = self._tiers[tier].labels.get(block)
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
                block = self._tiers[tier].published_as(name)
                if block is not None:  # otherwise the same event has ended it
                    _, local, before, position = self._tiers[tier].held[block]
                    groups.store(tier, name, block, local, before, position, moe=change.moe, cxl=change.cxl)
        return out

    def _clear(self, *, may_keep_lower: bool) -> None:
        """Hold nothing. may_keep_lower: whether the engine may still hold what it had in lower tiers."""
        n_lower = sum(len(blocks.held) for blocks in self._tiers if blocks.tier is not Tier.DEVICE)
        for blocks in self._tiers:
            blocks.clear()
        self._waiting.clear()
        self.n_waiting = 0
        self._n_waited.clear()
        self.skipped.clear()
        self.complete = True  # an empty ledger is complete, since nothing that it could lack is known to be held
        self.removed_early = self.has_unindexed = self.is_adopted = False
        self._groups = None
        if may_keep_lower and self.uses_lower_tiers:
            self.skipped.add(LOWER_TIER, max(n_lower, 1))

    def _clear_tier(self, tier: Tier) -> list[KvEvent]:
        """Hold nothing in one tier. Which blocks of other cache groups were in it is not known."""
        blocks = self._tiers[tier]
        names = [published_as for published_as, *_ in blocks.held.values()]
        blocks.clear()
        for parent, stores in list(self._waiting.items()):
            self._keep_waiting(parent, [store for store in stores if store.tier is not tier])
        if self._groups is not None:
            self.skipped.add("cache_group", max(self._groups.forget_others(), 1))
        return [BlocksRemoved(np.array(names, dtype=np.uint64), tier)] if names else []

    def _skip(self, engine: HashArray, reason: str) -> None:
        """Leave out blocks that the engine holds."""
        self.skipped.add(reason, len(engine))
        self.skipped.remember(engine.tolist(), reason)

    def _without_parent(self, store: BlocksStored, parent: int) -> list[KvEvent]:
        """Leave out a store whose parent is not held. If events were lost, it may be one of them; return the store."""
        reason = self.skipped.reason_of(parent)
        if reason is None and not self.complete:
            self.unknown_parents += 1
            return [store]
        self._skip(store.engine, reason or UNKNOWN_PARENT)
        return []

    def _copy(self, event: BlocksCopied) -> list[KvEvent]:
        """Store the blocks that other tiers hold under these names."""
        out: list[KvEvent] = []
        self.uses_lower_tiers |= event.tier is not Tier.DEVICE
        for engine in map(EngineHash, event.engine.tolist()):
            source = next((blocks for blocks in self._tiers if engine in blocks.names), None)
            held = None if source is None else HeldBlock(*source.held[source.names[engine]])
            parent = None if held is None or held.before is None else self._name_of(held.before)
            if held is None or (parent is None) != (held.before is None):
                self._skip(np.array([engine], dtype=np.uint64), self.skipped.reason_of(engine) or "unplaced")
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
        for index, name in enumerate(event.engine.tolist()):
            source = next((blocks for blocks in self._tiers if name in blocks.names), None)
            if source is not None:
                local[index] = source.held[source.names[name]][1]
            elif not is_whole and name not in event.known:
                n_kept = index
                break
        self._skip(event.engine[n_kept:], "unplaced")
        self.uses_lower_tiers |= event.tier is not Tier.DEVICE
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
            tiers = [blocks.tier for blocks in self._tiers if name in blocks.names or (blocks.tier, name) in waiting]
            for tier in tiers or [Tier.DEVICE]:
                by_tier.setdefault(tier, []).append(name)
        return [BlocksRemoved(np.array(names, dtype=np.uint64), tier) for tier, names in by_tier.items()]

    def _name_of(self, block: int) -> EngineHash | None:
        """Return the name that a block was published under in some tier; None if no tier holds it."""
        name = next((blocks.held[block][0] for blocks in self._tiers if block in blocks.held), None)
        return None if name is None else EngineHash(name)

    def _keep_waiting(self, parent: int, stores: list[BlocksStored]) -> None:
        """Replace the stores that wait for a parent."""
        self.n_waiting += len(stores) - len(self._waiting.pop(parent, []))
        if stores:
            self._waiting[parent] = stores
        else:
            self._n_waited.pop(parent, None)

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
                first = next(index for index, name in enumerate(store.engine.tolist()) if name in names)
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
        self.uses_lower_tiers |= event.tier is not Tier.DEVICE
        if event.parent is not None:
            parent_block = self._find(event.parent, event.tier)
            if parent_block is None and may_wait and self.skipped.reason_of(event.parent) is None:
                self._keep_waiting(event.parent, [*self._waiting.get(event.parent, ()), event])
                return []
            if parent_block is None:
                return self._without_parent(event, event.parent)
            before, parent_published, position = parent_block
            position += 1
        tier_blocks = self._tiers[event.tier]
        blocks: list[int] = sequence_hashes(event.local, None if before is None else SequenceHash(before)).tolist()
        local: list[int] = event.local.tolist()
        engines: list[int] = event.engine.tolist()
        if self.skipped:
            self.skipped.forget(engines)
        if self._are_new(tier_blocks, engines, blocks):
            tier_blocks.names.update(zip(engines, blocks, strict=True))
            held = zip(engines, local, chain((before,), blocks), count(position), strict=False)
            tier_blocks.held.update(zip(blocks, held, strict=False))
            if event.moe is not None:
                tier_blocks.labels.update(dict.fromkeys(blocks, event.moe))
            parent = None if parent_published is None else EngineHash(parent_published)
            stored: list[KvEvent] = [event if parent == event.parent else replace(event, parent=parent)]
            return stored + self._end_waiting(engines) if self._waiting else stored
        adds_copies = self._counts_copies and self._adds_copies(event)
        out: list[KvEvent] = []
        new: list[int] = []  # published names of the consecutive new blocks that end before `index`
        for index, (engine, block) in enumerate(zip(engines, blocks, strict=True)):
            name = tier_blocks.names.get(engine)
            removed = None
            if name is not None and name != block:
                # The engine gave the name to another block, so the block that it named before has one name fewer.
                removed, name = tier_blocks.drop_name(engine), None
            if name is None:
                is_new = self._take(engine, block, tier_blocks, (local[index], before, position + index))
            else:
                is_new = False
                self._note_copy(engine, tier_blocks, adds_copies)
            if is_new and event.moe is not None:
                tier_blocks.labels[block] = event.moe
            before = block
            published_as = tier_blocks.held[block][0]
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
                out.append(BlocksRemoved(np.array([removed], dtype=np.uint64), event.tier))
        self._flush(out, event, new, len(blocks), parent_published)
        return out + self._end_waiting(engines) if self._waiting else out

    def _are_new(self, tier_blocks: TierBlocks, engines: list[int], blocks: list[int]) -> bool:
        """Whether a store has blocks and names that are all new, so that each is published under its own name.

        This is what most stores have, and needs a fifth of the time.
        """
        if not engines or not tier_blocks.names.keys().isdisjoint(engines):
            return False
        if not tier_blocks.held.keys().isdisjoint(blocks) or len(set(engines)) < len(engines):
            return False
        if tier_blocks.other_names and not tier_blocks.other_names.keys().isdisjoint(engines):
            return False
        for other in self._tiers:
            for table in (other.names, other.other_names) if other is not tier_blocks else ():
                if table and not all(map(eq, map(table.get, engines, blocks), blocks)):
                    return False
        return True

    def _adds_copies(self, event: BlocksStored) -> bool:
        """Whether the blocks of a store that are held already have one more copy now; otherwise they may have.

        If the ledger lacks a block that the engine holds, a report of reused blocks seems to have a new one.
        """
        if event.parent is not None:
            return True
        names = self._tiers[event.tier].names
        return self.complete and not self.removed_early and any(engine not in names for engine in event.engine.tolist())

    def _note_copy(self, engine: int, tier_blocks: TierBlocks, adds_copies: bool) -> None:
        """Count one reported copy of a block that has this name already."""
        if not adds_copies and not self._counts_copies:
            return
        copies = tier_blocks.copies.get(engine, 1)
        if adds_copies:
            tier_blocks.copies[engine] = copies + (1 if copies > 0 else -1)
        else:
            tier_blocks.copies[engine] = -abs(copies)

    def _take(self, engine: int, block: int, tier_blocks: TierBlocks, place: tuple[int, int | None, int]) -> bool:
        """Give a block another name; return whether it was not held before.

        place: the block's local hash, the sequence hash of the block before it, and its position.
        """
        tier_blocks.names[engine] = block
        if block in tier_blocks.held:
            tier_blocks.add_name(engine, block)
            return False
        published_as = self._free_name(engine, block)
        tier_blocks.held[block] = (published_as, *place)
        if published_as != engine:
            tier_blocks.other_names[published_as] = block
        return True

    def _free_name(self, engine: int, block: int) -> int:
        """Return the engine's name for a block, or its sequence hash while another block is published under that name.

        All tiers are checked, since agents look up a parent's name in all of them.
        """
        names = chain((engine,), (block + more & U64_MASK for more in count()))
        return next(name for name in names if all(blocks.published_as(name) in (None, block) for blocks in self._tiers))

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        engines: list[int] = event.engine.tolist()
        tier_blocks = self._tiers[event.tier]
        self.uses_lower_tiers |= event.tier is not Tier.DEVICE
        removed = tier_blocks.drop_blocks(engines)
        if removed is None:
            removed = self._remove_copies(engines, tier_blocks)
        if removed == engines:
            return [event] if engines else []
        return [replace(event, engine=np.array(removed, dtype=np.uint64))] if removed else []

    def _remove_copies(self, engines: list[int], tier_blocks: TierBlocks) -> list[int]:
        """Remove one copy of each block; return the published names of those that are no longer held."""
        names, counted = tier_blocks.names, tier_blocks.copies
        removed: list[int] = []
        for engine in engines:
            if engine not in names:
                if self.skipped and self.skipped.take(engine):
                    continue
                self.unknown_removals += 1
                if engine not in tier_blocks.other_names:  # otherwise a block with other names would be removed
                    removed.append(engine)
                continue
            copies = counted.get(engine, 1)
            if abs(copies) > 1:
                counted[engine] = copies + (1 if copies < 0 else -1)
                continue
            self.removed_early |= copies < 0
            published_as = tier_blocks.drop_name(engine)
            if published_as is not None:
                removed.append(published_as)
        return removed

    def _find(self, engine: EngineHash, tier: Tier) -> _Parent | None:
        """Find a block by its name, in its own tier first.

        A name that the engine dropped is still valid as a parent while its block is held under another name.
        """
        tiers = self._tiers
        for blocks in (tiers[tier], *tiers):
            block = blocks.names.get(engine)
            if block is not None:
                published_as, _, _, position = blocks.held[block]
                return _Parent(block, published_as, position)
        for blocks in (tiers[tier], *tiers):
            block = blocks.other_names.get(engine)
            if block is not None:
                return _Parent(block, engine, blocks.held[block][-1])
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

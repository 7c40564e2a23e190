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
from dataclasses import dataclass, replace
from itertools import chain, count, repeat
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
from streams.engines.dialects.interface import BlocksCopied

#: Stores that wait for their parent in one rank. An offloading connector completes some hundred chunks at a time.
WAITING_STORES_MAX = 4096


@dataclass(slots=True)
class _Name:
    """One engine hash: the block it names and its physical copies. copies_known: whether there may be no more."""

    sequence: int
    copies: int
    copies_known: bool = True


@dataclass(slots=True)
class _HeldBlock:
    """One block held.

    published_as: the name that it was published under. names: how many engine hashes name it. position: on its chain,
    from 0. before: sequence hash of the block before it, None at the root.
    """

    published_as: int
    names: int
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

    _names[tier]: engine hash to the block that it names. _held[tier]: sequence hash to the block, for every block that
    has a name. _published[tier]: published name to sequence hash, for the same blocks. _labels[tier]: sequence hash to
    labels, for those of the blocks that have labels.
    complete: whether the ledger contains everything that the engine reported. False after a lost batch, or a store
    whose parent is unknown, until the engine clears its cache.
    removed_early: whether a block was removed of which the engine may have further copies. has_unindexed: whether the
    engine reported blocks that no event can represent. Both are false again when the engine clears its cache.
    _waiting: stores whose parent is unknown, by the parent's name. n_waiting: their number. left_out: blocks that were
    reported by name only and that no tier holds, and blocks of stores that waited too long.
    """

    def __init__(self, counts_copies: bool) -> None:
        self._counts_copies = counts_copies
        self._names: tuple[dict[int, _Name], ...] = tuple({} for _ in Tier)
        self._held: tuple[dict[int, _HeldBlock], ...] = tuple({} for _ in Tier)
        self._published: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._labels: tuple[dict[int, MoeLabels], ...] = tuple({} for _ in Tier)
        self.complete = True
        self.removed_early = False
        self.has_unindexed = False
        self.unknown_parents = 0
        self.unknown_removals = 0
        self.left_out = 0
        self._waiting: dict[int, list[BlocksStored]] = {}
        self.n_waiting = 0

    def count_copies(self, counts_copies: bool) -> None:
        """Change whether copies are counted, once it is known what kind of engine it is.

        If they are not counted from now on, every block has one copy.
        """
        if self._counts_copies and not counts_copies:
            for name in chain.from_iterable(names.values() for names in self._names):
                name.copies, name.copies_known = 1, True
        self._counts_copies = counts_copies

    def apply(self, event: KvEvent | BlocksCopied, *, may_wait: bool = False) -> list[KvEvent]:
        """Take one event; return the events to publish, in order: those that change which blocks are held.

        An event that the ledger cannot place is returned unchanged, so that the agent counts it and degrades the rank.
        may_wait: whether a store may wait for its parent; the caller then calls `end_batch` after the batch.
        """
        match event:
            case BlocksStored():
                return self._store(event, may_wait=may_wait)
            case BlocksCopied():
                return self._copy(event)
            case BlocksRemoved():
                if self._waiting:
                    self._stop_waiting(event)
                return self._remove(event)
            case AllBlocksCleared():
                for tier in Tier:
                    self._names[tier].clear()
                    self._held[tier].clear()
                    self._published[tier].clear()
                    self._labels[tier].clear()
                self._waiting.clear()
                self.n_waiting = 0
                self.complete = True  # an empty ledger is complete, since the rank holds nothing
                self.removed_early = self.has_unindexed = False
                return [event]
            case _:
                assert_never(event)

    def end_batch(self) -> list[KvEvent]:
        """Return the stores in the device tier whose parent did not come within the batch; they cannot be placed."""
        if not self._waiting:
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
        return out

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
        chained: list[int] = sequence_hashes(run.local, before).tolist()
        engines, locals_, tier = run.engine.tolist(), run.local.tolist(), run.tier
        for first, end, moe in run.by_labels():
            for offset in range(first, end):
                engine, block = engines[offset], chained[offset]
                if block not in self._held[tier] and engine not in self._names[tier]:
                    self._names[tier][engine] = _Name(block, 1, copies_known=not self._counts_copies)
                    self._held[tier][block] = _HeldBlock(engine, 1, locals_[offset], before, run.start + offset)
                    self._published[tier][engine] = block
                    if moe is not None:
                        self._labels[tier][block] = moe
                before = SequenceHash(block)

    def address(self, engine: EngineHash) -> BlockAddress | None:
        """Return the chain position of the block that an engine hash names in any tier; None if it names none."""
        for where in Tier:
            name = self._names[where].get(engine)
            block = self._published[where].get(engine) if name is None else name.sequence
            if block is not None:
                held = self._held[where][block]
                before = None if held.before is None else SequenceHash(held.before)
                return BlockAddress(SequenceHash(block), before, held.position)
        return None

    def restated(self, placements: Mapping[int, CxlMemoryMetadata] = NO_PLACEMENTS) -> list[RestatedRun]:
        """Return every block held, as the longest runs of consecutive blocks, parents before children.

        placements: where blocks are in CXL memory, by sequence hash.
        """
        by_position = [(held.position, tier, block, held) for tier in Tier for block, held in self._held[tier].items()]
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

    def _copy(self, event: BlocksCopied) -> list[KvEvent]:
        """Store the blocks that other tiers hold under these names."""
        out: list[KvEvent] = []
        for engine in map(EngineHash, event.engine.tolist()):
            source = next((where for where in Tier if engine in self._names[where]), None)
            held = None if source is None else self._held[source][self._names[source][engine].sequence]
            parent = None if held is None or held.before is None else self._name_of(held.before)
            if held is None or (parent is None) != (held.before is None):
                self.left_out += 1
                continue
            local = np.array([held.local], dtype=np.uint64)
            out += self._store(BlocksStored(parent, np.array([engine], dtype=np.uint64), local, event.tier))
        return out

    def _name_of(self, block: int) -> EngineHash | None:
        """Return the name that a block was published under in some tier; None if no tier holds it."""
        found = (self._held[where][block].published_as for where in Tier if block in self._held[where])
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
        if self._hold_new(event, blocks, local, before, position):
            parent = None if parent_published is None else EngineHash(parent_published)
            stored: list[KvEvent] = [event if parent == event.parent else replace(event, parent=parent)]
            return stored + self._end_waiting(event.engine.tolist()) if self._waiting else stored
        adds_copies = self._counts_copies and self._adds_copies(event)
        out: list[KvEvent] = []
        new: list[int] = []  # published names of the consecutive new blocks that end before `index`
        for index, (engine, block) in enumerate(zip(event.engine.tolist(), blocks, strict=True)):
            name = self._names[tier].get(engine)
            removed = None
            if name is not None and name.sequence != block:
                # The engine gave the name to another block, so the block that it named before has one name fewer.
                removed, name = self._drop_name(engine, tier), None
            is_new = self._take(engine, block, tier, name, adds_copies, local[index], before, position + index)
            if is_new and event.moe is not None:
                self._labels[tier][block] = event.moe
            before = block
            published_as = self._held[tier][block].published_as
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
        return out + self._end_waiting(event.engine.tolist()) if self._waiting else out

    def _hold_new(
        self, event: BlocksStored, blocks: list[int], local: list[int], before: int | None, position: int
    ) -> bool:
        """Hold a store's blocks if all of their hashes, and all of their names, are new; return whether they were.

        This is the usual case, in a third of the time that the blocks take one by one.
        """
        tier, engines = event.tier, event.engine.tolist()
        names, held = self._names[tier], self._held[tier]
        if (
            not engines
            or event.moe is not None
            or not names.keys().isdisjoint(engines)
            or not held.keys().isdisjoint(blocks)
            or not all(published.keys().isdisjoint(engines) for published in self._published)
            or len(set(engines)) != len(engines)
            or len(set(blocks)) != len(blocks)
        ):
            return False
        names.update(zip(engines, map(_Name, blocks, repeat(1)), strict=True))
        rows = map(_HeldBlock, engines, repeat(1), local, chain((before,), blocks), count(position))
        held.update(zip(blocks, rows, strict=False))
        self._published[tier].update(zip(engines, blocks, strict=True))
        return True

    def _adds_copies(self, event: BlocksStored) -> bool:
        """Whether the blocks of a store that are held already have one more copy now; otherwise they may have.

        If the ledger lacks a block that the engine holds, a report of reused blocks seems to have a new one.
        """
        if event.parent is not None:
            return True
        names = self._names[event.tier]
        return self.complete and not self.removed_early and any(engine not in names for engine in event.engine.tolist())

    def _take(
        self,
        engine: int,
        block: int,
        tier: Tier,
        name: _Name | None,
        adds_copies: bool,
        local: int,
        before: int | None,
        position: int,
    ) -> bool:
        """Count one reported copy; return whether the block was not held before."""
        if name is not None:
            if adds_copies:
                name.copies += 1
            elif self._counts_copies:
                name.copies_known = False
            return False
        self._names[tier][engine] = _Name(block, 1)
        held = self._held[tier].get(block)
        if held is not None:
            held.names += 1
            return False
        published_as = self._free_name(engine, block)
        self._held[tier][block] = _HeldBlock(published_as, 1, local, before, position)
        self._published[tier][published_as] = block
        return True

    def _free_name(self, engine: int, block: int) -> int:
        """Return the engine's name for a block, or its sequence hash while another block is published under that name.

        All tiers are checked, since agents look up a parent's name in all of them.
        """
        names = chain((engine,), (block + more & U64_MASK for more in count()))
        return next(name for name in names if all(table.get(name, block) == block for table in self._published))

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        removed: list[int] = []
        for engine in event.engine.tolist():
            name = self._names[event.tier].get(engine)
            if name is None:
                self.unknown_removals += 1
                if engine not in self._published[event.tier]:  # otherwise a block with other names would be removed
                    removed.append(engine)
                continue
            name.copies -= 1
            if name.copies == 0:
                self.removed_early |= not name.copies_known
                published_as = self._drop_name(engine, event.tier)
                if published_as is not None:
                    removed.append(published_as)
        return [replace(event, engine=np.array(removed, dtype=np.uint64))] if removed else []

    def _drop_name(self, engine: int, tier: Tier) -> int | None:
        """Drop a name; if its block has no other, drop the block and return the name that it was published under."""
        block = self._names[tier].pop(engine).sequence
        held = self._held[tier][block]
        held.names -= 1
        if held.names:
            return None
        del self._held[tier][block]
        del self._published[tier][held.published_as]
        self._labels[tier].pop(block, None)
        return held.published_as

    def _find(self, engine: EngineHash, tier: Tier) -> _Found | None:
        """Find a block by its name, in its own tier first.

        A name that the engine dropped is still valid as a parent while its block is held under another name.
        """
        for where in (tier, *Tier):
            name = self._names[where].get(engine)
            if name is not None:
                held = self._held[where][name.sequence]
                return _Found(name.sequence, held.published_as, held.position)
        for where in (tier, *Tier):
            block = self._published[where].get(engine)
            if block is not None:
                return _Found(block, engine, self._held[where][block].position)
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

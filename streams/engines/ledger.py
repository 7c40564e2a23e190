"""The ledger: one rank's own map of engine hashes to sequence hashes and copies (DESIGN sections 2 and 4).

What lives here: turning what an engine announces (every physical copy, under any name) into what Kafka carries: that a
block is held, or is held no more. What must not: transport. Owner: a publisher, or the bridge, one for each rank.

In vLLM one block may have several physical copies, each announced by a store and each eviction by a removal; the first
store and the last removal are facts. Other engines repeat a store that changes nothing; there, copies are not counted.
Two engine names for one sequence hash count as copies of it, published under the first name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from streams.core.hashing import sequence_hashes
from streams.core.ids import EngineHash, SequenceHash, Tier


@dataclass(slots=True)
class _Name:
    """One engine hash: the block it names and its physical copies."""

    sequence: int
    copies: int


@dataclass(slots=True)
class _Held:
    """One block held: the engine hash it was published under, and how many engine hashes name it."""

    published_as: int
    names: int


class Ledger:
    """Events of one rank in, events worth publishing out."""

    def __init__(self, counts_copies: bool) -> None:
        self._counts_copies = counts_copies
        self._names: tuple[dict[int, _Name], ...] = tuple({} for _ in Tier)
        self._held: tuple[dict[int, _Held], ...] = tuple({} for _ in Tier)
        self.unknown_parents = 0
        self.unknown_removals = 0

    def apply(self, event: KvEvent) -> list[KvEvent]:
        """Take one event; gives those that change what is held, in order, none where nothing changes.

        What the ledger cannot place is passed on as it came, so that the agent counts it and the rank is degraded.
        """
        match event:
            case BlocksStored():
                return self._store(event)
            case BlocksRemoved():
                return self._remove(event)
            case AllBlocksCleared():
                for tier in Tier:
                    self._names[tier].clear()
                    self._held[tier].clear()
                return [event]

    def __len__(self) -> int:
        """Blocks held, each tier for itself."""
        return sum(map(len, self._held))

    def _store(self, event: BlocksStored) -> list[KvEvent]:
        parent_published: int | None = None
        before: SequenceHash | None = None
        if event.parent is not None:
            found = self._find(event.parent, event.tier)
            if found is None:
                self.unknown_parents += 1
                return [event]
            before, parent_published = found
        tier = event.tier
        chain: list[int] = sequence_hashes(event.local, before).tolist()
        out: list[KvEvent] = []
        start = 0  # first block of the stretch that is news
        for index, (engine, block) in enumerate(zip(event.engine.tolist(), chain, strict=True)):
            known = self._names[tier].get(engine)
            if known is not None and known.sequence != block:
                # The engine gave the name to another block: whatever it named before is gone.
                self._flush(out, event, start, index, parent_published)
                out += self._forget(engine, tier)
                start, known = index, None
                parent_published = self._published(chain, index, tier, parent_published)
            if self._take(engine, block, tier, known):
                continue
            self._flush(out, event, start, index, parent_published)
            start = index + 1
            parent_published = self._held[tier][block].published_as
        self._flush(out, event, start, len(chain), parent_published)
        return out

    def _take(self, engine: int, block: int, tier: Tier, known: _Name | None) -> bool:
        """Count one announced copy; True where the block was not held before."""
        if known is not None:
            if self._counts_copies:
                known.copies += 1
            return False
        self._names[tier][engine] = _Name(block, 1)
        held = self._held[tier].get(block)
        if held is not None:
            held.names += 1
            return False
        self._held[tier][block] = _Held(engine, 1)
        return True

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        gone: list[int] = []
        for engine in event.engine.tolist():
            name = self._names[event.tier].get(engine)
            if name is None:
                self.unknown_removals += 1
                gone.append(engine)
                continue
            name.copies -= 1
            if name.copies == 0:
                for removed in self._forget(engine, event.tier):
                    gone.extend(removed.engine.tolist())
        return [replace(event, engine=np.array(gone, dtype=np.uint64))] if gone else []

    def _forget(self, engine: int, tier: Tier) -> list[BlocksRemoved]:
        """Drop a name; gives the removal of its block where no other name is left."""
        block = self._names[tier].pop(engine).sequence
        held = self._held[tier][block]
        held.names -= 1
        if held.names:
            return []
        del self._held[tier][block]
        return [BlocksRemoved(np.array([held.published_as], dtype=np.uint64), tier)]

    def _find(self, engine: EngineHash, tier: Tier) -> tuple[SequenceHash, int] | None:
        """Sequence hash and published name of a block that an engine hash names, its own tier first."""
        for where in (tier, *Tier):
            name = self._names[where].get(engine)
            if name is not None:
                return SequenceHash(name.sequence), self._held[where][name.sequence].published_as
        return None

    def _published(self, chain: list[int], index: int, tier: Tier, otherwise: int | None) -> int | None:
        return self._held[tier][chain[index - 1]].published_as if index else otherwise

    @staticmethod
    def _flush(out: list[KvEvent], event: BlocksStored, start: int, end: int, parent: int | None) -> None:
        if start < end:
            out.append(
                replace(
                    event,
                    parent=None if parent is None else EngineHash(parent),
                    engine=event.engine[start:end],
                    local=event.local[start:end],
                )
            )

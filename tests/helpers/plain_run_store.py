"""The store of runs in pure Python, with which the compiled one is compared, and holdings over it.

What lives here: the rules by which events change runs, as simply as possible, on dictionaries. What must not: kernels,
and which batch is new (holdings).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, assert_never

from streams.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent, MoeLabels, RestatedRun
from streams.core.hashing import sequence_hashes
from streams.core.ids import EngineHash, Epoch, HashArray, RankId, SequenceHash, Tier
from streams.core.reducer.holdings import Holdings
from streams.core.reducer.run_store import Applied
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey

Change = tuple[RunKey, Run | None]


class Slot(NamedTuple):
    """Where a block is stored: a run, and the offset in it."""

    run: Run
    offset: int


class PlainRunStore:
    """A RunStore of dictionaries. A change is a key and its run, or None for a tombstone."""

    def __init__(self) -> None:
        self._ranks: dict[RankId, _RankRuns] = {}
        self._touched: dict[RankId, None] = {}

    def load(self, epochs: Mapping[RankId, Epoch], runs: Iterable[Run]) -> int:
        """See RunStore."""
        self._ranks = {rank: _RankRuns(rank, epoch) for rank, epoch in epochs.items()}
        self._touched.clear()
        n_strays = 0
        for run in runs:
            held = self._ranks.get(run.key.rank)
            if held is None:
                n_strays += 1
            else:
                held.adopt(run)
        return n_strays

    def end(self, rank: RankId, epoch: Epoch) -> None:
        """See RunStore."""
        held = self._ranks.get(rank)
        if held is None:
            self._ranks[rank] = _RankRuns(rank, epoch)
        else:
            held.new_epoch(epoch)

    def apply(self, rank: RankId, events: Iterable[KvEvent]) -> Applied:
        """See RunStore."""
        held = self._ranks[rank]
        self._touched[rank] = None
        n_clears = n_parents = before_clear = n_removals = 0
        for event in events:
            match event:
                case BlocksStored():
                    # A store with an unknown parent is rejected. Attached anywhere else, it could claim a prefix that
                    # the rank does not hold.
                    n_parents += not held.store(event)
                case BlocksRemoved():
                    n_removals += held.remove(event)
                case AllBlocksCleared():
                    held.new_epoch(Epoch(held.epoch.incarnation, held.epoch.generation + 1))
                    n_clears += 1
                    before_clear = n_parents
                case _:
                    assert_never(event)
        return Applied(n_clears, n_parents, n_parents - before_clear, n_removals)

    def restate(self, rank: RankId, runs: Iterable[RestatedRun]) -> None:
        """See RunStore."""
        self._touched[rank] = None
        for run in runs:
            self._ranks[rank].restate(run)

    def runs_of(self, rank: RankId) -> dict[RunKey, Run]:
        """A rank's runs, by key."""
        held = self._ranks.get(rank)
        return {} if held is None else held.runs

    def n_blocks(self, rank: RankId) -> int:
        """See RunStore."""
        held = self._ranks.get(rank)
        return 0 if held is None else held.n_blocks

    def take_changes(self, tombstones_max: int) -> list[Change]:
        """See RunStore."""
        changes: list[Change] = []
        for rank in self._touched:
            held = self._ranks[rank]
            changes.extend((key, None) for key in held.emptied)
            changes.extend((key, held.runs[key]) for key in held.dirty if key in held.runs)
            held.dirty.clear()
            held.emptied.clear()
        self._touched.clear()
        for held in self._ranks.values():
            while held.stale and tombstones_max > 0:
                key = next(iter(held.stale))
                del held.stale[key]
                changes.append((key, None))
                tombstones_max -= 1
        return changes

    @property
    def has_pending_tombstones(self) -> bool:
        """See RunStore."""
        return any(held.stale for held in self._ranks.values())

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Every block held by any rank."""
        for held in self._ranks.values():
            yield from held.members()

    def check(self) -> None:
        """Raise AssertionError if the maps and the runs of a rank disagree."""
        for held in self._ranks.values():
            held.check()


class _RankRuns:
    """One rank's runs.

    _by_engine[tier]: engine hash to the slot of a held block.
    _by_sequence[tier]: sequence hash to the slot of any block in a run, held or not.
    dirty: keys of runs changed since take_changes. emptied: keys of runs that ended since then.
    stale: keys of ended epochs whose rows still need their tombstones.
    """

    def __init__(self, rank: RankId, epoch: Epoch) -> None:
        self.rank = rank
        self.epoch = epoch
        self.runs: dict[RunKey, Run] = {}
        self.dirty: dict[RunKey, None] = {}
        self.emptied: dict[RunKey, None] = {}
        self.stale: dict[RunKey, None] = {}
        self._by_engine: tuple[dict[int, Slot], ...] = tuple({} for _ in Tier)
        self._by_sequence: tuple[dict[int, Slot], ...] = tuple({} for _ in Tier)

    @property
    def n_blocks(self) -> int:
        """Number of held blocks, counting each tier separately."""
        return sum(map(len, self._by_engine))

    def adopt(self, run: Run) -> None:
        """Take a run that was read back from the table; one of an older epoch only needs its tombstone."""
        if run.epoch < self.epoch:
            self.stale[run.key] = None
            return
        self.runs[run.key] = run
        for offset, block in enumerate(run.sequence):
            self._by_sequence[run.key.tier][block] = Slot(run, offset)
        for offset in run.held():
            self._by_engine[run.key.tier][run.engine[offset]] = Slot(run, offset)

    def new_epoch(self, epoch: Epoch) -> None:
        """End everything held. Tombstones may follow later, since readers drop older epochs when they read progress."""
        assert epoch > self.epoch
        self.stale.update(dict.fromkeys(self.runs))
        self.stale.update(self.emptied)  # those emptied by this same batch still have a row in the table
        self.runs.clear()
        self.dirty.clear()
        self.emptied.clear()
        for tier in Tier:
            self._by_engine[tier].clear()
            self._by_sequence[tier].clear()
        self.epoch = epoch

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Every block held."""
        for run in self.runs.values():
            for offset in run.held():
                yield run.key.rank, run.key.tier, SequenceHash(run.sequence[offset])

    def check(self) -> None:
        """Raise AssertionError if the maps and the runs disagree; for tests."""
        for tier in Tier:
            for engine, (run, offset) in self._by_engine[tier].items():
                assert run.engine[offset] == engine
                assert run.present >> offset & 1
                assert self.runs[run.key] is run
            for block, (run, offset) in self._by_sequence[tier].items():
                assert run.sequence[offset] == block
                assert self.runs[run.key] is run
        for key, run in self.runs.items():
            assert run.key == key and run.sequence[0] == key.first and run.present
            assert len(run.local) == len(run.engine) == len(run.sequence) <= RUN_BLOCKS_MAX
            assert sum(1 for _ in run.held()) == sum(
                1 for slot in self._by_engine[key.tier].values() if slot.run is run
            )

    def store(self, event: BlocksStored) -> bool:
        """Add the blocks of a store; False if its parent is unknown."""
        parent: Slot | None = None
        if event.parent is not None:
            parent = self._find(event.parent, event.tier)
            if parent is None:
                return False
        before = SequenceHash(parent.run.sequence[parent.offset]) if parent else None
        position = parent.run.start + parent.offset + 1 if parent else 0
        self._hold_all(event.tier, event.moe, parent, before, position, event.engine, event.local)
        return True

    def restate(self, run: RestatedRun) -> None:
        """Add the blocks of a restated run, whose parent is named by its sequence hash and need not be held."""
        before = run.parent
        last = None if before is None else self._by_sequence[run.tier].get(before)
        for first, end, moe in run.by_labels():
            engine, local = run.engine[first:end], run.local[first:end]
            last, before = self._hold_all(run.tier, moe, last, before, run.start + first, engine, local)

    def _hold_all(
        self,
        tier: Tier,
        moe: MoeLabels | None,
        last: Slot | None,
        before: SequenceHash | None,
        position: int,
        engines: HashArray,
        locals_: HashArray,
    ) -> tuple[Slot | None, SequenceHash | None]:
        """Add consecutive blocks that follow `before`, which is stored at `last` if this rank has it.

        Returns the slot and the sequence hash of the last block.
        """
        chain = sequence_hashes(locals_, before).tolist()
        for engine, local, block in zip(engines.tolist(), locals_.tolist(), chain, strict=True):
            last = self._hold(tier, moe, last, before, position, engine, local, block)
            before = SequenceHash(block)
            position += 1
        return last, before

    def _hold(
        self,
        tier: Tier,
        moe: MoeLabels | None,
        last: Slot | None,
        before: SequenceHash | None,
        position: int,
        engine: int,
        local: int,
        block: int,
    ) -> Slot:
        """Add one block: to the run that already has it, or after `last` if that run can grow, or in a new run."""
        slot = self._by_sequence[tier].get(block)
        if slot is None:
            run = last.run if last is not None else None
            if (
                run is None
                or last is None
                or run.key.tier != tier
                or last.offset != len(run.sequence) - 1
                or len(run.sequence) >= RUN_BLOCKS_MAX
            ):
                key = RunKey(self.rank, tier, SequenceHash(block))
                run = Run(key, self.epoch, position, before)
                self.runs[key] = run
                self.stale.pop(key, None)  # the new epoch writes this key again, so its tombstone must not follow
            slot = Slot(run, len(run.sequence))
            run.local.append(local)
            run.engine.append(engine)
            run.sequence.append(block)
            self._by_sequence[tier][block] = slot
        run, offset = slot
        held = run.present >> offset & 1
        if held and run.engine[offset] == engine:
            return slot  # stored again; copies are not counted here
        if held:
            del self._by_engine[tier][run.engine[offset]]
        moved = self._by_engine[tier].get(engine)
        if moved is not None:  # one engine hash names one block: the later store wins
            self._unhold(moved)
            if run.key not in self.runs:  # it was the run's only block
                return self._hold(tier, moe, None, before, position, engine, local, block)
        run.engine[offset] = engine
        run.present |= 1 << offset
        if moe is not None:
            run.moe[offset] = moe
        else:
            run.moe.pop(offset, None)
        self._by_engine[tier][engine] = slot
        self.dirty[run.key] = None
        return slot

    def remove(self, event: BlocksRemoved) -> int:
        """Remove blocks; returns the number of those that were not held."""
        unknown = 0
        for engine in event.engine.tolist():
            slot = self._by_engine[event.tier].get(engine)
            if slot is None:
                unknown += 1
            else:
                self._unhold(slot)
        return unknown

    def _unhold(self, slot: Slot) -> None:
        run, offset = slot
        tier = run.key.tier
        del self._by_engine[tier][run.engine[offset]]
        run.present &= ~(1 << offset)
        run.moe.pop(offset, None)
        self.dirty[run.key] = None
        if not run.present:
            del self.runs[run.key]
            self.emptied[run.key] = None
            for block in run.sequence:
                del self._by_sequence[tier][block]

    def _find(self, parent: EngineHash, tier: Tier) -> Slot | None:
        """Find a held block by its engine hash, first in the event's own tier, then in the others, fastest first."""
        slot = self._by_engine[tier].get(parent)
        if slot is not None:
            return slot
        return next((maps[parent] for maps in self._by_engine if parent in maps), None)


PlainHoldings = Holdings[Iterable[KvEvent], Change]


def plain_holdings() -> PlainHoldings:
    """Holdings over the pure-Python store."""
    return Holdings(PlainRunStore())

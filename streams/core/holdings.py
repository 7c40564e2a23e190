"""What one rank holds, as runs: the agents' side of the index.

What lives here: runs, the rank's progress, and the rules by which an engine batch changes them. What must not: Kafka,
bytes (tables.records) and time.

A run is at most RUN_BLOCKS_MAX consecutive blocks of one chain in one tier, addressed by its first sequence hash. Runs
never split or merge: divergence starts a new one, a removal flips a presence bit, an empty run is a tombstone. Only the
view's index joins them to prefixes (DESIGN section 5).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    KvEvent,
    MoeLabels,
)
from streams.core.hashing import sequence_hashes
from streams.core.ids import EngineHash, Epoch, Incarnation, RankId, SequenceHash, Tier

#: Blocks a run record holds at most: a decode step rewrites half a full record on average, so twice as many would
#: double the 350 bytes that one generated block costs; half as many would cost 3 bytes more a block when full.
RUN_BLOCKS_MAX = 32


class RunKey(NamedTuple):
    """Address of a run record; fixed once the run exists."""

    rank: RankId
    tier: Tier
    first: SequenceHash


@dataclass(slots=True)
class Run:
    """One run. local, engine, sequence: n hashes each, n <= RUN_BLOCKS_MAX. present: bit i set when block i is held."""

    key: RunKey
    epoch: Epoch
    start: int
    parent: SequenceHash | None
    local: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    present: int = 0
    moe: dict[int, MoeLabels] = field(default_factory=dict)

    def held(self) -> Iterator[int]:
        """Offsets of the blocks held."""
        return (offset for offset in range(len(self.sequence)) if self.present >> offset & 1)


class Health(enum.IntEnum):
    """How far a rank's facts can be trusted; the numbers are on Kafka."""

    EXACT = 0
    DEGRADED = 1  # a batch was lost, or a store's parent was never seen
    APPROXIMATE = 2  # a model with groups that are not full attention
    REMOVED = 3  # the worker is gone; kept so that its late events are refused


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has been read, and what was seen on the way.

    sequence: last batch applied, BEFORE_FIRST for none. lease_ms: what the rank's bridge promised to be heard of
    within, 0 where nobody promised. silent: it was not, and no request goes to the rank until it is.
    """

    rank: RankId
    epoch: Epoch
    sequence: int = BEFORE_FIRST
    digest: int = 0
    health: Health = Health.EXACT
    model: str = ""
    block_size: int = 0
    n_blocks: int = 0
    n_gaps: int = 0
    n_unknown_parents: int = 0
    n_unknown_removals: int = 0
    lease_ms: int = 0
    silent: bool = False


class Verdict(enum.StrEnum):
    """What became of a batch; a value, not an error."""

    APPLIED = "applied"
    GAP = "gap"  # applied, but batches before it are missing
    DUPLICATE = "duplicate"
    STALE = "stale"  # of an older life of the engine, or of a removed worker


class Slot(NamedTuple):
    """Where a block lies: a run and its offset in it."""

    run: Run
    offset: int


class RankHoldings:
    """One rank's runs and progress.

    _by_engine[tier]: engine hash to the slot of a held block.
    _by_sequence[tier]: sequence hash to the slot of any block that a run has, held or not.
    dirty: keys of runs changed since take_changes. emptied: keys of runs that ended since then.
    stale: keys of an ended epoch that still lie in the log and wait for their tombstones.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.runs: dict[RunKey, Run] = {}
        self.dirty: dict[RunKey, None] = {}
        self.emptied: dict[RunKey, None] = {}
        self.stale: dict[RunKey, None] = {}
        self._by_engine: tuple[dict[int, Slot], ...] = tuple({} for _ in Tier)
        self._by_sequence: tuple[dict[int, Slot], ...] = tuple({} for _ in Tier)

    @property
    def n_blocks(self) -> int:
        """Blocks held, each tier for itself."""
        return sum(map(len, self._by_engine))

    def adopt(self, run: Run) -> None:
        """Take in a run read back from the table; one of an older epoch only awaits its tombstone."""
        if run.epoch < self.progress.epoch:
            self.stale[run.key] = None
            return
        self.runs[run.key] = run
        for offset, block in enumerate(run.sequence):
            self._by_sequence[run.key.tier][block] = Slot(run, offset)
        for offset in run.held():
            self._by_engine[run.key.tier][run.engine[offset]] = Slot(run, offset)

    def new_epoch(self, epoch: Epoch) -> None:
        """End everything held; the tombstones follow later, since progress alone tells readers."""
        assert epoch > self.progress.epoch
        self.stale.update(dict.fromkeys(self.runs))
        self.stale.update(self.emptied)  # those of this very batch still have their old record in the log
        self.runs.clear()
        self.dirty.clear()
        self.emptied.clear()
        for tier in Tier:
            self._by_engine[tier].clear()
            self._by_sequence[tier].clear()
        self.progress = replace(self.progress, epoch=epoch, n_blocks=0)

    def apply(self, event: KvEvent) -> None:
        """Apply one event of an accepted batch."""
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case AllBlocksCleared():
                epoch = self.progress.epoch
                self.new_epoch(Epoch(epoch.incarnation, epoch.generation + 1))

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Every block held."""
        for run in self.runs.values():
            for offset in run.held():
                yield run.key.rank, run.key.tier, SequenceHash(run.sequence[offset])

    def check(self) -> None:
        """Raise AssertionError where the maps and the runs disagree; for tests."""
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

    def _store(self, event: BlocksStored) -> None:
        parent: Slot | None = None
        if event.parent is not None:
            parent = self._find(event.parent, event.tier)
            if parent is None:
                # Never attached elsewhere: a guessed place could claim a prefix that nobody holds.
                self.progress = replace(
                    self.progress,
                    n_unknown_parents=self.progress.n_unknown_parents + 1,
                    health=max(self.progress.health, Health.DEGRADED),
                )
                return
        before = SequenceHash(parent.run.sequence[parent.offset]) if parent else None
        position = parent.run.start + parent.offset + 1 if parent else 0
        chain = sequence_hashes(event.local, before).tolist()
        last = parent
        for engine, local, block in zip(event.engine.tolist(), event.local.tolist(), chain, strict=True):
            last = self._hold(event, last, before, position, engine, local, block)
            before = SequenceHash(block)
            position += 1

    def _hold(
        self,
        event: BlocksStored,
        last: Slot | None,
        before: SequenceHash | None,
        position: int,
        engine: int,
        local: int,
        block: int,
    ) -> Slot:
        """Hold one block: where a run has it already, behind `last` where that run can grow, else in a new run."""
        tier = event.tier
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
                key = RunKey(self.progress.rank, tier, SequenceHash(block))
                run = Run(key, self.progress.epoch, position, before)
                self.runs[key] = run
                self.stale.pop(key, None)  # the new epoch wrote this key again: its tombstone must not come
            slot = Slot(run, len(run.sequence))
            run.local.append(local)
            run.engine.append(engine)
            run.sequence.append(block)
            self._by_sequence[tier][block] = slot
        run, offset = slot
        held = run.present >> offset & 1
        if held and run.engine[offset] == engine:
            return slot  # stored again: a fact is not a number
        if held:
            del self._by_engine[tier][run.engine[offset]]
        moved = self._by_engine[tier].get(engine)
        if moved is not None:  # one engine name cannot lie at two places: the later store wins
            self._unhold(moved)
            if run.key not in self.runs:  # it was the run's only block
                return self._hold(event, None, before, position, engine, local, block)
        run.engine[offset] = engine
        run.present |= 1 << offset
        if event.moe is not None:
            run.moe[offset] = event.moe
        else:
            run.moe.pop(offset, None)
        self._by_engine[tier][engine] = slot
        self.dirty[run.key] = None
        return slot

    def _remove(self, event: BlocksRemoved) -> None:
        unknown = 0
        for engine in event.engine.tolist():
            slot = self._by_engine[event.tier].get(engine)
            if slot is None:
                unknown += 1
            else:
                self._unhold(slot)
        if unknown:
            self.progress = replace(self.progress, n_unknown_removals=self.progress.n_unknown_removals + unknown)

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
        """Find a held block by its engine's name, in the event's own tier before the faster and slower ones."""
        slot = self._by_engine[tier].get(parent)
        if slot is not None:
            return slot
        return next((maps[parent] for maps in self._by_engine if parent in maps), None)


@dataclass(slots=True)
class Changes:
    """What one transaction must write. runs: None is a tombstone."""

    progress: list[Progress]
    runs: list[tuple[RunKey, Run | None]]


class Holdings:
    """All ranks of one partition: engine batches in, verdicts and changed records out."""

    def __init__(self) -> None:
        self.ranks: dict[RankId, RankHoldings] = {}
        self._touched: dict[RankId, None] = {}

    def load(self, progress: Iterable[Progress], runs: Iterable[Run]) -> int:
        """Start from what the table holds; gives the number of runs whose rank has no progress, which are left out.

        There are none unless a stranger wrote them: progress is written first.
        """
        for record in progress:
            self.ranks[record.rank] = RankHoldings(record)
        strays = 0
        for run in runs:
            holdings = self.ranks.get(run.key.rank)
            if holdings is None:
                strays += 1
            else:
                holdings.adopt(run)
        return strays

    def apply(self, batch: EngineBatch, events: Iterable[KvEvent]) -> Verdict:
        """Judge one batch and, if it is news, apply it."""
        rank = batch.rank
        holdings = self.ranks.get(rank)
        if holdings is None:
            holdings = self.ranks[rank] = RankHoldings(Progress(rank, Epoch(Incarnation(0), 0)))
        progress = holdings.progress
        known = progress.epoch.incarnation
        revived = batch.incarnation == known and progress.health is Health.REMOVED and batch.sequence == BEFORE_FIRST
        if batch.incarnation < known or (
            batch.incarnation == known and progress.health is Health.REMOVED and not revived
        ):
            return Verdict.STALE
        if batch.incarnation > known or revived:
            # A batch numbered BEFORE_FIRST only says that a life begins; whoever is removed and begins again is back.
            generation = progress.epoch.generation + 1 if revived else 0
            holdings.new_epoch(Epoch(batch.incarnation, generation))
            holdings.progress = progress = replace(
                holdings.progress, sequence=BEFORE_FIRST, digest=0, health=Health.EXACT
            )
        elif batch.sequence <= progress.sequence:
            return Verdict.DUPLICATE
        gap = batch.sequence > progress.sequence + 1
        holdings.progress = replace(
            progress,
            sequence=batch.sequence,
            digest=batch.digest,
            model=batch.model,
            block_size=batch.block_size,
            n_gaps=progress.n_gaps + gap,
            health=max(
                progress.health,
                Health.DEGRADED if gap else Health.EXACT,
                Health.APPROXIMATE if batch.n_unindexed else Health.EXACT,
            ),
        )
        for event in events:
            holdings.apply(event)
            if isinstance(event, AllBlocksCleared):
                # An empty cache is known exactly, whatever was lost before it. Blocks that the batch left out may have
                # come after it, though: nobody knows where in the batch they were.
                exact = Health.APPROXIMATE if batch.n_unindexed else Health.EXACT
                holdings.progress = replace(holdings.progress, health=exact)
        self._touched[rank] = None
        return Verdict.GAP if gap else Verdict.APPLIED

    def remove_worker(self, worker_id: int, incarnation: Incarnation) -> Verdict:
        """End a worker's life in every rank of this partition that is not of a newer one."""
        verdict = Verdict.STALE
        for rank, holdings in self.ranks.items():
            epoch = holdings.progress.epoch
            if rank.worker_id != worker_id or epoch.incarnation > incarnation:
                continue
            if holdings.progress.health is Health.REMOVED and epoch.incarnation == incarnation:
                continue
            holdings.new_epoch(Epoch(incarnation, epoch.generation + 1))
            holdings.progress = replace(holdings.progress, health=Health.REMOVED)
            self._touched[rank] = None
            verdict = Verdict.APPLIED
        return verdict

    def degrade_all(self) -> None:
        """The source lost records that no rank of this partition has seen."""
        for rank, holdings in self.ranks.items():
            if holdings.progress.health is Health.EXACT:
                holdings.progress = replace(
                    holdings.progress, health=Health.DEGRADED, n_gaps=holdings.progress.n_gaps + 1
                )
                self._touched[rank] = None

    def take_changes(self, tombstones_max: int) -> Changes:
        """Take what changed since the last call, progress first, with at most `tombstones_max` of ended epochs."""
        changes = Changes([], [])
        for rank in self._touched:
            holdings = self.ranks[rank]
            holdings.progress = replace(holdings.progress, n_blocks=holdings.n_blocks)
            changes.progress.append(holdings.progress)
            # Tombstones before runs, that of a key written again too: a block that moved to another run has then left
            # the first one for every reader before it is in the second.
            changes.runs.extend((key, None) for key in holdings.emptied)
            changes.runs.extend((key, run) for key in holdings.dirty if (run := holdings.runs.get(key)) is not None)
            holdings.dirty.clear()
            holdings.emptied.clear()
        self._touched.clear()
        for holdings in self.ranks.values():
            while holdings.stale and tombstones_max > 0:
                key = next(iter(holdings.stale))
                del holdings.stale[key]
                changes.runs.append((key, None))
                tombstones_max -= 1
        return changes

    @property
    def owes_tombstones(self) -> bool:
        """Whether records of ended epochs still lie in the log."""
        return any(holdings.stale for holdings in self.ranks.values())

    def members(self) -> Iterator[tuple[RankId, Tier, SequenceHash]]:
        """Every block held by any rank."""
        for holdings in self.ranks.values():
            yield from holdings.members()

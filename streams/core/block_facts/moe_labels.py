"""Which blocks of which rank belong to which slice of a mixture of experts, and who matches what a request asks for.

What lives here: `MoeSelector`, a request's question, and `LabelIndex`, the labels of run records. What must not: bytes,
who holds a block (the index), what a match is worth (cost). Not thread-safe: its shell has a lock.

Labels follow the index: a record replaces what its key had, and a rank's epoch ends all older ones. What is held is the
index's to say; here a label of a block that a rank does not hold any more counts for nobody, as only blocks of the
rank's own leading prefix are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streams.core.block_facts.fact_sets import FactQueries, FactQuery, FactSets, RankNumbering
from streams.core.block_facts.interner import FactInterner
from streams.core.events import MoeLabels
from streams.core.ids import Epoch, RankId, SequenceHash
from streams.errors import IndexFull

#: Labels of ended lives taken out behind each record: some 200 us.
_DROP_BUDGET = 128


class MoeSelector(NamedTuple):
    """Which slices a request will use. What is None, or empty, is not asked for."""

    layer_id: int | None = None
    expert_ids: frozenset[int] = frozenset()
    expert_group: int | None = None

    @property
    def asks(self) -> bool:
        """Whether anything is asked for: what asks for nothing matches nothing."""
        return self.layer_id is not None or bool(self.expert_ids) or self.expert_group is not None

    def matches(self, labels: MoeLabels) -> bool:
        """Whether a block is of such a slice: all that is asked for must be in its labels."""
        return (
            self.asks
            and (self.layer_id is None or labels.layer_id == self.layer_id)
            and (not self.expert_ids or labels.expert_id in self.expert_ids)
            and (self.expert_group is None or labels.expert_group == self.expert_group)
        )


@dataclass(frozen=True, slots=True)
class _Fact:
    """A rank's block has these labels. life: of the rank here, so that older ones count for nothing at once."""

    rank: RankId
    generation: int
    labels: MoeLabels


class _RankLabels:
    """One rank's: the epoch that its labels are of, the keys of its records, and the numbers of its facts."""

    __slots__ = ("epoch", "generation", "keys", "numbers")

    def __init__(self, epoch: Epoch, generation: int) -> None:
        self.epoch = epoch
        self.generation = generation
        self.keys: set[Hashable] = set()
        self.numbers: dict[MoeLabels, int] = {}  # each used by this too, for as long as the life lasts


class LabelIndex:
    """Labels by block, rank and record."""

    def __init__(self, sets: FactSets) -> None:
        self._sets = sets
        self._facts: FactInterner[_Fact] = FactInterner()
        self._ranks: dict[RankId, _RankLabels] = {}
        self._records: dict[Hashable, tuple[RankId, set[tuple[int, int]]]] = {}  # (block, fact) each
        self._ended: deque[tuple[int | None, int]] = deque()  # None: the rank's own use of a fact
        # Records some of whose labels found no room, by rank, as long as they are the rank's: then it is not known
        # which of its blocks match.
        self._incomplete: dict[RankId, set[Hashable]] = {}
        self._queries = FactQueries()
        self._n_generations = 0
        self.over_capacity = 0

    def __len__(self) -> int:
        """Records that have labels, also where none of these found room."""
        return len(self._records)

    def __bool__(self) -> bool:
        """Whether there are any, or any that are still to be taken out."""
        return bool(self._records or self._ended)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a record has labels."""
        return key in self._records

    def ranks(self) -> list[tuple[RankId, Epoch]]:
        """Ranks that have labels, and the epoch that these are of."""
        return [(rank, rank_labels.epoch) for rank, rank_labels in self._ranks.items()]

    @property
    def incomplete(self) -> Set[RankId]:
        """Ranks of which labels are lacking that found no room: what is not known to match may match.

        A rank is complete again when the records in question have ended, or have been written again and found room.
        """
        return self._incomplete.keys()

    def fold(
        self, key: Hashable, rank: RankId, epoch: Epoch, labelled: Iterable[tuple[SequenceHash, MoeLabels]]
    ) -> None:
        """Take in the labels of a record's held blocks; they replace what its key had.

        A record of an older epoch than its rank's changes nothing. Labels for which there is no room are counted, and
        make their rank incomplete. A record that is written again for one more block is compared with what it had: only
        what differs is told.
        """
        rank_labels = self._ranks.get(rank)
        if rank_labels is not None and epoch < rank_labels.epoch:
            return
        if rank_labels is None or epoch > rank_labels.epoch:
            self.forget_rank(rank)
            self._n_generations += 1
            rank_labels = self._ranks[rank] = _RankLabels(epoch, self._n_generations)
        now: set[tuple[int, int]] = set()
        for block, labels in labelled:
            number = rank_labels.numbers.get(labels)
            if number is None:
                number = rank_labels.numbers[labels] = self._facts.intern(_Fact(rank, rank_labels.generation, labels))
            now.add((block, number))
        before = self._records.pop(key, (rank, set[tuple[int, int]]()))[1]
        self._remove_facts(before - now)  # first: it may make the room that the others need
        n_refused = 0
        for each, fact in now - before:
            try:
                self._sets.add_fact(each, fact)
            except IndexFull:
                now.discard((each, fact))
                n_refused += 1
            else:
                self._facts.retain(fact)
        self.over_capacity += n_refused
        self._note_incomplete(rank, key, lacking=n_refused > 0)
        if now or n_refused:
            rank_labels.keys.add(key)
            self._records[key] = (rank, now)
        else:
            rank_labels.keys.discard(key)

    def end(self, key: Hashable) -> None:
        """A record is no more, or has no labels any more."""
        rank, facts = self._records.pop(key, (None, set[tuple[int, int]]()))
        if rank is not None:
            self._ranks[rank].keys.discard(key)
            self._note_incomplete(rank, key, lacking=False)
        self._remove_facts(facts)

    def tidy(self) -> None:
        """Take out some of what ended."""
        self._remove_facts([self._ended.popleft() for _ in range(min(_DROP_BUDGET, len(self._ended)))])

    def enter_epoch(self, rank: RankId, epoch: Epoch) -> None:
        """The index knows a rank's epoch: labels of an older one count for nothing."""
        rank_labels = self._ranks.get(rank)
        if rank_labels is not None and epoch > rank_labels.epoch:
            self.forget_rank(rank)

    def forget_rank(self, rank: RankId) -> None:
        """A rank's labels count for nothing; they are taken out bit by bit."""
        rank_labels = self._ranks.pop(rank, None)
        self._incomplete.pop(rank, None)
        if rank_labels is not None:
            for key in rank_labels.keys:
                self._ended += self._records.pop(key)[1]
            self._ended += [(None, number) for number in rank_labels.numbers.values()]
            self._sets.invalidate_masks()

    def query(self, selector: MoeSelector, numbers: RankNumbering) -> FactQuery:
        """Who of these has blocks of the slices that are wanted; the same object for the same question."""
        known = self._queries.get(selector, numbers)
        if known is not None:
            return known
        matching = partial(self._matching, selector, numbers)
        return self._queries.put(selector, FactQuery(self._sets, selector, numbers, matching))

    def _matching(self, selector: MoeSelector, numbers: RankNumbering, facts: frozenset[int]) -> int:
        mask = 0
        for fact in map(self._facts.facts.__getitem__, facts):
            rank_labels = self._ranks.get(fact.rank)
            if rank_labels is not None and rank_labels.generation == fact.generation and selector.matches(fact.labels):
                mask |= numbers.mask_of(fact.rank)
        return mask

    def _note_incomplete(self, rank: RankId, key: Hashable, *, lacking: bool) -> None:
        if lacking:
            self._incomplete.setdefault(rank, set()).add(key)
        elif rank in self._incomplete:
            keys = self._incomplete[rank]
            keys.discard(key)
            if not keys:
                del self._incomplete[rank]

    def _remove_facts(self, facts: Iterable[tuple[int | None, int]]) -> None:
        for block, fact in facts:
            if block is not None:
                self._sets.remove_fact(block, fact)
            self._facts.release(fact)

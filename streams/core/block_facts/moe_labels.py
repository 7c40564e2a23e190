"""The labels of ranks' blocks in a mixture of experts, and which of them match a request's query.

What lives here: `MoeSelector`, the slices that a request selects, and `LabelIndex`, the labels of run records. What
must not: bytes, which rank holds a block (the index), the weight of a match (cost). Not thread-safe: the view has a
lock.

Labels follow the index: a record replaces the labels that its key had, and a rank's epoch ends all older ones. The
index decides which blocks a rank holds. A label of a block that the rank no longer holds has no effect here, because
only labels of the rank's own leading blocks are used.

State: a router's labels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streams.core.block_facts.fact_sets import FactQueries, FactQuery, FactSets, RankNumbering
from streams.core.block_facts.interner import FactInterner
from streams.core.events import MoeLabels
from streams.core.ids import Epoch, RankId, SequenceHash
from streams.errors import IndexFull

#: Labels of ended epochs that are removed after each record, which takes about 200 us.
_DROP_BUDGET = 128


class MoeSelector(NamedTuple):
    """The slices that a request will use. A field that is None or empty selects nothing."""

    layer_id: int | None = None
    expert_ids: frozenset[int] = frozenset()
    expert_group: int | None = None

    @property
    def selects_any(self) -> bool:
        """Whether any field selects something; otherwise no block matches."""
        return self.layer_id is not None or bool(self.expert_ids) or self.expert_group is not None

    def matches(self, labels: MoeLabels) -> bool:
        """Return whether a block with these labels matches: every field that selects something must allow its label."""
        return (
            self.selects_any
            and (self.layer_id is None or labels.layer_id == self.layer_id)
            and (not self.expert_ids or labels.expert_id in self.expert_ids)
            and (self.expert_group is None or labels.expert_group == self.expert_group)
        )


@dataclass(frozen=True, slots=True)
class _Fact:
    """A rank's block has these labels. generation: of the rank's labels; facts of an older one have no effect."""

    rank: RankId
    generation: int
    labels: MoeLabels


class _RankLabels:
    """One rank's labels: their epoch, the keys of its records, and the number of the fact for each set of labels."""

    __slots__ = ("epoch", "generation", "keys", "numbers")

    def __init__(self, epoch: Epoch, generation: int) -> None:
        self.epoch = epoch
        self.generation = generation
        self.keys: set[Hashable] = set()
        self.numbers: dict[MoeLabels, int] = {}  # this dict counts as one use of each number


class LabelIndex:
    """Labels by block, rank and record."""

    def __init__(self, sets: FactSets) -> None:
        self._sets = sets
        self._facts: FactInterner[_Fact] = FactInterner()
        self._ranks: dict[RankId, _RankLabels] = {}
        self._records: dict[Hashable, tuple[RankId, set[tuple[int, int]]]] = {}  # (block, fact) each
        # (block, fact) each, still to be removed. Without a block: the use of the fact by a _RankLabels.
        self._ended: deque[tuple[int | None, int]] = deque()
        # By rank: the records that lack some of their labels because the fact sets were over capacity. While a rank has
        # such records, some of its matching blocks may not be found.
        self._incomplete: dict[RankId, set[Hashable]] = {}
        self._queries = FactQueries()
        self._n_generations = 0
        self.over_capacity = 0

    def __len__(self) -> int:
        """Return the number of records that have labels, including those whose labels were all dropped."""
        return len(self._records)

    def __bool__(self) -> bool:
        """Return whether there are labels, or ended ones that are still to be removed."""
        return bool(self._records or self._ended)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a record has labels."""
        return key in self._records

    def ranks(self) -> list[tuple[RankId, Epoch]]:
        """Return the ranks that have labels, and the epoch of these labels."""
        return [(rank, rank_labels.epoch) for rank, rank_labels in self._ranks.items()]

    def members(self) -> Iterator[tuple[RankId, int, MoeLabels]]:
        """Iterate over every label with its rank and its block's sequence hash, in no particular order."""
        facts = self._facts.facts
        for rank, labelled in self._records.values():
            for block, number in labelled:
                yield rank, block, facts[number].labels

    @property
    def incomplete(self) -> Set[RankId]:
        """Ranks that lack labels, which were dropped over capacity, so that matching blocks may be missed.

        A rank is complete again when the affected records have ended, or have been folded again with all their labels.
        """
        return self._incomplete.keys()

    def fold(
        self, key: Hashable, rank: RankId, epoch: Epoch, labelled: Iterable[tuple[SequenceHash, MoeLabels]]
    ) -> None:
        """Fold the labels of a record's held blocks; they replace those that its key had.

        A record of an older epoch than its rank's changes nothing. Labels over capacity are dropped and counted, and
        make their rank incomplete. A record that is written again for one more block is compared with its previous
        labels, so that only the difference is applied.
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
        self._remove_facts(before - now)  # first: it may free the space that the others need
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
        self._note_incomplete(rank, key, incomplete=n_refused > 0)
        if now or n_refused:
            rank_labels.keys.add(key)
            self._records[key] = (rank, now)
        else:
            rank_labels.keys.discard(key)

    def end(self, key: Hashable) -> None:
        """Remove a record that ended, or that has no labels any more."""
        rank, facts = self._records.pop(key, (None, set[tuple[int, int]]()))
        if rank is not None:
            self._ranks[rank].keys.discard(key)
            self._note_incomplete(rank, key, incomplete=False)
        self._remove_facts(facts)

    def tidy(self) -> None:
        """Remove some of the labels that ended."""
        self._remove_facts([self._ended.popleft() for _ in range(min(_DROP_BUDGET, len(self._ended)))])

    def enter_epoch(self, rank: RankId, epoch: Epoch) -> None:
        """Drop a rank's labels if they are of an older epoch than the index now has for the rank."""
        rank_labels = self._ranks.get(rank)
        if rank_labels is not None and epoch > rank_labels.epoch:
            self.forget_rank(rank)

    def forget_rank(self, rank: RankId) -> None:
        """Drop a rank's labels; they have no effect from now on, and are removed in small steps."""
        rank_labels = self._ranks.pop(rank, None)
        self._incomplete.pop(rank, None)
        if rank_labels is not None:
            for key in rank_labels.keys:
                self._ended += self._records.pop(key)[1]
            self._ended += [(None, number) for number in rank_labels.numbers.values()]
            self._sets.invalidate_masks()

    def query(self, selector: MoeSelector, numbers: RankNumbering) -> FactQuery:
        """Return the query for the ranks with matching labels; the same object for the same selector and fleet."""
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

    def _note_incomplete(self, rank: RankId, key: Hashable, *, incomplete: bool) -> None:
        if incomplete:
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

"""Decisions as a router notes them, until they are encoded (pure).

What lives here: `DecisionBatch`, the buffers of the decisions of one record, most of which already have the form in
which they are recorded. What must not: records (records), and how many batches there are (the router's recorder).

A request pays for noting its decision, so a decision makes no object that lives on except its id: one call of a kernel
selects its candidates and copies their terms into buffers that are used again. Keeping a decision's own arrays until
they are encoded takes a router more time than copying what is recorded of them: memory that lives a while is neither in
the processor's caches nor free for the next decision.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from streams.core.ids import Float64Array, HashArray, Int64Array, RankId
from streams.core.kernels.available import kernels_available
from streams.core.routing.by_policy import PolicyColumns
from streams.core.routing.cost import TermColumns
from streams.core.routing.eligibility import base_of
from streams.decision_log.families import FAMILIES_MAX, FAMILY_TOKENS, family_positions

#: Flags of a decision.
BOOKED, PREFERRED = 1, 2

#: Terms of the modes without a policy by name.
COST_TERMS = ("own_prefill_blocks", "active_prefill_blocks", "decode_blocks", "effective_cached_blocks")
_N_PRICED = 3  # of these, those that are rows of TermColumns.terms

#: Further terms, of decisions that have them.
CXL_TERM, MOE_TERM = "cxl_accessible_blocks", "moe_matching_blocks"

_U32_MAX = (1 << 32) - 1

#: A decision's row without its candidates. Packing it by struct takes a fifth of the time of NumPy's row from a tuple.
_PACK_DECISION = struct.Struct("<qIIIIIIHHBB").pack

#: Families for which a new batch has room. The buffer doubles when it is full, and is used again.
_FAMILIES_AT_FIRST = 1024

#: The estimate of the memory of a decision in addition to the buffers: its id, and its row.
DECISION_BYTES = 256

_T = TypeVar("_T", bound=np.generic)


class DecisionKind(NamedTuple):
    """What many decisions have in common; the schema explains the fields."""

    model: str
    block_size: int
    router_mode: str
    policy: str
    temperature: float
    mode: str
    degraded_because: str | None
    chosen_mode: str
    chosen_degraded_because: str | None
    phase: str | None = None


def note_in_numpy(
    costs: Float64Array,
    terms: Float64Array,
    one_more: Float64Array,
    blocks: Int64Array,
    chain: HashArray,
    chosen: int,
    n_best: int,
    n_terms: int,
    has_one_more: bool,
    n_columns: int,
    block_size: int,
    family_tokens: int,
    listed_costs: Float64Array,
    listed: Int64Array,
    n_listed: int,
    listed_terms: npt.NDArray[np.float32],
    n_listed_terms: int,
    families: HashArray,
    n_families: int,
    families_max: int,
) -> int:
    """The same as kernels.note.note_candidates."""
    del family_tokens, families_max  # constants of the module families
    best = costs.argsort(kind="stable")[:n_best]
    found = np.concatenate([[chosen], best[best != chosen]])
    n = len(found)
    listed_costs[n_listed : n_listed + n] = costs[found]
    listed[n_listed : n_listed + n] = found | (blocks[found] << 32)
    rows = listed_terms[n_listed_terms : n_listed_terms + n * n_columns].reshape(n, n_columns)
    rows[:, :n_terms] = terms[:n_terms, found].T
    if has_one_more:
        rows[:, n_terms] = one_more[found]
    positions = family_positions(len(chain), block_size)
    families[n_families : n_families + len(positions)] = chain[positions]
    return n | len(positions) << 8 | int(np.count_nonzero(costs == costs.min())) << 24


if kernels_available() and sys.byteorder == "little":
    from streams.decision_log.kernels.note import note_candidates
else:
    note_candidates = note_in_numpy


class DecisionBatch:
    """The decisions of one record, in the order in which they were made. Not thread-safe.

    n: how many there are. request_ids: one for each decision. kinds: numbers by kind and names of terms. tables: the
    ranks that candidates' numbers count, one after the other.
    """

    __slots__ = (
        "_costs",
        "_families",
        "_last",
        "_listed",
        "_n_best",
        "_n_families",
        "_n_listed",
        "_n_ranks",
        "_n_terms",
        "_number",
        "_offset",
        "_offsets",
        "_rows",
        "_terms",
        "kinds",
        "n",
        "n_max",
        "request_ids",
        "tables",
    )

    def __init__(self, n_max: int, n_best: int) -> None:
        """n_max: decisions. n_best: cheapest candidates that are kept in addition to the chosen one."""
        self.n_max = n_max
        self._n_best = n_best
        self._costs = np.empty(n_max * (n_best + 1))
        self._listed = np.empty(n_max * (n_best + 1), dtype=np.int64)
        self._terms = np.empty(n_max * (n_best + 1) * len(COST_TERMS), dtype=np.float32)
        self._families = np.empty(_FAMILIES_AT_FIRST, dtype=np.uint64)
        self.clear()

    def clear(self) -> None:
        """Begin again, with the same buffers."""
        self.n = 0
        self.request_ids: list[str] = []
        self.kinds: dict[tuple[DecisionKind, tuple[str, ...]], int] = {}
        self.tables: list[Sequence[RankId]] = []
        self._offsets: dict[int, int] = {}  # of tables by their ids
        self._rows = bytearray()
        self._n_listed = self._n_terms = self._n_families = self._n_ranks = 0
        # Most decisions have the same kind, terms and candidates as the one before: the same objects.
        self._last: tuple[DecisionKind | None, tuple[str, ...], Sequence[RankId]] = (None, (), ())
        self._number = self._offset = 0

    @property
    def n_bytes(self) -> int:
        """Bytes in use, by an estimate."""
        buffers = self._costs.nbytes + self._listed.nbytes + self._terms.nbytes + self._families.nbytes
        return buffers + DECISION_BYTES * self.n

    def add(
        self,
        request_id: str,
        decided_at_ms: int,
        queued_ms: int,
        kind: DecisionKind,
        n_tokens: int,
        request_blocks: int,
        expected_output_tokens: int | None,
        chain: HashArray,
        columns: TermColumns | PolicyColumns,
        chosen: int,
        flags: int,
    ) -> int:
        """Note a decision; return how many there are now. There must be fewer than n_max before.

        chain: uint64[n], the prompt's sequence hashes. chosen: index of the chosen candidate. Raises ValueError if a
        policy's terms are not what it names.
        """
        if isinstance(columns, PolicyColumns):
            prices, held = columns.prices, columns.held
            # Policies of other packages may return other arrays than the kernel takes.
            costs = np.ascontiguousarray(prices.costs, dtype=np.float64)
            terms = np.ascontiguousarray(prices.terms, dtype=np.float64)
            names = prices.names
            n_given, has_one_more, one_more, blocks = len(names), False, costs, held.scores
            if terms.shape != (n_given, len(blocks)) or costs.shape != blocks.shape:
                raise ValueError(f"the policy names {n_given} terms, and has {terms.shape} of them")
            cxl, moe = held.cxl_accessible_scores, held.moe_scores
        else:
            terms, names, n_given, has_one_more = columns.terms, COST_TERMS, _N_PRICED, True
            costs, one_more, blocks = terms[3], columns.effective_cached_blocks, columns.scores
            cxl, moe = columns.cxl_accessible_scores, columns.moe_scores
        if cxl is not None or moe is not None:
            names = _with_further(names, cxl, moe)
        ranks, last = columns.ranks, self._last
        if kind is not last[0] or names is not last[1] or ranks is not last[2]:
            self._begin(kind, names, ranks)
        n_columns, n_listed, n_noted, n_families = len(names), self._n_listed, self._n_terms, self._n_families
        if n_families + FAMILIES_MAX > len(self._families):
            self._families = _doubled(self._families)
        found = note_candidates(
            costs,
            terms,
            one_more,
            blocks,
            chain,
            chosen,
            self._n_best,
            n_given,
            has_one_more,
            n_columns,
            kind.block_size,
            FAMILY_TOKENS,
            self._costs,
            self._listed,
            n_listed,
            self._terms,
            n_noted,
            self._families,
            n_families,
            FAMILIES_MAX,
        )
        n, n_new_families = found & 0xFF, found >> 8 & 0xFFFF
        self._n_listed, self._n_terms = n_listed + n, n_noted + n * n_columns
        self._n_families = n_families + n_new_families
        if len(names) > n_given + has_one_more:
            self._add_further(slice(n_listed, n_listed + n), n_noted, n_columns, cxl, moe)
        if self._offset or type(ranks) is not tuple:
            self._number_ranks(slice(n_listed, n_listed + n), ranks)
        self._rows += _PACK_DECISION(
            decided_at_ms,
            queued_ms,
            n_tokens,
            request_blocks,
            0 if expected_output_tokens is None else min(expected_output_tokens, _U32_MAX),
            len(ranks),
            found >> 24,
            self._number,
            n_new_families,
            n,
            flags,
        )
        self.request_ids.append(request_id)
        self.n += 1
        return self.n

    def rows(self) -> bytes:
        """All decisions, packed."""
        return bytes(self._rows)

    def listed(self) -> tuple[Float64Array, Int64Array, Int64Array]:
        """The candidates of all decisions: their costs, their ranks as positions in `tables`, and their blocks."""
        of = slice(self._n_listed)
        return self._costs[of], self._listed[of] & _U32_MAX, self._listed[of] >> 32

    def terms(self) -> npt.NDArray[np.float32]:
        """The terms of all candidates, those of each one after the other."""
        return self._terms[: self._n_terms]

    def families(self) -> HashArray:
        """The families of all decisions, before they are salted."""
        return self._families[: self._n_families]

    def _begin(self, kind: DecisionKind, names: tuple[str, ...], ranks: Sequence[RankId]) -> None:
        """The next decisions are of this kind, with these terms and candidates."""
        self._number = self.kinds.setdefault((kind, names), len(self.kinds))
        base, _ = base_of(ranks)
        offset = self._offsets.get(id(base))
        if offset is None:
            offset = self._offsets[id(base)] = self._n_ranks  # the table keeps it alive, so that its id is its own
            self.tables.append(base)
            self._n_ranks += len(base)
        self._offset, self._last = offset, (kind, names, ranks)
        n_needed = self._n_terms + (self.n_max - self.n) * (self._n_best + 1) * len(names)
        if n_needed > len(self._terms):
            self._terms = np.concatenate([self._terms, np.empty(n_needed - len(self._terms), dtype=np.float32)])

    def _number_ranks(self, of: slice, ranks: Sequence[RankId]) -> None:
        """Turn positions among the candidates into positions in `tables`."""
        _, at = base_of(ranks)
        listed = self._listed[of]
        if at is not None:
            listed[:] = at[listed & _U32_MAX] | (listed >> 32 << 32)
        listed += self._offset

    def _add_further(
        self, of: slice, n_terms: int, n_columns: int, cxl: Int64Array | None, moe: Int64Array | None
    ) -> None:
        """Set the last terms of the candidates that were just listed."""
        positions = self._listed[of] & _U32_MAX
        rows = self._terms[n_terms : n_terms + len(positions) * n_columns].reshape(-1, n_columns)
        further = [each for each in (cxl, moe) if each is not None]
        for column, each in zip(range(n_columns - len(further), n_columns), further, strict=True):
            rows[:, column] = each[positions]


def _with_further(names: tuple[str, ...], cxl: Int64Array | None, moe: Int64Array | None) -> tuple[str, ...]:
    return (*names, *([] if cxl is None else [CXL_TERM]), *([] if moe is None else [MOE_TERM]))


def _doubled(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    return np.concatenate([array, np.empty_like(array)])

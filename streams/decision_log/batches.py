"""Decisions as a router notes them, until they are encoded (pure).

What lives here: `DecisionBatch`, the buffers of the decisions of one record. What must not: where they have what
(buffers), records (records), and how many batches there are (the router's recorder).

A request pays for noting its decision, so a decision makes no object that lives on except its id: one call of a kernel
selects its candidates, and copies their terms and everything else into buffers that are used again. Keeping a
decision's own arrays until they are encoded takes a router more time than copying what is recorded of them: memory that
lives a while is neither in the processor's caches nor free for the next decision.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.ids import Float64Array, HashArray, Int64Array, RankId
from streams.core.kernels.available import kernels_available
from streams.core.routing.by_policy import PolicyColumns
from streams.core.routing.cost import TermColumns
from streams.core.routing.eligibility import base_of
from streams.decision_log.buffers import (
    BLOCK_SIZE,
    FAMILIES_AT,
    HAS_ONE_MORE,
    HEAD,
    KIND,
    LISTED_AT,
    N_BEST,
    N_COLUMNS,
    N_FAMILIES,
    N_GIVEN,
    N_LISTED,
    N_TERMS,
    ROW,
    TERMS_AT,
)
from streams.decision_log.families import FAMILIES_MAX, family_positions

#: Flags of a decision.
BOOKED, PREFERRED = 1, 2

#: Terms of the modes without a policy by name.
COST_TERMS = ("own_prefill_blocks", "active_prefill_blocks", "decode_blocks", "effective_cached_blocks")
_N_PRICED = 3  # of these, those that are rows of TermColumns.terms

#: Further terms, of decisions that have them.
CXL_TERM, MOE_TERM = "cxl_accessible_blocks", "moe_matching_blocks"

_U32_MAX = (1 << 32) - 1

#: A decision without its candidates, as it is recorded.
DECISION = np.dtype(
    [
        ("decided_at_ms", "<i8"),
        ("queued_ms", "<u4"),
        ("n_tokens", "<u4"),
        ("request_blocks", "<u4"),
        ("expected_output_tokens", "<u4"),
        ("n_eligible", "<u4"),
        ("n_lowest", "<u4"),
        ("kind", "<u2"),
        ("n_families", "<u2"),
        ("n_candidates", "u1"),
        ("flags", "u1"),
    ]
)

#: The estimate of the memory of a decision in addition to the buffers, for its id.
DECISION_BYTES = 256


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
    column: Float64Array,
    terms: Float64Array,
    blocks: Int64Array,
    chain: HashArray,
    integers: Int64Array,
    numbers: Float64Array,
    chosen: int,
    decided_at_ms: int,
    queued_ms: int,
    n_tokens: int,
    request_blocks: int,
    expected_output_tokens: int,
    flags: int,
) -> int:
    """The same as kernels.note.note_decision."""
    n_done, n_listed, n_terms, n_families, listed_at, families_at, terms_at, n_best = integers[:N_GIVEN].tolist()
    n_given, has_one_more, n_columns, kind, block_size = integers[N_GIVEN:HEAD].tolist()
    if terms.shape != (n_given + has_one_more, len(blocks)) or column.shape != blocks.shape:
        return 0
    costs = terms[n_given] if has_one_more else column
    best = costs.argsort(kind="stable")[:n_best]
    found = np.concatenate([[chosen], best[best != chosen]])
    n = len(found)
    numbers[n_listed : n_listed + n] = costs[found]
    integers[listed_at + n_listed : listed_at + n_listed + n] = found | (blocks[found] << 32)
    rows = numbers[terms_at:].view(np.float32)[n_terms : n_terms + n * n_columns].reshape(n, n_columns)
    rows[:, :n_given] = terms[:n_given, found].T
    if has_one_more:
        rows[:, n_given] = column[found]
    kept = chain[family_positions(len(chain), block_size)]
    integers[families_at + n_families : families_at + n_families + len(kept)] = kept.view(np.int64)
    n_lowest = int(np.count_nonzero(costs == costs.min()))
    row = HEAD + n_done * ROW
    integers[row : row + 5] = decided_at_ms, queued_ms, n_tokens, request_blocks, expected_output_tokens
    integers[row + 5 : row + ROW] = len(blocks), n_lowest, kind, len(kept), n, flags
    integers[: N_FAMILIES + 1] += (1, n, n * n_columns, len(kept))
    return n


if kernels_available() and sys.byteorder == "little":
    from streams.decision_log.kernels.note import note_decision
else:
    note_decision = note_in_numpy


class DecisionBatch:
    """The decisions of one record, in the order in which they were made. Not thread-safe.

    n: how many there are. request_ids: one for each decision. kinds: numbers by kind and names of terms. tables: the
    ranks that candidates' numbers count, one after the other.
    """

    __slots__ = (
        "_integers",
        "_last",
        "_n_best",
        "_n_ranks",
        "_numbers",
        "_offset",
        "_offsets",
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
        n_listed = n_max * (n_best + 1)
        # There is space for the most families. What is not used of it is never touched, and takes no memory.
        self._integers = np.empty(HEAD + n_max * ROW + n_listed + n_max * FAMILIES_MAX, dtype=np.int64)
        self._integers[:HEAD] = 0
        self._integers[LISTED_AT] = HEAD + n_max * ROW
        self._integers[FAMILIES_AT] = HEAD + n_max * ROW + n_listed
        self._integers[TERMS_AT] = n_listed
        self._integers[N_BEST] = n_best
        self._numbers = np.empty(n_listed * (1 + len(COST_TERMS)))
        self.clear()

    def clear(self) -> None:
        """Begin again, with the same buffers."""
        self.n = 0
        self.request_ids: list[str] = []
        self.kinds: dict[tuple[DecisionKind, tuple[str, ...]], int] = {}
        self.tables: list[Sequence[RankId]] = []
        self._offsets: dict[int, int] = {}  # of tables by their ids
        self._integers[: N_FAMILIES + 1] = 0
        self._n_ranks = 0
        # Most decisions have the same kind, terms and candidates as the one before: the same objects.
        self._last: tuple[DecisionKind | None, tuple[str, ...], Sequence[RankId]] = (None, (), ())
        self._offset = 0

    @property
    def n_bytes(self) -> int:
        """Bytes in use, by an estimate."""
        return self._integers.nbytes + self._numbers.nbytes + DECISION_BYTES * self.n

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
            column, terms, blocks, names, is_priced = prices.costs, prices.terms, held.scores, prices.names, False
            cxl, moe = held.cxl_accessible_scores, held.moe_scores
        else:
            column, terms, blocks = columns.effective_cached_blocks, columns.terms, columns.scores
            cxl, moe, names, is_priced = columns.cxl_accessible_scores, columns.moe_scores, COST_TERMS, True
        if cxl is not None or moe is not None:
            names = _with_further(names, cxl, moe)
        ranks, last = columns.ranks, self._last
        if kind is not last[0] or names is not last[1] or ranks is not last[2]:
            self._begin(kind, names, ranks, is_priced, (cxl is not None) + (moe is not None))
        expected = 0 if expected_output_tokens is None else min(expected_output_tokens, _U32_MAX)
        rest = (
            blocks,
            chain,
            self._integers,
            self._numbers,
            chosen,
            decided_at_ms,
            queued_ms,
            n_tokens,
            request_blocks,
            expected,
            flags,
        )
        try:
            n = note_decision(column, terms, *rest)
        except (TypeError, AttributeError):
            # Policies of other packages may return other arrays than the kernel takes.
            column, terms = (np.array(each, dtype=np.float64, order="C") for each in (column, terms))
            n = note_decision(column, terms, *rest)
        if not n:
            raise ValueError(f"the policy names the terms {names}, and has {terms.shape} of them")
        self.request_ids.append(request_id)
        self.n += 1
        if cxl is not None or moe is not None:
            self._add_further(n, len(names), cxl, moe)
        if self._offset or type(ranks) is not tuple:
            self._number_ranks(n, ranks)
        return self.n

    def rows(self) -> npt.NDArray[Any]:
        """All decisions, as they are recorded."""
        words = self._integers[HEAD : HEAD + self.n * ROW].reshape(-1, ROW)
        rows = np.empty(self.n, dtype=DECISION)
        for number, name in enumerate(DECISION.fields or ()):
            rows[name] = words[:, number]
        return rows

    def listed(self) -> tuple[Float64Array, Int64Array, Int64Array]:
        """The candidates of all decisions: their costs, their ranks as positions in `tables`, and their blocks."""
        n, at = self._integers[[N_LISTED, LISTED_AT]].tolist()
        listed = self._integers[at : at + n]
        return self._numbers[:n], listed & _U32_MAX, listed >> 32

    def terms(self) -> npt.NDArray[np.float32]:
        """The terms of all candidates, those of each one after the other."""
        n, at = self._integers[[N_TERMS, TERMS_AT]].tolist()
        return self._numbers[at:].view(np.float32)[:n]

    def families(self) -> HashArray:
        """The families of all decisions, before they are salted."""
        n, at = self._integers[[N_FAMILIES, FAMILIES_AT]].tolist()
        return self._integers[at : at + n].view(np.uint64)

    def _begin(
        self, kind: DecisionKind, names: tuple[str, ...], ranks: Sequence[RankId], is_priced: bool, n_further: int
    ) -> None:
        """The next decisions are of this kind, with these terms and candidates."""
        integers = self._integers
        integers[KIND] = self.kinds.setdefault((kind, names), len(self.kinds))
        integers[BLOCK_SIZE] = kind.block_size
        integers[HAS_ONE_MORE] = is_priced
        integers[N_COLUMNS] = len(names)
        integers[N_GIVEN] = len(names) - n_further - is_priced
        base, _ = base_of(ranks)
        offset = self._offsets.get(id(base))
        if offset is None:
            offset = self._offsets[id(base)] = self._n_ranks  # the table keeps it alive, so that its id is its own
            self.tables.append(base)
            self._n_ranks += len(base)
        self._offset, self._last = offset, (kind, names, ranks)
        n_left = (self.n_max - self.n) * (self._n_best + 1) * len(names)
        n_needed = integers.item(TERMS_AT) + (integers.item(N_TERMS) + n_left + 1) // 2
        if n_needed > len(self._numbers):
            self._numbers = np.concatenate([self._numbers, np.empty(n_needed - len(self._numbers))])

    def _last_listed(self, n: int) -> Int64Array:
        """The candidates that were listed last."""
        end = self._integers.item(LISTED_AT) + self._integers.item(N_LISTED)
        return self._integers[end - n : end]

    def _number_ranks(self, n: int, ranks: Sequence[RankId]) -> None:
        """Turn positions of the last n listed candidates among the ranks into positions in `tables`."""
        _, at = base_of(ranks)
        listed = self._last_listed(n)
        if at is not None:
            listed[:] = at[listed & _U32_MAX] | (listed >> 32 << 32)
        listed += self._offset

    def _add_further(self, n: int, n_columns: int, cxl: Int64Array | None, moe: Int64Array | None) -> None:
        """Set the last terms of the last n listed candidates."""
        positions = self._last_listed(n) & _U32_MAX
        rows = self.terms()[-n * n_columns :].reshape(-1, n_columns)
        further = [each for each in (cxl, moe) if each is not None]
        for column, each in zip(range(n_columns - len(further), n_columns), further, strict=True):
            rows[:, column] = each[positions]


def _with_further(names: tuple[str, ...], cxl: Int64Array | None, moe: Int64Array | None) -> tuple[str, ...]:
    return (*names, *([] if cxl is None else [CXL_TERM]), *([] if moe is None else [MOE_TERM]))

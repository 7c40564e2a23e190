"""Fact sets in pure Python, with which the kernels are compared.

What lives here: a dict instead of the compiled map, and walks block by block. What must not: kernels.
"""

from __future__ import annotations

import itertools

import numpy as np

from streams.core.block_facts.fact_sets import _UNKNOWN, FactSets, QueryMasks, WeighedMatches
from streams.core.ids import Float64Array, HashArray, Int64Array
from streams.core.index.interface import HolderBitmaps


class PythonFactSets(FactSets):
    """Fact sets over a dict."""

    def __init__(self) -> None:
        super().__init__()
        self._map: dict[int, int] = {}

    def _get(self, block: int) -> int:
        return self._map.get(block, 0)

    def _put(self, block: int, number: int) -> None:
        self._map[block] = number

    def _drop(self, block: int) -> None:
        del self._map[block]

    def _find(self, row_of: Int64Array, sequence: HashArray, found: Int64Array) -> int:
        numbers = [self._map.get(block, 0) for block in sequence.tolist()]
        rows = [int(row_of[number]) if number else 0 for number in numbers]
        if _UNKNOWN in rows:
            return -numbers[rows.index(_UNKNOWN)]
        ends = list(range(1, len(rows) + 1))
        for index in range(len(rows) - 2, -1, -1):
            if rows[index] == rows[index + 1]:
                ends[index] = ends[index + 1]
        found[:] = rows + ends
        return sum(row != 0 for row in rows)

    def walk(
        self,
        found: Int64Array,
        bits: Int64Array,
        words: int,
        numbers: Int64Array,
        starts: Int64Array,
        held: HolderBitmaps,
    ) -> Int64Array | None:
        """See RequestPath.walk."""
        rows = found[: len(found) // 2].tolist()
        counts = np.zeros(len(starts), dtype=np.int64)
        for candidate, number in enumerate(numbers.tolist()):
            for at in range(starts[candidate], len(rows)):
                if number >= 0 and _is_set(bits, words, rows[at], number):
                    counts[candidate] += 1
                elif not _is_set(held[1], held[2], int(held[0][at]), candidate):
                    break
        return counts if counts.any() else None

    def weigh(
        self,
        pooled: QueryMasks | None,
        labelled: QueryMasks | None,
        sequence: HashArray,
        numbers: Int64Array,
        overlap: Int64Array,
        effective: Float64Array,
        cxl_weight: float,
        moe_weight: float,
    ) -> WeighedMatches:
        """See FactSets.weigh."""
        blocks = sequence.tolist()
        n_pooled, n_labelled = np.zeros_like(overlap), np.zeros_like(overlap)
        for candidate, (number, n_own) in enumerate(zip(numbers.tolist(), overlap.tolist(), strict=True)):
            if pooled is not None:
                reached = itertools.takewhile(lambda block: _may_use(pooled, block, number), blocks[n_own:])  # noqa: B023
                n_pooled[candidate] = sum(1 for _ in reached)
            if labelled is not None:
                n_labelled[candidate] = sum(_may_use(labelled, block, number) for block in blocks[:n_own])
        with_pooled = effective + cxl_weight * n_pooled
        return WeighedMatches(
            n_pooled if n_pooled.any() else None,
            n_labelled if n_labelled.any() else None,
            with_pooled,
            with_pooled + moe_weight * n_labelled,
            min((overlap + n_pooled)[n_pooled > 0].tolist(), default=len(blocks)),
            np.array(
                [0 if pooled is None else _row_of(pooled, block) for block in blocks],
                dtype=np.int64,
            ),
        )


def _may_use(masks: QueryMasks, block: int, number: int) -> bool:
    """Return whether the rank with this number may use a block."""
    row = _row_of(masks, block)  # before masks.bits is read, because adding a row can replace that array
    return number >= 0 and _is_set(masks.bits, masks.words, row, number)


def _row_of(masks: QueryMasks, block: int) -> int:
    known = masks.sets._get(block)
    if known and masks.row_of[known] == _UNKNOWN:
        masks.sets._add_set_to(masks, known)
    return int(masks.row_of[known]) if known else 0


def _is_set(bits: Int64Array, words: int, row: int, number: int) -> bool:
    return row != 0 and bool(int(bits[row * words + number // 64]) >> (number % 64) & 1)

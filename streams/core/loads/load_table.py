"""The loads of ranks as numbers by row, which decisions read as columns.

What lives here: which rank has which row, and the sums. What must not: bookings (bookings, the owner of this state).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.loads.rank_times import RECENT_TOKENS, WAITING_TOKENS, RankTimes

#: The numbers that the table has for each rank, and its number of rows at first.
PREFILL, DECODE, REQUESTS, OUTPUT = range(4)
ROWS_FIRST = 64

_NO_MS: Mapping[RankId, float] = {}


@dataclass(frozen=True, slots=True)
class ActiveRankLoad:
    """Sums over one rank's active bookings. prompt_blocks: distinct blocks of prompts."""

    prefill_tokens: int = 0
    output_blocks: int = 0
    requests: int = 0
    prompt_blocks: int = 0

    @property
    def decode_blocks(self) -> int:
        """Distinct prompt blocks plus blocks of generated tokens."""
        return self.prompt_blocks + self.output_blocks


_NO_LOAD = ActiveRankLoad()


class LoadColumns(NamedTuple):
    """Loads of n ranks, int64[n] each. decode_blocks: including those of the request that is being priced."""

    prefill_tokens: Int64Array
    decode_blocks: Int64Array
    requests: Int64Array


class LoadTable:
    """Loads by row: PREFILL tokens, DECODE blocks, REQUESTS, and how many of the blocks are OUTPUT.

    Row 0 stands for all ranks without bookings and is always zero. numbering: rows returned by `rows_of` are valid as
    long as this number does not change; `rows_given` says which ones have changed. times: when ranks will have computed
    their prompts, by the same rows.
    """

    def __init__(self) -> None:
        self.times = RankTimes(ROWS_FIRST)
        self.numbering = 0
        self._rows: dict[RankId, int] = {}
        self._free: list[int] = []  # rows between the taken ones, the lowest one at the end
        self._given: list[tuple[RankId, int]] = []  # rows that were given to ranks, the newest one at the end
        self._set_table(np.zeros((4, ROWS_FIRST), dtype=np.int64))

    @property
    def table(self) -> Int64Array:
        """int64[4, n_rows]. It is the state itself: callers must not write to it, and it may be replaced."""
        return self._table

    @property
    def n_rows(self) -> int:
        """Rows of the table, a multiple of ROWS_FIRST."""
        return self._n_rows

    def row_of(self, rank: RankId) -> int:
        """The row of a rank; 0 if it has none."""
        return self._rows.get(rank, 0)

    def take_row(self, rank: RankId) -> int:
        """The row of a rank, which gets one if it has none."""
        return self._rows.get(rank) or self._new_row(rank)

    def rows_of(self, ranks: Iterable[RankId]) -> Int64Array:
        """Return the rows of these ranks' loads, int64[n]."""
        return np.array([self._rows.get(rank, 0) for rank in ranks], dtype=np.int64)

    def rows_given(self, since: int) -> Sequence[tuple[RankId, int]] | None:
        """The ranks that got a row after `numbering` was `since`; None if other ranks may have lost theirs."""
        n_given = self.numbering - since
        return None if n_given > len(self._given) else self._given[len(self._given) - n_given :]

    def add(self, row: int, prefill_tokens: int, prompt_blocks: int, output_blocks: int, requests: int) -> None:
        """Add to a rank's load; negative numbers lower it. prompt_blocks: those that it did not have."""
        cells, n_rows = self._cells, self._n_rows
        cells[PREFILL * n_rows + row] += prefill_tokens
        cells[DECODE * n_rows + row] += prompt_blocks + output_blocks
        cells[REQUESTS * n_rows + row] += requests
        if output_blocks:
            cells[OUTPUT * n_rows + row] += output_blocks

    def decode_blocks(self, row: int) -> int:
        """The decode blocks of a row."""
        found: int = self._cells[DECODE * self._n_rows + row]
        return found

    def load(self, rank: RankId) -> ActiveRankLoad:
        """A rank's load; all zeros for a rank without bookings."""
        row = self._rows.get(rank)
        if row is None:
            return _NO_LOAD
        prefill, decode, requests, output = self._table[:, row].tolist()
        return ActiveRankLoad(prefill, output, requests, decode - output)

    def ranks(self) -> dict[RankId, ActiveRankLoad]:
        """Loads of every rank with active bookings."""
        return {rank: self.load(rank) for rank, row in self._rows.items() if self._table[REQUESTS, row]}

    def columns(self, rows: Int64Array, n_blocks: int, shared_blocks: Int64Array) -> LoadColumns:
        """Loads of the ranks at these rows, as if a request joined each of them.

        n_blocks: the request's. shared_blocks: how many of them each row has in use, int64[n_rows].
        """
        prefill, decode, requests, _ = self._table.take(rows, axis=1)  # takes a third of the time of indexing
        decode += n_blocks
        decode -= shared_blocks.take(rows)
        return LoadColumns(prefill, decode, requests)

    def backlog_ms(self, rows: Int64Array, now_ms: float, ms_per_token: float) -> Float64Array:
        """How long the ranks at these rows still compute what was booked: float64[n].

        ms_per_token: for tokens that were booked without a forecast.
        """
        backlog = self.times.backlog_ms(rows, now_ms)
        if ms_per_token:
            tokens = self._table[PREFILL].take(rows) - self.times.table[WAITING_TOKENS].take(rows)
            backlog = backlog + ms_per_token * np.maximum(0, tokens)
        return backlog

    @contextmanager
    def charged(self, tokens: Mapping[RankId, int], ms: Mapping[RankId, float] = _NO_MS) -> Iterator[None]:
        """Add prefill tokens to the loads of these ranks until the block ends, which must not change any load.

        ms: what is added to their backlogs. A rank that has never had a booking is not charged.
        """
        rows = [(row, n_tokens) for rank, n_tokens in tokens.items() if (row := self._rows.get(rank)) is not None]
        times = [(row, int(each * 1000)) for rank, each in ms.items() if (row := self._rows.get(rank)) is not None]
        start = PREFILL * self._n_rows
        for row, n_tokens in rows:
            self._cells[start + row] += n_tokens
        for row, us in times:
            self.times.charge(row, us)
        try:
            yield
        finally:
            for row, n_tokens in rows:
                self._cells[start + row] -= n_tokens
            for row, us in times:
                self.times.charge(row, -us)

    def _set_table(self, table: Int64Array) -> None:
        self._table = table
        # The same numbers as one row: changing a number through the array takes five times as long.
        self._cells: memoryview = table.reshape(-1).data
        self._n_rows: int = table.shape[1]

    def _new_row(self, rank: RankId) -> int:
        """Give a rank a row. When all are taken, those of ranks without bookings, active or recent, are reused."""
        if len(self._rows) + 1 >= self._n_rows:
            bookings = self._table[REQUESTS] + self.times.table[RECENT_TOKENS]
            idle = [other for other, row in self._rows.items() if not bookings[row]]
            if idle:
                self._free = sorted((self._rows.pop(other) for other in idle), reverse=True)
                self._given.clear()
                self.numbering += 1
            if len(self._rows) * 2 >= self._n_rows:
                self._set_table(np.concatenate([self._table, np.zeros_like(self._table)], axis=1))
                self.times.grow(self._n_rows)
        row = self._free.pop() if self._free else len(self._rows) + 1
        self._rows[rank] = row
        self._given.append((rank, row))
        self.numbering += 1
        self.times.clear_row(row)
        return row

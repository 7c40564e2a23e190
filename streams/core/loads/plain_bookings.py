"""Bookings of other routers that kernels fold, many records in one call.

What lives here: calling the kernels, and a booking as an object for a caller that asks for it. What must not: which
records kernels fold (kernels.plain), and the bytes of records.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streams.core.ids import Int64Array, RankId
from streams.core.loads.kernels import layout, plain
from streams.core.loads.memory import TABLE_PLACES_FIRST, BookingMemory, span_words
from streams.errors import IndexCorrupt


class PlainBooking(NamedTuple):
    """A booking as an object. The fields are those of kernels.layout; sequence: packed hashes, as in Booking."""

    request_id: str
    router_id: str
    counter: int
    model: str
    worker_id: int
    dp_rank: int
    run: int
    counted: int
    prefill: int
    request_blocks: int
    overlap: int
    expected: int
    output: int
    since_ms: int
    expires_ms: int
    clock: int
    prefilled: bool
    prefilled_ms: int
    sequence: bytes


def _table_of(rows: Iterable[tuple[RankId, int]]) -> npt.NDArray[np.uint64]:
    """What kernels read of ranks: uint64[n, 3], since worker ids have 64 bits."""
    ranks = [(rank.worker_id, rank.dp_rank, row) for rank, row in rows]
    return np.array(ranks, dtype=np.uint64).reshape(-1, 3)


class PlainBookings:
    """The bookings in the kernels' memory. Everything is found by the digest of a request id (booking_hashes)."""

    def __init__(self, memory: BookingMemory) -> None:
        self._memory = memory
        self._context = memory.context.data  # reading one word of a memoryview takes a third of the time
        self._address = memory.address
        memory.context[layout.REQUESTS] = memory.zeroed(2 * TABLE_PLACES_FIRST)
        memory.context[layout.REQUESTS_PLACES] = TABLE_PLACES_FIRST
        self._n_ranks_set = 0
        plain.set_ranks(self._address, 0, 0)  # an empty table

    def __len__(self) -> int:
        return self._context[layout.N_BOOKINGS]

    @property
    def n_bytes(self) -> int:
        """About how much memory they take, as ActiveLoads counts it."""
        return self._context[layout.N_BYTES]

    def falls(self) -> int:
        """How many changes since the last call lowered some rank's load."""
        n_falls: int = self._context[layout.N_FALLS]
        self._context[layout.N_FALLS] = 0
        return n_falls

    def find(self, request: int) -> int:
        """The number of the booking of a request; 0 if there is none here."""
        found: int = plain.find(self._address, request)
        return max(0, found)

    def note(self, request: int, *, known: bool) -> None:
        """Note whether bookings of a request are kept as objects; its records are then left to the caller."""
        if not plain.note(self._address, request, layout.KNOWN if known else 0):
            raise IndexCorrupt("the memory of bookings is full")

    def set_ranks(self, rows: dict[RankId, int]) -> None:
        """Give kernels the rows of ranks, none of which is 0. Ranks have only been added since the last call."""
        n_new = len(rows) - self._n_ranks_set
        if not n_new:
            return
        if self._n_ranks_set:
            new = _table_of(itertools.islice(reversed(rows.items()), n_new))
            if plain.add_ranks(self._address, new.ctypes.data, n_new):
                self._n_ranks_set += n_new
                return
        table = _table_of(rows.items())
        if not plain.set_ranks(self._address, table.ctypes.data, len(table)):
            raise IndexCorrupt("the memory of bookings is full")
        self._n_ranks_set = len(rows)

    def ranks_removed(self) -> None:
        """Some ranks have no row any more: the next call of `set_ranks` gives all of them."""
        self._n_ranks_set = 0

    def set_tables(self, loads: Int64Array, prefilled: Int64Array) -> None:
        """Where kernels write: the table of loads, int64[4, n_rows], and the last prefill-completes, int64[n_rows]."""
        self._context[layout.LOADS], self._context[layout.N_ROWS] = loads.ctypes.data, loads.shape[1]
        self._context[layout.PREFILLED] = prefilled.ctypes.data

    def set_ended(self, address: int, mask: int) -> None:
        """Where kernels find the bookings that have ended (EndedBookings)."""
        self._context[layout.ENDED], self._context[layout.ENDED_MASK] = address, mask

    def limit(self, clock: int, limit_ms: int) -> None:
        """When something of a clock that is not here may expire; 0 for never."""
        self._memory.clocks[clock, 3] = limit_ms

    def fold(self, fields: Int64Array, first: int, limits: tuple[int, int, int, int, int]) -> tuple[int, int]:
        """Fold records from `first` on; return the first one that was not folded, and why it stopped there.

        It stops at the end or at a record that is left to the caller (0), or before or after one at whose time
        something may expire (layout.STOPPED_BEFORE and STOPPED_AFTER).

        limits: how long bookings are kept, how many may be here, how many bytes they may take, and how these are
        counted: for each booking besides its request id, and for each of its blocks.
        """
        at: int = plain.fold(self._address, fields.ctypes.data, first, len(fields), *limits)
        return at, self._context[layout.STOPPED]

    def freed(self) -> list[list[int]]:
        """What the last `fold` freed: digests of request and booking, when that expires, and its clock."""
        n_freed = self._context[layout.N_FREED]
        return self._memory.freed[:n_freed].tolist() if n_freed else []

    def put_freed(self, first: int) -> int:
        """Keep what the last `fold` freed, from a number on, among the bookings that have ended; see the kernel."""
        left: int = plain.put_freed(self._address, first)
        return left

    def latest_ms(self, clock: int) -> int:
        """The latest time of a clock that is known here."""
        return int(self._memory.clocks[clock, 2])

    def expire(self, now_ms: int, clock: int) -> int:
        """End the bookings of a clock that expire at now_ms or before; returns their number."""
        ended: int = plain.expire(self._address, now_ms, clock)
        return ended

    def clocks(self) -> list[int]:
        """Clocks of which any booking is here."""
        top = self._context[layout.CLOCKS_TOP]
        return np.flatnonzero(self._memory.clocks[:top, 0]).tolist()

    def oldest_expires_ms(self) -> int | None:
        """When the booking expires whose last record is the oldest; None if there is no booking."""
        oldest = self._context[layout.OLDEST]
        return self._field(oldest, layout.BOOKING_EXPIRES) if oldest else None

    def end_oldest(self) -> None:
        """End the booking whose last record is the oldest."""
        plain.end(self._address, self._context[layout.OLDEST])

    def newest(self, n_bookings: int) -> list[tuple[int, str]]:
        """When those n_bookings expire whose last records are the newest, and which routers made them."""
        found: list[tuple[int, str]] = []
        number = self._context[layout.NEWEST]
        for _ in range(n_bookings):
            if not number:
                break
            head, _ = self._names(number)
            at = self._field(number, layout.BOOKING_HEAD_AT)
            router_id = head[at : at + self._field(number, layout.BOOKING_ROUTER_BYTES)].decode()
            found.append((self._field(number, layout.BOOKING_EXPIRES), router_id))
            number = self._field(number, layout.BOOKING_OLDER)
        return found

    def take_out(self, number: int) -> PlainBooking:
        """Remove a booking that is kept as an object from now on. It stays in the tree and in the table of loads."""
        row = self._row(number)
        found = self._object(number, row)
        plain.take_out(self._address, number)
        return found

    def _object(self, number: int, row: list[int]) -> PlainBooking:
        head, model = self._names(number)
        request_at, router_at = row[layout.BOOKING_REQUEST_AT], row[layout.BOOKING_HEAD_AT]
        n_blocks = plain.copy_chain(self._address, row[layout.BOOKING_RUN])
        return PlainBooking(
            head[request_at : request_at + row[layout.BOOKING_REQUEST_BYTES]].decode(),
            head[router_at : router_at + row[layout.BOOKING_ROUTER_BYTES]].decode(),
            row[layout.BOOKING_COUNTER],
            model.decode(),
            row[layout.BOOKING_WORKER],
            row[layout.BOOKING_DP_RANK],
            row[layout.BOOKING_RUN],
            row[layout.BOOKING_COUNTED],
            row[layout.BOOKING_PREFILL],
            row[layout.BOOKING_REQUEST_BLOCKS],
            row[layout.BOOKING_OVERLAP],
            row[layout.BOOKING_EXPECTED],
            row[layout.BOOKING_OUTPUT],
            row[layout.BOOKING_SINCE],
            row[layout.BOOKING_EXPIRES],
            row[layout.BOOKING_CLOCK],
            bool(row[layout.BOOKING_PREFILLED]),
            row[layout.BOOKING_PREFILLED_MS],
            self._memory.chain[:n_blocks].tobytes(),
        )

    def bookings(self) -> list[tuple[int, PlainBooking]]:
        """Row and content of every booking, the one with the oldest last record first. For tests and debugging."""
        found = []
        number = self._context[layout.OLDEST]
        while number:
            row = self._row(number)
            found.append((row[layout.BOOKING_ROW], self._object(number, row)))
            number = row[layout.BOOKING_NEWER]
        return found

    def check(self) -> int:
        """Raise IndexCorrupt if something is inconsistent; return the words of its spans. For tests."""
        context = self._context
        rows = []
        number = context[layout.OLDEST]
        while number:
            rows.append((number, self._row(number)))
            number = rows[-1][1][layout.BOOKING_NEWER]
        if len(rows) != len(self) or sum(row[layout.BOOKING_BYTES] for _, row in rows) != self.n_bytes:
            raise IndexCorrupt("bookings in kernels' memory are miscounted", found=len(rows))
        for number, row in rows:
            if self.find(row[layout.BOOKING_REQUEST]) != number:
                raise IndexCorrupt("a booking is not in the table of requests", booking=number)
        by_clock = []
        for clock in self.clocks():
            number, before_ms = int(self._memory.clocks[clock, 0]), 0
            while number:
                row = self._row(number)
                if row[layout.BOOKING_CLOCK] != clock or row[layout.BOOKING_EXPIRES] < before_ms:
                    raise IndexCorrupt("a booking is in the wrong list", booking=number)
                before_ms = row[layout.BOOKING_EXPIRES]
                by_clock.append(number)
                number = row[layout.BOOKING_AFTER]
        if sorted(by_clock) != sorted(number for number, _ in rows):
            raise IndexCorrupt("a booking is in no list of its clock, or in two")
        spans = [(row[layout.BOOKING_ID_BYTES] + row[layout.BOOKING_MODEL_BYTES] + 15) // 8 for _, row in rows]
        tables = 2 * context[layout.REQUESTS_PLACES], 3 * context[layout.RANKS_PLACES]
        return sum(span_words(n_words) for n_words in (*spans, *tables) if n_words)

    def _row(self, number: int) -> list[int]:
        start = number * layout.BOOKING_WORDS
        row: list[int] = self._memory.bookings[start : start + layout.BOOKING_WORDS].tolist()
        return row

    def _field(self, number: int, field: int) -> int:
        return int(self._memory.bookings[number * layout.BOOKING_WORDS + field])

    def _names(self, number: int) -> tuple[bytes, bytes]:
        """The head of a booking, and its model's name."""
        address, n_head = self._field(number, layout.BOOKING_ID), self._field(number, layout.BOOKING_ID_BYTES)
        both = self._memory.text(address, n_head + self._field(number, layout.BOOKING_MODEL_BYTES))
        return both[:n_head], both[n_head:]

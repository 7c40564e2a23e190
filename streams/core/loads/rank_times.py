"""When the ranks will have computed the prompts that were booked on them, and how much they computed lately.

What lives here: sums over bookings by rank, from which the backlog of a rank in milliseconds follows, the tokens that
were booked lately, and the bookings that age because their clients do not report. What must not: clocks (time is an
argument), how long a prompt takes (core.routing.policies), and what else a booking is charged for (bookings, the owner
of this state).

The backlog must not depend on the order in which a router reads bookings, so it consists of sums, minima and maxima:

    backlog = max(0, sum of the forecasts of the bookings that wait - (now - anchor))
    anchor  = max(time of the last prefill-complete, time of the earliest booking that waits)

A booking waits from its add until its prefill is reported, output is reported, it ends, or its forecast says that it
counts as prefilled. One without a forecast never waits in this sense; what to expect of those is the policy's part.

What a rank computed lately is a sum over all of its bookings, also those that have ended. It is halved for all ranks at
once, when the first booking of a later period is read:

    recent = sum of prompt tokens to compute / 2 ** (newest period - period of the booking's first add)

So the ratio of two ranks depends neither on the present nor on the order of the bookings, except that rounding takes
up to a token per booking. A router that starts sums up what the log still has. A rank whose bookings were deleted from
it counts as idle.

All times are append times of the log. Partitions of the log have clocks of their own, and a booking may age before its
report was read, so that routers agree to within these differences and their lag.

State: a part of active load: the backlogs of ranks.
"""

from __future__ import annotations

import heapq

import numpy as np

from streams.core.ids import Float64Array, Int64Array
from streams.core.loads.observations import Forecast

#: The numbers that the table has for each rank: sum of forecasts of waiting bookings; their number; the time of the
#: earliest one, 0 if none waits; the time of the last prefill-complete; what is charged for requests in the queue; the
#: tokens of waiting bookings; the sum of forecasts of reported prefills, which only grows; and the tokens that were
#: booked lately. Bookings without a forecast are in the last one only.
WAITING_US, N_WAITING, EARLIEST_MS, PREFILLED_MS, CHARGED_US, WAITING_TOKENS, COMPUTED_US, RECENT_TOKENS = range(8)
N_NUMBERS = 8

#: Tokens count half as much after each such period. Requests that come once a minute have to be seen together, and a
#: router that starts reads four periods from the log (twice the default of `booking_ttl_s`).
RECENT_PERIOD_MS = 300_000

#: The greatest sum of tokens that were booked lately. Records with absurd numbers must not exceed an int64.
_RECENT_MAX = 1 << 62

#: Times of bookings that ended or were renewed stay in a heap until they are due. If there are more than this many, and
#: more than twice as many as bookings, they are removed.
_STALE_MAX = 10_000

#: The same for the heap of one rank's waiting bookings.
_STALE_WAITING_MAX = 64


class TimedBooking:
    """One active booking.

    since_ms: time of its last add. waiting: as in the module's text. aged: whether it counts as prefilled without a
    report. counted: False once it is over. prefilled_ms: when its prefill was reported, 0 if it was not. key: for the
    owner.
    """

    __slots__ = ("aged", "counted", "forecast", "key", "prefilled_ms", "row", "since_ms", "tokens", "waiting")

    def __init__(self, key: object, row: int, since_ms: int, forecast: Forecast, tokens: int) -> None:
        self.key = key
        self.row = row
        self.since_ms = since_ms
        self.forecast = forecast
        self.tokens = tokens
        self.waiting = False
        self.counted = False
        self.aged = False
        self.prefilled_ms = 0

    def prefilled_by_ms(self) -> int | None:
        """When it counts as prefilled without a report; None for never."""
        return self.since_ms + self.forecast.prefilled_within_ms if self.forecast.prefilled_within_ms else None

    def over_by_ms(self) -> int | None:
        """When it counts as over without a report; None for never."""
        return self.since_ms + self.forecast.over_within_ms if self.forecast.over_within_ms else None


class RankTimes:
    """Numbers by row (see the constants), for the rows of ActiveLoads.

    now_ms: the time that `advance` was last called with.
    """

    def __init__(self, n_rows: int) -> None:
        self.now_ms = 0
        self._earliest: dict[int, list[tuple[int, int, TimedBooking]]] = {}  # heaps by row
        self._due: list[tuple[int, int, TimedBooking]] = []  # a heap
        self._n_counted = 0
        self._period = 0  # the newest one in which something was booked
        self._number = 0  # breaks ties in heaps, since bookings have no order
        self._set_table(np.zeros((N_NUMBERS, n_rows), dtype=np.int64))

    @property
    def table(self) -> Int64Array:
        """int64[N_NUMBERS, n_rows]. It is the state itself: callers must not write to it, and it may be replaced."""
        return self._table

    @property
    def period(self) -> int:
        """The newest period in which something was booked: what was booked lately is halved when it changes."""
        return self._period

    def grow(self, n_rows: int) -> None:
        """Have this many rows."""
        more = n_rows - self._table.shape[1]
        self._set_table(np.concatenate([self._table, np.zeros((N_NUMBERS, more), dtype=np.int64)], axis=1))

    def clear_row(self, row: int) -> None:
        """A row without bookings belongs to another rank now."""
        self._table[:, row] = 0
        self._earliest.pop(row, None)

    def note_booked(self, row: int, tokens: int, at_ms: int) -> None:
        """A rank was given so many prompt tokens to compute by a booking whose first add has this time.

        Negative tokens take a booking back whose time was another one than was assumed.
        """
        behind = self._period - at_ms // RECENT_PERIOD_MS
        if behind < 0:
            recent = self._table[RECENT_TOKENS]
            np.right_shift(recent, min(-behind, 63), out=recent)
            self._period -= behind
        elif behind:
            tokens >>= behind
        at = RECENT_TOKENS * self._n_rows + row
        self._cells[at] = max(0, min(self._cells[at] + tokens, _RECENT_MAX))

    def count(self, timed: TimedBooking, *, waiting: bool) -> None:
        """A booking was added, or counts again."""
        timed.counted, timed.waiting = True, waiting
        self._n_counted += 1
        if waiting:
            row, cells, n_rows = timed.row, self._cells, self._n_rows
            cells[WAITING_US * n_rows + row] += timed.forecast.prefill_us
            cells[WAITING_TOKENS * n_rows + row] += timed.tokens
            cells[N_WAITING * n_rows + row] += 1
            n_waiting = cells[N_WAITING * n_rows + row]
            heap = self._earliest.setdefault(row, [])
            if len(heap) > _STALE_WAITING_MAX and len(heap) > 2 * n_waiting:
                heap = self._earliest[row] = [each for each in heap if _is_current(each)]
                heapq.heapify(heap)
            self._number += 1
            heapq.heappush(heap, (timed.since_ms, self._number, timed))
            if n_waiting == 1 or timed.since_ms < cells[EARLIEST_MS * n_rows + row]:
                cells[EARLIEST_MS * n_rows + row] = timed.since_ms
        self._schedule(timed)

    def uncount(self, timed: TimedBooking) -> None:
        """A booking ended, or is about to be counted with other numbers. One that is over is not counted any more."""
        if timed.counted:
            self._stop_waiting(timed)
            timed.counted = False
            self._n_counted -= 1

    def retime(self, timed: TimedBooking, since_ms: int) -> None:
        """The log has given a booking another time than the one that was assumed."""
        if timed.since_ms != since_ms:
            waiting, counted = timed.waiting, timed.counted
            self.uncount(timed)
            timed.since_ms = since_ms
            if counted:
                self.count(timed, waiting=waiting)

    def prefilled(self, timed: TimedBooking, at_ms: int) -> int | None:
        """A booking's prefill was reported. Return for how long the rank has worked on it, in ms.

        None if that is not known: another completion of the rank, with a later time, was read before.
        """
        before_ms = self._cells[PREFILLED_MS * self._n_rows + timed.row]
        self._stop_waiting(timed)
        timed.prefilled_ms = at_ms
        self._cells[COMPUTED_US * self._n_rows + timed.row] += timed.forecast.prefill_us
        if at_ms < before_ms:
            return None
        self.note_prefilled(timed.row, at_ms)
        return max(0, at_ms - max(timed.since_ms, before_ms))

    def computed_us(self, row: int) -> int:
        """The sum of forecasts of all prefills that were reported for a rank."""
        found: int = self._cells[COMPUTED_US * self._n_rows + row]
        return found

    def prefilled_ms(self, row: int) -> int:
        """When a rank completed the last prompt, 0 if it never did."""
        found: int = self._cells[PREFILLED_MS * self._n_rows + row]
        return found

    def note_prefilled(self, row: int, at_ms: int) -> None:
        """A rank completed a prompt at this time."""
        at = PREFILLED_MS * self._n_rows + row
        if at_ms > self._cells[at]:
            self._cells[at] = at_ms

    def ended(self, timed: TimedBooking, at_ms: int) -> None:
        """A booking's end was reported. If it had aged before that, it did so on every router."""
        if not timed.prefilled_ms:
            self._note_aged(timed, at_ms)

    def advance(self, now_ms: int) -> tuple[list[TimedBooking], list[TimedBooking]]:
        """Let bookings age up to this time; return those that count as prefilled now, and those that are over.

        The owner must no longer count those that are over. The time may be earlier than before, because the clock of
        the log was set back. What has aged stays so, and no rank has completed a prompt after this time.
        """
        aged: list[TimedBooking] = []
        over: list[TimedBooking] = []
        if now_ms < self.now_ms:
            prefilled_ms = self._table[PREFILLED_MS]
            np.minimum(prefilled_ms, now_ms, out=prefilled_ms)
            self._period = min(self._period, now_ms // RECENT_PERIOD_MS)
        self.now_ms = now_ms
        due = self._due
        while due and due[0][0] <= self.now_ms:
            timed = heapq.heappop(due)[2]
            if not timed.counted:
                continue
            over_ms = timed.over_by_ms()
            if timed.waiting and self._note_aged(timed, self.now_ms):
                self._stop_waiting(timed)
                timed.aged = True
                aged.append(timed)
            if over_ms is not None and over_ms <= self.now_ms:
                self.uncount(timed)
                over.append(timed)
            else:
                self._schedule(timed)
        return aged, over

    def charge(self, row: int, us: int) -> None:
        """Add to what is charged for requests in the queue; a negative amount takes it back."""
        self._cells[CHARGED_US * self._n_rows + row] += us

    def backlog_ms(self, rows: Int64Array, now_ms: float) -> Float64Array:
        """The backlog of these rows, float64[n], with what is charged for requests in the queue."""
        waiting_us, _, earliest_ms, prefilled_ms, charged_us, *_ = self._table.take(rows, axis=1)
        elapsed_ms = np.maximum(0.0, now_ms - np.maximum(earliest_ms, prefilled_ms))
        backlog: Float64Array = np.maximum(0.0, waiting_us / 1000.0 - elapsed_ms) + charged_us / 1000.0
        return backlog

    def _note_aged(self, timed: TimedBooking, now_ms: int) -> bool:
        """Whether a booking counts as prefilled by now without a report; its rank then goes on with the next one."""
        by_ms = timed.prefilled_by_ms()
        if by_ms is None or by_ms > now_ms:
            return False
        self.note_prefilled(timed.row, by_ms)
        return True

    def _stop_waiting(self, timed: TimedBooking) -> None:
        if not timed.waiting:
            return
        timed.waiting = False
        row, cells, n_rows = timed.row, self._cells, self._n_rows
        cells[WAITING_US * n_rows + row] -= timed.forecast.prefill_us
        cells[WAITING_TOKENS * n_rows + row] -= timed.tokens
        cells[N_WAITING * n_rows + row] -= 1
        heap = self._earliest[row]
        while heap and not _is_current(heap[0]):
            heapq.heappop(heap)
        cells[EARLIEST_MS * n_rows + row] = heap[0][0] if heap else 0

    def _schedule(self, timed: TimedBooking) -> None:
        """Look at a booking when it is the next time to age."""
        at_ms = timed.over_by_ms()
        if timed.waiting:
            by_ms = timed.prefilled_by_ms()
            if by_ms is not None and (at_ms is None or by_ms < at_ms):
                at_ms = by_ms
        if at_ms is None:
            return
        if len(self._due) > _STALE_MAX and len(self._due) > 2 * self._n_counted:
            self._due = [each for each in self._due if each[2].counted]
            heapq.heapify(self._due)
        self._number += 1
        heapq.heappush(self._due, (at_ms, self._number, timed))

    def _set_table(self, table: Int64Array) -> None:
        self._table = table
        self._cells: memoryview = table.reshape(-1).data
        self._n_rows: int = table.shape[1]


def _is_current(entry: tuple[int, int, TimedBooking]) -> bool:
    """Whether an entry of a heap is the one by which its booking waits now."""
    return entry[2].waiting and entry[0] == entry[2].since_ms

"""Active load: what running requests cost each rank (docs/bookings.md).

What lives here: bookings and their three phases, folded in any order and any number of times into the same loads.
What must not: Kafka, clocks. The state belongs to one router. Blocks that requests share on a rank count once. A
booking is active while it has an add and no free. A free implies prefill-complete.

State: active load.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.loads.active_prefixes import ActivePrefixes, PrefixNode
from streams.core.loads.ended_bookings import EndedBookings
from streams.core.loads.expiries import Expiries
from streams.core.loads.load_table import REQUESTS, ActiveRankLoad, LoadColumns, LoadTable
from streams.core.loads.observations import (
    NO_FORECAST,
    Forecast,
    Observation,
    OutputObserved,
    PrefillObserved,
    Unreported,
)
from streams.core.loads.rank_times import RankTimes, TimedBooking

#: Bookings kept at once, without those that have ended (ended_bookings.ENDED_MAX). Beyond this limit the oldest one is
#: dropped and counted, so that the router does not run out of memory. A fleet of 1,000 ranks with 256 running requests
#: each stays below it.
BOOKINGS_MAX = 1_000_000

#: Bytes of memory that they may take, by the estimates below. The same fleet, with prompts of 4,000 tokens, counts
#: as 1.4 GB; a million bookings of a million tokens each would take a terabyte.
BOOKINGS_BYTES_MAX = 2 * 1024**3

#: Bytes that a booking takes, measured over 200,000 of them: one that has ended; one that has not, or that the log has
#: not given a time yet, without its request id; and what an active one takes in addition, without its hashes. They are
#: stored twice: in the booking and in the tree.
ENDED_BOOKING_BYTES = 64
KNOWN_BOOKING_BYTES = 540
ACTIVE_BOOKING_BYTES = 700
_HASHES_STORED = 2
_BYTES_PER_HASH = 8

#: The greatest number of tokens, blocks or time in a booking: a million of them can be added up. Records with a greater
#: one are refused, as are those with a longer name.
NUMBER_MAX = 1 << 40
NAME_BYTES_MAX = 4096

#: Observations that are kept until a policy asks for them. Beyond this limit the oldest ones are dropped.
OBSERVATIONS_MAX = 4096


class BookingId(NamedTuple):
    """A request id, the router that booked it, and that router's counter: an id that is used again is a new booking."""

    request_id: str
    router_id: str
    counter: int


class BookingPhase(enum.StrEnum):
    """What happened to a booking. The values are part of the records on Kafka."""

    __hash__ = str.__hash__  # that of Enum is a Python function, which every look-up by a member would call

    ADD = "add"
    PREFILL = "prefill"
    FREE = "free"


class Booking(NamedTuple):
    """What a request costs its rank. It is a tuple because one is made for every decision.

    prefill_tokens: the prompt tokens that the rank must compute. sequence: the request's sequence hashes from the root,
    packed by hashing.pack_hashes, so that shared blocks count once. output_blocks: blocks of the tokens generated so
    far. phase: which part of the request the rank serves, `prefill` or `decode`, or None for all of it. A request may
    have one active booking of each. forecast: what the router that booked it expects of it.
    """

    rank: RankId
    model: str
    prefill_tokens: int
    sequence: bytes
    overlap_blocks: int
    request_blocks: int
    expected_output_tokens: int | None = None
    output_blocks: int = 0
    phase: str | None = None
    forecast: Forecast = NO_FORECAST

    @property
    def partial_blocks(self) -> int:
        """Blocks of the prompt without a hash: its last one, if that is not full."""
        return self.request_blocks - len(self.sequence) // _BYTES_PER_HASH


def with_output(booking: Booking, output_tokens: int, block_size: int) -> Booking:
    """Return a booking with the blocks that its generated tokens take, including a partial last block.

    output_tokens: all tokens generated so far, so that reports may be repeated or late. Returns the same object if they
    fill no more blocks than the booking already has.
    """
    output_blocks = -(-output_tokens // block_size)
    return booking if output_blocks <= booking.output_blocks else booking._replace(output_blocks=output_blocks)


def _lowers_load(before: Booking, counted_prefill: int, after: Booking) -> bool:
    """Whether any number of any rank's load may be lower after a booking was replaced."""
    return (
        before.rank != after.rank
        or counted_prefill > after.prefill_tokens
        or before.output_blocks > after.output_blocks
        or before.sequence != after.sequence
        # The first generated tokens show that the prompt was computed; see `_count`.
        or (before.forecast.prefill_us > 0 and before.output_blocks == 0 < after.output_blocks)
    )


def _ages(forecast: Forecast) -> bool:
    """Whether a booking with this forecast waits, or counts as over without a report."""
    return forecast.prefill_us > 0 or forecast.over_within_ms > 0


class Renewal(NamedTuple):
    """What an add must contain so that it changes nothing of an active booking but its time.

    booking: without prefill tokens if its prefill was reported, since a renewed booking may last longer than the record
    of that report. clock, last_record_ms: the time of its newest record; None if the log has not given it one yet.
    """

    booking: Booking
    clock: int
    last_record_ms: int | None


_NO_MS: Mapping[RankId, float] = {}


@dataclass(slots=True, eq=False)
class _State:
    """What is known of one booking.

    booking_id: the object that every map uses as its key, since each record brings another one. booking: None once it
    has ended, since its hashes would take most of the memory until the TTL. expires_ms: None until the log has given
    the booking a time. node: the end of its chain in the tree of active prefixes; None if it is not counted, because it
    has ended or is over (rank_times). phase: the booking's, also after it has ended. since_ms: time of its last add.
    prefilled_ms: time of its prefill-complete, 0 without one. timed: its part in the times of its rank, if it has a
    forecast or is observed. computed_us: of its rank, when its prefill was reported.
    """

    booking_id: BookingId
    booking: Booking | None = None
    prefilled: bool = False
    freed: bool = False
    counted_prefill: int = 0
    clock: int = 0
    expires_ms: int | None = None
    node: PrefixNode | None = None
    phase: str | None = None
    since_ms: int = 0
    prefilled_ms: int = 0
    timed: TimedBooking | None = None
    computed_us: int = 0


def _known_bytes(booking_id: BookingId) -> int:
    return KNOWN_BOOKING_BYTES + len(booking_id.request_id)


def _active_bytes(booking: Booking) -> int:
    return ACTIVE_BOOKING_BYTES + _HASHES_STORED * len(booking.sequence)


class ActiveLoads:
    """All bookings of which this router has read or written a record, its own and those of other routers.

    A booking that is not freed expires by a clock. There is one clock per partition of the log, the append time of its
    newest record, and clocks of different partitions are unrelated. A booking belongs to one of them. `at_ms` is a time
    of that clock, or None if the log does not have the record yet: a booking without a time does not expire by itself.

    dropped: bookings that were dropped because of a limit.
    n_falls: counts changes that lowered some rank's load; LoadsSync announces them.
    observations: what happened, for policies that learn; None without `observe`. The reader takes them out.
    """

    def __init__(self, ttl_ms: int, *, observe: bool = False) -> None:
        self._ttl_ms = ttl_ms
        self.observations: deque[Observation] | None = deque(maxlen=OBSERVATIONS_MAX) if observe else None
        # Bookings that have not ended, or whose end has no time yet, in order of their last records.
        self._states: dict[BookingId, _State] = {}
        # The same by request id: active ones in the order in which they were added.
        self._by_request: dict[str, list[_State]] = {}
        self._ended = EndedBookings()
        self._expiries: Expiries[BookingId] = Expiries()
        self._ranks = LoadTable()
        self._prefixes = ActivePrefixes()
        self._n_bytes = 0  # of the states
        self.expired = 0
        self.dropped = 0
        self.n_falls = 0

    # -- records -------------------------------------------------------------------------------------------------------

    def add(
        self, booking_id: BookingId, booking: Booking, at_ms: int | None, clock: int = 0, *, is_new: bool = False
    ) -> None:
        """Book, or replace an existing booking because its output grew or its time is to be renewed.

        at_ms: append time of the record. If a booking has two adds, the later time decides when it expires. is_new: the
        caller has just made up the id, so that no record of it can have come before.
        """
        if not is_new and self._has_ended(booking_id, at_ms):
            return
        state = self._state(booking_id, at_ms, clock)
        if state.freed:
            self._keep_end(state)
            return
        before, state.booking = state.booking, booking
        state.phase = booking.phase
        state.since_ms = self.times.now_ms if at_ms is None else at_ms
        if before is None:
            states = self._by_request[booking_id.request_id]
            if states[-1] is not state:
                states.remove(state)
                states.append(state)
        else:
            if _lowers_load(before, state.counted_prefill, booking):
                self.n_falls += 1
            if state.timed is not None:
                self.times.ended(state.timed, state.since_ms)
            self._uncount(state, before)
        self._count(state, booking, is_first=before is None)
        if before is not None and booking.output_blocks > before.output_blocks:
            self._observe_output(state, booking, state.since_ms, ended=False)
        if self.n_bytes > BOOKINGS_BYTES_MAX:
            self._drop_oldest()

    def prefill_complete(self, booking_id: BookingId, at_ms: int | None, clock: int = 0) -> None:
        """The rank has computed the prompt: its prefill tokens are no longer charged."""
        if self._has_ended(booking_id, at_ms):
            return
        state = self._state(booking_id, at_ms, clock)
        now_ms = self.times.now_ms if at_ms is None else at_ms
        booking = state.booking
        if booking is not None and state.node is None:  # it counts as over; its rank did complete the prompt
            row = self._ranks.row_of(booking.rank)
            if row:
                self.times.note_prefilled(row, now_ms)
        elif booking is not None:
            row = self._ranks.row_of(booking.rank)
            if not state.prefilled:
                self._stop_charging(state, row)
            if state.prefilled or state.timed is None:
                self.times.note_prefilled(row, now_ms)
            else:
                self._note_prefilled(state, state.timed, booking, now_ms)
        if now_ms > state.prefilled_ms:
            state.prefilled_ms = now_ms
        state.prefilled = True
        if state.freed:
            self._keep_end(state)

    def free(self, booking_id: BookingId, at_ms: int | None, clock: int = 0, *, is_reported: bool = True) -> None:
        """The request has ended, in whatever way. is_reported: by its client, so that policies learn from it.

        It is known to have ended until it expires, so that a late add changes nothing; what was booked is not kept.
        Without a time, the log will have a record of this end. Until a record of the booking is read, the end is kept
        as an object, and is then looked up once and not twice.
        """
        if self._has_ended(booking_id, at_ms):
            return
        state = self._state(booking_id, at_ms, clock)
        booking = state.booking
        if booking is not None:
            now_ms = self.times.now_ms if at_ms is None else at_ms
            if state.timed is not None:
                self.times.ended(state.timed, now_ms)
            if self.observations is not None and is_reported:
                if not state.prefilled:
                    self.observations.append(Unreported(booking.rank, ended=False))
                self._observe_output(state, booking, now_ms, ended=True)
            self._uncount(state, booking)
            self.n_falls += 1
            state.booking = None
        state.freed = True
        if at_ms is not None:
            self._keep_end(state)

    def logged(self, booking_id: BookingId, booking: Booking, at_ms: int, clock: int = 0) -> bool:
        """Note that the log has this add. Returns False and changes nothing if the booking is not exactly this one.

        That includes bookings that have ended: `add` then notes the time.
        """
        state = self._states.get(booking_id)
        if state is None or (state.booking is not booking and state.booking != booking):
            return False
        self._state(booking_id, at_ms, clock)
        if at_ms != state.since_ms:
            state.since_ms = at_ms
            timed = state.timed
            if timed is not None and not timed.aged:
                self.times.retime(timed, at_ms)
            elif _ages(booking.forecast):  # it aged by the time that was assumed until now
                self._uncount(state, booking)
                self._count(state, booking)
        return True

    def forget(self, booking_id: BookingId) -> None:
        """End a booking as if it had never been made. An unknown id is ignored."""
        state = self._states.get(booking_id)
        if state is not None:
            self._end(state)
        else:
            self._ended.forget(booking_id.request_id, booking_id)

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def times(self) -> RankTimes:
        """When ranks will have computed their prompts, by the rows of `rows_of`."""
        return self._ranks.times

    def shift(self, booking_ids: Iterable[BookingId], ms: int) -> None:
        """The clock of the log jumped by this much, and so do the times of bookings that the log has not timed yet."""
        for booking_id in booking_ids:
            state = self._states.get(booking_id)
            if state is None:
                continue
            if state.booking is not None:
                row, tokens = self._ranks.row_of(state.booking.rank), state.booking.prefill_tokens
                self.times.note_booked(row, -tokens, state.since_ms)
                self.times.note_booked(row, tokens, state.since_ms + ms)
            state.since_ms += ms
            if state.prefilled_ms:
                state.prefilled_ms += ms
            if state.timed is not None:
                self.times.retime(state.timed, state.since_ms)

    def advance(self, now_ms: int) -> None:
        """Let bookings with a forecast age up to this time, on the clock of the log.

        A time without a record (at_ms None) is the one of the last call. What counts as prefilled or over because its
        client did not report it is still active: it is found by its id, and its TTL and its free end it.
        """
        aged, over = self.times.advance(now_ms)
        for timed in aged:
            state = self._states[timed.key]  # type: ignore[index]
            self._stop_charging(state, timed.row)
            if self.observations is not None and state.booking is not None:
                self.observations.append(Unreported(state.booking.rank, ended=False))
        for timed in over:
            state = self._states[timed.key]  # type: ignore[index]
            self.n_falls += 1
            assert state.booking is not None  # it was counted
            if self.observations is not None and timed.forecast.prefill_us:  # a lease says nothing about clients
                self.observations.append(Unreported(state.booking.rank, ended=True))
            self._uncount(state, state.booking)

    def expire(self, now_ms: int, clock: int = 0) -> int:
        """End every booking of this clock whose last record is older than the TTL; return their number.

        Examines only bookings that are due. One that was renewed is looked at again at its later time.
        """
        ended = self._ended.expire(now_ms, clock)
        for booking_id in self._expiries.take_due(clock, now_ms):
            state = self._states[booking_id]
            assert state.expires_ms is not None  # it was scheduled by it
            if state.expires_ms > now_ms:
                self._expiries.schedule(state.booking_id, clock, state.expires_ms)
            else:
                self._end(state)
                ended += 1
        self.expired += ended
        return ended

    def expiring(self) -> list[int]:
        """Clocks that still have bookings to expire."""
        return sorted({*self._expiries.clocks(), *self._ended.clocks()})

    # -- bookings ------------------------------------------------------------------------------------------------------

    def live(self, request_id: str, phase: str | None = None) -> tuple[BookingId, Booking] | None:
        """The earliest active booking of a request id and this phase; None is a phase of its own."""
        for state in self._by_request.get(request_id, ()):
            if state.booking is not None and state.phase == phase:
                return state.booking_id, state.booking
        return None

    def live_ids(self, request_id: str) -> tuple[BookingId, ...]:
        """Every active booking of a request id in any phase, the earliest first.

        Several of one phase are made by routers that book at once.
        """
        states = self._by_request.get(request_id)
        return tuple([state.booking_id for state in states if state.booking is not None]) if states else ()

    def live_ids_of(self, request_id: str, phase: str | None) -> tuple[BookingId, ...]:
        """Every active booking of a request id and exactly this phase, the earliest first."""
        states = self._by_request.get(request_id, ())
        return tuple([state.booking_id for state in states if state.booking is not None and state.phase == phase])

    def booking(self, booking_id: BookingId) -> Booking | None:
        """The active booking with this id, or None."""
        state = self._states.get(booking_id)
        return None if state is None else state.booking

    def logged_bookings(self) -> list[tuple[BookingId, Booking, bool]]:
        """Every active booking of which the log has a record, and whether its prefill-complete was reported."""
        return [
            (booking_id, state.booking, state.prefilled)
            for booking_id, state in self._states.items()
            if state.booking is not None and state.expires_ms is not None
        ]

    def is_prefilled(self, booking_id: BookingId) -> bool:
        """Whether prefill-complete was reported for an active booking."""
        state = self._states.get(booking_id)
        return state is not None and state.booking is not None and state.prefilled

    def renewal(self, booking_id: BookingId) -> Renewal | None:
        """What renewing an active booking takes; None if there is none."""
        state = self._states.get(booking_id)
        if state is None or state.booking is None:
            return None
        booking, expires_ms = state.booking, state.expires_ms
        if state.prefilled and booking.prefill_tokens:
            booking = booking._replace(prefill_tokens=0)
        return Renewal(booking, state.clock, None if expires_ms is None else expires_ms - self._ttl_ms)

    def knows(self, request_id: str, phase: str | None = None) -> bool:
        """Whether a booking of this request id is kept, active or ended. phase: None stands for every phase."""
        states = self._by_request.get(request_id)
        if states and (phase is None or any(state.phase == phase for state in states)):
            return True
        return self._ended.knows(request_id, phase)

    def has_phases(self, request_id: str) -> bool:
        """Whether a booking of one phase of this request is kept, active or not, except in the form of ended ones."""
        return any(state.phase is not None for state in self._by_request.get(request_id, ()))

    def recent_routers(self, n_bookings: int) -> set[str]:
        """The routers that made the n_bookings most recently changed bookings, except those that have ended."""
        return {booking_id.router_id for booking_id in itertools.islice(reversed(self._states), n_bookings)}

    def __len__(self) -> int:
        """Number of bookings kept, including ended ones that have not expired."""
        return len(self._states) + len(self._ended)

    @property
    def n_bytes(self) -> int:
        """About how much memory the bookings take."""
        return self._n_bytes + ENDED_BOOKING_BYTES * len(self._ended)

    # -- loads ---------------------------------------------------------------------------------------------------------

    def load(self, rank: RankId) -> ActiveRankLoad:
        """A rank's load; all zeros for a rank without bookings."""
        return self._ranks.load(rank)

    def ranks(self) -> dict[RankId, ActiveRankLoad]:
        """Loads of every rank with active bookings."""
        return self._ranks.ranks()

    @property
    def numbering(self) -> int:
        """Rows returned by `rows_of` are valid as long as this number does not change."""
        return self._ranks.numbering

    def rows_of(self, ranks: Iterable[RankId]) -> Int64Array:
        """Return the rows of these ranks' loads, int64[n], for `columns`."""
        return self._ranks.rows_of(ranks)

    def rows_given(self, since: int) -> Sequence[tuple[RankId, int]] | None:
        """The ranks that got a row after `numbering` was `since`; None if other ranks may have lost theirs."""
        return self._ranks.rows_given(since)

    def columns(self, rows: Int64Array, sequence: bytes) -> LoadColumns:
        """Loads of the ranks at these rows, as if a request joined each of them. sequence: the request's, packed."""
        return self._ranks.columns(rows, len(sequence) // _BYTES_PER_HASH, self.shared_blocks(sequence))

    def requests(self, rows: Int64Array) -> list[int]:
        """Requests in flight on the ranks at these rows."""
        in_flight: list[int] = self.table[REQUESTS].take(rows).tolist()
        return in_flight

    @property
    def table(self) -> Int64Array:
        """Loads by row: int64[4, n_rows] of prefill tokens, decode blocks, requests, and output blocks.

        It is the state itself: callers must not write to it, and the next booking may replace it.
        """
        return self._ranks.table

    def backlog_ms(self, rows: Int64Array, now_ms: float, ms_per_token: float = 0.0) -> Float64Array:
        """How long the ranks at these rows still compute what was booked: float64[n].

        ms_per_token: for tokens that were booked without a forecast.
        """
        return self._ranks.backlog_ms(rows, now_ms, ms_per_token)

    def charged(
        self, tokens: Mapping[RankId, int], ms: Mapping[RankId, float] = _NO_MS
    ) -> AbstractContextManager[None]:
        """Add prefill tokens to the loads of these ranks until the block ends, which must not change any load.

        ms: what is added to their backlogs. A rank that has never had a booking is not charged.
        """
        return self._ranks.charged(tokens, ms)

    def shared_blocks(self, sequence: bytes) -> Int64Array:
        """How many leading blocks of a request each rank has in use, by row: int64[n_rows]. Read-only."""
        return self._prefixes.shared(sequence, self._ranks.n_rows)

    def shared_and_users(self, sequence: bytes) -> tuple[Int64Array, list[tuple[int, int, int]]]:
        """The same, and how many running requests use these blocks, as in ActivePrefixes.match."""
        return self._prefixes.shared_and_users(sequence, self._ranks.n_rows)

    # -- states --------------------------------------------------------------------------------------------------------

    def _has_ended(self, booking_id: BookingId, at_ms: int | None) -> bool:
        """Whether a booking has ended. If so, a record of it at this time renews how long that is known."""
        if booking_id in self._states:  # one that is kept as an object is not in the compact form as well
            return False
        expires_ms = None if at_ms is None else at_ms + self._ttl_ms
        return self._ended.renew(booking_id.request_id, booking_id, expires_ms)

    def _keep_end(self, state: _State) -> None:
        """Keep in the compact form that a booking has ended, once the log has given it a time."""
        if state.expires_ms is not None:
            self._end(state)
            booking_id = state.booking_id
            self.dropped += self._ended.add(
                booking_id.request_id, booking_id, state.phase, state.expires_ms, state.clock
            )

    def _state(self, booking_id: BookingId, at_ms: int | None, clock: int) -> _State:
        """The state of a booking, of which a record was read or written now. A new one if it has none."""
        state = self._states.pop(booking_id, None)
        if state is None:
            if len(self._states) >= BOOKINGS_MAX:
                self._end_oldest()
            state = _State(booking_id)
            request_id = booking_id.request_id
            states = self._by_request.get(request_id)
            if states is None:
                self._by_request[request_id] = [state]
            else:
                states.append(state)
            self._n_bytes += _known_bytes(booking_id)
        if at_ms is not None:
            expires_ms = at_ms + self._ttl_ms
            if state.expires_ms is None:
                state.clock, state.expires_ms = clock, expires_ms
                self._expiries.schedule(state.booking_id, clock, expires_ms)
            elif expires_ms > state.expires_ms:
                state.expires_ms = expires_ms
        self._states[state.booking_id] = state
        return state

    def _end(self, state: _State) -> None:
        booking_id, booking = state.booking_id, state.booking
        if booking is not None:
            self._uncount(state, booking)
            self.n_falls += 1
        del self._states[booking_id]
        self._expiries.discard(booking_id, state.clock)
        states = self._by_request[booking_id.request_id]
        if len(states) == 1:
            del self._by_request[booking_id.request_id]
        else:
            states.remove(state)
        self._n_bytes -= _known_bytes(booking_id)

    def _drop_oldest(self) -> None:
        """Drop the bookings whose last records are the oldest until the others are within the limit of memory."""
        while self.n_bytes > BOOKINGS_BYTES_MAX and len(self._states) > 1:
            self._end_oldest()

    def _end_oldest(self) -> None:
        self._end(next(iter(self._states.values())))
        self.dropped += 1

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _count(self, state: _State, booking: Booking, *, is_first: bool = False) -> None:
        row, forecast = self._ranks.take_row(booking.rank), booking.forecast
        if is_first:
            self.times.note_booked(row, booking.prefill_tokens, state.since_ms)
        # Generated tokens show that the prompt was computed. Without a forecast only a report of that counts.
        prefilled = state.prefilled or (booking.output_blocks > 0 and forecast.prefill_us > 0)
        state.counted_prefill = 0 if prefilled else booking.prefill_tokens
        if _ages(forecast) or self.observations is not None:
            timed = TimedBooking(state.booking_id, row, state.since_ms, forecast, booking.prefill_tokens)
            timed.prefilled_ms = state.prefilled_ms
            state.timed = timed
            self.times.count(timed, waiting=not prefilled and forecast.prefill_us > 0)
        if state.prefilled:
            self.times.note_prefilled(row, state.prefilled_ms)
        state.node, n_fresh = self._prefixes.add(row, booking.sequence)
        self._n_bytes += _active_bytes(booking)
        self._ranks.add(row, state.counted_prefill, n_fresh, booking.output_blocks, 1)

    def _uncount(self, state: _State, booking: Booking) -> None:
        if state.timed is not None:
            self.times.uncount(state.timed)
            state.timed = None
        if state.node is None:  # it was over, and is not counted any more
            return
        row = self._ranks.row_of(booking.rank)
        n_ended = self._prefixes.remove(row, state.node)
        state.node = None
        self._n_bytes -= _active_bytes(booking)
        self._ranks.add(row, -state.counted_prefill, -n_ended, -booking.output_blocks, -1)

    def _stop_charging(self, state: _State, row: int) -> None:
        """The prompt of a booking counts as computed."""
        self._ranks.add(row, -state.counted_prefill, 0, 0, 0)
        state.counted_prefill = 0
        self.n_falls += 1

    # -- observations --------------------------------------------------------------------------------------------------

    def _note_prefilled(self, state: _State, timed: TimedBooking, booking: Booking, now_ms: int) -> None:
        continues = timed.since_ms <= self.times.prefilled_ms(timed.row)
        took_ms = self.times.prefilled(timed, now_ms)
        state.computed_us = self.times.computed_us(timed.row)
        if self.observations is not None and took_ms is not None:
            self.observations.append(
                PrefillObserved(
                    booking.rank, booking.model, booking.prefill_tokens, took_ms, booking.forecast, continues
                )
            )

    def _observe_output(self, state: _State, booking: Booking, now_ms: int, *, ended: bool) -> None:
        """Note how long a request has generated tokens; -1 if it is not known since when."""
        if self.observations is None:
            return
        row = self._ranks.row_of(booking.rank)
        took_ms = max(0, now_ms - state.prefilled_ms) if state.prefilled_ms else -1
        prefills_ms = max(0, self.times.computed_us(row) - state.computed_us) / 1000.0
        n_active = self._ranks.decode_blocks(row)
        self.observations.append(
            OutputObserved(booking.rank, booking.model, booking.output_blocks, took_ms, n_active, ended, prefills_ms)
        )

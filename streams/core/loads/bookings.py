"""Active load: what running requests cost each rank (docs/architecture.md, Loads).

What lives here: bookings and their three phases, folded in any order and any number of times into the same loads.
What must not: Kafka, clocks. The state belongs to one router. Blocks that requests share on a rank count once. A
booking is active while it has an add and no free. A free implies prefill-complete.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from streams.core.ids import DpRank, Float64Array, Int64Array, RankId, WorkerId
from streams.core.kernels.available import kernels_available
from streams.core.loads.active_prefixes import ActivePrefixes, Prefixes, PrefixNode
from streams.core.loads.booking_hashes import booking_digest, request_digest
from streams.core.loads.ended_bookings import EndedBookings
from streams.core.loads.kernels.layout import (
    CLOCKS_MAX_EVER,
    CONTEXT_WORDS,
    FIELD_CLOCK,
    N_BOOKINGS,
    N_BYTES,
    STOPPED_BEFORE,
)
from streams.core.loads.observations import (
    NO_FORECAST,
    Forecast,
    Observation,
    OutputObserved,
    PrefillObserved,
    Unreported,
)
from streams.core.loads.rank_times import PREFILLED_MS, WAITING_TOKENS, RankTimes, TimedBooking
from streams.errors import IndexCorrupt

if TYPE_CHECKING:
    from streams.core.loads.memory import BookingMemory
    from streams.core.loads.plain_bookings import PlainBookings
    from streams.core.loads.prefix_arena import PrefixArena

#: The numbers that the table of loads has for each rank, and its number of rows at first.
_PREFILL, _DECODE, _REQUESTS, _OUTPUT = range(4)
_ROWS_FIRST = 64

#: Bookings kept at once, without those that have ended (ended_bookings.ENDED_MAX). Beyond this limit the oldest one is
#: dropped and counted, so that the router does not run out of memory. A fleet of 1,000 ranks with 256 running requests
#: each stays below it.
BOOKINGS_MAX = 1_000_000

#: Bytes of memory that they may take, by the estimates below. The same fleet, with prompts of 4,000 tokens, counts
#: as 1.9 GB; a million bookings of a million tokens each would take a terabyte.
BOOKINGS_BYTES_MAX = 2 * 1024**3

#: Bytes that a booking takes, measured over 200,000 of them: one that has ended; one that has not, or that the log has
#: not given a time yet, without its request id; and what an active one takes in addition, without its hashes. They are
#: stored in the booking and in the tree, which needs up to twice their size. Bookings in kernels' memory take less.
ENDED_BOOKING_BYTES = 64
KNOWN_BOOKING_BYTES = 540
ACTIVE_BOOKING_BYTES = 700
_HASHES_STORED = 3
_BYTES_PER_HASH = 8

#: Entries of bookings that have ended may stay in the heaps of expiries, up to this number, or twice as many as there
#: are bookings.
_EXPIRIES_KEPT = 10_000

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


def with_output(booking: Booking, output_tokens: int, block_size: int) -> Booking:
    """Return a booking with the blocks that its generated tokens take, including a partial last block.

    output_tokens: all tokens generated so far, so that reports may be repeated or late. Returns the same object if they
    fill no more blocks than the booking already has.
    """
    output_blocks = -(-output_tokens // block_size)
    return booking if output_blocks <= booking.output_blocks else booking._replace(output_blocks=output_blocks)


def _lowers_load(before: Booking | None, counted_prefill: int, after: Booking) -> bool:
    """Whether any number of any rank's load may be lower after a booking was replaced."""
    return before is not None and (
        before.rank != after.rank
        or counted_prefill > after.prefill_tokens
        or before.output_blocks > after.output_blocks
        or before.sequence != after.sequence
        # The first generated tokens show that the prompt was computed; see `_count`.
        or (before.forecast.prefill_us > 0 and before.output_blocks == 0 < after.output_blocks)
    )


class Renewal(NamedTuple):
    """What an add must contain so that it changes nothing of an active booking but its time.

    booking: without prefill tokens if its prefill was reported, since a renewed booking may last longer than the record
    of that report. clock, last_record_ms: the time of its newest record.
    """

    booking: Booking
    clock: int
    last_record_ms: int


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Sums over one rank's active bookings. prompt_blocks: distinct blocks of prompts."""

    prefill_tokens: int = 0
    output_blocks: int = 0
    requests: int = 0
    prompt_blocks: int = 0

    @property
    def decode_blocks(self) -> int:
        """Distinct prompt blocks plus blocks of generated tokens."""
        return self.prompt_blocks + self.output_blocks


_U64 = (1 << 64) - 1
_I64 = 1 << 63

_NO_LOAD = RankLoad()
_NO_MS: Mapping[RankId, float] = {}


class LoadColumns(NamedTuple):
    """Loads of n ranks, int64[n] each. decode_blocks: including those of the request that is being priced."""

    prefill_tokens: Int64Array
    decode_blocks: Int64Array
    requests: Int64Array


@dataclass(slots=True)
class _State:
    """booking_id: the object that every map uses as its key, since each record brings another one.

    booking: None once it has ended, since its hashes would take most of the memory until the TTL. phase: the booking's,
    also after it has ended. since_ms: time of its last add. prefilled_ms: time of its prefill-complete, 0 without one.
    timed: its part in the times of its rank, if it has a forecast or is observed. computed_us: of its rank, when its
    prefill was reported.
    """

    booking_id: BookingId
    booking: Booking | None = None
    prefilled: bool = False
    freed: bool = False
    counted_prefill: int = 0
    clock: int = 0
    expires_ms: int | None = None  # None until the log has given the booking a time
    node: PrefixNode | int | None = None  # the end of its chain in the tree of active prefixes, while it is active
    phase: str | None = None
    since_ms: int = 0
    prefilled_ms: int = 0
    timed: TimedBooking | None = None
    computed_us: int = 0
    request: int = 0  # the digest of its request id

    @property
    def live(self) -> bool:
        return self.booking is not None


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
    times: when ranks will have computed their prompts. observations: what happened, for policies that learn; None
    without `observe`. The reader takes them out.
    """

    def __init__(self, ttl_ms: int, *, observe: bool = False) -> None:
        self._ttl_ms = ttl_ms
        self.times = RankTimes(_ROWS_FIRST)
        self.observations: deque[Observation] | None = deque(maxlen=OBSERVATIONS_MAX) if observe else None
        # Bookings that have not ended, or whose end has no time yet, in order of their last records.
        self._states: dict[BookingId, _State] = {}
        self._ended = EndedBookings()
        # For each clock, when to look at each of these that has a time: never later than it expires. The records of one
        # partition come in the order of their times, so nearly all of them are in order, and one that ends leaves
        # nothing behind. Those that are not in order are in a heap.
        self._due: dict[int, OrderedDict[BookingId, int]] = {}
        self._last_due_ms: dict[int, int] = {}
        self._expiries: dict[int, list[tuple[int, BookingId]]] = {}
        self._n_expiries = 0
        self._live_by_request: dict[str, list[BookingId]] = {}
        self._known_by_request: Counter[str] = Counter()
        self._known_by_phase: Counter[tuple[str, str]] = Counter()  # bookings of the whole request are not in it
        # Loads by row: _PREFILL tokens, _DECODE blocks, _REQUESTS, and how many of the blocks are _OUTPUT. Row 0 stands
        # for all ranks without bookings and is always zero.
        self._rows: dict[RankId, int] = {}
        self._has_gaps = False  # whether a row between the taken ones may be free
        self._set_table(np.zeros((4, _ROWS_FIRST), dtype=np.int64))
        self._numbering = 0  # changes when a row may belong to another rank
        self._prefixes: Prefixes
        # Bookings of other routers that no caller has asked for: all that one active booking of its request id needs,
        # without objects. None without kernels, and if bookings are observed.
        self._plain: PlainBookings | None = None
        self._words: Sequence[int] = (0,) * CONTEXT_WORDS  # the context of kernels' memory; zeros if nothing is there
        self._memory: BookingMemory | None = None
        if kernels_available():  # imported here, since processes that keep no loads import this module for its types
            from streams.core.loads.memory import BookingMemory
            from streams.core.loads.plain_bookings import PlainBookings
            from streams.core.loads.prefix_arena import PrefixArena

            self._memory = BookingMemory(BOOKINGS_MAX)
            self._prefixes = PrefixArena(self._memory)
            if not observe:
                self._plain = PlainBookings(self._memory)
                self._words = self._memory.context.data
                self._plain.set_tables(self._loads, self.times.table[PREFILLED_MS])
        else:
            self._prefixes = ActivePrefixes()
        self._n_bytes = 0  # of the states
        self.expired = 0
        self.dropped = 0
        self.n_falls = 0

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
        state.since_ms = self.times.now_ms if at_ms is None else at_ms
        if state.booking is not None:
            if _lowers_load(state.booking, state.counted_prefill, booking):
                self.n_falls += 1
            if state.timed is not None:
                self.times.ended(state.timed, state.since_ms)
            self._uncount(state)
        else:
            self._live_by_request.setdefault(booking_id.request_id, []).append(state.booking_id)
        if booking.phase != state.phase:
            self._forget_phase(state)
            state.phase = booking.phase
            if state.phase is not None:
                self._known_by_phase[booking_id.request_id, state.phase] += 1
        if state.booking is not None and booking.output_blocks > state.booking.output_blocks:
            state.booking = booking
            self._count(state)
            self._observe_output(state, booking, state.since_ms, ended=False)
        else:
            state.booking = booking
            self._count(state)
        if self.n_bytes > BOOKINGS_BYTES_MAX:
            self._drop_oldest()

    def add_new(self, booking_id: BookingId, booking: Booking, at_ms: int, clock: int = 0) -> bool:
        """Do what `add` does if no booking of the request id is known; otherwise return False and change nothing.

        This is for records of other routers, nearly all of which are such adds. It is `add` without the steps that
        nothing needs then, in one function, and takes half of its time. Bookings with a forecast or of one part of a
        request are left to `add`, and so are all of them if they are observed.
        """
        request_id = booking_id.request_id
        if (
            request_id in self._known_by_request
            or booking.phase is not None
            or booking.forecast is not NO_FORECAST
            or self.observations is not None
            or self._n_kept >= BOOKINGS_MAX
            or self._ended.may_know(request_id)
        ):
            return False
        state = _State(booking_id, booking)
        state.request = request_digest(request_id)
        if self._plain is not None:
            if self._plain.find(state.request):
                return False
            self._plain.note(state.request, known=True)
        self._states[booking_id] = state
        self._known_by_request[request_id] = 1
        self._live_by_request[request_id] = [booking_id]
        state.since_ms = at_ms
        state.clock = clock
        state.expires_ms = expires_ms = at_ms + self._ttl_ms
        if expires_ms >= self._last_due_ms.get(clock, 0) and clock in self._due:
            self._last_due_ms[clock] = expires_ms
            self._due[clock][booking_id] = expires_ms
        else:
            self._schedule(state, expires_ms)
        row = self._rows.get(booking.rank) or self._new_row(booking.rank)
        state.counted_prefill = booking.prefill_tokens
        state.node, n_fresh = self._prefixes.add(row, booking.sequence)
        self._n_bytes += (
            KNOWN_BOOKING_BYTES + len(request_id) + ACTIVE_BOOKING_BYTES + _HASHES_STORED * len(booking.sequence)
        )
        cells, n_rows = self._cells, self._n_rows
        cells[_PREFILL * n_rows + row] += booking.prefill_tokens
        cells[_DECODE * n_rows + row] += n_fresh + booking.output_blocks
        cells[_REQUESTS * n_rows + row] += 1
        if booking.output_blocks:
            cells[_OUTPUT * n_rows + row] += booking.output_blocks
        if self.n_bytes > BOOKINGS_BYTES_MAX:
            self._drop_oldest()
        return True

    @property
    def folds_records(self) -> bool:
        """Whether `fold` takes any records."""
        return self._plain is not None

    def limit(self, clocks: Iterable[int]) -> None:
        """Let kernels know what of these clocks may expire that they do not keep themselves."""
        if self._plain is not None:
            for clock in clocks:
                self._plain.limit(clock, self._next_expiry_ms(clock))

    def end_fold(self, clocks: Iterable[int]) -> None:
        """Let what has ended, and ended again, expire at the latest time of these clocks."""
        if self._plain is not None:
            for clock in clocks:
                self._ended.expire(self._plain.latest_ms(clock), clock)

    def fold(self, fields: Int64Array, first: int) -> int:
        """Fold records of other routers from `first` on; return the first one that was not folded, or their number.

        fields: int64[n, FIELD_WORDS], as `tables.kernels.loads.read_records` writes them. Has the same effects as
        `expire` at the time of each record, and then `add`, `prefill_complete` or `free`, in a fifth of the time. The
        caller folds the record that is returned in this way, and then goes on. Before each call it calls `limit` with
        the clocks of the records, or of those that it has folded since the last call, and at the end `end_fold`.
        """
        plain = self._plain
        if plain is None:
            return first
        plain.set_ranks(self._rows)
        while True:
            plain.set_ended(self._ended.shards_address, self._ended.shards_mask)
            first, stopped = plain.fold(
                fields,
                first,
                (
                    self._ttl_ms,
                    BOOKINGS_MAX - len(self._states),
                    BOOKINGS_BYTES_MAX - self.n_bytes + plain.n_bytes,
                    KNOWN_BOOKING_BYTES + ACTIVE_BOOKING_BYTES,
                    _HASHES_STORED * _BYTES_PER_HASH,
                ),
            )
            freed = plain.freed()
            if freed:
                _, _, expires_ms, clock = freed[-1]
                if expires_ms <= plain.latest_ms(clock):  # its records came so late that it has expired
                    self.expire(plain.latest_ms(clock), clock)
                self.dropped += self._ended.add_freed(freed, self._put_freed)
            self.n_falls += plain.falls()
            if not stopped:
                return first
            clock = int(fields[first if stopped == STOPPED_BEFORE else first - 1, FIELD_CLOCK])
            self.expire(plain.latest_ms(clock), clock)
            plain.limit(clock, self._next_expiry_ms(clock))

    def _put_freed(self, first: int) -> int:
        assert self._plain is not None  # it has freed something
        self._plain.set_ended(self._ended.shards_address, self._ended.shards_mask)
        return self._plain.put_freed(first)

    def latest_ms(self, clock: int) -> int:
        """The latest time of a clock that `fold` and `expire` were called with."""
        return 0 if self._plain is None else self._plain.latest_ms(clock)

    def _next_expiry_ms(self, clock: int) -> int:
        """When something of a clock that kernels do not keep may expire; 0 for never."""
        due, expiries, ended_ms = self._due.get(clock), self._expiries.get(clock), self._ended.oldest_ms(clock)
        found = [ended_ms] if ended_ms else []
        if due:
            found.append(next(iter(due.values())))
        if expiries:
            found.append(expiries[0][0])
        return min(found, default=0)

    def _take_out(self, request_id: str) -> bool:
        """Keep the booking of a request as an object from now on, if kernels have it; return whether they had it."""
        plain = self._plain
        if plain is None or not self._words[N_BOOKINGS]:
            return False
        request = request_digest(request_id)
        number = plain.find(request)
        if not number:
            return False
        found = plain.take_out(number)
        booking_id = BookingId(found.request_id, found.router_id, found.counter)
        booking = Booking(
            RankId(WorkerId(found.worker_id & _U64), DpRank(found.dp_rank)),
            found.model,
            found.prefill,
            found.sequence,
            found.overlap,
            found.request_blocks,
            None if found.expected < 0 else found.expected,
            found.output,
        )
        state = _State(
            booking_id,
            booking,
            prefilled=found.prefilled,
            counted_prefill=found.counted,
            clock=found.clock,
            expires_ms=found.expires_ms,
            node=found.run,
            since_ms=found.since_ms,
            prefilled_ms=found.prefilled_ms,
            request=request,
        )
        self._states[booking_id] = state
        self._known_by_request[request_id] = 1
        self._live_by_request[request_id] = [booking_id]
        self._schedule(state, found.expires_ms)
        self._n_bytes += _known_bytes(booking_id) + _active_bytes(booking)
        return True

    def prefill_complete(self, booking_id: BookingId, at_ms: int | None, clock: int = 0) -> None:
        """The rank has computed the prompt: its prefill tokens are no longer charged."""
        if self._has_ended(booking_id, at_ms):
            return
        state = self._state(booking_id, at_ms, clock)
        now_ms = self.times.now_ms if at_ms is None else at_ms
        booking = state.booking
        if booking is not None and state.node is None:  # it counts as over; its rank did complete the prompt
            row = self._rows.get(booking.rank, 0)
            if row:
                self.times.note_prefilled(row, now_ms)
        elif booking is not None:
            row = self._rows[booking.rank]
            if not state.prefilled:
                self._cells[_PREFILL * self._n_rows + row] -= state.counted_prefill
                state.counted_prefill = 0
                self.n_falls += 1
            if state.prefilled or state.timed is None:
                self.times.note_prefilled(row, now_ms)
            else:
                continues = state.timed.since_ms <= self.times.prefilled_ms(row)
                took_ms = self.times.prefilled(state.timed, now_ms)
                state.computed_us = self.times.computed_us(row)
                if self.observations is not None and took_ms is not None:
                    self.observations.append(
                        PrefillObserved(
                            booking.rank, booking.model, booking.prefill_tokens, took_ms, booking.forecast, continues
                        )
                    )
        if now_ms > state.prefilled_ms:
            state.prefilled_ms = now_ms
        state.prefilled = True
        if state.freed:
            self._keep_end(state)

    def free(self, booking_id: BookingId, at_ms: int | None, clock: int = 0) -> None:
        """The request has ended, in whatever way.

        It is known to have ended until it expires, so that a late add changes nothing; what was booked is not kept.
        Without a time, the log will have a record of this end. Until a record of the booking is read, the end is kept
        as an object, and is then looked up once and not twice.
        """
        if at_ms is not None and self._free_plain(booking_id, at_ms):
            return
        if self._has_ended(booking_id, at_ms):
            return
        state = self._state(booking_id, at_ms, clock)
        if state.booking is not None:
            now_ms = self.times.now_ms if at_ms is None else at_ms
            if state.timed is not None:
                self.times.ended(state.timed, now_ms)
            if self.observations is not None:
                if not state.prefilled:
                    self.observations.append(Unreported(state.booking.rank, ended=False))
                self._observe_output(state, state.booking, now_ms, ended=True)
            self._uncount(state)
            self._forget_live(booking_id)
            self.n_falls += 1
            state.booking = None
        state.freed = True
        if at_ms is not None:
            self._keep_end(state)

    def _free_plain(self, booking_id: BookingId, at_ms: int) -> bool:
        """Do what `free` does for the only booking of its request id, if it is active, has no forecast, is not of one
        part of the request, and has a time; otherwise return False and change nothing. Takes half of its time.
        """
        state = self._states.get(booking_id)
        if (
            state is None
            or state.node is None
            or state.timed is not None
            or state.phase is not None
            or state.expires_ms is None
            or self.observations is not None
        ):
            return False
        request_id, booking, clock = booking_id.request_id, state.booking, state.clock
        if self._known_by_request[request_id] != 1:
            return False
        assert booking is not None  # it has a node
        del self._states[booking_id], self._live_by_request[request_id]
        self._known_by_request.pop(request_id)  # not `del`, which is a Python function of Counter
        if self._plain is not None:
            self._plain.note(state.request, known=False)
        due = self._due.get(clock)
        if due:
            due.pop(booking_id, None)
        row = self._rows[booking.rank]
        n_ended = self._prefixes.remove(row, state.node)
        self._n_bytes -= (
            KNOWN_BOOKING_BYTES + len(request_id) + ACTIVE_BOOKING_BYTES + _HASHES_STORED * len(booking.sequence)
        )
        cells, n_rows = self._cells, self._n_rows
        cells[_PREFILL * n_rows + row] -= state.counted_prefill
        cells[_DECODE * n_rows + row] -= n_ended + booking.output_blocks
        cells[_REQUESTS * n_rows + row] -= 1
        if booking.output_blocks:
            cells[_OUTPUT * n_rows + row] -= booking.output_blocks
        self.n_falls += 1
        expires_ms = max(state.expires_ms, at_ms + self._ttl_ms)
        digest = booking_digest(state.request, booking_id.router_id, booking_id.counter)
        self.dropped += self._ended.add_digests(state.request, digest, None, expires_ms, clock)
        return True

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
            elif booking.forecast.prefill_us:  # it aged by the time that was assumed until now
                self._uncount(state)
                self._count(state)
        return True

    def shift(self, booking_ids: Iterable[BookingId], ms: int) -> None:
        """The clock of the log jumped by this much, and so do the times of bookings that the log has not timed yet."""
        for booking_id in booking_ids:
            state = self._states.get(booking_id)
            if state is None:
                continue
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
            self._cells[_PREFILL * self._n_rows + timed.row] -= state.counted_prefill
            state.counted_prefill = 0
            self.n_falls += 1
            if self.observations is not None and state.booking is not None:
                self.observations.append(Unreported(state.booking.rank, ended=False))
        for timed in over:
            state = self._states[timed.key]  # type: ignore[index]
            self.n_falls += 1
            if self.observations is not None and state.booking is not None:
                self.observations.append(Unreported(state.booking.rank, ended=True))
            self._uncount(state)

    def backlog_ms(self, rows: Int64Array, now_ms: float, ms_per_token: float = 0.0) -> Float64Array:
        """How long the ranks at these rows still compute what was booked: float64[n].

        ms_per_token: for tokens that were booked without a forecast.
        """
        backlog = self.times.backlog_ms(rows, now_ms)
        if ms_per_token:
            tokens = self._loads[_PREFILL].take(rows) - self.times.table[WAITING_TOKENS].take(rows)
            backlog = backlog + ms_per_token * np.maximum(0, tokens)
        return backlog

    def forget(self, booking_id: BookingId) -> None:
        """End a booking as if it had never been made. An unknown id is ignored."""
        state = self._states.get(booking_id)
        if state is None and self._take_out(booking_id.request_id):
            state = self._states.get(booking_id)
        if state is not None:
            self._end(booking_id, state)
        else:
            self._ended.forget(booking_id.request_id, booking_id)

    def expire(self, now_ms: int, clock: int = 0) -> int:
        """End every booking of this clock whose last record is older than the TTL; return their number.

        Examines only bookings that are due. One that was renewed is looked at again at its later time.
        """
        ended = self._ended.expire(now_ms, clock)
        if self._plain is not None and 0 <= clock < CLOCKS_MAX_EVER:
            ended += self._plain.expire(now_ms, clock)
            self.n_falls += self._plain.falls()
        due = self._due.get(clock)
        while due:
            booking_id = next(iter(due))
            if due[booking_id] > now_ms:
                break
            ended += self._expire_one(booking_id, now_ms, clock)
        while (expiries := self._expiries.get(clock)) and expiries[0][0] <= now_ms:  # `_schedule` may replace it
            booking_id = heapq.heappop(expiries)[1]
            self._n_expiries -= 1
            if due is None or booking_id not in due:  # else it was dropped and booked again
                ended += self._expire_one(booking_id, now_ms, clock)
        self.expired += ended
        return ended

    def _expire_one(self, booking_id: BookingId, now_ms: int, clock: int) -> int:
        """End a booking that is due, or look at it again later; return how many ended."""
        due = self._due.get(clock)
        if due:
            due.pop(booking_id, None)
        state = self._states.get(booking_id)
        if state is None or state.expires_ms is None or state.clock != clock:
            return 0  # dropped, and perhaps booked again since
        if state.expires_ms > now_ms:
            self._schedule(state, state.expires_ms)
            return 0
        self._end(booking_id, state)
        return 1

    def expiring(self) -> list[int]:
        """Clocks that still have bookings to expire."""
        clocks = {clock for of in (self._due, self._expiries) for clock, bookings in of.items() if bookings}
        return sorted(clocks.union(self._ended.clocks(), () if self._plain is None else self._plain.clocks()))

    def live(self, request_id: str, phase: str | None = None) -> tuple[BookingId, Booking] | None:
        """The earliest active booking of a request id and this phase; None is a phase of its own."""
        for booking_id in self._live_of(request_id):
            booking = self._states[booking_id].booking
            assert booking is not None
            if booking.phase == phase:
                return booking_id, booking
        return None

    def live_ids(self, request_id: str) -> tuple[BookingId, ...]:
        """Every active booking of a request id in any phase, the earliest first.

        Several of one phase are made by routers that book at once.
        """
        return tuple(self._live_of(request_id))

    def live_ids_of(self, request_id: str, phase: str | None) -> tuple[BookingId, ...]:
        """Every active booking of a request id and exactly this phase, the earliest first."""
        return tuple(each for each in self._live_of(request_id) if self._phase_of(each) == phase)

    def booking(self, booking_id: BookingId) -> Booking | None:
        """The active booking with this id, or None."""
        state = self._active(booking_id)
        return None if state is None else state.booking

    def is_prefilled(self, booking_id: BookingId) -> bool:
        """Whether prefill-complete was reported for an active booking."""
        state = self._active(booking_id)
        return state is not None and state.prefilled

    def renewal(self, booking_id: BookingId) -> Renewal | None:
        """What renewing an active booking takes; None if there is none, or the log has not given it a time yet."""
        state = self._active(booking_id)
        if state is None or state.booking is None or state.expires_ms is None:
            return None
        booking = state.booking
        if state.prefilled and booking.prefill_tokens:
            booking = booking._replace(prefill_tokens=0)
        return Renewal(booking, state.clock, state.expires_ms - self._ttl_ms)

    def knows(self, request_id: str, phase: str | None = None) -> bool:
        """Whether a booking of this request id is kept, active or ended. phase: None stands for every phase."""
        if self._ended.knows(request_id, phase):
            return True
        if phase is None:
            if request_id in self._known_by_request:
                return True
            return self._plain is not None and self._plain.find(request_digest(request_id)) != 0
        return (request_id, phase) in self._known_by_phase

    def has_objects(self, request_id: str) -> bool:
        """Whether an active booking of this request is kept as an object, as all of those are that this router made."""
        return request_id in self._live_by_request

    def has_phases(self, request_id: str) -> bool:
        """Whether a booking of one phase of this request is kept, active or not, except in the form of ended ones."""
        by_phase = self._known_by_phase
        return bool(by_phase) and ((request_id, "prefill") in by_phase or (request_id, "decode") in by_phase)

    def load(self, rank: RankId) -> RankLoad:
        """A rank's load; all zeros for a rank without bookings."""
        row = self._rows.get(rank)
        if row is None:
            return _NO_LOAD
        prefill, decode, requests, output = self._loads[:, row].tolist()
        return RankLoad(prefill, output, requests, decode - output)

    def ranks(self) -> dict[RankId, RankLoad]:
        """Loads of every rank with active bookings."""
        return {rank: self.load(rank) for rank, row in self._rows.items() if self._loads[_REQUESTS, row]}

    @property
    def numbering(self) -> int:
        """Rows returned by `rows_of` are valid as long as this number does not change."""
        return self._numbering

    def rows_of(self, ranks: Iterable[RankId]) -> Int64Array:
        """Return the rows of these ranks' loads, int64[n], for `columns`."""
        return np.array([self._rows.get(rank, 0) for rank in ranks], dtype=np.int64)

    def columns(self, rows: Int64Array, sequence: bytes) -> LoadColumns:
        """Loads of the ranks at these rows, as if a request joined each of them. sequence: the request's, packed."""
        prefill, decode, requests, _ = self._loads.take(rows, axis=1)  # takes a third of the time of indexing
        decode += len(sequence) // 8
        decode -= self.shared_blocks(sequence).take(rows)
        return LoadColumns(prefill, decode, requests)

    def requests(self, rows: Int64Array) -> list[int]:
        """Requests in flight on the ranks at these rows."""
        in_flight: list[int] = self._loads[_REQUESTS].take(rows).tolist()
        return in_flight

    @property
    def table(self) -> Int64Array:
        """Loads by row: int64[4, n_rows] of prefill tokens, decode blocks, requests, and output blocks.

        It is the state itself: callers must not write to it, and the next booking may replace it.
        """
        return self._loads

    @contextmanager
    def charged(self, tokens: Mapping[RankId, int], ms: Mapping[RankId, float] = _NO_MS) -> Iterator[None]:
        """Add prefill tokens to the loads of these ranks until the block ends, which must not change any load.

        ms: what is added to their backlogs. A rank that has never had a booking is not charged.
        """
        rows = [(row, n_tokens) for rank, n_tokens in tokens.items() if (row := self._rows.get(rank)) is not None]
        times = [(row, int(each * 1000)) for rank, each in ms.items() if (row := self._rows.get(rank)) is not None]
        start = _PREFILL * self._n_rows
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

    def recent_routers(self, n_bookings: int) -> set[str]:
        """The routers that made the n_bookings most recently changed bookings, ended ones included."""
        newest = itertools.islice(reversed(self._states.items()), n_bookings)
        # By when they expire: TTL after their last records. The log has yet to give one without a time its own.
        found = [(state.expires_ms or _I64, booking_id.router_id) for booking_id, state in newest]
        if self._plain is not None:
            found += self._plain.newest(n_bookings)
        return {router_id for _, router_id in heapq.nlargest(n_bookings, found)}

    def shared_blocks(self, sequence: bytes) -> Int64Array:
        """How many leading blocks of a request each rank has in use, by row: int64[n_rows]. Read-only."""
        return self._prefixes.shared(sequence, self._n_rows)

    def shared_and_users(self, sequence: bytes) -> tuple[Int64Array, list[tuple[int, int, int]]]:
        """The same, and how many running requests use these blocks, as in ActivePrefixes.match."""
        return self._prefixes.shared_and_users(sequence, self._n_rows)

    def decode_blocks_with(self, rank: RankId, sequence: bytes) -> int:
        """Distinct active blocks of a rank if a request with this chain joined it."""
        row = self._rows.get(rank, 0)
        shared = self.shared_blocks(sequence)[row] if row else 0
        return self.load(rank).decode_blocks + len(sequence) // 8 - int(shared)

    def check(self) -> None:
        """Raise IndexCorrupt, which names the first broken invariant. Slow; for tests and debugging."""
        if isinstance(self._prefixes, ActivePrefixes):
            self._prefixes.check()
        else:
            other_words = 0 if self._plain is None else self._plain.check()
            cast("PrefixArena", self._prefixes).check(other_words)
        prompt = [0] * self._n_rows
        for node in self._prefixes.nodes():
            for row in node.uses:
                prompt[row] += node.n_blocks
        if prompt != (self._loads[_DECODE] - self._loads[_OUTPUT]).tolist():
            raise IndexCorrupt("distinct blocks are miscounted")
        self._check_sums()
        if any(state.freed and state.live for state in self._states.values()):
            raise IndexCorrupt("a booking has ended and is still active")
        n_bytes = sum(map(_known_bytes, self._states))
        n_bytes += sum(
            _active_bytes(state.booking)
            for state in self._states.values()
            if state.booking is not None and state.node is not None
        )
        if n_bytes != self._n_bytes:
            raise IndexCorrupt("the bytes of bookings are miscounted", counted=self._n_bytes, found=n_bytes)
        self.times.check(state.timed for state in self._states.values() if state.timed is not None)
        for problem in self._ended.check():
            raise IndexCorrupt(problem)
        if any(booking_id not in self._states for due in self._due.values() for booking_id in due):
            raise IndexCorrupt("a booking that has ended is due")

    def _check_sums(self) -> None:
        sums = np.zeros_like(self._loads)
        for state in self._states.values():
            if state.booking is not None and state.node is not None:
                row = self._rows[state.booking.rank]
                sums[:, row] += (state.counted_prefill, state.booking.output_blocks, 1, state.booking.output_blocks)
        for row, plain in () if self._plain is None else self._plain.bookings():
            sums[:, row] += (plain.counted, plain.output, 1, plain.output)
        for which in (_PREFILL, _REQUESTS, _OUTPUT):
            if sums[which].tolist() != self._loads[which].tolist():
                raise IndexCorrupt("loads are miscounted", which=which)

    def __len__(self) -> int:
        """Number of bookings kept, including ended ones that have not expired."""
        return self._n_kept + len(self._ended)

    @property
    def _n_kept(self) -> int:
        """Number of bookings that have not ended, or whose end has no time yet."""
        return len(self._states) + self._words[N_BOOKINGS]

    @property
    def n_bytes(self) -> int:
        """About how much memory the bookings take."""
        return self._n_bytes + self._words[N_BYTES] + ENDED_BOOKING_BYTES * len(self._ended)

    def _has_ended(self, booking_id: BookingId, at_ms: int | None) -> bool:
        """Whether a booking has ended. If so, a record of it at this time renews how long that is known."""
        if booking_id in self._states:  # one that is kept as an object is not in the compact form as well
            return False
        expires_ms = None if at_ms is None else at_ms + self._ttl_ms
        return self._ended.renew(booking_id.request_id, booking_id, expires_ms)

    def _keep_end(self, state: _State) -> None:
        """Keep in the compact form that a booking has ended, once the log has given it a time."""
        if state.expires_ms is not None:
            booking_id, phase = state.booking_id, state.phase
            self._end(booking_id, state)
            digest = booking_digest(state.request, booking_id.router_id, booking_id.counter)
            self.dropped += self._ended.add_digests(state.request, digest, phase, state.expires_ms, state.clock)

    def _state(self, booking_id: BookingId, at_ms: int | None, clock: int) -> _State:
        state = self._states.pop(booking_id, None)
        if state is None and self._take_out(booking_id.request_id):
            state = self._states.pop(booking_id, None)
        if state is None:
            if self._n_kept >= BOOKINGS_MAX:
                self._end_oldest()
            state = _State(booking_id)
            request_id = booking_id.request_id
            state.request = request_digest(request_id)
            n_known = self._known_by_request.get(request_id, 0)
            # Not `+= 1`, which takes three times as long for a key that a Counter does not have.
            self._known_by_request[request_id] = n_known + 1
            if not n_known and self._plain is not None:
                self._plain.note(state.request, known=True)
            self._n_bytes += _known_bytes(booking_id)
        if at_ms is not None:
            expires_ms = at_ms + self._ttl_ms
            if state.expires_ms is None:
                state.clock, state.expires_ms = clock, expires_ms
                self._schedule(state, expires_ms)
            elif expires_ms > state.expires_ms:
                state.expires_ms = expires_ms
        self._states[state.booking_id] = state
        return state

    def _drop_oldest(self) -> None:
        """Drop the bookings whose last records are the oldest until the others are within the limit of memory."""
        while self.n_bytes > BOOKINGS_BYTES_MAX and self._n_kept > 1:
            self._end_oldest()

    def _end_oldest(self) -> None:
        oldest = next(iter(self._states), None)
        plain_ms = None if self._plain is None else self._plain.oldest_expires_ms()
        if self._plain is not None and plain_ms is not None:
            expires_ms = None if oldest is None else self._states[oldest].expires_ms
            if expires_ms is None or plain_ms <= expires_ms:
                self._plain.end_oldest()
                self.n_falls += self._plain.falls()
                self.dropped += 1
                return
        assert oldest is not None  # there is a booking
        self._end(oldest, self._states[oldest])
        self.dropped += 1

    def _live_of(self, request_id: str) -> Sequence[BookingId]:
        """Every active booking of a request id, as objects."""
        found = self._live_by_request.get(request_id)
        if found is None and self._take_out(request_id):
            found = self._live_by_request[request_id]
        return found or ()

    def _active(self, booking_id: BookingId) -> _State | None:
        """The state of an active booking, as an object."""
        self._live_of(booking_id.request_id)
        state = self._states.get(booking_id)
        return state if state is not None and state.live else None

    def _schedule(self, state: _State, at_ms: int) -> None:
        """Look at a booking at this time. There is nothing to be looked at before for it."""
        clock, booking_id = state.clock, state.booking_id
        if at_ms >= self._last_due_ms.get(clock, 0):
            self._last_due_ms[clock] = at_ms
            self._due.setdefault(clock, OrderedDict())[booking_id] = at_ms
            return
        if self._n_expiries >= max(_EXPIRIES_KEPT, 2 * len(self._states)):  # most bookings of them have ended
            self._expiries.clear()
            for known, each in self._states.items():
                if each.expires_ms is not None and known not in self._due.get(each.clock, {}):
                    self._expiries.setdefault(each.clock, []).append((each.expires_ms, known))
            for expiries in self._expiries.values():
                heapq.heapify(expiries)
            self._n_expiries = sum(map(len, self._expiries.values()))
        heapq.heappush(self._expiries.setdefault(clock, []), (at_ms, booking_id))
        self._n_expiries += 1

    def _count(self, state: _State) -> None:
        booking = state.booking
        assert booking is not None
        row = self._rows.get(booking.rank) or self._new_row(booking.rank)
        forecast = booking.forecast
        # Generated tokens show that the prompt was computed. Without a forecast only a report of that counts.
        prefilled = state.prefilled or (booking.output_blocks > 0 and forecast.prefill_us > 0)
        state.counted_prefill = 0 if prefilled else booking.prefill_tokens
        if forecast.prefill_us or self.observations is not None:
            timed = TimedBooking(state.booking_id, row, state.since_ms, forecast, booking.prefill_tokens)
            timed.prefilled_ms = state.prefilled_ms
            state.timed = timed
            self.times.count(timed, waiting=not prefilled and forecast.prefill_us > 0)
        if state.prefilled:
            self.times.note_prefilled(row, state.prefilled_ms)
        state.node, n_fresh = self._prefixes.add(row, booking.sequence)
        self._n_bytes += _active_bytes(booking)
        cells, n_rows = self._cells, self._n_rows
        cells[_PREFILL * n_rows + row] += state.counted_prefill
        cells[_DECODE * n_rows + row] += n_fresh + booking.output_blocks
        cells[_REQUESTS * n_rows + row] += 1
        cells[_OUTPUT * n_rows + row] += booking.output_blocks

    def _uncount(self, state: _State) -> None:
        booking = state.booking
        assert booking is not None
        if state.timed is not None:
            self.times.uncount(state.timed)
            state.timed = None
        if state.node is None:  # it was over, and is not counted any more
            return
        row = self._rows[booking.rank]
        n_ended = self._prefixes.remove(row, state.node)
        state.node = None
        self._n_bytes -= _active_bytes(booking)
        cells, n_rows = self._cells, self._n_rows
        cells[_PREFILL * n_rows + row] -= state.counted_prefill
        cells[_DECODE * n_rows + row] -= n_ended + booking.output_blocks
        cells[_REQUESTS * n_rows + row] -= 1
        cells[_OUTPUT * n_rows + row] -= booking.output_blocks

    def _set_table(self, loads: Int64Array) -> None:
        self._loads = loads
        # The same numbers as one row: changing a number through the array takes five times as long.
        self._cells: memoryview = loads.reshape(-1).data
        self._n_rows: int = loads.shape[1]

    def _new_row(self, rank: RankId) -> int:
        """Give a rank a row. When all are taken, those of ranks without bookings are reused."""
        self._numbering += 1  # the rank had row 0
        n_rows = self._n_rows
        if len(self._rows) + 1 >= n_rows:
            idle = [each for each, row in self._rows.items() if not self._loads[_REQUESTS, row]]
            for each in idle:
                del self._rows[each]
            if idle:
                self._has_gaps = True
                if self._plain is not None:
                    self._plain.ranks_removed()
            if len(self._rows) * 2 >= n_rows:
                self._set_table(np.concatenate([self._loads, np.zeros_like(self._loads)], axis=1))
                self.times.grow(self._n_rows)
                if self._plain is not None:  # before any kernel changes a load
                    self._plain.set_tables(self._loads, self.times.table[PREFILLED_MS])
        row = len(self._rows) + 1
        if self._has_gaps:
            taken = set(self._rows.values())
            row = next(number for number in range(1, self._n_rows) if number not in taken)
            self._has_gaps = max(taken, default=0) > len(taken)
        self._rows[rank] = row
        self.times.clear_row(row)
        return row

    def _observe_output(self, state: _State, booking: Booking, now_ms: int, *, ended: bool) -> None:
        """Note how long a request has generated tokens; -1 if it is not known since when."""
        if self.observations is not None:
            row = self._rows.get(booking.rank, 0)
            took_ms = max(0, now_ms - state.prefilled_ms) if state.prefilled_ms else -1
            prefills_ms = max(0, self.times.computed_us(row) - state.computed_us) / 1000.0
            n_active = self._cells[_DECODE * self._n_rows + row]
            self.observations.append(
                OutputObserved(
                    booking.rank, booking.model, booking.output_blocks, took_ms, n_active, ended, prefills_ms
                )
            )

    def _end(self, booking_id: BookingId, state: _State) -> None:
        if state.live:
            self._uncount(state)
            self._forget_live(booking_id)
            self.n_falls += 1
        del self._states[booking_id]
        due = self._due.get(state.clock)
        if due:
            due.pop(booking_id, None)
        self._forget_phase(state)
        self._n_bytes -= _known_bytes(booking_id)
        if self._known_by_request[booking_id.request_id] == 1:
            del self._known_by_request[booking_id.request_id]
            if self._plain is not None:
                self._plain.note(state.request, known=False)
        else:
            self._known_by_request[booking_id.request_id] -= 1

    def _phase_of(self, booking_id: BookingId) -> str | None:
        return self._states[booking_id].phase

    def _forget_phase(self, state: _State) -> None:
        if state.phase is not None:
            known = state.booking_id.request_id, state.phase
            self._known_by_phase[known] -= 1
            if not self._known_by_phase[known]:
                del self._known_by_phase[known]

    def _forget_live(self, booking_id: BookingId) -> None:
        ids = self._live_by_request[booking_id.request_id]
        ids.remove(booking_id)
        if not ids:
            del self._live_by_request[booking_id.request_id]

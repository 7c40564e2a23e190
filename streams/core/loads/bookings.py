"""Active load: what the requests under way cost each rank (docs/architecture.md, Loads).

What lives here: bookings and their three phases, folded in any order and any number of times into the same loads.
What must not: Kafka, clocks. Owner of the state: one router. Blocks shared on a rank count once; a booking lives while
it has an add and no free; free implies prefill-complete.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streams.core.ids import Int64Array, RankId
from streams.core.loads.active_prefixes import ActivePrefixes, PrefixNode
from streams.errors import IndexCorrupt

#: What an ActiveLoads' array holds of each rank, and for how many ranks at first.
_PREFILL, _DECODE, _REQUESTS, _OUTPUT = range(4)
_ROWS_FIRST = 64

#: Prefixes in use by sets of ranks, of which it is kept how many blocks each row has of them: a system prompt's set
#: changes seldom. Beyond it all are forgotten.
_SHARED_KEPT_MAX = 256

#: Bookings remembered at once; beyond it the oldest is dropped and counted, since a router that runs out of memory
#: serves nobody. A fleet of 1,000 ranks with 256 running requests each stays below it.
BOOKINGS_MAX = 1_000_000


class BookingId(NamedTuple):
    """A request id, the router that booked it and that router's own count: a retry is a new booking of one id."""

    request_id: str
    router_id: str
    counter: int


class BookingPhase(enum.StrEnum):
    """What happened to a booking; the names are on Kafka."""

    ADD = "add"
    PREFILL = "prefill"
    FREE = "free"


class Booking(NamedTuple):
    """What a request costs its rank; a tuple, since one is made in every decision.

    sequence: the request's sequence hashes from the root, packed u64 as of hashing.pack_hashes, so that shared blocks
    count once.
    prefill_tokens: those that the rank must compute. output_blocks: blocks of generated tokens so far.
    """

    rank: RankId
    model: str
    prefill_tokens: int
    sequence: bytes
    overlap_blocks: int
    request_blocks: int
    expected_output_tokens: int | None = None
    output_blocks: int = 0


def with_output(booking: Booking, output_tokens: int, block_size: int) -> Booking:
    """A booking with the blocks that so many generated tokens take, a last one that is not full included.

    output_tokens: all so far, so that it may be told again, and late. Gives the same booking where they fill no more
    blocks than it has.
    """
    output_blocks = -(-output_tokens // block_size)
    return booking if output_blocks <= booking.output_blocks else booking._replace(output_blocks=output_blocks)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Sum over one rank's live bookings. prompt_blocks: distinct ones."""

    prefill_tokens: int = 0
    output_blocks: int = 0
    requests: int = 0
    prompt_blocks: int = 0

    @property
    def decode_blocks(self) -> int:
        """Distinct prompt blocks in use, and generated ones."""
        return self.prompt_blocks + self.output_blocks


_NO_LOAD = RankLoad()


class LoadColumns(NamedTuple):
    """Loads of several ranks, int64[n] each. decode_blocks: with the blocks of the request that was asked for."""

    prefill_tokens: Int64Array
    decode_blocks: Int64Array
    requests: Int64Array


@dataclass(slots=True)
class _State:
    booking: Booking | None = None
    prefilled: bool = False
    freed: bool = False
    counted_prefill: int = 0
    clock: int = 0
    expires_ms: int | None = None  # None as long as no time of it is known
    node: PrefixNode | None = None  # its end in the tree of active prefixes, while it is counted

    @property
    def live(self) -> bool:
        return self.booking is not None and not self.freed


class ActiveLoads:
    """All bookings that this router knows, its own and its peers'.

    What ends a booking that nobody frees is a clock, of which there may be several that have nothing in common: each
    partition of a log has one, its newest record's append time. A booking belongs to one of them. at_ms is a time of
    that clock, None where the log does not have the word yet: a booking without any time does not expire by itself.
    """

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._states: dict[BookingId, _State] = {}  # the one told of last is the last
        # A heap for each clock: an entry for each state with a time, never later than it expires. The order of the
        # states is none of expiry: a router that starts reads one partition's last hour after another's.
        self._expiries: dict[int, list[tuple[int, BookingId]]] = {}
        self._n_expiries = 0
        self._live_by_request: dict[str, list[BookingId]] = {}
        self._known_by_request: Counter[str] = Counter()
        # Loads by row: _PREFILL tokens, _DECODE blocks, _REQUESTS and, of the blocks, those of _OUTPUT. Row 0 is of
        # all ranks without bookings: nothing is ever counted there.
        self._rows: dict[RankId, int] = {}
        self._set_table(np.zeros((4, _ROWS_FIRST), dtype=np.int64))
        self._numbering = 0  # changes when a row may have gone to another rank
        self._prefixes = ActivePrefixes()
        self.expired = 0
        self.dropped = 0

    def add(self, booking_id: BookingId, booking: Booking, at_ms: int | None, clock: int = 0) -> None:
        """Book, or state an older booking anew (its output grew, or it is kept alive).

        at_ms: append time of the record; of two adds of one booking the later one's time counts for expiry.
        """
        state = self._state(booking_id, at_ms, clock)
        if state.live:
            self._uncount(state)
        elif not state.freed:
            self._live_by_request.setdefault(booking_id.request_id, []).append(booking_id)
        state.booking = booking
        if state.live:
            self._count(state)

    def prefill_complete(self, booking_id: BookingId, at_ms: int | None, clock: int = 0) -> None:
        """The rank computed the prompt: its prefill tokens weigh no more."""
        state = self._state(booking_id, at_ms, clock)
        if state.live and not state.prefilled:
            assert state.booking is not None
            self._cells[_PREFILL * self._n_rows + self._rows[state.booking.rank]] -= state.counted_prefill
            state.counted_prefill = 0
        state.prefilled = True

    def free(self, booking_id: BookingId, at_ms: int | None, clock: int = 0) -> None:
        """The request is over, however it ended. Stays known until it expires, so that a late add changes nothing."""
        state = self._state(booking_id, at_ms, clock)
        if state.live:
            self._uncount(state)
            self._forget_live(booking_id)
        state.freed = True

    def logged(self, booking_id: BookingId, booking: Booking, at_ms: int, clock: int = 0) -> bool:
        """The log has this add; False, and nothing is changed, where the booking is not known to be just so."""
        state = self._states.get(booking_id)
        if state is None or state.booking != booking:
            return False
        self._state(booking_id, at_ms, clock)
        return True

    def forget(self, booking_id: BookingId) -> None:
        """End a booking as if it had never been; one that is not known is none."""
        state = self._states.get(booking_id)
        if state is not None:
            self._end(booking_id, state)

    def expire(self, now_ms: int, clock: int = 0) -> int:
        """End every booking of this clock whose last word is older than the TTL; gives their number.

        Looks at those only whose first word is as old, or the word at which it was looked at last.
        """
        expiries = self._expiries.get(clock)
        if not expiries or expiries[0][0] > now_ms:
            return 0
        ended = 0
        while expiries and expiries[0][0] <= now_ms:
            booking_id = heapq.heappop(expiries)[1]
            self._n_expiries -= 1
            state = self._states.get(booking_id)
            if state is None or state.expires_ms is None:
                continue  # dropped, and perhaps booked anew since
            if state.expires_ms > now_ms:
                heapq.heappush(expiries, (state.expires_ms, booking_id))
                self._n_expiries += 1
                continue
            self._end(booking_id, state)
            ended += 1
        self.expired += ended
        return ended

    def expiring(self) -> list[int]:
        """Clocks by which anything is still to end."""
        return [clock for clock, expiries in self._expiries.items() if expiries]

    def live(self, request_id: str) -> tuple[BookingId, Booking] | None:
        """The earliest live booking of a request id."""
        ids = self._live_by_request.get(request_id)
        if not ids:
            return None
        booking = self._states[ids[0]].booking
        assert booking is not None
        return ids[0], booking

    def live_ids(self, request_id: str) -> tuple[BookingId, ...]:
        """Every live booking of a request id, the earliest first; there are several where routers booked at once."""
        return tuple(self._live_by_request.get(request_id, ()))

    def booking(self, booking_id: BookingId) -> Booking | None:
        """What is booked under this id; None where it is over or not known."""
        state = self._states.get(booking_id)
        return state.booking if state is not None and state.live else None

    def knows(self, request_id: str) -> bool:
        """Whether any booking of this id is remembered, an ended one too."""
        return request_id in self._known_by_request

    def load(self, rank: RankId) -> RankLoad:
        """A rank's load; all zero for a rank without bookings."""
        row = self._rows.get(rank)
        if row is None:
            return _NO_LOAD
        prefill, decode, requests, output = self._loads[:, row].tolist()
        return RankLoad(prefill, output, requests, decode - output)

    def ranks(self) -> dict[RankId, RankLoad]:
        """Loads of every rank with live bookings."""
        return {rank: self.load(rank) for rank, row in self._rows.items() if self._loads[_REQUESTS, row]}

    @property
    def numbering(self) -> int:
        """Rows of `rows_of` are good as long as this does not change."""
        return self._numbering

    def rows_of(self, ranks: Iterable[RankId]) -> Int64Array:
        """Where the loads of these ranks are, for `columns`."""
        return np.array([self._rows.get(rank, 0) for rank in ranks], dtype=np.int64)

    def columns(self, rows: Int64Array, sequence: bytes) -> LoadColumns:
        """Loads of the ranks at these rows. sequence: that of a request, which may join any of them."""
        prefill, decode, requests, _ = self._loads.take(rows, axis=1)  # a third of what indexing takes
        decode += len(sequence) // 8
        decode -= self.shared_blocks(sequence).take(rows)
        return LoadColumns(prefill, decode, requests)

    def requests(self, rows: Int64Array) -> list[int]:
        """Requests in flight of the ranks at these rows."""
        in_flight: list[int] = self._loads[_REQUESTS].take(rows).tolist()
        return in_flight

    @property
    def table(self) -> Int64Array:
        """Loads by row: int64[4, n_rows], prefill tokens, decode blocks, requests, and of the blocks those of output.

        It is the state itself: nobody else writes there, and it is another one after the next booking.
        """
        return self._loads

    def shared_blocks(self, sequence: bytes) -> Int64Array:
        """How many leading blocks of a request each rank has in use, by row: int64[n_rows], which nobody may change."""
        shared: Int64Array | None = None
        for bits, n_blocks in self._prefixes.match(sequence):
            if bits & (bits - 1):
                these = self._shared_by(bits, n_blocks)
                shared = these if shared is None else shared + these
            else:  # one rank's own, as most long matches are; they are deeper than all that others share
                shared = (self._shared_by_none if shared is None else shared).copy()
                shared[bits.bit_length() - 1] += n_blocks
        return self._shared_by_none if shared is None else shared

    def decode_blocks_with(self, rank: RankId, sequence: bytes) -> int:
        """Distinct active blocks of the rank if a request with this chain joined it."""
        row = self._rows.get(rank, 0)
        shared = sum(n_blocks for bits, n_blocks in self._prefixes.match(sequence) if bits >> row & 1)
        return self.load(rank).decode_blocks + len(sequence) // 8 - shared

    def check(self) -> None:
        """Raise IndexCorrupt, naming the first invariant found broken; for tests and debugging, it takes long."""
        self._prefixes.check()
        prompt = [0] * self._n_rows
        for node in self._prefixes.nodes():
            for row in node.uses:
                prompt[row] += node.n_blocks
        if prompt != (self._loads[_DECODE] - self._loads[_OUTPUT]).tolist():
            raise IndexCorrupt("distinct blocks are miscounted")

    def __len__(self) -> int:
        """Number of bookings remembered, the ended ones that have not expired among them."""
        return len(self._states)

    def _state(self, booking_id: BookingId, at_ms: int | None, clock: int) -> _State:
        state = self._states.pop(booking_id, None)
        if state is None:
            if len(self._states) >= BOOKINGS_MAX:
                oldest = next(iter(self._states))
                self._end(oldest, self._states[oldest])
                self.dropped += 1
            state = _State()
            self._known_by_request[booking_id.request_id] += 1
        if at_ms is not None:
            expires_ms = at_ms + self._ttl_ms
            if state.expires_ms is None:
                state.clock, state.expires_ms = clock, expires_ms
                self._remember_expiry(clock, booking_id, expires_ms)
            elif expires_ms > state.expires_ms:
                state.expires_ms = expires_ms
        self._states[booking_id] = state
        return state

    def _remember_expiry(self, clock: int, booking_id: BookingId, expires_ms: int) -> None:
        if self._n_expiries >= 2 * BOOKINGS_MAX:  # mostly of bookings that were dropped
            self._expiries.clear()
            for known, state in self._states.items():
                if state.expires_ms is not None:
                    self._expiries.setdefault(state.clock, []).append((state.expires_ms, known))
            for expiries in self._expiries.values():
                heapq.heapify(expiries)
            self._n_expiries = sum(map(len, self._expiries.values()))
        heapq.heappush(self._expiries.setdefault(clock, []), (expires_ms, booking_id))
        self._n_expiries += 1

    def _count(self, state: _State) -> None:
        booking = state.booking
        assert booking is not None
        row = self._rows.get(booking.rank) or self._new_row(booking.rank)
        state.counted_prefill = 0 if state.prefilled else booking.prefill_tokens
        state.node, n_fresh = self._prefixes.add(row, booking.sequence)
        cells, n_rows = self._cells, self._n_rows
        cells[_PREFILL * n_rows + row] += state.counted_prefill
        cells[_DECODE * n_rows + row] += n_fresh + booking.output_blocks
        cells[_REQUESTS * n_rows + row] += 1
        cells[_OUTPUT * n_rows + row] += booking.output_blocks

    def _uncount(self, state: _State) -> None:
        booking = state.booking
        assert booking is not None and state.node is not None
        row = self._rows[booking.rank]
        n_ended = self._prefixes.remove(row, state.node)
        state.node = None
        cells, n_rows = self._cells, self._n_rows
        cells[_PREFILL * n_rows + row] -= state.counted_prefill
        cells[_DECODE * n_rows + row] -= n_ended + booking.output_blocks
        cells[_REQUESTS * n_rows + row] -= 1
        cells[_OUTPUT * n_rows + row] -= booking.output_blocks

    def _set_table(self, loads: Int64Array) -> None:
        self._loads = loads
        # The same numbers in one row: to change one through an array takes five times as long.
        self._cells: memoryview = loads.reshape(-1).data
        self._n_rows: int = loads.shape[1]
        self._shared: dict[tuple[int, int], Int64Array] = {}
        self._shared_by_none = np.zeros(self._n_rows, dtype=np.int64)

    def _shared_by(self, bits: int, n_blocks: int) -> Int64Array:
        """n_blocks at the rows whose bit is set, 0 at all others."""
        shared = self._shared.get((bits, n_blocks))
        if shared is None:
            if len(self._shared) >= _SHARED_KEPT_MAX:
                self._shared.clear()
            packed = np.frombuffer(bits.to_bytes(self._n_rows // 8, "little"), dtype=np.uint8)
            shared = np.unpackbits(packed, bitorder="little") * np.int64(n_blocks)
            self._shared[bits, n_blocks] = shared
        return shared

    def _new_row(self, rank: RankId) -> int:
        """Give a rank a row; when all are taken those of ranks without bookings are given out again."""
        self._numbering += 1  # the rank was at row 0
        n_rows = self._n_rows
        if len(self._rows) + 1 >= n_rows:
            idle = [each for each, row in self._rows.items() if not self._loads[_REQUESTS, row]]
            for each in idle:
                del self._rows[each]
            if len(self._rows) * 2 >= n_rows:
                self._set_table(np.concatenate([self._loads, np.zeros_like(self._loads)], axis=1))
        taken = set(self._rows.values())
        row = len(self._rows) + 1
        if row in taken:
            row = next(number for number in range(1, self._n_rows) if number not in taken)
        self._rows[rank] = row
        return row

    def _end(self, booking_id: BookingId, state: _State) -> None:
        if state.live:
            self._uncount(state)
            self._forget_live(booking_id)
        del self._states[booking_id]
        if self._known_by_request[booking_id.request_id] == 1:
            del self._known_by_request[booking_id.request_id]
        else:
            self._known_by_request[booking_id.request_id] -= 1

    def _forget_live(self, booking_id: BookingId) -> None:
        ids = self._live_by_request[booking_id.request_id]
        ids.remove(booking_id)
        if not ids:
            del self._live_by_request[booking_id.request_id]

"""Active load: what the requests under way cost each rank (docs/architecture.md, Loads).

What lives here: bookings and their three phases, folded in any order and any number of times into the same loads.
What must not: Kafka, clocks. Owner of the state: one router. Blocks shared on a rank count once; a booking lives while
it has an add and no free; free implies prefill-complete.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from streams.core.ids import RankId

#: Bookings remembered at once; beyond it the oldest is dropped and counted, since a router that runs out of memory
#: serves nobody. A fleet of 1,000 ranks with 256 running requests each stays below it.
BOOKINGS_MAX = 1_000_000


class BookingId(NamedTuple):
    """A request id, the router that booked it and that router's own count: a retry is a new booking of one id."""

    request_id: str
    router_id: str
    counter: int


class Phase(enum.StrEnum):
    """What happened to a booking; the names are on Kafka."""

    ADD = "add"
    PREFILL = "prefill"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Booking:
    """What a request costs its rank.

    sequence: the request's sequence hashes from the root, so that shared blocks count once.
    prefill_tokens: those that the rank must compute. output_blocks: blocks of generated tokens so far.
    """

    rank: RankId
    model: str
    prefill_tokens: int
    sequence: tuple[int, ...]
    overlap_blocks: int
    request_blocks: int
    expected_output_tokens: int | None = None
    output_blocks: int = 0


@dataclass(slots=True)
class RankLoad:
    """Sum over one rank's live bookings. blocks: sequence hash to the number of bookings that use it."""

    prefill_tokens: int = 0
    output_blocks: int = 0
    requests: int = 0
    blocks: Counter[int] = field(default_factory=Counter)

    @property
    def decode_blocks(self) -> int:
        """Distinct prompt blocks in use, and generated ones."""
        return len(self.blocks) + self.output_blocks


@dataclass(slots=True)
class _State:
    booking: Booking | None = None
    prefilled: bool = False
    freed: bool = False
    counted_prefill: int = 0
    expires_ms: int = 0

    @property
    def live(self) -> bool:
        return self.booking is not None and not self.freed


class ActiveLoads:
    """All bookings that this router knows, its own and its peers'."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._states: dict[BookingId, _State] = {}  # the one told of last is the last
        # A heap: an entry for each state, never later than it expires. The order of the states is none of expiry, since
        # records come with times of their own: a router that starts reads one partition's last hour after another's.
        self._expiries: list[tuple[int, BookingId]] = []
        self._live_by_request: dict[str, list[BookingId]] = {}
        self._known_by_request: Counter[str] = Counter()
        self._ranks: dict[RankId, RankLoad] = {}
        self.expired = 0
        self.dropped = 0

    def add(self, booking_id: BookingId, booking: Booking, at_ms: int) -> None:
        """Book, or state an older booking anew (its output grew, or it is kept alive).

        at_ms: append time of the record; of two adds of one booking the later one's time counts for expiry.
        """
        state = self._state(booking_id, at_ms)
        if state.live:
            self._uncount(state)
        elif not state.freed:
            self._live_by_request.setdefault(booking_id.request_id, []).append(booking_id)
        state.booking = booking
        if state.live:
            self._count(state)

    def prefill_complete(self, booking_id: BookingId, at_ms: int) -> None:
        """The rank computed the prompt: its prefill tokens weigh no more."""
        state = self._state(booking_id, at_ms)
        if state.live and not state.prefilled:
            assert state.booking is not None
            self._ranks[state.booking.rank].prefill_tokens -= state.counted_prefill
            state.counted_prefill = 0
        state.prefilled = True

    def free(self, booking_id: BookingId, at_ms: int) -> None:
        """The request is over, however it ended. Stays known until it expires, so that a late add changes nothing."""
        state = self._state(booking_id, at_ms)
        if state.live:
            self._uncount(state)
            self._forget_live(booking_id)
        state.freed = True

    def expire(self, now_ms: int) -> int:
        """End every booking whose last word is older than the TTL; gives their number.

        Looks at those only whose first word is as old, or the word at which it was looked at last.
        """
        ended = 0
        while self._expiries and self._expiries[0][0] <= now_ms:
            booking_id = heapq.heappop(self._expiries)[1]
            state = self._states.get(booking_id)
            if state is None:
                continue  # dropped
            if state.expires_ms > now_ms:
                heapq.heappush(self._expiries, (state.expires_ms, booking_id))
                continue
            self._end(booking_id, state)
            ended += 1
        self.expired += ended
        return ended

    def live(self, request_id: str) -> tuple[BookingId, Booking] | None:
        """The earliest live booking of a request id."""
        ids = self._live_by_request.get(request_id)
        if not ids:
            return None
        booking = self._states[ids[0]].booking
        assert booking is not None
        return ids[0], booking

    def knows(self, request_id: str) -> bool:
        """Whether any booking of this id is remembered, an ended one too."""
        return request_id in self._known_by_request

    def load(self, rank: RankId) -> RankLoad:
        """A rank's load; all zero for a rank without bookings."""
        return self._ranks.get(rank) or RankLoad()

    def ranks(self) -> dict[RankId, RankLoad]:
        """Loads of every rank with live bookings."""
        return {rank: load for rank, load in self._ranks.items() if load.requests}

    def decode_blocks_with(self, rank: RankId, sequence: list[int]) -> int:
        """Distinct active blocks of the rank if a request with this chain joined it.

        Every booking counts its whole chain from the root, so what is shared is a prefix and the walk may stop at the
        first block that is not active.
        """
        load = self._ranks.get(rank)
        if load is None:
            return len(sequence)
        shared = 0
        for block in sequence:
            if block not in load.blocks:
                break
            shared += 1
        return load.decode_blocks + len(sequence) - shared

    def __len__(self) -> int:
        """Number of bookings remembered, the ended ones that have not expired among them."""
        return len(self._states)

    def _state(self, booking_id: BookingId, at_ms: int) -> _State:
        state = self._states.pop(booking_id, None)
        if state is None:
            if len(self._states) >= BOOKINGS_MAX:
                oldest = next(iter(self._states))
                self._end(oldest, self._states[oldest])
                self.dropped += 1
            state = _State()
            self._known_by_request[booking_id.request_id] += 1
            self._remember_expiry(booking_id, at_ms + self._ttl_ms)
        state.expires_ms = max(state.expires_ms, at_ms + self._ttl_ms)
        self._states[booking_id] = state
        return state

    def _remember_expiry(self, booking_id: BookingId, expires_ms: int) -> None:
        if len(self._expiries) >= 2 * BOOKINGS_MAX:  # mostly of bookings that were dropped
            self._expiries = [(state.expires_ms, known) for known, state in self._states.items()]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (expires_ms, booking_id))

    def _count(self, state: _State) -> None:
        booking = state.booking
        assert booking is not None
        load = self._ranks.setdefault(booking.rank, RankLoad())
        state.counted_prefill = 0 if state.prefilled else booking.prefill_tokens
        load.prefill_tokens += state.counted_prefill
        load.output_blocks += booking.output_blocks
        load.requests += 1
        load.blocks.update(booking.sequence)

    def _uncount(self, state: _State) -> None:
        booking = state.booking
        assert booking is not None
        load = self._ranks[booking.rank]
        load.prefill_tokens -= state.counted_prefill
        load.output_blocks -= booking.output_blocks
        load.requests -= 1
        if not load.requests:
            del self._ranks[booking.rank]
            return
        blocks = load.blocks
        for block in booking.sequence:
            if blocks[block] == 1:
                del blocks[block]
            else:
                blocks[block] -= 1

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

"""Bookings that have ended, kept until they expire so that a record that arrives late does not start one again.

What lives here: which bookings have ended, in about 50 bytes each. What must not: active bookings and loads (bookings).

A router that serves 3,000 requests per second has 1.8 million ended bookings within the usual TTL of 10 minutes. As
Python objects they would take a gigabyte, and the garbage collector would stop every thread for a second to look at
them. So they are entries of arrays, found by hash.

A hash table with a directory (extendible hashing): each shard is a small table with open addressing, and one that is
full is rebuilt without expired entries, or split in two. No step handles more than SHARD_ENTRIES_MAX entries, so that
no request waits for longer than a millisecond.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from streams.core.ids import Int64Array

#: Entries of a shard, those that have expired included. Rebuilding one of this size takes 1 ms.
SHARD_ENTRIES_MAX = 8192

#: A shard is rebuilt when it is filled to this share, and then has at least twice as many places as entries.
_LOAD_MAX = 0.7
_SHARD_BITS_MIN = 4

#: Ended bookings of one request id. If a client uses an id again and again, the one that expires first is dropped: a
#: late record of it would have to come after this many other bookings of the id.
SAME_ID_MAX = 8

#: Ended bookings kept at once. Beyond this limit the oldest one is dropped and counted. At 3,000 requests per second
#: and with a TTL of 10 minutes there are 1.8 million.
ENDED_MAX = 4_000_000


#: Bits of a request id's hash, by which its bookings are found, and of that of a booking's whole id.
_REQUEST_BITS = 64
_BOOKING_BITS = 32
_REQUEST_MASK = (1 << _REQUEST_BITS) - 1
_BOOKING_MASK = (1 << _BOOKING_BITS) - 1

#: Places of a shard after the last one that a hash can name.
_SHARD_TAIL = 64

#: A place that was never used, and one whose entry was removed. Every time is greater.
_FREE, _REMOVED = 0, -1

_U64Array = npt.NDArray[np.uint64]


class _Times:
    """When the ended bookings of one clock expire, in order: how many are left is exact without looking at them.

    floor_ms: an entry that expires then or earlier has expired.
    """

    __slots__ = ("_first", "_times", "floor_ms")

    def __init__(self) -> None:
        self._times = array("q")
        self._first = 0  # the times before it have passed
        self.floor_ms = _FREE

    def add(self, expires_ms: int) -> None:
        times = self._times
        if not times or times[-1] <= expires_ms:
            times.append(expires_ms)
        else:  # a record that is folded out of order
            insort(times, expires_ms, self._first)

    def remove(self, expires_ms: int) -> None:
        del self._times[bisect_left(self._times, expires_ms, self._first)]

    def expire(self, now_ms: int) -> int:
        self.floor_ms = max(self.floor_ms, now_ms)
        times, first = self._times, self._first
        if first == len(times) or times[first] > now_ms:
            return 0
        self._first = bisect_right(times, now_ms, first)
        ended = self._first - first
        if self._first * 2 > len(times):
            self._times, self._first = times[self._first :], 0
        return ended

    def oldest_ms(self) -> int:
        return self._times[self._first]

    def __len__(self) -> int:
        return len(self._times) - self._first


class _Shard:
    """Places. request: hash of the request id. booking: a part of the booking id's hash. Both are the key.

    Places are ordered by the top bits of `request`; an entry whose place is taken is in one of the next ones.
    """

    __slots__ = ("bits", "booking", "clock", "depth", "expires_ms", "n_used", "n_used_max", "phase", "request")

    def __init__(self, depth: int, bits: int) -> None:
        n = (1 << bits) + _SHARD_TAIL
        self.depth = depth
        self.bits = bits
        self.n_used = 0
        self.n_used_max = int(_LOAD_MAX * (1 << bits))
        # Reading one element of a memoryview takes a third of the time of reading one of an array.
        self.request = np.zeros(n, dtype=np.uint64).data
        self.booking = np.zeros(n, dtype=np.uint32).data
        self.expires_ms = np.zeros(n, dtype=np.int64).data
        self.clock = np.zeros(n, dtype=np.int32).data
        self.phase = np.zeros(n, dtype=np.uint8).data

    def entries(self) -> tuple[_U64Array, Int64Array, npt.NDArray[np.int32], *tuple[npt.NDArray[Any], ...]]:
        """The columns as arrays over the same memory: request, expires_ms, clock, and the others."""
        columns = (self.request, self.expires_ms, self.clock, self.booking, self.phase)
        return tuple(np.asarray(column) for column in columns)  # type: ignore[return-value]


class EndedBookings:
    """Which bookings have ended. Times are of one clock per partition of the log, as in ActiveLoads.

    A booking is found by 96 bits of hashes that Python makes anew in each process: with two million entries, one new
    booking in 10^22 is taken for an ended one.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, _Times] = {}
        self._n = 0
        self._phase_numbers: dict[str | None, int] = {}  # there are three phases
        self._clear()

    def _clear(self) -> None:
        self._directory = [_Shard(0, _SHARD_BITS_MIN)]
        self._mask = 0  # which bits of a request's hash are the number of its shard

    def add(
        self, request_id: str, booking_id: tuple[str, str, int], phase: str | None, expires_ms: int, clock: int
    ) -> int:
        """Keep a booking that is not kept yet; return how many others were dropped because there were too many."""
        times = self._clocks.get(clock)
        if times is None:
            times = self._clocks[clock] = _Times()
        if expires_ms <= times.floor_ms:
            return 0  # it has expired already
        dropped = 0
        if self._n >= ENDED_MAX:
            dropped = self._drop_oldest()
            self._n -= dropped
            if expires_ms <= times.floor_ms:
                return dropped  # it would have been among those that were dropped
        times.add(expires_ms)
        self._n += 1
        number = self._phase_numbers.get(phase)
        if number is None:
            number = self._phase_numbers[phase] = len(self._phase_numbers)
        self._put(hash(request_id) & _REQUEST_MASK, hash(booking_id) & _BOOKING_MASK, number, expires_ms, clock)
        return dropped

    def renew(self, request_id: str, booking_id: tuple[str, str, int], expires_ms: int | None) -> bool:
        """Whether a booking has ended. If so, it is kept until the later one of its time and expires_ms."""
        found = self._find(request_id, booking_id)
        if found is None:
            return False
        shard, place = found
        if expires_ms is not None and expires_ms > shard.expires_ms[place]:
            times = self._clocks[shard.clock[place]]
            times.remove(shard.expires_ms[place])
            times.add(expires_ms)
            shard.expires_ms[place] = expires_ms
        return True

    def knows(self, request_id: str, phase: str | None = None) -> bool:
        """Whether any booking of this request id has ended. phase: None stands for every phase."""
        if phase is None:
            return self._find(request_id, None) is not None
        number = self._phase_numbers.get(phase)
        return number is not None and self._find(request_id, None, number) is not None

    def forget(self, request_id: str, booking_id: tuple[str, str, int]) -> bool:
        """Drop a booking as if it had never been made; return False if it is not kept."""
        found = self._find(request_id, booking_id)
        if found is None:
            return False
        shard, place = found
        self._clocks[shard.clock[place]].remove(shard.expires_ms[place])
        shard.expires_ms[place] = _REMOVED
        self._n -= 1
        return True

    def expire(self, now_ms: int, clock: int) -> int:
        """Drop every booking of this clock that expires at now_ms or before; return their number."""
        times = self._clocks.get(clock)
        if times is None:
            return 0
        ended = times.expire(now_ms)
        if ended:
            self._n -= ended
            if not self._n:
                self._clear()  # an idle router gives the memory back
        return ended

    def clocks(self) -> Iterable[int]:
        """Clocks of which any booking is kept."""
        return [clock for clock, times in self._clocks.items() if len(times)]

    def __len__(self) -> int:
        return self._n

    def _find(
        self, request_id: str, booking_id: tuple[str, str, int] | None, phase: int | None = None
    ) -> tuple[_Shard, int] | None:
        """Return the place of an ended booking; of any booking of the request id and phase if booking_id is None."""
        request = hash(request_id) & _REQUEST_MASK
        shard = self._directory[request & self._mask]
        if not shard.n_used:
            return None
        booking = None if booking_id is None else hash(booking_id) & _BOOKING_MASK
        requests, expires_ms = shard.request, shard.expires_ms
        place = request >> (_REQUEST_BITS - shard.bits)
        while (at := expires_ms[place]) != _FREE:
            if (
                requests[place] == request
                and (booking is None or shard.booking[place] == booking)
                and (phase is None or shard.phase[place] == phase)
                and at > self._clocks[shard.clock[place]].floor_ms
            ):
                return shard, place
            place += 1
        return None

    def _put(self, request: int, booking: int, phase: int, expires_ms: int, clock: int) -> None:
        while True:
            shard = self._directory[request & self._mask]
            place = request >> (_REQUEST_BITS - shard.bits)
            same: list[int] | None = None  # places of this request id's other bookings
            requests, all_expire_ms = shard.request, shard.expires_ms
            while (at := all_expire_ms[place]) != _FREE:
                if requests[place] == request and at > self._clocks[shard.clock[place]].floor_ms:
                    same = [place] if same is None else [*same, place]
                place += 1
            if same is not None and len(same) >= SAME_ID_MAX:
                place = min(same, key=shard.expires_ms.__getitem__)
                self._clocks[shard.clock[place]].remove(shard.expires_ms[place])
                shard.n_used -= 1
                self._n -= 1
                break
            if place < len(all_expire_ms) - 1 and shard.n_used <= shard.n_used_max:
                break
            self._make_room(shard, request)
        shard.request[place] = request
        shard.booking[place] = booking
        shard.phase[place] = phase
        shard.expires_ms[place] = expires_ms
        shard.clock[place] = clock
        shard.n_used += 1

    def _alive(self, shard: _Shard) -> npt.NDArray[np.bool_]:
        _, expires_ms, clock, *_ = shard.entries()
        alive = np.zeros(len(expires_ms), dtype=np.bool_)
        for number, times in self._clocks.items():
            alive |= (clock == number) & (expires_ms > times.floor_ms)
        return alive

    def _make_room(self, shard: _Shard, request: int) -> None:
        """Replace a shard by one without expired entries, or by two if it is still large."""
        alive = self._alive(shard)
        columns = [column[alive] for column in shard.entries()]
        if len(columns[0]) * 2 <= SHARD_ENTRIES_MAX:
            self._replace(shard.depth, columns, request)
            return
        depth = shard.depth
        if 1 << depth == len(self._directory):
            self._directory *= 2
            self._mask = len(self._directory) - 1
        upper = (columns[0] >> np.uint64(depth)) & np.uint64(1) != 0
        for half, bit in ((~upper, 0), (upper, 1)):
            name = request & ((1 << depth) - 1) | bit << depth
            self._replace(depth + 1, [column[half] for column in columns], name)

    def _replace(self, depth: int, columns: list[npt.NDArray[Any]], request: int) -> None:
        """Put a new shard with these entries into the directory, for hashes whose `depth` lowest bits are request's."""
        n = len(columns[0])
        bits = max(_SHARD_BITS_MIN, (2 * n - 1).bit_length() if n else 0)
        order = np.argsort(columns[0], kind="stable")
        while True:
            new = _Shard(depth, bits)
            # Linear probing without a loop: in order, each entry is at its own place or after the one before it.
            own = (columns[0][order] >> np.uint64(_REQUEST_BITS - bits)).astype(np.int64)
            steps = np.arange(n)
            places = np.maximum.accumulate(own - steps) + steps
            if not n or places[-1] < (1 << bits) + _SHARD_TAIL - 1:
                break
            bits += 1
        entries: tuple[npt.NDArray[Any], ...] = new.entries()
        for old, column in zip(columns, entries, strict=True):
            column[places] = old[order]
        new.n_used = n
        for index in range(request & ((1 << depth) - 1), len(self._directory), 1 << depth):
            self._directory[index] = new

    def _drop_oldest(self) -> int:
        """Expire the booking that would expire first on the clock with the most bookings, and all of the same time."""
        times = max(self._clocks.values(), key=len)
        return times.expire(times.oldest_ms())

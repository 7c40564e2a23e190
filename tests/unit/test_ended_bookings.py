"""Ended bookings in compact tables give the answers of a plain dictionary."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.loads import ended_bookings as module
from streams.core.loads.bookings import BookingId
from streams.core.loads.ended_bookings import SAME_ID_MAX, EndedBookings
from tests.helpers.invariants import check


def booking(number: int, counter: int = 1) -> BookingId:
    return BookingId(f"r{number}", "router", counter)


def phase_of(each: BookingId) -> str | None:
    return (None, "prefill", "decode")[each.counter]


@dataclass
class Plain:
    """The same as a dictionary: for each booking, when it expires and by which clock."""

    kept: dict[BookingId, tuple[int, int]] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)

    def add(self, each: BookingId, expires_ms: int, clock: int) -> None:
        if expires_ms > self.floors.get(clock, 0):
            self.kept[each] = (expires_ms, clock)

    def renew(self, each: BookingId, expires_ms: int | None) -> bool:
        if each not in self.kept:
            return False
        if expires_ms is not None:
            known, clock = self.kept[each]
            self.kept[each] = (max(known, expires_ms), clock)
        return True

    def expire(self, now_ms: int, clock: int) -> int:
        due = [each for each, (expires_ms, of) in self.kept.items() if of == clock and expires_ms <= now_ms]
        for each in due:
            del self.kept[each]
        self.floors[clock] = max(now_ms, self.floors.get(clock, 0))
        return len(due)


@given(seed=st.integers(0, 2**32 - 1), n_ids=st.sampled_from([3, 40, 3000]))
@settings(max_examples=60, deadline=None)
def test_the_tables_keep_what_a_dictionary_keeps(seed: int, n_ids: int) -> None:
    """Bookings that end, are renewed, forgotten and expire, by several clocks, some of them out of order."""
    rng = random.Random(seed)
    plain, compact = Plain(), EndedBookings()
    now_ms = dict.fromkeys(range(3), 1)
    for _ in range(1500):
        number = rng.randrange(n_ids)
        each, clock = booking(number, rng.randrange(3)), number % 3
        expires_ms = now_ms[clock] + rng.choice([500, 500, 500, 480, 100, 1])
        match rng.randrange(8):
            case 0:
                assert compact.forget(each.request_id, each) == (plain.kept.pop(each, None) is not None)
            case 1:
                now_ms[clock] += rng.choice([0, 1, 30, 400])
                assert compact.expire(now_ms[clock], clock) == plain.expire(now_ms[clock], clock)
            case 2:
                later = rng.choice([None, expires_ms, expires_ms + 100])
                assert compact.renew(each.request_id, each, later) == plain.renew(each, later)
            case _:
                assert compact.renew(each.request_id, each, None) == (each in plain.kept)
                if each not in plain.kept:
                    plain.add(each, expires_ms, clock)
                    assert compact.add(each.request_id, each, phase_of(each), expires_ms, clock) == 0
        assert len(compact) == len(plain.kept)
    check(compact)
    names = {each.request_id for each in plain.kept}
    of_phase = {(each.request_id, phase_of(each)) for each in plain.kept}
    for number in range(n_ids):
        assert compact.knows(f"r{number}") == (f"r{number}" in names)
        for phase in ("prefill", "decode"):
            assert compact.knows(f"r{number}", phase) == ((f"r{number}", phase) in of_phase)
    assert set(compact.clocks()) == {clock for _, clock in plain.kept.values()}


def test_many_bookings_are_found_and_expire_in_their_order() -> None:
    """Tables split as they grow, and expired entries make place for new ones."""
    n, ttl_ms = 60_000, 20_000
    ended = EndedBookings()
    for number in range(n):
        each = booking(number)
        assert not ended.renew(each.request_id, each, None)
        ended.add(each.request_id, each, None, number + ttl_ms, number % 4)
        for clock in range(4):
            ended.expire(number, clock)
    assert len(ended) == ttl_ms
    check(ended)
    assert len(ended._directory) < 64
    for number in range(0, n, 7):
        assert ended.knows(f"r{number}") == (number >= n - ttl_ms)
    for clock in range(4):
        ended.expire(n + ttl_ms, clock)
    assert (len(ended), list(ended.clocks()), len(ended._directory)) == (0, [], 1)


def test_an_id_that_is_used_again_and_again_keeps_its_last_bookings() -> None:
    """One request id fills neither memory nor a row of places; its newest bookings are the ones that are kept."""
    ended = EndedBookings()
    for counter in range(20_000):
        each = booking(1, counter)
        ended.add(each.request_id, each, None, 1000 + counter, 0)
        assert len(ended) <= SAME_ID_MAX
    kept = [counter for counter in range(20_000) if ended.renew("r1", booking(1, counter), None)]
    assert kept == list(range(20_000 - SAME_ID_MAX, 20_000))
    check(ended)


def test_beyond_the_limit_the_first_to_expire_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest booking makes place for a new one, and is counted."""
    monkeypatch.setattr(module, "ENDED_MAX", 100)
    ended = EndedBookings()
    dropped = sum(ended.add(f"r{number}", booking(number), None, 1000 + number, 0) for number in range(150))
    assert (len(ended), dropped) == (100, 50)
    assert [number for number in range(150) if ended.knows(f"r{number}")] == list(range(50, 150))


def test_an_ended_booking_takes_about_fifty_bytes() -> None:
    """With many bookings, neither half-empty tables nor the lists of times take much more than the entries."""
    n = 50_000
    ids = [booking(number) for number in range(n)]
    tracemalloc.start()
    try:
        ended = EndedBookings()
        for at_ms, each in enumerate(ids):
            ended.add(each.request_id, each, None, at_ms + 1000, 0)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(ended) == n
    assert 30 * n < taken < 100 * n

"""Active loads: bookings folded in any order and any number of times give the same loads."""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes, unpack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads import bookings as loads_module
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId, BookingPhase, with_output
from streams.core.loads.load_table import ActiveRankLoad
from streams.core.loads.observations import NO_FORECAST, Forecast
from tests.helpers.invariants import check, decode_blocks_with
from tests.helpers.reference import chain_hashes

TTL_MS = 1000
A, B = RankId(WorkerId(1), DpRank(0)), RankId(WorkerId(1), DpRank(1))

BookingEvent = tuple[BookingId, BookingPhase, Booking | None]


def request(name: str, counter: int = 1, router: str = "router") -> BookingId:
    return BookingId(name, router, counter)


def booking(rank: RankId = A, n_blocks: int = 3, *, tokens: int = 48, output: int = 0, branch: int = 0) -> Booking:
    """A booking of the blocks 1, 2, 3, ...; if `branch` is given, the contents differ from that block on."""
    local = [number if not branch or number < branch else number + 1000 for number in range(1, n_blocks + 1)]
    return Booking(rank, "m", tokens, pack_hashes(chain_hashes(local)), 0, n_blocks, None, output)


def apply(loads: ActiveLoads, event: BookingEvent, at_ms: int = 0) -> None:
    booking_id, phase, carried = event
    if phase is BookingPhase.ADD:
        assert carried is not None
        loads.add(booking_id, carried, at_ms)
    elif phase is BookingPhase.PREFILL:
        loads.prefill_complete(booking_id, at_ms)
    else:
        loads.free(booking_id, at_ms)


def events_of(booking_id: BookingId, carried: Booking, *phases: BookingPhase) -> list[BookingEvent]:
    return [(booking_id, phase, carried if phase is BookingPhase.ADD else None) for phase in phases]


def loads_after(order: list[BookingEvent]) -> ActiveLoads:
    loads = ActiveLoads(TTL_MS)
    for event in order:
        apply(loads, event)
    return loads


def seen(loads: ActiveLoads) -> dict[RankId, tuple[int, int, int, int]]:
    check(loads)
    return {
        rank: (load.prefill_tokens, load.output_blocks, load.requests, load.prompt_blocks)
        for rank, load in loads.ranks().items()
    }


def by_brute_force(events: list[BookingEvent]) -> dict[RankId, tuple[int, int, int, int]]:
    """The loads of the bookings that have an add and no free; if a booking has several adds, the last one is used."""
    return {rank: (*sums, len(active_blocks(events)[rank])) for rank, sums in _sums(events).items()}


def _live(events: list[BookingEvent]) -> Iterator[tuple[BookingId, Booking]]:
    added = {booking_id: carried for booking_id, _, carried in events if carried is not None}
    freed = {booking_id for booking_id, phase, _ in events if phase is BookingPhase.FREE}
    return ((booking_id, carried) for booking_id, carried in added.items() if booking_id not in freed)


def active_blocks(events: list[BookingEvent]) -> dict[RankId, set[int]]:
    blocks: dict[RankId, set[int]] = {}
    for _, carried in _live(events):
        blocks.setdefault(carried.rank, set()).update(unpack_hashes(carried.sequence).tolist())
    return blocks


def _sums(events: list[BookingEvent]) -> dict[RankId, tuple[int, int, int]]:
    prefilled = {booking_id for booking_id, phase, _ in events if phase is BookingPhase.PREFILL}
    sums: dict[RankId, tuple[int, int, int]] = {}
    for booking_id, carried in _live(events):
        tokens, output, requests = sums.get(carried.rank, (0, 0, 0))
        tokens += 0 if booking_id in prefilled else carried.prefill_tokens
        sums[carried.rank] = (tokens, output + carried.output_blocks, requests + 1)
    return sums


ALL_PHASES = (BookingPhase.ADD, BookingPhase.PREFILL, BookingPhase.FREE)


@pytest.mark.parametrize("n_phases", [1, 2, 3])
def test_phases_of_two_requests_in_any_order_give_the_same_loads(n_phases: int) -> None:
    """Every order of the records of two requests gives the same loads, including orders in which a free comes first."""
    events = events_of(request("r1"), booking(), *ALL_PHASES[:n_phases])
    events += events_of(request("r2"), booking(B if n_phases == 2 else A, 5, branch=3), *ALL_PHASES[: 4 - n_phases])
    expected = by_brute_force(events)
    for order in itertools.permutations(events):
        assert seen(loads_after(list(order))) == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_records_in_any_order_and_repeated_give_the_same_loads(seed: int) -> None:
    """Shuffled and repeated records of several routers, with ids booked twice, give the loads of brute force."""
    rng = random.Random(seed)
    events: list[BookingEvent] = []
    for number in range(rng.randint(1, 12)):
        booking_id = request(f"r{number // 2}", number, rng.choice("xy"))
        carried = booking(
            rng.choice((A, B)),
            rng.randint(0, 6),
            tokens=rng.randint(0, 99),
            output=rng.randint(0, 3),
            branch=rng.randint(0, 6),
        )
        events += events_of(booking_id, carried, *rng.sample(ALL_PHASES, rng.randint(1, 3)))
    expected = by_brute_force(events)
    order = events + rng.choices(events, k=rng.randint(0, 10))
    rng.shuffle(order)
    loads = loads_after(order)
    assert seen(loads) == expected
    asked = booking(A, rng.randint(0, 8), branch=rng.randint(0, 8)).sequence
    columns = loads.columns(loads.rows_of((A, B)), asked)
    for index, rank in enumerate((A, B)):
        tokens, output, requests, n_blocks = expected.get(rank, (0, 0, 0, 0))
        joined = len(active_blocks(events).get(rank, set()) | set(unpack_hashes(asked).tolist())) + output
        assert decode_blocks_with(loads, rank, asked) == columns.decode_blocks[index] == joined
        assert (columns.prefill_tokens[index], columns.requests[index]) == (tokens, requests)
        assert loads.load(rank).decode_blocks == n_blocks + output


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_adds_that_grow_a_booking_replace_it(seed: int) -> None:
    """If a booking has several adds, the last one is used, whatever other phases are folded between them."""
    rng = random.Random(seed)
    booking_id = request("r")
    events: list[BookingEvent] = []
    for _ in range(rng.randint(1, 6)):
        carried = booking(rng.choice((A, B)), rng.randint(1, 4), tokens=rng.randint(0, 99), output=rng.randint(0, 3))
        events += events_of(booking_id, carried, BookingPhase.ADD)
    if rng.random() < 0.5:
        events.insert(rng.randint(0, len(events)), (booking_id, BookingPhase.PREFILL, None))
    assert seen(loads_after(events)) == by_brute_force(events)
    events.insert(rng.randint(0, len(events)), (booking_id, BookingPhase.FREE, None))
    assert seen(loads_after(events)) == {}


PHASES = (None, "prefill", "decode")


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    observe=st.booleans(),
    limits=st.sampled_from([{}, {"BOOKINGS_MAX": 3}, {"BOOKINGS_BYTES_MAX": 3000}]),
)
def test_records_of_all_kinds_leave_a_sound_state(seed: int, observe: bool, limits: dict[str, int]) -> None:
    """Records with times that may be absent or out of order, beyond limits and after expiry, leave sums that are those
    of the bookings that are kept."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patched:
        for name, limit in limits.items():
            patched.setattr(loads_module, name, limit)
        loads = ActiveLoads(TTL_MS, observe=observe)
        now_ms = [1_000, 5_000]
        for _ in range(rng.randint(1, 60)):
            clock = rng.randrange(2)
            now_ms[clock] += rng.choice((0, 0, 1, 300))
            at_ms = rng.choice((None, now_ms[clock], now_ms[clock], now_ms[clock], now_ms[clock] - 200))
            booking_id = BookingId(f"r{rng.randrange(6)}", rng.choice("xy"), rng.randrange(2))
            carried = booking(
                rng.choice((A, B)), rng.randint(0, 6), tokens=rng.randint(0, 99), branch=rng.randint(0, 6)
            )
            if rng.random() < 0.3:
                forecast = rng.choice((NO_FORECAST, Forecast(2_000, 50, 400), Forecast(0, 0, 300)))
                carried = carried._replace(output_blocks=rng.randint(0, 3), phase=rng.choice(PHASES), forecast=forecast)
            match rng.choice(("add", "add", "add", "prefill", "free", "free", "expire", "advance", "forget")):
                case "add":
                    loads.add(booking_id, carried, at_ms, clock)
                case "prefill":
                    loads.prefill_complete(booking_id, at_ms, clock)
                case "free":
                    loads.free(booking_id, at_ms, clock)
                case "expire":
                    loads.expire(now_ms[clock], clock)
                case "advance":
                    loads.advance(now_ms[clock])
                case "forget":
                    loads.forget(booking_id)
            check(loads)


def test_blocks_shared_on_a_rank_count_once() -> None:
    """A block that several requests share counts once, until the last of them has ended."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request("r1"), booking(A, 3), 0)
    loads.add(request("r2"), booking(A, 5), 0)
    loads.add(request("r3"), booking(B, 5), 0)
    assert (loads.load(A).decode_blocks, loads.load(B).decode_blocks) == (5, 5)
    assert decode_blocks_with(loads, A, booking(A, 7).sequence) == 7
    assert decode_blocks_with(loads, A, booking(A, 7, branch=3).sequence) == 10
    assert decode_blocks_with(loads, RankId(WorkerId(9), DpRank(0)), pack_hashes([1, 2])) == 2
    loads.free(request("r2"), 0)
    assert loads.load(A).decode_blocks == 3
    loads.free(request("r1"), 0)
    assert loads.load(A) == ActiveRankLoad()
    assert loads.ranks().keys() == {B}


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 2), (1, 2), (32, 2), (33, 3), (48, 3), (49, 4)], ids=lambda value: str(value)
)
def test_generated_tokens_fill_blocks(tokens: int, blocks: int) -> None:
    """Output is counted in blocks, including a partial one; a booking never shrinks, and stays the same object if it
    does not grow."""
    carried = booking(output=2)
    grown = with_output(carried, tokens, 16)
    assert grown == carried._replace(output_blocks=blocks)
    assert (grown is carried) == (blocks == 2)
    loads = ActiveLoads(TTL_MS)
    loads.add(request("r"), carried, 0)
    loads.add(request("r"), grown, 0)
    assert loads.booking(request("r")) == grown
    assert loads.load(A) == ActiveRankLoad(48, blocks, 1, 3)
    loads.free(request("r"), 0)
    assert loads.booking(request("r")) is None
    assert loads.booking(request("unknown")) is None


def test_prefill_complete_frees_the_tokens_and_keeps_the_blocks() -> None:
    """A prefill-complete ends the charge for prompt tokens; repeating it, or a later add, does not change that."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request("r1"), booking(tokens=48), 0)
    loads.add(request("r2"), booking(tokens=16), 0)
    for _ in range(2):
        loads.prefill_complete(request("r1"), 0)
        assert (loads.load(A).prefill_tokens, loads.load(A).decode_blocks) == (16, 3)
    loads.add(request("r1"), booking(tokens=48, output=2), 0)
    assert (loads.load(A).prefill_tokens, loads.load(A).decode_blocks) == (16, 5)


@pytest.mark.parametrize("first", [BookingPhase.FREE, BookingPhase.PREFILL])
def test_a_late_add_does_not_revive_a_freed_booking(first: BookingPhase) -> None:
    """An add that follows its free starts no booking, though the id is known; an add that follows its prefill does."""
    loads = ActiveLoads(TTL_MS)
    apply(loads, (request("r"), first, None))
    assert loads.knows("r") and loads.live("r") is None
    loads.add(request("r"), booking(), 0)
    assert (loads.live("r") is None) == (first is BookingPhase.FREE)
    assert loads.load(A).prefill_tokens == 0


def test_the_earliest_active_booking_of_an_id_is_used() -> None:
    """The earliest active booking of an id is returned, and the next one when that has ended."""
    loads = ActiveLoads(TTL_MS)
    first, second = request("r", 1), request("r", 2)
    loads.add(first, booking(A), 0)
    loads.add(second, booking(B), 0)
    loads.add(first, booking(A, output=1), 0)
    assert loads.live("r") == (first, booking(A, output=1))
    loads.free(first, 0)
    assert loads.live("r") == (second, booking(B))
    loads.free(second, 0)
    assert loads.live("r") is None


@pytest.mark.parametrize(("now_ms", "ended"), [(0, 0), (999, 0), (1000, 1), (1499, 1), (1500, 2), (9999, 2)])
def test_a_booking_ends_a_ttl_after_its_last_record(now_ms: int, ended: int) -> None:
    """With records at 0 and 500 and a TTL of 1,000, a booking ends at 1,500."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request("r1"), booking(A), 0)
    loads.add(request("r2"), booking(B), 200)
    loads.prefill_complete(request("r2"), 500)
    assert loads.expire(now_ms) == loads.expired == ended
    assert loads.expire(now_ms) == 0
    assert len(loads) == 2 - ended
    assert loads.ranks().keys() == {rank for rank, end in ((A, 1000), (B, 1500)) if end > now_ms}
    assert loads.knows("r1") == (now_ms < 1000)


def test_a_repeated_add_renews_a_booking() -> None:
    """A repeated add renews a booking from its own time; an older one that is folded late does not shorten it."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request("r"), booking(), 0)
    loads.add(request("r"), booking(), 800)
    loads.add(request("r"), booking(), 100)
    assert loads.expire(1799) == 0
    assert loads.expire(1800) == 1
    assert (loads.ranks(), len(loads), loads.knows("r")) == ({}, 0, False)


def test_a_late_record_of_an_old_booking_expires_in_its_own_time() -> None:
    """A booking expires by its own last record, even if a router reads that record after the newer ones of others."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request("fresh"), booking(A), 900)
    loads.add(request("old"), booking(B), 100)
    loads.prefill_complete(request("old"), 50)
    assert loads.expire(1099) == 0
    assert loads.expire(1100) == 1
    assert loads.ranks().keys() == {A}


@settings(max_examples=60, deadline=None)
@given(records=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(ALL_PHASES), st.integers(0, 3000)), max_size=40))
def test_every_booking_expires_a_ttl_after_its_latest_record(records: list[tuple[int, BookingPhase, int]]) -> None:
    """Whatever the order of the records, exactly the bookings with a record within the TTL are kept."""
    loads = ActiveLoads(TTL_MS)
    last: dict[str, int] = {}
    for number, phase, at_ms in records:
        apply(loads, (request(f"r{number}"), phase, booking() if phase is BookingPhase.ADD else None), at_ms)
        last[f"r{number}"] = max(last.get(f"r{number}", 0), at_ms)
    for now_ms in range(500, 4500, 250):
        loads.expire(now_ms)
        kept = {name for name, at_ms in last.items() if at_ms + TTL_MS > now_ms}
        assert {name for name in last if loads.knows(name)} == kept
        assert len(loads) == len(kept)
    assert loads.ranks() == {}


def test_ended_bookings_expire_as_well() -> None:
    """Ended bookings are dropped after the TTL, and their ids can then be booked again."""
    loads = ActiveLoads(TTL_MS)
    for event in events_of(request("r"), booking(), BookingPhase.FREE, BookingPhase.ADD, BookingPhase.PREFILL):
        apply(loads, event)
    assert loads.expire(TTL_MS) == 1
    assert (len(loads), loads.knows("r")) == (0, False)
    loads.add(request("r"), booking(), TTL_MS)
    assert loads.live("r") is not None


@pytest.mark.parametrize("n_bookings", [3, 4, 5, 9, 60])
def test_beyond_the_limit_the_oldest_booking_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, n_bookings: int
) -> None:
    """With a limit of four, a fifth booking drops the oldest; a further record of a booking makes it the newest."""
    monkeypatch.setattr(loads_module, "BOOKINGS_MAX", 4)
    loads = ActiveLoads(TTL_MS)
    for number in range(n_bookings):
        loads.add(request(f"r{number}"), booking(), number)
        loads.add(request("r0"), booking(), number)
    assert len(loads) == min(n_bookings, 4)
    assert loads.dropped == max(0, n_bookings - 4)
    assert loads.load(A).requests == min(n_bookings, 4)
    kept = {"r0"} | {f"r{number}" for number in range(max(1, n_bookings - 3), n_bookings)}
    assert {f"r{number}" for number in range(n_bookings) if loads.knows(f"r{number}")} == kept
    assert loads.expire(n_bookings - 1 + TTL_MS) == len(kept)
    assert (len(loads), loads.ranks()) == (0, {})


def test_the_limit_suffices_for_a_large_fleet() -> None:
    """A thousand ranks with 256 running requests each stay below the limit."""
    assert loads_module.BOOKINGS_MAX >= 1000 * 256


@pytest.mark.parametrize("forget", [lambda loads: loads.free(request("r"), 0), lambda loads: loads.expire(TTL_MS)])
def test_a_rank_without_bookings_has_no_load_left(forget: Callable[[ActiveLoads], object]) -> None:
    """A booking that moved to another rank leaves no load on either rank once it has ended."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request("r"), booking(A, output=4), 0)
    loads.add(request("r"), booking(B)._replace(prefill_tokens=7), 0)
    assert loads.ranks().keys() == {B}
    forget(loads)
    assert loads.ranks() == {}
    assert loads.load(A) == loads.load(B) == ActiveRankLoad()


def traced_bytes(make: Callable[[], object]) -> int:
    """Bytes of memory that the result of a function takes, as Python counts them.

    Only what streams.core allocates counts: threads of earlier tests may take memory meanwhile.
    """
    make()  # the first call also makes what later ones share
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/streams/core/*")])
        return sum(each.size for each in taken.traces) if made else 0
    finally:
        tracemalloc.stop()


def ended(n: int, n_blocks: int, *, late_add: bool = False) -> ActiveLoads:
    """Loads after n bookings that ended, each with a request id, hashes and records of its own."""
    loads = ActiveLoads(TTL_MS)
    for number in range(n):
        carried = Booking(A, "m", 16, pack_hashes(chain_hashes([number] * n_blocks)), 0, n_blocks)
        phases = (BookingPhase.FREE, BookingPhase.ADD) if late_add else (BookingPhase.ADD, BookingPhase.FREE)
        for phase in phases:
            apply(loads, (request(f"request-{number:032}"), phase, carried if phase is BookingPhase.ADD else None))
    return loads


@pytest.mark.parametrize("late_add", [False, True])
def test_an_ended_booking_keeps_neither_its_id_nor_its_hashes(late_add: bool) -> None:
    """Until it expires, an ended booking takes no more memory than estimated, however long its prompt and its id."""
    n = 2000
    taken = traced_bytes(lambda: ended(n, 512, late_add=late_add))
    assert taken / n < loads_module.ENDED_BOOKING_BYTES * 1.2
    loads = ended(n, 8, late_add=late_add)
    check(loads)
    assert len(loads) == n
    assert loads.n_bytes == n * loads_module.ENDED_BOOKING_BYTES
    assert loads.expire(TTL_MS) == n
    assert loads.n_bytes == 0


def test_the_end_of_a_booking_that_the_log_has_not_given_a_time_is_kept_until_it_has() -> None:
    """A free without a time ends the booking at once; the log's time then decides until when its end is known."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request("r"), booking(), None)
    loads.free(request("r"), None)
    check(loads)
    assert (len(loads), loads.expiring()) == (1, [])
    loads.add(request("r"), booking(), 300, clock=5)
    check(loads)
    assert (loads.live("r"), len(loads), loads.expiring()) == (None, 1, [5])
    loads.free(request("r"), 400, clock=5)
    loads.prefill_complete(request("r"), 350, clock=5)
    assert loads.expire(1399, clock=5) == 0
    assert (loads.expire(1400, clock=5), len(loads), loads.expiring()) == (1, 0, [])
    loads.add(request("s"), booking(), None)
    loads.free(request("s"), 500)
    loads.forget(request("s"))
    assert (len(loads), loads.knows("s")) == (0, False)
    check(loads)


def test_the_end_of_a_booking_becomes_compact_when_the_log_has_it() -> None:
    """Its own router ends a booking without a time; the record of that end, or the TTL of the add, then decides."""
    loads = ActiveLoads(TTL_MS)
    for number, request_id in enumerate(("r", "s")):
        loads.add(request(request_id), booking(), None, is_new=True)
        loads.add(request(request_id), booking(), 100 + number)
        loads.free(request(request_id), None)
    check(loads)
    assert loads.n_bytes > 2 * loads_module.ENDED_BOOKING_BYTES
    loads.free(request("r"), 400)
    loads.add(request("r"), booking(), 150)  # it comes late, and changes nothing
    check(loads)
    assert (loads.live("r"), loads.knows("r"), loads.load(A).requests) == (None, True, 0)
    assert loads.expire(101 + TTL_MS) == 1  # the end of `s` is not in the log
    assert loads.n_bytes == loads_module.ENDED_BOOKING_BYTES
    assert (loads.expire(400 + TTL_MS), len(loads), loads.n_bytes) == (1, 0, 0)


def test_bookings_of_one_clock_expire_in_their_order_though_their_records_come_in_another() -> None:
    """A starting router reads several partitions at once, and each of its bookings still ends in its own time."""
    loads = ActiveLoads(TTL_MS)
    for number, at_ms in enumerate((500, 100, 300, 900, 200)):
        loads.add(request(f"r{number}"), booking(), at_ms)
    loads.add(request("r1"), booking(), 950)
    for now_ms, left in ((1199, 5), (1200, 4), (1300, 3), (1500, 2), (1900, 1), (1949, 1), (1950, 0)):
        loads.expire(now_ms)
        check(loads)
        assert (len(loads), loads.load(A).requests) == (left, left)


def test_an_active_booking_takes_no_more_memory_than_estimated() -> None:
    """The estimate of active bookings covers their hashes, which are in the booking and in the tree."""
    n, n_blocks = 500, 1000

    def make() -> ActiveLoads:
        loads = ActiveLoads(TTL_MS)
        for number in range(n):
            sequence = pack_hashes(chain_hashes([number] * n_blocks))
            loads.add(request(f"r{number}"), Booking(A, "m", 16, sequence, 0, n_blocks), 0)
        return loads

    taken = traced_bytes(make)
    assert taken < make().n_bytes < 2 * taken


@pytest.mark.parametrize("n_bookings", [3, 4, 5, 12])
def test_beyond_the_limit_of_memory_the_oldest_bookings_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, n_bookings: int
) -> None:
    """With memory for four bookings of 100 blocks, a fifth one drops the oldest; a single one is always kept."""

    def add(loads: ActiveLoads, number: int, n_blocks: int) -> None:
        sequence = pack_hashes(chain_hashes([number] * n_blocks))
        loads.add(request(f"r{number}"), Booking(A, "m", 16, sequence, 0, n_blocks), number)

    first = ActiveLoads(TTL_MS)
    add(first, 0, 100)
    monkeypatch.setattr(loads_module, "BOOKINGS_BYTES_MAX", 4 * first.n_bytes + 40)
    loads = ActiveLoads(TTL_MS)
    for number in range(n_bookings):
        add(loads, number, 100)
        check(loads)
    n_dropped = max(0, n_bookings - 4)
    assert (len(loads), loads.dropped) == (n_bookings - n_dropped, n_dropped)
    assert [loads.knows(f"r{number}") for number in range(n_bookings)] == [n >= n_dropped for n in range(n_bookings)]
    add(loads, 99, 100_000)
    check(loads)
    assert (len(loads), loads.knows("r99")) == (1, True)


def test_the_limit_of_memory_suffices_for_a_large_fleet() -> None:
    """A thousand ranks with 256 running requests of 4,000 tokens each stay below the limit."""
    request_bytes = loads_module.KNOWN_BOOKING_BYTES + loads_module.ACTIVE_BOOKING_BYTES + 36 + 2 * 8 * (4000 // 16)
    assert 1000 * 256 * request_bytes <= loads_module.BOOKINGS_BYTES_MAX

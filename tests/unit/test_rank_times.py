"""Backlogs in milliseconds: the same on every router that reads the same bookings, in whatever order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.hashing import pack_hashes
from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads import rank_times
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId, BookingPhase
from streams.core.loads.observations import LEASE, LEASE_MS, Forecast, OutputObserved, PrefillObserved, Unreported
from streams.core.loads.rank_times import RECENT_PERIOD_MS, RECENT_TOKENS
from streams.core.routing.policies.expected_time import ExpectedTime
from streams.core.routing.policies.interface import Situation
from tests.helpers.invariants import check
from tests.helpers.reference import chain_hashes

RANKS = tuple(RankId(WorkerId(number), DpRank(0)) for number in (1, 2, 3))
TTL_MS = 1 << 40
HUNDRED_MS = Forecast(100_000)
NOTHING = np.zeros(len(RANKS))
NONE = NOTHING.astype(np.int64)


def request(name: object) -> BookingId:
    return BookingId(str(name), "router", 1)


def booking(rank: RankId = RANKS[0], forecast: Forecast = HUNDRED_MS, *, output: int = 0) -> Booking:
    sequence = pack_hashes(chain_hashes([rank.worker_id, 2, 3]))
    return Booking(rank, "m", 48, sequence, 0, 3, output_blocks=output, forecast=forecast)


def backlog_ms(loads: ActiveLoads, now_ms: int, rank: RankId = RANKS[0]) -> float:
    loads.advance(now_ms)
    check(loads)
    return float(loads.backlog_ms(loads.rows_of([rank]), now_ms)[0])


def test_a_backlog_is_what_was_forecast_and_falls_with_time() -> None:
    """Two prompts of 100 ms keep a rank busy for 200 ms from the time of the first one."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request(1), booking(), 1000)
    loads.add(request(2), booking(), 1010)
    assert [backlog_ms(loads, now) for now in (1000, 1050, 1190, 1500)] == [200.0, 150.0, 10.0, 0.0]


def test_a_reported_prefill_restarts_the_time_of_those_that_wait() -> None:
    """The rank begins with the second prompt when the first one is computed, early or late."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request(1), booking(), 1000)
    loads.add(request(2), booking(), 1000)
    loads.prefill_complete(request(1), 1180)
    assert backlog_ms(loads, 1200) == 80.0
    loads.free(request(2), 1200)
    assert backlog_ms(loads, 1200) == 0.0


def test_output_shows_that_a_prompt_was_computed() -> None:
    """A client that reports output but no prefill does not leave its prompt in the backlog."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request(1), booking(), 1000)
    falls = loads.n_falls
    loads.add(request(1), booking(output=1), 1050)
    assert backlog_ms(loads, 1050) == 0.0
    assert loads.load(RANKS[0]).prefill_tokens == 0
    assert loads.n_falls == falls + 1  # or requests that wait in the queue would not hear of it


def test_a_booking_without_reports_counts_as_prefilled_and_then_as_over() -> None:
    """It leaves the backlog, the tokens to prefill, and then all numbers, and can still be found and freed."""
    loads = ActiveLoads(TTL_MS, observe=True)
    loads.add(request(1), booking(forecast=Forecast(100_000, 150, 400)), 1000)
    assert backlog_ms(loads, 1100) == 0.0
    assert loads.load(RANKS[0]).prefill_tokens == 48
    falls = loads.n_falls
    loads.advance(1150)
    assert loads.n_falls == falls + 1
    load = loads.load(RANKS[0])
    assert (load.prefill_tokens, load.requests, load.prompt_blocks) == (0, 1, 3)
    loads.advance(1400)
    check(loads)
    load = loads.load(RANKS[0])
    assert (load.prefill_tokens, load.requests, load.prompt_blocks) == (0, 0, 0)
    assert loads.live("1") is not None
    assert list(loads.observations or ()) == [Unreported(RANKS[0], ended=False), Unreported(RANKS[0], ended=True)]
    loads.prefill_complete(request(1), 1500)
    loads.free(request(1), 1500)
    check(loads)
    assert loads.live("1") is None


def test_a_report_brings_back_a_booking_that_counted_as_over() -> None:
    """A request that generates for longer than forecast counts again when its client reports output."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request(1), booking(forecast=Forecast(100_000, 150, 400)), 1000)
    loads.advance(1500)
    assert loads.load(RANKS[0]).requests == 0
    loads.add(request(1), booking(forecast=Forecast(100_000, 150, 400), output=2), 1500)
    load = loads.load(RANKS[0])
    assert (load.requests, load.output_blocks) == (1, 2)
    check(loads)


def test_a_lease_ends_what_a_booking_counts_for_and_another_add_renews_it() -> None:
    """It changes neither a backlog nor the prompt's tokens; one that has lapsed counts again when it is renewed.

    Policies learn nothing from a lease: it says nothing about clients.
    """
    loads = ActiveLoads(TTL_MS, observe=True)
    leased = booking(forecast=LEASE)
    for since_ms, n_before in ((1000, 0), (1000 + LEASE_MS - 1, 1), (1000 + 3 * LEASE_MS, 0)):
        loads.advance(since_ms)
        assert loads.load(RANKS[0]).requests == n_before
        loads.add(request(1), leased, since_ms)
        assert backlog_ms(loads, since_ms + LEASE_MS - 1) == 0.0
        load = loads.load(RANKS[0])
        assert (load.prefill_tokens, load.requests, load.prompt_blocks) == (48, 1, 3)
    loads.advance(1000 + 4 * LEASE_MS)
    assert loads.load(RANKS[0]).requests == 0 and loads.live("1") is not None
    assert not loads.observations
    check(loads)


def test_a_lease_that_lapsed_before_the_log_had_its_booking_begins_with_the_log() -> None:
    """While Kafka was away, the time was assumed. Other routers know the time of the record only."""
    loads = ActiveLoads(TTL_MS)
    loads.advance(1000)
    loads.add(request(1), booking(forecast=LEASE), None)
    loads.advance(1000 + LEASE_MS)
    assert loads.load(RANKS[0]).requests == 0
    assert loads.logged(request(1), booking(forecast=LEASE), 1000 + LEASE_MS)
    assert loads.load(RANKS[0]).requests == 1
    loads.advance(1000 + 2 * LEASE_MS)
    assert loads.load(RANKS[0]).requests == 0
    check(loads)


def test_the_rank_goes_on_when_a_booking_counts_as_prefilled() -> None:
    """Without any report, the second of two prompts begins when the first one must have ended."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request(1), booking(forecast=Forecast(100_000, 100, 9000)), 1000)
    loads.add(request(2), booking(forecast=Forecast(100_000, 150, 9000)), 1050)
    assert backlog_ms(loads, 1120) == 80.0
    assert backlog_ms(loads, 1200) == 0.0


def test_charges_of_the_queue_add_to_a_backlog_until_they_are_taken_back() -> None:
    """What waits in the queue for a rank counts like what it computes, in tokens and in time."""
    loads = ActiveLoads(TTL_MS)
    loads.add(request(1), booking(), 1000)
    with loads.charged({}, {RANKS[0]: 30.5, RANKS[1]: 1.0}):
        assert backlog_ms(loads, 1000) == 130.5
    assert backlog_ms(loads, 1000) == 100.0


def test_observations_say_how_long_a_rank_worked_on_a_prompt() -> None:
    """Time counts from the booking, or from the completion before it; output counts from the first token.

    A prompt that was booked before that completion continues what the rank was computing.
    """
    loads = ActiveLoads(TTL_MS, observe=True)
    loads.add(request(1), booking(), 1000)
    loads.add(request(2), booking(), 1010)
    loads.prefill_complete(request(1), 1150)
    loads.prefill_complete(request(2), 1210)
    loads.add(request(2), booking(output=4), 1310)
    loads.free(request(2), 1410)
    forecast = HUNDRED_MS
    assert list(loads.observations or ()) == [
        PrefillObserved(RANKS[0], "m", 48, 150, forecast),
        PrefillObserved(RANKS[0], "m", 48, 60, forecast, continues=True),
        OutputObserved(RANKS[0], "m", 4, 100, 7, ended=False),
        OutputObserved(RANKS[0], "m", 4, 200, 7, ended=True),
    ]
    loads.free(request(1), 1450)
    assert loads.observations is not None
    first = loads.observations[-1]
    assert isinstance(first, OutputObserved)
    assert first.prefills_ms == 100.0  # the second prompt was computed in between


def test_ended_bookings_do_not_pile_up_behind_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither heap keeps more than a bounded number of bookings that have ended."""
    monkeypatch.setattr(rank_times, "_STALE_MAX", 100)
    loads = ActiveLoads(TTL_MS)
    loads.add(request("first"), booking(), 1000)
    for number in range(2000):
        loads.add(request(number), booking(forecast=Forecast(1000, 10**9, 10**9)), 1001)
        loads.free(request(number), 1001)
    assert len(loads.times._earliest[1]) <= 2 * rank_times._STALE_WAITING_MAX
    assert len(loads.times._due) <= 102
    check(loads)


@dataclass(frozen=True)
class Story:
    """What the log has of one booking: times of its add, prefill, a second add, and end; 0 for none.

    The second add has output, or renews a lease.
    """

    number: int
    rank: RankId
    forecast: Forecast
    add_ms: int
    prefill_ms: int = 0
    again_ms: int = 0
    free_ms: int = 0

    def records(self, *, compacted: bool) -> list[tuple[BookingPhase, int, Booking | None]]:
        """Its records in the order of the log. A compacted log has only the last add."""
        found: list[tuple[int, BookingPhase, Booking | None]] = []
        if not (compacted and self.again_ms):
            found.append((self.add_ms, BookingPhase.ADD, booking(self.rank, self.forecast)))
        if self.prefill_ms:
            found.append((self.prefill_ms, BookingPhase.PREFILL, None))
        if self.again_ms:
            output = 2 if self.forecast.prefill_us else 0
            found.append((self.again_ms, BookingPhase.ADD, booking(self.rank, self.forecast, output=output)))
        if self.free_ms:
            found.append((self.free_ms, BookingPhase.FREE, None))
        return [(phase, at_ms, carried) for at_ms, phase, carried in sorted(found, key=lambda each: each[0])]


END_MS = 2000


@st.composite
def stories(draw: st.DrawFn) -> list[Story]:
    found = []
    for number in range(draw(st.integers(1, 12))):
        add_ms = draw(st.integers(1000, 1900))
        within = draw(st.sampled_from((0, 50, 200, 5000)))
        over = 0 if not within else within + draw(st.sampled_from((100, 700, 9000)))
        forecast = Forecast(draw(st.integers(1, 400_000)), within, over)
        if draw(st.booleans()):  # a lease
            forecast = Forecast(over_within_ms=draw(st.sampled_from((100, 700, 9000))))
        times = sorted(draw(st.lists(st.integers(add_ms + 1, END_MS), min_size=3, max_size=3, unique=True)))
        reports = draw(
            st.sampled_from(("", "p", "pa", "paf", "pf", "f", *(() if forecast.prefill_us else ("a", "af"))))
        )
        found.append(
            Story(
                number,
                draw(st.sampled_from(RANKS)),
                forecast,
                add_ms,
                times[0] if "p" in reports else 0,
                times[1] if "a" in reports else 0,
                times[2] if "f" in reports else 0,
            )
        )
    return found


def replica(stories: list[Story], seed: int) -> ActiveLoads:
    """Fold the records of some bookings: in a random order that keeps that of each booking, and at random times.

    Bookings do not age beyond the time of records that were not read yet: how far a router lags is how far it differs.
    A booking may be the router's own, which is applied before the log gives it a time, and the log may be compacted.
    """
    rng = random.Random(seed)
    loads = ActiveLoads(TTL_MS)
    left = [(each, each.records(compacted=rng.random() < 0.3)) for each in stories]
    for _, records in left:
        records.reverse()  # the next one is the last
    late = rng.random() < 0.5  # read at once at the end, as a router that starts does
    while left:
        story, records = rng.choice(left)
        phase, at_ms, carried = records.pop()
        booking_id = request(story.number)
        unread_ms = min(at_ms, *(each[1] for _, others in left for each in others), END_MS)
        if not late and rng.random() < 0.7:
            loads.advance(max(unread_ms - rng.randrange(20), loads.times.now_ms))
        if phase is BookingPhase.ADD:
            assert carried is not None
            own = not late and rng.random() < 0.3 and loads.times.now_ms <= at_ms and loads.booking(booking_id) is None
            if own:
                loads.add(booking_id, carried, None)
                if not loads.logged(booking_id, carried, at_ms):
                    loads.add(booking_id, carried, at_ms)
            for _ in range(rng.randrange(1, 3) if not own else 0):
                loads.add(booking_id, carried, at_ms)
        elif phase is BookingPhase.PREFILL:
            loads.prefill_complete(booking_id, at_ms)
        else:
            loads.free(booking_id, at_ms)
        if not records:
            left = [each for each in left if each[1]]
    loads.advance(END_MS)
    check(loads)
    return loads


def by_brute_force(stories: list[Story], rank: RankId) -> tuple[float, int]:
    """A rank's backlog and requests by the definition, without any state."""
    anchor_ms, waiting, n_requests = 0, [], 0
    for each in stories:
        if each.rank != rank:
            continue
        last_add_ms = each.again_ms or each.add_ms
        within, over = each.forecast.prefilled_within_ms, each.forecast.over_within_ms
        aged_ms = each.add_ms + within if within else END_MS + 1
        if each.prefill_ms:
            anchor_ms = max(anchor_ms, each.prefill_ms)
        elif aged_ms <= (each.free_ms or END_MS):
            anchor_ms = max(anchor_ms, aged_ms)
        elif not each.free_ms and each.forecast.prefill_us:
            waiting.append(each)
        if not each.free_ms and not (over and last_add_ms + over <= END_MS):
            n_requests += 1
    if not waiting:
        return 0.0, n_requests
    anchor_ms = max(anchor_ms, min(each.add_ms for each in waiting))
    us = sum(each.forecast.prefill_us for each in waiting)
    return max(0.0, us / 1000.0 - (END_MS - anchor_ms)), n_requests


@settings(max_examples=150, deadline=None)
@given(stories(), st.integers(0, 1 << 30))
def test_routers_that_read_the_same_bookings_in_any_order_price_alike(stories: list[Story], seed: int) -> None:
    """Backlogs, loads and prices are equal, and the backlog is the one of the definition."""
    sequence = pack_hashes(chain_hashes([1, 2, 3, 4]))
    priced = []
    for number in range(4):
        loads = replica(stories, seed + number)
        rows, shared = loads.rows_of(RANKS), loads.shared_blocks(sequence)
        for rank, backlog in zip(RANKS, loads.backlog_ms(rows, END_MS).tolist(), strict=True):
            assert (backlog, loads.load(rank).requests) == by_brute_force(stories, rank)
        prices = ExpectedTime().price(
            Situation(RANKS, rows, loads, NONE, lambda *_: NOTHING, shared, sequence, 4, 64, 16, now_ms=END_MS)
        )
        priced.append([column.tolist() for column in (*prices.terms, prices.costs)])
    assert all(each == priced[0] for each in priced)


@dataclass(frozen=True)
class Given:
    """A booking of so many prompt tokens."""

    rank: RankId
    tokens: int
    at_ms: int


def recent(loads: ActiveLoads) -> list[int]:
    """The tokens that each rank was given lately."""
    found: list[int] = loads.times.table[RECENT_TOKENS].take(loads.rows_of(RANKS)).tolist()
    return found


def given_prompt(loads: ActiveLoads, name: object, prompt: Given) -> None:
    loads.add(request(name), Booking(prompt.rank, "m", prompt.tokens, b"", 0, 3), prompt.at_ms)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(
            Given,
            st.sampled_from(RANKS),
            st.integers(0, 50_000),
            st.integers(0, 12 * RECENT_PERIOD_MS),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 1 << 30),
)
def test_routers_agree_on_what_ranks_computed_lately(prompts: list[Given], seed: int) -> None:
    """In any order, and with records that come again, it is the sum of the definition, within a token per booking."""
    newest = max(prompt.at_ms for prompt in prompts) // RECENT_PERIOD_MS
    expected = [
        sum(
            prompt.tokens / 2 ** (newest - prompt.at_ms // RECENT_PERIOD_MS)
            for prompt in prompts
            if prompt.rank == rank
        )
        for rank in RANKS
    ]
    for number in range(3):
        rng, loads = random.Random(seed + number), ActiveLoads(TTL_MS)
        for name, prompt in rng.sample(list(enumerate(prompts)), len(prompts)):
            for _ in range(rng.randrange(1, 3)):
                given_prompt(loads, name, prompt)
            if rng.random() < 0.5:
                loads.prefill_complete(request(name), prompt.at_ms)
                loads.free(request(name), prompt.at_ms)
                given_prompt(loads, name, prompt)  # it has ended
        assert recent(loads) == pytest.approx(expected, abs=len(prompts))


def test_what_a_rank_computed_counts_half_as_much_in_each_later_period() -> None:
    """A booking in a later period halves the sums of all ranks, and output or a renewal adds nothing."""
    loads = ActiveLoads(TTL_MS)
    given_prompt(loads, 1, Given(RANKS[0], 1_000, 0))
    given_prompt(loads, 2, Given(RANKS[1], 600, RECENT_PERIOD_MS - 1))
    assert recent(loads) == [1_000, 600, 0]
    loads.add(request(1), Booking(RANKS[0], "m", 0, b"", 0, 3, output_blocks=2), RECENT_PERIOD_MS)
    assert recent(loads) == [1_000, 600, 0]
    given_prompt(loads, 3, Given(RANKS[2], 100, RECENT_PERIOD_MS))
    assert recent(loads) == [500, 300, 100]
    given_prompt(loads, 4, Given(RANKS[2], 100, 3 * RECENT_PERIOD_MS))
    assert recent(loads) == [125, 75, 125]
    given_prompt(loads, 5, Given(RANKS[0], 80, 2 * RECENT_PERIOD_MS))  # it was read late
    assert recent(loads) == [165, 75, 125]
    given_prompt(loads, 6, Given(RANKS[0], 7, 1_000 * RECENT_PERIOD_MS))
    assert recent(loads) == [7, 0, 0]


def test_a_clock_that_is_set_back_does_not_end_what_counts_as_lately() -> None:
    """Later bookings count in full again, although the log once had a time far ahead."""
    loads = ActiveLoads(TTL_MS)
    given_prompt(loads, 1, Given(RANKS[0], 1_000, 90 * RECENT_PERIOD_MS))
    loads.advance(90 * RECENT_PERIOD_MS)
    loads.advance(RECENT_PERIOD_MS)
    given_prompt(loads, 2, Given(RANKS[1], 600, RECENT_PERIOD_MS))
    assert recent(loads) == [1_000, 600, 0]


def test_ranks_keep_what_they_computed_lately_however_many_there_are() -> None:
    """Of 200 idle ranks none loses it, and those whose bookings are long ago make room for others."""
    loads = ActiveLoads(TTL_MS)
    ranks = [RankId(WorkerId(number), DpRank(0)) for number in range(200)]
    for n_periods in (0, 1_000, 2_000):
        for rank in ranks:
            given_prompt(loads, (n_periods, rank), Given(rank, 100, n_periods * RECENT_PERIOD_MS))
            loads.free(request((n_periods, rank)), n_periods * RECENT_PERIOD_MS)
        assert set(loads.times.table[RECENT_TOKENS].take(loads.rows_of(ranks)).tolist()) == {100}
        ranks = [RankId(WorkerId(rank.worker_id + 1_000), DpRank(0)) for rank in ranks]
    assert loads.table.shape[1] <= 512


def test_an_end_that_is_assumed_teaches_nothing() -> None:
    """Whether the booking has aged or not, its end is no observation of its client or its engine."""
    loads = ActiveLoads(TTL_MS, observe=True)
    loads.add(request(1), booking(forecast=Forecast(100_000, 150, 400)), 1000)
    loads.add(request(2), booking(forecast=Forecast(100_000, 150, 400)), 1000)
    loads.free(request(1), 1100, is_reported=False)
    assert not loads.observations
    loads.advance(1400)
    aged = list(loads.observations or ())
    loads.free(request(2), 1500, is_reported=False)
    check(loads)
    assert (
        list(loads.observations or ()) == aged == [Unreported(RANKS[0], ended=False), Unreported(RANKS[0], ended=True)]
    )
    assert loads.live("1") is loads.live("2") is None

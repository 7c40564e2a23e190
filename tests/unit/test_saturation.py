"""The signals of a worker pool, from bookings that simulated ranks compute one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.loads.observations import Forecast
from streams.core.loads.rank_times import RECENT_PERIOD_MS
from streams.core.routing.busy import BlocksInUse
from streams.core.routing.saturation import DRAIN_MS, PoolMeter, PoolSignals, Queued, read_pool

RANKS = tuple(RankId(WorkerId(number), DpRank(0)) for number in range(1, 5))
TTL_MS = 1 << 40

#: Tokens of a prompt, and the time in which a rank computes it.
TOKENS, PROMPT_MS = 1000, 100.0
MS_PER_TOKEN = PROMPT_MS / TOKENS

#: Readings until the means have forgotten how a run began.
SETTLED = 90


class Pool:
    """Ranks that compute one prompt after another, and the loads that follow from it.

    readings: the signals, one each `every_ms`. takes: how long a prompt takes, relative to its forecast.
    """

    def __init__(
        self,
        *,
        forecasts: bool = True,
        takes: float = 1.0,
        ms_per_token: float = MS_PER_TOKEN,
        every_ms: float = 2000.0,
        first_ms: float = 0.0,
    ) -> None:
        self.loads = ActiveLoads(TTL_MS)
        self.meter = PoolMeter()
        self.readings: list[PoolSignals] = []
        self.ranks: Sequence[RankId] = RANKS
        self.now_ms = 0.0
        self._forecast = Forecast(int(PROMPT_MS * 1000)) if forecasts else Forecast()
        self._takes_ms = takes * PROMPT_MS
        self._ms_per_token = ms_per_token
        self._every_ms, self._next_ms = every_ms, first_ms
        self._free_ms = dict.fromkeys(RANKS, 0.0)
        self._computed: list[tuple[float, BookingId]] = []  # a heap
        self._n = 0

    def run(self, seconds: float, per_s: float, seed: int = 1) -> PoolSignals:
        """Let prompts arrive at random, each at the rank that is free first; return the last signals."""
        rng, until_ms = np.random.default_rng(seed), self.now_ms + 1000.0 * seconds
        while True:
            at_ms = self.now_ms + float(rng.exponential(1000.0 / per_s)) if per_s else until_ms
            self._advance(min(at_ms, until_ms))
            if at_ms >= until_ms:
                return self.readings[-1]
            self._book(min(self.ranks, key=self._free_ms.__getitem__))

    def _book(self, rank: RankId) -> None:
        self._n += 1
        booking_id = BookingId(f"r{self._n}", "router", self._n)
        self.loads.add(booking_id, Booking(rank, "m", TOKENS, b"", 0, 0, forecast=self._forecast), int(self.now_ms))
        self._free_ms[rank] = max(self._free_ms[rank], self.now_ms) + self._takes_ms
        heapq.heappush(self._computed, (self._free_ms[rank], booking_id))

    def _advance(self, to_ms: float) -> None:
        while min(self._next_ms, self._computed[0][0] if self._computed else np.inf) <= to_ms:
            if self._computed and self._computed[0][0] <= self._next_ms:
                at_ms, booking_id = heapq.heappop(self._computed)
                self.loads.prefill_complete(booking_id, int(at_ms))
                self.loads.free(booking_id, int(at_ms))
            else:
                self._read(self._next_ms)
                self._next_ms += self._every_ms
        self.now_ms = to_ms

    def _read(self, at_ms: float) -> None:
        self.loads.advance(int(at_ms))
        signals = self.meter.note(read_pool(at_ms, self.ranks, self.loads, self._ms_per_token))
        if signals is not None:
            self.readings.append(signals)

    def mean(self, n: int = 30) -> float:
        """The mean saturation of the last readings."""
        return float(np.mean([signals.saturation for signals in self.readings[-n:]]))


def per_s(load: float) -> float:
    """The rate at which prompts need this share of all ranks' time."""
    return load * len(RANKS) * 1000.0 / PROMPT_MS


def test_an_idle_pool_wants_one_replica() -> None:
    """Without requests, nothing is needed and nothing waits."""
    idle = Pool().run(60, 0.0)
    assert idle == PoolSignals(0.0, None, None, 0.0)
    assert idle.replicas_wanted(4, 0.7) == 1.0


@pytest.mark.parametrize("forecasts", [True, False], ids=["expected-time", "kv"])
@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_below_its_capacity_saturation_is_the_share_of_time_that_prompts_need(load: float, forecasts: bool) -> None:
    """With forecasts, and by the time per token where bookings have none."""
    pool = Pool(forecasts=forecasts)
    pool.run(2 * SETTLED, per_s(load))
    assert pool.mean() == pytest.approx(load, abs=0.05)
    signals = PoolSignals(pool.mean(), None, None, 0.0)
    assert signals.replicas_wanted(4, 0.8) == pytest.approx(4 * load / 0.8, rel=0.25) or load < 0.25


@pytest.mark.parametrize("forecasts", [True, False], ids=["expected-time", "kv"])
def test_above_its_capacity_saturation_says_how_much_is_asked_and_that_it_waits(forecasts: bool) -> None:
    """It is at least the load, at once after the load has risen, and grows with the backlog."""
    pool = Pool(forecasts=forecasts)
    pool.run(SETTLED, per_s(0.5))
    after_30_s = pool.run(30, per_s(2.0))
    assert 1.3 < after_30_s.saturation < 2.6
    after_90_s = pool.run(60, per_s(2.0))
    assert after_90_s.saturation > after_30_s.saturation > 1.0
    # Each second brings one more second of work than there is time for it.
    assert after_90_s.backlog_ms == pytest.approx(90_000, rel=0.15)
    assert after_90_s.saturation == pytest.approx(2.0 + 90_000 / DRAIN_MS, rel=0.15)


@pytest.mark.parametrize("forecasts", [True, False], ids=["expected-time", "kv"])
def test_when_the_load_ends_so_does_the_saturation(forecasts: bool) -> None:
    """What arrived before has half its weight after 20 s, and no backlog is left."""
    pool = Pool(forecasts=forecasts)
    before = pool.run(SETTLED, per_s(0.8)).saturation
    after = pool.run(30, 0.0)
    assert after.saturation < 0.45 * before
    assert after.backlog_ms == 0.0


def test_engines_that_are_faster_than_the_setting_are_not_taken_for_saturated() -> None:
    """Ranks that have nothing to compute for half of the time are not saturated, whatever a token is said to take."""
    pool = Pool(forecasts=False, ms_per_token=5 * MS_PER_TOKEN)
    pool.run(2 * SETTLED, per_s(0.5))
    assert pool.mean() < 0.75


def test_a_change_of_the_period_in_which_tokens_count_changes_nothing() -> None:
    """Sums of tokens are halved when a period begins. That is no fall of the load."""
    pool = Pool(forecasts=False)
    pool.run(RECENT_PERIOD_MS / 1000.0 - 40, per_s(0.5))
    before = pool.mean()
    pool.run(60, per_s(0.5), seed=2)
    assert pool.now_ms > RECENT_PERIOD_MS
    assert pool.mean(20) == pytest.approx(before, abs=0.06)


def test_a_rank_that_comes_or_goes_is_not_taken_for_load() -> None:
    """A pool of three ranks that gets a fourth one, and loses it again, has the load of what it is asked to do."""
    pool = Pool(forecasts=False)
    pool.ranks = RANKS[:3]
    pool.run(SETTLED, per_s(0.45))
    of_three = pool.mean(20)
    pool.ranks = RANKS
    pool.run(SETTLED, per_s(0.45), seed=2)
    of_four = pool.mean(20)
    pool.ranks = RANKS[1:]
    pool.run(SETTLED, per_s(0.45), seed=3)
    assert of_three == pytest.approx(0.6, abs=0.07)
    assert of_four == pytest.approx(0.45, abs=0.05)
    assert pool.mean(20) == pytest.approx(0.6, abs=0.07)


def test_routers_that_read_at_different_times_agree() -> None:
    """A router that reads every 2 s and one that reads every 3 s, half a second later, want about the same replicas."""
    one, other = Pool(), Pool(every_ms=3000.0, first_ms=500.0)
    gaps = []
    for load in (0.3, 0.9, 0.6):
        for part in range(8):
            signals = [pool.run(30, per_s(load), seed=part) for pool in (one, other)]
            wanted = [each.replicas_wanted(4, 0.7) for each in signals]
            gaps.append(abs(wanted[0] - wanted[1]) / max(wanted))
    gaps = gaps[3:]  # in the first minute, they have not read for long enough
    assert np.mean(gaps) < 0.03
    assert max(gaps) < 0.1


def test_a_router_that_has_just_started_has_no_signals_until_it_has_seen_what_arrives() -> None:
    """It would show an idle pool, and an autoscaler would stop engines."""
    pool = Pool(forecasts=False)
    pool.run(60, per_s(2.0))
    started = pool.meter = PoolMeter()
    assert started.note(read_pool(pool.now_ms, RANKS, pool.loads, MS_PER_TOKEN)) is None
    pool.readings.clear()
    pool.run(20, per_s(2.0))
    assert len(pool.readings) == 6  # of 10; the other ones were in the first 8 s
    assert pool.readings[0].saturation > 2.0


def test_a_long_pause_between_readings_says_nothing_about_it() -> None:
    """A process that was stopped for an hour does not take what it then reads for the work of two seconds."""
    pool = Pool(forecasts=False)
    pool.run(SETTLED, 0.0)
    pool.loads.add(BookingId("r", "router", 1), Booking(RANKS[0], "m", 100 * TOKENS, b"", 0, 0), int(pool.now_ms))
    pool.loads.prefill_complete(BookingId("r", "router", 1), int(pool.now_ms))
    later = pool.meter.note(read_pool(pool.now_ms + 3_600_000.0, RANKS, pool.loads, MS_PER_TOKEN))
    assert later is not None and later.saturation == 0.0


def signals_of(**given: Any) -> PoolSignals:
    """The signals of a pool in which nothing changes, which has 8 requests of 10 blocks on the first rank."""
    meter = PoolMeter()
    loads = booked(8, 10)
    for at_ms in (0.0, 2000.0, 10_000.0):
        signals = meter.note(read_pool(at_ms, RANKS, loads, MS_PER_TOKEN, **given))
    assert signals is not None
    return signals


def booked(n_requests: int, blocks: int) -> ActiveLoads:
    """Requests on the first rank, each with so many blocks of its own, whose prompts are computed."""
    loads = ActiveLoads(TTL_MS)
    for number in range(n_requests):
        booking_id = BookingId(f"r{number}", "router", number)
        loads.add(booking_id, Booking(RANKS[0], "m", 0, b"", 0, blocks, output_blocks=blocks), 0)
        loads.prefill_complete(booking_id, 0)
    return loads


def test_blocks_and_slots_count_what_is_booked_or_what_engines_report() -> None:
    """Whichever is greater for a rank; ranks whose capacity is not known are left out."""
    total, active = np.array([100, 100, 0, 0]), np.array([20, 30, 500, 0])
    slots, running = np.array([10, 0, 0, 10]), np.array([4, 50, 0, 6])
    signals = signals_of(blocks=BlocksInUse(total, active), slots=slots, running=running)
    assert signals.blocks == pytest.approx((80 + 30) / (0.95 * 200))
    assert signals.slots == pytest.approx((8 + 6) / 20)
    assert signals.saturation == signals.slots


def test_without_reports_and_registered_sizes_only_compute_counts() -> None:
    """What is not known is None, and does not look like an idle engine."""
    assert signals_of(slots=np.zeros(4, dtype=np.int64)) == PoolSignals(0.0, None, None, 0.0)


def test_what_waits_in_routers_counts_as_if_it_were_booked() -> None:
    """Requests that wait need time, blocks and slots, and the next request waits for them."""
    signals = signals_of(
        blocks=BlocksInUse(np.full(4, 100), np.zeros(4, dtype=np.int64)),
        slots=np.full(4, 10),
        queued=Queued(12, 12 * TOKENS, 200),
    )
    assert signals.backlog_ms == pytest.approx(12 * PROMPT_MS / 4)
    assert signals.compute == pytest.approx(12 * PROMPT_MS / 4 / DRAIN_MS)
    assert signals.blocks == pytest.approx(280 / 380)
    assert signals.slots == pytest.approx(20 / 40)


def test_the_wanted_replicas_have_the_target() -> None:
    """They follow from the saturation alone, so that an autoscaler can compute them from the metrics."""
    signals = PoolSignals(0.9, 0.2, None, 0.0)
    assert signals.replicas_wanted(7, 0.7) == pytest.approx(9.0)
    assert PoolSignals(0.1, 1.4, 0.3, 0.0).replicas_wanted(7, 0.7) == pytest.approx(14.0)

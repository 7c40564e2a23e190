"""Which ranks a waiting request may go to: thresholds, charges of those before it, and turns of routers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.index.interface import PrefixScores
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.loads.observations import Forecast
from streams.core.routing.admission import PERIOD_MS, PROPAGATION_MS, SEVERAL_ROUTERS_FACTOR, Gate, is_first
from streams.core.routing.decision import Chooser, Decision
from streams.core.routing.request import RoutePolicy, RoutingRequest
from streams.core.routing.selection import RouterMode
from tests.helpers.routing import routing_request

BLOCK_SIZE = 16
RANKS = tuple(RankId(WorkerId(number), DpRank(0)) for number in range(1, 4))
ONE, TWO, THREE = RANKS
ROUTERS = [f"router-{number}" for number in range(4)]
LIMIT = 1000
#: The limit where there are several routers.
LIMIT_OF_SEVERAL = int(SEVERAL_ROUTERS_FACTOR * LIMIT)


class IdleChooser(Chooser):
    """Leaves out ranks that are busy, as a live router does by its thresholds."""

    def __init__(self, busy: Callable[[], Sequence[RankId]]) -> None:
        super().__init__(random.Random(1))
        self._busy = busy

    def choose(self, request: RoutingRequest, loads: ActiveLoads, now_s: float = 0.0) -> Decision:
        idle = [rank for rank in request.matches.ranks if rank not in self._busy()]
        return super().choose(request._replace(matches=request.matches._replace(ranks=idle)), loads, now_s)


class Fleet:
    """Loads, a chooser and the gate of one router."""

    def __init__(
        self,
        limit: float | None = LIMIT,
        router_id: str = ROUTERS[0],
        busy: Sequence[RankId] = (),
        propagation_tokens: int = 0,
    ) -> None:
        self.loads = ActiveLoads(1 << 40)
        self.busy = list(busy)

        def idle(ranks: Sequence[RankId], _: ActiveLoads) -> Sequence[RankId]:
            return [each for each in ranks if each not in self.busy]

        self.gate = Gate(lambda: router_id, limit, idle, propagation_tokens)
        self._chooser = IdleChooser(lambda: self.busy)
        self._counter = 0

    def book(self, rank: RankId, tokens: int) -> BookingId:
        self._counter += 1
        booking_id = BookingId(f"r{self._counter}", "tests", self._counter)
        self.loads.add(booking_id, Booking(rank, "m", tokens, b"", 0, 1), 0)
        return booking_id

    def decide(self, n_tokens: int = 160, held: dict[RankId, int] | None = None) -> RankId | None:
        """The rank to which a request may go, None if it must wait. held: blocks that ranks hold of it."""

        scores, n_blocks = PrefixScores(held or {}), n_tokens // BLOCK_SIZE
        request = routing_request(
            RoutePolicy(), RANKS, scores, request_blocks=n_blocks, block_size=BLOCK_SIZE, n_tokens=n_tokens
        )
        decision = self.gate.decide(request, self.loads, self._chooser)
        if decision is None:
            return None
        rank = decision.chosen.rank
        self.book(rank, n_tokens)
        self.gate.booked(rank, self.loads)
        return rank


@pytest.mark.parametrize(
    ("backlog", "limit", "goes"), [(1000, LIMIT, True), (1001, LIMIT, False), (1 << 40, None, True)]
)
def test_a_request_waits_while_its_rank_has_too_much_to_compute(backlog: int, limit: float | None, goes: bool) -> None:
    """A rank is closed while more tokens are booked there than the threshold allows; without one it never is."""
    fleet = Fleet(limit)
    for rank in RANKS:
        fleet.book(rank, backlog)
    fleet.gate.begin(0.0, 0.0, ())
    assert (fleet.decide() is not None) == goes


@pytest.mark.parametrize(
    ("backlog", "routers", "goes"),
    [
        (LIMIT_OF_SEVERAL, ROUTERS, True),
        (LIMIT_OF_SEVERAL + 1, ROUTERS, False),
        (LIMIT + 1, ROUTERS, True),
        (LIMIT + 1, ROUTERS[:1], False),
    ],
)
def test_several_routers_have_a_higher_threshold(backlog: int, routers: Sequence[str], goes: bool) -> None:
    """A router that knows others closes a rank later, also to the second request of a pump."""
    fleet = Fleet(busy=(TWO, THREE))
    fleet.book(ONE, backlog)
    fleet.gate.begin(0.0, 0.0, routers)
    assert (fleet.decide(0) is not None) == goes
    fleet.book(ONE, LIMIT_OF_SEVERAL)
    fleet.gate.begin(1.0, 0.0, routers)
    assert fleet.decide(0) is None


def test_a_request_waits_for_the_best_rank_although_another_one_is_open() -> None:
    """A request whose prompt is cached on a closed rank waits for it, if that costs less than going elsewhere."""
    fleet = Fleet()
    fleet.book(ONE, LIMIT + 1)
    fleet.gate.begin(0.0, 0.0, ())
    assert fleet.decide(16_000, {ONE: 900}) is None
    assert fleet.decide(16_000) in (TWO, THREE)


def test_requests_behind_one_that_waits_see_its_charge() -> None:
    """Of many requests whose prompt one closed rank holds, only as many wait for it as is cheaper than moving."""
    fleet = Fleet()
    fleet.book(ONE, LIMIT + 1)
    before = fleet.loads.table.copy()
    fleet.gate.begin(0.0, 0.0, ())
    went = [fleet.decide(1600, {ONE: 90}) for _ in range(6)]
    assert went[0] is None
    assert {TWO, THREE} & set(went)
    fleet.gate.begin(0.0, 0.0, ())
    assert (fleet.loads.table[0, :2] == before[0, :2]).all()  # the charges were only part of the decisions


def test_a_request_does_not_go_before_one_that_waits_for_the_same_rank() -> None:
    """A rank for which an earlier request waits is closed to later ones of the same pump, even if it opens."""
    fleet = Fleet()
    first = fleet.book(ONE, LIMIT + 1)
    fleet.busy = [TWO, THREE]
    fleet.gate.begin(0.0, 0.0, ())
    assert fleet.decide() is None
    fleet.loads.free(first, 0)
    assert fleet.decide() is None
    fleet.gate.begin(5.0, 5.0, ())
    assert fleet.decide() == ONE


def test_a_rank_that_was_filled_in_a_pump_is_closed_for_its_rest() -> None:
    """After a request went to a rank and filled it, the next request waits."""
    fleet = Fleet(busy=(TWO, THREE))
    fleet.gate.begin(0.0, 0.0, ())
    assert [fleet.decide(800), fleet.decide(800), fleet.decide(800)] == [ONE, ONE, None]


def test_busy_ranks_are_closed() -> None:
    """No request goes anywhere while every rank is over a busy threshold, and nothing is chosen."""
    fleet = Fleet(None, busy=RANKS)
    fleet.gate.begin(0.0, 0.0, ())
    assert not fleet.gate.may_go(RANKS, fleet.loads)
    fleet.busy = [ONE, THREE]
    fleet.gate.begin(1.0, 1.0, ())
    assert fleet.decide() == TWO


def opened_after(router_id: str, wait_ms: float, routers: Sequence[str] = ROUTERS, wall_ms: float = 0.0) -> bool:
    """Whether a router may send to a rank, this long after it saw that it has room again."""
    fleet = Fleet(router_id=router_id, busy=(TWO, THREE))
    full = fleet.book(ONE, LIMIT_OF_SEVERAL + 1)
    fleet.gate.begin(0.0, wall_ms, routers)
    assert fleet.decide() is None
    fleet.loads.free(full, 0)
    fleet.gate.begin(10.0, wall_ms, routers)
    if wait_ms == 0.0:
        return fleet.decide() == ONE
    fleet.gate.may_go(RANKS, fleet.loads)
    fleet.gate.begin(10.0 + wait_ms, wall_ms, routers)
    return fleet.decide() == ONE


def test_routers_take_turns() -> None:
    """Exactly one of four routers sends at once to a rank that has room again; after the delay all of them may."""
    at_once = [each for each in ROUTERS if opened_after(each, 0.0)]
    assert at_once == [each for each in ROUTERS if is_first(each, ROUTERS, ONE.worker_id, 0)]
    assert len(at_once) == 1
    assert [each for each in ROUTERS if opened_after(each, PROPAGATION_MS - 1)] == at_once
    assert [each for each in ROUTERS if opened_after(each, PROPAGATION_MS)] == ROUTERS


def test_routers_prefer_the_ranks_for_which_they_are_the_first() -> None:
    """Of ranks with the same load a router takes one for which it is the first, unless another one costs less."""
    first = {rank: next(each for each in ROUTERS if is_first(each, ROUTERS, rank.worker_id, 0)) for rank in RANKS}
    assert len(set(first.values())) > 1
    for router_id in set(first.values()):
        own = {rank for rank in RANKS if first[rank] == router_id}
        other = next(rank for rank in RANKS if rank not in own)
        fleet = Fleet(router_id=router_id, propagation_tokens=320)
        for rank in RANKS:
            fleet.book(rank, 400)
        fleet.gate.begin(0.0, 0.0, ROUTERS)
        assert fleet.decide(1600, {other: 50}) == other
        assert fleet.decide() in own
        assert fleet.loads.load(other).prefill_tokens == 2000  # without any charge


def test_a_router_alone_waits_for_nobody() -> None:
    """A router that knows no other one sends at once, and so does one that is the only one of the list."""
    assert opened_after(ROUTERS[1], 0.0, ())
    assert opened_after(ROUTERS[1], 0.0, [ROUTERS[1]])


def test_each_router_is_the_first_for_a_fair_share_of_periods_and_workers() -> None:
    """Over many periods, and over many workers in one period, each of four routers is the first about equally often."""
    for pairs in ([(1, period) for period in range(400)], [(worker, 0) for worker in range(400)]):
        firsts = Counter(
            each for worker, period in pairs for each in ROUTERS if is_first(each, ROUTERS, WorkerId(worker), period)
        )
        assert firsts.total() == 400
        assert min(firsts.values()) > 60


def test_the_first_router_changes_with_the_period() -> None:
    """The wall clock decides which router is the first."""
    firsts = {
        each for period in range(20) for each in ROUTERS if opened_after(each, 0.0, wall_ms=period * PERIOD_MS + 1.0)
    }
    assert len(firsts) > 1


def test_nothing_is_kept_when_nothing_waits() -> None:
    """After the last request has left, a rank that was closed is open to the next request at once."""
    fleet = Fleet(router_id=next(each for each in ROUTERS if not is_first(each, ROUTERS, ONE.worker_id, 0)))
    fleet.busy = [TWO, THREE]
    full = fleet.book(ONE, LIMIT_OF_SEVERAL + 1)
    fleet.gate.begin(0.0, 0.0, ROUTERS)
    assert fleet.decide() is None
    fleet.loads.free(full, 0)
    fleet.gate.end()
    fleet.gate.begin(1.0, 1.0, ROUTERS)
    assert fleet.decide() == ONE


def test_charges_end_with_their_block() -> None:
    """Charges change what decisions read and nothing else, and end even if the decision fails."""
    fleet = Fleet()
    fleet.book(ONE, 10)
    with fleet.loads.charged({ONE: 5, TWO: 7}):
        assert fleet.loads.load(ONE).prefill_tokens == 15
        assert fleet.loads.load(TWO).prefill_tokens == 0  # without any booking it has no row to charge
    with pytest.raises(ZeroDivisionError), fleet.loads.charged({ONE: 5}):
        _ = 1 // 0
    assert fleet.loads.load(ONE).prefill_tokens == 10


def test_recent_routers_are_those_of_the_last_bookings() -> None:
    """Only the routers of the most recently changed bookings count."""
    loads = ActiveLoads(1 << 40)
    for number, router in enumerate("aabbc"):
        loads.add(BookingId(f"r{number}", router, number), Booking(ONE, "m", 1, b"", 0, 1), 0)
    assert loads.recent_routers(3) == {"b", "c"}
    assert loads.recent_routers(100) == {"a", "b", "c"}


def in_ms(limit_ms: float | None = 200.0, busy_ms: Sequence[int] = (0, 0, 0)) -> tuple[ActiveLoads, Gate]:
    """A gate of policy expected-time, and ranks with backlogs of so many milliseconds at time 1000."""
    loads = ActiveLoads(1 << 40)
    for rank, each in zip(RANKS, busy_ms, strict=True):
        booking = Booking(rank, "m", 100, b"", 0, 7, forecast=Forecast(1 + 1000 * each))
        loads.add(BookingId(f"busy-{rank}", "tests", 1), booking, 1000)
    loads.advance(1000)
    gate = Gate(lambda: ROUTERS[0], None, backlog_ms_max=limit_ms, ms_per_token=lambda: 0.02)
    gate.begin(0.0, 0.0, ())
    return loads, gate


def decide_in_ms(
    loads: ActiveLoads, gate: Gate, held: dict[RankId, int] | None = None, n_tokens: int = 8000
) -> RankId | None:
    request = routing_request(
        RoutePolicy(mode=RouterMode.EXPECTED_TIME),
        RANKS,
        PrefixScores(held or {}),
        request_blocks=n_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        n_tokens=n_tokens,
    )
    decision = gate.decide(request, loads, Chooser(random.Random(1)))
    return None if decision is None else decision.chosen.rank


@pytest.mark.parametrize(("busy_ms", "limit_ms", "goes"), [(199, 200.0, True), (201, 200.0, False), (9000, None, True)])
def test_in_milliseconds_a_request_waits_while_its_rank_is_busy_for_longer(
    busy_ms: int, limit_ms: float | None, goes: bool
) -> None:
    """With expected-time the threshold is a time, and it falls as time passes without any report."""
    loads, gate = in_ms(limit_ms, (busy_ms,) * 3)
    assert (decide_in_ms(loads, gate) is not None) == goes
    loads.advance(1010)
    gate.begin(10.0, 10.0, ())
    assert decide_in_ms(loads, gate) is not None


def test_in_milliseconds_requests_behind_one_that_waits_see_its_charge() -> None:
    """Only as many requests wait for the rank that holds their prompt as is cheaper than moving."""
    loads, gate = in_ms(busy_ms=(300, 0, 0))
    before = loads.times.table.copy()
    went = [decide_in_ms(loads, gate, {ONE: 450}) for _ in range(8)]
    assert went[0] is None
    assert {TWO, THREE} & set(went)
    assert (loads.times.table == before).all()
